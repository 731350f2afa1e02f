"""A process group of torch.distributed as a communicator's engine, so that code written for a communicator runs on
NCCL or Gloo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ringcomm.arrays.devices import CPU
from ringcomm.arrays.libraries import Array, usual_stream
from ringcomm.comm.engine import CollectiveArgs, Engine, Pairs, Piece, whole_milliseconds
from ringcomm.errors import CollectiveTimeoutError, InvalidArgumentError, RingcommError, UnsupportedError

_COMBINES = {
    "sum": "add",
    "prod": "mul",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}
"""The name of torch's function that reduces two tensors, by our name of the reduction."""
Started = tuple[list[Any], Callable[[], None]]
"""The process group's handles of a call, and the function to run when they are done."""


def torch_reduction(op: str) -> Any:
    """Returns the ReduceOp of torch.distributed that has our name ``op``, or None if torch has none."""
    import torch.distributed as dist

    return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()), None)


def torch_collective(name: str, old_name: str) -> Any:
    """Returns a function of torch.distributed that torch 2.13 has renamed."""
    import torch.distributed as dist

    return getattr(dist, name if hasattr(dist, name) else old_name)


class TorchRequest:
    """A call in flight in a process group."""

    def __init__(self, call: CollectiveArgs, started: Started, limit_ms: int) -> None:
        self._call = call
        self._works = [work for work in started[0] if work is not None]
        self._finish: Callable[[], None] | None = started[1]
        self._limit_ms = limit_ms
        self.source = -1

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for another rank."""
        return all(work.is_completed() for work in self._works)

    def start_now(self) -> None:
        """Does nothing: the process group has started the call."""

    def wait(self, timeout_ms: int = 0) -> None:
        """Waits for all parts of the call."""
        limit_ms = timeout_ms or self._limit_ms
        limits = (timedelta(milliseconds=limit_ms),) if limit_ms else ()
        try:
            for work in self._works:
                work.wait(*limits)
        except RuntimeError as error:
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            kind = CollectiveTimeoutError if late else RingcommError
            raise kind(f"{self._call.op}: rank {self._call.rank} got from the process group: {error}") from error
        if self._call.op == "recv" and self._finish is not None:
            self.source = self._call.root if self._call.root >= 0 else self._works[0]._source_rank()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
            self._hand_over()

    def _hand_over(self) -> None:
        """Makes other libraries, such as CuPy, order their later work on the results after torch's work."""
        output = self._call.output
        outputs = [piece.array for piece in output] if isinstance(output, list) else [output] if output else []
        for array in outputs:
            if array.device.kind == "cuda":
                array.library.follow(usual_stream(array.device), array.data)


def nothing() -> None:
    """Does nothing; most calls have nothing left to do."""


def piece_of(array: Array | list[Piece] | None) -> Piece:
    """Returns a piece that covers an array, which the call must have."""
    assert isinstance(array, Array)
    return Piece.of(array)


def flat(piece: Piece) -> Any:
    """Returns a piece as a one-dimensional torch tensor over the same memory."""
    import torch

    data = piece.array.data
    if not isinstance(data, torch.Tensor):
        data = torch.from_numpy(data) if piece.array.device == CPU else torch.from_dlpack(data)
    return data.reshape(-1)[piece.offset : piece.offset + piece.count]


def _chunks(call: CollectiveArgs, array: Array | list[Piece] | None, empty: Any) -> list[Any] | None:
    """Splits an array into one piece per rank; returns ``empty`` for each rank if there is nothing to split."""
    if array is None:
        return None
    return list(flat(piece_of(array)).chunk(call.world_size)) if call.count else [empty] * call.world_size


