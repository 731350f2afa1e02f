"""Ranks as threads and processes: results, failures, and that nothing stays behind."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import Communicator, errors
from ringcomm.comm import launch
from tests.support import forked
from tests.support.choice import choose, slow

RANKS = ("threads", "processes")


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def total(comm: Communicator, scale: int) -> tuple[int, int]:
    x = bytearray([comm.rank + 1])
    comm.all_reduce(x)
    return comm.rank, x[0] * scale


@pytest.mark.usefixtures("new_pythons")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_results_come_by_rank(world_size: int, ranks: str) -> None:
    want = [(rank, sum(range(world_size + 1)) * 10) for rank in range(world_size)]
    assert ringcomm.run_ranks(total, world_size, 10, ranks=ranks, timeout=30) == want


def tensors(comm: Communicator) -> list[torch.Tensor]:
    return [torch.full((n,), comm.rank, dtype=torch.bfloat16) for n in (0, 3, 1 << 16)]


@pytest.mark.parametrize("ranks", RANKS)
def test_tensors_come_back_from_ranks_that_have_ended(ranks: str) -> None:
    for rank, got in enumerate(ringcomm.run_ranks(tensors, 2, ranks=ranks, timeout=30)):
        assert [x.numel() for x in got] == [0, 3, 1 << 16]
        assert all((x == rank).all() and x.dtype == torch.bfloat16 for x in got)


def one_fails(comm: Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("only on rank 1")
    comm.barrier()  # would wait for ever


@pytest.mark.parametrize("ranks", RANKS)
def test_the_first_exception_wins_and_the_others_are_aborted(ranks: str) -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="only on rank 1"):
        ringcomm.run_ranks(one_fails, 3, ranks=ranks, timeout=60)
    assert time.monotonic() - started < 30


def one_fails_on_a_mesh(comm: Communicator) -> None:
    mesh = ringcomm.init_mesh(pp=2, tp=2, comm=comm)
    if comm.rank == 0:
        raise KeyError("only on rank 0")
    axis = "pp" if comm.rank == 3 else "tp"  # 2 waits for 3, 3 for 1, 1 for 0: in a communicator without rank 0
    mesh[axis].recv(torch.empty(1), 1 - mesh[axis].rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_abort_ends_waits_in_communicators_made_from_it(ranks: str) -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="only on rank 0"):
        ringcomm.run_ranks(one_fails_on_a_mesh, 4, ranks=ranks, timeout=60)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_an_abort_reaches_a_communicator_whose_parent_is_gone(closes: bool) -> None:
    def body(comm: Communicator) -> None:
        between = comm.dup()
        last = between.dup()
        if closes:
            between.close()
        del between
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(errors.AbortedError, match="enough"):
            last.barrier()

    ringcomm.run_ranks(body, 2, timeout=20)


KEPT: list[Communicator] = []


def one_returns_early(comm: Communicator, what: str) -> str:
    mesh = ringcomm.init_mesh(dp=2, tp=2, comm=comm)
    each = mesh["tp"] if what == "mesh" else comm.split(0).dup()
    KEPT.append(each)  # as a model keeps it, beyond the function
    x = torch.ones(1 << 20)
    each.broadcast(x)  # a rank that is late gets what one that has returned has sent
    if each.rank == 0:
        each.send(x, 1)
        return "left"
    if each.rank == 1:
        time.sleep(0.3)
        each.recv(x, 0)
    with pytest.raises(errors.RankLostError, match=r"expected rank 0 .* but it has closed its communicator"):
        each.barrier()
    return "heard"


@pytest.mark.usefixtures("new_pythons")  # take their time to end, in which the others look
@pytest.mark.parametrize("what", ["mesh", "of its own"])
@pytest.mark.parametrize("ranks", choose(RANKS, ["threads"]))
def test_a_rank_that_returns_early_is_told_in_communicators_made_from_it(ranks: str, what: str) -> None:
    left = ["left", "heard", "left", "heard"] if what == "mesh" else ["left", "heard", "heard", "heard"]
    assert ringcomm.run_ranks(one_returns_early, 4, what, ranks=ranks, timeout=30) == left
    KEPT.clear()


def test_an_abort_of_a_part_leaves_what_it_was_made_from() -> None:
    def body(comm: Communicator) -> float:
        part = comm.dup()
        comm.barrier()
        part.abort("enough")
        with pytest.raises(errors.AbortedError, match="enough"):
            part.barrier()
        x = torch.ones(1)
        comm.all_reduce(x)
        return x.item()

    assert ringcomm.run_ranks(body, 2) == [2.0, 2.0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions of Python 3.10 hold no notes")
def test_an_exception_of_a_thread_names_its_rank() -> None:
    with pytest.raises(KeyError) as caught:
        ringcomm.run_ranks(one_fails, 3, timeout=60)
    assert caught.value.__notes__ == ["in rank 1 of run_ranks"]


def sees_the_abort(comm: Communicator, seen: list[str]) -> None:
    if comm.rank == 0:
        raise ZeroDivisionError("gone")
    try:
        comm.barrier()
    except errors.AbortedError as error:
        seen.append(str(error))
        raise


def test_torch_chooses_kernels_before_several_threads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first tanh of several ranks may have other bits than the second one."""
    calls: list[str] = []
    exp = torch.Tensor.exp

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(threading.current_thread().name)
        return exp(x)

    monkeypatch.setattr(torch.Tensor, "exp", noted)
    ringcomm.run_ranks(lambda comm: torch.ones(4).exp(), 2)
    assert calls[0] == threading.current_thread().name
    assert sorted(calls[1:]) == ["rank 0", "rank 1"]


