"""Uneven inputs: a rank without more input takes part in the other ranks' collectives, with gradients of zero.

Inside `join`, every forward, backward and step that communicates first gathers one number from each rank: the code of
what the rank is about to do, or 0 from a rank that has joined. While all ranks have input, nothing else is added. Once
a rank has joined, every collective is announced in this way, and the joined ranks run the same collective with their
own data, until all ranks have joined.

    rank 0   forward .. backward reduce(g1) reduce(g0) used .. step ..  |  0: all have joined
    rank 1   0 -------> 0 -----> g1         g0         used -> step -->  |  0
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.data_parallel.arguments import MODULE
from ringcomm.data_parallel.clip import clip_grad_norm_
from ringcomm.data_parallel.sharded_model import ShardedModel, sharded_model_of
from ringcomm.errors import InvalidArgumentError, MismatchError, RingcommError, UnsupportedError
from ringcomm.validation import FLAG, expects

if TYPE_CHECKING:
    from ringcomm.data_parallel.optimizer import ShardedOptimizer

# What a rank may be about to do; the kinds in PHASES are announced even while all ranks have input.
KINDS = ("forward", "backward", "buffers", "gather", "reduce", "used", "step", "clip", "zero_grad")
PHASES = ("forward", "backward", "step", "clip", "zero_grad")
SENDS_MORE = ("step", "clip")  # kinds that are followed by a message with details


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
    rank has accumulated in ``no_sync`` when it leaves are added to the next reduction. Attached optimizers step on
    every rank, with the hyperparameters of a rank that still has input. An optimizer that is not attached keeps the
    state that it had, and the parameters are sent once more at the end. A rank may run forward, backward,
    `ringcomm.clip_grad_norm_`, step and zero_grad of the wrapped model inside; other collectives are not followed by
    the joined ranks.

    Args:
        model: a model wrapped by `ringcomm.shard` (any stage), `fully_shard` or DistributedDataParallel.
        divide_by_initial_world_size: True: gradients are averaged over all ranks; False: over the ranks that still have
            input.
        enable: False: the block has no effect.
        throw_on_early_termination: raise on all ranks as soon as one rank has no more input.
    Cost:    an all_gather of 8 bytes for each forward pass that sends something, each backward pass and each step; once
             a rank has joined, one for each collective.
    Raises:  RingcommError: a rank has no more input, with ``throw_on_early_termination``. MismatchError: the ranks do
             different things. UnsupportedError: a model with replicas, or with SyncBatchNorm.
    """
    flat = sharded_model_of(model)
    if flat is None:
        raise InvalidArgumentError(
            f"join: got a {type(model).__name__} that is not wrapped; pass what ringcomm.shard returned"
        )
    if not enable:
        yield
        return
    joining = Join.entered(flat, divide_by_initial_world_size, throw_on_early_termination)
    try:
        yield
        joining.shadow()
    finally:
        joining.leave()


def _refuse(flat: ShardedModel) -> None:
    if flat.ranks.joining is not None:
        raise InvalidArgumentError(
            f"join: rank {flat.ranks.rank} is inside of join for this model already; enter it once"
        )
    if flat.ranks.replicas is not None:
        raise UnsupportedError(
            f"join: rank {flat.ranks.rank} got a model with replicas of its shards, expected one communicator; shard "
            "it over a mesh of one axis"
        )
    if flat.ranks.mesh is not None and flat.ranks.mesh.model_axes:
        raise UnsupportedError(
            f"join: rank {flat.ranks.rank} got a model that is cut along {' and '.join(flat.ranks.mesh.model_axes)}, "
            "whose collectives nobody answers, expected data parallel ranks alone; give all ranks as many steps"
        )
    for name, each in flat.module.named_modules():
        if type(each).__name__ == "SyncBatchNorm":
            raise UnsupportedError(
                f"join: rank {flat.ranks.rank} got a model with the SyncBatchNorm {name}, whose collectives nobody "
                "answers, expected none; use a BatchNorm, or inputs of even number"
            )


