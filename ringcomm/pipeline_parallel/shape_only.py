"""Tensors whose values lie on other ranks: what a forward pass has in the place of an earlier stage's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
"""What gives no tensor, and depends on no value."""
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
"""What gives tensors whose shape depends on values, or a text of them."""
_SET_DATA = _Tensor.data.__set__
_WANTS_GRADIENT = _Tensor.requires_grad.__get__
_REPEATS = {torch.repeat_interleave, _Tensor.repeat_interleave, torch.tensor_split, _Tensor.tensor_split}


class ShapeOnlyTensor(torch.Tensor):
    """A tensor of a shape and a type. What is computed from its values is absent too; not what is computed from its
    shape. It is not a number, or zero. Code that would go on differently for other values raises."""

    origin = ""  # the name of the module whose result it is, or is computed from
    wants_gradient: bool | None = None  # of a parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _Tensor.__iter__:  # whose parts torch would give as plain tensors
            return iter(args[0].unbind(0))
        if func == _WANTS_GRADIENT and args[0].wants_gradient is not None:
            return args[0].wants_gradient
        if func in (_Tensor.register_hook, _Tensor.retain_grad, _Tensor.register_post_accumulate_grad_hook):
            return _NoHandle()  # backward never comes here: the stage that has the values has the hook too
        if func in _OF_VALUES or _makes_shapes_of_values(func, args, kwargs):
            raise _read(func, args)
        if _writes(func) and args and isinstance(args[0], ShapeOnlyTensor) and _is_repeated(args[0]):
            return args[0]  # a weight of another stage, in whose one element nothing is written
        with _Numbers(func) if _has_number(func, args, kwargs) else nullcontext():
            result = super().__torch_function__(func, types, args, kwargs)
        if type(result) in (tuple, list):
            result = type(result)(map(_apart, result))
        result = _apart(result)
        if func in _OF_SHAPES or (func in _LIKE_ANOTHER and not isinstance(args[0], ShapeOnlyTensor)):
            with torch._C.DisableTorchFunctionSubclass():
                return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, ShapeOnlyTensor) else x, result)
        origin = next(
            (x.origin for x in tree_leaves((args, kwargs)) if isinstance(x, ShapeOnlyTensor) and x.origin), ""
        )
        _spread(func, args, kwargs, origin)
        if func not in _FACTS and not _is_fact(func) and not _is_of_tensors(func, result):
            raise _read(func, args)
        if origin:
            for x in tree_leaves(result):
                if isinstance(x, ShapeOnlyTensor):
                    x.origin = origin
        return result

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """Makes this very object a tensor with the values of ``x``, in the same memory, whose gradient is that of
        ``x``. It is no leaf, so that code may write into it."""
        with torch._C.DisableTorchFunctionSubclass():
            self.data = x.detach()
            find(self)
            if x.requires_grad:
                version = self._version
                self.detach_()  # else backward comes to what it was computed from, and calls hooks there with None
                _Filled.apply(self, x)  # which is no change to who has saved it, as checkpoints do
                torch._C._autograd._unsafe_set_version_counter((self,), (version,))
            return self


class _Numbers(TorchDispatchMode):
    """Inside, a function that takes an absent tensor for a number, such as a length, raises: torch reads its value."""

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], ShapeOnlyTensor):
            raise _read(self.func, args)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Inside, functions whose only absent arguments are numbers to them raise, too: torch does not ask an argument's
    class then, but reads its value.

    Args:
        told: of each function and its arguments, before it is called.
        call: calls it.
    """

    def __init__(
        self,
        told: Callable[[Any, Any, Any], None] = lambda func, args, kwargs: None,
        call: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()
        self.told, self.call = told, call
        self.is_left = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_left:
            return func(*args, **(kwargs or {}))
        self.told(func, args, kwargs or {})
        if ShapeOnlyTensor not in types:
            found = _absent_in((args, kwargs or {}))
            if found:
                raise _read(func, found)
        return self.call(func, args, kwargs or {})

    @staticmethod
    @contextmanager
    def left() -> Iterator[None]:
        """Outside of it for a while, where nothing is absent."""
        modes = _get_current_function_mode_stack()
        mode = next((each for each in modes if isinstance(each, Reads) and not each.is_left), None)
        if mode is None:
            yield
            return
        is_last, mode.is_left = mode is modes[-1], True  # else another mode, such as a torch.device, was entered in it
        if is_last:  # saves a call for each function
            mode.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_last:
                mode.__enter__()
            mode.is_left = False


def _absent_in(nest: Any) -> list[ShapeOnlyTensor]:
    """Those of arguments, also in slices."""
    if isinstance(nest, ShapeOnlyTensor):
        return [nest]
    if isinstance(nest, (tuple, list)):
        return [x for each in nest for x in _absent_in(each)]
    if isinstance(nest, dict):
        return [x for each in nest.values() for x in _absent_in(each)]
    return _absent_in([nest.start, nest.stop, nest.step]) if isinstance(nest, slice) else []


def _has_number(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether one of them has a single element. One that is an index may be: of a slice it gives the length."""
    nest: Any = (args, kwargs)
    if func in (_Tensor.__getitem__, _Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        nest = [each for each in index if isinstance(each, slice)]
    with torch._C.DisableTorchFunctionSubclass():
        return any(x.numel() == 1 for x in _absent_in(nest))


class _Filled(torch.autograd.Function):
    """Puts a tensor behind another one in the graph, without a copy."""

    @staticmethod
    def forward(ctx: Any, filled: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(filled)
        return filled

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad


def _apart(x: Any) -> Any:
    """In the place of an absent view one that is no view of another tensor, so that it can be filled."""
    with torch._C.DisableTorchFunctionSubclass():
        return _turned(x.data) if isinstance(x, ShapeOnlyTensor) and x._is_view() else x


def _turned(x: torch.Tensor) -> ShapeOnlyTensor:
    """The same object as an absent tensor: `as_subclass` would make a view, and autograd takes what is written into
    one for written into its base."""
    x.__class__ = ShapeOnlyTensor
    return cast(ShapeOnlyTensor, x)


def writable(x: torch.Tensor) -> torch.Tensor:
    """A received tensor as code may write into it: no leaf, with the same memory."""
    if not x.requires_grad:
        return x
    apart = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach())
    filled: torch.Tensor = _Filled.apply(apart, x)
    return filled


class _NoHandle:
    """Of a hook on a tensor that has no gradient here."""

    def remove(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> _NoHandle:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _read(func: Any, args: Any) -> InvalidArgumentError:
    origin = next((x.origin for x in tree_leaves(args) if isinstance(x, ShapeOnlyTensor) and x.origin), "")
    of, made = (f" (a result of {origin})", f"carry=[{origin!r}]") if origin else ("", "carry=[...]")
    return InvalidArgumentError(
        f"Pipeline: got {_name(func)} of a tensor that lies on another rank{of}, expected code that looks at shapes "
        "alone before the stage begins; pass the inputs on every rank, or name the module that makes it in "
        f"split(..., {made})"
    )


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _is_fact(func: Any) -> bool:
    """Whether it gets or sets an attribute that depends on no value."""
    kind = getattr(func, "__name__", "")
    if kind not in ("__get__", "__set__", "__delete__"):
        return False
    return kind != "__get__" or _name(func) in _FACT_ATTRIBUTES


def _is_of_tensors(func: Any, result: Any) -> bool:
    """Whether a result is tensors alone. What writes in place may give nothing."""
    if result is None:
        return _writes(func)
    return all(isinstance(x, torch.Tensor) for x in tree_leaves(result))


def _makes_shapes_of_values(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.where:
        return len(args) + len(kwargs) == 1
    if func in _REPEATS:
        return any_absent((args[1:] or args, kwargs))  # of repeats alone: these
    if func is torch.nn.functional.one_hot:
        return [*args[1:], *kwargs.values(), -1][0] == -1  # as many classes as the largest value asks for
    if func is _Tensor.__getitem__:
        return any(
            isinstance(x, ShapeOnlyTensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        )
    return False


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func is _Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def reads(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors whose values a function takes, but for the one that it writes into."""
    if func in _FACTS or _is_fact(func):
        return []
    nest = args[1:] if _writes(func) else args
    return [x for x in tree_leaves((nest, kwargs)) if isinstance(x, torch.Tensor)]


def overwrites(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensor of which a function keeps no value."""
    return [args[0]] if func in (_Tensor.zero_, _Tensor.fill_, _Tensor.copy_) else []


def writes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a function writes into, as far as its name and arguments tell."""
    first = _writes(func) or kwargs.get("inplace") is True or func == _SET_DATA
    nest = [args[:1] if first else (), kwargs.get("out")]
    return [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)] if first or "out" in kwargs else []


def _is_repeated(x: torch.Tensor) -> bool:
    """Whether several elements are the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True))


def _spread(func: Any, args: Any, kwargs: Any, origin: str) -> None:
    """A plain tensor into which something absent is written is absent too."""
    written = [args[0]] if args and _writes(func) else []
    for x in written + tree_leaves(kwargs.get("out")):
        lose(x, origin)


def lose(x: Any, origin: str) -> list[torch.Tensor]:
    """Makes a plain tensor, and what it is a view of, absent from now on; those that were not.

    Args:
        origin: the module that changes its values.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = [each for each in (x, getattr(x, "_base", None)) if type(each) is torch.Tensor]
        for each in found:
            each.__class__ = ShapeOnlyTensor
            each.__dict__["origin"] = origin
    return found


def find(x: torch.Tensor) -> None:
    """Makes an absent tensor a plain one again: it has values, or nobody looks at them."""
    if isinstance(x, ShapeOnlyTensor):
        x.__class__ = torch.Tensor


def any_absent(tree: Any) -> bool:
    """Whether a nest has such a tensor."""
    return any(isinstance(x, ShapeOnlyTensor) for x in tree_leaves(tree))


class Maker:
    """Makes them, those of one type of numbers in the same memory."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, torch.Tensor] = {}

    def make(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, origin: str = ""
    ) -> ShapeOnlyTensor:
        """Of a shape. ``origin``: the module whose result it is."""
        made = _turned(self._tensor(shape, dtype, device))
        made.origin = origin
        return made

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Whole numbers are new, since code may write into them."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype, device=device)
        numel = math.prod(shape)
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < numel or memory.device != device:
            memory = self._memory[dtype] = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        made = torch.empty(0, dtype=dtype, device=device)  # not a view: what writes into one does not age another
        return made.set_(memory.untyped_storage(), 0, shape)


def weightless(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In the place of a parameter or buffer: without memory of its own."""
    nothing = float("nan") if x.is_floating_point() or x.is_complex() else 0
    made = x.detach().new_full((), nothing, device=device).expand(x.shape).as_subclass(ShapeOnlyTensor)
    made.wants_gradient = x.requires_grad
    return made
