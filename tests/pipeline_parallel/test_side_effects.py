"""What modules leave beside their results, and what later stages need of earlier ones: the bits of one process, or one
sentence that names the module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.errors import AbortedError, InvalidArgumentError, ShapeError, UnsupportedError
from ringcomm.pipeline_parallel.pipeline import Pipeline
from ringcomm.pipeline_parallel.shape_only import ShapeOnlyTensor, ValueGuard, any_shape_only, shape_only
from tests.pipeline_parallel.test_runner import (
    SCHEDULES,
    Gradients,
    check_step,
    gradients,
    make,
    numbers,
    on_ranks,
    plain,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, BLOCKS = 6, 6


class Leaves(nn.Module):
    """A block that leaves an auxiliary loss in the way ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.gate, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 3), nn.Linear(DIM, DIM)
        self.calls = 0
        self.seen: list[torch.Tensor] = []
        self.facts: dict[str, Any] = {"losses": []}

    def forward(self, x: torch.Tensor, beside: Any = None) -> torch.Tensor:
        scores = self.gate(self.norm(x))
        aux = scores.softmax(-1).square().mean()
        if self.how == "attribute":
            self.aux = aux
            self.calls += 1
        elif self.how == "nested":
            self.gate.state = {"now": (aux, "a word")}
        elif self.how in ("list", "shared list"):
            beside.append(aux)
        elif self.how == "own list":
            self.seen.append(aux)
        elif self.how == "replaced":
            beside[:] = [*beside, aux][-3:]
        elif self.how == "dict":
            beside[len(beside)] = aux
        elif self.how == "deep":
            self.facts["losses"].append({"aux": aux})
        elif self.how == "object":
            beside.total = beside.total + aux
        elif self.how == "in place":
            beside["total"] += aux
        return x + torch.tanh(self.up(x)) * scores.sum(-1, keepdim=True)


class LeavingNet(nn.Module):
    """Adds up at its end what its blocks have left."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Leaves(how) for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, 1)
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses = []
        made: dict[str, Callable[[], Any]] = {
            "list": list, "replaced": list, "dict": dict, "shared list": lambda: self.losses,
            "object": lambda: SimpleNamespace(total=x.new_zeros(())),
            "in place": lambda: {"total": torch.zeros(2).sum() * self.stem.weight.new_ones(())},
        }  # fmt: skip
        beside = made.get(self.how, lambda: None)()
        for block in self.blocks:
            block.seen.clear()
            block.facts["losses"].clear()
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, beside)
        found = self.found(beside)
        return self.head(h).square().mean() + torch.stack(found).sum()

    def found(self, beside: Any) -> list[torch.Tensor]:
        """The values that the blocks have left."""
        if self.how == "attribute":
            return [block.aux for block in self.blocks]
        if self.how == "nested":
            assert all(block.gate.state["now"][1] == "a word" for block in self.blocks)
            return [block.gate.state["now"][0] for block in self.blocks]
        if self.how == "own list":
            return [x for block in self.blocks for x in block.seen]
        if self.how == "deep":
            return [x["aux"] for block in self.blocks for x in block.facts["losses"]]
        if self.how == "object":
            return [beside.total]
        if self.how == "in place":
            return [beside["total"]]
        assert len(beside) == (3 if self.how == "replaced" else BLOCKS)
        return [*beside.values()] if self.how == "dict" else [*beside]


class Keeping(nn.Module):
    """Computes with a list of all its results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.kept.append(y.detach()[:1])
        return y + torch.cat(self.kept).mean(0)


