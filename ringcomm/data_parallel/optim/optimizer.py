"""Attaches the user's own optimizer to a sharded model: users see the model's parameters, and step() works on shards.

Between two steps `optimizer.param_groups` holds the user's parameters. During step() this rank's parts of the buckets
replace the sharded model's parameters:

    element-wise optimizers     one long parameter for each run of segments of one parameter group, on the CPU its
                                cache blocks
    other optimizers, stage 0   the model's own parameters, where these are the master weights
    other optimizers            each parameter that lies on this rank, in its own shape

This module keeps the state of the shards. `optimizer.state` maps the model's parameters to unsharded values, and
`state_dict()` has torch's usual form.
"""

from __future__ import annotations

import copy
import operator
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringcomm.data_parallel.buckets.bucket import Bucket, adopt_writes
from ringcomm.data_parallel.buckets.grad_buffer import adopt_user_grads, sync_grads_from_root
from ringcomm.data_parallel.buckets.offload import HostGradients
from ringcomm.data_parallel.model.options import SAME_OPTIONS, Options
from ringcomm.data_parallel.model.place import Place, models_of, place_of
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim import cache_blocks
from ringcomm.data_parallel.optim.state import OptimizerState, State, StepParameter, in_shape_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError, user_stacklevel
from ringcomm.modules.dynamo import eager

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_REFUSED = {
    "SparseAdam": "which takes sparse gradients",
    "ZeroRedundancyOptimizer": "which distributes the parameters itself",
}
_SUM = "which adds up over all parameters in step()"
_REFUSED_FROM_STAGE_1 = {
    "LBFGS": "whose line search needs all parameters in one place",
    "Prodigy": _SUM,  # and all classes whose names begin with it
    "DAdapt": _SUM,
}
_CLIPS_BY = {  # options with which a class of this name divides by the norm of all gradients
    "Lamb": ("max_grad_norm", "pre_norm"),
    "LAMB": ("max_grad_norm", "pre_norm"),
    "FusedLAMB": ("max_grad_norm",),
    "Adan": ("max_grad_norm",),
}
_watching: list[Any] = []  # the handle of the hook on every optimizer's step, once registered
_num_wrapped = 0  # models wrapped so far; an optimizer that was checked is checked again only after it has grown
_warned: set[type] = set()  # classes of optimizers for which a warning was given
_lock = threading.Lock()
_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(len).__code__  # torch puts this function in place of step()


# ---- which optimizer can be sharded ----------------------------------------------------------------------------------


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update depends only on its own gradient and state, so that shards may split tensors."""
    owner = _steps_by(optimizer)
    return _is_torchs(owner) and owner.__name__ in _ELEMENTWISE


def _steps_by(optimizer: torch.optim.Optimizer) -> type:
    """Returns the class that defines the optimizer's step()."""
    classes = [cls for cls in type(optimizer).__mro__ if "step" in vars(cls)]
    step = _without_profiling(vars(classes[0])["step"])
    return next(cls for cls in reversed(classes) if _without_profiling(vars(cls)["step"]) is step)


def _without_profiling(step: Any) -> Any:
    """Returns the original of ``step``, which torch wraps for profiling in the class of each new optimizer, even if the
    class inherits it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _is_torchs(cls: type) -> bool:
    return f"{cls.__module__}.".startswith("torch.optim.")


def refuse_unusable(optimizer: Any, call: str, rank: int, stage: int = 1) -> None:
    """Raises for an optimizer that cannot be sharded at a stage."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, whose constructor does not call that of "
            "torch.optim.Optimizer, expected an optimizer with hooks; if it wraps another optimizer, pass that one and "
            "wrap it afterwards"
        )
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED and cls.__module__.startswith(("torch.optim.", "torch.distributed.", "ringcomm.")):
            raise UnsupportedError(
                f"{call}: rank {rank} got {cls.__name__}, {_REFUSED[cls.__name__]}, expected one that updates each "
                "tensor by itself; use another optimizer"
            )
    on_meta = [key for state in optimizer.state.values() for key, x in state.items() if getattr(x, "is_meta", False)]
    if on_meta:
        raise UnsupportedError(
            f"{call}: rank {rank} got {type(optimizer).__name__} with the state {on_meta[0]!r} on the meta device, "
            "expected state with values; make the optimizer after ringcomm.shard(model, stage=...), and pass it to "
            "ringcomm.shard(model, optimizer)"
        )
    why = _why_needs_all(optimizer)
    if stage and why is not None:
        raise UnsupportedError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, {why}, where a rank has only a part of them, "
            "expected one that updates each parameter by itself; use another optimizer, or ringcomm.shard with stage=0"
        )


def refuse_foreign(optimizer: torch.optim.Optimizer, module: nn.Module, call: str, rank: int) -> None:
    """Raises for an optimizer with none of the module's parameters. A frozen pipeline stage may have an optimizer
    without parameters."""
    known, has = {id(p) for p in module.parameters()}, [p for each in optimizer.param_groups for p in each["params"]]
    trains = has or any(p.requires_grad for p in module.parameters())
    if trains and not any(id(p) in known for p in has):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got an optimizer with none of the module's parameters, expected some of them; make "
            "the optimizer from module.parameters()"
        )


