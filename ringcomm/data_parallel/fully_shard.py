"""`ringcomm.fully_shard`: shards a model module by module (stage 3), with the keywords of torch's function of that
name.

    for block in model.blocks:
        ringcomm.fully_shard(block)
    ringcomm.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

Each call makes a unit of the module's parameters, without those that earlier calls on submodules have taken. The last
call, on the outermost module, joins the units. The results have the bits of `ringcomm.shard` at stage 3.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import Mesh, check_is_mesh
from ringcomm.comm.rendezvous import shared_communicator
from ringcomm.data_parallel.buckets.group import DataParallelGroup, ranks_of_mesh, refuse_several
from ringcomm.data_parallel.buckets.layout import Atom
from ringcomm.data_parallel.build import build
from ringcomm.data_parallel.model.deferred_init import InitFn
from ringcomm.data_parallel.model.partition import facts_of, named_parameters
from ringcomm.data_parallel.model.sharded_model import Config, ShardedModel, Unit
from ringcomm.data_parallel.model.unit_module import UnitModule
from ringcomm.errors import InvalidArgumentError, UnsupportedError, shown
from ringcomm.modules.arguments import ATOM, INIT, LAST_STAGE, MODULE, PRECISION, RANKS
from ringcomm.modules.meta import real_device
from ringcomm.modules.notes import ModuleNotes, notes_of
from ringcomm.modules.precision import MixedPrecision
from ringcomm.validation import FLAG, TEXT, Requirement, a, expects, several

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_M = TypeVar("_M", bound="nn.Module | Sequence[nn.Module]")
CommunicatorPair = tuple[Communicator, Communicator]
_NO_LIMIT = 1 << 62  # bytes: so large that a unit is never split into buckets


# ---- methods of a module -----------------------------------------------------------------------------------------


class UnshardHandle:
    """Handle of a gather of parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Returns when the parameters can be read."""
        self._unit.gather()


class FSDPModule(UnitModule):
    """The methods that `fully_shard` adds to a module's class."""

    _ringcomm: ModuleNotes

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's own unit; a collective. With ``async_op`` returns a handle."""
        unit = self._ringcomm.unit
        unit.start_gather()
        if async_op:
            return UnshardHandle(unit)
        unit.gather()
        return None

    def reshard(self) -> None:
        """Frees the other ranks' parameters of this module's own unit."""
        self._ringcomm.unit.release()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether later backward passes reduce gradients; with False they only accumulate on this rank. Only for
        the outermost module."""
        self._everything("set_requires_gradient_sync", recurse).sync.enabled = bool(requires_gradient_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the block only accumulate on this rank; the next one after it reduces the sums."""
        return self._everything("no_sync", True).sync.no_sync()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted, without effect: every backward pass waits for its reductions."""

    def reset_iter_state(self) -> None:
        """Discards the gradients, and the state of a forward or backward pass that raised, as the next forward pass
        would do."""
        self._ringcomm.unit.flat._abandon()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether the parameters are freed between forward and backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = bool(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether the parameters are freed after backward. With False they stay until the optimizer's step."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Sets the modules whose parameters are prefetched when this module's forward begins; the default is the
        module that followed in the last pass. Every rank must name the same modules."""
        self._ringcomm.unit.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Sets the modules whose parameters are prefetched when this module's backward begins; the default is the
        module before it in forward."""
        self._ringcomm.unit.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    def _units(self, recurse: bool) -> list[Unit]:
        modules: Iterable[Any] = self.modules() if recurse and isinstance(self, nn.Module) else [self]
        return [each._ringcomm.unit for each in modules if isinstance(each, FSDPModule)]

    def _everything(self, call: str, recurse: bool) -> ShardedModel:
        """Returns the sharded model, and raises unless this module is its outermost one."""
        flat = self._ringcomm.unit.flat
        if {id(unit) for unit in self._units(recurse)} != {id(unit) for unit in flat.units}:
            raise UnsupportedError(
                f"{call}: rank {flat.ranks.rank} got a part of the sharded module, expected all of it; call it on the "
                "outermost module of fully_shard, with recurse=True"
            )
        return flat


_REFUSED = {
    "set_requires_all_reduce": "gradients are averaged over replicas as soon as over shards",
    "set_custom_all_gather": "the collectives are ringcomm's own",
    "set_custom_reduce_scatter": "the collectives are ringcomm's own",
    "set_all_reduce_hook": "a reduction's result is not shown before backward has ended",
    "set_post_optim_event": "a step and the next gather are ordered already",
    "set_reduce_scatter_divide_factor": "gradients are averaged over all ranks",
    "set_gradient_divide_factor": "gradients are averaged over all ranks",
    "set_force_sum_reduction_for_comms": "the average is one operation here",
    "set_reduce_scatter_unused_params": "unused parameters always take part",
    "set_reduce_scatter_max_input_buffers": "two reductions are in flight at most",
    "set_separate_reduce_scatter_group": "all collectives share one communicator",
    "set_unshard_in_backward": "backward gathers the units that it reaches",
    "set_allocate_memory_from_process_group_for_comm": "buffers are visible to the peers already",
    "set_symm_mem_for_comm": "buffers are visible to the peers already",
}


def _refusal(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        rank = self._ringcomm.unit.flat.ranks.rank
        raise UnsupportedError(
            f"{name}: rank {rank} called a method that has no counterpart here ({why}); leave the call out"
        )

    method.__name__, method.__doc__ = name, f"Raises UnsupportedError: {why}."
    return method


for _name, _why in _REFUSED.items():
    setattr(FSDPModule, _name, _refusal(_name, _why))


_lock = threading.Lock()


def _units_of(modules: Sequence[FSDPModule], call: str) -> list[Unit]:
    for each in modules:
        if not isinstance(each, FSDPModule):
            raise InvalidArgumentError(
                f"{call}: got {type(each).__name__}, which is not a unit of its own, expected modules on which "
                "fully_shard was called; pass such modules"
            )
    return [each._ringcomm.unit for each in modules]


@expects("register_forward_method", module=MODULE, name=TEXT)
def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes another method of a unit's module, such as "encode", gather the parameters as ``forward`` does.

    Nothing happens to a plain module.

    Raises:  InvalidArgumentError: the module has no such method.
    """
    if not isinstance(module, UnitModule):
        return
    method = getattr(module, name, None)
    if not callable(method):
        raise InvalidArgumentError(
            f"register_forward_method: got {shown(name)}, which {type(module).__name__} does not have, expected a "
            "method's name; pass one"
        )
    unit: Unit = notes_of(module).unit

    @wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return unit.call(module, method, args, kwargs)

    unit.undo.append(partial(_put_back, module, name, module.__dict__.get(name)))
    setattr(module, name, forward)


