"""Small models with every difficulty, and one training loop for them: on ranks at any stage, and in one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import ringcomm

TOKENS, WIDTH, LENGTH = 13, 10, 3
BUCKETS_MB: tuple[float | None, ...] = (25, 0.001, None)  # None: measured
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    world_size: int = 3
    accumulate: int = 1
    no_sync: bool = True  # whether the micro-batches before the last are kept from the wire
    precision: str = "fp32"  # fp64, bf16 and fp16 (over float32 master weights), autocast
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    some_ranks: bool = False  # a layer that even ranks alone use
    batch_norm: bool = False
    uneven: bool = False
    clip: str = ""  # "2", "inf"
    checkpoint: bool = False
    optimizer: str = "adamw"
    tree: bool = False

    def number(self, rank: int, k: int) -> int:
        """Which micro-batch of a step a rank's k-th is."""
        return 10 * k + rank

    def __str__(self) -> str:
        default = Case()
        return ",".join(
            f"{name}={value}"
            for name, value in vars(self).items()
            if name == "world_size" or value != vars(default)[name]
        )


@dataclass
class Result:
    """What a rank has at the end."""

    losses: torch.Tensor
    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    norms: list[torch.Tensor]


# ---- models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose sizes divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A little language model with the difficulties of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=not case.tied)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.batch_norm:
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        if case.unused:
            self.unused = nn.Linear(3, 5)
        if case.some_ranks:
            self.some_ranks = nn.Linear(WIDTH, WIDTH)
        if case.frozen:
            self.frozen = nn.Linear(WIDTH, WIDTH)
            for part in (self.frozen, self.blocks[1]):
                part.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.case.checkpoint:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        if self.case.batch_norm:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        if self.case.some_ranks and rank % 2 == 0:
            x = x + self.some_ranks(x)
        if self.case.frozen:
            x = self.frozen(x)
        return self.head(x)


