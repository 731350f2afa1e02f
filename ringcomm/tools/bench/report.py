"""Prints the benchmark's numbers as nccl-tests does: text table, JSON, and a plot."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ringcomm.terminal import columns, folded
from ringcomm.tools.bench.options import Options, size_text

if TYPE_CHECKING:
    from ringcomm.tools.bench.cases import Case

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


Device = dict[str, Any]
"""Where a rank ran, as in the JSON: ``rank``, ``pid``, ``host``, ``cores``, the device's ``name``, and how many
``ranks`` share it."""


def stats_of(times_us: Sequence[float]) -> dict[str, float]:
    """Returns statistics of single calls, by their names in the JSON; a call lasts until its slowest rank has ended."""
    ordered = sorted(times_us) or [0.0]
    mean, stdev = statistics.fmean(ordered), statistics.pstdev(ordered)
    ranks = {percent: ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 95, 99)}
    return {
        "min_us": ordered[0], "max_us": ordered[-1], "avg_us": mean,
        "p50_us": ranks[50], "p95_us": ranks[95], "p99_us": ranks[99],
        "stdev_us": stdev, "cv_pct": 100 * stdev / mean if mean else 0.0,
    }  # fmt: skip


@dataclass
class Half:
    """The out-of-place or the in-place half of a line, as one target ran it.

    Attributes:
        target: "ringcomm", "copy", or the peer's backend.
        name: "out_of_place" or "in_place".
        mean_us: the median over the rounds of nccl-tests' mean over the calls.
        iterations: number of calls in all rounds.
        round_us: the median call of every round.
        stats: `stats_of` the calls, if each call has its own time stamp.
        algbw, busbw: bandwidths in GB/s, by mean_us.
        wrong: number of wrong elements; None: not checked.
    """

    target: str
    name: str
    mean_us: float
    iterations: int
    round_us: list[float]
    stats: dict[str, float] | None
    algbw: float
    busbw: float
    wrong: int | None = None

    def over(self, other: Half) -> list[float]:
        """Returns, for each round, this target's median call / the other's."""
        return [mine / theirs for mine, theirs in zip(self.round_us, other.round_us, strict=True)]


@dataclass
class Row:
    """One line of the table."""

    case: Case
    halves: dict[str, Half] = field(default_factory=dict)
    peer: Half | None = None  # the same case through another backend
    copy_gbps: float | None = None
    canonical: tuple[int, int] | None = None

    @property
    def busbw(self) -> float:
        """The better half's bus bandwidth."""
        return max((half.busbw for half in self.halves.values()), default=0.0)

    @property
    def ratios(self) -> list[float]:
        """The peer's time divided by ours, for each round; empty if one of the two was not measured."""
        ours = self.halves.get(self.peer.name) if self.peer else None
        return self.peer.over(ours) if self.peer and ours else []

    @property
    def of_limit(self) -> float | None:
        return self.busbw / self.copy_gbps if self.copy_gbps else None


@dataclass
class Table:
    """All lines of one collective."""

    collective: str
    world_size: int
    devices: list[Device] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """#wrong plus the elements that are not in canonical order."""
        exact = sum(half.wrong or 0 for row in self.rows for half in row.halves.values())
        return exact + sum(row.canonical[1] for row in self.rows if row.canonical)

    @property
    def is_checked(self) -> bool:
        return any(half.wrong is not None for row in self.rows for half in row.halves.values())

    @property
    def out_of_bounds(self) -> int:
        """nccl-tests' count of half lines with a wrong element."""
        return sum(bool(half.wrong) for row in self.rows for half in row.halves.values())

    @property
    def average_busbw(self) -> float:
        """The mean of all bus bandwidths, over both halves."""
        values = [half.busbw for row in self.rows for half in row.halves.values()]
        return statistics.fmean(values) if values else 0.0

    def too_slow(self, min_bw: float | None) -> bool:
        return min_bw is not None and self.collective != "barrier" and self.average_busbw < min_bw


