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


class Ring:
    """Sends to the next rank and receives from the previous one.

    Args:
        overlap: whether messages travel while a block is computed; False: `start` waits for each message.
    """

    def __init__(self, comm: Communicator, overlap: bool) -> None:
        self.comm, self.overlap = comm, overlap
        self.rank, self.world_size = comm.rank, comm.world_size
        self.next, self.prev = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def start(self, tag: int, sent: torch.Tensor, received: torch.Tensor) -> list[Work]:
        """Sends to the next rank and receives from the previous one."""
        if not self.overlap:
            self.comm.sendrecv(sent, self.next, received, self.prev, tag)
            return []
        started: Group = self.comm.sendrecv(sent, self.next, received, self.prev, tag, async_op=True)
        return started.works

    def compare(self, facts: str, device: torch.device) -> Callable[[], None]:
        """Starts to send the facts of this rank's call to the next rank. The returned function raises if the facts of
        the previous rank differ.

        On a device nothing is sent, because the host would have to wait for the device to compare them.
        """
        if device.type != "cpu" or self.world_size == 1:
            return _nothing
        mine = facts.encode().ljust(FACTS_NBYTES)[:FACTS_NBYTES]
        received = torch.empty(FACTS_NBYTES, dtype=torch.uint8)
        works = self.start(FACTS, torch.frombuffer(bytearray(mine), dtype=torch.uint8), received)

        def check() -> None:
            finish(works)
            theirs = received.numpy().tobytes()
            if theirs != mine:
                self._refuse_other_call(facts, theirs.decode(errors="replace").rstrip())

        if not self.overlap:
            check()
            return _nothing
        return check

    def travel(
        self, facts: str, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yields each rank with its keys and values: first this rank, then the previous ranks, nearest first.

        The next keys and values arrive while the caller uses the current ones, which are valid until the next step.
        """
        check, last = self.compare(facts, keys.device), self.world_size - 1
        buffer = None
        for step in range(self.world_size):
            if step < last:
                if buffer is None:
                    buffer = RingBuffer(self, KEYS, keys, values, keys.dtype)
                    buffer.keys.copy_(keys)
                    buffer.values.copy_(values)
                buffer.send()
            yield (self.rank - step) % self.world_size, keys, values
            if step == 0:
                check()
            if buffer is not None and step < last:
                buffer.receive(is_last=step + 1 == last)
                keys, values = buffer.keys, buffer.values

    def _refuse_other_call(self, facts: str, theirs: str) -> None:
        with contextlib.suppress(UnsupportedError):  # a process group cannot abort: the others time out
            self.comm.abort(f"rank {self.rank} found that rank {self.prev} calls another ring_attention")
        raise MismatchError(
            f"ring_attention: rank {self.rank} got {facts} where rank {self.prev} has {theirs}; call it with the same "
            "shapes and arguments, in the same order, on every rank"
        )


class RingBuffer:
    """Keys and values, or their gradients, in one buffer that is sent round the ring as one message. A second buffer
    receives the message of the previous rank.

    Attributes:
        keys, values: the current contents, with the shapes of the constructor's arguments; at first uninitialised.
    """

    def __init__(self, ring: Ring, tag: int, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
        self.ring, self.tag = ring, tag
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
        self._works = self.ring.start(self.tag, self.flat, self._received)

    def receive(self, is_last: bool = False) -> None:
        """Waits until the previous rank's contents have arrived, and replaces the contents by them.

        Args:
            is_last: whether nothing is sent any more; frees the other buffer.
        """
        finish(self._works)
        self._works = []
        assert self._received is not None
        sent = self.flat
        self._set(self._received)
        self._received = None if is_last else sent


def finish(works: list[Work]) -> None:
    """Waits until all works have ended."""
    for work in works:
        work.wait()


def _nothing() -> None:
    """Does nothing: the check if no facts were sent."""
