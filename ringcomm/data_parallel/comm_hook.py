"""Runs a user's function in place of a bucket's gradient reduction. It is called as torch's DistributedDataParallel
calls its communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

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


def start_hook(state: Any, hook: CommHook, bucket: Bucket, number: int, last: bool, local: torch.Tensor) -> Any:
    """Calls the user's function with a bucket's gradients. Returns a handle whose wait copies the function's result,
    the mean, to ``local``.

    Args:
        number, last: see `GradBucket`.
        local: the gradients.
    """

    def refuse(got: Any, expected: str) -> NoReturn:
        what = f"{got.numel()} elements" if isinstance(got, torch.Tensor) else type(got).__name__
        raise InvalidArgumentError(
            f"communication hook: rank {bucket.ranks.rank} got {what} from {getattr(hook, '__name__', 'it')} for "
            f"bucket {number}, expected {expected}; return the future of the reduction of bucket.buffer()"
        )

    def wait() -> None:
        value = future.wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != local.numel():
            refuse(value, f"a tensor of the buffer's {local.numel()} elements")
        local.copy_(value.detach().reshape(-1))

    own = local.clone()  # memory allocated by torch, because some hooks resize it temporarily
    future: Any = hook(state, GradBucket(bucket, own, number, last))
    if not hasattr(future, "wait"):
        refuse(future, "a torch.futures.Future of a tensor")
    return SimpleNamespace(wait=wait)