def _put_back(module: nn.Module, name: str, before: Any) -> None:
    """Restores a module's method ``name`` to ``before``."""
    delattr(module, name)
    if before is not None:
        setattr(module, name, before)


# ---- the call ----------------------------------------------------------------------------------------------------


def _modules(value: Any) -> Any:
    found = [value] if isinstance(value, nn.Module) else list(value)
    if not found or not all(isinstance(each, nn.Module) for each in found):
        raise ValueError("there is no module")
    return value if isinstance(value, nn.Module) else found


@expects(
    "fully_shard",
    module=Requirement("a torch.nn.Module or a list of them", _modules),
    ignored_params=several("parameters", a("", nn.Parameter)),
    comm=RANKS,
    mp_policy=PRECISION,
    atom=ATOM,
    broadcast_buffers=FLAG,
    init_fn=INIT,
)
def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[..., Any] | None = None,
    mp_policy: Any = MixedPrecision(),  # noqa: B008  it is frozen
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    comm: Communicator | CommunicatorPair | None = None,
    atom: Atom = "element",
    broadcast_buffers: bool = True,
    init_fn: InitFn | Literal[False] | None = None,
) -> _M:
    """Shards a module's parameters, gradients and optimizer state over all ranks, composed module by module.

    Call it on the submodules first and on the outermost module last, each time with the same ranks. Make the optimizer
    afterwards; it works on the shards from its first step, or its first `ringcomm.shard(model, optimizer)`, on.

    Args:
        module: its parameters that no other call has taken become a unit. A list makes one unit of all its modules,
            which are called one after the other in this order. A module without parameters stays as it is.
        mesh: the ranks; with two axes the first replicates and the second shards.
        reshard_after_forward: whether the parameters are freed between forward and backward; None: True, except for the
            outermost module.
        mp_policy: a MixedPrecision, or torch's MixedPrecisionPolicy. In torch's, a ``reduce_dtype`` of None means
            ``param_dtype``; in ours, it means the master weights' type.
        offload_policy: torch's CPUOffloadPolicy, or True: master weights, optimizer state and step are on the host.
        ignored_params: parameters that stay unsharded on every rank, and whose gradients are not reduced.
        comm: in place of ``mesh``; or a pair of communicators: one over the ranks that share the shards, one over the
            ranks that hold the same shard.
        atom: the unit that a shard boundary must not split; "tensor" for optimizers that need whole tensors.
        broadcast_buffers: whether every synchronised forward pass in training begins with a broadcast of rank 0's
            buffers.
        init_fn: as in `ringcomm.shard`: initialises submodules on the meta device, immediately for the modules of this
            call.
    Returns: ``module``, whose class now has the methods of FSDPModule, unless it has no parameters.
    Raises:  InvalidArgumentError: a module that is already wrapped, or a parameter shared with a module outside.
             UnsupportedError: shard_placement_fn, dp_mesh_dims, an int in reshard_after_forward.
             MismatchError: the ranks have different modules.
    """
    reshard = _reshard(reshard_after_forward)
    _refuse(shard_placement_fn=shard_placement_fn, dp_mesh_dims=dp_mesh_dims)
    modules = [module] if isinstance(module, nn.Module) else list(module)
    top = modules[0] if isinstance(module, nn.Module) else nn.ModuleList(modules)
    ignored = list(ignored_params or ())
    out = {*map(id, ignored)}
    if out.issuperset(map(id, top.parameters())):  # no parameter is to be sharded
        return module
    ranks = _ranks_for(comm, mesh, real_device(top))
    below = _below(top, modules, ranks)
    taken = {id(p): p for unit in below for bucket in unit.buckets for p in bucket.params}
    params = named_parameters(top, "fully_shard", ranks.rank, [*taken.values(), *ignored], meta=True)
    config = Config(
        stage=LAST_STAGE,
        mixed_precision=mp_policy,
        reshard_after_forward=reshard,
        broadcast_buffers=broadcast_buffers,
        atom=atom,
        offload=_host(offload_policy),
        init_fn=init_fn is not False,
    )
    names = [name for name, p in top.named_parameters() if id(p) in out]
    facts = [type(top).__name__, *facts_of(top, names, broadcast_buffers), *config.facts()]
    ranks.agree("fully_shard", facts)
    flat = build(
        top,
        ranks,
        config,
        [("", modules, params, reshard)],
        call="fully_shard",
        mixin=FSDPModule,
        bucket_bytes=_NO_LIMIT,
        atom=atom,
        init_fn=init_fn,
        below=below,
    )
    flat.root.precision = config.mixed_precision
    flat.send_buffers()
    return module


