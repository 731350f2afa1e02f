"""Tests that need a GPU. `make gpu` runs them on a machine that has one; everywhere else they skip, and
tests/cuda/test_gpu_dry_run.py runs them on an emulated GPU, with few and small cases.

Where RINGCOMM_GPU_OUT names a gpu.json, the outcome of each test is put there, and tests that are in it are left out: a
process that has lost the GPU ends, and another goes on."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from benchmarks.gpu.document import BEGUN, LOST, Document
from ringcomm import _C

HERE = Path(__file__).resolve().parent
OUT = os.environ.get("RINGCOMM_GPU_OUT", "")
_lost = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "more: for a GPU, of the cases that make gpu-more runs")


def why_not() -> str:
    if reason := _C.why_no_cuda():
        return reason
    if _C.build_info()["cuda"] == "emulated":
        return ""
    import torch

    return "" if torch.cuda.is_available() else "this torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    known = Document(Path(OUT)).part("tests") if OUT else {}
    items[:] = [item for item in items if item.nodeid not in known]
    for item in items:
        if reason and HERE in Path(item.fspath).parents:
            item.add_marker(
                pytest.mark.skip(reason=f"needs a CUDA device: run make gpu on a machine with one ({reason})")
            )


# ---- what came of them -----------------------------------------------------------------------------------------------


def pytest_runtest_logstart(nodeid: str) -> None:
    if OUT:
        Document(Path(OUT)).put("tests", {nodeid: BEGUN})


def said(report: pytest.TestReport) -> str:
    """The outcome of a test in one line."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return f"SKIP: {reason.removeprefix('Skipped: ')}"
    if report.passed:
        return f"PASS: {report.duration:.1f} s"
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"FAIL: {str(crash.message if crash else report.longrepr).splitlines()[0][:300]}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if OUT and (report.when == "call" or not report.passed):
        Document(Path(OUT)).put("tests", {report.nodeid: said(report)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if OUT and report.failed:
        from benchmarks.gpu import one_thread

        if one_thread.context_is_lost():
            item.session.shouldstop = "the CUDA context of this process is lost"
            item.config.stash[_lost] = True
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_lost, False):
        session.exitstatus = LOST
    elif OUT:
        Document(Path(OUT)).end("tests")
