"""
The simulator beside measurements and beside published tables.

    python benchmarks/simulate.py                    # everything; writes results/simulate.md (about 4 minutes, 2 cores)
    python benchmarks/simulate.py --ranks 2 --runs 3
    python benchmarks/simulate.py --reports one.json two.json    # of ringcomm bench, instead of measuring here

A run is one `ringcomm bench` of four collectives over eleven sizes; runs with different numbers of ranks take turns,
and every measurement is the median over the runs that nothing else disturbed (see `quiet`). Every second size
calibrates, the others are predicted.
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

from ringcomm.simulate import Cluster, compare, crossovers, predict
from ringcomm.simulate_calibrate import Deviation, calibrate, deviations, samples_of
from ringcomm.simulate_presets import a100, ethernet, h100
from ringcomm.simulate_training import forward_us, step

OUT = Path(__file__).resolve().parent / "results" / "simulate.md"
MEASURED = "all_reduce reduce_scatter all_gather broadcast -b 64K -e 64M -f 2 -c 0 --rounds 5"
USED = tuple(64 << (10 + 2 * k) for k in range(6))  # bytes that calibrate: 64K, 256K, ..., 64M
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


def size(nbytes: int) -> str:
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return str(nbytes)


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
                    "ringcomm.cli",
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


def quiet(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The reports without the collectives during which something else ran on the machine: those of a run whose median
    time, over that of the fastest run at each size, is more than 1.25; the three quietest of each stay in any case. And
    how many runs of each are left."""
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
    """(least, most) time over the runs, by collective and bytes."""
    times: dict[tuple[str, int], list[float]] = {}
    for each in reports:
        for sample in samples_of(each):
            times.setdefault((sample.collective, sample.nbytes), []).append(sample.time_us)
    return {key: (min(values), max(values)) for key, values in times.items()}


def beside_measurements(runs: Sequence[dict[str, Any]]) -> list[str]:
    reports, left = quiet(runs)
    found = calibrate(reports, sizes=USED)
    held = [s for s in samples_of(reports) if s.nbytes not in USED]
    ranges = spread(reports)
    rows = deviations(found.cluster, held)
    lines = [
        f"### {found.cluster.world_size} ranks, {len(runs)} runs",
        "",
        "Runs during which the machine was free, which count: " + ", ".join(f"{k} {v}" for k, v in left.items()) + ".",
        "",
        "| collective | bytes | measured us: median (min–max of the runs) | predicted us | off by |",
        "|---|---|---|---|---|",
    ]
    for each in rows:
        s = each.sample
        low, high = ranges[s.collective, s.nbytes]
        lines.append(
            f"| {s.collective} | {size(s.nbytes)} | {s.time_us:.1f} ({low:.1f}–{high:.1f}) | {each.predicted_us:.1f} | "
            f"{100 * each.relative:+.1f} % |"
        )
    return [*lines, "", *verdict(rows), ""]


def verdict(rows: Sequence[Deviation]) -> list[str]:
    lines = []
    for name in dict.fromkeys(each.sample.collective for each in rows):
        off = [abs(each.relative) for each in rows if each.sample.collective == name]
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
        lines.append(
            f"| {what} | {collective} | {size(nbytes)} | {found.algorithm} | {value:g} {unit} | {mine:.2f} | "
            f"{100 * (mine / value - 1):+.1f} % |"
        )
    return lines


# ---- what it says --------------------------------------------------------------------------------------------------


def winners() -> list[str]:
    lines = ["| cluster | collective | the fastest, from which message on |", "|---|---|---|"]
    sizes = [1 << k for k in range(10, 31)]
    clusters = {
        "2 hosts x 8 H100": h100(2), "16 hosts x 8 H100": h100(16), "128 hosts x 8 H100": h100(128),
        "1024 hosts x 8 H100": h100(1024), "4 hosts x 2 ranks, 1 Gbit/s": ethernet(4, 2, 1.0, 1000.0),
    }  # fmt: skip
    for name, cluster in clusters.items():
        for collective in ("all_reduce", "all_gather"):
            found = crossovers(collective, sizes, cluster, "bfloat16")
            said = ", ".join(f"{each.algorithm} {size(each.nbytes)}" for each in found)
            lines.append(f"| {name} | {collective} | {said} |")
    return lines


def stragglers() -> list[str]:
    lines = [
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
    cases: tuple[tuple[int, str, Cluster], ...] = (
        (8192, "all_reduce, all five algorithms, all hosts equal", h100(8192)),
        (1024, "all_reduce, ring, one slow host", replace(h100(1024), slow_hosts={3: 0.5})),
        (8192, "all_reduce, ring, one slow host", replace(h100(8192), slow_hosts={3: 0.5})),
    )
    for hosts, what, cluster in cases:
        started = time.perf_counter()
        found = (
            list(compare("all_reduce", 1 << 30, cluster, "bfloat16").values())
            if cluster.equal
            else [predict("all_reduce", 1 << 30, cluster, "ring", "bfloat16")]
        )
        took = time.perf_counter() - started
        lines.append(f"| {hosts} x 8 | {what} | {sum(each.events for each in found):,} | {took:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--reports", nargs="+", default=[], metavar="FILE", help="of ringcomm bench")
    parser.add_argument("--out", type=Path, default=OUT)
    a = parser.parse_args()
    if a.reports:
        measured: dict[int, list[dict[str, Any]]] = {}
        for each in a.reports:
            report = json.loads(Path(each).read_text())
            measured.setdefault(len(report["devices"]), []).append(report)
    else:
        measured = measure(a.ranks, a.runs)
    names = [Path(word).name if word in a.reports else word for word in sys.argv[1:]]
    words = " ".join(["python benchmarks/simulate.py", *names])
    lines = [
        "# The simulator",
        "",
        f"`{words}`, {os.cpu_count()} cores.",
        "",
        "## Beside measurements on this machine",
        "",
        f"`ringcomm bench {MEASURED} -g N`, processes, float32, in place. Calibrated on "
        f"{', '.join(size(each) for each in USED)}; these sizes are predicted:",
        "",
    ]
    for ranks in sorted(measured):
        lines += beside_measurements(measured[ranks])
    for title, part in (
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
    lines = ["Presets, as they are; nothing is fitted to these rows but what is said here.", ""]
    for name, cluster in (("H100", h100(1)), ("A100", a100(1))):
        lines.append(f"* {name}, inside a host: {cluster.sources['inside']}.")
    return lines


if __name__ == "__main__":
    main()
