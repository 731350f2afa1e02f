"""The user's own optimizer over a sharded model: it shows the model's parameters, and works on shards inside of step().

Between two steps `optimizer.param_groups` holds what the user has passed. For the time of step() this rank's part of
the buckets takes the place of the sharded model's parameters:

    element-wise optimizers     one long parameter for each run of segments of one parameter group
    other optimizers, stage 0   the model's own parameters, where these are the master weights
    other optimizers            each parameter that lies on this rank, in its shape

The state of shards is kept here. `optimizer.state` answers by the model's parameters with whole values, and
`state_dict()` is the ordinary one.
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringcomm.data_parallel.bucket import Bucket
from ringcomm.data_parallel.offload import HostGradients
from ringcomm.data_parallel.optimizer_state import BucketState, State, WholeStates
from ringcomm.data_parallel.options import SAME_OPTIONS, Options, SteppedOptions
from ringcomm.data_parallel.place import place_of
from ringcomm.data_parallel.sharded_model import ShardedModel
from ringcomm.errors import InvalidArgumentError, UnsupportedError

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_REFUSED = {
    "SparseAdam": "which takes sparse gradients",
    "ZeroRedundancyOptimizer": "which deals the parameters out by itself",
}
_SUM = "which adds up over all parameters in step()"
_REFUSED_FROM_STAGE_1 = {
    "LBFGS": "whose line search needs all parameters in one place",
    "Prodigy": _SUM,  # and all whose name begins with it
    "DAdapt": _SUM,
}
_CLIPS_BY = {  # options that make a class of this name divide by the norm of all gradients
    "Lamb": ("max_grad_norm", "pre_norm"),
    "LAMB": ("max_grad_norm", "pre_norm"),
    "FusedLAMB": ("max_grad_norm",),
    "Adan": ("max_grad_norm",),
}
_watching: list[Any] = []  # the handle of the hook on every optimizer's step, once there is one
_watches = 0  # models that were wrapped: what an optimizer was looked at after need not be looked at again
_told: set[type] = set()  # classes of optimizers that were warned of
_lock = threading.Lock()


# ---- which optimizer can be sharded ----------------------------------------------------------------------------------


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every element is updated from its own gradient and state alone, so that shards may cut tensors."""
    owner = _steps_by(optimizer)
    return _is_torchs(owner) and owner.__name__ in _ELEMENTWISE


def _steps_by(optimizer: torch.optim.Optimizer) -> type:
    """The class that has the optimizer's step()."""
    return next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))


def _is_torchs(cls: type) -> bool:
    return f"{cls.__module__}.".startswith("torch.optim.")


def refuse_unusable(optimizer: Any, call: str, rank: int, stage: int = 1) -> None:
    """Raises for what no shard can serve at a stage."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer"
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
            "expected state with values; make this optimizer after ringcomm.shard(model, stage=...), and pass it to "
            "ringcomm.shard(model, optimizer)"
        )
    why = _why_only_whole(optimizer)
    if stage and why is not None:
        raise UnsupportedError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, {why}, and stage={stage}, where a rank has only a "
            "part of them, expected stage 0; shard the model with stage=0, or use another optimizer"
        )


def refuse_foreign(optimizer: torch.optim.Optimizer, module: nn.Module, call: str, rank: int) -> None:
    """Raises for an optimizer that has nothing of a module; a frozen stage of a pipeline has one over nothing."""
    known, has = {id(p) for p in module.parameters()}, [p for each in optimizer.param_groups for p in each["params"]]
    trains = has or any(p.requires_grad for p in module.parameters())
    if trains and not any(id(p) in known for p in has):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got an optimizer with none of the module's parameters, expected some of them; make "
            "the optimizer from module.parameters()"
        )


def _why_only_whole(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer needs all parameters on every rank; None: it does not, as far as its class tells."""
    for cls in type(optimizer).__mro__:
        for name, why in _REFUSED_FROM_STAGE_1.items():
            if cls.__name__.startswith(name):
                return why
        for option in _CLIPS_BY.get(cls.__name__, ()):
            if any(group.get(option) for group in optimizer.param_groups):
                return f"which clips by the norm of all gradients in step() ({option})"
    return None


