"""The flight recorder: the calls of a communicator's ranks, readable while the ranks run, hang or are stopped.

Every engine keeps its last calls (``RINGCOMM_RECORD=256``; 0: none) in a memory file of its process, which processes of
the same user can read. The recorded process does not take part in the reading.

    ringcomm.record.merge(ringcomm.record.records(pid))   # what `ringcomm doctor --pid` shows
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ringcomm import _C
from ringcomm.errors import InvalidArgumentError, one_line, rank_list
from ringcomm.validation import PATH, a, expects, or_none, several, validate_int

__all__ = ["Call", "Record", "View", "dump", "find", "load", "merge", "records", "step"]

FOLDER = "RINGCOMM_RECORD_DIR"
"""Environment variable: the folder where a process writes its records when an error ends one of its communicators."""
_LINK = f"/memfd:{_C.RECORD_NAME} "
_MOST_BYTES = 1 << 28  # of one memory file: more than the longest record needs
_PART = 2  # state of the record of an engine that is a part of another
_MOST_RANKS = 1 << 20
_FORMAT = 2  # version of the files
_TYPES = {"int": int, "str": str, "bool": bool, "tuple[Call, ...]": tuple}
_BEYOND = 1 << 63  # records hold smaller integers
_SEARCH_S = 1.0  # time to search this machine's processes for the note on an error
_NOTE_CALLS, _NOTE_LINES = 3, 12
_KEPT_NOTES = 64
_T = TypeVar("_T")
_MOST_NAMED = 8  # most ranks named with their processes in one sentence


@dataclass(frozen=True)
class Call:
    """One recorded call of one rank."""

    number: int  # among the rank's calls, from 1
    collective: int  # among its collectives, from 0; -1: a send, a receive or a probe
    op: str
    dtype: str
    reduce_op: str
    algorithm: str  # the requested one; `ringcomm.metrics()` counts the chosen ones
    count: int  # elements, equal on all ranks; negative: parts of different sizes
    root: int  # or the peer of a send, a receive or a probe; negative: any
    tag: int
    state: str  # in flight, done, failed, refused; enqueued: on a device, and its end was not checked
    is_async: bool
    step: int  # the training step, set by `step`; negative: none
    begin_ns: int  # since 1970
    end_ns: int  # 0: not yet
    site: str  # line in the user's code

    @property
    def open(self) -> bool:
        """Whether the call is in flight or has failed."""
        return self.state in ("in flight", "failed")

    @property
    def title(self) -> str:
        """The call's name, such as "all_reduce #118"."""
        if self.op in ("send", "recv", "probe"):
            peer = "any rank" if self.root < 0 else f"rank {self.root}"
            return f"{self.op} {'to' if self.op == 'send' else 'from'} {peer}"
        return f"{self.op} #{self.collective}"

    @property
    def passed(self) -> str:
        """The call's arguments, such as "1024 x float32, sum"; the ranks of one collective must agree on them."""
        if self.op == "barrier":
            return "before a gather" if self.root else ""
        if self.op == "probe":
            return f"tag {self.tag}"
        words = [f"uneven parts of {self.dtype}" if self.count < 0 else f"{self.count} x {self.dtype}"]
        if self.op in ("all_reduce", "reduce_scatter", "reduce"):
            words.append(self.reduce_op)
        if self.op in ("broadcast", "reduce", "gather", "scatter"):
            words.append(f"root {self.root}")
        if self.op == "all_gather" and self.root:
            words.append(f"mark {self.root}")
        if self.op in ("send", "recv"):
            words.append(f"tag {self.tag}")
        elif self.algorithm != "auto":
            words.append(self.algorithm)
        return ", ".join(words)

    @property
    def place(self) -> str:
        """The place of the call, such as "train.py:88, step 12"; empty if unknown."""
        return ", ".join(filter(None, (self.site, f"step {self.step}" if self.step >= 0 else "")))


