"""Gradients that cannot be differentiated again, because the messages in a backward pass have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ringcomm.errors import UnsupportedError

Backward = Callable[..., tuple[Any, ...]]


def once_differentiable(call: str) -> Callable[[Backward], Backward]:
    """Returns a decorator for the backward pass of an autograd.Function whose gradients depend on its inputs.
    Differentiating the gradients raises; other uses work. With torch's decorator of this name they would be constants
    if the incoming gradient has no graph, as a loss's has none.

    Args:
        call: for the error. The context has the attribute ``rank``.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
            with torch.no_grad():
                made = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return made
            tensors = [x.detach().requires_grad_() for x in made if x is not None]
            raising = iter(_Raises.apply(call, ctx.rank, *tensors))
            return tuple(None if x is None else next(raising) for x in made)

        return once

    return decorate


class _Raises(torch.autograd.Function):
    """Returns gradients, and raises when they are differentiated."""

    @staticmethod
    def forward(ctx: Any, call: str, rank: int, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.rank = call, rank
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"{ctx.call}: rank {ctx.rank} cannot differentiate its gradient again, because a backward pass that sends "
            "messages has no derivative; leave this operation out of a gradient penalty, or compute it unsharded"
        )
