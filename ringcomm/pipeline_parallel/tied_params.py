"""Adds up the gradients of a parameter that several stages use, such as an embedding that is also the weight of the
output layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ringcomm.data_parallel.model.place import place_of
from ringcomm.pipeline_parallel.messages import Messages
from ringcomm.pipeline_parallel.split import TiedParam


class TiedParams:
    """The tied parameters of this rank's stages.

    While a step runs, forward passes use a placeholder of each parameter, which collects its gradients. At the end the
    rank of the first stage adds the gradients of all ranks, in the order of their stages, and sends the sum to the
    other ranks.

    Args:
        exact: whether gradients are added for each micro-batch, from the last use to the first, which gives the bits of
            one process. For each micro-batch it costs one message of the parameter's size for each further stage and
            one for each further rank; and on the first stage's rank memory for each sum until the step ends.
    """

    def __init__(
        self,
        tied_params: Sequence[TiedParam],
        mine: Sequence[int],
        rank_of: Sequence[int],
        messages: Messages,
        exact: bool,
    ) -> None:
        kind = _ExactTiedParam if exact else _LocalTiedParam
        self.local: list[_LocalTiedParam] = [
            kind(number, tied, [stage for stage in tied.stages if stage in mine], rank_of, messages)
            for number, tied in enumerate(tied_params)
            if any(stage in mine for stage in tied.stages)
            and (exact or len({rank_of[stage] for stage in tied.stages}) > 1)
        ]
        self.messages = messages
        self.unsent = {*range(len(tied_params))}  # numbers of tied parameters, the same on every rank

    def broadcast_values(self) -> None:
        """Sends the first stage's values to all ranks, because the ranks may have initialised a parameter differently;
        a collective, also of the ranks that share shards. A parameter that is on the meta device on any rank is sent
        later, before the first step in which it is on meta nowhere.
        """
        if not self.unsent:
            return
        on_meta = [tied.number for tied in self.local if tied.number in self.unsent and tied.is_meta]
        later = {number for each in self.messages.comm.all_gather_object(on_meta) for number in each}
        for tied in self.local:
            if tied.number in self.unsent - later:
                tied.send_value()
        self.messages.finish()
        self.unsent = later

    @property
    def placeholder_ids(self) -> set[int]:
        """During a step, the ids of the placeholders."""
        return {id(tied.placeholder) for tied in self.local}

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Replaces the parameters by placeholders for one step."""
        try:
            for tied in self.local:
                tied.enter()
            yield
        finally:
            for tied in self.local:
                tied.leave()

    def of_stage(self, stage: int) -> Iterator[_LocalTiedParam]:
        """Yields the tied parameters of a stage that are trained."""
        return (tied for tied in self.local if tied.param.requires_grad and stage in tied.here)

    def reduce_grads(self) -> None:
        """Gives every rank's parameters the sums of the gradients, after all backward passes; a collective of the
        ranks that share a parameter."""
        for tied in self.local:
            if tied.param.requires_grad:
                tied.reduce_grads()


