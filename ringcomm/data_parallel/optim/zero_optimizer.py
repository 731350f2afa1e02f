"""`ringcomm.ZeroRedundancyOptimizer`: an optimizer whose state and work are distributed over the ranks, for training
code that already averages its gradients.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ringcomm.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)

Parameters and gradients stay unsharded and ordinary. A rank's optimizer updates, in place, the pieces of them that lie
in its shard of the flat layout; an all-gather then updates the other pieces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.buckets.group import DataParallelGroup, Join, refuse_several
from ringcomm.data_parallel.buckets.layout import Atom, FlatLayout, Segment, dim_order, dim_order_for, memory_format
from ringcomm.data_parallel.model.place import place_of
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.optimizer import is_elementwise, refuse_unusable
from ringcomm.data_parallel.optim.state import check_shape, is_alike, merge_over_ranks
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.validation import COMMUNICATOR, FLAG, Requirement, a, expects, several, that

State = dict[str, Any]
_CALL = "ZeroRedundancyOptimizer"
_instances: list[weakref.ref[ZeroRedundancyOptimizer]] = []
# How many optimizers were made for a parameter; equal on all ranks, because it does not depend on garbage collection.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass
class _Piece:
    """The piece of a parameter that this rank updates."""

    unsharded: torch.Tensor  # the parameter
    index: int  # of the parameter's segment
    segment: Segment
    start: int  # offset in the parameter
    end: int
    offset: int  # offset in this rank's shard
    param: nn.Parameter  # the piece, in the parameter's memory

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the same piece of a tensor with the parameter's shape."""
        return x if self.end - self.start == x.numel() else self.segment.flatten(x)[self.start : self.end]

    def state(self, unsharded: State, group: dict[str, Any]) -> State:
        """Returns the piece's state, given the parameter's."""
        return {key: self._value(key, value, group) for key, value in unsharded.items()}

    def _value(self, key: str, value: Any, group: dict[str, Any]) -> Any:
        if not torch.is_tensor(value):
            return value
        p = self.unsharded
        if key == "step":
            on_device = group.get("capturable", False) or group.get("fused", False)
            return value.to(dtype=torch.float32, device=p.device, copy=True) if on_device else value.clone()
        dtype = p.dtype if p.is_floating_point() and value.is_floating_point() else value.dtype
        part = self.cut(value) if value.shape == p.shape else value
        return part.to(dtype=dtype, device=p.device, copy=True)


