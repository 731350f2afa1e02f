"""One call of a collective, and the interface of the engines that run calls: our own (native.py), or a process group of
torch.distributed (process_group.py).

A call's arguments are checked and its arrays made contiguous before anything is sent, so a rejected call leaves the
communicator unchanged. Arrays that were copied are written back after the call.
"""

from __future__ import annotations

import difflib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from ringcomm import _C
from ringcomm.arrays.devices import CPU, EMULATED, Device
from ringcomm.arrays.interop import as_array, wire_type
from ringcomm.arrays.libraries import Array, Dtype, library_of, stream_number, usual_stream
from ringcomm.comm.hosts import Hosts
from ringcomm.errors import DtypeError, InvalidArgumentError, RingcommError, ShapeError, UnsupportedError, shown
from ringcomm.validation import as_int, as_number

MOST_BYTES = 1 << 62  # largest array: far above real sizes, and small enough to prevent overflow
_OTHER_NAMES = {"mean": "avg", "average": "avg", "add": "sum", "product": "prod", "minimum": "min", "maximum": "max"}
_LONGEST_NAME = 20  # of an operation or algorithm, for a search by likeness
_Key = TypeVar("_Key", bound=str)


class Piece:
    """A contiguous run of an array's elements: one rank's part of a message."""

    __slots__ = ("array", "count", "offset")

    def __init__(self, array: Array, offset: int, count: int) -> None:
        self.array = array
        self.offset = offset
        self.count = count

    @classmethod
    def of(cls, array: Array) -> Piece:
        """Returns a piece that covers a whole array."""
        return cls(array, 0, array.count)

    @property
    def address(self) -> int:
        """The address of the first element."""
        return self.array.address + self.offset * self.array.dtype.nbytes


Pairs = list[tuple[Piece, Piece]]
"""(source, target) for every tensor of a bucket, with equal counts."""
Timeout = float | timedelta | None


def rows(array: Array, counts: Sequence[int]) -> list[Piece]:
    """Splits an array into consecutive pieces of ``counts`` rows along dimension 0."""
    row = math.prod(array.shape[1:])
    pieces, offset = [], 0
    for count in counts:
        pieces.append(Piece(array, offset, count * row))
        offset += count * row
    return pieces


def milliseconds(timeout: float | timedelta | None, call: str, rank: int) -> int:
    """Converts a time limit to the engine's form; 0 for None, which means the communicator's own limit."""
    if timeout is None:
        return 0
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else as_number(timeout)
    if seconds is None or not 0 < seconds < 1e9:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got timeout {shown(timeout)}, expected seconds, as a number or a timedelta, above 0 "
            "and below 1e9; pass None for the communicator's own limit"
        )
    return whole_milliseconds(timedelta(seconds=seconds))


def whole_milliseconds(limit: timedelta) -> int:
    """Rounds a time limit up, to 1 at least, because the engine takes 0 for no limit of its own."""
    return max(1, math.ceil(limit / timedelta(milliseconds=1)))


def named_reduction(op: Any, factor: Any) -> tuple[Any, Any]:
    """Returns the name of a ReduceOp of torch.distributed, and the factor that it may hold; anything else as it is."""
    kind = getattr(sys.modules.get("torch.distributed"), "ReduceOp", None)
    if kind is None or not isinstance(op, kind):
        return op, factor
    name = getattr(op, "op", op).name.lower()
    if name == "premul_sum" and factor is None:
        factor = getattr(op, "factor", None)
    return _OTHER_NAMES.get(name, name), factor


def _suggestion(word: str, known: Collection[str]) -> str | None:
    """Returns the known name closest to a wrong one, or the one for a synonym; None if there is none."""
    word = word[:_LONGEST_NAME].lower()
    close = [_OTHER_NAMES.get(word), *difflib.get_close_matches(word, known, 1, 0.75)]
    return next((name for name in close if name in known), None)


