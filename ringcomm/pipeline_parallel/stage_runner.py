"""Runs this rank's stages: the model without the parameters of other stages, from one stage boundary to the next."""

from __future__ import annotations

import copy
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.notes import notes_of, notes_on
from ringcomm.modules.shard_spec import note
from ringcomm.pipeline_parallel.buffers import Buffers
from ringcomm.pipeline_parallel.draws import checkpoint_around, drawn_into, must_send, random_op, replay
from ringcomm.pipeline_parallel.shape_only import (
    ShapeOnlyTensor,
    ValueGuard,
    any_shape_only,
    drop_values,
    make_plain,
    parameter_placeholder,
    shape_only,
    writable,
    writes,
)
from ringcomm.pipeline_parallel.side_effects import (
    CarriedTensor,
    MissingObject,
    SideEffect,
    TensorShape,
    UnsentObject,
    apply_effect,
    can_be_sent,
    container_at,
    is_plain,
    map_nest,
    restore,
    side_effects,
    snapshots,
    tensors_inside,
    version_of,
)
from ringcomm.pipeline_parallel.split import Chain, Stages

ANY = -1
"""Takes the place of a checksum that is not compared."""


def placeholders_of(tree: Any, origin: str = "", given: Mapping[Any, Any] | None = None) -> Any:
    """Returns a nest with a `TensorShape` for each tensor, and a placeholder for all else that is not a plain value.

    Args:
        origin: the module that made the nest.
        given: the arguments of that module, some of which it may have returned.
    """

    def each(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return TensorShape(tuple(x.shape), x.dtype)
        return x if is_plain(x) else _unsent_object(x, origin, given or {})

    return map_nest(each, tree)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The record of a call of one of this stage's modules, which later stages receive.

    Attributes:
        output: the output, with tensors as shapes or as carried tensors.
        hooked: the calls of the module or its submodules that have hooks, in the order in which they ended: name,
            arguments as shapes, and the output that each hook got, in the form of ``output``.
        effects: the side effects of the call.
    """

    output: Any
    hooked: tuple[tuple[str, Any, tuple[Any, ...]], ...] = ()
    effects: tuple[SideEffect, ...] = ()


@dataclass(frozen=True, slots=True)
class StageMetadata:
    """The data that a stage sends to the next besides tensors.

    Attributes:
        leaves: one entry for each leaf of the arguments of the next stage's first module: the number of a sent or
            carried tensor; the checksum of a tensor that the next stage must have itself (`ANY`: with any values); a
            plain value that it must have, too; or None.
        inputs: the inputs of the model, as shapes.
        usual: the first tensor that the first stage sends, as a shape.
        calls: the calls of modules of earlier stages, in order, by module; modules whose calls all returned just the
            usual tensor are omitted.
        carried: the number of carried tensors.
        draws: the random functions called outside of modules, in order: the name, and the drawn numbers if later stages
            need them.
        share: the micro-batch's share of the batch's rows, if a stage so far knows it.
    """

    leaves: tuple[tuple[str, Any] | None, ...]
    inputs: Any
    usual: TensorShape
    calls: Mapping[str, tuple[CallRecord, ...]]
    carried: int
    draws: tuple[tuple[str, CarriedTensor | None], ...] = ()
    share: Fraction | None = None

    def of_any(self) -> StageMetadata:
        """Returns a copy without checksums, so that the values of the receiver's own tensors are not compared."""
        return replace(self, leaves=tuple(("own", ANY) if each and each[0] == "own" else each for each in self.leaves))


class _StageBoundary(BaseException):
    """Ends a forward pass where the next stage begins. A BaseException, so that a model's ``except Exception`` does not
    catch it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = (args, kwargs)


@dataclass
class _StageRun:
    """The state of one forward pass through one stage."""

    stage: int
    metadata: StageMetadata | None
    received: list[torch.Tensor]
    entered: bool
    grads: bool  # whether gradients are on
    calls: dict[str, list[CallRecord]] = field(default_factory=dict)  # of modules of this stage and earlier ones
    replayed: Counter[str] = field(default_factory=Counter)  # calls of modules of earlier stages, so far
    carried: list[torch.Tensor] = field(default_factory=list)  # carried tensors of this stage and earlier ones
    versions: list[int] = field(default_factory=list)  # versions of the carried tensors after the last call of a module
    # Plain tensors into which a module of an earlier stage wrote values that this stage does not have.
    without_values: list[torch.Tensor] = field(default_factory=list)
    draws: list[tuple[str, CarriedTensor | None]] = field(default_factory=list)  # of this stage and earlier ones
    draws_done: int = 0  # how many of ``draws`` this stage has reached
    replayed_in: Any = None  # the checkpoint in which it last replayed a draw
    inside: str = ""  # "module": a call of a module is being recorded; "hooks": those of an earlier stage's module run

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        """Sets ``inside`` for the block."""
        before, self.inside = self.inside, what
        try:
            yield
        finally:
            self.inside = before

    def carry_again(self, x: Any) -> None:
        """Turns earlier records of a carried tensor that has new values into shapes: later stages get only its last
        values, and have none between the call that left the tensor and this call."""
        number = next((i for i, other in enumerate(self.carried) if other is x), None)
        if number is None:
            return

        def each(placeholder: Any) -> Any:
            return (
                placeholders_of(x)
                if isinstance(placeholder, CarriedTensor) and placeholder.number == number
                else placeholder
            )

        self.calls = {name: map_nest(each, calls) for name, calls in self.calls.items()}

    def write(self, x: Any, value: Any, name: str) -> None:
        """Repeats the write of a module of an earlier stage into one of its arguments."""
        if type(x) is torch.Tensor:
            self.without_values += drop_values(x, name)
        if isinstance(value, CarriedTensor) and isinstance(x, ShapeOnlyTensor):
            self.carried[value.number] = x.fill(self.carried[value.number])
            self.versions[value.number] = version_of(x)


class StageRunner:
    """Runs this rank's stages of a model, one at a time.

    Args:
        mine: this rank's stages. The parameters of all other modules are freed.
        rank: for error messages.
        device: of tensors, on a rank that has no parameters or whose parameters are on meta.
    """

    def __init__(self, stages: Stages, mine: Sequence[int], rank: int, device: torch.device) -> None:
        self.stages, self.model, self.rank, self._device = stages, stages.model, rank, device
        self.running: _StageRun | None = None
        self._named_grads: dict[int, set[int]] = {}  # by stage: indices of named arguments to send to the next one
        self._memory: dict[torch.dtype, torch.Tensor] = {}  # of shape-only tensors
        self._inside = {name: _modules_by_name(name, self.model.get_submodule(name)) for name in stages.stage_of}
        of_stages = {id(each) for inside in self._inside.values() for each in inside.values()}
        self._containers = {name: each for name, each in self.model.named_modules() if id(each) not in of_stages}
        self.buffers = Buffers(self._containers, mine, len(stages))
        for tied in stages.tied_params:
            first = tied.stages[0] in mine
            owners = [use for stage in tied.stages if stage in mine for use in tied.uses[stage]]
            for module, key in owners[:1]:
                note(module, key, names=tied.names, copy=not first, staged=len(mine) < len(stages))
        self._elsewhere: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []  # modules, and placeholders of parameters
        of_mine = (self.model.get_submodule(name) for name, stage in stages.stage_of.items() if stage in mine)
        seen = {id(p) for module in of_mine for p in module.parameters()}
        seen |= {id(p) for module in self._containers.values() for p in module._parameters.values()}
        for name, stage in stages.stage_of.items():
            module = self.model.get_submodule(name)
            if stage not in mine:
                self._elsewhere += _remove_tensors(module, device, seen)
            elif len(mine) < len(stages):
                for inside in module.modules():
                    for key in [key for key, p in inside._parameters.items() if p is not None]:
                        note(inside, key, staged=True)
            _intercept(module, self._interceptor(name, stage))
        often = Counter(id(each) for inside in self._inside.values() for each in inside.values())
        self._begins = [{name} for name in stages.first]  # names of the modules with which a stage may begin
        for name, stage in stages.stage_of.items():
            for key, each in _members(name, self.model.get_submodule(name)):
                if often[id(each)] == 1:  # not shared: forward may call it by itself
                    self._inside[key] = _modules_by_name(key, each)
                    _intercept(each, self._interceptor(key, stage))
            if name == stages.first[stage]:
                self._begins[stage] |= _first_members(name, self.model.get_submodule(name))

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        found = next((p.device for p in self.model.parameters() if not p.is_meta), None)
        return self._device if found is None else found

    def convert_placeholders(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Gives the placeholders of other ranks' parameters and buffers the type and device that ``fn``, such as the
        function of `module.to`, gives to tensors like them."""
        for module, held in self._elsewhere:
            for key, x in [*module.__dict__.items()]:
                if not isinstance(x, ShapeOnlyTensor) or x.wants_gradient is None:  # no placeholder
                    continue
                like = fn(torch.empty(0, dtype=x.dtype, device=x.device))
                made = parameter_placeholder(like.new_empty(x.shape, requires_grad=x.wants_gradient), like.device)
                module.__dict__[key] = made
                if key in held:
                    held[key] = made

    def multi_use_params(self) -> list[torch.Tensor]:
        """Returns the parameters here that more than one module has."""
        uses = Counter(id(p) for module in self.model.modules() for p in module._parameters.values() if p is not None)
        return [p for p in self.model.parameters() if uses[id(p)] > 1]

    @contextmanager
    def all_parameters(self) -> Iterator[None]:
        """Inside the block, the model has the parameters of all stages (those of other stages without values), because
        code that counts or sums parameters would take this rank's parameters for all of them."""
        for module, held in self._elsewhere:
            module._parameters.update(cast(Any, held))
        try:
            yield
        finally:
            for module, held in self._elsewhere:
                for key in held:
                    module._parameters.pop(key, None)

    # ---- one stage ------------------------------------------------------------------------------------------------

    def run(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: list[torch.Tensor],
        metadata: StageMetadata | None = None,
    ) -> tuple[Any, StageMetadata | None]:
        """Runs a stage.

        Args:
            args, kwargs: the arguments of the model, as far as this rank has them.
            received, metadata: the tensors and metadata from the stage before. The received values are put into the
                model's shape-only tensors.
        Returns: the tensors for the next stage, and their metadata; for the last stage the model's output and None.
        """
        if metadata is not None:
            self._refuse_other_inputs({**dict(enumerate(args)), **kwargs}, metadata.inputs)
            theirs = self._materialize(metadata.inputs)  # model inputs contain nothing carried
            args, kwargs = args or theirs[0], {**theirs[1], **kwargs}
        last = stage == len(self.stages) - 1
        grads = torch.is_grad_enabled() or (not last and stage not in self._named_grads)
        run = self.running = _StageRun(stage, metadata, received, entered=stage == 0, grads=grads)
        if metadata is not None:
            run.carried = [writable(x) for x in received[len(received) - metadata.carried :]]
            run.versions = [version_of(x) for x in run.carried]
            run.calls = {name: [*calls] for name, calls in metadata.calls.items()}
            run.draws = [*metadata.draws]

        def before(func: Any, args: Any, kwargs: Any) -> None:
            read(func, args, kwargs)
            written = [x for x in writes(func, args, kwargs) if not isinstance(x, ShapeOnlyTensor)]
            if written and any_shape_only((args, kwargs)):
                self._refuse_written_parameters(run, written)
            for x in written if run.carried else ():
                self._copy_before_write(run, x)

        try:
            with (
                torch.set_grad_enabled(grads),
                self.all_parameters(),
                self.buffers.of(stage) as read,
                ValueGuard(before, partial(self._call_outside_modules, run)),
            ):
                output = self.model(*args, **kwargs)
        except _StageBoundary as boundary:
            return self._boundary_outputs(run, boundary, placeholders_of((args, kwargs)))
        finally:
            self.running = None
            for x in run.without_values:  # the user may own such a tensor, so it becomes plain again
                make_plain(x)
        if not last:
            raise self._order_error(stage, "ended", f"a call of {self.stages.first[stage + 1]}")
        if not run.entered:
            raise self._order_error(stage, "ended", f"a call of {self.stages.first[stage]}")
        self._refuse_shape_only(run, "the end", output)
        return output, None

    def _call_outside_modules(self, run: _StageRun, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function outside of modules of stages. Random numbers that it draws are sent to later stages."""
        name = "" if run.inside == "hooks" else random_op(func)
        if not name:
            return func(*args, **kwargs)
        number, run.draws_done = run.draws_done, run.draws_done + 1
        if number == len(run.draws):
            result = func(*args, **kwargs)
            if run.stage == len(self.stages) - 1 or not must_send(func, args, kwargs, result):
                run.draws.append((name, None))
                return result
            # A copy, because the result may be a buffer into which the next micro-batch draws before it was sent.
            numbers = result.clone() if drawn_into(func, args, kwargs) else result
            run.draws.append((name, self._carry(run, numbers, name, {})))
            return result
        expected, sent = run.draws[number]
        if name == expected and sent is None:
            return func(*args, **kwargs)
        result = replay(func, args, kwargs, run.carried[sent.number]) if sent and name == expected else None
        if result is None:
            raise self._draws_error(run, f"by {name}", expected)
        run.replayed_in = checkpoint_around()
        return result

    def _refuse_other_inputs(self, mine: Mapping[Any, Any], inputs: Any) -> None:
        """Raises where the model's inputs on this rank and on the stage before differ in shapes or plain values. Some
        tensors, such as labels, may be passed on some ranks only."""
        theirs = {**dict(enumerate(inputs[0])), **inputs[1]}
        for key, x in mine.items():
            pairs = [*zip(tree_leaves(placeholders_of(x)), tree_leaves(theirs.get(key)), strict=False)]
            wrong = next((pair for pair in pairs if key in theirs and _is_other_input(*pair)), None)
            if wrong is not None:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} got {_input(wrong[0])} as the argument {key!r} of the model, expected "
                    f"{_input(wrong[1])} as on the rank of the first stage; pass the same on every rank, or nothing"
                )

    def _refuse_shape_only(self, run: _StageRun, name: str, tree: Any) -> None:
        found = next((x for x in tensors_inside(tree) if isinstance(x, ShapeOnlyTensor)), None)
        if found is not None:
            of = f"a result of {found.origin}" if found.origin else "the model's inputs, or a result or weight of "
            of += "" if found.origin else "another stage"
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward reaches {name} with a tensor that "
                f"depends on {of} and was not sent to this stage, expected values; pass the inputs on every rank, pass "
                "other tensors on as positional arguments, or name the module that makes them in split(..., "
                "carry=[...])"
            )

    def _order_error(self, stage: int, got: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} ran stage {stage}, whose forward {got}, expected {expected}; register modules "
            "in the order of their calls, or name that order in split(..., order=[...]), and split at modules that "
            "every forward pass calls"
        )

    def _draws_error(self, run: _StageRun, got: str, expected: Any) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward drew random numbers {got}, expected "
            f"{expected} as on the stage before; draw them in every forward pass, or in __init__"
        )

    def _interceptor(self, name: str, stage: int) -> Callable[..., Any]:
        first = self.stages.first

        def call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.running
            if run is None:
                return forward(*args, **kwargs)
            if stage < run.stage:
                if run.entered and run.replayed[name]:
                    raise InvalidArgumentError(
                        f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward called {name} of stage "
                        f"{stage} again, expected only modules of its own; cut the model so that all calls of a module "
                        "lie in one stage, or use a separate module for each call"
                    )
                if run.entered:
                    raise self._order_error(run.stage, f"called {name} of stage {stage}", "modules of its own")
                return self._replay_call(run, name, args, kwargs)
            if stage > run.stage:
                if name not in self._begins[run.stage + 1] or not run.entered:
                    raise self._order_error(
                        run.stage, f"called {name}", first[run.stage + 1] if run.entered else first[run.stage]
                    )
                self._refuse_shape_only(run, name, (args, kwargs))
                self._refuse_no_grad(run, name, tree_leaves((args, kwargs)))
                raise _StageBoundary(args, kwargs)
            if not run.entered:
                if name not in self._begins[stage]:
                    raise self._order_error(stage, f"called {name} first", first[stage])
                assert run.metadata is not None
                if run.draws_done != len(run.metadata.draws):
                    raise self._draws_error(run, f"{run.draws_done} times before {name}", len(run.metadata.draws))
                if run.replayed_in is not None and run.replayed_in is checkpoint_around():
                    raise InvalidArgumentError(
                        f"Pipeline: rank {self.rank} ran stage {stage}, which begins with {name} inside a checkpointed "
                        "function that draws random numbers, expected them to be drawn outside, because backward would "
                        "draw other numbers than the earlier stage; checkpoint each module separately"
                    )
                args, kwargs = self._with_received(run, args, kwargs)
                run.entered = True
                for x in run.carried:
                    _clear_hooks(x)
            self._refuse_shape_only(run, name, (args, kwargs))
            _refuse_missing(name, (args, kwargs))
            last = run.stage == len(self.stages) - 1  # no later stage needs a record
            with ValueGuard.suspended():
                if last or run.inside == "module":  # a nested call, which later stages do not reach
                    return forward(*args, **kwargs)
                with run.within("module"):
                    return self._record_call(run, name, forward, args, kwargs)

        return call

    def _record_call(
        self, run: _StageRun, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module of this stage and records the call for later stages."""
        self._refuse_written(run, name)
        inside = self._inside[name]
        before_call = snapshots(self._containers, inside, args, kwargs)
        hooked: list[tuple[str, Any, tuple[Any, ...]]] = []
        handles = [
            handle
            for key, each in inside.items()
            if any(map(_is_users, (*each._forward_pre_hooks.values(), *each._forward_hooks.values())))
            for handle in self._record_hooks(run, hooked, key, each)
        ]
        try:
            output = forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle()
        found = side_effects(before_call)
        for each in found:
            if each.changed:
                run.carry_again(each.value)
        effects = tuple(replace(each, value=self._value_of(run, each, name)) for each in found)
        shown = self._record_result(run, output, name, {**dict(enumerate(args)), **kwargs})
        run.calls.setdefault(name, []).append(CallRecord(shown, tuple(hooked), effects))
        run.versions = [version_of(x) for x in run.carried]
        return output

    def _copy_before_write(self, run: _StageRun, x: torch.Tensor) -> None:
        """Called before the model's own forward writes into ``x``. Later stages run the same write, so they must get
        a carried tensor with its values before the write: from now on a copy is carried."""
        last = run.stage == len(self.stages) - 1  # no later stage gets them
        with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(run.grads):
            for i, carried in enumerate(run.carried):
                if carried is not x and not _shares(carried, x):
                    continue
                if not run.entered:
                    _clear_hooks(carried)
                if not last:
                    self._refuse_written(run, "code that writes into what is carried")
                    run.carried[i] = carried.clone()
                    run.versions[i] = version_of(run.carried[i])

    def _refuse_written(self, run: _StageRun, name: str) -> None:
        """Raises where code that `ValueGuard` does not see, such as an extension's, wrote into a carried tensor."""
        for x, version in zip(run.carried, run.versions, strict=True):
            if version_of(x) != version:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward comes to {name} after code "
                    f"outside of modules wrote into a tensor of shape {tuple(x.shape)} which is carried, "
                    "expected its values as its module gave them; write into a clone of it"
                )

    def _refuse_written_parameters(self, run: _StageRun, written: Sequence[torch.Tensor]) -> None:
        """Raises where a shape-only value would be written into a parameter, for instance into a running mean of
        another stage's results."""
        for name, p in self.model.named_parameters():
            if not isinstance(p, ShapeOnlyTensor) and any(_shares(p, x) for x in written):
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward writes values of another stage, "
                    f"which it does not have, into {name}; cut the model so that both lie in one stage, or write into "
                    "parameters after step()"
                )

    def _record_hooks(
        self, run: _StageRun, hooked: list[tuple[str, Any, tuple[Any, ...]]], name: str, module: nn.Module
    ) -> list[Callable[[], None]]:
        """Records calls of a module in ``hooked``; returns functions that end the recording."""
        seen: list[Any] = []

        def noting(hook: Callable[..., Any], *call: Any) -> Any:
            seen.append(self._record_result(run, call[-1], name))
            return hook(*call)

        def ended(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            hooked.append((name, placeholders_of((args, kwargs)), tuple(seen)))
            seen.clear()

        hooks = module._forward_hooks
        theirs = {number: hook for number, hook in hooks.items() if _is_users(hook)}
        hooks.update({number: partial(noting, hook) for number, hook in theirs.items()})

        def restored() -> None:
            hooks.update({number: hook for number, hook in theirs.items() if number in hooks})

        return [module.register_forward_hook(ended, with_kwargs=True).remove, restored]

    def _record_result(self, run: _StageRun, output: Any, name: str, given: Mapping[Any, Any] | None = None) -> Any:
        """Returns the form in which later stages receive a result."""
        if name in self.stages.carry:
            return self._carry(run, output, name, given or {})
        return placeholders_of(output, name, given)

    def _value_of(self, run: _StageRun, effect: SideEffect, name: str) -> Any:
        """Returns the form in which later stages receive the value of a side effect."""
        if effect.written and not any(x is effect.value for x in run.carried):
            return self._record_result(run, effect.value, name)
        if can_be_sent(effect.value):
            return self._carry(run, effect.value, name, {})
        _refuse_hidden_tensors(effect)
        return _unsent_object(effect.value, name, {})

    def _carry(self, run: _StageRun, nest: Any, name: str, given: Mapping[Any, Any]) -> Any:
        """Returns a nest with its tensors added to the carried ones."""

        def each(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x if is_plain(x) else _unsent_object(x, name, given)
            self._refuse_shape_only(run, f"what {name} leaves", x)
            known = next((i for i, other in enumerate(run.carried) if other is x), None)
            if known is None:
                run.carried.append(x)
                run.versions.append(version_of(x))
                return CarriedTensor(len(run.carried) - 1)
            return CarriedTensor(known)

        return map_nest(each, nest)

    def _replay_call(self, run: _StageRun, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Repeats the recorded call of a module of an earlier stage: its side effects, hooks and result."""
        assert run.metadata is not None
        calls, number = run.metadata.calls.get(name, ()), run.replayed[name]
        run.replayed[name] += 1
        call = calls[min(number, len(calls) - 1)] if calls else CallRecord(run.metadata.usual)
        places = []
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        lasting = [each for each in call.effects if not each.written]
        for each in lasting:
            try:
                places.append(container_at(self.model, args, kwargs, each.place))
            except LookupError:
                raise self._order_error(
                    run.stage, f"lacks what {name} has written into", "the same code on all"
                ) from None
            apply_effect(places[-1], each, self._materialize(each.value, name))
        for each in call.effects:
            if each.written:
                run.write(given.get(each.key), each.value, name)
        there = [(place, copy.copy(place)) for place in places]
        for inner, inputs, outputs in call.hooked:
            its_args, its_kwargs = (args, kwargs) if inner == name else self._materialize(inputs, inner)
            made = [self._materialize(output, inner) for output in outputs]
            with run.within("hooks"):
                _run_hooks(self.model.get_submodule(inner), its_args, its_kwargs, made)
        result = self._materialize(call.output, name, given)
        for each, (place, before) in zip(lasting, there, strict=True):  # undoes what hooks did to the same places
            restore(each, place, before)
        return result

    def _materialize(self, tree: Any, origin: str = "", given: Mapping[Any, Any] | None = None) -> Any:
        """Returns a nest with tensors and objects in the places of their placeholders."""
        device, run = self.device, self.running

        def each(x: Any) -> Any:
            if isinstance(x, UnsentObject):
                return MissingObject(x) if x.argument is None else (given or {}).get(x.argument)
            if isinstance(x, CarriedTensor):
                assert run is not None
                return run.carried[x.number]
            return shape_only(x.shape, x.dtype, device, origin, self._memory) if isinstance(x, TensorShape) else x

        return map_nest(each, tree)

    # ---- between two stages ----------------------------------------------------------------------------------------

    def _boundary_outputs(
        self, run: _StageRun, boundary: _StageBoundary, inputs: Any
    ) -> tuple[list[torch.Tensor], StageMetadata]:
        self._refuse_written(run, self.stages.first[run.stage + 1])
        leaves = tree_leaves(boundary.inputs)
        positional = len(tree_leaves(boundary.inputs[0]))
        named = {i for i, x in enumerate(leaves) if i >= positional and torch.is_tensor(x) and x.requires_grad}
        named |= self._named_grads.get(run.stage, set())
        self._named_grads[run.stage] = named
        sent: list[torch.Tensor] = []
        facts: list[tuple[str, int] | None] = []
        carried = {id(x): number for number, x in enumerate(run.carried)}
        for i, x in enumerate(leaves):
            if not torch.is_tensor(x):
                facts.append(("plain", x) if is_plain(x) else None)
            elif id(x) in carried:
                facts.append(("carried", carried[id(x)]))
            elif i < positional or i in named:
                facts.append(("sent", len(sent)))
                sent.append(_sendable(x))
            else:
                facts.append(("own", _checksum(x)))
        if not sent and not run.carried:
            kinds = ", ".join(dict.fromkeys(type(x).__name__ for x in leaves)) or "nothing"
            name = self.stages.first[run.stage + 1]
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward passed {kinds} but no tensor to "
                f"{name}, expected tensors as its arguments; pass tensors, in tuples, lists or dicts, or name the "
                "modules that make its arguments in split(..., carry=[...]), as for dataclasses"
            )
        usual = placeholders_of((sent or run.carried)[0]) if run.metadata is None else run.metadata.usual
        calls = {name: tuple(its) for name, its in run.calls.items() if any(call != CallRecord(usual) for call in its)}
        sent += map(_sendable, run.carried)
        return sent, StageMetadata(tuple(facts), inputs, usual, calls, len(run.carried), tuple(run.draws))

    def _with_received(
        self, run: _StageRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the stage's first module, with the received tensors in their places."""
        assert run.metadata is not None
        leaves = tree_leaves((args, kwargs))
        name = self.stages.first[run.stage]
        if len(leaves) != len(run.metadata.leaves):
            raise self._order_error(
                run.stage,
                f"called {name} with {len(leaves)} values",
                f"{len(run.metadata.leaves)}, as stage {run.stage - 1} did",
            )
        others: dict[int, torch.Tensor] = {}  # by id of the model's own tensors
        for at, (own, fact) in enumerate(zip(leaves, run.metadata.leaves, strict=True)):
            if fact is None:
                continue
            kind, number = fact
            if kind == "plain":
                wrong = torch.is_tensor(own) or (is_plain(own) and not _is_equal(own, number))
            elif kind == "own":
                wrong = not _has_values(own) or number not in (ANY, _checksum(own))
            else:
                x = (run.carried if kind == "carried" else run.received)[number]
                wrong = own is not x and not _matches(own, x)
                if own is not x and not wrong:
                    others[id(own)] = _fill(own, x)
            if wrong:
                raise self._values_error(name, own, _argument((args, kwargs), at))
        self._refuse_no_grad(run, name, run.received)
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = _replaced((args, kwargs), others)
        return replaced

    def _refuse_no_grad(self, run: _StageRun, name: str, tensors: Sequence[Any]) -> None:
        if not run.grads or torch.is_grad_enabled():
            return
        if any(torch.is_tensor(x) and x.requires_grad for x in tensors) or _in_function():
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} got a call of {name}, with which a stage begins, without gradients, "
                "expected a call with gradients, outside of any torch.autograd.Function; checkpoint with "
                "use_reentrant=False, or cut elsewhere"
            )

    def _values_error(self, name: str, own: Any, argument: str) -> InvalidArgumentError:
        if isinstance(own, ShapeOnlyTensor) and own.origin:
            return InvalidArgumentError(
                f"Pipeline: rank {self.rank} got no values for {argument} of {name}, which depends on a result of "
                f"{own.origin} and is a keyword argument without a gradient; such arguments are not sent between "
                f"stages: name {own.origin} in split(..., carry=[{own.origin!r}]), or pass it by position"
            )
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} got other values than the stage before in {argument} of {name}, or none, "
            "which depends on the model's inputs, expected the same; pass the inputs on every rank"
        )


