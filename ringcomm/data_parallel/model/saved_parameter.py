"""The reference that autograd saves instead of a stage 3 parameter, whose memory is freed after forward. When a node
needs the value in backward, the parameter's unit is gathered."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.data_parallel.buckets.bucket import Bucket, ViewGeometry
from ringcomm.data_parallel.model.place import Place, place_of
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.errors import InvalidArgumentError

_thread = threading.local()


@dataclass(frozen=True)
class SavedParameter:
    """The object that autograd saves in place of a stage 3 parameter. It must not reference the model, because the
    model may reference the graph."""

    home: weakref.ref[Bucket]
    number: int  # number of the last call when it was saved
    geometry: ViewGeometry
    index: int  # the parameter's index in the bucket
    version: int  # the version when it was saved
    counter: torch.Tensor | None  # a tensor that has the version counter; None: the parameter

    @staticmethod
    def of(
        bucket: Bucket, number: int, geometry: ViewGeometry, index: int, counter: torch.Tensor | None
    ) -> SavedParameter:
        """Returns the object with the current version.

        Args:
            counter: a tensor that shares the version counter of what is saved; None: the parameter.
        """
        p = bucket.params[index]
        counter = None if counter is p else counter
        return SavedParameter(
            weakref.ref(bucket), number, geometry, index, (p if counter is None else counter)._version, counter
        )

    def values(self) -> torch.Tensor:
        """Returns the parameter's values; a collective if its bucket is not gathered."""
        bucket = self.home()
        place = None if bucket is None else place_of(bucket.params[self.index])
        if bucket is None or place is None:
            raise RuntimeError(
                "backward: got a graph of a model that was dropped or unsharded since, expected the model to be kept"
            )
        _check_version(bucket.params[self.index] if self.counter is None else self.counter, self.version)
        if bucket.is_unsharded:
            return bucket.memory.cached_view(self.geometry)
        flat, unit = place.flat, place.flat.unit_of[bucket]
        if torch._C._current_graph_task_id() >= 0:
            flat.reach(unit, self.number)
            return bucket.memory.cached_view(self.geometry)
        # A program that inspects the graph reads the value.
        with flat.borrowing([bucket], unit.name, "a saved tensor"):
            return bucket.memory.cached_view(self.geometry).clone()


@contextmanager
def saving_references(flat: ShardedModel) -> Iterator[None]:
    """Inside the block, autograd saves a `SavedParameter` in place of a stage 3 parameter of the model, so that the
    parameter's memory can be freed."""
    autograd, flats = torch._C._autograd, _running_models()
    is_first, hooks = flat not in flats, nullcontext()
    if is_first:
        flats.append(flat)
    if autograd._saved_tensors_hooks_is_enabled():
        # Wraps the user's hooks, but not those of torch's checkpoints, which treat saved tensors differently.
        users = autograd._top_saved_tensors_default_hooks(True)
        if users is None or getattr(users[0], "__module__", "") not in (__name__, "torch.utils.checkpoint"):
            pack, unpack = users or (_keep, _kept)
            hooks = torch.autograd.graph.saved_tensors_hooks(_packing(pack, flats), _unpacking(unpack))
    try:
        with hooks:
            yield
    finally:
        if is_first:
            flats.remove(flat)


def _running_models() -> list[ShardedModel]:
    """Returns this thread's list of the stage 3 models that have calls running in it."""
    return vars(_thread).setdefault("flats", [])


def _packing(pack: Callable[[torch.Tensor], Any], flats: list[ShardedModel]) -> Callable[[torch.Tensor], Any]:
    """Returns a function that packs saved tensors: stage 3 parameters of ``flats`` as `SavedParameter`, all others with
    ``pack``."""

    def packed(x: torch.Tensor) -> Any:
        if x.layout is not torch.strided:  # a sparse tensor has no storage
            return pack(x)
        with torch._C.DisableTorchFunctionSubclass():
            memory = x.untyped_storage()._cdata
        for flat in flats:
            bucket = flat.gathered.by_memory.get(memory)
            if bucket is not None:
                index = bucket.layout.index_of(x.storage_offset() * x.itemsize // bucket.types.compute.itemsize)
                geometry, counters = ViewGeometry.of(x), flat.calls.counters.get((bucket, index), {})
                # The operation may save a view of its argument, as linear does.
                only = next(iter(counters.values())) if len(counters) == 1 else None
                return SavedParameter.of(bucket, flat.calls.count, geometry, index, counters.get(geometry, only))
        place = getattr(x, "_ringcomm", None)
        if isinstance(place, Place) and place.alive and place.bucket.memory.is_placeholder(x):
            # Saved without being read: by a checkpoint, which saves its arguments, or by a torch.autograd.Function.
            bucket, index = place.bucket, place.index
            data = getattr(x, "_data", None)
            if data is not None and data is not place.data:
                raise InvalidArgumentError(
                    f"forward: rank {place.flat.ranks.rank} saved a tensor made from {place.name} before its `p.data` "
                    "was replaced, expected one made afterwards; make the tensor again"
                )
            with torch._C.DisableTorchFunctionSubclass():
                counter = x.detach().as_subclass(torch.Tensor)
            geometry = ViewGeometry.of(bucket.memory.views[index])
            return SavedParameter.of(bucket, place.flat.calls.count, geometry, index, counter)
        return pack(x)

    return packed


def _unpacking(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Returns the inverse of `_packing`."""
    return lambda saved: saved.values() if isinstance(saved, SavedParameter) else unpack(saved)


def _keep(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Saves a tensor and its version. It detaches the tensor, because a node's own output would keep the node alive."""
    return x.detach(), x._version


def _kept(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = saved
    _check_version(x, version)
    return x


def _check_version(x: torch.Tensor, version: int) -> None:
    """Raises as autograd does if a saved tensor was written to."""
    if x._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape)} is at version {x._version}, expected version {version}"
        )
