"""Finds the wrapped model of a parameter, or of a module that contains parameters of the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ringcomm.data_parallel.buckets.bucket import Bucket, ViewData
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.errors import InvalidArgumentError


class Place:
    """Where a wrapped model keeps a parameter: segment ``index`` of one of its buckets. Wrapping sets nothing else on
    the parameter.

    The references are weak, so the parameter keeps neither the model nor the bucket alive. A copy of the parameter has
    no place.
    """

    __slots__ = ("_bucket", "_flat", "index", "views")

    def __init__(self, flat: ShardedModel, bucket: Bucket, index: int) -> None:
        self._flat, self._bucket, self.index, self.views = weakref.ref(flat), weakref.ref(bucket), index, bucket.views

    @property
    def flat(self) -> ShardedModel:
        """The wrapped model."""
        found = self._flat()
        assert found is not None
        return found

    @property
    def bucket(self) -> Bucket:
        """The bucket that contains the parameter."""
        found = self._bucket()
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """Whether the model still exists and is wrapped."""
        flat = self._flat()
        return flat is not None and not flat.unwrapped

    @property
    def data(self) -> ViewData:
        """At stage 3, the values that the parameter shares with its views made since the last `p.data = other`."""
        return self.views.data.setdefault(self.index, ViewData())

    def is_of(self, p: Any) -> bool:
        """Whether this is the place of the parameter ``p``; False for a view of the parameter, which refers to the same
        place, and once the model is gone."""
        return self.alive and self.bucket.params[self.index] is p

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.bucket.layout.segments[self.index].name

    def __reduce__(self) -> Any:
        return set, ()  # a copy gets an empty set, because torch.load(weights_only=True) accepts its class


def place_of(p: Any) -> Place | None:
    """Returns the place of a wrapped model's parameter; None for anything else, including a view of a parameter."""
    place: Place | None = getattr(p, "_ringcomm", None)
    return place if place and place.is_of(p) else None


def models_of(params: Iterable[Any]) -> list[ShardedModel]:
    """Returns the wrapped models that have some of the parameters, each once."""
    return [*dict.fromkeys(place.flat for place in map(place_of, params) if place is not None)]


def set_places(flat: ShardedModel) -> None:
    """Gives each parameter of a model its place, until `ShardedModel.detach`."""
    for bucket in flat.buckets:
        for i, p in enumerate(bucket.params):
            p._ringcomm = Place(flat, bucket, i)


def sharded_model_of(module: nn.Module) -> ShardedModel | None:
    """Returns the state of a module that `shard`, `fully_shard` or DistributedDataParallel has wrapped, or that
    contains such parameters."""
    for p in module.parameters():
        place = place_of(p)
        if place is not None:
            return place.flat
    return None


def wrapped_model(module: nn.Module, call: str, advice: str = "pass that") -> ShardedModel:
    """Like `sharded_model_of`, but raises for a module that is not wrapped, and says what to do."""
    flat = sharded_model_of(module)
    if flat is None:
        raise InvalidArgumentError(
            f"{call}: got a {type(module).__name__} that is not wrapped, expected a module that ringcomm.shard "
            f"returned; {advice}"
        )
    return flat
