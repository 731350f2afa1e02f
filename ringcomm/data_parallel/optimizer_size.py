"""Finds the size of an optimizer's state for a parameter by stepping a tiny parameter once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringcomm.errors import UnsupportedError

_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23)  # dimensions of the tiny parameter: all different
_OWN = ("state", "param_groups", "defaults", "zero_grad", "step", "add_param_group")


def state_nbytes(optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of one parameter's state after its first step.

    A copy of the optimizer steps a tiny parameter with the same number of dimensions once. State with the parameter's
    dimensions grows with the parameter; state with one element does not.

    Args:
        group: index of the optimizer's parameter group.
    Raises:  UnsupportedError: state of a shape that does not follow from the parameter's.
    """
    tiny = _LENGTHS[: len(shape)]
    return sum(
        value.itemsize * _numel(optimizer, key, tuple(value.shape), tiny, shape)
        for key, value in _state_of(optimizer, group, tiny, dtype).items()
        if torch.is_tensor(value)
    )


def _numel(
    optimizer: torch.optim.Optimizer, key: str, found: tuple[int, ...], tiny: Sequence[int], shape: Sequence[int]
) -> int:
    if math.prod(found) == 1:
        return 1
    by_length = {1: 1, **dict(zip(tiny, shape, strict=True))}
    if set(found) <= set(by_length):
        return math.prod(by_length[length] for length in found)
    if found == (math.prod(tiny),):
        return math.prod(shape)
    raise UnsupportedError(
        f"predict: got {type(optimizer).__name__}, whose {key} is of shape {found} for a parameter of shape "
        f"{tuple(tiny)}, expected dimensions of the parameter; measure it with ringcomm.memory"
    )


def _state_of(optimizer: torch.optim.Optimizer, group: int, tiny: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    param = nn.Parameter(torch.ones(tiny, dtype=dtype))
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if not k.startswith("_ringcomm") and k not in _OWN})
    for name in [name for name in vars(twin) if name.startswith("_optimizer_")]:
        delattr(twin, name)  # they are hooks
    options = {**optimizer.param_groups[group], "params": [param]}
    if options.get("capturable"):
        options["capturable"] = False  # only for GPUs; the state is the same without it
    twin.__setstate__({"state": defaultdict(dict), "param_groups": [options], "defaults": dict(optimizer.defaults)})
    param.grad = torch.zeros_like(param)
    twin.step()
    return dict(twin.state[param])
