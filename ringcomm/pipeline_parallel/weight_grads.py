"""Computes gradients of weights later than those of inputs, so that a zero bubble schedule can fill its gaps with them
(Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
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
    Torch's own function would leave the mode before that. Layers defer only if the ends are results of `as_end`."""
    if deferring is None:
        torch.autograd.backward(ends, gradients)
        return
    found = tuple(torch.ones_like(x) if g is None else g for x, g in zip(ends, gradients, strict=True))
    with deferring:
        _engine_run_backward(tuple(ends), found, False, False, (), allow_unreachable=True, accumulate_grad=True)


class DeferWeightGrads(TorchFunctionMode):
    """While it is on, linear layers put the computation of their weights' gradients into ``deferred``. The gradients
    have the bits that autograd would compute.

    This applies to calls of torch.nn.functional.linear, and of torch.addmm as transformers' Conv1D makes them, with the
    parameters themselves as arguments. All other parameters get their gradients at once: in calls whose arguments
    autocast converts; inside torch.func and forward-mode differentiation; weights that are not matrices, and biases
    that are not one number for each output; weights that another torch function also uses, such as an embedding that is
    also the output layer, because autograd adds up their gradients first; and layers whose parameters have hooks. Enter
    the mode for a forward pass, and also for its backward pass, in which checkpoints run forward again.

    Only the function `backward` defers. In any other backward pass, such as that of a torch.autograd.grad in forward,
    layers compute all gradients as torch's own layers do.

    Args:
        multi_use: ids of parameters for which autograd adds up several gradients; their layers stay torch's own.
        kept: ids of parameters that get their gradients at once; other functions' parameters are added. Which tensors a
            checkpoint saves of a layer does not depend on it.
    """

    def __init__(self, multi_use: frozenset[int], kept: set[int]) -> None:
        super().__init__()
        self.deferred: list[DeferredGrad] = []
        self.multi_use, self.kept = multi_use, kept
        self.pass_id: int | None = None  # that torch gives to the backward pass that defers

    def as_end(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a result of forward as an end for `backward`. No other backward pass may reach the returned
        tensor."""
        end: torch.Tensor = _End.apply(x, self)
        return end

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._defers(*args, **kwargs):
            x, weight, bias = _linear(*args, **kwargs)
            flat = x.flatten(0, -2) if x.dim() > 2 and x.is_contiguous() else x
            result = _Linear.apply(flat, weight.t(), bias, (weight, bias), self)
            if flat is x:
                return result
            shape = [*x.shape[:-1], weight.shape[0]]
            # As torch's own layer, which returns a view only with a bias; detach_() refuses views.
            return torch.ops.aten._unsafe_view(result, shape) if bias is None else result.view(shape)
        if func is torch.addmm and not kwargs and len(args) == 3 and self._defers(args[1], args[2], args[0], 1):
            return _Linear.apply(args[1], args[2], args[0], (args[2], args[0]), self)
        result = func(*args, **kwargs)
        hides = torch._C._are_functorch_transforms_active()  # under vmap `requires_grad` of a result is False
        if hides or func is torch.Tensor.__setitem__ or any(True for _ in _trained([result])):
            self.kept.update(id(x) for x in _trained([args, [*kwargs.values()]]) if x.is_leaf)
        return result

    def _defers(self, input: Any, weight: Any, bias: Any = None, features: int = 0) -> bool:
        """Returns whether the gradients of a layer's parameters are computed later; ``features``: the dimension of the
        weight that counts the layer's outputs."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return False
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return False
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[features : features + 1]):
            return False
        own = [p for p in (weight, bias) if p is not None]
        if any_shape_only(own):
            return False
        if any(_has_hooks(p) for p in own):  # autograd would call the hooks now, without a gradient
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


class _End(torch.autograd.Function):
    """Returns its argument. In the backward pass that defers, its node runs before the model's nodes, whose hooks may
    start further backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, deferring: DeferWeightGrads) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.deferring = deferring
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        ctx.deferring.pass_id = torch._C._current_graph_task_id()
        return grad, None


class _Linear(torch.autograd.Function):
    """A linear layer. It makes the same graph as torch's own layer, which first makes the input a matrix and transposes
    the weight, because autograd adds up second derivatives with respect to these two. It saves the same tensors in the
    same order, because in a torch.autograd.grad in forward a checkpoint computes them again without the mode."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor | None,
        own: tuple[torch.Tensor, torch.Tensor | None],
        deferring: DeferWeightGrads,
    ) -> torch.Tensor:
        weight = own[0]  # the parameter; ``factor`` has its values with the shape (in, out)
        saved = x, factor if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(*(saved[::-1] if bias is None else saved))
        ctx.set_materialize_grads(False)
        ctx.own, ctx.deferring = own, deferring  # a checkpoint returns other objects from saved_tensors
        ctx.transposes, ctx.column_major = factor is not weight, _is_column_major(factor)
        if not ctx.transposes:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None, None
        weight, bias = ctx.own
        x, factor = ctx.saved_tensors[::-1] if bias is None else ctx.saved_tensors
        deferring, needed = ctx.deferring, ctx.needs_input_grad
        rows, inputs = _matrix(grad), _matrix(x)
        later = deferring.pass_id == torch._C._current_graph_task_id()

        def is_now(p: torch.Tensor) -> bool:
            if not later and torch.is_grad_enabled():  # the results depend on p, so autograd will add up its gradients
                deferring.kept.add(id(p))
            # Checked again, because since the layer's call another function may have used p or added a hook.
            return not later or id(p) in deferring.kept or _has_hooks(p)

        of_input = of_factor = of_bias = None
        if needed[1] and weight.requires_grad:
            if is_now(weight):
                of_factor = _of_factor(rows, inputs, ctx.column_major)
            else:
                gradient = partial(_of_weight, rows, inputs, ctx.column_major, ctx.transposes)
                deferring.deferred.append((weight, gradient))
        if needed[2] and bias.requires_grad:
            if is_now(bias):
                of_bias = rows.sum(0)
            else:
                deferring.deferred.append((bias, partial(rows.sum, 0)))
        if needed[0]:
            of_input = _of_input(rows, factor, inputs)
            of_input = of_input if inputs is x else of_input.view(x.shape)
        return of_input, of_factor, of_bias, None, None


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _of_weight(rows: torch.Tensor, inputs: torch.Tensor, column_major: bool, transposes: bool) -> torch.Tensor:
    of_factor = _of_factor(rows, inputs.detach(), column_major)
    return of_factor.t() if transposes else of_factor


def _of_input(rows: torch.Tensor, factor: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Computes the input's gradient as autograd does, whose kernel depends on whether the input is column-major."""
    factor = factor.conj()
    return factor.mm(rows.t()).t() if _is_column_major(inputs) else rows.mm(factor.t())


def _of_factor(rows: torch.Tensor, inputs: torch.Tensor, column_major: bool) -> torch.Tensor:
    """Computes the factor's gradient as autograd does, whose kernel depends on whether the factor is column-major."""
    inputs = inputs.conj()
    return rows.t().mm(inputs).t() if column_major else inputs.t().mm(rows)


def _is_column_major(x: torch.Tensor) -> bool:
    return x.stride() == (1, x.shape[0])