class _Buffer:
    """Parameters of one type on one device, and the layout that distributes them.

    Args:
        number: by id, the index of a parameter's optimizer group.
        views: whether the parameters become views of one buffer, which is gathered in place.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], number: dict[int, int], ranks: DataParallelGroup, atom: Atom, views: bool
    ) -> None:
        self.ranks = ranks
        first = params[0]
        specs = [Segment(str(i), tuple(p.shape), number[id(p)], dim_order=dim_order(p)) for i, p in enumerate(params)]
        self.layout = FlatLayout.build(specs, first.dtype, ranks.world_size, atom)
        self.params = [params[int(segment.name)] for segment in self.layout.segments]
        self.groups = [segment.group for segment in self.layout.segments]
        self.start, self.end = self.layout.shard_range(ranks.rank)
        self.device = first.device
        self.buffer = self._bound() if views else None
        self.pieces = []
        for i, start, offset, numel in self.layout.fragments(self.start, self.end):
            p, segment = self.params[i], self.layout.segments[i]
            piece = _Piece(p, i, segment, start, start + numel, offset, nn.Parameter(torch.empty(0), False))
            piece.param = nn.Parameter(piece.cut(p.detach()), requires_grad=True)
            self.pieces.append(piece)

    def _bound(self) -> torch.Tensor:
        buffer = self.ranks.empty(self.layout.numel, self.layout.dtype, self.device).zero_()
        for i, p in enumerate(self.params):
            part = self.layout.part(buffer, i)
            part.copy_(p.detach())
            p.data = part
        return buffer

    def expose_grads(self) -> None:
        """Gives the pieces their parameters' memory and gradients."""
        # Checks all parameters, so that all ranks raise, even ranks without a part of the wrong parameter.
        for i, p in enumerate(self.params):
            self._check(p, i)
        for piece in self.pieces:
            p = piece.unsharded
            piece.param.data = piece.cut(p.detach())
            piece.param.grad = None if p.grad is None else piece.cut(p.grad.detach())

    def _check(self, p: torch.Tensor, i: int) -> None:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise UnsupportedError(
                f"step: rank {self.ranks.rank} got a sparse gradient, of a parameter of shape {tuple(p.shape)}, "
                "expected a dense one; build its module with sparse=False"
            )
        moved = self.buffer is not None and p.numel() and p.data_ptr() != self.layout.part(self.buffer, i).data_ptr()
        if moved or p.device != self.device or p.dtype != self.layout.dtype:
            raise InvalidArgumentError(
                f"step: rank {self.ranks.rank} got a parameter of shape {tuple(p.shape)} in other memory ({p.dtype} on "
                f"{p.device}), expected it where it was; make the optimizer after moving the module"
            )

    def sync_params(self) -> None:
        """Gathers the other ranks' pieces; a collective."""
        increment_version([p for p in self.params if p.grad is not None])  # the step's writes did not count as changes
        for piece in self.pieces:
            piece.param.grad = None
        if self.ranks.world_size == 1:
            return
        if self.buffer is not None:
            self.ranks.all_gather(self.buffer[self.start : self.end], self.buffer).wait()
            return
        unsharded = self.ranks.take(self.layout.numel, self.layout.dtype, self.device)
        own = unsharded[self.start : self.end]
        for piece in self.pieces:
            own[piece.offset : piece.offset + piece.param.numel()].copy_(piece.segment.flatten(piece.param.detach()))
        self.ranks.all_gather(own, unsharded).wait()
        for i, (p, segment) in enumerate(zip(self.params, self.layout.segments, strict=True)):
            if segment.offset < self.start or segment.end > self.end:
                p.data.copy_(self.layout.part(unsharded, i))
        del own  # else the pool would regard the memory as still in use
        self.ranks.give(unsharded)

    # ---- state ----------------------------------------------------------------------------------------------------

    def collect(self, state: dict[Any, State], to: int | None) -> list[State] | None:
        """Gathers the parameters' unsharded state, on rank ``to`` or on all; a collective."""
        types: dict[str, torch.dtype] = {}
        other: dict[int, State] = {}
        holders: dict[str, set[int]] = {}
        for piece in self.pieces:
            for key, value in state.get(piece.param, {}).items():
                if is_alike(key, value, piece.param):
                    types[key] = value.dtype
                    holders.setdefault(key, set()).add(piece.index)
                else:
                    other.setdefault(piece.index, {})[key] = value
        keys, other, _, everywhere = merge_over_ranks(self.ranks, self.device, types, other, set(), holders)
        found: list[State] = [dict(other.get(i, {})) for i in range(len(self.params))]
        for key, dtype in keys:
            own = torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.device)
            for piece in self.pieces:
                if piece.index in holders.get(key, ()):
                    values = state[piece.param][key]
                    own[piece.offset : piece.offset + values.numel()].copy_(piece.segment.flatten(values))
            comm = self.ranks.comm
            unsharded = comm.all_gather(own) if to is None else comm.gather(own, to)
            for i in everywhere[key] if unsharded is not None else ():
                found[i][key] = self.layout.part(unsharded.reshape(-1), i).clone()
        return found if to is None or to == self.ranks.rank else None


def _groups(params: Any) -> list[Any]:
    found = several("", a("", torch.Tensor, dict, tuple)).take(params)
    if isinstance(params, torch.Tensor) or any(isinstance(each, dict) and "params" not in each for each in found):
        raise ValueError("these are none")
    return found