def number(value: float, width: int) -> str:
    """Formats a number as nccl-tests' getFloatStr does: as many digits as fit."""
    digits = len(str(int(value))) if value >= 1 else 0
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    return f"{value:{width}.0f}" if digits < width + 1 else f"{value:{width}.1e}"


def header(name: str, options: Options, devices: Sequence[Device]) -> str:
    """Returns the text above the first line of numbers."""
    import ringcomm

    iters = options.iters if options.iters else f"20 or {options.round_ms:g} ms"
    warmup = f"{options.warmup_ms:g} ms" if options.warmup is None else options.warmup
    words = [
        f"# ringcomm bench version {ringcomm.__version__}",
        f"# Collective test starting: {name}",
        f"# nRanks {len(devices)} ({options.ranks_as}) minBytes {options.sizes[0]} maxBytes {options.sizes[-1]} "
        f"step: {options.step} warmup iters: {warmup} iters: {iters} agg iters: {options.agg} "
        f"validation: {options.check} unalign: {options.unalign}",
        f"# level: {options.level} buffers: {'registered' if options.registered else 'private'} algorithm: "
        f"{options.algorithm} peer: {options.peer or 'none'} rounds: {options.rounds} average: {options.average}",
        "#",
        "# Using devices",
        *map("#  Rank {rank:2d} Pid {pid:6d} on {host:>10s} {name}, {cores} cores".format_map, devices),
        *shared(devices),
        "#",
    ]
    return "\n".join([folded("\n".join(words)), *_titles(options)])


def _short(options: Options) -> bool:
    """Whether the terminal is too narrow for nccl-tests' columns: then a line has those of the faster half alone."""
    return columns() < len(_wide_titles(options)[1])


def shared(devices: Sequence[Device]) -> list[str]:
    """Returns a warning line if ranks share a device, because their numbers are not a link's bandwidth."""
    most = max((device["ranks"] for device in devices), default=1)
    return [f"# {most} ranks sharing one GPU (L2/HBM)"] if most > 1 else []


_SHORT = "{:>10s} {:>8s} {:>6s} {:>7s} {:>6s} {:>6s}"


def _titles(options: Options) -> list[str]:
    if not _short(options):
        return _wide_titles(options)
    more = " " + f"{'ratio':>6s}" if options.peer else ""
    more += " " + f"{'of it':>5s}" if options.limit else ""
    names = _SHORT.format("size", "type", "redop", "time", "busbw", "#wrong")
    units = _SHORT.format("(B)", "", "", "(us)", "(GB/s)", "")
    return ["#" + names[1:] + more, "#" + units[1:].rstrip()]


def _short_line(row: Row, options: Options) -> str:
    half = max(row.halves.values(), key=lambda half: half.busbw, default=None)
    cells = ("N/A",) * 3
    if half is not None:
        wrong = "N/A" if half.wrong is None else f"{half.wrong:g}"
        cells = (number(half.mean_us, 7), number(half.busbw, 6), wrong)
    text = _SHORT.format(str(row.case.nbytes), row.case.type_name, row.case.reduction, *cells)
    if options.peer:
        text += f" {statistics.median(row.ratios):6.2f}" if row.ratios else f" {'N/A':>6s}"
    if options.limit:
        text += f" {100 * row.of_limit:4.0f}%" if row.of_limit is not None else f" {'N/A':>5s}"
    return text


