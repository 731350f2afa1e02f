"""A rank's engine, and beside a device's engine one on the cpu, through which ranks tell each other small things."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ringcomm import _C
from ringcomm.devices import CPU, Device
from ringcomm.errors import AbortedError
from ringcomm.hosts import Hosts, Network, Span

_LENGTH = struct.Struct("<I")  # goes in front of a device engine's handle; the cpu engine's follows it


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
            ends = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in handles]
            self._span_beside.connect([each[end:] for each, end in zip(handles, ends, strict=True)])
            handles = [each[_LENGTH.size : end] for each, end in zip(handles, ends, strict=True)]
        self._main.connect(handles)

    def part(self, members: Sequence[int], device: Device) -> Endpoint | None:
        """A new endpoint among some of the ranks, not connected; None where this rank is none of them. Every rank of
        this one calls it as often."""
        network = None if self.network is None else self.network.child(members)
        if self.rank not in members:
            return None
        hosts = self.hosts.among(members)
        return Endpoint(self.kind, members.index(self.rank), len(members), self.timeout_ms, device, hosts, network)

    def run(self, *numbers: Any) -> int:
        """Runs a call, or enqueues it on its stream; the source of a recv, else -1."""
        if self._beside is self.engine:
            return int(self.engine.run(*numbers))
        try:
            return int(self.engine.run(*numbers))
        except AbortedError as error:
            raise self.explained(error) from None

    def submit(self, *numbers: Any) -> Any:
        """Starts a call."""
        request = self.engine.submit(*numbers)
        return request if self._beside is self.engine else DeviceRequest(request, self)

    def synchronize(self, stream: int) -> None:
        """Waits for what is enqueued on a stream."""
        try:
            self.engine.synchronize(stream)
        except AbortedError as error:
            raise self.explained(error) from None

    def explained(self, error: AbortedError) -> AbortedError:
        """The error with the reason of the rank that gave up: a device carries none from process to process."""
        if self._beside is self.engine or not self._beside.aborted:
            return error
        try:
            self._beside.run(_C.OPS["barrier"], 0, 0, 0, 0, 0, 0, 0, 0)
        except AbortedError as reason:
            if str(reason) not in str(error):
                return AbortedError(f"{error}; {reason}")
        return error

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

    def abort(self, reason: str) -> None:
        """Ends every wait on every rank."""
        self._beside.abort(reason)  # first: who finds the device's engine aborted finds the reason here
        self.engine.abort(reason)

    def close(self) -> None:
        """Finishes what is in flight and lets go of the peers."""
        self._main.close()
        self._span_beside.close()


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
        except AbortedError as error:
            raise self._end.explained(error) from None

    def join(self, stream: int) -> None:
        """Lets a stream wait for the call."""
        try:
            self._request.join(stream)
        except AbortedError as error:
            raise self._end.explained(error) from None