class _ShadowStep(JoinHook):
    """Inside torch's Join: steps an optimizer on a rank that has joined, each time that the others step it."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer.step()


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Distributes an optimizer of ``optimizer_class`` over all ranks: each keeps a share of the state and does its part
    of a step.

    The bits are those of ``optimizer_class`` on one rank. ``param_groups`` and learning rates can be changed as usual.

    Args:
        params: tensors or parameter groups, the same on every rank, with gradients that are the same on every rank, as
            DistributedDataParallel makes them.
        optimizer_class: a class of torch.optim, or one that updates each tensor separately. A class that is not known
            to be element-wise gets whole tensors, distributed over the ranks.
        process_group: the ranks; None: the default group.
        parameters_as_bucket_view: whether the parameters become views of flat buffers, which are gathered in place.
        comm: a communicator in place of ``process_group``.
        **defaults: arguments of ``optimizer_class``.
    Cost:    state: 1/W of the optimizer's. A step: one all-gather of the parameters; without
             ``parameters_as_bucket_view`` also a copy of them, and a buffer of their length.
    Raises:  InvalidArgumentError: parameters that are already sharded. UnsupportedError: ``overlap_with_ddp``, or an
             optimizer that cannot be sharded. MismatchError: the ranks have different parameters.
    """

    _ready = False

    @expects(
        _CALL,
        params=Requirement("parameters, or groups of them", _groups),
        optimizer_class=that("a class of torch.optim", lambda kind: issubclass(kind, torch.optim.Optimizer)),
        parameters_as_bucket_view=FLAG,
        overlap_with_ddp=FLAG,
        comm=COMMUNICATOR,
    )
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        comm: Communicator | None = None,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise UnsupportedError(
                f"{_CALL}: got overlap_with_ddp=True, expected False; the step runs when all gradients are there, use "
                "ringcomm.shard(model, optimizer, stage=1) to have reductions overlap backward"
            )
        refuse_several(_CALL, comm=comm, process_group=process_group)
        given = [dict(each) if isinstance(each, dict) else each for each in params]
        self.optim = optimizer_class(given, **defaults)
        torch.optim.Optimizer.__init__(
            self, [_group_of(group) for group in self.optim.param_groups], self.optim.defaults
        )
        Joinable.__init__(self)
        self.joining: tuple[Join, int] | None = None  # inside `ringcomm.join` of a model, and this optimizer's number
        device = self.param_groups[0]["params"][0].device
        self.ranks = DataParallelGroup(comm if comm is not None else communicator_of(process_group, _CALL, device))
        self._process_group = None if comm is not None else process_group or dist.group.WORLD
        refuse_unusable(self.optim, _CALL, self.ranks.rank)
        self._views = parameters_as_bucket_view
        self._atom: Atom = "element" if is_elementwise(self.optim) else "tensor"
        self._buffers: list[_Buffer] = []
        self._unsharded_state: list[State] | None = None
        self._state_at: int | None = -1
        self._ready = True
        initial = dict(self.optim.state)
        self.optim.state.clear()
        self._counts: list[int] = []  # by parameter: the number of this optimizer among those made for it
        pieces = self._deal_out(range(len(self.param_groups)))
        _instances.append(weakref.ref(self, _instances.remove))
        for number, group in enumerate(self.optim.param_groups):
            group["params"] = [piece.param for piece in pieces[number]]
            for piece in pieces[number]:
                if piece.unsharded in initial:
                    self.optim.state[piece.param] = piece.state(initial[piece.unsharded], group)

    def _deal_out(self, numbers: Iterable[int]) -> dict[int, list[_Piece]]:
        """Makes the buffers for these groups, and returns this rank's pieces of each group."""
        number = {id(p): i for i in numbers for p in self.param_groups[i]["params"]}
        params = [p for i in numbers for p in self.param_groups[i]["params"]]
        for p in params:
            self._refuse_unusable(p)
        for p in params:
            _made[p] = _made.get(p, 0) + 1
            self._counts.append(_made[p])
        facts = [
            f"a parameter of shape {tuple(p.shape)} and {p.dtype}{memory_format(p)} in group {number[id(p)]}"
            for p in params
        ]
        self.ranks.agree(_CALL, facts)
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p in params:
            kinds.setdefault((p.dtype, p.device), []).append(p)
        pieces: dict[int, list[_Piece]] = {i: [] for i in numbers}
        for some in kinds.values():
            buffer = _Buffer(some, number, self.ranks, self._atom, self._views)
            self._buffers.append(buffer)
            for piece in buffer.pieces:
                pieces[buffer.groups[piece.index]].append(piece)
        return pieces

    def _refuse_unusable(self, p: torch.Tensor) -> None:
        place = place_of(p)
        flat = None if place is None else place.flat
        master = flat is not None and any(bucket.separate for bucket in flat.buckets)
        if flat is not None and (flat.stage > 0 or self._views or master):
            raise InvalidArgumentError(
                f"{_CALL}: rank {self.ranks.rank} got parameters that are in flat buffers already, at stage "
                f"{flat.stage}, expected plain ones; use the optimizer that ringcomm.shard returned"
            )
        if not self._views and not p.is_contiguous() and dim_order_for(self._atom, dim_order(p)) == ():
            raise UnsupportedError(
                f"{_CALL}: rank {self.ranks.rank} got a parameter of shape {tuple(p.shape)} and strides {p.stride()}, "
                "expected a contiguous one; pass parameters_as_bucket_view=True, which makes it so"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; a collective."""
        super().add_param_group(param_group)
        if self._ready:
            number = len(self.param_groups) - 1
            pieces = self._deal_out([number])[number]
            options = _options(self.param_groups[number])
            self.optim.add_param_group({**options, "params": [piece.param for piece in pieces]})

    # ---- uneven inputs --------------------------------------------------------------------------------------------

    def models(self) -> list[ShardedModel]:
        """Returns the models wrapped by ringcomm that have parameters of this optimizer."""
        places = (place_of(p) for group in self.param_groups for p in group["params"])
        return [*dict.fromkeys(place.flat for place in places if place is not None)]

    def join_hook(self, **_: Any) -> JoinHook:
        """Returns the hook for torch.distributed.algorithms.Join. The `join` of a model that ringcomm has wrapped needs
        none."""
        return JoinHook() if self.models() else _ShadowStep(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensor in which torch's Join counts the ranks that still have input."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which torch's Join counts the ranks that still have input: for a model that ringcomm has
        wrapped, this rank alone.

        Raises: InvalidArgumentError: the ranks are those of a communicator, without a process group.
        """
        models = self.models()
        if models:
            return models[0].ranks.alone
        if self._process_group is None:
            raise InvalidArgumentError(
                f"Join: rank {self.ranks.rank} got a {_CALL} over a communicator, expected one over a process group; "
                "pass process_group= in place of comm="
            )
        return self._process_group

    # ---- a step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters with the gradients in ``p.grad``; a collective.

        Returns: the result of ``closure``, which is called first.
        """
        TorchJoin.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.joining is not None:
            joining, number = self.joining
            joining.announce("step", number, True, [_options(group) for group in self.param_groups])
            if joining.some_have_joined:
                self._share_grads(joining)
        self._unsharded_state, self._state_at = None, -1
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            theirs.update(_options(mine))
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.expose_grads()
            self.optim.step()
            for buffer in self._buffers:
                buffer.sync_params()
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update(_options(theirs))
        return loss

    def _share_grads(self, joining: Join) -> None:
        """Gives the ranks that have joined the gradients of a rank that still has input: the program may have changed
        them since they were averaged, for example clipped or unscaled them."""
        params = self._in_order()
        there = joining.ranks.comm.exchange(bytes(p.grad is not None for p in params))[joining.root]
        for p, has_grad in zip(params, there, strict=True):
            if joining.shadowing and (p.grad is None or not has_grad):
                p.grad = torch.zeros_like(p) if has_grad else None
            if has_grad:
                joining.ranks.broadcast(p.grad)

    # ---- state ----------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gathers the state for `state_dict`, which stays valid until the next step; a collective.

        Args:
            to: the rank that gets the state; None: all.
        """
        found: dict[int, State] = {}
        for buffer in self._buffers:
            states = buffer.collect(self.optim.state, to)
            found.update(zip(map(id, buffer.params), states or (), strict=False))
        self._state_at = to
        here = to is None or to == self.ranks.rank
        self._unsharded_state = [found[id(p)] for p in self._in_order()] if here else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the usual state dict of one ``optimizer_class`` over all parameters.

        Raises: InvalidArgumentError: `consolidate_state_dict` was not called since the last step, or for another rank.
        """
        if self._unsharded_state is None:
            what = "none that was collected since the last step" if self._state_at == -1 else f"rank {self._state_at}'s"
            raise InvalidArgumentError(
                f"state_dict: rank {self.ranks.rank} got {what}, expected its own; call consolidate_state_dict on "
                f"every rank first, with to={self.ranks.rank} or to=None"
            )
        groups, index = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(index, index + count))})
            index += count
        return {"state": {i: state for i, state in enumerate(self._unsharded_state) if state}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a usual state dict.

        Raises:  InvalidArgumentError: groups of other lengths. ShapeError: state of a parameter with another shape.
        """
        theirs = state_dict["param_groups"]
        expected, got = ([len(group["params"]) for group in each] for each in (self.param_groups, theirs))
        if expected != got:
            raise InvalidArgumentError(
                f"load_state_dict: rank {self.ranks.rank} got an optimizer's state for groups of {got} parameters, "
                f"expected {expected}; load the state of the same model and groups"
            )
        states = {
            id(p): state_dict["state"].get(index, {})
            for group, mine in zip(theirs, self.param_groups, strict=True)
            for index, p in zip(group["params"], mine["params"], strict=True)
        }
        for number, p in enumerate(self._in_order()):
            for key, value in states[id(p)].items():
                check_shape(key, value, f"parameter {number}", p.shape, self.ranks.rank)
        for mine, group in zip(self.param_groups, theirs, strict=True):
            mine.update(_options(group))
        self._unsharded_state, self._state_at = None, -1
        self.optim.state.clear()
        for buffer in self._buffers:
            for piece in buffer.pieces:
                group = self.param_groups[buffer.groups[piece.index]]
                state = piece.state(states[id(piece.unsharded)], group)
                if state:
                    self.optim.state[piece.param] = state

    def _in_order(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _group_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a group, with names in the form that an optimizer takes."""
    names = group.get("param_names")
    params = list(group["params"]) if names is None else list(zip(names, group["params"], strict=True))
    return {**_options(group), "params": params}


def optimizers_of(model: ShardedModel) -> dict[int, ZeroRedundancyOptimizer]:
    """Returns the optimizers that step parameters of a model, by numbers that are the same on all ranks."""
    live = [each for each in (ref() for ref in list(_instances)) if each is not None and model in each.models()]
    position = {id(p): i for i, p in enumerate(model.module.parameters())}
    found = {}
    for each in live:
        counted = zip(each._in_order(), each._counts, strict=True)
        first, count = min((position[id(p)], count) for p, count in counted if id(p) in position)
        found[first << 32 | count] = each
    return found