class KeepingNet(nn.Module):
    def __init__(self, where: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() if i == where else nn.Linear(DIM, DIM) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("where", range(4))
def test_a_list_that_a_module_keeps_has_each_value_once_on_a_rank_of_several_stages(where: int) -> None:
    at = ["blocks.1", "blocks.2", "blocks.3"]
    check_step(make(KeepingNet, where), at, 2, numbers(6, 4, DIM), schedule="interleaved")


HOWS = ["attribute", "nested", "list", "shared list", "own list", "replaced", "dict", "deep", "object", "in place"]


def check(model: nn.Module, at: list[str], world_size: int = 2, **options: Any) -> nn.Module:
    """Loss and gradients of a step over three micro-batches, and the loss of an evaluation. Returns the last model."""
    return check_step(model, at, world_size, numbers(6, 4, DIM, seed=3), evaluates=True, **options)[-1].model


@pytest.mark.parametrize("how", HOWS)
def test_what_blocks_leave_is_there_at_the_end(how: str) -> None:
    model = check(make(LeavingNet, how), ["blocks.2", "blocks.4"], 3)
    assert [block.calls for block in model.blocks] == [6 if how == "attribute" else 0] * BLOCKS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_carries(schedule: str) -> None:
    at = ["blocks.1", "blocks.3", "blocks.5"] if schedule == "interleaved" else ["blocks.3"]
    check(make(LeavingNet, "list"), at, 2, schedule=schedule, static_shapes=True)


class Recurrent(nn.Module):
    """LSTMs, which make the list of their parameters anew in the forward pass after these were replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(DIM, DIM, batch_first=True) for _ in range(4))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.unsqueeze(1))[0].squeeze(1)
        return self.head(x).square().mean()


def test_recurrent_layers_leave_nothing_when_their_parameters_were_replaced() -> None:
    model = make(Recurrent)
    batches = [numbers(4, DIM, seed=step) for step in range(3)]

    def train(params: Iterable[nn.Parameter], step: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        optimizer, found = torch.optim.SGD(params, lr=0.5), []
        for x in batches:
            found.append(float(step(x)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    def in_pipeline(pipe: Pipeline, rank: int) -> list[float]:
        pipe.load_state_dict({name: x.clone() for name, x in pipe.state_dict().items()}, assign=True)
        return train(pipe.parameters(), pipe.step)

    def in_one_process(x: torch.Tensor) -> torch.Tensor:
        losses = [model(each) / 2 for each in x.chunk(2)]
        torch.autograd.backward(losses)
        return sum(each.detach() for each in losses)

    at = ["blocks.1", "blocks.2", "blocks.3"]
    found = on_ranks(model, at, 2, in_pipeline, microbatches=2, schedule="interleaved")
    assert found == [train(model.parameters(), in_one_process)] * 2


class Skips(nn.Module):
    """A skip over both cuts, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[0](first)
        h = self.blocks[1](second)
        h = self.blocks[2](h)
        h = self.blocks[3](h) + first * 2
        h = self.blocks[4](h) * second
        return self.head(self.blocks[5](h)).square().mean()


def test_a_skip_over_cuts() -> None:
    check(make(Skips), ["blocks.2", "blocks.4"], 3, carry=("blocks.0",))


class Remembers(nn.Module):
    """Keeps its result in an attribute too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.last = torch.tanh(self.inner(x)) * gate
        return self.last


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = x, x.cos()
        for block in self.blocks:
            h = h + block(h, gate) if block is self.blocks[0] else block(h, gate) + h
        return h.square().mean() + sum(block.last.mean() for block in self.blocks)


@pytest.mark.parametrize("at", [["blocks.1"], ["blocks.1", "blocks.4"], ["blocks.2", "blocks.3"]])
def test_a_result_that_is_left_too(at: list[str]) -> None:
    check(make(Remembering), at, len(at) + 1)


class Straight(nn.Module):
    """Whose cut is where a result is handed on that is left too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = x, x.cos()
        for block in self.blocks:
            after = block(h, gate)
            h, x = after, h
        return (h + x).square().mean() + self.blocks[0].last.sum() * self.blocks[1].last.mean()


@pytest.mark.parametrize("at", [["blocks.1"], ["blocks.2"], ["blocks.1", "blocks.3"]])
def test_what_is_handed_on_is_left_too(at: list[str]) -> None:
    check(make(Straight), at, len(at) + 1)


def test_static_shapes_with_plain_values_that_change_are_refused() -> None:
    error = errors(make(LeavingNet, "attribute"), ["blocks.2"], torch.ones(2, 4, DIM), static_shapes=True)
    assert isinstance(error, ShapeError)
    assert "static_shapes=False" in str(error)


def errors(model: nn.Module, at: list[str], *args: Any, **options: Any) -> BaseException:
    """The error that was not caused by another rank."""

    def step(pipe: Pipeline, rank: int) -> BaseException | None:
        try:
            pipe.step(*args)
        except AbortedError:
            return None
        except Exception as error:
            return error

    (error,) = filter(None, on_ranks(model, at, len(at) + 1, step, microbatches=2, **options))
    assert "\n" not in str(error)
    assert "; " in str(error)
    return error


def test_a_skip_that_is_not_carried_names_its_module() -> None:
    error = errors(make(Skips), ["blocks.2", "blocks.4"], torch.ones(2, DIM))
    assert isinstance(error, InvalidArgumentError)
    assert "a result of blocks.0" in str(error)
    assert "carry=" in str(error)


class Hooked(nn.Module):
    """Adds up what forward hooks of submodules collect, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves("none") for _ in range(4))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: list[torch.Tensor] = []
        shapes: list[torch.Size] = []
        hooks = [block.gate.register_forward_hook(lambda *call: scores.append(call[-1])) for block in self.blocks]
        for module in (*self.blocks, *(block.up for block in self.blocks)):
            hooks.append(module.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape)))
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        assert shapes == [x.shape] * 8
        return self.head(x).square().mean() + torch.stack([s.softmax(-1).square().mean() for s in scores]).sum()


def test_what_hooks_collect() -> None:
    check(make(Hooked), ["blocks.1", "blocks.3"], 3, carry=("blocks.*.gate",))


def test_what_hooks_collect_and_nothing_carries_names_the_module() -> None:
    error = errors(make(Hooked), ["blocks.2"], torch.ones(2, DIM))
    assert isinstance(error, InvalidArgumentError)
    assert "a result of blocks.0.gate" in str(error)


class Keeps(nn.Module):
    """Whose forward hooks keep results in the model itself."""

    def __init__(self, how: str, inner: bool) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Leaves("none") for _ in range(4))
        self.head = nn.Linear(DIM, 1)
        self.kept: Any = None
        self.calls = 0
        for block in self.blocks:
            (block.up if inner else block).register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        if self.how == "dict":
            self.kept[len(self.kept)] = output
        elif self.how == "list":
            self.kept.append(output)
        else:
            self.kept = [*self.kept, output]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept, self.calls = {} if self.how == "dict" else [], 0
        for block in self.blocks:
            x = block(x)
        kept = [*self.kept.values()] if self.how == "dict" else self.kept
        assert (len(kept), self.calls) == (4, 4)
        return self.head(x).square().mean() + torch.stack([each.square().mean() for each in kept]).sum()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("how", ["dict", "list", "attribute"])
def test_results_that_hooks_keep_in_the_model_are_there_once(how: str, inner: bool) -> None:
    check(make(Keeps, how, inner), ["blocks.1", "blocks.3"], 3, carry=() if inner else ("blocks.*",))


class Changed(nn.Module):
    """Hooks that see results before and after one of them has changed these."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves("none") for _ in range(4))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hooks = []
        for block in self.blocks:
            for module in (block, block.up):
                for hook in (lambda *call: seen.append(call[-1]), lambda *call: call[-1] * 0.75):
                    hooks.append(module.register_forward_hook(hook))
                hooks.append(module.register_forward_hook(lambda *call: seen.append(call[-1])))
        results = []
        try:
            for block in self.blocks:
                x = block(x)
                results.append(x)
        finally:  # also where a stage ends
            for each in hooks:
                each.remove()
        assert len(seen) == 16
        return self.head(x).mean() + torch.stack([each.square().mean() for each in (*seen, *results)]).sum()


def test_hooks_that_change_results() -> None:
    check(make(Changed), ["blocks.1", "blocks.3"], 3, carry=("blocks.*", "blocks.*.up"))


def test_a_list_that_lies_in_one_stage_as_a_whole() -> None:
    """Its members are called one by one."""
    check(make(LeavingNet, "list"), ["head"])
    assert ringcomm.split(LeavingNet("list"), ["head"]).names_of(0) == ["stem", *(f"blocks.{i}" for i in range(BLOCKS))]


class InSequence(nn.Module):
    """Calls a sequence, or its members one by one, and those of the sequence in it."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(Leaves("attribute"), nn.Sequential(*(Leaves("attribute") for _ in range(2))))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        leaves = [self.blocks[0], *self.blocks[1]]
        if self.calls:
            x = self.blocks(x)
        else:
            for block in leaves:
                x = block(x)
        return self.head(x).square().mean() + torch.stack([each.aux for each in leaves]).sum()


@pytest.mark.parametrize("at", [["head"], ["blocks"], ["blocks", "head"]])
@pytest.mark.parametrize("calls", [True, False])
def test_members_of_a_sequence_that_lies_in_one_stage(calls: bool, at: list[str]) -> None:
    """Forward may call them itself; what they leave is there on later stages."""
    model = check(make(InSequence, calls), at, len(at) + 1)
    assert [each.calls for each in (model.blocks[0], *model.blocks[1])] == [6] * 3


class SharedMember(nn.Module):
    """Two sequences, in two stages, have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(DIM, DIM)
        self.first, self.second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(DIM, DIM), shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_a_module_in_two_stages_is_refused() -> None:
    text = r"got second\.1 in stage 1, which is the same module as first\.0 in stage 0, .*; cut the model elsewhere"
    with pytest.raises(InvalidArgumentError, match=text):
        ringcomm.split(make(SharedMember), ["second"])


def test_a_module_that_a_sequence_has_twice() -> None:
    shared = nn.Linear(DIM, DIM)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh(), shared), nn.Linear(DIM, 1), Squares())
    check(model, ["1"])


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Views(nn.Module):
    """Whose first block leaves views of its weight, of which one was made without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.views: list[torch.Tensor] = []
        self.blocks[0].register_forward_hook(self.look)

    def look(self, module: nn.Linear, *_: Any) -> None:
        with torch.no_grad():
            self.views.append(module.weight.t())
        self.views.append(module.weight[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.views.clear()
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + self.views[0].sum() + self.views[1].square().sum()


def test_views_of_a_weight_made_without_gradients() -> None:
    check(make(Views), ["blocks.1"])


class Again(nn.Module):
    """A module that calls itself once inside its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        return self(x, times - 1) + 1 if times else x


