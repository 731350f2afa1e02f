"""Watches the first forward pass of a sharded layer, and refuses code that splits its outputs elsewhere than the shards
do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ringcomm.errors import InvalidArgumentError

KEEPS = {
    "contiguous", "clone", "to", "float", "double", "half", "bfloat16", "type_as", "clamp", "clamp_", "add", "__add__",
    "__radd__", "mul", "__mul__", "__rmul__", "sub", "__sub__", "__rsub__", "div", "__truediv__", "neg", "abs",
    "square", "pow", "__pow__", "exp", "erf", "dropout", "gelu", "silu", "relu", "relu_", "relu6", "elu", "selu",
    "leaky_relu", "softplus", "softsign", "mish", "hardswish", "hardtanh", "logsigmoid", "tanh", "sigmoid",
}  # fmt: skip
"""Functions whose result has the same outputs in the same places."""
VIEWS = ("view", "reshape", "unflatten")
_MOVES = {
    "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "select", "narrow", "__getitem__", "index_select",
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "__get__", "t",
}  # fmt: skip
"""Functions that may take rows or change the order of dimensions. (`__get__` is that of `x.mT`.)"""
_JOINS = ("cat", "concat", "concatenate")
FUSED = (2, 3)
"""The usual numbers of outputs fused in one layer: gate and up; queries, keys and values."""


@dataclass
class OutputSharding:
    """How the outputs of a layer were sharded.

    Attributes:
        name: the layer's name.
        extents: this rank's outputs of each part.
        total: the number of outputs on all ranks.
        divided: the numbers of heads of the modules around the layer, as this rank computes with them.
        width: the width of a head; 1: unknown.
        done: whether the first output has been watched; reset by an error, so that the next output is watched too.
    """

    name: str
    rank: int
    extents: tuple[int, ...]
    total: int
    divided: frozenset[int]
    width: int = 1
    done: bool = False

    def watch_first(self, y: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output; `watch` watches the first one."""
        if self.done or torch.compiler.is_compiling():
            return y
        self.done = True
        return self.watch(y)

    def watch(self, y: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns the tensor as one that raises if it is split at other places than the layer's outputs were.

        Args:
            dim: the dimension of the outputs.
        """
        if type(y) is not torch.Tensor or torch.compiler.is_compiling():
            return y
        watched = y.as_subclass(_WatchedOutput)
        watched._sharding, watched._dim = self, dim % y.dim() - y.dim()
        return watched

    # ---- refusals ------------------------------------------------------------------------------------------------

    def check_ends(self, function: str, ends: Iterable[int], step: int) -> None:
        """Refuses ends of slices that are not ends of the rank's parts.

        Args:
            step: the distance of one output to the next. A step above 1 takes interleaved outputs, which stay together
                only if they were sharded as one part.
        """
        known = {0, *accumulate(self.extents)}
        wrong = sorted({*ends} - known)
        if not wrong and (step == 1 or len(self.extents) == 1):
            return
        where = f"at {wrong[0]}" if wrong else f"in steps of {step}"
        if len(self.extents) > 1:
            self._refuse(f"{function} splits the outputs {where}", "the ends of the rank's parts")
        self._refuse(f"{function} splits the outputs {where}", "a layer whose outputs are not fused")

    def check_factors(self, function: str, asked: Sequence[int]) -> None:
        """Refuses a view that splits the outputs in another order than the shards do: for one part the first factor
        counts the rank's heads, for fused parts it counts the parts."""
        first, others = asked[0], asked[1:]
        if len(self.extents) > 1:
            fits = all(extent % others[-1] == 0 for extent in self.extents) and self.width in (1, others[-1])
            if first != len(self.extents) and not (len(others) == 1 and fits):  # heads of one part, then of the next
                self._refuse(
                    f"{function} splits the outputs by heads, and each head into its fused parts",
                    "a style without parts, such as 'colwise'",
                )
        elif first in FUSED and len(others) > 1 and first not in {*self.divided, *others}:
            self._refuse(f"{function} splits the outputs into {first} first", "a layer whose outputs are not fused")

    def refuse_mixed(self, function: str, does: str = "needs all of them") -> None:
        """Refuses a function over all outputs, since it would only see this rank's."""
        self.done = False
        raise InvalidArgumentError(
            f"parallelize: rank {self.rank} got {self.name}, whose {self.total} outputs are cut, here "
            f"{sum(self.extents)}, but {function} {does}, expected functions of each output or within a head; cut it "
            "as 'colwise_gather_output', with 'rowwise_split_input' for the layer behind, or leave both out of the plan"
        )

    def _refuse(self, saw: str, expected: str) -> None:
        self.done = False
        several = len(self.extents) > 1
        how = f"parts, here of {list(self.extents)}" if several else f"one, here of {self.extents[0]}"
        advice = (
            "cut it as the module splits it, or"
            if several
            else "its style is Colwise(parts=...), with the number or the extents of the fused outputs, or"
        )
        raise InvalidArgumentError(
            f"parallelize: rank {self.rank} got {self.name}, whose {self.total} outputs are cut as {how}, but {saw}, "
            f"expected {expected}; {advice} 'colwise_gather_output' with 'rowwise_split_input' for the layer behind"
        )


class _WatchedOutput(torch.Tensor):
    """The outputs of a layer, sharded along a dimension, until another tensor is computed from them."""

    _sharding: OutputSharding | None = None
    _dim = -1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        x: Any = args[0] if args else given.get("input", given.get("tensors"))
        sharding, name = _sharding_of(x), getattr(func, "__name__", "")
        is_last = sharding is not None and x._dim == -1
        if sharding is not None and name in _SPLITS and is_last:
            ends, step = _SPLITS[name](x, *args[1:], **{key: each for key, each in given.items() if key != "input"})
            sharding.check_ends(name.strip("_"), ends, step)
        if sharding is not None and _mixes(name, x, args[1:], given):
            sharding.refuse_mixed(name.removeprefix("linalg_"))
        if name in _JOINS and _holds_outputs(x[0], given.get("dim", args[1] if len(args) > 1 else 0)):
            joined = next((each for each in map(_sharding_of, x) if each is not None), None)
            if joined is not None:  # the next layer is sharded as if all inputs were concatenated before
                joined.refuse_mixed(name, "joins others to them")
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **given)
        if sharding is None or type(made) not in (torch.Tensor, _WatchedOutput):
            return made
        if name in _MOVES:
            return sharding.watch(made, at) if (at := _place_in(x, made)) is not None else made
        if name in VIEWS:
            if not is_last:
                return made
            asked = _factors(name, x, made, args[1:], given)
            if len(asked) > 1:
                sharding.check_factors(name, asked)
            return sharding.watch(made) if len(asked) == 1 and made.dim() <= x.dim() else made
        return sharding.watch(made, x._dim) if name in KEEPS and made.shape == x.shape else made


