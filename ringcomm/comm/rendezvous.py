"""Rendezvous: ranks find each other through torchrun's environment and torch's stores."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import sys
import threading
import warnings
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ringcomm.arrays.devices import choose, local_rank
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.engine import Timeout, milliseconds
from ringcomm.comm.hosts import Hosts, Network, check_network, identity
from ringcomm.comm.native import NativeEngine
from ringcomm.comm.store import exchange
from ringcomm.errors import CollectiveTimeoutError, EngineError, InvalidArgumentError, shown
from ringcomm.terminal import Progress
from ringcomm.validation import as_int

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_LIMIT_S = 1800.0
_OTHER_LAUNCHERS = (  # variables with the number of ranks and this rank
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
_MOST_RANKS = 1 << 20  # every rank reads a key of every other rank
launched = threading.local()  # its `rank`: this thread's, in `run_ranks`
_shared: weakref.WeakKeyDictionary[Any, dict[torch.device, Communicator]] = weakref.WeakKeyDictionary()  # by group


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    store: Any = None,
    init_method: str | None = None,
    timeout: Timeout = _LIMIT_S,
    engine: str | None = None,
    device: Any = None,
    network: Any = None,
    wire_dtype: str | None = None,
) -> Communicator:
    """Makes this process one rank of a communicator; a collective.

    Under torchrun no argument is needed: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are used. If torch.distributed
    is initialised, its ranks and its store are used. Without any of these, the world has one rank.

    Args:
        rank, world_size: this rank and the number of ranks, if the environment does not define them.
        store: a torch.distributed store that all ranks reach.
        init_method: as in torch.distributed, such as "tcp://localhost:29500" or "file:///tmp/ranks"; default "env://".
        timeout: seconds (or a timedelta): the limit of this call, and of every later call without its own.
        engine: the engine that moves the bytes: "cpu" or "cuda"; None: the engine for the device.
        device: where this rank's arrays lie: "cpu", "cuda:0" or a torch.device; "cuda" assigns the devices round robin
            by torchrun's LOCAL_RANK, else by rank. None: the cpu. Several ranks may share a device.
        network: the network between hosts, if there are several: "gloo" (cpu), "nccl" (cuda), or a process group of
            torch.distributed over the same ranks (cpu; its tags from 2^20 on are used); None: the network for the
            device. The ranks that share a host are detected, or set by RINGCOMM_HOST on each rank.
        wire_dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2": all_reduce, reduce and reduce_scatter send
            floats between hosts in this type if it is smaller, and round them each time they are sent; None: the type
            in RINGCOMM_WIRE_DTYPE, else the floats' own type. float8 is used only for float32 and for the sums of
            16-bit floats.
    Returns: Communicator.
    Raises:  InvalidArgumentError: the environment and the arguments do not define a rank and a world size, or the ranks
             were started with different world sizes. CollectiveTimeoutError: a rank did not come in time. EngineError:
             the store cannot be opened or was lost. UnsupportedError: no such engine in this build, or no driver.
             DeviceError: no such device.
    """
    usable = init_method is None or (isinstance(init_method, str) and init_method.isprintable())
    if not usable or (store is not None and not hasattr(store, "compare_set")):
        raise InvalidArgumentError(
            f"init: got store={shown(store)}, init_method={shown(init_method)}, expected a store of torch.distributed "
            "or a text such as 'tcp://localhost:29500'; pass one, or start with torchrun"
        )
    group = None if (store is not None or init_method is not None) else _default_group()
    rank, world_size = _place(rank, world_size, group)
    wire_dtype = check_network(network, wire_dtype, "init")
    kind, where = choose(engine, device, "init", local_rank(rank))
    limit_ms = milliseconds(timeout, "init", rank)
    if world_size == 1:
        made = NativeEngine(kind, rank, world_size, limit_ms, where)
        made.connect([made.handle()])
        return Communicator(made)
    limit = timedelta(milliseconds=limit_ms)
    if store is None:
        store = group._get_default_store() if group is not None else _rendezvous(init_method, rank, world_size, limit)
    advice = f"check that those ranks started, with world size {world_size}, and reach the store"

    def exchange_with_all(what: str, payload: bytes) -> tuple[str, list[bytes]]:
        return exchange(store, f"ringcomm/init/{what}", "init", rank, world_size, payload, limit, advice)

    name, identities = exchange_with_all("host", identity().encode())
    hosts = Hosts.of([each.decode() for each in identities])
    made = NativeEngine(kind, rank, world_size, limit_ms, where, hosts, Network(store, name, network, wire_dtype))
    made.connect(exchange_with_all("handle", made.handle())[1])
    made.exchange(b"")  # a barrier, because the rank that owns the store may end as soon as it continues
    return Communicator(made)


def beside(group: Any = None, device: Any = "cpu") -> Communicator:
    """Returns a communicator on our own engines over the ranks of a process group; a collective of these ranks.

    Args:
        group: a process group of torch.distributed, of any backend; None: the default one. Only its ranks and the store
            are used.
        device: where the arrays lie: "cpu", or for example "cuda:0".
    Returns: the communicator, with the group's rank numbers and time limit. It does not end with the group: close it.
    Raises:  as `init`.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    name = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=16).hexdigest()
    store = dist.PrefixStore(f"ringcomm/beside/{name}", dist.distributed_c10d._get_default_store())
    return init(dist.get_rank(group), len(ranks), store=store, device=device, timeout=_limit_of(group, device))


