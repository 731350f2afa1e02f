"""Records as the files of torch's flight recorder, which `torchfrtrace` reads."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ringcomm.errors import InvalidArgumentError, rank_list
from ringcomm.observe.record import Call, Record, View, seconds

_VERSION = "2.10"  # of torch's format
_TOGETHER_NS = 5_000_000_000  # runs whose records were taken within this time may be parts of one job
_STATES = {"in flight": "started", "failed": "started", "enqueued": "started", "done": "completed"}


def write(views: Sequence[View], folder: Path) -> tuple[list[Path], list[str]]:
    """Writes one file for each rank of the largest communicator, with its collectives there and in all communicators
    among the same processes. Only one run is looked at, because a folder of records may hold those of earlier
    runs: runs are sets of communicators that share no process. It is the newest; of those whose records were taken in
    the 5 s before the newest one's, the one with the largest communicator, because a job may have helper processes.

    A smaller communicator is left out if a rank of it has no record, or if its ranks are threads of one process,
    because torch's format names global ranks. So are messages between two ranks: `torchfrtrace` expects every rank of
    the communicator in them. Collectives that one rank's record no longer holds are left out for all.

    Returns: (the paths, which end in the rank; sentences about what the files lack).
    Raises:  InvalidArgumentError: there is no communicator, the folder has files of other ranks, or a path cannot be
             written.
    """
    connected = [view for view in views if view.group]
    if not connected:
        raise InvalidArgumentError("the records hold no communicator, expected one that is connected")
    run = _newest_run(connected)
    world = _largest(run)
    dumps: dict[int, dict[str, Any]] = {each.rank: _empty() for each in world.records}
    left_out: dict[str, list[str]] = {}
    for view in connected:
        ranks = _global_ranks(view, world) if view in run else f"of another run, whose records {_age(view, run)}"
        if isinstance(ranks, str):
            left_out.setdefault(ranks, []).append(f"{view.group:x}")
        else:
            _add(dumps, view, ranks)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_other_ranks(folder, dumps.keys())
        for rank, dumped in dumps.items():
            dumped["entries"].sort(key=lambda entry: entry["time_created_ns"])
            for number, entry in enumerate(dumped["entries"]):
                entry["record_id"] = entry["op_id"] = number
            path = folder / f"rank_{rank}"
            path.write_bytes(pickle.dumps(dumped, protocol=2))
            paths.append(path)
    except OSError as error:
        raise InvalidArgumentError(f"{folder} cannot be written: {error}; name a folder that can") from None
    notes = []
    if left_out:
        notes.append(
            "communicators left out: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in left_out.items())
        )
    missing = [rank for rank in range(world.world_size) if rank not in dumps]
    if missing:
        notes.append(f"no record of {rank_list(missing)}: torchfrtrace needs --allow-incomplete-ranks")
    return paths, notes


def _newest_run(views: Sequence[View]) -> list[View]:
    """Returns the communicators of the largest of the runs whose records were taken last."""
    runs: list[tuple[set[tuple[str, int]], list[View]]] = []
    for view in views:
        processes, together, apart = set(map(_process, view.records)), [view], []
        for run in runs:
            if processes.isdisjoint(run[0]):
                apart.append(run)
            else:
                processes |= run[0]
                together += run[1]
        runs = [*apart, (processes, together)]
    newest = max(map(_taken_ns, views))
    recent = [found for _, found in runs if newest - max(map(_taken_ns, found)) <= _TOGETHER_NS]
    return max(recent, key=lambda found: (_largest(found).world_size, max(map(_taken_ns, found))))


def _taken_ns(view: View) -> int:
    return max(each.taken_ns for each in view.records)


def _age(view: View, run: Sequence[View]) -> str:
    ns = max(map(_taken_ns, run)) - _taken_ns(view)
    return f"are {seconds(abs(ns))} {'older' if ns >= 0 else 'newer'}"


def _largest(views: Sequence[View]) -> View:
    return max(views, key=lambda view: (view.world_size, max(each.begun for each in view.records)))


def _refuse_other_ranks(folder: Path, ranks: Collection[int]) -> None:
    """Raises InvalidArgumentError if a folder has files that this dump would not replace."""
    found = (re.fullmatch(r"rank_(\d+)", path.name) for path in folder.iterdir())
    others = [int(match[1]) for match in found if match and match[0] not in {f"rank_{rank}" for rank in ranks}]
    if others:
        raise InvalidArgumentError(
            f"--torch: expected a folder without files beside those of {rank_list([*ranks])}, got {folder} with "
            f"those of {rank_list(others)}, which torchfrtrace would read too; name another folder or delete them"
        )


def _empty() -> dict[str, Any]:
    return {"version": _VERSION, "pg_config": {}, "pg_status": {}, "entries": []}


def _global_ranks(view: View, world: View) -> list[int] | str:
    """Returns, for each rank of a communicator, its rank in ``world``; or, if that is not known of all, the reason."""
    if view.world_size == world.world_size and all(_at(each) in map(_at, world.records) for each in view.records):
        return list(range(view.world_size))
    processes = [_process(each) for each in world.records]
    own = {_process(each) for each in view.records}
    if not own.issubset(processes):
        return f"has processes without a record in {world.group:x}"
    if len(own) < len(view.records) or any(processes.count(each) > 1 for each in own):
        return "its ranks are threads of one process"
    ranks = {each.rank: each for each in view.records}
    if missing := [rank for rank in range(view.world_size) if rank not in ranks]:
        return f"no record of its {rank_list(missing)}"
    return [world.records[processes.index(_process(ranks[rank]))].rank for rank in range(view.world_size)]


def _process(each: Record) -> tuple[str, int]:
    return each.host, each.pid


def _at(each: Record) -> tuple[str, int, int]:
    return each.host, each.pid, each.rank


def _add(dumps: dict[int, dict[str, Any]], view: View, ranks: Sequence[int]) -> None:
    name, desc = f"{view.group:x}", f"ringcomm {view.engine}"
    collectives = {each.rank: _collectives(each) for each in view.records}
    first = max((calls[0].collective for calls in collectives.values() if calls), default=0)
    for rank, calls in collectives.items():
        dumped, started, completed = dumps[ranks[rank]], -1, -1
        for call in calls:
            state, started = _STATES[call.state], call.collective + 1
            if state == "completed":
                completed = started
            if call.collective >= first:
                dumped["entries"].append(_entry(call, state, (name, desc), view.world_size))
        dumped["pg_config"][name] = {"name": name, "desc": desc, "ranks": str(list(ranks))}
        dumped["pg_status"][name] = {
            "last_enqueued_collective": started,
            "last_started_collective": started,
            "last_completed_collective": completed,
        }


def _collectives(each: Record) -> list[Call]:
    return sorted(
        (call for call in each.calls if call.collective >= 0 and call.state in _STATES),
        key=lambda call: call.collective,
    )


def _entry(call: Call, state: str, group: tuple[str, str], world_size: int) -> dict[str, Any]:
    op, inputs, outputs = call.op, call.count, call.count
    if call.count < 0:  # parts of different sizes
        op, inputs, outputs = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}.get(op, op), 0, 0
    elif op == "all_gather":
        inputs //= world_size
    elif op == "reduce_scatter":
        outputs //= world_size
    file, _, line = call.site.rpartition(":")
    return {
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": call.collective + 1,  # torch counts from 1
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": f"nccl:{op}",  # torchfrtrace reads no other prefix in every version of torch
        "input_sizes": [[inputs]],
        "input_dtypes": [call.dtype],
        "output_sizes": [[outputs]],
        "output_dtypes": [call.dtype],
        "state": state,
        "retired": state == "completed",
        "time_created_ns": call.begin_ns,
        "time_discovered_started_ns": call.begin_ns,
        "time_discovered_completed_ns": call.end_ns if state == "completed" else None,
        "frames": [{"name": op, "filename": file, "line": int(line)}] if line.isdecimal() else [],
    }
