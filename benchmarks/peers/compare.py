"""
The cpu engine from C++ beside libraries that are timed from C (MPI, oneCCL), in turns, as one table.

    python -m benchmarks.peers.compare --config peers.json -n 2 --max 268435456 --out benchmarks/results/peers-2.md

The config names the peers: {"NAME": {"command": "mpiexec -n {n} ./mpi_bench NAME {batches} {min} {max} {ops}",
"env": {...}, "ops": [...]}}; $VARIABLES are taken from the environment. Build the programs first:

    mpicc -O2 benchmarks/peers/mpi_bench.c -o mpi_bench        (once for every MPI)
    g++ -O2 -std=c++17 benchmarks/peers/ccl_bench.cpp -o ccl_bench -lccl -lmpi
    cmake -B build/bench -DRINGCOMM_BUILD_BENCHMARKS=ON && cmake --build build/bench

In every round every program runs one op over all sizes, the order turning from round to round. A cell is the median of
all batches of all rounds (min-max), in microseconds per call, of the slowest rank; the ratio is the median over rounds
of the best peer's median divided by ours in that round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

OPS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "sendrecv", "barrier"]
OURS = ["ringcomm", "ringcomm, comm.empty"]
Cell = dict[str, list[list[float]]]  # by program: the batches of each round


def programs(a: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Ours first, then the peers of the config."""
    pin = " pin" if a.pin else ""
    engine = f"{a.engine} {{name}} {{n}} {{batches}} {{min}} {{max}} {{ops}}{pin}"
    ours: dict[str, dict[str, Any]] = {OURS[0]: {"command": engine}}
    if a.visible:
        ours[OURS[1]] = {"command": engine + " visible", "ops": OPS[:5]}
    return {**ours, **json.loads(Path(a.config).read_text())}


def run(name: str, spec: dict[str, Any], op: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """One program over all sizes of one op; what it printed as JSON lines."""
    words = {"name": "ringcomm", "n": a.n, "batches": a.batches, "min": a.min, "max": a.max, "ops": op}
    command = shlex.split(os.path.expandvars(spec["command"]).format(**words))
    env = {**os.environ, **{key: os.path.expandvars(value) for key, value in spec.get("env", {}).items()}}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=a.limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name} {op}: no end within {a.limit} s", file=sys.stderr)
        return []
    if done.returncode:
        print(f"{name} {op}: exit status {done.returncode}: {done.stderr[-300:]}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(a: argparse.Namespace) -> dict[tuple[str, int], Cell]:
    cells: dict[tuple[str, int], Cell] = defaultdict(lambda: defaultdict(list))
    everyone = programs(a)
    for turn in range(a.rounds):
        for op in a.ops.split(","):
            names = [name for name, spec in everyone.items() if op in spec.get("ops", OPS)]
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                for row in run(name, everyone[name], op, a):
                    cells[op, row["bytes"]][name].append(row["us"])
                print(f"round {turn + 1}, {op}, {name}", file=sys.stderr, flush=True)
    return cells


def text_of(rounds: list[list[float]] | None) -> str:
    if not rounds:
        return "–"
    samples = [us for batches in rounds for us in batches]
    return f"{statistics.median(samples):.4g} ({min(samples):.4g}–{max(samples):.4g})"


def ratio(cell: Cell, ours: str, peers: list[str]) -> str:
    """Best peer over ours, round by round."""
    if not cell.get(ours):
        return "–"
    ratios = []
    for turn, batches in enumerate(cell[ours]):
        best = min((statistics.median(cell[p][turn]) for p in peers if len(cell.get(p, [])) > turn), default=None)
        if best is not None:
            ratios.append(best / statistics.median(batches))
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else "–"


def table(cells: dict[tuple[str, int], Cell], a: argparse.Namespace) -> str:
    names = list(programs(a))
    ours, peers = [n for n in names if n in OURS], [n for n in names if n not in OURS]
    heads = ["op", "bytes", *names, *(f"best peer / {n}" for n in ours)]
    lines = [
        f"# {a.n} ranks, float32, microseconds per call: median (min–max) of {a.rounds} rounds of {a.batches} batches",
        "",
        f"`{shlex.join(['python', *sys.argv])}`",
        "",
        f"{os.cpu_count()} cores{', ours bound to cores as MPI binds its own' if a.pin else ''}. "
        "Above 1: faster than all.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for (op, nbytes), cell in sorted(cells.items(), key=lambda item: (OPS.index(item[0][0]), item[0][1])):
        row = [op, str(nbytes), *(text_of(cell.get(n)) for n in names), *(ratio(cell, n, peers) for n in ours)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--engine", default="build/bench/engine_bench")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--min", type=int, default=1024)
    parser.add_argument("--max", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--pin", action="store_true", help="bind our ranks to cores, as MPI launchers bind theirs")
    parser.add_argument("--visible", action="store_true", help="ours also in memory that the peers reach")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one program and op")
    parser.add_argument("--out", help="also write the table there")
    a = parser.parse_args()
    text = table(measure(a), a)
    print(text)
    if a.out:
        Path(a.out).write_text(text)


if __name__ == "__main__":
    main()
