"""Processes for ranks, started in milliseconds: forked from one that has imported torch and has no threads, where a new
Python imports it for seconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringcomm import _C
from ringcomm.comm import launch

IMPORTED = ("torch._dynamo", "pytest", *(f"ringcomm.{part}" for part in ("backend", "data_parallel", "comm.launch")))


@functools.cache
def server() -> Any:
    """multiprocessing's context that forks a server, with what takes long to import. It forks without threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *IMPORTED])
    return context


def context() -> Any:
    """What makes processes and pipes, as multiprocessing's contexts do."""
    if _C.build_info()["cuda"] == "emulated":  # the server would have the installed `_C`
        # A fork of a process with threads may copy a lock that one holds.
        alone = threading.active_count() == len(list(Path("/proc/self/task").iterdir())) == 1
        return SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_of_this_process) if alone else _NEW_PYTHONS
    if _C.why_no_cuda():
        return SimpleNamespace(Pipe=server().Pipe, Process=_of_the_server)
    return _NEW_PYTHONS  # beside a GPU they start as they do for a user


_NEW_PYTHONS = multiprocessing.get_context("spawn")


def replacement() -> Any:
    """What takes the place of the module multiprocessing in ringcomm.comm.launch."""
    return SimpleNamespace(get_context=lambda kind: context(), current_process=multiprocessing.current_process)


def install() -> None:
    """From now on `ringcomm.run_ranks` makes its processes so."""
    launch.multiprocessing = replacement()  # type: ignore[attr-defined]


def run(target: Callable[..., Any], *args: Any, limit_s: float) -> subprocess.CompletedProcess[str]:
    """What a function and the processes that it starts wrote, and its exit code, as of a program in a new Python.
    TimeoutError: it ran for longer; then all of them are ended."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-test-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context().Process(target=_written, args=(str(out), str(err), target, *args))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may have no group of its own yet
            process.join()
            raise TimeoutError(
                f"{target.__name__} did not end within {limit_s:g} s\n{out.read_text()}{err.read_text()}"
            )
        return subprocess.CompletedProcess([], process.exitcode, out.read_text(), err.read_text())


def _written(out: str, err: str, target: Callable[..., Any], *args: Any) -> None:
    os.setsid()
    for to, path in enumerate((out, err), 1):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), to)
    target(*args)


def _of_the_server(target: Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> Any:
    """With the environment of this process as it is now: the server's is older."""
    return server().Process(target=_with_environment, args=(dict(os.environ), target, *args), **options)


def _of_this_process(target: Callable[..., Any], args: tuple[Any, ...] = (), **options: Any) -> Any:
    return multiprocessing.get_context("fork").Process(target=_like_a_new_python, args=(target, *args), **options)


def _with_environment(environment: dict[str, str], target: Callable[..., Any], *args: Any) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    _like_a_new_python(target, *args)


def _like_a_new_python(target: Callable[..., Any], *args: Any) -> None:
    gc.freeze()  # the garbage collector does not look through what was imported
    for info in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        if info.func.__module__ == "torch.library":  # torch would take back its operators one by one
            info.atexit = False
    try:
        target(*args)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out of what it forked
