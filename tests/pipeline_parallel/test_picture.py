"""Pictures of schedules, read back: every action is a box of its place, color and number."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.pipeline_parallel.check import Timed, times
from ringcomm.pipeline_parallel.picture import COLORS, IDLE, draw
from ringcomm.pipeline_parallel.schedules import (
    Action,
    Kind,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_of,
    zero_bubble,
)

SVG = "{http://www.w3.org/2000/svg}"


def measured_of(schedule: Schedule, unit: float = 0.002) -> list[list[Timed]]:
    """Plausible measured times: with an arbitrary origin, and everything a bit late."""
    return [[(a, 50 + unit * start, 50 + unit * (end - 0.2)) for a, start, end in row] for row in times(schedule)]


def panels_of(path: Path) -> list[ElementTree.Element]:
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r'(src|href)="', text), "the page needs no other file"
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def boxes_of(panel: ElementTree.Element) -> list[tuple[str, str, float, float, float, str]]:
    """(label, color, left, width, top, title) of every box."""
    found = []
    for group in panel.iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None
        assert title is not None
        assert title.text
        place = (float(rect.attrib[key]) for key in ("x", "width", "y"))
        found.append((group.findtext(f"{SVG}text") or "", rect.attrib["fill"], *place, title.text))
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_page_has_a_box_for_each_action(name: str, tmp_path: Path) -> None:
    schedule = schedule_of(name, 3, 5)
    rows = times(schedule)
    draw(rows, tmp_path / "a.html", title="<3 ranks>")
    assert "<h1>&lt;3 ranks&gt;</h1>" in (tmp_path / "a.html").read_text(encoding="utf-8")
    (panel,) = panels_of(tmp_path / "a.html")
    boxes = boxes_of(panel)
    actions = [(rank, *entry) for rank, row in enumerate(rows) for entry in row]
    unit = boxes[0][3] / (rows[0][0][2] - rows[0][0][1])
    left = boxes[0][2]
    assert len(boxes) == len(actions)
    for (label, color, x, width, top, title), (rank, action, start, end) in zip(boxes, actions, strict=True):
        assert label == str(action.microbatch)
        assert color == COLORS[action.kind]
        assert x == pytest.approx(left + unit * start, abs=0.2)
        assert width == pytest.approx(unit * (end - start), abs=0.05)
        assert top == boxes[0][4] + 28 * rank
        assert title.endswith(f", stage {action.stage}, micro-batch {action.microbatch}: {start:g} to {end:g}")
    end = max(stop for row in rows for _, _, stop in row)
    sides = [text.text for text in panel.iter(f"{SVG}text") if "idle" in (text.text or "")]
    busy = [sum(stop - start for _, start, stop in row) for row in rows]
    assert sides == [f"{1 - some / end:.1%} idle" for some in busy]


def test_page_has_what_was_measured_under_what_was_planned(tmp_path: Path) -> None:
    schedule = one_f_one_b(2, 3)
    for unit, name, shown in ((0.002, "ms", "0 to 1.6"), (0.5, "s", "0 to 0.4"), (2e-6, "µs", "0 to 1.6")):
        draw(times(schedule), tmp_path / "a.html", measured=measured_of(schedule, unit))
        planned, measured = panels_of(tmp_path / "a.html")
        assert len(boxes_of(planned)) == len(boxes_of(measured)) == 12
        assert boxes_of(measured)[0][5] == f"forward, stage 0, micro-batch 0: {shown} {name}"
        assert planned.attrib["width"] == measured.attrib["width"]
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(\w+): ([\d.]+)% idle</h2>", text)[0] == ("planned", "25.0")
    assert re.findall(r"<h2>(\w+):", text) == ["planned", "measured"]


def test_chunks_have_shades(tmp_path: Path) -> None:
    schedule = interleaved(2, 2, 3)
    draw(times(schedule), tmp_path / "a.html")
    (panel,) = panels_of(tmp_path / "a.html")
    shade = {}
    for _, color, *_, title in boxes_of(panel):
        kind, stage = title.split(", ")[:2]
        shade.setdefault((kind, stage), set()).add(color)
    assert len(shade) == 12
    assert all(len(colors) == 1 for colors in shade.values())
    for kind in ("forward", "backward"):
        lightness = [sum(bytes.fromhex(next(iter(shade[kind, f"stage {s}"]))[1:])) for s in range(6)]
        assert lightness[0] == lightness[1] < lightness[2] == lightness[3] < lightness[4] == lightness[5]
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert re.findall(r"</i>([^<]*)</span>", text) == ["forward", "backward", "chunk 0", "chunk 1", "chunk 2"]


def bands_of(path: Path) -> tuple[list[list[str]], tuple[int, int]]:
    """From a PNG: by drawn row, the colors of the boxes from left to right; and width and height."""
    image = pytest.importorskip("matplotlib.image", reason="a .png needs matplotlib").imread(path)
    pixels = (image[:, :, :3] * 255).round().astype("uint8")
    idle = (pixels == list(bytes.fromhex(IDLE[1:]))).all(axis=2)
    known = {bytes.fromhex(color[1:]): color for color in COLORS.values()}
    inside = idle.sum(axis=1) > pixels.shape[1] // 20
    bands = []
    for drawn, run in groupby(range(len(inside)), key=lambda y: inside[y]):
        lines = list(run)
        if drawn and len(lines) > 20:
            line = [known.get(pixel.tobytes(), "") for pixel in pixels[lines[4]]]  # above the numbers
            bands.append([color for color, _ in groupby(line) if color])
    return bands, pixels.shape[1::-1]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zero_bubble])
def test_png_has_a_box_for_each_action(make: Callable[[int, int], Schedule], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a .png needs it")
    schedule = make(3, 4)
    expected = [[COLORS[action.kind] for action in row] for row in schedule.rows]
    draw(times(schedule), tmp_path / "a.png", title="three ranks")
    bands, (width, height) = bands_of(tmp_path / "a.png")
    assert bands == expected
    draw(times(schedule), str(tmp_path / "b.png"), measured=measured_of(schedule))
    bands, larger = bands_of(tmp_path / "b.png")
    assert bands == 2 * expected
    assert larger[0] == width
    assert larger[1] > height
    assert 1000 < width < 1500
    assert 200 < height < 400


def test_png_is_drawn_without_global_state(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a .png needs it")
    program = (
        "import sys; from ringcomm.pipeline_parallel import picture, check, schedules; "
        f"picture.draw(check.times(schedules.gpipe(2, 2)), {str(tmp_path / 'a.png')!r}); "
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'ringcomm\[plot\]', or draw an .html"):
        draw(times(gpipe(2, 2)), tmp_path / "a.png")
    draw(times(gpipe(2, 2)), tmp_path / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_narrow_boxes_have_no_number(tmp_path: Path) -> None:
    row: list[Timed] = [(Action(Kind.FORWARD, 0, 0), 0.0, 1e-9), (Action(Kind.FORWARD, 0, 1), 1.0, 1e6)]
    draw([row, []], tmp_path / "a.html")
    (panel,) = panels_of(tmp_path / "a.html")
    assert [box[0] for box in boxes_of(panel)] == ["", "1"]
    assert 500 < float(panel.attrib["width"]) < 20000


def test_bad_input(tmp_path: Path) -> None:
    rows = times(gpipe(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"^draw: expected a path ending in .png or .html, got 'a.svg'; ren"):
        draw(rows, "a.svg")
    with pytest.raises(InvalidArgumentError, match=r"^draw: expected rows with an action that takes time, got none"):
        draw([[], []], tmp_path / "a.html")
    with pytest.raises(InvalidArgumentError, match=r"^draw: expected measured rows with an action that takes time"):
        draw(rows, tmp_path / "a.html", measured=[[], []])
    with pytest.raises(
        InvalidArgumentError, match=r"^draw: expected measured rows of 2 ranks, as planned, got 1; pass"
    ):
        draw(rows, tmp_path / "a.html", measured=rows[:1])
    assert not list(tmp_path.iterdir())
