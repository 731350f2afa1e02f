"""Attention over a sequence that is split over the ranks: keys and values travel round the ring, queries stay.

    step 0      every rank: own queries x own keys          own keys -> next rank
    step 1      own queries x keys of rank r-1              these keys -> next rank
    ...
    step W-1    own queries x keys of rank r+1

In backward the keys travel round once more, together with the sums of their gradients, which end on the rank that owns
the keys.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.context.blocks import FLOATS, Kernel, ScoreParams, kernel_for, merge, wide_type, with_dense_rows
from ringcomm.context.ring import GRADS, RingBuffer, travel
from ringcomm.context.sequence import Block, blocks_of, check_layout
from ringcomm.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ringcomm.modules.arguments import TENSOR
from ringcomm.modules.dynamo import eager
from ringcomm.modules.once_differentiable import once_differentiable
from ringcomm.validation import COMMUNICATOR, FLAG, POSITIVE, expects, number, validate_int

CALL = "ring_attention"


_THREAD = threading.local()


def num_calls() -> int:
    """Returns the number of attentions over ranks that this thread has started."""
    return getattr(_THREAD, "num_calls", 0)


_Visit = tuple[int, torch.Tensor, torch.Tensor, list[Block]]
"""A rank, its keys, its values, and the blocks of those keys to which this rank's queries attend."""


