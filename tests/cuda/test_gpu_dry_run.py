"""`make gpu` without a GPU: all of its stages on an emulated one, with few and small cases, so that the command works
on the day a GPU is there; and what each kind of failure costs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import machine, run
from benchmarks.gpu.document import Document
from ringcomm import _C
from tests.support import ROOT, emulated

EMULATED = _C.build_info()["cuda"] == "emulated"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the engines need Linux"),
    pytest.mark.skipif(EMULATED, reason="this is the Python that has the emulated engine"),
]
STARTS = """
import os
from tests.support import emulated
emulated.install(os.environ[emulated.MODULE])
"""
# One call that is like many others breaks as a kernel that reads past an array would, and with it its process.
BREAKS = """
import torch
from benchmarks.gpu import one_thread
from ringcomm.comm.communicator import Communicator

usual = Communicator.all_reduce
broken = []

def all_reduce(comm, x, *given, **options):
    apart = os.environ.get("RINGCOMM_CUDA_APART") == "1"
    if apart and options["algorithm"] in ("auto", "oneshot") and x.dtype == torch.float32 and x.numel() <= 256:
        broken.append(x)
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return usual(comm, x, *given, **options)

Communicator.all_reduce = all_reduce
one_thread.context_is_lost = lambda: bool(broken)
"""
PROBE = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho clock_step_ns 32\\necho overlap failed: not launched\\nexit 1\\n' >"$2"
chmod +x "$2"
"""
PROFILER = """#!/bin/sh
while [ "$1" != %s ]; do shift; done
exec "$@"
"""


