"""torch.distributed.rpc, dist_autograd and distributed.optim in one program with a process group of ours."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from examples import rpc as example
from tests.support import torch_ranks

pytestmark = pytest.mark.timeout(60)


def _rank(steps: int) -> tuple[str, list[float]]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    losses = example.run(steps, f"file://{os.environ['RINGCOMM_TEST_FOLDER']}/rpc")
    return dist.get_backend(), losses


def test_a_model_trains_by_calls_and_collectives_at_once() -> None:
    found = torch_ranks.run(_rank, 40, world_size=3)
    assert {backend for backend, _ in found} == {"ringcomm"}
    assert found[0][1] == []
    assert found[1][1] == found[2][1]  # the mean of both trainers
    assert found[1][1][-1] < 0.7 * found[1][1][0]
