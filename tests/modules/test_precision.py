"""Element types on the wire: the same bits at every stage, as exact as they say, and what they lose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import MixedPrecision

WORLD = 3
WIRES = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}  # half an ulp


class Given(nn.Module):
    """A parameter whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(7, 50))
        self.second = nn.Parameter(torch.zeros(33))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (self.first * first).sum() + (self.second * second).sum()


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    magnitudes = 10 ** torch.empty(7, 50).uniform_(-2, 2, generator=generator)
    return torch.randn(7, 50, generator=generator) * magnitudes, torch.randn(33, generator=generator) * 1e-6


def means(stage: int, wire: str, bucket_cap_mb: float) -> list[dict[str, torch.Tensor]]:
    """What SGD with lr = -1 from zero leaves in the parameters."""
    models = [Given() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> dict[str, torch.Tensor]:
        model = models[comm.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        precision = MixedPrecision(reduce_dtype=getattr(torch, wire))
        ringcomm.shard(model, optimizer, stage, comm, mixed_precision=precision, bucket_cap_mb=bucket_cap_mb)
        (-model(*given(comm.rank))).backward()
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    return ringcomm.run_ranks(rank, WORLD, timeout=20)


@pytest.mark.parametrize("wire", WIRES)
def test_a_narrow_wire_gives_the_same_bits_at_every_stage_and_bucket_size(wire: str) -> None:
    expected = means(0, wire, 25)[0]
    for stage in range(4):
        for cap in (25, 0.0001):
            for got in means(stage, wire, cap):
                assert all(torch.equal(got[name], expected[name]) for name in expected), (stage, cap)


@pytest.mark.parametrize("wire", WIRES)
def test_a_narrow_wire_rounds_as_it_says(wire: str) -> None:
    found = means(2, wire, 25)[0]
    everyone = [given(rank) for rank in range(WORLD)]
    narrow = torch.finfo(getattr(torch, wire))
    for name, each in zip(("first", "second"), zip(*everyone, strict=True), strict=True):
        stacked = torch.stack(each).double()
        # Each rank's value rounds once to the wire, and the mean once more; the smallest step is the type's own.
        scale = float(stacked.abs().max()) / narrow.max if narrow.bits == 8 else 1.0
        step = narrow.smallest_normal * narrow.eps * scale
        bound = WIRES[wire] * (stacked.abs().mean(0) + stacked.mean(0).abs()) * 1.07 + step
        error = (found[name].double() - stacked.mean(0)).abs()
        assert bool((error <= bound).all()), name
        assert float(error.max()) > 0, "nothing was rounded: it did not travel in that type"


def test_an_8_bit_wire_loses_what_is_small_beside_the_largest() -> None:
    def lost(small: float) -> bool:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ringcomm.shard(model, optimizer, 0, mixed_precision=MixedPrecision(reduce_dtype=torch.float8_e4m3fn))
        first = torch.full((7, 50), small)
        first[0, 0] = 1.0
        (-model(first, torch.ones(33))).backward()
        optimizer.step()
        return float(model.first.detach()[1, 1]) == 0

    assert lost(2.0**-19)
    assert not lost(2.0**-17)


@pytest.mark.parametrize(
    "wrong", [{"param_dtype": torch.int8}, {"reduce_dtype": torch.int32}, {"master_dtype": "fp32"}]
)
def test_other_types_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match=f"MixedPrecision: got {next(iter(wrong))}="):
        MixedPrecision(**wrong)
