"""`state_dict()` and `load_state_dict()` of a module whose parameters are in flat groups: the ordinary ones, in the
master weights' type."""

from __future__ import annotations

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
    flat.module.register_state_dict_post_hook(_after_state_dict)
    flat.module.register_load_state_dict_pre_hook(_before_load)


def _flat(module: nn.Module) -> FlatModel:
    from ringcomm.parallel.flat_model import flat_model_of

    flat = flat_model_of(module)
    assert flat is not None  # the hooks are on wrapped modules
    return flat


def _names(flat: FlatModel, prefix: str) -> dict[str, tuple[FlatGroup, int]]:
    """Every name in a state dict that is a parameter of the flat groups; tied ones have several."""
    places: Places = {id(p): (group, i) for group in flat.groups for i, p in enumerate(group.params)}
    named = flat.module.named_parameters(remove_duplicate=False)
    return {prefix + name: places[id(p)] for name, p in named if id(p) in places}


def _after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts whole parameters in; a collective from stage 1 on."""
    del metadata
    flat = _flat(module)
    wholes: dict[int, torch.Tensor] = {}
    for group in flat.groups:
        if group.separate or group.stage == 3:
            wholes[id(group)] = group.gather_owned(group.master)
    for name, (group, i) in _names(flat, prefix).items():
        if name in state and id(group) in wholes and not state[name].requires_grad:
            state[name] = group.part(wholes[id(group)], i)


def _before_load(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
) -> None:
    """Takes this rank's part of every parameter that fits; torch reports the others."""
    del strict, lists
    flat = _flat(module)
    if metadata.get("assign_to_params_buffers", False):
        raise InvalidArgumentError(
            f"load_state_dict: rank {flat.ranks.rank} got assign=True, expected parameters to stay where they are; "
            "leave it out"
        )
    names = _names(flat, prefix)
    fits = {name: at for name, at in names.items() if name in state and _fits(state[name], at)}
    if len(fits) < sum(name in state for name in names):
        for name in fits:  # nothing is changed where something does not fit
            state[name] = names[name][0].params[names[name][1]]
        return
    for name, (group, i) in fits.items():
        group.load(i, state[name])
        state[name] = group.params[i]
    for group in flat.groups:
        work = group.publish()
        if work is not None:
            work.wait()


def _fits(value: Any, at: tuple[FlatGroup, int]) -> bool:
    group, i = at
    return torch.is_tensor(value) and tuple(value.shape) == group.layout.segments[i].shape
