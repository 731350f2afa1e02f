"""What tests/cuda/test_engine.py runs in a Python whose cuda devices are emulated: their memory is the host's, so that
the arrays are ordinary ones, on `device="cuda"`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import _C, Communicator, errors
from ringcomm.comm import hosts
from ringcomm.observe import record
from tests.comm import test_collectives as matrix
from tests.comm.test_communicator import every_method
from tests.support.reference import DTYPES, factor_of, has_oneshot, ops_of, reduced, same_bits, values

LIMIT_S = 60
_DLPACK_CUDA = 2


def ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, kind: str = "threads", device: str = "cuda"
) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, *args, ranks=kind, timeout=LIMIT_S, device=device)


# ---- the matrix --------------------------------------------------------------------------------------------------


def cells_of(comm: Communicator, names: list[str], dtypes: list[str], counts: list[int]) -> int:
    """The cells of the cpu engine's own test, at few sizes: an emulated thread is slow."""
    matrix.COUNTS = tuple(counts)
    matrix.LARGE_DTYPES = ()
    assert comm.engine == "cuda"
    assert comm.describe()["engine"] == "cuda"
    return sum(getattr(matrix, name)(comm, tuple(dtypes)) for name in names)


def cells(world_size: int, names: list[str], dtypes: list[str], counts: list[int], kind: str, device: str) -> None:
    ran = ranks(cells_of, world_size, names, dtypes, counts, kind=kind, device=device)
    assert len(set(ran)) == 1, ran
    assert ran[0] > 0 or world_size == 1, names


def guarded(comm: Communicator) -> None:
    """Nothing is written beside the arrays."""
    margin = 4096
    for dtype in DTYPES:
        for op, algorithm in product(ops_of(dtype), ("direct", "oneshot", "ring")):
            if algorithm == "oneshot" and not has_oneshot(comm.engine, dtype, op):
                continue
            for count in (1, 7, 1000):
                whole = torch.zeros(count + 2 * margin, dtype=getattr(torch, dtype))
                raw, each = whole.view(torch.uint8).fill_(1), whole.element_size()
                factor = {"factor": 0.5} if op == "premul_sum" else {}
                comm.all_reduce(whole[margin : margin + count], op, algorithm=algorithm, **factor)
                beside = torch.cat([raw[: margin * each], raw[(margin + count) * each :]])
                assert bool((beside == 1).all()), f"{algorithm} {dtype} {op} {count=}"


def guards(world_size: int) -> None:
    ranks(guarded, world_size)


# ---- copies without a kernel ---------------------------------------------------------------------------------------


def copied(comm: Communicator) -> str:
    """all_gather and all_to_all, even and uneven, of every type; the results of `auto`."""
    rank, world_size = comm.rank, comm.world_size
    for dtype, count in product((*DTYPES, "complex64"), (1, 777)):
        x = comm.empty(count * world_size, dtype)
        x.view(torch.uint8).copy_(torch.arange(x.nbytes).add(17 * rank).remainder(251).to(torch.uint8))
        out = comm.empty(count * world_size, dtype)
        for turn in (x, x.clone()):  # whose memory the peers see, and memory of one's own
            same_bytes(comm.all_gather(turn[:count], out=out, algorithm="copy_engine"), comm.all_gather(turn[:count]))
            same_bytes(comm.all_to_all(turn, out=out, algorithm="copy_engine"), comm.all_to_all(turn))
        rows = [to + 1 for to in range(world_size)]
        source = x[: sum(rows)] if sum(rows) <= x.numel() else x.repeat(world_size)[: sum(rows)]
        ways = [comm.all_to_all(source, send_counts=rows, algorithm=way) for way in ("copy_engine", "auto")]
        same_bytes(*ways)
    work = comm.all_gather(x[:count], out=out, algorithm="copy_engine", async_op=True)
    work.wait()
    with pytest.raises(errors.UnsupportedError, match="copy_engine, which only all_gather and all_to_all have"):
        comm.broadcast(x, algorithm="copy_engine")
    return str(comm.describe()["copy_engine"])


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert bool((got.view(torch.uint8) == want.view(torch.uint8)).all())


def copies(kind: str, device: str) -> None:
    said = ranks(copied, 3, kind=kind, device=device)
    assert len(set(said)) == 1, said
    assert not said[0].startswith("0 calls")
    print(said[0])


# ---- beside the cpu engine ---------------------------------------------------------------------------------------


def all_methods(comm: Communicator) -> dict[str, str]:
    return {name: repr(call(comm)) for name, call in every_method(comm.rank, comm.world_size).items()}


def same_as_cpu(world_size: int, kind: str) -> None:
    """Every method of the communicator gives on cuda what it gives on the cpu."""
    ours, theirs = (ranks(all_methods, world_size, kind=kind, device=device) for device in ("cuda", "cpu"))
    alike(ours, theirs)


def alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        wrong = [
            f"rank {rank} {name}: cuda {mine[name]!r}, cpu {other[name]!r}"
            for name in mine
            if mine[name] != other[name]
        ]
        assert not wrong, "\n".join(text[:1000] for text in wrong)


def sums(comm: Communicator) -> dict[str, bytes]:
    """Random floats, by every algorithm in canonical order."""
    found = {}
    for algorithm in ("auto", "direct", "oneshot"):
        for dtype in ("float32", "float64", "float16", "bfloat16", "float8_e5m2"):
            if algorithm == "oneshot" and not has_oneshot("cuda", dtype, "sum"):
                continue
            for count in (1, 63, 1000, 20_011):
                x = values(dtype, comm.rank, count)
                found[f"{algorithm} {dtype} {count=}"] = raw(comm.all_reduce(x, algorithm=algorithm))
    return found


def same_bits_as_cpu(world_size: int) -> None:
    alike(ranks(sums, world_size, device="cuda:0"), ranks(sums, world_size, device="cpu"))
    ranks(matrix.ring_sums, world_size)  # in ring order: every rank has the same