def _refuse_missing(name: str, tree: Any) -> None:
    """Raises if an argument is a `MissingObject`, since a module that uses only the argument's class would not
    raise."""
    for x in tree_leaves(tree):
        if type(x) is MissingObject:
            x.refuse(name)


def _matches(own: Any, x: torch.Tensor) -> bool:
    """Returns whether the tensor that the model has in the place of a received one is shape-only, or has the same
    values."""
    alike = torch.is_tensor(own) and (own.shape, own.dtype) == (x.shape, x.dtype)
    return alike and (isinstance(own, ShapeOnlyTensor) or _checksum(own) == _checksum(x))


def _fill(own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns a received tensor; if possible, by filling the object that the model has in its place. Other code of the
    model that uses this object, such as a sum around the module or a checkpoint, then has the values, too."""
    if isinstance(own, ShapeOnlyTensor):
        return own.fill(x)
    if own.is_cpu and not x.requires_grad:
        return own
    if type(own) is torch.Tensor and not own.is_leaf and not own._is_view():
        drop_values(own, "")
        return cast(ShapeOnlyTensor, own).fill(x)
    return writable(x)


def _argument(call: tuple[tuple[Any, ...], dict[str, Any]], at: int) -> str:
    """Returns the name of the argument that holds leaf number ``at`` of a call."""
    (kind, *path), _ = tree_leaves_with_path(call)[at]
    return f"argument {path[0].idx if kind.idx == 0 else path[0].key}{keystr(tuple(path[1:]))}"


def _is_users(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook is the user's. Hooks of ringcomm, and hooks of torch.nn.utils that compute a weight, such
    as those of spectral_norm, count as part of the module."""
    name = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return not name.startswith(("ringcomm.", "torch.nn.utils."))


def _run_hooks(module: nn.Module, args: Any, kwargs: Any, outputs: Sequence[Any]) -> None:
    """Runs the user's hooks of a module of an earlier stage, with the output that each hook got there."""
    for number, hook in [*module._forward_pre_hooks.items()]:
        if _is_users(hook):
            with_kwargs = number in module._forward_pre_hooks_with_kwargs
            changed = hook(module, args, kwargs) if with_kwargs else hook(module, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    theirs = [(number, hook) for number, hook in module._forward_hooks.items() if _is_users(hook)]
    for (number, hook), output in zip(theirs, outputs, strict=False):
        with_kwargs = number in module._forward_hooks_with_kwargs
        _ = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)


def _unsent_object(x: Any, origin: str, given: Mapping[Any, Any]) -> UnsentObject:
    """Returns a placeholder for an object that is neither a tensor nor a plain value."""
    key = next((key for key, each in given.items() if each is x), None)
    return UnsentObject(None, type(x).__name__, origin) if key is None else UnsentObject(key)


def _is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or (a != a and b != b))  # two NaN count as equal


