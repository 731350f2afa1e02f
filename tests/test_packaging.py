"""What is handed out: the source distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

import pytest

import ringcomm

ROOT = Path(__file__).resolve().parent.parent
NOT_HANDED_OUT = (".ci/", ".gitignore")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The repository's files."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git repository")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a source distribution that is made of a copy of the repository."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = made.iterdir()
    with tarfile.open(archive) as files:
        opened = {member.name.partition("/")[2]: files.extractfile(member) for member in files if member.isfile()}
        return {name: file.read() for name, file in opened.items() if file is not None}


def test_the_sdist_holds_every_file_of_the_repository(sdist: dict[str, bytes], tracked: list[str]) -> None:
    missing = [name for name in tracked if name not in sdist and not name.startswith(NOT_HANDED_OUT)]
    assert not missing, missing


def test_the_sdist_says_whose_it_is(sdist: dict[str, bytes]) -> None:
    facts = Parser().parsestr(sdist["PKG-INFO"].decode())
    assert (facts["Name"], facts["Version"]) == ("ringcomm", ringcomm.__version__)
    assert (facts["License-Expression"], facts["License-File"]) == ("BSD-3-Clause", "LICENSE")
    assert facts["Author"] == "The ringcomm authors"
    assert "Copyright (c)" in sdist["LICENSE"].decode()
