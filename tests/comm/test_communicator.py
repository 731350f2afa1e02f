"""A communicator's life: ways to call, groups, splitting, ending; and the same methods over a process group."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import _C, Communicator, errors
from ringcomm.arrays import devices
from ringcomm.comm import process_group
from ringcomm.comm.engine import milliseconds, whole_milliseconds
from ringcomm.comm.work import Group
from tests.support.collectives.arrays import raw


def four(fn: Any, *args: Any) -> list[Any]:
    return ringcomm.run_ranks(fn, 4, *args, timeout=30)


# ---- asynchronous calls ------------------------------------------------------------------------------------------


def test_async_calls_give_work() -> None:
    def fn(comm: Communicator) -> None:
        xs = [torch.full((100 * i + 1,), float(i)) for i in range(20)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        assert all(isinstance(work, ringcomm.Work) for work in works)
        for x, work in zip(xs, works, strict=True):
            assert work.wait() is x
            assert work.done
            assert work.wait(timeout=1.0) is x
        assert [float(x[0]) for x in xs] == [4.0 * i for i in range(20)]

    four(fn)


def test_async_results_of_every_kind() -> None:
    def fn(comm: Communicator) -> None:
        gathered = comm.all_gather(torch.full((2,), comm.rank), async_op=True)
        strided = torch.ones(4, 4).t()
        reduced = comm.all_reduce(strided, async_op=True)
        scattered = comm.reduce_scatter(torch.arange(8.0), async_op=True)
        fence = comm.barrier(async_op=True)
        assert gathered.wait().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert reduced.wait() is strided
        assert bool((strided == 4).all())
        assert scattered.wait().tolist() == [8.0 * comm.rank, 8.0 * comm.rank + 4]
        assert fence.wait() is None

    four(fn)


def test_arrays_live_until_a_forgotten_call_is_done() -> None:
    def fn(comm: Communicator) -> None:
        for i in range(30):
            comm.all_reduce(torch.full((10_000,), float(i)), async_op=True)
            if i % 10 == 0:
                gc.collect()
        assert float(comm.all_reduce(torch.ones(1))) == 4

    four(fn)


def test_asynchronous_and_synchronous_calls_keep_their_order() -> None:
    def fn(comm: Communicator) -> None:
        x = torch.ones(1000)
        first = comm.all_reduce(x, async_op=True)
        y = torch.full((1000,), 2.0)
        comm.all_reduce(y)
        assert bool((y == 8).all())
        assert bool((first.wait() == 4).all())

    four(fn)


# ---- groups of calls, lists --------------------------------------------------------------------------------------


def test_coalesced_calls_are_done_at_the_end_of_the_block() -> None:
    def fn(comm: Communicator) -> None:
        xs = [torch.full((i + 1,), 1.0) for i in range(10)]
        with comm.coalesce() as group:
            for x in xs:
                comm.all_reduce(x)
            gathered = comm.all_gather(torch.tensor([comm.rank]))
            several = comm.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
        assert len(group) == 13
        assert [x.tolist() for x in several.wait()] == [[4.0] * 2, [4.0] * 3]
        assert group.done
        assert all(bool((x == 4).all()) for x in xs)
        assert gathered.wait().tolist() == [0, 1, 2, 3]
        assert comm.all_reduce_coalesced(xs, "max") is not xs
        later = comm.all_reduce_coalesced(xs, async_op=True)
        assert [float(x[0]) for x in later.wait()] == [16.0] * 10

    four(fn)


def test_list_forms_with_uneven_sizes() -> None:
    def fn(comm: Communicator) -> None:
        rank, world_size = comm.rank, comm.world_size
        mine = torch.full((rank * 3,), float(rank))
        outputs = [torch.empty(r * 3) for r in range(world_size)]
        comm.all_gather_list(mine, outputs)
        assert [x.tolist() for x in outputs] == [[float(r)] * (3 * r) for r in range(world_size)]

        inputs = [torch.full((r + 1, 2), float(r)) for r in range(world_size)]
        out = torch.empty(rank + 1, 2)
        assert comm.reduce_scatter_list(inputs, out) is out
        assert bool((out == 4 * rank).all())

        sent = [torch.full((p + rank,), rank) for p in range(world_size)]
        received = [torch.empty(p + rank, dtype=torch.int64) for p in range(world_size)]
        comm.all_to_all_list(sent, received)
        assert [x.tolist() for x in received] == [[p] * (p + rank) for p in range(world_size)]

        got = comm.gather_list(mine, [torch.empty(r * 3) for r in range(world_size)] if rank == 2 else None, 2)
        assert (got is None) == (rank != 2)
        if got is not None:
            assert [x.tolist() for x in got] == [[float(r)] * (3 * r) for r in range(world_size)]

        parts = [torch.full((2 * r,), r) for r in range(world_size)] if rank == 1 else None
        assert comm.scatter_list(parts, torch.empty(2 * rank, dtype=torch.int64), 1).tolist() == [rank] * (2 * rank)

    four(fn)


def test_list_forms_with_strided_and_own_arrays() -> None:
    def fn(comm: Communicator) -> None:
        block = torch.zeros(5, 4)
        outputs = list(block.unbind(1))  # four columns
        outputs[comm.rank].fill_(comm.rank)
        comm.all_gather_list(outputs[comm.rank], outputs)
        assert bool((block == torch.arange(4.0)).all())

    four(fn)


@pytest.mark.parametrize("tell", [True, False])
def test_uneven_all_to_all(tell: bool) -> None:
    def fn(comm: Communicator) -> None:
        rank, world_size = comm.rank, comm.world_size
        send_counts = [(rank + p) % 3 for p in range(world_size)]
        recv_counts = [(p + rank) % 3 for p in range(world_size)]
        x = np.full((sum(send_counts), 2), rank)
        got = comm.all_to_all(x, send_counts=send_counts, recv_counts=recv_counts if tell else None)
        assert got[:, 0].tolist() == [p for p in range(world_size) for _ in range(recv_counts[p])]

    four(fn)


# ---- point to point ----------------------------------------------------------------------------------------------


def test_tags_choose_among_messages() -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            works = [comm.isend(torch.tensor([tag]), 1, tag=tag) for tag in (7, 5, 7)]
            for work in works:
                work.wait()
        elif comm.rank == 1:
            got = torch.zeros(1, dtype=torch.int64)
            for tag in (5, 7, 7):
                assert comm.recv(got, 0, tag=tag) == 0
                assert int(got) == tag

    four(fn)


def test_receive_from_anyone_says_who_sent() -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            senders = set()
            for _ in range(3):
                x = torch.zeros(2, dtype=torch.int64)
                work = comm.irecv(x)
                source = work.wait()
                assert x.tolist() == [source, source]
                senders.add(source)
            assert senders == {1, 2, 3}
        else:
            comm.send(torch.full((2,), comm.rank), 0)

    four(fn)


# ---- more communicators ------------------------------------------------------------------------------------------


def test_split_by_color_and_key() -> None:
    def fn(comm: Communicator) -> tuple[int, int] | None:
        part = comm.split(None if comm.rank == 3 else 0, key=-comm.rank)
        if part is None:
            return None
        with part:
            seen = part.all_gather(torch.tensor([comm.rank])).tolist()
            assert seen == [2, 1, 0]
            return part.rank, part.world_size

    assert four(fn) == [(2, 3), (1, 3), (0, 3), None]


def test_subgroup_keeps_the_order_given() -> None:
    def fn(comm: Communicator) -> Any:
        part = comm.subgroup([3, 1])
        if part is None:
            return None
        with part:
            return part.all_gather(torch.tensor([comm.rank])).tolist()

    assert four(fn) == [None, [3, 1], None, [3, 1]]


@pytest.mark.parametrize("own", [[2, 3], [0, 2], []])  # the first as if it were split
def test_a_subgroup_of_other_ranks_is_told_to_all(own: list[int]) -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(errors.MismatchError) as caught:
            comm.subgroup([0, 1] if comm.rank < 2 else own)
        assert f"ranks 0, 1 [0, 1], ranks 2, 3 {own}; " in str(caught.value)
        assert float(comm.all_reduce(torch.ones(1))) == 4  # it stayed as it was

    four(fn)


def test_a_gather_of_parts_of_different_sizes_names_the_call_that_takes_them() -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(errors.MismatchError) as caught:
            comm.all_gather(np.ones(1 + (comm.rank == 3)))
        said = str(caught.value)
        assert "rank 3 gathered 8 x float64" in said
        assert "; all_gather_list gathers parts of different sizes; every rank must" in said

    four(fn)


def test_a_communicator_is_made_of_an_engine() -> None:
    made: Any = Communicator
    with pytest.raises(errors.InvalidArgumentError, match=r"got 1, expected an engine; call ringcomm\.init"):
        made(1)


def test_dup_is_independent() -> None:
    def fn(comm: Communicator) -> None:
        with comm.dup() as other:
            work = other.all_reduce(torch.ones(3), async_op=True)
            assert comm.all_reduce(torch.ones(3)).tolist() == [4.0] * 3
            assert work.wait().tolist() == [4.0] * 3
            assert (other.rank, other.world_size) == (comm.rank, comm.world_size)
        assert float(comm.all_reduce(torch.ones(1))) == 4

    four(fn)


def test_time_limits_are_rounded_up() -> None:
    for seconds, expected in ((1e-9, 1), (0.001, 1), (0.0011, 2), (0.029, 29), (1.001, 1001), (2, 2000)):
        assert milliseconds(seconds, "wait", 0) == expected
    assert milliseconds(timedelta(microseconds=1_000_001), "wait", 0) == 1001
    assert whole_milliseconds(timedelta(0)) == 1


def test_a_wait_takes_seconds_or_a_timedelta() -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank:
            comm.recv(torch.ones(1), 0)
        work = comm.all_reduce(torch.ones(1), async_op=True)
        if not comm.rank:
            with pytest.raises(errors.CollectiveTimeoutError, match="still in flight"):
                work.wait(timedelta(seconds=0.01))
            for wrong in ("soon", 0, -1.0, float("nan"), float("inf"), 1e18, timedelta.max):
                with pytest.raises(errors.InvalidArgumentError, match=r"wait: rank 0 got timeout .* below 1e9"):
                    work.wait(wrong)
            comm.send(torch.ones(1), 1)
        assert float(work.wait(timedelta(seconds=20))) == 2

    ringcomm.run_ranks(fn, 2, timeout=20)


# ---- life --------------------------------------------------------------------------------------------------------


def test_a_world_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with ringcomm.init(timeout=timedelta(seconds=5)) as comm:
        assert (comm.rank, comm.world_size, comm.engine, comm.timeout) == (0, 1, "cpu", 5.0)
        assert comm.all_reduce(torch.tensor([2.0, 4.0]), "avg").tolist() == [2.0, 4.0]
        assert comm.all_gather(torch.ones(2, 3)).shape == (2, 3)
        comm.timeout = 7
        assert comm.timeout == 7.0
        assert comm.describe()["world_size"] == "1"
        assert "rank 0 of 1" in repr(comm)
    assert comm.closed
    assert "closed" in repr(comm)
    comm.close()


def init_over_a_store(comm: Communicator, folder: str, port: int) -> float:
    """Processes that find each other again through every kind of store."""
    total = 0.0
    for timeout in (20.0, 21.0):
        store = dist.FileStore(os.path.join(folder, "store"), comm.world_size)
        with ringcomm.init(comm.rank, comm.world_size, store=store, timeout=timeout) as other:
            assert other.timeout == timeout
            total += float(other.all_reduce(torch.ones(1)))
    for method in (f"file://{folder}/method", f"tcp://localhost:{port}"):
        with ringcomm.init(comm.rank, comm.world_size, init_method=method, timeout=20) as other:
            total += float(other.all_reduce(torch.ones(1)))
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=comm.rank, world_size=comm.world_size)
    with ringcomm.init(timeout=20) as other:
        total += float(other.all_reduce(torch.ones(1)))
    dist.destroy_process_group()
    return total


def test_init_through_stores(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert ringcomm.run_ranks(init_over_a_store, 2, str(tmp_path), port, ranks="processes", timeout=30) == [10.0, 10.0]


def over_a_process_group(comm: Communicator, folder: str) -> list[str]:
    """Every method gives over Gloo what it gives over our own engine."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=comm.rank, world_size=comm.world_size)
    wrong = []
    with Communicator.from_process_group() as peer:
        assert isinstance(peer, Communicator)
        for name, call in every_method(comm.rank, comm.world_size).items():
            ours, theirs = call(comm), call(peer)
            if repr(ours) != repr(theirs):
                wrong.append(f"{name}: {ours} over our engine, {theirs} over gloo")
        part = peer.split(comm.rank % 2)
        assert part is not None
        assert part.world_size == len(range(comm.rank % 2, comm.world_size, 2))
        assert float(part.all_reduce(torch.ones(1))) == part.world_size
        assert (peer.engine, peer.lends_memory) == ("torch.distributed:gloo", False)
        assert "cpu" in peer.device.split(",")
        assert (comm.engine, comm.lends_memory) == ("cpu", True)
        named = peer.subgroup(range(comm.world_size))
        assert named is not None
        assert named.exchange(b"x" * comm.rank) == [b"x" * r for r in range(comm.world_size)]
        for call in (lambda: peer.shrink(), lambda: peer.hosts):
            with pytest.raises(errors.UnsupportedError, match="engine of its own, got torch"):
                call()
        with pytest.raises(errors.InvalidArgumentError, match="like='jax'; pass 'torch' or 'numpy' or 'cupy'"):
            peer.empty(1, like="jax")
    with pytest.raises(errors.ClosedError):
        peer.barrier()
    dist.destroy_process_group()
    return wrong


