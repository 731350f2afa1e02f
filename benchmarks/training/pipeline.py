"""
Measures pipelines: the idle share of every schedule against its formula, and tokens per second against torch's
pipelining.

    python -m benchmarks.training.pipeline --out benchmarks/results/pipeline.md

In the first part stages wait for a known time in place of computing, so that ranks need no cores of their own; all idle
time then comes from the schedule or the runner. The second part trains a small GPT, untied, on ranks that are
processes: our schedules and those of torch.distributed.pipelining over Gloo, on the same batch and the same stage
boundaries, with interleaved steps. Pictures of the planned and the measured schedules are written beside the table.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import ringcomm
from benchmarks.training.step import spread
from examples.gpt import Block
from ringcomm.pipeline_parallel.check import bubble, formula, times
from ringcomm.pipeline_parallel.picture import draw
from ringcomm.pipeline_parallel.schedules import schedule_of
from ringcomm.pipeline_parallel.weight_grads import DeferWeightGrads

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
CHUNKS = {"interleaved": 2}
RANKS = 4  # ranks in the first part
TOLERANCE = 1e-4  # relative tolerance of losses against torch's


# ---- stages that wait ---------------------------------------------------------------------------------------------


class Waiting(torch.autograd.Function):
    """Takes ``seconds`` in forward, and the same time for the gradient of its input and for that of its weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeferWeightGrads)]
        ctx.deferred, ctx.seconds, ctx.weight = modes[0].deferred if modes else None, seconds, weight
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        time.sleep(ctx.seconds)
        if ctx.deferred is None:
            time.sleep(ctx.seconds)
        else:
            ctx.deferred.append((ctx.weight, partial(late, ctx.seconds, ctx.weight)))
        return grad.clone(), None, None


def late(seconds: float, weight: torch.Tensor) -> torch.Tensor:
    """The gradient that a schedule with split backward passes computes later."""
    time.sleep(seconds)
    return torch.zeros_like(weight)


