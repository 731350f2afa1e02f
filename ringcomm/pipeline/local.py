"""This rank's stages of a model: the model itself without the parameters of others, run from one cut to the next."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.parallel.part import note
from ringcomm.pipeline.absent import Absent, Maker, any_absent, weightless
from ringcomm.pipeline.cuts import Stages

ANY = -1


@dataclass(frozen=True)
class Shape:
    """What is left of a tensor that stays elsewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tree: Any) -> Any:
        """A nest with its tensors as shapes, and nothing for what is neither tensor nor plain value."""

        def each(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return Shape(tuple(x.shape), x.dtype)
            return x if isinstance(x, (int, float, bool, str)) else None

        return tree_map(each, tree)


@dataclass(frozen=True)
class About:
    """What a stage tells the next beside tensors.

    Attributes:
        leaves: of the arguments with which its first module is called: the number of a tensor that is sent, or the
            checksum of one that it must have itself (`ANY`: it may be any), or None.
        inputs: of the model, as shapes.
        usual: the first tensor that the first stage sends, as a shape.
        outputs: of modules before, as shapes, where they are others than the usual one.
    """

    leaves: tuple[tuple[str, int] | None, ...]
    inputs: Any
    usual: Shape
    outputs: Mapping[str, Any]

    def of_any(self) -> About:
        """The same where values may be others."""
        return replace(self, leaves=tuple(("own", ANY) if each and each[0] == "own" else each for each in self.leaves))


class _Cut(BaseException):
    """Ends a forward pass where the next stage begins: no error, and nothing that a model's `except` may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = (args, kwargs)


@dataclass
class _Run:
    stage: int
    about: About | None
    received: list[torch.Tensor]
    entered: bool
    grads: bool  # whether they are taken
    outputs: dict[str, Any] = field(default_factory=dict)


class Local:
    """The model on this rank.

    Args:
        mine: this rank's stages. The parameters of all other modules are let go of.
        rank: for messages.
        device: of tensors, on a rank without parameters.
    """

    def __init__(self, stages: Stages, mine: Sequence[int], rank: int, device: torch.device) -> None:
        self.stages, self.model, self.rank, self._device = stages, stages.model, rank, device
        self.running: _Run | None = None
        self._grads: dict[int, set[int]] = {}  # by stage: named arguments of the next one's first module to send
        self._absent = Maker()
        for tie in stages.ties:
            first = tie.stages[0] in mine
            owners = [use for stage in tie.stages if stage in mine for use in tie.uses[stage]]
            for module, key in owners[:1]:
                note(module._parameters[key], names=tie.names, copy=not first)
        for name, stage in stages.stage_of.items():
            module = self.model.get_submodule(name)
            if stage not in mine:
                _empty(module)
            elif len(mine) < len(stages):
                for p in module.parameters():
                    note(p, staged=True)
            _guard(module, self._guarded(name, stage))

    @property
    def device(self) -> torch.device:
        """On which this rank's parameters are."""
        found = next((p.device for p in self.model.parameters() if not p.is_meta), None)
        return self._device if found is None else found

    def used_often(self) -> list[torch.Tensor]:
        """Parameters here that more than one module has."""
        uses = Counter(id(p) for module in self.model.modules() for p in module._parameters.values() if p is not None)
        return [p for p in self.model.parameters() if uses[id(p)] > 1]

    # ---- one stage ------------------------------------------------------------------------------------------------

    def run(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: list[torch.Tensor],
        about: About | None = None,
    ) -> tuple[Any, About | None]:
        """Runs a stage.

        Args:
            args, kwargs: of the model, as far as this rank has them.
            received, about: from the stage before. What the model has in the place of a received tensor takes its
                values, and its place in the list.
        Returns: the tensors for the next stage, and what it has to know; of the last stage the model's output and None.
        """
        if about is not None:
            theirs = self._made(about.inputs)
            args, kwargs = args or theirs[0], {**theirs[1], **kwargs}
        last = stage == len(self.stages) - 1
        grads = torch.is_grad_enabled() or (not last and stage not in self._grads)
        run = self.running = _Run(stage, about, received, entered=stage == 0, grads=grads)
        try:
            with torch.set_grad_enabled(grads):
                output = self.model(*args, **kwargs)
        except _Cut as cut:
            return self._handed_on(run, cut, Shape.of((args, kwargs)))
        finally:
            self.running = None
        if not last:
            raise self._wrong(stage, "ended", f"a call of {self.stages.first[stage + 1]}")
        if not run.entered:
            raise self._wrong(stage, "ended", f"a call of {self.stages.first[stage]}")
        self._refuse_absent(run, "the end", output)
        return output, None

    def _refuse_absent(self, run: _Run, name: str, tree: Any) -> None:
        if any_absent(tree):
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} ran stage {run.stage}, whose forward comes to {name} with what depends on "
                "the model's inputs, or on results or weights of other stages, that have not been handed on, expected "
                "values; pass the inputs on every rank, or hand the rest on as positional arguments"
            )

    def _wrong(self, stage: int, got: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} ran stage {stage}, whose forward {got}, expected {expected}; split the model "
            "where its modules are registered in the order of their calls"
        )

    def _guarded(self, name: str, stage: int) -> Callable[..., Any]:
        first = self.stages.first

        def call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.running
            if run is None:
                return forward(*args, **kwargs)
            if stage < run.stage:
                if run.entered:
                    raise self._wrong(run.stage, f"called {name} of stage {stage}", "modules of its own")
                return self._shadow(run, name)
            if stage > run.stage:
                if name != first[run.stage + 1] or not run.entered:
                    raise self._wrong(
                        run.stage, f"called {name}", first[run.stage + 1] if run.entered else first[run.stage]
                    )
                self._refuse_absent(run, name, (args, kwargs))
                self._refuse_no_grad(run, name, tree_leaves((args, kwargs)))
                raise _Cut(args, kwargs)
            if not run.entered:
                if name != first[stage]:
                    raise self._wrong(stage, f"called {name} first", first[stage])
                args, kwargs = self._put(run, args, kwargs)
                run.entered = True
            self._refuse_absent(run, name, (args, kwargs))
            output = forward(*args, **kwargs)
            run.outputs[name] = Shape.of(output)
            return output

        return call

    def _shadow(self, run: _Run, name: str) -> Any:
        """What a module of an earlier stage gives back here."""
        assert run.about is not None
        return self._made(run.about.outputs.get(name, run.about.usual))

    def _made(self, tree: Any) -> Any:
        """A nest of shapes with tensors in their places."""
        device = self.device
        return tree_map(lambda x: self._absent.make(x.shape, x.dtype, device) if isinstance(x, Shape) else x, tree)

    # ---- between two stages ----------------------------------------------------------------------------------------

    def _handed_on(self, run: _Run, cut: _Cut, inputs: Any) -> tuple[list[torch.Tensor], About]:
        leaves, _ = tree_flatten(cut.inputs)
        positional = len(tree_flatten(cut.inputs[0])[0])
        named = {i for i, x in enumerate(leaves) if i >= positional and torch.is_tensor(x) and x.requires_grad}
        named |= self._grads.get(run.stage, set())
        self._grads[run.stage] = named
        sent: list[torch.Tensor] = []
        facts: list[tuple[str, int] | None] = []
        for i, x in enumerate(leaves):
            if not torch.is_tensor(x):
                facts.append(None)
            elif i < positional or i in named:
                facts.append(("sent", len(sent)))
                sent.append(x if torch.is_grad_enabled() else x.detach())
            else:
                facts.append(("own", _checksum(x)))
        if not sent:
            raise self._wrong(
                run.stage, "handed no tensor on", f"tensors as arguments of {self.stages.first[run.stage + 1]}"
            )
        usual = Shape.of(sent[0]) if run.about is None else run.about.usual
        outputs = {} if run.about is None else dict(run.about.outputs)
        outputs |= {name: shape for name, shape in run.outputs.items() if shape != usual}
        return sent, About(tuple(facts), inputs, usual, outputs)

    def _put(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the stage's first module, with what was received in its place."""
        assert run.about is not None
        leaves, spec = tree_flatten((args, kwargs))
        name = self.stages.first[run.stage]
        if len(leaves) != len(run.about.leaves):
            raise self._wrong(
                run.stage,
                f"called {name} with {len(leaves)} values",
                f"{len(run.about.leaves)}, as stage {run.stage - 1} did",
            )
        for i, fact in enumerate(run.about.leaves):
            if fact is not None and fact[0] == "sent":
                leaves[i] = run.received[fact[1]] = self._arrived(name, leaves[i], run.received[fact[1]])
            elif fact is not None and (not _has_values(leaves[i]) or fact[1] not in (ANY, _checksum(leaves[i]))):
                raise self._other_values(name)
        if any(getattr(module, "inplace", False) for module in self.model.get_submodule(name).modules()):
            leaves = [x.clone() if torch.is_tensor(x) and x.is_leaf and x.requires_grad else x for x in leaves]
        self._refuse_no_grad(run, name, run.received)
        return tree_unflatten(leaves, spec)

    def _refuse_no_grad(self, run: _Run, name: str, tensors: Sequence[Any]) -> None:
        if run.grads and not torch.is_grad_enabled() and any(torch.is_tensor(x) and x.requires_grad for x in tensors):
            raise InvalidArgumentError(
                f"Pipeline: rank {self.rank} got a call of {name}, with which a stage begins, that takes no gradients, "
                "expected one that does, as what it is called with has; checkpoint with use_reentrant=False"
            )

    def _arrived(self, name: str, own: Any, x: torch.Tensor) -> torch.Tensor:
        """A received tensor: in the very object that the model has in its place, so that what the model does with that
        besides, such as a sum around the module, a checkpoint, or a mask for the next module, has the values too."""
        alike = torch.is_tensor(own) and (own.shape, own.dtype) == (x.shape, x.dtype)
        if alike and isinstance(own, Absent):
            return own.fill(x)
        if not alike or _checksum(own) != _checksum(x):
            raise self._other_values(name)
        return x

    def _other_values(self, name: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"Pipeline: rank {self.rank} got other values than the stage before in an argument of {name}, or none, "
            "which depends on the model's inputs, expected the same; pass the inputs on every rank"
        )


def _has_values(x: Any) -> bool:
    return torch.is_tensor(x) and not isinstance(x, Absent)


def _checksum(x: torch.Tensor) -> int:
    if not x.is_cpu:  # a device would have to be waited for
        return x.numel()
    flat = x.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0


# ---- modules ------------------------------------------------------------------------------------------------------


def _empty(module: nn.Module) -> None:
    """Lets go of a module's parameters and buffers; what is computed from them all the same is absent."""
    for each in module.modules():
        each.__dict__["_ringcomm_elsewhere"] = True
        for held in (each._parameters, each._buffers):
            for key, tensor in [*held.items()]:
                if tensor is not None:
                    del held[key]
                    each.__dict__[key] = weightless(tensor)


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
