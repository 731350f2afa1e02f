"""Computes gradients of weights later than those of inputs, so that a zero bubble schedule can fill its gaps with them
(Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from ringcomm.pipeline_parallel.shape_only import ShapeOnlyTensor, any_shape_only

DeferredGrad = tuple[torch.Tensor, Callable[[], torch.Tensor]]
"""A parameter, and a function that computes its gradient."""


def run_weight_grads(deferred: Sequence[DeferredGrad]) -> None:
    """Computes deferred gradients and adds them to those of the parameters, through autograd and its hooks."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for p, gradient in deferred:
        before = found.get(id(p))
        found[id(p)] = (p, gradient() if before is None else before[1] + gradient())
    if found:
        torch.autograd.backward([p for p, _ in found.values()], [grad for _, grad in found.values()])


def backward(
    ends: Sequence[Any], gradients: Sequence[torch.Tensor | None], deferring: DeferWeightGrads | None = None
) -> None:
    """Runs ``torch.autograd.backward(ends, gradients)``, and keeps the mode ``deferring`` on while the graph runs.
    Torch's own function would leave the mode before that."""
    if deferring is None:
        torch.autograd.backward(ends, gradients)
        return
    found = tuple(torch.ones_like(x) if g is None else g for x, g in zip(ends, gradients, strict=True))
    with deferring:
        _engine_run_backward(tuple(ends), found, False, False, (), allow_unreachable=True, accumulate_grad=True)


class DeferWeightGrads(TorchFunctionMode):
    """While it is on, linear layers put the computation of their weights' gradients into ``deferred``. The gradients
    have the bits that autograd would compute.

    This applies to calls of torch.nn.functional.linear, and of torch.addmm as transformers' Conv1D makes them, on
    parameters themselves. Everything else gets its gradients at once: calls whose arguments autocast converts; weights
    that another torch function uses as well, such as an embedding that is also the output layer, since autograd adds up
    their gradients first; and layers whose parameters have hooks. Enter it for a forward pass, and for its backward
    pass too, in which checkpoints run their forward passes.

    Args:
        multi_use: ids of parameters for which autograd adds up several gradients; their layers stay torch's own.
        kept: ids of parameters that get their gradients at once; other functions' parameters are added. Which tensors a
            checkpoint saves of a layer does not depend on it.
    """

    def __init__(self, deferred: list[DeferredGrad], multi_use: frozenset[int], kept: set[int]) -> None:
        super().__init__()
        self.deferred, self.multi_use, self.kept = deferred, multi_use, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._defers(*args, **kwargs):
            return _Linear.apply(*_linear(*args, **kwargs), self, False)
        if func is torch.addmm and not kwargs and len(args) == 3 and self._defers(args[1], args[2], args[0]):
            return _Linear.apply(args[1], args[2], args[0], self, True)
        result = func(*args, **kwargs)
        if func is torch.Tensor.__setitem__ or any(True for _ in _trained([result])):
            self.kept.update(id(x) for x in _trained([args, [*kwargs.values()]]) if x.is_leaf)
        return result

    def _defers(self, input: Any, weight: Any, bias: Any = None) -> bool:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return False
        own = [p for p in (weight, bias) if p is not None]
        if any_shape_only(own):
            return False
        if any(_has_hooks(p) for p in own):  # autograd would call them here, without a gradient
            return False
        return all(p.is_leaf and id(p) not in self.multi_use for p in own) and weight.requires_grad


def _has_hooks(p: torch.Tensor) -> bool:
    """Returns whether a parameter has hooks on its gradient, such as masks."""
    return any(getattr(p, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


def _trained(nest: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors of a nest that want gradients."""
    for x in nest:
        if isinstance(x, (list, tuple)):
            yield from _trained(x)
        elif torch.is_tensor(x) and not isinstance(x, ShapeOnlyTensor) and x.requires_grad:
            yield x


class _Linear(torch.autograd.Function):
    """A linear layer; ``transposed``: its weight has the shape (in, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        deferring: DeferWeightGrads,
        transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own = weight, bias  # a checkpoint returns other objects from saved_tensors
        ctx.deferring, ctx.transposed = deferring, transposed
        if transposed:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        transposed = ctx.transposed

        def of_weight() -> torch.Tensor:
            inputs = x.detach().reshape(-1, x.shape[-1])
            return inputs.t().mm(rows) if transposed else rows.t().mm(inputs)

        def of_bias() -> torch.Tensor:
            return rows.sum(0)

        now: list[torch.Tensor | None] = []
        for p, gradient in zip(ctx.own, (of_weight, of_bias), strict=True):
            wanted = p is not None and p.requires_grad
            others = wanted and id(p) in ctx.deferring.kept  # functions used it later in this forward pass
            now.append(gradient() if others else None)
            if wanted and not others:
                ctx.deferring.deferred.append((p, gradient))
        dx = _of_input(rows, values.t() if transposed else values, x).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, *now, None, None


def _of_input(rows: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Computes the input's gradient as autograd does, whose kernel depends on whether the input is column-major."""
    inputs = x.reshape(-1, x.shape[-1])
    column_major = inputs.stride() == (1, inputs.shape[0])
    return weight.t().mm(rows.t()).t() if column_major else rows.mm(weight)
