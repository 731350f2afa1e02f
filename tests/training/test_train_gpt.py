"""The main job, small: over either backend and either data parallel, at every stage, interrupted and taken up again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.text import printable
from tests.support.training import runs
from tests.support.training.runs import EXAMPLES, final_losses, steps

SMALL = ("--steps", "6", "--batch", "2", "--context", "32", "--layers", "1", "--dim", "32", "--heads", "2")


def train(*words: str) -> str:
    """What the first of three ranks prints."""
    text, status = runs.train(*SMALL, *words, world_size=3)
    assert status == 0, text
    return text


def launch(*words: str) -> str:
    """The same as one types it, on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "train_gpt.py"), *SMALL, *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_runs_under_torchrun_and_backends_train_alike() -> None:
    text = launch("--compare")
    assert "bytes of text, 2 ranks (dp 2), 128 tokens per step" in text
    assert "No sample of generated text: 6 steps are too few" in text
    losses = final_losses(text)
    assert losses["ringcomm"] == losses["gloo"]  # two ranks: every order of summation gives the same bits
    assert losses["ringcomm"] != losses["no communication"]
    assert "measured:" in text


def test_a_sample_is_printable() -> None:
    text = printable(bytes(range(256)) + "\u00e9\x1b[31m\u202e".encode())
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "A" in text
    assert "\u00e9" in text


def test_torchs_own_data_parallel_over_our_backend(tmp_path: Path) -> None:
    own = tmp_path / "text.txt"
    own.write_text("to be, or not to be; that is the question. " * 50)
    words = ("--text", str(own), "--accumulate", "2")
    assert steps(train("--parallel", "torch", *words))[0] == steps(train(*words))[0]


def test_all_stages_agree_and_keep_what_is_predicted(tmp_path: Path) -> None:
    picture = tmp_path / "stages.png"
    text = train("--stages", "--precision", "bf16", "--accumulate", "2", "--clip", "0.5", "--plot", str(picture))
    rows = [line.split() for line in text.splitlines() if line.startswith("stage ") and "ed " in line]
    assert [row[1:3] for row in rows] == [[str(k), kind] for k in range(4) for kind in ("measured", "predicted")]
    assert [row[4] for row in rows[::2]] == ["yes"] * 4
    assert len({row[3] for row in rows[::2]}) == 1
    for measured, predicted in zip(rows[::2], rows[1::2], strict=True):
        assert measured[5:11] == predicted[3:9]  # bytes of memory, exactly
        assert float(measured[11]) == pytest.approx(float(predicted[9]), rel=0.01)  # on the wire; clipping adds a few
    assert float(rows[6][5]) == pytest.approx(float(rows[0][5]) / 3, rel=0.05)  # parameters at stage 3
    assert picture.stat().st_size > 10_000


def test_a_log_has_a_line_a_step_with_what_was_counted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    losses = steps(train("--log", str(log)))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert len(lines) >= len(losses)
    assert all(line["ringcomm/calls"] > 0 and line["ringcomm/bytes"] > 0 for line in lines)
    assert all(line["ringcomm/failed"] == 0 for line in lines)


def test_a_checkpoint_goes_on_at_another_stage(tmp_path: Path) -> None:
    rules = ("--precision", "fp16", "--accumulate", "2", "--clip", "0.5")
    saved = str(tmp_path / "saved")
    first = train(*rules, "--stage", "3", "--until", "3", "--save", saved)
    second = train(*rules, "--stage", "1", "--resume", saved)
    whole = train(*rules, "--stage", "2")
    assert len(steps(first)) == len(steps(second)) == 3
    assert steps(first) + steps(second) == steps(whole)
    assert final_losses(second) == final_losses(whole)
