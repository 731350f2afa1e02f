"""`ringcomm.parallelize`: cuts the layers of an unmodified module over the ranks, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ringcomm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.tensor.dropout import ShardedDropout
from ringcomm.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, form_of, summed_over
from ringcomm.tensor.regions import Region, g, gather, scatter

HEADS = (
    "num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads",
    "n_kv_heads", "split_size", "embed_dim",
)  # fmt: skip
"""Attributes of an attention module that `Heads` divides when it names none."""


@dataclass(frozen=True)
class Colwise:
    """A linear layer cut along its outputs.

    Args:
        gather_output, parts, pad: as of ColumnParallelLinear; a number for ``parts`` are that many equal ones.
    """

    gather_output: bool = False
    parts: int | Several[int] | None = None
    pad: bool = False


@dataclass(frozen=True)
class Rowwise:
    """A linear layer cut along its inputs.

    Args:
        input_is_parallel: as of RowParallelLinear.
    """

    input_is_parallel: bool = True


@dataclass(frozen=True)
class Vocab:
    """An embedding cut along its vocabulary.

    Args:
        scatter: with ``sequence_dim``: whether its output is this rank's part of the sequence.
    """

    scatter: bool = False


@dataclass(frozen=True)
class Heads:
    """An attention module that computes with a rank's share of the heads.

    Args:
        attributes: whole numbers of the module to divide by the ranks; none: those of `HEADS` that it has.
    """

    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnSequence:
    """A module that works on this rank's part of the sequence: norms, whose gradients are summed, and dropout."""


@dataclass(frozen=True)
class SequenceRegion:
    """A module, or the first to the last of a list, that gets this rank's part of the sequence, and whose output is
    brought together again."""


@dataclass(frozen=True)
class GatherSequence:
    """A module in a sequence region whose input is brought together once, for all layers in it: one that reads the
    sequence's length from its input, such as an attention module."""


@dataclass(frozen=True)
class Dropout:
    """Dropout on a tensor that is cut along ``dim``, such as the attention weights of a rank's heads."""

    dim: int


Style = Colwise | Rowwise | Vocab | Heads | OnSequence | SequenceRegion | GatherSequence | Dropout

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gather_output=True),
    "colwise_rep": Colwise(gather_output=True),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(input_is_parallel=False),
    "rowwise_rep": Rowwise(input_is_parallel=False),
    "vocab": Vocab(),
    "embedding_rowwise": Vocab(),
    "heads": Heads(),
    "sequence": OnSequence(),
    "sequence_region": SequenceRegion(),
    "gather_sequence": GatherSequence(),
}
"""The names of styles in a plan; also those that transformers uses in its models' ``_tp_plan``."""


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str | Style] | None,
    comm: Communicator,
    *,
    sequence_dim: int | None = None,
    overlap: bool = False,
) -> nn.Module:
    """Cuts the layers of a module over the ranks; a collective. Its inputs, outputs and parameters are plain tensors.

        ringcomm.parallelize(model, {"*.wq": "colwise", "*.wo": "rowwise", "*.attention": "heads"}, mesh["tp"])

    Args:
        plan: styles, or their names, by the name of a submodule. ``*`` stands for one part of a name, in front for any
            number. None: the plan that the module carries (``_tp_plan`` of transformers).
        comm: the ranks. Rank 0's values are everybody's.
        sequence_dim: sequence parallel: linear layers take and give parts of the sequence, along this dimension, in the
            place of all_reduces. The plan says where the region begins and ends, and what else works on parts of the
            sequence: "sequence_region", "sequence".
        overlap: sequence parallel messages go round the ring while parts of them are multiplied.
    Ranks hold whole what no style cuts, and compute it alike: seed their generators alike. Tied parameters stay tied.
    Make the optimizer, and call `ringcomm.shard`, afterwards.
    Returns: the module, whose layers have been replaced.
    Raises:  InvalidArgumentError: names that no module has, unknown styles, heads or features that do not divide.
             UnsupportedError: a layer that cannot be cut. Before the module is changed.
    """
    region = Region.of(comm)
    if plan is None:
        plan = getattr(module, "_tp_plan", None) or None
    if plan is None:
        raise InvalidArgumentError(
            f"parallelize: rank {comm.rank} got no plan and a {type(module).__name__} without one, expected styles by "
            "the names of submodules; pass a plan"
        )
    chosen = resolve(module, plan, comm.rank)
    _check_sequence(chosen, sequence_dim, comm.rank)
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor.detach(), 0)
    made = {name: _made(module, name, style, region, chosen, sequence_dim, overlap) for name, style in chosen.items()}
    _keep_ties(module, made, comm.rank)
    for name, style in chosen.items():
        _divide(module.get_submodule(name), name, style, region, change=False)
    for name, style in chosen.items():
        found, new = module.get_submodule(name), made[name]
        if new is not None:
            parent, _, key = name.rpartition(".")
            setattr(module.get_submodule(parent), key, new.train(found.training))
        _divide(found, name, style, region, change=True)
        _hook(found, style, region, sequence_dim)
    return module


