"""A module whose parameters live in flat groups: what happens in forward and backward, at every stage.

    stage   parameters   gradients               optimizer   when a group is reduced
    0       whole        whole                   whole       its gradients and those of all groups before it are there
    1       whole        whole until reduced     shard       the same
    2       whole        shard                   shard       backward has passed its unit and all before it
    3       shard        shard                   shard       backward has passed its unit

Every rank reduces in the same order, whatever its own gradients' order of arrival. At the end of a backward pass all is
reduced and waited for; which parameters no rank has used is agreed with one message of a byte for each.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringcomm.parallel.group import LAST_STAGE, FlatGroup
from ringcomm.parallel.precision import MixedPrecision
from ringcomm.parallel.ranks import Ranks
from ringcomm.parallel.unit import Unit

if TYPE_CHECKING:
    from ringcomm.parallel.optimizer import Attached

_T = TypeVar("_T")
ORDER_NBYTES = 4  # of the checksum of a stage 3's order
OPTIONS_NBYTES = 4  # of the checksum of the optimizers' options
IN_FLIGHT = 2  # reductions at stages 2 and 3, each with a whole buffer of its own


class FlatModel:
    """The state of a wrapped module.

    Args:
        units: in the order of forward; the last one is the module itself with what is in no other unit.
        broadcast_buffers: whether every synchronised forward pass in training begins with rank 0's buffers.
        composed: whether it was made by `fully_shard`, before its optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        stage: int,
        precision: MixedPrecision,
        units: Sequence[Unit],
        broadcast_buffers: bool,
        composed: bool = False,
    ) -> None:
        self.composed = composed
        self.module, self.ranks, self.stage, self.precision = module, ranks, stage, precision
        self.units, self.root = list(units), units[-1]
        self.groups = [group for unit in units for group in unit.groups]
        for number, group in enumerate(self.groups):
            group.number = number
        # About the order in which backward finishes; the module's own parameters are used at both of its ends.
        launched = [*reversed(self.units[:-1]), self.root]
        self.order = [group for unit in launched for group in reversed(unit.groups) if group.trainable]
        self.device = self.groups[0].device
        self.broadcast_buffers = broadcast_buffers
        self.communication_seconds = 0.0  # this thread's time in the calls and waits of collectives
        self.optimizers: list[Attached] = []
        self.on_reduced: list[Callable[[FlatGroup], None]] = []
        self.options_differ = False  # whether the ranks' optimizers had different options in the last backward pass
        self._options_heard: torch.Tensor | None = None
        self.sync = True
        self.held = False  # whether parameters stay whole, and nothing is reduced: inside of `interleaved`
        self.leaf: int | None = None  # the micro-batch that a backward pass inside is a part of
        self._leaves = 0  # how many there were
        self.backwards = 0  # how many there were
        self._scheduled = False  # whether this backward pass has asked for its end
        self._peeking = False  # whether this pass of autograd may be one of torch.autograd.grad
        self._next = 0  # of `order`: what stages 0 and 1 launch next
        self._arrived: dict[FlatGroup, int] = {}
        self._passed: set[FlatGroup] = set()  # at stage 2
        self._launched: set[FlatGroup] = set()
        self._in_flight: deque[FlatGroup] = deque()
        self._seen: list[Unit] = []  # units of this forward pass
        self._last: list[Unit] = []  # of the one before
        self._handles: list[Any] = []
        self._census = _census(module)
        for unit in self.units:
            unit.hook(self)
        for group in self.order:
            for i, p in enumerate(group.params):
                p._ringcomm = (self, group, i)
                self._handles.append(p.register_hook(partial(self._before, group)))
                call = partial(_after_of, weakref.ref(self), group.number, i)
                self._handles.append(p.register_post_accumulate_grad_hook(call))
        for group in self.groups:
            for p in group.params:
                p._ringcomm_flat = self

    def timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """``call(*args)``, its time counted as communication."""
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.communication_seconds += time.perf_counter() - start

    # ---- forward --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The module is called."""
        if self._scheduled:  # the last backward pass raised half-way
            self._abandon()
        self._check()
        if self.ranks.joining is not None and self.ranks.joining.flat is not self:
            raise UnsupportedError(
                f"forward: rank {self.ranks.rank} is inside of join for another module that shares its ranks, expected "
                "that one alone; train this one outside"
            )
        self._last, self._seen = self._seen or self._last, []
        for unit in self.units:
            unit.calls = None
        sends = self.broadcast_buffers and self.sync and self.module.training and torch.is_grad_enabled()
        sends = sends and any(True for _ in self.module.buffers())
        if sends or self.stage == LAST_STAGE:
            self.ranks.announce("forward")
        if sends:
            self.ranks.announce("buffers")
            self.timed(self.send_buffers)

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins: its parameters are brought, and the next one's are sent for."""
        at = len(self._seen)
        self._seen.append(unit)
        if self.stage < LAST_STAGE:
            return
        self.timed(unit.gather)
        ahead = unit.forward_prefetch
        if ahead is None:
            expected = self._last[at : at + 2]
            ahead = expected[1:] if self.ranks.background and expected[:1] == [unit] else []
        for each in ahead:
            each.start_gather()

    def end_forward(self) -> None:
        """The module returns: what was brought and not used goes."""
        for unit in self.units:
            if unit.reshard_after_forward or not torch.is_grad_enabled():
                unit.release()

    def before(self, unit: Unit) -> list[Unit]:
        """The unit whose forward came before this one's, if it is to be sent for while this one computes."""
        if not self.ranks.background:
            return []
        at = next((i for i in reversed(range(len(self._seen))) if self._seen[i] is unit), 0)
        return self._seen[at - 1 : at] if at else []

    def send_buffers(self) -> None:
        """Every rank gets the first one's buffers, in one message for each type."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer.detach())
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.ranks.broadcast(flat)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))

    # ---- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Something of a backward pass has come; its end is to be noticed."""
        if not self._scheduled:
            self._scheduled = True
            self.backwards += 1
            if self.sync or self.stage == LAST_STAGE:
                self.ranks.announce("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _before(self, group: FlatGroup, _: torch.Tensor) -> None:
        """A gradient of the group is about to be added to `p.grad`."""
        gradient = group.gradient
        if not gradient.opened and group not in self._launched:
            gradient.open()
            if not (self._scheduled or self._peeking):
                self._peeking = True
                torch.autograd.Variable._execution_engine.queue_callback(self._peeked)

    def _peeked(self) -> None:
        """End of a pass of autograd: one of torch.autograd.grad has added nothing; what was there is shown again."""
        self._peeking = False
        if not self._scheduled:
            for group in self.order:
                if group.gradient.opened:
                    group.gradient.close()

    def _after(self, group: FlatGroup, i: int, _: torch.Tensor) -> None:
        """A parameter's gradient is complete on this rank."""
        self.begin_backward()
        if group in self._launched:
            raise InvalidArgumentError(
                f"backward: rank {self.ranks.rank} got a gradient of {group.names[i]} after its unit's had been "
                "reduced, expected one in each backward pass; use non-reentrant activation checkpointing, and keep a "
                "parameter that is used in several units out of all of them"
            )
        group.gradient.contributed.add(i)
        arrived = self._arrived[group] = self._arrived.get(group, 0) + 1
        if arrived < len(group.params):
            return
        if not self.sync:
            self._collect(group)
        elif self.stage < 2:
            self._launch_while(lambda group: self._arrived.get(group, 0) == len(group.params))

    def _collect(self, group: FlatGroup) -> None:
        group.gradient.collect(self.held, self.leaf)

    def _launch_while(self, ready: Callable[[FlatGroup], bool]) -> None:
        """Launches what is ready, in the order that all ranks keep."""
        while self._next < len(self.order) and ready(self.order[self._next]):
            self.launch(self.order[self._next])

    def launch(self, group: FlatGroup) -> None:
        """Starts a group's reduction."""
        gradient = group.gradient
        while self.stage >= 2 and len(self._in_flight) >= IN_FLIGHT:
            self._settle()
        if gradient.opened:
            gradient.collect()
        else:
            gradient.reconcile()  # nothing has arrived
        self._launched.add(group)
        while self._next < len(self.order) and self.order[self._next] in self._launched:
            self._next += 1
        self.ranks.announce("reduce", group.number, gradient.has_reduced)
        self.timed(gradient.launch)
        self._in_flight.append(group)
        # The future of a hook may send more, from another thread, at another time on each rank.
        if not self.ranks.background or (group.hook is not None and group.device.type == "cpu"):
            self._settle()

    def _settle(self) -> None:
        group = self._in_flight.popleft()
        self.timed(group.gradient.settle)
        for notify in self.on_reduced:
            notify(group)

    def flush(self, unit: Unit) -> None:
        """Backward has passed a unit, whose gradients are as complete as they will be."""
        for group in reversed(unit.groups):
            if not group.trainable or group in self._launched:
                continue
            if not self.sync:
                if group.gradient.opened:
                    self._collect(group)
            elif self.stage == LAST_STAGE:  # every rank has gathered the same units
                self.launch(group)
            else:  # a rank may have left some out
                self._passed.add(group)
                self._launch_while(self._passed.__contains__)

    def _finish(self) -> None:
        """End of backward."""
        try:
            if self.sync:
                for group in self.order:
                    if group not in self._launched:
                        self.launch(group)
                self.ranks.announce("used")
            self.conclude()
        except BaseException:
            self._abandon()
            raise

    def conclude(self) -> None:
        """All groups are on their way: waits for them, and shows their gradients."""
        if self.sync:
            used = self._say_who_was_used()  # behind all groups: some ranks have launched them before
            while self._in_flight:
                self._settle()
            self._hear_who_was_used(used)
        for group in self.order:
            if group.gradient.opened:
                self._collect(group)
            group.gradient.show()
        self._reset()

    def _say_who_was_used(self) -> tuple[torch.Tensor, Any]:
        """Starts the message in which every trainable parameter that this rank has a gradient of is a 1."""
        mine = []
        for group in self.order:
            has = group.gradient.contributed | group.gradient.has
            mine += [int(i in has) for i in range(len(group.params))]
        if self.stage == LAST_STAGE:  # the largest of a byte and of its complement add up to 255 where all are equal
            order = self.ranks.order.to_bytes(ORDER_NBYTES, "little")
            mine += [*order, *(255 - byte for byte in order)]
        options = self._options_checksum()
        flags = torch.tensor([*options, *mine], dtype=torch.uint8, device=self.device)
        if self.ranks.data_world_size == 1:
            return flags, None
        self.ranks.count("flags", flags.nbytes)
        return flags, self.ranks.comm.all_reduce(flags, "max", async_op=True)

    def _hear_who_was_used(self, said: tuple[torch.Tensor, Any]) -> None:
        flags, work = said
        if work is not None:
            self.timed(work.wait)
        if self.ranks.replicas is not None:
            self.ranks.replicas.all_reduce(flags, "max")
        flags = self._hear_options(flags)
        missing = any(len(group.gradient.has) < len(group.params) for group in self.order)
        looks = self.stage == LAST_STAGE and self.device.type == "cpu"
        if not (missing or looks):  # the common case does not wait for a device
            return
        values = flags.tolist()
        if self.stage == LAST_STAGE:
            order, complement = values[-2 * ORDER_NBYTES : -ORDER_NBYTES], values[-ORDER_NBYTES:]
            if any(a + b != 255 for a, b in zip(order, complement, strict=True)):
                self.ranks.order = 0  # on every rank; what the pass has computed is forgotten
                raise MismatchError(
                    f"backward: rank {self.ranks.rank} ran other units than another rank did, expected the same ones, "
                    "in the same order, at stage 3, where their parameters come from all ranks; put a module that only "
                    "some ranks run into no unit of its own"
                )
        heard = iter(values)
        for group in self.order:
            group.gradient.has |= {i for i in range(len(group.params)) if next(heard)}

    def _options_checksum(self) -> list[int]:
        """Of the optimizers' options and its complement, as for the order; zeros of a rank that has joined, whose
        options follow the others' at each step."""
        if self.ranks.joining is not None and self.ranks.joining.shadowing:
            return [0] * (2 * OPTIONS_NBYTES)
        found = 0
        for attached in self.optimizers:
            found = zlib.crc32(attached.options_bytes(), found)
        some = found.to_bytes(OPTIONS_NBYTES, "little")
        return [*some, *(255 - byte for byte in some)]

    def _hear_options(self, flags: torch.Tensor) -> torch.Tensor:
        """Notes whether the ranks' optimizers have different options, of which their next step speaks; on a device one
        backward pass later, which does not wait for it. Returns the rest of the message."""
        heard = flags[: 2 * OPTIONS_NBYTES]
        looked = heard
        if self.device.type != "cpu":
            looked, self._options_heard = self._options_heard, heard.clone()
        values = [255] * 4 + [0] * 4 if looked is None else looked.tolist()
        pairs = zip(values[:OPTIONS_NBYTES], values[OPTIONS_NBYTES:], strict=True)
        self.options_differ = any(a + b != 255 for a, b in pairs)
        return flags[2 * OPTIONS_NBYTES :]

    def _reset(self) -> None:
        self._scheduled, self._peeking, self._next = False, False, 0
        self._passed.clear()
        self._arrived.clear()
        self._launched.clear()
        self._in_flight.clear()
        for unit in self.units:
            unit.in_backward, unit.pending, unit.calls = False, 0, None
            if unit.reshard_after_backward and not self.held:
                unit.release()

    def _abandon(self) -> None:
        """Forgets a backward pass that failed, and all gradients with it."""
        self.forget_gradients()
        self._reset()

    # ---- gradients ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate on this rank; the next one outside reduces the sums."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """A step of forward and backward passes of parts of the module in any order, as in a pipeline: parameters are
        whole throughout, gradients add up, and one reduction comes at the end (none inside of `no_sync`). `begin_part`
        says what comes next."""
        self.begin_forward()
        for unit in self.units:
            self.timed(unit.gather)
        for group in self.order:
            group.gradient.begin_parts()
        before, self.sync, self.held = self.sync, False, True
        self.leaf, self._leaves = None, 0
        try:
            yield
        except BaseException:
            self.sync, self.held = before, False
            self._abandon()
            raise
        self.sync, self.held = before, False
        for group in self.order:
            group.gradient.end_parts(self._leaves)
        if torch.is_grad_enabled() and self.sync:
            self._finish()
        else:
            self._reset()

    def begin_part(self, microbatch: int | None) -> None:
        """Inside of `interleaved`: what follows is a part of this micro-batch's passes; None: of each parameter's
        next."""
        self.leaf = microbatch
        self._leaves = max(self._leaves, 0 if microbatch is None else microbatch + 1)

    def forget_gradients(self) -> None:
        """As zero_grad() does."""
        for group in self.order:
            group.gradient.drop()
            for p in group.params:
                p.grad = None

    def restage(self, stage: int) -> None:
        """Moves everything to another stage."""
        if stage and any(group.hook is not None for group in self.groups):
            raise UnsupportedError(
                f"restage: rank {self.ranks.rank} got stage={stage} for a module with a communication hook, which "
                "gives whole gradients, expected 0; train it without the hook"
            )
        for unit in self.units:
            unit.release()
        states = [attached.take_state() for attached in self.optimizers]
        self.forget_gradients()
        self.stage = stage
        for group in self.groups:
            group.restage(stage)
        for attached, state in zip(self.optimizers, states, strict=True):
            attached.rebuild(state)

    def detach(self) -> None:
        """Takes every hook away; the parameters stay where they are."""
        for unit in self.units:
            unit.unhook()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for group in self.groups:
            for p in group.params:
                for name in ("_ringcomm", "_ringcomm_flat"):
                    if hasattr(p, name):
                        delattr(p, name)

    # ---- what must not change -------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuses a module that is no longer the one that was wrapped."""
        wrong = self._what_changed()
        if wrong:
            raise InvalidArgumentError(
                f"forward: rank {self.ranks.rank} got {wrong} after the module was wrapped, expected the module as it "
                "was; change it first and wrap it then"
            )

    def _what_changed(self) -> str | None:
        for owner, params, children in self._census:
            if [*map(id, owner._parameters.values())] != params or [*map(id, owner._modules.values())] != children:
                known = {id(p) for group in self.groups for p in group.params}
                new = [name for name, p in self.module.named_parameters() if id(p) not in known]
                return f"the new parameter {new[0]}" if new else "other submodules"
        for group in self.groups:
            for i, p in enumerate(group.params):
                if p.requires_grad != group.trainable:
                    return f"{group.names[i]} with requires_grad={p.requires_grad}"
                if group.stage < LAST_STAGE and (
                    p.dtype != group.types.compute or p.data_ptr() != self._address(group, i)
                ):
                    return f"{group.names[i]} as other memory ({p.dtype} on {p.device})"
        return None

    @staticmethod
    def _address(group: FlatGroup, i: int) -> int:
        segment = group.layout.segments[i]
        return group.whole.data_ptr() + segment.offset * group.whole.itemsize if segment.numel else 0


def _after_of(flat: weakref.ref[FlatModel], number: int, i: int, p: torch.Tensor) -> None:
    """`FlatModel._after`, as a hook that does not hold the model: Python's garbage collector does not see what hooks of
    this kind hold."""
    found = flat()
    if found is not None:
        found._after(found.groups[number], i, p)


def _census(module: nn.Module) -> list[tuple[nn.Module, list[int], list[int]]]:
    """Every submodule with the identities of its parameters and children."""
    return [(m, [*map(id, m._parameters.values())], [*map(id, m._modules.values())]) for m in module.modules()]


def flags_numel(groups: Sequence[FlatGroup], stage: int) -> int:
    """Bytes of the message that ends a synchronised backward pass: the optimizers' options, who was used, and at stage
    3 the units' order."""
    used = sum(len(group.params) for group in groups)
    return 2 * OPTIONS_NBYTES + used + (2 * ORDER_NBYTES if stage == LAST_STAGE else 0)


def flat_model_of(module: nn.Module) -> FlatModel | None:
    """The state of a module that `shard`, `fully_shard` or DistributedDataParallel has wrapped, or that holds such
    parameters."""
    for p in module.parameters():
        flat = getattr(p, "_ringcomm_flat", None)
        if flat is not None:
            return flat
    return None
