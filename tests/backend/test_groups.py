"""The life of ringcomm process groups under torch.distributed: handles, errors, sub-groups."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringcomm import errors
from tests.support import torch_ranks
from tests.support.choice import choose
from tests.support.torch_checks import all_reduce_works, backend_of, raised

pytestmark = pytest.mark.timeout(180)
run = torch_ranks.run


# -- handles ---------------------------------------------------------------------------------------------------------


def _handles() -> None:
    rank = dist.get_rank()
    x = torch.full((1000,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(timedelta(seconds=20)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0].data_ptr() == x.data_ptr()
    assert work.get_future().wait()[0].data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.full((1000,), 3.0))

    outputs = [torch.zeros(10) for _ in range(3)]
    future = dist.all_gather(outputs, torch.full((10,), float(rank)), async_op=True).get_future()
    doubled = future.then(lambda done: [2 * each for each in done.value()])
    assert [int(each[0]) for each in doubled.wait()] == [0, 2, 4]
    assert dist.barrier(async_op=True).get_future().wait() == []


def test_handles_and_futures() -> None:
    run(_handles)


def _in_flight() -> None:
    rank = dist.get_rank()
    xs = [torch.full((50_000,), float(rank + k)) for k in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    again = torch.ones(10)
    dist.all_reduce(again)  # a synchronous call keeps its place after the asynchronous ones
    for k in reversed(range(20)):
        works[k].wait()
        assert torch.equal(xs[k], torch.full((50_000,), 3.0 + 3 * k))
    assert torch.equal(again, torch.full((10,), 3.0))


def test_many_calls_in_flight() -> None:
    run(_in_flight)


def _nested() -> None:
    """A callback may make calls and wait for them."""

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        x = done.value()[0].clone()
        dist.all_reduce(x)
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    for _ in range(20):
        future = dist.all_reduce(torch.ones(100), async_op=True).get_future()
        assert torch.equal(future.then(again).wait(), torch.full((100,), 27.0))


def test_callbacks_that_communicate() -> None:
    run(_nested)


def _random_mix(seed: int) -> None:
    """Calls of every kind on three groups, some waited for late, some through futures, some never."""
    rank, chance = dist.get_rank(), random.Random(seed)
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    waiting: list[tuple[Any, torch.Tensor, float]] = []
    for step in range(300):
        group, count, async_op = chance.choice(groups), chance.choice([1, 64, 5000, 70_000]), chance.random() < 0.6
        x = (
            torch.full((count, 2), float(rank + step))[:, 0]
            if chance.random() < 0.3
            else torch.ones(count) * (rank + step)
        )
        kind = chance.choice(["all_reduce", "broadcast", "all_gather", "exchange"])
        if kind == "all_reduce":
            work, out, wanted = dist.all_reduce(x, group=group, async_op=async_op), x, 3.0 + 3 * step
        elif kind == "broadcast":
            work, out, wanted = dist.broadcast(x, 1, group, async_op), x, 1.0 + step
        elif kind == "all_gather":
            whole = torch.empty(3, count)
            work = dist.all_gather(list(whole), x, group, async_op)
            out, wanted = whole[2], 2.0 + step
        else:
            out, wanted = torch.empty(count), (rank - 1) % 3 + float(step)
            pair = [(dist.irecv, out, (rank - 1) % 3), (dist.isend, x, (rank + 1) % 3)]
            work = dist.batch_isend_irecv([dist.P2POp(*each, group=group) for each in pair])[0]
        if work is None:
            assert torch.equal(out, torch.full_like(out, wanted)), (step, kind)
        elif chance.random() < 0.9:
            waiting.append((work.get_future() if chance.random() < 0.3 else work, out, wanted))
        while len(waiting) > 8 or (waiting and step == 299):
            handle, out, wanted = waiting.pop(chance.randrange(len(waiting)))
            handle.wait()
            assert torch.equal(out, torch.full_like(out, wanted)), (step, kind)


@pytest.mark.parametrize("seed", range(3))
def test_random_mix(seed: int) -> None:
    run(_random_mix, seed)


def _dropped() -> None:
    """The caller drops the Work and the tensors; their memory must live until the call has ended."""
    for _ in range(8):
        dist.all_reduce(torch.ones(300_000), async_op=True)
        dist.all_reduce(torch.ones(30_000).expand(2, 30_000).t().contiguous().t(), async_op=True)
        gc.collect()
    dist.barrier()
    all_reduce_works()


def test_dropped_handles_keep_their_tensors() -> None:
    run(_dropped)


def _in_flight_at_the_end() -> None:
    """A group is destroyed with calls in flight, whose tensors only it keeps."""
    rank = dist.get_rank()
    for end in ("destroy", "drop"):
        group = dist.new_group()
        backend = _c10d_backend() if end == "drop" else backend_of(group)
        for _ in range(3):
            backend.allreduce([torch.ones(200_000)])
            backend.allreduce([torch.ones(100, 200).t()])
        time.sleep(0.05 * rank)
        del backend
        dist.destroy_process_group(group)
    all_reduce_works()


def _c10d_backend() -> Any:
    from ringcomm import _c10d, backend

    options = _c10d.Backend.Options(timedelta(seconds=20))
    options.global_ranks_in_group = [0, 1, 2]
    store = dist.FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], "other store"), 3)
    return backend.create_in(store, "test", dist.get_rank(), options)


def test_groups_end_with_calls_in_flight() -> None:
    run(_in_flight_at_the_end)


def _strided_results() -> None:
    """Results reach tensors that are not contiguous before wait and the future say so."""
    rank = dist.get_rank()
    for _ in range(50):
        wide = torch.zeros(64, 32)
        x = wide[:, ::2]
        x.fill_(float(rank))
        work = dist.all_reduce(x, async_op=True)
        work.get_future().wait()
        assert torch.equal(x, torch.full((64, 16), 3.0))
        assert wide[:, 1::2].abs().sum() == 0
        x.fill_(1.0)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        assert torch.equal(x, torch.full((64, 16), 3.0))


def test_strided_results() -> None:
    run(_strided_results)


def _leaf_that_requires_grad() -> None:
    for tensor in (torch.ones(4, 6, requires_grad=True), torch.nn.Parameter(torch.ones(6, 4).t().contiguous().t())):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        assert torch.equal(tensor.detach(), torch.full_like(tensor.detach(), 3.0))
        assert tensor.is_leaf


def test_leaves_that_require_grad() -> None:
    run(_leaf_that_requires_grad)


# -- errors ----------------------------------------------------------------------------------------------------------


def _bad_arguments() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    world, backend, x = dist.group.WORLD, backend_of(), torch.ones(6)
    rank = dist.get_rank()

    def message(error: type[Exception], call: Any, *arguments: Any, **options: Any) -> str:
        text = raised(error, call, *arguments, **options)
        assert f"rank {rank}" in text, text
        assert "expected" in text, text
        return text

    assert "to_dense" in message(errors.InvalidArgumentError, backend.allreduce_coalesced, [x.to_sparse()])
    assert "meta" in message(errors.DeviceError, backend.allreduce, [torch.ones(3, device="meta")])
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda")
    assert "CUDA" in message(errors.UnsupportedError, backend.allreduce, [fake])
    message(errors.DtypeError, dist.all_reduce, torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    message(errors.DtypeError, dist.all_reduce, x, dist.ReduceOp.BAND)
    message(errors.DtypeError, dist.all_reduce, torch.ones(3, dtype=torch.uint16))
    message(errors.DtypeError, backend.allreduce, [torch.ones(3, dtype=torch.complex64)], dist.ReduceOp.MAX)
    message(errors.DtypeError, backend._allgather_base, torch.zeros(18, dtype=torch.int32), x)
    message(errors.InvalidArgumentError, backend.allreduce, [x, x])
    message(errors.InvalidArgumentError, world.broadcast, x, 3)
    message(errors.InvalidArgumentError, backend.send, [x], 7, 0)
    message(errors.ShapeError, dist.all_gather_into_tensor, torch.zeros(17), x)
    message(errors.ShapeError, dist.reduce_scatter_tensor, torch.zeros(3), x)
    message(errors.ShapeError, dist.all_gather, [x, x], x)
    message(errors.ShapeError, dist.all_to_all_single, x, torch.ones(7))
    message(errors.ShapeError, dist.all_to_all_single, x, x.clone(), [1, 2, 2], [2, 2, 2])
    message(errors.ShapeError, dist.all_to_all_single, x, x.clone(), [7, -1, 0], [2, 2, 2])
    message(errors.ShapeError, dist.all_reduce, torch.ones(1).expand(6))
    message(errors.ShapeError, dist.all_gather, [torch.zeros(5) for _ in range(3)], x)
    all_reduce_works()  # nothing of all this was sent
    assert dist.get_world_size() == 3


def test_bad_arguments_raise_before_anything_is_sent() -> None:
    run(_bad_arguments)


def _different_calls() -> tuple[str, str]:
    try:
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(10), 0)
        else:
            dist.all_reduce(torch.ones(10))
    except errors.RingcommError as error:
        return type(error).__name__ * isinstance(error, dist.DistBackendError), str(error)
    raise AssertionError("different calls went through")


def test_different_calls_raise_everywhere() -> None:
    replies = run(_different_calls)
    assert any(name == "MismatchError" for name, _ in replies), replies
    assert any("broadcast" in text and "all_reduce" in text for _, text in replies), replies


def _late_rank() -> tuple[str, bool]:
    """Rank 2 never comes; the others raise, asynchronously too, and a new group works."""
    rank = dist.get_rank()
    slow = dist.new_group(timeout=timedelta(seconds=1))
    seen: list[str] = []
    if rank != 2:
        work = dist.all_reduce(torch.ones(10), group=slow, async_op=True)
        for call in (work.wait, lambda: work.get_future().wait(), lambda: dist.all_reduce(torch.ones(10), group=slow)):
            try:
                call()
            except (dist.DistBackendError, RuntimeError) as error:
                seen.append(f"{type(error).__name__}: {error}")
        assert len(seen) == 3
        assert not any("shrink" in each for each in seen)  # a process group cannot
        assert work.is_completed()
        assert not work.is_success()
        assert backend_of(slow).get_error() != backend_of().get_error()
    dist.barrier()
    all_reduce_works(dist.new_group())
    return ",".join(seen), rank == 2


def test_a_missing_rank_times_out_and_a_new_group_works() -> None:
    for seen, missing in run(_late_rank):
        assert missing or seen.startswith(("CollectiveTimeoutError", "AbortedError")), seen


def _missing_in_a_new_group() -> list[str]:
    said, limit = [], timedelta(seconds=1)
    if dist.get_rank() == 0:
        said.append(raised(dist.DistBackendError, dist.new_group, [0, 1], timeout=limit))
        said.append(raised(dist.DistBackendError, dist.group.WORLD.split_group, [0, 1], limit, group_name="half"))
    dist.barrier()
    return said


def test_a_rank_that_misses_a_new_group_is_named() -> None:
    for call, said in zip(("new_group", "split_group"), run(_missing_in_a_new_group)[0], strict=True):
        start = f"{call}: rank 0 expected all 2 ranks within 1 s, got none of rank 1; let every rank call {call}"
        assert said.startswith(start), said


def _impatient_wait() -> None:
    """A wait that reaches its time limit does not end the call."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:  # comes when the others' waits have ended
        store.wait(["waited 1", "waited 2"])
    x = torch.ones(10)
    work = dist.all_reduce(x, async_op=True)
    if rank != 0:
        raised(errors.CollectiveTimeoutError, work.wait, timedelta(milliseconds=100))
        store.set(f"waited {rank}", "")
    work.wait()
    assert torch.equal(x, torch.full((10,), 3.0))
    all_reduce_works()


