"""Random programs of collectives: what they consist of, how one is drawn, and how a failing one is made smaller.

A program is plain data. `collectives.calls` says what it asks of each rank and what must come of it,
`collectives.arrays` in which memory, `collectives.ranks` runs it. Draw one with `programs()` in hypothesis, or with
``random_program(generator)`` where speed matters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from tests.support.reference import ARITHMETIC, BITWISE, DTYPES

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several; the first are the simplest."""

REDUCING = ("all_reduce", "reduce_scatter", "reduce", "reduce_scatter_list", "all_reduce_coalesced")
ALGORITHMS = {  # `oneshot` is all_reduce's alone
    "all_reduce": ("auto", "ring", "direct", "oneshot"),
    **dict.fromkeys(("reduce_scatter", "all_gather", "broadcast"), ("auto", "ring", "direct")),
}
MOVING = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")
LISTS = ("all_gather_list", "gather_list", "scatter_list", "all_to_all_list", "all_to_all_uneven")
OPS = (*REDUCING, *MOVING, *LISTS, "messages", "from_anyone", "barrier", "all_reduce", "reduce_scatter")
MOVED_ONLY = ("uint16", "uint32", "uint64", "complex32", "complex64", "complex128")
MOVED = (*DTYPES, *MOVED_ONLY)
SUMMED = (*DTYPES, "complex64", "complex128")

# Elements of a part. Beside the usual ones those where something changes: one line, the short slots of 2 KiB, the 16
# and 32 KiB up to which messages go other ways; HUGE fills many slots.
HUGE = 1 << 30
COUNTS = (
    *(1, 0, 2, 3, 5, 8, 15, 16, 17, 31, 64, 65, 100, 120, 127, 256, 257, 511, 513, 1000) * 3,
    *(1023, 1025, 2048, 2049, 4095, 4099, 8193, 16_385) * 2,
    *(40_000, HUGE),
)
LAYOUTS = ("plain", "offset", "strided")
LENT = (False, False, False, True)