def _wide_titles(options: Options) -> list[str]:
    half, units = "  {:>7s}  {:>6s}  {:>6s}  {:>6s}", ("(us)", "(GB/s)", "(GB/s)", "")
    spread = "  {:>7s}  {:>7s}  {:>7s}  {:>7s}" if options.per_iter else ""
    more, more_units = ("i_min", "i_max", "i_p99", "i_cv%"), ("(us)", "(us)", "(us)", "(%)")
    front = "# {:>10s}  {:>12s}  {:>8s}  {:>6s}  {:>6s}"
    width = len(half.format(*units)) + len(spread.format(*more_units))
    above = front.format("", "", "", "", "") + "out-of-place".center(width) + "in-place".center(width)
    names = front.format("size", "count", "type", "redop", "root")
    below = front.format("(B)", "(elements)", "", "", "")
    for _ in range(2):
        names += half.format("time", "algbw", "busbw", "#wrong") + spread.format(*more)
        below += half.format(*units) + spread.format(*more_units)
    if options.peer:
        above += options.peer.center(width)
        names += f"  {'time':>7s}  {'busbw':>6s}  {'ratio (min-max)':>22s}"
        below += f"  {'(us)':>7s}  {'(GB/s)':>6s}  {'peer/ours':>22s}"
    if options.limit:
        names += f"  {'copy':>6s}  {'of it':>6s}"
        below += f"  {'(GB/s)':>6s}  {'(%)':>6s}"
    return [above.rstrip(), names + ("  timestamp" if options.timestamps else ""), below.rstrip()]


def _half_text(half: Half | None, options: Options) -> str:
    if half is None:
        return f"  {'N/A':>7s}  {'N/A':>6s}  {'N/A':>6s}  {'N/A':>6s}" + (
            "  {:>7s}".format("N/A") * 4 if options.per_iter else ""
        )
    wrong = "   N/A" if half.wrong is None else f"{half.wrong:6g}"
    text = f"  {number(half.mean_us, 7)}  {number(half.algbw, 6)}  {number(half.busbw, 6)}  {wrong}"
    stats = half.stats
    if options.per_iter and stats:
        text += "".join("  " + number(stats[key], 7) for key in ("min_us", "max_us", "p99_us", "cv_pct"))
    return text


def line(row: Row, options: Options) -> str:
    """Returns one line of numbers."""
    if _short(options):
        return _short_line(row, options)
    case = row.case
    text = f"{case.nbytes:12d}  {case.count:12d}  {case.type_name:>8s}  {case.reduction:>6s}  {case.root:6d}"
    text += _half_text(row.halves.get("out_of_place"), options) + _half_text(row.halves.get("in_place"), options)
    if options.peer and row.peer is None:
        text += f"  {'N/A':>7s}  {'N/A':>6s}  {'N/A':>22s}"
    elif row.peer:
        ratios = row.ratios or [0.0]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        text += f"  {number(row.peer.mean_us, 7)}  {number(row.peer.busbw, 6)}  {spread:>22s}"
    if options.limit:
        share = row.of_limit
        text += f"  {number(row.copy_gbps or 0.0, 6)}  " + (f"{100 * share:6.0f}" if share is not None else "   N/A")
    return text + (time.strftime("  " + TIME_FORMAT) if options.timestamps else "")


def footer(table: Table, options: Options) -> str:
    """Returns the text below the numbers: nccl-tests' two verdicts, and the verdict on the canonical order."""
    bad, slow = table.out_of_bounds, table.too_slow(options.min_bw)
    verdict = "" if options.min_bw is None else "FAILED" if slow else "OK"
    bounds = f"{bad} {'FAILED' if bad else 'OK'}" if table.is_checked else "not checked"
    words = [
        f"# {'Out of bounds values':<20s} : {bounds}",
        f"# {'Avg bus bandwidth':<20s} : {table.average_busbw:g} {verdict}".rstrip(),
    ]
    checked = [row.canonical for row in table.rows if row.canonical]
    if checked:
        elements, wrong = (sum(column) for column in zip(*checked, strict=True))
        words.append(
            f"# {'Canonical order':<20s} : {wrong} of {elements} random floats differ {'FAILED' if wrong else 'OK'}"
        )
    ratios = [statistics.median(row.ratios) for row in table.rows if row.ratios]
    if ratios:
        several = f"{min(ratios):.2f} to {max(ratios):.2f} over the sizes"
        words.append(
            f"# {'Ratio to ' + (options.peer or ''):<20s} : {several if len(ratios) > 1 else f'{ratios[0]:.2f}'}, "
            "its time over ours"
        )
    return folded("\n".join(words)) + "\n".join(["", "#", f"# Collective test concluded: {table.collective}"])


