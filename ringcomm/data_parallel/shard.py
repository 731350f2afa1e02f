"""`ringcomm.shard`: wraps a model and its optimizer for training at any ZeRO stage; `restage` changes the stage
later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from typing_extensions import TypeVar

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.buckets.bucket import adopt_writes
from ringcomm.data_parallel.buckets.group import DataParallelGroup, ranks_of_mesh, refuse_several
from ringcomm.data_parallel.buckets.layout import Atom
from ringcomm.data_parallel.build import build
from ringcomm.data_parallel.model.deferred_init import InitFn
from ringcomm.data_parallel.model.partition import (
    blocks_of,
    bucket_bytes,
    facts_of,
    named_parameters,
    units_of,
)
from ringcomm.data_parallel.model.place import models_of, sharded_model_of, wrapped_model
from ringcomm.data_parallel.model.sharded_model import Config, ShardedModel
from ringcomm.data_parallel.model.unit_module import UnitModule
from ringcomm.data_parallel.optim.optimizer import (
    attach,
    find_sharded_optimizer,
    is_elementwise,
    refuse_foreign,
    refuse_unusable,
    restage_model,
    unwrap_model,
)
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import (
    ATOM,
    INIT,
    MODULE,
    OFFLOAD,
    OPTIMIZER,
    PRECISION,
    RANKS,
    STAGE,
    UNITS,
    Units,
)
from ringcomm.modules.dynamo import eager
from ringcomm.modules.meta import real_device
from ringcomm.modules.precision import MixedPrecision
from ringcomm.modules.shard_spec import part_of
from ringcomm.validation import FLAG, POSITIVE, expects, one_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ringcomm.comm.mesh import Mesh

CUT = "of a model that is cut over tp or pp pass mesh=, or the communicator of ranks that have the same part"
_Module = TypeVar("_Module", bound=nn.Module)
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer | None, default=None)


@expects(
    "shard",
    module=MODULE,
    stage=STAGE,
    comm=RANKS,
    units=UNITS,
    mixed_precision=PRECISION,
    bucket_cap_mb=POSITIVE,
    reshard_after_forward=FLAG,
    broadcast_buffers=FLAG,
    accumulation=one_of("sequential", "tree"),
    atom=ATOM,
    offload=OFFLOAD,
    init_fn=INIT,
)
def shard(
    module: _Module,
    optimizer: _Optimizer = None,  # type: ignore[assignment]  # then it is None
    stage: int | None = None,
    comm: Communicator | tuple[Communicator, Communicator] | None = None,
    *,
    mesh: DeviceMesh | Mesh | None = None,
    units: Units = None,
    mixed_precision: Any = None,
    bucket_cap_mb: float | None = None,
    reshard_after_forward: bool = True,
    broadcast_buffers: bool = True,
    accumulation: str = "sequential",
    atom: Atom | None = None,
    offload: bool | str | torch.device = False,
    init_fn: InitFn | Literal[False] | None = None,
) -> tuple[_Module, _Optimizer]:
    """Wraps a module and its optimizer for training over all ranks; every stage gives the same bits.

    Afterwards ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``, ``state_dict()`` and
    ``load_state_dict()`` are used as usual; every rank must call them in the same order. Clip with
    `ringcomm.clip_grad_norm_`.

    Args:
        optimizer: a torch.optim optimizer over parameters of the module. Element-wise optimizers work on flat shards,
            others on whole tensors that are distributed over the ranks. None: it is attached later, by another call of
            `shard` or at its first step.
        stage: 0 shards nothing (DDP); 1 optimizer state; 2 gradients too; 3 parameters too. None: 2, or the stage of a
            module that is already wrapped. For such a module only the optimizer is attached, and arguments that
            differ from those of the first call are refused.
        comm: the ranks; None: those of torch.distributed, or of torchrun's environment. A pair of communicators: one
            over the ranks that share the shards, one over the ranks that hold the same shard.
        mesh: in place of ``comm``: a mesh of `init_mesh`, whose axes are known by name; or torch's, in which a single
            axis shards, or the first of two axes replicates and the second shards.
        units: modules, or their classes, whose parameters are communicated together; None: the blocks of the module's
            lists, joined while they are small; if the module is smaller than a bucket, the module itself. Parameters
            outside all units belong to the module's own unit.
        mixed_precision: a MixedPrecision, or a policy of torch's FSDP, `fully_shard` or DDP. In torch's, a
            ``reduce_dtype`` of None means ``param_dtype``; in ours, it means the master weights' type.
        bucket_cap_mb: size of a message in MiB; None: the size at which latency becomes a small part of its time,
            measured now.
        reshard_after_forward: whether stage 3 frees a unit's parameters between forward and backward.
        broadcast_buffers: whether all ranks get rank 0's buffers, now and before every synchronised forward pass in
            training.
        accumulation: how backward passes between two reductions are added: "sequential", or "tree". With "tree",
            if the numbers of passes and of ranks are powers of two, the bits do not depend on the distribution of the
            passes over the ranks.
        atom: the unit that a shard boundary must not split: "element", "row", "tensor" or a number of elements; None:
            what the optimizer needs.
        offload: True: the master weights, the optimizer's state and the step are on the host.
        init_fn: initialises, in place, a submodule whose own parameters or buffers are on the meta device; children
            come before their parents. All ranks get rank 0's values. At stage 3 one block and the module's own unit
            are unsharded at a time. If `ringcomm.parallelize` has split the model, ``init_fn`` gets the unsplit
            submodules. None: ``submodule.reset_parameters()``. False: values are loaded before the first forward pass,
            which raises if some are missing.
    Order:   the mean of a gradient is canonical: its bits depend neither on the stage nor on units and buckets.
    Cost:    each step sends 2 (W-1)/W times the parameters' bytes; stage 3 sends another (W-1)/W.
    Returns: the module and the optimizer, the same objects.
    Raises:  InvalidArgumentError: a wrong argument, a wrapped module, foreign parameters. UnsupportedError: an
             optimizer that cannot be sharded. MismatchError: the ranks have different modules.
    """
    flat = sharded_model_of(module)
    config = Config(
        2 if stage is None else stage, units, mixed_precision or MixedPrecision(), bucket_cap_mb, reshard_after_forward,
        broadcast_buffers, accumulation, atom, _host(offload), init_fn is not False,
    )  # fmt: skip
    if flat is None or optimizer is None:
        flat = _wrap(module, optimizer, _ranks(comm, mesh, module), config, init_fn)
    else:
        _refuse_partly_wrapped(module, flat.ranks.rank)
        init = init_fn if callable(init_fn) else None
        _refuse_other(flat, config, stage=stage, comm=comm, mesh=mesh, mixed_precision=mixed_precision, init_fn=init)
    if optimizer is not None:
        attach(optimizer, flat, "shard")
    return module, optimizer


def _refuse_partly_wrapped(module: nn.Module, rank: int) -> None:
    """Raises for a module with wrapped parameters and others, such as an actor whose encoder was wrapped as a part of
    the critic: the gradients of the others would not be averaged. Parameters that a wrapped model ignores stay as they
    are."""
    known = {id(p) for flat in models_of(module.parameters()) for p in flat.module.parameters()}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    others = [name for name, p in named if id(p) not in known]
    if others:
        wrapped = next(name for name, p in named if id(p) in known)
        raise InvalidArgumentError(
            f"shard: rank {rank} got a {type(module).__name__} with {wrapped}, which is wrapped already, and "
            f"{others[0]}, which is not, expected a module that is wrapped as a whole or a plain one; wrap one module "
            "that holds all of these parameters, or take the other out with ringcomm.unshard first"
        )


def _refuse_other(flat: ShardedModel, config: Config, **others: Any) -> None:
    """Raises for arguments that differ from those with which the module was wrapped. Omitted arguments are not
    compared.

    Args:
        others: arguments that are omitted if they are None; those in ``config``, if they have the default.
    """
    over = flat.ranks.comm if flat.ranks.replicas is None else (flat.ranks.comm, flat.ranks.replicas)
    found = {**vars(flat.config), "stage": flat.stage, "comm": over, "mesh": flat.ranks.mesh}
    defaults = vars(Config())
    given = {name: value for name, value in vars(config).items() if value != defaults[name]}
    given |= {name: value for name, value in others.items() if value is not None}
    for name, value in given.items():
        if value != found[name]:
            raise InvalidArgumentError(
                f"shard: rank {flat.ranks.rank} got {name}={value} for a module that is wrapped with "
                f"{name}={found[name]}, expected the optimizer alone; use ringcomm.restage for another stage, or "
                "unwrap the module with ringcomm.unshard and wrap it again"
            )


def _wrap(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: DataParallelGroup,
    config: Config,
    init_fn: InitFn | Literal[False] | None,
) -> ShardedModel:
    blocks = _blocks(module, config.units)
    asks = config.facts([name for name, _ in blocks])
    params = _checked(module, [block for _, block in blocks], optimizer, ranks, config, asks)
    needed = "element" if optimizer is None or is_elementwise(optimizer) else "tensor"
    cap = bucket_bytes(config.bucket_cap_mb, ranks)
    if _is_one_unit(params, config, cap):
        blocks = []
    groups = [] if optimizer is None else optimizer.param_groups
    flat = build(
        module,
        ranks,
        replace(config, composed=optimizer is None),  # then it may be attached later, as with fully_shard
        units_of(module, params, blocks, config.reshard_after_forward, cap if config.units is None else 0),
        call="shard",
        mixin=UnitModule,
        bucket_bytes=cap,
        atom=needed if config.atom is None else config.atom,
        optimizer_group={id(p): number for number, group in enumerate(groups) for p in group["params"]},
        init_fn=init_fn,
    )
    if config.broadcast_buffers:
        flat.send_buffers()
    return flat


def _checked(
    module: nn.Module,
    units: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    ranks: DataParallelGroup,
    config: Config,
    asks: list[str],
) -> list[tuple[str, nn.Parameter]]:
    """Returns the module's parameters, after checking that it and the optimizer can be sharded and that all ranks
    ask for the same."""
    if optimizer is not None:
        refuse_unusable(optimizer, "shard", ranks.rank, config.stage)
    for each in [module, *units]:
        if isinstance(each, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"shard: rank {ranks.rank} got the unit {type(each).__name__}, a scripted module, which takes no "
                "hooks, expected a module that holds it; shard that, or script nothing"
            )
    params = named_parameters(module, "shard", ranks.rank, meta=True)
    if not params:
        raise InvalidArgumentError(
            f"shard: rank {ranks.rank} got a module without parameters, expected at least one; call the module itself"
        )
    if optimizer is not None:
        refuse_foreign(optimizer, module, "shard", ranks.rank)
    partial = ranks.mesh is None and any(part_of(p).is_partial for _, p in params)
    ranks.agree("shard", facts_of(module, sends_buffers=config.broadcast_buffers), CUT if partial else "")
    ranks.agree("shard", [*asks, *_groups_of(optimizer, params)])
    return params


def _groups_of(optimizer: torch.optim.Optimizer | None, params: list[tuple[str, nn.Parameter]]) -> list[str]:
    """Returns the facts about an optimizer that ranks must agree on, one line per parameter group."""
    names = {id(p): name for name, p in params}
    kind = type(optimizer).__name__
    return [
        f"group {number} of {kind} with {', '.join(names.get(id(p), 'another') for p in group['params'])}"
        for number, group in enumerate(optimizer.param_groups if optimizer is not None else ())
    ]


def _is_one_unit(params: list[tuple[str, nn.Parameter]], config: Config, cap: int) -> bool:
    """Whether all parameters fit into one bucket, so that one message replaces several short ones. Not if the inputs of
    units are cast: then results would depend on the size of a bucket, which is measured."""
    if config.units is not None or config.bucket_cap_mb is not None:
        return False
    return config.mixed_precision.input_dtype(root=False) is None and sum(p.nbytes for _, p in params) <= cap


def _ranks(
    comm: Communicator | tuple[Communicator, Communicator] | None, mesh: DeviceMesh | Mesh | None, module: nn.Module
) -> DataParallelGroup:
    refuse_several("shard", comm=comm, mesh=mesh)
    device = real_device(module)
    if mesh is not None:
        return ranks_of_mesh(mesh, "shard", device)
    if isinstance(comm, tuple):
        return DataParallelGroup(*comm)
    return DataParallelGroup(comm if comm is not None else communicator_of(None, "shard", device))


def _host(offload: bool | str | torch.device) -> torch.device | None:
    if offload is False:
        return None
    return torch.device("cpu") if offload is True else torch.device(offload)


def _blocks(module: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    if units is None:
        return blocks_of(module)
    names = {id(each): name for name, each in module.named_modules()}
    if isinstance(units, tuple):
        return [(name, each) for name, each in module.named_modules() if isinstance(each, units) and each is not module]
    for each in units:
        if id(each) not in names:
            raise InvalidArgumentError(
                f"shard: got the unit {type(each).__name__}, which is not in the module; pass submodules of it"
            )
    return [(names[id(each)], each) for each in units]


@expects("restage", module=MODULE, stage=STAGE)
def restage(module: nn.Module, optimizer: torch.optim.Optimizer | None, stage: int) -> None:
    """Moves a sharded module and its optimizer's state to another stage, between two steps; a collective.

    Training continues with the same bits. Gradients are dropped, as by ``zero_grad()``.

    Cost:    an all-gather of what was sharded. Every rank temporarily holds the optimizer's whole state.
    Raises:  InvalidArgumentError: the module is not sharded, or the optimizer is not its own. MismatchError: the ranks
             name different stages.
    """
    flat = wrapped_model(module, "restage")
    sharded = find_sharded_optimizer(optimizer)
    if optimizer is not None and (sharded is None or sharded.optimizer not in flat.optimizers):
        attach(optimizer, flat, "restage")
    flat.ranks.agree("restage", [f"stage={stage}"])
    restage_model(flat, stage)


@expects("unshard", module=MODULE, optimizer=OPTIMIZER)
def unshard(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Unwraps a module that `shard`, `fully_shard` or DistributedDataParallel has wrapped, and all its optimizers,
    between two steps; a collective.

    Parameters and ``p.grad`` become unsharded tensors with their own memory, in the type that the module was built in,
    with the master weights' values. Optimizers keep their whole state. The module can be changed and wrapped again.

    Args:
        optimizer: checked to be one of the module's; None: no check.
    Cost:    an all-gather of what was sharded; every rank holds everything.
    Returns: the module; for DistributedDataParallel the module inside.
    Raises:  InvalidArgumentError: the module is not wrapped, or is only a part of a wrapped module; or the optimizer is
             not its own.
             UnsupportedError: inside of `join`.
    """
    from ringcomm.data_parallel.ddp import DistributedDataParallel

    inner = module.module if isinstance(module, DistributedDataParallel) else module
    flat = wrapped_model(inner, "unshard")
    flats = models_of(inner.parameters())
    if optimizer is not None:
        refuse_foreign(optimizer, inner, "unshard", flat.ranks.rank)
    mine = {id(p) for p in inner.parameters()}
    for each in flats:
        named = [pair for bucket in each.buckets for pair in zip(bucket.names, bucket.params, strict=True)]
        missing = [name for name, p in named if id(p) not in mine]
        if missing:
            raise InvalidArgumentError(
                f"unshard: rank {flat.ranks.rank} got a {type(inner).__name__} without {missing[0]}, a part of what "
                "was wrapped, expected all of it; pass the outermost module"
            )
    for each in flats:
        each.ranks.agree("unshard", ["unshard"])
        unwrap_model(each)
    return inner


