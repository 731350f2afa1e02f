"""The messages round the ring: to the next rank and from the previous one, while a block is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.work import Group, Work
from ringcomm.errors import MismatchError, UnsupportedError

FACTS, KEYS, GRADS = 0x52494E47, 0x52494E48, 0x52494E49  # tags that only these messages use
FACTS_NBYTES = 256


class Pair:
    """Keys and values, or their gradients, in one buffer, which is sent as one message."""

    def __init__(self, flat: torch.Tensor, shapes: tuple[torch.Size, torch.Size]) -> None:
        self.flat, self.shapes = flat, shapes
        middle = shapes[0].numel()
        self.keys, self.values = flat[:middle].view(shapes[0]), flat[middle:].view(shapes[1])

    @staticmethod
    def empty_like(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> Pair:
        """Returns uninitialised memory for keys and values."""
        count = keys.numel() + values.numel()
        return Pair(torch.empty(count, dtype=dtype, device=keys.device), (keys.shape, values.shape))

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Returns a copy of keys and values."""
        made = Pair.empty_like(keys, values, keys.dtype)
        made.keys.copy_(keys)
        made.values.copy_(values)
        return made

    def another(self) -> Pair:
        """Returns another buffer of the same shapes."""
        return Pair(torch.empty_like(self.flat), self.shapes)


class Link:
    """This rank's place in the ring.

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
        """Starts to send the facts of this rank's call to the next rank; the returned function raises if the previous
        rank's differ.

        On a device nothing is sent: to read the answer, the host would have to wait for the device.
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
                self._refuse(facts, theirs.decode(errors="replace").rstrip())

        if not self.overlap:
            check()
            return _nothing
        return check

    def travel(
        self, facts: str, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yields every rank with its keys and values: this rank's own, then those of the previous ranks, nearest first.

        The next ones arrive while the caller works on the current ones, which are valid until the next step.
        """
        check = self.compare(facts, keys.device)
        here = there = None
        for step in range(self.world_size):
            works: list[Work] = []
            if step + 1 < self.world_size:
                here = here or Pair.of(keys, values)
                there = there or here.another()
                works = self.start(KEYS, here.flat, there.flat)
            yield (self.rank - step) % self.world_size, keys, values
            if step == 0:
                check()
            finish(works)
            here, there = there, here
            if step + 2 >= self.world_size:
                there = None  # nothing more arrives
            if here is not None:
                keys, values = here.keys, here.values

    def _refuse(self, facts: str, theirs: str) -> None:
        with contextlib.suppress(UnsupportedError):  # a process group cannot abort: the others time out
            self.comm.abort(f"rank {self.rank} found that rank {self.prev} calls another ring_attention")
        raise MismatchError(
            f"ring_attention: rank {self.rank} got {facts} where rank {self.prev} has {theirs}; call it with the same "
            "shapes and arguments, in the same order, on every rank"
        )


class Sums:
    """Sums of the gradients of keys and values. They travel with these round the ring, and end on the rank that owns
    them."""

    def __init__(self, link: Link, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
        self._link, self._empty = link, partial(Pair.empty_like, keys, values, dtype)
        self._here: Pair | None = None
        self._there: Pair | None = None
        self._works: list[Work] = []

    def take(self) -> Pair:
        """Returns the sums for the current keys, once they have arrived; at first zeros."""
        if self._there is None:
            self._here = self._empty()
            self._here.flat.zero_()
        else:
            finish(self._works)
            self._here, self._there = self._there, self._here
        assert self._here is not None
        return self._here

    def pass_on(self) -> None:
        """Starts to send the sums that `take` returned, and to receive the next ones."""
        assert self._here is not None
        self._there = self._there or self._empty()
        self._works = self._link.start(GRADS, self._here.flat, self._there.flat)


def finish(works: list[Work]) -> None:
    """Waits for all."""
    for work in works:
        work.wait()


def _nothing() -> None:
    """Does nothing; the check where no facts were sent."""
