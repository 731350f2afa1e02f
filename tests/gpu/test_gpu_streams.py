"""Streams, handles, communicators in flight together, CUDA graphs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from ringcomm import Communicator
from tests.gpu.on_gpu import PLACE, communicators, in_threads, ranks, real, synchronize, together

pytestmark = in_threads


def busy(stream: torch.cuda.Stream, cycles: int = 20_000_000) -> None:
    """Work of about 10 ms that whatever comes after on the stream has to wait for."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def late_input(comm: Communicator) -> None:
    """The input is written by a kernel that runs after the call was made."""
    stream = torch.cuda.Stream()
    for algorithm in ("direct", "oneshot", "ring"):
        x, out = torch.zeros(5000, device=PLACE), torch.zeros(5000, device=PLACE)
        torch.cuda.current_stream().synchronize()
        busy(stream)
        with torch.cuda.stream(stream):
            x.fill_(comm.rank + 1)
            comm.all_reduce(x, out=out, algorithm=algorithm)  # on torch's current stream
            again = comm.all_reduce(out, out=torch.empty_like(out), algorithm=algorithm)
            x.fill_(-1)  # after the call has read it
        stream.synchronize()
        total = comm.world_size * (comm.world_size + 1) / 2
        assert bool((out == total).all()), algorithm
        assert bool((again == total * comm.world_size).all()), algorithm


def named_stream(comm: Communicator) -> None:
    mine, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.full((3000,), float(comm.rank), device=PLACE)
    torch.cuda.current_stream().synchronize()
    work = comm.all_reduce(x, stream=mine, async_op=True)
    assert work.wait(stream=other) is x
    with torch.cuda.stream(other):
        doubled = x * 2
    other.synchronize()
    assert bool((doubled == comm.world_size * (comm.world_size - 1)).all())
    y = torch.full((3000,), float(comm.rank), device=PLACE)
    mine.wait_stream(torch.cuda.current_stream())
    busy(mine)
    comm.all_reduce(y, stream=mine, async_op=True).wait()  # the current stream waits, not the call's
    assert bool((y * 2 == comm.world_size * (comm.world_size - 1)).all())


@real
@pytest.mark.parametrize("case", [late_input, named_stream], ids=lambda case: case.__name__)
def test_calls_run_in_the_order_of_their_stream(case: Any) -> None:
    ranks(case, 3)


def own_context(comm: Communicator) -> None:
    """A context that the program has made by the driver's API is current again after each call."""
    x = torch.ones(1000, device=PLACE)
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    usual, own, now = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(usual)) == 0
    assert driver.cuCtxCreate_v2(ctypes.byref(own), 0, 0) == 0  # and makes it current
    try:
        for call in (comm.all_reduce, lambda x: comm.all_reduce(x, async_op=True).synchronize()):
            call(x)
            comm.synchronize()
            assert driver.cuCtxGetCurrent(ctypes.byref(now)) == 0
            assert now.value == own.value
    finally:
        driver.cuCtxSetCurrent(usual)
        driver.cuCtxDestroy_v2(own)
    assert bool((x == comm.world_size**2).all())


@real
def test_a_context_of_the_program_stays_current() -> None:
    ranks(own_context, 2)


def two_in_flight(comm: Communicator) -> None:
    twin = comm.dup()
    works = []
    for i in range(40):
        x, y = (
            torch.full((1000,), float(i), device=PLACE),
            torch.full((70_000 if i % 4 == 0 else 10,), 1.0, device=PLACE),
        )
        first, second = (comm, twin) if i % 2 else (twin, comm)
        works.append((i, first.all_reduce(x, async_op=True), second.all_reduce(y, async_op=True)))
    for i, first, second in works:
        assert bool((first.wait() == i * comm.world_size).all())
        assert bool((second.wait() == comm.world_size).all())
    twin.close()


def test_two_communicators_in_flight() -> None:
    ranks(two_in_flight, 3)


def test_one_thread_drives_all_ranks() -> None:
    with communicators(4) as comms:
        xs = [torch.full((1000,), float(rank), device=PLACE) for rank in range(4)]
        for algorithm in ("auto", "direct", "oneshot", "ring"):
            outs = [torch.empty_like(x) for x in xs]
            together(
                comms,
                lambda c, outs=outs, a=algorithm: c.all_reduce(
                    xs[c.rank], out=outs[c.rank], algorithm=a, async_op=True
                ),
            )
            synchronize()
            assert all(bool((out == 6).all()) for out in outs), algorithm


@real
@pytest.mark.parametrize("apart", ["", "1"], ids=["one-launch", "apart"])
def test_a_graph_replays_between_other_calls(apart: str, monkeypatch: Any) -> None:
    if apart:
        monkeypatch.setenv("RINGCOMM_CUDA_APART", apart)
    world_size, count = 4, 3000
    with communicators(world_size) as comms:
        xs = [torch.empty(count, device=PLACE) for _ in comms]
        outs = {a: [torch.empty_like(x) for x in xs] for a in ("direct", "oneshot", "ring")}

        def calls() -> None:
            for algorithm, out in outs.items():
                together(
                    comms,
                    lambda c, o=out, a=algorithm: c.all_reduce(xs[c.rank], out=o[c.rank], algorithm=a, async_op=True),
                )

        calls()  # what is made at the first call is not captured
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for i in range(100):
            for rank, x in enumerate(xs):
                x.copy_(torch.arange(count, device=PLACE).remainder_(97).add_(rank * i))
            graph.replay()
            want = torch.arange(count, device=PLACE).remainder_(97).mul_(world_size).add_(6 * i).float()
            for algorithm, out in outs.items():
                for rank in range(world_size):
                    assert torch.equal(out[rank], want), f"replay {i} {algorithm} rank {rank}"
            if i % 3 == 0:  # calls of one's own between the replays move the counters on
                got = together(comms, lambda c, n=10 + i: c.all_reduce(torch.ones(n, device=PLACE), async_op=True))
                assert all(bool((x == world_size).all()) for x in got)