class Agains(nn.Module):
    """Uses the result of its first block again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Again() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return (x * first).square().mean()


def test_calls_inside_of_a_call_are_its_own() -> None:
    check(make(Agains), ["blocks.1", "blocks.2"], 3, carry=("blocks.0",))


class Halved(nn.Module):
    """Registers hooks on the gradients of results, of which one is used on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for block in self.blocks:
            x = block(x)
            if torch.is_grad_enabled():
                x.register_hook(lambda grad: grad * 0.5)
            results.append(x)
        return x.square().mean() + results[0].sin().mean() + results[1].cos().mean()


def test_hooks_of_gradients_run_once() -> None:
    check(make(Halved), ["blocks.1", "blocks.2", "blocks.3"], 4, carry=("blocks.0", "blocks.1"))


class HalvedAround(nn.Module):
    """Registers a hook on what it computes of a result itself, in front of the next module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        y = x + x.detach().sin()
        if torch.is_grad_enabled():
            y.register_hook(lambda grad: grad * 0.5)
        return self.blocks[1](x + y).square().mean()


def test_a_hook_on_what_a_stage_computes_of_carried_results_runs_once() -> None:
    check(make(HalvedAround), ["blocks.1"], carry=("blocks.0",))


class InPlace(nn.Module):
    """Writes into what the second stage receives."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM), Writes(), nn.Linear(DIM, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        if self.early:
            h += 1
        return self.blocks[2](self.blocks[1](h)).square().mean()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        x[..., 0] = 2
        return self.inner(x)


