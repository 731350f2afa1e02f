"""The contents of a wrapped module outside of its buckets: buffers, parameters that were added later, and values that
are yet to be loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ringcomm import _C
from ringcomm.data_parallel.buckets.bucket import Bucket, adopt_writes
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.model.deferred_init import NewBuffer
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.meta import is_uninitialized

_NAMED = 5  # most names in an error


class ModuleContents:
    """The submodules, parameters and buffers of a wrapped module, as of the last time that they were recorded.

    Attributes:
        missing_params, missing_buffers: parameters and buffers from the meta device whose values must be loaded before
            the first forward pass; parameters by id.
        loading: of the last call of load_state_dict, its list of errors, which identifies the call, and the ids of the
            parameters that it has loaded so far.
    """

    def __init__(self, module: nn.Module, ignored_buffers: Collection[str]) -> None:
        self.module = module
        self.missing_params: set[int] = set()
        self.missing_buffers: list[NewBuffer] = []
        self.loading: tuple[list[str], set[int]] = [], set()
        self._ignored_buffers = frozenset(ignored_buffers)
        self._record()

    def _record(self) -> None:
        """Records the module's submodules, parameters and buffers."""
        inside = [m for m in self.module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        # References keep these objects alive, so that no other object gets their ids.
        self._dicts: list[dict[str, Any]] = [*(m._parameters for m in inside), *(m._modules for m in inside)]
        self._members = _C.addresses(self._dicts)
        self._buffer_places = [
            (owner, key)
            for name, owner in self.module.named_modules()
            for key, _ in owner.named_buffers(recurse=False)
            if (f"{name}.{key}" if name else key) not in self._ignored_buffers
        ]

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers that all ranks get from the first rank."""
        return len(self._buffer_places) > 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that all ranks get from the first rank."""
        found = [getattr(owner, key, None) for owner, key in self._buffer_places]
        return [buffer for buffer in found if buffer is not None]

    def new_parameter(self, buckets: Collection[Bucket]) -> str | None:
        """Returns the name of a parameter that is in none of the buckets; None: there is none. Submodules without
        parameters may be added and removed."""
        if _C.addresses(self._dicts) == self._members:
            return None
        known = {id(p) for bucket in buckets for p in bucket.params}
        named = self.module.named_parameters()
        new = next((name for name, p in named if id(p) not in known and isinstance(p, nn.Parameter)), None)
        if new is None:
            self._record()
        return new

    def check_made(self, call: str, buckets: Collection[Bucket], ranks: DataParallelGroup) -> None:
        """Raises if a value was still not loaded; a collective the first time."""
        if not (self.missing_params or self.missing_buffers):
            return
        adopt_writes(buckets, call)
        params = [(b, i) for b in buckets for i, p in enumerate(b.params) if id(p) in self.missing_params]
        written = torch.tensor([_is_written(*each) for each in params] or [True], dtype=torch.uint8)
        written = written.to(params[0][0].device) if params else written
        ranks.reduce_over_all(written, "max")
        missing = [b.names[i] for (b, i), found in zip(params, written.tolist(), strict=False) if not found]
        prefixes = {id(m): f"{name}." if name else "" for name, m in self.module.named_modules()}
        for m, key, made, version in self.missing_buffers:
            if _is_untouched(m._buffers[key], made, version):
                missing.append(prefixes.get(id(m), "") + key)
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise InvalidArgumentError(
                f"{call}: rank {ranks.rank} got {', '.join(missing[:_NAMED])}{more} from the meta device without "
                "values, expected all to be initialised or loaded; call load_state_dict or ringcomm.checkpoint.load, "
                "or pass init_fn to ringcomm.shard"
            )
        self.missing_params, self.missing_buffers = set(), []


def _is_written(bucket: Bucket, i: int) -> bool:
    """Whether this rank's part of a parameter has values."""
    piece = bucket.piece(bucket.master, i)
    return not bucket.layout.segments[i].numel or (piece.numel() > 0 and not is_uninitialized(piece))


def _is_untouched(now: Any, made: torch.Tensor, version: int) -> bool:
    """Whether a buffer is still the tensor that was made for it, without values."""
    if now is not made or not made.numel():
        return False
    return made._version == version if made.dtype == torch.bool else is_uninitialized(made)