def _reshard(asked: Any) -> bool | None:
    if asked is None or isinstance(asked, bool):
        return asked
    raise UnsupportedError(
        f"fully_shard: got reshard_after_forward={shown(asked)}, expected True, False or None, because parameters are "
        "sharded over all ranks or not at all; pass one of these"
    )


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"fully_shard: got {name}={shown(value)}, expected None, because the flat layout decides how "
                "parameters are sharded, over one or two axes of a mesh; leave it out"
            )


def _below(top: nn.Module, modules: list[nn.Module], ranks: DataParallelGroup) -> list[Unit]:
    """Returns the units of earlier calls on modules below, in the order of the modules."""
    wrong = next((m for m in modules if isinstance(m, FSDPModule)), None)
    if wrong is not None:
        raise InvalidArgumentError(
            f"fully_shard: rank {ranks.rank} got {type(wrong).__name__}, which is sharded already, expected a plain "
            "module; call it once"
        )
    inside = {id(m) for m in top.modules()}
    units = {id(m._ringcomm.unit): m._ringcomm.unit for m in top.modules() if isinstance(m, FSDPModule)}
    for unit in units.values():
        mine = {id(each) for each in unit.flat.units}
        if not mine <= units.keys() or any(id(m) not in inside for m in unit.modules):
            raise InvalidArgumentError(
                f"fully_shard: rank {ranks.rank} got {type(top).__name__}, which is only a part of the module of an "
                "earlier call, expected a module that contains it; call it on submodules first and on the whole last"
            )
        if unit.flat.ranks is not ranks:
            raise UnsupportedError(
                f"fully_shard: rank {ranks.rank} got other ranks than for a submodule, expected the same ranks; pass "
                "the same comm and mesh in every call"
            )
        if unit.flat.optimizers:
            raise InvalidArgumentError(
                f"fully_shard: rank {ranks.rank} got a module whose submodules were trained by an optimizer already, "
                "expected no step before the last call; step after it"
            )
        _refuse_shared(top, unit, ranks.rank)
    return list(units.values())


