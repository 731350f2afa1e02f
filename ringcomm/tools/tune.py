"""
`ringcomm tune`: measures every algorithm, number of channels and number of threads over the sizes, and writes the
fastest of each to a file for RINGCOMM_TUNING (csrc/cuda/tuning/table.h has its format).

A candidate is measured through such a file of its own, so that the measured configuration is the one that the file will
select. The bits do not depend on the choice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcomm.errors import InvalidArgumentError, RingcommError, UnsupportedError
from ringcomm.terminal import Progress
from ringcomm.tools.bench.options import parse_size, refuse_unwritable, sizes_between

if TYPE_CHECKING:
    import torch

    from ringcomm.comm.communicator import Communicator

VARIABLE = "RINGCOMM_TUNING"
ALGORITHMS = {  # algorithms that auto may use, because they keep the bits
    "all_reduce": ("oneshot", "direct"),
    "reduce_scatter": ("direct",),
    "all_gather": ("direct", "ring", "copy_engine"),
    "broadcast": ("direct", "ring"),
    "all_to_all": ("direct", "copy_engine"),
}
_MOST_ONESHOT_RANKS = 8
_LONGEST_ONESHOT = 4 << 20  # every rank reads every byte of all ranks, so it is useless above
_GAIN = 0.97  # another candidate must take less than this share of the time of the engine's own choice


@dataclass(frozen=True)
class Candidate:
    """One way to run a call; 0: the engine's choice."""

    algorithm: str
    channels: int = 0
    threads: int = 0

    def columns(self) -> str:
        return f"{self.algorithm:<11s} {self.channels:<9d} {self.threads}"


Times = dict[int, float]
"""Seconds of a call, by bytes of its message."""


# ---- one rank ----------------------------------------------------------------------------------------------------