def reduced_bits(comm: Communicator) -> dict[str, bytes]:
    """All types and operators in canonical order, whole vectors and single elements; lists of uneven parts."""
    found: dict[str, bytes] = {}
    for dtype in DTYPES:
        for op, count in product(ops_of(dtype), (5, 1000)):
            factor = {"factor": factor_of(comm.rank)} if op == "premul_sum" else {}
            x = values(dtype, comm.rank, count)
            found[f"{dtype} {op} {count}"] = raw(comm.all_reduce(x, op, **factor))
        seen = comm.empty(40 * comm.world_size, dtype)  # which peers access where it lies
        seen.copy_(values(dtype, comm.rank, seen.numel()))
        found[f"{dtype} reduce_scatter in place"] = raw(comm.reduce_scatter(seen))
        found[f"{dtype} all_reduce in place"] = raw(comm.all_reduce(seen))
        last = comm.world_size - 1
        reduced_to_last = comm.reduce(seen, last)
        found[f"{dtype} reduce in place"] = raw(reduced_to_last) if comm.rank == last else b""
        parts = [values(dtype, comm.rank, 1 + to) for to in range(comm.world_size)]
        out = torch.empty(1 + comm.rank, dtype=parts[0].dtype)
        found[f"{dtype} parts"] = raw(comm.reduce_scatter_list(parts, out))
    return found


def raw(x: torch.Tensor) -> bytes:
    return bytes(x.view(torch.uint8).numpy())


def with_every_peer(comm: Communicator) -> list[float]:
    """A message to each rank and one from each, all under way at once."""
    peers = [p for p in range(comm.world_size) if p != comm.rank]
    got = {p: torch.zeros(1 + p) for p in peers}
    works = [comm.irecv(got[p], p) for p in peers]
    works += [comm.isend(torch.full((1 + comm.rank,), 100.0 * comm.rank + p), p) for p in peers]
    for work in works:
        work.wait()
    return [float(got[p].sum()) for p in peers]


