"""Clipping gradients by their norm over all ranks, with the same bits at every stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.grad_buffer import adopt_user_grads, sync_grads_from_root
from ringcomm.data_parallel.model.place import Place, place_of, sharded_model_of
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.norm import total_norm
from ringcomm.errors import InvalidArgumentError, RingcommError
from ringcomm.modules.arguments import NORM, PARAMETERS
from ringcomm.modules.dynamo import eager
from ringcomm.modules.shard_spec import is_primary_copy, refuse_parts, renew_parts
from ringcomm.validation import FLAG, expects


@eager
@expects("clip_grad_norm_", parameters=PARAMETERS, max_norm=NORM, norm_type=NORM, error_if_nonfinite=FLAG, foreach=FLAG)
def clip_grad_norm_(
    parameters: nn.Module | torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients of sharded parameters so that their norm over all ranks is at most ``max_norm``; a
    collective.

    torch.nn.utils.clip_grad_norm_ cannot do this because it does not see the other ranks' shards. Call this between
    backward and step, after ``unscale_`` of a GradScaler.

    Args:
        parameters: a sharded module, its optimizer, or some of the module's parameters; or, for one norm of all,
            parameters of several sharded modules that share their communicators, in the same order on every rank. For
            plain parameters torch's function is called. Ignored parameters of `fully_shard` count once, with the first
            rank's gradient: average their gradients before.
        foreach: accepted; it has no effect on sharded parameters.
    Order:   the sum of powers is exact to about 2**-50 in any order, so its bits depend on the gradients alone.
    Cost:    one pass over this rank's gradients (at stage 0 over its share of them); two messages of a few bytes.
    Returns: the norm before clipping, the same on every rank.
    Raises:  RingcommError: on every rank, if the norm is not finite and ``error_if_nonfinite`` is set.
             InvalidArgumentError: parameters of a pipeline stage or of tensor parallel layers that were not sharded
             over a mesh, because without the mesh the ranks that hold the other parameters are unknown; wrapped and
             plain parameters; modules with different communicators, or several inside `join`.
    """
    if isinstance(parameters, nn.Module):
        modules = [*parameters.modules()]
        renew_parts(modules)
        given = [p for module in modules for p in module._parameters.values() if p is not None]
        chosen, places, models = _chosen([p for p in given if p.requires_grad])
        if not models and (model := sharded_model_of(parameters)) is not None:
            models = [model]  # all parameters of a pipeline stage may be frozen
    else:
        if isinstance(parameters, torch.optim.Optimizer):
            given = [p for group in parameters.param_groups for p in group["params"]]
        else:
            given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        chosen, places, models = _chosen(given)
    if not models or models[0].ranks.mesh is None:
        refuse_parts(given if isinstance(parameters, nn.Module) else chosen, "clip_grad_norm_", "their norm")
    if not models:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)
    ranks, device = models[0].ranks, models[0].device
    picked: dict[ShardedModel, dict[Bucket, set[int]]] = {model: {} for model in models}
    beside = [p for p, place in zip(chosen, places, strict=True) if place is None]
    for place in filter(None, places):
        picked[place.flat].setdefault(place.bucket, set()).add(place.index)
    parts: list[torch.Tensor] = []
    for model, buckets in picked.items():
        which = sorted((bucket.number, i) for bucket, some in buckets.items() for i in some)
        model.ranks.announce("clip", more=(which, (max_norm, norm_type, error_if_nonfinite)))
        gradients = [bucket.gradient for bucket in model.order]
        adopt_user_grads(gradients, "clip_grad_norm_")
        sync_grads_from_root(gradients, values=True)
        parts += [part for bucket in model.order for part in _share(bucket, buckets.get(bucket, set()))]
    clipped = [(bucket, some) for buckets in picked.values() for bucket, some in buckets.items()]
    count = sum(bucket.layout.segments[i].numel for bucket, some in clipped for i in some)
    count += sum(p.numel() for p in beside)
    plain = [p.grad for p in beside if p.grad is not None]
    mesh = ranks.mesh
    if ranks.rank == ranks.root:
        parts += [p.grad for p in beside if p.grad is not None and (mesh is None or is_primary_copy(p, mesh))]
    if mesh is not None:  # other ranks have other parts of the model
        alone = ranks.replicas is None or ranks.replicas.rank == 0
        norm = total_norm(parts if alone else [], norm_type, mesh.comm, count, device=device)
    else:
        wide = any(bucket.gradient.dtype in (torch.float64, torch.complex128) for bucket, _ in clipped)
        dtype = torch.float64 if wide else torch.float32
        norm = total_norm(parts, norm_type, ranks.comm, count, dtype=dtype, device=device)
    if beside and ranks.replicas is not None and mesh is None:  # each replica checked only its own gradients
        ranks.broadcast(norm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RingcommError(
            f"clip_grad_norm_: rank {ranks.rank} got a norm of {float(norm)}, expected a finite one; skip the "
            "step, or pass error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scaled = plain
    for model, buckets in picked.items():
        for host in model.optimizers.hosts:
            host.refresh()
            host.wait()  # a copy in flight would overwrite the scaled values
        scaled += [part for bucket, some in buckets.items() for part in _scaled(model, bucket, some)]
    groups = _group_tensors_by_device_and_dtype([scaled]) if scaled else {}
    for (device, dtype), ([alike], _) in groups.items():
        torch._foreach_mul_(alike, factor.to(device, dtype))
    for model, buckets in picked.items():
        for host in model.optimizers.hosts:
            for bucket in buckets:
                host.mark_current(bucket)
    return norm


def _chosen(given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Place | None], list[ShardedModel]]:
    """Returns the parameters to clip, each once, the places of those that are in a bucket with gradients, and the
    sharded models that they belong to."""
    found = list({id(p): p for p in given if p.requires_grad or p.grad is not None}.values())
    places = [place if place is not None and place.bucket.trainable else None for place in map(place_of, found)]
    models = [*dict.fromkeys(place.flat for place in places if place is not None)]
    if models and None in places and not all(model.config.composed for model in models):
        raise InvalidArgumentError(
            f"clip_grad_norm_: rank {models[0].ranks.rank} got wrapped and plain parameters, expected one kind; clip "
            "them one by one, or by one norm of all with torch.nn.utils.clip_grad_norm_"
        )
    if len(models) > 1 and (
        len({(model.ranks.comm, model.ranks.replicas, model.ranks.mesh) for model in models}) > 1
        or any(model.ranks.joining is not None for model in models)
    ):
        raise InvalidArgumentError(
            f"clip_grad_norm_: rank {models[0].ranks.rank} got parameters of {len(models)} wrapped modules that have "
            "different communicators or are inside join, expected one module there; clip them one by one, or by one "
            "norm of all with torch.nn.utils.clip_grad_norm_"
        )
    return found, places, models


def _parts(bucket: Bucket, some: set[int], start: int, end: int, *buffers: torch.Tensor) -> list[torch.Tensor]:
    """Returns the parts of the given segments with a gradient inside a range of the bucket; adjoining parts are joined.

    Args:
        buffers: this rank's range of the bucket, in one or more buffers; the parts are views of them.
    """
    gradient = bucket.gradient
    if not gradient.has_reduced:
        return []
    ranges: list[tuple[int, int]] = []
    offset = start - bucket.start
    for segment, _, at, numel in bucket.layout.fragments(start, end):
        if segment in some and segment in gradient.with_mean:
            first = offset + at
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, offset + at + numel))
    return [buffer[first:last] for first, last in ranges for buffer in buffers]


def _share(bucket: Bucket, some: set[int]) -> list[torch.Tensor]:
    """Returns the gradients that this rank adds to the norm: its shard, even at stage 0 where it has all gradients,
    without parameters that another rank of the mesh counts."""
    some = {i for i in some if bucket.is_primary_copy(i)}
    return _parts(bucket, some, *bucket.layout.shard_range(bucket.ranks.rank), bucket.gradient.reduced)


def _scaled(flat: ShardedModel, bucket: Bucket, some: set[int]) -> list[torch.Tensor]:
    """Returns the tensors to scale: this rank's gradients of the segments, and their copies in host memory."""
    bucket.gradient.changed()
    copies = [host.copy_of(bucket) for host in flat.optimizers.hosts]
    held = [bucket.gradient.reduced, *(copy for copy in copies if copy is not None)]
    return _parts(bucket, some, bucket.start, bucket.end, *held)
