"""What a pipeline does not take: one sentence on the rank that finds it, and no rank that waits for ever."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import (
    AbortedError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RingcommError,
    ShapeError,
    UnsupportedError,
)
from ringcomm.pipeline_parallel.pipeline import Pipeline
from ringcomm.pipeline_parallel.schedules import Schedule, one_f_one_b
from tests.pipeline_parallel.test_runner import Block, Net, cross_entropy, cuts, make, tokens
from tests.support.choice import choose, slow

pytestmark = pytest.mark.usefixtures("one_thread")


def errors(fn: Callable[[Communicator], Any], world_size: int = 2, timeout: float = 60.0) -> list[BaseException | None]:
    """What each rank raises; none waits for its limit."""

    def rank_main(comm: Communicator) -> BaseException | None:
        try:
            fn(comm)
        except Exception as error:
            return error
        return None

    start = time.monotonic()
    found = ringcomm.run_ranks(rank_main, world_size, timeout=timeout)
    assert time.monotonic() - start < 60
    return found


def row(count: int = 4) -> nn.Sequential:
    return make(lambda: nn.Sequential(*(Block(6) for _ in range(count))))


def pipeline(comm: Communicator, model: nn.Module, at: list[str], **options: Any) -> Pipeline:
    options = {"microbatches": 2, "loss": lambda output: output.square().mean(), **options}
    return Pipeline(ringcomm.split(model, at), comm, **options)


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and ". " not in text.rstrip(".") and "; " in text


# ---- split --------------------------------------------------------------------------------------------------------


class Backwards(nn.Module):
    """The head is registered first and called last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale


