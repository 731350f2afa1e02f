"""Ctrl-C, and any signal whose handler raises, ends the call that waits: on its rank by that exception, on the others
by an AbortedError that says so. Within a host and between hosts, which are pretended ones here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import FileStore

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.errors import AbortedError, InvalidArgumentError
from ringcomm.observe.record import records
from tests.support import torch_ranks

Told = tuple[str, str, bool]  # what a rank's call raised, its sentence, and whether that was long before the limit


def queued(comm: Communicator) -> None:
    """A call that waits for an asynchronous one before it."""
    comm.all_reduce(torch.ones(9), async_op=True)
    comm.barrier()


def later(comm: Communicator) -> None:
    """A wait for a call that another thread executes by then."""
    work = comm.all_reduce(torch.ones(9), async_op=True)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:  # awake: the signal is to come in the wait
        pass
    work.wait()


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(70_000)),
    "barrier": queued,
    "wait": lambda comm: comm.all_reduce(torch.ones(9), async_op=True).wait(),
    "wait later": later,
    "wait a minute": lambda comm: comm.all_reduce(torch.ones(9), async_op=True).wait(60),
    "recv": lambda comm: comm.recv(torch.ones(4), comm.world_size - 1),
    "isend": lambda comm: comm.isend(torch.ones(1 << 20), comm.world_size - 1, tag=9).wait(),
    "irecv": lambda comm: comm.irecv(torch.ones(4), comm.world_size - 1).wait(),
}
CLOSED_IN = {
    **CALLS,
    "another queued": CALLS["all_reduce"],
    "another in flight": lambda comm: (comm.all_reduce(torch.ones(9), async_op=True), CALLS["recv"](comm)),
}
HOSTS = pytest.mark.parametrize("hosts", [None, [1, 1], [2, 1]], ids=str)


def send_once_it_waits(comm: Communicator) -> None:
    """A signal to this process, once its main thread sleeps in a call; run_ranks keeps SIGINT from its ranks."""

    def asleep() -> bool:
        states = [call.state for each in records() if each.rank == comm.rank for call in each.calls]
        thread = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
        return "in flight" in states and thread.rpartition(") ")[2].startswith("S")

    def watch() -> None:
        looks = 0
        while looks < 5:  # in a row: a main thread that makes its way to the call is awake in some of them
            time.sleep(0.02)
            if comm.closed:
                return  # the test has failed before
            looks = looks + 1 if asleep() else 0
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, daemon=True).start()


class Signs:
    """What ranks tell each other without a call."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def wait(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.01)


def told_by(comm: Communicator, call: Callable[[], Any]) -> Told:
    """Closes the communicator behind the call."""
    begin = time.monotonic()
    told = ("nothing", "")
    try:
        call()
    except (KeyboardInterrupt, AbortedError) as error:
        told = type(error).__name__, str(error)
    comm.close()
    return *told, time.monotonic() - begin < 20


def on_this_rank(function: Callable[..., Any], hosts: list[int] | None, args: tuple[Any, ...]) -> Any:
    rank, world_size = int(os.environ["RANK"]), sum(hosts or [3])
    store = FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], "interrupt"), world_size)
    if hosts:
        os.environ["RINGCOMM_HOST"] = f"host{int(rank >= hosts[0])}"
    try:
        with ringcomm.init(rank, world_size, store=store, timeout=40) as comm:
            return function(comm, *args)
    finally:
        os.environ.pop("RINGCOMM_HOST", None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def on_ranks(function: Callable[..., Any], hosts: list[int] | None, *args: Any) -> list[Any]:
    return torch_ranks.run(on_this_rank, function, hosts, args, world_size=sum(hosts or [3]), backend="")


def waits(comm: Communicator, op: str) -> Told:
    """The last rank comes late; rank 0 waits for it, and its user has had enough."""
    comm.barrier()
    late = comm.rank == comm.world_size - 1

    def call() -> None:
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, signal.default_int_handler)
            send_once_it_waits(comm)
        while late and not comm.aborted:
            time.sleep(0.01)
        CALLS["barrier" if late else op](comm)

    return told_by(comm, call)


@pytest.mark.parametrize("op", CALLS)
@HOSTS
def test_ctrl_c_ends_a_call_that_waits(hosts: list[int] | None, op: str) -> None:
    told = on_ranks(waits, hosts, op)
    assert told[0] == ("KeyboardInterrupt", "", True)
    for kind, text, in_time in told[1:]:
        assert (kind, in_time) == ("AbortedError", True)
        assert "rank 0" in text
        assert "was interrupted by a signal in " in text