def _half_json(half: Half | None) -> dict[str, Any] | None:
    if half is None:
        return None
    return {"time": half.mean_us, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": half.wrong}


def _row_json(row: Row) -> dict[str, Any]:
    case = row.case
    found = {
        "size": case.nbytes, "count": case.count, "type": case.type_name, "redop": case.reduction,
        "root": str(case.root),
        "out_of_place": _half_json(row.halves.get("out_of_place")), "in_place": _half_json(row.halves.get("in_place")),
        "actual_iterations": max((h.iterations for h in row.halves.values()), default=0),
        "experiment_name": case.collective.name,
    }  # fmt: skip
    for name, half in row.halves.items():
        if half.stats:
            found[f"{name}_per_iter"] = {**half.stats, "round_us": half.round_us}
    if row.peer:
        theirs = asdict(row.peer)
        found["peer"] = {
            "name": row.peer.target, "half": row.peer.name,
            "timing": {key: theirs[key] for key in ("mean_us", "iterations", "round_us", "stats")},
            "busbw": row.peer.busbw, "ratios": row.ratios,
            "ratio": statistics.median(row.ratios) if row.ratios else None,
        }  # fmt: skip
    if row.copy_gbps is not None:
        found["limit"] = {"copy_bw": row.copy_gbps, "fraction": row.of_limit}
    if row.canonical:
        found["canonical"] = {"checked": row.canonical[0], "wrong": row.canonical[1]}
    return found


def as_json(tables: Sequence[Table], options: Options, devices: Sequence[Device], started: str) -> dict[str, Any]:
    """Returns nccl-tests' document (with its keys, and its strings for truth values), with a few keys of our own."""
    import torch

    import ringcomm

    wrong = sum(table.out_of_bounds for table in tables)
    average = statistics.fmean([table.average_busbw for table in tables]) if tables else 0.0
    slow = any(table.too_slow(options.min_bw) for table in tables)
    config = {key: value for key, value in asdict(options).items() if key not in ("args", "json", "plot")}
    return {
        "version": 2, "start_time": started, "args": ["ringcomm", "bench", *options.args],
        "ringcomm_version": ringcomm.__version__, "torch_version": torch.__version__,
        "config": config, "devices": [*devices],
        "label": "".join(shared(devices)).removeprefix("# "),
        "results": [_row_json(row) for table in tables for row in table.rows],
        "out_of_bounds": {
            "count": wrong,
            "okay": str(wrong == 0).lower() if any(table.is_checked for table in tables) else "unchecked",
        },
        "average_bus_bandwidth": {
            "bandwidth": average, "okay": "unchecked" if options.min_bw is None else str(not slow).lower(),
        },
        "end_time": time.strftime(TIME_FORMAT),
    }  # fmt: skip


def write_json(path: str, document: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


_Point = tuple[int, float, float, float]
"""A point of a curve: x in bytes, y in us (`time`) or GB/s (`busbw`), and the bounds of y over the rounds."""


def _kind(row: Row) -> tuple[str, str, str]:
    case = row.case
    root = f"root {case.root}" if case.root >= 0 else ""
    return case.type_name, "" if case.reduction == "none" else case.reduction, root


def _differing(rows: Sequence[Row], row: Row) -> list[str]:
    """Returns what tells a row's curve from the others': its type, reduction and root, where the rows have several."""
    columns = zip(*map(_kind, rows), strict=True)
    return [mine for mine, column in zip(_kind(row), columns, strict=True) if mine and len({*column}) > 1]


def _common(rows: Sequence[Row]) -> list[str]:
    """Returns the type, reduction and root that all rows have."""
    return [column[0] for column in zip(*map(_kind, rows), strict=True) if column[0] and len({*column}) == 1]


def _curves(rows: Sequence[Row], value: str) -> dict[str, list[_Point]]:
    """Returns curves by label."""
    curves: dict[str, list[_Point]] = {}

    def add(label: str, row: Row, us: float, gbps: float, rounds: Sequence[float]) -> None:
        y = us if value == "time" else gbps
        if row.case.nbytes and y:
            # Both are proportional to 1 over the other; the rounds' spread is relative to their median.
            spread = [each / statistics.median(rounds) for each in rounds] or [1.0]
            around = [y * each if value == "time" else y / each for each in spread if each > 0]
            curves.setdefault(label, []).append((row.case.nbytes, y, min(around), max(around)))

    for row in rows:
        kind = "".join(f" {each}" for each in _differing(rows, row))
        for name, half in row.halves.items():
            add(f"ringcomm {name.replace('_', '-')}{kind}", row, half.mean_us, half.busbw, half.round_us)
        if row.peer:
            add(row.peer.target + kind, row, row.peer.mean_us, row.peer.busbw, row.peer.round_us)
        if row.copy_gbps:
            add("plain copy" + kind, row, row.case.nbytes / row.copy_gbps / 1e3, row.copy_gbps, ())
    return curves


def _draw(axis: Any, rows: Sequence[Row], value: str) -> None:
    from matplotlib import colormaps

    curves = _curves(rows, value)
    ours = [label for label in curves if label.startswith("ringcomm")]
    shades = [colormaps["tab10"](i) for i in range(10) if i != 7]  # without its grey, which is the copy's
    if len(curves) > len(shades):
        shades = [colormaps["turbo"](i / (len(curves) - 1)) for i in range(len(curves))]
    colors = dict(zip([*ours, *(label for label in curves if label not in ours)], shades, strict=False))
    for label, points in curves.items():
        xs, ys, low, high = zip(*points, strict=True)
        style = {"color": "grey", "linestyle": "--"} if label == "plain copy" else {"color": colors[label]}
        axis.plot(xs, ys, marker="o", markersize=3, linewidth=1.4, label=label, **style)
        if low != high:
            axis.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda nbytes, _: size_text(round(nbytes)))
    axis.set_xlabel("message, bytes")
    axis.set_ylabel("time per call, us" if value == "time" else "bus bandwidth, GB/s")
    axis.grid(True, which="major", alpha=0.3)


def plot(path: str, tables: Sequence[Table]) -> None:
    """Plots time and bus bandwidth over size, one row of panels per collective. The barrier has no size and is left
    out."""
    import matplotlib  # `parse_options` has looked whether it is installed

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter

    shown = [table for table in tables if any(row.case.nbytes for row in table.rows)]
    count = max(1, len(shown))
    figure, axes = pyplot.subplots(count, 2, figsize=(11, 0.5 + 3.6 * count), squeeze=False, layout="constrained")
    for table, (left, right) in zip(shown, axes, strict=False):
        _draw(left, table.rows, "time")
        _draw(right, table.rows, "busbw")
        left.set_yscale("log")
        left.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=True))
        left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.7)))
        left.set_title(", ".join([table.collective, f"{table.world_size} ranks", *_common(table.rows)]), loc="left")
        right.set_ylim(bottom=0)
        if len(right.lines) <= 9:
            right.legend(fontsize=8)
        else:
            right.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5))
    for axis in axes[: count - 1].flat:
        axis.set_xlabel("")
    figure.suptitle(machine(tables[0].devices) + "\nline: median turn; band: fastest to slowest turn", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def machine(devices: Sequence[Device]) -> str:
    """Returns the machine in words, such as "node7: 2 cores, AMD EPYC; ringcomm 0.1.0, torch 2.13"."""
    import torch

    import ringcomm
    from ringcomm.observe.info import processor

    hosts = list(dict.fromkeys(device["host"] for device in devices))
    names = list(dict.fromkeys(device["name"].partition(" ")[2] or device["name"] for device in devices))
    what = processor() if names == ["cpu"] else ", ".join(names)
    cores = f"{devices[0]['cores']} cores, " if devices else ""
    return f"{', '.join(hosts)}: {cores}{what}; ringcomm {ringcomm.__version__}, torch {torch.__version__}"
