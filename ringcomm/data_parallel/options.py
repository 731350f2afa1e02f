"""Compares the options of an optimizer, such as learning rates, between the ranks, which must all have the same.

The message that ends a backward pass contains a checksum of the options. If the ranks' checksums differ, the next step
of an optimizer that was passed to `shard` raises and names the first difference; any other optimizer warns once.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

SAME_OPTIONS = (
    "step optimizers on every rank or on none, and schedulers with a value that all ranks have, such as the mean of "
    "their losses"
)


class Options:
    """The comparable options of an optimizer: numbers, flags and names."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak, because the optimizer references this object
        self.steps = 0  # steps made since this object compares the options
        self.number = 0  # index among the model's optimizers
        # Of the groups, when the checksum was computed; empty if they may change unnoticed.
        self._values: list[Any] = []
        self._checksum = 0

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def checksum(self) -> int:
        """Returns a checksum that is equal if the options, the steps and the optimizer are equal."""
        return (self.number + 1) * (self._checksum_of_options() + self.steps)

    def _checksum_of_options(self) -> int:
        """Returns a checksum below 2^32; it is computed again when an option has changed."""
        values = [*chain.from_iterable(map(dict.values, self._groups()))]
        if len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
            return self._checksum
        found = [each for group in self._groups() for each in _comparable(group)]
        self._checksum = zlib.crc32(repr(found).encode())
        others = [value for group in self._groups() for key, value in group.items() if key != "params"]
        self._values = values if all(map(_is_constant, others)) else []
        return self._checksum

    def lines(self) -> list[str]:
        """Returns what must be equal on all ranks, one line per option."""
        return [f"{self.steps} steps"] + [
            f"{key}={value!r} in the optimizer's group {number}"
            for number, group in enumerate(self._groups())
            for key, value in _comparable(group)
        ]


def _comparable(group: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in group.items():
        if key != "params":
            found = _fact(value)
            if found is not None:
                yield key, found


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (int, float, bool, str)


def _fact(value: Any) -> Any:
    """Returns a value that can be compared between ranks; None if there is none, or only after waiting for a device."""
    if isinstance(value, (int, float)):  # 0 and 0.0 are the same option
        return float(value)
    if torch.is_tensor(value) and value.numel() == 1 and value.device.type == "cpu" and not value.is_complex():
        return float(value)
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        return tuple(map(float, value))
    return value if isinstance(value, str) else None
