"""Cross-entropy of logits whose vocabulary is sharded over the ranks, without gathering them."""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, ShapeError
from ringcomm.modules.arguments import TENSOR
from ringcomm.modules.once_differentiable import once_differentiable
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.outputs import unwatched
from ringcomm.validation import expects, number, one_of, validate_int


@expects(
    "vocab_parallel_cross_entropy",
    logits=TENSOR,
    target=TENSOR,
    vocabulary=validate_int(),
    ignore_index=validate_int(-(1 << 63)),
    reduction=one_of("mean", "sum", "none"),
    label_smoothing=number(0, 1, "0 to 1"),
)
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    comm: Communicator,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes torch.nn.functional.cross_entropy of sharded logits, as ColumnParallelLinear returns them.

    Args:
        logits: this rank's columns.
        target: classes of the complete vocabulary, the same on all ranks.
        vocabulary: the number of classes. None: the number of outputs, without padding, of the layer that has as many
            columns on each rank; if there is no such layer, W times this rank's columns.
        ignore_index, reduction, label_smoothing: those of torch.
    Shapes:  logits (N, V/W) or (..., V/W), target (N,) or (...): classes come last.
    Dtypes:  floating point; computed and returned in float32 (float64 for float64).
    Order:   the sum of exponentials is a sum of the ranks' sums, a canonical tree.
    Cost:    one all_reduce of N maxima and one of 2 N sums, 3 N with smoothing; backward nothing.
    Returns: the loss, the same on every rank; its gradient is that of this rank's columns.
    Raises:  ShapeError, InvalidArgumentError: before anything is sent. On a device a wrong target fails an assertion of
             torch there.
    """
    group = TensorParallelGroup.of(comm)
    if logits.shape[:-1] != target.shape:
        raise ShapeError(
            f"vocab_parallel_cross_entropy: rank {comm.rank} got logits of shape {tuple(logits.shape)} and a target of "
            f"{tuple(target.shape)}, expected one class for each row of logits; flatten both alike"
        )
    logits, width = unwatched(logits), logits.shape[-1]
    classes = _classes(group, width) if vocabulary is None else vocabulary
    if not 0 < classes <= width * comm.world_size:
        raise InvalidArgumentError(
            f"vocab_parallel_cross_entropy: rank {comm.rank} got vocabulary={vocabulary}, expected 1 to the "
            f"{width * comm.world_size} columns of all ranks; pass the classes of the whole layer"
        )
    known = (target == ignore_index) | ((target >= 0) & (target < classes))
    if target.is_cpu and not bool(known.all()):
        raise InvalidArgumentError(
            f"vocab_parallel_cross_entropy: rank {comm.rank} got a target of {int(target[~known][0])}, expected 0 to "
            f"{classes - 1}, or ignore_index; look at the labels"
        )
    if not target.is_cpu:
        torch._assert_async(known.all())
    flat = logits.reshape(target.numel(), width)
    rows = _CrossEntropy.apply(flat, target.flatten(), group, classes, ignore_index, label_smoothing)
    if reduction == "none":
        return rows.view(target.shape)
    total = rows.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _classes(group: TensorParallelGroup, width: int) -> int:
    """Returns the number of outputs, without padding, of the layer that has ``width`` columns on each rank."""
    found = sorted(group.outputs.get(width, ()))
    if len(found) > 1:
        raise InvalidArgumentError(
            f"vocab_parallel_cross_entropy: rank {group.rank} got {width} columns of logits, which layers of "
            f"{' and of '.join(map(str, found))} outputs have, so the number of classes is unknown; pass vocabulary="
        )
    return found[0] if found else width * group.world_size


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; zero where the target is ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: TensorParallelGroup,
        classes: int,
        ignore: int,
        smoothing: float,
    ) -> torch.Tensor:
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        width = logits.shape[-1]
        first = group.rank * width
        valid = max(0, min(width, classes - first))  # the other columns are padding
        top = wide[:, :valid].amax(-1) if valid else wide.new_full(wide.shape[:1], -torch.inf)
        if group.world_size > 1:
            group.count("all_reduce", top.numel())
            group.comm.all_reduce(top, "max")
        shifted = wide - top.unsqueeze(-1)
        exps = shifted.exp()
        exps[:, valid:] = 0
        here = (target >= first) & (target < first + valid)
        column = (target - first).masked_fill(~here, 0)
        picked = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        sums = torch.stack([exps.sum(-1), picked, *([shifted[:, :valid].sum(-1)] if smoothing else [])])
        sums = group.all_reduce(sums)
        loss = sums[0].log() - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (sums[0].log() - sums[2] / classes)
        ignored = target == ignore
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), column, here, ignored)
        ctx.valid, ctx.classes, ctx.smoothing, ctx.dtype = valid, classes, smoothing, logits.dtype
        ctx.rank = group.rank
        return loss.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable("vocab_parallel_cross_entropy")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        softmax, column, here, ignored = ctx.saved_tensors
        out = softmax.clone()
        out.scatter_add_(-1, column.unsqueeze(-1), -(1 - ctx.smoothing) * here.unsqueeze(-1).to(out.dtype))
        if ctx.smoothing:
            out[:, : ctx.valid] -= ctx.smoothing / ctx.classes
        out.mul_(grad.masked_fill(ignored, 0).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None, None, None
