"""The ranks of one communicator side by side: who is where in its calls, who waits for whom, whose calls differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ringcomm.record import Call, Record

_T = TypeVar("_T")
_MOST_NAMED = 8  # ranks with their processes in one sentence


def rank_list(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def seconds(ns: int) -> str:
    """A duration for people."""
    if ns < 1_000_000:
        return f"{ns / 1e3:.0f} us"
    return f"{ns / 1e6:.1f} ms" if ns < 1_000_000_000 else f"{ns / 1e9:.1f} s"


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    collective: int | None  # that it is in, or comes to next; None: too far back to know
    call: Call | None  # that it is in
    last: Call | None  # else: that it left before

    @property
    def front(self) -> tuple[int, bool] | None:
        """How far it has come; in a collective is further than before it."""
        if self.collective is None:
            return None
        return self.collective, self.call is not None and self.call.collective >= 0

    @staticmethod
    def of(record: Record) -> Position:
        """The first collective that has not ended holds up all after it."""
        calls = [call for call in record.calls if call.state != "refused"]
        collectives = [call for call in calls if call.collective >= 0]
        unfinished = [call for call in collectives if call.open]
        if unfinished:
            return Position(unfinished[0].collective, unfinished[0], None)
        messages = [call for call in calls if call.open]
        come = collectives[-1].collective + 1 if collectives else None if calls else 0
        return Position(come, messages[0] if messages else None, calls[-1] if calls else None)


@dataclass(frozen=True)
class Line:
    """Ranks whose call of one number is alike: a row of the table."""

    ranks: tuple[int, ...]
    call: Call
    ns: int  # the longest that one of them took, or has been in it


class View:
    """One communicator."""

    def __init__(self, found: tuple[Record, ...]) -> None:
        self.records = found
        self.group, self.world_size, self.engine = found[0].group, found[0].world_size, found[0].engine
        self.positions = {each.rank: Position.of(each) for each in found}

    @property
    def title(self) -> str:
        """Its name and size."""
        if self.group == 0:
            return f"a communicator of {self.world_size} ranks ({self.engine}) that is not connected yet"
        return f"communicator {self.group:x} of {self.world_size} ranks ({self.engine})"

    # ---- sentences -----------------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """What stands out, in sentences; the ranks that are behind come first."""
        return [*self._where(), *self._missing(), *self._odd_processes(), *self.differences()]

    def _where(self) -> list[str]:
        fronts = {at.front for at in self.positions.values() if at.front is not None}
        lowest = min(fronts) if len(fronts) > 1 else None

        def told(ranks: tuple[int, ...]) -> str:
            first = self._record(ranks[0])
            at = self.positions[ranks[0]]
            lags = lowest is not None and at.front == lowest
            who = self._named(ranks) if lags or len(self.positions) == 1 else rank_list(ranks)
            return f"{who} {self._doing(at, first, len(ranks) > 1, lowest is not None and not lags)}"

        def key(rank: int) -> Hashable:
            at = self.positions[rank]
            call = at.call or at.last
            return (at.front, call and (call.title, call.place, call.state))

        together = _grouped(self.positions, key)
        together.sort(key=lambda ranks: self.positions[ranks[0]].front or (-1, False))
        return ["; ".join(told(ranks) for ranks in together)] if together else []

    def _doing(self, at: Position, record: Record, many: bool, waits: bool) -> str:
        are = "are" if many else "is"
        call = at.call
        if call is not None:
            since = seconds(max(0, (call.end_ns or record.taken_ns) - call.begin_ns))
            if call.state == "failed":
                return f"gave up {call.title}{_in_brackets(call.place)} after {since}"
            verb = ("wait in" if many else "waits in") if waits else f"{are} in"
            return f"{verb} {call.title}{_in_brackets(call.place)} since {since}"
        last = at.last
        if last is None:
            return f"{'have' if many else 'has'} called nothing yet"
        if last.state == "enqueued":
            return f"{'have' if many else 'has'} enqueued all up to {last.title}{_in_brackets(last.place)}"
        since = seconds(max(0, record.taken_ns - last.end_ns))
        return f"{are} outside of any call, since {since} after {last.title}{_in_brackets(last.place)}"

    def _missing(self) -> list[str]:
        missing = [rank for rank in range(self.world_size) if rank not in self.positions]
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
        told = [f"{self._named(stopped)}: stopped by a signal, SIGCONT lets it go on"] if stopped else []
        return [*told, f"{self._named(closed)}: closed the communicator"] if closed else told

    def differences(self) -> list[str]:
        """Collectives of one number that the ranks called differently, as an error would tell them."""
        told = []
        for number, ranks in sorted(self._collectives().items()):
            same_op = len({call.op for call in ranks.values()}) == 1
            if len({(call.op, call.passed) for call in ranks.values()}) == 1:
                continue
            parts = []
            alike_at: dict[Hashable, list[int]] = {}
            for rank, call in ranks.items():
                alike_at.setdefault((call.op, call.passed, call.place), []).append(rank)
            for alike in alike_at.values():
                call = ranks[alike[0]]
                what = f"passed {call.passed}" if same_op else f"called {call.op}({call.passed})"
                parts.append(f"{rank_list(alike)} {what}{_in_brackets(call.place)}")
            name = f"{ranks[min(ranks)].op} #{number}" if same_op else f"call #{number}"
            told.append(f"{name} differs: {', '.join(parts)}")
        return told

    def _collectives(self) -> dict[int, dict[int, Call]]:
        found: dict[int, dict[int, Call]] = {}
        for record in self.records:
            for call in record.calls:
                if call.collective >= 0 and call.state != "refused":
                    found.setdefault(call.collective, {})[record.rank] = call
        return found

    def _record(self, rank: int) -> Record:
        return next(each for each in self.records if each.rank == rank)

    def _named(self, ranks: tuple[int, ...]) -> str:
        """Ranks with their processes, as far as they fit a sentence."""
        several_hosts = len({each.host for each in self.records}) > 1
        told = []
        for rank in ranks[:_MOST_NAMED]:
            record = self._record(rank)
            where = f" on {record.host}" if several_hosts else ""
            told.append(f"rank {rank} (process {record.pid}{where})")
        more = len(ranks) - len(told)
        return ", ".join(told) + (f" and {more} more" if more else "")

    # ---- calls ---------------------------------------------------------------------------------------------------

    def lines(self, most: int) -> list[Line]:
        """The last ``most`` calls of each rank, from old to new; what ranks have called alike in one line."""
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
        return [Line(ranks, calls[one], ns) for _, ranks, one, ns in sorted(rows)]

    def note(self, calls: int, most_lines: int) -> list[str]:
        """All of it in a few lines of text, for an error."""
        said = [f"{self.title}, as its ranks recorded it:", *(f"  {each}" for each in self.summary())][:most_lines]
        rows = [
            f"  {rank_list(line.ranks)}: {line.call.title} {line.call.state}, {seconds(line.ns)}"
            f"{_in_brackets(line.call.place)}"
            for line in self.lines(calls)
        ]
        return [*said, *_last(rows, most_lines - len(said))]

    def plain(self, calls: int) -> dict[str, Any]:
        """What JSON can carry."""
        ranks = [
            {**asdict(each), "calls": [asdict(call) for call in _last(each.calls, calls)]} for each in self.records
        ]
        facts = {"group": self.group, "engine": self.engine, "world_size": self.world_size}
        return {**facts, "summary": self.summary(), "differences": self.differences(), "ranks": ranks}


def _last(items: Sequence[_T], most: int) -> Sequence[_T]:
    return items[max(0, len(items) - most) :]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _grouped(keys: Iterable[_T], key: Callable[[_T], Hashable]) -> list[tuple[_T, ...]]:
    """What has the same key together, in the order of the first of each."""
    groups: dict[Hashable, list[_T]] = {}
    for each in keys:
        groups.setdefault(key(each), []).append(each)
    return [tuple(group) for group in groups.values()]
