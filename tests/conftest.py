"""What every test has: a time limit (pyproject.toml), and the duty to leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share few cores; inherited by every process of a test
# A shell lets jobs in the background ignore Ctrl-C, and what they start: the tests of it begin with what is usual.
signal.signal(signal.SIGINT, signal.default_int_handler)


def shared_memory_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "ringcomm" in path.name} if folder.is_dir() else set()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Iterator[None]:
    """A module of tests leaves no file in /dev/shm: ringcomm makes none there."""
    before = shared_memory_files()
    yield
    assert shared_memory_files() <= before, "shared memory was left behind, by this module or one that ran beside it"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread, as each of the ranks that share few cores should."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
