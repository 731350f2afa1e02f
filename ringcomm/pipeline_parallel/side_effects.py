"""Records a module's side effects: everything that a call leaves besides its return value. These are attributes that it
sets, items that it adds to its own or its arguments' lists, dicts and objects, and values that it writes into tensor
arguments.

A stage records the side effects of each of its modules. When the forward pass of a later stage reaches the call of that
module, the later stage repeats them. So an auxiliary loss that a module stores in an attribute or appends to a list is
present when the model adds it up.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.notes import NAME

# Attributes that every module has, and those in which torch's recurrent layers keep their parameters a second time.
_OWN = {*vars(nn.Module()), NAME, "_flat_weights", "_flat_weight_refs"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FOREIGN = ("torch", "ringcomm", "logging", "threading", "multiprocessing", "concurrent", "asyncio")
"""Packages whose objects are not inspected, because they hold no results of the model."""
_OPENED = 3  # how many levels of objects in attributes are inspected; objects in arguments are inspected at all levels
Location = tuple[Any, ...]
"""The location of a container: the name of a module, or None for the arguments of the call, followed by keys."""


@dataclass(frozen=True, slots=True)
class SideEffect:
    """One side effect of a call.

    Attributes:
        place: the location of the container.
        key: the key in a dict, the name of an attribute, or the index in a list at which the value was appended; None
            (``replaces_all``): the value is the list's entire new content.
        value: a nest; where ``written`` is set, the tensor.
        removed: the call removed the key or attribute; the value is None.
        changed: the value is a tensor that existed before the call, and into which the call wrote.
        written: the same for a tensor argument of the call.
    """

    place: Location
    key: Any
    value: Any
    replaces_all: bool = False
    removed: bool = False
    changed: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Placeholder of a tensor that stays on its rank: its shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CarriedTensor:
    """Placeholder of a tensor that is sent from stage to stage up to the last one: its number among the carried
    tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class UnsentObject:
    """Placeholder of an object that is neither a tensor nor a plain value: its position or name, if it was an argument
    of the module; else the names of its class and of the module that made it."""

    argument: int | str | None
    kind: str = ""
    of: str = ""


PLACEHOLDERS = (TensorShape, CarriedTensor, UnsentObject)


class MissingObject:
    """What a later stage has in place of an object that was not sent; every use of it raises."""

    def __init__(self, original: UnsentObject) -> None:
        vars(self)["original"] = original

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error that names the object's class and the module that made it."""
        original: UnsentObject = vars(self)["original"]
        of = (
            f"that {original.of} of an earlier stage has made"
            if original.of
            else "among the model's inputs of another rank"
        )
        raise InvalidArgumentError(
            f"Pipeline: got a use of a {original.kind} {of}, expected tensors and plain values in tuples, lists, "
            "dicts or dataclasses, which are sent to later stages; make it a dataclass, or pass inputs on every rank"
        )

    __getattr__ = __setattr__ = __delattr__ = __call__ = refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __float__ = __int__ = __index__ = __enter__ = __exit__ = refuse
    __hash__ = object.__hash__


def is_plain(x: Any) -> bool:
    """Returns whether ``x`` is a plain value, which can be sent as it is."""
    return isinstance(x, _PLAIN)


def map_nest(each: Callable[[Any], Any], nest: Any) -> Any:
    """Applies ``each`` to the leaves of a nest, like torch's ``tree_map``, and descends into dataclasses too."""

    def inside(x: Any) -> Any:
        if is_dataclass(x) and not isinstance(x, type) and type(x) not in PLACEHOLDERS:
            made = copy.copy(x)
            for field in fields(x):
                if hasattr(x, field.name):
                    object.__setattr__(made, field.name, map_nest(each, getattr(x, field.name)))
            return made
        return each(x)

    return tree_map(inside, nest)


