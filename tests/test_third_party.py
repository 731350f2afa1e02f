"""Third-party models and loops, unmodified: torch's DDP and every stage end with the same bits."""

from __future__ import annotations

import importlib.util

import pytest
import third_party
from third_party import PROGRAMS, WAYS, verdicts

SEEDS = (0,)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_as_torch_s_ddp_at_every_stage(name: str, seed: int) -> None:
    if importlib.util.find_spec(PROGRAMS[name].package) is None:
        pytest.skip(f"needs {PROGRAMS[name].package}")
    found = verdicts(name, seed)
    assert {way: told for way, told in found.items() if told != "equal" and not told.startswith("refused")} == {}
    assert set(found) == set(WAYS)
