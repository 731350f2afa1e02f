"""Compares trainings step by step in turns: over Gloo, over ringcomm, and without communication (`train_gpt.py
--compare`); and makes a training under torch's DDP (`--parallel torch`)."""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mesh import axes_of
from report import mean_over_ranks, slowest
from torch import nn
from training import Training, plain_training, sharded_training, tokens_per_step

import ringcomm

NOTHING = "no communication"


class TorchMeter:
    """Measures the time that torch's DDP spends in communication. DDP waits inside C++, so the meter measures from
    outside: the time to start its all_reduces, and the time from the start of the last all_reduce to the end of
    backward, in which DDP only waits."""

    def __init__(self, model: nn.parallel.DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
        self.group, self.seconds, self.last = group, 0.0, 0.0
        model.register_comm_hook(None, self.hook)

    def hook(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Runs torch's own all_reduce hook and measures its time."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        start = time.perf_counter()
        future = allreduce_hook(self.group, bucket)
        self.last = time.perf_counter()
        self.seconds += self.last - start
        return future

    def blocked(self) -> float:
        """Returns the seconds so far; call it before forward and right after backward."""
        if self.last:
            self.seconds += time.perf_counter() - self.last
            self.last = 0.0
        return self.seconds


def torch_training(a: argparse.Namespace, backend: str, mesh: ringcomm.Mesh) -> Training:
    """Makes a training under torch's DistributedDataParallel."""
    made = plain_training(a, backend, mesh)
    group = dist.new_group(backend=backend)
    stock = nn.parallel.DistributedDataParallel(made.model, process_group=group, gradient_as_bucket_view=True)
    made.model, made.blocked = stock, TorchMeter(stock, group).blocked
    return made


def contestants(a: argparse.Namespace) -> list[Training]:
    """Makes three trainings of the same model; with --compare, all calls of torch.distributed use Gloo."""
    axes = axes_of(a, dist.get_world_size())
    gloo = ringcomm.init_mesh(axes, ringcomm.Communicator.from_process_group(dist.group.WORLD))
    if a.parallel == "torch":
        made = [torch_training(a, backend, gloo) for backend in ("ringcomm", "gloo")]
    else:
        meshes = {"ringcomm": ringcomm.init_mesh(axes, ringcomm.init()), "gloo": gloo}
        made = [sharded_training(a, backend, mesh, 0) for backend, mesh in meshes.items()]
    return [*made, plain_training(a, NOTHING, gloo)]


def predict(a: argparse.Namespace, copies: Sequence[Training]) -> None:
    """Prints the measured speed-up beside the one that the saved communication time predicts; a collective."""
    skip, tokens = min(5, len(copies[0].seconds) // 4), tokens_per_step(a, copies[0].mesh)
    steps = {c.name: slowest(c.seconds)[skip:] for c in copies}
    blocked = {c.name: mean_over_ranks(statistics.fmean(c.blocked_seconds[skip:])) for c in copies}
    gloo, ours, local = (statistics.median(steps[name]) for name in ("gloo", "ringcomm", NOTHING))
    ratios = [g / r for g, r in zip(steps["gloo"], steps["ringcomm"], strict=True)]
    saved = blocked["gloo"] - blocked["ringcomm"]
    if dist.get_rank() == 0:
        print(
            f"\nmeasured:   {statistics.median(ratios):.3f} x Gloo's speed, {tokens / ours:,.0f} tokens/s "
            f"(over single steps {min(ratios):.3f} to {max(ratios):.3f})\n"
            f"predicted:  {gloo / (gloo - saved):.3f} x Gloo's speed, {tokens / (gloo - saved):,.0f} tokens/s, "
            f"from {1e3 * saved:.2f} ms less blocked per step\n"
            f"whole cost: Gloo {1e3 * (gloo - local):.2f} ms, ringcomm {1e3 * (ours - local):.2f} ms per step "
            "more than a step without communication"
        )
