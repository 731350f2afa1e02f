"""Our own engines, which move a communicator's bytes through memory that the ranks share, and between hosts."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ringcomm import _C, errors
from ringcomm.arrays import libraries
from ringcomm.arrays.devices import CPU, EMULATED, Device
from ringcomm.arrays.interop import wire_type
from ringcomm.arrays.libraries import Array, library_of
from ringcomm.comm import profiling
from ringcomm.comm.engine import MOST_BYTES, CollectiveArgs, Engine, Pairs, Request, no_probe
from ringcomm.comm.hosts import Hosts, Network, RankEngine
from ringcomm.errors import (
    AbortedError,
    CollectiveTimeoutError,
    EngineError,
    InvalidArgumentError,
    MismatchError,
    RankLostError,
    RingcommError,
    ShapeError,
    carry_notes,
    rank_list,
)

# A handle of two engines: this length of the device engine's handle, that handle, then the cpu engine's handle.
_LENGTH = struct.Struct("<I")

_ENDINGS = (AbortedError, CollectiveTimeoutError, MismatchError)  # errors that end a communicator
# Errors whose class the other ranks see, too, when such an error makes this rank abort further communicators.
_PASSED_ON = (RankLostError, CollectiveTimeoutError, MismatchError)
_ADVICE = "; the communicator is aborted, create a new one"
_CAUSE_S = 1.0  # time for the rank that found the cause to publish it
_Result = TypeVar("_Result")
_PLACE = struct.Struct("<?qq")  # (has a color, color, key)


class NativeEngine(Engine):
    """Our own engine. A device engine has a second engine on the cpu for control messages between the ranks."""

    lends_memory = True

    def __init__(
        self,
        kind: str,
        rank: int,
        world_size: int,
        limit_ms: int,
        device: Device,
        hosts: Hosts | None = None,
        network: Network | None = None,
    ) -> None:
        self.name, self.rank, self.world_size = kind, rank, world_size
        self.device: Device = device
        self._on_host = device == CPU or EMULATED
        self.libraries = ("torch", "numpy") if self._on_host else ("torch", "cupy")
        self._hosts = hosts or Hosts((tuple(range(world_size)),), ("this host",))
        self.network = network
        self._main = RankEngine(kind, rank, world_size, limit_ms, device, hosts, network)
        self._control = self._main
        # An abort also aborts the engines that `split` has made from this one, directly or through other engines.
        self._descendants: weakref.WeakSet[NativeEngine] = weakref.WeakSet()
        self._lineage = [self._descendants]  # this engine's descendants and those of each engine it descends from
        if device.kind != "cpu":
            of_control = None if network is None else network.for_control()
            self._control = RankEngine("cpu", rank, world_size, limit_ms, CPU, hosts, of_control)
        self._unused: list[int] = []  # device memory to be freed

    @property
    def receives_from_any(self) -> bool:  # type: ignore[override]
        """`Engine.receives_from_any`: not over several hosts, because no place shows the messages from all hosts."""
        return not self.hosts.several

    @property
    def native(self) -> _C.Engine:
        """The engine that runs calls."""
        return self._main.native

    @property
    def hosts(self) -> Hosts:
        return self._hosts

    def handle(self) -> bytes:
        """Returns the bytes that every rank needs to connect to this one."""
        first = self._main.handle()
        if self._control is self._main:
            return first
        return _LENGTH.pack(len(first)) + first + self._control.handle()

    def connect(self, handles: Sequence[bytes]) -> None:
        """Connects to every rank; a collective."""
        if self._control is not self._main:
            ends = [self._end_of_first(peer, each) for peer, each in enumerate(handles)]
            self._control.connect([each[end:] for each, end in zip(handles, ends, strict=True)])
            handles = [each[_LENGTH.size : end] for each, end in zip(handles, ends, strict=True)]
        self._main.connect(handles)

    def _end_of_first(self, peer: int, handle: bytes) -> int:
        end = _LENGTH.size + _LENGTH.unpack_from(handle)[0] if len(handle) >= _LENGTH.size else _LENGTH.size
        if end > len(handle):
            raise InvalidArgumentError(
                f"connect: rank {self.rank} expected a handle for each of two engines of rank {peer}, got "
                f"{len(handle)} bytes; install one version of ringcomm everywhere"
            )
        return end

    def split(self, color: int | None, key: int) -> NativeEngine | None:
        everybody = self.exchange(_PLACE.pack(color is not None, color or 0, key))
        strangers = [r for r, each in enumerate(everybody) if len(each) != _PLACE.size]
        if strangers:
            raise MismatchError(
                f"split: {rank_list(strangers)} made another call, expected split on every rank; make the same calls "
                "in the same order"
            )
        places = [_PLACE.unpack(each) for each in everybody]
        members = [r for r, (colored, its, _) in enumerate(places) if colored and its == color and color is not None]
        members.sort(key=lambda r: places[r][2])  # a stable sort, so equal keys keep their order
        part = self._part(members)
        handles = self.exchange(b"" if part is None else part.handle())
        if part is not None:
            part.connect([handles[r] for r in members])
        return part

    def _part(self, members: Sequence[int], shrunk: bool = False) -> NativeEngine | None:
        """Returns a new engine of ``members``, not yet connected; None if this rank is not a member. Every rank of this
        engine must call this equally often, unless ``shrunk``: see `Network.child`."""
        network = None if self.network is None else self.network.child(members, shrunk)
        if self.rank not in members:
            return None
        hosts = self.hosts.among(members)
        rank, world_size = members.index(self.rank), len(members)
        made = NativeEngine(self.name, rank, world_size, self.timeout_ms, self.device, hosts, network)
        if not shrunk:  # a shrunk engine outlives this one
            made._lineage += self._lineage
            for descendants in self._lineage:
                descendants.add(made)
        return made

    def shrink(self, limit_ms: int) -> NativeEngine:
        """Returns a connected engine among the surviving ranks that also call this; see `Communicator.shrink`."""
        if not self.aborted:
            handled = sys.exc_info()[1]  # for example the error of a group that ended because of the same loss
            after = "" if handled is None else f" after {type(handled).__name__}: {handled}"
            self.abort(f"rank {self.rank} called shrink(){after}", handled)
        agree: Callable[[bytes, Sequence[int], int], list[bytes]] = self._control.native.agree_on_shrink
        if self.network is not None and self.hosts.several:
            agree = self.network.agree_on_shrink(self.rank, self.world_size)
        came = agree(b"here", [], limit_ms)
        members = [rank for rank, said in enumerate(came) if said]
        part = self._part(members, shrunk=True)
        assert part is not None  # this rank is one of the members

        def swapped(mine: bytes) -> list[bytes]:
            theirs = agree(mine, members, limit_ms)
            return [theirs[rank] for rank in members]

        usual = part.timeout_ms
        part.timeout_ms = part._main.limit_ms = part._control.limit_ms = limit_ms
        try:
            # Handles of devices may be long, so they are sent over the new cpu engine.
            part._control.connect(swapped(part._control.handle()))
            if part._main is not part._control:
                part._main.connect(part.exchange(part._main.handle()))
        except BaseException as error:
            with suppress(Exception):
                part.close()  # now, because the exception may keep the engine alive while the other ranks wait for it
            if not isinstance(error, (AbortedError, EngineError)):
                raise
            raise RankLostError(
                f"shrink: rank {self.rank} lost another rank during the call: {error}; call shrink again"
            ) from error
        part.timeout_ms = usual
        return part

    # ---- calls ---------------------------------------------------------------------------------------------------

    @property
    def run_plain(self) -> Any:  # type: ignore[override]
        """`Engine.run_plain`; on the cpu the native method itself, to save a Python call."""
        run = self.native.run_plain
        return run if self._control.native is self.native else partial(self.explaining, run)

    @property
    def submit_plain(self) -> Any:  # type: ignore[override]
        """`Engine.submit_plain`; on the cpu the native method itself."""
        submit = self.native.submit_plain
        return submit if self._control.native is self.native else partial(self.explaining, submit)

    @property
    def pack_plain(self) -> Any:  # type: ignore[override]
        """`Engine.pack_plain`; the native method itself, since `pack` adds no causes to errors either."""
        return self.native.pack_plain

    def run(self, call: CollectiveArgs) -> int:
        """Runs a call, or enqueues it on its stream; returns the source of a recv, else -1."""
        with profiling.named(call.op):
            source = self.explaining(self.native.run, *call.to_native())
            self._wait_for(call)
        return source

    def submit(self, call: CollectiveArgs) -> Request:
        with profiling.named(call.op):
            return self.explaining(self.native.submit, *call.to_native())

    def run_list(self, calls: Sequence[CollectiveArgs]) -> None:
        """Runs calls that differ only in their arrays; a device engine runs many of them in one launch."""
        with profiling.named(calls[0].op):
            self.explaining(self.native.run_list, [call.to_native() for call in calls])
            self._wait_for(next((call for call in calls if call.waits), calls[0]))

    def run_pair(self, sending: CollectiveArgs, receiving: CollectiveArgs) -> int:
        if self._control.native is self.native or receiving.root < 0:
            return self.explaining(super().run_pair, sending, receiving)
        self.run_list([sending, receiving])  # one launch: on one stream the second would wait for the first
        return receiving.root

    def probe(self, call: CollectiveArgs, waits: bool) -> tuple[int, int, int, int] | None:
        if self.name != "cpu" or self.hosts.several:
            raise no_probe(call, f"{self.name} over several hosts" if self.hosts.several else self.name)
        with profiling.named(call.op):
            return self.explaining(self.native.probe, call.root, call.tag, call.timeout_ms, waits)

    def pack(self, call: CollectiveArgs, pairs: Pairs, scale: float) -> None:
        (before, each), (after, _) = (self._wire(pairs[0][end].array, call) for end in (0, 1))
        pieces = [(source.address, target.address, source.count * each) for source, target in pairs]
        self.native.pack(pieces, before, after, scale, call.stream or 0)
        self._wait_for(call)

    def combine(self, call: CollectiveArgs, first: Array, second: Array) -> None:
        op, _ = call.reduction or ("sum", 1.0)
        code, each = wire_type(second.dtype, op, call.op, self.rank)
        count, reduce_op = second.count * each, _C.REDUCE_OPS[op]
        self.native.combine(first.address, second.address, second.address, count, code, reduce_op, 1, call.stream or 0)
        self._wait_for(call)

    def _wire(self, array: Array, call: CollectiveArgs) -> tuple[int, int]:
        # As in a sum, the real and imaginary halves are converted separately.
        halves = "sum" if array.dtype.name in ("complex32", "complex64") else None
        return wire_type(array.dtype, halves, call.op, self.rank)

    def _wait_for(self, call: CollectiveArgs) -> None:
        if call.waits:
            self.synchronize(call.stream or 0)

    def synchronize(self, stream: int) -> None:
        self.explaining(self.native.synchronize, stream)

    def explaining(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Calls a function of the engine; its error is raised with the cause."""
        try:
            return function(*args)
        except RingcommError as error:
            raise self.explained(error) from None

    def explained(self, error: RingcommError) -> RingcommError:
        """Returns the error with its cause. Between processes a device engine carries no text. Therefore the rank that
        found the problem passes the reason over the cpu engine to the ranks that only see an abort."""
        if self._control.native is self.native or not isinstance(error, _ENDINGS):
            return error
        if type(error) is not AbortedError:
            self._control.native.abort(str(error), type(error).__name__)
            return error
        deadline = time.monotonic() + _CAUSE_S
        while not self._control.native.aborted and time.monotonic() < deadline:
            time.sleep(_CAUSE_S / 100)
        why, kind = self._control.native.why_aborted, getattr(errors, self._control.native.aborted_as)
        if not why or why in str(error):
            return error
        cause: RingcommError
        cause = AbortedError(f"{error}; {why}") if kind is AbortedError else kind(f"{why}{_ADVICE}")
        carry_notes(error, cause)
        return cause

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._control.native.exchange(payload)

    # ---- memory --------------------------------------------------------------------------------------------------

    def usual_library(self, dtype: Any) -> str:
        return library_of(dtype) if self._on_host else libraries.device_library()

    def empty(self, shape: tuple[int, ...], dtype: Any, library: str) -> Any:
        """Returns a new array of a library, with that library's dtype, in memory of this engine."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > MOST_BYTES:
            raise ShapeError(
                f"empty: rank {self.rank} got a shape of {nbytes} bytes, expected at most {MOST_BYTES}; pass a "
                "smaller one"
            )
        if nbytes == 0:
            return libraries.wrap_nothing(library, dtype, shape, CPU if self._on_host else self.device)
        native = self.native
        if not self._on_host:
            _C.give_back_pools()
        if self._unused:
            libraries.settle(library, self.device)  # the device may still use the memory
            while self._unused:
                native.release(self._unused.pop())
        address = native.allocate(nbytes)
        if self._on_host:
            memory = (ctypes.c_char * nbytes).from_address(address)
            weakref.finalize(memory, native.release, address).atexit = False
            return libraries.wrap_memory(memory, library, dtype, shape)
        there = libraries.DeviceMemory(address, nbytes, self.device)
        weakref.finalize(there, _retire, native, self._unused, address).atexit = False
        return libraries.wrap_device_memory(there, library, dtype, shape)

    def mem_pool(self, nbytes: int) -> Any:
        if self.device == CPU:
            return super().mem_pool(nbytes)
        libraries.check_mem_pool(self.rank)
        return libraries.mem_pool(_C.open_pool(self.native, nbytes, self.device.index))

    # ---- life ----------------------------------------------------------------------------------------------------

    @property
    def timeout_ms(self) -> int:
        """The time limit of every call without its own."""
        return self.native.timeout_ms

    @timeout_ms.setter
    def timeout_ms(self, limit_ms: int) -> None:
        self.native.timeout_ms = self._control.native.timeout_ms = limit_ms

    @property
    def aborted(self) -> bool:  # type: ignore[override]
        """Whether the engine has ended: every call raises the cause."""
        return self.native.aborted

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends every wait on every rank, here and in the engines that this rank has made from this one. ``cause`` is
        the exception that made this rank abort; if it ended another communicator, this one ends with the same class of
        error."""
        kind = next((each.__name__ for each in _PASSED_ON if isinstance(cause, each)), "AbortedError")
        for each in (self, *self._descendants):
            # First, so that a rank that finds the device engine aborted finds the reason here.
            each._control.native.abort(reason, kind)
            each.native.abort(reason, kind)

    def leave(self, reason: str, error: BaseException | None) -> None:
        """Aborts, so that the other ranks learn that this rank has left with an error."""
        self.abort(reason, error)

    def describe(self) -> dict[str, str]:
        """Returns a description for people: instruction set, memory, limits."""
        return self.native.describe()

    def close(self) -> None:
        self._main.close()
        self._control.close()

    def close_descendants(self) -> None:
        """Closes the engines made from this one, because this rank makes no more calls: ranks that wait for it there
        get an error at once."""
        for each in self._descendants:
            each.close()


def _retire(native: _C.Engine, unused: list[int], address: int) -> None:
    """Records device memory that nothing references any more. It must not wait for the device, because it runs wherever
    the last reference is dropped, possibly during a graph capture. Its argument ``native`` keeps the engine alive until
    then."""
    unused.append(address)