@pytest.mark.parametrize(
    ("model", "at", "text"),
    [
        (row(), ["5"], "no submodule"),
        (row(), [""], "no submodule"),
        (row(), ["2", "1"], "the order of the model"),
        (row(), ["2", "2"], "the order of the model"),
        (row(), ["2", "2.mlp"], "inside it"),
    ],
)
def test_impossible_cuts_are_refused(model: nn.Module, at: list[str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        ringcomm.split(model, at)
    assert one_sentence(caught.value)


@pytest.mark.parametrize(
    ("at", "order", "text"),
    [
        (["2"], ["5"], "'5', which is no submodule"),
        (["2"], ["1", "1"], "'1' twice in order"),
        (["2"], ["1", "1.mlp"], "'1.mlp' twice in order, or inside another"),
        (["2"], ["2.mlp.2", "2.mlp.0"], "'2' and '2.mlp.2' inside it"),
        (["1", "2"], ["2", "1"], "order="),
    ],
)
def test_impossible_orders_are_refused(at: list[str], order: list[str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        ringcomm.split(row(), at, order=order)
    assert one_sentence(caught.value)


# ---- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "options", "text"),
    [
        (["1", "2"], {}, "3 stages for 2 ranks"),
        (
            ["2"],
            {"schedule": "1F1B"},
            "Pipeline: got schedule='1F1B', expected a Schedule or the name of one: 'gpipe', '1f1b'",
        ),
        (["2"], {"schedule": one_f_one_b(2, 3)}, "3 micro-batches"),
        (["1", "2", "3"], {"schedule": "1f1b"}, "one stage on each rank"),
        (["2"], {"schedule": Schedule("none", 2, 2, (0, 1), ((), ()))}, "expected"),
        (["2"], {"reduction": "max"}, "reduction='max'"),
        (["2"], {"ties": "loose"}, "ties='loose'"),
        (["2"], {"microbatches": 0}, "at least 1"),
    ],
)
def test_arguments_that_do_not_fit(at: list[str], options: dict[str, Any], text: str) -> None:
    for error in errors(lambda comm: pipeline(comm, row(), at, **options)):
        assert isinstance(error, InvalidArgumentError)
        assert text in str(error)
        assert one_sentence(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda comm: pipeline(comm, row(4 + comm.rank), ["2"]),
        lambda comm: pipeline(comm, row(), [str(1 + comm.rank)]),
        lambda comm: pipeline(comm, row(), ["2"], schedule=("gpipe", "1f1b")[comm.rank], microbatches=4),
        lambda comm: pipeline(comm, row(), ["2"], microbatches=3 + comm.rank),
        lambda comm: pipeline(comm, row(), ["2"], static_shapes=comm.rank == 1),
        lambda comm: Pipeline(ringcomm.split(row(), ["2"], order=["1", "0", "3"][comm.rank :]), comm, microbatches=2),
    ],
)
def test_ranks_that_differ_raise_everywhere(change: Callable[[Communicator], Any]) -> None:
    for error in errors(change):
        assert isinstance(error, MismatchError)
        assert "rank 1 got" in str(error)
        assert one_sentence(error)


def test_a_step_without_gradients() -> None:
    def main(comm: Communicator) -> None:
        pipe = pipeline(comm, row(), ["2"])
        with torch.no_grad():
            pipe.step(torch.ones(4, 6))

    for error in errors(main):
        assert isinstance(error, InvalidArgumentError)
        assert one_sentence(error)
        assert "evaluate()" in str(error)


def test_other_plain_arguments_with_static_shapes() -> None:
    """They travel with the shapes: a stage would go on with the first ones."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
            return self.second(self.first(x)) * scale

    def main(comm: Communicator) -> None:
        pipe = pipeline(comm, make(Scaled), ["second"], static_shapes=True)
        for scale in (1.0, 1.0, 3.0):
            pipe.step(*([torch.ones(4, 4)] if comm.rank == 0 else []), **({} if comm.rank else {"scale": scale}))

    found = errors(main)
    assert isinstance(found[0], ShapeError)
    assert "static_shapes=False" in str(found[0])
    assert isinstance(found[1], AbortedError)


def test_a_model_has_one_pipeline_and_no_copies() -> None:
    def rank_main(comm: Communicator) -> None:
        pipe = pipeline(comm, row(), ["2"])
        with pytest.raises(InvalidArgumentError, match="already belongs to a pipeline"):
            pipeline(comm, pipe.model, ["2"])
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="state_dict"):
                copied(pipe)
            with pytest.raises(UnsupportedError, match="state_dict"):
                copied(pipe.model)
        with pytest.raises(UnsupportedError, match="step"):
            pipe(torch.ones(2, 6))
        pipe.step(torch.ones(2, 6))

    assert errors(rank_main) == [None, None]


# ---- a step --------------------------------------------------------------------------------------------------------


def wrong_order(comm: Communicator) -> Any:
    model = Backwards()
    del model.scale
    model.scale = 1.0
    return pipeline(comm, model, ["body"]).step(torch.ones(2, 6))


class Foreign(nn.Module):
    """Calls a module of the first stage once more, after the second has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(self.first(x)))


class Positioned(nn.Module):
    """Adds a table of positions, which has no rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, pos: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x + pos["table"]))).square().mean()


class Words(nn.Module):
    """Passes a string, not a tensor, to its second module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Told()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(str(self.first(x).shape), 2)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, text: str, number: int) -> torch.Tensor:
        return self.linear(torch.ones(1)) * number


def raising(output: torch.Tensor, *target: Any) -> torch.Tensor:
    raise ZeroDivisionError("in the loss")


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("in the middle of a step")
        return self.linear(x)


def raises_at(number: int, schedule: str) -> Callable[[Communicator], Any]:
    def rank_main(comm: Communicator) -> Any:
        model = nn.Sequential(*(Raises() if i == number else nn.Linear(6, 6) for i in range(3)))
        return pipeline(comm, model, ["1", "2"], microbatches=4, schedule=schedule).step(torch.ones(4, 6))

    return rank_main


def steps(
    *args: Any, model: Callable[[], nn.Module] = row, at: str = "2", target: Any = None, **options: Any
) -> Callable[[Communicator], Any]:
    """A step of a pipeline of two stages."""
    return lambda comm: pipeline(comm, model(), [at], **options).step(*args, target=target)


def with_positions(*shape: int) -> Callable[[Communicator], Any]:
    inputs = {"x": torch.ones(8, 4, 6), "pos": {"table": torch.ones(shape)}}
    return lambda comm: pipeline(comm, Positioned(), ["second"]).step(**inputs)


def half_a_row(comm: Communicator) -> Any:
    inputs = {"input": torch.ones(5, 6)} if comm.rank == 0 else {"target": torch.ones(10, 6)}
    return pipeline(comm, row(), ["2"], loss=raising).step(**inputs)


