"""Tensor and sequence parallel layers: shows when splitting messages along the ring pays off, and compares with the
same block under torch's own tensor parallelism (DTensor over Gloo).

    python -m benchmarks.training.tensor_parallel --out benchmarks/results/tensor_parallel.md

Two processes, one thread each. Variants take turns in one run; figures are medians of the turns, with minimum and
maximum. A turn is the forward and backward of one block; its time is that of the slower rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import ringcomm  # noqa: F401  registers the backend
from ringcomm.comm.mesh import init_mesh
from ringcomm.tensor_parallel.plan import parallelize

WORLD = 2
SHAPES = [(128, 128), (512, 128), (128, 512), (512, 512), (2048, 256), (512, 1024)]  # (sequence, features)
BLOCK = [(128, 128), (512, 256), (512, 512)]
Times = dict[str, list[float]]


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 32)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


PLAN = {"*.wq": "colwise", "*.wk": "colwise", "*.wv": "colwise", "*.wo": "rowwise", "up": "colwise", "down": "rowwise"}


def by_torch(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = {"up": ColwiseParallel(), "down": RowwiseParallel(), "attention.wo": RowwiseParallel()}
    names |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    return parallelize_module(module, mesh, names)


def turn(module: nn.Module, x: torch.Tensor, group: Any) -> float:
    """Returns the seconds of one forward and backward pass, on the slower rank."""
    module.zero_grad()
    x.grad = None
    dist.barrier(group)
    start = time.perf_counter()
    module(x).sum().backward()
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


def interleaved(variants: dict[str, tuple[nn.Module, torch.Tensor]], seconds: float, group: Any) -> Times:
    times: Times = {name: [] for name in variants}
    for module, x in variants.values():
        turn(module, x, group)
    end = time.perf_counter() + seconds
    while True:
        for name, (module, x) in variants.items():
            times[name].append(turn(module, x, group))
        go_on = torch.tensor([float(time.perf_counter() < end or len(times[name]) < 5)])
        dist.all_reduce(go_on, dist.ReduceOp.MIN, group=group)
        if not go_on:
            return times


def rank_main(rank: int, folder: str, seconds: float, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("cpu:ringcomm", store=store, rank=rank, world_size=WORLD)
    comm = init_mesh(tp=WORLD)["tp"]
    gloo = dist.new_group(backend="gloo")
    from torch.distributed.device_mesh import DeviceMesh

    device_mesh = DeviceMesh.from_group(gloo, "cpu", mesh_dim_names=("tp",))
    overlap, block = [], []
    for s, h in SHAPES:
        variants = {}
        for name in ("plain", "overlap"):
            torch.manual_seed(0)
            mlp = parallelize(
                Mlp(h), {"up": "colwise", "down": "rowwise"}, comm, sequence_dim=1, overlap=name == "overlap"
            )
            variants[name] = (mlp, torch.randn(1, s // WORLD, h, requires_grad=True))
        overlap.append(((s, h), interleaved(variants, seconds, gloo)))
    for s, h in BLOCK:
        makers: dict[str, Callable[[nn.Module], nn.Module]] = {
            "ringcomm": lambda m: parallelize(m, PLAN, comm),
            "torch": lambda m: by_torch(m, device_mesh),
        }
        variants = {}
        for name, make in makers.items():
            torch.manual_seed(0)
            module = make(Block(h))
            torch.manual_seed(1)
            variants[name] = (module, torch.randn(1, s, h, requires_grad=True))
        outs = [module(x) for module, x in variants.values()]
        assert torch.allclose(*outs, atol=1e-4), "the two compute different things"
        block.append(((s, h), interleaved(variants, seconds, gloo)))
    if rank == 0:
        queue.put((overlap, block))
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def figures(seconds: list[float], scale: float = 1e3) -> str:
    low, middle, high = (scale * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def quartiles(times: list[float], base: list[float]) -> tuple[str, float]:
    """Returns the quartiles of the ratios within a turn, as text, and the third quartile."""
    first, middle, third = statistics.quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)
    return f"{middle:.2f} [{first:.2f}, {third:.2f}]", third


def rates(seconds: list[float], tokens: int) -> str:
    low, middle, high = (tokens / f(seconds) for f in (max, statistics.median, min))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def report(overlap: list[Any], block: list[Any], command: str) -> str:
    lines = [
        "# Tensor parallel layers",
        "",
        f"`{command}`",
        "",
        f"Two processes of one thread each on {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
        f"float32, forward and backward of one batch. The load average was {os.getloadavg()[0]:.1f} at the end. "
        "Variants took turns in one run; figures are medians, with the least and the most; a ratio is taken within a "
        "turn.",
        "",
        "## Sequence parallel MLP (h, 4 h, h): messages whole, and cut along the ring while parts are multiplied",
        "",
        "| sequence | h | turns | plain, ms | overlap, ms | overlap / plain [quartiles] |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    pays = []
    for (s, h), times in overlap:
        ratio, surely = quartiles(times["overlap"], times["plain"])
        pays += [(s, h)] if surely < 1 else []
        plain, cut = figures(times["plain"]), figures(times["overlap"])
        lines.append(f"| {s} | {h} | {len(times['plain'])} | {plain} | {cut} | {ratio} |")
    where = ", ".join(f"{s} x {h}" for s, h in pays)
    lines += [
        "",
        f"Overlap was faster by 2 % or more at: {where}."
        if pays
        else "At none of these sizes was overlap faster in three of four turns: it does not pay here.",
        "It needs someone to move bytes while this rank multiplies: on the cpu engine that is a core beside the rank's "
        "own, which is not here. It gathers the input once more in backward, and keeps 1/W of it in between.",
        "",
        "## A transformer block (4 h wide MLP, heads of 32): parallelize, and torch's parallelize_module over Gloo",
        "",
        "| sequence | h | turns | ringcomm, tokens/s | torch, tokens/s | torch's time / ours [quartiles] |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for (s, h), times in block:
        ratio, _ = quartiles(times["torch"], times["ringcomm"])
        ours, theirs = rates(times["ringcomm"], s), rates(times["torch"], s)
        lines.append(f"| {s} | {h} | {len(times['torch'])} | {ours} | {theirs} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape")
    parser.add_argument("--out", help="a file for the tables; none: the terminal")
    args = parser.parse_args()
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(rank_main, (folder, args.seconds, queue), nprocs=WORLD, join=False)
        overlap, block = queue.get()
        context.join()
    command = "python -m benchmarks.training.tensor_parallel" + (f" --out {args.out}" if args.out else "")
    text = report(overlap, block, command)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
