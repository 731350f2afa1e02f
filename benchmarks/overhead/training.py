"""Measures the training layer's cost in small models, where Python determines the time of a step, and its memory.

    python -m benchmarks.overhead.training --out benchmarks/results/training_overhead.md

Time: every contestant has its own copy of the model in the same two processes and runs one step in each turn, on the
same batch; the order is reversed in every second turn. A ratio is taken within a turn. Memory: two new processes for
each stage, with glibc's default settings and with settings that return freed memory to the system.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ringcomm
from benchmarks.training.step import KEEP_MEMORY, Contestant, adam, model_of, quartiles, ratios, spread

OVER_US, OVER_GLOO, OURS = "torch DDP, ringcomm", "torch DDP, Gloo", "ringcomm DDP"
SIZES = {  # blocks, width, vocabulary, tokens in a window
    "0.2 M": (4, 64, 256, 32),
    "17 M": (6, 384, 8192, 64),
    "40 M": (6, 640, 8192, 64),
}
WORLD = 2
SETTING, THRESHOLD = "MALLOC_MMAP_THRESHOLD_", 4 << 20


def options(size: str) -> argparse.Namespace:
    """Returns the options from which `training/step.py` makes a model and its optimizer."""
    layers, dim, vocab, seq = SIZES[size]
    return argparse.Namespace(layers=layers, dim=dim, vocab=vocab, seq=seq, batch=1, adam="fused")


def torch_ddp(backend: str, how: argparse.Namespace) -> nn.Module:
    """Wraps the model with torch's DDP at its best: gradients are views of the buckets."""
    group = dist.new_group(backend=backend)
    return nn.parallel.DistributedDataParallel(model_of(how), process_group=group, gradient_as_bucket_view=True)


def sharded(stage: int, comm: ringcomm.Communicator, how: argparse.Namespace) -> Contestant:
    """Makes a contestant at a stage."""
    model = model_of(how)
    optimizer = adam(model, how)
    ringcomm.shard(model, optimizer, stage, comm)
    return Contestant(model, optimizer)


def contestants(comm: ringcomm.Communicator, how: argparse.Namespace) -> dict[str, Contestant]:
    """Returns all contestants, in the order of the table."""
    wrapped: dict[str, Callable[[], nn.Module]] = {
        OVER_GLOO: lambda: torch_ddp("gloo", how),
        OVER_US: lambda: torch_ddp("ringcomm", how),
        OURS: lambda: ringcomm.DistributedDataParallel(model_of(how), comm),
    }
    found = {}
    for name, make in wrapped.items():
        model = make()
        found[name] = Contestant(model, adam(model, how))
    for stage in range(4):
        found[f"stage {stage}"] = sharded(stage, comm, how)
    return found


def turns(how: argparse.Namespace, comm: ringcomm.Communicator, count: int, all_of_them: dict[str, Contestant]) -> None:
    """Runs the turns; raises for losses that are not those of torch DDP over ringcomm, bit for bit."""
    generator = torch.Generator().manual_seed(1 + comm.rank)
    names = list(all_of_them)
    for turn in range(4 + count):
        tokens = torch.randint(how.vocab, (how.batch, how.seq + 1), generator=generator)
        if turn == 4:
            gc.freeze()  # so that the collector does not scan all contestants' objects during the step of one
        for name in names if turn % 2 == 0 else reversed(names):
            each = all_of_them[name]
            comm.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            each.losses.append(each.step(tokens[:, :-1], tokens[:, 1:]))
            comm.barrier()
            if turn >= 4:
                each.seconds.append(time.perf_counter() - start)
                each.cpu_seconds.append(time.process_time() - cpu)
    for name in (OURS, *(f"stage {stage}" for stage in range(4))):
        if all_of_them[name].losses != all_of_them[OVER_US].losses:
            raise SystemExit(f"training_overhead: rank {comm.rank} got other losses of {name} than of {OVER_US}")


def table(size: str, how: argparse.Namespace, all_of_them: dict[str, Contestant]) -> str:
    """Returns the table as Markdown."""
    numel = sum(p.numel() for p in all_of_them[OURS].model.parameters())
    count = len(all_of_them[OURS].seconds)
    lines = [
        f"## {size} parameters",
        "",
        f"{WORLD} ranks, {numel:,} parameters in float32, {how.seq} tokens per rank and step, AdamW fused, "
        f"{count} turns.",
        "",
        f"| | step ms, median (min-max) | CPU ms of a rank, median (min-max) | time / {OVER_US}, median [quartiles] | "
        f"time / {OVER_GLOO} | CPU / {OVER_US} | CPU / {OVER_GLOO} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in all_of_them.items():
        cells = [spread(each.seconds, 1e3, 2), spread(each.cpu_seconds, 1e3, 2)]
        cells += [quartiles(ratios(each.seconds, all_of_them[peer].seconds)) for peer in (OVER_US, OVER_GLOO)]
        cells += [quartiles(ratios(each.cpu_seconds, all_of_them[peer].cpu_seconds)) for peer in (OVER_US, OVER_GLOO)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "The losses of all but Gloo's are the same bits in every step.", ""])


