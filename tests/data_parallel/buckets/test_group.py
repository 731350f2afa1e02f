"""On which stream of a GPU the training layer's collectives run; torch's streams are replaced by a record of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcomm.data_parallel.buckets.group import DataParallelGroup


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            found.append(("made", device.index))

        def wait_stream(self, other: str) -> None:
            found.append(("waits for", other))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append("enter")
        yield
        found.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def group(log: list[Any], lends_memory: bool) -> DataParallelGroup:
    def record(op: str) -> Any:
        return lambda *args, async_op, **options: log.append((op, async_op))

    calls = {name: record(name) for name in ("all_reduce", "reduce_scatter", "_all_gather")}
    return DataParallelGroup(SimpleNamespace(engine="cuda", world_size=2, lends_memory=lends_memory, **calls))  # type: ignore[arg-type]


@pytest.mark.parametrize("lends_memory", [True, False])
def test_collectives_run_on_a_stream_beside_the_computation(log: list[Any], lends_memory: bool) -> None:
    """A process group of torch has streams of its own."""
    ranks, x, out = group(log, lends_memory), torch.ones(4).as_subclass(OnGpu), torch.ones(2).as_subclass(OnGpu)
    ranks.all_reduce(x)
    ranks.reduce_scatter(x, out)
    ranks.all_gather(out, x)
    expected: list[Any] = [("made", 0)] if lends_memory else []
    for name in ("all_reduce", "reduce_scatter", "_all_gather"):
        call = (name, True)
        expected += [("waits for", "the current one"), "enter", call, "leave"] if lends_memory else [call]
    assert log == expected


def test_memory_is_used_again_only_behind_the_stream(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group(log, True)
    ranks.wait_for_side_streams()
    assert log == []  # there is none
    ranks.all_reduce(torch.ones(4).as_subclass(OnGpu))
    (stream,) = ranks._streams.values()
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=waits.append))
    ranks.wait_for_side_streams()
    assert waits == [stream]


def test_collectives_on_the_cpu_have_no_stream(log: list[Any]) -> None:
    group(log, True).all_reduce(torch.ones(4))
    assert log == [("all_reduce", True)]
