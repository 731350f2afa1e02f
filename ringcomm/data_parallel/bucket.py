"""Parameters of one type that travel together, and the flat buffers that hold them.

    weight   in the type of the forward pass; the parameters are views of it. Whole at stages 0 to 2, a shard at 3
    master   in the type of the optimizer, where that is another or lies elsewhere; else the optimizer's part of weight
    gradient see grad_buffer.py

What a rank's optimizer works on, the owned range, is the whole buffer at stage 0 and this rank's shard from 1 on.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ringcomm.data_parallel.grad_buffer import GradBuffer
from ringcomm.data_parallel.group import DONE, DataParallelGroup, uses
from ringcomm.data_parallel.layout import FlatLayout, Run
from ringcomm.data_parallel.meta import fill_unmade, give_memory
from ringcomm.data_parallel.precision import Types
from ringcomm.data_parallel.shard_spec import is_primary_copy
from ringcomm.data_parallel.sharded_parameter import ShardedParameter, Window, replace_data
from ringcomm.errors import InvalidArgumentError

_F = TypeVar("_F", bound=Callable[..., Any])
LAST_STAGE = 3
_WINDOWS_EACH = 8  # that are kept for each parameter at most
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_dtype_of = operator.attrgetter("dtype")
_unflatten = torch._C._nn.unflatten_dense_tensors  # views of one behind the other, in shapes that are given


def in_transform() -> bool:
    """Whether a transform of torch.func runs: vmap, grad, jacrev, ..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _untransformed(function: _F) -> _F:
    """Lets a function that moves parameters do so inside of transforms of torch.func, which know nothing of it."""

    @functools.wraps(function)
    def moved(*args: Any, **kwargs: Any) -> Any:
        if not in_transform():
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return cast(_F, moved)


