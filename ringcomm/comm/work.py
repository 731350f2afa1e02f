"""Handles of calls in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from ringcomm import _C
from ringcomm.arrays.libraries import stream_number, usual_stream
from ringcomm.comm.args import CollectiveArgs, Rank, milliseconds
from ringcomm.errors import RingcommError


class Request(Protocol):
    """An engine's handle of a call in flight."""

    @property
    def done(self) -> bool: ...
    @property
    def source(self) -> int: ...
    def wait(self, timeout_ms: int = 0) -> None: ...


_ending = threading.RLock()  # so that of threads that ask for one call, the first writes to the caller's arrays


class Work:
    """One asynchronous call. It keeps its arrays alive until it is done; their values are valid after ``wait``.

    On a device the call is on a stream: ``wait`` orders later work after it without blocking the host, ``synchronize``
    blocks the host and raises the call's error. Elsewhere both block until the call is done.
    """

    __slots__ = ("_call", "_engine", "_joined", "_op", "_request", "_result", "_x")

    def __init__(
        self, request: Any, engine: Rank, op: str, result: Any, call: CollectiveArgs | None = None, x: Any = None
    ) -> None:
        """A call on plain arrays has no ``call``, because nothing is left to do when the engine is done; ``x`` is an
        array of it, whose library tells the current stream."""
        self._request = request
        self._engine = engine
        self._op = op
        self._result = result
        self._call = call
        self._x = x
        self._joined = call is None

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the call, whatever is left to do here."""
        return bool(self._request.done)

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

    def wait(self, timeout: float | timedelta | None = None, stream: Any = None) -> Any:
        """Blocks until the call is done; on a device it makes ``stream`` wait instead, so that work enqueued there from
        now on sees the result.

        Args:
            timeout: seconds (or a timedelta), for which the host waits on a device too; None: the call's own limit. If
                it passes, the call stays in flight.
            stream: as in the call; None: the stream on which the array's library currently works.
        Returns: what the synchronous call returns.
        Raises:  CollectiveTimeoutError, AbortedError, MismatchError: the call's own error, or the timeout here.
        """
        if timeout is not None:
            return self.synchronize(timeout)
        waiting = self._waiting_stream(stream)
        if waiting is None:
            return self._end()
        self._ask(self._request.join, waiting)
        call = self._call
        if call is not None and not self._joined:
            self._joined = True
            self._result = call.finish_on(waiting, call.root, self._result)
        return self._result

    def synchronize(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks the host until the call is done, also on a device; otherwise same as ``wait``."""
        return self._end(milliseconds(timeout, "wait", self._engine.rank))

    def _waiting_stream(self, stream: Any) -> int | None:
        """Returns the stream that waits for the call. None: the host waits, because there are no streams, the call has
        ended, or it is a recv whose sender is unknown before it has sent."""
        engine, call = self._engine, self._call
        device = engine.device
        if device is None or device.kind != "cuda":
            if stream is not None:
                raise engine.has_no_stream("wait", stream)
            return None
        if call is not None:
            return None if call.waits or (call.op == "recv" and call.root < 0) else call.waiting_stream(stream)
        if self._x is None or (self._op == "recv" and self._result is None):
            return None
        if stream is not None:
            return stream_number(stream, self._op, engine.rank)
        known = _C.work_stream(self._x, device.index)
        return usual_stream(device) if known is None else known

    def _ask(self, method: Callable[[int], None], argument: int) -> None:
        """Calls a method of the request. Its error is raised with the cause, unless only this wait has timed out and
        the call is still in flight."""
        try:
            method(argument)
        except RingcommError as error:
            explained = self._engine.explained(error) if self._request.done else error
            if explained is error:
                raise
            raise explained from None

    def _end(self, timeout_ms: int = 0) -> Any:
        """Waits for the engine, and the first time finishes the call."""
        self._ask(self._request.wait, timeout_ms)
        self._x = None
        if self._call is not None:
            with _ending:
                call, self._call = self._call, None
                if call is not None and not self._joined:
                    self._result = call.finish(self._request.source, self._result)
        elif self._op == "recv" and self._result is None:
            self._result = self._request.source
        return self._result

    def __repr__(self) -> str:
        return f"<Work {'done' if self._request.done else 'in flight'}>"


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
