"""
Time and peak memory of causal attention over a split sequence on the CPU: the ring and its two alternatives.

    python -m benchmarks.training.ring_attention --out benchmarks/results/ring_attention.md

"one rank" is torch's attention over the whole sequence on rank 0, while the other ranks wait. "gather first" gathers
the keys and values of all ranks, computes the same blocks with the same kernels, and reduces and scatters their
gradients. In a turn each contestant runs a forward and a backward, from a barrier to a barrier; the order is reversed
in every second turn. CPU is the time of all threads of the busiest rank: the time of a step on an otherwise idle
machine, without waiting. Peak memory is the kernel's high-water mark of one such step, with inputs and results.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import ringcomm
from benchmarks.training.step import spread
from ringcomm.context import ring_attention, shard_sequence
from ringcomm.context.blocks import FLASH_CPU, ScoreParams, merge
from ringcomm.context.sequence import Block, block_of

TOLERANCE = 1e-5  # relative to the largest value


class GatherFirst(torch.autograd.Function):
    """The alternative: gathers all keys and values on every rank, then computes the blocks of a zigzag."""

    @staticmethod
    def blocks(comm: ringcomm.Communicator, length: int) -> list[tuple[int, Block]]:
        """Returns the blocks, this rank's own first."""
        found = []
        for source in sorted(range(comm.world_size), key=lambda source: source != comm.rank):
            block = block_of(comm.rank, source, length, True, "zigzag")
            assert block is not None
            found.append((source, block))
        return found

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: ringcomm.Communicator
    ) -> torch.Tensor:
        pair = torch.stack([k, v])
        whole = pair.new_empty((comm.world_size, *pair.shape))
        comm.all_gather(pair, out=whole)
        out = lse = q
        for source, block in GatherFirst.blocks(comm, q.shape[2]):
            keys, values = whole[source][:, :, :, block.keys]
            params = ScoreParams(block.causal, q.shape[-1] ** -0.5)
            part = FLASH_CPU.forward(q[:, :, block.rows], keys, values, params)
            if source == comm.rank:
                out, lse = part
            else:
                merge(out[:, :, block.rows], lse[:, :, block.rows], *part)
        ctx.save_for_backward(q, whole, out, lse)
        ctx.comm = comm
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, whole, out, lse = ctx.saved_tensors
        grads, of_q = torch.zeros_like(whole), torch.zeros_like(q)
        for source, block in GatherFirst.blocks(ctx.comm, q.shape[2]):
            upper, queries, output, total = (x[:, :, block.rows] for x in (grad, q, out, lse))
            keys, values = whole[source][:, :, :, block.keys]
            params = ScoreParams(block.causal, q.shape[-1] ** -0.5)
            parts = FLASH_CPU.backward(upper, queries, keys, values, output, total, params)
            of_q[:, :, block.rows] += parts[0]
            grads[source][:, :, :, block.keys] += torch.stack(parts[1:])
        mine = torch.empty_like(grads[0])
        ctx.comm.reduce_scatter(grads, out=mine)
        return of_q, mine[0], mine[1], None


def alone(comm: ringcomm.Communicator, *whole: torch.Tensor) -> torch.Tensor:
    """Runs torch's own attention."""
    del comm
    return F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)


def ring(
    comm: ringcomm.Communicator, *parts: torch.Tensor, layout: str = "zigzag", overlap: bool = True
) -> torch.Tensor:
    """Runs ringcomm's attention."""
    return ring_attention(*parts, comm, causal=True, layout=layout, overlap=overlap)


ALONE = "one rank"
CONTESTANTS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {  # the layout of the inputs, and the function
    ALONE: ("", alone),
    "gather first": ("zigzag", lambda comm, *parts: GatherFirst.apply(*parts, comm)),
    "ring": ("zigzag", ring),
    "ring, no overlap": ("zigzag", partial(ring, overlap=False)),
    "ring, contiguous": ("contiguous", partial(ring, layout="contiguous")),
}


def inputs_of(comm: ringcomm.Communicator, a: argparse.Namespace, length: int, layout: str) -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of the output: whole on rank 0 and nowhere else (""), or this rank's parts."""
    if not layout and comm.rank:
        return []
    generator = torch.Generator().manual_seed(0)
    sizes = [(a.batch, heads, length, a.dim) for heads in (a.heads, a.key_heads, a.key_heads, a.heads)]
    whole = (torch.randn(size, generator=generator) for size in sizes)
    return [shard_sequence(x, comm, 2, layout) if layout else x for x in whole]


