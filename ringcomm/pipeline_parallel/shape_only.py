"""Tensors without values, in place of the results of earlier stages, whose values are on other ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ringcomm.errors import InvalidArgumentError

_Tensor = torch.Tensor
_OF_SHAPES = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    _Tensor.new_zeros, _Tensor.new_ones, _Tensor.new_empty, _Tensor.new_full, _Tensor.new_tensor,
}  # fmt: skip
_LIKE_ANOTHER = {_Tensor.to, _Tensor.type_as, _Tensor.expand_as, _Tensor.view_as, _Tensor.reshape_as}
_FACTS = {
    _Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, _Tensor.stride, _Tensor.__len__,
    _Tensor.element_size, _Tensor.is_contiguous, _Tensor.storage_offset, _Tensor.get_device, _Tensor.__hash__,
    _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed, _Tensor.is_inference, _Tensor.is_same_size,
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference, torch.is_same_size,
    torch.result_type, _Tensor.type, _Tensor.is_set_to, _Tensor.is_conj, _Tensor.is_neg,
    torch.is_conj, torch.is_neg,
}  # fmt: skip
"""Functions that return no tensor and depend on no value."""
_FACT_ATTRIBUTES = {
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "is_cpu", "is_cuda", "is_meta",
    "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_mtia", "is_xpu", "is_xla",
    "is_ipu", "is_maia", "is_vulkan", "name",
}  # fmt: skip
_OF_VALUES = {
    torch.nonzero, torch.argwhere, torch.unique, torch.unique_consecutive, torch.masked_select, torch.bincount,
    _Tensor.nonzero, _Tensor.argwhere, _Tensor.unique, _Tensor.unique_consecutive, _Tensor.masked_select,
    _Tensor.bincount, torch.corrcoef, torch.histogramdd, _Tensor.__repr__, _Tensor.__format__, _Tensor.data_ptr,
}  # fmt: skip
"""Functions that return tensors whose shape depends on values, that print values, or that give access to memory."""
_SET_DATA = _Tensor.data.__set__
_WANTS_GRADIENT = _Tensor.requires_grad.__get__
_REPEATS = {torch.repeat_interleave, _Tensor.repeat_interleave, torch.tensor_split, _Tensor.tensor_split}


class ShapeOnlyTensor(torch.Tensor):
    """A tensor that has a shape and a type but no values.

    Results computed from its values are shape-only too; results computed from its shape are not. If it was made without
    values, its memory holds NaN, or zero for integers. Code whose control flow depends on its values raises.
    """

    origin = ""  # the name of the module that made the tensor, or whose result it was computed from
    wants_gradient: bool | None = None  # requires_grad of the parameter that it replaces

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _Tensor.__iter__:  # torch would return the items as plain tensors
            return iter(args[0].unbind(0))
        if func == _WANTS_GRADIENT and args[0].wants_gradient is not None:
            return args[0].wants_gradient
        if func in (_Tensor.register_hook, _Tensor.retain_grad, _Tensor.register_post_accumulate_grad_hook):
            # Ignores the hook, because backward never reaches this tensor. The stage that has the values calls it.
            return RemovableHandle(OrderedDict())
        if func in _OF_VALUES or _makes_shapes_of_values(func, args, kwargs):
            raise _refused(func, args)
        if _writes(func) and args and isinstance(args[0], ShapeOnlyTensor) and _is_repeated(args[0]):
            return args[0]  # a placeholder of another stage's weight, whose only element must keep its value
        with _NumberGuard(func) if _has_number(func, args, kwargs) else nullcontext():
            result = super().__torch_function__(func, types, args, kwargs)
        if type(result) in (tuple, list):
            result = type(result)(map(_without_base, result))
        result = _without_base(result)
        if func in _OF_SHAPES or (func in _LIKE_ANOTHER and not isinstance(args[0], ShapeOnlyTensor)):
            with torch._C.DisableTorchFunctionSubclass():
                return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, ShapeOnlyTensor) else x, result)
        origin = next(
            (x.origin for x in tree_leaves((args, kwargs)) if isinstance(x, ShapeOnlyTensor) and x.origin), ""
        )
        _mark_written(func, args, kwargs, origin)
        if func not in _FACTS and not _is_fact(func) and not _is_of_tensors(func, result):
            raise _refused(func, args)
        if origin:
            for x in tree_leaves(result):
                if isinstance(x, ShapeOnlyTensor):
                    x.origin = origin
        return result

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """Turns this object into a plain tensor with the values, memory and gradient of ``x``. It is not a leaf, so
        that code may write into it."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = x.detach()
            make_plain(self)
            if x.requires_grad:
                version = self._version
                self.detach_()  # else backward would reach its inputs and call their hooks with None
                # Sets the gradient's path without raising the version, because a checkpoint may have saved the tensor.
                _Dependency.apply(self, x)
                torch._C._autograd._unsafe_set_version_counter((self,), (version,))
            return self


