"""Splits a batch into micro-batches, and merges their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from ringcomm.errors import InvalidArgumentError, ShapeError


@dataclass(frozen=True)
class Replicate:
    """An argument that every micro-batch gets unchanged."""

    value: Any


MicroBatch = tuple[Any, Fraction | None]
"""(a nest like the batch's, with the part of the micro-batch that this rank has; the micro-batch's share of the batch's
rows, None if no tensor was split here)"""


def split_inputs(inputs: tuple[Any, Any, Any], count: int, rank: int) -> list[MicroBatch]:
    """Returns a nest for each micro-batch.

    Tensors are split along dimension 0; a list of ``count`` items is taken as already split; a `Replicate` value goes
    to each micro-batch. Where ``count`` does not divide the rows, the first micro-batches have one row more than the
    last, as with ``torch.tensor_split``; the share of micro-batches without rows is 0.

    The first tensor determines the number of the batch's rows. Every other tensor must have as many rows or a multiple.
    A tensor without dimensions, or with one row in a batch of several, goes to each micro-batch.

    Args:
        inputs: positional arguments, arguments by name, and the target.
    Raises: ShapeError: no rows, fewer than micro-batches in lists, or another number of rows than the batch.
            InvalidArgumentError: a list of another length.
    """
    leaves, spec = tree_flatten_with_path(inputs, is_leaf=lambda x: isinstance(x, (list, Replicate)))
    first = next(((path, x) for path, x in leaves if torch.is_tensor(x) and x.dim()), None)
    rows = None if first is None else len(first[1])
    if first is not None and not rows:
        raise ShapeError(
            f"Pipeline: rank {rank} got {_text(*first)}, expected at least a row in dimension 0; leave empty batches "
            "out, or pass Replicate(tensor)"
        )
    if first is not None and len(first[1]) < count and any(isinstance(leaf, list) for _, leaf in leaves):
        raise ShapeError(
            f"Pipeline: rank {rank} got {_text(*first)} and a list of micro-batches, expected at least a row in "
            f"dimension 0 for each of {count} micro-batches; pass lists alone, or change the batch"
        )
    sizes = [] if rows is None else [rows // count + (i < rows % count) for i in range(count)]
    by_leaf = []
    for path, leaf in leaves:
        if not torch.is_tensor(leaf):
            by_leaf.append(_copies(leaf, count, rank))
            continue
        times = _rows_for_one(leaf, rows)
        if count > 1 and times is None:
            assert first is not None
            raise ShapeError(
                f"Pipeline: rank {rank} got {_text(path, leaf)}, expected {rows} rows in dimension 0, or a "
                f"multiple, as in {_text(*first)}; pass Replicate(tensor) if each micro-batch needs all of it, or a "
                f"list of {count} micro-batches"
            )
        by_leaf.append(_parts(leaf, [size * times for size in sizes]) if times else [leaf] * count)
    shares = [None if rows is None else Fraction(size, rows) for size in sizes] or [None] * count
    return [(tree_unflatten([parts[i] for parts in by_leaf], spec), shares[i]) for i in range(count)]


def _rows_for_one(x: torch.Tensor, rows: int | None) -> int | None:
    """Returns how many rows a tensor has for each row of the batch; 0 if it is not split; None if it does not fit."""
    if not x.dim() or rows is None or (len(x) == 1 and rows > 1):
        return 0
    times, rest = divmod(len(x), rows)
    return times if times and not rest else None


def _copies(leaf: Any, count: int, rank: int) -> Sequence[Any]:
    """Returns the argument once for each micro-batch."""
    if isinstance(leaf, Replicate):
        return [leaf.value] * count
    if isinstance(leaf, list):
        if len(leaf) != count:
            raise InvalidArgumentError(
                f"Pipeline: rank {rank} got a list of {len(leaf)}, expected one for each of {count} micro-batches; "
                "pass a tensor to be split, or Replicate(list)"
            )
        return leaf
    return [leaf] * count


def _parts(x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    # All views of a tensor share one version counter. If code writes into one part, as FSMT does into its labels,
    # autograd would regard the other parts that it has saved as modified.
    parts = x.split([*sizes])
    return parts if x.requires_grad else [part.data for part in parts]


def _text(path: Any, x: torch.Tensor) -> str:
    """Returns the name and shape of a tensor among the inputs."""
    kind, *rest = path
    key = (rest[0].idx if kind.idx == 0 else repr(rest[0].key)) if kind.idx < 2 else ""
    name = f"the argument {key}{keystr(tuple(rest[1:]))}" if kind.idx < 2 else f"the target{keystr(tuple(rest))}"
    return f"{name} of shape {tuple(x.shape)}"


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Merges the micro-batches' outputs into one.

    Tensors are concatenated along dimension 0, zero-dimensional tensors are stacked, and of equal plain values the
    first is returned. Anything else becomes a list of the micro-batches' values.
    """
    by_leaf = [tree_flatten(output) for output in outputs]
    spec = by_leaf[0][1]
    if any(other != spec for _, other in by_leaf):
        return [*outputs]
    return tree_unflatten([_merge([leaves[i] for leaves, _ in by_leaf]) for i in range(len(by_leaf[0][0]))], spec)


def _merge(parts: Sequence[Any]) -> Any:
    """Merges one leaf of the micro-batches' outputs."""
    first = parts[0]
    if all(isinstance(part, (int, float, bool, str, type(None))) and part == first for part in parts):
        return first
    if not all(torch.is_tensor(part) and part.shape[1:] == first.shape[1:] for part in parts):
        return [*parts]
    return torch.stack([*parts]) if first.dim() == 0 else torch.cat([*parts])
