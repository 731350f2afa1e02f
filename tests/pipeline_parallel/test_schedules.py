"""Pipeline schedules: every one is proved, by `check` and by a second executor; tables and idle time are the known
ones; each planted fault is found."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringcomm.errors import InvalidArgumentError
from ringcomm.pipeline_parallel.check import COSTS, bubble, check, formula, table, times
from ringcomm.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_of,
    zero_bubble,
)
from tests.support.choice import choose, drawn

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
Row = tuple[Action, ...]


def all_of(p: int, m: int) -> Iterator[tuple[Schedule, int]]:
    """Every schedule of p ranks and m micro-batches, with its chunks."""
    for name in SCHEDULES:
        for v in range(1, 5 if name == "interleaved" else 2):
            yield schedule_of(name, p, m, v), v


def runs(schedule: Schedule) -> bool:
    """Carries a schedule out with a queue for each stage and direction, rank by rank in turns: whether all ranks come
    to their end, each message is the one its receiver expects, and each stage does all of its work in order."""
    queues: dict[tuple[int, bool], deque[int]] = {}
    at = [0] * schedule.world_size
    done: dict[int, list[str]] = {stage: [] for stage in range(schedule.stages)}

    def step(action: Action) -> bool | None:
        """Whether it was done; None where the message is another's."""
        stage, i, forward = action.stage, action.microbatch, action.kind is F
        if action.kind is not W and (stage > 0 if forward else stage < schedule.stages - 1):
            queue = queues.setdefault((stage, forward), deque())
            if not queue:
                return False
            if queue.popleft() != i:
                return None
        if action.kind is not W:
            queues.setdefault((stage + 1 if forward else stage - 1, forward), deque()).append(i)
        done[stage].append(f"{action.kind.value}{i}")
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row):
                if schedule.rank_of[row[at[rank]].stage] != rank:
                    return False
                outcome = step(row[at[rank]])
                if outcome is None:
                    return False
                if not outcome:
                    break
                at[rank] += 1
                moved = True
    ended = all(k == len(row) for k, row in zip(at, schedule.rows, strict=True))
    return ended and all(in_order(work, schedule.microbatches) for work in done.values())


def in_order(work: list[str], m: int) -> bool:
    """Whether one stage's work is complete, each kind that goes backward ascends, and F < B, F < I < W."""
    place = {item: k for k, item in enumerate(work)}
    whole = [f"{kind}{i}" for i in range(m) for kind in ("FB" if f"B{i}" in place else "FIW")]
    ascending = [[int(item[1:]) for item in work if item[0] in kinds] for kinds in ("BI", "BW")]
    return (
        sorted(whole) == sorted(work)
        and all(numbers == sorted(numbers) for numbers in ascending)
        and all(place[x] < place[y] for x, y in pairwise(whole) if x[1:] == y[1:])
    )


@pytest.mark.parametrize("p", choose(range(1, 9), (1, 2, 3, 4)))
def test_every_schedule_is_proved(p: int) -> None:
    for m in range(1, 33):
        for schedule, v in all_of(p, m):
            check(schedule)
            assert schedule.microbatches == m
            assert schedule.rank_of == tuple(range(p)) * v
            assert all(schedule.stages_of(rank) == tuple(range(rank, p * v, p)) for rank in range(p))
            for stage in range(schedule.stages):
                forward = [a.microbatch for a in schedule.rows[stage % p] if a.kind is F and a.stage == stage]
                assert forward == list(range(m))


@pytest.mark.parametrize("p", range(1, 9))
def test_every_schedule_comes_to_its_end(p: int) -> None:
    for m in (1, 2, 3, 4, 7, 8, 13, 32):
        for schedule, _ in all_of(p, m):
            assert runs(schedule), table(schedule)


@pytest.mark.parametrize("p", choose(range(1, 9), (1, 2, 3, 4)))
def test_idle_time_is_the_formula(p: int) -> None:
    for m in range(1, 33):
        for schedule, v in all_of(p, m):
            expected = formula(schedule.name, p, m, v)
            if expected is None:  # the longest chain of what waits for one another
                assert m < p
                split = schedule.name == "zero-bubble"
                expected = 1 - (3 * m / (2 * (p + m) - 1) if split else v * m / (v * p + m - 1))
            assert bubble(schedule) == pytest.approx(expected, abs=1e-12), f"{schedule.name} {p} {m} {v}"


