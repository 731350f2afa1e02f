"""Context parallel: models of Hugging Face transformers as they are, or a sentence that says why not."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.context import context_parallel, gather_sequence, positions, ring_attention, shard_sequence
from ringcomm.context.sequence import LAYOUTS
from ringcomm.errors import InvalidArgumentError, RingcommError, ShapeError, UnsupportedError
from tests.context.test_attention import on_ranks
from tests.support.choice import choose

transformers = pytest.importorskip("transformers", reason="needs Hugging Face's models; pip install transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, RANKS = 12, 3
SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 3,
    "sep_token_id": 4,
}
OTHERS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Bert": {"num_key_value_heads": 4, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "ModernBert": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "Bart": {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 20},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 2},
    "Llama4Text": {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 20},
}


def model_of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **OTHERS.get(name, {}), **options})
    head = transformers.AutoModelForMaskedLM if "Bert" in name else transformers.AutoModelForCausalLM
    return head.from_config(config).to(dtype).train()


def text(padding: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, labels, positions, and the attention_mask."""
    tokens = torch.randint(11, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    labels, at = tokens.roll(-1, 1), torch.arange(LENGTH).expand(2, -1)
    if not padding:
        return tokens, labels, at, None
    keep = torch.ones_like(tokens)
    if padding == "left":
        keep[1, :5] = 0
        at = (keep.cumsum(1) - 1).clamp(min=0)
    elif padding == "right":
        keep[1, -5:] = 0
    return tokens, labels.masked_fill(keep == 0, -100), at, keep


def loss_of(logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def run(model: nn.Module, tokens: torch.Tensor, at: torch.Tensor, keep: torch.Tensor | None, **options: Any) -> Any:
    more = {} if "Bert" in type(model).__name__ else options
    mask = {} if keep is None else {"attention_mask": keep}
    return model(input_ids=tokens, position_ids=at, **mask, **more).logits


def assert_equal_to_one_process(
    model: nn.Module, layout: str, padding: str = "", tolerance: float = 1e-10, **options: Any
) -> None:
    tokens, labels, at, keep = text(padding)
    count = int((labels != -100).sum())
    base = copy.deepcopy(model)
    logits = run(base, tokens, at, keep, **options)
    loss = loss_of(logits, labels, count)
    loss.backward()
    copies = [copy.deepcopy(model) for _ in range(RANKS)]

    def rank(comm: ringcomm.Communicator) -> tuple[Any, ...]:
        mine = copies[comm.rank]
        parts = [x if x is None else shard_sequence(x, comm, 1, layout) for x in (tokens, at, keep)]
        with context_parallel(comm, layout=layout):
            out = run(mine, *parts, **options)
            own = loss_of(out, shard_sequence(labels, comm, 1, layout), count)
            own.backward()
        grads = {n: comm.all_reduce(p.grad, "sum") for n, p in mine.named_parameters() if p.grad is not None}
        return gather_sequence(out.detach(), comm, 1, layout), comm.all_reduce(own.detach(), "sum"), grads

    for out, total, grads in on_ranks(rank, RANKS):
        seen = labels != -100
        torch.testing.assert_close(out[seen], logits.detach()[seen], rtol=0, atol=tolerance)
        torch.testing.assert_close(total, loss.detach(), rtol=0, atol=tolerance)
        for name, p in base.named_parameters():
            if p.grad is not None:
                off = float((grads[name] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-3))
                assert off <= 10 * tolerance, f"{name} is off by {off:g}"


@pytest.mark.parametrize("padding", ["", "none", "left", "right"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2", "Bert"])
def test_padding(name: str, layout: str, padding: str) -> None:
    assert_equal_to_one_process(model_of(name), layout, padding)


@pytest.mark.parametrize("window", [3, 5, 11, 40])  # shorter and longer than the part of a rank, and than the whole
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sliding_windows(layout: str, use_cache: bool, window: int) -> None:
    model = model_of("Mistral", sliding_window=window)
    assert_equal_to_one_process(model, layout, use_cache=use_cache)
    assert_equal_to_one_process(model, layout, "left", use_cache=use_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_on_both_sides(layout: str) -> None:
    assert_equal_to_one_process(model_of("ModernBert"), layout, "right")


EAGER = {"Llama": {}, "Mistral": {"sliding_window": 5}, "Bert": {}, "Gemma2": {"sliding_window": 5}}


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_goes_round_the_ring(name: str, layout: str, padding: str) -> None:
    # In float32: eager attention computes its softmax in it, whatever the model's type.
    model = model_of(name, torch.float32, attn_implementation="eager", **EAGER[name])
    assert_equal_to_one_process(model, layout, padding, tolerance=1e-6)


def test_a_softcap_is_in_the_numbers() -> None:
    model = model_of("Gemma2", torch.float32, attn_implementation="eager", attn_logit_softcapping=0.02)
    for p in model.parameters():
        p.data *= 3
    assert_equal_to_one_process(model, "zigzag", tolerance=1e-5)


# ---- decoding ------------------------------------------------------------------------------------------------------


def steps(
    model: nn.Module, logits: torch.Tensor, cache: Any, keep: torch.Tensor | None, last: torch.Tensor
) -> torch.Tensor:
    """The logits of eight more tokens, the first three in one call, behind position ``last`` of each row."""
    found = []
    for count in (3, 1, 1, 1, 1, 1):
        tokens = torch.arange(count) + logits.argmax(-1, keepdim=True) % 7
        where = last + 1 + torch.arange(count)
        keep = None if keep is None else torch.cat([keep, torch.ones_like(tokens)], 1)
        out = model(input_ids=tokens, position_ids=where, past_key_values=cache, attention_mask=keep).logits
        found.append(out)
        logits, last = out[:, -1], where[:, -1:]
    return torch.cat(found, 1)


@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_decoding_with_a_cache(name: str, layout: str, padding: str) -> None:
    model = model_of(name).eval()
    tokens, _, at, keep = text(padding)
    with torch.no_grad():
        first = model(input_ids=tokens, position_ids=at, attention_mask=keep, use_cache=True)
        expected = steps(model, first.logits[:, -1], first.past_key_values, keep, at[:, -1:])

    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        parts = [x if x is None else shard_sequence(x, comm, 1, layout) for x in (tokens, at, keep)]
        with torch.no_grad(), context_parallel(comm, layout=layout):
            mine = model(input_ids=parts[0], position_ids=parts[1], attention_mask=parts[2], use_cache=True)
            whole = gather_sequence(mine.logits, comm, 1, layout)
            for count in (6, 18):  # other prompts, with caches of their own
                other = shard_sequence(torch.zeros(1, count, dtype=torch.long), comm, 1, layout)
                model(input_ids=other, position_ids=positions(count, comm, layout)[None], use_cache=True)
            return steps(model, whole[:, -1], mine.past_key_values, parts[2], at[:, -1:])

    found = on_ranks(rank, RANKS)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-10)


# ---- refused -------------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """Attention by matmul and softmax, of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        weights = F.dropout(torch.softmax(q @ k.mT, -1, dtype=torch.float64).to(x.dtype), 0.0)
        return torch.einsum("bij,bjd->bid", weights, v)


class Linear(nn.Module):
    """Attention without a softmax: only that no attention was seen can be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        return F.elu(q) @ (F.elu(k).mT @ v)


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True))


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x).real


class Moving(nn.Module):
    def __init__(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.move = move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(x)


class Attending(Moving):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.move(F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3).squeeze(1))


SIMPLE: dict[str, tuple[Any, str]] = {
    "softmax": (Flat, r"attention by softmax and matmul in the model \(Flat\).*sdpa"),
    "inside": (lambda: nn.Sequential(nn.Linear(4, 4), Flat()), r"attention by softmax and matmul in 1 \(Flat\)"),
    "linear attention": (Linear, r"no attention to intercept.*in into \(Linear\).*sdpa.*local=True"),
    "recurrent": (recurrent, r"a recurrent layer in 1 \(LSTM\)"),
    "convolution": (lambda: nn.Conv1d(4, 4, 3, padding=1), r"a convolution over the sequence in the model \(Conv1d\)"),
    "shift": (lambda: nn.ZeroPad2d((0, 0, 1, -1)), r"tokens shifted along the sequence .* \(ZeroPad2d\)"),
    "roll": (
        partial(Moving, lambda x: x.roll((0, 1), (-1, 1))),
        r"tokens shifted along .*\(roll\) in the model \(Moving\)",
    ),
    "cumsum": (partial(Moving, lambda x: torch.cumsum(x, dim=-2)), r"running sums along the sequence \(cumsum\)"),
    "cumsum_": (partial(Moving, lambda x: x.clone().cumsum_(-2)), r"running sums along the sequence \(cumsum\)"),
    "Fourier": (Fourier, r"a Fourier transform in the model \(Fourier\)"),
    "group norm": (lambda: nn.GroupNorm(2, 4), r"a group norm over the sequence in the model \(GroupNorm\)"),
    "instance norm": (lambda: nn.InstanceNorm1d(4), "an instance norm over the sequence"),
    "batch norm": (lambda: nn.BatchNorm1d(4), r"a batch norm over the sequence .*SyncBatchNorm"),
    "layer norm": (lambda: nn.LayerNorm((4, 4)), "a layer norm over the sequence"),
    "attention, then a choice of tokens": (partial(Attending, lambda x: x.topk(2, dim=1)[0]), r"a choice along .*topk"),
    "attention, then weights of tokens": (
        partial(Attending, lambda x: F.softmax(x, 1)),
        "a softmax along the sequence",
    ),
    "attention, then inverse weights of tokens": (partial(Attending, lambda x: F.softmin(x, 1)), "a softmax along"),
    "attention, then drawn weights of tokens": (
        partial(Attending, lambda x: F.gumbel_softmax(x, dim=1)),
        "a softmax along",
    ),
    "attention, then a batch norm of tokens": (
        partial(Attending, lambda x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)),
        "a batch norm over the sequence .*SyncBatchNorm",
    ),
    "cummax": (partial(Moving, lambda x: x.cummax(1)[0]), r"running extremes along the sequence \(cummax\)"),
    "attention, then running sums": (partial(Attending, lambda x: x.mT.cumsum(-1)), "running sums along the sequence"),
    "attention, then an average of neighbours": (
        partial(Attending, lambda x: F.avg_pool1d(x.mT, 3, 1, 1)),
        r"windows of tokens along the sequence \(avg_pool1d",
    ),
    "attention, then windows of three": (partial(Attending, lambda x: F.max_pool1d(x.mT, 3)), "windows of tokens"),
    "attention, then an interpolation": (
        partial(Attending, lambda x: F.interpolate(x.mT, scale_factor=2, mode="linear")),
        "an interpolation of tokens",
    ),
    "attention, then a transposed convolution": (lambda: nn.ConvTranspose1d(4, 4, 3), "a convolution over"),
    "attention, then a norm of tokens": (partial(Attending, F.normalize), r"a norm along the sequence \(normalize"),
    "attention, then differences": (partial(Attending, lambda x: x.diff(dim=1)), r"differences along .*\(diff"),
    "attention, then an RMS norm": (partial(Attending, lambda x: F.rms_norm(x, (4, 4))), "an RMS norm over"),
    "attention, then an order": (
        partial(Attending, lambda x: x.sort(dim=-2)[0]),
        r"an order along .*\(sort",
    ),
}


@pytest.mark.parametrize("what", SIMPLE)
def test_what_mixes_tokens_within_a_part_is_refused_on_all_ranks(what: str) -> None:
    make, message = SIMPLE[what]
    x = torch.ones(1, 4, 4)

    def step(comm: ringcomm.Communicator, module: nn.Module, backward: bool) -> None:
        with context_parallel(comm):
            out = module(x)
            if backward:
                (out[0] if isinstance(out, tuple) else out).sum().backward()
                raise AssertionError("backward was not refused")

    def rank(comm: ringcomm.Communicator) -> None:
        module = make()
        for backward in (True, False):
            with pytest.raises(UnsupportedError, match=f"rank {comm.rank} got {message}"):
                step(comm, module, backward)
        with context_parallel(comm, local=True):
            module(x)
        assert comm.all_reduce(torch.ones(1))[0] == comm.world_size

    on_ranks(rank, 2)


def test_what_has_no_tokens_to_mix_is_no_error() -> None:
    x, q = torch.ones(2, 4, 4, requires_grad=True), torch.ones(1, 2, 4, 4)

    def rank(comm: ringcomm.Communicator) -> None:
        with context_parallel(comm):
            pass
        with context_parallel(comm):  # a loss alone
            F.cross_entropy(x.flatten(0, 1), torch.zeros(8, dtype=torch.long)).backward(inputs=[x.clone()])
        with context_parallel(comm):  # attention first, then layers and a loss in chunks
            F.scaled_dot_product_attention(q, q, q)
            for chunk in x.unbind(1):
                nn.Linear(4, 4)(chunk).sum().backward(inputs=[x])
        with context_parallel(comm):  # called by the user's model itself
            ring_attention(nn.Linear(4, 4)(q), q, q, comm)
        with context_parallel(comm):  # features, numbers and whole tensors may move
            (
                x.roll(1, -1),
                x.roll(1),
                torch.cumsum(x, -1),
                torch.ones(2, 4, 4, dtype=torch.long).cumsum(1),
                x[0].cumsum(0),
            )
        with context_parallel(comm):  # a router's softmax, whose product is no attention
            F.scaled_dot_product_attention(q, q, q)
            torch.einsum("te,ted->td", torch.softmax(torch.ones(3, 5), -1), torch.ones(3, 5, 2))
        with context_parallel(comm, local=True):
            nn.Linear(4, 4)(x).sum().backward(inputs=[x])

    on_ranks(rank, 2)


class Rotated(nn.Module):
    """Attention with angles of positions, from a table of as many as it says, or one of all."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, q: torch.Tensor, at: torch.Tensor | None, length: int) -> torch.Tensor:
        angles = torch.arange(length, dtype=q.dtype)[:, None] * torch.tensor([1.0, 0.1])
        if self.by == "polar":
            turned = torch.view_as_complex(q.unflatten(-1, (2, 2))) * torch.polar(torch.ones_like(angles), angles)
            q = torch.view_as_real(turned).flatten(-2)
        else:
            table = angles.cos() if at is None else angles.cos()[at]
            q = q * table.repeat_interleave(2, -1)
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("by", ["cos", "polar"])
def test_angles_of_positions_from_0_on_are_refused(by: str, layout: str) -> None:
    """But on the rank that has these, and from a table in which the rank's own are looked up."""
    q = torch.randn(1, 2, 4, 4)

    def rank(comm: ringcomm.Communicator) -> None:
        with context_parallel(comm, layout=layout):
            Rotated("cos")(q, positions(8, comm, layout), 8)
        with context_parallel(comm, layout=layout):
            if layout == "contiguous" and comm.rank == 0:
                return
            text = rf"rank {comm.rank} got angles of positions 0 to 3 in the model \(Rotated\), expected those of its"
            with pytest.raises(InvalidArgumentError, match=text):
                Rotated(by)(q, None, 4)

    on_ranks(rank, 2)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[RingcommError], str]] = {
    "its own eager attention": ("GPT2", {"attn_implementation": "eager"}, {}, UnsupportedError, r"softmax.*h\.0\.attn"),
    "sinks": ("GptOss", {"num_local_experts": 2}, {}, UnsupportedError, "softmax and matmul"),
    "alibi": ("Bloom", {"n_head": 4}, {}, UnsupportedError, r"softmax and matmul in .*BloomAttention"),
    "mamba": ("Mamba", {}, {}, UnsupportedError, r"a convolution over the sequence in .*MambaMixer"),
    "mamba and attention": ("Jamba", {}, {}, UnsupportedError, "JambaConfig with layers linear_attention"),
    "chunks": ("Llama4Text", {}, {}, UnsupportedError, "mask by and_masks"),
    "flex": ("Llama", {"attn_implementation": "flex_attention"}, {}, UnsupportedError, "flex_attention"),
    "the whole mask": ("Llama", {}, {"keep": torch.ones(2, LENGTH)}, ShapeError, "pass this rank's part"),
    "positions of its own": ("Bart", {}, {}, InvalidArgumentError, r"embedding of positions 2 .*embed_positions"),
    "none for BERT": ("Bert", {}, {"at": None}, InvalidArgumentError, r"embedding of positions 0 .*position_emb"),
    "no positions": ("Llama", {}, {"at": None}, InvalidArgumentError, "position_ids=ringcomm.context.positions"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", choose(REFUSED, [each for each in REFUSED if each != "flex"]))  # it compiles for 20 s
def test_models_that_are_refused(what: str, layout: str) -> None:
    name, options, given, kind, message = REFUSED[what]
    dtype = torch.float32 if name == "GptOss" else torch.float64
    model = model_of(name, dtype, **options)
    tokens, _, at, _ = text("")

    def rank(comm: ringcomm.Communicator) -> None:
        part, where = (shard_sequence(x, comm, 1, layout) for x in (tokens, at))
        arguments = {"position_ids": given.get("at", where), "attention_mask": given.get("keep")}
        if name in ("Bart", "Mamba", "Bloom"):
            arguments = {}
        with context_parallel(comm, layout=layout):
            model(input_ids=part, **arguments)

    with pytest.raises(kind, match=message):
        on_ranks(rank, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_labels_that_are_shifted_in_the_whole_sequence_give_the_loss_of_one_process(name: str, layout: str) -> None:
    models = [model_of(name) for _ in range(RANKS + 1)]
    tokens, _, at, _ = text("")
    tokens[0, 5] = -100  # of the labels alone
    loss = models[-1](input_ids=tokens.clamp(min=0), labels=tokens).loss
    loss.backward()

    def rank(comm: ringcomm.Communicator) -> tuple[torch.Tensor, Any]:
        def part(x: torch.Tensor) -> torch.Tensor:
            return shard_sequence(x, comm, 1, layout)

        model = models[comm.rank]
        options = {"input_ids": part(tokens.clamp(min=0)), "position_ids": part(at)}
        with context_parallel(comm, layout=layout):
            after = F.pad(tokens, (0, 1), value=-100)[:, 1:]  # a shift of the user's own, of the whole
            count = (after != -100).sum()
            own = model(**options, labels=part(after), shift_labels=part(after), num_items_in_batch=count).loss
            (own * comm.world_size).backward()
        mean = {n: comm.all_reduce(p.grad, "avg") for n, p in model.named_parameters()}
        return comm.all_reduce(own.detach() * comm.world_size, "avg"), mean

    for total, grads in on_ranks(rank, RANKS):
        torch.testing.assert_close(total, loss.detach(), rtol=1e-6, atol=0)  # transformers computes it in float32
        for n, p in models[-1].named_parameters():
            torch.testing.assert_close(grads[n], p.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2DoubleHeadsModel"])  # by a pad, and by a slice
def test_labels_that_a_model_would_shift_within_a_part_are_refused(kind: str) -> None:
    tokens, _, at, _ = text("")
    model = getattr(transformers, kind)(model_of("Llama" if "Llama" in kind else "GPT2").config)

    def rank(comm: ringcomm.Communicator) -> None:
        part, where = shard_sequence(tokens, comm), shard_sequence(at, comm)
        with context_parallel(comm):
            model(input_ids=part, position_ids=where, labels=part)

    with pytest.raises(UnsupportedError, match=rf"got labels that the model \({kind}\) .*shift_labels=part\(y\)"):
        on_ranks(rank, 2)


PICKED = ["BertForSequenceClassification", "LlamaForSequenceClassification", "BertModel", "token of one's own"]


@pytest.mark.parametrize("what", PICKED)
def test_a_loss_from_one_token_of_each_sequence_is_refused_on_all_ranks(what: str) -> None:
    tokens, _, at, _ = text("")
    config = model_of("Llama" if "Llama" in what else "Bert", num_labels=3).config
    models = [getattr(transformers, what, transformers.BertModel)(config).double() for _ in range(2)]

    class Own(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **given: Any) -> torch.Tensor:
            return self.inner(**given)[0][:, 0]

    def step(comm: ringcomm.Communicator, model: nn.Module, given: dict[str, torch.Tensor]) -> None:
        with context_parallel(comm):
            if what == "BertModel":
                model(**given).pooler_output.sum().backward()
            elif what.startswith("token"):
                Own(model)(**given).sum().backward()
            else:
                with torch.no_grad():
                    model(**given)

    def rank(comm: ringcomm.Communicator) -> None:
        model = models[comm.rank]
        given = {"input_ids": shard_sequence(tokens, comm), "position_ids": shard_sequence(at, comm)}
        where = "Llama" if what.startswith("Llama") else "Own" if what.startswith("token") else "pooler .BertPooler"
        with pytest.raises(UnsupportedError, match=f"from one token of each sequence, which .*{where}.* takes"):
            step(comm, model, given)
        if what == "BertModel":  # a pooler whose output is not used
            with context_parallel(comm):
                model(**given).last_hidden_state.sum().backward()

    on_ranks(rank, 2)


T = partial(torch.transpose, dim0=1, dim1=2)
FIRST = torch.zeros(2, 1, 6, dtype=torch.long)
ONE, SHIFTED = "one token of each sequence", "tokens that .* shifts by leaving one out"
USED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "first, of features in between": (lambda y: y[..., 0, :], ONE),
    "first, kept": (lambda y: y[:, 0:1], ONE),
    "last, kept": (lambda y: y[:, -1:], ONE),
    "listed": (lambda y: y[:, [0]], ONE),
    "first, of some features": (lambda y: y[:, 0, :2], ONE),
    "first, of a new dimension": (lambda y: y[:, None, 0], ONE),
    "last, one feature": (lambda y: y[:, -1, 3], ONE),
    "of (S, B, D)": (lambda y: y.transpose(0, 1)[0], ONE),
    "all but the first": (lambda y: y[:, 1:], SHIFTED),
    "all but the last": (lambda y: y[:, :-1], SHIFTED),
    "all but the last, counted": (lambda y: y[:, : y.shape[1] - 1], SHIFTED),
    "the last, counted": (lambda y: y[:, y.shape[1] - 1 :], ONE),
    "all but the last, of some features": (lambda y: y[..., :-1, :2], SHIFTED),
    "norm": (lambda y: y.norm(dim=1), "the norm over"),
    "vector_norm": (lambda y: torch.linalg.vector_norm(y, dim=1), "the linalg_vector_norm over"),
    "cosine_similarity": (lambda y: F.cosine_similarity(y, y.sin()), "the cosine_similarity over"),
    "std_mean": (lambda y: torch.std_mean(y, 1)[0], "the std_mean over"),
    "quantile": (lambda y: y.quantile(0.5, 1), "the quantile over"),
    "prod": (lambda y: y.prod(1), "the prod over"),
    "pool": (lambda y: F.adaptive_avg_pool1d(T(y), 1), "the adaptive_avg_pool1d over"),
    "features first": (lambda y: T(y).amax(-1), "the amax over"),
    "matmul": (lambda y: y.mT @ y, r"a sum over the tokens of a part .*\(matmul"),
    "einsum": (lambda y: torch.einsum("bsd,bse->bde", y, y), r"a sum over the tokens of a part .*\(einsum"),
    "linear attention": (lambda y: y[:, None].mT @ y[:, None], "a sum over the tokens of a part"),
    "weights of tokens": (lambda y: torch.ones(2, 1, 4) @ y, "a sum over the tokens of a part"),
    "scores": (lambda y: torch.einsum("bsd, btd -> bst", y, y), "pairs of tokens of a part"),
    "scores of any batch": (lambda y: torch.einsum("...sd,...td->...st", y, y), "pairs of tokens of a part"),
    "cdist": (lambda y: torch.cdist(y, y.exp()), "pairs of tokens of a part"),
}
IN_A_MODULE = {
    "select": lambda y: y.select(1, 0),
    "narrow": lambda y: y.narrow(1, 0, 1),
    "index_select": lambda y: y.index_select(1, torch.tensor([0])),
    "gather": lambda y: y.gather(1, FIRST),
    "unbind": lambda y: y.unbind(1)[0],
    "split": lambda y: y.split(1, 1)[0],
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("what", [*USED, *IN_A_MODULE])
def test_a_loss_that_uses_tokens_of_a_part_together_is_refused(what: str, inside: bool) -> None:
    use, message = USED.get(what) or (IN_A_MODULE[what], f"{ONE}, .* takes by {what}")

    def rank(comm: ringcomm.Communicator) -> None:
        part = torch.rand(2, 4, 6).requires_grad_()
        with context_parallel(comm):
            y = Attending(use if inside else torch.sin)(part)
            loss = (y if inside else use(y)).square().mean()
            if not inside and what in IN_A_MODULE:  # programs may take the loss of one token after the other
                loss.backward()
                return
            with pytest.raises(UnsupportedError, match=f"rank {comm.rank} got a loss from {message}"):
                loss.backward()
        with context_parallel(comm):  # what no loss needs
            (Attending(lambda y: y + 0 * use(y.detach()).mean())(part).mean() + use(part).mean().item()).backward()

    on_ranks(rank, 2)


def test_a_loss_from_one_token_is_refused_in_later_passes_and_outside_of_the_context() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        part = torch.rand(2, 4, 6).requires_grad_()
        with context_parallel(comm):
            y = Attending(torch.sin)(part)
            loss = y[:, 0].sum()
            y.square().mean().backward(retain_graph=True)
            with pytest.raises(UnsupportedError, match=f"rank {comm.rank} got a loss from {ONE}"):
                loss.backward(retain_graph=True)
        with pytest.raises(UnsupportedError, match=f"rank {comm.rank} got a loss from {ONE}"):
            loss.backward()
        with context_parallel(comm):  # what no backward pass needs is not kept
            y, mark = Attending(torch.sin)(part), set[int]()
            y[:, 0].grad_fn.metadata["mark"], alive = mark, weakref.ref(mark)
            del y, mark
            assert alive() is None

    on_ranks(rank, 2)


@pytest.mark.parametrize(
    "norm",
    [
        lambda y: F.normalize(y, dim=-1),
        lambda y: y * F.cosine_similarity(y, y.sin(), -1)[..., None],
        lambda y: y * y.std(-1, keepdim=True) + y.norm(dim=-1, keepdim=True),
        lambda y: y + y.norm() + y.mean(0) + y.std(),
        lambda y: torch.cat([each.tanh() for each in y.chunk(2, 1)], 1),
        lambda y: torch.cat([y[:, :2], y[:, 2:]], 1),
        lambda y: T(F.max_pool1d(T(y), 2)).repeat_interleave(2, 1),
        lambda y: T(F.interpolate(T(y), scale_factor=2))[:, ::2],
        lambda y: F.avg_pool1d(y, 3, 1, 1),
        lambda y: y.flip(1),
        lambda y: torch.einsum("bsd,de->bse", y, torch.ones(6, 6)),
        lambda y: torch.einsum("...d,...d->...", y, y)[..., None] * torch.einsum("b...,b...->b...", y, y),
        lambda y: y @ torch.ones(2, 6, 4) @ torch.ones(2, 4, 6),
        lambda y: torch.einsum(
            "bshg,bsgd->bshd", F.softmax(y.view(2, 4, 3, 2) @ torch.ones(2, 3), -1), y.view(2, 4, 3, 2)
        ),
        lambda y: F.softmax(y.view(-1, 2, 3) @ y.view(-1, 2, 3).mT, -1) @ y.view(-1, 2, 3),
        lambda y: y - y.roll(1, 0) + y.cumsum(0),
        lambda y: torch.einsum("bsd,bsd->bs", y, y)[..., None] + torch.einsum("bsd,bsd->", y, y) + y,
        lambda y: F.layer_norm(y.view(-1, 2, 3), (2, 3)),
        lambda y: F.group_norm(y.view(-1, 6, 1), 2),
        lambda y: F.gumbel_softmax(y, 1),
    ],
)
def test_functions_of_each_token_are_allowed(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with context_parallel(comm):
            Attending(lambda y: norm(y).view_as(y))(torch.ones(2, 4, 6).requires_grad_()).sum().backward()

    on_ranks(rank, 2)


@pytest.mark.parametrize("dim", ["dim", "axis"])
@pytest.mark.parametrize("name", ["mean", "sum", "amax", "max", "logsumexp", "std"])
def test_a_loss_from_all_tokens_of_each_sequence_is_refused(name: str, dim: str) -> None:
    x = torch.randn(2, 4, 6)

    def rank(comm: ringcomm.Communicator) -> None:
        def pool(y: torch.Tensor) -> torch.Tensor:
            found = getattr(torch, name)(y, **{dim: 1})
            return found[0] if isinstance(found, tuple) else found

        part = x.clone().requires_grad_()
        with context_parallel(comm):  # of the features, and of the loss of each token, outside of modules
            y = Attending(lambda y: y - getattr(torch, name)(y[:, :, None], dim=-1)[0].mean())(part)
            (y.square().mean(-1, keepdim=True).sum(1).sum() / comm.world_size).backward()
        with context_parallel(comm):
            pooled = Attending(pool)(part)
            with pytest.raises(UnsupportedError, match=rf"got a loss from the {name} over the tokens of each sequence"):
                pooled.sum().backward()
        with context_parallel(comm):  # what no loss needs
            Attending(lambda y: y + pool(y.detach())[:, None])(part).sum().backward()

    on_ranks(rank, 2)


def test_a_token_of_the_whole_sequence_is_no_error() -> None:
    tokens, _, at, _ = text("")
    models = [model_of("Bert").bert for _ in range(3)]
    head = nn.Linear(16, 3).double()
    models[2](input_ids=tokens, position_ids=at)[0][:, 0].square().sum().backward()

    class Whole(nn.Module):
        def __init__(self, comm: ringcomm.Communicator) -> None:
            super().__init__()
            self.comm, self.inner, self.head = comm, models[comm.rank], head

        def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            given = {"input_ids": shard_sequence(tokens, self.comm), "position_ids": shard_sequence(at, self.comm)}
            return gather_sequence(self.inner(**given)[0], self.comm)[:, 0]

    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        with context_parallel(comm):
            (Whole(comm)(tokens, at).square().sum() / comm.world_size).backward()
        return comm.all_reduce(models[comm.rank].embeddings.word_embeddings.weight.grad, "sum")

    for grad in on_ranks(rank, 2):
        torch.testing.assert_close(grad, models[2].embeddings.word_embeddings.weight.grad, rtol=0, atol=1e-10)


def test_a_loss_from_places_in_the_sequence_is_refused() -> None:
    tokens, _, at, _ = text("")
    model = transformers.BertForQuestionAnswering(model_of("Bert").config)
    place = torch.tensor([1, 2])

    def rank(comm: ringcomm.Communicator) -> None:
        given = {"input_ids": shard_sequence(tokens, comm), "position_ids": shard_sequence(at, comm)}
        with context_parallel(comm):
            model(**given, start_positions=place, end_positions=place)

    with pytest.raises(UnsupportedError, match=r"places in the sequence .start_positions"):
        on_ranks(rank, 2)


class Sinusoidal(nn.Module):
    """Takes rows of a table of its own, as M2M100 does for all sequences at once, or of activations, as mixtures do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("table", torch.randn(20, 8))

    def forward(self, q: torch.Tensor, at: torch.Tensor) -> None:
        F.scaled_dot_product_attention(q, q, q)
        if self.how == "index_select":
            self.table.index_select(0, at.reshape(-1))
        elif self.how == "getitem":
            self.table[at]
        else:
            torch.randn(20, 8).index_select(0, at.reshape(-1))


@pytest.mark.parametrize("how", ["index_select", "getitem", "activations"])
def test_positions_in_a_table_that_is_no_embedding(how: str) -> None:
    models = [Sinusoidal(how) for _ in range(2)]
    q = torch.ones(2, 1, 4, 4)

    def rank(comm: ringcomm.Communicator) -> None:
        where = positions(8, comm)
        with context_parallel(comm):
            models[comm.rank](q, where.expand(2, -1) + 2)
            models[comm.rank](q, torch.tensor([5, 5, 1, 7]))  # no positions
            for first in (0, 1) if how != "activations" else ():
                with pytest.raises(
                    InvalidArgumentError, match=f"positions {first} to {first + 3} in the model .Sinuso"
                ):
                    models[comm.rank](q, torch.arange(first, first + 4).expand(2, -1))
            if how == "activations":
                models[comm.rank](q, torch.arange(4).expand(2, -1))

    on_ranks(rank, 2)


def test_packed_sequences_are_refused_where_one_process_would_part_them() -> None:
    model = model_of("Llama")
    tokens, _, _, _ = text("")
    at = torch.arange(6).repeat(2).expand(2, -1)  # two sequences in a row: on rank 0, in zigzag, they look like one

    def rank(comm: ringcomm.Communicator) -> None:
        part, where = (shard_sequence(x, comm) for x in (tokens, at))
        with context_parallel(comm), pytest.raises(InvalidArgumentError, match="expected those of its part of one seq"):
            model(input_ids=part, position_ids=where, use_cache=False)

    on_ranks(rank, 2)


DECODING: dict[str, tuple[dict[str, Any], dict[str, Any], type[RingcommError], str]] = {
    "positions behind the part": ({}, {"at": LENGTH // 2}, InvalidArgumentError, "after the whole sequence"),
    "a window": ({"sliding_window": 5}, {}, UnsupportedError, "decode with a DynamicCache"),
    "gradients": ({}, {"grad": True}, UnsupportedError, "no_grad"),
    "another context": ({}, {"again": True}, RingcommError, "in the context that filled it|after the whole"),
}


@pytest.mark.parametrize("what", DECODING)
def test_decoding_that_is_refused(what: str) -> None:
    options, given, kind, message = DECODING[what]
    model = model_of("Mistral" if options else "Llama", **options).eval()
    tokens, _, at, _ = text("")

    def rank(comm: ringcomm.Communicator) -> None:
        def decode(cache: Any) -> None:
            where = torch.full((2, 1), given.get("at", LENGTH))
            with torch.set_grad_enabled("grad" in given), pytest.raises(kind, match=message):
                model(input_ids=tokens[:, :1], position_ids=where, past_key_values=cache)

        with context_parallel(comm):
            with torch.no_grad():
                cache = model(input_ids=shard_sequence(tokens, comm), position_ids=shard_sequence(at, comm))
            if "again" not in given:
                decode(cache.past_key_values)
        if "again" in given:
            with context_parallel(comm):
                decode(cache.past_key_values)

    on_ranks(rank, 2)


def test_other_threads_and_what_comes_after_use_transformers_own() -> None:
    model = model_of("Mistral", sliding_window=5).eval()
    tokens, _, at, keep = text("right")
    with torch.no_grad():
        expected = run(model, tokens, at, keep)
    inside = threading.Event()

    def rank(comm: ringcomm.Communicator) -> bool:
        with torch.no_grad():
            if comm.rank == 1:
                assert inside.wait(20)
                same = torch.equal(run(model, tokens, at, keep), expected)
            else:
                with context_parallel(comm, local=True):
                    inside.set()
                    comm.barrier()
                return torch.equal(run(model, tokens, at, keep), expected)
        comm.barrier()
        return same

    assert on_ranks(rank, 2) == [True, True]


def test_a_mistral_with_windows_and_padding_trains_as_on_one_rank() -> None:
    tokens, labels, at, keep = text("left")
    count = int((labels != -100).sum())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, cp: Any) -> list[float]:
        losses = []
        for _ in range(3):
            ranks = 1 if cp is None else cp.world_size
            parts = [x if cp is None else shard_sequence(x, cp) for x in (tokens, at, keep, labels)]
            with nullcontext() if cp is None else context_parallel(cp):
                loss = ranks * loss_of(run(model, *parts[:3], use_cache=False), parts[3], count)
                loss.backward()
            losses.append(float(loss if cp is None else cp.all_reduce(loss.detach(), "avg")))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def rank(comm: ringcomm.Communicator) -> list[float]:
        mesh = ringcomm.init_mesh(dp=2, cp=2, comm=comm)
        optimizer = torch.optim.AdamW(models[comm.rank].parameters(), lr=0.01)
        model, optimizer = ringcomm.shard(models[comm.rank], optimizer, stage=2, mesh=mesh)
        return train(model, optimizer, mesh["cp"])

    models = [model_of("Mistral", sliding_window=5) for _ in range(5)]
    for model in models:
        model.gradient_checkpointing_enable()
    expected = train(models[4], torch.optim.AdamW(models[4].parameters(), lr=0.01), None)
    for losses in on_ranks(rank, 4):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    assert expected[2] < expected[0]
