"""The arrays that a program passes: how they lie in memory, and what is wrong with them after the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.collectives.programs import Step
from tests.support.reference import same_bits

_NOT_IN_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32")


@dataclass(eq=False)
class Memory:
    """An array of one rank in one call: its values before and, where the call changes them, after."""

    step: Step
    before: torch.Tensor
    after: torch.Tensor | None = None
    computed: bool = False  # where a NaN is any NaN
    array: Any = None
    _base: Any = None

    def make(self, comm: Any) -> Any:
        """The array, with elements around it that nobody may touch."""
        count, layout = self.before.numel(), self.step.layout
        total = 2 * count + 1 if layout == "strided" else count + 2
        self._base = comm.empty(total, self.before.dtype) if self.step.lent else self.before.new_empty(total)
        self._base.view(torch.uint8).zero_()
        if layout == "strided":
            view = self._base[: 2 * count].view(*self.before.shape, 2)[..., 0]
        else:
            view = self._base[int(layout == "offset") :][:count].view(self.before.shape)
        view.copy_(self.before)
        self.array = view.numpy() if library_of(self.step) == "numpy" else view
        return self.array

    def fault(self) -> str:
        """What is wrong after the call; empty if nothing."""
        tensor = as_tensor(self.array)
        if wrong := difference(tensor, self.before if self.after is None else self.after, self.computed):
            return wrong
        tensor.zero_()
        touched = bool(self._base.view(torch.uint8).any())
        self.array = self._base = None
        return "memory beside the array was written" if touched else ""

    def __str__(self) -> str:
        step = self.step
        library = "numpy " if library_of(step) == "numpy" else ""
        lies = f" {step.layout}" * (step.layout != "plain") + " lent" * step.lent
        return f"{library}{step.dtype}{list(self.before.shape)}{lies}"


@dataclass(eq=False)
class Rows:
    """A part of an array along dimension 0, in a call in place."""

    memory: Memory
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.memory}[{self.begin}:{self.end}]"


def library_of(step: Step) -> str:
    """The library of a step's arrays: torch where NumPy has not got the type."""
    return "torch" if step.dtype in _NOT_IN_NUMPY else step.library


def as_tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def difference(got: torch.Tensor, want: torch.Tensor, as_numbers: bool) -> str:
    """The first elements that differ, in words; empty if none does."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"got {got.dtype} of shape {tuple(got.shape)}, expected {want.dtype} of shape {tuple(want.shape)}"
    if torch.equal(raw(got), raw(want)) or (as_numbers and same_bits(got, want)):
        return ""
    wrong = (raw(got).view(-1, got.element_size()) != raw(want).view(-1, got.element_size())).any(1).nonzero()
    at = int(wrong[0])
    return f"{len(wrong)} of {got.numel()} elements differ, element {at} first: got {_element(got, at)}, expected " + (
        _element(want, at)
    )


def raw(x: torch.Tensor) -> torch.Tensor:
    """Its bytes. A single element may count as contiguous with any stride."""
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def _element(x: torch.Tensor, at: int) -> str:
    return f"{x.contiguous().reshape(-1)[at].item()} ({bytes(raw(x).view(-1, x.element_size())[at].tolist()).hex()})"
