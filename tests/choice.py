"""Which cases of a test `make test` runs. `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that `make test-all` adds."""
    return pytest.param(*values, marks=pytest.mark.slow)


def choose(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """The values, of which `make test` takes those that are chosen."""
    return [value if value in chosen else slow(value) for value in values]
