"""Mixtures of experts whose weights lie in one parameter for all experts, as transformers keeps them: every rank has a
part of each expert."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ringcomm.errors import UnsupportedError
from ringcomm.parallel.part import renew_parts
from ringcomm.tensor.layers import cut, own_part, refuse_hooks
from ringcomm.tensor.regions import Region, f, f_bar
from ringcomm.tensor.styles import Experts

OTHER_FORMS = {"is_transposed": True, "has_bias": True, "is_concatenated": False, "has_post_expert_norm": True}
"""What transformers says of experts that cannot be cut like this."""


def cut_experts(found: nn.Module, region: Region, name: str, style: Experts) -> nn.Module:
    """Takes the module's place: another of its class, with this rank's part of the features within each expert. What
    goes in is used whole by all ranks, and what the ranks compute is added."""
    refuse_hooks(found, region, name)
    p = _weights(found, region, name, style)
    made = copy.copy(found)
    made.__dict__ = {key: copy.copy(x) if isinstance(x, dict) else x for key, x in vars(found).items()}
    features = [p[style.outer].shape[2]]
    outputs, inputs = f"parallelize: outputs of {name}.{style.inner}", f"parallelize: inputs of {name}.{style.outer}"
    own_part(made, style.inner, p[style.inner], cut(features * style.parts, region, outputs), 1)
    own_part(made, style.outer, p[style.outer], cut(features, region, inputs), 2)
    if region.world_size > 1:
        made.register_forward_pre_hook(partial(_enter, region), with_kwargs=True)
        made.register_forward_hook(lambda module, args, y: f_bar(y, region.comm))
    return made


def _enter(region: Region, module: nn.Module, args: Any, kwargs: Any) -> Any:
    renew_parts([module])
    return tree_map(lambda x: f(x, region.comm) if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))


def _weights(found: nn.Module, region: Region, name: str, style: Experts) -> dict[str, nn.Parameter]:
    """The parameters of a module of experts.

    Raises: UnsupportedError: others than those of the style.
    """
    p = dict(found.named_parameters())
    said = next((each for each, odd in OTHER_FORMS.items() if getattr(found, each, not odd) is odd), None)
    known = said is None and p.keys() == {style.inner, style.outer} and all(each.dim() == 3 for each in p.values())
    if known:
        experts, outputs, _ = p[style.inner].shape
        known = p[style.outer].shape[::2] == (experts, outputs // style.parts) and outputs % style.parts == 0
    if not known:
        shapes = ", ".join(f"{key} of {tuple(each.shape)}" for key, each in p.items())
        raise UnsupportedError(
            f"parallelize: rank {region.rank} got {name}, a {type(found).__name__} with {shapes or 'no parameters'}"
            f"{f' and {said}={getattr(found, said)}' if said else ''}, expected {style.inner} of (experts, "
            f"{style.parts} x features, inputs) and {style.outer} of (experts, outputs, features) alone; leave it out "
            "of the plan, or pass tensor.styles.Experts with the names of its parameters"
        )
    return p