def ones(rows: int) -> torch.Tensor:
    return torch.ones(rows, 6)


ERRORS: dict[str, tuple[Callable[[Communicator], Any], type[Exception], str]] = {
    "another order": (wrong_order, InvalidArgumentError, "order of their calls"),
    "an earlier stage": (steps(ones(2), model=Foreign, at="second"), InvalidArgumentError, "of stage 0"),
    "no tensor": (steps(ones(2), model=Words, at="second"), InvalidArgumentError, "but no tensor to"),
    "no rows": (steps(ones(0)), ShapeError, "(0, 6)"),
    "no target": (steps(ones(4), target=torch.ones(0), loss=raising), ShapeError, "the target of shape (0,)"),
    "a list as the target": (steps(ones(1), target=[0, 1], loss=raising), ShapeError, "(1, 6) and a list"),
    "too few rows": (steps(ones(1), static_shapes=True), ShapeError, "static_shapes=True and 1 rows in the batch"),
    "a longer target": (
        steps(ones(5), target=(ones(7),), loss=raising),
        ShapeError,
        "the target[0] of shape (7, 6), expected 5 rows",
    ),
    "half of the rows": (with_positions(4, 6), ShapeError, "the argument 'pos'['table'] of shape"),
    "half as many more": (with_positions(12, 6), ShapeError, "the argument 'pos'['table'] of shape"),
    "an empty table": (with_positions(0, 6), ShapeError, "the argument 'pos'['table'] of shape"),
    "half a row": (half_a_row, ShapeError, "got 1/2 of a batch's rows"),
    "uneven rows": (steps(ones(5), static_shapes=True, loss=torch.mean), ShapeError, "static_shapes=False"),
    "a list of one": (steps([torch.ones(3, 6)]), InvalidArgumentError, "list of 1"),
    "a loss of many numbers": (
        steps(ones(2), loss=lambda output: output),
        InvalidArgumentError,
        "a tensor of shape (1, 6) as the loss",
    ),
    "a loss that is a float": (steps(ones(2), loss=lambda output: 3.0), InvalidArgumentError, "a float as the loss"),
    "no loss": (steps(ones(2), loss=None), InvalidArgumentError, "pass loss="),
    "a loss with more": (
        steps(ones(2), loss=lambda output: (output.mean(), {})),
        InvalidArgumentError,
        "a tuple as the loss of a micro-batch, expected one number; return only the loss",
    ),
    "in the loss": (steps(ones(2), loss=raising), ZeroDivisionError, "in the loss"),
    "in stage 0": (raises_at(0, "1f1b"), ZeroDivisionError, "middle"),
    "in stage 1": (raises_at(1, "gpipe"), ZeroDivisionError, "middle"),
    "in stage 2": (raises_at(2, "zero-bubble"), ZeroDivisionError, "middle"),
}


@pytest.mark.parametrize("case", choose(ERRORS, ERRORS.keys() - {"in stage 1"}))
def test_an_error_on_one_rank_ends_all(case: str) -> None:
    rank_main, kind, text = ERRORS[case]
    found = errors(rank_main, 3 if case.startswith("in stage") else 2)
    own = [error for error in found if isinstance(error, kind)]
    assert own, found
    assert all(isinstance(error, (kind, AbortedError)) for error in found), found
    assert text in str(own[0])
    assert one_sentence(own[0]) or kind is ZeroDivisionError
    for error in found:
        assert isinstance(error, kind) or text in str(error)  # what the others raise tells why


def test_a_stage_that_returns_other_shapes_than_promised() -> None:
    parts = [tokens(2, 3), tokens(2, 4)]

    def rank_main(comm: Communicator) -> None:
        options = {"static_shapes": True, "loss": cross_entropy}
        pipeline(comm, make(Net, 4), cuts(2, 4), **options).step(parts, target=parts)

    found = errors(rank_main)
    assert isinstance(found[0], ShapeError)
    assert "static_shapes=False" in str(found[0])
    assert isinstance(found[1], AbortedError)


