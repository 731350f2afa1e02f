"""Context parallel: ring attention over parts of a sequence equals torch's attention over the whole."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringcomm
from ringcomm.context import attention as attention_module
from ringcomm.context import gather_sequence, positions, ring_attention, shard_sequence
from ringcomm.context.blocks import FLASH_CPU, FLASH_CUDA, PLAIN, Kernel, ScoreParams, kernel_for, merge, wide_type
from ringcomm.context.ring import FACTS, FACTS_NBYTES, GRADS, KEYS
from ringcomm.context.sequence import LAYOUTS, Block, block_of
from ringcomm.errors import (
    AbortedError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
    UnsupportedError,
)
from tests.support import torch_ranks
from tests.support.emulated import call

pytestmark = pytest.mark.usefixtures("one_thread")
Tensors = list[torch.Tensor]
SHAPES = {  # batch, query heads, key heads, length of a part, head_dim of q and k, and of v
    "equal heads": (2, 3, 3, 4, 8, 8),
    "grouped": (3, 6, 2, 6, 5, 5),
    "one key head, other values": (1, 4, 1, 2, 8, 3),
}


def on_ranks(fn: Callable[[Any], Any], world_size: int, timeout: float = 30) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=timeout)


def inputs(shape: tuple[int, ...], world_size: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k and v of the whole sequence, and the gradient of the output."""
    batch, heads, key_heads, part, dim, value_dim = shape
    generator = torch.Generator().manual_seed(1)
    wanted = [(heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim)]
    sizes = [(batch, count, part * world_size, width) for count, width in wanted]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, **options: Any) -> Tensors:
    """Output and gradients of torch's attention by matmul and softmax, in float64."""
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
    out.backward(grad.double())
    return [out.detach(), *(x.grad for x in leaves)]


def ring(whole: Tensors, world_size: int, layout: str, causal: bool, **options: Any) -> Tensors:
    """The same by ring attention, gathered, in its own type; the same on every rank."""

    def rank(comm: ringcomm.Communicator) -> Tensors:
        *leaves, grad = (shard_sequence(x, comm, 2, layout) for x in whole)
        for x in leaves:
            x.requires_grad_()
        out = ring_attention(*leaves, comm, causal=causal, layout=layout, **options)
        assert out.dtype == whole[0].dtype
        out.backward(grad)
        return [gather_sequence(x.detach(), comm, 2, layout) for x in (out, *(x.grad for x in leaves))]

    found = on_ranks(rank, world_size)
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))
    return found[0]


def assert_near(found: Tensors, expected: Tensors, tolerance: float) -> None:
    """Largest difference, relative to the largest value."""
    for name, x, y in zip(("out", "grad q", "grad k", "grad v"), found, expected, strict=True):
        off = float((x.double() - y).abs().max() / y.abs().max())
        assert off <= tolerance, f"{name} is off by {off:g}"