@pytest.mark.parametrize("early", [False, True])
def test_code_may_write_into_what_it_receives(early: bool) -> None:
    check(make(InPlace, early), ["blocks.1"])


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.inner(x), {"mean": x.mean()})


class Dataclasses(nn.Module):
    def __init__(self, uses: bool = False) -> None:
        super().__init__()
        self.blocks, self.uses = nn.ModuleList(Wraps() for _ in range(4)), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = x.new_zeros(())
        for block in self.blocks:
            output = block(x)
            x, extra = output.hidden, extra + output.extra["mean"]
        return x.square().mean() + (extra if self.uses else 0)


def test_modules_that_return_dataclasses() -> None:
    check(make(Dataclasses), ["blocks.2"])
    check(make(Dataclasses, True), ["blocks.2"], carry=("blocks.*",))
    assert "a result of blocks." in str(errors(make(Dataclasses, True), ["blocks.2"], torch.ones(2, DIM)))


class Unused(nn.Module):
    """Whose second stage has no use for a gradient of what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).detach()).square().mean()


def test_a_gradient_that_is_missing_is_none() -> None:
    check(make(Unused), ["second"])


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class LeavesObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaves("none"), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y).square().mean()


def test_what_cannot_be_carried_is_refused() -> None:
    class Keeps(Leaves):
        def forward(self, x: torch.Tensor, beside: Any = None) -> torch.Tensor:
            self.kept = Holder(x)
            return super().forward(x)

    model = make(LeavesObjects)
    model.first = Keeps("none")
    error = errors(model, ["second"], torch.ones(2, DIM))
    assert isinstance(error, UnsupportedError)
    assert "Holder in an attribute of first['kept']" in str(error)


@pytest.mark.parametrize("carry", [["block.*"], ["head.weight"], ["blocks"]])
def test_carry_names_modules_of_a_stage(carry: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="names no module that lies in one stage"):
        ringcomm.split(make(Skips), ["blocks.2"], carry=carry)


class Tracks(nn.Module):
    """A block that notes something where ``how`` says."""

    def __init__(self, how: str, shared: Any) -> None:
        super().__init__()
        self.how, self.shared, self.own = how, shared, SimpleNamespace(total=0.0, seen=[])
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, beside: Any = None) -> torch.Tensor:
        x = x + torch.tanh(self.inner(x))
        mean = x.square().mean()
        if self.how == "object in an attribute":
            self.own.total = mean
        elif self.how == "shared object":
            self.shared.seen.append(mean)
        elif self.how == "counter of an object":
            x = x * (1 + self.shared.total)
            self.shared.total += 1
        elif self.how == "deque":
            beside.append(mean)
        elif self.how == "set":
            beside.add(len(beside))
        elif self.how == "taken away":
            x = x + beside.pop("once", 0)
        elif self.how == "buffer":
            self.shared.note(mean)
        elif self.how in ("argument", "argument by name"):
            beside += mean
        return x


class TrackedNet(nn.Module):
    """Uses at its end what its blocks have noted; ``reads``: also between two of them."""

    def __init__(self, how: str, reads: bool = False) -> None:
        super().__init__()
        self.how, self.reads = how, reads
        self.shared = SimpleNamespace(total=0.0, seen=[], note=self.note)
        self.register_buffer("noted", torch.zeros(()))
        self.blocks = nn.ModuleList(Tracks(how, self.shared) for _ in range(4))

    def note(self, mean: torch.Tensor) -> None:
        self.noted = self.noted + mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.total, self.noted, between = 0.0, x.new_zeros(()), x.new_ones(())
        self.shared.seen.clear()
        made: dict[str, Callable[[], Any]] = {"deque": deque, "set": set, "taken away": lambda: {"once": 2.0}}
        beside = made.get(self.how, lambda: x.new_zeros(()))()
        for block in self.blocks:
            x = block(x, beside=beside) if self.how == "argument by name" else block(x, beside)
            if self.reads and block is self.blocks[0]:
                between = beside * 2
        found = {
            "object in an attribute": lambda: sum(block.own.total for block in self.blocks),
            "shared object": lambda: sum(self.shared.seen),
            "counter of an object": lambda: self.shared.total,
            "deque": lambda: sum(beside),
            "set": lambda: len(beside),
            "taken away": lambda: 1 + len(beside),
            "buffer": lambda: self.noted,
        }.get(self.how, lambda: beside)
        return x.square().mean() * found() * between


@pytest.mark.parametrize("at", [["blocks.1"], ["blocks.2"], ["blocks.1", "blocks.2", "blocks.3"]])
@pytest.mark.parametrize(
    "how",
    [
        *("object in an attribute", "shared object", "counter of an object", "deque", "set", "taken away", "buffer"),
        *("argument", "argument by name"),
    ],
)
def test_what_blocks_note_in_objects_and_arguments(how: str, at: list[str]) -> None:
    """Later stages have it too, with its gradient."""
    x = numbers(6, 4, DIM, seed=3)
    loss, expected = plain(make(TrackedNet, how), [lambda net, a=a: net(a) for a in x.chunk(3)], 3)

    def step(pipe: Pipeline, rank: int) -> tuple[Any, Gradients]:
        return pipe.step(x), gradients(pipe)

    done = on_ranks(make(TrackedNet, how), at, len(at) + 1, step, carry=["blocks.*"], microbatches=3)
    assert all(torch.allclose(found, loss, rtol=1e-6) for found, _ in done), (done[0][0], loss)
    found = {name: grad for _, grads in done for name, grad in grads.items()}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-7) for name in found)


@pytest.mark.parametrize("how", ["argument", "argument by name"])
def test_a_value_between_two_writes_is_refused_on_a_later_stage(how: str) -> None:
    """What is carried is one tensor, which has the last values."""

    def step(pipe: Pipeline, rank: int) -> None:
        with pytest.raises((InvalidArgumentError, AbortedError)) as error:
            pipe.step(torch.ones(2, 4, DIM))
        assert rank == 0 or "a result of blocks.0" in str(error.value)

    on_ranks(make(TrackedNet, how, True), ["blocks.2"], 2, step, carry=["blocks.*"], microbatches=1)


class Positional(nn.Module):
    """The first module of the second stage writes into an argument that both stages have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Counts(), Counts()])
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.new_zeros(2)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, seen)
        return self.last(x).square().mean() * seen.sum()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen += 1 + x.detach().mean()
        return self.inner(x)


