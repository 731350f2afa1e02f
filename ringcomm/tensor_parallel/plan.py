"""`ringcomm.parallelize`: shards the layers of an unmodified module over the ranks, by their names."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ringcomm.comm.communicator import Communicator
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.errors import InvalidArgumentError, MismatchError, RingcommError, UnsupportedError, shown
from ringcomm.modules.arguments import MODULE, matches
from ringcomm.modules.notes import attributes_of
from ringcomm.modules.shard_spec import ShardSpec, copy_part, part_of
from ringcomm.modules.unsplit import keep_unsplit
from ringcomm.tensor_parallel.dropout import ShardedDropout
from ringcomm.tensor_parallel.experts import shard_experts
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.hints import (
    ancestors_of,
    check_sequence_is_split,
    explain_first_errors,
    latent_for,
    refuse_unsummed,
    warn_of_undivided_heads,
)
from ringcomm.tensor_parallel.layers import (
    DIM,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_shape,
    refuse_changed,
    replace_data,
    set_shard,
    shard_along,
)
from ringcomm.tensor_parallel.outputs import OutputSharding
from ringcomm.tensor_parallel.sequence import gather_before, split_and_gather, sum_gradients, sum_last_outputs
from ringcomm.tensor_parallel.styles import (
    FOREIGN,
    HEADS,
    STYLES,
    Colwise,
    Dropout,
    Experts,
    Heads,
    Latent,
    ModuleStyle,
    Rowwise,
    Style,
    Vocab,
    name_of,
)
from ringcomm.tensor_parallel.verify import Verifier
from ringcomm.validation import FLAG, expects, that

ON_SEQUENCE = (ModuleStyle.SEQUENCE, ModuleStyle.GATHER_SEQUENCE)
SUMS = (ModuleStyle.SUMMED, ModuleStyle.SEQUENCE)
OF_INPUTS = (ModuleStyle.GATHER_SEQUENCE, ModuleStyle.SEQUENCE_REGION)
"""Styles that say nothing about the parameters of the module."""
GATHERED = ("colwise_gather_output", "colwise_rep")
ACTIVATIONS = "transformers.activations"


@expects("parallelize", module=MODULE)
def parallelize(
    module: nn.Module,
    plan: Mapping[str, str | Style] | None,
    comm: Communicator,
    *,
    sequence_dim: int | None = None,
    overlap: bool = False,
    verify: bool = False,
) -> nn.Module:
    """Shards the layers of a module over the ranks; a collective. Its inputs, outputs and parameters are plain tensors.

        ringcomm.parallelize(model, {"*.wq": "colwise", "*.wo": "rowwise", "*.attention": "heads"}, mesh["tp"])

    Args:
        plan: styles, or their names, by the name of a submodule. ``*`` stands for one part of a name; as the first
            part, for one or more. None: the plan that the module carries (``_tp_plan`` of transformers), without
            entries that match nothing.
        comm: the ranks. All ranks get rank 0's values.
        sequence_dim: enables sequence parallelism: linear layers take and return parts of the sequence along this
            dimension, which replaces the all_reduces. The plan says where the region begins and ends
            ("sequence_region"), and which other modules work on parts of the sequence ("sequence"). With a plan that
            names no region the caller splits the sequence, and all layers take and return parts; if all ranks then get
            the same input, this warns (with ``verify`` it raises).
        overlap: sends sequence parallel messages round the ring while parts of them are multiplied.
        verify: whether to search for the cause of a wrong loss. Every forward pass compares hashes of the ranks'
            inputs, every backward pass hashes of the gradients of unsharded parameters. Unless the caller splits the
            sequence, the first block of each kind compares its first output, and the gradients of its parameters and
            inputs for a random gradient of that output, with those of the unsharded block, in eval mode. A
            MismatchError names the difference, on all ranks.
    Modules without a sharding style stay unsharded, and every rank computes the same with them: seed the ranks'
    generators alike. A module that is unsharded but applied to a rank's own heads or features is "summed". Tied
    parameters stay tied. Parameters stay the same objects, with their attributes, so that an optimizer without state
    may be made before or after; `ringcomm.shard` comes after. A module on the meta device stays there; `ringcomm.shard`
    initialises it, one submodule at a time, in its unsharded form. If the module splits a layer's outputs at other
    places than the shards do, the layer's first forward pass raises InvalidArgumentError.
    Cost:    for a transformer layer and a micro-batch of s b h elements, with t ranks: 4 all_reduces of s b h, two in
             forward and two in backward, 8 (t-1)/t s b h elements on the wire of each rank; with ``sequence_dim`` 4
             all_gathers and 4 reduce_scatters, the same volume, and an all_reduce for each summed parameter: norms, and
             biases of layers sharded along inputs. With ``overlap`` every layer that is sharded along its outputs
             gathers for itself, in forward and once more in backward. Checkpointed modules send their forward messages
             twice.
    Returns: the module, whose layers have been replaced.
    Raises:  InvalidArgumentError: names that no module has, unknown styles, heads or features that do not divide.
             UnsupportedError: a layer that cannot be sharded. MismatchError: the ranks' modules, plans or options
             differ, or another rank raises. All errors come before the module is changed.
    """
    group = TensorParallelGroup.of(comm)
    try:
        targets = _make_targets(module, group, plan, sequence_dim, overlap, verify)
        asked = zlib.crc32(repr(_facts(module, targets, sequence_dim, overlap, verify)).encode())
    except RingcommError:
        _agree(comm, -1)
        raise
    _agree(comm, asked)
    layers = _layers(targets)
    divided = [t.module for t in targets if isinstance(t.style, Heads) or t.style is ModuleStyle.REPLICATE]
    warn_of_undivided_heads(module, layers, divided)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            comm.broadcast(_without_repetitions(tensor.detach()), 0)
    for target in targets:
        target.copy_values()
    _watch_outputs(module, targets, group)
    verifier = _make_verifier(module, targets, group, sequence_dim) if verify else None
    _keep_parameter_objects(targets)
    keep_unsplit(module, {id(target.module): target.layer for target in targets if target.layer is not None}, comm)
    owners = _meta_owners(targets)
    for target in targets:
        target.apply(module, group, sequence_dim or 0)
    for found, before in owners:
        _replace_owner(module, found, before, comm)
    if verifier is not None:
        verifier.start()
    if not any(target.style in (ModuleStyle.SEQUENCE_REGION, Vocab(scatter=True)) for target in targets):
        on_parts = {t.names[0]: t.module for t in targets if t.style is ModuleStyle.SEQUENCE}
        check_sequence_is_split(on_parts, group, verify)
    explain_first_errors(module, layers, group)
    return module


def _layers(targets: Sequence[_Target]) -> dict[str, nn.Module]:
    """Returns the replacements of modules, by name."""
    return {target.names[0]: target.layer for target in targets if target.layer is not None}


@dataclass
class _Target:
    """A module, or a parameter, that a plan names.

    Attributes:
        names: the names of the module (several if it is used in several places), or of the parameter.
        layer: the layer that replaces the module; None: the module stays.
        key: if the plan names a parameter, its name in the module.
    """

    names: list[str]
    module: nn.Module
    style: Style
    layer: nn.Module | None = None
    key: str = ""

    @property
    def new_params(self) -> dict[str, nn.Parameter | None]:
        """Parameters of the replacement."""
        return {} if self.layer is None else self.layer._parameters

    def replaced(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Returns the module's parameters that the replacement has a shard of: name, parameter and shard."""
        pairs = [(key, self.module._parameters.get(key), p) for key, p in self.new_params.items()]
        return [(key, old, p) for key, old, p in pairs if old is not None and p is not None and p is not old]

    def copy_values(self) -> None:
        """Copies the module's values, after all ranks have got rank 0's, into the replacement."""
        for key, p in self.new_params.items():
            part = part_of(p) if p is not None else None
            if p is not None and part is not None and part.dim is not None and not p.is_meta:
                with torch.no_grad():
                    copy_part(p, self.module._parameters[key], part)

    def apply(self, module: nn.Module, group: TensorParallelGroup, dim: int) -> None:
        """Applies the style to the module."""
        if self.layer is not None:
            self.layer.train(self.module.training)
        for name in self.names if self.layer is not None else ():
            _replace_submodule(module, name, self.layer)
        for each in _head_attributes(self, group):
            setattr(self.module, each, getattr(self.module, each) // group.world_size)
        if self.key:
            p = self.module._parameters[self.key]
            assert p is not None
            set_shard(self.module, self.key, p, _part_of_vector(p, group, self.names[0]))
            self.module._parameters[self.key] = replace_data(p, self.module._parameters[self.key])
        if self.style in (ModuleStyle.SEQUENCE, ModuleStyle.SUMMED):
            sum_gradients(self.module, group)
        elif isinstance(self.style, Latent):
            sum_last_outputs(self.module, group, _last_outputs(module, self, group.rank))
        elif self.style is ModuleStyle.GATHER_SEQUENCE:
            gather_before(self.module, group, dim)
        elif self.style is ModuleStyle.SEQUENCE_REGION:
            around = {each: module.get_submodule(each) for name in self.names for each in ("", *ancestors_of(name))}
            split_and_gather(self.module, around.values(), group, dim)


def _replace_submodule(module: nn.Module, name: str, new: nn.Module) -> None:
    setattr(_parent(module, name), name.rpartition(".")[2], new)


def _is_plan(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(pattern, str) for pattern in value)


@expects(
    "parallelize", plan=that("styles by the names of submodules", _is_plan), sequence_dim=DIM, overlap=FLAG, verify=FLAG
)  # checked here, so that the other ranks learn of the error
def _make_targets(
    module: nn.Module,
    group: TensorParallelGroup,
    plan: Mapping[str, str | Style] | None = None,
    sequence_dim: int | None = None,
    overlap: bool = False,
    verify: bool = False,
) -> list[_Target]:
    """Makes all checks and replacements, and leaves the module unchanged."""
    if overlap and sequence_dim is None:
        raise InvalidArgumentError(
            f"parallelize: rank {group.rank} got overlap=True without a sequence_dim, expected one, because only "
            "messages along the sequence can be divided; pass sequence_dim"
        )
    if any(part_of(p).staged for p in module.parameters()):
        raise InvalidArgumentError(
            f"parallelize: rank {group.rank} got a pipeline's part of a model, expected the whole model; call "
            "parallelize before you split the model"
        )
    if sharded_model_of(module) is not None:
        raise InvalidArgumentError(
            f"parallelize: rank {group.rank} got a module that ringcomm has wrapped, expected a plain one; call "
            "parallelize before ringcomm.shard, fully_shard or DistributedDataParallel"
        )
    chosen = resolve(module, _own_plan(module, group.rank) if plan is None else plan, group.rank)
    _check_sequence(module, chosen, sequence_dim, group.rank)
    _refuse_sums_of_shards(chosen, group.rank)
    _refuse_unstyled(module, chosen, group.rank)
    _refuse_shared_with_region(module, chosen, group.rank)
    targets: dict[int, _Target] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, style in chosen.items():
        owner, _, key = name.rpartition(".")
        key = key if name in parameters else ""
        found = module.get_submodule(owner if key else name)
        target = targets.setdefault(id(parameters[name] if key else found), _Target([], found, style, key=key))
        target.names.append(name)
        if target.style != style:
            raise InvalidArgumentError(
                f"parallelize: rank {group.rank} got {name_of(style)} for {name} and {name_of(target.style)} for "
                f"{target.names[0]}, the same module, expected one style for it; change the plan"
            )
    for target in targets.values():
        _refuse_own_arithmetic(module, target, group.rank)
        target.layer = _make_replacement(module, target, group, chosen, sequence_dim, overlap)
        _head_attributes(target, group)
    kept = _share_tied_shards(module, list(targets.values()), group.rank)
    if group.world_size > 1:
        _refuse_tensor_hooks(targets.values(), group.rank)
        about = [name for name, style in chosen.items() if not isinstance(style, Heads) and style not in OF_INPUTS]
        refuse_unsummed(module, _layers(kept), about, group.rank)
    return kept


def _facts(module: nn.Module, targets: list[_Target], *options: Any) -> list[Any]:
    """Returns the facts that must be equal on all ranks."""
    shapes = [(name, tuple(x.shape), str(x.dtype), x.is_meta) for name, x in _tensors(module)]
    return [shapes, [(target.names, target.style) for target in targets], *options]


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _without_repetitions(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor without repetitions: the first along each expanded dimension."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] > 1 else x
    return x


def _agree(comm: Communicator, asked: int) -> None:
    """Raises if the ranks ask for different things.

    Args:
        asked: a checksum of this rank's module, plan and options; negative: this rank raises an error of its own.
    """
    everyone = comm.all_gather_object(asked)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != asked), None)
    if asked >= 0 and other is not None:
        theirs = "refused its plan" if everyone[other] < 0 else "got another module, plan or options"
        raise MismatchError(
            f"parallelize: rank {comm.rank} got a valid plan, but rank {other} {theirs}, expected the same on every "
            "rank; look at that rank's error, and at the shapes of the parameters"
        )


