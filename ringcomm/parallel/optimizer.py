"""The user's own optimizer on flat shards: its parameters become this rank's part of the flat groups.

An element-wise optimizer gets one long parameter for each run of segments of one parameter group. One that looks at
whole tensors gets each parameter that lies on this rank, in its shape. Steps, state and learning rates stay the
optimizer's; its `state_dict()` is the ordinary one, by parameter and in the parameters' shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.parallel.flat_model import FlatModel
from ringcomm.parallel.group import FlatGroup
from ringcomm.parallel.offload import HostGradients
from ringcomm.parallel.optimizer_state import GroupState, State
from ringcomm.parallel.place import place_of
from ringcomm.parallel.sharded_gradient import ShardedGradient

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_REFUSED = {
    "LBFGS": "whose line search needs all parameters in one place",
    "SparseAdam": "which takes sparse gradients",
    "ZeroRedundancyOptimizer": "which deals the parameters out by itself",
}
_watching: list[Any] = []  # the handle of the hook on every optimizer's step, once there is one
_watches = 0  # calls of `watch_optimizers`: what an optimizer was looked at after need not be looked at again
_lock = threading.Lock()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every element is updated from its own gradient and state alone, so that shards may cut tensors."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith("torch.optim.") and owner.__name__ in _ELEMENTWISE


def attached_of(optimizer: Any, call: str) -> Attached | None:
    """What an optimizer is attached to; one over parameters of `fully_shard` is attached now. None: to nothing."""
    found: Attached | None = getattr(optimizer, "_ringcomm", None)
    if found is not None:
        return found
    flats = {id(flat): flat for group in optimizer.param_groups for p in group["params"] if (flat := _composed(p))}
    if not flats:
        return None
    flat = next(iter(flats.values()))
    if len(flats) > 1:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer over parameters of {len(flats)} modules of fully_shard, "
            "expected one; call fully_shard on the module that holds them all, last"
        )
    refuse_unusable(optimizer, call, flat.ranks.rank)
    return Attached(flat, optimizer, call)


def watch_optimizers() -> None:
    """From now on an optimizer over parameters that it cannot step by itself is attached at its first step."""
    global _watches
    with _lock:
        _watches += 1
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer of plain parameters is looked at once."""
    del args, kwargs
    now = (_watches, len(optimizer.param_groups))
    if optimizer.__dict__.get("_ringcomm_seen") != now:
        attached_of(optimizer, "step")
        optimizer._ringcomm_seen = now


def _composed(p: Any) -> FlatModel | None:
    """The flat model of a parameter that an optimizer cannot step by itself."""
    place = place_of(p)
    flat = None if place is None else place.flat
    alone = flat is None or not flat.composed or not (flat.stage or any(group.separate for group in flat.groups))
    return None if alone else flat


