"""Sends keys, values and their gradients round the ring of ranks while blocks are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Group, Work
from ringcomm.errors import MismatchError, UnsupportedError

FACTS, KEYS, GRADS = 0x52494E47, 0x52494E48, 0x52494E49  # tags that only these messages use
FACTS_NBYTES = 256


def travel(
    comm: Communicator, overlap: bool, facts: str, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields each rank with its keys and values: first this rank, then the previous ranks, nearest first.

    The next keys and values arrive while the caller uses the current ones, which are valid until the next step.

    Args:
        overlap: whether messages travel while a block is computed; False: each message is waited for at once.
        facts: of this rank's call, as text; raises MismatchError if those of the previous rank differ.
    """
    check, last = _compare(comm, overlap, facts, keys.device), comm.world_size - 1
    buffer = None
    for step in range(comm.world_size):
        if step < last:
            if buffer is None:
                buffer = RingBuffer(comm, overlap, KEYS, keys, values, keys.dtype)
                buffer.keys.copy_(keys)
                buffer.values.copy_(values)
            buffer.send()
        yield (comm.rank - step) % comm.world_size, keys, values
        if step == 0:
            check()
        if buffer is not None and step < last:
            buffer.receive(is_last=step + 1 == last)
            keys, values = buffer.keys, buffer.values


def _start(comm: Communicator, overlap: bool, tag: int, sent: torch.Tensor, received: torch.Tensor) -> list[Work]:
    """Sends to the next rank and receives from the previous one."""
    following, previous = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    if not overlap:
        comm.sendrecv(sent, following, received, previous, tag)
        return []
    started: Group = comm.sendrecv(sent, following, received, previous, tag, async_op=True)
    return started.works


def _compare(comm: Communicator, overlap: bool, facts: str, device: torch.device) -> Callable[[], None]:
    """Starts to send the facts of this rank's call to the next rank. The returned function raises if the facts of the
    previous rank differ.

    On a device nothing is sent, because the host would have to wait for the device to compare them.
    """
    if device.type != "cpu" or comm.world_size == 1:
        return _nothing
    mine = facts.encode().ljust(FACTS_NBYTES)[:FACTS_NBYTES]
    received = torch.empty(FACTS_NBYTES, dtype=torch.uint8)
    works = _start(comm, overlap, FACTS, torch.frombuffer(bytearray(mine), dtype=torch.uint8), received)

    def check() -> None:
        _finish(works)
        theirs = received.numpy().tobytes()
        if theirs != mine:
            _refuse_other_call(comm, facts, theirs.decode(errors="replace").rstrip())

    if not overlap:
        check()
        return _nothing
    return check


def _refuse_other_call(comm: Communicator, facts: str, theirs: str) -> None:
    previous = (comm.rank - 1) % comm.world_size
    with contextlib.suppress(UnsupportedError):  # a process group cannot abort: the others time out
        comm.abort(f"rank {comm.rank} found that rank {previous} calls another ring_attention")
    raise MismatchError(
        f"ring_attention: rank {comm.rank} got {facts} where rank {previous} has {theirs}; call it with the same "
        "shapes and arguments, in the same order, on every rank"
    )


class RingBuffer:
    """Keys and values, or their gradients, in one buffer that is sent round the ring as one message. A second buffer
    receives the message of the previous rank.

    Attributes:
        keys, values: the current contents, with the shapes of the constructor's arguments; at first uninitialised.
    """

    def __init__(
        self, comm: Communicator, overlap: bool, tag: int, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.comm, self.overlap, self.tag = comm, overlap, tag
        self._shapes = keys.shape, values.shape
        self._received: torch.Tensor | None = None
        self._works: list[Work] = []
        self._set(torch.empty(keys.numel() + values.numel(), dtype=dtype, device=keys.device))

    def _set(self, flat: torch.Tensor) -> None:
        of_keys, of_values = self._shapes
        middle = of_keys.numel()
        self.flat, self.keys, self.values = flat, flat[:middle].view(of_keys), flat[middle:].view(of_values)

    def send(self) -> None:
        """Starts to send the contents to the next rank, and to receive those of the previous rank."""
        if self._received is None:
            self._received = torch.empty_like(self.flat)
        self._works = _start(self.comm, self.overlap, self.tag, self.flat, self._received)

    def receive(self, is_last: bool = False) -> None:
        """Waits until the previous rank's contents have arrived, and replaces the contents by them.

        Args:
            is_last: whether nothing is sent any more; frees the other buffer.
        """
        _finish(self._works)
        self._works = []
        assert self._received is not None
        sent = self.flat
        self._set(self._received)
        self._received = None if is_last else sent


def _finish(works: list[Work]) -> None:
    """Waits until all works have ended."""
    for work in works:
        work.wait()


def _nothing() -> None:
    """Does nothing; takes the place of the check if no facts were sent."""
