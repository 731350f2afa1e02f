"""Parameters that several stages use, such as an embedding that is also the output layer's weight: one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringcomm.pipeline.cuts import Tie
from ringcomm.pipeline.messages import Messages


class Ties:
    """This rank's share of the parameters that other ranks have too.

    While a step runs, forward passes use a stand-in of each, which collects their gradients. At the end the rank of the
    first stage adds those of all ranks, in the order of their stages, and every rank has the sum as the gradient.

    Args:
        exact: whether gradients are added micro-batch by micro-batch, with the bits of one process where two stages
            share a parameter. It costs two messages of the parameter's size for each micro-batch.
    """

    def __init__(
        self, ties: Sequence[Tie], mine: Sequence[int], rank_of: Sequence[int], messages: Messages, exact: bool
    ) -> None:
        shared = [tie for tie in ties if len({rank_of[stage] for stage in tie.stages}) > 1]
        rank = messages.comm.rank
        self.held = [
            _Held(tie, rank, rank_of, messages, exact) for tie in shared if any(stage in mine for stage in tie.stages)
        ]

    @property
    def standins(self) -> list[torch.Tensor]:
        """In a step: what forward passes use."""
        return [held.standin for held in self.held if held.standin is not None]

    @contextmanager
    def stood_in(self) -> Iterator[None]:
        """A step."""
        try:
            for held in self.held:
                held.enter()
            yield
        finally:
            for held in self.held:
                held.leave()

    def passes(self, stage: int) -> None:
        """A backward pass of a stage begins."""
        for held in self.held:
            held.passing = stage

    def passed(self, stage: int) -> None:
        """It has run."""
        for held in self.held:
            held.passed(stage)

    def settle(self) -> None:
        """After all backward passes: every rank's parameters get the sum; a collective of the ranks that share them."""
        for held in self.held:
            held.settle()


class _Held:
    """One parameter on one of its ranks."""

    def __init__(self, tie: Tie, rank: int, rank_of: Sequence[int], messages: Messages, exact: bool) -> None:
        here = [stage for stage in tie.stages if rank_of[stage] == rank]
        self.uses = [use for stage in here for use in tie.uses[stage]]
        self.first, self.first_here = tie.stages[0], here[0]
        module, key = self.uses[0]
        param = module._parameters[key]
        assert param is not None
        self.param, self.messages, self.exact = param, messages, exact
        self.home, *self.others = dict.fromkeys(rank_of[stage] for stage in tie.stages)
        self.at_home = rank == self.home
        self.standin: torch.Tensor | None = None
        self.total: torch.Tensor | None = None  # of 16-bit gradients, in float32
        self.passing = -1  # the stage whose backward pass runs
        self.heard = False  # whether the other ranks' gradients of this micro-batch have been added
        self.owed = 0  # exact sums that the first stage's rank has yet to send

    def enter(self) -> None:
        """A step begins."""
        self.standin = self.param.detach().requires_grad_(self.param.requires_grad)
        self.total = None
        if self.exact and self.at_home and self.param.requires_grad:
            self.standin.register_hook(self._with_others)
        self._place(self.standin)

    def leave(self) -> None:
        """A step ends."""
        self._place(self.param)
        self.standin = None

    def _place(self, x: torch.Tensor) -> None:
        for module, key in self.uses:
            module._parameters[key] = x

    def _with_others(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a micro-batch at the first stage, added to those of later stages as autograd adds them."""
        if self.passing != self.first:
            return grad
        self.heard = True
        return self._heard(grad) + grad

    def _heard(self, like: torch.Tensor) -> torch.Tensor:
        """The sum of what the other ranks have sent, the last stage first."""
        last, *before = (self._received(rank, like) for rank in reversed(self.others))
        for each in before:
            last += each
        return last

    def _received(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        return self.messages.receive_beside(torch.empty_like(like), rank)

    def passed(self, stage: int) -> None:
        """A backward pass of a stage has run."""
        standin = self.standin
        assert standin is not None
        if not standin.requires_grad:
            return
        if self.exact:
            return self._passed_exactly(standin, stage)
        if standin.grad is not None and standin.dtype.itemsize < 4:
            self._add(standin.grad)
            standin.grad = None

    def _passed_exactly(self, standin: torch.Tensor, stage: int) -> None:
        if self.at_home and stage == self.first:
            if not self.heard:  # its own use had no gradient
                others = self._heard(standin)
                standin.grad = others if standin.grad is None else standin.grad + others
            self.heard = False
            for rank in self.others:
                self.messages.send_beside(standin.grad, rank)
            self._accumulate(standin.grad)
            standin.grad = None
        elif not self.at_home and stage == self.first_here:
            self.messages.send_beside(self._sum(), self.home)
            self.owed += 1
            standin.grad = None

    def _accumulate(self, grad: torch.Tensor) -> None:
        torch.autograd.backward([self.param], [grad.to(self.param.dtype)])

    def _add(self, grad: torch.Tensor) -> None:
        self.total = grad.float() if self.total is None else self.total + grad

    def _sum(self) -> torch.Tensor:
        """What this rank has collected, in the parameter's type or float32."""
        assert self.standin is not None
        grad, total = self.standin.grad, self.total
        if grad is None and total is None:
            wide = torch.float32 if self.standin.dtype.itemsize < 4 and not self.exact else self.standin.dtype
            return torch.zeros_like(self.standin, dtype=wide)
        return total if grad is None else grad

    def settle(self) -> None:
        """Every rank gets the sum as the parameter's gradient."""
        if not self.param.requires_grad:
            return
        if self.exact:
            for _ in range(self.owed):
                self._accumulate(self._received(self.home, self.param))
            self.owed = 0
            return
        total = self._sum()
        if self.at_home:
            for rank in self.others:
                total = total + self._received(rank, total)
            for rank in self.others:
                self.messages.send_beside(total, rank)
        else:
            self.messages.send_beside(total, self.home)
            total = self._received(self.home, total)
        self._accumulate(total)
