"""Several hosts: which ranks share memory, how bytes move between hosts, and how an abort reaches all hosts."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from ringcomm import _C
from ringcomm.arrays.devices import Device
from ringcomm.errors import (
    REINSTALL,
    CollectiveTimeoutError,
    EngineError,
    InvalidArgumentError,
    RankLostError,
    UnsupportedError,
    shown,
)

VARIABLE = "RINGCOMM_HOST"
"""Environment variable with the name of this rank's host, in place of the detected identity. Ranks with the same
name share memory."""

AT_CLOSE: list[Callable[[], None]] = []
"""Functions to call when an engine is closed or deleted, while its record can still be read."""

WIRE_VARIABLE = "RINGCOMM_WIRE_DTYPE"
WIRE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_FIRST_TAG = 1 << 20
_USES: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
_ABORTED = "aborted"
_warned = False  # whether the warning about processes that take turns on a device was given
_WATCH_STOP_LIMIT_S = 5.0  # a watch thread may hang in a store whose owner is gone
_MEET_EVERY_S = 0.01  # interval of checks for the surviving ranks
# Interval of checks for an abort on another host; longer with many ranks, because all ask one store.
_LOOK_EVERY_S = 0.25


def ask_for_queues() -> None:
    """Asks CUDA for 32 hardware queues, unless the program has set their number. It is read when the process's first
    context is made; with the default of 8, streams share queues."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def identity() -> str:
    """Returns a string that is equal exactly for ranks that can share memory; it begins with a name for people.

    It consists of the running kernel, the mount of shared memory and the process namespace: containers on one machine
    are separate hosts unless they share all three. Host names alone are not sufficient, because containers and cloned
    machines can have equal names.
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not given.isprintable():
            raise InvalidArgumentError(
                f"init: expected a name of printable characters in {VARIABLE}, got {shown(given)}; set another one"
            )
        return f"{given}\n{given}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    memory, processes = os.stat("/dev/shm"), os.stat("/proc/self/ns/pid")
    return f"{socket.gethostname()}\n{boot}/{memory.st_dev}/{memory.st_ino}/{processes.st_ino}"


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host.

    Hosts are ordered by their lowest ranks; the ranks of a host are ascending.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @staticmethod
    def of(identities: Sequence[str]) -> Hosts:
        """Groups ranks by the identities that they report, by rank; see `identity`."""
        places: dict[str, list[int]] = {}
        for rank, each in enumerate(identities):
            places.setdefault(each, []).append(rank)
        names = [each.partition("\n")[0] for each in places]
        unique = [name if names.count(name) == 1 else f"{name}-{at}" for at, name in enumerate(names)]
        return Hosts(tuple(tuple(ranks) for ranks in places.values()), tuple(unique))

    @staticmethod
    def pretended(ranks_of_host: Sequence[int], world_size: int, call: str) -> Hosts:
        """Assigns consecutive ranks to pretended hosts, for tests and teaching."""
        counts = list(ranks_of_host) if isinstance(ranks_of_host, Sequence) else [ranks_of_host]
        if any(not isinstance(count, int) or count < 1 for count in counts) or sum(counts) != world_size:
            raise InvalidArgumentError(
                f"{call}: got hosts={counts}, expected numbers of ranks above 0 that make {world_size} in all; pass "
                "such as [2, 2] for 4 ranks"
            )
        return Hosts.of([f"host{h}\nhost{h}" for h, count in enumerate(counts) for _ in range(count)])

    @property
    def several(self) -> bool:
        """Whether there is more than one host."""
        return len(self.ranks) > 1

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(len(ranks) for ranks in self.ranks)

    def host_of(self, rank: int) -> int:
        """Returns the index of a rank's host."""
        return next(h for h, ranks in enumerate(self.ranks) if rank in ranks)

    def name_of(self, rank: int) -> str:
        """Returns the name of a rank's host."""
        return self.names[self.host_of(rank)]

    def among(self, members: Sequence[int]) -> Hosts:
        """Returns the hosts of a group of ranks, which are renumbered in the order given."""
        return Hosts.of([f"{self.name_of(rank)}\n{self.host_of(rank)}" for rank in members])

    def order(self) -> str:
        """The order in which a reduction adds the ranks' values: "canonical", or "canonical over hosts"."""
        return str(_C.order_over(self.ranks)[0]) if self.several else "canonical"


