"""benchmarks/checksums.py: a checksum sees every bit, and is the same in every run and at every stage."""

from __future__ import annotations

import pytest
import torch

import ringcomm
from benchmarks import checksums

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_digest_sees_every_bit_but_not_which_nan_was_computed() -> None:
    zeros = torch.zeros(3)
    assert checksums.digest([zeros]) == checksums.digest([zeros.clone()])
    assert checksums.digest([zeros]) != checksums.digest([-zeros])
    assert checksums.digest([zeros]) != checksums.digest([zeros[:2]])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    first, second = nans[:1], nans[1:]
    assert checksums.digest([first]) != checksums.digest([second])
    assert checksums.digest([first], computed=True) == checksums.digest([second], computed=True)
    assert checksums.digest([first], computed=True) != checksums.digest([zeros[:1]], computed=True)


def test_collectives_have_the_same_checksums_again_and_whatever_the_algorithm() -> None:
    seen = [checksums.merged(ringcomm.run_ranks(checksums.collectives, 3, ("bfloat16",), ("uint8",))) for _ in range(2)]
    assert seen[0] == seen[1]
    for op in checksums.OPS["bfloat16"]:
        each = {seen[0][f"all_reduce {algorithm} bfloat16 {op}"] for algorithm in ("auto", "direct", "oneshot")}
        assert len(each) == 1, op
    assert len({*seen[0].values()}) > len(seen[0]) // 2


def test_every_stage_has_the_same_checksums() -> None:
    names = ("clipped", "bfloat16")
    stages = [checksums.merged(ringcomm.run_ranks(checksums.training, 2, stage, names)) for stage in (0, 3)]
    assert stages[0] == stages[1]
    assert len({*stages[0].values()}) == len(names)
