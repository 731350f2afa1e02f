"""
Compares the simulator with measurements and with published tables.

    python -m benchmarks.simulate                    # everything; writes results/simulate.md (about 4 minutes, 2 cores)
    python -m benchmarks.simulate --ranks 2 --runs 3
    python -m benchmarks.simulate --reports one.json --over-hosts two.json   # of ringcomm bench, instead of measuring

A run is one `ringcomm bench` of four collectives over eleven sizes; runs with different numbers of ranks take turns.
Measurements are medians over all runs, and again over the runs that `quiet` keeps. Every second size is used for
calibration, the others are predicted. Over hosts: two network namespaces with two ranks each, on a link of 1 Gbit/s and
1 ms (needs root and tests/support/hierarchy/namespaces.py); the links inside are those calibrated from two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringcomm.tools.bench.options import size_text
from ringcomm.tools.simulate import ENGINE, Cluster, LinkClass, compare, crossovers, predict
from ringcomm.tools.simulate.calibrate import Sample, calibrate, deviations, samples_of
from ringcomm.tools.simulate.presets import a100, ethernet, h100
from ringcomm.tools.simulate.training import forward_us, step

OUT = Path(__file__).resolve().parent / "results" / "simulate.md"
MEASURED = "all_reduce reduce_scatter all_gather broadcast -b 64K -e 64M -f 2 -c 0 --rounds 5"
USED = tuple(64 << (10 + 2 * k) for k in range(6))  # bytes used for calibration: 64K, 256K, ..., 64M
OVER_HOSTS = "all_reduce all_gather broadcast -b 256K -e 32M -f 2 -c 0 --rounds 3 -n 4 -w 1"
USED_OVER_HOSTS = tuple(256 << (10 + 2 * k) for k in range(4))  # 256K, 1M, 4M, 16M
# (what, bytes, collective, algorithm, dtype, cluster, figure, its value): "us" or "busbw"
PUBLISHED = (
    *(
        ("8xH100 mscclpp, CUDA graph (mscclpp#646)", nbytes, "all_reduce", "best", "bfloat16", h100(1), "us", value)
        for nbytes, value in (
            (1 << 10, 5.22), (16 << 10, 5.92), (64 << 10, 7.59), (256 << 10, 7.19), (512 << 10, 7.90),
            (1 << 20, 9.95), (2 << 20, 13.60),
        )
    ),
    *(
        ("8xH100 mscclpp CI (perf_ndmv5.jsonl)", nbytes, "all_reduce", "best", "bfloat16", h100(1), "us", value)
        for nbytes, value in ((24 << 10, 6.18), (48 << 10, 6.62), (72 << 10, 6.91))
    ),
    ("8xH100 NCCL, ring, no NVLS (nccl-tests#309)", 8 << 30, "all_reduce", "ring", "float32", h100(1), "busbw", 368.76),
    ("8xA100 mscclpp CI (perf_ndmv4.jsonl)", 1 << 30, "all_reduce", "direct", "float16", a100(1), "busbw", 244.0),
    ("8xA100 mscclpp CI (perf_ndmv4.jsonl)", 1 << 30, "all_gather", "direct", "float16", a100(1), "busbw", 255.0),
    ("8xA100 mscclpp CI (perf_ndmv4.jsonl)", 8 << 10, "all_reduce", "best", "float16", a100(1), "us", 6.5),
)  # fmt: skip

FITTED = {("8xH100 mscclpp, CUDA graph (mscclpp#646)", 1 << 10)}  # the preset's call_us comes from it


# ---- beside measurements -------------------------------------------------------------------------------------------


def measure(ranks: Sequence[int], runs: int) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {each: [] for each in ranks}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs):
            for each in ranks if run % 2 == 0 else reversed(ranks):
                path = Path(folder) / "report.json"
                words = [
                    sys.executable,
                    "-m",
                    "ringcomm",
                    "bench",
                    *MEASURED.split(),
                    "-g",
                    str(each),
                    "-J",
                    str(path),
                ]
                subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
                found[each].append(json.loads(path.read_text()))
                print(f"run {run + 1} of {runs}, {each} ranks", flush=True)
    return found


def measure_over_hosts(runs: int) -> list[dict[str, Any]]:
    from tests.support.hierarchy.namespaces import Cluster as Namespaces

    found = []
    with tempfile.TemporaryDirectory() as folder, Namespaces(2, 1.0, 1.0) as hosts:
        path = Path(folder) / "report.json"
        for run in range(runs):
            hosts.run([2, 2], ["-m", "ringcomm", "bench", *OVER_HOSTS.split(), "-J", str(path)], 300)
            found.append(json.loads(path.read_text()))
            print(f"run {run + 1} of {runs}, over hosts", flush=True)
    return found


def quiet(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Returns the reports without the collectives of slower runs, and the number of remaining runs of each collective.

    A run's slowness is the median over sizes of its time divided by the fastest run's. A run above 1.25 is dropped, but
    the three fastest runs always stay. This separates slow runs from fast ones, but does not show why they were slow.
    """
    times = [{(s.collective, s.nbytes): s.time_us for s in samples_of(each)} for each in reports]
    least = {key: min(each[key] for each in times) for key in times[0]}
    kept: list[dict[str, Any]] = [{**each, "results": []} for each in reports]
    left: dict[str, int] = {}
    for name in dict.fromkeys(key[0] for key in least):
        slowness = [statistics.median(each[key] / least[key] for key in least if key[0] == name) for each in times]
        most = max(1.25, sorted(slowness)[min(2, len(slowness) - 1)])
        left[name] = sum(each <= most for each in slowness)
        for run, each in enumerate(reports):
            if slowness[run] <= most:
                kept[run]["results"] += [row for row in each["results"] if row["experiment_name"] == name]
    return kept, left


