"""Only the collectives, in stock torch: FSDP2 and DDP keep everything of their own and move their bytes through a
communicator, whatever the backend of their process group.

    model = fully_shard(model)                       # or torch.nn.parallel.DistributedDataParallel(model)
    ringcomm.hooks.attach(model)                     # a communicator beside the process group
"""

# No `from __future__ import annotations`: torch compares the annotations of a hook of DDP with classes.
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
from ringcomm.data_parallel.arguments import MODULE
from ringcomm.errors import DeviceError, InvalidArgumentError, UnsupportedError
from ringcomm.validation import COMMUNICATOR, expects

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.PREMUL_SUM: "premul_sum"}


# ---- FSDP2 -------------------------------------------------------------------------------------------------------


class _Buffers:
    """A communicator's memory, handed out and taken back: FSDP2 asks for the same few sizes over and over.

    A buffer comes back when the last tensor over it is gone, and goes out again for the same number of bytes and the
    same stream only, so that what is still enqueued there runs first.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._unused: dict[tuple[int, int], list[torch.Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised; the peers read and write it in place."""
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


def _lent(base: torch.Tensor, unused: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of ``base`` as a tensor of its own, whose end puts ``base`` back."""
    memory: Any
    if base.is_cuda:
        memory = libraries.DeviceMemory(base.data_ptr(), base.nbytes, Device("cuda", base.device.index))
        tensor = torch.as_tensor(memory, device=base.device)
    else:
        memory = (ctypes.c_char * base.nbytes).from_address(base.data_ptr())
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
    weakref.finalize(memory, unused.append, base).atexit = False
    return tensor


class _Work(dist.Work):  # FSDP2 waits for nothing else
    """A call of ours in flight, as torch's."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the call: on the cpu the host, on a device the current stream."""
        self._work.wait(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return bool(self._work.done)


class _Hook:
    @expects("hooks", comm=COMMUNICATOR)
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._buffers = _Buffers(comm)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory of the communicator, which peers use in place.

        Cost:    nothing but the first time for a number of bytes: what was given back is used again, and kept until
                 this object ends.
        Raises:  DeviceError: ``device`` is not the communicator's.
        """
        return self._buffers.take(tuple(int(n) for n in size), dtype, device)

    def _check(self, call: str, group: dist.ProcessGroup) -> None:
        _check_ranks(call, self.comm, group, "attach with comm=None, or reshard_after_forward=True or False")


class AllGather(_Hook, _fsdp_api.AllGather):
    """The all-gather of FSDP2 through a communicator: for ``FSDPModule.set_custom_all_gather``.

    Args:
        comm: of the same ranks, in the same order, as the process group over which the module is sharded.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Every rank's ``input_tensor`` (n), in rank order, into ``output_tensor`` (W*n), of which it may be a part.

        Cost:    (W-1)/W of the bytes each way; on a device it runs on the current stream.
        Returns: a Work if ``async_op``, else None.
        Raises:  InvalidArgumentError: ``group`` has other ranks than the communicator.
        """
        self._check("all_gather", group)
        work = self.comm.all_gather(input_tensor, out=output_tensor, async_op=async_op)
        return _Work(work) if async_op else None


class ReduceScatter(_Hook, _fsdp_api.ReduceScatter):
    """The reduce-scatter of FSDP2 through a communicator: for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        comm: of the same ranks, in the same order, as the process group over which the module is sharded.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Part r of the reduction of all ranks' ``input_tensor`` (W*n) into rank r's ``output_tensor`` (n).

        Args:    op: SUM, AVG or PREMUL_SUM.
        Order:   the communicator's: canonical on an engine of ours, so that the bits do not depend on the layout.
        Cost:    (W-1)/W of the bytes each way; on a device it runs on the current stream.
        Returns: a Work if ``async_op``, else None.
        Raises:  UnsupportedError: another op. InvalidArgumentError: ``group`` has other ranks than the communicator.
        """
        self._check("reduce_scatter", group)
        kind, factor = self._reduction(op)
        work = self.comm.reduce_scatter(input_tensor, kind, out=output_tensor, factor=factor, async_op=async_op)
        return _Work(work) if async_op else None

    def _reduction(self, op: Any) -> tuple[str, float | None]:
        """Our name of torch's op, and the factor that it carries."""
        kind = getattr(op, "op", op)  # a ReduceOp, or only its kind
        if kind not in _OPS:
            name = str(kind).rpartition(".")[2]
            raise UnsupportedError(
                f"reduce_scatter: rank {self.comm.rank} got op {name}, expected SUM, AVG or PREMUL_SUM, which are what "
                "FSDP2 uses; call Communicator.reduce_scatter for others"
            )
        if kind != dist.ReduceOp.PREMUL_SUM:
            return _OPS[kind], None
        return _OPS[kind], float(op.factor)


# ---- DDP ---------------------------------------------------------------------------------------------------------

_waiters: weakref.WeakKeyDictionary[Communicator, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_streams: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of all ranks' bucket through a communicator, while backward goes on: for DDP's ``register_comm_hook``.

    Order:   the communicator's: canonical on an engine of ours, where the bits do not depend on the buckets.
    Cost:    one all_reduce in place: 2 (W-1)/W of the bytes each way. On the cpu one thread for each communicator
             waits for the calls; on a device they run on a stream of their own.
    Returns: a Future of the bucket's buffer. What went wrong in the call is raised by ``backward``.
    """
    buffer = bucket.buffer()
    if buffer.is_cuda:
        return _enqueued(comm, buffer)
    work = comm.all_reduce(buffer, "avg", async_op=True)
    started: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    # What a callback raises becomes the error of its future; an exception that is set is only a value to DDP.
    reduced = started.then(lambda _: work.wait())
    _waiter(comm).submit(started.set_result, buffer)
    return reduced


def fp16_all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`all_reduce_hook` of the bucket rounded to float16: half the bytes of float32, the mean rounded once more."""
    return default_hooks.fp16_compress_wrapper(all_reduce_hook)(comm, bucket)


def bf16_all_reduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`all_reduce_hook` of the bucket rounded to bfloat16: half the bytes of float32, the mean rounded once more."""
    return default_hooks.bf16_compress_wrapper(all_reduce_hook)(comm, bucket)


def _waiter(comm: Communicator) -> ThreadPoolExecutor:
    """The one thread that waits for a communicator's calls, in their order."""
    if comm not in _waiters:
        _waiters[comm] = ThreadPoolExecutor(1, thread_name_prefix=f"ringcomm hooks, rank {comm.rank}")
    return _waiters[comm]


def _enqueued(comm: Communicator, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The mean on a stream beside the one of backward; the future is done at once, and orders what waits for it."""
    if comm not in _streams:
        _streams[comm] = torch.cuda.Stream(buffer.device)
    stream = _streams[comm]
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    comm.all_reduce(buffer, "avg", stream=stream)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):  # whose event the future records
        future.set_result(buffer)
    return future


# ---- attaching ---------------------------------------------------------------------------------------------------


@expects("attach", model=MODULE, comm=COMMUNICATOR)
def attach(model: nn.Module, comm: Communicator | None = None) -> nn.Module:
    """Lets a model of stock torch communicate through us; a collective of its ranks where ``comm`` is None.

    A model with modules of ``fully_shard`` gets `AllGather` and `ReduceScatter` on every one of them; in a mesh of two
    dimensions (HSDP) the all-reduce between replicas stays with the process group. A DistributedDataParallel of torch
    gets `all_reduce_hook`; its other calls, such as those for buffers, stay with the process group.

    Args:
        comm: of the ranks of the model's process group, in its order; None: a new one beside each process group, which
            lives as long as the model. Nothing else may use it while the model computes.
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
    """What FSDP2 moves together, at most one for each module that we can serve."""
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
