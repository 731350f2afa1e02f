"""The flight recorder: what it holds, whose can be read, and what errors and profiles say."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import Communicator, errors
from ringcomm.observe import record
from ringcomm.observe.record import Record
from tests.support import torch_ranks

ONES = np.ones(4, np.float32)
HERE = os.path.relpath(__file__)
ENDINGS = (errors.MismatchError, errors.AbortedError, errors.CollectiveTimeoutError)


def line() -> int:
    """The file and line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def new_records(rank: int, before: set[int]) -> Record:
    """A rank's record of the only communicator made since ``before``."""
    (found,) = (each for each in record.records() if each.rank == rank and each.group not in before)
    return found


def groups() -> set[int]:
    return {each.group for each in record.records()}


def in_python(program: str, **environment: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


# ---- what it holds ---------------------------------------------------------------------------------------------------


def test_a_journal_has_each_kind_of_call() -> None:
    before = groups()

    def fn(comm: Communicator) -> tuple[Record, int]:
        comm.all_reduce(ONES.copy(), "max")
        comm.all_reduce(ONES.copy(), async_op=True).wait()
        with pytest.raises(errors.UnsupportedError):
            comm.broadcast(ONES.copy(), 1, algorithm="oneshot")
        with comm.coalesce():
            comm.broadcast(ONES.copy(), 1)
            comm.all_gather(ONES)
        if comm.rank == 0:
            comm.send(ONES, 1, tag=5)
        else:
            comm.recv(ONES.copy(), 0, tag=5)
        outputs = [np.empty(r + 1, np.float32) for r in range(2)]
        comm.all_gather_list(np.ones(comm.rank + 1, np.float32), outputs)
        comm.barrier()
        return new_records(comm.rank, before), comm.world_size

    for rank, (found, world_size) in enumerate(ringcomm.run_ranks(fn, 2, timeout=20)):
        assert (found.rank, found.world_size, found.pid, found.engine) == (rank, world_size, os.getpid(), "cpu")
        assert (found.closed, found.begun, found.process) == (False, 8, "running")
        message = "send to rank 1" if rank == 0 else "recv from rank 0"
        assert [(call.title, call.passed, call.state, call.is_async) for call in found.calls] == [
            ("all_reduce #0", "4 x float32, max", "done", False),
            ("all_reduce #1", "4 x float32, sum", "done", True),
            ("broadcast #2", "4 x float32, root 1, oneshot", "refused", False),
            ("broadcast #2", "4 x float32, root 1", "done", True),  # nobody counts the one that was refused
            ("all_gather #3", "8 x float32", "done", True),
            (message, "4 x float32, tag 5", "done", False),
            ("all_gather #4", "uneven parts of float32", "done", False),
            ("barrier #5", "", "done", False),
        ]
        times = [(call.begin_ns, call.end_ns) for call in found.calls]
        assert times == sorted(times)
        assert all(begin <= end <= found.taken_ns for begin, end in times)


def test_a_search_decodes_no_record_of_another_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have hundreds, and the error that ends one of them searches for it."""
    before, read, decoded = groups(), record._C.read_record, list[int]()

    def read_record(memory: bytes) -> Any:
        found = read(memory)
        decoded.append(found[0]["group"])
        return found

    def fn(comm: Communicator) -> None:
        group = new_records(comm.rank, before).group
        comm.barrier()
        with comm.dup() as other:
            other.barrier()
            if comm.rank == 0:
                monkeypatch.setattr(record._C, "read_record", read_record)
                assert sorted(each.rank for each in record.find(group)) == [0, 1]
                monkeypatch.undo()
            other.barrier()
        assert comm.rank == 1 or decoded == [group, group]

    ringcomm.run_ranks(fn, 2, timeout=20)


def test_a_journal_has_what_failed_and_what_is_in_flight() -> None:
    before = groups()

    has_come = threading.Event()  # an abort may overtake a message that is on its way

    def fn(comm: Communicator) -> list[str]:
        if comm.rank == 1:
            first = comm.irecv(ONES.copy(), 0)
            open_calls = [call.state for call in new_records(comm.rank, before).calls]
            comm.send(ONES, 0)
            first.wait()
            has_come.set()
            with pytest.raises(errors.AbortedError):
                comm.all_reduce(ONES.copy())
            return open_calls
        comm.recv(ONES.copy(), 1)
        comm.send(ONES, 1)
        assert has_come.wait(20)
        comm.abort("enough")
        with pytest.raises(errors.AbortedError):
            comm.all_reduce(ONES.copy())
        return [call.state for call in new_records(comm.rank, before).calls]

    assert ringcomm.run_ranks(fn, 2, timeout=20) == [["done", "done", "failed"], ["in flight"]]


def test_over_several_hosts_there_is_one_record_for_each_rank() -> None:
    before = groups()

    def fn(comm: Communicator) -> Record:
        comm.all_reduce(ONES.copy())
        return new_records(comm.rank, before)

    found = ringcomm.run_ranks(fn, 3, hosts=[2, 1], timeout=20)
    (view,) = record.merge(found)
    assert [(ranks, call.title) for ranks, call, _ in view.lines(1)] == [((0, 1, 2), "all_reduce #0")]


def read_at_once(comm: ringcomm.Communicator) -> set[int]:
    """How many records four threads see, each many times."""
    seen: list[int] = []
    comm.barrier()
    usual = len(record.records())

    def read() -> None:
        seen.extend(len(record.records()) for _ in range(50))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()
    return {usual, *seen}


def test_threads_that_read_at_once_see_each_record_once() -> None:
    """Runs in a new process, which has no records of other tests."""
    assert ringcomm.run_ranks(read_at_once, 1, ranks="processes", timeout=60) == [{1}]


def test_a_journal_keeps_the_last_calls_only() -> None:
    program = (
        "import ringcomm, numpy as np; comm = ringcomm.init()\n"
        "for i in range(9): comm.all_reduce(np.ones(i))\n"
        "(found,) = ringcomm.record.records(); print(found.begun, [call.collective for call in found.calls])"
    )
    assert in_python(program, RINGCOMM_RECORD="4") == "9 [5, 6, 7, 8]"


def test_nothing_is_recorded_where_nothing_was_asked_for() -> None:
    program = (
        "import ringcomm, numpy as np\ncomm = ringcomm.init(); comm.barrier(); comm.abort('enough')\n"
        "try: comm.barrier()\n"
        "except ringcomm.AbortedError as error: print(ringcomm.record.records(), hasattr(error, '__notes__'))"
    )
    assert in_python(program, RINGCOMM_RECORD="0") == "[] False"


def test_a_forked_child_has_no_record_of_its_parent() -> None:
    program = (
        "import os, ringcomm; comm = ringcomm.init(); comm.barrier()\n"
        "child = os.fork()\n"
        "if child == 0: print(len(ringcomm.record.records()), flush=True); os._exit(0)\n"
        "os.waitpid(child, 0); print([len(each.calls) for each in ringcomm.record.records()])"
    )
    assert in_python(program).split() == ["0", "[1]"]


def test_a_call_names_its_place_and_step() -> None:
    before = groups()

    def fn(comm: Communicator) -> tuple[Record, list[int]]:
        lines = [line() + 1]
        comm.all_reduce(torch.ones(3))
        lines.append(line() + 1)
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        model = ringcomm.DistributedDataParallel(torch.nn.Linear(3, 2), comm, broadcast_buffers=False)
        ringcomm.step(7)
        loss = model(torch.ones(3)).sum()
        lines.append(line() + 1)
        loss.backward()
        return new_records(comm.rank, before), lines

    try:
        (found, lines), _ = ringcomm.run_ranks(fn, 2, timeout=20)
    finally:
        ringcomm.step(None)
    expected = [f"{HERE}:{number}" for number in lines]
    assert [call.place for call in found.calls[:2]] == expected[:2]
    assert found.calls[-1].place == f"{expected[2]}, step 7"


def _backend_places() -> list[str]:
    x, path = torch.ones(4), os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], "beside")
    ringcomm.step(None)  # which tests before this one may have named
    with ringcomm.init(dist.get_rank(), 2, init_method=f"file://{path}") as beside:
        before = groups()
        group = dist.new_group(timeout=timedelta(seconds=20))
        if dist.get_rank() == 1:
            beside.recv(np.zeros(1), 0)
            dist.all_reduce(x, group=group)
            dist.all_reduce(x, group=group, async_op=True).wait()
            return []
        waits = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": group})
        waits.start()
        found: list[str] = []
        while not any(found):
            time.sleep(0.01)
            found = [each.place for each in new_records(0, before).calls if each.state == "in flight"]
        beside.send(np.ones(1), 1)
        waits.join()
        asked = line() + 1
        dist.all_reduce(x, group=group, async_op=True).wait()
        later = new_records(0, before).calls[-1].place
    return [*found, later, f"{HERE}:{asked}"]


def test_the_backend_has_places_of_calls_that_wait_and_of_asynchronous_ones() -> None:
    (waited, later, asked), _ = torch_ranks.run(_backend_places, world_size=2)
    assert "threading.py:" in waited  # who called in that thread
    assert later == asked


def test_a_step_is_a_whole_number() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="got number=-1, expected a whole number"):
        ringcomm.step(-1)


def test_a_path_may_be_long_and_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / ("ä" * 60)
    folder.mkdir()
    program = "def fn(comm, ones):\n    comm.all_reduce(ones[: 4 - comm.rank])\n"
    for path in (folder / "train.py", os.fsdecode(bytes(tmp_path) + b"/\xff.py")):
        names: dict[str, Any] = {}
        exec(compile(program, str(path), "exec"), names)
        with pytest.raises(errors.MismatchError) as caught:
            ringcomm.run_ranks(names["fn"], 2, ONES.copy(), timeout=20)
        end = "/train.py:2)" if path == folder / "train.py" else r"/\udcff.py:2)"
        assert str(caught.value).count(end) == 2


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_missing_process_has_no_record() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(errors.InvalidArgumentError, match=f"got process ID {child.pid}, which no process has"):
        record.records(child.pid)


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, wanted: set[int] | None) -> None:
        raise PermissionError

    monkeypatch.setattr(record, "_memory_files", refuse)
    with pytest.raises(errors.InvalidArgumentError, match="belongs to another user"):
        record.records()


# ---- errors ----------------------------------------------------------------------------------------------------------


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def ended(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(ENDINGS) as caught:
        call()
    return caught.value


needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes in this Python")


@needs_notes
@pytest.mark.parametrize("async_op", [False, True])
def test_an_error_that_ends_a_communicator_has_a_note(async_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made_notes: list[int] = []
    note_of = record._note
    monkeypatch.setattr(record, "_note", lambda group: made_notes.append(group) or note_of(group))

    def fn(comm: Communicator) -> list[list[str]]:
        x = np.ones(4 if comm.rank == 0 else 5)  # nobody finds a difference before rank 0 has come
        comm.barrier()
        comm.barrier()  # nobody leaves this one before all have left the first

        def call() -> Any:
            result = comm.all_reduce(x, async_op=async_op)
            return result.wait() if async_op else result

        return [notes(ended(call)), notes(ended(comm.barrier))]

    found = ringcomm.run_ranks(fn, 3, timeout=20)
    assert len(made_notes) == 1  # by the first of all threads
    texts = {note for ranks in found for both in ranks for note in both}
    assert all(len(both) == 1 for ranks in found for both in ranks)
    (text,) = texts
    assert text.startswith(f"communicator {made_notes[0]:x} of 3 ranks (cpu), as its ranks recorded it:")
    assert "all_reduce #2 differs: rank 0 passed 4 x float64, sum" in text
    assert "ranks 0-2: barrier #0 done" in text
    assert text.count("\n") < 12


@needs_notes
def test_a_wait_that_comes_to_its_own_limit_has_no_note() -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.all_reduce(ONES.copy(), async_op=True)
            with pytest.raises(errors.CollectiveTimeoutError, match="still in flight") as caught:
                work.wait(0.01)
            assert notes(caught.value) == []
            comm.send(ONES, 1)
            work.wait()
        else:
            comm.recv(ONES.copy(), 0)
            comm.all_reduce(ONES.copy())

    ringcomm.run_ranks(fn, 2, timeout=20)


def _mismatch(comm: Communicator) -> None:
    comm.all_reduce(np.ones(4 + comm.rank))


@needs_notes
def test_a_note_arrives_from_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(record.FOLDER, str(tmp_path / "records"))
    with pytest.raises(errors.MismatchError) as caught:
        ringcomm.run_ranks(_mismatch, 2, ranks="processes", timeout=60)
    (text,) = notes(caught.value)
    assert notes(pickle.loads(pickle.dumps(caught.value))) == [text]
    assert f"\nwritten to {tmp_path / 'records'}/ringcomm-" in text
    (view,) = record.merge(record.load((tmp_path / "records").iterdir()))
    assert [each.rank for each in view.records] == [0, 1]
    assert len(view.differences()) == 1


@needs_notes
def test_a_folder_that_takes_no_records_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(record.FOLDER, str(tmp_path / "file"))
    with pytest.raises(errors.MismatchError) as caught:
        ringcomm.run_ranks(_mismatch, 2, timeout=20)
    assert f"could not be written to {tmp_path / 'file'}: " in notes(caught.value)[0]


def test_a_failure_to_add_a_note_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("not this one")

    monkeypatch.setattr(record, "_search", fail)
    with pytest.raises(errors.MismatchError) as caught:
        ringcomm.run_ranks(_mismatch, 2, timeout=20)
    assert all(note.startswith("in rank ") for note in notes(caught.value))  # by run_ranks


def test_a_note_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_SEARCH_S", 0.01)
    error = errors.AbortedError("x")
    with record._noting:
        thread = threading.Thread(target=record.annotate, args=(error, 1))
        thread.start()
        thread.join()
    assert notes(error) == []


def _backend_notes() -> list[list[str]]:
    group = dist.new_group(timeout=timedelta(seconds=20))
    x = torch.ones(4 + dist.get_rank())
    work = dist.all_reduce(x, group=group, async_op=True)
    found = [notes(ended(work.wait)), notes(ended(lambda: dist.barrier(group)))]
    return [[note for note in each if "as its ranks recorded it" in note] for each in found]


@needs_notes
def test_the_backend_has_the_notes_too() -> None:
    for waited, called in torch_ranks.run(_backend_notes, world_size=2):
        assert waited == called
        (text,) = waited
        assert "all_reduce #0 differs: rank 0 passed 4 x float32, sum" in text


# ---- a profile -------------------------------------------------------------------------------------------------------


def test_a_profile_names_the_calls_of_a_communicator() -> None:
    with ringcomm.init() as comm:
        x = torch.ones(4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            comm.all_reduce(x)
            comm.all_reduce(x, async_op=True).wait()
            comm.all_gather(ONES)
            comm.barrier()
        comm.all_reduce(x)
    names = [event.name for event in profile.events() if event.name.startswith("ringcomm:")]
    assert sorted(names) == [f"ringcomm:{op}" for op in ("all_gather", "all_reduce", "all_reduce", "barrier")]
