"""Cache blocking of the optimizer's step on the CPU.

Without ``fused=True`` torch's element-wise optimizers make ten or more passes over a parameter, and a shard is one long
parameter that fits in no cache. During step() the optimizer therefore gets blocks of it, one after the other: the first
pass over a block reads memory, later passes read the cache. Each element gets the same bits as without blocks.

Between two steps the blocks share the parameter's memory, except their step counters: 4 bytes for each block, which
`ringcomm.memory` leaves out.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

BLOCK = 1 << 17
"""Elements of a block for each thread; benchmarks/results/optimizer.txt compares sizes. A multiple of every vector
length, because torch computes the last elements of a parameter by other instructions."""
# For other types, torch rounds the last elements of a thread's part differently.
_DTYPES = (torch.float32, torch.float64)


def gains(values: torch.Tensor, settings: dict[str, Any]) -> bool:
    """Whether a step in blocks is faster, with the same bits: where torch makes several passes, parameter by parameter.

    Args:
        settings: the parameter group's options.
    """
    if values.numel() <= BLOCK * torch.get_num_threads():
        return False
    one_pass = settings.get("fused") or ("dampening" in settings and not settings["momentum"])  # plain SGD
    all_together = settings.get("foreach") or settings.get("differentiable")
    return values.device.type == "cpu" and values.dtype in _DTYPES and not (one_pass or all_together)


class CacheBlocks:
    """The blocks of one long parameter, with their views of its state.

    Attributes:
        params: the optimizer's parameters during a step. They and their state stay the same objects, so that a compiled
            step is not compiled again.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.split(BLOCK * torch.get_num_threads())
        self._size = len(self._values[0])
        self._before: dict[str, Any] = {}
        self._split: list[dict[str, Any]] = []
        self._split_from: dict[str, Any] = {}  # weak, so that the views do not keep a state that was dropped
        self.params = [nn.Parameter(each) for each in self._values]

    def enter(self, param: nn.Parameter, gradient: torch.Tensor | None, states: MutableMapping[Any, Any]) -> None:
        """Before a step: gives each block its part of the parameter's gradient and state."""
        for i, block in enumerate(self.params):
            block.grad = None if gradient is None else gradient[i * self._size : i * self._size + len(block)]
        self._before = states.get(param, {})
        if self._before:
            if not self._is_split(self._before):
                self._split_state(self._before, param)
            for key, value in self._before.items():
                if torch.is_tensor(value) and value.shape != param.shape:  # such as the number of steps
                    for state in self._split:
                        state[key].copy_(value)
            del states[param]
            states.update(zip(self.params, self._split, strict=True))

    def _is_split(self, state: dict[str, Any]) -> bool:
        known = {k: v() if isinstance(v, weakref.ref) else v for k, v in self._split_from.items()}
        return bool(self._split) and known.keys() == state.keys() and all(known[k] is state[k] for k in state)

    def _split_state(self, state: dict[str, Any], param: nn.Parameter) -> None:
        def part(key: str, value: Any, i: int) -> Any:
            if key in views:
                return views[key][i]
            return value.clone() if torch.is_tensor(value) else value

        views = {
            key: value.split(self._size)
            for key, value in state.items()
            if torch.is_tensor(value) and value.shape == param.shape
        }
        split = [{key: part(key, value, i) for key, value in state.items()} for i in range(len(self.params))]
        self._split = split
        self._split_from = {
            key: weakref.ref(value, lambda _: split.clear()) if torch.is_tensor(value) else value
            for key, value in state.items()
        }

    def leave(self, param: nn.Parameter, states: MutableMapping[Any, Any]) -> None:
        """After a step: joins the blocks' values and state.

        If the step has raised and left a block without some state, the block keeps the parameter's earlier state. If
        there was none, this was the first step, and the next one starts anew.
        """
        for block, values in zip(self.params, self._values, strict=True):
            block.grad = None
            if block.data_ptr() != values.data_ptr():  # the step has assigned `block.data`
                with torch.no_grad():
                    values.copy_(block)
                block.data = values
        before, self._before = self._before, {}
        found = [states.pop(block, {}) for block in self.params]
        if all(found) or (before and any(found)):
            keys = {key: None for state in found for key in state}
            states[param] = {key: self._merged(key, [state.get(key) for state in found], before) for key in keys}

    def _merged(self, key: str, parts: list[Any], before: dict[str, Any]) -> Any:
        """Returns the parameter's state ``key`` from its blocks' parts; None in ``parts``: the block has no such
        state."""
        known: Any = before.get(key)
        pairs = zip(parts, self.params, strict=True)
        first: Any
        first, block = next((pair for pair in pairs if pair[0] is not None), (None, self.params[0]))
        if not torch.is_tensor(first):
            return first
        if first.shape != block.shape:
            return known.copy_(first) if torch.is_tensor(known) and known.shape == first.shape else first
        views: Any = known.split(self._size) if torch.is_tensor(known) else [torch.zeros_like(p) for p in self.params]
        parts = [view if part is None else part for part, view in zip(parts, views, strict=True)]
        if torch.is_tensor(known) and [part.data_ptr() for part in parts] == [view.data_ptr() for view in views]:
            return known
        return torch.cat([part.detach() for part in parts])