@dataclass(frozen=True)
class Grouping:
    """Communicators made of those of an earlier grouping: a call of ``comm.split``, ``subgroup`` or ``dup``."""

    parent: int = 0
    how: str = "dup"  # or "split", "subgroup"
    colors: tuple[int | None, ...] = ()  # of each rank of the world; of a subgroup: the ranks, in their order
    keys: tuple[int, ...] = ()

    def members(self, parents: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The ranks of the world in each new communicator, by its ranks."""
        if self.how == "dup":
            return list(parents)
        if self.how == "subgroup":
            return [tuple(parent[r % len(parent)] for r in self.chosen(len(parent))) for parent in parents]
        made = []
        for parent in parents:
            for color in sorted({self.colors[g] for g in parent if self.colors[g] is not None}):  # type: ignore[type-var]
                mine = [g for g in parent if self.colors[g] == color]
                made.append(tuple(sorted(mine, key=lambda g: self.keys[g])))
        return made

    def chosen(self, world_size: int) -> list[int]:
        """The ranks of a parent of ``world_size`` that a subgroup names."""
        return list(dict.fromkeys((r or 0) % world_size for r in self.colors))


@dataclass(frozen=True)
class Step:
    """One call, made by every rank of the communicators of one grouping. What a call has no use for is ignored."""

    op: str = "all_reduce"
    dtype: str = "float32"
    count: int = 1
    dims: int = 1  # 0: a scalar, where the call takes one
    layout: str = "plain"
    library: str = "torch"
    lent: bool = False  # memory from comm.empty
    place: str = "in"  # in place; "out": out= is passed; "new": it is not, where that can be left out
    wild: bool = False  # any bits: NaN, infinities, zeros of both signs, the largest, the smallest
    reduction: int = 0  # which of those that the type has
    algorithm: int = 0  # which of those that the call has
    root: int = 0
    group: int = 0
    how: str = "now"  # or "later" (async_op=True) or "coalesced"
    seed: int = 0  # of values, sizes of uneven parts, tags, and the order of waits


@dataclass(frozen=True)
class Program:
    """Groupings are made first, each after the other; then come the steps."""

    world_size: int = 2
    groupings: tuple[Grouping, ...] = ()
    steps: tuple[Step, ...] = ()

    def members(self) -> list[list[tuple[int, ...]]]:
        """The communicators of every grouping, the world's first."""
        made = [[tuple(range(self.world_size))]]
        for grouping in self.groupings:
            made.append(grouping.members(made[grouping.parent]))
        return made


# ---- drawing -----------------------------------------------------------------------------------------------------


WORLD_SIZES = (2, 3, 4, 5)
MOST_STEPS = 12


def random_program(generator: random.Random, world_sizes: Sequence[int] = WORLD_SIZES) -> Program:
    """A program, without the time that hypothesis takes for one."""
    pick = generator.choice
    world_size = pick(world_sizes)
    groupings = _draw_groupings(pick, world_size)
    steps = (_draw_step(pick, len(groupings)) for _ in range(generator.randint(1, MOST_STEPS)))
    return Program(world_size, groupings, tuple(steps))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that shrink to few and simple calls."""
    pick = _pick(draw)
    world_size = pick(WORLD_SIZES)
    groupings = _draw_groupings(pick, world_size)
    steps = draw(st.lists(_steps(len(groupings)), min_size=1, max_size=MOST_STEPS))
    # A step is many draws, which hypothesis often fails to delete together; one draw that leaves it out it finds.
    kept = [step for step in steps if step is not None]
    return Program(world_size, groupings, tuple(kept or [Step()]))


@st.composite
def _steps(draw: st.DrawFn, groupings: int) -> Step | None:
    pick = _pick(draw)
    kept, step = pick((False, True, True, True)), _draw_step(pick, groupings)
    return step if kept else None


def _pick(draw: st.DrawFn) -> Pick:
    return lambda options: draw(st.sampled_from(options))


def _draw_groupings(pick: Pick, world_size: int) -> tuple[Grouping, ...]:
    groupings: list[Grouping] = []
    while len(groupings) < 2 and pick((False, False, False, True)):
        groupings.append(_draw_grouping(pick, world_size, len(groupings)))
    return tuple(groupings)


def _draw_grouping(pick: Pick, world_size: int, before: int) -> Grouping:
    how, parent = pick(("dup", "split", "subgroup")), pick(range(before + 1))
    if how == "dup":
        return Grouping(parent)
    if how == "subgroup":
        return Grouping(parent, how, tuple(pick(range(world_size)) for _ in range(pick(range(1, world_size + 1)))))
    colors = tuple(pick((0, 0, 1, None)) for _ in range(world_size))
    return Grouping(parent, how, colors, tuple(pick((0, 1, -1)) for _ in range(world_size)))


def _draw_step(pick: Pick, groupings: int) -> Step:
    op = pick(OPS)
    layout, library, lent = pick(_ARRAYS)
    return Step(
        op=op,
        dtype=pick(SUMMED if op in REDUCING else MOVED),
        count=pick(COUNTS),
        dims=pick((1, 1, 2, 0)),
        layout=layout,
        library=library,
        lent=lent,
        place=pick(("in", "out", "new")),
        wild=pick((False, True)),
        reduction=pick(range(len(ARITHMETIC + BITWISE))) if op in REDUCING else 0,
        algorithm=pick(range(len(ALGORITHMS[op]))) if op in ALGORITHMS else 0,
        root=pick(range(5)),
        group=pick(range(groupings + 1)),
        how=pick(("now", "later", "coalesced")),
        seed=pick(range(1000)),
    )


_ARRAYS = list(itertools.product(LAYOUTS, ("torch", "numpy"), LENT))


# ---- making smaller ----------------------------------------------------------------------------------------------


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program that fails and of which no part can be left out or made simpler. For those not drawn by hypothesis."""
    while True:
        smaller = next((each for each in _simpler(program) if fails(each)), None)
        if smaller is None:
            return program
        program = smaller


def _simpler(program: Program) -> Iterator[Program]:
    steps = program.steps
    for half in (len(steps) // 2, 1):
        if half and len(steps) > 1:
            for at in range(0, len(steps), half):
                yield replace(program, steps=steps[:at] + steps[at + half :])
    last = len(program.groupings)
    if last:
        away = tuple(replace(step, group=0) if step.group == last else step for step in steps)
        yield replace(program, groupings=program.groupings[:-1], steps=away)
    else:
        for world_size in range(2, program.world_size):
            yield replace(program, world_size=world_size)
    for at, step in enumerate(steps):
        for other in _simpler_steps(step):
            yield replace(program, steps=(*steps[:at], other, *steps[at + 1 :]))


def _simpler_steps(step: Step) -> Iterator[Step]:
    for field in fields(Step):
        if getattr(step, field.name) != field.default and field.name not in ("op", "count"):
            yield replace(step, **{field.name: field.default})
    for count in (1, 0, *range(2, 9), *sorted(COUNTS)):
        if (count > 1, count == 0, count) < (step.count > 1, step.count == 0, step.count):
            yield replace(step, count=count)