@dataclass(frozen=True)
class Record:
    """The recorded calls of one rank of one communicator."""

    host: str
    pid: int
    rank: int
    world_size: int
    group: int  # the same on all ranks of a communicator; 0: not connected yet
    engine: str
    closed: bool
    begun: int  # number of calls so far; `calls` holds the last of them
    process: str  # "running" or "stopped", when it was read
    taken_ns: int  # when it was read, since 1970
    calls: tuple[Call, ...]

    @cached_property
    def current(self) -> Call | None:
        """The call that the rank is in: its first collective that has not ended, which blocks all later ones; else its
        first message that has not ended."""
        unfinished = [call for call in self._accepted if call.open]
        return next((call for call in unfinished if call.collective >= 0), unfinished[0] if unfinished else None)

    @property
    def last(self) -> Call | None:
        """The newest call."""
        return self._accepted[-1] if self._accepted else None

    @cached_property
    def front(self) -> tuple[int, bool] | None:
        """The rank's progress, for comparisons: (its current or next collective, whether that has begun); None if that
        collective is older than the record."""
        if self.current is not None and self.current.collective >= 0:
            return self.current.collective, True
        collectives = [call.collective for call in self._accepted if call.collective >= 0]
        if collectives:
            return collectives[-1] + 1, False
        return None if self._accepted else (0, False)

    @cached_property
    def _accepted(self) -> list[Call]:
        return [call for call in self.calls if call.state != "refused"]


_STEP = or_none(validate_int(said="a whole number from 0 on"))


@expects("step", number=_STEP)
def step(number: int | None) -> None:
    """Sets this process's current training step, for errors and records; None: none."""
    _C.set_step(-1 if number is None else number)


# ---- processes -----------------------------------------------------------------------------------------------------


@expects("record", pid=validate_int(1, (1 << 31) - 1))
def records(pid: int | None = None) -> list[Record]:
    """Returns the records of a process: one for each of its ranks in each communicator.

    Args:
        pid: the process; None: this one.
    Raises:  InvalidArgumentError: the process does not exist, belongs to another user, or runs another version.
    """
    return _records(os.getpid() if pid is None else pid, None)


def _records(pid: int, wanted: set[int] | None) -> list[Record]:
    """Returns the records of the groups in ``wanted``; None: of all."""
    if wanted is not None and not _may_have_some(pid, wanted):
        return []
    taken, process, own = _taken(pid, wanted)
    found = [_read(each, process) for each in taken]
    # Without records that the process inherited from its parent by a fork.
    return [each for each in found if each is not None and each.pid == own]


def totals(pid: int) -> list[tuple[dict[str, Any], list[dict[str, Any]], list[int]]]:
    """Returns, for each rank of a process in each communicator, (facts, the totals of its calls by op and algorithm
    asked for, each with its numbers of calls by chosen algorithm, the ns that it waited for each peer); raises as
    `records`."""
    found = []
    taken, _, own = _taken(pid, None)
    for each in taken:
        facts, _, sums, waited = _C.read_record(each, with_calls=False)
        if facts["state"] != _PART and facts["pid"] == own:
            found.append((facts, sums, waited))
    return found


def _may_have_some(pid: int, wanted: set[int]) -> bool:
    """Whether a process has a record of a group in ``wanted``; most have none, and are not read further."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return next(_memory_files(pid, wanted), None) is not None
    return True  # then `_taken` raises, and says why the process cannot be read


def _taken(pid: int, wanted: set[int] | None) -> tuple[list[bytes], str, int]:
    """Returns (the contents of a process's memory files of the groups in ``wanted``, None: of all; "running" or
    "stopped"; its own number in its namespace)."""
    try:
        status = _status(pid)
        if status["State"][0] in "ZX":
            raise InvalidArgumentError(f"record: process {pid} has ended; its records ended with it: read its files")
        # The first bytes are written last, when the head of the file is whole.
        taken = [each for each in _memory_files(pid, wanted) if any(each[:8])]
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgumentError(f"record: got process ID {pid}, which no process has; look it up with ps") from None
    except PermissionError:
        raise InvalidArgumentError(
            f"record: process {pid} belongs to another user, or is protected: expected one of this user; run doctor as "
            "that user"
        ) from None
    stopped = status["State"][0] in "Tt"
    return taken, "stopped" if stopped else "running", int(status.get("NSpid", str(pid)).split()[-1])


def read_descendants(pid: int, read: Callable[[int], list[_T]]) -> list[_T]:
    """Returns what ``read`` finds in the processes that a process without a record, such as torchrun, has started.

    Raises:  InvalidArgumentError: nothing was found, and one of them cannot be read.
    """
    found: list[_T] = []
    refusal = ""
    for each in descendants(pid):
        try:
            if is_of_this_user(each):
                found += read(each)
            else:
                refusal = f"process {each} belongs to another user"
        except (InvalidArgumentError, OSError) as error:
            if not has_ended(each):
                refusal = f"process {each}: {str(error).removeprefix('record: ').partition(';')[0]}"
    if refusal and not found:
        raise InvalidArgumentError(
            f"process {pid} has no communicator with a record, expected a rank of a job or its launcher, got one that "
            f"started processes which cannot be read ({refusal}); ask as their user, with their version of ringcomm"
        )
    return found


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, those that they have started, and so on; of any user. /proc is
    no snapshot: numbers that are reused while it is read can form a circle."""
    children: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with suppress(OSError, KeyError):  # it may end at any moment
            children.setdefault(int(_status(each)["PPid"]), []).append(each)
    found: list[int] = []
    seen, started = {pid}, [pid]
    while started:
        started = sorted({child for each in started for child in children.get(each, [])} - seen)
        seen.update(started)
        found += started
    return found