def every_method(rank: int, world_size: int) -> dict[str, Any]:
    def x() -> torch.Tensor:
        return torch.arange(6.0) + rank

    def ints() -> torch.Tensor:
        return torch.arange(6) + rank

    def p2p(comm: Communicator) -> Any:
        got = x()
        if rank == 0:
            comm.send(x(), 1, tag=3)
        elif rank == 1:
            return comm.recv(got, 0, tag=3), got
        return None

    def rows() -> torch.Tensor:
        return torch.full((sum(range(world_size)), 2), rank)

    return {
        "all_reduce": lambda c: c.all_reduce(x()),
        "all_reduce avg": lambda c: c.all_reduce(x(), "avg"),
        "all_reduce int avg": lambda c: c.all_reduce(ints(), "avg"),
        "all_reduce premul": lambda c: c.all_reduce(x(), "premul_sum", factor=rank + 0.5),
        "all_reduce max out": lambda c: c.all_reduce(x(), "max", out=x()),
        "all_reduce numpy": lambda c: c.all_reduce(x().numpy(), "prod"),
        "all_reduce strided": lambda c: c.all_reduce(x().view(2, 3).t()),
        "all_reduce async": lambda c: c.all_reduce(x(), async_op=True).wait(),
        "reduce": lambda c: c.reduce(x(), 1),
        "reduce avg": lambda c: c.reduce(x(), 0, "avg"),
        "reduce_scatter": lambda c: c.reduce_scatter(x().repeat(world_size), "avg"),
        "reduce_scatter_list": lambda c: c.reduce_scatter_list(
            [torch.ones(r + 1) for r in range(world_size)], torch.empty(rank + 1)
        ),
        "all_gather": lambda c: c.all_gather(x()),
        "all_gather_list": lambda c: c.all_gather_list(
            torch.full((rank + 1,), 1.0), [torch.empty(r + 1) for r in range(world_size)]
        ),
        "all_gather_list of unknown shapes": lambda c: c.all_gather_list(rows()[: rank + 1]),
        "scan": lambda c: c.scan(ints()),
        "scan halves": lambda c: c.scan((x() / 3).half()),
        "scan numpy strided": lambda c: c.scan(x().view(2, 3).numpy().T, "prod"),
        "exscan": lambda c: c.exscan(x(), "min"),
        "exscan out": lambda c: c.exscan(ints(), "bxor", out=ints()),
        "all_gather_object": lambda c: c.all_gather_object({"rank": rank}),
        "broadcast_object": lambda c: c.broadcast_object({"rank": rank}, 1),
        "gather_object": lambda c: c.gather_object("x" * rank, 1),
        "scatter_object": lambda c: c.scatter_object(list(range(world_size)) if rank == 1 else None, 1),
        "broadcast": lambda c: c.broadcast(x(), 1),
        "gather": lambda c: c.gather(x(), 1),
        "gather_list": lambda c: c.gather_list(
            torch.ones(rank + 1), [torch.empty(r + 1) for r in range(world_size)] if rank == 1 else None, 1
        ),
        "scatter": lambda c: c.scatter(x().repeat(world_size) if rank == 1 else None, 1, out=x()),
        "scatter_list": lambda c: c.scatter_list(
            [torch.ones(r + 1) for r in range(world_size)] if rank == 0 else None, torch.empty(rank + 1)
        ),
        "all_to_all": lambda c: c.all_to_all(x().repeat(world_size)),
        "all_to_all uneven": lambda c: c.all_to_all(rows(), send_counts=list(range(world_size))),
        "send/recv": p2p,
        "barrier": lambda c: c.barrier(),
        "coalesced": lambda c: c.all_reduce_coalesced([x(), ints()]),
        "empty": lambda c: c.all_reduce(c.empty((2, 2)).fill_(1)),
        "pack": lambda c: c.pack([x(), x().view(2, 3).t()], torch.zeros(13, dtype=torch.bfloat16), 1 / 3),
        "unpack": lambda c: c.unpack(x().double(), [torch.zeros(2, 2), torch.zeros(2)], 0.1),
    }


