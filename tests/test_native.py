"""The C++ tests: core and CPU engine, plain and under the sanitizers. CMake builds them in build/, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KINDS = {  # what to instrument: world sizes of engine_test
    "": ["1", "2", "3", "5", "8"],
    "address,undefined": ["1", "2", "3"],
    "thread": ["2", "3"],  # threads only: it does not see across processes
}


def tool(name: str) -> str:
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"the C++ tests need {name}; pip install {name}")
    return path


def run(*words: str, limit_s: int) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "plain")
def test_core_and_engine(kind: str) -> None:
    if sys.platform != "linux":
        pytest.skip("the CPU engine needs Linux")
    build = ROOT / "build" / f"tests-{kind.replace(',', '-') or 'plain'}"
    cmake, ninja = tool("cmake"), tool("ninja")
    run(
        *(cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        *("-DRINGCOMM_BUILD_TESTS=ON", f"-DRINGCOMM_SANITIZE={kind}", "-DRINGCOMM_BUILD_BENCHMARKS=OFF"),
        limit_s=60,
    )
    run(cmake, "--build", str(build), limit_s=600)
    run(str(build / "core_test"), limit_s=120)
    run(str(build / "faults_test"), limit_s=130)
    run(str(build / "engine_test"), "quick", *KINDS[kind], limit_s=290)
