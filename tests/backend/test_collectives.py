"""Every collective of torch.distributed over ringcomm, against Gloo or plain torch on the same inputs, on 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcomm.errors import InvalidArgumentError, MismatchError
from tests.support import torch_ranks
from tests.support.torch_checks import combined, expect, laid_out, values

pytestmark = pytest.mark.timeout(180)
run = torch_ranks.run

COUNTS = [0, 1, 7, 1000, 70001]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
LAYOUTS = ["contiguous", "strided", "transposed"]
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


# -- reductions ------------------------------------------------------------------------------------------------------


def _all_reduce(dtype: torch.dtype, op: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        wanted = combined([values(peer, count, dtype) for peer in range(world_size)], op)
        for layout in LAYOUTS:
            for async_op in (False, True):
                x = laid_out(values(rank, count, dtype), layout)
                work = dist.all_reduce(x, REDUCE_OPS[op], async_op=async_op)
                assert (work is not None) == async_op
                if async_op:
                    work.wait()
                expect(x.reshape(-1), wanted, count, layout, async_op)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_reduce_floats(dtype: torch.dtype, op: str) -> None:
    run(_all_reduce, dtype, op)


@pytest.mark.parametrize("op", list(REDUCE_OPS))
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_all_reduce_integers(dtype: torch.dtype, op: str) -> None:
    run(_all_reduce, dtype, op)


def _premul_sum() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for factor in (0.5, torch.tensor([0.25])):
        x = values(rank, 1000)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        expect(x, sum((values(peer, 1000) * float(factor) for peer in range(world_size)), torch.zeros(1000)))
        out = torch.empty(300)
        dist.reduce_scatter_tensor(out, values(rank, 900), dist._make_nccl_premul_sum(factor))
        total = sum((values(peer, 900) * float(factor) for peer in range(world_size)), torch.zeros(900))
        expect(out, total[rank * 300 : (rank + 1) * 300])


def test_premul_sum() -> None:
    run(_premul_sum)


def _complex() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for dtype in (torch.complex64, torch.complex128):
        total = sum((values(peer, 99, dtype) for peer in range(world_size)), torch.zeros(99, dtype=dtype))
        x = values(rank, 99, dtype)
        dist.all_reduce(x)
        expect(x, total)
        x = values(rank, 99, dtype)  # the same without torch's view_as_real in between
        backend.allreduce([x]).wait()
        expect(x, total)
        x = values(rank, 99, dtype).conj()
        backend.allreduce([x]).wait()
        expect(x.resolve_conj(), total.conj().resolve_conj())
        out = torch.empty(99 * world_size, dtype=dtype)
        backend._allgather_base(out, values(rank, 99, dtype)).wait()
        expect(out, torch.cat([values(peer, 99, dtype) for peer in range(world_size)]))


def test_complex_tensors() -> None:
    run(_complex)


def _against_gloo(cases: list[tuple[str, dict[str, Any]]]) -> None:
    gloo = dist.new_group(backend="gloo")
    for name, arguments in cases:
        ours = CASES[name](dist.group.WORLD, **arguments)
        theirs = CASES[name](gloo, **arguments)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            expect(mine, other, name, arguments)


def _reduce_case(group: dist.ProcessGroup, root: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    x = values(dist.get_rank(), count, dtype)
    dist.reduce(x, root, group=group)
    return [x] if dist.get_rank() == root else []


def _broadcast_case(group: dist.ProcessGroup, root: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    x = values(dist.get_rank(), count, dtype)
    dist.broadcast(x, root, group=group)
    return [x]


def _all_gather_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    out = [values(9, count, dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(out, values(dist.get_rank(), count, dtype), group=group)
    return out


def _all_gather_single_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    out = values(9, count * dist.get_world_size(), dtype)
    dist.all_gather_into_tensor(out, values(dist.get_rank(), count, dtype), group=group)
    return [out]


def _gather_case(group: dist.ProcessGroup, root: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    mine = dist.get_rank() == root
    out = [values(9, count, dtype) for _ in range(dist.get_world_size())] if mine else None
    dist.gather(values(dist.get_rank(), count, dtype), out, root, group=group)
    return out or []


def _scatter_case(group: dist.ProcessGroup, root: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    mine = dist.get_rank() == root
    out = values(9, count, dtype)
    parts = [values(10 + peer, count, dtype) for peer in range(dist.get_world_size())] if mine else None
    dist.scatter(out, parts, root, group=group)
    return [out]


def _reduce_scatter_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    out = values(9, count, dtype)
    dist.reduce_scatter(out, [values(dist.get_rank() + peer, count, dtype) for peer in range(3)], group=group)
    return [out]


def _reduce_scatter_single_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    out = values(9, count, dtype)
    dist.reduce_scatter_tensor(out, values(dist.get_rank(), 3 * count, dtype), group=group)
    return [out]


def _all_to_all_single_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    out = values(9, count * 3, dtype).reshape(3, count)
    dist.all_to_all_single(out, values(dist.get_rank(), count * 3, dtype).reshape(3, count), group=group)
    return [out]


def _all_to_all_uneven_case(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    rows_in, rows_out = [rank + peer for peer in range(3)], [peer + rank for peer in range(3)]
    out = torch.zeros(sum(rows_out), count, dtype=dtype)
    x = values(rank, sum(rows_in) * count, dtype).reshape(sum(rows_in), count)
    dist.all_to_all_single(out, x, rows_out, rows_in, group=group)
    return [out]


CASES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "reduce": _reduce_case,
    "broadcast": _broadcast_case,
    "all_gather": _all_gather_case,
    "all_gather_into_tensor": _all_gather_single_case,
    "gather": _gather_case,
    "scatter": _scatter_case,
    "reduce_scatter": _reduce_scatter_case,
    "reduce_scatter_tensor": _reduce_scatter_single_case,
    "all_to_all_single": _all_to_all_single_case,
    "all_to_all_uneven": _all_to_all_uneven_case,
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_gloo(name: str) -> None:
    dtypes = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
    roots = [{"root": root} for root in range(3)] if name in ("reduce", "broadcast", "gather", "scatter") else [{}]
    counts = [1, 7, 1000, 70001]
    run(_against_gloo, [(name, {"dtype": d, "count": c, **root}) for d in dtypes for c in counts for root in roots])


def _types_without_arithmetic_move() -> None:
    rank = dist.get_rank()
    group = dist.group.WORLD
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.bool, torch.float8_e4m3fn):
        x = values(rank, 33, torch.int32 if dtype.is_signed is None else torch.int64).to(dtype)
        dist.broadcast(x, 1)
        expect(x.view(torch.uint8), values(1, 33).to(torch.int64).to(dtype).view(torch.uint8), dtype)
        out = [torch.zeros(33, dtype=torch.int64).to(dtype) for _ in range(3)]
        dist.all_gather(out, values(rank, 33).to(torch.int64).to(dtype), group=group)
        for peer in range(3):
            expect(out[peer].view(torch.uint8), values(peer, 33).to(torch.int64).to(dtype).view(torch.uint8), dtype)


def test_types_without_arithmetic_move() -> None:
    run(_types_without_arithmetic_move)


def _types_of_one_size_are_told_apart() -> None:
    rank = dist.get_rank()
    sent = (torch.uint16, torch.uint32, torch.uint64)  # torch itself sends complex numbers as pairs of real ones
    received = (torch.int16, torch.int32, torch.int64)
    for tag, (ours, theirs) in enumerate(zip(sent, received, strict=True)):
        raw = torch.zeros(64, dtype=torch.uint8)
        if rank == 0:
            dist.send(raw.view(ours), 1, tag=tag)
        elif rank == 1:
            name = str(ours).removeprefix("torch.")
            with pytest.raises(MismatchError, match=f"sent .* {name}"):
                dist.recv(raw.view(theirs), 0, tag=tag)


def test_dtypes_of_one_size_are_distinguished() -> None:
    run(_types_of_one_size_are_told_apart)


def _uneven_lists() -> None:
    rank = dist.get_rank()
    sizes = [5, 0, 300_000]
    out = [torch.zeros(size) for size in sizes]
    dist.all_gather(out, values(rank, sizes[rank]))
    for peer in range(3):
        expect(out[peer], values(peer, sizes[peer]))
    total = torch.zeros(sizes[rank])
    dist.reduce_scatter(total, [values(rank, size) for size in sizes])
    expect(total, combined([values(peer, sizes[rank]) for peer in range(3)], "sum"))
    for scale in (10, 100_000):
        received = [torch.zeros(scale * peer + rank) for peer in range(3)]
        dist.all_to_all(received, [values(rank, scale * rank + peer) for peer in range(3)])
        for peer in range(3):
            expect(received[peer], values(peer, scale * peer + rank))


def _uneven_rooted() -> None:
    rank = dist.get_rank()
    sizes = [5, 0, 300]
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="elements"):
            dist.scatter(torch.zeros(5), [values(peer, sizes[peer]) for peer in range(3)])
        with pytest.raises(InvalidArgumentError, match="elements"):
            dist.gather(values(0, 5), [torch.zeros(size) for size in sizes])
    dist.barrier()  # nothing was sent


def test_uneven_gather_and_scatter_are_refused_at_the_root() -> None:
    run(_uneven_rooted)


def test_uneven_lists() -> None:
    run(_uneven_lists)


def _shared_memory_of_input_and_output() -> None:
    rank = dist.get_rank()
    whole = torch.zeros(3 * 50)
    own = whole[rank * 50 : (rank + 1) * 50]
    own.copy_(values(rank, 50))
    dist.all_gather_into_tensor(whole, own)  # in place
    expect(whole, torch.cat([values(peer, 50) for peer in range(3)]))
    whole = torch.zeros(3 * 50)
    whole[10:60] = values(rank, 50)
    dist.all_gather_into_tensor(whole, whole[10:60])  # across the parts
    expect(whole, torch.cat([values(peer, 50) for peer in range(3)]))
    x = values(rank, 150)
    dist.reduce_scatter_tensor(x[50 * rank : 50 * rank + 50], x)
    total = combined([values(peer, 150) for peer in range(3)], "sum")[50 * rank : 50 * rank + 50]
    expect(x[50 * rank : 50 * rank + 50], total)
    x = values(rank, 150)
    dist.reduce_scatter_tensor(x[20:70], x)
    expect(x[20:70], total)
    x = values(rank, 150)
    dist.all_to_all_single(x, x)
    expect(x, torch.cat([values(peer, 150)[50 * rank : 50 * rank + 50] for peer in range(3)]))
    parts = list(values(rank, 150).split(50))
    dist.all_to_all(parts, parts)
    for peer in range(3):
        expect(parts[peer], values(peer, 150)[50 * rank : 50 * rank + 50])
    parts = [torch.zeros(50) for _ in range(3)]
    parts[0].copy_(values(rank, 50))
    dist.all_gather(parts, parts[0])
    for peer in range(3):
        expect(parts[peer], values(peer, 50))


def test_input_and_output_may_share_memory() -> None:
    run(_shared_memory_of_input_and_output)