def test_the_model_sees_what_a_stage_writes_into_an_argument() -> None:
    check(make(Positional), ["blocks.0"])


class Handed(nn.Module):
    """A block that gives an object to the next."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(DIM, DIM), kind

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        if state is not None:
            x = x + state.x
        x = torch.tanh(self.inner(x))
        return x, self.kind(x.mean()) if state is None or self.kind is not SimpleNamespace else state


class HandedNet(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Handed(kind) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.kind(x=1.0) if self.kind is SimpleNamespace else None
        for block in self.blocks:
            x, state = block(x, state)
        return x.square().mean()


@dataclass
class Told:
    x: torch.Tensor


def test_objects_that_blocks_give_back() -> None:
    """One that was given is given back, a dataclass is handed on, another one is refused where it is used."""
    check(make(HandedNet, SimpleNamespace), ["blocks.1", "blocks.2"], 3)
    check(make(HandedNet, Told), ["blocks.1", "blocks.2"], 3, carry=("blocks.*",))
    error = errors(make(HandedNet, Holder), ["blocks.2"], torch.ones(2, DIM))
    assert isinstance(error, InvalidArgumentError)
    assert "got a use of a Holder that blocks.1 of an earlier stage has made" in str(error)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](y + self.blocks[0](y)).square().mean()


@pytest.mark.parametrize("carry", [[], ["blocks.0"]])
def test_a_module_that_is_called_again_behind_the_cut(carry: list[str]) -> None:
    """With carry it gave the result of the first call once more."""

    def step(pipe: Pipeline, rank: int) -> None:
        with pytest.raises((InvalidArgumentError, AbortedError)) as error:
            pipe.step(torch.ones(2, DIM))
        assert "rank 1 ran stage 1, whose forward called blocks.0 of stage 0 again" in str(error.value)

    on_ranks(make(Twice), ["blocks.1"], 2, step, carry=carry, microbatches=1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask) * scale
        return x.square().mean()


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.inner(x) if mask is None else self.inner(x) * mask


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([{}, {"mask": torch.ones(2, 1)}], "got other values than the stage before in argument 1 of blocks.1"),
        ([{"mask": torch.ones(2, 1)}, {"mask": None}], "got None as the argument 'mask' of the model, expected a ten"),
        ([{"mask": torch.ones(2, 1)}, {"mask": torch.ones(2, 6)}], "got a tensor of shape (2, 6) and torch.float32 as"),
        ([{"scale": 2.0}, {"scale": 3.0}], "rank 1 got 3.0 as the argument 'scale' of the model, expected 2.0"),
    ],
)
def test_other_arguments_on_another_rank(inputs: list[dict[str, Any]], text: str) -> None:
    def step(pipe: Pipeline, rank: int) -> None:
        with pytest.raises((InvalidArgumentError, AbortedError)) as error:
            pipe.step(torch.ones(2, DIM), **inputs[rank])
        assert text in str(error.value)

    on_ranks(make(Masked), ["blocks.1"], 2, step, microbatches=1)


class Derived(nn.Module):
    """A mask that is made of a result, and is passed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        mask = (x.detach() > 0).float()
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.square().mean()


