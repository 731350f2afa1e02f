"""Attention of a block of queries to a block of keys, with the data that merging blocks needs.

The softmax over all keys is a weighted sum of the softmax over each block. With L, the log-sum-exp of a block's scores,
two blocks are merged by

    L = log(exp(L1) + exp(L2)),    out = out1 + sigmoid(L2 - L1) (out2 - out1)

Given the complete output and the L over all blocks, each block's gradients can be computed independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GREATEST_HEAD_DIM = 192  # largest head_dim for the fused kernel on CUDA; above it, some devices have no backward


class ScoreParams(NamedTuple):
    """The parameters of attention scores, which are computed from the product of a query and a key.

    Attributes:
        causal: whether to apply a causal mask; only for a square block.
        softcap: scores become softcap tanh(score / softcap).
        visible: (B or 1, 1, S, T), True where a query sees a key; causal is False then. None: everywhere.
    """

    causal: bool
    scale: float
    softcap: float | None = None
    visible: Tensor | None = None


Forward = Callable[[Tensor, Tensor, Tensor, ScoreParams], tuple[Tensor, Tensor]]
"""Computes the output (B, H, S, D) and log-sum-exp (B, H, S) of queries (B, H, S, D), keys and values (B, Hkv, T, D).

A query that sees no key has the output 0 and the log-sum-exp -inf."""
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, ScoreParams],
    tuple[Tensor, Tensor, Tensor],
]
"""Computes a block's part of the gradients of q, k and v, from the gradient of the output, q, k, v, the complete output
and the log-sum-exp over all blocks.

For a query that sees no key in any block, the log-sum-exp must be given as +inf, which makes its weights 0."""


class Kernel(NamedTuple):
    """One implementation of a block's forward and backward."""

    forward: Forward
    backward: Backward


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which blocks are merged and gradients added: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_for(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None, masked: bool = False) -> Kernel:
    """Returns the kernel for inputs of these types and shapes.

    | device | fused: torch's flash attention                                              | else  |
    |--------|-----------------------------------------------------------------------------|-------|
    | CPU    | float32, float64, bfloat16, float16; one head_dim for q, k and v            | plain |
    | CUDA   | bfloat16, float16; where can_use_flash_attention allows, head_dim up to 192 | plain |

    No fused kernel supports a softcap, and the one on CUDA takes no mask (``masked``). torch's own switches apply:
    inside of ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` the plain kernel is used. The fused kernels need no
    memory for scores; they round a block's output and gradients to the inputs' type.
    """
    if not torch.backends.cuda.flash_sdp_enabled() or v.shape[-1] != q.shape[-1] or softcap is not None:
        return PLAIN
    if q.device.type == "cpu":
        return FLASH_CPU
    if not masked and q.device.type == "cuda" and q.shape[-1] <= _GREATEST_HEAD_DIM and q.shape[-1] % 8 == 0:
        grouped = q.shape[1] != k.shape[1]
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
        return FLASH_CUDA if torch.backends.cuda.can_use_flash_attention(asked) else PLAIN
    return PLAIN


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block into the accumulated result of its queries, in place, in the wide type."""
    weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -math.inf, 0.0)  # 0 also where both are -inf
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))


# ---- fused -------------------------------------------------------------------------------------------------------


def _additive(params: ScoreParams, dtype: torch.dtype) -> Tensor | None:
    """Returns the mask in the form that torch's kernel adds to scores."""
    if params.visible is None:
        return None
    return torch.zeros(params.visible.shape, dtype=dtype, device=params.visible.device).masked_fill_(
        ~params.visible, -math.inf
    )


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, params.causal, attn_mask=_additive(params, q.dtype), scale=params.scale)
    if params.visible is not None:
        lse = lse.masked_fill(~params.visible.any(-1), -math.inf)  # where the kernel returns 0
    return out, lse


def _flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: ScoreParams
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = _additive(params, q.dtype)
    return flash(grad, q, k, v, out, lse, 0.0, params.causal, attn_mask=mask, scale=params.scale)


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(q, k, v, 0.0, params.causal, False, scale=params.scale)
    return out, lse


def _flash_cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: ScoreParams
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is off
    rows, keys = q.shape[2], k.shape[2]
    lse = lse.contiguous()  # the kernel ignores its strides
    return flash(
        grad, q, k, v, out, lse, None, None, rows, keys, 0.0, params.causal, unused, unused, scale=params.scale
    )  # None: all sequences have one length


# ---- plain -------------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, params: ScoreParams) -> tuple[Tensor, Tensor | None]:
    """Returns the scores as (B, Hkv, G S, T) in the wide type, with G query heads for each key head, -inf where masked.

    The second result is the slope of the softcap, or None without one.
    """
    scores = (q @ k.transpose(-1, -2)) * params.scale
    slope = None
    if params.softcap is not None:
        scores = scores.div_(params.softcap).tanh_()
        slope = 1 - scores.square()
        scores = scores.mul_(params.softcap)
    hidden = None if params.visible is None else ~params.visible
    if params.causal:
        length = k.shape[-2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    if hidden is not None:
        rows = hidden.shape[-2]
        scores.unflatten(2, (-1, rows)).masked_fill_(hidden.unsqueeze(-3), -math.inf)
    return scores, slope


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Returns (B, H, S, ...) as (B, heads, H/heads S, ...) in the wide type: the query heads of a key head are
    concatenated."""
    return x.to(wide_type(x.dtype)).unflatten(1, (heads, -1)).flatten(2, 3)


def _plain(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> tuple[Tensor, Tensor]:
    wide = wide_type(q.dtype)
    scores, _ = _scores(_grouped(q, k.shape[1]), k.to(wide), params)
    lse = scores.logsumexp(-1, keepdim=True)
    shift = lse if params.visible is None else lse.masked_fill(lse == -math.inf, 0.0)
    out = scores.sub_(shift).exp_() @ v.to(wide)
    shape = q.shape[:3]
    return out.view(*shape, v.shape[-1]), lse.view(shape)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, params: ScoreParams
) -> tuple[Tensor, Tensor, Tensor]:
    heads, wide = k.shape[1], wide_type(q.dtype)
    rows, grad_out, out = _grouped(q, heads), _grouped(grad, heads), _grouped(out, heads)
    keys, values = k.to(wide), v.to(wide)
    scores, slope = _scores(rows, keys, params)
    weights = scores.sub_(_grouped(lse, heads).unsqueeze(-1)).exp_()
    grad_weights = (grad_out @ values.transpose(-1, -2)).sub_((grad_out * out).sum(-1, keepdim=True))
    grad_scores = grad_weights.mul_(weights).mul_(params.scale)
    if slope is not None:
        grad_scores = grad_scores.mul_(slope)
    grad_k, grad_v = grad_scores.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ grad_out
    return (grad_scores @ keys).view(q.shape), grad_k, grad_v


FLASH_CPU = Kernel(_flash_cpu, _flash_cpu_backward)
FLASH_CUDA = Kernel(_flash_cuda, _flash_cuda_backward)
PLAIN = Kernel(_plain, _plain_backward)


def with_dense_rows(*tensors: Any) -> list[Tensor]:
    """Returns the tensors with a contiguous last dimension, as every kernel requires; copies only those that need
    it."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
