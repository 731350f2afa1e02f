"""Pipeline schedules as data: which rank works on which stage and micro-batch, and in which order. They are pure
functions of the numbers of ranks, micro-batches and chunks; `check` proves them, and `pipeline` executes them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from ringcomm.errors import InvalidArgumentError
from ringcomm.validation import expects, one_of, validate_int

COUNT = validate_int(1, 1 << 20, "a whole number of at least 1 and at most 2^20")
"""Numbers of ranks, chunks or micro-batches."""


class Kind(enum.Enum):
    """The kind of work on a micro-batch at a stage."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass: INPUT and WEIGHT at once
    INPUT = "I"  # the gradients of the inputs only, which the stage before waits for
    WEIGHT = "W"  # the gradients of the weights, which no other stage waits for


@dataclass(frozen=True)
class Action:
    """One piece of work; ``str()`` is kind, stage, micro-batch: ``F1.3``."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. Their times follow from what each action needs (`check.times`)."""

    name: str
    world_size: int
    microbatches: int
    rank_of: tuple[int, ...]  # by stage
    rows: tuple[tuple[Action, ...], ...]  # by rank, in order of execution

    @property
    def stages(self) -> int:
        """Stages of the whole model, over all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and weights are computed by separate actions."""
        return any(action.kind in (Kind.INPUT, Kind.WEIGHT) for row in self.rows for action in row)

    def held(self) -> tuple[int, ...]:
        """Returns, by rank, the largest number of activations that it keeps at a time. An activation, a pair of stage
        and micro-batch, lives from its forward pass to the end of its B or W."""
        return tuple(_peak(row) for row in self.rows)


def _peak(row: Iterable[Action]) -> int:
    now = most = 0
    for action in row:
        now += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def _one_stage_each(name: str, world_size: int, rows: Iterable[Iterable[Action]], microbatches: int) -> Schedule:
    return Schedule(name, world_size, microbatches, tuple(range(world_size)), tuple(tuple(row) for row in rows))


@expects("gpipe", world_size=COUNT, microbatches=COUNT)
def gpipe(world_size: int, microbatches: int) -> Schedule:
    """Returns the schedule of all forward passes, then all backward passes; rank r holds stage r.

    Bubble:  (p - 1) / (m + p - 1) of the time, with p ranks and m micro-batches.
    Holds:   m activations on every rank.
    Raises:  InvalidArgumentError where a number is below 1.
    Source:  Huang et al., GPipe, 2019; here the backward passes run in the order of the forward passes.
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    rows = [[Action(kind, rank, i) for kind in kinds for i in range(microbatches)] for rank in range(world_size)]
    return _one_stage_each("gpipe", world_size, rows, microbatches)


@expects("one_f_one_b", world_size=COUNT, microbatches=COUNT)
def one_f_one_b(world_size: int, microbatches: int) -> Schedule:
    """Returns the schedule that alternates forward and backward passes once the first gradient is back; rank r holds
    stage r.

    Bubble:  the same as `gpipe`.
    Holds:   min(m, p - r) activations on rank r.
    Raises:  InvalidArgumentError where a number is below 1.
    Source:  Narayanan et al., PipeDream, 2019 (here with a flush at the end of the step).
    """
    rows = []
    for rank in range(world_size):
        forward = [Action(Kind.FORWARD, rank, i) for i in range(microbatches)]
        backward = [Action(Kind.BACKWARD, rank, i) for i in range(microbatches)]
        rows.append(_alternating(forward, backward, world_size - rank - 1))
    return _one_stage_each("1f1b", world_size, rows, microbatches)


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """Returns ``ahead`` forward passes, then forward and backward passes in turn, then the remaining backward
    passes."""
    ahead = min(ahead, len(forward))
    row = forward[:ahead]
    for i, action in enumerate(backward):
        row += [*forward[ahead + i : ahead + i + 1], action]
    return row


@expects("interleaved", world_size=COUNT, microbatches=COUNT, chunks=COUNT)
def interleaved(world_size: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Returns the 1F1B schedule with several stages on a rank: rank r holds the stages r, r + p, r + 2 p, ...,
    ``chunks`` of them.

    Micro-batches pass in groups; a rank takes a whole group through its first chunk, then through the next. A group has
    p micro-batches if p divides m. Otherwise groups are slightly larger, so that no group has fewer than p (one group
    of m if m < p), and no chunk waits for the one before. With one chunk the order is that of 1F1B.

    Bubble:  (p - 1) / (v m + p - 1) with v chunks and m >= p.
    Holds:   with groups of at most g: at most (v - 1) g + 2 (p - r - 1) + 1 activations (of a chunk) on rank r.
    Raises:  InvalidArgumentError where a number is below 1.
    Source:  Narayanan et al., Megatron-LM, 2021, for m divisible by p.
    """
    groups = _groups(world_size, microbatches)
    rows = []
    for rank in range(world_size):
        mine = range(rank, world_size * chunks, world_size)
        forward = [Action(Kind.FORWARD, stage, i) for group in groups for stage in mine for i in group]
        backward = [Action(Kind.BACKWARD, stage, i) for group in groups for stage in reversed(mine) for i in group]
        later = world_size - rank - 1
        ahead = later if chunks == 1 else 2 * later + (chunks - 1) * len(groups[0])
        rows.append(tuple(_alternating(forward, backward, ahead)))
    rank_of = tuple(range(world_size)) * chunks
    return Schedule("interleaved", world_size, microbatches, rank_of, tuple(rows))


