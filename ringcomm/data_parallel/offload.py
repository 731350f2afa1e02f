"""Offload: gradients follow the master weights into the host's memory, bucket by bucket while backward runs on."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.data_parallel.bucket import Bucket


def _version(bucket: Bucket) -> tuple[int, int]:
    """Of the reduced gradient, which may move to other memory."""
    reduced = bucket.gradient.reduced
    return reduced.data_ptr(), reduced._version


class HostGradients:
    """This rank's part of the gradients of buckets whose master weights lie in the host's memory, for the optimizer.

    From a device they come on a stream of their own, into pinned memory.
    """

    def __init__(self) -> None:
        self._copies: dict[Bucket, torch.Tensor] = {}
        self._versions: dict[Bucket, tuple[int, int]] = {}  # of the gradients that the copies were made from
        self._streams: dict[torch.device, Any] = {}

    def place(self, buckets: list[Bucket]) -> None:
        """Makes the memory anew."""
        self._versions.clear()
        self._copies = {
            bucket: torch.empty_like(bucket.master, pin_memory=bucket.device.type == "cuda")
            for bucket in buckets
            if bucket.master_device is not None
        }

    def reduced(self, bucket: Bucket) -> None:
        """A bucket was reduced: its gradient sets off, if changes that come later are noticed."""
        if bucket in self._copies and bucket.gradient.uses_placeholders:
            self._fetch(bucket)

    def _fetch(self, bucket: Bucket) -> None:
        copy = self._copies[bucket]
        self.note(bucket)
        if bucket.device.type != "cuda":
            copy.copy_(bucket.gradient.reduced)
            return
        stream = self._streams.setdefault(bucket.device, torch.cuda.Stream(bucket.device))
        stream.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(stream):
            copy.copy_(bucket.gradient.reduced, non_blocking=True)

    def note(self, bucket: Bucket) -> None:
        """The copy has what the gradient has."""
        self._versions[bucket] = _version(bucket)

    def refresh(self) -> None:
        """Fetches what has changed since, and at stage 0 everything: there `p.grad` is an ordinary tensor, and nobody
        notices what is written into `p.grad.data`."""
        for bucket in self._copies:
            gradient = bucket.gradient
            changed = self._versions.get(bucket) != _version(bucket)
            if gradient.has_reduced and (changed or not gradient.uses_placeholders):
                self._fetch(bucket)

    def bring_back(self) -> None:
        """The gradients follow what was changed in the copies."""
        for bucket, copy in self._copies.items():
            if bucket.gradient.has_reduced:
                bucket.gradient.reduced.copy_(copy)
                self.note(bucket)

    def arrive(self) -> None:
        """Waits for all that have set off."""
        for stream in self._streams.values():
            stream.synchronize()

    def of(self, bucket: Bucket) -> torch.Tensor | None:
        """A bucket's gradient here; None: the bucket is not offloaded."""
        return self._copies.get(bucket)

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return sum(copy.nbytes for copy in self._copies.values())
