"""Layers that are cut over the ranks equal nn.Linear, nn.Embedding and nn.Dropout: forward and every gradient.

Tolerances are shares of the largest magnitude: 1e-5 in float32, 1e-12 in float64 (tests/support/mesh/tensor_cases.py).
"""

from __future__ import annotations

import copy
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import InvalidArgumentError, ShapeError, UnsupportedError
from ringcomm.modules.shard_spec import part_of, take
from ringcomm.tensor_parallel.dropout import ShardedDropout
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.tensor_parallel.overlapped import gather_linear, linear_scatter
from tests.support.mesh.tensor_cases import close, on_ranks, part, sent, tensor_of

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = [2, 3, 4]


def filled(layer: Any, whole: nn.Module) -> Any:
    """The layer with the values of a whole one."""
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(part(dict(whole.named_parameters())[key], p))
    return layer


def compare(layer: nn.Module, whole: nn.Module) -> None:
    expected = dict(whole.named_parameters())
    assert dict(layer.named_parameters()).keys() == expected.keys()
    for key, p in layer.named_parameters():
        assert p.grad is not None
        assert close(p.grad, part(expected[key].grad, p)), key


# ---- linear layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("outputs", "options"),
    [
        (24, {}),
        (24, {"gather_output": True}),
        (36, {"parts": [12, 12, 12], "gather_output": True}),
        (48, {"parts": [24, 12, 12]}),
        (25, {"pad": True, "gather_output": True}),
        (25, {"pad": True}),
        (2, {"pad": True, "gather_output": True}),  # fewer than ranks
    ],
)
@pytest.mark.parametrize(("bias", "shape"), [(True, (2, 3, 8)), (False, (8,))])
def test_column(outputs: int, options: Any, bias: bool, shape: Any, dtype: torch.dtype, world_size: int) -> None:
    whole = nn.Linear(8, outputs, bias, dtype=dtype)
    x = tensor_of(*shape, seed=1, dtype=dtype).requires_grad_()
    y = whole(x)
    c = tensor_of(*y.shape, seed=2, dtype=dtype)
    y.backward(c)

    def rank(comm: Any) -> None:
        layer = filled(ColumnParallelLinear(8, outputs, bias, comm, dtype=dtype, **options), whole)
        mine = x.detach().clone().requires_grad_()
        out = layer(mine)
        gathered = options.get("gather_output", False)
        cut = part_of(layer.weight)

        def own(t: torch.Tensor) -> torch.Tensor:
            return t if gathered else take(t.movedim(-1, 0), cut, layer.weight.shape[0]).movedim(0, -1)

        assert close(out, own(y))
        out.backward(own(c))
        assert mine.grad is not None
        assert close(mine.grad, x.grad)
        compare(layer, whole)

    on_ranks(rank, world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("input_is_parallel", [True, False])
@pytest.mark.parametrize(("bias", "shape"), [(True, (2, 3, 24)), (False, (24,))])
def test_row(bias: bool, shape: Any, input_is_parallel: bool, dtype: torch.dtype, world_size: int) -> None:
    whole = nn.Linear(24, 7, bias, dtype=dtype)
    x = tensor_of(*shape, seed=1, dtype=dtype).requires_grad_()
    y = whole(x)
    c = tensor_of(*y.shape, seed=2, dtype=dtype)
    y.backward(c)

    def rank(comm: Any) -> None:
        layer = filled(RowParallelLinear(24, 7, bias, comm, input_is_parallel=input_is_parallel, dtype=dtype), whole)
        mine = x.detach().chunk(world_size, -1)[comm.rank] if input_is_parallel else x.detach()
        mine = mine.clone().requires_grad_()
        out = layer(mine)
        assert close(out, y)
        out.backward(c)
        assert x.grad is not None
        assert mine.grad is not None
        assert close(mine.grad, x.grad.chunk(world_size, -1)[comm.rank] if input_is_parallel else x.grad)
        compare(layer, whole)

    on_ranks(rank, world_size)


class Mlp(nn.Module):
    """What a block does: a norm that all ranks have, and two layers that are cut."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dim", "bias"), [(0, True), (1, True), (1, False), (-2, True)])
def test_sequence_parallel(dim: int, bias: bool, overlap: bool, dtype: torch.dtype, world_size: int) -> None:
    whole = Mlp(nn.Linear(6, 24, bias, dtype=dtype), nn.Linear(24, 6, bias, dtype=dtype))
    x = tensor_of(12, 24, 6, seed=1, dtype=dtype).requires_grad_()
    y = whole(x)
    c = tensor_of(*y.shape, seed=2, dtype=dtype)
    y.backward(c)

    def rank(comm: Any) -> None:
        options: Any = {"sequence_dim": dim, "overlap": overlap, "dtype": dtype}
        up, down = ColumnParallelLinear(6, 24, bias, comm, **options), RowParallelLinear(24, 6, bias, comm, **options)
        model = filled(Mlp(up, down), whole)

        def own(t: torch.Tensor) -> torch.Tensor:
            return t.detach().chunk(world_size, dim)[comm.rank].clone()

        mine = own(x).requires_grad_()
        out = model(mine)
        assert close(out, own(y))
        assert out.is_contiguous()
        out.add_(0)  # may be changed in place
        out.backward(own(c))
        assert x.grad is not None
        assert mine.grad is not None
        assert close(mine.grad, own(x.grad))
        compare(model, whole)

    on_ranks(rank, world_size)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_the_whole_does_not_depend_on_the_ranks(kind: Any) -> None:
    """A rank's initial values are its part of the values that one process draws."""
    torch.manual_seed(3)
    whole = kind(10, 12)

    def layer(comm: Any) -> nn.Module:
        if kind is nn.Embedding:
            return VocabParallelEmbedding(10, 12, comm=comm)
        return (ColumnParallelLinear if layer.column else RowParallelLinear)(10, 12, comm=comm)

    for layer.column, world_size in itertools.product((True, False), (1, 2)):
        for number in range(world_size):
            torch.manual_seed(3)
            made = layer(SimpleNamespace(rank=number, world_size=world_size))
            for key, p in made.named_parameters():
                assert torch.equal(p, part(dict(whole.named_parameters())[key], p))


def refusal(make: Any, world_size: int = 3) -> str:
    def rank(comm: Any) -> str:
        with pytest.raises((InvalidArgumentError, UnsupportedError)) as found:
            make(comm)
        assert not sent(comm)
        return str(found.value)

    return on_ranks(rank, world_size)[1]


def test_refusals() -> None:
    for make, sentence in {
        lambda comm: ColumnParallelLinear(4, 8, comm=comm): "ColumnParallelLinear: rank 1 got 8 outputs, expected 3 "
        "equal parts; use a number of ranks that divides it",
        lambda comm: RowParallelLinear(8, 4, comm=comm): "RowParallelLinear: rank 1 got 8 inputs, expected 3 equal "
        "parts; use a number of ranks that divides it",
        lambda comm: ColumnParallelLinear(4, 9, comm=comm, parts=[4, 4]): "ColumnParallelLinear: rank 1 got "
        "parts=[4, 4] for the 9 outputs, expected parts that add up to them; pass the extents of the fused outputs",
        lambda comm: ColumnParallelLinear(4, 9, comm=comm, overlap=True): "ColumnParallelLinear: rank 1 got "
        "overlap=True without a sequence_dim, expected one, because only messages along the sequence can be divided; "
        "pass sequence_dim",
        lambda comm: ColumnParallelLinear(4, 8, comm=comm, parts=[4, 4], pad=True): "ColumnParallelLinear: rank 1 got "
        "pad=True with the parts [4, 4], expected one of the two, because only a single part can be padded; use "
        "extents that divide",
        lambda comm: ColumnParallelLinear(4, 9): "ColumnParallelLinear: got no communicator, expected the ranks over "
        "which it is cut; pass comm=, such as mesh['tp']",
    }.items():
        assert refusal(make) == sentence


def test_a_pickled_layer_is_refused() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        sentence = (
            "parallelize: rank 1 cannot pickle layers that are cut over the ranks, because only this process has their "
            "communicator; pickle the state_dict(), or copy the module with copy.deepcopy"
        )
        assert refusal(lambda comm, kind=kind: pickle.dumps(kind(6, 6, comm=comm))) == sentence


def test_a_copy_keeps_the_marks_of_its_parameters() -> None:
    def rank(comm: Any) -> None:
        for kind in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
            layer = kind(6, 6, comm=comm)
            twin = copy.deepcopy(layer)
            assert twin.group is layer.group
            for p, mine in zip(layer.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p, mine)
                assert p is not mine
                assert part_of(p) == part_of(mine)

    on_ranks(rank, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_layers_send_no_gradients_of_theirs(overlap: bool) -> None:
    def rank(comm: Any) -> tuple[bool, Any, Any]:
        options: Any = {"sequence_dim": 0, "overlap": overlap}
        layers = nn.Sequential(
            ColumnParallelLinear(4, 6, comm=comm, **options), RowParallelLinear(6, 4, comm=comm, **options)
        )
        layers.requires_grad_(False)
        x = torch.ones(2, 4, requires_grad=True)
        y = layers(x).sum()
        sent(comm)
        y.backward()
        frozen = sent(comm)
        layers.requires_grad_(True)
        y = layers(torch.ones(2, 4)).sum()
        sent(comm)
        y.backward()
        return x.grad is not None and all(p.grad is not None for p in layers.parameters()), frozen, sent(comm)

    for right, frozen, trained in on_ranks(rank, 3):
        assert right
        assert frozen == {
            "all_gather calls": 1, "all_gather elements": 24, "reduce_scatter calls": 1, "reduce_scatter elements": 24,
        }  # fmt: skip
        assert trained["reduce_scatter calls"] == 0  # the input needs no gradient
        assert trained["all_gather calls"] == 1 + overlap
        assert trained["all_reduce elements"] == 4  # the bias of the second


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_overlapped_forms_equal_the_plain_ones(world_size: int) -> None:
    w, v, x = tensor_of(5, 4, seed=0), tensor_of(4, 5, seed=1), tensor_of(2, 6, 4, seed=2)
    expected = (F.linear(x, w, w[:, 0]), F.linear(F.linear(x, w), v))

    def rank(comm: Any) -> None:
        mine = x.chunk(world_size, 1)[comm.rank]
        assert close(gather_linear(mine, w, w[:, 0], comm, 1), expected[0])
        share = v / world_size  # all ranks' products add up
        assert close(linear_scatter(F.linear(x, w), share, comm, -2), expected[1].chunk(world_size, 1)[comm.rank])
        if world_size == 3:
            with pytest.raises(ShapeError, match="expected 3 equal parts along dimension 1"):
                linear_scatter(torch.ones(2, 4, 5).double(), share, comm, 1)

    on_ranks(rank, world_size)


# ---- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize(("vocabulary", "padding"), [(24, None), (25, 0), (25, 13), (25, -1), (2, None)])
def test_embedding(vocabulary: int, padding: int | None, sequence_dim: int | None, world_size: int) -> None:
    whole = nn.Embedding(vocabulary, 5, padding, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (3, 12), generator=torch.Generator().manual_seed(0))
    tokens[0] = torch.arange(12) % vocabulary if padding is None else whole.padding_idx
    y = whole(tokens)
    c = tensor_of(*y.shape, seed=2)
    y.backward(c)

    def rank(comm: Any) -> None:
        made = VocabParallelEmbedding(vocabulary, 5, padding, comm, sequence_dim=sequence_dim, dtype=torch.float64)
        layer = filled(made, whole)

        def own(t: torch.Tensor) -> torch.Tensor:
            return t if sequence_dim is None else t.chunk(world_size, sequence_dim)[comm.rank]

        out = layer(tokens)
        assert torch.equal(out, own(y))
        out.backward(own(c))
        compare(layer, whole)
        for wrong in (-1, vocabulary):
            with pytest.raises(
                InvalidArgumentError, match=f"got a token of {wrong}, expected 0 to {vocabulary - 1}; lo"
            ):
                layer(torch.tensor([0, wrong]))

    on_ranks(rank, world_size)


# ---- dropout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "turned"), [(0, False), (1, False), (-2, False), (1, True), (2, True)])
def test_dropout_has_the_bits_of_the_whole(
    dim: int, turned: bool, dtype: torch.dtype, p: float, world_size: int
) -> None:
    """The ranks' generators stay alike, and like that of one process."""
    x = tensor_of(12, 24, 12, seed=0, dtype=dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
    torch.manual_seed(5)
    expected, after = nn.Dropout(p)(x), torch.rand(3)
    for rank in range(world_size):
        torch.manual_seed(5)
        layer = ShardedDropout(p, SimpleNamespace(rank=rank, world_size=world_size), dim)  # type: ignore[arg-type]
        mine = x.chunk(world_size, dim)[rank]
        assert torch.equal(layer(mine), expected.chunk(world_size, dim)[rank])
        assert torch.equal(torch.rand(3), after)
        assert layer.eval()(mine) is mine
    with pytest.raises(InvalidArgumentError, match=r"got p=1\.5, expected 0 to 1"):
        ShardedDropout(1.5, SimpleNamespace(rank=0, world_size=1), 0)  # type: ignore[arg-type]


# ---- under what users run layers -----------------------------------------------------------------------------------


def both(comm: Any, sequence_dim: int | None, overlap: bool, whole: nn.Module) -> Any:
    options: Any = {"sequence_dim": sequence_dim, "overlap": overlap}
    return filled(
        Mlp(ColumnParallelLinear(6, 24, comm=comm, **options), RowParallelLinear(24, 6, comm=comm, **options)), whole
    )


KINDS = [(None, False), (1, False), (1, True)]


@pytest.mark.parametrize(("sequence_dim", "overlap"), KINDS)
def test_activation_checkpointing_repeats_the_forward_messages_and_no_gradient(
    sequence_dim: Any, overlap: bool
) -> None:
    whole = Mlp(nn.Linear(6, 24), nn.Linear(24, 6))
    x = tensor_of(2, 6, 6, seed=0, dtype=torch.float32)

    def rank(comm: Any) -> tuple[list[Any], list[Any]]:
        mine = x if sequence_dim is None else x.chunk(3, 1)[comm.rank]
        found = []
        for again in (False, True):
            model, x_in = both(comm, sequence_dim, overlap, whole), mine.clone().requires_grad_()
            y = checkpoint(model, x_in, use_reentrant=False) if again else model(x_in)
            y.square().sum().backward()
            found.append([[x_in.grad, *(p.grad for p in model.parameters())], sent(comm)])
        return found

    for plain, repeated in on_ranks(rank, 3):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], repeated[0], strict=True))
        message = "all_gather" if sequence_dim else "all_reduce"
        plain[1][f"{message} calls"] += sequence_dim is not None
        plain[1]["reduce_scatter calls"] += overlap  # else of the output, and backward needs nothing of it
        assert all(repeated[1][key] == count for key, count in plain[1].items() if key.endswith("calls"))


