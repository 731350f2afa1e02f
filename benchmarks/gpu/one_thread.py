"""All ranks of a communicator on one GPU, driven by one thread: how a CUDA graph captures the calls of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringcomm.arrays.devices import EMULATED, Device
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.native import NativeEngine
from ringcomm.errors import CollectiveTimeoutError

PLACE = "cpu" if EMULATED else "cuda:0"
"""Where torch makes tensors for the ranks: an emulated device's memory is the host's."""


@contextmanager
def communicators(world_size: int, timeout_s: float = 60) -> Iterator[list[Communicator]]:
    """Communicators of all ranks, by rank; each call on them must be asynchronous. ``timeout_s`` limits every call."""
    engines = [
        NativeEngine("cuda", rank, world_size, int(timeout_s * 1000), Device("cuda", 0)) for rank in range(world_size)
    ]
    handles = [engine.handle() for engine in engines]
    failures: list[BaseException] = []

    def connect(engine: NativeEngine) -> None:
        try:
            engine.connect(handles)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=connect, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise CollectiveTimeoutError(f"connect: {world_size} ranks expected to connect within {2 * timeout_s:g} s")
    comms = [Communicator(engine) for engine in engines]
    try:
        yield comms
    finally:
        try:
            synchronize()
        finally:
            for comm in comms:
                comm.close()


def together(comms: list[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    """``call`` on every rank, asynchronously; waits on the current stream, not on the host. The results, by rank."""
    works = [call(comm) for comm in comms]
    return [work.wait() for work in works]


def synchronize(comms: Sequence[Communicator] = ()) -> None:
    """Waits for the device; raises what any of the communicators found wrong meanwhile."""
    if not EMULATED:
        torch.cuda.synchronize()
    for comm in comms:
        comm.synchronize()


def context_is_lost() -> bool:
    """Whether a sticky error has ended this process's use of the GPU: nothing but a new process helps."""
    if EMULATED:
        return False
    try:
        torch.cuda.synchronize()
        return bool((torch.ones(4, device=PLACE) + 1).sum() != 8)
    except RuntimeError:
        return True
