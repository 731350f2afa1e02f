"""`ringcomm schedule`: a pipeline schedule as a table on a terminal or as a picture, without a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ringcomm.pipeline_parallel.check import COSTS, bubble, check, formula, table, times
from ringcomm.pipeline_parallel.picture import draw
from ringcomm.pipeline_parallel.schedules import SCHEDULES, Kind, schedule_of
from ringcomm.terminal import columns


def main(argv: Sequence[str]) -> int:
    """
    Prints a schedule, its idle share, and how many activations each rank holds.

    Returns: the exit status, 0. Raises: InvalidArgumentError: numbers that do not fit.
    """
    a = _parser().parse_args(list(argv))
    forward, inputs, weights = a.costs
    cost = {Kind.FORWARD: forward, Kind.INPUT: inputs, Kind.WEIGHT: weights, Kind.BACKWARD: inputs + weights}
    schedule = schedule_of(a.schedule, a.ranks, a.microbatches, a.chunks)
    check(schedule)
    rows = times(schedule, cost, a.latency)
    share = bubble(schedule, cost)
    known = formula(schedule.name, a.ranks, a.microbatches, a.chunks) if cost == COSTS else None
    print(table(schedule, columns()))
    print(f"\nidle {share:.1%}" + ("" if known is None else f", by the published formula {known:.1%}"))
    print("activations held, by rank: " + " ".join(map(str, schedule.held())))
    if a.out is not None:
        draw(rows, a.out, f"{schedule.name}, {a.ranks} ranks, {a.microbatches} micro-batches")
        print(f"wrote {a.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm schedule",
        description="Which rank of a pipeline works on which micro-batch when: a table of forward passes (F) and "
        "backward passes (B, or I and W for the gradients of inputs and weights), or a picture.",
    )
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help=", ".join(SCHEDULES) + " (1f1b)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="(8)")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="stages on each rank, for interleaved (1)")
    parser.add_argument(
        "--costs", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar=("F", "I", "W"),
        help="how long a forward pass and the gradients of inputs and of weights take, in the picture and the idle "
        "share (1 1 1)",
    )  # fmt: skip
    parser.add_argument("--latency", type=float, default=0.0, help="of a message, in the picture (0)")
    parser.add_argument("--out", metavar="FILE", help="draws it into a .png or an .html")
    return parser