def test_the_same_methods_over_a_process_group(tmp_path: Path) -> None:
    assert ringcomm.run_ranks(over_a_process_group, 3, str(tmp_path), ranks="processes", timeout=30) == [[]] * 3


# ---- what a call must not do silently ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("hosts", [None, [1, 1]])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("count", [2, 300_000])
def test_a_message_of_another_dtype_is_refused(count: int, early: bool, hosts: list[int] | None, ranks: str) -> None:
    ringcomm.run_ranks(_other_dtype, 2, count, early, ranks=ranks, hosts=hosts, timeout=30)


def _other_dtype(comm: Communicator, count: int, early: bool) -> None:
    """``early``: the message has arrived before its receive."""
    if comm.rank == 0:
        works = [comm.isend(torch.ones(count), 1, 1), comm.isend(torch.full((3,), 7.0), 1, 2)]
        for work in works:
            work.wait()
        return
    x, y = torch.zeros(count, dtype=torch.int32), torch.zeros(3)
    if early:
        comm.recv(y, 0, 2)
    with pytest.raises(errors.MismatchError, match=f"{4 * count} bytes of int32 .*{4 * count} bytes of float32"):
        comm.recv(x, 0, 1)
    assert not x.any()
    if not early:
        comm.recv(y, 0, 2)  # the communicator stays usable
    assert y.tolist() == [7.0] * 3


