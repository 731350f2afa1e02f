"""Describes which part of a larger tensor this rank's parameter is. Tensor parallel layers and pipelines attach it
to parameters; norms and checkpoints read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ringcomm.comm.mesh import Mesh
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.notes import notes_of, notes_on


@dataclass(frozen=True)
class ShardSpec:
    """A parameter's place in the whole model's tensor.

    Attributes:
        dim: dimension along which the unsharded tensor was split; None: it was not split.
        extent: size of the unsharded tensor along ``dim``.
        pieces: (start, length) along ``dim`` of that tensor, in the order in which they lie here. Elements after them
            are zero padding.
        names: names in the whole model, if they differ from the names here; checkpoints use the first.
        copy: whether another pipeline stage has the same values, and counts and saves them.
        staged: whether other ranks have other parameters of the model.
    """

    dim: int | None = None
    extent: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    copy: bool = False
    staged: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other elements of the tensor."""
        return self.dim is not None and self.pieces != ((0, self.extent),)

    @property
    def is_partial(self) -> bool:
        """Whether this rank's parameters are only a part of the whole model's."""
        return self.is_cut or self.copy or self.staged

    def unsharded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the unsharded tensor, from the shape here."""
        if self.dim is None:
            return tuple(shape)
        return (*shape[: self.dim], self.extent, *shape[self.dim + 1 :])

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields, for a box of the tensor here, its intervals along ``dim`` in the unsharded tensor: the start in
        the box, the start in that tensor, and the length. Padding is left out."""
        assert self.dim is not None
        first, last, at = offsets[self.dim], offsets[self.dim] + sizes[self.dim], 0
        for start, length in self.pieces:
            low, high = max(first, at), min(last, at + length)
            if low < high:
                yield low - first, start + low - at, high - low
            at += length


PLAIN = ShardSpec()


def part_of(p: torch.Tensor) -> ShardSpec:
    """Returns a parameter's place; `PLAIN` if it was not split."""
    return getattr(p, "_ringcomm_part", PLAIN)


def is_primary_copy(p: torch.Tensor, mesh: Mesh | None) -> bool:
    """Whether this rank, of all that have the same values, counts the parameter in norms and saves it in
    checkpoints."""
    part = part_of(p)
    return not part.copy and (mesh is None or part.dim is not None or mesh.counts)


def take(unsharded: torch.Tensor, part: ShardSpec, length: int) -> torch.Tensor:
    """Returns a copy of this rank's part of an unsharded tensor, padded with zeros to ``length`` along the
    dimension."""
    assert part.dim is not None
    made = unsharded.new_empty(*unsharded.shape[: part.dim], length, *unsharded.shape[part.dim + 1 :])
    copy_part(made, unsharded, part)
    return made


def copy_part(mine: torch.Tensor, unsharded: torch.Tensor, part: ShardSpec) -> None:
    """Copies this rank's part of an unsharded tensor into ``mine``, and writes zeros into the padding."""
    assert part.dim is not None
    for own, there in _pieces(mine, unsharded, part):
        own.copy_(there)
    used = sum(count for _, count in part.pieces)
    mine.narrow(part.dim, used, mine.shape[part.dim] - used).zero_()


def put_part(unsharded: torch.Tensor, mine: torch.Tensor, part: ShardSpec) -> None:
    """Copies this rank's part to its place in an unsharded tensor."""
    for own, there in _pieces(mine, unsharded, part):
        there.copy_(own)


def _pieces(
    mine: torch.Tensor, unsharded: torch.Tensor, part: ShardSpec
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each piece of this rank's part, and its place in the unsharded tensor."""
    assert part.dim is not None
    at = 0
    for start, count in part.pieces:
        yield mine.narrow(part.dim, at, count), unsharded.narrow(part.dim, start, count)
        at += count


def refuse_parts(params: Iterable[torch.Tensor], call: str, what: str) -> None:
    """Raises for parameters whose other parts are on unknown ranks, because ``what`` would cover only this rank's
    part."""
    if any(part_of(p).is_partial for p in params):
        raise InvalidArgumentError(
            f"{call}: got parameters of a pipeline's stage or of tensor parallel layers without a mesh, expected "
            f"parameters of a sharded model, because {what} needs the other ranks; call ringcomm.shard(model, "
            "optimizer, stage=0, mesh=mesh) first"
        )


def note(module: nn.Module, key: str, **changes: Any) -> None:
    """Changes the place of a module's parameter. The module records it too, because load_state_dict(assign=True) and
    to_empty() create new parameters."""
    p = module._parameters[key]
    assert p is not None
    p._ringcomm_part = replace(part_of(p), **changes)
    notes_on(module).parts[key] = p._ringcomm_part


def renew_parts(modules: Iterable[nn.Module]) -> None:
    """Attaches to these modules' parameters the places recorded by `note`, if they differ."""
    for module in modules:
        for key, part in notes_of(module).parts.items():
            p = module._parameters.get(key)
            if p is not None and part_of(p) is not part:
                p._ringcomm_part = part
