"""What is built on the simulator: calibration, training steps, presets, the command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringcomm import errors
from ringcomm.pipeline_parallel.check import formula
from ringcomm.tools import cli, simulate
from ringcomm.tools.simulate import ENGINE, Cluster, LinkClass, predict, time_us
from ringcomm.tools.simulate.calibrate import calibrate, deviations, samples_of
from ringcomm.tools.simulate.presets import PRESETS, a100, ethernet, h100, preset
from ringcomm.tools.simulate.training import forward_us, message_us, pipeline_us, step, tensor_us, wire

SIZES = [1 << k for k in range(12, 26, 2)]


def report_of(cluster: Cluster, collectives: list[str], noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """What the benchmark would write on that cluster."""
    rng = random.Random(seed)
    rows = []
    for name in collectives:
        for nbytes in SIZES:
            us = time_us(name, nbytes, cluster) * math.exp(rng.gauss(0.0, noise))
            half = {"time": 1e9, "alg_bw": 0.0, "bus_bw": 0.0, "nwrong": 0}  # the mean, which rounds replace
            rows.append({
                "size": nbytes, "type": "float", "experiment_name": "alltoall" if name == "all_to_all" else name,
                "in_place": half, "in_place_per_iter": {"round_us": [us, us * 3, us]},
            })  # fmt: skip
    devices = [{"rank": r, "host": f"h{r // cluster.ranks_per_host}"} for r in range(cluster.world_size)]
    return {"results": rows, "devices": devices, "config": {"algorithm": "auto"}}


INSIDE = LinkClass(5.0, 8.0, reduce_gbps=20.0)
ONE_HOST = Cluster(1, 4, INSIDE, LinkClass(1.0, 1.0))
MOVING = ["all_gather", "broadcast", "all_to_all"]


# ---- calibration ---------------------------------------------------------------------------------------------------


def test_links_inside_are_found_again() -> None:
    found = calibrate(report_of(ONE_HOST, [*MOVING, "all_reduce", "reduce_scatter"]))
    assert not found.between
    assert (found.cluster.hosts, found.cluster.ranks_per_host) == (1, 4)
    assert found.cluster.inside.latency_us == pytest.approx(5.0, rel=1e-3)
    assert found.cluster.inside.bandwidth_gbps == pytest.approx(8.0, rel=1e-3)
    assert found.cluster.inside.reduce_gbps == pytest.approx(20.0, rel=1e-2)
    assert max(abs(each.relative) for each in found.deviations) < 1e-2
    bigger = replace(found.cluster, ranks_per_host=8)
    assert time_us("all_reduce", 1 << 21, bigger) == pytest.approx(
        time_us("all_reduce", 1 << 21, replace(ONE_HOST, ranks_per_host=8)), rel=0.02
    )


@pytest.mark.parametrize("shared_nic", [False, True])
def test_links_between_hosts_are_found_on_top_of_those_inside(shared_nic: bool) -> None:
    link = LinkClass(80.0, 0.12, reduce_gbps=3.0, **ENGINE)
    truth = Cluster(3, 2, INSIDE, link, shared_nic=shared_nic)
    known = replace(truth, between=LinkClass(1.0, 10.0, **ENGINE))
    found = calibrate(report_of(truth, ["all_gather", "all_reduce", "reduce_scatter"]), known)
    assert found.between
    assert found.cluster.inside == INSIDE
    assert found.cluster.between.latency_us == pytest.approx(80.0, rel=0.01)
    assert found.cluster.between.bandwidth_gbps == pytest.approx(0.12, rel=0.01)
    assert max(abs(each.relative) for each in found.deviations) < 0.02


def test_hosts_of_a_report_may_be_said() -> None:
    """All network namespaces report one host name."""
    truth = Cluster(2, 2, INSIDE, LinkClass(500.0, 0.1, **ENGINE))
    report = report_of(truth, ["all_gather", "broadcast"])
    for device in report["devices"]:
        device["host"] = "same"
    assert calibrate(report, truth).cluster.hosts == 1
    found = calibrate(report, truth, hosts=2)
    assert (found.cluster.hosts, found.cluster.ranks_per_host) == (2, 2)
    assert found.cluster.between.latency_us == pytest.approx(500.0, rel=0.01)


def test_noise_and_an_outlier_change_little() -> None:
    report = report_of(ONE_HOST, MOVING, noise=0.03, seed=3)
    report["results"][3]["in_place_per_iter"]["round_us"] = [1e5] * 3
    found = calibrate(report).cluster.inside
    assert found.bandwidth_of(1 << 25) == pytest.approx(8.0, rel=0.1)
    assert found.latency_us == pytest.approx(5.0, rel=0.3)


def test_sizes_that_did_not_calibrate_are_predicted() -> None:
    """Where the bandwidth changes with the message, by bands."""
    truth = replace(ONE_HOST, inside=replace(INSIDE, reduce_gbps=math.inf, bands=((1 << 20, 3.0),)))
    report = report_of(truth, ["all_gather", "all_reduce"])
    found = calibrate(report, sizes=SIZES[::2])
    held = [s for s in samples_of(report) if s.nbytes not in SIZES[::2]]
    assert len(held) == 6
    assert found.cluster.own["all_gather"].bands
    assert max(abs(each.relative) for each in deviations(found.cluster, held)) < 0.05


def test_several_reports_give_medians() -> None:
    reports = [report_of(ONE_HOST, ["all_gather"]) for _ in range(3)]
    for row in reports[1]["results"]:
        row["in_place_per_iter"]["round_us"] = [1e6]
    assert [s.time_us for s in samples_of(reports)] == [s.time_us for s in samples_of(reports[0])]
    assert calibrate(reports).cluster.inside.bandwidth_gbps == pytest.approx(8.0, rel=1e-3)


def test_an_invalid_report_is_refused() -> None:
    good = report_of(ONE_HOST, ["all_gather"])
    for broken, match in (
        ({}, "without devices"),
        ({**good, "results": [{"size": 4}]}, "without 'experiment_name'"),
        ({**good, "results": good["results"][:1]}, "at least two sizes"),
        ({**good, "results": []}, "0 measurements of nothing"),
        ({**good, "config": {}}, "without 'algorithm'"),
        ({**good, "devices": [*good["devices"], {"host": "x"}]}, r"hosts with \[1, 4\] ranks"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=match):
            calibrate(broken)
    with pytest.raises(errors.InvalidArgumentError, match="got hosts=3 for 4 ranks"):
        calibrate(good, hosts=3)


def test_a_real_report_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "bench.json")
    words = "all_reduce all_gather broadcast alltoall sendrecv -g 2 --ranks-as threads -b 4K -e 1M -f 16 --round-ms 2"
    assert cli.main(["bench", *words.split(), "-J", path]) == 0
    report = json.loads(Path(path).read_text())
    found = calibrate(report)
    assert set(found.cluster.own) == {"all_reduce", "all_gather", "broadcast", "all_to_all"}
    assert len(found.deviations) == 12
    assert all(each.relative > -1 for each in found.deviations)
    assert cli.main(["simulate", "--hosts", "1", "--gpus-per-host", "2", "--calibrate", path, "-e", "64K"]) == 0
    assert f"as measured in {path}" in capsys.readouterr().out
    assert cli.main(["simulate", "--gpus-per-host", "1", "--calibrate", f"{path}:2", "-e", "64K"]) == 0
    assert "links between hosts from 12 measurements" in capsys.readouterr().out


# ---- training ------------------------------------------------------------------------------------------------------

PARAMETERS, LAYERS = 100_000_000, 10


@pytest.mark.parametrize("stage", range(4))
def test_a_step_without_overlap_is_all_of_its_parts(stage: int) -> None:
    found = step(
        PARAMETERS, h100(4), stage=stage, layers=LAYERS, forward_us=3000.0, overlap=False, microbatches=2,
        param_dtype="float32",
    )  # fmt: skip
    assert found.compute_us == 2 * 9000.0
    assert found.time_us == pytest.approx(found.compute_us + found.communication_us, rel=1e-9)
    sent = wire(PARAMETERS, LAYERS, stage, 32, microbatches=2, param_dtype="float32")
    assert found.wire == sent
    # What `ringcomm.data_parallel.memory.traffic` counts: 4 bytes a parameter once, or twice and again for each pass.
    gathered = {0: 0, 1: 1, 2: 1, 3: 4}[stage]
    assert sent.get("all_gather bytes", 0) == pytest.approx(gathered * 4 * PARAMETERS, rel=1e-3)
    assert sent.get("all_reduce bytes", 0) + sent.get("reduce_scatter bytes", 0) == pytest.approx(4e8, rel=1e-3)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("forward", [10.0, 1000.0, 100_000.0])
def test_overlap_hides_what_it_can(stage: int, forward: float) -> None:
    apart, beside = (
        step(PARAMETERS, h100(4), stage=stage, layers=LAYERS, forward_us=forward, overlap=overlap)
        for overlap in (False, True)
    )
    assert max(beside.compute_us, beside.communication_us) <= beside.time_us * (1 + 1e-9)
    assert beside.time_us < apart.time_us
    assert beside.exposed_us >= 0
    assert 0 < beside.efficiency < 1


def test_a_slow_network_and_a_straggler_show_in_the_step() -> None:
    times = [
        step(PARAMETERS, cluster, stage=3, layers=LAYERS, forward_us=3000.0).time_us
        for cluster in (h100(4), replace(h100(4), slow_hosts={0: 0.1}), ethernet(4, 8))
    ]
    assert times == sorted(times)
    assert times[0] < 0.8 * times[1] < times[2]


def test_operations_of_a_transformer() -> None:
    assert forward_us(10**9, 1000, 100.0) == pytest.approx(2e12 / 100e12 * 1e6)


@pytest.mark.parametrize("words", [{"layers": 0}, {"layers": 7, "parameters": 6}, {"microbatches": 0}, {"stage": 4}])
def test_an_invalid_step_is_refused(words: dict[str, int]) -> None:
    given: dict[str, Any] = {"parameters": 1000, "stage": 0, "layers": 2, "microbatches": 1, **words}
    with pytest.raises(errors.InvalidArgumentError):
        step(given.pop("parameters"), h100(2), forward_us=1.0, **given)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_a_pipeline_over_fast_links_has_the_published_bubble(name: str) -> None:
    fast = Cluster(4, 1, LinkClass(0.0, math.inf), LinkClass(0.0, math.inf))
    took, idle = pipeline_us(name, 4, 8, 300.0, 1 << 20, fast)
    assert idle == pytest.approx(formula(name, 4, 8), rel=1e-9)
    assert took == pytest.approx(8 * 900.0 / (1 - idle), rel=1e-9)
    slow = replace(fast, between=LinkClass(100.0, 10.0))
    assert message_us(1 << 20, slow) == pytest.approx(100.0 + (1 << 20) / 1e4)
    assert pipeline_us(name, 4, 8, 300.0, 1 << 20, slow)[0] > took + 3 * 200.0


def test_tensor_parallel_layers_send_four_activations() -> None:
    assert tensor_us(5, 1 << 20, h100(2), 1) == 0.0
    one = predict("all_reduce", 1 << 20, h100(1, 4), "best", "bfloat16").time_us
    assert tensor_us(5, 1 << 20, h100(2), 4) == pytest.approx(20 * one)
    with pytest.raises(errors.InvalidArgumentError, match="got 16 tensor parallel ranks"):
        tensor_us(5, 1 << 20, h100(2), 16)


# ---- presets -------------------------------------------------------------------------------------------------------


def test_presets_say_where_they_come_from() -> None:
    for name in PRESETS:
        cluster = preset(name, 4, 2)
        assert (cluster.hosts, cluster.ranks_per_host) == (4, 2)
        assert set(cluster.sources) == {"inside", "between"}
        assert predict("all_reduce", 1 << 20, cluster).time_us > 0
    with pytest.raises(errors.InvalidArgumentError, match="preset: got name='abacus'"):
        preset("abacus", 1, 1)


def test_presets_are_near_what_was_published() -> None:
    """benchmarks/results/simulate.md has all of it, with sources."""
    ring = predict("all_reduce", 8 << 30, h100(1), "ring")
    assert ring.busbw_gbps == pytest.approx(368.76, rel=0.02)
    assert predict("all_reduce", 1 << 10, h100(1), "best", "bfloat16").time_us == pytest.approx(5.22, rel=0.02)
    assert predict("all_reduce", 1 << 20, h100(1), "direct", "bfloat16").time_us == pytest.approx(9.95, rel=0.15)
    assert predict("all_reduce", 1 << 30, a100(1), "direct", "float16").busbw_gbps == pytest.approx(244, rel=0.05)


# ---- the command ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["simulate", *" ".join(words).split()]) == 0
    return capsys.readouterr().out


def test_the_command_prints_a_table_and_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = "--hosts 128 --gpus-per-host 8 --algorithm all -b 1K -e 16M -f 64"
    said = run(capsys, words, "-J", str(path))
    assert "# 128 hosts x 8 ranks" in said
    assert "# fastest: " in said
    document = json.loads(path.read_text())
    assert len(document["collectives"]) == 3 * 5
    first = document["collectives"][0]
    assert (first["nbytes"], first["algorithm"]) == (1024, "ring")
    assert first["time_us"] == predict("all_reduce", 1024, h100(128), "ring", "bfloat16").time_us
    assert document["cluster"]["hosts"] == 128
    assert f"{first['time_us']:.1f}" in said


def test_the_command_shows_what_differences_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hosts 4 --gpus-per-host 2 -b 1M -e 1M --slow-host 3:0.5 --straggler 5:2ms --slow-rank 1:3"
    said = run(capsys, words, "--collective", "all")
    assert said.count("x equal") == len(simulate.COLLECTIVES)
    cluster = replace(h100(4, 2), slow_hosts={3: 0.5}, stragglers={5: 2000.0}, slow_ranks={1: 3.0})
    found = predict("all_reduce", 1 << 20, cluster, dtype="bfloat16")
    usual = predict("all_reduce", 1 << 20, h100(4, 2), dtype="bfloat16")
    assert f"{found.time_us:12.1f}" in said
    assert f"{found.time_us / usual.time_us:9.2f}" in said


def test_the_command_predicts_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    said = run(capsys, "--hosts 16 --model-parameters 7B --tokens 2048", "-J", str(path))
    steps = json.loads(path.read_text())["steps"]
    assert [each["stage"] for each in steps] == [0, 1, 2, 3]
    assert "7,000,000,000 parameters" in said
    one = run(capsys, "--hosts 16 --model-parameters 7e9 --tokens 2048 --stage 3").splitlines()[-1].split()
    assert float(one[1]) == pytest.approx(steps[3]["time_us"] / 1e3, abs=0.01)


def test_links_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hosts 2 --gpus-per-host 1 -b 8M -e 8M -d float32 --algorithm ring"
    said = run(capsys, words, "--latency-us 100 --bandwidth-gbps 1 --overhead-us 0 --reduce-gbps 1e9")
    assert "but as given latency_us 100, bandwidth_gbps 1" in said
    time = float(said.splitlines()[-1].split()[2])
    assert time == pytest.approx((8 << 20) / 1e3 + 4.6 + 3 * 100, rel=0.02)


@pytest.mark.parametrize("words", [
    "--hosts 0", "--straggler 17", "--straggler 1:-5us", "--slow-host 0:0", "--slow-host x:1", "--slow-host 9:0.5",
    "--algorithm butterfly --hosts 3", "--collective scatter", "--calibrate /nowhere.json", "-d int4", "--stage 4",
    "--preset abacus", "--model-parameters none",
])  # fmt: skip
def test_invalid_arguments_end_with_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *words.split()]) == 2
    assert "ringcomm simulate" in capsys.readouterr().err