def is_of_this_user(pid: int) -> bool:
    """Whether a process belongs to this user; root can read the memory of others, but cannot trust it.

    Raises:  OSError: there is no such process.
    """
    return os.stat(f"/proc/{pid}").st_uid == os.geteuid()


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked for its exit code yet."""
    try:
        return _status(pid)["State"][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def find(*groups: int) -> list[Record]:
    """Returns the records of the communicators ``groups``, from all processes of this user on this machine."""
    return _search(groups, None)


def _search(groups: Iterable[int], seconds: float | None) -> list[Record]:
    """Looks at the nearest process numbers first: the ranks of a job are started together."""
    wanted = {*groups} - {0}
    deadline = None if seconds is None else time.monotonic() + seconds
    found: list[Record] = []
    processes = sorted(map(int, filter(str.isdecimal, os.listdir("/proc"))), key=lambda pid: abs(pid - os.getpid()))
    for pid in processes:
        if deadline is not None and time.monotonic() > deadline:
            break
        with suppress(InvalidArgumentError, OSError):
            if is_of_this_user(pid):
                found += _records(pid, wanted)
    return found


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _memory_files(pid: int, wanted: set[int] | None) -> Iterator[bytes]:
    folder = f"/proc/{pid}/fd"
    # A thread that reads its own process's files has them open twice, and file numbers may be reused.
    seen: set[int] = set()
    for name in os.listdir(folder):
        memory = None
        with suppress(FileNotFoundError):  # the file may be closed at any moment
            if os.readlink(f"{folder}/{name}").startswith(_LINK):
                memory = _memory(f"{folder}/{name}", seen, wanted)
        if memory is not None:
            yield memory


def _memory(path: str, seen: set[int], wanted: set[int] | None) -> bytes | None:
    """Returns the contents of a memory file; None if it is in ``seen``, its file number was reused, or its head names a
    group that is not in ``wanted``. A process may have hundreds of communicators: only the head of each is read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            return None
        raise
    try:
        inode = os.fstat(fd).st_ino
        if inode in seen or not os.readlink(f"/proc/self/fd/{fd}").startswith(_LINK):
            return None
        seen.add(inode)
        with open(fd, "rb", closefd=False) as file:
            head = file.read(_C.RECORD_HEAD_BYTES)
            if wanted is not None and _C.record_group(head) not in wanted:
                return None
            return head + file.read(_MOST_BYTES)
    finally:
        os.close(fd)


def _read(memory: bytes, process: str) -> Record | None:
    """Returns a decoded record; None for an engine that is a part of another one."""
    facts, calls, _, _ = _C.read_record(memory)
    state = facts.pop("state")
    if state == _PART:
        return None
    facts["begun"], facts["closed"] = facts.pop("calls"), bool(state)
    for call in calls:
        call["is_async"] = bool(call.pop("async"))
    try:
        return _record({**facts, "process": process, "taken_ns": time.time_ns(), "calls": calls})
    except ValueError as error:
        raise InvalidArgumentError(f"record: expected the record of a communicator, got other bytes: {error}") from None


# ---- files ---------------------------------------------------------------------------------------------------------


