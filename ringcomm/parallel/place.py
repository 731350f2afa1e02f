"""Where a parameter of a wrapped model lies: the one attribute that wrapping leaves on a parameter."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.parallel.flat_model import FlatModel
    from ringcomm.parallel.group import FlatGroup
    from ringcomm.parallel.sharded_parameter import ShardedView


class Place:
    """Where a parameter lies: segment ``index`` of a group of a model. The parameter does not keep them alive, and a
    copy of it does not have this."""

    __slots__ = ("_flat", "_group", "index", "views")

    def __init__(self, flat: FlatModel, group: FlatGroup, index: int) -> None:
        self._flat, self._group, self.index = weakref.ref(flat), weakref.ref(group), index
        self.views: MutableMapping[int, ShardedView] = weakref.WeakValueDictionary()  # at stage 3, by id

    @property
    def flat(self) -> FlatModel:
        """The wrapped model."""
        found = self._flat()
        assert found is not None
        return found

    @property
    def group(self) -> FlatGroup:
        """The flat group."""
        found = self._group()
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """Whether the wrapped model still exists."""
        return self._flat() is not None

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.group.names[self.index]

    def __reduce__(self) -> Any:
        return type(None), ()


def place_of(p: Any) -> Place | None:
    """Where a parameter of a wrapped model lies; None: it is of none, as a view of one."""
    place: Place | None = getattr(p, "_ringcomm", None)
    return place if place is not None and place.alive and place.group.params[place.index] is p else None
