"""Which cases of a test `make test` runs, and how many examples hypothesis draws. `make test-all` runs all cases."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def slow(*values: Any, id: str | None = None) -> Any:
    """A case that `make test-all` adds."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def choose(values: Iterable[Any], chosen: Collection[Any], by: str = "") -> list[Any]:
    """The values, of which `make test` takes those that are chosen, ``by`` one of their attributes."""
    found = [(value, attrgetter(by)(value) if by else value) for value in values]
    unknown = [each for each in chosen if all(each != name for _, name in found)]
    assert not unknown, f"no value is {unknown}"
    return [value if name in chosen else slow(value) for value, name in found]


def drawn(examples: int) -> settings:
    """The same examples in every run; RINGCOMM_FUZZ=N draws N times as many, other ones each time."""
    times = int(os.environ.get("RINGCOMM_FUZZ", "1"))
    return settings(
        max_examples=examples * times,
        derandomize=times == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
