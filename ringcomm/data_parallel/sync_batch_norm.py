"""Batch normalisation over the batches of all ranks, on every device that the communicator serves.

torch.nn.SyncBatchNorm accepts only GPU tensors, and needs torch.distributed.

    forward    count, mean and sum of squared deviations of every rank -> those of the whole batch
    backward   sums of dy and dy * x^ of every rank -> the gradient through the whole batch's mean and variance
"""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.model.place import place_of
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.arguments import DEVICE, DTYPE, MODULE
from ringcomm.modules.once_differentiable import once_differentiable
from ringcomm.validation import COMMUNICATOR, FLAG, expects, number, or_none, validate_int

# Communicators of unpickled layers, one per process group.
_of_group: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm for any number of dimensions. In training its statistics are those of all ranks' inputs together.

    Ranks may have batches of different sizes, including empty ones. In eval, and with one rank, it equals torch's
    BatchNorm.

    Args:
        comm: the ranks. `convert` gives the norms their own communicator, so that their messages cannot be confused
            with those of the gradients.
    Shapes:  (batch, num_features, ...).
    Order:   ranks' statistics are combined in rank order, in float64: the same bits on every rank.
    Cost:    an all_gather of 2 C + 1 float64 in forward, an all_reduce of 2 C in backward; neither overlaps.
    Raises:  InvalidArgumentError: an input of another shape, or only one element per channel over all ranks.
    """

    @expects(
        "SyncBatchNorm",
        num_features=validate_int(),
        eps=number(0),
        momentum=or_none(number()),
        affine=FLAG,
        track_running_stats=FLAG,
        comm=COMMUNICATOR,
        device=DEVICE,
        dtype=DTYPE,
    )
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        comm: Communicator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm = comm
        self._was_unpickled = False  # True if the layer was unpickled and has no ranks yet

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the ranks, which cannot be pickled: see `_find_ranks`."""
        return {**super().__getstate__(), "comm": None, "_was_unpickled": self._was_unpickled or self.comm is not None}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Returns a copy over the same ranks."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.comm, twin._was_unpickled = self.comm, self._was_unpickled
        return twin

    def _find_ranks(self, device: torch.device) -> None:
        """Gives an unpickled layer the ranks of torch's default group, as torch's SyncBatchNorm uses."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            raise InvalidArgumentError(
                "SyncBatchNorm: got an unpickled layer in training without torch.distributed, expected its ranks; set "
                "its comm, or call ringcomm.SyncBatchNorm.convert(model, comm)"
            )
        if dist.group.WORLD not in _of_group:
            _of_group[dist.group.WORLD] = communicator_of(None, "SyncBatchNorm", device).dup()
        self.comm, self._was_unpickled = _of_group[dist.group.WORLD], False

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgumentError(
                f"SyncBatchNorm: got an input of shape {tuple(input.shape)}, expected (batch, {self.num_features}, "
                "...); pass channels in the second place"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the input normalised to mean 0 and variance 1 in each channel, times weight plus bias."""
        if self.training and self.comm is None and self._was_unpickled:
            self._find_ranks(input.device)
        if not self.training or self.comm is None or self.comm.world_size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.comm)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, var, float(count))
        return output

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)

    @staticmethod
    @expects("SyncBatchNorm", module=MODULE, comm=COMMUNICATOR)
    def convert(module: nn.Module, comm: Communicator | None = None) -> nn.Module:
        """Replaces a module's BatchNorms, including torch's SyncBatchNorms, by this class, and returns the module; a
        collective.

        Parameters and buffers stay the same objects. Call it before wrapping the module.

        Args:
            comm: None: a communicator over torch.distributed's default group, else ``ringcomm.init()``.
        """
        found = [each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        if comm is None:
            comm = communicator_of(None, "SyncBatchNorm", next((p.device for p in module.parameters()), None))
        if any(place_of(p) is not None for each in found for p in each.parameters()):
            raise InvalidArgumentError(
                f"SyncBatchNorm: rank {comm.rank} got a module that is wrapped already, expected a plain one; convert "
                "it before you wrap it"
            )
        return _convert(module, comm.dup()) if found else module


def _convert(module: nn.Module, comm: Communicator) -> nn.Module:
    for name, child in module.named_children():
        module.register_module(name, _convert(child, comm))
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module
    made = SyncBatchNorm(module.num_features, module.eps, module.momentum, False, False, comm)
    made.affine, made.track_running_stats = module.affine, module.track_running_stats
    made._parameters.update(module._parameters)
    made._buffers.update(module._buffers)
    return made.train(module.training)


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape in which a per-channel value broadcasts against ``x``."""
    return (1, -1) + (1,) * (x.dim() - 2)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        comm: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        mean, var, count = _statistics(wide, comm)
        scale = torch.rsqrt(var + eps).to(wide.dtype)
        normal = (wide - mean.to(wide.dtype).view(_shape(x))) * scale.view(_shape(x))
        ctx.save_for_backward(normal, scale, weight)
        ctx.comm, ctx.rank, ctx.count, ctx.dtype = comm, comm.rank, float(count), x.dtype
        output = normal
        if weight is not None:
            output = output * weight.view(_shape(x))
        if bias is not None:
            output = output + bias.view(_shape(x))
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable("SyncBatchNorm")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        over = [i for i in range(grad.dim()) if i != 1]
        sums = torch.stack([grad.sum(over, dtype=torch.float64), (grad * normal).sum(over, dtype=torch.float64)])
        total = torch.empty_like(sums)
        ctx.comm.all_reduce(sums, out=total)
        mean_grad, mean_product = (total / ctx.count).to(normal.dtype).view(2, *_shape(grad))
        back = (grad - mean_grad - normal * mean_product) * scale.view(_shape(grad))
        if weight is not None:
            back = back * weight.view(_shape(grad))
        of_weight = sums[1].to(weight.dtype) if weight is not None else None
        of_bias = sums[0].to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return back.to(ctx.dtype), of_weight, of_bias, None, None


def _statistics(x: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns mean, variance and number of elements of each channel over all ranks, in float64."""
    channels = x.shape[1]
    over = [i for i in range(x.dim()) if i != 1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // channels
    if count:
        var, mean = torch.var_mean(x, over, correction=0)
        mine[0], mine[1 : channels + 1], mine[channels + 1 :] = count, mean, var.double() * count
    gathered = torch.empty(comm.world_size * mine.numel(), dtype=torch.float64, device=x.device)
    comm.all_gather(mine, out=gathered)
    counts, means, squares = gathered.view(comm.world_size, -1).split([1, channels, channels], 1)
    total = counts.sum()
    if float(total) <= 1:
        raise InvalidArgumentError(
            f"SyncBatchNorm: rank {comm.rank} got {int(total)} elements in each channel on all ranks together, "
            "expected more than one; give it more data, or use eval()"
        )
    mean = (counts * means).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, var, total
