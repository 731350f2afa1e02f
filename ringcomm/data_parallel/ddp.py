"""
Data parallel training: every rank computes on its own data, and gradients are averaged while backward is still running.

    backward:    grad of last layer done ... grad of first layer done     end of backward
    bucket 0     [all gradients arrived] -> all_reduce(avg), asynchronous ---+
    bucket 1                  [all arrived] -> all_reduce(avg) --------------+-> wait for all

`DistributedDataParallel` is stage 0 of `ringcomm.shard` with torch's name and arguments. `NaiveDataParallel` is the
older parameter server scheme: one rank receives all gradients and sends the means back.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.utils._pytree import tree_map

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import check_is_mesh
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.group import DataParallelGroup, ranks_of_mesh, refuse_several
from ringcomm.data_parallel.build import build
from ringcomm.data_parallel.comm_hook import CommHook, start_hook
from ringcomm.data_parallel.join import enter, join, leave, shadow
from ringcomm.data_parallel.model.partition import (
    bucket_bytes,
    facts_of,
    named_parameters,
)
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.data_parallel.model.sharded_model import Config, ShardedModel
from ringcomm.data_parallel.model.unit_module import is_asked_to_wrap
from ringcomm.data_parallel.optim.optimizer import unwrap_model
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import DEVICE, DEVICES, MODULE, PRECISION
from ringcomm.modules.dynamo import skipped
from ringcomm.modules.meta import real_device
from ringcomm.modules.notes import notes_of
from ringcomm.modules.precision import MixedPrecision
from ringcomm.validation import COMMUNICATOR, FLAG, INTEGER, NOT_NEGATIVE, a, expects

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

CALL = "DistributedDataParallel"
Devices = Sequence[int | str | torch.device]


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that plain ``loss.backward()`` leaves the mean of all ranks' gradients on every rank.

    Takes torch.nn.parallel.DistributedDataParallel's arguments; the second argument may also be a communicator.
    Parameters and buffers that the module names in ``_ddp_params_and_buffers_to_ignore`` stay as they are on each rank.
    Every rank must make the same number of backward passes outside ``no_sync``, unless it is inside ``join``. A
    parameter that a pass does not use counts as a zero gradient; if no rank uses a parameter, its ``grad`` stays as it
    was. The optimizer is an ordinary one over ``parameters()``; if ``mixed_precision`` sets ``param_dtype``, it works
    on the master weights from its first step on. Call ``ringcomm.shard(model, optimizer)`` to attach the optimizer, so
    that `ringcomm.restage` can move its state and ``join`` keeps it equal on all ranks.

    Args:
        module: must be on its device already. Its parameters become views of flat buffers, in the same memory format.
        comm: a Communicator; a list is taken as ``device_ids``; None: a communicator over ``process_group``, else over
            torch.distributed's default group, else ``ringcomm.init()`` from torchrun's environment.
        output_device: None, or the module's device.
        dim: must be 0.
        broadcast_buffers: whether all ranks get rank 0's buffers, now and before every synchronised forward pass in
            training; None: True.
        init_sync: whether the ranks' modules are compared and all ranks get rank 0's parameters and buffers. False: the
            caller guarantees that they are equal.
        process_group: a group of torch.distributed, in place of ``comm``. If the group serves several devices, the
            module may lie on several devices, too.
        bucket_cap_mb: largest size of a bucket in MiB, unless one parameter is larger; None: the size at which latency
            becomes a small part of a bucket's time, measured now.
        find_unused_parameters, static_graph, skip_all_reduce_unused_params: accepted, and not needed: every pass finds
            its unused parameters.
        gradient_as_bucket_view, batched_grad_copy: accepted, and not needed: gradients are views of the buckets.
        check_reduction: accepted and ignored, as in torch.
        delay_all_reduce_named_params, param_to_hook_all_reduce, bucket_cap_mb_list: refused.
        mixed_precision: ringcomm.MixedPrecision, or torch's. In torch's, a ``reduce_dtype`` of None means
            ``param_dtype``; in ours, it means the master weights' type.
        device_mesh: a mesh with one axis, in place of ``process_group``.
        forward_sync_buffers: like ``broadcast_buffers``, for the forward passes alone; it takes precedence.
        device_ids: None, or a list of the module's one device; inputs are moved there.
    Order:   the communicator's: canonical on the CPU engine, where ``bucket_cap_mb`` does not change the bits.
    Cost:    per backward pass, one all_reduce of the gradients, overlapped with it, and one of a byte per parameter.
    Raises:  InvalidArgumentError: no parameter to train, a module that is already wrapped, contradictory arguments.
             UnsupportedError: an argument that is refused. MismatchError: the ranks have different modules.
    """

    @expects(
        CALL,
        module=MODULE,
        output_device=DEVICE,
        dim=INTEGER,
        broadcast_buffers=FLAG,
        init_sync=FLAG,
        bucket_cap_mb=NOT_NEGATIVE,
        mixed_precision=PRECISION,
        bucket_cap_mb_list=a("a list", list, tuple),
        forward_sync_buffers=FLAG,
        device_ids=DEVICES,
    )
    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | Devices | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        device_ids: Devices | None = None,
    ) -> None:
        super().__init__()
        self._join_config = _JoinConfig.construct_disabled_join_config()  # normally set by Joinable.__init__
        self._join_hook: _JoinHook | None = None
        if comm is not None and not isinstance(comm, Communicator):
            comm, device_ids = None, _only(device_ids, comm)
        _refuse(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            bucket_cap_mb_list=bucket_cap_mb_list or None,
            dim=dim or None,
        )
        ranks = _ranks(module, comm, process_group, device_mesh)
        self.comm = ranks.comm
        self.device_mesh = device_mesh
        self.process_group = process_group if comm is None else None
        if comm is None and process_group is None:
            self.process_group = _default_group() if device_mesh is None else device_mesh.get_group()
        self._inputs_to = _device_of(module, ranks.rank, device_ids, output_device)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_forward_param_sync = True  # Accelerate and Lightning save, set and restore it; nothing reads it
        sends = broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        self._config = Config(0, None, mixed_precision or MixedPrecision(), bucket_cap_mb, broadcast_buffers=sends)
        _unwrap(module)
        self._made = _flat(module, ranks, self._config, init_sync)
        if init_sync and (sends or forward_sync_buffers is not None):
            self._made.send_buffers()
        self.module = module

    @property
    def _flat(self) -> ShardedModel:
        """The wrapped module's state. A copied or unwrapped module gets a new state at its next use."""
        if self._made is None or self._made.unwrapped:
            comm = None if self.comm is None or self.comm.closed else self.comm
            ranks = _ranks(self.module, comm, None, None)
            self.comm = ranks.comm
            _unwrap(self.module)
            self._made = _flat(self.module, ranks, self._config, False)
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy. The copy is wrapped again when it is first trained; an unpickled copy is
        wrapped over torch's default group."""
        gone = ("_made", "comm", "process_group", "device_mesh", "_join_hook")
        return {**super().__getstate__(), **dict.fromkeys(gone)}

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.comm, twin.process_group, twin.device_mesh = self.comm, self.process_group, self.device_mesh
        return twin

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names that torch's DistributedDataParallel reads from a module that it wraps."""
        if not is_asked_to_wrap():
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise InvalidArgumentError(
            f"DistributedDataParallel: got a module that ringcomm.{CALL} has wrapped, expected a plain one: gradients "
            "would be averaged twice; wrap it once (a Trainer or accelerate wraps it, so pass the module itself)"
        )

    @skipped
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        device = self._inputs_to
        if device is not None:
            args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        if self._join_hook is not None and self._join_config.enable:
            self._join_hook.enter()
        made = self._made is not None and not self._made.unwrapped
        if not made and not (self.training and torch.is_grad_enabled()):  # a copy that is only evaluated
            return self.module(*args, **kwargs)
        output = self._flat.root.call(self.module, self.module.__call__, args, kwargs)
        if torch.is_grad_enabled():
            self._flat.sync.decide()
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes of forward passes inside the block only accumulate gradients on this rank. The next backward
        pass, of a forward pass after the block, averages the sums."""
        return self._flat.sync.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Lets the ranks have different numbers of inputs inside the block: see `ringcomm.join`."""
        return join(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    def join_hook(self, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """Returns the hook for torch.distributed.algorithms.Join over this model, and over optimizers of
        `ZeroRedundancyOptimizer` that step its parameters."""
        self._join_hook = _JoinHook(self, divide_by_initial_world_size)
        return self._join_hook

    @property
    def join_device(self) -> torch.device:
        """The device of the tensor in which torch's Join counts the ranks that still have input."""
        return self._flat.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which torch's Join counts the ranks that still have input: this rank alone."""
        return self._flat.ranks.alone

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Replaces the buckets' all_reduce by ``hook(state, bucket)``, a hook of torch's form. Can be called once.

        torch's own hooks send through torch.distributed, so they need a process group. The tensor that the hook returns
        is used as the mean of all ranks without further scaling.
        """
        flat = self._flat
        where = f"register_comm_hook: rank {flat.ranks.rank}"
        if not callable(hook):
            raise InvalidArgumentError(f"{where} got {type(hook).__name__}, expected a function; pass (state, hook)")
        if flat.sync.hook is not None:
            raise InvalidArgumentError(f"{where} got a second hook, expected one; wrap both in a function")
        if flat.stage:
            raise UnsupportedError(
                f"{where} got a module of stage {flat.stage}, expected 0; restage it, or use no hook"
            )
        flat.sync.hook = partial(start_hook, state, hook)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward pass of the next forward pass averages the gradients; False inside ``no_sync``."""
        return self._flat.sync.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._flat.sync.enabled = value

    @property
    def reducer(self) -> Any:
        """The methods of torch's Reducer that Accelerate and Lightning call around a backward pass. Every backward
        pass finds the parameters that it uses by itself, so these methods only set whether it averages them."""
        flat = self._flat
        return SimpleNamespace(
            prepare_for_backward=lambda outputs: setattr(flat.sync, "reduces_next_backward", True),
            _rebuild_buckets=lambda: False,
            _delay_all_reduce=lambda: None,
        )

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Returns what torch's method of the same name returns; Lightning's Trainer reads it at its end."""
        flat = self._flat
        return {
            "module_name": type(self.module).__name__,
            "rank": flat.ranks.rank,
            "world_size": flat.ranks.world_size,
            "bucket_sizes": ", ".join(str(sum(p.nbytes for p in bucket.params)) for bucket in flat.order),
            "broadcast_buffers": int(flat.sync.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
        }

    def _set_static_graph(self) -> None:
        """Accepted, as ``static_graph`` is."""
        self.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Sets the names that a later wrapping of ``module`` ignores, like torch's method of the same name."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    @property
    def broadcast_buffers(self) -> bool:
        """Whether every synchronised forward pass in training begins with a broadcast of rank 0's buffers."""
        return self._flat.sync.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._flat.sync.broadcast_buffers = value

    forward_sync_buffers = broadcast_buffers

    @property
    def communication_seconds(self) -> float:
        """The time that this thread has spent in calls and waits of collectives."""
        return self._flat.communication_seconds

    @communication_seconds.setter
    def communication_seconds(self, value: float) -> None:
        self._flat.communication_seconds = value

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order of their reductions."""
        return list(self._flat.order)


class _JoinHook(JoinHook):
    """Lets a model be trained inside of torch.distributed.algorithms.Join, as inside of `join`."""

    def __init__(self, model: DistributedDataParallel, over_all: bool) -> None:
        self.model, self.over_all = model, over_all
        self.flat: ShardedModel | None = None  # while the ranks are inside

    def enter(self) -> None:
        """Called before this rank's first pass, or at its end if it has no input."""
        if self.flat is None:
            flat = self.model._flat
            enter(flat, self.over_all, self.model._join_config.throw_on_early_termination)
            self.flat = flat

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when this rank has no more input: takes part in the others' collectives until no rank has input."""
        del is_last_joiner
        self.enter()
        assert self.flat is not None
        try:
            shadow(self.flat)
        finally:
            leave(self.flat)
            self.model._join_hook = None


def _default_group() -> dist.ProcessGroup | None:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"{CALL}: got {name}={type(value).__name__}, which is not supported: buckets follow the order of the "
                "parameters and have one size, and the module is on one device; leave it out"
            )


def _only(device_ids: Devices | None, positional: Any) -> Any:
    if device_ids is not None:
        raise InvalidArgumentError(f"{CALL}: got device_ids twice, expected them once; leave one out")
    if not isinstance(positional, (list, tuple)):
        raise InvalidArgumentError(
            f"{CALL}: got {type(positional).__name__} as the second argument, expected a Communicator, or a list of "
            "one device; pass one of these, or a process group as process_group="
        )
    return positional


def _ranks(
    module: nn.Module, comm: Communicator | None, group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> DataParallelGroup:
    refuse_several(CALL, comm=comm, process_group=group, device_mesh=mesh)
    device = real_device(module)
    if mesh is not None:
        check_is_mesh(mesh, CALL)
        if mesh.ndim != 1:
            raise InvalidArgumentError(f"{CALL}: got a mesh of {mesh.ndim} axes, expected one; pass mesh[name]")
        return ranks_of_mesh(mesh, CALL, device)
    return DataParallelGroup(comm if comm is not None else communicator_of(group, CALL, device))


def _device_of(module: nn.Module, rank: int, device_ids: Devices | None, output: Any) -> torch.device | None:
    """Returns the device that inputs are moved to; None: they are not moved."""
    here = {str(p.device): p.device for p in module.parameters()}
    for name, given in (("device_ids", device_ids), ("output_device", None if output is None else [output])):
        wanted = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in given or ()]
        if wanted and (len(wanted) > 1 or [str(wanted[0])] != list(here)):
            raise InvalidArgumentError(
                f"{CALL}: rank {rank} got {name}={[str(each) for each in wanted]} for a module on {', '.join(here)}, "
                "expected its one device; move the module there, or leave it out"
            )
    return next(iter(here.values())) if device_ids else None


def _unwrap(module: nn.Module) -> None:
    """Unwraps a module that another DistributedDataParallel holds, which wraps the module again at its next use."""
    flat = sharded_model_of(module)
    if flat is not None and flat.module is module and notes_of(module).unit is None and not flat.optimizers:
        unwrap_model(flat)


def _flat(module: nn.Module, ranks: DataParallelGroup, config: Config, init_sync: bool) -> ShardedModel:
    """Makes the module's only unit."""
    ignored = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    params = named_parameters(module, CALL, ranks.rank, [p for n, p in module.named_parameters() if n in ignored])
    if not any(p.requires_grad for _, p in params):
        raise InvalidArgumentError(
            f"{CALL}: rank {ranks.rank} got a module without parameters that require a gradient, expected at least "
            "one; call the module itself"
        )
    if init_sync:
        facts = facts_of(module, ignored, config.broadcast_buffers)
        ranks.agree(CALL, [*facts, *config.facts(), f"ignored={sorted(ignored)}"])
    return build(
        module,
        ranks,
        config,
        [("", [module], params, False)],
        call=CALL,
        mixin=None,
        bucket_bytes=bucket_bytes(config.bucket_cap_mb, ranks),
        atom="element",
        send=init_sync,
        ignored_buffers=ignored,
    )


class NaiveDataParallel(nn.Module):
    """Data parallel training over a parameter server, for teaching and comparison.

    After backward, the gradients go to rank 0 one at a time; rank 0 adds them up and sends the mean back. Nothing
    overlaps with backward, gradients are not packed into buckets, and rank 0 receives and sends everything.

    Args:
        comm: the communicator; None: ``ringcomm.init()``.
    Cost:    a reduce and a broadcast per parameter: rank 0 moves 2 (W-1) times the parameter's bytes,
             every other rank 2 times.
    """

    @expects("NaiveDataParallel", module=MODULE, comm=COMMUNICATOR)
    def __init__(self, module: nn.Module, comm: Communicator | None = None) -> None:
        super().__init__()
        self.module = module
        self.comm = comm if comm is not None else communicator_of(None, "NaiveDataParallel")
        self._sync, self._waiting = True, False
        for x in [*module.parameters(), *module.buffers()]:
            self.comm.broadcast(x.detach(), 0)
        # A weak reference, because the garbage collector does not see the references of these hooks.
        arrived = weakref.WeakMethod(self._arrived)

        def hook(p: torch.Tensor) -> None:
            alive = arrived()
            if alive is not None:
                alive(p)

        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward."""
        self._waiting = False  # also resets it after a backward pass that raised
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block only accumulate on this rank; the next one after it averages the sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _arrived(self, _: torch.Tensor) -> None:
        if self._sync and not self._waiting:
            self._waiting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Averages the gradients at the end of backward. A missing gradient counts as zero."""
        self._waiting = False
        for p in self.module.parameters():
            if p.requires_grad:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.comm.reduce(grad, 0, "sum")
                if self.comm.rank == 0:
                    grad.div_(self.comm.world_size)
                self.comm.broadcast(grad, 0)
                p.grad = grad
