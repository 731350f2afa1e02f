"""`make gpu` without a GPU: its tests and its benchmark on an emulated one, with few and small cases, so that the
command works on the day a GPU is there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import emulated
import pytest

from ringcomm import _C

ROOT = Path(__file__).resolve().parent.parent
EMULATED = _C.build_info()["cuda"] == "emulated"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the engines need Linux"),
    pytest.mark.skipif(EMULATED, reason="this is the Python that has the emulated engine"),
]


def run_tests() -> None:
    raise SystemExit(
        int(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--no-header", str(ROOT / "tests" / "gpu")]))
    )


def run_benchmark(*words: str) -> None:
    sys.argv = ["bench.py", *words]
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
    runpy.run_path(str(ROOT / "benchmarks" / "gpu" / "bench.py"), run_name="__main__")


def test_the_gpu_tests_pass_on_an_emulated_gpu() -> None:
    print(emulated.call("test_gpu_dry_run", "run_tests", limit_s=500))


def test_the_gpu_benchmark_runs_on_an_emulated_gpu(tmp_path: Path) -> None:
    emulated.call("test_gpu_dry_run", "run_benchmark", "--out", str(tmp_path), "--seconds", "60", limit_s=300)
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["label"] == "N ranks sharing one GPU (L2/HBM)"
    assert document["emulated"]
    assert {row["op"] for row in document["collectives"]} == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    assert all(row["us"] > 0 for row in document["collectives"])
    assert "N ranks sharing one GPU" in (tmp_path / "gpu.md").read_text()
