"""Arrays of torch, NumPy, DLPack and plain buffers, with every kind of layout."""

from __future__ import annotations

import array
import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import Communicator, errors
from tests.support.choice import slow


class OnlyDlpack:
    """An array of some other library."""

    def __init__(self, data: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.data = data
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OnlyArrayInterface:
    """An array of some other library, which describes itself as NumPy's do."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def three(fn: Any) -> list[Any]:
    return ringcomm.run_ranks(fn, 3, timeout=30)


def test_numpy_arrays() -> None:
    def fn(comm: Communicator) -> None:
        for dtype in (np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8):
            x = np.arange(6, dtype=dtype)
            assert comm.all_reduce(x) is x
            assert np.array_equal(x, np.arange(6) * 3)
        flags = np.array([comm.rank == 0, False])
        assert comm.all_reduce(flags).tolist() == [True, False]
        gathered = comm.all_gather(np.full((2, 3), comm.rank, np.int16))
        assert isinstance(gathered, np.ndarray)
        assert gathered.shape == (6, 3)
        assert gathered[:, 0].tolist() == [0, 0, 1, 1, 2, 2]

    three(fn)


def test_arrays_with_numpys_interface() -> None:
    def fn(comm: Communicator) -> None:
        x, columns = np.ones(4), np.ones((4, 3), np.float32)[:, ::2]
        for each in (x, columns):
            described = OnlyArrayInterface(each)
            assert comm.all_reduce(described) is described
            assert (each == 3).all()
        frozen = np.ones(2)
        frozen.flags.writeable = False
        told = b"12345678"
        copied = OnlyArrayInterface(x, data=bytearray(32))  # in a buffer: NumPy alone knows where
        for to_read in (OnlyArrayInterface(frozen), copied, OnlyArrayInterface(np.frombuffer(told, np.uint8))):
            with pytest.raises(errors.InvalidArgumentError, match="got a read-only array to write to"):
                comm.all_reduce(to_read)
            assert comm.all_gather(to_read).size > 0
        assert told == b"12345678"

    three(fn)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            np.float64(3),
            r"all_reduce: rank 0 got a NumPy scalar of dtype float64, .*; pass numpy\.array\(x\), an array",
        ),
        (3, r"all_reduce: rank 0 got int, expected .*; pass torch\.tensor\(x\) or numpy\.array\(x\)$"),
        ([1.0, 2.0], r"all_reduce: rank 0 got list, expected .*; pass torch\.tensor\(x\) or numpy\.array\(x\)$"),
        ([(1, 2), (3, 4j)], r"all_reduce: rank 0 got list, .*; pass torch\.tensor\(x\) or numpy\.array\(x\)$"),
        (["one"], r"all_reduce: rank 0 got list, expected .*; convert it first$"),
        (
            [torch.ones(2), np.ones(2)],
            r"all_reduce: rank 0 got list, .*; pass its arrays one by one, or the list to all_reduce_coalesced$",
        ),
        ({}, r"all_reduce: rank 0 got dict, expected .*; convert it first$"),
    ],
)
def test_the_error_about_a_non_array_says_what_to_pass(value: Any, words: str) -> None:
    with ringcomm.init() as comm, pytest.raises(errors.InvalidArgumentError, match=words):
        comm.all_reduce(value)


def test_torch_and_numpy_ranks_mix() -> None:
    def fn(comm: Communicator) -> list[float]:
        x: Any = np.full(4, 1.0, np.float32) if comm.rank else torch.ones(4)
        return comm.all_reduce(x).tolist()

    assert three(fn) == [[3.0] * 4] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 6).t(),
        lambda: torch.zeros(5, 8)[:, 1:7:2],
        lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.zeros(3, 4)[1:],
        lambda: torch.zeros(3, 4, dtype=torch.complex64).conj(),
        lambda: torch.zeros(1, dtype=torch.complex64).conj().imag,
        lambda: np.zeros((4, 6), np.float32).T,
        lambda: np.zeros((6, 4), np.float64)[::-2],
        lambda: np.zeros((3, 4), np.float32, order="F"),
        lambda: torch.zeros(()),
        lambda: np.zeros(()),
    ],
)
def test_every_layout_is_reduced_in_place(make: Any) -> None:
    def fn(comm: Communicator) -> None:
        x = make()
        x[...] = comm.rank + 1
        assert comm.all_reduce(x) is x
        assert bool((x == 6).all()), x
        y = make()
        y[...] = comm.rank
        comm.broadcast(y, 2)
        assert bool((y == 2).all()), y

    three(fn)


def test_dlpack_arrays() -> None:
    def fn(comm: Communicator) -> None:
        memory = np.ones(5, np.float32)
        x = OnlyDlpack(memory)
        assert comm.all_reduce(x) is x
        assert memory.tolist() == [3.0] * 5
        narrow = torch.ones(5, dtype=torch.bfloat16)
        comm.all_reduce(OnlyDlpack(narrow))
        assert narrow.tolist() == [3.0] * 5

    three(fn)


def test_buffers() -> None:
    def fn(comm: Communicator) -> None:
        x = array.array("d", [1.0, 2.0])
        comm.all_reduce(x)
        assert x.tolist() == [3.0, 6.0]
        text = bytearray(b"hello" if comm.rank == 1 else b".....")
        comm.broadcast(text, 1)
        assert text == b"hello"

    three(fn)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_sums_and_averages(dtype: torch.dtype) -> None:
    def fn(comm: Communicator) -> None:
        x = torch.full((3,), 1 + 2j * comm.rank, dtype=dtype)
        assert comm.all_reduce(x.clone()).tolist() == [3 + 6j] * 3
        assert comm.all_reduce(x.clone(), "avg").tolist() == [1 + 2j] * 3

    three(fn)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "complex64", "float8_e5m2fnuz"])
def test_types_without_arithmetic_still_move(dtype: str) -> None:
    def fn(comm: Communicator) -> None:
        x = torch.arange(8, dtype=torch.uint8).view(getattr(torch, dtype))
        got = comm.all_gather(x)
        assert got.dtype == x.dtype
        assert got.view(torch.uint8).tolist() == list(range(8)) * 3
        comm.broadcast(x)

    three(fn)


@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_dtypes_of_one_size_are_distinguished(width: int, numpy: bool) -> None:
    names = {
        2: ("int16", "uint16", "float16", "bfloat16"),
        4: ("int32", "uint32", "float32", "complex32"),
        8: ("int64", "uint64", "float64", "complex64"),
        16: ("complex128", "float64"),
    }[width]

    def fn(comm: Communicator) -> None:
        for ours, theirs in zip(names, names[1:] + names[:1], strict=True):
            x = torch.zeros(64, dtype=torch.uint8).view(getattr(torch, ours if comm.rank == 0 else theirs))
            pair = comm.split(0)
            with pytest.raises(errors.MismatchError, match=rf"\b{ours}\b.*\b{theirs}\b|\b{theirs}\b.*\b{ours}\b"):
                pair.all_gather(x)
            messages = comm.split(0)
            if comm.rank == 0:
                messages.send(x.numpy() if hasattr(np, ours) and numpy else x, 1)
            else:
                with pytest.raises(errors.MismatchError, match=f"expected .* {theirs}.* sent .* {ours}"):
                    messages.recv(x, 0)

    ringcomm.run_ranks(fn, 2, ranks="threads", timeout=30)


def test_parameters_are_reduced_without_autograd() -> None:
    def fn(comm: Communicator) -> None:
        weight = torch.nn.Parameter(torch.ones(4))
        comm.all_reduce(weight)
        assert weight.tolist() == [3.0] * 4
        strided = torch.ones(4, 2, requires_grad=True)
        comm.all_reduce(strided.t())
        assert strided.sum() == 24
        assert strided.grad_fn is None

    three(fn)


def test_memory_that_overlaps_gives_the_same_result() -> None:
    def fn(comm: Communicator) -> None:
        x = torch.arange(12.0)
        comm.all_reduce(x[:8], out=x[4:])
        assert x[4:].tolist() == [3.0 * i for i in range(8)]
        whole = torch.arange(9.0)
        comm.all_gather(whole[1:4].clone(), out=whole)
        shifted = torch.arange(9.0)
        comm.all_gather(shifted[1:4], out=shifted)
        assert shifted.tolist() == whole.tolist()
        inside = torch.arange(9.0)
        comm.reduce_scatter(inside, out=inside[1:4])
        assert inside[1:4].tolist() == [3.0 * (3 * comm.rank + i) for i in range(3)]

    three(fn)


@pytest.mark.parametrize("like", ["torch", "numpy"])
def test_lent_memory_is_an_ordinary_array(like: str) -> None:
    def fn(comm: Communicator) -> Any:
        x = comm.empty((3, 5), "float32", like=like)
        assert tuple(x.shape) == (3, 5)
        assert isinstance(x, torch.Tensor if like == "torch" else np.ndarray)
        x[...] = 1
        comm.all_reduce(x)
        assert float(x.sum()) == 45
        part = comm.reduce_scatter(x)
        assert part.tolist() == [[9.0] * 5]
        assert comm.empty(0, like=like).shape == (0,)
        return x[1]

    rows = three(fn)  # the communicators are closed now
    assert [float(row.sum()) for row in rows] == [15.0] * 3


def arenas() -> int:
    """Mappings of lent memory in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("ringcomm-arena")


@pytest.mark.parametrize("like", ["torch", "numpy"])
def test_lent_memory_lives_as_long_as_a_view_of_it(like: str) -> None:
    """Even if the communicator and the array are gone; the last view unmaps it."""
    before = arenas()
    comm = ringcomm.init()
    x = comm.empty((1 << 10, 3), "float32", like=like)
    x[...] = 1
    work = comm.all_reduce(x, async_op=True)
    comm.close()
    row, other = x[5], np.from_dlpack(x)
    del comm, work, x
    assert arenas() == before + 1
    row[...] = 2
    assert float(other.sum()) == 3 * ((1 << 10) + 1)
    del row
    assert arenas() == before + 1
    assert float(other[5].sum()) == 6
    del other
    assert arenas() == before


@pytest.mark.parametrize(
    ("dtype", "library"),
    [(torch.int16, torch), (np.int16, np), (np.dtype("int16"), np), ("int16", torch), (None, torch)],
)
def test_lent_memory_follows_the_dtype(dtype: Any, library: Any) -> None:
    with ringcomm.init() as comm:
        x = comm.empty(4, dtype)
        assert x.dtype == (library.int16 if dtype is not None else torch.float32)


def test_much_lent_memory_is_given_back() -> None:
    def fn(comm: Communicator) -> None:
        for _ in range(40):
            x = comm.empty((1 << 20,), "float32")
            x.fill_(1)
            comm.all_reduce(x)
            assert float(x[-1]) == comm.world_size

    ringcomm.run_ranks(fn, 2, timeout=30)


# ---- the short way -----------------------------------------------------------------------------------------------


class LongWay(Communicator):
    """Takes no fast path: prepares every call in full."""

    def _run_plain(self, *args: Any, **options: Any) -> Any:
        return NotImplemented

    def _pack_plain(self, *args: Any, **options: Any) -> bool:
        return False


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


ANY_ARRAY: list[Callable[[], Any]] = [
    *(partial(torch.ones, shape) for shape in [(), (1,), (4,), (2, 2), (0,), (0, 3), (2, 4), (1, 4), (1, 2, 2)]),
    *(partial(np.ones, shape, np.float32) for shape in [(), (4,), (1, 4), (0,)]),
    *(partial(torch.ones, 4, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64)),
    *(partial(np.ones, 4, dtype) for dtype in ("?", ">f4", "u2", "c8", "O", "M8[s]")),
    lambda: torch.ones(8)[::2],
    lambda: torch.ones(2, 2).t(),
    lambda: torch.ones(1).expand(4),
    lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    lambda: torch.ones(4, requires_grad=True),
    lambda: torch.ones(4, device="meta"),
    lambda: torch.ones(4).to_sparse(),
    lambda: np.ones(8, np.float32)[::2],
    lambda: frozen(np.ones(4, np.float32)),
    lambda: bytearray(4),
    lambda: bytes(4),
    lambda: None,
    lambda: 3,
]
CALLS: list[Callable[[Communicator, Any, Any], Any]] = [
    *(lambda comm, x, y, op=op: comm.all_reduce(x, op, out=y) for op in ("sum", "avg", "band", "premul_sum", "nope")),
    lambda comm, x, y: comm.all_gather(x, out=y),
    lambda comm, x, y: comm.reduce_scatter(x, out=y),
    lambda comm, x, y: comm.all_to_all(x, out=y),
    lambda comm, x, y: comm.broadcast(x, root=y),
    lambda comm, x, y: comm.all_reduce(x[:3], out=x[1:4]),
    lambda comm, x, y: comm.all_gather(x, out=x),
    lambda comm, x, y: comm.send(x, dst=0, tag=y),
    lambda comm, x, y: comm.recv(x, src=1),
    *(lambda comm, x, y, scale=scale: comm.pack([x], y, scale) for scale in (1, 0.5)),
    lambda comm, x, y: comm.unpack(x, (y,), 0.5),
]


@pytest.mark.parametrize("step", [9, slow(1)])  # of arrays and calls each is in many cases
def test_the_fast_path_accepts_and_refuses_the_same_calls(step: int) -> None:
    def outcome(comm: Communicator, call: Callable[..., Any], *make: Callable[[], Any]) -> str:
        arrays = [each() for each in make]
        try:
            result = repr(call(comm, *arrays))
        except Exception as error:
            result = repr(error)
        return f"{result} with {arrays}"

    def both_ways(comm: Communicator) -> None:
        with comm.dup() as careful:
            careful.__class__ = LongWay
            for call, *make in itertools.islice(itertools.product(CALLS, ANY_ARRAY, ANY_ARRAY), 0, None, step):
                assert outcome(comm, call, *make) == outcome(careful, call, *make)

    ringcomm.run_ranks(both_ways, 1)


def parts_of(bucket: Any, *sizes: int) -> list[Any]:
    """Views of a bucket's memory."""
    return [bucket[at : at + size] for at, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)]


