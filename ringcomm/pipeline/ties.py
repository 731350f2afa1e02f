"""Parameters that several stages use, such as an embedding that is also the output layer's weight: one gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringcomm.parallel.ranks import exchange
from ringcomm.pipeline.cuts import Tie
from ringcomm.pipeline.messages import Messages


class Ties:
    """This rank's share of the parameters that several stages use.

    While a step runs, forward passes use a stand-in of each, which collects their gradients. At the end the rank of the
    first stage adds those of all ranks, in the order of their stages, and every rank has the sum as the gradient.

    Args:
        exact: whether gradients are added micro-batch by micro-batch, from the last stage to the first: the bits of one
            process where no stage uses the parameter twice. It costs two messages of the parameter's size for each
            micro-batch and further rank, and on the first stage's rank memory for each sum until the step ends.
    """

    def __init__(
        self, ties: Sequence[Tie], mine: Sequence[int], rank_of: Sequence[int], messages: Messages, exact: bool
    ) -> None:
        kind = _Exact if exact else _Summed
        self.held: list[_Held] = [
            kind(number, tie, [stage for stage in tie.stages if stage in mine], rank_of, messages)
            for number, tie in enumerate(ties)
            if any(stage in mine for stage in tie.stages)
            and (exact or len({rank_of[stage] for stage in tie.stages}) > 1)
        ]
        self.messages = messages
        self.unsent = {*range(len(ties))}  # the same on every rank

    def send_values(self) -> None:
        """Every rank gets the first stage's values, so that a parameter is one and the same wherever it was
        initialised; a collective. Parameters on meta get theirs before the first step in which they are nowhere on
        meta."""
        if not self.unsent:
            return
        on_meta = [held.number for held in self.held if held.number in self.unsent and held.is_meta]
        told = exchange(self.messages.comm, " ".join(map(str, on_meta)).encode())
        later = {int(number) for each in told for number in each.split()}
        for held in self.held:
            if held.number in self.unsent - later:
                held.send_value()
        self.messages.finish()
        self.unsent = later

    @property
    def standins(self) -> set[int]:
        """In a step: ids of what forward passes use."""
        return {id(held.standin) for held in self.held}

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

    def passed(self, stage: int, microbatch: int) -> None:
        """A backward pass of a stage has run."""
        for held in self.held:
            if held.param.requires_grad and stage in held.here:
                held.passed(stage, microbatch)

    def settle(self) -> None:
        """After all backward passes: every rank's parameters get the sum; a collective of the ranks that share them."""
        for held in self.held:
            if held.param.requires_grad:
                held.settle()


class _Held(ABC):
    """One parameter on one of its ranks.

    Args:
        number: among the model's, the same on every rank.
        here: the stages on this rank that use it.
    """

    def __init__(self, number: int, tie: Tie, here: Sequence[int], rank_of: Sequence[int], messages: Messages) -> None:
        self.number, self.tie, self.here, self.rank_of, self.messages = number, tie, here, rank_of, messages
        self.uses = [use for stage in here for use in tie.uses[stage]]
        self.param = self.standin = self._present()
        self.home, *self.others = dict.fromkeys(rank_of[stage] for stage in tie.stages)
        self.at_home = messages.comm.rank == self.home

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self._present().is_meta

    def send_value(self) -> None:
        """The first stage's value goes to the other ranks."""
        value = self._present().detach()
        if self.at_home:
            for rank in self.others:
                self._send(value, rank)
        else:
            value.copy_(self._received(value, self.home))

    def _present(self) -> torch.nn.Parameter:
        """The parameter as it is now: load_state_dict(assign=True) makes another one."""
        module, key = self.uses[0]
        param = module._parameters[key]
        assert param is not None
        return param

    def enter(self) -> None:
        """A step begins."""
        self.param = self._present()
        self._place(self.param.detach().requires_grad_(self.param.requires_grad))

    def leave(self) -> None:
        """A step ends."""
        self._place(self.param)

    def _place(self, x: torch.Tensor) -> None:
        self.standin = x
        for module, key in self.uses:
            module._parameters[key] = x

    def _row(self, stage: int) -> int:
        return self.number * len(self.rank_of) + stage

    def _send(self, x: torch.Tensor, rank: int, stage: int = 0) -> None:
        self.messages.send_beside(x, rank, self._row(stage))

    def _received(self, like: torch.Tensor, rank: int, stage: int = 0) -> torch.Tensor:
        return self.messages.receive_beside(torch.empty_like(like), rank, self._row(stage))

    def _accumulate(self, grad: torch.Tensor) -> None:
        torch.autograd.backward([self.param], [grad.to(self.param.dtype)])

    @abstractmethod
    def passed(self, stage: int, microbatch: int) -> None:
        """A backward pass of a stage that uses it has run."""

    @abstractmethod
    def settle(self) -> None:
        """Every rank gets the sum as the parameter's gradient."""


