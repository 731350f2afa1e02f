"""Coalesced calls, messages between two ranks, objects and barriers of torch.distributed over ringcomm, on 3 ranks."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcomm.errors import InvalidArgumentError, MismatchError, ShapeError, UnsupportedError
from tests.support import forked, torch_ranks
from tests.support.torch_checks import all_reduce_works, backend_of, combined, expect, laid_out, raised, values

pytestmark = pytest.mark.timeout(180)
run = torch_ranks.run


# -- groups of calls -------------------------------------------------------------------------------------------------


def _coalesced() -> None:
    rank = dist.get_rank()
    sizes = [1, 33, 4096]
    for async_ops in (False, True):
        xs = [values(rank, size) for size in sizes]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        for x, size in zip(xs, sizes, strict=True):
            expect(x, combined([values(peer, size) for peer in range(3)], "sum"))
        outs = [torch.zeros(3 * size) for size in sizes]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for out, size in zip(outs, sizes, strict=True):
                dist.all_gather_into_tensor(out, values(rank, size))
        manager.wait()
        for out, size in zip(outs, sizes, strict=True):
            expect(out, torch.cat([values(peer, size) for peer in range(3)]))
        outs = [torch.zeros(size) for size in sizes]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for out, size in zip(outs, sizes, strict=True):
                dist.reduce_scatter_tensor(out, values(rank, 3 * size))
        manager.wait()
        for out, size in zip(outs, sizes, strict=True):
            total = combined([values(peer, 3 * size) for peer in range(3)], "sum")
            expect(out, total[rank * size : (rank + 1) * size])


def test_coalescing_manager() -> None:
    run(_coalesced)


def _coalesced_on_device() -> None:
    rank = dist.get_rank()
    for async_ops in (False, True):
        xs = [values(rank, 50) for _ in range(4)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
            for root, x in enumerate(xs[:3]):
                dist.broadcast(x, root)
        manager.wait()
        for root in range(3):
            expect(xs[root], values(root, 50))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
            dist.all_reduce(xs[3])
        manager.wait()
        expect(xs[3], combined([values(peer, 50) for peer in range(3)], "sum"))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        pass
    assert [work for work in manager.works if work is not None] == []


def test_coalescing_manager_on_a_device() -> None:
    run(_coalesced_on_device)


def _beside_a_batch() -> None:
    """Torch's batch of messages in one thread, synchronous calls of the same group in another one."""
    rank, calls = dist.get_rank(), 100
    wrong: list[Any] = []

    def exchange() -> None:
        for step in range(calls):
            received = torch.full((1000,), -1.0)
            sent = dist.P2POp(dist.isend, torch.full((1000,), float(step)), (rank + 1) % 3)
            for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, (rank - 1) % 3)]):
                work.wait()
            wrong.extend(each for each in received.unique().tolist() if each != step)

    with ThreadPoolExecutor(1) as pool:
        exchanged = pool.submit(exchange)
        for step in range(calls):
            x = torch.full((100_000,), float(step) if rank == 0 else -1.0)
            dist.broadcast(x, 0)
            wrong.extend(each for each in x.unique().tolist() if each != step)
            x.fill_(rank)
            dist.all_reduce(x)
            wrong.extend(each for each in x.unique().tolist() if each != 3)
            work = dist.broadcast(x, 0, async_op=True)
            assert work is not None
            work.wait()
        exchanged.result()
    assert not wrong


def test_calls_beside_a_batch_of_another_thread() -> None:
    run(_beside_a_batch)


def _in_two_threads() -> None:
    """The backend's own batches, without torch's bookkeeping: a batch of one thread has only that thread's calls."""
    rank, backend = dist.get_rank(), backend_of()
    begun, made = threading.Event(), threading.Event()
    x = torch.full((100_000,), float(rank))

    def batch() -> None:
        backend._start_coalescing()
        begun.set()
        assert made.wait(60)
        assert backend._end_coalescing() is None

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(batch)
        assert begun.wait(60)
        dist.broadcast(x, 1)
        expect(x, torch.ones(100_000))
        made.set()
        ended.result()


def test_a_batch_belongs_to_a_thread() -> None:
    run(_in_two_threads)