@pytest.mark.parametrize(("sequence_dim", "overlap"), KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_autocast(sequence_dim: Any, overlap: bool, world_size: int) -> None:
    """The types are those of nn.Linear, the messages of activations in 16 bits."""
    whole = Mlp(nn.Linear(6, 24), nn.Linear(24, 6))
    x = tensor_of(2, 6, 6, seed=0, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = whole(x)
    y.float().square().sum().backward()

    def rank(comm: Any) -> None:
        model = both(comm, sequence_dim, overlap, whole)

        def own(t: torch.Tensor) -> torch.Tensor:
            return t.detach() if sequence_dim is None else t.detach().chunk(world_size, 1)[comm.rank]

        mine = own(x).clone().requires_grad_()
        types = set()
        all_gather = TensorParallelGroup.of(comm).all_gather
        TensorParallelGroup.of(comm).all_gather = lambda t, dim: (types.add(t.dtype), all_gather(t, dim))[1]  # type: ignore
        with torch.autocast("cpu", torch.bfloat16):
            out = model(mine)
        assert types <= {torch.bfloat16}
        assert out.dtype == y.dtype == torch.bfloat16
        assert close(out, own(y))
        out.float().square().sum().backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        assert close(mine.grad, own(x.grad), torch.bfloat16)
        for key, p in model.named_parameters():
            assert close(p.grad, part(dict(whole.named_parameters())[key].grad, p), torch.bfloat16), key

    on_ranks(rank, world_size)


@pytest.mark.parametrize(("sequence_dim", "overlap"), KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any, sequence_dim: Any, overlap: bool) -> None:
    whole = Mlp(nn.Linear(6, 24), nn.Linear(24, 6))
    x = tensor_of(2, 6, 6, seed=0, dtype=torch.float32)
    with torch.no_grad():
        y = whole(x)

    def rank(comm: Any) -> None:
        model = both(comm, sequence_dim, overlap, whole)
        with mode():
            out = model(x if sequence_dim is None else x.chunk(3, 1)[comm.rank])
        assert close(out, y if sequence_dim is None else y.chunk(3, 1)[comm.rank])
        assert not out.requires_grad

    on_ranks(rank, 3)


@pytest.mark.parametrize(("sequence_dim", "overlap"), KINDS)
def test_bfloat16(sequence_dim: Any, overlap: bool) -> None:
    whole = Mlp(nn.Linear(6, 24), nn.Linear(24, 6)).bfloat16()
    x = tensor_of(2, 12, 6, seed=0, dtype=torch.bfloat16).requires_grad_()
    y = whole(x)
    y.backward(torch.ones_like(y))

    def rank(comm: Any) -> None:
        model = filled(both(comm, sequence_dim, overlap, whole).bfloat16(), whole)
        mine = (x if sequence_dim is None else x.chunk(3, 1)[comm.rank]).detach().clone().requires_grad_()
        out = model(mine)
        assert close(out, y if sequence_dim is None else y.chunk(3, 1)[comm.rank])
        out.backward(torch.ones_like(out))
        compare(model, whole)

    on_ranks(rank, 3)
