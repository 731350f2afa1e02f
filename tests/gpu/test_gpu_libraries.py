"""Other libraries on the same functions: CuPy, DLPack, torch.distributed with stock DDP, torch.profiler."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from ringcomm import Communicator
from tests.gpu.on_gpu import EMULATED, PLACE, in_processes, ranks, real

pytestmark = in_processes


def cupy_calls(comm: Communicator) -> None:
    import cupy

    total = comm.world_size * (comm.world_size + 1) / 2
    x = cupy.full((1000,), comm.rank + 1, dtype=cupy.float32)
    assert comm.all_reduce(x) is x
    assert bool((x == total).all())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = cupy.full((3, 70), comm.rank + 1, dtype=cupy.float64)
        assert isinstance(comm.all_gather(y), cupy.ndarray)
        comm.all_reduce(y)
        y *= 2
    stream.synchronize()
    assert bool((y == 2 * total).all())
    z = torch.from_dlpack(x)
    comm.all_reduce(z, "max")
    comm.synchronize()
    assert bool((x == total).all())
    lent = comm.empty(100, "float32", like="cupy")
    lent.fill(1)
    comm.all_reduce(lent)
    assert float(lent.sum()) == 100 * comm.world_size


@real
def test_cupy_arrays() -> None:
    pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")
    ranks(cupy_calls, 3)


# ---- torch.distributed -----------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 7)]
    return torch.nn.Sequential(*layers).to(PLACE)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank)).to(PLACE)


def train(net: torch.nn.Module, inputs: Any, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        net(inputs(step)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


def ddp_rank(rank: int, world_size: int, folder: str) -> None:
    import ringcomm  # noqa: F401  registers the backend

    if not EMULATED:
        torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    device = torch.device(PLACE) if PLACE != "cpu" else None
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=world_size, device_id=device)
    try:
        x = torch.full((1000,), float(rank), device=PLACE)
        dist.all_reduce(x)
        assert bool((x == sum(range(world_size))).all())
        net = DistributedDataParallel(model(), bucket_cap_mb=0.002)  # several buckets
        profiled = torch.profiler.ProfilerActivity
        activities = [profiled.CPU] if EMULATED else [profiled.CPU, profiled.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            parameters = train(net, lambda step: batch(rank, step), steps=3)
        seen = {event.key for event in profile.key_averages()}
        assert any("all_reduce" in key or "allreduce" in key for key in seen), sorted(seen)
        torch.save(parameters, Path(folder) / f"parameters{rank}")
    finally:
        dist.destroy_process_group()


def test_stock_ddp_trains_like_one_process() -> None:
    world_size, steps = 2, 3
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.multiprocessing.spawn(ddp_rank, (world_size, folder), nprocs=world_size)
        theirs = [torch.load(Path(folder) / f"parameters{rank}") for rank in range(world_size)]
    everyone = train(model(), lambda step: torch.cat([batch(rank, step) for rank in range(world_size)]), steps)
    for ours, first, second in zip(everyone, *theirs, strict=True):
        assert torch.equal(first, second), "the ranks' parameters differ"
        torch.testing.assert_close(first, ours, rtol=1e-4, atol=1e-5)