def test_formulas_are_the_published_ones() -> None:
    assert [formula("gpipe", p, m) for p, m in ((1, 5), (4, 1), (4, 12))] == [0, 3 / 4, 3 / 15]
    assert formula("1f1b", 8, 32) == 7 / 39
    assert formula("interleaved", 8, 32, 4) == 7 / 135
    assert formula("interleaved", 4, 3, 1) == formula("1f1b", 4, 3)
    assert formula("zero-bubble", 4, 8) == 3 / 27
    assert formula("interleaved", 4, 3, 2) is formula("zero-bubble", 4, 3) is None
    with pytest.raises(InvalidArgumentError, match=r"formula: got name='dual', expected one of 'gpipe', "):
        formula("dual", 2, 2)


def test_zero_bubble_is_idle_for_a_third() -> None:
    """Where F, I and W take as long as one another, and where the split saves as much as it can otherwise."""
    for p, m in ((2, 2), (4, 8), (8, 32)):
        idle = [rows_end(times(s)) - 3 * m for s in (one_f_one_b(p, m), zero_bubble(p, m))]
        assert idle == [3 * (p - 1), p - 1]
    cost = {F: 2.0, B: 5.0, I: 3.0, W: 2.0}
    assert bubble(zero_bubble(4, 8), cost) < 0.6 * bubble(one_f_one_b(4, 8), cost)


def rows_end(rows: list[list[tuple[Action, float, float]]]) -> float:
    return max(end for row in rows for _, _, end in row)


