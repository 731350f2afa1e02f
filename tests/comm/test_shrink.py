"""What each rank hears when another is lost, stops or calls something else, and how those that are left go on."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.comm import launch
from ringcomm.comm.hosts import Network, memory_store
from ringcomm.errors import AbortedError, CollectiveTimeoutError, MismatchError, RankLostError, RingcommError
from tests.support import forked

HERE = os.path.relpath(__file__)


def said(call: Any) -> tuple[type[Exception], str]:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except RingcommError as error:
        return type(error), str(error)
    raise AssertionError("it raised nothing")


def total(comm: Communicator) -> float:
    """A sum over the ranks that are there."""
    return float(comm.all_reduce(np.full(3, comm.rank + 1.0))[2])


# ---- everyone hears the same ---------------------------------------------------------------------------------------


def differ(comm: Communicator, what: str) -> tuple[type[Exception], str]:
    total(comm)
    odd, x = comm.rank == 2, torch.ones(6)

    def call() -> None:
        if what == "count":
            comm.all_reduce(torch.ones(5) if odd else x)
        elif what == "op":
            comm.broadcast(x, 0) if odd else comm.all_reduce(x)
        elif what == "dtype":
            comm.all_reduce(x.double() if odd else x)
        elif what == "reduce op":
            comm.all_reduce(x, "max" if odd else "sum")
        elif what == "algorithm":
            comm.all_reduce(x, algorithm="ring" if odd else "auto")
        elif what == "root":
            comm.broadcast(x, 1 if odd else 0)
        elif what == "async":
            comm.all_reduce(torch.ones(5) if odd else x, async_op=True).wait()
        comm.barrier()

    kind, text = said(call)
    again, repeated = said(comm.barrier)
    assert (again, repeated) == (kind, text)  # from then on every call says it
    return kind, text


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("count", ["all_reduce #1: ", "passed 6 x float32 (", "rank 2 passed 5 x float32 ("]),
        (
            "op",
            ["call #1: ", "called all_reduce(6 x float32, sum, auto) (", "rank 2 called broadcast(6 x float32, root 0"],
        ),
        ("dtype", ["passed 6 x float32 (", "rank 2 passed 6 x float64 ("]),
        ("reduce op", ["passed 6 x float32, sum (", "rank 2 passed 6 x float32, max ("]),
        ("algorithm", ["passed 6 x float32, algorithm auto (", "rank 2 passed 6 x float32, algorithm ring ("]),
        ("root", ["broadcast #1: ", "passed 6 x float32, root 0 (", "rank 2 passed 6 x float32, root 1 ("]),
        ("async", ["all_reduce #1: ", "rank 2 passed 5 x float32 ("]),
    ],
)
def test_a_mismatch_is_told_to_every_rank(what: str, parts: list[str], ranks: str) -> None:
    if ranks == "processes" and what not in ("count", "root"):
        pytest.skip("threads take the same way; two kinds are enough for the slower ones")
    told = run_ranks(differ, 3, what, ranks=ranks, timeout=20)
    assert {kind for kind, _ in told} == {MismatchError}
    assert len({text for _, text in told}) == 1, told
    for part in [*parts, f"{HERE}:", "every rank must make the same calls"]:
        assert part in told[0][1], (part, told[0][1])


def test_an_earlier_difference_is_the_one_that_is_named() -> None:
    """The root of a broadcast waits for nobody: what it did differently is found in a later call, and named itself."""

    def rank(comm: Communicator) -> tuple[type[Exception], str]:
        comm.barrier()

        def calls() -> None:
            comm.broadcast(torch.ones(4), comm.rank)  # each is the root
            comm.barrier()

        return said(calls)

    for kind, text in run_ranks(rank, 2, timeout=20):
        assert kind is MismatchError
        assert text.startswith("broadcast #1: rank 0 passed 4 x float32, root 0 (")


def lost(comm: Communicator, how: str) -> tuple[type[Exception], str, float]:
    total(comm)
    if comm.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(0)
        if how == "raises":
            raise ValueError("what rank 1 found")
        if how == "stalls":
            time.sleep(6)
        return AbortedError, "", 0.0  # leaves early
    begin = time.monotonic()
    if how == "waits":
        kind, text = said(lambda: comm.recv(np.zeros(1), 1))
    else:
        kind, text = said(lambda: total(comm))
    return kind, text, time.monotonic() - begin


@pytest.mark.parametrize("how", ["leaves", "waits", "stalls"])
def test_threads_hear_of_a_rank_that_leaves_or_stalls(how: str) -> None:
    told = run_ranks(lost, 3, how, timeout=2)
    for kind, text, seconds in (told[0], told[2]):
        assert kind is (CollectiveTimeoutError if how == "stalls" else RankLostError), text
        assert "expected rank 1 (process" in text
        assert ("within the timeout of 2 s" if how == "stalls" else "it has closed its communicator") in text
        assert seconds < 5
    assert how == "waits" or told[0][1] == told[2][1]


# ---- going on ------------------------------------------------------------------------------------------------------


def go_on(comm: Communicator, folder: str, how: str) -> Any:
    """Ranks 0, 2 and 3 lose rank 1, and write their results to a file, because run_ranks raises the error of rank 1."""
    try:
        assert total(comm) == 10.0
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        kind, text = said(lambda: total(comm))
        begin = time.monotonic()
        with comm.shrink(timeout=8 if how == "killed" else 3) as new:
            waited = time.monotonic() - begin
            sums = [total(new) for _ in range(3)]
            facts = (
                kind.__name__,
                new.rank,
                new.world_size,
                sums,
                waited < 6 or how == "stopped",
                comm.aborted,
                "rank 1 (process" in text,
            )
        with open(os.path.join(folder, str(comm.rank)), "w") as file:
            file.write(repr(facts))
    finally:
        if comm.rank == 0 and how == "stopped":
            while len(os.listdir(folder)) < 3:
                time.sleep(0.01)
            os.kill(int(text.partition("rank 1 (process ")[2].partition(" ")[0]), signal.SIGKILL)


@pytest.mark.parametrize(("how", "kind"), [("killed", "RankLostError"), ("stopped", "CollectiveTimeoutError")])
def test_processes_go_on_without_one(tmp_path: Any, how: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 20.0)  # run_ranks leaves the survivors time
    with pytest.raises(ringcomm.RankFailedError, match="exit code -9"):
        run_ranks(go_on, 4, str(tmp_path), how, ranks="processes", timeout=4)
    for new, old in enumerate((0, 2, 3)):
        facts = (kind, new, 3, [6.0] * 3, True, True, True)
        assert (tmp_path / str(old)).read_text() == repr(facts)


def survive(*words: str) -> None:
    """The example, whose ranks are forked."""
    program = importlib.import_module("survive")  # pytest's pythonpath names its folder
    program.multiprocessing = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    sys.argv = ["survive.py", *words]
    program.main()


@pytest.mark.timeout(280)
def test_a_training_outlives_ranks() -> None:
    """Two in one step, of which the second may be noticed as late as in the recovery from the first, and one more."""
    ended = forked.run(survive, "--steps", "12", "--kill-at", "5", "5", "8", limit_s=240)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    gone_on = [line for line in lines if line.startswith("goes on from step ")]
    assert gone_on[-2:] == ["goes on from step 5 on 2 ranks", "goes on from step 8 on 1 ranks"]
    assert lines[-2].startswith("step 10: loss ")
    assert lines[-2].endswith(" on 1 ranks")
    assert lines[-1] == "exit codes [0, -9, -9, -9]"


def stopped_at_work(comm: Communicator) -> int:
    """Rank 1 is stopped in the middle of a call that writes into rank 0's memory, and goes on when rank 0 has that
    memory back. Returns: what rank 0 then finds in it that it has not put there."""
    pids = comm.all_gather(np.array([os.getpid()]))
    x = comm.empty(1 << 23, "float32", like="numpy")
    x[:] = 1
    if comm.rank == 0:
        threading.Timer(0.2, os.kill, (int(pids[1]), signal.SIGSTOP)).start()
    kind, _ = said(lambda: [comm.all_reduce(x, "max", timeout=0.7) for _ in range(1000)])
    assert kind is CollectiveTimeoutError
    if comm.rank == 1:
        return 0
    with comm.shrink(timeout=0.2):
        x[:] = 0
        os.kill(int(pids[1]), signal.SIGCONT)
        time.sleep(0.7)
        return int(np.count_nonzero(x))


def test_memory_that_was_given_back_is_left_alone() -> None:
    assert run_ranks(stopped_at_work, 2, ranks="processes", timeout=20) == [0, 0]


def test_shrink_again_and_again() -> None:
    def rank(comm: Communicator) -> list[float]:
        sums = []
        while comm.world_size > 1:
            sums.append(total(comm))
            if comm.rank == comm.world_size - 1:
                return sums  # leaves early
            with pytest.raises(RankLostError):
                comm.barrier()
            comm = comm.shrink()
        return [*sums, total(comm)]

    assert run_ranks(rank, 4, timeout=20) == [[10, 6, 3, 1], [10, 6, 3], [10, 6], [10]]


def test_a_rank_leaves_while_the_others_shrink() -> None:
    def rank(comm: Communicator) -> float:
        if comm.rank == 3:
            return 0.0  # leaves early
        with pytest.raises(RankLostError):
            comm.barrier()
        if comm.rank == 2:
            time.sleep(0.5)  # the others wait for it by now
            return 0.0
        with comm.shrink(timeout=20) as new:
            return total(new)

    assert run_ranks(rank, 4, timeout=30) == [3.0, 3.0, 0.0, 0.0]


def test_shrink_after_an_abort_from_another_thread() -> None:
    """All are left; abort is idempotent, from any thread, and ends calls in flight of every kind."""

    in_flight = threading.Barrier(3)

    def rank(comm: Communicator) -> tuple[set[str], float]:
        pending = [comm.irecv(np.zeros(2), (comm.rank + 1) % 3)]
        if comm.rank > 0:
            pending.append(comm.all_reduce(np.ones(4), async_op=True))  # waits for rank 0
        in_flight.wait(20)
        if comm.rank == 0:
            time.sleep(0.1)
            aborters = [threading.Thread(target=comm.abort, args=("enough",)) for _ in range(4)]
            for each in aborters:
                each.start()
            for each in aborters:
                each.join()
        told = {said(work.wait) for work in pending}
        assert all(kind is AbortedError and "enough" in text for kind, text in told), told
        with comm.shrink() as new:
            return {kind.__name__ for kind, _ in told}, total(new)

    assert run_ranks(rank, 3, timeout=20) == [({"AbortedError"}, 6.0)] * 3


def test_shrink_leaves_out_a_rank_that_comes_late() -> None:
    def rank(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 2:
            comm.abort("over")
            assert decided.wait(20)
            return [said(lambda: comm.shrink(timeout=0.3)) for _ in range(4)]
        with pytest.raises(AbortedError):
            comm.barrier()
        there.wait(20)
        with comm.shrink(timeout=1) as new:
            decided.set()
            return total(new)

    there, decided = threading.Barrier(2), threading.Event()
    first, second, told = run_ranks(rank, 3, timeout=20)
    assert (first, second) == (3.0, 3.0)
    for kind, text in told:  # however often it asks: it must not go on alone, as if the others were lost
        assert kind is RankLostError
        assert "without it; start it anew" in text


def has_exited(pid: int) -> bool:
    """Whether a process has ended, also if its parent has asked for its status already."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def misses_two(comm: Communicator, folder: str) -> None:
    """Rank 1 does its part of a gather and ends well; rank 2 dies before it has done its own."""
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 2:
        while not has_exited(int(pids[1])):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        Path(folder, "told").write_text(said(lambda: comm.gather(np.ones(4)))[1])
    else:
        comm.gather(np.ones(4))


