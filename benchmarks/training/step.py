"""
Times a training step of a small GPT on the CPU: our stages and torch's data parallelism over Gloo.

    python -m benchmarks.training.step --world 2 --out benchmarks/results/train-2.md

Every contestant has its own copy of the model in the same processes. In a turn each of them runs one step on the same
batch, from a barrier to a barrier; the order is reversed in every second turn. The table shows the median step
(min-max), and the median over the turns of peer's time / our time in the same turn, so that other load on the machine
cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import ringcomm
from examples.gpt import Block

LOCAL, DDP, FSDP, FSDP_WHOLE = "no communication", "torch DDP, Gloo", "torch FSDP2, Gloo", "torch FSDP2 whole, Gloo"
PEER_OF = {"stage 0": (DDP,), "stage 1": (DDP,), "stage 2": (DDP, FSDP_WHOLE), "stage 3": (FSDP,)}
TOLERANCE = 1e-3  # relative tolerance of losses between ringcomm and a peer: the order of summation may differ


class GPT(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(a.vocab, a.dim), nn.Embedding(a.seq, a.dim)
        self.blocks = nn.ModuleList(Block(a.dim, max(1, a.dim // 64)) for _ in range(a.layers))
        self.norm, self.head = nn.LayerNorm(a.dim), nn.Linear(a.dim, a.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class Contestant:
    """A model in training, and its measurements."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of all threads of this rank
        self.losses: list[float] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """One optimizer step; returns the loss."""
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def model_of(a: argparse.Namespace) -> GPT:
    """Returns the model, the same on every rank and for every contestant."""
    torch.manual_seed(0)
    return GPT(a)


def adam(model: nn.Module, a: argparse.Namespace) -> torch.optim.Optimizer:
    """Returns the optimizer of every contestant."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, **{a.adam: True})


def fsdp2(a: argparse.Namespace, reshard: bool) -> nn.Module:
    """Wraps the model with torch's FSDP2, block by block and then the rest, as its manual advises."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(a)
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def ddp(a: argparse.Namespace) -> nn.Module:
    """Wraps the model with torch's DDP at its best: gradients are views of the buckets."""
    group = dist.new_group(backend="gloo")
    return nn.parallel.DistributedDataParallel(model_of(a), process_group=group, gradient_as_bucket_view=True)


def contestants(a: argparse.Namespace, comm: ringcomm.Communicator) -> dict[str, Contestant]:
    """Returns all requested contestants."""
    peers: dict[str, Callable[[], nn.Module]] = {
        LOCAL: lambda: model_of(a),
        DDP: lambda: ddp(a),
        FSDP: lambda: fsdp2(a, True),
        FSDP_WHOLE: lambda: fsdp2(a, False),
    }
    found = {}
    for name, make in peers.items():
        model = make()
        found[name] = Contestant(model, adam(model, a))
    for stage in a.stages:
        model = model_of(a)
        optimizer = adam(model, a)
        ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=a.bucket_mb)
        found[f"stage {stage}"] = Contestant(model, optimizer)
    return found


def turns(a: argparse.Namespace, comm: ringcomm.Communicator, all_of_them: dict[str, Contestant]) -> None:
    """Runs and times the turns."""
    generator = torch.Generator().manual_seed(1 + comm.rank)
    names = list(all_of_them)
    for turn in range(a.warmup + a.turns):
        tokens = torch.randint(a.vocab, (a.batch, a.seq + 1), generator=generator)
        x, y = tokens[:, :-1], tokens[:, 1:]
        for name in names if turn % 2 == 0 else reversed(names):
            each = all_of_them[name]
            comm.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = each.step(x, y)
            comm.barrier()  # a step has ended when the slowest rank has
            each.losses.append(loss)
            if turn >= a.warmup:
                each.seconds.append(time.perf_counter() - start)
                each.cpu_seconds.append(time.process_time() - cpu)


def check(all_of_them: dict[str, Contestant], rank: int) -> list[str]:
    """Raises if losses differ; returns those that are equal to the last bit."""
    ours = {name: each.losses for name, each in all_of_them.items() if name.startswith("stage")}
    first = next(iter(ours))
    for name, losses in ours.items():
        if losses != ours[first]:
            at = next(i for i, (p, q) in enumerate(zip(losses, ours[first], strict=True)) if p != q)
            raise SystemExit(
                f"train: rank {rank} got a loss of {losses[at]!r} from {name} and of {ours[first][at]!r} from {first} "
                f"in step {at}, expected the same bits"
            )
    same = []
    for name in (DDP, FSDP, FSDP_WHOLE):
        losses = all_of_them[name].losses
        worst = max(abs(p - q) / abs(q) for p, q in zip(losses, ours[first], strict=True))
        if worst > TOLERANCE:
            raise SystemExit(f"train: rank {rank} got losses of {name} that are {worst:.1e} off, expected {TOLERANCE}")
        same.append(f"{name} {'the same bits' if worst == 0 else f'within {worst:.1e}'}")
    return same


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 1) -> str:
    """Formats median (min-max)."""
    median, least, most = (unit * x for x in (statistics.median(values), min(values), max(values)))
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def quartiles(values: Sequence[float]) -> str:
    """Formats median [lower quartile, upper quartile]."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def ratios(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Returns the ratios, turn by turn."""
    return [p / q for p, q in zip(peer, ours, strict=True)]