@expects("record", folder=PATH)
def dump(folder: str | os.PathLike[str]) -> list[Path]:
    """Writes the records of this process, one file each; `load` combines them with those of other processes.

    Returns: their paths, which contain host, process, communicator and rank; older files of the same names are
             replaced.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    for each in records():
        host = re.sub(r"[^\w.-]", "_", each.host)
        path = place / f"ringcomm-{host}-{each.pid}-{each.group:x}-rank{each.rank}.json"
        beside = path.with_suffix(f".{threading.get_ident()}")
        beside.write_text(json.dumps({"ringcomm_record": _FORMAT, **_plain(each)}), encoding="utf-8")
        beside.replace(path)  # atomic, so that a reader gets the old or the new file
        paths.append(path)
    return paths


@expects("record", paths=several("a list of paths", PATH))
def load(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Reads files written by `dump`, from any number of hosts.

    Raises:  InvalidArgumentError: a file cannot be read, or was not written by `dump`.
    """
    return [_load(Path(path)) for path in paths]


def _load(path: Path) -> Record:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.pop("ringcomm_record", None) != _FORMAT:
            raise ValueError("it is not one")
        group = document.get("group")
        if not isinstance(group, str):
            raise ValueError(f"group is {group!r:.40}")
        return _record({**document, "group": int(group, 16)})
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"record: expected a file of ringcomm.record.dump of this version, got {str(path)!r}: "
            f"{one_line(error)}; pass the files that {FOLDER} collects"
        ) from None


def _plain(each: Record) -> dict[str, Any]:
    """Returns a record as values for JSON, whose readers may round integers above 2^53."""
    return {**asdict(each), "group": f"{each.group:x}"}


def _record(document: dict[str, Any]) -> Record:
    """Decodes a record; raises ValueError for a document that is not one."""
    calls = document.get("calls")
    if not isinstance(calls, list):
        raise ValueError("it has no list of calls")
    made: Record = _checked(Record, {**document, "calls": tuple(_checked(Call, call) for call in calls)})
    if not 0 <= made.rank < made.world_size <= _MOST_RANKS:
        raise ValueError(f"it is of rank {made.rank} of {made.world_size}")
    return made


_FIELDS: dict[Any, dict[str, type]] = {
    kind: {field.name: _TYPES[str(field.type)] for field in fields(kind)} for kind in (Call, Record)
}


def _checked(kind: type[Any], values: Any) -> Any:
    """Returns a value of ``kind`` from fields, after checking their types; replaces unprintable characters of texts."""
    types = _FIELDS[kind]
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise ValueError(f"it has a {kind.__name__} with other fields")
    for name, value in values.items():
        if type(value) is not types[name] or (isinstance(value, int) and not -_BEYOND <= value < _BEYOND):
            raise ValueError(f"{name} is {value!r:.40}")
    return kind(**{name: _shown(value) if isinstance(value, str) else value for name, value in values.items()})


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


# ---- all ranks together --------------------------------------------------------------------------------------------


def seconds(ns: int) -> str:
    """Formats a duration for people."""
    if ns < 1_000_000:
        return f"{ns / 1e3:.0f} us"
    return f"{ns / 1e6:.1f} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.1f} s"


Line = tuple[tuple[int, ...], Call, int]
"""A row of the table: ranks with equal calls of one number, the call, and the ranks' longest duration so far in ns."""


