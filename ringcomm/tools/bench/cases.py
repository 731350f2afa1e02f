"""
The benchmark's calls: the shapes of every collective, its bus-bandwidth factor, and the callables for one size.

As in nccl-tests, a message of `nbytes` becomes `count` elements per rank: the whole message for all_reduce, broadcast,
reduce and sendrecv; 1/world_size of it, rounded down to 16 bytes, if one side holds a part for every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ringcomm.comm.process_group import torch_reduction

if TYPE_CHECKING:
    import torch

    from ringcomm.comm.communicator import Communicator

Call = Callable[[], Any]
MAX_VIEWS = 1024  # number of positions through which the buffers shift


@dataclass(frozen=True)
class Collective:
    """Whether a side of a collective holds world_size parts, and the factor of its bus bandwidth."""

    name: str
    input_parts: bool = False
    output_parts: bool = False
    reduces: bool = False
    rooted: bool = False
    in_place: bool = True
    scaled: float = 0.0  # bus-bandwidth factor = scaled * (n - 1) / n, or 1 if scaled is 0

    def factor(self, world_size: int) -> float:
        """Returns nccl-tests' bus bandwidth / algorithm bandwidth."""
        return self.scaled * (world_size - 1) / world_size if self.scaled else 1.0

    @property
    def in_parts(self) -> bool:
        return self.input_parts or self.output_parts

    def count(self, nbytes: int, item_bytes: int, world_size: int) -> int:
        """Returns nccl-tests' count column: elements of the message, or of one part."""
        if self.name == "barrier":
            return 0
        count = nbytes // item_bytes
        return count // world_size & ~(max(1, 16 // item_bytes) - 1) if self.in_parts else count


_ALL = (
    Collective("all_reduce", reduces=True, scaled=2.0),
    Collective("reduce_scatter", input_parts=True, reduces=True, scaled=1.0),
    Collective("all_gather", output_parts=True, scaled=1.0),
    Collective("broadcast", rooted=True),
    Collective("reduce", reduces=True, rooted=True),
    Collective("alltoall", input_parts=True, output_parts=True, in_place=False, scaled=1.0),
    Collective("gather", output_parts=True, rooted=True, scaled=1.0),
    Collective("scatter", input_parts=True, rooted=True, scaled=1.0),
    Collective("sendrecv", in_place=False),
    Collective("barrier", in_place=False),
)
COLLECTIVE = {c.name: c for c in _ALL}
COPY = Collective("copy", in_place=False)


