"""This rank's stages of a model: the model itself without the parameters of others, run from one cut to the next."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ringcomm.errors import InvalidArgumentError
from ringcomm.parallel.part import note
from ringcomm.pipeline.cuts import Stages, shape_only


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

    @staticmethod
    def made(tree: Any, device: torch.device) -> Any:
        """The nest with tensors that have no values."""
        return tree_map(lambda x: shape_only(x.shape, x.dtype, device) if isinstance(x, Shape) else x, tree)


@dataclass(frozen=True)
class About:
    """What a stage tells the next beside tensors.

    Attributes:
        leaves: of the arguments with which its first module is called: the number of a tensor that is sent, or the
            checksum of one that it must have itself, or None.
        inputs: of the model, as shapes.
        usual: the first tensor that the first stage sends, as a shape.
        outputs: of modules before, as shapes, where they are others than the usual one.
    """

    leaves: tuple[tuple[str, int] | None, ...]
    inputs: Any
    usual: Shape
    outputs: Mapping[str, Any]


class _Cut(BaseException):
    """Ends a forward pass where the next stage begins: no error, and nothing that a model's `except` may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = (args, kwargs)


@dataclass
class _Run:
    stage: int
    about: About | None
    received: Sequence[torch.Tensor]
    entered: bool
    outputs: dict[str, Any] = field(default_factory=dict)


class Local:
    """The model on this rank.

    Args:
        mine: this rank's stages. The parameters of all other modules are let go of.
        rank: for messages.
    """

    def __init__(self, stages: Stages, mine: Sequence[int], rank: int) -> None:
        self.stages, self.model, self.rank = stages, stages.model, rank
        self.running: _Run | None = None
        self._grads: dict[int, set[int]] = {}  # by stage: named arguments of the next one's first module to send
        kept = next((p for p in self.model.parameters()), None)
        self.device = torch.device("cpu") if kept is None else kept.device
        for tie in stages.ties:
            first = tie.stages[0] in mine
            owners = [use for stage in tie.stages if stage in mine for use in tie.uses[stage]]
            for module, key in owners[:1]:
                note(module._parameters[key], names=tie.names, copy=not first)
        for name, stage in stages.stage_of.items():
            module = self.model.get_submodule(name)
            if stage not in mine:
                _empty(module)
            _guard(module, self._guarded(name, stage))

    # ---- one stage ------------------------------------------------------------------------------------------------

    def run(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[torch.Tensor] = (),
        about: About | None = None,
    ) -> tuple[Any, About | None]:
        """Runs a stage.

        Args:
            args, kwargs: of the model, as far as this rank has them.
            received, about: from the stage before.
        Returns: the tensors for the next stage, and what it has to know; of the last stage the model's output and None.
        """
        if about is not None:
            theirs = Shape.made(about.inputs, self.device)
            args, kwargs = args or theirs[0], {**theirs[1], **kwargs}
        run = self.running = _Run(stage, about, received, entered=stage == 0)
        last = stage == len(self.stages) - 1
        grads = torch.is_grad_enabled() or (not last and stage not in self._grads)
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
        return output, None

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
                raise _Cut(args, kwargs)
            if not run.entered:
                if name != first[stage]:
                    raise self._wrong(stage, f"called {name} first", first[stage])
                args, kwargs = self._put(run, args, kwargs)
                run.entered = True
            output = forward(*args, **kwargs)
            run.outputs[name] = Shape.of(output)
            return output

        return call

    def _shadow(self, run: _Run, name: str) -> Any:
        """What a module of an earlier stage gives back here."""
        assert run.about is not None
        return Shape.made(run.about.outputs.get(name, run.about.usual), self.device)

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
                leaves[i] = run.received[fact[1]]
            elif fact is not None and (not torch.is_tensor(leaves[i]) or _checksum(leaves[i]) != fact[1]):
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.rank} got other values than stage {run.stage - 1} in a named argument of "
                    f"{name}, which depends on the model's inputs, expected the same; pass the inputs on every rank, "
                    "or hand it on as a positional argument"
                )
        return tree_unflatten(leaves, spec)


def _checksum(x: torch.Tensor) -> int:
    if not x.is_cpu:  # a device would have to be waited for
        return x.numel()
    flat = x.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy()) if flat.numel() else 0


# ---- modules ------------------------------------------------------------------------------------------------------


def _empty(module: nn.Module) -> None:
    """Lets go of a module's parameters and buffers; who reads them all the same gets not a number."""
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for key, tensor in [*held.items()]:
                if tensor is not None:
                    del held[key]
                    each.__dict__[key] = shape_only(tensor.shape, tensor.dtype, tensor.device)


def _guard(module: nn.Module, call: Callable[..., Any]) -> None:
    """Lets ``call`` stand before the module's own call: before hooks, and before a class's own ``__call__``."""
    kind = type(module)

    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__call__": guarded, "__module__": kind.__module__})