def _limit_of(group: Any, device: Any) -> Timeout:
    """Returns the time limit of a process group; the default limit if its backend does not have one."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return _LIMIT_S


def _default_group() -> Any:
    """Returns torch.distributed's module of process groups if there is a default group, else None."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module if module is not None and module.is_initialized() else None


def _place(rank: int | None, world_size: int | None, group: Any) -> tuple[int, int]:
    if group is not None and rank is None and world_size is None:
        return group.get_rank(), group.get_world_size()
    for name, given in (("rank", rank), ("world_size", world_size)):
        if given is not None and as_int(given) is None:
            raise InvalidArgumentError(f"init: got {name}={shown(given)}, expected a whole number; pass one")
    rank, world_size = as_int(rank), as_int(world_size)
    if world_size is None:
        world_size = _number("WORLD_SIZE")
    if world_size is None and rank is None and _number("RANK") is None:
        _check_alone()
        return 0, 1
    if rank is None:
        rank = 0 if world_size == 1 else _number("RANK")
    if world_size is not None and world_size > _MOST_RANKS:
        raise InvalidArgumentError(
            f"init: got world_size={shown(world_size)}, expected at most {_MOST_RANKS}; pass the number of ranks"
        )
    if rank is not None and world_size is not None and world_size >= 1 and not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"init: got rank={shown(rank)} with world_size={shown(world_size)}; rank must be 0 to {world_size - 1}"
        )
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"init: expected a rank and a world size above it, got rank={shown(rank)}, world_size={shown(world_size)}; "
            "start with torchrun, set RANK and WORLD_SIZE, or pass both"
        )
    return rank, world_size


def _check_alone() -> None:
    """Checks a process for which nothing defines a rank: raises inside `run_ranks`, and warns under a launcher other
    than torchrun, because there are other ranks."""
    mine = getattr(launched, "rank", None)
    if mine is not None:
        raise InvalidArgumentError(
            f"init: rank {mine} of run_ranks got no communicator, expected the one that run_ranks gave to its "
            "function; pass it as comm=, or for a world of one rank pass rank=0, world_size=1"
        )
    for size, rank in _OTHER_LAUNCHERS:
        number = os.environ.get(size, "")
        if number.isdecimal() and int(number) > 1:
            warnings.warn(
                f"init: got no RANK and WORLD_SIZE in the environment, so this process is a world of one rank, "
                f"expected a world of {number} ranks ({size}); start with torchrun, or set RANK=${rank}, "
                f"WORLD_SIZE=${size}, MASTER_ADDR and MASTER_PORT",
                stacklevel=4,
            )
            return


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None or text == "":
        return None
    if not text.isdecimal() or len(text) > 20:
        raise InvalidArgumentError(f"init: expected a number in {variable}, got {shown(text)}; start with torchrun")
    return int(text)