def test_a_mask_made_of_a_result_names_what_to_carry() -> None:
    error = errors(make(Derived), ["blocks.1"], torch.ones(2, DIM))
    text = "rank 1 got no values for argument mask of blocks.1, which depends on a result of embed and is a keyword arg"
    assert text in str(error)
    assert "carry=['embed']" in str(error)
    check(make(Derived), ["blocks.1", "blocks.2"], 3, carry=("embed",))


# ---- tensors without values -----------------------------------------------------------------------------------------

H = shape_only((2, 3, 4), torch.float32, torch.device("cpu"))
IDS = shape_only((2, 3), torch.int64, torch.device("cpu"))
NUMBER = shape_only((), torch.int64, torch.device("cpu"))
MASK = shape_only((2, 3), torch.bool, torch.device("cpu"))
ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    "read",
    [
        lambda: torch.equal(H, ONES),
        lambda: torch.allclose(H, ONES),
        lambda: IDS.nonzero().shape,
        lambda: torch.argwhere(MASK),
        lambda: torch.where(MASK),
        lambda: H[MASK].numel(),
        lambda: ONES[MASK],
        lambda: torch.masked_select(H, MASK[..., None]),
        lambda: IDS.unique().numel(),
        lambda: torch.unique_consecutive(IDS),
        lambda: ONES.repeat_interleave(IDS[0], 1),
        lambda: torch.nn.functional.one_hot(IDS),
        lambda: torch.bincount(IDS[0]),
        lambda: H.requires_grad,
        lambda: H.grad_fn,
        lambda: H.grad,
        lambda: H.is_leaf,
        lambda: bool(H.sum() > 0),
        lambda: float(H.sum()),
        lambda: IDS[0, 0].item(),
        lambda: IDS.tolist(),
        lambda: H.numpy(),
        lambda: ONES[: IDS[0, 0]],
        lambda: 3 in IDS,
        lambda: max(IDS[0]),
        lambda: f"{H.sum():.3f}",
        lambda: repr(H),
        lambda: torch.is_nonzero(H.sum()),
        lambda: H.untyped_storage(),
        lambda: H[:, : IDS[0, 0]],
        lambda: ONES[NUMBER, : IDS[0, 0]],
        lambda: torch.repeat_interleave(IDS[0]),
        lambda: torch.arange(NUMBER),
        lambda: torch.arange(IDS.max()),
        lambda: torch.zeros(NUMBER, 2),
        lambda: torch.full((2,), NUMBER),
        lambda: torch.full((2,), H[0, 0, 0]),
        lambda: torch.tensor(NUMBER),
        lambda: torch.eye(NUMBER),
        lambda: torch.randperm(NUMBER),
        lambda: torch.randint(0, NUMBER + 1, (2,)),
        lambda: H.new_zeros(NUMBER),
        lambda: ONES.new_zeros(NUMBER),
        lambda: ONES.narrow(0, 0, NUMBER),
        lambda: ONES.expand(NUMBER, 2, 3, 4),
        lambda: ONES.repeat(NUMBER, 1, 1),
        lambda: ONES.roll(NUMBER, 0),
        lambda: ONES.sum(dim=NUMBER),
        lambda: ONES.select(0, NUMBER),
        lambda: ONES.topk(NUMBER),
        lambda: ONES.tril(NUMBER),
        lambda: torch.add(ONES, ONES, alpha=NUMBER),
        lambda: torch.nn.functional.pad(ONES, (0, NUMBER)),
    ],
)
def test_what_depends_on_values_raises(read: Callable[[], Any]) -> None:
    with ValueGuard(), pytest.raises(InvalidArgumentError, match="lies on another rank"):
        read()


