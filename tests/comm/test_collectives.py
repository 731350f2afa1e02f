"""The matrix: world sizes x counts x types x ops x in and out of place x contiguous or not, over threads and processes.

Every cell of one world runs inside one session of ranks; a failing cell names itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import _C, Communicator
from tests.support.choice import choose
from tests.support.reference import (
    DTYPES,
    FLOATS,
    ROUNDING,
    factor_of,
    has_oneshot,
    laid_out,
    ops_of,
    reduced,
    same_bits,
    values,
)

WORLD_SIZES = (1, 2, 3, 5, 8)
COUNTS = (0, 1, 7, 120, 1000, 4099)
LARGE = 1 << 20
LARGE_DTYPES = ("float32", "bfloat16", "int32")
MOVED_ONLY = ("uint16", "uint64", "complex64", "complex128")  # move, but have no arithmetic here
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]


@cache
def data(dtype: str, rank: int, count: int = LARGE) -> torch.Tensor:
    """One rank's values; every cell takes the beginning of them."""
    if dtype in MOVED_ONLY:
        raw = values("uint8", rank, min(count, 8 * COUNTS[-1]) * getattr(torch, dtype).itemsize)
        return raw.view(getattr(torch, dtype))
    return values(dtype, rank, count if dtype in LARGE_DTYPES else 8 * COUNTS[-1])


@cache
def expected(dtype: str, op: str, world_size: int, count: int) -> torch.Tensor:
    """What the ranks of a world make of ``count`` elements: the reduction is elementwise, so a prefix serves all."""
    return reduced([data(dtype, rank)[:count] for rank in range(world_size)], op)


