"""torch.compile of torch's functional collectives and of calls of torch.distributed over ringcomm: one graph, and the
bits of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import torch_ranks

pytestmark = pytest.mark.timeout(300)


def _functional(x: torch.Tensor) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    rows = functional.all_gather_tensor(x * 2, 0, world)
    return [
        functional.all_reduce(x * 3, "sum", world) + 1,
        rows - 1,
        functional.reduce_scatter_tensor(rows, "avg", 0, world),
        functional.broadcast(x, 1, world) * x,
        functional.all_to_all_single(x, [1, 1], [1, 1], world),
        functional.permute_tensor(x.flatten(), [1, 0], world).view_as(x) - x,  # torch's own takes vectors
        *functional.all_reduce_coalesced([x, x + 1], "max", world),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], world),
        *functional.reduce_scatter_tensor_coalesced([rows, rows + 1], "sum", [0, 0], world),
    ]


def _ops(x: torch.Tensor) -> list[torch.Tensor]:
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    reduced = ops.wait_tensor(ops.all_reduce(x, "sum", name))
    return [reduced, ops.wait_tensor(ops.all_gather_into_tensor(reduced, 2, name))]


def _in_place(x: torch.Tensor) -> list[torch.Tensor]:
    """Calls of torch.distributed, which Dynamo replaces by functional ones."""
    y, rows, part = x * 3, torch.empty(4, 3), torch.empty(1, 3)
    dist.all_reduce(y)
    dist.all_gather_into_tensor(rows, y)
    dist.reduce_scatter_tensor(part, x)
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, x)
    return [y, rows, part, exchanged]


def _differentiable(x: torch.Tensor) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    rows = functional.all_gather_tensor_autograd(x.sin(), 0, world)
    part = functional.reduce_scatter_tensor_autograd(rows.exp(), "sum", 0, world)
    return [rows, part, functional.all_to_all_single_autograd(part * x, [1, 1], [1, 1], world)]


def _run(program: Callable[[torch.Tensor], list[torch.Tensor]], learns: bool) -> list[torch.Tensor]:
    """The results of a program, and the gradient."""
    x = (torch.arange(6.0).view(2, 3) / 7 + dist.get_rank()).requires_grad_(learns)
    results = program(x)
    if not learns:
        return results
    torch.stack([result.square().sum() for result in results]).sum().backward()
    assert x.grad is not None
    return [*results, x.grad]


def _compiled(program: Callable[[torch.Tensor], list[torch.Tensor]], backend: str) -> None:
    learns = program is _differentiable
    expected = _run(program, learns)
    torch._dynamo.reset()
    found = _run(torch.compile(program, fullgraph=True, backend=backend), learns)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


CASES: list[Any] = [(program, "aot_eager") for program in (_functional, _ops, _in_place, _differentiable)]


@pytest.mark.parametrize(
    ("program", "backend"), [*CASES, pytest.param(_functional, "inductor", marks=pytest.mark.slow)]
)
def test_collectives_compile_into_one_graph(program: Callable[..., Any], backend: str) -> None:
    torch_ranks.run(_compiled, program, backend, world_size=2, timeout_s=200)
