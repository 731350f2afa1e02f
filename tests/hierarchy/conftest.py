from __future__ import annotations

import pytest

from tests.support.hierarchy import namespaces


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    """Skips where no network namespaces can be made."""
    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)
