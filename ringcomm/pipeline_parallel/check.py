"""Proves that a schedule is complete, in order and free of deadlock; computes when each action runs, and how long the
ranks are idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ringcomm.errors import InvalidArgumentError
from ringcomm.pipeline_parallel.schedules import SCHEDULE_NAME, Action, Kind, Schedule
from ringcomm.validation import expects

Timed = tuple[Action, float, float]
"""An action, its start and its end."""

COSTS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
"""How long each kind takes, in forward passes of one stage."""

_GRADIENT = (Kind.BACKWARD, Kind.INPUT)  # send the gradient of their inputs to the stage before
_LAST = (Kind.BACKWARD, Kind.WEIGHT)  # add to the gradients of the weights, and free the activations

_Done = tuple[bool, int, int]
"""An event that an action may need: (whether it is a forward pass, not a gradient of inputs; its stage; its
micro-batch)."""


def times(schedule: Schedule, cost: Mapping[Kind, float] = COSTS, latency: float = 0.0) -> list[list[Timed]]:
    """Returns, by rank, every action with its start and end, from time 0.

    An action starts when its rank is free and its input has arrived: the activations of the stage before, or the
    gradient of the stage after. A message between two ranks arrives ``latency`` after the end of the action that sends
    it, and does not block the sender.

    Raises:  InvalidArgumentError where the schedule cannot finish, or a time is negative or missing.
    """
    _refuse_costs(schedule, cost, latency)
    rows = _simulated(schedule, cost, latency)
    _refuse_deadlock("times", schedule, [len(row) for row in rows])
    return rows


def bubble(schedule: Schedule, cost: Mapping[Kind, float] = COSTS) -> float:
    """Returns the idle share of the time from the first start to the last end, as the mean over the ranks.

    Raises:  InvalidArgumentError as `times` does.
    """
    rows = times(schedule, cost)
    span = max((end for row in rows for _, _, end in row), default=0.0)
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - busy / (span * len(rows)) if span else 0.0


@expects("formula", name=SCHEDULE_NAME)
def formula(name: str, p: int, m: int, v: int = 1) -> float | None:
    """Returns the published idle share for p ranks, m micro-batches and v chunks.

    It assumes that a backward pass takes twice as long as a forward pass (for ``"zero-bubble"``: that F, I and W take
    equally long). None where no formula applies: ``"interleaved"`` with several chunks, and ``"zero-bubble"``, need m
    to be at least p.

    Raises:  InvalidArgumentError for an unknown name.
    """
    if m < p and (name == "zero-bubble" or v > 1):
        return None
    return (p - 1) / ({"zero-bubble": 3, "interleaved": v}.get(name, 1) * m + p - 1)


def check(schedule: Schedule) -> None:
    """Proves that the schedule can run, or raises.

    * Every stage has, for each micro-batch, one F and either one B or one I and one W, on the stage's rank, in that
      order.
    * At each stage gradients are computed in the order of the micro-batches, so that their sums have the bits of a
      plain loop.
    * Sender and receiver of each tag (a stage and a direction) name the micro-batches in the same order.
    * No rank waits for another for ever.

    Cost:    a small multiple of the number of actions.
    Raises:  InvalidArgumentError that names the first fault.
    """
    _refuse_ranks(schedule)
    _refuse_misplaced(schedule)
    _refuse_incomplete(schedule)
    by_stage = _by_stage(schedule)
    _refuse_disorder(schedule, by_stage)
    _refuse_gradient_disorder(schedule, by_stage)
    _refuse_crossed_messages(schedule, by_stage)
    _refuse_deadlock("check", schedule, [len(row) for row in _simulated(schedule, COSTS, 0.0)])


def _refuse_costs(schedule: Schedule, cost: Mapping[Kind, float], latency: float) -> None:
    for kind in {action.kind for row in schedule.rows for action in row}:
        if not cost.get(kind, -1.0) >= 0:
            got = cost.get(kind, "none")
            raise InvalidArgumentError(
                f"times: expected a cost of at least 0 for {kind.name}, got {got}; name one for each kind"
            )
    if not latency >= 0:
        raise InvalidArgumentError(f"times: expected a latency of at least 0, got {latency}; pass 0 or more")


def _simulated(schedule: Schedule, cost: Mapping[Kind, float], latency: float) -> list[list[Timed]]:
    """Runs each rank until an event that it needs is missing, and again once that event has happened. Returns the
    actions that ran."""
    last, rank_of = schedule.stages - 1, schedule.rank_of
    rows: list[list[Timed]] = [[] for _ in schedule.rows]
    ends: dict[_Done, float] = {}
    waiting: dict[_Done, list[int]] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        timed = rows[rank]
        now = timed[-1][2] if timed else 0.0
        for action in schedule.rows[rank][len(timed) :]:
            needed = _needs(action, last)
            missing = next((one for one in needed if one not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max([now, *(ends[one] + (latency if rank_of[one[1]] != rank else 0.0) for one in needed)])
            now = start + cost[action.kind]
            timed.append((action, start, now))
            if action.kind is not Kind.WEIGHT:
                done = (action.kind is Kind.FORWARD, action.stage, action.microbatch)
                ends[done] = now
                ready += waiting.pop(done, ())
    return rows


def _needs(action: Action, last: int) -> list[_Done]:
    """Returns the events that must precede the action; ``last`` is the number of the last stage."""
    stage, i = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return [(True, stage - 1, i)] if stage else []
    if action.kind is Kind.WEIGHT:
        return [(False, stage, i)]
    return [(True, stage, i), (False, stage + 1, i)] if stage < last else [(True, stage, i)]


def _fail(schedule: Schedule, rank: int, expected: str, got: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"check: rank {rank} of schedule {schedule.name!r} {got}, expected {expected}; {remedy}"
    )


def _refuse_ranks(schedule: Schedule) -> None:
    world_size = schedule.world_size
    if len(schedule.rows) != world_size:
        raise InvalidArgumentError(
            f"check: schedule {schedule.name!r} has {len(schedule.rows)} rows, expected one for each of "
            f"{world_size} ranks; make them equal"
        )
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(
                f"check: schedule {schedule.name!r} puts stage {stage} on rank {rank}, expected a rank from 0 to "
                f"{world_size - 1}; change rank_of"
            )


def _refuse_misplaced(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                bounds = f"stages below {schedule.stages} and micro-batches below {schedule.microbatches}"
                raise _fail(schedule, rank, bounds, f"has {action}", "remove it")
            owner = schedule.rank_of[action.stage]
            if owner != rank:
                raise _fail(schedule, rank, f"it on rank {owner}, which holds the stage", f"has {action}", "move it")


def _refuse_incomplete(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.rows):
        seen = Counter((action.kind, action.stage, action.microbatch) for action in row)
        for (kind, stage, i), count in seen.items():
            if count > 1:
                got = f"has {Action(kind, stage, i)} {count} times"
                raise _fail(schedule, rank, "it once", got, "remove the others")
        for stage in schedule.stages_of(rank):
            for i in range(schedule.microbatches):
                has = "".join(kind.value for kind in Kind if (kind, stage, i) in seen)
                if has not in ("FB", "FIW"):
                    got = f"has {', '.join(has) or 'nothing'} of micro-batch {i} at stage {stage}"
                    raise _fail(schedule, rank, "F and B, or F, I and W, once each", got, "add or remove actions")


def _by_stage(schedule: Schedule) -> list[list[Action]]:
    stages: list[list[Action]] = [[] for _ in schedule.rank_of]
    for row in schedule.rows:
        for action in row:
            stages[action.stage].append(action)
    return stages


def _refuse_disorder(schedule: Schedule, by_stage: Sequence[Sequence[Action]]) -> None:
    """Raises unless F precedes B, and F precedes I, which precedes W."""
    for rank, actions in zip(schedule.rank_of, by_stage, strict=True):
        before: dict[int, Kind] = {}
        for action in actions:
            kind, due = action.kind, before.get(action.microbatch)
            if due is not (None if kind is Kind.FORWARD else Kind.INPUT if kind is Kind.WEIGHT else Kind.FORWARD):
                raise _fail(schedule, rank, "F before B, and F before I before W", f"has {action} too early", "move it")
            before[action.microbatch] = kind


def _microbatches(actions: Sequence[Action], kinds: tuple[Kind, ...]) -> list[int]:
    return [action.microbatch for action in actions if action.kind in kinds]


def _refuse_gradient_disorder(schedule: Schedule, by_stage: Sequence[Sequence[Action]]) -> None:
    wanted = list(range(schedule.microbatches))
    for stage, actions in enumerate(by_stage):
        for kinds in (_GRADIENT, _LAST):
            got = _microbatches(actions, kinds)
            if got != wanted:
                at = next(i for i, microbatch in enumerate(got) if microbatch != i)
                first = f"has the {' or '.join(k.value for k in kinds)} of micro-batch {got[at]} at stage {stage}"
                raise _fail(schedule, schedule.rank_of[stage], f"that of {at} first", first, "sort them by micro-batch")


def _refuse_crossed_messages(schedule: Schedule, by_stage: Sequence[Sequence[Action]]) -> None:
    """Raises where a receiver expects a tag's messages in another order than the sender sends them.

    Messages are matched by their tag alone. Gradients need no check: they have the order 0, 1, 2, ... at both ends
    already.
    """
    for stage in range(1, schedule.stages):
        sent, expected = (_microbatches(by_stage[s], (Kind.FORWARD,)) for s in (stage - 1, stage))
        if sent != expected:
            at = next(k for k, (x, y) in enumerate(zip(sent, expected, strict=True)) if x != y)
            got = f"has F{stage}.{expected[at]} where stage {stage - 1} sends micro-batch {sent[at]}"
            raise _fail(schedule, schedule.rank_of[stage], "the sender's order", got, "use one order in both")


def _refuse_deadlock(call: str, schedule: Schedule, reached: Sequence[int]) -> None:
    """Raises where a rank did not reach its end: names the cycle of ranks that wait for one another, or the missing
    action."""
    rank = next((rank for rank, row in enumerate(schedule.rows) if reached[rank] < len(row)), None)
    if rank is None:
        return
    links: dict[int, str] = {}
    while rank not in links:
        action = schedule.rows[rank][reached[rank]]
        text, owner, planned = _missing(schedule, action, reached)
        links[rank] = f"rank {rank} with {action} for {text} of rank {owner}"
        if not planned:
            raise InvalidArgumentError(
                f"{call}: schedule {schedule.name!r} cannot end, rank {rank} waits with {action}, expected {text} on "
                f"rank {owner}, got none; add it"
            )
        rank = owner
    order = list(links)
    circle = ", ".join(links[rank] for rank in order[order.index(rank) :])
    raise InvalidArgumentError(
        f"{call}: schedule {schedule.name!r} cannot end, expected no circle of waiting ranks, got {circle}; "
        "move the awaited actions earlier"
    )


def _missing(schedule: Schedule, action: Action, reached: Sequence[int]) -> tuple[str, int, bool]:
    """Returns the first missing event that ``action`` needs: its name, its rank, and whether the schedule has it."""
    for forward, stage, i in _needs(action, schedule.stages - 1):
        kinds = (Kind.FORWARD,) if forward else _GRADIENT
        rank = schedule.rank_of[stage]
        row = schedule.rows[rank]
        found = [k for k, one in enumerate(row) if one.kind in kinds and (one.stage, one.microbatch) == (stage, i)]
        if not found or found[0] >= reached[rank]:
            name = row[found[0]] if found else Action(kinds[0], stage, i)
            return str(name), rank, bool(found)
    raise AssertionError(f"{action} misses nothing")


def table(schedule: Schedule, columns: int | None = None) -> str:
    """Returns the schedule as text on a time axis: a line for each rank, a column for each unit of time; in several
    blocks, one below the other, if it is wider than ``columns`` characters.

    A forward pass, I and W take one unit; a whole backward pass takes two (``--`` is its second half); ``.`` is idle.
    The stage is named where a rank has several.
    """
    rows = times(schedule)
    several = schedule.stages > schedule.world_size
    end = int(max(stop for row in rows for _, _, stop in row))
    cells = [["."] * end for _ in rows]
    for line, row in zip(cells, rows, strict=True):
        for action, start, stop in row:
            label = str(action) if several else f"{action.kind.value}{action.microbatch}"
            line[int(start) : int(stop)] = [label, *["--"] * (int(stop - start) - 1)]
    names = [f"rank {rank}" for rank in range(schedule.world_size)]
    return _aligned(["time", *names], [[str(t) for t in range(end)], *cells], columns)


def _aligned(names: list[str], lines: list[list[str]], columns: int | None) -> str:
    left = max(map(len, names)) + 1
    width = max(len(cell) for line in lines for cell in line) + 1
    fit = len(lines[0]) if columns is None else max(1, (columns - left) // width)
    blocks = [
        "\n".join(
            name.ljust(left) + "".join(f" {cell}".ljust(width) for cell in line[first : first + fit]).rstrip()
            for name, line in zip(names, lines, strict=True)
        )
        for first in range(0, len(lines[0]), fit)
    ]
    return "\n\n".join(blocks)
