"""Overlaps all-gather with matrix multiplication, and matrix multiplication with reduce-scatter, along the ring (Wang
et al., "Overlap Communication with Dependent Computation via Decomposition", 2023): while one part is in flight,
another is multiplied. Replaces `g` before a linear layer, and `g_bar` after one.

Only the rank's own part of an input is kept for backward, which gathers the other parts again: this takes one
all_gather more than `g`, and 1/W of its memory. Sums travel once round the ring, for part c in the order c+1, c+2, ...,
c, and each rank rounds them to the type that is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ringcomm.comm import schedule
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Group
from ringcomm.modules.once_differentiable import once_differentiable
from ringcomm.tensor_parallel.group import TensorParallelGroup, multiplied_in

TAG = 0x7470  # the tag of these messages


def gather_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, comm: Communicator, dim: int = 1
) -> torch.Tensor:
    """Returns ``linear(g(x), weight, bias)``.

    Shapes: x (..., s, ..., in) with s this rank's part along ``dim``, weight (out, in); returns (..., W s, ..., out).
    Dtypes: floating point; under autocast in its type.
    Cost:   forward an all_gather of x; backward the same again, and a reduce_scatter of its gradient.
    """
    dtype = multiplied_in(x)
    bias = None if bias is None else bias.to(dtype)
    return _GatherLinear.apply(x.to(dtype), weight.to(dtype), bias, TensorParallelGroup.of(comm), dim)


def linear_scatter(x: torch.Tensor, weight: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """Returns ``g_bar(linear(x, weight))``.

    Shapes: x (..., W s, ..., in), weight (out, in); returns (..., s, ..., out), this rank's part along ``dim``.
    Cost:   forward a reduce_scatter of the output; backward an all_gather of its gradient.
    """
    dtype = multiplied_in(x)
    return (
        _LinearScatter.apply(x.to(dtype), weight.to(dtype), TensorParallelGroup.of(comm), dim)
        .movedim(0, dim)
        .contiguous()
    )


class _GatherLinear(torch.autograd.Function):
    """Multiplies each rank's part of the sequence as it arrives."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorParallelGroup, dim: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.rank, ctx.dim, ctx.has_bias = group, group.rank, dim, bias is not None
        own = x.movedim(dim, 0).contiguous()
        shape = [*x.shape[:-1], weight.shape[0]]
        shape[dim] *= group.world_size
        y = x.new_empty(shape)
        parts = _parts(y, group, dim)

        def multiply(part: int, values: torch.Tensor) -> None:
            parts[part] = F.linear(values, weight, bias)

        _around(group, own, multiply)
        return y

    @staticmethod
    @once_differentiable("parallelize with overlap=True")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group: TensorParallelGroup = ctx.group
        parts = _parts(grad, group, ctx.dim).contiguous()
        dweight = dbias = dx = None
        if ctx.needs_input_grad[1]:
            total = _wide_zeros(weight)
            own = x.movedim(ctx.dim, 0).contiguous()
            _around(group, own, lambda part, values: _add_product(total, parts[part], values))
            dweight = total.to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = parts.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            dx = _summed(group, lambda part: parts[part] @ weight).movedim(0, ctx.dim)
        return dx, dweight, dbias, None, None


class _LinearScatter(torch.autograd.Function):
    """Computes the output as (s, ..., out), with the sequence as the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: TensorParallelGroup, dim: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.rank, ctx.dim = group, group.rank, dim
        parts = _parts(x, group, dim).contiguous()
        return _summed(group, lambda part: F.linear(parts[part], weight))

    @staticmethod
    @once_differentiable("parallelize with overlap=True")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group: TensorParallelGroup = ctx.group
        parts = _parts(x, group, ctx.dim).contiguous()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        dx_parts = None if dx is None else _parts(dx, group, ctx.dim)
        total = _wide_zeros(weight) if ctx.needs_input_grad[1] else None

        def both(part: int, values: torch.Tensor) -> None:
            if dx_parts is not None:
                dx_parts[part] = values @ weight
            if total is not None:
                _add_product(total, values, parts[part])

        _around(group, grad.contiguous(), both)
        return dx, None if total is None else total.to(weight.dtype), None, None


def _wide_zeros(weight: torch.Tensor) -> torch.Tensor:
    """Returns zeros for the sum of a weight's gradient over the parts of the sequence: float32 for 16-bit floats."""
    return torch.zeros_like(weight, dtype=torch.float32 if weight.itemsize < 4 else weight.dtype)


def _add_product(total: torch.Tensor, out: torch.Tensor, values: torch.Tensor) -> None:
    """Adds ``out^T values`` to ``total``."""
    a, b = out.flatten(0, -2).t(), values.flatten(0, -2)
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _parts(x: torch.Tensor, group: TensorParallelGroup, dim: int) -> torch.Tensor:
    """Returns the ranks' parts along ``dim`` as a view of shape (W, s, ...)."""
    each = group.share("linear_scatter", x, dim)
    return x.movedim(dim, 0).unflatten(0, (group.world_size, each))


# ---- round the ring ----------------------------------------------------------------------------------------------


def _around(group: TensorParallelGroup, own: torch.Tensor, use: Callable[[int, torch.Tensor], None]) -> None:
    """Calls ``use(part, values)`` with every rank's ``own``, while the next part is in flight."""
    comm, rank, world_size = group.comm, group.rank, group.world_size
    if world_size > 1:
        group.count("all_gather", own.numel() * world_size)
    held = own
    for number in range(world_size - 1, schedule.num_steps(world_size)):
        step = schedule.ring_step(rank, world_size, number)
        coming = torch.empty_like(own)
        started = _exchange(comm, held, coming)
        use(step.send_chunk, held)
        started.wait()
        held = coming
    use(
        schedule.ring_step(rank, world_size, schedule.num_steps(world_size) - 1).recv_chunk if world_size > 1 else 0,
        held,
    )


def _summed(group: TensorParallelGroup, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Returns this rank's part of the sum over the ranks. ``make(part)`` returns a rank's summand of a part, and is
    called while the sum of the previous ranks is in flight."""
    comm, rank, world_size = group.comm, group.rank, group.world_size
    if world_size == 1:
        return make(0)
    total = make(schedule.ring_step(rank, world_size, 0).send_chunk).contiguous()
    group.count("reduce_scatter", total.numel() * world_size)
    for number in range(world_size - 1):
        step = schedule.ring_step(rank, world_size, number)
        coming = torch.empty_like(total)
        started = _exchange(comm, total, coming)
        mine = make(step.recv_chunk)
        started.wait()
        total = coming.add_(mine)
    return total


def _exchange(comm: Communicator, going: torch.Tensor, coming: torch.Tensor) -> Group:
    """Starts to send to the next rank and to receive from the previous one."""
    following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    started: Group = comm.sendrecv(going, following, coming, previous, TAG, async_op=True)
    return started
