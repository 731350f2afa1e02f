"""The mode of torch in which torch's own attention is ring attention."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.comm.communicator import Communicator
from ringcomm.context.attention import cached_attention, num_calls, ring_attention
from ringcomm.context.sequence import MOST_LENGTHS, parts_of, places
from ringcomm.errors import InvalidArgumentError, ShapeError, UnsupportedError
from ringcomm.modules.dynamo import eager

CALL = "context_parallel"
_BACKWARD = {torch.Tensor.backward: "gradient", torch.autograd.backward: "grad_tensors"}
"""Functions that run backward, and the names of their arguments for the gradients of the outputs."""
_LAYERS = {F.linear, torch.addmm}
_SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_PICKS = {torch.index_select: 2, torch.Tensor.index_select: 2, torch.Tensor.__getitem__: 1}
"""Functions that take rows of a table, and the index of the argument with the row numbers."""
_ANGLES = {
    **dict.fromkeys((torch.cos, torch.sin, torch.Tensor.cos, torch.Tensor.sin), 0),
    torch.polar: 1,
}
"""Functions that take angles, and the index of the argument with the angles."""
_MOVES = {
    **dict.fromkeys(("cumsum", "logcumsumexp"), "running sums"),
    "cumprod": "running products",
    **dict.fromkeys(("cummax", "cummin"), "running extremes"),
    "roll": "tokens shifted",
}
_ORDERS = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "gumbel_softmax"), "a softmax"),
    "topk": "a choice",
    "sort": "an order",
    "argsort": "an order",
    "normalize": "a norm",
    "diff": "differences",
    "flip": "the reverse order",
}
"""Functions whose result at a token depends on the other tokens, if they work along the sequence."""
_SUMS = {"mean", "sum", "nanmean", "nansum"}
_POOLS = {
    *("amax", "amin", "aminmax", "max", "min", "logsumexp", "std", "var", "std_mean", "var_mean", "prod"),
    *("median", "nanmedian", "quantile", "nanquantile", "kthvalue", "mode", "cosine_similarity"),
    *("norm", "linalg_norm", "linalg_vector_norm", "frobenius_norm"),
    *("adaptive_avg_pool1d", "adaptive_max_pool1d", "adaptive_max_pool1d_with_indices"),
}
"""Functions that leave one result per sequence, if they work along the sequence; a loss may take sums in steps."""
_TAKES = {"select", "narrow", "index_select", "gather", "take_along_dim", "unbind", "split"}
"""Functions that may take single tokens, if they work along the sequence."""
_WINDOWS = {"avg_pool1d": 1, "max_pool1d": 1, "max_pool1d_with_indices": 1, "lp_pool1d": 2}
"""Functions of windows of the last dimension, and the index of the argument with the window's length."""
_DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("roll", "norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile"), (2, ())),
    **dict.fromkeys(("kthvalue", "diff", "topk"), (2, -1)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_max_pool1d", "adaptive_max_pool1d_with_indices"), (9, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "gumbel_softmax": (4, -1),
    "take_along_dim": (2, ()),
    "split": (2, 0),
    "unbind": (1, 0),
}
"""The index of a function's argument with the dimension, and its default, if they are not 1 and None."""
_NORMS = {
    F.group_norm: "a group norm",
    F.instance_norm: "an instance norm",
    F.batch_norm: "a batch norm",
    F.layer_norm: "a layer norm",
    F.rms_norm: "an RMS norm",
}
_CONVOLUTIONS = {torch.conv1d, torch.conv_transpose1d}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}

_OF_SEQUENCES = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
"""Ends of the names of transformers' models that return one result per sequence, computed from one token."""
_WITH_LABELS = ("transformers.loss.", "transformers.models.", "transformers.modeling_layers")
"""Modules in which transformers computes losses from the labels given to a model."""


# ---- masks -------------------------------------------------------------------------------------------------------


