"""Context parallel: models that call torch's attention work on parts of a sequence as they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import ringcomm
from ringcomm.context import context_parallel, gather_sequence, positions, shard_sequence
from ringcomm.context.sequence import LAYOUTS
from ringcomm.errors import InvalidArgumentError, ShapeError, UnsupportedError
from tests.context.test_attention import GOOD, full, inputs, on_ranks
from tests.support.choice import slow

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """A transformer of two blocks with grouped queries, over tokens and their positions."""

    def __init__(self, length: int, reentrant: bool | None = None) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 12), nn.Embedding(length, 12)
        self.into = nn.ModuleList(nn.Linear(12, 12 + 2 * 6) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head = nn.Linear(12, 11)
        self.reentrant = reentrant  # of checkpoints; None: none

    def block(self, x: torch.Tensor, number: int) -> torch.Tensor:
        q, k, v = self.into[number](x).split([12, 6, 6], -1)
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + torch.tanh(self.out[number](attended.transpose(1, 2).flatten(2)))

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(position_ids)
        for number in range(2):
            if self.reentrant is not None:
                x = checkpoint(self.block, x, number, use_reentrant=self.reentrant, preserve_rng_state=False)
            else:
                x = self.block(x, number)
        return self.head(x)


def language_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def text(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (2, length + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def mean_over_ranks(comm: ringcomm.Communicator, model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: comm.all_reduce(grad, "avg") for name, grad in grads.items()}


def assert_model_parallel(
    model: nn.Module,
    forward: Callable[..., torch.Tensor],
    world_size: int,
    layout: str,
    length: int,
    tolerance: float = 1e-12,
) -> None:
    """Logits, loss and gradients of ``forward(model, tokens, position_ids)`` equal those of the whole sequence."""
    tokens, labels = text(length)
    base = copy.deepcopy(model)
    logits = forward(base, tokens, torch.arange(length).expand(2, -1))
    loss = language_loss(logits, labels)
    loss.backward()
    copies = [copy.deepcopy(model) for _ in range(world_size)]

    def rank(comm: ringcomm.Communicator) -> tuple[Any, ...]:
        mine = copies[comm.rank]
        part, wanted = (shard_sequence(x, comm, 1, layout) for x in (tokens, labels))
        with context_parallel(comm, layout=layout):
            out = forward(mine, part, positions(length, comm, layout).expand(2, -1))
            own = language_loss(out, wanted)
            own.backward()
        mean = comm.all_reduce(own.detach(), "avg")
        return gather_sequence(out.detach(), comm, 1, layout), mean, mean_over_ranks(comm, mine)

    for out, mean, grads in on_ranks(rank, world_size):
        torch.testing.assert_close(out, logits.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-12, atol=0)
        assert set(grads) == {name for name, _ in base.named_parameters()}
        for name, p in base.named_parameters():
            off = float((grads[name] - p.grad).abs().max() / p.grad.abs().max())
            assert off <= tolerance, f"{name} is off by {off:g}"


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_transformer_as_it_is(world_size: int, layout: str, reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model = Model(8 * world_size, reentrant).double()
    assert_model_parallel(model, lambda m, *x: m(*x), world_size, layout, 8 * world_size)


class Ring(nn.Module):
    """A block that calls ring_attention itself, where it has a communicator."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.comm: ringcomm.Communicator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        if self.comm is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = ringcomm.ring_attention(q, k, v, self.comm, causal=True)
        return x + torch.tanh(self.out(attended.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("what", [slow("blocks"), "the model", "ring_attention"])
def test_compiled_blocks_give_the_numbers_of_one_process(what: str) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(Ring(), Ring()).double()
    x = torch.randn(2, 12, 12, dtype=torch.float64)
    loss = base(x).square().mean()
    loss.backward()
    models = [copy.deepcopy(base) for _ in range(2)]

    def rank(comm: ringcomm.Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = models[comm.rank]
        model.zero_grad()
        for each in [model] if what == "the model" else model:
            each.compile(backend="aot_eager")
        for block in model if what == "ring_attention" else ():
            block.comm = comm
        for _ in range(2):
            model.zero_grad()
            with nullcontext() if what == "ring_attention" else context_parallel(comm):
                own = model(shard_sequence(x, comm)).square().mean()
                own.backward()
        return comm.all_reduce(own.detach(), "avg"), mean_over_ranks(comm, model)

    for total, grads in on_ranks(rank, 2, 120):
        torch.testing.assert_close(total, loss.detach(), rtol=1e-12, atol=0)
        for name, p in base.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_recomputed_outside_is_found_out() -> None:
    torch.manual_seed(0)
    models = [Model(12, reentrant=False).double() for _ in range(3)]
    tokens, labels = text(12)

    def rank(comm: ringcomm.Communicator) -> None:
        with context_parallel(comm):
            out = models[comm.rank](shard_sequence(tokens, comm), positions(12, comm))
        with pytest.raises(CheckpointError, match="different metadata"):
            language_loss(out, shard_sequence(labels, comm)).backward()

    on_ranks(rank, 3)


def llama(use_cache: bool) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    transformers = pytest.importorskip("transformers", reason="needs Hugging Face's models; pip install transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)

    def forward(model: nn.Module, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, position_ids=position_ids, use_cache=use_cache).logits

    return transformers.LlamaForCausalLM(config).double(), forward


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_llama_of_hugging_face_as_it_is(layout: str, use_cache: bool) -> None:
    # The model computes its norms and rotations in float32, whatever its type.
    assert_model_parallel(*llama(use_cache), 3, layout, 12, tolerance=1e-4)


def test_the_context_is_this_threads_alone_and_ends() -> None:
    q, k, v, _ = inputs((1, 2, 2, 4, 8, 8), 1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    refused = threading.Event()

    def rank(comm: ringcomm.Communicator) -> list[bool]:
        found = []
        with context_parallel(comm) if comm.rank == 0 else nullcontext():
            if comm.rank == 0:
                with pytest.raises(UnsupportedError):
                    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
                refused.set()
            else:
                assert refused.wait(10)
                found.append(torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected))
            comm.barrier()
        return [*found, torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)]

    assert on_ranks(rank, 2) == [[True], [True, True]]


def test_every_way_of_running_backward_inside() -> None:
    whole = inputs((1, 2, 2, 4, 8, 8), 3)
    expected = full(*whole, is_causal=True)[1]

    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        *parts, grad = (shard_sequence(x, comm, 2) for x in whole)
        found = []
        with context_parallel(comm):
            for way in range(5):
                q, k, v = (x.clone().requires_grad_() for x in parts)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                if way == 0:
                    out.backward(grad)
                elif way == 1:
                    torch.autograd.backward([out, q.sum()], [grad, torch.tensor(0.0, dtype=q.dtype)])
                elif way == 2:
                    torch.autograd.backward((out * grad).sum())
                elif way == 3:
                    out.backward(gradient=grad, inputs=[q])
                    assert k.grad is None
                else:
                    (q.grad,) = torch.autograd.grad(out, q, grad)
                found.append(gather_sequence(q.grad, comm, 2))
        return found

    for found in on_ranks(rank, 3):
        for grad in found:
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_the_context_reads_torchs_arguments() -> None:
    whole = inputs((1, 3, 3, 4, 8, 8), 3)
    expected = full(*whole, is_causal=True, scale=0.7)[0]

    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        q, k, v, _ = (shard_sequence(x, comm, 2, "contiguous") for x in whole)
        attend = F.scaled_dot_product_attention
        with context_parallel(comm, layout="contiguous", overlap=False):
            outs = [
                attend(q, k, v, None, 0.0, True, scale=0.7),
                attend(query=q, key=k, value=v, is_causal=True, scale=0.7, enable_gqa=True),
                attend(q[0], k[0], v[0], is_causal=True, scale=0.7)[None],
            ]
        return [gather_sequence(x, comm, 2, "contiguous") for x in outs]

    for outs in on_ranks(rank, 3):
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def attend(**options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(GOOD, GOOD, GOOD, **options)


IN_CONTEXT: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "mask": (
        lambda: attend(attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        UnsupportedError,
        "attn_mask of shape \\(4, 4\\), expected one that hides keys of this rank's part.*window and key_mask",
    ),
    "dropout": (lambda: attend(dropout_p=0.1), UnsupportedError, "dropout_p=0.1.*eval"),
    "heads": (
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, heads, 4, 8) for heads in (4, 2, 2)]),
        ShapeError,
        "pass enable_gqa=True",
    ),
    "dimensions": (lambda: F.scaled_dot_product_attention(*[GOOD[None]] * 3), ShapeError, "expected 4 of each"),
    "nn.MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2).eval()(*[torch.ones(4, 1, 8)] * 3, need_weights=False),
        UnsupportedError,
        "got nn.MultiheadAttention",
    ),
    "nn.TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()(torch.ones(1, 4, 8)),
        UnsupportedError,
        "got nn.MultiheadAttention",
    ),
}


