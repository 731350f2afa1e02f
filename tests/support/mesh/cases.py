"""A small model, its plain training in one process, and its training on any mesh: what the mesh tests compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.context import positions, ring_attention, shard_sequence
from ringcomm.data_parallel.optim.norm import total_norm
from ringcomm.modules.shard_spec import ShardSpec, part_of, take
from ringcomm.pipeline_parallel.pipeline import Pipeline
from ringcomm.pipeline_parallel.split import split
from ringcomm.tensor_parallel.plan import Colwise, parallelize
from tests.support.seeded import seeded

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 37, 16, 4, 8, 4  # the vocabulary is padded on 2 and 4 ranks
MICROBATCHES, BATCH = 4, 8
PLAN = {
    "blocks.*": "heads",
    "blocks.*.qkv": Colwise(parts=3),
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "token": "vocab",
    "head": Colwise(gather_output=True, pad=True),
}


class Seen(nn.Module):
    """Counts: a buffer of what each rank has seen, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.detach().float().sum()
        self.calls += 1
        return x

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    attend = staticmethod(attention)

    def __init__(self, checkpointed: bool = False, seen: bool = False) -> None:
        super().__init__()
        self.heads, self.checkpointed = HEADS, checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen = Seen() if seen else nn.Identity()

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._compute, x, use_reentrant=False) if self.checkpointed else self._compute(x)
        return self.seen(x)


class Net(nn.Module):
    """A decoder with a tied output layer; a frozen parameter, and with ``seen`` buffers and other state."""

    def __init__(self, checkpointed: bool = False, seen: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed, seen) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.blocks[1].norm.bias.requires_grad_(False)
        self.places: torch.Tensor | None = None  # of a part of a sequence

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]) if self.places is None else self.places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(seed: int = 0, **options: Any) -> Net:
    return seeded(Net(**options), seed)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(1, 1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups; ``eps`` keeps rounding errors of gradients that are zero, those of keys' biases, from steering."""
    params = [p for p in model.parameters() if p.requires_grad]
    wide = {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1}
    return torch.optim.AdamW(
        [wide, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}], lr=1e-2, eps=1e-3
    )


def run(axes: dict[str, int], body: Callable[..., Any], model: Net | None = None, **options: Any) -> list[Any]:
    """``body(job)`` on every rank of a mesh."""
    world = 1
    for extent in axes.values():
        world *= extent
    models = [copy.deepcopy(model if model is not None else make(**options)) for _ in range(world)]

    def rank(comm: Any) -> Any:
        return body(models[comm.rank], ringcomm.init_mesh(axes, comm))

    return ringcomm.run_ranks(rank, world, ranks="threads", timeout=60)