def _sharding_of(x: Any) -> OutputSharding | None:
    """Returns how a watched tensor is sharded; None for anything else."""
    return x._sharding if isinstance(x, _WatchedOutput) else None


def _place_in(x: torch.Tensor, made: torch.Tensor) -> int | None:
    """Returns the dimension of the outputs in what was made of a watched tensor: the one with their number and, in
    memory, their distance; None: there is none, or there are several."""
    with torch._C.DisableTorchFunctionSubclass():
        wanted = x.shape[x._dim], x.stride(x._dim)
        if wanted[0] < 2:
            return None
        places = [dim for dim in range(made.dim()) if (made.shape[dim], made.stride(dim)) == wanted]
    return places[0] if len(places) == 1 else None


def unwatched(x: torch.Tensor) -> torch.Tensor:
    """Returns a watched tensor as a plain one, for code that knows how the layer's outputs were sharded."""
    if type(x) is not _WatchedOutput:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _factors(
    name: str, x: torch.Tensor, made: torch.Tensor, args: Sequence[Any], given: Mapping[str, Any]
) -> list[int]:
    """Returns the factors into which a view splits the last dimension; empty where it changes more than that, or is
    unknown."""
    length, count = x.shape[-1], 1
    while count <= made.dim() and math.prod(made.shape[-count:]) < length:
        count += 1
    if math.prod(made.shape[-count:]) != length:
        return []
    last = args[-1] if args else given.get("sizes", given.get("shape", given.get("size")))
    asked = list(last) if isinstance(last, (tuple, list)) else [*args]
    if name != "unflatten" and len(asked) != made.dim():
        return []
    found = asked[-count:]
    return [found[0], *made.shape[1 - count :]] if count > 1 else found


# ---- where functions split the last dimension ----------------------------------------------------------------------