class Reads(nn.Module):
    """Comes to need, in its second stage, what that stage does not have."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.what = what

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        early = self.first(x * self.third.weight.sum() if self.what == "later weight" else x)
        late = self.second(early * 1)
        if self.what == "penalty":
            return self.third(late) + sum(p.square().sum() for p in self.parameters())
        if self.what == "weight":
            return late @ self.first.weight
        if self.what == "ids":  # of which a zero for each would not be seen
            return self.third(late) * (ids != 7)
        if self.what == "within":
            return self.third(late * (ids != 7))
        return self.third(late + early)


@pytest.mark.parametrize("what", ["weight", "ids", "within", "skip", "later weight", "penalty"])
def test_a_value_of_another_stage_is_an_error(what: str) -> None:
    x, ids = torch.ones(2, 6), torch.arange(2)[:, None]

    def rank_main(comm: Communicator) -> None:
        inputs = (x, ids) if comm.rank == 0 else ()
        pipeline(comm, Reads(what), ["second"]).step(*inputs)

    found = errors(rank_main)
    by, other = reversed(found) if what != "later weight" else found
    assert isinstance(by, InvalidArgumentError)
    assert "was not sent to this stage" in str(by)
    assert one_sentence(by)
    assert isinstance(other, AbortedError)


def test_a_penalty_on_all_parameters_in_the_loss_is_refused() -> None:
    def rank_main(comm: Communicator) -> None:
        def loss(output: torch.Tensor) -> torch.Tensor:
            return output.square().mean() + sum(p.square().sum() for p in pipe.parameters())

        pipe = pipeline(comm, row(), ["2"], loss=loss)
        pipe.step(torch.ones(2, 6))

    found = errors(rank_main)
    assert isinstance(found[0], AbortedError)
    assert isinstance(found[1], UnsupportedError)
    assert "rank 1 got a loss that depends on parameters of other stages" in str(found[1])
    assert one_sentence(found[1])


class Averaged(nn.Module):
    """Keeps a running mean of a layer of another stage in its last one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(6, 6), nn.Linear(6, 6)
        self.mean = nn.Linear(6, 6).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for p, mean in zip(self.first.parameters(), self.mean.parameters(), strict=True):
            if self.how == "data":
                mean.data = mean.data * 0.9 + p.data * 0.1
            else:
                (mean.data if self.how == "view" else mean).lerp_(p, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        self.update()
        return x - self.mean(x)


@pytest.mark.parametrize("how", ["in place", slow("view"), "data"])
def test_a_running_mean_of_parameters_of_another_stage_is_refused(how: str) -> None:
    model = make(Averaged, how)
    before = [p.clone() for p in model.mean.parameters()]
    models = [copy.deepcopy(model) for _ in range(2)]
    found = errors(lambda comm: pipeline(comm, models[comm.rank], ["second"]).step(torch.ones(2, 6)))
    assert isinstance(found[0], AbortedError)
    assert "forward writes values of another stage, which it does not have, into mean.weight" in str(found[1])
    assert one_sentence(found[1])
    assert all(map(torch.equal, models[1].mean.parameters(), before))


class MovingScale(nn.Module):
    """Multiplies by a moving average, which backward needs."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = 0.9 * self.scale + 0.1 * x.detach().mean(0)
        if self.change == "anew":
            self.scale = new
        else:
            self.scale.copy_(new)
        return x * self.weight * (self.scale.clone() if self.change == "in place, cloned" else self.scale)


@pytest.mark.parametrize(
    ("change", "microbatches"), [("in place", 1), ("in place", 3), ("in place, cloned", 3), ("anew", 3)]
)
def test_a_buffer_that_the_next_micro_batch_writes_and_backward_needs(change: str, microbatches: int) -> None:
    """torch's own pipelines raise autograd's error, which names neither a stage nor a cause."""
    model, x = make(lambda: nn.Sequential(Block(6), MovingScale(change), Block(6))), torch.ones(3, 6).cumsum(0)
    alone = copy.deepcopy(model)
    for part in x.chunk(microbatches):
        (alone(part).square().mean() / microbatches).backward()

    def step(comm: Communicator) -> None:
        pipe = pipeline(comm, copy.deepcopy(model), ["2"], microbatches=microbatches)
        pipe.step(x)
        assert all(torch.equal(p.grad, alone.get_parameter(name).grad) for name, p in pipe.named_parameters())

    found = errors(step)
    if change != "in place" or microbatches == 1:
        assert found == [None, None]
    else:
        assert type(found[0]) is InvalidArgumentError
        assert one_sentence(found[0])
        assert "rank 0 ran stage 0" in str(found[0])
        assert "assign a new tensor to the buffer" in str(found[0])


def test_values_of_the_inputs_are_there_where_they_are_passed() -> None:
    x, ids = torch.ones(2, 6), torch.arange(2)[:, None]
    assert errors(lambda comm: pipeline(comm, Reads("ids"), ["second"]).step(x, ids)) == [None, None]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Second()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(self.first(x), mask=None if mask is None else mask * 2)


class InARow(nn.Module):
    """Gives every block the mask as a positional argument."""

    def __init__(self, made_anew: bool) -> None:
        super().__init__()
        self.blocks, self.made_anew = nn.ModuleList(Second() for _ in range(4)), made_anew

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.ones(1, 1) if mask is None else mask * 2
        for block in self.blocks:
            x = block(x, mask[:] if self.made_anew else mask)
        return x


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * mask


def test_a_mask_that_one_rank_lacks() -> None:
    def rank_main(comm: Communicator) -> None:
        mask = {"mask": torch.ones(2, 1)} if comm.rank == 0 else {}
        pipeline(comm, Masked(), ["second"]).step(torch.ones(2, 6), **mask)

    found = errors(rank_main)
    assert isinstance(found[1], InvalidArgumentError)
    assert "pass the inputs on every rank" in str(found[1])
    assert isinstance(found[0], AbortedError)


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("passed", ["nothing", "other inputs"])
def test_a_mask_that_one_rank_lacks_in_several_modules(made_anew: bool, passed: str) -> None:
    x, mask = torch.randn(2, 6), torch.tensor([[1.0], [0.0]])
    model = make(InARow, made_anew)
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank_main(comm: Communicator) -> torch.Tensor:
        pipe = pipeline(comm, models[comm.rank], ["blocks.2"])
        return pipe.step(*((x, mask) if comm.rank == 0 else () if passed == "nothing" else (x,)))

    if made_anew or passed == "other inputs":
        found = errors(rank_main)
        assert isinstance(found[1], InvalidArgumentError)
        assert isinstance(found[0], AbortedError)
        return
    # the very mask that has been handed on, also for the module behind
    expected = sum(model(x[i : i + 1], mask[i : i + 1]).square().mean() / 2 for i in range(2))
    assert all(torch.equal(loss, expected) for loss in ringcomm.run_ranks(rank_main, 2, timeout=10))


def test_a_missing_rank_is_named() -> None:
    def rank_main(comm: Communicator) -> None:
        pipe = pipeline(comm, row(), ["1", "2"])
        if comm.rank != 1:
            pipe.step(torch.ones(2, 6))
        else:
            while not comm.aborted:
                time.sleep(0.01)

    found = errors(rank_main, 3, timeout=1.0)
    assert found[1] is None
    assert any(isinstance(error, CollectiveTimeoutError) and "rank 1" in str(error) for error in found), found
    assert all(isinstance(error, RingcommError) for error in (found[0], found[2]))


def test_after_an_error_the_model_is_as_it_was() -> None:
    kept: list[Any] = [None, None]

    def rank_main(comm: Communicator) -> None:
        pipe = pipeline(comm, make(Net, 4), cuts(2, 4), loss=raising, ties="exact")
        kept[comm.rank] = pipe, dict(pipe.named_parameters())
        pipe.step(tokens(2), target=tokens(2))

    assert [type(error) for error in errors(rank_main)] == [AbortedError, ZeroDivisionError]
    for pipe, params in kept:
        assert all(p is params[name] for name, p in pipe.named_parameters())  # no stand-in is left
        assert pipe._runner.running is None
        block = pipe.model.blocks[0 if pipe.comm.rank == 0 else 3]
        assert block(torch.ones(2, 6)).isfinite().all()  # and no guard
        with pytest.raises((AbortedError, ClosedError)):
            pipe.step(tokens(2), target=tokens(2))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output * self.scale).square().mean()


@pytest.mark.parametrize("bound", [False, True])
def test_a_loss_with_parameters_is_refused(bound: bool) -> None:
    def rank_main(comm: Communicator) -> None:
        loss = Temperature()
        pipeline(comm, row(), ["2"], loss=loss.forward if bound else loss if comm.rank else torch.sum)

    for error in errors(rank_main):
        assert isinstance(error, UnsupportedError)
        assert one_sentence(error)
        assert "trained parameter scale" in str(error)
    loss = Temperature().requires_grad_(False)
    assert errors(lambda comm: pipeline(comm, row(), ["2"], loss=loss)) == [None] * 2
    assert errors(lambda comm: pipeline(comm, model := row(), ["2"], loss=model.add_module)) == [None] * 2


class Activated(nn.Module):
    """An activation that no stage has, and a checkpoint around several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.act = nn.ModuleList(Block(6) for _ in range(3)), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.act(self.blocks[1](self.blocks[0](x)))

        return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


def test_a_checkpoint_over_a_cut_is_refused() -> None:
    def rank_main(comm: Communicator) -> None:
        pipeline(comm, make(Activated), ["blocks.1"]).step(torch.ones(2, 6))

    found = [error for error in errors(rank_main) if not isinstance(error, AbortedError)]
    assert all(isinstance(error, InvalidArgumentError) and one_sentence(error) for error in found)
    assert "on both sides of a cut" in str(found[0])


def test_carry_of_a_module_without_parameters_says_what_to_carry() -> None:
    with pytest.raises(InvalidArgumentError, match="name the modules whose results act gets"):
        ringcomm.split(Activated(), ["blocks.1"], carry=["act"])
    with pytest.raises(InvalidArgumentError, match="names no module"):
        ringcomm.split(Activated(), ["blocks.1"], carry=["no"])


@dataclass
class State:
    x: torch.Tensor


class Leading(nn.Module):
    """Blocks that hand on dataclasses, or of which one is called twice or left out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, blocks = how, [Block(6) for _ in range(4)]
        self.blocks = nn.ModuleList([*blocks[:2], *blocks[:2]] if how == "shared" else blocks)
        if how == "dataclass":
            for block in blocks:
                block.__class__ = OfState

    def forward(self, x: torch.Tensor, *beside: Any) -> torch.Tensor:
        state: Any = State(x) if self.how == "dataclass" else x
        for i, block in enumerate(self.blocks):
            if (self.how, i) != ("skipped", 2):
                state = block(state)
        return state.x if self.how == "dataclass" else state


class OfState(Block):
    def forward(self, state: Any) -> Any:
        return State(super().forward(state.x))


@pytest.mark.parametrize(
    ("how", "at", "text"),
    [
        ("dataclass", "blocks.2", "passed State but no tensor to"),
        ("skipped", "blocks.2", "at modules that every forward pass calls"),
        ("shared", "blocks.1", "use a separate module for each call"),
        ("shared", "blocks.2", "which is blocks.0 under another name"),
        ("target", "blocks.2", "by name: what has none goes to forward"),
    ],
)
def test_sentences_name_the_cause(how: str, at: str, text: str) -> None:
    def rank_main(comm: Communicator) -> None:
        options = {"loss": nn.MSELoss()} if how == "target" else {}
        args = [torch.ones(4, 6)] * (2 if how == "target" else 1)
        pipeline(comm, make(Leading, how), [at], **options).step(*args)

    found = [error for error in errors(rank_main) if error is not None and not isinstance(error, AbortedError)]
    assert all(isinstance(error, InvalidArgumentError) and one_sentence(error) for error in found)
    assert text in str(found[0])


def test_a_later_stage_that_uses_an_input_that_wants_a_gradient() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(6), Block(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x)) + x

    model = make(Sum)
    x = torch.randn(4, 6, requires_grad=True)
    first, last = errors(lambda comm: pipeline(comm, copy.deepcopy(model), ["blocks.1"]).step(x))
    assert isinstance(first, AbortedError)
    assert isinstance(last, InvalidArgumentError)
    assert "rank 1 ran stage 1, whose forward uses an input of the model that requires a gradient" in str(last)
