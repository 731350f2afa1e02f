"""Dropout of a tensor that is sharded over the ranks."""

from __future__ import annotations

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.validation import COMMUNICATOR, expects, number, validate_int


class ShardedDropout(nn.Module):
    """Drops the elements of this rank's part that nn.Dropout would drop of the complete tensor.

    Every rank draws for the complete tensor, so generators that are seeded alike stay alike, and on the CPU the
    complete result has the same bits as in one process.

    Args:
        p: the share of elements that is dropped.
        comm: the ranks.
        dim: the dimension along which the input is sharded, in equal parts.
    """

    @expects("ShardedDropout", p=number(0, 1, "0 to 1"), comm=COMMUNICATOR, dim=validate_int(-64, 64, "a dimension"))
    def __init__(self, p: float, comm: Communicator, dim: int) -> None:
        super().__init__()
        self.p, self.dim, self.rank, self.world_size = p, dim, comm.rank, comm.world_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the dropout; any shape, which it keeps."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        dim = self.dim % x.dim()
        unsharded = (*x.shape[:dim], x.shape[dim] * self.world_size, *x.shape[dim + 1 :])
        layout = sorted(range(x.dim()), key=lambda d: -x.stride(d))  # elements are drawn in the order of memory
        kept = torch.empty_permuted(unsharded, layout, dtype=x.dtype, device=x.device)
        kept.bernoulli_(1 - self.p).div_(1 - self.p)
        return x * kept.narrow(dim, self.rank * x.shape[dim], x.shape[dim])

    def extra_repr(self) -> str:
        return f"p={self.p}, dim={self.dim}, rank {self.rank} of {self.world_size}"
