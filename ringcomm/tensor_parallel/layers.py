"""Linear layers and embeddings with weights sharded over the ranks of a communicator (Shoeybi et al., "Megatron-LM",
2019). Inputs and outputs are plain tensors. A layer keeps the parameter names of the layer that it replaces; its
parameters are this rank's shards, and carry a description of the shard (`ringcomm.modules.shard_spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import DEVICE, DTYPE
from ringcomm.modules.shard_spec import ShardSpec, note, part_of, put_part, renew_parts, take
from ringcomm.tensor_parallel import overlapped
from ringcomm.tensor_parallel.group import TensorParallelGroup, f, f_bar, g, g_bar, gather, scatter
from ringcomm.tensor_parallel.outputs import OutputSharding
from ringcomm.validation import FLAG, expects, several, validate_int

DIM = validate_int(-64, 64, "a dimension")
PARTS = several("a list of extents", validate_int(1))


def shard_along(
    extents: Sequence[int], group: TensorParallelGroup, call: str, what: str, pad: bool = False, multiple: int = 1
) -> ShardSpec:
    """Returns this rank's shard along dimension 0 of a fused weight: an equal share of each of its ``extents``.

    Args:
        call, what: for an error: the call, and the name of the extents.
        pad: whether an extent that does not divide is padded at its end, so that shares are equal.
        multiple: for instance the width of an attention head: if an extent is a multiple of it, each rank's share must
            be one, too.
    Raises:  InvalidArgumentError: an extent that cannot be shared like this.
    """
    pieces, offset = [], 0
    for extent in extents:
        each = -(-extent // group.world_size)
        width = 1 if extent % multiple else multiple  # an extent such as one gate per head is not made of heads
        if (extent % group.world_size and not pad) or each % width:
            heads = f" ({extent // width} heads of {width})" if width > 1 else ""
            raise InvalidArgumentError(
                f"{call}: rank {group.rank} got {extent} {what}{heads}, expected {group.world_size} equal "
                f"parts{' of whole heads' if width > 1 else ''}; use a number of ranks that divides it"
            )
        first = min(extent, group.rank * each)
        pieces.append((offset + first, min(each, extent - first)))
        offset += extent
    return ShardSpec(0, offset, tuple(pieces))


def set_shard(
    module: nn.Module, key: str, unsharded: torch.Tensor, part: ShardSpec, dim: int = 0, length: int = 0
) -> None:
    """Gives a module this rank's shard, along ``dim``, of an unsharded parameter.

    Args:
        length: the length of the shard with its padding; 0: there is no padding.
    """
    part = replace(part, dim=dim)
    length = length or sum(count for _, count in part.pieces)
    setattr(module, key, nn.Parameter(take(unsharded.detach(), part, length), unsharded.requires_grad))
    note(module, key, **vars(part))


def replace_data(p: nn.Parameter, made: nn.Parameter) -> nn.Parameter:
    """Gives a parameter the memory and the attributes of another, and no gradient; the object stays the same. It
    changes the type temporarily, because otherwise torch would keep the old shape for backward passes.
    """
    p.grad = None
    p.data = made.detach().new_empty(0, dtype=torch.float32 if p.dtype == torch.float64 else torch.float64)
    p.data = made.detach()
    vars(p).update(vars(made))
    return p


LINEAR = {
    "in_features": validate_int(1),
    "out_features": validate_int(1),
    "bias": FLAG,
    "sequence_dim": DIM,
    "overlap": FLAG,
    "device": DEVICE,
    "dtype": DTYPE,
}


class _ParallelLayer(nn.Module):
    """A layer with sharded parameters, which stay marked as shards even if torch replaces them. It is also a subclass
    of torch's layer, so that programs that look for linear layers or embeddings find it.

    Attributes:
        transposed: whether the weight has the shape (in, out), like that of transformers' Conv1D.
        unsharded_class: the class of the layer that it replaces.
    """

    transposed: bool
    unsharded_class: type[nn.Module]
    _init_from: Callable[..., None]
    """Takes over a module's values; the name is empty if the layer was constructed directly, not by `of`."""

    def __init__(self, group: TensorParallelGroup, sequence_dim: int | None, overlap: bool = False) -> None:
        nn.Module.__init__(self)  # torch's layers would draw unsharded values
        self.group, self.sequence_dim, self.overlap = group, sequence_dim, overlap and group.world_size > 1
        if overlap and sequence_dim is None:
            raise InvalidArgumentError(
                f"{type(self).__name__}: rank {group.rank} got overlap=True without a sequence_dim, expected one, "
                "because only messages along the sequence can be divided; pass sequence_dim"
            )

    @classmethod
    def of(
        cls,
        module: nn.Module,
        group: TensorParallelGroup,
        name: str,
        *,
        sequence_dim: int | None = None,
        overlap: bool = False,
        **options: Any,
    ) -> _ParallelLayer:
        """Returns a layer that replaces a module and takes over its values.

        Args:
            name: the module's name in errors.
            options: of `_init_from`.
        """
        made = cls.__new__(cls)
        _ParallelLayer.__init__(made, group, sequence_dim, overlap)
        made._init_from(module, name, **options)
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> _ParallelLayer:
        super()._apply(fn, recurse)
        renew_parts([self])
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        renew_parts([self])  # copied parameters have no ShardSpecs

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        renew_parts([self])

    def apply(self, fn: Callable[[nn.Module], None]) -> _ParallelLayer:
        """Applies ``fn`` to the layer with unsharded parameters, of which every rank then keeps its part. So an
        initialisation sees the unsharded shapes and draws the values of the unsharded layer.

        The elements of other ranks, also of gradients, are zeros before ``fn`` writes them. Sends no message: seed the
        ranks' generators alike. Needs memory for the unsharded parameters and gradients of one layer. Parameters that
        are sharded by ZeRO stage 3 too, or have a sharded gradient, stay as they are, and ``fn`` sees this rank's part
        of them.

        Raises: UnsupportedError: ``fn`` replaces a parameter by others.
        """
        own = [(key, p) for key, p in self._parameters.items() if p is not None and _is_shard(p)]
        sharded = {key: (p, p.data, p.grad) for key, p in own}
        try:
            for p, mine, grad in sharded.values():
                part, shape = part_of(p), part_of(p).unsharded_shape(mine.shape)
                p.grad = None
                p.data = mine.new_zeros(shape)
                put_part(p.data, mine, part)
                if grad is not None:
                    p.grad = grad.new_zeros(shape)
                    put_part(p.grad, grad, part)
            fn(self)
        finally:
            for key, (p, mine, grad) in sharded.items():
                part, now, changed = part_of(p), self._parameters.get(key), p.grad
                assert part.dim is not None
                p.grad = None
                for each in [p] if now is None or now is p else [p, now]:
                    if each.shape == part.unsharded_shape(mine.shape):
                        each.data = take(each.data, part, mine.shape[part.dim])
                if p.dtype == mine.dtype and p.device == mine.device:  # stays where it is, such as in a bucket
                    p.data = mine.copy_(p.data)
                    p.grad = grad if changed is not None else None
                if grad is not None and changed is not None and changed.shape != mine.shape:
                    taken = take(changed, part, mine.shape[part.dim])
                    p.grad = taken.to(p) if p.grad is None else grad.copy_(taken)
            renew_parts([self])
        renamed = sorted(sharded.keys() - self._parameters.keys())
        if renamed:
            raise UnsupportedError(
                f"apply: rank {self.group.rank} got a function that replaces the {renamed[0]} of a split "
                f"{self.unsharded_class.__name__} by other parameters, as weight_norm and pruning do, expected one "
                "that writes values; leave the layer out of the plan"
            )
        return self

    @property
    def reset_parameters(self) -> Callable[[], Any]:
        """Gives every rank its part of the values that the unsharded layer draws, from the same random numbers. Sends
        no message: seed the ranks' generators alike. Missing if the class of the unsharded layer has no such method."""
        reset: Callable[[nn.Module], None] = self.unsharded_class.reset_parameters
        return partial(self.apply, reset)

    def weight_of(self) -> torch.Tensor:
        """Returns the weight with the shape (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.group.rank} of {self.group.world_size}"
        )


class ColumnParallelLinear(_ParallelLayer, nn.Linear):
    """Computes ``x W^T + b`` with W sharded along its outputs: rank r computes the r-th part of the last dimension.

    Args:
        in_features, out_features: those of the unsharded layer, also as attributes; ``weight.shape`` is the shard's.
        comm: the ranks.
        gather_output: whether every rank gets the complete output.
        sequence_dim: the input is this rank's part along this dimension, and is gathered first; None: the input is
            complete.
        parts: extents of the outputs that are fused in one layer, such as those of queries, keys and values; each is
            sharded separately. None: all outputs are one part.
        pad: whether outputs that do not divide are padded with columns of zeros, which ``gather_output`` removes; not
            with several ``parts``.
        overlap: gathers the sequence along the ring while parts of it are multiplied.
        entered: whether the input has already passed `f` or `g`, together with that of other layers.
    Initialised as nn.Linear would be, from the same random draws, so that the complete weight does not depend on the
        number of ranks.
    Cost:    backward one all_reduce of the input's gradient; with ``sequence_dim`` an all_gather of the input and in
             backward a reduce_scatter of its gradient.

    Attributes:
        watched: checks how the first output is used; None: no check.
    """

    watched: OutputSharding | None = None

    @expects("ColumnParallelLinear", gather_output=FLAG, parts=PARTS, pad=FLAG, entered=FLAG, **LINEAR)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        comm: Communicator | None = None,
        *,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        parts: Sequence[int] | None = None,
        pad: bool = False,
        overlap: bool = False,
        entered: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(_group(comm, "ColumnParallelLinear"), sequence_dim, overlap)
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._init_from(linear, "", gather_output, parts, pad, entered)

    def _init_from(
        self,
        linear: nn.Module,
        name: str,
        gather_output: bool = False,
        parts: Sequence[int] | None = None,
        pad: bool = False,
        entered: bool = False,
        multiple: int = 1,
    ) -> None:
        self.transposed, self.in_features, self.out_features = linear_shape(linear, self.group, name)
        self.unsharded_class = type(linear)
        extents = [self.out_features] if parts is None else list(parts)
        if sum(extents) != self.out_features or min(extents) < 1:
            raise InvalidArgumentError(
                f"{_call(self, name)}: rank {self.group.rank} got parts={extents} for the {self.out_features} outputs"
                f"{_of(name)}, expected parts that add up to them; pass the extents of the fused outputs"
            )
        if pad and len(extents) > 1:
            raise UnsupportedError(
                f"{_call(self, name)}: rank {self.group.rank} got pad=True with the parts {extents}{_of(name)}, "
                "expected one of the two, because only a single part can be padded; use extents that divide"
            )
        part = shard_along(extents, self.group, _call(self, name), f"outputs{_of(name)}", pad, multiple)
        self.gather_output, self.gathered, self.entered = gather_output, extents, entered
        self.local_features = sum(self.local_extents)
        if not gather_output:
            self.group.outputs.setdefault(self.local_features, set()).add(self.out_features)
        set_shard(self, "weight", linear.weight, part, int(self.transposed), self.local_features)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            set_shard(self, "bias", linear.bias, part, 0, self.local_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., this rank's outputs), or all outputs with ``gather_output``."""
        group, comm = self.group, self.group.comm
        if self.entered or self.sequence_dim is None:
            y = F.linear(input if self.entered else group.enter(self, f, input), self.weight_of(), self.bias)
        elif self.overlap:
            y = overlapped.gather_linear(input, self.weight_of(), self.bias, comm, self.sequence_dim)
        else:
            y = F.linear(group.enter(self, g, input, self.sequence_dim), self.weight_of(), self.bias)
        if self.gather_output:
            return self._unsharded(gather(y, comm))
        return y if self.watched is None else self.watched.watch_first(y)

    @property
    def is_one(self) -> bool:
        """Whether all outputs are sharded as one part."""
        return len(self.gathered) == 1

    @property
    def local_extents(self) -> list[int]:
        """This rank's number of outputs of each part."""
        return [-(-extent // self.group.world_size) for extent in self.gathered]

    def _unsharded(self, y: torch.Tensor) -> torch.Tensor:
        """Returns the concatenated outputs of the ranks in the order of the unsharded layer and without padding."""
        if self.is_one:
            return y[..., : self.out_features]
        each = self.local_extents
        by_rank = [part.split(each, -1) for part in y.split(self.local_features, -1)]
        return torch.cat([torch.cat([rank[i] for rank in by_rank], -1) for i in range(len(each))], -1)


class RowParallelLinear(_ParallelLayer, nn.Linear):
    """Computes ``x W^T + b`` with W sharded along its inputs: every rank multiplies its part of the last dimension, and
    the products are added.

    Args:
        in_features, out_features: those of the unsharded layer, also as attributes; ``weight.shape`` is the shard's.
        comm: the ranks.
        input_is_parallel: whether the input is this rank's part, as a ColumnParallelLinear returns it.
        sequence_dim: every rank gets its part of the sum along this dimension; None: the complete sum.
        overlap: sends products along the ring while the rest is multiplied.
    Cost:    one all_reduce of the output; with ``sequence_dim`` a reduce_scatter of it, and in backward an all_gather
             of its gradient.
    """

    @expects("RowParallelLinear", input_is_parallel=FLAG, **LINEAR)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        comm: Communicator | None = None,
        *,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        overlap: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(_group(comm, "RowParallelLinear"), sequence_dim, overlap)
        self._init_from(nn.Linear(in_features, out_features, bias, device, dtype), "", input_is_parallel)

    def _init_from(self, linear: nn.Module, name: str, input_is_parallel: bool = True, multiple: int = 1) -> None:
        self.transposed, self.in_features, self.out_features = linear_shape(linear, self.group, name)
        self.unsharded_class = type(linear)
        self.input_is_parallel = input_is_parallel
        part = shard_along([self.in_features], self.group, _call(self, name), f"inputs{_of(name)}", multiple=multiple)
        set_shard(self, "weight", linear.weight, part, int(not self.transposed))
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., this rank's inputs) -> (..., out); with ``sequence_dim`` this rank's part along it."""
        comm = self.group.comm
        x = input if self.input_is_parallel else scatter(input, comm)
        if self.sequence_dim is None:
            y = f_bar(F.linear(x, self.weight_of()), comm)
        elif self.overlap:
            y = overlapped.linear_scatter(x, self.weight_of(), comm, self.sequence_dim)
        else:
            y = g_bar(F.linear(x, self.weight_of()), comm, self.sequence_dim)
        if self.bias is None:
            return y
        bias = self.bias if self.sequence_dim is None else f(self.bias, comm)  # sums gradients of the parts
        return y + bias.to(y.dtype)


class VocabParallelEmbedding(_ParallelLayer, nn.Embedding):
    """An embedding with its rows sharded over the ranks; a vocabulary that does not divide is padded with rows of
    zeros.

    Attributes:
        embed_scale: a factor of the rows, as in transformers' scaled word embeddings; None: there is none.

    Args:
        num_embeddings, embedding_dim, padding_idx: those of the unsharded embedding, also as attributes;
            ``weight.shape`` is the shard's.
        comm: the ranks.
        sequence_dim: every rank gets its part of the output along this dimension; None: the complete output.
    Cost:    one all_reduce of the output; with ``sequence_dim`` a reduce_scatter, and in backward an all_gather.
    """

    embed_scale: torch.Tensor | float | None

    @expects(
        "VocabParallelEmbedding",
        num_embeddings=validate_int(1),
        embedding_dim=validate_int(1),
        padding_idx=validate_int(-(1 << 63)),
        sequence_dim=DIM,
        device=DEVICE,
        dtype=DTYPE,
    )
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        comm: Communicator | None = None,
        *,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(_group(comm, "VocabParallelEmbedding"), sequence_dim)
        self._init_from(nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype), "")

    def _init_from(self, embedding: Any, name: str) -> None:
        group, scale = self.group, _scale_of(embedding)
        if name:
            if scale is None:
                refuse_changed(embedding, nn.Embedding, group, name, hooks=self.sequence_dim is None)
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(embedding, option):
                    raise UnsupportedError(
                        f"parallelize: rank {group.rank} got {name}, an embedding with {option}, expected one without; "
                        "leave it out of the plan"
                    )
            for hooks in _HOOKS:  # valid for the replacement, which has the same inputs and outputs
                self.__dict__[hooks] = vars(embedding)[hooks]
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.unsharded_class = type(embedding)
        self.max_norm, self.norm_type = None, embedding.norm_type
        self.scale_grad_by_freq, self.sparse = False, False
        part = shard_along([self.num_embeddings], group, "VocabParallelEmbedding", "rows", pad=True)
        self.rows = -(-self.num_embeddings // group.world_size)
        self.first, self.count = part.pieces[0]
        set_shard(self, "weight", embedding.weight, part, 0, self.rows)
        self.padding_idx = embedding.padding_idx
        if "embed_scale" in embedding._buffers:
            self.register_buffer("embed_scale", scale, "embed_scale" not in embedding._non_persistent_buffers_set)
        else:
            self.embed_scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Looks up rows: integers (...) -> (..., embedding_dim), or this rank's part of it along ``sequence_dim``."""
        tokens = input
        if self.weight.shape[0] != self.rows:
            raise InvalidArgumentError(
                f"VocabParallelEmbedding: rank {self.group.rank} got a weight of {self.weight.shape[0]} rows, expected "
                f"its part of {self.rows}; resize embeddings before parallelize"
            )
        inside = (tokens >= 0) & (tokens < self.num_embeddings)
        if tokens.is_cpu and not bool(inside.all()):
            raise InvalidArgumentError(
                f"VocabParallelEmbedding: rank {self.group.rank} got a token of {int(tokens[~inside][0])}, expected 0 "
                f"to {self.num_embeddings - 1}; look at the tokenizer"
            )
        here = tokens - self.first
        other = (here < 0) | (here >= self.count)
        if not tokens.is_cpu:
            torch._assert_async(inside.all())
        rows = here.masked_fill(other, 0)
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        inside_padding = padding if padding is not None and 0 <= padding < self.count else None
        y = F.embedding(rows, self.weight, inside_padding).masked_fill(other.unsqueeze(-1), 0)
        comm, scale = self.group.comm, self.embed_scale
        y = f_bar(y, comm) if self.sequence_dim is None else g_bar(y, comm, self.sequence_dim)
        if scale is None:
            return y
        return y * (scale.to(y.dtype) if isinstance(scale, torch.Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.group.rank} of {self.group.world_size}"


# ---- helpers -----------------------------------------------------------------------------------------------------


def _is_shard(p: nn.Parameter) -> bool:
    """Returns whether a parameter's other parts are on other ranks, and `_ParallelLayer.apply` can unshard it."""
    grad = p.grad
    is_plain = type(p) is nn.Parameter and (grad is None or (type(grad) is torch.Tensor and grad.shape == p.shape))
    is_here = is_plain and not p.is_meta and p.numel() > 0
    return is_here and part_of(p).is_cut and part_of(p).unsharded_shape(p.shape) != p.shape


def linear_shape(linear: Any, group: TensorParallelGroup, name: str = "") -> tuple[bool, int, int]:
    """Returns whether a linear layer's weight has the shape (in, out), and its numbers of inputs and outputs.

    Raises: UnsupportedError: another kind of module.
    """
    if type(linear).__name__ == "Conv1D" and torch.is_tensor(linear.weight) and linear.weight.dim() == 2:
        refuse_changed(linear, type(linear), group, name)  # transformers' linear layer
        return True, *linear.weight.shape
    refuse_changed(linear, nn.Linear, group, name)
    return False, linear.weight.shape[1], linear.weight.shape[0]


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def refuse_changed(
    module: nn.Module, kind: type[nn.Module], group: TensorParallelGroup, name: str, hooks: bool = False
) -> None:
    """Refuses a module with features that would be lost when one of our layers replaces it.

    Args:
        hooks: whether the replacement takes over the hooks of the forward pass.
    Raises: UnsupportedError: a module of another class, or with its own forward, with hooks, or parametrized.
    """
    said = None
    is_plain = isinstance(module, kind) and not isinstance(module, _ParallelLayer)
    if not is_plain:
        said = f"a {type(module).__name__}"
    elif (type(module).forward is not kind.forward or "forward" in vars(module)) and not _multiplies(module):
        said = f"a {type(module).__name__} with a forward pass of its own"
    elif _has_hooks(module, hooks):
        said = f"a {type(module).__name__} with hooks"
    elif torch.nn.utils.parametrize.is_parametrized(module):
        said = f"a parametrized {type(module).__name__}"
    if said is not None:
        later = ", or change it afterwards" if is_plain else ""
        raise UnsupportedError(
            f"parallelize: rank {group.rank} got {name}, {said}, expected a plain {kind.__name__}; leave it out of "
            f"the plan{later}"
        )


def _multiplies(linear: nn.Module) -> bool:
    """Returns whether a linear layer with its own forward, such as Falcon's, computes the same as torch's: it must have
    only a weight and a bias, and give the same results for a small example."""
    known = vars(nn.Linear(1, 1, device="meta")).keys()
    more = any(key not in known and not key.startswith("_") for key in vars(linear))  # ignores private marks
    if not isinstance(linear, nn.Linear) or more or linear._buffers or linear._modules:
        return False
    with torch.device("cpu"):
        x, weight, bias = torch.arange(1.0, 7).view(3, 2), torch.tensor([[1.0, -2], [3, 5]]), torch.tensor([7.0, -11])
    tried = {"weight": weight} if linear.bias is None else {"weight": weight, "bias": bias}
    expected = F.linear(x, *tried.values())
    training = linear.training
    try:
        found = [torch.func.functional_call(linear.train(mode), tried, (x,)) for mode in (True, False)]
    except Exception:
        return False
    finally:
        linear.train(training)
    return all(torch.is_tensor(each) and torch.equal(each, expected) for each in found)


def _scale_of(embedding: Any) -> torch.Tensor | float | None:
    """Returns ``embed_scale`` of an embedding whose forward pass is torch's times this factor, as in transformers'
    scaled word embeddings; None for any other forward pass."""
    scale = getattr(embedding, "embed_scale", None)
    inherits = isinstance(embedding, nn.Embedding) and type(embedding).forward is not nn.Embedding.forward
    if not inherits or "forward" in vars(embedding) or not isinstance(scale, (torch.Tensor, float, int)):
        return None
    with torch.device("cpu"):  # try it, on rows of one feature
        rows, tokens = torch.arange(1.0, embedding.num_embeddings + 1).unsqueeze(1), torch.tensor([0, 0])
        tokens[1] = embedding.num_embeddings - 1
        tried = {"weight": rows, **({"embed_scale": torch.tensor(3.0)} if torch.is_tensor(scale) else {})}
        factor = 3.0 if torch.is_tensor(scale) else float(scale)
        try:
            found = torch.func.functional_call(embedding, tried, (tokens,))
        except Exception:
            return None
        return scale if torch.equal(found, rows[tokens] * factor) else None


def _has_hooks(module: nn.Module, but_forward: bool) -> bool:
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(backward) or (not but_forward and any(vars(module)[hooks] for hooks in _HOOKS))


def refuse_hooks(module: nn.Module, group: TensorParallelGroup, name: str) -> None:
    """Refuses a module with hooks, which would be lost.

    Raises: UnsupportedError
    """
    if _has_hooks(module, False):
        raise UnsupportedError(
            f"parallelize: rank {group.rank} got {name}, a {type(module).__name__} with hooks, expected one without; "
            "register them afterwards"
        )


def _call(layer: nn.Module, name: str) -> str:
    return "parallelize" if name else type(layer).__name__


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def _group(comm: Communicator | None, call: str) -> TensorParallelGroup:
    if comm is None:
        raise InvalidArgumentError(
            f"{call}: got no communicator, expected the ranks over which it is cut; pass comm=, such as mesh['tp']"
        )
    return TensorParallelGroup.of(comm)
