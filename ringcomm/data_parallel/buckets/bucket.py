"""A bucket: parameters of one type that are communicated together, and the flat buffers that hold them.

    weight   in the type of the forward pass; the parameters are views of it. Unsharded at stages 0 to 2, sharded at 3
    master   in the optimizer's type, if that type or its device differs; else the owned range of weight
    gradient see grad_buffer.py

The owned range is the part that this rank's optimizer updates: the unsharded buffer at stage 0, this rank's shard at
stages 1 to 3.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ringcomm.data_parallel.buckets.grad_buffer import GradBuffer
from ringcomm.data_parallel.buckets.group import DONE, DataParallelGroup, uses
from ringcomm.data_parallel.buckets.layout import FlatLayout, Run
from ringcomm.errors import InvalidArgumentError, MismatchError
from ringcomm.modules.arguments import LAST_STAGE
from ringcomm.modules.meta import fill_uninitialized, give_memory
from ringcomm.modules.precision import Types
from ringcomm.modules.shard_spec import is_primary_copy

_F = TypeVar("_F", bound=Callable[..., Any])
_CACHED_VIEWS_EACH = 8  # the most views kept per parameter
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BINDING = (operator.attrgetter("dtype"), torch.Tensor.data_ptr, torch.Tensor.stride)


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, jacrev, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed(function: _F) -> _F:
    """Makes a function that moves parameters run outside of the active transforms of torch.func, which would otherwise
    intercept its operations."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not in_transform():
            return function(*args, **kwargs)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return cast(_F, wrapped)


def _set_values(params: Sequence[nn.Parameter], values: Sequence[torch.Tensor], classes: Sequence[type]) -> None:
    """Gives parameters other values, and the classes that go with them."""
    with torch._C.DisableTorchFunctionSubclass():
        for p, data in zip(params, values, strict=True):
            p.data = data
    _set_classes(params, classes)