@pytest.mark.parametrize("p", choose(range(1, 9), (1, 2, 3, 4)))
def test_activations_held(p: int) -> None:
    for m in range(1, 33):
        assert gpipe(p, m).held() == (m,) * p
        assert one_f_one_b(p, m).held() == tuple(min(m, p - r) for r in range(p))
        assert zero_bubble(p, m).held() == (min(m, p),) * p
        for v in range(2, 5):
            group = -(-m // max(1, m // p))
            most = [min(v * m, (v - 1) * group + 2 * (p - r - 1) + 1) for r in range(p)]
            assert interleaved(p, m, v).held() == tuple(most)
        assert interleaved(p, m, 1).rows == one_f_one_b(p, m).rows


TABLES = {
    "gpipe 3 4": """
        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        rank 1  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        rank 2  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .
        """,
    "1f1b 3 4": """
        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        rank 0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
        """,
    "1f1b 4 2": """
        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14
        rank 0  F0 F1 .  .  .  .  .  .  .  .  B0 -- .  B1 --
        rank 1  .  F0 F1 .  .  .  .  .  B0 -- .  B1 -- .  .
        rank 2  .  .  F0 F1 .  .  B0 -- .  B1 -- .  .  .  .
        rank 3  .  .  .  F0 B0 -- F1 B1 -- .  .  .  .  .  .
        """,
    "zero-bubble 3 4": """
        time    0  1  2  3  4  5  6  7  8  9  10 11 12 13
        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    "interleaved 2 2 2": """
        time    0    1    2    3    4    5    6    7    8    9    10   11   12   13   14
        rank 0  F0.0 F0.1 F2.0 F2.1 .    .    B2.0 --   .    B2.1 --   B0.0 --   B0.1 --
        rank 1  .    F1.0 F1.1 F3.0 B3.0 --   F3.1 B3.1 --   B1.0 --   B1.1 --   .    .
        """,
    "interleaved 2 3 2": """
        time    0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   15   16   17   18   19   20
        rank 0  F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 .    B2.0 --   .    B2.1 --   .    B2.2 --   B0.0 --   B0.1 --   B0.2 --
        rank 1  .    F1.0 F1.1 F1.2 F3.0 B3.0 --   F3.1 B3.1 --   F3.2 B3.2 --   B1.0 --   B1.1 --   B1.2 --   .    .
        """,
}


@pytest.mark.parametrize("case", TABLES)
def test_printed_tables(case: str) -> None:
    name, *numbers = case.split()
    assert table(schedule_of(name, *map(int, numbers))) == dedent(TABLES[case]).strip()


def test_a_table_that_is_wider_than_the_terminal_goes_on_below() -> None:
    schedule = schedule_of("1f1b", 4, 8, 1)
    lines, blocks = table(schedule).splitlines(), table(schedule, 60).split("\n\n")
    assert len(blocks) > 1
    assert max(map(len, "\n".join(blocks).splitlines())) <= 60
    for row, line in enumerate(lines):
        cells = [cell for block in blocks for cell in block.splitlines()[row].removeprefix(f"rank {row - 1}").split()]
        assert [cell for cell in cells if cell != "time"] == line.removeprefix(f"rank {row - 1}").split()[row == 0 :]
    assert all(len(block.splitlines()) == len(lines) for block in table(schedule, 1).split("\n\n"))


def test_interleaved_is_the_order_of_the_paper() -> None:
    """Its figure with 4 ranks, 8 micro-batches and 2 chunks."""
    first, *_, last = (" ".join(map(str, row[:14])) for row in interleaved(4, 8, 2).rows)
    assert first == "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 B4.0 F0.7 B4.1"
    assert last == "F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 F3.4 B3.0"


def test_groups_are_as_short_as_they_may_be() -> None:
    def lengths(m: int) -> list[int]:
        """Of the runs of forward passes through one chunk on the first of three ranks."""
        stages = [action.stage for action in interleaved(3, m, 2).rows[0] if action.kind is F]
        ends = [k for k in range(1, len(stages)) if stages[k] != stages[k - 1]]
        return [y - x for x, y in pairwise([0, *ends, len(stages)])][::2]

    assert [lengths(m) for m in (1, 3, 5, 6, 8, 11)] == [[1], [3], [5], [3, 3], [4, 4], [4, 4, 3]]


def test_times_take_costs_and_latency() -> None:
    schedule = gpipe(3, 4)
    cost = {F: 1.5, B: 2.5}
    assert rows_end(times(schedule, cost, 0.25)) == 6 * (1.5 + 2.5) + 2 * 2 * 0.25
    first = times(schedule, cost, 0.25)[1][0]
    assert first == (Action(F, 1, 0), 1.75, 3.25)
    alone = interleaved(1, 3, 4)  # all stages on one rank: no message
    assert rows_end(times(alone, COSTS, 10.0)) == 3 * 4 * 3
    assert bubble(alone) == 0
    with pytest.raises(InvalidArgumentError, match="a cost of at least 0 for BACKWARD, got none"):
        times(schedule, {F: 1.0})
    with pytest.raises(InvalidArgumentError, match="a cost of at least 0 for FORWARD, got -1"):
        bubble(schedule, {F: -1.0, B: 1.0})
    with pytest.raises(InvalidArgumentError, match="a latency of at least 0, got -2"):
        times(schedule, latency=-2)


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    """The schedule with another row, written as ``F0.1 B0.1``."""
    actions = [Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in row.split()]
    rows = [*schedule.rows[:rank], tuple(actions), *schedule.rows[rank + 1 :]]
    return dataclasses.replace(schedule, rows=tuple(rows))


Change = Callable[[], Schedule]
FAULTS: dict[str, tuple[Change, str]] = {
    "a forward pass is missing": (
        lambda: with_row(one_f_one_b(2, 2), 1, "F1.0 B1.0 B1.1"),
        r"^check: rank 1 of schedule '1f1b' has B of micro-batch 1 at stage 1, expected F and B, or F, I and W, once",
    ),
    "a gradient of weights is missing": (
        lambda: with_row(zero_bubble(2, 2), 1, "F1.0 I1.0 F1.1 I1.1 W1.0"),
        "rank 1 .* has F, I of micro-batch 1 at stage 1",
    ),
    "a backward pass is whole and split": (
        lambda: with_row(zero_bubble(1, 1), 0, "F0.0 I0.0 W0.0 B0.0"),
        "rank 0 .* has F, B, I, W of micro-batch 0",
    ),
    "a stage does nothing": (lambda: with_row(gpipe(2, 1), 1, ""), "rank 1 .* has nothing of micro-batch 0 at stage 1"),
    "an action comes twice": (
        lambda: with_row(one_f_one_b(2, 2), 1, "F1.0 B1.0 F1.1 F1.0 B1.1"),
        "rank 1 .* has F1.0 2 times, expected it once",
    ),
    "an action is on another rank": (
        lambda: with_row(one_f_one_b(2, 1), 0, "F0.0 F1.0 B0.0"),
        "rank 0 .* has F1.0, expected it on rank 1",
    ),
    "there is no such stage": (lambda: with_row(gpipe(2, 1), 0, "F2.0"), "rank 0 .* has F2.0, expected stages below 2"),
    "there is no such micro-batch": (lambda: with_row(gpipe(2, 1), 0, "F0.1"), "has F0.1, .*micro-batches below 1"),
    "a row is missing": (
        lambda: dataclasses.replace(gpipe(2, 1), rows=gpipe(2, 1).rows[:1]),
        "has 1 rows, expected one for each of 2 ranks",
    ),
    "there is no such rank": (
        lambda: dataclasses.replace(gpipe(2, 1), rank_of=(0, 2)),
        "puts stage 1 on rank 2, expected a rank from 0 to 1",
    ),
    "backward before forward": (
        lambda: with_row(one_f_one_b(2, 2), 1, "F1.0 B1.0 B1.1 F1.1"),
        "rank 1 .* has B1.1 too early, expected F before B",
    ),
    "weights before inputs": (
        lambda: with_row(zero_bubble(1, 2), 0, "F0.0 W0.0 I0.0 F0.1 I0.1 W0.1"),
        "rank 0 .* has W0.0 too early",
    ),
    "gradients in another order": (
        lambda: with_row(gpipe(2, 3), 1, "F1.0 F1.1 F1.2 B1.0 B1.2 B1.1"),
        "rank 1 .* has the B or I of micro-batch 2 at stage 1, expected that of 1 first; sort",
    ),
    "weights in another order": (
        lambda: with_row(zero_bubble(1, 2), 0, "F0.0 F0.1 I0.0 I0.1 W0.1 W0.0"),
        "rank 0 .* has the B or W of micro-batch 1 at stage 0, expected that of 0 first",
    ),
    "activations in another order": (
        lambda: with_row(gpipe(3, 3), 1, "F1.0 F1.2 F1.1 B1.0 B1.1 B1.2"),
        "rank 1 .* has F1.2 where stage 0 sends micro-batch 1, expected the sender's order",
    ),
    "two ranks wait for each other": (
        lambda: with_row(gpipe(2, 2), 0, "F0.0 B0.0 F0.1 B0.1"),
        r"^check: schedule 'gpipe' cannot end, expected no circle of waiting ranks, got "
        r"rank 0 with B0.0 for B1.0 of rank 1, rank 1 with F1.1 for F0.1 of rank 0; move the awaited actions earlier$",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str) -> None:
    make, message = FAULTS[fault]
    with pytest.raises(InvalidArgumentError, match=message):
        check(make())


def test_a_schedule_that_cannot_end_has_no_times() -> None:
    circle, _ = FAULTS["two ranks wait for each other"]
    with pytest.raises(InvalidArgumentError, match=r"^times: schedule 'gpipe' cannot end, expected no circle"):
        times(circle())
    lacking = with_row(gpipe(2, 1), 0, "")
    with pytest.raises(InvalidArgumentError, match=r"^times: .* rank 1 waits with F1.0, expected F0.0 on rank 0, got"):
        times(lacking)
    backwards = with_row(gpipe(1, 1), 0, "B0.0 F0.0")
    with pytest.raises(InvalidArgumentError, match=r"^times: .* got rank 0 with B0.0 for F0.0 of rank 0; move"):
        times(backwards)


@st.composite
def changed(draw: st.DrawFn) -> Schedule:
    """A schedule with a few actions of one rank, or of two, moved, left out, repeated or made another kind."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    schedule, _ = draw(st.sampled_from(list(all_of(p, m))))
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw(st.integers(1, 2))):
        row = rows[draw(st.integers(0, p - 1))]
        assume(row)
        at, to = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row)))
        change = draw(st.sampled_from(["move", "move", "move", "drop", "repeat", "kind"]))
        action = row[at] if change == "repeat" else row.pop(at)
        if change == "kind":
            action = dataclasses.replace(action, kind=draw(st.sampled_from(Kind)))
        if change != "drop":
            row.insert(to, action)
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


