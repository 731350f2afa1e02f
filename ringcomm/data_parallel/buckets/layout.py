"""The flat layout: the place of every parameter in one long buffer, and the shard boundaries.

The layout is a pure function of names, shapes, types and the world size. It is computed once, when a model is wrapped;
it is the same for every stage, and never changes afterwards.

    segments   | weight 0 ....... |pad| bias 0 |pad| weight 1 .................... |pad| bias 1 |pad ..... |
    shards     | rank 0               | rank 1               | rank 2               | rank 3               |
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ringcomm.errors import InvalidArgumentError, shown

ALIGN_BYTES = 128
"""Segments and shards begin at a multiple of this, so that no vector instruction of an optimizer straddles a shard
boundary. The optimizer's bits then do not depend on where the boundaries are."""

Atom = str | int
"""The smallest unit of a parameter that stays in one shard: "element", "row", "tensor", or a number of elements."""

_unflatten = torch._C._nn.unflatten_dense_tensors  # views of consecutive parts of a tensor, in given shapes


class Fragment(NamedTuple):
    """The part of a segment that lies in a range of the buffer."""

    segment: int  # the segment's index
    start: int  # first element, counted in the segment
    offset: int  # first element, counted from the range's start
    numel: int


class Run(NamedTuple):
    """Neighbouring segments of one optimizer group, restricted to a range of the buffer."""

    group: int
    start: int  # in the buffer
    end: int
    segments: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A parameter, and its place in the buffer once it is laid out."""

    name: str
    shape: tuple[int, ...]
    group: int = 0  # index of the optimizer's group
    offset: int = 0  # in elements
    atom: int = 1  # a shard boundary inside it lies at a multiple of this, counted from the segment's start
    dim_order: tuple[int, ...] = ()  # its dimensions from the slowest to the fastest in memory; empty: as in the shape

    def in_memory_order(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a view of values of this shape with the dimensions in the order of memory."""
        return values.permute(self.dim_order) if self.dim_order else values

    def flatten(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of this shape flat, in the order of the buffer; flat values are returned as they are."""
        return (values if values.dim() == 1 else self.in_memory_order(values)).reshape(-1)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a view of the segment's elements, which lie one after another, in its shape."""
        if not self.dim_order:
            return flat.view(self.shape)
        return flat.view(self.memory_shape).permute(inverse(self.dim_order))

    @cached_property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape with the dimensions in the order of memory."""
        return tuple(self.shape[dim] for dim in self.dim_order) or self.shape

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def end(self) -> int:
        """One past its last element."""
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Segments of one element type, in order, and the shards of ``shard_numel`` elements, one for each rank.

    Lengths and offsets are in elements. The gaps between segments and the rest of the last shard are padding. ``atom``:
    the unit that shard boundaries do not split.
    """

    segments: tuple[Segment, ...]
    dtype: torch.dtype
    world_size: int
    shard_numel: int
    atom: Atom

    @staticmethod
    def build(specs: Sequence[Segment], dtype: torch.dtype, world_size: int, atom: Atom = "element") -> FlatLayout:
        """Lays ``specs`` out in order of their optimizer groups, otherwise in the order given.

        Args:
            atom: the unit that a shard boundary must not split. "element" gives even shards; "tensor" keeps each
                parameter on one rank, for optimizers that need whole tensors; "row" and a number of elements lie
                between.
        """
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        ordered = sorted(specs, key=lambda spec: spec.group)
        atoms = [_atom_of(spec, atom) for spec in ordered]
        sizes = [spec.numel for spec in ordered]
        shard, offsets = _place(sizes, atoms, align, world_size)
        segments = tuple(
            replace(spec, offset=offset, atom=each, dim_order=dim_order_for(atom, spec.dim_order))
            for spec, offset, each in zip(ordered, offsets, atoms, strict=True)
        )
        return FlatLayout(segments, dtype, world_size, shard, atom)

    @property
    def numel(self) -> int:
        """Length of the whole buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(segment.numel for segment in self.segments)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Returns the first element of a rank's shard, and one past its last."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def owned_range(self, rank: int, stage: int) -> tuple[int, int]:
        """Returns the range of the buffer that a rank's optimizer updates at a stage: its shard, or at stage 0 all."""
        return self.shard_range(rank) if stage else (0, self.numel)

    def index_of(self, element: int) -> int:
        """Returns the index of the segment that holds an element of the buffer."""
        return max(0, bisect.bisect_right(self._offsets, element) - 1)

    @cached_property
    def _offsets(self) -> list[int]:
        return [segment.offset for segment in self.segments]

    def part(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """Returns a segment's part of a whole buffer, in the segment's shape."""
        segment = self.segments[i]
        return segment.view(buffer[segment.offset : segment.end])

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns every segment's part of a whole buffer, with one torch call."""
        return self._cut(buffer)[0]

    def parts_and_padding(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns every segment's part of a whole buffer, and the gaps between them."""
        parts, cuts = self._cut(buffer)
        taken = {*self._shapes[1]}
        return parts, [cut for k, cut in enumerate(cuts) if k not in taken]

    def _cut(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """Returns every segment's part of a whole buffer, and its consecutive parts, padding included."""
        shapes, at = self._shapes
        cuts = _unflatten(buffer, shapes)
        parts = [cuts[k] if cuts[k].numel() else self.part(buffer, i) for i, k in enumerate(at)]
        for i in self._permuted:
            parts[i] = self.part(buffer, i)
        return parts, cuts

    @cached_property
    def _permuted(self) -> list[int]:
        return [i for i, segment in enumerate(self.segments) if segment.dim_order]

    @cached_property
    def _shapes(self) -> tuple[list[torch.Tensor], list[int]]:
        """Tensors without memory that have the shapes of the consecutive parts of a whole buffer, padding included, and
        the index of each segment's tensor among them."""
        nothing = torch.empty((), device="meta")
        found: list[torch.Tensor] = []
        at: list[int] = []
        end = 0
        for segment in self.segments:
            found += [nothing.expand(segment.offset - end)] if segment.offset > end else []
            at.append(len(found))
            found.append(nothing.expand(segment.shape))
            end = segment.end
        return found + ([nothing.expand(self.numel - end)] if self.numel > end else []), at

    def piece(self, owned: torch.Tensor, start: int, i: int) -> tuple[torch.Tensor, int]:
        """Returns the part of a segment that a range of the buffer holds, which may be empty, and the part's offset in
        the segment.

        Args:
            owned: the range's elements.
            start: the first of them in the buffer.
        """
        segment = self.segments[i]
        first, last = max(segment.offset, start), min(segment.end, start + owned.numel())
        return owned[first - start : max(first, last) - start], first - segment.offset

    def fragments(self, start: int, end: int, empty: bool = False) -> list[Fragment]:
        """Returns the fragments in a range of the buffer, in order.

        Args:
            empty: include segments without elements, which belong to the shard that contains their offset.
        """
        found = []
        for i, segment in enumerate(self.segments):
            first, last = max(start, segment.offset), min(end, segment.end)
            here = start <= segment.offset < end or (segment.offset == end == self.numel)
            if first < last or (empty and here and not segment.numel):
                found.append(Fragment(i, first - segment.offset, first - start, last - first))
        return found

    def runs(self, start: int, end: int, groups: Sequence[int], merge: bool = True) -> list[Run]:
        """Returns the runs that an optimizer sees in a range: neighbouring segments of one group, with the padding
        after each segment.

        Args:
            groups: the optimizer's group of each segment; negative: none.
            merge: False: one run for each segment, without padding.
        """
        align = max(1, ALIGN_BYTES // self.dtype.itemsize)
        found: list[Run] = []
        open_run = False
        for fragment in self.fragments(start, end, empty=True):
            group = groups[fragment.segment]
            first = start + fragment.offset
            last = min(end, up(first + fragment.numel, align)) if merge else first + fragment.numel
            if merge and open_run and found[-1].group == group:
                before = found.pop()
                found.append(Run(group, before.start, last, (*before.segments, fragment.segment)))
            elif group >= 0:
                found.append(Run(group, first, last, (fragment.segment,)))
            open_run = group >= 0
        return found


def inverse(dim_order: Sequence[int]) -> list[int]:
    """Returns the permutation from the order of memory back to the order of the shape."""
    return [dim_order.index(dim) for dim in range(len(dim_order))]


def dim_order(p: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a parameter from the slowest to the fastest in memory, such as (0, 2, 3, 1) for
    torch.channels_last; empty if they are in the order of its shape, or if its memory has gaps."""
    strides = p.stride()
    order = tuple(sorted(range(p.dim()), key=lambda dim: -strides[dim]))
    return order if [*order] != sorted(order) and p.permute(order).is_contiguous() else ()


def dim_order_for(atom: Atom, order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the order of a parameter's dimensions in the buffer: its own, unless its rows would be scattered."""
    return () if atom == "row" and order[:1] != (0,) else order


def memory_format(p: torch.Tensor) -> str:
    """Returns the order of a parameter's dimensions in memory as text; empty if it is that of its shape."""
    order = dim_order(p)
    return f" with dim_order {order}" if order else ""


def _atom_of(spec: Segment, atom: Atom) -> int:
    if atom == "element":
        return 1
    if atom == "tensor":
        return max(1, spec.numel)
    if atom == "row":
        return max(1, math.prod(spec.shape[1:])) if len(spec.shape) > 1 else 1
    if isinstance(atom, int) and atom > 0:
        return atom
    raise InvalidArgumentError(
        f"layout: got atom={shown(atom)} for {spec.name}, expected 'element', 'row', 'tensor' or a number of elements; "
        "pass one of these"
    )


def up(value: int, multiple: int) -> int:
    """Rounds up to the next multiple."""
    return -(-value // multiple) * multiple


def _place(sizes: list[int], atoms: list[int], align: int, world_size: int) -> tuple[int, list[int]]:
    """Returns the shortest shard length found, and the segments' offsets."""
    total = sum(up(size, align) for size in sizes)
    low, high = up(-(-total // world_size), align), max(align, total)
    low = max(low, align)
    found = _offsets(sizes, atoms, align, world_size, low)
    if found is not None:
        return low, found
    best, at = high, _offsets(sizes, atoms, align, world_size, high)
    assert at is not None  # a single shard holds everything
    # A binary search. A longer shard may fit worse than a shorter one, so the result need not be the shortest.
    while low + align < best:
        middle = up((low + best) // 2, align)
        if middle >= best:
            break
        found = _offsets(sizes, atoms, align, world_size, middle)
        if found is None:
            low = middle
        else:
            best, at = middle, found
    for atom in {each for each, size in zip(atoms, sizes, strict=True) if each < size}:
        shard = up(low, math.lcm(align, atom))  # if a segment spans several shards, shards must hold whole atoms
        found = _offsets(sizes, atoms, align, world_size, shard) if shard < best else None
        if found is not None:
            best, at = shard, found
    return best, at


def _offsets(sizes: list[int], atoms: list[int], align: int, world_size: int, shard: int) -> list[int] | None:
    """Returns the offsets with shards of this length; None if the segments do not fit."""
    offsets, at = [], 0
    for size, atom in zip(sizes, atoms, strict=True):
        start = _fit(at, size, atom, align, shard)
        if start is None:
            return None
        offsets.append(start)
        at = up(start + size, align)
    return offsets if not sizes or offsets[-1] + sizes[-1] <= shard * world_size else None


def _fit(at: int, size: int, atom: int, align: int, shard: int) -> int | None:
    """Returns the first offset from ``at`` on where no shard boundary splits an atom; None if there is none."""
    cut = (at // shard + 1) * shard
    if atom == 1 or at + size <= cut:
        return at
    if atom >= size:
        return cut if size <= shard else None
    tries = range(at, min(cut, at + math.lcm(align, atom)), align)
    start = next((place for place in tries if (cut - place) % atom == 0), cut)
    cuts = -(-(start + size) // shard) - start // shard - 1  # shard boundaries inside the segment
    return None if cuts > (1 if start < cut else 0) and shard % atom else start