class View:
    """The records of one communicator."""

    def __init__(self, found: tuple[Record, ...]) -> None:
        self.records = found
        self.group, self.world_size, self.engine = found[0].group, found[0].world_size, found[0].engine
        self._of_rank = {each.rank: each for each in found}

    @property
    def title(self) -> str:
        """The communicator's name and size."""
        if self.group == 0:
            return f"a communicator of {self.world_size} ranks ({self.engine}) that is not connected yet"
        return f"communicator {self.group:x} of {self.world_size} ranks ({self.engine})"

    # ---- sentences -----------------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """Returns sentences about anomalies, beginning with the ranks that are behind."""
        return [*self._where(), *self._missing(), *self._odd_processes(), *self.differences()]

    def _where(self) -> list[str]:
        fronts = {each.front for each in self.records if each.front is not None}
        lowest = min(fronts) if len(fronts) > 1 else None

        def described(ranks: tuple[int, ...]) -> str:
            first = self._of_rank[ranks[0]]
            lags = lowest is not None and first.front == lowest
            who = self._named(ranks) if lags or len(self.records) == 1 else rank_list(ranks)
            return f"{who} {self._doing(first, len(ranks) > 1, lowest is not None and not lags)}"

        def key(rank: int) -> Hashable:
            record = self._of_rank[rank]
            call = record.current or record.last
            return (record.front, call and (call.title, call.place, call.state))

        together = _grouped(self._of_rank, key)
        together.sort(key=lambda ranks: self._of_rank[ranks[0]].front or (-1, False))
        return ["; ".join(described(ranks) for ranks in together)] if together else []

    def _doing(self, record: Record, many: bool, waits: bool) -> str:
        have = "have" if many else "has"
        call = record.current
        if call is not None:
            duration = seconds(max(0, (call.end_ns or record.taken_ns) - call.begin_ns))
            if call.state == "failed":
                return f"gave up {call.title}{_in_brackets(call.place)} after {duration}"
            return f"{have} {'waited' if waits else 'been'} in {call.title}{_in_brackets(call.place)} for {duration}"
        last = record.last
        if last is None:
            return f"{have} called nothing yet"
        if last.state == "enqueued":
            return f"{have} enqueued all up to {last.title}{_in_brackets(last.place)}"
        duration = seconds(max(0, record.taken_ns - last.end_ns))
        return f"{have} been outside of any call for {duration}, after {last.title}{_in_brackets(last.place)}"

    def _missing(self) -> list[str]:
        missing = [rank for rank in range(self.world_size) if rank not in self._of_rank]
        if not missing or self.group == 0:
            return []
        many = len(missing) > 1
        return [
            f"{rank_list(missing)} {'have' if many else 'has'} no record here: "
            f"{'their processes have' if many else 'its process has'} ended, closed the communicator, or "
            f"{'run' if many else 'runs'} on another host"
        ]

    def _odd_processes(self) -> list[str]:
        stopped = tuple(each.rank for each in self.records if each.process == "stopped")
        closed = tuple(each.rank for each in self.records if each.closed)
        found = [f"{self._named(stopped)}: stopped by a signal, SIGCONT lets it go on"] if stopped else []
        return [*found, f"{self._named(closed)}: closed the communicator"] if closed else found

    def differences(self) -> list[str]:
        """Returns collectives that the ranks called with different arguments, in the words of an error."""
        found = []
        for number, ranks in sorted(self._collectives().items()):
            ops = {call.op for call in ranks.values()}
            same_op = len(ops) == 1 and ops != {"barrier"}  # a barrier may be one before a gather
            if len({(call.op, call.passed) for call in ranks.values()}) == 1:
                continue
            parts = []
            alike_at: dict[Hashable, list[int]] = {}
            for rank, call in ranks.items():
                alike_at.setdefault((call.op, call.passed, call.place), []).append(rank)
            for alike in alike_at.values():
                call = ranks[alike[0]]
                verb = "gathered" if call.op == "all_gather" else "passed"  # the count is that of the output
                what = f"{verb} {call.passed}" if same_op else f"called {call.op}({call.passed})"
                parts.append(f"{rank_list(alike)} {what}{_in_brackets(call.place)}")
            name = f"{ranks[min(ranks)].op} #{number}" if same_op else f"call #{number}"
            found.append(f"{name} differs: {', '.join(parts)}")
        return found

    def _collectives(self) -> dict[int, dict[int, Call]]:
        found: dict[int, dict[int, Call]] = {}
        for record in self.records:
            for call in record.calls:
                if call.collective >= 0 and call.state != "refused":
                    found.setdefault(call.collective, {})[record.rank] = call
        return found

    def _named(self, ranks: tuple[int, ...]) -> str:
        """Names ranks with their processes, as far as they fit into a sentence."""
        several_hosts = len({each.host for each in self.records}) > 1
        found = []
        for rank in ranks[:_MOST_NAMED]:
            record = self._of_rank[rank]
            where = f" on {record.host}" if several_hosts else ""
            found.append(f"rank {rank} (process {record.pid}{where})")
        more = len(ranks) - len(found)
        return ", ".join(found) + (f" and {more} more" if more else "")

    # ---- calls ---------------------------------------------------------------------------------------------------

    def lines(self, most: int) -> list[Line]:
        """Returns the last ``most`` calls of each rank, from old to new; equal calls of several ranks are one line."""
        ages: dict[tuple[int, int], int] = {}
        calls: dict[tuple[int, int], Call] = {}
        kept = {call.collective for each in self.records for call in _last(each.calls, most) if call.collective >= 0}
        for record in self.records:
            last = {call.number for call in _last(record.calls, most)}
            for call in record.calls:
                if call.number not in last and call.collective not in kept:
                    continue
                calls[record.rank, call.number] = call
                ages[record.rank, call.number] = max(0, (call.end_ns or record.taken_ns) - call.begin_ns)

        def key(one: tuple[int, int]) -> Hashable:
            call = calls[one]
            return (call.collective, call.title, call.passed, call.place, call.state, call.collective < 0 and one)

        rows = []
        for alike in _grouped(calls, key):
            ranks = tuple(rank for rank, _ in alike)
            rows.append((min(calls[one].begin_ns for one in alike), ranks, alike[0], max(ages[one] for one in alike)))
        return [(ranks, calls[one], ns) for _, ranks, one, ns in sorted(rows)]

    def note(self, calls: int, most_lines: int) -> list[str]:
        """Returns a summary in a few lines of text, for an error."""
        said = [f"{self.title}, as its ranks recorded it:", *(f"  {each}" for each in self.summary())][:most_lines]
        rows = [
            f"  {rank_list(ranks)}: {call.title} {call.state}, {seconds(ns)}{_in_brackets(call.place)}"
            for ranks, call, ns in self.lines(calls)
        ]
        return [*said, *_last(rows, most_lines - len(said))]

    def plain(self, calls: int) -> dict[str, Any]:
        """Returns the view as values that JSON can represent."""
        ranks = [
            {**_plain(each), "calls": [asdict(call) for call in _last(each.calls, calls)]} for each in self.records
        ]
        facts = {"group": f"{self.group:x}", "engine": self.engine, "world_size": self.world_size}
        return {**facts, "summary": self.summary(), "differences": self.differences(), "ranks": ranks}


