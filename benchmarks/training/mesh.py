"""
Runs the example on one mesh after another, and compares loss, bits, memory per rank and speed.

    python -m benchmarks.training.mesh                    # into results/mesh.txt, a few minutes on 2 cores
    python -m benchmarks.training.mesh --steps 20 --only dp

Every mesh has the same windows, with four micro-batches per step. If there are more ranks than cores, they share the
cores; their tokens/s then show the cost of composing, not its gain. A mesh's checksum of all parameters is compared
with that of one process, to show whether the mesh changes the bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
MODEL = "--batch 2 --context 64 --layers 4 --dim 64 --heads 4 --clip 1 --sample 0"
RUNS = {  # name: ranks, and the flags of the mesh, four micro-batches in total
    "one process": (1, "--micro-batches 4"),
    "dp 2": (2, "--micro-batches 2"),
    "dp 4": (4, ""),
    "pp 2, GPipe": (2, "--pp 2 --micro-batches 4 --schedule gpipe"),
    "pp 2, 1F1B": (2, "--pp 2 --micro-batches 4"),
    "pp 2, interleaved": (2, "--pp 2 --micro-batches 4 --schedule interleaved"),
    "pp 2, zero bubble": (2, "--pp 2 --micro-batches 4 --schedule zero-bubble"),
    "dp 2 x pp 2, stage 0": (4, "--pp 2 --micro-batches 2"),
    "dp 2 x pp 2, stage 1": (4, "--pp 2 --micro-batches 2 --stage 1"),
    "dp 2 x pp 2, stage 2": (4, "--pp 2 --micro-batches 2 --stage 2"),
    "dp 2 x pp 2, stage 3": (4, "--pp 2 --micro-batches 2 --stage 3"),
    "tp 2": (2, "--tp 2 --micro-batches 4"),
    "tp 2, sequence parallel": (2, "--tp 2 --sequence-parallel --micro-batches 4"),
    "cp 2": (2, "--cp 2 --micro-batches 4"),
    "dp 2 x tp 2 x pp 2, stage 1": (8, "--dp 2 --tp 2 --pp 2 --micro-batches 2 --stage 1"),
    "cp 2 x tp 2 x pp 2, stage 3": (8, "--cp 2 --tp 2 --pp 2 --micro-batches 4 --stage 3"),
}
HALVES = (  # a checkpoint half-way, and the mesh that resumes from it
    ("dp 2 x tp 2, then pp 2", 4, "--tp 2 --micro-batches 2 --stage 2", 2, "--pp 2 --micro-batches 4"),
    ("dp 4, then pp 2", 4, "--stage 3", 2, "--pp 2 --micro-batches 4"),
)


def run(ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of a run of the example."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run(
            [*command, "examples/train_gpt.py", *MODEL.split(), *words, "--json", str(file)],
            cwd=BENCHMARKS.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
        )
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def line(name: str, found: dict[str, Any], reference: dict[str, Any]) -> str:
    """Returns a row of the table."""
    off = abs(found["loss"] - reference["loss"]) / reference["loss"]
    same = "the same" if found["parameters"] == reference["parameters"] else f"loss off by {off:.0e}"
    median, least, most = found["step_ms"]
    return (
        f"{name:28s}{found['loss']:10.6f}  {found['parameters']:18s}{same:20s}{max(found['kept_mib']):6.2f}"
        f"{max(found['peak_mib']):7.1f}{found['tokens_per_s']:11,.0f}   {median:.1f} ({least:.1f}-{most:.1f})"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=60, help="of each run (60)")
    p.add_argument("--only", metavar="WORD", default="", help="meshes with this in their names, beside one process")
    p.add_argument("--out", metavar="FILE", help="(results/mesh.txt)")
    a = p.parse_args()
    steps = ["--steps", str(a.steps)]
    titles = f"{'final loss':>10s}  {'parameters':18s}{'bits':20s}{'kept':>6s}{'peak':>7s}{'tokens/s':>11s}"
    lines = [
        f"$ python -m benchmarks.training.mesh --steps {a.steps}",
        f"{platform.machine()}, {os.cpu_count()} cores, one thread a rank; each run: torchrun ... "
        f"examples/train_gpt.py {MODEL} --steps {a.steps}",
        "",
        f"{'':28s}{titles}   step ms",
    ]
    print("\n".join(lines), flush=True)
    reference: dict[str, Any] = {}

    def show(name: str, found: dict[str, Any]) -> None:
        lines.append(line(name, found, reference))
        print(lines[-1], flush=True)

    for name, (ranks, words) in RUNS.items():
        if not reference or a.only in name:
            found = run(ranks, [*words.split(), *steps])
            reference = reference or found
            show(name, found)
    for name, ranks, words, then_ranks, then_words in HALVES:
        if a.only in name:
            with tempfile.TemporaryDirectory() as folder:
                half = ["--until", str(a.steps // 2), "--save", f"{folder}/half"]
                run(ranks, [*words.split(), *steps, *half])
                show(name, run(then_ranks, [*then_words.split(), *steps, "--resume", f"{folder}/half"]))
    lines += [
        "",
        "final loss: the mean of the last 50 steps. parameters: checksum of the whole model. bits: beside one process.",
        "kept: between steps, parameters, gradients and optimizer state, MiB of the rank with most; peak: of a rank's",
        "process in the first steps, beyond what it had before. tokens/s: of the median step; step ms: median",
        "(min-max) of the slowest rank; runs one after the other, so what else the machine does is in them.",
    ]
    print("\n".join(lines[-5:]))
    out = Path(a.out) if a.out else BENCHMARKS / "results" / "mesh.txt"
    if a.out or not a.only:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
