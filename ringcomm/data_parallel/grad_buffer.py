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
from collections.abc import Collection, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.data_parallel.group import uses
from ringcomm.data_parallel.sharded_gradient import ShardedGradient
from ringcomm.errors import InvalidArgumentError, RingcommError, UnsupportedError

if TYPE_CHECKING:
    from ringcomm.data_parallel.bucket import Bucket


# The reference count of an object that only a list holds, counted inside such a map.
_OWN_REFERENCES = next(map(sys.getrefcount, [object()]))
_grad_of = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")
_layout_of = operator.attrgetter("layout")


def _same(gradient: GradBuffer | None) -> GradBuffer | None:
    return gradient


def _kept(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the indices of the tensors that are also referenced from outside this list."""
    return [i for i, references in enumerate(map(sys.getrefcount, tensors)) if references > _OWN_REFERENCES]


class GradBuffer:
    """Buffers and state of one bucket's gradient.

    Args:
        tree: add up the backward passes between two reductions in a balanced binary tree, as the ranks' gradients are
            added. If the number of passes is a power of two, the sum's bits do not depend on how the passes are
            distributed over the ranks. The tree needs one buffer per level.

    Attributes:
        counts: with ``tree``, by parameter, the number of passes in its sums. A level of the tree holds a part for the
            parameter if the number has that bit set, and zeros otherwise.
        base: the count at the beginning of a pipeline step.
    """

    def __init__(self, bucket: Bucket, stage: int, tree: bool) -> None:
        self.bucket, self.stage, self.tree = bucket, stage, tree
        self.ranks, self.layout = bucket.ranks, bucket.layout
        self.dtype = bucket.types.master
        self.start, self.end = bucket.owned(stage)
        numel = self.layout.numel if stage < 2 else self.layout.shard_numel
        self._lie_in(self.ranks.empty(numel, self.dtype, bucket.device))
        self._means: list[torch.Tensor] = []  # the tensors in `p.grad`, unless they are `ShardedGradient`s
        self._addresses: list[int] = []  # addresses of `_means`
        self.plain = bucket.types.compute == self.dtype  # autograd can add into our buffers
        # A single parameter that fills the buffer is not packed: on the CPU its reduce_scatter costs less than packing
        # it first.
        alone = len(bucket.params) == 1 and bucket.layout.used_numel == bucket.layout.numel
        self.sent_as_it_is = alone and self.plain and stage > 0 and self.ranks.comm.engine == "cpu"
        self.views: list[torch.Tensor] | None = None
        # Whether `p.grad` differs from what was reduced: another type, or only a part of what the model's ranks have.
        self.uses_placeholders = stage > 0 or not self.plain or self.ranks.cuts_model
        named = zip(bucket.params, bucket.names, strict=True)
        self.placeholders = [ShardedGradient.of(p, name, self, i) for i, (p, name) in enumerate(named)]
        self.levels: list[torch.Tensor | None] = []  # local sums of 1, 2, 4, ... passes; without `tree` of any number
        self.counts = [0] * len(bucket.params)
        self.base = 0
        self.has_reduced = False
        self.contributed: set[int] = set()  # parameters with a gradient in the local sums
        self.has: set[int] = set()  # parameters with a reduced gradient
        self.shown: list[torch.Tensor | None] = [None] * len(bucket.params)  # what `expose_grads` put into p.grad
        self.in_place = False  # whether autograd adds directly to the local sums
        self.work: Any = None

    def _lie_in(self, buffer: torch.Tensor) -> None:
        """Sets the memory of the reduced gradient."""
        self.buffer = buffer
        self.reduced = self.buffer[self.start : self.end] if self.stage < 2 else self.buffer
        self.buffer._ringcomm_uses = uses(self.buffer)

    def _leave_buffer(self) -> None:
        """Switches to new memory if users still see the old one through slices of gradients or through what autograd
        saved."""
        own = [*map(operator.eq, map(torch.Tensor.data_ptr, self._means), self._addresses)]
        if uses(self.buffer) > self.buffer._ringcomm_uses + sum(own):
            self._lie_in(self.ranks.another(self.buffer).copy_(self.buffer))
            for i, is_own in enumerate(own):
                if is_own:
                    self._means[i].data = self._part(self.buffer, i)
                    self._addresses[i] = self._means[i].data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes that stay allocated."""
        return self.buffer.nbytes

    @property
    def has_local(self) -> bool:
        """Whether there are local sums that were not reduced yet."""
        return any(level is not None for level in self.levels)

    # ---- a backward pass ------------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Whether a backward pass is adding gradients now."""
        return len(self.bucket.noted) > 0

    def open(self, arrived: set[int]) -> None:
        """Prepares `p.grad` before the first gradient of a backward pass arrives, so that autograd adds to the right
        tensors.

        Args:
            arrived: the set to which parameters are added as their gradients arrive.
        """
        self.adopt_user_grads("backward", own=True)
        self.bucket.noted[:] = arrived, self.contributed
        self.in_place = self.plain and not self.tree and self.has_local
        if self.has_reduced or self.has_local:
            self._put(self._local_views() if self.in_place else [None] * len(self.shown))

    def pack(self, apart: bool = False, leaf: int | None = None) -> None:
        """Adds the gradients of a finished backward pass to the local sums.

        Args:
            apart: whether the pass is only a part of one, such as a pipeline stage's: parameters without a gradient
                here get theirs in another part.
            leaf: with ``apart``, the index of the micro-batch in the step; None: each parameter's next.
        """
        params = self.bucket.params
        with torch._C.DisableTorchFunctionSubclass():
            fresh = self._fresh([*map(_grad_of, params)])
        self.bucket.noted.clear()
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
                if self.in_place:  # with create_graph autograd allocates its own memory
                    self._part(local, i).copy_(grad)
                else:
                    self._part(local, i).add_(grad)
        with torch._C.DisableTorchFunctionSubclass():
            for i, _ in fresh:
                params[i].grad = None

    def _fresh(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
        """Returns the gradients left by autograd that are not in the local sums yet."""
        if self.views is None and {*map(type, grads)} == {torch.Tensor}:  # the common case, with few Python operations
            given: list[torch.Tensor] = [*grads]
            if not any(map(_requires_grad, given)) and {*map(_layout_of, given)} == {torch.strided}:
                return [*enumerate(given)]
        fresh = []
        for i, grad in enumerate(grads):
            if grad is None or isinstance(grad, ShardedGradient):
                continue
            if self.views is not None and grad is self.views[i]:
                continue
            if grad.layout != torch.strided:
                raise InvalidArgumentError(
                    f"backward: rank {self.ranks.rank} got a sparse gradient of {self.bucket.names[i]}, expected a "
                    "dense one; build its module with sparse=False"
                )
            fresh.append((i, grad.detach() if grad.requires_grad else grad))
        return fresh

    def expose_grads(self) -> None:
        """Sets `p.grad` to what users see between backward passes."""
        if self.has_reduced and len(self.has) == len(self.shown):
            self.shown = [*(self.placeholders if self.uses_placeholders else self._all_means())]
        else:
            self.shown = [self._shown(i) for i in range(len(self.shown))]
        if self.has_reduced or self.has_local:
            self._put(self.shown)

    def _put(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Assigns the tensors to `p.grad`."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for p, grad in zip(self.bucket.params, grads, strict=True):
                    p.grad = grad
        except RuntimeError:
            self.bucket.rebound("backward")  # raises if forward has cast a parameter
            raise

    def _shown(self, i: int) -> torch.Tensor | None:
        if self.has_reduced and i in self.has:
            return self.placeholders[i] if self.uses_placeholders else self._all_means()[i]
        if self.has_local and i in self.contributed:
            return self._local_views()[i] if self.plain and not self.tree else self.placeholders[i]
        return None

    def _local_views(self) -> list[torch.Tensor]:
        """Returns every parameter's part of the local sums, of which there is only one level."""
        if self.views is None:
            assert self.levels[0] is not None
            self.views = self.bucket.parts(self.levels[0])
        return self.views

    def _all_means(self) -> list[torch.Tensor]:
        """Returns every parameter's mean as a tensor for `p.grad`."""
        if not self._means:
            self._means = [self._new_mean(i) for i in range(len(self.shown))]
            self._addresses = [mean.data_ptr() for mean in self._means]
        return self._means

    def _new_mean(self, i: int) -> torch.Tensor:
        """Returns a tensor for `p.grad`. It is not a view, because torch refuses to detach a view in place."""
        return self.buffer.new_empty(0).set_(self._part(self.buffer, i))

    def drop(self) -> None:
        """Discards all gradients."""
        if self.work is not None:
            work, wire, out, _ = self.work
            self.work = None
            with contextlib.suppress(RingcommError):  # the caller does not want the result
                work.wait()
            self._give_back(wire, out, *self.levels)
            self._no_levels()
        self.shown = [None] * len(self.shown)
        self._leave({*range(len(self.shown))})
        self._give_back(*self.levels)
        self._no_levels()
        self.views = None
        self.bucket.noted.clear()
        self.has_reduced = False
        self.contributed.clear()
        self.has.clear()
        self._leave_buffer()
        self.changed()

    def _leave(self, forgotten: Collection[int]) -> None:
        """Copies the values of gradients that users still reference before those gradients are discarded."""
        for i in _kept(self._means):
            if i in forgotten and i in self.has:
                self._means[i].data = self._means[i].clone()
                self._means[i] = self._new_mean(i)
        kept: GradBuffer | None = None
        # Placeholders are exposed only with `uses_placeholders` or `tree`.
        for i in _kept(self.placeholders) if self.uses_placeholders or self.tree else ():
            if i not in forgotten:
                continue
            if kept is None and i in self.has:
                kept = copy.copy(self)
                kept.buffer = kept.reduced = self.reduced.clone()
                kept.has, kept.contributed, kept.levels, kept.work = set(self.has), set(), [], None
                kept.views, kept._means, kept.shown = None, [], []
            self.placeholders[i]._owner = partial(_same, kept if i in self.has else None)
            self.placeholders[i] = ShardedGradient.of(self.bucket.params[i], self.bucket.names[i], self, i)

    def reconcile(self) -> None:
        """Discards the gradients that the user has set to None."""
        if not (self.has_reduced or self.has_local):
            return
        held = self.has | self.contributed
        with torch._C.DisableTorchFunctionSubclass():
            gone = [i for i in held if self.bucket.params[i].grad is None]
        if gone and len(gone) == len(held):
            return self.drop()
        for i in gone:
            self.shown[i] = None
        self._leave({*gone})
        if not self.has_local:
            self._leave_buffer()
        for i in gone:
            self.has.discard(i)
            self.contributed.discard(i)
            self._zero(i)

    def adopt_user_grads(self, call: str, own: bool = False) -> None:
        """Takes over tensors that the user assigned to `p.grad`; discards gradients that were set to None.

        Args:
            own: whether to treat the tensor as this rank's own sum, to which backward adds, if there is neither a mean
                nor a sum.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grads = [*map(_grad_of, self.bucket.params)]
            if self._unchanged(grads):
                return
            if {*map(type, grads)} == {type(None)}:  # the common case, with few Python operations
                return self.drop()
            self.reconcile()
            if self.opened:
                return
            others = [(i, g) for i, g in enumerate(grads) if g is not None and not self._is_shown(i, g)]
            if len(others) > 1:  # the user may have swapped them
                others = [
                    (i, g if g is self.placeholders[i] or g.layout != torch.strided else g.clone()) for i, g in others
                ]
            if own and others and not (self.has_reduced or self.has_local):
                fresh = self._fresh(grads)
                self.contributed = {i for i, _ in fresh}
                self._push(self._packed(fresh))
                return
            for i, grad in others:
                self._adopt(i, grad, call)

    def _unchanged(self, grads: list[torch.Tensor | None]) -> bool:
        if not all(map(operator.is_, grads, self.shown)):
            return False
        if self.uses_placeholders or not self.has_reduced:
            return True
        if len(self.has) < len(grads):
            return all(map(self._is_shown, range(len(grads)), grads))
        return [*map(torch.Tensor.data_ptr, grads)] == self._addresses

    def _is_shown(self, i: int, grad: torch.Tensor | None) -> bool:
        """Whether a gradient is the tensor that `expose_grads` assigned, in the same memory; the user may have
        replaced `p.grad.data`."""
        if grad is not self.shown[i]:
            return False
        return grad is None or self.uses_placeholders or i not in self.has or grad.data_ptr() == self._addresses[i]

    def _adopt(self, i: int, grad: torch.Tensor, call: str) -> None:
        """Takes a user's tensor as a parameter's mean, or as its local sum if nothing was reduced yet."""
        if grad.layout != torch.strided:
            raise InvalidArgumentError(
                f"{call}: rank {self.ranks.rank} got a {grad.layout} tensor as the gradient of {self.bucket.names[i]}, "
                "expected a dense one; assign grad.to_dense()"
            )
        if not (self.has_reduced or self.has_local):
            self.buffer.zero_()
            self.has_reduced = True
        (self.has if self.has_reduced else self.contributed).add(i)
        if grad is not self.placeholders[i]:
            self.write(i, grad._read() if isinstance(grad, ShardedGradient) else grad.detach())
        if self._means:  # the previous mean may have been given other memory
            self._means[i] = self._new_mean(i)
        self.shown[i] = self.bucket.params[i].grad = self._shown(i)

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Marks the mean as changed, so that the cached gathered gradient and copies on the host are made again when
        needed."""
        # torch does not count changes made inside __torch_dispatch__.
        torch.autograd.graph.increment_version(self.reduced)
        if self.ranks.read is not None and self.ranks.read[0] is self:
            self.ranks.read = None

    def whole(self, i: int) -> torch.Tensor:
        """Returns a parameter's unsharded gradient in the master weights' type; a collective, unless it was gathered
        just before."""
        if self._is_local(i):
            parts = [self._part(level, i) for level in self.levels if level is not None]
            return reduce(lambda sums, level: level + sums, parts)  # in the order in which `_folded` adds
        if self.ranks.read is None or self.ranks.read[0] is not self:
            self.ranks.read = None  # keep at most one bucket unsharded at a time
            if self.stage > 0:
                self.ranks.count("gradient all_gather", self.layout.numel * self.dtype.itemsize)
            self.ranks.read = self, self.bucket.gather_owned(self.reduced)
        return self._part(self.ranks.read[1], i)

    def given_back(self) -> dict[int, torch.Tensor]:
        """Returns the unsharded `p.grad` tensors in new memory and in the module's type; a collective. They are the
        means of all ranks or, before a reduction, this rank's sums."""
        self.adopt_user_grads("unshard")
        dtype = self.bucket.dtype
        return {i: self.whole(i).to(dtype, copy=True) for i, grad in enumerate(self.shown) if grad is not None}

    def piece(self, i: int) -> tuple[torch.Tensor, int]:
        """Returns this rank's part of a parameter's gradient, flattened, and its offset in the gradient."""
        if self._is_local(i):
            levels = [level for level in self.levels if level is not None]
            if len(levels) > 1:
                raise InvalidArgumentError(
                    f"grad: rank {self.ranks.rank} got a change of the gradient of {self.bucket.names[i]}, which is a "
                    f"tree of {len(levels)} sums that were not reduced, expected a reduced one; change it after the "
                    "last backward"
                )
            return self._part(levels[0], i).view(-1), 0
        return self._own(i)

    def _own(self, i: int) -> tuple[torch.Tensor, int]:
        """Returns this rank's part of a parameter's mean, and its offset."""
        return self.layout.piece(self.reduced, self.start, i)

    def zero(self, i: int) -> None:
        """Sets a parameter's gradient to zero."""
        self._zero(i)
        self.changed()

    def _zero(self, i: int) -> None:
        if self.has_reduced:
            self._own(i)[0].zero_()
        for level in self.levels:
            if level is not None:
                self._part(level, i).zero_()

    def write(self, i: int, values: torch.Tensor) -> None:
        """Writes this rank's part of new values for a parameter's gradient."""
        if values.shape != self.layout.segments[i].shape:
            raise InvalidArgumentError(
                f"grad: rank {self.ranks.rank} got {tuple(values.shape)} as the gradient of {self.bucket.names[i]}, "
                f"expected {self.layout.segments[i].shape}; keep its shape"
            )
        piece, start = self.piece(i)
        piece.copy_(values.reshape(-1)[start : start + piece.numel()])
        self.changed()

    def _is_local(self, i: int) -> bool:
        """Whether a parameter has only this rank's sums, and no mean. Raises if it has neither."""
        if self.has_reduced and i in self.has:
            joining = self.ranks.joining
            if joining is not None and joining.some_have_joined and self.stage > 0:
                raise UnsupportedError(
                    f"grad: rank {self.ranks.rank} is inside of join, where ranks that have joined do not hear of a "
                    f"use of the gradient of {self.bucket.names[i]}, expected none; use ringcomm.clip_grad_norm_"
                )
            return False
        if self.has_local and i in self.contributed and not self.opened:
            return True
        raise InvalidArgumentError(
            f"grad: rank {self.ranks.rank} got the gradient of {self.bucket.names[i]}, which is forgotten or not "
            "complete, expected one that backward has left; read p.grad after backward"
        )

    # ---- between ranks --------------------------------------------------------------------------------------------

    def start_reduce(self) -> None:
        """Starts the reduction of the local sums; a rank without sums sends zeros."""
        local = self._folded()
        if local is None:
            local = self._new_whole()
            local.zero_()
        self.levels = [local]
        if self.views is not None:  # the local sums will be overwritten, so no view of them may remain in p.grad
            self.views, self.shown = None, [None] * len(self.shown)
            with torch._C.DisableTorchFunctionSubclass():
                for p in self.bucket.params:
                    p.grad = None
        if self.bucket.hook is not None:
            self.work = (self.bucket.hook(local), local, local, None)
            return
        wire, scales = self._on_the_wire(local)
        op = self.ranks.mean_op(wire.dtype)
        if self.stage == 0:
            self.work = (self.ranks.all_reduce(wire, op), wire, wire, scales)
        else:
            direct = not self.has_reduced and wire.dtype == self.dtype
            numel = self.layout.shard_numel
            out = self.reduced if direct else self.ranks.take(numel, wire.dtype, self.bucket.device)
            self.work = (self.ranks.reduce_scatter(wire, out, op), wire, out, scales)

    def finish_reduce(self) -> None:
        """Waits for the reduction and adds its result to the earlier means."""
        work, wire, out, scales = self.work
        work.wait()
        self.work = None
        self.ranks.average_replicas(out)
        target = self.buffer if self.stage == 0 else self.reduced
        mean = out if out.dtype == self.dtype else out.to(self.dtype)
        if self.bucket.hook is None:
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
        self.changed()
        self.has |= self.contributed
        self.contributed.clear()

    # ---- buffers --------------------------------------------------------------------------------------------------

    def _new_whole(self) -> torch.Tensor:
        if self.stage < 2 and not self.has_reduced and all(level is not self.buffer for level in self.levels):
            return self.buffer
        return self.ranks.take(self.layout.numel, self.dtype, self.bucket.device)

    def _give_back(self, *lent: torch.Tensor | None) -> None:
        """Returns buffers that were taken from the pool, each once."""
        for tensor in {id(each): each for each in lent}.values():
            if tensor is not None and hasattr(tensor, "_ringcomm_pool"):
                self.ranks.give(tensor)

    def _part(self, whole: torch.Tensor, i: int) -> torch.Tensor:
        segment = self.layout.segments[i]
        return whole[segment.offset : segment.end].view(segment.shape)

    def _packed(self, fresh: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Returns a whole buffer with these gradients, and zeros elsewhere."""
        if self.sent_as_it_is and fresh[0][1].is_contiguous():
            return fresh[0][1].view(-1)
        whole = self._new_whole()
        self.bucket.pack(fresh, whole)
        return whole

    def _push(self, sums: torch.Tensor) -> None:
        """Adds a pass's gradients as a leaf of the tree or, without a tree, as the only sums."""
        level = 0
        while self.tree and level < len(self.levels) and self.levels[level] is not None:
            before = self.levels[level]
            assert before is not None
            sums = self._added(before, sums)
            self.levels[level] = None
            level += 1
        self._hold(level, sums)
        self.counts = [count + 1 for count in self.counts]

    def _hold(self, level: int, sums: torch.Tensor) -> None:
        self.levels.extend([None] * (level + 1 - len(self.levels)))
        self.levels[level] = sums

    def _no_levels(self) -> None:
        self.levels, self.counts, self.base = [], [0] * len(self.counts), 0

    # Partial passes: each parameter has a tree of its own; all trees share the same buffers.

    def begin_parts(self) -> None:
        """Records the beginning of a pipeline step."""
        self.base = max(self.counts)

    def end_parts(self, leaves: int) -> None:
        """Ends a pipeline step of ``leaves`` micro-batches: parameters without a gradient in the last ones get zeros
        there."""
        if self.tree and self.has_local:
            for i in range(len(self.counts)):
                self._advance(i, self.base + leaves)
            self._free_levels()

    def _fills_a_level(self, fresh: Sequence[tuple[int, torch.Tensor]], leaf: int | None) -> bool:
        """Whether these gradients are the next leaf of every parameter."""
        expected = self.counts[0] if leaf is None else self.base + leaf
        return len(fresh) == len(self.counts) and all(count == expected for count in self.counts)

    def _advance(self, i: int, count: int) -> None:
        """Adds leaves of zeros to a parameter's tree until it has ``count`` leaves."""
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
        """Returns the buffers of levels in which no parameter has a part."""
        for level, whole in enumerate(self.levels):
            if whole is not None and not any(count >> level & 1 for count in self.counts):
                self._give_back(whole)
                self.levels[level] = None

    def _added(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        before.add_(after)
        self._give_back(after)
        return before

    def _folded(self) -> torch.Tensor | None:
        """Returns the sum of all local sums, adding the smallest subtrees first."""
        sums: torch.Tensor | None = None
        for level in self.levels:
            if level is not None:
                sums = level if sums is None else self._added(level, sums)
        return sums

    def _on_the_wire(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the sums in the type that is sent, and the factor by which each parameter's mean is to be
        multiplied."""
        dtype = self.bucket.types.wire
        if dtype == local.dtype:
            return local, None
        wire = self.ranks.take(local.numel(), dtype, local.device)
        if dtype.itemsize > 1:
            self.ranks.comm.pack([local], wire)
            return wire, None
        parts = [self._part(local, i) for i in range(len(self.bucket.params))]
        zero = local.new_zeros(())
        largest = torch.stack([part.abs().amax() if part.numel() else zero for part in parts]).to(torch.float32)
        self.ranks.reduce_over_all(largest, "max")
        scales = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
        wire.zero_()
        for i, part in enumerate(parts):
            self._part(wire, i).copy_(part / scales[i])
        return wire, scales