@dataclass(frozen=True)
class Case:
    """One line of the table, without its times."""

    collective: Collective
    dtype: torch.dtype
    type_name: str  # nccl-tests' name of the dtype
    reduction: str  # nccl-tests' name; "none" without a reduction
    op: str  # ringcomm's name
    root: int  # -1 without a root
    count: int
    rank: int
    world_size: int

    @property
    def input_count(self) -> int:
        return self.count * (self.world_size if self.collective.input_parts else 1)

    @property
    def output_count(self) -> int:
        return self.count * (self.world_size if self.collective.output_parts else 1)

    @property
    def nbytes(self) -> int:
        """nccl-tests' size column: the larger side."""
        return max(self.input_count, self.output_count) * self.dtype.itemsize

    @property
    def has_input(self) -> bool:
        return self.collective.name not in ("broadcast", "scatter") or self.rank == self.root

    @property
    def has_output(self) -> bool:
        return self.collective.name not in ("reduce", "gather") or self.rank == self.root

    @property
    def factor(self) -> float:
        """The factor of this rank for premul_sum, as in nccl-tests."""
        return 1.0 + self.rank % 2

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a buffer of parts."""
        return whole[self.rank * self.count : (self.rank + 1) * self.count]


class Arena:
    """One send and one receive buffer, large enough for the largest size; a case uses views at shifting positions."""

    def __init__(self, nbytes: int, unalign: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.nbytes, self.unalign = nbytes, unalign
        self.send, self.recv = (allocate(nbytes + unalign * 8 + 64) for _ in range(2))

    def views(self, case: Case, in_place: bool, limit: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (input, output) at up to `limit` different positions."""
        shifts = max(1, min(limit, self.nbytes // case.nbytes)) if case.nbytes else 1
        return [self._pair(case, in_place, k * case.nbytes // case.dtype.itemsize) for k in range(shifts)]

    def _pair(self, case: Case, in_place: bool, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        start += self.unalign
        if not in_place:
            x = _typed(self.send, case.dtype, start, case.input_count)
            return x, _typed(self.recv, case.dtype, start, case.output_count)
        c = case.collective
        whole = _typed(self.recv, case.dtype, start, max(case.input_count, case.output_count))
        return case.part(whole) if c.output_parts else whole, case.part(whole) if c.input_parts else whole


def _typed(arena: torch.Tensor, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
    item = dtype.itemsize
    return arena[start * item : (start + count) * item].view(dtype)


class CommTarget:
    """ringcomm's own Communicator."""

    name = "ringcomm"

    def __init__(self, comm: Communicator, algorithm: str = "auto", agg: int = 1) -> None:
        self.comm, self.agg = comm, agg
        self.algorithm: dict[str, Any] = {} if algorithm == "auto" else {"algorithm": algorithm}

    def call(self, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
        one = self._one(case, x, y, in_place)
        return one if self.agg == 1 or one is None else partial(self._grouped, one)

    def _grouped(self, one: Call) -> None:
        with self.comm.coalesce():
            for _ in range(self.agg):
                one()

    def _one(self, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
        comm, name, op = self.comm, case.collective.name, case.op
        extra = dict(self.algorithm)
        if case.collective.reduces and op == "premul_sum":
            extra["factor"] = case.factor
        if name == "all_reduce":
            if in_place:
                return partial(comm.all_reduce, x, **extra) if op == "sum" else partial(comm.all_reduce, x, op, **extra)
            return partial(comm.all_reduce, x, op, out=y, **extra)
        if name == "reduce_scatter":
            return partial(comm.reduce_scatter, x, op, out=y, **extra)
        if name == "all_gather":
            return partial(comm.all_gather, x, out=y, **extra)
        if name == "broadcast":  # it has only one buffer
            return partial(comm.broadcast, x, case.root, **extra) if in_place else None
        if name == "reduce":
            extra.pop("algorithm", None)
            return partial(
                comm.reduce, x, case.root, op, **({} if in_place or not case.has_output else {"out": y}), **extra
            )
        return self._moving(case, x, y)

    def _moving(self, case: Case, x: torch.Tensor, y: torch.Tensor) -> Call | None:
        comm, name = self.comm, case.collective.name
        if name == "alltoall":
            return partial(comm.all_to_all, x, out=y, **self.algorithm)
        if name == "gather":
            return partial(comm.gather, x, case.root, out=y if case.has_output else None)
        if name == "scatter":
            return partial(comm.scatter, x if case.has_input else None, case.root, out=y)
        if name == "sendrecv":
            return partial(_exchange, comm, x, y, self.agg == 1)
        return comm.barrier


def _exchange(comm: Communicator, x: torch.Tensor, y: torch.Tensor, wait: bool) -> None:
    sent = comm.isend(x, (comm.rank + 1) % comm.world_size)
    received = comm.irecv(y, (comm.rank - 1) % comm.world_size)
    if wait:
        received.wait()
        sent.wait()


class DistTarget:
    """A torch.distributed backend, called through torch: all_reduce, broadcast and reduce exist only in place."""

    def __init__(self, backend: str, group: Any) -> None:
        import torch.distributed as dist

        self.name, self.group, self.dist = backend, group, dist
        newer: Any = dist  # torch 2.13 and later warn about the old names
        self.all_gather = getattr(newer, "all_gather_single", None) or dist.all_gather_into_tensor
        self.reduce_scatter = getattr(newer, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def call(self, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
        dist, name, group = self.dist, case.collective.name, {"group": self.group}
        only_in_place = name in ("all_reduce", "broadcast", "reduce")
        op = None if case.op == "premul_sum" else torch_reduction(case.op)  # its factor is in the operator
        if case.collective.reduces and op is None:
            return None
        if only_in_place != in_place and name not in ("reduce_scatter", "all_gather"):
            return None
        if name == "all_reduce":
            return partial(dist.all_reduce, x, op, **group)
        if name == "reduce_scatter":
            return partial(self.reduce_scatter, y, x, op, **group)
        if name == "all_gather":
            return partial(self.all_gather, y, x, **group)
        if name == "broadcast":
            return partial(dist.broadcast, x, case.root, **group)
        if name == "reduce":
            return partial(dist.reduce, x, case.root, op, **group)
        return self._moving(case, x, y)

    def _moving(self, case: Case, x: torch.Tensor, y: torch.Tensor) -> Call | None:
        dist, name, group = self.dist, case.collective.name, {"group": self.group}
        if name == "alltoall":
            return partial(dist.all_to_all_single, y, x, **group)
        if name == "gather":
            parts = list(y.chunk(case.world_size)) if case.has_output and case.count else None
            return partial(dist.gather, x, parts, dst=case.root, **group) if case.count else None
        if name == "scatter":
            parts = list(x.chunk(case.world_size)) if case.has_input and case.count else None
            return partial(dist.scatter, y, parts, src=case.root, **group) if case.count else None
        if name == "sendrecv":
            return partial(self._exchange, x, y)
        return partial(dist.barrier, **group)

    def _exchange(self, x: torch.Tensor, y: torch.Tensor) -> None:
        rank, world_size = self.dist.get_rank(self.group), self.dist.get_world_size(self.group)
        sent = self.dist.isend(x, (rank + 1) % world_size, group=self.group)
        self.dist.recv(y, (rank - 1) % world_size, group=self.group)
        sent.wait()


class CopyTarget:
    """No communication: every rank copies as many bytes as its message has, all ranks at the same time."""

    name = "copy"

    def case(self, case: Case) -> Case:
        import torch

        return replace(case, collective=COPY, dtype=torch.uint8, count=case.nbytes)

    def call(self, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
        return None if in_place or not case.count else partial(y.copy_, x)