def _tell(optimizer: torch.optim.Optimizer) -> None:
    """Warns once of a class that nobody here knows."""
    kind = type(optimizer)
    with _lock:
        if _is_torchs(_steps_by(optimizer)) or kind in _told:
            return
        _told.add(kind)
    warnings.warn(
        f"ringcomm.shard: step() of {kind.__name__} sees only the parameters that lie on this rank from stage 1 on; "
        "if it adds up over all parameters, such as for a global norm, use stage 0",
        stacklevel=2,
    )


# ---- which optimizer is sharded --------------------------------------------------------------------------------------


def sharded_optimizer_of(optimizer: Any, call: str) -> ShardedOptimizer | None:
    """What an optimizer is attached to; one over parameters that it cannot step by itself is attached now. None: to
    nothing."""
    found: ShardedOptimizer | None = getattr(optimizer, "_ringcomm", None)
    if found is not None:
        return found
    flat = next((flat for flat in _flats_of(optimizer.param_groups) if _needs_shards(flat)), None)
    if flat is None:
        return None
    refuse_unusable(optimizer, call, flat.ranks.rank, flat.stage)
    return ShardedOptimizer(optimizer)


def states_of(optimizer: torch.optim.Optimizer) -> list[State]:
    """The states that this rank holds."""
    attached: ShardedOptimizer | None = getattr(optimizer, "_ringcomm", None)
    if attached is None:
        return [state for state in optimizer.state.values() if isinstance(state, dict)]
    whole = [state for states in attached._whole.values() for state in states.values()]
    return [state for state in attached.state.values() if isinstance(state, dict)] + whole


def attach(optimizer: torch.optim.Optimizer, flat: ShardedModel, call: str) -> None:
    """Attaches an optimizer to a model, or one that is attached to others to this one too.

    Raises:  InvalidArgumentError: it has none of the model's parameters. UnsupportedError: no shard can serve it.
    """
    refuse_unusable(optimizer, call, flat.ranks.rank, flat.stage)
    refuse_foreign(optimizer, flat.module, call, flat.ranks.rank)
    attached: ShardedOptimizer | None = getattr(optimizer, "_ringcomm", None)
    if attached is None:
        ShardedOptimizer(optimizer)
    elif flat in attached.flats:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer that is sharded already, expected a plain one; pass it "
            "once"
        )
    else:
        attached.rebuild()


def watch_optimizers() -> None:
    """From now on an optimizer over parameters that it cannot step by itself is attached at its first step."""
    global _watches
    with _lock:
        _watches += 1
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer that is not attached is looked at once; its options are compared at every step."""
    del args, kwargs
    now = (_watches, len(optimizer.param_groups))
    if optimizer.__dict__.get("_ringcomm_seen") != now:
        if sharded_optimizer_of(optimizer, "step") is None:
            flats = _flats_of(optimizer.param_groups)
            optimizer._ringcomm_options = SteppedOptions(optimizer, flats) if flats else None
        optimizer._ringcomm_seen = now
    options: SteppedOptions | None = optimizer.__dict__.get("_ringcomm_options")
    if options is not None:
        options.before_step()


def _flats_of(param_groups: list[dict[str, Any]]) -> list[ShardedModel]:
    """The models that have some of the parameters."""
    places = (place_of(p) for group in param_groups for p in group["params"])
    return [*dict.fromkeys(place.flat for place in places if place is not None)]


def _needs_shards(flat: ShardedModel) -> bool:
    """Whether an optimizer cannot step the model's own parameters."""
    return flat.stage > 0 or any(bucket.separate for bucket in flat.buckets)


# ---- an optimizer that is sharded ------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What stands in the optimizer during step() for some of the model's parameters.

    Attributes:
        values, address: the part of the master weights that ``param`` is, and where it lies.
    """

    bucket: Bucket
    start: int  # in the bucket's buffer
    end: int
    segments: tuple[int, ...]
    param: nn.Parameter
    values: torch.Tensor
    address: int

    @property
    def is_own(self) -> bool:
        """Whether it is the model's own parameter."""
        return self.param is self.bucket.params[self.segments[0]]