def _why_needs_all(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why an optimizer needs all parameters on every rank; None if its class shows no such need."""
    for cls in type(optimizer).__mro__:
        for name, why in _REFUSED_FROM_STAGE_1.items():
            if cls.__name__.startswith(name):
                return why
        for option in _CLIPS_BY.get(cls.__name__, ()):
            if any(group.get(option) for group in optimizer.param_groups):
                return f"which clips by the norm of all gradients in step() ({option})"
    return None


def _warn_once(optimizer: torch.optim.Optimizer) -> None:
    """Warns once about a class of optimizers that is not torch's."""
    kind = type(optimizer)
    with _lock:
        if _is_torchs(_steps_by(optimizer)) or kind in _warned:
            return
        _warned.add(kind)
    warnings.warn(
        f"ringcomm.shard: from stage 1 on, step() of {kind.__name__} sees only the parameters that lie on this rank; "
        "if it needs all parameters, for example for a global norm, use stage 0",
        stacklevel=user_stacklevel(),
    )


# ---- which optimizer is sharded --------------------------------------------------------------------------------------


def find_sharded_optimizer(optimizer: Any) -> ShardedOptimizer | None:
    """Returns the `ShardedOptimizer` attached to an optimizer, also through wrappers such as Lightning's; or None."""
    found = getattr(optimizer, "_ringcomm", None)
    return found if isinstance(found, ShardedOptimizer) else None


def sharded_optimizer_of(optimizer: Any, call: str) -> ShardedOptimizer | None:
    """Returns the `ShardedOptimizer` attached to an optimizer, or None. An optimizer that cannot step its parameters
    by itself is attached now."""
    found = find_sharded_optimizer(optimizer)
    if found is not None:
        return found
    flat = next((flat for flat in _flats_of(optimizer) if _needs_shards(flat)), None)
    if flat is None:
        return None
    refuse_unusable(optimizer, call, flat.ranks.rank, flat.stage)
    return ShardedOptimizer(optimizer)


def states_of(optimizer: torch.optim.Optimizer) -> list[State]:
    """Returns the states that this rank holds."""
    sharded = find_sharded_optimizer(optimizer)
    if sharded is None:
        return [state for state in optimizer.state.values() if isinstance(state, dict)]
    unsharded = [state for part in sharded.parts.values() for state in (part.unsharded or {}).values()]
    return [state for state in sharded.state.values() if isinstance(state, dict)] + unsharded


def attach(optimizer: torch.optim.Optimizer, flat: ShardedModel, call: str) -> None:
    """Attaches an optimizer to a model. An optimizer that is attached to other models is attached to this one as well.

    Raises:  InvalidArgumentError: it has none of the model's parameters. UnsupportedError: it cannot be sharded.
    """
    refuse_unusable(optimizer, call, flat.ranks.rank, flat.stage)
    refuse_foreign(optimizer, flat.module, call, flat.ranks.rank)
    sharded = find_sharded_optimizer(optimizer)
    if sharded is None:
        ShardedOptimizer(optimizer)
    elif flat in sharded.flats:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer that is sharded already, expected a plain one; pass it "
            "once"
        )
    else:
        sharded.rebuild()


def sharded_optimizers(flat: ShardedModel) -> list[ShardedOptimizer]:
    """Returns the `ShardedOptimizer`s of the model's optimizers that no rank has dropped; a collective."""
    return [_sharded_of(optimizer) for optimizer in flat.optimizers.on_all_ranks()]


def _sharded_of(optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
    sharded: ShardedOptimizer = optimizer.__dict__["_ringcomm"]
    return sharded


def restage_model(flat: ShardedModel, stage: int) -> None:
    """Moves a model and the state of its optimizers to another stage; a collective."""
    for optimizer in flat.optimizers:
        _sharded_of(optimizer).refuse_stage("restage", stage)
    if stage and flat.sync.hook is not None:
        raise UnsupportedError(
            f"restage: rank {flat.ranks.rank} got stage={stage} for a module with a communication hook, which "
            "reduces whole gradients, expected stage 0; train it without the hook"
        )
    for unit in flat.units:
        unit.release()
    optimizers = sharded_optimizers(flat)
    states = [sharded.take_state() for sharded in optimizers]
    flat.restage(stage)
    for sharded, state in zip(optimizers, states, strict=True):
        sharded.rebuild(state)


def unwrap_model(flat: ShardedModel) -> None:
    """Makes a module and its optimizers plain ones; a collective."""
    flat.prepare_unwrap()
    for sharded in sharded_optimizers(flat):
        sharded.detach()
    flat.unwrap()


def _rebuild_optimizers(flat: ShardedModel) -> None:
    for sharded in sharded_optimizers(flat):
        sharded.rebuild()


def watch_optimizers() -> None:
    """Installs a hook that attaches optimizers at their first step, if they cannot step their parameters by
    themselves."""
    global _num_wrapped
    with _lock:
        _num_wrapped += 1
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_any_step))


@eager
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Checks once whether an unattached optimizer must be attached; compares its options at every step."""
    del args, kwargs
    now = (_num_wrapped, len(optimizer.param_groups))
    at, options = _checked.get(optimizer, (None, None))
    if at != now:
        options = None
        if sharded_optimizer_of(optimizer, "step") is None:
            flats = _flats_of(optimizer)
            options = UnattachedOptions(optimizer, flats) if flats else None
        _checked[optimizer] = now, options
    if options is not None:
        options.before_step()


def _flats_of(optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    """Returns the models that have some of the optimizer's parameters."""
    return models_of(p for group in optimizer.param_groups for p in group["params"])


def _refuse_in_backward(flat: ShardedModel) -> None:
    """Raises if a step is called by a hook of the model's backward pass, before gradients are reduced."""
    if flat.backward.scheduled and torch._C._current_graph_task_id() >= 0:
        raise InvalidArgumentError(
            f"step: rank {flat.ranks.rank} called step() inside backward(), where gradients are not averaged yet, "
            "expected the mean over all ranks; call it after backward()"
        )


def _needs_shards(flat: ShardedModel) -> bool:
    """Whether an optimizer cannot step the model's own parameters directly."""
    return flat.stage > 0 or any(bucket.separate for bucket in flat.buckets)


# ---- an optimizer that is sharded ------------------------------------------------------------------------------------


