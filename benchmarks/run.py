"""
Runs the measurements that docs/performance.md quotes: one command for all, one file of numbers for each.

    python -m benchmarks.run                 # everything (about 15 minutes on 2 cores)
    python -m benchmarks.run dist-2 train    # some of it
    python -m benchmarks.run --list
    python -m benchmarks.run --table         # Markdown from what lies in benchmarks/results

Every run writes results/NAME.txt (its command, then its output) and, for `ringcomm bench`, results/NAME.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SCAN = "-b 1K -e 256M -f 4"
RUNS = {  # name: arguments of `ringcomm bench`, or of the example
    "dist-2": "all_reduce reduce_scatter all_gather broadcast -g 2 -b 1K -e 64M -f 4 --level dist --peer gloo --limit",
    "dist-4": "all_reduce -g 4 -b 1K -e 16M -f 4 --level dist --peer gloo --limit",
    "dist-8": "all_reduce -g 8 -b 1K -e 1M -f 4 --level dist --peer gloo --limit",
    "comm-2": f"all_reduce reduce_scatter all_gather broadcast alltoall sendrecv -g 2 {SCAN} --limit",
    "comm-4": f"all_reduce reduce_scatter all_gather broadcast -g 4 {SCAN} --limit",
    "registered-2": f"all_reduce reduce_scatter all_gather broadcast -g 2 {SCAN} --registered --limit",
    "types-2": "all_reduce -g 2 -b 64K -e 64M -f 32 -d float,half,bfloat16,int8,double --limit",
    "latency-2": "all_reduce barrier -g 2 -b 8 -e 4K -f 8 --same-buffer --round-ms 100 -I 1",
    "train": "examples/train_gpt.py --compare --steps 300",
    "train-larger": "examples/train_gpt.py --compare --steps 60 --batch 4 --context 128 --layers 6 --dim 384 --heads 6",
}


def command(name: str) -> list[str]:
    words = RUNS[name].split()
    if words[0].startswith("examples/"):
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    files = ["-J", f"benchmarks/results/{name}.json", "--plot", f"benchmarks/results/{name}.png"]
    return [sys.executable, "-m", "ringcomm", "bench", *words, *files]


def shown(words: list[str]) -> str:
    """Returns the command as a user types it."""
    text = " ".join(["python", *words[1:]])
    return text.replace("python -m ringcomm", "ringcomm").replace("python -m torch.distributed.run", "torchrun")


def run(name: str) -> int:
    words = command(name)
    print(f"\n== {name}: {shown(words)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(RESULTS / f"{name}.txt", "w", encoding="utf-8") as log:
        log.write(f"$ {shown(words)}\n")
        log.flush()
        with subprocess.Popen(words, cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
    return process.returncode


def size_text(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def markdown_row(row: dict[str, Any]) -> str:
    halves = [row[half] for half in ("out_of_place", "in_place") if row[half]]
    best = min(halves, key=lambda half: half["time"])
    cells = [
        row["experiment_name"],
        row["type"],
        size_text(row["size"]),
        f"{best['time']:,.1f}",
        f"{best['bus_bw']:.2f}",
    ]
    peer, limit = row.get("peer"), row.get("limit")
    if peer and peer["ratios"]:
        cells += [
            f"{peer['timing']['mean_us']:,.0f}",
            f"{peer['ratio']:.1f} ({min(peer['ratios']):.1f}-{max(peer['ratios']):.1f})",
        ]
    else:
        cells += ["", ""]
    cells.append(f"{100 * limit['fraction']:.0f} %" if limit and limit["fraction"] else "")
    return "| " + " | ".join(cells) + " |"


def table() -> None:
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        print(f"\n### {path.stem}\n\n`{' '.join(document['args'])}`\n")
        print("| op | type | size | us | busbw GB/s | peer us | ratio, median (min-max) | of copy |\n|" + "---|" * 8)
        for row in document["results"]:
            print(markdown_row(row))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; none: all")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--table", action="store_true", help="print the results as Markdown")
    a = parser.parse_args()
    unknown = [name for name in a.names if name not in RUNS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a run; choose from {', '.join(RUNS)}")
    if a.list:
        print("\n".join(f"{name:18s} {shown(command(name))}" for name in RUNS))
        return 0
    if a.table:
        table()
        return 0
    RESULTS.mkdir(exist_ok=True)
    return max([run(name) for name in a.names or RUNS])


if __name__ == "__main__":
    sys.exit(main())
