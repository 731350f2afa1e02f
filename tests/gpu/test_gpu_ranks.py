"""Ranks as processes that share the GPU (memory handles, small sizes: they run by turns), and what goes wrong."""

from __future__ import annotations

import time

import pytest
import torch

from ringcomm import Communicator, errors
from tests.gpu.on_gpu import EMULATED, PLACE, in_processes, place, ranks
from tests.support.reference import reduced, same_bits, values

pytestmark = in_processes
more = pytest.mark.more


# ---- processes -------------------------------------------------------------------------------------------------------


def small_calls(comm: Communicator) -> int:
    rank, world_size, on, cells = comm.rank, comm.world_size, comm.device, 0
    for dtype in ("float32", "bfloat16", "int8"):
        for count in (1, 777, 4096):
            everyone = [values(dtype, r, count) for r in range(world_size)]
            x = place(everyone[rank], on)
            for algorithm in ("auto", "direct", "ring" if dtype == "int8" else "oneshot"):
                got = comm.all_reduce(x, out=torch.empty_like(x), algorithm=algorithm)
                comm.synchronize()
                assert same_bits(got.cpu(), reduced(everyone, "sum")), f"all_reduce {algorithm} {dtype} {count}"
                cells += 1
            gathered = comm.all_gather(x)
            comm.synchronize()
            assert same_bits(gathered.cpu(), torch.cat(everyone)), f"all_gather {dtype} {count}"
            ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
            got = torch.empty_like(x)
            work = comm.isend(x, ahead)
            comm.recv(got, behind)
            work.wait()
            comm.synchronize()
            assert same_bits(got.cpu(), everyone[behind]), f"send and recv {dtype} {count}"
            cells += 2
    lent = comm.empty(5000, "float32")  # memory that the peers map
    lent.fill_(rank)
    comm.all_reduce(lent)
    comm.synchronize()
    assert bool((lent == world_size * (world_size - 1) / 2).all())
    part, whole = comm.empty(5000, "float32"), comm.empty(5000 * world_size, "float32")
    for turn in range(3):  # without a kernel: streams wait for words that the peers' streams write
        part.fill_(10 * turn + rank)
        comm.all_gather(part, out=whole, algorithm="copy_engine")
        comm.synchronize()
        assert whole.view(world_size, -1)[:, -1].tolist() == [10.0 * turn + r for r in range(world_size)]
    assert comm.describe()["copy_engine"] == "3 calls, 0 of them by direct"
    return cells


@pytest.mark.parametrize("handles", ["ipc", "vmm"])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=more) for n in (3, 4) if not EMULATED)])
def test_processes_share_the_gpu(world_size: int, handles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if EMULATED and handles == "vmm":
        pytest.skip("the emulated GPU has no virtual memory API")
    monkeypatch.setenv("RINGCOMM_CUDA_HANDLES", handles)
    ran = ranks(small_calls, world_size, kind="processes")
    assert ran == [ran[0]] * world_size
    print(f"{ran[0]} cells on each rank")


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def alive(comm: Communicator) -> None:
    x = comm.all_reduce(place(torch.ones(1000), comm.device))
    comm.synchronize()
    assert bool((x == comm.world_size).all())


def one_is_absent(comm: Communicator) -> str:
    alive(comm)
    if comm.rank == 0:
        return ""
    started = time.monotonic()
    with pytest.raises((errors.CollectiveTimeoutError, errors.AbortedError)) as caught:
        comm.all_reduce(place(torch.ones(1000), comm.device), timeout=2, async_op=True).synchronize()
    assert time.monotonic() - started < 30
    return str(caught.value)


def calls_differ(comm: Communicator) -> str:
    alive(comm)
    with pytest.raises((errors.MismatchError, errors.AbortedError)) as caught:
        comm.all_reduce(place(torch.ones(10 + comm.rank), comm.device), timeout=20, async_op=True).synchronize()
    return type(caught.value).__name__


def stopped(comm: Communicator) -> str:
    alive(comm)
    if comm.rank == 0:
        time.sleep(0.3)
        comm.abort("the user pressed stop")
        return ""
    with pytest.raises(errors.AbortedError) as caught:
        comm.all_reduce(place(torch.ones(10), comm.device), async_op=True).synchronize()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=more)])
def test_a_failed_communicator_leaves_the_device_usable(kind: str) -> None:
    several = 2 if EMULATED else 3
    said = ranks(one_is_absent, several, kind=kind)
    assert all("all_reduce" in text for text in said[1:]), said
    said = ranks(calls_differ, 2, kind=kind)
    assert "MismatchError" in said, said
    ranks(stopped, several, kind=kind)
    ranks(alive, 2, kind=kind)  # a new communicator in this process, and in new ones
    assert (torch.ones(5, device=PLACE) * 2).tolist() == [2.0] * 5


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match="got 9"):
        ranks(alive, 9)


def wrong_arrays(comm: Communicator) -> None:
    ones = torch.ones(4, device=PLACE)
    bad = [
        (errors.DtypeError, lambda: comm.all_reduce(ones, "band")),
        (errors.ShapeError, lambda: comm.reduce_scatter(torch.ones(comm.world_size + 1, device=PLACE))),
        (errors.DeviceError, lambda: comm.all_reduce(torch.ones(4, device="meta"))),
    ]
    if not EMULATED:
        bad.append((errors.DeviceError, lambda: comm.all_reduce(torch.ones(4))))
    for kind, call in bad:
        with pytest.raises(kind):
            call()
    strided = torch.ones(3, 2, device=PLACE).t()
    comm.all_reduce(strided)
    comm.synchronize()
    assert bool((strided == comm.world_size).all())
    alive(comm)


def test_bad_input_is_refused_before_anything_is_launched() -> None:
    ranks(wrong_arrays, 2)
