"""Draws a schedule, one row per rank over time, as planned and as measured, in a PNG or a web page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.pipeline_parallel.check import Timed
from ringcomm.pipeline_parallel.schedules import Action, Kind

COLORS = {Kind.FORWARD: "#2f6fb5", Kind.BACKWARD: "#168a68", Kind.INPUT: "#dd8a1c", Kind.WEIGHT: "#9a5fa8"}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, inputs",
    Kind.WEIGHT: "backward, weights",
}
IDLE, INK, MUTED = "#eef0f3", "#1d2430", "#6b7482"
_PALEST = 0.55  # share of white in the last chunk
_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))  # from this many seconds on, factor, name


@dataclass(frozen=True)
class _Panel:
    """One time axis with its rows, which starts at 0."""

    caption: str
    unit: str
    rows: list[list[Timed]]
    chunks: int

    @property
    def span(self) -> float:
        return max(end for row in self.rows for _, _, end in row)

    def idle(self, row: Sequence[Timed]) -> float:
        """Returns the share of the axis in which ``row`` is idle."""
        return 1 - sum(end - start for _, start, end in row) / self.span

    def idle_mean(self) -> float:
        return sum(self.idle(row) for row in self.rows) / len(self.rows)

    def colored(self, row: Sequence[Timed]) -> Iterator[tuple[Action, float, float, str]]:
        """Yields the actions of a row with their colors: a color for each kind, paler for later chunks."""
        stages = sorted({action.stage for action, _, _ in row})
        for action, start, end in row:
            pale = _PALEST * stages.index(action.stage) / max(1, self.chunks - 1)
            yield action, start, end, _mixed(COLORS[action.kind], pale)


def draw(
    rows: Sequence[Sequence[Timed]],
    path: str | Path,
    title: str = "",
    measured: Sequence[Sequence[Timed]] | None = None,
) -> None:
    """Draws the actions of ``rows`` by rank (as `check.times` returns them), and below them those of ``measured``.

    The times of ``measured`` are seconds from any origin. The number in a box is the micro-batch (where there is room),
    the color shows the kind, the shade the chunk. At the end of each row stands its idle share of the time from the
    first start to the last end.

    ``path`` ends in ``.png`` (drawn by matplotlib) or ``.html`` (one self-contained file that shows stage and times
    when the mouse is over a box). An existing file is overwritten.

    Raises:  InvalidArgumentError for another ending, where no action takes time, or for measured rows of another number
             of ranks; UnsupportedError for ``.png`` where matplotlib is missing.
    """
    path = Path(path)
    if path.suffix not in (".png", ".html"):
        raise InvalidArgumentError(f"draw: expected a path ending in .png or .html, got {str(path)!r}; rename it")
    panels = [_panel("rows", rows, "planned" if measured is not None else "", in_seconds=False)]
    if measured is not None:
        if len(measured) != len(rows):
            raise InvalidArgumentError(
                f"draw: expected measured rows of {len(rows)} ranks, as planned, got {len(measured)}; "
                "pass one for each rank"
            )
        panels.append(_panel("measured rows", measured, "measured", in_seconds=True))
    if path.suffix == ".png":
        _figure(panels, title).savefig(path, format="png")
    else:
        path.write_text(_page(panels, title), encoding="utf-8")


def _panel(what: str, rows: Sequence[Sequence[Timed]], caption: str, in_seconds: bool) -> _Panel:
    """Returns the panel of some rows, whose times are moved to start at 0 and, if they are seconds, converted to a
    fitting unit."""
    first = min((start for row in rows for _, start, _ in row), default=0.0)
    span = max((end for row in rows for _, _, end in row), default=0.0) - first
    if not 0 < span < math.inf:
        raise InvalidArgumentError(f"draw: expected {what} with an action that takes time, got none; pass some")
    factor, unit = next((f, name) for least, f, name in _UNITS if span >= least) if in_seconds else (1.0, "")
    moved = [[(action, (start - first) * factor, (end - first) * factor) for action, start, end in row] for row in rows]
    return _Panel(caption, unit, moved, max(len({action.stage for action, _, _ in row}) for row in rows))


def _mixed(color: str, white: float) -> str:
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in channels)


def _ink(color: str) -> str:
    """Returns white or the dark ink color, whichever is easier to read on ``color``."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else INK