_MIXES = {
    **dict.fromkeys(("mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "softmax", "log_softmax"), (1, None)),
    **dict.fromkeys(("logsumexp", "amax", "amin", "max", "min", "argmax", "argmin", "cumsum", "cumprod"), (1, None)),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp", "median", "nanmedian", "nansum", "nanmean"), (1, None)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "quantile", "roll"), (2, None)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "flip": (1, ()),
    **dict.fromkeys(("topk", "kthvalue", "diff", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (2, -1)),
    "gumbel_softmax": (4, -1),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), (9, -1)),
    **dict.fromkeys(("cdist", "inner", "pairwise_distance", "linalg_vecdot"), (9, -1)),
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_max_pool1d", "adaptive_avg_pool1d"), (9, -1)),
    **dict.fromkeys(("cross_entropy", "nll_loss"), (9, 1)),
    **dict.fromkeys(("gather", "take_along_dim"), (1, None)),
    "unbind": (1, 0),
}
"""Functions over a dimension: the dimension's place among the arguments, and its default; None: all dimensions."""
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy"}
_LOSSES |= {"binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss"}
"""Functions that reduce all dimensions unless they are told not to."""


def _mixes(name: str, x: torch.Tensor, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Returns whether a function reduces, or mixes elements, along the dimension of the outputs."""
    if name in _LOSSES:
        return given.get("reduction", "mean") != "none"
    if name not in _MIXES:
        return False
    at, default = _MIXES[name]
    dims = given.get("dim", given.get("dims", given.get("axis", args[at - 1] if len(args) >= at else default)))
    if torch.is_tensor(dims):  # torch.max(x, y): the larger of two tensors
        return False
    dims = range(x.dim()) if dims is None or isinstance(dims, bool) else [dims] if isinstance(dims, int) else dims
    return any(_holds_outputs(x, dim) for dim in dims)


Ends = tuple[list[int], int]
NOWHERE: Ends = ([], 1)


def _is_last(x: torch.Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and dim % x.dim() == x.dim() - 1


def _holds_outputs(x: torch.Tensor, dim: Any) -> bool:
    place = x._dim if isinstance(x, _WatchedOutput) else -1
    return isinstance(dim, int) and dim % x.dim() == place % x.dim()


def _chunk(x: torch.Tensor, chunks: int, dim: int = 0) -> Ends:
    return _split(x, -(-x.shape[-1] // chunks), dim) if _is_last(x, dim) else NOWHERE


def _split(x: torch.Tensor, split_size: Any, dim: int = 0) -> Ends:
    if not _is_last(x, dim):
        return NOWHERE
    if isinstance(split_size, int):
        return [*range(0, x.shape[-1], max(split_size, 1))], 1
    return [*accumulate(split_size)], 1


def _sections(x: torch.Tensor, split_size_or_sections: Any = None, dim: int = 0, split_size: Any = None) -> Ends:
    return _split(x, split_size if split_size_or_sections is None else split_size_or_sections, dim)


def _tensor_split(x: torch.Tensor, where: Any = None, dim: int = 0, sections: Any = None, indices: Any = None) -> Ends:
    where = next((each for each in (where, sections, indices) if each is not None), None)
    if not _is_last(x, dim) or torch.is_tensor(where):
        return NOWHERE
    return _chunk(x, where, dim) if isinstance(where, int) else ([*where], 1)


def _narrow(x: torch.Tensor, dim: int, start: Any, length: int) -> Ends:
    return ([int(start), int(start) + length], 1) if _is_last(x, dim) else NOWHERE


def _glu(x: torch.Tensor, dim: int = -1) -> Ends:
    return _chunk(x, 2, dim)


def _hsplit(x: torch.Tensor, where: Any) -> Ends:
    return _tensor_split(x, where, min(1, x.dim() - 1))


def _getitem(x: torch.Tensor, index: Any) -> Ends:
    index = index if isinstance(index, tuple) else (index,)
    known = all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index)
    used = [each for each in index if each is not None]
    if not known or not used or not (Ellipsis in used or len(used) == x.dim()) or not isinstance(used[-1], slice):
        return NOWHERE
    last, length = used[-1], x.shape[-1]
    first, end, step = last.indices(length)
    if last.stop is not None and length < last.stop < 1 << 31:  # counted in all ranks' outputs, not this rank's
        end = last.stop
    return ([first if step == 1 else 0, end], step)


_SPLITS: dict[str, Any] = {
    "chunk": _chunk, "split": _sections, "split_with_sizes": _sections, "tensor_split": _tensor_split,
    "unsafe_chunk": _chunk, "unsafe_split": _sections, "hsplit": _hsplit, "glu": _glu,
    "narrow": _narrow, "__getitem__": _getitem,
}  # fmt: skip