def test_the_other_ranks_are_told_the_reason() -> None:
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError):
        ringcomm.run_ranks(sees_the_abort, 3, seen, timeout=30)
    assert len(seen) == 2
    assert all("ZeroDivisionError: gone" in text for text in seen)


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("text that cannot be rebuilt from itself")


def raises_what_cannot_travel(comm: Communicator) -> None:
    del comm
    raise Unpicklable(1, 2)


def test_an_exception_that_cannot_travel_is_told() -> None:
    with pytest.raises(errors.RankFailedError, match="cannot be rebuilt"):
        ringcomm.run_ranks(raises_what_cannot_travel, 1, ranks="processes", timeout=30)


def returns_what_cannot_be_pickled(comm: Communicator) -> Any:
    return threading.Lock() if comm.rank == 1 else None


def test_a_result_that_cannot_be_pickled_is_told() -> None:
    words = (
        r"run_ranks: rank 1 expected to return a value that can be pickled, got a value of type lock "
        r"\(TypeError: cannot pickle .*\); return tensors, numbers or texts, or pass ranks='threads'"
    )
    with pytest.raises(errors.RankFailedError, match=words):
        ringcomm.run_ranks(returns_what_cannot_be_pickled, 2, ranks="processes", timeout=30)


def dies(comm: Communicator, how: str) -> None:
    if comm.rank == 1 and how == "exit":
        os._exit(3)
    if comm.rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


@pytest.mark.parametrize(("how", "code"), [("exit", "3"), ("kill", r"-9 \(SIGKILL\)")])
def test_a_dead_process_is_told_and_the_others_end(how: str, code: str) -> None:
    with pytest.raises(errors.RankFailedError, match=f"rank 1 .*exit code {code}"):
        ringcomm.run_ranks(dies, 3, how, ranks="processes", timeout=60)


def fails_to_load_in_a_rank() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the caller loads it, too, to check it
        atexit.register(time.sleep, 60)
        raise AttributeError("a name that is not there")


class LoadsOnlyInTheCaller:
    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return fails_to_load_in_a_rank, ()


def does_nothing(comm: Communicator, value: Any) -> None:
    del comm, value


@pytest.mark.usefixtures("new_pythons")  # a forked one ends at once
def test_a_process_that_ends_slowly_has_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its connection when it fails to load the function, long before Python has ended."""
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    words = r"rank 0 expected to start, its process closed its connection and has not ended within 0\.5 s; "
    with pytest.raises(errors.RankFailedError, match=words):
        ringcomm.run_ranks(does_nothing, 1, LoadsOnlyInTheCaller(), ranks="processes", timeout=30)


class FailsToLoadOnce:
    """Fails in the first rank that loads it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __setstate__(self, state: dict[str, str]) -> None:
        self.mark = state["mark"]
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
                raise AttributeError("a name that is not there")