def test_an_impatient_wait_leaves_the_call_in_flight() -> None:
    run(_impatient_wait)


def _abort() -> str:
    backend = backend_of()
    try:
        if dist.get_rank() == 0:
            time.sleep(0.3)
            backend.abort()
        dist.all_reduce(torch.ones(10))
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("the call went through")


def test_abort_reaches_every_rank() -> None:
    for text in run(_abort):
        assert "rank 0 called abort" in text, text


def _after_destroy() -> None:
    group = dist.new_group()
    backend = backend_of(group)
    all_reduce_works(group)
    dist.destroy_process_group(group)
    raised(errors.RingcommError, backend.allreduce, [torch.ones(3)])
    all_reduce_works()


def test_calls_after_destroy_raise() -> None:
    run(_after_destroy)


# -- groups ----------------------------------------------------------------------------------------------------------


def _groups() -> None:
    rank = dist.get_rank()
    pair, other, all_of_us = dist.new_group([0, 1]), dist.new_group([2, 0]), dist.new_group()
    x = torch.full((9,), float(rank + 1))
    if rank in (0, 1):
        dist.all_reduce(x, group=pair)
    assert torch.equal(x, torch.full((9,), [3.0, 3.0, 3.0][rank]))
    x = torch.full((9,), float(rank))
    if rank in (0, 2):
        dist.broadcast(x, 2, group=other)
        assert torch.equal(x, torch.full((9,), 2.0))
        assert dist.get_rank(other) == dist.get_group_rank(other, rank) == [0, -1, 1][rank]
    all_reduce_works(all_of_us)
    if rank == 0:
        dist.send(torch.tensor([5.0]), 2, group=other)
    elif rank == 2:
        x = torch.zeros(1)
        assert dist.recv(x, group=other) == 0
        assert x.item() == 5.0
    mine, _ = dist.new_subgroups(group_size=1)
    all_reduce_works(mine)
    for _ in range(5):  # groups come and go
        group = dist.new_group()
        all_reduce_works(group)
        dist.destroy_process_group(group)


