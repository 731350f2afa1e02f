"""A stage 3 parameter, and views of it, while its values are sharded over the ranks.

p.shape, p.stride()          answered without values
p.norm(), p.mul_(2)          the ranks gather the parameter's bucket, writes are kept, and the bucket is freed
                             (between forward and backward some buckets are gathered already, and stay)
v = p[0], p.t()              a view has its shape, strides and offset in the bucket's buffer, and a copy of the values
v.zero_(), v + 1             the bucket is gathered, and the operation is done in its buffer
p[0] while autograd records  reads use the copy, which is renewed after a write; writes go to both
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ringcomm.data_parallel.buckets.bucket import Bucket, ViewData, Window
from ringcomm.data_parallel.buckets.group import unversioned
from ringcomm.data_parallel.model.sharded_model import Place, ShardedModel
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.dynamo import eager

# Functions that need no values. Getters and setters of attributes are `__get__` and `__set__`.
_FACTS = {
    *("__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "storage_offset", "is_same_size"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "has_names", "_is_view"),
    *("__hash__", "__repr__", "__len__", "__dir__"),
}
_LIKE = {  # create tensors like this one, or need only its type and device
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("is_shared", "is_pinned", "is_inference", "is_signed", "retain_grad", "result_type"),
}
_STRIDES = {"stride", "is_contiguous", "dim_order"}  # strides of the values, which the placeholder does not have
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "type"}
_VALUES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_ADDRESSES = {"data_ptr", "untyped_storage", "storage"}
_MEMORY = _ADDRESSES | {
    *("set_", "resize_", "resize_as_", "share_memory_"),
    *("reduce", "recv", "irecv"),  # torch.distributed writes different values on each rank
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
}
_ARRAYS = {"numpy", "__array__"}  # read-only copies
_OF_AUTOGRAD = {"grad", "backward"}
_COPIES = _ARRAYS | {"__dlpack__"}


class ShardedView(torch.Tensor):
    """A view of a stage 3 parameter while it is sharded, including `p.data` and `p.detach()`.

    Its shape needs no communication. Operations that need values gather them first, a collective that every rank must
    call. Writes into it are kept, by each rank for its own part; write the same values on every rank.

    A view that has a gradient (`p[0]` outside `torch.no_grad()`) has a copy of the values, which is renewed if they
    were written since.
    """

    _ringcomm: Place
    _window: Window | None = None  # None: the whole parameter
    _data: ViewData | None = None
    _copied: tuple[int, int]  # what `_writes_of` gave when the copy was made
    _counter: torch.Tensor | None = None  # whose version counts writes into this view; None: its own

    @classmethod
    @eager
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "copy_" and len(args) > 1 and args[0] is args[1]:  # torch's load_state_dict, after our hook
            increment_version(args[0])
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("detach", "alias"):
            return _alias(args[0])
        if name == "__get__" and attribute == "data":
            with torch._C.DisableTorchFunctionSubclass():
                return _note(args[0].data.as_subclass(ShardedView), args[0], _window(args[0]))
        if name == "__set__" and attribute == "data":
            return _set_data(*args)
        if name in _FACTS and attribute not in _VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _LIKE and (name == "result_type" or not any(map(_has_place, tree_leaves((args[1:], kwargs))))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _OF_AUTOGRAD:
            nodes = [x for x in tree_leaves((args, kwargs)) if _has_gradient(x) or _is_separate_leaf(x)]
            if nodes:
                with _as_tensors(nodes):
                    return func(*args, **kwargs)
        if name in _STRIDES:
            return func(_like(args[0]), *args[1:], **kwargs)
        if any(map(_has_gradient, tree_leaves((args, kwargs)))):
            return _with_own_values(name, func, args, kwargs)
        if name == "type" and len(args) + len(kwargs) == 1:
            return torch.empty(0, dtype=args[0].dtype, device=args[0].device).type()
        if name in _CONVERSIONS and _changes_nothing(func, args, kwargs):
            return args[0]
        if name == "__iter__":
            return iter(args[0].unbind(0))
        return _with_values(name, func, args, kwargs)

    def set_(self, *source: Any, **kwargs: Any) -> ShardedView:
        """Same as ``self.data = source`` for a tensor, and refused for a storage. torch calls no __torch_function__
        here."""
        if len(source) != 1 or kwargs or not isinstance(source[0], torch.Tensor):
            return _with_values("set_", torch.Tensor.set_, (self, *source), kwargs)
        _set_data(self, source[0])
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self._copy()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def _copy(self) -> torch.Tensor:
        """Returns the values as a plain parameter or tensor; a collective."""
        place, values = self._ringcomm, self.detach().clone()
        if self is place.bucket.params[place.index] or isinstance(self, nn.Parameter):
            return nn.Parameter(values, self.requires_grad)
        return values.requires_grad_(_is_separate_leaf(self))

    def __format__(self, spec: str) -> str:
        is_number = type(self) is ShardedView and not self.dim()  # of torch's classes, a parameter takes no spec
        return format(self.item(), spec) if spec and is_number else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        name = f"{self._ringcomm.name}, " if self._ringcomm.alive else ""
        return f"{type(self).__name__}({name}shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardedParameter(ShardedView, nn.Parameter):
    """The class of a stage 3 parameter while it is sharded."""


def _alias(x: Any) -> ShardedView:
    """Returns the same parameter or view, detached from autograd, with the same version counter."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = _note(x.detach().as_subclass(ShardedView), x, _window(x))
    alias._counter = x._counter if isinstance(x, ShardedView) else None
    return alias


