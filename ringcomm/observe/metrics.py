"""Metrics: what the calls of this process have moved and how long they took, as a dict, a file or a port.

The flight recorder counts them (RINGCOMM_RECORD=0: nothing is counted); this module reads its memory and counts
nothing itself. RINGCOMM_METRICS=file:PATH or port:N also gives them in the text format of Prometheus.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ringcomm.comm.hosts import AT_CLOSE
from ringcomm.errors import InvalidArgumentError, shown
from ringcomm.observe import record
from ringcomm.terminal import write_stderr
from ringcomm.validation import expects, validate_int

VARIABLE = "RINGCOMM_METRICS"
INTERVAL_S = 5.0
"""How often the file is written; at first more often, for runs that are short."""
_SOON_S = 0.1
"""How often a process checks whether it has a communicator, and then whether there are metrics to write."""

_HELP = {  # the descriptions of metrics, by name
    "ringcomm_calls_total": "Calls that were begun.",
    "ringcomm_chosen_calls_total": "Collectives with a choice of algorithm, by requested and used algorithm.",
    "ringcomm_failed_calls_total": "Calls that ended with an error.",
    "ringcomm_bytes_total": "Bytes of this rank's messages, of the larger of input and output.",
    "ringcomm_call_seconds_total": "Time from the beginning of a call to its end.",
    "ringcomm_wait_seconds_total": "Time that collectives waited for a peer.",
}


@expects("metrics", pid=validate_int(1, (1 << 31) - 1))
def metrics(pid: int | None = None) -> dict[str, Any]:
    """Returns the counters of a process's communicators, from their beginning.

    ringcomm repeats no call, so there is no counter of retries: a call that fails is counted once in ``failed``.

    Args:
        pid: a process of this user on this machine; a process without communicators, such as torchrun, stands for the
            processes that it started. None: this process.
    Returns: ``calls``, ``failed``, ``bytes`` and ``seconds`` of all calls, and ``communicators``: a dict for each rank
             of each communicator, with ``group``, ``engine``, ``rank`` and ``world_size``; ``ops``, which has the same
             counters for each op and requested ``algorithm``, and in ``chosen`` the number of calls for which the
             engine chose each algorithm, such as ``{"oneshot": 9, "direct": 1}``; and ``waited``, the seconds that
             collectives waited for each peer, including current waits. ``seconds`` is missing if no end of a call is
             known, as on a device, and ``waited`` if the engine does not know for which peer it waits (every engine
             except the cpu's inside a host). ``chosen`` omits calls that failed before the choice, and calls without a
             choice: sends, receives, calls of a single rank on the cpu, and between hosts the ops that have no
             schedule.
    Raises:  InvalidArgumentError: the process does not exist, belongs to another user, or runs another version.
    """
    taken = record.totals(os.getpid() if pid is None else pid)
    if not taken and pid is not None:
        taken = record.read_descendants(pid, record.totals)
    found = [_communicator(*each) for each in taken if each[0]["group"]]  # 0: not connected yet, so without calls
    return {**_sums([op for each in found for op in each["ops"]]), "communicators": found}


def _communicator(facts: dict[str, Any], totals: list[dict[str, Any]], waited: list[int]) -> dict[str, Any]:
    ops = []
    for each in totals:
        ns = each.pop("ns")
        ops.append({**each, **({"seconds": ns / 1e9} if ns else {})})
    named = {key: facts[key] for key in ("engine", "rank", "world_size")}
    peers = {peer: ns / 1e9 for peer, ns in enumerate(waited) if peer != facts["rank"]}
    return {"group": f"{facts['group']:x}", **named, "ops": ops, **({"waited": peers} if waited else {})}


def _sums(ops: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("calls", "failed", "bytes", *(["seconds"] if any("seconds" in op for op in ops) else []))
    return {name: sum(op.get(name, 0) for op in ops) for name in names}


# ---- the text format of Prometheus ---------------------------------------------------------------------------------


def text() -> str:
    """Returns the metrics of this process in Prometheus' text format."""
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for each in metrics()["communicators"]:
        for name, labels, value in _samples(each):
            said = ",".join(f'{key}="{label}"' for key, label in labels.items())
            samples[name].append(f"{name}{{{said}}} {value}")
    lines = []
    for name, some in samples.items():
        if some:
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} counter", *some]
    return "".join(f"{line}\n" for line in lines)