class Job:
    """A model on a mesh."""

    def __init__(
        self, model: Net, mesh: Any, stage: int = 0, *, schedule: str = "1f1b", chunks: int = 1, ties: str = "exact",
        plan: Any = PLAN, make_optimizer: Callable[[nn.Module], Any] = adamw, assigned: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        self.mesh = mesh
        if mesh.size("tp") > 1:
            parallelize(model, plan, mesh["tp"])
        if mesh.size("cp") > 1:
            model.places = positions(LENGTH, mesh["cp"])
            for block in model.blocks:
                block.attend = partial(ring_attention, comm=mesh["cp"], causal=True)
        self.data = mesh.size("dp") * mesh.size("replicate") * mesh.size("shard")
        self.number = mesh.coordinates.get("replicate", 0) * mesh.size("shard") + mesh.coordinates.get("shard", 0)
        self.number += mesh.coordinates.get("dp", 0)
        stages = mesh.size("pp") * chunks
        cuts = [f"blocks.{LAYERS // stages * i}" for i in range(1, stages)]
        comm = mesh["pp"] if "pp" in mesh.names else ringcomm.init(0, 1)
        count = MICROBATCHES // self.data
        self.pipe = Pipeline(split(model, cuts), comm, microbatches=count, schedule=schedule, loss=loss_of, ties=ties)
        if assigned:  # the same values in other parameters
            state = {name: x.clone() for name, x in self.pipe.state_dict().items()}
            self.pipe.load_state_dict(state, assign=True)
        self.optimizer = make_optimizer(self.pipe)
        settings = {"bucket_cap_mb": 0.005, "accumulation": "tree", **settings}
        ringcomm.shard(self.pipe, self.optimizer, stage, mesh=mesh, **settings)

    def forward_backward(self, step: int, scaler: Any = None) -> torch.Tensor:
        """The mean loss over all ranks."""
        x, y = (each.chunk(self.data)[self.number] for each in batch(step))
        if self.mesh.size("cp") > 1:
            x, y = (shard_sequence(each, self.mesh["cp"]) for each in (x, y))
        loss = self.pipe.step(x, target=y, scaler=scaler).reshape(1)
        for name in ("dp", "shard", "replicate", "cp"):
            if name in self.mesh.names:
                self.mesh[name].all_reduce(loss, "avg")
        return loss[0]

    def train(self, first: int, last: int, clip: float = 0.5) -> tuple[list[float], list[float]]:
        """Losses and norms."""
        losses, norms = [], []
        for step in range(first, last):
            losses.append(float(self.forward_backward(step)))
            norms.append(self.clip_and_step(clip))
        return losses, norms

    def clip_and_step(self, clip: float = 0.5) -> float:
        """The norm."""
        norm = float(ringcomm.clip_grad_norm_(self.pipe, clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def parts(self) -> dict[str, tuple[ShardSpec, torch.Tensor]]:
        """By its names in the whole model, where this rank's part of each parameter lies, and the part."""
        found = {}
        with ringcomm.whole(self.pipe):
            for name, p in self.pipe.named_parameters(remove_duplicate=False):
                found[name] = (part_of(p), p.detach().clone())
        return found


def pieces_of(whole: torch.Tensor, part: ShardSpec, local: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor what a rank is to have."""
    return whole if part.dim is None else take(whole, part, local.shape[part.dim])


def plain_gradients(model: nn.Module, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The losses of a plain model's micro-batches, and its gradients, added in a balanced tree."""
    losses, grads = [], []
    for x, y in zip(*(each.chunk(MICROBATCHES) for each in batch(step)), strict=True):
        loss = loss_of(model(x), y)
        params = [p for p in model.parameters() if p.requires_grad]
        grads.append([g / MICROBATCHES for g in torch.autograd.grad(loss, params)])
        losses.append(loss.detach())
    while len(grads) > 1:
        grads = [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(grads[::2], grads[1::2], strict=True)]
    return losses, grads[0]


def mean_loss(losses: list[torch.Tensor], ranks: int) -> float:
    """Added up in order on each of the data parallel ranks, and over these in a tree."""
    count = len(losses) // ranks
    sums = [
        sum((each / count for each in losses[i : i + count]), torch.zeros(())) for i in range(0, len(losses), count)
    ]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return float(sums[0] / ranks)


def plain(
    model: nn.Module, first: int, last: int, clip: float = 0.5
) -> tuple[list[list[torch.Tensor]], list[float], Any]:
    """One process: the micro-batches' losses, the norms, and the optimizer."""
    optimizer, losses, norms = adamw(model), [], []
    for step in range(first, last):
        each, grads = plain_gradients(model, step)
        norms.append(plain_step(model, optimizer, grads, clip))
        losses.append(each)
    return losses, norms, optimizer


def plain_step(model: nn.Module, optimizer: Any, grads: list[torch.Tensor], clip: float = 0.5) -> float:
    """Clips and steps; the norm."""
    norm = total_norm(grads, 2.0, None, sum(g.numel() for g in grads))
    assert torch.allclose(norm, torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])), rtol=1e-5)
    factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for p, g in zip([p for p in model.parameters() if p.requires_grad], grads, strict=True):
        p.grad = g.mul_(factor)
    optimizer.step()
    return float(norm)