def test_new_groups() -> None:
    run(_groups)


def _split() -> None:
    """torch.distributed.split_group wants an accelerator; pretend that the cpu is one."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert backend_of().supports_splitting
    split = world.split_group([0, 2] if rank != 1 else [1], timedelta(seconds=20), group_name=f"s{rank == 1}")
    all_reduce_works(split)
    assert (split.rank(), split.size()) == [(0, 2), (0, 1), (1, 2)][rank]
    again = split.split_group([0], timedelta(seconds=20), group_name="alone")
    assert (again is None) == (rank == 2)
    if again is not None:
        all_reduce_works(again)
    world.bound_device_id = torch.device("cuda", 0)
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cpu")),
    ):
        group = dist.split_group(world, [[0, 1], [2]])
    world.bound_device_id = None
    all_reduce_works(group)
    assert dist.get_process_group_ranks(group) == ([2] if rank == 2 else [0, 1])
    assert backend_of(group).options.global_ranks_in_group == dist.get_process_group_ranks(group)
    all_reduce_works()


def test_split_group() -> None:
    run(_split)


def _options() -> None:
    from ringcomm import _c10d

    backend = backend_of()
    assert backend.name() == "ringcomm"
    assert dist.get_backend() == "ringcomm"
    assert backend.supports_coalescing == torch.cuda.is_available()
    assert (backend.rank(), backend.size()) == (dist.get_rank(), 3)
    options = copy.deepcopy(backend.options)
    assert isinstance(options, _c10d.Backend.Options)
    assert options.backend == "ringcomm"
    backend.set_timeout(timedelta(seconds=17))
    assert backend.options._timeout == timedelta(seconds=17)
    assert options._timeout == timedelta(seconds=torch_ranks.GROUP_TIMEOUT_S)
    all_reduce_works(dist.new_group(pg_options=_c10d.Backend.Options()))
    raised(errors.InvalidArgumentError, dist.new_group, pg_options=object())


def test_options() -> None:
    run(_options)


def _twice(backend: str) -> None:
    rank = int(os.environ["RANK"])
    for round_number in range(3):
        torch_ranks.init(backend, rank, 3, name="same store")
        all_reduce_works()
        x = torch.tensor([float(round_number)])
        dist.broadcast(x, 0)
        assert dist.get_backend_config() == str(dist.BackendConfig(dist.Backend(backend)))
        group = dist.new_group([*range(round_number + 1)])  # has the same name in each round
        if rank <= round_number:
            all_reduce_works(group)
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ringcomm", "cpu:ringcomm"])
def test_groups_made_again_on_one_store(backend: str) -> None:
    run(_twice, backend, backend="")


def test_a_backend_for_each_device() -> None:
    run(all_reduce_works, backend="cpu:ringcomm,cuda:gloo")


def _missing_at_init() -> str:
    rank = int(os.environ["RANK"])
    if rank == 1:
        return ""
    store = dist.FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], "store"), 3)
    return raised(
        errors.CollectiveTimeoutError,
        dist.init_process_group,
        "ringcomm",
        store=store,
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=1),
    )


def test_a_rank_missing_at_init_is_named() -> None:
    for rank, text in enumerate(run(_missing_at_init, backend="")):
        assert rank == 1 or "got none of rank 1" in text, text
    torch_ranks.close_pool()  # torch counts the failed group, on two ranks of three


@pytest.mark.parametrize("first", choose(["ringcomm", "torch", "ringcomm.backend"], ["ringcomm", "torch"]))
def test_either_import_order_registers_the_backend(first: str, tmp_path: Path) -> None:
    lines = [f"import {first}", "import ringcomm, torch", "import torch.distributed as dist"]
    lines += ["dist.init_process_group('ringcomm', store=dist.HashStore(), rank=0, world_size=1)"]
    lines += ["x = torch.ones(3); dist.all_reduce(x); dist.barrier(); print(x.sum().item(), dist.get_backend())"]
    output = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert output.stdout.split() == ["3.0", "ringcomm"], output.stderr


# -- what a group answers to the parts of c10d's interface that it lacks -----------------------------------------------


def _lacking() -> None:
    backend = backend_of()
    assert backend.supports_splitting
    assert backend.supports_coalescing == torch.cuda.is_available()
    assert not backend.supports_shrinking
    with pytest.raises(
        errors.UnsupportedError, match=r"^shrink: rank \d asked a process group .* use comm\.shrink\(\)"
    ):
        backend.shrink([1])
    if hasattr(backend, "supports_reconfigure"):  # torch 2.14
        assert not backend.supports_reconfigure
        options = torch._C._distributed_c10d.ReconfigureOptions()
        for name, arguments in {"get_reconfigure_handle": (), "reconfigure": (options,)}.items():
            with pytest.raises(
                errors.UnsupportedError, match=rf"^{name}: rank \d asked a process group .* use comm\.shrink\(\)"
            ):
                getattr(backend, name)(*arguments)
    for call in ("suspend", "resume"):
        if hasattr(backend, call):
            with pytest.raises(RuntimeError, match=f"ringcomm does not support {call}"):
                getattr(backend, call)()
    dist.barrier()  # the group is as before


def test_the_error_names_what_a_process_group_does_not_support() -> None:
    run(_lacking)
