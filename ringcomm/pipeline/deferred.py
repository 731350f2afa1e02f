"""Gradients of weights that are computed later than those of inputs: what a zero bubble schedule fills its gaps with
(Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from ringcomm.pipeline.absent import any_absent

Later = Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]
"""Gives parameters and their gradients."""


class Store:
    """What is left to compute of a stage's backward pass of one micro-batch."""

    def __init__(self) -> None:
        self.waiting: list[Later] = []

    def run(self) -> None:
        """Computes it, and adds the gradients to those of the parameters, through autograd and its hooks."""
        waiting, self.waiting = self.waiting, []
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for later in waiting:
            for p, grad in later():
                before = found.get(id(p))
                found[id(p)] = (p, grad if before is None else before[1] + grad)
        if found:
            torch.autograd.backward([p for p, _ in found.values()], [grad for _, grad in found.values()])


def backward(ends: Sequence[Any], gradients: Sequence[torch.Tensor | None], deferring: Deferring | None = None) -> None:
    """``torch.autograd.backward(ends, gradients)``, also inside of ``deferring``: that function by itself would leave a
    mode before it runs the graph."""
    if deferring is None:
        torch.autograd.backward(ends, gradients)
        return
    found = tuple(torch.ones_like(x) if g is None else g for x, g in zip(ends, gradients, strict=True))
    with deferring:
        _engine_run_backward(tuple(ends), found, False, False, (), allow_unreachable=True, accumulate_grad=True)


class Deferring(TorchFunctionMode):
    """Inside, linear layers leave the gradients of their weights to ``store``: calls of torch.nn.functional.linear, and
    of torch.addmm as transformers' Conv1D makes them, on parameters themselves. The gradients' bits are those of
    autograd. Everything else, also what autocast converts, has its gradients at once; and so have embeddings that are
    an output layer as well, whose gradients autograd adds up before. For a forward pass, and for its backward pass too,
    in which checkpoints run theirs.

    Args:
        kept: ids of parameters that have their gradients at once.
    """

    def __init__(self, store: Store, kept: set[int]) -> None:
        super().__init__()
        self.store, self.kept = store, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._defers(*args, **kwargs):
            return _Linear.apply(*_linear(*args, **kwargs), self.store, False)
        if func is torch.addmm and not kwargs and len(args) == 3 and self._defers(args[1], args[2], args[0]):
            return _Linear.apply(args[1], args[2], args[0], self.store, True)
        if func is F.embedding and len(args) > 1:
            self.kept.add(id(args[1]))
        return func(*args, **kwargs)

    def _defers(self, input: Any, weight: Any, bias: Any = None) -> bool:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
            return False
        own = [p for p in (weight, bias) if p is not None]
        if any_absent(own):
            return False
        return all(p.is_leaf and id(p) not in self.kept for p in own) and weight.requires_grad


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    """A linear layer; ``turned``: its weight lies (in, out)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, store: Store, turned: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own = weight, bias  # a checkpoint gives others back
        ctx.store, ctx.turned = store, turned
        if turned:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        weight, bias = ctx.own
        rows = grad.reshape(-1, grad.shape[-1])
        turned = ctx.turned

        def later() -> list[tuple[torch.Tensor, torch.Tensor]]:
            inputs = x.detach().reshape(-1, x.shape[-1])
            found = [(weight, inputs.t().mm(rows) if turned else rows.t().mm(inputs))]
            if bias is not None and bias.requires_grad:
                found.append((bias, rows.sum(0)))
            return found

        ctx.store.waiting.append(later)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rows.mm(values.t() if turned else values).view(x.shape)
        return dx, None, None, None, None