def _samples(communicator: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], float]]:
    whose = {key: communicator[key] for key in ("group", "engine", "rank", "world_size")}
    columns = {"calls": "calls", "failed": "failed_calls", "bytes": "bytes", "seconds": "call_seconds"}
    for op in communicator["ops"]:
        labels = {**whose, "op": op["op"], "algorithm": op["algorithm"]}
        for key, name in columns.items():
            if key in op:
                yield f"ringcomm_{name}_total", labels, op[key]
        for chosen, calls in op["chosen"].items():
            yield "ringcomm_chosen_calls_total", {**labels, "chosen": chosen}, calls
    for peer, seconds in communicator.get("waited", {}).items():
        yield "ringcomm_wait_seconds_total", {**whose, "peer": peer}, seconds


# ---- a file or a port, for the whole process -----------------------------------------------------------------------


def serve_process(wish: str) -> None:
    """Starts the thread that writes or serves the metrics of this process once it has a communicator, and the same in
    each process that is forked from it.

    Args:
        wish: "file:PATH" or "port:N".
    """
    kind, _, where = wish.partition(":")
    is_port = kind == "port" and where.isdecimal() and 1 <= int(where) <= 65535
    if not is_port and not (kind == "file" and where):
        raise InvalidArgumentError(
            f"metrics: got {VARIABLE}={shown(wish)}, expected file:PATH or port:N with N from 1 to 65535; set one"
        )

    def start() -> None:
        work: Callable[[], object]
        if is_port:
            work = partial(_serve, int(where))
        else:
            file = _File(where)
            AT_CLOSE.append(file.write_last)
            atexit.register(file.write_last)
            work = file.keep_written
        threading.Thread(target=_guarded, args=(work,), name="ringcomm-metrics", daemon=True).start()

    os.register_at_fork(after_in_child=start)
    start()


def _guarded(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:  # the job must not end because its metrics fail
        write_stderr(f"ringcomm metrics: {type(error).__name__}: {error}; this process reports none\n")


def _rank() -> int | None:
    """Returns this process's lowest rank in its largest communicator; None: it has no communicator."""
    ranks = [(-facts["world_size"], facts["rank"]) for facts, _, _ in record.totals(os.getpid()) if facts["group"]]
    return int(min(ranks)[1]) if ranks else None


class _File:
    """The file with the metrics of this process. A thread writes it regularly; it is also written at the end of each
    communicator and at the exit."""

    def __init__(self, where: str) -> None:
        self._pid, self._where = os.getpid(), where
        self._path: Path | None = None  # None until this process has a communicator, whose rank may be in the name
        self._lock = threading.RLock()  # reentrant: during a write the garbage collector may end a communicator
        self._begun = self._written = 0  # numbers of the last write that began, and of the last that replaced the file
        self._told: tuple[type, int | None] | None = None

    def write(self) -> bool:
        """Writes the file; readers see the old one or the new one. An error is reported once, and ends neither the job
        nor the next attempt.

        Returns: whether to wait before the next attempt; False while there is nothing to write yet.
        """
        with self._lock:
            if self._path is None:
                rank = _rank()
                if rank is None:
                    return False
                self._path = Path(self._where.replace("{rank}", str(rank)).replace("{pid}", str(self._pid)))
            self._begun += 1
            number = self._begun
            beside = self._path.with_name(f".{self._path.name}.{self._pid}.{number}")
            try:
                found = text()
                if found:  # else every communicator has ended: the file keeps their last values
                    beside.write_text(found, encoding="utf-8")
                    if number > self._written:  # else a nested write, which began later, has newer values
                        beside.replace(self._path)
                        self._written = number
                return bool(found)
            except Exception as error:
                why = type(error), getattr(error, "errno", None)
                if why != self._told:
                    write_stderr(f"ringcomm metrics: {type(error).__name__}: {error}; the next attempt follows\n")
                self._told = why
                return True
            finally:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)

    def write_last(self) -> None:
        """Writes the file, unless this process is a fork, which has a file of its own."""
        if os.getpid() == self._pid:
            self.write()

    def keep_written(self) -> None:
        """Writes the file regularly, for ever; the body of a thread."""
        pause, seconds = threading.Event(), _SOON_S
        while True:
            seconds = min(2 * seconds, INTERVAL_S) if self.write() else _SOON_S
            pause.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = text().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because the output belongs to the program."""


def _serve(port: int) -> None:
    """Serves the metrics on the loopback interface, from the first communicator on: LOCAL_RANK, or this process's first
    rank, is added to the port."""
    pause = threading.Event()
    while (rank := _rank()) is None:
        pause.wait(_SOON_S)
    own = int(os.environ.get("LOCAL_RANK") or rank)
    with ThreadingHTTPServer(("127.0.0.1", port + own), _Handler) as server:
        server.serve_forever()
