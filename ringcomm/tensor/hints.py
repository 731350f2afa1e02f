"""Warnings about plans that look as if something was forgotten: they would train on wrong values without an error."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from ringcomm.tensor.layers import ColumnParallelLinear, RowParallelLinear

COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "split_size")
"""Attributes whose modules, as a rule, compute with them."""


def warn_of_forgotten(
    module: nn.Module, layers: Mapping[str, nn.Module], divided: Iterable[nn.Module], named: Collection[str]
) -> None:
    """Warns of modules that count heads which no style divides though their layers are cut, and of parameters beside
    layers that are cut, such as those of a norm of heads, that no style sums.

    Args:
        layers: what takes the place of the layers of the module, which is as it was.
        divided: modules whose heads a style divides.
        named: all that the plan names.
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
    for above in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        _warn_of_sums(module, above, layers, named)


def _warn_of_sums(module: nn.Module, above: str, layers: Mapping[str, nn.Module], named: Collection[str]) -> None:
    """Of parameters between a layer cut along its outputs and one cut along its inputs: in the same module, and as long
    as no vector outside of the two."""
    inside = {name: each for name, each in layers.items() if name.rpartition(".")[0] == above}
    columns = [each for each in inside.values() if isinstance(each, ColumnParallelLinear) and not each.gather_output]
    rows = [each for each in inside.values() if isinstance(each, RowParallelLinear) and each.input_is_parallel]
    if not columns or not rows or rows[0].region.world_size == 1:
        return
    whole = {each.in_features for each in columns} | {each.out_features for each in rows}
    for name, p in module.get_submodule(above).named_parameters():
        full = f"{above}.{name}" if above else name
        around = [full[:at] for at, letter in enumerate(full) if letter == "."]
        inner = [each for each in around if len(each) > len(above)]
        if any(layer.startswith(f"{each}.") for each in inner for layer in layers):
            continue  # nearer to other layers
        if p.dim() < 2 and p.requires_grad and p.numel() not in whole and not any(each in named for each in around):
            warnings.warn(
                f"parallelize: {full} of shape {tuple(p.shape)} lies beside layers that are cut, and no style names "
                f"{around[-1] if around else 'it'}; if ranks use it on their own heads or features, its style is "
                "'summed', else 'replicate'",
                stacklevel=5,
            )
            return
