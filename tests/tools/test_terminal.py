"""Progress: one line on a terminal, which is gone at the end; elsewhere nothing, except for ranks that are missing."""

from __future__ import annotations

import io
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ringcomm import terminal
from ringcomm.comm import rendezvous
from ringcomm.comm import store as stores
from ringcomm.errors import CollectiveTimeoutError, EngineError
from ringcomm.terminal import Progress


class Screen(io.StringIO):
    """A standard error that is a terminal, or is not one."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


@pytest.fixture
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen(request.param)
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(terminal, "QUIET_S", 0.01)
    monkeypatch.setattr(terminal, "NOTE_S", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    return made


@pytest.mark.parametrize("screen", [True], indirect=True)
def test_a_terminal_gets_a_line_that_fits_and_is_removed(screen: Screen) -> None:
    with Progress("tune all_reduce", total=7) as one:
        one.done = 3
        assert screen.written.wait(20)
        assert screen.getvalue().startswith("\rtune all_reduce: 3 of 7 (0 s)\x1b[K")
        one.what = "x" * 100
        screen.written.clear()
        assert screen.written.wait(20)
    text = screen.getvalue()
    assert max(map(len, text.replace("\x1b[K", "").split("\r"))) <= 40
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


@pytest.mark.parametrize("screen", [True], indirect=True)
def test_a_quick_task_shows_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "QUIET_S", 60.0)
    with Progress("save"):
        pass
    with Progress("save", shows=False):
        pass
    assert screen.getvalue() == ""
    assert not any(each.name == "ringcomm-progress" for each in threading.enumerate())


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_without_a_terminal_only_a_note_is_written_and_once(screen: Screen) -> None:
    with Progress("init: waiting", limit_s=300.0) as one:
        one.note("init: waiting for ranks 3, 7")
        one.note("init: waiting for rank 7")
    assert screen.getvalue() == "init: waiting for ranks 3, 7 (0 s of 300)\n"


class LateStore:
    """A store in which the other ranks' keys appear after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.keys = looks, set[str]()

    def add(self, key: str, number: int) -> int:
        return number

    def set(self, key: str, value: bytes) -> None:
        self.keys.add(key)
        self.value = value

    def check(self, keys: list[str]) -> bool:
        self.looks -= 1
        return {*keys} <= self.keys or self.looks <= 0

    def wait(self, keys: list[str], limit: timedelta) -> None:
        if not self.check(keys):
            time.sleep(limit.total_seconds())
            raise RuntimeError("wait timeout")

    def get(self, key: str) -> Any:
        return self.value


def _exchange(store: Any, rank: int, world_size: int, limit_s: float) -> list[bytes]:
    limit = timedelta(seconds=limit_s)
    return stores.exchange(store, "keys", "init", rank, world_size, b"handle", limit, "try again")[1]


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_rank_0_names_the_ranks_that_it_waits_for(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CHECK_INTERVAL_S", 0.01)
    handles = _exchange(LateStore(40), 0, 4, 60.0)
    assert handles == [b"handle"] * 4
    assert screen.getvalue() == "init: waiting for ranks 1-3 (0 s of 60)\n"


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_a_wait_in_vain_ends_within_its_time_limit(screen: Screen) -> None:
    store: Any = LateStore(10**9)
    waits: list[float] = []
    wait = store.wait
    store.wait = lambda keys, limit: (waits.append(limit.total_seconds()), wait(keys, limit))
    with pytest.raises(CollectiveTimeoutError, match="got none of rank 1; try again"):
        _exchange(store, 0, 2, 0.2)
    assert waits == [0.001]  # what was left of the limit, for rank 1; rank 0's own key was there at the first look


def test_a_rank_that_comes_as_the_time_ends_is_not_too_late() -> None:
    store: Any = LateStore(1)
    store.wait = lambda keys, limit: (_ for _ in ()).throw(RuntimeError("wait timeout"))
    assert _exchange(store, 1, 2, 60.0) == [b"handle"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_store_is_an_error_of_ours(rank: int) -> None:
    store: Any = LateStore(10**9)
    store.check = store.wait = lambda *_: (_ for _ in ()).throw(RuntimeError("Connection reset by peer"))
    with pytest.raises(EngineError, match=r"lost the store through which the ranks meet: .*Connection reset by peer"):
        _exchange(store, rank, 2, 60.0)


@pytest.mark.parametrize("screen", [False, True], indirect=True)
@pytest.mark.parametrize(("rank", "whom"), [(0, "all 3 ranks"), (1, "rank 0"), (2, "")])
def test_ranks_without_a_store_yet_name_what_they_wait_for(
    rank: int, whom: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(*args: Any, **more: Any) -> Any:
        screen.written.wait(20 if whom else 0.2)
        yield "store", rank, 3

    monkeypatch.setattr(dist, "rendezvous", meet)
    monkeypatch.setenv("COLUMNS", "90")
    assert rendezvous._rendezvous("tcp://node7:29500", rank, 3, timedelta(seconds=60)) == "store"
    said = f"init: waiting at tcp://node7:29500 for {whom} (0 s of 60)"
    assert (said in screen.getvalue()) is bool(whom)
    assert bool(screen.getvalue()) is bool(whom)


@pytest.mark.parametrize("screen", [False], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_time_limit_still_ends_the_wait(rank: int, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CHECK_INTERVAL_S", 0.01)
    with pytest.raises(CollectiveTimeoutError, match="got none of rank"):
        _exchange(LateStore(10**9), rank, 2, 0.1)
    assert ("waiting for rank 1" in screen.getvalue()) is (rank == 0)


def test_a_file_gets_lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose terminal is read by readline gives its children COLUMNS, also where they write to a pipe."""
    monkeypatch.setenv("COLUMNS", "60")
    assert terminal.columns() > 1000
    assert terminal.folded("# " + "word " * 40) == "# " + "word " * 40
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal.columns() == 60
    assert max(map(len, terminal.folded("# " + "word " * 40).splitlines())) <= 60