def refuse_unusable(optimizer: Any, call: str, rank: int) -> None:
    """Raises for what no shard can serve."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer"
        )
    if hasattr(optimizer, "_ringcomm"):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got an optimizer that is sharded already, expected a plain one; pass it once"
        )
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED and cls.__module__.startswith(("torch.optim.", "torch.distributed.", "ringcomm.")):
            raise UnsupportedError(
                f"{call}: rank {rank} got {cls.__name__}, {_REFUSED[cls.__name__]}, expected one that updates each "
                "tensor by itself; use another optimizer"
            )


@dataclass
class Entry:
    """One parameter of the sharded optimizer."""

    group: FlatGroup
    start: int  # in the group's buffer
    end: int
    segments: tuple[int, ...]
    param: nn.Parameter


class Attached:
    """An optimizer whose parameters are those of a flat model.

    Of a model of fully_shard it may have others too, such as ignored and frozen ones, which stay as they are.

    Raises:  InvalidArgumentError: a parameter that is not the model's, by name where it has one.
             UnsupportedError: an optimizer that no shard can serve.
    """

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer, call: str) -> None:
        self.flat, self.optimizer = flat, optimizer
        self.elementwise = is_elementwise(optimizer)
        # By group, parameters that stay as they are, by their place among the group's.
        self._plain = [
            {k: p for k, p in enumerate(group["params"]) if _is_plain(p, flat)} for group in optimizer.param_groups
        ]
        self.places = [
            [_place_of(p, flat, call) for k, p in enumerate(group["params"]) if k not in plain]
            for group, plain in zip(optimizer.param_groups, self._plain, strict=True)
        ]
        self._group_of = {
            id(group.params[i]): number for number, group_ in enumerate(self.places) for group, i in group_
        }
        self.entries: list[Entry] = []
        self._working = False
        self._stepped: dict[FlatGroup, set[int]] = {group: set() for group in flat.order}  # who ever had a gradient
        self.host = HostGradients()
        before = optimizer.state_dict() if optimizer.state else None
        self.place()
        flat.optimizers.append(self)
        flat.on_reduced.append(self.host.fetch)
        for group in flat.order:
            if group.gradient.has_reduced:  # backward was before
                self.host.fetch(group)
        optimizer._ringcomm = self
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(args, kwargs))
        optimizer.register_step_post_hook(lambda _, args, kwargs: self._after_step())
        optimizer.register_state_dict_post_hook(lambda _, state: self._ordinary(state))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._sharded(state))
        optimizer.zero_grad = MethodType(_zero_grad, optimizer)
        optimizer.add_param_group = MethodType(_refuse_param_group, optimizer)
        if before is not None:
            optimizer.load_state_dict(before)

    # ---- parameters -----------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Makes the optimizer's parameters anew for the flat groups' stage, without state."""
        self.entries = []
        params: list[list[nn.Parameter]] = [list(plain.values()) for plain in self._plain]
        state = self.optimizer.state
        stays = {p: state[p] for plain in params for p in plain if p in state}
        state.clear()
        state.update(stays)
        for group in self.flat.groups:
            if not group.trainable:
                continue
            owners = [self._group_of.get(id(p), -1) for p in group.params]
            for number, start, end, segments in self._pieces(group, owners):
                values = group.master[start - group.start : end - group.start]
                if not self.elementwise:
                    values = values.view(group.layout.segments[segments[0]].shape)
                param = nn.Parameter(values)
                self.entries.append(Entry(group, start, end, segments, param))
                params[number].append(param)
        self.host.place([group for group in self.flat.order if any(id(p) in self._group_of for p in group.params)])
        for number, mine in enumerate(params):
            self.optimizer.param_groups[number]["params"] = mine
        self._represent()

    def _represent(self) -> None:
        self._standins = [
            ShardedGradient.of(entry.param, entry.group.names[entry.segments[0]]) for entry in self.entries
        ]

    def separate(self, kind: Callable[[FlatGroup, int], Hashable]) -> None:
        """Cuts the optimizer's parameters where neighbouring segments are of different kinds, such as with and without
        a gradient: each then has its own count of steps, and one without a gradient is left out of a step."""
        entries, parts_of = [], {}
        for entry in self.entries:
            stretches = [[*some] for _, some in groupby(entry.segments, partial(kind, entry.group))]
            parts = [entry] if len(stretches) < 2 else self._cut(entry, stretches)
            entries += parts
            parts_of[id(entry.param)] = [part.param for part in parts]
        if len(entries) == len(self.entries):
            return
        self.entries = entries
        for group in self.optimizer.param_groups:
            group["params"] = [part for p in group["params"] for part in parts_of.get(id(p), [p])]
        self._represent()

    def _cut(self, entry: Entry, stretches: list[list[int]]) -> list[Entry]:
        starts = [entry.start, *(entry.group.layout.segments[some[0]].offset for some in stretches[1:])]
        state = self.optimizer.state.pop(entry.param, {})
        parts = []
        for some, start, end in zip(stretches, starts, [*starts[1:], entry.end], strict=True):
            piece = slice(start - entry.start, end - entry.start)
            param = nn.Parameter(entry.param.detach()[piece])
            if state:
                self.optimizer.state[param] = {key: _cut_state(v, entry.param, piece) for key, v in state.items()}
            parts.append(Entry(entry.group, start, end, tuple(some), param))
        return parts

    def _pieces(self, group: FlatGroup, owners: list[int]) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        if self.elementwise:
            yield from group.layout.runs(group.start, group.end, owners)
            return
        for fragment in group.layout.fragments(group.start, group.end):
            segment = group.layout.segments[fragment.segment]
            if fragment.numel != segment.numel:
                raise UnsupportedError(
                    f"optimizer: rank {self.flat.ranks.rank} got {type(self.optimizer).__name__}, which looks at whole "
                    f"tensors, and a part of {segment.name}; pass atom='tensor' to shard or fully_shard"
                )
            if owners[fragment.segment] >= 0:
                yield owners[fragment.segment], segment.offset, segment.end, (fragment.segment,)

    def show(self) -> None:
        """Gives the optimizer the gradients that were reduced; parts of them only while it works on them.

        A norm of this rank's part alone would be wrong, so whoever else looks gets an error.
        """
        self.host.arrive()
        ranks = self.flat.ranks
        ranks.read = None  # a step may change what it is given
        plain = (ranks.world_size == 1 or self.flat.stage == 0) and (ranks.mesh is None or not ranks.mesh.model_axes)
        for entry, standin in zip(self.entries, self._standins, strict=True):
            gradient = entry.group.gradient
            if not gradient.has_reduced or gradient.has.isdisjoint(entry.segments):
                entry.param.grad = None
            elif self._working or (plain and self.host.of(entry.group) is None):
                copy = self.host.of(entry.group)
                source = gradient.reduced if copy is None else copy
                first = entry.start - entry.group.start
                entry.param.grad = source[first : first + entry.end - entry.start].view(entry.param.shape)
            else:
                entry.param.grad = standin

    # ---- a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the optimizer's parameters have their gradients, if the user has not set them to None."""
        self._begin_work()
        try:
            yield
        finally:
            self._end_work()

    def _begin_work(self) -> None:
        for group in self.flat.order:
            group.gradient.take_in("step")
        if any(0 < len(group.gradient.has) < len(group.params) for group in self.flat.order):
            self.separate(lambda group, i: i in group.gradient.has)
        self._working = True
        self.host.refresh()
        self.show()

    def _end_work(self) -> None:
        self._working = False
        self.show()

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begins the step; where it has a closure, after that, which makes the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin_step()
            return None

        def then_begin() -> Any:
            loss = closure()
            self._begin_step()
            return loss

        return args[:1], {**kwargs, "closure": then_begin}

    def _refuse_unreduced(self) -> None:
        """Raises for gradients that no reduction has seen: the step would leave them out."""
        ranks = self.flat.ranks
        if ranks.joining is not None and ranks.joining.shadowing:  # this rank's go with the others' next reduction
            return
        for group, i in chain.from_iterable(self.places):
            gradient = group.gradient
            if group.params[i].grad is not None and (gradient.has_local or not gradient.has_reduced):
                raise InvalidArgumentError(
                    f"step: rank {ranks.rank} got a gradient of {group.names[i]} that was not reduced, expected the "
                    "mean over all ranks; call the last backward() before a step outside of no_sync"
                )

    def _begin_step(self) -> None:
        for group in self.flat.order:
            group.gradient.take_in("step")
        self._refuse_unreduced()
        self.flat.ranks.announce("step", self.flat.optimizers.index(self), more=self._options())
        self._begin_work()
        for entry in self.entries:
            gradient = entry.group.gradient
            if gradient.has_reduced:
                self._stepped[entry.group] |= gradient.has

    def _options(self) -> list[dict[str, Any]]:
        """The hyperparameters of every group."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def _after_step(self) -> None:
        self._end_work()
        works = [group.publish() for group in self.flat.groups if group.trainable]
        for work in works:
            if work is not None:
                self.flat.timed(work.wait)

    # ---- state ----------------------------------------------------------------------------------------------------

    def take_state(self) -> list[GroupState]:
        """The whole state, by flat group; a collective. Uses as much memory as the state has without shards."""
        by_group: dict[FlatGroup, list[tuple[Entry, State]]] = {group: [] for group in self.flat.order}
        for entry in self.entries:
            by_group[entry.group].append((entry, self.optimizer.state.get(entry.param, {})))
        return [GroupState.gathered(group, pieces, self._stepped[group]) for group, pieces in by_group.items()]

    def put_state(self, states: list[GroupState]) -> None:
        """Gives this rank its part of the whole state."""
        by_group = dict(zip(self.flat.order, states, strict=True))
        self._stepped = {group: set(state.present) for group, state in by_group.items()}
        self.separate(lambda group, i: by_group[group].kind(i))
        for entry in self.entries:
            state = by_group[entry.group].piece(entry.start, entry.end, entry.segments, entry.param)
            if state:
                self.optimizer.state[entry.param] = state

    def _ordinary(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An ordinary state dict of the same optimizer on the model's parameters; a collective."""
        whole = dict(zip(self.flat.order, self.take_state(), strict=True))
        state, groups, index = {}, [], 0
        for group, places, plain in zip(state_dict["param_groups"], self.places, self._plain, strict=True):
            of_plain = iter(group["params"])  # in front, in order
            shared = iter(places)
            indices = list(range(index, index + len(places) + len(plain)))
            for k, number in enumerate(indices):
                if k in plain:
                    found = state_dict["state"].get(next(of_plain))
                else:
                    home, i = next(shared)
                    found = whole[home].of_parameter(i)
                if found:
                    state[number] = found
            index += len(indices)
            groups.append({**group, "params": indices})
        return {**state_dict, "state": state, "param_groups": groups}

    def _sharded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict for this rank's parameters, from an ordinary one."""
        groups = state_dict["param_groups"]
        expected = [len(places) + len(plain) for places, plain in zip(self.places, self._plain, strict=True)]
        got = [len(group["params"]) for group in groups]
        if expected != got:
            raise InvalidArgumentError(
                f"load_state_dict: rank {self.flat.ranks.rank} got an optimizer's state for groups of {got} "
                f"parameters, expected {expected}; load the state of the same model and groups"
            )
        parameters: dict[FlatGroup, dict[int, State]] = {group: {} for group in self.flat.order}
        of_plain: dict[int, State] = {}
        for group, places, plain in zip(groups, self.places, self._plain, strict=True):
            shared = iter(places)
            for k, index in enumerate(group["params"]):
                home, i = (None, 0) if k in plain else next(shared)
                if index in state_dict["state"]:
                    found = state_dict["state"][index]
                    if home is None:
                        of_plain[id(plain[k])] = found
                    else:
                        parameters[home][i] = found
        whole = {home: GroupState.of(home, each, self.flat.ranks.rank) for home, each in parameters.items()}
        self._stepped = {home: set(state.present) for home, state in whole.items()}
        self.separate(lambda group, i: whole[group].kind(i))
        entries = {id(entry.param): entry for entry in self.entries}
        state, ours, number = {}, [], 0
        for group, mine in zip(groups, self.optimizer.param_groups, strict=True):
            indices = list(range(number, number + len(mine["params"])))
            number += len(indices)
            ours.append({**group, "params": indices})
            for index, p in zip(indices, mine["params"], strict=True):
                entry = entries.get(id(p))
                if entry is None:
                    piece = of_plain.get(id(p), {})
                else:
                    piece = whole[entry.group].piece(entry.start, entry.end, entry.segments, entry.param)
                if piece:
                    state[index] = piece
        return {**state_dict, "state": state, "param_groups": ours}