def test_the_others_are_told_of_a_rank_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 60.0)  # nobody is killed before it hears of it
    value = FailsToLoadOnce(str(tmp_path / "mark"))
    got = ringcomm.run_ranks(does_nothing, 3, value, ranks="processes", timeout=30, return_exceptions=True)
    assert sorted((type(each) for each in got), key=lambda kind: kind.__name__) == [
        errors.AbortedError,
        errors.AbortedError,
        errors.RankFailedError,
    ]
    (told, _) = (str(each) for each in got if isinstance(each, errors.AbortedError))
    words = (
        r"run_ranks: rank \d expected all ranks to start, got none from rank (\d) \(process \d+\), which failed with "
        r"RankFailedError: rank \1 expected to start, its process ended with exit code 1 before that; look at that rank"
    )
    assert re.fullmatch(words, told), told


class FakeProcess:
    """A process whose exit code is known once the other rank has handed back its result."""

    pid = 7

    def __init__(self, results: list[Any], code: int | None) -> None:
        self.results, self.code = results, code

    @property
    def exitcode(self) -> int | None:
        return self.code if self.results[1] is not None else None


def pretended(codes: tuple[int | None, int | None]) -> tuple[launch._Processes, list[Connection]]:
    """Two ranks that hand back errors, and their ends of the pipes."""
    ranks = launch._Processes(2, returns_errors=True)
    pipes = [multiprocessing.Pipe() for _ in codes]
    ranks.processes = [FakeProcess(ranks.results, code) for code in codes]
    for rank, (ours, _) in enumerate(pipes):
        ranks.pipes[ours] = ranks.open[ours] = rank
    return ranks, [theirs for _, theirs in pipes]


def test_results_are_received_while_another_rank_takes_its_time_to_end() -> None:
    ranks, (first, second) = pretended((3, 0))
    ranks.handles = {0: b"", 1: b""}
    first.close()
    second.send(("result", "done"))
    failed, result = ranks.run()
    assert result == "done"
    with pytest.raises(errors.RankFailedError, match=r"rank 0 expected to return a result, .* with exit code 3; "):
        raise failed


def test_a_rank_that_is_killed_has_an_error_for_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    ranks, (first, second) = pretended((None, None))
    first.close()  # before it has started
    failed, killed = ranks.run()
    second.close()
    with pytest.raises(errors.RankFailedError, match=r"rank 0 expected to start, .* has not ended within 0\.2 s; "):
        raise failed
    with pytest.raises(errors.RankFailedError, match=r"rank 1 expected to end within 0\.2 s .* process was killed; "):
        raise killed


def survives(comm: Communicator, folder: str) -> None:
    try:
        dies(comm, "kill")
    except errors.RankLostError as error:
        Path(folder, str(comm.rank)).write_text(str(error))
        raise


def test_the_others_are_told_in_which_call_a_dead_process_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_DETECTION_S", 20.0)  # run_ranks leaves the survivors time
    monkeypatch.setattr(launch, "_GRACE_S", 20.0)
    with pytest.raises(errors.RankFailedError):
        ringcomm.run_ranks(survives, 3, str(tmp_path), ranks="processes", timeout=60)
    texts = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert sorted(texts) == ["0", "2"]
    assert all("barrier #0: rank " in text and "its process has exited" in text for text in texts.values())


def leaves(comm: Communicator, code: Any) -> None:
    if comm.rank == 1:
        sys.exit(code)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("code", [0, 3, None])
def test_a_rank_that_exits_does_not_end_the_caller(ranks: str, code: Any) -> None:
    with pytest.raises(errors.RankFailedError, match=rf"rank 1 .*sys\.exit\({code}\)") as caught:
        ringcomm.run_ranks(leaves, 2, code, ranks=ranks, timeout=60)
    assert isinstance(caught.value.__cause__, SystemExit)


def never_ends(comm: Communicator) -> None:
    if comm.rank == 0:
        raise ValueError("stop")
    while True:
        time.sleep(0.1)


