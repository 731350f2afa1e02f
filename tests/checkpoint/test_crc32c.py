"""The checksums of a checkpoint: CRC-32C, by the processor's instruction and by tables."""

from __future__ import annotations

import mmap
import random

import pytest

from ringcomm._C import crc32c

BY_INSTRUCTION = pytest.mark.parametrize("by_instruction", [True, False])


def bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@BY_INSTRUCTION
@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_values(data: bytes, expected: int, by_instruction: bool) -> None:
    assert crc32c(data, by_instruction=by_instruction) == expected


@BY_INSTRUCTION
def test_every_length_and_alignment(by_instruction: bool) -> None:
    data = random.Random(1).randbytes(64)
    for start in range(9):
        for end in range(start, 50):
            assert crc32c(memoryview(data)[start:end], by_instruction=by_instruction) == bit_by_bit(data[start:end])


def test_long_data_is_added_in_runs() -> None:
    data = random.Random(2).randbytes(40_000)  # three runs of 4,096 bytes are added side by side
    lengths = {runs * 12288 + more for runs in (1, 2, 3) for more in (-8, -1, 0, 1, 7, 8, 4096)}
    for start in (0, 1, 5):
        for length in lengths:
            part = memoryview(data)[start : start + length]
            assert crc32c(part) == crc32c(part, by_instruction=False)


@BY_INSTRUCTION
def test_data_in_parts(by_instruction: bool) -> None:
    data = random.Random(3).randbytes(20_000)
    for cut in (0, 1, 7, 8, 12_288, 20_000):
        first = crc32c(data[:cut], by_instruction=by_instruction)
        assert crc32c(data[cut:], first, by_instruction) == crc32c(data)


def test_any_contiguous_buffer() -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:9] = b"123456789"
        with memoryview(memory) as view, view[:9] as part:
            assert crc32c(part) == 0xE3069283
    with pytest.raises(BufferError):
        crc32c(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError):
        crc32c("123456789")  # type: ignore[arg-type]
