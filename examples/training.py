"""A step of `train_gpt.py` on any mesh: micro-batches, the optimizer's step, the loss of all ranks."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from gpt import GPT
from mesh import cut
from text import Batch, Batches
from torch import nn

import ringcomm
from ringcomm import checkpoint
from ringcomm.context import context_parallel, positions
from ringcomm.data_parallel.model.place import sharded_model_of

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Loss:
    """Computes the cross entropy of a micro-batch, divided by the number of micro-batches, and the mean loss over the
    micro-batches of all ranks.

    Args:
        passes: micro-batches of a rank in a step.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.found: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        self.found.append(loss.detach())
        return loss / self.passes

    def mean(self, mesh: ringcomm.Mesh) -> float:
        """Returns the step's mean loss, exactly rounded, so that its bits depend only on the micro-batches; a
        collective. Only ranks of the last stage have losses, and ranks that differ only in tp have equal losses."""
        mine = torch.tensor([float(x) for x in self.found] or [0.0] * self.passes, dtype=torch.float64)
        self.found.clear()
        ranks = mesh.comm.world_size
        each = mesh.comm.all_gather(mine, out=mine.new_empty(ranks * self.passes)).view(ranks, self.passes)
        counted = each[ranks - ranks // mesh.size("pp") :: mesh.size("tp")].flatten().tolist()
        return math.fsum(counted) / len(counted)


@dataclass
class Training:
    """A model during training, and its measurements.

    Attributes:
        model: the GPT, a Pipeline of it, or torch's wrapper around it.
        blocked: seconds in communication since the start.
        losses: mean losses of all ranks, by step.
        seconds, blocked_seconds: this rank's times, by step.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    mesh: ringcomm.Mesh
    measure: Loss
    positions: torch.Tensor | None = None
    clip: float = 0.0
    blocked: Callable[[], float] = lambda: 0.0
    seconds: list[float] = field(default_factory=list)
    blocked_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The mean loss of the last 50 steps."""
        return statistics.fmean(self.losses[-50:])

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients only accumulate on this rank."""
        if sharded_model_of(self.model) is not None:
            return ringcomm.no_sync(self.model)
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def attention(self) -> AbstractContextManager[None]:
        """Returns a context in which attention covers complete windows."""
        return context_parallel(self.mesh["cp"]) if self.mesh.size("cp") > 1 else nullcontext()

    def step(self, batches: Sequence[Batch]) -> None:
        """Runs one optimizer step on the mean of the micro-batches' losses."""
        start, blocked = time.perf_counter(), self.blocked()
        together = self.model.microbatches if isinstance(self.model, ringcomm.Pipeline) else 1
        with self.attention():
            for first in range(0, len(batches), together):
                with nullcontext() if first + together >= len(batches) else self.no_sync():
                    self.backward(batches[first : first + together])
        now_blocked = self.blocked()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            ringcomm.clip_grad_norm_(self.model, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.blocked_seconds.append(now_blocked - blocked)
        self.losses.append(self.measure.mean(self.mesh))

    def backward(self, batches: Sequence[Batch]) -> None:
        """Runs forward and backward of one micro-batch, or of as many as a pipeline takes at a time."""
        if isinstance(self.model, ringcomm.Pipeline):
            inputs, targets = (list(each) for each in zip(*batches, strict=True))
            more = {} if self.positions is None else {"positions": [self.positions] * len(inputs)}
            self.model.step(inputs, target=targets, scaler=self.scaler, **more)
            return
        ((x, y),) = batches
        logits = self.model(x) if self.positions is None else self.model(x, self.positions)
        self.scaler.scale(self.measure(logits, y)).backward()

    def save(self, path: str, batches: Batches) -> None:
        """Saves everything that training resumes from; a collective."""
        state = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict(), "losses": self.losses}
        checkpoint.save(path, self.model, self.optimizer, generator=batches.generator.get_state(), **state)

    def resume(self, path: str, batches: Batches) -> int:
        """Loads a checkpoint of any mesh, and returns the number of completed steps; a collective."""
        state = checkpoint.load(path, self.model, self.optimizer)
        batches.generator.set_state(state["generator"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.losses = list(state["losses"])
        return len(self.losses)


def learning_rate(step: int, steps: int) -> float:
    """Returns the learning rate: linear warm-up, then a cosine down to a tenth."""
    warm = max(1, min(20, steps // 10))
    return min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def plain_training(a: argparse.Namespace, name: str, mesh: ringcomm.Mesh) -> Training:
    """Makes this rank's part of the model, with the same values on every mesh, and its optimizer; nothing is
    averaged yet."""
    torch.manual_seed(a.seed)
    measure = Loss(a.micro_batches * a.accumulate)
    model = cut(a, GPT(a.layers, a.dim, a.heads, a.context), mesh, measure)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, a.steps))
    scaler = ringcomm.GradScaler(init_scale=2.0**14, enabled=a.precision == "fp16")
    places = positions(a.context, mesh["cp"]) if mesh.size("cp") > 1 else None
    return Training(name, model, optimizer, schedule, scaler, mesh, measure, places, a.clip)


def sharded_training(a: argparse.Namespace, name: str, mesh: ringcomm.Mesh, stage: int) -> Training:
    """Makes a training that is averaged over the ranks of dp and cp, and sharded over them at ``stage``."""
    made = plain_training(a, name, mesh)
    precision = ringcomm.MixedPrecision(PRECISIONS[a.precision], output_dtype=torch.float32)
    ringcomm.shard(
        made.model, made.optimizer, stage, mesh=mesh, mixed_precision=precision, bucket_cap_mb=a.bucket_mb,
        accumulation=order_of(made.measure.passes),
    )  # fmt: skip
    flat = sharded_model_of(made.model)
    made.blocked = lambda: flat.communication_seconds
    return made


def order_of(passes: int) -> str:
    """Returns how gradients of micro-batches are added. A power of two of them is added in a tree, as the ranks'
    gradients are, so that the sum does not depend on how the micro-batches are distributed over ranks."""
    return "tree" if power_of_two(passes) else "sequential"


def power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def batches_of(a: argparse.Namespace, text: torch.Tensor, mesh: ringcomm.Mesh) -> Batches:
    """Returns this rank's batches."""
    return Batches(text, a.batch, a.micro_batches * a.accumulate, a.context, a.seed, mesh)


def tokens_per_step(a: argparse.Namespace, mesh: ringcomm.Mesh) -> int:
    """Returns the tokens per step of all ranks."""
    return a.batch * a.micro_batches * a.accumulate * a.context * mesh.size("dp")
