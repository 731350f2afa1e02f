"""What stages send one another: activations forward, with what is to be known of them, and their gradients back."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ringcomm.communicator import Communicator
from ringcomm.errors import ShapeError
from ringcomm.pipeline.local import About

HEAD_NBYTES = 512  # of the message before the tensors; a longer one goes on in a second
_LENGTH = struct.Struct("<q")
_TAG = 1 << 20  # the first of the tags used here
_MOST_DIMS = 5  # of gradients whose order in memory is told

Order = tuple[int, ...]
"""Dimensions from the outermost in memory to the innermost: bits of products depend on it."""
Facts = tuple[tuple[tuple[int, ...], torch.dtype, bool, Order], ...]
"""Of each tensor: shape, type, whether its gradient is wanted, and how it lies in memory."""


class Sent(NamedTuple):
    """What is kept of a tensor that a stage has handed on and whose gradient will come: not its values."""

    edge: torch.autograd.graph.GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> list[Sent]:
        """Of those that want a gradient."""
        edge = torch.autograd.graph.get_gradient_edge
        return [Sent(edge(x), tuple(x.shape), x.dtype) for x in tensors if x.requires_grad]


class Messages:
    """The messages of one rank. Sends do not block; `finish` waits for them.

    Args:
        static_shapes: whether every message between two stages has the shapes of the first: then only that one tells
            them, and a device is not waited for.
    """

    def __init__(self, comm: Communicator, device: torch.device, static_shapes: bool) -> None:
        self.comm, self.device, self.static_shapes = comm, device, static_shapes
        self.sent_nbytes = 0  # tensors alone
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._told: dict[tuple[str, int, bool], Any] = {}  # by direction, stage, and whether gradients are taken

    def send(self, tensors: Sequence[torch.Tensor], about: About, stage: int, rank: int) -> None:
        """Sends a stage's inputs to its rank."""
        key = ("to", stage, torch.is_grad_enabled())
        facts = tuple((tuple(x.shape), x.dtype, x.requires_grad, _order(x)) for x in tensors)
        told = self._told.get(key)
        if told is not None and facts != told[0]:
            raise ShapeError(
                f"Pipeline: rank {self.comm.rank} got {_text(facts)} for stage {stage}, expected {_text(told[0])} as "
                "in the first micro-batch; pass static_shapes=False where shapes change"
            )
        if told is not None and about.of_any() != told[1]:
            raise ShapeError(
                f"Pipeline: rank {self.comm.rank} got other arguments for stage {stage} beside its tensors, expected "
                "those of the first micro-batch; pass static_shapes=False where numbers or shapes change"
            )
        if told is None:
            self._send_head(pickle.dumps((facts, about)), rank, _forward(stage))
            if self.static_shapes:
                self._told[key] = facts, about.of_any()
        for x, (_, _, _, order) in zip(tensors, facts, strict=True):
            self._send(x.detach().permute(order), rank, _forward(stage))

    def receive(self, stage: int, rank: int) -> tuple[list[torch.Tensor], About]:
        """A stage's inputs from the rank of the one before: leaves of a graph of their own."""
        key = ("at", stage, torch.is_grad_enabled())
        told = self._told.get(key)
        if told is None:
            told = pickle.loads(self._receive_head(rank, _forward(stage)))
            if self.static_shapes:
                self._told[key] = told[0], told[1].of_any()
        facts, about = told
        tag = _forward(stage)
        return [self._receive(shape, dtype, wanted, rank, tag, order) for shape, dtype, wanted, order in facts], about

    def send_gradients(self, wanted: Sequence[torch.Tensor | None], stage: int, rank: int) -> None:
        """Sends the gradients of a stage's inputs back. Some may be missing: a byte for each tells that first, and how
        it lies in memory."""
        orders = [() if x is None else _order(x, _MOST_DIMS) for x in wanted]
        if len(wanted):
            codes = [0 if x is None else 1 + _orders(x.dim()).index(o) for x, o in zip(wanted, orders, strict=True)]
            self._send(torch.tensor(codes, dtype=torch.uint8, device=self.device), rank, _backward(stage), counts=False)
        for x, order in zip(wanted, orders, strict=True):
            if x is not None:
                self._send(x.permute(order), rank, _backward(stage))

    def receive_gradients(self, sent: Sequence[Sent], stage: int, rank: int) -> list[torch.Tensor | None]:
        """The gradients of what was sent to a stage; None where that stage had no use for it."""
        tag = _backward(stage)
        codes = self._receive((len(sent),), torch.uint8, False, rank, tag).tolist() if sent else []
        return [
            self._receive(x.shape, x.dtype, False, rank, tag, _orders(len(x.shape))[code - 1]) if code else None
            for x, code in zip(sent, codes, strict=True)
        ]

    def send_beside(self, x: torch.Tensor, rank: int, number: int, counts: bool = True) -> None:
        """Sends a tensor beside those of the schedule, in the ``number``th row of such."""
        self._send(x, rank, _TAG - 1 - number, counts)

    def receive_beside(self, x: torch.Tensor, rank: int, number: int) -> torch.Tensor:
        """Receives one."""
        self.comm.recv(x, rank, _TAG - 1 - number)
        return x

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    # ---- one message ----------------------------------------------------------------------------------------------

    def _send(self, x: torch.Tensor, rank: int, tag: int, counts: bool = True) -> None:
        self._sending = [each for each in self._sending if not each[0].done]
        x = x.contiguous()
        self.sent_nbytes += x.nbytes if counts else 0
        if x.numel():
            self._sending.append((self.comm.isend(x, rank, tag), x))

    def _receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool,
        rank: int,
        tag: int,
        order: Order | None = None,
    ) -> torch.Tensor:
        order = tuple(range(len(shape))) if order is None else order
        strides = {dim: math.prod(shape[inner] for inner in order[i + 1 :]) for i, dim in enumerate(order)}
        x = torch.empty_strided(shape, [strides[dim] for dim in range(len(shape))], dtype=dtype, device=self.device)
        if x.numel():
            self.comm.recv(x.permute(order), rank, tag)
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


@functools.cache
def _orders(dims: int) -> list[Order]:
    """All, of as many dimensions as a byte can tell them of; else the usual one."""
    return [*itertools.permutations(range(dims))] if dims <= _MOST_DIMS else [tuple(range(dims))]


def _order(x: torch.Tensor, most: int = 64) -> Order:
    """The usual one of tensors with gaps, or with more than ``most`` dimensions."""
    usual = tuple(range(x.dim()))
    order = tuple(sorted(usual, key=lambda dim: -x.stride(dim)))
    return order if not x.is_contiguous() and x.dim() <= most and x.permute(order).is_contiguous() else usual


def _forward(stage: int) -> int:
    return _TAG + 2 * stage


def _backward(stage: int) -> int:
    return _TAG + 2 * stage + 1


def _text(facts: Facts) -> str:
    return ", ".join(f"{shape} of {dtype}" for shape, dtype, *_ in facts)
