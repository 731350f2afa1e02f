"""Converts an optimizer's state between two forms: by parameter, as torch keeps it, and by bucket, as shards keep
it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import Segment
from ringcomm.data_parallel.optim.cache_blocks import CacheBlocks
from ringcomm.errors import InvalidArgumentError, ShapeError, UnsupportedError

State = dict[str, Any]
_MOMENTS = {  # torch's names of state with one value per element
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}


@dataclass
class StepParameter:
    """The parameter that the optimizer sees during step() in place of some of the model's parameters.

    Attributes:
        group: index of the optimizer's parameter group.
        values, address: the part of the master weights that ``param`` covers, and its address.
        blocks: the cache blocks that the optimizer sees in place of ``param``; None: it sees ``param``.
    """

    bucket: Bucket
    group: int
    start: int  # offset in the bucket's buffer
    end: int
    segments: tuple[int, ...]
    param: nn.Parameter
    values: torch.Tensor
    address: int
    blocks: CacheBlocks | None = None

    @property
    def is_own(self) -> bool:
        """Whether ``param`` is the model's own parameter."""
        return self.param is self.bucket.params[self.segments[0]]


def in_shape_of(param: torch.Tensor, flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Returns elements of the buffer in the shape of what the optimizer sees: flat, or the segment's."""
    return flat if param.dim() == 1 else segment.view(flat)


@dataclass
class OptimizerState:
    """An optimizer's unsharded state of a bucket.

    Attributes:
        alike: state with one value per element, such as moments, in tensors as long as the bucket's buffer.
        other: by segment, everything else: counters, factored moments.
        present: segments that have any state.
        holders: by key of ``alike``, the segments that have it.
    """

    bucket: Bucket
    alike: dict[str, torch.Tensor] = field(default_factory=dict)
    other: dict[int, State] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    holders: dict[str, set[int]] = field(default_factory=dict)

    @staticmethod
    def gathered(bucket: Bucket, pieces: Sequence[tuple[StepParameter, State]], stepped: set[int]) -> OptimizerState:
        """Builds the state from every rank's pieces; a collective.

        Args:
            stepped: segments that had a gradient in a step: other segments have no state, even if their entry has.
        """
        owned: dict[str, torch.Tensor] = {}
        other: dict[int, State] = {}
        holders: dict[str, set[int]] = {}
        for piece, state in pieces:
            for key, value in state.items():
                if is_alike(key, value, piece.param):
                    if key not in owned:
                        owned[key] = torch.zeros(bucket.end - bucket.start, dtype=value.dtype, device=value.device)
                    flat = bucket.layout.segments[piece.segments[0]].flatten(value)
                    owned[key][piece.start - bucket.start : piece.end - bucket.start] = flat
                    holders.setdefault(key, set()).update(stepped & {*piece.segments})
                else:
                    if len(piece.segments) > 1 and not _is_number(value) and torch.is_tensor(value):
                        raise UnsupportedError(
                            f"optimizer state: rank {bucket.ranks.rank} got {key} of shape {tuple(value.shape)} for "
                            f"{len(piece.segments)} parameters that are stepped as one of shape "
                            f"{tuple(piece.param.shape)}, expected that shape or one number; use stage 0 without "
                            "ringcomm.shard(model, optimizer)"
                        )
                    for segment in stepped & {*piece.segments}:
                        other.setdefault(segment, {})[key] = value
        known = {segment for piece, state in pieces if state for segment in stepped & {*piece.segments}}
        if bucket.stage > 0:
            types = {key: value.dtype for key, value in owned.items()}
            keys, other, known, holders = merge_over_ranks(bucket.ranks, bucket.device, types, other, known, holders)
            for key, dtype in keys:
                if key not in owned:
                    owned[key] = torch.zeros(bucket.end - bucket.start, dtype=dtype, device=bucket.master.device)
            owned = {key: bucket.gather_owned(owned[key]) for key, _ in keys}
        return OptimizerState(bucket, owned, other, known, holders)

    @staticmethod
    def of(bucket: Bucket, parameters: dict[int, State], rank: int, checked: bool) -> OptimizerState:
        """Builds the state from the state of each parameter.

        Args:
            checked: whether moments must have their parameter's shape.
        """
        found = OptimizerState(bucket, present=set(parameters))
        for i, state in parameters.items():
            segment = bucket.layout.segments[i]
            for key, value in state.items():
                if not is_alike(key, value, segment):
                    if checked:
                        check_shape(key, value, segment.name, segment.shape, rank)
                    found.other.setdefault(i, {})[key] = value
                    continue
                if key not in found.alike:
                    device = bucket.master.device
                    found.alike[key] = torch.zeros(bucket.layout.numel, dtype=value.dtype, device=device)
                found.alike[key][segment.offset : segment.end] = segment.flatten(value).to(bucket.master.device)
                found.holders.setdefault(key, set()).add(i)
        return found

    def piece(self, start: int, end: int, segments: tuple[int, ...], param: torch.Tensor) -> State:
        """Returns the state of the part from ``start`` to ``end``."""
        here = [i for i in segments if i in self.present]
        if not here:
            return {}
        state: State = {
            key: in_shape_of(param, value[start:end].clone(), self.bucket.layout.segments[segments[0]])
            for key, value in self.alike.items()
            if not self.holders[key].isdisjoint(here)
        }
        for i in here:
            for key, value in self.other.get(i, {}).items():
                if key in state and not _same(state[key], value):
                    names = [self.bucket.names[j] for j in here]
                    raise InvalidArgumentError(
                        f"optimizer state: got {key} {value} for {self.bucket.names[i]} and {state[key]} for a "
                        f"parameter that travels with it ({names[0]}), expected equal ones; put the two into parameter "
                        "groups of their own"
                    )
                state[key] = value.clone() if torch.is_tensor(value) else value
        return state

    def kind(self, i: int) -> tuple[object, ...]:
        """Returns the properties that parameters in one entry must share: whether they have state, and their
        counters."""
        others = sorted(self.other.get(i, {}).items())
        counters = [(key, v.item() if torch.is_tensor(v) else v) for key, v in others if _is_number(v)]
        return (i in self.present, *counters)

    def of_parameter(self, i: int, copy: bool = True) -> State:
        """Returns the state of one parameter, in its shape; without ``copy``, per-element state is a view of this
        object's."""
        if i not in self.present:
            return {}
        segment = self.bucket.layout.segments[i]
        alike = {
            key: segment.view(value[segment.offset : segment.end])
            for key, value in self.alike.items()
            if i in self.holders[key]
        }
        if copy:
            alike = {key: value.clone() for key, value in alike.items()}
        rest = {key: value.clone() if torch.is_tensor(value) else value for key, value in self.other.get(i, {}).items()}
        return {**rest, **alike}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if torch.is_tensor(value) else isinstance(value, (int, float))


def is_alike(key: str, value: Any, param: Any) -> bool:
    """Whether a state has one value per element. A tensor of a subclass, such as a quantised one, is not counted,
    because it may not be possible to split it."""
    # A parameter without dimensions has the shape of its counters, so there the name decides.
    known = key in _MOMENTS if param.shape == () else key != "step"
    return known and type(value) is torch.Tensor and tuple(value.shape) == tuple(param.shape)


def check_shape(key: str, value: Any, name: str, shape: Sequence[int], rank: int) -> None:
    """Raises for state that must belong to another parameter: moments of another shape, or other state with as many
    values as the parameter."""
    if not torch.is_tensor(value) or tuple(value.shape) == tuple(shape):
        return
    if key in _MOMENTS or 1 < value.numel() == math.prod(shape):
        raise ShapeError(
            f"load_state_dict: rank {rank} got {key} of {name} of shape {tuple(value.shape)}, expected "
            f"{tuple(shape)}; load the state of the same model"
        )


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if torch.is_tensor(a) and torch.is_tensor(b) else bool(a == b)


def _unpacked(payload: bytes, device: torch.device) -> Any:
    """Decodes a rank's message. Tensors of that rank's device move to this rank's device; host tensors stay on the
    host."""

    def place(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(payload), map_location=place, weights_only=False)


def merge_over_ranks(
    ranks: DataParallelGroup,
    device: torch.device,
    types: dict[str, torch.dtype],
    other: dict[int, State],
    known: set[int],
    holders: dict[str, set[int]],
) -> tuple[list[tuple[str, torch.dtype]], dict[int, State], set[int], dict[str, set[int]]]:
    """Merges all ranks' knowledge: the keys of per-element state, in one order; all other state; the segments with
    any state; and the segments with each key."""
    buffer = io.BytesIO()
    torch.save((types, other, known, holders), buffer)
    keys: dict[str, torch.dtype] = {}
    merged: dict[int, State] = {}
    present: set[int] = set()
    having: dict[str, set[int]] = {}
    for payload in ranks.comm.exchange(buffer.getvalue()):
        theirs_keys, theirs, theirs_known, theirs_holders = _unpacked(payload, device)
        keys.update(theirs_keys)
        for i, state in theirs.items():
            merged.setdefault(i, {}).update(state)
        present |= theirs_known
        for key, segments in theirs_holders.items():
            having.setdefault(key, set()).update(segments)
    return sorted(keys.items(), key=lambda item: item[0]), merged, present, having
