"""``RINGCOMM_REPLACE=gloo,nccl``: process groups that ask for these backends get ringcomm's.

Programs that accept a fixed list of backend names then run over ringcomm unmodified. torch.distributed makes every
process group in one function, which is wrapped here. Such a group keeps the name that was asked for in what
torch.distributed says about it (``get_backend``, ``get_backend_config``), because programs branch on that name. Its
backend is ringcomm's: ``group._get_backend(device).name() == "ringcomm"``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any

from ringcomm.errors import InvalidArgumentError

VARIABLE = "RINGCOMM_REPLACE"
_NOT_REPLACED = {
    "mpi": "it takes ranks and world sizes from MPI",
    "fake": "its store connects no ranks",
    "undefined": "it is no backend",
    "ringcomm": "it is ringcomm already",
}


def names_of(text: str, given: str = VARIABLE) -> list[str]:
    """Returns the backend names in ``text``, separated by commas; ``given`` is the variable or flag that has it.

    Raises:  InvalidArgumentError: no name, a word that is none, or the name of a backend that cannot be replaced.
    """
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    for name in names:
        if name in _NOT_REPLACED or not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            why = _NOT_REPLACED.get(name, "that is no name of a backend")
            raise InvalidArgumentError(
                f"{given}: expected names of torch.distributed backends such as gloo,nccl, got {name!r}: {why}; "
                f"remove it from {given}={text!r}"
            )
    if not names:
        raise InvalidArgumentError(
            f"{given}: expected names of torch.distributed backends such as gloo,nccl, got none in {text!r}; name one, "
            f"or leave {given} out"
        )
    return names


@functools.cache  # a second call would wrap the wrapper
def install(text: str) -> None:
    """Replaces the backends that ``text`` names in every process group that is made from now on. Idempotent.

    Raises:  InvalidArgumentError: as `names_of`.
    """
    from torch.distributed import distributed_c10d as c10d

    names = names_of(text)
    make_group = c10d._new_process_group_helper
    parameters = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_replaced(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        given = replaced(asked, names)
        if given != asked:
            call.arguments["backend"] = c10d.Backend(given)
            if ":" not in given:
                call.arguments["backend_options"] = _own_options(call.arguments.get("backend_options"))
        group, store = make_group(*call.args, **call.kwargs)
        is_first_rank = (c10d.get_rank() if c10d.is_initialized() else group.rank()) == 0
        if is_first_rank:
            _advise_unknown(",".join(names))
        if given == asked:
            return group, store
        # A rank outside of the group gets no group, and a tag may give one that was made before.
        if group in c10d._world.pg_map and c10d._world.pg_map[group][0] == given:
            c10d._world.pg_map[group] = (asked, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
            if is_first_rank:
                _announce(" or ".join(names))
        return group, store

    c10d._new_process_group_helper = make_replaced


@functools.cache  # says it once
def _advise_unknown(names: str) -> None:
    """Warns of names that no backend has when the first group is made; packages may have registered backends before."""
    from torch.distributed import distributed_c10d as c10d

    known = [name for name in c10d.Backend.backend_list if name not in _NOT_REPLACED]
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        warnings.warn(
            f"{VARIABLE}: got {', '.join(unknown)}, expected names of backends of torch.distributed, here one of "
            f"{', '.join(known)}; correct the name",
            stacklevel=2,
        )


def replaced(asked: str, names: list[str]) -> str:
    """Returns the backend string ``asked`` with ``ringcomm`` in place of ``names``, as torch.distributed reads it.

    ``undefined``, which torch.distributed makes of None, stands for the default backend of the device that it finds.
    """
    from torch.distributed import distributed_c10d as c10d

    from ringcomm.backend import DEVICES, NAME

    if str(asked).lower() in names:
        return NAME
    if ":" not in asked and asked != c10d.Backend.UNDEFINED:
        return asked
    found = c10d.BackendConfig(asked).get_device_backend_map()
    ours = {device: NAME if backend in names else backend for device, backend in found.items()}
    if ours == found:
        return asked
    if {*ours.values()} == {NAME} and {*ours} <= {*DEVICES}:
        return NAME
    # Ours come first: torch.distributed hands the options that it makes for NCCL to the backends after it.
    ordered = sorted(ours.items(), key=lambda each: each[1] != NAME)
    return ",".join(f"{device}:{backend}" for device, backend in ordered)


def _own_options(options: object) -> object:
    """``options`` of ringcomm's backend; None for those of the backend that was asked for, which only tune it."""
    from ringcomm import _c10d

    return options if isinstance(options, _c10d.Backend.Options) else None


@functools.cache  # says it once
def _announce(names: str) -> None:
    print(f"ringcomm: process groups that ask for {names} use ringcomm ({VARIABLE})", file=sys.stderr, flush=True)


__all__ = ["VARIABLE", "install", "names_of", "replaced"]
