"""CUDA == CPU, bit for bit: the same cells on both engines, every algorithm, in one launch for all ranks and apart."""

from __future__ import annotations

import pytest
import torch

from ringcomm import Communicator
from tests.gpu.on_gpu import EMULATED, in_threads, place, ranks
from tests.support.reference import DTYPES, FLOATS, ROUNDING, factor_of, has_oneshot, ops_of, same_bits, values

pytestmark = in_threads
COUNTS = (1, 1000) if EMULATED else (0, 1, 7, 1000, 4099, 70_001)
LARGE = () if EMULATED else ((1 << 20) + 13,)
LARGE_DTYPES = ("float32", "bfloat16")
FIRST = ("float32", "bfloat16", "int8") if EMULATED else ("float32", "bfloat16", "float16", "int8")
EVERY = FIRST if EMULATED else DTYPES
Cells = dict[str, torch.Tensor]


def reductions(comm: Communicator, dtype: str) -> Cells:
    found: Cells = {}
    rank, world_size, on = comm.rank, comm.world_size, comm.device
    for op in ops_of(dtype) if not EMULATED or dtype == "float32" else ("sum",):
        factor = factor_of(rank) if op == "premul_sum" else None
        for count in (*COUNTS, *(LARGE if op in ("sum", "avg") and dtype in LARGE_DTYPES else ())):
            x = place(values(dtype, rank, count), on)
            for algorithm in ("auto", "direct", "oneshot", "ring"):
                if algorithm == "oneshot" and (count > COUNTS[-1] or not has_oneshot("cuda", dtype, op)):
                    continue
                got = comm.all_reduce(x, op, out=torch.empty_like(x), factor=factor, algorithm=algorithm)
                rounds = algorithm == "ring" and dtype in FLOATS and op in ROUNDING
                found[f"{'rounding ' if rounds else ''}all_reduce {op} {count} {algorithm}"] = got
            parts = place(values(dtype, rank, count * world_size), on)
            for algorithm in ("auto", "ring"):
                cell = f"reduce_scatter {op} {count} {algorithm}"
                found[cell] = comm.reduce_scatter(parts, op, factor=factor, algorithm=algorithm)
            root = count % world_size
            if (
                got := comm.reduce(x, root, op, out=torch.empty_like(x) if rank == root else None, factor=factor)
            ) is not None:
                found[f"reduce {op} {count}"] = got
    return found


def movements(comm: Communicator, dtype: str) -> Cells:
    found: Cells = {}
    rank, world_size, on = comm.rank, comm.world_size, comm.device
    for count in (*COUNTS, *(LARGE if dtype in LARGE_DTYPES else ())):
        root = count % world_size
        x, parts = (place(values(dtype, rank, n), on) for n in (count, count * world_size))
        for algorithm in ("auto", "ring"):
            found[f"all_gather {count} {algorithm}"] = comm.all_gather(x, algorithm=algorithm)
            found[f"broadcast {count} {algorithm}"] = comm.broadcast(x.clone(), root, algorithm=algorithm)
        found[f"all_to_all {count}"] = comm.all_to_all(parts)
        if rank == root:
            found[f"gather {count}"] = comm.gather(x, root)
        else:
            comm.gather(x, root)
        found[f"scatter {count}"] = comm.scatter(parts if rank == root else None, root, out=torch.empty_like(x))
        if world_size > 1:
            got = torch.empty_like(x)
            ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
            work = comm.isend(x, ahead)
            comm.recv(got, behind)
            work.wait()
            found[f"send and recv {count}"] = got
    comm.barrier()
    return found


def cells(comm: Communicator, dtype: str) -> Cells:
    found = {**reductions(comm, dtype), **movements(comm, dtype)}
    comm.synchronize()
    return {cell: got.cpu() for cell, got in found.items()}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8] if not EMULATED else [3])
@pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=() if each in FIRST else pytest.mark.more) for each in EVERY]
)
def test_the_bits_are_the_cpu_engines(dtype: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch that knows all buffers; apart: ranks meet on flags, as ranks on several devices do; and apart where
    they do not see each other's memory, as with ordinary tensors between devices."""
    wrong, seen = [], 0
    theirs = ranks(cells, world_size, dtype, device="cpu")
    for apart in ("0", "1", "2"):
        monkeypatch.setenv("RINGCOMM_CUDA_APART", apart)
        ours = ranks(cells, world_size, dtype)
        for rank in range(world_size):
            assert ours[rank].keys() == theirs[rank].keys()
            seen += len(ours[rank])
            wrong += [
                f"rank {rank} {dtype} {cell} apart={apart}"
                for cell, got in ours[rank].items()
                # where a ring rounds at every hop, its bits depend on how it is cut: they are equal on all ranks
                if not same_bits(got, ours[0][cell] if cell.startswith("rounding") else theirs[rank][cell])
            ]
    print(f"{seen} cells compared")
    assert not wrong, f"{len(wrong)} of {seen} cells differ from the CPU engine: {wrong[:20]}"


def packed(comm: Communicator) -> Cells:
    on, found = comm.device, {}
    shapes = [(3, 5), (1,), (0,), (257,), (64, 1000)]
    for source in ("float32", "float16", "bfloat16", "float64"):
        xs = [
            place(values(source, i, int(torch.Size(shape).numel())).reshape(shape), on)
            for i, shape in enumerate(shapes)
        ]
        for target in ("float32", "float16", "bfloat16", "float64"):
            for scale in (1.0, 1 / 3):
                bucket = torch.zeros(sum(x.numel() for x in xs), dtype=getattr(torch, target), device=xs[0].device)
                comm.pack(xs, bucket, scale)
                back = comm.unpack(bucket, [torch.zeros_like(x) for x in xs], scale)
                found[f"{source} {target} {scale}"] = bucket
                found[f"{source} {target} {scale} back"] = torch.cat([x.reshape(-1) for x in back])
    comm.synchronize()
    return {cell: got.cpu() for cell, got in found.items()}


def test_buckets_have_the_cpu_engines_bits() -> None:
    ours, theirs = (ranks(packed, 1, device=device)[0] for device in ("cuda:0", "cpu"))
    wrong = [cell for cell, got in ours.items() if not same_bits(got, theirs[cell])]
    assert ours.keys() == theirs.keys()
    assert not wrong