@drawn(500)
@given(changed())
def test_check_accepts_what_runs_and_nothing_else(schedule: Schedule) -> None:
    try:
        check(schedule)
    except InvalidArgumentError:
        assert not runs(schedule)
    else:
        assert runs(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_zero_bubble_splits(name: str) -> None:
    assert schedule_of(name, 3, 4).splits_backward == (name == "zero-bubble")
    assert schedule_of(name, 3, 4).name == name


def test_bad_numbers_and_names() -> None:
    for name, make in SCHEDULES.items():
        for numbers in ((0, 1), (1, 0), (2, -1), (2, 1.5), (True, 1)):
            with pytest.raises(
                InvalidArgumentError, match=r"got (world_size|microbatches)=.*, expected a whole number of at least 1"
            ):
                make(*numbers)
            with pytest.raises(InvalidArgumentError, match="of at least 1"):
                schedule_of(name, *numbers)
        with pytest.raises(
            InvalidArgumentError, match="schedule_of: got chunks=0, expected a whole number of at least 1"
        ):
            schedule_of(name, 2, 2, 0)
        if name != "interleaved":
            with pytest.raises(InvalidArgumentError, match=f"one stage on each rank for '{name}', got 2 chunks; pass"):
                schedule_of(name, 2, 2, 2)
    known = "'gpipe', '1f1b', 'interleaved', 'zero-bubble'"
    with pytest.raises(InvalidArgumentError, match=f"^schedule_of: got name='1F1B', expected one of {known}; pass"):
        schedule_of("1F1B", 2, 2)


def test_schedules_need_no_array_library() -> None:
    program = (
        "import sys\nfrom ringcomm.pipeline_parallel import schedules, check, picture\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
