"""The figures of the layout: each is counted in a small tree, and the program prints them for the real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import house

FILES = {
    "README.md": "# Title\n\n| " + "x" * 130 + " |\n" + "y" * 121 + f"\n{'z' * 120}\n```\n{'c' * 121}\n```\n",
    "ringcomm/__init__.py": "",
    "ringcomm/a.py": """
from ringcomm.b import B
class A:
    size: int
    def f(self, x):
        self.one, self.two = 1, 2
        x.__class__ = A
        x._ringcomm_place = self
""",
    "ringcomm/b.py": """
from dataclasses import dataclass
def f(x):
    from ringcomm import a
    return x.__dict__["_ringcomm_unit"]
@dataclass(frozen=True)
class B:
    w: int
    x: int
    y: int
    z: int
""",
    "ringcomm/inner/c.py": "import ringcomm.a\nimport sys\n{0}[:0] = ['.']\n{0}.append('.')\nprint({0})\n".format(
        "sys.path"
    ),
    "csrc/core/a.h": """// class Comment {
struct A : B {
  enum class E { kOne };
};
struct A;
template <class T> void f() {}
""",
    "csrc/cuda/emulator/e.h": "struct Emulated {};\n",
    "tests/test_a.py": "pass\n" * 7,
    "tests/test_b.cpp": "\n" * 3,
    "build/lib/ringcomm/d.py": "class Built: pass\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_figure_of_a_small_tree(tree: Path) -> None:
    counted = [count(tree) for count in house.FIGURES.values()]
    assert counted == [
        f"{8 + 11 + 5 + 6}",
        "2 / 2",
        "0 in docs/design.md (not built)",
        "1 (largest 2 files)",
        "3; 3 files (ringcomm/)",
        "2; 1; 2",
        "3 (A)",
        "8; 1",
        f"{7 + 3 + 1}",
    ]


def test_the_documented_path_is_read_in_order(tree: Path) -> None:
    page = tree / "docs" / "design.md"
    page.parent.mkdir()
    page.write_text(
        "## The path of a gradient\nFiles are in `ringcomm/inner/`:\n```\nloss.backward() c.py: hooks, comm/a.py\n"
        "  csrc/core/a.h; c.py\noptimizer.step() d.py\n```\n"
    )
    assert house.documented_path(tree) == ["ringcomm/inner/c.py", "ringcomm/comm/a.py", "csrc/core/a.h"]


def test_the_documented_path_of_a_gradient_is_the_one_that_runs() -> None:
    documented, run = house.documented_path(house.ROOT), house.path_of_backward()
    assert documented
    assert not [name for name in documented if not (house.ROOT / name).is_file()]
    python = [name for name in documented if name.startswith("ringcomm/")]
    assert not {*python} - {*run}, "docs/design.md names files that a backward pass does not run through"
    assert len(documented) > len(python) > 0


def test_the_program_prints_a_row_for_each_figure(tree: Path) -> None:
    words = [sys.executable, "-m", "tests.support.house", str(tree)]
    done = subprocess.run(words, cwd=house.ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = done.stdout.splitlines()
    assert rows[0] == f"| | {tree} |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == [*house.FIGURES]


def test_a_tree_that_is_not_there_is_refused() -> None:
    words = [sys.executable, "-m", "tests.support.house", "no-such-commit"]
    done = subprocess.run(words, cwd=house.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "got 'no-such-commit', expected a commit or a folder" in done.stderr


def test_lines_of_prose_are_short() -> None:
    pages = [path for path in house.files(house.ROOT, ".md") if "results" not in path.parts]
    assert {path.name: house.long_lines(path) for path in pages if house.long_lines(path)} == {}
    assert len((house.ROOT / "README.md").read_text().splitlines()) <= 130
