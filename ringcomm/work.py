"""Handles of calls in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Request(Protocol):
    """What an engine gives for a call in flight."""

    @property
    def done(self) -> bool: ...
    @property
    def source(self) -> int: ...
    def wait(self, timeout_ms: int = 0) -> None: ...


class Work:
    """One asynchronous call. Its arrays are kept alive until it is done; their values are valid after ``wait``."""

    __slots__ = ("_finish", "_request", "_result")

    def __init__(self, request: Request, finish: Callable[[int], Any]) -> None:
        self._request = request
        self._finish: Callable[[int], Any] | None = finish
        self._result: Any = None

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._request.done

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the call is done.

        Args:
            timeout: seconds; None: the call's own limit. When it passes, the call stays in flight.
        Returns: what the call returns when it is not asynchronous.
        Raises:  CollectiveTimeoutError, AbortedError, MismatchError: the call's own error, or the timeout here.
        """
        self._request.wait(0 if timeout is None else max(1, round(timeout * 1e3)))
        finish, self._finish = self._finish, None
        if finish is not None:
            self._result = finish(self._request.source)
        return self._result

    def __repr__(self) -> str:
        return f"<Work {'done' if self.done else 'in flight'}>"


class Group:
    """Asynchronous calls that are waited for together; see ``Communicator.coalesce``."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    @property
    def done(self) -> bool:
        """Whether every call is done."""
        return all(work.done for work in self.works)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Waits for every call, in order, up to ``timeout`` seconds for each. Returns their results."""
        return [work.wait(timeout) for work in self.works]

    def __len__(self) -> int:
        return len(self.works)
