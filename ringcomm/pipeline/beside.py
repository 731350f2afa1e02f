"""What a module leaves beside the value that it returns: attributes, and items of lists and dicts that it was given.

A stage notes what each of its modules has left; the stages behind leave the same when their forward pass comes to that
module's call. So an auxiliary loss, in an attribute or appended to a list, is there when the model adds it up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

_OWN = {*vars(nn.Module()), "_ringcomm_elsewhere"}  # attributes of every module
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
        self._before: list[tuple[Place, Any, Any, list[Any]]] = []
        self._seen: set[int] = set()
        for name, module in modules.items():
            self._look((name,), module.__dict__, False)
        for key, each in (*enumerate(args), *kwargs.items()):
            self._look((None, key), each, True)

    def _look(self, place: Place, x: Any, opens: bool) -> None:
        """``opens``: whether the attributes of plain objects count."""
        if isinstance(x, (torch.Tensor, nn.Module, type, *_PLAIN)) or id(x) in self._seen:
            return
        self._seen.add(id(x))
        at_module = len(place) == 1
        if isinstance(x, dict):
            items = [(key, each) for key, each in x.items() if not (at_module and key in _OWN)]
        elif isinstance(x, (list, tuple)):
            items = [*enumerate(x)]
        elif opens and hasattr(x, "__dict__") and not callable(x):
            place, x = (*place, None), x.__dict__
            items = [*x.items()]
        else:
            return
        if not isinstance(x, tuple):
            values = [each for _, each in items]
            self._before.append((place, x, dict(items) if isinstance(x, dict) else values, [*map(_version, values)]))
        for key, each in items:
            self._look((*place, key), each, opens)

    def left(self) -> list[Left]:
        """What is there now that was not, or that was changed."""
        found: list[Left] = []
        for place, container, before, versions in self._before:
            if isinstance(container, dict):
                known = dict(zip(before, versions, strict=True))
                for key, x in container.items():
                    if len(place) == 1 and key in _OWN:
                        continue
                    if key not in before or before[key] is not x or known[key] != _version(x):
                        found.append(Left(place, key, x))
            elif not _is_same(container[: len(before)], before, versions):
                found.append(Left(place, None, list(container), whole=True))
            else:
                found += [Left(place, None, x) for x in container[len(before) :]]
        return found


def _is_same(now: Sequence[Any], before: Sequence[Any], versions: Sequence[int]) -> bool:
    return len(now) == len(before) and all(
        x is y and _version(x) == version for x, y, version in zip(now, before, versions, strict=True)
    )


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


def leave(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], left: Left, value: Any) -> None:
    """Leaves ``value`` where the module has left its own.

    Raises: LookupError where there is no such place.
    """
    name, *keys = left.place
    container: Any = {**dict(enumerate(args)), **kwargs} if name is None else model.get_submodule(name).__dict__
    for key in keys:
        container = container.__dict__ if key is None else container[key]
    if left.whole:
        container[:] = value
    elif isinstance(container, list):
        container.append(value)
    else:
        container[left.key] = value