# ---- names -------------------------------------------------------------------------------------------------------


def resolve(module: nn.Module, plan: Mapping[str, str | Style], rank: int) -> dict[str, Style]:
    """Returns the style of each module that the plan names."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)][1:]
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    chosen: dict[str, Style] = {}
    by: dict[str, str] = {}
    for pattern, given in plan.items():
        style = _style(pattern, given, rank)
        found = [name for name in names if matches(pattern, name)]
        if pattern == "" and (isinstance(style, Heads) or style is ModuleStyle.REPLICATE):
            found = [""]  # the module itself
        if not found and style == Colwise():
            found = [name for name in parameters if matches(pattern, name)]
        if not found:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got {shown(pattern)}, which no module matches, expected names such as "
                f"{', '.join(map(repr, names[:4]))}; look at module.named_modules()"
            )
        for name in found:
            if name in chosen:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}, which both {shown(by[name])} and {shown(pattern)} match, "
                    "expected one style for each module; make the patterns narrower"
                )
            chosen[name], by[name] = style, pattern
    return chosen


def _style(pattern: str, given: Any, rank: int) -> Style:
    """Returns the style that a plan gives to a pattern, which may be the style's name."""
    if isinstance(given, Style):
        return given
    if isinstance(given, str) and given in FOREIGN:
        raise UnsupportedError(
            f"parallelize: rank {rank} got the style {shown(given)} of transformers for {shown(pattern)}, which "
            f"is not supported, expected one of {', '.join(STYLES)}; leave it out of the plan, its modules stay whole"
        )
    if not isinstance(given, str) or given not in STYLES:
        raise InvalidArgumentError(
            f"parallelize: rank {rank} got the style {shown(given)} for {shown(pattern)}, expected one of "
            f"{', '.join(STYLES)}; pass one of these, or an object of ringcomm.tensor_parallel.styles"
        )
    return STYLES[given]


