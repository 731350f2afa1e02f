"""A flat group's gradient: from what autograd leaves in `p.grad` to the mean over all ranks, whole or this rank's
shard.

    autograd   p.grad of every parameter, in the type of the forward pass
    collect    packed and cast into `local`: this rank's sums over one or more backward passes
    launch     `local` on the wire: all_reduce (stage 0) or reduce_scatter (stages 1 to 3)
    settle     `reduced` += the mean; p.grad is a view of it (stage 0), or stands for a gradient that is in shards

Means are added to what was reduced before, and local sums to local sums, so every stage does the same arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.errors import InvalidArgumentError, RingcommError
from ringcomm.parallel.standin import PartialModelGradient, ShardedGradient

if TYPE_CHECKING:
    from ringcomm.parallel.group import FlatGroup


class Gradient:
    """Buffers and state of one group's gradient.

    Args:
        tree: add the backward passes between two reductions up in a balanced binary tree, as the ranks are. With a
            power of two of passes the sum's bits do not depend on how passes are dealt out to ranks; it costs one
            buffer for each level of the tree.

    Attributes:
        counts: with ``tree``, by parameter, how many passes its sums are of. A level of the tree has a part of it where
            the number has that bit, and zeros elsewhere.
        base: how many there were when a step of a pipeline began.
    """

    def __init__(self, group: FlatGroup, stage: int, tree: bool) -> None:
        self.group, self.stage, self.tree = group, stage, tree
        self.ranks, self.layout = group.ranks, group.layout
        self.dtype = group.types.master
        self.start, self.end = group.owned(stage)
        whole = stage < 2
        numel = self.layout.numel if whole else self.layout.shard_numel
        self.buffer = self.ranks.empty(numel, self.dtype, group.device).zero_()
        self.reduced = self.buffer[self.start : self.end] if whole else self.buffer
        self.plain = group.types.compute == self.dtype  # autograd can add into our buffers
        # One parameter that fills the buffer: on the cpu a reduce_scatter of it costs less than packing it before.
        alone = len(group.params) == 1 and group.layout.used_numel == group.layout.numel
        self.sent_as_it_is = alone and self.plain and stage > 0 and self.ranks.comm.kind == "cpu"
        self.views: list[torch.Tensor] | None = None
        self.standins = [ShardedGradient.of(p, name) for p, name in zip(group.params, group.names, strict=True)]
        self.levels: list[torch.Tensor | None] = []  # local sums of 1, 2, 4, ... passes; without `tree` of any
        self.counts = [0] * len(group.params)
        self.base = 0
        self.has_reduced = False
        self.contributed: set[int] = set()  # who has a gradient in the local sums
        self.has: set[int] = set()  # who has one in what was reduced
        self.opened = False
        self.shown: dict[int, torch.Tensor] = {}  # what `show` has put into p.grad
        self.in_place = False  # whether autograd adds to the local sums
        self.work: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that stay."""
        return self.buffer.nbytes

    @property
    def has_local(self) -> bool:
        """Whether there are sums that were not reduced."""
        return any(level is not None for level in self.levels)

    @property
    def has_any(self) -> set[int]:
        """Who has a gradient."""
        return self.has | self.contributed

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before the first gradient of a backward pass arrives: shows autograd what to add to."""
        self.take_in("backward")
        self.opened = True
        self.in_place = in_place = self.plain and not self.tree and self.has_local
        for i, p in enumerate(self.group.params):
            if in_place:
                assert self.views is not None
                p.grad = self.views[i]
            elif self.has_reduced or self.has_local:
                p.grad = None

    def close(self) -> None:
        """After `open`, when nothing has arrived."""
        self.opened = False
        self.show()

    def collect(self, apart: bool = False, leaf: int | None = None) -> None:
        """After the last gradient of a backward pass: adds them to the local sums.

        Args:
            apart: whether the pass is a part of one: parameters without a gradient get theirs from another part.
            leaf: with ``apart``, of which micro-batch of the step; None: each parameter's next.
        """
        params = self.group.params
        fresh = []
        for i, p in enumerate(params):
            if p.grad is None or isinstance(p.grad, ShardedGradient):
                continue
            if self.views is not None and p.grad is self.views[i]:
                continue
            if p.grad.layout != torch.strided:
                raise InvalidArgumentError(
                    f"backward: rank {self.ranks.rank} got a sparse gradient of {self.group.names[i]}, expected a "
                    "dense one; build its module with sparse=False"
                )
            fresh.append((i, p.grad.detach()))
        self.opened = False
        if not fresh:
            return
        if self.tree and apart and not self._fills_a_level(fresh, leaf):
            for i, grad in fresh:
                self._advance(i, self.counts[i] if leaf is None else self.base + leaf)
                self._add_leaf(i, grad)
            self._free_levels()
        elif self.tree or not self.has_local:
            self._push(self._packed(fresh))
        else:
            local = self.levels[0]
            assert local is not None
            for i, grad in fresh:
                if self.in_place:  # with create_graph autograd adds into memory of its own
                    self._part(local, i).copy_(grad)
                else:
                    self._part(local, i).add_(grad)
        for i, _ in fresh:
            params[i].grad = None

    def show(self) -> None:
        """Between backward passes: what users see as `p.grad`."""
        self.shown = {}
        for i, p in enumerate(self.group.params):
            if self.has_reduced and i in self.has:
                standing = self.stage > 0 or not self.plain
                self.shown[i] = self.standins[i] if standing else self._reduced_view(i)
            elif self.has_local and i in self.contributed:
                self.shown[i] = self.standins[i] if self.views is None else self.views[i]
            if self.has_reduced or self.has_local:
                p.grad = self.shown.get(i)

    def drop(self) -> None:
        """Forgets everything."""
        if self.work is not None:
            work, wire, out, _ = self.work
            self.work = None
            with contextlib.suppress(RingcommError):  # whoever forgets does not want the result
                work.wait()
            self._give_back(wire, out, *self.levels)
            self._no_levels()
        self._give_back(*self.levels)
        self._no_levels()
        self.views, self.shown = None, {}
        self.has_reduced = self.opened = False
        self.contributed.clear()
        self.has.clear()

    def reconcile(self) -> None:
        """Forgets what the user has set to None."""
        if not (self.has_reduced or self.has_local):
            return
        held = self.has | self.contributed
        gone = [i for i in held if self.group.params[i].grad is None]
        if len(gone) == len(held):
            return self.drop()
        for i in gone:
            self.has.discard(i)
            self.contributed.discard(i)
            for level in self.levels:
                if level is not None:
                    self._part(level, i).zero_()
            if self.has_reduced:
                self.zero_reduced(i)

    def take_in(self, call: str) -> None:
        """What the user has put in the place of a reduced gradient counts, where that is whole."""
        self.reconcile()
        if self.opened or not (self.has_reduced or self.has_local):
            return
        for i, p in enumerate(self.group.params):
            if p.grad is None or p.grad is self.shown.get(i):
                continue
            if self.stage > 0 or not self.plain or not self.has_reduced:
                raise InvalidArgumentError(
                    f"{call}: rank {self.ranks.rank} got another tensor as the gradient of {self.group.names[i]}, "
                    "expected the one that backward has left; change gradients before they are reduced, with "
                    "p.register_hook, or whole ones at stage 0"
                )
            self._reduced_view(i).copy_(p.grad)
            p.grad = self.shown[i] = self._reduced_view(i)
            self.has.add(i)

    # ---- between ranks --------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Starts the reduction of the local sums; of zeros where this rank has none."""
        local = self._folded()
        if local is None:
            local = self._new_whole()
            local.zero_()
        self.levels, self.views = [local], None
        if self.group.hook is not None:
            self.work = (self.group.hook(local), local, local, None)
            return
        wire, scales = self._on_the_wire(local)
        op = self.ranks.mean_op(wire.dtype)
        if self.stage == 0:
            self.work = (self.ranks.all_reduce(wire, op), wire, wire, scales)
        else:
            direct = not self.has_reduced and wire.dtype == self.dtype
            numel = self.layout.shard_numel
            out = self.reduced if direct else self.ranks.take(numel, wire.dtype, self.group.device)
            self.work = (self.ranks.reduce_scatter(wire, out, op), wire, out, scales)

    def settle(self) -> None:
        """Waits for the reduction, and adds its result to what was reduced before."""
        work, wire, out, scales = self.work
        work.wait()
        self.work = None
        self.ranks.average_replicas(out)
        target = self.buffer if self.stage == 0 else self.reduced
        mean = out if out.dtype == self.dtype else out.to(self.dtype)
        if self.group.hook is None:
            self.ranks.correct(mean, wire.dtype)
        if out.data_ptr() != target.data_ptr():
            if scales is not None:
                for fragment in self.layout.fragments(self.start, self.end):
                    mean[fragment.offset : fragment.offset + fragment.numel].mul_(scales[fragment.segment])
            if self.has_reduced:
                target.add_(mean)
            else:
                target.copy_(mean)
        self._give_back(wire, out, *self.levels)
        self._no_levels()
        self.has_reduced = True
        self.has |= self.contributed
        self.contributed.clear()

    def zero_reduced(self, i: int) -> None:
        """Makes one parameter's mean zero, as far as it is here."""
        segment = self.layout.segments[i]
        first, last = max(segment.offset, self.start), min(segment.end, self.end)
        if first < last:
            self.reduced[first - self.start : last - self.start].zero_()

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new_whole(self) -> torch.Tensor:
        if self.stage < 2 and not self.has_reduced and all(level is not self.buffer for level in self.levels):
            return self.buffer
        return self.ranks.take(self.layout.numel, self.dtype, self.group.device)

    def _give_back(self, *lent: torch.Tensor | None) -> None:
        """Returns what was taken from the pool, each once."""
        for tensor in {id(each): each for each in lent}.values():
            if tensor is not None and hasattr(tensor, "_ringcomm_pool"):
                self.ranks.give(tensor)

    def _part(self, whole: torch.Tensor, i: int) -> torch.Tensor:
        segment = self.layout.segments[i]
        return whole[segment.offset : segment.end].view(segment.shape)

    def _reduced_view(self, i: int) -> torch.Tensor:
        view = self._part(self.buffer, i)
        return view.as_subclass(PartialModelGradient) if self.ranks.cuts_model else view

    def _packed(self, fresh: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """A whole buffer with these gradients, and zeros elsewhere."""
        if self.sent_as_it_is and fresh[0][1].is_contiguous():
            return fresh[0][1].view(-1)
        whole = self._new_whole()
        self.group.pack(dict(fresh), whole)
        return whole

    def _push(self, sums: torch.Tensor) -> None:
        """Adds a pass's gradients as a leaf of the tree, or as the only sums there are."""
        level = 0
        while self.tree and level < len(self.levels) and self.levels[level] is not None:
            before = self.levels[level]
            assert before is not None
            sums = self._added(before, sums)
            self.levels[level] = None
            level += 1
        self._hold(level, sums)
        self.counts = [count + 1 for count in self.counts]
        if self.plain and not self.tree:
            self.views = [self._part(sums, i) for i in range(len(self.group.params))]

    def _hold(self, level: int, sums: torch.Tensor) -> None:
        self.levels.extend([None] * (level + 1 - len(self.levels)))
        self.levels[level] = sums

    def _no_levels(self) -> None:
        self.levels, self.counts, self.base = [], [0] * len(self.counts), 0

    # Parts of passes: each parameter has a tree of its own, all in the same buffers.

    def begin_parts(self) -> None:
        """A step of a pipeline begins."""
        self.base = max(self.counts)

    def end_parts(self, leaves: int) -> None:
        """It ends, after so many micro-batches: who was left out in the last ones has zeros there."""
        if self.tree and self.has_local:
            for i in range(len(self.counts)):
                self._advance(i, self.base + leaves)
            self._free_levels()

    def _fills_a_level(self, fresh: Sequence[tuple[int, torch.Tensor]], leaf: int | None) -> bool:
        """Whether these gradients are the next leaf of all parameters."""
        expected = self.counts[0] if leaf is None else self.base + leaf
        return len(fresh) == len(self.counts) and all(count == expected for count in self.counts)

    def _advance(self, i: int, count: int) -> None:
        """Adds leaves of zeros to a parameter's tree until it has so many."""
        while self.counts[i] < count:
            self._add_leaf(i, None)

    def _add_leaf(self, i: int, sums: torch.Tensor | None) -> None:
        """Adds a leaf to a parameter's tree; None: zeros."""
        level, emptied = 0, []
        while self.counts[i] >> level & 1:
            whole = self.levels[level]
            assert whole is not None
            before = self._part(whole, i)
            sums = before if sums is None else before.add_(sums)
            emptied.append(before)
            level += 1
        if level >= len(self.levels) or self.levels[level] is None:
            self._hold(level, self._new_whole().zero_())
        if sums is not None:
            whole = self.levels[level]
            assert whole is not None
            self._part(whole, i).copy_(sums)
        for before in emptied:
            before.zero_()
        self.counts[i] += 1

    def _free_levels(self) -> None:
        """Gives back the buffers of levels that no parameter has a part in."""
        for level, whole in enumerate(self.levels):
            if whole is not None and not any(count >> level & 1 for count in self.counts):
                self._give_back(whole)
                self.levels[level] = None

    def _added(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        before.add_(after)
        self._give_back(after)
        return before

    def _folded(self) -> torch.Tensor | None:
        """All local sums in one, the smallest subtrees first."""
        sums: torch.Tensor | None = None
        for level in self.levels:
            if level is not None:
                sums = level if sums is None else self._added(level, sums)
        return sums

    def _on_the_wire(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums in the type that travels, and by what each parameter's mean is to be multiplied."""
        dtype = self.group.types.wire
        if dtype == local.dtype:
            return local, None
        wire = self.ranks.take(local.numel(), dtype, local.device)
        if dtype.itemsize > 1:
            self.ranks.comm.pack([local], wire)
            return wire, None
        parts = [self._part(local, i) for i in range(len(self.group.params))]
        zero = local.new_zeros(())
        largest = torch.stack([part.abs().amax() if part.numel() else zero for part in parts]).to(torch.float32)
        self.ranks.reduce_over_all(largest, "max")
        scales = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
        wire.zero_()
        for i, part in enumerate(parts):
            self._part(wire, i).copy_(part / scales[i])
        return wire, scales
