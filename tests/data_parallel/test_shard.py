"""`ringcomm.shard` in the hands of users: unusual loops that must still train alike at every stage."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.model.place import sharded_model_of
from tests.support import torch_ranks
from tests.support.choice import choose
from tests.support.seeded import seeded
from tests.support.training.parity import differences_of

STAGES = (0, 1, 2, 3)
SHARD = importlib.import_module("ringcomm.data_parallel.shard")
IS_ONE_UNIT = SHARD._is_one_unit  # which conftest.py replaces
Wrap = Callable[[nn.Module, torch.optim.Optimizer], None]
Script = Callable[[Wrap, int], list[torch.Tensor]]


@dataclass
class Output:
    """What pytree does not know."""

    value: torch.Tensor
    extra: float


class Layer(nn.Module):
    """A block whose inputs and output take a form of choice."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.form = form
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Any = None, *, scale: float = 1.0, more: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(self.norm(x))) * scale
        if more is not None:
            y = y + more
        if self.form == "dict":
            return {"value": y, "extra": [1.0, None]}
        if self.form == "tuple":
            return y, (y.detach(), "text")
        if self.form == "dataclass":
            return Output(y, 1.0)
        return y


class Tower(nn.Module):
    """Blocks in a list, with a projection at each end."""

    def __init__(self, form: str = "plain", blocks: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Layer(form) for _ in range(blocks))
        self.outlet = nn.Linear(6, 2)
        self.skip: set[int] = set()
        self.twice: set[int] = set()
        self.backwards = False
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.inlet(x)
        for i, block in sorted(enumerate(self.blocks), reverse=self.backwards):
            if i == self.fail_at:
                raise ArithmeticError("in forward")
            for _ in range(0 if i in self.skip else 2 if i in self.twice else 1):
                x = value_of(block(x=x, scale=scale, more=x))
        return self.outlet(x)


def value_of(y: Any) -> torch.Tensor:
    """The tensor in a block's output."""
    if isinstance(y, dict):
        return y["value"]
    return y.value if isinstance(y, Output) else y[0] if isinstance(y, tuple) else y


def tower(form: str = "plain") -> Tower:
    """The same values every time."""
    return seeded(Tower(form))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).pow(2).sum()


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def step_of(model: nn.Module, opt: torch.optim.Optimizer, rank: int, step: int) -> torch.Tensor:
    """An ordinary step."""
    loss = loss_of(model, rank, step)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def made(wrap: Wrap, form: str = "plain") -> tuple[Tower, torch.optim.Optimizer]:
    model = tower(form)
    opt = sgd(model)
    wrap(model, opt)
    return model, opt


# ---- loops ---------------------------------------------------------------------------------------------------------


