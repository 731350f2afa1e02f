"""A rank's engine, and beside a device's engine one on the cpu, through which ranks tell each other small things."""

from __future__ import annotations

import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ringcomm import errors
from ringcomm.arrays.devices import CPU, Device
from ringcomm.comm.hosts import Hosts, Network, Span
from ringcomm.errors import (
    AbortedError,
    CollectiveTimeoutError,
    EngineError,
    InvalidArgumentError,
    MismatchError,
    RankLostError,
    RingcommError,
    carry_notes,
)

_LENGTH = struct.Struct("<I")  # goes in front of a device engine's handle; the cpu engine's follows it

_ENDINGS = (AbortedError, CollectiveTimeoutError, MismatchError)  # of a communicator
_PASSED_ON = (RankLostError, CollectiveTimeoutError, MismatchError)  # to other communicators of a rank that gives up
_ADVICE = "; the communicator is aborted, create a new one"
_CAUSE_S = 1.0  # for the rank that found out to say so


class Endpoint:
    """What a communicator moves bytes with."""

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
        self.kind, self.rank, self.world_size, self.device = kind, rank, world_size, device
        self.hosts = hosts or Hosts((tuple(range(world_size)),), ("this host",))
        self.network = network
        self._main = Span(kind, rank, world_size, limit_ms, device, hosts, network)
        self._span_beside = self._main
        # An abort reaches them too: those that `part` has made, those that these have made, and so on.
        self._descendants: weakref.WeakSet[Endpoint] = weakref.WeakSet()
        self._lineage = [self._descendants]  # the sets that those belong to which this one makes
        if device.kind != "cpu":
            apart = None if network is None else network.beside()
            self._span_beside = Span("cpu", rank, world_size, limit_ms, CPU, hosts, apart)

    @property
    def engine(self) -> Any:
        """The engine of the calls; before `connect` that of this host alone."""
        return self._main.engine

    @property
    def _beside(self) -> Any:
        return self._span_beside.engine

    def handle(self) -> bytes:
        """What every rank needs of this one to connect."""
        first = self._main.handle()
        if self._span_beside is self._main:
            return first
        return _LENGTH.pack(len(first)) + first + self._span_beside.handle()

    def connect(self, handles: Sequence[bytes]) -> None:
        """Connects to every rank; a collective."""
        if self._span_beside is not self._main:
            ends = [self._end_of_first(peer, each) for peer, each in enumerate(handles)]
            self._span_beside.connect([each[end:] for each, end in zip(handles, ends, strict=True)])
            handles = [each[_LENGTH.size : end] for each, end in zip(handles, ends, strict=True)]
        self._main.connect(handles)

    def _end_of_first(self, peer: int, handle: bytes) -> int:
        end = _LENGTH.size + _LENGTH.unpack_from(handle)[0] if len(handle) >= _LENGTH.size else _LENGTH.size
        if end > len(handle):
            raise InvalidArgumentError(
                f"connect: rank {self.rank} expected a handle for each of two engines of rank {peer}, got "
                f"{len(handle)} "
                "bytes; install one version of ringcomm everywhere"
            )
        return end

    def part(self, members: Sequence[int], device: Device, shrunk: bool = False) -> Endpoint | None:
        """A new endpoint among some of the ranks, not connected; None where this rank is none of them. Every rank of
        this one calls it as often, unless ``shrunk``."""
        network = None if self.network is None else self.network.child(members, shrunk)
        if self.rank not in members:
            return None
        hosts = self.hosts.among(members)
        made = Endpoint(self.kind, members.index(self.rank), len(members), self.timeout_ms, device, hosts, network)
        if not shrunk:  # which is to outlive this one
            made._lineage += self._lineage
            for descendants in self._lineage:
                descendants.add(made)
        return made

    def shrink(self, limit_ms: int) -> Endpoint:
        """A new endpoint, connected, among the ranks that are left and call this too; see `Communicator.shrink`."""
        regroup = self._beside.regroup
        if self.network is not None and self.hosts.several:
            regroup = self.network.regroup(self.rank, self.world_size)
        came = regroup(b"here", [], limit_ms)
        members = [rank for rank, said in enumerate(came) if said]
        end = self.part(members, self.device, shrunk=True)
        assert end is not None  # this rank came

        def swapped(mine: bytes) -> list[bytes]:
            theirs = regroup(mine, members, limit_ms)
            return [theirs[rank] for rank in members]

        usual = end.timeout_ms
        end.timeout_ms = end._main.limit_ms = end._span_beside.limit_ms = limit_ms
        try:
            # Handles of devices may be long; they go over the new engine on the cpu.
            end._span_beside.connect(swapped(end._span_beside.handle()))
            if end._main is not end._span_beside:
                end._main.connect(end.exchange(end._main.handle()))
        except BaseException as error:
            with suppress(Exception):
                end.close()  # at once: an exception may keep it, and the others would wait for it
            if not isinstance(error, (AbortedError, EngineError)):
                raise
            raise RankLostError(
                f"shrink: rank {self.rank} lost another one meanwhile: {error}; call it again"
            ) from error
        end.timeout_ms = usual
        return end

    def run(self, *numbers: Any) -> int:
        """Runs a call, or enqueues it on its stream; the source of a recv, else -1."""
        try:
            return int(self.engine.run(*numbers))
        except RingcommError as error:
            raise self.explained(error) from None

    def submit(self, *numbers: Any) -> Any:
        """Starts a call."""
        request = self.engine.submit(*numbers)
        return request if self._beside is self.engine else DeviceRequest(request, self)

    def synchronize(self, stream: int) -> None:
        """Waits for what is enqueued on a stream."""
        try:
            self.engine.synchronize(stream)
        except RingcommError as error:
            raise self.explained(error) from None

    def explained(self, error: RingcommError) -> RingcommError:
        """The error with its cause: between processes a device carries no words, so the engine on the cpu beside it
        does, from the rank that found out what is wrong to those that only hear of an abort."""
        if self._beside is self.engine or not isinstance(error, _ENDINGS):
            return error
        if type(error) is not AbortedError:
            self._beside.abort(str(error), type(error).__name__)
            return error
        deadline = time.monotonic() + _CAUSE_S
        while not self._beside.aborted and time.monotonic() < deadline:
            time.sleep(_CAUSE_S / 100)
        why, kind = self._beside.why_aborted, getattr(errors, self._beside.aborted_as)
        if not why or why in str(error):
            return error
        cause: RingcommError
        cause = AbortedError(f"{error}; {why}") if kind is AbortedError else kind(f"{why}{_ADVICE}")
        carry_notes(error, cause)
        return cause

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; a collective."""
        return self._beside.exchange(payload)

    @property
    def timeout_ms(self) -> int:
        """Limit of every call that names none."""
        return int(self.engine.timeout_ms)

    @timeout_ms.setter
    def timeout_ms(self, limit_ms: int) -> None:
        self.engine.timeout_ms = self._beside.timeout_ms = limit_ms

    def abort(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends every wait on every rank, here and in the endpoints that this rank has made from this one. ``cause``:
        what brought this rank here; that another communicator has ended of it ends this one in the same way."""
        kind = next((each.__name__ for each in _PASSED_ON if isinstance(cause, each)), "AbortedError")
        for end in (self, *self._descendants):
            end._beside.abort(reason, kind)  # first: who finds the device's engine aborted finds the reason here
            end.engine.abort(reason, kind)

    def close(self) -> None:
        """Finishes what is in flight and lets go of the peers."""
        self._main.close()
        self._span_beside.close()

    def close_descendants(self) -> None:
        """Closes those that were made from this one: the rank makes no more calls, and others that wait for it hear of
        it at once."""
        for end in self._descendants:
            end.close()


class DeviceRequest:
    """A call in flight on a device."""

    __slots__ = ("_end", "_request")

    def __init__(self, request: Any, end: Endpoint) -> None:
        self._request = request
        self._end = end

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return bool(self._request.done)

    @property
    def source(self) -> int:
        """Source rank of a finished recv."""
        return int(self._request.source)

    def wait(self, timeout_ms: int = 0) -> None:
        """Blocks the host until the call has ended."""
        try:
            self._request.wait(timeout_ms)
        except RingcommError as error:
            raise self._end.explained(error) from None

    def join(self, stream: int) -> None:
        """Lets a stream wait for the call."""
        try:
            self._request.join(stream)
        except RingcommError as error:
            raise self._end.explained(error) from None
