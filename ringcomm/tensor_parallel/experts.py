"""Shards mixtures of experts that keep the weights of all experts in one parameter, as transformers does: every rank
has a part of each expert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ringcomm.errors import UnsupportedError
from ringcomm.modules.notes import attributes_of
from ringcomm.modules.shard_spec import renew_parts
from ringcomm.tensor_parallel.group import TensorParallelGroup, f, f_bar
from ringcomm.tensor_parallel.layers import refuse_hooks, set_shard, shard_along
from ringcomm.tensor_parallel.styles import Experts

BIAS = "_bias"
"""The suffix that transformers appends to the name of an expert's weight to name its bias."""


def shard_experts(found: nn.Module, group: TensorParallelGroup, name: str, style: Experts) -> nn.Module:
    """Returns the module's replacement, of the same class, with this rank's part of the features of each expert. Every
    rank uses the complete input, and the ranks' outputs are added."""
    refuse_hooks(found, group, name)
    if "forward" in vars(found):  # it is bound to the unsharded module
        raise UnsupportedError(
            f"parallelize: rank {group.rank} got {name}, a {type(found).__name__} whose forward was replaced on the "
            "object, expected its class's forward; replace forward afterwards, or leave the module out of the plan"
        )
    inner, parts, features, transposed = _layout_of(found, group, name, style)
    p = dict(found.named_parameters())
    made = copy.copy(found)
    made.__dict__ = attributes_of(found)
    concatenated = getattr(found, "is_concatenated", True)  # else the fused outputs are interleaved
    extents = [features] * parts if concatenated else [features * parts]
    part = shard_along(extents, group, "parallelize", f"outputs of {name}.{inner}")
    outer = shard_along([features], group, "parallelize", f"inputs of {name}.{style.outer}")
    set_shard(made, inner, p[inner], part, 2 if transposed else 1)
    set_shard(made, style.outer, p[style.outer], outer, 1 if transposed else 2)
    if inner + BIAS in p:
        set_shard(made, inner + BIAS, p[inner + BIAS], part, 1)
    if group.world_size > 1:  # replaces forward instead of adding hooks, which a later pipeline stage would run, too
        made.forward = partial(_forward, group, made, made.forward, style.outer + BIAS)
    return made


def _forward(
    group: TensorParallelGroup,
    module: nn.Module,
    forward: Callable[..., torch.Tensor],
    bias: str,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Runs the class's forward between `f` and `f_bar`. Every rank adds the bias of the outputs, which is therefore
    divided by the number of ranks."""
    renew_parts([module])
    args, kwargs = tree_map(
        lambda x: f(x, group.comm) if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs)
    )
    full = module._parameters.get(bias)
    if full is None:
        return f_bar(forward(*args, **kwargs), group.comm)
    share = full.detach() / group.world_size + (full - full.detach())  # with the gradient of the undivided bias
    vars(module)[bias] = share  # attribute lookup finds it before the parameter
    try:
        return f_bar(forward(*args, **kwargs), group.comm)
    finally:
        del vars(module)[bias]


def _layout_of(found: nn.Module, group: TensorParallelGroup, name: str, style: Experts) -> tuple[str, int, int, bool]:
    """Returns the layout of a module's experts: the name of the parameter that is sharded along its outputs, how many
    outputs it fuses, the features of one expert, and whether weights have the shape (experts, inputs, outputs).

    Raises: UnsupportedError: other parameters, or shapes, than those of the style.
    """
    p = dict(found.named_parameters())
    inner, parts = style.inner, style.parts
    if style == Experts() and inner not in p and "up_proj" in p:  # experts without a gate
        inner, parts = "up_proj", 1
    known = {inner, style.outer} <= p.keys() <= {inner, style.outer, inner + BIAS, style.outer + BIAS}
    known = known and p[inner].dim() == p[style.outer].dim() == 3 and not getattr(found, "has_post_expert_norm", False)
    if known:
        (count, *sides), (_, *others) = p[inner].shape, p[style.outer].shape
        transposed = getattr(found, "is_transposed", sides[0] == others[1] != others[0])
        outputs, features = (sides[1], others[0]) if transposed else (sides[0], others[1])
        biases = {inner + BIAS: (count, outputs), style.outer + BIAS: (count, others[1] if transposed else others[0])}
        known = p[style.outer].shape[0] == count and outputs == parts * features
        known = known and all(tuple(p[key].shape) == shape for key, shape in biases.items() if key in p)
        if known:
            return inner, parts, features, transposed
    shapes = ", ".join(f"{key} of {tuple(each.shape)}" for key, each in p.items())
    norm = " and has_post_expert_norm=True" if getattr(found, "has_post_expert_norm", False) else ""
    raise UnsupportedError(
        f"parallelize: rank {group.rank} got {name}, a {type(found).__name__} with {shapes or 'no parameters'}{norm}, "
        f"expected {inner} of (experts, {parts} x features, inputs) and {style.outer} of (experts, outputs, features), "
        f"or both with the last two dimensions transposed, and their biases; leave it out of the plan, or pass "
        "tensor_parallel.Experts with the names of its parameters"
    )
