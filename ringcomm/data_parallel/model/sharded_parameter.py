"""A stage 3 parameter, and views of it, while its values are sharded over the ranks.

p.shape, p.stride()          answered without values
p.norm(), p.mul_(2)          the ranks gather the parameter's bucket, writes are kept, and the bucket is freed
                             (between forward and backward some buckets are gathered already, and stay)
v = p[0], p.t()              a view has its shape, strides and offset in the bucket's buffer, and a copy of the values
v.zero_(), v + 1             the bucket is gathered, and the operation is done in its buffer
p[0] while autograd records  reads use the copy, which is renewed after a write; writes go to the parameter
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map

from ringcomm.data_parallel.buckets.bucket import Bucket, ViewData, ViewGeometry, in_transform, untransformed
from ringcomm.data_parallel.model.place import Place
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.dynamo import eager

# Functions that need no values. Getters and setters of attributes are `__get__` and `__set__`.
_FACTS = {
    *("__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "is_same_size"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "has_names", "_is_view"),
    *("__hash__", "__repr__", "__len__", "__dir__"),
}
_LIKE = {  # create tensors like this one, or need only its type and device
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("is_shared", "is_pinned", "is_inference", "is_signed", "retain_grad", "result_type"),
}
_FACTS_OF_OTHER = {"to", "type_as", "view_as", "expand_as", "reshape_as"}  # need only the type or shape of argument 2
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

    Every view lies in the memory of a copy of the parameter's values. An operation on a view that has a gradient
    (`p[0]` outside `torch.no_grad()`) uses this copy, which is renewed first if the values were written since.
    """

    _ringcomm: Place
    _geometry: ViewGeometry | None = None  # None: the whole parameter
    _data: ViewData | None = None
    _copy: torch.Tensor | None = None  # the copy in whose memory the view is; ViewData refers to it weakly
    _versioned_by: torch.Tensor | None = None  # the tensor whose version counts writes into this view; None: this view

    @classmethod
    @eager
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and torch.is_grad_enabled():
            with torch.no_grad():  # these functions disable autograd inside, too
                return cls.__torch_function__(func, types, args, kwargs)
        if not args and "tensor" in kwargs:  # torch.nn.init passes it by name
            args, kwargs = (kwargs["tensor"],), {key: x for key, x in kwargs.items() if key != "tensor"}
        if name == "copy_" and len(args) > 1 and args[0] is args[1]:  # torch's load_state_dict, after our hook
            increment_version(args[0])
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("detach", "alias"):
            return _alias(args[0])
        if name == "__get__" and attribute == "data":
            with torch._C.DisableTorchFunctionSubclass():
                return _describe(args[0].data.as_subclass(ShardedView), args[0], _geometry_of(args[0]))
        if name == "__set__" and attribute == "data":
            return _set_data(*args)
        if name in _FACTS and attribute not in _VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _LIKE and (name == "result_type" or not any(map(_has_place, tree_leaves((args[1:], kwargs))))):
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = tree_map(_strided, (args, kwargs)) if name.endswith("_like") else (args, kwargs)
                return func(*args, **kwargs)
        if name in _FACTS_OF_OTHER and not _has_place(args[0]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _OF_AUTOGRAD:
            roots = _without_values(name, args, kwargs)
            if roots is not None:
                return func(*roots[0], **roots[1])
        if name == "storage_offset":
            return _start(args[0], args[0].itemsize) if args[0]._geometry is None else args[0]._geometry.offset
        if name in _STRIDES:
            return func(_like(args[0]), *args[1:], **kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if any(map(_has_gradient, tree_leaves((args, kwargs)))):
            return _with_own_values(name, func, args, kwargs)
        if name == "type" and len(args) + len(kwargs) == 1:
            return torch.empty(0, dtype=args[0].dtype, device=args[0].device).type()
        if name in _CONVERSIONS and _changes_nothing(func, args, kwargs):
            return args[0]
        return _with_values(name, func, args, kwargs)

    def set_(self, *source: Any, **kwargs: Any) -> ShardedView:
        """Same as ``self.data = source`` for a tensor; refuses a storage. A method, because torch does not call
        __torch_function__ for it."""
        if len(source) != 1 or kwargs or not isinstance(source[0], torch.Tensor):
            return _with_values("set_", torch.Tensor.set_, (self, *source), kwargs)
        _set_data(self, source[0])
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self._plain()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        """Returns the values as a plain parameter or tensor; a collective."""
        values = self.detach().clone()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(values, self.requires_grad)
        return values.requires_grad_(self.requires_grad)

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
    versioned_by = x._versioned_by if isinstance(x, ShardedView) and x._versioned_by is not None else x
    with torch._C.DisableTorchFunctionSubclass():
        return _describe(x.detach().as_subclass(ShardedView), x, _geometry_of(x), versioned_by=versioned_by)


def _describe(
    view: Any,
    of: Any,
    geometry: ViewGeometry | None,
    copy: torch.Tensor | None = None,
    versioned_by: torch.Tensor | None = None,
) -> ShardedView:
    """Makes ``view`` a view of the same parameter as ``of``, which is the parameter or a view of it.

    Args:
        copy: the copy of the parameter's values in whose memory the view is; None: the copy of ``of``.
        versioned_by: see `ShardedView`.
    """
    view._ringcomm, view._geometry, view._data = of._ringcomm, geometry, _data_of(of)
    view._copy = copy if copy is not None or not isinstance(of, ShardedView) else of._copy
    view._versioned_by = versioned_by
    return view


def _counters_of(x: Any) -> list[torch.Tensor]:
    """Returns the tensors whose versions count a write into ``x``: itself, what it is a view of, and so on."""
    found = [x]
    while isinstance(found[-1], ShardedView) and found[-1]._versioned_by is not None:
        found.append(found[-1]._versioned_by)
    return found


def _count_write(x: Any) -> None:
    """Increments the version counters of a parameter or view after a write that was made in the bucket's buffer."""
    place: Place = x._ringcomm
    place.views.are_stale = True
    if x is place.bucket.params[place.index] or x.is_inference():
        return
    counters = [(each, each._version) for each in _counters_of(x)]
    for each, before in counters:
        if each._version == before:  # else it shares a counter that was incremented already
            increment_version(each)


def _start(x: Any, itemsize: int) -> int:
    """Returns the parameter's offset in the bucket's buffer, in elements of ``itemsize`` bytes."""
    bucket = x._ringcomm._bucket()
    if bucket is None:  # dropped with its model
        return 0
    return int(bucket.layout.segments[x._ringcomm.index].offset * bucket.unsharded.itemsize // itemsize)


def _like(x: Any) -> torch.Tensor:
    """Returns a tensor without memory that has the strides of a parameter or view."""
    if x._geometry is None:
        bucket, flat = x._ringcomm._bucket(), torch.empty(x.shape.numel(), dtype=x.dtype, device="meta")
        return flat.view(x.shape) if bucket is None else bucket.layout.segments[x._ringcomm.index].view(flat)
    return torch.empty_strided(x.shape, x._geometry.stride, dtype=x.dtype, device="meta")


def _strided(x: Any) -> Any:
    """Returns a tensor with the strides of the values of ``x``, for functions such as `empty_like`. A placeholder has
    strides of 0, so torch would use the order of the shape."""
    if not _has_place(x) or x._geometry is not None:
        return x
    stride = _like(x).stride()
    plain = stride == torch.empty(x.shape, device="meta").stride()
    return x if plain else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)


def _set_data(p: ShardedView, values: torch.Tensor) -> None:
    """Implements `p.data = values`: this rank keeps its part of them."""
    place: Place = p._ringcomm
    if getattr(values, "_ringcomm", None) is place and _geometry_of(values) == _geometry_of(p):
        replaced = _replaced(values)
        if replaced is not None:
            _put_back(place, replaced)
        return
    if _geometry_of(p) is not None or p is not place.bucket.params[place.index]:
        raise InvalidArgumentError(
            f"`view.data = ...`: rank {place.flat.ranks.rank} got new memory for a view of {place.name}, expected a "
            "write into the view; use view.copy_(values)"
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
    bucket.views.data[i], data.piece, data.unsharded = data, None, None


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion, such as `to`, returns the parameter itself."""
    if getattr(func, "__name__", "") == "contiguous":
        return _like(args[0]).is_contiguous(*args[1:], **kwargs)
    like, memory_format = _like(args[0]), kwargs.get("memory_format", torch.preserve_format)
    if like.to(memory_format=memory_format) is not like:
        return False
    empty = torch.empty([0] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x for x in args[1:]]
    return func(empty, *rest, **kwargs) is empty


def _with_values(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the parameters' values."""
    given = [x for x in tree_leaves((args, kwargs)) if _has_place(x)]
    places = [x._ringcomm for x in given]
    if not all(place.alive for place in places):
        _refuse_dead(name)
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
            f"{name}: rank {places[0].flat.ranks.rank} wrote, while autograd records, into a leaf that requires a "
            f"gradient and shares the values of {places[0].name}; write inside torch.no_grad()"
        )
    with _gathered(places, name) as (renewed, staying), _own_classes(given):
        return _on_gathered(name, func, args, kwargs, given, written, renewed, staying)


@contextmanager
def _gathered(places: Sequence[Place], name: str) -> Iterator[tuple[set[Bucket], set[Bucket]]]:
    """Gathers the places' buckets for the block. Yields the buckets that the ranks gather now, whose copies of values
    are renewed, and the buckets that stay gathered after the block, inside a call."""
    buckets: dict[ShardedModel, dict[int, Bucket]] = {}  # model by model, in an order that is the same on all ranks
    for place in places:
        buckets.setdefault(place.flat, {})[place.bucket.number] = place.bucket
    renewed = {place.bucket for place in places if not place.bucket.is_unsharded}
    staying: set[Bucket] = set()
    with ExitStack() as borrowed:
        for flat, found in buckets.items():
            if borrowed.enter_context(flat.borrowing([found[k] for k in sorted(found)], places[0].name, name)):
                staying.update(found.values())
        for bucket in renewed:
            bucket.renew_copies()
        yield renewed, staying


def _on_gathered(
    name: str,
    func: Any,
    args: Any,
    kwargs: Any,
    given: Sequence[Any],
    written: Sequence[Any],
    renewed: set[Bucket],
    staying: set[Bucket],
) -> Any:
    """Calls ``func`` on the gathered values, and makes its results in the buckets' memory views of the parameters."""
    copies: dict[int, tuple[Any, torch.Tensor]] = {}  # by memory: leaves, and the copies that take their place
    values = {id(x): _values(x, renewed, copies) for x in given}
    if name in _COPIES:
        values = {key: x.detach().clone() for key, x in values.items()}
    args, kwargs = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
    read = [(x._ringcomm, x, values[id(x)]) for x in given if not _is_separate_leaf(x) and _replaced(x) is None]
    for place, x, value in read:
        if _has_storage(value):
            counters = place.flat.calls.counters.setdefault((place.bucket, place.index), {})
            counters[ViewGeometry.of(value)] = _counters_of(x)[-1]
    try:
        result = func(*args, **kwargs)
    finally:
        for place, _, _ in read:
            place.flat.calls.counters.pop((place.bucket, place.index), None)
        for x in written:
            if id(x) in values:
                _count_write(x)
    if hasattr(result, "wait"):  # a Work of torch.distributed; the values are freed after this
        result.wait()
    if name in _ARRAYS:
        result.flags.writeable = False  # writes into the copy would be lost
    originals = {id(values[id(x)]): x for x in given}
    freed = {x._ringcomm.bucket for x in given} - staying
    homes = {bucket.unsharded.untyped_storage()._cdata: bucket for bucket in freed}

    def shown(x: Any) -> Any:
        if id(x) in originals:
            return originals[id(x)]
        if _shares(x, copies):
            leaf, copy = copies[x.untyped_storage()._cdata]
            geometry = ViewGeometry.of(x).moved(_start(leaf, x.itemsize))
            x.__class__ = ShardedView  # `as_subclass` would put another node before it
            return _describe(x, leaf, geometry, copy)
        if not _shares(x, homes):
            return x
        base, geometry = _base_of(x, homes[x.untyped_storage()._cdata], given), ViewGeometry.of(x)
        copy = _copy_of(base, base._ringcomm.bucket.unsharded, renewed)
        memory = geometry.moved(-_start(base, x.itemsize)).on(copy)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _describe(memory.as_subclass(ShardedView), base, geometry, copy, versioned_by=base)
        x = _without_view_metadata(x)
        x.data = memory
        x.__class__ = ShardedView
        return _describe(x, base, geometry, copy)

    return tree_map(shown, result)


@untransformed
def _copy_of(x: Any, buffer: torch.Tensor, renewed: Collection[Bucket]) -> torch.Tensor:
    """Returns the copy of a parameter's values in whose memory its views are; ``buffer``: the gathered values."""
    place, data = x._ringcomm, _data_of(x)
    copy = data.copy()
    if copy is None or place.bucket not in renewed or _replaced(x) is not None:
        part = place.bucket.layout.part(buffer, place.index).detach()
        with torch.inference_mode(False), torch.no_grad():
            copy = part.clone() if copy is None else copy.copy_(part)
        data.copy = weakref.ref(copy)
    return copy


def _refuse_dead(name: str) -> NoReturn:
    raise InvalidArgumentError(
        f"{name}: got a view of a parameter whose model was dropped or unsharded since, expected a view of a sharded "
        "model's parameter; make the view again from the parameter"
    )


class _SavedInput(torch.autograd.Function):
    """Saves its input for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)


@untransformed
def _without_view_metadata(x: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor that is not a view for autograd, with the memory, the version counter and the grad_fn of
    ``x``.

    After an in-place write, autograd rebuilds the grad_fn of a view from the strides of its base. Here the base may be
    a placeholder by then, whose strides are 0, so the new grad_fn would be wrong. A tensor that a node has saved for
    backward comes back without view metadata, but with its grad_fn; so a node saves ``x``, and gives it back.
    """
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            node = _SavedInput.apply(x).grad_fn
            (plain,) = node.saved_tensors
            if plain.is_leaf:  # autograd alone does not keep the node that accumulates its gradient alive
                plain._node = node
    finally:
        if disabled is not None:
            torch._C._autograd._saved_tensors_hooks_disable(disabled)
    return plain


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def _own_classes(given: Sequence[Any]) -> Iterator[None]:
    """Inside the block, gathered parameters have their own classes, so that they can be computed with."""
    params = [x for x in given if isinstance(x, ShardedParameter) and not x._ringcomm.bucket.memory.has_own_classes]
    for p in params:
        p.__class__ = p._ringcomm.bucket.memory.classes[p._ringcomm.index]
    try:
        yield
    finally:
        for p in params:
            if not p._ringcomm.bucket.memory.has_own_classes:
                p.__class__ = ShardedParameter


def _without_values(name: str, args: Any, kwargs: Any) -> Any:
    """Returns the arguments of `torch.autograd.grad` or `backward` with plain tensors in place of views and leaves that
    have a gradient; None if there are no such arguments. Autograd needs only their places in the graph, so the call
    gathers nothing; hooks may read the values while it runs."""
    found = False

    def replaced(x: Any) -> Any:
        nonlocal found
        if not (_has_gradient(x) or _is_separate_leaf(x)):
            return x
        found = True
        with torch._C.DisableTorchFunctionSubclass():
            return _without_view_metadata(x)

    weights = 2 if name == "grad" else 1  # the position of the gradients of the outputs, which are values
    args = tuple(x if k == weights else tree_map(replaced, x) for k, x in enumerate(args))
    names = {"grad_outputs", "grad_tensors", "gradient"}
    kwargs = {key: x if key in names else tree_map(replaced, x) for key, x in kwargs.items()}
    return (args, kwargs) if found else None


def _with_own_values(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the copy of the values in whose memory views with a gradient are. Writes go to the
    parameter."""
    leaves = tree_leaves((args, kwargs))
    views = {id(x): x for x in leaves if _has_gradient(x)}
    targets = tree_leaves((args[:1], kwargs.get("out"))) if _writes(name, kwargs) else []
    if any(id(x) in views for x in targets):
        if torch.is_grad_enabled():
            place = next(x for x in targets if id(x) in views)._ringcomm
            raise InvalidArgumentError(
                f"{name}: rank {place.flat.ranks.rank} got a view of {place.name} that has a gradient, expected a view "
                "without one; make the view and write to it inside torch.no_grad()"
            )
        args_there, kwargs_there = tree_map(lambda x: _alias(x) if id(x) in views else x, (args, kwargs))
        func(*args_there, **kwargs_there)
        return kwargs["out"] if kwargs.get("out") is not None else args[0]
    _renew([*views.values()], name)
    if name == "as_strided":
        args, kwargs = _relative(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        own = {key: x.as_subclass(torch.Tensor) for key, x in views.items()}
    beside = any(_has_place(x) and id(x) not in own for x in leaves)  # parameters and views without a gradient
    if beside:
        args, kwargs = tree_map(lambda x: own.get(id(x), x), (args, kwargs))
    with nullcontext() if beside else torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        memories = {x._copy.untyped_storage()._cdata: x for x in views.values()}

    def shown(x: Any) -> Any:
        if not _shares(x, memories):
            return x
        view = memories[x.untyped_storage()._cdata]
        geometry = ViewGeometry.of(x).moved(_start(view, x.itemsize))
        return _describe(x.as_subclass(ShardedView), view, geometry, versioned_by=view._versioned_by)

    return tree_map(shown, result)


def _relative(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> tuple[Any, Any]:
    """Returns the arguments of `as_strided`, with the offset in the bucket's buffer converted to one in the copy."""
    offset = None if storage_offset is None else storage_offset - _start(x, x.itemsize)
    return (x, size, stride, offset), {}


def _renew(views: Sequence[Any], name: str) -> None:
    """Renews the copies of the values if the values were written since; in that case a collective."""
    alive = [x for x in views if x._ringcomm.alive]
    if any(x._ringcomm.views.are_stale for x in views if not x._ringcomm.alive):
        _refuse_dead(name)
    stale = [x for x in alive if x._ringcomm.bucket.is_unsharded or x._ringcomm.views.are_stale or _replaced(x)]
    if stale:
        with _gathered([x._ringcomm for x in stale], name) as (renewed, _):
            for x in {id(x._copy): x for x in stale}.values():
                _copy_of(x, _buffer_of(x), renewed)


def _shares(x: Any, memories: Collection[int]) -> bool:
    """Whether ``x`` is a plain tensor in one of the memories."""
    if not isinstance(x, torch.Tensor) or _has_place(x) or not _has_storage(x):
        return False
    return x.untyped_storage()._cdata in memories


def _writes(name: str, kwargs: Any) -> bool:
    in_place = (name.endswith("_") and not name.endswith("__")) or bool(kwargs.get("inplace"))
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _buffer_of(x: Any) -> torch.Tensor:
    """Returns the buffer with the current values of a gathered parameter or view."""
    bucket, replaced = x._ringcomm.bucket, _replaced(x)
    return bucket.unsharded if replaced is None else _unsharded_of(bucket, x._ringcomm.index, replaced)


def _values(x: Any, renewed: Collection[Bucket], copies: dict[int, tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """Returns the values of a gathered parameter or view, as a tensor that operations can use: the parameter itself, or
    a view of the buffer. For a leaf with its own gradient, returns the copy in whose memory the leaf's views are, and
    adds it to ``copies``."""
    geometry, place, buffer = _geometry_of(x), x._ringcomm, _buffer_of(x)
    if geometry is not None:
        return geometry.on(buffer)
    p = place.bucket.params[place.index]
    if x is p:
        return x
    if torch.is_grad_enabled() and _is_separate_leaf(x) and not in_transform():
        copy = _copy_of(x, buffer, renewed)
        with torch._C.DisableTorchFunctionSubclass():
            values = _without_view_metadata(x)
        values.data = copy
        copies[copy.untyped_storage()._cdata] = x, copy
        return values
    if x._versioned_by is p and _replaced(x) is None:
        with torch._C.DisableTorchFunctionSubclass():  # with p's version counter, also for views that the program keeps
            return p.detach().as_subclass(torch.Tensor)
    return place.bucket.layout.part(buffer, place.index).detach()


def _base_of(x: torch.Tensor, bucket: Bucket, given: Sequence[Any]) -> Any:
    """Returns which of the given parameters and views a tensor in the bucket's buffer is a view of."""
    index = bucket.layout.index_of(x.storage_offset() * x.itemsize // bucket.unsharded.itemsize)
    found = [y for y in given if y._ringcomm.bucket is bucket and _replaced(y) is None]
    return next((y for y in found if y._ringcomm.index == index), found[0])


def _has_storage(x: torch.Tensor) -> bool:
    """Whether a tensor can be asked for its storage."""
    return x.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _is_separate_leaf(x: Any) -> bool:
    """Whether ``x`` shares a parameter's values but has its own gradient, as `p.detach().requires_grad_()` has."""
    if not isinstance(x, ShardedView) or isinstance(x, ShardedParameter) or x._geometry is not None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def _unsharded_of(bucket: Bucket, i: int, data: ViewData) -> torch.Tensor:
    """Returns a buffer with the bucket's layout that holds replaced values; a collective the first time."""
    if data.unsharded is None:
        layout, ranks = bucket.layout, bucket.ranks
        start, end = layout.shard_range(ranks.rank)
        owned = data.piece.new_zeros(layout.shard_numel)
        layout.piece(owned, start, i)[0].copy_(data.piece)
        data.unsharded = ranks.gather_apart(owned, owned.device, bucket.stage)
        data.piece = layout.piece(data.unsharded[start:end], start, i)[0]
    return data.unsharded


def _has_gradient(x: Any) -> bool:
    """Whether ``x`` is a view that autograd tracks or accumulates a gradient for."""
    if not isinstance(x, ShardedView) or x._geometry is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


def _has_place(x: Any) -> bool:
    """Whether a tensor is a stage 3 parameter, which may have been gathered since, or a view of one."""
    return isinstance(x, torch.Tensor) and isinstance(getattr(x, "_ringcomm", None), Place)


def _has_memory(x: Any) -> bool:
    """Whether a parameter or view is a part of a gathered buffer."""
    return bool(x._ringcomm.bucket.is_unsharded) and _replaced(x) is None


def _geometry_of(x: Any) -> ViewGeometry | None:
    return x._geometry if isinstance(x, ShardedView) else None


def _data_of(x: Any) -> Any:
    """Returns the ViewData of a parameter or view."""
    return getattr(x, "_data", None) or x._ringcomm.data


def _replaced(x: Any) -> ViewData | None:
    """Returns the old values of a view made before `p.data` was replaced; None: it shares the parameter's values."""
    data = x._data if isinstance(x, ShardedView) else None
    return None if data is None or data is x._ringcomm.data else data