@expects("stage_of", module=MODULE)
def stage_of(module: nn.Module) -> int:
    """Returns the stage of a sharded module."""
    return wrapped_model(module, "stage_of").stage


@eager
@expects("no_sync", module=MODULE)
def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes of a sharded module inside the block only accumulate on this rank, at every stage; the next one
    after it reduces the sums. Until then stages 2 and 3 hold unsharded gradients."""
    return wrapped_model(module, "no_sync").sync.no_sync()


@eager
@expects("whole", module=MODULE)
@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside the block, the parameters of a sharded module, or of a part of it, are ordinary tensors; a collective.
    Calls of the module inside gather and send nothing, so ranks may evaluate or generate any number of times. Entering
    sends rank 0's buffers, as the next forward pass would.

    Writes into the parameters are kept, as outside of the block: write the same values on every rank.
    """
    flat = wrapped_model(module, "whole")
    flat.recover()
    mine = {id(p) for p in module.parameters()}
    units = [unit for unit in flat.units if any(id(p) in mine for bucket in unit.buckets for p in bucket.params)]
    sharded = [unit for unit in flat.units if not unit.is_unsharded]
    if sharded:
        flat.timed(flat.ranks.barrier)
    for unit in units:
        unit.gather()
    try:
        with torch.no_grad(), flat.holding():
            yield
    finally:
        try:
            adopt_writes([bucket for unit in units for bucket in unit.buckets if bucket.is_unsharded], "whole")
            for unit in sharded if not flat.gathered.graph_needs else ():
                unit.release()
        finally:
            flat.use_sharded_classes()
