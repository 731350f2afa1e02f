"""The operators at the borders of a tensor parallel region, with the names of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (f and f_bar are the f and g of Shoeybi et al., "Megatron-LM", 2019).

    operator           forward             backward
    f                  nothing             all_reduce
    f_bar              all_reduce          nothing
    g                  all_gather          reduce_scatter     along the sequence
    g_bar              reduce_scatter      all_gather         along the sequence
    gather             all_gather          own part           of a value that all ranks use alike
    scatter            own part            all_gather         of a value that is the same on all ranks

Sums are canonical: a balanced tree over the ranks, 16-bit floats added in float32 and rounded once. Every rank gets the
same bits. All operators are collectives, in forward and in backward. If a length is not divisible by the number of
ranks, they raise before anything is sent.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import refuse_mesh
from ringcomm.errors import ShapeError, UnsupportedError
from ringcomm.modules.arguments import TENSOR
from ringcomm.validation import expects, validate_int


class TensorParallelGroup:
    """The ranks that share the layers, and a count of their messages.

    Attributes:
        traffic: "<op> calls" and "<op> elements"; elements are those of the complete message.
        outputs: by the number of outputs on each rank, the numbers of outputs of the complete layers. Entries of
            deleted layers stay: garbage collectors run at different times on different ranks, and all ranks must find
            the same entries.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.traffic: Counter[str] = Counter()
        self.outputs: dict[int, set[int]] = {}
        self._entered: tuple[Any, Any, Any, set[int]] | None = None

    @staticmethod
    def of(comm: Communicator) -> TensorParallelGroup:
        """Returns a communicator's group, the same object for every call."""
        refuse_mesh(comm, "tensor parallel", "tp")
        found = vars(comm).get("_tensor_parallel_group")
        if found is None:
            found = vars(comm)["_tensor_parallel_group"] = TensorParallelGroup(comm)
        return found

    def count(self, op: str, elements: int) -> None:
        """Counts a message."""
        self.traffic[f"{op} calls"] += 1
        self.traffic[f"{op} elements"] += elements

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelGroup:
        """Returns this group, because a copy of a model, such as an average of its weights, has the same ranks."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"parallelize: rank {self.rank} cannot pickle layers that are cut over the ranks, because only this "
            "process has their communicator; pickle the state_dict(), or copy the module with copy.deepcopy"
        )

    def enter(self, layer: object, operator: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Returns ``operator(x, comm, *args)``, computed once for all layers that take the same tensor, so that
        queries, keys and values share one message.

        If the same layer takes the tensor again, it gets a new result, because writes by NumPy or a communicator do not
        change the tensor's version. In inference mode tensors have no versions, so every layer gets a new result. Under
        autocast the operator gets the tensor in the type in which the layers multiply.
        """
        dtype = multiplied_in(x)
        if x.is_inference():
            return operator(x.to(dtype), self.comm, *args)
        key = (operator, args, dtype, x._version, torch.is_grad_enabled() and x.requires_grad)
        if self._entered is not None:
            before, entered_with, found, takers = self._entered
            if before() is x and entered_with == key and id(layer) not in takers:
                takers.add(id(layer))
                return found
        made = operator(x.to(dtype), self.comm, *args)
        if made is x:  # no message was sent
            return x
        self._entered = weakref.ref(x, self.forget_entered), key, made, {id(layer)}  # kept as long as x lives
        return made

    def forget_entered(self, gone: Any = None) -> None:
        """Drops the result that `enter` has kept, if it was kept for ``gone`` or ``gone`` is None."""
        if self._entered is not None and (gone is None or self._entered[0] is gone):
            self._entered = None

    # ---- messages ------------------------------------------------------------------------------------------------

    def identity(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns ``x`` detached; sends no message."""
        return x.detach()

    def all_reduce(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns the sum of ``x`` over all ranks, as a new tensor."""
        if self.world_size == 1:
            return x
        self.count("all_reduce", x.numel())
        x = x.contiguous()
        return self.comm.all_reduce(x, out=torch.empty_like(x))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the concatenation of ``x`` of all ranks along ``dim``."""
        if self.world_size == 1:
            return x
        dim %= x.dim()
        self.count("all_gather", x.numel() * self.world_size)
        adjacent = math.prod(x.shape[:dim]) == 1  # the parts lie one after the other in the result
        shape = (*x.shape[:dim], self.world_size * x.shape[dim], *x.shape[dim + 1 :])
        gathered = x.new_empty(shape) if adjacent else None
        parts = x.new_empty(self.world_size, *x.shape) if gathered is None else gathered.view(self.world_size, *x.shape)
        self.comm.all_gather(x.contiguous(), out=parts)
        return parts.movedim(0, dim).flatten(dim, dim + 1) if gathered is None else gathered

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's part along ``dim`` of the sum of ``x`` over all ranks."""
        if self.world_size == 1:
            return x
        dim %= x.dim()
        parts = x.unflatten(dim, (self.world_size, self.share("reduce_scatter", x, dim))).movedim(dim, 0).contiguous()
        self.count("reduce_scatter", x.numel())
        return self.comm.reduce_scatter(parts, out=parts.new_empty(parts.shape[1:]))

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's part along ``dim`` of ``x``, as a new tensor; sends no message."""
        each = self.share("scatter", x, dim)
        return x.narrow(dim, self.rank * each, each).clone(memory_format=torch.contiguous_format)

    def share(self, call: str, x: torch.Tensor, dim: int) -> int:
        """Returns the length of a rank's part.

        Raises: ShapeError: the length is not divisible.
        """
        if x.shape[dim] % self.world_size:
            raise ShapeError(
                f"{call}: rank {self.rank} got shape {tuple(x.shape)}, expected {self.world_size} equal parts along "
                f"dimension {dim}; pad it to a multiple"
            )
        return x.shape[dim] // self.world_size


def multiplied_in(x: torch.Tensor) -> torch.dtype:
    """Returns the type in which a linear layer multiplies ``x``: autocast's, where it is on."""
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


# ---- operators ---------------------------------------------------------------------------------------------------


_BATCHED = torch._C._parse_dispatch_key("Batched")


class _Operator(torch.autograd.Function):
    """A collective of TensorParallelGroup in forward, and its conjugate in backward, which can be differentiated again.
    It supports torch.func: operators are linear, and vmap sends a batch as one message."""

    @staticmethod
    def forward(x: torch.Tensor, group: TensorParallelGroup, dim: int, forward_op: str, backward_op: str) -> Any:
        return getattr(group, forward_op)(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.group, ctx.dim, ctx.forward_op, ctx.backward_op = inputs

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *others: None) -> Any:
        return _Operator.apply(tangent, ctx.group, ctx.dim, ctx.forward_op, ctx.backward_op)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, group: Any, dim: int, *ops: str) -> tuple[Any, int]:
        batch = x.movedim(in_dims[0], 0)
        return _Operator.apply(batch, group, 1 + dim % max(x.dim() - 1, 1), *ops), 0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if torch._C._dispatch_keys(grad).has(_BATCHED):  # from torch's older vmap, which is not that of torch.func
            raise UnsupportedError(
                f"parallelize: rank {ctx.group.rank} got a batch of gradients, as jacobian(vectorize=True) and "
                "grad(is_grads_batched=True) send through a backward pass, expected one gradient; use torch.func, or "
                "compute one at a time"
            )
        ctx.group.forget_entered()  # else the result would live as long as the input, which may be a leaf
        return _Operator.apply(grad, ctx.group, ctx.dim, ctx.backward_op, ctx.forward_op), None, None, None, None


