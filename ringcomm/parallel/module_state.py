"""`state_dict()` and `load_state_dict()` of a module whose parameters are in flat groups: the ordinary ones, in the
master weights' type."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.errors import InvalidArgumentError
from ringcomm.parallel.group import LAST_STAGE

if TYPE_CHECKING:
    from ringcomm.parallel.flat_model import FlatModel
    from ringcomm.parallel.group import FlatGroup

Places = dict[int, tuple["FlatGroup", int]]
_done = WeakTensorKeyDictionary()  # tensors of state dicts that are whole


def keep_ordinary_state(flat: FlatModel) -> None:
    """Puts the hooks on the module that was wrapped, and on the modules of its units."""
    for unit in flat.units:
        for module in unit.modules:
            keep_state_of(module, flat.groups if module is flat.module else unit.groups)


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
    wholes: dict[FlatGroup, torch.Tensor] = {}
    for name, (group, i) in _names(module, groups, prefix).items():
        if not (group.separate or group.stage == LAST_STAGE) or name not in state:
            continue
        if state[name].requires_grad or state[name] in _done:  # keep_vars; done by a module inside
            continue
        if group not in wholes:
            group.adopt_writes()
            wholes[group] = group.gather_owned(group.master)
        state[name] = group.part(wholes[group], i)
        _done[state[name]] = True


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
    named = _names(module, groups, prefix)
    names = {name: (group, i) for name, (group, i) in named.items() if state.get(name) is not group.params[i]}
    fits = {name: at for name, at in names.items() if name in state and _fits(state[name], at)}
    if len(fits) < sum(name in state for name in names):
        for name in fits:  # nothing is changed where something does not fit
            state[name] = names[name][0].params[names[name][1]]
        return
    if not fits:  # done by the module around
        return
    for group in groups:
        group.adopt_writes()
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
