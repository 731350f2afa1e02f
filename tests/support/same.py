"""Whether two nests of values are the same, and where they are not."""

from __future__ import annotations

from typing import Any

import torch


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nests of dicts, lists, tuples, tensors and plain values differ; also in a tensor's type."""
    for kind in (dict, (list, tuple), torch.Tensor):
        if isinstance(a, kind) != isinstance(b, kind):
            return [f"{at} is a {type(a).__name__} and a {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [at]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{at} has keys {[*a]} and {[*b]}"]
        return [each for key in a for each in differences(a[key], b[key], f"{at}[{key!r}]")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{at} has {len(a)} and {len(b)} values"]
        return [each for i, (x, y) in enumerate(zip(a, b, strict=True)) for each in differences(x, y, f"{at}[{i}]")]
    return [] if a == b else [f"{at} is {a!r} and {b!r}"]


def same(a: Any, b: Any) -> bool:
    return not differences(a, b)