def _bindings(params: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Returns the dtypes, the addresses and the strides of parameters."""
    return [[*map(read, params)] for read in _BINDING]


def _set_classes(params: Sequence[nn.Parameter], classes: Sequence[type]) -> None:
    for p, kind in zip(params, classes, strict=True):
        p.__class__ = kind  # programs and optimizers keep references to the parameter, so it stays the same object


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """Returns a view of the same memory whose storage covers exactly that memory, because code that saves tensors
    saves their storages."""
    nbytes = torch.empty(0, dtype=torch.uint8, device=part.device)
    nbytes.set_(part.untyped_storage(), part.storage_offset() * part.itemsize, (part.nbytes,))
    return part.new_empty(0).set_(torch.from_dlpack(nbytes).untyped_storage(), 0, part.shape, part.stride())


class ViewGeometry(NamedTuple):
    """The shape, strides and offset of a view of an unsharded bucket, to make the same view of another buffer."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(x: torch.Tensor) -> ViewGeometry:
        return ViewGeometry(x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg())

    def moved(self, elements: int) -> ViewGeometry:
        """Returns the geometry with another offset."""
        return self._replace(offset=self.offset + elements)

    def on(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Returns the view with this geometry in a buffer's memory."""
        found = torch.empty(0, dtype=self.dtype, device=unsharded.device)
        found.set_(unsharded.untyped_storage(), self.offset, self.shape, self.stride)
        found = found.conj() if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found


@dataclass(eq=False)
class ViewData:
    """The values that a stage 3 parameter and its views share.

    `p.data = other` gives the parameter other values. Views made before it keep this object, with the old values; the
    parameter and its later views share a new object.

    Attributes:
        piece: after `p.data = other`, this rank's part of the old values; None: the values are the parameter's.
        unsharded: after `p.data = other`, a buffer with the bucket's layout and the old values, once it was gathered.
        copy: returns the copy of the values in whose memory the views are; None once there are no views.
    """

    piece: Any = None
    unsharded: torch.Tensor | None = None
    copy: Callable[[], torch.Tensor | None] = lambda: None


@dataclass
class BucketViews:
    """The views of a bucket's parameters at stage 3. They may live longer than the bucket and the model.

    Attributes:
        data: for each parameter, the values that it shares with its views made since the last `p.data = other`.
        are_stale: whether the copies of the values may be out of date, because an operation, a step or a forward pass
            may have written the parameters since the copies were last renewed; the same on all ranks.
    """

    data: dict[int, ViewData] = field(default_factory=dict)
    are_stale: bool = False


class ParamMemory:
    """The unsharded buffer of a bucket. While it has memory, the parameters are views of it. At stage 3 it has memory
    from a gather until the release; at other times the parameters are placeholders.

    Args:
        sharded_class: the class of placeholders, which gathers what a program reads. Parameters that stay gathered
            after the outermost call have it too, because otherwise autograd would save the parameter itself, which may
            be a placeholder by the time that backward needs the values.

    Attributes:
        classes: the parameters' own classes.
        views: every parameter's part of the buffer; ``bound``: their dtypes, addresses and strides when they
            became the parameters.
        cached_views: other views, kept for the next backward pass.
        own_uses: how many of our tensors, cached views excluded, share the memory while the parameters are views of it.
        gathering: the all_gather in flight.
        has_own_classes: whether the parameters have their own classes, not ``sharded_class``.
        borrowed: whether a module outside of the unit has read a parameter since the gather.
        replaced: parameters in whose `p.data` the user has put another tensor; their autograd node may have changed.
    """

    def __init__(self, params: list[nn.Parameter], sharded_class: type[nn.Parameter]) -> None:
        self.params, self.sharded_class = params, sharded_class
        self.classes = [type(p) for p in params]
        self.gathering: Any = None
        self.has_own_classes = False
        self.borrowed = False
        self.replaced: set[int] = set()

    def move(self, buffer: torch.Tensor, layout: FlatLayout) -> None:
        """Takes another buffer."""
        self.buffer, self.views = buffer, layout.parts(buffer)
        self.cached_views: dict[ViewGeometry, torch.Tensor] = {}
        self.own_uses = uses(buffer) + len(self.params)

    @property
    def is_allocated(self) -> bool:
        """Whether the buffer has memory."""
        return self.buffer.untyped_storage().nbytes() > 0

    @property
    def is_seen(self) -> bool:
        """Whether others share the memory, such as views that the user's program has kept, tensors that autograd has
        saved without our hooks, or NumPy arrays, after which torch refuses to resize it."""
        shared = uses(self.buffer) > self.own_uses + len(self.cached_views)
        return shared or not self.buffer.untyped_storage().resizable()

    @cached_property
    def placeholders(self) -> list[torch.Tensor]:
        """Tensors with the parameters' shapes and without values; code that reads them anyway gets NaN."""
        dtype = self.buffer.dtype
        with torch.inference_mode(False):
            nothing = torch.full((), math.nan if dtype.is_floating_point else -1).to(dtype).to(self.buffer.device)
            torch._C._set_throw_on_mutable_data_ptr(nothing)  # writing raises, because the written values would be lost
            return [nothing.expand(view.shape) for view in self.views]

    def is_placeholder(self, x: torch.Tensor) -> bool:
        """Whether a tensor has the memory of a placeholder."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(x.untyped_storage()._cdata == self.placeholders[0].untyped_storage()._cdata)

    def bind(self) -> None:
        """Makes the parameters views of the buffer, so that they can be computed with."""
        _set_values(self.params, self.views, self.classes)
        self.has_own_classes = True
        self.bound = _bindings(self.views)

    def use_sharded_class(self, sharded: bool) -> None:
        """Gives the parameters the sharded class, or their own classes; they keep their values."""
        if sharded == self.has_own_classes:
            _set_classes(self.params, [self.sharded_class] * len(self.params) if sharded else self.classes)
            self.has_own_classes = not sharded

    def free(self) -> None:
        """Makes the parameters placeholders."""
        _set_values(self.params, self.placeholders, [self.sharded_class] * len(self.params))
        self.has_own_classes = False
        self.buffer.untyped_storage().resize_(0)

    def cached_view(self, geometry: ViewGeometry) -> torch.Tensor:
        """Returns a view of the buffer. Views are cached, up to a limit."""
        if geometry not in self.cached_views:
            if len(self.cached_views) >= _CACHED_VIEWS_EACH * len(self.params):
                self.cached_views.clear()
            with torch.inference_mode(False):
                self.cached_views[geometry] = geometry.on(self.buffer)
        return self.cached_views[geometry]


@dataclass
class UnshardedState:
    """State of the unsharded parameters of a model at stage 3, which all its buckets share.

    Attributes:
        by_memory: the buckets, by the address of the storage of their unsharded buffers.
        holders: how many times the program is inside `whole`, during which nothing is freed.
        graph_needs: whether a graph made with create_graph may still need the parameters.
    """

    by_memory: dict[int, Bucket] = field(default_factory=dict)
    holders: int = 0
    graph_needs: bool = False


class Bucket:
    """One flat layout with its buffers, placed for a stage.

    Args:
        params: the parameters, in the order of the layout's segments.
        sharded_class: see `ParamMemory`.
        tree: see `GradBuffer`.
        master_device: device of the master weights and the optimizer's state; None: the device of the weights.
        send: whether all ranks get the first rank's values.
        device: where parameters on the meta device get memory between `open` and `take_values`; None: no parameter is
            on meta.

    Attributes:
        number: index among the model's buckets.
        gathered: the state that all of the model's buckets share.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        ranks: DataParallelGroup,
        types: Types,
        stage: int,
        sharded_class: type[nn.Parameter],
        *,
        tree: bool = False,
        master_device: torch.device | None = None,
        send: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.layout, self.params, self.ranks, self.types, self.stage = layout, list(params), ranks, types, stage
        self.tree, self.master_device = tree, master_device
        self.number = 0
        self.gathered = UnshardedState()
        self.views = BucketViews()
        self.memory = ParamMemory(self.params, sharded_class)
        self._gradient: GradBuffer | None = None
        if device is not None:
            for p, segment in zip(self.params, layout.segments, strict=True):
                if p.is_meta:
                    give_memory(p, segment.name, device, ranks.rank)
            return
        values = ranks.empty(layout.numel, types.master, self.params[0].device).zero_()
        for p, segment in zip(params, layout.segments, strict=True):
            segment.view(values[segment.offset : segment.end]).copy_(p.detach())
        self.take_values(values, send)

    def take_values(self, values: torch.Tensor, send: bool) -> None:
        """Keeps this rank's part of the unsharded parameters.

        Args:
            send: whether all ranks get the first rank's values.
        """
        if send:
            self.ranks.broadcast(values)
        self._place(self.stage, values, any(p.requires_grad for p in self.params))

    def open(self, uninitialized: Collection[int]) -> torch.Tensor:
        """Gives all parameters memory for their initialisation, in the type that they were built in; it is then passed
        to `take_values`.

        Args:
            uninitialized: ids of the parameters that have no values yet.
        """
        values = self.ranks.empty(self.layout.numel, self.types.module, self.params[0].device).zero_()
        for i, p in enumerate(self.params):
            part = self.layout.part(values, i)
            with torch.no_grad():
                fill_uninitialized(part, p) if id(p) in uninitialized else part.copy_(p)
            p.data = part
        return values

    # ---- derived properties -----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The parameters' names in the model."""
        return [segment.name for segment in self.layout.segments]

    @property
    def unsharded(self) -> torch.Tensor:
        """The unsharded buffer, which may have no memory at stage 3."""
        return self.memory.buffer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.memory.buffer.device

    @property
    def start(self) -> int:
        """The first element of the range of the buffer that this rank's optimizer updates."""
        return self.layout.shard_numel * self.ranks.rank if self.stage else 0

    @property
    def end(self) -> int:
        """One past the last element of that range."""
        return self.start + self.weight.numel()

    @property
    def separate(self) -> bool:
        """Whether the master weights have memory of their own, because their type or device is not the weights'."""
        return self.master is not self.weight

    @property
    def trainable(self) -> bool:
        """Whether there is a gradient."""
        return self._gradient is not None

    @property
    def gradient(self) -> GradBuffer:
        """The gradient buffer of a bucket that is trained."""
        assert self._gradient is not None
        return self._gradient

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters can be read."""
        return self.stage < LAST_STAGE or (self.memory.gathering is None and self.memory.is_allocated)

    # ---- placement ------------------------------------------------------------------------------------------------

    def _place(self, stage: int, values: torch.Tensor, trained: bool) -> None:
        """Makes a stage's buffers from the unsharded master weights."""
        self.stage = stage
        compute, numel, device = self.types.compute, self.layout.numel, values.device
        start, end = self.layout.owned_range(self.ranks.rank, stage)
        master = None
        if self.types.master != compute or self.master_device is not None:
            where = self.master_device or device
            pinned = where.type == "cpu" and device.type == "cuda"
            master = torch.empty(end - start, dtype=self.types.master, device=where, pin_memory=pinned)
            master.copy_(values[start:end])
        if stage == LAST_STAGE:
            self.weight = self.ranks.empty(self.layout.shard_numel, compute, device)
            self.weight.copy_(values[start:end])
            reuse = values.dtype == compute and values.untyped_storage().resizable()
            self.memory.move(values if reuse else torch.empty(numel, dtype=compute, device=device), self.layout)
            self.memory.free()
        else:
            reuse = values.dtype == compute
            self.memory.move(values if reuse else self.ranks.empty(numel, compute, device).copy_(values), self.layout)
            self.weight = self.unsharded[start:end]
            self.memory.bind()
        self.master = self.weight if master is None else master
        self._gradient = self._new_gradient() if trained else None

    def _new_gradient(self) -> GradBuffer:
        # The same list as before, because our hooks fill it.
        arrival_sets = self._gradient.local.arrival_sets if self._gradient is not None else []
        return GradBuffer(
            self.params,
            self.layout,
            self.ranks,
            self.types,
            self.device,
            self.stage,
            tree=self.tree,
            arrival_sets=arrival_sets,
        )

    def restage(self, stage: int) -> None:
        """Moves the buffers to another stage and drops the gradients."""
        self.adopt_writes("restage")
        values = self.ranks.empty(self.layout.numel, self.types.master, self.device)
        values.copy_(self.gather_owned(self.master))
        self._place(stage, values, self.trainable)

    def unwrap(self) -> None:
        """Turns the parameters into plain tensors with their own memory: they get the master weights, in the type
        that the module was built in, and the unsharded gradients. A collective."""
        self.adopt_writes("unshard")
        gradients = self.gradient.unsharded_grads(self.types.module) if self.trainable else {}
        unsharded = self.gather_owned(self.master)
        for i, p in enumerate(self.params):
            p.grad = None
            own = self.layout.part(unsharded, i).to(self.device, self.types.module, copy=True)
            _set_values([p], [own], [self.memory.classes[i]])
            p.grad = gradients.get(i)
        self.weight = self.master = self.memory.buffer = torch.empty(0)
        self.memory.views, self.memory.cached_views, self._gradient = [], {}, None
        self.views.are_stale = True  # permanently, since nothing renews the copies any more
        self.gathered = UnshardedState()  # else a reference cycle: the model's state references this bucket

    def thaw(self) -> None:
        """Makes frozen parameters trainable."""
        self._gradient = self._new_gradient()

    def rename(self, names: Mapping[int, str]) -> None:
        """Renames the parameters, by id, to their names in a larger module."""
        renamed = zip(self.layout.segments, self.params, strict=True)
        self.layout = replace(self.layout, segments=tuple(replace(s, name=names[id(p)]) for s, p in renamed))
        if self.trainable:
            self.gradient.rename(self.layout)

    # ---- unsharded and sharded -----------------------------------------------------------------------------------

    def runs(self, owners: Sequence[int]) -> list[Run]:
        """Returns the runs of the owned range that an element-wise optimizer sees; ``owners`` are its groups, by
        segment. In 16-bit types parameters stay separate, because torch rounds the last elements of a tensor
        differently from the others."""
        return self.layout.runs(self.start, self.end, owners, merge=self.types.master.itemsize > 2)

    @untransformed
    def start_gather(self) -> None:
        """Stage 3: starts to gather the parameters. Every rank must do so, in the same order."""
        memory = self.memory
        if self.stage < LAST_STAGE or memory.gathering is not None or memory.is_allocated:
            return
        memory.buffer.untyped_storage().resize_(memory.buffer.nbytes)
        self.ranks.note_gathered(memory.buffer.nbytes)
        self.ranks.announce("gather", self.number)
        self.ranks.note_order(self.number)
        with self._undone_by_errors():
            memory.gathering = self.ranks.all_gather(self.weight, memory.buffer, mark=self.number + 1)

    @untransformed
    def finish_gather(self) -> None:
        """Waits until the parameters can be read."""
        if self.memory.gathering is not None:
            work, self.memory.gathering = self.memory.gathering, None
            with self._undone_by_errors():
                work.wait()
            self.memory.bind()

    @contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        """Wraps a gather: if the gather raises, shards the parameters again."""
        try:
            yield
        except BaseException as error:
            self.ranks.wait_for_side_streams()
            self.unsharded.untyped_storage().resize_(0)
            self.ranks.note_gathered(-self.unsharded.nbytes)
            if isinstance(error, MismatchError) and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"  rank {self.ranks.rank} gathered the unit of {self.names[0]}; at stage 3 every rank must run "
                    "the same units, in the same order"
                )
            raise

    @untransformed
    def release(self, keep: bool = True) -> None:
        """Stage 3: frees the other ranks' parameters. If other tensors still use the memory, it is left to them.

        Args:
            keep: whether to keep what was written into the parameters since they were gathered. All ranks must have
                written the same.
        """
        if self.stage == LAST_STAGE:
            self.finish_gather()
            memory = self.memory
            if memory.is_allocated:
                if keep:
                    self._keep_writes("forward")
                if memory.is_seen:
                    self.gathered.by_memory.pop(memory.buffer.untyped_storage()._cdata, None)
                    with torch.inference_mode(False):  # an inference tensor could not be used in training
                        memory.move(torch.empty_like(memory.buffer), self.layout)
                    self.gathered.by_memory[memory.buffer.untyped_storage()._cdata] = self
                memory.free()
                memory.borrowed = False
                self.ranks.note_gathered(-memory.buffer.nbytes)

    def sync_params_from_master(self, changed: Collection[int] = ()) -> Any:
        """Copies changed master weights to the parameters, on this rank and the others. Returns a Work.

        Args:
            changed: the parameters that a step has changed; autograd refuses a backward pass that needs the old values.
        """
        self.views.are_stale = True
        increment_version([self.params[i] for i in changed])
        if self.separate:
            self.weight.copy_(self.master, non_blocking=True)
        if self.stage in (1, 2) and self.ranks.world_size > 1:
            return self.ranks.all_gather(self.weight, self.unsharded)
        inside_whole = self.stage == LAST_STAGE and self.is_unsharded and self.gathered.holders > 0
        self.release(keep=False)  # stage 3: parameters gathered before have the old values
        if inside_whole:
            self.start_gather()
            self.finish_gather()
        return DONE

    def gather_owned(self, owned: torch.Tensor) -> torch.Tensor:
        """Gathers values that every rank has for its owned range. Returns an unsharded buffer with them: ``owned``
        itself at stage 0, else new memory."""
        return owned if self.stage == 0 else self.ranks.gather_apart(owned, self.device, self.stage)

    def piece(self, owned: torch.Tensor, i: int) -> torch.Tensor:
        """Returns a parameter's part of values that this rank has for its owned range; it may be empty."""
        return self.layout.piece(owned, self.start, i)[0]

    def load(self, i: int, values: torch.Tensor) -> None:
        """Writes this rank's part of a parameter's new values. The caller then calls `sync_params_from_master`."""
        self._write(self.master, i, values)

    # ---- what users write into the parameters ---------------------------------------------------------------------

    def set_data(self, i: int, values: torch.Tensor) -> None:
        """Stage 3: implements `p.data = values`: this rank takes its part, and the master weights follow later.
        Views that were made before keep the old values."""
        self.release()
        self.replace_data(i)
        self._write(self.weight, i, values)

    @untransformed
    def renew_copies(self) -> None:
        """Stage 3: called once all ranks have gathered the parameters. If the copies of the values, in whose memory the
        views are, are stale, renews them."""
        if self.views.are_stale:
            self.views.are_stale = False
            for i, data in self.views.data.items():
                copy = data.copy()
                if copy is not None:
                    with torch.no_grad():
                        copy.copy_(self.layout.part(self.unsharded, i))

    def replace_data(self, i: int) -> None:
        """Called before a parameter's data is replaced: existing views keep the current values."""
        data = self.views.data.pop(i, None)
        if data is not None:
            data.piece = self.piece(self.weight, i).clone()

    def _write(self, owned: torch.Tensor, i: int, values: torch.Tensor) -> None:
        piece, start = self.layout.piece(owned, self.start, i)
        piece.copy_(self.layout.segments[i].flatten(values.detach())[start : start + piece.numel()])

    def find_replaced_data(self, call: str) -> list[int]:
        """Returns the parameters in whose `p.data` the user has put another tensor while they are unsharded. The
        forward pass uses that tensor. It is not copied to the weights before a step, because users put averaged weights
        in and take them out again. A tensor in the parameter's own memory, such as its transpose, gets other memory.

        Raises: InvalidArgumentError: a tensor of another shape or type, or on another device.
        """
        with torch._C.DisableTorchFunctionSubclass():
            now = _bindings(self.params)
        if now == self.memory.bound:
            return []
        found = []
        for i, (p, view) in enumerate(zip(self.params, self.memory.views, strict=True)):
            if all(a[i] == b[i] for a, b in zip(now, self.memory.bound, strict=True)):
                continue
            if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
                raise InvalidArgumentError(
                    f"{call}: rank {self.ranks.rank} found that `p.data` of {self.names[i]} was set to a tensor of "
                    f"{tuple(p.shape)} {p.dtype} on {p.device} after the module was wrapped, expected "
                    f"{tuple(view.shape)} {view.dtype} on {view.device}; change the module before it "
                    "is wrapped, or take it out with ringcomm.unshard, change it and wrap it again"
                )
            with torch._C.DisableTorchFunctionSubclass():
                if p.data_ptr() == view.data_ptr():  # copying it into the view would overwrite it half-way
                    p.data = p.detach().clone()
            found.append(i)
        self.memory.replaced.update(found)
        return found

    def adopt_writes(self, call: str) -> None:
        """Applies what was written into the parameters since `sync_params_from_master` to the master weights."""
        for i in self._keep_writes(call):
            view = self.memory.views[i].copy_(self._current_data(i))
            with torch._C.DisableTorchFunctionSubclass():
                self.params[i].data = view
        master = self._updated_master(self.weight)
        if master is not self.master:
            self.master.copy_(master)

    def written_master(self, call: str) -> torch.Tensor:
        """Returns the master weights that `adopt_writes` would make, for a checkpoint. It adopts nothing, because users
        may take a tensor out of `p.data` again."""
        replaced = self._take_writes(call)
        weight = self.weight.clone() if replaced else self.weight
        for i in replaced:
            self._write(weight, i, self._current_data(i))
        return self._updated_master(weight)

    def _keep_writes(self, call: str) -> list[int]:
        """Like `_take_writes`, but also keeps this rank's part of each tensor that the user has put in `p.data`."""
        replaced = self._take_writes(call)
        for i in replaced:
            if self.stage == LAST_STAGE:
                self.replace_data(i)
            self._write(self.weight, i, self._current_data(i))
        return replaced

    def _current_data(self, i: int) -> torch.Tensor:
        """Returns the tensor in `p.data` of a parameter that has values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.params[i].detach()

    def _take_writes(self, call: str) -> list[int]:
        """Keeps this rank's part of in-place writes; returns the parameters whose `p.data` was replaced."""
        if not self.is_unsharded:
            return []
        if self.stage == LAST_STAGE:
            self.weight.copy_(self.unsharded[self.start : self.end])
        return self.find_replaced_data(call)

    def _updated_master(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the master weights after user writes to the parameters. Where a weight still equals its rounded
        master weight, the master weight keeps its extra bits."""
        if not self.separate:
            return weight
        bits = _BITS.get(self.types.compute.itemsize, torch.int64)  # compared as bits, so that -0.0 differs from 0.0
        synced = self.master.to(self.types.compute).to(self.device).view(bits)
        if self.device.type == "cpu" and torch.equal(synced, weight.view(bits)):
            return self.master
        kept, where = synced == weight.view(bits), self.master.device
        if kept.numel() != weight.numel():  # complex128 is compared as two integers
            kept = kept.view(-1, 2).all(1)
        return torch.where(kept.to(where), self.master, weight.to(where, self.master.dtype))

    # ---- the rest of a mesh ---------------------------------------------------------------------------------------

    def is_primary_copy(self, i: int) -> bool:
        """True on exactly one replica of each parameter, so that norms and checkpoints count it once."""
        return is_primary_copy(self.params[i], self.ranks.mesh)

    # ---- figures --------------------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes that this rank keeps between steps, by kind."""
        return {
            "parameters": (self.weight if self.stage == LAST_STAGE else self.unsharded).nbytes,
            "master": self.master.nbytes if self.separate else 0,
            "gradients": self.gradient.buffer.nbytes if self.trainable else 0,
        }


def adopt_writes(buckets: Collection[Bucket], call: str) -> None:
    """`Bucket.adopt_writes` for several buckets. If the user has swapped data, as in ``a.data, b.data = b.data,
    a.data``, copies it first, because adopting one parameter would overwrite the other's data."""
    by_memory = {key: bucket for each in buckets for key, bucket in each.gathered.by_memory.items()}
    known = dict.fromkeys([*buckets, *by_memory.values()])
    moved = [bucket.params[i] for bucket in known if bucket.is_unsharded for i in bucket.find_replaced_data(call)]
    with torch._C.DisableTorchFunctionSubclass():
        for p in moved if len(moved) > 1 else ():
            if p.untyped_storage()._cdata in by_memory:
                p.data = p.detach().clone()
    for bucket in buckets:
        bucket.adopt_writes(call)
