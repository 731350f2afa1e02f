"""Splits a batch into micro-batches, and merges their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ringcomm.errors import InvalidArgumentError, ShapeError


@dataclass(frozen=True)
class Replicate:
    """An argument that every micro-batch gets unchanged."""

    value: Any


MicroBatch = tuple[Any, Fraction | None]
"""The part of a micro-batch that a rank has: a nest like that of the batch, and its share of the batch's rows; None
where no tensor was split here."""


def split_inputs(inputs: Any, count: int, rank: int) -> list[MicroBatch]:
    """Returns a nest for each micro-batch.

    Tensors are split along dimension 0; a list of ``count`` items is taken as already split; a `Replicate` value goes
    to each micro-batch. Where ``count`` does not divide the rows, the first micro-batches have one row more than the
    last, as with ``torch.tensor_split``.

    Raises: ShapeError: fewer rows than micro-batches; or tensors of different numbers of rows, one of which ``count``
            does not divide. InvalidArgumentError: a list of another length.
    """
    leaves, spec = tree_flatten(inputs, is_leaf=lambda x: isinstance(x, (list, Replicate)))
    shapes = [tuple(leaf.shape) for leaf in leaves if torch.is_tensor(leaf)]
    rows = _rows(shapes, count, rank)
    by_leaf = [_parts(leaf, count, rank) for leaf in leaves]
    shares = [None if rows is None else Fraction(rows // count + (i < rows % count), rows) for i in range(count)]
    return [(tree_unflatten([parts[i] for parts in by_leaf], spec), shares[i]) for i in range(count)]


def _rows(shapes: Sequence[tuple[int, ...]], count: int, rank: int) -> int | None:
    """Returns the number of rows of the batch; None where nothing is split."""
    for shape in shapes:
        if not shape or shape[0] < count:
            raise ShapeError(
                f"Pipeline: rank {rank} got a tensor of shape {shape}, expected at least a row in dimension 0 for each "
                f"of {count} micro-batches; change the batch, or pass a list of micro-batches, or Replicate(tensor)"
            )
    uneven = next((shape for shape in shapes if shape[0] % count), None)
    other = next((shape for shape in shapes if uneven is not None and shape[0] != uneven[0]), None)
    if other is not None:
        raise ShapeError(
            f"Pipeline: rank {rank} got tensors of shapes {uneven} and {other}, expected as many rows in dimension 0 "
            f"of each where {count} micro-batches do not divide them; change the batch, or pass a list of "
            "micro-batches, or Replicate(tensor)"
        )
    return shapes[0][0] if shapes else None


def _parts(leaf: Any, count: int, rank: int) -> Sequence[Any]:
    """Returns the part of an argument's leaf for each micro-batch."""
    if isinstance(leaf, Replicate):
        return [leaf.value] * count
    if isinstance(leaf, list):
        if len(leaf) != count:
            raise InvalidArgumentError(
                f"Pipeline: rank {rank} got a list of {len(leaf)}, expected one for each of {count} micro-batches; "
                "pass a tensor to be split, or Replicate(list)"
            )
        return leaf
    if not torch.is_tensor(leaf):
        return [leaf] * count
    # All views of a tensor share one version counter. Where code writes into one part, as FSMT does into its labels,
    # autograd would treat what it has saved of the other parts as modified.
    parts = leaf.tensor_split(count)
    return parts if leaf.requires_grad else [part.data for part in parts]


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