@dataclass
class Network:
    """The settings with which the ranks of a communicator reach each other between hosts.

    Attributes:
        store: a torch.distributed store that all ranks reach.
        prefix: prefix of this communicator's keys in the store.
        kind: "gloo", "nccl", or a process group of torch.distributed over the same ranks.
        wire_dtype: type in which floats of reductions are sent; None: their own type.
        children: number of communicators made from this one, which is a part of their prefixes.
        rounds: number of the last round of `agree_on_shrink`.
        left_out: why this rank must not continue, once the others have continued without it.
    """

    store: Any
    prefix: str
    kind: Any = None
    wire_dtype: str | None = None
    children: int = field(default=0, init=False)
    rounds: int = field(default=0, init=False)
    left_out: str = field(default="", init=False)

    def child(self, members: Sequence[int], shrunk: bool = False) -> Network:
        """Returns the settings of a communicator of some ranks. Every rank, member or not, must call this equally
        often, because the prefix contains the number of calls. With ``shrunk`` only survivors call it, so the prefix
        contains the round in which they met."""
        self.children += not shrunk
        number = f"shrunk{self.rounds}" if shrunk else self.children
        kind = self.kind if isinstance(self.kind, str) or self.kind is None else None
        name = f"{self.prefix}/{number}.{members[0] if members else ''}"
        return Network(self.store, name, kind, self.wire_dtype)

    def for_control(self) -> Network:
        """Returns the settings of the cpu engine that carries a device engine's control messages."""
        return Network(self.store, f"{self.prefix}/beside", "gloo")

    def agree_on_shrink(self, rank: int, world_size: int) -> Callable[[bytes, Sequence[int], int], list[bytes]]:
        """Returns a function that does over the store what `_C.Engine.agree_on_shrink` does on one host: the first rank
        that has seen all ranks arrive, or has reached the time limit, decides which ranks continue. The store does not
        tell dead ranks from late ones, so both are waited for."""
        call = f"shrink: rank {rank} of {world_size}"

        def agree(payload: bytes, members: Sequence[int], limit_ms: int) -> list[bytes]:
            if self.left_out:  # this rank must not continue alone
                raise RankLostError(self.left_out)
            # Odd rounds collect the ranks that are there, even rounds their payloads. If an attempt fails half-way, the
            # next one begins with an odd round, by which ranks still in the even round notice it.
            self.rounds += 1 if (self.rounds % 2 == 0) == (not members) else 2
            prefix, later = (f"{self.prefix}/shrink/{self.rounds + ahead}" for ahead in (0, 1))
            limit, awaited = limit_ms / 1e3, list(members) or list(range(world_size))
            try:
                self.store.set(f"{prefix}/{rank}", payload)
                end, keys = time.monotonic() + limit, {each: f"{prefix}/{each}" for each in awaited}
                came, missing = list[int](), awaited
                while len(came) < len(awaited) and time.monotonic() < end:
                    came = [each for each in awaited if self.store.check([keys[each]])]
                    missing = sorted(set(awaited) - set(came))
                    if members and any(self.store.check([f"{later}/{each}"]) for each in missing):
                        break  # a rank has begun another attempt
                    time.sleep(_MEET_EVERY_S)
                if not members:
                    mine = ",".join(map(str, came))
                    decided = self.store.compare_set(f"{prefix}/decision", "", mine).decode()
                    came = [int(each) for each in decided.split(",")]
                elif len(came) < len(awaited):
                    raise RankLostError(
                        f"{call} expected ranks {missing} within {limit:g} s, they did not come; call shrink again"
                    )
                if rank not in came:
                    self.left_out = (
                        f"{call} expected to continue with the other ranks, but came after they had decided without "
                        "it; start it anew"
                    )
                    raise RankLostError(self.left_out)
                return [bytes(self.store.get(keys[each])) if each in came else b"" for each in range(world_size)]
            except RuntimeError as error:
                if isinstance(error, RankLostError):
                    raise
                raise EngineError(
                    f"{call} expected the store through which the hosts meet, got: {str(error).splitlines()[0]}; make "
                    "a new communicator with a store that is alive"
                ) from error

        return agree

    def transport(self, rank: int, world_size: int, device: Device, limit_ms: int) -> Any:
        """Returns this rank's inter-host transport, for `_C.hierarchical_engine`; a collective."""
        kind = self.kind or ("gloo" if device.kind == "cpu" else "nccl")
        if not isinstance(kind, str):
            return _over_group(kind, rank, world_size, device)
        if kind == "gloo" and device.kind == "cpu":
            return _gloo(self.prefixed(), rank, world_size, limit_ms)
        if kind == "nccl" and device.kind == "cuda":
            from ringcomm.comm.nccl import transport

            return transport(self.prefixed(), rank, world_size, device, limit_ms)
        raise UnsupportedError(
            f"init: rank {rank} got network={shown(kind)} between hosts for arrays on {device}, expected 'gloo' for "
            "the cpu or 'nccl' for cuda; pass one of them, or leave network out"
        )

    def prefixed(self) -> Any:
        """Returns the store, restricted to this communicator's keys."""
        from torch.distributed import PrefixStore

        return PrefixStore(self.prefix, self.store)

    def wire_dtype_number(self) -> int:
        """Returns `wire_dtype` in the engine's form; -1 for none."""
        name = check_network(None, self.wire_dtype, "init")
        return -1 if name is None else _C.DTYPES[name]


