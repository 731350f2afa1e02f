"""All-gather with matrix multiplication and matrix multiplication with reduce-scatter, cut along the ring (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition", 2023): a part is in flight while another is
multiplied. In the place of `g` before, and of `g_bar` behind, a linear layer.

Only the rank's own part of an input is kept for backward, which collects the others again: one all_gather more than
`g`, and 1/W of its memory. Sums go once round the ring, in the order c+1, c+2, ..., c for part c, rounded at each rank
to the type that travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ringcomm import schedule
from ringcomm.communicator import Communicator
from ringcomm.tensor.regions import Region

TAG = 0x7470  # of these messages between two ranks


def gather_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, comm: Communicator, dim: int = 1
) -> torch.Tensor:
    """``linear(g(x), weight, bias)``.

    Shapes: x (..., s, ..., in) with s this rank's part along ``dim``, weight (out, in); returns (..., W s, ..., out).
    Cost:   forward an all_gather of x; backward the same again, and a reduce_scatter of its gradient.
    """
    return _GatherLinear.apply(x, weight, bias, Region.of(comm), dim)


def linear_scatter(x: torch.Tensor, weight: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """``g_bar(linear(x, weight))``.

    Shapes: x (..., W s, ..., in), weight (out, in); returns (..., s, ..., out), this rank's part along ``dim``.
    Cost:   forward a reduce_scatter of the output; backward an all_gather of its gradient.
    """
    return _LinearScatter.apply(x, weight, Region.of(comm), dim)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region, dim: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.dim, ctx.has_bias = region, dim, bias is not None
        own = x.movedim(dim, 0).contiguous()
        y = own.new_empty(region.world_size, *own.shape[:-1], weight.shape[0])

        def multiply(part: int, values: torch.Tensor) -> None:
            y[part] = F.linear(values, weight, bias)

        _around(region, own, multiply)
        return y.flatten(0, 1).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        region: Region = ctx.region
        parts = _parts(grad, region, ctx.dim)
        dweight = dbias = dx = None
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight)

            def add(part: int, values: torch.Tensor) -> None:
                dweight.addmm_(parts[part].flatten(0, -2).t(), values.flatten(0, -2))

            _around(region, x.movedim(ctx.dim, 0).contiguous(), add)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = parts.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            dx = _summed(region, lambda part: parts[part] @ weight).movedim(0, ctx.dim)
        return dx, dweight, dbias, None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, region: Region, dim: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.dim = region, dim
        parts = _parts(x, region, dim)
        return _summed(region, lambda part: F.linear(parts[part], weight)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        region: Region = ctx.region
        parts = _parts(x, region, ctx.dim)
        dx = torch.empty_like(parts)
        dweight = torch.zeros_like(weight)

        def both(part: int, values: torch.Tensor) -> None:
            dx[part] = values @ weight
            dweight.addmm_(values.flatten(0, -2).t(), parts[part].flatten(0, -2))

        _around(region, grad.movedim(ctx.dim, 0).contiguous(), both)
        return dx.flatten(0, 1).movedim(0, ctx.dim), dweight, None, None


def _parts(x: torch.Tensor, region: Region, dim: int) -> torch.Tensor:
    """(W, s, ...): the ranks' parts along ``dim``, in front."""
    each = region.share("linear_scatter", x, dim)
    return x.movedim(dim, 0).unflatten(0, (region.world_size, each)).contiguous()


# ---- round the ring ----------------------------------------------------------------------------------------------


def _around(region: Region, own: torch.Tensor, use: Callable[[int, torch.Tensor], None]) -> None:
    """``use(part, values)`` for every rank's ``own``, while the next one is in flight."""
    comm, rank, world_size = region.comm, region.rank, region.world_size
    if world_size > 1:
        region.count("all_gather", own.numel() * world_size)
    held = own
    for number in range(world_size - 1, schedule.num_steps(world_size)):
        step = schedule.ring_step(rank, world_size, number)
        coming = torch.empty_like(own)
        works = _exchange(comm, held, coming)
        use(step.send_chunk, held)
        for work in works:
            work.wait()
        held = coming
    use(
        schedule.ring_step(rank, world_size, schedule.num_steps(world_size) - 1).recv_chunk if world_size > 1 else 0,
        held,
    )


def _summed(region: Region, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The sum over the ranks of ``make(rank)``, each made while the sum before it is in flight."""
    comm, rank, world_size = region.comm, region.rank, region.world_size
    if world_size == 1:
        return make(0)
    total = make(schedule.ring_step(rank, world_size, 0).send_chunk).contiguous()
    region.count("reduce_scatter", total.numel() * world_size)
    for number in range(world_size - 1):
        step = schedule.ring_step(rank, world_size, number)
        coming = torch.empty_like(total)
        works = _exchange(comm, total, coming)
        mine = make(step.recv_chunk)
        for work in works:
            work.wait()
        total = coming.add_(mine)
    return total


def _exchange(comm: Communicator, going: torch.Tensor, coming: torch.Tensor) -> list[Any]:
    ring = range(comm.world_size)
    following, previous = ring[(comm.rank + 1) - comm.world_size], ring[comm.rank - 1]
    return [comm.isend(going, following, TAG), comm.irecv(coming, previous, TAG)]
