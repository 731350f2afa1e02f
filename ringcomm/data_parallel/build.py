"""Wraps a module: the common part of `shard`, `fully_shard` and DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

from torch import nn

from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import Atom
from ringcomm.data_parallel.model.deferred_init import InitFn, MetaModules
from ringcomm.data_parallel.model.partition import (
    UnitParts,
    cast_buffers,
    kept_in_their_type,
    make_units,
    restore_buffers,
)
from ringcomm.data_parallel.model.place import set_places
from ringcomm.data_parallel.model.saved_parameter import saving_references
from ringcomm.data_parallel.model.sharded_model import Config, ShardedModel, Unit
from ringcomm.data_parallel.model.state import keep_state_of
from ringcomm.data_parallel.model.unit_module import UnitModule, mix_in
from ringcomm.data_parallel.optim.optimizer import watch_optimizers
from ringcomm.errors import user_stacklevel
from ringcomm.modules.meta import device_of


def build(
    module: nn.Module,
    ranks: DataParallelGroup,
    config: Config,
    parts: Sequence[UnitParts],
    *,
    call: str,
    mixin: type[UnitModule] | None,
    bucket_bytes: int,
    atom: Atom,
    optimizer_group: Mapping[int, int] | None = None,
    init_fn: InitFn | Literal[False] | None = None,
    send: bool = True,
    below: Sequence[Unit] = (),
    ignored_buffers: Collection[str] = (),
) -> ShardedModel:
    """Moves a module's parameters into buckets; a collective.

    Args:
        parts: the names, modules and parameters of the units.
        mixin: a base class that the classes of the units' modules get; None: the module is called through a wrapper.
        optimizer_group: by id of a parameter, the index of its optimizer group.
        send: whether all ranks get the first rank's parameters.
        below: units that earlier calls have made of submodules; they come first.
        ignored_buffers: names of buffers that stay as they are on each rank.
    """
    device = device_of(ranks.comm, module)
    params = {id(p) for _, _, named, _ in parts for _, p in named}
    on_meta = MetaModules(module, params, device, init_fn, call, ranks.rank)
    units = make_units(
        parts,
        config,
        ranks,
        most_bytes=bucket_bytes,
        atom=atom,
        optimizer_group=optimizer_group or {},
        kept=kept_in_their_type(module),
        send=send,
        device=device,
    )
    on_meta.initialise([unit.buckets for unit in units])
    inner = [*dict.fromkeys(each.flat for each in below)]
    _detach_units(module, below, inner)
    flat = ShardedModel(module, ranks, [*below, *units], config, ignored_buffers, saving_references)
    set_places(flat)
    cast = cast_buffers(module, config.mixed_precision.buffer_dtype, ignored_buffers, [each.module for each in inner])
    flat.root.undo.append(partial(restore_buffers, cast))
    if on_meta.init is None:
        flat.contents.missing_params, flat.contents.missing_buffers = on_meta.params, on_meta.buffers
    for each in inner:
        flat.contents.missing_params |= each.contents.missing_params
        flat.contents.missing_buffers += each.contents.missing_buffers
    for unit in units:
        for m in unit.modules:
            keep_state_of(m, unit, flat.buckets if m is module and not below else unit.buckets)
            if mixin is not None:
                mix_in(m, unit, mixin)
    watch_optimizers()
    if flat.stage > 0 and ranks.world_size > 1:
        _advise_against_max_norm(module, ranks)
    return flat


def _detach_units(module: nn.Module, below: Sequence[Unit], inner: Sequence[ShardedModel]) -> None:
    """Takes the units of earlier calls out of the models that those calls have made."""
    if not below:
        return
    for flat in inner:
        flat.detach()
    names = {id(p): name for name, p in module.named_parameters()}
    paths = {id(m): name for name, m in module.named_modules()}
    for each in below:
        each.reshard_after_forward = each.reshard_after_forward is not False
        each.name = paths[id(each.modules[0])]
        for bucket in each.buckets:
            bucket.rename(names)


def _advise_against_max_norm(module: nn.Module, ranks: DataParallelGroup) -> None:
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.max_norm is not None:
            warnings.warn(
                f"shard: rank {ranks.rank} got {name or 'the model'}, of class {type(each).__name__} with max_norm, "
                "whose forward rescales the rows that this rank looks up, so the weights differ between the ranks and "
                "the result depends on the stage, expected no max_norm; rescale the weight after step(), on every rank",
                stacklevel=user_stacklevel(),
            )
