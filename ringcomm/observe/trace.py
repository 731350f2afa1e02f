"""Traces the collectives step by step, into a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from ringcomm import _C
from ringcomm.errors import InvalidArgumentError, shown
from ringcomm.validation import PATH, expects, validate_int

SPANS_PER_THREAD = 1 << 16
"""The default number of spans kept per thread: the first ones; later spans are only counted."""

_ROOM = validate_int(1, (1 << 31) - 1)

Timeline = dict[str, Any]
"""Chrome's trace format: ``traceEvents``, and under ``ringcomm`` this package's information about each process."""


class trace:
    """Records every thread of this process into a file::

        with ringcomm.trace("timeline.json"):
            comm.all_reduce(x)

    or, if a block is inconvenient, ``ringcomm.trace.start()`` and ``ringcomm.trace.stop("timeline.json")``. Only one
    trace can run at a time: ranks that are threads share it, ranks that are processes write one file each. Without a
    trace the cost is one load of a flag.

    Args:
        path: the file to write.
        spans_per_thread: capacity; later spans are dropped, and counted.
    Raises:  InvalidArgumentError: a trace is already running (RINGCOMM_TRACE starts one), the capacity is zero, or the
             file's folder does not exist, which is checked before recording begins.
    """

    @expects("trace", path=PATH, spans_per_thread=_ROOM)
    def __init__(self, path: str | os.PathLike[str], spans_per_thread: int = SPANS_PER_THREAD) -> None:
        _check_folder(path)
        self._path = path
        self._spans_per_thread = spans_per_thread

    def __enter__(self) -> trace:
        self.start(self._spans_per_thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop(self._path)

    @staticmethod
    @expects("trace", spans_per_thread=_ROOM)
    def start(spans_per_thread: int = SPANS_PER_THREAD) -> None:
        """Starts the trace."""
        _C.trace_start(spans_per_thread)

    @staticmethod
    @expects("trace", path=PATH)
    def stop(path: str | os.PathLike[str] | None = None) -> Timeline:
        """Stops the trace. Calls that are still running are left out, except for those of their parts that have ended.

        Args:
            path: the file to write; None: none.
        Returns: the contents of the file.
        Raises:  InvalidArgumentError: as above; if the file's folder does not exist, the trace continues.
        """
        if path is not None:
            _check_folder(path)
        threads, dropped = _C.trace_stop()
        timeline = _timeline(threads, dropped)
        if path is not None:
            _write(timeline, path)
        return timeline


def _timeline(threads: Sequence[tuple[int, str, list[Any]]], dropped: int) -> Timeline:
    pid = os.getpid()
    epoch_us = (time.time_ns() - time.monotonic_ns()) / 1000
    host = platform.node()
    events: list[dict[str, Any]] = []
    # A thread gets its rank in the largest communicator that it served.
    largest = {tid: max((args["world_size"], args["rank"]) for *_, args in spans) for tid, _, spans in threads}
    world_size = max((size for size, _ in largest.values()), default=0)
    ranks = sorted({rank for size, rank in largest.values() if size == world_size})
    if ranks:
        title = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {world_size} (process {pid} on {host})"
        events.append(_label("process_name", pid, pid, name=title))
        events.append(_label("process_sort_index", pid, pid, sort_index=ranks[0]))
    for tid, role, spans in threads:
        size, rank = largest[tid]
        name = f"rank {rank}" + f" of {size}" * (size < world_size) + f": {role}" * (role != "caller")
        events.append(_label("thread_name", pid, tid, name=name))
        events.append(_label("thread_sort_index", pid, tid, sort_index=rank))
        for title, category, begin, end, args in spans:
            span = {"ph": "X", "name": title, "cat": category, "pid": pid, "tid": tid}
            args["group"] = f"{args['group']:x}"  # readers of JSON may round integers above 2^53
            events.append({**span, "ts": begin / 1000, "dur": (end - begin) / 1000, "args": args})
    process = {"pid": pid, "host": host, "epoch_us": epoch_us, "dropped": dropped}
    return {"traceEvents": events, "displayTimeUnit": "ns", "ringcomm": [process]}


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _check_folder(path: str | os.PathLike[str]) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InvalidArgumentError(
            f"trace: expected a file in a folder that is there, got {shown(os.fspath(path))}; make the folder first"
        )


def _write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(timeline, file, separators=(",", ":"))


# ---- a whole process -----------------------------------------------------------------------------------------------


def trace_process(folder: str) -> None:
    """Traces this process from now to its exit, into ``ringcomm-<host>-<pid>.json`` if there was a call."""
    os.makedirs(folder, exist_ok=True)
    trace.start()
    atexit.register(_write_at_exit, os.path.abspath(folder), os.getpid())


def _write_at_exit(folder: str, pid: int) -> None:
    if os.getpid() != pid:  # a fork of the traced process
        return
    try:
        timeline = trace.stop()
    except InvalidArgumentError:  # the program has stopped the trace itself
        return
    if timeline["traceEvents"]:
        _write(timeline, os.path.join(folder, f"ringcomm-{platform.node()}-{pid}.json"))


# ---- several ranks -------------------------------------------------------------------------------------------------


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """Merges the timelines of several processes into one.

    Processes of one host share a clock. Times of other hosts are shifted by the difference of their clocks' times of
    day, so they are as accurate as these. A process number that occurs twice is replaced by a free one.
    """
    events: list[dict[str, Any]] = []
    processes: dict[int, dict[str, Any]] = {}
    first: dict[str, Any] = {}
    for timeline in timelines:
        numbers: dict[int, int] = {}
        shifts: dict[int, float] = {}
        for process in timeline["ringcomm"]:
            first = first or process
            old = process["pid"]
            number = old if old not in processes else max(processes) + 1
            shifted = process["host"] != first["host"]
            shifts[old] = process["epoch_us"] - first["epoch_us"] if shifted else 0.0
            numbers[old] = number
            processes[number] = {**process, "pid": number, "epoch_us": process["epoch_us"] - shifts[old]}
        for event in timeline["traceEvents"]:
            moved = {**event, "pid": numbers[event["pid"]]}
            if "ts" in event:
                moved["ts"] = event["ts"] + shifts[event["pid"]]
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ns", "ringcomm": list(processes.values())}


def _read(path: str) -> Timeline:
    try:
        with open(path, encoding="utf-8") as file:
            timeline = json.load(file)
    except OSError as error:
        raise InvalidArgumentError(
            f"trace: expected a file of ringcomm.trace, got {path}: {error.strerror}; name a file that can be read"
        ) from error
    except ValueError:
        timeline = None
    if not isinstance(timeline, dict) or "ringcomm" not in timeline:
        raise InvalidArgumentError(f"trace: expected a file of ringcomm.trace, got {path}; leave it out")
    return timeline


def main(argv: Sequence[str]) -> int:
    """`ringcomm trace`: merges files. Returns: the exit status, 0."""
    parser = argparse.ArgumentParser("ringcomm trace", description="Merges the timelines of several ranks.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="of ringcomm.trace or RINGCOMM_TRACE")
    parser.add_argument("-o", "--out", required=True, help="the file to write, for https://ui.perfetto.dev")
    a = parser.parse_args(list(argv))
    timeline = merge([_read(path) for path in a.files])
    _write(timeline, a.out)
    spans = sum(event["ph"] == "X" for event in timeline["traceEvents"])
    dropped = sum(process["dropped"] for process in timeline["ringcomm"])
    print(f"wrote {a.out}: {spans} spans of {len(timeline['ringcomm'])} processes, {dropped} dropped")
    return 0
