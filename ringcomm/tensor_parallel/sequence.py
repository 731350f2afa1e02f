"""Changes that `ringcomm.parallelize` makes to modules that it does not replace: sums of gradients, and the borders of
a sequence region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringcomm.errors import UnsupportedError
from ringcomm.modules.shard_spec import part_of
from ringcomm.tensor_parallel.group import TensorParallelGroup, f, g, gather, scatter

Change = Callable[[torch.Tensor], torch.Tensor]


def sum_gradients(module: nn.Module, group: TensorParallelGroup) -> None:
    """Adds up the gradients of a module's parameters over the ranks, because each rank applies the module to its own
    part of a tensor. Each call of the module looks for new parameters, as load_state_dict(assign=True) and to_empty()
    make them."""
    sum_gradients_of(module, group)
    module.register_forward_pre_hook(lambda module, _: sum_gradients_of(module, group))


def sum_gradients_of(module: nn.Module, group: TensorParallelGroup) -> None:
    """Registers the sum as a hook of each parameter that has memory, once; also of frozen parameters, which may be
    trained later."""
    for p in module.parameters():
        if not p.is_meta and group.all_reduce not in (p._backward_hooks or {}).values():
            _sum_gradient(p, group)


def _sum_gradient(p: nn.Parameter, group: TensorParallelGroup) -> None:
    frozen = not p.requires_grad
    p.requires_grad_(True)
    others = [*(p._backward_hooks or {})]
    p.register_hook(group.all_reduce)
    for key in others:  # moves the other hooks to the end, so that they see the sum
        p._backward_hooks[key] = p._backward_hooks.pop(key)
    p.requires_grad_(not frozen)


def sum_last_outputs(layer: nn.Module, group: TensorParallelGroup, count: int) -> None:
    """Adds up the gradients of the layer's last outputs, which ranks use on their own heads. It replaces ``forward``
    instead of adding a hook, because later pipeline stages also run the hooks of this module."""
    if group.world_size > 1:
        layer.forward = partial(_with_last_summed, layer.forward, group, count)


def _with_last_summed(
    forward: Callable[..., torch.Tensor], group: TensorParallelGroup, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    y = forward(*args, **kwargs)
    return torch.cat([y[..., :-count], f(y[..., -count:], group.comm)], -1)


def gather_before(module: nn.Module, group: TensorParallelGroup, dim: int) -> None:
    """Gathers the complete sequence before each call of the module."""
    _before(module, "gather_sequence", group, lambda x: g(x, group.comm, dim))


def split_and_gather(module: nn.Module, around: Iterable[nn.Module], group: TensorParallelGroup, dim: int) -> None:
    """Makes the module, or a list of modules from first to last, work on this rank's part of the sequence.

    Args:
        around: the modules that contain it; when one of them returns, a pass through the list must be over.
    """
    inside = modules_of_region(module)
    inside[0].register_forward_pre_hook(partial(_refuse_second_input, group), with_kwargs=True)
    if len(inside) > 1 and group.world_size > 1:
        region = _Region(group)
        inside[0].register_forward_pre_hook(region.enter)
        for i, each in enumerate(inside[1:], 1):
            each.register_forward_pre_hook(partial(region.check_inside, i, i == len(inside) - 1))
        inside[-1].register_forward_hook(region.leave)
        for each in around:
            each.register_forward_hook(region.check_left)
    _before(inside[0], "sequence_region", group, lambda x: scatter(x, group.comm, dim))
    inside[-1].register_forward_hook(lambda _, args, y: _first(y, group, lambda x: gather(x, group.comm, dim)))


class _Region:
    """Where a forward pass is in a sequence region that is a list of modules: refuses passes that do not call the first
    module first and the last one last. Other modules may be skipped.

    Attributes:
        entered, left: whether the pass has called the first module, and the last one.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group, self.entered, self.left = group, False, False

    def enter(self, module: nn.Module, args: Any) -> None:
        self.entered, self.left = True, False

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.left = True

    def check_inside(self, index: int, is_last: bool, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or (self.entered and (is_last or not self.left)):
            return
        if torch._C._current_graph_task_id() == -1 and not _is_staged(module):  # else a checkpoint computes it again
            when = "after the last one" if self.left else "before the first one"
            self._refuse(f"a call of module {index} of the region, a {type(module).__name__}, {when}")

    def check_left(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        is_inside = self.entered and not self.left
        self.entered = self.left = False
        if is_inside and not _is_staged(module):
            self._refuse(f"the end of {type(module).__name__} without a call of the region's last module")

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"sequence_region: rank {self.group.rank} got {what}, expected every pass to call the first module first "
            "and the last one last, because these split and gather the sequence; leave the region out of the plan, or "
            "name a region whose modules every pass calls in their order"
        )


def _is_staged(module: nn.Module) -> bool:
    """Returns whether the module belongs to a pipeline, whose stages may have parts of a region."""
    return any(part_of(p).staged for p in module.parameters())


def _refuse_second_input(
    group: TensorParallelGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses trained tensors that enter a region beside the sequence, such as the encoder's output: every rank has
    them in full, so its gradient of them would be a part of a sum, or twice as often in it."""
    tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    first = first_tensor(args, kwargs)
    others = [x for x in tensors if x is not first] + [x for x in tensors if x is first][1:]
    trained = next((x for x in others if x.requires_grad), None)
    if trained is not None and torch.is_grad_enabled() and group.world_size > 1:
        raise UnsupportedError(
            f"sequence_region: rank {group.rank} got an input of shape {tuple(trained.shape)} that requires a gradient "
            f"beside the sequence, in {type(module).__name__}, expected only the sequence to require one, because "
            "nothing splits the other input or adds up its gradient; leave the region out of the plan, or detach the "
            "other input"
        )


def modules_of_region(module: nn.Module) -> list[nn.Module]:
    """Returns the modules of a region, of which the first splits the sequence and the last gathers it."""
    return list(module) if isinstance(module, (nn.Sequential, nn.ModuleList)) else [module]


def _before(module: nn.Module, style: str, group: TensorParallelGroup, change: Change) -> None:
    """Applies ``change`` to a module's first tensor argument, positional or named."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = first_tensor(args, kwargs)
        if first is None:
            raise UnsupportedError(
                f"{style}: rank {group.rank} got no tensor as input of {type(module).__name__}, expected one that has "
                "the sequence; name another module in the plan"
            )
        changed = change(first)
        at = next((i for i, x in enumerate(args) if x is first), None)
        if at is None:
            key = next(key for key, x in kwargs.items() if x is first)
            return args, {**kwargs, key: changed}
        return (*args[:at], changed, *args[at + 1 :]), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the argument that has the sequence: the first tensor, positional or named."""
    return next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), None)


def _first(output: Any, group: TensorParallelGroup, change: Change) -> Any:
    """Returns an output with ``change`` applied to its first tensor."""
    if torch.is_tensor(output):
        return change(output)
    if isinstance(output, Mapping):
        key = next((key for key, x in output.items() if torch.is_tensor(x)), None)
        if key is not None:
            return type(output)({**output, key: change(output[key])})  # type: ignore[call-arg]
    elif isinstance(output, (tuple, list)):
        i = next((i for i, x in enumerate(output) if torch.is_tensor(x)), None)
        if i is not None:
            values = [*output[:i], change(output[i]), *output[i + 1 :]]
            return output._make(values) if hasattr(output, "_make") else type(output)(values)
    raise UnsupportedError(
        f"sequence_region: rank {group.rank} got an output of type {type(output).__name__}, expected a tensor, or a "
        "tuple, list or dict with one; name another module in the plan"
    )