class _LocalTiedParam:
    """One tied parameter on this rank. The gradients of its ranks are added once a step.

    Args:
        number: its number among the model's tied parameters, the same on every rank.
        here: the stages on this rank that use it.
    """

    def __init__(
        self, number: int, tied: TiedParam, here: Sequence[int], rank_of: Sequence[int], messages: Messages
    ) -> None:
        self.number, self.tied, self.here, self.rank_of, self.messages = number, tied, here, rank_of, messages
        self.uses = [use for stage in here for use in tied.uses[stage]]
        self.param = self.placeholder = self._current()
        self.owner, *self.other_ranks = dict.fromkeys(rank_of[stage] for stage in tied.stages)
        self.is_owner = messages.comm.rank == self.owner

    @property
    def is_meta(self) -> bool:
        """Whether the parameter has no values yet."""
        return self._current().is_meta

    def send_value(self) -> None:
        """Sends the first stage's value to the other ranks; for a sharded parameter its master weights."""
        param = self._current()
        place = place_of(param)
        if place is not None:
            place.bucket.adopt_writes("Pipeline")
        if self.is_owner:
            value = (
                param
                if place is None
                else place.bucket.layout.part(place.bucket.gather_owned(place.bucket.master), place.index)
            )
            for rank in self.other_ranks:
                self._send(value.detach().to(self.messages.device), rank)
        elif place is None:
            param.detach().copy_(self._received(param, self.owner))
        else:
            like = torch.empty((), dtype=place.bucket.master.dtype, device=self.messages.device).expand(param.shape)
            place.bucket.load(place.index, self._received(like, self.owner))
            place.bucket.sync_params_from_master().wait()

    def _current(self) -> torch.nn.Parameter:
        """Returns the current parameter: load_state_dict(assign=True) replaces it."""
        module, key = self.uses[0]
        param = module._parameters[key]
        assert param is not None
        return param

    def enter(self) -> None:
        """Begins a step: replaces the parameter by a placeholder."""
        self.param = self._current()
        self._install(self.param.detach().requires_grad_(self.param.requires_grad))
        self.total: torch.Tensor | None = None  # the sum of 16-bit gradients, in float32

    def leave(self) -> None:
        """Ends a step: restores the parameter."""
        self._install(self.param)

    def _install(self, x: torch.Tensor) -> None:
        self.placeholder = x
        for module, key in self.uses:
            module._parameters[key] = x

    def _row(self, stage: int) -> int:
        return self.number * len(self.rank_of) + stage

    def _send(self, x: torch.Tensor, rank: int, stage: int = 0) -> None:
        self.messages.send_tied(x, rank, self._row(stage))

    def _received(self, like: torch.Tensor, rank: int, stage: int = 0) -> torch.Tensor:
        return self.messages.receive_tied(like.new_empty(like.shape), rank, self._row(stage))

    def _send_sum(self, total: torch.Tensor | None, rank: int, stage: int = 0) -> None:
        """Sends a byte, 1 if there is a gradient, and then the gradient."""
        there = torch.tensor([total is not None], dtype=torch.uint8, device=self.messages.device)
        self.messages.send_tied(there, rank, self._row(stage), counts=False)
        if total is not None:
            self._send(total, rank, stage)

    def _received_sum(self, like: torch.Tensor, rank: int, stage: int = 0) -> torch.Tensor | None:
        there = self._received(torch.empty(1, dtype=torch.uint8, device=self.messages.device), rank, stage)
        return self._received(like, rank, stage) if bool(there) else None

    def _accumulate(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            torch.autograd.backward([self.param], [grad.to(self.param.dtype)])

    def after_forward(self, stage: int, microbatch: int) -> None:
        """Called after a forward pass of a stage that uses the parameter."""

    def later_grad(self, stage: int, microbatch: int) -> tuple[GradientEdge, torch.Tensor] | None:
        """Returns the gradient from later stages, and the edge of this stage's graph where it enters."""
        return None

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Adds a 16-bit gradient to a float32 sum, and removes it from the placeholder."""
        grad = self.placeholder.grad
        if grad is not None and grad.dtype.itemsize < 4:
            self.total = grad.float() if self.total is None else self.total + grad
            self.placeholder.grad = None

    def reduce_grads(self) -> None:
        """On the first stage's rank: receives a sum from each other rank, and sends the total to them. A rank without
        a gradient sends none."""
        total = self.placeholder.grad if self.total is None else self.total
        wide = torch.float32 if self.param.dtype.itemsize < 4 else self.param.dtype
        like = torch.empty((), dtype=wide, device=self.messages.device).expand(self.placeholder.shape)
        if self.is_owner:
            sums = [total, *(self._received_sum(like, rank) for rank in self.other_ranks)]
            there = [each for each in sums if each is not None]
            total = reduce(torch.add, there) if there else None
            for rank in self.other_ranks:
                self._send_sum(total, rank)
        else:
            self._send_sum(total, self.owner)
            total = self._received_sum(like, self.owner)
        self._accumulate(total)


class _ExactTiedParam(_LocalTiedParam):
    """Adds up gradients for each micro-batch in autograd's order: the gradient of the last use first. Each stage adds
    its own gradient to the sum from the stage after it, and passes the sum on."""

    def enter(self) -> None:
        """Begins a step."""
        super().enter()
        self.owed = 0  # number of sums that the first stage's rank will send
        # On the first stage's rank: sums to send at the end of the step, because a device sends messages in order.
        self.sums: list[torch.Tensor | None] = []
        self.edges: dict[tuple[int, int], GradientEdge] = {}  # by stage and micro-batch
        self.found: dict[tuple[int, int], torch.Tensor | None] = {}  # sums between two stages of this rank

    def after_forward(self, stage: int, microbatch: int) -> None:
        """Adds one more use of the parameter, the last one in this graph, since autograd adds its gradient first."""
        if stage != self.tied.stages[-1]:
            self.edges[stage, microbatch] = get_gradient_edge(self.placeholder.view_as(self.placeholder))

    def later_grad(self, stage: int, microbatch: int) -> tuple[GradientEdge, torch.Tensor] | None:
        """Returns the sum of the later stages' gradients, and the edge where it enters."""
        if stage == self.tied.stages[-1]:
            return None
        after = self.tied.stages[self.tied.stages.index(stage) + 1]
        rank = self.rank_of[after]
        here = rank == self.messages.comm.rank
        total = self.found.pop((after, microbatch)) if here else self._received_sum(self.placeholder, rank, after)
        edge = self.edges.pop((stage, microbatch))
        return None if total is None else (edge, total)

    def after_backward(self, stage: int, microbatch: int) -> None:
        """Sends the sum to the stage before; on the first stage it is complete."""
        total, self.placeholder.grad = self.placeholder.grad, None
        self.owed += not self.is_owner and stage == self.here[0]
        if stage == self.tied.stages[0]:
            self.sums.append(total)
            self._accumulate(total)
            return
        rank = self.rank_of[self.tied.stages[self.tied.stages.index(stage) - 1]]
        if rank == self.messages.comm.rank:
            self.found[stage, microbatch] = total
        else:
            self._send_sum(total, rank, stage)

    def reduce_grads(self) -> None:
        """Sends and receives the sums of all micro-batches, in their order."""
        for total in self.sums:
            for rank in self.other_ranks:
                self._send_sum(total, rank)
        for _ in range(self.owed):
            self._accumulate(self._received_sum(self.placeholder, self.owner))
