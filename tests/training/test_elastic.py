"""A job over two hosts loses a rank or a whole host, goes on from its last checkpoint, and ends with the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.training import runs
from tests.support.training.elastic import Job

WORDS = ("--steps", "120", "--batch", "2", "--context", "32", "--layers", "1", "--dim", "32", "--heads", "2")
WORDS += ("--sample", "0")
EVERY = ("--save-every", "20")


@pytest.fixture(scope="module")
def uninterrupted() -> str:
    """The checksum that two ranks of one host come to."""
    text, status = runs.train(*WORDS, world_size=2)
    assert status == 0, text
    return runs.checksum(text)


def resumed_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"goes on from step (\d+)", text)]


@pytest.mark.slow  # of a host that is killed a rank is killed, too
def test_a_killed_rank_is_started_again_by_its_agent(tmp_path: Path, uninterrupted: str) -> None:
    with Job(tmp_path, (*WORDS, *EVERY)) as job:
        job.wait_for_step(40)
        job.kill_worker(1)
        text = job.finish()
    assert resumed_steps(text)[0] >= 40
    assert runs.checksum(text) == uninterrupted


def test_a_killed_host_comes_back(tmp_path: Path, uninterrupted: str) -> None:
    with Job(tmp_path, (*WORDS, "--stage", "2", *EVERY)) as job:
        job.wait_for_step(40)
        job.kill_host(1)
        job.start(1)
        text = job.finish()
    assert resumed_steps(text)[0] >= 40
    assert runs.checksum(text) == uninterrupted


def test_an_incomplete_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    """A checkpoint whose save was interrupted has another name; steps are ordered as numbers."""
    for name in ("step-00000020", "step-100000000", ".step-00000040.saving", "step-00000060.saving", "other"):
        (tmp_path / name).mkdir()
    assert runs.example("resume").steps_in(tmp_path) == [20, 100_000_000]


def test_a_finished_job_started_again_keeps_two_checkpoints_and_its_bits(tmp_path: Path) -> None:
    words = ("--steps", "7", "--save", str(tmp_path / "run"), "--save-every", "2")
    small = (*WORDS[2:], *words)
    first, status = runs.train(*small, world_size=2)
    assert status == 0, first
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["step-00000006", "step-00000007"]
    again, status = runs.train(*small, world_size=2)
    assert status == 0, again
    assert resumed_steps(first) == []
    assert resumed_steps(again) == [7]
    assert runs.checksum(again) == runs.checksum(first)


def test_saving_on_the_way_needs_a_folder() -> None:
    text, status = runs.train(*WORDS, *EVERY, world_size=2)
    assert status == 2
    assert "got --save-every 20 with --save None, expected a number above 0 and a folder; give both" in text