def test_a_rank_that_has_done_its_part_is_not_blamed(tmp_path: Path) -> None:
    with pytest.raises(ringcomm.RankFailedError, match="exit code -9"):
        run_ranks(misses_two, 3, str(tmp_path), ranks="processes", timeout=20)
    text = (tmp_path / "told").read_text()
    assert "rank 2 (process" in text
    assert "rank 1 (process" not in text


def meetings(world_size: int) -> list[Any]:
    store = memory_store()
    return [Network(store, "world").agree_on_shrink(rank, world_size) for rank in range(world_size)]


def test_hosts_meet_again_after_an_attempt_failed_on_one_rank() -> None:
    """Rank 0 gives up after it has seen who is there and before it brings its handle, and tries again."""
    first, second = meetings(2)
    told: list[Any] = []

    def rank_1() -> None:
        second(b"here", [], 20_000)
        begin = time.monotonic()
        told.append(said(lambda: second(b"handle", [0, 1], 20_000))[0])
        told.append(time.monotonic() - begin < 10)
        told.append((second(b"here", [], 20_000), second(b"one", [0, 1], 20_000)))

    other = threading.Thread(target=rank_1)
    other.start()
    assert first(b"here", [], 20_000) == [b"here"] * 2
    assert first(b"here", [], 20_000) == [b"here"] * 2
    assert first(b"zero", [0, 1], 20_000) == [b"zero", b"one"]
    other.join()
    assert told == [RankLostError, True, ([b"here"] * 2, [b"zero", b"one"])]


