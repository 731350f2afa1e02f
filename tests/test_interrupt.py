"""Ctrl-C, and any signal whose handler raises, ends the call that waits: on its rank by that exception, on the others
by an AbortedError that says so. Within a host and between hosts, which are pretended ones here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringcomm import Communicator, run_ranks
from ringcomm.errors import AbortedError, InvalidArgumentError

Told = tuple[str, str, bool]  # what a rank's call raised, its sentence, and whether that was long before the limit


def queued(comm: Communicator) -> None:
    """A call that waits for an asynchronous one before it."""
    comm.all_reduce(torch.ones(9), async_op=True)
    comm.barrier()


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(70_000)),
    "barrier": queued,
    "wait": lambda comm: comm.all_reduce(torch.ones(9), async_op=True).wait(),
    "wait a minute": lambda comm: comm.all_reduce(torch.ones(9), async_op=True).wait(60),
    "recv": lambda comm: comm.recv(torch.ones(4), comm.world_size - 1),
    "irecv": lambda comm: comm.irecv(torch.ones(4), comm.world_size - 1).wait(),
}
HOSTS = pytest.mark.parametrize("hosts", [None, [1, 1], [2, 1]], ids=str)


def send_soon(seconds: float = 0.3) -> None:
    """A signal to this process; run_ranks keeps SIGINT from its ranks."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()


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


def on_ranks(function: Callable[..., Any], hosts: list[int] | None, *args: Any) -> list[Any]:
    return run_ranks(function, sum(hosts or [3]), "processes", args=args, hosts=hosts, timeout=40)


def waits(comm: Communicator, op: str) -> Told:
    """The last rank comes late; rank 0 waits for it, and its user has had enough."""
    comm.barrier()
    late = comm.rank == comm.world_size - 1

    def call() -> None:
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, signal.default_int_handler)
            send_soon()
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


def hears_late(comm: Communicator) -> Told:
    """What rank 0 waits for comes while the handler takes its time, before that raises."""
    last = comm.world_size - 1
    others = [] if comm.rank else [comm.irecv(torch.empty(1), last, tag=9)]  # another thread is at work, too
    comm.barrier()
    if comm.rank == last:
        time.sleep(0.8)
        comm.send(torch.ones(4), 0)
    if comm.rank > 0:
        return told_by(comm, lambda: comm.recv(torch.ones(1), 0, tag=7))

    def handler(*_: Any) -> None:
        time.sleep(1.5)
        raise KeyboardInterrupt

    def call() -> None:
        signal.signal(signal.SIGUSR1, handler)
        send_soon()
        comm.recv(torch.empty(4), last)

    told = told_by(comm, call)
    assert len(others) == 1
    return told


@HOSTS
def test_what_comes_while_a_handler_runs_does_not_hide_its_exception(hosts: list[int] | None) -> None:
    told = on_ranks(hears_late, hosts)
    assert told[0] == ("KeyboardInterrupt", "", True)
    assert [kind for kind, _, _ in told[1:]] == ["AbortedError"] * (len(told) - 1)


def calls_inside(comm: Communicator, op: str) -> tuple[str, float]:
    """Rank 0's handler makes a call of its own, inside one that waits. Returns: what that raises, and a later sum."""
    said: list[str] = []

    def handler(*_: Any) -> None:
        try:
            comm.barrier()
        except InvalidArgumentError as error:
            said.append(str(error))

    if comm.rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        send_soon()
    else:
        time.sleep(0.8)
    {"all_reduce": CALLS["all_reduce"], "wait": CALLS["wait"]}[op](comm)
    return "".join(said), float(comm.all_reduce(np.ones(3))[0])


@pytest.mark.parametrize("op", ["all_reduce", "wait"])
@HOSTS
def test_a_handler_cannot_call_inside_a_call(hosts: list[int] | None, op: str) -> None:
    told = on_ranks(calls_inside, hosts, op)
    assert "inside another call of this communicator" in told[0][0]
    assert [total for _, total in told] == [len(told)] * len(told)


def closes_inside(comm: Communicator, op: str) -> Told:
    """Rank 0's handler closes the communicator in a wait, and raises."""

    def handler(*_: Any) -> None:
        comm.close()
        raise KeyboardInterrupt

    comm.barrier()

    def call() -> None:
        if comm.rank == 0:
            signal.signal(signal.SIGUSR1, handler)
            send_soon()
            CALLS[op](comm)
        else:
            comm.recv(torch.ones(1), 0, tag=7)

    return told_by(comm, call)


@pytest.mark.parametrize("op", ["wait", "irecv", "all_reduce"])
def test_a_handler_that_closes_ends_its_call(op: str) -> None:
    told = on_ranks(closes_inside, None, op)
    assert told[0] == ("KeyboardInterrupt", "", True)
    assert {kind for kind, _, _ in told[1:]} <= {"RankLostError", "AbortedError"}  # it closed, and was interrupted