def accumulator_of(p: torch.Tensor) -> Any:
    """The node of autograd that adds a gradient to ``p.grad``."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        return p.view_as(p).grad_fn.next_functions[0][0]


def _pieces(layout: FlatLayout, nothing: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors without memory in the shapes that follow each other in a whole buffer, padding too, and where the
    parameters are among them."""
    found: list[torch.Tensor] = []
    at: list[int] = []
    end = 0
    for segment in layout.segments:
        found += [nothing.expand(segment.offset - end)] if segment.offset > end else []
        at.append(len(found))
        found.append(nothing.expand(segment.shape))
        end = segment.end
    return found + ([nothing.expand(layout.numel - end)] if layout.numel > end else []), at


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage that begins and ends with it: what saves tensors looks at their storages."""
    nbytes = torch.empty(0, dtype=torch.uint8, device=part.device)
    nbytes.set_(part.untyped_storage(), part.storage_offset() * part.itemsize, (part.nbytes,))
    return part.new_empty(0).set_(torch.from_dlpack(nbytes).untyped_storage(), 0, part.shape)


class Bucket:
    """One flat layout with its buffers, placed for a stage.

    Args:
        params: by segment.
        tree: see `Gradient`.
        master_device: where master weights and the optimizer's state lie; None: beside the weights.
        send: whether all ranks get the first one's values.
        device: where parameters on meta get their memory, between `open` and `close`; None: all have theirs.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        ranks: DataParallelGroup,
        types: Types,
        stage: int,
        *,
        tree: bool = False,
        master_device: torch.device | None = None,
        send: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.layout, self.params, self.ranks, self.types = layout, list(params), ranks, types
        self.names = [segment.name for segment in layout.segments]
        self.device = params[0].device if device is None else device
        self.dtype = params[0].dtype  # that the module was built in
        self.trainable = params[0].requires_grad
        self.tree = tree
        self.master_device = master_device
        self.gathering: Any = None  # the all_gather in flight
        # Between the first gradient of a backward pass and `collect`: the parameters whose gradients have come, and
        # those whose gradients are defined; see `_C.Arrivals`.
        self.noted: list[set[int]] = []
        self.number = 0  # among the model's buckets
        self.hook: Callable[[torch.Tensor], Any] | None = None  # reduces in the communicator's place; see comm_hook.py
        self._classes = [type(p) for p in params]
        self._nothing = (
            torch.full((), math.nan if types.compute.is_floating_point else -1).to(types.compute).to(self.device)
        )
        self.unit: Any = None  # that it belongs to
        self.borrowed = False  # whether a module outside of the unit has read a parameter
        self._pieces, self._at = _pieces(layout, self._nothing)
        self.stage = stage
        self._opened: torch.Tensor | None = None
        self._unmade: set[int] | None = None  # parameters that come from meta, until `close`
        if device is not None:
            self._unmade = {i for i, p in enumerate(params) if p.is_meta}
            for i in self._unmade:
                give_memory(self.params[i], self.names[i], device, ranks.rank)
            return
        values = ranks.empty(layout.numel, types.master, self.device).zero_()
        for p, segment in zip(params, layout.segments, strict=True):
            values[segment.offset : segment.end].copy_(p.detach().reshape(-1))
        if send:
            ranks.broadcast(values)
        self._settle(values)

    def _settle(self, values: torch.Tensor) -> None:
        self._place(self.stage, values)
        # Kept, for autograd does not: what adds gradients to parameters, in their final type, with our hooks.
        self.accumulators = [accumulator_of(p) for p in self.params] if self.trainable else []

    # ---- parameters from the meta device --------------------------------------------------------------------------

    def open(self) -> None:
        """Gives all parameters memory, in the type that they were built in, to be initialised in."""
        if self._unmade is None or self._opened is not None:
            return
        self._opened = self.ranks.empty(self.layout.numel, self.params[0].dtype, self.device).zero_()
        for i, p in enumerate(self.params):
            part = self.part(self._opened, i)
            with torch.no_grad():
                fill_unmade(part, p) if i in self._unmade else part.copy_(p)
            p.data = part

    def close(self, send: bool) -> None:
        """Keeps this rank's part of what `open` has made.

        Args:
            send: whether all ranks get the first one's values.
        """
        if self._opened is not None:
            values, self._opened, self._unmade = self._opened, None, None
            if send:
                self.ranks.broadcast(values)
            self._settle(values)

    # ---- placement ------------------------------------------------------------------------------------------------

    def owned(self, stage: int) -> tuple[int, int]:
        """The range of the buffer that this rank's optimizer works on at a stage."""
        return (0, self.layout.numel) if stage == 0 else self.layout.shard_range(self.ranks.rank)

    def _place(self, stage: int, values: torch.Tensor) -> None:
        """Makes the buffers of a stage from the whole master weights."""
        self.stage = stage
        self._windows: dict[Window, torch.Tensor] = {}
        self.start, self.end = self.owned(stage)
        compute, numel = self.types.compute, self.layout.numel
        self.separate = self.types.master != compute or self.master_device is not None
        if self.separate:
            where = self.master_device or self.device
            pinned = where.type == "cpu" and self.device.type == "cuda"
            self.master = torch.empty(self.end - self.start, dtype=self.types.master, device=where, pin_memory=pinned)
            self.master.copy_(values[self.start : self.end])
        if stage == LAST_STAGE:
            self.weight = self.ranks.empty(self.layout.shard_numel, compute, self.device)
            self.weight.copy_(values[self.start : self.end])
            reuse = values.dtype == compute and values.untyped_storage().resizable()
            self.whole = values if reuse else torch.empty(numel, dtype=compute, device=self.device)
            self._views = self.parts(self.whole)
            self._own_uses = uses(self.whole) + len(self.params)  # while parameters are bound to it
            self._shapes = [self._nothing.expand(segment.shape) for segment in self.layout.segments]
            self._free()
        else:
            reuse = values.dtype == compute
            self.whole = values if reuse else self.ranks.empty(numel, compute, self.device).copy_(values)
            self.weight = self.whole[self.start : self.end]
            self._views = self.parts(self.whole)
            self._addresses = [view.data_ptr() for view in self._views]
            self._bind()
        if not self.separate:
            self.master = self.weight
        self._gradient = GradBuffer(self, stage, self.tree) if self.trainable else None

    def _bind(self) -> None:
        """Parameters that can be computed with."""
        for p, kind, view in zip(self.params, self._classes, self._views, strict=True):
            p.__class__ = kind
            p.data = view

    def _free(self) -> None:
        """Parameters that have a shape and no values: not a number to who looks all the same."""
        for p, kind, nothing in zip(self.params, self._classes, self._shapes, strict=True):
            p.__class__ = kind
            p.data = nothing
            p.__class__ = ShardedParameter
        self.whole.untyped_storage().resize_(0)

    def restage(self, stage: int) -> None:
        """Moves the buffers to another stage; gradients are forgotten."""
        self.adopt_writes("restage")
        values = self.ranks.empty(self.layout.numel, self.types.master, self.device)
        values.copy_(self.gather_owned(self.master))
        self._place(stage, values)

    def give_back(self) -> None:
        """Makes the parameters plain tensors with memory of their own: the master weights, in the type that the module
        was built in, and the whole gradients; a collective."""
        self.adopt_writes("unshard")
        gradients = self.gradient.given_back() if self.trainable else {}
        whole = self.gather_owned(self.master)
        for i, (p, kind) in enumerate(zip(self.params, self._classes, strict=True)):
            p.__class__ = kind
            p.grad = None
            p.data = self.part(whole, i).to(self.device, self.dtype, copy=True)
            p.grad = gradients.get(i)
        self.weight = self.master = self.whole = torch.empty(0)
        self._views, self._windows, self._gradient, self.accumulators, self.unit = [], {}, None, [], None

    def thaw(self) -> None:
        """Trains parameters that were frozen."""
        self.trainable = True
        self._gradient = GradBuffer(self, self.stage, self.tree)
        for p in self.params:
            frozen = not p.requires_grad
            p.requires_grad_(True)  # autograd adds gradients to such parameters only
            self.accumulators.append(accumulator_of(p))
            if frozen:
                p.requires_grad_(False)

    def rename(self, names: Mapping[int, str]) -> None:
        """Other names for the parameters, by id: those that they have in a larger module."""
        self.names = [names[id(p)] for p in self.params]
        renamed = zip(self.layout.segments, self.names, strict=True)
        self.layout = replace(self.layout, segments=tuple(replace(segment, name=name) for segment, name in renamed))
        if self.trainable:
            self.gradient.layout = self.layout
            for standin, name in zip(self.gradient.placeholders, self.names, strict=True):
                standin._name = name

    def part(self, whole: torch.Tensor, i: int) -> torch.Tensor:
        """A parameter's part of a whole buffer."""
        segment = self.layout.segments[i]
        return whole[segment.offset : segment.end].view(segment.shape)

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Every parameter's part of a whole buffer, in one call of torch's."""
        cuts = _unflatten(whole, self._pieces)
        return [cuts[k] if cuts[k].numel() else self.part(whole, i) for i, k in enumerate(self._at)]

    # ---- whole and shard ------------------------------------------------------------------------------------------

    def runs(self, owners: Sequence[int]) -> list[Run]:
        """What an element-wise optimizer sees of the owned range; ``owners`` are its groups, by segment. In 16 bits
        torch rounds the last elements of a tensor in another way than the others, so parameters stay apart."""
        return self.layout.runs(self.start, self.end, owners, joined=self.types.master.itemsize > 2)

    @property
    def gradient(self) -> GradBuffer:
        """Of a bucket that is trained."""
        assert self._gradient is not None
        return self._gradient

    @property
    def is_whole(self) -> bool:
        """Whether the parameters can be read."""
        return self.stage < LAST_STAGE or (self.gathering is None and self._allocated)

    @property
    def _allocated(self) -> bool:
        return self.whole.untyped_storage().nbytes() > 0

    @_untransformed
    def start_gather(self) -> None:
        """Stage 3: starts to collect the parameters. Every rank does, in the same order."""
        if self.stage < LAST_STAGE or self.gathering is not None or self._allocated:
            return
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.ranks.note_gathered(self.whole.nbytes)
        self.ranks.announce("gather", self.number)
        self.ranks.note_order(self.number)
        with self._undone_by_errors():
            self.gathering = self.ranks.all_gather(self.weight, self.whole)

    @_untransformed
    def finish_gather(self) -> None:
        """Waits until the parameters can be read."""
        if self.gathering is not None:
            work, self.gathering = self.gathering, None
            with self._undone_by_errors():
                work.wait()
            self._bind()

    @contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        """Around a gather: where it raises, the parameters are in shards as before."""
        try:
            yield
        except BaseException:
            self.whole.untyped_storage().resize_(0)
            self.ranks.note_gathered(-self.whole.nbytes)
            raise

    @property
    def _is_seen(self) -> bool:
        """Stage 3: whether others share the whole buffer's memory: views of parameters that a program has kept, and
        what autograd has saved past our hooks."""
        return uses(self.whole) > self._own_uses + len(self._windows)

    def window(self, at: Window) -> torch.Tensor:
        """A view of the whole buffer. It is kept for the next backward pass, as long as there are not too many."""
        if at not in self._windows:
            if len(self._windows) >= _WINDOWS_EACH * len(self.params):
                self._windows.clear()
            self._windows[at] = at.on(self.whole)
        return self._windows[at]

    @_untransformed
    def release(self, keep: bool = True) -> None:
        """Stage 3: lets go of the other ranks' parameters. Memory that others still see is left to them.

        Args:
            keep: whether what was written into the parameters meanwhile counts. All ranks write the same.
        """
        if self.stage == LAST_STAGE:
            self.finish_gather()
            if self._allocated:
                if keep:
                    self._keep_writes("forward")
                if self._is_seen:
                    self.whole = torch.empty_like(self.whole)
                    self._views, self._windows = self.parts(self.whole), {}
                    self.unit.flat.find_homes()
                self._free()
                self.borrowed = False
                self.ranks.note_gathered(-self.whole.nbytes)

    def publish(self) -> Any:
        """After a change of the master weights: the parameters follow, here and on the other ranks. A Work."""
        if self.separate:
            self.weight.copy_(self.master, non_blocking=True)
        if self.stage in (1, 2) and self.ranks.world_size > 1:
            return self.ranks.all_gather(self.weight, self.whole)
        held = self.stage == LAST_STAGE and self.is_whole and self.unit.flat.holders > 0
        self.release(keep=False)  # stage 3: what is whole now is the old values
        if held:
            self.start_gather()
            self.finish_gather()
        return DONE

    def gather_owned(self, owned: torch.Tensor) -> torch.Tensor:
        """The whole of something that every rank has for its owned range: itself at stage 0, else new memory."""
        if self.stage == 0:
            return owned
        whole = torch.empty(self.layout.numel, dtype=owned.dtype, device=self.device)
        self.ranks.meet()
        self.ranks.comm.all_gather(owned.to(self.device), out=whole)
        return whole

    def piece(self, owned: torch.Tensor, i: int) -> torch.Tensor:
        """A parameter's piece of something that this rank has for its owned range; it may be empty."""
        return self.layout.piece(owned, self.start, i)[0]

    def load(self, i: int, values: torch.Tensor) -> None:
        """Takes this rank's piece of a parameter's new values; `publish` comes afterwards."""
        self._write(self.master, i, values)

    # ---- what users write into the parameters ---------------------------------------------------------------------

    def _keep(self) -> None:
        """Stage 3: keeps this rank's part of what was written into the parameters, which are whole."""
        self.weight.copy_(self.whole[self.start : self.end])

    def set_data(self, i: int, values: torch.Tensor) -> None:
        """Stage 3: `p.data = values`, of which this rank takes its piece; the master weights follow later. Views that
        were made before keep what the parameter has now."""
        self.release()
        replace_data(self.params[i]._ringcomm)
        self._write(self.weight, i, values)

    def _write(self, owned: torch.Tensor, i: int, values: torch.Tensor) -> None:
        piece, start = self.layout.piece(owned, self.start, i)
        piece.copy_(values.detach().reshape(-1)[start : start + piece.numel()])

    def rebound(self, call: str) -> list[int]:
        """While they are whole: the parameters whose `p.data` is another tensor now. Forward uses the other tensor, and
        nothing is copied before a step, because users put averaged weights in and take them out again.

        Raises: InvalidArgumentError: a tensor of another shape or type, or on another device.
        """
        types = {*map(_dtype_of, self.params)}
        here = self._addresses if self.stage < LAST_STAGE else [view.data_ptr() for view in self._views]
        if [*map(torch.Tensor.data_ptr, self.params)] == here and types == {self.types.compute}:
            return []
        found = []
        for i, (p, view) in enumerate(zip(self.params, self._views, strict=True)):
            if p.data_ptr() == here[i] and p.dtype == self.types.compute:
                continue
            if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
                raise InvalidArgumentError(
                    f"{call}: rank {self.ranks.rank} found that `p.data` of {self.names[i]} was set to a tensor of "
                    f"{tuple(p.shape)} {p.dtype} on {p.device} after the module was wrapped, expected "
                    f"{tuple(view.shape)} {view.dtype} on {view.device}; change the module before it "
                    "is wrapped, or take it out with ringcomm.unshard, change it and wrap it again"
                )
            found.append(i)
        return found

    def adopt_writes(self, call: str) -> None:
        """Keeps what was written into the parameters since `publish`: the master weights follow."""
        for i in self._keep_writes(call):
            self._views[i].copy_(self.params[i].detach())
            self.params[i].data = self._views[i]
        master = self._followed(self.weight)
        if master is not self.master:
            self.master.copy_(master)

    def written_master(self, call: str) -> torch.Tensor:
        """What `adopt_writes` would make of the master weights, to be saved. Nothing changes: what is now in the place
        of `p.data` may be taken out again."""
        replaced = self._take_writes(call)
        weight = self.weight.clone() if replaced else self.weight
        for i in replaced:
            self._write(weight, i, self.params[i])
        return self._followed(weight)

    def _keep_writes(self, call: str) -> list[int]:
        """As `_take_writes`, with what was put in the place of `p.data`."""
        replaced = self._take_writes(call)
        for i in replaced:
            if self.stage == LAST_STAGE:
                replace_data(self.params[i]._ringcomm)
            self._write(self.weight, i, self.params[i])
        return replaced

    def _take_writes(self, call: str) -> list[int]:
        """Keeps this rank's part of what was written in place; returns the parameters that have other data."""
        if not self.is_whole:
            return []
        if self.stage == LAST_STAGE:
            self._keep()
        return self.rebound(call)

    def _followed(self, weight: torch.Tensor) -> torch.Tensor:
        """The master weights after what users wrote into the parameters. Where a weight still is its master weight,
        rounded, the master weight keeps its extra bits."""
        if not self.separate:
            return weight
        bits = _BITS[self.types.compute.itemsize]  # a minus zero is not a zero
        published = self.master.to(self.types.compute).to(self.device).view(bits)
        if self.device.type == "cpu" and torch.equal(published, weight.view(bits)):
            return self.master
        kept, where = published == weight.view(bits), self.master.device
        return torch.where(kept.to(where), self.master, weight.to(where, self.master.dtype))

    # ---- gradients ------------------------------------------------------------------------------------------------

    def pack(self, grads: Sequence[tuple[int, torch.Tensor]], whole: torch.Tensor) -> None:
        """Gradients of parameters, by segment, into a whole buffer; zeros where there is none."""
        parts, gaps = self._cuts_of(whole)
        if len(grads) < len(parts):
            given = {i for i, _ in grads}
            gaps = [*gaps, *(part for i, part in enumerate(parts) if i not in given)]
            parts = [parts[i] for i, _ in grads]
        if gaps:
            torch._foreach_zero_(gaps)
        torch._foreach_copy_(parts, [grad for _, grad in grads])

    def _cuts_of(self, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Every parameter's part of a buffer, and the padding; made once for each buffer, which is used again."""
        known = whole.__dict__.setdefault("_ringcomm_cuts", weakref.WeakKeyDictionary())
        if self not in known:
            before = uses(whole)
            apart = whole.new_empty(0).set_(whole)  # the parts must not hold the buffer, which holds them
            cuts, at = _unflatten(apart, self._pieces), {*self._at}
            known[self] = [cuts[k] for k in self._at], [cut for k, cut in enumerate(cuts) if k not in at]
            del apart
            whole._ringcomm_uses += uses(whole) - before
        return known[self]

    # ---- the rest of a mesh ---------------------------------------------------------------------------------------

    def counts(self, i: int) -> bool:
        """Whether this rank, with those that share its shards, speaks for a parameter: in norms and checkpoints."""
        return is_primary_copy(self.params[i], self.ranks.mesh)

    # ---- figures --------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps, by what they hold."""
        return {
            "parameters": (self.weight if self.stage == LAST_STAGE else self.whole).nbytes,
            "master": self.master.nbytes if self.separate else 0,
            "gradients": self.gradient.nbytes if self.trainable else 0,
        }