def test_a_process_that_does_not_end_is_killed() -> None:
    with pytest.raises(ValueError, match="stop"):
        ringcomm.run_ranks(never_ends, 2, ranks="processes", timeout=60)


def goes_on_without(comm: Communicator, how: str) -> tuple[int, int]:
    if comm.rank == 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            sys.exit(3)
        raise KeyError("lost")
    x = torch.ones(1)
    try:
        comm.all_reduce(x, timeout=20)
    except errors.AbortedError:
        with comm.shrink() as left:
            return left.rank, int(left.all_reduce(torch.ones(1)).item())
    return -1, 0


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["raises", "exits", "is killed"])
def test_survivors_hand_back_their_results(ranks: str, how: str) -> None:
    if ranks == "threads" and how == "is killed":
        pytest.skip("a thread is not killed alone")
    before = time.monotonic()
    got = ringcomm.run_ranks(goes_on_without, 3, how, ranks=ranks, timeout=30, return_exceptions=True)
    assert time.monotonic() - before < 25  # nobody waited for the rank that was lost
    assert (got[0], got[2]) == ((0, 2), (1, 2))
    words = {"raises": "lost", "exits": r"rank 1 .* left by sys.exit\(3\)", "is killed": r"rank 1 .* \(SIGKILL\)"}
    with pytest.raises(KeyError if how == "raises" else errors.RankFailedError, match=words[how]):
        raise got[1]


def test_return_exceptions_changes_nothing_without_a_failure() -> None:
    assert ringcomm.run_ranks(lambda comm: comm.rank, 2, return_exceptions=True) == [0, 1]


def test_a_local_function_needs_threads() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="a new process cannot import"):
        ringcomm.run_ranks(lambda comm: None, 2, ranks="processes")
    assert ringcomm.run_ranks(lambda comm: comm.rank, 2, timeout=30) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 2, "ranks": "fibers"}, "ranks='fibers'"),
        ({"world_size": 2, "timeout": 0}, "timeout 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ringcomm.run_ranks(total, **arguments)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match="engine 'abacus', this build has: cpu"):
        ringcomm.run_ranks(total, 2, engine="abacus")


UNDER_TORCHRUN = """
import sys
import torch
import torch.distributed as dist
import ringcomm

first = ringcomm.init(timeout=30)
second = ringcomm.init(timeout=30)  # over the same store
dist.init_process_group("gloo")
third = ringcomm.init(timeout=30)
x = torch.ones(1)
for comm in (first, second, third):
    comm.all_reduce(x)
work = first.all_reduce(torch.ones(1 << 16), async_op=True)
assert x.item() == 8, x
if first.rank == 0:
    print("all is well", flush=True)
sys.exit(0)  # nothing is closed, and a call may be in flight
"""


def test_init_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "all is well" in done.stdout


UNGUARDED = """
import ringcomm

def rank(comm):
    return comm.rank

ringcomm.run_ranks(rank, 2, ranks="processes")
"""


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "expected to start" in done.stderr.splitlines()[-1]
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


INTERRUPTED = """
import threading, time, ringcomm

def rank(comm):
    if comm.rank == 0:
        print("waits", flush=True)
        time.sleep(60)
    comm.barrier()

ringcomm.run_ranks(rank, 3)
"""


def test_an_interrupt_ends_threads_before_python_ends() -> None:
    words = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.2)  # the others are in their call
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode in (130, -signal.SIGINT)


def test_a_script_from_standard_input_is_told() -> None:
    done = subprocess.run([sys.executable, "-"], input=UNGUARDED, capture_output=True, text=True, timeout=60)
    assert "comes from standard input" in done.stderr.splitlines()[-1]


def meets(said: Connection, rank: int, world_size: int, where: str, timeout: float) -> None:
    try:
        ringcomm.init(rank, world_size, init_method=where, timeout=timeout)
    except ringcomm.RingcommError as error:
        said.send(f"{type(error).__name__} {error}")
    else:
        said.send("")