def _heading(panel: _Panel) -> str:
    return f"{panel.caption + ': ' if panel.caption else ''}{panel.idle_mean():.1%} idle"


def _legend(panels: Sequence[_Panel]) -> list[tuple[str, str]]:
    """Returns the (color, name) entries of the legend: kinds, then chunks where there are several."""
    kinds = {action.kind for panel in panels for row in panel.rows for action, _, _ in row}
    chunks = max(panel.chunks for panel in panels)
    entries = [(COLORS[kind], NAMES[kind]) for kind in Kind if kind in kinds]
    if chunks > 1:
        shades = [_mixed(MUTED, _PALEST * chunk / (chunks - 1)) for chunk in range(chunks)]
        entries += [(shade, f"chunk {chunk}") for chunk, shade in enumerate(shades)]
    return entries


def _short(panel: _Panel) -> float:
    """Returns the shortest, over the kinds, of the median lengths of their actions."""
    by_kind = {kind: [e - s for row in panel.rows for a, s, e in row if a.kind is kind] for kind in Kind}
    return min(median(lengths) for lengths in by_kind.values() if lengths)


def _ticks(span: float) -> list[float]:
    """Returns 4 to 11 round times, starting at 0."""
    rough = span / 10
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
    return [k * step for k in range(int(span / step * (1 + 1e-9)) + 1)]


