"""Assigns parts of a sequence to ranks, and finds the keys of each rank's part that a rank's queries attend to.

    W = 3            rank 0      rank 1      rank 2
    contiguous        0 1         2 3         4 5      rank 2's queries see all keys, rank 0's a third of them
    zigzag            0 5         1 4         2 3      all ranks have the same number of (query, earlier key) pairs

The numbers are chunks: the sequence is divided into 2 W equal ones.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, ShapeError, shown
from ringcomm.modules.arguments import DEVICE, TENSOR
from ringcomm.validation import COMMUNICATOR, expects, validate_int

LAYOUTS = ("zigzag", "contiguous")
DIM = validate_int(-(1 << 31), 1 << 31, "a dimension")


class Block(NamedTuple):
    """Some queries of this rank, and some keys of the same or another rank.

    Attributes:
        causal: whether each query sees only the keys up to its own position; else every query sees all of these keys.
        distance: from the first key to the first query, in tokens of the complete sequence, if the edge of a window
            lies in the block; None: the window contains the block.
    """

    rows: slice
    keys: slice
    causal: bool
    distance: int | None = None

    def visible(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Returns whether each query sees each key, by their positions alone: (1, 1, rows, keys), boolean. None: every
        query sees every key."""
        if self.distance is None and not self.causal:
            return None
        rows, keys = (torch.arange(each.stop - each.start, device=device) for each in (self.rows, self.keys))
        ahead = (rows[:, None] - keys + (self.distance or 0))[None, None]
        if self.distance is None or window is None:
            return ahead >= 0
        return (ahead < window) & (ahead >= 0 if self.causal else ahead > -window)


def blocks_of(
    rank: int, source: int, length: int, causal: bool, layout: str, world_size: int, window: int | None
) -> list[Block]:
    """Returns the blocks of the ``length`` keys of ``source`` that the queries of ``rank`` attend to, as few as
    possible.

    With a window each block is a chunk of queries and a chunk of keys; pairs that are too far apart are left out.
    """
    if window is None:
        block = block_of(rank, source, length, causal, layout)
        return [block] if block is not None else []
    found = []
    for rows, query in places(rank, world_size, length, layout):
        for keys, key in places(source, world_size, length, layout):
            distance, most = query - key, rows.stop - rows.start - 1  # largest offset of a token in its chunk
            if abs(distance) - most < window and (distance >= 0 or not causal):
                cut = distance + most >= window or (not causal and most - distance >= window)
                found.append(Block(rows, keys, causal and distance == 0, distance if cut else None))
    return found


def block_of(rank: int, source: int, length: int, causal: bool, layout: str) -> Block | None:
    """Returns the block of the ``length`` keys of ``source`` that the queries of ``rank`` attend to; None: nothing.

    With ``causal``, only the block of a rank's own part has a mask; all other blocks are computed completely:

    | zigzag     | keys: first half, chunk s               | second half, chunk 2W-1-s | pairs       |
    |------------|-----------------------------------------|---------------------------|-------------|
    | s before r | all queries see it                      | none                      | half of all |
    | s after r  | the second half of the queries sees both halves                     | half of all |

    so that every rank computes half of a full block for each other rank.
    """
    every, half = slice(0, length), length // 2
    if not causal or rank == source:
        return Block(every, every, causal)
    if layout == "contiguous":
        return Block(every, every, False) if source < rank else None
    if source < rank:
        return Block(every, slice(0, half), False)
    return Block(slice(half, length), every, False)


def check_layout(layout: str, call: str, rank: int) -> None:
    """Raises InvalidArgumentError for an unknown layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got layout={shown(layout)}, expected one of {', '.join(LAYOUTS)}; pass one of these"
        )


def _spans(rank: int, world_size: int, length: int, layout: str) -> list[tuple[int, int]]:
    """Returns begin and length of each piece of the complete sequence that a rank has."""
    if layout == "contiguous" or world_size == 1:
        part = length // world_size
        return [(rank * part, part)]
    chunk = length // (2 * world_size)
    return [(rank * chunk, chunk), ((2 * world_size - 1 - rank) * chunk, chunk)]


def places(rank: int, world_size: int, length: int, layout: str) -> list[tuple[slice, int]]:
    """Returns, for each piece of a rank's part of ``length``, its slice of the part and its start in the complete
    sequence."""
    spans = _spans(rank, world_size, length * world_size, layout)
    return [(slice(i * count, (i + 1) * count), begin) for i, (begin, count) in enumerate(spans)]


@expects("shard_sequence", x=TENSOR, comm=COMMUNICATOR, dim=DIM)
def shard_sequence(x: torch.Tensor, comm: Communicator, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Returns this rank's part of a sequence that every rank has completely.

    Args:
        x: any shape; ``dim`` is the sequence.
        layout: "zigzag": chunks r and 2W-1-r of 2W, in this order; "contiguous": chunk r of W. A single rank gets the
            complete sequence.
    Returns: a new tensor, with 1/W of the sequence. Differentiable; its gradient is zero where other ranks' parts are.
    Cost:    nothing is sent.
    Raises:  ShapeError: a sequence that cannot be divided into that many chunks. InvalidArgumentError: an unknown
             layout.
    """
    check_layout(layout, "shard_sequence", comm.rank)
    dim = _sequence_dim(x, dim, "shard_sequence", comm.rank)
    _check_length(
        x.shape[dim], comm, layout, "shard_sequence", f"a sequence of {x.shape[dim]} in dim {dim} of {tuple(x.shape)}"
    )
    part = torch.cat([x.narrow(dim, *span) for span in _spans(comm.rank, comm.world_size, x.shape[dim], layout)], dim)
    known = parts_of(comm)
    sequences = [n for i, n in enumerate(x.shape) if i != dim and (i + 1 < x.dim() or not x.is_floating_point())]
    if part.shape[dim] in known or len(known) < MOST_LENGTHS:
        known[part.shape[dim]] = max(math.prod(sequences), known.get(part.shape[dim], 0))
    return part


