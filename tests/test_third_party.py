"""Third-party models and loops, unmodified: torch's DDP and every stage end with the same bits."""

from __future__ import annotations

import importlib.util

import pytest
from third_party import PROGRAMS, verdicts

SEEDS = (0,)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_as_torch_s_ddp_at_every_stage(name: str, seed: int) -> None:
    if importlib.util.find_spec(PROGRAMS[name].package) is None:
        pytest.skip(f"needs {PROGRAMS[name].package}")
    found = verdicts(name, seed)
    assert {way: told for way, told in found.items() if told != "equal" and not told.startswith("refused")} == {}
    assert {0, 1, 2, 3} <= set(found)
