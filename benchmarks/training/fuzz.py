"""Compares every visible bit of random training programs in every placement, for any length of time.

    OMP_NUM_THREADS=1 python -m benchmarks.training.fuzz --programs 20000 --workers 2 --write
    OMP_NUM_THREADS=1 python -m benchmarks.training.fuzz --programs 500 --processes
    OMP_NUM_THREADS=1 python -m benchmarks.training.fuzz --programs 500 --without checkpoint.reentrant mixed_precision

tests/support/training/programs.py defines the programs, tests/training/test_fuzz.py is the short form. Program k of a
seed is always the same. A program that fails is reduced and printed; the run then continues. Ctrl-C ends it with the
report so far. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.support.training.programs import FEATURES, generate
from tests.support.training.runner import Failure, Runner

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "training_fuzz.txt"
CHUNK = 20
POOL = 2000
"""Number of programs after which the workers are replaced. Some programs leave reference cycles through autograd
graphs, which are never collected, as in torch alone; with thousands of them Python's garbage collector stops all
threads for seconds."""
Found = tuple[int, list[Failure], str]
"""A failing program: its seed, the failure, and the reduced program."""


class Worker:
    """The state of a worker process."""

    runner: Runner
    allowed: tuple[str, ...]
    shrinks: bool
    stopped = longest_s = 0.0  # times of Python's garbage collector: the last start, and the longest stop

    @classmethod
    def start(cls, allowed: tuple[str, ...], shrinks: bool, processes: bool) -> None:
        """Initialises a worker process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends it
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's advice about single programs
        cls.runner, cls.allowed, cls.shrinks = Runner(processes), allowed, shrinks
        gc.callbacks.append(cls.collected)

    @classmethod
    def collected(cls, phase: str, _: object) -> None:
        """Called by Python's garbage collector."""
        now = time.monotonic()
        if phase == "stop":
            cls.longest_s = max(cls.longest_s, now - cls.stopped)
        cls.stopped = now

    @classmethod
    def run(cls, seeds: range) -> tuple[int, Counter[str], Counter[str], list[Found], float]:
        """Returns the comparisons, features, placements, failures, and the longest time for which all threads were
        stopped."""
        features, places, failed = Counter[str](), Counter[str](), list[Found]()
        before = cls.runner.comparisons
        for seed in seeds:
            program = generate(seed, cls.allowed)
            features.update([*program.features, *(f"block {block.kind}" for block in program.blocks)])
            features.update([f"optimizer {program.optimizer}", f"{program.world_size} ranks"])
            found = cls.runner.failures(program, ran=places)
            if found:
                text = str(cls.runner.shrunk(program, found[0], cls.allowed)) if cls.shrinks else str(program)
                failed.append((seed, found, text))
        return cls.runner.comparisons - before, features, places, failed, cls.longest_s


class Report:
    """The counts and failures of the run."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.began = a, time.monotonic()
        self.programs, self.comparisons, self.failed, self.longest_s = 0, 0, 0, 0.0
        self.features, self.places, self.causes = Counter[str](), Counter[str](), Counter[str]()

    def add(
        self,
        count: int,
        comparisons: int,
        features: Counter[str],
        places: Counter[str],
        failed: list[Found],
        longest_s: float,
    ) -> None:
        """Adds a worker's results, and prints the programs that failed."""
        self.programs, self.comparisons = self.programs + count, self.comparisons + comparisons
        self.features.update(features)
        self.places.update(places)
        self.failed += len(failed)
        self.longest_s = max(self.longest_s, longest_s)
        for seed, found, text in failed:
            self.causes.update({" ".join(failure.cause) for failure in found})
            lines = "\n  ".join(map(str, found))
            print(f"\nprogram {seed} fails:\n  {lines}\nmade smaller:\n{text}", flush=True)

    def rows(self) -> list[str]:
        """Returns the report, line by line."""
        seconds = time.monotonic() - self.began
        rows = [f"{self.programs} programs in {seconds:.0f} s, {self.programs / seconds:.1f} in a second"]
        rows.append(f"{self.comparisons} comparisons of a placement with the first one, {self.failed} programs fail")
        rows.append(f"longest stop by Python's garbage collector {self.longest_s:.1f} s")
        rows += [f"  failed {count:6d}  {cause}" for cause, count in self.causes.most_common()]
        rows += [f"  ran {name:30s} {count:9d}" for name, count in sorted(self.places.items())]
        return rows + [f"  {name:34s} {count:9d}" for name, count in sorted(self.features.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--processes", action="store_true", help="ranks are processes, not threads")
    parser.add_argument("--without", nargs="*", default=[], choices=FEATURES, metavar="FEATURE", help="left out")
    parser.add_argument("--no-shrink", action="store_true", help="prints failing programs as they are")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}")
    a = parser.parse_args()
    allowed = tuple(name for name in FEATURES if name not in a.without)
    first = a.seed * 10**6
    chunks = [range(at, min(at + CHUNK, first + a.programs)) for at in range(first, first + a.programs, CHUNK)]
    report = Report(a)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore it
    fresh, given = multiprocessing.get_context("spawn"), (allowed, not a.no_shrink, a.processes)
    for at in range(0, len(chunks), POOL // CHUNK):
        some = chunks[at : at + POOL // CHUNK]
        with ProcessPoolExecutor(a.workers, fresh, Worker.start, given) as pool:
            try:
                for seeds, done in zip(some, pool.map(Worker.run, some), strict=True):
                    report.add(len(seeds), *done)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                pool.shutdown(cancel_futures=True)
                break
    text = "\n".join([f"$ python -m benchmarks.training.fuzz {' '.join(sys.argv[1:])}", *report.rows()])
    print(text)
    if a.write:
        RESULTS.write_text(text + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
