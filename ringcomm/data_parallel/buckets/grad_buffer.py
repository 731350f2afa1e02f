"""A bucket's gradient, from what autograd leaves in `p.grad` to the mean over all ranks, unsharded or this rank's
shard.

    autograd           p.grad of every parameter, in the type of the forward pass
    pack               packed and cast into `local`: this rank's sums over one or more backward passes
    start_reduce       `local` on the wire: all_reduce (stage 0) or reduce_scatter (stages 1 to 3)
    finish_reduce      `reduced` += the mean
    expose_grads       p.grad is a view of it (stage 0), or a ShardedGradient
    adopt_user_grads   tensors that the user has assigned to p.grad are taken over

Means are added to earlier means and local sums to earlier local sums, so every stage does the same arithmetic.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import nn

from ringcomm.data_parallel.buckets.group import DataParallelGroup, OwnMemory, uses
from ringcomm.data_parallel.buckets.layout import FlatLayout
from ringcomm.data_parallel.buckets.sharded_gradient import ShardedGradient
from ringcomm.errors import InvalidArgumentError, RingcommError, UnsupportedError
from ringcomm.modules.precision import Types

# The reference count of an object that only a list holds, as `map(sys.getrefcount, ...)` counts it.
_OWN_REFERENCES = next(map(sys.getrefcount, [object()]))
_grad_of = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")
_layout_of = operator.attrgetter("layout")


def _same(gradient: GradBuffer | None) -> GradBuffer | None:
    """Returns its argument. A partial of it is called like a weak reference, but keeps the gradient alive."""
    return gradient


def _referenced_elsewhere(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the indices of the tensors that are also referenced from outside this list."""
    return [i for i, references in enumerate(map(sys.getrefcount, tensors)) if references > _OWN_REFERENCES]


