"""The GPU's conversions of narrow floats have the bits of the CPU engine's, for all of them and every kind of float."""

from __future__ import annotations

import pytest
import torch

from ringcomm import Communicator
from tests.gpu.on_gpu import in_threads, place, ranks

pytestmark = in_threads
LOWER = (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of a float: on both sides of every tie of a narrower type."""


def converted(comm: Communicator, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = place(source, comm.device)
    bucket = torch.zeros(x.numel(), dtype=dtype, device=x.device)
    comm.pack([x], bucket, 1.0)
    comm.barrier()
    return bucket.cpu()


def test_conversions_have_the_bits_of_the_cpu() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    halves = bits.to(torch.int16)
    floats = torch.cat([(bits << 16) | lower for lower in LOWER]).view(torch.float32)
    for source, dtype in (
        *((halves.view(narrow), torch.float32) for narrow in (torch.float16, torch.bfloat16)),
        *((floats, narrow) for narrow in (torch.float16, torch.bfloat16)),
    ):
        ours, cpu = (ranks(converted, 1, source, dtype, device=device)[0] for device in ("cuda:0", "cpu"))
        numbers = ~cpu.isnan()
        assert torch.equal(ours.isnan(), ~numbers), f"{source.dtype} to {dtype}"
        raw = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(ours.view(raw)[numbers], cpu.view(raw)[numbers]), f"{source.dtype} to {dtype}"


TIES = [1 + (2 * k + 1) / steps for steps in (8, 16) for k in range(steps // 2)]
"""Times a power of two: halfway between two float8_e5m2, or two float8_e4m3fn."""
FACTORS = [
    *(factor for tie in TIES for factor in (tie - 2**-23, tie, tie + 2**-23)),
    *(2.0**-k for k in range(12)),  # down to the ties of the smallest
    *(-1.0, 1.5, 1e3, 1e30, 1e38),  # up to infinity
]


def scaled(comm: Communicator, source: torch.Tensor) -> torch.Tensor:
    """Widened, times a factor, narrowed."""
    found = []
    for factor in FACTORS:
        x = place(source, comm.device)
        comm.all_reduce(x, "premul_sum", factor=factor)
        comm.barrier()
        found.append(x.cpu().view(torch.uint8))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_have_the_bits_of_the_cpu(name: str) -> None:
    dtype = getattr(torch, name)
    every = torch.arange(256).to(torch.uint8).view(dtype)
    ours, cpu = (ranks(scaled, 1, every, device=device)[0] for device in ("cuda:0", "cpu"))
    assert len(cpu.unique()) > 250
    for factor, mine, theirs in zip(FACTORS, ours, cpu, strict=True):
        assert torch.equal(mine, theirs), f"{name} times {factor}"
