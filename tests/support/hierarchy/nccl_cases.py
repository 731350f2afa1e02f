"""What tests/hierarchy/test_nccl.py runs in a Python whose cuda devices are emulated and whose NCCL is a fake
(tests/support/fake_nccl): ranks as threads, on hosts that are pretended. The bits must be those of the cpu engine on
one host."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import _C, Communicator, errors
from ringcomm.comm import nccl
from tests.support.reference import same_bits, values

LIMIT_S = 60


def fake() -> Any:
    """The fake's own functions. It works on the streams of this Python's emulated GPU, whose symbols it must see."""
    ctypes.CDLL(_C.__file__, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_NOW)
    library = ctypes.CDLL(os.environ["RINGCOMM_NCCL"])
    for name in ("fake_nccl_calls", "fake_nccl_violations"):
        getattr(library, name).restype = ctypes.c_char_p
    library.fake_nccl_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
    return library


def every_collective(comm: Communicator, dtypes: list[str], counts: list[int]) -> list[torch.Tensor]:
    rank, world_size, results = comm.rank, comm.world_size, []
    for dtype in dtypes:
        for count in counts:
            x, parts = values(dtype, rank, count), values(dtype, rank, count * world_size)
            results += [comm.all_reduce(x.clone(), op) for op in ("sum", "avg", "max")]
            results += [comm.all_reduce(x, out=torch.empty_like(x)), comm.reduce_scatter(parts), comm.all_gather(x)]
            results += [comm.broadcast(x.clone(), root) for root in range(world_size)]
            results += [comm.all_to_all(parts, out=torch.empty_like(parts))]
            results.append(x.clone())
            comm.all_reduce(results[-1], async_op=True).wait()
            comm.barrier()
            results.append(messages(comm, x))
            comm.synchronize()
    return results


def messages(comm: Communicator, x: torch.Tensor) -> torch.Tensor:
    """From every rank to every other, posted in one order everywhere: NCCL's messages wait behind one another."""
    got = torch.zeros(comm.world_size, *x.shape, dtype=x.dtype)
    works = []
    for source in range(comm.world_size):
        if source == comm.rank:
            works += [comm.isend(x, rank) for rank in range(comm.world_size) if rank != source]
        else:
            works.append(comm.irecv(got[source], source))
    for work in works:
        work.wait()
    return got


def same_bits_as_cpu(hosts: list[int], dtypes: list[str], counts: list[int]) -> None:
    library, world_size = fake(), sum(hosts)
    expected = ringcomm.run_ranks(every_collective, world_size, dtypes, counts, timeout=LIMIT_S)
    found = ringcomm.run_ranks(
        every_collective, world_size, dtypes, counts, device="cuda", hosts=hosts, timeout=LIMIT_S
    )
    for rank in range(world_size):
        for at, (want, got) in enumerate(zip(expected[rank], found[rank], strict=True)):
            assert same_bits(want, got), f"result {at} of rank {rank}"
    assert not library.fake_nccl_violations(), library.fake_nccl_violations().decode()
    assert b"send" in library.fake_nccl_calls()


def one_call(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(10))


def nccl_fails(comm: Communicator) -> str:
    comm.all_reduce(torch.ones(10))
    comm.synchronize()
    if comm.rank == 1:
        return ""
    fake().fake_nccl_set(b"send_error_rank", 0)
    fake().fake_nccl_set(b"send_error", 2)
    with pytest.raises(errors.RingcommError) as caught:
        comm.all_reduce(torch.ones(10))
    return str(caught.value)


def failures() -> None:
    fake()
    said = ringcomm.run_ranks(nccl_fails, 2, device="cuda", hosts=[1, 1], timeout=LIMIT_S)
    assert "ncclSystemError" in said[0], said
    assert "rank 1" in said[0], said


def refused(version: str) -> None:
    fake()
    usable, text = nccl.facts()
    assert not usable
    assert f"got {version}" in text, text
    with pytest.raises(errors.UnsupportedError, match="expected NCCL between hosts"):
        ringcomm.run_ranks(one_call, 2, device="cuda", hosts=[1, 1], timeout=LIMIT_S)


def packing() -> None:
    """combine, casts of float8 and copies of every type give the bits of the cpu engine."""
    engines = {kind: _C.Engine(kind, 0, 1, 10_000) for kind in ("cpu", "cuda")}
    for engine in engines.values():
        engine.connect([engine.handle()])
    wide = values("float32", 0, 1001)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        narrow = {kind: torch.zeros(1001, dtype=getattr(torch, dtype)) for kind in engines}
        back = {kind: torch.zeros(1001) for kind in engines}
        for kind, engine in engines.items():
            codes = _C.DTYPES["float32"], _C.DTYPES[dtype]
            engine.pack([(wide.data_ptr(), narrow[kind].data_ptr(), 1001)], *codes, 0.5)
            engine.synchronize()
            engine.pack([(narrow[kind].data_ptr(), back[kind].data_ptr(), 1001)], *reversed(codes))
            engine.synchronize()
        assert same_bits(narrow["cpu"], narrow["cuda"])
        assert same_bits(back["cpu"], back["cuda"])
        assert same_bits(narrow["cpu"], (wide * 0.5).to(getattr(torch, dtype)))
        with pytest.raises(errors.UnsupportedError, match="8-bit float"):
            engines["cpu"].pack([(wide.data_ptr(), back["cpu"].data_ptr(), 1)], _C.DTYPES[dtype], _C.DTYPES["float16"])
    for dtype, code in _C.DTYPES.items():
        source = torch.arange(1, 101, dtype=torch.uint8).repeat(16).view(getattr(torch, dtype))
        for engine in engines.values():
            target = torch.zeros_like(source)
            parts = ((0, 3), (3, 40), (43, 57))
            pieces = [(source[at:].data_ptr(), target[at:].data_ptr(), count) for at, count in parts]
            engine.pack(pieces, code, code)
            engine.synchronize()
            assert same_bits(target[:100], source[:100]), dtype
            assert not target[100:].view(torch.uint8).any()
    for dtype in _C.DTYPES:
        for op, code in _C.REDUCE_OPS.items():
            if op == "premul_sum" or not _C.supports(_C.DTYPES[dtype], code):
                continue
            first, second = values(dtype, 0, 777), values(dtype, 1, 777)
            outputs = {kind: torch.empty_like(first) for kind in engines}
            for kind, engine in engines.items():
                addresses = first.data_ptr(), second.data_ptr(), outputs[kind].data_ptr()
                engine.combine(*addresses, 777, _C.DTYPES[dtype], code, 3)
                engine.synchronize()
            assert same_bits(outputs["cpu"], outputs["cuda"]), f"combine {dtype} {op}"
