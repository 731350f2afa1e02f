"""The messages between stages: activations forward, with their metadata, and gradients back."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, ShapeError
from ringcomm.pipeline_parallel.side_effects import version_of
from ringcomm.pipeline_parallel.stage_runner import StageMetadata

HEAD_NBYTES = 512  # size of the header before the tensors; a longer header continues in a second message
_LENGTH = struct.Struct("<q")
_TAG = 1 << 20  # the first of the tags used for stages

Strides = tuple[int, ...]
"""The strides of a tensor without gaps, even of dimensions of length 1, because the bits of matrix products depend on
them."""
Facts = tuple[tuple[tuple[int, ...], torch.dtype, bool, Strides], ...]
"""Shape, type, whether the gradient is wanted, and strides of each tensor."""


class Sent(NamedTuple):
    """A tensor that a stage has sent and whose gradient will come; the values are not kept."""

    edge: torch.autograd.graph.GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype


def sent_tensors(tensors: Sequence[torch.Tensor]) -> list[Sent]:
    """Returns an entry for each tensor that wants a gradient."""
    edge = torch.autograd.graph.get_gradient_edge
    return [Sent(edge(x), tuple(x.shape), x.dtype) for x in tensors if x.requires_grad]


class InFlight(NamedTuple):
    """A tensor that is being sent.

    Attributes:
        version: the tensor's version when the send began, if nothing may write into it until the end; None: not
            checked.
        of: the receiving stage and the micro-batch, if the tensor is an activation.
    """

    work: Any
    tensor: torch.Tensor
    version: int | None
    of: tuple[int, int] | None


class Messages:
    """The messages of one rank. Sends do not block; `finish` waits for them.

    Args:
        static_shapes: whether every message between two stages has the shapes of the first. Then only the first message
            carries the shapes, and later messages do not wait for the device.
    """

    def __init__(self, comm: Communicator, device: torch.device, static_shapes: bool) -> None:
        self.comm, self.device, self.static_shapes = comm, device, static_shapes
        self.sent_nbytes = 0  # without headers
        self._in_flight: list[InFlight] = []
        self._known: dict[tuple[str, int, bool], Any] = {}  # by direction, stage, and whether gradients are on

    def send(
        self, tensors: Sequence[torch.Tensor], metadata: StageMetadata, stage: int, number: int, rank: int
    ) -> None:
        """Sends a stage's inputs of a micro-batch to the rank of that stage."""
        key = ("to", stage, torch.is_grad_enabled())
        facts = tuple((tuple(x.shape), x.dtype, x.requires_grad, _strides(x)) for x in tensors)
        known = self._known.get(key)
        if known is not None and facts != known[0]:
            raise ShapeError(
                f"Pipeline: rank {self.comm.rank} got {_text(facts)} for stage {stage}, expected {_text(known[0])} as "
                "in the first micro-batch; pass static_shapes=False where shapes change"
            )
        if known is not None and metadata.of_any() != known[1]:
            raise ShapeError(
                f"Pipeline: rank {self.comm.rank} got other plain values for stage {stage} than in the first "
                "micro-batch, expected the same; pass static_shapes=False where numbers or shapes change"
            )
        if known is None:
            self._send_head(pickle.dumps((facts, metadata)), rank, _forward(stage))
            if self.static_shapes:
                self._known[key] = facts, metadata.of_any()
        for x, (_, _, _, strides) in zip(tensors, facts, strict=True):
            self._send(x.detach().permute(_order(strides)), rank, _forward(stage), check=True, of=(stage, number))

    def receive(self, stage: int, rank: int) -> tuple[list[torch.Tensor], StageMetadata]:
        """Receives a stage's inputs from the rank of the stage before, as leaves of a new autograd graph."""
        key = ("at", stage, torch.is_grad_enabled())
        known = self._known.get(key)
        if known is None:
            known = pickle.loads(self._receive_head(rank, _forward(stage)))
            if self.static_shapes:
                self._known[key] = known[0], known[1].of_any()
        facts, metadata = known
        tag = _forward(stage)
        return [
            self._receive(shape, dtype, wanted, rank, tag, strides) for shape, dtype, wanted, strides in facts
        ], metadata

    def send_gradients(self, wanted: Sequence[torch.Tensor | None], stage: int, rank: int) -> None:
        """Sends the gradients of a stage's inputs back. A header with a byte for each, whether it exists, and the
        strides of those that exist comes first."""
        tag, there = _backward(stage), [x for x in wanted if x is not None]
        strides = [_strides(x) for x in there]
        for numbers, dtype in (([x is not None for x in wanted], torch.uint8), ([*chain(*strides)], torch.int64)):
            self._send(torch.tensor(numbers, dtype=dtype, device=self.device), rank, tag, counts=False)
        for x, its in zip(there, strides, strict=True):
            self._send(x.permute(_order(its)), rank, tag, check=True)

    def receive_gradients(self, sent: Sequence[Sent], stage: int, number: int, rank: int) -> list[torch.Tensor | None]:
        """Receives the gradients of the tensors that were sent to a stage; None for tensors that the stage did not
        use."""
        tag = _backward(stage)
        there = self._receive((len(sent),), torch.uint8, False, rank, tag).tolist()
        dims = sum(len(each.shape) for each, its in zip(sent, there, strict=True) if its)
        strides = iter(self._receive((dims,), torch.int64, False, rank, tag).tolist())
        gradients = [
            self._receive(x.shape, x.dtype, False, rank, tag, [*islice(strides, len(x.shape))]) if its else None
            for x, its in zip(sent, there, strict=True)
        ]
        # The gradients show that the activations have arrived; from now on backward may write into their memory.
        self._refuse_written()
        for each in self._in_flight:
            if each.of == (stage, number):
                each.work.wait()
        self._in_flight = [each for each in self._in_flight if each.of != (stage, number)]
        return gradients

    def send_tied(self, x: torch.Tensor, rank: int, number: int, counts: bool = True) -> None:
        """Sends a tensor outside of the schedule; ``number`` selects its tag."""
        self._send(x, rank, _TAG - 1 - number, counts)

    def receive_tied(self, x: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        """Receives a tensor that `send_tied` sent with the same ``number``."""
        self.comm.recv(x, rank, _TAG - 1 - number)
        return x

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        for each in self._in_flight:
            each.work.wait()
        self._refuse_written()
        self._in_flight.clear()

    def _refuse_written(self) -> None:
        """Raises where the program wrote into a tensor that was being sent."""
        for each in self._in_flight:
            if each.version is not None and version_of(each.tensor) != each.version:
                raise InvalidArgumentError(
                    f"Pipeline: rank {self.comm.rank} found an in-place write into a tensor of shape "
                    f"{tuple(each.tensor.shape)}, a result of its stage or the gradient of an input, while it was "
                    "being sent, expected no write; write into a clone"
                )

    # ---- one message ----------------------------------------------------------------------------------------------

    def _send(
        self,
        x: torch.Tensor,
        rank: int,
        tag: int,
        counts: bool = True,
        check: bool = False,
        of: tuple[int, int] | None = None,
    ) -> None:
        self._refuse_written()
        self._in_flight = [each for each in self._in_flight if not each.work.done]
        x = x.contiguous()
        self.sent_nbytes += x.nbytes if counts else 0
        if x.numel():
            version = version_of(x) if check else None
            self._in_flight.append(InFlight(self.comm.isend(x, rank, tag), x, version, of))

    def _receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool,
        rank: int,
        tag: int,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        strides = _usual_strides(shape) if strides is None else strides
        x = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        if x.numel():
            self.comm.recv(x.permute(_order(strides)), rank, tag)
        return x.requires_grad_(requires_grad)

    def _send_head(self, packed: bytes, rank: int, tag: int) -> None:
        packed = _LENGTH.pack(len(packed)) + packed
        first, rest = packed[:HEAD_NBYTES].ljust(HEAD_NBYTES, b"\0"), packed[HEAD_NBYTES:]
        for part in (first, rest):
            if part:
                self._send(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(self.device), rank, tag, False)

    def _receive_head(self, rank: int, tag: int) -> bytes:
        first = bytes(self._receive((HEAD_NBYTES,), torch.uint8, False, rank, tag).cpu().numpy())
        (length,) = _LENGTH.unpack_from(first)
        rest = _LENGTH.size + length - HEAD_NBYTES
        more = bytes(self._receive((rest,), torch.uint8, False, rank, tag).cpu().numpy()) if rest > 0 else b""
        return (first + more)[_LENGTH.size : _LENGTH.size + length]


def _strides(x: torch.Tensor) -> Strides:
    """Returns a tensor's strides. For a tensor with gaps, returns strides without gaps in the same order of dimensions,
    because kernels add in that order; for an expanded tensor, the contiguous strides of its shape."""
    order = _order(x.stride())
    if x.permute(order).is_contiguous():
        return x.stride()
    if 0 in x.stride():
        return _usual_strides(x.shape)
    dense = dict(zip(order, _usual_strides([x.shape[dim] for dim in order]), strict=True))
    return tuple(dense[dim] for dim in range(x.dim()))


def _usual_strides(shape: Sequence[int]) -> Strides:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _order(strides: Sequence[int]) -> list[int]:
    """Returns the dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _forward(stage: int) -> int:
    return _TAG + 2 * stage


def _backward(stage: int) -> int:
    return _TAG + 2 * stage + 1


def _text(facts: Facts) -> str:
    return ", ".join(f"{shape} of {dtype}" for shape, dtype, *_ in facts)