def _refused_in_a_batch() -> None:
    """Torch does not end a batch in which a call raises."""
    rank = dist.get_rank()

    def batch() -> None:
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
            dist.broadcast(torch.ones(3), 0)
            dist.all_to_all_single(torch.ones(3), torch.ones(5))

    with pytest.raises(ShapeError):
        batch()
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    x = torch.full((1 << 20,), float(rank))
    dist.broadcast(x, 1)
    expect(x, torch.ones(1 << 20))
    dist.all_reduce(x)
    expect(x, torch.full((1 << 20,), 3.0))
    with pytest.raises(RuntimeError, match="SparseCPU"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x.to_sparse(), (rank + 1) % 3)])
    dist.all_reduce(x)
    expect(x, torch.full((1 << 20,), 9.0))


def test_a_refused_call_ends_the_batch() -> None:
    run(_refused_in_a_batch)


# -- futures ---------------------------------------------------------------------------------------------------------


def _many_futures() -> None:
    """Callbacks that wait for the GIL do not start a thread each."""
    xs = [torch.ones(3) for _ in range(400)]
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the others have started all their calls, which then end at once
    futures = [dist.all_reduce(x, async_op=True).get_future().then(lambda each: each.value()[0][0]) for x in xs]
    3**1_000_000 % 1_000_003  # keeps the GIL
    threads = len(os.listdir("/proc/self/task"))
    assert {each.item() for each in torch.futures.wait_all(futures)} == {3.0}
    assert threads < 60


def test_many_futures_start_few_threads() -> None:
    run(_many_futures)


def _future_in_parent_and_child(path: str, rank: int) -> None:
    for name in ("parent", "child"):
        dist.init_process_group("ringcomm", init_method=f"file://{path}/{name}", rank=rank, world_size=2)
        x = torch.ones(3)
        if rank == 0:
            time.sleep(0.2)  # the other rank's future is not complete yet
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda each: each.value()[0] * 10)
        assert future.wait().tolist() == [20.0] * 3
        dist.destroy_process_group()
        if name == "parent" and (child := os.fork()):
            assert os.waitpid(child, 0)[1] == 0
            return
        faulthandler.dump_traceback_later(60, exit=True)
    os._exit(0)


def test_futures_in_a_forked_child(tmp_path: Path) -> None:
    ranks = [forked.context().Process(target=_future_in_parent_and_child, args=(str(tmp_path), r)) for r in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    assert [each.exitcode for each in ranks] == [0, 0]


def _coalesced_lists() -> None:
    rank = dist.get_rank()
    group = dist.group.WORLD
    xs = [values(rank, 10), values(rank, 1000, torch.float64)]
    group.allreduce_coalesced(xs).wait()
    expect(xs[0], combined([values(peer, 10) for peer in range(3)], "sum"))
    expect(xs[1], combined([values(peer, 1000, torch.float64) for peer in range(3)], "sum"))
    outputs = [[torch.zeros(10), torch.zeros(20)] for _ in range(3)]
    group.allgather_coalesced(outputs, [values(rank, 10), values(rank, 20)]).wait()
    for peer in range(3):
        expect(outputs[peer][0], values(peer, 10))
        expect(outputs[peer][1], values(peer, 20))


def test_coalesced_lists() -> None:
    run(_coalesced_lists)


# -- between two ranks -----------------------------------------------------------------------------------------------


def _send_and_receive() -> None:
    rank = dist.get_rank()
    for count in (0, 1, 1000, 1 << 20):
        if rank == 0:
            dist.send(values(0, count), 1)
            dist.send(values(5, count), 2, tag=3)
        elif rank == 1:
            x = torch.zeros(count)
            assert dist.recv(x, 0) == 0
            expect(x, values(0, count))
        else:
            x = laid_out(torch.zeros(count), "strided")
            assert dist.recv(x, tag=3) == 0  # from any source
            expect(x, values(5, count))


def test_send_and_recv() -> None:
    run(_send_and_receive)


def _tags_and_order() -> None:
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(values(tag, 10), 1, tag=tag) for tag in (7, 8, 7)]
        for work in works:
            work.wait()
    elif rank == 1:
        first, second, other = torch.zeros(10), torch.zeros(10), torch.zeros(10)
        dist.recv(other, 0, tag=8)
        dist.recv(first, 0, tag=7)
        dist.recv(second, 0, tag=7)
        expect(other, values(8, 10))
        expect(first, values(7, 10))
        expect(second, values(7, 10))
    x = torch.zeros(3)
    receive = dist.irecv(x, rank)  # a message to oneself
    dist.isend(values(rank, 3), rank).wait()
    receive.wait()
    expect(x, values(rank, 3))
    assert receive.is_completed()
    assert receive.is_success()


