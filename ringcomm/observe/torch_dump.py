"""Records as the files of torch's flight recorder, which `torchfrtrace` reads."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcomm.errors import InvalidArgumentError
from ringcomm.observe.record import Call, Record, View

_VERSION = "2.10"  # of torch's format
_STATES = {"in flight": "started", "failed": "started", "enqueued": "scheduled", "done": "completed"}


def write(views: Sequence[View], folder: Path) -> list[Path]:
    """Writes one file for each rank of the largest communicator, with its collectives there and in all communicators
    among the same processes.

    A smaller communicator is left out if a rank of it has no record, or if its ranks are threads of one process,
    because torch's format names global ranks. So are messages between two ranks: `torchfrtrace` expects every rank of
    the communicator in them. Collectives that one rank's record no longer holds are left out for all.

    Returns: the paths, which end in the rank.
    Raises:  InvalidArgumentError: there is no communicator, or a path cannot be written.
    """
    connected = [view for view in views if view.group]
    if not connected:
        raise InvalidArgumentError("the records hold no communicator, expected one that is connected")
    world = max(connected, key=lambda view: (view.world_size, max(each.begun for each in view.records)))
    dumps: dict[int, dict[str, Any]] = {each.rank: _empty() for each in world.records}
    for view in connected:
        ranks = _global_ranks(view, world)
        if ranks is not None:
            _add(dumps, view, ranks)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dumped in dumps.items():
            dumped["entries"].sort(key=lambda entry: entry["time_created_ns"])
            for number, entry in enumerate(dumped["entries"]):
                entry["record_id"] = entry["op_id"] = number
            path = folder / f"rank_{rank}"
            path.write_bytes(pickle.dumps(dumped, protocol=2))
            paths.append(path)
    except OSError as error:
        raise InvalidArgumentError(f"{folder} cannot be written: {error}; name a folder that can") from None
    return paths


def _empty() -> dict[str, Any]:
    return {"version": _VERSION, "pg_config": {}, "pg_status": {}, "entries": []}


def _global_ranks(view: View, world: View) -> list[int] | None:
    """Returns, for each rank of a communicator, its rank in ``world``; None if that is not known of all."""
    if view.world_size == world.world_size and all(_at(each) in map(_at, world.records) for each in view.records):
        return list(range(view.world_size))
    processes = [_at(each)[:2] for each in world.records]
    ranks = {each.rank: each for each in view.records}
    if len(ranks) < view.world_size or any(processes.count(_at(each)[:2]) != 1 for each in view.records):
        return None
    return [world.records[processes.index(_at(ranks[rank])[:2])].rank for rank in range(view.world_size)]


def _at(each: Record) -> tuple[str, int, int]:
    return each.host, each.pid, each.rank


def _add(dumps: dict[int, dict[str, Any]], view: View, ranks: Sequence[int]) -> None:
    name, desc = f"{view.group:x}", f"ringcomm {view.engine}"
    collectives = {each.rank: _collectives(each) for each in view.records}
    first = max((calls[0].collective for calls in collectives.values() if calls), default=0)
    for rank, calls in collectives.items():
        dumped, numbers = dumps[ranks[rank]], {state: [-1] for state in ("scheduled", "started", "completed")}
        for call in calls:
            state = _STATES[call.state]
            for reached in list(numbers)[: list(numbers).index(state) + 1]:
                numbers[reached].append(call.collective + 1)
            if call.collective >= first:
                dumped["entries"].append(_entry(call, state, (name, desc), view.world_size))
        dumped["pg_config"][name] = {"name": name, "desc": desc, "ranks": str(list(ranks))}
        dumped["pg_status"][name] = {
            "last_enqueued_collective": max(numbers["scheduled"]),
            "last_started_collective": max(numbers["started"]),
            "last_completed_collective": max(numbers["completed"]),
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
        "time_discovered_started_ns": call.begin_ns if state != "scheduled" else None,
        "time_discovered_completed_ns": call.end_ns if state == "completed" else None,
        "frames": [{"name": op, "filename": file, "line": int(line)}] if line.isdecimal() else [],
    }
