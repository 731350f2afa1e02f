"""Compares random models on random meshes with one process, for any length of time.

    OMP_NUM_THREADS=1 python -m benchmarks.training.mesh_fuzz --programs 5000 --workers 2 --write

tests/support/mesh/programs.py defines the programs, tests/mesh/test_fuzz.py is the short form. Program k of a seed is
always the same. A program that fails is reduced and printed; the run then continues. Ctrl-C ends it with the report so
far. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import signal
import sys
import textwrap
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.mesh.programs import generate
from tests.support.mesh.runner import CALL_LIMIT_S, PROGRAM_LIMIT_S, Runner

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mesh_fuzz.md"
CHUNK = 10
POOL = 1000
"""Number of programs after which the workers are replaced."""


@dataclass
class Counts:
    """Counts of the run.

    Attributes:
        refused: number of refusals by message, without names and numbers.
        examples: a program for each of these messages.
    """

    programs: int = 0
    bitwise: int = 0
    unstable: int = 0
    longest_s: float = 0.0
    features: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds the counts of a worker."""
        self.programs, self.bitwise = self.programs + other.programs, self.bitwise + other.bitwise
        self.unstable += other.unstable
        self.longest_s = max(self.longest_s, other.longest_s)
        self.features.update(other.features)
        self.refused.update(other.refused)
        self.examples = {**other.examples, **self.examples}
        self.failed += other.failed


def start() -> None:
    """Initialises a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run(seeds: range, shrinks: bool) -> Counts:
    """Runs the programs of these seeds."""
    counts, runner = Counts(), Runner()
    for seed in seeds:
        program, began = generate(seed), time.monotonic()
        failure = runner.failure(program)
        counts.longest_s = max(counts.longest_s, time.monotonic() - began)
        counts.features.update(program.all_features)
        if failure is not None:
            smaller = Runner().shrunk(program, failure) if shrinks else program
            counts.failed.append(f"program {seed} fails: {failure}\n{smaller}")
    counts.programs, counts.bitwise, counts.unstable = len(seeds), runner.bitwise, runner.unstable
    counts.refused, counts.examples = runner.refused, runner.examples
    return counts


def wrapped(text: str) -> str:
    """Wraps text to 120 columns, breaking only outside of quotes; continuation lines are indented."""
    whole = re.sub(r"'[^'\n]*'", lambda match: match[0].replace(" ", "\0"), text)
    lines = [textwrap.wrap(line, 120, subsequent_indent=" " * 8) for line in whole.splitlines()]
    return "\n".join(part.replace("\0", " ") for parts in lines for part in parts)


def page(counts: Counts, seconds: float, asked: int) -> str:
    """Returns the result page."""
    refused = sum(counts.refused.values())
    compared = counts.programs - refused - counts.unstable - len(counts.failed)
    rows = [
        "# Random models on random meshes",
        "",
        f"`python -m benchmarks.training.mesh_fuzz {' '.join(sys.argv[1:])}`",
        "",
        f"{counts.programs} of {asked} programs in {seconds:.0f} s: {compared} had the losses, gradients' norms and",
        "final weights of one process that runs the plain model on the whole batch (float64, rtol 1e-9),",
        f"{counts.bitwise} of them also bit by bit those of one that runs the same micro-batches; {refused}",
        f"({refused / max(1, counts.programs):.1%}) were refused by a sentence before the first step on all ranks;",
        f"{counts.unstable} diverge, so that one process has other numbers too when its weights are moved by 4e-16;",
        f"{len(counts.failed)} failed. The longest took {counts.longest_s:.1f} s; a call that waits for",
        f"{CALL_LIMIT_S:.0f} s or a program of {PROGRAM_LIMIT_S} s would have failed.",
        "",
        "## Failures",
        "",
        *([f"```\n{wrapped(each)}\n```" for each in counts.failed] or ["None."]),
        "",
        "## Refusals",
        "",
        "| programs | such as | sentence |",
        "|--:|--:|---|",
        *(f"| {n} | {counts.examples[text]} | {text} |" for text, n in counts.refused.most_common()),
        "",
        "## Programs by what is in them",
        "",
        "| | programs |",
        "|---|--:|",
        *(f"| {name} | {n} |" for name, n in sorted(counts.features.items())),
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--no-shrink", action="store_true", help="prints failing programs as they are")
    parser.add_argument(
        "--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}, after each {POOL}, too"
    )
    a = parser.parse_args()
    first, began, counts = a.seed * 10**6, time.monotonic(), Counts()
    chunks = [range(at, min(at + CHUNK, first + a.programs)) for at in range(first, first + a.programs, CHUNK)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore it
    for at in range(0, len(chunks), POOL // CHUNK):
        some = chunks[at : at + POOL // CHUNK]
        with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn"), start) as pool:
            try:
                for done in pool.map(run, some, [not a.no_shrink] * len(some)):
                    counts.add(done)
                    for text in done.failed:
                        print(f"\n{text}", flush=True)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                pool.shutdown(cancel_futures=True)
                break
        if a.write:
            RESULTS.write_text(page(counts, time.monotonic() - began, a.programs))
    text = page(counts, time.monotonic() - began, a.programs)
    print(text)
    if a.write:
        RESULTS.write_text(text)
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