def test_tags_order_and_messages_to_oneself() -> None:
    run(_tags_and_order)


def _ring_exchange(count: int) -> None:
    rank = dist.get_rank()
    received = torch.zeros(count)
    operations = [
        dist.P2POp(dist.irecv, received, (rank - 1) % 3),
        dist.P2POp(dist.isend, values(rank, count), (rank + 1) % 3),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(received, values((rank - 1) % 3, count))
    received = torch.zeros(count)
    works = [dist.irecv(received, (rank - 1) % 3), dist.isend(values(rank, count), (rank + 1) % 3)]
    dist.all_reduce(torch.ones(4))  # a collective passes waiting messages
    for work in works:
        work.wait()
    expect(received, values((rank - 1) % 3, count))


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_batch_isend_irecv(count: int) -> None:
    run(_ring_exchange, count)


# -- objects, barriers -----------------------------------------------------------------------------------------------


def _objects() -> None:
    rank = dist.get_rank()
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": peer, "text": "x" * peer} for peer in range(3)]
    shared = [("from", 1), [1, 2]] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [("from", 1), [1, 2]]
    out = [None]
    dist.scatter_object_list(out, ["a", {"b": 1}, 3.0] if rank == 0 else None, src=0)
    assert out[0] == ["a", {"b": 1}, 3.0][rank]
    collected = [None] * 3 if rank == 2 else None
    dist.gather_object(rank * 10, collected, dst=2)
    assert rank != 2 or collected == [0, 10, 20]
    if rank == 0:
        dist.send_object_list(["hello", 1], dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello", 1]


def test_object_collectives() -> None:
    run(_objects)


def _barriers() -> None:
    from datetime import timedelta

    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.barrier(device_ids=[0])
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=20)
    dist.group.WORLD.barrier(options).wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    with pytest.raises(ValueError, match="only implemented for GLOO backend"):  # torch's function compares the name
        dist.monitored_barrier()


def test_barriers() -> None:
    run(_barriers)


def _monitored_barrier_names_absentees() -> str:
    import time
    from datetime import timedelta

    try:
        if dist.get_rank() == 1:
            time.sleep(1.5)
        dist.group.WORLD.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the barrier let everyone pass")


def test_monitored_barrier_names_absentees() -> None:
    for text in run(_monitored_barrier_names_absentees):
        assert "rank 1 did not come" in text, text


# -- other worlds ----------------------------------------------------------------------------------------------------


def _every_operation() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = range(world_size)
    for count in (0, 1, 1000, 300_000):
        mine, total = values(rank, count), combined([values(peer, count) for peer in ranks], "sum")
        everyone = torch.cat([values(peer, count) for peer in ranks])
        crossed = torch.cat([values(10 * peer + rank, count) for peer in ranks])
        x = mine.clone()
        dist.all_reduce(x)
        expect(x, total)
        x = mine.clone()
        dist.reduce(x, world_size - 1)
        expect(x, total if rank == world_size - 1 else x)
        x = mine.clone()
        dist.broadcast(x, world_size - 1)
        expect(x, values(world_size - 1, count))
        x = torch.zeros(count * world_size)
        dist.all_gather_into_tensor(x, mine)
        expect(x, everyone)
        parts = [torch.zeros(count) for _ in ranks] if rank == 0 else None
        dist.gather(mine, parts, 0)
        expect(torch.cat(parts) if parts else everyone, everyone)
        x = torch.zeros(count)
        dist.scatter(x, [values(peer, count) for peer in ranks] if rank == 0 else None, 0)
        expect(x, mine)
        x = torch.zeros(count)
        dist.reduce_scatter_tensor(x, torch.cat([values(rank + peer, count) for peer in ranks]))
        expect(x, combined([values(rank + peer, count) for peer in ranks], "sum"))
        for rows in (None, [count] * world_size):
            x = torch.zeros(count * world_size)
            dist.all_to_all_single(x, torch.cat([values(10 * rank + peer, count) for peer in ranks]), rows, rows)
            expect(x, crossed)
        x = torch.zeros(count)
        receive = dist.irecv(x, (rank - 1) % world_size)
        dist.isend(mine, (rank + 1) % world_size).wait()
        receive.wait()
        expect(x, values((rank - 1) % world_size, count))
    dist.barrier()
    dist.group.WORLD.monitored_barrier()


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_operation(world_size: int) -> None:
    run(_every_operation, world_size=world_size)


def _callback_of_a_wrong_length() -> None:
    rank, told = dist.get_rank(), []
    if rank == 1:
        time.sleep(0.3)  # another thread tells of it
        dist.send(torch.ones(3), 0)
        x = torch.zeros(5)
        dist.recv(x, 0)
        assert x.tolist() == [7.0] * 5
    elif rank == 0:
        work = dist.irecv(torch.empty(4), 1)

        def hears(future: torch.futures.Future[Any]) -> None:
            told.append(raised(MismatchError, future.value))
            dist.send(torch.full((5,), 7.0), 1)

        work.get_future().then(hears).wait()
        assert "sent 12" in told[0]
    all_reduce_works()


def test_a_callback_that_gets_a_length_mismatch_may_make_calls() -> None:
    run(_callback_of_a_wrong_length)


# -- sparse tensors --------------------------------------------------------------------------------------------------


def _of_rank(rank: int, entries: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
    """Some indices occur twice, and some on other ranks too."""
    rows = (torch.arange(entries) * 5 + rank * 3) % 11
    shape = (entries, *dense)
    numbers = values(rank, torch.Size(shape).numel(), dtype).reshape(shape)
    return torch.sparse_coo_tensor(torch.stack([rows, rows % 4]), numbers, (11, 4, *dense))


def _sparse() -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for entries in ([0, 0, 0], [0, 30, 7], [5, 5, 5]):
            for dense in ((), (3,)):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                    x = _of_rank(rank, entries[rank], dtype, dense)
                    wanted = x.to_dense()
                    dist.all_reduce(wanted, op)
                    work = dist.all_reduce(x, op, async_op=entries[0] > 0)
                    assert work is None or work.wait()
                    assert x.is_sparse
                    expect(x.to_dense(), wanted, dtype, entries, dense, op)


def test_all_reduce_of_sparse_tensors_equals_that_of_dense_ones() -> None:
    run(_sparse)


def _sparse_embedding() -> None:
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([rank, 5])).sum().backward()
    gradient = model.module.weight.grad
    assert gradient.is_sparse
    wanted = torch.zeros(10, 4)
    wanted[:3], wanted[5] = 1 / 3, 1
    torch.testing.assert_close(gradient.to_dense(), wanted)


def test_data_parallel_with_sparse_gradients() -> None:
    run(_sparse_embedding)


def _sparse_refused() -> None:
    backend, x = backend_of(), torch.eye(3).to_sparse()
    backend._start_coalescing()
    assert "among coalesced calls" in raised(InvalidArgumentError, backend.allreduce, [x])
    backend._end_coalescing()
    assert "to_dense" in raised(InvalidArgumentError, backend.allreduce_coalesced, [x])
    last = dist.get_rank() == 2
    for other in (torch.eye(4).to_sparse(), torch.eye(3).double().to_sparse(), torch.eye(3).to_sparse(1)):
        text = raised(MismatchError, dist.all_reduce, other if last else x)  # on every rank
        assert "rank 0 passed Float of shape [3, 3] with 2 sparse dimensions, rank 2 passed " in text
    deep = torch.sparse_coo_tensor(torch.zeros(65, 1, dtype=torch.int64), torch.ones(1), (1,) * 65)
    assert "rank 2 passed 65; " in raised(UnsupportedError, dist.all_reduce, deep if last else x)
    all_reduce_works()


def test_sparse_tensors_that_fit_no_call_are_refused() -> None:
    run(_sparse_refused)


def _all_to_all_without_dimensions() -> float:
    output = torch.full((), 7.0)
    dist.all_to_all_single(output, torch.ones(()))
    return float(output)


def test_an_all_to_all_of_one_rank_moves_a_tensor_without_dimensions() -> None:
    assert run(_all_to_all_without_dimensions, world_size=1) == [1.0]