@expects(
    CALL,
    q=TENSOR,
    k=TENSOR,
    v=TENSOR,
    comm=COMMUNICATOR,
    causal=FLAG,
    scale=number(),
    window=validate_int(1),
    key_mask=TENSOR,
    softcap=POSITIVE,
    overlap=FLAG,
)
@eager
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float | None = None,
    layout: str = "zigzag",
    overlap: bool = True,
) -> torch.Tensor:
    """Computes the attention of this rank's queries to the keys of all ranks; a collective, as is its backward.

    Every rank calls it with the same shapes and arguments, and every rank runs backward. Gradients are those of the sum
    of all ranks' losses. It may be called inside of activation checkpointing; a second derivative raises.

    Args:
        q, k, v: this rank's part of the sequence in ``layout``, as `shard_sequence` returns it.
        causal: each query sees the keys at and before its position in the complete sequence. Blocks that are hidden
            entirely are not computed.
        scale: the factor of the scores; None: 1/sqrt(D).
        window: each query sees the keys at a distance of less than this number of positions, as in a model with a
            sliding window. Blocks that are farther away are not computed.
        key_mask: (B, S/W), boolean: True for each of this rank's keys that is seen, False for instance for padding. A
            query that sees no key gets 0.
        softcap: scores become softcap tanh(score / softcap), as in Gemma 2.
        layout: "zigzag": with a causal mask, every rank computes the same amount; "contiguous": rank r attends to r+1
            parts.
        overlap: whether keys travel while a block is computed. The bits are the same.
    Shapes:  q (B, H, S/W, D), k (B, Hkv, S/W, D), v (B, Hkv, S/W, Dv): Hkv divides H, query head h uses key head h //
             (H/Hkv). S/W is even in zigzag on more than one rank.
    Dtypes:  float32, float64, bfloat16, float16, the same for all; under autocast they are cast as for torch's own
             attention. key_mask (B, S/W) on every rank or on none.
    Returns: (B, H, S/W, Dv) in q's type.
    Order:   blocks are merged in the order of ranks r, r-1, ..., r+1, in float32 (float64 for float64); the gradients
             of q are added in the same order. The gradients of rank r's keys are added over the ranks r+1, r+2, ...,
             r-1, and last r, in float32 (float64). With 16-bit inputs a fused kernel rounds its block's results to the
             inputs' type before. On the CPU every run gives the same bits; on CUDA, too, with
             torch.use_deterministic_algorithms.
    Cost:    W steps. Each rank sends (W-1) (|K| + |V|) bytes in forward; in backward the same and (W-1) times their
             gradients in float32; on the CPU, 256 bytes more in each of the two, to compare the calls. Memory for two
             copies of |K| + |V|, and in backward for two of their gradients. A rank computes S^2/W pairs of a query and
             a key for a head; causal in zigzag half as many, and S/(2W) more. In forward the key_mask of all ranks is
             gathered, B S bytes; a block with hidden keys or the edge of a window takes memory for its mask.
    Raises:  ShapeError, DtypeError, DeviceError, InvalidArgumentError, before anything is sent. MismatchError: the
             ranks differ in shapes or arguments (on a device: in the size of the messages only).
    Source:  Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers for Near-Infinite Context.
    """
    check_layout(layout, CALL, comm.rank)
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, comm, layout)
    _check_key_mask(key_mask, k, comm)
    params = ScoreParams(causal, 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale), softcap)
    if window is not None and window >= k.shape[2] * comm.world_size:
        window = None  # it hides nothing
    kernel = kernel_for(q, k, v, softcap, masked=window is not None or key_mask is not None)
    call = _AttentionCall(comm, overlap, kernel, params, layout, window, key_mask)
    _THREAD.num_calls = num_calls() + 1
    return _RingAttention.apply(q, k, v, call)


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator,
    part: int,
    scale: float | None,
    softcap: float | None,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Computes the attention of new tokens, which every rank has, to all ranks' parts of a cache and to one another; a
    collective.

    Args:
        q: (B, H, N, D), the same on every rank.
        k, v: (B, Hkv, part + T, D): this rank's part of the sequence, then T >= N tokens that every rank has, the new
            ones last. Only rank 0 attends to these T tokens.
        key_mask: (B, part + T), boolean: which of these keys are seen; None: all.
    Order:   ranks 0 to W-1. The same bits on every rank.
    Cost:    one all_gather of B H N (Dv + 1) in float32 (float64).
    Raises:  UnsupportedError: gradients are wanted.
    """
    q, k, v = _autocast(q, k, v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError(
            f"{CALL}: rank {comm.rank} got queries that follow a cache with gradients on, expected them off, because "
            "other ranks' keys are not kept for backward; decode inside torch.no_grad()"
        )
    count = k.shape[2] if comm.rank == 0 else part
    k, v = k[:, :, :count], v[:, :, :count]
    ahead = (
        torch.arange(count, device=k.device)
        - torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=k.device)[:, None]
    )
    visible = (ahead <= 0 if comm.rank == 0 else torch.ones_like(ahead, dtype=torch.bool))[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :count]
    params = ScoreParams(False, 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale), softcap, visible)
    q, k, v = with_dense_rows(q, k, v)
    _THREAD.num_calls = num_calls() + 1
    with torch.autocast(q.device.type, enabled=False):
        out, lse = kernel_for(q, k, v, softcap, masked=True).forward(q, k, v, params)
        mine = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
        every = mine.new_empty((comm.world_size, *mine.shape))
        comm.all_gather(mine, out=every)
        total, weight = every[0, ..., :-1].clone(), every[0, ..., -1].clone()
        for other in every[1:]:
            merge(total, weight, other[..., :-1], other[..., -1])
    return total.to(q.dtype)


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Casts the tensors as autocast does for torch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    narrow = torch.get_autocast_dtype(kind)
    return [x.to(narrow) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: Communicator, layout: str) -> None:
    where = f"{CALL}: rank {comm.rank}"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in FLOATS:
        raise DtypeError(
            f"{where} got {q.dtype}, {k.dtype} and {v.dtype} for q, k and v, expected one of float32, float64, "
            "bfloat16 and float16 for all; convert them"
        )
    if len({q.device, k.device, v.device}) > 1:
        raise DeviceError(
            f"{where} got q, k and v on {q.device}, {k.device} and {v.device}, expected one device; move them"
        )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    if not fits or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or 0 in (*q.shape, *v.shape):
        raise ShapeError(
            f"{where} got {shapes}, expected (B, H, S/W, D), (B, Hkv, S/W, D) and (B, Hkv, S/W, Dv), none of them 0; "
            "pass this rank's part of one sequence in all three, and attend to other keys, such as those of an unsplit "
            "text, outside of the context"
        )
    if q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{where} got {shapes}, expected a number of query heads that is a multiple of the key heads; repeat the "
            "key heads"
        )
    if layout == "zigzag" and comm.world_size > 1 and q.shape[2] % 2:
        raise ShapeError(
            f"{where} got a part of {q.shape[2]}, expected an even number: zigzag gives each rank two chunks; pad the "
            f"sequence to a multiple of {2 * comm.world_size}, or use layout='contiguous'"
        )


def _check_key_mask(mask: torch.Tensor | None, k: torch.Tensor, comm: Communicator) -> None:
    expected = (k.shape[0], k.shape[2])
    if mask is not None and (mask.dtype != torch.bool or mask.shape != expected or mask.device != k.device):
        raise ShapeError(
            f"{CALL}: rank {comm.rank} got a key_mask of shape {tuple(mask.shape)}, {mask.dtype}, on {mask.device}, "
            f"expected {expected}, torch.bool, on {k.device}: True where one of this rank's keys is seen; convert it"
        )


@dataclass(eq=False)
class _AttentionCall:
    """One call of `ring_attention`, for its forward and its backward pass.

    Attributes:
        seen: the key_mask of this rank's keys (B, S/W); None: all keys are seen.
        masks: the key_mask of each rank of which not all keys are seen.
    """

    comm: Communicator
    overlap: bool
    kernel: Kernel
    params: ScoreParams
    layout: str
    window: int | None
    seen: torch.Tensor | None
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def facts(self, which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        """Returns the facts that must be equal on all ranks, as text."""
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of {q.dtype}"
        more = f"window={self.window}, softcap={self.params.softcap}, {'no ' if self.seen is None else ''}key_mask"
        return f"{which} of {shapes}, causal={self.params.causal}, scale={self.params.scale!r}, {self.layout}, {more}"

    def blocks(self, which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Visit]:
        """Yields every rank's keys, this rank's own first; the next ones arrive while the caller computes."""
        comm = self.comm
        for source, keys, values in travel(comm, self.overlap, self.facts(which, q, k, v), k, v):
            args = (q.shape[2], self.params.causal, self.layout, comm.world_size, self.window)
            yield source, keys, values, blocks_of(comm.rank, source, *args)

    def collect_masks(self) -> None:
        """Gathers every rank's key_mask; a collective."""
        if self.seen is None:
            return
        every = self.seen.new_empty((self.comm.world_size, *self.seen.shape))
        self.comm.all_gather(self.seen.contiguous().view(torch.uint8), out=every.view(torch.uint8))
        unmasked = every.flatten(1).all(1).tolist()
        self.masks = {rank: mask for rank, mask in enumerate(every) if not unmasked[rank]}

    def scores(self, source: int, block: Block, device: torch.device) -> ScoreParams:
        """Returns the parameters of the block's scores."""
        mask = self.masks.get(source)
        if mask is None and block.distance is None:
            return self.params._replace(causal=block.causal)
        visible = block.visible(self.window, device)
        if mask is not None:
            keys = mask[:, None, None, block.keys]
            visible = keys if visible is None else visible & keys
        return self.params._replace(causal=False, visible=visible)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, and the log-sum-exp over all keys, both in the wide type."""
        wide = wide_type(q.dtype)
        out = lse = None
        for source, keys, values, blocks in self.blocks("forward", q, k, v):
            if source == self.comm.rank:
                self.collect_masks()
            for block in blocks:
                parts = (q[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys])
                part_out, part_lse = self.kernel.forward(*parts, self.scores(source, block, q.device))
                if out is None and part_out.shape[2] == q.shape[2]:
                    out, lse = part_out.to(wide), part_lse
                    continue
                if out is None or lse is None:
                    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device)
                    lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
                merge(out[:, :, block.rows], lse[:, :, block.rows], part_out, part_lse)
        assert out is not None  # every chunk of queries attends to its own keys
        assert lse is not None
        if self.seen is not None:
            lse = lse.masked_fill(lse == -math.inf, math.inf)  # makes the weights of queries without keys 0 in backward
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradients of q, k and v, in the wide type."""
        wide = wide_type(q.dtype)
        of_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        own_keys, own_values = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        sums = None  # the gradients of the current keys and values, summed over the ranks that they have visited
        for source, keys, values, blocks in self.blocks("backward", q, k, v):
            found = []
            for block in blocks:  # computed while the sums are travelling
                grad_out, queries, output, total = (x[:, :, block.rows] for x in (grad, q, out, lse))
                parts = (grad_out, queries, keys[:, :, block.keys], values[:, :, block.keys], output, total)
                found.append(self.kernel.backward(*parts, self.scores(source, block, q.device)))
            if source == self.comm.rank:
                of_k, of_v = own_keys, own_values
            else:
                if sums is None:
                    sums = RingBuffer(self.comm, self.overlap, GRADS, k, v, wide)
                    sums.flat.zero_()
                else:
                    sums.receive()
                of_k, of_v = sums.keys, sums.values
            for block, (of_rows, of_keys, of_values) in zip(blocks, found, strict=True):
                of_q[:, :, block.rows] += of_rows
                of_k[:, :, block.keys] += of_keys
                of_v[:, :, block.keys] += of_values
            if sums is not None:
                sums.send()
        if sums is None:
            return of_q, own_keys, own_values
        sums.receive()
        return of_q, sums.keys.add_(own_keys), sums.values.add_(own_values)


class _RingAttention(torch.autograd.Function):
    """Runs an `_AttentionCall`, and keeps its tensors for backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _AttentionCall) -> torch.Tensor:
        q, k, v = with_dense_rows(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = call.forward(q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.rank = call, call.comm.rank
        return out

    @staticmethod
    @once_differentiable("ring_attention")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = with_dense_rows(grad)
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.call.backward(grad, q, k, v, out, lse)
        return *(x.to(q.dtype) for x in grads), None
