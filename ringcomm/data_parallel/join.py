"""Uneven inputs: a rank without more input takes part in the other ranks' collectives, with gradients of zero.

Inside `join`, every forward, backward and step that communicates first gathers one number from each rank: the code of
its next action, or 0 from a rank that has joined. While all ranks have input, nothing else is sent. Once a rank has
joined, every collective is announced in this way, and the joined ranks run the same collective with their own data,
until all ranks have joined.

    rank 0   forward .. backward reduce(g1) reduce(g0) used .. step ..  |  0: all have joined
    rank 1   0 -------> 0 -----> g1         g0         used -> step -->  |  0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringcomm.data_parallel.buckets.grad_buffer import sync_grads_from_root
from ringcomm.data_parallel.buckets.group import Join
from ringcomm.data_parallel.model.place import wrapped_model
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.clip import clip_grad_norm_
from ringcomm.data_parallel.optim.optimizer import ShardedOptimizer, sharded_optimizers
from ringcomm.data_parallel.optim.zero_optimizer import optimizers_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import MODULE
from ringcomm.validation import FLAG, expects


@expects("join", model=MODULE, divide_by_initial_world_size=FLAG, enable=FLAG, throw_on_early_termination=FLAG)
@contextmanager
def join(
    model: nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Lets the ranks of a wrapped model run different numbers of training steps inside the block; a collective.

    A rank that leaves the block early waits at its end. While it waits, it takes part in the other ranks' collectives,
    with gradients of zero and with its shards, so that all ranks leave together with equal parameters. Gradients that a
    rank has accumulated in ``no_sync`` when it leaves are added to the next reduction. Attached optimizers, and
    those of `ZeroRedundancyOptimizer`, step on every rank, with the hyperparameters of a rank that still has input. Any
    other optimizer keeps the state that it had on the joined rank, and the parameters are sent once more at the end.
    Inside the block a rank may run the model's forward and backward, its optimizer's step and
    `ringcomm.clip_grad_norm_`, and set gradients to None or zero; joined ranks do not take part in other collectives.

    Args:
        model: a model wrapped by `ringcomm.shard` (any stage), `fully_shard` or DistributedDataParallel.
        divide_by_initial_world_size: True: gradients are averaged over all ranks; False: over the ranks that still have
            input.
        enable: False: the block has no effect.
        throw_on_early_termination: raise on all ranks as soon as one rank has no more input.
    Cost:    an all_gather of 8 bytes for each forward pass that sends something, each backward pass, clipping and step,
             and before gradients are set to zero; once a rank has joined, one or two small messages for each collective
             and for each gradient that is set to zero, and at stage 0 the gradients for each clipping.
    Raises:  RingcommError: a rank has no more input, with ``throw_on_early_termination``. MismatchError: the ranks do
             different things. UnsupportedError: a model with replicas, or with SyncBatchNorm.
    """
    flat = wrapped_model(model, "join")
    if not enable:
        yield
        return
    enter(flat, divide_by_initial_world_size, throw_on_early_termination)
    try:
        yield
        shadow(flat)
    finally:
        leave(flat)


def _refuse(flat: ShardedModel) -> None:
    if flat.ranks.joining is not None:
        raise InvalidArgumentError(
            f"join: rank {flat.ranks.rank} is already inside join for this model; enter join once"
        )
    if flat.ranks.replicas is not None:
        raise UnsupportedError(
            f"join: rank {flat.ranks.rank} got a model with replicas of its shards, expected one communicator; shard "
            "it over a mesh of one axis"
        )
    if flat.ranks.mesh is not None and flat.ranks.mesh.model_axes:
        raise UnsupportedError(
            f"join: rank {flat.ranks.rank} got a model that is cut along {' and '.join(flat.ranks.mesh.model_axes)}, "
            "whose collectives joined ranks cannot answer, expected data parallel ranks alone; give all ranks equal "
            "numbers of steps"
        )
    for name, each in flat.module.named_modules():
        if type(each).__name__ == "SyncBatchNorm":
            raise UnsupportedError(
                f"join: rank {flat.ranks.rank} got a model with the SyncBatchNorm {name}, whose collectives joined "
                "ranks cannot answer, expected none; use a BatchNorm, or give all ranks equal numbers of inputs"
            )


