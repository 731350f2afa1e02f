"""A unit: a run of modules whose parameters travel together, and the hooks that bring and take them away.

    forward    gather before the run's first module, release after its last
    backward   gather when the gradient of an output arrives, release and reduce when those of the inputs are there

Every rank runs the same modules, so these places come in the same order everywhere. Up to stage 2 parameters are
whole and there is nothing to bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ringcomm.errors import UnsupportedError
from ringcomm.parallel.group import LAST_STAGE, FlatGroup

if TYPE_CHECKING:
    from ringcomm.parallel.flat_model import FlatModel
    from ringcomm.parallel.precision import MixedPrecision


class Unit:
    """Modules that are called one after the other, and their flat groups.

    Args:
        reshard_after_forward: whether stage 3 lets go of the parameters between forward and backward.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], groups: Sequence[FlatGroup], reshard_after_forward: bool
    ) -> None:
        self.name, self.modules, self.groups = name, list(modules), list(groups)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.precision: MixedPrecision | None = None  # None: the model's
        self.forward_prefetch: list[Unit] | None = None  # None: what came next in the last pass
        self.backward_prefetch: list[Unit] | None = None
        self.calls: _Calls | None = None  # in this forward pass
        self.pending = 0  # forward passes whose backward has not come by
        self.in_backward = False
        self.around: list[Unit] = []  # units that hold this one's modules, the outermost left out
        self.flat: FlatModel
        self._handles: list[Any] = []

    def hook(self, flat: FlatModel) -> None:
        """Puts the hooks on the modules."""
        self.flat = flat
        for module in self.modules:
            self._handles.append(module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after_forward))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"copy: rank {self.flat.ranks.rank} got a wrapped {type(self.flat.module).__name__}, expected a plain "
            "one; copy it before it is wrapped, or load its state_dict() into a new one"
        )

    def unhook(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- parameters -----------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the parameters can be read."""
        return all(group.is_whole for group in self.groups)

    @property
    def recomputing(self) -> bool:
        """Whether a forward pass now is one of activation checkpointing; outside of a backward pass, one that failed
        has left the marks."""
        inside = self.in_backward or any(unit.in_backward for unit in self.around)
        return inside and torch._C._current_graph_task_id() >= 0

    def start_gather(self) -> None:
        """Stage 3: starts to collect the parameters."""
        for group in self.groups:
            group.start_gather()

    def gather(self) -> None:
        """Collects the parameters, and waits for them."""
        self.start_gather()
        for group in self.groups:
            group.finish_gather()

    def release(self) -> None:
        """Lets go of them."""
        for group in self.groups:
            group.release()

    # ---- forward --------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        flat = self.flat
        if flat.held:
            return self.cast_inputs(args, kwargs)
        again = self.recomputing
        if module is flat.module and not again:
            flat.begin_forward()
        if module is self.modules[0] and not again:
            flat.enter(self)
        else:
            flat.timed(self.gather)
        args, kwargs = self.cast_inputs(args, kwargs)
        watches = flat.stage >= 2 and not again and torch.is_grad_enabled() and self is not flat.root
        # Reentrant checkpointing computes a run again from its end on, each module with a backward pass of its own.
        if watches and (module is self.modules[0] or torch._C._current_graph_task_id() < 0):
            args, kwargs = self._watch_inputs((args, kwargs))
        return args, kwargs

    def cast_inputs(self, args: Any, kwargs: Any) -> Any:
        """A call's arguments in the type that the unit computes in."""
        precision = self.precision or self.flat.precision
        if precision.cast_forward_inputs and precision.param_dtype is not None:
            return precision.cast((args, kwargs), precision.param_dtype)
        return args, kwargs

    def _watch_inputs(self, inputs: Any) -> Any:
        leaves, spec = tree_flatten(inputs)
        watched = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if self.calls is None:
            self.calls = _Calls()
            self.pending += 1
        self.calls.made += 1
        if not watched:  # nothing tells when backward has passed it: the end of backward does
            return inputs
        for i, x in zip(watched, _Watch.apply(self, self.calls, *(leaves[i] for i in watched)), strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, spec)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        del args
        flat = self.flat
        if flat.held or self.recomputing:
            return self._cast_output(output)
        if flat.stage >= 2 and torch.is_grad_enabled():
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(self._before_backward)
        if module is self.modules[-1] and (self.reshard_after_forward or not torch.is_grad_enabled()):
            self.release()
        if module is flat.module:
            flat.end_forward()
            return flat.precision.cast(output, flat.precision.output_dtype)
        return self._cast_output(output)

    def _cast_output(self, output: Any) -> Any:
        """A hook's answer: the output in the unit's own type for it; None: as it is."""
        dtype = None if self.precision is None else self.precision.output_dtype
        return None if self.precision is None or dtype is None else self.precision.cast(output, dtype)

    # ---- backward -------------------------------------------------------------------------------------------------

    def _before_backward(self, _: torch.Tensor) -> None:
        flat = self.flat
        flat.begin_backward()
        self.in_backward = True
        if flat.stage == LAST_STAGE:
            flat.timed(self.gather)
            for unit in flat.before(self) if self.backward_prefetch is None else self.backward_prefetch:
                unit.start_gather()

    def after_backward(self, calls: _Calls) -> None:
        """The gradients of a call's inputs are there, and after the last call those of the run's parameters."""
        if not calls.all_passed(self.flat.backwards):
            return
        self.pending -= 1
        if self.pending > 0:
            return
        self.in_backward = False
        if self.reshard_after_backward:
            self.release()
        self.flat.flush(self)


class _Calls:
    """The calls of a unit's modules in one forward pass, and those that a backward pass has passed."""

    def __init__(self) -> None:
        self.made = self.passed = self.backward = 0

    def all_passed(self, backward: int) -> bool:
        """One more was passed: whether it was the last.

        Args:
            backward: the number of the backward pass; the same graph may see several.
        """
        if backward != self.backward:
            self.backward, self.passed = backward, 0
        self.passed += 1
        return self.passed == self.made


class _Watch(torch.autograd.Function):
    """The inputs as they are; tells the unit when their gradients have come."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, calls: _Calls, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.calls = unit, calls
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.unit.after_backward(ctx.calls)
        return (None, None, *grads)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns, also in dataclasses, mappings and sequences of their own classes."""
    found = []
    for x in tree_flatten(output)[0]:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif is_dataclass(x) and not isinstance(x, type):
            found += _tensors([getattr(x, field.name) for field in fields(x)])
        elif isinstance(x, Mapping):
            found += _tensors(list(x.values()))
        elif isinstance(x, (list, tuple)):
            found += _tensors(list(x))
    return found
