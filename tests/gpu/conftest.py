"""Tests that need a GPU. `make gpu` runs them on a machine that has one; everywhere else they skip, and
tests/test_gpu_dry_run.py runs them on an emulated GPU, with few and small cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringcomm import _C

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "benchmarks" / "gpu")]


def why_not() -> str:
    if reason := _C.why_no_cuda():
        return reason
    if _C.build_info()["cuda"] == "emulated":
        return ""
    import torch

    return "" if torch.cuda.is_available() else "this torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if reason and HERE in Path(item.fspath).parents:
            item.add_marker(
                pytest.mark.skip(reason=f"needs a CUDA device: run make gpu on a machine with one ({reason})")
            )
