"""Records side by side, and as files: what a merged view says, what is written, and what is refused as none of ours."""

from __future__ import annotations

import gc
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringcomm
from ringcomm import Communicator, errors
from ringcomm.errors import rank_list
from ringcomm.observe import record
from ringcomm.observe.record import Call, Record, View
from tests.support.choice import drawn

ONES = np.ones(4, np.float32)

# ---- merged ----------------------------------------------------------------------------------------------------------

NOW = 1_800_000_000_000_000_000


def made_call(number: int, state: str = "done", op: str = "all_reduce", **more: Any) -> Call:
    begin = NOW - 10_000_000_000 + 1_000_000_000 * number
    ended = state in ("done", "failed", "refused")
    message = op in ("send", "recv")
    values: dict[str, Any] = {"number": number + 1, "collective": -1 if message else number, "op": op, "state": state}
    values |= {"dtype": "float32", "reduce_op": "sum", "algorithm": "auto", "count": 1024, "root": 0, "tag": 0}
    values |= {"is_async": False, "step": -1, "begin_ns": begin, "end_ns": begin + 500_000_000 if ended else 0}
    values |= {"site": f"train.py:{80 + number}"}
    return Call(**{**values, **more})


def made(rank: int, *calls: Call, world_size: int = 3, **more: Any) -> Record:
    values = {"host": "node0", "pid": 40 + rank, "group": 0xAB, "engine": "cpu", "closed": False, "begun": len(calls)}
    values |= {"process": "running", "taken_ns": NOW}
    return Record(rank=rank, world_size=world_size, calls=calls, **{**values, **more})


def view(*found: Record) -> View:
    (merged,) = record.merge(found)
    return merged


def test_the_rank_that_is_behind_comes_first() -> None:
    waits = (made_call(7), made_call(8, "in flight"))
    assert view(made(0, *waits), made(1, made_call(7, "in flight", "all_gather")), made(2, *waits)).summary() == [
        "rank 1 (process 41) has been in all_gather #7 (train.py:87) for 3.0 s; ranks 0, 2 have waited in all_reduce "
        "#8 (train.py:88) for 2.0 s",
        "call #7 differs: ranks 0, 2 called all_reduce(1024 x float32, sum) (train.py:87), rank 1 "
        "called all_gather(1024 x float32) (train.py:87)",
    ]


def test_a_barrier_beside_another_call() -> None:
    calls = [made_call(7, "in flight", op) for op in ("barrier", "all_reduce")]
    place = "(train.py:87)"
    differs = f"call #7 differs: rank 0 called barrier() {place}, rank 1 called all_reduce(1024 x float32, sum) {place}"
    assert differs in view(*(made(rank, call, world_size=2) for rank, call in enumerate(calls))).summary()


def test_a_barrier_before_a_gather_is_another_one() -> None:
    calls = [made_call(7, "in flight", "barrier", root=root) for root in (0, 1)]
    place = "(train.py:87)"
    differs = f"call #7 differs: rank 0 called barrier() {place}, rank 1 called barrier(before a gather) {place}"
    assert differs in view(*(made(rank, call, world_size=2) for rank, call in enumerate(calls))).summary()


def test_a_rank_that_has_not_come_is_behind_those_that_wait() -> None:
    outside = made(1, made_call(7), process="stopped")
    waits = made_call(7), made_call(8, "in flight")
    assert view(made(0, *waits), outside).summary() == [
        "rank 1 (process 41) has been outside of any call for 2.5 s, after all_reduce #7 (train.py:87); rank 0 has "
        "waited in all_reduce #8 (train.py:88) for 2.0 s",
        "rank 2 has no record here: its process has ended, closed the communicator, or runs on another host",
        "rank 1 (process 41): stopped by a signal, SIGCONT lets it go on",
    ]
    receives = made(1, made_call(7), made_call(8, "in flight", "recv", root=-1))
    (first, *_) = view(made(0, *waits), receives).summary()
    assert "rank 1 (process 41) has been in recv from any rank (train.py:88)" in first
    new = made(1)
    assert view(made(0, *waits), new).summary()[0].startswith("rank 1 (process 41) has called nothing yet; rank 0")