class MaskRule(NamedTuple):
    """Which keys a query sees; a mask carries it in place of values.

    Attributes:
        window: see `ring_attention`.
        key_mask: (B, keys), boolean; None: all.
        part: with a cache, how many of the keys belong to this rank's part; every rank has the other ones. None: no
            cache.
    """

    causal: bool
    window: int | None = None
    key_mask: torch.Tensor | None = None
    part: int | None = None


CURRENT = threading.local()
"""``CURRENT.mode`` is the thread's mode."""


def current() -> ContextParallelMode | None:
    """Returns the mode of the innermost context of this thread; None outside of all contexts."""
    return getattr(CURRENT, "mode", None)


def with_rule(rule: MaskRule, *shape: int, device: Any) -> torch.Tensor:
    """Returns a mask of this shape that takes no memory. Its views carry the rule, too; tensors computed from it do
    not."""
    mask = torch.ones((), dtype=torch.bool, device=device)
    mask.untyped_storage().ringcomm_rule = rule
    return mask.expand(shape)


def rule_of(mask: torch.Tensor) -> MaskRule | None:
    """Returns the rule that `with_rule` gave the mask."""
    return getattr(mask.untyped_storage(), "ringcomm_rule", None)


def has_transformers() -> bool:
    """Returns whether there can be models of transformers."""
    return "transformers.modeling_utils" in sys.modules


def makes_rules() -> bool:
    """Returns whether transformers makes masks that carry a `MaskRule` (`huggingface.install`)."""
    if not has_transformers():
        return False
    from transformers import masking_utils

    return isinstance(masking_utils._preprocess_mask_arguments, partial)


# ---- detection ----------------------------------------------------------------------------------------------------


def _backward(tensors: Any, grads: Any = None, **options: Any) -> None:
    """Runs torch's backward with the mode on: torch disables the mode for every call with a tensor."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    edges = [get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in roots]  # edges are no tensors
    torch.autograd.backward(edges, grads, **options)


def _self_of(frame: Any) -> Any:
    """Returns what a frame calls ``self``. The locals of other frames are not read: Python would keep all of their
    values, such as the last step's logits, until it reads them again."""
    code = frame.f_code
    return frame.f_locals.get("self") if "self" in code.co_varnames or "self" in code.co_freevars else None


def _modules() -> list[torch.nn.Module]:
    """Returns the modules whose forward is running, the innermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        own = _self_of(frame)
        if isinstance(own, torch.nn.Module):
            found.append(own)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _module() -> str:
    """Returns the name of the innermost module whose forward is running, within the outermost one."""
    found = _modules()
    if not found:
        return "a function"
    names = (name for name, each in found[-1].named_modules() if each is found[0])
    return f"{next(names, '') or 'the model'} ({type(found[0]).__name__})"


def _shifts_labels(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Returns whether a loss of transformers shifts its labels against the tokens that predict them."""
    if not args or not isinstance(args[0], torch.Tensor) or args[0].is_floating_point() or args[0].dim() > 2:
        return False
    if func is F.pad:
        pad = args[1] if len(args) > 1 else options["pad"]
        moved = pad[0] == 0 and pad[1] > 0
    else:
        at = args[1][-1] if isinstance(args[1], tuple) and args[1] else None
        moved = isinstance(at, slice) and at.start == 1 and at.stop is None
    return moved and _transformers_locals().get("labels") is args[0]


