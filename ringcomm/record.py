"""The flight recorder: what the ranks of a communicator have called, read while they run, hang or have been stopped.

Every engine keeps its last calls (``RINGCOMM_RECORD=256``; 0: none) in a memory file of its process, which processes of
the same user can read. Reading asks nothing of the process that is read.

    ringcomm.record.merge(ringcomm.record.records(pid))   # what `ringcomm doctor --pid` shows
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.arguments import PATH, a, expects, or_none, several, whole
from ringcomm.errors import InvalidArgumentError, one_line

FOLDER = "RINGCOMM_RECORD_DIR"
"""Environment variable: where a process writes its records when one of its communicators ends by an error."""
_LINK = f"/memfd:{_C.RECORD_NAME} "
_MOST_BYTES = 1 << 28  # of one memory file: more than the longest record has
_PART = 2  # state of a journal
_MOST_RANKS = 1 << 20
_FORMAT = 1  # of the files
_TYPES = {"int": int, "str": str, "bool": bool, "tuple[Call, ...]": tuple}
_BEYOND = 1 << 63  # whole numbers that a journal holds
_SEARCH_S = 2.0  # among the processes of this machine, for the note on an error
_NOTE_CALLS, _NOTE_LINES = 3, 12
_KEPT_NOTES = 64


@dataclass(frozen=True)
class Call:
    """One call of one rank, as its journal has it."""

    number: int  # among the rank's calls, from 1
    collective: int  # among its collectives, from 0; -1: a send or a receive
    op: str
    dtype: str
    reduce_op: str
    algorithm: str
    count: int  # elements that all ranks agree on; below 0: parts of different sizes
    root: int  # or the peer of a send or a receive; -1: any
    tag: int
    state: str  # in flight, done, failed, refused; enqueued: on a device, nobody has looked for its end
    is_async: bool
    step: int  # of the training, as `step` named it; below 0: none
    begin_ns: int  # since 1970
    end_ns: int  # 0: not yet
    site: str  # in the user's code

    @property
    def open(self) -> bool:
        """Whether it has not come to its proper end."""
        return self.state in ("in flight", "failed")

    @property
    def title(self) -> str:
        """Such as "all_reduce #118"."""
        if self.op in ("send", "recv"):
            peer = "any rank" if self.root < 0 else f"rank {self.root}"
            return f"{self.op} {'to' if self.op == 'send' else 'from'} {peer}"
        return f"{self.op} #{self.collective}"

    @property
    def passed(self) -> str:
        """What it was given, such as "1024 x float32, sum"; ranks of one collective must agree on it."""
        if self.op == "barrier":
            return ""
        words = [f"uneven parts of {self.dtype}" if self.count < 0 else f"{self.count} x {self.dtype}"]
        if self.op in ("all_reduce", "reduce_scatter", "reduce"):
            words.append(self.reduce_op)
        if self.op in ("broadcast", "reduce", "gather", "scatter"):
            words.append(f"root {self.root}")
        if self.op in ("send", "recv"):
            words.append(f"tag {self.tag}")
        elif self.algorithm != "auto":
            words.append(self.algorithm)
        return ", ".join(words)

    @property
    def place(self) -> str:
        """Where it was called, such as "train.py:88, step 12"; empty where nobody knows."""
        return ", ".join(filter(None, (self.site, f"step {self.step}" if self.step >= 0 else "")))


@dataclass(frozen=True)
class Record:
    """What one rank of one communicator has called."""

    host: str
    pid: int
    rank: int
    world_size: int
    group: int  # the same on all ranks of a communicator; 0: not connected yet
    engine: str
    closed: bool
    begun: int  # calls so far; `calls` are the last of them
    process: str  # running or stopped, when it was read
    taken_ns: int  # when it was read, since 1970
    calls: tuple[Call, ...]


_STEP = or_none(whole(said="a whole number from 0 on"))


@expects("step", number=_STEP)
def step(number: int | None) -> None:
    """Names the step of the training that this process is in, for errors and records; None: none."""
    _C.set_step(-1 if number is None else number)


# ---- processes -----------------------------------------------------------------------------------------------------


@expects("record", pid=whole(1, (1 << 31) - 1))
def records(pid: int | None = None) -> list[Record]:
    """The records of a process: one for each rank that it has in each communicator.

    Args:
        pid: of the process; None: this one.
    Raises:  InvalidArgumentError: there is no such process, it is another user's, or another version's.
    """
    return _records(os.getpid() if pid is None else pid, None)


def _records(pid: int, wanted: set[int] | None) -> list[Record]:
    """``wanted``: of these groups alone; None: of all."""
    try:
        if wanted is not None and next(_memory_files(pid), None) is None:
            return []  # most processes: without reading more of them
        status = _status(pid)
        if status["State"][0] in "ZX":
            raise InvalidArgumentError(f"record: process {pid} has ended; its records ended with it: read its files")
        taken = list(_memory_files(pid))
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgumentError(f"record: expected a process, got {pid}, which there is none of; see ps") from None
    except PermissionError:
        raise InvalidArgumentError(
            f"record: process {pid} belongs to another user, or is protected: expected one of this user; ask as it"
        ) from None
    stopped = status["State"][0] in "Tt"
    own = int(status.get("NSpid", str(pid)).split()[-1])  # as it knows itself
    found = [_read(each, "stopped" if stopped else "running", wanted) for each in taken]
    return [each for each in found if each is not None and each.pid == own]  # others came from its parent by a fork


def find(*groups: int) -> list[Record]:
    """The records of communicators in all processes of this user on this machine, by their ``group``."""
    return _search(groups, None)


def _search(groups: Iterable[int], seconds: float | None) -> list[Record]:
    wanted = {*groups} - {0}
    deadline = None if seconds is None else time.monotonic() + seconds
    found: list[Record] = []
    for name in os.listdir("/proc"):
        if deadline is not None and time.monotonic() > deadline:
            break
        if name.isdecimal():
            with suppress(InvalidArgumentError, OSError):
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue  # root may read it, but it may say anything
                found += _records(int(name), wanted)
    return found


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _memory_files(pid: int) -> Iterator[bytes]:
    folder = f"/proc/{pid}/fd"
    seen: set[int] = set()  # a thread that reads its own process's files has them open twice, or a number is another's
    for name in os.listdir(folder):
        memory = None
        with suppress(FileNotFoundError):  # it may be closed at any moment
            if os.readlink(f"{folder}/{name}").startswith(_LINK):
                memory = _memory(f"{folder}/{name}", seen)
        if memory is not None:
            yield memory


def _memory(path: str, seen: set[int]) -> bytes | None:
    """What a memory file holds; None if it is in ``seen``, or its number has become another file's meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket's
            return None
        raise
    try:
        inode = os.fstat(fd).st_ino
        if inode in seen or not os.readlink(f"/proc/self/fd/{fd}").startswith(_LINK):
            return None
        seen.add(inode)
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES)
    finally:
        os.close(fd)


