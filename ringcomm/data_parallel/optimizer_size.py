"""How large an optimizer's state is for a parameter, from one step on a tiny one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringcomm.errors import UnsupportedError

_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23)  # of the tiny parameter's dimensions: no two alike
_OWN = ("state", "param_groups", "defaults", "zero_grad", "step", "add_param_group")


def state_nbytes(optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the state of one parameter after its first step.

    A tiny parameter of as many dimensions is stepped once by a copy of the optimizer. Of its state what has the
    parameter's dimensions grows with them, and what has one element stays.

    Args:
        group: of the optimizer's parameter groups.
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
        delattr(twin, name)  # hooks
    options = {**optimizer.param_groups[group], "params": [param]}
    if options.get("capturable"):
        options["capturable"] = False  # is for GPUs, and keeps the same
    twin.__setstate__({"state": defaultdict(dict), "param_groups": [options], "defaults": dict(optimizer.defaults)})
    param.grad = torch.zeros_like(param)
    twin.step()
    return dict(twin.state[param])
