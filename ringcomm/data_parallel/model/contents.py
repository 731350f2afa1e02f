"""What a wrapped module contains beside its buckets: parameters that were added later, buffers, values that are not
loaded yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ringcomm import _C
from ringcomm.data_parallel.buckets.bucket import Bucket, adopt_writes
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.model.deferred_init import UninitializedTensors


class ModuleContents:
    """The submodules, parameters and buffers of a wrapped module, as they were when it was looked through.

    Attributes:
        uninitialized: values that must be loaded before the first forward pass; None: all are there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.uninitialized: UninitializedTensors | None = None
        self._ignored_buffers: frozenset[str] = frozenset()
        self._record()

    def _record(self) -> None:
        """Records the module's submodules, parameters and buffers."""
        inside = [m for m in self.module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        # They stay referenced, so that no other object gets their addresses.
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

    def ignore_buffers(self, names: Collection[str]) -> None:
        """Excludes buffers of these names, so that they stay as they are on each rank."""
        self._ignored_buffers = frozenset(names)
        self._record()

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
        """Raises if a value is missing that was to be loaded; a collective the first time."""
        if self.uninitialized is not None:
            adopt_writes(buckets, call)
            self.uninitialized.check(ranks, self.module, call)
            self.uninitialized = None