def of_many_ranks(comm: Communicator) -> dict[str, Any]:
    if comm.engine == "cuda":
        copied(comm)
        with pytest.raises(errors.UnsupportedError, match=f"oneshot, which has at most 8 ranks, on {comm.world_size}"):
            comm.all_reduce(torch.ones(1), algorithm="oneshot")
    x, world_size = values("float32", comm.rank, 1000), comm.world_size
    by_ring = comm.all_reduce(x.clone(), algorithm="ring")  # in another order of summation, the same on every rank
    torch.testing.assert_close(by_ring, comm.all_reduce(x.clone()), atol=1e-4, rtol=1e-4)
    assert bool((comm.all_gather(by_ring, algorithm="ring").view(world_size, -1) == by_ring).all())
    counts = (20 * world_size, 20 * world_size * (12003 // world_size))  # part of a window of 4 KiB, and many windows
    return {
        **all_methods(comm),
        **reduced_bits(comm),
        "messages": with_every_peer(comm),
        **{f"staged {count}": staged(comm, count) for count in counts},
    }


def many_ranks(world_size: int, kind: str, device: str) -> None:
    """More ranks than a thread adds up at once, beside the CPU engine."""
    alike(ranks(of_many_ranks, world_size, kind=kind, device=device), ranks(of_many_ranks, world_size, device="cpu"))


def staged(comm: Communicator, count: int) -> list[bytes]:
    """Every op on memory that the peers do not see, over several windows of the staging regions."""
    x = values("float32", comm.rank, count)
    found = [comm.all_reduce(x.clone()), comm.reduce_scatter(x), comm.all_gather(x), comm.all_to_all(x)]
    found.append(comm.broadcast(x.clone(), root=1))
    return [raw(each) for each in found]


def staged_bits(world_size: int) -> None:
    """Ranks of one device that hide their memory from each other (RINGCOMM_CUDA_APART=2), beside the CPU engine."""
    for count in (60, 60 * 4001):  # a part of a window of 4 KiB, and many windows
        assert ranks(staged, world_size, count) == ranks(staged, world_size, count, device="cpu"), count


def the_path_does_not_change_the_bits(world_size: int, kind: str) -> None:
    assert ranks(matrix.bits_by_path, world_size, kind=kind) == [[]] * world_size


# ---- lists and buckets -------------------------------------------------------------------------------------------


def coalesced(comm: Communicator) -> None:
    lengths = [1, 70, 3, 512, 0, 33, 2048, 5] * 3  # more than one launch carries
    for op in ("sum", "max", "avg"):
        xs = [values("float32", 100 * i + comm.rank, n) for i, n in enumerate(lengths)]
        everyone = [[values("float32", 100 * i + r, n) for r in range(comm.world_size)] for i, n in enumerate(lengths)]
        got = comm.all_reduce_coalesced(xs, op)
        for i, (x, its) in enumerate(zip(xs, everyone, strict=True)):
            assert got[i] is x
            assert same_bits(x, reduced(its, op)), f"{op} tensor {i}"
    group = comm.all_reduce_coalesced([torch.ones(4), torch.ones(5)], async_op=True)
    assert [float(x[0]) for x in group.wait()] == [comm.world_size] * 2
    mixed = comm.all_reduce_coalesced([torch.ones(3), torch.ones(2, dtype=torch.int32), torch.ones(3, 2).t()])
    assert all(bool((x == comm.world_size).all()) for x in mixed)


def lists(world_size: int) -> None:
    ranks(coalesced, world_size)


def packed(comm: Communicator) -> None:
    shapes = [(3, 5), (1,), (0,), (257,), (4, 4, 4)]
    for source in ("float32", "float64", "float16", "bfloat16"):
        xs = [values(source, i, int(np.prod(shape))).reshape(shape) for i, shape in enumerate(shapes)]
        flat = torch.cat([x.reshape(-1) for x in xs])
        for target in ("float32", "float64", "float16", "bfloat16"):
            wide = torch.float64 if "float64" in (source, target) else torch.float32
            for scale in (1.0, 0.25, 1 / 3):
                bucket = torch.full((len(flat) + 3,), 7.0, dtype=getattr(torch, target))
                assert comm.pack(xs, bucket, scale) is bucket
                want = (flat.to(wide) * torch.tensor(scale, dtype=wide)).to(bucket.dtype)
                assert same_bits(bucket[:-3], want), f"pack {source} to {target} times {scale}"
                assert bucket[-3:].tolist() == [7.0] * 3
                back = [torch.zeros_like(x) for x in xs]
                comm.unpack(bucket, back, scale)
                again = (want.to(wide) * torch.tensor(scale, dtype=wide)).to(flat.dtype)
                assert same_bits(torch.cat([x.reshape(-1) for x in back]), again), f"unpack {target} to {source}"
    whole = [torch.arange(4), torch.arange(3)]
    assert comm.pack(whole, torch.zeros(7, dtype=torch.int64)).tolist() == [0, 1, 2, 3, 0, 1, 2]
    strided = torch.zeros(3, 2)
    comm.unpack(torch.arange(6.0), [strided.t()])
    assert strided.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    with pytest.raises(errors.ShapeError, match="8 elements together and a bucket of 7"):
        comm.pack([torch.ones(8)], torch.ones(7))
    with pytest.raises(errors.DtypeError, match="int64 to convert to float32"):
        comm.pack([torch.arange(2)], torch.ones(2))
    with pytest.raises(errors.DtypeError, match="float32 and float64"):
        comm.pack([torch.ones(2), torch.ones(2, dtype=torch.float64)], torch.ones(4))


def buckets() -> None:
    for device in ("cuda", "cpu"):
        ranks(packed, 2, device=device)


# ---- streams, handles, memory ------------------------------------------------------------------------------------


def in_flight(comm: Communicator) -> None:
    x = torch.ones(1000)
    work = comm.all_reduce(x, async_op=True)
    assert work.wait() is x
    assert work.done
    assert work.is_completed()
    assert x.tolist() == [comm.world_size] * 1000
    z = torch.ones(6, 4)
    on_stream = comm.all_reduce(z, stream=0, async_op=True)  # a stream of one's own: the host does not wait
    assert on_stream.wait(stream=0) is z
    assert on_stream.wait(stream=0) is z  # as often as one likes
    assert on_stream.synchronize() is z
    assert bool((z == comm.world_size).all())
    strided = torch.ones(6, 4).t()
    assert comm.all_reduce(strided, stream=0, async_op=True).wait() is strided
    assert bool((strided == comm.world_size).all())
    y = torch.ones(5)
    assert comm.all_reduce(y, stream=0) is y
    comm.synchronize(stream=0)
    assert y.tolist() == [comm.world_size] * 5
    comm.barrier()
    with comm.coalesce() as group:
        comm.all_reduce(x)
        comm.all_gather(torch.full((2,), comm.rank))
    assert group.wait()[1].tolist() == [r for r in range(comm.world_size) for _ in range(2)]
    works = [comm.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(20)]
    assert [float(work.wait(timeout=30)[0]) for work in works] == [i * comm.world_size for i in range(20)]


def plain_in_flight(comm: Communicator) -> None:
    """Arrays as torch shows its own: an asynchronous call on them is not prepared in Python."""
    n, rank = comm.world_size, comm.rank
    assert comm._device is not None

    def plain(values: Any) -> Exchanged:
        return Exchanged(np.array(values, np.float32), comm._device.index)

    x, y, row = plain([rank] * 8), plain([0] * 8), plain([rank] * n)
    gathered, part, swapped, told = plain(np.zeros((n, 8))), plain([0]), plain([0] * n), plain([rank] * 3)
    works = [
        comm.all_reduce(x, out=y, async_op=True),
        comm.all_gather(x, out=gathered, async_op=True),
        comm.reduce_scatter(row, "max", out=part, async_op=True),
        comm.all_to_all(row, out=swapped, async_op=True),
        comm.broadcast(told, n - 1, async_op=True),
    ]
    assert {work._call for work in works} == {None}  # none was prepared
    results = [y, gathered, part, swapped, told]
    for work, result in zip(works, results, strict=True):
        assert work.wait() is result
        assert work.wait(stream=0) is result  # as often as one likes
        with pytest.raises(errors.InvalidArgumentError, match=f"rank {rank} got stream='fast'"):
            work.wait(stream="fast")
        assert work.wait(timeout=30) is result
        assert work.synchronize() is result
        assert work.wait() is result
        assert work.done
        assert work.is_completed()
        assert repr(work) == "<Work done>"
    assert y.data.tolist() == [n * (n - 1) / 2] * 8
    assert gathered.data.tolist() == [[r] * 8 for r in range(n)]
    assert part.data.tolist() == [n - 1]
    assert swapped.data.tolist() == list(range(n))
    assert told.data.tolist() == [n - 1] * 3
    if rank > 0:
        comm.exchange(b"")
    dropped, peer = plain([1] * 8), plain([1] * 8)
    kept = weakref.ref(dropped)
    comm.all_reduce(dropped, async_op=True)
    del dropped
    if rank == 0:
        assert kept() is not None  # until the call is done, for which the others must come
        comm.exchange(b"")
    for _ in range(4):
        comm.all_reduce(peer, async_op=True).synchronize()
    assert kept() is None
    assert comm.all_reduce(peer, async_op=True, out=peer).wait(timeout=30).data.tolist() == [n**5] * 8
    records = [each for each in record.records() if each.rank == rank and each.engine == "cuda" and not each.closed]
    asked = [each for own in records for each in own.calls if each.op == "broadcast"]
    assert asked[-1].is_async
    assert "cuda/cases.py:" in asked[-1].site


def alone(comm: Communicator) -> None:
    x = Exchanged(np.ones(4, np.float32))
    comm.timeout = 0.3
    if comm.rank > 0:
        time.sleep(1)
        with pytest.raises(errors.CollectiveTimeoutError, match="all_reduce: rank 0 expected rank 1 to make call #0"):
            comm.all_reduce(x, async_op=True)
        return
    work = comm.all_reduce(x, async_op=True)
    for wait in (work.wait, work.synchronize):
        with pytest.raises(errors.CollectiveTimeoutError, match="all_reduce: rank 0 expected rank 1 to make call #0"):
            wait()
    with pytest.raises(errors.CollectiveTimeoutError, match="all_reduce: rank 0 expected rank 1"):
        comm.all_reduce(x, async_op=True)
    comm.close()
    with pytest.raises(errors.ClosedError, match="all_reduce: rank 0 expected an open communicator"):
        comm.all_reduce(x, async_op=True)


def impatient(comm: Communicator, plain: bool) -> None:
    x: Any = Exchanged(np.ones(4, np.float32)) if plain else torch.ones(4)
    how: dict[str, Any] = {} if plain else {"stream": 0}
    if comm.rank > 0:
        comm.exchange(b"")
    work = comm.all_reduce(x, async_op=True, **how)
    if comm.rank == 0:
        with pytest.raises(errors.CollectiveTimeoutError, match=r"rank 0 waited 0\.05 s for an asyn.*still in flight"):
            work.wait(timeout=0.05)
        comm.exchange(b"")
    assert work.synchronize() is x
    comm.exchange(b"")
    comm.barrier()


def impatient_waits() -> None:
    for plain in (False, True):
        ranks(impatient, 2, plain, device="cuda:0")


def plain_errors() -> None:
    ranks(alone, 2, device="cuda:0")


def lent(comm: Communicator) -> None:
    for like in ("torch", "numpy"):
        x = comm.empty((3, 5), "float32", like=like)
        x[...] = 1
        comm.all_reduce(x)
        assert float(x.sum()) == 15 * comm.world_size
    with pytest.raises(errors.InvalidArgumentError, match="like='cupy'"):
        comm.empty(3, like="cupy")
    for _ in range(20):
        y = comm.empty(1 << 16)
        y.fill_(1)
        assert float(comm.all_reduce(y)[-1]) == comm.world_size


def families(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2)
    assert half is not None
    assert (half.engine, half.device) == (comm.engine, comm.device)
    assert float(half.all_reduce(torch.ones(3))[0]) == half.world_size
    twin = comm.dup()
    first, second = comm.all_reduce(torch.ones(99), async_op=True), twin.all_reduce(torch.ones(99), async_op=True)
    assert float(second.wait()[0]) == float(first.wait()[0]) == comm.world_size
    alone = comm.subgroup([comm.world_size - 1])
    assert (alone is not None) == (comm.rank == comm.world_size - 1)
    assert comm.exchange(b"x" * comm.rank) == [b"x" * r for r in range(comm.world_size)]
    sent = [comm.rank + p for p in range(comm.world_size)]
    got = comm.all_to_all(torch.full((sum(sent), 2), comm.rank), send_counts=sent)
    assert got[:, 0].tolist() == [r for r in range(comm.world_size) for _ in range(r + comm.rank)]
    for each in (half, twin, alone):
        if each is not None:
            each.close()


def lopsided(comm: Communicator) -> None:
    """One rank has everything: the others, of whom any may launch the call, know nothing of its size."""
    for turn in range(12):
        out = torch.full((comm.rank + 1,), -1.0)
        comm.scatter_list(
            [torch.full((r + 1,), r + 2.0) for r in range(comm.world_size)] if comm.rank == 0 else None, out
        )
        assert out.tolist() == [comm.rank + 2.0] * (comm.rank + 1), f"scatter_list {turn}"
    sent = [200_000 if comm.rank == 0 and p == 1 else 0 for p in range(comm.world_size)]
    got = comm.all_to_all(torch.full((sum(sent),), 3.0), send_counts=sent)
    assert len(got) == (200_000 if comm.rank == 1 else 0)
    assert bool((got == 3).all())


def lives(kind: str, device: str) -> None:
    for case in (in_flight, plain_in_flight, lent, families, lopsided):
        ranks(case, 3, kind=kind, device=device)


# ---- what bad input gets -----------------------------------------------------------------------------------------


class OnDevice:
    """An array of some library with nothing but __cuda_array_interface__."""

    def __init__(self, data: np.ndarray, read_only: bool = False, stream: int | None = None) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            **data.__array_interface__,
            "data": (data.ctypes.data, read_only),
            "version": 3,
            "stream": stream,
        }


class Elsewhere:
    """An array on some device, as DLPack says it."""

    def __init__(self, kind: int, index: int) -> None:
        self.where = (kind, index)

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("it must not be asked for its memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


class _DlTensor(ctypes.Structure):
    _fields_ = (
        *(("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("num_dims", ctypes.c_int32), ("type_code", ctypes.c_uint8), ("bits", ctypes.c_uint8)),
        *(("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DlExchange(ctypes.Structure):
    _borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DlTensor))
    _stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("unused", ctypes.c_void_p * 4)),
        *(("borrow", _borrow), ("current_work_stream", _stream)),
    )


@_DlExchange._borrow
def _borrow(array: Any, out: Any) -> int:
    kind = {"f": 2, "i": 0}[array.data.dtype.kind]
    address, shape = array.data.ctypes.data, ctypes.addressof(array.shape)
    dims, bits = array.data.ndim, 8 * array.data.itemsize
    out[0] = _DlTensor(address, _DLPACK_CUDA, array.device, dims, kind, bits, 1, shape, None, 0)
    return 0


@_DlExchange._stream
def _current_work_stream(device_type: int, device_id: int, stream: Any) -> int:
    Exchanged.asked.append((device_type, device_id))
    stream[0] = None  # the default one
    return 0 if Exchanged.knows_stream else -1


class Exchanged:
    """An array on a device as torch shows its own: by DLPack's C exchange interface."""

    asked: ClassVar[list[tuple[int, int]]] = []
    knows_stream = True

    def __init__(self, data: np.ndarray, device: int = 0) -> None:
        self.data = data
        self.device = device
        self.shape = (ctypes.c_int64 * data.ndim)(*data.shape)

    def is_neg(self) -> bool:
        return False

    exchange = _DlExchange(1, 3, (None,) * 4, _borrow, _current_work_stream)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    name = b"dlpack_exchange_api"  # a capsule keeps its address alone
    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(exchange), name, None)


def refused(comm: Communicator) -> None:
    ones = torch.ones(4)
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (errors.DeviceError, "on meta, this communicator serves cuda:0", lambda: comm.all_reduce(ones.to("meta"))),
        (errors.DeviceError, "on cuda:1, this.*device='cuda:1'", lambda: comm.all_reduce(Elsewhere(2, 1))),
        (errors.DeviceError, "on cuda:1", lambda: comm.broadcast(Elsewhere(13, 1))),
        (errors.DeviceError, "DLPack type 10:0", lambda: comm.all_reduce(Elsewhere(10, 0))),
        (errors.InvalidArgumentError, "read-only", lambda: comm.all_reduce(OnDevice(np.ones(4), True))),
        (errors.InvalidArgumentError, "stream='fast'", lambda: comm.all_reduce(ones, stream="fast")),
        (errors.InvalidArgumentError, "stream=-1", lambda: comm.barrier(stream=-1)),
        (errors.InvalidArgumentError, "got list", lambda: comm.all_reduce([1.0])),
        (errors.DtypeError, "band is defined", lambda: comm.all_reduce(ones, "band")),
        (
            errors.UnsupportedError,
            "oneshot for int8, sum, for which the cuda engine has no such kernel",
            lambda: comm.all_reduce(torch.ones(4, dtype=torch.int8), algorithm="oneshot"),
        ),
        (errors.DtypeError, "uint16, sum", lambda: comm.all_reduce(torch.ones(2, dtype=torch.uint16))),
        (errors.ShapeError, "divisible", lambda: comm.reduce_scatter(torch.ones(comm.world_size + 1))),
        (errors.ShapeError, "share memory", lambda: comm.all_reduce(torch.ones(1).expand(4))),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    assert float(comm.all_reduce(ones)[0]) == comm.world_size  # nothing was sent
    x = np.ones(5, np.float32)
    assert isinstance(comm.all_reduce(OnDevice(x, stream=1)), OnDevice)
    assert x.tolist() == [comm.world_size] * 5
    columns = np.ones((4, 6), np.float32)
    comm.all_reduce(OnDevice(columns.T))
    assert bool((columns == comm.world_size).all())


def bad_input() -> None:
    ranks(refused, 2, device="cuda:0")
    with ringcomm.init() as comm:
        with pytest.raises(errors.DeviceError, match="on cuda:0, this communicator serves cpu"):
            comm.all_reduce(OnDevice(np.ones(4)))
        with pytest.raises(errors.InvalidArgumentError, match="serves cpu, where calls have no stream"):
            comm.all_reduce(torch.ones(4), stream=0)
    for engine, device in (("cpu", "cuda"), ("cuda", "cpu")):
        with pytest.raises(errors.InvalidArgumentError, match="both to name the same"):
            ringcomm.init(engine=engine, device=device)
    with pytest.raises(errors.DeviceError, match="device='cuda:7', expected one of cuda:0 to cuda:0"):
        ringcomm.init(device="cuda:7")
    with pytest.raises(errors.InvalidArgumentError, match="device='tpu'"):
        ringcomm.init(device="tpu")
    with pytest.raises(errors.UnsupportedError, match="at most 32 ranks of one host, got 33"):
        ringcomm.run_ranks(refused, 33, device="cuda")
    with pytest.raises(errors.UnsupportedError, match="at most 8 ranks of one process on one GPU, got 9 with rank 0"):
        ringcomm.run_ranks(refused, 9, device="cuda")


def cupy_arrays(comm: Communicator) -> None:
    from tests.support.cuda.fake_cupy import LOG, Device, ExternalStream, ndarray

    ones = ndarray(np.ones((2, 3), np.float32))
    assert comm.all_reduce(ones) is ones
    assert bool((ones.memory == comm.world_size).all())
    gathered = comm.all_gather(ndarray(np.full((2, 2), comm.rank, np.int16)))
    assert isinstance(gathered, ndarray)
    assert gathered.memory[:, 0].tolist() == [r for r in range(comm.world_size) for _ in range(2)]
    columns = ndarray(np.ones((3, 2), np.float32).T)
    del LOG[:]
    work = comm.all_reduce(columns, stream=ExternalStream(0), async_op=True)
    assert LOG, "the temporary was not made on the call's stream"
    assert work.synchronize() is columns
    assert bool((columns.memory == comm.world_size).all())
    work = comm.all_reduce(ones, stream=ExternalStream(0), async_op=True)
    with pytest.MonkeyPatch.context() as patched:  # CuPy now works on another stream than the call
        patched.setattr("cupy.cuda.get_current_stream", lambda: ExternalStream(42))
        assert work._waiting_stream(None) == 42
    work.synchronize()
    Device.current = 1
    elsewhere = ndarray(np.ones(3))
    Device.current = 0
    with pytest.raises(errors.DeviceError, match="on cuda:1, this communicator serves cuda:0"):
        comm.all_reduce(elsewhere)


def cupy() -> None:
    from tests.support.cuda import fake_cupy

    fake_cupy.install()
    ranks(cupy_arrays, 1, device="cuda:0")
    ranks(same_as_on_the_cpu_through_cupy, 3, device="cuda:0")


def same_as_on_the_cpu_through_cupy(comm: Communicator) -> None:
    from tests.support.cuda.fake_cupy import ndarray

    for dtype in ("float32", "float64", "int8", "int64", "bool"):
        everyone = [values(dtype, rank, 100) for rank in range(comm.world_size)]
        x = ndarray(everyone[comm.rank].numpy().copy())
        comm.all_reduce(x, "max")
        assert same_bits(torch.from_numpy(x.memory), reduced(everyone, "max"))


def places() -> None:
    """Which device every spelling means; two devices are emulated."""
    for device, expected in (
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (1, "cuda:1"),
        (torch.device("cuda", 1), "cuda:1"),
    ):
        with ringcomm.init(device=device) as comm:
            assert (comm.device, comm.engine) == (expected, "cuda"), device
            assert expected in repr(comm)
            assert comm.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
    os.environ["LOCAL_RANK"] = "3"
    with ringcomm.init(0, 1, engine="cuda") as comm:
        assert comm.device == "cuda:1"
    with ringcomm.init() as comm:
        assert (comm.device, comm.engine) == ("cpu", "cpu")
    assert ranks(lambda comm: comm.device, 3, device="cuda") == ["cuda:0", "cuda:1", "cuda:0"]
    assert ranks(lambda comm: comm.device, 2, device="cuda:1") == ["cuda:1", "cuda:1"]


# ---- pools of torch's allocator ----------------------------------------------------------------------------------


class FakeAllocator:
    """What torch.cuda.memory.CUDAPluggableAllocator is here for: two C functions of a library, by name."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        self.allocate: Any = getattr(library, alloc_fn_name)
        self.allocate.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.allocate.restype = ctypes.c_void_p
        self.free: Any = getattr(library, free_fn_name)
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.free.restype = None

    def allocator(self) -> FakeAllocator:
        return self


class FakePool:
    """A torch.cuda.MemPool that caches nothing. Tensors may outlive it."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self.allocator = allocator

    def full(self, comm: Communicator, count: int, value: float) -> torch.Tensor:
        device, nbytes, allocator = int(comm.device.partition(":")[2]), 4 * count, self.allocator
        address = allocator.allocate(nbytes, device, None)
        if address is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, allocator.free, address, nbytes, device, None)
        return torch.frombuffer(memory, dtype=torch.float32).fill_(value)


def pooled(comm: Communicator) -> torch.Tensor:
    pool, other = comm.mem_pool(1 << 16), comm.mem_pool(1000)
    for turn in range(5):
        tensors = [pool.full(comm, 100 + i, turn + comm.rank) for i in range(8)]
        expected = sum(turn + r for r in range(comm.world_size))
        assert all(comm.all_reduce(x).eq(expected).all() for x in tensors)
        assert comm.all_gather(tensors[0]).eq(expected).all()
    del tensors
    whole = pool.full(comm, 1 << 14, 1)
    with pytest.raises(torch.OutOfMemoryError):
        pool.full(comm, 1, 1)
    assert comm.all_reduce(whole)[-1] == comm.world_size
    with comm.dup() as twin:
        theirs = twin.mem_pool(1 << 12)
        kept = theirs.full(twin, 1000, comm.rank)
        assert comm.all_reduce(kept)[0] == sum(range(comm.world_size))  # memory of one serves the calls of all
        del theirs
        with pytest.raises(errors.InvalidArgumentError, match=f"rank {comm.rank} got nbytes=-1"):
            twin.mem_pool(-1)
    assert kept.eq(sum(range(comm.world_size))).all()
    del whole, other
    x = comm.empty(1 << 14, like="torch").fill_(1)
    assert comm.all_reduce(x)[0] == comm.world_size
    del pool
    return kept.clone()


def pools(kind: str, device: str) -> None:
    """torch for the cpu has no pools of devices: fakes of its two classes call our functions as torch does."""
    ranks(with_fakes, 3, kind=kind, device=device)
    open_pools = [_C.open_pool(_alone(), 1000, 0) for _ in range(32)]
    with pytest.raises(errors.EngineError, match="fewer than 32 pools"):
        _C.open_pool(_alone(), 1000, 0)
    for number in open_pools:
        _C.close_pool(number)


def no_pools() -> None:
    with ringcomm.init(device="cuda") as comm, pytest.raises(errors.UnsupportedError, match="a torch built for CUDA"):
        comm.mem_pool(1000)


def with_fakes(comm: Communicator) -> None:
    """In a process of this test alone, which needs no other pools."""
    fakes: Any = torch
    fakes.version.cuda = "13.0"
    fakes.cuda.MemPool, fakes.cuda.memory.CUDAPluggableAllocator = FakePool, FakeAllocator
    pooled(comm)
    comm.barrier()


def _alone() -> _C.Engine:
    engine = _C.Engine("cuda", 0, 1)
    engine.connect([engine.handle()])
    return engine


# ---- failures ----------------------------------------------------------------------------------------------------


def late(comm: Communicator) -> str:
    if comm.rank == 0:
        return "absent"
    started = time.monotonic()
    with pytest.raises((errors.CollectiveTimeoutError, errors.AbortedError)) as caught:
        comm.all_reduce(torch.ones(100), timeout=1)
    assert time.monotonic() - started < 30
    assert comm.aborted
    with pytest.raises((errors.CollectiveTimeoutError, errors.AbortedError)):  # and so does every later one
        comm.all_reduce(torch.ones(100))
    return str(caught.value)


def different(comm: Communicator) -> str:
    with pytest.raises((errors.MismatchError, errors.AbortedError)) as caught:
        comm.all_reduce(torch.ones(10 + comm.rank), timeout=20)
    return f"{type(caught.value).__name__}: {caught.value}"


def of_another_mark(comm: Communicator, algorithm: str) -> str:
    with pytest.raises((errors.MismatchError, errors.AbortedError)) as caught:
        comm._all_gather(torch.ones(10), algorithm=algorithm, timeout=20, mark=3 + comm.rank)
    return str(caught.value)


def another_barrier(comm: Communicator) -> str:
    with pytest.raises((errors.MismatchError, errors.AbortedError)) as caught:
        comm._barrier(timeout=20, mark=comm.rank)
    return str(caught.value)


def different_and_prepared_in_c(comm: Communicator) -> str:
    plain = Exchanged(np.ones(10 + comm.rank, np.float32))

    def until_the_host_sees_it() -> None:
        for _ in range(2000):
            comm.all_reduce(plain)
            time.sleep(0.005)

    with pytest.raises((errors.MismatchError, errors.AbortedError)) as caught:
        until_the_host_sees_it()
    assert comm._open._control.native.aborted  # type: ignore[attr-defined]
    return f"{type(caught.value).__name__}: {caught.value}"


def different_and_not_waited_for(
    comm: Communicator, as_list: bool, has_called: threading.Event, was_told: threading.Event
) -> str:
    if comm.rank == 0:
        request = comm.all_reduce(torch.ones(10), async_op=True)
        has_called.set()
        assert was_told.wait(LIMIT_S)  # it is the other rank that has to tell the engine beside
        with pytest.raises(errors.MismatchError):
            request.wait()
        return ""
    assert has_called.wait(LIMIT_S)
    xs = [torch.ones(11), torch.ones(12)]
    with pytest.raises(errors.MismatchError) as caught:
        comm.all_reduce_coalesced(xs) if as_list else comm.all_reduce(xs[0], async_op=True)
    assert comm._open._control.native.aborted  # type: ignore[attr-defined]
    was_told.set()
    return str(caught.value)


def given_up(comm: Communicator) -> str:
    if comm.rank == 0:
        time.sleep(0.3)
        comm.abort("the user pressed stop")
        return ""
    with pytest.raises(errors.AbortedError, match="pressed stop") as caught:
        comm.all_reduce(torch.ones(10))
    return str(caught.value)


def given_up_and_gone() -> None:
    """The process of rank 0 ends as soon as it has aborted."""
    ranks(given_up, 3, kind="processes")


def failures(kind: str) -> None:
    said = ranks(late, 3, kind=kind)
    assert said[0] == "absent"
    assert all("all_reduce" in text for text in said[1:]), said
    said = ranks(different, 2, kind=kind)
    assert any("MismatchError" in text for text in said), said
    for algorithm in ("ring", "direct", "copy_engine"):
        said = ranks(of_another_mark, 2, algorithm, kind=kind)
        assert any("mark 3" in text and "mark 4" in text for text in said), said
    said = ranks(another_barrier, 2, kind=kind)
    assert any("rank 1 called #0 barrier before a gather" in text for text in said), said
    said = ranks(different_and_prepared_in_c, 2, kind=kind)  # the same error as of calls that Python prepares
    assert all("MismatchError" in text for text in said), said
    if kind == "threads":  # the host finds it when the second one calls
        for as_list in (False, True):
            ranks(different_and_not_waited_for, 2, as_list, threading.Event(), threading.Event())
    ranks(given_up, 3, kind=kind)
    assert ranks(lambda comm: float(comm.all_reduce(torch.ones(3))[0]), 2) == [2.0, 2.0]  # and life goes on


# ---- the short native names --------------------------------------------------------------------------------------


def native() -> None:
    """Engine and Request as `_C` has them: streams, lists, packing."""
    assert _C.why_no_cuda() == ""
    assert _C.build_info()["engines"] == "cpu, cuda"
    engine = _C.Engine("cuda", 0, 1, timeout_ms=20_000, device=0, channels=2)
    engine.connect([engine.handle()])
    x = np.arange(8, dtype=np.float32)
    call = (_C.OPS["all_reduce"], _C.DTYPES["float32"], _C.REDUCE_OPS["avg"], 0, 0, 0, x.ctypes.data, x.ctypes.data, 8)
    request = engine.submit(*call, stream=0)
    request.join(0)
    request.wait()
    assert request.done
    rest = (1.0, 0, None, None, 0)
    engine.run_list([(*call, *rest), (*call, *rest)])
    y = np.zeros(8, np.float64)
    pieces = [(x.ctypes.data, y.ctypes.data + 32, 4), (x.ctypes.data + 16, y.ctypes.data, 4)]
    engine.pack(pieces, _C.DTYPES["float32"], _C.DTYPES["float64"], 0.5, 0)
    engine.submit(*call).wait()
    assert y.tolist() == [2.0, 2.5, 3.0, 3.5, 0.0, 0.5, 1.0, 1.5]
    memory = engine.allocate(64)
    ctypes.memset(memory, 0, 64)
    engine.release(memory)
    assert engine.run_plain("all_reduce", "sum", 0, 0, x, x) is None  # an array without a stream
    plain = Exchanged(x := np.arange(8, dtype=np.float32))
    for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"):
        y = np.zeros(8, np.float32)
        out = plain if op == "broadcast" else Exchanged(y)
        assert engine.run_plain(op, "sum", 0, 0, plain, out) == -1
        assert Exchanged.asked.pop() == (_DLPACK_CUDA, 0)  # for its stream
        engine.synchronize(0)
        assert op == "broadcast" or y.tolist() == x.tolist()
        request = engine.submit_plain(op, "sum", 0, 0, plain, out)
        assert request is not None
        assert Exchanged.asked.pop() == (_DLPACK_CUDA, 0)
        request.join(_C.work_stream(out, 0))
        request.wait()
        assert request.done
    assert _C.work_stream(x, 0) is None  # an array without a stream
    assert engine.submit_plain("all_reduce", "sum", 0, 0, plain, x) is None
    assert engine.submit_plain("barrier", "sum", 0, 0, None, None) is None
    assert engine.run_plain("barrier", "sum", 0, 0, None, None) is None  # the host has to wait for it
    assert engine.run_plain("all_reduce", "sum", 0, 0, plain, x) is None
    assert engine.run_plain("all_reduce", "sum", 0, 0, plain, Exchanged(np.zeros(8, np.float32), device=1)) is None
    assert engine.run_plain("all_reduce", "sum", 0, 0, plain, Exchanged(x.astype(np.int32))) is None
    assert engine.run_plain("all_reduce", "band", 0, 0, plain, plain) is None
    y = np.zeros(20, np.float64)
    bucket, parts = Exchanged(y), [Exchanged(part) for part in (x, x[:0], x[2:])]
    assert engine.pack_plain(parts, bucket, 0.5, False)
    assert Exchanged.asked.pop() == (_DLPACK_CUDA, 0)  # for the bucket's stream
    engine.synchronize(0)
    assert y.tolist() == [*(x / 2), *(x[2:] / 2), *[0.0] * 6]
    back = [np.zeros_like(x), np.zeros_like(x[2:])]
    assert engine.pack_plain(tuple(map(Exchanged, back)), bucket, 2, True)
    engine.synchronize(0)
    assert [part.tolist() for part in back] == [x.tolist(), x[2:].tolist()]
    for wrong in (
        [],
        iter(parts),
        [*parts, x],
        [*parts, Exchanged(np.zeros(7, np.float32))],
        [*parts, Exchanged(np.zeros(1, np.int32))],
        [*parts, Exchanged(np.zeros(1, np.float32), device=1)],
        [bucket],
    ):
        for unpacks in (False, True):
            assert not engine.pack_plain(wrong, bucket, 0.5, unpacks)
    assert not engine.pack_plain(parts, y, 1.0, False)
    assert not engine.pack_plain(parts, bucket, True, False)
    assert y.tolist() == [*(x / 2), *(x[2:] / 2), *[0.0] * 6]
    Exchanged.knows_stream = False
    assert engine.run_plain("all_reduce", "sum", 0, 0, plain, plain) is None
    assert engine.submit_plain("all_reduce", "sum", 0, 0, plain, plain) is None
    assert _C.work_stream(plain, 0) is None
    assert not engine.pack_plain(parts, bucket, 0.5, False)
    with pytest.raises(TypeError, match="work_stream takes an array and the index"):
        _C.work_stream(plain)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="submit_plain takes 6 arguments, got 1"):
        engine.submit_plain("all_reduce")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="pack_plain takes 4 arguments, got 1"):
        engine.pack_plain(parts)  # type: ignore[call-arg]
    cpu = _C.Engine("cpu", 0, 1)
    cpu.connect([cpu.handle()])
    assert cpu.run_plain("all_reduce", "sum", 0, 0, plain, plain) is None  # it lies on a device
    assert not cpu.pack_plain(parts, bucket, 0.5, False)
    cpu.close()
    with pytest.raises(errors.UnsupportedError, match="expected a cpu engine, got cuda"):
        engine.exchange(b"")
    with pytest.raises(TypeError):
        engine.run_list([(1, 2)])
    engine.close()
    with pytest.raises(errors.UnsupportedError, match="engine 'abacus', this build has: cpu, cuda"):
        _C.Engine("abacus", 0, 1)


