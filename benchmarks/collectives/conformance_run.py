"""The part of `conformance.py` that runs in a process with torch: loads one of torch's test suites, and runs each test
separately.

Every test runs in its own process, forked from one that has imported torch, and so do its ranks. (torch would spawn
them, and each would import torch again, which takes hours in place of minutes.) When a test makes a group over Gloo,
the last step of `init_process_group` and `new_group` makes it over the tested backend instead, without the test
noticing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DISTRIBUTED_TEST = "distributed_test"  # torch.testing._internal.distributed.distributed_test, in every wheel of torch
GLOO = "gloo"
IMPORT = "(import)"
LONGEST_ERROR = 6000
THIRD_PARTY = re.compile(r"^(\w+\.)*\w*(Error|Exception|Mismatch|Timeout|Interrupt)\b")
OUTER = "RuntimeError: Process "  # torch's prefix of a rank's error


@dataclass(frozen=True)
class Job:
    """One suite with one backend. ``ranks`` 0: the number that each test asks for."""

    suite: str
    ranks: int
    backend: str


@dataclass(frozen=True)
class Record:
    """The result of one test, a line of the log."""

    suite: str
    ranks: int
    backend: str
    test: str
    outcome: str  # passed, failed or skipped
    groups: int  # number of the backend's groups that its ranks made, counted on every rank
    seconds: float
    error: str  # the traceback, or the reason for skipping

    @property
    def first_line(self) -> str:
        """Returns the first line of the error itself, without the traceback and torch's prefix."""
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        named = [line for line in lines if THIRD_PARTY.match(line) and not line.startswith(OUTER)]
        return (named or lines or ["no output"])[0]