def _refuse_shared(top: nn.Module, unit: Unit, rank: int) -> None:
    """Raises if a module outside the unit uses one of its parameters, because the parameter would not be unsharded
    there."""
    inside = {id(m) for each in unit.modules for m in each.modules()}
    names = {id(p): name for bucket in unit.buckets for p, name in zip(bucket.params, bucket.names, strict=True)}
    for path, m in top.named_modules():
        for key, p in m._parameters.items():
            if p is not None and id(p) in names and id(m) not in inside:
                raise InvalidArgumentError(
                    f"fully_shard: rank {rank} got {path}.{key}, which shares {names[id(p)]} with a module that an "
                    "earlier call has sharded, expected one call for both; leave that module to an outer call, or pass "
                    "both in a list"
                )


def _host(policy: Any) -> torch.device | None:
    names = {kind.__name__ for kind in type(policy).__mro__}
    if policy is True or "CPUOffloadPolicy" in names:
        return torch.device("cpu")
    if policy is None or policy is False or "OffloadPolicy" in names:
        return None
    raise InvalidArgumentError(
        f"fully_shard: got offload_policy={shown(policy)}, expected None, True or torch's CPUOffloadPolicy; pass one "
        "of these"
    )


# ---- ranks: the same communicator for every call -----------------------------------------------------------------

_known: weakref.WeakKeyDictionary[DataParallelGroup, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _ranks_for(
    comm: Communicator | CommunicatorPair | None, mesh: DeviceMesh | Mesh | None, device: torch.device
) -> DataParallelGroup:
    """Returns the same object as an earlier call with the same arguments whose modules still exist; else a new one."""
    import torch.distributed as dist

    refuse_several("fully_shard", comm=comm, mesh=mesh)
    if mesh is not None:
        check_is_mesh(mesh, "fully_shard")
    source: tuple[Any, ...] = ()
    if comm is not None:
        source = comm if isinstance(comm, tuple) else (comm,)
    elif isinstance(mesh, Mesh):
        source = (mesh,)
    elif mesh is not None:
        source = tuple(mesh.get_group(axis) for axis in range(mesh.ndim))
    elif dist.is_available() and dist.is_initialized():
        source = (dist.group.WORLD,)
    key = (device, *source)
    with _lock:
        known = list(_known.items())
    for ranks, theirs in known:
        if len(key) == len(theirs) and key[0] == theirs[0] and all(map(operator.is_, key[1:], theirs[1:])):
            return ranks
    if comm is not None:
        ranks = DataParallelGroup(*source)
    elif mesh is not None:
        ranks = ranks_of_mesh(mesh, "fully_shard", device, shared=True)
    else:
        ranks = DataParallelGroup(shared_communicator(None, "fully_shard", device))
    with _lock:
        _known[ranks] = key
    return ranks
