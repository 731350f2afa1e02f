"""What a module leaves beside the value that it returns: attributes, items of lists, dicts and objects that it has or
was given, and values written into tensors that it was given.

A stage notes what each of its modules has left; the stages behind leave the same when their forward pass comes to that
module's call. So an auxiliary loss, in an attribute or appended to a list, is there when the model adds it up.
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

# Attributes of every module, and those in which torch's recurrent layers keep their own parameters once more.
_OWN = {*vars(nn.Module()), "_ringcomm_elsewhere", "_flat_weights", "_flat_weight_refs"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FOREIGN = ("torch", "ringcomm", "logging", "threading", "multiprocessing", "concurrent", "asyncio")
"""Packages whose objects are not looked into: what they note is no result of a model."""
_OPENED = 3  # how deep objects in attributes are looked into; those in arguments: all
Place = tuple[Any, ...]
"""Where a container is: the name of a module, or None for the arguments of the call; then keys."""


@dataclass(frozen=True)
class Left:
    """One thing that was left.

    Attributes:
        place: of the container.
        key: in a dict, or the name of an attribute; None: in a list, at its end or (``whole``) as all of it.
        value: a nest; of ``written`` the tensor.
        changed: the value is a tensor that was there, and was written into.
        written: so it is, as an argument of the call.
    """

    place: Place
    key: Any
    value: Any
    whole: bool = False
    changed: bool = False
    written: bool = False


class Stand:
    """What stands for a tensor or an object in a nest that is sent."""


@dataclass(frozen=True)
class Gone(Stand):
    """In the place of an item or attribute that was taken away."""


@dataclass(frozen=True)
class Given(Stand):
    """In the place of an object that the module was given: where among the arguments."""

    key: int | str


@dataclass(frozen=True)
class Kept(Stand):
    """In the place of an object that stays where it was made: the name of its class, and of the module that made it."""

    kind: str
    of: str


class Lost:
    """What a later stage has in the place of such an object: all that is done with it raises."""

    def __init__(self, kept: Kept) -> None:
        vars(self)["kept"] = kept

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Says whose it is."""
        kept: Kept = vars(self)["kept"]
        of = f"that {kept.of} of an earlier stage has made" if kept.of else "among the model's inputs of another rank"
        raise InvalidArgumentError(
            f"Pipeline: got a use of a {kept.kind} {of}, expected tensors and plain values in tuples, lists, dicts or "
            "dataclasses, which later stages can be told of; make it a dataclass, or pass inputs on every rank"
        )

    __getattr__ = __setattr__ = __delattr__ = __call__ = refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __float__ = __int__ = __index__ = __enter__ = __exit__ = refuse
    __hash__ = object.__hash__


def is_plain(x: Any) -> bool:
    """Whether it is a value that can be told as it is."""
    return isinstance(x, _PLAIN)


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
        containers, inside: modules by name, those around the modules of stages, of which buffers count too, and those
            of the module that is called.
        args, kwargs: of the call.
    """

    def __init__(
        self,
        containers: Mapping[str, nn.Module],
        inside: Mapping[str, nn.Module],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._before: list[tuple[Place, Any, Any, dict[Any, int]]] = []  # where, what, a copy, versions of its tensors
        self._seen: set[int] = set()
        for name, module in (*containers.items(), *inside.items()):
            self._look((name,), module.__dict__, _OWN, _OPENED)
        for name, module in containers.items():
            self._look((name, "_buffers"), module._buffers)
        self._look((None,), {**dict(enumerate(args)), **kwargs}, opens=1 << 10)
        self._args = self._before.pop()

    def _look(self, place: Place, x: Any, own: Collection[str] = (), opens: int = 0) -> None:
        """At a container.

        Args:
            own: keys that do not count.
            opens: how deep the attributes of objects in it count too.
        """
        if id(x) in self._seen:
            return
        self._seen.add(id(x))
        versions: dict[Any, int] = {}
        for key, each in [(key, x[key]) for key in x if key not in own] if isinstance(x, dict) else enumerate(x):
            if type(each) is torch.Tensor:
                versions[key] = version_of(each)
            elif isinstance(each, (dict, list, tuple, set, deque)):
                self._look((*place, key), each, opens=opens)
            elif opens and _opens(each):
                self._look((*place, key, None), each.__dict__, opens=opens - 1)
        if not isinstance(x, tuple):
            self._before.append((place, x, dict(x) if isinstance(x, dict) else list(x), versions))

    def left(self) -> list[Left]:
        """What is there now that was not, or that was changed or taken away."""
        found: list[Left] = []
        for place, container, before, versions in self._before:
            if _is_same(container, before, versions):
                continue
            if isinstance(container, dict):
                own = _OWN if len(place) == 1 else ()
                for key, x in container.items():
                    other = key not in before or before[key] is not x
                    changed = not other and versions.get(key, 0) != version_of(x)
                    if (other or changed) and key not in own and not _is_code(x):
                        found.append(Left(place, key, x, changed=changed))
                for key, x in before.items():
                    if key not in container and key not in own and not _is_code(x):
                        found.append(Left(place, key, Gone()))
            elif not isinstance(container, set) and _is_same([*container][: len(before)], before, versions):
                found += [Left(place, None, x) for x in [*container][len(before) :]]
            else:
                found.append(Left(place, None, list(container), whole=True))
        place, _, args, versions = self._args
        written = [key for key, version in versions.items() if version_of(args[key]) != version]
        return found + [Left(place, key, args[key], changed=True, written=True) for key in written]


def _opens(x: Any) -> bool:
    """Whether the attributes of an object are looked at."""
    known = type(x).__module__.partition(".")[0]
    return hasattr(x, "__dict__") and not _is_code(x) and known not in _FOREIGN


def _is_code(x: Any) -> bool:
    return isinstance(x, (nn.Module, type)) or callable(x)


def _is_same(now: Any, before: Any, versions: Mapping[Any, int]) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return {*map(id, now)} == {*map(id, before)}
    pairs = (now.values(), before.values()) if isinstance(now, dict) else (now, before)
    return all(map(operator.is_, *pairs)) and all(version_of(before[key]) == its for key, its in versions.items())


def version_of(x: Any) -> int:
    """How often a tensor was written into."""
    return x._version if type(x) is torch.Tensor and not x.is_inference() else 0


def can_travel(value: Any) -> bool:
    """Whether a nest has tensors and plain values alone."""
    found = True

    def each(x: Any) -> None:
        nonlocal found
        found &= isinstance(x, torch.Tensor) or is_plain(x)

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
    if isinstance(value, Gone):
        container.pop(left.key, None)
    elif left.whole:
        _refill(container, value)
    elif isinstance(container, dict):
        container[left.key] = value
    else:
        container.append(value)


def restore(left: Left, container: Any, before: Any) -> None:
    """Makes a container what it was; a module's attributes but for new ones."""
    if len(left.place) > 1:
        _refill(container, before)
    else:
        container.update(before)


def _refill(container: Any, values: Any) -> None:
    container.clear()
    getattr(container, "extend" if isinstance(container, (list, deque)) else "update")(values)
