"""Memory of the program that peers in other processes read and write in place: allocations of torch, expandable
segments, pools, symmetric memory; what is freed and used again. Small calls: the processes share the GPU by turns."""

from __future__ import annotations

import pytest
import torch

import ringcomm
from ringcomm import Communicator
from tests.gpu.on_gpu import PLACE, in_processes, ranks, real

pytestmark = [in_processes, real]
MIB = 1 << 20
LEAST = 70_000  # numbers: fewer go as packets, which no peer reads from this memory


def visible(comm: Communicator) -> int:
    """Allocations of the rank that has the fewest visible ones."""
    fewest = torch.tensor([int(comm.describe()["visible_buffers"])], device=PLACE)
    return int(comm.all_reduce(fewest, "min"))


def expect_sum(comm: Communicator, x: torch.Tensor, turn: int) -> None:
    """An all_reduce of different values at both ends and in the middle."""
    x.copy_(torch.arange(x.numel(), device=x.device).remainder_(251).add_(turn + comm.rank))
    comm.all_reduce(x)
    n, base = comm.world_size, torch.arange(x.numel(), device=x.device).remainder_(251)
    assert torch.equal(x, base.mul_(n).add_(n * turn + n * (n - 1) // 2).to(x.dtype))


def until_visible(comm: Communicator, tensors: list[torch.Tensor], least: int) -> int:
    """Makes calls until so many allocations of every rank are visible; how many are."""
    for turn in range(40):
        for x in tensors:
            expect_sum(comm, x, turn)
        if (seen := visible(comm)) >= least:
            break
    return seen


def tensors_of_torch(comm: Communicator) -> int:
    """Tensors at several offsets of one allocation: a handle leads to its beginning."""
    whole = torch.zeros(5 * MIB, device=PLACE)  # 20 MiB
    tensors = [whole[at : at + LEAST] for at in (0, 64, 100_000, 4 * MIB)]
    small = [torch.zeros(LEAST, device=PLACE) for _ in range(3)]  # of a segment of 2 MiB that they share
    seen = until_visible(comm, tensors + small, 2)
    for turn in range(5):  # in place from here on, as far as there is room for all at once
        for x in (*tensors, *small, whole):
            expect_sum(comm, x, turn)
    return seen


def freed_and_used_again(comm: Communicator) -> tuple[int, float]:
    """New allocations at the same addresses hold other memory; what was freed comes back to the device. Returns how
    many of 4 allocations had an address that one before them had, and the MiB that did not come back."""
    kept = torch.zeros(100_000, device=PLACE)
    assert until_visible(comm, [kept], 1) >= 1
    torch.cuda.synchronize()
    comm.barrier()
    before, _ = torch.cuda.mem_get_info()
    addresses, again = set(), 0
    for life in range(4):
        x = torch.zeros((64 + life % 2) * MIB, device=PLACE)
        again += x.data_ptr() in addresses
        addresses.add(x.data_ptr())
        assert until_visible(comm, [x[: LEAST + life]], 2) >= 2
        expect_sum(comm, x[:100_000], life)
        del x
        torch.cuda.empty_cache()
    for turn in range(3 * 64):  # a rank looks for freed allocations every 64 calls
        expect_sum(comm, kept, turn)
    torch.cuda.synchronize()
    comm.barrier()
    after, _ = torch.cuda.mem_get_info()
    return again, (before - after) / MIB


def expandable(comm: Communicator) -> int:
    """Chunks of 2 and of 20 MiB behind one another, and a tensor that spans several."""
    tensors = [torch.zeros(count, device=PLACE) for count in (LEAST, 3 * MIB, 12 * MIB)]
    assert torch.cuda.memory.memory_snapshot()[0]["is_expandable"]
    seen = until_visible(comm, tensors, 3)
    del tensors[2]
    torch.cuda.empty_cache()
    tensors.append(torch.zeros(13 * MIB, device=PLACE))
    return min(seen, until_visible(comm, tensors, seen))


def pool(comm: Communicator) -> None:
    """What torch allocates in it is visible at once, also in a graph."""
    with torch.cuda.use_mem_pool(comm.mem_pool(64 * MIB)):
        x, y = torch.zeros(LEAST, device=PLACE), torch.zeros(90_001, device=PLACE)
    for turn in range(3):
        expect_sum(comm, x, turn)
        expect_sum(comm, y, turn)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        comm.all_reduce(y)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_reduce(x)
        for turn in range(3):
            x.fill_(comm.rank + turn)
            graph.replay()
            stream.synchronize()
            assert bool((x == sum(r + turn for r in range(comm.world_size))).all())
    net = torch.nn.Linear(200, 300).to(PLACE)
    with torch.cuda.use_mem_pool(comm.mem_pool(64 * MIB)):
        model = ringcomm.DistributedDataParallel(net, comm)
    for _ in range(2):
        model(torch.ones(4, 200, device=PLACE) * (comm.rank + 1)).sum().backward()
    grads = [p.grad for p in net.parameters()]
    assert all(g is not None and torch.equal(comm.broadcast(g.clone(), 0), g) for g in grads)


def symmetric(comm: Communicator) -> int:
    from torch.distributed import _symmetric_memory

    x = _symmetric_memory.empty(MIB, dtype=torch.float32, device=torch.device(PLACE))
    return until_visible(comm, [x[:LEAST], x[500_000:], x], 1)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.more)])
def test_tensors_of_torch_become_visible(world_size: int) -> None:
    assert ranks(tensors_of_torch, world_size, kind="processes")[0] >= 2


def test_freed_memory_is_used_again() -> None:
    found = ranks(freed_and_used_again, 2, kind="processes")
    print(f"addresses used again and MiB that did not come back, by rank: {found}")
    assert min(again for again, _ in found) > 0, "the driver gave no address twice: nothing was tried"
    assert max(lost for _, lost in found) < 64, found


def test_expandable_segments_become_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert ranks(expandable, 2, kind="processes")[0] >= 3


def test_a_pool_of_torch_is_visible_at_once() -> None:
    ranks(pool, 2, kind="processes")


def test_symmetric_memory_becomes_visible() -> None:
    assert ranks(symmetric, 2, kind="processes")[0] >= 1
