"""Values of parameters that are the same on ranks that are threads."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def seeded(module: M, seed: int = 0) -> M:
    """The module, its parameters drawn from a generator of their own: threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for p in module.parameters() if p.is_floating_point()):
            bound = max(p.shape[-1:], default=1) ** -0.5 if p.numel() else 0
            p.uniform_(-bound, bound, generator=generator)
    return module
