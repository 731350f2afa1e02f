"""The native builds of the tests, once for each kind, and the emulated CUDA engine for Python tests: functions run in a
Python that has it.

As a module: `call("tests.support.cuda.cases", "lists", 3)`. As a program, and in every process that such a program
starts: puts the emulated `_C` in the place of the installed one before anything else imports it, and makes the calls
that come.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import ROOT

MODULE = "RINGCOMM_TEST_MODULE"  # path of the emulated `_C`, for children
# The core then takes half the time to compile and no more to run; the plain build is optimized as the installed one is.
INSTRUMENTED = ("-DCMAKE_BUILD_TYPE=Instrumented", "-DCMAKE_CXX_FLAGS_INSTRUMENTED=-O1 -DNDEBUG")
PLAIN = {"CMAKE_BUILD_TYPE": "Release", "RINGCOMM_ONLY": "", "RINGCOMM_CXX11_ABI": "1", "RINGCOMM_SANITIZE": ""}
"""CMake's settings of a build whose core the plain build of the tests can use."""


EMULATES = platform.machine() == "x86_64"


def tool(name: str) -> str:
    import pytest

    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"the C++ tests and the emulated engine are built with {name}; pip install {name}")
    return path


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """One process at a time builds there: the tests may run in several."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # closing it lets go
        yield


def run(*words: str, limit_s: float) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def installed() -> Path | None:
    """The build that the installed package came from, if there is one whose core the tests can use."""
    for settings in sorted((ROOT / "build").glob(f"{sys.implementation.cache_tag}-*/CMakeCache.txt"), reverse=True):
        known = dict(re.findall(r"^(\w+):\w+=(.*)$", settings.read_text(), re.MULTILINE))
        if all(known.get(name) == value for name, value in PLAIN.items()):
            return settings.parent
    return None


@cache
def build(kind: str, *targets: str) -> Path:
    """Builds all C++ tests and `_C`, or some targets, for this kind of sanitizer; the folder."""
    import pybind11
    import pytest

    if sys.platform != "linux":
        pytest.skip("the engines need Linux")
    at = ROOT / "build" / (f"tests-{kind.replace(',', '-')}" if kind else "emulated")
    cmake, other = tool("cmake"), None if kind else installed()
    version = (ROOT / "ringcomm" / "__init__.py").read_text().partition('__version__ = "')[2].partition('"')[0]
    if other is not None:
        with building(other):
            run(cmake, "--build", str(other), "--target", "ringcomm_core", "ringcomm_bind", limit_s=800)
    with building(at):
        run(
            *(cmake, "-S", str(ROOT), "-B", str(at), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
            *("-DRINGCOMM_BUILD_TESTS=ON", f"-DRINGCOMM_SANITIZE={kind}", "-DRINGCOMM_BUILD_BENCHMARKS=OFF"),
            *("-DRINGCOMM_CUDA=OFF", f"-DRINGCOMM_EMULATE={'ON' if EMULATES else 'OFF'}"),
            f"-DRINGCOMM_BUILT={other or ''}",
            f"-DRINGCOMM_BUILD_PYTHON={'OFF' if kind else 'ON'}",
            *("-DRINGCOMM_TORCH_DIR=", f"-DPython_EXECUTABLE={sys.executable}"),
            *(f"-DRINGCOMM_PYBIND11_INCLUDE={pybind11.get_include()}", f"-DRINGCOMM_VERSION={version}"),
            *(INSTRUMENTED if kind else ()),
            limit_s=200,
        )
        run(cmake, "--build", str(at), *(word for target in targets for word in ("--target", target)), limit_s=800)
    return at


def module() -> Path:
    """The built `_C`."""
    return build("", "_C") / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"


class Caller:
    """A Python that has the emulated engine, and forks itself for each call: torch is imported once.

    No thread reads its answers: a thread that might make a call keeps the ranks of this process from being told of a
    deadlock.
    """

    def __init__(self) -> None:
        words = [sys.executable, "-X", "faulthandler", "-m", __name__]
        told = {**os.environ, MODULE: str(module())}
        pipe = subprocess.PIPE
        self._python = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, env=told)
        self._unread = b""

    def _number(self, limit_s: float) -> int:
        """The number in the next line. TimeoutError: none came within the limit."""
        assert self._python.stdout is not None
        end = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            if not select.select([self._python.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no answer in {limit_s:g} s from the Python of the emulated engine")
            read = os.read(self._python.stdout.fileno(), 4096)
            assert read, f"the Python of the emulated engine has ended with {self._python.wait()}"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return int(line)

    def call(self, *job: Any, limit_s: float) -> int | None:
        """The status of the process that ran it, which is ended at the limit: None."""
        assert self._python.stdin is not None
        self._python.stdin.write(json.dumps(job).encode() + b"\n")
        self._python.stdin.flush()
        pid = self._number(100)
        with contextlib.suppress(TimeoutError):
            return os.waitstatus_to_exitcode(self._number(limit_s))
        os.killpg(pid, signal.SIGKILL)
        self._number(100)
        return None


caller = cache(Caller)


def call(home: str, function: str, *arguments: Any, limit_s: float = 300, **environment: str) -> str:
    """
    Calls a function of a test module in a Python of its own; what it prints.

    Args:
        arguments: whatever JSON can carry.
        environment: variables for that Python.
    """
    told = {**os.environ, "RINGCOMM_EMULATED_SMS": "4", **environment, MODULE: str(module())}
    with tempfile.TemporaryDirectory(prefix="ringcomm-test-") as folder:
        status = caller().call(home, function, arguments, told, folder, limit_s=limit_s)
        out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    said = f"{out[-3000:]}\n{err[-9000:]}"
    assert status is not None, f"{function}{arguments} did not end in {limit_s:g} s\n{said}"
    assert status == 0, f"{function}{arguments}: {status}\n{said}"
    return out


def serve() -> None:
    """Makes each call that comes in a process forked for it."""
    for name in ("pytest", "torch", "torch.distributed"):  # the children have them at once
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    gc.freeze()
    while job := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            os.close(answers.fileno())
            serve_one(*json.loads(job))
        print(pid, file=answers, flush=True)
        print(os.waitpid(pid, 0)[1], file=answers, flush=True)


def serve_one(home: str, function: str, arguments: list[Any], environment: dict[str, str], folder: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for to, path in enumerate((os.devnull, os.path.join(folder, "out"), os.path.join(folder, "err"))):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), to)
    status = 1
    try:
        getattr(importlib.import_module(home), function)(*arguments)
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # Python takes a second to take torch apart


def install(path: str) -> None:
    """Makes the module at ``path`` this Python's `ringcomm._C`."""
    import ringcomm

    assert "ringcomm._C" not in sys.modules, "the installed _C is in use already"
    spec = importlib.util.spec_from_file_location("ringcomm._C", path)
    assert spec is not None
    assert spec.loader is not None
    emulated = importlib.util.module_from_spec(spec)
    sys.modules["ringcomm._C"] = emulated
    spec.loader.exec_module(emulated)
    ringcomm._C = emulated  # type: ignore[attr-defined]
    assert emulated.build_info()["cuda"] == "emulated"


if __name__ in ("__main__", "__mp_main__"):
    install(os.environ[MODULE])

if __name__ == "__main__":
    from tests.support import forked

    forked.install()
    serve()
