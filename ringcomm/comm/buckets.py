"""Several tensors into one bucket and back, cast and scaled on the way: what goes before and after one collective over
many small tensors. Local: no rank waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringcomm.arrays.interop import Array
from ringcomm.comm.calls import Call, Piece, whole
from ringcomm.comm.lists import ListCollectives
from ringcomm.errors import DtypeError, ShapeError

_CASTABLE = ("float32", "float64", "float16", "bfloat16")
Pairs = list[tuple[Piece, Piece]]
"""(source, target) of every tensor, of equal counts."""


class BucketCollectives(ListCollectives):
    """Packing; the rules of `Collectives` hold."""

    def pack(self, tensors: Sequence[Any], bucket: Any, scale: float = 1.0, *, stream: Any = None) -> Any:
        """The elements of all ``tensors``, in order and one behind the other, into ``bucket``, times ``scale``.

        Shapes:  any; ``bucket`` has at least as many elements, and keeps those behind the last tensor.
        Dtypes:  one for all tensors, one for the bucket; where they differ or there is a scale: float32, float64,
                 float16, bfloat16. Values are multiplied in float32 (float64 if either is) and rounded once.
        Cost:    one pass over the bytes: one kernel on a device.
        Returns: ``bucket``.
        """
        call = self._begin("pack", None, stream)
        target = call.update(bucket)
        sources = [call.read(x) for x in call.list_of("tensors", tensors)]
        pairs = [(whole(source), piece) for source, piece in zip(sources, _cut(call, target, sources), strict=True)]
        self._move(call, pairs, scale)
        return bucket

    def unpack(self, bucket: Any, tensors: Sequence[Any], scale: float = 1.0, *, stream: Any = None) -> list[Any]:
        """The elements of ``bucket`` back into ``tensors``, as `pack` laid them, times ``scale``.

        Shapes, dtypes, cost: as in `pack`.
        Returns: ``list(tensors)``.
        """
        call = self._begin("unpack", None, stream)
        source = call.read(bucket)
        targets = [call.write(x) for x in call.list_of("tensors", tensors)]
        pairs = [(piece, whole(target)) for target, piece in zip(targets, _cut(call, source, targets), strict=True)]
        self._move(call, pairs, scale)
        return list(tensors)

    def _move(self, call: Call, pairs: Pairs, scale: float) -> None:
        call.number("scale", scale)
        if not pairs:
            return
        sources, targets = ([pair[end].array for pair in pairs] for end in (0, 1))
        for arrays in (sources, targets):
            call.same_dtype(arrays[0].dtype, *arrays)
        before, after = sources[0].dtype, targets[0].dtype
        if (before != after or scale != 1) and not (before.name in _CASTABLE and after.name in _CASTABLE):
            raise DtypeError(
                f"{call.op}: rank {self.rank} got {before.name} to {after.name} times {scale:g}, expected "
                f"{', '.join(_CASTABLE)} where there is a cast or a scale; convert first"
            )
        self._pack(call, [_apart(call, *pair) for pair in pairs], scale)
        call.finish(-1)

    def _pack(self, call: Call, pairs: Pairs, scale: float) -> None:
        """Moves pairs that were checked; as the library of the arrays does it."""
        del call
        import torch

        for source, target in pairs:
            x, y = ((torch.as_tensor(p.array.data).reshape(-1)[p.offset :][: p.count]) for p in (source, target))
            if x.dtype != y.dtype or scale != 1:
                x = x.to(torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32) * scale
            y.copy_(x)


def _cut(call: Call, bucket: Array, tensors: Sequence[Array]) -> list[Piece]:
    pieces, offset = [], 0
    for array in tensors:
        pieces.append(Piece(bucket, offset, array.count))
        offset += array.count
    if offset > bucket.count:
        raise ShapeError(
            f"{call.op}: rank {call.rank} got tensors of {offset} elements together and a bucket of {bucket.count}; "
            "pass a bucket that holds them"
        )
    return pieces


def _apart(call: Call, source: Piece, target: Piece) -> tuple[Piece, Piece]:
    """The two, or a copy of the source where they share memory."""
    if not source.array.overlaps(target.array):
        return source, target
    return Piece(call.copy(source.array), source.offset, source.count), target