def check(comm: Communicator, cell: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not same_bits(got, want):
        assert got.shape == want.shape, f"{cell}: rank {comm.rank} of {comm.world_size}: shape {got.shape}"
        wrong = (got != want).nonzero()
        at = tuple(wrong[0].tolist()) if len(wrong) else "?"
        raise AssertionError(
            f"{cell}: rank {comm.rank} of {comm.world_size}: {len(wrong)} of {got.numel()} differ, first at {at}: "
            f"got {got[at]!r}, expected {want[at]!r}"
        )


def layouts() -> Iterator[tuple[bool, bool]]:
    return ((in_place, contiguous) for in_place in (True, False) for contiguous in (True, False))


def counts_of(dtype: str, op: str = "sum") -> tuple[int, ...]:
    return (*COUNTS, LARGE) if dtype in LARGE_DTYPES and op in ("sum", "max") else COUNTS


# ---- the cells of each collective --------------------------------------------------------------------------------


def all_reduce_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    cells = 0
    for dtype, op in REDUCTIONS:
        if dtype not in dtypes:
            continue
        factor = factor_of(comm.rank) if op == "premul_sum" else None
        for count in counts_of(dtype, op):
            want = expected(dtype, op, comm.world_size, count)
            mine = data(dtype, comm.rank)[:count]
            for in_place, contiguous in layouts():
                cell = f"all_reduce {dtype} {op} {count=} {in_place=} {contiguous=}"
                x = laid_out(mine, contiguous)
                out = None if in_place else laid_out(torch.zeros_like(mine), contiguous)
                got = comm.all_reduce(x, op, out=out, factor=factor)
                assert got is (x if in_place else out), cell
                check(comm, cell, got, want)
                if not in_place:
                    check(comm, f"{cell} input", x, mine)
                cells += 1
    return cells


def algorithm_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    cells = 0
    for dtype, op in REDUCTIONS:
        # The ring rounds at every hop, so only what does not round has the canonical bits there.
        exact = dtype not in FLOATS or op not in ROUNDING
        if dtype not in dtypes:
            continue
        factor = factor_of(comm.rank) if op == "premul_sum" else None
        for algorithm in ("direct", "oneshot", *(["ring"] if exact else [])):
            if algorithm == "oneshot" and not has_oneshot(comm.engine, dtype, op):
                continue
            for count in COUNTS:
                x = data(dtype, comm.rank)[:count].clone()
                comm.all_reduce(x, op, factor=factor, algorithm=algorithm)
                cell = f"all_reduce {algorithm} {dtype} {op} {count=}"
                check(comm, cell, x, expected(dtype, op, comm.world_size, count))
                cells += 1
    return cells


def reduce_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    cells = 0
    for dtype, op in REDUCTIONS:
        if dtype not in dtypes:
            continue
        factor = factor_of(comm.rank) if op == "premul_sum" else None
        for i, count in enumerate(COUNTS):
            root = i % comm.world_size
            mine = data(dtype, comm.rank)[:count]
            for in_place, contiguous in layouts():
                cell = f"reduce {dtype} {op} {count=} {root=} {in_place=} {contiguous=}"
                x = laid_out(mine, contiguous)
                out = laid_out(torch.zeros_like(mine), contiguous) if not in_place and comm.rank == root else None
                got = comm.reduce(x, root, op, out=out, factor=factor)
                if comm.rank == root:
                    check(comm, cell, got, expected(dtype, op, comm.world_size, count))
                else:
                    assert got is None, cell
                    check(comm, f"{cell} input", x, mine)
                cells += 1
    return cells


def reduce_scatter_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    cells = 0
    rank, world_size = comm.rank, comm.world_size
    for dtype, op in REDUCTIONS:
        if dtype not in dtypes:
            continue
        factor = factor_of(rank) if op == "premul_sum" else None
        for count in (*COUNTS, *([LARGE // world_size] if dtype in LARGE_DTYPES and op == "sum" else [])):
            part = slice(rank * count, (rank + 1) * count)
            want = expected(dtype, op, world_size, world_size * count)[part]
            for in_place, contiguous in layouts():
                cell = f"reduce_scatter {dtype} {op} {count=} {in_place=} {contiguous=}"
                x = laid_out(data(dtype, rank)[: world_size * count], contiguous)
                out = x[part] if in_place else laid_out(torch.zeros_like(want), contiguous)
                check(comm, cell, comm.reduce_scatter(x, op, out=out, factor=factor), want)
                cells += 1
    return cells


def movement_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    """all_gather, broadcast, gather, scatter, all_to_all."""
    cells = 0
    rank, world_size = comm.rank, comm.world_size
    for dtype in dtypes:
        for i, count in enumerate((*COUNTS, *([LARGE // world_size] if dtype in LARGE_DTYPES else []))):
            root = i % world_size
            ours = [data(dtype, r)[:count] for r in range(world_size)]
            together = torch.cat(ours)
            for in_place, contiguous in layouts():
                cell = f"{dtype} {count=} {root=} {in_place=} {contiguous=}"
                part = slice(rank * count, (rank + 1) * count)

                out = laid_out(torch.zeros_like(together), contiguous)
                x = laid_out(ours[rank], contiguous)
                if in_place:
                    out[part] = ours[rank]
                    x = out[part]
                check(comm, f"all_gather {cell}", comm.all_gather(x, out=out), together)

                x = laid_out(ours[rank], contiguous)
                check(comm, f"broadcast {cell}", comm.broadcast(x, root), ours[root])

                out = laid_out(torch.zeros_like(together), contiguous) if rank == root and not in_place else None
                got = comm.gather(laid_out(ours[rank], contiguous), root, out=out)
                if rank == root:
                    check(comm, f"gather {cell}", got, together)

                x = laid_out(together, contiguous)
                out = laid_out(torch.zeros_like(ours[rank]), contiguous)
                check(comm, f"scatter {cell}", comm.scatter(x if rank == root else None, root, out=out), ours[rank])

                x = laid_out(data(dtype, rank)[: world_size * count], contiguous)
                out = x if in_place else laid_out(torch.zeros_like(x), contiguous)
                want = torch.cat([data(dtype, r)[part] for r in range(world_size)])
                check(comm, f"all_to_all {cell}", comm.all_to_all(x, out=out), want)
                cells += 5
    return cells


def point_to_point_cells(comm: Communicator, dtypes: tuple[str, ...]) -> int:
    cells = 0
    rank, world_size = comm.rank, comm.world_size
    if world_size == 1:
        return 0
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype in dtypes:
        for count in COUNTS:
            for contiguous in (True, False):
                x = laid_out(data(dtype, rank)[:count], contiguous)
                got = laid_out(torch.zeros_like(x), contiguous)
                work = comm.isend(x, following, tag=count)
                assert comm.recv(got, previous, tag=count) == previous
                work.wait()
                check(comm, f"send/recv {dtype} {count=} {contiguous=}", got, data(dtype, previous)[:count])
                cells += 1
    return cells


@pytest.mark.parametrize("dtype", _C.DTYPES)
def test_the_matrix_has_every_reduction(dtype: str) -> None:
    served = {op for op, code in _C.REDUCE_OPS.items() if _C.supports(_C.DTYPES[dtype], code)}
    assert set(ops_of(dtype)) == served, f"ops_of of tests/support/reference.py differs from supports() for {dtype}"


MOVED = (*DTYPES, *MOVED_ONLY)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("cells", "dtypes"),
    [
        (all_reduce_cells, DTYPES),
        (algorithm_cells, DTYPES),
        (reduce_cells, DTYPES),
        (reduce_scatter_cells, DTYPES),
        (movement_cells, MOVED),
        (point_to_point_cells, MOVED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_matrix_over_threads(cells: Any, dtypes: tuple[str, ...], world_size: int) -> None:
    ran = ringcomm.run_ranks(cells, world_size, dtypes, timeout=60)
    assert len(set(ran)) == 1


def every_cell(comm: Communicator) -> int:
    """What one set of processes runs: every collective, every type of each width."""
    dtypes = ("float32", "float64", "bfloat16", "float8_e4m3fn", "int16", "bool")
    ran = all_reduce_cells(comm, dtypes) + algorithm_cells(comm, dtypes) + reduce_cells(comm, dtypes)
    ran += reduce_scatter_cells(comm, dtypes) + movement_cells(comm, (*dtypes, "complex64"))
    return ran + point_to_point_cells(comm, dtypes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", choose(WORLD_SIZES, [3]))  # the threads have every one
def test_matrix_over_processes(world_size: int) -> None:
    ran = ringcomm.run_ranks(every_cell, world_size, ranks="processes", timeout=60)
    assert len(set(ran)) == 1


# ---- the same bits -----------------------------------------------------------------------------------------------


def bits_by_path(comm: Communicator) -> list[str]:
    """Ways to reduce the same values whose bits differ from those of one plain call."""
    return wrong_paths(comm, "float32") + wrong_paths(comm, "bfloat16")


def wrong_paths(comm: Communicator, dtype: str) -> list[str]:
    count = 40_000
    mine = data("float32", comm.rank)[:count].to(getattr(torch, dtype))
    want = comm.all_reduce(mine.clone())
    wrong = []

    def compare(how: str, got: torch.Tensor, expect: torch.Tensor = want) -> None:
        if not same_bits(got, expect):
            wrong.append(f"{dtype} {how}")

    for offset in (1, 3, 17, 1001):
        base = torch.zeros(count + offset, dtype=mine.dtype)
        base[offset:] = mine
        compare(f"{offset=}", comm.all_reduce(base[offset:]))
    for length in (1, 5, 64, 1000, 9999):
        compare(f"{length=}", comm.all_reduce(mine[:length].clone()), want[:length])
        compare(f"{length=} at the end", comm.all_reduce(mine[-length:].clone()), want[-length:])
    buckets = [bucket.clone() for bucket in mine.split(7_001)]
    compare("buckets", torch.cat(comm.all_reduce_coalesced(buckets)))
    for algorithm in ("direct", *(["oneshot"] if has_oneshot(comm.engine, dtype, "sum") else [])):
        compare(algorithm, comm.all_reduce(mine.clone(), algorithm=algorithm))
    lent = comm.empty(count, mine.dtype)
    lent.copy_(mine)
    compare("comm.empty", comm.all_reduce(lent))
    compare("async", comm.all_reduce(mine.clone(), async_op=True).wait())
    padded = torch.cat([mine, mine.new_zeros(-count % comm.world_size)])
    compare("reduce_scatter + all_gather", comm.all_gather(comm.reduce_scatter(padded))[:count])
    at_root = comm.reduce(mine.clone(), comm.world_size - 1)
    compare("reduce + broadcast", comm.broadcast(mine.clone() if at_root is None else at_root, comm.world_size - 1))
    return wrong


@pytest.mark.parametrize(("world_size", "ranks"), [(3, "threads"), (5, "threads"), (8, "threads"), (3, "processes")])
def test_the_path_does_not_change_the_bits(world_size: int, ranks: str) -> None:
    assert ringcomm.run_ranks(bits_by_path, world_size, ranks=ranks, timeout=60) == [[]] * world_size


def special_values(comm: Communicator, dtype: str) -> None:
    kind = getattr(torch, dtype)
    inf, nan = float("inf"), float("nan")
    mine = torch.tensor([1.0, 2.0, inf, inf, nan, -0.0, 0.0, 5.0]).to(kind)
    if comm.rank > 0:
        mine = torch.tensor([nan, inf, -inf, inf, 1.0, -0.0, -0.0, -5.0]).to(kind)
    ranks = list(comm.all_gather(mine, out=mine.new_empty((comm.world_size, len(mine)))))
    for op in (op for op in ops_of(dtype) if op != "premul_sum"):
        check(comm, f"special {dtype} {op}", comm.all_reduce(mine.clone(), op), reduced(ranks, op))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_nan_and_infinity_propagate(dtype: str) -> None:
    ringcomm.run_ranks(special_values, 3, dtype, timeout=30)


def ring_sums(comm: Communicator) -> None:
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.1)):
        for count in (*COUNTS, 70_001):
            mine = data(dtype, comm.rank)[:count].clone() if count <= 4099 else values(dtype, comm.rank, count)
            everyone = comm.all_gather(mine, out=mine.new_empty((comm.world_size, count)))
            got = comm.all_reduce(mine, algorithm="ring")
            torch.testing.assert_close(got.double(), everyone.double().sum(0), atol=tolerance, rtol=tolerance)
            same = comm.all_gather(got, out=got.new_empty((comm.world_size, count)))
            assert all(same_bits(row, got) for row in same), f"ring {dtype} {count=}: ranks differ"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ring_sums_and_every_rank_has_the_same_bits(world_size: int) -> None:
    ringcomm.run_ranks(ring_sums, world_size, timeout=60)
