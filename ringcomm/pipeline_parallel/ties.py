"""Parameters that several stages use, such as an embedding that is also the output layer's weight: one gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ringcomm.data_parallel.place import place_of
from ringcomm.pipeline_parallel.cuts import Tie
from ringcomm.pipeline_parallel.messages import Messages


class Ties:
    """This rank's share of the parameters that several stages use.

    While a step runs, forward passes use a stand-in of each, which collects their gradients. At the end the rank of the
    first stage adds those of all ranks, in the order of their stages, and every rank has the sum as the gradient.

    Args:
        exact: whether gradients are added micro-batch by micro-batch, from the last use to the first: the bits of one
            process. It costs a message of the parameter's size for each micro-batch and further stage, and one for each
            micro-batch and further rank; and on the first stage's rank memory for each sum until the step ends.
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
        initialised; a collective, of the ranks that share their shards too. Parameters on meta get theirs before the
        first step in which they are nowhere on meta."""
        if not self.unsent:
            return
        on_meta = [held.number for held in self.held if held.number in self.unsent and held.is_meta]
        told = self.messages.comm.exchange(" ".join(map(str, on_meta)).encode())
        later = {int(number) for each in told for number in each.split()}
        for held in self.held:
            if held.number in self.unsent - later:
                held.send_value()
        self.messages.finish()
        self.unsent = later

    @property
    def placeholders(self) -> set[int]:
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

    def _of(self, stage: int) -> Iterator[_Held]:
        return (held for held in self.held if held.param.requires_grad and stage in held.here)

    def ran(self, stage: int, microbatch: int) -> None:
        """A forward pass of a stage has run, of which a backward pass will."""
        for held in self._of(stage):
            held.ran(stage, microbatch)

    def of_later_stages(self, stage: int, microbatch: int) -> list[tuple[GradientEdge, torch.Tensor]]:
        """What a backward pass of a stage begins with beside the gradients of its results."""
        return [found for held in self._of(stage) if (found := held.of_later_stages(stage, microbatch)) is not None]

    def passed(self, stage: int, microbatch: int) -> None:
        """A backward pass of a stage has run."""
        for held in self._of(stage):
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
        """The first stage's value goes to the other ranks; of a sharded parameter its master weights."""
        param = self._present()
        place = place_of(param)
        if place is not None:
            place.bucket.adopt_writes("Pipeline")
        if self.at_home:
            value = (
                param
                if place is None
                else place.bucket.part(place.bucket.gather_owned(place.bucket.master), place.index)
            )
            for rank in self.others:
                self._send(value.detach().to(self.messages.device), rank)
        elif place is None:
            param.detach().copy_(self._received(param, self.home))
        else:
            like = torch.empty((), dtype=place.bucket.master.dtype, device=self.messages.device).expand(param.shape)
            place.bucket.load(place.index, self._received(like, self.home))
            place.bucket.publish().wait()

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
        return self.messages.receive_beside(like.new_empty(like.shape), rank, self._row(stage))

    def _send_sum(self, total: torch.Tensor | None, rank: int, stage: int = 0) -> None:
        """A gradient, and before it a byte that says whether there is one."""
        there = torch.tensor([total is not None], dtype=torch.uint8, device=self.messages.device)
        self.messages.send_beside(there, rank, self._row(stage), counts=False)
        if total is not None:
            self._send(total, rank, stage)

    def _received_sum(self, like: torch.Tensor, rank: int, stage: int = 0) -> torch.Tensor | None:
        there = self._received(torch.empty(1, dtype=torch.uint8, device=self.messages.device), rank, stage)
        return self._received(like, rank, stage) if bool(there) else None

    def _accumulate(self, grad: torch.Tensor | None) -> None:
        if grad is not None:  # a use that got none leaves none
            torch.autograd.backward([self.param], [grad.to(self.param.dtype)])

    def ran(self, stage: int, microbatch: int) -> None:  # noqa: B027
        """A forward pass of a stage that uses it has run."""

    def of_later_stages(self, stage: int, microbatch: int) -> tuple[GradientEdge, torch.Tensor] | None:
        """Its gradient from the stages behind, and where in this stage's graph it comes in."""
        return None

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
        """For each further rank one sum there and one back, where there is any."""
        total = self.standin.grad if self.total is None else self.total
        wide = torch.float32 if self.param.dtype.itemsize < 4 else self.param.dtype
        like = torch.empty((), dtype=wide, device=self.messages.device).expand(self.standin.shape)
        if self.at_home:
            sums = [total, *(self._received_sum(like, rank) for rank in self.others)]
            there = [each for each in sums if each is not None]
            total = reduce(torch.add, there) if there else None
            for rank in self.others:
                self._send_sum(total, rank)
        else:
            self._send_sum(total, self.home)
            total = self._received_sum(like, self.home)
        self._accumulate(total)


class _Exact(_Held):
    """Adds up each micro-batch, as autograd would: the gradient of the last use first. The sum goes from stage to
    stage, and begins each stage's own."""

    def enter(self) -> None:
        """A step begins."""
        super().enter()
        self.owed = 0  # sums that the first stage's rank has yet to send
        # At home: they are sent at the end, as a device takes messages in order.
        self.sums: list[torch.Tensor | None] = []
        self.edges: dict[tuple[int, int], GradientEdge] = {}  # by stage and micro-batch
        self.found: dict[tuple[int, int], torch.Tensor | None] = {}  # from stages on this rank to others on it

    def ran(self, stage: int, microbatch: int) -> None:
        """Makes one more use of it, the last one in this graph: autograd adds its gradient first."""
        if stage != self.tie.stages[-1]:
            self.edges[stage, microbatch] = get_gradient_edge(self.standin.view_as(self.standin))

    def of_later_stages(self, stage: int, microbatch: int) -> tuple[GradientEdge, torch.Tensor] | None:
        """The sum of the stages behind."""
        if stage == self.tie.stages[-1]:
            return None
        behind = self.tie.stages[self.tie.stages.index(stage) + 1]
        rank = self.rank_of[behind]
        here = rank == self.messages.comm.rank
        total = self.found.pop((behind, microbatch)) if here else self._received_sum(self.standin, rank, behind)
        edge = self.edges.pop((stage, microbatch))
        return None if total is None else (edge, total)

    def passed(self, stage: int, microbatch: int) -> None:
        """The sum goes to the stage before; on the first stage it is complete."""
        total, self.standin.grad = self.standin.grad, None
        self.owed += not self.at_home and stage == self.here[0]
        if stage == self.tie.stages[0]:
            self.sums.append(total)
            self._accumulate(total)
            return
        rank = self.rank_of[self.tie.stages[self.tie.stages.index(stage) - 1]]
        if rank == self.messages.comm.rank:
            self.found[stage, microbatch] = total
        else:
            self._send_sum(total, rank, stage)

    def settle(self) -> None:
        """The sums of all micro-batches, in their order."""
        for total in self.sums:
            for rank in self.others:
                self._send_sum(total, rank)
        for _ in range(self.owed):
            self._accumulate(self._received_sum(self.standin, self.home))