def meet(*ranks: tuple[int, int, str], timeout: float) -> list[str]:
    """What init says on each rank, given its rank, its world size and where it meets the others."""
    context, running, texts = forked.context(), [], []
    for rank in ranks:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=meets, args=(theirs, *rank, timeout), daemon=True)
        process.start()
        running.append((process, ours))
    for process, ours in running:
        assert ours.poll(60)
        texts.append(ours.recv())
        process.join(60)
    return texts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_missing_rank_is_told() -> None:
    here, there = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    first, second = meet((0, 2, here), (1, 2, there), timeout=2)
    assert first.startswith(f"CollectiveTimeoutError init: rank 0 of 2 waited 2 s at {here} for all 2 ranks")
    assert second.startswith(f"CollectiveTimeoutError init: rank 1 of 2 expected rank 0 at {there} within 2 s")


@pytest.mark.parametrize("scheme", ["tcp", slow("file")])  # the sentences come from what both have in common
def test_different_world_sizes_are_told(scheme: str, tmp_path: Path) -> None:
    where = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/ranks"
    first, second = meet((0, 2, where), (1, 3, where), timeout=20)
    assert "rank 1 was started with world_size 3, this rank (0) with 2" in first
    assert "rank 0 was started with world_size 2, this rank (1) with 3" in second


def test_a_rank_outside_the_world_is_told() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="rank must be 0 to 1"):
        ringcomm.init(2, 2)


PARENT = """
import os, sys, time, ringcomm

def waits(comm):
    open(os.path.join(sys.argv[1], f"{comm.rank}-{os.getpid()}"), "w").close()
    comm.barrier()
    time.sleep(100)

if __name__ == "__main__":
    ringcomm.run_ranks(waits, 2, ranks="processes")
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script, marks = tmp_path / "parent.py", tmp_path / "marks"
    script.write_text(PARENT)
    marks.mkdir()
    parent = subprocess.Popen([sys.executable, str(script), str(marks)])
    try:
        deadline = time.monotonic() + 60
        while len(list(marks.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(path.name.partition("-")[2]) for path in marks.iterdir()]
    assert len(pids) == 2
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def test_ranks_outlive_their_parent_by_one_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a rank that is about to leave holds the lock for as long."""
    now = [100.0]

    class ClosedPipe:
        def recv(self) -> None:
            raise EOFError

    class HeldLock:
        def acquire(self, timeout: float) -> bool:
            now[0] += timeout
            return False

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        launch._watch_parent(ClosedPipe(), None, HeldLock())  # type: ignore[arg-type]
    assert now[0] == 100.0 + launch._GRACE_S


def test_a_coroutine_function_is_refused() -> None:
    async def rank(comm: Communicator) -> int:
        return comm.rank

    with pytest.raises(errors.InvalidArgumentError, match="got a coroutine function"):
        ringcomm.run_ranks(rank, 2)


def test_an_error_is_told_at_once_though_another_rank_sleeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = threading.Event()
    told: list[str] = []

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("boom")
        while not told and not ends.wait(0.05):
            told.extend(capsys.readouterr().err.splitlines())

    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    timer = threading.Timer(60, ends.set)
    timer.start()
    with pytest.raises(ValueError, match="boom"):
        ringcomm.run_ranks(rank, 2, ranks="threads")
    timer.cancel()
    failed, reason = "rank 0 failed with ValueError: boom", "because threads cannot be ended"
    assert told == [f"run_ranks: {failed}; waiting for rank 1, {reason}; pass ranks='processes' to end them"]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_of_run_ranks_is_no_world_of_its_own(ranks: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"rank \d of run_ranks got no communicator.* as comm="):
        ringcomm.run_ranks(_world_of_one, 2, ranks=ranks)


def _world_of_one(comm: Communicator) -> int:
    assert ringcomm.init(rank=0, world_size=1).world_size == 1
    return ringcomm.init().world_size


def test_a_world_of_one_under_another_launcher_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.warns(UserWarning, match=r"expected a world of 4 ranks \(SLURM_STEP_NUM_TASKS\).* RANK=\$SLURM_PROCID"):
        assert ringcomm.init().world_size == 1


def test_ranks_that_are_threads_do_not_share_casts_of_autocast() -> None:
    """torch has one cache for all threads."""
    assert ringcomm.run_ranks(lambda comm: torch.is_autocast_cache_enabled(), 2) == [False, False]
    assert torch.is_autocast_cache_enabled()