# ---- commands ----------------------------------------------------------------------------------------------------


def commands(folder: str) -> None:
    from ringcomm.tools import cli

    assert cli.main(["doctor"]) == 0
    sizes = ["-b", "64", "-e", "4K", "-f", "64"]
    bench = ["bench", "all_reduce", "all_gather", "-g", "2", "--ranks-as", "threads", "--device", "cuda", "-n", "2"]
    assert cli.main([*bench, *sizes]) == 0
    path = os.path.join(folder, "tuning")
    few = ["--channels", "0,1", "--threads", "0", "--rounds", "1", "--round-ms", "1"]
    tune = ["tune", "all_reduce", "all_gather", "all_to_all", "-g", "2", "-b", "1K", "-e", "4K", *few, "-o"]
    assert cli.main([*tune, path]) == 0
    assert cli.main(["tune", "--device", "cpu"]) == 2
    os.environ["RINGCOMM_TUNING"] = path
    assert ranks(lambda comm: float(comm.all_reduce(torch.ones(3))[0]), 2) == [2.0, 2.0]
    facts = ranks(lambda comm: comm.describe(), 2)[0]
    assert path in facts.values(), facts
    with open(path, "a") as file:
        file.write("all_reduce 2 nonsense\n")
    with pytest.raises(errors.InvalidArgumentError, match="line"):
        ranks(lambda comm: None, 2)