def _figure(panels: Sequence[_Panel], title: str) -> Any:
    """Returns the matplotlib figure, without using pyplot's global state."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedError(
            "draw: a .png needs matplotlib, which is not installed; pip install 'ringcomm[plot]', or draw an .html"
        ) from error
    across = min(max(0.27 * panels[0].span / max(_short(panels[0]), panels[0].span / 400), 6.0), 28.0)
    ranks, lines = len(panels[0].rows), len(panels)
    top = 0.92 if title else 0.67  # inches of title, legend and first heading
    height = top + lines * (0.36 * ranks + 0.3) + (lines - 1) * 0.4
    result = Figure(figsize=(across + 1.8, height), dpi=150, facecolor="white")
    axes = result.subplots(lines, 1, squeeze=False)[:, 0]
    left, right = 0.75 / (across + 1.8), 1 - 1.05 / (across + 1.8)
    result.subplots_adjust(left, 0.3 / height, right, 1 - top / height, hspace=0.7 / (0.36 * ranks))
    for axis, panel in zip(axes, panels, strict=True):
        _fill(axis, panel, points=72 * across / panel.span)
    result.text(left, 1 - 0.17 / height, title, color=INK, fontsize=12, fontweight="bold", va="top", ha="left")
    handles = [Patch(facecolor=color, label=name) for color, name in _legend(panels)]
    style = {"frameon": False, "fontsize": 8, "handlelength": 1, "handleheight": 1, "labelcolor": INK}
    corner = (left, 1 - (0.42 if title else 0.17) / height)
    result.legend(
        handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=len(handles), borderpad=0, **style,
        borderaxespad=0, columnspacing=1.4,
    )  # fmt: skip
    return result


def _fill(axis: Any, panel: _Panel, points: float) -> None:
    """Draws the rows; ``points`` is the width of one unit of time."""
    from matplotlib.patches import Rectangle

    for rank, row in enumerate(panel.rows):
        axis.add_patch(Rectangle((0, rank - 0.42), panel.span, 0.84, facecolor=IDLE, linewidth=0))
        for action, start, end, color in panel.colored(row):
            axis.add_patch(
                Rectangle((start, rank - 0.42), end - start, 0.84, facecolor=color, edgecolor="white", linewidth=0.6)
            )
            label = str(action.microbatch)
            size = min(8.0, points * (end - start) * 0.85 / (0.62 * len(label)))
            if size >= 4:
                middle = (start + end) / 2
                axis.text(middle, rank, label, size=size, color=_ink(color), ha="center", va="center_baseline")
        axis.text(
            1.008, rank, f"{panel.idle(row):.1%} idle", size=8, color=MUTED, va="center_baseline",
            transform=axis.get_yaxis_transform(),
        )  # fmt: skip
    axis.set(xlim=(0, panel.span), ylim=(len(panel.rows) - 0.5, -0.5))
    axis.set_yticks(range(len(panel.rows)), [f"rank {rank}" for rank in range(len(panel.rows))])
    axis.set_xticks(_ticks(panel.span))
    axis.set_title(_heading(panel), loc="left", fontsize=9, color=INK)
    axis.tick_params(length=0, labelsize=8, labelcolor=INK)
    axis.tick_params(axis="x", labelcolor=MUTED)
    axis.spines[:].set_visible(False)
    if panel.unit:
        axis.annotate(
            panel.unit, (1.008, 0), (0, -3), xycoords="axes fraction", textcoords="offset points", size=8, color=MUTED,
            va="top",
        )  # fmt: skip


_STYLE = f"""
body {{ font: 14px system-ui, sans-serif; color: {INK}; background: white; margin: 24px; }}
h1 {{ font-size: 18px; margin: 0 0 10px; }}
h2 {{ font-size: 14px; font-weight: 600; margin: 18px 0 6px; }}
.legend span {{ margin-right: 16px; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }}
.rows {{ overflow-x: auto; }}
svg {{ font: 12px system-ui, sans-serif; display: block; }}
.box rect {{ stroke: white; }}
.box text {{ text-anchor: middle; pointer-events: none; }}
.box:hover rect {{ stroke: {INK}; stroke-width: 1.5; }}
.side {{ fill: {MUTED}; }}
"""
_LEFT, _RIGHT, _ROW = 56, 84, 28  # pixels beside the axis, and of a row


def _page(panels: Sequence[_Panel], title: str) -> str:
    """Returns the complete web page."""
    across = min(max(24 * panels[0].span / max(_short(panels[0]), panels[0].span / 400), 600), 9600)
    shown = html.escape(title)
    legend = "".join(f'<span><i style="background:{color}"></i>{name}</span>' for color, name in _legend(panels))
    body = "".join(f'<h2>{_heading(panel)}</h2>\n<div class="rows">\n{_svg(panel, across)}</div>\n' for panel in panels)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n<title>{shown or "Schedule"}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{f'<h1>{shown}</h1>' if shown else ''}\n"
        f'<div class="legend">{legend}</div>\n{body}</body>\n</html>\n'
    )


def _svg(panel: _Panel, across: float) -> str:
    scale, height = across / panel.span, _ROW * len(panel.rows)
    width = _LEFT + across + _RIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height + 22}" role="img">\n']
    for rank, row in enumerate(panel.rows):
        top, text = _ROW * rank + 2, _ROW * rank + _ROW / 2 + 4
        parts.append(f'<text x="0" y="{text}">rank {rank}</text>\n')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{across:.2f}" height="{_ROW - 4}" fill="{IDLE}"/>\n')
        parts += (_box(panel, entry, scale, top) for entry in panel.colored(row))
        parts.append(f'<text class="side" x="{_LEFT + across + 8:.2f}" y="{text}">{panel.idle(row):.1%} idle</text>\n')
    for at in _ticks(panel.span):
        x = _LEFT + at * scale
        parts.append(f'<text class="side" x="{x:.2f}" y="{height + 16}" text-anchor="middle">{at:g}</text>\n')
    if panel.unit:
        parts.append(f'<text class="side" x="{_LEFT + across + 8:.2f}" y="{height + 16}">{panel.unit}</text>\n')
    return "".join([*parts, "</svg>\n"])


def _box(panel: _Panel, entry: tuple[Action, float, float, str], scale: float, top: float) -> str:
    action, start, end, color = entry
    x, width, height = _LEFT + start * scale, (end - start) * scale, _ROW - 4
    what = f"{NAMES[action.kind]}, stage {action.stage}, micro-batch {action.microbatch}"
    title = f"{what}: {start:g} to {end:g} {panel.unit}".rstrip()
    label = str(action.microbatch)
    number = (
        f'<text x="{x + width / 2:.2f}" y="{top + height / 2 + 4}" fill="{_ink(color)}">{label}</text>'
        if width >= 7 * len(label) + 3
        else ""
    )
    return (
        f'<g class="box {action.kind.value}"><title>{title}</title><rect x="{x:.2f}" y="{top}" '
        f'width="{width:.2f}" height="{height}" rx="3" fill="{color}"/>{number}</g>\n'
    )
