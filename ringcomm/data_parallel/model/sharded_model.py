"""A module whose parameters are in buckets: when its units are gathered and reduced around forward and backward, at
every stage. A unit is a run of modules whose parameters are communicated together.

    stage   parameters   gradients               optimizer   when a bucket is reduced
    0       unsharded    unsharded               unsharded   its gradients and those of all earlier buckets have arrived
    1       unsharded    unsharded until reduced shard       the same
    2       unsharded    shard                   shard       the same, or backward has passed the units
    3       shard        shard                   shard       backward has passed its unit

Every rank reduces in the same order, whatever the order in which its own gradients arrive. At the end of a backward
pass all buckets are reduced and waited for; one message with a byte per parameter tells which parameters any rank has
used.

Around a unit's calls:

    forward    gather before the run's first module, release after its last
    backward   gather when the gradient of an output arrives; release and reduce when backward has reached a call that
               came before all calls of the unit

Autograd runs nodes in the reverse order of their creation, so when the gradient of an earlier call's output arrives,
later calls are done. Nothing is added to autograd's graph, so sums of gradients are associated as in the plain module.
Hooks on the nodes that accumulate gradients see a gradient's arrival, and hooks on the gradients of the units' outputs
follow backward through the units. At stage 3 autograd saves a reference to a parameter's unit in place of the
parameter; the unit is gathered when a node asks for the value, wherever the graph is entered.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ringcomm import _C
from ringcomm.data_parallel.buckets.bucket import Bucket, UnshardedState, ViewGeometry, in_transform
from ringcomm.data_parallel.buckets.grad_buffer import copy_exchanged_grads, sync_grads_from_root
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import Atom
from ringcomm.data_parallel.model.contents import ModuleContents
from ringcomm.data_parallel.model.options import CHECKSUM_NBYTES, AttachedOptimizers, differ, with_complement
from ringcomm.errors import InvalidArgumentError, MismatchError, UnsupportedError, user_stacklevel
from ringcomm.modules.arguments import LAST_STAGE, Units
from ringcomm.modules.dynamo import eager, skipped
from ringcomm.modules.precision import Cast, MixedPrecision

_T = TypeVar("_T")
_requires_grad = attrgetter("requires_grad")
_version_of = attrgetter("_version")
# Checksum of the optimizers' options, and whether there are reentrant checkpoints.
HEADER_NBYTES = 2 * CHECKSUM_NBYTES + 1
IN_FLIGHT = 2  # reductions at stages 2 and 3 at the same time, each with its own unsharded buffer


@dataclass
class UnitCalls:
    """Records of a unit's calls since the last backward pass.

    Attributes:
        first: number of the first call; None: there is no call; 0: the call belongs to an older forward pass.
        trained: the number of calls in training.
        checkpointed: whether a call in training recorded no graph, as in reentrant checkpointing.
    """

    first: int | None = None
    trained: int = 0
    checkpointed: bool = False


class Unit:
    """Modules that are called one after another, and their buckets.

    Args:
        reshard_after_forward: whether stage 3 frees the parameters between forward and backward; None: unless the unit
            is the outermost one.

    Attributes:
        recomputed: whether backward has run a call again; None: unknown.
        had_late_gradient: whether a gradient arrived, in any backward pass so far, after the unit's gradients had been
            reduced. That pass failed; later ones reduce the unit at their end.
        calling: the module whose call is running.
        undo: functions that restore the modules as they were before wrapping.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket], reshard_after_forward: bool | None
    ) -> None:
        self.name, self.modules, self.buckets = name, list(modules), list(buckets)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.precision: MixedPrecision | None = None  # None: the model's
        self.forward_prefetch: list[Unit] | None = None  # None: the units that followed in the last pass
        self.backward_prefetch: list[Unit] | None = None
        self.calls = UnitCalls()
        self.recomputed: bool | None = None
        self.had_late_gradient = False
        self.calling: nn.Module | None = None
        self.undo: list[Callable[[], Any]] = []
        self.flat: ShardedModel

    @property
    def repeats(self) -> bool:
        """Whether the unit's gradients may arrive more than once in a backward pass, with other units' in between.
        Reentrant checkpoints do this: each runs a backward pass of its own inside the outer one."""
        if self.had_late_gradient:
            return True
        hidden = self.calls.checkpointed and self.recomputed is not False
        return hidden and (self in self.flat.backward.used_outside or self.calls.trained > 1)

    def forget_calls(self) -> None:
        """Resets the records of calls, when a forward pass begins after a backward pass."""
        if self.calls.checkpointed and self.recomputed is None:  # backward ran no call again: these were no checkpoints
            self.recomputed = False
        self.calls = UnitCalls()

    # ---- parameters -----------------------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters can be read."""
        return all(bucket.is_unsharded for bucket in self.buckets)

    def start_gather(self) -> None:
        """Stage 3: starts to gather the parameters."""
        for bucket in self.buckets:
            bucket.start_gather()

    def gather(self) -> None:
        """Gathers the parameters, waits for them, and gives them their own classes."""
        self.start_gather()
        for bucket in self.buckets:
            bucket.finish_gather()
            bucket.memory.use_sharded_class(False)

    def release(self) -> None:
        """Frees the other ranks' parameters. Copies for views become stale, because the program may have written the
        parameters."""
        for bucket in self.buckets:
            bucket.release()
            bucket.views.are_stale = True

    def unwrap(self) -> None:
        """Makes the modules and parameters plain ones; a collective."""
        for bucket in self.buckets:
            bucket.unwrap()
        for take_away in self.undo:
            take_away()

    # ---- a call ---------------------------------------------------------------------------------------------------

    @skipped
    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs ``forward`` of one of the modules, with its parameters gathered."""
        counted = self._begin(module)
        before, self.calling = self.calling, module
        done = False
        cast = self.input_cast(self is self.flat.root)
        try:
            args, kwargs = self._cast_inputs(cast, args, kwargs)
            output = forward(*args, **kwargs)
            done = True
        finally:
            self.calling = before
            self._leave(counted, done, cast)
        return self._end(module, counted, output)

    @eager
    def _begin(self, module: nn.Module) -> bool:
        """Begins a call. Returns False inside a pipeline step, where parameters stay unsharded."""
        if self.flat.stage == LAST_STAGE and torch._C._get_tracing_state() is not None:
            raise UnsupportedError(
                f"torch.jit.trace: rank {self.flat.ranks.rank} got a module of stage 3, whose parameters are in the "
                "ranks' shards, expected whole ones; load its state_dict() into a new module and trace that"
            )
        if self.flat.sync.microbatches is None:
            self.flat.begin_call(self, module)
            return True
        return False

    @eager
    def _cast_inputs(self, cast: Cast, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs))

    @eager
    def _leave(self, counted: bool, done: bool, cast: Cast) -> None:
        cast.keep_changes()
        if counted:
            self.flat.leave_call(done)

    @eager
    def _end(self, module: nn.Module, counted: bool, output: Any) -> Any:
        flat = self.flat
        if not counted:
            return self._cast_output(output)
        number = flat.end_call(self, module)
        if number is not None:
            for x in tensors_of(output):
                if x.grad_fn is not None:
                    _hook_first(x, partial(_reached, weakref.ref(self), number))
        if module is flat.module:
            return Cast(flat.config.mixed_precision.output_dtype)(output)
        return self._cast_output(output)

    def input_cast(self, root: bool) -> Cast:
        """Returns a function that casts the arguments of a call of the unit, or with ``root`` of the whole model, to
        the type in which it computes."""
        return Cast((self.precision or self.flat.config.mixed_precision).input_dtype(root))

    def _cast_output(self, output: Any) -> Any:
        return output if self.precision is None else Cast(self.precision.output_dtype)(output)


def _hook_first(x: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook that runs before the existing ones, so that backward reaches a unit before the units inside
    it, even if the unit returns the same tensor as an inner unit."""
    x.register_hook(hook)
    hooks = x._backward_hooks
    if hooks is not None and len(hooks) > 1:
        *before, last = hooks.items()
        hooks.clear()
        hooks.update([last, *before])


