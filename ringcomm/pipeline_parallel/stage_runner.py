"""This rank's stages of a model: the model itself without the parameters of others, run from one cut to the next."""

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

from ringcomm.data_parallel.shard_spec import note
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.pipeline_parallel.beside import (
    Given,
    Gone,
    Kept,
    Left,
    Lost,
    Stand,
    Watch,
    can_travel,
    found_at,
    is_plain,
    leave,
    map_nest,
    restore,
    tensors_inside,
    version_of,
)
from ringcomm.pipeline_parallel.buffers import Buffers
from ringcomm.pipeline_parallel.cuts import Chain, Stages
from ringcomm.pipeline_parallel.draws import checkpoint_around, must_send, random_op, replay
from ringcomm.pipeline_parallel.shape_only import (
    Maker,
    Reads,
    ShapeOnlyTensor,
    any_absent,
    find,
    lose,
    weightless,
    writable,
    writes,
)

ANY = -1


@dataclass(frozen=True)
class Shape(Stand):
    """What is left of a tensor that stays elsewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tree: Any, origin: str = "", given: Mapping[Any, Any] | None = None) -> Any:
        """A nest with its tensors as shapes, and stands for what is neither tensor nor plain value.

        Args:
            origin: the module that has made it.
            given: the arguments of that, of which it may give some back.
        """

        def each(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return Shape(tuple(x.shape), x.dtype)
            return x if is_plain(x) else _stand(x, origin, given or {})

        return map_nest(each, tree)


@dataclass(frozen=True)
class Carried(Stand):
    """In the place of a tensor that is sent on from stage to stage, to the last one: its number among those."""

    number: int


@dataclass(frozen=True)
class Call:
    """What later stages are told of a call of a module of an earlier one.

    Attributes:
        output: its shapes, or what is carried.
        hooked: calls of submodules, or of the module, that have hooks, in the order of their ends: name, arguments as
            shapes, and the output that each hook got, as above.
        left: what it left beside its output.
    """

    output: Any
    hooked: tuple[tuple[str, Any, tuple[Any, ...]], ...] = ()
    left: tuple[Left, ...] = ()


@dataclass(frozen=True)
class StageMetadata:
    """What a stage tells the next beside tensors.

    Attributes:
        leaves: of the arguments with which its first module is called: the number of a tensor that is sent, or of one
            that is carried, or the checksum of one that it must have itself (`ANY`: it may be any), or a plain value
            that it must have too, or None.
        inputs: of the model, as shapes.
        usual: the first tensor that the first stage sends, as a shape.
        calls: of modules before, in turn, where they are others than one that gives the usual tensor alone.
        carried: how many tensors are.
        draws: by functions around modules, in turn: the function's name, and what it drew if later stages need it.
        share: of the micro-batch in the rows of the batch, as far as stages so far know it.
    """

    leaves: tuple[tuple[str, Any] | None, ...]
    inputs: Any
    usual: Shape
    calls: Mapping[str, tuple[Call, ...]]
    carried: int
    draws: tuple[tuple[str, Carried | None], ...] = ()
    share: Fraction | None = None

    def of_any(self) -> StageMetadata:
        """The same where values may be others."""
        return replace(self, leaves=tuple(("own", ANY) if each and each[0] == "own" else each for each in self.leaves))


class _StageBoundary(BaseException):
    """Ends a forward pass where the next stage begins: no error, and nothing that a model's `except` may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = (args, kwargs)


@dataclass
class _Run:
    stage: int
    about: StageMetadata | None
    received: list[torch.Tensor]
    entered: bool
    grads: bool  # whether they are taken
    calls: dict[str, list[Call]] = field(default_factory=dict)  # of this stage's modules
    shadowed: Counter[str] = field(default_factory=Counter)  # calls of modules of earlier stages, so far
    carried: list[torch.Tensor] = field(default_factory=list)  # to the last stage, from this one and earlier ones
    versions: list[int] = field(default_factory=list)  # of these, when a module last had them
    noting: bool = False  # whether a call of a module is being noted
    before: dict[str, tuple[Call, ...]] = field(default_factory=dict)  # calls of modules of earlier stages
    lost: list[torch.Tensor] = field(default_factory=list)  # whose values a module of an earlier stage has changed
    draws: list[tuple[str, Carried | None]] = field(default_factory=list)  # of this stage and earlier ones
    draws_done: int = 0  # how many of them this stage has come to
    replayed_in: Any = None  # the checkpoint in which it last took what another stage has drawn
    hooking: bool = False  # whether hooks of modules of earlier stages run