def test_processes_of_several_hosts_are_named_with_them() -> None:
    ranks = made(0, made_call(8, "in flight"), world_size=2), made(1, made_call(7), world_size=2, host="node1")
    assert view(*ranks).summary()[0].startswith("rank 1 (process 41 on node1) has been outside of any call for ")


def test_a_rank_that_gave_up_is_shown_as_such() -> None:
    found = view(made(0, made_call(3, "failed"), made_call(4, "failed"), closed=True, world_size=1))
    assert found.summary() == [
        "rank 0 (process 40) gave up all_reduce #3 (train.py:83) after 500.0 ms",
        "rank 0 (process 40): closed the communicator",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"count": 1000}, "rank 1 passed 1000 x float32, sum (train.py:82)"),
        ({"dtype": "int8"}, "rank 1 passed 1024 x int8, sum (train.py:82)"),
        ({"reduce_op": "max"}, "rank 1 passed 1024 x float32, max (train.py:82)"),
        ({"algorithm": "ring"}, "rank 1 passed 1024 x float32, sum, ring (train.py:82)"),
        ({"op": "reduce", "root": 1}, "rank 1 called reduce(1024 x float32, sum, root 1) (train.py:82)"),
        ({"op": "all_gather", "root": 3}, "rank 1 called all_gather(1024 x float32, mark 3) (train.py:82)"),
        ({"count": -5}, "rank 1 passed uneven parts of float32, sum (train.py:82)"),
    ],
)
def test_calls_that_differ_are_pointed_out(more: dict[str, Any], words: str) -> None:
    ranks = [made(rank, made_call(1), made_call(2, **(more if rank == 1 else {}))) for rank in range(3)]
    (told,) = view(*ranks).differences()
    assert words in told
    assert "ranks 0, 2 " in told
    assert not view(ranks[0], ranks[2]).differences()
    irrelevant = [made(rank, made_call(2, root=rank, tag=rank, site=f"train.py:{rank}")) for rank in range(3)]
    assert not view(*irrelevant).differences()


def test_the_count_of_an_all_gather_is_that_of_its_output() -> None:
    ranks = [made(rank, made_call(2, op="all_gather", count=6 + 2 * rank)) for rank in range(2)]
    (told,) = view(*ranks).differences()
    assert "rank 0 gathered 6 x float32 (train.py:82), rank 1 gathered 8 x float32 (train.py:82)" in told


def test_lines_put_ranks_together_and_messages_apart() -> None:
    ranks = [made(r, made_call(1), made_call(2), made_call(3, op="send", root=2)) for r in range(2)]
    lines = view(*ranks, made(2, made_call(1))).lines(2)
    assert [(ranks, call.title) for ranks, call, _ in lines] == [
        *(((0, 1, 2), "all_reduce #1"), ((0, 1), "all_reduce #2"), ((0,), "send to rank 2"), ((1,), "send to rank 2"))
    ]
    assert view(*ranks).lines(0) == []


def test_ranks_are_listed_shortly() -> None:
    assert rank_list([4]) == "rank 4"
    assert rank_list([7, 0, 1, 2, 4, 5]) == "ranks 0-2, 4, 5, 7"


def test_communicators_stay_apart_and_the_newest_record_counts() -> None:
    old, new = made(0, made_call(1)), made(0, made_call(1), made_call(2), taken_ns=NOW + 1)
    others = [made(0, group=0xCD), made(0, group=0), made(1, group=0)]
    merged = record.merge([new, *others, old])
    assert sorted(each.group for each in merged) == [0, 0, 0xAB, 0xCD]
    assert next(each for each in merged if each.group == 0xAB).records == (new,)
    assert "not connected yet" in next(each for each in merged if each.group == 0).title