@eager
def _reached(unit: weakref.ref[Unit], number: int, _: torch.Tensor) -> None:
    """Tells the model that backward has reached the output of a call. The reference is weak, because the model may
    reference the graph."""
    here = unit()
    if here is not None:
        here.flat.reach(here, number)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's output, including those in dataclasses, mappings and sequences of any class."""
    if isinstance(output, torch.Tensor):
        return [output]
    found = []
    for x in tree_flatten(output)[0]:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif is_dataclass(x) and not isinstance(x, type):
            found += tensors_of([getattr(x, field.name) for field in fields(x)])
        elif isinstance(x, Mapping):
            found += tensors_of(list(x.values()))
        elif isinstance(x, (list, tuple)):
            found += tensors_of(list(x))
    return found


@dataclass
class BackwardPass:
    """The state of the current pass of autograd. At its end a new one replaces it.

    Attributes:
        scheduled: whether the pass has begun, so that its end must be noticed.
        end: the callback that autograd calls at the end, and drops if the pass raises.
        task: autograd's number for the pass.
        accumulates: whether it was started by backward, not by torch.autograd.grad.
        makes_graph: whether it runs with create_graph.
        gathers: whether it gathers each unit that it reaches; then all ranks reach the same units in the same order.
        reached: the units that it has reached and not passed, in this order.
        used_outside: the units with reentrant checkpoints that have a parameter whose gradient the pass also computes
            outside of those checkpoints.
        arrived: by bucket, the parameters whose gradients have arrived on this rank. Autograd calls our hook just
            before it adds a gradient to `p.grad`. The addition is known to be done at the next event in the same
            thread; this costs less than a second hook after the addition.
        filled: at stages 2 and 3, the buckets to which no more gradients come, because backward has passed their unit.
        launched: the buckets whose reductions have begun.
        next: the index, in the order of buckets, of the first one that may not be launched yet.
        in_flight: the launched buckets whose reductions were not waited for yet, in their order.
    """

    scheduled: bool = False
    end: Callable[[], Any] = lambda: None
    task: int = -1
    accumulates: bool = False
    makes_graph: bool = False
    gathers: bool = False
    reached: dict[Unit, None] = field(default_factory=dict)
    used_outside: set[Unit] = field(default_factory=set)
    arrived: dict[Bucket, set[int]] = field(default_factory=dict)
    filled: set[Bucket] = field(default_factory=set)
    launched: set[Bucket] = field(default_factory=set)
    next: int = 0
    in_flight: deque[Bucket] = field(default_factory=deque)

    @property
    def is_dead(self) -> bool:
        """Whether the pass has raised and was not cleaned up yet."""
        return self.scheduled and self.end() is None


@dataclass
class Synchronisation:
    """When the ranks communicate: which backward passes reduce, and which forward passes begin with rank 0's buffers.

    Attributes:
        broadcast_buffers: whether every synchronised forward pass in training begins with rank 0's buffers.
        enabled: False inside `no_sync` and in a pipeline step.
        reduces_next_backward: whether the next backward pass reduces, as decided in its forward pass; None: no forward
            pass has decided, so `enabled` decides at the beginning of the backward pass.
        awaits_backward: whether a forward pass that reduces still waits for its backward pass.
        buffers_are_due: whether the next forward pass begins with rank 0's buffers.
        microbatches: the number of micro-batches so far in a pipeline's step, in which parts of the module run forward
            and backward in any order, parameters stay unsharded, and nothing is reduced before the end. None: no step
            is running.
        microbatch: the micro-batch of the current passes; None: for each parameter the next one.
        last_header: on a device, the header of the last message that ended a backward pass, in host memory, and the
            event after which it is valid.
        hook: starts a bucket's reduction in place of the communicator; see comm_hook.py.
    """

    broadcast_buffers: bool
    enabled: bool = True
    reduces_next_backward: bool | None = None
    awaits_backward: bool = False
    buffers_are_due: bool = True
    microbatches: int | None = None
    microbatch: int | None = None
    last_header: tuple[torch.Tensor, torch.cuda.Event] | None = None
    hook: Callable[[Bucket, int, bool, torch.Tensor], Any] | None = None

    @property
    def reduces(self) -> bool:
        """Whether a backward pass that began now would reduce."""
        return self.enabled if self.reduces_next_backward is None else self.reduces_next_backward

    def decide(self) -> None:
        """Decides, in a forward pass, whether its backward pass reduces. A forward pass inside `no_sync`, or one that
        backward runs again, leaves the decision of an earlier forward pass whose backward pass is still to come."""
        if torch._C._current_graph_task_id() >= 0:
            return
        self.awaits_backward |= self.enabled
        self.reduces_next_backward = self.awaits_backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block only accumulate on this rank; the next one after it reduces the sums."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