class Wait(nn.Module):
    """A stage that waits."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Waiting.apply(x, self.weight, self.seconds)
        return result


def waited(comm: ringcomm.Communicator, seconds: float, counts: Sequence[int], repetitions: int) -> list[list[Any]]:
    """Returns, by schedule and number of micro-batches, idle shares, step times, and the timeline of the median
    step."""
    torch.set_num_threads(1)
    found = []
    for name in SCHEDULES:
        chunks = CHUNKS.get(name, 1)
        for m in counts:
            stages = [Wait(seconds / chunks) for _ in range(chunks * comm.world_size)]
            pipe = ringcomm.Pipeline(
                stages, comm, microbatches=m, schedule=name, loss=lambda output: output.mean(), static_shapes=True
            )
            x = torch.ones(m, 8, requires_grad=True)
            rows = []
            for number in range(repetitions + 1):
                comm.barrier()
                pipe.step(x)
                timeline = pipe.timeline()
                if number:
                    rows.append(timeline)
            found.append([name, m, rows])
    return found


def idle(rows: list[list[Any]]) -> float:
    """Returns the idle share of the time from the first start to the last end, as the mean over the ranks."""
    span = max(end for row in rows for _, _, end in row) - min(start for row in rows for _, start, _ in row)
    return 1 - sum(end - start for row in rows for _, start, end in row) / (span * len(rows))


def bubbles(a: argparse.Namespace, folder: Path | None) -> list[str]:
    """Returns the table of the first part, and writes its pictures."""
    arguments = (a.wait_ms / 1e3, a.microbatches, a.repetitions)
    done = ringcomm.run_ranks(waited, RANKS, *arguments, ranks="processes", timeout=60)[0]
    lines = [
        f"## Idle share, {RANKS} ranks that wait",
        "",
        f"A stage waits {a.wait_ms:g} ms forward (each of 2 chunks half of it), and twice as long backward; "
        f"{a.repetitions} steps after one that is not counted. Idle is what lies between a rank's actions, from the "
        "first start to the last end of a step, and the mean over ranks; median (min-max) over steps. The step's time "
        "is beside what the waits alone take.",
        "",
        "| schedule | m | formula | planned | measured idle | step / planned |",
        "|---|---|---|---|---|---|",
    ]
    for name, m, timelines in done:
        chunks = CHUNKS.get(name, 1)
        schedule = schedule_of(name, RANKS, m, chunks)
        planned = max(end for row in times(schedule) for _, _, end in row) * a.wait_ms / 1e3 / chunks
        spans = [max(end for row in rows for _, _, end in row) / planned for rows in timelines]
        published = formula(name, RANKS, m, chunks)
        measured = spread([100 * idle(rows) for rows in timelines])
        lines.append(
            f"| {name} | {m} | {'-' if published is None else f'{100 * published:.1f} %'} | "
            f"{100 * bubble(schedule):.1f} % | {measured} % | {spread(spans, digits=3)} |"
        )
        if folder is not None and m == a.microbatches[len(a.microbatches) // 2]:
            middle = sorted(timelines, key=idle)[len(timelines) // 2]
            for ending in ("png", "html") if name == "zero-bubble" else ("png",):
                path = folder / f"pipeline-{name}.{ending}"
                draw(times(schedule), path, f"{name}, {RANKS} ranks, {m} micro-batches", middle)
    return [*lines, ""]


# ---- a GPT beside torch -------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A decoder whose layers form a sequence, so that both libraries can split it in the same places."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(a.vocab, a.dim), nn.Embedding(a.seq, a.dim)
        self.blocks = nn.ModuleList(Block(a.dim, max(1, a.dim // 64)) for _ in range(a.layers))
        self.norm, self.head = nn.LayerNorm(a.dim), nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Part(nn.Module):
    """A stage in the form that torch's pipelining needs: a module of its own."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.blocks)
        self.blocks = nn.ModuleList([*model.blocks][count * stage // stages : count * (stage + 1) // stages])
        self.token, self.position = (model.token, model.position) if stage == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if stage == stages - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of every token."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


Step = Callable[[torch.Tensor, torch.Tensor], "float | None"]


def model_of(a: argparse.Namespace) -> GPT:
    """Returns the model, the same on every rank and for every contestant."""
    torch.manual_seed(0)
    return GPT(a)


def ours(a: argparse.Namespace, comm: ringcomm.Communicator, name: str) -> Step:
    """Returns a step of our pipeline."""
    stages = a.world * CHUNKS.get(name, 1)
    cuts = [f"blocks.{a.layers * i // stages}" for i in range(1, stages)]
    pipe = ringcomm.Pipeline(
        ringcomm.split(model_of(a), cuts), comm, microbatches=a.m, schedule=name, loss=cross_entropy, static_shapes=True
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        pipe.zero_grad()
        return float(pipe.step(x, target=y))

    return step


def torchs(a: argparse.Namespace, name: str) -> Step:
    """Returns a step of torch's pipeline."""
    from torch.distributed import pipelining as p

    rank, several = dist.get_rank(), name in ("Interleaved1F1B", "InterleavedZeroBubble")
    stages = a.world * (2 if several else 1)
    model = model_of(a)
    mine = [
        p.PipelineStage(Part(model, stage, stages), stage, stages, torch.device("cpu"))
        for stage in range(rank, stages, a.world)
    ]
    kind = getattr(p, f"Schedule{name}")
    schedule = kind(mine if several else mine[0], n_microbatches=a.m, loss_fn=cross_entropy)

    def step(x: torch.Tensor, y: torch.Tensor) -> float | None:
        for each in mine:
            each.submod.zero_grad()
        losses: list[torch.Tensor] = []
        last = rank == a.world - 1
        schedule.step(
            *([x] if rank == 0 else []), **({"target": y, "losses": losses} if last else {}), return_outputs=False
        )
        return float(torch.stack(losses).detach().mean()) if last else None

    return step


TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")


def turns(a: argparse.Namespace, comm: ringcomm.Communicator) -> tuple[dict[str, list[float]], list[str]]:
    """Returns the seconds of every step, by contestant, and notes about those that could not run."""
    generator = torch.Generator().manual_seed(1)
    steps = {f"ringcomm {name}": ours(a, comm, name) for name in SCHEDULES}
    steps |= {f"torch {name}": torchs(a, name) for name in TORCHS}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    worst = 0.0
    for turn in range(a.warmup + a.turns):
        tokens = torch.randint(a.vocab, (a.m * a.batch, a.seq + 1), generator=generator)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        losses = {}
        for name in steps if turn % 2 == 0 else reversed(steps):
            comm.barrier()
            start = time.perf_counter()
            losses[name] = steps[name](x, y)
            comm.barrier()  # a step has ended when the slowest rank has
            if turn >= a.warmup:
                seconds[name].append(time.perf_counter() - start)
        first = losses["ringcomm gpipe"]
        assert first is not None
        if any(losses[f"ringcomm {name}"] != first for name in SCHEDULES):
            raise SystemExit(f"pipeline: got the losses {losses}, expected the same bits of every schedule of ours")
        worst = max([worst, *(abs(loss - first) / abs(first) for loss in losses.values() if loss is not None)])
    if worst > TOLERANCE:
        raise SystemExit(f"pipeline: got losses of torch's that are {worst:.1e} off, expected {TOLERANCE}")
    return seconds, [f"Losses: ours the same bits, torch's within {worst:.1e} of them."]


def table(a: argparse.Namespace, seconds: dict[str, list[float]], notes: list[str]) -> list[str]:
    """Returns the Markdown of the second part."""
    count = sum(p.numel() for p in model_of(a).parameters())
    per_step = a.m * a.batch * a.seq
    lines = [
        f"## A GPT on {a.world} ranks",
        "",
        f"{count / 1e6:.1f} M parameters in float32 ({a.layers} blocks of width {a.dim}, vocabulary {a.vocab}), {a.m} "
        f"micro-batches of {a.batch * a.seq} tokens, forward and backward, {a.turns} turns, one thread a rank, "
        f"{os.cpu_count()} cores, torch {torch.__version__}. A ratio is taken within a turn.",
        "",
        "| | tokens / s, median (min-max) | step ms, median (min-max) | torch's time / ours, median [quartiles] |",
        "|---|---|---|---|",
    ]
    peers = dict(zip(SCHEDULES, TORCHS, strict=True))
    for name, values in seconds.items():
        kind = name.removeprefix("ringcomm ")
        ratio = ""
        if kind in peers:
            other = seconds[f"torch {peers[kind]}"]
            low, middle, high = statistics.quantiles([p / q for p, q in zip(other, values, strict=True)], n=4)
            ratio = f"{peers[kind]}: {middle:.2f} [{low:.2f}, {high:.2f}]"
        rates = [per_step / value for value in values]
        lines.append(f"| {name} | {spread(rates, digits=0)} | {spread(values, 1e3)} | {ratio} |")
    return [*lines, "", *notes, ""]


def worker(rank: int, a: argparse.Namespace, out: Any) -> None:
    """Runs one rank of the second part."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", a.world), ("LOCAL_WORLD_SIZE", a.world)):
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port))
    dist.init_process_group("gloo", rank=rank, world_size=a.world, timeout=timedelta(seconds=60))
    comm = ringcomm.init()
    lines = table(a, *turns(a, comm))
    if rank == 0:
        out.put(lines)
    dist.barrier()
    dist.destroy_process_group()


# ---- command line -------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("world", 2, "ranks of the GPT"), ("layers", 8, "blocks"), ("dim", 192, "width"),
        ("vocab", 512, "tokens known"), ("seq", 96, "tokens in a window"), ("batch", 1, "windows in a micro-batch"),
        ("m", 8, "micro-batches"), ("turns", 8, "measured steps of each"), ("warmup", 2, "steps before"),
        ("repetitions", 3, "steps that wait, of each schedule"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    p.add_argument("--wait-ms", type=float, default=30.0, help="forward pass of a stage that waits (30)")
    p.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16], help="of stages that wait (4 8 16)")
    p.add_argument("--out", metavar="FILE", help="the tables go there, pictures beside it")
    return p.parse_args()


def main() -> None:
    """Runs both parts."""
    a = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    out = None if a.out is None else Path(a.out)
    lines = ["# Pipelines", "", "    python -m benchmarks.training.pipeline " + " ".join(sys.argv[1:]), ""]
    load = os.getloadavg()[0]
    lines += bubbles(a, None if out is None else out.parent)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        a.port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, args=(a, queue), nprocs=a.world)
    lines += queue.get()
    lines.append(
        f"What else ran on the machine shows in the spreads: the load average was {load:.1f} before the run, "
        f"{os.getloadavg()[0]:.1f} after it, on {os.cpu_count()} cores.\n"
    )
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
