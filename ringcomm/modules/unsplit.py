"""Initialises modules on the meta device in the form that they had before they were split, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.modules.notes import notes_of, notes_on
from ringcomm.modules.shard_spec import copy_part, part_of


@dataclass(frozen=True)
class UnsplitModule:
    """A module on meta in the form before it was split.

    Attributes:
        module: the module before the split; for a module that was not split, the module itself.
        comm: the ranks over which it is split.
    """

    module: nn.Module
    comm: Communicator

    def open(self, now: nn.Module, give_memory: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> nn.Module:
        """Returns the unsplit module with memory for its initialisation.

        Args:
            give_memory: returns, for tensors on meta, tensors of the same shapes on a device.
        """
        if self.module is not now:
            mine = _own(self.module)
            for (key, x), made in zip(mine.items(), give_memory([*mine.values()]), strict=True):
                if key in self.module._parameters:
                    self.module._parameters[key] = nn.Parameter(made, x.requires_grad)
                else:
                    self.module._buffers[key] = made
        return self.module

    def close(self, now: nn.Module) -> None:
        """Copies this rank's part of rank 0's values to ``now``; a collective."""
        for key, x in _own(self.module).items():
            mine, part = _own(now)[key].detach(), part_of(_own(now)[key])
            self.comm.broadcast(x.detach(), 0)
            if part.dim is not None:
                copy_part(mine, x.detach(), part)
            elif self.module is not now:
                mine.copy_(x.detach())
        if self.module is not now:
            self.module._apply(lambda x: x.to("meta"), recurse=False)


def unsplit_of(module: nn.Module) -> UnsplitModule | None:
    """Returns the form of a meta module before it was split; None: it was not recorded."""
    unsplit: UnsplitModule | None = notes_of(module).unsplit
    return unsplit


def keep_unsplit(module: nn.Module, new: Mapping[int, nn.Module], comm: Communicator) -> None:
    """Records the modules with tensors on meta.

    Args:
        new: by id, the modules that replace them.
    """
    for each in module.modules():
        now = new.get(id(each), each)
        if any(x.is_meta for x in _own(each).values()):
            notes_on(now).unsplit = UnsplitModule(each, comm)
        for key, p in each._parameters.items() if now is not each else ():
            if p is not None and p is now._parameters[key]:  # it is not split
                each._parameters[key] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: x for key, x in [*module._parameters.items(), *module._buffers.items()] if x is not None}
