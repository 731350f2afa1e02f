"""The place of a wrapped model's parameter: the only attribute that wrapping leaves on a parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.data_parallel.bucket import Bucket
    from ringcomm.data_parallel.sharded_model import ShardedModel


class Place:
    """The place of a parameter: segment ``index`` of a bucket of a model. The references are weak, so the parameter
    keeps neither alive. A copy of the parameter does not have a place."""

    __slots__ = ("_flat", "_group", "data", "index")

    def __init__(self, flat: ShardedModel, bucket: Bucket, index: int) -> None:
        self._flat, self._group, self.index = weakref.ref(flat), weakref.ref(bucket), index
        self.data: Any = None  # at stage 3, the memory shared by views made since the last `p.data = other`

    @property
    def flat(self) -> ShardedModel:
        """The wrapped model."""
        found = self._flat()
        assert found is not None
        return found

    @property
    def bucket(self) -> Bucket:
        """The bucket that contains the parameter."""
        found = self._group()
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """Whether the model still exists and is wrapped."""
        flat = self._flat()
        return flat is not None and not flat.unwrapped

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.bucket.names[self.index]

    def __reduce__(self) -> Any:
        return set, ()  # a copy gets an empty set, a class that torch.load accepts with weights_only=True


def place_of(p: Any) -> Place | None:
    """Returns the place of a wrapped model's parameter; None for anything else, including a view of a parameter."""
    place: Place | None = getattr(p, "_ringcomm", None)
    return place if place and place.alive and place.bucket.params[place.index] is p else None