def _last(items: Sequence[_T], most: int) -> Sequence[_T]:
    return items[max(0, len(items) - most) :]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _grouped(keys: Iterable[_T], key: Callable[[_T], Hashable]) -> list[tuple[_T, ...]]:
    """Groups elements by key, in the order of each key's first element."""
    groups: dict[Hashable, list[_T]] = {}
    for each in keys:
        groups.setdefault(key(each), []).append(each)
    return [tuple(group) for group in groups.values()]


@expects("record", found=several("records", a("", Record)))
def merge(found: Sequence[Record]) -> list[View]:
    """Returns one view per communicator: where each rank is, and which ranks wait for which.

    Args:
        found: records of any ranks, from `records`, `find` or `load`; of two records of one rank the newer is used.
    Returns: `View` of each communicator.
    """
    groups: dict[tuple[int, ...], dict[int, Record]] = {}
    for each in sorted(found, key=lambda each: each.taken_ns):
        # Before the connection it is unknown which ranks belong together.
        apart = () if each.group else (each.pid, each.rank)
        groups.setdefault((each.group, *apart), {})[each.rank] = each
    return [View(tuple(ranks[rank] for rank in sorted(ranks))) for ranks in groups.values()]


# ---- errors --------------------------------------------------------------------------------------------------------

_notes: dict[int, str] = {}  # by communicator; the first note is kept, because it says most
_noting = threading.Lock()


def annotate(error: BaseException, group: int) -> None:
    """Adds what the ranks did to an error that ends a communicator, and writes this process's records if the
    environment names a folder for them. The native modules call it when they raise. It never raises."""
    with suppress(Exception):
        if not _noting.acquire(timeout=_SEARCH_S):
            return
        try:
            if group not in _notes:
                while len(_notes) >= _KEPT_NOTES:
                    del _notes[next(iter(_notes))]
                _notes[group] = _note(group)
            note = _notes[group]
        finally:
            _noting.release()
        if note and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)


def _note(group: int) -> str:
    written = []  # first, because a launcher may end this process soon after another one
    folder = os.environ.get(FOLDER)
    if folder:
        try:
            written = [f"written to {path.absolute()}" for path in dump(folder) if f"-{group:x}-" in path.name][:1]
        except (OSError, InvalidArgumentError) as why:
            written = [f"the records of this process could not be written to {folder}: {why}"]
    lines = [line for view in merge(_search([group], _SEARCH_S)) for line in view.note(_NOTE_CALLS, _NOTE_LINES - 1)]
    return "\n".join(lines + written)
