"""Arrays on a real GPU: torch tensors and CuPy arrays, their streams and their memory. Several ranks share one device.

What the kernels compute is tested without a GPU (test_engine.py); this is what the host cannot stand for.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import _C, Communicator, errors
from tests.support.reference import DTYPES, ops_of, reduced, same_bits, values

WHY_NOT = _C.why_no_cuda() or ("" if torch.cuda.is_available() else "torch sees no CUDA device")
EMULATED = _C.build_info()["cuda"] == "emulated"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT) or EMULATED, reason=f"needs a GPU: {WHY_NOT or 'devices are emulated'}"),
]
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy; pip install cupy-cuda13x")
BUSY = 200_000_000  # cycles: about a tenth of a second


def ranks(fn: Any, world_size: int = 3, kind: str = "threads") -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks=kind, timeout=60, device="cuda:0")


def on_gpu(comm: Communicator, dtype: str, rank: int, count: int) -> torch.Tensor:
    return values(dtype, rank, count).to(comm.device)


def bits_of_every_type(comm: Communicator) -> None:
    for dtype in DTYPES:
        for op in ops_of(dtype):
            for count in (1, 1000, 70_001):
                everyone = [values(dtype, rank, count) for rank in range(comm.world_size)]
                factor = {"factor": 0.3 + 0.5 * comm.rank} if op == "premul_sum" else {}
                got = comm.all_reduce(everyone[comm.rank].to(comm.device), op, **factor)
                assert same_bits(got.cpu(), reduced(everyone, op)), f"{dtype} {op} {count}"


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_bits(kind: str) -> None:
    ranks(bits_of_every_type, 3, kind)


def layouts_of_torch(comm: Communicator) -> None:
    total = comm.world_size
    for make in (
        lambda: torch.ones(6, 4, device=comm.device).t(),
        lambda: torch.ones(8, 8, device=comm.device)[:, 1:7:2],
        lambda: torch.ones((), device=comm.device),
        lambda: torch.nn.Parameter(torch.ones(5, device=comm.device)),
    ):
        x = make()
        assert comm.all_reduce(x) is x
        assert bool((x == total).all())
    gathered = comm.all_gather(torch.full((2,), float(comm.rank), device=comm.device))
    assert str(gathered.device) == comm.device
    assert gathered.tolist() == [float(r) for r in range(total) for _ in range(2)]
    with pytest.raises(errors.DeviceError, match="on cpu, this communicator serves cuda:0"):
        comm.all_reduce(torch.ones(3))


def test_torch_tensors() -> None:
    ranks(layouts_of_torch)


def side_streams(comm: Communicator) -> None:
    """A call runs behind what its stream was told before, and what comes after on that stream sees its result."""
    for given in (False, True):
        side = torch.cuda.Stream(comm.device)
        x = torch.zeros(1 << 20, device=comm.device)
        side.wait_stream(torch.cuda.current_stream(comm.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY)
            x.fill_(1)
            if not given:
                comm.all_reduce(x)
        if given:
            comm.all_reduce(x, stream=side)
        with torch.cuda.stream(side):
            y = x * 2
        side.synchronize()
        assert bool((y == 2 * comm.world_size).all()), f"{given=}"


def work_joins(comm: Communicator) -> None:
    x = torch.zeros(1 << 20, device=comm.device)
    torch.cuda._sleep(BUSY)
    x.fill_(1)
    strided = torch.ones(64, 32, device=comm.device).t()
    work, other = comm.all_reduce(x, async_op=True), comm.all_reduce(strided, async_op=True)
    assert not work.done, "the host waited for the device"
    assert work.wait() is x
    y = x + 1
    assert other.wait() is strided
    assert bool((y == comm.world_size + 1).all())
    assert bool((strided == comm.world_size).all())
    assert work.synchronize() is x
    assert work.is_completed()
    for i in range(200):  # dropped handles: the memory must outlive the calls
        comm.all_reduce(torch.full((1 << 16,), float(i), device=comm.device), async_op=True)
    comm.synchronize()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_streams(kind: str) -> None:
    ranks(side_streams, 2, kind)
    ranks(work_joins, 2, kind)


def replayed(comm: Communicator) -> None:
    x = torch.ones(4096, device=comm.device)
    comm.all_reduce(x)
    comm.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        comm.all_reduce(x)
    for turn in range(1, 4):
        x.fill_(turn)
        graph.replay()
        torch.cuda.synchronize(comm.device)
        assert bool((x == turn * comm.world_size).all())
    comm.barrier()


@pytest.mark.parametrize(("world_size", "kind"), [(1, "threads"), (2, "processes")])
def test_a_captured_graph_is_replayed(world_size: int, kind: str) -> None:
    ranks(replayed, world_size, kind)


def lent(comm: Communicator) -> None:
    x = comm.empty((3, 5), "bfloat16")
    assert (str(x.device), x.dtype) == (comm.device, torch.bfloat16)
    x.fill_(1)
    assert float(comm.all_reduce(x).sum()) == 15 * comm.world_size
    for i in range(30):
        y = comm.empty(1 << 20)
        y.fill_(i)
        comm.all_reduce(y)
        assert float(y[-1]) == i * comm.world_size
    with pytest.raises(errors.InvalidArgumentError, match="like='numpy'"):
        comm.empty(3, like="numpy")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_lent_memory(kind: str) -> None:
    ranks(lent, 2, kind)


def buckets(comm: Communicator) -> None:
    xs = [on_gpu(comm, "bfloat16", i, n) for i, n in enumerate((100, 1, 0, 4097))]
    bucket = comm.empty(sum(len(x) for x in xs) + 2, torch.float32)
    comm.pack(xs, bucket, 0.5)
    assert same_bits(bucket[:-2], torch.cat(xs).float() * 0.5)
    comm.unpack(bucket, xs, 2.0)
    assert same_bits(torch.cat(xs), (bucket[:-2] * 2).bfloat16())
    grads = [on_gpu(comm, "float32", 10 * i + comm.rank, n) for i, n in enumerate((5, 0, 999, 70_000))]
    comm.all_reduce_coalesced(grads, "avg")
    for i, grad in enumerate(grads):
        everyone = [values("float32", 10 * i + r, len(grad)) for r in range(comm.world_size)]
        assert same_bits(grad.cpu(), reduced(everyone, "avg"))


def test_buckets_and_lists() -> None:
    ranks(buckets)


def cupy_arrays(comm: Communicator) -> None:
    import cupy

    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.ones((4, 6), cupy.float32)
        assert comm.all_reduce(x) is x
        assert bool((x == comm.world_size).all())
        columns = cupy.ones((4, 6), cupy.float32).T
        comm.all_reduce(columns)
        assert bool((columns == comm.world_size).all())
        gathered = comm.all_gather(cupy.full(3, comm.rank, cupy.int64))
        assert isinstance(gathered, cupy.ndarray)
        assert gathered.reshape(-1, 3)[:, 0].tolist() == list(range(comm.world_size))
        lent = comm.empty((2, 2), "float32", like="cupy")
        assert isinstance(lent, cupy.ndarray)
        lent[...] = 1
        assert float(comm.all_reduce(lent).sum()) == 4 * comm.world_size
        stream.synchronize()


class OnlyInterface:
    """An array of a library with nothing but __cuda_array_interface__; torch made it on some stream."""

    def __init__(self, tensor: torch.Tensor, stream: int | None) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream}


class OnlyDlpack:
    """An array of a library with nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


def other_libraries(comm: Communicator) -> None:
    side = torch.cuda.Stream(comm.device)
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 20, device=comm.device)
        torch.cuda._sleep(BUSY)
        x.fill_(1)
    comm.all_reduce(OnlyInterface(x, side.cuda_stream))  # waits for the stream that the array names
    assert bool((x == comm.world_size).all())
    y = torch.ones(10, device=comm.device, dtype=torch.bfloat16)
    comm.all_reduce(OnlyDlpack(y))
    assert y.tolist() == [float(comm.world_size)] * 10


@needs_cupy
def test_cupy_arrays() -> None:
    ranks(cupy_arrays)


def test_arrays_of_other_libraries() -> None:
    ranks(other_libraries)
