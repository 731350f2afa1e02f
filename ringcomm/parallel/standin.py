"""What stands for a gradient that no rank has whole."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.errors import InvalidArgumentError

_HARMLESS = ("detach", "alias")


class ShardedGradient(torch.Tensor):
    """The gradient of a parameter whose gradient lies in the ranks' shards, or in another type than the parameter.

    It has the gradient's shape, type and device and says that there is one; whoever computes with it gets an error. Set
    `p.grad = None` (as `zero_grad()` does) to forget the gradient.
    """

    _name: str

    @staticmethod
    def of(p: torch.Tensor, name: str) -> ShardedGradient:
        """The one that stands for the gradient of ``p``."""
        made = torch.Tensor._make_wrapper_subclass(ShardedGradient, p.shape, dtype=p.dtype, device=p.device)
        made._name = name
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func._schema.name.split("::")[1] in _HARMLESS and isinstance(first, ShardedGradient):
            return first
        mine = next((each for each in _flat(args) if isinstance(each, ShardedGradient)), None)
        name = "a parameter" if mine is None else mine._name
        raise InvalidArgumentError(
            f"{func._schema.name.split('::')[1].strip('_')}: got the gradient of {name}, which is in the ranks' "
            "shards, expected a whole one; use ringcomm.clip_grad_norm_, ringcomm.GradScaler, the optimizer that "
            "ringcomm.shard returned, and zero_grad() with set_to_none=True"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"ShardedGradient({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _flat(values: Any) -> list[Any]:
    found = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