class Lengths(nn.Module):
    """Masks by lengths that its first block finds; as many columns as the longest has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Longest(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, longest = self.first(x)
        mask = torch.arange(longest).sum() < 3
        return self.second(x).square().mean() * mask


class Longest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), (x > 0).sum().clamp(max=4)


def test_a_length_that_lies_on_another_rank() -> None:
    error = errors(make(Lengths), ["second"], torch.ones(2, DIM))
    assert "got arange of a tensor that lies on another rank (a result of first)" in str(error)


@pytest.mark.parametrize(
    "made",
    [
        lambda: H.clamp(max=H[0, 0, 0]),
        lambda: H.masked_fill(MASK[..., None], H[0, 0, 0]),
        lambda: 2**NUMBER,
        lambda: ONES[NUMBER],
        lambda: ONES[IDS],
        lambda: torch.where(NUMBER > 0, ONES, 0.0),
    ],
)
def test_numbers_that_lie_on_another_rank_may_be_computed_with(made: Callable[[], Any]) -> None:
    with ValueGuard():
        assert isinstance(made(), ShapeOnlyTensor)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((slice(None), 0), H[:, 0]),
        lambda x: x[:, :2].copy_(H[:, :2]),
        lambda x: x.add_(H),
        lambda x: x.__iadd__(H),
        lambda x: torch.add(H, 1, out=x),
        lambda x: x.masked_fill_(MASK[..., None], 1.0),
    ],
)
def test_a_tensor_into_which_is_written_has_no_values_either(write: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2, 3, 4)
    write(x)
    assert isinstance(x, ShapeOnlyTensor)


def test_what_depends_on_shapes_alone_has_values() -> None:
    assert (H.shape, H.size(1), H.dim(), len(H), H.numel()) == ((2, 3, 4), 3, 3, 2, 24)
    assert not any_shape_only(
        [torch.zeros_like(H), H.new_zeros(3), ONES.to(H), torch.arange(H.shape[1], device=H.device)]
    )
    assert all(isinstance(x, ShapeOnlyTensor) for x in (*H, *H.chunk(2, -1), H + 1, H.max(-1).values))
    with H.register_hook(print):
        pass


def test_a_filled_tensor_keeps_its_place_and_may_be_written_into() -> None:
    h, x = shape_only((2, 3), torch.float32, torch.device("cpu")), torch.randn(2, 3, requires_grad=True)
    assert h.fill(x) is h
    assert (type(h), h.requires_grad, h.is_leaf) == (torch.Tensor, True, False)
    h *= 3
    h.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_a_tensor_that_gets_its_values_late_takes_hooks() -> None:
    """It was a view, of which autograd lost the function that made it: the hook ended the process."""
    x = torch.ones(1, 4, 8, requires_grad=True)
    own = shape_only((1, 4, 8), torch.float32, torch.device("cpu"))
    own.fill(x)
    own.register_hook(lambda gradient: gradient * 0.5)
    (own * 2).sum().backward()
    assert not own._is_view()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [1.0]


def test_what_is_made_of_a_shape_only_tensor_is_no_view_of_it() -> None:
    absent = shape_only((2, 3, 4), torch.float32, torch.device("cpu"))
    for made in (absent.transpose(1, 2), absent[0], absent.view(6, 4), *absent.split(1), *absent.unbind(2)):
        assert isinstance(made, ShapeOnlyTensor)
        with torch._C.DisableTorchFunctionSubclass():
            assert not made._is_view()


class WrittenInto(nn.Module):
    """Writes into results outside of modules; of the first one into a view, without gradients and by a function."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(4))
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        skip = x
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        if self.hidden:
            torch.ops.ringcomm_tests.twice(x)
        x[:, 0].mul_(3)
        x += 0.25
        nn.functional.relu(x, inplace=True)
        for block in self.blocks[1:]:
            x = block(x)
            x.clamp_(-2, 2)
            x.data = x.data + 0.125
            torch.mul(x, 1.5, out=x) if not x.requires_grad else x.mul_(1.5)
            skip = skip + x
        return skip.square().mean()