def _own_plan(module: nn.Module, rank: int) -> Mapping[str, str | Style]:
    """Returns the plan of a model of transformers, without entries that match nothing in this model."""
    plan = getattr(module, "_tp_plan", None)
    if not plan:
        raise InvalidArgumentError(
            f"parallelize: rank {rank} got no plan and a {type(module).__name__} without one, expected styles by the "
            "names of submodules; pass a plan"
        )
    modules = dict(module.named_modules(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    experts = [pattern for pattern, style in plan.items() if style == "moe_tp_experts"]
    found: dict[str, str | Style] = {}
    for pattern, style in plan.items():
        vectors = [p.dim() == 1 for name, p in parameters.items() if matches(pattern, name)]
        if style == "local_params" or pattern.rpartition(".")[0] in experts:  # belongs to sharded experts
            continue
        if any(matches(pattern, name) for name in modules) or (style == "colwise" and vectors and all(vectors)):
            found[pattern] = style
        elif vectors:
            raise UnsupportedError(
                f"parallelize: rank {rank} got a {type(module).__name__} whose own plan cuts {pattern!r}, a parameter, "
                "expected modules, and parameters of one dimension; pass a plan"
            )
    return found | _missing_styles(modules, found)


def _missing_styles(modules: Mapping[str, nn.Module], plan: Mapping[str, str | Style]) -> dict[str, str | Style]:
    """Returns styles that plans of transformers omit: for embeddings tied to a sharded layer, and for activations with
    parameters, which ranks apply to their own features."""
    layers = {name: style for pattern, style in plan.items() for name in modules if matches(pattern, name)}
    outputs = [modules[name]._parameters.get("weight") for name, style in layers.items() if style in GATHERED]
    more: dict[str, str | Style] = {}
    for name, each in modules.items():
        beside = [layers.get(f"{name.rpartition('.')[0]}.{key}") for key in modules[name.rpartition(".")[0]]._modules]
        if isinstance(each, nn.Embedding) and name not in layers and any(each.weight is weight for weight in outputs):
            more[name] = "vocab"
        trains = type(each).__module__ == ACTIVATIONS and any(True for _ in each.parameters())
        if trains and "colwise" in beside and name not in layers:
            more[name] = "summed"
    return more


def _check_sequence(module: nn.Module, chosen: Mapping[str, Style], sequence_dim: int | None, rank: int) -> None:
    regions = [name for name, style in chosen.items() if style is ModuleStyle.SEQUENCE_REGION]
    for name, style in chosen.items():
        if style not in (*ON_SEQUENCE, ModuleStyle.SEQUENCE_REGION, Vocab(scatter=True)):
            continue
        got = f"parallelize: rank {rank} got {name_of(style)} for {name}"
        if sequence_dim is None:
            raise InvalidArgumentError(
                f"{got} without a sequence_dim, expected one; pass sequence_dim=1 for tensors of (batch, sequence, "
                "features)"
            )
        inside = any(each in regions for each in ancestors_of(name))
        if style in ON_SEQUENCE and regions and name not in regions and not inside:
            raise InvalidArgumentError(
                f"{got} outside of {', '.join(regions)}, expected it in a sequence region, because elsewhere ranks "
                "have the whole sequence; make the pattern narrower"
            )
        if isinstance(style, Vocab) and regions:
            raise InvalidArgumentError(
                f"{got} with scatter=True and a sequence region, expected one of them: a region cuts the sequence "
                "itself; leave scatter out"
            )
        if style is ModuleStyle.SEQUENCE_REGION:
            _check_region(module.get_submodule(name), got, inside)


def _cut_inside(name: str, chosen: Mapping[str, Style]) -> str:
    """Returns the name of a layer inside a module that the plan cuts; empty if there is none."""
    inner = (each for each in chosen if not name or each.startswith(f"{name}."))
    return next((each for each in inner if isinstance(chosen[each], (Colwise, Rowwise, Vocab, Experts))), "")


def _refuse_sums_of_shards(chosen: Mapping[str, Style], rank: int) -> None:
    """Refuses to sum the gradients of a module in which layers are sharded: the ranks have different shards."""
    for name, style in chosen.items():
        inner = _cut_inside(name, chosen) if style in SUMS else ""
        if inner:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got {name_of(style)} for {name or 'the module'}, which contains {inner}, "
                "that is cut, expected a module without cut layers, because gradients of different parts would be "
                "added up; name the modules inside it that are not cut, and put its own parameters into such a module"
            )


def _refuse_unstyled(module: nn.Module, chosen: Mapping[str, Style], rank: int) -> None:
    """Refuses modules of a sequence region that have no style: parameters would be trained only on the rank's part of
    the sequence, and dropout would drop the same elements of every part. Inside "gather_sequence" every gradient is
    this rank's part of a sum, because the layers there do not add up the gradients of their input."""
    for name, found in module.named_modules(remove_duplicate=False):
        around = [*ancestors_of(name), name]
        region = next((each for each in around if chosen.get(each) is ModuleStyle.SEQUENCE_REGION), None)
        drops = isinstance(found, _DropoutNd)
        has = any(p is not None for p in found._parameters.values())
        if region is None or not (has or (drops and found.p > 0)):
            continue
        if any(chosen.get(each) is ModuleStyle.GATHER_SEQUENCE for each in around):
            _refuse_unsummed_in_gathered(name, found, chosen, rank)
        of_parameters = () if drops else SUMS
        fitting = (ModuleStyle.GATHER_SEQUENCE, ModuleStyle.REPLICATE, *of_parameters)
        own = chosen.get(name, ModuleStyle.SEQUENCE_REGION)
        named = own is not ModuleStyle.SEQUENCE_REGION and not isinstance(own, Heads)
        if not named and not any(chosen.get(each) in fitting for each in around):
            cut = _cut_inside(name, chosen)
            advice = (
                f"it contains {cut}, that is cut, so put its own parameters into a module, and add that as 'sequence'"
                if cut
                else "add it as 'sequence' if it works on parts of the sequence, else as 'replicate'"
            )
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got no style for {name}, which {'drops' if drops else 'has parameters'}, in "
                f"the sequence region {region}, expected one; {advice}"
            )