def test_two_outputs_that_share_memory_are_refused() -> None:
    def fn(comm: Communicator) -> None:
        x, other = torch.ones(4), torch.ones(4)
        mine = torch.ones(2)
        for outputs in ([x[:2], x[:2]], [x[:2], x[1:3]], [x[::2], x[:2]], [x[:3:2], x[2:]]):
            for call in (
                lambda: comm.all_gather_list(mine, outputs),  # noqa: B023
                lambda: comm.all_to_all_list([mine, mine], outputs),  # noqa: B023
                lambda: comm.gather_list(mine, outputs, comm.rank),  # noqa: B023
                lambda: comm.all_reduce_coalesced([other, *outputs]),  # noqa: B023
            ):
                with pytest.raises(errors.InvalidArgumentError, match="two outputs that share memory"):
                    call()
        both = np.zeros((2, 2), np.float32)
        comm.all_gather_list(np.full(2, comm.rank, np.float32), [both[:, 0], both[:, 1]])  # columns share no element
        assert both.tolist() == [[0, 1], [0, 1]]
        pairs = np.zeros(3, [("a", "f4"), ("b", "f4")])
        comm.all_gather_list(np.full(3, 1 + comm.rank, np.float32), [pairs["a"], pairs["b"]])
        assert pairs.tolist() == [(1, 2)] * 3
        assert bool((x == 1).all())

    ringcomm.run_ranks(fn, 2, timeout=30)


