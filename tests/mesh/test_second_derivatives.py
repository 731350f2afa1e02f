"""Operations whose gradients cannot be differentiated: they say so where a program does it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.errors import UnsupportedError
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.overlapped import gather_linear, linear_scatter
from tests.support.mesh.tensor_cases import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHT = torch.arange(16.0).view(4, 4) / 16
TARGET = torch.tensor([1, 6])


def normalized(x: torch.Tensor, comm: Any) -> torch.Tensor:
    y: torch.Tensor = ringcomm.SyncBatchNorm(4, comm=comm)(x)
    return (y * WEIGHT[: len(x)]).sum()


OPERATIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "vocab_parallel_cross_entropy": lambda x, comm: ringcomm.vocab_parallel_cross_entropy(x, TARGET, comm),
    "parallelize with overlap=True": lambda x, comm: gather_linear(x[None], WEIGHT.requires_grad_(), None, comm).sum(),
    "parallelize with overlap=True, rowwise": lambda x, comm: linear_scatter(x[None], WEIGHT, comm).sum(),
    "ring_attention": lambda x, comm: ringcomm.ring_attention(*[x[None, None]] * 3, comm, causal=False).sum(),
    "SyncBatchNorm": normalized,
}


@pytest.mark.parametrize("name", [*OPERATIONS])
def test_a_gradient_of_a_gradient(name: str) -> None:
    inputs = [(torch.arange(8.0) + rank).cos().view(2, 4).requires_grad_() for rank in range(2)]

    def rank(comm: Any) -> None:
        TensorParallelGroup.of(comm)
        x = inputs[comm.rank]
        (expected,) = torch.autograd.grad(OPERATIONS[name](x, comm), x)
        loss = OPERATIONS[name](x, comm)
        (found,) = torch.autograd.grad(loss + x.square().sum(), x, create_graph=True)
        assert torch.allclose(found, expected + 2 * x)
        elsewhere = (2 * x).square().sum()  # a penalty that this gradient is no part of
        (loss + elsewhere).backward()
        called = name.partition(",")[0]
        with pytest.raises(UnsupportedError, match=f"{called}: rank {comm.rank} cannot differentiate its gradient"):
            found.square().sum().backward()

    on_ranks(rank, 2)
