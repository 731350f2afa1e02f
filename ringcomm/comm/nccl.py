"""NCCL, which moves bytes between GPUs of several hosts: finds the library, and makes a rank's transport over it."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringcomm import _C
from ringcomm.arrays.devices import Device
from ringcomm.errors import CollectiveTimeoutError, UnsupportedError

VARIABLE = "RINGCOMM_NCCL"
"""Environment variable with the path of libnccl.so.2, in place of the one that is found."""

_FILE = "libnccl.so.2"
_IDS_KEY = "nccl_ids"


def path() -> str:
    """
    Returns the library to load: the path in `RINGCOMM_NCCL`, else the library of the nvidia-nccl package (which torch
    uses, too).

    Returns: "" if neither exists; then a library that the process has already loaded is used, or one that the loader
             finds.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return given
    return next((str(file) for folder in _packages() if (file := folder / "lib" / _FILE).is_file()), "")


def _packages() -> list[Path]:
    """Returns the folders of the package nvidia.nccl."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package nvidia at all
        return []
    return [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []


def facts() -> tuple[bool, str]:
    """Returns whether NCCL can be used, and its version or the reason why not. Loads the library without using a
    GPU."""
    where = path()
    why = _C.why_no_nccl(where)
    if why:
        return False, why
    return True, f"NCCL {_C.nccl_version(where)}, {where or 'found by the loader'}"


def transport(store: Any, rank: int, world_size: int, device: Device, limit_ms: int) -> Any:
    """
    Returns this rank's transport over NCCL, for `_C.hierarchical_engine`; a collective of all ranks.

    Args:
        store: a torch.distributed store, restricted to this communicator's keys. Rank 0 writes the ids there.
        limit_ms: time limit for all ranks to come.

    Raises:
        UnsupportedError: no NCCL, or one that is too old.
        CollectiveTimeoutError: not all ranks came in time.
        EngineError: an NCCL call failed.
    """
    where = path()
    why = _C.why_no_nccl(where)
    ids = b"" if why or rank else b"".join(_C.nccl_unique_id(where) for _ in range(_C.NCCL_IDS))
    states = _swap(store, rank, world_size, why or f"={_C.nccl_version(where)}", limit_ms)
    for peer, state in enumerate(states):  # the same on all ranks, before any of them waits for another in NCCL
        if not state.startswith("="):
            raise UnsupportedError(
                f"init: rank {peer} expected NCCL between hosts with arrays on {device}, got {state}"
            )
        if state != states[0]:
            raise UnsupportedError(
                f"init: rank {peer} has NCCL {state[1:]}, rank 0 has {states[0][1:]}, expected one version "
                f"everywhere; install the same, or name the library in {VARIABLE}"
            )
    if rank == 0:
        store.set(_IDS_KEY, ids)
    store.wait([_IDS_KEY], timedelta(milliseconds=limit_ms))
    everything = bytes(store.get(_IDS_KEY))
    each = len(everything) // _C.NCCL_IDS
    parts = [everything[i * each : (i + 1) * each] for i in range(_C.NCCL_IDS)]
    return _C.nccl_transport(where, rank, world_size, parts, device.index, limit_ms)


def _swap(store: Any, rank: int, world_size: int, mine: str, limit_ms: int) -> list[str]:
    """Returns every rank's string, by rank."""
    keys = [f"nccl/{peer}" for peer in range(world_size)]
    store.set(keys[rank], mine)
    try:
        store.wait(keys, timedelta(milliseconds=limit_ms))
    except RuntimeError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeoutError(
            f"init: rank {rank} expected all {world_size} ranks to bring NCCL within {limit_ms / 1e3:g} s, got none of "
            f"{missing}; look at what those ranks are doing"
        ) from error
    return [store.get(key).decode() for key in keys]