class _Index:
    """A whole number of another library."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.array, torch.tensor, _Index])
def test_whole_numbers_of_any_library(whole: Any) -> None:
    def fn(comm: Communicator) -> None:
        rank, x = comm.rank, torch.full((2,), float(comm.rank))
        assert comm.broadcast(x.clone(), whole(1)).tolist() == [1, 1]
        assert (comm.reduce(x.clone(), whole(1)) is None) == (rank == 0)
        assert (comm.gather(x, whole(1)) is None) == (rank == 0)
        assert comm.scatter(torch.arange(2.0) if rank == 1 else None, whole(1), out=torch.zeros(1)).tolist() == [rank]
        assert (comm.gather_list(x, [x.clone(), x.clone()] if rank else None, whole(1)) is None) == (rank == 0)
        comm.scatter_list([x, x] if rank else None, x.clone(), whole(1))
        if rank == 0:
            comm.send(x, whole(1), whole(5))
        else:
            assert comm.recv(x.clone(), whole(0), whole(5)) == 0
        out = comm.all_to_all(torch.arange(3.0), send_counts=[whole(1), whole(2)])
        assert out.tolist() == ([0, 0] if rank == 0 else [1, 2, 1, 2])
        part = comm.split(whole(3), whole(2 - rank))
        assert part is not None
        assert part.rank == 1 - rank
        assert comm.subgroup([whole(1), whole(0)]) is not None
        assert comm.empty(whole(3)).numel() == comm.empty((whole(3),)).numel() == 3
        for wrong in (True, np.bool_(True), torch.tensor(True), 1.0, np.float64(1), "1"):
            with pytest.raises(errors.InvalidArgumentError, match="root"):
                comm.broadcast(x, wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match=r"got root=7, expected 0 to 1"):
            comm.broadcast(x, np.int64(7))  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match=r"got root=0\.5, expected 0 to 1"):
            comm.broadcast(x, np.float32(0.5))  # type: ignore[arg-type]

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_lists_of_whole_numbers_may_be_numpy_arrays() -> None:
    def fn(comm: Communicator) -> None:
        out = comm.all_to_all(torch.arange(3.0), send_counts=np.array([1, 2]), recv_counts=np.full(2, 1 + comm.rank))
        assert out.tolist() == ([0, 0] if comm.rank == 0 else [1, 2, 1, 2])
        pair = comm.subgroup(np.array([1, 0]))
        assert pair is not None
        assert pair.rank == 1 - comm.rank
        assert comm.empty(np.array([2, 3])).shape == (2, 3)
        for wrong in (np.array([1.0, 2.0]), np.array([True, True]), np.array([[1, 2]]), np.array([1, 1, 1])):
            with pytest.raises(errors.ShapeError, match=r"send_counts=.* array of shape .*, expected 2 whole numbers"):
                comm.all_to_all(torch.arange(3.0), send_counts=wrong)

    ringcomm.run_ranks(fn, 2, timeout=30)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64, np.uint8])
def test_numbers_of_numpy(number: Any) -> None:
    def fn(comm: Communicator) -> None:
        x = torch.ones(2)
        assert comm.all_reduce(x.clone(), "premul_sum", factor=number(3)).tolist() == [6, 6]
        assert comm.pack([x], torch.zeros(2), number(3)).tolist() == [3, 3]
        comm.barrier(timeout=number(20))
        assert comm.all_reduce(x, async_op=True).wait(number(20)).tolist() == [2, 2]
        comm.timeout = number(40)
        assert comm.timeout == 40
        for wrong in (True, np.bool_(True), "1", np.float64("nan")):
            with pytest.raises(errors.InvalidArgumentError, match="timeout"):
                comm.barrier(timeout=wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match="got factor=True, expected a number"):
            comm.all_reduce(x, "premul_sum", factor=np.bool_(True))  # type: ignore[arg-type]

    ringcomm.run_ranks(fn, 2, timeout=number(30))


def test_a_device_number_may_be_numpys() -> None:
    assert devices.parse(np.int64(1), "init") == devices.parse(1, "init") == ("cuda", 1)
    with pytest.raises(errors.InvalidArgumentError, match="got device=True"):
        devices.parse(True, "init")


# ---- a send and a receive at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("count", [0, 1, 3_000_000])
def test_sendrecv_round_a_ring(count: int, ranks: str) -> None:
    ringcomm.run_ranks(_round_a_ring, 3, count, ranks=ranks, timeout=60)


def test_sendrecv_between_hosts() -> None:
    ringcomm.run_ranks(_round_a_ring, 3, 300_000, hosts=[2, 1], timeout=60)


def test_sendrecv_from_any_rank_of_several_hosts_is_refused_before_anything_is_sent() -> None:
    def fn(comm: Communicator) -> None:
        x, other = torch.zeros(2_000_000), 1 - comm.rank
        for async_op in (False, True):
            with pytest.raises(errors.UnsupportedError, match=r"sendrecv: rank \d got src=None"):
                comm.sendrecv(torch.ones(2_000_000), other, x, async_op=async_op)
        assert x._version == 0
        assert comm.sendrecv(torch.full((2_000_000,), 1.0 + comm.rank), other, x, other) == other
        assert bool((x == 1.0 + other).all())

    ringcomm.run_ranks(fn, 2, hosts=[1, 1], timeout=60)


def _round_a_ring(comm: Communicator, count: int) -> None:
    following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    sent = torch.full((count,), comm.rank + 1.0)
    for source in (previous, None) if len(comm.hosts) == 1 else (previous,):
        x = torch.zeros(count)
        assert comm.sendrecv(sent, following, x, source, 4) == previous
        assert bool((x == previous + 1).all())
    group = comm.sendrecv(sent, following, x.zero_(), previous, 5, async_op=True)
    assert group.wait() == [None, previous]
    assert bool((x == previous + 1).all())
    with comm.coalesce() as block:
        comm.sendrecv(sent, following, x.zero_(), previous)
    assert block.wait() == [None, previous]
    both = sent.clone()
    comm.sendrecv(both, following, both, previous, timeout=30)  # what is sent is what it was before
    assert bool((both == previous + 1).all())
    wide = torch.zeros(count, 2)
    wide[:, 0] = comm.rank + 1
    comm.sendrecv(wide[:, 0], following, wide[:, 1], previous)
    assert bool((wide[:, 1] == previous + 1).all())
    numbers = np.zeros(count, np.int64)  # of another type
    if comm.rank == 0:
        comm.sendrecv(sent, following, numbers, previous, 6, recv_tag=7)
        assert bool((numbers == 9).all())
    elif comm.rank == 1:
        comm.recv(x, previous, 6)
        assert bool((x == 1).all())
    else:
        comm.send(np.full(count, 9), following, 7)


def test_sendrecv_over_a_process_group(tmp_path: Path) -> None:
    from tests.support import torch_ranks

    torch_ranks.run(_over_gloo, world_size=3, backend="gloo", timeout_s=60)


def _over_gloo() -> None:
    with Communicator.from_process_group() as comm:
        following, previous = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for count in (3, 300_000):
            x = torch.zeros(count)
            assert comm.sendrecv(torch.full((count,), comm.rank + 1.0), following, x, previous, 4) == previous
            assert bool((x == previous + 1).all())
            group = comm.sendrecv(x.clone(), following, x, previous, async_op=True)
            assert group.wait() == [None, previous]
            assert bool((x == (previous - 1) % 3 + 1).all())


def test_an_operator_that_torch_lacks_over_a_process_group() -> None:
    from tests.support import torch_ranks

    torch_ranks.run(_operator_that_torch_lacks, world_size=2, backend="gloo", timeout_s=60)


def _operator_that_torch_lacks() -> None:
    with pytest.MonkeyPatch.context() as patch, Communicator.from_process_group() as comm:
        patch.setattr(process_group, "torch_reduction", lambda op: None)
        with pytest.raises(errors.UnsupportedError, match=r"^all_reduce: rank . got op max over a process group"):
            comm.all_reduce(torch.ones(2), "max")


# ---- done ----------------------------------------------------------------------------------------------------------


def test_a_call_is_done_when_the_callers_array_is_written() -> None:
    def fn(comm: Communicator) -> None:
        for columns in (2, 5):
            x = torch.ones(4, columns)
            view = x.t()[1:]  # not contiguous: the result is written back
            work = comm.all_reduce(view, async_op=True)
            deadline = time.monotonic() + 20
            while not work.done:
                assert time.monotonic() < deadline
                time.sleep(0)
            assert bool((view == 4).all())
            x.zero_()
            assert work.wait() is view
            assert not x.any()  # it is written once
        work = comm.irecv(torch.ones(2), (comm.rank + 1) % 4)
        assert not work.done
        comm.barrier()
        comm.abort("it is done with an error too")
        deadline = time.monotonic() + 20
        while not work.done:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(errors.AbortedError):
            work.wait()

    four(fn)


# ---- prefix reductions, uneven gathers, objects --------------------------------------------------------------------

PREFIXES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def prefixes(comm: Communicator) -> None:
    for op, combine in PREFIXES.items():
        for dtype in ("int64", "uint8", "bool", "float64"):
            if not _C.supports(_C.DTYPES[dtype], _C.REDUCE_OPS[op]):
                continue
            values = [(np.arange(5) % 3 - 1 + rank).astype(dtype) for rank in range(comm.world_size)]
            wanted = list(accumulate(values, combine))
            mine, out = values[comm.rank].copy(), np.zeros(5, dtype)
            assert comm.scan(mine, op) is mine
            np.testing.assert_array_equal(mine, wanted[comm.rank])
            assert comm.exscan(values[comm.rank], op, out=out) is out
            if comm.rank > 0:
                np.testing.assert_array_equal(out, wanted[comm.rank - 1])
            else:  # the identity
                np.testing.assert_array_equal(combine(out, values[0]), values[0])
    for op in set(_C.REDUCE_OPS) - set(PREFIXES):
        with pytest.raises(errors.InvalidArgumentError, match=f"expected one of {', '.join(PREFIXES)};"):
            comm.scan(np.ones(1), op)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_scans(ranks: int) -> None:
    ringcomm.run_ranks(prefixes, ranks, timeout=30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_the_bits_of_a_scan_depend_on_the_ranks_before_alone(dtype: str) -> None:
    def fn(comm: Communicator) -> tuple[bytes, bytes]:
        x = torch.rand(1000, generator=torch.Generator().manual_seed(comm.rank)).to(getattr(torch, dtype))
        after = comm.exscan(x, out=torch.empty_like(x))
        return raw(comm.scan(x)).numpy().tobytes(), raw(after).numpy().tobytes()

    most = ringcomm.run_ranks(fn, 6, timeout=30)
    for world_size in (2, 5, 6):
        assert ringcomm.run_ranks(fn, world_size, timeout=30) == most[:world_size]
    assert [after for _, after in most[1:]] == [upto for upto, _ in most[:-1]]


def test_a_scan_of_halves_rounds_once() -> None:
    def fn(comm: Communicator) -> float:
        return comm.scan(torch.tensor([1.0 if comm.rank == 0 else 2.0**-9], dtype=torch.bfloat16)).item()

    assert ringcomm.run_ranks(fn, 5, timeout=30)[4] == 1 + 2.0**-7  # one of the four terms alone would be lost


@pytest.mark.parametrize("hosts", [None, [1, 1]])
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.scan(torch.ones(3), "max" if c.rank else "sum"), r"scan\(float32, sum\).*scan\(float32, max\)"),
        (lambda c: (c.exscan if c.rank else c.scan)(torch.ones(3)), r"\bscan\(float32, sum\).*exscan\(float32, sum\)"),
        (
            lambda c: c.scan(torch.ones(3, dtype=torch.float16 if c.rank else torch.float32)),
            r"scan\(float32, sum\).*scan\(float16, sum\)",
        ),
        (lambda c: c.scan(torch.ones(3 + c.rank)), r"scan"),
    ],
)
def test_ranks_that_scan_in_different_ways_are_told(
    call: Callable[[Communicator], Any], says: str, hosts: list[int] | None
) -> None:
    def fn(comm: Communicator) -> str:
        with pytest.raises(errors.MismatchError) as raised:
            call(comm)
        return str(raised.value)

    for text in ringcomm.run_ranks(fn, 2, timeout=30, hosts=hosts):
        assert hosts or "all_to_all" not in text
        assert "recv_counts" not in text
        assert "scan" in text
    if hosts is None:
        assert re.search(says, text)


def test_a_scan_of_complex_halves_rounds_once() -> None:
    def fn(comm: Communicator) -> complex:
        return comm.scan(torch.tensor([1 + 2j if comm.rank == 1 else 2.0**-11], dtype=torch.complex32)).item()

    assert ringcomm.run_ranks(fn, 3, timeout=30)[2] == 1 + 2.0**-10 + 2j  # one of the two terms alone would be lost


def test_all_gather_list_learns_the_shapes() -> None:
    def fn(comm: Communicator) -> None:
        mine = torch.full((comm.rank, 2), comm.rank, dtype=torch.bfloat16)
        got = comm.all_gather_list(mine, async_op=comm.rank == 1)
        for rank, x in enumerate(got.wait() if comm.rank == 1 else got):
            assert x.dtype == torch.bfloat16
            assert x.tolist() == [[rank] * 2] * rank
        assert [x.shape for x in comm.all_gather_list(np.ones((2,) * comm.rank))] == [(2,) * r for r in range(3)]
        with pytest.raises(errors.MismatchError, match="rank 0 float32, rank 1 float64, rank 2 float32"):
            comm.all_gather_list(np.ones(1, np.float64 if comm.rank == 1 else np.float32))
        comm.barrier()

    ringcomm.run_ranks(fn, 3, timeout=30)


def test_an_object_that_cannot_be_pickled_is_refused() -> None:
    def fn(comm: Communicator) -> None:
        for call in (comm.all_gather_object, comm.broadcast_object, comm.gather_object):
            with pytest.raises(errors.InvalidArgumentError, match="got function, which cannot be pickled"):
                call(lambda: 3)
        with pytest.raises(errors.InvalidArgumentError, match=r"got xs=\[1, 2\], expected a list of 1 objects"):
            comm.scatter_object([1, 2])
        assert comm.scatter_object([7]) == 7

    ringcomm.run_ranks(fn, 1, timeout=30)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.broadcast_object(c.rank, c.rank), r"rank 0 broadcast_object\(root=0\), rank 1 .*root=1\)"),
        (lambda c: c.gather_object(c.rank, c.rank), r"rank 0 gather_object\(root=0\), rank 1 gather_object\(root=1\)"),
        (lambda c: c.scatter_object([1, 2], c.rank), r"rank 0 scatter_object\(root=0\), rank 1 .*root=1\)"),
        (
            lambda c: c.broadcast_object(1) if c.rank else c.all_gather_object(1),
            r"rank 0 all_gather_object\(\), rank 1 broadcast_object\(root=0\)",
        ),
        (
            lambda c: c.subgroup([0]) if c.rank else c.all_gather_object(1),
            r"rank 0 all_gather_object\(\), rank 1 subgroup\(\)",
        ),
        (lambda c: c.split(0) if c.rank else c.all_gather_object(1), r"split|rank 1 another call"),
    ],
)
def test_ranks_that_exchange_different_objects_are_told(call: Callable[[Communicator], Any], says: str) -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(errors.MismatchError, match=says):
            call(comm)
        assert comm.all_gather_object(comm.rank) == [0, 1]

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_objects_against_plain_bytes() -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank:
            comm.exchange(b"bytes")
        else:
            with pytest.raises(errors.MismatchError, match=r"rank 0 all_gather_object\(\), rank 1 another call"):
                comm.all_gather_object(1)

    ringcomm.run_ranks(fn, 2, timeout=30)


@pytest.mark.parametrize(
    ("method", "ops"),
    [(Communicator.all_reduce, _C.REDUCE_OPS), (Communicator.scan, PREFIXES)],
    ids=["all_reduce", "scan"],
)
def test_a_docstring_names_the_reduce_ops(method: Any, ops: dict[str, Any]) -> None:
    named = re.search(r"\bop: (.*);", method.__doc__)
    assert named is not None
    assert set(named[1].split(", ")) == set(ops)


def test_reduce_ops_of_torch() -> None:
    kinds = torch.distributed.ReduceOp
    assert process_group.torch_reduction("nope") is None

    def fn(comm: Communicator) -> None:
        for name in ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor"):
            kind = kinds.PRODUCT if name == "prod" else getattr(kinds, name.upper())
            assert process_group.torch_reduction(name) == kind
            for op in (kind, kinds(kind)):
                x, y = (torch.tensor([comm.rank + 2, 5]) for _ in range(2))
                comm.all_reduce(x, op)
                assert x.tolist() == comm.all_reduce(y, name).tolist()
        assert comm.all_reduce(torch.ones(1), kinds.PREMUL_SUM, factor=0.25).item() == 0.5
        assert comm.scan(torch.ones(1), kinds.SUM).item() == comm.rank + 1
        with pytest.raises(errors.InvalidArgumentError, match="got op 'avg', expected one of sum, prod"):
            comm.scan(torch.ones(1), kinds.AVG)

    ringcomm.run_ranks(fn, 2, timeout=30)


# ---- several calls in flight ---------------------------------------------------------------------------------------


class _Asked:
    """A call that an engine starts once it is told that somebody waits."""

    done = False
    source = -1

    def start_now(self) -> None:
        self.done = True

    def wait(self, timeout_ms: int = 0) -> None:
        assert self.done


def test_waiting_without_executing_starts_the_calls() -> None:
    def fn(comm: Communicator) -> None:
        def work() -> ringcomm.Work:
            return ringcomm.Work(_Asked(), comm._open, "all_reduce", 7)

        assert ringcomm.wait_any([work(), work()], 20) == 0

        async def both() -> tuple[Any, Any]:
            return await asyncio.wait_for(_awaited(work()), 20), await asyncio.wait_for(_awaited(group), 20)

        group = Group()
        group.works.append(work())
        assert asyncio.run(both()) == (7, [7])
        late = comm.all_reduce(torch.ones(1), async_op=True)
        late.start_now()
        while not late.done:
            time.sleep(0.001)
        late.start_now()

    ringcomm.run_ranks(fn, 1, timeout=30)


async def _awaited(work: Any) -> Any:
    return await work


def test_await_naps_no_shorter_than_asyncio_can(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    sleep = asyncio.sleep

    async def noted(nap: float) -> None:
        naps.append(nap)
        await sleep(nap)

    def fn(comm: Communicator) -> None:
        if comm.rank:
            time.sleep(0.05)
            comm.send(torch.ones(1), 0)
        else:
            asyncio.run(_awaited(comm.irecv(torch.zeros(1), 1)))

    monkeypatch.setattr(asyncio, "sleep", noted)
    ringcomm.run_ranks(fn, 2, timeout=30)
    assert naps
    assert all(nap == 0 or nap >= 1e-3 for nap in naps)


def _wakings() -> int:
    """Returns how often the other threads of this process have begun to wait."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != threading.get_native_id()]
    texts = [task.joinpath("status").read_text() for task in tasks]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))


