"""Training through the CUDA kernels, on an emulated device: every stage has the CPU engine's bits."""

from __future__ import annotations

import pytest
from emulated import call


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_every_stage_has_the_bits_of_the_cpu_engine(dtype: str) -> None:
    call("cuda_training", "stages", 3, dtype)
