"""A communicator's calls under their names in a profile of torch: "ringcomm:all_reduce", as the backend's are."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

profiler: Any = SimpleNamespace(_is_profiler_enabled=False)
"""torch.autograd.profiler, once `look` has found it. Each call asks it, so there is no function around it."""


def look() -> None:
    """Finds the profiler where somebody has imported torch."""
    global profiler
    profiler = sys.modules.get("torch.autograd.profiler", profiler)


def named(op: str) -> AbstractContextManager[Any]:
    """Inside, a profile shows the call ``op``; of an asynchronous one that is its start."""
    look()
    return profiler.record_function(f"ringcomm:{op}") if profiler._is_profiler_enabled else nullcontext()