def emulate(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> None:
    """Every Python that is started from now on has the emulated engine."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STARTS + more)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    monkeypatch.setenv(emulated.MODULE, str(emulated.module()))
    monkeypatch.setenv("RINGCOMM_EMULATED_SMS", "4")
    monkeypatch.setenv("RINGCOMM_EMULATED_DEVICES", "2")


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def patient(stages: Sequence[run.Stage]) -> list[run.Stage]:
    """The stages with time for the cores of a laptop that others use too."""
    return [replace(stage, limit_s=4 * stage.limit_s) for stage in stages]


def outcomes(out: Path, *stages: run.Stage, seconds: float = 500) -> dict[str, str]:
    """What comes of stages, by name."""
    runner = run.Runner(Document(out), seconds)
    with runner.ending():
        for stage in stages:
            runner.run(stage)
    return dict(Document(out).part("stages"))


# ---- all stages ------------------------------------------------------------------------------------------------------


def test_the_first_stages_run_on_an_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path / "site", monkeypatch)
    monkeypatch.setattr(run, "missing", lambda: "")
    stages = run.stages
    monkeypatch.setattr(run, "stages", lambda *given: patient(stages(*given)))
    out = tmp_path / "gpu.json"
    assert run.run_all(False, ["facts", "smoke"], [], run.Runner(Document(out), 300)) == 0
    document = Document(out).read()
    assert {name: said.partition(",")[0] for name, said in document["stages"].items()} == {"facts": "ok", "smoke": "ok"}
    assert [said.partition(":")[0] for said in document["smoke"].values()] == ["PASS"] * 60
    assert "N ranks sharing one GPU" in out.with_suffix(".md").read_text()


@pytest.mark.slow  # minutes, for 14 processes; the other tests here run the first of them, and those that fail
def test_every_stage_runs_on_an_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path / "site", monkeypatch)
    tools = tmp_path / "tools"
    monkeypatch.setenv("RINGCOMM_NVCC", program(tools / "nvcc", PROBE))
    program(tools / "ncu", PROFILER % sys.executable)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    build, stages = run.build, run.stages
    monkeypatch.setattr(run, "build", lambda *given: replace(build(*given), words=python("print('built')")))
    monkeypatch.setattr(run, "stages", lambda *given: patient(stages(*given)))
    out = tmp_path / "out" / "gpu.json"
    status = run.run_all(False, [], [], run.Runner(Document(out), 550))
    document = Document(out).read()
    came = {name: said.partition(",")[0] for name, said in document["stages"].items()}
    names = ["facts", "probe", "build", "smoke", "headline"]
    names += ["benchmark", "sanitizer", "profile"]
    names += [f"tests: {path.stem.removeprefix('test_gpu_')}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert sorted(came) == sorted(names)
    assert came.pop("sanitizer") == "left out: compute-sanitizer was not found"
    assert came.pop("probe") == "FAILED with status 1"  # of which one number failed
    assert set(came.values()) == {"ok"}, came
    assert status == 1
    assert document["probe"] == {"clock_step_ns": 32}
    assert document["failed"] == {"probe overlap": "failed: not launched"}
    assert document["facts"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert len(document["smoke"]) == 60
    assert all(said.startswith("PASS") for said in document["smoke"].values())
    assert not [said for said in document["tests"].values() if not said.startswith(("PASS", "SKIP"))]
    ops = {row["op"] for row in document["collectives"].values()}
    assert ops == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    assert all(row["us"] > 0 and not row["wrong"] for row in document["collectives"].values())
    assert set(document["extras"]) == {"copy_gbps", "host_us", "one_block_busbw_gbps", "packing"}
    table = out.with_suffix(".md").read_text()
    assert "N ranks sharing one GPU" in table
    assert "| 2 | 4 KiB | " in table
    files = {path.name for path in out.parent.iterdir()}
    logs = {f"gpu-{name}.log" for name in ("machine", "build", "smoke", "bench", "tests", "tools")}
    assert files == {"gpu.json", "gpu.md", *logs}
    assert "built" in (out.parent / "gpu-build.log").read_text()
    assert "ran 2 ranks all_reduce float32 4 KiB ring" in (out.parent / "gpu-tools.log").read_text()


@pytest.mark.slow
def test_the_stages_of_gpu_more_run_on_an_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which `make gpu` runs no other part, with few and small cases."""
    emulate(tmp_path / "site", monkeypatch)
    out = tmp_path / "gpu-more.json"
    named = {stage.name: stage for stage in patient(run.more_stages("90", str(out)))}
    files = ("bits", "ranks", "memory", "nccl", "training", "parallel")
    assert list(named) == ["build", *(f"tests: {name}" for name in files), "types", "tune"]
    few = ["-g", "2", "-b", "1K", "-e", "4K", "--channels", "0,1", "--rounds", "1", "--round-ms", "1"]
    tune = replace(named["tune"], words=[*named["tune"].words, *few])
    came = outcomes(out, named["tests: ranks"], named["types"], tune)
    assert [said.partition(",")[0] for said in came.values()] == ["ok"] * 3, came
    document = Document(out).read()
    (test,) = document["tests"]
    assert test.endswith("test_a_failed_communicator_leaves_the_device_usable[processes]")
    assert {row["dtype"] for row in document["collectives"].values()} >= {"float16", "float8_e4m3fn", "int8"}
    assert "all_reduce" in out.with_suffix(".tuning").read_text()


# ---- what a failure costs --------------------------------------------------------------------------------------------


def test_a_stage_that_fails_hangs_or_is_lost_costs_only_itself(tmp_path: Path) -> None:
    """The one that is lost notes three pieces, and dies within the second: two processes do all of them."""
    out = tmp_path / "gpu.json"
    lost = f"""
import os
from benchmarks.gpu.document import BEGUN, Document
from pathlib import Path
document = Document(Path({str(out)!r}))
for name in "abc":
    if name not in document.part("pieces"):
        document.put("pieces", {{name: BEGUN}})
        print("now", name, flush=True)
        if name == "b":
            os.abort()
        document.put("pieces", {{name: "PASS"}})
document.end("pieces")
"""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])"
    came = outcomes(
        out,
        run.Stage("fails", 20, python("raise SystemExit(3)"), "some"),
        run.Stage("hangs", 2, python(f"print('here', flush=True); {child}"), "some"),
        run.Stage("absent", 20, [str(tmp_path / "nothing")], "some"),
        run.Stage("is lost", 30, python(lost), "some", part="pieces"),
        run.Stage("goes on", 20, python("print('still here')"), "some"),
    )
    assert came.pop("absent").startswith("FAILED: FileNotFoundError")
    assert {name: said.rpartition(",")[0] for name, said in came.items()} == {
        "fails": "FAILED with status 3",
        "hangs": "FAILED: not done within 2 s",
        "is lost": "FAILED: after 1 lost processes another ended with status 0",
        "goes on": "ok",
    }
    died = "FAIL: the process ended with status -6 within it"
    assert Document(out).part("pieces") == {"a": "PASS", "b": died, "c": "PASS"}
    log = (tmp_path / "gpu-some.log").read_text()
    assert [log.count(text) for text in ("now a\n", "now b\n", "now c\n", "here\n", "still here\n")] == [1, 1, 1, 2, 1]
    assert "| goes on | ok," in (tmp_path / "gpu.md").read_text()


