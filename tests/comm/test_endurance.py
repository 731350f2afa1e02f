"""Thousands of mixed collectives hold no more at the end than after the first; and growth is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.collectives.endurance import Held, endure, growth
from tests.support.choice import slow

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("calls", [900, slow(6000)])
def test_nothing_grows(calls: int) -> None:
    samples = [(done, held) for done, held, warm in endure(calls=calls, turn=calls // 15) if warm]
    assert len(samples) > 9
    assert samples[-1][0] >= calls
    assert growth(samples) == []


HELD = Held(rss_kb=100_000, descriptors=10, threads=20, mappings=400, memfds=9, shm_files=0, objects=1000)


@pytest.mark.parametrize("name", vars(HELD))
def test_growth_is_reported(name: str) -> None:
    each = {"rss_kb": 4096, "objects": 30}.get(name, 4)
    samples = [(k, replace(HELD, **{name: getattr(HELD, name) + each * k})) for k in range(9)]
    (told,) = growth(samples)
    assert told.startswith(f"{name} grew from at most ")


def test_memory_that_comes_and_goes_is_not_growth() -> None:
    samples = [(k, replace(HELD, threads=20 + k % 3, descriptors=10 + (k * 7) % 4)) for k in range(9)]
    assert growth(samples) == []