# ---- names -------------------------------------------------------------------------------------------------------


def matches(pattern: str, name: str) -> bool:
    """Whether a plan's pattern names a module: part by part, and a ``*`` in front for any number of parts."""
    patterns, parts = pattern.split("."), name.split(".")
    if patterns[0] == "*" and len(patterns) > 1:
        patterns = patterns[1:]
        if len(parts) <= len(patterns):
            return False
        parts = parts[-len(patterns) :]
    return len(patterns) == len(parts) and all(map(fnmatchcase, parts, patterns))


def resolve(module: nn.Module, plan: Mapping[str, str | Style], rank: int) -> dict[str, Style]:
    """The style of each module that the plan names."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)][1:]
    chosen: dict[str, Style] = {}
    by: dict[str, str] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got the style {style!r} for {pattern!r}, expected one of "
                f"{', '.join(STYLES)}; pass one of these, or an object of ringcomm.tensor.plan"
            )
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got {pattern!r}, which no module matches, expected names such as "
                f"{', '.join(map(repr, names[:4]))}; look at module.named_modules()"
            )
        for name in found:
            if name in chosen:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}, which both {by[name]!r} and {pattern!r} match, expected one "
                    "style for each module; make the patterns narrower"
                )
            chosen[name], by[name] = STYLES[style] if isinstance(style, str) else style, pattern
    return chosen


def _check_sequence(chosen: Mapping[str, Style], sequence_dim: int | None, rank: int) -> None:
    for name, style in chosen.items():
        asks = isinstance(style, (OnSequence, SequenceRegion, GatherSequence)) or style == Vocab(scatter=True)
        if asks and sequence_dim is None:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got {type(style).__name__} for {name} without a sequence_dim, expected one; "
                "pass sequence_dim=1 for tensors of (batch, sequence, features)"
            )


# ---- layers ------------------------------------------------------------------------------------------------------


def _made(
    module: nn.Module,
    name: str,
    style: Style,
    region: Region,
    chosen: Mapping[str, Style],
    sequence_dim: int | None,
    overlap: bool,
) -> nn.Module | None:
    """What takes a module's place; None: it stays."""
    found = module.get_submodule(name)
    parent = name.rpartition(".")[0]
    width = getattr(module.get_submodule(parent), "head_dim", 1)
    multiple = width if isinstance(width, int) else 1
    if isinstance(style, Colwise):
        above = _ancestors(name)
        entered = any(isinstance(chosen.get(each), GatherSequence) for each in above)
        parts = style.parts
        if isinstance(parts, int):
            parts = [form_of(found)[2] // parts] * parts
        return ColumnParallelLinear.of(
            found, region, gather_output=style.gather_output, parts=parts, pad=style.pad, multiple=multiple,
            sequence_dim=None if entered or not _in_region(above, chosen) else sequence_dim, entered=entered,
            overlap=overlap and not entered and _in_region(above, chosen),
        )  # fmt: skip
    if isinstance(style, Rowwise):
        inside = _in_region(_ancestors(name), chosen)
        return RowParallelLinear.of(
            found, region, input_is_parallel=style.input_is_parallel, multiple=multiple,
            sequence_dim=sequence_dim if inside else None, overlap=overlap and inside,
        )  # fmt: skip
    if isinstance(style, Vocab):
        if not isinstance(found, nn.Embedding):
            raise UnsupportedError(
                f"parallelize: rank {region.rank} got {name}, a {type(found).__name__}, as an embedding, expected "
                "nn.Embedding; leave it out of the plan"
            )
        return VocabParallelEmbedding.of(found, region, sequence_dim=sequence_dim if style.scatter else None)
    if isinstance(style, Dropout) or (isinstance(style, OnSequence) and isinstance(found, nn.Dropout)):
        dim = style.dim if isinstance(style, Dropout) else sequence_dim
        assert dim is not None
        return ShardedDropout(_rate(found, name, region.rank), region.comm, dim)
    return None


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _in_region(above: list[str], chosen: Mapping[str, Style]) -> bool:
    """Whether a module lies in a sequence region; with a plan that names none, its layers are taken to."""
    regions = [name for name, style in chosen.items() if isinstance(style, SequenceRegion)]
    return not regions or any(name in regions for name in above)


def _rate(found: nn.Module, name: str, rank: int) -> float:
    if not isinstance(found, nn.Dropout):
        raise UnsupportedError(
            f"parallelize: rank {rank} got {name}, a {type(found).__name__}, as dropout, expected nn.Dropout; leave it "
            "out of the plan"
        )
    return float(found.p)


def _keep_ties(module: nn.Module, made: Mapping[str, nn.Module | None], rank: int) -> None:
    """Lets layers that shared a parameter share its part."""
    new: dict[int, tuple[str, nn.Parameter]] = {}
    for name, layer in made.items():
        if layer is None:
            continue
        for key, old in module.get_submodule(name)._parameters.items():
            p = layer._parameters.get(key)
            if old is None or p is None or p is old:
                continue
            first, shared = new.setdefault(id(old), (f"{name}.{key}", p))
            if shared._ringcomm_part != p._ringcomm_part or shared.shape != p.shape:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}.{key}, which is tied to {first} and cut in another way, "
                    "expected the same cut; pass pad=True where one is padded, or untie them"
                )
            layer._parameters[key] = shared
    for name, owner in module.named_modules():
        for key, p in owner._parameters.items():
            if p is not None and id(p) in new and made.get(name) is None:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}.{key} whole, tied to {new[id(p)][0]}, which is cut, expected "
                    "both in the plan; add it, or untie them"
                )


