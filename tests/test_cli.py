"""The console script, and what `ringcomm info` says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ringcomm import cli, info


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "bench" in text
    assert "info" in text


@pytest.mark.parametrize("words", [[], ["fly"], ["info", "more"]])
def test_what_is_not_a_command_fails(words: list[str]) -> None:
    assert cli.main(words) == 2


def test_bench_takes_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-g", "2", "--ranks-as", "threads", "-b", "64", "-e", "64", "-n", "1"]) == 0
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out


def test_a_wrong_word_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-g", "2", "--ranks-as", "threads", "broadcast", "-r", "9", "-b", "64", "-e", "64"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_top_level_is_clean_and_has_the_exceptions() -> None:
    import ringcomm

    names = {name for name in dir(ringcomm) if not name.startswith("__")}
    assert names == {name for name in ringcomm.__all__ if not name.startswith("__")}
    assert ringcomm.AbortedError is ringcomm.errors.AbortedError
    for name in ringcomm.__all__:
        assert getattr(ringcomm, name) is not None


def test_info_says_what_is_usable_and_why_not() -> None:
    facts = {fact.name: fact for fact in info.facts()}
    assert facts["cpu"].usable
    assert "isa" in facts["cpu"].text
    assert facts["cuda"].usable is False
    assert "not built" in facts["cuda"].text
    assert facts["shared memory"].usable
    assert facts["torch.distributed 'ringcomm'"].usable
    assert all(fact.text for fact in facts.values())


def test_info_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_torch_version", lambda: None)
    assert "torch is not installed" in info._backend().text


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ringcomm.cli", "info"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout
