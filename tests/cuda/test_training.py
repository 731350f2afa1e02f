"""Training through the CUDA kernels, on an emulated device: every stage has the CPU engine's bits."""

from __future__ import annotations

import pytest

from tests.support.choice import slow
from tests.support.emulated import call


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["", slow("bfloat16")])  # test_parity.py has every precision
def test_every_stage_has_the_bits_of_the_cpu_engine(dtype: str) -> None:
    call("tests.support.cuda.training", "stages", 3, dtype)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        slow({"pp": 1, "dp": 1, "tp": 3}, "1f1b"),
        ({"pp": 2, "dp": 1, "tp": 2}, "1f1b"),  # the stages over dp are the test above
        slow({"pp": 2, "dp": 2, "tp": 1}, "zero-bubble"),
    ],
)
def test_a_mesh_has_the_bits_of_the_cpu_engine(axes: dict[str, int], schedule: str) -> None:
    call("tests.support.cuda.parallel", "compositions", axes, schedule)
