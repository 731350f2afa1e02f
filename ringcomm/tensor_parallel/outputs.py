"""Watches the first forward pass of a sharded layer, and refuses code that splits the layer's outputs at other places
than the shards do."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from ringcomm.errors import InvalidArgumentError, user_stacklevel

_ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
KEEPS = {
    "contiguous", "clone", "to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as", "cpu",
    "cuda", "detach", "alias", "positive", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide",
    "floor_divide", "remainder", "fmod", "rsub", "pow", "float_power", "neg", "negative", "abs", "absolute", "square",
    "sqrt", "rsqrt", "reciprocal", "sign", "sgn", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "xlogy",
    "erf", "erfc", "erfinv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "arctan2", "sinh", "cosh", "asinh",
    "acosh", "atanh", "sinc", "floor", "ceil", "round", "trunc", "fix", "frac", "lerp", "addcmul", "addcdiv", "hypot",
    "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "fmax", "fmin", "where", "masked_fill", "copysign",
    "nan_to_num", "logaddexp", "threshold", "dropout", "alpha_dropout", "feature_alpha_dropout", "gelu", "silu", "relu",
    "relu6", "elu", "selu", "celu", "leaky_relu", "prelu", "rrelu", "softplus", "softsign", "softshrink", "hardshrink",
    "tanhshrink", "mish", "hardswish", "hardsigmoid", "hardtanh", "logsigmoid", "tanh", "sigmoid", "expit", "logit",
    "gt", "greater", "ge", "greater_equal", "lt", "less", "le", "less_equal", "eq", "ne", "not_equal", "logical_and",
    "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor",
    "requires_grad",
    *(f"{kind}{each}" for each in _ARITHMETIC for kind in ("", "r", "i")),
}  # fmt: skip
"""Functions whose result has the same outputs in the same places, without the underscores of their names. Tests for NaN
and infinity are left out: a program that stops at a NaN stops if any rank has one."""
_READS = {
    "numpy", "tolist", "item", "__array__", "__dlpack__", "__float__", "__int__", "__bool__", "__index__",
    "__complex__", "__contains__",
}  # fmt: skip
"""Functions that return values to Python or another library, where nothing watches them."""
VIEWS = ("view", "reshape", "unflatten")
_MOVES = {
    "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "select", "narrow", "getitem", "index_select",
    "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "get", "t", "adjoint",
}  # fmt: skip
"""Functions that may take rows or change the order of dimensions. (`get` is that of `x.mT`.)"""
PADS = ("pad", "constant_pad_nd")
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
        watched: the gradient modes in which an output has been watched: the first output with gradients, and the first
            one without. Emptied by an error, so that the next output is watched, too.
        has_grad: whether the output that is watched has a gradient; those of a frozen layer may have none.
        is_detached: whether the program has detached the outputs.
    """

    name: str
    rank: int
    extents: tuple[int, ...]
    total: int
    divided: frozenset[int]
    width: int = 1
    watched: set[bool] = field(default_factory=set)
    has_grad: bool = False
    is_detached: bool = False

    def watch_first(self, y: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output; `watch` watches the first one, and the first one with gradients."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() in self.watched:
            return y
        self.watched.add(torch.is_grad_enabled())
        self.has_grad = y.requires_grad
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

    def check_ends(self, function: str, ends: Iterable[int], step: int, start: int | None = None) -> None:
        """Refuses ends of slices that are not ends of the rank's parts.

        Args:
            ends: the ends that the program names, without ends that it leaves out.
            step: the distance of one output to the next. A step above 1 takes interleaved outputs, which stay together
                only if they were sharded as one part of a multiple of the step.
            start: where a slice begins, if the program names that. A slice that begins at the end of the rank's
                outputs, or as many before it, is meant for all ranks' outputs.
        """
        width = sum(self.extents)
        wrong = sorted({*ends} - {0, *accumulate(self.extents)})
        if width < self.total and start in (width, -width):
            wrong = [start]
        if not wrong and (step == 1 or (len(self.extents) == 1 and width % step == 0)):
            return
        where = f"at {wrong[0]}" if wrong else f"in steps of {step}"
        if len(self.extents) > 1:
            self._refuse(f"{function} splits the outputs {where}", "the ends of the rank's parts")
        self._refuse(f"{function} splits the outputs {where}", "a layer whose outputs are not fused")

    def check_factors(self, function: str, asked: Sequence[int]) -> None:
        """Refuses a view that splits the outputs in another order than the shards do. For one part the first factor
        must be the number of the rank's heads, for fused parts the number of parts."""
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
        raise InvalidArgumentError(
            f"parallelize: rank {self.rank} got {self.name}, whose {self.total} outputs are cut, here "
            f"{sum(self.extents)}, but {function} {does}, expected element-wise functions, or functions within a head; "
            "cut it as 'colwise_gather_output', with 'rowwise_split_input' for the next layer, or leave both out of "
            "the plan"
        )

    def refuse_unsummed(self, function: str) -> None:
        """Refuses a function of the outputs and of a tensor that every rank has in full, and whose gradient nothing
        sums over the ranks."""
        raise InvalidArgumentError(
            f"parallelize: rank {self.rank} got {function} of outputs of {self.name}, which are cut, here "
            f"{sum(self.extents)} of {self.total}, and of a tensor that a layer cut along its inputs has added up, "
            "expected its gradient to be summed over the ranks; first pass that tensor through "
            "ringcomm.tensor_parallel.f, or cut the layer of the outputs as 'colwise_gather_output', with "
            "'rowwise_split_input' for the next layer"
        )

    def _refuse(self, saw: str, expected: str) -> None:
        several = len(self.extents) > 1
        how = f"parts, here of {list(self.extents)}" if several else f"one, here of {self.extents[0]}"
        advice = (
            "cut it as the module splits it, or"
            if several
            else "its style is Colwise(parts=...), with the number or the extents of the fused outputs, or"
        )
        raise InvalidArgumentError(
            f"parallelize: rank {self.rank} got {self.name}, whose {self.total} outputs are cut as {how}, but {saw}, "
            f"expected {expected}; {advice} 'colwise_gather_output' with 'rowwise_split_input' for the next layer"
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
        sharding, called = _sharding_of(x), getattr(func, "__name__", "")
        name = called.strip("_").removesuffix("_copy")
        ours = is_ours(sys._getframe(1))
        if not ours:
            with _refusing(args, given):
                _check(called, name, x, args, given)
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **given)
        if type(made) not in (torch.Tensor, _WatchedOutput):
            return made
        if name in ("getitem", "select") and made.dim() == 0 and made.requires_grad and sharding is not None:
            made.register_hook(partial(_refuse_number, sharding, called))
        if name in KEEPS or func == torch.Tensor.data.__get__:
            given_outputs = [each for each in (*args, *given.values()) if isinstance(each, _WatchedOutput)]
            kept = next((each for each in given_outputs if each.shape == made.shape), None)
            if kept is None or kept._sharding is None:
                return made
            detaches = name == "detach" or func == torch.Tensor.data.__get__
            return (replace(kept._sharding, is_detached=True) if detaches else kept._sharding).watch(made, kept._dim)
        if sharding is None:
            return made
        if name in _MOVES:
            return sharding.watch(made, at) if (at := _place_in(x, made)) is not None else made
        if name in PADS:
            return sharding.watch(made, x._dim)
        if name in VIEWS:
            if x._dim != -1:
                return made
            asked = _factors(name, x, made, args[1:], given)
            if len(asked) > 1 and not ours:
                with _refusing(args, given):
                    sharding.check_factors(name, asked)
            return sharding.watch(made) if len(asked) == 1 and made.dim() <= x.dim() else made
        return made


def _refuse_number(sharding: OutputSharding, function: str, grad: torch.Tensor) -> None:
    """Refuses, in backward, the gradient of a single output. Programs may print such a number, but a loss must not
    depend on it, because it is a different output on each rank."""
    sharding.watched.clear()
    sharding.refuse_mixed(function.strip("_"), "takes a single number that the loss depends on")


@contextmanager
def _refusing(*given: Any) -> Iterator[None]:
    """Raises the block's errors about the outputs among ``given`` if the loss may depend on the result. Else it only
    warns, because the program may log the result: for outputs that were detached or have otherwise lost their gradient,
    and for outputs without a gradient after forward."""
    try:
        yield
    except InvalidArgumentError as error:
        x = next(each for each in tree_leaves(given) if _sharding_of(each) is not None)
        logs = x._sharding.has_grad or x._sharding.is_detached
        if x.requires_grad or (not logs and _in_forward(sys._getframe(1))):
            x._sharding.watched.clear()
            raise
        warnings.warn(f"{error}; this is right if the rank's own outputs are meant", stacklevel=user_stacklevel())


def _check(called: str, name: str, x: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuses a function of torch whose result with a rank's outputs differs from that with all outputs.

    Args:
        called, name: the function's name, and the same without underscores.
        x: the first argument.
    """
    sharding = _sharding_of(x)
    if sharding is not None and name in _SPLITS and x._dim == -1:
        found = _SPLITS[name](x, *args[1:], **{key: each for key, each in given.items() if key != "input"})
        if found is None:
            sharding.refuse_mixed(name, "takes single outputs")
        sharding.check_ends(name, *found)
    operand = next((each for each in (x, *args[1:2], *given.values()) if isinstance(each, _WatchedOutput)), None)
    owner = _sharding_of(operand)
    if owner is not None and _mixes(name.removeprefix("special_"), operand, args[1:], given):
        owner.refuse_mixed(name.removeprefix("linalg_").removeprefix("special_"))
    if owner is not None and name in KEEPS and torch.is_grad_enabled():
        others = [each for each in (*args, *given.values()) if torch.is_tensor(each) and _sharding_of(each) is None]
        if any(map(_loses_gradients, others)):
            owner.refuse_unsummed(name)
    if owner is not None and called in _READS and _in_forward(sys._getframe(2)):
        owner.refuse_mixed(name.strip("_"), "reads the values of this rank's outputs")
    if sharding is not None and _moves(name, x, args[1:], given):
        sharding.refuse_mixed(name, "moves them")
    dim = given.get("dim", args[1] if len(args) > 1 else 0)
    if name in _JOINS and isinstance(x, (list, tuple)) and x and _holds_outputs(x[0], dim):
        joined = next((each for each in map(_sharding_of, x) if each is not None), None)
        if joined is not None:  # the next layer is sharded as if all inputs were concatenated before
            joined.refuse_mixed(name, "joins others to them")


def _loses_gradients(x: torch.Tensor) -> bool:
    """Returns whether the gradient of a tensor reaches the backward of `f_bar` or `gather`, which expects equal
    gradients on all ranks, without passing the backward of `f` or `g`, which sums it over the ranks."""
    nodes, seen = [x.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        backward_op = getattr(node, "backward_op", None)  # set by the operators of `group`
        if backward_op in ("identity", "own"):
            return True
        if not backward_op and not isinstance(node, BackwardCFunction):  # a Function of the program may sum over ranks
            nodes += [each for each, _ in node.next_functions]
    return False


def is_ours(frame: Any) -> bool:
    """Returns whether code of ringcomm calls a function of torch directly, not through a module of torch."""
    while frame is not None:
        watches = frame.f_code.co_name == "__torch_function__"  # passes on a call that other code made
        if not watches and not frame.f_globals.get("__name__", "").startswith("torch."):
            return frame.f_globals.get("__name__", "").startswith("ringcomm.")
        if frame.f_code.co_name == "_call_impl":
            return False
        frame = frame.f_back
    return False


def _in_forward(frame: Any) -> bool:
    """Returns whether the caller is a module's forward, which may compute with the values that it reads."""
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame is not None


def _moves(name: str, x: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Returns whether a function pads or repeats the outputs, or merges their dimension with the dimensions before it,
    so that a rank's outputs of one row are followed by its outputs of the next."""
    if name in PADS:
        pad = list(given.get("pad", args[0] if args else ()))
        at = 2 * (-1 - x._dim)
        return any(pad[at : at + 2])
    if name in ("repeat", "tile"):
        counts = given.get("repeats", given.get("dims", args))
        counts = counts[0] if counts and isinstance(counts[0], (list, tuple)) else counts
        return len(counts) >= -x._dim and counts[x._dim] != 1
    if name not in ("flatten", "ravel", *VIEWS) or x._dim != -1 or x.numel() == x.shape[-1]:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        try:
            made = getattr(x, name)(*args, **given)
        except (RuntimeError, TypeError):  # the call itself raises it
            return False
    return made.numel() > 0 and _width(made, x.shape[-1]) is None


def _width(made: torch.Tensor, length: int) -> int | None:
    """Returns how many last dimensions have ``length`` elements together; None if there is no such number."""
    count = 1
    while count < made.dim() and math.prod(made.shape[-count:]) < length:
        count += 1
    return count if math.prod(made.shape[-count:]) == length else None


def _sharding_of(x: Any) -> OutputSharding | None:
    """Returns how a watched tensor is sharded; None for anything else."""
    return x._sharding if isinstance(x, _WatchedOutput) else None


def _place_in(x: torch.Tensor, made: torch.Tensor) -> int | None:
    """Returns the dimension of the outputs in ``made``, a result from a watched tensor: the dimension with the outputs'
    number and stride; None if there is none, or there are several."""
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
    """Returns the factors into which a view splits the last dimension; empty if it changes more than that, or is
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

_LAST_TWO = (
    "diag", "diagflat", "diag_embed", "diagonal", "fill_diagonal", "tril", "triu", "rot90", "trace", "cov", "corrcoef",
    "linalg_diagonal", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d", "lp_pool2d",
    "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2", "qr", "svd", "lu", "geqrf",
    "pinverse", "svd_lowrank", "pca_lowrank", "linalg_qr", "linalg_svd", "linalg_svdvals", "linalg_lu",
    "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_pinv", "linalg_cond", "linalg_matrix_norm",
    "linalg_matrix_rank", "linalg_lstsq", "linalg_inv", "linalg_det", "linalg_slogdet", "linalg_eigh", "linalg_solve",
)  # fmt: skip
_ALL = (
    "nonzero", "argwhere", "masked_select", "take", "unique", "unique_consecutive", "histc", "histogram", "histogramdd",
    "bincount", "kron", "block_diag", "dist", "trapezoid", "trapz", "cumulative_trapezoid", "gradient", "hash_tensor",
    "resize", "nuclear_norm", "norm_except_dim", "sum_to_size", "renorm", "channel_shuffle", "local_response_norm",
)  # fmt: skip
_MIXES = {
    **dict.fromkeys(_LAST_TWO, (99, (-2, -1))),
    **dict.fromkeys(_ALL, (99, None)),
    **dict.fromkeys(("mean", "sum", "prod", "std", "var", "std_mean", "var_mean", "softmax", "log_softmax"), (1, None)),
    **dict.fromkeys(("logsumexp", "amax", "amin", "max", "min", "argmax", "argmin", "cumsum", "cumprod"), (1, None)),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp", "median", "nanmedian", "nansum", "nanmean"), (1, None)),
    **dict.fromkeys(("all", "any", "aminmax", "count_nonzero", "softmin", "frobenius_norm"), (1, None)),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
    **dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn"), (2, None)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "quantile", "roll"), (2, None)),
    **dict.fromkeys(("nanquantile", "repeat_interleave"), (2, None)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    "msort": (99, 0),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "flip": (1, ()),
    "fliplr": (99, 1),
    "flipud": (99, 0),
    **dict.fromkeys(("topk", "kthvalue", "diff", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (2, -1)),
    **dict.fromkeys(("fft_hfft", "fft_ihfft"), (2, -1)),
    "gumbel_softmax": (4, -1),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), (9, -1)),
    **dict.fromkeys(("cdist", "pdist", "inner", "pairwise_distance", "linalg_vecdot", "linalg_vander"), (9, -1)),
    **dict.fromkeys(("cosine_embedding_loss", "triplet_margin_loss", "multinomial", "searchsorted"), (9, -1)),
    **dict.fromkeys(("multilabel_soft_margin_loss", "multilabel_margin_loss", "multi_margin_loss"), (9, -1)),
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_max_pool1d", "adaptive_avg_pool1d", "lp_pool1d"), (9, -1)),
    **dict.fromkeys(("max_pool1d_with_indices", "adaptive_max_pool1d_with_indices", "interpolate"), (9, -1)),
    **dict.fromkeys(("cross_entropy", "nll_loss"), (9, 1)),
    **dict.fromkeys(("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce"), (1, None)),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce", "unfold"), (1, None)),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (2, 0)),
    "unbind": (1, 0),
}
"""Functions over a dimension: the dimension's place among the arguments, and its default; None: all dimensions. Their
names have no underscores at the ends."""
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy"}
_LOSSES |= {"binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss"}
_LOSSES |= {"hinge_embedding_loss", "margin_ranking_loss"}
"""Functions that reduce all dimensions unless they are told not to."""


def _mixes(name: str, x: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Returns whether a function reduces, or mixes elements, along the dimension of the outputs."""
    if name == "where" and not args and not given.keys() - {"condition"}:  # where(x): the indices of nonzero values
        return True
    if name in _LOSSES:
        return given.get("reduction", "mean") != "none"
    if name not in _MIXES:
        return False
    at, default = _MIXES[name]
    asked = next((given[key] for key in ("dim", "dims", "axis", "dimension") if given.get(key) is not None), None)
    dims = (args[at - 1] if len(args) >= at else default) if asked is None else asked
    if torch.is_tensor(dims):  # torch.max(x, y): the larger of two tensors
        return False
    dims = range(x.dim()) if dims is None or isinstance(dims, bool) else [dims] if isinstance(dims, int) else dims
    return any(_holds_outputs(x, dim) for dim in dims)


Ends = tuple[list[int], int] | tuple[list[int], int, int | None]
"""The arguments of `OutputSharding.check_ends`."""
NOWHERE: Ends = ([], 1)


def _is_last(x: torch.Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and dim % x.dim() == x.dim() - 1


def _holds_outputs(x: torch.Tensor, dim: Any) -> bool:
    place = x._dim if isinstance(x, _WatchedOutput) else -1
    return isinstance(dim, int) and dim % x.dim() == place % x.dim()


def _chunk(x: torch.Tensor, chunks: int, dim: int = 0) -> Ends:
    return _split(x, -(-x.shape[-1] // chunks), dim) if _is_last(x, dim) and chunks > 1 else NOWHERE


def _split(x: torch.Tensor, split_size: Any, dim: int = 0) -> Ends:
    if not _is_last(x, dim):
        return NOWHERE
    if isinstance(split_size, int):
        return [*range(0, x.shape[-1], max(split_size, 1)), *([split_size] if split_size >= x.shape[-1] else [])], 1
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


def _slice(x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Ends | None:
    return _getitem(x, (Ellipsis, slice(start, end, step))) if _is_last(x, dim) else NOWHERE


def _glu(x: torch.Tensor, dim: int = -1) -> Ends:
    return _chunk(x, 2, dim)


def _hsplit(x: torch.Tensor, where: Any) -> Ends:
    return _tensor_split(x, where, min(1, x.dim() - 1))


def _getitem(x: torch.Tensor, index: Any, value: Any = None) -> Ends | None:
    """Returns where an index splits the outputs; None: it takes single ones."""
    index = index if isinstance(index, tuple) else (index,)
    used = [each for each in index if each is not None]
    if not used or not all(each is Ellipsis or type(each) in (int, slice) for each in used):
        masks = [each for each in used if torch.is_tensor(each) and each.dtype == torch.bool]
        one_value = value is not None and not getattr(value, "shape", ())  # assigned to each output that a mask takes
        return None if any(each.dim() == x.dim() for each in masks) and not one_value else NOWHERE
    if not (any(each is Ellipsis for each in used) or len(used) == x.dim()) or used[-1] is Ellipsis:
        return NOWHERE
    last, length = used[-1], x.shape[-1]
    if isinstance(last, int):  # one number of a batch may be for printing; `_refuse_number` looks at backward
        return NOWHERE if x.dim() > 1 and all(type(each) is int for each in used) else None
    first, end, step = last.indices(length)
    if last.stop is not None and length < last.stop < 1 << 31:  # counted in all ranks' outputs, not this rank's
        end = last.stop
    ends = [] if last.stop is None else [end]
    return ([first if step == 1 or first >= step else 0, *ends], step, last.start)


def _select(x: torch.Tensor, dim: int = 0, index: int = 0) -> Ends | None:
    return None if _is_last(x, dim) else NOWHERE


_SPLITS: dict[str, Any] = {
    "chunk": _chunk, "split": _sections, "split_with_sizes": _sections, "tensor_split": _tensor_split,
    "unsafe_chunk": _chunk, "unsafe_split": _sections, "hsplit": _hsplit, "glu": _glu,
    "narrow": _narrow, "getitem": _getitem, "setitem": _getitem, "select": _select, "slice": _slice,
}  # fmt: skip