def _divide(found: nn.Module, name: str, style: Style, region: Region, change: bool) -> None:
    """Divides the numbers of heads that an attention module computes with."""
    if not isinstance(style, Heads):
        return
    names = style.attributes or tuple(each for each in HEADS if isinstance(getattr(found, each, None), int))
    if not names:
        raise InvalidArgumentError(
            f"parallelize: rank {region.rank} got {name} as heads, a {type(found).__name__} without a number of heads "
            "that is known, expected its attributes; pass Heads(('name', ...))"
        )
    for each in names:
        value = getattr(found, each, None)
        if not isinstance(value, int) or value % region.world_size:
            raise InvalidArgumentError(
                f"parallelize: rank {region.rank} got {name}.{each} = {value!r}, expected a multiple of the "
                f"{region.world_size} ranks; use a number of ranks that divides it"
            )
        if change:
            setattr(found, each, value // region.world_size)


# ---- sequences ---------------------------------------------------------------------------------------------------


def _hook(found: nn.Module, style: Style, region: Region, sequence_dim: int | None) -> None:
    if isinstance(style, OnSequence):
        for p in found.parameters():
            summed_over(p, region)
    elif isinstance(style, GatherSequence):
        _before(found, lambda x: g(x, region.comm, sequence_dim or 0))
    elif isinstance(style, SequenceRegion):
        inside = list(found) if isinstance(found, (nn.Sequential, nn.ModuleList)) else [found]
        dim = sequence_dim or 0
        _before(inside[0], lambda x: scatter(x, region.comm, dim))
        inside[-1].register_forward_hook(lambda _, args, y: _first(y, lambda x: gather(x, region.comm, dim)))


def _before(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes a module's first tensor, positional or named."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i, x in enumerate(args):
            if torch.is_tensor(x):
                return (*args[:i], change(x), *args[i + 1 :]), kwargs
        for key, x in kwargs.items():
            if torch.is_tensor(x):
                return args, {**kwargs, key: change(x)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _first(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An output with its first tensor changed."""
    if torch.is_tensor(output):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))
