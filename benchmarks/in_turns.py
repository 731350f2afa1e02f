"""Compares the speed of two built trees of this repository, at every level, in turns.

    python -m benchmarks.in_turns OLD NEW
    python -m benchmarks.in_turns OLD NEW --levels dist engine --turns 9

OLD and NEW are folders with built modules; with one folder twice, the table shows the noise of the machine. In a turn
each tree runs its own benchmark, in new processes; the order is reversed in every second turn. A cell is the median
time over the turns (min-max). One ratio is the median over the turns of the old time / the new time in the same turn
(min-max), the other that of the fastest turns, which other load on the machine disturbs least; both are above 1 where
the new tree is faster. A cell is slower if both are below --least; then the exit status is 1.

Levels: dist and comm are those of `ringcomm bench`, without a peer; engine is build/bench/engine_bench (cmake -B
build/bench -DRINGCOMM_BUILD_BENCHMARKS=ON && cmake --build build/bench); train is benchmarks/training/step.py. Times
are microseconds per call; those of train are multiples of a step without communication.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

PYTHON = sys.executable
COLLECTIVES = "all_reduce reduce_scatter all_gather broadcast"
COMMANDS = {  # {out} is a file without its suffix
    "dist": f"{PYTHON} -m ringcomm bench {COLLECTIVES} -g {{ranks}} -b 1K -e 16M -f 8 --level dist -J {{out}}.json",
    "comm": f"{PYTHON} -m ringcomm bench {COLLECTIVES} -g {{ranks}} -b 1K -e 16M -f 8 -J {{out}}.json",
    "engine": f"build/bench/engine_bench new {{ranks}} 5 1024 16777216 {COLLECTIVES.replace(' ', ',')}",
    "train": f"{PYTHON} -m benchmarks.training.step --world {{ranks}} --batch 1 --turns 8 --out {{out}}.md",
}
ALONE = "no communication"
"""The contestant of training/step.py that all others are compared with."""
Cells = dict[str, float]
"""Times by the name of what was measured."""
LIMIT_S = 600


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns the ratios, turn by turn."""
    return [a / b for a, b in zip(one, other, strict=True)]


def from_bench(text: str) -> Cells:
    """Returns the median times of calls in the JSON of `ringcomm bench`."""
    found = {}
    for row in json.loads(text)["results"]:
        for half in ("out_of_place", "in_place"):
            if times := row.get(f"{half}_per_iter"):
                found[f"{row['experiment_name']} {row['size']} {half}"] = times["p50_us"]
    return found


def from_engine_bench(text: str) -> Cells:
    """Returns the median times of calls in the JSON lines of engine_bench."""
    rows = [json.loads(line) for line in text.splitlines()]
    return {f"{row['op']} {row['bytes']}": statistics.median(row["us"]) for row in rows}


def from_train(text: str) -> Cells:
    """Returns from the JSON of training/step.py what our stages' steps take, as multiples of one without communication:
    both alternate in one process, so that other load on the machine cancels out."""
    steps = {name: each["seconds"] for name, each in json.loads(text)[-1]["steps"].items()}
    ours = {name: seconds for name, seconds in steps.items() if name.startswith("stage")}
    return {f"step, {name}": statistics.median(ratios(seconds, steps[ALONE])) for name, seconds in ours.items()}


def run(tree: Path, level: str, ranks: int) -> Cells:
    """Runs one benchmark of a tree once."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words = COMMANDS[level].format(ranks=ranks, out=out).split()
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode != 0:
            raise SystemExit(
                f"in_turns: {' '.join(words)} in {tree} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        if level == "engine":
            return from_engine_bench(done.stdout)
        text = out.with_suffix(".json").read_text()
        return from_train(text) if level == "train" else from_bench(text)


def in_turns(run_tree: Callable[[int], Cells], turns: int) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the old and the new times of each cell, turn by turn.

    Args:
        run_tree: runs the old tree (0) or the new one (1).
    """
    times: dict[str, tuple[list[float], list[float]]] = {}
    for turn in range(turns):
        seen = {which: run_tree(which) for which in ((0, 1) if turn % 2 == 0 else (1, 0))}
        for name in seen[0].keys() & seen[1].keys():
            both = times.setdefault(name, ([], []))
            both[0].append(seen[0][name])
            both[1].append(seen[1][name])
    return dict(sorted(times.items()))


def spread(values: Sequence[float]) -> str:
    """Formats median (min-max)."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def row(level: str, name: str, old: Sequence[float], new: Sequence[float]) -> str:
    cells = (spread(old), spread(new), spread(ratios(old, new)), f"{min(old) / min(new):.3f}")
    return f"| {level} | {name} | {' | '.join(cells)} |"


def is_slower(old: Sequence[float], new: Sequence[float], least: float) -> bool:
    return statistics.median(ratios(old, new)) < least and min(old) / min(new) < least


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("old", type=Path, metavar="OLD", help="a folder with a built tree")
    p.add_argument("new", type=Path, metavar="NEW", help="another one, or the same")
    p.add_argument("--levels", nargs="+", choices=COMMANDS, default=[*COMMANDS], metavar="LEVEL", help="all by default")
    p.add_argument("--ranks", type=int, default=2, help="processes (2)")
    p.add_argument("--turns", type=int, default=7, help="runs of each tree at each level (7)")
    p.add_argument("--least", type=float, default=0.97, help="the smallest ratio that is not slower (0.97)")
    a = p.parse_args()
    trees = [a.old.resolve(), a.new.resolve()]
    for tree in trees:
        if "engine" in a.levels and not (tree / "build" / "bench" / "engine_bench").exists():
            p.error(
                f"expected build/bench/engine_bench in {tree}, got none; build it (--help says how) or name --levels"
            )
    print("| level | | old | new | old / new | of the fastest |\n|---|---|--:|--:|--:|--:|")
    slower = []
    for level in a.levels:
        for name, (old, new) in in_turns(lambda which, level=level: run(trees[which], level, a.ranks), a.turns).items():
            print(row(level, name, old, new), flush=True)
            if is_slower(old, new, a.least):
                slower.append(f"{level} {name}")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"\n{a.ranks} ranks, {a.turns} turns, load average at the end {load:.1f}, {cores} cores.")
    print(f"Slower, with both ratios below {a.least}: {'; '.join(slower) or 'none'}.")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