# ---- files -----------------------------------------------------------------------------------------------------------


def _dumped(comm: Communicator, folder: str) -> list[str]:
    comm.all_reduce(ONES.copy())
    names = [path.name for path in record.dump(folder)]
    comm.barrier()
    return names


def test_records_of_processes_are_put_together_from_files(tmp_path: Path) -> None:
    names = ringcomm.run_ranks(_dumped, 2, str(tmp_path), ranks="processes", timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name for each in names for name in each)
    found = record.load(tmp_path.iterdir())
    for each in found:
        (name,) = names[each.rank]
        assert name == f"ringcomm-{each.host}-{each.pid}-{each.group:x}-rank{each.rank}.json"
    merged = view(*found)
    assert [each.rank for each in merged.records] == [0, 1]
    assert merged.lines(1)[0][0] == (0, 1)


def test_a_dump_can_be_repeated(tmp_path: Path) -> None:
    gc.collect()  # communicators that other tests have dropped have records until they go
    with ringcomm.init() as comm:
        comm.barrier()
        first, second = record.dump(tmp_path / "new"), record.dump(tmp_path / "new")
    assert first == second
    assert sorted((tmp_path / "new").iterdir()) == sorted(first)


GOOD = json.loads(
    json.dumps(
        {"ringcomm_record": 2, **made(0, made_call(1)).__dict__, "group": "ab"}, default=lambda each: each.__dict__
    )
)


@pytest.mark.parametrize(
    "document",
    [
        *(
            None,
            [],
            {},
            {**GOOD, "ringcomm_record": 1},
            {**GOOD, "group": 171},
            {**GOOD, "group": "x"},
            {**GOOD, "calls": 3},
            {**GOOD, "calls": [3]},
            {**GOOD, "x": 1},
        ),
        *({**GOOD, "rank": "0"}, {**GOOD, "rank": True}, {**GOOD, "rank": 3}, {**GOOD, "world_size": 10**12}),
        *({**GOOD, "taken_ns": 10**400}, {**GOOD, "calls": [{**GOOD["calls"][0], "count": 1.5}]}),
    ],
)
def test_a_file_that_is_not_a_record_is_refused(document: Any, tmp_path: Path) -> None:
    path = tmp_path / ("of a long name " * 5) / "x.json"  # the message has it whole
    path.parent.mkdir()
    path.write_text(json.dumps(GOOD))
    assert record.load([path]) == [made(0, made_call(1))]
    path.write_text(json.dumps(document))
    with pytest.raises(
        errors.InvalidArgumentError, match=r"expected a file of ringcomm\.record\.dump .* got .*x\.json"
    ):
        record.load([path])


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"{", b"[" * 100_000])
def test_a_file_that_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(errors.InvalidArgumentError, match="expected a file"):
        record.load([tmp_path / "x.json"])
    with pytest.raises(errors.InvalidArgumentError, match="No such file"):
        record.load([tmp_path / "y.json"])


def test_texts_of_others_cannot_move_the_cursor(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({**GOOD, "host": "a\x1b[2Jb\ud800"}))
    assert record.load([tmp_path / "x.json"])[0].host == "a\ufffd[2Jb\ufffd"


@cache
def memory_of_a_journal() -> bytes:
    with ringcomm.init() as comm:
        comm.all_reduce(ONES.copy())
        comm.barrier()
        return list(record._memory_files(os.getpid(), None))[-1]


@drawn(300)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=40), st.integers(0, 40_000))
def test_bytes_of_others_are_read_or_refused(changes: list[tuple[int, int]], length: int) -> None:
    memory = bytearray(memory_of_a_journal())
    for place, value in changes:
        memory[place] = value
    for each in (bytes(memory), bytes(memory[:length])):
        assert isinstance(record._C.record_group(each), int)
        try:
            found = record._read(each, "running")
        except errors.InvalidArgumentError:
            continue
        assert found is None or view(found).note(3, 12)
