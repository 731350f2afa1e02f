"""Offload: gradients follow the master weights into the host's memory, group by group while backward runs on."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.data_parallel.group import FlatGroup


def _version(group: FlatGroup) -> tuple[int, int]:
    """Of the reduced gradient, which may move to other memory."""
    reduced = group.gradient.reduced
    return reduced.data_ptr(), reduced._version


class HostGradients:
    """This rank's part of the gradients of groups whose master weights lie in the host's memory, for the optimizer.

    From a device they come on a stream of their own, into pinned memory.
    """

    def __init__(self) -> None:
        self._copies: dict[FlatGroup, torch.Tensor] = {}
        self._versions: dict[FlatGroup, tuple[int, int]] = {}  # of the gradients that the copies were made from
        self._streams: dict[torch.device, Any] = {}

    def place(self, groups: list[FlatGroup]) -> None:
        """Makes the memory anew."""
        self._versions.clear()
        self._copies = {
            group: torch.empty_like(group.master, pin_memory=group.device.type == "cuda")
            for group in groups
            if group.master_device is not None
        }

    def reduced(self, group: FlatGroup) -> None:
        """A group was reduced: its gradient sets off, if changes that come later are noticed."""
        if group in self._copies and group.gradient.standing:
            self._fetch(group)

    def _fetch(self, group: FlatGroup) -> None:
        copy = self._copies[group]
        self.note(group)
        if group.device.type != "cuda":
            copy.copy_(group.gradient.reduced)
            return
        stream = self._streams.setdefault(group.device, torch.cuda.Stream(group.device))
        stream.wait_stream(torch.cuda.current_stream(group.device))
        with torch.cuda.stream(stream):
            copy.copy_(group.gradient.reduced, non_blocking=True)

    def note(self, group: FlatGroup) -> None:
        """The copy has what the gradient has."""
        self._versions[group] = _version(group)

    def refresh(self) -> None:
        """Fetches what has changed since, and at stage 0 everything: there `p.grad` is an ordinary tensor, and nobody
        notices what is written into `p.grad.data`."""
        for group in self._copies:
            gradient = group.gradient
            changed = self._versions.get(group) != _version(group)
            if gradient.has_reduced and (changed or not gradient.standing):
                self._fetch(group)

    def bring_back(self) -> None:
        """The gradients follow what was changed in the copies."""
        for group, copy in self._copies.items():
            if group.gradient.has_reduced:
                group.gradient.reduced.copy_(copy)
                self.note(group)

    def arrive(self) -> None:
        """Waits for all that have set off."""
        for stream in self._streams.values():
            stream.synchronize()

    def of(self, group: FlatGroup) -> torch.Tensor | None:
        """A group's gradient here; None: the group is not offloaded."""
        return self._copies.get(group)

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return sum(copy.nbytes for copy in self._copies.values())
