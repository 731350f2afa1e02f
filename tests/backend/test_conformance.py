"""Some of torch's own tests for distributed backends, run by benchmarks/collectives/conformance.py, as all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.timeout(180)
NAMES = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_sum_async",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_gather_checks",
    "test_reduce_product",
    "test_scatter_complex",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


def test_torchs_own_tests_pass(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's own tests need expecttest: pip install expecttest")
    log = tmp_path / "log.jsonl"
    words = ["--suite", "distributed_test", "--ranks", "2", "--backend", "ringcomm", "--limit-s", "60"]
    runner = [sys.executable, "-m", "benchmarks.collectives.conformance", "--log", str(log), *words]
    command = [*runner, "-k", rf"\.({'|'.join(NAMES)})$"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = {r["test"].split(".")[-1]: r for r in map(json.loads, log.read_text().splitlines())}
    assert sorted(records) == NAMES, ended.stdout
    for name, record in records.items():
        assert record["outcome"] == "passed", (name, record["error"])
        assert record["groups"] >= 2, f"{name} made no process group of ringcomm on each of its 2 ranks"
