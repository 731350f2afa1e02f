"""A communicator over one of our engines: how it lives, splits, lends memory and ends."""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringcomm import _C, interop
from ringcomm.calls import Call, milliseconds
from ringcomm.collective_lists import ListCollectives
from ringcomm.collectives import Timeout
from ringcomm.errors import ClosedError, InvalidArgumentError, ShapeError
from ringcomm.work import Request

if TYPE_CHECKING:
    from ringcomm.process_group import ProcessGroupCommunicator

_PLACE = struct.Struct("<?qq")  # has a color, color, key


class Communicator(ListCollectives):
    """One rank of a group of ranks, and the collectives among them.

    Made by `ringcomm.init`, `ringcomm.run_ranks`, or from another one by `split`, `subgroup` and `dup`. Use it as a
    context manager, or call `close`.
    """

    def __init__(self, engine: _C.Engine) -> None:
        super().__init__()
        self._engine: _C.Engine | None = engine
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.kind = engine.kind

    @staticmethod
    def from_process_group(pg: Any = None) -> ProcessGroupCommunicator:
        """The same methods over any process group of torch.distributed, such as one of NCCL or Gloo.

        Args:
            pg: the group; None: the default one.
        Returns: a communicator; closing it leaves the group as it is.
        """
        from ringcomm.process_group import ProcessGroupCommunicator

        return ProcessGroupCommunicator(pg)

    # ---- running calls -------------------------------------------------------------------------------------------

    def _run_plain(
        self,
        op: str,
        x: Any,
        out: Any,
        timeout: Timeout,
        async_op: bool = False,
        algorithm: str = "auto",
        reduce_op: str = "sum",
        factor: float | None = None,
        root: int | None = 0,
        tag: int = 0,
    ) -> int | None:
        usual = timeout is None and not async_op and algorithm == "auto" and factor is None and self._group is None
        if not usual or self._engine is None:
            return None
        return self._engine.run_plain(op, reduce_op, root, tag, x, out)

    def _run(self, call: Call) -> int:
        return self._native.run(*call.numbers())

    def _submit(self, call: Call) -> Request:
        return self._native.submit(*call.numbers())

    @property
    def _native(self) -> _C.Engine:
        if self._engine is None:
            raise ClosedError(f"communicator: rank {self.rank} expected an open one, got one that was closed")
        return self._engine

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = None, like: str | None = None) -> Any:
        """A new array in memory that the peers read and write in place: collectives on it copy less.

        Args:
            shape: a number of elements, or a shape.
            dtype: of torch or NumPy, or a name; None: float32.
            like: "torch" or "numpy"; None: the library of ``dtype``, else torch.
        Returns: an uninitialised array. The memory lives as long as the array or any view of it, also after `close`.
        Raises:  EngineError: no memory left.
        """
        if self._closed:
            raise ClosedError(f"empty: rank {self.rank} expected an open communicator, got one that was closed")
        if like is None:
            like = interop.library_of(dtype)
        if like not in ("torch", "numpy"):
            raise InvalidArgumentError(f"empty: rank {self.rank} got like={like!r}; pass 'torch' or 'numpy'")
        extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise ShapeError(f"empty: rank {self.rank} got shape {extents}, expected no negative extent; pass a shape")
        found = interop.dtype_in(like, dtype)
        return self._allocate(extents, found, like, math.prod(extents) * found.itemsize)

    def _allocate(self, shape: tuple[int, ...], dtype: Any, library: str, nbytes: int) -> Any:
        import ctypes

        if nbytes == 0:
            return interop.wrap_nothing(library, dtype, shape)
        engine = self._native
        address = engine.allocate(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, engine.release, address).atexit = False
        return interop.wrap_memory(memory, library, dtype, shape)

    # ---- more communicators --------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Cuts this communicator into one for each color; a collective, also for ranks that pass None.

        Args:
            color: ranks of the same color come together; None: this rank is in none.
            key: order inside the new one; ranks of equal key keep their order.
        Returns: the new communicator, or None. It is independent of this one, which stays open.
        """
        self._begin("split")
        place = _PLACE.pack(color is not None, color or 0, key)
        places = [_PLACE.unpack(each) for each in self._native.exchange(place)]
        members = [r for r, (colored, its, _) in enumerate(places) if colored and its == color and color is not None]
        members.sort(key=lambda r: places[r][2])  # stable: equal keys keep their order
        engine = None
        if members:
            engine = _C.Engine(self.kind, members.index(self.rank), len(members), self._native.timeout_ms)
        handles = self._native.exchange(b"" if engine is None else engine.handle())
        if engine is None:
            return None
        engine.connect([handles[r] for r in members])
        return Communicator(engine)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some ranks, numbered in the order given; a collective of all ranks of this one.

        Returns: the new communicator on the ranks named, None elsewhere.
        Raises:  InvalidArgumentError: a rank that is not here, or is named twice.
        """
        call = self._begin("subgroup")
        for rank in ranks:
            call.peer("ranks", rank)
        if len(set(ranks)) != len(ranks):
            raise InvalidArgumentError(f"subgroup: rank {self.rank} got {list(ranks)}; name each rank once")
        member = self.rank in ranks
        return self.split(0 if member else None, list(ranks).index(self.rank) if member else 0)

    def dup(self) -> Communicator:
        """A second communicator of the same ranks, whose calls do not wait for those of this one; a collective."""
        same = self.split(0, self.rank)
        assert same is not None  # every rank has the color
        return same

    # ---- life ----------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """Time limit, in seconds, of every call that names none."""
        return self._native.timeout_ms / 1e3

    @timeout.setter
    def timeout(self, limit: Timeout) -> None:
        self._native.timeout_ms = milliseconds(limit, "timeout", self.rank)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def aborted(self) -> bool:
        """Whether a rank gave up; every call then raises AbortedError."""
        return self._engine is not None and self._engine.aborted

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends every wait on every rank: their calls raise AbortedError with ``reason``. From any thread."""
        if self._engine is not None:
            self._engine.abort(reason)

    def close(self) -> None:
        """Finishes what is in flight and lets go of the peers; not a collective. Twice is as good as once."""
        engine, self._engine = self._engine, None
        self._closed = True
        if engine is not None:
            engine.close()
        self._in_flight.clear()

    def describe(self) -> dict[str, str]:
        """Facts for people: ranks, engine, instruction set, memory, limits."""
        facts = {"rank": str(self.rank), "world_size": str(self.world_size), "kind": self.kind}
        return facts if self._engine is None else facts | self._engine.describe()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if not ended_well and not self._closed:
            self.abort(f"rank {self.rank} left its communicator with {type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "aborted" if self.aborted else "open"
        return f"<ringcomm.{type(self).__name__} rank {self.rank} of {self.world_size}, {self.kind}, {state}>"
