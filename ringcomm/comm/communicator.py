"""A communicator: collectives on arrays, and the lifetime of a group of ranks.

All methods share these rules. Arrays are torch tensors, NumPy and CuPy arrays, buffers or anything with ``__dlpack__``,
``__cuda_array_interface__`` or ``__array_interface__``, on the communicator's device. An array that is not contiguous
goes through a contiguous copy and is written back. Writing to a torch tensor raises its version counter, as torch's
in-place operations do, so that a backward pass which needs the old values raises an error. Every rank makes the same
calls in the same order with the same counts and element types. ``timeout`` is in seconds (or a timedelta); None means
the communicator's. With ``async_op=True`` a method returns a Work at once, whose ``wait()`` returns the result.

On a device a method returns once the call is enqueued on a stream: ``stream`` (a stream of torch or CuPy, or its
address), else the stream on which the library of the first array currently works. ``barrier`` and ``synchronize`` wait,
and raise the errors of earlier calls; so does any later call.

Every method raises, before anything is sent: ShapeError, DtypeError, DeviceError, InvalidArgumentError, ClosedError;
and from the call itself: CollectiveTimeoutError, AbortedError, MismatchError.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any

from ringcomm import _C
from ringcomm.arrays.interop import DTYPE_NAMES, identity
from ringcomm.arrays.libraries import Array, dtype_in
from ringcomm.comm import profiling
from ringcomm.comm.engine import (
    MOST_BYTES,
    CollectiveArgs,
    Engine,
    Pairs,
    Piece,
    Timeout,
    milliseconds,
    named_reduction,
    rows,
)
from ringcomm.comm.work import Group, Work
from ringcomm.errors import (
    ClosedError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
    UnsupportedError,
    one_line,
    rank_list,
    shown,
)
from ringcomm.validation import as_int, as_list

_AUTO = "auto"
"""The default of ``algorithm``. The fast path compares by identity, so an equal string may take the slow path."""
_CASTABLE = ("float32", "float64", "float16", "bfloat16")
_SUMS_IN = dict.fromkeys(("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"), "float32") | {
    "complex32": "complex64"
}
"""Narrow types, and the wider type in which their values are added."""
_EXCHANGED = b"ringcomm"
"""The first line of every exchanged payload that names its call; no other payload begins with it."""
_SCANS = {op: _C.REDUCE_OPS[op] for op in ("sum", "prod", "min", "max", "band", "bor", "bxor")}


@dataclass(frozen=True, slots=True)
class Status:
    """A message that has arrived, as `Communicator.probe` and `iprobe` describe it.

    Attributes:
        source: the rank that sent it.
        tag: its tag.
        dtype: the name of its element type, such as "float32"; "uint8" for NumPy's structured types, byte-swapped types
            and dates, which travel as bytes.
        count: the number of its elements of this type.
        nbytes: its size in bytes.
    """

    source: int
    tag: int
    dtype: str
    count: int
    nbytes: int


class Communicator:
    """One rank in a group of ranks, with the collectives among them.

    It is created by `ringcomm.init`, `ringcomm.run_ranks` or `from_process_group`, or from another communicator by
    `split`, `subgroup` and `dup`. Use it as a context manager, or call `close`.

    Attributes:
        rank, world_size: this rank's number, from 0, and the number of ranks.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise InvalidArgumentError(
                f"Communicator: got {shown(engine)}, expected an engine; call ringcomm.init, ringcomm.run_ranks or "
                "Communicator.from_process_group, which make communicators"
            )
        self._engine: Engine | None = engine
        self._engine_name = engine.name
        self._device = engine.device
        self._device_names = engine.device_names
        self._lends_memory = engine.lends_memory
        self._run_plain_native: Any = engine.run_plain
        self._submit_plain_native: Any = engine.submit_plain
        self._pack_plain_native: Any = engine.pack_plain
        self.rank = engine.rank
        self.world_size = engine.world_size
        self._closed = False
        self._group: Group | None = None
        self._in_flight: deque[Work] = deque()
        self._in_flight_lock = threading.RLock()  # reentrant: inside it the garbage collector may run a finalizer
        profiling.look()

    @staticmethod
    def from_process_group(pg: Any = None) -> Communicator:
        """Returns a communicator over any process group of torch.distributed, such as NCCL or Gloo, with the same
        methods. The order of summation, the types and the devices are those of the group's own backend.

        Args:
            pg: the group; None: the default one.
        Returns: a communicator; closing it leaves the group as it is.
        """
        from ringcomm.comm.process_group import ProcessGroupEngine

        return Communicator(ProcessGroupEngine(pg))

    @property
    def engine(self) -> str:
        """The engine that moves the bytes: "cpu", "cuda", or a process group, such as "torch.distributed:gloo"."""
        return self._engine_name

    @property
    def device(self) -> str:
        """The device on which arrays must lie, as torch names it: "cpu", or for example "cuda:0"; for a process
        group all kinds of device that it serves, such as "cpu,cuda"."""
        return self._device_names

    @property
    def lends_memory(self) -> bool:
        """Whether `empty` returns memory that the peers read and write in place."""
        return self._lends_memory

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host; ranks on one host share memory."""
        return [list(ranks) for ranks in self._open.hosts.ranks]

    @property
    def order(self) -> str:
        """The order in which reductions add the ranks' values, unless ``algorithm="ring"`` selects the ring's order.

        "canonical": the balanced tree over all ranks. "canonical over hosts": the balanced tree over the ranks of each
        host, and then over the hosts. It is used if the ranks of a host do not form a subtree of the tree over all
        ranks.
        """
        return self._open.hosts.order()

    @property
    def _open(self) -> Engine:
        if self._engine is None:
            raise ClosedError(f"communicator: rank {self.rank} expected an open one, got one that was closed")
        return self._engine

    # ---- how a call begins and ends ------------------------------------------------------------------------------

    def _begin(self, op: str, timeout: Timeout = None, stream: Any = None) -> CollectiveArgs:
        engine = self._engine  # another thread may close it meanwhile
        if engine is None:
            raise ClosedError(
                f"{op}: rank {self.rank} expected an open communicator, got one that was closed; create a new one"
            )
        return CollectiveArgs(op, engine, timeout, stream)

    def _launch(self, call: CollectiveArgs, result: Any, async_op: bool) -> Any:
        waits = not call.flag("async_op", async_op) and self._group is None
        call.note_writes()
        if waits:
            return call.finish(self._open.run(call), result)
        return self._keep(Work(self._open.submit(call), call.engine, call.op, result, call))

    def _keep(self, work: Work) -> Work:
        """Keeps the arrays of a call that has begun alive until it is done, even if the caller drops its Work."""
        if self._group is not None:
            self._group.works.append(work)
        ended = []  # freed after the lock is released, because an array's finalizer may call this communicator
        with self._in_flight_lock:
            flight = self._in_flight
            # Checks at most two calls for each new one, because checking all of them is expensive.
            if flight and not flight[0].ended:
                flight.rotate(-1)  # else one long receive would keep all later calls in the queue
            elif flight:
                ended.append(flight.popleft())
                if flight and flight[0].ended:
                    ended.append(flight.popleft())
            flight.append(work)
        return work

    @contextmanager
    def coalesce(self) -> Iterator[Group]:
        """Starts the calls made inside the block in their order, and waits for all of them at its end.

        Inside the block every method that has an ``async_op``, and every send and receive, only starts its call, and
        returns a Work (`all_reduce_coalesced`: a Group). The other methods, such as `probe`, `scan` and `exchange`,
        wait as usual. No other thread may use the communicator during the block.

        Returns: the Group of calls; its ``wait()`` returns the results, even after the block.
        """
        if self._group is not None:
            raise InvalidArgumentError(
                f"coalesce: rank {self.rank} is inside another coalesce block, expected none; leave it first"
            )
        self._group = group = Group()
        try:
            yield group
        finally:
            self._group = None
        group.wait()

    def _run_plain(
        self,
        op: str,
        x: Any,
        out: Any,
        timeout: Timeout,
        stream: Any = None,
        async_op: bool = False,
        algorithm: str = "auto",
        reduce_op: str = "sum",
        factor: float | None = None,
        root: int | None = 0,
        tag: int = 0,
    ) -> Any:
        """Fast path for a call whose arguments need no preparation: makes the call, and returns its method's result;
        NotImplemented if the arguments need preparation, so that nothing was done."""
        if timeout is not None or stream is not None or factor is not None or algorithm is not _AUTO:
            return NotImplemented
        starts = async_op is not False or self._group is not None
        make = self._submit_plain_native if starts else self._run_plain_native  # None once the communicator is closed
        engine = self._engine
        if starts:
            if type(async_op) is not bool:
                return NotImplemented
            profiling.look()
        if make is None or engine is None or profiling.profiler._is_profiler_enabled:
            return NotImplemented  # the slow path raises the error, or shows the call's name to the profiler
        made = make(op, reduce_op, root, tag, x, out)
        if made is None:
            return NotImplemented
        if starts:
            return self._keep(Work(made, engine, op, root if op == "recv" else out, None, out if x is None else x))
        return made if op == "recv" else out

    # ---- reductions ----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        factor: float | None = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces ``x`` over all ranks elementwise; every rank gets the result, in ``x`` or in ``out``.

        Args:
            op: sum, avg, prod, min, max, premul_sum, band, bor, bxor; or a ReduceOp of torch.distributed. avg of
                integers rounds towards zero.
            factor: with premul_sum: this rank's values are multiplied by it before the sum.
            algorithm: auto, ring, direct, oneshot. ``auto`` never changes the bits.
        Shapes:  any; the same number of elements on every rank.
        Dtypes:  float64/32/16, bfloat16, float8_e4m3fn, float8_e5m2, int64/32/16/8, uint8, bool, complex.
                 Floats have no band, bor, bxor; integers no premul_sum; bool neither avg nor premul_sum; complex
                 numbers only sum, avg, premul_sum. Integers wrap around, also in "avg", which adds them in their own
                 type and then divides, towards 0.
        Order:   canonical: a balanced tree over the ranks. 16- and 8-bit floats are added in float32 and rounded once.
        Cost:    2 (W-1)/W of the bytes each way; one round for short messages.
        Returns: ``x``, or ``out``.
        """
        target = x if out is None else out
        made = self._run_plain("all_reduce", x, target, timeout, stream, async_op, algorithm, op, factor)
        if made is not NotImplemented:
            return made
        call = self._begin("all_reduce", timeout, stream)
        return self._launch(self._prepare_all_reduce(call, x, op, out, factor, algorithm), target, async_op)

    def _prepare_all_reduce(
        self, call: CollectiveArgs, x: Any, op: str, out: Any, factor: float | None, algorithm: str
    ) -> CollectiveArgs:
        call.reduces(op, factor)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        if out is None:
            call.input = call.output = call.update(x)
        else:
            source = call.read(x)
            call.output = call.output_like(source, out, source.shape)
            call.input = call.separate(source, call.output)
        return call.validate(call.output.count, call.output.dtype)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        factor: float | None = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces ``x`` over all ranks elementwise; the root gets the result, in ``x`` or in ``out``.

        Args:    op, factor: as in all_reduce.
        Shapes:  any; the same number of elements on every rank.
        Order:   canonical, as in all_reduce.
        Returns: ``x`` or ``out`` at the root, None elsewhere, where ``x`` stays unchanged.
        """
        call = self._begin("reduce", timeout, stream)
        call.root = call.peer("root", root)
        call.reduces(op, factor)
        at_root = self.rank == call.root
        if at_root and out is None:
            call.input = call.output = call.update(x)
        else:
            call.input = call.read(x)
            if at_root:
                call.output = call.output_like(call.input, out, call.input.shape)
                call.input = call.separate(call.input, call.output)
        result = None if not at_root else x if out is None else out
        return self._launch(call.validate(call.input.count, call.input.dtype), result, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        factor: float | None = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces ``x`` over all ranks elementwise; rank r gets the r-th part of the result along dimension 0.

        Args:    op, factor, algorithm: as in all_reduce, without oneshot.
        Shapes:  x (W*n, ...), out (n, ...). ``out`` may be this rank's part of ``x``.
        Order:   canonical, as in all_reduce.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        made = self._run_plain("reduce_scatter", x, out, timeout, stream, async_op, algorithm, op, factor)
        if made is not NotImplemented:
            return made
        call = self._begin("reduce_scatter", timeout, stream)
        call.reduces(op, factor)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        call.output = call.output_like(source, out, *call.scattered(source))
        call.input = call.separate(source, call.output, self.rank * call.output.count)
        result = call.output.data if out is None else out
        return self._launch(call.validate(call.output.count, source.dtype), result, async_op)

    def scan(self, x: Any, op: str = "sum", *, out: Any = None, timeout: Timeout = None, stream: Any = None) -> Any:
        """Reduces ``x`` over this rank and all ranks before it elementwise, in ``x`` or in ``out``: MPI's Scan, the
        inclusive prefix reduction.

        Args:
            op: sum, prod, min, max, band, bor, bxor; or a ReduceOp of torch.distributed.
        Shapes:  any; the same number of elements on every rank.
        Dtypes:  as in all_reduce.
        Order:   for each rank a fixed tree over the ranks before it, the same for every number of ranks and every
                 engine. 16- and 8-bit floats are added in float32, complex32 in complex64, and rounded once.
        Cost:    ceil(log2 W) rounds, in each of which a rank sends and receives its bytes once (16- and 8-bit floats
                 as float32, complex32 as complex64), and memory for two copies. A round needs the one before, so there
                 is no ``async_op``, and `coalesce` does not defer it.
        Returns: ``x``, or ``out``.
        """
        return self._scan("scan", x, op, out, timeout, stream)

    def exscan(self, x: Any, op: str = "sum", *, out: Any = None, timeout: Timeout = None, stream: Any = None) -> Any:
        """Reduces ``x`` over all ranks before this one elementwise, in ``x`` or in ``out``: MPI's Exscan, the exclusive
        prefix reduction.

        Rank r gets the bits that `scan` gives rank r-1. Rank 0 gets the operation's identity: zeros for sum, bor and
        bxor, ones for prod, all bits set for band, the type's largest value (infinity) for min, its smallest for max.

        Args, shapes, dtypes, order: as in `scan`.
        Cost:    one round more than `scan`.
        Returns: ``x``, or ``out``.
        """
        return self._scan("exscan", x, op, out, timeout, stream)

    def _scan(self, name: str, x: Any, op: str, out: Any, timeout: Timeout, stream: Any) -> Any:
        """Recursive doubling: after the round of distance d a rank holds the reduction over itself and the 2d - 1 ranks
        before it."""
        call = self._begin(name, timeout, stream)
        op = call.one_of("op", named_reduction(op, None)[0], _SCANS)
        call.reduces(op, None)
        if out is None:
            source = target = call.update(x)
        else:
            source = call.read(x)
            target = call.output_like(source, out, source.shape)
        call.validate(target.count, target.dtype)
        call.note_writes()
        engine = self._open
        mine = call.fresh(source, source.shape, _SUMS_IN.get(source.dtype.name))
        theirs = call.fresh(mine, mine.shape)
        engine.pack(call, [(Piece.of(source), Piece.of(mine))], 1.0)
        mark = _C.scan_mark(call.wire[0], _SCANS[op], name == "exscan")
        distance = 1
        while distance < self.world_size:
            self._shift(call, mine, theirs, distance, mark)
            if self.rank >= distance:
                engine.combine(call, theirs, mine)
            distance *= 2
        if name == "exscan":
            self._shift(call, mine, theirs, 1, mark)
            mine = theirs
        if name == "exscan" and self.rank == 0:
            with call.on_stream(target):
                target.library.assign(target.data, identity(op, target.dtype))
        else:
            engine.pack(call, [(Piece.of(mine), Piece.of(target))], 1.0)
        return call.finish(-1, x if out is None else out)

    def _shift(self, call: CollectiveArgs, source: Array, target: Array, distance: int, mark: int) -> None:
        """Sends an array to the rank ``distance`` after this one, and receives one from the rank ``distance`` before
        it. The engine compares ``mark`` over the ranks, so ranks in different scans get a MismatchError."""
        ranks = range(self.world_size)
        turn = CollectiveArgs(call.op, call.engine)
        turn.first, turn.stream, turn.timeout_ms, turn.root = call.first, call.stream, call.timeout_ms, mark
        turn.input = [Piece(source, 0, source.count if r == self.rank + distance else 0) for r in ranks]
        turn.output = [Piece(target, 0, target.count if r == self.rank - distance else 0) for r in ranks]
        self._open.run(turn.validate(0, source.dtype))

    # ---- movement ------------------------------------------------------------------------------------------------

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers ``x`` of all ranks on every rank, in rank order along dimension 0.

        Args:
            algorithm: auto, ring, direct; on GPUs of one host also copy_engine.
        Shapes:  x (n, ...), the same on every rank (`all_gather_list` learns different ones), out (W*n, ...) or
                 (W, n, ...). ``x`` may be this rank's part of ``out``.
        Dtypes:  all.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        made = self._run_plain("all_gather", x, out, timeout, stream, async_op, algorithm)
        if made is not NotImplemented:  # not `_all_gather`: a Python call takes a tenth of a small all_gather's time
            return made
        call = self._begin("all_gather", timeout, stream)
        return self._launch_all_gather(call, x, out, algorithm, async_op, mark=0)

    def _all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
        mark: int,
    ) -> Any:
        """Runs all_gather with a mark, a number that our engines compare: ranks with different marks get a
        MismatchError instead of each other's data. A process group ignores the mark."""
        made = self._run_plain("all_gather", x, out, timeout, stream, async_op, algorithm, root=mark)
        if made is not NotImplemented:
            return made
        call = self._begin("all_gather", timeout, stream)
        return self._launch_all_gather(call, x, out, algorithm, async_op, mark)

    def _launch_all_gather(
        self, call: CollectiveArgs, x: Any, out: Any, algorithm: str, async_op: bool, mark: int
    ) -> Any:
        call.root = mark
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        call.output = call.output_like(source, out, *call.gathered(source))
        call.input = call.separate(source, call.output, self.rank * source.count)
        result = call.output.data if out is None else out
        return self._launch(call.validate(source.count, source.dtype), result, async_op)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Copies the root's ``x`` to every rank, in place.

        Shapes:  any; the same number of elements on every rank.
        Dtypes:  all.
        Returns: ``x``.
        """
        made = self._run_plain("broadcast", x, x, timeout, stream, async_op, algorithm, root=root)
        if made is not NotImplemented:
            return made
        call = self._begin("broadcast", timeout, stream)
        call.root = call.peer("root", root)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        if self.rank == call.root:
            call.input = call.read(x)
            call.output = call.input
        else:
            call.output = call.write(x)
        return self._launch(call.validate(call.output.count, call.output.dtype), x, async_op)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers ``x`` of all ranks at the root, in rank order along dimension 0.

        Shapes:  x (n, ...), out at the root (W*n, ...) or (W, n, ...).
        Dtypes:  all.
        Returns: ``out`` or a new array at the root, None elsewhere.
        """
        call = self._begin("gather", timeout, stream)
        call.root = call.peer("root", root)
        call.input = call.read(x)
        result = None
        if self.rank == call.root:
            call.output = call.output_like(call.input, out, *call.gathered(call.input))
            call.input = call.separate(call.input, call.output, None)
            result = call.output.data if out is None else out
        return self._launch(call.validate(call.input.count, call.input.dtype), result, async_op)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Splits the root's ``x`` along dimension 0; rank r gets the r-th part.

        Args:
            x: the array at the root; None elsewhere.
            out: where the part is written; required on every rank except the root.
        Shapes:  x (W*n, ...), out (n, ...).
        Dtypes:  all.
        Returns: ``out``; at the root without ``out``, a new array.
        """
        call = self._begin("scatter", timeout, stream)
        call.root = call.peer("root", root)
        if self.rank == call.root:
            source = call.read(x)
            call.output = call.output_like(source, out, *call.scattered(source))
            call.input = call.separate(source, call.output, None)
        elif out is None:
            raise InvalidArgumentError(
                f"scatter: rank {self.rank} got no out, expected an array for its part of rank {root}'s; pass out="
            )
        else:
            call.output = call.write(out)
        result = call.output.data if out is None else out
        return self._launch(call.validate(call.output.count, call.output.dtype), result, async_op)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends part r of every rank's ``x`` to rank r, which gets the parts in rank order along dimension 0.

        Args:
            send_counts: rows of ``x`` for each rank, if they are not all equal.
            recv_counts: rows from each rank. If it is None, the ranks exchange their counts first; either all ranks
                pass it or none does.
            algorithm: auto, direct; on GPUs of one host also copy_engine.
        Shapes:  x (W*n, ...), out the same; with counts x (sum(send_counts), ...), out (sum(recv_counts), ...).
        Dtypes:  all.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        even = send_counts is None and recv_counts is None
        made = self._run_plain("all_to_all", x, out, timeout, stream, async_op, algorithm) if even else NotImplemented
        if made is not NotImplemented:
            return made
        call = self._begin("all_to_all", timeout, stream)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        if even:
            count = math.prod(call.divisible(source))
            output = call.output_like(source, out, source.shape)
            call.input, call.output = call.separate(source, output), output
        else:
            output = self._prepare_uneven(call, source, out, send_counts, recv_counts)
            count = 0
        return self._launch(call.validate(count, source.dtype), output.data if out is None else out, async_op)

    def _prepare_uneven(
        self,
        call: CollectiveArgs,
        source: Array,
        out: Any,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
    ) -> Array:
        if send_counts is None:
            send_counts = [call.divisible(source)[0]] * self.world_size
        send_counts = self._checked_counts(call, "send_counts", send_counts)
        if not source.shape or sum(send_counts) != source.shape[0]:
            raise ShapeError(
                f"all_to_all: rank {self.rank} got shape {source.shape} and send_counts that sum to "
                f"{sum(send_counts)}; make them sum to the first dimension"
            )
        if recv_counts is None:
            recv_counts = self._swap_counts(send_counts, call.timeout_ms)
        recv_counts = self._checked_counts(call, "recv_counts", recv_counts)
        output = call.output_like(source, out, (sum(recv_counts), *source.shape[1:]))
        call.input = rows(call.separate(source, output, None), send_counts)
        call.output = rows(output, recv_counts)
        return output

    def _checked_counts(self, call: CollectiveArgs, what: str, counts: Sequence[int]) -> list[int]:
        listed = as_list(counts) or []
        numbers = [number for number in map(as_int, listed) if number is not None]
        is_complete = len(numbers) == len(listed) == self.world_size
        if not is_complete or any(not 0 <= number < 1 << 62 for number in numbers):
            raise ShapeError(
                f"{call.op}: rank {self.rank} got {what}={shown(counts)}, expected {self.world_size} whole numbers; "
                "pass one number of rows for each rank"
            )
        return numbers

    def _swap_counts(self, counts: list[int], timeout_ms: int) -> list[int]:
        if self._device is not None and self._device.kind != "cpu":  # the counts are in host memory
            row = struct.Struct(f"<{self.world_size}q")
            return [row.unpack(each)[self.rank] for each in self._open.exchange(row.pack(*counts))]
        import numpy as np

        call = self._begin("all_to_all", timeout_ms / 1e3 or None)  # runs at once, even inside a coalesce block
        call.input = call.read(np.array(counts, np.int64))
        call.output = call.output_like(call.input, None, (self.world_size,))
        swapped = call.finish(self._open.run(call.validate(1, call.input.dtype)), call.output.data)
        return [int(count) for count in swapped]

    # ---- point to point ------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Sends ``x`` to rank ``dst``. A receive takes the oldest message from its source with a matching tag.

        Shapes:  any; the receiver must pass the same number of elements.
        Dtypes:  all.
        """
        return self._send(x, dst, tag, timeout, stream, async_op=False)

    def isend(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work:
        """Like ``send``, but returns a Work at once; ``x`` must not change before the Work is done."""
        return self._send(x, dst, tag, timeout, stream, async_op=True)

    def recv(self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> int:
        """Receives into ``x`` from rank ``src``; if it is None, from the first rank that sends.

        Returns: the sender's rank.
        """
        return self._recv(x, src, tag, timeout, stream, async_op=False)

    def irecv(
        self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None, stream: Any = None
    ) -> Work:
        """Like ``recv``, but returns a Work at once; its ``wait()`` returns the sender's rank."""
        return self._recv(x, src, tag, timeout, stream, async_op=True)

    def probe(self, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Status:
        """Waits for a message from rank ``src``, or, if it is None, from any rank, and describes it without receiving
        it: the message that a ``recv`` with the same ``src`` and ``tag`` would take next.

        ``recv(x, status.source, status.tag)`` takes exactly this message, unless another thread receives it first.
        The message is not copied until it is received. Messages with other tags that the same rank sent before it are
        copied to memory now, as a ``recv`` would do. Only the cpu engine on one host can probe.

        Returns: a Status with the message's source, tag, dtype and size, by which to allocate ``x``.
        Raises:  UnsupportedError on other engines, before anything is sent; else as ``recv``.
        """
        found = self._probe(src, tag, timeout, waits=True)
        assert found is not None
        return found

    def iprobe(self, src: int | None = None, tag: int = 0) -> Status | None:
        """Like ``probe``, but does not wait: returns None if there is no such message yet, also if the rank has closed
        its communicator. The flight recorder does not record it."""
        return self._probe(src, tag, None, waits=False)

    def sendrecv(
        self,
        send: Any,
        dst: int,
        recv: Any,
        src: int | None = None,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends ``send`` to rank ``dst`` and receives into ``recv`` from rank ``src``, both at once.

        Ranks that send round a ring, or to each other, do not wait for each other's receives, whatever the messages'
        sizes. The other side may be a `sendrecv`, or any send or receive. Over a process group of NCCL it must be a
        `sendrecv`, and if that is the group's first call, all ranks must make one (see torch's `batch_isend_irecv`).

        Args:
            src: None: the first rank that sends; UnsupportedError on several hosts.
            recv_tag: the tag of the message to receive; None: ``tag``.
        Shapes:  any; each receiver must pass the same number of elements as its sender. The two may overlap.
        Dtypes:  all; the two may differ.
        Returns: the sender's rank; with ``async_op=True`` the Group of the send and the receive.
        """
        call = self._begin("sendrecv")
        call.flag("async_op", async_op)
        sending = self._prepare_send(self._begin("sendrecv", timeout, stream), send, dst, tag)
        recv_tag = tag if recv_tag is None else recv_tag
        receiving = self._prepare_recv(self._begin("sendrecv", timeout, stream), recv, src, recv_tag, "recv_tag")
        if receiving.root < 0 and not self._open.receives_from_any:
            raise UnsupportedError(
                f"sendrecv: rank {self.rank} got src=None, expected a rank, because a communicator of several hosts "
                "cannot wait for a message of any rank; name the source"
            )
        source = sending.input
        if isinstance(source, Array) and source.reaches_into(receiving.written[0]):
            sending.input = sending.copy(source)
        sending.op, receiving.op = "send", "recv"
        receiving.note_writes()
        if not async_op and self._group is None:
            return receiving.finish(self._open.run_pair(sending, receiving), None)
        group = Group()
        for call, request in zip((sending, receiving), self._open.submit_pair(sending, receiving), strict=True):
            group.works.append(self._keep(Work(request, call.engine, call.op, None, call)))
        return group

    def _send(self, x: Any, dst: int, tag: int, timeout: Timeout, stream: Any, async_op: bool) -> Any:
        made = self._run_plain("send", x, None, timeout, stream, async_op, root=dst, tag=tag)
        if made is not NotImplemented:
            return made
        return self._launch(self._prepare_send(self._begin("send", timeout, stream), x, dst, tag), None, async_op)

    def _recv(self, x: Any, src: int | None, tag: int, timeout: Timeout, stream: Any, async_op: bool) -> Any:
        made = self._run_plain("recv", None, x, timeout, stream, async_op, root=src, tag=tag)
        if made is not NotImplemented:
            return made
        return self._launch(self._prepare_recv(self._begin("recv", timeout, stream), x, src, tag), None, async_op)

    def _prepare_send(self, call: CollectiveArgs, x: Any, dst: int, tag: int) -> CollectiveArgs:
        call.root = self._other("dst", dst, call)
        call.tag = call.integer("tag", tag, 32)
        call.input = call.read(x)
        return call.validate(call.input.count, call.input.dtype)

    def _prepare_recv(
        self, call: CollectiveArgs, x: Any, src: int | None, tag: int, tag_name: str = "tag"
    ) -> CollectiveArgs:
        self._name_message(call, src, tag, tag_name)
        call.output = call.write(x)
        return call.validate(call.output.count, call.output.dtype)

    def _name_message(self, call: CollectiveArgs, src: int | None, tag: int, tag_name: str = "tag") -> None:
        """Sets which message the call receives or looks for."""
        call.root = -1 if src is None else self._other("src", src, call)
        if self.world_size == 1:
            raise InvalidArgumentError(
                f"{call.op}: rank {self.rank} is alone, expected another rank that can send; leave the call out"
            )
        call.tag = call.integer(tag_name, tag, 32)

    def _probe(self, src: int | None, tag: int, timeout: Timeout, waits: bool) -> Status | None:
        call = self._begin("probe", timeout)
        self._name_message(call, src, tag)
        found = self._open.probe(call, waits)
        if found is None:
            return None
        source, code, count, nbytes = found
        return Status(source, call.tag, DTYPE_NAMES[code], count, nbytes)

    def _other(self, what: str, value: int, call: CollectiveArgs) -> int:
        rank = call.peer(what, value)
        if rank == self.rank:
            raise InvalidArgumentError(
                f"{call.op}: rank {self.rank} got itself as {what}, expected another rank; copy the array instead"
            )
        return rank

    def barrier(self, *, timeout: Timeout = None, stream: Any = None, async_op: bool = False) -> Any:
        """Returns once every rank has called it and, on a device, all earlier calls have run.

        Raises:  on a device, the errors of earlier calls.
        """
        made = self._run_plain("barrier", None, None, timeout, stream, async_op)
        if made is not NotImplemented:
            return made
        return self._barrier(timeout=timeout, stream=stream, async_op=async_op, mark=0)

    def _barrier(self, *, timeout: Timeout = None, stream: Any = None, async_op: bool = False, mark: int) -> Any:
        """Runs barrier with a mark, as in `_all_gather`. Mark 1 belongs to the barrier before a gather that perhaps
        only some ranks have begun."""
        call = self._begin("barrier", timeout, stream)
        call.root = mark
        if not call.on_device or call.flag("async_op", async_op) or self._group is not None:
            return self._launch(call, None, async_op)
        self._launch(call, None, async_op=True).synchronize()
        return None

    # ---- lists of arrays: nothing is packed, each array is read and written where it lies --------------------------

    def all_reduce_coalesced(
        self,
        xs: Sequence[Any],
        op: str = "sum",
        *,
        factor: float | None = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Runs ``all_reduce`` on every array of ``xs``, in place; all arrays are checked before the first is sent.

        Consecutive arrays of one type are processed together: on a device one launch serves many of them.

        Returns: ``list(xs)``; with ``async_op=True``, and inside `coalesce`, the Group of calls.
        """
        calls = []
        together = self._begin("all_reduce_coalesced")
        for x in together.list_of("xs", xs):
            call = self._begin("all_reduce", timeout, stream)
            call.flag("async_op", async_op)
            calls.append(self._prepare_all_reduce(call, x, op, None, factor, algorithm))
            together.writes += call.writes
        together.separate_outputs()
        if not async_op and self._group is None:
            together.note_writes()
            for _, alike in groupby(calls, key=lambda call: (call.wire, call.stream)):
                self._open.run_list(list(alike))
            return [call.finish(-1, x) for call, x in zip(calls, xs, strict=True)]
        group = Group()
        group.works.extend(self._launch(call, x, async_op) for call, x in zip(calls, xs, strict=True))
        return group

    def all_gather_list(
        self,
        x: Any,
        outputs: Sequence[Any] | None = None,
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gathers ``x`` of all ranks on every rank, where each rank's array may have a shape of its own.

        Args:
            outputs: ``outputs[r]`` takes ``x`` of rank r; every rank passes the same sizes. None: the ranks exchange
                their shapes first, for which the host waits, and the results are new arrays. Either all ranks pass
                outputs or none does.
        Shapes:  ``outputs[r]`` has as many elements as ``x`` of rank r.
        Dtypes:  all; one for all ranks.
        Returns: a list of the outputs, or of new arrays of the ranks' shapes.
        """
        call = self._begin("all_gather_list", timeout, stream)
        call.flag("async_op", async_op)
        source = call.read(x)
        if outputs is None:
            outputs = [call.fresh(source, shape).data for shape in self._shapes(call, source)]
        parts = self._written(call, outputs, source)
        call.same_count(f"x, for outputs[{self.rank}]", parts[self.rank].count, source.count)
        call.input, call.output = call.separate_pieces(source, parts), parts
        return self._launch(call.validate(source.count, source.dtype), list(outputs), async_op)

    def _shapes(self, call: CollectiveArgs, array: Array) -> list[list[int]]:
        """Returns the shape of every rank's array, after checking that all have the same element type."""
        payload = json.dumps([array.dtype.name, array.shape]).encode()
        everybody = [json.loads(each) for each in self._exchange_alike(call.op, f"{call.op}()", payload)]
        names = [name for name, _ in everybody]
        if len(set(names)) > 1:
            listed = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(names))
            raise MismatchError(
                f"{call.op}: rank {self.rank} expected one dtype on all ranks, got {listed}; convert the arrays first"
            )
        return [shape for _, shape in everybody]

    def reduce_scatter_list(
        self,
        inputs: Sequence[Any],
        out: Any,
        op: str = "sum",
        *,
        factor: float | None = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces ``inputs[r]`` of all ranks into ``out`` of rank r.

        Shapes:  ``inputs[r]`` has as many elements as ``out`` of rank r; every rank passes the same sizes.
        Order:   canonical, as in all_reduce.
        Returns: ``out``.
        """
        call = self._begin("reduce_scatter_list", timeout, stream)
        call.reduces(op, factor)
        call.output = target = call.write(out)
        call.input = parts = self._read(call, inputs, target)
        call.same_count(f"out, for inputs[{self.rank}]", parts[self.rank].count, target.count)
        return self._launch(call.validate(target.count, target.dtype), out, async_op)

    def all_to_all_list(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Copies ``inputs[rank]`` of rank p to ``outputs[p]``.

        Shapes:  ``inputs[p]`` has as many elements as ``outputs[rank]`` of rank p.
        Returns: ``list(outputs)``.
        """
        call = self._begin("all_to_all_list", timeout, stream)
        inputs = call.list_of("inputs", inputs, self.world_size)
        first = call.read(inputs[0])
        call.output = written = self._written(call, outputs, first)
        call.input = read = [self._apart(call, call.read(x), written) for x in inputs]
        call.same_dtype(first.dtype, *(piece.array for piece in read))
        call.same_count(f"outputs[{self.rank}]", read[self.rank].count, written[self.rank].count)
        return self._launch(call.validate(0, first.dtype), list(outputs), async_op)

    def gather_list(
        self,
        x: Any,
        outputs: Sequence[Any] | None,
        root: int = 0,
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Copies ``x`` of rank r to ``outputs[r]`` at the root; elsewhere ``outputs`` is None.

        Shapes:  ``outputs[r]`` has as many elements as ``x`` of rank r.
        Returns: ``list(outputs)`` at the root, None elsewhere.
        """
        call = self._begin("gather_list", timeout, stream)
        call.root = call.peer("root", root)
        source = call.read(x)
        written = [Piece(source, 0, 0)] * self.world_size
        result = None
        if self.rank == call.root:
            written = self._written(call, outputs, source)
            call.same_count(f"x, for outputs[{self.rank}]", written[self.rank].count, source.count)
            source = call.separate_pieces(source, written)
            result = list(outputs or ())
        call.input = [Piece(source, 0, source.count if p == call.root else 0) for p in range(self.world_size)]
        call.output = written
        return self._launch(call.validate(0, source.dtype), result, async_op)

    def scatter_list(
        self,
        inputs: Sequence[Any] | None,
        out: Any,
        root: int = 0,
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Copies ``inputs[r]`` of the root to ``out`` of rank r; elsewhere ``inputs`` is None.

        Shapes:  ``inputs[r]`` has as many elements as ``out`` of rank r.
        Returns: ``out``.
        """
        call = self._begin("scatter_list", timeout, stream)
        call.root = call.peer("root", root)
        target = call.write(out)
        call.input = [Piece(target, 0, 0)] * self.world_size
        if self.rank == call.root:
            call.input = read = self._read(call, inputs, target)
            call.same_count(f"out, for inputs[{self.rank}]", read[self.rank].count, target.count)
        call.output = [Piece(target, 0, target.count if p == call.root else 0) for p in range(self.world_size)]
        return self._launch(call.validate(0, target.dtype), out, async_op)

    def _written(self, call: CollectiveArgs, outputs: Sequence[Any] | None, like: Array) -> list[Piece]:
        arrays = [call.write(x) for x in call.list_of("outputs", outputs, self.world_size)]
        call.same_dtype(like.dtype, *arrays)
        call.separate_outputs()
        return [Piece.of(array) for array in arrays]

    def _read(self, call: CollectiveArgs, inputs: Sequence[Any] | None, target: Array) -> list[Piece]:
        """Reads the inputs of a call with one output. Copies each input that overlaps the output, unless it is this
        rank's own input at the output's address."""
        pieces = []
        for r, x in enumerate(call.list_of("inputs", inputs, self.world_size)):
            array = call.read(x)
            call.same_dtype(target.dtype, array)
            own = r == self.rank and array.address == target.address
            pieces.append(Piece.of(call.copy(array) if array.overlaps(target) and not own else array))
        return pieces

    def _apart(self, call: CollectiveArgs, array: Array, written: Sequence[Piece]) -> Piece:
        return Piece.of(call.copy(array) if any(array.overlaps(piece.array) for piece in written) else array)

    # ---- several tensors in one bucket: local, no rank waits for another ------------------------------------------

    def pack(self, tensors: Sequence[Any], bucket: Any, scale: float = 1.0, *, stream: Any = None) -> Any:
        """Copies the elements of all ``tensors``, one after another, into ``bucket``, times ``scale``.

        Shapes:  any; ``bucket`` has at least as many elements, and elements after the last tensor stay unchanged.
        Dtypes:  one for all tensors, one for the bucket. If they differ or there is a scale: float32, float64, float16,
                 bfloat16. Values are multiplied in float32 (float64 if either is float64) and rounded once.
        Cost:    one pass over the bytes: one kernel on a device.
        Returns: ``bucket``.
        """
        if not self._pack_plain(tensors, bucket, scale, stream, False):
            call = self._begin("pack", None, stream)
            target = call.update(bucket)
            sources = [call.read(x) for x in call.list_of("tensors", tensors)]
            pairs = zip(map(Piece.of, sources), _cut(call, target, sources), strict=True)
            self._pack(call, list(pairs), scale)
        return bucket

    def unpack(self, bucket: Any, tensors: Sequence[Any], scale: float = 1.0, *, stream: Any = None) -> list[Any]:
        """Copies the elements of ``bucket`` back into ``tensors``, in the order in which `pack` stored them, times
        ``scale``.

        Shapes, dtypes, cost: as in `pack`.
        Returns: ``list(tensors)``.
        """
        if not self._pack_plain(tensors, bucket, scale, stream, True):
            call = self._begin("unpack", None, stream)
            source = call.read(bucket)
            targets = [call.write(x) for x in call.list_of("tensors", tensors)]
            pairs = zip(_cut(call, source, targets), map(Piece.of, targets), strict=True)
            self._pack(call, list(pairs), scale)
        return list(tensors)

    def _pack_plain(self, tensors: Sequence[Any], bucket: Any, scale: float, stream: Any, unpacks: bool) -> bool:
        """Fast path: packs or unpacks arrays that need no preparation. False: nothing was done."""
        pack = self._pack_plain_native  # None once the communicator is closed
        return stream is None and pack is not None and pack(tensors, bucket, scale, unpacks)

    def _pack(self, call: CollectiveArgs, pairs: Pairs, scale: float) -> None:
        scale = call.number("scale", scale)
        if not pairs:
            return
        sources, targets = ([pair[end].array for pair in pairs] for end in (0, 1))
        for arrays in (sources, targets):
            call.same_dtype(arrays[0].dtype, *arrays)
        before, after = sources[0].dtype, targets[0].dtype
        if (before != after or scale != 1) and not (before.name in _CASTABLE and after.name in _CASTABLE):
            raise DtypeError(
                f"{call.op}: rank {self.rank} got {before.name} to convert to {after.name} and scale by {scale:g}, "
                f"expected {', '.join(_CASTABLE)} for a conversion or a scale; convert the tensors first"
            )
        call.note_writes()
        self._open.pack(call, [_apart(call, *pair) for pair in pairs], scale)
        call.finish(-1, None)

    # ---- waiting, and small messages ------------------------------------------------------------------------------

    def synchronize(self, stream: Any = None) -> None:
        """Blocks the host until every call so far on ``stream`` has run; on the cpu calls have already run.

        Args:
            stream: as in the calls; None: the stream on which torch, else CuPy, currently works.
        Raises:  CollectiveTimeoutError, AbortedError, MismatchError: the errors of the calls.
        """
        call = self._begin("synchronize", None, stream)
        if call.on_device:
            self._open.synchronize(call.running_stream)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gathers every rank's bytes, by rank, through host memory on any device; a collective."""
        self._begin("exchange")
        if not isinstance(payload, (bytes, bytearray)):
            raise InvalidArgumentError(
                f"exchange: rank {self.rank} got {type(payload).__name__}, expected bytes; encode it first"
            )
        return self._open.exchange(payload)

    # Every rank's bytes go to every rank, since objects are small and their sizes unknown to the others.

    def all_gather_object(self, x: Any) -> list[Any]:
        """Gathers an object of every rank, by rank, on every rank; a collective.

        Objects travel pickled, through host memory on any device. Loading a pickle runs code that its sender chose, so
        use this only among ranks that trust each other; for arrays `all_gather` is faster and runs no code.

        Cost:    that of `exchange`: every rank receives W times the bytes of the largest object.
        Raises:  InvalidArgumentError: the object cannot be pickled; nothing was sent.
        """
        return [pickle.loads(each) for each in self._exchange_objects("all_gather_object", x)]

    def broadcast_object(self, x: Any = None, root: int = 0) -> Any:
        """Returns the root's object on every rank; a collective. See `all_gather_object` for trust, cost and errors.

        Args:
            x: the object at the root; ignored elsewhere.
        """
        root = self._begin("broadcast_object").peer("root", root)
        payloads = self._exchange_objects("broadcast_object", x if self.rank == root else None, root)
        return x if self.rank == root else pickle.loads(payloads[root])

    def gather_object(self, x: Any, root: int = 0) -> list[Any] | None:
        """Gathers an object of every rank, by rank, at the root; a collective. See `all_gather_object` for trust, cost
        and errors.

        Returns: the list at the root, None elsewhere.
        """
        root = self._begin("gather_object").peer("root", root)
        payloads = self._exchange_objects("gather_object", x, root)
        return [pickle.loads(each) for each in payloads] if self.rank == root else None

    def scatter_object(self, xs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns the r-th of the root's objects on rank r; a collective. See `all_gather_object` for trust, cost and
        errors.

        Args:
            xs: one object for each rank at the root; ignored elsewhere.
        """
        call = self._begin("scatter_object")
        root = call.peer("root", root)
        mine: list[bytes] | None = None
        if self.rank == root:
            if not isinstance(xs, (list, tuple)) or len(xs) != self.world_size:
                raise InvalidArgumentError(
                    f"scatter_object: rank {self.rank} got xs={shown(xs)}, expected a list of {self.world_size} "
                    "objects; pass one for each rank"
                )
            mine = [_pickled(call, x) for x in xs]
        payloads = self._exchange_objects("scatter_object", mine, root)
        return pickle.loads(pickle.loads(payloads[root])[self.rank])

    def _exchange_objects(self, op: str, x: Any, root: int | None = None) -> list[bytes]:
        called = f"{op}({'' if root is None else f'root={root}'})"
        return self._exchange_alike(op, called, _pickled(self._begin(op), x))

    def _exchange_alike(self, op: str, called: str, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank, after checking that all ranks made the same call."""
        everybody = self._open.exchange(b"\n".join((_EXCHANGED, called.encode(), payload)))
        parts = [each.split(b"\n", 2) for each in everybody]
        calls = [part[1].decode() if len(part) == 3 and part[0] == _EXCHANGED else "another call" for part in parts]
        if any(each != called for each in calls):
            raise MismatchError(
                f"{op}: the ranks made different calls: {_by_rank(calls)}; make the same call on every rank"
            )
        return [part[2] for part in parts]

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = None, like: str | None = None) -> Any:
        """Returns a new array in memory that the peers read and write in place: collectives on it copy less.

        Between processes on devices this is a collective: every rank must request the same number of bytes, in the same
        order. A process group lends no memory; over it, the result is an ordinary array.

        Args:
            shape: a number of elements, or a shape.
            dtype: of torch or NumPy, or a name; None: float32.
            like: "torch" or "numpy", on a device "torch" or "cupy"; None: the library of ``dtype``, else torch; on a
                device the library that is installed.
        Returns: an uninitialised array. The memory lives as long as the array or any view of it, even after `close`.
        Raises:  EngineError: out of memory.
        """
        if self._closed:
            raise ClosedError(f"empty: rank {self.rank} expected an open communicator, got one that was closed")
        engine = self._open
        if like is None:
            like = engine.usual_library(dtype)
        if not isinstance(like, str) or like not in engine.libraries:
            known = " or ".join(map(repr, engine.libraries))
            raise InvalidArgumentError(
                f"empty: rank {self.rank} got like={shown(like)}; pass {known} for memory on {self.device}"
            )
        return engine.empty(self._extents(shape), dtype_in(like, dtype, self.rank), like)

    def mem_pool(self, nbytes: int) -> Any:
        """Returns a `torch.cuda.MemPool` over memory that the peers read and write in place.

        Inside ``with torch.cuda.use_mem_pool(pool):`` torch allocates from this memory, so that the peers can access
        the tensors and buckets made there from the first call on, also in captured graphs. Between processes this is
        a collective, as `empty` is: all memory is set aside now, because torch allocates later, on each rank alone.

        Args:
            nbytes: how much is set aside, the same on every rank. torch takes it in blocks that tensors share: 2 MiB
                    for tensors of up to 1 MiB, 20 MiB for those of up to 10 MiB.
        Returns: the pool. Its memory lives as long as any tensor in it, also after `close`; it returns to the
                 communicator once the pool and its tensors are gone. Beyond ``nbytes`` torch raises OutOfMemoryError.
        Raises:  EngineError: no memory left, or 32 pools in this process. UnsupportedError: on the cpu, or without a
                 torch for CUDA.
        """
        call = self._begin("mem_pool")
        nbytes = call.integer("nbytes", nbytes, 64)
        if not 0 < nbytes <= MOST_BYTES:
            raise InvalidArgumentError(
                f"mem_pool: rank {self.rank} got nbytes={nbytes}, expected 1 to {MOST_BYTES}; pass the sum of all "
                "tensors of the pool"
            )
        return self._open.mem_pool(nbytes)

    def _extents(self, shape: Any) -> tuple[int, ...]:
        several = as_list(shape)
        listed = [shape] if several is None else several
        extents = [extent for extent in map(as_int, listed) if extent is not None]
        if len(extents) != len(listed) or any(extent < 0 for extent in extents):
            raise ShapeError(
                f"empty: rank {self.rank} got shape {shown(shape)}, expected a number or a sequence of numbers, no "
                "negative extent; pass a shape"
            )
        return tuple(extents)

    # ---- more communicators --------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Splits this communicator into one for each color; a collective, even for ranks that pass None.

        Args:
            color: ranks with the same color form one communicator; None: this rank is in none.
            key: determines the order in the new communicator; ranks with equal keys keep their order.
        Returns: the new communicator, or None. Its calls are independent of those of this one, which stays open. An
                 `abort` of this communicator also aborts the new one; an abort of the new one does not affect this one.
        Raises:  UnsupportedError: over a process group: keys that reorder the ranks, if this torch version cannot; or
                 ranks that have made different numbers of process groups before, because torch would make them wait for
                 each other.
        """
        call = self._begin("split")
        part = self._open.split(
            None if color is None else call.integer("color", color, 64), call.integer("key", key, 64)
        )
        return None if part is None else Communicator(part)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Returns a communicator of some ranks, numbered in the order given; a collective of all ranks of this
        communicator.

        Returns: the new communicator on the ranks named, None elsewhere.
        Raises:  InvalidArgumentError: a rank that is not in this communicator, or is named twice. MismatchError: the
                 ranks name different lists; every rank raises, and this communicator stays usable.
        """
        call = self._begin("subgroup")
        listed = as_list(ranks)
        if listed is None or len(listed) > self.world_size:
            raise InvalidArgumentError(
                f"subgroup: rank {self.rank} got {shown(ranks)}, expected a list of at most {self.world_size} ranks; "
                "name each rank once"
            )
        ranks = [call.peer("ranks", rank) for rank in listed]
        if len(set(ranks)) != len(ranks):
            raise InvalidArgumentError(f"subgroup: rank {self.rank} got {shown(ranks)}; name each rank once")
        everybody = [each.decode() for each in self._exchange_alike("subgroup", "subgroup()", str(ranks).encode())]
        if any(theirs != everybody[0] for theirs in everybody):
            raise MismatchError(
                f"subgroup: the ranks named different lists: {_by_rank(everybody)}; pass the same list on every rank, "
                "members or not, or divide the whole communicator with split(color)"
            )
        member = self.rank in ranks
        return self.split(0 if member else None, ranks.index(self.rank) if member else 0)

    def dup(self) -> Communicator:
        """Returns a second communicator of the same ranks, whose calls do not wait for those of this one; a
        collective."""
        same = self.split(0, self.rank)
        assert same is not None  # every rank has the color
        return same

    def shrink(self, timeout: Timeout = 10.0) -> Communicator:
        """Returns a new communicator of the surviving ranks, after a rank was lost or aborted; a collective of the
        survivors.

        Ranks whose process has ended, or that closed this communicator, are not waited for; other ranks, such as a
        stopped one, are waited for until ``timeout``. Ranks that come later are left out. The ranks keep their order
        and are renumbered. This communicator is aborted if it has not ended yet. Close it once nothing uses it; its
        memory stays valid.

        Args:
            timeout: seconds (or a timedelta) to wait for ranks that are alive.
        Returns: the new communicator, with the time limits of this one; no store is needed, unless there are
                 several hosts.
        Raises:  RankLostError: the other ranks continued without this rank (it never continues alone, however often it
                 calls this), or a rank was lost during the call: call it again there. CollectiveTimeoutError: a rank
                 stalled after it had joined the call. AbortedError: a signal handler raised: call it again.
                 EngineError: several hosts, and the store is gone. UnsupportedError: over a process group.
        """
        self._begin("shrink")
        limit_ms = milliseconds(timeout, "shrink", self.rank)
        return Communicator(self._open.shrink(limit_ms))

    # ---- life ----------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """The time limit, in seconds, of every call without its own; for a process group torch's default limit, until
        it is set here."""
        return self._open.timeout_ms / 1e3

    @timeout.setter
    def timeout(self, limit: Timeout) -> None:
        self._open.timeout_ms = milliseconds(limit, "timeout", self.rank)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def aborted(self) -> bool:
        """Whether the communicator has ended, because a rank aborted, was lost, or made a different call. Every later
        call raises the cause."""
        engine = self._engine  # another thread may close the engine meanwhile
        return engine is not None and engine.aborted

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends every wait on every rank: their calls raise AbortedError with ``reason``. May be called from any thread.
        It also aborts the communicators that this rank has made from this one (`split`, `subgroup`, `dup`), on all
        their ranks. On a GPU it returns when the other ranks can see it, after at most a second.

        Raises:  UnsupportedError: over a process group whose backend cannot abort.
        """
        engine = self._engine  # another thread may close the engine meanwhile
        if engine is not None:
            engine.abort(reason)

    def close(self) -> None:
        """Finishes the calls in flight and disconnects from the peers, or from the process group, which stays as it
        is; not a collective. A second call does nothing."""
        engine, self._engine, self._closed = self._engine, None, True
        self._run_plain_native = self._submit_plain_native = self._pack_plain_native = None
        if engine is not None:
            engine.close()
        with self._in_flight_lock:
            ended, self._in_flight = self._in_flight, deque()
        ended.clear()

    def describe(self) -> dict[str, str]:
        """Returns a description for people: ranks, engine, instruction set, memory, limits."""
        facts = {
            "rank": str(self.rank),
            "world_size": str(self.world_size),
            "engine": self.engine,
            "device": self.device,
        }
        return facts if self._engine is None else facts | self._engine.describe()

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Returns this communicator, so that a copied model, for example one with a communication hook, shares it."""
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if not ended_well and self._engine is not None:
            self._engine.leave(f"rank {self.rank} left its communicator with {type(error).__name__}: {error}", error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "aborted" if self.aborted else "open"
        where = self.device if self.engine == "cuda" else self.engine
        return f"<ringcomm.{type(self).__name__} rank {self.rank} of {self.world_size}, {where}, {state}>"


def _by_rank(values: Sequence[str]) -> str:
    """Returns "ranks 0, 2 this, rank 1 that"."""
    who = {value: [rank for rank, theirs in enumerate(values) if theirs == value] for value in values}
    return ", ".join(f"{rank_list(those)} {value}" for value, those in who.items())


def _pickled(call: CollectiveArgs, x: Any) -> bytes:
    try:
        return pickle.dumps(x)
    except Exception as error:  # raised by the object's own code
        raise InvalidArgumentError(
            f"{call.op}: rank {call.rank} got {type(x).__name__}, which cannot be pickled ({type(error).__name__}: "
            f"{one_line(error)}); pass an object that can"
        ) from error


def _cut(call: CollectiveArgs, bucket: Array, tensors: Sequence[Array]) -> list[Piece]:
    pieces, offset = [], 0
    for array in tensors:
        pieces.append(Piece(bucket, offset, array.count))
        offset += array.count
    if offset > bucket.count:
        raise ShapeError(
            f"{call.op}: rank {call.rank} got tensors of {offset} elements together and a bucket of {bucket.count}; "
            "pass a bucket that holds them"
        )
    return pieces


def _apart(call: CollectiveArgs, source: Piece, target: Piece) -> tuple[Piece, Piece]:
    """Returns both pieces, with a copy of the source if they overlap."""
    if not source.array.overlaps(target.array):
        return source, target
    return Piece(call.copy(source.array), source.offset, source.count), target