class CollectiveArgs:
    """One rank's arguments of one collective; they are ready for an engine once all arrays are set.

    ``input`` and ``output`` are each an array or, if the message has a part for each rank, a list of pieces. ``writes``
    holds (the caller's array, the contiguous memory that the engine writes) for each array that the call writes.
    ``first`` is the first array of a call that was given no stream: the call runs on the stream of that array's
    library. ``root`` is a rank, or the mark of an all_gather, all_to_all or barrier.
    """

    __slots__ = (
        *("algorithm", "count", "engine", "first", "input", "op", "output", "reduction", "root", "stream", "tag"),
        *("timeout_ms", "wire", "writes"),
    )

    def __init__(self, op: str, engine: Engine, timeout: Timeout = None, stream: Any = None) -> None:
        self.op = op
        self.engine = engine
        self.first: Array | None = None
        self.stream = None if stream is None else self._given(stream)
        self.timeout_ms = milliseconds(timeout, op, engine.rank)
        self.reduction: tuple[str, float] | None = None
        self.algorithm = "auto"
        self.root = 0
        self.tag = 0
        self.input: Array | list[Piece] | None = None
        self.output: Array | list[Piece] | None = None
        self.count = 0
        self.wire = (_C.DTYPES["uint8"], 1)
        self.writes: list[tuple[Array, Array]] = []

    @property
    def rank(self) -> int:
        """The rank that makes the call."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.engine.world_size

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that the call writes."""
        return [array for array, _ in self.writes]

    # ---- options -------------------------------------------------------------------------------------------------

    def reduces(self, op: str, factor: float | None) -> None:
        """Sets the reduction operation: a name, or a ReduceOp of torch.distributed."""
        op, factor = named_reduction(op, factor)
        op = self.one_of("op", op, _C.REDUCE_OPS)
        if (factor is not None) != (op == "premul_sum"):
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got op {shown(op)} with factor {shown(factor)}; pass a factor with "
                "premul_sum, and with it alone"
            )
        self.reduction = op, 1.0 if factor is None else self.number("factor", factor)

    def one_of(self, what: str, value: _Key, known: dict[str, int]) -> _Key:
        """Returns ``value`` after checking that it is one of the names in ``known``."""
        if not isinstance(value, str) or value not in known:
            meant = _suggestion(value, known) if isinstance(value, str) else None
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got {what} {shown(value)}, expected one of {', '.join(known)}; "
                + (f"did you mean {meant!r}?" if meant else "pass one of these")
            )
        return value

    def flag(self, what: str, value: bool) -> bool:
        """Returns ``value`` after checking that it is True or False."""
        if value is not True and value is not False:
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got {what}={shown(value)}, expected True or False; pass one of these"
            )
        return value

    def list_of(self, what: str, arrays: Sequence[Any] | None, length: int | None = None) -> list[Any]:
        """Returns ``arrays`` as a list, after checking that it is a list or tuple, and its ``length`` if given."""
        found = list(arrays) if isinstance(arrays, (list, tuple)) else None
        if found is None or length not in (None, len(found)):
            got = type(arrays).__name__ if found is None else f"{len(found)} array{'s' * (len(found) != 1)}"
            expected, remedy = (
                ("a list", "a list of arrays") if length is None else (f"a list of {length}", "one array for each rank")
            )
            raise ShapeError(f"{self.op}: rank {self.rank} got {got} as {what}, expected {expected}; pass {remedy}")
        return found

    def integer(self, what: str, value: int, bits: int) -> int:
        """Returns ``value`` as Python's int after checking that it fits in ``bits`` bits, sign included."""
        number = as_int(value)
        if number is None or not -1 << bits - 1 <= number < 1 << bits - 1:
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got {what}={shown(value)}, expected a whole number of {bits} bits; "
                "pass one"
            )
        return number

    def number(self, what: str, value: float) -> float:
        """Returns ``value`` after checking that it is a number."""
        number = as_number(value)
        if number is None or abs(number) > sys.float_info.max:
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got {what}={shown(value)}, expected a number; pass one"
            )
        return float(number)

    def peer(self, what: str, value: int) -> int:
        """Returns ``value`` as Python's int after checking that it is a rank of this communicator."""
        number = as_int(value)
        if number is None or not 0 <= number < self.world_size:
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got {what}={shown(value)}, expected 0 to {self.world_size - 1}; pass a "
                "rank of this communicator"
            )
        return number

    # ---- streams -------------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> bool:
        """Whether the call runs on a stream of a device."""
        device = self.engine.device
        return device is not None and device.kind == "cuda"

    @property
    def on_host(self) -> bool:
        """Whether all arrays that the call writes lie in the memory of the host."""
        return all(array.device.kind == "cpu" for array in self.written)

    @property
    def has_own_stream(self) -> bool:
        """Whether the caller named the stream."""
        return self.stream is not None and self.first is None

    @property
    def waits(self) -> bool:
        """Whether the host waits for the call. It must on emulated devices, whose memory host code uses without regard
        to streams."""
        if not EMULATED or not self.on_device:
            return False
        return not self.has_own_stream or any(array is not memory for array, memory in self.writes)

    def _given(self, stream: Any) -> int:
        if not self.on_device:
            raise self.engine.has_no_stream(self.op, stream)
        return stream_number(stream, self.op, self.rank)

    def _enqueue(self, array: Array) -> None:
        """Orders the call after earlier work on ``array``. Unless a stream was given, the call runs on the stream on
        which the first array's library works."""
        if self.stream is None:
            self.first = array
            self.stream = array.library.stream(array.data)
        if self.has_own_stream:
            array.library.keep(array.data, self.stream)
        if array.made_on is not None and array.made_on != self.stream:
            with self.on_stream(array):
                array.library.follow(array.made_on, array.data)

    def on_stream(self, array: Array) -> AbstractContextManager[Any]:
        """Inside the block, the array's library works on the call's stream."""
        return array.library.on(self.stream or 0, array.data) if self.has_own_stream else nullcontext()

    @property
    def running_stream(self) -> int:
        """The stream on which the call runs."""
        return self.waiting_stream(None) if self.stream is None else self.stream

    def waiting_stream(self, stream: Any) -> int:
        """Returns the stream that waits for the call: ``stream``, else the stream on which the library of the call's
        arrays now works, even if the call runs on another one."""
        if stream is not None:
            return self._given(stream)
        array = self.first or next(iter(self.written), None) or self.input
        if isinstance(array, Array):
            return array.library.stream(array.data)
        return 0 if EMULATED else usual_stream(self.engine.device or CPU)

    # ---- arrays --------------------------------------------------------------------------------------------------

    def array(self, x: Any) -> Array:
        """Returns ``x`` as an Array, without a copy."""
        engine = self.engine
        array = as_array(x, self.op, engine.rank, engine.device)
        if self.on_device:
            self._enqueue(array)
        return array

    def copy(self, array: Array) -> Array:
        """Returns a copy in new contiguous memory."""
        with self.on_stream(array):
            return array.copy()

    def fresh(self, like: Array, shape: Sequence[int], dtype: str | None = None) -> Array:
        """Returns new contiguous memory of the element type of ``like``, or of another one."""
        with self.on_stream(like):
            return like.empty(shape, dtype)

    def read(self, x: Any) -> Array:
        """Returns ``x`` as contiguous memory to read."""
        array = self.array(x)
        return array if array.contiguous else self.copy(array)

    def write(self, x: Any) -> Array:
        """Returns ``x`` as contiguous memory of which every element is written."""
        array = self._writable(x)
        return self._writing(array, array if array.contiguous else self.fresh(array, array.shape))

    def update(self, x: Any) -> Array:
        """Returns ``x`` as contiguous memory to read and write."""
        array = self._writable(x)
        return self._writing(array, array if array.contiguous else self.copy(array))

    def _writable(self, x: Any) -> Array:
        array = self.array(x)
        if not array.writable:
            numpy = sys.modules.get("numpy")
            if numpy is not None and isinstance(x, numpy.generic):
                raise InvalidArgumentError(
                    f"{self.op}: rank {self.rank} got a NumPy scalar of dtype {x.dtype}, expected an array to write "
                    "to; pass numpy.array(x), an array without dimensions"
                )
            raise InvalidArgumentError(
                f"{self.op}: rank {self.rank} got a read-only array to write to; pass a copy, or out="
            )
        if not array.contiguous and array.may_overlap_itself():
            raise ShapeError(
                f"{self.op}: rank {self.rank} got an output of shape {array.shape} with strides {array.strides}, whose "
                "elements share memory; pass a contiguous copy"
            )
        return array

    def _writing(self, array: Array, memory: Array) -> Array:
        self.writes.append((array, memory))
        return memory

    def output_like(self, x: Array, out: Any, *shapes: tuple[int, ...]) -> Array:
        """Returns ``out`` after checking that it has one of ``shapes`` and the type of ``x``; if it is None, new
        memory of the first shape."""
        if out is None:
            return self.fresh(x, shapes[0])
        array = self.write(out)
        self.same_dtype(x.dtype, array)
        if array.shape not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ShapeError(
                f"{self.op}: rank {self.rank} got out of shape {array.shape}, expected {expected}; pass out of that "
                "shape, or none"
            )
        return array

    def same_dtype(self, dtype: Dtype, *arrays: Array) -> None:
        """Raises unless all arrays of the call have the same element type."""
        for array in arrays:
            if array.dtype != dtype:
                raise DtypeError(
                    f"{self.op}: rank {self.rank} got {dtype.name} and {array.dtype.name}; every array of a call must "
                    "have the same dtype"
                )

    def same_count(self, what: str, expected: int, got: int) -> None:
        """Raises if the number of elements of ``what`` is not the expected one."""
        if expected != got:
            raise ShapeError(
                f"{self.op}: rank {self.rank} got {got} elements as {what}, expected {expected}; pass arrays that match"
            )

    def divisible(self, x: Array) -> tuple[int, ...]:
        """Returns the shape of one rank's part of ``x``, split along dimension 0."""
        if not x.shape or x.shape[0] % self.world_size:
            raise ShapeError(
                f"{self.op}: rank {self.rank} got shape {x.shape}, expected a first dimension divisible by the world "
                f"size {self.world_size}; pad it, or use the list form for uneven parts"
            )
        return (x.shape[0] // self.world_size, *x.shape[1:])

    def scattered(self, x: Array) -> list[tuple[int, ...]]:
        """Returns the shapes that can hold one rank's part of ``x``, split along dimension 0: also without that
        dimension, if a part has one row."""
        part = self.divisible(x)
        return [part] if x.shape[0] != self.world_size else [part, x.shape[1:]]

    def gathered(self, x: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the two shapes that can hold every rank's ``x``: concatenated along dimension 0, and stacked."""
        first = x.shape[0] if x.shape else 1
        return (self.world_size * first, *x.shape[1:]), (self.world_size, *x.shape)

    def separate(self, source: Array, target: Array, in_place_at: int | None = 0) -> Array:
        """Returns ``source``, or a copy if it overlaps ``target``. An in-place call needs no copy: there the shorter
        array begins ``in_place_at`` elements into the longer one. None: the call has no in-place form."""
        if not source.overlaps(target):
            return source
        outer, inner = (target, source) if source.count < target.count else (source, target)
        in_place = in_place_at is not None and inner.address == outer.address + in_place_at * source.dtype.nbytes
        return source if in_place else self.copy(source)

    def separate_pieces(self, source: Array, pieces: Sequence[Piece]) -> Array:
        """Returns ``source``, or a copy if it overlaps a piece other than this rank's own."""
        clash = any(
            source.overlaps(piece.array) and (r != self.rank or source.address != piece.address)
            for r, piece in enumerate(pieces)
        )
        return self.copy(source) if clash else source

    def separate_outputs(self) -> None:
        """Raises if two of the arrays to write to so far share an element."""
        arrays = sorted((array for array in self.written if array.count), key=lambda array: array.extent[0])
        open_: list[Array] = []  # arrays that extend beyond the start of the current one
        for array in arrays:
            open_ = [other for other in open_ if other.extent[1] > array.extent[0]]
            if any(array.shares_elements(other) for other in open_):
                raise InvalidArgumentError(
                    f"{self.op}: rank {self.rank} got two outputs that share memory, expected memory of its own for "
                    "each; pass other arrays"
                )
            open_.append(array)

    # ---- ready ---------------------------------------------------------------------------------------------------

    def note_writes(self) -> None:
        """Tells each output's library, just before the call begins, that the call writes to the output."""
        for array, _ in self.writes:
            array.library.note_write(array.data)

    def validate(self, count: int, dtype: Dtype) -> CollectiveArgs:
        """Makes the last check: whether the operation supports the element type. ``count`` is in the caller's
        elements."""
        self.wire = wire_type(dtype, None if self.reduction is None else self.reduction[0], self.op, self.engine.rank)
        self.count = count
        return self

    @property
    def engine_op(self) -> str:
        """The op that runs this call. Calls whose parts differ by rank run as an all_to_all with empty parts, because
        only all_to_all exchanges counts between the ranks."""
        uneven = self.op in ("gather_list", "scatter_list", "scan", "exscan")
        return "all_to_all" if uneven else self.op.removesuffix("_list")

    def to_native(self) -> tuple[Any, ...]:
        """Returns the call in the form that the native engine takes."""
        code, each = self.wire
        reduce_op, factor = self.reduction or ("sum", 1.0)
        source, target = self.input, self.output
        return (
            _C.OPS[self.engine_op],
            code,
            _C.REDUCE_OPS[reduce_op],
            _C.ALGORITHMS[self.algorithm],
            self.root,
            self.tag,
            source.address if isinstance(source, Array) else 0,
            target.address if isinstance(target, Array) else 0,
            self.count * each,
            factor,
            self.timeout_ms,
            [(part.address, part.count * each) for part in source] if isinstance(source, list) else None,
            [(part.address, part.count * each) for part in target] if isinstance(target, list) else None,
            self.running_stream if self.on_device else 0,
        )

    def finish(self, source: int, result: Any) -> Any:
        """Writes temporaries back; returns the source of a recv, else ``result``."""
        for array, memory in self.writes:
            if memory is not array:
                with self.on_stream(array):
                    array.library.assign(array.data, memory.data)
        return source if self.op == "recv" else result

    def finish_on(self, stream: int, source: int, result: Any) -> Any:
        """Runs ``finish`` on ``stream``, which already waits for the call."""
        for array, memory in self.writes:
            if memory is not array:
                array.library.keep(memory.data, stream)
                with array.library.on(stream, array.data):
                    array.library.assign(array.data, memory.data)
        return source if self.op == "recv" else result


# ---- engines ------------------------------------------------------------------------------------------------------


Request = Any
"""An engine's handle of a call in flight: `_C.Request`, or an object with its ``done``, ``source``, ``start_now()`` and
``wait(timeout_ms)``."""


class Engine(ABC):
    """One rank's end of a communicator's transport. An operation that an engine does not support raises
    UnsupportedError."""

    rank: int
    world_size: int
    device: Device | None = None
    """The device on which arrays must lie; None: any device that a process group accepts."""
    name: str
    """"cpu", "cuda", or a process group, such as "torch.distributed:gloo"."""
    lends_memory = False
    """Whether `empty` returns memory that the peers read and write in place."""
    aborted = False
    libraries: tuple[str, ...] = ("torch", "numpy", "cupy")
    """The libraries whose arrays `empty` can create."""
    receives_from_any = True
    """Whether a receive may take a message from any rank."""

    @property
    def device_names(self) -> str:
        """The device on which arrays must lie, as torch names it."""
        return str(self.device)

    @property
    def hosts(self) -> Hosts:
        """The ranks of each host."""
        self._refuse()

    @abstractmethod
    def run(self, call: CollectiveArgs) -> int:
        """Runs a call to its end, or enqueues it on its stream; returns the source of a recv, else -1."""

    @abstractmethod
    def submit(self, call: CollectiveArgs) -> Request:
        """Starts a call."""

    def run_list(self, calls: Sequence[CollectiveArgs]) -> None:
        """Runs calls that differ only in their arrays."""
        for call in calls:
            self.run(call)

    def run_pair(self, sending: CollectiveArgs, receiving: CollectiveArgs) -> int:
        """Runs a send and a receive that do not wait for each other; returns the source of the receive."""
        request = self.submit(sending)
        try:
            source = self.run(receiving)
        except RingcommError:
            with suppress(RingcommError):
                request.wait()  # because the message is in the caller's memory
            raise
        request.wait()
        return source

    def submit_pair(self, sending: CollectiveArgs, receiving: CollectiveArgs) -> tuple[Request, Request]:
        """Starts a send and a receive that do not wait for each other."""
        request = self.submit(sending)
        try:
            return request, self.submit(receiving)
        except RingcommError:
            with suppress(RingcommError):
                request.wait()  # because the message is in the caller's memory
            raise

    def probe(self, call: CollectiveArgs, waits: bool) -> tuple[int, int, int, int] | None:
        """Returns (source, number of the element type, elements, bytes) of the message that a recv would take, and
        leaves it there; None if there is no message yet."""
        raise no_probe(call, self.name)

    run_plain: Callable[[str, str, int | None, int, Any, Any], int | None] | None = None
    """(op, reduce_op, root, tag, input, output) Runs a call on plain arrays with default options; returns None, with
    nothing done, if the call needs preparation. None: every call does."""

    submit_plain: Callable[[str, str, int | None, int, Any, Any], Request | None] | None = None
    """`run_plain` for a call that is only started."""

    pack_plain: Callable[[Sequence[Any], Any, float, bool], bool] | None = None
    """(tensors, bucket, scale, whether it unpacks) Packs or unpacks plain arrays; returns False, with nothing done, if
    they need preparation. None: every call does."""

    @abstractmethod
    def pack(self, call: CollectiveArgs, pairs: Pairs, scale: float) -> None:
        """Copies pairs of pieces that were already checked."""

    @abstractmethod
    def combine(self, call: CollectiveArgs, first: Array, second: Array) -> None:
        """Writes ``first`` combined with ``second``, by the call's reduction, to ``second``."""

    @abstractmethod
    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank; a collective."""

    def synchronize(self, stream: int) -> None:
        """Waits for the work enqueued on a stream."""
        self._refuse()

    def usual_library(self, dtype: Any) -> str:
        """Returns the library for `empty`'s array if none was named."""
        return library_of(dtype)

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any, library: str) -> Any:
        """Returns a new array of a library, with that library's dtype."""

    def mem_pool(self, nbytes: int) -> Any:
        """Returns a torch.cuda.MemPool over ``nbytes`` of memory that the peers access."""
        raise UnsupportedError(
            f"mem_pool: rank {self.rank} expected a communicator on a GPU, whose memory torch's pools manage, got one "
            f"on {self.device_names} by {self.name}; make arrays with comm.empty()"
        )

    @abstractmethod
    def split(self, color: int | None, key: int) -> Engine | None:
        """Returns a connected engine among the ranks of this color; None if this rank has no color. A collective."""

    def shrink(self, limit_ms: int) -> Engine:
        """Returns an engine among the surviving ranks; see `Communicator.shrink`."""
        self._refuse()

    timeout_ms: int
    """The time limit of every call without its own."""

    @abstractmethod
    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends every wait on every rank. ``cause`` is the exception that made this rank abort."""

    @abstractmethod
    def leave(self, reason: str, error: BaseException | None) -> None:
        """Called when this rank leaves with an error; `close` follows."""

    @abstractmethod
    def close(self) -> None:
        """Finishes the calls in flight and disconnects from the peers."""

    def describe(self) -> dict[str, str]:
        """Returns a description for people."""
        return {}

    def explained(self, error: RingcommError) -> RingcommError:
        """Returns the error of a call with its cause."""
        return error

    def has_no_stream(self, op: str, stream: Any) -> InvalidArgumentError:
        """Returns the error for a call that was given a stream although the device has none."""
        return InvalidArgumentError(
            f"{op}: rank {self.rank} got stream={shown(stream)}, this communicator serves {self.device or 'any'}, "
            "where calls have no stream; leave it out"
        )

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"communicator: rank {self.rank} expected an engine of its own, got {self.name}; call this on a "
            "communicator of ringcomm.init(), which may exist beside the process group"
        )


def no_probe(call: CollectiveArgs, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{call.op}: rank {call.rank} expected the cpu engine with all ranks on one host, got {got}; send the size in "
        "a message of its own"
    )
