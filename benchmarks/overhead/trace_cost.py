"""Measures what observing costs an all_reduce of 2 ranks: tracing switched off, switched on, and compared with a build
without it; and a metrics file.

    python -m benchmarks.overhead.trace_cost --base FOLDER --out benchmarks/results/trace.md

FOLDER contains another build of the package `ringcomm`. The table shows the median and, after the slash, the fastest
tenth; ratios are taken within a turn, as median [quartiles].
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.overhead.builds import ROOT, Build, end, in_turns, machine, ratio, times

# Bytes: calls per turn, few, because on a shared machine some turns are then undisturbed.
SIZES = {8: 100, 1024: 100, 1 << 20: 10}


def measure(base: Path, turns: int) -> list[str]:
    lines = [
        "| ranks | bytes | without, µs | off, µs | trace, µs | metrics, µs | off / without | trace / off | "
        "metrics / off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for ranks in ("threads", "processes"):
            without, ours = Build("without", base, ranks, folder), Build("ours", ROOT, ranks, folder)
            counted = Build("counted", ROOT, ranks, folder, RINGCOMM_METRICS=f"file:{folder}/metrics")
            kinds = (
                *(("without", without, False), ("off", ours, False)),
                *(("trace", ours, True), ("metrics", counted, False)),
            )
            for nbytes, calls in SIZES.items():
                us = in_turns(kinds, nbytes, calls, turns)
                ratios = [ratio(us[a], us[b]) for a, b in (("off", "without"), ("trace", "off"), ("metrics", "off"))]
                lines.append(f"| {ranks} | {nbytes} | {' | '.join((*map(times, us.values()), *ratios))} |")
                print(lines[-1], flush=True)
            end((without, ours, counted))
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", type=Path, required=True, help="a folder that holds a package ringcomm")
    p.add_argument("--turns", type=int, default=401)
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    lines = measure(a.base.resolve(), a.turns)
    if a.out:
        a.out.write_text(
            "# What the timeline and the metrics file cost\n\nall_reduce of 2 ranks, float32; median of "
            f"{a.turns} turns / their fastest tenth, and ratios within a turn with quartiles.\n{machine()}\n\n"
            f"`python -m benchmarks.overhead.trace_cost --base FOLDER --turns {a.turns}`\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
