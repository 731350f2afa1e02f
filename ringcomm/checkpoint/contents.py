"""Lists the tensors of a model and its optimizer by name: tensors in buckets, and tensors that every rank has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringcomm.checkpoint.files import TensorBox, boxes_of
from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.layout import up
from ringcomm.data_parallel.model.place import wrapped_model
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.optimizer import ShardedOptimizer, sharded_optimizer_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.notes import notes_of
from ringcomm.modules.shard_spec import part_of, refuse_parts


def flat_of(model: nn.Module, call: str) -> ShardedModel:
    """Returns the sharded model behind a wrapped module.

    Raises:  InvalidArgumentError: a module that is not wrapped, or that has other parameters than the wrapped one.
    """
    flat = wrapped_model(model, call, "use torch.distributed.checkpoint for a plain module")
    if {*map(id, model.parameters())} != {*map(id, flat.module.parameters())}:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got a {type(model).__name__} with other parameters than those of the "
            f"{type(flat.module).__name__} that was wrapped, expected the wrapped module; pass the module that "
            "ringcomm.shard returned"
        )
    if flat.ranks.mesh is None:
        refuse_parts(model.parameters(), call, "a checkpoint")
    return flat


def name_of(bucket: Bucket, i: int) -> str:
    """Returns a parameter's name in checkpoints: the first name that it has in the whole model."""
    names = part_of(bucket.params[i]).names
    return names[0] if names else bucket.layout.segments[i].name


def unsharded_shape(bucket: Bucket, i: int) -> tuple[int, ...]:
    """Returns the shape of the tensor that a parameter is, or is a part of."""
    return part_of(bucket.params[i]).unsharded_shape(bucket.layout.segments[i].shape)


def boxes_in(bucket: Bucket, i: int, name: str, values: torch.Tensor, first: int) -> list[TensorBox]:
    """Returns views of ``values``, which are elements of a parameter from element ``first`` of its bucket on, as boxes
    of the unsharded tensor ``name``."""
    segment = bucket.layout.segments[i]
    part = part_of(bucket.params[i])
    return boxes_of(name, segment.shape, values, first - segment.offset, part, segment.dim_order)


