"""Collectives over lists of arrays: nothing is packed, each array is read and written where it lies, and the arrays
of a list may differ in size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ringcomm.arrays.interop import Array
from ringcomm.comm.calls import Call, Piece, whole
from ringcomm.comm.collectives import Collectives, Timeout
from ringcomm.comm.work import Group


class ListCollectives(Collectives):
    """The list and coalesced forms; the rules of `Collectives` hold."""

    def all_reduce_coalesced(
        self,
        xs: Sequence[Any],
        op: str = "sum",
        *,
        factor: float | None = None,
        algorithm: str = "auto",
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``all_reduce`` of every array of ``xs``, in place; all are checked before the first is sent.

        Arrays of one type that follow one another are served together: on a device by one launch for many of them.

        Returns: ``list(xs)``; with ``async_op=True`` the Group of calls.
        """
        calls = []
        for x in self._begin("all_reduce_coalesced").list_of("xs", xs):
            call = self._begin("all_reduce", timeout, stream)
            call.flag("async_op", async_op)
            calls.append(self._prepare_all_reduce(call, x, op, None, factor, algorithm))
        if not async_op and self._group is None:
            for _, alike in groupby(calls, key=lambda call: (call.wire, call.stream)):
                self._run_list(list(alike))
            return [call.finish(-1) for call in calls]
        if not async_op:
            return [self._launch(call, async_op=False) for call in calls]
        group = Group()
        group.works.extend(self._launch(call, async_op=True) for call in calls)
        return group

    def all_gather_list(
        self, outputs: Sequence[Any], x: Any, *, timeout: Timeout = None, stream: Any = None, async_op: bool = False
    ) -> Any:
        """``outputs[r]`` gets ``x`` of rank r.

        Shapes:  ``outputs[r]`` has as many elements as ``x`` of rank r; every rank passes the same sizes.
        Returns: ``list(outputs)``.
        """
        call = self._begin("all_gather_list", timeout, stream)
        source = call.read(x)
        parts = self._written(call, outputs, source)
        call.same_count(f"x, for outputs[{self.rank}]", parts[self.rank].count, source.count)
        call.input = call.separate_pieces(source, parts)
        call.result = list(outputs)
        return self._finish_list(call, source, output_parts=parts, async_op=async_op)

    def reduce_scatter_list(
        self,
        out: Any,
        inputs: Sequence[Any],
        op: str = "sum",
        *,
        factor: float | None = None,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``out`` of rank r gets the combination of ``inputs[r]`` of all ranks.

        Shapes:  ``inputs[r]`` has as many elements as ``out`` of rank r; every rank passes the same sizes.
        Order:   canonical, as in all_reduce.
        Returns: ``out``.
        """
        call = self._begin("reduce_scatter_list", timeout, stream)
        call.reduces(op, factor)
        call.output = call.write(out)
        parts = self._read(call, inputs, call.output)
        call.same_count(f"out, for inputs[{self.rank}]", parts[self.rank].count, call.output.count)
        call.result = out
        return self._finish_list(call, call.output, input_parts=parts, async_op=async_op)

    def all_to_all_list(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``outputs[p]`` gets ``inputs[rank]`` of rank p.

        Shapes:  ``inputs[p]`` has as many elements as ``outputs[rank]`` of rank p.
        Returns: ``list(outputs)``.
        """
        call = self._begin("all_to_all_list", timeout, stream)
        inputs = call.list_of("inputs", inputs, self.world_size)
        first = call.read(inputs[0])
        written = self._written(call, outputs, first)
        read = [self._apart(call, call.read(x), written) for x in inputs]
        call.same_dtype(first.dtype, *(piece.array for piece in read))
        call.same_count(f"outputs[{self.rank}]", read[self.rank].count, written[self.rank].count)
        call.result = list(outputs)
        return self._finish_list(call, first, input_parts=read, output_parts=written, count=0, async_op=async_op)

    def gather_list(
        self,
        outputs: Sequence[Any] | None,
        x: Any,
        root: int = 0,
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """At the root ``outputs[r]`` gets ``x`` of rank r; elsewhere ``outputs`` is None.

        Shapes:  ``outputs[r]`` has as many elements as ``x`` of rank r.
        Returns: ``list(outputs)`` at the root, None elsewhere.
        """
        call = self._begin("gather_list", timeout, stream)
        call.root = call.peer("root", root)
        source = call.read(x)
        written = [Piece(source, 0, 0)] * self.world_size
        if self.rank == root:
            written = self._written(call, outputs, source)
            call.same_count(f"x, for outputs[{self.rank}]", written[self.rank].count, source.count)
            source = call.separate_pieces(source, written)
            call.result = list(outputs or ())
        read = [Piece(source, 0, source.count if p == root else 0) for p in range(self.world_size)]
        return self._finish_list(call, source, input_parts=read, output_parts=written, count=0, async_op=async_op)

    def scatter_list(
        self,
        out: Any,
        inputs: Sequence[Any] | None,
        root: int = 0,
        *,
        timeout: Timeout = None,
        stream: Any = None,
        async_op: bool = False,
    ) -> Any:
        """``out`` of rank r gets ``inputs[r]`` of the root; elsewhere ``inputs`` is None.

        Shapes:  ``inputs[r]`` has as many elements as ``out`` of rank r.
        Returns: ``out``.
        """
        call = self._begin("scatter_list", timeout, stream)
        call.root = call.peer("root", root)
        target = call.write(out)
        call.result = out
        read = [Piece(target, 0, 0)] * self.world_size
        if self.rank == root:
            read = self._read(call, inputs, target)
            call.same_count(f"out, for inputs[{self.rank}]", read[self.rank].count, target.count)
        written = [Piece(target, 0, target.count if p == root else 0) for p in range(self.world_size)]
        return self._finish_list(call, target, input_parts=read, output_parts=written, count=0, async_op=async_op)

    # ---- what they share -----------------------------------------------------------------------------------------

    def _finish_list(
        self,
        call: Call,
        like: Array,
        *,
        input_parts: list[Piece] | None = None,
        output_parts: list[Piece] | None = None,
        count: int | None = None,
        async_op: bool,
    ) -> Any:
        call.input_parts, call.output_parts = input_parts, output_parts
        return self._launch(call.seal(like.count if count is None else count, like.dtype), async_op)

    def _written(self, call: Call, outputs: Sequence[Any] | None, like: Array) -> list[Piece]:
        arrays = [call.write(x) for x in call.list_of("outputs", outputs, self.world_size)]
        call.same_dtype(like.dtype, *arrays)
        return [whole(array) for array in arrays]

    def _read(self, call: Call, inputs: Sequence[Any] | None, target: Array) -> list[Piece]:
        """Inputs beside one output; one that shares memory with it, and is not this rank's own, is copied."""
        pieces = []
        for r, x in enumerate(call.list_of("inputs", inputs, self.world_size)):
            array = call.read(x)
            call.same_dtype(target.dtype, array)
            own = r == self.rank and array.address == target.address
            pieces.append(whole(call.copy(array) if array.overlaps(target) and not own else array))
        return pieces

    def _apart(self, call: Call, array: Array, written: Sequence[Piece]) -> Piece:
        return whole(call.copy(array) if any(array.overlaps(piece.array) for piece in written) else array)
