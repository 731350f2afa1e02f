"""Draws the README's picture from recorded results: results/dist-2.json, peers-2.md and stages-4.txt.

python -m benchmarks.overview
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.run import size_text

RESULTS = Path(__file__).resolve().parent / "results"
BLUE, GREY, LIGHT = "#2b5c8a", "#7f7f7f", "#b8b8b8"
SHADES = {
    "parameters": "#2b5c8a",
    "gradients": "#6f9bc4",
    "optimizer": "#b3cbe2",
    "transient": "#d9b38c",
    "gathered": "#eedcc3",
}
Curve = dict[int, float]
"""Microseconds per call, by bytes of the message."""


def through_torch() -> tuple[Curve, Curve, Curve]:
    """Returns the median time of all_reduce on 2 ranks: of ringcomm, of Gloo, and of a plain copy of the message."""
    ours, gloo, limit = Curve(), Curve(), Curve()
    for row in json.loads((RESULTS / "dist-2.json").read_text())["results"]:
        if row["experiment_name"] == "all_reduce":
            size = row["size"]
            ours[size] = row["in_place_per_iter"]["p50_us"]
            gloo[size] = row["peer"]["timing"]["stats"]["p50_us"]
            limit[size] = size / (row["limit"]["copy_bw"] * 1e3)  # busbw of 2 ranks is algbw; GB/s
    return ours, gloo, limit


def from_cpp() -> tuple[Curve, Curve, Curve]:
    """Returns the times of ringcomm in ordinary memory and in comm.empty, and of the fastest of the three MPI-like
    peers."""
    ours, visible, peer = Curve(), Curve(), Curve()
    for line in (RESULTS / "peers-2.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "all_reduce":
            size, times = int(cells[1]), [float(cell.split()[0]) for cell in cells[2:7]]
            ours[size], visible[size], peer[size] = times[0], times[1], min(times[2:])
    return ours, visible, peer


def stages() -> tuple[dict[str, list[float]], list[float], str]:
    """Returns MiB per rank at stages 0 to 3 by kind, the predicted sums, and the final loss."""
    kinds = {"parameters": 2, "gradients": 4, "optimizer": 5, "transient": 6, "gathered": 7}  # columns
    measured: dict[str, list[float]] = {kind: [] for kind in kinds}
    predicted, losses = [], set()
    for line in (RESULTS / "stages-4.txt").read_text().splitlines():
        words = line.split()
        if words[:1] == ["stage"] and words[2:3] == ["measured"]:
            losses.add(words[3])
            for kind, column in kinds.items():
                measured[kind].append(float(words[3 + column]))
        if words[:1] == ["stage"] and words[2:3] == ["predicted"]:
            predicted.append(sum(float(words[1 + column]) for column in kinds.values()))
    (loss,) = losses  # the same at every stage
    return measured, predicted, loss


def draw_times(axes: Any) -> None:
    ours, gloo, limit = through_torch()
    engine, visible, peer = from_cpp()
    for curve, color, style, name in (
        (gloo, GREY, "-", "Gloo, through torch.distributed"),
        (ours, BLUE, "-", "ringcomm, through torch.distributed"),
        (peer, GREY, "--", "fastest of Intel MPI, oneCCL, Open MPI, C++"),
        (engine, BLUE, "--", "ringcomm, C++"),
        (visible, BLUE, ":", "ringcomm, C++, memory of comm.empty"),
        (limit, LIGHT, "-", "copying the message once"),
    ):
        sizes = [size for size in sorted(curve) if size <= max(ours)]
        axes.plot(sizes, [curve[size] for size in sizes], style, color=color, linewidth=1.8, label=name)
    axes.set(xscale="log", yscale="log", ylabel="µs a call", title="all_reduce, float32, 2 ranks on 2 cores")
    axes.xaxis.set_major_locator(FixedLocator([1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(size)))
    axes.set_ylim(0.5, 6e6)
    axes.legend(frameon=False, fontsize=8, loc="upper left", labelspacing=0.25)


def draw_stages(axes: Any) -> None:
    measured, predicted, loss = stages()
    bottom = [0.0] * 4
    for kind, values in measured.items():
        axes.bar(range(4), values, 0.62, bottom, color=SHADES[kind], label=kind)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    for stage, total in enumerate(predicted):
        axes.plot([stage - 0.37, stage + 0.37], [total, total], color="black", linewidth=1.2,
                  label="predicted" if stage == 0 else None)  # fmt: skip
    axes.set_xticks(range(4), [f"stage {stage}" for stage in range(4)])
    axes.set(ylabel="MiB on a rank", title=f"A GPT on 4 ranks: final loss {loss} at every stage", ylim=(0, 14.5))
    axes.legend(frameon=False, fontsize=8.5)


def main() -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 3.7), layout="constrained")
    draw_times(left)
    draw_stages(right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10.5)
    figure.savefig(RESULTS / "overview.png", dpi=110)


if __name__ == "__main__":
    main()