def test_a_rank_that_misses_the_meeting_of_the_hosts_stays_left_out() -> None:
    first, second = meetings(2)
    assert first(b"here", [], 100) == [b"here", b""]
    for _ in range(4):
        kind, text = said(lambda: second(b"here", [], 100))
        assert kind is RankLostError
        assert "start it anew" in text


def test_shrink_over_hosts() -> None:
    """A rank leaves: the others of its host hear through memory, those of the other host through the network."""

    def rank(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 3:
            return None
        with pytest.raises((RankLostError, AbortedError)):
            comm.barrier()
        with comm.shrink(timeout=5) as new:
            return new.hosts, total(new)

    left = ([[0, 1], [2]], 6.0)
    assert run_ranks(rank, 4, hosts=[2, 2], timeout=20) == [left, left, left, None]


def test_training_goes_on_without_a_rank() -> None:
    """A rank leaves in the middle of a step: those that are left take the model as it was, and their bits agree."""

    def rank(comm: Communicator) -> Any:
        generator = torch.Generator().manual_seed(3)
        values = [torch.rand(2, 4, generator=generator), torch.rand(2, generator=generator)]

        def wrapped() -> torch.nn.Module:
            model = torch.nn.Linear(4, 2)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)
            return ringcomm.DistributedDataParallel(model, comm=comm)

        ddp, steps, lost_at = wrapped(), 0, None
        while steps < 6:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            values = [parameter.detach().clone() for parameter in ddp.parameters()]
            try:
                if comm.world_size == 3 and comm.rank == 1 and steps == 3:
                    return None
                x = torch.full((2, 4), comm.rank + steps + 1.0)
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
            except RankLostError:
                lost_at = steps
                comm = comm.shrink()
                ddp = wrapped()
                continue
            optimizer.step()
            steps += 1
        return lost_at, comm.world_size, [p.tolist() for p in ddp.parameters()]

    first, gone, last = run_ranks(rank, 3, timeout=20)
    assert gone is None
    assert first == last
    assert first[:2] == (3, 2)