def _transformers_locals() -> dict[str, Any]:
    """Returns the local variables of the function that called torch, if it is a loss of transformers."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "ringcomm"):
        frame = frame.f_back
    return frame.f_locals if frame.f_globals.get("__name__", "").startswith(_WITH_LABELS) else {}


def _at(x: torch.Tensor, at: Any, dim: int) -> Any:
    """Returns the part of an index of (B, S, D), in any order, that selects tokens, in dimension ``dim``, if the index
    takes the whole batch, and features by a slice or a number; else None."""
    index = [each for each in (at if isinstance(at, tuple) else (at,)) if each is not None]
    where = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
    index[where : where + 1] = [slice(None)] * (x.dim() - len(index) + (where < len(index)))
    if len(index) != x.dim():
        return None
    batch, features = [*index[:dim], *index[dim + 1 :]]
    takes_batch = isinstance(batch, slice) and batch == slice(None)
    return index[dim] if takes_batch and isinstance(features, (int, slice)) else None


def _picks_token(x: torch.Tensor, at: Any, dim: int) -> bool:
    """Returns whether an index takes one token of every sequence: the same place in all, or a place for each."""
    place = _at(x, at, dim)
    if isinstance(place, (int, list)):
        return isinstance(place, int) or len(place) == 1
    if isinstance(place, slice):
        return place.indices(x.shape[dim]) in ((0, 1, 1), (x.shape[dim] - 1, x.shape[dim], 1))
    if dim != 1 or not isinstance(at, tuple) or len(at) < 2:
        return False
    rows, place, *rest = at
    if not isinstance(rows, torch.Tensor) or rows.shape != x.shape[:1] or rows.is_floating_point():
        return False
    if not all(isinstance(each, slice) and each == slice(None) for each in rest):
        return False
    one = place.shape == rows.shape if isinstance(place, torch.Tensor) else isinstance(place, int)
    return one and torch.equal(rows, torch.arange(len(rows), device=rows.device))


def _drops_token(x: torch.Tensor, at: Any, dim: int) -> bool:
    """Returns whether an index takes all tokens but the first or last one, as programs shift tokens."""
    place = _at(x, at, dim)
    length = x.shape[dim]
    return isinstance(place, slice) and place.indices(length) in ((1, length, 1), (0, length - 1, 1))


def _reaches(roots: Any) -> str | None:
    """Returns the note of a node of autograd (`_note_pick`) that a backward pass from the roots reaches; else None."""
    roots = [roots] if isinstance(roots, (torch.Tensor, GradientEdge)) else roots
    edges = [get_gradient_edge(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in roots]
    ahead = [edge.node for edge in edges if isinstance(edge, GradientEdge)]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if CALL in node.metadata:
            return str(node.metadata[CALL])
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        ahead += new
    return None


def _is_own_table(x: Any) -> bool:
    """Returns whether a tensor is a two-dimensional parameter or buffer of the module whose forward is running."""
    own = _self_of(sys._getframe(2)) if x.dim() == 2 else None
    return isinstance(own, torch.nn.Module) and any(x is y for y in (*own.buffers(False), *own.parameters(False)))


def _ramps(x: Any) -> Iterator[int]:
    """Yields the lengths of dimensions along which a tensor is 0, 1, 2, ... times a step, as angles of positions
    are."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.requires_grad or not x.numel():
        return
    for dim, length in enumerate(x.shape):
        if length > 2 and not x.narrow(dim, 0, 1).any():
            step, shape = x.narrow(dim, 1, 1), [-1 if each == dim else 1 for each in range(x.dim())]
            expected = step * torch.arange(length, dtype=x.dtype, device=x.device).view(shape)
            if step.any() and torch.allclose(x, expected, rtol=1e-2):
                yield length


def _dims(func: Any, x: torch.Tensor, args: Sequence[Any], options: Mapping[str, Any]) -> set[int]:
    """Returns the dimensions that a function works along, if it names them."""
    at, default = _DIMS.get(getattr(func, "__name__", ""), (1, ()))
    named = next((options[name] for name in ("dim", "dims", "axis") if options.get(name) is not None), default)
    dims = args[at] if len(args) > at else named
    dims = dims if isinstance(dims, (tuple, list)) else [dims]
    return {dim % x.dim() for dim in dims if isinstance(dim, int) and not isinstance(dim, bool)}