# ---- ranks that do not fit together ------------------------------------------------------------------------------


def unequal(variable: str, value: str) -> None:
    """Ranks whose settings differ hear of it at connect, each of them."""
    first = _C.Engine("cuda", 0, 2, timeout_ms=20_000, device=0)
    os.environ[variable] = value
    second = _C.Engine("cuda", 1, 2, timeout_ms=20_000, device=0)
    for rank, engine in enumerate((first, second)):
        with pytest.raises(errors.MismatchError, match=f"connect: rank {rank} on GPU 0 .* rank {1 - rank} on GPU 0"):
            engine.connect([first.handle(), second.handle()])


def nothing(comm: Communicator) -> None:
    pass


def foreign_tuning(path: str) -> None:
    """A file that was measured elsewhere is refused by name."""
    for line in ("device NVIDIA Z1", "links nvlink"):
        with open(path, "w") as file:
            file.write(f"{line}\nall_reduce 2 max direct 0 0\n")
        os.environ["RINGCOMM_TUNING"] = path
        with pytest.raises(errors.InvalidArgumentError, match=f"{line.split(' ', 1)[1]}.*measure anew"):
            ranks(nothing, 2)
    with open(path, "w") as file:
        file.write("device emulated\nlinks same device\nall_reduce 2 max direct 32 0\n")
    assert {each["channels"] for each in ranks(Communicator.describe, 2)} == {"32"}