def ordinary(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def backward_twice(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(2):
        loss = loss_of(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def two_forwards_then_two_backwards(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(2):
        losses = [loss_of(model, rank, 5 * step + k) for k in range(2)]
        for loss in losses:
            loss.backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def two_forwards_one_backward(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(2):
        sum(loss_of(model, rank, 5 * step + k) for k in range(2)).backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def a_block_twice(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    model.twice = {1}
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def a_block_skipped(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    losses = []
    for step, skipped in enumerate([{1}, set(), {0, 2}, {2}]):
        model.skip = skipped
        losses.append(step_of(model, opt, rank, step))
    return losses + state_of(model)


def a_block_skipped_and_moved(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """Counters that differ inside a group survive a state dict, and a move to other stages."""
    model, opt = made(wrap)
    for step, skipped in enumerate([{1}, {0, 2}, {2}, set()]):
        if step == 2:
            states = copy.deepcopy((dict(model.state_dict()), opt.state_dict()))
            model, opt = made(wrap)
            model.load_state_dict(states[0])
            opt.load_state_dict(states[1])
            if hasattr(opt, "_ringcomm"):
                stage = ringcomm.stage_of(model)
                ringcomm.restage(model, opt, (stage + 1) % 4)
                ringcomm.restage(model, opt, stage)
        model.skip = skipped
        step_of(model, opt, rank, step)
    return state_of(model)


def blocks_backwards(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """As decoders do; one unit may hold several blocks, and so is not run in its order."""
    model, opt = made(wrap)
    model.backwards = True
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def a_block_on_raw_input_and_again(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """Of the first call no input has a gradient."""
    model, opt = made(wrap)
    losses = []
    for step in range(3):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model.inlet.forward = lambda _, x=x: x
        model.twice = {0}
        loss = loss_of(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return losses + state_of(model)


def evaluation_between(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    seen = []
    for step in range(3):
        seen.append(step_of(model, opt, rank, step))
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(model, rank, 7))
        seen.append(loss_of(model, rank, 8).detach())  # a graph that nobody uses
        with torch.inference_mode():
            seen.append(loss_of(model, rank, 9).clone())
        model.train()
    return [x.detach() for x in seen] + state_of(model)


def evaluation_between_forward_and_backward(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(2):
        loss = loss_of(model, rank, step)
        with torch.no_grad():
            loss_of(model, rank, 9)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def zero_grad_of_the_model(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(3):
        loss_of(model, rank, step).backward()
        opt.step()
        model.zero_grad()
    return state_of(model)


def zero_grad_to_zeros(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(4):
        model.skip = {1} if step else set()  # with a gradient of zero, moments go on
        loss_of(model, rank, step).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return state_of(model)


def zeros_after_no_sync(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """A gradient that is set to zero loses a pass inside no_sync, too, that followed one that was reduced."""
    model, opt = made(wrap)
    ways: list[Callable[[nn.Parameter, torch.Tensor], Any]] = [
        lambda p, grad: grad.zero_(),
        lambda p, grad: grad.data.zero_(),
        lambda p, grad: grad.fill_(0),
        lambda p, grad: grad.mul_(torch.zeros(())),
        lambda p, grad: grad.__setitem__(..., 0),
        lambda p, grad: torch._foreach_mul_([grad], [0.0]),
        lambda p, grad: setattr(p, "grad", torch.zeros_like(p)),
    ]
    for step in range(2 + len(ways)):
        loss_of(model, rank, step).backward()
        with ringcomm.no_sync(model) if ringcomm_has(model) else contextlib.nullcontext():
            loss_of(model, rank, step + 5).backward()
        if step < 2:
            (opt if step else model).zero_grad(set_to_none=False)
        else:
            for p in model.parameters():
                if p.grad is not None:
                    ways[step - 2](p, p.grad)
        loss_of(model, rank, step + 9).backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def no_zero_grad(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(3):
        loss_of(model, rank, step).backward()
        opt.step()
    return state_of(model)


def gradients_of_some_forgotten(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(3):
        loss_of(model, rank, step).backward()
        loss_of(model, rank, step + 5).backward()
        for p in model.blocks[1].parameters():
            p.grad = None
        loss_of(model, rank, step + 9).backward()
        model.inlet.bias.grad = None
        opt.step()
        opt.zero_grad()
    return state_of(model)


def scheduler_before(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model = tower()
    opt = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    wrap(model, opt)
    for step in range(3):
        step_of(model, opt, rank, step)
        scheduler.step()
    return state_of(model)


def scheduler_after(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=5)
    for step in range(3):
        step_of(model, opt, rank, step)
        scheduler.step()
    return state_of(model)


def step_with_a_closure(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        losses.append(opt.step(closure).detach())
    return losses + state_of(model)


def step_with_a_closure_that_skips(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """What the closure leaves out is left out of its step, and what it does not has a state from then on."""
    model, opt = made(wrap)
    states = []
    for step, skipped in enumerate([{1}, {0}]):
        model.skip = skipped

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            return loss

        opt.step(closure=closure)
        states.append(torch.tensor(len(opt.state_dict()["state"])))
    return states + state_of(model)


def graphs_of_gradients(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """With create_graph autograd does not add in place."""
    model, opt = made(wrap)
    for step in range(2):
        for k in range(3):
            with ringcomm.no_sync(model) if k < 2 and ringcomm_has(model) else contextlib.nullcontext():
                loss_of(model, rank, 3 * step + k).backward(create_graph=True)
        opt.step()
        opt.zero_grad()
    return state_of(model)


def ringcomm_has(model: nn.Module) -> bool:
    return hasattr(model.outlet.weight, "_ringcomm")


def several_losses(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    for step in range(3):
        y = model(batch(rank, step))
        if step == 0:
            torch.autograd.backward([y[:, 0].sum(), y[:, 1].pow(2).sum()])
        else:
            y[:, 0].sum().backward(retain_graph=True)
            y[:, 1].pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
    return state_of(model)


def gradient_of_the_input(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    seen = []
    for step in range(2):
        x = batch(rank, step).requires_grad_()
        seen += torch.autograd.grad(model(x).pow(2).sum(), x)
        model(x + 0.1 * seen[-1].sign()).pow(2).sum().backward()
        opt.step()
        opt.zero_grad()
    return seen + state_of(model)


def dict_outputs(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap, "dict")
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def tuple_outputs(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap, "tuple")
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def dataclass_outputs(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap, "dataclass")
    return [step_of(model, opt, rank, step) for step in range(3)] + state_of(model)


def _failing(model: Tower, rank: int, how: str) -> None:
    if how == "forward":
        model.fail_at = 1
        loss_of(model, rank, 50)
    else:
        handle = model.blocks[1].norm.register_forward_hook(lambda module, args, y: _Fails.apply(y))
        try:
            loss_of(model, rank, 50).backward()
        finally:
            handle.remove()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def _with_failure(how: str) -> Script:
    def script(wrap: Wrap, rank: int) -> list[torch.Tensor]:
        model, opt = made(wrap)
        losses = []
        for step in range(3):
            if step:
                with pytest.raises(ArithmeticError):
                    _failing(model, rank, how)
                model.fail_at = None
                opt.zero_grad()
            losses.append(step_of(model, opt, rank, step))
        return losses + state_of(model)

    return script


LOOPS = [
    ordinary,
    backward_twice,
    two_forwards_then_two_backwards,
    two_forwards_one_backward,
    a_block_twice,
    a_block_skipped,
    a_block_skipped_and_moved,
    blocks_backwards,
    a_block_on_raw_input_and_again,
    evaluation_between,
    evaluation_between_forward_and_backward,
    zero_grad_of_the_model,
    zero_grad_to_zeros,
    zeros_after_no_sync,
    no_zero_grad,
    gradients_of_some_forgotten,
    scheduler_before,
    scheduler_after,
    step_with_a_closure,
    step_with_a_closure_that_skips,
    graphs_of_gradients,
    several_losses,
    gradient_of_the_input,
    dict_outputs,
    tuple_outputs,
    dataclass_outputs,
]

# The loops that `make test` runs on three ranks at every stage, and those that it runs on one rank.
TELLING = [two_forwards_then_two_backwards, a_block_twice, a_block_skipped_and_moved, a_block_on_raw_input_and_again]
TELLING += [evaluation_between_forward_and_backward, zero_grad_to_zeros, gradients_of_some_forgotten, scheduler_after]
TELLING += [zeros_after_no_sync, step_with_a_closure_that_skips, graphs_of_gradients, several_losses, dataclass_outputs]
TELLING_ON_ONE_RANK = [two_forwards_one_backward, backward_twice, a_block_skipped, no_zero_grad, scheduler_before]
TELLING_ON_ONE_RANK += [zeros_after_no_sync, step_with_a_closure, gradient_of_the_input, dict_outputs]


PLACES = [(stage, mb) for mb in (0.0003, 25) for stage in STAGES]  # a group for each block or two, and one for all


def on_ranks(script: Script, world_size: int) -> list[list[list[torch.Tensor]]]:
    """A script's results, by rank and place."""

    def rank(comm: ringcomm.Communicator) -> list[list[torch.Tensor]]:
        def wrap_at(stage: int, mb: float) -> Wrap:
            return lambda model, opt: ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=mb)

        return [script(wrap_at(*place), comm.rank) for place in PLACES]

    return ringcomm.run_ranks(rank, world_size, ranks="threads", timeout=20)


@pytest.mark.parametrize("script", choose(LOOPS, TELLING), ids=lambda script: script.__name__)
def test_a_loop_gives_the_same_bits_at_every_stage(script: Script) -> None:
    for rank, results in enumerate(on_ranks(script, 3)):
        for place, result in zip(PLACES, results, strict=True):
            assert differences_of(results[0], result) == [], f"{place}, rank {rank}"


@pytest.mark.parametrize("script", choose(LOOPS, TELLING_ON_ONE_RANK), ids=lambda script: script.__name__)
def test_a_loop_on_one_rank_equals_torchs(script: Script) -> None:
    plain = script(lambda model, opt: None, 0)
    for result in on_ranks(script, 1)[0]:
        torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_a_model_that_is_smaller_than_a_bucket_is_one_unit(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of several units; not where units or buckets are asked for."""

    def run(comm: ringcomm.Communicator, **how: Any) -> tuple[int, list[torch.Tensor]]:
        model = tower()
        opt = sgd(model)
        ringcomm.shard(model, opt, stage, comm, **how)
        losses = [step_of(model, opt, comm.rank, step) for step in range(3)]
        flat = sharded_model_of(model)
        assert flat is not None
        return len(flat.units), losses + state_of(model)

    several = ringcomm.run_ranks(run, 2)
    monkeypatch.setattr(SHARD, "_is_one_unit", IS_ONE_UNIT)
    one = ringcomm.run_ranks(run, 2)
    asked = ringcomm.run_ranks(lambda comm: run(comm, bucket_cap_mb=25), 2)
    assert [count for count, _ in (*several, *one, *asked)] == [2, 2, 1, 1, 2, 2]
    for (_, expected), (_, found) in zip(several, one, strict=True):
        assert all(map(torch.equal, expected, found))


class WideBlock(nn.Module):
    """Adds in float32 whatever the type of its parameters; the last two of a model share all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.linear(h.to(self.linear.weight.dtype)).float()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_size_of_a_bucket_does_not_decide_whose_inputs_are_cast(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured, and another one in each run."""

    def run(comm: ringcomm.Communicator, cap: float | None) -> list[torch.Tensor]:
        model = seeded(nn.Sequential(*(WideBlock() for _ in range(4))))
        model[3].linear = model[2].linear
        opt = sgd(model)
        policy = ringcomm.MixedPrecision(torch.bfloat16)
        ringcomm.shard(model, opt, stage, comm, mixed_precision=policy, bucket_cap_mb=cap)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
        return [loss.detach(), *state_of(model)]

    monkeypatch.setattr(SHARD, "_is_one_unit", IS_ONE_UNIT)
    expected = ringcomm.run_ranks(run, 2, None)
    for cap in (1e-6, 2e-4, 25):
        found = ringcomm.run_ranks(run, 2, cap)
        for each, wanted in zip(found, expected, strict=True):
            assert all(map(torch.equal, each, wanted)), cap


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_after_an_exception_training_goes_on_as_if_nothing_had_happened(how: str) -> None:
    expected = on_ranks(ordinary, 3)
    found = on_ranks(_with_failure(how), 3)
    for rank in range(3):
        for number, place in enumerate(PLACES):
            assert differences_of(expected[rank][number], found[rank][number]) == [], f"{place}, rank {rank}"


# ---- ranks that do not do the same ---------------------------------------------------------------------------------


def a_block_skipped_by_one_rank(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    losses = []
    for step in range(3):
        model.skip = {step} if rank == 1 else set()
        losses.append(step_of(model, opt, rank, step))
    return losses + state_of(model)


def a_graph_that_one_rank_does_not_use(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    model, opt = made(wrap)
    model.backwards = True
    losses = []
    for step in range(3):
        if rank == 0:
            model.eval()
            loss_of(model, rank, 9)
            model.train()
        losses.append(step_of(model, opt, rank, step))
    return losses + state_of(model)


def gradients_that_autograd_returns(wrap: Wrap, rank: int) -> list[torch.Tensor]:
    """torch.autograd.grad leaves alone what backward has left."""
    model, opt = made(wrap)
    seen: list[torch.Tensor] = []
    for step in range(3):
        loss_of(model, rank, step).backward()
        seen += torch.autograd.grad(loss_of(model, rank, 7), list(model.parameters()))
        opt.step()
        opt.zero_grad()
    return seen + state_of(model)


@pytest.mark.parametrize(
    "script",
    [a_block_skipped_by_one_rank, a_graph_that_one_rank_does_not_use, gradients_that_autograd_returns],
    ids=lambda script: script.__name__,
)
def test_up_to_stage_2_a_unit_is_each_ranks_own(script: Script) -> None:
    """Each block is a unit, of the same size as the others: a wrong order would not be noticed by the engine."""

    def rank(comm: ringcomm.Communicator) -> list[list[torch.Tensor]]:
        def wrap_at(stage: int) -> Wrap:
            return lambda model, opt: ringcomm.shard(model, opt, stage, comm, units=Layer, bucket_cap_mb=1)

        return [script(wrap_at(stage), comm.rank) for stage in (0, 1, 2)]

    for number, results in enumerate(ringcomm.run_ranks(rank, 3, ranks="threads", timeout=20)):
        for stage, result in enumerate(results):
            assert differences_of(results[0], result) == [], f"stage {stage}, rank {number}"


def test_ranks_with_different_numbers_of_cores_order_their_collectives_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has cores to spare for collectives sends for parameters earlier."""
    here = threading.local()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64 if here.rank == 1 else 1))

    def rank(comm: ringcomm.Communicator) -> None:
        here.rank = comm.rank
        ordinary(lambda model, opt: ringcomm.shard(model, opt, 3, comm, units=Layer), comm.rank)

    ringcomm.run_ranks(rank, 3, ranks="threads", timeout=20)


LAST = ["a step", "gradients", "a forward pass", "a graph in an attribute"]


@pytest.mark.parametrize("last", choose(LAST, ["gradients", "a graph in an attribute"]))
def test_nothing_outlives_the_model(last: str) -> None:
    """Buffers, hooks and the optimizer go with the last reference to the module."""

    def rank(comm: ringcomm.Communicator) -> list[Any]:
        left = []
        for stage in STAGES:
            model = tower()
            opt = sgd(model)
            ringcomm.shard(model, opt, stage, comm)
            step_of(model, opt, comm.rank, 0)
            if last != "a step":
                loss = loss_of(model, comm.rank, 1)
            if last == "gradients":
                loss.backward()
            if last == "a graph in an attribute":
                model.loss = loss
            left += [weakref.ref(each) for each in (model, opt, sharded_model_of(model))]
        return left

    found = ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)
    gc.collect()
    assert [each() for left in found for each in left if each() is not None] == []


class InAnyOrder(nn.Module):
    """Blocks of equal sizes, run in an order that may depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.blocks[i](x))
        return x


def in_background(comm: ringcomm.Communicator, background: bool) -> InAnyOrder:
    """Returns a model at stage 3 that prefetches, or not, however many cores there are."""
    model = InAnyOrder()
    ringcomm.shard(model, None, 3, comm, bucket_cap_mb=1e-6)
    sharded_model_of(model).ranks.background = background
    return model


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("orders", [((0, 1, 2), (0, 2, 1)), ((2, 1, 0), ()), ((), (1,))])
def test_an_order_of_units_inside_whole_is_not_prefetched_outside(
    orders: tuple[tuple[int, ...], ...], trains: bool
) -> None:
    """Inside of it each rank may run units in an order of its own, or none."""

    def rank(comm: ringcomm.Communicator) -> None:
        model, x = in_background(comm, True), torch.ones(2, 6)

        def evaluate() -> None:
            with ringcomm.whole(model), torch.set_grad_enabled(trains):
                if orders[comm.rank]:
                    model(x, orders[comm.rank])

        y = model(x, (0, 1, 2))
        expected = y.detach()
        evaluate()
        y.sum().backward()
        first = model.blocks[0]
        (first(x) + first(2 * x)).sum().backward()
        evaluate()
        (first(x) + first(2 * x)).sum().backward()
        assert torch.equal(model(x, (0, 1, 2)), expected)
        evaluate()
        with torch.no_grad():
            for _ in range(3):
                first(x)
        y = model(x, (0, 1, 2))
        assert torch.equal(y, expected)
        y.sum().backward()

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_has_joined_prefetches_what_the_others_do_afterwards(background: bool) -> None:
    """The last order of units that a rank saw is older if it has joined earlier."""

    def rank(comm: ringcomm.Communicator) -> None:
        model, x = in_background(comm, background), torch.ones(2, 6)
        with ringcomm.join(model):
            for order in ((0, 1, 2), (2, 1, 0))[: 1 + comm.rank]:
                model(x, order).sum().backward()
        model(x, (0, 1, 2)).sum().backward()

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_a_loss_that_leaves_out_a_unit_on_one_rank(reshard: bool, background: bool) -> None:
    """At stage 3 backward then gathers other units, if it gathers any; at the others all is well."""

    def trained(comm: ringcomm.Communicator, stage: int) -> list[float]:
        model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        ringcomm.shard(model, None, stage, comm, bucket_cap_mb=1e-6, reshard_after_forward=reshard or stage < 3)
        sharded_model_of(model).ranks.background = background
        outputs = [each(torch.ones(1, 6)).sum() for each in model]
        sum((i + 1) * y for i, y in enumerate(outputs[: 3 - comm.rank])).backward()
        return [float(each.weight.grad.sum()) for each in model]

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES[: 3 if reshard else 4]:
            assert trained(comm, stage) == [36.0, 72.0, 54.0]
        if reshard:
            with pytest.raises(ringcomm.MismatchError, match="mark"):
                trained(comm, 3)

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_about_a_rank_without_more_batches_names_join(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> str:
        model = nn.Linear(6, 6)
        ringcomm.shard(model, None, stage, comm)
        with comm:
            for _ in range(1 + comm.rank):
                try:
                    model(torch.ones(1, 6)).sum().backward()
                except ringcomm.RankLostError as error:
                    return "\n".join(error.__notes__)
        return ""

    told = ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)
    assert "train inside ringcomm.join(model)" in told[1]


@pytest.mark.parametrize("hosts", [None, [2, 2]])
def test_neighbours_that_run_different_units_at_stage_3_get_an_error(hosts: list[int] | None) -> None:
    """Also if each rank of a host runs the same as its partners on other hosts."""
    told = ringcomm.run_ranks(_run_by_parity, 4, hosts=hosts, timeout=20)
    assert set(told) <= {"MismatchError", "AbortedError"}
    assert "MismatchError" in told


def _run_by_parity(comm: ringcomm.Communicator) -> str:
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    ringcomm.shard(model, None, 3, comm, bucket_cap_mb=1e-6)
    comm.barrier()
    try:
        with torch.no_grad():
            model[comm.rank % 2](torch.ones(1, 6))
            comm.barrier()  # a rank may learn of it one call later
    except ringcomm.RingcommError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_ranks_that_run_other_units_at_stage_3_fail_at_the_first_gather(training: bool, background: bool) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model, x = in_background(comm, background), torch.ones(2, 6)
        with torch.set_grad_enabled(training):
            y = model(x, (0, 1, 2))
            if training:
                y.sum().backward()
            says = r"gathered .*, mark \d.* rank 2 gathered .*, mark \d"
            with pytest.raises(ringcomm.MismatchError, match=says) as found:
                model(x, (0, 1, 2) if comm.rank < 2 else (2, 1, 0))
        if sys.version_info >= (3, 11):
            unit = "" if background else 0 if comm.rank < 2 else 2  # in the background it may be a later one
            notes = "\n".join(getattr(found.value, "__notes__", ()))
            assert f"rank {comm.rank} gathered the unit of blocks.{unit}" in notes
            assert background or "enter ringcomm.whole(model) on every rank" in notes

    ringcomm.run_ranks(rank, 3, ranks="threads", timeout=20)


def _trained_over_gloo(disturbed: bool) -> dict[str, torch.Tensor]:
    comm = ringcomm.Communicator.from_process_group()
    torch.manual_seed(0)
    model = InAnyOrder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ringcomm.shard(model, optimizer, 3, comm, bucket_cap_mb=1e-6)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(comm.rank))
    for step in range(4):
        if disturbed and step == 2:
            with pytest.raises(ringcomm.MismatchError, match=f"rank {comm.rank} ran other units than another"):
                model(x, (0, 1, 2) if comm.rank < 2 else (0, 2, 1)).square().sum().backward()
            optimizer.zero_grad()
        model(x, (0, 1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_over_a_group_that_compares_no_calls_they_fail_in_backward_and_nothing_is_lost() -> None:
    disturbed, calm = (torch_ranks.run(_trained_over_gloo, x, world_size=3, backend="gloo") for x in (True, False))
    for got, wanted in zip(disturbed, calm, strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("of", [list, tuple, iter])
def test_units_are_modules_or_classes_in_any_collection(of: Callable[[Any], Any]) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        for wanted in (lambda m: [m[0], m[2]], lambda m: [nn.Linear]):
            model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
            ringcomm.shard(model, None, 3, comm, units=of(wanted(model)))
            flat = sharded_model_of(model)
            assert flat is not None
            assert [unit.name for unit in flat.units] == ["0", "2", ""]

    ringcomm.run_ranks(rank, 1, ranks="threads", timeout=20)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_about_units_of_different_sizes_names_them() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 90)])
        ringcomm.shard(model, None, 3, comm, units=nn.Linear)
        with pytest.raises(ringcomm.MismatchError) as found, torch.no_grad():
            model[comm.rank](torch.ones(1, 6))
        notes = "\n".join(getattr(found.value, "__notes__", ()))
        assert f"rank {comm.rank} gathered the unit of {comm.rank}.weight; at stage 3 every rank must run" in notes

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("stage", STAGES)
def test_an_embedding_that_rescales_its_rows_gives_a_warning(stage: int) -> None:
    """Its forward writes other rows on each rank, which stages treat differently."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))
        ringcomm.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, comm)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ringcomm.run_ranks(rank, 2)
    told = [str(each.message) for each in seen if "max_norm" in str(each.message) and each.filename == __file__]
    assert len(told) == (2 if stage else 0)
    assert all(
        "got 0, of class Embedding with max_norm" in each and "rescale the weight after step()" in each for each in told
    )


@pytest.mark.parametrize("way", [0, 1, 2, 3, "fully_shard", "zero"])
def test_a_step_between_forward_and_backward_is_noticed_as_in_torch(way: Any) -> None:
    def run(comm: ringcomm.Communicator) -> None:
        model = seeded(nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))]))
        if way == "fully_shard":
            for unit in (model[0], model[1], model):
                ringcomm.fully_shard(unit, comm=comm)
        if way == "zero":
            optimizer: Any = ringcomm.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm=comm, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(way, int):
            ringcomm.shard(model, optimizer, way, comm)
        x = torch.linspace(-1, 1, 8).view(2, 4)
        first, second, other = model[1](x).sum(), model[1](x).square().sum(), model[0](x.clone().requires_grad_()).sum()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        other.backward()  # the step has not written its parameters, which had no gradients
        optimizer.step()
        optimizer.zero_grad()
        if way == "zero":
            return
        loss = model[1](x).square().sum()
        model.load_state_dict(model.state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    ringcomm.run_ranks(run, 2, ranks="threads", timeout=30)