def _cut_state(value: Any, param: torch.Tensor, piece: slice) -> Any:
    if not torch.is_tensor(value):
        return value
    return (value[piece] if value.shape == param.shape else value).clone()


def _is_plain(p: Any, flat: FlatModel) -> bool:
    """Whether an optimizer of a composed model steps a parameter by itself, or never, as a frozen one."""
    place = place_of(p)
    return flat.composed and (place is None or (place.flat is flat and not place.group.trainable))


def _place_of(p: Any, flat: FlatModel, call: str) -> tuple[FlatGroup, int]:
    home = place_of(p)
    owned = home is not None and home.flat is flat
    if home is None or not owned or not home.group.trainable:
        what = "a frozen parameter" if owned else "a parameter that is not the model's"
        shape = tuple(getattr(p, "shape", ()))
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer over {what}, of shape {shape}, expected parameters of "
            "the model that require a gradient; make the optimizer from model.parameters()"
        )
    return home.group, home.index


def _refuse_param_group(optimizer: Any, param_group: dict[str, Any]) -> None:
    del param_group
    raise UnsupportedError(
        f"add_param_group: rank {optimizer._ringcomm.flat.ranks.rank} got a sharded {type(optimizer).__name__}, "
        "expected one that is not sharded yet; make all groups first"
    )


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Forgets the gradients, of the model's parameters and the optimizer's own."""
    attached: Attached = optimizer._ringcomm
    if not set_to_none:
        attached.flat.ranks.announce("zero_grad", attached.flat.optimizers.index(attached))
    for group in attached.flat.order:
        group.gradient.reconcile()
    held = [(group, i) for places in attached.places for group, i in places if i in group.gradient.has_any]
    type(optimizer).zero_grad(optimizer, set_to_none=True)
    for places in attached.places:
        for group, i in places:
            group.params[i].grad = None
    for group in attached.flat.order:
        group.gradient.reconcile()
    if not set_to_none:
        for group, i in held:
            group.gradient.contributed.add(i)  # counts as used, with a gradient of zero