def begin(rank: int, port: int) -> ringcomm.Communicator:
    """Makes this process a rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", WORLD), ("LOCAL_WORLD_SIZE", WORLD)):
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    return ringcomm.init()


def time_rank(rank: int, port: int, size: str, count: int, out: str) -> None:
    """Runs one rank of the time measurement."""
    comm, how = begin(rank, port), options(size)
    all_of_them = contestants(comm, how)
    turns(how, comm, count, all_of_them)
    if rank == 0:
        Path(out).write_text(table(size, how, all_of_them))
    dist.barrier()
    dist.destroy_process_group()


def proportional() -> float:
    """Returns MiB of this process; a page shared by ranks counts in parts, so that the ranks' sum is the machine's
    memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def memory_rank(rank: int, port: int, stage: int | None, steps: int, out: str) -> None:
    """Runs one rank of the memory measurement; without a stage, torch DDP over ringcomm."""
    comm, how = begin(rank, port), options("40 M")
    comm.barrier()
    before = proportional()
    if stage is None:
        model = torch_ddp("ringcomm", how)
        each = Contestant(model, adam(model, how))
    else:
        each = sharded(stage, comm, how)
    tokens = torch.randint(how.vocab, (how.batch, how.seq + 1))
    resident, seconds = [], []
    for _ in range(steps):
        start = time.process_time()
        each.step(tokens[:, :-1], tokens[:, 1:])
        seconds.append(time.process_time() - start)
        comm.barrier()
        resident.append(proportional() - before)
        comm.barrier()
    late = steps // 2
    cells = [spread(resident[late:], 1, 0), spread(seconds[late:], 1e3, 0)]
    if rank == 0:
        said = "" if stage is None else f"{ringcomm.memory(each.model).resident / 2**20:.0f}"
        Path(out).write_text(" | ".join([*cells, said]))
    dist.barrier()
    dist.destroy_process_group()


def spawned(rank: Callable[..., None], *args: object) -> str:
    """Runs the ranks; returns the output of rank 0."""
    out = Path(f"/tmp/training_overhead.{os.getpid()}")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        mp.spawn(rank, args=(port, *args, str(out)), nprocs=WORLD)
        return out.read_text()
    finally:
        out.unlink(missing_ok=True)


def memory_table(steps: int) -> str:
    """Returns the table as Markdown."""
    lines = [
        "## Memory of a rank between two steps, 40 M parameters",
        "",
        "MiB beyond what the process had before the model (of pages that ranks share each counts its part), median "
        f"(min-max) of the last {steps - steps // 2} of {steps} steps, and the CPU time of a step. The last column is "
        "`ringcomm.memory(model).resident`. By itself glibc keeps what autograd has freed for the next step; with the "
        "setting it gives large blocks back at once, and the next step faults them in again.",
        "",
        f"| | MiB | CPU ms | MiB, `{SETTING}={THRESHOLD}` | CPU ms | `memory().resident` |",
        "|---|---|---|---|---|---|",
    ]
    for stage in (None, 0, 1, 2, 3):
        usual = spawned(memory_rank, stage, steps).rpartition(" | ")
        os.environ[SETTING] = str(THRESHOLD)
        given_back = spawned(memory_rank, stage, steps)
        del os.environ[SETTING]
        lines.append(f"| {OVER_US if stage is None else f'stage {stage}'} | {usual[0]} | {given_back} |")
    return "\n".join([*lines, ""])


def parse() -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=200, help="measured steps of each at 0.2 M; a quarter at 17 M (200)")
    p.add_argument("--steps", type=int, default=10, help="steps before memory is read (10)")
    p.add_argument("--only", choices=["0.2 M", "17 M", "memory"], help="one of the tables (all)")
    p.add_argument("--out", metavar="FILE", help="the tables go there")
    return p.parse_args()


def main() -> None:
    """Starts the ranks."""
    a = parse()
    os.environ["OMP_NUM_THREADS"] = "1"
    tables = []
    if a.only in (None, "memory"):
        tables.append(memory_table(a.steps))
    os.environ.update(KEEP_MEMORY)
    for size, count in (("0.2 M", a.turns), ("17 M", a.turns // 4)):
        if a.only in (None, size):
            tables.append(spawned(time_rank, size, count))
    text = "\n".join(["# What the training layer costs", "", NOTE, "", *reversed(tables)])
    print(text)
    if a.out:
        Path(a.out).write_text(text)


NOTE = f"""`python -m benchmarks.overhead.training`, torch {torch.__version__}, {os.cpu_count()} cores, one thread a
rank. A step is forward, backward, AdamW and zero_grad, from a barrier to a barrier. On a shared machine read ratios
with their quartiles. For the tables of time glibc keeps freed memory, for all alike (see training/step.py)."""

if __name__ == "__main__":
    main()