def _groups(world_size: int, microbatches: int) -> list[range]:
    """Returns as many groups of at least ``world_size`` micro-batches as possible, larger groups first: the first
    group's size determines how far ahead the forward passes run."""
    count = max(1, microbatches // world_size)
    least, longer = divmod(microbatches, count)
    starts = [k * least + min(k, longer) for k in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@expects("zero_bubble", world_size=COUNT, microbatches=COUNT)
def zero_bubble(world_size: int, microbatches: int) -> Schedule:
    """Returns ZB-H1: 1F1B with a split backward pass, so that the gradients of inputs travel on at once. Rank r holds
    stage r, and delays r gradients of weights into the time in which 1F1B is idle.

    Bubble:  (p - 1) / (3 m + p - 1) where F, I and W take equally long and m >= p: a third of 1F1B's.
    Holds:   min(m, p) activations at most, as rank 0 does in `one_f_one_b`.
    Raises:  InvalidArgumentError where a number is below 1.
    Source:  Qi et al., Zero Bubble Pipeline Parallelism, 2024.
    """
    rows = []
    for rank in range(world_size):
        forward, inputs, weights = (
            [Action(kind, rank, i) for i in range(microbatches)] for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        )
        row, due = [], iter(weights)
        for action in _alternating(forward, inputs, world_size - rank - 1):
            row.append(action)
            if action.kind is Kind.INPUT and action.microbatch >= rank:
                row.append(next(due))
        rows.append([*row, *due])
    return _one_stage_each("zero-bubble", world_size, rows, microbatches)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
SCHEDULE_NAME = one_of(*SCHEDULES)


@expects("schedule_of", name=SCHEDULE_NAME, world_size=COUNT, microbatches=COUNT, chunks=COUNT)
def schedule_of(name: str, world_size: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the schedule called ``name`` in `SCHEDULES`; ``chunks`` (stages on each rank) is for ``"interleaved"``
    only.

    Raises:  InvalidArgumentError for an unknown name, a number below 1, or chunks for another schedule.
    """
    if name == "interleaved":
        return interleaved(world_size, microbatches, chunks)
    if chunks > 1:
        raise InvalidArgumentError(
            f"schedule_of: expected one stage on each rank for {name!r}, got {chunks} chunks; "
            "pass 'interleaved' or chunks=1"
        )
    return SCHEDULES[name](world_size, microbatches)
