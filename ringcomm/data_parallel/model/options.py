"""The optimizers of a model, and the comparison of their options, such as learning rates, between the ranks, which must
all have the same.

The message that ends a backward pass contains a checksum of the options. If the ranks' checksums differ, the next step
of an optimizer that was passed to `shard` raises and names the first difference; any other optimizer warns once.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.offload import HostGradients

CHECKSUM_NBYTES = 4
SAME_OPTIONS = (
    "step optimizers on every rank or on none, and schedulers with a value that all ranks have, such as the mean of "
    "their losses"
)


class Options:
    """The comparable options of an optimizer: numbers, flags and names."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # weak, because the optimizer references this object
        self.steps = 0  # steps made since this object was created
        self.number = 0  # index among the model's optimizers
        # The options for which the checksum was computed; empty if an option, such as a tensor, may change in place.
        self._values: list[Any] = []
        self._checksum = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None: the user has dropped it."""
        return self._optimizer()

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
        """Returns one line for each option that must be equal on all ranks."""
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
    """Returns the form in which an option is compared between ranks; None if it cannot be compared, or only after
    waiting for a device."""
    if isinstance(value, (int, float)):  # 0 and 0.0 are the same option
        return float(value)
    if torch.is_tensor(value) and value.numel() == 1 and value.device.type == "cpu" and not value.is_complex():
        return float(value)
    if isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
        return tuple(map(float, value))
    return value if isinstance(value, str) else None


class AttachedOptimizers:
    """The optimizers that are attached to a model, and whether the ranks' optimizers have the same options.

    Iterating yields the optimizers that still exist on this rank.

    Attributes:
        stepped: the options of optimizers attached or stepped since the last message.
        options_differ: whether a backward pass found different options on the ranks; a step resets it.
        after_thaw: called with the model when it begins to train frozen parameters.
    """

    def __init__(self, ranks: DataParallelGroup, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._attached: list[weakref.ref[torch.optim.Optimizer]] = []  # in the same order on every rank
        self._hosts: list[weakref.ref[HostGradients]] = []
        self.stepped: set[Options] = set()
        self.options_differ = False
        self.after_thaw: Callable[[Any], None] = _nothing

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter([optimizer for optimizer in (ref() for ref in self._attached) if optimizer is not None])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    @property
    def hosts(self) -> list[HostGradients]:
        """The gradients that the optimizers have in host memory."""
        return [host for host in (ref() for ref in self._hosts) if host is not None]

    def add(self, optimizer: torch.optim.Optimizer, options: Options, host: HostGradients) -> None:
        """Registers an optimizer, with its options and the gradients that it has in host memory."""
        options.number = len(self._attached)
        self._attached.append(weakref.ref(optimizer))
        self.stepped.add(options)
        self._hosts.append(weakref.ref(host))

    def remove(self, optimizer: torch.optim.Optimizer, host: HostGradients) -> None:
        """Removes an optimizer."""
        del self._attached[self.number_of(optimizer)]
        self._hosts = [ref for ref in self._hosts if ref() not in (None, host)]

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns the number of an optimizer, the same on all ranks."""
        return next(i for i, ref in enumerate(self._attached) if ref() is optimizer)

    def of_number(self, number: int) -> torch.optim.Optimizer | None:
        """Returns the optimizer with a number; None: it is not attached on this rank, or was dropped."""
        return self._attached[number]() if number < len(self._attached) else None

    def on_all_ranks(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers that no rank has dropped, and removes the others. Garbage collection may drop an
        optimizer at different times on the ranks, so this is a collective."""
        if self._attached:
            found = [ref() for ref in self._attached]
            kept = torch.tensor([each is not None for each in found], dtype=torch.uint8, device=self._device)
            everywhere = self._ranks.reduce_over_all(kept, "min").tolist()
            self._attached = [ref for ref, stays in zip(self._attached, everywhere, strict=True) if stays]
        return list(self)

    def checksum(self) -> bytes:
        """Returns the checksum of the options of optimizers that have stepped since the last message; zeros on a rank
        that has joined, because it takes the other ranks' options at each step."""
        if self._ranks.joining is not None and self._ranks.joining.shadowing:
            return bytes(2 * CHECKSUM_NBYTES)
        stepped, self.stepped = self.stepped, set()
        return with_complement(sum(options.checksum() for options in stepped) % (1 << 8 * CHECKSUM_NBYTES))


def _nothing(model: Any) -> None:
    """Does nothing: no optimizer is attached."""


@lru_cache
def with_complement(checksum: int) -> bytes:
    """Returns the checksum's bytes and their complements. From the maximum of each over the ranks, `differ` tells
    whether all checksums are equal."""
    some = checksum.to_bytes(CHECKSUM_NBYTES, "little")
    return some + bytes(255 - byte for byte in some)


def differ(largest: list[int]) -> bool:
    """Whether the ranks have different checksums. If so, the maxima of some byte and of its complement add up to more
    than 255."""
    pairs = zip(largest[:CHECKSUM_NBYTES], largest[CHECKSUM_NBYTES:], strict=True)
    return any(a + b != 255 for a, b in pairs)
