"""Times consecutive calls: with the host's clock if a call has ended when it returns, else with events on the
stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.arrays.devices import EMULATED

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator
    from ringcomm.tools.bench.cases import Call


class Clock:
    """Runs and times a communicator's calls: with the host's clock, or with events on torch's current stream of its
    device."""

    def __init__(self, comm: Communicator) -> None:
        self.device = place_of(comm)
        self._mark: Callable[[], Any] = time.perf_counter if self.device == "cpu" else self._event

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def total(self, calls: Iterable[Call]) -> float:
        """Returns the seconds from the first call's begin to the last one's end."""
        start = self._mark()
        for call in calls:
            call()
        return float(self._seconds([start, self._mark()]))

    def each(self, calls: Iterable[Call]) -> torch.Tensor:
        """Returns the seconds of every call."""
        mark = self._mark
        marks = [mark()]
        append = marks.append
        for call in calls:
            call()
            append(mark())
        return self._seconds(marks)

    def _seconds(self, marks: Sequence[Any]) -> torch.Tensor:
        """Returns the seconds between consecutive marks."""
        if self.device == "cpu":
            return torch.tensor(marks, dtype=torch.float64).diff()
        marks[-1].synchronize()
        times = [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(marks)]
        return torch.tensor(times, dtype=torch.float64)


def place_of(comm: Communicator) -> str:
    """Returns the torch device for tensors that a communicator serves; the cpu for emulated devices, whose calls have
    ended when they return."""
    return "cpu" if EMULATED else comm.device


def synchronize(comm: Communicator) -> None:
    """Waits until this rank's device has finished its enqueued work."""
    if place_of(comm) != "cpu":
        torch.cuda.synchronize(comm.device)


def device_name(comm: Communicator) -> str:
    """Returns a description of the device that runs the calls, for people."""
    if comm.device == "cpu":
        return "cpu"
    return f"{comm.device} (emulated)" if EMULATED else f"{comm.device} {torch.cuda.get_device_name(comm.device)}"


def device_key(comm: Communicator) -> str:
    """Returns a key that is equal exactly for ranks on the same device, among the ranks of one host."""
    if place_of(comm) == "cpu":
        return comm.device
    return str(torch.cuda.get_device_properties(comm.device).uuid)
