"""What the GPU tests share: ranks on one device, and their arrays. On an emulated device those are the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringcomm
from benchmarks.gpu.one_thread import PLACE, communicators, synchronize, together  # noqa: F401  for the tests
from ringcomm.arrays.devices import EMULATED

LIMITS_S = {"threads": 200, "processes": 400} if EMULATED else {"threads": 15, "processes": 60}
"""Of a test, by what its ranks are: `in_threads` and `in_processes` set them; a call has two thirds."""
in_threads, in_processes = (pytest.mark.timeout(limit_s) for limit_s in LIMITS_S.values())
real = pytest.mark.skipif(EMULATED, reason="needs a CUDA device that torch sees; an emulated one is not enough")


def ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, kind: str = "threads", device: str = "cuda:0"
) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, *args, ranks=kind, timeout=LIMITS_S[kind] * 2 / 3, device=device)


def place(x: torch.Tensor, on: str) -> torch.Tensor:
    """A copy of ``x`` where a communicator on device ``on`` takes it."""
    return x.clone() if on == "cpu" or EMULATED else x.to(on, copy=True)