def _refuse_shared_with_region(module: nn.Module, chosen: Mapping[str, Style], rank: int) -> None:
    """Refuses "sequence" for a module that is also used outside of the sequence regions, where its gradients are not
    parts of a sum."""
    regions = [name for name, style in chosen.items() if style is ModuleStyle.SEQUENCE_REGION]
    names: dict[nn.Module, list[str]] = {}
    for name, found in module.named_modules(remove_duplicate=False):
        names.setdefault(found, []).append(name)
    for found, same in names.items() if regions else ():
        name = next((each for each in same if chosen.get(each) is ModuleStyle.SEQUENCE), None)
        outside = [each for each in same if not any(x in regions for x in (each, *ancestors_of(each)))]
        if name is not None and outside and any(True for _ in found.parameters()):
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got 'sequence' for {name}, which is also {outside[0]}, outside of "
                f"{', '.join(regions)}, expected a module of the region alone, because elsewhere its gradients are "
                "complete on each rank; use a module of its own there, or leave the region out"
            )


def _refuse_unsummed_in_gathered(name: str, found: nn.Module, chosen: Mapping[str, Style], rank: int) -> None:
    """Refuses a module inside "gather_sequence" that trains parameters which are neither sharded nor summed."""
    own = chosen.get(name)
    trained = [key for key, p in found._parameters.items() if p is not None and p.requires_grad]
    unnamed = [key for key in trained if f"{name}.{key}" not in chosen]
    unsharded = own in (None, ModuleStyle.REPLICATE, ModuleStyle.GATHER_SEQUENCE) or isinstance(own, (Heads, Latent))
    around = [chosen.get(each) for each in ancestors_of(name)]
    if not unnamed or not unsharded or any(style in SUMS or isinstance(style, Experts) for style in around):
        return
    advice = f"pass 'summed' for {name}"
    if own is ModuleStyle.GATHER_SEQUENCE:
        advice = "pass 'colwise' for it if it has a value for each head, else put it into a module that is 'summed'"
    raise InvalidArgumentError(
        f"parallelize: rank {rank} got the parameter {name}.{unnamed[0]} inside a module that is 'gather_sequence', "
        f"where each rank computes a part of its gradient, expected a style that shards or sums it; {advice}"
    )


