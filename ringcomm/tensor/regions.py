"""The operators at the borders of a tensor parallel region, with the names of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (f and its conjugate are the f and g of Shoeybi et al., "Megatron-LM",
2019).

    operator           forward             backward
    f                  nothing             all_reduce
    f_bar              all_reduce          nothing
    g                  all_gather          reduce_scatter     along the sequence
    g_bar              reduce_scatter      all_gather         along the sequence
    gather             all_gather          own part           of a value that all ranks go on with alike
    scatter            own part            all_gather         of a value that all ranks have alike

Sums are canonical: a balanced tree over the ranks, 16-bit floats added in float32 and rounded once. Every rank gets the
same bits. All are collectives, in forward and in backward, and raise before anything is sent where a length does not
divide by the ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ringcomm.communicator import Communicator
from ringcomm.errors import ShapeError


class Region:
    """The ranks that share the layers, and what they have sent.

    Attributes:
        traffic: "<op> calls" and "<op> elements", of the whole message before it is cut.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.traffic: Counter[str] = Counter()
        self._entered: tuple[Any, int, Any, Any] | None = None

    @staticmethod
    def of(comm: Communicator) -> Region:
        """The one region of a communicator."""
        found = vars(comm).get("_tensor_region")
        if found is None:
            found = vars(comm)["_tensor_region"] = Region(comm)
        return found

    def count(self, op: str, elements: int) -> None:
        """Notes a message."""
        self.traffic[f"{op} calls"] += 1
        self.traffic[f"{op} elements"] += elements

    def enter(self, operator: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """``operator(x, comm, *args)``, once for all layers that take the same tensor: those of queries, keys and
        values then have one message, not three."""
        key = (operator, *args)
        if self._entered is not None:
            before, version, made_by, result = self._entered
            if before() is x and version == x._version and made_by == key and (found := result()) is not None:
                return found
        result = operator(x, self.comm, *args)
        version = 0 if x.is_inference() else x._version
        self._entered = None if x.is_inference() else (weakref.ref(x), version, key, weakref.ref(result))
        return result

    # ---- messages ------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` of all ranks, as a new tensor."""
        if self.world_size == 1:
            return x
        self.count("all_reduce", x.numel())
        x = x.contiguous()
        return self.comm.all_reduce(x, out=torch.empty_like(x))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x`` of all ranks, one behind the other along ``dim``."""
        if self.world_size == 1:
            return x
        dim %= x.dim()
        self.count("all_gather", x.numel() * self.world_size)
        gathered = self.comm.all_gather(x.contiguous(), out=x.new_empty(self.world_size, *x.shape))
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along ``dim`` of the sum of ``x`` of all ranks."""
        if self.world_size == 1:
            return x
        self.count("reduce_scatter", x.numel())
        parts = x.unflatten(dim, (self.world_size, self.share("reduce_scatter", x, dim))).movedim(dim % x.dim(), 0)
        parts = parts.contiguous()
        return self.comm.reduce_scatter(parts, out=parts.new_empty(parts.shape[1:]))

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along ``dim`` of ``x``, a view."""
        each = self.share("scatter", x, dim)
        return x.narrow(dim, self.rank * each, each)

    def share(self, call: str, x: torch.Tensor, dim: int) -> int:
        """The length of a rank's part.

        Raises: ShapeError: it does not divide.
        """
        if x.shape[dim] % self.world_size:
            raise ShapeError(
                f"{call}: rank {self.rank} got shape {tuple(x.shape)}, expected {self.world_size} equal parts along "
                f"dimension {dim}; pad it to a multiple"
            )
        return x.shape[dim] // self.world_size


# ---- operators ---------------------------------------------------------------------------------------------------


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.region.all_reduce(grad), None


class _FBar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        return region.all_reduce(x) if region.world_size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Along(torch.autograd.Function):
    """One of Region's messages along a dimension in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region, dim: int, there: str, back: str) -> torch.Tensor:
        ctx.region, ctx.dim, ctx.back = region, dim, back
        y = getattr(region, there)(x, dim)
        return y.view_as(y) if there == "own" or y is x else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return getattr(ctx.region, ctx.back)(grad, ctx.dim), None, None, None, None


def f(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Into a tensor parallel region: ``x``, alike on all ranks, goes to layers that are cut; its gradient is the sum of
    the ranks'."""
    return _F.apply(x, Region.of(comm))


def f_bar(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Out of a tensor parallel region: the sum of the ranks' ``x``, on all of them."""
    return _FBar.apply(x, Region.of(comm))


def g(x: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """From a sequence parallel region into a tensor parallel one: the whole sequence from the ranks' parts."""
    return _Along.apply(x, Region.of(comm), dim, "all_gather", "reduce_scatter")


def g_bar(x: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """From a tensor parallel region into a sequence parallel one: this rank's part of the sum."""
    return _Along.apply(x, Region.of(comm), dim, "reduce_scatter", "all_gather")


def gather(x: torch.Tensor, comm: Communicator, dim: int = -1) -> torch.Tensor:
    """The whole of what the ranks have parts of; all of them go on with it alike."""
    return _Along.apply(x, Region.of(comm), dim, "all_gather", "own")


def scatter(x: torch.Tensor, comm: Communicator, dim: int = -1) -> torch.Tensor:
    """This rank's part of what all ranks have alike."""
    return _Along.apply(x, Region.of(comm), dim, "own", "all_gather")
