"""The user's own optimizer on flat shards: its parameters become this rank's part of the flat groups.

An element-wise optimizer gets one long parameter for each run of segments of one parameter group. One that looks at
whole tensors gets each parameter that lies on this rank, in its shape. Steps, state and learning rates stay the
optimizer's; its `state_dict()` is the ordinary one, by parameter and in the parameters' shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.parallel.flat_model import FlatModel
from ringcomm.parallel.group import FlatGroup
from ringcomm.parallel.optimizer_state import GroupState, State
from ringcomm.parallel.standin import ShardedGradient

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_REFUSED = {
    "LBFGS": "whose line search needs all parameters in one place",
    "SparseAdam": "which takes sparse gradients",
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every element is updated from its own gradient and state alone, so that shards may cut tensors."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith("torch.optim.") and owner.__name__ in _ELEMENTWISE


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
        if cls.__name__ in _REFUSED and cls.__module__.startswith("torch.optim."):
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

    Raises:  InvalidArgumentError: a parameter that is not the model's, by name where it has one.
             UnsupportedError: an optimizer that no shard can serve.
    """

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer, call: str) -> None:
        self.flat, self.optimizer = flat, optimizer
        self.elementwise = is_elementwise(optimizer)
        self.places = [[_place_of(p, flat, call) for p in group["params"]] for group in optimizer.param_groups]
        self._group_of = {
            id(group.params[i]): number for number, group_ in enumerate(self.places) for group, i in group_
        }
        self.entries: list[Entry] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # what a step must not change, and its values
        self._working = False
        self._host: dict[FlatGroup, torch.Tensor] = {}  # gradients beside master weights that lie elsewhere
        before = optimizer.state_dict() if optimizer.state else None
        self.place()
        flat.optimizers.append(self)
        flat.on_reduced.append(self._fetch)
        optimizer._ringcomm = self
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step())
        optimizer.register_step_post_hook(lambda _, args, kwargs: self._after_step())
        optimizer.register_state_dict_post_hook(lambda _, state: self._ordinary(state))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: self._sharded(state))
        optimizer.zero_grad = MethodType(_zero_grad, optimizer)
        if before is not None:
            optimizer.load_state_dict(before)

    # ---- parameters -----------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Makes the optimizer's parameters anew for the flat groups' stage, without state."""
        self.entries = []
        self._host.clear()
        self.optimizer.state.clear()
        params: list[list[nn.Parameter]] = [[] for _ in self.places]
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
            if group.master.device != group.device and any(number >= 0 for number in owners):
                pinned = group.device.type == "cuda"
                self._host[group] = torch.empty_like(group.master, pin_memory=pinned)
        for number, mine in enumerate(params):
            self.optimizer.param_groups[number]["params"] = mine
        self._standins = [
            ShardedGradient.of(entry.param, entry.group.names[entry.segments[0]]) for entry in self.entries
        ]

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
        if self._host and self.flat.device.type == "cuda":
            torch.cuda.current_stream(self.flat.device).synchronize()
        for entry, standin in zip(self.entries, self._standins, strict=True):
            gradient = entry.group.gradient
            if not gradient.has_reduced:
                entry.param.grad = None
            elif self._working or self.flat.ranks.world_size == 1 or self.flat.stage == 0:
                source = self._host.get(entry.group, gradient.reduced)
                first = entry.start - entry.group.start
                entry.param.grad = source[first : first + entry.end - entry.start].view(entry.param.shape)
            else:
                entry.param.grad = standin

    def _fetch(self, group: FlatGroup) -> None:
        """A group was reduced: its gradient follows to where the master weights are."""
        host = self._host.get(group)
        if host is not None:
            host.copy_(group.gradient.reduced, non_blocking=True)

    def gradients_elsewhere(self, group: FlatGroup) -> list[torch.Tensor]:
        """Copies of a group's gradient that must be scaled with it."""
        return [self._host[group]] if group in self._host else []

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
            group.gradient.reconcile()
        self._working = True
        self.show()

    def _end_work(self) -> None:
        self._working = False
        self.show()

    def _before_step(self) -> None:
        self._begin_work()
        for entry in self.entries:
            gradient = entry.group.gradient
            if gradient.has_reduced:
                self._keep(entry, [i for i in entry.segments if i not in gradient.has])

    def _keep(self, entry: Entry, unused: list[int]) -> None:
        """Notes the values of parameters without a gradient: an optimizer with weight decay would change them."""
        state = self.optimizer.state.get(entry.param, {})
        alike = [value for value in state.values() if torch.is_tensor(value) and value.shape == entry.param.shape]
        for i in unused:
            segment = entry.group.layout.segments[i]
            first, last = max(segment.offset, entry.start) - entry.start, min(segment.end, entry.end) - entry.start
            for whole in [entry.param.detach(), *alike]:
                part = whole.reshape(-1)[first:last]
                self._kept.append((part, part.clone()))

    def _after_step(self) -> None:
        for part, values in self._kept:
            part.copy_(values)
        self._kept.clear()
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
        return [GroupState.gathered(group, pieces) for group, pieces in by_group.items()]

    def put_state(self, states: list[GroupState]) -> None:
        """Gives this rank its part of the whole state."""
        by_group = dict(zip(self.flat.order, states, strict=True))
        for entry in self.entries:
            state = by_group[entry.group].piece(entry.start, entry.end, entry.segments, entry.param)
            if state:
                self.optimizer.state[entry.param] = state

    def _ordinary(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An ordinary state dict of the same optimizer on the model's parameters; a collective."""
        whole = dict(zip(self.flat.order, self.take_state(), strict=True))
        state, groups, index = {}, [], 0
        for group, places in zip(state_dict["param_groups"], self.places, strict=True):
            indices = []
            for home, i in places:
                found = whole[home].of_parameter(i)
                if found:
                    state[index] = found
                indices.append(index)
                index += 1
            groups.append({**group, "params": indices})
        return {**state_dict, "state": state, "param_groups": groups}

    def _sharded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict for this rank's parameters, from an ordinary one."""
        groups = state_dict["param_groups"]
        expected = [len(places) for places in self.places]
        got = [len(group["params"]) for group in groups]
        if expected != got:
            raise InvalidArgumentError(
                f"load_state_dict: rank {self.flat.ranks.rank} got an optimizer's state for groups of {got} "
                f"parameters, expected {expected}; load the state of the same model and groups"
            )
        parameters: dict[FlatGroup, dict[int, State]] = {group: {} for group in self.flat.order}
        for group, places in zip(groups, self.places, strict=True):
            for index, (home, i) in zip(group["params"], places, strict=True):
                if index in state_dict["state"]:
                    parameters[home][i] = state_dict["state"][index]
        whole = {home: GroupState.of(home, each, self.flat.ranks.rank) for home, each in parameters.items()}
        numbers = {id(entry.param): number for number, entry in enumerate(self._in_order())}
        state, number = {}, 0
        ours = []
        for group, mine in zip(groups, self.optimizer.param_groups, strict=True):
            indices = [numbers[id(p)] for p in mine["params"]]
            number += len(indices)
            ours.append({**group, "params": indices})
        for index, entry in enumerate(self._in_order()):
            piece = whole[entry.group].piece(entry.start, entry.end, entry.segments, entry.param)
            if piece:
                state[index] = piece
        return {**state_dict, "state": state, "param_groups": ours}

    def _in_order(self) -> list[Entry]:
        """Entries in the order of the optimizer's parameters."""
        by_param = {id(entry.param): entry for entry in self.entries}
        return [by_param[id(p)] for group in self.optimizer.param_groups for p in group["params"]]


def _place_of(p: Any, flat: FlatModel, call: str) -> tuple[FlatGroup, int]:
    home = getattr(p, "_ringcomm", None)
    if home is None or home[0] is not flat:
        owned = getattr(p, "_ringcomm_flat", None) is flat
        what = "a frozen parameter" if owned else "a parameter that is not the model's"
        shape = tuple(getattr(p, "shape", ()))
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer over {what}, of shape {shape}, expected parameters of "
            "the model that require a gradient; make the optimizer from model.parameters()"
        )
    return home[1], home[2]


def _zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """Forgets the gradients, of the model's parameters and the optimizer's own."""
    attached: Attached = optimizer._ringcomm
    type(optimizer).zero_grad(optimizer, set_to_none=True)
    for places in attached.places:
        for group, i in places:
            group.params[i].grad = None
    for group in attached.flat.order:
        group.gradient.reconcile()
    if not set_to_none:
        for places in attached.places:
            for group, i in places:
                group.gradient.contributed.add(i)  # counts as used, with a gradient of zero
