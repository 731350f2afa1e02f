"""The ``ringcomm`` backend of :mod:`torch.distributed`.

``import ringcomm`` registers it, and so does ``import torch`` where ringcomm is installed:
``torch.distributed.init_process_group("ringcomm")`` and everything that is built on process groups (DDP, FSDP2,
DTensor, pipelining, checkpoints, device meshes) then runs unchanged over ringcomm's engines.

A group serves tensors on cpu and on cuda. Its engine on the GPU is made by its first call there, which every rank must
make together, or immediately by ``init_process_group(..., device_id=...)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ringcomm import errors
from ringcomm.arrays.devices import CPU, EMULATED, Device
from ringcomm.comm.engine import whole_milliseconds
from ringcomm.comm.hosts import Hosts, Network, RankEngine, ask_for_queues, extension, identity
from ringcomm.comm.store import exchange
from ringcomm.errors import DeviceError as DeviceError
from ringcomm.errors import DtypeError as DtypeError
from ringcomm.errors import InvalidArgumentError, RingcommError, UnsupportedError
from ringcomm.errors import ShapeError as ShapeError

if TYPE_CHECKING:
    from ringcomm import _c10d

NAME = "ringcomm"
DEVICES = ["cpu", "cuda"]
_INIT = "init_process_group"
_NEW_GROUP = "new_group"
_SPLIT_GROUP = "split_group"


# An error between the ranks of a process group is both ringcomm's error and torch.distributed's.
class CollectiveTimeoutError(errors.CollectiveTimeoutError, dist.DistBackendError):
    """A wait of a process group exceeded its time limit; the group is aborted."""


class AbortedError(errors.AbortedError, dist.DistBackendError):
    """A rank of the process group aborted; the group is aborted."""


class RankLostError(errors.RankLostError, AbortedError):
    """A rank of the process group ended while other ranks need it; the group is aborted."""


class MismatchError(errors.MismatchError, dist.DistBackendError):
    """The ranks of the process group made different calls; the group is aborted."""


class EngineError(errors.EngineError, dist.DistBackendError):
    """The operating system refused a resource that the process group needs."""


def register() -> None:
    """Registers ``"ringcomm"`` as a backend of :mod:`torch.distributed`, for cpu and cuda devices. Idempotent.

    torch 2.14 calls it for the entry point ``torch.distributed.backends`` when a group asks for ``"ringcomm"``.

    Cost:    one dictionary entry; the extension is loaded when the first process group is made.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(options: dist._DistributedBackendOptions, pg_options: _c10d.Backend.Options | None = None) -> _c10d.Backend:
    """Makes one rank of a process group; torch calls it once on every rank of the group.

    Returns: the backend, connected to every other rank's.
    Raises:  InvalidArgumentError: ``pg_options`` of another backend. CollectiveTimeoutError: a rank did not come within
             the group's timeout. UnsupportedError: this installation has no torch extension.
    """
    call = _NEW_GROUP if dist.is_initialized() else _INIT
    module = extension(call)
    if pg_options is None:
        pg_options = module.Backend.Options(options.timeout)
    elif not isinstance(pg_options, module.Backend.Options):
        raise InvalidArgumentError(
            f"{call}: rank {options.group_rank} got pg_options of {type(pg_options).__name__}, expected "
            f"None or ringcomm._c10d.Backend.Options; leave pg_options out, and name {NAME} before NCCL, whose options "
            f"torch hands on: cpu:{NAME},cuda:nccl"
        )
    pg_options._timeout = options.timeout
    pg_options.group_name = options.group_id
    pg_options.global_ranks_in_group = options.global_ranks_in_group
    return _backend(module, options.store, NAME, options.group_rank, options.group_size, pg_options, call)


def create_in(store: dist.Store, prefix: str, rank: int, options: _c10d.Backend.Options) -> _c10d.Backend:
    """Makes one rank of a group that is split off another group, whose ranks share ``store``.

    Shapes:  ``options.global_ranks_in_group`` holds the members of the new group, in rank order.
    Returns: the backend, connected to every other rank's.
    Raises:  CollectiveTimeoutError: a rank did not come within the timeout.
    """
    world_size = len(options.global_ranks_in_group)
    return _backend(extension(_SPLIT_GROUP), store, f"{NAME}/{prefix}", rank, world_size, options, _SPLIT_GROUP)


