"""The console script, and what `ringcomm doctor` says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringcomm import _C
from ringcomm.arrays import driver
from ringcomm.observe import cuda as info_cuda
from ringcomm.observe import info
from ringcomm.pipeline_parallel.check import table
from ringcomm.pipeline_parallel.schedules import schedule_of
from ringcomm.tools import cli


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("bench", "doctor", "info", "schedule", "tune"))


@pytest.mark.parametrize("words", [[], ["fly"], ["info", "more"], ["doctor", "more"]])
def test_what_is_not_a_command_fails(words: list[str]) -> None:
    assert cli.main(words) == 2


def test_bench_takes_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-g", "2", "--ranks-as", "threads", "-b", "64", "-e", "64", "-n", "1"]) == 0
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out


def test_a_wrong_word_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-g", "2", "--ranks-as", "threads", "broadcast", "-r", "9", "-b", "64", "-e", "64"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_schedule_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "schedule.html"
    words = ["schedule", "--schedule", "interleaved", "--ranks", "2", "--microbatches", "2", "--chunks", "2"]
    assert cli.main([*words, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert table(schedule_of("interleaved", 2, 2, 2)) in text
    assert "idle 20.0%, by the published formula 20.0%" in text  # (p - 1) / (v m + p - 1)
    assert "activations held, by rank: 4 3" in text
    assert out.read_text().count('<g class="box') == 16
    assert cli.main([*words[:-2], "--costs", "1", "3", "1"]) == 0
    assert "formula" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--schedule", "best"], ["--ranks", "0"], ["--chunks", "2"], ["--out", "a.gif"]])
def test_schedule_refuses_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_top_level_is_clean_and_has_the_exceptions() -> None:
    import ringcomm

    names = {name for name in dir(ringcomm) if not name.startswith("__")}
    assert names == {name for name in ringcomm.__all__ if not name.startswith("__")}
    assert ringcomm.AbortedError is ringcomm.errors.AbortedError
    for name in ringcomm.__all__:
        assert getattr(ringcomm, name) is not None
    stub = Path(ringcomm.__file__).with_suffix(".pyi").read_text().splitlines()
    for line in filter(lambda line: line.startswith("from"), stub):  # the form that __init__.py reads
        assert re.fullmatch(r"from ringcomm[\w.]* import (\w+) as \1", line), line


def test_info_says_what_is_usable_and_why_not() -> None:
    facts = {fact.name: fact for fact in info.facts()}
    assert facts["cpu"].usable
    assert "isa" in facts["cpu"].text
    why = _C.why_no_cuda()
    assert facts["cuda"].usable is (why == "")
    assert facts["cuda"].text.startswith(why)
    assert facts["cuda kernels"].text == _C.build_info()["cuda"]
    assert facts["shared memory"].usable
    assert facts["torch.distributed 'ringcomm'"].usable
    assert all(fact.text for fact in facts.values())


def test_info_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_torch_version", lambda: None)
    assert "torch is not installed" in info._backend().text
    assert info._gloo() == []


@pytest.mark.parametrize(("version", "lines"), [("2.9.1", 1), ("2.13.0+cpu", 1), ("2.14.0a0", 0), ("2.15.0", 0)])
def test_doctor_names_the_receive_check_of_an_old_gloo(
    version: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "_torch_version", lambda: version)
    found = [line for line in info.text(info.facts()).splitlines() if "gloo#509" in line]
    assert len(found) == lines, found
    assert all(f"torch {version} " in line for line in found)


class TwoDevices:
    """A driver of a host with two GPUs that do not see each other."""

    def version(self) -> tuple[int, int]:
        return 13, 0

    def device_count(self) -> int:
        return 2

    def device(self, index: int) -> driver.DriverDevice:
        return driver.DriverDevice(index, "Tesla V100", 16 << 30, 80, (7 + index, 0), 6 << 20, f"0000:0{index}:00.0")

    def peer_access(self, device: int, peer: int) -> tuple[bool, bool, int]:
        return False, False, 0


def test_doctor_names_devices_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Driver, "load", staticmethod(lambda: TwoDevices()))
    facts = {fact.name: fact for fact in info_cuda.driver()}
    assert facts["driver"].text.startswith("runs CUDA up to 13.0")
    assert facts["cuda:0"].usable is False
    assert "compute capability 8.0" in facts["cuda:0"].text
    assert facts["cuda:1"].usable
    assert "16.0 GiB, 80 SMs, sm_80, L2 6 MiB, 0000:01:00.0" in facts["cuda:1"].text
    assert facts["cuda:0 - cuda:1"].usable is False
    assert "no peer access" in facts["cuda:0 - cuda:1"].text


def test_doctor_says_why_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Driver, "load", staticmethod(lambda: "no NVIDIA driver: none"))
    assert [(fact.usable, fact.text) for fact in info_cuda.driver()] == [(False, "no NVIDIA driver: none")]


@pytest.mark.parametrize("command", ["info", "doctor"])
def test_the_module_runs_as_a_command(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ringcomm", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