def check_network(kind: Any, wire_dtype: Any, call: str) -> str | None:
    """Returns the name of ``wire_dtype``, which may be a torch dtype.

    Raises for an unknown network or type, even if there is one host and neither is used.
    """
    if kind not in (None, "gloo", "nccl") if isinstance(kind, str | None) else not hasattr(kind, "allreduce"):
        raise InvalidArgumentError(
            f"{call}: got network={shown(kind)}, expected 'gloo' for the cpu, 'nccl' for cuda, or a process group of "
            "torch.distributed; pass one of them, or leave it out"
        )
    name = str(wire_dtype or os.environ.get(WIRE_VARIABLE) or "").removeprefix("torch.") or None
    if name is not None and name not in WIRE_DTYPES:
        raise InvalidArgumentError(
            f"{call}: got wire_dtype={name!r}, expected one of {', '.join(WIRE_DTYPES)}; pass one of them, or None to "
            "send floats as they are"
        )
    return name


def memory_store() -> Any:
    """Returns a torch.distributed store for the threads of this process."""
    from torch.distributed import HashStore

    return HashStore()


def tcp_store(port: int = 0) -> Any:
    """Returns a store for the processes of this machine: one that this process serves, at its ``port``; or a client of
    the one that another process serves at ``port``."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)


def extension(call: str) -> Any:
    """Returns the module `_c10d`, which is built against torch.

    Raises:  UnsupportedError: there is none for the installed torch.
    """
    import torch

    try:
        from ringcomm import _c10d
    except ImportError as error:
        raise UnsupportedError(
            f"{call}: expected the extension ringcomm._c10d for the installed torch {torch.__version__}, got: {error}; "
            f"{REINSTALL}"
        ) from error
    return _c10d


def _gloo(store: Any, rank: int, world_size: int, limit_ms: int) -> Any:
    from torch.distributed import ProcessGroupGloo

    try:
        group = ProcessGroupGloo(store, rank, world_size, timedelta(milliseconds=limit_ms))
        # A rank that has all its connections may close them at once, while others still wait for theirs and would fail.
        group.barrier().wait()
    except RuntimeError as error:
        raise CollectiveTimeoutError(
            f"init: rank {rank} expected to reach all {world_size} ranks over gloo, got: {str(error).splitlines()[0]}; "
            "check that every host reaches every other, and name the interface in GLOO_SOCKET_IFNAME"
        ) from error
    return extension("init").transport_over(group, "gloo")


def _over_group(group: Any, rank: int, world_size: int, device: Device) -> Any:
    import torch
    import torch.distributed as dist

    if (dist.get_rank(group), dist.get_world_size(group)) != (rank, world_size):
        raise InvalidArgumentError(
            f"init: rank {rank} of {world_size} is rank {dist.get_rank(group)} of {dist.get_world_size(group)} in the "
            "process group passed as network; pass a process group of the same ranks"
        )
    if device.kind != "cpu":
        raise UnsupportedError(
            f"init: rank {rank} got a process group as network between hosts for arrays on {device}, but a process "
            "group serves the cpu only; leave network out"
        )
    module = extension("init")
    # Equal on all ranks, which make their transports over a group in the same order.
    uses = _USES.setdefault(group, count())
    first_tag = _FIRST_TAG + next(uses) * module.TAGS  # above the tags that the group's owner uses
    return module.transport_over(group._get_backend(torch.device("cpu")), dist.get_backend(group), first_tag)


class RankEngine:
    """One engine of one rank, over the ranks of this host or of several hosts.

    Attributes:
        native: the engine that runs calls; until `connect` it reaches the ranks of this host alone.
    """

    _is_reported = False  # whether AT_CLOSE was called, once for each engine
    _stop_watch: Callable[[], None] | None = None

    def __init__(
        self,
        kind: str,
        rank: int,
        world_size: int,
        limit_ms: int,
        device: Device,
        hosts: Hosts | None = None,
        network: Network | None = None,
    ) -> None:
        self.rank, self.world_size, self.device, self.limit_ms = rank, world_size, device, limit_ms
        if device.kind == "cuda":
            ask_for_queues()
        self._hosts = hosts if hosts is not None and hosts.several else None
        self._network = network
        here = self._hosts.ranks[self._hosts.host_of(rank)] if self._hosts else tuple(range(world_size))
        self._inside = _C.Engine(kind, here.index(rank), len(here), limit_ms, device=device.index)
        self.native = self._inside

    def handle(self) -> bytes:
        """Returns the bytes that ranks on the same host need to connect to this one."""
        return bytes(self._inside.handle())

    def connect(self, handles: Sequence[bytes]) -> None:
        """Connects to every rank; a collective."""
        if self._hosts is None:
            self._inside.connect(handles)
            self._warn_of_time_slices()
            return
        assert self._network is not None
        wire_dtype = self._network.wire_dtype_number()
        transport = self._network.transport(self.rank, self.world_size, self.device, self.limit_ms)
        hosts = self._hosts
        native = _C.hierarchical_engine(self._inside, transport, self.rank, hosts.ranks, hosts.names, wire_dtype)
        native.connect(handles)
        self.native = native
        self._warn_of_time_slices()
        self._stop_watch = _start_watch(native, self.world_size, self._network.prefixed())

    def _warn_of_time_slices(self) -> None:
        """Warns once per process that processes sharing a device without MPS run one at a time."""
        global _warned
        if self._inside.kind != "cuda" or _warned:
            return
        facts = self._inside.describe()
        others = int(facts["processes_on_device"]) - 1
        if others > 0 and facts["mps"] == "no":
            _warned = True
            warnings.warn(
                f"connect: rank {self.rank} shares {self.device} with ranks of {others} other processes, and without "
                "CUDA's Multi-Process Service a GPU runs one process at a time: a call waits for every process's turn; "
                "start MPS (nvidia-cuda-mps-control -d), or run the ranks as threads of one process",
                stacklevel=2,
            )

    def close(self) -> None:
        """Finishes the calls in flight and disconnects from the peers."""
        self.native.close()
        self._end()

    def __del__(self) -> None:
        # Runs for a process group, which torch closes, and for a communicator that nobody has closed.
        if not sys.is_finalizing():
            self._end()

    def _end(self) -> None:
        if self._stop_watch is not None:
            atexit.unregister(self._stop_watch)
            self._stop_watch()
            self._stop_watch = None
        if not self._is_reported:
            self._is_reported = True
            for call in AT_CLOSE:
                call()


def _start_watch(native: _C.Engine, world_size: int, store: Any) -> Callable[[], None]:
    """Starts a thread that carries aborts from host to host through the store. Inside a host shared memory carries
    them.

    Returns: a function that stops the thread after a last check whether it must publish an abort. It waits until the
             thread no longer uses the store: if a program removes a FileStore's file during a call of the store, that
             call blocks the whole process until the store's time limit.
    """
    with suppress(Exception):  # a separate client, because a waiting client blocks every thread that shares it
        store = store.clone()
    end = threading.Event()
    every_s = max(_LOOK_EVERY_S, world_size / 2000)
    arguments = (weakref.ref(native), store, end, every_s)  # weak, so that the thread does not keep the engine alive
    thread = threading.Thread(target=_watch, args=arguments, name="ringcomm watch", daemon=True)
    stop = partial(_end_watch, thread, end)
    thread.start()
    atexit.register(stop)  # a thread inside native code while Python exits would crash the process
    return stop


def _end_watch(thread: threading.Thread, end: threading.Event) -> None:
    end.set()
    if thread is not threading.current_thread():
        thread.join(_WATCH_STOP_LIMIT_S)


def _watch(watched: weakref.ref[_C.Engine], store: Any, end: threading.Event, every_s: float) -> None:
    last, reached = False, True
    while not last:
        last = end.wait(every_s)
        native = watched()
        if native is None:
            return
        if native.aborted:
            reason = native.why_aborted or "another rank of this host gave up"
            kind = native.aborted_as
            native.abort(reason, kind)  # an abort in shared memory does not end waits for other hosts
            with suppress(RuntimeError):
                if reached:
                    store.compare_set(_ABORTED, "", f"{kind}\n{reason}")
            return
        if reached and not last:
            try:
                if store.check([_ABORTED]):
                    kind, _, reason = store.get(_ABORTED).decode(errors="replace").partition("\n")
                    native.abort(reason, kind)
                    return
            except RuntimeError:
                reached = False  # the store's owner is gone; aborts must still reach the ranks on this host
        last = last or native.closed
        del native