class ShardedOptimizer:
    """An optimizer over parameters of wrapped models, and others that stay as they are.

    Attributes:
        flats: the wrapped models.
        places: by group of the optimizer, the wrapped models' parameters.
        plain: by group, those that the optimizer steps as they are, by their place among the group's: frozen ones, and
            those of no wrapped model.
        entries: what stands for ``places`` during step().
        inside: by group, the optimizer's parameters during step().
        state: the optimizer's state during step().
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.elementwise = weakref.ref(optimizer), is_elementwise(optimizer)
        self.flats: list[ShardedModel] = []
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.host = HostGradients()
        self._stepped: dict[Bucket, set[int]] = {}  # who ever had a gradient in a step
        self._whole: dict[Bucket, dict[int, State]] = {}  # state that is by parameter now, until the next step
        self._seen = WholeStates(self)  # `optimizer.state` between two steps
        self._working = False
        self._loading: dict[Bucket, BucketState] = {}
        self._watches = _watches
        self.options = Options(optimizer)
        optimizer.__dict__.pop("_ringcomm_options", None)
        self.places: list[list[tuple[Bucket, int]]] = []
        self.entries: list[Entry] = []
        self.inside: list[list[nn.Parameter]] = []
        self._find("shard")
        self._place()
        self._join()
        self.adopt_state()
        self.close()
        optimizer._ringcomm = self
        self._hooks = _Hooks(self)

    # ---- parameters -----------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """It holds this, so that both go when users drop it."""
        found = self._optimizer()
        assert found is not None
        return found

    @property
    def flat(self) -> ShardedModel:
        """The first of the wrapped models."""
        return self.flats[0]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets with parameters of the optimizer."""
        return list(self._mine)

    def _find(self, call: str) -> None:
        """Looks up where the optimizer's parameters are."""
        groups = self.optimizer.param_groups
        for flat in _flats_of(groups):
            refuse_unusable(self.optimizer, call, flat.ranks.rank, flat.stage)
        self.outside = [list(group["params"]) for group in groups]
        self._ids = self._ids_now()
        homes = [[_place_of(p) for p in group["params"]] for group in groups]
        self.places = [[place for place in each if place is not None] for each in homes]
        self.plain = [
            {k: p for k, (p, place) in enumerate(zip(group["params"], each, strict=True)) if place is None}
            for group, each in zip(groups, homes, strict=True)
        ]
        self.group_of = {id(bucket.params[i]): n for n, each in enumerate(self.places) for bucket, i in each}
        self._mine: dict[Bucket, set[int]] = {}
        for bucket, i in chain.from_iterable(self.places):
            self._mine.setdefault(bucket, set()).add(i)
        if any(bucket.stage for bucket in self._mine):
            _tell(self.optimizer)

    def _join(self) -> None:
        """The wrapped models hear of the optimizer."""
        flats = _flats_of(self.optimizer.param_groups)
        for flat in self.flats:
            if flat not in flats:
                flat.remove_optimizer(self)
        for flat in flats:
            if flat not in self.flats:
                flat.add_optimizer(self)
        self.flats = flats

    def _ids_now(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self.optimizer.param_groups]

    def _others_were_wrapped(self) -> bool:
        """Whether a model was wrapped since that has some of the parameters."""
        before, self._watches = self._watches, _watches
        return before != _watches and _flats_of(self.optimizer.param_groups) != self.flats

    def _place(self) -> None:
        """Makes the entries for the buckets' stage, without state."""
        self._stepped = {bucket: set() for bucket in self._mine}
        self.host.place(self.buckets)
        self.entries = [
            self._entry(bucket, start, end, segments)
            for bucket in self._mine
            for _, start, end, segments in self._pieces(bucket)
        ]
        self._line_up()

    def _line_up(self) -> None:
        """By group of the optimizer, what it has in step(): what stays in its order, then the shards."""
        own = {id(entry.param) for entry in self.entries if entry.is_own}
        self.inside = [
            [p for k, p in enumerate(params) if k in plain or id(p) in own]
            for params, plain in zip(self.outside, self.plain, strict=True)
        ]
        for entry in self.entries:
            if not entry.is_own:
                self.inside[self.group_of[id(entry.bucket.params[entry.segments[0]])]].append(entry.param)
        self._sharded = {
            id(bucket.params[i]): (bucket, i)
            for bucket, i in chain.from_iterable(self.places)
            if id(bucket.params[i]) not in own
        }
        self._shards = {id(entry.param) for entry in self.entries if not entry.is_own}

    def _pieces(self, bucket: Bucket) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        owners = [self.group_of.get(id(p), -1) for p in bucket.params]
        if self.elementwise:
            yield from bucket.runs(owners)
            return
        for i, start, end in self._tensors(bucket, bucket.stage):
            if owners[i] >= 0:
                yield owners[i], start, end, (i,)

    def _tensors(self, bucket: Bucket, stage: int) -> Iterator[tuple[int, int, int]]:
        """Segments that lie on this rank at a stage."""
        for fragment in bucket.layout.fragments(*bucket.owned(stage), empty=True):
            segment = bucket.layout.segments[fragment.segment]
            if fragment.numel != segment.numel:
                raise UnsupportedError(
                    f"optimizer: rank {bucket.ranks.rank} got {type(self.optimizer).__name__}, which looks at whole "
                    f"tensors, and a part of {segment.name}; pass atom='tensor' to shard or fully_shard"
                )
            yield fragment.segment, segment.offset, segment.end

    def refuse_stage(self, call: str, stage: int) -> None:
        """Raises where the optimizer cannot go to a stage."""
        refuse_unusable(self.optimizer, call, self.flat.ranks.rank, stage)
        if not self.elementwise:
            for bucket in self._mine:
                for _ in self._tensors(bucket, stage):
                    pass

    def _entry(self, bucket: Bucket, start: int, end: int, segments: tuple[int, ...]) -> Entry:
        values = bucket.master[start - bucket.start : end - bucket.start]
        if self.elementwise:
            param = nn.Parameter(values)
        else:
            shape, first = bucket.layout.segments[segments[0]].shape, bucket.params[segments[0]]
            values = values.view(shape)
            own = bucket.stage == 0 and not bucket.gradient.uses_placeholders
            param = first if own else _like(first, values)
        return Entry(bucket, start, end, segments, param, values, values.data_ptr())

    def separate(self, kind: Callable[[Bucket, int], Hashable]) -> None:
        """Cuts entries where neighbouring segments are of different kinds, such as with and without a gradient: each
        then has its own count of steps, and one without a gradient is left out of a step."""
        entries: list[Entry] = []
        for entry in self.entries:
            stretches = [[*some] for _, some in groupby(entry.segments, partial(kind, entry.bucket))]
            entries += [entry] if len(stretches) < 2 else self._cut(entry, stretches)
        if len(entries) > len(self.entries):
            self.entries = entries
            self._line_up()

    def _cut(self, entry: Entry, stretches: list[list[int]]) -> list[Entry]:
        starts = [entry.start, *(entry.bucket.layout.segments[some[0]].offset for some in stretches[1:])]
        state = self.state.pop(entry.param, {})
        parts = []
        for some, start, end in zip(stretches, starts, [*starts[1:], entry.end], strict=True):
            piece = slice(start - entry.start, end - entry.start)
            part = self._entry(entry.bucket, start, end, tuple(some))
            if state:
                self.state[part.param] = {key: _cut_state(v, entry.param, piece) for key, v in state.items()}
            parts.append(part)
        return parts

    # ---- between two steps ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes notice of what has happened since: a step that raised, new parameters, state that was put in."""
        self._recover()
        if self._ids != self._ids_now() or self._others_were_wrapped():
            self.rebuild()

    def _recover(self) -> None:
        """After a step that raised, the model gets what that has changed before, as in plain torch."""
        if self._working:
            self.after_step()
        self.adopt_state()

    def rebuild(self, states: dict[Any, State] | None = None) -> None:
        """Looks up the parameters anew, after a change of the optimizer's groups or of the models' buckets.

        Args:
            states: what `take_state` gave before that change; None: the buckets are the same, and it is asked now.
        """
        for flat in _flats_of(self.optimizer.param_groups):
            refuse_unusable(self.optimizer, "step", flat.ranks.rank, flat.stage)
        states = self.take_state() if states is None else states
        self._find("step")
        self._place()
        self._join()
        for p, state in states.items():
            place = self._sharded.get(id(p))
            if place is None:
                self.state[p] = state
            else:
                self._whole.setdefault(place[0], {})[place[1]] = state
        for p in [p for p in self.state if id(p) in self._sharded]:  # of a model that was wrapped since
            bucket, i = self._sharded[id(p)]
            self._whole.setdefault(bucket, {})[i] = self.state.pop(p)
        self._show_state()
        self.close()

    def take_state(self) -> dict[Any, State]:
        """The whole state of the models' parameters, to be given to `rebuild`; a collective."""
        self._recover()
        states: dict[Any, State] = {}
        for bucket in self._mine:
            states |= {bucket.params[i]: state for i, state in self.whole_state(bucket).items() if state}
        self._whole.clear()
        for entry in self.entries:
            if entry.is_own and entry.param in self.state:
                states[entry.param] = self.state.pop(entry.param)
        return states

    def detach(self) -> None:
        """Makes the optimizer a plain one, with the whole state; a collective. Before its models are unwrapped."""
        states = self.take_state()
        for flat in self.flats:
            flat.remove_optimizer(self)
        known = self._known()
        plain = {key: value for key, value in self.state.items() if id(key) not in known}
        settings = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for bucket, i in chain.from_iterable(self.places):
            p = bucket.params[i]
            if p in states:
                states[p] = _in_type_of(bucket, states[p], settings[id(p)])
        ordered = {p: states.get(p, self.state.get(p)) for p in chain.from_iterable(self.outside)}
        self.optimizer.state = defaultdict(dict, {p: v for p, v in ordered.items() if v} | plain)
        self._hooks.remove(self.optimizer)
        self.optimizer.__dict__.pop("_ringcomm_seen", None)
        self.flats, self.entries, self.inside, self._mine = [], [], [], {}  # memory goes now
        self.places, self._sharded, self._stepped = [], {}, {}
        self.state = defaultdict(dict)
        self.host = HostGradients()

    # ---- state ----------------------------------------------------------------------------------------------------

    def place_of(self, p: Any) -> tuple[Bucket, int] | None:
        """Where a parameter is whose state is in shards."""
        return self._sharded.get(id(p))

    def _known(self) -> set[int]:
        """Ids of the keys of `state` that are parameters."""
        return {*chain.from_iterable(self._ids), *self._shards}

    def has_state(self, key: Any) -> bool:
        """Whether a key of `optimizer.state` is there; the same on every rank."""
        place = self._sharded.get(id(key))
        return self._has_state(*place) if place is not None else id(key) not in self._shards and key in self.state

    def parameters_with_state(self) -> Iterator[Any]:
        """The keys of the optimizer's state, by the model's parameters; known on every rank."""
        yield from filter(self.has_state, chain.from_iterable(self.outside))
        known = self._known()
        yield from [key for key in self.state if id(key) not in known]

    def _has_state(self, bucket: Bucket, i: int) -> bool:
        whole = self._whole.get(bucket)
        return i in self._stepped[bucket] if whole is None else bool(whole.get(i))

    def whole_state(self, bucket: Bucket) -> dict[int, State]:
        """The whole state of a bucket's parameters; what is written into it counts. A collective from stage 1 on."""
        if bucket not in self._whole:
            found = self._gathered(bucket)
            self._whole[bucket] = {i: found.of_parameter(i, copy=False) for i in sorted(found.present)}
            for entry in self.entries:
                if entry.bucket is bucket and not entry.is_own:
                    self.state.pop(entry.param, None)
        return self._whole[bucket]

    def _gathered(self, bucket: Bucket) -> BucketState:
        if not self._stepped[bucket]:
            return BucketState(bucket)
        entries = [entry for entry in self.entries if entry.bucket is bucket and not entry.is_own]
        pieces = [(entry, self.state.get(entry.param, {})) for entry in entries]
        return BucketState.gathered(bucket, pieces, self._stepped[bucket])

    def clear_state(self) -> None:
        """Forgets all state; no collective."""
        self.state.clear()
        self._whole.clear()
        self._stepped = {bucket: set() for bucket in self._mine}

    def close(self) -> None:
        """Gives every rank its part of the state that is by parameter."""
        for bucket in list(self._whole):
            states = {i: state for i, state in self._whole[bucket].items() if state}
            self._put(bucket, BucketState.of(bucket, states, bucket.ranks.rank, checked=False))
            del self._whole[bucket]

    def _put(self, bucket: Bucket, whole: BucketState) -> None:
        self._stepped[bucket] = set(whole.present)
        self.separate(lambda other, i: other is not bucket or whole.kind(i))
        for entry in self.entries:
            if entry.bucket is bucket and not entry.is_own:
                self.state.pop(entry.param, None)
                state = whole.piece(entry.start, entry.end, entry.segments, entry.param)
                if state:
                    self.state[entry.param] = state

    def _show_state(self) -> None:
        self.optimizer.state = self._seen if self._sharded else self.state

    def adopt_state(self) -> None:
        """Takes over another mapping that was put in the place of `optimizer.state`, by parameter, as
        load_state_dict() does."""
        found = self.optimizer.state
        if found is self._seen or (found is self.state and not self._sharded):
            return
        if found is not self.state:
            self.state = defaultdict(dict)
            self._whole = {bucket: {} for bucket in self._mine}
            for key, value in found.items():
                place = self._sharded.get(id(key))
                if place is None:
                    self.state[key] = value
                else:
                    self._whole[place[0]][place[1]] = _in_master_type(place[0], value)
            self._whole = {bucket: states for bucket, states in self._whole.items() if states or self._stepped[bucket]}
        self._show_state()

    def before_state_dict(self) -> None:
        """Puts the whole state in, of which torch makes the ordinary state dict; a collective."""
        self.settle()
        states: dict[Any, Any] = {}
        for bucket in self._mine:
            whole = self._whole.get(bucket)
            found = self._gathered(bucket) if whole is None else None
            for i in sorted(self._mine[bucket]):
                if id(bucket.params[i]) in self._sharded:
                    state = whole.get(i) if whole is not None else found.of_parameter(i) if found is not None else None
                    if state:
                        states[bucket.params[i]] = state
        ordered = {
            p: states.get(p, self.state.get(p))
            for p in chain.from_iterable(self.outside)
            if p in states or (p in self.state and self.place_of(p) is None)
        }
        known = self._known()
        self.optimizer.state = defaultdict(dict, ordered | {k: v for k, v in self.state.items() if id(k) not in known})

    def after_state_dict(self) -> None:
        self._show_state()

    def before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Checks the state of sharded parameters, and keeps it from torch, which would cast it to the model's type."""
        self.settle()
        groups = state_dict["param_groups"]
        expected, got = [len(params) for params in self.outside], [len(group["params"]) for group in groups]
        if expected != got:
            raise InvalidArgumentError(
                f"load_state_dict: rank {self.flat.ranks.rank} got an optimizer's state for groups of {got} "
                f"parameters, expected {expected}; load the state of the same model and groups"
            )
        found: dict[Bucket, dict[int, State]] = {bucket: {} for bucket in self._mine}
        rest = dict(state_dict["state"])
        for group, params in zip(groups, self.outside, strict=True):
            for index, p in zip(group["params"], params, strict=True):
                place = self._sharded.get(id(p))
                state = rest.pop(index, None) if place is not None else None
                if place is not None and state:
                    on_device = bool(group.get("capturable") or group.get("fused"))
                    found[place[0]][place[1]] = _loaded(place[0], state, on_device)
        known = _is_torchs(type(self.optimizer))
        self._loading = {
            home: BucketState.of(home, each, home.ranks.rank, checked=known) for home, each in found.items()
        }
        return {**state_dict, "state": rest}

    def after_load(self) -> None:
        """torch has loaded the rest."""
        loading, self._loading = self._loading, {}
        self.adopt_state()
        self._whole.clear()
        for bucket, whole in loading.items():
            self._put(bucket, whole)
        self._enter()  # some optimizers bring an older state into their own form
        try:
            self.optimizer.__setstate__({"state": self.state, "param_groups": self.optimizer.param_groups})
        finally:
            self._leave()

    # ---- a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the optimizer has what it has in step(), with gradients if the user has not set them to None."""
        self._take_in()
        self._begin_work()
        try:
            yield
        finally:
            self._leave()

    def _take_in(self) -> None:
        """What users have changed since the last step counts."""
        self.settle()
        for bucket in self._mine:
            bucket.gradient.adopt_user_grads("step")

    def _begin_work(self) -> None:
        self.close()
        for bucket in self._mine:
            bucket.adopt_writes("step")
        if any(0 < len(bucket.gradient.has) < len(bucket.params) for bucket in self._mine):
            self.separate(lambda bucket, i: i in bucket.gradient.has)
        self.host.refresh()
        self.host.arrive()
        self._enter()

    def _enter(self) -> None:
        """The shards take the place of the model's parameters."""
        self._working = True
        self._forget_whole_gradients()
        for group, params in zip(self.optimizer.param_groups, self.inside, strict=True):
            group["params"][:] = params
        self.optimizer.state = self.state
        for entry in self.entries:
            gradient = entry.bucket.gradient
            if not entry.is_own:
                has = gradient.has_reduced and not gradient.has.isdisjoint(entry.segments)
                entry.param.grad = self._gradient_of(entry) if has else None

    def _gradient_of(self, entry: Entry) -> torch.Tensor:
        """Its part of the reduced gradient."""
        bucket, host = entry.bucket, self.host.of(entry.bucket)
        reduced = bucket.gradient.reduced if host is None else host
        return reduced[entry.start - bucket.start : entry.end - bucket.start].view(entry.values.shape)

    def _leave(self) -> None:
        """The model's parameters come back, with whatever step() has set them to."""
        self._working = False
        self._forget_whole_gradients()
        if self.optimizer.state is not self.state:  # step() has put in another
            self.state = defaultdict(dict, self.optimizer.state)
        moved = [entry for entry in self.entries if entry.param.data_ptr() != entry.address]
        for entry in moved:
            with torch.no_grad():
                entry.values.copy_(entry.param)
            entry.param.data = entry.values
        for group, params in zip(self.optimizer.param_groups, self.outside, strict=True):
            group["params"][:] = params
        for entry in self.entries:
            if not entry.is_own:
                entry.param.grad = None
        self._show_state()

    def _forget_whole_gradients(self) -> None:
        """A step may change the gradients that it is given."""
        for flat in self.flats:
            flat.ranks.read = None

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begins the step; where it has a closure, after each call of that, which sees the model's parameters."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin_step()
            return None

        def with_the_model() -> Any:
            if self._working:
                self.after_step()
            loss = closure()
            self._begin_step()
            return loss

        return args[:1], {**kwargs, "closure": with_the_model}

    def _begin_step(self) -> None:
        self._take_in()
        self._refuse_unreduced()
        if any(flat.options_differ for flat in self.flats):
            for flat in self.flats:
                lines = [line for attached in flat.shared_optimizers() for line in attached.options.lines()]
                flat.ranks.agree("step", lines, SAME_OPTIONS)
                flat.options_differ = False
        for flat in self.flats:
            flat.stepped.add(self.options)
            if flat.ranks.joining is not None and flat.ranks.joining.flat is flat:
                flat.ranks.announce("step", flat.number_of(self), more=self._options())
        self._begin_work()
        self.options.steps += 1
        for bucket, mine in self._mine.items():
            if bucket.gradient.has_reduced:
                self._stepped[bucket] |= bucket.gradient.has & mine

    def after_step(self) -> None:
        """The model gets what the step has computed."""
        self._leave()
        works = [(bucket, bucket.publish()) for bucket in self._mine]
        for bucket, work in works:
            bucket.unit.flat.timed(work.wait)

    def _refuse_unreduced(self) -> None:
        """Raises for gradients that no reduction has seen: the step would leave them out."""
        for bucket, mine in self._mine.items():
            ranks, gradient = bucket.ranks, bucket.gradient
            if ranks.joining is not None and ranks.joining.shadowing:  # go with the others' next reduction
                continue
            if gradient.has_reduced and not gradient.has_local:
                continue
            put = [i for i in mine if bucket.params[i].grad is not None]
            if put:
                raise InvalidArgumentError(
                    f"step: rank {ranks.rank} got a gradient of {bucket.names[min(put)]} that was not reduced, "
                    "expected the mean over all ranks; call the last backward() before a step outside of no_sync"
                )

    # ---- options --------------------------------------------------------------------------------------------------

    def _options(self) -> list[dict[str, Any]]:
        """The hyperparameters of every group."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    # ---- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; with ``set_to_none=False`` they become zeros, as in torch."""
        self.settle()
        if not set_to_none:
            for flat in self.flats:
                if flat.ranks.joining is None or flat.ranks.joining.flat is flat:
                    flat.ranks.announce("zero_grad", flat.number_of(self))
        zero_grad = type(self.optimizer).zero_grad
        torchs = zero_grad is torch.optim.Optimizer.zero_grad  # which asks for nothing but `p.grad`
        with torch._C.DisableTorchFunctionSubclass() if torchs else nullcontext():
            zero_grad(self.optimizer, set_to_none=set_to_none)
        for bucket in self._mine:
            bucket.gradient.reconcile()


