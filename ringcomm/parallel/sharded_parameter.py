"""A parameter of stage 3 while its values are in the ranks' shards, and views of it.

p.shape, p.stride()         answered without values
p.norm(), p.mul_(2)         the ranks gather the parameter's group; what was written is kept; the group goes
v = p[0], p.t(), p.data     a view has no memory: it remembers the operation that made it
v.zero_(), v + 1            the group is gathered, the operation done again, and its result used
p[0] with gradients         a copy, so that its gradient comes to the parameter; written into, it does as a view
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ringcomm.errors import InvalidArgumentError
from ringcomm.parallel.place import Place, place_of

if TYPE_CHECKING:
    from ringcomm.parallel.flat_model import FlatModel
    from ringcomm.parallel.group import FlatGroup

# What can be asked for without values. Getters and setters of attributes are `__get__` and `__set__`.
_FACTS = {
    *("__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "is_contiguous", "storage_offset", "is_same_size"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "has_names", "_is_view", "type"),
    *("__hash__", "__repr__", "__len__", "__dir__", "__format__"),
}
_STRIDES = {"stride", "is_contiguous"}  # of the values: what stands for them has none
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "type"}
_VALUES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_MEMORY = {
    *("data_ptr", "untyped_storage", "storage", "set_", "resize_", "resize_as_", "share_memory_"),
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
}
_ARRAYS = {"numpy", "__array__"}  # read-only copies
_COPIES = _ARRAYS | {"__dlpack__"}


@dataclass(frozen=True)
class _Operation:
    """What has made a view: tensor number ``at`` in what ``function(*args, **kwargs)`` gives."""

    function: Any
    args: Any
    kwargs: Any
    at: int
    like: torch.Tensor  # on meta, with the view's shape and strides


class ShardedView(torch.Tensor):
    """A view of a parameter of stage 3 while it is in shards, also `p.data` and `p.detach()`.

    Its shape can be asked for without communication. Whatever needs values collects them first: a collective, which
    every rank has to call. What is written into it counts, each rank's part of it; write the same on every rank.

    A view that autograd follows (`p[0]` outside of `torch.no_grad()`) has values of its own, and costs nothing more.
    """

    _ringcomm: Place
    _made_by: _Operation | None = None  # None: all of the parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "copy_" and len(args) > 1 and args[0] is args[1]:  # torch's load_state_dict, after ours
            return args[0]
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("detach", "alias") or (name == "__get__" and attribute == "data"):
            return _alias(args[0])
        if name == "__set__" and attribute == "data":
            return _set_data(*args)
        if any(map(_is_followed, tree_leaves((args, kwargs)))):
            return _with_followed(func, args, kwargs)
        if name in _CONVERSIONS and len(args) + len(kwargs) > (name == "type") and _changes_nothing(func, args, kwargs):
            return args[0]
        if name in _STRIDES:
            return func(_like(args[0]), *args[1:], **kwargs)
        if name in _FACTS and not (name == "__get__" and attribute in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        return _with_values(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self._copy()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)

    def _copy(self) -> torch.Tensor:
        """The values, as a plain parameter or tensor; a collective."""
        place, values = self._ringcomm, self.detach().clone()
        return nn.Parameter(values, self.requires_grad) if self is place.group.params[place.index] else values

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        place = place_of(self)
        name = "" if place is None else f"{place.name}, "
        return f"{type(self).__name__}({name}shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardedParameter(ShardedView, nn.Parameter):
    """The class of a parameter of stage 3 while it is in shards."""


def _alias(x: Any) -> ShardedView:
    """The same parameter or view without its history of gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        return _view(x.detach(), x._ringcomm, _made_by(x))


def _view(x: torch.Tensor, place: Place, made_by: _Operation | None) -> ShardedView:
    view = x.as_subclass(ShardedView)
    view._ringcomm, view._made_by = place, made_by
    return view


def _like(x: Any) -> torch.Tensor:
    """A tensor without memory that has the strides of a parameter or view."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if x._made_by is None else x._made_by.like


def _set_data(p: torch.Tensor, values: torch.Tensor) -> None:
    """`p.data = values`: this rank takes its part of them."""
    place = place_of(p)
    assert place is not None
    if getattr(values, "_ringcomm", None) is p._ringcomm and _made_by(values) is _made_by(p):
        return
    if _made_by(p) is not None:
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
    place.group.load(place.index, values.clone() if isinstance(values, ShardedView) else values)
    place.group.publish()


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion, such as `to`, gives the parameter itself."""
    if getattr(func, "__name__", "") == "contiguous":
        return _like(args[0]).is_contiguous(*args[1:], **kwargs)
    twin = torch.empty([0] * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x for x in args[1:]]
    return func(twin, *rest, **kwargs) is twin


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the parameters' values."""
    places = [x._ringcomm for x in _params_of((args, kwargs))]
    name = getattr(func, "__name__", str(func))
    if not all(place.alive and not place.flat.unwrapped for place in places):
        raise InvalidArgumentError(
            f"{name}: got a view of a parameter whose model was dropped or unsharded since, expected one of a model "
            "that is sharded; take the view of the parameter as it is now"
        )
    if name in _MEMORY:
        raise InvalidArgumentError(
            f"{name}: rank {places[0].flat.ranks.rank} got {places[0].name}, whose values are in the ranks' shards, "
            "expected a parameter with memory of its own; enter ringcomm.whole(module), or use state_dict()"
        )
    groups: dict[FlatModel, dict[int, FlatGroup]] = {}  # a model after the other, in an order that all ranks have
    for place in places:
        groups.setdefault(place.flat, {})[place.group.number] = place.group
    with ExitStack() as borrowed:
        stays = {
            flat: borrowed.enter_context(flat.borrowing([found[k] for k in sorted(found)], places[0].name, name))
            for flat, found in groups.items()
        }
        values = _values_of((args, kwargs), _copied if name in _COPIES else _values)
        args_with_values, kwargs_with_values = tree_map(lambda x: values.get(id(x), x), (args, kwargs))
        result = func(*args_with_values, **kwargs_with_values)
        if _writes(name, kwargs):
            for group in [group for found in groups.values() for group in found.values()]:
                group.take_over()
        if name in _ARRAYS:
            result.flags.writeable = False  # what is written into a copy would be lost
        originals = {id(values[id(x)]): x for x in tree_leaves((args, kwargs)) if id(x) in values}
        result = tree_map(lambda x: originals.get(id(x), x), result)
        homes = {place.group.whole.untyped_storage()._cdata: place for place in places if not stays[place.flat]}
        return _with_views(result, homes, func, args, kwargs)


