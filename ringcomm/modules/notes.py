"""The one attribute that ringcomm sets on a user's module. Copies of the module get a copy of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

NAME = "_ringcomm"


@dataclass
class ModuleNotes:
    """The notes of one module.

    Attributes:
        unit: the `Unit` that it belongs to while it is wrapped.
        parts: by name, the `ShardSpec`s of its own parameters, their places in the whole model's tensors.
        unsplit: for a module on the meta device, its form before it was split, as an `UnsplitModule`.
        elsewhere: whether another stage of a pipeline runs the module.
        in_pipeline: whether a pipeline's stage intercepts the module's calls.
    """

    unit: Any = None
    parts: dict[str, Any] = field(default_factory=dict)
    unsplit: Any = None
    elsewhere: bool = False
    in_pipeline: bool = False

    def __copy__(self) -> ModuleNotes:
        return replace(self, parts=dict(self.parts))


_NOTHING = ModuleNotes()


def notes_of(module: Any) -> ModuleNotes:
    """Returns a module's notes, to be read."""
    found: ModuleNotes = module.__dict__.get(NAME, _NOTHING)
    return found


def notes_on(module: nn.Module) -> ModuleNotes:
    """Returns a module's notes, to be changed."""
    found: ModuleNotes = module.__dict__.setdefault(NAME, ModuleNotes())
    return found


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a copy of a module's attributes, so that the copy's parameters, submodules and notes can be changed."""
    return {key: copy.copy(x) if isinstance(x, (dict, ModuleNotes)) else x for key, x in vars(module).items()}


def without_unit(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a module's attributes as they would be if it were not wrapped."""
    notes: ModuleNotes = state.get(NAME, _NOTHING)
    left = replace(notes, unit=None)
    others = {key: value for key, value in state.items() if key != NAME}
    return others if left == _NOTHING else {**others, NAME: left}


def drop_unit(module: nn.Module) -> None:
    """Removes the unit of a module that is not wrapped any more, and notes that are empty without it."""
    module.__dict__.update(without_unit({NAME: module.__dict__.pop(NAME)}))