def warned_at_connect(comm: Communicator) -> list[str]:
    assert comm.describe()["processes_on_device"] == "2"
    hosts._warned = False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):  # once in a process
            made = comm.split(0)
            assert made is not None
            made.close()
    return [str(each.message) for each in found]


def time_slices(warned: bool) -> None:
    """Without MPS the processes of one device are told what that costs."""
    for rank, said in enumerate(ranks(warned_at_connect, 2, kind="processes", device="cuda:0")):
        text = f"rank {rank} shares cuda:0 with ranks of 1 other processes"
        assert [text in each for each in said] == [True] * warned, said


def no_driver() -> None:
    """A machine without a driver: everything says so, nothing else breaks."""
    from ringcomm.tools import cli

    assert _C.why_no_cuda()
    with pytest.raises(errors.UnsupportedError, match="asked for engine 'cuda', which cannot run here: "):
        ringcomm.init(device="cuda")
    assert cli.main(["doctor"]) == 0
    assert cli.main(["tune"]) == 2
    assert ringcomm.run_ranks(lambda comm: float(comm.all_reduce(torch.ones(1))), 2) == [2.0, 2.0]


# ---- a send and a receive ------------------------------------------------------------------------------------------


def round_a_ring(comm: Communicator) -> None:
    following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for count in (3, 200_000):  # at once in a slot, and beyond all of them
        x = torch.zeros(count)
        assert comm.sendrecv(torch.full((count,), comm.rank + 1.0), following, x, previous, 4) == previous
        assert bool((x == previous + 1).all())
        group = comm.sendrecv(x.clone(), following, x, previous, async_op=True)
        assert group.synchronize() == [None, previous]
        assert bool((x == (previous - 1) % comm.world_size + 1).all())


