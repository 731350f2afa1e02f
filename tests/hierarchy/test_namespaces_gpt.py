"""Training over several hosts, as network namespaces, ends with the bits of one host, at every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import torchrun
from tests.support.hierarchy.namespaces import Cluster
from tests.support.training import runs

PROGRAM = str(runs.EXAMPLES / "train_gpt.py")
LIMIT_S = 100.0
pytestmark = [
    pytest.mark.usefixtures("needs_namespaces"),
    pytest.mark.timeout(180),  # each starts several processes that import torch
]
SMALL = (
    "--steps",
    "3",
    "--batch",
    "1",
    "--context",
    "32",
    "--layers",
    "1",
    "--dim",
    "32",
    "--heads",
    "2",
    "--sample",
    "0",
)


Outcome = tuple[str, list[list[str]]]


def outcome(text: str) -> Outcome:
    """The checksum of all parameters, and the losses on the way."""
    return runs.checksum(text), runs.steps(text)


@pytest.fixture(scope="module")
def one_host() -> Outcome:
    """Of 4 ranks on one host, at stage 0."""
    text, status = runs.train(*SMALL, world_size=4)
    assert status == 0, text
    return outcome(text)


@pytest.mark.slow  # test_namespaces.py starts two hosts so, and the training is that of three hosts
@pytest.mark.parametrize("stage", ["0", "3"])
def test_two_hosts_of_two_ranks_train_as_one_host(stage: str, one_host: Outcome, tmp_path: Path) -> None:
    with Cluster(2) as cluster:
        words = [*SMALL, "--stage", stage]
        agents = [cluster.torchrun(h, 2, runs.run_program, words, tmp_path / f"host{h}.txt") for h in range(2)]
        text = torchrun.finish(agents, LIMIT_S)
        sent = cluster.sent_bytes(0)
    assert outcome(text) == one_host
    assert len(outcome(text)[1]) == 3
    assert sent > 100_000  # over the network, not around it


@pytest.mark.slow  # test_training.py has three hosts, test_namespaces.py the network
def test_three_hosts_of_two_one_and_one_ranks_train_as_one_host(one_host: Outcome) -> None:
    with Cluster(3) as cluster:
        text = cluster.run([2, 1, 1], [PROGRAM, *SMALL, "--stage", "3"], LIMIT_S)[0]
    assert outcome(text) == one_host
