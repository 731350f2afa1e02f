"""The collectives on arrays: one method each, the same over every way of moving bytes.

All methods share these rules. Arrays are torch tensors, NumPy and CuPy arrays, buffers or anything with
``__dlpack__`` or ``__cuda_array_interface__``, on the communicator's device; what is not contiguous goes through a
contiguous copy and is written back. Every rank makes the same calls in the same order with the same counts and element
types. ``timeout`` is in seconds (or a timedelta), None means the communicator's. With ``async_op=True`` a method
returns a Work at once, whose ``wait()`` gives the result.

On a device a method returns once the call is enqueued on a stream: ``stream`` (a stream of torch or CuPy, or its
address), else the one on which the library of the first array works now. ``barrier`` and ``synchronize`` wait, and
raise what went wrong in the calls before; so does any call after them.

Every method raises, before anything is sent: ShapeError, DtypeError, DeviceError, InvalidArgumentError, ClosedError;
and from the call itself: CollectiveTimeoutError, AbortedError, MismatchError.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ringcomm import _C
from ringcomm.arrays.devices import CPU
from ringcomm.arrays.interop import Array
from ringcomm.comm.calls import Call, milliseconds, rows
from ringcomm.comm.work import DeviceWork, Group, Request, Work
from ringcomm.errors import ClosedError, InvalidArgumentError, ShapeError, shown

Timeout = float | timedelta | None


class Collectives(ABC):
    """The collectives of one rank; a subclass says how a prepared call is run."""

    rank: int
    world_size: int
    _any_device = False
    _device = CPU

    def __init__(self) -> None:
        self._closed = False
        self._group: Group | None = None
        self._in_flight: deque[tuple[Request, Call]] = deque()
        self._in_flight_lock = threading.Lock()

    @abstractmethod
    def _run(self, call: Call) -> int:
        """Runs a call to its end; the source of a recv, else -1."""

    @abstractmethod
    def _submit(self, call: Call) -> Request:
        """Starts a call."""

    def _run_list(self, calls: Sequence[Call]) -> None:
        """Runs calls that differ in their arrays alone."""
        for call in calls:
            self._run(call)

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
    ) -> int | None:
        """The short way: runs a call that needs no preparation, as `_run` does; None if nothing was done."""
        return None

    # ---- how a call begins and ends ------------------------------------------------------------------------------

    def _begin(self, op: str, timeout: Timeout = None, stream: Any = None) -> Call:
        if self._closed:
            raise ClosedError(
                f"{op}: rank {self.rank} expected an open communicator, got one that was closed; create a new one"
            )
        call = Call(op, self.rank, self.world_size, None if self._any_device else self._device, stream)
        call.timeout_ms = milliseconds(timeout, op, self.rank)
        return call

    def _launch(self, call: Call, async_op: bool) -> Any:
        group = self._group
        if not call.flag("async_op", async_op) and group is None:
            return call.finish(self._run(call))
        request = self._submit(call)
        with self._in_flight_lock:  # keeps the arrays alive though nobody may keep the Work
            for _ in range(min(2, len(self._in_flight))):  # asks two for each that comes, since asking all costs
                each = self._in_flight.popleft()
                if not each[0].done:
                    self._in_flight.append(each)
            self._in_flight.append((request, call))
        work = (DeviceWork if call.on_device and not call.waits else Work)(request, call)
        if group is not None:
            group.works.append(work)
        return work

    @contextmanager
    def coalesce(self) -> Iterator[Group]:
        """Calls made inside are started one behind the other and waited for together at the end.

        Inside, every method returns a Work. The communicator must not be used by another thread meanwhile.

        Returns: the Group of calls; its ``wait()`` gives the results, also after the block.
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
        """Combines ``x`` of all ranks elementwise; every rank gets the result, in ``x`` or in ``out``.

        Args:
            op: sum, avg, prod, min, max, premul_sum, band, bor, bxor.
            factor: with premul_sum: this rank's values are multiplied by it first.
            algorithm: auto, ring, direct, oneshot. ``auto`` never changes the bits.
        Shapes:  any; the same number of elements on every rank.
        Dtypes:  float64/32/16, bfloat16, float8_e4m3fn, float8_e5m2, int64/32/16/8, uint8, bool; complex: sum, avg.
        Order:   canonical: a balanced tree over the ranks. 16- and 8-bit floats add in float32 and round once.
        Cost:    2 (W-1)/W of the bytes each way; short messages one round.
        Returns: ``x``, or ``out``.
        """
        target = x if out is None else out
        if self._run_plain("all_reduce", x, target, timeout, stream, async_op, algorithm, op, factor) is not None:
            return target
        call = self._begin("all_reduce", timeout, stream)
        return self._launch(self._prepare_all_reduce(call, x, op, out, factor, algorithm), async_op)

    def _prepare_all_reduce(self, call: Call, x: Any, op: str, out: Any, factor: float | None, algorithm: str) -> Call:
        call.reduces(op, factor)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        if out is None:
            call.input = call.output = call.update(x)
            call.result = x
        else:
            source = call.read(x)
            call.output = call.output_like(source, out, source.shape)
            call.input = call.separate(source, call.output)
        return call.seal(call.output.count, call.output.dtype)

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
        """Combines ``x`` of all ranks elementwise; the root gets the result, in ``x`` or in ``out``.

        Shapes:  any; the same number of elements on every rank.
        Order:   canonical, as in all_reduce.
        Returns: ``x`` or ``out`` at the root, None elsewhere, where ``x`` stays as it is.
        """
        call = self._begin("reduce", timeout, stream)
        call.root = call.peer("root", root)
        call.reduces(op, factor)
        at_root = self.rank == root
        if at_root and out is None:
            call.input = call.output = call.update(x)
            call.result = x
        else:
            call.input = call.read(x)
            if at_root:
                call.output = call.output_like(call.input, out, call.input.shape)
                call.input = call.separate(call.input, call.output)
        return self._launch(call.seal(call.input.count, call.input.dtype), async_op)

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
        """Combines ``x`` of all ranks elementwise; rank r gets the r-th part of the result along dimension 0.

        Shapes:  x (W*n, ...), out (n, ...). ``out`` may be this rank's part of ``x``.
        Order:   canonical, as in all_reduce.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        if self._run_plain("reduce_scatter", x, out, timeout, stream, async_op, algorithm, op, factor) is not None:
            return out
        call = self._begin("reduce_scatter", timeout, stream)
        call.reduces(op, factor)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        part = call.divisible(source)
        shapes = [part] if source.shape[0] != self.world_size else [part, source.shape[1:]]
        call.output = call.output_like(source, out, *shapes)
        call.input = call.separate(source, call.output, self.rank * call.output.count)
        return self._launch(call.seal(call.output.count, source.dtype), async_op)

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
        """Every rank gets ``x`` of all ranks, in rank order along dimension 0.

        Args:
            algorithm: auto, ring, direct; on GPUs of one host also copy_engine.
        Shapes:  x (n, ...), out (W*n, ...) or (W, n, ...). ``x`` may be this rank's part of ``out``.
        Dtypes:  all.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        if self._run_plain("all_gather", x, out, timeout, stream, async_op, algorithm) is not None:
            return out
        call = self._begin("all_gather", timeout, stream)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        call.output = call.output_like(source, out, *call.gathered(source))
        call.input = call.separate(source, call.output, self.rank * source.count)
        return self._launch(call.seal(source.count, source.dtype), async_op)

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
        """Every rank gets the root's ``x``, in place.

        Shapes:  any; the same number of elements on every rank.
        Dtypes:  all.
        Returns: ``x``.
        """
        if self._run_plain("broadcast", x, x, timeout, stream, async_op, algorithm, root=root) is not None:
            return x
        call = self._begin("broadcast", timeout, stream)
        call.root = call.peer("root", root)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        if self.rank == root:
            call.input = call.read(x)
            call.output = call.input
        else:
            call.output = call.write(x)
        call.result = x
        return self._launch(call.seal(call.output.count, call.output.dtype), async_op)

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
        """The root gets ``x`` of all ranks, in rank order along dimension 0.

        Shapes:  x (n, ...), out at the root (W*n, ...) or (W, n, ...).
        Dtypes:  all.
        Returns: ``out`` or a new array at the root, None elsewhere.
        """
        call = self._begin("gather", timeout, stream)
        call.root = call.peer("root", root)
        call.input = call.read(x)
        if self.rank == root:
            call.output = call.output_like(call.input, out, *call.gathered(call.input))
            call.input = call.separate(call.input, call.output, None)
        return self._launch(call.seal(call.input.count, call.input.dtype), async_op)

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
        """Rank r gets the r-th part of the root's ``x`` along dimension 0.

        Args:
            x: at the root; None elsewhere.
            out: where the part goes; needed on every rank but the root.
        Shapes:  x (W*n, ...), out (n, ...).
        Dtypes:  all.
        Returns: ``out``; at the root without one, a new array.
        """
        call = self._begin("scatter", timeout, stream)
        call.root = call.peer("root", root)
        if self.rank == root:
            source = call.read(x)
            part = call.divisible(source)
            shapes = [part] if source.shape[0] != self.world_size else [part, source.shape[1:]]
            call.output = call.output_like(source, out, *shapes)
            call.input = call.separate(source, call.output, None)
        elif out is None:
            raise InvalidArgumentError(
                f"scatter: rank {self.rank} got no out, expected an array for its part of rank {root}'s; pass out="
            )
        else:
            call.output = call.write(out)
            call.result = out
        return self._launch(call.seal(call.output.count, call.output.dtype), async_op)

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
        """Rank r gets part r of every rank's ``x``, in rank order along dimension 0.

        Args:
            send_counts: rows of ``x`` for each rank, where they are not all the same.
            recv_counts: rows from each rank. Without it the ranks tell each other first; either all ranks pass it or
                none does.
            algorithm: auto, direct; on GPUs of one host also copy_engine.
        Shapes:  x (W*n, ...), out the same; with counts x (sum(send_counts), ...), out (sum(recv_counts), ...).
        Dtypes:  all.
        Cost:    (W-1)/W of the bytes each way.
        Returns: ``out``, or a new array.
        """
        even = send_counts is None and recv_counts is None
        if even and self._run_plain("all_to_all", x, out, timeout, stream, async_op, algorithm) is not None:
            return out
        call = self._begin("all_to_all", timeout, stream)
        call.algorithm = call.one_of("algorithm", algorithm, _C.ALGORITHMS)
        source = call.read(x)
        if even:
            part = math.prod(call.divisible(source))
            call.output = call.output_like(source, out, source.shape)
            call.input = call.separate(source, call.output)
            return self._launch(call.seal(part, source.dtype), async_op)
        return self._launch(self._prepare_uneven(call, source, out, send_counts, recv_counts), async_op)

    def _prepare_uneven(
        self,
        call: Call,
        source: Array,
        out: Any,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
    ) -> Call:
        if send_counts is None:
            send_counts = [call.divisible(source)[0]] * self.world_size
        self._check_counts(call, "send_counts", send_counts)
        if not source.shape or sum(send_counts) != source.shape[0]:
            raise ShapeError(
                f"all_to_all: rank {self.rank} got shape {source.shape} and send_counts that sum to "
                f"{sum(send_counts)}; make them sum to the first dimension"
            )
        if recv_counts is None:
            recv_counts = self._swap_counts(list(send_counts), call.timeout_ms)
        self._check_counts(call, "recv_counts", recv_counts)
        call.output = call.output_like(source, out, (sum(recv_counts), *source.shape[1:]))
        call.input = call.separate(source, call.output, None)
        call.input_parts = rows(call.input, send_counts)
        call.output_parts = rows(call.output, recv_counts)
        return call.seal(0, source.dtype)

    def _check_counts(self, call: Call, what: str, counts: Sequence[int]) -> None:
        listed = isinstance(counts, (list, tuple, range)) and len(counts) == self.world_size
        if not listed or any(not isinstance(n, int) or not 0 <= n < 1 << 62 for n in counts):
            raise ShapeError(
                f"{call.op}: rank {self.rank} got {what}={shown(counts)}, expected {self.world_size} whole numbers; "
                "pass one number of rows for each rank"
            )

    def _swap_counts(self, counts: list[int], timeout_ms: int) -> list[int]:
        import numpy as np

        call = self._begin("all_to_all", timeout_ms / 1e3 or None)
        call.input = call.read(np.array(counts, np.int64))
        call.output = call.output_like(call.input, None, (self.world_size,))
        call.finish(self._run(call.seal(1, call.input.dtype)))
        return [int(n) for n in call.output.data]

    # ---- point to point ------------------------------------------------------------------------------------------

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Sends ``x`` to rank ``dst``. A receive takes the oldest message of its source that has its tag.

        Shapes:  any; the receiver passes as many elements.
        Dtypes:  all.
        """
        if self._run_plain("send", x, None, timeout, stream, root=dst, tag=tag) is not None:
            return None
        return self._launch_send(x, dst, tag, timeout, stream, async_op=False)

    def isend(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work:
        """``send`` that returns a Work at once; ``x`` must not change before it is done."""
        return self._launch_send(x, dst, tag, timeout, stream, async_op=True)

    def recv(self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> int:
        """Receives into ``x`` from rank ``src``, or from whoever sends first if it is None.

        Returns: the rank that sent.
        """
        source = self._run_plain("recv", None, x, timeout, stream, root=src, tag=tag)
        return self._launch_recv(x, src, tag, timeout, stream, async_op=False) if source is None else source

    def irecv(
        self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None, stream: Any = None
    ) -> Work:
        """``recv`` that returns a Work at once; its ``wait()`` gives the rank that sent."""
        return self._launch_recv(x, src, tag, timeout, stream, async_op=True)

    def _launch_send(self, x: Any, dst: int, tag: int, timeout: Timeout, stream: Any, async_op: bool) -> Any:
        call = self._begin("send", timeout, stream)
        call.root = self._other("dst", dst, call)
        call.tag = call.whole("tag", tag, 32)
        call.input = call.read(x)
        return self._launch(call.seal(call.input.count, call.input.dtype), async_op)

    def _launch_recv(self, x: Any, src: int | None, tag: int, timeout: Timeout, stream: Any, async_op: bool) -> Any:
        call = self._begin("recv", timeout, stream)
        call.root = -1 if src is None else self._other("src", src, call)
        if self.world_size == 1:
            raise InvalidArgumentError(
                f"recv: rank {self.rank} is alone, expected another rank that can send; leave the call out"
            )
        call.tag = call.whole("tag", tag, 32)
        call.output = call.write(x)
        return self._launch(call.seal(call.output.count, call.output.dtype), async_op)

    def _other(self, what: str, value: int, call: Call) -> int:
        if call.peer(what, value) == self.rank:
            raise InvalidArgumentError(
                f"{call.op}: rank {self.rank} got itself as {what}, expected another rank; copy the array instead"
            )
        return value

    def barrier(self, *, timeout: Timeout = None, stream: Any = None, async_op: bool = False) -> Any:
        """Returns when every rank has come here, and on a device when what was called before has run.

        Raises: what went wrong in the calls before, on a device.
        """
        if self._run_plain("barrier", None, None, timeout, stream, async_op) is not None:
            return None
        call = self._begin("barrier", timeout, stream)
        if not call.on_device:
            return self._launch(call, async_op)
        call.stream = call.waiting_stream(None)
        if call.flag("async_op", async_op) or self._group is not None:
            return self._launch(call, async_op)
        self._launch(call, async_op=True).synchronize()
        return None