_parts: weakref.WeakKeyDictionary[Communicator, dict[int, int]] = weakref.WeakKeyDictionary()
MOST_LENGTHS = 64


def parts_of(comm: Communicator) -> dict[int, int]:
    """Returns the lengths of the parts that `shard_sequence` has made for this communicator, each with the largest
    number of sequences (the last dimension of floating-point values counts as features). With `MOST_LENGTHS` entries
    it may be incomplete."""
    return _parts.setdefault(comm, {})


@expects("gather_sequence", x=TENSOR, comm=COMMUNICATOR, dim=DIM)
def gather_sequence(x: torch.Tensor, comm: Communicator, dim: int = 1, layout: str = "zigzag") -> torch.Tensor:
    """Returns the complete sequence, in order, gathered from every rank's part; a collective.

    Differentiable: the gradient of a part is the SUM, over all ranks, of their gradients of it. Like that of
    `ring_attention`, it is the exact adjoint for the sum of all ranks' losses. Where every rank computes the same loss
    from the complete sequence, this sum is W times the loss: divide by W.

    Args:
        x: this rank's part; the same shape on every rank. ``dim`` is the sequence.
        layout: that of ``shard_sequence``.
    Order:   the communicator's, in backward.
    Cost:    forward one all_gather, backward one reduce_scatter, of the complete sequence.
    Raises:  InvalidArgumentError: an unknown layout. ShapeError: no such dim, or an odd part in zigzag.
    """
    check_layout(layout, "gather_sequence", comm.rank)
    dim = _sequence_dim(x, dim, "gather_sequence", comm.rank)
    if layout == "zigzag" and comm.world_size > 1 and x.shape[dim] % 2:
        raise ShapeError(
            f"gather_sequence: rank {comm.rank} got a part of {x.shape[dim]} in dim {dim}, expected an even number in "
            "zigzag; pass the result of shard_sequence"
        )
    return _Gather.apply(x, comm, dim, layout)


@expects("positions", length=validate_int(), comm=COMMUNICATOR, device=DEVICE)
def positions(
    length: int, comm: Communicator, layout: str = "zigzag", device: torch.device | str | None = None
) -> torch.Tensor:
    """Returns the positions of this rank's tokens in the complete sequence: for ``position_ids``, one-dimensional,
    int64.

    Args:
        length: the length of the complete sequence.
    Raises:  as ``shard_sequence``.
    """
    check_layout(layout, "positions", comm.rank)
    _check_length(length, comm, layout, "positions", f"length={length}")
    return shard_sequence(torch.arange(length, device=device), comm, 0, layout)


def _check_length(length: int, comm: Communicator, layout: str, call: str, got: str) -> None:
    chunks = comm.world_size * (2 if layout == "zigzag" and comm.world_size > 1 else 1)
    if length % chunks:
        raise ShapeError(
            f"{call}: rank {comm.rank} got {got}, expected a multiple of {chunks} ({layout} on {comm.world_size} "
            "ranks); pad the whole sequence"
        )


def _sequence_dim(x: torch.Tensor, dim: int, call: str, rank: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(
            f"{call}: rank {rank} got dim={dim} for a tensor of shape {tuple(x.shape)}, expected one of its "
            f"{x.dim()} dimensions; pass the sequence's"
        )
    return dim % x.dim()


class _Gather(torch.autograd.Function):
    """Gathers the parts of a sequence, and adds up their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, dim: int, layout: str) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.layout = comm, dim, layout
        parts = x.new_empty((comm.world_size, *x.shape))
        comm.all_gather(x.contiguous(), out=parts)
        length = x.shape[dim] * comm.world_size
        gathered = x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))
        for rank, part in enumerate(parts):
            at = 0
            for begin, count in _spans(rank, comm.world_size, length, layout):
                gathered.narrow(dim, begin, count).copy_(part.narrow(dim, at, count))
                at += count
        return gathered

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # what the other ranks add is a constant to autograd
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        comm, dim = ctx.comm, ctx.dim
        spans = [_spans(rank, comm.world_size, grad.shape[dim], ctx.layout) for rank in range(comm.world_size)]
        parts = torch.stack([torch.cat([grad.narrow(dim, *span) for span in each], dim) for each in spans])
        mine = torch.empty_like(parts[0])
        comm.reduce_scatter(parts, out=mine)
        return mine, None, None, None