class UnattachedOptions(Options):
    """Options of an optimizer that steps the models' own parameters and was not passed to ringcomm. Ranks may have
    different options on purpose, for example if each rank steps a part of the parameters and broadcasts them. So a
    difference gives a warning, not an error.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[ShardedModel]) -> None:
        super().__init__(optimizer)
        self._flats = [*map(weakref.ref, flats)]
        self._warned = False

    def before_step(self) -> None:
        """Registers the current options for comparison in the models' next backward pass."""
        flats = [flat for flat in (ref() for ref in self._flats) if flat is not None]
        for flat in flats:
            _refuse_in_backward(flat)
            self._refuse_partly_reduced(flat)
        if not self._warned and any(flat.optimizers.options_differ for flat in flats):
            self._warned = True
            for flat in flats:
                flat.optimizers.options_differ = False
            warnings.warn(
                f"step: rank {flats[0].ranks.rank} has an optimizer with other options than another rank, such as the "
                f"learning rate, expected the same; {SAME_OPTIONS}",
                stacklevel=user_stacklevel(),
            )
        for flat in flats:
            flat.optimizers.stepped.add(self)

    def _refuse_partly_reduced(self, flat: ShardedModel) -> None:
        """Raises if a backward pass inside `no_sync` followed the last one that reduced: ``p.grad`` is the mean of the
        earlier passes, and the step would ignore the later ones. Without a mean, ``p.grad`` has all of them."""
        if flat.ranks.joining is not None and flat.ranks.joining.shadowing:
            return
        for bucket in flat.buckets:
            if not bucket.trainable:
                continue
            gradient = bucket.gradient
            if not (gradient.has_reduced and gradient.has_local):
                continue
            gradient.reconcile()  # the user may have set some to None or zero
            mine = {id(p) for group in self._groups() for p in group["params"]}
            put = [i for i in gradient.with_mean & gradient.local.contributed if id(bucket.params[i]) in mine]
            if put:
                raise InvalidArgumentError(
                    f"step: rank {flat.ranks.rank} got a gradient of {bucket.names[min(put)]} of which the part from "
                    "inside no_sync was not reduced, expected the mean over all ranks; call the last backward() before "
                    "a step outside of no_sync"
                )


# What an optimizer looked like when its step was checked last, and its options if it is not attached.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], UnattachedOptions | None]]
_checked = weakref.WeakKeyDictionary()


@dataclass
class BucketPart:
    """The parameters of one bucket that an optimizer steps, and their state between two steps.

    Attributes:
        flat: the bucket's model.
        segments: the parameters' indices in the bucket.
        stepped: the parameters that had a gradient in at least one step.
        unsharded: by index, the unsharded state that is kept until the next step; None: the state is in shards.
        loading: the state that load_state_dict() is loading.
    """

    flat: ShardedModel
    segments: set[int]
    stepped: set[int]
    unsharded: dict[int, State] | None = None
    loading: OptimizerState | None = None


