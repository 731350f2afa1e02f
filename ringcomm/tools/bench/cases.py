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

from ringcomm.comm.process_group import torch_collective, torch_reduction

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


def view(
    case: Case, send: torch.Tensor, recv: torch.Tensor, start: int, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (input, output) of a case in two buffers, from element ``start`` on; in place, both are in ``recv``."""
    if not in_place:
        return _typed(send, case.dtype, start, case.input_count), _typed(recv, case.dtype, start, case.output_count)
    c = case.collective
    whole = _typed(recv, case.dtype, start, max(case.input_count, case.output_count))
    return case.part(whole) if c.output_parts else whole, case.part(whole) if c.input_parts else whole


def _typed(buffer: torch.Tensor, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
    item = dtype.itemsize
    return buffer[start * item : (start + count) * item].view(dtype)


# ---- calls -------------------------------------------------------------------------------------------------------

Target = Callable[[Case, Any, Any, bool], Call | None]
"""Returns the call of a case with its input and its output, in place or not; None: there is no such call."""


def comm_call(
    comm: Communicator, algorithm: str, agg: int, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool
) -> Call | None:
    """Returns a call of ringcomm's own Communicator, or ``agg`` of them in a group."""
    one = _one_comm_call(comm, algorithm, agg == 1, case, x, y, in_place)
    return one if agg == 1 or one is None else partial(_grouped, comm, one, agg)


def _grouped(comm: Communicator, one: Call, agg: int) -> None:
    with comm.coalesce():
        for _ in range(agg):
            one()


def _one_comm_call(
    comm: Communicator, algorithm: str, waits: bool, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool
) -> Call | None:
    name, op = case.collective.name, case.op
    chosen: dict[str, Any] = {} if algorithm == "auto" else {"algorithm": algorithm}
    factor: dict[str, Any] = {"factor": case.factor} if case.collective.reduces and op == "premul_sum" else {}
    if name == "all_reduce" and in_place and op == "sum":
        return partial(comm.all_reduce, x, **chosen)
    if name == "all_reduce":
        out: dict[str, Any] = {} if in_place else {"out": y}
        return partial(comm.all_reduce, x, op, **out, **chosen, **factor)
    if name == "reduce_scatter":
        return partial(comm.reduce_scatter, x, op, out=y, **chosen, **factor)
    if name == "all_gather":
        return partial(comm.all_gather, x, out=y, **chosen)
    if name == "broadcast":  # it has only one buffer
        return partial(comm.broadcast, x, case.root, **chosen) if in_place else None
    if name == "reduce":
        out = {} if in_place or not case.has_output else {"out": y}
        return partial(comm.reduce, x, case.root, op, **out, **factor)
    if name == "alltoall":
        return partial(comm.all_to_all, x, out=y, **chosen)
    if name == "gather":
        return partial(comm.gather, x, case.root, out=y if case.has_output else None)
    if name == "scatter":
        return partial(comm.scatter, x if case.has_input else None, case.root, out=y)
    return partial(_exchange, comm, x, y, waits) if name == "sendrecv" else comm.barrier


def _exchange(comm: Communicator, x: torch.Tensor, y: torch.Tensor, wait: bool) -> None:
    sent = comm.isend(x, (comm.rank + 1) % comm.world_size)
    received = comm.irecv(y, (comm.rank - 1) % comm.world_size)
    if wait:
        received.wait()
        sent.wait()


def dist_call(group: Any, case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
    """Returns a call of a torch.distributed backend, made through torch: all_reduce, broadcast and reduce exist only in
    place."""
    import torch.distributed as dist

    name, own = case.collective.name, {"group": group}
    op = None if case.op == "premul_sum" else torch_reduction(case.op)  # its factor is in the operator
    if case.collective.reduces and op is None:
        return None
    only_in_place = name in ("all_reduce", "broadcast", "reduce")
    if only_in_place != in_place and name not in ("reduce_scatter", "all_gather"):
        return None
    if name in ("gather", "scatter") and not case.count:
        return None
    if name == "all_reduce":
        return partial(dist.all_reduce, x, op, **own)
    if name == "reduce_scatter":
        return partial(torch_collective("reduce_scatter_single", "reduce_scatter_tensor"), y, x, op, **own)
    if name == "all_gather":
        return partial(torch_collective("all_gather_single", "all_gather_into_tensor"), y, x, **own)
    if name == "broadcast":
        return partial(dist.broadcast, x, case.root, **own)
    if name == "reduce":
        return partial(dist.reduce, x, case.root, op, **own)
    if name == "alltoall":
        return partial(dist.all_to_all_single, y, x, **own)
    if name == "gather":
        parts = list(y.chunk(case.world_size)) if case.has_output else None
        return partial(dist.gather, x, parts, dst=case.root, **own)
    if name == "scatter":
        parts = list(x.chunk(case.world_size)) if case.has_input else None
        return partial(dist.scatter, y, parts, src=case.root, **own)
    return partial(_dist_exchange, group, x, y) if name == "sendrecv" else partial(dist.barrier, **own)


def _dist_exchange(group: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    import torch.distributed as dist

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sent = dist.isend(x, (rank + 1) % world_size, group=group)
    dist.recv(y, (rank - 1) % world_size, group=group)
    sent.wait()


def copy_of(case: Case) -> Case:
    """Returns the case whose input and output `copy_call` copies."""
    import torch

    return replace(case, collective=COPY, dtype=torch.uint8, count=case.nbytes)


def copy_call(case: Case, x: torch.Tensor, y: torch.Tensor, in_place: bool) -> Call | None:
    """Returns a call without communication: every rank copies as many bytes as its message has, all ranks at the same
    time."""
    return None if in_place or not case.count else partial(y.copy_, x)