def _read(memory: bytes, process: str, wanted: set[int] | None) -> Record | None:
    """None for an engine that is a part of another one, and for groups that are not wanted."""
    facts, calls = _C.read_record(memory)
    state = facts.pop("state")
    if state == _PART or (wanted is not None and facts["group"] not in wanted):
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
    """Writes the records of this process, one file for each, to be put together with those of others by `load`.

    Returns: their paths, which name host, process, communicator and rank; older files of the same are replaced.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    for each in records():
        host = re.sub(r"[^\w.-]", "_", each.host)
        path = place / f"ringcomm-{host}-{each.pid}-{each.group:x}-rank{each.rank}.json"
        beside = path.with_suffix(f".{threading.get_ident()}")
        beside.write_text(json.dumps({"ringcomm_record": _FORMAT, **asdict(each)}), encoding="utf-8")
        beside.replace(path)  # who reads meanwhile gets one or the other
        paths.append(path)
    return paths


@expects("record", paths=several("a list of paths", PATH))
def load(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Reads files of `dump`, from any number of hosts.

    Raises:  InvalidArgumentError: a file cannot be read, or is none of `dump`.
    """
    return [_load(Path(path)) for path in paths]


def _load(path: Path) -> Record:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.pop("ringcomm_record", None) != _FORMAT:
            raise ValueError("it is not one")
        return _record(document)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"record: expected a file of ringcomm.record.dump of this version, got {str(path)!r}: "
            f"{one_line(error)}; pass the files that {FOLDER} collects"
        ) from None


def _record(document: dict[str, Any]) -> Record:
    """Raises ValueError for what nobody has written as a record."""
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
    """A value of ``kind`` from fields that have its types, of which every text can be shown."""
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


@expects("record", found=several("records", a("", Record)))
def merge(found: Sequence[Record]) -> list[Any]:
    """One view for each communicator: who is where, and who waits for whom.

    Args:
        found: records of any ranks, from `records`, `find` or `load`; of two of one rank the newer counts.
    Returns: `ringcomm.record_view.View` of each communicator.
    """
    from ringcomm.record_view import View

    groups: dict[tuple[int, ...], dict[int, Record]] = {}
    for each in sorted(found, key=lambda each: each.taken_ns):
        apart = () if each.group else (each.pid, each.rank)  # nobody knows yet what belongs together
        groups.setdefault((each.group, *apart), {})[each.rank] = each
    return [View(tuple(ranks[rank] for rank in sorted(ranks))) for ranks in groups.values()]


# ---- errors --------------------------------------------------------------------------------------------------------

_notes: dict[int, str] = {}  # by communicator; what was seen first says most
_noting = threading.Lock()


def annotate(error: BaseException, group: int) -> None:
    """Adds to an error that ends a communicator what its ranks did, and writes this process's records where the
    environment names a folder for them. The native modules call it as they raise. It raises nothing itself."""
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
    written = []  # first: a launcher may end this process soon after another one
    folder = os.environ.get(FOLDER)
    if folder:
        try:
            written = [f"written to {path.absolute()}" for path in dump(folder) if f"-{group:x}-" in path.name][:1]
        except (OSError, InvalidArgumentError) as why:
            written = [f"the records of this process could not be written to {folder}: {why}"]
    lines = [line for view in merge(_search([group], _SEARCH_S)) for line in view.note(_NOTE_CALLS, _NOTE_LINES - 1)]
    return "\n".join(lines + written)


def carry_notes(source: BaseException, target: BaseException) -> None:
    """Gives an error that replaces another one its notes."""
    for note in getattr(source, "__notes__", ()):
        target.add_note(note)  # type: ignore[attr-defined]  # Python 3.11