def saved_ranges(flat: ShardedModel) -> dict[Bucket, tuple[int, int]]:
    """Returns, by bucket, the range of its elements that this rank saves: its shard.

    At stage 0, where each rank has all elements, the buckets are cut as one, between rows of a parameter. So nearly all
    parameters are one box, and each box costs a third of a millisecond when it is loaded.
    """
    rank, world_size = flat.ranks.rank, flat.ranks.world_size
    if flat.stage > 0:
        return {bucket: bucket.layout.shard_range(rank) for bucket in flat.buckets}
    found, before = {}, 0
    total = sum(bucket.layout.numel for bucket in flat.buckets)
    for bucket in flat.buckets:
        cuts = [min(max(total * each // world_size - before, 0), bucket.layout.numel) for each in (rank, rank + 1)]
        found[bucket] = _next_row(bucket, cuts[0]), _next_row(bucket, cuts[1])
        before += bucket.layout.numel
    return found


def _next_row(bucket: Bucket, element: int) -> int:
    """Returns the first element of the first row that starts at or after an element."""
    segment = bucket.layout.segments[bucket.layout.index_of(element)]
    if not segment.offset < element < segment.end:
        return element
    return min(segment.end, segment.offset + up(element - segment.offset, math.prod(segment.memory_shape[1:])))


def is_writer(bucket: Bucket, i: int) -> bool:
    """Returns whether this rank writes the values of a parameter that only one rank writes."""
    ranks = bucket.ranks
    first = ranks.rank == 0 and (ranks.replicas is None or ranks.replicas.rank == 0)
    return first and bucket.is_primary_copy(i) and (ranks.mesh is None or ranks.mesh.counts)


def names_of_params(flat: ShardedModel) -> dict[int, list[str]]:
    """Returns the names of each parameter in a bucket, by the parameter's id: several names for a tied parameter."""
    found = {}
    for bucket in flat.buckets:
        for i, p in enumerate(bucket.params):
            found[id(p)] = [*part_of(p).names] or [bucket.layout.segments[i].name]
    for name, p in flat.module.named_parameters(remove_duplicate=False):
        if id(p) in found and name not in found[id(p)]:
            found[id(p)].append(name)
    return found


Replicated = tuple[list[str], torch.Tensor]
"""The names of a tensor that every rank has, and the tensor: a buffer or an ignored parameter."""


def replicated_of(flat: ShardedModel) -> list[Replicated]:
    """Returns the tensors of a model that are in no bucket."""
    sharded = {id(p) for bucket in flat.buckets for p in bucket.params}
    found: dict[int, Replicated] = {}
    for prefix, module in flat.module.named_modules(remove_duplicate=False):
        kept = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in [*kept.items(), *module._parameters.items()]:
            if tensor is not None and id(tensor) not in sharded:
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{key}" if prefix else key)
    return list(found.values())


def with_extra_state(flat: ShardedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields this rank's modules that define get_extra_state, with the name of that state."""
    for prefix, module in flat.module.named_modules():
        here = not notes_of(module).elsewhere
        if here and type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


BucketRange = tuple[Bucket, int, int, torch.Tensor]
"""A bucket, the range of its elements that an optimizer's parameter covers (first, one past the last), and that
parameter."""


@dataclass
class OptimizerParams:
    """An optimizer's parameters.

    Attributes:
        ranges: the parts of buckets that it steps.
        names: the names of the parameters in each of its groups.
        plain: by name, the parameters that are in no bucket, such as those that fully_shard ignores.
        sharded: None for a plain optimizer.
    """

    ranges: list[BucketRange] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: ShardedOptimizer | None = None

    def has_state(self, bucket: Bucket, i: int) -> bool:
        """Whether a parameter ever had a gradient. A parameter that never had one may still have zeros as state,
        because it shares an entry of the optimizer with others; these zeros are not saved."""
        if self.sharded is None:
            return True
        # At stage 0 the optimizer may have had state before `shard`.
        return i in self.sharded.parts[bucket].stepped or bucket.params[i] in self.sharded.state

    def states(self, optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
        """Returns the optimizer's state by parameter; keys that are no parameters hold state common to all."""
        return optimizer.state if self.sharded is None else self.sharded.state

    @staticmethod
    def of(flat: ShardedModel, optimizer: torch.optim.Optimizer | None, call: str) -> OptimizerParams:
        """Finds the parameters of an optimizer of this model; None has no parameters."""
        if optimizer is None:
            return OptimizerParams()
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise UnsupportedError(
                f"{call}: rank {flat.ranks.rank} got a ZeroRedundancyOptimizer, which holds its state itself, expected "
                "a plain optimizer or that of ringcomm.shard; use its consolidate_state_dict() and state_dict()"
            )
        sharded = sharded_optimizer_of(optimizer, call)
        if sharded is not None and len(sharded.flats) > 1:
            raise UnsupportedError(
                f"{call}: rank {flat.ranks.rank} got an optimizer over {len(sharded.flats)} sharded modules, expected "
                "an optimizer of only this module; save its state_dict(), or make an optimizer for each module"
            )
        if sharded is not None and sharded.optimizer in flat.optimizers:  # `optimizer` may be a wrapper around it
            sharded.refresh()
            sharded.close()
            ranges = [(e.bucket, e.start, e.end, e.param) for e in sharded.entries]
            names = [[name_of(bucket, i) for bucket, i in places] for places in sharded.places]
            own = {id(tensor): names[0] for names, tensor in replicated_of(flat)}
            held = OptimizerParams(ranges, names, sharded=sharded)
            for plain, of_group in zip(sharded.plain, names, strict=True):
                trained = [p for p in plain if p.requires_grad]
                _refuse_foreign([p for p in trained if id(p) not in own], flat, call)
                of_group += [own[id(p)] for p in trained]
                held.plain |= {own[id(p)]: p for p in trained}
            return held
        places = {id(p): (bucket, i) for bucket in flat.buckets for i, p in enumerate(bucket.params)}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = sharded is not None or flat.stage > 0 or any(id(p) not in places for p in params)
        if foreign and params:  # the optimizer of a frozen stage has no parameters
            raise InvalidArgumentError(
                f"{call}: rank {flat.ranks.rank} got a {type(optimizer).__name__} that is not the module's, expected "
                "the one that ringcomm.shard returned with it; pass that"
            )
        held = OptimizerParams()
        for group in optimizer.param_groups:
            held.names.append([name_of(*places[id(p)]) for p in group["params"]])
            for p in group["params"]:
                bucket, i = places[id(p)]
                segment = bucket.layout.segments[i]
                held.ranges.append((bucket, segment.offset, segment.end, p))
        return held


def _refuse_foreign(params: list[torch.Tensor], flat: ShardedModel, call: str) -> None:
    if params:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer with a parameter of shape {tuple(params[0].shape)} that "
            "is not the module's, expected only the module's parameters; make another optimizer for the others"
        )