@dataclass
class ForwardCalls:
    """The calls of units, counted through all forward passes.

    Attributes:
        count: the number of calls that have begun, which is also the number of the last one.
        saving_references: at stage 3, returns the context in which autograd saves references to a model's parameters.
        packing: for each running call, the context that it is in.
        trains: whether the last outermost call had a graph.
        used_up: whether a backward pass has run. The units' records of calls are kept until the next forward pass with
            a graph, because until then a backward pass may use the same graph again.
        seen: the units of this forward pass, in order. Calls inside `whole` are left out, because there the ranks may
            make different calls, and all ranks must prefetch the same units.
        last: the units of the previous forward pass.
        restore: at the end of `whole`, in which ranks may run different passes, resets the records of calls and passes
            to their state at its beginning, or after the last backward pass in it. None: not inside `whole`.
        warned: whether the warning about a read outside of a unit's call was given.
        counters: while an operation runs on gathered values, a tensor with the version counter of each of its
            arguments, by the parameter's bucket and index, then by the geometry. With it autograd checks what it has
            saved. A view such as `p.data[0]` may have another counter than its parameter.
    """

    saving_references: Callable[[ShardedModel], AbstractContextManager[None]]
    count: int = 0
    packing: list[AbstractContextManager[None]] = field(default_factory=list)
    trains: bool = False
    used_up: bool = False
    seen: list[Unit] = field(default_factory=list)
    last: list[Unit] = field(default_factory=list)
    restore: Callable[[], None] | None = None
    warned: bool = False
    counters: dict[tuple[Bucket, int], dict[ViewGeometry, torch.Tensor]] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """The number of calls that are running."""
        return len(self.packing)

    def after(self, unit: Unit) -> list[Unit]:
        """Records that a unit is called. Returns a list with the unit that followed it in the previous pass, if any."""
        at = len(self.seen)
        self.seen.append(unit)
        expected = self.last[at : at + 2]
        return expected[1:] if expected[:1] == [unit] else []

    def before(self, unit: Unit) -> list[Unit]:
        """Returns a list with the unit that was called before this one, if any."""
        at = next((i for i in reversed(range(len(self.seen))) if self.seen[i] is unit), 0)
        return self.seen[at - 1 : at] if at else []

    def begin_order(self) -> None:
        """Begins to record a forward pass."""
        self.last, self.seen = self.seen or self.last, []

    def forget_order(self) -> None:
        """Forgets the order of units, so that the next pass prefetches nothing: the ranks have run different passes."""
        self.last, self.seen = [], []