def _view(x: torch.Tensor, of: Any, window: Window | None) -> ShardedView:
    """Makes ``x``, a copy of some values of ``of``, a view of it."""
    view = _note(x.as_subclass(ShardedView), of, window)
    view._counter = _counter(of)
    return view


def _note(view: Any, of: Any, window: Window | None) -> ShardedView:
    view._ringcomm, view._window, view._data = of._ringcomm, window, _replaced(of) or of._ringcomm.data
    view._copied = _writes_of(view)
    return view


def _writes_of(view: Any) -> tuple[int, int]:
    """Counts the writes into a view's parameter: those that autograd counts, and those through other tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if view.is_inference() else view._version, view._ringcomm.bucket.writes


def _count_write(x: Any) -> None:
    """Counts a write that was made in the bucket's buffer."""
    x._ringcomm.bucket.writes += 1
    counter = _counter(x)
    if x is not x._ringcomm.bucket.params[x._ringcomm.index] and not counter.is_inference():
        increment_version(counter)


def _counter(x: Any) -> torch.Tensor:
    other = x._counter if isinstance(x, ShardedView) else None
    return x if other is None else other


def _like(x: Any) -> torch.Tensor:
    """Returns a tensor without memory that has the strides of a parameter or view."""
    if x._window is None:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return torch.empty_strided(x.shape, x._window.stride, dtype=x.dtype, device="meta")


def _set_data(p: torch.Tensor, values: torch.Tensor) -> None:
    """Implements `p.data = values`: this rank keeps its part of them."""
    place: Place = p._ringcomm
    if not isinstance(p, ShardedView):  # it is unsharded
        with torch._C.DisableTorchFunctionSubclass():
            p.data = values.clone()
        return
    if getattr(values, "_ringcomm", None) is place and _window(values) == _window(p):
        replaced = _replaced(values)
        if replaced is not None:
            _put_back(place, replaced)
        return
    if _window(p) is not None or p is not place.bucket.params[place.index]:
        raise InvalidArgumentError(
            f"`view.data = ...`: rank {place.flat.ranks.rank} got other memory for a view of {place.name}, expected "
            "values that are written into it; use view.copy_(values)"
        )
    if (values.shape, values.dtype, values.device) != (p.shape, p.dtype, p.device):
        raise InvalidArgumentError(
            f"`p.data = ...`: rank {place.flat.ranks.rank} got a tensor of {tuple(values.shape)} {values.dtype} on "
            f"{values.device} for {place.name}, expected {tuple(p.shape)} {p.dtype} on {p.device}; change the module "
            "before it is wrapped, or take it out with ringcomm.unshard, change it and wrap it again"
        )
    place.bucket.set_data(place.index, values.clone() if isinstance(values, ShardedView) else values)


