"""Several hosts, as network namespaces joined by links of 1 Gbit/s and 1 ms: the same bits as one host, and the bytes
that cross the network are those of the design.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringcomm import run_ranks
from tests.support import torch_ranks, torchrun
from tests.support.choice import slow
from tests.support.hierarchy import cases, namespaces
from tests.support.hierarchy.namespaces import Cluster

PROGRAM = str(Path(cases.__file__))
COUNT = 3 << 19  # elements of the message that is counted: 6 MiB of float32, the same share for 2 and for 3 hosts
LIMIT_S = 100.0
pytestmark = [
    pytest.mark.usefixtures("needs_namespaces"),
    pytest.mark.timeout(180),  # each starts several processes that import torch
]


@dataclass
class Job:
    """What each rank of a job over several hosts wrote."""

    hosts: list[list[int]]
    ranks: list[dict[str, Any]]

    def on_host(self, host: int, what: str) -> int:
        """Bytes that the ranks of a host sent."""
        return sum(self.ranks[rank]["traffic"][what] for rank in self.hosts[host])


def by_torchrun(cluster: Cluster, folder: Path) -> None:
    words = [str(folder), str(COUNT)]
    agents = [cluster.torchrun(host, 2, cases.main, words, folder / f"host{host}.txt") for host in range(2)]
    torchrun.finish(agents, LIMIT_S)


def by_itself(cluster: Cluster, folder: Path) -> None:
    cluster.run([2, 1, 1], [PROGRAM, str(folder), str(COUNT)], LIMIT_S)


LAYOUTS: list[tuple[list[list[int]], Callable[[Cluster, Path], None]]] = [
    ([[0, 1], [2, 3]], by_torchrun),
    ([[0, 1], [2], [3]], by_itself),
]


# test_training.py and test_engine.py have three hosts in `make test`, this file two.
@pytest.fixture(scope="module", params=[LAYOUTS[0], slow(LAYOUTS[1])], ids=["2 hosts x 2", "3 hosts x 2,1,1"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    hosts, launch = request.param
    folder = tmp_path_factory.mktemp("ranks")
    with Cluster(len(hosts), gbps=1.0, delay_ms=1.0) as cluster:
        launch(cluster, folder)
    return Job(hosts, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)])


@pytest.fixture(scope="module")
def one_host() -> list[dict[str, str]]:
    """The checksums of every case on one host, by rank."""
    through_comm = run_ranks(cases.suite, 4, ranks="threads", timeout=30)
    through_torch = torch_ranks.run(cases.through_torch, world_size=4)
    return [a | b for a, b in zip(through_comm, through_torch, strict=True)]


def test_an_all_reduce_sends_what_no_schedule_can_beat(job: Job) -> None:
    number = len(job.hosts)
    for host in range(number):
        share = 2 * (number - 1) / number
        assert job.on_host(host, "float32") == share * 4 * COUNT
        assert job.on_host(host, "bfloat16") == share * (4 + 2) / 2 * COUNT  # float32 partials one way, results back
        assert job.on_host(host, "float32 as bfloat16") == share * 2 * COUNT
        packets = job.ranks[job.hosts[host][0]]["traffic"]["packets"]
        assert packets == pytest.approx(4 * share * 4 * COUNT, rel=0.1)


def test_a_smaller_type_on_the_wire_rounds_the_same_everywhere(job: Job) -> None:
    found = [rank["traffic"] for rank in job.ranks]
    assert len({each["rounded"] for each in found}) == 1
    # Parts below 64 rounded to 8 bits, once or twice on the way, and the sum once.
    assert all(0.0 < each["largest error"] < 64 * 2**-9 * 4 for each in found)


def test_every_case_has_the_bits_of_one_host(job: Job, one_host: list[dict[str, str]]) -> None:
    for rank, found in enumerate(job.ranks):
        assert found["hosts"] == job.hosts
        assert found["order"] == "canonical"
        differ = [name for name in one_host[rank] if found["cases"].get(name) != one_host[rank][name]]
        assert not differ, f"rank {rank}"
        assert found["cases"].keys() == one_host[rank].keys()


def test_a_host_sees_only_what_it_is_joined_to() -> None:
    probe = f"import socket; socket.create_connection(('{namespaces.address(1)}', 9), timeout=1)"
    with Cluster(2) as cluster:
        words = [sys.executable, "-c", probe]
        joined = cluster.start(0, words, stderr=subprocess.PIPE, text=True)
        assert "refused" in joined.communicate(timeout=20)[1]
        cluster.cut(1)
        cut = cluster.start(0, words, stderr=subprocess.PIPE, text=True)
        assert "timed out" in cut.communicate(timeout=20)[1].lower()
        names = cluster.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in names)
