"""Ranks that wait for each other in several communicators are told at once; ranks that are merely slow never are."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.errors import CollectiveTimeoutError, MismatchError, RingcommError
from tests.support import torch_ranks

RANKS = ["threads", "processes"]
ADVICE = "call the collectives of all communicators in the same order on every rank"


def told(call: Callable[[], Any]) -> tuple[type[Exception] | None, str, float]:
    """What a call raises, and after how many seconds."""
    start = time.monotonic()
    try:
        call()
    except RingcommError as error:
        return type(error), str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def check_told(outcomes: list[Any]) -> None:
    for kind, text, seconds in outcomes:
        assert issubclass(kind, MismatchError), (kind, text)
        assert seconds < 30.0  # long before the limit of the call
        assert ADVICE in text


# ---- two communicators --------------------------------------------------------------------------------------------


def crossed(comm: Communicator, how: str) -> Any:
    """Rank 0 calls one communicator while all others call another one."""
    other = comm.split(0, comm.rank)
    assert other is not None
    if how != "unused":
        other.barrier()
    x = torch.ones(5)
    if comm.rank > 0:
        return told(other.barrier)
    if how == "async":
        return told(lambda: comm.all_reduce(x, async_op=True).wait())
    if how == "queued":
        first, second = comm.all_reduce(x, async_op=True), comm.all_reduce(x, async_op=True)
        return told(lambda: (second.wait(), first.wait()))
    if how == "message":
        return told(lambda: comm.recv(x, 1))
    return told(lambda: comm.all_gather(x))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["used", "unused", "async", "queued", "message"])
def test_two_communicators_crossed(how: str, ranks: str) -> None:
    outcomes = run_ranks(crossed, 3, how, ranks=ranks, timeout=60)
    check_told(outcomes)
    assert "expected rank 1 (process" in outcomes[0][1]
    assert "which waits" not in outcomes[0][1]
    assert "but it waits in barrier #" in outcomes[0][1]
    assert "of another communicator for rank 0; call" in outcomes[0][1]
    call = {"message": "recv", "used": "all_gather #", "unused": "all_gather #"}.get(how, "all_reduce #")
    for _, text, _ in outcomes[1:]:
        assert text.startswith("barrier #")
        assert f"but it waits in {call}" in text
        assert "tests/comm/test_deadlock.py" in text


def circle(comm: Communicator) -> Any:
    """Rank r waits for the next one in a communicator of the two alone."""
    world_size, pairs = comm.world_size, []
    for first in range(world_size):
        members = {first, (first + 1) % world_size}
        pairs.append(comm.split(int(comm.rank in members), comm.rank))
    mine = pairs[comm.rank]
    assert mine is not None
    assert mine.world_size == 2
    return told(mine.barrier)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("world_size", [3, 4])
def test_a_circle_over_as_many_communicators(world_size: int, ranks: str) -> None:
    outcomes = run_ranks(circle, world_size, ranks=ranks, timeout=60)
    check_told(outcomes)
    for _, text, _ in outcomes:
        assert text.count("waits in barrier #0 (tests/comm/test_deadlock.py:") == world_size - 1
        assert text.count("there (process") == world_size - 2


def own_messages(comm: Communicator) -> Any:
    """Both ranks receive before they send, in one communicator."""
    return told(lambda: comm.recv(torch.ones(3), 1 - comm.rank))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_circle_inside_one_communicator(ranks: str) -> None:
    outcomes = run_ranks(own_messages, 2, ranks=ranks, timeout=60)
    check_told(outcomes)
    assert all("but it waits in recv (tests/comm/test_deadlock.py:" in text for _, text, _ in outcomes)
    assert not any("another communicator" in text for _, text, _ in outcomes)


def test_a_communicator_of_the_main_thread_hides_no_deadlock() -> None:
    with ringcomm.init(rank=0, world_size=1) as own:
        own.barrier()  # by this thread, which waits in run_ranks below
        check_told(run_ranks(own_messages, 2, ranks="threads", timeout=60))


NO_CALLS = {
    "notebook": ["ipykernel.iostream", "tornado.platform.asyncio"],
    "debugger": ["_pydevd_bundle.pydevd_comm", "pydevd"],
    "progress bar": ["rich.live"],
    "torch.compile": ["torch._inductor.compile_worker.subproc_pool", "torch._inductor.compile_worker.utils"],
    "sharing of tensors": ["multiprocessing.resource_sharer"],
}
"""What starts threads that call no communicator: the modules of such a thread, from its outermost frame on."""


@pytest.mark.parametrize("modules", NO_CALLS.values(), ids=NO_CALLS)
def test_threads_that_call_no_communicator_hide_no_deadlock(modules: list[str]) -> None:
    ended = threading.Event()
    run: Callable[[], Any] = ended.wait
    for module in reversed(modules):
        names: dict[str, Any] = {"__name__": module, "called": run}
        exec("def run():\n    called()", names)
        run = names["run"]
    thread = threading.Thread(target=run)
    thread.start()
    try:
        check_told(run_ranks(own_messages, 2, ranks="threads", timeout=60))
    finally:
        ended.set()
        thread.join()


SENDERS = "a long send waits for its receive: use sendrecv, or isend, or make the calls inside coalesce()"


def long_sends(comm: Communicator, limit_s: float | None) -> Any:
    """All send round the ring before they receive."""
    x = torch.ones(1_000_000)
    return told(lambda: comm.send(x, (comm.rank + 1) % comm.world_size, timeout=limit_s))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_long_sends_round_a_ring_are_told_what_to_do(world_size: int, ranks: str) -> None:
    for kind, text, seconds in run_ranks(long_sends, world_size, None, ranks=ranks, timeout=60):
        assert issubclass(kind, MismatchError), (kind, text)
        assert seconds < 8
        assert SENDERS in text
        assert ADVICE not in text


@pytest.mark.parametrize("ranks", RANKS)
def test_long_sends_with_a_time_limit_are_told_what_to_do(ranks: str) -> None:
    outcomes = run_ranks(long_sends, 3, 0.5, ranks=ranks, timeout=60)
    assert any(issubclass(kind, CollectiveTimeoutError) and SENDERS in text for kind, text, _ in outcomes), outcomes


# ---- the training layer --------------------------------------------------------------------------------------------


def saves_alone(stage: int) -> Any:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, sharded = ringcomm.shard(model, optimizer, stage=stage)
    assert sharded is not None
    wrapped(torch.ones(4, 8)).sum().backward()
    sharded.step()
    sharded.zero_grad()
    return told(sharded.state_dict if dist.get_rank() == 0 else dist.barrier)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_saves_while_the_others_are_in_a_barrier(stage: int) -> None:
    outcomes = torch_ranks.run(saves_alone, stage)
    check_told(outcomes)
    assert "waits in barrier #" in outcomes[0][1]
    assert all(text.startswith("barrier #") and "of another communicator" in text for _, text, _ in outcomes[1:])


# ---- who is slow is not in a deadlock ------------------------------------------------------------------------------


def slow(comm: Communicator, how: str) -> Any:
    """Rank 1 waits for rank 0 in one communicator, while a thread of rank 0 waits for rank 1 in another one; but
    rank 0 comes, for something of it goes on."""
    other = comm.split(0, comm.rank)
    assert other is not None
    if how != "first call of a thread":
        other.barrier()
    x = torch.full((4,), float(comm.rank))

    def late() -> None:
        time.sleep(2.5)
        other.all_reduce(x)

    if comm.rank > 0:
        other.all_reduce(x)
        comm.barrier()
    elif how == "computes":
        late()
        comm.barrier()
    else:  # the call comes from another thread than those so far
        helper = threading.Thread(target=late)
        helper.start()
        comm.barrier()
        helper.join()
    return x.tolist()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["computes", "thread", "first call of a thread"])
def test_a_rank_that_goes_on_is_left_alone(how: str, ranks: str) -> None:
    assert run_ranks(slow, 3, how, ranks=ranks, timeout=60) == [[3.0] * 4] * 3


def waits_for_a_call_of_another_thread(comm: Communicator, others: list[Any], x: torch.Tensor) -> None:
    """Rank 0 leaves a call in its second communicator to a thread that is no rank."""
    other = comm.split(0, comm.rank)
    assert other is not None
    others[comm.rank] = other
    if comm.rank == 1:
        other.all_reduce(x)
    comm.barrier()


def test_a_thread_with_its_own_communicator_may_make_the_call() -> None:
    others: list[Any] = [None, None]
    x = torch.ones(3)
    ranks = threading.Thread(
        target=lambda: run_ranks(waits_for_a_call_of_another_thread, 2, others, x, ranks="threads", timeout=60)
    )
    with ringcomm.init(rank=0, world_size=1) as own:
        own.barrier()
        ranks.start()
        time.sleep(3)
        others[0].all_reduce(torch.ones(3))
        ranks.join()
    assert x.tolist() == [2.0] * 3


def short_limits(comm: Communicator, both_told: threading.Barrier) -> Any:
    other = comm.split(0, comm.rank)
    assert other is not None
    outcome = told(lambda: (comm if comm.rank == 0 else other).barrier(timeout=3))
    both_told.wait(timeout=60)  # a rank that returned would close what the other one still waits in
    return outcome


def test_a_short_limit_is_its_own_answer() -> None:
    for kind, text, _ in run_ranks(short_limits, 2, threading.Barrier(2), ranks="threads", timeout=60):
        assert kind is CollectiveTimeoutError, text


def stopped(comm: Communicator) -> Any:
    """What rank 0 waits for has come, but it is stopped by a signal; rank 1 waits for it in another communicator."""
    other = comm.split(0, comm.rank)
    assert other is not None
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 0:
        comm.barrier()
    else:
        time.sleep(2.0)  # it waits and says so
        os.kill(int(pids[0]), signal.SIGSTOP)
        threading.Timer(4.0, os.kill, (int(pids[0]), signal.SIGCONT)).start()
        comm.barrier()
    other.barrier()
    return True


def test_a_stopped_rank_is_late() -> None:
    assert run_ranks(stopped, 2, ranks="processes", timeout=60) == [True, True]


# ---- random programs -----------------------------------------------------------------------------------------------


def legal(comm: Communicator, seed: int, calls: int) -> int:
    """Calls of several communicators in one order that all ranks agree on, with ranks that take their time, calls
    that are waited for later, and messages. Returns how many this rank made."""
    plan, mine = random.Random(seed), random.Random((seed, comm.rank).__hash__())
    groups: list[tuple[Communicator, list[int]]] = [(comm, list(range(comm.world_size)))]
    for _ in range(4):
        members = sorted(plan.sample(range(comm.world_size), plan.randint(2, comm.world_size)))
        group = comm.split(0 if comm.rank in members else None, comm.rank)
        groups.append((group if group is not None else comm, members))
    made, open_calls = 0, []
    for _ in range(calls):
        group, members = plan.choice(groups)
        kind = plan.choice(["all_reduce", "all_gather", "barrier", "broadcast", "async", "async", "message"])
        count = plan.choice([1, 100, 20000, 300000])
        sender, receiver = plan.sample(range(len(members)), 2)
        if mine.random() < 0.3:
            time.sleep(mine.choice([0.001, 0.01, 0.05]))
        if comm.rank not in members:
            continue
        made += 1
        x: Any = np.ones(count, np.float32)
        if kind == "async":
            open_calls.append((group.all_reduce(x, async_op=True), len(members)))
        elif kind == "message" and group.rank in (sender, receiver):
            group.send(x, receiver) if group.rank == sender else group.recv(x, sender)
        elif kind == "all_reduce":
            assert group.all_reduce(x)[0] == len(members)
        elif kind == "all_gather":
            assert group.all_gather(x).shape[0] == count * len(members)
        elif kind == "broadcast":
            group.broadcast(x, sender)
        elif kind == "barrier":
            group.barrier()
        while open_calls and mine.random() < 0.4:
            work, size = open_calls.pop(0)
            assert work.wait()[0] == size
    for work, size in open_calls:
        assert work.wait()[0] == size
    comm.barrier()
    return made


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm(seed: int, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a patience of 4 ms, so that every second wait is a long one."""
    monkeypatch.setenv("RINGCOMM_DEADLOCK_MS", "4")
    assert sum(run_ranks(legal, 4, seed, 150, ranks=ranks, timeout=60)) > 150


