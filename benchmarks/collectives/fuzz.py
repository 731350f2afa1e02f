"""Compares random programs of collectives with one process, for any length of time: every bit of every result is
checked.

    OMP_NUM_THREADS=1 python -m benchmarks.collectives.fuzz --programs 100000 --write     # ranks are threads
    OMP_NUM_THREADS=1 python -m benchmarks.collectives.fuzz --processes --programs 10000  # ranks are processes
    OMP_NUM_THREADS=1 python -m benchmarks.collectives.fuzz --backend --programs 10000    # over torch.distributed

tests/support/collectives/programs.py defines the programs, tests/comm/test_fuzz.py is the short form. Program k of a
seed is always the same. A program that fails is reduced and printed as calls; the run then continues. Exit status 1 if
any failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.collectives.processes import BackendRanks, ProcessRanks, for_the_backend
from tests.support.collectives.programs import WORLD_SIZES, Program, random_program, shrunk
from tests.support.collectives.ranks import Pool, Ranks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.txt"
MOST_FAILURES = 5


class Fuzz:
    """One run: counts and failures."""

    def __init__(self, pool: Pool, a: argparse.Namespace) -> None:
        self.pool, self.seed, self.world_sizes = pool, a.seed, a.worlds
        self.kind: Callable[[Program], Program] = for_the_backend if a.backend else lambda program: program
        self.began = time.monotonic()
        self.programs, self.calls, self.failures = 0, Counter[str](), 0

    def one(self, number: int) -> None:
        """Runs program ``number`` of the seed."""
        program = self.kind(random_program(random.Random(f"{self.seed}/{number}"), self.world_sizes))
        self.programs += 1
        self.calls.update(step.op for step in program.steps)
        if not (said := self.pool.run(program)):
            return
        self.failures += 1
        print(f"\nprogram {number} of seed {self.seed} fails:\n{said}\n", flush=True)
        smallest = shrunk(program, lambda each: bool(self.pool.run(each)))
        print(f"made smaller:\n{smallest}\n{self.pool.run(smallest) or 'does not fail again'}\n", flush=True)

    def report(self) -> str:
        minutes = (time.monotonic() - self.began) / 60
        rows = [f"{self.programs} programs in {minutes:.1f} minutes, {self.programs / minutes / 60:.0f} in a second"]
        rows.append(f"{self.calls.total()} calls, {self.pool.checked} elements checked, {self.failures} programs fail")
        rows += [f"  {name:22s} {count:9d}" for name, count in sorted(self.calls.items())]
        return "\n".join(rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--programs", type=int, default=10_000, help="how many (10000)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--worlds", type=int, nargs="+", default=WORLD_SIZES, metavar="W", help="numbers of ranks (2 3 4 5)")
    p.add_argument("--first", type=int, default=0, metavar="K", help="begin with program K of the seed (0)")
    p.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds from one line to the next (60)")
    kinds = p.add_mutually_exclusive_group()
    kinds.add_argument("--processes", action="store_true", help="ranks are processes")
    kinds.add_argument("--backend", action="store_true", help='ranks are processes of the torch backend "ringcomm"')
    p.add_argument("--write", action="store_true", help="the report to benchmarks/results/fuzz.txt too, behind its own")
    a = p.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    ranks: type[Ranks] = BackendRanks if a.backend else ProcessRanks if a.processes else Ranks
    with Pool(ranks) as pool:
        fuzz = Fuzz(pool, a)
        said = time.monotonic()
        for number in range(a.first, a.first + a.programs):
            fuzz.one(number)
            if fuzz.failures == MOST_FAILURES:
                break
            if time.monotonic() > said + a.every:
                said = time.monotonic()
                print(fuzz.report().splitlines()[0], f"{fuzz.failures} fail", sep="; ", flush=True)
    report = f"$ python -m benchmarks.collectives.fuzz {' '.join(sys.argv[1:])}\n{fuzz.report()}\n"
    print(report)
    if a.write:
        before = RESULTS.read_text() + "\n" if RESULTS.exists() else ""
        RESULTS.write_text(before + report)
    raise SystemExit(int(fuzz.failures > 0))


if __name__ == "__main__":
    main()