def hears_late(comm: Communicator, folder: str) -> Told:
    """What rank 0 waits for comes while the handler takes its time, before that raises."""
    last, signs = comm.world_size - 1, Signs(folder)
    others = [] if comm.rank else [comm.irecv(torch.empty(1), last, tag=9)]  # another thread is at work, too
    comm.barrier()

    def handler(*_: Any) -> None:
        signs.set("handling")
        signs.wait("sending")
        time.sleep(0.7)
        raise KeyboardInterrupt

    def call() -> None:
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, handler)
            send_once_it_waits(comm)
            comm.recv(torch.empty(4), last)
        if comm.rank == last:
            signs.wait("handling")
            signs.set("sending")
            comm.send(torch.ones(4), 0)
        comm.recv(torch.ones(1), 0, tag=7)

    told = told_by(comm, call)
    assert len(others) == (comm.rank == 0)
    return told


@HOSTS
def test_a_message_that_arrives_while_a_handler_runs_does_not_hide_its_exception(
    hosts: list[int] | None, tmp_path: Path
) -> None:
    told = on_ranks(hears_late, hosts, str(tmp_path))
    assert told[0] == ("KeyboardInterrupt", "", True)
    assert [kind for kind, _, _ in told[1:]] == ["AbortedError"] * (len(told) - 1)


def calls_inside(comm: Communicator, op: str, folder: str) -> tuple[str, float]:
    """Rank 0's handler makes a call of its own, inside one that waits. Returns: what that raises, and a later sum."""
    said: list[str] = []
    signs = Signs(folder)

    def handler(*_: Any) -> None:
        try:
            comm.barrier()
        except InvalidArgumentError as error:
            said.append(str(error))
        finally:
            signs.set("handled")

    if comm.rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        send_once_it_waits(comm)
    else:
        signs.wait("handled")
    {"all_reduce": CALLS["all_reduce"], "wait": CALLS["wait"]}[op](comm)
    return "".join(said), float(comm.all_reduce(np.ones(3))[0])


@pytest.mark.parametrize("op", ["all_reduce", "wait"])
@HOSTS
def test_a_handler_cannot_call_inside_a_call(hosts: list[int] | None, op: str, tmp_path: Path) -> None:
    told = on_ranks(calls_inside, hosts, op, str(tmp_path))
    assert "inside another call of this communicator" in told[0][0]
    assert [total for _, total in told] == [len(told)] * len(told)


def closes_inside(comm: Communicator, op: str, recorded: bool = True) -> Told:
    """Rank 0's handler closes the communicator in a wait, and raises."""

    def handler(*_: Any) -> None:
        if op == "another queued":
            comm.all_reduce(torch.ones(9), async_op=True)  # which cannot begin while this handler runs
        if op == "another in flight":
            time.sleep(0.2)  # other threads look for signals meanwhile
        comm.close()
        raise KeyboardInterrupt

    comm.barrier()

    def call() -> None:
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, handler)
            if recorded:
                send_once_it_waits(comm)
            else:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            CLOSED_IN[op](comm)
        else:
            while op == "isend" and not comm.aborted:  # a rank that receives takes other messages, too
                time.sleep(0.01)
            comm.recv(torch.ones(1), 0, tag=7)

    return told_by(comm, call)


@pytest.mark.parametrize(
    "op", ["wait", "wait later", "isend", "irecv", "all_reduce", "another queued", "another in flight"]
)
@HOSTS
def test_a_handler_that_closes_ends_its_call(hosts: list[int] | None, op: str) -> None:
    told = on_ranks(closes_inside, hosts, op)
    assert told[0] == ("KeyboardInterrupt", "", True)
    assert {kind for kind, _, _ in told[1:]} <= {"RankLostError", "AbortedError"}  # it closed, and was interrupted


def test_a_handler_that_closes_ends_its_call_without_a_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_RECORD", "0")
    for op in ("wait", "irecv"):
        told = run_ranks(closes_inside, 3, op, False, ranks="processes", timeout=40)
        assert told[0] == ("KeyboardInterrupt", "", True)
        assert not any("before it said why" in text for _, text, _ in told)