class _NumberGuard(TorchDispatchMode):
    """While it is on, a function that uses a shape-only tensor as a number, such as a length, raises, because torch
    would read its value."""

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], ShapeOnlyTensor):
            raise _refused(self.func, args)
        return func(*args, **(kwargs or {}))


class ValueGuard(TorchFunctionMode):
    """While it is on, a function also raises if all of its shape-only arguments are used as numbers. Torch would read
    their values without calling the arguments' class.

    Args:
        before: called with each function and its arguments, before the function.
        call: calls the function.
    """

    def __init__(
        self,
        before: Callable[[Any, Any, Any], None] = lambda func, args, kwargs: None,
        call: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()
        self.before, self.call = before, call
        self.is_suspended = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_suspended:
            return func(*args, **(kwargs or {}))
        self.before(func, args, kwargs or {})
        if ShapeOnlyTensor not in types:
            found = _shape_only_in((args, kwargs or {}))
            if found:
                raise _refused(func, found)
        return self.call(func, args, kwargs or {})

    @staticmethod
    @contextmanager
    def suspended() -> Iterator[None]:
        """Disables the mode inside the block, for code that has no shape-only tensors."""
        modes = _get_current_function_mode_stack()
        mode = next((each for each in modes if isinstance(each, ValueGuard) and not each.is_suspended), None)
        if mode is None:
            yield
            return
        is_last, mode.is_suspended = mode is modes[-1], True  # else a mode such as a torch.device was entered inside
        if is_last:  # saves a call for each function
            mode.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_last:
                mode.__enter__()
            mode.is_suspended = False


def _shape_only_in(nest: Any) -> list[ShapeOnlyTensor]:
    """Returns the shape-only tensors among the arguments, also in slices."""
    if isinstance(nest, ShapeOnlyTensor):
        return [nest]
    if isinstance(nest, (tuple, list)):
        return [x for each in nest for x in _shape_only_in(each)]
    if isinstance(nest, dict):
        return [x for each in nest.values() for x in _shape_only_in(each)]
    return _shape_only_in([nest.start, nest.stop, nest.step]) if isinstance(nest, slice) else []


def _has_number(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a shape-only argument has a single element. Indices are ignored, but not slices: they determine a
    length."""
    nest: Any = (args, kwargs)
    if func in (_Tensor.__getitem__, _Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        nest = [each for each in index if isinstance(each, slice)]
    with torch._C.DisableTorchFunctionSubclass():
        return any(x.numel() == 1 for x in _shape_only_in(nest))


class _Dependency(torch.autograd.Function):
    """Makes one tensor depend on another in the autograd graph, without a copy."""

    @staticmethod
    def forward(ctx: Any, filled: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(filled)
        return filled

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


def _without_base(x: Any) -> Any:
    """Returns a shape-only view as a tensor that is no view, so that it can be filled; anything else as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return _with_class(x.data, ShapeOnlyTensor) if isinstance(x, ShapeOnlyTensor) and x._is_view() else x


def _with_class(x: Any, kind: type) -> Any:
    """Makes a tensor a shape-only one or a plain one; returns the same object, which the model holds."""
    # `as_subclass` would make a view, and autograd treats a write into a view as a write into its base.
    x.__class__ = kind
    return x


def writable(x: torch.Tensor) -> torch.Tensor:
    """Returns a received tensor that code may write into: not a leaf, with the same memory."""
    if not x.requires_grad:
        return x
    apart = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach())
    filled: torch.Tensor = _Dependency.apply(apart, x)
    return filled


def _refused(func: Any, args: Any) -> InvalidArgumentError:
    origin = next((x.origin for x in tree_leaves(args) if isinstance(x, ShapeOnlyTensor) and x.origin), "")
    of, made = (f" (a result of {origin})", f"carry=[{origin!r}]") if origin else ("", "carry=[...]")
    return InvalidArgumentError(
        f"Pipeline: got {_name(func)} of a tensor that lies on another rank{of}, expected code that uses only shapes "
        "before the stage begins; pass the inputs on every rank, or name the module that makes the tensor in "
        f"split(..., {made})"
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _is_fact(func: Any) -> bool:
    """Returns whether ``func`` gets or sets an attribute that depends on no value."""
    kind = getattr(func, "__name__", "")
    if kind not in ("__get__", "__set__", "__delete__"):
        return False
    return kind != "__get__" or _name(func) in _FACT_ATTRIBUTES


def _is_of_tensors(func: Any, result: Any) -> bool:
    """Returns whether a result consists of tensors alone. A function that writes in place may return None."""
    if result is None:
        return _writes(func)
    return all(isinstance(x, torch.Tensor) for x in tree_leaves(result))


def _makes_shapes_of_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether the shape of the result depends on the values of an argument."""
    if func is torch.where:
        return len(args) + len(kwargs) == 1
    if func in _REPEATS:
        return any_shape_only((args[1:] or args, kwargs))  # the one argument of repeat_interleave is the repeats
    if func is torch.nn.functional.one_hot:
        return [*args[1:], *kwargs.values(), -1][0] == -1  # the largest value determines the number of classes
    if func is _Tensor.__getitem__:
        return any(
            isinstance(x, ShapeOnlyTensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        )
    return False


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func is _Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def reads(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors whose values a function reads, without the one that it writes into."""
    if func in _FACTS or _is_fact(func):
        return []
    nest = args[1:] if _writes(func) else args
    return [x for x in tree_leaves((nest, kwargs)) if isinstance(x, torch.Tensor)]


def overwrites(func: Any, args: Any) -> list[torch.Tensor]:
    """Returns the tensor that a function overwrites completely."""
    return [args[0]] if func in (_Tensor.zero_, _Tensor.fill_, _Tensor.copy_) else []


def writes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors that a function writes into, judged by its name and arguments."""
    first = _writes(func) or kwargs.get("inplace") is True or func == _SET_DATA
    nest = [args[:1] if first else (), kwargs.get("out")]
    return [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)] if first or "out" in kwargs else []


def _is_repeated(x: torch.Tensor) -> bool:
    """Returns whether several elements share the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True))