class _Summed(_Held):
    """Adds up once a step."""

    def enter(self) -> None:
        """A step begins."""
        super().enter()
        self.total: torch.Tensor | None = None  # of 16-bit gradients, in float32

    def passed(self, stage: int, microbatch: int) -> None:
        """16-bit gradients leave the stand-in."""
        grad = self.standin.grad
        if grad is not None and grad.dtype.itemsize < 4:
            self.total = grad.float() if self.total is None else self.total + grad
            self.standin.grad = None

    def settle(self) -> None:
        """Two messages for each further rank."""
        total = self.standin.grad if self.total is None else self.total
        if total is None:
            wide = torch.float32 if self.param.dtype.itemsize < 4 else self.param.dtype
            total = torch.zeros_like(self.standin, dtype=wide, requires_grad=False)
        if self.at_home:
            for rank in self.others:
                total = total + self._received(total, rank)
            for rank in self.others:
                self._send(total, rank)
        else:
            self._send(total, self.home)
            total = self._received(total, self.home)
        self._accumulate(total)


class _Exact(_Held):
    """Adds up each micro-batch, as autograd would: the gradient of the last stage first."""

    def enter(self) -> None:
        """A step begins."""
        super().enter()
        self.owed = 0  # sums that the first stage's rank has yet to send
        self.sums: list[torch.Tensor] = []  # at home: they are sent at the end, as a device takes messages in order
        self.found: dict[tuple[int, int], torch.Tensor | None] = {}  # at home, by stage and micro-batch

    def passed(self, stage: int, microbatch: int) -> None:
        """Its gradient goes to the rank of the first stage; there, after the first stage's, the sum is complete."""
        grad, self.standin.grad = self.standin.grad, None
        if not self.at_home:
            self._send(torch.zeros_like(self.standin, requires_grad=False) if grad is None else grad, self.home, stage)
            self.owed += stage == self.here[0]
            return
        self.found[stage, microbatch] = grad
        if stage != self.tie.stages[0]:
            return
        total: torch.Tensor | None = None
        for each in self._arriving(microbatch):
            total = each if total is None else total if each is None else total + each
        if total is None:
            total = torch.zeros_like(self.standin, requires_grad=False)
        self.sums.append(total)
        self._accumulate(total)

    def _arriving(self, microbatch: int) -> Iterator[torch.Tensor | None]:
        """A micro-batch's gradients, that of the last stage first."""
        for stage in reversed(self.tie.stages):
            rank = self.rank_of[stage]
            at_home = rank == self.home
            yield self.found.pop((stage, microbatch)) if at_home else self._received(self.standin, rank, stage)

    def settle(self) -> None:
        """The sums of all micro-batches, in their order."""
        for total in self.sums:
            for rank in self.others:
                self._send(total, rank)
        for _ in range(self.owed):
            self._accumulate(self._received(self.standin, self.home))
