"""What stands for a gradient that no rank has whole, and for a parameter while it is in shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError

_HARMLESS = ("detach", "alias")
_FACTS = (
    *(
        "__get__",
        "__set__",
        "__delete__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_floating_point",
    ),
    *("is_complex", "element_size", "detach", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *(
        "__hash__",
        "__repr__",
        "__len__",
        "is_contiguous",
        "storage_offset",
        "__reduce_ex__",
        "__deepcopy__",
        "get_device",
    ),
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),  # take no values
    *("has_names", "is_same_size", "__dir__", "_is_view", "__format__", "__bool__", "type"),
)
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")


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


class PartialModelGradient(torch.Tensor):
    """A gradient of which this rank has the mean, while other ranks have other parameters of the model. It is an
    ordinary tensor to all but torch's loss scaler, which would skip a step here and not there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise InvalidArgumentError(
                "GradScaler: got gradients of a part of the model, expected those of all its ranks, which must skip a "
                "step together; use ringcomm.GradScaler"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ShardedParameter(nn.Parameter):
    """The class of a parameter of stage 3 outside of forward and backward: its shape can be asked for, not its
    values."""

    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "copy_" and len(args) > 1 and args[0] is args[1]:  # torch's load_state_dict, after ours
            return args[0]
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _FACTS or (name == "__get__" and asked in _VALUES):
            mine = next((each for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, cls)), None)
            raise InvalidArgumentError(
                f"{name}: got {getattr(mine, '_name', 'a parameter')}, whose values are in the ranks' shards, expected "
                "a whole parameter; call the module, enter ringcomm.whole(module), use state_dict(), or, of an "
                "optimizer, pass it to ringcomm.shard"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if name == "detach":  # as state_dict() of an inner module does
                result = result.as_subclass(cls)
                result._name = args[0]._name
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"ShardedParameter({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _flat(values: Any) -> list[Any]:
    found = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
