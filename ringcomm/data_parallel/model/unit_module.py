"""Calls a unit's modules through the unit.

`__call__` of the module's class intercepts a call, outside of the code that `torch.compile` and `nn.Module.compile`
compile, and outside of a class's own `__call__`. Up to stage 2 parameters are unsharded, and nothing is gathered.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from ringcomm.data_parallel.model.sharded_model import Unit
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import LAST_STAGE
from ringcomm.modules.dynamo import skipped
from ringcomm.modules.notes import drop_unit, notes_of, notes_on, without_unit

_classes: dict[tuple[type, type], type] = {}
_lock = threading.Lock()
_WRAPPING = {("torch.nn.parallel.distributed", "__init__"), ("ringcomm.data_parallel.ddp", "_flat")}


def is_asked_to_wrap() -> bool:
    """Whether the property that calls this is read by a DistributedDataParallel, torch's or ours, that is about to wrap
    the module, or a module that passes attributes on to it. Tools that read every attribute get an AttributeError."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WRAPPING:
            return True
        frame = frame.f_back
    return False


class UnitModule:
    """The mixin that wrapping adds to the class of a unit's module. A copy of the module has the plain class; a
    module that it makes from its own class, such as a slice of nn.Sequential, has no unit."""

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module through its unit."""
        unit: Unit | None = notes_of(self).unit
        call = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs) if unit is None else unit.call(self, call, args, kwargs)

    @skipped
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module through its unit, even if torch.compile or a checkpoint has stored this method."""
        unit: Unit | None = notes_of(self).unit
        call = super()._call_impl  # type: ignore[misc]
        return call(*args, **kwargs) if unit is None or unit.calling is self else unit.call(self, call, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does not call a base class's own __init_subclass__ for the classes that wrapping makes."""
        if issubclass(cls.__bases__[0], nn.Module):
            super().__init_subclass__(**kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Same as `nn.Module.compile`: compiles the module's own call, without the unit's."""
        self._compiled_call_impl = torch.compile(super()._call_impl, *args, **kwargs)  # type: ignore[misc]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names that DistributedDataParallel, torch's or ours, reads from a module that it wraps."""
        if notes_of(self).unit is None or not is_asked_to_wrap():
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise InvalidArgumentError(
            "DistributedDataParallel: got a module that ringcomm.shard or fully_shard has wrapped, expected a plain "
            "one: gradients would be averaged twice; wrap it once (with accelerate, prepare only the loader and the "
            "optimizer)"
        )

    def __prepare_scriptable__(self) -> Any:
        """Raises: torch.jit.script would compile the calls through the unit, too."""
        raise UnsupportedError(
            "torch.jit.script: got a wrapped module, expected a plain one; script a submodule before the model is "
            "wrapped, or load state_dict() into a new module and script that"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        unit: Unit | None = notes_of(self).unit
        if unit is not None and unit.flat.stage == LAST_STAGE:
            raise UnsupportedError(
                f"copy or pickle: rank {unit.flat.ranks.rank} got a {type(self).__name__} of stage 3, whose parameters "
                "are in the ranks' shards, expected whole ones; copy it at another stage, save state_dict(), or load "
                "state_dict() into a new module; to average weights, as AveragedModel does, lerp_ a copy of "
                "state_dict() (docs/training.md, Averaging weights)"
            )
        state = without_unit(self.__getstate__())  # type: ignore[attr-defined]
        return _new, (plain_class(type(self)),), state


class EqualsPlain(type):
    """The metaclass of the classes that wrapping makes: each equals its plain class, because many programs compare
    ``type(module) == nn.Linear`` or use ``type(module)`` as a key."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and plain_class(cls) is plain_class(other)

    def __hash__(cls) -> int:
        return type.__hash__(plain_class(cls))

    def __delattr__(cls, name: str) -> None:
        if name not in vars(cls):  # torch's remove_parametrizations
            raise InvalidArgumentError(
                f"del {cls.__name__}.{name}: got the class of a wrapped module, expected a plain one; ringcomm.unshard "
                "the module, remove its parametrizations and wrap it again"
            )
        super().__delattr__(name)


def _new(kind: type[nn.Module]) -> nn.Module:
    made: nn.Module = object.__new__(kind)
    return made


def plain_class(kind: type) -> Any:
    """Returns the class that a module had before it was wrapped."""
    return vars(kind).get("_ringcomm_plain", kind)


def mix_in(module: nn.Module, unit: Unit, added: type[UnitModule] = UnitModule) -> None:
    """Adds the mixin to a module's class. The class keeps its name, because libraries look for that name."""
    kind = plain_class(type(module))
    with _lock:
        if (added, kind) not in _classes:
            members = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
            bases = (EqualsPlain,) if type(kind) is type else (EqualsPlain, type(kind))
            meta = type("EqualsPlain", bases, {})
            _classes[added, kind] = meta(kind.__name__, (added, kind), {**members, "_ringcomm_plain": kind})
    notes_on(module).unit = unit
    # Changes the class, because Python looks `__call__` up only there, and the module must stay the same object.
    module.__class__ = _classes[added, kind]
    unit.undo.append(partial(_restore_class, module))


def _restore_class(module: nn.Module) -> None:
    """Gives a module its plain class again."""
    if notes_of(module).unit is not None:
        drop_unit(module)
        module.__class__ = plain_class(type(module))  # the reverse of `mix_in`
