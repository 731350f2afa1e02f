"""A warning about plans that look as if heads were forgotten: they would train on wrong values without an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from ringcomm.tensor.layers import ColumnParallelLinear, RowParallelLinear

COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "split_size")
"""Attributes whose modules, as a rule, compute with them."""


def warn_of_forgotten(module: nn.Module, layers: Mapping[str, nn.Module], divided: Iterable[nn.Module]) -> None:
    """Warns of modules that count heads which no style divides though their layers are cut.

    Args:
        layers: what takes the place of the layers of the module, which is as it was.
        divided: modules whose heads a style divides.
    """
    known = {id(each) for each in divided}
    for name, new in layers.items():
        if not isinstance(new, (ColumnParallelLinear, RowParallelLinear)) or new.region.world_size == 1:
            continue
        above = name.rpartition(".")[0]
        parent = module.get_submodule(above)
        counts = [each for each in COUNTS if type(getattr(parent, each, None)) is int]
        if counts and id(parent) not in known:
            known.add(id(parent))
            warnings.warn(
                f"parallelize: {above or 'the module'} has {counts[0]}={getattr(parent, counts[0])}, its {name} is "
                "cut, and no style divides the heads; if it computes with that number, give it the style 'heads', else "
                "'replicate'",
                stacklevel=4,
            )