def _with_followed(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the values that views which autograd follows have themselves. What is written into one is
    written into the parameter too."""
    name, leaves = getattr(func, "__name__", str(func)), tree_leaves((args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        followed = {id(x): x for x in leaves if _is_followed(x)}
        own = {key: x.as_subclass(torch.Tensor) for key, x in followed.items()}
    target = kwargs.get("out", args[0] if args else None)
    if id(target) in own and _writes(name, kwargs):
        if torch.is_grad_enabled() or target is kwargs.get("out"):
            raise InvalidArgumentError(
                f"{name}: rank {target._ringcomm.flat.ranks.rank} got a view of {target._ringcomm.name} that autograd "
                "follows, expected one without gradients; make the view, and write, inside of torch.no_grad()"
            )
        rest = tree_map(lambda x: own.get(id(x), x), args[1:])
        func(_alias(target), *rest, **kwargs)
        own[id(target)].copy_(_alias(target))
        return target
    if any(_lies_in_shards(x) and id(x) not in own for x in leaves):
        exchanged = tree_map(lambda x: own.get(id(x), x), (args, kwargs))
        return func(*exchanged[0], **exchanged[1])
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        homes = {x.untyped_storage()._cdata: followed[key]._ringcomm for key, x in own.items()}
    args, kwargs = tree_map(lambda x: _alias(x) if id(x) in followed else x, (args, kwargs))
    return _with_views(result, homes, func, args, kwargs, copies=False)


def _with_views(result: Any, homes: dict[int, Place], func: Any, args: Any, kwargs: Any, copies: bool = True) -> Any:
    """The result of an operation, where what shares memory with a parameter's values is a view of the parameter.

    Args:
        homes: the memory, and whose it is.
        copies: whether the memory goes, so that what autograd follows must get its own.
    """
    leaves, structure = tree_flatten(result)
    for at, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor) or _lies_in_shards(x):
            continue
        place = homes.get(x.untyped_storage()._cdata)
        if place is None:
            continue
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if x.grad_fn is None:
            values = x.new_full((), math.nan if x.is_floating_point() else -1).expand(x.shape)
        else:
            values = x.clone() if copies else x
        leaves[at] = _view(values, place, _Operation(func, args, kwargs, at, like))
    return tree_unflatten(leaves, structure)


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _params_of(arguments: Any) -> Iterator[torch.Tensor]:
    """The parameters of stage 3 among an operation's arguments, and those that views among them are of."""
    for x in tree_leaves(arguments):
        made = _made_by(x)
        if made is not None:
            yield from _params_of((made.args, made.kwargs))
        elif _lies_in_shards(x):
            yield x


def _values_of(arguments: Any, values: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, torch.Tensor]:
    """By id, the values of the parameters and views among an operation's arguments, which were collected."""
    return {id(x): values(x) for x in tree_leaves(arguments) if _lies_in_shards(x)}


def _values(x: Any) -> torch.Tensor:
    """The values of a parameter, as the parameter itself if it can be computed with, or of a view."""
    made, place = _made_by(x), x._ringcomm
    if made is not None:
        of = _values_of((made.args, made.kwargs), _values)
        args, kwargs = tree_map(lambda each: of.get(id(each), each), (made.args, made.kwargs))
        with torch.no_grad():
            found: torch.Tensor = tree_leaves(made.function(*args, **kwargs))[made.at]
        return found.detach()
    return x if x is place.group.params[place.index] else place.group.view(place.index).detach()


def _copied(x: Any) -> torch.Tensor:
    return _values(x).detach().clone()


def _is_followed(x: Any) -> bool:
    """Whether this is a view that autograd follows."""
    if not isinstance(x, ShardedView):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.grad_fn is not None


def _lies_in_shards(x: Any) -> bool:
    """Whether a tensor is a parameter of stage 3, which may have been collected since, or a view of one."""
    return isinstance(x, torch.Tensor) and hasattr(x, "_ringcomm")


def _made_by(x: Any) -> _Operation | None:
    return x._made_by if isinstance(x, ShardedView) else None
