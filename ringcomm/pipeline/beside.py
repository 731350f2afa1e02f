"""What a module leaves beside the value that it returns: attributes, and items of lists and dicts that it was given.

A stage notes what each of its modules has left; the stages behind leave the same when their forward pass comes to that
module's call. So an auxiliary loss, in an attribute or appended to a list, is there when the model adds it up.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

# Attributes of every module, and those in which torch's recurrent layers keep their own parameters once more.
_OWN = {*vars(nn.Module()), "_ringcomm_elsewhere", "_flat_weights", "_flat_weight_refs"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
Place = tuple[Any, ...]
"""Where a container is: the name of a module, or None for the arguments of the call; then keys."""


@dataclass(frozen=True)
class Left:
    """One thing that was left.

    Attributes:
        place: of the container.
        key: in a dict, or the name of an attribute; None: in a list, at its end or (``whole``) as all of it.
        value: a nest.
    """

    place: Place
    key: Any
    value: Any
    whole: bool = False


class Stand:
    """What stands for a tensor in a nest that is sent."""


def map_nest(each: Callable[[Any], Any], nest: Any) -> Any:
    """As torch's ``tree_map``, also in dataclasses."""

    def inside(x: Any) -> Any:
        if is_dataclass(x) and not isinstance(x, (type, Stand)):
            made = copy.copy(x)
            for field in fields(x):
                if hasattr(x, field.name):
                    object.__setattr__(made, field.name, map_nest(each, getattr(x, field.name)))
            return made
        return each(x)

    return tree_map(inside, nest)


def tensors_inside(x: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors of a nest, also in dataclasses, mappings, and attributes of plain objects."""
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


class Watch:
    """Notes what the call of a module leaves.

    Args:
        modules: by name, those whose attributes are looked at.
        args, kwargs: of the call.
    """

    def __init__(self, modules: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._before: list[tuple[Place, Any, Any, dict[Any, int]]] = []  # where, what, a copy, versions of its tensors
        self._seen: set[int] = set()
        for name, module in modules.items():
            self._look((name,), module.__dict__, _OWN)
        self._look((None,), {**dict(enumerate(args)), **kwargs}, opens=True)
        self._before.pop()  # the arguments themselves

    def _look(self, place: Place, x: Any, own: Collection[str] = (), opens: bool = False) -> None:
        """At a container.

        Args:
            own: keys that do not count.
            opens: whether the attributes of objects in it count too.
        """
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        versions: dict[Any, int] = {}
        for key, each in [(key, x[key]) for key in x if key not in own] if isinstance(x, dict) else enumerate(x):
            if type(each) is torch.Tensor:
                versions[key] = _version(each)
            elif isinstance(each, (dict, list, tuple)):
                self._look((*place, key), each, opens=opens)
            elif opens and hasattr(each, "__dict__") and not isinstance(each, (nn.Module, type)) and not callable(each):
                self._look((*place, key, None), each.__dict__, opens=True)
        if not isinstance(x, tuple):
            self._before.append((place, x, dict(x) if isinstance(x, dict) else list(x), versions))

    def left(self) -> list[Left]:
        """What is there now that was not, or that was changed."""
        found: list[Left] = []
        for place, container, before, versions in self._before:
            if _is_same(container, before, versions):
                continue
            if isinstance(container, dict):
                own = _OWN if len(place) == 1 else ()
                for key, x in container.items():
                    changed = key not in before or before[key] is not x or versions.get(key, 0) != _version(x)
                    if changed and key not in own:
                        found.append(Left(place, key, x))
            elif _is_same(container[: len(before)], before, versions):
                found += [Left(place, None, x) for x in container[len(before) :]]
            else:
                found.append(Left(place, None, list(container), whole=True))
        return found


def _is_same(now: Any, before: Any, versions: Mapping[Any, int]) -> bool:
    if len(now) != len(before):
        return False
    pairs = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return all(map(operator.is_, *pairs)) and all(_version(before[key]) == its for key, its in versions.items())


def _version(x: Any) -> int:
    return x._version if type(x) is torch.Tensor and not x.is_inference() else 0


def can_travel(value: Any) -> bool:
    """Whether a nest has tensors and plain values alone."""
    found = True

    def each(x: Any) -> None:
        nonlocal found
        found &= isinstance(x, (torch.Tensor, *_PLAIN))

    map_nest(each, value)
    return found


def found_at(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> Any:
    """The container at a place.

    Raises: LookupError where there is none.
    """
    name, *keys = place
    container: Any = {**dict(enumerate(args)), **kwargs} if name is None else model.get_submodule(name).__dict__
    for key in keys:
        container = container.__dict__ if key is None else container[key]
    return container


def leave(container: Any, left: Left, value: Any) -> None:
    """Leaves ``value`` where the module has left its own."""
    if left.whole:
        container[:] = value
    elif isinstance(container, list):
        container.append(value)
    else:
        container[left.key] = value


def restore(left: Left, container: Any, before: Any) -> None:
    """Makes a container what it was; a module's attributes but for new ones."""
    if isinstance(container, list):
        container[:] = before
        return
    if len(left.place) > 1:
        container.clear()
    container.update(before)
