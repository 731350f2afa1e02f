"""Runs of examples/train_gpt.py in a pool of processes, and what their output says."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.support import ROOT, torch_ranks

EXAMPLES = ROOT / "examples"


def example(name: str) -> Any:
    """A module of the example, which pytest's pythonpath names."""
    return importlib.import_module(name)


def run_program(*words: str) -> None:
    """The program with words of its command line, in a process of its own."""
    sys.argv = ["train_gpt.py", *words]
    example("train_gpt").main()


def run_main(words: tuple[str, ...], port: int, change: Callable[[dict[str, torch.Tensor]], None] | None) -> Any:
    """What the program prints on one rank of a pool, and its exit status."""
    os.environ["MASTER_PORT"] = str(port)
    train_gpt = example("train_gpt")
    before, sys.argv = sys.argv, ["train_gpt.py", *words]
    gather = train_gpt.whole_state

    def changed(*arguments: Any) -> Any:
        state = gather(*arguments)
        if change is not None:
            change(state)
        return state

    train_gpt.whole_state = changed
    status: Any = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            train_gpt.main()
    except SystemExit as left:
        status = left.code
    finally:
        sys.argv, train_gpt.whole_state = before, gather
    return out.getvalue(), status


def train_everywhere(
    *words: str, world_size: int, change: Callable[[dict[str, torch.Tensor]], None] | None = None
) -> list[tuple[str, Any]]:
    """What every rank prints, and its exit status; ``change`` is done to the whole model's parameters at the end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return torch_ranks.run(run_main, words, port, change, world_size=world_size, backend="", timeout_s=100)


def train(*words: str, world_size: int) -> tuple[str, Any]:
    """What the first rank prints, and its exit status."""
    return train_everywhere(*words, world_size=world_size)[0]


def final_losses(text: str) -> dict[str, str]:
    """By copy of the model."""
    lines = text[text.index("final loss") :].splitlines()[1:4]
    return {line.split("  ")[0].strip(): line.split()[-1] for line in lines if line[:1].isalpha()}


def steps(text: str) -> list[list[str]]:
    """The step's number and the mean loss up to there, of every line on the way."""
    return [line.split()[1:4:2] for line in text.splitlines() if line.startswith("step ")]


def checksum(text: str) -> str:
    """Of all parameters."""
    return next(line.split()[1] for line in text.splitlines() if line.startswith("parameters: "))


def verdict(text: str) -> str:
    """Of --check."""
    return next(line for line in text.splitlines() if line.startswith("check: "))
