"""Handles of calls in flight."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ringcomm import _C
from ringcomm.arrays.libraries import stream_number, usual_stream
from ringcomm.comm.engine import CollectiveArgs, Engine, milliseconds
from ringcomm.errors import CollectiveTimeoutError, InvalidArgumentError, RingcommError, shown

_ending = threading.RLock()  # if several threads wait for one call, only the first copies results to its arrays


class Work:
    """One asynchronous call. It keeps its arrays alive until it is done; their values are valid after ``wait``.

    On a device the call is on a stream: ``wait`` orders later work after it without blocking the host, ``synchronize``
    blocks the host and raises the call's error. Elsewhere both block until the call is done.
    """

    __slots__ = ("_call", "_engine", "_joined", "_op", "_request", "_result", "_x")

    def __init__(
        self, request: Any, engine: Engine, op: str, result: Any, call: CollectiveArgs | None = None, x: Any = None
    ) -> None:
        """Takes no ``call`` for a call on plain arrays, which needs nothing after the engine is done. ``x`` is one of
        its arrays, whose library knows the current stream."""
        self._request = request
        self._engine = engine
        self._op = op
        self._result = result
        self._call = call
        self._x = x
        self._joined = call is None

    @property
    def ended(self) -> bool:
        """Whether the engine has finished the call; copying results back may still remain."""
        return bool(self._request.done)

    @property
    def done(self) -> bool:
        """Whether the call has ended, so that ``wait`` returns at once and the caller's arrays have their values. On a
        device they have their values only for a stream that ``wait`` has ordered after the call."""
        if not self._request.done:
            return False
        if self._call is not None and self._call.on_host:
            with suppress(RingcommError):  # which `wait` raises
                self._end()
        return True

    def start_now(self) -> None:
        """Starts a call that has not begun at once, on a thread of the engine. Without this the engine holds a small
        call back for a moment, because the thread that waits for it runs it sooner. ``wait_any`` and ``await`` call
        this first."""
        self._request.start_now()

    def is_completed(self) -> bool:
        """Same as ``done``, under torch's name."""
        return self.done

    def wait(self, timeout: float | timedelta | None = None, stream: Any = None) -> Any:
        """Blocks until the call is done. On a device it instead makes ``stream`` wait, so that work enqueued on the
        stream from now on sees the result.

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
        if call is not None and call.has_own_stream and call.stream is not None:
            self._ask(self._request.join, call.stream)  # messages run on streams of the engine
        if call is not None and not self._joined:
            self._joined = True
            self._result = call.finish_on(waiting, call.root, self._result)
        return self._result

    def synchronize(self, timeout: float | timedelta | None = None) -> Any:
        """Blocks the host until the call is done, also on a device; otherwise same as ``wait``."""
        return self._end(milliseconds(timeout, "wait", self._engine.rank))

    def _waiting_stream(self, stream: Any) -> int | None:
        """Returns the stream that waits for the call; None if the host waits: without streams, after the call's end, or
        for a recv from any rank, whose sender is unknown until the message arrives."""
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
        """Calls a method of the request, and adds the cause to its error, unless only this wait has timed out and the
        call is still in flight."""
        try:
            method(argument)
        except RingcommError as error:
            explained = self._engine.explained(error) if self._request.done else error
            if explained is error:
                raise
            raise explained from None

    def _end(self, timeout_ms: int = 0) -> Any:
        """Waits for the engine, then finishes the call unless that was done before."""
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

    def __await__(self) -> Generator[Any, None, Any]:
        """``await work`` in a coroutine of asyncio: like ``synchronize``, but other tasks run meanwhile."""
        return _finished(self).__await__()

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

    def start_now(self) -> None:
        """Starts every call at once; see ``Work.start_now``."""
        for work in self.works:
            work.start_now()

    def wait(self, timeout: float | timedelta | None = None) -> list[Any]:
        """Waits for every call, up to ``timeout`` seconds for all together. Returns their results; see `wait_all`."""
        return wait_all(self.works, timeout)

    def synchronize(self, timeout: float | timedelta | None = None) -> list[Any]:
        """Same as ``wait``, but blocks the host, even for calls on a device."""
        return [work.synchronize(timeout) for work in self.works]

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """``await group`` in a coroutine of asyncio: like ``synchronize``, but other tasks run meanwhile."""
        return _finished(self).__await__()

    def __len__(self) -> int:
        return len(self.works)


_POLL_WITHOUT_SLEEP_S = 1e-4  # most small calls end within it
_POLL_INTERVAL_S = 1e-3


async def _finished(work: Work | Group) -> Any:
    """Polls until the calls are done, instead of waiting in a thread of asyncio's pool: calls that wait for a call that
    is started later could take all threads of the pool."""
    import asyncio

    if not work.done:
        work.start_now()
        sleeps_from = time.monotonic() + _POLL_WITHOUT_SLEEP_S
        while not work.done:
            # asyncio rounds a sleep up to a whole millisecond, so a shorter interval would take as long.
            await asyncio.sleep(0 if time.monotonic() < sleeps_from else _POLL_INTERVAL_S)
    return work.synchronize()


def wait_all(works: Sequence[Work | Group], timeout: float | timedelta | None = None) -> list[Any]:
    """Waits for all of several asynchronous calls, of any communicators: MPI's Waitall.

    Args:
        works: Works, or Groups of them.
        timeout: seconds (or a timedelta) for all together; None: each call's own limit.
    Returns: what each ``wait`` returns, in the order of ``works``.
    Raises:  the first error in that order; the calls after it may still be in flight. CollectiveTimeoutError: the
             timeout, also with calls in flight.
    """
    works = _checked("wait_all", works)
    limit_ms = milliseconds(timeout, "wait_all", 0)
    if not limit_ms:
        return [work.wait() for work in works]
    end = time.monotonic() + limit_ms / 1e3
    return [work.wait(max(end - time.monotonic(), 1e-3)) for work in works]


def wait_any(works: Sequence[Work | Group], timeout: float | timedelta | None = None) -> int:
    """Waits for one of several asynchronous calls, of any communicators: MPI's Waitany.

    ``works.pop(wait_any(works)).wait()`` is the result of the next call that ends.

    Args:
        works: Works, or Groups of them; at least one.
        timeout: seconds (or a timedelta); None: no other limit than the calls' own.
    Returns: the index of the first one in ``works`` that is done. Its ``wait`` returns its result, or raises its error.
    Raises:  CollectiveTimeoutError: none was done in time; all stay in flight.
    """
    works = _checked("wait_any", works)
    limit_ms = milliseconds(timeout, "wait_any", 0)
    if not works:
        raise InvalidArgumentError("wait_any: got no Work, expected at least one; pass the Works in flight")
    began = time.monotonic()
    end = began + limit_ms / 1e3 if limit_ms else math.inf
    nap, started = 0.0, False
    while True:
        for index, work in enumerate(works):
            if work.done:
                return index
        if not started:
            for work in works:
                work.start_now()
            started = True
        now = time.monotonic()
        if now > end:
            raise CollectiveTimeoutError(
                f"wait_any: waited {limit_ms / 1e3:g} s for one of {len(works)} calls, expected one to end, got none; "
                "they are still in flight: wait longer, or abort their communicators"
            )
        time.sleep(nap)
        if now - began > _POLL_WITHOUT_SLEEP_S:
            nap = min(2 * nap + 2e-5, _POLL_INTERVAL_S)


def _checked(call: str, works: Sequence[Work | Group]) -> list[Work | Group]:
    if not isinstance(works, (list, tuple)) or not all(isinstance(work, (Work, Group)) for work in works):
        raise InvalidArgumentError(f"{call}: got {shown(works)}, expected a list of Works; pass the Works in flight")
    return list(works)
