"""The site is built without a dead link; the notebook and the guide's snippets give the outputs that stand there."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringcomm
from tests.support import ROOT

pytestmark = pytest.mark.timeout(300)

NOTEBOOK = ROOT / "examples" / "four_ranks.ipynb"
COPIED = ("mkdocs.yml", "*.md", "LICENSE", "docs", "release")
LINKED = ("benchmarks", "examples", "ringcomm")

PLANTED = """# A page that is in no list

[a page](nothing.md) [a place](guide.md#nothing) [a source file](../csrc/nothing.h) [a name][ringcomm.nothing]
"""
PLANTED_ERRORS = (
    'not included in the "nav"',
    "docs/planted.md",
    "'docs/nothing.md' is not found",
    "'docs/guide.md' does not contain an anchor '#nothing'",
    "'csrc/nothing.h' is not found",
    "'ringcomm.nothing'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site of a copy of the repository with one wrong page, and what the build said."""
    pytest.importorskip("mkdocs", reason="needs the packages of `make docs`")
    copy = tmp_path_factory.mktemp("repository")
    for path in [path for pattern in COPIED for path in ROOT.glob(pattern)]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
    for name in LINKED:
        (copy / name).symlink_to(ROOT / name)
    (copy / "docs" / "planted.md").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=copy,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return copy / "build" / "site", done


def test_the_site_has_no_dead_link_but_those_of_a_wrong_page(
    site: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = site
    assert " -m mkdocs build --strict\n" in (ROOT / "Makefile").read_text()  # with --quiet there is no error
    assert done.returncode != 0, "a dead link does not end the build"
    unexpected = [
        line for line in done.stderr.splitlines() if "WARNING" in line and not any(map(line.count, PLANTED_ERRORS))
    ]
    assert not unexpected, done.stderr
    for said in PLANTED_ERRORS:
        assert said in done.stderr, done.stderr


def test_every_public_name_has_an_entry(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    pages = "".join(page.read_text() for page in (site[0] / "api").glob("*.html"))
    missing = [name for name in ringcomm.__all__[1:] if f'id="ringcomm.{name}"' not in pages]
    assert not missing, missing


def test_the_site_loads_nothing_from_elsewhere(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for page in site[0].rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)|<link[^>]* href="?(https?:[^" >]+)', page.read_text()
        )
        assert not loaded, (page.name, loaded)


def test_a_file_of_the_repository_is_on_the_site_only_if_a_page_links_to_it(
    site: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    pages = [*site[0].rglob("*.html")]
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r'(?:href|src)="?([^" >#]+)', page.read_text())
    }
    published = {path.resolve() for name in ("examples", "release") for path in (site[0] / name).rglob("*.*")}
    assert published
    assert not published - linked


def cell_outputs(notebook: Any) -> list[str]:
    """What each cell of code printed."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(output["output_type"] == "stream" for cell in cells for output in cell["outputs"])
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]


def test_the_notebook_gives_the_outputs_that_stand_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    pytest.importorskip("ipykernel", reason="needs the packages of `make docs`")
    nbclient = pytest.importorskip("nbclient", reason="needs the packages of `make docs`")
    nbformat = pytest.importorskip("nbformat", reason="needs the packages of `make docs`")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert cell_outputs(notebook) == cell_outputs(json.loads(NOTEBOOK.read_text()))


def test_the_snippets_of_the_guide_return_what_their_comments_say() -> None:
    section = (ROOT / "docs" / "guide.md").read_text().split("\n## Snippets\n")[1].split("\n## ")[0]
    functions: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        exec(block, names := {"np": np, "ringcomm": ringcomm})  # the guide's own code
        functions |= {name: each for name, each in names.items() if inspect.isfunction(each)}

    def run(comm: ringcomm.Communicator, function: Any) -> Any:
        result = function(comm)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    found = {name: ringcomm.run_ranks(run, 4, function) for name, function in functions.items()}
    assert [int(x) for x in found.pop("sendrecv")] == [3, 0, 1, 2]
    assert [first in (0, 1) for first, _ in found.pop("both")] == [True] * 4
    assert found.pop("unknown") == [{1: 45, 2: 190, 3: 435}, None, None, None]
    assert {name: [str(x) for x in results] for name, results in found.items()} == {
        "split": ["[2.]"] * 4,
        "subgroup": ["None", "[3 1]"] * 2,
        "coalesce": ["[array([4., 4., 4.]), array([0, 1, 2, 3])]"] * 4,
        "uneven": ["[array([], dtype=int64), array([1]), array([2, 2]), array([3, 3, 3])]"] * 4,
        "offsets": ["[0]", "[10]", "[30]", "[60]"],
    }