def _put_back(place: Place, data: ViewData) -> None:
    """Implements `p.data = kept`: the parameter shares the views' memory again, including writes into the views."""
    bucket, i = place.bucket, place.index
    bucket.release()
    bucket.replace_data(i)
    bucket.piece(bucket.weight, i).copy_(data.piece)
    bucket.view_data[i], data.piece, data.unsharded = data, None, None


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion, such as `to`, returns the parameter itself."""
    if getattr(func, "__name__", "") == "contiguous":
        return _like(args[0]).is_contiguous(*args[1:], **kwargs)
    twin = torch.empty([0] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x for x in args[1:]]
    return func(twin, *rest, **kwargs) is twin


def _with_values(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the parameters' values."""
    given = [x for x in tree_leaves((args, kwargs)) if _has_place(x)]
    places = [x._ringcomm for x in given]
    if not all(place.alive for place in places):
        raise InvalidArgumentError(
            f"{name}: got a view of a parameter whose model was dropped or unsharded since, expected one of a model "
            "that is sharded; take the view of the parameter as it is now"
        )
    if name in _MEMORY and not (name in _ADDRESSES and all(map(_has_memory, given))):
        is_gathered = places[0].bucket.is_unsharded
        which = "which shares memory with other parameters" if is_gathered else "whose values are in the ranks' shards"
        raise InvalidArgumentError(
            f"{name}: rank {places[0].flat.ranks.rank} got {places[0].name}, {which}, "
            "expected a parameter with memory of its own; enter ringcomm.whole(module), or use state_dict()"
        )
    written = tree_leaves((args[:1], kwargs.get("out"))) if _writes(name, kwargs) else []
    if torch.is_grad_enabled() and any(map(_is_separate_leaf, written)):
        raise InvalidArgumentError(
            f"{name}: rank {places[0].flat.ranks.rank} got a leaf that requires a gradient and shares the values of "
            f"{places[0].name}, expected one that is not written while autograd records; write inside of "
            "torch.no_grad()"
        )
    buckets: dict[ShardedModel, dict[int, Bucket]] = {}  # model by model, in an order that is the same on all ranks
    for place in places:
        buckets.setdefault(place.flat, {})[place.bucket.number] = place.bucket
    with ExitStack() as borrowed:
        stays = {
            flat: borrowed.enter_context(flat.borrowing([found[k] for k in sorted(found)], places[0].name, name))
            for flat, found in buckets.items()
        }
        borrowed.enter_context(_own_classes(given))
        values = {id(x): _values(x).detach().clone() if name in _COPIES else _values(x) for x in given}
        args_with_values, kwargs_with_values = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        result = func(*args_with_values, **kwargs_with_values)
        for x in written:
            if id(x) in values:
                _count_write(x)
        if hasattr(result, "wait"):  # a Work of torch.distributed; the values are freed after this
            result.wait()
        if name in _ARRAYS:
            result.flags.writeable = False  # writes into the copy would be lost
        originals = {id(values[id(x)]): x for x in given}
        leaves = [x for x in given if _is_separate_leaf(x) and values[id(x)].requires_grad]
        copies = {values[id(x)].untyped_storage()._cdata: x for x in leaves}
        used = {place.bucket for place in places if not stays[place.flat]}
        homes = {bucket.unsharded.untyped_storage()._cdata: bucket for bucket in used}

        def shown(x: Any) -> Any:
            if id(x) in originals:
                return originals[id(x)]
            if _shares(x, copies):
                return _slice_of_leaf(x, copies[x.untyped_storage()._cdata])
            if not _shares(x, homes):
                return x
            of, window = _origin(x, homes[x.untyped_storage()._cdata], given), Window.of(x)
            if not (torch.is_grad_enabled() and x.requires_grad):
                return _view(x.clone(), of, window)
            x = _with_own_memory(x, x.detach())
            x.__class__ = ShardedView  # `as_subclass` would put another node before it
            return _note(x, of, window)

        return tree_map(shown, result)


class _SavedInput(torch.autograd.Function):
    """Saves its input for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


def _with_own_memory(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of values with a view's own autograd node, because programs look for the parameter's node behind
    it, and with the view's version counter.

    autograd does not take the copy for a view: after a write it would make a view's node again, from the strides that
    the parameter has then, and those of a placeholder are other ones. What a node has saved is such a tensor.
    """
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # not inside of torch.func, where there are none
    with torch.autograd.graph.saved_tensors_hooks(_same, _same) if enabled else nullcontext():
        (copy,) = _SavedInput.apply(view).grad_fn.saved_tensors
    copy.data = _memory_of(values).clone().as_strided(values.shape, values.stride())  # strides choose the kernels
    return copy


