"""Lists the contents of a model and its optimizer by name: parts of buckets, and tensors that every rank
has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.model.sharded_model import ShardedModel, sharded_model_of
from ringcomm.data_parallel.optim.optimizer import ShardedOptimizer, sharded_optimizer_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.notes import notes_of
from ringcomm.modules.shard_spec import part_of, refuse_parts


def flat_of(model: nn.Module, call: str) -> ShardedModel:
    flat = sharded_model_of(model)
    if flat is None:
        raise InvalidArgumentError(
            f"{call}: got a {type(model).__name__} that is not wrapped, expected what ringcomm.shard returned; use "
            "torch.distributed.checkpoint for a plain module"
        )
    if {*map(id, model.parameters())} != {*map(id, flat.module.parameters())}:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got a {type(model).__name__} with other parameters than those of the "
            f"{type(flat.module).__name__} that was wrapped, expected the wrapped module; pass what ringcomm.shard "
            "returned"
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


def is_writer(bucket: Bucket, i: int) -> bool:
    """Returns whether this rank writes those of a parameter's values that are written once."""
    ranks = bucket.ranks
    first = ranks.rank == 0 and (ranks.replicas is None or ranks.replicas.rank == 0)
    return first and bucket.is_primary_copy(i) and (ranks.mesh is None or ranks.mesh.counts)


class NamedSegment(NamedTuple):
    bucket: Bucket
    i: int  # segment
    names: list[str]  # one name, or several for a tied parameter


def named_segments_of(flat: ShardedModel) -> dict[int, NamedSegment]:
    """Returns the places of the buckets' parameters, by id."""
    found = {}
    for bucket in flat.buckets:
        for i, p in enumerate(bucket.params):
            found[id(p)] = NamedSegment(bucket, i, [*part_of(p).names] or [bucket.layout.segments[i].name])
    for name, p in flat.module.named_parameters(remove_duplicate=False):
        if id(p) in found and name not in found[id(p)].names:
            found[id(p)].names.append(name)
    return found


Replicated = tuple[list[str], torch.Tensor]
"""The names of a tensor that every rank has, and the tensor: a buffer or an ignored parameter."""


def replicated_of(flat: ShardedModel, known: dict[int, NamedSegment]) -> list[Replicated]:
    found: dict[int, Replicated] = {}
    for prefix, module in flat.module.named_modules(remove_duplicate=False):
        kept = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in [*kept.items(), *module._parameters.items()]:
            if tensor is not None and id(tensor) not in known:
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{key}" if prefix else key)
    return list(found.values())


def names_of(known: dict[int, NamedSegment], replicated: list[Replicated]) -> set[str]:
    """Returns all names of tensors in a state dict."""
    every = [*(place.names for place in known.values()), *(names for names, _ in replicated)]
    return {name for names in every for name in names}


def with_extra_state(flat: ShardedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields this rank's modules that define get_extra_state, with the name of that state."""
    for prefix, module in flat.module.named_modules():
        here = not notes_of(module).elsewhere
        if here and type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


Piece = tuple[Bucket, int, int, torch.Tensor]
"""A bucket, the first of its elements that an optimizer's parameter covers and the one past the last, and the
parameter."""


@dataclass
class OptimizerParams:
    """An optimizer's parameters: as pieces of buckets, and by name for each of its groups.

    Attributes:
        plain: by name, the parameters that it steps directly, such as ignored ones of fully_shard.
        sharded: None for a plain optimizer.
    """

    pieces: list[Piece] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    sharded: ShardedOptimizer | None = None

    def has_state(self, bucket: Bucket, i: int) -> bool:
        """Whether a parameter ever had a gradient. Without one it may still have zeros as state, because it shares
        an entry with others; they are not saved."""
        if self.sharded is None:
            return True
        # At stage 0 the optimizer may have had state before `shard`.
        return i in self.sharded.parts[bucket].stepped or bucket.params[i] in self.sharded.state

    def states(self, optimizer: torch.optim.Optimizer) -> defaultdict[Any, Any]:
        """Returns the optimizer's state by the parameters that it steps; other keys hold what is common to all."""
        return optimizer.state if self.sharded is None else self.sharded.state

    @staticmethod
    def of(flat: ShardedModel, optimizer: torch.optim.Optimizer | None, call: str) -> OptimizerParams:
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
                "one over this one; save its state_dict(), or make an optimizer for each"
            )
        if sharded is not None and sharded.optimizer in flat.optimizers:  # `optimizer` may be a wrapper around it
            sharded.refresh()
            sharded.close()
            pieces = [(e.bucket, e.start, e.end, e.param) for e in sharded.entries]
            names = [[name_of(bucket, i) for bucket, i in places] for places in sharded.places]
            own = {id(tensor): names[0] for names, tensor in replicated_of(flat, named_segments_of(flat))}
            held = OptimizerParams(pieces, names, sharded=sharded)
            for plain, of_group in zip(sharded.plain, names, strict=True):
                trained = [p for p in plain if p.requires_grad]
                _refuse_foreign([p for p in trained if id(p) not in own], flat, call)
                of_group += [own[id(p)] for p in trained]
                held.plain |= {own[id(p)]: p for p in trained}
            return held
        known = named_segments_of(flat)
        mine = [[known.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        foreign = sharded is not None or flat.stage > 0 or not all(place for places in mine for place in places)
        if foreign and any(mine):  # a frozen stage's optimizer has no parameters
            raise InvalidArgumentError(
                f"{call}: rank {flat.ranks.rank} got a {type(optimizer).__name__} that is not the module's, expected "
                "the one that ringcomm.shard returned with it; pass that"
            )
        held = OptimizerParams()
        for group, places in zip(optimizer.param_groups, mine, strict=True):
            found = [place for place in places if place is not None]
            held.names.append([place.names[0] for place in found])
            for p, place in zip(group["params"], found, strict=True):
                segment = place.bucket.layout.segments[place.i]
                held.pieces.append((place.bucket, segment.offset, segment.end, p))
        return held


def _refuse_foreign(params: list[torch.Tensor], flat: ShardedModel, call: str) -> None:
    if params:
        raise InvalidArgumentError(
            f"{call}: rank {flat.ranks.rank} got an optimizer with a parameter of shape {tuple(params[0].shape)} that "
            "is not the module's, expected the module's own; give the others an optimizer of their own"
        )
