"""Inputs, answers and checks that the tests of the torch.distributed backend share.

Values are small integers, so that every order of summation gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.reference import COMBINE


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The input of a rank, which every rank can compute."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    if dtype.is_complex:
        return torch.complex(numbers.float(), (numbers * 2 % 3).float()).to(dtype)
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values behind other strides."""
    if layout == "strided":
        wide = torch.zeros(tensor.numel() * 2, dtype=tensor.dtype)
        wide[::2] = tensor
        return wide[::2]
    if layout == "transposed" and tensor.numel() % 7 == 0:
        return tensor.reshape(-1, 7).t().contiguous().t()
    return tensor.clone()


def combined(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Plain torch's answer."""
    first, dtype = tensors[0].clone(), tensors[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    total = first.to(wide)
    for tensor in tensors[1:]:
        total = COMBINE["sum" if op == "avg" else op](total, tensor.to(wide))
    if op == "avg":
        total = torch.div(total, len(tensors), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


def expect(got: torch.Tensor, wanted: torch.Tensor, *what: Any) -> None:
    assert got.dtype == wanted.dtype, (what, got, wanted)
    assert torch.equal(got, wanted), (what, got, wanted)


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def raised(error: type[Exception], call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message of the error that a call raises."""
    try:
        call(*arguments, **options)
    except error as raised_error:
        return str(raised_error)
    raise AssertionError(f"{call} raised nothing, expected {error.__name__}")


def all_reduce_works(group: dist.ProcessGroup | None = None) -> None:
    x = torch.ones(100)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((100,), float(dist.get_world_size(group))))
