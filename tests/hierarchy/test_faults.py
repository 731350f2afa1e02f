"""What goes wrong between hosts ends on every rank within the limit, with a sentence that names the rank and its host;
nothing hangs, no process dies of it, and the ranks that are left go on with a new communicator.

Hosts are pretended ones, over the loopback interface, unless a network must fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.errors import MismatchError, RingcommError
from tests.support import forked, torch_ranks
from tests.support.hierarchy import namespaces
from tests.support.hierarchy.namespaces import Cluster

Told = tuple[str, str, float]  # a rank's error, its sentence, and seconds to it

# ---- on a rank ---------------------------------------------------------------------------------------------------


def joined(name: str, timeout: float) -> ringcomm.Communicator:
    """This rank of a communicator of 4 ranks on 2 hosts."""
    from torch.distributed import FileStore

    rank = int(os.environ["RANK"])
    os.environ["RINGCOMM_HOST"] = f"host{rank // 2}"
    try:
        store = FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], name), 4)
        return ringcomm.init(rank, 4, store=store, timeout=timeout)
    finally:
        del os.environ["RINGCOMM_HOST"]


def told_by(call: Callable[[], Any]) -> Told:
    """What a call raises."""
    start = time.monotonic()
    try:
        call()
    except (RingcommError, KeyError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def works(name: str) -> bool:
    """Whether these processes can go on with a new communicator."""
    with joined(name, 20) as comm:
        x = comm.all_reduce(torch.full((70_000,), float(comm.rank)))
        comm.barrier()
        return bool((x == 6).all())


def differ(first: str, second: str) -> tuple[Told, Told, bool]:
    """Host 0 makes one call, host 1 another; what a rank hears, and in its next call, and whether it can go on."""
    comm = joined("store", 15)
    told = told_by(lambda: CALLS[first if comm.rank < 2 else second](comm))
    after = told_by(lambda: comm.all_reduce(torch.ones(4)))
    comm.close()
    return told, after, works("again")


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(50_000)),
    "fewer": lambda comm: comm.all_reduce(torch.ones(49_999)),
    "more": lambda comm: comm.all_reduce(torch.ones(3_000_000)),
    "short": lambda comm: comm.all_reduce(torch.ones(3)),
    "int32": lambda comm: comm.all_reduce(torch.ones(50_000, dtype=torch.int32)),
    "max": lambda comm: comm.all_reduce(torch.ones(50_000), "max"),
    "ring": lambda comm: comm.all_reduce(torch.ones(50_000), algorithm="ring"),
    "all_gather": lambda comm: comm.all_gather(torch.ones(50_000)),
    "all_gather with mark 3": lambda comm: comm._all_gather(torch.ones(50_000), mark=3),
    "gather": lambda comm: comm.gather(torch.ones(50_000), 3),
    "all_to_all": lambda comm: comm.all_to_all(torch.ones(200_000)),
    "barrier": lambda comm: comm.barrier(),
    "barrier before a gather": lambda comm: comm._barrier(mark=1),
    "broadcast 0": lambda comm: comm.broadcast(torch.ones(50_000), 0),
    "broadcast 2": lambda comm: comm.broadcast(torch.ones(50_000), 2),
    "nothing": lambda comm: comm.all_reduce(torch.ones(0)),
}


def leave(waiting: str) -> Told:
    """Rank 0 leaves with an error while the others wait for ranks that do not answer either."""
    comm = joined("store", 20)

    def body() -> None:
        with comm:
            if comm.rank == 0:
                time.sleep(0.5)
                raise KeyError("no such weight")
            if waiting == "a message":
                comm.recv(torch.empty(4), {1: 3, 2: 0, 3: 1}[comm.rank])
            elif waiting == "different calls":
                comm.scatter(None, 3, out=torch.empty(4)) if comm.rank == 1 else comm.gather(torch.ones(4), 0)
            else:
                comm.all_reduce(torch.ones(100))

    return told_by(body)


def shorter(sent: int, received: int) -> Told:
    """A message of another length than its receive; the next one of the same pair comes through."""
    with joined("store", 15) as comm:
        told = ("nothing", "", 0.0)
        if comm.rank == 0:
            comm.send(torch.ones(sent), 3, 5)
            comm.send(torch.arange(6.0), 3, 5)
        elif comm.rank == 3:
            told = told_by(lambda: comm.recv(torch.empty(received), 0, 5))
            x = torch.empty(6)
            comm.recv(x, 0, 5)
            assert torch.equal(x, torch.arange(6.0))
        comm.barrier()
        return told


def alone(op: str) -> Told:
    """Rank 2 waits for a message or in a collective, to which rank 0 does not come before it gives up."""
    comm = joined("store", 2)
    pair = comm.split(comm.rank % 2)
    assert pair is not None  # of rank 0 and rank 2, one of each host, or of the others
    told: Told = ("nothing", "", 0.0)
    if comm.rank == 2:
        calls = {"recv": lambda: pair.recv(torch.empty(4), 0, 7), "all_reduce": lambda: pair.all_reduce(torch.ones(9))}
        told = told_by(calls[op])
    else:
        time.sleep(6)
    pair.close()
    comm.close()
    return told


# ---- the tests ---------------------------------------------------------------------------------------------------

DIFFERENT = [
    ("all_reduce", "fewer"),
    ("short", "more"),
    ("more", "nothing"),
    ("all_reduce", "int32"),
    ("all_reduce", "max"),
    ("all_reduce", "ring"),
    ("all_gather", "all_reduce"),
    ("all_reduce", "gather"),
    ("short", "gather"),
    ("all_gather", "all_gather with mark 3"),
    ("all_to_all", "all_gather"),
    ("barrier", "all_reduce"),
    ("barrier", "barrier before a gather"),
    ("broadcast 0", "broadcast 2"),
]
OPS = {"all_gather": "all_gather", "gather": "gather", "all_to_all": "all_to_all", "barrier": "barrier"}
OPS |= {"broadcast 0": "broadcast", "broadcast 2": "broadcast", "all_gather with mark 3": "all_gather"}
OPS |= {"barrier before a gather": "barrier before a gather"}


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=[" and ".join(pair) for pair in DIFFERENT])
def test_different_calls_on_two_hosts_are_refused_on_both(first: str, second: str) -> None:
    found = torch_ranks.run(differ, first, second, world_size=4, backend="", timeout_s=40)
    told = [each[0] for each in found]
    ops = [OPS.get(call, "all_reduce") for call in (first, second)]
    assert {name for name, _, _ in told} == {"MismatchError"}, told
    for _, text, _ in told:
        made = re.findall(r"rank (\d) on host host(\d) made ([\w ]+) #\d+", text)
        assert sorted(int(host) for _, host, _ in made) == [0, 1], text
        assert all(int(rank) // 2 == int(host) and op == ops[int(host)] for rank, host, op in made), text
    assert all(seconds < 12 for (_, _, seconds), _, _ in found)
    assert all(after[0] == "MismatchError" and after[2] < 1 for _, after, _ in found)
    assert all(again for _, _, again in found)


@pytest.mark.parametrize("waiting", ["a collective", "different calls", "a message"])
def test_an_exception_on_one_host_ends_the_waits_on_all(waiting: str) -> None:
    found = torch_ranks.run(leave, waiting, world_size=4, backend="", timeout_s=40)
    assert found[0][0] == "KeyError"
    for name, text, seconds in found[1:]:
        assert name == "AbortedError", text
        assert "rank 0 left its communicator with KeyError: 'no such weight'" in text
        assert seconds < 10, text


@pytest.mark.parametrize(("sent", "received"), [(100, 7), (7, 100), (300_000, 4), (0, 5)])
def test_a_message_of_another_length_is_refused_and_no_process_ends(sent: int, received: int) -> None:
    *others, (name, text, _) = torch_ranks.run(shorter, sent, received, world_size=4, backend="", timeout_s=40)
    assert name == "MismatchError"
    assert f"expected {4 * received} bytes of float32 with tag 5 from rank 0, got {4 * sent} bytes of float32" in text
    assert [each[0] for each in others] == ["nothing"] * 3


def test_messages_of_a_tag_stay_in_order_whatever_their_length() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            works = [comm.isend(torch.full((n,), float(n)), 1, tag) for n, tag in ((5, 1), (4, 2), (6, 1))]
            for work in works:
                work.wait()
            return
        x = torch.empty(4)
        comm.recv(x, 0, tag=2)  # the first one is put aside
        assert (x == 4).all()
        with pytest.raises(MismatchError, match="expected 24 bytes of float32 with tag 1 from rank 0, got 20"):
            comm.recv(torch.empty(6), 0, tag=1)
        y = torch.empty(6)
        comm.recv(y, 0, tag=1)
        assert (y == 6).all()

    run_ranks(body, 2, hosts=[1, 1], timeout=10)


def test_a_rank_may_leave_after_its_last_call() -> None:
    def body(comm: Communicator) -> float:
        x = torch.ones(3)
        for _ in range(20):
            comm.all_reduce(x)
        comm.close()
        return float(x[0])

    for _ in range(5):
        assert run_ranks(body, 2, hosts=[1, 1], timeout=10) == [2.0**20] * 2


def test_a_message_that_nobody_sends_is_waited_for_in_vain() -> None:
    name, text, seconds = torch_ranks.run(alone, "recv", world_size=4, backend="", timeout_s=40)[2]
    assert name == "CollectiveTimeoutError"
    assert 1.5 < seconds < 6
    assert "with tag 7 from rank 0" in text


def test_a_rank_that_does_not_come_is_named_with_its_host() -> None:
    name, text, seconds = torch_ranks.run(alone, "all_reduce", world_size=4, backend="", timeout_s=40)[2]
    assert name == "CollectiveTimeoutError"
    assert 1.5 < seconds < 6
    assert "all_reduce: rank 1 on host host1 waited in vain for rank 0 on host host0 over gloo" in text


# ---- with a network that fails -----------------------------------------------------------------------------------


def run_rank(namespace: str, environment: dict[str, str], rank: int, world_size: int, path: str) -> None:
    """One rank of a job, on a host: calls until one fails, and then a call of those that are told to go on."""
    namespaces.enter(namespace)
    os.environ.update(environment)
    folder = Path(path)
    limit = timedelta(seconds=60)
    store = TCPStore(namespaces.address(0), 29600, world_size, rank == 0, limit)

    def until(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.02)

    (folder / f"started-{rank}").touch()
    for each in range(world_size):
        until(f"started-{each}")
    comm = ringcomm.init(rank, world_size, store=store, timeout=4)
    text = ""
    try:
        for i in range(10**6):
            comm.all_reduce(torch.ones(500_000))
            if i == 2:
                (folder / f"first-running-{rank}").touch()
    except RingcommError as error:
        text = f"{type(error).__name__} {error}"
    (folder / f"first-{rank}.part").write_text(text)
    (folder / f"first-{rank}.part").rename(folder / f"first-{rank}")
    until("go on")
    comm.close()
    ranks = [int(word) for word in (folder / "go on").read_text().split()]
    comm = ringcomm.init(ranks.index(rank), len(ranks), store=PrefixStore("again", store), timeout=20)
    x = comm.all_reduce(torch.full((100_000,), 1.0))
    assert bool((x == len(ranks)).all())
    comm.barrier()
    (folder / f"again-{rank}").touch()
    until("end")
    os._exit(0)


class Job:
    """Ranks that make calls until something fails, and then go on without it."""

    def __init__(self, cluster: Cluster, ranks: list[int], folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.processes: list[Any] = []
        for host, count in enumerate(ranks):
            for _ in range(count):
                given = (cluster.names[host], cluster.environment(host), len(self.processes), sum(ranks), str(folder))
                self.processes.append(forked.context().Process(target=run_rank, args=given, daemon=True))
                self.processes[-1].start()

    def wait(self, name: str, ranks: list[int], timeout_s: float) -> list[str]:
        """The files of that name that the ranks have written by then."""
        end = time.monotonic() + timeout_s
        paths = [self.folder / f"{name}-{rank}" for rank in ranks]
        while not all(path.exists() for path in paths):
            missing = [path.name for path in paths if not path.exists()]
            assert time.monotonic() < end, f"{missing} did not come within {timeout_s:g} s"
            dead = [rank for rank in ranks if self.processes[rank].exitcode is not None]
            assert not dead, f"ranks {dead} ended"
            time.sleep(0.02)
        return [path.read_text() for path in paths]

    def errors(self, ranks: list[int]) -> list[tuple[str, str]]:
        """The errors that the ranks raised, whose calls have a limit of 4 s, and their sentences."""
        found = [text.partition(" ") for text in self.wait("first", ranks, 30)]
        return [(name, text) for name, _, text in found]

    def go_on(self, ranks: list[int]) -> None:
        """The ranks make a new communicator."""
        (self.folder / "go on.part").write_text(" ".join(map(str, ranks)))
        (self.folder / "go on.part").rename(self.folder / "go on")
        self.wait("again", ranks, 30)
        (self.folder / "end").touch()
        for rank in ranks:
            self.processes[rank].join(10)
            assert self.processes[rank].exitcode == 0


@pytest.mark.slow  # a host that is killed is the other way to lose a link
@pytest.mark.usefixtures("needs_namespaces")
def test_a_cut_link_ends_the_calls_of_all_ranks_and_a_mended_one_serves_again(tmp_path: Path) -> None:
    everybody = [0, 1, 2, 3]
    with Cluster(2) as cluster:
        job = Job(cluster, [2, 2], tmp_path)
        job.wait("first-running", everybody, 60)
        cluster.cut(1)
        told = job.errors(everybody)
        assert {name for name, _ in told} <= {"CollectiveTimeoutError", "AbortedError"}
        assert sum(name == "CollectiveTimeoutError" for name, _ in told) >= 2, told  # one on each side, at least
        for rank, (_, text) in enumerate(told):
            lost = re.search(
                r"rank (\d) on host host(\d) waited in vain for rank (\d) on host host(\d) over gloo", text
            )
            assert lost, text
            here, host, peer, its = map(int, lost.groups())
            assert (here // 2, peer // 2) == (host, its) == (rank // 2, 1 - rank // 2), text
        cluster.mend(1)
        job.go_on(everybody)


@pytest.mark.usefixtures("needs_namespaces")
def test_a_host_that_is_killed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with Cluster(3) as cluster:
        job = Job(cluster, [2, 1, 1], tmp_path)
        job.wait("first-running", [0, 1, 2, 3], 60)
        for pid in subprocess.run(
            ["ip", "netns", "pids", cluster.names[2]], capture_output=True, text=True, check=True
        ).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        told = job.errors([0, 1, 2])
        assert {name for name, _ in told} <= {"CollectiveTimeoutError", "RankLostError"}
        assert all("rank 3 on host host2 over gloo" in text for _, text in told), told
        job.go_on([0, 1, 2])
