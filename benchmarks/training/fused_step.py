"""
What a fused pass from gradient to parameter would save: a step of ZeRO-1 as three passes (reduce_scatter, fused AdamW,
all_gather), beside the same three piece by piece, so that a piece is still in the cache when the next call reads it.

    OMP_NUM_THREADS=1 python -m benchmarks.training.fused_step --millions 64

The ranks run both in turns. A cell is the median (min-max) of the turns, of rank 0, the first turn left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

import ringcomm

PIECES = (1 << 15, 1 << 16, 1 << 17, 1 << 18)  # elements of a piece of one rank's shard


class Step:
    """The flat buffers of one rank, and the step in both forms; of each, a call takes the seconds."""

    def __init__(self, comm: ringcomm.Communicator, count: int) -> None:
        self.comm, self.shard_count = comm, count // comm.world_size
        self.gradients, self.params = (comm.empty(count, torch.float32).uniform_(-1, 1) for _ in range(2))
        self.shard, self.first, self.second = (torch.zeros(self.shard_count) for _ in range(3))
        self.steps = torch.ones(())  # with 0, every parameter becomes NaN

    def adamw(self, params: torch.Tensor, gradient: torch.Tensor, begin: int) -> None:
        first, second = (state[begin : begin + len(params)] for state in (self.first, self.second))
        torch._fused_adamw_(
            [params], [gradient], [first], [second], [], [self.steps], lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def passes(self) -> list[float]:
        own = self.params[self.comm.rank * self.shard_count :][: self.shard_count]
        times = [time.perf_counter()]
        self.comm.reduce_scatter(self.gradients, "avg", out=self.shard)
        times.append(time.perf_counter())
        self.adamw(own, self.shard, 0)
        times.append(time.perf_counter())
        self.comm.all_gather(own, out=self.params)
        times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]

    def piecewise(self, piece: int) -> float:
        gradient, window = self.shard[:piece], piece * self.comm.world_size
        began = time.perf_counter()
        for k in range(self.shard_count // piece):
            params = self.params[k * window :][:window]
            own = params[self.comm.rank * piece :][:piece]
            self.comm.reduce_scatter(self.gradients[k * window :][:window], "avg", out=gradient)
            self.adamw(own, gradient, k * piece)
            self.comm.all_gather(own, out=params)
        return time.perf_counter() - began


def measure(comm: ringcomm.Communicator, count: int, turns: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    step = Step(comm, count)
    found: dict[str, list[float]] = {}
    for _ in range(turns + 1):
        comm.barrier()
        parts = step.passes()
        for name, seconds in zip(("reduce_scatter", "AdamW", "all_gather"), parts, strict=True):
            found.setdefault(name, []).append(seconds)
        found.setdefault("three passes", []).append(sum(parts))
        for piece in PIECES:
            comm.barrier()
            found.setdefault(f"pieces of {piece * 4 >> 10} KiB", []).append(step.piecewise(piece))
    return {name: seconds[1:] for name, seconds in found.items()}


def table(found: dict[str, list[float]], header: str) -> str:
    of: Callable[[Sequence[float]], float] = statistics.median
    lines = [header, "", "| | ms | of the three passes |", "|---|--:|--:|"]
    for name, times in found.items():
        ratios = [a / b for a, b in zip(times, found["three passes"], strict=True)]
        spread = f"{of(times) * 1e3:.1f} ({min(times) * 1e3:.1f}–{max(times) * 1e3:.1f})"
        lines.append(f"| {name} | {spread} | {of(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64, help="parameters, in units of 2**20")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--turns", type=int, default=9)
    a = parser.parse_args()
    if (a.millions << 20) % (a.n * PIECES[-1]):
        parser.error(f"expected a number of parameters that {a.n} ranks cut into pieces of {PIECES[-1]}")
    found = ringcomm.run_ranks(measure, a.n, a.millions << 20, a.turns, ranks="processes")[0]
    print(table(found, f"{a.n} ranks, {a.millions} Mi float32 parameters, {a.turns} turns"))


if __name__ == "__main__":
    main()
