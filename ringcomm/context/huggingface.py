"""Finds out which keys the queries of Hugging Face transformers' models see.

A rank's model makes its masks from the length of the rank's part, so a mask says nothing about the complete sequence:
it does not show a window that is longer than the part. Inside a context, transformers therefore uses the functions of
this module to make masks and to compute attention; outside, and in other threads, it uses its own functions.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch

from ringcomm.context.mode import CALL, ContextParallelMode, MaskRule, current, makes_rules, with_rule
from ringcomm.context.sequence import positions
from ringcomm.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_TOKENWISE = {"moe", "dense", "sparse", "mlp"}
"""Names in a configuration's layer_types of layers that work on each token separately, so that a rank's part
suffices."""


# ---- transformers --------------------------------------------------------------------------------------------------

_INSTALLING = threading.Lock()


def install() -> None:
    """Makes transformers call the functions of this module, once."""
    from transformers import modeling_utils

    with _INSTALLING:
        if makes_rules():
            return
        masking = _masking()
        masks, attention = masking.AttentionMaskInterface, modeling_utils.AttentionInterface
        for name in ("sdpa", "eager"):
            masks.register(name, partial(_mask, name, masks._global_mapping[name]))
        attention.get_interface = _wrap_get_interface(attention.get_interface)  # type: ignore[method-assign]
        masking._preprocess_mask_arguments = partial(_preprocess, masking._preprocess_mask_arguments)


def _masking() -> Any:
    from transformers import masking_utils

    return masking_utils


def _preprocess(
    original: Callable[..., Any], config: Any, inputs_embeds: torch.Tensor, *args: Any, **options: Any
) -> Any:
    """Checks a model's layers and positions before it makes a mask."""
    context = current()
    if context is None:
        return original(config, inputs_embeds, *args, **options)
    _check_layers(config, context)
    call = inspect.signature(original).bind(config, inputs_embeds, *args, **options)
    cache, where = call.arguments["past_key_values"], call.arguments.get("position_ids")
    past = 0 if cache is None else int(cache.get_query_offset(call.arguments["layer_idx"]))
    if cache is not None and not past:
        context.parts[cache] = inputs_embeds.shape[1]
    context.part = None if cache is None else context.parts.get(cache)
    if where is not None and where.dim() == 2:
        padded = call.arguments["attention_mask"] is not None
        _check_positions(where, past, padded, context)
    call.arguments["position_ids"] = None  # positions of a part do not tell whether a row holds several sequences
    return original(*call.args, **call.kwargs)


def _check_layers(config: Any, context: ContextParallelMode) -> None:
    mixing = set(getattr(config, "layer_types", None) or ()) - _ATTENTION - _TOKENWISE
    if mixing and not context.local:
        raise UnsupportedError(
            f"{CALL}: rank {context.comm.rank} got a {type(config).__name__} with layers {', '.join(sorted(mixing))}, "
            "expected only attention layers, because others would stay within a rank's part of the sequence; split "
            "this model in another way, or pass local=True if that is meant"
        )


def _check_positions(where: torch.Tensor, past: int, padded: bool, context: ContextParallelMode) -> None:
    """Raises if the positions are certainly not those of this rank's part."""
    comm, length = context.comm, where.shape[1]
    if past:
        begin = past - (context.part or 0) + (context.part or 0) * comm.world_size
        expected = torch.arange(begin, begin + length, device=where.device)
        wrong = bool((where[:, 0] == past).all()) if padded else not torch.equal(where - where[:, :1] + begin, where)
        wrong = wrong or bool((where[:, 0] == past).all())
        advice = f"position_ids from {begin} on, after the whole sequence"
    else:
        expected = positions(length * comm.world_size, comm, context.layout, where.device)
        local = torch.arange(length, device=where.device)
        steps = (where - where[:, :1]) == (expected - expected[0])
        wrong = not padded and not bool(steps.all())
        wrong = wrong or (expected[0] > 0 and bool((where == local).all()))
        advice = "position_ids=ringcomm.context.positions(length, comm)"
    if wrong:
        raise InvalidArgumentError(
            f"{CALL}: rank {comm.rank} got positions {shown(where[0].tolist())}, expected those of its part of one "
            f"sequence ({context.layout}): {shown(expected.tolist())}; pass {advice}"
        )