class ShardedOptimizer:
    """An optimizer over parameters of wrapped models, and possibly other parameters that stay as they are.

    Attributes:
        flats: the wrapped models.
        parts: by bucket, the parameters that it steps, and their state.
        entries: the parameters of step(), in place of the models'.
        outside, inside: by group, the optimizer's parameters between two steps and during step().
        state: the optimizer's state during step().
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.options = Options(optimizer)
        self.flats: list[ShardedModel] = []
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.host = HostGradients()
        self._state_view = UnshardedStates(self)  # `optimizer.state` between two steps
        self._in_step = False
        self._num_wrapped = _num_wrapped
        _checked.pop(optimizer, None)
        self._find_params("shard")
        self.adopt_state()
        self.close()
        optimizer._ringcomm = self
        self._register()
        self._hooks = _hook(optimizer, self)

    # ---- parameters -----------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer. It references this object, which has only a weak reference back, so that both are freed
        when the user drops it."""
        found = self.options.optimizer
        assert found is not None
        return found

    @property
    def elementwise(self) -> bool:
        """Whether shards may split tensors."""
        return is_elementwise(self.optimizer)

    @property
    def flat(self) -> ShardedModel:
        """The first of the wrapped models."""
        return self.flats[0]

    @property
    def places(self) -> list[list[tuple[Bucket, int]]]:
        """By group, the wrapped models' parameters."""
        places = ([*map(_place_of, params)] for params in self.outside)
        return [[(place.bucket, place.index) for place in each if place is not None] for each in places]

    @property
    def plain(self) -> list[list[nn.Parameter]]:
        """By group, the parameters that the optimizer steps as they are: frozen parameters, and parameters of no
        wrapped model."""
        return [[p for p in params if _place_of(p) is None] for params in self.outside]

    def _find_params(self, call: str) -> None:
        """Finds the optimizer's parameters in the models' buckets, and makes the entries for the buckets' stage,
        without state."""
        groups = self.optimizer.param_groups
        for flat in _flats_of(self.optimizer):
            refuse_unusable(self.optimizer, call, flat.ranks.rank, flat.stage)
        self.outside = [list(group["params"]) for group in groups]
        self.parts: dict[Bucket, BucketPart] = {}
        group_of: dict[int, int] = {}  # by id, of the wrapped models' parameters
        for number, p in ((number, p) for number, params in enumerate(self.outside) for p in params):
            place = _place_of(p)
            if place is not None:
                group_of[id(p)] = number
                self.parts.setdefault(place.bucket, BucketPart(place.flat, set(), set())).segments.add(place.index)
        if any(bucket.stage for bucket in self.parts):
            _warn_once(self.optimizer)
        self.host.allocate(list(self.parts))
        self.entries = [
            self._entry(bucket, group, start, end, segments)
            for bucket in self.parts
            for group, start, end, segments in self._pieces(bucket, group_of)
        ]
        own = {id(entry.param) for entry in self.entries if entry.is_own}
        self._place_by_id = {  # only the parameters whose state is sharded
            id(bucket.params[i]): (bucket, i)
            for bucket, part in self.parts.items()
            for i in part.segments
            if id(bucket.params[i]) not in own
        }
        self._list_inside()

    def _register(self) -> None:
        """Registers the optimizer with the wrapped models."""
        flats = _flats_of(self.optimizer)
        for flat in self.flats:
            if flat not in flats:
                flat.optimizers.remove(self.optimizer, self.host)
        for flat in flats:
            if flat not in self.flats:
                flat.optimizers.add(self.optimizer, self.options, self.host)
                flat.optimizers.after_thaw = _rebuild_optimizers
        self.flats = flats

    def _groups_changed(self) -> bool:
        """Whether a user has changed the parameters in the groups."""
        groups = self.optimizer.param_groups
        return len(groups) != len(self.outside) or any(
            len(group["params"]) != len(params) or not all(map(operator.is_, group["params"], params))
            for group, params in zip(groups, self.outside, strict=True)
        )

    def _others_were_wrapped(self) -> bool:
        """Whether a model with some of the parameters was wrapped since the last check."""
        before, self._num_wrapped = self._num_wrapped, _num_wrapped
        return before != _num_wrapped and _flats_of(self.optimizer) != self.flats

    def _list_inside(self) -> None:
        """Sets, by group, the optimizer's parameters in step(): first unchanged parameters in their order, then the
        shards."""
        self.inside = [[p for p in params if id(p) not in self._place_by_id] for params in self.outside]
        shards = [entry for entry in self.entries if not entry.is_own]
        for entry in shards:
            self.inside[entry.group].append(entry.param)
        self._shards = {id(entry.param) for entry in shards}

    def _pieces(self, bucket: Bucket, group_of: dict[int, int]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        owners = [group_of.get(id(p), -1) for p in bucket.params]
        if self.elementwise:
            yield from bucket.runs(owners)
            return
        for i, start, end in self._tensors(bucket, bucket.stage):
            if owners[i] >= 0:
                yield owners[i], start, end, (i,)

    def _tensors(self, bucket: Bucket, stage: int) -> Iterator[tuple[int, int, int]]:
        """Yields the segments that lie on this rank at a stage."""
        for fragment in bucket.layout.fragments(*bucket.layout.owned_range(bucket.ranks.rank, stage), empty=True):
            segment = bucket.layout.segments[fragment.segment]
            if fragment.numel != segment.numel:
                raise UnsupportedError(
                    f"optimizer: rank {bucket.ranks.rank} got {type(self.optimizer).__name__}, which needs whole "
                    f"tensors, but has only a part of {segment.name}; pass atom='tensor' to shard or fully_shard"
                )
            yield fragment.segment, segment.offset, segment.end

    def refuse_stage(self, call: str, stage: int) -> None:
        """Raises if the optimizer cannot move to a stage."""
        refuse_unusable(self.optimizer, call, self.flat.ranks.rank, stage)
        if not self.elementwise:
            for bucket in self.parts:
                for _ in self._tensors(bucket, stage):
                    pass

    def _entry(self, bucket: Bucket, group: int, start: int, end: int, segments: tuple[int, ...]) -> StepParameter:
        values = bucket.master[start - bucket.start : end - bucket.start]
        if self.elementwise:
            param = nn.Parameter(values)
        else:
            first, values = bucket.params[segments[0]], bucket.layout.segments[segments[0]].view(values)
            own = bucket.stage == 0 and not bucket.gradient.exposes_sharded
            param = first if own else _like(first, values)
        return StepParameter(bucket, group, start, end, segments, param, values, values.data_ptr())

    def separate(self, kind: Callable[[Bucket, int], Hashable]) -> None:
        """Splits entries where neighbouring segments differ in ``kind``, such as with and without a gradient. Each
        part then has its own step count, and a part without a gradient is left out of a step."""
        entries: list[StepParameter] = []
        for entry in self.entries:
            stretches = [[*some] for _, some in groupby(entry.segments, partial(kind, entry.bucket))]
            entries += [entry] if len(stretches) < 2 else self._cut(entry, stretches)
        if len(entries) > len(self.entries):
            self.entries = entries
            self._list_inside()

    def _cut(self, entry: StepParameter, stretches: list[list[int]]) -> list[StepParameter]:
        starts = [entry.start, *(entry.bucket.layout.segments[some[0]].offset for some in stretches[1:])]
        state = self.state.pop(entry.param, {})
        parts = []
        for some, start, end in zip(stretches, starts, [*starts[1:], entry.end], strict=True):
            piece = slice(start - entry.start, end - entry.start)
            part = self._entry(entry.bucket, entry.group, start, end, tuple(some))
            if state:
                self.state[part.param] = {key: _cut_state(v, entry.param, piece) for key, v in state.items()}
            parts.append(part)
        return parts

    # ---- between two steps ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Handles what changed since the last step: a step that raised, new parameters, newly assigned state."""
        self._recover()
        if self._groups_changed() or self._others_were_wrapped():
            self.rebuild()

    def _recover(self) -> None:
        """After a step that raised, copies the values that the step has changed to the model, as in plain torch."""
        if self._in_step:
            self.after_step()
        self.adopt_state()

    def rebuild(self, states: dict[Any, State] | None = None) -> None:
        """Finds the parameters again after a change of the optimizer's groups or of the models' buckets.

        Args:
            states: the result of `take_state` before that change; None: the buckets are unchanged, so `take_state` is
                called here.
        """
        for flat in _flats_of(self.optimizer):
            refuse_unusable(self.optimizer, "step", flat.ranks.rank, flat.stage)
        states = self.take_state() if states is None else states
        self._find_params("step")
        self._register()
        for p, state in states.items():
            place = self.sharded_place(p)
            if place is None:
                self.state[p] = state
            else:
                self._keep_unsharded(place, state)
        for p in [p for p in self.state if id(p) in self._place_by_id]:  # parameters whose model was wrapped since
            self._keep_unsharded(self._place_by_id[id(p)], self.state.pop(p))
        self.expose_state()
        self.close()

    def _keep_unsharded(self, place: tuple[Bucket, int], state: State) -> None:
        """Keeps a parameter's unsharded state until the next step."""
        bucket, i = place
        part = self.parts[bucket]
        part.unsharded = {} if part.unsharded is None else part.unsharded
        part.unsharded[i] = state

    def take_state(self) -> dict[Any, State]:
        """Takes the unsharded state of the models' parameters out, to be passed to `rebuild`; a collective."""
        self._recover()
        states: dict[Any, State] = {}
        for bucket in self.parts:
            states |= {bucket.params[i]: state for i, state in self.unsharded_state(bucket).items() if state}
        for part in self.parts.values():
            part.unsharded = None
        for entry in self.entries:
            if entry.is_own and entry.param in self.state:
                states[entry.param] = self.state.pop(entry.param)
        return states

    def detach(self) -> None:
        """Makes the optimizer a plain one with unsharded state, before its models are unwrapped; a collective."""
        states = self.take_state()
        for flat in self.flats:
            flat.optimizers.remove(self.optimizer, self.host)
        settings = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for bucket, part in self.parts.items():
            for p in (bucket.params[i] for i in part.segments):
                if p in states:
                    states[p] = _in_type_of(bucket, states[p], settings[id(p)])
        self.optimizer.state = self._with_others(states)
        for handle in self._hooks:
            handle.remove()
        for name in ("register_step_pre_hook", "zero_grad", "_ringcomm"):
            delattr(self.optimizer, name)
        _checked.pop(self.optimizer, None)
        self.flats, self.entries, self.inside = [], [], []  # frees the memory now
        self.parts, self._place_by_id = {}, {}
        self.state = defaultdict(dict)
        self.host = HostGradients()

    # ---- state ----------------------------------------------------------------------------------------------------

    def sharded_place(self, p: Any) -> tuple[Bucket, int] | None:
        """Returns the bucket of a parameter whose state is sharded, and its index there; None for any other key."""
        return self._place_by_id.get(id(p))

    def _known(self) -> set[int]:
        """Returns the ids of the keys of `state` that are parameters."""
        return {*map(id, chain.from_iterable(self.outside)), *self._shards}

    def has_state(self, key: Any) -> bool:
        """Whether `optimizer.state` has a key; the answer is the same on every rank."""
        place = self.sharded_place(key)
        return self._has_state(*place) if place is not None else id(key) not in self._shards and key in self.state

    def parameters_with_state(self) -> Iterator[Any]:
        """Yields the keys of the optimizer's state as the model's parameters; known on every rank without
        communication."""
        yield from filter(self.has_state, chain.from_iterable(self.outside))
        known = self._known()
        yield from [key for key in self.state if id(key) not in known]

    def _has_state(self, bucket: Bucket, i: int) -> bool:
        part = self.parts[bucket]
        return i in part.stepped if part.unsharded is None else bool(part.unsharded.get(i))

    def unsharded_state(self, bucket: Bucket) -> dict[int, State]:
        """Returns the unsharded state of a bucket's parameters; writes into it are kept. A collective at stages 1 to
        3."""
        part = self.parts[bucket]
        if part.unsharded is None:
            found = self._gathered(bucket)
            part.unsharded = {i: found.of_parameter(i, copy=False) for i in sorted(found.present)}
            for entry in self.entries:
                if entry.bucket is bucket and not entry.is_own:
                    self.state.pop(entry.param, None)
        return part.unsharded

    def _gathered(self, bucket: Bucket) -> OptimizerState:
        stepped = self.parts[bucket].stepped
        if not stepped:
            return OptimizerState(bucket)
        entries = [entry for entry in self.entries if entry.bucket is bucket and not entry.is_own]
        pieces = [(entry, self.state.get(entry.param, {})) for entry in entries]
        with bucket.ranks.explaining(bucket.stage):
            return OptimizerState.gathered(bucket, pieces, stepped)

    def clear_state(self) -> None:
        """Discards all state; not a collective."""
        self.state.clear()
        for part in self.parts.values():
            part.stepped, part.unsharded = set(), None

    def close(self) -> None:
        """Converts state that is kept by parameter to shards: every rank keeps its part."""
        for bucket, part in self.parts.items():
            if part.unsharded is not None:
                states = {i: state for i, state in part.unsharded.items() if state}
                self._replace_state(bucket, OptimizerState.of(bucket, states, bucket.ranks.rank, checked=False))
                part.unsharded = None

    def _replace_state(self, bucket: Bucket, unsharded: OptimizerState) -> None:
        self.parts[bucket].stepped = set(unsharded.present)
        self.separate(lambda other, i: other is not bucket or unsharded.kind(i))
        for entry in self.entries:
            if entry.bucket is bucket and not entry.is_own:
                self.state.pop(entry.param, None)
                state = unsharded.piece(entry.start, entry.end, entry.segments, entry.param)
                if state:
                    self.state[entry.param] = state

    def expose_state(self) -> None:
        """Sets `optimizer.state` to what users see between two steps."""
        self.optimizer.state = self._state_view if self._place_by_id else self.state

    def adopt_state(self) -> None:
        """Takes over a mapping by parameter that was assigned to `optimizer.state`, for example by
        load_state_dict()."""
        found = self.optimizer.state
        if found is self._state_view or (found is self.state and not self._place_by_id):
            return
        if found is not self.state:
            self.state = defaultdict(dict)
            for part in self.parts.values():
                part.unsharded = {}
            widened: list[tuple[tuple[Bucket, int], str]] = []
            for key, value in found.items():
                place = self.sharded_place(key)
                if place is None:
                    self.state[key] = value
                else:
                    kept = _in_master_type(place[0], value)
                    if isinstance(kept, dict):
                        widened += [(place, name) for name in kept if kept[name] is not value[name]]
                    self._keep_unsharded(place, kept)
            if widened:
                (bucket, i), of_state = widened[0]
                warnings.warn(
                    f"optimizer: rank {bucket.ranks.rank} got {of_state} of {bucket.names[i]} in "
                    f"{bucket.types.compute}, expected {bucket.types.master}: torch's load_state_dict rounds state to "
                    "the parameter's type while ringcomm does not know the optimizer; pass it to ringcomm.shard before "
                    "it loads its state",
                    stacklevel=user_stacklevel(),
                )
            for part in self.parts.values():
                part.unsharded = part.unsharded if part.unsharded or part.stepped else None
        self.expose_state()

    def before_state_dict(self) -> None:
        """Puts the unsharded state into the optimizer, so that torch makes the usual state dict of it; a collective."""
        self.refresh()
        states: dict[Any, Any] = {}
        for bucket, part in self.parts.items():
            found = self._gathered(bucket) if part.unsharded is None else None
            for i in sorted(part.segments):
                if id(bucket.params[i]) in self._place_by_id:
                    state = (part.unsharded or {}).get(i) if found is None else found.of_parameter(i)
                    if state:
                        states[bucket.params[i]] = state
        self.optimizer.state = self._with_others(states)

    def _with_others(self, states: dict[Any, State]) -> defaultdict[Any, Any]:
        """Returns the unsharded state of sharded parameters together with all other state, in the groups' order."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        for p in chain.from_iterable(self.outside):
            if p in states or (p in self.state and self.sharded_place(p) is None):
                found[p] = states[p] if p in states else self.state[p]
        known = self._known()
        found.update({key: value for key, value in self.state.items() if id(key) not in known})
        return found

    def before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Checks the state of sharded parameters, and takes it out of the state dict, because torch would cast it to
        the model's type."""
        self.refresh()
        groups = state_dict["param_groups"]
        expected, got = [len(params) for params in self.outside], [len(group["params"]) for group in groups]
        if expected != got:
            raise InvalidArgumentError(
                f"load_state_dict: rank {self.flat.ranks.rank} got an optimizer's state for groups of {got} "
                f"parameters, expected {expected}; load the state of the same model and groups"
            )
        found: dict[Bucket, dict[int, State]] = {bucket: {} for bucket in self.parts}
        rest = dict(state_dict["state"])
        for group, params in zip(groups, self.outside, strict=True):
            for index, p in zip(group["params"], params, strict=True):
                place = self.sharded_place(p)
                state = rest.pop(index, None) if place is not None else None
                if place is not None and state:
                    bucket, i = place
                    on_device = bool(group.get("capturable") or group.get("fused"))
                    found[bucket][i] = _loaded(bucket, state, on_device)
        known = _is_torchs(type(self.optimizer))
        for bucket, part in self.parts.items():
            part.loading = OptimizerState.of(bucket, found[bucket], bucket.ranks.rank, checked=known)
        return {**state_dict, "state": rest}

    def after_load(self) -> None:
        """Adds the state of the sharded parameters after torch has loaded the rest."""
        self.adopt_state()
        for bucket, part in self.parts.items():
            loaded, part.loading, part.unsharded = part.loading, None, None
            if loaded is not None:
                self._replace_state(bucket, loaded)
        self._enter()  # with the parameters of step(), because some optimizers convert state of older versions
        try:
            self.optimizer.__setstate__({"state": self.state, "param_groups": self.optimizer.param_groups})
        finally:
            self._leave()

    # ---- a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside the block, the optimizer has the parameters of step(), with gradients unless the user has set them
        to None."""
        self._adopt_user_changes()
        self._begin_work()
        try:
            yield
        finally:
            self._leave()

    def _adopt_user_changes(self) -> None:
        """Takes over what users have changed since the last step."""
        self.refresh()
        adopt_user_grads([bucket.gradient for bucket in self.parts], "step")

    def _begin_work(self) -> None:
        self.close()
        adopt_writes(self.parts, "step")
        if any(0 < len(bucket.gradient.with_mean) < len(bucket.params) for bucket in self.parts):
            self.separate(lambda bucket, i: i in bucket.gradient.with_mean)
        self.host.refresh()
        self.host.wait()
        self._enter()

    def _enter(self) -> None:
        """Replaces the model's parameters by the shards."""
        self._in_step = True
        self._forget_unsharded_gradients()
        groups = self.optimizer.param_groups
        blocks: dict[int, list[nn.Parameter]] = {}
        for entry in self.entries:
            if entry.is_own:
                continue
            has = entry.bucket.gradient.has_reduced and not entry.bucket.gradient.with_mean.isdisjoint(entry.segments)
            gradient = self._gradient_of(entry) if has else None
            if cache_blocks.gains(entry.values, groups[entry.group]) and self.elementwise:
                entry.blocks = entry.blocks or cache_blocks.CacheBlocks(entry.values)
                entry.blocks.enter(entry.param, gradient, self.state)
                blocks[id(entry.param)] = entry.blocks.params
            else:
                entry.blocks, entry.param.grad = None, gradient
        for group, params in zip(groups, self.inside, strict=True):
            group["params"][:] = [each for p in params for each in blocks.get(id(p), (p,))]
        self.optimizer.state = self.state

    def _gradient_of(self, entry: StepParameter) -> torch.Tensor:
        """Returns an entry's part of the reduced gradient."""
        bucket, host = entry.bucket, self.host.copy_of(entry.bucket)
        reduced = bucket.gradient.reduced if host is None else host
        start = bucket.start
        part = reduced[entry.start - start : entry.end - start]
        return in_shape_of(entry.values, part, bucket.layout.segments[entry.segments[0]])

    def _leave(self) -> None:
        """Puts the model's parameters back, with the values that step() has set."""
        self._in_step = False
        for group, params in zip(self.optimizer.param_groups, self.outside, strict=True):
            group["params"][:] = params
        self._forget_unsharded_gradients()
        if self.optimizer.state is not self.state:  # step() has assigned another mapping
            self.state = defaultdict(dict, self.optimizer.state)
        for entry in self.entries:
            if entry.blocks is not None:
                entry.blocks.leave(entry.param, self.state)
        moved = [entry for entry in self.entries if entry.param.data_ptr() != entry.address]
        for entry in moved:
            with torch.no_grad():
                entry.values.copy_(entry.param)
            entry.param.data = entry.values
        for entry in self.entries:
            if not entry.is_own:
                entry.param.grad = None
        self.expose_state()

    def _forget_unsharded_gradients(self) -> None:
        """Drops cached unsharded gradients, because a step may change the gradients that it gets."""
        for flat in self.flats:
            flat.ranks.read = None

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begins the step. With a closure, the step begins after each call of the closure, because the closure needs
        the model's parameters."""
        if self._in_step and _is_nested(self.optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin_step()
            return None

        def with_the_model() -> Any:
            if self._in_step:
                self.after_step()
            loss = closure()
            self._begin_step()
            return loss

        return args[:1], {**kwargs, "closure": with_the_model}

    def _begin_step(self) -> None:
        self._adopt_user_changes()
        self._refuse_unreduced()
        if any(flat.optimizers.options_differ for flat in self.flats):
            for flat in self.flats:
                lines = [line for sharded in sharded_optimizers(flat) for line in sharded.options.lines()]
                flat.ranks.agree("step", lines, SAME_OPTIONS)
                flat.optimizers.options_differ = False
        for flat in self.flats:
            flat.optimizers.stepped.add(self.options)
            if flat.ranks.joining is not None and flat.ranks.joining.module is flat.module:
                flat.ranks.announce("step", flat.optimizers.number_of(self.optimizer), more=self._options())
                sync_grads_from_root([bucket.gradient for bucket in flat.order])
        self._begin_work()
        self.options.steps += 1
        for bucket, part in self.parts.items():
            if bucket.gradient.has_reduced:
                part.stepped |= bucket.gradient.with_mean & part.segments

    def end_step(self) -> None:
        """Called after each step() of the optimizer."""
        if not _is_nested(self.optimizer):
            self.after_step()

    def after_step(self) -> None:
        """Copies the result of the step to the model."""
        self._leave()
        works = []
        for bucket, part in self.parts.items():
            changed = bucket.gradient.with_mean & part.segments if bucket.gradient.has_reduced else set()
            works.append((part.flat, bucket.sync_params_from_master(changed)))
            part.flat.arrivals.expect_writes(bucket, changed)
        for flat, work in works:
            flat.timed(work.wait)

    def _refuse_unreduced(self) -> None:
        """Raises for gradients that were not reduced, because the step would ignore them."""
        for bucket, part in self.parts.items():
            ranks, gradient = bucket.ranks, bucket.gradient
            # On a rank that has joined, such gradients are added to the other ranks' next reduction.
            if ranks.joining is not None and ranks.joining.shadowing:
                continue
            if gradient.has_reduced and not gradient.has_local:
                continue
            put = [i for i in part.segments if bucket.params[i].grad is not None]
            if put:
                _refuse_in_backward(part.flat)
                raise InvalidArgumentError(
                    f"step: rank {ranks.rank} got a gradient of {bucket.names[min(put)]} that was not reduced, "
                    "expected the mean over all ranks; call the last backward() before a step outside of no_sync, or "
                    "assign the mean of every gradient, p.grad = mean, on every rank"
                )

    # ---- options --------------------------------------------------------------------------------------------------

    def _options(self) -> list[dict[str, Any]]:
        """Returns the hyperparameters of every group."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    # ---- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients; with ``set_to_none=False`` sets them to zero, as in torch."""
        self.refresh()
        zero_grad = type(self.optimizer).zero_grad
        torchs = zero_grad is torch.optim.Optimizer.zero_grad  # it accesses nothing but `p.grad`
        with torch._C.DisableTorchFunctionSubclass() if torchs else nullcontext():
            zero_grad(self.optimizer, set_to_none=set_to_none)
        for bucket in self.parts:
            bucket.gradient.reconcile()


class UnshardedStates(defaultdict[Any, Any]):
    """`optimizer.state` of a sharded optimizer between two steps: maps the model's parameters to unsharded values.

    Every rank knows which parameters have state. Their values are gathered on access, which is a collective at stages 1
    to 3. Writes into them take effect from the next step on; every rank must write the same. All other keys are the
    optimizer's own.
    """

    def __init__(self, sharded: ShardedOptimizer) -> None:
        super().__init__(dict)
        # Weak, because the sharded optimizer references this object: a cycle would delay freeing it.
        self._weak = weakref.ref(sharded)

    @property
    def _sharded(self) -> ShardedOptimizer:
        found = self._weak()
        assert found is not None
        return found

    def _mapping_with(self, key: Any) -> tuple[dict[Any, Any], Any]:
        """Returns the mapping that has the state of a key, and the corresponding key in that mapping."""
        place = self._sharded.sharded_place(key)
        if place is None:
            return self._sharded.state, key
        bucket, i = place
        return self._sharded.unsharded_state(bucket), i

    def __getitem__(self, key: Any) -> Any:
        states, at = self._mapping_with(key)
        return states.setdefault(at, {})

    def __setitem__(self, key: Any, value: Any) -> None:
        states, at = self._mapping_with(key)
        states[at] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        states, at = self._mapping_with(key)
        del states[at]

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._sharded.parameters_with_state()])

    def __len__(self) -> int:
        return sum(1 for _ in self._sharded.parameters_with_state())

    def __contains__(self, key: Any) -> bool:
        return self._sharded.has_state(key)

    # The methods of Mapping, because dict's would bypass `__getitem__`; each value is a collective.
    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]
    setdefault, popitem = MutableMapping.setdefault, MutableMapping.popitem
    update = MutableMapping.update

    def clear(self) -> None:
        """Discards all state."""
        self._sharded.clear_state()

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the state of a key; a collective if there is state."""
        if key in self:
            return self[key]
        return default

    def pop(self, key: Any, *default: Any) -> Any:
        """Removes and returns the state of a key; a collective if there is state."""
        if key not in self and default:
            return default[0]
        found = self.get(key)
        if key in self or not default:  # reading the value may have shown that the step left no state
            del self[key]
            return found
        return default[0]

    def copy(self) -> Any:
        """Returns a plain dict."""
        return defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"UnshardedStates of {len(self)} parameters"


def _hook(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> list[Any]:
    """Connects an optimizer to its `ShardedOptimizer`, and returns the hooks' handles."""
    before = optimizer.register_step_pre_hook(eager(lambda _, args, kwargs: sharded.before_step(args, kwargs)))
    after = optimizer.register_step_post_hook(eager(lambda _, args, kwargs: sharded.end_step()))
    # Ours runs first, so that other hooks see the model's parameters.
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
    handles = [
        before,
        after,
        optimizer.register_state_dict_pre_hook(lambda _: sharded.before_state_dict()),
        optimizer.register_state_dict_post_hook(lambda _, state: sharded.expose_state(), prepend=True),
        optimizer.register_load_state_dict_pre_hook(lambda _, state: sharded.before_load(state)),
        optimizer.register_load_state_dict_post_hook(lambda _: sharded.after_load(), prepend=True),
    ]
    # Weak, because a reference cycle would keep the optimizer alive until garbage collection.
    here = weakref.ref(optimizer)
    optimizer.register_step_pre_hook = partial(_register_before, here, before.id)
    optimizer.zero_grad = partial(_zero_grad, here)
    return handles


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hooks of an optimizer's step are called inside another step of the same optimizer: torch makes step()
    of a subclass and of its base class both call hooks, and one may call the other."""
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        steps += frame.f_code is _CALLS_HOOKS and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps == 2


def _register_before(here: weakref.ref[torch.optim.Optimizer], number: int, hook: Callable[..., Any]) -> Any:
    """Registers other pre-step hooks before ours, so that they see the model's parameters.

    Args:
        number: the number of our hook.
    """
    optimizer = here()
    assert optimizer is not None
    handle = type(optimizer).register_step_pre_hook(optimizer, hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(number)
    return handle


@eager
def _zero_grad(here: weakref.ref[Any], set_to_none: bool = True) -> None:
    """Discards the gradients."""
    optimizer = here()
    assert optimizer is not None
    optimizer._ringcomm.zero_grad(set_to_none)


def _place_of(p: Any) -> Place | None:
    """Returns the place of a wrapped model's trained parameter."""
    place = place_of(p)
    return None if place is None or not place.bucket.trainable else place


