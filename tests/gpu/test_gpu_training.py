"""Training on a device: every stage the same bits, through real streams and memory of the device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.on_gpu import EMULATED, PLACE, in_processes, ranks, real
from tests.support.cuda.training import every_stage, late_collectives, train_on

pytestmark = in_processes


@pytest.mark.parametrize("world_size", [1, 3] if not EMULATED else [2])
def test_every_stage_trains_to_the_same_bits(world_size: int) -> None:
    assert ranks(every_stage, world_size, str(PLACE), kind="processes") == [6] * world_size


@real
def test_every_stage_waits_for_its_collectives() -> None:
    ranks(late_collectives, 2, str(PLACE), kind="processes")


@real
def test_master_weights_in_the_hosts_memory_change_no_bit() -> None:
    apart = ranks(train_on, 2, 2, "bfloat16", str(PLACE), True, kind="processes")
    for mine, theirs in zip(apart, ranks(train_on, 2, 2, "bfloat16", str(PLACE), kind="processes"), strict=True):
        for name in theirs[1]:  # AdamW of the host and of the device may round differently
            torch.testing.assert_close(
                *(torch.frombuffer(bytearray(each[1][name]), dtype=torch.float32) for each in (mine, theirs)),
                rtol=1e-3,
                atol=1e-4,
            )
