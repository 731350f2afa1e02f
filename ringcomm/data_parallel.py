"""
Data parallel training: every rank computes on its own data, gradients are averaged while backward still runs.

The gradients live in a few flat buckets, laid out once, at construction, in reverse order of the parameters (about the
order in which backward finishes them) and never again. A parameter's gradient is a view of its bucket, so nothing is
copied on the way, and where the communicator offers memory that the peers use in place, nothing is copied there either.

    backward:    grad of last layer done ... grad of first layer done     end of backward
    bucket 0     [all gradients arrived] -> all_reduce(avg), asynchronous ---+
    bucket 1                  [all arrived] -> all_reduce(avg) --------------+-> wait for all
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringcomm.communicator import Communicator

ALIGN_BYTES = 64  # a gradient starts on a cache line


class Bucket:
    """A flat buffer of gradients that travel together.

    Its last elements, one per parameter, are 1 where this rank has a gradient. They are averaged with the rest, so that
    afterwards a parameter's element is 0 only if no rank has used it.
    """

    def __init__(self, params: list[nn.Parameter], names: list[str], comm: Communicator) -> None:
        self.params, self.names = params, names
        first = params[0]
        align = max(1, ALIGN_BYTES // first.element_size())
        starts, count = [], 0
        for p in params:
            starts.append(count)
            count += -(-p.numel() // align) * align
        count += len(params)
        if first.is_cpu:
            self.flat = comm.empty(count, dtype=first.dtype).zero_()
        else:
            self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        self.views = [_view(self.flat, start, p) for start, p in zip(starts, params, strict=True)]
        self.used = self.flat[count - len(params) :]
        self.reset()

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.params)

    def reset(self) -> None:
        """Forgets the last backward pass."""
        self.arrived: set[int] = set()
        self.work: Any = None  # the all_reduce in flight

    def attach(self, i: int) -> None:
        """Makes parameter i's gradient the view, with the gradient's values."""
        p, view = self.params[i], self.views[i]
        if p.grad is not None and p.grad is not view:
            if p.grad.is_sparse:
                raise InvalidArgumentError(
                    f"DistributedDataParallel: got a sparse gradient of {self.names[i]}, expected a dense one; build "
                    "its module with sparse=False"
                )
            view.copy_(p.grad.detach())
            p.grad = view

    def fill(self) -> None:
        """Prepares the buffer for travel: gradients that did not arrive are what they were before, or zero."""
        if self.complete:
            self.used.fill_(1)
            return
        for i, p in enumerate(self.params):
            if p.grad is None:
                self.views[i].zero_()
            else:
                self.attach(i)
            self.used[i] = float(p.grad is not None)

    def finish(self) -> None:
        """Gives the averaged gradient to a parameter that only other ranks have used."""
        missing = [i for i, p in enumerate(self.params) if p.grad is None]
        if missing:
            used = self.used.tolist()
            for i in missing:
                if used[i] != 0:
                    self.params[i].grad = self.views[i]


def _view(flat: torch.Tensor, start: int, p: torch.Tensor) -> torch.Tensor:
    """The parameter's place in the bucket, in the parameter's own memory format where that has no gaps."""
    last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
    if p.numel() and last + 1 == p.numel():
        return flat.as_strided(p.shape, p.stride(), start)
    return flat[start : start + p.numel()].view(p.shape)


def _buckets(module: nn.Module, cap_bytes: int, comm: Communicator) -> list[Bucket]:
    """Reverse order of the parameters; one dtype and device each, at most `cap_bytes` unless one tensor is more."""
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], list[str]]] = {}
    closed: list[tuple[list[nn.Parameter], list[str]]] = []
    for name, p in reversed(list(module.named_parameters())):
        if not p.requires_grad:
            continue
        key = (p.dtype, p.device)
        params, names = open_groups.setdefault(key, ([], []))
        if params and sum(q.nbytes for q in params) + p.nbytes > cap_bytes:
            closed.append(open_groups[key])
            params, names = open_groups[key] = ([], [])
        params.append(p)
        names.append(name)
    return [Bucket(params, names, comm) for params, names in [*closed, *open_groups.values()]]


class DistributedDataParallel(nn.Module):
    """Wraps a module so that plain ``loss.backward()`` leaves the mean of all ranks' gradients on every rank.

    Every rank makes the same number of backward passes outside ``no_sync``. A parameter that a pass does not use counts
    as a zero gradient; one that no rank uses keeps ``grad`` as it was. Outside the scope: sparse gradients, parameters
    added or frozen after construction, reentrant activation checkpointing of a parameter that is used twice.

    Args:
        module: on its device already; all ranks get rank 0's parameters and buffers.
        comm: a Communicator; None: one over ``process_group``, else ``ringcomm.init()`` from torchrun's environment.
        process_group: a group of torch.distributed, in place of ``comm``.
        bucket_cap_mb: size of a bucket, in MiB.
        broadcast_buffers: whether all ranks get rank 0's buffers before every synchronised forward pass in training.
    Order:   the communicator's: canonical on the CPU engine, where the bits do not depend on ``bucket_cap_mb``.
    Cost:    one all_reduce of the gradients per backward pass, overlapped with it.
    Raises:  InvalidArgumentError: nothing to train, or both ``comm`` and ``process_group``.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = _communicator(comm, process_group)
        self.broadcast_buffers = broadcast_buffers
        self.communication_seconds = 0.0  # this thread's time in the calls and waits of the gradients' all_reduce
        self._sync = True
        self._scheduled = False  # whether this backward pass has asked for its `_finish`
        self._next = 0  # the bucket to start next
        if not any(p.requires_grad for p in module.parameters()):
            raise InvalidArgumentError(
                f"DistributedDataParallel: rank {self.comm.rank} got a module without parameters that require a "
                "gradient, expected at least one; call the module itself"
            )
        self._broadcast([*module.parameters(), *module.buffers()])
        self.buckets = _buckets(module, int(bucket_cap_mb * (1 << 20)), self.comm)
        self._reset()
        for bucket in self.buckets:
            for i, p in enumerate(bucket.params):
                p.register_post_accumulate_grad_hook(partial(self._arrived, bucket, i))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if torch.is_grad_enabled() and self._sync:
            if self._scheduled:  # the last backward pass raised half-way
                self._wait()
                self._reset()
            if self.broadcast_buffers and self.training:
                self._broadcast(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the next one outside averages the sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        for x in tensors:
            self.comm.broadcast(x.detach(), 0)

    def _arrived(self, bucket: Bucket, i: int, _: torch.Tensor) -> None:
        """A parameter's gradient is complete on this rank."""
        bucket.attach(i)
        if not self._sync:
            return
        if not self._scheduled:
            self._scheduled = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if bucket.work is not None:
            raise InvalidArgumentError(
                f"DistributedDataParallel: rank {self.comm.rank} got a second gradient of {bucket.names[i]} in one "
                "backward pass, expected one; use non-reentrant activation checkpointing"
            )
        bucket.arrived.add(i)
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._launch()

    def _launch(self) -> None:
        """Starts the next bucket: every rank starts them in the same order."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.fill()
        start = time.perf_counter()
        bucket.work = self.comm.all_reduce(bucket.flat, "avg", async_op=True)
        self.communication_seconds += time.perf_counter() - start

    def _finish(self) -> None:
        """End of backward: starts what is left, waits for all."""
        try:
            while self._next < len(self.buckets):
                self._launch()
            self._wait()
            for bucket in self.buckets:
                bucket.finish()
        finally:
            self._reset()

    def _wait(self) -> None:
        start = time.perf_counter()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
        self.communication_seconds += time.perf_counter() - start

    def _reset(self) -> None:
        self._scheduled, self._next = False, 0
        for bucket in self.buckets:
            bucket.reset()


def _communicator(comm: Communicator | None, group: dist.ProcessGroup | None) -> Communicator:
    import torch.distributed as dist

    import ringcomm

    if comm is not None and group is not None:
        raise InvalidArgumentError("DistributedDataParallel: got both comm and process_group, expected one of them")
    if comm is not None:
        return comm
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return ringcomm.Communicator.from_process_group(group)
    return ringcomm.init()
