"""What tests/cuda/test_training.py runs in a Python that has the emulated CUDA engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.data_parallel.buckets.group import DataParallelGroup

Outcome = tuple[list[bytes], dict[str, bytes]]


class Net(nn.Module):
    """Two blocks between a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embed.weight)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def train(comm: ringcomm.Communicator, model: nn.Module, stage: int, precision: Any, offload: bool = False) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.002, mixed_precision=precision, offload=offload)
    place = next(model.parameters()).device
    losses = []
    for step in range(3):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + comm.rank)
            tokens = torch.randint(17, (2, 5), generator=generator).to(place)
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten().roll(1))
            if part == 0:
                with ringcomm.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            losses.append(bits(loss))
        losses.append(bits(ringcomm.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: bits(value) for name, value in model.state_dict().items()}


def train_on(comm: ringcomm.Communicator, stage: int, dtype: str, place: str, offload: bool = False) -> Outcome:
    """The same in a process of its own, on torch's device ``place``."""
    torch.manual_seed(0)
    precision = ringcomm.MixedPrecision(getattr(torch, dtype)) if dtype else None
    return train(comm, Net().to(place), stage, precision, offload)


def every_stage(comm: ringcomm.Communicator, place: str) -> int:
    """Trains at every stage; how many runs had the bits of stage 0."""
    same = 0
    for dtype in ("", "bfloat16"):
        expected = train_on(comm, 0, dtype, place)
        for stage in (1, 2, 3):
            assert train_on(comm, stage, dtype, place) == expected, f"stage {stage} {dtype} differs from stage 0"
            same += 1
    return same


def without_host_waits(comm: ringcomm.Communicator, stage: int, place: str) -> dict[str, bytes]:
    torch.manual_seed(0)
    model = Net().to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.002)
    generator = torch.Generator().manual_seed(comm.rank)
    batches = torch.randint(17, (4, 2, 5), generator=generator).to(place)
    for tokens in batches:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: bits(value) for name, value in model.state_dict().items()}


def late_collectives(comm: ringcomm.Communicator, place: str) -> None:
    """Trains at every stage with collectives that come 10 ms after what the current stream does meanwhile."""
    expected = without_host_waits(comm, 0, place)
    usual = DataParallelGroup.on_side_stream

    def late(self: DataParallelGroup, x: torch.Tensor) -> Any:
        inside = usual(self, x)
        for stream in self._streams.values():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
        return inside

    DataParallelGroup.on_side_stream = late  # type: ignore[method-assign]  # in a process of its own
    for stage in range(4):
        assert without_host_waits(comm, stage, place) == expected, f"stage {stage}"


def outcome(world_size: int, stage: int, device: str, precision: Any) -> list[Outcome]:
    models = []
    for _ in range(world_size):
        torch.manual_seed(0)
        models.append(Net())

    def rank(comm: ringcomm.Communicator) -> Outcome:
        return train(comm, models[comm.rank], stage, precision)

    return ringcomm.run_ranks(rank, world_size, device=device, timeout=60)


def stages(world_size: int, dtype: str) -> None:
    precision = ringcomm.MixedPrecision(getattr(torch, dtype)) if dtype else None
    expected = outcome(world_size, 0, "cpu", precision)
    for stage in range(4):
        assert outcome(world_size, stage, "cuda:0", precision) == expected, f"stage {stage} differs from the CPU engine"