def _mark_written(func: Any, args: Any, kwargs: Any, origin: str) -> None:
    """Makes each plain tensor into which a shape-only value is written shape-only."""
    written = [args[0]] if args and _writes(func) else []
    for x in written + tree_leaves(kwargs.get("out")):
        drop_values(x, origin)


def drop_values(x: Any, origin: str) -> list[torch.Tensor]:
    """Makes a plain tensor, and the tensor that it is a view of, shape-only from now on; returns those that were plain
    before.

    Args:
        origin: the module that changes its values.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = [each for each in (x, getattr(x, "_base", None)) if type(each) is torch.Tensor]
        for each in found:
            _with_class(each, ShapeOnlyTensor).__dict__["origin"] = origin
    return found


def make_plain(x: torch.Tensor) -> None:
    """Makes a shape-only tensor a plain one again, because it has values, or its values will not be read."""
    if isinstance(x, ShapeOnlyTensor):
        _with_class(x, torch.Tensor)


def any_shape_only(tree: Any) -> bool:
    """Returns whether a nest contains a shape-only tensor."""
    return any(isinstance(x, ShapeOnlyTensor) for x in tree_leaves(tree))


def shape_only(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    origin: str = "",
    memory: dict[torch.dtype, torch.Tensor] | None = None,
) -> ShapeOnlyTensor:
    """Returns a shape-only tensor.

    Args:
        origin: the module whose result it replaces.
        memory: by floating-point type, the memory that all tensors of that type share; it grows as needed. Integer
            tensors get memory of their own, since code may write into them.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        x = torch.zeros(shape, dtype=dtype, device=device)
    else:
        memory, numel = {} if memory is None else memory, math.prod(shape)
        shared = memory.get(dtype)
        if shared is None or shared.numel() < numel or shared.device != device:
            shared = memory[dtype] = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        x = torch.empty(0, dtype=dtype, device=device)  # no view: each has a version of its own
        x.set_(shared.untyped_storage(), 0, shape)
    made = _with_class(x, ShapeOnlyTensor)
    made.origin = origin
    return made


def parameter_placeholder(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a placeholder for a parameter or buffer: one element, expanded to its shape."""
    nothing = float("nan") if x.is_floating_point() or x.is_complex() else 0
    made = x.detach().new_full((), nothing, device=device).expand(x.shape).as_subclass(ShapeOnlyTensor)
    made.wants_gradient = x.requires_grad
    return made
