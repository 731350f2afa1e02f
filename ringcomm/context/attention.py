"""Attention over a sequence that is split over the ranks: keys and values go round, queries stay.

    step 0      every rank: own queries x own keys          own keys -> next rank
    step 1      own queries x keys of rank r-1              these -> next rank
    ...
    step W-1    own queries x keys of rank r+1

Backward goes round once more, and with the keys go the sums of their gradients, until they are home again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringcomm.arguments import COMMUNICATOR, FLAG, expects, number
from ringcomm.communicator import Communicator
from ringcomm.context.blocks import FLOATS, Kernel, kernel_for, merge, wide_type, with_dense_rows
from ringcomm.context.ring import Link, Sums
from ringcomm.context.sequence import Block, block_of, check_layout
from ringcomm.errors import DeviceError, DtypeError, ShapeError
from ringcomm.parallel.arguments import TENSOR

CALL = "ring_attention"
_Met = tuple[int, torch.Tensor, torch.Tensor, Block | None]
"""A rank, its keys and values, and what of them this rank's queries meet."""


@expects(CALL, q=TENSOR, k=TENSOR, v=TENSOR, comm=COMMUNICATOR, causal=FLAG, scale=number(), overlap=FLAG)
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    overlap: bool = True,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks; a collective, and so is its backward.

    Every rank calls it with the same shapes and arguments, and every rank runs backward. Gradients are those of the sum
    of all ranks' losses. It may be called inside of activation checkpointing; a second derivative raises.

    Args:
        q, k, v: parts of the sequence, cut as ``layout`` says: `shard_sequence` cuts like this.
        causal: each query sees the keys at its position in the whole sequence and before it. Blocks that it hides
            wholly are not computed.
        scale: of the scores; None: 1/sqrt(D).
        layout: "zigzag": every rank computes as much of a causal mask; "contiguous": rank r sees r+1 parts of it.
        overlap: whether keys travel while a block is computed. The bits are the same.
    Shapes:  q (B, H, S/W, D), k (B, Hkv, S/W, D), v (B, Hkv, S/W, Dv): Hkv divides H, query head h meets key head
             h // (H/Hkv). S/W is even in zigzag on more than one rank.
    Dtypes:  float32, float64, bfloat16, float16, one for all; under autocast they are cast as torch's are.
    Returns: (B, H, S/W, Dv) in q's type.
    Order:   blocks are put together in the order of ranks r, r-1, ..., r+1, in float32 (float64 for float64), and so
             are the gradients of q. The gradients of rank r's keys add up ranks r+1, r+2, ..., r-1, and at last r, in
             float32 (float64). With 16-bit inputs a fused kernel rounds its block's results to them before. On the CPU
             the same bits in every run; on CUDA, too, with torch.use_deterministic_algorithms.
    Cost:    W steps. Each rank sends (W-1) (|K| + |V|) bytes in forward and (W-1) (|K| + |V|) and (W-1) times their
             gradients in float32 in backward; on the CPU, 256 bytes more each time, to compare the calls. Memory for
             two of |K| + |V|, and in backward for two of their gradients. A rank computes S^2/W pairs of a query and
             a key for a head; causal in zigzag half as many, and S/(2W) more.
    Raises:  ShapeError, DtypeError, DeviceError, InvalidArgumentError, before anything is sent. MismatchError: the
             ranks differ in shapes or arguments (on a device: in the size of the messages alone).
    Source:  Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers for Near-Infinite Context.
    """
    check_layout(layout, CALL, comm.rank)
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, comm, layout)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    call = _Call(Link(comm, overlap), kernel_for(q, k, v), causal, scale, layout)
    return _RingAttention.apply(q, k, v, call)


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As torch casts the inputs of its own attention."""
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
            "pass this rank's part of one sequence in all three"
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


class _Call:
    """One ring attention: where, how, and of what."""

    def __init__(self, link: Link, kernel: Kernel, causal: bool, scale: float, layout: str) -> None:
        self.link, self.kernel = link, kernel
        self.causal, self.scale, self.layout = causal, scale, layout

    def facts(self, which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
        """In what the ranks must agree."""
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of {q.dtype}"
        return f"{which} of {shapes}, causal={self.causal}, scale={self.scale!r}, {self.layout}"

    def blocks(self, which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[_Met]:
        """Every rank's keys, this rank's own first; the next ones come while the caller computes."""
        link = self.link
        for source, keys, values in link.travel(self.facts(which, q, k, v), k, v):
            yield source, keys, values, block_of(link.rank, source, q.shape[2], self.causal, self.layout)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp over all keys, both in the wide type."""
        out, lse = q, q  # the first block is a whole one, the rank's own
        for source, keys, values, block in self.blocks("forward", q, k, v):
            if block is None:
                continue
            keys, values = keys[:, :, block.keys], values[:, :, block.keys]
            part_out, part_lse = self.kernel.forward(q[:, :, block.rows], keys, values, block.causal, self.scale)
            if source == self.link.rank:
                out, lse = part_out.to(wide_type(q.dtype)), part_lse
            else:
                merge(out[:, :, block.rows], lse[:, :, block.rows], part_out, part_lse)
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
        """The gradients of q, k and v, in the wide type."""
        wide = wide_type(q.dtype)
        own: list[torch.Tensor] = []
        sums = Sums(self.link, k, v, wide)

        def block_grads(keys: torch.Tensor, values: torch.Tensor, block: Block) -> tuple[torch.Tensor, ...]:
            upper, queries, output, total = (x[:, :, block.rows] for x in (grad, q, out, lse))
            keys, values = keys[:, :, block.keys], values[:, :, block.keys]
            return self.kernel.backward(upper, queries, keys, values, output, total, block.causal, self.scale)

        def add(keys: torch.Tensor, values: torch.Tensor, block: Block) -> None:
            parts = block_grads(keys, values, block)  # while the sums are on their way
            own[0][:, :, block.rows] += parts[0]
            travelling = sums.take()
            travelling.keys[:, :, block.keys] += parts[1]
            travelling.values[:, :, block.keys] += parts[2]

        for source, keys, values, block in self.blocks("backward", q, k, v):
            if source != self.link.rank:
                if block is not None:
                    add(keys, values, block)
                else:
                    sums.take()
                sums.pass_on()
            elif block is not None:  # always: its own
                own = [x.to(wide) for x in block_grads(keys, values, block)]
        if self.link.world_size > 1:
            home = sums.take()
            own[1:] = [home.keys.add_(own[1]), home.values.add_(own[2])]
        return own[0], own[1], own[2]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
        q, k, v = with_dense_rows(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = call.forward(q, k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # the other ranks' part is a constant to autograd
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = with_dense_rows(grad)
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.call.backward(grad, q, k, v, out, lse)
        return *(x.to(q.dtype) for x in grads), None
