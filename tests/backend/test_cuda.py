"""The device side of the torch.distributed backend, without a GPU: engines whose device memory is the host's.

All tests run twice: with the cpu engine behind it, so that only the way there is on trial (connecting at the first
call, works and futures, stand-ins, batches), and, in a Python that has it, with the CUDA engine on its emulated GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringcomm import _C, backend, errors
from tests.backend import test_calls, test_collectives, test_groups, test_torch_stack
from tests.support import emulated, torch_ranks
from tests.support.choice import choose
from tests.support.torch_checks import all_reduce_works, backend_of, combined, expect, raised, values

pytestmark = pytest.mark.timeout(300)

EMULATED = _C.build_info()["cuda"] == "emulated"
ENGINE = "cuda" if EMULATED else "cpu"


@pytest.mark.timeout(900)
@pytest.mark.skipif(EMULATED, reason="this is the Python that has the emulated engine")
@pytest.mark.parametrize("tests", choose(["calls", "scenario", "training"], ["scenario"]))
def test_on_the_emulated_gpu(tests: str) -> None:
    print(emulated.call("tests.backend.test_cuda", "main", tests, limit_s=800))


def main(tests: str) -> None:
    """Run tests of this file in this Python."""
    words = ["-q", "-p", "no:cacheprovider", "--no-header", "-k", tests, __file__]
    torch_ranks.grow(3)  # as long as this process has no threads, which is when they can be forked
    status = pytest.main(words)
    torch_ranks.close_pool()
    raise SystemExit(int(status))


def _on_device(function: Callable[..., Any], args: tuple[Any, ...], connects: bool) -> Any:
    """Runs a test in a process group whose tensors go through its device side; does it make calls there itself?"""
    made: list[str] = []
    make = backend.DeviceEngineFactory.make

    def counted(self: backend.DeviceEngineFactory, call: str, index: int) -> object:
        made.append(call)
        return make(self, call, index)

    with mock.patch.multiple(backend.DeviceEngineFactory, kind=ENGINE, serves_cpu=True, make=counted):
        torch_ranks.init("ringcomm", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if not connects:
            all_reduce_works()
        result = function(*args)
    assert made, "nothing went through the device side"
    return result


def run(
    function: Callable[..., Any], *args: Any, world_size: int = 3, connects: bool = True, timeout_s: float = 100
) -> list[Any]:
    return torch_ranks.run(_on_device, function, args, connects, world_size=world_size, timeout_s=timeout_s, backend="")


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "sum"),
        (torch.float64, "min"),
        (torch.float16, "prod"),
        (torch.bfloat16, "avg"),
        (torch.int32, "max"),
        (torch.int64, "bxor"),
        (torch.uint8, "band"),
    ],
    ids=str,
)
def test_calls_all_reduce(dtype: torch.dtype, op: str) -> None:
    run(test_collectives._all_reduce, dtype, op)


@pytest.mark.parametrize("name", list(test_collectives.CASES))
def test_calls_equal_gloo(name: str) -> None:
    rooted = name in ("reduce", "broadcast", "gather", "scatter")
    roots = [{"root": root} for root in range(3)] if rooted else [{}]
    cases = [(dtype, count) for dtype in (torch.float32, torch.int64) for count in (1, 7, 1000)]
    run(
        test_collectives._against_gloo,
        [(name, {"dtype": d, "count": c, **root}) for d, c in cases for root in roots],
    )


SCENARIOS = [
    test_collectives._premul_sum,
    test_collectives._complex,
    test_collectives._types_without_arithmetic_move,
    test_collectives._uneven_lists,
    test_collectives._uneven_rooted,
    test_collectives._shared_memory_of_input_and_output,
    test_calls._coalesced,
    test_calls._coalesced_on_device,
    test_calls._coalesced_lists,
    test_calls._objects,
    test_calls._barriers,
    test_groups._handles,
    test_groups._nested,
    test_groups._dropped,
    test_groups._strided_results,
    test_groups._leaf_that_requires_grad,
    test_groups._after_destroy,
    pytest.param(test_groups._groups, marks=pytest.mark.skipif(EMULATED, reason="recv from any source")),
    test_groups._split,
]

ONLY_BARRIERS = [test_collectives._uneven_rooted, test_calls._barriers]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_scenario(scenario: Callable[[], None]) -> None:
    run(scenario, connects=scenario not in ONLY_BARRIERS)


def _sub_groups() -> None:
    rank = dist.get_rank()
    for ranks in ([0, 1], [0, 2], [0, 1, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            all_reduce_works(group)
            x = torch.full((9,), float(rank))
            dist.broadcast(x, ranks[-1], group=group)
            expect(x, torch.full((9,), float(ranks[-1])))
    all_reduce_works()


def test_calls_in_sub_groups() -> None:
    run(_sub_groups)


def _exchange(count: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received, echo = torch.zeros(count), torch.zeros(count, 2)[:, 0]
    operations = [
        dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
        dist.P2POp(dist.isend, values(rank, count), (rank + 1) % world_size),
        dist.P2POp(dist.irecv, echo, (rank + 1) % world_size),
        dist.P2POp(dist.isend, values(rank, count), (rank - 1) % world_size),
    ]
    (work,) = dist.batch_isend_irecv(operations)
    work.wait()
    expect(received, values((rank - 1) % world_size, count))
    expect(echo, values((rank + 1) % world_size, count))
    if rank == 0:
        dist.send(values(0, count), 1)
    elif rank == 1:
        x = torch.zeros(count)
        assert dist.recv(x, 0) == 0
        expect(x, values(0, count))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("count", [1, 1 << 18])
def test_calls_messages_in_both_directions(world_size: int, count: int) -> None:
    run(_exchange, count, world_size=world_size)


def _mixed_coalescing() -> None:
    rank = dist.get_rank()
    xs = [values(rank, 40), values(rank, 9, torch.int64), values(rank, 40)]
    received = torch.zeros(5)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
        dist.broadcast(xs[1], 1)
        dist.isend(values(rank, 5), (rank + 1) % 3)
        dist.irecv(received, (rank - 1) % 3)
    manager.wait()
    expect(xs[0], combined([values(peer, 40) for peer in range(3)], "sum"))
    expect(xs[1], 3 * values(1, 9, torch.int64))  # torch gathers the reductions and calls them at the end
    expect(received, values((rank - 1) % 3, 5))


def test_calls_of_many_kinds_coalesced() -> None:
    run(_mixed_coalescing)


# -- training --------------------------------------------------------------------------------------------------------


def equal_to_gloo(scenario: Callable[..., Any], *args: Any, world_size: int) -> None:
    """On 2 ranks there is one order of summation: the same bits."""
    theirs = torch_ranks.run(scenario, *args, world_size=world_size, backend="gloo", timeout_s=100)
    ours = run(scenario, *args, world_size=world_size)
    for rank in range(world_size):
        assert len(ours[rank]) == len(theirs[rank]) > 0
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            assert torch.isfinite(mine).all()
            if world_size == 2:
                assert torch.equal(mine, other)
            else:
                torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}], ids=["plain", "views"]
)
def test_training_stock_ddp(world_size: int, options: dict[str, Any]) -> None:
    equal_to_gloo(test_torch_stack._ddp, options, world_size=world_size)


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "powersgd"])
def test_training_ddp_hooks(hook: str) -> None:
    equal_to_gloo(test_torch_stack._ddp_hook, hook, world_size=2)


def test_training_fsdp2() -> None:
    equal_to_gloo(test_torch_stack._fsdp2, {}, False, False, world_size=2)


# -- errors ----------------------------------------------------------------------------------------------------------


def _connect_late() -> str:
    """Rank 1 makes only a refused call on its device; the group remembers that it failed."""
    rank = dist.get_rank()
    all_reduce_works()
    slow = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        raised(errors.ShapeError, dist.all_gather_into_tensor, torch.ones(5), torch.ones(3), group=slow)
        return ""
    text = raised(errors.CollectiveTimeoutError, dist.all_reduce, torch.ones(3), group=slow)
    assert raised(errors.CollectiveTimeoutError, dist.all_reduce, torch.ones(3), group=slow) == text
    return text


def test_scenario_a_rank_makes_no_call_on_its_device() -> None:
    for rank, text in enumerate(run(_connect_late)):
        assert rank == 1 or ("all_reduce: rank" in text and "none of rank 1" in text and "device_id" in text), text


def _aborted() -> tuple[str, str]:
    slow = dist.new_group(timeout=timedelta(seconds=3))
    all_reduce_works(slow)
    x = torch.ones(3)
    work = dist.all_reduce(x, group=slow, async_op=True)
    work.wait()
    first = second = ""
    if dist.get_rank() != 2:
        first = raised(dist.DistBackendError, dist.all_reduce, x, group=slow)
        assert backend_of(slow).get_error() != backend_of().get_error()
        second = raised(dist.DistBackendError, dist.all_reduce, x, group=slow)
    dist.barrier()  # a rank that leaves earlier aborts the others' first call
    return first, second


def test_scenario_a_rank_stops_calling() -> None:
    for rank, (first, second) in enumerate(run(_aborted)):
        assert rank == 2 or (first and second)


def _no_engine() -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    group = dist.group.WORLD._get_backend(torch.device("cuda"))
    return [raised(errors.UnsupportedError, group.allreduce, [x]) for _ in range(2)]


@pytest.mark.skipif(EMULATED, reason="cuda tensors are nowhere then")
def test_cuda_tensors_without_an_engine_for_them() -> None:
    for texts in torch_ranks.run(_no_engine, world_size=2):
        assert texts[0] == texts[1]
        for part in ("all_reduce: rank", "cuda:0", "expected one on cpu", "'cpu:ringcomm,cuda:nccl'"):
            assert part in texts[0]
