"""The C++ tests: core, CPU engine, and the CUDA engine on an emulated GPU, plain and under the sanitizers. CMake builds
them in build/, once for each kind."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.choice import slow
from tests.support.emulated import EMULATES, build, module, run, tool

PLAIN = ""
SANITIZED = {  # what to instrument: world sizes of cpu_engine_test
    "address,undefined": ["1", "2", "3"],
    "thread": ["2", "3"],  # threads only: it does not see across processes
}
KINDS = [PLAIN, *map(slow, SANITIZED)]  # the builds alone take minutes
CORE_AND_ENGINE = (
    *("cpu_engine_test", "cpu_deadlock_test", "cpu_faults_test", "cpu_kernels_test"),
    *("hierarchy_engine_test", "runtime_trace_test", "runtime_shared_memory_test"),
)
EMULATED = sorted(
    f"{room}_{path.stem}" for room in ("cuda", "emulator") for path in ROOT.glob(f"tests/cpp/{room}/**/*_test.cpp")
)
needs_x86 = pytest.mark.skipif(not EMULATES, reason="the emulated GPU switches stacks in x86-64 assembly")
ANNOUNCED = re.compile(r"^//\s+(k\w+)\s+(\S+)\s+(\w+_test)\s+(.*)$", re.MULTILINE)  # a line of cuda/faults.h


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "plain")
@pytest.mark.parametrize("test", CORE_AND_ENGINE, ids=lambda test: test.removesuffix("_test"))
def test_core_and_engine(test: str, kind: str) -> None:
    worlds = SANITIZED.get(kind, ["1", "3", "4"]) if test == "cpu_engine_test" else []
    quick = [] if test in ("cpu_faults_test", "runtime_trace_test") else ["quick"]
    run(str(build(kind) / test), *quick, *worlds, limit_s=290)


@pytest.mark.slow  # all 2^32 floats, every world size, more seeds
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", ["cpu_kernels_test", "cpu_deadlock_test", "cpu_engine_test quick 2 5 8"])
def test_more_of_core_and_engine(words: str) -> None:
    test, *rest = words.split()
    run(str(build(PLAIN) / test), *rest, limit_s=290)


ONE_PAIR = """
#include "core/dispatch.h"
int main() {
  int calls = 0;
  ringcomm::dispatch_reduce(ringcomm::DType::kFloat32, ringcomm::ReduceOp::ONLY, [&](auto, auto) { ++calls; });
  return calls - 1;
}
"""


@pytest.mark.parametrize("op", ["kMax", "kAvg"])  # with a step of its own, with that of sum
def test_a_build_of_one_pair_has_that_pair(op: str, tmp_path: Path) -> None:
    source, program = tmp_path / "one_pair.cpp", tmp_path / "one_pair"
    source.write_text(ONE_PAIR.replace("ONLY", op))
    only = ["-DRINGCOMM_ONLY_DTYPE=kFloat32", f"-DRINGCOMM_ONLY_OP={op}"]
    names = str(ROOT / "csrc" / "core" / "names.cpp")
    run(tool("c++"), "-std=c++17", f"-I{ROOT / 'csrc'}", *only, str(source), names, "-o", str(program), limit_s=200)
    run(str(program), limit_s=60)


@pytest.mark.timeout(900)
def test_a_second_build_writes_nothing() -> None:
    """Each process of the suite configures and builds while others load what is there."""
    before = module().stat()
    build.__wrapped__("", "_C")
    after = module().stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param(PLAIN, ["quick"], id="plain"), slow(PLAIN, []), slow("address,undefined", ["quick"])],
)
def test_protocol_models(kind: str, words: list[str]) -> None:
    """Every order of the steps in small worlds; the largest of them without "quick"."""
    for model in ("cpu_link_model_test", "cpu_sleep_model_test"):
        run(str(build(kind) / model), *words, limit_s=200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "plain")
def test_engines_leave_nothing_behind(kind: str) -> None:
    run(str(build(kind) / "cpu_churn_test"), limit_s=260)


# ---- the CUDA engine on an emulated GPU ------------------------------------------------------------------------------


# Of cuda_engine_test: all but the largest matrices, which tests/cuda/test_engine.py runs from Python.
ENGINE_SECTIONS = (
    *("apart", "windows", "streams", "streams_apart", "communicators", "single_thread", "single_thread_apart"),
    *("graphs", "messages", "crossing", "lists", "lists_apart", "packing", "facts"),
)


def emulated_runs() -> list[Any]:
    """What to instrument, and the test."""
    sanitized = [(kind, test) for kind in SANITIZED for test in EMULATED if kind != "thread" or "process" not in test]
    return [*((PLAIN, test) for test in EMULATED), *(slow(*each) for each in sanitized)]


@needs_x86
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "test"), emulated_runs(), ids=lambda value: value.removesuffix("_test") if value else "plain"
)
def test_emulated_cuda_engine(kind: str, test: str) -> None:
    sections = ENGINE_SECTIONS if test == "cuda_engine_test" else ()
    run(str(build(kind) / test), "quick", *sections, limit_s=300)


@needs_x86
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_largest_matrices_of_the_emulated_cuda_engine() -> None:
    run(str(build(PLAIN) / "cuda_engine_test"), "quick", limit_s=300)


BUILDS = {"values": PLAIN, "memory": "address,undefined", "order": "thread"}


def faults() -> list[tuple[str, ...]]:
    """(name, the kind of build that finds it, test, what) of every fault that can be planted."""
    return [match.groups() for match in ANNOUNCED.finditer((ROOT / "tests" / "cpp" / "cuda" / "faults.h").read_text())]


@needs_x86
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault", [each if each[1] == "values" else slow(each) for each in faults()], ids=lambda fault: fault[0]
)
def test_planted_faults_are_found(fault: tuple[str, str, str, str]) -> None:
    """A test of the tests: with a fault in the engine they fail, and say so themselves."""
    name, kind, test, what = fault
    at = build(BUILDS[kind])
    done = subprocess.run(
        [str(at / test), "quick"],
        env={**os.environ, "RINGCOMM_FAULT": name, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0, f"{name} ({what}) went unseen by {test}\n{said[-2000:]}"
    expected = {"values": "FAILED", "memory": "ERROR: AddressSanitizer", "order": "WARNING: ThreadSanitizer: data race"}
    assert expected[kind] in said, f"{name} ({what}): {test} failed in another way\n{said[-3000:]}"


def test_the_list_of_faults_is_the_faults_that_are_planted() -> None:
    planted = set()
    cuda = ROOT / "csrc" / "cuda"
    for path in cuda.rglob("*"):
        if path.suffix in (".h", ".cu", ".cpp"):
            planted |= set(re.findall(r"RINGCOMM_FAULT [!=]= Fault::(\w+)", path.read_text()))
    named = set(re.findall(r"^  X\((\w+)\)", (cuda / "device" / "faults.h").read_text(), re.MULTILINE))
    assert planted == named - {"kNone"} == {name for name, *_ in faults()}