class ProcessGroupEngine(Engine):
    """An engine whose calls go through torch.distributed. The order of summation, the types and the devices are
    those of the group's own backend."""

    def __init__(self, pg: Any = None) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidArgumentError(
                "from_process_group: expected an initialised torch.distributed, got none; call init_process_group first"
            )
        self._dist = dist  # imported here: this module is also imported where torch is not
        self._limit_ms = 0
        self.pg = dist.group.WORLD if pg is None else pg
        self.rank = dist.get_rank(self.pg)
        self.world_size = dist.get_world_size(self.pg)
        if self.rank < 0:
            raise InvalidArgumentError("from_process_group: this process is not in the group; call it on members only")
        self.name = f"torch.distributed:{dist.get_backend(self.pg)}"

    @property
    def device_names(self) -> str:
        """The devices on which arrays may lie: those for which the group has a backend, such as "cpu,cuda"."""
        return ",".join(sorted({device.type for device in self.pg._device_types}))

    def exchange(self, payload: bytes) -> list[bytes]:
        found: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(found, payload, group=self.pg)
        return found

    # ---- running calls -------------------------------------------------------------------------------------------

    def run(self, call: CollectiveArgs) -> int:
        """Runs a call to its end; returns the source of a recv, else -1."""
        request = self.submit(call)
        request.wait()
        return request.source

    def submit(self, call: CollectiveArgs) -> TorchRequest:
        start = getattr(self, f"_{call.engine_op}")
        return TorchRequest(call, start(call), call.timeout_ms or self._limit_ms)

    def run_pair(self, sending: CollectiveArgs, receiving: CollectiveArgs) -> int:
        sent, received = self.submit_pair(sending, receiving)
        try:
            sent.wait()
        finally:
            received.wait()  # also after an error of the send, because the receive writes to the caller's memory
        return received.source

    def submit_pair(self, sending: CollectiveArgs, receiving: CollectiveArgs) -> tuple[TorchRequest, TorchRequest]:
        """Starts a send and a receive that do not wait for each other. NCCL needs both in one batch, which must name
        the source and run on one device."""
        source, target = flat(piece_of(sending.input)), flat(piece_of(receiving.output))
        if receiving.root < 0 or source.device != target.device:
            return self.submit(sending), self.submit(receiving)
        works = self._dist.batch_isend_irecv(
            [
                self._dist.P2POp(self._dist.isend, source, group=self.pg, tag=sending.tag, group_peer=sending.root),
                self._dist.P2POp(self._dist.irecv, target, group=self.pg, tag=receiving.tag, group_peer=receiving.root),
            ]
        )
        # A group that runs both as one operation returns one handle for both.
        sent, received = (works[:1], works[1:]) if len(works) == 2 else (works, works)
        limit_ms = sending.timeout_ms or self._limit_ms
        return (
            TorchRequest(sending, (sent, nothing), limit_ms),
            TorchRequest(receiving, (received, nothing), limit_ms),
        )

    def pack(self, call: CollectiveArgs, pairs: Pairs, scale: float) -> None:
        """Copies pairs of pieces that were already checked, with torch."""
        del call
        import torch

        for source, target in pairs:
            x, y = flat(source), flat(target)
            if not x.is_complex() and (x.dtype != y.dtype or scale != 1):
                x = x.to(torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32) * scale
            y.copy_(x)

    def combine(self, call: CollectiveArgs, first: Array, second: Array) -> None:
        import torch

        op, _ = call.reduction or ("sum", 1.0)
        target = flat(Piece.of(second))
        getattr(torch, _COMBINES[op])(flat(Piece.of(first)), target, out=target)

    def _reduction(self, call: CollectiveArgs) -> tuple[Any, float]:
        """Returns the group's reduce op and the divisor of its result, because Gloo has no average."""
        op, _ = call.reduction or ("sum", 1.0)
        if op == "premul_sum":
            return torch_reduction("sum"), 1
        if op == "avg" and "gloo" in self.name:
            return torch_reduction("sum"), self.world_size
        reduction = torch_reduction(op)
        if reduction is None:
            raise UnsupportedError(
                f"{call.op}: rank {call.rank} got op {op} over a process group, expected one that torch.distributed "
                "has; use a communicator that ringcomm.init makes"
            )
        return reduction, 1

    def _source(self, call: CollectiveArgs, piece: Piece) -> Any:
        """Returns a piece to reduce; for premul_sum a copy of it times the factor."""
        op, factor = call.reduction or ("sum", 1.0)
        return flat(piece) * factor if op == "premul_sum" else flat(piece)

    def _divide(self, tensor: Any, divisor: float) -> None:
        if divisor != 1:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.div_(divisor)
            else:
                tensor.div_(divisor, rounding_mode="trunc")

    def _all_reduce(self, call: CollectiveArgs) -> Started:
        op, divisor = self._reduction(call)
        target, source = flat(piece_of(call.output)), self._source(call, piece_of(call.input))
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        work = self._dist.all_reduce(target, op, group=self.pg, async_op=True)
        return [work], lambda: self._divide(target, divisor)

    def _reduce(self, call: CollectiveArgs) -> Started:
        op, divisor = self._reduction(call)
        # A group may use every rank's array as scratch space.
        scratch = self._source(call, piece_of(call.input)).clone()
        work = self._dist.reduce(scratch, group_dst=call.root, op=op, group=self.pg, async_op=True)

        def finish() -> None:
            if call.output is not None:
                self._divide(scratch, divisor)
                flat(piece_of(call.output)).copy_(scratch)

        return [work], finish

    def _reduce_scatter(self, call: CollectiveArgs) -> Started:
        op, divisor = self._reduction(call)
        target = flat(piece_of(call.output))
        if not isinstance(call.input, list):
            source = self._source(call, piece_of(call.input))
            scatter = torch_collective("reduce_scatter_single", "reduce_scatter_tensor")
            work = scatter(target, source, op, group=self.pg, async_op=True)
            return [work], lambda: self._divide(target, divisor)
        works, finishes = [], []  # uneven parts: one reduction for each
        for root, piece in enumerate(call.input):
            scratch = self._source(call, piece).clone()
            works.append(self._dist.reduce(scratch, group_dst=root, op=op, group=self.pg, async_op=True))
            if root == self.rank:
                finishes.append(scratch)

        def finish() -> None:
            target.copy_(finishes[0])
            self._divide(target, divisor)

        return works, finish

    def _all_gather(self, call: CollectiveArgs) -> Started:
        source = flat(piece_of(call.input))
        if not isinstance(call.output, list):
            target = flat(piece_of(call.output))
            gather = torch_collective("all_gather_single", "all_gather_into_tensor")
            return [gather(target, source.clone(), group=self.pg, async_op=True)], nothing
        works = []  # uneven parts: one broadcast from each rank
        for root, piece in enumerate(call.output):
            part = flat(piece)
            if root == self.rank and part.data_ptr() != source.data_ptr():
                part.copy_(source)
            works.append(self._dist.broadcast(part, group_src=root, group=self.pg, async_op=True))
        return works, nothing

    def _broadcast(self, call: CollectiveArgs) -> Started:
        tensor = flat(piece_of(call.output))
        return [self._dist.broadcast(tensor, group_src=call.root, group=self.pg, async_op=True)], nothing

    def _gather(self, call: CollectiveArgs) -> Started:
        source = flat(piece_of(call.input))
        parts = _chunks(call, call.output, source)
        return [self._dist.gather(source, parts, group_dst=call.root, group=self.pg, async_op=True)], nothing

    def _scatter(self, call: CollectiveArgs) -> Started:
        target = flat(piece_of(call.output))
        parts = _chunks(call, call.input, target)
        return [self._dist.scatter(target, parts, group_src=call.root, group=self.pg, async_op=True)], nothing

    def _all_to_all(self, call: CollectiveArgs) -> Started:
        import torch

        if not isinstance(call.input, list) or not isinstance(call.output, list):
            target, source = flat(piece_of(call.output)), flat(piece_of(call.input)).clone()
            return [self._dist.all_to_all_single(target, source, group=self.pg, async_op=True)], nothing
        sent, received = [p.count for p in call.input], [p.count for p in call.output]
        source = torch.cat([flat(piece) for piece in call.input])
        target = source.new_empty(sum(received))
        work = self._dist.all_to_all_single(target, source, received, sent, group=self.pg, async_op=True)
        pieces = call.output

        def finish() -> None:
            for piece, part in zip(pieces, target.split(received), strict=True):
                flat(piece).copy_(part)

        return [work], finish

    def _send(self, call: CollectiveArgs) -> Started:
        return [self._dist.isend(flat(piece_of(call.input)), group=self.pg, tag=call.tag, group_dst=call.root)], nothing

    def _recv(self, call: CollectiveArgs) -> Started:
        source = None if call.root < 0 else call.root
        return [self._dist.irecv(flat(piece_of(call.output)), group=self.pg, tag=call.tag, group_src=source)], nothing

    def _barrier(self, call: CollectiveArgs) -> Started:
        del call
        return [self._dist.barrier(group=self.pg, async_op=True)], nothing

    # ---- life ----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Any, library: str) -> Any:
        """Returns an ordinary new array, because a process group has no memory of its own to lend."""
        return importlib.import_module(library).empty(shape, dtype=dtype)

    def split(self, color: int | None, key: int) -> ProcessGroupEngine | None:
        """Returns an engine over a new process group of the same backend, of the ranks of this color; None if this
        rank has no color. A collective."""
        places: list[Any] = [None] * self.world_size
        made = len(self._dist.distributed_c10d._world.pg_names)  # torch makes this count a part of the new group's name
        self._dist.all_gather_object(places, (color, key, made), group=self.pg)
        members = [r for r, (its, _, _) in enumerate(places) if its == color and color is not None]
        members.sort(key=lambda r: places[r][1])
        if not members:
            return None
        if len({places[r][2] for r in members}) > 1:
            counts = ", ".join(f"rank {r} {places[r][2]}" for r in members)
            raise UnsupportedError(
                f"split: rank {self.rank} expected ranks {members} to have made equal numbers of process groups, "
                f"got {counts}, so torch would name the new group differently on them; make each split one in which "
                "every rank gets a group"
            )
        ranks = [self._dist.get_global_rank(self.pg, r) for r in members]
        limit = timedelta(milliseconds=self.timeout_ms)
        options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        try:
            group = self._dist.new_group(
                ranks, backend=self._dist.get_backend(self.pg), timeout=limit, use_local_synchronization=True, **options
            )
        except TypeError as error:
            raise UnsupportedError(
                f"split: rank {self.rank} got keys that order the ranks {ranks}, this torch makes groups in ascending "
                "order only; pass keys that keep the order"
            ) from error
        return ProcessGroupEngine(group)

    @property
    def timeout_ms(self) -> int:
        """The time limit of every call without its own: the one set here, else torch's default."""
        from torch.distributed.constants import default_pg_timeout

        return self._limit_ms or whole_milliseconds(default_pg_timeout)

    @timeout_ms.setter
    def timeout_ms(self, limit_ms: int) -> None:
        self._limit_ms = limit_ms

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Aborts the process group, if its backend can."""
        del cause
        try:
            self.pg.abort()
        except RuntimeError as error:
            raise UnsupportedError(
                f"abort: rank {self.rank} asked {self.name} to abort ({reason}), which its backend cannot do: {error}"
            ) from error

    def leave(self, reason: str, error: BaseException | None) -> None:
        """Does nothing: the group stays as it is."""

    def close(self) -> None:
        """Does nothing: the group stays as it is."""
