"""A batch cut into micro-batches, and their outputs joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ringcomm.errors import InvalidArgumentError, ShapeError


@dataclass(frozen=True)
class Whole:
    """An argument that every micro-batch gets as it is."""

    value: Any


def cut_inputs(inputs: Any, count: int, rank: int) -> list[Any]:
    """A nest for each micro-batch: tensors are cut along dimension 0, lists of ``count`` are cut already, `Whole` is
    given to each.

    Raises: ShapeError: a tensor that does not divide. InvalidArgumentError: a list of another length.
    """
    leaves, spec = tree_flatten(inputs, is_leaf=lambda x: isinstance(x, (list, Whole)))
    by_leaf = [_parts(leaf, count, rank) for leaf in leaves]
    return [tree_unflatten([parts[number] for parts in by_leaf], spec) for number in range(count)]


def _parts(leaf: Any, count: int, rank: int) -> Sequence[Any]:
    if isinstance(leaf, Whole):
        return [leaf.value] * count
    if isinstance(leaf, list):
        if len(leaf) != count:
            raise InvalidArgumentError(
                f"Pipeline: rank {rank} got a list of {len(leaf)}, expected one for each of {count} micro-batches; "
                "pass a tensor to be cut, or Whole(list)"
            )
        return leaf
    if not torch.is_tensor(leaf):
        return [leaf] * count
    if leaf.dim() == 0 or leaf.shape[0] % count:
        raise ShapeError(
            f"Pipeline: rank {rank} got a tensor of shape {tuple(leaf.shape)}, expected a dimension 0 that divides "
            f"into {count} micro-batches; change the batch, or pass a list of micro-batches, or Whole(tensor)"
        )
    return leaf.split(leaf.shape[0] // count)


def joined(outputs: Sequence[Any]) -> Any:
    """The micro-batches' outputs as one: tensors one behind the other along dimension 0, numbers as a dimension
    of their own; of plain values that are equal the first. A list of all where they are anything else."""
    by_leaf = [tree_flatten(output) for output in outputs]
    spec = by_leaf[0][1]
    if any(other != spec for _, other in by_leaf):
        return [*outputs]
    return tree_unflatten([_joined([leaves[i] for leaves, _ in by_leaf]) for i in range(len(by_leaf[0][0]))], spec)


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if all(isinstance(part, (int, float, bool, str, type(None))) and part == first for part in parts):
        return first
    if not all(torch.is_tensor(part) and part.shape[1:] == first.shape[1:] for part in parts):
        return [*parts]
    return torch.stack([*parts]) if first.dim() == 0 else torch.cat([*parts])
