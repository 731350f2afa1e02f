"""Third-party models and loops, unmodified: torch's DDP and every stage end with the same bits."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from tests.support.choice import choose
from tests.support.training.third_party import PROGRAMS, WAYS, Outcome, difference_of, error_of, outcomes_of, verdicts


def is_good(told: str) -> bool:
    """A known optimizer with a sum over all parameters may be refused; everything else must agree."""
    return told == "equal" or told.startswith("refused")


# A recurrent network, convolutions, a transformer that writes text, adapters, gradients of gradients, layers that are
# unfrozen on the way, an optimizer of another package, and one that may be refused.
USUAL = ("LSTM", "DenseNet", "GPT-2", "LoRA", "WGAN-GP", "staged unfreezing", "Prodigy")


@pytest.mark.parametrize("name", choose(PROGRAMS, USUAL))
def test_the_same_bits_as_torch_s_ddp_at_every_stage(name: str) -> None:
    if importlib.util.find_spec(PROGRAMS[name].package) is None:
        pytest.skip(f"needs {PROGRAMS[name].package}")
    found = verdicts(name, 0)
    assert {way: told for way, told in found.items() if not is_good(told)} == {}
    assert list(found) == list(WAYS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_configurations(name: str) -> None:
    for seed in range(1, 21):
        assert {way: told for way, told in verdicts(name, seed).items() if not is_good(told)} == {}, f"seed {seed}"


def test_a_difference_would_be_seen() -> None:
    """The last bit of one value on one rank, a value that is missing, -0 for 0."""
    expected = [Outcome({"x": torch.zeros(3), "y": torch.ones(2)}) for _ in range(3)]
    assert difference_of(expected, copy.deepcopy(expected)) == ""
    last_bit, missing, sign = (copy.deepcopy(expected) for _ in range(3))
    last_bit[2].values["y"][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    del missing[1].values["x"]
    sign[0].values["x"][0] = -0.0
    assert difference_of(expected, last_bit).startswith("rank 2: 1 of 2 values differ, first y, by 1.2e-07")
    assert difference_of(expected, missing) == "rank 1: 1 of 2 values differ, first x"
    assert difference_of(expected, sign).startswith("rank 0: 1 of 2 values differ, first x")


def test_a_program_learns_and_ranks_have_their_own_batches() -> None:
    """What is compared is not empty, differs between ranks where it should, and between seeds."""
    first, other = (outcomes_of("LSTM", seed, 2) for seed in (0, 1))
    assert error_of(first) == error_of(other) == ""
    losses = [[float(x) for name, x in each.values.items() if name.startswith("loss")] for each in first]
    assert len(losses[0]) == 3
    assert len({each[0] for each in losses}) == 3
    assert torch.equal(first[0].values["model.decoder.bias"], first[1].values["model.decoder.bias"])
    assert difference_of(first, other) != ""
