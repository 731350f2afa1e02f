"""Inside `whole` and `join` ranks may run different passes. Afterwards they train with the same bits at every stage,
whether collectives run in the background or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.model.place import sharded_model_of
from tests.support.choice import slow

STAGES = (0, 1, 2, 3)
X = torch.linspace(-1, 1, 16).view(4, 4)


class Raises(torch.autograd.Function):
    """Its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ZeroDivisionError


class Net(nn.Module):
    """Blocks of one size in any order, a frozen one, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.blocks[3].requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3), stopped: bool = False) -> torch.Tensor:
        if stopped:
            with torch.no_grad():
                x = x + self.blocks[1](x)
        for i in order:
            x = torch.tanh(self.blocks[i](x))
        return self.norm(x)


class Run:
    """A wrapped model on one rank, and steps of its training."""

    def __init__(self, comm: ringcomm.Communicator, plain: Net, stage: int, background: bool) -> None:
        self.rank, self.model = comm.rank, copy.deepcopy(plain)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        ringcomm.shard(self.model, self.optimizer, stage, comm, bucket_cap_mb=1e-6)
        sharded_model_of(self.model).ranks.background = background

    def train(self, **how: Any) -> None:
        self.model(X + self.rank, **how).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, grad: bool = False, **how: Any) -> None:
        """On rank 0 alone."""
        with ringcomm.whole(self.model), torch.set_grad_enabled(grad):
            if self.rank == 0:
                self.model(X, **how)

    def fail(self) -> None:
        with pytest.raises(ZeroDivisionError):
            self.model(Raises.apply(X.clone().requires_grad_())).sum().backward()
        self.optimizer.zero_grad()


def evaluation_between_forward_and_backward(run: Run) -> None:
    loss = run.model(X).square().mean()
    run.evaluate()
    loss.backward()


def other_orders(run: Run) -> None:
    for order in ((2, 1, 0), (1,), (3, 3)):
        run.evaluate(order=order)
        run.train()


def forward_with_gradients(run: Run) -> None:
    for _ in range(3):
        run.evaluate(grad=True)
        run.train()


def gradients_of_the_input(run: Run) -> None:
    for graph in (False, True):
        run.train()
        with ringcomm.whole(run.model), torch.enable_grad():
            if run.rank == 0:
                x = X.clone().requires_grad_()
                torch.autograd.grad(run.model(x).sum(), x, create_graph=graph)


def a_part_alone_afterwards(run: Run) -> None:
    run.evaluate()
    first = run.model.blocks[0]
    (first(X) + first(2 * X)).sum().backward()
    run.evaluate()
    with torch.no_grad():
        for _ in range(3):
            first(X)


def evaluation_after_a_failed_backward(run: Run) -> None:
    run.fail()
    run.evaluate()


def evaluation_after_thawing(run: Run) -> None:
    run.model.blocks[3].requires_grad_(True)
    run.evaluate()


def accumulation_after_evaluation(run: Run) -> None:
    run.evaluate(grad=True)
    with ringcomm.no_sync(run.model):
        run.model(X).sum().backward()


def join(*, passes: tuple[int, int] = (0, 2), **how: Any) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        with ringcomm.join(run.model):
            for _ in range(passes[run.rank]):
                run.train(**how)

    return program


def join_in_other_orders(run: Run) -> None:
    with ringcomm.join(run.model):
        for order in ((0, 1, 2), (2, 1, 0))[: 1 + run.rank]:
            run.train(order=order)


def join_with_a_batch_that_is_skipped(run: Run) -> None:
    with ringcomm.join(run.model):
        run.train()
        if run.rank:
            run.model(X)


def join_with_an_evaluation(run: Run) -> None:
    with ringcomm.join(run.model):
        for _ in range(1 + run.rank):
            run.train()
        with torch.no_grad():
            run.model(X)


def join_after_a_failed_backward(run: Run) -> None:
    run.fail()
    join()(run)


def join_after_an_evaluation(run: Run) -> None:
    with torch.no_grad():
        run.model(X)
    with ringcomm.join(run.model):
        for _ in range(run.rank):
            run.model(X)


def join_after_a_forward_without_backward(run: Run) -> None:
    run.model(X)
    join()(run)


PROGRAMS: dict[str, Callable[[Run], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(evaluation_between_forward_and_backward, other_orders, forward_with_gradients, gradients_of_the_input),
        *(a_part_alone_afterwards, evaluation_after_a_failed_backward, evaluation_after_thawing),
        *(accumulation_after_evaluation, join_in_other_orders, join_with_a_batch_that_is_skipped),
        *(join_with_an_evaluation, join_after_a_failed_backward, join_after_an_evaluation),
        join_after_a_forward_without_backward,
    )
} | {"join": join(), "join with a stopped gradient": join(passes=(0, 1), stopped=True)}


def in_turns() -> list[Any]:
    """Each program with collectives in the background or without; `make test-all` runs both."""
    turns = [(program, number % 2 == 0) for number, program in enumerate(PROGRAMS)]
    return [*turns, *(slow(program, not background) for program, background in turns)]


@pytest.mark.parametrize(("program", "background"), in_turns())
def test_training_afterwards_has_the_same_bits_at_every_stage(program: str, background: bool) -> None:
    torch.manual_seed(0)
    plain = Net()

    def rank(comm: ringcomm.Communicator, stage: int, beside: bool = background) -> dict[str, torch.Tensor]:
        run = Run(comm, plain, stage, beside)
        run.train()
        for _ in range(2):
            PROGRAMS[program](run)
            run.train()
        run.train(order=(0, 2, 1))
        return {name: value.clone() for name, value in run.model.state_dict().items()}

    expected = ringcomm.run_ranks(rank, 2, 0, False, ranks="threads", timeout=20)
    for stage in STAGES:
        found = ringcomm.run_ranks(rank, 2, stage, ranks="threads", timeout=20)
        for mine, theirs in zip(found, expected, strict=True):
            assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])], stage