class GradArrivals:
    """Notices gradients as they arrive, by hooks on the autograd nodes that accumulate them.

    Args:
        flat: the model. Nodes' hooks refer to it weakly, because Python's garbage collector does not see them.

    Attributes:
        native: tells which bucket's last gradient a thread has added.
        nodes: the nodes of each bucket that is trained. Autograd does not keep them alive, so we do, because they hold
            our hooks, and expect gradients of the type that the parameters have since they were wrapped.
        nested: whether backward passes contain other backward passes, as reentrant checkpoints do; None: unknown.
    """

    def __init__(self, flat: ShardedModel) -> None:
        self._flat = weakref.ref(flat)
        self.native = _C.Arrivals(torch._C._current_graph_task_id)
        self.nodes: dict[Bucket, list[Any]] = {}
        self.nested: bool | None = None
        self._trained: list[bool] = []  # by parameter: whether it was trained when `nested` was determined
        self._handles: dict[tuple[Bucket, int], Any] = {}
        self._versions: dict[Bucket, list[int]] = {}  # the parameters' versions at the last `note_writes`
        self._written: dict[Bucket, set[int]] = {}  # parameters that were written since their nodes were looked up

    def watch(self, bucket: Bucket) -> None:
        """Installs the hooks of a bucket."""
        self.nodes[bucket] = [None] * len(bucket.params)
        self._versions[bucket], self._written[bucket] = [*map(_version_of, bucket.params)], set()
        self.renew(bucket, range(len(bucket.params)))

    def renew(self, bucket: Bucket, which: Iterable[int]) -> None:
        """Installs hooks for those of the parameters that have a new node, as `p.set_` gives them. The hook on the old
        node stays, for graphs that still contain it."""
        nodes, arrival_sets = self.nodes[bucket], bucket.gradient.local.arrival_sets
        prepare = partial(_prepare, self._flat, weakref.ref(bucket))  # called before an unexpected gradient is added
        for i in which:
            node = _accumulator_of(bucket.params[i])
            if node is not nodes[i]:
                nodes[i] = node
                hook = self.native.hook(bucket.number, len(bucket.params), i, arrival_sets, prepare)
                self._handles[bucket, i] = node.register_prehook(hook)
        self._written[bucket].difference_update(which)

    def note_writes(self, bucket: Bucket) -> set[int]:
        """Returns the parameters that were written since the last call; `p.set_` counts as a write."""
        before = self._versions[bucket]
        versions = self._versions[bucket] = [*map(_version_of, bucket.params)]
        if versions == before:
            return set()
        written = {i for i, version in enumerate(versions) if version != before[i]}
        self._written[bucket] |= written
        return written

    def expect_writes(self, bucket: Bucket, which: Iterable[int]) -> None:
        """Records that a step has written parameters in place: they have the same nodes as before, so their hooks need
        not be renewed."""
        versions = self._versions[bucket]
        for i in which:
            versions[i] = bucket.params[i]._version

    def renew_written(self, bucket: Bucket, arrived: Collection[int] = ()) -> None:
        """Installs the hooks of parameters that were written.

        Args:
            arrived: the parameters to leave out: their gradients have arrived in this pass, so their hooks work.
        """
        which = self._written[bucket].difference(arrived)
        if which:
            self.renew(bucket, which)

    def renew_before_forward(self, bucket: Bucket) -> None:
        """Installs the hooks of parameters whose `p.data` was replaced and, if the bucket has gradients, of those that
        were written.

        If the bucket has gradients, what a node without a hook adds to `p.grad` would be taken for a part of the mean.
        If it has none, a gradient without a hook is noticed at the end of the pass, and `renew_after_backward` installs
        the hook then. This saves looking up every node in every step, because an optimizer writes all parameters.
        """
        replaced = bucket.memory.replaced
        if replaced:
            self.renew(bucket, replaced)
            replaced.clear()
        if bucket.stage < LAST_STAGE and self.note_writes(bucket) and not bucket.gradient.is_empty:
            bucket.gradient.reconcile()
            if not bucket.gradient.is_empty:
                self.renew_written(bucket)

    def renew_after_backward(self, bucket: Bucket, arrived: Collection[int]) -> None:
        """Installs the hooks of written parameters that may have a node without one.

        A parameter whose gradient arrived through its hook in this pass is left out: its node has the hook. The
        exception is a parameter written since forward began: the gradient came through the node that forward used, and
        `p.set_` may have given the parameter a new one since. Hence ``arrived - written``.
        """
        written = self.note_writes(bucket)
        self.renew_written(bucket, set(arrived) - written)
        self._written[bucket].clear()

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles.values():
            handle.remove()
        for each in (self._handles, self._versions, self._written, self.nodes):
            each.clear()

    def recheck_nesting(self, buckets: Sequence[Bucket]) -> None:
        """If other parameters are trained than before, makes it unknown again whether passes are nested, unless they
        are: a reentrant checkpoint goes unnoticed while all its parameters are frozen."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = [*map(_requires_grad, chain.from_iterable(bucket.params for bucket in buckets))]
        if trained != self._trained:
            self._trained = trained
            self.nested = self.nested or None


@dataclass(frozen=True)
class Config:
    """How a module is wrapped: the arguments of `ringcomm.shard`, or the equivalent of another call's arguments.

    Attributes:
        offload: device of the master weights and the optimizer's state; None: the device of the weights.
        init_fn: whether parameters from the meta device are initialised, not loaded.
        composed: whether the module was wrapped before its optimizer was known.
    """

    stage: int = 2
    units: Units = None
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    bucket_cap_mb: float | None = None
    reshard_after_forward: bool | None = True
    broadcast_buffers: bool = True
    accumulation: str = "sequential"
    atom: Atom | None = None
    offload: torch.device | None = None
    init_fn: bool = True
    composed: bool = True

    def facts(self, units: Sequence[str] = ()) -> list[str]:
        """Returns the facts that ranks must agree on, one line per argument.

        Args:
            units: names of the units that were asked for.
        """
        named = {**vars(self), "units": "the blocks" if self.units is None else list(units)}
        return [f"{name}={value}" for name, value in named.items()]


class ShardedModel:
    """The state of a wrapped module.

    Args:
        units: in the order of forward; the last one is the module itself with the parameters in no other unit.
        ignored_buffers: names of buffers that stay as they are on each rank.
        saving_references: see `ForwardCalls`.

    Attributes:
        unit_of: the unit of each bucket, with the buckets in the order of forward.
        order: the buckets that are trained, in the order of their reductions.
        communication_seconds: this thread's time in calls and waits of collectives.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: DataParallelGroup,
        units: Sequence[Unit],
        config: Config,
        ignored_buffers: Collection[str],
        saving_references: Callable[[ShardedModel], AbstractContextManager[None]],
    ) -> None:
        self.ranks, self.config = ranks, config
        ranks.order = 0  # the ranks' values may differ, because an earlier model lives longer on some of them
        self.contents = ModuleContents(module, ignored_buffers)
        self.units = list(units)
        self.unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self.stage = next(iter(self.unit_of)).stage
        self.order = reduction_order(self.units)
        self.communication_seconds = 0.0
        self.optimizers = AttachedOptimizers(ranks, self.device)
        self.sync = Synchronisation(config.broadcast_buffers)
        self.calls = ForwardCalls(saving_references)
        self.backward = BackwardPass()
        self.arrivals = GradArrivals(self)
        self.gathered = UnshardedState()
        for number, bucket in enumerate(self.unit_of):
            bucket.number = number
        for unit in self.units:
            unit.flat = self
            for bucket in unit.buckets:
                bucket.gathered = self.gathered
        for bucket in self.order:
            self.arrivals.watch(bucket)
        self.map_memory()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.contents.module

    @property
    def device(self) -> torch.device:
        """The device of all buckets."""
        return next(iter(self.unit_of)).device

    @property
    def root(self) -> Unit:
        """The unit of the module itself."""
        return self.units[-1]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets, in the order of forward; a bucket's number is its index."""
        return list(self.unit_of)

    @property
    def unwrapped(self) -> bool:
        """Whether the module is a plain one again."""
        return not self.units

    def map_memory(self) -> None:
        """Maps the memory of each bucket's unsharded buffer to the bucket. At stage 3 a bucket updates the map whenever
        it takes other memory."""
        self.gathered.by_memory = {bucket.unsharded.untyped_storage()._cdata: bucket for bucket in self.buckets}

    def timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """Calls ``call(*args)`` and counts its time as communication."""
        start = time.perf_counter()
        try:
            with self.ranks.explaining(self.stage):
                return call(*args)
        finally:
            self.communication_seconds += time.perf_counter() - start

    # ---- forward --------------------------------------------------------------------------------------------------

    def begin_call(self, unit: Unit, module: nn.Module) -> None:
        """Begins a call of a unit's module: gathers the unit's parameters, and prefetches the next unit's."""
        recomputing = torch._C._current_graph_task_id() >= 0  # activation checkpointing
        if self.calls.depth == 0 and not recomputing:
            self._begin_outermost(module)
        if module is self.module and not recomputing:
            self.begin_forward()
        grad = torch.is_grad_enabled()
        if recomputing and grad:  # recorded before any gradient, which may arrive in a pass inside this one
            unit.recomputed = True
            self.begin_backward()
        self.calls.count += 1
        if grad and unit.calls.first is None:
            unit.calls.first = self.calls.count
        if self.calls.trains and not recomputing:
            unit.calls.trained += 1
            unit.calls.checkpointed |= not grad
        if self.stage == LAST_STAGE:
            if in_transform():
                self._check_transformed(module)
            if module is unit.modules[0] and not recomputing:
                self._gather_ahead(unit)
            else:
                self.timed(unit.gather)
        self._start_packing()  # nothing raises after this; `leave_call` undoes it

    def _check_transformed(self, module: nn.Module) -> None:
        """Raises if a torch.func transform gets views of parameters as arguments, because their values are sharded."""
        for name, p in module.named_parameters():
            inner = p
            while torch._C._functorch.is_functorch_wrapped_tensor(inner):
                inner = torch._C._functorch.get_unwrapped(inner)
            place = getattr(inner, "_ringcomm", None)
            if inner is not p and place is not None and not (place and place.is_of(inner)):
                raise UnsupportedError(
                    f"forward: rank {self.ranks.rank} got a view of {name} (p.detach() or p.data) as an argument of "
                    "a transform of torch.func at stage 3, where its values are in the ranks' shards, expected a "
                    "parameter or a copy; pass {name: p.detach().clone() for name, p in model.named_parameters()}"
                )

    def _begin_outermost(self, module: nn.Module) -> None:
        """Begins a call that is not inside another one: resets the units' records of calls that the last backward
        pass used."""
        calls = self.calls
        calls.trains = torch.is_grad_enabled()
        if calls.trains and calls.used_up:
            calls.used_up = False
            for unit in self.units:
                unit.forget_calls()
            if not self.gathered.holders:
                calls.begin_order()

    def begin_forward(self) -> None:
        """Begins a call of the whole module."""
        if self.backward.scheduled:  # the last backward pass raised
            self._abandon()
        self._check()
        if self.ranks.joining is not None and self.ranks.joining.module is not self.module:
            raise UnsupportedError(
                f"forward: rank {self.ranks.rank} is inside join of another module with the same ranks, expected only "
                "that module there; train this one outside join"
            )
        if not self.gathered.holders:
            self.calls.begin_order()
            self._announce_forward()

    def _announce_forward(self) -> None:
        sends = self.sync.broadcast_buffers and self.sync.buffers_are_due and self.contents.has_buffers
        if sends or self.stage == LAST_STAGE:
            self.ranks.announce("forward")
        if sends:
            self.ranks.announce("buffers")
            self.timed(self.send_buffers)

    def recover(self) -> None:
        """Cleans up after a backward pass that raised, and begins to train parameters that were unfrozen. It is called
        while all ranks still run the same passes, because both need all ranks."""
        if self.backward.is_dead:
            self._abandon()
        self._unfreeze()

    def forget_passes(self) -> None:
        """Drops the records of this rank's passes, after the ranks ran different ones."""
        self.calls.forget_order()
        self.calls.used_up = self.gathered.graph_needs = False
        self.sync.awaits_backward, self.sync.reduces_next_backward, self.sync.buffers_are_due = False, None, True
        for unit in self.units:
            unit.calls, unit.recomputed = UnitCalls(), None
            self._release(unit)

    def _records(self) -> Callable[[], None]:
        """Returns a function that resets the records of this rank's passes to what they are now."""
        used_up, graph_needs = self.calls.used_up, self.gathered.graph_needs
        sync = self.sync.awaits_backward, self.sync.reduces_next_backward, self.sync.buffers_are_due
        units = [(unit, replace(unit.calls), unit.recomputed) for unit in self.units]

        def restore() -> None:
            self.calls.used_up, self.gathered.graph_needs = used_up, graph_needs
            self.sync.awaits_backward, self.sync.reduces_next_backward, self.sync.buffers_are_due = sync
            for unit, counted, recomputed in units:
                unit.calls, unit.recomputed = counted, recomputed

        return restore

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside the block, unsharded parameters stay unsharded, and forward sends no buffers. Entering it sends the
        buffers that the next forward pass would send.

        In the block ranks may run different forward passes, so leaving it drops their records; see
        `ForwardCalls.restore`. Records up to the last backward pass stay, because all ranks run every backward pass.
        """
        if not self.gathered.holders:
            if self.ranks.joining is None:
                self._announce_forward()
                self.sync.buffers_are_due = False
            self.calls.restore = self._records()
        self.gathered.holders += 1
        try:
            yield
        finally:
            self.gathered.holders -= 1
            if not self.gathered.holders and self.calls.restore is not None:
                self.calls.restore()
                self.calls.restore = None

    def _gather_ahead(self, unit: Unit) -> None:
        self.timed(unit.gather)
        if self.gathered.holders:
            return
        following = self.calls.after(unit)
        if unit.forward_prefetch is not None:
            following = unit.forward_prefetch
        elif not self.ranks.background:
            return
        for each in following:
            self.timed(each.start_gather)

    def leave_call(self, done: bool) -> None:
        """Ends a call that has returned or raised."""
        self._stop_packing()
        if torch._C._current_graph_task_id() < 0:
            for bucket in self.unit_of if not done or self.calls.depth == 0 else ():
                if bucket.memory.borrowed or not done:
                    self._release(bucket)
            self.use_sharded_classes()

    def end_call(self, unit: Unit, module: nn.Module) -> int | None:
        """Ends a call that has returned, and frees gathered parameters. Returns the number of the last call that has
        begun, for the hooks on the output's gradients; None: no hooks are needed."""
        recomputing = torch._C._current_graph_task_id() >= 0
        if not recomputing:
            again = unit.reshard_after_forward or not torch.is_grad_enabled()
            if module is unit.modules[-1] and again:
                self._release(unit)
            if module is self.module:
                self._end_forward()
        return self.calls.count if torch.is_grad_enabled() and (self.stage >= 2 or module is self.module) else None

    def _end_forward(self) -> None:
        """Ends the whole module's forward: frees parameters that were gathered and not used."""
        trains = self.sync.enabled and torch.is_grad_enabled()
        # Ranks may evaluate any number of times inside `whole`.
        self.sync.buffers_are_due = trains or (self.sync.buffers_are_due and self.gathered.holders > 0)
        for unit in self.units:
            if unit.reshard_after_forward or not torch.is_grad_enabled():
                self._release(unit)

    def _release(self, held: Unit | Bucket) -> None:
        if not (self.gathered.graph_needs or self.gathered.holders):
            held.release()
            if isinstance(held, Bucket):
                held.views.are_stale = True

    def use_sharded_classes(self) -> None:
        """Stage 3, outside of calls: gives parameters that stay gathered the class of sharded ones. Reads of them then
        go through us, so that autograd saves references to them."""
        if self.calls.depth or self.gathered.holders or self.sync.microbatches is not None:
            return
        for bucket in self.unit_of if self.stage == LAST_STAGE else ():
            bucket.memory.use_sharded_class(True)

    # Saved parameters, at stage 3.

    def _start_packing(self) -> None:
        packing = self.calls.saving_references(self) if self.stage == LAST_STAGE else nullcontext()
        packing.__enter__()
        self.calls.packing.append(packing)

    def _stop_packing(self) -> None:
        self.calls.packing.pop().__exit__(None, None, None)

    @contextmanager
    def borrowing(self, buckets: Sequence[Bucket], name: str, call: str) -> Iterator[bool]:
        """Gathers the buckets' parameters for the block, even outside of forward and backward; a collective. Yields
        whether they stay gathered after the block, as inside a forward or backward pass."""
        backward = torch._C._current_graph_task_id() >= 0
        stays = backward or self.calls.depth > 0
        missing = [bucket for bucket in buckets if not bucket.is_unsharded]
        if missing and stays and not backward:
            self._warn_of_read(name, call)
        if missing and not stays:
            self.timed(self.ranks.barrier)
        for bucket in missing:
            self.timed(bucket.start_gather)
        for bucket in buckets:
            self.timed(bucket.finish_gather)
            bucket.memory.borrowed |= bucket in missing
            unit = self.unit_of[bucket]
            if unit.calls.first is None and torch.is_grad_enabled():
                self.calls.count += 1
                unit.calls.first = self.calls.count
        self._start_packing()
        try:
            yield stays
        finally:
            self._stop_packing()
            for bucket in missing if not stays else ():
                bucket.release()

    def _warn_of_read(self, name: str, call: str) -> None:
        if not self.calls.warned:
            self.calls.warned = True
            warnings.warn(
                f"forward: rank {self.ranks.rank} read {name} ({call}) outside of its unit's call, so the unit was "
                "gathered for this read; to save the gather, choose units so that one contains both",
                stacklevel=user_stacklevel(),
            )

    def send_buffers(self) -> None:
        """Sends the first rank's buffers to every rank, in one message for each type."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.contents.buffers:
            by_type.setdefault(buffer.dtype, []).append(buffer.detach())
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.ranks.broadcast(flat)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                # Through `data`, as torch's DDP does, so that graphs that have saved the buffer stay valid.
                buffer.data.copy_(values.view(buffer.shape))

    # ---- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called when a pass of autograd begins; registers a callback for its end."""
        if self.backward.scheduled and not self.backward.is_dead:
            return
        if self.backward.is_dead:
            self._abandon()
        self.backward.scheduled = True
        self.backward.task = torch._C._current_graph_task_id()
        kept = self.stage < LAST_STAGE or self.gathered.graph_needs or self.gathered.holders
        # The module's own unit is the last one that backward passes.
        self.backward.gathers = not kept and all(unit.reshard_after_forward for unit in self.units[:-1])
        for unit in self.units:
            if unit.calls.checkpointed:
                nodes = (node for bucket in unit.buckets for node in self.arrivals.nodes.get(bucket, ()))
                if any(map(will_run, nodes)):
                    self.backward.used_outside.add(unit)
        end = partial(ShardedModel._end_backward, self)
        self.backward.end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        if self._will_accumulate():
            self._accumulate()

    def _accumulate(self) -> None:
        """Records that the pass was started by backward, not by torch.autograd.grad."""
        if not self.backward.accumulates:
            self.backward.accumulates = True
            copy_exchanged_grads([bucket.gradient for bucket in self.order])
            if self.sync.reduces or self.stage == LAST_STAGE:
                self.ranks.announce("backward")

    def _will_accumulate(self) -> bool:
        nodes = self.arrivals.nodes
        if any(map(will_run, chain.from_iterable(nodes.values()))):
            return True
        if in_transform():  # nodes cannot be looked up there
            return False
        for bucket in nodes:  # torch.autograd.grad, or all parameters have other nodes since `p.set_`
            self.arrivals.renew_written(bucket)
        return any(map(will_run, chain.from_iterable(nodes.values())))

    def reach(self, unit: Unit, number: int) -> None:
        """Called when backward reaches the output of a unit's call, or a parameter that the call saved: calls with a
        later number are done."""
        self.begin_backward()
        self._handle_complete_bucket()
        if torch.is_grad_enabled():
            self.backward.makes_graph = True
            self.gathered.graph_needs = self.stage == LAST_STAGE
        self._finish_units_after(number)
        if unit.calls.first is None or unit.calls.first > number:  # from a graph older than the last backward pass
            unit.calls.first = 0
        self.backward.reached[unit] = None
        if self.stage == LAST_STAGE and not unit.is_unsharded:
            self.timed(unit.gather)
            before = unit.backward_prefetch
            if before is None:  # gathered while this unit computes
                before = self.calls.before(unit) if self.ranks.background else []
            for each in before:
                self.timed(each.start_gather)

    def _finish_units_after(self, number: int) -> None:
        """Finishes units that are done in backward, because all their calls come after call ``number`` in forward."""
        done = [unit for unit in self.backward.reached if _first_call(unit) > number]
        for unit in sorted(done, key=_first_call, reverse=True):
            if all(self._is_complete(bucket) for bucket in unit.buckets):
                del self.backward.reached[unit]
                if unit.reshard_after_backward:
                    self._release(unit)
                self.finish_unit(unit)

    def _is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients of the bucket have arrived in this pass."""
        if self.arrivals.native.adding_elsewhere() == bucket.number:
            return False
        arrived, nodes = self.backward.arrived.get(bucket, ()), self.arrivals.nodes.get(bucket, ())
        if len(arrived) == len(nodes):
            return True
        if nodes:
            self.arrivals.renew_written(bucket, arrived)
        return not any(will_run(node) for i, node in enumerate(nodes) if i not in arrived)

    def _waits(self, bucket: Bucket) -> bool:
        """Whether a bucket is only reduced at the end of the backward pass, because its gradients may come more than
        once."""
        unit = self.unit_of[bucket]
        return unit.repeats or (self.arrivals.nested is not False and (unit is self.root or self.stage < 2))

    def prepare(self, bucket: Bucket, i: int) -> None:
        """Called when an unexpected gradient is about to be added to `p.grad`: begins the pass or opens the bucket."""
        backward = self.backward
        if not (backward.scheduled and backward.accumulates) or backward.is_dead:
            self.begin_backward()
            self._accumulate()
            backward = self.backward
        self._handle_complete_bucket()
        if bucket in backward.launched:
            # From the next pass on, the bucket is reduced at the end of the pass.
            self.arrivals.nested = self.unit_of[bucket].had_late_gradient = True
            raise InvalidArgumentError(
                f"backward: rank {self.ranks.rank} got a gradient of {bucket.names[i]} after the gradients of its unit "
                "had been reduced, expected one in each backward pass; use non-reentrant activation checkpointing, or "
                "another stage if a Function's own backward() calls backward"
            )
        if not bucket.gradient.is_open:
            try:
                bucket.gradient.open(backward.arrived.setdefault(bucket, set()))
            except RuntimeError:
                bucket.find_replaced_data("backward")  # raises if forward has cast a parameter
                raise
        task = torch._C._current_graph_task_id()
        if task != backward.task:
            self.arrivals.nested = True  # a reentrant checkpoint
        self.arrivals.native.expected = task

    def _handle_complete_bucket(self) -> None:
        """If this thread has added the last gradient of a bucket, packs the bucket or starts its reduction."""
        number = self.arrivals.native.take_complete()
        if number < 0:
            return
        bucket = self.buckets[number]
        if self._waits(bucket):
            return
        if not self.sync.reduces:
            self._pack(bucket)
        elif self.stage < LAST_STAGE:
            self._launch_ready()

    def _pack(self, bucket: Bucket) -> None:
        bucket.gradient.pack(self.sync.microbatches is not None, self.sync.microbatch)

    def _launch_ready(self) -> None:
        """Starts the reductions of complete buckets, in the order that is the same on all ranks."""
        backward = self.backward
        while backward.next < len(self.order):
            bucket = self.order[backward.next]
            if bucket not in backward.launched:
                arrived = len(backward.arrived.get(bucket, ()))
                if not (bucket in backward.filled or arrived == len(bucket.params)) or self._waits(bucket):
                    return
                self.start_reduce(bucket)
            backward.next += 1

    def start_reduce(self, bucket: Bucket) -> None:
        """Starts a bucket's reduction."""
        gradient = bucket.gradient
        while self.stage >= 2 and len(self.backward.in_flight) >= IN_FLIGHT:
            self._finish_first_reduce()
        if gradient.is_open:
            gradient.pack()
        else:
            gradient.adopt_user_grads("backward", own=True)  # no gradient has arrived
        self.backward.launched.add(bucket)
        self.ranks.announce("reduce", bucket.number)
        sync_grads_from_root([gradient])
        hook = self.sync.hook
        if hook is None:
            self.timed(gradient.start_reduce)
        else:
            self.timed(gradient.start_reduce, partial(hook, bucket, self.order.index(bucket), bucket is self.order[-1]))
        self.backward.in_flight.append(bucket)
        # A communication hook may communicate from another thread, at a different time on each rank, so wait for it.
        if not self.ranks.background or (hook is not None and bucket.device.type == "cpu"):
            self._finish_first_reduce()

    def _finish_first_reduce(self) -> None:
        bucket = self.backward.in_flight.popleft()
        self.timed(bucket.gradient.finish_reduce)
        for host in self.optimizers.hosts if bucket.master_device is not None else ():
            host.start_copy(bucket)

    def finish_unit(self, unit: Unit) -> None:
        """Handles a unit that backward has passed: no more gradients will arrive."""
        if not self.backward.accumulates:
            return
        for bucket in reversed(unit.buckets):
            if not bucket.trainable or bucket in self.backward.launched or self._waits(bucket):
                continue
            if not self.sync.reduces:
                if bucket.gradient.is_open:
                    self._pack(bucket)
            elif self.backward.gathers:  # every rank has gathered the same units
                self.start_reduce(bucket)
            else:  # another rank may not have run this unit
                self.backward.filled.add(bucket)
                self._launch_ready()

    @eager
    def _end_backward(self) -> None:
        """Ends a pass of autograd."""
        if not self.backward.accumulates:
            self._reset()
            return
        try:
            if self.sync.reduces:
                for bucket in self.order:
                    if bucket not in self.backward.launched:
                        self.start_reduce(bucket)
                self.ranks.announce("used")
            self.finish_reductions()
        except BaseException:
            self._abandon()
            raise

    def finish_reductions(self) -> None:
        """Waits for all buckets' reductions and exposes their gradients."""
        if self.sync.reduces:
            used = self._start_used_params()  # after all buckets, so that the order is the same on all ranks
            while self.backward.in_flight:
                self._finish_first_reduce()
            self._finish_used_params(used)
        for bucket in self.order:
            if bucket.gradient.is_open:
                self._pack(bucket)
            elif bucket not in self.backward.launched and bucket not in self.backward.arrived:
                bucket.gradient.reconcile()  # not reached by this pass: gradients that were set to None stay None
            try:
                bucket.gradient.expose_grads()
            except RuntimeError:
                bucket.find_replaced_data("backward")
                raise
            if bucket.stage < LAST_STAGE:
                arrived = self.backward.arrived.get(bucket, ())
                self.arrivals.renew_after_backward(bucket, arrived)
        self._reset()

    def _start_used_params(self) -> tuple[bytes, bytearray, torch.Tensor, Any]:
        """Starts the message that ends a synchronised backward pass, of which the ranks get the maximum of each byte:
        the header (see `HEADER_NBYTES`), for every trainable parameter whether it has a gradient on this rank, and at
        stage 3 a checksum of the units' order.

        Returns: this rank's message; the host memory for the maximum, which has it only on the CPU; the memory on the
            model's device; and the work, None if it is done.
        """
        sent = self.optimizers.checksum() + (b"\1" if self.arrivals.nested else b"\0")
        for bucket in self.order:
            has = bucket.gradient.local.contributed | bucket.gradient.with_mean
            numel = len(bucket.params)
            sent += b"\1" * numel if len(has) == numel else bytes(i in has for i in range(numel))
        if self.stage == LAST_STAGE:
            sent += with_complement(self.ranks.order)
        received = bytearray(sent)
        flags = torch.frombuffer(received, dtype=torch.uint8)
        if self.device.type == "cuda":  # pinned, else the host would wait for the copy, and so for backward
            flags = flags.pin_memory()
        flags = flags.to(self.device, non_blocking=True)
        if self.ranks.data_world_size == 1:
            return sent, received, flags, None
        self.ranks.count("flags", flags.nbytes)
        with self.ranks.on_side_stream(flags):
            work = self.ranks.comm.all_reduce(flags, "max", async_op=self.ranks.background)
        return sent, received, flags, work if self.ranks.background else None

    def _finish_used_params(self, used: tuple[bytes, bytearray, torch.Tensor, Any]) -> None:
        sent, received, flags, work = used
        if work is not None:
            self.timed(work.wait)
        if self.ranks.replicas is not None:
            self.ranks.replicas.all_reduce(flags, "max")
        # The common case: if the maximum equals this rank's checksum and complement, all ranks' checksums are equal.
        if self.device.type == "cpu" and received == sent:
            return
        missing = any(len(bucket.gradient.with_mean) < len(bucket.params) for bucket in self.order)
        if self.device.type != "cuda":
            values = flags.tolist()
            self._read_header(values)
        else:  # reads the header of the previous backward pass, so as not to wait for this one
            before = self.sync.last_header
            header = torch.empty(HEADER_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            header.copy_(flags[:HEADER_NBYTES], non_blocking=True)
            self.sync.last_header = header, torch.cuda.current_stream(self.device).record_event()
            if before is not None:
                before[1].synchronize()
                self._read_header(before[0].tolist())
            values = flags.tolist() if missing else []
        if not values:
            return
        if self.stage == LAST_STAGE and differ(values[-2 * CHECKSUM_NBYTES :]):
            self.ranks.order = 0  # the same value on every rank again
            self.calls.forget_order()
            raise MismatchError(
                f"backward: rank {self.ranks.rank} ran other units than another rank, expected the same units in the "
                "same order on all ranks, because at stage 3 their parameters come from all ranks; make no unit of a "
                "module that only some ranks run"
            )
        users = iter(values[HEADER_NBYTES:])
        for bucket in self.order if missing else ():
            bucket.gradient.with_mean |= {i for i in range(len(bucket.params)) if next(users)}

    def _read_header(self, values: list[int]) -> None:
        """Records whether the ranks' optimizers have different options, so that their next step raises, and whether
        any rank has reentrant checkpoints."""
        *options, reenters = values[:HEADER_NBYTES]
        self.optimizers.options_differ |= differ(options)
        if reenters:
            self.arrivals.nested = True

    def _reset(self, done: bool = True) -> None:
        ended, self.backward = self.backward, BackwardPass()
        self.arrivals.native.end()
        if ended.accumulates and not ended.makes_graph:  # the graph of an earlier pass is used up
            self.gathered.graph_needs = False
        if done and ended.accumulates and self.arrivals.nested is None:
            self.arrivals.nested = False
        self.calls.used_up |= ended.accumulates
        self.sync.awaits_backward &= not ended.accumulates
        if self.gathered.holders and ended.accumulates:
            self.calls.restore = self._records()
        for unit in self.units:
            if unit.reshard_after_backward and self.sync.microbatches is None:
                self._release(unit)
        self.use_sharded_classes()

    def _abandon(self) -> None:
        """Drops a backward pass that failed, and all gradients with it."""
        if self.backward.accumulates:
            self.forget_gradients()
        self.gathered.graph_needs = False
        self._reset(done=False)

    # ---- gradients ------------------------------------------------------------------------------------------------

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Inside the block, parts of the module may run forward and backward in any order, as in a pipeline's step.
        Parameters stay unsharded, gradients accumulate, and are reduced once at the end (inside `no_sync` not at all).
        Call `begin_part` before each part."""
        self.begin_forward()
        self.sync.buffers_are_due = self.sync.enabled and torch.is_grad_enabled()
        for unit in self.units:
            self.timed(unit.gather)
        for bucket in self.order:
            bucket.gradient.local.begin_step()
        self.sync.microbatches = microbatches = 0
        try:
            with self.sync.no_sync():
                yield
            microbatches = self.sync.microbatches
        except BaseException:
            self.sync.microbatches = self.sync.microbatch = None
            self.backward.accumulates = True
            self._abandon()
            raise
        self.sync.microbatches = self.sync.microbatch = None
        for bucket in self.order:
            bucket.gradient.end_step(microbatches)
        if torch.is_grad_enabled() and self.sync.enabled:
            self.backward.accumulates = True
            self._end_backward()
        else:
            self._reset()

    def begin_part(self, microbatch: int | None) -> None:
        """Inside `interleaved`: sets the micro-batch of the following passes; None: for each parameter the next
        one."""
        assert self.sync.microbatches is not None
        self.sync.microbatch = microbatch
        self.sync.microbatches = max(self.sync.microbatches, 0 if microbatch is None else microbatch + 1)

    def forget_gradients(self) -> None:
        """Drops the gradients as zero_grad() does."""
        for bucket in self.order:
            for p in bucket.params:
                p.grad = None
            bucket.gradient.drop()

    def restage(self, stage: int) -> None:
        """Moves all buckets to another stage, and drops the gradients."""
        self.forget_gradients()
        self.stage = stage
        for bucket in self.buckets:
            bucket.restage(stage)
        self.map_memory()

    def prepare_unwrap(self) -> None:
        """Cleans up after a failed pass, and frees gathered parameters. Raises if the module cannot be unwrapped."""
        if self.ranks.joining is not None:
            raise UnsupportedError(
                f"unshard: rank {self.ranks.rank} is inside join, expected to be outside; leave join first"
            )
        if self.backward.scheduled:  # the last backward pass raised
            self._abandon()
        self.contents.check_made("unshard", self.buckets, self.ranks)
        for unit in self.units:
            unit.release()

    def unwrap(self) -> None:
        """Makes the module a plain one; a collective."""
        self.optimizers.options_differ = False
        for unit in self.units:
            unit.unwrap()
        self.detach()
        for unit in self.units:  # so that nothing waits for garbage collection
            del unit.flat
        self.units.clear()

    def detach(self) -> None:
        """Removes all hooks; the parameters stay where they are."""
        self.arrivals.stop()
        for bucket in self.buckets:
            for p in bucket.params:
                del p._ringcomm

    # ---- changes of the module ------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Applies changes that were made to the module since it was wrapped, or raises."""
        new = self.contents.new_parameter(self.buckets)
        if new:
            raise InvalidArgumentError(
                f"forward: rank {self.ranks.rank} got the new parameter {new} after the module was wrapped, expected "
                "the parameters as they were; ringcomm.unshard the module, change it and wrap it again"
            )
        for bucket in self.buckets:
            if bucket.stage < LAST_STAGE:
                bucket.find_replaced_data("forward")
            if bucket in self.arrivals.nodes:
                self.arrivals.renew_before_forward(bucket)
        self.contents.check_made("forward", self.buckets, self.ranks)
        self._unfreeze()
        self.arrivals.recheck_nesting(self.order)

    def _unfreeze(self) -> None:
        """Starts to train frozen buckets in which a parameter now requires a gradient. All ranks must do the same."""
        thawed = [g for g in self.buckets if not g.trainable and any(p.requires_grad for p in g.params)]
        if not thawed:
            return
        self.ranks.agree("forward", [f"trains {name}" for bucket in thawed for name in bucket.names])
        for bucket in thawed:
            bucket.thaw()
            self.arrivals.watch(bucket)
        self.order = reduction_order(self.units)
        self.optimizers.after_thaw(self)


def reduction_order(units: Sequence[Unit]) -> list[Bucket]:
    """Returns the buckets that are trained, roughly in the order in which backward completes them. The module's own
    parameters come last, because backward may use them at its beginning and at its end."""
    launched = [*reversed(units[:-1]), units[-1]]
    return [bucket for unit in launched for bucket in reversed(unit.buckets) if bucket.trainable]


def will_run(node: Any) -> bool:
    """Whether the running pass of autograd will execute a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises it in torch.autograd.grad of a parameter
        return False


def _accumulator_of(p: nn.Parameter) -> Any:
    """Returns the autograd node that adds a gradient to ``p.grad``."""
    trained = p.requires_grad
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        p.requires_grad_(True)  # autograd has a node only for parameters that require a gradient
        node = p.view_as(p).grad_fn.next_functions[0][0]
        p.requires_grad_(trained)
    return node


def _first_call(unit: Unit) -> int:
    return unit.calls.first or 0


@eager
def _prepare(flat: weakref.ref[ShardedModel], bucket: weakref.ref[Bucket], i: int) -> None:
    here, home = flat(), bucket()
    if here is not None and home is not None:
        here.prepare(home, i)


def flags_numel(buckets: Sequence[Bucket], stage: int) -> int:
    """Returns the bytes of the message that ends a synchronised backward pass: the header, the used parameters, and
    at stage 3 a checksum of the units' order."""
    used = sum(len(bucket.params) for bucket in buckets)
    return HEADER_NBYTES + used + (2 * CHECKSUM_NBYTES if stage == LAST_STAGE else 0)