@expects("tensor parallel", x=TENSOR, dim=validate_int(-64, 64, "a dimension"))
def _operate(x: torch.Tensor, comm: Communicator, dim: int, forward_op: str, backward_op: str) -> torch.Tensor:
    refuse_mesh(comm, "tensor parallel", "tp")
    if comm.world_size == 1 or (forward_op == "identity" and not (torch.is_grad_enabled() and x.requires_grad)):
        return x
    return _Operator.apply(x, TensorParallelGroup.of(comm), dim, forward_op, backward_op)


def f(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Enters a tensor parallel region: returns ``x``, which is the same on all ranks, for sharded layers. Its gradient
    is the sum of the ranks' gradients."""
    return _operate(x, comm, 0, "identity", "all_reduce")


def f_bar(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Leaves a tensor parallel region: returns the sum of the ranks' ``x``, on all of them."""
    return _operate(x, comm, 0, "all_reduce", "identity")


def g(x: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """Enters a tensor parallel region from a sequence parallel one: returns the complete sequence, gathered from the
    ranks."""
    return _operate(x, comm, dim, "all_gather", "reduce_scatter")


def g_bar(x: torch.Tensor, comm: Communicator, dim: int = 1) -> torch.Tensor:
    """Enters a sequence parallel region from a tensor parallel one: returns this rank's part of the sum."""
    return _operate(x, comm, dim, "reduce_scatter", "all_gather")


def gather(x: torch.Tensor, comm: Communicator, dim: int = -1) -> torch.Tensor:
    """Returns the concatenation of the ranks' parts; every rank must use it in the same way."""
    return _operate(x, comm, dim, "all_gather", "own")


def scatter(x: torch.Tensor, comm: Communicator, dim: int = -1) -> torch.Tensor:
    """Returns this rank's part of a tensor that is the same on all ranks, as a new tensor."""
    return _operate(x, comm, dim, "own", "all_gather")
