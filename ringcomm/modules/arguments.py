"""Validators for training arguments that are torch objects; see `ringcomm.validation`."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from ringcomm.modules.precision import precision_of
from ringcomm.validation import Requirement, a, communicator_over, is_communicator, several, that, validate_int

LAST_STAGE = 3
MODULE = a("a torch.nn.Module", nn.Module)
OPTIMIZER = a("a torch.optim.Optimizer", torch.optim.Optimizer)
TENSOR = a("a tensor", torch.Tensor)
DTYPE = a("a torch.dtype", torch.dtype)
PRECISION = Requirement("a ringcomm.MixedPrecision, or a policy of torch's", precision_of)
STAGE = validate_int(0, LAST_STAGE, "0, 1, 2 or 3")
RANKS = that(
    "a communicator or a pair of them",
    lambda value: (
        is_communicator(value) or (type(value) is tuple and len(value) == 2 and all(map(is_communicator, value)))
    ),
    instead=communicator_over,
)


_NUMBER_OF_DEVICE = validate_int(0, (1 << 15) - 1)


def _as_device(value: Any) -> Any:
    if isinstance(value, Integral):
        return _NUMBER_OF_DEVICE.take(value)  # also accepts a number that no installed device has
    torch.device(value)
    return value


DEVICE = Requirement("a device, such as 'cpu'", _as_device)
DEVICES = several("a list of devices", DEVICE)
ATOM = that(
    "'element', 'row', 'tensor' or a number of elements",
    lambda value: (
        value in ("element", "row", "tensor") if isinstance(value, str) else type(value) is int and 0 < value < 1 << 63
    ),
)
INIT = that(
    "a function of a module, or False",
    lambda value: value is False or (callable(value) and not isinstance(value, type)),
)
OFFLOAD = Requirement("True, False or a device", lambda value: value if isinstance(value, bool) else _as_device(value))


Units = Iterable[nn.Module] | type[nn.Module] | Iterable[type[nn.Module]] | None


_MODULES_OR_CLASSES = several("", a("", nn.Module, type))


def _units(value: Any) -> list[nn.Module] | tuple[type, ...]:
    found = [value] if isinstance(value, type) else _MODULES_OR_CLASSES.take(value)
    if found and all(isinstance(each, type) and issubclass(each, nn.Module) for each in found):
        return tuple(found)
    return several("", MODULE).take(found)


def _units_of_names(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "[unit]"
    names = value if isinstance(value, (list, tuple)) else [value]
    return "[model.get_submodule(name) for name in names]" if any(isinstance(each, str) for each in names) else ""


UNITS = Requirement("a list of submodules, or of their classes", _units, _units_of_names)


def _as_norm(value: Any) -> float:
    """Accepts a number, "inf", or a tensor with one number, as torch does."""
    known = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()
    if isinstance(value, bool) or not (known or isinstance(value, Real) or value == "inf"):
        raise ValueError("no number")
    if not float(value) >= 0:
        raise ValueError("no norm")
    return float(value)


NORM = Requirement("a number from 0 on, or infinity", _as_norm)


def _tensors(value: Any) -> Any:
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return value
    return several("", TENSOR).take(value)


PARAMETERS = Requirement("a module, an optimizer, or tensors", _tensors)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a module's name, compared part by part; a leading ``*`` stands for one or more
    parts."""
    patterns, parts = pattern.split("."), name.split(".")
    if patterns[0] == "*" and len(patterns) > 1:
        patterns = patterns[1:]
        if len(parts) <= len(patterns):
            return False
        parts = parts[-len(patterns) :]
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))
