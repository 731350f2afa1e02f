"""`state_dict()` and `load_state_dict()` of a module whose parameters are in flat groups: the ordinary ones, in the
master weights' type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.data_parallel.group import LAST_STAGE, with_own_storage
from ringcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ringcomm.data_parallel.flat_model import FlatModel
    from ringcomm.data_parallel.group import FlatGroup
    from ringcomm.data_parallel.unit import Unit

Places = dict[int, tuple["FlatGroup", int]]
_done = WeakTensorKeyDictionary()  # tensors of state dicts that are whole


def keep_ordinary_state(flat: FlatModel) -> None:
    """Puts the hooks on the module that was wrapped, and on the modules of its units."""
    for unit in flat.units:
        for module in unit.modules:
            keep_state_of(module, unit, flat.groups if module is flat.module else unit.groups)


def keep_state_of(module: nn.Module, unit: Unit, groups: Sequence[FlatGroup]) -> None:
    """Puts the hooks for these groups on a module of a unit that holds their parameters."""
    if groups:
        after = module.register_state_dict_post_hook(_Hook(_after_state_dict, groups))
        before = module.register_load_state_dict_pre_hook(_Hook(_before_load, groups))
        unit.undo += [after.remove, before.remove]


class _Hook:
    """A function of flat groups and what torch passes to a module's hook. In a copy of the module it does nothing."""

    def __init__(self, function: Callable[..., None], groups: Sequence[FlatGroup]) -> None:
        self.function, self.groups = function, groups

    def __call__(self, *args: Any) -> None:
        """Runs it."""
        self.function(self.groups, *args)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing, ())


def _nothing(*_: Any) -> None:
    """A copy's parameters are ordinary."""


def _names(module: nn.Module, groups: Sequence[FlatGroup], prefix: str) -> dict[str, tuple[FlatGroup, int]]:
    """Every name in a state dict that is a parameter of the flat groups; tied ones have several."""
    places: Places = {id(p): (group, i) for group in groups for i, p in enumerate(group.params)}
    named = module.named_parameters(remove_duplicate=False)
    return {prefix + name: places[id(p)] for name, p in named if id(p) in places}


def _after_state_dict(
    groups: Sequence[FlatGroup], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Puts whole parameters in. Where they are not whole here it is a collective, and they are copies: torch refuses to
    write into them, as into every tensor of inference mode, for what is written would not reach the model."""
    del metadata
    wholes: dict[FlatGroup, torch.Tensor] = {}
    for name, (group, i) in _names(module, groups, prefix).items():
        if name not in state or state[name].requires_grad or state[name] in _done:  # keep_vars; done by one inside
            continue
        if not (group.separate or group.stage == LAST_STAGE):
            state[name] = with_own_storage(state[name])
            continue
        with torch.inference_mode():
            if group not in wholes:
                master = group.written_master("state_dict")
                whole = group.gather_owned(master)
                wholes[group] = whole.clone() if whole is group.master else whole
            state[name] = with_own_storage(group.part(wholes[group], i))
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
        group.adopt_writes("load_state_dict")
    for name, (group, i) in fits.items():
        group.load(i, state[name])
        state[name] = group.params[i]
    for group in groups:
        group.publish().wait()


def _fits(value: Any, at: tuple[FlatGroup, int]) -> bool:
    group, i = at
    return torch.is_tensor(value) and tuple(value.shape) == group.layout.segments[i].shape