def _memory_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the memory from a tensor's first element to its last, as a vector."""
    steps = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((steps + 1 if x.numel() else 0,), (1,))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def _own_classes(given: Sequence[Any]) -> Iterator[None]:
    """Inside, gathered parameters have their own classes, so that they can be computed with."""
    params = [x for x in given if isinstance(x, ShardedParameter) and not x._ringcomm.bucket.memory.is_plain]
    for p in params:
        p.__class__ = p._ringcomm.bucket.memory.classes[p._ringcomm.index]
    try:
        yield
    finally:
        for p in params:
            if not p._ringcomm.bucket.memory.is_plain:
                p.__class__ = ShardedParameter


@contextmanager
def _as_tensors(nodes: Sequence[Any]) -> Iterator[None]:
    """Inside, autograd finds these views and leaves in the graph; it needs no values of them."""
    for x in nodes:
        x.__class__ = torch.Tensor
    try:
        yield
    finally:
        for x in nodes:
            x.__class__ = ShardedView


def _with_own_values(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the copies that views with a gradient have. Writes into a copy are also made in the
    parameter."""
    if not args and "tensor" in kwargs:  # torch.nn.init passes it by name
        args, kwargs = (kwargs["tensor"],), {key: x for key, x in kwargs.items() if key != "tensor"}
    leaves = tree_leaves((args, kwargs))
    views = {id(x): x for x in leaves if _has_gradient(x)}
    for x in views.values():
        _renew(x)
    with torch._C.DisableTorchFunctionSubclass():
        own = {key: x.as_subclass(torch.Tensor) for key, x in views.items()}
    writes = _writes(name, kwargs)
    targets = [x for x in tree_leaves((args[:1], kwargs.get("out"))) if id(x) in own] if writes else []
    if targets:
        place = targets[0]._ringcomm
        of_init = getattr(func, "__module__", "") == "torch.nn.init"  # whose functions write inside of torch.no_grad()
        if (torch.is_grad_enabled() and not of_init) or kwargs.get("out") is not None:
            raise InvalidArgumentError(
                f"{name}: rank {place.flat.ranks.rank} got a view of {place.name} that has a gradient, expected one "
                "without; make the view, and write, inside of torch.no_grad()"
            )
        first = tree_map(lambda x: _alias(x) if id(x) in own else x, args[0])
        with torch.no_grad():
            func(first, *tree_map(lambda x: own.get(id(x), x), args[1:]), **kwargs)
            for x in targets:
                own[id(x)].copy_(_alias(x))
                x._copied = _writes_of(x)
        return args[0]
    if any(_has_place(x) and id(x) not in own for x in leaves):
        args, kwargs = tree_map(lambda x: own.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        memories = {x.untyped_storage()._cdata: views[key] for key, x in own.items()}
    found, structure = tree_flatten(result)
    if any(_shares(x, memories) for x in found):  # find the results' places in the parameter
        args, kwargs = tree_map(lambda x: _alias(x) if id(x) in views else x, (args, kwargs))
        with torch.no_grad():
            there = tree_leaves(func(*args, **kwargs))
        for at, (x, y) in enumerate(zip(found, there, strict=True)):
            # `y` is a plain tensor if the bucket stays gathered, or if it is a view of replaced data.
            if _shares(x, memories):
                view = memories[x.untyped_storage()._cdata]
                found[at] = _note(x.as_subclass(ShardedView), view, _window(y) or Window.of(y))
    return tree_unflatten(found, structure)


def _renew(view: Any) -> None:
    """Copies the values again if they were written; then a collective."""
    place = view._ringcomm
    if place.alive and view._copied != _writes_of(view):
        with torch._C.DisableTorchFunctionSubclass():
            copy = _memory_of(view.detach().as_subclass(torch.Tensor))
        with place.flat.borrowing([place.bucket], place.name, "a view"), torch.no_grad(), unversioned(copy):
            copy.copy_(_memory_of(_values(view)))
        view._copied = _writes_of(view)


def _shares(x: Any, memories: Collection[int]) -> bool:
    """Whether ``x`` is a plain tensor in one of the memories."""
    if not isinstance(x, torch.Tensor) or _has_place(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return x.layout == torch.strided and x.untyped_storage()._cdata in memories


def _writes(name: str, kwargs: Any) -> bool:
    in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _values(x: Any) -> torch.Tensor:
    """Returns the values of a gathered parameter, as the parameter itself if it can be computed with, or of a view."""
    window, place, replaced = _window(x), x._ringcomm, _replaced(x)
    buffer = place.bucket.unsharded if replaced is None else _unsharded_of(place.bucket, place.index, replaced)
    if window is not None:
        return window.on(buffer)
    if x is place.bucket.params[place.index]:
        return x
    values = place.bucket.layout.part(buffer, place.index).detach()
    if torch.is_grad_enabled() and _is_separate_leaf(x) and torch._C._functorch.peek_interpreter_stack() is None:
        with torch._C.DisableTorchFunctionSubclass():
            return _with_own_memory(x.view_as(x).as_subclass(torch.Tensor), values)
    return values


def _origin(x: torch.Tensor, bucket: Bucket, given: Sequence[Any]) -> Any:
    """Returns the one of the given parameters and views that a tensor in the bucket's buffer is a view of."""
    index = bucket.layout.index_of(x.storage_offset() * x.itemsize // bucket.unsharded.itemsize)
    found = [y for y in given if y._ringcomm.bucket is bucket and _replaced(y) is None]
    return next((y for y in found if y._ringcomm.index == index), found[0])


def _slice_of_leaf(x: Any, leaf: Any) -> ShardedView:
    """Makes a slice of a leaf's values, which autograd has recorded, a view of the parameter."""
    start = leaf._ringcomm.bucket.layout.segments[leaf._ringcomm.index].offset * leaf.itemsize // x.itemsize
    window = Window.of(x)
    x.__class__ = ShardedView
    return _note(x, leaf, window._replace(offset=start + window.offset))


def _is_separate_leaf(x: Any) -> bool:
    """Whether ``x`` shares a parameter's values but has a gradient of its own."""
    if not isinstance(x, ShardedView) or x._window is not None or x is x._ringcomm.bucket.params[x._ringcomm.index]:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def _unsharded_of(bucket: Bucket, i: int, data: ViewData) -> torch.Tensor:
    """Returns a buffer with the bucket's layout that holds replaced values; a collective the first time."""
    if data.unsharded is None:
        layout, ranks = bucket.layout, bucket.ranks
        start, end = layout.shard_range(ranks.rank)
        owned, data.unsharded = data.piece.new_zeros(layout.shard_numel), data.piece.new_empty(layout.numel)
        layout.piece(owned, start, i)[0].copy_(data.piece)
        with unversioned(data.unsharded):
            ranks.comm.all_gather(owned, out=data.unsharded)
        data.piece = layout.piece(data.unsharded[start:end], start, i)[0]
    return data.unsharded


def _has_gradient(x: Any) -> bool:
    """Whether ``x`` is a view that autograd tracks or accumulates a gradient for."""
    if not isinstance(x, ShardedView) or x._window is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def _has_place(x: Any) -> bool:
    """Whether a tensor is a stage 3 parameter, which may have been gathered since, or a view of one, outside of
    `_as_tensors`."""
    is_tensor = isinstance(x, torch.Tensor) and type(x) is not torch.Tensor
    return is_tensor and isinstance(getattr(x, "_ringcomm", None), Place)


def _has_memory(x: Any) -> bool:
    """Whether a parameter or view is a part of a gathered buffer."""
    return bool(x._ringcomm.bucket.is_unsharded) and _replaced(x) is None


def _window(x: Any) -> Window | None:
    return x._window if isinstance(x, ShardedView) else None


def _replaced(x: Any) -> ViewData | None:
    """Returns the memory of a view made before `p.data` was replaced; None: it shares the parameter's memory."""
    data = x._data if isinstance(x, ShardedView) else None
    now = None if data is None else x._ringcomm.data
    return None if now is None or data is now else data