class _Hooks:
    """What puts `Attached` between an optimizer and its users."""

    def __init__(self, attached: ShardedOptimizer) -> None:
        optimizer = attached.optimizer
        self._before = optimizer.register_step_pre_hook(lambda _, args, kwargs: attached.before_step(args, kwargs))
        after = optimizer.register_step_post_hook(lambda _, args, kwargs: attached.after_step())
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # the others see the model's parameters
        self._handles = [
            self._before,
            after,
            optimizer.register_state_dict_pre_hook(lambda _: attached.before_state_dict()),
            optimizer.register_state_dict_post_hook(lambda _, state: attached.after_state_dict(), prepend=True),
            optimizer.register_load_state_dict_pre_hook(lambda _, state: attached.before_load(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: attached.after_load(), prepend=True),
        ]
        here = weakref.ref(optimizer)  # an optimizer that held itself would stay until the collector comes
        optimizer.register_step_pre_hook = partial(self._register_before, here)
        optimizer.zero_grad = partial(_zero_grad, here)

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is a plain one again."""
        for handle in self._handles:
            handle.remove()
        for name in ("register_step_pre_hook", "zero_grad", "_ringcomm"):
            delattr(optimizer, name)

    def _register_before(self, here: weakref.ref[torch.optim.Optimizer], hook: Callable[..., Any]) -> Any:
        """Other hooks before a step come before ours: they see the model's parameters."""
        optimizer = here()
        assert optimizer is not None
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        return handle


def _zero_grad(here: weakref.ref[Any], set_to_none: bool = True) -> None:
    """Forgets the gradients."""
    optimizer = here()
    assert optimizer is not None
    optimizer._ringcomm.zero_grad(set_to_none)


def _place_of(p: Any) -> tuple[Bucket, int] | None:
    """Where a parameter of a wrapped model is that is trained."""
    place = place_of(p)
    return None if place is None or not place.bucket.trainable else (place.bucket, place.index)


def _like(p: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """A parameter with the attributes that the user has given to another."""
    param = nn.Parameter(values)
    kept = {k: v for k, v in vars(p).items() if not k.startswith("_ringcomm")}
    param.__dict__.update(kept)
    return param


def _cut_state(value: Any, param: torch.Tensor, piece: slice) -> Any:
    if not torch.is_tensor(value):
        return value
    return (value[piece] if value.shape == param.shape else value).clone()


def _in_master_type(bucket: Bucket, state: Any) -> Any:
    """A parameter's state as torch leaves it, cast to the parameter's type, in the type of the master weights."""
    if not isinstance(state, dict):
        return state
    narrow, wide = bucket.types.compute, bucket.types.master
    return {
        key: value.to(wide) if key != "step" and torch.is_tensor(value) and value.dtype == narrow else value
        for key, value in state.items()
    }


def _in_type_of(bucket: Bucket, state: State, settings: dict[str, Any]) -> State:
    """A parameter's state for a plain optimizer: on the parameter's device, in its type where that of the master
    weights is another."""
    on_host = not (settings.get("capturable") or settings.get("fused"))
    wide, own = bucket.types.master, bucket.dtype
    return {
        key: value
        if not torch.is_tensor(value) or (key == "step" and on_host)
        else value.to(bucket.device, own if value.dtype == wide and key != "step" else value.dtype)
        for key, value in state.items()
    }


def _loaded(bucket: Bucket, state: State, on_device: bool) -> State:
    """A parameter's state as torch loads it, where the parameter is a master weight. What is no float keeps its type:
    it may be quantised."""
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
