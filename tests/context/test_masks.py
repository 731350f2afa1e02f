"""Context parallel: sliding windows, hidden keys and softcaps equal attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringcomm
from ringcomm.context import context_parallel, gather_sequence, positions, ring_attention, shard_sequence
from ringcomm.context.sequence import LAYOUTS, blocks_of
from ringcomm.errors import UnsupportedError
from tests.context.test_attention import SHAPES, Tensors, assert_near, inputs, on_ranks
from tests.support.choice import slow

pytestmark = pytest.mark.usefixtures("one_thread")


def seen_by_position(length: int, causal: bool, window: int | None) -> torch.Tensor:
    at = torch.arange(length)
    ahead = at[:, None] - at
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if window is None else seen & (ahead.abs() < window)


def by_formula(whole: Tensors, seen: torch.Tensor, softcap: float | None = None) -> Tensors:
    """Output and gradients by the formula, in float64; a query that sees nothing gets 0."""
    q, k, v = (x.double().clone().requires_grad_() for x in whole[:3])
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
    out = weights @ values
    out.backward(whole[3].double())
    return [out.detach(), *(x.grad for x in (q, k, v))]


def by_ring(whole: Tensors, world_size: int, layout: str, keys: torch.Tensor | None = None, **options: Any) -> Tensors:
    """The same by ring attention, gathered; ``keys`` (B, S) are seen."""

    def rank(comm: ringcomm.Communicator) -> Tensors:
        *leaves, grad = (shard_sequence(x, comm, 2, layout).requires_grad_() for x in whole)
        mask = None if keys is None else shard_sequence(keys, comm, 1, layout)
        out = ring_attention(*leaves, comm, layout=layout, key_mask=mask, **options)
        out.backward(grad.detach())
        return [gather_sequence(x.detach(), comm, 2, layout) for x in (out, *(x.grad for x in leaves))]

    return on_ranks(rank, world_size)[0]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 13, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_blocks_are_the_window_and_no_block_is_empty(world_size: int, causal: bool, layout: str, window: int) -> None:
    part = 6
    where = on_ranks(lambda comm: positions(part * world_size, comm, layout), world_size)
    expected = seen_by_position(part * world_size, causal, window)
    for rank in range(world_size):
        for source in range(world_size):
            seen = torch.zeros(part, part, dtype=torch.bool)
            for block in blocks_of(rank, source, part, causal, layout, world_size, window):
                visible = block.visible(window, torch.device("cpu"))
                visible = torch.ones(()) == 1 if visible is None else visible[0, 0]
                assert visible.any()
                assert not seen[block.rows, block.keys].any()
                seen[block.rows, block.keys] = visible
            assert torch.equal(seen, expected[where[rank]][:, where[source]])


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("world_size", [2, 3, slow(4)])
def test_windows_and_hidden_keys_equal_full_attention(world_size: int, causal: bool, layout: str, kind: str) -> None:
    whole = inputs(SHAPES[kind], world_size)
    batch, length = whole[0].shape[0], whole[0].shape[2]
    keys = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) > 0.3
    keys[:, -2:] = True
    keys[0, : length // 2] = False  # padding on the left: these queries see nothing where attention is causal
    for window in (None, 2, 3, length - 1, length):
        seen = seen_by_position(length, causal, window)
        for hidden in (None, keys):
            expected = by_formula(whole, seen if hidden is None else seen & hidden[:, None, None])
            for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
                with sdpa_kernel(choice):
                    found = by_ring(whole, world_size, layout, hidden, causal=causal, window=window)
                    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_softcap_equals_full_attention(layout: str) -> None:
    whole = inputs(SHAPES["grouped"], 3)
    whole[0] = whole[0] * 10  # scores that the cap changes
    keys = torch.ones(whole[0].shape[0], whole[0].shape[2], dtype=torch.bool)
    keys[1, :4] = False
    for window in (None, 5):
        seen = seen_by_position(keys.shape[1], True, window) & keys[:, None, None]
        expected = by_formula(whole, seen, softcap=2.0)
        assert_near(by_ring(whole, 3, layout, keys, causal=True, window=window, softcap=2.0), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_in_narrow_types(dtype: torch.dtype) -> None:
    whole = inputs((2, 4, 2, 32, 16, 16), 3, dtype)
    keys = torch.ones(2, 96, dtype=torch.bool)
    keys[0, 70:] = False
    expected = by_formula(whole, seen_by_position(96, True, 40) & keys[:, None, None])
    for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(choice):
            found = by_ring(whole, 3, "zigzag", keys, causal=True, window=40)
            assert_near(found, expected, {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype])


def test_nan_stays_nan() -> None:
    whole = inputs((1, 2, 2, 4, 8, 8), 3)
    whole[0][0, 0, 5] = float("nan")
    keys = torch.ones(1, 12, dtype=torch.bool)
    keys[0, 8:] = False
    for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(choice):
            out = by_ring(whole, 3, "zigzag", keys)[0]
        assert out[0, 0, 5].isnan().all()
        assert not out[0, 1].isnan().any()


# ---- torch's own masks in a context --------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Attention to all tokens that are no padding, by any of the masks that torch takes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.into, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        mask = keep[:, None, None]
        if self.kind == "expanded":
            mask = mask.expand(-1, 3, x.shape[1], -1)
        elif self.kind != "bool":
            lowest = float("-inf") if self.kind == "-inf" else torch.finfo(x.dtype).min
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, lowest)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["bool", "expanded", "-inf", "least"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_of_keys_in_the_context(layout: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Encoder(kind).double()
    x = torch.randn(3, 12, 12, dtype=torch.float64)
    keep = torch.arange(12) < torch.tensor([[12], [5], [9]])
    expected = model(x, keep)
    expected.square().sum().backward()
    grad = model.into.weight.grad
    assert grad is not None
    model.into.weight.grad = None
    models = [Encoder(kind).double() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine = models[comm.rank]
        mine.load_state_dict(model.state_dict())
        with context_parallel(comm, layout=layout):
            out = mine(*(shard_sequence(t, comm, 1, layout) for t in (x, keep)))
            out.square().sum().backward()
        return gather_sequence(out.detach(), comm, 1, layout), comm.all_reduce(mine.into.weight.grad, "sum")

    for out, total in on_ranks(rank, 3):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total, grad, rtol=1e-12, atol=1e-12)


NO_KEY_MASKS = {
    "of each query": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "of each head": torch.ones(1, 2, 1, 4, dtype=torch.bool),
    "of another length": torch.ones(1, 1, 1, 8, dtype=torch.bool),
    "a bias": torch.full((1, 1, 1, 4), -1.0),
    "with a gradient": torch.zeros(1, 1, 1, 4, requires_grad=True),
}


@pytest.mark.parametrize("what", NO_KEY_MASKS)
def test_other_masks_are_refused(what: str) -> None:
    x = torch.ones(1, 2, 4, 8)

    def rank(comm: ringcomm.Communicator) -> None:
        match = rf"rank {comm.rank} got an attn_mask of shape .*expected one that hides keys"
        with context_parallel(comm), pytest.raises(UnsupportedError, match=match):
            F.scaled_dot_product_attention(x, x, x, attn_mask=NO_KEY_MASKS[what])

    on_ranks(rank, 2)