def step(comm: ringcomm.Communicator, name: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a forward and a backward; returns the output, and the gradients of q, k and v."""
    if not inputs:
        return []
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = CONTESTANTS[name][1](comm, *leaves)
    out.backward(inputs[3])
    return [out.detach(), *(x.grad for x in leaves)]


def check(comm: ringcomm.Communicator, results: dict[str, list[torch.Tensor]]) -> None:
    """Checks that rank 0's part of every contestant's results equals that part of the whole."""
    for name, parts in results.items():
        if comm.rank or name == ALONE:
            continue
        for whole, part in zip(results[ALONE], parts, strict=True):
            expected = shard_sequence(whole, comm, 2, CONTESTANTS[name][0])
            off = float((part - expected).abs().max() / expected.abs().max())
            if off > TOLERANCE:
                raise SystemExit(f"{name}: off by {off:g}")


def measure(
    comm: ringcomm.Communicator, a: argparse.Namespace, length: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of every turn, the CPU seconds of this rank's threads in it, and the peak memory."""
    torch.set_num_threads(1)
    inputs = {name: inputs_of(comm, a, length, layout) for name, (layout, _) in CONTESTANTS.items()}
    check(comm, {name: step(comm, name, inputs[name]) for name in CONTESTANTS})
    found: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    busy: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(a.turns):
        for name in list(CONTESTANTS)[:: 1 if turn % 2 else -1]:
            comm.barrier()
            begin, busy_begin = time.perf_counter(), time.process_time()
            step(comm, name, inputs[name])
            busy[name].append(time.process_time() - busy_begin)
            comm.barrier()
            found[name].append(time.perf_counter() - begin)
    return found, busy, peaks_mib(comm, inputs)


def memory_kib(what: str) -> int:
    """Returns a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def peaks_mib(comm: ringcomm.Communicator, inputs: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Returns the peak memory of one step of each: its inputs, and what it uses above the process's own."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory is returned to the system at once
    found = {}
    for name in CONTESTANTS:
        libc.malloc_trim(0)
        comm.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = memory_kib("VmRSS")
        step(comm, name, inputs[name])
        taken = memory_kib("VmHWM") - before
        comm.barrier()
        found[name] = taken / 1024 + sum(x.nbytes for x in inputs[name]) / 2**20
    return found


def table(a: argparse.Namespace, length: int) -> list[str]:
    """Measures one length, and returns its table."""
    results = ringcomm.run_ranks(measure, a.world, a, length, ranks="processes")
    times = results[0][0]
    lines = [
        f"## {length} tokens on {a.world} ranks",
        "",
        "| | forward and backward ms, median (min-max) | CPU ms of a rank, median (min-max) "
        "| time of one rank / its own in a turn, median (min-max) | peak memory of a rank, MiB |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        busy = [max(turn) for turn in zip(*(each[1][name] for each in results), strict=True)]
        ratios = [whole / each for whole, each in zip(times[ALONE], seconds, strict=True)]
        cells = [spread(seconds, 1e3, 0), spread(busy, 1e3, 0), spread(ratios, 1, 2)]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(each[2][name] for each in results):.0f} |")
    return [*lines, ""]


def options() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measures every length and prints a table of each."""
    a = options()
    os.environ.update(OMP_NUM_THREADS="1")
    about = (__doc__ or "").strip().split("\n\n")[2]
    setting = (
        f"Batch {a.batch}, {a.heads} query heads, {a.key_heads} key heads of {a.dim}, float32; {a.turns} turns, one "
        f"thread a rank, {os.cpu_count()} cores, torch {torch.__version__}; at the start other processes "
        f"kept {os.getloadavg()[0]:.1f} cores busy or waiting."
    )
    lines = ["# Causal attention over a split sequence", "", about, "", setting, ""]
    for length in a.lengths:
        lines += table(a, length)
    text = "\n".join([*lines, f"    python {' '.join(sys.argv)}", ""])
    print(text)
    if a.out:
        a.out.write_text(text)


if __name__ == "__main__":
    main()
