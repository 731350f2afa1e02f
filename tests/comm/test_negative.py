"""Every refusal and its words: bad input raises before anything is sent, and a broken promise of a peer is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import Communicator, errors

Refused = Callable[[Communicator], Any]


def cuda_like() -> Any:
    class OnTheGpu:
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError("must not be asked")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    return OnTheGpu()


def read_only() -> np.ndarray:
    x = np.ones(4)
    x.flags.writeable = False
    return x


ONES = torch.ones(4)
REFUSALS: list[tuple[type[Exception], str, Refused]] = [
    # shapes and strides
    (errors.ShapeError, "divisible by the world size 2", lambda c: c.reduce_scatter(torch.ones(3))),
    (errors.ShapeError, "divisible", lambda c: c.reduce_scatter(torch.ones(()))),
    (errors.ShapeError, "divisible", lambda c: c.all_to_all(torch.ones(3))),
    (errors.ShapeError, r"out of shape \(3,\), expected \(4,\)", lambda c: c.all_reduce(ONES, out=torch.ones(3))),
    (errors.ShapeError, r"expected \(8,\) or \(2, 4\)", lambda c: c.all_gather(ONES, out=torch.ones(9))),
    (errors.ShapeError, "share memory", lambda c: c.all_reduce(torch.ones(1).expand(4))),
    (errors.ShapeError, "share memory", lambda c: c.all_reduce(torch.ones(8).as_strided((4, 4), (1, 1)))),
    (errors.ShapeError, "share memory", lambda c: c.all_gather(ONES, out=torch.ones(1).expand(8))),
    (errors.ShapeError, "list of 2", lambda c: c.all_gather_list(ONES, [torch.ones(4)])),
    (errors.ShapeError, "got Tensor as outputs", lambda c: c.all_gather_list(ONES, torch.ones(2, 4))),
    (errors.ShapeError, "elements as x", lambda c: c.all_gather_list(ONES, [torch.ones(3), torch.ones(3)])),
    (errors.ShapeError, "elements as out", lambda c: c.reduce_scatter_list([torch.ones(3), torch.ones(3)], ONES)),
    (errors.ShapeError, "NoneType as outputs", lambda c: c.gather_list(ONES, None, c.rank)),
    (errors.ShapeError, "sum to 5", lambda c: c.all_to_all(ONES, send_counts=[2, 3])),
    (errors.ShapeError, "2 whole numbers", lambda c: c.all_to_all(ONES, send_counts=[4])),
    (errors.ShapeError, "2 whole numbers", lambda c: c.all_to_all(ONES, send_counts=[5, -1])),
    (errors.ShapeError, "layout torch.sparse_coo", lambda c: c.all_reduce(torch.ones(4).to_sparse())),
    (errors.ShapeError, "negative extent", lambda c: c.empty((-1, 2))),
    # types
    (errors.DtypeError, "float32 and float64", lambda c: c.all_reduce(ONES, out=torch.ones(4, dtype=torch.float64))),
    (errors.DtypeError, "float32 and int32", lambda c: c.all_gather(ONES, out=torch.ones(8, dtype=torch.int32))),
    (errors.DtypeError, "got float32, band is defined for bool", lambda c: c.all_reduce(torch.ones(4), "band")),
    (errors.DtypeError, "got bool, avg", lambda c: c.all_reduce(torch.ones(4, dtype=torch.bool), "avg")),
    (errors.DtypeError, "got complex64, max", lambda c: c.all_reduce(torch.ones(4, dtype=torch.complex64), "max")),
    (errors.DtypeError, "got uint16, sum", lambda c: c.all_reduce(torch.ones(4, dtype=torch.uint16))),
    (errors.DtypeError, "got >f4, sum", lambda c: c.all_reduce(np.ones(4, ">f4"))),
    (errors.DtypeError, "objects cannot travel", lambda c: c.all_gather(np.array([{}, {}]))),
    (errors.UnsupportedError, r"expected a communicator on a GPU.*comm.empty", lambda c: c.mem_pool(4096)),
    (errors.InvalidArgumentError, "nbytes=0, expected 1 to", lambda c: c.mem_pool(0)),
    (errors.DtypeError, "expected a dtype of torch", lambda c: c.empty(4, "float31")),
    # devices and things that are no arrays
    (errors.DeviceError, "meta, this communicator serves cpu", lambda c: c.all_reduce(torch.ones(4, device="meta"))),
    (errors.DeviceError, "on cuda:0, this communicator serves cpu", lambda c: c.all_reduce(cuda_like())),
    (errors.InvalidArgumentError, "got list, expected a torch tensor", lambda c: c.all_reduce([1.0, 2.0])),
    (errors.InvalidArgumentError, "got NoneType", lambda c: c.broadcast(None)),
    (errors.InvalidArgumentError, "read-only", lambda c: c.all_reduce(read_only())),
    (errors.InvalidArgumentError, "read-only", lambda c: c.all_reduce(b"bytes")),
    (errors.InvalidArgumentError, "got no out", lambda c: c.scatter(None, 1 - c.rank)),
    # ops, ranks, options
    (errors.InvalidArgumentError, "sum; did you mean 'avg'", lambda c: c.all_reduce(ONES, "mean")),
    (errors.InvalidArgumentError, "sum; did you mean 'premul_sum'", lambda c: c.all_reduce(ONES, "PREMUL-SUM")),
    (errors.InvalidArgumentError, "op 'xyz', expected one of", lambda c: c.all_reduce(ONES, "xyz")),
    (errors.InvalidArgumentError, "pass a factor with premul_sum", lambda c: c.all_reduce(ONES, "premul_sum")),
    (errors.InvalidArgumentError, "with it alone", lambda c: c.all_reduce(ONES, factor=2.0)),
    (errors.InvalidArgumentError, "algorithm 'star'", lambda c: c.all_reduce(ONES, algorithm="star")),
    (errors.UnsupportedError, "copy_engine, which GPUs of", lambda c: c.all_gather(ONES, algorithm="copy_engine")),
    (errors.UnsupportedError, "copy_engine, which only all_g", lambda c: c.broadcast(ONES, algorithm="copy_engine")),
    (errors.InvalidArgumentError, "root=2, expected 0 to 1", lambda c: c.broadcast(ONES, 2)),
    (errors.InvalidArgumentError, "root=-1", lambda c: c.reduce(ONES, -1)),
    (errors.InvalidArgumentError, "dst=7", lambda c: c.send(ONES, 7)),
    (errors.InvalidArgumentError, "src=7", lambda c: c.recv(ONES, 7)),
    (errors.InvalidArgumentError, "got itself as dst", lambda c: c.send(ONES, c.rank)),
    (errors.InvalidArgumentError, "ranks=2", lambda c: c.subgroup([0, 2])),
    (errors.InvalidArgumentError, "name each rank once", lambda c: c.subgroup([0, 0])),
    (errors.InvalidArgumentError, "timeout -1", lambda c: c.all_reduce(ONES, timeout=-1)),
    (errors.InvalidArgumentError, "timeout 'soon'", lambda c: c.barrier(timeout="soon")),
    (errors.InvalidArgumentError, "like='jax'", lambda c: c.empty(4, like="jax")),
]


@pytest.mark.parametrize(("kind", "words", "refused"), REFUSALS, ids=[f"{k.__name__}-{w}" for k, w, _ in REFUSALS])
def test_bad_input_raises_before_anything_is_sent(kind: type[Exception], words: str, refused: Refused) -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(kind, match=words) as caught:
            refused(comm)
        text = str(caught.value)
        assert f"rank {comm.rank}" in text or "expected a dtype" in text, text
        assert "; " in text or "expected a dtype" in text, f"does not say what to do: {text}"
        assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3  # the communicator is as it was

    ringcomm.run_ranks(fn, 2, timeout=20)


def test_a_closed_communicator_says_so() -> None:
    comm = ringcomm.init()
    work = comm.all_reduce(torch.ones(2), async_op=True)
    comm.close()
    assert work.wait().tolist() == [1.0, 1.0]
    for call in (lambda: comm.all_reduce(torch.ones(2)), comm.barrier, lambda: comm.empty(3), lambda: comm.split(0)):
        with pytest.raises(errors.ClosedError, match="rank 0 expected"):
            call()
    with pytest.raises(errors.ClosedError):
        _ = comm.timeout


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.CollectiveTimeoutError, TimeoutError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.AbortedError, RuntimeError)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "expected MASTER_ADDR and MASTER_PORT in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "rank=2 with world_size=2"),
        ({"WORLD_SIZE": "2"}, "rank=None, world_size=2"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "expected a number in WORLD_SIZE, got 'two'"),
    ],
)
def test_an_incomplete_environment_is_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ringcomm.init()


# ---- peers that break the promise --------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> str:
    """Name and text of what a call raises."""
    try:
        call()
    except errors.RingcommError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MISMATCHES: dict[str, Refused] = {
    "count": lambda c: c.all_reduce(torch.ones(4 + c.rank)),
    "dtype": lambda c: c.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][c.rank])),
    "op": lambda c: c.all_reduce(torch.ones(4), ["sum", "max"][c.rank]),
    "call": lambda c: c.all_reduce(torch.ones(4)) if c.rank else c.broadcast(torch.ones(4)),
    "root": lambda c: c.broadcast(torch.ones(4), c.rank),
    "mark": lambda c: c._all_gather(torch.ones(4), mark=c.rank),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_call_different_things_are_told(what: str) -> None:
    def fn(comm: Communicator) -> str:
        # A rank that only sends may learn of it one call later.
        return outcome(lambda: [MISMATCHES[what](comm), comm.barrier()])

    told = ringcomm.run_ranks(fn, 2, timeout=5)
    assert any(text.startswith("MismatchError") for text in told), told
    assert all(text.startswith(("MismatchError", "AbortedError")) for text in told), told


def test_a_rank_that_does_not_come_is_named() -> None:
    def fn(comm: Communicator) -> str:
        if comm.rank == 1:
            time.sleep(1.5)
            return "nothing"
        return outcome(lambda: comm.all_reduce(torch.ones(4), timeout=0.5))

    told = ringcomm.run_ranks(fn, 3, timeout=20)
    assert told[1] == "nothing"
    timeouts = [text for text in told if text.startswith("CollectiveTimeoutError")]
    assert timeouts, told
    assert all("all_reduce" in text and "rank 1" in text for text in timeouts), told


def test_after_a_failure_the_communicator_stays_aborted_and_a_new_one_works() -> None:
    def fn(comm: Communicator) -> None:
        part = comm.dup()
        if comm.rank == 0:
            part.abort("enough")
        else:
            with pytest.raises(errors.AbortedError, match="enough"):
                part.barrier()
        comm.barrier()
        assert part.aborted
        with pytest.raises(errors.AbortedError):
            part.all_reduce(torch.ones(2))
        part.close()
        with comm.dup() as fresh:
            assert fresh.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]

    ringcomm.run_ranks(fn, 3, timeout=20)


def one_is_killed(comm: Communicator, how: str) -> None:
    comm.all_reduce(np.ones(4))
    if comm.rank == 1:
        os.kill(os.getpid(), getattr(signal, how))
    started = time.monotonic()
    text = outcome(lambda: [comm.all_reduce(np.ones(1000), timeout=4) for _ in range(3)])
    assert text.partition(":")[0] in ("CollectiveTimeoutError", "AbortedError"), text
    assert "rank 1" in text, text
    assert time.monotonic() - started < 20


def test_the_death_of_a_process_reaches_the_others() -> None:
    with pytest.raises(errors.RankFailedError, match=r"rank 1 .*exit code -9"):
        ringcomm.run_ranks(one_is_killed, 3, "SIGKILL", ranks="processes", timeout=20)
