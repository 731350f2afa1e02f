"""Shows a communicator's calls by name in a profile of torch: "ringcomm:all_reduce", like a torch backend's calls."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

profiler: Any = SimpleNamespace(_is_profiler_enabled=False)
"""torch.autograd.profiler, once `look` has found it. Every call reads it directly, to save a function call."""


def look() -> None:
    """Finds the profiler if torch has been imported."""
    global profiler
    profiler = sys.modules.get("torch.autograd.profiler", profiler)


def named(op: str) -> AbstractContextManager[Any]:
    """Inside, a profile shows the call ``op``; for an asynchronous call it shows the start."""
    look()
    return profiler.record_function(f"ringcomm:{op}") if profiler._is_profiler_enabled else nullcontext()
