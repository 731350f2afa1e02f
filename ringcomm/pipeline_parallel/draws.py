"""Reproduces random numbers, such as noise, that the model's own forward draws outside of the modules of stages. Every
stage runs that code: the first stage that reaches it draws, and later stages use the same numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ringcomm.pipeline_parallel.shape_only import ShapeOnlyTensor, writes

_OF_PYTHON = {"gumbel_softmax", "dropout1d", "dropout2d", "dropout3d"}
"""Functions that draw random numbers although torch does not tag them as random."""


@cache
def _is_tagged(name: str) -> bool:
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, each).tags for each in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in each for each in tags)


def random_op(func: Any) -> str:
    """Returns the name of a function that draws from a generator, or "".

    Returns "" for attention, too: its dropout applies to results of modules, which later stages do not have.
    """
    name = str(getattr(func, "__name__", ""))
    return name if name != "scaled_dot_product_attention" and (name in _OF_PYTHON or _is_tagged(name)) else ""


def must_send(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Returns whether later stages need the numbers that were drawn.

    They do not need a result with a gradient: it is computed from results of modules, which later stages do not have.
    Nor do they need the result of a dropout that is switched off, which is its input.
    """
    if not isinstance(result, torch.Tensor) or isinstance(result, ShapeOnlyTensor) or result.requires_grad:
        return False
    return bool(drawn_into(func, args, kwargs)) or not any(x is result for x in args)


def replay(func: Any, args: Any, kwargs: Any, numbers: torch.Tensor) -> torch.Tensor | None:
    """Returns the result of a function that drew ``numbers`` on an earlier stage; None where it draws into a tensor of
    another shape."""
    for into in drawn_into(func, args, kwargs):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if into.shape != numbers.shape:
                return None
            return into.fill(numbers.clone()) if isinstance(into, ShapeOnlyTensor) else into.copy_(numbers)
    return numbers


def drawn_into(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors into which a random function writes the numbers that it draws."""
    if getattr(func, "__module__", None) == "torch.nn.init":
        return [kwargs["tensor"]]
    return writes(func, args, kwargs)


def checkpoint_around() -> Any:
    """Returns an object that identifies the current call of `torch.utils.checkpoint.checkpoint`; None outside of
    one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None
