"""Tensors whose values lie on other ranks: what a forward pass has in the place of an earlier stage's results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ringcomm.errors import InvalidArgumentError

_OF_SHAPES = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full,
    torch.Tensor.new_tensor,
}  # fmt: skip
_LIKE_ANOTHER = {
    torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as,
}  # fmt: skip
_READS = {
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.item,
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__contains__,
}  # fmt: skip


class Absent(torch.Tensor):
    """A tensor of a shape and a type. What is computed from its values is absent too; not what is computed from its
    shape. It is not a number, or zero."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise InvalidArgumentError(
                f"Pipeline: got {func.__name__} of a tensor that lies on another rank, expected code that looks at "
                "shapes alone before the stage begins; pass the inputs on every rank"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in _OF_SHAPES or (func in _LIKE_ANOTHER and not isinstance(args[0], Absent)):
            with torch._C.DisableTorchFunctionSubclass():
                return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, Absent) else x, result)
        return result

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """Makes this very object a tensor with the values of ``x``, a leaf that wants a gradient if ``x`` does."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = x.detach()
            self.__class__ = torch.Tensor
            return self.requires_grad_(x.requires_grad)


def any_absent(tree: Any) -> bool:
    """Whether a nest has such a tensor."""
    return any(isinstance(x, Absent) for x in tree_leaves(tree))


class Maker:
    """Makes them, those of one type of numbers in the same memory."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def make(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Of a shape. Whole numbers are new, since code may write into them."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype, device=device).as_subclass(Absent)
        numel = math.prod(shape)
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < numel or memory.device != device:
            memory = self._memory[dtype] = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        made = torch.empty(0, dtype=dtype, device=device)  # not a view: what writes into one does not age another
        return made.set_(memory.untyped_storage(), 0, shape).as_subclass(Absent)


def weightless(x: torch.Tensor) -> torch.Tensor:
    """In the place of a parameter or buffer: without memory of its own."""
    nothing = float("nan") if x.is_floating_point() or x.is_complex() else 0
    return x.detach().new_full((), nothing).expand(x.shape).as_subclass(Absent)
