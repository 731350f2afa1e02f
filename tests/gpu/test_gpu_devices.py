"""Ranks on GPUs of their own: what crosses a link, as processes and as threads."""

from __future__ import annotations

import time

import pytest
import torch

from ringcomm import Communicator
from ringcomm.arrays import devices
from tests.gpu.on_gpu import in_processes, place, ranks
from tests.gpu.test_gpu_ranks import alive, calls_differ, one_is_absent, small_calls

pytestmark = [
    in_processes,
    pytest.mark.skipif(devices.count() < 2, reason=f"needs two CUDA devices, got {devices.count()}"),
]
WORLDS = [2] if devices.count() < 3 else [2, min(devices.count(), 8)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_calls(kind: str, world_size: int) -> None:
    ran = ranks(small_calls, world_size, kind=kind, device="cuda")
    assert ran == [ran[0]] * world_size
    print(f"{ran[0]} cells on each rank")


def message_before_a_sum(comm: Communicator) -> None:
    """On the default stream. The later rank enqueues the copy, which must not wait for the sum of the earlier one."""
    data, sums = place(torch.zeros(5000), comm.device), place(torch.ones(3000), comm.device)
    for turn in range(1, 11):
        if turn % 2 == comm.rank:
            time.sleep(0.005)
        if comm.rank == 1:
            data.fill_(turn)
        work = comm.isend(data, 0) if comm.rank == 1 else comm.irecv(data, 1)
        comm.all_reduce(sums.fill_(1))
        work.wait()
        comm.synchronize()
        assert bool((data == turn).all())
        assert bool((sums == comm.world_size).all())


def test_a_message_between_threads_waits_for_no_call_behind_it() -> None:
    ranks(message_before_a_sum, 2, device="cuda")


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_failures(kind: str) -> None:
    said = ranks(one_is_absent, 2, kind=kind, device="cuda")
    assert "all_reduce" in said[1]
    assert "MismatchError" in ranks(calls_differ, 2, kind=kind, device="cuda")
    ranks(alive, 2, kind=kind, device="cuda")