def test_what_is_missing_costs_all_but_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = "make gpu expects nvcc, not found here: pip install something"
    monkeypatch.setattr(run, "missing", lambda: lacks)
    out = tmp_path / "gpu.json"
    assert run.run_all(False, [], [], run.Runner(Document(out), 100)) == 2
    document = Document(out).read()
    assert document["stages"].keys() == {"facts"}
    assert document["facts"]["cores"] == os.cpu_count()
    assert document["failed"] == {"machine": lacks}
    assert f"* failed: machine: {lacks}" in out.with_suffix(".md").read_text()
    assert run.run_all(False, ["facts"], [], run.Runner(Document(out), 100)) == 0


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict.fromkeys(("cmake", "ninja", "c++", "nvcc"), "/somewhere/nvcc")
    monkeypatch.setattr(machine, "program", found.__getitem__)
    assert machine.missing() == ""
    found |= {"ninja": "", "nvcc": "", "c++": ""}
    assert machine.missing() == (
        "make gpu expects ninja, nvcc, c++, not found here: pip install ninja nvidia-cuda-nvcc nvidia-cuda-runtime "
        "(or CUDA 12.1 or newer in place of the last two, with RINGCOMM_NVCC as the path of its nvcc) and install a "
        "C++ compiler"
    )
    wheel = tmp_path / "nvidia" / "cu13"
    found |= {"ninja": "here", "nvcc": str(wheel / "bin" / "nvcc"), "c++": "here"}
    said = "make gpu expects cuda_runtime.h, not found here: pip install nvidia-cuda-runtime"
    assert machine.missing() == said
    (wheel / "include").mkdir(parents=True)
    (wheel / "include" / "cuda_runtime.h").touch()
    assert machine.missing() == ""


def test_the_whole_has_a_limit_that_bounds_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEAST_S", 0.5)
    slow = python("import time; time.sleep(600)")
    stages = [run.Stage(f"stage {i}", 300, slow, "some") for i in range(3)]
    came = outcomes(tmp_path / "gpu.json", *stages, seconds=2)
    assert came["stage 0"].startswith("FAILED: not done within")
    assert [came[f"stage {i}"].partition(",")[0] for i in (1, 2)] == ["left out: the time was up"] * 2


@pytest.mark.slow  # three stages, each in two processes
def test_a_sticky_error_costs_one_cell_of_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path / "site", monkeypatch, BREAKS)
    out = tmp_path / "gpu.json"
    names = ("smoke", "headline", "tests: stress")
    came = outcomes(out, *(stage for stage in patient(run.stages("", str(out))) if stage.name in names))
    for name in names:
        assert came[name].startswith("FAILED: after 1 lost processes another ended with"), came
    document = Document(out).read()
    error = "FAIL: RuntimeError: CUDA error: an illegal memory access was encountered"
    for part, cell, count in (
        ("smoke", "2 ranks apart oneshot 1024 B float32", 60),
        ("cells", "2 ranks all_reduce float32 1 KiB auto apart", 6),
        ("tests", "tests/gpu/test_gpu_stress.py::test_many_calls_of_random_sizes[2-visible]", 2),
    ):
        failed = {name: said for name, said in document[part].items() if not said.startswith(("PASS", "ok"))}
        assert failed == {cell: error}
        assert len(document[part]) == count
