"""The console script, and what `ringcomm doctor` says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringcomm import _C, __version__
from ringcomm.arrays import driver
from ringcomm.errors import shown
from ringcomm.observe import cuda as info_cuda
from ringcomm.observe import info
from ringcomm.pipeline_parallel.check import table
from ringcomm.pipeline_parallel.schedules import schedule_of
from ringcomm.tools import cli
from tests.support.choice import slow


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("bench", "doctor", "info", "run", "schedule", "tune"))


@pytest.mark.parametrize("words", [[], ["fly"], ["info", "more"], ["doctor", "more"]])
def test_an_unknown_command_fails(words: list[str]) -> None:
    assert cli.main(words) == 2


def test_bench_takes_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-g", "2", "--ranks-as", "threads", "-b", "64", "-e", "64", "-n", "1"]) == 0
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out


def test_an_unknown_argument_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_doctor_gives_its_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["cpu"]["usable"] is True
    assert facts["ringcomm"]["text"].startswith(__version__)
    assert {"section", "name", "usable", "text"} == facts["processor"].keys()


def test_doctor_prints_a_block_for_the_report_of_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_DEADLOCK_MS", "1234")
    monkeypatch.setenv("SOME_PASSWORD", "secret")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    begin, block, end = text.split("```")
    assert begin == ""
    assert "report a bug" in end
    assert re.search(r"RINGCOMM_DEADLOCK_MS +1234", block)
    assert all(word in block for word in (__version__, "processor", "system", "torch"))
    assert "secret" not in text


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_describes_a_command_in_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    try:
        status: Any = cli.main(["help", command])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: ringcomm {command}")
    assert max(map(len, text.splitlines())) <= 80  # some usages are written by hand, and a list of choices is one word


@pytest.mark.parametrize(
    "words",
    [
        ["help"],
        ["doctor"],
        ["memory", "7B"],
        ["simulate", "-e", "4K"],
        ["simulate", "--model-parameters", "7B"],
        [
            "bench",
            *["-g", "1", "--ranks-as", "threads", "-b", "64", "-e", "1K", "-f", "4", "-n", "1", "-w", "1", "--limit"],
        ],
    ],
    ids=" ".join,
)
def test_output_fits_a_narrow_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    long = [line for line in lines if len(line) > 60 and " " in line.strip("# ")]
    assert long == []


READ_LITTLE = [
    slow("doctor --json"),
    "simulate --collective all --algorithm all",
    "bench -g 2 --ranks-as threads -b 64 -e 1K -f 2 -n 1 -w 1 -N 0",
    slow("bench -g 2 -b 64 -e 1K -f 2 -n 1 -w 1 -N 0"),
]


def status_when_nobody_reads_on(words: str) -> int:
    """Reads one line of a command's output; it must write nothing to the standard error, but for what it waits for on a
    busy machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", *words.split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = [line for line in process.stderr.read().splitlines() if not line.startswith("init: waiting for rank")]
        assert said == []
    return process.returncode


@pytest.mark.parametrize("words", READ_LITTLE)
def test_a_command_ends_quietly_when_nobody_reads_on(words: str) -> None:
    endless = "-N 0" in words  # others may have written all of it before
    assert status_when_nobody_reads_on(f"-m ringcomm {words}") in ((141,) if endless else (0, 141))


@pytest.mark.slow
def test_bench_under_torchrun_ends_quietly_when_nobody_reads_on() -> None:
    """Neither the rank that cannot write, nor the others, nor torchrun says anything."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
    bench = "-m ringcomm bench -b 64 -e 1K -f 2 -n 1 -w 1 -N 0"
    assert status_when_nobody_reads_on(f"{torchrun} {bench}") == 0


def test_a_command_whose_output_cannot_be_written_says_so() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "ringcomm", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "ringcomm: cannot write the output: No space left on device; free space, or write elsewhere\n"
    )


def test_a_command_without_an_output_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as after `>&-`
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("-b 1M -e 1K", None),
        ("-b 0 -e 0", None),
        ("-b 2G", ["2147483648"]),
        ("-e 64", ["64"]),
        ("-b 1K -e 4K", ["1024", "4096"]),
    ],
)
def test_simulate_refuses_invalid_sizes(
    words: str, sizes: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words.split()]) == (2 if sizes is None else 0)
    said = capsys.readouterr()
    if sizes is None:
        assert re.fullmatch(r"ringcomm simulate: got -b \S+ and -e \S+, expected .*\n", said.err)
        assert said.out == ""
    else:
        assert [line.split()[0] for line in said.out.splitlines() if line[:1] == " "][1:] == sizes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.zeros((2, 3), np.int64), "int64 array of shape (2, 3)"),
        (np.dtype("int64"), "dtype int64"),
        (torch.int64, "torch.int64"),
        (torch.ones(2), "torch.float32 tensor of shape (2,) on cpu"),
        (torch.device("meta"), "meta"),
        (Path("a/b"), "PosixPath('a/b')"),
        (int, "a class, int"),
        (len, "a function, len"),
        ({"a": 1}, "a dict of 1"),
        ([1, np.int64(2)], "[1, 2]"),
        (1j, "1j"),
        (object(), "a value of type object"),
    ],
)
def test_errors_show_what_they_got(value: Any, text: str) -> None:
    assert shown(value) == text


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
    """The driver of a host with two GPUs that do not see each other."""

    def why_none(self) -> str:
        return ""

    def version(self) -> tuple[int, int]:
        return 13, 0

    def device_count(self) -> int:
        return 2

    def device(self, index: int) -> tuple[str, int, int, tuple[int, int], int]:
        return "Tesla V100", 16 << 30, 80, (7 + index, 0), 6 << 20

    def bus_id(self, index: int) -> str:
        return f"0000:0{index}:00.0"

    def peer_access(self, device: int, peer: int) -> tuple[bool, bool, int]:
        return False, False, 0


def test_doctor_names_devices_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_cuda, "driver", TwoDevices())
    facts = {fact.name: fact for fact in info_cuda.devices()}
    assert facts["driver"].text.startswith("runs CUDA up to 13.0")
    assert facts["cuda:0"].usable is False
    assert "compute capability 8.0" in facts["cuda:0"].text
    assert facts["cuda:1"].usable
    assert "16.0 GiB, 80 SMs, sm_80, L2 6 MiB, 0000:01:00.0" in facts["cuda:1"].text
    assert facts["cuda:0 - cuda:1"].usable is False
    assert "no peer access" in facts["cuda:0 - cuda:1"].text


def test_doctor_says_why_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "why_none", lambda: "no NVIDIA driver: none")
    assert [(fact.usable, fact.text) for fact in info_cuda.devices()] == [(False, "no NVIDIA driver: none")]


@pytest.mark.parametrize("command", ["info", slow("doctor")])
def test_the_module_runs_as_a_command(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ringcomm", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
