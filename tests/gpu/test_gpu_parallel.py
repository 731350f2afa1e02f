"""Tensor, pipeline and context parallel on a device."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.gpu.on_gpu import EMULATED, PLACE, in_processes, ranks
from tests.support.cuda.parallel import attend, train_on

pytestmark = in_processes


def losses(found: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(found[:4])), dtype=torch.float32)


@cache
def alone() -> torch.Tensor:
    """Losses of one rank."""
    return losses(ranks(train_on, 1, {"pp": 1, "dp": 1, "tp": 1}, str(PLACE), "1f1b", kind="processes")[0])


@pytest.mark.parametrize("schedule", ["1f1b"] if EMULATED else ["1f1b", "zero-bubble"])
def test_a_pipeline_has_the_losses_of_one_rank(schedule: str) -> None:
    found = ranks(train_on, 2, {"pp": 2, "dp": 1, "tp": 1}, str(PLACE), schedule, kind="processes")
    for each in found:
        torch.testing.assert_close(losses(each), alone(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3] if not EMULATED else [2])
def test_tensor_parallel_has_the_losses_of_one_rank(world_size: int) -> None:
    found = ranks(train_on, world_size, {"pp": 1, "dp": 1, "tp": world_size}, str(PLACE), "1f1b", kind="processes")
    for each in found:
        torch.testing.assert_close(losses(each), alone(), rtol=1e-4, atol=1e-5)


def test_ring_attention_runs_twice_to_the_same_bits() -> None:
    kind = "threads" if EMULATED else "processes"  # threads would share the one backward thread of torch's device
    assert ranks(attend, 2, str(PLACE), kind=kind) == ranks(attend, 2, str(PLACE), kind=kind)