def tensors_inside(x: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yields the tensors of a nest, also those in dataclasses, mappings, and attributes of plain objects."""
    seen = set() if seen is None else seen
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (*_PLAIN, nn.Module, type)) or callable(x) or id(x) in seen:
        return
    else:
        seen.add(id(x))
        items = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple, set)) else ()
        for each in (*items, *getattr(x, "__dict__", {}).values()):
            yield from tensors_inside(each, seen)


Snapshot = tuple[Location, Any, Any, Mapping[Any, int]]
"""A container before a call: its location, the container, a copy, and the versions of the tensors in it."""


def snapshots(
    containers: Mapping[str, nn.Module], inside: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Snapshot]:
    """Returns the state before a call of a module, for `side_effects`; the call's arguments come last.

    Args:
        containers, inside: modules by name. ``containers`` are the modules around the modules of stages, whose buffers
            are watched too; ``inside`` are the called module and its submodules.
        args, kwargs: the arguments of the call.
    """
    found: list[Snapshot] = []
    seen: set[int] = set()
    for name, module in (*containers.items(), *inside.items()):
        _snapshot(found, seen, (name,), module.__dict__, _OWN, _OPENED)
    for name, module in containers.items():
        _snapshot(found, seen, (name, "_buffers"), module._buffers)
    _snapshot(found, seen, (None,), {**dict(enumerate(args)), **kwargs}, opens=1 << 10)
    return found


def _snapshot(
    found: list[Snapshot], seen: set[int], place: Location, x: Any, own: Collection[str] = (), opens: int = 0
) -> None:
    """Adds the state of a container and of the containers in it.

    Args:
        seen: ids of the containers that were added.
        own: keys to ignore.
        opens: how many levels of objects in it have their attributes inspected too.
    """
    if id(x) in seen:
        return
    seen.add(id(x))
    versions: dict[Any, int] = {}
    for key, each in [(key, x[key]) for key in x if key not in own] if isinstance(x, dict) else enumerate(x):
        if type(each) is torch.Tensor:
            versions[key] = version_of(each)
        elif isinstance(each, (dict, list, tuple, set, deque)):
            _snapshot(found, seen, (*place, key), each, opens=opens)
        elif opens and _opens(each):
            _snapshot(found, seen, (*place, key, None), each.__dict__, opens=opens - 1)
    if not isinstance(x, tuple):
        found.append((place, x, dict(x) if isinstance(x, dict) else list(x), versions))


def side_effects(before_call: Sequence[Snapshot]) -> list[SideEffect]:
    """Returns everything that was added, changed or removed since `snapshots`."""
    found: list[SideEffect] = []
    for place, container, before, versions in before_call[:-1]:
        if _is_same(container, before, versions):
            continue
        if isinstance(container, dict):
            own = _OWN if len(place) == 1 else ()
            for key, x in container.items():
                other = key not in before or before[key] is not x
                changed = not other and versions.get(key, 0) != version_of(x)
                if (other or changed) and key not in own and not _is_code(x):
                    found.append(SideEffect(place, key, x, changed=changed))
            for key, x in before.items():
                if key not in container and key not in own and not _is_code(x):
                    found.append(SideEffect(place, key, None, removed=True))
        elif not isinstance(container, set) and _is_same([*container][: len(before)], before, versions):
            found += [SideEffect(place, i, x) for i, x in enumerate(container) if i >= len(before)]
        else:
            found.append(SideEffect(place, None, list(container), replaces_all=True))
    place, _, args, versions = before_call[-1]
    written = [key for key, version in versions.items() if version_of(args[key]) != version]
    return found + [SideEffect(place, key, args[key], changed=True, written=True) for key in written]


def _opens(x: Any) -> bool:
    """Returns whether the attributes of an object are inspected."""
    known = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not _is_code(x) and known not in _FOREIGN


def _is_code(x: Any) -> bool:
    return isinstance(x, (nn.Module, type)) or callable(x)


def _is_same(now: Any, before: Any, versions: Mapping[Any, int]) -> bool:
    """Returns whether a container has the same objects as before, and nothing was written into its tensors."""
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return {*map(id, now)} == {*map(id, before)}
    pairs = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return all(map(operator.is_, *pairs)) and all(version_of(before[key]) == its for key, its in versions.items())


def version_of(x: Any) -> int:
    """Returns how often a tensor was written into (0 where torch does not count it)."""
    return x._version if type(x) is torch.Tensor and not x.is_inference() else 0


def can_be_sent(value: Any) -> bool:
    """Returns whether a nest contains only tensors and plain values."""
    found = True

    def each(x: Any) -> None:
        nonlocal found
        found &= isinstance(x, torch.Tensor) or is_plain(x)

    map_nest(each, value)
    return found


def container_at(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], place: Location) -> Any:
    """Returns the container at a place.

    Raises: LookupError where the place does not exist.
    """
    name, *keys = place
    container: Any = {**dict(enumerate(args)), **kwargs} if name is None else model.get_submodule(name).__dict__
    for key in keys:
        container = container.__dict__ if key is None else container[key]
    return container


def apply_effect(container: Any, effect: SideEffect, value: Any) -> None:
    """Applies the side effect ``effect`` to ``container``, with ``value`` as its value."""
    if effect.removed:
        container.pop(effect.key, None)
    elif effect.replaces_all:
        _refill(container, value)
    elif isinstance(container, dict):
        container[effect.key] = value
    elif len(container) <= effect.key:  # else the module itself has appended it, on this rank for an earlier stage
        container.append(value)


def restore(effect: SideEffect, container: Any, before: Any) -> None:
    """Gives a container its earlier content back. A module's attributes that were added since stay."""
    if len(effect.place) > 1:
        _refill(container, before)
    else:
        container.update(before)


def _refill(container: Any, values: Any) -> None:
    container.clear()
    getattr(container, "extend" if isinstance(container, (list, deque)) else "update")(values)
