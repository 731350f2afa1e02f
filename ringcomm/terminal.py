"""Output for a person at a terminal: its width, and the progress of work that takes longer than two seconds.

Progress is one line on the standard error, and is removed at the end, so programs can still read the standard output.
Without a terminal only `note` writes.

    with Progress("tune all_reduce", total=len(candidates)) as progress:
        for candidate in candidates:
            measure(candidate)
            progress.done += 1
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

QUIET_S = 2.0  # nothing is shown before
NOTE_S = 10.0  # nothing is noted before
_REFRESH_S = 0.5


def columns() -> int:
    """Returns the width of the terminal that shows the standard output, which COLUMNS overrides; for a file or a pipe,
    whose lines may have any length, a large number."""
    return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else 1 << 20


def folded(text: str) -> str:
    """Returns text whose comment lines fit the terminal."""
    width, lines = columns(), []
    for line in text.splitlines():
        is_long = line.startswith("# ") and len(line) > width
        lines += textwrap.wrap(line, width, subsequent_indent="#   ", break_long_words=False) if is_long else [line]
    return "\n".join(lines)


class Progress:
    """The progress of one task; a context manager.

    Attributes:
        what: the task in words; may change.
        done: how much of ``total`` is done.
    """

    def __init__(self, what: str, total: int = 0, shows: bool = True, limit_s: float | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._limit = "" if limit_s is None else f" of {limit_s:g}"
        self._shows = shows
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._noted = False

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self) -> None:
        """Starts to show the line, for callers that do not use a ``with`` block."""
        if self._shows and _is_terminal(sys.stderr):
            self._thread = threading.Thread(target=self._draw, name="ringcomm-progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Removes the line; idempotent."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def note(self, what: str) -> None:
        """Says for what the program waits: in the line, or without a terminal once, in a line of its own."""
        self.what = what
        if self._shows and self._thread is None and not self._noted and self.seconds >= NOTE_S:
            self._noted = True
            write_stderr(f"{self.text()}\n")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Calls `note` once for a block that waits, and therefore cannot call it itself."""
        timer = threading.Timer(NOTE_S, self.note, [self.what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # a caller may fork next

    def text(self) -> str:
        """Returns the line."""
        counts = f": {self.done} of {self.total}" if self.total else ""
        return f"{self.what}{counts} ({self.seconds:.0f} s{self._limit})"

    def _draw(self) -> None:
        pause = QUIET_S
        while not self._over.wait(pause):
            width = shutil.get_terminal_size().columns - 1
            write_stderr(f"\r{self.text()[:width]}\x1b[K")
            pause = _REFRESH_S
        if pause != QUIET_S:
            write_stderr("\r\x1b[K")


def _is_terminal(stream: TextIO | None) -> bool:
    with suppress(AttributeError, ValueError):  # replaced, or closed
        return stream is not None and stream.isatty()
    return False


def write_stderr(text: str) -> None:
    """Writes to the standard error, unless the program has closed it or replaced it by what cannot be written."""
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