def enter(flat: ShardedModel, over_all: bool, throw: bool) -> None:
    """Enters `join`: until `leave`, the ranks of the model may have different numbers of inputs.

    Args:
        over_all, throw: see `Join`.
    """
    _refuse(flat)
    flat.recover()
    flat.sync.buffers_are_due = True  # so that the first forward pass communicates, and is announced
    joining = Join(flat.ranks, flat.module, flat.device, over_all, throw, optimizers_of(flat))
    for number, optimizer in joining.replicated.items():
        optimizer.joining = joining, number
    flat.ranks.joining = joining


def leave(flat: ShardedModel) -> None:
    """Leaves `join`, after all ranks have joined or one has raised."""
    joining, flat.ranks.joining = flat.ranks.joining, None
    for optimizer in [] if joining is None else joining.replicated.values():
        optimizer.joining = None
    flat.forget_passes()


def shadow(flat: ShardedModel) -> None:
    """Runs the other ranks' collectives, after this rank has joined, until all ranks have joined."""
    joining = flat.ranks.joining
    assert joining is not None
    joining.shadowing = True
    flat.sync.reduces_next_backward = None  # from now on the other ranks' passes decide
    while received := joining.receive():
        kind, *details = received
        if kind in _FOLLOW:
            _FOLLOW[kind](flat, *details)
    if joining.some_have_joined:
        _finish(flat)


# ---- the actions of a rank that has joined ---------------------------------------------------------------------------


def _gather(flat: ShardedModel, which: int, *_: Any) -> None:
    bucket = flat.buckets[which]
    bucket.release()
    bucket.start_gather()
    bucket.release()


def _step(flat: ShardedModel, which: int, is_replicated: bool, options: Any) -> None:
    joining = flat.ranks.joining
    assert joining is not None
    optimizer = joining.replicated.get(which) if is_replicated else flat.optimizers.of_number(which)
    if optimizer is None:
        what = "it to be made" if is_replicated else "it to be attached"
        advice = "make it on every rank" if is_replicated else "call ringcomm.shard(model, optimizer)"
        raise InvalidArgumentError(
            f"join: rank {flat.ranks.rank} has joined before the first step of an optimizer that rank "
            f"{flat.ranks.root} steps, expected {what}; {advice} before join"
        )
    for group, theirs in zip(optimizer.param_groups, options, strict=True):
        group.update(theirs)
    optimizer.step()


def _clip(flat: ShardedModel, which: int, flag: bool, wanted: Any) -> None:
    del which, flag
    picked, arguments = wanted
    clip_grad_norm_([flat.buckets[number].params[i] for number, i in picked], *arguments)


def _zero(flat: ShardedModel, which: int, flag: bool, name: str) -> None:
    del which, flag
    for bucket in flat.order:
        if name in bucket.names:
            bucket.gradient.zero(bucket.names.index(name))


# A joined rank does nothing for "forward" and "backward", because each message inside them is announced separately.
_FOLLOW: dict[str, Callable[..., None]] = {
    "buffers": lambda flat, *_: flat.send_buffers(),
    "gather": _gather,
    "reduce": lambda flat, which, *_: flat.start_reduce(flat.buckets[which]),
    "used": lambda flat, *_: flat.finish_reductions(),
    "step": _step,
    "clip": _clip,
    "zero": _zero,
}


# ---- the end ---------------------------------------------------------------------------------------------------------


def _finish(flat: ShardedModel) -> None:
    """Makes all ranks equal: they get the values of the ranks that joined last."""
    gradients = [bucket.gradient for bucket in flat.order]
    for gradient in gradients:
        gradient.reconcile()
    sync_grads_from_root(gradients, values=True)
    flat.send_buffers()
    if flat.stage == 0:
        for bucket in flat.order:
            _send(flat, bucket.unsharded)
            if bucket.separate:
                _send(flat, bucket.master)
        for sharded in sharded_optimizers(flat):
            _send_state(flat, sharded)


def _send_state(flat: ShardedModel, sharded: ShardedOptimizer) -> None:
    sharded.refresh()
    sharded.close()
    for entry in sharded.entries:
        for value in sharded.state.get(entry.param, {}).values():
            if torch.is_tensor(value):
                _send(flat, value)


def _send(flat: ShardedModel, x: torch.Tensor) -> None:
    """Broadcasts a tensor through a copy on the ranks' device, because the step count and offloaded tensors are in host
    memory, which the communicator of another device cannot reach."""
    here = x.to(flat.device)
    flat.ranks.broadcast(here)
    if here is not x:
        x.copy_(here)