@pytest.mark.parametrize("at", [["blocks.1"], ["blocks.2"], ["blocks.1", "blocks.3"]], ids=len)
def test_what_is_carried_has_the_values_that_its_module_gave(at: list[str]) -> None:
    model, x = make(WrittenInto), numbers(6, DIM, seed=3, dtype=torch.float64)
    loss, expected = plain(model, [lambda net, a=a: net(a) for a in x.chunk(3)], 3)

    def step(pipe: Pipeline, rank: int) -> Gradients:
        torch.testing.assert_close(pipe.step(x), loss)
        torch.testing.assert_close(pipe.evaluate(x).loss, loss)
        return gradients(pipe)

    parts = on_ranks(model, at, len(at) + 1, step, carry=["blocks.*"], microbatches=3)
    torch.testing.assert_close({name: grad for part in parts for name, grad in part.items()}, dict(expected))


def test_a_write_that_nobody_sees_into_what_is_carried_is_refused() -> None:
    library = torch.library.Library("ringcomm_tests", "FRAGMENT")
    library.define("twice(Tensor(a!) x) -> ()")
    library.impl("twice", lambda x: (x.mul_(2), None)[1], "CompositeImplicitAutograd")
    error = errors(make(WrittenInto, True), ["blocks.1"], torch.ones(4, DIM, dtype=torch.float64), carry=("blocks.0",))
    assert isinstance(error, InvalidArgumentError)
    assert "write into a clone of it" in str(error)


class RootBuffers(nn.Module):
    """Buffers of the model itself: written in front of all cuts, behind them, made anew, and read early."""

    def __init__(self, early: str = "") -> None:
        super().__init__()
        self.early = early
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(4))
        for name in ("ahead", "middle", "ema", "made", "scratch"):
            self.register_buffer(name, torch.zeros(DIM, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.zero_()
        self.ahead.add_(1)
        if self.early == "read":
            x = x + self.ema
        elif self.early == "overwritten":
            x = x + self.scratch
        for i, block in enumerate(self.blocks):
            with torch.device("cpu") if self.early == "in a mode" else nullcontext():
                x = torch.tanh(block(x))
            with torch.no_grad():
                if i == 1:
                    self.middle.add_(x.mean(0))
        with torch.no_grad():
            self.ema.lerp_(x.mean(0), 0.5)
            self.scratch.add_(1)
            self.seen += len(x)
            self.made = self.made * 0.5 + x.sum(0)
            self.late = x.mean(0)
        return (x - self.ema).square().mean()


@pytest.mark.parametrize("early", ["", "overwritten", "in a mode"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("interleaved", 2)])
def test_buffers_around_modules_are_those_of_the_last_stage(schedule: str, ranks: int, early: str) -> None:
    model, x = make(RootBuffers, early), numbers(6, DIM, seed=3, dtype=torch.float64)
    at = ["blocks.2"] if ranks == 2 and schedule == "1f1b" else ["blocks.1", "blocks.2", "blocks.3"]

    def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in model.named_buffers()}

    def steps(pipe: Pipeline, rank: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for _ in range(2):
            pipe.step(x)
            found.append(buffers(pipe))
            assert all(type(each) is torch.Tensor for each in pipe.buffers())
        with torch.inference_mode():
            pipe.evaluate(x)
        pipe.evaluate(x)
        return [*found, buffers(pipe)]

    done = on_ranks(model, at, ranks, steps, microbatches=3, schedule=schedule)
    expected = []
    for passes in (1, 1, 2):
        for each in x.chunk(3) * passes:
            model(each)
        expected.append(buffers(model))
    for found in done:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_buffer_that_is_read_before_a_later_stage_writes_it_is_refused() -> None:
    def step(pipe: Pipeline, rank: int) -> None:
        with pytest.raises(InvalidArgumentError, match="rank 0 ran stage 0, whose forward reads the buffer ema"):
            pipe.step(torch.ones(4, DIM, dtype=torch.float64))

    on_ranks(make(RootBuffers, "read"), ["blocks.2"], 2, step, microbatches=2)