class List(list[Any]):
    pass


def ramp(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that neither 16-bit float can represent exactly, if the dtype can."""
    return (torch.arange(count, dtype=torch.float64) / 3 + 1 / 7).to(dtype)


def test_the_short_way_is_tried_once() -> None:
    def rank(comm: Communicator) -> list[str]:
        tried = []

        class Counting(Communicator):
            def _run_plain(self, op: str, *args: Any, **options: Any) -> Any:
                tried.append(op)
                return NotImplemented

        comm.__class__ = Counting
        x, y = torch.ones(2), torch.ones(4)
        for op, *args in (("all_reduce", x), ("all_gather", x), ("reduce_scatter", y), ("broadcast", x), ("barrier",)):
            getattr(comm, op)(*args)
        comm._all_gather(x, mark=1)
        return tried

    ops = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_gather"]
    assert ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20) == [ops] * 2


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TYPES = (
    *(*FLOATS, torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
)
# (whether they need no preparation, tensors, bucket)
LISTS: list[tuple[bool, Callable[[], Any], Callable[[], Any]]] = [
    *(
        (same and dtype != torch.complex64, lambda a=dtype: parts_of(ramp(9, a), 4, 0, 5), bucket)
        for dtype in TYPES
        for same, bucket in ((True, partial(torch.zeros, 9, dtype=dtype)), (False, partial(torch.zeros, 8)))
    ),
    *(
        (True, lambda a=a: [ramp(3, a).reshape(1, 3), ramp(1, a)], partial(torch.ones, 2, 4, dtype=b))
        for a, b in itertools.product(FLOATS, FLOATS)
    ),
    (True, lambda: [ramp(4, torch.float32)] * 150, lambda: torch.ones(600, dtype=torch.bfloat16)),
    (True, lambda: (torch.ones(2), np.ones(3, np.float32)), lambda: torch.zeros(6)),
    (True, lambda: [np.ones(3, np.float32), array.array("f", [2.0])], lambda: np.zeros(4)),
    (True, lambda: [torch.ones(2, requires_grad=True)], lambda: torch.zeros(2)),
    (True, lambda: [torch.ones(0), torch.ones(0, 3)], lambda: torch.zeros(0)),
    (False, list, lambda: torch.zeros(4)),  # nothing to do
    (False, lambda: List([torch.ones(4)]), lambda: torch.zeros(4)),
    (False, lambda: torch.ones(2, 2), lambda: torch.zeros(4)),
    (False, lambda: {0: torch.ones(4)}.values(), lambda: torch.zeros(4)),
    (False, lambda: None, lambda: torch.zeros(4)),
    (False, lambda: [torch.ones(4), None], lambda: torch.zeros(4)),
    (False, lambda: [torch.ones(4), torch.ones(1)], lambda: torch.zeros(4)),  # together too long
    (False, lambda: [torch.ones(2), torch.ones(2).double()], lambda: torch.zeros(4)),
    (False, lambda: [torch.arange(4)], lambda: torch.zeros(4)),
    (False, lambda: [torch.ones(4, dtype=torch.float8_e4m3fn)], lambda: torch.zeros(4)),
    (False, lambda: [ramp(6, torch.float32).reshape(2, 3).t()], lambda: torch.zeros(6)),
    (False, lambda: [torch.ones(1).expand(4)], lambda: torch.zeros(4)),
    (False, lambda: [torch.ones(2, device="meta")], lambda: torch.zeros(4)),
    (False, lambda: [torch.ones(4)], lambda: torch.zeros(4, device="meta")),
    (False, lambda: [torch.ones(2)], lambda: ramp(8, torch.float32)[::2]),
    (False, lambda: [torch.ones(4), frozen(np.ones(4, np.float32))], lambda: frozen(np.ones(8, np.float32))),
]


def bits(x: Any) -> Any:
    """The bytes of every array that has some."""
    if isinstance(x, (list, tuple)):
        return [bits(each) for each in x]
    if isinstance(x, torch.Tensor) and x.is_cpu:
        x = x.detach().contiguous().flatten().view(torch.uint8).numpy()
    return x.tobytes() if isinstance(x, np.ndarray) else repr(x)


def packed(comm: Communicator, scale: Any, unpacks: bool, make: Callable[[], Any], bucket: Callable[[], Any]) -> Any:
    """What the call returns or raises, and the bits of all arrays afterwards."""
    x, y = make(), bucket()
    try:
        result = repr(comm.unpack(y, x, scale)) if unpacks else str(comm.pack(x, y, scale) is y)
    except Exception as error:
        result = repr(error)
    return result, bits(x), bits(y)


def test_the_fast_path_packs_and_refuses_the_same_tensors() -> None:
    def both_ways(comm: Communicator) -> None:
        with comm.dup() as careful:
            careful.__class__ = LongWay
            for unpacks, scale in itertools.product((False, True), (1.0, 1, 1 / 3, -2, float("nan"))):
                for short, tensors, bucket in LISTS:
                    what = scale, unpacks, tensors, bucket
                    assert packed(comm, *what) == packed(careful, *what)
                    if not short or scale == 1:
                        assert comm._pack_plain(tensors(), bucket(), scale, None, unpacks) == short
            tensors, bucket = lambda: [torch.ones(2)], partial(torch.zeros, 2)
            for scale in (True, None, "1", float("inf"), 1 << 40, 1 << 2000, np.float64(0.5), np.float32(0.5)):
                assert packed(comm, scale, False, tensors, bucket) == packed(careful, scale, False, tensors, bucket)
            for each in (comm, careful):
                with pytest.raises(ringcomm.InvalidArgumentError, match="calls have no stream"):
                    each.pack(tensors(), bucket(), stream=0)
        with pytest.raises(ringcomm.ClosedError):
            careful.pack(tensors(), bucket())

    ringcomm.run_ranks(both_ways, 1)


def test_tensors_in_the_bucket_are_packed_as_if_they_were_apart() -> None:
    def both_ways(comm: Communicator) -> None:
        with comm.dup() as careful:
            careful.__class__ = LongWay
            for scale, shift in itertools.product((1.0, 0.5), (0, 1, 3, 7)):
                for unpacks in (False, True):
                    expected = ramp(12, torch.float32)
                    apart = [each.clone() for each in parts_of(expected[shift:], 2, 3)]
                    if unpacks:
                        comm.unpack(expected.clone(), apart, scale)
                        for part, value in zip(parts_of(expected[shift:], 2, 3), apart, strict=True):
                            part.copy_(value)
                    else:
                        comm.pack(apart, expected, scale)
                    for each in (comm, careful):
                        bucket = ramp(12, torch.float32)
                        tensors = parts_of(bucket[shift:], 2, 3)
                        assert not comm._pack_plain(tensors, bucket, scale, None, unpacks)
                        each.unpack(bucket, tensors, scale) if unpacks else each.pack(tensors, bucket, scale)
                        assert bucket.tolist() == expected.tolist()

    ringcomm.run_ranks(both_ways, 1)


# ---- autograd ------------------------------------------------------------------------------------------------------


def _writes(comm: Communicator) -> dict[str, tuple[Callable[[], Any], torch.Tensor | None, torch.Tensor]]:
    """Every way to write to a tensor: (call, the tensor that it writes to on this rank, one that it only reads)."""
    x, y, kept, wide = torch.ones(4), torch.ones(8), torch.ones(4), torch.ones(4, 2)
    parts, column, other = [torch.ones(4) for _ in range(2)], wide[:, 0], 1 - comm.rank

    def receive(later: bool) -> None:
        work = comm.isend(kept, other)
        if later:
            comm.irecv(x, other).wait()
        else:
            comm.recv(x, other)
        work.wait()

    first = comm.rank == 0
    here: torch.Tensor | None = x if first else None
    return {
        "all_reduce": (lambda: comm.all_reduce(x), x, kept),
        "all_reduce async": (lambda: comm.all_reduce(x, async_op=True).wait(), x, kept),
        "all_reduce column": (lambda: comm.all_reduce(column), wide, kept),
        "all_reduce column async": (lambda: comm.all_reduce(column, async_op=True).wait(), wide, kept),
        "all_reduce ring": (lambda: comm.all_reduce(x, algorithm="ring"), x, kept),
        "all_reduce out": (lambda: comm.all_reduce(kept, out=x), x, kept),
        "all_reduce premul_sum": (lambda: comm.all_reduce(kept, "premul_sum", factor=2.0, out=x), x, kept),
        "all_reduce_coalesced": (lambda: comm.all_reduce_coalesced([x, y]), y, kept),
        "all_reduce_coalesced async": (lambda: comm.all_reduce_coalesced([x, y], async_op=True).wait(), y, kept),
        "reduce": (lambda: comm.reduce(x, 0), here, kept if first else x),
        "reduce_scatter": (lambda: comm.reduce_scatter(y, out=x), x, y),
        "reduce_scatter_list": (lambda: comm.reduce_scatter_list(parts, x), x, parts[0]),
        "all_gather": (lambda: comm.all_gather(kept, out=y), y, kept),
        "all_gather async": (lambda: comm.all_gather(kept, out=y, async_op=True).wait(), y, kept),
        "all_gather_list": (lambda: comm.all_gather_list(kept, parts), parts[1], kept),
        "all_to_all": (lambda: comm.all_to_all(torch.ones(8), out=y), y, kept),
        "all_to_all_list": (lambda: comm.all_to_all_list([kept] * 2, parts), parts[0], kept),
        "broadcast": (lambda: comm.broadcast(x, 1), here, kept if first else x),
        "broadcast column": (lambda: comm.broadcast(column, 1), wide if first else None, kept if first else wide),
        "gather": (lambda: comm.gather(kept, 0, out=y if first else None), y if first else None, kept),
        "gather_list": (lambda: comm.gather_list(kept, parts if first else None, 0), parts[0] if first else None, kept),
        "scatter": (lambda: comm.scatter(y, 1, out=x), x, y),
        "scatter_list": (lambda: comm.scatter_list(parts, x, 1), x, parts[0]),
        "recv": (lambda: receive(False), x, kept),
        "irecv": (lambda: receive(True), x, kept),
        "sendrecv": (lambda: comm.sendrecv(kept, other, x, other), x, kept),
        "pack": (lambda: comm.pack([kept], x), x, kept),
        "pack column": (lambda: comm.pack([kept], column), wide, kept),
        "unpack": (lambda: comm.unpack(y, parts), parts[1], y),
        "unpack of two libraries": (lambda: comm.unpack(y, [np.ones(4, np.float32), x]), x, y),
        "unpack column": (lambda: comm.unpack(y, [x, column]), wide, y),
    }


def _counted_writes(comm: Communicator, inference: bool) -> None:
    for name in _writes(comm):
        with torch.inference_mode(inference):
            call, written, read = _writes(comm)[name]
            before = [0, 0] if inference else [-1 if written is None else written._version, read._version]
            call()
        if not inference:  # such tensors have no counter
            assert written is None or written._version > before[0], name
            assert read._version == before[1], name


@pytest.mark.parametrize("inference", [False, True])
def test_every_write_to_a_tensor_counts_as_one(inference: bool) -> None:
    ringcomm.run_ranks(_counted_writes, 2, inference, timeout=60)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_backward_refuses_values_that_a_collective_has_replaced(grad: bool, later: bool) -> None:
    def fn(comm: Communicator) -> None:
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        z = (y * y).sum()
        with torch.set_grad_enabled(grad):
            work = comm.all_reduce(y, async_op=later)
        if later:
            work.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
        leaf = torch.ones(3, requires_grad=True)
        comm.all_reduce(leaf)  # as torch.distributed, with grad mode on too
        assert leaf.tolist() == [2.0] * 3
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [4.0] * 3
        inside = torch.ones(2)
        with torch.inference_mode():
            comm.all_reduce(inside)  # an ordinary tensor, which has a counter
            made = torch.ones(2)
        comm.all_reduce(made)  # an inference tensor, which has none
        assert inside.tolist() == made.tolist() == [2.0] * 2

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_masked_arrays_are_refused() -> None:
    def fn(comm: Communicator) -> None:
        x = np.ma.masked_array(np.ones(4, np.float32), [True, False, False, False])
        plain = np.ones(4, np.float32)
        for call in (
            lambda: comm.all_reduce(x),
            lambda: comm.all_reduce(np.ma.masked_array(plain)),  # without a mask too, or ranks would differ
            lambda: comm.all_gather(x),
            lambda: comm.all_gather(plain, out=np.ma.masked_array(np.ones(8, np.float32))),
            lambda: comm.send(x, 1 - comm.rank),
            lambda: comm.pack([x], plain),
        ):
            with pytest.raises(ringcomm.InvalidArgumentError, match=r"masked array.*pass x\.filled\(value\)"):
                call()
        assert comm.all_reduce(x.filled(3)).tolist() == [6, 2, 2, 2]

    ringcomm.run_ranks(fn, 2, timeout=30)


def test_integers_of_fewer_than_8_bits_are_refused() -> None:
    """DLPack gives them as such of 8 bits."""

    def rank(comm: ringcomm.Communicator) -> None:
        x = torch.tensor([9, 15], dtype=torch.uint8).view(torch.uint4)
        for call in (comm.all_reduce, partial(comm.all_reduce, async_op=True), partial(comm.all_reduce, timeout=5)):
            with pytest.raises(errors.DtypeError, match="got uint4"):
                call(x)
        assert comm.all_reduce(torch.ones(2, dtype=torch.uint8)).tolist() == [2, 2]

    ringcomm.run_ranks(rank, 2, timeout=10)
