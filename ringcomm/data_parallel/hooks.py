"""Hooks that replace only the collectives of torch's own FSDP2 and DDP: these send their bytes through a communicator,
whatever the backend of their process group.

    model = fully_shard(model)                       # or torch.nn.parallel.DistributedDataParallel(model)
    ringcomm.hooks.attach(model)                     # a communicator beside the process group
"""

# No `from __future__ import annotations`: torch compares a DDP hook's annotations with classes, not strings.
import ctypes
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api

from ringcomm.arrays import libraries
from ringcomm.arrays.devices import Device
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import beside
from ringcomm.data_parallel.buckets.group import unversioned
from ringcomm.errors import DeviceError, InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import MODULE
from ringcomm.validation import COMMUNICATOR, expects

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.PREMUL_SUM: "premul_sum"}


# ---- FSDP2 -------------------------------------------------------------------------------------------------------


def _lent(base: torch.Tensor, unused: list[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of ``base`` as a separate tensor; when that tensor is freed, ``base`` returns to ``unused``."""
    memory: Any
    if base.is_cuda:
        memory = libraries.DeviceMemory(base.data_ptr(), base.nbytes, Device("cuda", base.device.index))
        tensor = torch.as_tensor(memory, device=base.device)
    else:
        memory = (ctypes.c_char * base.nbytes).from_address(base.data_ptr())
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
    weakref.finalize(memory, unused.append, base).atexit = False
    return tensor


class _Work(dist.Work):  # FSDP2 calls only `wait`
    """Wraps one of our calls in flight as a torch Work."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the call: on the cpu the host waits, on a device the current stream."""
        self._work.wait(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return bool(self._work.done)


class _PooledCommunicator:
    """A communicator, and a pool of its memory. FSDP2 asks for the same few sizes again and again.

    A buffer returns to the pool when the last tensor over it is gone. It is lent again only for the same number of
    bytes and the same stream, so that work still enqueued there runs first.
    """

    @expects("hooks", comm=COMMUNICATOR)
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._unused: dict[tuple[int, int], list[torch.Tensor]] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns uninitialised memory of the communicator, which peers use in place.

        Cost:    an allocation the first time that a number of bytes is asked for. Later calls reuse returned memory,
                 which is kept until this object is freed.
        Raises:  DeviceError: ``device`` is not the communicator's.
        """
        shape = tuple(int(n) for n in size)
        if not self.comm.lends_memory:
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return self._fits(self.comm.empty(shape, dtype=dtype, like="torch"), device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        unused = self._unused.setdefault((nbytes, stream), [])
        try:
            base = unused.pop()
        except IndexError:
            base = self._fits(self.comm.empty(nbytes, dtype=torch.uint8, like="torch"), device)
        return _lent(base, unused).view(dtype).view(shape)

    def _fits(self, base: torch.Tensor, device: torch.device) -> torch.Tensor:
        if base.device.type != device.type or device.index not in (None, base.device.index):
            raise DeviceError(
                f"allocate: rank {self.comm.rank} got device {device}, expected {base.device}, which its communicator "
                f"serves; make one with ringcomm.init(device={str(device)!r})"
            )
        return base

    def _check(self, call: str, group: dist.ProcessGroup) -> None:
        _check_ranks(call, self.comm, group, "attach with comm=None, or reshard_after_forward=True or False")


class AllGather(_PooledCommunicator, _fsdp_api.AllGather):
    """FSDP2's all-gather through a communicator, for ``FSDPModule.set_custom_all_gather``.

    Args:
        comm: a communicator of the same ranks, in the same order, as the process group over which the module is
            sharded.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers every rank's ``input_tensor`` (n), in rank order, into ``output_tensor`` (W*n); ``input_tensor`` may
        be a part of it.

        Cost:    (W-1)/W of the bytes each way; on a device it runs on the current stream.
        Returns: a Work if ``async_op``, else None.
        Raises:  InvalidArgumentError: ``group`` has other ranks than the communicator.
        """
        self._check("all_gather", group)
        with unversioned(output_tensor):
            work = self.comm.all_gather(input_tensor, out=output_tensor, async_op=async_op)
        return _Work(work) if async_op else None


class ReduceScatter(_PooledCommunicator, _fsdp_api.ReduceScatter):
    """FSDP2's reduce-scatter through a communicator, for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        comm: a communicator of the same ranks, in the same order, as the process group over which the module is
            sharded.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces all ranks' ``input_tensor`` (W*n) and writes part r of the result into rank r's ``output_tensor``
        (n).

        Args:    op: SUM, AVG or PREMUL_SUM.
        Order:   the communicator's: canonical on an engine of ours, so that the bits do not depend on the layout.
        Cost:    (W-1)/W of the bytes each way; on a device it runs on the current stream.
        Returns: a Work if ``async_op``, else None.
        Raises:  UnsupportedError: another op. InvalidArgumentError: ``group`` has other ranks than the communicator.
        """
        self._check("reduce_scatter", group)
        kind, factor = self._reduction(op)
        with unversioned(output_tensor):
            work = self.comm.reduce_scatter(input_tensor, kind, out=output_tensor, factor=factor, async_op=async_op)
        return _Work(work) if async_op else None

    def _reduction(self, op: Any) -> tuple[str, float | None]:
        """Returns our name of torch's op, and its factor."""
        kind = getattr(op, "op", op)  # a ReduceOp, or only its enum value
        if kind not in _OPS:
            name = str(kind).rpartition(".")[2]
            raise UnsupportedError(
                f"reduce_scatter: rank {self.comm.rank} got op {name}, expected SUM, AVG or PREMUL_SUM, the ops that "
                "FSDP2 uses; call Communicator.reduce_scatter for others"
            )
        if kind != dist.ReduceOp.PREMUL_SUM:
            return _OPS[kind], None
        return _OPS[kind], float(op.factor)


# ---- DDP ---------------------------------------------------------------------------------------------------------

_waiters: weakref.WeakKeyDictionary[Communicator, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_streams: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages all ranks' bucket through a communicator while backward continues; for DDP's ``register_comm_hook``.

    Order:   the communicator's: canonical on an engine of ours, where the bits do not depend on the buckets.
    Cost:    one all_reduce in place: 2 (W-1)/W of the bytes each way. On the cpu one thread per communicator waits for
             the calls; on a device they run on their own stream.
    Returns: a Future of the bucket's buffer. An error of the call is raised by ``backward``.
    """
    buffer = bucket.buffer()
    if buffer.is_cuda:
        return _enqueued(comm, buffer)
    work = comm.all_reduce(buffer, "avg", async_op=True)
    started: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    # An exception raised in a callback becomes the future's error; DDP would treat an exception set as the result as a
    # value.
    reduced = started.then(lambda _: work.wait())
    _waiter(comm).submit(started.set_result, buffer)
    return reduced


def fp16_all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Like `all_reduce_hook`, with the bucket rounded to float16: half the bytes of float32, and the mean is rounded
    once more."""
    return default_hooks.fp16_compress_wrapper(all_reduce_hook)(comm, bucket)


def bf16_all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Like `all_reduce_hook`, with the bucket rounded to bfloat16: half the bytes of float32, and the mean is
    rounded once more."""
    return default_hooks.bf16_compress_wrapper(all_reduce_hook)(comm, bucket)


def _waiter(comm: Communicator) -> ThreadPoolExecutor:
    """Returns the single thread that waits for a communicator's calls, in their order."""
    if comm not in _waiters:
        _waiters[comm] = ThreadPoolExecutor(1, thread_name_prefix=f"ringcomm hooks, rank {comm.rank}")
    return _waiters[comm]


def _enqueued(comm: Communicator, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket on a separate stream, while backward continues. The returned future is done at once; a stream
    that waits for it is ordered after the call."""
    if comm not in _streams:
        _streams[comm] = torch.cuda.Stream(buffer.device)
    stream = _streams[comm]
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    comm.all_reduce(buffer, "avg", stream=stream)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):  # the future records an event on the current stream
        future.set_result(buffer)
    return future


# ---- attaching ---------------------------------------------------------------------------------------------------


@expects("attach", model=MODULE, comm=COMMUNICATOR)
def attach(model: nn.Module, comm: Communicator | None = None) -> nn.Module:
    """Makes a model of stock torch communicate through ringcomm; a collective of its ranks if ``comm`` is None.

    Every module that ``fully_shard`` wraps gets `AllGather` and `ReduceScatter`; in a mesh of two dimensions (HSDP) the
    all-reduce between replicas stays with the process group. A DistributedDataParallel of torch gets `all_reduce_hook`;
    its other calls, such as those for buffers, stay with the process group.

    Args:
        comm: a communicator of the ranks of the model's process group, in its order; None: a new one beside each
            process group, which lives as long as the model. Nothing else may use it while the model computes.
    Returns: ``model``.
    Raises:  InvalidArgumentError: another kind of model, or a communicator of other ranks. UnsupportedError: a sharding
             without a reduce-scatter, over several meshes, or to another number of ranks after forward.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if comm is None:
            comm = beside(model.process_group, next(model.parameters()).device)
        _check_ranks("attach", comm, model.process_group, "leave comm out")
        model.register_comm_hook(comm, all_reduce_hook)
        return model
    sharded = [(module, group) for module in model.modules() for group in _param_groups(module)]
    if not sharded:
        raise InvalidArgumentError(
            f"attach: got a {type(model).__name__}, expected a model with modules of fully_shard, or torch's "
            "DistributedDataParallel; wrap it first, or train it with ringcomm.DistributedDataParallel"
        )
    hooks: dict[dist.ProcessGroup, tuple[AllGather, ReduceScatter]] = {}
    for _, params in sharded:
        group = params.mesh_info.shard_process_group
        if group not in hooks:
            served = beside(group, params.device) if comm is None else comm
            _check_ranks("attach", served, group, "leave comm out")
            hooks[group] = AllGather(served), ReduceScatter(served)
    for module, params in sharded:
        all_gather, reduce_scatter = hooks[params.mesh_info.shard_process_group]
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
    return model


def _param_groups(module: nn.Module) -> list[Any]:
    """Returns the groups of parameters that FSDP2 moves together and that we can serve, at most one per module."""
    if not isinstance(module, FSDPModule):
        return []
    groups = list(module._get_fsdp_state()._fsdp_param_groups)
    for params in groups:
        after = params.post_forward_mesh_info
        what = None
        if len(groups) > 1:
            what = f"{len(groups)} meshes in one module"
        elif not hasattr(params.mesh_info, "shard_process_group"):
            what = "a module that is replicated, not sharded"
        elif after is not None and after.shard_mesh_size != params.mesh_info.shard_mesh_size:
            what = f"reshard_after_forward={after.shard_mesh_size}"
        if what is not None:
            raise UnsupportedError(
                f"attach: got {what} in {type(module).__name__}, expected one sharding of each module for forward and "
                "backward; use fully_shard with one mesh and reshard_after_forward=True or False"
            )
    return groups


def _check_ranks(call: str, comm: Communicator, group: dist.ProcessGroup, advice: str) -> None:
    rank, world_size = group.rank(), group.size()
    if (rank, world_size) != (comm.rank, comm.world_size):
        raise InvalidArgumentError(
            f"{call}: rank {comm.rank} of a communicator of {comm.world_size} ranks got a process group in which it is "
            f"rank {rank} of {world_size}, expected the same; {advice}"
        )
