"""A unit: a run of modules whose parameters are communicated together, and the work around their calls.

    forward    gather before the run's first module, release after its last
    backward   gather when the gradient of an output arrives; release and reduce when backward has reached a call that
               came before all calls of the unit

Autograd runs nodes in the reverse order of their creation, so when the gradient of an earlier call's output arrives,
later calls are done. Nothing is added to the graph itself, so sums of gradients are associated as in the plain module.

A module's call is intercepted in `__call__` of the module's class: outside the code that `torch.compile` and
`nn.Module.compile` compile, and outside a class's own `__call__`. Up to stage 2 parameters are unsharded, and nothing
is gathered.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ringcomm.data_parallel.bucket import LAST_STAGE, Bucket
from ringcomm.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ringcomm.data_parallel.precision import MixedPrecision
    from ringcomm.data_parallel.sharded_model import ShardedModel

_F = TypeVar("_F", bound=Callable[..., Any])
_classes: dict[tuple[type, type], type] = {}
_lock = threading.Lock()
_frames = torch._C._dynamo.eval_frame  # the interpreter's part; importing the package torch._dynamo takes long


def skipped(function: _F) -> _F:
    """Makes Dynamo run a function uncompiled, and compile the functions that it calls."""
    return _without_dynamo(function, _frames._FrameAction.DEFAULT)


def eager(function: _F) -> _F:
    """Excludes a function and the functions that it calls from Dynamo. Unlike torch.compiler.disable it costs
    nothing if nothing is compiled, and does not import the compiler."""
    return _without_dynamo(function, _frames._FrameAction.SKIP)


def _without_dynamo(function: _F, inside: Any) -> _F:
    """Sets, on a function's code, how Dynamo treats the functions that it calls."""
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, inside)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class UnitModule:
    """The mixin that wrapping adds to the class of a unit's module. A copy of the module has the plain class; a
    module that it makes from its own class, such as a slice of nn.Sequential, has no unit."""

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module through its unit."""
        unit: Unit | None = self.__dict__.get("_ringcomm_unit")
        call = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs) if unit is None else unit.call(self, call, args, kwargs)

    @skipped
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module through its unit, even if torch.compile or a checkpoint has stored this method."""
        unit: Unit | None = self.__dict__.get("_ringcomm_unit")
        call = super()._call_impl  # type: ignore[misc]
        return call(*args, **kwargs) if unit is None or unit.calling is self else unit.call(self, call, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hides the classes that wrapping makes from a base class's own __init_subclass__, which only sees users'
        classes."""
        if issubclass(cls.__bases__[0], nn.Module):
            super().__init_subclass__(**kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Same as `nn.Module.compile`: compiles the module's own call, without the unit's."""
        self._compiled_call_impl = torch.compile(super()._call_impl, *args, **kwargs)  # type: ignore[misc]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names that DistributedDataParallel, torch's or ours, reads from a module that it wraps."""
        if "_ringcomm_unit" not in self.__dict__:
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise InvalidArgumentError(
            "DistributedDataParallel: got a module that ringcomm.shard or fully_shard has wrapped, expected a plain "
            "one: gradients would be averaged twice; wrap it once"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        unit: Unit | None = self.__dict__.get("_ringcomm_unit")
        if unit is not None and unit.flat.stage == LAST_STAGE:
            raise UnsupportedError(
                f"copy: rank {unit.flat.ranks.rank} got a {type(self).__name__} of stage 3, whose parameters are in "
                "the ranks' shards, expected whole ones; copy it at another stage, or load its state_dict() into a "
                "new module"
            )
        state = {key: value for key, value in self.__getstate__().items() if key != "_ringcomm_unit"}  # type: ignore[attr-defined]
        return _new, (plain_class(type(self)),), state


class EqualsPlain(type):
    """The metaclass of the classes that wrapping makes: each equals its plain class, because many programs compare
    ``type(module) == nn.Linear`` or use ``type(module)`` as a key."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and plain_class(cls) is plain_class(other)

    def __hash__(cls) -> int:
        return type.__hash__(plain_class(cls))


def _new(kind: type[nn.Module]) -> nn.Module:
    made: nn.Module = object.__new__(kind)
    return made


def plain_class(kind: type) -> Any:
    """Returns the class that a module had before it was wrapped."""
    return vars(kind).get("_ringcomm_plain", kind)


def mix_in(module: nn.Module, unit: Unit, added: type[UnitModule] = UnitModule) -> None:
    """Adds the mixin to a module's class. The class keeps its name, because libraries look for it."""
    kind = plain_class(type(module))
    with _lock:
        if (added, kind) not in _classes:
            members = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
            bases = (EqualsPlain,) if type(kind) is type else (EqualsPlain, type(kind))
            meta = type("EqualsPlain", bases, {})
            _classes[added, kind] = meta(kind.__name__, (added, kind), {**members, "_ringcomm_plain": kind})
    module.__dict__["_ringcomm_unit"] = unit
    module.__class__ = _classes[added, kind]


class Unit:
    """Modules that are called one after another, and their buckets.

    Args:
        reshard_after_forward: whether stage 3 frees the parameters between forward and backward.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket], reshard_after_forward: bool
    ) -> None:
        self.name, self.modules, self.buckets = name, list(modules), list(buckets)
        self.reshard_after_forward = reshard_after_forward
        self.asked_reshard: bool | None = None  # the value passed to `fully_shard`
        self.reshard_after_backward = True
        self.precision: MixedPrecision | None = None  # None: the model's
        self.forward_prefetch: list[Unit] | None = None  # None: the units that followed in the last pass
        self.backward_prefetch: list[Unit] | None = None
        self.first_call: int | None = None  # number of its first call whose graph is not used up; 0: unknown
        self.in_backward = False
        self.calls: Counter[nn.Module] = Counter()  # calls in training whose graph is not used up
        self.checkpointed = False  # whether a call had no graph, as in reentrant checkpointing
        self.used_outside = False  # with a checkpoint: whether backward also reaches a parameter outside it
        self.recomputed: bool | None = None  # whether backward has run a call again; None: unknown
        self.came_twice = False  # whether a gradient has unexpectedly come twice
        self.calling: nn.Module | None = None  # the module whose call is running
        self.undo: list[Callable[[], Any]] = []  # calls that undo what wrapping did to the modules
        self.flat: ShardedModel

    @property
    def repeats(self) -> bool:
        """Whether the unit's gradients may come in several parts of a backward pass, with other units in between:
        each reentrant checkpoint runs its own backward pass inside it."""
        if self.came_twice:
            return True
        hidden = self.checkpointed and self.recomputed is not False
        return hidden and (self.used_outside or self.calls.total() > 1)

    @property
    def accumulators(self) -> list[Any]:
        """The autograd nodes that accumulate the parameters' gradients."""
        return [node for bucket in self.buckets for node in bucket.accumulators]

    def forget_calls(self) -> None:
        """Resets the records of calls, when a forward pass begins after a backward pass."""
        if self.checkpointed and self.recomputed is None:  # the calls without a graph were not checkpoints
            self.recomputed = False
        self.first_call, self.checkpointed, self.used_outside = None, False, False
        self.calls.clear()

    # ---- parameters -----------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the parameters can be read."""
        return all(bucket.is_whole for bucket in self.buckets)

    def start_gather(self) -> None:
        """Stage 3: starts to gather the parameters."""
        for bucket in self.buckets:
            bucket.start_gather()

    def gather(self) -> None:
        """Gathers the parameters, and waits for them."""
        self.start_gather()
        for bucket in self.buckets:
            bucket.finish_gather()

    def release(self) -> None:
        """Frees the other ranks' parameters."""
        for bucket in self.buckets:
            bucket.release()

    def unwrap(self) -> None:
        """Makes the modules and parameters plain ones; a collective."""
        for bucket in self.buckets:
            bucket.give_back()
        for take_away in self.undo:
            take_away()
        for module in self.modules:
            if module.__dict__.pop("_ringcomm_unit", None) is not None:
                module.__class__ = plain_class(type(module))

    # ---- a call ---------------------------------------------------------------------------------------------------

    @skipped
    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs ``forward`` of one of the modules, with its parameters gathered."""
        counted = self._begin(module)
        before, self.calling = self.calling, module
        done = False
        try:
            args, kwargs = self.cast_inputs(args, kwargs)
            output = forward(*args, **kwargs)
            done = True
        finally:
            self.calling = before
            self._leave(counted, done)
        return self._finish(module, counted, output)

    @eager
    def _begin(self, module: nn.Module) -> bool:
        """Begins a call. Returns False inside a pipeline step, where parameters stay unsharded."""
        if not self.flat.held:
            self.flat.begin_call(self, module)
        return not self.flat.held

    @eager
    def _leave(self, counted: bool, done: bool) -> None:
        if counted:
            self.flat.leave_call(done)

    @eager
    def _finish(self, module: nn.Module, counted: bool, output: Any) -> Any:
        flat = self.flat
        if not counted:
            return self._cast_output(output)
        number = flat.end_call(self, module)
        if number is not None:
            for x in tensors_of(output):
                if x.grad_fn is not None:
                    _hook_first(x, partial(_reached, weakref.ref(self), number))
        if module is flat.module:
            return flat.precision.cast(output, flat.precision.output_dtype)
        return self._cast_output(output)

    @eager
    def cast_inputs(self, args: Any, kwargs: Any) -> Any:
        """Casts a call's arguments to the type in which the unit computes."""
        precision = self.precision or self.flat.precision
        if precision.cast_forward_inputs and precision.param_dtype is not None:
            return precision.cast((args, kwargs), precision.param_dtype)
        return args, kwargs

    def _cast_output(self, output: Any) -> Any:
        precision = self.precision
        return output if precision is None else precision.cast(output, precision.output_dtype)


def _hook_first(x: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook that runs before the existing ones, so that backward reaches a unit before the units inside
    it, even if the unit returns the same tensor as an inner unit."""
    x.register_hook(hook)
    hooks = x._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *before, last = hooks.items()
        hooks.clear()
        hooks.update([last, *before])


@eager
def _reached(unit: weakref.ref[Unit], number: int, _: torch.Tensor) -> None:
    """Tells the model that backward has reached the output of a call. The reference is weak, because the model may
    reference the graph."""
    here = unit()
    if here is not None:
        here.flat.reach(here, number)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's output, including those in dataclasses, mappings and sequences of any class."""
    if isinstance(output, torch.Tensor):
        return [output]
    found = []
    for x in tree_flatten(output)[0]:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif is_dataclass(x) and not isinstance(x, type):
            found += tensors_of([getattr(x, field.name) for field in fields(x)])
        elif isinstance(x, Mapping):
            found += tensors_of(list(x.values()))
        elif isinstance(x, (list, tuple)):
            found += tensors_of(list(x))
    return found
