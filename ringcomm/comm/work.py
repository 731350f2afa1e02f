"""Handles of calls in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from ringcomm import _C
from ringcomm.arrays.devices import Device
from ringcomm.arrays.libraries import stream_number, usual_stream
from ringcomm.comm.args import milliseconds
from ringcomm.errors import RingcommError


class Request(Protocol):
    """An engine's handle of a call in flight."""

    @property
    def done(self) -> bool: ...
    @property
    def source(self) -> int: ...
    def wait(self, timeout_ms: int = 0) -> None: ...


class Finisher(Protocol):
    """The prepared call, with the work left to do when the engine is done."""

    op: str
    rank: int
    root: int

    @property
    def on_host(self) -> bool: ...
    def finish(self, source: int) -> Any: ...
    def finish_on(self, stream: int, source: int) -> Any: ...
    def waiting_stream(self, stream: Any) -> int: ...


class Explainer(Protocol):
    """An engine on a device, which knows the causes of its errors."""

    rank: int
    device: Device

    def explained(self, error: RingcommError) -> RingcommError: ...


def wait_for(request: Any, engine: Explainer, method: Callable[[int], None], argument: int) -> None:
    """Calls a method of a native request. Its error is raised with the cause, unless only this wait has timed out and
    the call is still in flight."""
    try:
        method(argument)
    except RingcommError as error:
        raise (engine.explained(error) if request.done else error) from None


_ending = threading.RLock()  # so that of threads that ask for one call, the first writes to the caller's arrays


class Work:
    """One asynchronous call. It keeps its arrays alive until it is done; their values are valid after ``wait``."""

    __slots__ = ("_call", "_rank", "_request", "_result")

    def __init__(self, request: Any, call: Finisher) -> None:
        self._request = request
        self._call: Finisher | None = call
        self._rank = call.rank
        self._result: Any = None

    @property
    def done(self) -> bool:
        """Whether the call has ended, so that ``wait`` returns at once, and the caller's arrays have their values; on a
        device they have them once ``wait`` has ordered a stream after the call."""
        if not self._request.done:
            return False
        if self._call is not None and self._call.on_host:
            with suppress(RingcommError):  # which `wait` raises
                self._end()
        return True

    def is_completed(self) -> bool:
        """Same as ``done``, under torch's name."""
        return self.done

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks until the call is done.

        Args:
            timeout: seconds (or a timedelta); None: the call's own limit. If it passes, the call stays in flight.
        Returns: what the synchronous call returns.
        Raises:  CollectiveTimeoutError, AbortedError, MismatchError: the call's own error, or the timeout here.
        """
        return self.synchronize(timeout)

    def synchronize(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks the host until the call is done; otherwise same as ``wait``."""
        return self._end(milliseconds(timeout, "wait", self._rank))

    def _end(self, timeout_ms: int = 0) -> Any:
        """Waits for the engine, and the first time finishes the call."""
        self._request.wait(timeout_ms)
        if self._call is not None:
            with _ending:
                call = self._call
                if call is not None:
                    self._result = call.finish(self._request.source)
                    self._call = None
        return self._result

    def __repr__(self) -> str:
        return f"<Work {'done' if self._request.done else 'in flight'}>"


class DeviceWork(Work):
    """One asynchronous call on a stream of a device. ``wait`` orders later work after the call without blocking the
    host; ``synchronize`` blocks the host, and raises the call's error."""

    __slots__ = ("_finished",)

    def __init__(self, request: Any, call: Finisher) -> None:
        super().__init__(request, call)
        self._finished = False

    def wait(self, timeout: float | timedelta | None = None, stream: Any = None) -> Any:
        """Makes ``stream`` wait for the call: work enqueued there from now on sees its result.

        Args:
            timeout: seconds (or a timedelta); if given, this blocks the host as ``synchronize`` does.
            stream: as in the call; None: the stream on which the array's library currently works.
        Returns: what the synchronous call returns.
        """
        call = self._call
        if timeout is not None or call is None or (call.op == "recv" and call.root < 0):
            return self.synchronize(timeout)  # the sender is unknown before it has sent
        waiting = call.waiting_stream(stream)
        self._request.join(waiting)
        if not self._finished:
            self._finished = True
            self._result = call.finish_on(waiting, call.root)
        return self._result

    def synchronize(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks the host until the call is done; raises its error."""
        return self._end(milliseconds(timeout, "wait", self._rank))

    def _end(self, timeout_ms: int = 0) -> Any:
        if self._finished:
            self._call = None  # drops the arrays; only the request is left to wait for
        return super()._end(timeout_ms)


class PlainWork(Work):
    """One asynchronous call on plain arrays, on a device's current stream. It is like DeviceWork, but nothing is left
    to do when the engine is done. Such calls are the most frequent ones, so each makes this Python object alone."""

    __slots__ = ("_arrays", "_engine", "_op")

    def __init__(self, request: _C.Request, engine: Explainer, op: str, x: Any, out: Any) -> None:
        self._request = request
        self._call, self._rank = None, engine.rank
        self._engine = engine
        self._op = op
        self._arrays: tuple[Any, Any] | None = (x, out)
        self._result = out

    def wait(self, timeout: float | timedelta | None = None, stream: Any = None) -> Any:
        """Makes ``stream`` wait for the call; see `DeviceWork.wait`."""
        arrays, engine = self._arrays, self._engine
        if timeout is not None or arrays is None:
            return self.synchronize(timeout)
        if stream is not None:
            waiting = stream_number(stream, self._op, engine.rank)
        else:
            known = _C.work_stream(arrays[0], engine.device.index)
            waiting = usual_stream(engine.device) if known is None else known
        wait_for(self._request, engine, self._request.join, waiting)
        return self._result

    def synchronize(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks the host until the call is done; raises its error."""
        wait_for(self._request, self._engine, self._request.wait, milliseconds(timeout, "wait", self._rank))
        self._arrays = None
        return self._result


class Group:
    """Asynchronous calls that are waited for together; see ``Communicator.coalesce``."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    @property
    def done(self) -> bool:
        """Whether every call is done."""
        return all(work.done for work in self.works)

    def wait(self, timeout: float | timedelta | None = None) -> list[Any]:
        """Waits for every call, in order, up to ``timeout`` seconds for each. Returns their results."""
        return [work.wait(timeout) for work in self.works]

    def synchronize(self, timeout: float | timedelta | None = None) -> list[Any]:
        """Same as ``wait``, but blocks the host, even for calls on a device."""
        return [work.synchronize(timeout) for work in self.works]

    def __len__(self) -> int:
        return len(self.works)
