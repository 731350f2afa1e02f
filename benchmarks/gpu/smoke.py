"""
Whether each path works at all: every algorithm on 2, 4 and 8 ranks, met in each way, bit by bit against the CPU engine.

    python -m benchmarks.gpu.smoke [--few] [--part smoke] [--resume] [--out FILE]

A line for each cell: PASS or FAIL. After a failure the next cell gets new communicators; only a GPU that this process
cannot use any more ends it. One thread drives all ranks, and no call may take more than 5 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import ringcomm
from benchmarks.gpu.document import BEGUN, LOST, Document, default_path
from benchmarks.gpu.machine import first_line
from benchmarks.gpu.one_thread import (
    EMULATED,
    PLACE,
    Communicator,
    communicators,
    context_is_lost,
    synchronize,
    together,
)

APART = "RINGCOMM_CUDA_APART"
MEETINGS = {"known": "0", "apart": "1", "staged": "2"}
"""How ranks on one device meet, as the variable has it: in one launch that knows all buffers; on flags, as on several
devices; on flags, and without seeing each other's memory, so that everything goes through the staging areas."""
ALGORITHMS = ("direct", "oneshot", "ring", "copies", "copy_engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CALL_S = 60.0 if EMULATED else 5.0
CELL_S = 4 * CALL_S  # the process ends itself: the GPU holds a call that its own limit should have ended
MOST_FAILURES = 2  # of one algorithm met in one way, after which its other cells would only take the time


@contextlib.contextmanager
def met(how: str) -> Iterator[None]:
    """Inside, ranks of new communicators meet so."""
    before = os.environ.get(APART)
    os.environ[APART] = MEETINGS[how]
    try:
        yield
    finally:
        os.environ.pop(APART)
        if before is not None:
            os.environ[APART] = before


@dataclass(frozen=True)
class Cell:
    """Some calls."""

    world_size: int
    how: str
    nbytes: int
    extra: int  # elements more
    dtype: str
    algorithm: str

    def __str__(self) -> str:
        more = f" + {self.extra}" if self.extra else ""
        return f"{self.world_size} ranks {self.how} {self.algorithm} {self.nbytes} B{more} {self.dtype}"

    @property
    def count(self) -> int:
        return self.nbytes // DTYPES[self.dtype].itemsize + self.extra


def cells(few: bool) -> list[Cell]:
    """In the order of the communicators: one for each number of ranks and each way to meet."""
    sizes = [(1 << 10, 0), (1 << 12, 13)] if EMULATED else [(1 << 10, 0), (1 << 20, 13)]
    worlds = (2,) if few or EMULATED else (2, 4, 8)
    every = product(MEETINGS, worlds, sizes[:1] if few else sizes, ("float32",) if few else DTYPES, ALGORITHMS)
    return [Cell(n, how, *size, dtype, algorithm) for how, n, size, dtype, algorithm in every]


# ---- what is called --------------------------------------------------------------------------------------------------


def values(cell: Cell, rank: int) -> torch.Tensor:
    """Of one rank, on the host. For a ring small whole numbers, which are exact in whatever order they are added."""
    chance = torch.Generator().manual_seed(1000 * rank + cell.count)
    if cell.algorithm == "ring":
        return torch.randint(-8, 9, (cell.count,), generator=chance).to(DTYPES[cell.dtype])
    return (torch.rand(cell.count, generator=chance) * 3 - 1.5).to(DTYPES[cell.dtype])


def calls(cell: Cell) -> list[Callable[[Communicator, torch.Tensor], Any]]:
    """Each starts one call of one rank with its values."""
    n, count, options = cell.world_size, cell.count, {"async_op": True}
    whole = count // n * n
    if cell.algorithm == "copies":
        return [
            lambda comm, x: comm.all_gather(x, out=x.new_empty(n * count), **options),
            lambda comm, x: comm.broadcast(x.clone(), n - 1, **options),
            lambda comm, x: comm.all_to_all(x[:whole], out=torch.empty_like(x[:whole]), **options),
        ]
    if cell.algorithm == "copy_engine":

        def named(comm: Communicator) -> dict[str, Any]:  # the cpu engine, which says what is right, has no such thing
            return options | ({"algorithm": cell.algorithm} if comm.engine == "cuda" else {})

        return [
            lambda comm, x: comm.all_gather(x, out=x.new_empty(n * count), **named(comm)),
            lambda comm, x: comm.all_to_all(x[:whole], out=torch.empty_like(x[:whole]), **named(comm)),
        ]
    options |= {"algorithm": cell.algorithm}
    return [lambda comm, x: comm.all_reduce(x, out=torch.empty_like(x), **options)]


@cache
def expected(cell: Cell) -> list[list[torch.Tensor]]:
    """Results of the CPU engine, by rank."""

    def run(comm: Communicator) -> list[torch.Tensor]:
        return [call(comm, values(cell, comm.rank)).wait() for call in calls(cell)]

    return ringcomm.run_ranks(run, cell.world_size, device="cpu", timeout=CALL_S)


def wrong_bytes(comms: list[Communicator], cell: Cell) -> int:
    """Makes the calls and compares; a call that fails raises."""
    given = [values(cell, rank).to(PLACE, copy=True) for rank in range(cell.world_size)]
    found = [together(comms, lambda comm, c=call: c(comm, given[comm.rank])) for call in calls(cell)]
    synchronize(comms)
    wrong = 0
    for rank, results in enumerate(expected(replace(cell, how="known"))):
        for at, want in enumerate(results):
            wrong += int((found[at][rank].cpu().view(torch.uint8) != want.view(torch.uint8)).sum())
    return wrong


# ---- all of it -------------------------------------------------------------------------------------------------------


class Smoke:
    """Runs cells, and keeps what came of each."""

    def __init__(self, document: Document, part: str) -> None:
        self.document, self.part = document, part
        known = document.part(part)
        self.failures = Counter((c.how, c.algorithm) for c in cells(False) if known.get(str(c), "").startswith("FAIL"))
        self.failed = 0

    def run(self, wanted: list[Cell]) -> bool:
        """Whether all of them were run: a process that has lost the GPU leaves the rest to another."""
        while wanted:
            how, n = wanted[0].how, wanted[0].world_size
            group = [cell for cell in wanted if (cell.how, cell.world_size) == (how, n)]
            ended = group[: self.run_group(group)]
            wanted = [cell for cell in wanted if cell not in ended]
            if self.failed and context_is_lost():
                print("the CUDA context of this process is lost", flush=True)
                return not wanted
        return True

    def run_group(self, group: list[Cell]) -> int:
        """Cells of one set of communicators, until one fails; how many have an outcome."""
        ended = 0
        self.begin(group[0])
        try:
            with met(group[0].how), communicators(group[0].world_size, CALL_S) as comms:
                for cell in group:
                    ended += 1
                    if self.failures[cell.how, cell.algorithm] >= MOST_FAILURES:
                        self.end(cell, "SKIP", f"{cell.how} {cell.algorithm} has failed {MOST_FAILURES} times")
                    elif not self.run_cell(comms, cell):
                        break
        except Exception as error:
            if ended:
                self.document.put("failed", {f"{self.part}: closing after {group[ended - 1]}": first_line(error)})
                return ended
            for cell in group:  # there are no communicators for any
                self.fail(cell, first_line(error))
            return len(group)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return ended

    def run_cell(self, comms: list[Communicator], cell: Cell) -> bool:
        self.begin(cell)
        started = time.monotonic()
        try:
            wrong = wrong_bytes(comms, cell)
        except Exception as error:
            self.fail(cell, first_line(error))
            return False
        if wrong:
            self.fail(cell, f"{wrong} bytes differ from the CPU engine's")
            return False
        self.end(cell, "PASS", f"{(time.monotonic() - started) * 1e3:.0f} ms")
        return True

    def begin(self, cell: Cell) -> None:
        faulthandler.dump_traceback_later(CELL_S, exit=True)
        self.document.put(self.part, {str(cell): BEGUN})

    def fail(self, cell: Cell, why: str) -> None:
        self.failures[cell.how, cell.algorithm] += 1
        self.failed += 1
        self.end(cell, "FAIL", why)

    def end(self, cell: Cell, verdict: str, said: str) -> None:
        self.document.put(self.part, {str(cell): f"{verdict}: {said}"})
        print(f"{verdict} {cell}: {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_path(), help="gpu.json, wherever it is")
    parser.add_argument("--part", default="smoke", help="of the file, for the outcomes")
    parser.add_argument("--few", action="store_true", help="two ranks and small messages: for a checker of memory")
    parser.add_argument("--resume", action="store_true", help="leave out what has an outcome in the file")
    a = parser.parse_args()
    if reason := ringcomm._C.why_no_cuda():
        print(f"smoke.py needs a CUDA device: {reason}", file=sys.stderr)
        return 2
    document = Document(a.out)
    if not a.resume:
        document.clear(a.part)
    known = document.part(a.part)
    smoke = Smoke(document, a.part)
    if not smoke.run([cell for cell in cells(a.few) if str(cell) not in known]):
        return LOST
    document.end(a.part)
    outcomes = document.part(a.part).values()
    passed = sum(said.startswith("PASS") for said in outcomes)
    print(f"{passed} of {len(outcomes)} cells pass", flush=True)
    return int(passed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
