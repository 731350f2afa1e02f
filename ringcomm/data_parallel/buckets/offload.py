"""Offload: each bucket's gradient is copied to the master weights in host memory while backward continues."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.data_parallel.buckets.bucket import Bucket


def _version(bucket: Bucket) -> tuple[int, int]:
    """Returns the address and the version of the reduced gradient, both of which may change."""
    reduced = bucket.gradient.reduced
    return reduced.data_ptr(), reduced._version


class HostGradients:
    """Host copies of this rank's gradients, for the optimizer, of buckets whose master weights are in host memory.

    From a device they are copied on a separate stream into pinned memory.
    """

    def __init__(self) -> None:
        self._copies: dict[Bucket, torch.Tensor] = {}
        self._versions: dict[Bucket, tuple[int, int]] = {}  # versions of the gradients that were copied
        self._streams: dict[torch.device, Any] = {}

    def allocate(self, buckets: list[Bucket]) -> None:
        """Allocates the copies anew."""
        self._versions.clear()
        self._copies = {
            bucket: torch.empty_like(bucket.master, pin_memory=bucket.device.type == "cuda")
            for bucket in buckets
            if bucket.master_device is not None
        }

    def start_copy(self, bucket: Bucket) -> None:
        """Starts to copy a bucket's reduced gradient, unless later changes of the gradient would go unnoticed."""
        if bucket in self._copies and bucket.gradient.exposes_sharded:
            self._fetch(bucket)

    def _fetch(self, bucket: Bucket) -> None:
        copy = self._copies[bucket]
        self.mark_current(bucket)
        if bucket.device.type != "cuda":
            copy.copy_(bucket.gradient.reduced)
            return
        stream = self._streams.setdefault(bucket.device, torch.cuda.Stream(bucket.device))
        stream.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(stream):
            copy.copy_(bucket.gradient.reduced, non_blocking=True)

    def mark_current(self, bucket: Bucket) -> None:
        """Records that the copy equals the gradient."""
        self._versions[bucket] = _version(bucket)

    def refresh(self) -> None:
        """Copies the gradients that have changed since the last copy. At stage 0 it copies all, because `p.grad` is an
        ordinary tensor there, and writes into `p.grad.data` go unnoticed."""
        for bucket in self._copies:
            gradient = bucket.gradient
            changed = self._versions.get(bucket) != _version(bucket)
            if gradient.has_reduced and (changed or not gradient.exposes_sharded):
                self._fetch(bucket)

    def copy_back(self) -> None:
        """Copies changes of the host copies back to the gradients."""
        for bucket, copy in self._copies.items():
            if bucket.gradient.has_reduced:
                bucket.gradient.reduced.copy_(copy)
                self.mark_current(bucket)

    def wait(self) -> None:
        """Waits for all copies that were started."""
        for stream in self._streams.values():
            stream.synchronize()

    def copy_of(self, bucket: Bucket) -> torch.Tensor | None:
        """Returns a bucket's gradient in host memory; None: the bucket is not offloaded."""
        return self._copies.get(bucket)