def _is_other_input(mine: Any, theirs: Any) -> bool:
    """Returns whether two leaves of results of `placeholders_of` differ."""
    if isinstance(theirs, TensorShape):
        return mine != theirs and (mine is None or isinstance(mine, TensorShape))
    return is_plain(mine) and is_plain(theirs) and not _is_equal(mine, theirs)


def _input(x: Any) -> str:
    return f"a tensor of shape {x.shape} and {x.dtype}" if isinstance(x, TensorShape) else repr(x)


def _refuse_hidden_tensors(effect: SideEffect) -> None:
    """Raises where a side effect contains tensors that cannot be sent to later stages."""
    if any(True for _ in tensors_inside(effect.value)):
        name, *keys = effect.place
        where = "an argument" if name is None else f"an attribute of {name or 'the model'}"
        keys = [*keys[1 if name is None else 0 :], effect.key]
        raise UnsupportedError(
            f"Pipeline: got {type(effect.value).__name__} in {where}{''.join(f'[{key!r}]' for key in keys if key)}, "
            "left by a module beside its result, expected tensors and plain values in lists, dicts or dataclasses, "
            "which are sent to later stages; leave the tensors themselves there"
        )


def _replaced(nest: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """Returns a nest with some of its tensors replaced. Lists, dicts and deques stay the same objects, so that the
    model sees what the module changes in them."""

    def is_container(x: Any) -> bool:
        return isinstance(x, (list, dict, deque))

    def each(x: Any) -> Any:
        for key in [*x] if isinstance(x, dict) else range(len(x)) if isinstance(x, (list, deque)) else ():
            x[key] = tree_map(each, x[key], is_leaf=is_container)
        return others.get(id(x), x)

    return tree_map(each, nest, is_leaf=is_container) if others else nest


def _clear_hooks(x: torch.Tensor) -> None:
    """Clears the hooks of a received tensor: the stage before has the same tensor with the same hooks."""
    if x._backward_hooks is not None:
        x._backward_hooks.clear()


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors may share memory."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _sendable(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor to send. Detaches it if gradients are off, or if it is a view that was made while they were off
    and has no gradient to pass on."""
    return x if torch.is_grad_enabled() and not (x.is_leaf and x._is_view()) else x.detach()


def _has_values(x: Any) -> bool:
    return torch.is_tensor(x) and not isinstance(x, ShapeOnlyTensor)


def _checksum(x: torch.Tensor) -> int:
    if not x.is_cpu:  # reading a device would wait for it
        return x.numel()
    flat = x.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0


def _modules_by_name(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Returns a module and its submodules, by their names in the model."""
    return {f"{name}.{key}" if name and key else name or key: each for key, each in module.named_modules()}


def _members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a sequence, and of sequences in it, by their names in the model: forward may call them one
    by one."""
    if isinstance(module, (nn.Sequential, Chain)):
        for key, each in module.named_children():
            yield f"{name}.{key}", each
            yield from _members(f"{name}.{key}", each)


def _first_members(name: str, module: nn.Module) -> set[str]:
    """Returns the names of the first module of a sequence, of the first one in that, and so on."""
    found: set[str] = set()
    while isinstance(module, (nn.Sequential, Chain)) and len(module):
        key, module = next(module.named_children())
        found.add(name := f"{name}.{key}")
    return found


# ---- modules ------------------------------------------------------------------------------------------------------


def _remove_tensors(
    module: nn.Module, device: torch.device, seen: set[int]
) -> list[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Replaces a module's parameters and buffers, and tensors computed from them, by shape-only tensors. For tensors on
    meta these are on ``device``.

    Args:
        seen: ids of parameters that the model has at another place.
    Returns: by module, the placeholders of the parameters that were not seen.
    """
    placeholders: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for each in module.modules():
        notes_on(each).elsewhere = True
        placeholders.append((each, {}))
        for held in (each._parameters, each._buffers):
            for key, tensor in [*held.items()]:
                if tensor is not None:
                    del held[key]
                    each.__dict__[key] = parameter_placeholder(tensor, device if tensor.is_meta else tensor.device)
                    if held is each._parameters and id(tensor) not in seen:
                        placeholders[-1][1][key] = each.__dict__[key]
                        seen.add(id(tensor))
    return placeholders


def _in_function() -> bool:
    """Returns whether a torch.autograd.Function is running; in its backward pass no stage would send gradients."""
    frame = sys._getframe(1)
    while frame is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _intercept(module: nn.Module, call: Callable[..., Any]) -> None:
    """Replaces calls of the module by calls of ``call``, which comes before hooks and a class's own ``__call__``."""
    kind = type(module)

    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        raise UnsupportedError(
            f"Pipeline: cannot copy or pickle a {kind.__name__} that belongs to a pipeline; save its state_dict()"
        )

    members = {"__call__": guarded, "__reduce_ex__": reduced, "__module__": kind.__module__}
    # Changes the class, because Python looks `__call__` up only there, and the module must stay the same object.
    module.__class__ = type(kind.__name__, (kind,), members)
    notes_on(module).in_pipeline = True


def is_staged(model: nn.Module) -> bool:
    """Returns whether a part of the model is in a pipeline already."""
    return any(notes_of(module).in_pipeline for module in model.modules())