def _rare_small_calls(comm: Communicator) -> int:
    comm.all_reduce(torch.ones(1), async_op=True).wait()
    before = _wakings()
    for _ in range(40):
        time.sleep(0.004)
        comm.all_reduce(torch.ones(1), async_op=True).wait()
    return _wakings() - before


def test_rare_small_calls_wake_the_progress_thread_a_few_times_each() -> None:
    # In a process of its own: it counts what all threads of the process do.
    assert ringcomm.run_ranks(_rare_small_calls, 1, ranks="processes", timeout=30)[0] < 40 * 4


def test_wait_all_and_wait_any() -> None:
    def fn(comm: Communicator) -> None:
        xs = [torch.full((3,), float(i)) for i in range(4)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        assert all(mine is x for mine, x in zip(ringcomm.wait_all(works, 20), xs, strict=True))
        assert [x[0].item() for x in xs] == [0, 2, 4, 6]
        assert ringcomm.wait_all([]) == []
        into = torch.zeros(1)
        if comm.rank == 0:
            works = [comm.irecv(torch.zeros(1), 1, 5), comm.irecv(into, 1, 6)]
            with pytest.raises(errors.CollectiveTimeoutError, match=r"wait_any: waited 0\.05 s for one of 2 calls"):
                ringcomm.wait_any(works, 0.05)
            comm.barrier()
            assert ringcomm.wait_any(works, 20) == 1
            assert works.pop(1).wait() == 1
            assert into.item() == 6
            with pytest.raises(errors.CollectiveTimeoutError):
                ringcomm.wait_all(works, 0.05)
            comm.barrier()
            assert works.pop(ringcomm.wait_any(works)).wait() == 1
        else:
            comm.barrier()
            comm.send(torch.full((1,), 6.0), 0, 6)
            comm.barrier()
            comm.send(torch.ones(1), 0, 5)

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_an_awaited_call_lets_other_tasks_run() -> None:
    def fn(comm: Communicator) -> int:
        came = threading.Event()

        async def others() -> int:
            turns = 0
            while not came.is_set():
                turns += 1
                await asyncio.sleep(0.001)
            return turns

        async def main() -> int:
            running = asyncio.create_task(others())
            x = torch.ones(2)
            assert await comm.all_reduce(x, async_op=True) is x
            assert x.tolist() == [2, 2]
            with comm.coalesce() as group:
                comm.all_reduce(x)
            assert await group == [x]
            came.set()
            return await running

        if comm.rank == 0:
            return asyncio.run(main())
        late.wait(20)  # rank 0 has other tasks that run while it awaits this rank
        comm.all_reduce(torch.ones(2))
        comm.all_reduce(torch.ones(2))
        return 0

    late = threading.Event()
    threading.Timer(0.3, late.set).start()
    assert ringcomm.run_ranks(fn, 2, timeout=30)[0] > 3


def test_a_buffer_in_flight_cannot_be_resized() -> None:
    def fn(comm: Communicator) -> None:
        buffer = bytearray(8)
        work = comm.all_reduce(buffer, async_op=True)
        if comm.rank == 0:
            with pytest.raises(BufferError):
                buffer.extend(b"more")
            comm.barrier()
            work.wait()
        else:
            comm.barrier()
            work.wait()

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_a_small_call_in_flight_does_not_wait_for_its_caller() -> None:
    """The peer gets its result although this rank never waits."""

    def fn(comm: Communicator) -> None:
        x = np.ones(1)
        if comm.rank == 0:
            work = comm.all_reduce(x, async_op=True)
            assert done.wait(20)
            work.wait()
        else:
            comm.all_reduce(x)
            done.set()
        assert x[0] == 2

    for _ in range(20):
        done = threading.Event()
        ringcomm.run_ranks(fn, 2, timeout=30)