def _rendezvous(init_method: str | None, rank: int, world_size: int, limit: timedelta) -> Any:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if init_method in (None, "env://") and missing:
        raise InvalidArgumentError(
            f"init: rank {rank} of {world_size} expected {' and '.join(missing)} in the environment, got none; start "
            "with torchrun, or pass store= or init_method="
        )
    scheme, _, path = (init_method or "").partition("://")
    folder = os.path.dirname(path) if scheme == "file" else ""
    if folder and not os.path.isdir(folder):
        raise InvalidArgumentError(
            f"init: rank {rank} of {world_size} expected the folder of {init_method}, got none; create {folder} first"
        )
    if scheme == "file" and os.path.isfile(path):
        _check_file(path, rank, world_size)
    from torch.distributed import rendezvous

    where = init_method
    if where in (None, "env://"):
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
    whom = f"all {world_size} ranks" if rank == 0 else "rank 0"
    try:
        # Rank 1 says so, too, because rank 0 may not have started.
        with Progress(f"init: waiting at {where} for {whom}", shows=rank < 2, limit_s=limit.total_seconds()) as waiting:
            with waiting.noted():
                return next(rendezvous(init_method or "env://", rank, world_size, timeout=limit))[0]
    except (RuntimeError, ValueError) as error:
        raise _not_met(error, str(where), rank, world_size, limit) from error


def _check_file(path: str, rank: int, world_size: int) -> None:
    """Raises for a file that is not a store, because torch would never stop reading it."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        content = file.read()
    at, length = 0, struct.Struct("=I")  # a store is a sequence of keys and values, each after its length
    while at + length.size <= len(content):
        at += length.size + length.unpack_from(content, at)[0]
    if at != len(content):
        raise InvalidArgumentError(
            f"init: rank {rank} of {world_size} expected a store or no file in {path}, got another file; name another "
            "one, or remove it"
        )


def _not_met(error: Exception, where: str, rank: int, world_size: int, limit: timedelta) -> Exception:
    """Converts an error that stopped a rank before the ranks shared a store to one of our errors."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "timed out" not in said.lower():
        if type(error).__name__ not in ("DistNetworkError", "DistStoreError"):
            return InvalidArgumentError(
                f"init: rank {rank} of {world_size} cannot use {where}: {said}; pass an init_method such as "
                "'tcp://localhost:29500', or start with torchrun"
            )
        return EngineError(
            f"init: rank {rank} of {world_size} expected a store at {where}, got: {said}; check the address, and that "
            "no other program has the port"
        )
    if rank == 0:
        return CollectiveTimeoutError(
            f"init: rank 0 of {world_size} waited {limit.total_seconds():g} s at {where} for all {world_size} ranks, "
            f"got: {said}; start the missing ranks, with this address and this world size"
        )
    return CollectiveTimeoutError(
        f"init: rank {rank} of {world_size} expected rank 0 at {where} within {limit.total_seconds():g} s, got no "
        "answer; check that rank 0 runs, and that every rank has the same address and port"
    )


# ---- a communicator for a process group --------------------------------------------------------------------------


def communicator_of(group: dist.ProcessGroup | None, call: str, device: torch.device | None = None) -> Communicator:
    """Returns a communicator over a process group: on our own engine if the group's backend is ours, else through the
    group.

    None: the default group; without torch.distributed, `ringcomm.init` from torchrun's environment.
    """
    if group is not None and not hasattr(type(group), "_get_backend"):
        raise InvalidArgumentError(
            f"{call}: got process_group={shown(group)}, expected a group of torch.distributed; pass one, None, or a "
            "communicator as comm="
        )
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return init(device=device)
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise InvalidArgumentError(f"{call}: this process is not in the process group; call it on members only")
    import torch

    where = torch.device("cpu") if device is None else device
    if "ringcomm" in group._get_backend(where).name():
        return beside(group, where)
    return Communicator.from_process_group(group)


def shared_communicator(group: dist.ProcessGroup | None, call: str, device: torch.device) -> Communicator:
    """Returns what `communicator_of` returns, but the same object for every call with this group and device.

    The communicator lives as long as its group. Making one is a collective, so all ranks must make it in the same call;
    if it lived only as long as the modules that use it, each rank's garbage collector would decide when.
    """
    import torch.distributed as dist

    initialized = dist.is_available() and dist.is_initialized()
    owner = (dist.group.WORLD if group is None else group) if initialized else init  # without a group: this process
    known = _shared.get(owner, {}).get(device)
    if known is None or known.closed or known.aborted:
        known = communicator_of(group, call, device)
        # An engine over a process group is not kept: it references the group, and making another one sends nothing.
        if known.lends_memory:
            _shared.setdefault(owner, {})[device] = known
    return known
