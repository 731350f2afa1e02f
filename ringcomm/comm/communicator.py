"""A communicator over one of our engines: how it lives, splits, lends memory and ends."""

from __future__ import annotations

import json
import math
import struct
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringcomm import _C
from ringcomm.arrays import libraries
from ringcomm.arrays.devices import CPU, EMULATED
from ringcomm.arrays.interop import Array, wire_type
from ringcomm.comm import profiling
from ringcomm.comm.buckets import BucketCollectives, Pairs
from ringcomm.comm.calls import Call, milliseconds
from ringcomm.comm.collectives import Timeout
from ringcomm.comm.endpoint import Endpoint
from ringcomm.comm.work import Request
from ringcomm.errors import (
    ClosedError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
    UnsupportedError,
    rank_list,
    shown,
)

if TYPE_CHECKING:
    from ringcomm.comm.process_group import ProcessGroupCommunicator

_PLACE = struct.Struct("<?qq")  # has a color, color, key
_MOST_BYTES = 1 << 62  # of one array: far more than there is, and nothing overflows


class Communicator(BucketCollectives):
    """One rank of a group of ranks, and the collectives among them.

    Made by `ringcomm.init`, `ringcomm.run_ranks`, or from another one by `split`, `subgroup` and `dup`. Use it as a
    context manager, or call `close`.
    """

    _endpoint: Endpoint | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._engine: _C.Engine | None = endpoint.engine
        self._device = endpoint.device
        self._plain = endpoint.device == CPU
        self.rank = endpoint.engine.rank
        self.world_size = endpoint.engine.world_size
        self.kind = endpoint.engine.kind
        self._unused: list[int] = []  # memory on the device to give back
        profiling.look()

    @property
    def engine(self) -> str:
        """What moves the bytes: "cpu" or "cuda"."""
        return self.kind

    @property
    def device(self) -> str:
        """Where arrays must lie, as torch names it: "cpu", or such as "cuda:0"."""
        return str(self._device)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host: those of one share memory."""
        return [list(ranks) for ranks in self._linked.hosts.ranks]

    @property
    def order(self) -> str:
        """In which order reductions add the ranks' values, unless ``algorithm="ring"`` asks for the ring's.

        "canonical": the balanced tree over all ranks. "canonical over hosts": the balanced tree over the ranks of each
        host, and that over the hosts: where the ranks of a host are no subtree of the first.
        """
        return self._linked.hosts.order()

    @staticmethod
    def from_process_group(pg: Any = None) -> ProcessGroupCommunicator:
        """The same methods over any process group of torch.distributed, such as one of NCCL or Gloo.

        Args:
            pg: the group; None: the default one.
        Returns: a communicator; closing it leaves the group as it is.
        """
        from ringcomm.comm.process_group import ProcessGroupCommunicator

        return ProcessGroupCommunicator(pg)

    # ---- running calls -------------------------------------------------------------------------------------------

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
        usual = timeout is None and async_op is False and factor is None and self._group is None
        usual = usual and type(algorithm) is str and algorithm == "auto"
        if not usual or self._engine is None or not self._plain or stream is not None:
            return None
        if profiling.profiler._is_profiler_enabled:
            return None  # the long way names its calls
        return self._engine.run_plain(op, reduce_op, root, tag, x, out)

    def _run(self, call: Call) -> int:
        end = self._linked
        with profiling.named(call.op):
            source = end.run(*call.numbers())
            if call.waits:
                end.synchronize(call.stream)
        return source

    def _submit(self, call: Call) -> Request:
        with profiling.named(call.op):
            return self._linked.submit(*call.numbers())

    def _run_list(self, calls: Sequence[Call]) -> None:
        if self._endpoint is None:  # over a process group
            return super()._run_list(calls)
        with profiling.named(calls[0].op):
            self._native.run_list([call.numbers() for call in calls])
            if calls[0].waits:
                self._linked.synchronize(calls[0].stream)

    def _pack(self, call: Call, pairs: Pairs, scale: float) -> None:
        if self._endpoint is None:  # over a process group
            return super()._pack(call, pairs, scale)
        (before, each), (after, _) = (self._wire(pairs[0][end].array, call) for end in (0, 1))
        pieces = [(source.address, target.address, source.count * each) for source, target in pairs]
        self._native.pack(pieces, before, after, scale, call.stream)
        if call.waits:
            self._linked.synchronize(call.stream)

    def _wire(self, array: Array, call: Call) -> tuple[int, int]:
        return wire_type(array.dtype, None, call.op, self.rank)

    def _swap_counts(self, counts: list[int], timeout_ms: int) -> list[int]:
        if self._device == CPU or self._endpoint is None:
            return super()._swap_counts(counts, timeout_ms)
        row = struct.Struct(f"<{self.world_size}q")
        return [row.unpack(each)[self.rank] for each in self._endpoint.exchange(row.pack(*counts))]

    def synchronize(self, stream: Any = None) -> None:
        """Blocks the host until every call so far on ``stream`` has run; on the cpu every call already has.

        Args:
            stream: as in the calls; None: the one on which torch, else CuPy, works now.
        Raises:  CollectiveTimeoutError, AbortedError, MismatchError: what went wrong in the calls.
        """
        call = self._begin("synchronize", None, stream)
        if call.on_device:
            self._linked.synchronize(call.waiting_stream(None))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, through the host's memory whatever the device; a collective."""
        self._begin("exchange")
        if not isinstance(payload, (bytes, bytearray)):
            raise InvalidArgumentError(
                f"exchange: rank {self.rank} got {type(payload).__name__}, expected bytes; encode it first"
            )
        return self._linked.exchange(payload)

    @property
    def _linked(self) -> Endpoint:
        if self._endpoint is None and self._closed:
            raise ClosedError(f"communicator: rank {self.rank} expected an open one, got one that was closed")
        if self._endpoint is None:
            raise UnsupportedError(
                f"communicator: rank {self.rank} expected an engine of its own, got {self.kind}; use the functions "
                "of torch.distributed on its group"
            )
        return self._endpoint

    @property
    def _native(self) -> _C.Engine:
        if self._engine is None:
            raise ClosedError(f"communicator: rank {self.rank} expected an open one, got one that was closed")
        return self._engine

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = None, like: str | None = None) -> Any:
        """A new array in memory that the peers read and write in place: collectives on it copy less.

        Between processes on devices a collective: every rank asks for the same bytes, in the same order.

        Args:
            shape: a number of elements, or a shape.
            dtype: of torch or NumPy, or a name; None: float32.
            like: "torch" or "numpy", on a device "torch" or "cupy"; None: the library of ``dtype``, else torch; on a
                device the one of the two that is there.
        Returns: an uninitialised array. The memory lives as long as the array or any view of it, also after `close`.
        Raises:  EngineError: no memory left.
        """
        if self._closed:
            raise ClosedError(f"empty: rank {self.rank} expected an open communicator, got one that was closed")
        on_host = self._device == CPU or EMULATED
        if like is None:
            like = libraries.library_of(dtype) if on_host else libraries.device_library()
        known = ("torch", "numpy") if on_host else ("torch", "cupy")
        if not isinstance(like, str) or like not in known:
            raise InvalidArgumentError(
                f"empty: rank {self.rank} got like={shown(like)}; pass '{known[0]}' or '{known[1]}' for memory on "
                f"{self._device}"
            )
        extents = self._extents(shape)
        found = libraries.dtype_in(like, dtype, self.rank)
        return self._allocate(extents, found, like, math.prod(extents) * found.itemsize)

    def mem_pool(self, nbytes: int) -> Any:
        """A `torch.cuda.MemPool` in memory that the peers read and write in place.

        What torch allocates inside ``with torch.cuda.use_mem_pool(pool):`` comes from there: tensors and buckets that
        the peers see from their first use on, also in captured graphs. Between processes a collective, as `empty` is:
        the memory is set aside now, since torch allocates when it likes and on one rank alone.

        Args:
            nbytes: how much is set aside, the same on every rank.
        Returns: the pool. Its memory lives as long as any tensor in it, also after `close`; when the pool and all of
                 them are gone it returns to the communicator. A request beyond ``nbytes`` is torch's OutOfMemoryError.
        Raises:  EngineError: no memory left, or 32 pools in this process. UnsupportedError: on the cpu, or without a
                 torch for CUDA.
        """
        call = self._begin("mem_pool")
        nbytes = call.whole("nbytes", nbytes, 64)
        if not 0 < nbytes <= _MOST_BYTES:
            raise InvalidArgumentError(
                f"mem_pool: rank {self.rank} got nbytes={nbytes}, expected 1 to {_MOST_BYTES}; pass what all tensors "
                "of the pool take together"
            )
        if self._device == CPU or self._endpoint is None:
            raise UnsupportedError(
                f"mem_pool: rank {self.rank} expected a communicator on a GPU, whose memory torch's pools manage, got "
                f"one on {self.device} by {self.kind}; make arrays with comm.empty()"
            )
        libraries.check_mem_pool(self.rank)
        return libraries.mem_pool(_C.open_pool(self._native, nbytes, self._device.index))

    def _extents(self, shape: Any) -> tuple[int, ...]:
        extents = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, (tuple, list)) else None
        if extents is None or any(not hasattr(type(extent), "__index__") or extent < 0 for extent in extents):
            raise ShapeError(
                f"empty: rank {self.rank} got shape {shown(shape)}, expected a number or a sequence of numbers, no "
                "negative extent; pass a shape"
            )
        return tuple(int(extent) for extent in extents)

    def _allocate(self, shape: tuple[int, ...], dtype: Any, library: str, nbytes: int) -> Any:
        import ctypes

        engine = self._native
        if nbytes > _MOST_BYTES:
            raise ShapeError(
                f"empty: rank {self.rank} got a shape of {nbytes} bytes, expected at most {_MOST_BYTES}; pass a "
                "smaller "
                "one"
            )
        on_host = self._device == CPU or EMULATED
        if nbytes == 0:
            return libraries.wrap_nothing(library, dtype, shape, CPU if on_host else self._device)
        if not on_host:
            _C.give_back_pools()
        if self._unused:
            libraries.settle(library, self._device)  # which may still work on it
            while self._unused:
                engine.release(self._unused.pop())
        address = engine.allocate(nbytes)
        if on_host:
            memory = (ctypes.c_char * nbytes).from_address(address)
            weakref.finalize(memory, engine.release, address).atexit = False
            return libraries.wrap_memory(memory, library, dtype, shape)
        there = libraries.DeviceMemory(address, nbytes, self._device)
        weakref.finalize(there, _retire, engine, self._unused, address).atexit = False
        return libraries.wrap_device_memory(there, library, dtype, shape)

    # ---- more communicators --------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Cuts this communicator into one for each color; a collective, also for ranks that pass None.

        Args:
            color: ranks of the same color come together; None: this rank is in none.
            key: order inside the new one; ranks of equal key keep their order.
        Returns: the new communicator, or None. Its calls are independent of those of this one, which stays open. An
                 `abort` of this one aborts it too; an abort of the new one leaves this one alone.
        """
        call = self._begin("split")
        named = 0 if color is None else call.whole("color", color, 64)
        place = _PLACE.pack(color is not None, named, call.whole("key", key, 64))
        linked = self._linked
        places = [_PLACE.unpack(each) for each in linked.exchange(place)]
        members = [r for r, (colored, its, _) in enumerate(places) if colored and its == color and color is not None]
        members.sort(key=lambda r: places[r][2])  # stable: equal keys keep their order
        end = linked.part(members, self._device)
        handles = linked.exchange(b"" if end is None else end.handle())
        if end is None:
            return None
        end.connect([handles[r] for r in members])
        return Communicator(end)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some ranks, numbered in the order given; a collective of all ranks of this one.

        Returns: the new communicator on the ranks named, None elsewhere.
        Raises:  InvalidArgumentError: a rank that is not here, or is named twice. MismatchError: the ranks name others;
                 every rank is told, and this communicator stays as it was.
        """
        call = self._begin("subgroup")
        if not isinstance(ranks, (list, tuple, range)) or len(ranks) > self.world_size:
            raise InvalidArgumentError(
                f"subgroup: rank {self.rank} got {shown(ranks)}, expected a list of at most {self.world_size} ranks; "
                "name each rank once"
            )
        for rank in ranks:
            call.peer("ranks", rank)
        if len(set(ranks)) != len(ranks):
            raise InvalidArgumentError(f"subgroup: rank {self.rank} got {shown(list(ranks))}; name each rank once")
        everybody = [json.loads(each) for each in self._linked.exchange(json.dumps([int(r) for r in ranks]).encode())]
        if any(theirs != everybody[0] for theirs in everybody):
            who = {str(named): [r for r, theirs in enumerate(everybody) if theirs == named] for named in everybody}
            told = ", ".join(f"{rank_list(those)} {named}" for named, those in who.items())
            raise MismatchError(
                f"subgroup: the ranks name different ones: {told}; name the same, in the same order, on every rank, "
                "also on those that stay outside, or cut all of the communicator with split(color)"
            )
        member = self.rank in ranks
        return self.split(0 if member else None, list(ranks).index(self.rank) if member else 0)

    def dup(self) -> Communicator:
        """A second communicator of the same ranks, whose calls do not wait for those of this one; a collective."""
        same = self.split(0, self.rank)
        assert same is not None  # every rank has the color
        return same

    def shrink(self, timeout: Timeout = 10.0) -> Communicator:
        """A new communicator of the ranks that are left, after one was lost or gave up; a collective of these.

        Ranks whose process has ended, or that closed this communicator, are not waited for; others, such as one that is
        stopped, for ``timeout``. Whoever comes later is left out. The ranks keep their order and get new numbers. This
        communicator is aborted, if it was not yet; close it when nothing uses it any more, its memory lives on.

        Args:
            timeout: seconds (or a timedelta) to wait for ranks that are alive.
        Returns: the new communicator, with the limits of this one; no store is needed, unless there are several hosts.
        Raises:  RankLostError: the others went on without this rank (then however often it asks, it never goes on
                 alone), or one was lost meanwhile: call it again there. CollectiveTimeoutError: one stalled after it
                 came; AbortedError: a handler of a signal raised: call it again. EngineError: several hosts, and the
                 store is gone. UnsupportedError: over a process group.
        """
        self._begin("shrink")
        limit_ms = milliseconds(timeout, "shrink", self.rank)
        end = self._linked
        if not self.aborted:
            handled = sys.exc_info()[1]  # such as that of a group that has ended of the same loss
            after = "" if handled is None else f" after {type(handled).__name__}: {handled}"
            end.abort(f"rank {self.rank} called shrink(){after}", handled)
        return Communicator(end.shrink(limit_ms))

    # ---- life ----------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """Time limit, in seconds, of every call that names none."""
        return self._native.timeout_ms / 1e3

    @timeout.setter
    def timeout(self, limit: Timeout) -> None:
        self._linked.timeout_ms = milliseconds(limit, "timeout", self.rank)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def aborted(self) -> bool:
        """Whether it has ended: a rank gave up, was lost or called something else. Every call then raises the cause."""
        engine = self._engine  # another thread may close it meanwhile
        return engine is not None and engine.aborted

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends every wait on every rank: their calls raise AbortedError with ``reason``. From any thread. It reaches
        the communicators that this rank has made from this one (`split`, `subgroup`, `dup`), and their ranks."""
        end = self._endpoint  # another thread may close it meanwhile
        if end is not None:
            end.abort(reason)

    def close(self) -> None:
        """Finishes what is in flight and lets go of the peers; not a collective. Twice is as good as once."""
        end, self._endpoint, self._engine = self._endpoint, None, None
        self._closed = True
        if end is not None:
            end.close()
        self._in_flight.clear()

    def describe(self) -> dict[str, str]:
        """Facts for people: ranks, engine, instruction set, memory, limits."""
        facts = {"rank": str(self.rank), "world_size": str(self.world_size), "kind": self.kind, "device": self.device}
        return facts if self._engine is None else facts | self._engine.describe()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if not ended_well and self._endpoint is not None:
            reason = f"rank {self.rank} left its communicator with {type(error).__name__}: {error}"
            self._endpoint.abort(reason, error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "aborted" if self.aborted else "open"
        where = self.device if self.kind == "cuda" else self.kind
        return f"<ringcomm.{type(self).__name__} rank {self.rank} of {self.world_size}, {where}, {state}>"


def _retire(engine: _C.Engine, unused: list[int], address: int) -> None:
    """Notes memory on a device that nobody names any more. Not the place to wait for the device: this runs wherever the
    last reference goes, also while a graph is captured. ``engine`` is alive until now."""
    unused.append(address)