def _backend(
    module: ModuleType,
    store: dist.Store,
    prefix: str,
    rank: int,
    world_size: int,
    options: _c10d.Backend.Options,
    call: str,
) -> _c10d.Backend:
    if torch.version.cuda is not None:
        ask_for_queues()  # now, because the first call on a device comes after its context
    limit_ms = whole_milliseconds(options._timeout)
    prefix = keys_of(prefix, options.global_ranks_in_group)
    name, identities = _exchange(store, f"{prefix}/host", rank, world_size, identity().encode(), options._timeout, call)
    hosts = Hosts.of([each.decode() for each in identities])
    on_cpu = RankEngine("cpu", rank, world_size, limit_ms, CPU, hosts, Network(store, name))
    _connect(on_cpu, store, prefix, options._timeout, call)
    device = DeviceEngineFactory(on_cpu, hosts, Network(store, f"{name}/device"), f"{prefix}/device", options)
    return module.Backend(on_cpu.native.capsule(), options, device, device.serves_cpu)


def keys_of(prefix: str, members: Sequence[int]) -> str:
    """Returns the prefix of a group's keys in the store. It depends on the members, because after
    destroy_process_group() torch gives the same names to groups of other ranks over the same store."""
    return f"{prefix}/{hashlib.sha256(repr([*members]).encode()).hexdigest()[:16]}"


class DeviceEngineFactory:
    """Makes the engine of one rank of a group on its device, when the first call on the device needs it."""

    kind = "cuda"
    serves_cpu = EMULATED  # a test build, in which every tensor lies on an emulated GPU

    def __init__(
        self, on_cpu: RankEngine, hosts: Hosts, network: Network, prefix: str, options: _c10d.Backend.Options
    ) -> None:
        self._on_cpu = on_cpu  # stays alive as long as the group
        self._rank, self._hosts, self._network = on_cpu.rank, hosts, network
        self._prefix, self._options = prefix, options
        self._engine: RankEngine | None = None
        self._error: RingcommError | None = None

    def make(self, call: str, index: int) -> object:
        """Returns the engine, as a capsule. Does not wait for other ranks.

        Args:    call: the call that needs it. index: index of the device; negative for an emulated one.
        Raises:  UnsupportedError: this build has no CUDA engine, or there is no device to run it on.
        """
        device = Device("cuda", max(index, 0))
        limit_ms, world_size = whole_milliseconds(self._options._timeout), self._hosts.world_size
        try:
            self._engine = RankEngine(self.kind, self._rank, world_size, limit_ms, device, self._hosts, self._network)
        except errors.UnsupportedError as error:
            raise UnsupportedError(
                f"{call}: rank {self._rank} got a tensor on cuda:{index}, expected one on cpu, because the CUDA engine "
                f"cannot serve it: {error}; pass tensor.cpu(), or leave CUDA tensors to NCCL with "
                f"init_process_group('cpu:ringcomm,cuda:nccl')"
            ) from error
        return self._engine.native.capsule()

    def connect(self, call: str) -> object:
        """Connects the engine to those of the other ranks.

        After a failure, every later call raises the same error: a second attempt would meet ranks that are still in the
        first.

        Returns: the engine to use from now on, as a capsule.
        Raises:  CollectiveTimeoutError: not every rank made a call on its device within the group's timeout.
        """
        assert self._engine is not None
        if self._error is not None:
            raise self._error
        try:
            _connect(self._engine, self._network.store, self._prefix, self._options._timeout, call)
        except RingcommError as error:
            self._error = error
            raise
        return self._engine.native.capsule()


def _connect(engine: RankEngine, store: dist.Store, prefix: str, timeout: timedelta, call: str) -> None:
    """Exchanges handles through ``store`` and connects."""
    engine.connect(_exchange(store, prefix, engine.rank, engine.world_size, engine.handle(), timeout, call)[1])


def _exchange(
    store: dist.Store, prefix: str, rank: int, world_size: int, mine: bytes, timeout: timedelta, call: str
) -> tuple[str, list[bytes]]:
    """Returns (a name that no other exchange has, every rank's message by rank)."""
    if call == _INIT:
        advice = (
            "check that those ranks started, reach the store and ask for the same backend (or set the same "
            "RINGCOMM_REPLACE), then start all ranks again"
        )
    elif call in (_NEW_GROUP, _SPLIT_GROUP):
        advice = f"let every rank call {call}, with the same ranks, in the same order"
    else:
        advice = "let every rank make the group's first call on its GPU, or pass device_id to init_process_group"
    try:
        return exchange(store, prefix, call, rank, world_size, mine, timeout, advice)
    except errors.CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(str(error)) from error.__cause__
    except errors.EngineError as error:
        raise EngineError(str(error)) from error.__cause__


__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "DeviceError",
    "DtypeError",
    "EngineError",
    "InvalidArgumentError",
    "MismatchError",
    "RankLostError",
    "RingcommError",
    "ShapeError",
    "UnsupportedError",
    "create",
    "create_in",
    "register",
]

register()
