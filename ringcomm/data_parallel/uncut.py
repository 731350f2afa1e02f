"""Modules on the meta device as they were before they were cut: each is initialised whole, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.data_parallel.shard_spec import copy_part, part_of

ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Uncut:
    """A module on meta before it was cut.

    Attributes:
        module: that was there before; of what stays whole the module itself.
        comm: the ranks that it is cut over.
    """

    module: nn.Module
    comm: Communicator

    def open(self, now: nn.Module, room: Room) -> nn.Module:
        """The whole module, with memory to be initialised in."""
        if self.module is not now:
            room.house(self.module)
        return self.module

    def close(self, now: nn.Module) -> None:
        """Gives ``now`` this rank's part of rank 0's values; a collective."""
        for key, x in _own(self.module).items():
            mine, part = _own(now)[key].detach(), part_of(_own(now)[key])
            self.comm.broadcast(x.detach(), 0)
            if part.dim is not None:
                copy_part(mine, x.detach(), part)
            elif self.module is not now:
                mine.copy_(x.detach())
        if self.module is not now:
            self.module._apply(lambda x: x.to("meta"), recurse=False)


class Room:
    """Memory for one whole module after the other. A heap that gave each its own would keep the holes.

    Args:
        fill: what is written into a tensor before it is initialised.
    """

    def __init__(self, device: torch.device, fill: Callable[[torch.Tensor], float]) -> None:
        self.device, self.fill = device, fill
        self.memory = torch.empty(0, dtype=torch.uint8)

    def house(self, module: nn.Module) -> None:
        """Gives a module's own tensors on meta memory, until the next module gets it."""
        mine = _own(module)
        sizes = [-(-x.nbytes // ALIGNED) * ALIGNED for x in mine.values()]
        if self.memory.numel() < sum(sizes):
            self.memory = self.memory.new_empty(0)  # lets go of the old one first
            self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        for (key, x), part in zip(mine.items(), self.memory[: sum(sizes)].split(sizes), strict=True):
            made = part[: x.nbytes].view(x.dtype).view(x.shape)
            made.fill_(self.fill(made))
            if key in module._parameters:
                module._parameters[key] = nn.Parameter(made, x.requires_grad)
            else:
                module._buffers[key] = made


def uncut_of(module: nn.Module) -> Uncut | None:
    """What a module on meta was before it was cut; None: no other."""
    return module.__dict__.get("_ringcomm_uncut")


def keep_uncut(module: nn.Module, new: Mapping[int, nn.Module], comm: Communicator) -> None:
    """Remembers the modules with tensors on meta.

    Args:
        new: by id, what takes their place.
    """
    for each in module.modules():
        now = new.get(id(each), each)
        if any(x.is_meta for x in _own(each).values()):
            now.__dict__["_ringcomm_uncut"] = Uncut(each, comm)
        for key, p in each._parameters.items() if now is not each else ():
            if p is not None and p is now._parameters[key]:  # stays whole
                each._parameters[key] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: x for key, x in [*module._parameters.items(), *module._buffers.items()] if x is not None}
