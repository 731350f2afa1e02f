"""All ranks of a communicator on one GPU, driven by one thread: how a CUDA graph captures the calls of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ringcomm.arrays.devices import EMULATED, Device
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.endpoint import Endpoint

PLACE = "cpu" if EMULATED else "cuda:0"
"""Where torch makes tensors for the ranks: an emulated device's memory is the host's."""


@contextmanager
def communicators(world_size: int, timeout_s: float = 60) -> Iterator[list[Communicator]]:
    """Communicators of all ranks, by rank; each call on them must be asynchronous."""
    ends = [Endpoint("cuda", rank, world_size, int(timeout_s * 1000), Device("cuda", 0)) for rank in range(world_size)]
    handles = [end.handle() for end in ends]
    threads = [threading.Thread(target=end.connect, args=(handles,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    comms = [Communicator(end) for end in ends]
    try:
        yield comms
    finally:
        synchronize()
        for comm in comms:
            comm.close()


def together(comms: list[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    """``call`` on every rank, asynchronously; waits on the current stream, not on the host. The results, by rank."""
    works = [call(comm) for comm in comms]
    return [work.wait() for work in works]


def synchronize() -> None:
    if not EMULATED:
        torch.cuda.synchronize()
