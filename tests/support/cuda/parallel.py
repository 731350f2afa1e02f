"""What tests/cuda/test_training.py and tests/gpu run of tensor, pipeline and context parallel on a CUDA engine."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.tensor_parallel.plan import Colwise
from tests.support.cuda.training import bits

PLAN: dict[str, Any] = {
    "embed": "vocab",
    "blocks.*.0": "colwise",
    "blocks.*.2": "rowwise",
    "head": Colwise(True, pad=True),
}


class Net(nn.Module):
    """Two blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2))
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(
    comm: ringcomm.Communicator, model: nn.Module, axes: dict[str, int], place: str, schedule: str
) -> list[bytes]:
    """Losses, norms and this rank's parameters after two steps on a mesh."""
    mesh = ringcomm.init_mesh(axes, comm)
    model = model.to(place)
    if mesh.size("tp") > 1:
        ringcomm.parallelize(model, PLAN, mesh["tp"])
    stages = ringcomm.split(model, ["blocks.1"] if mesh.size("pp") > 1 else [])
    pipe = ringcomm.Pipeline(stages, mesh["pp"], microbatches=2, schedule=schedule, loss=loss_of, ties="exact")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    ringcomm.shard(pipe, optimizer, 1, mesh=mesh, bucket_cap_mb=0.002)
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(17, (4, 5), generator=generator).to(place)
        found.append(bits(pipe.step(tokens, target=tokens.roll(1))))
        found.append(bits(ringcomm.clip_grad_norm_(pipe, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found + [bits(p) for p in pipe.parameters()]


def train_on(comm: ringcomm.Communicator, axes: dict[str, int], place: str, schedule: str) -> list[bytes]:
    """The same in a process of its own, on torch's device ``place``."""
    torch.manual_seed(0)
    return train(comm, Net(), axes, place, schedule)


def attend(comm: ringcomm.Communicator, place: str) -> list[bytes]:
    """Ring attention's output and gradients of this rank's part of a sequence."""
    from ringcomm.context.sequence import shard_sequence

    generator = torch.Generator().manual_seed(0)
    parts = []
    for heads in (4, 2, 2, 4):
        whole = torch.randn(2, heads, 8 * comm.world_size, 8, generator=generator).to(place)
        parts.append(shard_sequence(whole, comm, dim=2).contiguous())
    q, k, v = (part.requires_grad_() for part in parts[:3])
    out = ringcomm.ring_attention(q, k, v, comm, causal=True)
    out.backward(parts[3])
    return [bits(x) for x in (out, q.grad, k.grad, v.grad)]


def on(device: str, world_size: int, axes: dict[str, int], schedule: str) -> list[list[bytes]]:
    torch.manual_seed(0)
    first = Net()
    models = [copy.deepcopy(first) for _ in range(world_size)]

    def rank(comm: ringcomm.Communicator) -> list[bytes]:
        return train(comm, models[comm.rank], axes, "cpu", schedule) + attend(comm, "cpu")

    return ringcomm.run_ranks(rank, world_size, device=device, timeout=60)


def compositions(axes: dict[str, int], schedule: str) -> None:
    """The emulated CUDA engine and the CPU engine give the same bits."""
    world_size = axes["pp"] * axes["dp"] * axes["tp"]
    assert on("cuda:0", world_size, axes, schedule) == on("cpu", world_size, axes, schedule)
