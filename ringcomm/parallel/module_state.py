"""`state_dict()` and `load_state_dict()` of a module whose parameters are in flat groups: the ordinary ones, in the
master weights' type."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ringcomm.parallel.flat_model import FlatModel
    from ringcomm.parallel.group import FlatGroup

Places = dict[int, tuple["FlatGroup", int]]


def keep_ordinary_state(flat: FlatModel) -> None:
    """Puts the hooks on the module that was wrapped."""
    keep_state_of(flat.module, flat.groups)


def keep_state_of(module: nn.Module, groups: Sequence[FlatGroup]) -> None:
    """Puts the hooks for these groups on a module that holds their parameters."""
    if groups:
        module.register_state_dict_post_hook(partial(_after_state_dict, groups))
        module.register_load_state_dict_pre_hook(partial(_before_load, groups))


def _names(module: nn.Module, groups: Sequence[FlatGroup], prefix: str) -> dict[str, tuple[FlatGroup, int]]:
    """Every name in a state dict that is a parameter of the flat groups; tied ones have several."""
    places: Places = {id(p): (group, i) for group in groups for i, p in enumerate(group.params)}
    named = module.named_parameters(remove_duplicate=False)
    return {prefix + name: places[id(p)] for name, p in named if id(p) in places}


def _after_state_dict(
    groups: Sequence[FlatGroup], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Puts whole parameters in; a collective from stage 1 on."""
    del metadata
    wholes: dict[int, torch.Tensor] = {}
    for group in groups:
        if group.separate or group.stage == 3:
            wholes[id(group)] = group.gather_owned(group.master)
    for name, (group, i) in _names(module, groups, prefix).items():
        if name in state and id(group) in wholes and not state[name].requires_grad:
            state[name] = group.part(wholes[id(group)], i)


def _before_load(
    groups: Sequence[FlatGroup],
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    *lists: list[str],
) -> None:
    """Takes this rank's part of every parameter that fits; torch reports the others."""
    del strict, lists
    if metadata.get("assign_to_params_buffers", False):
        raise InvalidArgumentError(
            f"load_state_dict: rank {groups[0].ranks.rank} got assign=True, expected parameters to stay where they "
            "are; leave it out"
        )
    names = _names(module, groups, prefix)
    fits = {name: at for name, at in names.items() if name in state and _fits(state[name], at)}
    if len(fits) < sum(name in state for name in names):
        for name in fits:  # nothing is changed where something does not fit
            state[name] = names[name][0].params[names[name][1]]
        return
    for name, (group, i) in fits.items():
        group.load(i, state[name])
        state[name] = group.params[i]
    for group in groups:
        work = group.publish()
        if work is not None:
            work.wait()


def _fits(value: Any, at: tuple[FlatGroup, int]) -> bool:
    group, i = at
    return torch.is_tensor(value) and tuple(value.shape) == group.layout.segments[i].shape
