"""A parameter of stage 3 while its values are in the ranks' shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError
from ringcomm.parallel.place import place_of

if TYPE_CHECKING:
    from ringcomm.parallel.group import FlatGroup

# What can be asked for without values. Getters and setters of attributes are `__get__` and `__set__`.
_FACTS = {
    *("__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "is_contiguous", "storage_offset", "is_same_size"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "has_names", "_is_view", "type"),
    *("__hash__", "__repr__", "__len__", "__dir__", "__format__", "__bool__", "__reduce_ex__", "__deepcopy__"),
}
_CONVERSIONS = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous", "type"}
_VALUES = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_MEMORY = {"data_ptr", "untyped_storage", "storage", "set_", "resize_", "share_memory_"}
_COPIES = {"numpy", "__array__", "__dlpack__"}  # what gives memory away gets a copy


class ShardedParameter(nn.Parameter):
    """The class of a parameter of stage 3 while it is in shards, and of what `p.data` and `p.detach()` give of it.

    Its shape can be asked for without communication. Whatever needs values collects them first: a collective, which
    every rank has to call. What is written into it counts, each rank's part of it; write the same on every rank.
    """

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
        if name in _CONVERSIONS and len(args) + len(kwargs) > (name == "type") and _changes_nothing(func, args, kwargs):
            return args[0]
        if name in _FACTS and not (name == "__get__" and attribute in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _with_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        place = place_of(self)
        name = "" if place is None else f"{place.name}, "
        return f"ShardedParameter({name}shape={tuple(self.shape)}, dtype={self.dtype})"


def _alias(x: torch.Tensor) -> ShardedParameter:
    """The same parameter without its history of gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        made = x.detach().as_subclass(ShardedParameter)
    made._ringcomm = x._ringcomm
    return made


def _set_data(p: torch.Tensor, values: torch.Tensor) -> None:
    """`p.data = values`: this rank takes its part of them."""
    place = place_of(p)
    assert place is not None
    if getattr(values, "_ringcomm", None) is p._ringcomm:
        return
    if (values.shape, values.dtype, values.device) != (p.shape, p.dtype, p.device):
        raise InvalidArgumentError(
            f"`p.data = ...`: rank {place.flat.ranks.rank} got a tensor of {tuple(values.shape)} {values.dtype} on "
            f"{values.device} for {place.name}, expected {tuple(p.shape)} {p.dtype} on {p.device}; change the module "
            "before it is wrapped"
        )
    place.group.load(place.index, values)
    place.group.publish()


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion, such as `to`, gives the parameter itself."""
    twin = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=x.dtype, device=x.device) if isinstance(x, torch.Tensor) else x for x in args[1:]]
    return func(twin, *rest, **kwargs) is twin


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` on the parameters' values."""
    given = [x for x in _flat([*args, *kwargs.values()]) if isinstance(x, ShardedParameter)]
    places = [x._ringcomm for x in given]
    name = getattr(func, "__name__", str(func))
    if name in _MEMORY:
        raise InvalidArgumentError(
            f"{name}: rank {places[0].flat.ranks.rank} got {places[0].name}, whose values are in the ranks' shards, "
            "expected a parameter with memory of its own; enter ringcomm.whole(module), or use state_dict()"
        )
    groups = {place.group.number: place.group for place in places}
    with places[0].flat.borrowing([groups[number] for number in sorted(groups)], places[0].name, name) as stays:
        values = [_values(x, name in _COPIES) for x in args]
        result = func(*values, **{key: _values(x, False) for key, x in kwargs.items()})
        if _writes(name, kwargs):
            for group in groups.values():
                group.take_over()
            return given[0] if isinstance(result, torch.Tensor) else result
        return result if stays else _apart(result, [*groups.values()])


def _apart(result: Any, groups: list[FlatGroup]) -> Any:
    """The result, with memory of its own in the place of the groups', which goes."""
    if isinstance(result, (list, tuple)):
        return type(result)(_apart(each, groups) for each in result)
    homes = [group.whole.untyped_storage()._cdata for group in groups]
    shared = isinstance(result, torch.Tensor) and result.untyped_storage()._cdata in homes
    return result.clone() if shared else result


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _values(x: Any, copied: bool) -> Any:
    """The argument with values in the place of sharded parameters: of those that were collected the parameter itself
    can be computed with."""
    if isinstance(x, (list, tuple)):
        return type(x)(_values(each, copied) for each in x)
    place = x._ringcomm if isinstance(x, torch.Tensor) and hasattr(x, "_ringcomm") else None
    if place is None or (x is place.group.params[place.index] and not copied):
        return x
    return place.group.view(place.index).clone() if copied else place.group.view(place.index)


def _flat(values: Any) -> list[Any]:
    found = []
    for value in values if isinstance(values, (list, tuple)) else [values]:
        found += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