def _like(p: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Returns a parameter with these values and with the attributes that the user set on ``p``."""
    param = nn.Parameter(values)
    kept = {k: v for k, v in vars(p).items() if not k.startswith("_ringcomm")}
    param.__dict__.update(kept)
    return param


def _cut_state(value: Any, param: torch.Tensor, piece: slice) -> Any:
    if not torch.is_tensor(value):
        return value
    return (value[piece] if value.shape == param.shape else value).clone()


def _in_master_type(bucket: Bucket, state: Any) -> Any:
    """Casts a parameter's state, which torch has cast to the parameter's type, to the master weights' type."""
    if not isinstance(state, dict):
        return state
    narrow, wide = bucket.types.compute, bucket.types.master
    return {
        key: value.to(wide) if key != "step" and torch.is_tensor(value) and value.dtype == narrow else value
        for key, value in state.items()
    }


def _in_type_of(bucket: Bucket, state: State, settings: dict[str, Any]) -> State:
    """Returns a parameter's state for a plain optimizer: on the parameter's device, and in the parameter's type if
    the master weights have another."""
    on_host = not (settings.get("capturable") or settings.get("fused"))
    wide, own = bucket.types.master, bucket.types.module
    return {
        key: value
        if not torch.is_tensor(value) or (key == "step" and on_host)
        else value.to(bucket.device, own if value.dtype == wide and key != "step" else value.dtype)
        for key, value in state.items()
    }


def _loaded(bucket: Bucket, state: State, on_device: bool) -> State:
    """Returns a parameter's state as torch would load it if the parameter were the master weight. Values that are
    not floats keep their type, because they may be quantised."""
    device = bucket.master.device

    def one(key: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: one(k, v) for k, v in value.items()}
        if not torch.is_tensor(value):
            return copy.deepcopy(value)
        if key == "step":
            return value.to(dtype=torch.float32, device=device) if on_device else value.clone()
        floats = type(value) is torch.Tensor and value.is_floating_point()
        return value.to(device, bucket.types.master if floats else value.dtype)

    return {key: one(key, value) for key, value in state.items()}