class Name(str):
    """The name of a backend that equals "gloo" in comparisons, because some tests ask for it to learn that tensors
    are on the CPU."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == GLOO or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Tests:
    """The tests of one job, each run separately."""

    def __init__(self, job: Job, folder: Path | None, limit_s: float) -> None:
        self.job, self.limit_s = job, limit_s
        self.groups = os.memfd_create("groups")  # a byte for every process group that a rank made
        # Otherwise ranks that write at the same time would write at one position.
        fcntl.fcntl(self.groups, fcntl.F_SETFL, os.O_APPEND)
        os.environ.update(_environment(job.ranks, limit_s))
        import ringcomm  # noqa: F401  registers the backend

        _fork_ranks(limit_s)
        _swap(job.backend, self.groups)
        module = _wheel_suite(job.backend) if job.suite == DISTRIBUTED_TEST else _file_suite(job.suite, folder)
        found = _flat(unittest.defaultTestLoader.loadTestsFromModule(module))
        self.cases = {_name(case): case for case in found if not _on_threads(case)}

    def run(self, name: str) -> Record:
        """Runs one test, and kills the processes that it leaves running."""
        os.lseek(self.groups, 0, os.SEEK_SET)
        os.truncate(self.groups, 0)
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        began = time.monotonic()
        process = context.Process(target=_run_one, args=(self.cases[name], there))
        process.start()
        there.close()
        outcome, error = self._answer(here)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        groups = os.fstat(self.groups).st_size
        return Record(**asdict(self.job), test=name, outcome=outcome, groups=groups,
                      seconds=round(time.monotonic() - began, 1), error=error[-LONGEST_ERROR:])  # fmt: skip

    def _answer(self, pipe: multiprocessing.connection.Connection) -> tuple[str, str]:
        # The ranks' own time limit is shorter: torch then reports where each of them is.
        if not pipe.poll(self.limit_s + 20):
            return "failed", f"TimeoutError: no end within {self.limit_s + 20:g} s"
        try:
            return pipe.recv()
        except EOFError:
            return "failed", "SystemError: the process died"


def serve(job: Job, folder: Path | None, limit_s: float, wanted: Callable[[str], bool], log: Path) -> None:
    """Runs the wanted tests of a job, and writes a line in the log for each."""

    def note(record: Record) -> None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(record)) + "\n")
        print(f"{record.outcome:8}{record.backend:9} {record.suite} {record.test} {record.seconds:g} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:  # torch's tests leave files behind
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        try:
            tests = Tests(job, folder, limit_s)
        except (Exception, SystemExit) as error:
            if wanted(IMPORT):
                text = f"{type(error).__name__}: {error}"
                note(Record(**asdict(job), test=IMPORT, outcome="skipped", groups=0, seconds=0.0, error=text))
            return
        for name in tests.cases:
            if wanted(name):
                note(tests.run(name))


def _environment(ranks: int, limit_s: float) -> dict[str, str]:
    return {
        "BACKEND": GLOO,
        "WORLD_SIZE": str(ranks or 4),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(limit_s)),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


def _fork_ranks(limit_s: float) -> None:
    """Makes ranks fork, and limits their time."""
    multiprocessing.set_start_method("fork", force=True)  # torch's later set_start_method("spawn") has no effect
    from torch.testing._internal import common_distributed as common

    def start(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    common.MultiProcessTestCase._spawn_processes = start
    for name, longest in common.TIMEOUT_OVERRIDE.items():
        common.TIMEOUT_OVERRIDE[name] = min(int(limit_s), longest)


def _swap(backend: str, counter: int) -> None:
    """Makes process groups over ``backend`` in place of Gloo, and counts them."""
    from torch.distributed import Backend
    from torch.distributed import distributed_c10d as c10d

    original = c10d._new_process_group_helper
    signature = inspect.signature(original)

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = str(call.arguments["backend"])
        made = re.sub(rf"\b{GLOO}\b", backend, GLOO if asked == Backend.UNDEFINED else asked)
        if backend in made:
            os.write(counter, b".")
            call.arguments["backend"] = Backend(made)
            if backend != GLOO:
                call.arguments["backend_options"] = None  # they would be Gloo's
        return original(*call.args, **call.kwargs)

    c10d._new_process_group_helper = helper


def _wheel_suite(backend: str) -> Any:
    """Returns torch's suite for any backend. It is imported as for Gloo, so that it skips the same tests; then its
    backend is set, and takes the place of Gloo in its lists of backend capabilities."""
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test as suite

    class TestDistBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    os.environ["BACKEND"] = backend
    suite.BACKEND = Name(backend)
    lists = [suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS]
    for known in [*lists, suite.CUDA_PROFILING_SUPPORTED_BACKENDS]:
        known.append(backend)
    for table in (DistTestCases.backend_feature, DistTestCases.skip_collective):
        for known in table.values():
            known.update({backend} if GLOO in known else set())
    suite.TestDistBackend = TestDistBackend  # the only class that the loader finds
    return suite


def _file_suite(name: str, folder: Path | None) -> Any:
    """Returns a file of torch's test/distributed as a module."""
    assert folder is not None
    path = folder / name
    # These files import one another by the names that they have in torch's own runs, wherever its checkout is.
    sys.path[:0] = [str(path.parent), str(folder), str(folder.parent)]
    return importlib.import_module(path.stem)


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flat(each)
        else:
            yield each


def _on_threads(case: unittest.TestCase) -> bool:
    """Whether a test's ranks are threads, over a test-only backend of torch."""
    from torch.testing._internal.common_distributed import MultiThreadedTestCase

    return isinstance(case, MultiThreadedTestCase)


def _name(case: unittest.TestCase) -> str:
    return ".".join(case.id().split(".")[-2:])


def _run_one(case: unittest.TestCase, pipe: multiprocessing.connection.Connection) -> None:
    """Runs a test in its own process, with output suppressed, and sends the result."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    if int(getattr(case, "world_size", 1)) == 0:  # one rank per GPU: torch lets such a test pass without a GPU
        return pipe.send(("skipped", "no ranks without GPUs"))
    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    broken = [text for _, text in result.failures + result.errors]
    broken += ["AssertionError: a failure was expected" for _ in result.unexpectedSuccesses]
    if broken:
        pipe.send(("failed", "\n".join(broken)))
    elif result.skipped:
        pipe.send(("skipped", result.skipped[0][1]))
    else:
        pipe.send(("passed", ""))
