"""
Everything that needs a GPU, in one command and under ten minutes: `make gpu`.

    python benchmarks/gpu/run.py [--skip build tests bench] [--out FOLDER]

Builds in place with what this Python has (no network: torch 2.11 or newer, CMake, Ninja, setuptools, pytest; pybind11
or torch's copy of it; nvcc), runs the tests of tests/gpu, then the benchmark. Each step has a time limit, and the next
one runs whatever came of it. RINGCOMM_NCCL=/path/to/libnccl.so.2 (2.30.3 or newer) puts NCCL beside it. Results go to
benchmarks/results/gpu.json and gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMITS_S = {"build": 190, "tests": 220, "bench": 170}  # with all that comes between them under ten minutes
SHIPPED = ("80", "90")  # architectures of the usual build


def present(name: str) -> str:
    """Path of a program, or nothing."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    asked = os.environ.get("RINGCOMM_NVCC", "") if name == "nvcc" else ""
    return asked or shutil.which(name, path=path) or ""


def missing() -> list[str]:
    """What this machine lacks, each with what to do."""
    modules = {"setuptools", "torch", "numpy", "rich", "pytest", "pytest_timeout"}
    found = [f"{name}: pip install {name}" for name in ("cmake", "ninja") if not present(name)]
    found += [f"{name}: pip install {name}" for name in sorted(modules) if importlib.util.find_spec(name) is None]
    if not present("nvcc"):
        found.append("nvcc: install CUDA 12 or newer, or set RINGCOMM_NVCC to its path")
    if not present("c++"):
        found.append("c++: install a C++ compiler")
    if not present("nvidia-smi"):
        found.append("nvidia-smi: use a machine with an NVIDIA driver")
    return found


def architecture() -> str:
    """Of the first GPU: 90. Empty: the usual ones serve it."""
    words = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    found = done.stdout.split("\n")[0].strip().replace(".", "")
    return "" if found in SHIPPED or not found.isdecimal() else found


def step(name: str, words: list[str], environment: dict[str, str]) -> str:
    """Runs a command under the step's limit, with everything it starts; what came of it."""
    print(f"\n== {name}: {' '.join(words)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(LIMITS_S[name])
        said = "ok" if status == 0 else f"FAILED with status {status}"
    except subprocess.TimeoutExpired:
        said = f"FAILED: not done within {LIMITS_S[name]} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing that it started outlives it
        process.wait()
    return f"{said}, {time.monotonic() - started:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", default=[], choices=tuple(LIMITS_S), help="steps to leave out")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"), help="folder of gpu.json and gpu.md")
    a = parser.parse_args()
    if lacks := missing():
        print("make gpu needs, and does not find:\n  " + "\n  ".join(lacks), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit around all: ends the step too
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "4",
        "RINGCOMM_CUDA": "ON",
    }
    environment.setdefault("RINGCOMM_CUDA_ARCHS", architecture())
    python = sys.executable
    steps = {
        "build": [python, "setup.py", "build_ext", "--inplace"],
        "tests": [python, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rs", "tests/gpu"],
        "bench": [python, "benchmarks/gpu/bench.py", "--seconds", str(LIMITS_S["bench"] - 60), "--out", a.out],
    }
    done = {name: step(name, words, environment) for name, words in steps.items() if name not in a.skip}
    print("\n== " + "; ".join(f"{name}: {said}" for name, said in done.items()), flush=True)
    return int(any("FAILED" in said for said in done.values()))


if __name__ == "__main__":
    sys.exit(main())