class Join:
    """One rank's state inside `join`."""

    def __init__(self, flat: ShardedModel, over_all: bool, throw: bool) -> None:
        self.flat, self.over_all, self.throw = flat, over_all, throw
        # Ranks with input, in the last round in which there were any.
        self.with_input = list(range(flat.ranks.world_size))
        self.shadowing = False  # whether this rank has joined
        self._heard = torch.zeros(flat.ranks.world_size, dtype=torch.int64, device=flat.device)

    @staticmethod
    def entered(flat: ShardedModel, over_all: bool, throw: bool) -> Join:
        """Enters `join`: until `leave`, the ranks of the model may have different numbers of inputs."""
        _refuse(flat)
        flat.ranks.joining = Join(flat, over_all, throw)
        return flat.ranks.joining

    def leave(self) -> None:
        """Leaves `join`, after all ranks have joined or one has raised."""
        ranks = self.flat.ranks
        ranks.joining, ranks.root, ranks.counted = None, 0, ranks.world_size

    @property
    def some_have_joined(self) -> bool:
        """Whether a rank had no more input in the last round."""
        return len(self.with_input) < self.flat.ranks.world_size

    def announce(self, kind: str, which: int = 0, flag: bool = False, more: Any = None) -> None:
        """Tells the ranks that have joined what this one is about to do.

        Args:
            which, flag, more: details, depending on the kind.
        """
        if self.shadowing or not (kind in PHASES or self.some_have_joined):
            return
        self._round(1 + KINDS.index(kind) + len(KINDS) * (2 * which + flag))
        if kind in SENDS_MORE and self.some_have_joined:
            self.flat.ranks.comm.exchange(pickle.dumps(more))

    def shadow(self) -> None:
        """Runs the other ranks' collectives, after this rank has joined, until all ranks have joined."""
        self.shadowing = True
        self.flat.decided = None  # from now on the other ranks' passes decide
        while code := self._round(0):
            rest, kind = divmod(code - 1, len(KINDS))
            name, (which, flag) = KINDS[kind], divmod(rest, 2)
            more = None
            if name in SENDS_MORE:
                more = pickle.loads(self.flat.ranks.comm.exchange(b"")[self.with_input[0]])
            getattr(self, f"_{name}")(which, bool(flag), more)
        if self.some_have_joined:
            self._finish()

    def _round(self, mine: int) -> int:
        """Exchanges codes and returns that of the ranks with input; 0 if no rank has input."""
        ranks = self.flat.ranks
        code = torch.tensor([mine], dtype=torch.int64, device=self.flat.device)
        ranks.count("join", self._heard.nbytes)
        ranks.comm.all_gather(code, out=self._heard)
        heard = self._heard.tolist()
        going = [rank for rank, theirs in enumerate(heard) if theirs]
        if not going:
            return 0
        self.with_input = going
        ranks.root = going[0]
        ranks.counted = ranks.world_size if self.over_all else len(going)
        if self.throw and self.some_have_joined:
            gone = [rank for rank, theirs in enumerate(heard) if not theirs]
            raise RingcommError(
                f"join: rank {ranks.rank} was told that ranks {gone} have no more input, expected equal numbers of "
                "steps; give every rank as many, or leave out throw_on_early_termination"
            )
        first = heard[going[0]]
        other = next((rank for rank in going if heard[rank] != first), None)
        if other is not None:
            raise MismatchError(
                f"join: rank {ranks.rank} found rank {going[0]} at {_name(first)} and rank {other} at "
                f"{_name(heard[other])}; run the same steps on every rank that has input"
            )
        return int(first)

    # ---- what a rank that has joined does ----------------------------------------------------------------------------

    def _forward(self, *_: Any) -> None:
        """Does nothing: every message of a forward pass is announced separately."""

    def _backward(self, *_: Any) -> None:
        """Does nothing, for the same reason."""

    def _buffers(self, *_: Any) -> None:
        self.flat.send_buffers()

    def _gather(self, which: int, *_: Any) -> None:
        bucket = self.flat.buckets[which]
        bucket.release()
        bucket.start_gather()
        bucket.release()

    def _reduce(self, which: int, had_reduced: bool, _: Any) -> None:
        bucket = self.flat.buckets[which]
        if not had_reduced:
            self._forget(which)
        self.flat.start_reduce(bucket)

    def _forget(self, which: int) -> None:
        """Discards the reduced gradients, as the other ranks did."""
        bucket = self.flat.buckets[which]
        gradient = bucket.gradient
        if gradient.has_reduced:
            gradient.drop()
            for p in bucket.params:
                p.grad = None

    def _used(self, *_: Any) -> None:
        self.flat.conclude()

    def _step(self, which: int, flag: bool, options: Any) -> None:
        del flag
        attached = self.flat.optimizer_of(which)
        if attached is None:
            raise InvalidArgumentError(
                f"join: rank {self.flat.ranks.rank} has joined before the first step of an optimizer that rank "
                f"{self.with_input[0]} steps, expected it to be attached; call ringcomm.shard(model, optimizer) before"
            )
        optimizer = attached.optimizer
        for group, theirs in zip(optimizer.param_groups, options, strict=True):
            group.update(theirs)
        optimizer.step()

    def _clip(self, which: int, flag: bool, wanted: Any) -> None:
        del which, flag
        picked, arguments = wanted
        clip_grad_norm_([self.flat.buckets[number].params[i] for number, i in picked], *arguments)

    def _zero_grad(self, which: int, *_: Any) -> None:
        attached = self.flat.optimizer_of(which)
        assert attached is not None  # every optimizer that zeroes gradients has stepped
        attached.optimizer.zero_grad(set_to_none=False)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Makes all ranks equal, with the values of the ranks that went on longest."""
        flat, comm = self.flat, self.flat.ranks.comm
        for bucket in flat.order:
            bucket.gradient.reconcile()
        mine = bytes(bucket.gradient.has_reduced for bucket in flat.order)
        theirs = comm.exchange(mine)[self.with_input[0]]
        for bucket, kept in zip(flat.order, theirs, strict=True):
            if not kept:
                self._forget(bucket.number)
        flat.send_buffers()
        if flat.stage == 0:
            for bucket in flat.order:
                self._send(bucket.whole)
                if bucket.separate:
                    self._send(bucket.master)
            for attached in flat.shared_optimizers():
                self._send_state(attached)

    def _send_state(self, attached: ShardedOptimizer) -> None:
        attached.settle()
        attached.close()
        for entry in attached.entries:
            for value in attached.state.get(entry.param, {}).values():
                if torch.is_tensor(value):
                    self._send(value)

    def _send(self, x: torch.Tensor) -> None:
        """Broadcasts a tensor through the ranks' device, because the step count and offloaded tensors are in host
        memory, which communicators of other devices do not reach."""
        here = x.to(self.flat.device)
        self.flat.ranks.broadcast(here)
        if here is not x:
            x.copy_(here)


def _name(code: int) -> str:
    rest, kind = divmod(code - 1, len(KINDS))
    return f"{KINDS[kind]} ({rest // 2})"
