"""The main job, small: it runs under torchrun over either backend and either data parallel, and compares both."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = [
    "--steps",
    "6",
    "--batch",
    "2",
    "--context",
    "32",
    "--layers",
    "1",
    "--dim",
    "32",
    "--heads",
    "2",
    "--sample",
    "20",
]


def train(*words: str, ranks: int = 2) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(EXAMPLE),
        *SMALL,
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def final_losses(text: str) -> dict[str, str]:
    lines = text[text.index("final loss") :].splitlines()[1:4]
    return {line.split("  ")[0].strip(): line.split()[-1] for line in lines if line[:1].isalpha()}


@pytest.mark.timeout(150)
def test_our_stack_trains() -> None:
    text = train()
    assert "bytes of text, 2 ranks, 128 tokens per step" in text
    assert "No sample of generated text: 6 steps are too few" in text


def test_a_sample_is_printable() -> None:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    text = module.printable(bytes(range(256)) + "\u00e9\x1b[31m\u202e".encode())
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "A" in text
    assert "\u00e9" in text


@pytest.mark.timeout(150)
def test_backends_compared_step_by_step_train_alike() -> None:
    text = train("--compare")
    losses = final_losses(text)
    assert losses["ringcomm"] == losses["gloo"]  # two ranks: every order of summation gives the same bits
    assert "measured:" in text


@pytest.mark.timeout(150)
def test_torchs_own_data_parallel_over_our_backend(tmp_path: Path) -> None:
    own = tmp_path / "text.txt"
    own.write_text("to be, or not to be; that is the question. " * 50)
    assert "final loss" in train("--parallel", "torch", "--text", str(own))
