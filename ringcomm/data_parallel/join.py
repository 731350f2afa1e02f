"""Uneven inputs: a rank that has no more of them takes part in what the others do, with gradients of zero.

Inside `join` every forward, backward and step that sends something first gathers one number from each rank: what it
is about to do, or 0 from a rank that has joined. While all ranks have input there is no more to it. Once one has
joined, every collective is announced in this way, and the ranks that have joined do the same with their own part, until
all ranks have.

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

# What a rank may be about to do; those of PHASES are announced also while all ranks have input.
KINDS = ("forward", "backward", "buffers", "gather", "reduce", "used", "step", "clip", "zero_grad")
PHASES = ("forward", "backward", "step", "clip", "zero_grad")
SENDS_MORE = ("step", "clip")  # with a message of its own


@expects("join", model=MODULE, divide_by_initial_world_size=FLAG, enable=FLAG, throw_on_early_termination=FLAG)
@contextmanager
def join(
    model: nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Inside, the ranks of a wrapped model may run different numbers of training steps; a collective.

    A rank that leaves the block early waits at its end and takes part, with gradients of zero and with its shards, in
    the collectives of those that go on; so all leave together, with equal parameters. What a rank has accumulated in
    ``no_sync`` when it leaves goes with the others' next reduction. Attached optimizers step on every rank, with the
    hyperparameters of a rank that still has input; one that is not attached keeps its own state where it was, and the
    parameters are sent once more at the end. Every rank's steps are forward, backward, `ringcomm.clip_grad_norm_`, step
    and zero_grad of the wrapped model; other collectives inside are not followed.

    Args:
        model: of `ringcomm.shard` at any stage, `fully_shard` or DistributedDataParallel.
        divide_by_initial_world_size: gradients are averaged over all ranks; False: over those that still have input.
        enable: False: nothing of this.
        throw_on_early_termination: raise on all ranks as soon as one has no more input.
    Cost:    an all_gather of 8 bytes for each forward pass that sends something, each backward pass and step; once a
             rank has joined, one for each collective.
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
    """What one rank knows while it is inside of `join`."""

    def __init__(self, flat: ShardedModel, over_all: bool, throw: bool) -> None:
        self.flat, self.over_all, self.throw = flat, over_all, throw
        self.with_input = list(range(flat.ranks.world_size))  # in the last round with any
        self.shadowing = False  # this rank has joined
        self._heard = torch.zeros(flat.ranks.world_size, dtype=torch.int64, device=flat.device)

    @staticmethod
    def entered(flat: ShardedModel, over_all: bool, throw: bool) -> Join:
        """The ranks of a model may have different numbers of inputs from now on, until `leave`."""
        _refuse(flat)
        flat.ranks.joining = Join(flat, over_all, throw)
        return flat.ranks.joining

    def leave(self) -> None:
        """All ranks have joined, or one has raised."""
        ranks = self.flat.ranks
        ranks.joining, ranks.root, ranks.counted = None, 0, ranks.world_size

    @property
    def some_have_joined(self) -> bool:
        """Whether a rank had no more input in the last round."""
        return len(self.with_input) < self.flat.ranks.world_size

    def announce(self, kind: str, which: int = 0, flag: bool = False, more: Any = None) -> None:
        """Tells the ranks that have joined what this one is about to do.

        Args:
            which, flag, more: what the kind needs to know.
        """
        if self.shadowing or not (kind in PHASES or self.some_have_joined):
            return
        self._round(1 + KINDS.index(kind) + len(KINDS) * (2 * which + flag))
        if kind in SENDS_MORE and self.some_have_joined:
            self.flat.ranks.comm.exchange(pickle.dumps(more))

    def shadow(self) -> None:
        """This rank has joined: answers the others until all have."""
        self.shadowing = True
        self.flat.decided = None  # the others' passes decide from now on
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
        """What the ranks with input do; 0: there are none."""
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
        """Nothing: what it sends is announced by itself."""

    def _backward(self, *_: Any) -> None:
        """Nothing, as above."""

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
        """The others have forgotten what was reduced before: so does this rank."""
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
        assert attached is not None  # it has stepped
        attached.optimizer.zero_grad(set_to_none=False)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Leaves all ranks alike: what those that went on longest have."""
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
        """A step's count and what is offloaded are in the host's memory, which a device's ranks do not reach."""
        here = x.to(self.flat.device)
        self.flat.ranks.broadcast(here)
        if here is not x:
            x.copy_(here)


def _name(code: int) -> str:
    rest, kind = divmod(code - 1, len(KINDS))
    return f"{KINDS[kind]} ({rest // 2})"
