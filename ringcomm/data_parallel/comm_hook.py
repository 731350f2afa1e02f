"""Runs a user's function in place of a bucket's gradient reduction. It is called as torch's DistributedDataParallel
calls its communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.errors import InvalidArgumentError

CommHook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """A bucket's gradients before their reduction; it has the methods of torch.distributed.GradBucket.

    Args:
        number: the bucket's place in the order of reductions, the same in every pass.
    """

    def __init__(self, bucket: Bucket, local: torch.Tensor, number: int, last: bool) -> None:
        self._bucket, self._local, self._number, self._last = bucket, local, number, last

    def index(self) -> int:
        """The bucket's number, counted from 0."""
        return self._number

    def is_last(self) -> bool:
        """Whether no other bucket follows in this backward pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Returns all gradients as one flat tensor, with zeros between gradients as padding for alignment."""
        return self._local

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer by another tensor with the same number of elements."""
        self._local = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, one for each parameter."""
        return [self._bucket.layout.part(self._local, i) for i in range(len(self._bucket.params))]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.params)


class HookReduction:
    """A bucket's gradients in flight through the user's function.

    Args:
        number, last: see `GradBucket`.
        local: the gradients; the mean comes here.
    """

    def __init__(
        self, state: Any, hook: CommHook, bucket: Bucket, number: int, last: bool, local: torch.Tensor
    ) -> None:
        self._hook, self._bucket, self._number, self._local = hook, bucket, number, local
        own = local.clone()  # memory allocated by torch, because some hooks resize it temporarily
        self._future: Any = hook(state, GradBucket(bucket, own, number, last))
        if not hasattr(self._future, "wait"):
            self._refuse(self._future, "a torch.futures.Future of a tensor")

    def wait(self) -> None:
        """Waits for the hook's tensor and copies it into the buffer as the mean."""
        value = self._future.wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != self._local.numel():
            self._refuse(value, f"a tensor of the buffer's {self._local.numel()} elements")
        self._local.copy_(value.detach().reshape(-1))

    def _refuse(self, got: Any, expected: str) -> None:
        what = f"{got.numel()} elements" if isinstance(got, torch.Tensor) else type(got).__name__
        raise InvalidArgumentError(
            f"communication hook: rank {self._bucket.ranks.rank} got {what} from "
            f"{getattr(self._hook, '__name__', 'it')} for bucket {self._number}, expected {expected}; return what "
            "follows the reduction of bucket.buffer()"
        )