@pytest.mark.parametrize("what", IN_CONTEXT)
def test_what_the_context_refuses(what: str) -> None:
    attempt, kind, message = IN_CONTEXT[what]

    def rank(comm: ringcomm.Communicator) -> None:
        with context_parallel(comm), torch.no_grad(), pytest.raises(kind, match=message):
            attempt()
        with pytest.raises(InvalidArgumentError, match="layout='x'"), context_parallel(comm, layout="x"):
            pass

    on_ranks(rank, 2)


def attention_of(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


OTHER_DIMENSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of (batch, heads, sequence, features)
    "windows of two tokens": lambda x: attention_of(x.unflatten(2, (-1, 2)).transpose(1, 2).flatten(0, 1)),
    "the heads of a token": lambda x: attention_of(x.transpose(1, 2)),
    "features": lambda x: attention_of(x.mT),
    "frames of one place": lambda x: attention_of(torch.stack([x] * 4, 3).transpose(1, 2).flatten(0, 1)),
    "tokens added to the part": lambda x: attention_of(torch.cat([x[:, :, :2], x], 2)),
}


@pytest.mark.parametrize("what", OTHER_DIMENSIONS)
def test_attention_along_another_dimension_is_refused(what: str) -> None:
    x = torch.randn(2, 3, 16, 4, dtype=torch.float64)

    def rank(comm: ringcomm.Communicator) -> None:
        part = shard_sequence(torch.arange(32).view(2, 16), comm, 1)
        mine = x[:, :, part[0]]
        with context_parallel(comm):
            attention_of(mine)
            attention_of(mine.unflatten(2, (-1, 2)).mean(3))  # tokens that a model has merged
            with pytest.raises(UnsupportedError, match=r"expected this rank's part, .* made of 8 tokens"):
                OTHER_DIMENSIONS[what](mine)

    on_ranks(rank, 2)


def test_merged_tokens_of_sequence_first_parts() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        mine = shard_sequence(torch.ones(16, 2, 4), comm, 0).permute(1, 0, 2).unsqueeze(1)
        with context_parallel(comm):
            attention_of(mine.unflatten(2, (-1, 2)).mean(3))

    on_ranks(rank, 2)


def test_data_of_many_lengths_that_were_sharded_before() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        parts = [shard_sequence(torch.ones(1, 4 * n, 4), comm) for n in range(1, 100)]
        with context_parallel(comm):
            for part in (parts[0], parts[40], parts[-1]):
                attention_of(part.unsqueeze(1))

    on_ranks(rank, 2)
