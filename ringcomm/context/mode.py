"""torch's own attention as ring attention: for models that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ringcomm.arguments import FLAG, expects
from ringcomm.communicator import Communicator
from ringcomm.context.attention import ring_attention
from ringcomm.context.sequence import check_layout
from ringcomm.errors import ShapeError, UnsupportedError
from ringcomm.mesh import refuse_mesh

CALL = "context_parallel"
_BACKWARD = {torch.Tensor.backward: "gradient", torch.autograd.backward: "grad_tensors"}
"""What runs backward, and what it calls the gradient of its outputs."""


@expects(CALL, overlap=FLAG)
@contextmanager
def context_parallel(comm: Communicator, *, layout: str = "zigzag", overlap: bool = True) -> Iterator[None]:
    """Inside, ``torch.nn.functional.scaled_dot_product_attention`` of this thread is `ring_attention` over ``comm``.

    A model that attends through it works on parts of a sequence as it is, given the parts' `positions` where it uses
    any. ``is_causal``, ``scale`` and ``enable_gqa`` mean what they mean there. With activation checkpointing,
    ``loss.backward()`` belongs inside, too, since it computes the attention again: outside, as with ``inputs=`` or
    torch.autograd.grad, checkpoints raise CheckpointError. Those with ``use_reentrant=True`` do not: outside they would
    go on with the attention within a rank's part.

    Attention that goes other ways (matmul and softmax, flex_attention, a library's kernel) is not seen, and would stay
    within a rank's part. Models of Hugging Face transformers: ``attn_implementation="sdpa"``, no ``attention_mask``;
    without a cache they take the positions of a zigzag for several sequences and build a mask: leave ``use_cache`` on,
    or use the layout "contiguous".

    Args:
        layout, overlap: as in `ring_attention`.
    Raises:  in a call inside: as `ring_attention`; UnsupportedError: attn_mask, dropout_p other than 0,
             nn.MultiheadAttention.
    """
    refuse_mesh(comm, CALL, "cp")
    check_layout(layout, CALL, comm.rank)
    with _Mode(comm, layout, overlap):
        yield


def _backward(tensors: Any, grads: Any = None, **options: Any) -> None:
    """torch's backward, with the mode on: torch leaves it for every call with a tensor."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    edges = [get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in roots]  # which are no tensors
    torch.autograd.backward(edges, grads, **options)


class _Mode(TorchFunctionMode):
    def __init__(self, comm: Communicator, layout: str, overlap: bool) -> None:
        super().__init__()
        self.comm, self.layout, self.overlap = comm, layout, overlap

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **options)
        if func in _BACKWARD and options.get("inputs") is None:
            given = options.pop(_BACKWARD[func], None)
            with self:  # checkpoints compute the attention again
                return _backward(*args, *(() if given is None else (given,)), **options)
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got nn.MultiheadAttention, expected scaled_dot_product_attention: it "
                "attends within a rank's part; project the inputs yourself and call ring_attention"
            )
        return func(*args, **options)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """torch's signature."""
        self._refuse(attn_mask, dropout_p)
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4):
            raise ShapeError(
                f"{CALL}: rank {self.comm.rank} got q, k and v of {query.dim()}, {key.dim()} and {value.dim()} "
                "dimensions, expected 4 of each, or 3; reshape them to (batch, heads, sequence, head_dim)"
            )
        if query.dim() == 3:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            return self.attend(query, key, value, None, 0.0, is_causal, scale, enable_gqa).squeeze(0)
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ShapeError(
                f"{CALL}: rank {self.comm.rank} got {query.shape[1]} query heads and {key.shape[1]} key heads, "
                "expected as many of both; pass enable_gqa=True"
            )
        options: dict[str, Any] = {"layout": self.layout, "overlap": self.overlap}
        return ring_attention(query, key, value, self.comm, causal=is_causal, scale=scale, **options)

    def _refuse(self, attn_mask: torch.Tensor | None, dropout_p: float) -> None:
        if attn_mask is not None:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got an attn_mask of shape {tuple(attn_mask.shape)}, expected none: a "
                "rank has the mask of its own part alone; use is_causal=True without a padding mask (transformers: "
                "attention_mask=None, and use_cache=True or layout='contiguous'), or call it outside"
            )
        if dropout_p != 0.0:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got dropout_p={dropout_p}, expected 0.0: blocks of one row would drop "
                "with different random numbers on every rank; set the attention's dropout to 0, or call eval()"
            )