# ---- who meets whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_blocks_are_the_causal_mask_and_zigzag_makes_them_equal(world_size: int, layout: str) -> None:
    part = 6
    where = on_ranks(lambda comm: positions(part * world_size, comm, layout), world_size)
    assert torch.equal(torch.cat(where).sort().values, torch.arange(part * world_size))
    counts = []
    for rank in range(world_size):
        count = 0
        for source in range(world_size):
            sees = torch.zeros(part, part, dtype=torch.bool)
            block = block_of(rank, source, part, True, layout)
            if block is not None:
                square = torch.ones_like(sees[block.rows, block.keys])
                sees[block.rows, block.keys] = square.tril() if block.causal else square
            assert torch.equal(sees, where[source][None, :] <= where[rank][:, None])
            assert block_of(rank, source, part, False, layout) == Block(slice(0, part), slice(0, part), False)
            count += int(sees.sum())
        counts.append(count)
    assert (len(set(counts)) == 1) == (layout == "zigzag" or world_size == 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_computes_the_blocks_and_no_more(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, part = 4, 8
    pairs: Counter[tuple[str, int]] = Counter()

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Kernel:
        found = kernel_for(q, k, v, *rest, **options)

        def forward(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
            pairs["forward", threading.get_ident()] += q.shape[2] * k.shape[2]
            return found.forward(q, k, *rest)

        def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
            pairs["backward", threading.get_ident()] += q.shape[2] * k.shape[2]
            return found.backward(grad, q, k, *rest)

        return Kernel(forward, backward)

    monkeypatch.setattr(attention_module, "kernel_for", counting)
    ring(inputs((1, 1, 1, part, 4, 4), world_size), world_size, layout, True)
    square = part * part  # the masked one is counted whole
    expected = {
        "zigzag": [square + (world_size - 1) * square // 2] * world_size,
        "contiguous": [square * (rank + 1) for rank in range(world_size)],
    }
    for which in ("forward", "backward"):
        assert sorted(count for (name, _), count in pairs.items() if name == which) == expected[layout]


# ---- equal to attention over the whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients_equal_full_attention(world_size: int, causal: bool, layout: str, kind: str) -> None:
    whole = inputs(SHAPES[kind], world_size)
    expected = full(*whole, is_causal=causal)
    for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(choice):
            assert_near(ring(whole, world_size, layout, causal), expected, 1e-13)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Of the largest value: 16 bits round a block's output and each gradient once, and the sum of blocks once more.
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)],
)
@pytest.mark.parametrize("choice", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_narrow_types(dtype: torch.dtype, tolerance: float, choice: SDPBackend, causal: bool) -> None:
    whole = inputs((2, 4, 2, 32, 16, 16), 3, dtype)
    with sdpa_kernel(choice):
        assert_near(ring(whole, 3, "zigzag", causal), full(*whole, is_causal=causal), tolerance)


def test_scale_and_the_same_bits_in_every_run_and_without_overlap() -> None:
    whole = inputs(SHAPES["grouped"], 3, torch.float32)
    assert_near(ring(whole, 3, "zigzag", True, scale=0.3), full(*whole, is_causal=True, scale=0.3), 1e-6)
    first = ring(whole, 3, "zigzag", True)
    for overlap in (True, False):
        assert all(
            torch.equal(x, y) for x, y in zip(ring(whole, 3, "zigzag", True, overlap=overlap), first, strict=True)
        )


def test_large_scores_stay_finite() -> None:
    whole = inputs(SHAPES["equal heads"], 3)
    whole[0] = whole[0] * 1e3
    assert_near(ring(whole, 3, "zigzag", True), full(*whole, is_causal=True), 1e-9)


def test_any_strides() -> None:
    whole = inputs((2, 4, 2, 4, 6, 6), 3)

    def rank(comm: ringcomm.Communicator) -> list[bool]:
        parts = [shard_sequence(x, comm, 2) for x in whole[:3]]
        found = []
        # as parts of a projection (sequence before heads), and with the last dimension not contiguous
        for make in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
            leaves = [make(x).requires_grad_() for x in parts]
            plain = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in parts]
            for each in (leaves, plain):
                ring_attention(*each, comm, causal=True).sum().backward()  # a gradient of stride 0
            found += [torch.equal(x.grad, y.grad) for x, y in zip(leaves, plain, strict=True)]
        return found

    assert on_ranks(rank, 3) == [[True] * 6] * 3


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_fused_and_plain_kernels_agree(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, grad = inputs((2, 6, 2, 12, 7, 7), 1, dtype)
    if not causal:
        k, v = k[:, :, :5], v[:, :, :5]  # other lengths, and slices of a larger tensor
    eps = torch.finfo(dtype).eps
    found = []
    params = ScoreParams(causal, 0.4)
    for kernel in (FLASH_CPU, PLAIN):
        out, lse = kernel.forward(q, k, v, params)
        assert lse.dtype == wide_type(dtype)
        found.append([out, lse, *kernel.backward(grad, q, k, v, out.to(dtype), lse, params)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=16 * eps, atol=16 * eps)


def test_which_kernel_serves_what() -> None:
    q, k, v, _ = inputs((1, 2, 1, 4, 8, 8), 1, torch.float16)
    assert kernel_for(q, k, v) is FLASH_CPU
    assert kernel_for(q, k, v[..., :5]) is PLAIN
    assert kernel_for(*(x.to("meta") for x in (q, k, v))) is PLAIN
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_for(q, k, v) is PLAIN


def test_merging_blocks_is_attention_to_all_their_keys() -> None:
    q, k, v, _ = inputs((2, 3, 3, 9, 4, 4), 1)
    params = ScoreParams(False, 1.0)
    out, lse = PLAIN.forward(q, k[:, :, :2], v[:, :, :2], params)
    for part in (slice(2, 3), slice(3, 9)):
        merge(out, lse, *PLAIN.forward(q, k[:, :, part], v[:, :, part], params))
    expected = PLAIN.forward(q, k, v, params)
    torch.testing.assert_close((out, lse), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the fused kernel of CUDA runs there alone")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_fused_kernel_of_cuda_agrees_with_the_plain_one(causal: bool) -> None:
    q, k, v, grad = (x.cuda() for x in inputs((2, 6, 2, 64, 32, 32), 1, torch.bfloat16))
    assert kernel_for(q, k, v) is FLASH_CUDA
    found = []
    params = ScoreParams(causal, 0.2)
    for kernel in (FLASH_CUDA, PLAIN):
        out, lse = kernel.forward(q, k, v, params)
        found.append([out, lse, *kernel.backward(grad, q, k, v, out.to(q.dtype), lse, params)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2**-5, atol=2**-5)


# ---- what is sent ------------------------------------------------------------------------------------------------


@contextmanager
def counted(comm: ringcomm.Communicator, sent: Counter[int]) -> Iterator[None]:
    """Counts the bytes of messages by tag."""
    sendrecv = comm.sendrecv

    def send(x: torch.Tensor, dst: int, received: torch.Tensor, src: int, tag: int, **options: Any) -> Any:
        assert dst == (comm.rank + 1) % comm.world_size
        sent[tag] += x.nbytes
        return sendrecv(x, dst, received, src, tag, **options)

    comm.sendrecv = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        del comm.sendrecv


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_on_the_wire(world_size: int, dtype: torch.dtype, layout: str) -> None:
    whole = inputs((2, 6, 2, 4, 8, 8), world_size, dtype)

    def rank(comm: ringcomm.Communicator) -> tuple[Counter[int], Counter[int]]:
        q, k, v, grad = (shard_sequence(x, comm, 2, layout).requires_grad_() for x in whole)
        forward: Counter[int] = Counter()
        backward: Counter[int] = Counter()
        with counted(comm, forward):
            out = ring_attention(q, k, v, comm, causal=True, layout=layout)
        with counted(comm, backward):
            out.backward(grad.detach())
        return forward, backward

    keys_and_values = 2 * (2 * 2 * 4 * 8)  # elements of a rank's k and v
    pair, sums = keys_and_values * dtype.itemsize, keys_and_values * wide_type(dtype).itemsize
    hops = world_size - 1
    facts = FACTS_NBYTES if hops else 0
    for forward, backward in on_ranks(rank, world_size):
        assert forward == Counter({KEYS: hops * pair, FACTS: facts})
        assert backward == Counter({KEYS: hops * pair, GRADS: hops * sums, FACTS: facts})


# ---- autograd ----------------------------------------------------------------------------------------------------


def test_without_gradients_and_a_second_derivative_that_is_refused() -> None:
    whole = inputs(SHAPES["grouped"], 3)
    (expected, *_) = full(*whole, is_causal=True)

    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        q, k, v, _ = (shard_sequence(x, comm, 2).requires_grad_() for x in whole)
        with torch.no_grad():
            quiet = ring_attention(q, k, v, comm, causal=True)
        assert not quiet.requires_grad
        out = ring_attention(q, k, v, comm, causal=True)
        assert torch.equal(quiet, out)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match=r"ring_attention: rank \d cannot differentiate its gradient"):
            grad.sum().backward()
        return gather_sequence(quiet, comm, 2)

    for out in on_ranks(rank, 3):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_autocast_casts_as_for_torchs_own_attention() -> None:
    whole = inputs((1, 2, 2, 4, 8, 8), 3, torch.float32)

    def rank(comm: ringcomm.Communicator) -> bool:
        q, k, v, grad = (shard_sequence(x, comm, 2).requires_grad_() for x in whole)
        narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = ring_attention(q, k, v, comm)
            out.backward(grad.bfloat16())
        expected = ring_attention(*narrow, comm)
        expected.backward(grad.bfloat16())
        assert out.dtype == torch.bfloat16
        assert q.grad.dtype == torch.float32
        return torch.equal(out, expected) and torch.equal(q.grad, narrow[0].grad.float())

    for choice in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(choice):
            assert on_ranks(rank, 3) == [True] * 3


def test_parts_of_a_sequence() -> None:
    x = torch.arange(2 * 12 * 3.0, dtype=torch.float64).view(2, 12, 3)

    def rank(comm: ringcomm.Communicator) -> tuple[Any, ...]:
        found = []
        for layout in LAYOUTS:
            leaf = x.clone().requires_grad_()
            part = shard_sequence(leaf, comm, 1, layout)
            assert torch.equal(part, x[:, positions(12, comm, layout)])
            whole = gather_sequence(part, comm, -2, layout)
            assert torch.equal(whole, x)
            weight = float(comm.rank + 1)
            whole.backward(weight * x)  # each rank's gradient of the whole is another
            expected = torch.zeros_like(x)
            expected[:, positions(12, comm, layout)] = x[:, positions(12, comm, layout)] * 6.0  # 1 + 2 + 3
            found.append(torch.equal(leaf.grad, expected))
            assert torch.equal(gather_sequence(positions(12, comm, layout), comm, 0, layout), torch.arange(12))
        return positions(12, comm).tolist(), positions(12, comm, "contiguous").tolist(), found

    assert on_ranks(rank, 3) == [
        ([0, 1, 10, 11], [0, 1, 2, 3], [True, True]),
        ([2, 3, 8, 9], [4, 5, 6, 7], [True, True]),
        ([4, 5, 6, 7], [8, 9, 10, 11], [True, True]),
    ]


# ---- other ways of moving bytes ------------------------------------------------------------------------------------


def _in_processes(backend: str, choice: str) -> list[float]:
    import torch.distributed as dist

    comm = ringcomm.Communicator.from_process_group(dist.group.WORLD)
    assert comm.engine == f"torch.distributed:{backend}"
    whole = inputs(SHAPES["grouped"], comm.world_size)
    with sdpa_kernel(getattr(SDPBackend, choice)):
        q, k, v, grad = (shard_sequence(x, comm, 2).requires_grad_() for x in whole)
        out = ring_attention(q, k, v, comm, causal=True)
        out.backward(grad.detach())
    gathered = [gather_sequence(x.detach(), comm, 2) for x in (out, q.grad, k.grad, v.grad)]
    expected = full(*whole, is_causal=True)
    return [float((x - y).abs().max()) for x, y in zip(gathered, expected, strict=True)]


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_over_a_process_group(backend: str) -> None:
    for found in torch_ranks.run(_in_processes, backend, "FLASH_ATTENTION", world_size=3, backend=backend):
        assert max(found) < 1e-12


def on_an_emulated_device() -> None:
    whole = inputs(SHAPES["grouped"], 3)

    def rank(comm: ringcomm.Communicator) -> Tensors:
        q, k, v, grad = (shard_sequence(x, comm, 2).requires_grad_() for x in whole)
        keys = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1) != comm.rank
        out = ring_attention(q, k, v, comm, causal=True)
        masked = ring_attention(q, k, v, comm, causal=True, window=7, key_mask=keys, softcap=2.0)
        (out + masked).backward(grad.detach())
        return [out.detach(), masked.detach(), q.grad, k.grad, v.grad]

    there, here = (ringcomm.run_ranks(rank, 3, device=device, timeout=60) for device in ("cuda:0", "cpu"))
    for mine, theirs in zip(there, here, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.timeout(600)
def test_the_messages_of_the_cuda_engine_on_an_emulated_device() -> None:
    call("tests.context.test_attention", "on_an_emulated_device")


# ---- bad input ---------------------------------------------------------------------------------------------------


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


GOOD = filled(1, 2, 4, 8)
REFUSALS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "three dimensions": (lambda c: ring_attention(GOOD[0], GOOD[0], GOOD[0], c), ShapeError, "expected \\(B, H, S/W"),
    "batches": (lambda c: ring_attention(filled(2, 2, 4, 8), GOOD, GOOD, c), ShapeError, "expected \\(B, H, S/W"),
    "lengths": (lambda c: ring_attention(GOOD, GOOD[:, :, :2], GOOD[:, :, :2], c), ShapeError, "one sequence"),
    "values": (lambda c: ring_attention(GOOD, GOOD, GOOD[:, :1], c), ShapeError, "got q \\(1, 2, 4, 8\\)"),
    "head_dim": (lambda c: ring_attention(GOOD[..., :4], GOOD, GOOD, c), ShapeError, "got q \\(1, 2, 4, 4\\)"),
    "empty": (lambda c: ring_attention(*[GOOD[:, :, :0]] * 3, c), ShapeError, "none of them 0"),
    "heads": (lambda c: ring_attention(filled(1, 3, 4, 8), GOOD, GOOD, c), ShapeError, "multiple of the key heads"),
    "odd part": (lambda c: ring_attention(*[GOOD[:, :, :3]] * 3, c), ShapeError, "multiple of 6.*contiguous"),
    "layout": (lambda c: ring_attention(*[GOOD] * 3, c, layout="zag"), InvalidArgumentError, "layout='zag'"),
    "types": (lambda c: ring_attention(GOOD, GOOD, GOOD.double(), c), DtypeError, "convert them"),
    "key_mask": (
        lambda c: ring_attention(*[GOOD] * 3, c, key_mask=torch.ones(1, 12, dtype=torch.bool)),
        ShapeError,
        "key_mask of shape \\(1, 12\\).*expected \\(1, 4\\).*this rank's keys",
    ),
    "additive key_mask": (lambda c: ring_attention(*[GOOD] * 3, c, key_mask=filled(1, 4)), ShapeError, "torch.bool"),
    "integers": (lambda c: ring_attention(*[GOOD.int()] * 3, c), DtypeError, "torch.int32"),
    "indivisible": (lambda c: shard_sequence(filled(1, 9), c), ShapeError, "multiple of 6 \\(zigzag on 3 ranks\\)"),
    "no such dim": (lambda c: shard_sequence(filled(6), c), ShapeError, "dim=1"),
    "positions": (lambda c: positions(10, c, "contiguous"), ShapeError, "^positions: .*length=10.*of 3"),
    "odd gather": (lambda c: gather_sequence(filled(1, 3), c), ShapeError, "even number"),
    "gather dim": (lambda c: gather_sequence(filled(3), c, 2), ShapeError, "dim=2"),
    "shard layout": (lambda c: shard_sequence(filled(1, 6), c, layout="x"), InvalidArgumentError, "layout='x'"),
    "positions' layout": (lambda c: positions(6, c, "x"), InvalidArgumentError, "^positions: .*layout='x'"),
    "gather layout": (lambda c: gather_sequence(filled(1, 6), c, layout="x"), InvalidArgumentError, "layout='x'"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_input_is_refused_before_anything_is_sent(what: str) -> None:
    attempt, kind, message = REFUSALS[what]

    def rank(comm: ringcomm.Communicator) -> bool:
        with pytest.raises(kind, match=message) as caught:
            attempt(comm)
        assert f"rank {comm.rank}" in str(caught.value)
        return ring_attention(GOOD, GOOD, GOOD, comm).shape == GOOD.shape  # the communicator still works

    assert on_ranks(rank, 3) == [True] * 3


DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "shapes": lambda rank: {"part": GOOD if rank else filled(1, 2, 8, 8)},
    "shapes of as many bytes": lambda rank: {"part": GOOD if rank else filled(2, 1, 4, 8)},
    "types of as many bytes": lambda rank: {"part": GOOD.to(torch.float16 if rank else torch.bfloat16)},
    "causal": lambda rank: {"causal": rank == 0},
    "layout": lambda rank: {"layout": LAYOUTS[rank == 2]},
    "scale": lambda rank: {"scale": 1.0 + rank},
    "window": lambda rank: {"window": 3 + rank},
    "a key_mask": lambda rank: {"key_mask": torch.ones(1, 4, dtype=torch.bool) if rank else None},
    "softcap": lambda rank: {"softcap": 1.0 + rank},
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_raise_at_once(what: str, overlap: bool) -> None:
    failures: dict[int, Exception] = {}

    def rank(comm: ringcomm.Communicator) -> None:
        options = DIFFERENT[what](comm.rank)
        part = options.pop("part", GOOD)
        try:
            ring_attention(part, part, part, comm, overlap=overlap, **options)
        except (MismatchError, AbortedError) as error:
            failures[comm.rank] = error

    begin = time.monotonic()
    on_ranks(rank, 3, timeout=100)
    assert time.monotonic() - begin < 60
    assert any(isinstance(error, MismatchError) for error in failures.values())
    assert any("got forward of q (" in str(error) and " where rank " in str(error) for error in failures.values())


def test_a_rank_in_backward_while_another_is_in_forward_raises_at_once() -> None:
    caught: list[str] = []
    forward_done = threading.Barrier(3)  # not of the communicator: an abort may overtake a rank that returns from it

    def rank(comm: ringcomm.Communicator) -> None:
        leaf = GOOD.clone().requires_grad_()
        out = ring_attention(leaf, leaf, leaf, comm)
        forward_done.wait(timeout=60)
        try:
            if comm.rank == 1:
                ring_attention(leaf, leaf, leaf, comm)
            else:
                out.sum().backward()
        except MismatchError as error:
            caught.append(str(error))
        except AbortedError:
            pass

    begin = time.monotonic()
    on_ranks(rank, 3, timeout=100)
    assert time.monotonic() - begin < 60
    assert any("forward of" in message and "backward of" in message for message in caught)