def test_no_garbage_is_collected_while_the_frames_of_threads_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython up to 3.11 may freeze there: https://github.com/python/cpython/issues/106883."""
    collects: list[bool] = []
    frames = sys._current_frames

    def noted() -> Any:
        collects.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", noted)
    check_told(run_ranks(crossed, 2, "used", timeout=60))
    assert collects
    assert not any(collects)
    assert gc.isenabled()


def test_a_long_wait_does_not_ask_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank lists its other threads only if the others suspect it of a deadlock."""
    asked: list[int] = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (asked.append(1), frames())[1])
    monkeypatch.setenv("RINGCOMM_DEADLOCK_MS", "10")

    def late(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.5)
        comm.barrier()

    run_ranks(late, 2, timeout=60)
    assert not asked


def test_closed_communicators_take_no_room_in_the_graph() -> None:
    """Each communicator has its own threads, and an engine that lives as long as the object."""
    closed: list[Communicator | None] = []
    for _ in range(9):
        run_ranks(lambda comm: closed.append(comm.split(0)), 16)
    check_told(run_ranks(crossed, 2, "used", timeout=60))
    assert len(closed) == 144


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_DEADLOCK_MS", "0")
    # In processes of their own: a process reads it when it makes its first communicator.
    for kind, text, seconds in run_ranks(crossed, 2, "used", ranks="processes", timeout=5):
        assert kind is not MismatchError, text
        assert seconds > 4