class LocalSums:
    """This rank's sums of the backward passes since the last reduction, in unsharded buffers.

    Args:
        tree: add up the passes in a balanced binary tree, as the ranks' gradients are added. If the number of passes is
            a power of two, the sum's bits do not depend on how the passes are distributed over the ranks. The tree
            needs one buffer per level.
        arrival_sets: a list that the hooks of `_C.Arrivals` fill. Between the first gradient of a backward pass and
            `pack` it holds two sets: the parameters whose gradients have arrived, and those whose gradients are
            defined. Otherwise it is empty.

    Attributes:
        levels: the sums of 1, 2, 4, ... passes; without ``tree`` one sum of any number of passes.
        counts: with ``tree``, by parameter, the number of passes in its sums. Level k holds a part of the parameter's
            sum if bit k of the number is set, and zeros otherwise.
        base: the count at the beginning of a pipeline step.
        contributed: parameters with a gradient in the sums.
        nonzero_means: those of them whose mean in `p.grad` is not zero; see `GradBuffer._zero_sums_of_zeroed_means`.
        views: without ``tree``, every parameter's part of the only level, once some of them were put into `p.grad`.
    """

    def __init__(self, layout: FlatLayout, ranks: DataParallelGroup, tree: bool, arrival_sets: list[set[int]]) -> None:
        self.layout, self.ranks, self.tree, self.arrival_sets = layout, ranks, tree, arrival_sets
        self.levels: list[torch.Tensor | None] = []
        self.counts = [0] * len(layout.segments)
        self.base = 0
        self.contributed: set[int] = set()
        self.nonzero_means: set[int] = set()
        self.views: list[torch.Tensor] | None = None

    @property
    def held(self) -> list[torch.Tensor]:
        """The levels that have a sum."""
        return [level for level in self.levels if level is not None]

    def level(self, number: int) -> torch.Tensor:
        """Returns a level that has a sum."""
        found = self.levels[number]
        assert found is not None
        return found

    def parts_of(self, i: int) -> list[torch.Tensor]:
        """Returns a parameter's part of every level that has a sum."""
        return [self.layout.part(level, i) for level in self.held]

    def all_views(self) -> list[torch.Tensor]:
        """Returns every parameter's part of the only level."""
        if self.views is None:
            self.views = self.layout.parts(self.level(0))
        return self.views

    def push(self, sums: torch.Tensor) -> None:
        """Adds a pass's gradients as a leaf of the tree or, without a tree, as the only sums."""
        level = 0
        while self.tree and level < len(self.levels) and self.levels[level] is not None:
            sums = self._added(self.level(level), sums)
            self.levels[level] = None
            level += 1
        self._hold(level, sums)
        self.counts = [count + 1 for count in self.counts]

    def fold(self) -> torch.Tensor | None:
        """Returns the sum of all levels, adding the smallest subtrees first."""
        sums: torch.Tensor | None = None
        for level in self.held:
            sums = level if sums is None else self._added(level, sums)
        return sums

    def clear(self) -> None:
        """Forgets the levels, whose buffers were given back."""
        self.levels, self.counts, self.base = [], [0] * len(self.counts), 0
        self.nonzero_means.clear()

    def _hold(self, level: int, sums: torch.Tensor) -> None:
        self.levels.extend([None] * (level + 1 - len(self.levels)))
        self.levels[level] = sums

    def _added(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        before.add_(after)
        _give_back(self.ranks, after)
        return before

    # Partial passes: each parameter has its own tree; all trees share the same buffers.

    def adds_to_all(self, given: int, leaf: int | None) -> bool:
        """Whether a pass that left gradients of ``given`` parameters adds the next leaf to every parameter's tree, so
        that the gradients can be added as one buffer."""
        expected = self.counts[0] if leaf is None else self.base + leaf
        return given == len(self.counts) and all(count == expected for count in self.counts)

    def add_leaves(
        self, fresh: Sequence[tuple[int, torch.Tensor]], leaf: int | None, new: Callable[[], torch.Tensor]
    ) -> None:
        """Adds gradients to their parameters' trees, as the leaf of index ``leaf``; None: the next leaf of each tree.

        Args:
            new: returns memory for another level.
        """
        for i, grad in fresh:
            self._advance(i, self.counts[i] if leaf is None else self.base + leaf, new)
            self._add_leaf(i, grad, new)
        self._free_levels()

    def begin_step(self) -> None:
        """Records the beginning of a pipeline step."""
        self.base = max(self.counts)

    def end_step(self, leaves: int, new: Callable[[], torch.Tensor]) -> None:
        """Ends a pipeline step of ``leaves`` micro-batches: adds zeros for parameters that had no gradient in the last
        micro-batches."""
        if self.tree and self.held:
            for i in range(len(self.counts)):
                self._advance(i, self.base + leaves, new)
            self._free_levels()

    def _advance(self, i: int, count: int, new: Callable[[], torch.Tensor]) -> None:
        """Adds leaves of zeros to a parameter's tree until it has ``count`` leaves."""
        while self.counts[i] < count:
            self._add_leaf(i, None, new)

    def _add_leaf(self, i: int, sums: torch.Tensor | None, new: Callable[[], torch.Tensor]) -> None:
        """Adds a leaf to a parameter's tree; None: zeros."""
        level, emptied = 0, []
        while self.counts[i] >> level & 1:
            before = self.layout.part(self.level(level), i)
            sums = before if sums is None else before.add_(sums)
            emptied.append(before)
            level += 1
        if level >= len(self.levels) or self.levels[level] is None:
            self._hold(level, new().zero_())
        if sums is not None:
            self.layout.part(self.level(level), i).copy_(sums)
        for before in emptied:
            before.zero_()
        self.counts[i] += 1

    def _free_levels(self) -> None:
        """Returns the buffers of levels in which no parameter has a part."""
        for level, buffer in enumerate(self.levels):
            if buffer is not None and not any(count >> level & 1 for count in self.counts):
                _give_back(self.ranks, buffer)
                self.levels[level] = None


def _give_back(ranks: DataParallelGroup, *lent: torch.Tensor | None) -> None:
    """Returns buffers to the pool, except buffers that were not taken from it. The same buffer may be passed twice."""
    for tensor in {id(each): each for each in lent}.values():
        if tensor is not None and hasattr(tensor, "own") and tensor.own.pool is not None:
            ranks.give(tensor)


class PendingReduction(NamedTuple):
    """A reduction in flight.

    Attributes:
        work: the call to wait for.
        wire: the buffer that is sent.
        out: the buffer that gets the result; it may be ``wire``.
        scales: what each parameter's result is to be multiplied by; None: nothing.
        is_mean: whether the result is the mean already, because a communication hook has made it.
    """

    work: Any
    wire: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor | None = None
    is_mean: bool = False


class GradBuffer:
    """Buffers and state of one bucket's gradient.

    Args:
        params: the bucket's parameters, in the order of the layout's segments.
        tree, arrival_sets: see `LocalSums`.

    Attributes:
        buffer: the memory that stays: unsharded at stages 0 and 1, else this rank's shard.
        reduced: the part of it with the mean: all of it, at stage 1 this rank's shard.
        has_reduced: whether it has a mean; ``with_mean``: the parameters with one.
        sharded_grads: the `ShardedGradient` of every parameter.
        exposed: what `expose_grads` put into `p.grad`.
        means: the tensors for `p.grad` and their addresses, unless `p.grad` is a `ShardedGradient`.
        pending: the reduction in flight.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: FlatLayout,
        ranks: DataParallelGroup,
        types: Types,
        device: torch.device,
        stage: int,
        *,
        tree: bool,
        arrival_sets: list[set[int]],
    ) -> None:
        self.params, self.layout, self.ranks, self.types, self.stage = params, layout, ranks, types, stage
        self._use_buffer(ranks.empty(layout.numel if stage < 2 else layout.shard_numel, types.master, device))
        self.local = LocalSums(layout, ranks, tree, arrival_sets)
        self.sharded_grads = [ShardedGradient.of(self, i) for i in range(len(params))]
        self.has_reduced = False
        self.with_mean: set[int] = set()
        self.exposed: list[torch.Tensor | None] = [None] * len(params)
        self.means: tuple[list[torch.Tensor], list[int]] = [], []
        self.pending: PendingReduction | None = None

    def _use_buffer(self, buffer: torch.Tensor) -> None:
        """Sets the memory of the reduced gradient."""
        self.buffer = buffer
        start, end = self.layout.owned_range(self.ranks.rank, self.stage)
        self.reduced = self.buffer[start:end] if self.stage < 2 else self.buffer
        self.buffer.own = OwnMemory(uses(self.buffer), address=buffer.data_ptr())

    def _update_addresses(self) -> None:
        """Corrects the recorded addresses of the means if the whole buffer has moved, because a mean was sent to
        another process or put in shared memory with `share_memory_`."""
        distance = self.buffer.data_ptr() - self.buffer.own.address
        if distance:
            self.buffer.own.address += distance
            self.means[1][:] = [address and address + distance for address in self.means[1]]

    def _replace_kept_buffer(self) -> None:
        """Switches to new memory if the user can still see the old memory, through a slice of a gradient or a tensor
        that autograd has saved."""
        self._update_addresses()
        means, addresses = self.means
        own = [*map(operator.eq, map(torch.Tensor.data_ptr, means), addresses)]
        if not all(own):  # the user has given means other memory, as `p.grad.data = ...` and `module.to` do
            means[:] = [
                mean if is_own else self._new_mean(i) for i, (mean, is_own) in enumerate(zip(means, own, strict=True))
            ]
            own = [True] * len(own)
        if uses(self.buffer) > self.buffer.own.uses + sum(own):
            self._use_buffer(self.ranks.another(self.buffer).copy_(self.buffer))
            for i, is_own in enumerate(own):
                if is_own:
                    means[i].data = self.layout.part(self.buffer, i)
                    addresses[i] = means[i].data_ptr()

    def rename(self, layout: FlatLayout) -> None:
        """Takes a layout that differs in the parameters' names."""
        self.layout = self.local.layout = layout
        for grad, segment in zip(self.sharded_grads, layout.segments, strict=True):
            grad._name = segment.name

    def _name(self, i: int) -> str:
        return self.layout.segments[i].name

    @property
    def has_local(self) -> bool:
        """Whether there are local sums that were not reduced yet."""
        return any(level is not None for level in self.local.levels)

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a mean, and there are no local sums."""
        return not (self.with_mean or self.has_local)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the sums and the mean."""
        return self.types.master

    @cached_property
    def has_one_type(self) -> bool:
        """Whether gradients arrive in the type of the sums, so that autograd can add into our buffers."""
        return self.types.compute == self.types.master

    @cached_property
    def exposes_sharded(self) -> bool:
        """Whether `p.grad` is a `ShardedGradient` after a reduction, because the mean is sharded, has another type than
        `p.grad` must have, or the model is split over ranks."""
        return self.stage > 0 or not self.has_one_type or self.ranks.cuts_model

    @cached_property
    def skips_packing(self) -> bool:
        """Whether a single parameter fills the buffer and is not packed: on the CPU its reduce_scatter costs less than
        packing it first."""
        alone = len(self.params) == 1 and self.layout.used_numel == self.layout.numel
        return alone and self.has_one_type and self.stage > 0 and self.ranks.comm.engine == "cpu"

    # ---- a backward pass ------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a backward pass is adding gradients now."""
        return len(self.local.arrival_sets) > 0

    def open(self, arrived: set[int]) -> None:
        """Prepares `p.grad` before the first gradient of a backward pass arrives, so that autograd adds to the right
        tensors.

        Args:
            arrived: the set to which parameters are added as their gradients arrive.
        """
        self.adopt_user_grads("backward", own=True)
        local = self.local
        local.arrival_sets[:] = arrived, local.contributed
        if not self.is_empty:
            in_place = local.contributed if self.has_one_type and not local.tree and self.has_local else ()
            views = local.all_views() if in_place else []
            self._put([views[i] if i in in_place else None for i in range(len(self.exposed))])

    def pack(self, apart: bool = False, leaf: int | None = None) -> None:
        """Adds the gradients of a finished backward pass to the local sums.

        Args:
            apart: whether this is only a part of a backward pass, such as a pipeline stage's: parameters without a
                gradient here get one in another part.
            leaf: with ``apart``, the index of the micro-batch in the step; None: each parameter's next leaf.
        """
        params = self.params
        with torch._C.DisableTorchFunctionSubclass():
            fresh = self._fresh([*map(_grad_of, params)])
        self.local.arrival_sets.clear()
        if not fresh:
            return
        local = self.local
        if len(local.contributed) < len(params):  # after `p.set_` a gradient arrives without its hook being called
            local.contributed.update(i for i, _ in fresh)
        if local.tree and apart and not local.adds_to_all(len(fresh), leaf):
            local.add_leaves(fresh, leaf, self._new_buffer)
        elif local.tree or not self.has_local:
            local.push(self._packed(fresh))
        else:
            sums = local.level(0)
            # Autograd has added these gradients to the sums already; with create_graph it used memory of its own.
            in_place = self.has_one_type
            for i, grad in fresh:
                part = self.layout.part(sums, i)
                part.copy_(grad) if in_place else part.add_(grad)
        with torch._C.DisableTorchFunctionSubclass():
            for i, _ in fresh:
                params[i].grad = None

    def end_step(self, leaves: int) -> None:
        """Ends a pipeline step; see `LocalSums.end_step`."""
        self.local.end_step(leaves, self._new_buffer)

    def _fresh(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
        """Returns the gradients left by autograd that are not in the local sums yet."""
        views = self.local.views
        if views is None and {*map(type, grads)} == {torch.Tensor}:  # a fast path for the common case
            given: list[torch.Tensor] = [*grads]
            if not any(map(_requires_grad, given)) and {*map(_layout_of, given)} == {torch.strided}:
                return [*enumerate(given)]
        fresh = []
        for i, grad in enumerate(grads):
            if grad is None or isinstance(grad, ShardedGradient):
                continue
            if views is not None and grad is views[i]:
                continue
            if grad.layout != torch.strided:
                raise InvalidArgumentError(
                    f"backward: rank {self.ranks.rank} got a sparse gradient of {self._name(i)}, expected a "
                    "dense one; build its module with sparse=False"
                )
            fresh.append((i, grad.detach() if grad.requires_grad else grad))
        return fresh

    def expose_grads(self) -> None:
        """Sets `p.grad` to what users see between backward passes."""
        if self.has_reduced and len(self.with_mean) == len(self.exposed):
            self.exposed = [*(self.sharded_grads if self.exposes_sharded else self._all_means())]
        else:
            self.exposed = [self._grad_to_expose(i) for i in range(len(self.exposed))]
        if not self.is_empty:
            self._put(self.exposed)
        both = self.with_mean & self.local.contributed if self.has_reduced and not self.exposes_sharded else ()
        self.local.nonzero_means = {i for i in both if self.means[0][i].any()}

    def _zero_sums_of_zeroed_means(self) -> None:
        """Zeroes the local sums of parameters whose means were zeroed in place, as by zero_grad(set_to_none=False) or
        `p.grad.data.zero_()`: in torch, both are one tensor."""
        for i in {i for i in self.local.nonzero_means if not self.means[0][i].any()}:
            self._zero_sums(i)

    def _put(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Assigns the tensors to `p.grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            for p, grad in zip(self.params, grads, strict=True):
                p.grad = grad

    def _grad_to_expose(self, i: int) -> torch.Tensor | None:
        if self.has_reduced and i in self.with_mean:
            return self.sharded_grads[i] if self.exposes_sharded else self._all_means()[i]
        if self.has_local and i in self.local.contributed:
            return self.local.all_views()[i] if self.has_one_type and not self.local.tree else self.sharded_grads[i]
        return None

    def _all_means(self) -> list[torch.Tensor]:
        """Returns every parameter's mean as a tensor for `p.grad`."""
        if not self.means[0]:
            means = [self._new_mean(i) for i in range(len(self.exposed))]
            self.means = means, [mean.data_ptr() for mean in means]
        return self.means[0]

    def _new_mean(self, i: int) -> torch.Tensor:
        """Returns a tensor for `p.grad`. It is not a view, because torch refuses to detach a view in place."""
        return self.buffer.new_empty(0).set_(self.layout.part(self.buffer, i))

    def drop(self) -> None:
        """Discards all gradients."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with contextlib.suppress(RingcommError):  # the caller does not want the result
                pending.work.wait()
            self.ranks.wait_for_side_streams()
        self.exposed = [None] * len(self.exposed)
        self._detach_kept({*range(len(self.exposed))})
        self._give_buffers_back(pending)
        self.local.views = None
        self.local.arrival_sets.clear()
        self.has_reduced = False
        self.local.contributed.clear()
        self.with_mean.clear()
        self._replace_kept_buffer()
        self.changed()

    def _detach_kept(self, forgotten: Collection[int]) -> None:
        """Copies the values of gradients that users still reference before those gradients are discarded."""
        means, _ = self.means
        for i in _referenced_elsewhere(means):
            if i in forgotten and i in self.with_mean:
                means[i].data = means[i].clone()
                means[i] = self._new_mean(i)
        kept: GradBuffer | None = None
        # ShardedGradients are in `p.grad` only with `exposes_sharded` or `tree`.
        for i in _referenced_elsewhere(self.sharded_grads) if self.exposes_sharded or self.local.tree else ():
            if i not in forgotten:
                continue
            if kept is None and i in self.with_mean:
                kept = copy.copy(self)
                kept.buffer = kept.reduced = self.reduced.clone()
                kept.local, kept.pending = LocalSums(self.layout, self.ranks, False, []), None
                kept.with_mean, kept.means, kept.exposed = set(self.with_mean), ([], []), []
            self.sharded_grads[i]._owner = partial(_same, kept if i in self.with_mean else None)
            self.sharded_grads[i] = ShardedGradient.of(self, i)

    def reconcile(self) -> None:
        """Discards the gradients that the user has set to None."""
        if self.is_empty:
            return
        self._zero_sums_of_zeroed_means()
        held = self.with_mean | self.local.contributed
        with torch._C.DisableTorchFunctionSubclass():
            gone = [i for i in held if self.params[i].grad is None]
        if gone and len(gone) == len(held):
            return self.drop()
        for i in gone:
            self.exposed[i] = None
        self._detach_kept({*gone})
        if not self.has_local:
            self._replace_kept_buffer()
        for i in gone:
            self.with_mean.discard(i)
            self.local.contributed.discard(i)
            self._zero(i)

    def adopt_user_grads(self, call: str, own: bool = False) -> None:
        """Takes over tensors that the user assigned to `p.grad`; discards gradients that were set to None.

        Args:
            own: if there is neither a mean nor a sum yet, treat the tensors as this rank's own sums, to which backward
                adds.
        """
        self._zero_sums_of_zeroed_means()
        with torch._C.DisableTorchFunctionSubclass():
            grads = [*map(_grad_of, self.params)]
            if self._unchanged(grads):
                return
            if {*map(type, grads)} == {type(None)}:  # after zero_grad(); fast, because it is common
                return self.drop()
            self.reconcile()
            if self.is_open:
                return
            others = [(i, g) for i, g in enumerate(grads) if g is not None and not self._is_exposed(i, g)]
            if len(others) > 1:  # the user may have swapped them
                others = [
                    (i, g if g is self.sharded_grads[i] or g.layout != torch.strided else g.clone()) for i, g in others
                ]
            are_means = any(isinstance(g, ShardedGradient) for g in grads)  # kept from an earlier pass
            if own and others and self.is_empty and not are_means:
                fresh = self._fresh(grads)
                self.local.contributed = {i for i, _ in fresh}
                self.local.push(self._packed(fresh))
                return
            for i, grad in others:
                self._adopt(i, grad, call)

    def sums_were_replaced(self, sums: Collection[int]) -> bool:
        """Whether the user has replaced all sums, before they were reduced, by other gradients.

        Args:
            sums: the storages of all buckets' sums. A gradient in one of them is a sum, of whatever parameter.
        """
        if self.has_reduced or self.is_open or not self.has_local:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            grads = [p.grad for p in self.params if p.grad is not None]
        return bool(grads) and not any(_is_sum(grad, sums) for grad in grads)

    def facts_of_grads(self) -> list[str]:
        """Returns a line for each gradient, with a checksum of its values."""
        found = []
        for segment, p in zip(self.layout.segments, self.params, strict=True):
            if p.grad is not None:
                values = segment.flatten(p.grad.detach()).cpu().contiguous()
                checksum = zlib.crc32(values.view(torch.uint8).numpy())
                found.append(f"a gradient of {segment.name} with checksum {checksum}")
        return found

    def _unchanged(self, grads: list[torch.Tensor | None]) -> bool:
        if not all(map(operator.is_, grads, self.exposed)):
            return False
        if self.exposes_sharded or not self.has_reduced:
            return True
        self._update_addresses()
        if len(self.with_mean) < len(grads):
            return all(map(self._is_exposed, range(len(grads)), grads))
        return [*map(torch.Tensor.data_ptr, grads)] == self.means[1]

    def _is_exposed(self, i: int, grad: torch.Tensor | None) -> bool:
        """Whether a gradient is the tensor that `expose_grads` assigned, in the same memory; the user may have
        replaced `p.grad.data`."""
        if grad is not self.exposed[i]:
            return False
        return grad is None or self.exposes_sharded or i not in self.with_mean or grad.data_ptr() == self.means[1][i]

    def _adopt(self, i: int, grad: torch.Tensor, call: str) -> None:
        """Takes a user's tensor as a parameter's mean, or as its local sum if nothing was reduced yet."""
        if grad.layout != torch.strided:
            raise InvalidArgumentError(
                f"{call}: rank {self.ranks.rank} got a {grad.layout} tensor as the gradient of {self._name(i)}, "
                "expected a dense one; assign grad.to_dense()"
            )
        if self.is_empty:
            self.buffer.zero_()
            self.has_reduced = True
        (self.with_mean if self.has_reduced else self.local.contributed).add(i)
        if grad is not self.sharded_grads[i]:
            self.write(i, grad._read() if isinstance(grad, ShardedGradient) else grad.detach())
        if self.means[0]:  # the previous mean may have been given other memory
            self.means[0][i] = self._new_mean(i)
        self.exposed[i] = self.params[i].grad = self._grad_to_expose(i)

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Marks the mean as changed, so that the cached gathered gradient and host copies become invalid."""
        # Done here, because torch does not count changes made inside __torch_dispatch__.
        torch.autograd.graph.increment_version(self.reduced)
        if self.ranks.read is not None and self.ranks.read[0] is self:
            self.ranks.read = None

    def unsharded(self, i: int) -> torch.Tensor:
        """Returns a parameter's unsharded gradient in the master weights' type; a collective, unless it was gathered
        just before."""
        if self._is_local(i):
            return reduce(lambda sums, level: level + sums, self.local.parts_of(i))  # in the order of `LocalSums.fold`
        if self.ranks.read is None or self.ranks.read[0] is not self:
            self.ranks.read = None  # keep at most one bucket unsharded at a time
            if self.stage > 0:
                self.ranks.count("gradient all_gather", self.layout.numel * self.dtype.itemsize)
            self.ranks.read = self, self._gathered()
        return self.layout.part(self.ranks.read[1], i)

    def _gathered(self) -> torch.Tensor:
        if self.stage == 0:
            return self.reduced
        return self.ranks.gather_apart(self.reduced, self.reduced.device, self.stage)

    def unsharded_grads(self, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Returns the unsharded `p.grad` tensors in new memory and in the module's type; a collective. They are the
        means of all ranks or, before a reduction, this rank's sums."""
        self.adopt_user_grads("unshard")
        return {i: self.unsharded(i).to(dtype, copy=True) for i, grad in enumerate(self.exposed) if grad is not None}

    def piece(self, i: int) -> tuple[torch.Tensor, int]:
        """Returns this rank's part of a parameter's gradient, flattened, and its offset in the gradient."""
        if self._is_local(i):
            parts = self.local.parts_of(i)
            if len(parts) > 1:
                raise InvalidArgumentError(
                    f"grad: rank {self.ranks.rank} got a change of the gradient of {self._name(i)}, which still "
                    f"consists of {len(parts)} partial sums, expected a reduced gradient; change it after the last "
                    "backward"
                )
            return self.layout.segments[i].in_memory_order(parts[0]).view(-1), 0
        return self._own_piece(i)

    def _own_piece(self, i: int) -> tuple[torch.Tensor, int]:
        """Returns this rank's part of a parameter's mean, and its offset."""
        return self.layout.piece(self.reduced, self.layout.owned_range(self.ranks.rank, self.stage)[0], i)

    def zero(self, i: int) -> None:
        """Sets a parameter's gradient to zero; inside `join`, if it is a mean, also on the ranks that have joined."""
        if i in self.with_mean:
            self.ranks.announce("zero", more=self._name(i))
        self._zero(i)
        self.changed()

    def _zero(self, i: int) -> None:
        if self.has_reduced:
            self._own_piece(i)[0].zero_()
        self._zero_sums(i)

    def _zero_sums(self, i: int) -> None:
        self.local.nonzero_means.discard(i)
        if i in self.with_mean:
            self.local.contributed.discard(i)
        for part in self.local.parts_of(i):
            part.zero_()

    def zero_sums_if_zero(self, i: int, values: torch.Tensor | float) -> None:
        """Zeroes a parameter's local sums if its mean was set to, or multiplied by, values that are all zero."""
        if i in self.with_mean and i in self.local.contributed and not torch.as_tensor(values).any():
            self._zero_sums(i)

    def write(self, i: int, values: torch.Tensor) -> None:
        """Writes this rank's part of new values for a parameter's gradient."""
        if values.shape != self.layout.segments[i].shape:
            raise InvalidArgumentError(
                f"grad: rank {self.ranks.rank} got {tuple(values.shape)} as the gradient of {self._name(i)}, "
                f"expected {self.layout.segments[i].shape}; keep its shape"
            )
        piece, start = self.piece(i)
        piece.copy_(self.layout.segments[i].flatten(values)[start : start + piece.numel()])
        self.zero_sums_if_zero(i, values)
        self.changed()

    def _is_local(self, i: int) -> bool:
        """Whether a parameter has only this rank's sums, and no mean. Raises if it has neither."""
        if self.has_reduced and i in self.with_mean:
            joining = self.ranks.joining
            if joining is not None and joining.some_have_joined and self.stage > 0:
                raise UnsupportedError(
                    f"grad: rank {self.ranks.rank} read the gradient of {self._name(i)} inside join, where ranks that "
                    "have joined cannot take part in the gather; use ringcomm.clip_grad_norm_, or read it after join"
                )
            return False
        if self.has_local and i in self.local.contributed and not self.is_open:
            return True
        raise InvalidArgumentError(
            f"grad: rank {self.ranks.rank} got the gradient of {self._name(i)}, which was discarded or is not "
            "complete, expected one that backward has left; read p.grad after backward"
        )

    # ---- between ranks --------------------------------------------------------------------------------------------

    def start_reduce(self, hook: Callable[[torch.Tensor], Any] | None = None) -> None:
        """Starts the reduction of the local sums; a rank without sums sends zeros.

        Args:
            hook: starts the reduction instead of the communicator, and computes the mean; see comm_hook.py.
        """
        local = self.local.fold()
        if local is None:
            local = self._new_buffer()
            local.zero_()
        self.local.levels = [local]
        if self.local.views is not None:  # the reduction overwrites the sums, so p.grad must not view them
            self.local.views, self.exposed = None, [None] * len(self.exposed)
            with torch._C.DisableTorchFunctionSubclass():
                for p in self.params:
                    p.grad = None
        if hook is not None:
            self.pending = PendingReduction(hook(local), local, local, is_mean=True)
            return
        wire, scales = self._on_the_wire(local)
        op = self.ranks.mean_op(wire.dtype)
        if self.stage == 0:
            self.pending = PendingReduction(self.ranks.all_reduce(wire, op), wire, wire, scales)
        else:
            direct = not self.has_reduced and wire.dtype == self.dtype
            numel = self.layout.shard_numel
            out = self.reduced if direct else self.ranks.take(numel, wire.dtype, self.buffer.device)
            self.pending = PendingReduction(self.ranks.reduce_scatter(wire, out, op), wire, out, scales)

    def finish_reduce(self) -> None:
        """Waits for the reduction and adds its result to the earlier means."""
        pending = self.pending
        assert pending is not None
        pending.work.wait()
        self.pending = None
        out, scales = pending.out, pending.scales
        self.ranks.average_replicas(out)
        target = self.buffer if self.stage == 0 else self.reduced
        mean = out if out.dtype == self.dtype else out.to(self.dtype)
        if not pending.is_mean:
            self.ranks.correct(mean, pending.wire.dtype)
        if out.data_ptr() != target.data_ptr():
            if scales is not None:
                for fragment in self.layout.fragments(*self.layout.owned_range(self.ranks.rank, self.stage)):
                    mean[fragment.offset : fragment.offset + fragment.numel].mul_(scales[fragment.segment])
            if self.has_reduced:
                target.add_(mean)
            else:
                target.copy_(mean)
        self._give_buffers_back(pending)
        self.has_reduced = True
        self.changed()
        self.with_mean |= self.local.contributed
        self.local.contributed.clear()

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new_buffer(self) -> torch.Tensor:
        if self.stage < 2 and not self.has_reduced and all(level is not self.buffer for level in self.local.levels):
            return self.buffer
        return self.ranks.take(self.layout.numel, self.dtype, self.buffer.device)

    def _give_buffers_back(self, pending: PendingReduction | None) -> None:
        """Returns the buffers of the local sums, and those of a reduction that has ended, to the pool."""
        lent = () if pending is None else (pending.wire, pending.out)
        _give_back(self.ranks, *lent, *self.local.levels)
        self.local.clear()

    def _packed(self, fresh: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Returns an unsharded buffer with these gradients, and zeros elsewhere."""
        if self.skips_packing:
            grad = self.layout.segments[fresh[0][0]].in_memory_order(fresh[0][1])
            if grad.is_contiguous():
                return grad.view(-1)
        buffer = self._new_buffer()
        self._fill(buffer, fresh)
        return buffer

    def _fill(self, buffer: torch.Tensor, grads: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies gradients, given by segment, into an unsharded buffer; parameters without a gradient get zeros."""
        parts, gaps = self._parts_of(buffer)
        if len(grads) < len(parts):
            given = {i for i, _ in grads}
            gaps = [*gaps, *(part for i, part in enumerate(parts) if i not in given)]
            parts = [parts[i] for i, _ in grads]
        if gaps:
            torch._foreach_zero_(gaps)
        torch._foreach_copy_(parts, [grad for _, grad in grads])

    def _parts_of(self, buffer: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns every parameter's part of a buffer, and the padding; cached per buffer, because buffers are
        reused."""
        known = buffer.own.parts
        if self not in known:
            before = uses(buffer)
            # The parts must not reference the buffer, because the buffer references them.
            known[self] = self.layout.parts_and_padding(buffer.new_empty(0).set_(buffer))
            buffer.own.uses += uses(buffer) - before
        return known[self]

    def _on_the_wire(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the sums in the type that is sent, and the factor by which each parameter's mean is to be
        multiplied."""
        dtype = self.types.wire
        if dtype == local.dtype:
            return local, None
        wire = self.ranks.take(local.numel(), dtype, local.device)
        if dtype.itemsize > 1:
            self.ranks.comm.pack([local], wire)
            return wire, None
        parts = [self.layout.part(local, i) for i in range(len(self.params))]
        zero = local.new_zeros(())
        largest = torch.stack([part.abs().amax() if part.numel() else zero for part in parts]).to(torch.float32)
        self.ranks.reduce_over_all(largest, "max")
        scales = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
        wire.zero_()
        for i, part in enumerate(parts):
            self.layout.part(wire, i).copy_(part / scales[i])
        return wire, scales


def adopt_user_grads(gradients: Collection[GradBuffer], call: str) -> None:
    """`GradBuffer.adopt_user_grads` for several buckets, before a step. If the user has replaced all local sums of a
    bucket, the new tensors are taken as means, and the ranks check that they have the same ones.

    Raises: MismatchError: the ranks have different means.
    """
    sums = {sum.untyped_storage()._cdata for each in gradients for sum in each.local.held}
    replaced = [each for each in gradients if each.sums_were_replaced(sums)]
    copy_exchanged_grads(gradients)
    if replaced:
        facts = [fact for each in replaced for fact in each.facts_of_grads()]
        replaced[0].ranks.agree(call, facts, "assign the mean over all ranks, the same on every rank")
    for each in replaced:
        each.drop()
    for each in gradients:
        each.adopt_user_grads(call)


def _is_sum(grad: torch.Tensor, sums: Collection[int]) -> bool:
    """Whether a gradient is this rank's sum or a view of it, and not a mean; ``sums``: the storages of the sums."""
    if isinstance(grad, ShardedGradient):
        home = grad._owner()
        return isinstance(home, GradBuffer) and not home.has_reduced
    return grad.layout == torch.strided and grad.untyped_storage()._cdata in sums


def copy_exchanged_grads(gradients: Collection[GradBuffer]) -> None:
    """Copies gradients that the user has assigned to other parameters, as in ``a.grad, b.grad = b.grad, a.grad``,
    because adopting one of them would overwrite the other."""
    if all(each.is_empty for each in gradients):
        return
    with torch._C.DisableTorchFunctionSubclass():
        changed = [each for each in gradients if not each._unchanged([*map(_grad_of, each.params)])]
        if not changed:
            return
        buffers = [buffer for each in gradients for buffer in (each.buffer, *each.local.levels) if buffer is not None]
        homes = {buffer.untyped_storage()._cdata for buffer in buffers}
        found = [
            p
            for each in changed
            for i, p in enumerate(each.params)
            if p.grad is not None and p.grad.layout == torch.strided and not each._is_exposed(i, p.grad)
        ]
        grads = [p.grad for p in found]
        copies = [
            g.clone() if isinstance(g, ShardedGradient) or g.untyped_storage()._cdata in homes else g for g in grads
        ]
        for p, g in zip(found, copies, strict=True):
            p.grad = g


def sync_grads_from_root(gradients: Sequence[GradBuffer], values: bool = False) -> None:
    """Inside `join`, once a rank has joined: makes ranks that have joined discard the gradients that a rank with input
    has discarded; a collective.

    Args:
        values: whether, at stage 0, to copy that rank's gradients, too, since a program changes them without a message.
    """
    joining = gradients[0].ranks.joining if gradients else None
    if joining is None or not joining.some_have_joined:
        return
    mine = bytes(i in each.with_mean for each in gradients for i in range(len(each.params)))
    roots = iter(joining.ranks.comm.exchange(mine)[joining.root])
    for each in gradients if joining.shadowing else ():
        with torch._C.DisableTorchFunctionSubclass():
            for i, (p, kept) in enumerate(zip(each.params, roots, strict=False)):
                if i in each.with_mean and not kept:
                    p.grad = None
        each.reconcile()
    for each in gradients if values and gradients[0].stage == 0 else ():
        if each.has_reduced:
            each.ranks.broadcast(each.reduced)
            each.changed()
