"""probe and iprobe: what they say of a message, which message it is, and that it stays until it is received."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ringcomm
from ringcomm import Communicator, Status, errors, run_ranks
from tests.support import torch_ranks

RANKS = pytest.mark.parametrize("ranks", ["threads", "processes"])
TAGS = (0, 7, -3)
DTYPES = ("float32", "int64", "uint8", "bfloat16", "float64", "bool", "uint16", "complex64", "complex128")
COUNTS = (0, 1, 3, 1000, 5000, 300_000, 2_000_000)


def messages(seed: int, source: int) -> list[tuple[int, torch.Tensor]]:
    """What a rank sends, in order: (tag, array)."""
    drawn = random.Random(1000 * seed + source)
    found = []
    for number in range(40):
        dtype = getattr(torch, drawn.choice(DTYPES))
        count = drawn.choices(COUNTS, (2, 3, 3, 3, 3, 2, 1))[0]
        found.append((drawn.choice(TAGS), ((torch.arange(count) * 7 + number + source) % 50).to(dtype)))
    return found


def raw(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def receive(comm: Communicator, status: Status) -> torch.Tensor:
    x = torch.empty(status.count, dtype=getattr(torch, status.dtype))
    assert x.nbytes == status.nbytes
    assert comm.recv(x, status.source, status.tag) == status.source
    return x


def receives_what_it_does_not_know(comm: Communicator, seed: int) -> int:
    """Rank 0 receives the messages of all others by what probe and iprobe say of them."""
    drawn = random.Random(seed)
    if comm.rank > 0:
        works = []
        for tag, x in messages(seed, comm.rank):
            if drawn.random() < 0.5:
                works.append(comm.isend(x, 0, tag))
            else:
                comm.send(x, 0, tag)
        for work in works:
            work.wait()
        return 0
    left: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    for source in range(1, comm.world_size):
        for tag, x in messages(seed, source):
            left[source, tag].append(x)
    received = 0
    while any(left.values()):
        source, tag = drawn.choice([key for key, xs in left.items() if xs])
        src = drawn.choice([None, source])
        status = comm.iprobe(src, tag) if drawn.random() < 0.5 else comm.probe(src, tag)
        if status is None:
            continue
        if drawn.random() < 0.3:  # other messages are looked at meanwhile, and large ones stored
            for other in TAGS:
                comm.iprobe(drawn.choice([None, source]), other)
            assert comm.probe(status.source, tag) == status
        expected = left[status.source, tag].popleft()
        code = str(expected.dtype).removeprefix("torch.")
        assert (status.tag, status.nbytes) == (tag, expected.nbytes)
        assert status.dtype == code
        assert raw(receive(comm, status)) == raw(expected)
        received += 1
    assert all(comm.iprobe(None, tag) is None for tag in TAGS)
    return received


@RANKS
@pytest.mark.parametrize("seed", range(3))
def test_messages_of_unknown_size(seed: int, ranks: str) -> None:
    received, *_ = run_ranks(receives_what_it_does_not_know, 4, seed, ranks=ranks, timeout=60)
    assert received == 120


def test_a_large_message_stays_where_it_is_until_it_is_received() -> None:
    probed, looked = threading.Event(), threading.Event()

    def fn(comm: Communicator) -> None:
        if comm.rank == 1:
            work = comm.isend(torch.ones(10_000_000), 0)
            assert probed.wait(30)
            assert not work.done  # it would be if the probe had stored the message elsewhere
            looked.set()
            return work.wait()
        status = comm.probe(1)
        assert comm.iprobe(1) == comm.iprobe() == status == Status(1, 0, "float32", 10_000_000, 40_000_000)
        probed.set()
        assert looked.wait(30)
        assert bool((receive(comm, status) == 1).all())

    run_ranks(fn, 2, timeout=60)


def after_a_receive(comm: Communicator, count: int) -> None:
    """The message of the receive that was posted first is not the one that a probe sees."""
    if comm.rank == 1:
        comm.barrier()
        comm.send(torch.full((count,), 1.0), 0)
        return comm.send(torch.full((5,), 2.0), 0)
    x = torch.zeros(count)
    work = comm.irecv(x, 1)
    assert comm.iprobe(1) is None
    comm.barrier()
    status = comm.probe()
    assert (status.source, status.count) == (1, 5)
    assert receive(comm, status).tolist() == [2.0] * 5
    assert work.wait() == 1
    assert bool((x == 1).all())


@RANKS
@pytest.mark.parametrize("count", [3, 5_000_000])
def test_a_receive_posted_before_has_its_message_first(count: int, ranks: str) -> None:
    run_ranks(after_a_receive, 2, count, ranks=ranks, timeout=60)


def test_threads_probe_and_receive_beside_each_other() -> None:
    rounds = 200

    def fn(comm: Communicator) -> None:
        if comm.rank > 0:
            for number in range(rounds):
                for tag in (1, 2, 3):
                    comm.send(torch.full((tag * 10 + number * (tag < 3),), number), 0, tag)
            return
        failed: list[BaseException] = []

        def probes(tag: int, waits: bool) -> None:
            seen = dict.fromkeys(range(1, comm.world_size), 0)
            try:
                for _ in range(rounds * (comm.world_size - 1)):
                    status = comm.probe(None, tag) if waits else None
                    while status is None:
                        status = comm.iprobe(None, tag)
                    number = seen[status.source]
                    assert status.count == tag * 10 + number
                    assert receive(comm, status).tolist() == [number] * status.count
                    seen[status.source] += 1
            except BaseException as error:
                failed.append(error)
                comm.abort(f"a thread has failed: {error}")

        threads = [threading.Thread(target=probes, args=case) for case in ((1, True), (2, False))]
        for thread in threads:
            thread.start()
        for number in range(rounds):
            for source in range(1, comm.world_size):
                x = torch.zeros(30, dtype=torch.int64)
                assert comm.recv(x, source, 3) == source
                assert x.tolist() == [number] * 30
        for thread in threads:
            thread.join()
        assert not failed, failed

    run_ranks(fn, 3, timeout=60)


# ---- waits that fail ----------------------------------------------------------------------------------------------


def in_vain(comm: Communicator) -> str:
    if comm.rank == 1:
        with pytest.raises(errors.RingcommError):
            comm.barrier()
        return ""
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        comm.probe(1, 3, timeout=0.2)
    with pytest.raises(errors.CollectiveTimeoutError):
        comm.iprobe(1, 3)
    return str(caught.value)


@RANKS
def test_a_probe_has_a_time_limit(ranks: str) -> None:
    text = run_ranks(in_vain, 2, ranks=ranks, timeout=30)[0]
    assert text.startswith("probe: rank 0 (tests/comm/test_probe.py:")
    assert " expected rank 1" in text
    assert " to send a message with tag 3, got none from it" in text
    assert "within the timeout of 0.2 s" in text


def with_another_tag(comm: Communicator, how: str) -> str:
    x = torch.ones(5)
    if comm.rank == 1:
        comm.send(x, 0, tag=3)
        while how != "lost" and not comm.aborted:
            time.sleep(0.01)
        return ""
    calls: dict[str, Callable[[], object]] = {
        "probe": lambda: comm.probe(1, timeout=0.3),
        "any": lambda: comm.recv(x, timeout=0.3),
    }
    with pytest.raises(errors.RingcommError) as caught:
        calls.get(how, lambda: comm.recv(x, 1, timeout=30 if how == "lost" else 0.3))()
    return str(caught.value)


@RANKS
@pytest.mark.parametrize("how", ["probe", "any", "recv", "lost"])
def test_a_message_with_another_tag_is_named(how: str, ranks: str) -> None:
    text = run_ranks(with_another_tag, 2, how, ranks=ranks, timeout=30, return_exceptions=True)[0]
    assert "; rank 1 has sent 20 bytes of float32 with tag 3: pass the same tag to both calls; " in text
    assert ("but it has closed" in text) == (how == "lost")
    assert ("from it" in text) == (how in ("probe", "recv"))


def polls(comm: Communicator) -> None:
    while comm.iprobe(1) is None:
        time.sleep(0.001)


def alone(comm: Communicator, waits: bool, any_rank: bool, exits: bool, closed: str) -> str:
    """The other rank sends one message and is gone; ``closed``: the file that it makes once it has closed."""
    if comm.rank == 1:
        comm.send(torch.ones(3), 0, 5)
        comm.barrier()
        if exits:
            os._exit(3)
        comm.close()
        Path(closed).touch()
        return ""
    comm.barrier()
    while comm.iprobe(1, 5) is None:
        pass
    if not exits:
        while not os.path.exists(closed):
            time.sleep(0.001)
        for _ in range(100):  # a rank that has closed its communicator is no error
            assert comm.iprobe() is comm.iprobe(1) is None
    with pytest.raises(errors.RankLostError) as caught:
        comm.probe(None if any_rank else 1) if waits else polls(comm)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        *((how, ranks) for how in ("waits", "waits for any") for ranks in ("threads", "processes", "process exits")),
        ("polls", "process exits"),
    ],
)
def test_a_lost_rank_is_told(how: str, ranks: str, tmp_path: Path) -> None:
    exits = ranks == "process exits"
    found = run_ranks(
        alone,
        2,
        how != "polls",
        how == "waits for any",
        exits,
        str(tmp_path / "closed"),
        ranks="processes" if exits else ranks,
        timeout=60,
        return_exceptions=True,
    )
    assert isinstance(found[0], str), found
    assert found[0].startswith("probe: rank 0 (tests/comm/test_probe.py:"), found
    closed, exited = (
        "but it has closed its communicator, or its function has returned, after",
        "but its process has exited, after",
    )
    assert closed in found[0] if ranks == "threads" else exited in found[0] or (not exits and closed in found[0]), found


def test_a_rank_may_close_while_another_looks_for_its_messages_and_sends() -> None:
    closed, looked = threading.Event(), threading.Event()

    def fn(comm: Communicator) -> None:
        x = torch.ones(10_000_000)
        if comm.rank == 1:
            comm.close()
            closed.set()
        elif comm.rank == 2:
            assert looked.wait(30)
            assert comm.recv(x, 0) == 0
            comm.send(x, 0)
        else:
            work = comm.isend(x, 2)
            assert closed.wait(30)
            until = time.monotonic() + 1
            try:
                while time.monotonic() < until:  # beside the thread that sends
                    assert comm.iprobe(1) is None
                assert not work.done
            finally:
                looked.set()
            work.wait()
            assert comm.probe(2).count == x.numel()
            assert comm.recv(x, 2) == 2

    run_ranks(fn, 3, timeout=60)


def aborted(comm: Communicator, waits: bool) -> None:
    if comm.rank == 1:
        time.sleep(0.1)
        return comm.abort("enough")
    with pytest.raises(errors.AbortedError, match="enough"):
        comm.probe(1) if waits else polls(comm)


@RANKS
@pytest.mark.parametrize("waits", [False, True])
def test_an_abort_ends_a_probe(waits: bool, ranks: str) -> None:
    run_ranks(aborted, 2, waits, ranks=ranks, timeout=30)


def each_other(comm: Communicator) -> str:
    with pytest.raises(errors.MismatchError) as caught:
        comm.probe(1 - comm.rank)
    return str(caught.value)


@RANKS
def test_ranks_that_probe_each_other_are_told(ranks: str) -> None:
    for text in run_ranks(each_other, 2, ranks=ranks, timeout=60):
        assert "but it waits in probe (tests/comm/test_probe.py:" in text


# ---- arguments, engines -------------------------------------------------------------------------------------------


def test_a_rank_alone_has_no_message() -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(errors.InvalidArgumentError, match=r"^probe: rank 0 is alone, expected another rank"):
            comm.probe()
        with pytest.raises(errors.InvalidArgumentError, match=r"^probe: rank 0 is alone, expected another rank"):
            comm.iprobe()

    run_ranks(fn, 1)


def refused(comm: Communicator, got: str) -> None:
    """Before anything is sent: what comes after is as if there had been no call."""
    with pytest.raises(errors.UnsupportedError, match=f"^probe: rank {comm.rank} expected the cpu engine .* got {got}"):
        comm.probe(1 - comm.rank)
    with pytest.raises(errors.UnsupportedError, match=f"^probe: rank {comm.rank} expected the cpu engine .* got {got}"):
        comm.iprobe()
    assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3


def test_several_hosts_refuse() -> None:
    run_ranks(refused, 2, "cpu over several hosts", hosts=[1, 1], timeout=60)


def over_gloo() -> None:
    with Communicator.from_process_group() as comm:
        refused(comm, "torch.distributed:gloo")


def test_a_process_group_refuses() -> None:
    torch_ranks.run(over_gloo, world_size=2, backend="gloo", timeout_s=60)


def is_recorded(comm: Communicator) -> None:
    """A probe that waits is a call of the flight recorder."""
    if comm.rank == 0:
        comm.iprobe(1, 4)
        comm.probe(1, 4)
        comm.probe(tag=4)
        comm.recv(np.zeros(2), 1, 4)
    else:
        comm.send(np.ones(2), 0, 4)
    comm.barrier()
    if comm.rank == 0:
        calls = [call for record in ringcomm.record.records() for call in record.calls if call.op == "probe"]
        assert [(call.title, call.passed, call.state) for call in calls] == [
            ("probe from rank 1", "tag 4", "done"),
            ("probe from any rank", "tag 4", "done"),
        ]
        assert all(call.site.startswith("tests/comm/test_probe.py:") for call in calls)


def test_the_flight_recorder_has_probes_that_wait() -> None:
    run_ranks(is_recorded, 2, ranks="processes", timeout=60)