def net(case: Case) -> Net:
    """The same model for the same case."""
    torch.manual_seed(0)
    model = Net(case)
    return model.double() if case.precision == "fp64" else model


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """An optimizer over what is trained: two groups, or matrices alone for Muon."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]
    if kind == "muon":
        return torch.optim.Muon(matrices, lr=1e-2)
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True)
    how = {"adamw": {}, "adamw_foreach": {"foreach": True}, "adamw_fused": {"fused": True}}[kind]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, **how)


OPTIMIZERS = ("adamw", "adamw_foreach", "adamw_fused", "sgd", "adafactor", "muon")


def tokens_of(case: Case, rank: int, step: int, k: int) -> torch.Tensor:
    """A rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + case.number(rank, k))
    return torch.randint(TOKENS, (2 + rank if case.uneven else 2, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over a micro-batch."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def context_of(case: Case) -> contextlib.AbstractContextManager[Any]:
    """What forward runs in."""
    return torch.autocast("cpu", torch.bfloat16) if case.precision == "autocast" else contextlib.nullcontext()


# ---- training ------------------------------------------------------------------------------------------------------

Clip = Callable[..., torch.Tensor]


def update(
    case: Case, opt: torch.optim.Optimizer, params: Sequence[torch.Tensor], scaler: Any, clip: Clip
) -> list[torch.Tensor]:
    """Clips, steps, forgets the gradients; returns the norm that was clipped."""
    norms = []
    if case.clip:
        if scaler is not None:
            scaler.unscale_(opt)
        norms.append(clip(params, 0.05, norm_type=float(case.clip)))
    if scaler is None:
        opt.step()
    else:
        scaler.step(opt)
        scaler.update()
    opt.zero_grad()
    return norms


def train(
    comm: ringcomm.Communicator,
    model: Net,
    case: Case,
    stage: int,
    bucket_mb: float | None = 25,
    steps: int = 3,
    restages: Sequence[int] = (),
) -> Result:
    """Trains a model of this rank's own; ``restages``: the stages of the steps after the first."""
    opt = optimizer_of(model, case.optimizer)
    types = ringcomm.MixedPrecision(param_dtype=TYPES.get(case.precision))
    how = "tree" if case.tree else "sequential"
    ringcomm.shard(model, opt, stage, comm, mixed_precision=types, bucket_cap_mb=bucket_mb, accumulation=how)
    scaler = ringcomm.GradScaler(init_scale=2.0**12, growth_interval=2) if case.precision == "fp16" else None
    params = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    for step in range(steps):
        if step and step <= len(restages):
            ringcomm.restage(model, opt, restages[step - 1])
        for k in range(case.accumulate):
            quiet = case.no_sync and k < case.accumulate - 1
            with ringcomm.no_sync(model) if quiet else contextlib.nullcontext():
                tokens = tokens_of(case, comm.rank, step, k)
                with context_of(case):
                    loss = loss_of(model(tokens, comm.rank), tokens) / case.accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
                losses.append(loss.detach())
        norms += update(case, opt, params, scaler, ringcomm.clip_grad_norm_)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Result(torch.stack(losses), state, copy.deepcopy(opt.state_dict()), norms)


def train_ranks(case: Case, runs: Sequence[dict[str, Any]], steps: int = 3, timeout: float = 60) -> list[list[Result]]:
    """`train` on threads, once for each of ``runs``; results by run and rank."""
    model = net(case)

    def rank(comm: ringcomm.Communicator) -> list[Result]:
        return [train(comm, copy.deepcopy(model), case, steps=steps, **run) for run in runs]

    by_rank = ringcomm.run_ranks(rank, case.world_size, ranks="threads", timeout=timeout)
    return [list(results) for results in zip(*by_rank, strict=True)]


def train_alone(case: Case, steps: int = 3) -> Result:
    """The same training in one process by torch alone: the mean of the rank means, on every rank's batch."""
    model = net(replace(case, checkpoint=False))  # functional_call does not reach into a recomputation
    opt = optimizer_of(model, case.optimizer)
    dtype = TYPES.get(case.precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) if case.precision == "fp16" else None
    params = [p for p in model.parameters() if p.requires_grad]
    losses, norms = [], []
    for step in range(steps):
        for k in range(case.accumulate):
            parts = []
            for rank in range(case.world_size):
                tokens = tokens_of(case, rank, step, k)
                with context_of(case):
                    cast = {} if dtype is None else {name: p.to(dtype) for name, p in model.named_parameters()}
                    parts.append(loss_of(functional_call(model, cast, (tokens, rank)), tokens) / case.accumulate)
            loss = torch.stack(parts).mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        norms += update(case, opt, params, scaler, torch.nn.utils.clip_grad_norm_)
    return Result(torch.stack(losses), dict(model.state_dict()), opt.state_dict(), norms)


@contextlib.contextmanager
def background_is(value: bool) -> Iterator[None]:
    """Ranks whose collectives run in the background, or not, whatever the machine; entered once for all threads."""
    from ringcomm.data_parallel.buckets import group

    made = group.DataParallelGroup.__init__

    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        self.background = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.DataParallelGroup, "__init__", init)
        yield


# ---- comparing -----------------------------------------------------------------------------------------------------


def flattened(result: Result, losses: bool = True) -> dict[str, torch.Tensor]:
    """Everything that a result holds, by name."""
    found = {f"norm {i}": norm for i, norm in enumerate(result.norms)} | dict(result.parameters)
    if losses:
        found["losses"] = result.losses
    for i, state in result.optimizer["state"].items():
        found |= {f"state {i} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def differences(a: Result, b: Result, losses: bool = True) -> list[str]:
    """Names of what is not equal to the last bit; what only one has, too."""
    first, second = flattened(a, losses), flattened(b, losses)
    missing = sorted(first.keys() ^ second.keys())
    return missing + [name for name in first if name in second and not same_bits(first[name], second[name])]


def differences_of(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[int]:
    """Places where two lists do not hold the same bits."""
    assert len(a) == len(b)
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not same_bits(x, y)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.numel() == 0 or torch.equal(*flat)


def pairwise(axes: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows in which any two values of two axes meet at least once; always the same rows."""
    names = list(axes)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    while open_pairs:
        row = dict(min(open_pairs))
        for axis in (axis for axis in range(len(names)) if axis not in row):
            gained = [
                sum(tuple(sorted(((axis, value), other))) in open_pairs for other in row.items())
                for value in range(len(axes[names[axis]]))
            ]
            row[axis] = gained.index(max(gained))
        open_pairs -= set(itertools.combinations(sorted(row.items()), 2))
        yield {names[axis]: axes[names[axis]][value] for axis, value in sorted(row.items())}


def cases(axes: dict[str, Sequence[Any]]) -> list[Case]:
    """A case for each row of `pairwise`."""
    return [replace(Case(), **row) for row in pairwise(axes)]