def _is_along_tokens(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Returns whether a function works along another dimension than the last one, which holds the features."""
    x = args[0] if args else options.get("input")
    if not isinstance(x, torch.Tensor) or x.dim() < 3 or not x.is_floating_point():
        return False
    return bool(_dims(func, x, args, options) - {x.dim() - 1})


def _token_letters(equation: Any, dims: Sequence[int | None]) -> tuple[set[str], str]:
    """Returns the letters of the tokens in an equation of `torch.einsum`, and those of its result.

    Args:
        dims: of the tokens in each operand, counted from the last one; None: an operand without tokens.
    """
    if not isinstance(equation, str) or "->" not in equation:
        return set(), ""
    given, _, made = equation.replace(" ", "").partition("->")
    ends = [each.rpartition("...")[2] for each in given.split(",")]
    found = {end[dim] for end, dim in zip(ends, dims, strict=True) if dim is not None and len(end) >= -dim}
    return found, made.replace("...", "")


def _rows(numbers: Any) -> torch.Tensor:
    """Returns row numbers, with concatenated sequences as one sequence per row."""
    if not isinstance(numbers, torch.Tensor) or numbers.dtype not in (torch.int64, torch.int32):
        return torch.empty(0)
    if numbers.dim() == 1 and len(numbers):
        apart = numbers != numbers[0] + torch.arange(len(numbers), device=numbers.device)
        length = int(apart.int().argmax()) or len(numbers)
        return numbers.view(-1, length) if len(numbers) % length == 0 else numbers
    return numbers


def _is_over_tokens(norm: Any, args: Sequence[Any], options: Mapping[str, Any], met: torch.Size | None) -> bool:
    """Returns whether the statistics of a norm run over the sequence, in (B, S, features), in (B, features, S), as
    convolutions have it, or in (tokens, ...).

    Args:
        met: batch and part length in the last attention.
    """
    x = args[0] if args else options.get("input")
    if not isinstance(x, torch.Tensor):
        return False
    has_token_rows = met is not None and met[1] > 1 and len(x) == met.numel()
    if x.dim() != 3 and not has_token_rows:
        return False
    if norm is F.batch_norm:
        return bool(args[5] if len(args) > 5 else options.get("training"))
    shape = args[1] if len(args) > 1 else options.get("normalized_shape", ())
    return not has_token_rows and (norm not in (F.layer_norm, F.rms_norm) or len(shape) > 1)


class ContextParallelMode(TorchFunctionMode):
    """While it is on, torch's attention is ring attention, and operations that mix tokens in other ways raise.

    Attributes:
        part: the length of this rank's part, if the last call had a cache that was filled inside the context.
        parts: these lengths by cache.
    """

    def __init__(self, comm: Communicator, layout: str, overlap: bool, local: bool) -> None:
        super().__init__()
        self.comm, self.layout, self.overlap, self.local = comm, layout, overlap, local
        self.part: int | None = None
        self.parts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._calls = num_calls()
        self._met: torch.Size | None = None  # batch and part length in the last attention
        self._has_picks = False  # whether `_note_pick` has recorded something since the last backward pass
        self._ramps: dict[int, str] = {}  # by length: where angles of positions 0, 1, ... were computed
        self._layer: str | None = None  # the module of the first layer that ran
        self._weights = WeakIdKeyDictionary()  # results of softmax, and tensors made from them

    @eager  # Dynamo then only compiles the code between torch calls
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **options)
        if func in _BACKWARD or func is torch.autograd.grad:
            self.check_attended()
            self._check_picks(args[0] if args else options.get("tensors", options.get("outputs")))
        if func in _BACKWARD and options.get("inputs") is None:
            given = options.pop(_BACKWARD[func], None)
            with self:  # checkpoints compute the attention again
                return _backward(*args, *(() if given is None else (given,)), **options)
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got nn.MultiheadAttention, which attends within a rank's part, "
                "expected scaled_dot_product_attention; project the inputs yourself and call ring_attention"
            )
        if self.local:
            return func(*args, **options)
        if func in _LAYERS and self._layer is None:
            self._layer = _module()
        self._refuse_mixing(func, args, options)
        if func in (F.pad, torch.Tensor.__getitem__) and _shifts_labels(func, args, options):
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got labels that {_module()} is to shift within a rank's part, expected "
                "labels that are shifted in the whole sequence: a piece's last label is another piece's first token; "
                "with y = F.pad(x, (0, 1), value=-100)[:, 1:] and n = (y != -100).sum(), of the whole, pass labels="
                "part(y), shift_labels=part(y) and num_items_in_batch=n and multiply the loss by the number of ranks, "
                "or pass no labels and compute the loss from the logits and part(y)"
            )
        if func is F.embedding:
            self._refuse_places(args[0] if args else options["input"])
        elif func in _PICKS and len(args) > _PICKS[func] and _is_own_table(args[0]):
            self._refuse_places(_rows(args[_PICKS[func]]))
        if func is F.cross_entropy and _transformers_locals().get("start_positions") is not None:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got a loss of places in the sequence (start_positions), expected a "
                "loss of tokens: it compares the tokens of a rank's part alone; pass no labels, and compute the loss "
                "from what ringcomm.context.gather_sequence gives of the outputs"
            )
        if func in _ANGLES and len(args) > _ANGLES[func]:
            self._ramps.update((length, _module()) for length in _ramps(args[_ANGLES[func]]))
        result = func(*args, **options)
        self._note_use(func, args, options, result)
        weights = func in _SOFTMAX or (self._weights and args and self._is_weights(args[0]))
        if weights and isinstance(result, torch.Tensor) and result.dim() > 2:
            self._weights[result] = True
        return result

    __torch_function__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]  # flex_attention always compiles
        f"{CALL} intercepts the calls of torch, and cannot do that in compiled code; call scaled_dot_product_attention "
        "or ring_attention in place of flex_attention"
    )

    def check_attended(self) -> None:
        """Raises if layers, but no attention, have been computed since the context began."""
        if self._layer is not None and self._calls == num_calls():
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got no attention to intercept since the context began, from the first "
                f"layer on, in {self._layer}, expected scaled_dot_product_attention: other ways of mixing tokens stay "
                "within a rank's part; set attn_implementation='sdpa' (transformers), call ring_attention, or pass "
                "local=True if nothing inside mixes tokens"
            )

    def _dim(self, x: Any) -> int | None:
        """Returns the dimension of the tokens in (B, S, D), (S, B, D), (B, D, S) that is a view of the first, or
        (B, heads, ...) of these, once attention has shown B and S; None: another tensor."""
        if self._met is None or not isinstance(x, torch.Tensor) or x.dim() not in (3, 4) or not x.is_floating_point():
            return None
        batch, length = self._met
        if len(x) == batch and x.shape[-1] == length and 0 < x.stride(-2) < x.stride(-1):
            return x.dim() - 1
        if len(x) == batch and x.shape[-2] == length:
            return x.dim() - 2
        return 0 if x.dim() == 3 and x.shape[:2] == (length, batch) else None

    def _is_along_part(self, func: Any, x: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Returns whether a function works along the tokens of a rank's part."""
        dim = self._dim(x)
        return dim is not None and x.dim() == 3 and dim in _dims(func, x, args, options)

    def _moves_tokens(self, func: Any, x: Any, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Returns whether a function works along the tokens; where their dimension is not known, along any but the
        last."""
        if self._dim(x) is None or x.dim() != 3:
            return _is_along_tokens(func, args, options)
        return self._is_along_part(func, x, args, options)

    def _is_across(self, func: Any, args: Sequence[Any]) -> str:
        """Returns how a product combines tokens of a rank's part with each other; empty: it does not."""
        operands = args[1:] if func is torch.einsum else args
        operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
        dims = [None if (dim := self._dim(x)) is None else dim - x.dim() for x in operands]
        if func is torch.einsum:
            letters, made = _token_letters(args[0], dims)
            is_sum, is_pair = bool(made) and bool(letters - {*made}), len(letters & {*made}) > 1
        elif getattr(func, "__name__", "") == "cdist":
            is_sum, is_pair = False, bool(dims) and None not in dims
        else:
            is_sum, is_pair = dims[-2:] in ([-1, -2], [None, -2]), dims[-2:] == [-2, -1]
        return "a sum over the tokens" if is_sum else "pairs of tokens" if is_pair else ""

    def _note_use(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        """Records a use of a part's tokens that a loss must not depend on."""
        name, x = getattr(func, "__name__", ""), args[0] if args else options.get("input", options.get("x1"))
        if self._met is None:
            return
        if func is torch.Tensor.__getitem__ and x.dim() == 3 and (dim := self._dim(x)) is not None:
            if _drops_token(x, args[1], dim):
                self._note_pick(result, f"tokens that {_module()} shifts by leaving one out of each sequence")
            elif _picks_token(x, args[1], dim):
                self._note_pick(result, f"one token of each sequence, which {_module()} takes by its place")
        elif name in _TAKES and self._is_along_part(func, x, args, options):
            taken = result[0] if isinstance(result, (tuple, list)) else result
            if taken.numel() * self._met[1] == x.numel():
                self._note_pick(taken, f"one token of each sequence, which {_module()} takes by {name}", False)
        elif (name in _SUMS or name in _POOLS) and self._is_along_part(func, x, args, options):
            self._note_pick(result, f"the {name} over the tokens of each sequence in {_module()}", name in _POOLS)
        elif (name in _PRODUCTS or name == "cdist") and (how := self._is_across(func, args)):
            self._note_pick(result, f"{how} of a part in {_module()} ({name})")

    def _note_pick(self, picked: Any, what: str, anywhere: bool = True) -> None:
        """Records in the autograd graph what a module, or with ``anywhere`` any code, made of a sequence's tokens, to
        find out in backward whether the loss depends on it. The context's next backward pass looks for the note before
        it begins (`_reaches`); any other pass is refused when it reaches the node."""
        modules, picked = _modules(), picked[0] if isinstance(picked, tuple) else picked
        if any(type(each).__name__.endswith(_OF_SEQUENCES) for each in modules):
            self._refuse_pick(what)
        if (modules or anywhere) and picked.requires_grad:
            node = get_gradient_edge(picked).node
            node.metadata[CALL], self._has_picks = what, True
            node.register_prehook(partial(self._refuse_pick, what))

    def _check_picks(self, roots: Any) -> None:
        what = _reaches(roots) if self._has_picks and roots is not None else None
        self._has_picks = False
        if what is not None:
            self._refuse_pick(what)

    def _refuse_pick(self, what: str, *_: Any) -> None:
        raise UnsupportedError(
            f"{CALL}: rank {self.comm.rank} got a loss from {what}, expected none, because every rank has the tokens "
            "of another part; call the layers before it in the context, and the rest on the result of "
            "ringcomm.context.gather_sequence, or pass local=True if that is meant"
        )

    def _is_weights(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x in self._weights

    def _weighs_tokens(self, x: Any) -> bool:
        """Returns whether a tensor has weights of tokens, with as many rows as columns. After the first attention, each
        token may have its own weights, such as weights of heads."""
        if not self._is_weights(x) or x.shape[-1] != x.shape[-2]:
            return False
        batch, length = self._met or (0, 0)
        return not batch * length or x.shape[-1] == length or x.shape[:-2].numel() % (batch * length) != 0

    def _refuse_mixing(self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        name, what, advice = getattr(func, "__name__", ""), "", "cut this model in other ways"
        name = name if name.endswith("__") else name.removesuffix("_")  # of `cumsum_`
        x = args[0] if args else options.get("input")
        if func in _CONVOLUTIONS and (args[1] if len(args) > 1 else options["weight"]).shape[-1] > 1:
            what = "a convolution over the sequence"
        elif func in _RECURRENT:
            what = "a recurrent layer"
        elif name.startswith("fft_"):
            what = "a Fourier transform"
        elif name in _WINDOWS and self._has_windows_across(name, args, options):
            what = f"windows of tokens along the sequence ({name})"
        elif func is F.interpolate and self._interpolates_tokens(*args, **options):
            what = "an interpolation of tokens"
        elif name in _MOVES and self._moves_tokens(func, x, args, options):
            what = f"{_MOVES[name]} along the sequence ({name})"
        elif func is F.pad and args and args[0].dim() == 3 and any((args[1] if len(args) > 1 else options["pad"])[2:4]):
            what = "tokens shifted along the sequence (pad)"
        elif name in _ORDERS and self._is_along_part(func, x, args, options):
            if name == "flip" and self.layout == "zigzag":
                return  # a rank has the part of the reversed sequence
            what = f"{_ORDERS[name]} along the sequence ({name})"
        elif func in _NORMS and _is_over_tokens(func, args, options, self._met):
            what = f"{_NORMS[func]} over the sequence"
            advice = "use ringcomm.SyncBatchNorm" if func is F.batch_norm else "normalize features alone"
        elif self._weights and name in _PRODUCTS:
            operands = [x for each in args for x in (each if isinstance(each, (list, tuple)) else [each])]
            if any(map(self._weighs_tokens, operands)):
                what, advice = "attention by softmax and matmul", "set attn_implementation='sdpa' (transformers)"
        if what:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got {what} in {_module()}, expected scaled_dot_product_attention: it "
                f"stays within a rank's part of the sequence; {advice}, call ring_attention, or pass local=True where "
                "that is meant"
            )

    def _interpolates_tokens(
        self, x: Any, size: Any = None, factor: Any = None, mode: Any = "nearest", **_: Any
    ) -> bool:
        """Returns whether `F.interpolate`, which gets all but the input by name, mixes tokens."""
        return not mode.startswith("nearest") and isinstance(x, torch.Tensor) and x.dim() == 3 and self._dim(x) == 2

    def _has_windows_across(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Returns whether windows along the sequence would reach from one piece of it into the next."""
        if not args or args[0].dim() != 3 or self._dim(args[0]) != 2:
            return False
        at, given = _WINDOWS[name], ("kernel_size", "stride", "padding")
        found: list[Any] = [args[at + i] if len(args) > at + i else options.get(key) for i, key in enumerate(given)]
        size, step, pad = (each[0] if isinstance(each, (tuple, list)) and each else each for each in found)
        piece = args[0].shape[2] // (2 if self.layout == "zigzag" else 1)
        return bool(size > 1) and (size > (step or size) or bool(pad) or piece % (step or size) != 0)

    def _refuse_places(self, numbers: torch.Tensor) -> None:
        """Raises if an embedding gets consecutive numbers that are positions, but not the positions of this part."""
        length = numbers.shape[-1] if numbers.dim() else 0
        if length < 2 or self.part not in (None, length):  # with a cache, any positions
            return
        first = numbers.reshape(-1, length)[0]
        if not torch.equal(numbers, (first[0] + torch.arange(length, device=numbers.device)).expand_as(numbers)):
            return
        self._refuse_row(int(first[0]), length, "an embedding", _module())

    def _refuse_row(self, first: int, length: int, what: str, where: str) -> None:
        """Raises if consecutive positions are not the positions of this part."""
        expected = [begin for _, begin in places(self.comm.rank, self.comm.world_size, length, self.layout)]
        apart = len(expected) > 1 and expected[1] != expected[0] + length // 2
        if apart or first < expected[0]:
            raise InvalidArgumentError(
                f"{CALL}: rank {self.comm.rank} got {what} of positions {first} to {first + length - 1} in {where}, "
                f"expected those of its part of the sequence ({self.layout}, pieces that begin at {expected}); pass "
                "position_ids=ringcomm.context.positions(length, comm) if the model takes it, or cut it in other ways"
            )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Computes attention; takes the arguments of torch's function, and a softcap."""
        self._refuse_dropout(dropout_p)
        rule = self._rule(attn_mask, is_causal, key)
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4):
            raise ShapeError(
                f"{CALL}: rank {self.comm.rank} got q, k and v of {query.dim()}, {key.dim()} and {value.dim()} "
                "dimensions, expected 4 of each, or 3; reshape them to (batch, heads, sequence, head_dim)"
            )
        if query.dim() == 3:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            return self.attend(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, softcap).squeeze(0)
        if not enable_gqa and key.shape[1] not in (1, query.shape[1]):  # torch repeats a single head
            raise ShapeError(
                f"{CALL}: rank {self.comm.rank} got {query.shape[1]} query heads and {key.shape[1]} key heads, "
                "expected as many of both; pass enable_gqa=True"
            )
        if rule.part is None and query.shape[2] in self._ramps:  # models may read tables of other lengths
            self._refuse_row(0, query.shape[2], "angles", self._ramps[query.shape[2]])
        if rule.part is None:
            self._refuse_other_dimension(query)
        self._met = None if rule.part is not None else torch.Size((query.shape[0], query.shape[2]))
        if rule.part is not None:
            how = (scale, softcap, rule.key_mask)
            return cached_attention(query, key, value, self.comm, rule.part, *how)
        options: dict[str, Any] = {"layout": self.layout, "overlap": self.overlap, "softcap": softcap}
        options |= {"causal": rule.causal, "window": rule.window, "key_mask": rule.key_mask}
        return ring_attention(query, key, value, self.comm, scale=scale, **options)

    def _refuse_other_dimension(self, query: torch.Tensor) -> None:
        """Raises for attention along another dimension than the rank's part of the sequence: inside windows, over
        features, heads or frames, or with tokens added to the part. A model may merge tokens of a part, which leaves
        fewer of them in as many sequences."""
        known = parts_of(self.comm)
        rows, heads, length, width = query.shape
        if not known or length in known or len(known) == MOST_LENGTHS or self.comm.world_size == 1:
            return
        merged = any(part % length == 0 for part in known) and rows <= max(known.values())
        if not merged or heads in known or width in known:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got attention over {length} tokens of {rows} sequences in {_module()}, "
                f"expected this rank's part, which shard_sequence has made of {', '.join(map(str, known))} tokens, "
                "because its keys and values are exchanged with the other ranks; cut a model with such attention in "
                "other ways, and call attention to added tokens outside of the context"
            )

    def _rule(self, mask: torch.Tensor | None, is_causal: bool, key: torch.Tensor) -> MaskRule:
        """Returns which keys the queries see."""
        if has_transformers() and not makes_rules():
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got attention after transformers was imported inside the context, "
                "where a model's window would go unnoticed; import transformers before the context"
            )
        if mask is None:
            return MaskRule(is_causal)
        rule = rule_of(mask)
        if rule is not None:
            return rule
        seen = _key_mask(mask, key)
        if seen is None or is_causal:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got an attn_mask of shape {tuple(mask.shape)}"
                f"{' and is_causal=True' if is_causal else ''}, expected one that hides keys of this rank's part from "
                f"all queries, (batch, 1, 1, {key.shape[-2]}), or none: a rank's mask says nothing about the keys of "
                "others; use is_causal=True, call ring_attention with causal, window and key_mask, or call it outside"
            )
        return MaskRule(False, None, seen)

    def _refuse_dropout(self, dropout_p: float) -> None:
        if dropout_p != 0.0:
            raise UnsupportedError(
                f"{CALL}: rank {self.comm.rank} got dropout_p={dropout_p}, expected 0.0, because the ranks would draw "
                "different random numbers for one row; set the attention's dropout to 0, or call eval()"
            )


def _key_mask(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Returns the (B, keys) mask of a mask that is the same for all heads and queries and only hides keys; else
    None."""
    if mask.dim() != 4 or key.dim() != 4 or mask.shape[-1] != key.shape[-2] or mask.requires_grad:
        return None
    if any(mask.shape[dim] != 1 and mask.stride(dim) != 0 for dim in (1, 2)):
        return None
    row = mask[:, 0, 0].expand(key.shape[0], -1)
    if row.dtype == torch.bool:
        return row
    hidden = row <= torch.finfo(row.dtype).min / 2
    return ~hidden if bool((hidden | (row == 0)).all()) else None
