"""Which part of a larger tensor a parameter of this rank is: what tensor parallel layers and pipelines leave on it, for
norms and checkpoints to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Part:
    """A parameter's place in the tensor of the whole model.

    Attributes:
        dim: along which the whole was cut; None: it was not.
        extent: of the whole along ``dim``.
        pieces: (start, length) along ``dim`` of the whole, in the order in which they lie here. What lies behind them
            is padding, and zero.
        names: in the whole model, where they are others than here; the first is the one in checkpoints.
        copy: whether another stage of a pipeline has the same values, and counts and saves them.
    """

    dim: int | None = None
    extent: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    copy: bool = False

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the whole tensor, from the shape here."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.extent, *shape[self.dim + 1 :])


PLAIN = Part()


def part_of(p: torch.Tensor) -> Part:
    """A parameter's place; `PLAIN` where nothing was cut."""
    return getattr(p, "_ringcomm_part", PLAIN)


def note(p: torch.Tensor, **changes: Any) -> None:
    """Changes what is known of a parameter's place."""
    p._ringcomm_part = replace(part_of(p), **changes)
