"""Hybrid sharding: shards inside a row of the mesh, replicas along its columns, and the bits of one flat world."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.fully_shard import fully_shard
from ringcomm.data_parallel.model import partition
from ringcomm.data_parallel.shard import shard
from ringcomm.modules.precision import MixedPrecision
from tests.support import torch_ranks
from tests.support.same import differences

pytestmark = pytest.mark.usefixtures("one_thread")
WORLD = 4
WIDTH = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        return x + (self.odd(h) if odd else h)


class Net(nn.Module):
    """One layer of each block is used by rank 3 alone, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, odd)
        return self.head(x)


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


Result = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any], torch.Tensor]


def train(rank: int, model: nn.Module, optimizer: Any) -> Result:
    losses, norms = [], []
    for step in range(3):
        for k in range(2):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * k + rank))
            loss = model(x, rank == 3).square().mean()
            loss.backward()
            losses.append(loss.detach())
        norms.append(ringcomm.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return torch.stack(losses), state, optimizer.state_dict(), torch.stack(norms)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def pair_of(comm: Any, columns: int) -> tuple[Any, Any]:
    """Over a mesh of rows of this length: the communicators of the rank's row and of its column."""
    return comm.split(comm.rank // columns), comm.split(comm.rank % columns)


def on_ranks(fn: Callable[[Any, Any], Any]) -> list[Any]:
    models = [make(seed) for seed in range(WORLD)]  # all ranks get rank 0's
    return ringcomm.run_ranks(lambda comm: fn(comm, models[comm.rank]), WORLD, ranks="threads", timeout=30)


OPTIONS = {
    "plain": {},
    "half": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "tree": {"accumulation": "tree"},
}


@pytest.mark.parametrize("columns", [2, 1, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_are_those_of_one_flat_world(columns: int, options: str) -> None:
    def flat(comm: Any, model: Any) -> Result:
        return train(comm.rank, *shard(model, adamw(model), 2, comm, **OPTIONS[options]))

    expected = on_ranks(flat)
    for stage in (0, 1, 2, 3):

        def rank(comm: Any, model: Any, stage: int = stage) -> Result:
            return train(comm.rank, *shard(model, adamw(model), stage, pair_of(comm, columns), **OPTIONS[options]))

        for a, b in zip(expected, on_ranks(rank), strict=True):
            assert differences(a, b) == []


def test_fully_shard_over_a_pair() -> None:
    def composed(comm: Any, model: Any) -> Result:
        pair = pair_of(comm, 2)
        for block in model.blocks:
            fully_shard(block, comm=pair)
        fully_shard(model, comm=pair)
        assert model.head.weight._ringcomm.bucket.layout.world_size == 2
        return train(comm.rank, model, adamw(model))

    expected = on_ranks(lambda comm, model: train(comm.rank, *shard(model, adamw(model), 3, comm)))
    for a, b in zip(expected, on_ranks(composed), strict=True):
        assert differences(a, b) == []


def test_bucket_sizes_are_agreed_over_the_whole_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that measures another latency must not cut other buckets than the row with which it averages."""
    here = threading.local()

    def clock() -> float:
        """In the first row every message takes as long, in the other long ones alone take time."""
        here.calls = getattr(here, "calls", -1) + 1
        long = here.calls // 2 >= partition.PROBES[0][1]
        here.now = getattr(here, "now", 0.0)
        if here.calls % 2:
            here.now += 1e-3 if here.rank < 2 else (1e-2 if long else 1e-6)
        return here.now

    def rank(comm: Any, model: Any) -> int:
        here.rank = comm.rank
        return partition.measured_bucket_bytes(DataParallelGroup(*pair_of(comm, 2)))

    monkeypatch.setattr("time.perf_counter", clock)
    found = on_ranks(rank)
    assert len(set(found)) == 1


def _in_processes() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make(rank)
    expected = train(rank, *shard(model, adamw(model), 2))
    for stage in (1, 2, 3):
        model = make(rank)
        assert differences(expected, train(rank, *shard(model, adamw(model), stage, mesh=mesh))) == []
    model = make(rank)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    units = {id(group.ranks) for group in model._ringcomm.unit.flat.buckets}
    assert len(units) == 1
    assert differences(expected, train(rank, model, adamw(model))) == []
    row = make(rank)
    fully_shard(row, mesh=mesh["shard"])  # one axis of it: rows train apart
    outer = nn.Sequential(row, nn.Linear(2, 2))
    with pytest.raises(ringcomm.UnsupportedError, match="got other ranks than for a submodule"):
        fully_shard(outer, mesh=mesh)


@pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory between processes")
def test_a_device_mesh_in_processes() -> None:
    torch_ranks.run(_in_processes, world_size=WORLD)