def measure(comm: Communicator, op: str, sizes: Sequence[int], rounds: int, round_ms: float) -> tuple[Times, str]:
    """
    Measures one op on one rank; a collective.

    Returns: the slowest rank's median time for each size, and the lines of the file that describe the hardware.
    """
    import torch

    from ringcomm.tools.bench import clock

    place, largest = clock.place_of(comm), max(sizes)
    source, target = (torch.zeros(largest // 4, device=place) for _ in range(2))
    timer, times = clock.Clock(comm), {}
    for nbytes in sizes:
        call = _call(comm, op, source, target, nbytes // 4)
        seconds = _slowest(comm, timer.total([call] * 3) / 3)
        iters = max(3, min(2000, int(round_ms * 1e-3 / max(seconds, 1e-7))))
        found = []
        for _ in range(rounds):
            comm.barrier()
            found.append(_slowest(comm, timer.total([call] * iters) / iters))
        times[nbytes] = sorted(found)[rounds // 2]
    facts = comm.describe()
    name = str(facts["device"]).partition(": ")[2].partition(",")[0]
    return times, f"device {name}\nlinks {facts['worst_link']}\n"


def _call(comm: Communicator, op: str, source: torch.Tensor, target: torch.Tensor, count: int) -> Any:
    """Returns a function that makes the call on a message of ``count`` elements; depending on the op, rank r has
    only its part of it."""
    part = count // comm.world_size
    whole = part * comm.world_size
    if op == "all_reduce":
        return lambda: comm.all_reduce(source[:count], out=target[:count])
    if op == "reduce_scatter":
        return lambda: comm.reduce_scatter(source[:whole], out=target[:part])
    if op == "all_gather":
        return lambda: comm.all_gather(source[:part], out=target[:whole])
    if op == "all_to_all":
        return lambda: comm.all_to_all(source[:whole], out=target[:whole])
    return lambda: comm.broadcast(source[:count])


def _slowest(comm: Communicator, seconds: float) -> float:
    return max(float(each) for each in comm.exchange(repr(seconds).encode()))


# ---- all of them -------------------------------------------------------------------------------------------------


def candidates(op: str, channels: Sequence[int], threads: Sequence[int]) -> list[Candidate]:
    """Returns every candidate for an op, the engine's own choices first."""
    found = [Candidate(algorithm) for algorithm in ALGORITHMS[op]]
    for candidate in itertools.starmap(Candidate, itertools.product(ALGORITHMS[op], channels, threads)):
        if (candidate.channels or candidate.threads) and candidate.algorithm != "copy_engine":  # which has neither
            found.append(candidate)
    return found


def fits(candidate: Candidate, nbytes: int) -> bool:
    """Whether a candidate is worth measuring at a size."""
    return candidate.algorithm != "oneshot" or nbytes <= _LONGEST_ONESHOT


def measure_all(
    op: str, world_size: int, a: argparse.Namespace, progress: Progress
) -> tuple[dict[Candidate, Times], str]:
    """Returns every candidate's times, and the hardware. Leaves out a candidate that the engine refuses, with a
    message."""
    import ringcomm

    results: dict[Candidate, Times] = {}
    measured_on = ""
    for candidate in candidates(op, a.channels, a.threads):
        progress.done += 1
        if candidate.algorithm == "oneshot" and world_size > _MOST_ONESHOT_RANKS:
            continue
        sizes = tuple(nbytes for nbytes in a.sizes if fits(candidate, nbytes))
        if not sizes:
            continue
        with _file_for(op, world_size, candidate):
            try:
                results[candidate], measured_on = ringcomm.run_ranks(
                    measure, world_size, op, sizes, a.rounds, a.round_ms,
                    ranks=a.ranks_as, timeout=a.timeout, device=a.device,
                )[0]  # fmt: skip
            except (InvalidArgumentError, UnsupportedError) as error:
                print(f"# {op} {candidate.columns()}: {error}", flush=True)
    return results, measured_on


@contextlib.contextmanager
def _file_for(op: str, world_size: int, candidate: Candidate) -> Iterator[None]:
    """Inside, new communicators run ``op`` with a candidate."""
    before = os.environ.get(VARIABLE)
    with tempfile.NamedTemporaryFile("w", suffix=".tuning") as file:
        file.write(line(op, world_size, "max", candidate))
        file.flush()
        os.environ[VARIABLE] = file.name
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def line(op: str, world_size: int, up_to_bytes: int | str, candidate: Candidate) -> str:
    """Returns one entry of the file."""
    return f"{op:<15s} {world_size:<11d} {up_to_bytes!s:<12s} {candidate.columns()}\n"


def choose(results: dict[Candidate, Times], sizes: Sequence[int]) -> list[tuple[int, Candidate]]:
    """Returns the fastest candidate for each size; the engine's own choice if others gain next to nothing."""
    chosen = []
    for nbytes in sizes:
        there = {candidate: times[nbytes] for candidate, times in results.items() if nbytes in times}
        if not there:
            continue
        plain = {candidate: time for candidate, time in there.items() if not (candidate.channels or candidate.threads)}
        best = min(there, key=there.__getitem__)
        usual = min(plain, key=plain.__getitem__, default=best)
        chosen.append((nbytes, usual if there[best] > _GAIN * there[usual] else best))
    return chosen


def entries(op: str, world_size: int, chosen: Sequence[tuple[int, Candidate]]) -> list[str]:
    """Returns the file's lines: each choice is used up to the geometric mean with the next size, the last one
    without limit."""
    lines = []
    for i, (nbytes, candidate) in enumerate(chosen):
        if i + 1 == len(chosen):
            lines.append(line(op, world_size, "max", candidate))
        elif chosen[i + 1][1] != candidate:
            lines.append(line(op, world_size, math.isqrt(nbytes * chosen[i + 1][0]), candidate))
    return lines


# ---- the command -------------------------------------------------------------------------------------------------


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers; write such as 0,4,16")
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ringcomm tune", description="The fastest algorithm, channels and threads for each size."
    )
    p.add_argument("op", nargs="*", metavar="OP", help=f"any of: {', '.join(ALGORITHMS)} (all of them)")
    p.add_argument("-g", "--ranks", type=_numbers, default=(2,), metavar="N,...", help="world sizes (2)")
    p.add_argument("--device", default="cuda", metavar="NAME", help="cuda: round robin; cuda:0: all on it (cuda)")
    p.add_argument("--ranks-as", choices=["threads", "processes"], default="threads", help="(threads)")
    p.add_argument("-b", "--minbytes", type=parse_size, default=1 << 10, metavar="SIZE", help="smallest size (1K)")
    p.add_argument("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest size (64M)")
    p.add_argument("-f", "--stepfactor", type=int, default=4, metavar="N", help="multiply a size (4)")
    p.add_argument(
        "--channels",
        type=_numbers,
        default=(0, 2, 4, 8, 16, 32),
        metavar="N,...",
        help="numbers of channels; 0: the engine's choice",
    )
    p.add_argument(
        "--threads",
        type=_numbers,
        default=(0, 256, 512),
        metavar="N,...",
        help="threads of a block; 0: the engine's choice",
    )
    p.add_argument("--round-ms", type=float, default=5.0, metavar="MS", help="length of a measurement (5)")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements, of which the median counts (3)")
    p.add_argument("-T", "--timeout", type=float, default=60.0, metavar="S", help="time limit of a call, seconds (60)")
    p.add_argument("-o", "--output", default="ringcomm.tuning", metavar="FILE", help="(ringcomm.tuning)")
    return p


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    a = parser.parse_args(list(argv))
    unknown = [op for op in a.op if op not in ALGORITHMS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not tuned; choose from {', '.join(ALGORITHMS)}")
    if a.stepfactor < 2 or a.rounds < 1 or not 1024 <= a.minbytes <= a.maxbytes:
        parser.error("expected -f of 2 or more, --rounds of 1 or more, and 1K <= -b <= -e")
    refuse_unwritable(parser, "-o", a.output)
    a.sizes = sizes_between(a.minbytes, a.maxbytes, 0, a.stepfactor)
    return a


def main(argv: Sequence[str]) -> int:
    """
    Runs the command.

    Returns: the exit status: 0; 1 if a rank failed. Raises: UnsupportedError: there is no cuda engine to tune.
    """
    from ringcomm import _C
    from ringcomm.arrays import devices

    a = _parse(argv)
    if devices.parse(a.device, "tune")[0] != "cuda":
        raise InvalidArgumentError(f"got --device {a.device}, expected cuda or cuda:INDEX: the cpu has no such file")
    if _C.why_no_cuda():
        raise UnsupportedError(f"there is nothing to tune: {_C.why_no_cuda()}")
    try:
        text = tune(a)
    except (InvalidArgumentError, UnsupportedError):
        raise
    except RingcommError as error:
        print(f"ringcomm tune: {error}", file=sys.stderr)
        return 1
    with open(a.output, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"# Wrote {a.output}. To use it: export {VARIABLE}={os.path.abspath(a.output)}, on every rank")
    return 0


def _common(measured_on: set[str]) -> list[str]:
    """Returns the head of the file. Groups of some sizes may have links that differ from the others'; then the file
    is valid over any links."""
    words = [each.split()[0] for each in measured_on]
    return sorted(each for each in measured_on if words.count(each.split()[0]) == 1)


def tune(a: argparse.Namespace) -> str:
    """
    Measures, and prints results as it proceeds.

    Args:    a: the options of the command, as `_parse` returns them.
    Returns: the file. Raises: the ranks' errors.
    """
    import ringcomm

    body, measured_on = [], set[str]()
    for world_size, op in itertools.product(a.ranks, a.op or ALGORITHMS):
        several = len(candidates(op, a.channels, a.threads))
        with Progress(f"tune {op} on {world_size} ranks, candidates", several) as progress:
            results, found = measure_all(op, world_size, a, progress)
        measured_on |= {*found.splitlines(keepends=True)}
        chosen = choose(results, a.sizes)
        for nbytes, candidate in chosen:
            us = results[candidate][nbytes] * 1e6
            print(
                f"# {op:<15s} {world_size} ranks {nbytes:12d} bytes  {candidate.columns():<24s} {us:10.1f} us",
                flush=True,
            )
        body += entries(op, world_size, chosen)
    head = [
        f"# ringcomm {ringcomm.__version__} tune, {time.strftime('%Y-%m-%d %H:%M')}, ranks as {a.ranks_as}\n",
        *_common(measured_on),
        "# op            world_size  up_to_bytes  algorithm   channels  threads     (0: the engine's choice)\n",
    ]
    print("".join([*head, *body]), end="", flush=True)
    return "".join([*head, *body])