def table(a: argparse.Namespace, all_of_them: dict[str, Contestant], same: list[str]) -> str:
    """Returns the table as Markdown."""
    count = sum(p.numel() for p in all_of_them[LOCAL].model.parameters())
    base = all_of_them[LOCAL].seconds
    lines = [
        f"## {a.world} ranks, AdamW {a.adam}",
        "",
        f"{count / 1e6:.1f} M parameters in float32 ({a.layers} blocks of width {a.dim}, vocabulary {a.vocab}), "
        f"{a.batch * a.seq} tokens per rank and step, {a.turns} turns, one thread a rank, {os.cpu_count()} cores, "
        f"torch {torch.__version__}.",
        "",
        "| | step ms, median (min-max) | CPU ms of a rank, median (min) | not computing | peer's time / ours, median "
        "[quartiles] | peer's CPU / ours |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in all_of_them.items():
        share = statistics.median(1 - b / t for b, t in zip(base, each.seconds, strict=True))
        peers = [(peer, all_of_them[peer]) for peer in PEER_OF.get(name, ())]
        wall = [f"{peer}: {quartiles(ratios(other.seconds, each.seconds))}" for peer, other in peers]
        cpu = [quartiles(ratios(other.cpu_seconds, each.cpu_seconds)) for _, other in peers]
        median, least = 1e3 * statistics.median(each.cpu_seconds), 1e3 * min(each.cpu_seconds)
        cells = (spread(each.seconds, 1e3), f"{median:.1f} ({least:.1f})", f"{100 * share:.0f} %")
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(wall)} | {'; '.join(cpu)} |")
    lines += [
        "",
        "Losses: every stage the same bits in every step; beside ours " + ", ".join(same) + ".",
        "",
    ]
    return "\n".join(lines)


def worker(rank: int, a: argparse.Namespace) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", a.world), ("LOCAL_WORLD_SIZE", a.world)):
        os.environ[name] = str(value)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port))
    dist.init_process_group("gloo", rank=rank, world_size=a.world, timeout=timedelta(seconds=300))
    comm = ringcomm.init()
    all_of_them = contestants(a, comm)
    turns(a, comm, all_of_them)
    same = check(all_of_them, rank)
    if rank == 0:
        text = table(a, all_of_them, same)
        print(text, flush=True)
        if a.out:
            write(a, text, all_of_them)
    dist.barrier()
    dist.destroy_process_group()


def write(a: argparse.Namespace, text: str, all_of_them: dict[str, Contestant]) -> None:
    """Writes the table with the command to a file, after its contents with --append; writes every turn to a file
    beside it."""
    out = Path(a.out)
    before = out.read_text() if a.append and out.exists() else f"# Training steps beside torch over Gloo\n\n{NOTE}\n"
    out.write_text(f"{before}\n{text}\n    {a.command}\n")
    beside = out.with_suffix(".json")
    runs: list[Any] = json.loads(beside.read_text()) if a.append and beside.exists() else []
    rounded = {
        name: {"seconds": [round(x, 5) for x in each.seconds], "cpu_seconds": [round(x, 5) for x in each.cpu_seconds]}
        for name, each in all_of_them.items()
    }
    runs.append({"command": a.command, "steps": rounded})
    beside.write_text(json.dumps(runs) + "\n")


NOTE = """One step of every contestant in each turn, in the same processes, on the same batch; a ratio is taken within a
turn. On a shared machine minimum and maximum tell what else was running, quartiles of the ratio how far to trust it.
CPU is the time of all threads of a rank: where there is a core for each rank and no more, it is what a step takes when
nothing else runs, but for waiting. "Not computing" is what a step is longer than one without communication; it can be
below 0, as from stage 1 on each rank's optimizer works on a shard. For all contestants alike, glibc keeps freed memory
instead of giving it back to the system and taking it anew (`MALLOC_TRIM_THRESHOLD_` and others): else a step has 0 to
10 ms of page faults at random."""
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def parse() -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("world", 2, "ranks"), ("layers", 6, "blocks"), ("dim", 384, "width"), ("vocab", 8192, "tokens known"),
        ("seq", 128, "tokens in a window"), ("batch", 4, "windows per rank and step"),
        ("turns", 30, "measured steps of each"), ("warmup", 4, "steps before"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    p.add_argument("--adam", choices=["fused", "foreach"], default="fused", help="implementation of AdamW (fused)")
    p.add_argument("--stages", type=lambda text: [int(c) for c in text], default=[0, 1, 2, 3], help="ours (0123)")
    p.add_argument("--bucket-mb", type=float, default=None, help="our messages, MiB (as measured)")
    p.add_argument("--out", metavar="FILE", help="the table goes there, every turn into a .json beside it")
    p.add_argument("--append", action="store_true", help="behind what is in FILE")
    return p.parse_args()


def main() -> None:
    """Starts the ranks."""
    a = parse()
    hidden = ("stages", "append", "out")
    words = [f"--{k.replace('_', '-')} {v}" for k, v in vars(a).items() if k not in hidden and v is not None]
    words += [] if a.stages == [0, 1, 2, 3] else ["--stages " + "".join(map(str, a.stages))]
    a.command = "python -m benchmarks.training.step " + " ".join(words)
    os.environ.update(KEEP_MEMORY, OMP_NUM_THREADS="1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        a.port = s.getsockname()[1]
    mp.spawn(worker, args=(a,), nprocs=a.world)


if __name__ == "__main__":
    main()