class StageRunner:
    """The model on this rank.

    Args:
        mine: this rank's stages. The parameters of all other modules are let go of.
        rank: for messages.
        device: of tensors, on a rank without parameters or where they are on meta.
    """

    def __init__(self, stages: Stages, mine: Sequence[int], rank: int, device: torch.device) -> None:
        self.stages, self.model, self.rank, self._device = stages, stages.model, rank, device
        self.running: _Run | None = None
        self._grads: dict[int, set[int]] = {}  # by stage: named arguments of the next one's first module to send
        self._absent = Maker()
        self._inside = {name: _named(name, self.model.get_submodule(name)) for name in stages.stage_of}
        of_stages = {id(each) for inside in self._inside.values() for each in inside.values()}
        self._containers = {name: each for name, each in self.model.named_modules() if id(each) not in of_stages}
        self.buffers = Buffers(self._containers, mine, len(stages))
        for tie in stages.ties:
            first = tie.stages[0] in mine
            owners = [use for stage in tie.stages if stage in mine for use in tie.uses[stage]]
            for module, key in owners[:1]:
                note(module, key, names=tie.names, copy=not first, staged=len(mine) < len(stages))
        self._elsewhere: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []  # modules, and what stands for parameters
        of_mine = (self.model.get_submodule(name) for name, stage in stages.stage_of.items() if stage in mine)
        seen = {id(p) for module in of_mine for p in module.parameters()}
        seen |= {id(p) for module in self._containers.values() for p in module._parameters.values()}
        for name, stage in stages.stage_of.items():
            module = self.model.get_submodule(name)
            if stage not in mine:
                self._elsewhere += _empty(module, device, seen)
            elif len(mine) < len(stages):
                for inside in module.modules():
                    for key in [key for key, p in inside._parameters.items() if p is not None]:
                        note(inside, key, staged=True)
            _guard(module, self._guarded(name, stage))
        often = Counter(id(each) for inside in self._inside.values() for each in inside.values())
        self._begins = [{name} for name in stages.first]  # names of the modules with which a stage may begin
        for name, stage in stages.stage_of.items():
            for key, each in _members(name, self.model.get_submodule(name)):
                if often[id(each)] == 1:  # which forward may call itself
                    self._inside[key] = _named(key, each)
                    _guard(each, self._guarded(key, stage))
            if name == stages.first[stage]:
                self._begins[stage] |= _first_members(name, self.model.get_submodule(name))

    @property
    def device(self) -> torch.device:
        """On which this rank's parameters are."""
        found = next((p.device for p in self.model.parameters() if not p.is_meta), None)
        return self._device if found is None else found

    def used_often(self) -> list[torch.Tensor]:
        """Parameters here that more than one module has."""
        uses = Counter(id(p) for module in self.model.modules() for p in module._parameters.values() if p is not None)
        return [p for p in self.model.parameters() if uses[id(p)] > 1]

    @contextmanager
    def all_parameters(self) -> Iterator[None]:
        """Inside, the model's parameters are those of all stages, so that code that counts or sums them up does not
        take this rank's for all: those of other stages have no values."""
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
        about: StageMetadata | None = None,
    ) -> tuple[Any, StageMetadata | None]:
        """Runs a stage.

        Args:
            args, kwargs: of the model, as far as this rank has them.
            received, about: from the stage before. What the model has in the place of a received tensor takes its
                values.
        Returns: the tensors for the next stage, and what it has to know; of the last stage the model's output and None.
        """
        if about is not None:
            self._refuse_other_inputs({**dict(enumerate(args)), **kwargs}, about.inputs)
            theirs = self._made(about.inputs)  # of the model, of which nothing is carried
            args, kwargs = args or theirs[0], {**theirs[1], **kwargs}
        last = stage == len(self.stages) - 1
        grads = torch.is_grad_enabled() or (not last and stage not in self._grads)
        run = self.running = _Run(stage, about, received, entered=stage == 0, grads=grads)
        if about is not None:
            run.carried = [writable(x) for x in received[len(received) - about.carried :]]
            run.versions = [version_of(x) for x in run.carried]
            run.before = dict(about.calls)
            run.draws = [*about.draws]

        def told(func: Any, args: Any, kwargs: Any) -> None:
            read(func, args, kwargs)
            written = [x for x in writes(func, args, kwargs) if not isinstance(x, ShapeOnlyTensor)]
            if written and any_absent((args, kwargs)):
                self._refuse_written_parameters(run, written)
            for x in written if run.carried else ():
                self._keep(run, x)

        try:
            with (
                torch.set_grad_enabled(grads),
                self.all_parameters(),
                self.buffers.of(stage) as read,
                Reads(told, partial(self._called, run)),
            ):
                output = self.model(*args, **kwargs)
        except _StageBoundary as cut:
            return self._handed_on(run, cut, Shape.of((args, kwargs)))
        finally:
            self.running = None
            for x in run.lost:  # which may be the user's
                find(x)
        if not last:
            raise self._wrong(stage, "ended", f"a call of {self.stages.first[stage + 1]}")
        if not run.entered:
            raise self._wrong(stage, "ended", f"a call of {self.stages.first[stage]}")
        self._refuse_absent(run, "the end", output)
        return output, None

    def _called(self, run: _Run, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function outside of modules of stages. What one draws there later stages get."""
        name = "" if run.hooking else random_op(func)
        if not name:
            return func(*args, **kwargs)
        number, run.draws_done = run.draws_done, run.draws_done + 1
        if number == len(run.draws):
            result = func(*args, **kwargs)
            needed = run.stage < len(self.stages) - 1 and must_send(func, args, kwargs, result)
            run.draws.append((name, self._carry(run, result, name, {}) if needed else None))
            return result
        expected, stand = run.draws[number]
        if name == expected and stand is None:
            return func(*args, **kwargs)
        result = replay(func, args, kwargs, run.carried[stand.number]) if stand and name == expected else None
        if result is None:
            raise self._other_draws(run, f"by {name}", expected)
        run.replayed_in = checkpoint_around()
        return result

    def _refuse_other_inputs(self, mine: Mapping[Any, Any], inputs: Any) -> None:
        """Of the model: what this rank has as well as the stage before must be alike, as far as shapes and plain values
        tell. Tensors may be there on some ranks alone, such as labels."""
        theirs = {**dict(enumerate(inputs[0])), **inputs[1]}
        for key, x in mine.items():
            pairs = [*zip(tree_leaves(Shape.of(x)), tree_leaves(theirs.get(key)), strict=False)]
            wrong = next((pair for pair in pairs if key in theirs and _is_other_input(*pair)), None)
            if wrong is not None:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} got {_input(wrong[0])} as the argument {key!r} of the model, expected "
                    f"{_input(wrong[1])} as on the rank of the first stage; pass the same on every rank, or nothing"
                )

    def _refuse_lost(self, name: str, tree: Any) -> None:
        """Of the arguments of a module, which may ask for no more than its class."""
        for x in tree_leaves(tree):
            if type(x) is Lost:
                x.refuse(name)

    def _refuse_absent(self, run: _Run, name: str, tree: Any) -> None:
        absent = next((x for x in tensors_inside(tree) if isinstance(x, ShapeOnlyTensor)), None)
        if absent is not None:
            of = f"a result of {absent.origin}" if absent.origin else "the model's inputs, or a result or weight of "
            of += "" if absent.origin else "another stage"
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward comes to {name} with what depends on "
                f"{of} that has not been handed on, expected values; pass the inputs on every rank, hand the rest on "
                "as positional arguments, or name the module that makes it in split(..., carry=[...])"
            )

    def _wrong(self, stage: int, got: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} ran stage {stage}, whose forward {got}, expected {expected}; split the model "
            "where its modules are registered in the order of their calls, or name that in split(..., order=[...]), "
            "and at modules that every forward pass calls"
        )

    def _other_draws(self, run: _Run, got: str, expected: Any) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward drew random numbers {got}, expected "
            f"{expected} as on the stage before; draw them in every forward pass, or in __init__"
        )

    def _guarded(self, name: str, stage: int) -> Callable[..., Any]:
        first = self.stages.first

        def call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.running
            if run is None:
                return forward(*args, **kwargs)
            if stage < run.stage:
                if run.entered and run.shadowed[name]:
                    raise InvalidArgumentError(
                        f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward called {name} of stage "
                        f"{stage} once more, expected modules of its own; cut the model where all calls of a module "
                        "lie in one stage, or give each call a module of its own"
                    )
                if run.entered:
                    raise self._wrong(run.stage, f"called {name} of stage {stage}", "modules of its own")
                return self._shadow(run, name, args, kwargs)
            if stage > run.stage:
                if name not in self._begins[run.stage + 1] or not run.entered:
                    raise self._wrong(
                        run.stage, f"called {name}", first[run.stage + 1] if run.entered else first[run.stage]
                    )
                self._refuse_absent(run, name, (args, kwargs))
                self._refuse_no_grad(run, name, tree_leaves((args, kwargs)))
                raise _StageBoundary(args, kwargs)
            if not run.entered:
                if name not in self._begins[stage]:
                    raise self._wrong(stage, f"called {name} first", first[stage])
                assert run.about is not None
                if run.draws_done != len(run.about.draws):
                    raise self._other_draws(run, f"{run.draws_done} times before {name}", len(run.about.draws))
                if run.replayed_in is not None and run.replayed_in is checkpoint_around():
                    raise InvalidArgumentError(
                        f"Pipeline: rank {self.rank} ran stage {stage}, which begins with {name} inside of a function "
                        "that is checkpointed and draws random numbers, expected them to be drawn outside, since a "
                        "backward pass would draw others than an earlier stage has; checkpoint modules one by one"
                    )
                args, kwargs = self._put(run, args, kwargs)
                run.entered = True
                for x in run.carried:
                    _clear_hooks(x)
            self._refuse_absent(run, name, (args, kwargs))
            self._refuse_lost(name, (args, kwargs))
            last = run.stage == len(self.stages) - 1  # whom nobody comes after
            with Reads.left():
                if last or run.noting:  # a call inside of another one, which later stages do not come to
                    return forward(*args, **kwargs)
                run.noting = True
                try:
                    return self._noted(run, name, forward, args, kwargs)
                finally:
                    run.noting = False

        return call

    def _noted(
        self, run: _Run, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module of this stage, which later stages are told of."""
        self._refuse_written(run, name)
        inside = self._inside[name]
        watch = Watch(self._containers, inside, args, kwargs)
        hooked: list[tuple[str, Any, tuple[Any, ...]]] = []
        handles = [
            handle
            for key, each in inside.items()
            if any(map(_is_users, (*each._forward_pre_hooks.values(), *each._forward_hooks.values())))
            for handle in self._note_hooks(run, hooked, key, each)
        ]
        try:
            output = forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle()
        found = watch.left()
        for each in found:
            if each.changed:
                self._carry_again(run, each.value)
        left = tuple(replace(each, value=self._value_of(run, each, name)) for each in found)
        shown = self._shown(run, output, name, {**dict(enumerate(args)), **kwargs})
        run.calls.setdefault(name, []).append(Call(shown, tuple(hooked), left))
        run.versions = [version_of(x) for x in run.carried]
        return output

    def _keep(self, run: _Run, x: torch.Tensor) -> None:
        """Of what the model's own forward is about to write into: of what is carried, later stages get the values that
        its module gave. They come to that code themselves."""
        last = run.stage == len(self.stages) - 1  # whom nobody comes after
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

    def _refuse_written(self, run: _Run, name: str) -> None:
        """Raises where what is carried was written into by code that `Reads` does not see, such as an extension's."""
        for x, version in zip(run.carried, run.versions, strict=True):
            if version_of(x) != version:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward comes to {name} after code "
                    f"outside of modules wrote into a tensor of shape {tuple(x.shape)} which is carried, "
                    "expected its values as its module gave them; write into a clone of it"
                )

    def _refuse_written_parameters(self, run: _Run, written: Sequence[torch.Tensor]) -> None:
        """Raises where something absent would be written into a parameter, such as into a running mean of another."""
        for name, p in self.model.named_parameters():
            if not isinstance(p, ShapeOnlyTensor) and any(_shares(p, x) for x in written):
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward writes into {name} what depends "
                    "on another stage, expected values; cut the model where both lie in one stage, or write into "
                    "parameters behind step()"
                )

    def _note_hooks(
        self, run: _Run, hooked: list[tuple[str, Any, tuple[Any, ...]]], name: str, module: nn.Module
    ) -> list[Callable[[], None]]:
        """Notes calls of a module in ``hooked``; gives what ends that."""
        seen: list[Any] = []

        def noting(hook: Callable[..., Any], *call: Any) -> Any:
            seen.append(self._shown(run, call[-1], name))
            return hook(*call)

        def ended(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            hooked.append((name, Shape.of((args, kwargs)), tuple(seen)))
            seen.clear()

        hooks = module._forward_hooks
        theirs = {number: hook for number, hook in hooks.items() if _is_users(hook)}
        hooks.update({number: partial(noting, hook) for number, hook in theirs.items()})

        def restored() -> None:
            hooks.update({number: hook for number, hook in theirs.items() if number in hooks})

        return [module.register_forward_hook(ended, with_kwargs=True).remove, restored]

    def _shown(self, run: _Run, output: Any, name: str, given: Mapping[Any, Any] | None = None) -> Any:
        """What later stages are told of a result."""
        if name in self.stages.carry:
            return self._carry(run, output, name, given or {})
        return Shape.of(output, name, given)

    def _value_of(self, run: _Run, left: Left, name: str) -> Any:
        """What later stages are told of what a module has left."""
        if left.written and not any(x is left.value for x in run.carried):
            return self._shown(run, left.value, name)
        if can_travel(left.value):
            return self._carry(run, left.value, name, {})
        _refuse_hidden(left)
        return left.value if isinstance(left.value, Gone) else _stand(left.value, name, {})

    def _carry_again(self, run: _Run, x: Any) -> None:
        """Of a tensor that is carried and was written into: later stages get its last values. Between the call that
        left it and this one they have none."""
        number = next((i for i, other in enumerate(run.carried) if other is x), None)
        if number is None:
            return

        def each(stand: Any) -> Any:
            return Shape.of(x) if isinstance(stand, Carried) and stand.number == number else stand

        run.before = {name: map_nest(each, calls) for name, calls in run.before.items()}
        run.calls = {name: map_nest(each, calls) for name, calls in run.calls.items()}

    def _carry(self, run: _Run, nest: Any, name: str, given: Mapping[Any, Any]) -> Any:
        """A nest with its tensors among those that are carried."""

        def each(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x if is_plain(x) else _stand(x, name, given)
            self._refuse_absent(run, f"what {name} leaves", x)
            known = next((i for i, other in enumerate(run.carried) if other is x), None)
            if known is None:
                run.carried.append(x)
                run.versions.append(version_of(x))
                return Carried(len(run.carried) - 1)
            return Carried(known)

        return map_nest(each, nest)

    def _shadow(self, run: _Run, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of an earlier stage gives back here, and leaves beside that."""
        assert run.about is not None
        calls, number = run.about.calls.get(name, ()), run.shadowed[name]
        run.shadowed[name] += 1
        call = calls[min(number, len(calls) - 1)] if calls else Call(run.about.usual)
        places = []
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        lefts = [each for each in call.left if not each.written]
        for each in lefts:
            try:
                places.append(found_at(self.model, args, kwargs, each.place))
            except LookupError:
                raise self._wrong(run.stage, f"has no place for what {name} leaves", "the same code on all") from None
            leave(places[-1], each, self._made(each.value, name))
        for each in call.left:
            if each.written:
                self._write(run, given.get(each.key), each.value, name)
        there = [(place, copy.copy(place)) for place in places]
        for inner, inputs, outputs in call.hooked:
            its_args, its_kwargs = (args, kwargs) if inner == name else self._made(inputs, inner)
            made = [self._made(output, inner) for output in outputs]
            run.hooking = True
            try:
                _run_hooks(self.model.get_submodule(inner), its_args, its_kwargs, made)
            finally:
                run.hooking = False
        result = self._made(call.output, name, given)
        for each, (place, before) in zip(lefts, there, strict=True):  # what hooks left is among it: once is enough
            restore(each, place, before)
        return result

    def _write(self, run: _Run, x: Any, value: Any, name: str) -> None:
        """Into a tensor that a module of an earlier stage was given and wrote into."""
        if type(x) is torch.Tensor:
            run.lost += lose(x, name)
        if isinstance(value, Carried) and isinstance(x, ShapeOnlyTensor):
            run.carried[value.number] = x.fill(run.carried[value.number])
            run.versions[value.number] = version_of(x)

    def _made(self, tree: Any, origin: str = "", given: Mapping[Any, Any] | None = None) -> Any:
        """A nest of shapes with tensors in their places; with those that were carried, and objects that were given."""
        device, run = self.device, self.running

        def each(x: Any) -> Any:
            if isinstance(x, Given):
                return (given or {}).get(x.key)
            if isinstance(x, Kept):
                return Lost(x)
            if isinstance(x, Carried):
                assert run is not None
                return run.carried[x.number]
            return self._absent.make(x.shape, x.dtype, device, origin) if isinstance(x, Shape) else x

        return map_nest(each, tree)

    # ---- between two stages ----------------------------------------------------------------------------------------

    def _handed_on(self, run: _Run, cut: _StageBoundary, inputs: Any) -> tuple[list[torch.Tensor], StageMetadata]:
        self._refuse_written(run, self.stages.first[run.stage + 1])
        leaves = tree_leaves(cut.inputs)
        positional = len(tree_leaves(cut.inputs[0]))
        named = {i for i, x in enumerate(leaves) if i >= positional and torch.is_tensor(x) and x.requires_grad}
        named |= self._grads.get(run.stage, set())
        self._grads[run.stage] = named
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
                f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward handed no tensor on but {kinds}, "
                f"expected tensors as arguments of {name}; hand tensors on, in tuples, lists or dicts, or name the "
                "modules that make what it is given in split(..., carry=[...]), as for dataclasses"
            )
        usual = Shape.of((sent or run.carried)[0]) if run.about is None else run.about.usual
        here = {name: tuple(its) for name, its in run.calls.items() if any(call != Call(usual) for call in its)}
        sent += map(_sendable, run.carried)
        return sent, StageMetadata(tuple(facts), inputs, usual, run.before | here, len(run.carried), tuple(run.draws))

    def _put(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the stage's first module, with what was received in its place."""
        assert run.about is not None
        leaves = tree_leaves((args, kwargs))
        name = self.stages.first[run.stage]
        if len(leaves) != len(run.about.leaves):
            raise self._wrong(
                run.stage,
                f"called {name} with {len(leaves)} values",
                f"{len(run.about.leaves)}, as stage {run.stage - 1} did",
            )
        others: dict[int, torch.Tensor] = {}  # by what the model has in their places
        for at, (own, fact) in enumerate(zip(leaves, run.about.leaves, strict=True)):
            if fact is None:
                continue
            kind, number = fact
            if kind == "plain":
                wrong = torch.is_tensor(own) or (is_plain(own) and not _is_equal(own, number))
            elif kind == "own":
                wrong = not _has_values(own) or number not in (ANY, _checksum(own))
            else:
                x = (run.carried if kind == "carried" else run.received)[number]
                wrong = own is not x and not self._is_place_of(own, x)
                if own is not x and not wrong:
                    others[id(own)] = self._arrived(own, x)
            if wrong:
                raise self._other_values(name, own, _argument((args, kwargs), at))
        self._refuse_no_grad(run, name, run.received)
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = _replaced((args, kwargs), others)
        return replaced

    def _refuse_no_grad(self, run: _Run, name: str, tensors: Sequence[Any]) -> None:
        if not run.grads or torch.is_grad_enabled():
            return
        if any(torch.is_tensor(x) and x.requires_grad for x in tensors) or _in_function():
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} got a call of {name}, with which a stage begins, that takes no gradients, "
                "expected one that does, outside of any torch.autograd.Function; checkpoint with use_reentrant=False, "
                "or cut elsewhere"
            )

    def _is_place_of(self, own: Any, x: torch.Tensor) -> bool:
        """Whether what the model has in the place of a received tensor is absent, or the same."""
        alike = torch.is_tensor(own) and (own.shape, own.dtype) == (x.shape, x.dtype)
        return alike and (isinstance(own, ShapeOnlyTensor) or _checksum(own) == _checksum(x))

    def _arrived(self, own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A received tensor: in the very object that the model has in its place, so that what the model does with that
        besides, such as a sum around the module, a checkpoint, or a mask for the next module, has the values too."""
        if isinstance(own, ShapeOnlyTensor):
            return own.fill(x)
        if own.is_cpu and not x.requires_grad:
            return own
        if type(own) is torch.Tensor and not own.is_leaf and not own._is_view():
            lose(own, "")
            return cast(ShapeOnlyTensor, own).fill(x)
        return writable(x)

    def _other_values(self, name: str, own: Any, argument: str) -> InvalidArgumentError:
        if isinstance(own, ShapeOnlyTensor) and own.origin:
            return InvalidArgumentError(
                f"Pipeline: rank {self.rank} got no values for {argument} of {name}, which depends on a result of "
                f"{own.origin} and is passed by name, without a gradient, expected values: such arguments are not "
                f"handed on; name {own.origin} in split(..., carry=[{own.origin!r}]), or pass it by position"
            )
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} got other values than the stage before in {argument} of {name}, or none, "
            "which depends on the model's inputs, expected the same; pass the inputs on every rank"
        )


def _argument(call: tuple[tuple[Any, ...], dict[str, Any]], at: int) -> str:
    """Which of the values of a call's arguments it is."""
    (kind, *path), _ = tree_leaves_with_path(call)[at]
    return f"argument {path[0].idx if kind.idx == 0 else path[0].key}{keystr(tuple(path[1:]))}"


def _is_users(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the user's: what ours do belongs to the module."""
    return not (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith("ringcomm.")


def _run_hooks(module: nn.Module, args: Any, kwargs: Any, outputs: Sequence[Any]) -> None:
    """Hooks of a module that is not run here, with the output that each got there."""
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


def _stand(x: Any, origin: str, given: Mapping[Any, Any]) -> Stand:
    """For an object that is neither tensor nor plain value."""
    key = next((key for key, each in given.items() if each is x), None)
    return Kept(type(x).__name__, origin) if key is None else Given(key)


def _is_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or (a != a and b != b))  # not a number is


def _is_other_input(mine: Any, theirs: Any) -> bool:
    """As leaves of what `Shape.of` makes."""
    if isinstance(theirs, Shape):
        return mine != theirs and (mine is None or isinstance(mine, Shape))
    return is_plain(mine) and is_plain(theirs) and not _is_equal(mine, theirs)


def _input(x: Any) -> str:
    return f"a tensor of shape {x.shape} and {x.dtype}" if isinstance(x, Shape) else repr(x)


def _refuse_hidden(left: Left) -> None:
    """Raises where tensors were left that later stages cannot be told of."""
    if any(True for _ in tensors_inside(left.value)):
        name, *keys = left.place
        where = "an argument" if name is None else f"an attribute of {name or 'the model'}"
        keys = [*keys[1 if name is None else 0 :], left.key]
        raise UnsupportedError(
            f"Pipeline: got {type(left.value).__name__} in {where}{''.join(f'[{key!r}]' for key in keys if key)}, left "
            "by a module beside its result, expected tensors and plain values in lists, dicts or dataclasses, which "
            "later stages can be told of; leave the tensors themselves there"
        )


def _replaced(nest: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """A nest with other tensors in the places of some. Lists, dicts and deques stay the same objects, so that the
    model sees what the module leaves in them."""

    def is_container(x: Any) -> bool:
        return isinstance(x, (list, dict, deque))

    def each(x: Any) -> Any:
        for key in [*x] if isinstance(x, dict) else range(len(x)) if isinstance(x, (list, deque)) else ():
            x[key] = tree_map(each, x[key], is_leaf=is_container)
        return others.get(id(x), x)

    return tree_map(each, nest, is_leaf=is_container) if others else nest


def _clear_hooks(x: torch.Tensor) -> None:
    """Of what the stage before has, too, whose tensor has the same hooks."""
    if x._backward_hooks is not None:
        x._backward_hooks.clear()


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _sendable(x: torch.Tensor) -> torch.Tensor:
    """Without a gradient where none is taken, and in a view that was made without one: it has none to hand on."""
    return x if torch.is_grad_enabled() and not (x.is_leaf and x._is_view()) else x.detach()


def _has_values(x: Any) -> bool:
    return torch.is_tensor(x) and not isinstance(x, ShapeOnlyTensor)


def _checksum(x: torch.Tensor) -> int:
    if not x.is_cpu:  # a device would have to be waited for
        return x.numel()
    flat = x.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0


def _named(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """A module and what is inside of it, by their names in the model."""
    return {f"{name}.{key}" if name and key else name or key: each for key, each in module.named_modules()}


def _members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a sequence, and of those in it, by their names in the model: forward may call them one by one."""
    if isinstance(module, (nn.Sequential, Chain)):
        for key, each in module.named_children():
            yield f"{name}.{key}", each
            yield from _members(f"{name}.{key}", each)


def _first_members(name: str, module: nn.Module) -> set[str]:
    """The first module of a sequence, and the first one in that."""
    found: set[str] = set()
    while isinstance(module, (nn.Sequential, Chain)) and len(module):
        key, module = next(module.named_children())
        found.add(name := f"{name}.{key}")
    return found


# ---- modules ------------------------------------------------------------------------------------------------------


def _empty(module: nn.Module, device: torch.device, seen: set[int]) -> list[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Lets go of a module's parameters and buffers; what is computed from them all the same is absent. Of those on meta
    it is on ``device``.

    Args:
        seen: ids of parameters that the model has at another place.
    Returns: what stands for the parameters that were not seen, by the modules that had them.
    """
    stand: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for each in module.modules():
        each.__dict__["_ringcomm_elsewhere"] = True
        stand.append((each, {}))
        for held in (each._parameters, each._buffers):
            for key, tensor in [*held.items()]:
                if tensor is not None:
                    del held[key]
                    each.__dict__[key] = weightless(tensor, device if tensor.is_meta else tensor.device)
                    if held is each._parameters and id(tensor) not in seen:
                        stand[-1][1][key] = each.__dict__[key]
                        seen.add(id(tensor))
    return stand


def _in_function() -> bool:
    """Whether a torch.autograd.Function computes, in whose backward pass nobody would send gradients."""
    frame = sys._getframe(1)
    while frame is not None:
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(first, torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _guard(module: nn.Module, call: Callable[..., Any]) -> None:
    """Lets ``call`` stand before the module's own call: before hooks, and before a class's own ``__call__``."""
    kind = type(module)

    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        raise UnsupportedError(
            f"Pipeline: got a {kind.__name__} that belongs to a pipeline to copy or pickle, expected its values; save "
            "state_dict()"
        )

    members = {"__call__": guarded, "__reduce_ex__": reduced, "__module__": kind.__module__, "_ringcomm_staged": True}
    module.__class__ = type(kind.__name__, (kind,), members)


def staged(model: nn.Module) -> bool:
    """Whether a pipeline has a part of the model already."""
    return any(hasattr(type(module), "_ringcomm_staged") for module in model.modules())