def _mask(
    name: str,
    original: Callable[..., Any],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Returns a mask; inside a context, a placeholder that carries a rule."""
    masking, context = _masking(), current()
    function = mask_function or masking.causal_mask_function
    if context is None:
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask)
        return original(*sizes, **options)
    causal, window = _read_mask_function(function, masking, context)
    past = int(q_offset)
    if attention_mask is not None and attention_mask.shape != (batch_size, kv_length):
        raise ShapeError(
            f"{CALL}: rank {context.comm.rank} got an attention_mask of shape {tuple(attention_mask.shape)}, expected "
            f"{(batch_size, kv_length)}; pass this rank's part of it, shard_sequence(attention_mask, comm)"
        )
    if past or kv_length != q_length:
        _check_cache(past, q_length, kv_length, causal, window, context)
    skip = options.get("allow_is_causal_skip", True) if causal else options.get("allow_is_bidirectional_skip", False)
    plain = window is None and attention_mask is None and not past
    if skip and plain and (name == "sdpa" or not causal):
        return None
    rule = MaskRule(causal, window, attention_mask, context.part if past else None)
    return with_rule(rule, batch_size, 1, q_length, kv_length, device=options.get("device", "cpu"))


def _check_cache(
    past: int, q_length: int, kv_length: int, causal: bool, window: int | None, context: ContextParallelMode
) -> None:
    if causal and window is None and past and kv_length == past + q_length and context.part is not None:
        return
    raise UnsupportedError(
        f"{CALL}: rank {context.comm.rank} got {q_length} queries and {kv_length} keys with window={window}, expected "
        "as many keys as queries, or a cache that was filled inside of this context by causal attention without a "
        "window; decode with a DynamicCache in the context that filled it, or outside with the whole sequence"
    )


def _read_mask_function(
    function: Callable[..., Any], masking: Any, context: ContextParallelMode
) -> tuple[bool, int | None]:
    """Returns whether a mask function of transformers is causal, and its window."""
    found: set[tuple[str, int]] = set()

    def read(each: Callable[..., Any]) -> bool:
        if each in (masking.causal_mask_function, masking.bidirectional_mask_function):
            found.add(("causal" if each is masking.causal_mask_function else "all", 0))
            return True
        kind, inside = each.__qualname__.partition(".")[0], inspect.getclosurevars(each).nonlocals
        if kind == "and_masks":
            return all(map(read, inside["mask_functions"]))
        if kind == "sliding_window_overlay":
            found.add(("behind", int(inside["sliding_window"])))
        elif kind == "sliding_window_bidirectional_overlay":
            found.add(("around", int(inside["sliding_window"]) + 1))
        return kind.startswith("sliding_window_")

    known = read(function)
    causal = ("causal", 0) in found
    windows = [window for kind, window in found if kind in ("behind", "around")]
    if not known or (not causal and any(kind == "behind" for kind, _ in found)):
        raise UnsupportedError(
            f"{CALL}: rank {context.comm.rank} got a mask by {function.__qualname__.partition('.')[0]}, expected "
            "causal attention or all keys, with padding or a sliding window, because other masks cannot be made from "
            "parts of a sequence; call the model outside"
        )
    return causal, min(windows, default=None)


# ---- attention -----------------------------------------------------------------------------------------------------


def _wrap_get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of AttentionInterface.get_interface, which inside of a context returns ring attention."""

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = original(self, attn_implementation, default)
        context = current()
        if context is None:
            return found
        if attn_implementation == "sdpa":
            return partial(_attention, context, True)
        if attn_implementation == "eager":  # others are detected where they multiply weights and values
            return partial(_attention, context, False) if _is_known_eager(found) else found
        raise UnsupportedError(
            f"{CALL}: rank {context.comm.rank} got attn_implementation={shown(attn_implementation)}, expected 'sdpa' "
            "or 'eager': others attend within a rank's part; call model.set_attn_implementation('sdpa')"
        )

    return get_interface


def _attention(
    context: ContextParallelMode,
    may_be_causal: bool,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention; takes the arguments of transformers' functions, and returns no weights. ``may_be_causal``:
    whether attention without a mask may be causal, as in transformers' sdpa function."""
    if position_bias is not None:
        raise UnsupportedError(
            f"{CALL}: rank {context.comm.rank} got a position_bias in {type(module).__name__}, expected none, because "
            "it is made from the positions in a rank's part; split this model in another way"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and may_be_causal and attention_mask is None
    how = (attention_mask, dropout if module.training else 0.0, causal, scaling, True)
    return context.attend(query, key, value, *how, softcap=softcap).transpose(1, 2).contiguous(), None


_USUAL = ("llama", "gemma2", "bert")


def _is_known_eager(eager: Callable[..., Any]) -> bool:
    """Returns whether an eager attention function is, line by line, that of Llama, Gemma 2 or BERT, like most in
    transformers."""
    return any(_code(eager) == _code(_eager_of(name)) for name in _USUAL)


def _eager_of(name: str) -> Callable[..., Any]:
    import importlib

    found: Callable[..., Any] = importlib.import_module(
        f"transformers.models.{name}.modeling_{name}"
    ).eager_attention_forward
    return found


def _code(function: Callable[..., Any]) -> list[Any]:
    """Returns the code of a function, and of the functions of transformers that it calls."""
    code: CodeType = function.__code__
    called = [getattr(function, "__globals__", {}).get(name) for name in code.co_names]
    own = [each for each in called if inspect.isfunction(each) and each.__module__.startswith("transformers.")]
    return [code.co_code, code.co_consts, code.co_names, code.co_varnames, *map(_code, own)]
