"""Times consecutive calls: with the host's clock if a call has ended when it returns, else with events on the
stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.arrays.devices import EMULATED

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator
    from ringcomm.tools.bench.cases import Call


class HostClock:
    """Runs and times calls that have ended when they return."""

    def total(self, calls: Iterable[Call]) -> float:
        """Returns the seconds from the first call's begin to the last one's end."""
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    def each(self, calls: Iterable[Call]) -> torch.Tensor:
        """Returns the seconds of every call."""
        clock = time.perf_counter
        stamps = [clock()]
        append = stamps.append
        for call in calls:
            call()
            append(clock())
        return torch.tensor(stamps, dtype=torch.float64).diff()


class DeviceClock(HostClock):
    """Runs and times calls that are enqueued on torch's current stream of a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def _mark(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def total(self, calls: Iterable[Call]) -> float:
        start = self._mark()
        for call in calls:
            call()
        end = self._mark()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def each(self, calls: Iterable[Call]) -> torch.Tensor:
        marks = [self._mark()]
        for call in calls:
            call()
            marks.append(self._mark())
        marks[-1].synchronize()
        times = [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(marks)]
        return torch.tensor(times, dtype=torch.float64)


def clock_of(comm: Communicator) -> HostClock:
    """Returns the clock for calls of a communicator. Calls on emulated devices wait for their end, so they use the
    host's."""
    return HostClock() if place_of(comm) == "cpu" else DeviceClock(comm.device)


def place_of(comm: Communicator) -> str:
    """Returns the torch device for tensors that a communicator serves."""
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
