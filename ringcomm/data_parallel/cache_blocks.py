"""Cache blocking of the optimizer's step on the CPU.

Without ``fused=True`` torch's element-wise optimizers make ten or more passes over a parameter, and a shard is one long
parameter, which no cache holds. So during step() the optimizer gets blocks of it instead, one after the other: the
first pass over a block reads memory, the others read the cache. Each element is computed as before, with the same bits.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

BLOCK = 1 << 17
"""Elements of a block for each thread; benchmarks/results/optimizer.txt compares sizes. A multiple of every vector
length, because torch computes the last elements of a parameter by other instructions, which may round differently."""


def gains(values: torch.Tensor, settings: dict[str, Any]) -> bool:
    """Whether a step in blocks is faster: on the CPU, where torch makes several passes, parameter by parameter.

    Args:
        settings: the parameter group's options.
    """
    plain_sgd = "dampening" in settings and not settings["momentum"]
    others = settings.get("foreach") or settings.get("fused") or settings.get("differentiable")
    long = values.numel() > BLOCK * torch.get_num_threads()
    return long and values.device.type == "cpu" and not (plain_sgd or others)


class CacheBlocks:
    """The blocks of one long parameter.

    Attributes:
        params: what the optimizer sees during a step.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.split(BLOCK * torch.get_num_threads())
        self._unsplit: dict[str, Any] = {}
        self.params = [nn.Parameter(each) for each in self._values]

    def enter(self, param: nn.Parameter, gradient: torch.Tensor | None, states: MutableMapping[Any, Any]) -> None:
        """Before a step: gives each block its part of the parameter's gradient and state."""
        size = len(self._values[0])
        self._unsplit = states.pop(param, {})
        split = {key: value.split(size) for key, value in self._unsplit.items() if _is_like(value, param)}
        for i, block in enumerate(self.params):
            block.grad = None if gradient is None else gradient[i * size : i * size + len(block)]
            if self._unsplit:
                states[block] = {
                    key: split[key][i] if key in split else value.clone() if torch.is_tensor(value) else value
                    for key, value in self._unsplit.items()
                }

    def leave(self, param: nn.Parameter, states: MutableMapping[Any, Any]) -> None:
        """After a step: joins the blocks' values and state. If the first step with a state has raised half way, the
        parameter has none."""
        for block, values in zip(self.params, self._values, strict=True):
            block.grad = None
            if block.data_ptr() != values.data_ptr():  # something has assigned its data
                with torch.no_grad():
                    values.copy_(block)
                block.data = values
        found = [states.pop(block, {}) for block in self.params]
        if all(found):
            states[param] = {key: self._joined(key, [each[key] for each in found]) for key in found[0]}
        self._unsplit = {}

    def _joined(self, key: str, parts: list[Any]) -> Any:
        if not _is_like(parts[0], self.params[0]):
            return parts[0]  # such as the number of steps
        unsplit: Any = self._unsplit.get(key)
        if torch.is_tensor(unsplit):
            views = unsplit.split(len(parts[0]))
            if len(views) == len(parts) and all(
                a.data_ptr() == b.data_ptr() for a, b in zip(views, parts, strict=True)
            ):
                return unsplit
        return torch.cat(parts)


def _is_like(value: Any, param: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == param.shape
