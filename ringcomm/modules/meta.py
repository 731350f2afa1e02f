"""Memory for parameters that were built on the meta device, and a marker value for memory that was not initialised."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ringcomm.errors import UnsupportedError
from ringcomm.modules.shard_spec import part_of

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator


def real_device(module: nn.Module) -> torch.device:
    """Returns the device of a module's parameters; for a module entirely on meta, the device that this process
    computes on."""
    known = next((p.device for p in module.parameters() if not p.is_meta), None)
    if known is not None or all(False for _ in module.parameters()):
        return known or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_of(comm: Communicator, module: nn.Module) -> torch.device:
    """Returns the device where parameters on meta get their memory."""
    return real_device(module) if "," in comm.device else torch.device(comm.device)


def value_of_uninitialized(value: torch.Tensor) -> float | int:
    """Returns the value that fills a tensor that was not initialised."""
    if value.is_floating_point() or value.is_complex():
        return math.nan
    return 0 if value.dtype == torch.bool else torch.iinfo(value.dtype).max


def is_uninitialized(value: torch.Tensor) -> bool:
    """Whether nothing was written into a tensor since it was filled with `value_of_uninitialized`."""
    floats = value.is_floating_point() or value.is_complex()
    empty = value.isnan() if floats else value == value_of_uninitialized(value)
    return bool(empty.any() and (empty | (value == 0)).all())  # zeros are the padding of a sharded parameter


def fill_uninitialized(value: torch.Tensor, p: nn.Parameter) -> None:
    """Fills a parameter's memory with `value_of_uninitialized`, and its padding with zeros."""
    part = part_of(p)
    value.fill_(value_of_uninitialized(value))
    if part.dim is not None:
        length = sum(count for _, count in part.pieces)
        value.narrow(part.dim, length, value.shape[part.dim] - length).zero_()


def give_memory(p: nn.Parameter, name: str, device: torch.device, rank: int) -> None:
    """Turns a parameter on meta into one on a device, still without values; it stays the same object."""
    memory = torch.empty((), dtype=p.dtype, device=device).expand(p.shape)
    twin = torch.Tensor._make_subclass(type(p), memory, p.requires_grad)
    twin.__dict__.update(p.__dict__)
    try:
        torch.utils.swap_tensors(p, twin)
    except RuntimeError as error:
        raise UnsupportedError(
            f"shard: rank {rank} got {name} on the meta device in a graph of autograd or with weak references, "
            "expected a parameter that nothing else refers to; shard the module before it is called"
        ) from error