def _check_region(found: nn.Module, got: str, inside: bool) -> None:
    """Raises for a module that cannot be a sequence region.

    Args:
        got: the beginning of the error.
        inside: whether the module lies in another region.
    """
    lists = isinstance(found, (nn.Sequential, nn.ModuleList))
    if inside:
        raise InvalidArgumentError(
            f"{got} inside another region, expected regions that do not overlap; leave one out of the plan"
        )
    if (lists and len(found) == 0) or isinstance(found, nn.ModuleDict):
        raise InvalidArgumentError(
            f"{got}, {'an empty' if lists else 'a'} {type(found).__name__}, expected a module that is called, or a "
            "list of such modules in the order of their calls; name another module"
        )
    if lists and len({*found}) < len(found):
        raise InvalidArgumentError(
            f"{got}, a {type(found).__name__} that has a module twice, expected each module once, because the first "
            "one splits the sequence and the last one gathers it; name the module around it"
        )


# ---- layers ------------------------------------------------------------------------------------------------------


def _make_replacement(
    module: nn.Module,
    target: _Target,
    group: TensorParallelGroup,
    chosen: Mapping[str, Style],
    sequence_dim: int | None,
    overlap: bool,
) -> nn.Module | None:
    """Returns the replacement of a module; None: it stays."""
    name, found, style = target.names[0], target.module, target.style
    if target.key:
        _part_of_vector(found._parameters[target.key], group, name)
        return None
    if isinstance(style, Latent):
        _last_outputs(module, target, group.rank)
        return None
    above = ancestors_of(name)
    inside = sequence_dim is not None and _in_region(above, chosen)
    if style is ModuleStyle.SUMMED and not inside:
        _refuse_summed_projection(module, target, chosen, group.rank)
    entered = inside and any(chosen.get(each) is ModuleStyle.GATHER_SEQUENCE for each in above)
    multiple = _head_width(_parent(module, name))
    if isinstance(style, Colwise):
        parts, outputs = style.parts, linear_shape(found, group, name)[2]
        if isinstance(parts, int):
            parts = [outputs // max(parts, 1)] * min(parts, outputs + 1)
        alone = inside and not entered
        return ColumnParallelLinear.of(
            found, group, name, gather_output=style.gather_output, parts=parts, pad=style.pad, multiple=multiple,
            sequence_dim=sequence_dim if alone else None, entered=entered, overlap=overlap and alone,
        )  # fmt: skip
    if isinstance(style, Rowwise):
        return RowParallelLinear.of(
            found, group, name, input_is_parallel=style.input_is_parallel, multiple=multiple,
            sequence_dim=sequence_dim if inside else None, overlap=overlap and inside,
        )  # fmt: skip
    if isinstance(style, Vocab):
        return VocabParallelEmbedding.of(found, group, name, sequence_dim=sequence_dim if style.scatter else None)
    if isinstance(style, Experts):
        if sequence_dim is not None:
            raise UnsupportedError(
                f"parallelize: rank {group.rank} got {name} as experts with a sequence_dim, expected one of them: "
                "experts take whole sequences; leave sequence_dim out"
            )
        return shard_experts(found, group, name, style)
    if isinstance(style, Dropout) or (style is ModuleStyle.SEQUENCE and isinstance(found, _DropoutNd)):
        dim = style.dim if isinstance(style, Dropout) else sequence_dim
        assert dim is not None
        refuse_changed(found, nn.Dropout, group, name)
        return ShardedDropout(float(found.p), group.comm, dim)
    return None


def _part_of_vector(p: Any, group: TensorParallelGroup, name: str) -> ShardSpec:
    """Returns this rank's shard of a parameter that has one value for each head."""
    if p.dim() != 1 or (p.is_meta and "." not in name):
        where = " on meta and of the module itself" if p.is_meta else ""
        raise UnsupportedError(
            f"parallelize: rank {group.rank} got the parameter {name} of shape {tuple(p.shape)}{where}, expected one "
            "dimension, and on meta a parameter of a submodule; leave it and the layers beside it out of the plan"
        )
    return shard_along([p.shape[0]], group, "parallelize", f"values of {name}")


def _meta_owners(targets: Sequence[_Target]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns the modules on meta whose own parameters the plan shards, and their attributes before that."""
    keys: dict[nn.Module, list[str]] = {}
    for target in targets:
        if target.key and target.module._parameters[target.key].is_meta:
            keys.setdefault(target.module, []).append(target.key)
    owners = [(found, attributes_of(found)) for found in keys]
    for found, before in owners:
        for key in keys[found]:  # the parameter object itself becomes this rank's shard
            p = found._parameters[key]
            before["_parameters"][key] = nn.Parameter(p.detach(), p.requires_grad)
    return owners


def _replace_owner(module: nn.Module, found: nn.Module, before: dict[str, Any], comm: Communicator) -> None:
    """Replaces a module whose parameter is sharded by another of its class. The original gets its unsharded attributes
    back, so that it can be initialised."""
    made = copy.copy(found)
    made.__dict__ = attributes_of(found)
    for name, each in [*module.named_modules(remove_duplicate=False)]:
        if each is found:
            _replace_submodule(module, name, made)
    found.__dict__ = before
    keep_unsplit(found, {id(found): made}, comm)


def _last_outputs(module: nn.Module, target: _Target, rank: int) -> int:
    """Returns how many outputs of a layer of latent attention go to a rank's own heads."""
    assert isinstance(target.style, Latent)
    name = target.names[0]
    owner = _parent(module, name)
    for each in (
        target.style.last,
        *(getattr(x, "qk_rope_head_dim", 0) for x in (owner, getattr(owner, "config", None))),
    ):
        if type(each) is int and each > 0 and isinstance(target.module, nn.Linear):
            return each
    raise InvalidArgumentError(
        f"parallelize: rank {rank} got {name} as latent, a {type(target.module).__name__} without a known "
        "qk_rope_head_dim, expected a linear layer, and the number of its outputs that go to a rank's own heads; pass "
        "Latent(last=...)"
    )


def _head_width(attention: nn.Module) -> int:
    """Returns the width of an attention module's heads; 1: unknown."""
    found = [getattr(attention, each, None) for each in ("head_dim", "head_size")]
    return next((each for each in found if type(each) is int and each > 0), 1)


def _watch_outputs(module: nn.Module, targets: list[_Target], group: TensorParallelGroup) -> None:
    """Makes layers that are sharded along their outputs check how the module uses these."""
    divided = {
        name: {getattr(target.module, each) // group.world_size for each in _head_attributes(target, group)}
        for target in targets
        for name in target.names
    }
    for target in targets:
        name, new = target.names[0], target.layer
        if isinstance(new, ColumnParallelLinear) and group.world_size > 1:
            heads = frozenset().union(*(divided.get(each, ()) for each in ancestors_of(name)))
            width = _head_width(_parent(module, name))
            new.watched = OutputSharding(name, group.rank, tuple(new.local_extents), new.out_features, heads, width)


def _make_verifier(
    module: nn.Module, targets: list[_Target], group: TensorParallelGroup, sequence_dim: int | None
) -> Verifier:
    sharded = [name for target in targets for name in target.names]
    summed = [target.module for target in targets if target.style in (ModuleStyle.SEQUENCE, ModuleStyle.SUMMED)]
    regions = [target.module for target in targets if target.style is ModuleStyle.SEQUENCE_REGION]
    return Verifier(module, group, sharded, summed, sequence_dim, regions)


def _parent(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _in_region(above: list[str], chosen: Mapping[str, Style]) -> bool:
    """Returns whether a module lies in a sequence region; True for all modules if the plan names no region."""
    regions = [name for name, style in chosen.items() if style is ModuleStyle.SEQUENCE_REGION]
    return not regions or any(name in regions for name in above)


def _refuse_own_arithmetic(module: nn.Module, target: _Target, rank: int) -> None:
    """Refuses layers whose parent module multiplies with their weights without calling them."""
    if not isinstance(target.style, (Colwise, Rowwise, Heads)) or target.key:
        return
    for name in target.names:
        for owner in (target.module, _parent(module, name)):
            if isinstance(owner, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
                raise UnsupportedError(
                    f"parallelize: rank {rank} got {name}, of torch's {type(owner).__name__}, which multiplies with "
                    "the weights of its layers without calling them, expected layers that are called; leave it out of "
                    "the plan, or write the module with nn.Linear"
                )


def _refuse_summed_projection(module: nn.Module, target: _Target, chosen: Mapping[str, Style], rank: int) -> None:
    """Refuses "summed" for a linear layer that reads the input of a layer sharded along its outputs, such as the only
    key of multi-query attention: the gradient that it sends to this input would still be a part of a sum."""
    name, found = target.names[0], target.module
    for key, beside in _parent(module, name).named_children():
        full = name.removesuffix(name.rpartition(".")[2]) + key
        columns = isinstance(chosen.get(full), Colwise) and isinstance(beside, nn.Linear)
        if columns and isinstance(found, nn.Linear) and beside.in_features == found.in_features:
            raise InvalidArgumentError(
                f"parallelize: rank {rank} got 'summed' for {name}, which has as many inputs as {full}, that is cut "
                "along its outputs, expected a layer that reads this rank's own heads or features; pass "
                f"{latent_for(name, found.out_features)}, else leave it out"
            )


def _share_tied_shards(module: nn.Module, targets: list[_Target], rank: int) -> list[_Target]:
    """Makes layers that shared a parameter share its shard. Returns the targets without parameters that a layer
    shards."""
    new: dict[int, tuple[str, nn.Parameter]] = {}
    for target in targets:
        for key, old, p in target.replaced():
            name = f"{target.names[0]}.{key}"
            first, shared = new.setdefault(id(old), (name, p))
            if part_of(shared) != part_of(p) or shared.shape != p.shape:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}, which is tied to {first} but cut differently, expected the "
                    "same cut; pass pad=True if the other one is padded, or untie them"
                )
            target.new_params[key] = shared
    replaced = {name for target in targets if target.layer is not None for name in target.names}
    named = {name for target in targets if target.key for name in target.names}
    for name, owner in module.named_modules(remove_duplicate=False):
        for key, p in owner._parameters.items():
            full = f"{name}.{key}" if name else key
            if p is not None and id(p) in new and name not in replaced and full not in named:
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got {name}.{key} unsharded, tied to {new[id(p)][0]}, which is cut, "
                    "expected both in the plan; add it, or untie them"
                )
    return [target for target in targets if not target.key or id(target.module._parameters[target.key]) not in new]


def _refuse_tensor_hooks(targets: Iterable[_Target], rank: int) -> None:
    """Refuses hooks of parameters that are to be sharded: they would see this rank's part of a gradient."""
    for target in targets:
        for key in [target.key] if target.key else [key for key, *_ in target.replaced()]:
            p = target.module._parameters[key]
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                name = target.names[0] if target.key else f"{target.names[0]}.{key}"
                raise UnsupportedError(
                    f"parallelize: rank {rank} got {name}, a parameter with hooks, which would see only a part of its "
                    "gradient, expected one without hooks; register them afterwards, for the rank's part, or leave its "
                    "layer out of the plan"
                )


def _keep_parameter_objects(targets: Sequence[_Target]) -> None:
    """Keeps the parameter objects and gives them this rank's shards, since an optimizer that was made before refers to
    them, and users may have set attributes on them. The replaced layers get new parameters."""
    unsharded: dict[int, nn.Parameter] = {}
    for target in targets:
        for key, old, p in target.replaced():
            if id(old) not in unsharded:
                unsharded[id(old)] = nn.Parameter(old.detach(), old.requires_grad)
                replace_data(old, p)
            target.module._parameters[key], target.new_params[key] = unsharded[id(old)], old


def _head_attributes(target: _Target, group: TensorParallelGroup) -> tuple[str, ...]:
    """Returns the attributes with numbers of heads to divide; raises where one cannot be divided."""
    if not isinstance(target.style, Heads):
        return ()
    found, name = target.module, target.names[0]
    names = target.style.attributes or tuple(each for each in HEADS if type(getattr(found, each, None)) is int)
    if not names:
        raise InvalidArgumentError(
            f"parallelize: rank {group.rank} got {name or 'the module'} as heads, of class {type(found).__name__}, "
            "which has no attribute of a known name with a number of heads, expected one; pass "
            "ringcomm.tensor_parallel.Heads(('name', ...)) with its name"
        )
    for each in names:
        value = getattr(found, each, None)
        if type(value) is not int or value % group.world_size:
            raise InvalidArgumentError(
                f"parallelize: rank {group.rank} got {name}.{shown(each)[1:-1]} = {shown(value)}, expected a multiple "
                f"of the {group.world_size} ranks; use a number of ranks that divides it"
            )
    return names