def sendrecv(kind: str, device: str) -> None:
    ranks(round_a_ring, 3, kind=kind, device=device)


def received_as_integers(comm: Communicator) -> str:
    try:
        if comm.rank == 0:
            comm.send(torch.ones(5), 1)
        else:
            comm.recv(torch.ones(5, dtype=torch.int32), 0)
            comm.synchronize()
    except errors.MismatchError as error:
        return str(error)
    assert comm.rank == 0  # between processes the sender may be done
    return "float32, int32"


def other_dtypes(kind: str, device: str) -> None:
    for text in ranks(received_as_integers, 2, kind=kind, device=device):
        assert "float32" in text, text
        assert "int32" in text, text


def of_all_sizes(comm: Communicator, before: set[str]) -> dict[tuple[str, str], dict[str, int]]:
    for nbytes in (4, 256 << 10, (256 << 10) + 4):
        comm.all_reduce(torch.ones(nbytes // 4))
    comm.all_reduce(torch.ones(1), algorithm="ring")
    comm.all_reduce(torch.ones(1), algorithm="oneshot")
    comm.all_gather(torch.ones(64), algorithm="copy_engine")
    comm.all_reduce(torch.ones(1), algorithm="direct")
    comm.broadcast(torch.ones(1), 0, async_op=True).wait()
    place = (comm.engine, comm.rank)
    every = ringcomm.metrics()["communicators"]
    (found,) = (each for each in every if (each["engine"], each["rank"]) == place and each["group"] not in before)
    return {(op["op"], op["algorithm"]): op["chosen"] for op in found["ops"]}


def chosen(kind: str) -> None:
    """Ranks that launch together know all pointers: they need no packets."""
    small = {"oneshot": 2, "direct": 1} if kind == "processes" else {"direct": 3}
    before = {each["group"] for each in ringcomm.metrics()["communicators"]}
    for counted in ranks(of_all_sizes, 2, before, kind=kind, device="cuda:0"):
        copies = counted.pop(("all_gather", "copy_engine"))
        assert copies in ({"copy_engine": 1}, {"direct": 1}), copies
        assert counted == {
            ("all_reduce", "auto"): small,
            ("all_reduce", "ring"): {"ring": 1},
            ("all_reduce", "oneshot"): {"oneshot": 1},
            ("all_reduce", "direct"): {"direct": 1},
            ("broadcast", "auto"): {"direct": 1},
        }
