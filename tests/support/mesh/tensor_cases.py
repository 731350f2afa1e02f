"""What the tests of tensor parallel layers share: ranks as threads, closeness, and a rank's part of a whole."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ringcomm
from ringcomm.modules.shard_spec import part_of, take
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.plan import parallelize

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The largest difference, of the largest magnitude: a sum is cut into one for each rank, and rounded in between."""


def on_ranks(fn: Callable[[Any], Any], world_size: int) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=30)


def on_parts(
    model: nn.Module, plan: Any, fn: Callable[[Any, Any], Any], world_size: int = 2, **options: Any
) -> list[Any]:
    """What ``fn(part, comm)`` returns on each rank, whose copy of the model is parallelized."""
    models = [copy.deepcopy(model) for _ in range(world_size)]
    return on_ranks(lambda comm: fn(parallelize(models[comm.rank], plan, comm, **options), comm), world_size)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two tensors, as a share of the second's largest magnitude."""
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if a.numel() else 0.0


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None, slack: float = 1.0) -> bool:
    """Whether two tensors are equal but for rounding in ``dtype``."""
    return difference(a, b) <= slack * TOLERANCE[b.dtype if dtype is None else dtype]


def part(whole: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What a rank's parameter holds of a whole one, or of its gradient: its pieces, and zeros where it is padded."""
    found = part_of(p)
    return whole if found.dim is None else take(whole, found, p.shape[found.dim])


def unlike(model: nn.Module, whole: nn.Module, slack: float = 1.0) -> list[str]:
    """Parameters whose gradients are not those of the whole module's; errors add up from layer to layer: ``slack``."""
    expected = dict(whole.named_parameters())
    found = []
    for name, p in model.named_parameters():
        gradient = expected[name].grad
        assert gradient is not None, f"{name} has no gradient to compare with"
        assert float(gradient.abs().max()) > 0, f"{name} has a gradient of zeros: nothing is compared"
        if p.grad is None or not close(p.grad, part(gradient, p), slack=slack):
            found.append(name)
    return found


def sent(comm: Any) -> Counter[str]:
    """Messages since the last call."""
    traffic = TensorParallelGroup.of(comm).traffic
    found = Counter(traffic)
    traffic.clear()
    return found


def tensor_of(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Of which sums are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()