def spread(reports: Sequence[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """Returns (least, most) time over the runs, by collective and bytes."""
    times: dict[tuple[str, int], list[float]] = {}
    for each in reports:
        for sample in samples_of(each):
            times.setdefault((sample.collective, sample.nbytes), []).append(sample.time_us)
    return {key: (min(values), max(values)) for key, values in times.items()}


def beside_measurements(runs: Sequence[dict[str, Any]]) -> list[str]:
    kept, left = quiet(runs)
    return [
        f"### {len(runs[0]['devices'])} ranks, all {len(runs)} runs",
        "",
        *beside_medians(runs, USED),
        f"### {len(runs[0]['devices'])} ranks, without the slower runs",
        "",
        "Dropped: the runs of a collective that took more than 1.25 times as long as the fastest run, by the median "
        "over the sizes, but never the three fastest. Left of " + f"{len(runs)}: "
        + ", ".join(f"{name} {count}" for name, count in left.items()) + ".",
        "",
        *beside_medians(kept, USED),
    ]  # fmt: skip


def beside_medians(
    reports: Sequence[dict[str, Any]], used: Sequence[int], known: Cluster | None = None, hosts: int = 1
) -> list[str]:
    """Returns the table of the predicted sizes."""
    found = calibrate(reports, known, sizes=used, hosts=hosts)
    ranges = spread(reports)
    rows = deviations(found.cluster, [s for s in samples_of(reports) if s.nbytes not in used])
    lines = [
        "| collective | bytes | measured us: median (min–max of the runs) | predicted us | off by |",
        "|---|---|---|---|---|",
    ]
    for s in rows:
        low, high = ranges[s.collective, s.nbytes]
        lines.append(
            f"| {s.collective} | {size_text(s.nbytes)} | {s.time_us:.1f} ({low:.1f}–{high:.1f}) | "
            f"{s.predicted_us:.1f} | {100 * s.relative:+.1f} % |"
        )
    return [*lines, "", *verdict(rows), ""]


def beside_hosts(runs: Sequence[dict[str, Any]], inside: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of two hosts with two ranks each; the links inside are known from two ranks of one host."""
    cluster = Cluster(1, 2, LinkClass(1.0, 10.0), LinkClass(1000.0, 0.1, **ENGINE), shared_nic=True)
    known = calibrate(inside, cluster, sizes=USED).cluster
    return [
        f"`ringcomm bench {OVER_HOSTS}`, {len(runs)} runs, all of which count, on 2 hosts x 2 ranks: network "
        "namespaces on one machine, whose links (1 Gbit/s each way for a host, 1 ms) are a program that needs the same "
        "cores as the ranks: latency and bandwidth that are found are also those of the program. Nobody kept the "
        "machine free meanwhile. Links inside as calibrated from 2 ranks; calibrated on "
        f"{', '.join(size_text(each) for each in USED_OVER_HOSTS)}; these sizes are predicted:",
        "",
        *beside_medians(runs, USED_OVER_HOSTS, known, hosts=2)[:-1],
    ]


def verdict(rows: Sequence[Sample]) -> list[str]:
    lines = []
    for name in dict.fromkeys(each.collective for each in rows):
        off = [abs(each.relative) for each in rows if each.collective == name]
        within = sum(each <= 0.15 for each in off)
        lines.append(
            f"* {name}: {within} of {len(off)} within 15 %, median {100 * statistics.median(off):.1f} %, worst "
            f"{100 * max(off):.1f} %"
        )
    return lines


# ---- beside published tables ---------------------------------------------------------------------------------------


def beside_published() -> list[str]:
    lines = [
        "| published | collective | bytes | algorithm | value | predicted | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, nbytes, collective, algorithm, dtype, cluster, figure, value in PUBLISHED:
        found = predict(collective, nbytes, cluster, algorithm, dtype)
        mine = found.time_us if figure == "us" else found.busbw_gbps
        unit = "us" if figure == "us" else "GB/s busbw"
        off = "fitted to it" if (what, nbytes) in FITTED else f"{100 * (mine / value - 1):+.1f} %"
        lines.append(
            f"| {what} | {collective} | {size_text(nbytes)} | {found.algorithm} | {value:g} {unit} | {mine:.2f} | "
            f"{off} |"
        )
    return lines


# ---- what it says --------------------------------------------------------------------------------------------------


def winners() -> list[str]:
    lines = [
        "bfloat16; of what a communicator can do: flat schedules over all ranks are left out.",
        "",
        "| cluster | collective | the fastest, from which message on |",
        "|---|---|---|",
    ]
    sizes = [1 << k for k in range(10, 31)]
    clusters = {
        "2 hosts x 8 H100": h100(2), "16 hosts x 8 H100": h100(16), "128 hosts x 8 H100": h100(128),
        "1024 hosts x 8 H100": h100(1024), "4 hosts x 2 ranks, 1 Gbit/s": ethernet(4, 2, 1.0, 1000.0),
    }  # fmt: skip
    for name, cluster in clusters.items():
        for collective in ("all_reduce", "all_gather"):
            found = crossovers(collective, sizes, cluster, "bfloat16")
            said = ", ".join(f"{each.algorithm} {size_text(each.nbytes)}" for each in found)
            lines.append(f"| {name} | {collective} | {said} |")
    return lines


def stragglers() -> list[str]:
    lines = [
        "flat_ring, one ring over all ranks, is there to compare with; no communicator does that.",
        "",
        "| 16 hosts x 8 H100, all_reduce of 256M, bfloat16 | ring | butterfly | direct | flat_ring |",
        "|---|---|---|---|---|",
    ]
    base = h100(16)
    cases: dict[str, Cluster] = {
        "all equal": base,
        "host 3 has half of its bandwidth": replace(base, slow_hosts={3: 0.5}),
        "rank 17 comes 2 ms late": replace(base, stragglers={17: 2000.0}),
        "rank 17 takes 10 times as long for its own work": replace(base, slow_ranks={17: 10.0}),
    }
    names = ("ring", "butterfly", "direct", "flat_ring")
    for what, cluster in cases.items():
        times = [predict("all_reduce", 256 << 20, cluster, name, "bfloat16").time_us for name in names]
        lines.append(f"| {what} | " + " | ".join(f"{us / 1e3:.2f} ms" for us in times) + " |")
    return lines


def steps() -> list[str]:
    lines = ["| hosts x 8 H100 | stage | step | exposed communication | efficiency |", "|---|---|---|---|---|"]
    forward = forward_us(7_000_000_000, 4096, 400.0)
    for hosts in (1, 16, 128):
        for stage in range(4):
            each = step(7_000_000_000, h100(hosts), stage=stage, layers=32, forward_us=forward)
            lines.append(
                f"| {hosts} | {stage} | {each.time_us / 1e3:.1f} ms | {each.exposed_us / 1e3:.1f} ms | "
                f"{each.efficiency:.1%} |"
            )
    return lines


def scale() -> list[str]:
    lines = ["| hosts x ranks | what | messages looked at | seconds |", "|---|---|---|---|"]
    cases: tuple[tuple[int, int, str, Cluster], ...] = (
        (8192, 1 << 30, "all_reduce, all five algorithms, all hosts equal", h100(8192)),
        (1024, 1 << 26, "all_reduce, ring, one slow host", replace(h100(1024), slow_hosts={3: 0.5})),
        (8192, 1 << 26, "all_reduce, ring, one slow host", replace(h100(8192), slow_hosts={3: 0.5})),
    )
    for hosts, nbytes, what, cluster in cases:
        started = time.perf_counter()
        found = (
            list(compare("all_reduce", nbytes, cluster, "bfloat16").values())
            if cluster.equal
            else [predict("all_reduce", nbytes, cluster, "ring", "bfloat16")]
        )
        took = time.perf_counter() - started
        lines.append(
            f"| {hosts} x 8 | {what}, {size_text(nbytes)} | {sum(each.events for each in found):,} | {took:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--reports", nargs="+", default=[], metavar="FILE", help="of ringcomm bench")
    parser.add_argument("--over-hosts", nargs="+", default=[], metavar="FILE", help="of it over two hosts")
    parser.add_argument("--out", type=Path, default=OUT)
    a = parser.parse_args()
    if a.reports:
        measured: dict[int, list[dict[str, Any]]] = {}
        for each in a.reports:
            report = json.loads(Path(each).read_text())
            measured.setdefault(len(report["devices"]), []).append(report)
    else:
        measured = measure(a.ranks, a.runs)
    over_hosts = [json.loads(Path(each).read_text()) for each in a.over_hosts] or measure_over_hosts(a.runs)
    names = [Path(word).name if word in [*a.reports, *a.over_hosts] else word for word in sys.argv[1:]]
    words = " ".join(["python -m benchmarks.simulate", *names])
    lines = [
        "# The simulator",
        "",
        f"`{words}`, {os.cpu_count()} cores.",
        "",
        "## Beside measurements on this machine",
        "",
        f"`ringcomm bench {MEASURED} -g N`, processes, float32, in place. Calibrated on "
        f"{', '.join(size_text(each) for each in USED)}; these sizes are predicted:",
        "",
    ]
    for ranks in sorted(measured):
        lines += beside_measurements(measured[ranks])
    for title, part in (
        ("Beside measurements over hosts", beside_hosts(over_hosts, measured[2])),
        ("Beside published tables", [*assumptions(), "", *beside_published()]),
        ("Which algorithm wins where", winners()),
        ("What a slow link or a late rank costs", stragglers()),
        (
            "A training step: 7e9 parameters in 32 layers, 4096 tokens a rank at 400 TFLOP/s, bfloat16, sums float32",
            steps(),
        ),
        ("What the simulation itself takes", scale()),
    ):
        lines += [f"## {title}", "", *part, ""]
    a.out.write_text("\n".join(lines))
    print(a.out.read_text())


def assumptions() -> list[str]:
    lines = ["Presets, as they are; one row, which says so, is what a number of the preset is fitted to.", ""]
    for name, cluster in (("H100", h100(1)), ("A100", a100(1))):
        lines.append(f"* {name}, inside a host: {cluster.sources['inside']}.")
    return lines


if __name__ == "__main__":
    main()
