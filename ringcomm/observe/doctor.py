"""`ringcomm doctor`: shows this machine and installation; with `--pid` or files the ranks of a job side by side, even
while the job hangs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringcomm.errors import InvalidArgumentError, rank_list
from ringcomm.observe import info, record, torch_dump
from ringcomm.observe.record import View, seconds
from ringcomm.terminal import columns

_CALLS = 5


def main(argv: Sequence[str]) -> int:
    """
    Runs the command.

    Returns: its exit status. Raises: InvalidArgumentError: processes and files that have no record.
    """
    a = _arguments(argv)
    if not a.pid and not a.files:
        return info.main(as_json=a.json)
    views = record.merge(_records(a.pid, a.files))
    if a.torch is not None:
        paths, notes = torch_dump.write(views, Path(a.torch))
        for path in paths:
            print(path)
        for note in notes:
            print(f"ringcomm doctor: {note}", file=sys.stderr)
    elif a.json:
        print(json.dumps([view.plain(a.calls) for view in views], indent=1))
    else:
        _show(views, a.calls)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ringcomm doctor",
        description="Without processes and files: what was built, what is usable on this machine, and what is not and "
        "why, as text to paste into a bug report. With "
        "processes or files: which rank of their communicators is in which call, and what the ranks called last.",
    )
    parser.add_argument("--pid", type=int, action="append", default=[], help="a rank's process on this machine, or "
                        "its launcher, such as torchrun; may be repeated. The other ranks of its communicators are "
                        "found automatically")  # fmt: skip
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of ringcomm.record.dump, or in {record.FOLDER}")
    parser.add_argument("--calls", type=int, help=f"number of each rank's last calls to show ({_CALLS})")
    parser.add_argument("--torch", metavar="FOLDER", help="write the collectives there as the files of torch's flight "
                        "recorder, for torchfrtrace")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON")
    a = parser.parse_args(list(argv))
    if a.torch is not None:
        if not a.pid and not a.files:
            parser.error(
                f"--torch: expected a process or files, got neither; name --pid or the files of {record.FOLDER}"
            )
        if a.json or a.calls is not None:
            parser.error(
                "--torch: expected no --json and no --calls, which do not change torch's files; leave them out"
            )
    a.calls = _CALLS if a.calls is None else a.calls
    return a


def _records(pids: Sequence[int], files: Sequence[str]) -> list[record.Record]:
    found = record.load(files)
    for pid in pids:
        found += record.records(pid) or _of_descendants(pid)
    return [*found, *record.find(*(each.group for each in found))] if pids else found


def _of_descendants(pid: int) -> list[record.Record]:
    """Returns the records of the processes that a process without a record, such as torchrun, has started."""
    found = record.read_descendants(pid, record.records)
    if not found:
        raise InvalidArgumentError(
            f"process {pid} has no communicator with a record, nor has a process that it started, expected a rank of a "
            "job or its launcher; name one that uses ringcomm, with RINGCOMM_RECORD above 0"
        )
    pids = sorted({each.pid for each in found})
    print(
        f"ringcomm doctor: process {pid} has no communicator; reading the processes that it started: "
        f"{', '.join(map(str, pids))}",
        file=sys.stderr,
    )
    return found


def _show(views: Sequence[View], calls: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=min(160, columns()))
    called = [view for view in views if view.lines(1)]
    for view in called or views:
        console.print(Text(view.title, style="bold"))
        for sentence in view.summary():
            console.print(Text(f"  {sentence}"), soft_wrap=True)
        table = Table("call", "of", "ranks", "state", "time", "place", box=box.SIMPLE_HEAD)
        for ranks, call, ns in view.lines(calls):
            state = f"{call.state}, async" if call.is_async else call.state
            cells = (call.title, call.passed, rank_list(ranks), state, seconds(ns), call.place)
            table.add_row(*map(Text, cells), style="bold" if call.open else None)
        if table.row_count:
            console.print(table)
    if called and len(called) < len(views):
        console.print(Text(f"{len(views) - len(called)} more communicators have no calls yet"))
