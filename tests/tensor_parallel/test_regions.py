"""f, g and their conjugates: forward, backward, twice backward, and one message for layers that share an input."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringcomm.errors import ShapeError
from ringcomm.tensor_parallel.group import TensorParallelGroup, f, f_bar, g, g_bar, gather, scatter
from ringcomm.tensor_parallel.layers import ColumnParallelLinear
from ringcomm.tools.bench.check import tree_sum
from tests.support.mesh.tensor_cases import close, on_ranks, sent, tensor_of, whole_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
Tensors = list[torch.Tensor]


def added(values: Tensors, dim: int) -> Tensors:
    return [sum(values[1:], values[0])] * len(values)


def joined(values: Tensors, dim: int) -> Tensors:
    return [torch.cat(values, dim)] * len(values)


def parts_of_sum(values: Tensors, dim: int) -> Tensors:
    return [*added(values, dim)[0].chunk(len(values), dim)]


def own(values: Tensors, dim: int) -> Tensors:
    return [x.chunk(len(values), dim)[rank] for rank, x in enumerate(values)]


def same(values: Tensors, dim: int) -> Tensors:
    return values


Rule = Callable[[Tensors, int], Tensors]
OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], Rule, Rule]] = {
    "f": (lambda x, comm, dim: f(x, comm), same, added),
    "f_bar": (lambda x, comm, dim: f_bar(x, comm), added, same),
    "g": (g, joined, parts_of_sum),
    "g_bar": (g_bar, parts_of_sum, joined),
    "gather": (gather, joined, own),
    "scatter": (scatter, own, joined),
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_an_operator_and_its_gradient(name: str, dim: int, world_size: int) -> None:
    operator, there, back = OPERATORS[name]
    xs = [whole_numbers(12, 24, 36, seed=rank) for rank in range(world_size)]
    ys = there(xs, dim)
    grads = [whole_numbers(*ys[0].shape, seed=100 + rank) for rank in range(world_size)]
    dxs = back(grads, dim)

    def rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = xs[comm.rank].clone().requires_grad_()
        y = operator(x, comm, dim)
        y.backward(grads[comm.rank])
        return y.detach(), x.grad

    for (y, dx), expected, gradient in zip(on_ranks(rank, world_size), ys, dxs, strict=True):
        assert torch.equal(y, expected)
        assert dx is not None
        assert torch.equal(dx, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_canonical(dtype: torch.dtype) -> None:
    xs = [tensor_of(6, 8, seed=rank, dtype=dtype) for rank in range(3)]
    expected = tree_sum(xs) if dtype == torch.float32 else tree_sum([x.float() for x in xs]).to(dtype)

    def rank(comm: Any) -> list[torch.Tensor]:
        x = torch.zeros(6, 8, dtype=dtype, requires_grad=True)
        f(x, comm).backward(xs[comm.rank])
        assert x.grad is not None
        return [f_bar(xs[comm.rank], comm), gather(g_bar(xs[comm.rank], comm, 0), comm, 0), x.grad]

    for found in on_ranks(rank, 3):
        assert [torch.equal(each, expected) for each in found] == [True] * 3


def test_one_rank_sends_nothing_and_gets_its_own_tensor() -> None:
    def rank(comm: Any) -> bool:
        x = torch.ones(3, 3, requires_grad=True)
        return all(operator(x, comm, 0) is x for operator, _, _ in OPERATORS.values()) and not sent(comm)

    assert on_ranks(rank, 1) == [True]


@pytest.mark.parametrize("operator", [g_bar, scatter])
def test_a_length_that_does_not_divide_is_refused_before_anything_is_sent(operator: Any) -> None:
    def rank(comm: Any) -> int:
        with pytest.raises(
            ShapeError, match=r"rank \d got shape \(4, 5\), expected 3 equal parts along dimension 1; pad"
        ):
            operator(torch.ones(4, 5), comm, 1)
        return len(sent(comm))

    assert on_ranks(rank, 3) == [0] * 3


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "f"])
def test_a_result_can_be_changed_in_place(name: str) -> None:
    """A batch of one lays parts one behind the other in memory, where views are tempting."""

    def rank(comm: Any) -> tuple[bool, torch.Tensor | None]:
        x = torch.ones(1, 4, 3, requires_grad=True)
        inside = x * 1
        y = OPERATORS[name][0](inside, comm, 1)
        y.mul_(2).add_(1)
        y.sum().backward()
        return torch.equal(inside, x), x.grad

    for kept, gradient in on_ranks(rank, 2):
        assert kept
        assert torch.equal(gradient, torch.full((1, 4, 3), 4.0 if name == "g" else 2.0))  # g: the sum of both ranks'


def test_gradients_can_be_differentiated_again() -> None:
    """The penalty on an input's gradient, of a network that is tensor parallel, sequence parallel and whole."""
    w1, w2, x = (tensor_of(*shape, seed=i) for i, shape in enumerate([(6, 4), (4, 6), (2, 6, 4)]))

    def penalty(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return dx.square().sum()

    whole = [each.clone().requires_grad_() for each in (w1, w2, x)]
    penalty(torch.tanh(whole[2] @ whole[0].t()) @ whole[1].t(), whole[2]).backward()

    def rank(comm: Any, sequence: bool) -> list[torch.Tensor | None]:
        mine = [w1.chunk(3, 0)[comm.rank], w2.chunk(3, 1)[comm.rank], x]
        a, b, c = (each.clone().requires_grad_() for each in mine)
        inside = g(scatter(c, comm, 1), comm, 1) if sequence else f(c, comm)
        z = torch.tanh(inside @ a.t()) @ b.t()
        y = gather(g_bar(z, comm, 1), comm, 1) if sequence else f_bar(z, comm)
        penalty(y, c).backward()
        return [a.grad, b.grad, c.grad]

    for sequence in (False, True):
        for number, found in enumerate(on_ranks(lambda comm, s=sequence: rank(comm, s), 3)):
            expected = [whole[0].grad.chunk(3, 0)[number], whole[1].grad.chunk(3, 1)[number], whole[2].grad]
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_backward_pass_leaves_nothing_behind() -> None:
    """Also where the input is a leaf, as that of a pipeline's stage."""

    def rank(comm: Any) -> list[bool]:
        gone = []
        for leaf in (True, False):
            x = torch.ones(2, 2, 6, requires_grad=True)
            inside = x if leaf else x * 1
            inputs = weakref.ref(inside)
            out = [layer(inside) for layer in three_layers(comm)]
            del inside
            torch.stack(out).sum().backward()
            del out, x
            gone.append(inputs() is None)
        return gone

    assert on_ranks(rank, 2) == [[True, True]] * 2


# ---- layers that share an input ----------------------------------------------------------------------------------


def three_layers(comm: Any, sequence_dim: int | None = None) -> list[ColumnParallelLinear]:
    return [ColumnParallelLinear(6, 6, comm=comm, sequence_dim=sequence_dim) for _ in range(3)]


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_layers_with_one_input_have_one_message(sequence_dim: int | None) -> None:
    def rank(comm: Any) -> list[dict[str, int]]:
        layers = three_layers(comm, sequence_dim)
        x = torch.ones(2, 2, 6, requires_grad=True)
        out = [layer(x) for layer in layers]
        forward = dict(sent(comm))
        torch.stack(out).sum().backward()
        return [forward, dict(sent(comm))]

    for forward, backward in on_ranks(rank, 3):
        if sequence_dim is None:
            assert forward == {}
            assert backward == {"all_reduce calls": 1, "all_reduce elements": 24}
        else:
            assert forward == {"all_gather calls": 1, "all_gather elements": 72}
            assert backward == {"reduce_scatter calls": 1, "reduce_scatter elements": 72}


def test_a_changed_input_is_sent_again() -> None:
    def rank(comm: Any) -> tuple[bool, int]:
        layer = three_layers(comm, 1)[0]
        x = torch.ones(2, 2, 6)
        with torch.no_grad():
            first = layer(x)
            x.mul_(2)
            return torch.equal(first, layer(x)), sent(comm)["all_gather calls"]

    assert on_ranks(rank, 2) == [(False, 2)] * 2


def test_an_input_that_is_filled_again_is_sent_again() -> None:
    """By a collective, or by NumPy: the tensor's version says nothing of it."""

    def rank(comm: Any) -> list[bool]:
        layers = three_layers(comm, 1)
        x = torch.ones(2, 2, 6)
        with torch.no_grad():
            first = [layer(x) for layer in layers]
            comm.all_reduce(torch.ones(2, 2, 6), out=x)
            again = [layer(x) for layer in layers]
            assert sent(comm)["all_gather calls"] == 2
            of_twos = [2 * a - layer.bias for layer, a in zip(layers, first, strict=True)]
            return [close(b, expected) for b, expected in zip(again, of_twos, strict=True)]

    assert on_ranks(rank, 2) == [[True] * 3] * 2


def test_without_gradients_the_result_is_shared_and_then_let_go() -> None:
    def rank(comm: Any) -> tuple[int, bool, bool]:
        layers = three_layers(comm, 1)
        x = torch.ones(2, 2, 6)
        with torch.no_grad():
            for layer in layers:
                layer(x)
        held = TensorParallelGroup.of(comm)._entered is not None
        del x
        gc.collect()
        return sent(comm)["all_gather calls"], held, TensorParallelGroup.of(comm)._entered is not None

    assert on_ranks(rank, 2) == [(1, True, False)] * 2


def test_a_result_without_a_gradient_does_not_stand_in_for_one_with() -> None:
    def rank(comm: Any) -> bool:
        layer = three_layers(comm, 1)[0]
        x = torch.ones(2, 2, 6, requires_grad=True)
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
        return x.grad is not None and bool(x.grad.abs().sum() > 0)

    assert on_ranks(rank, 2) == [True] * 2


def test_inference_mode() -> None:
    whole = torch.nn.Linear(6, 6)

    def rank(comm: Any) -> torch.Tensor:
        layer = ColumnParallelLinear(6, 6, comm=comm, sequence_dim=1, gather_output=True)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)
        layer.load_state_dict({"weight": whole.weight[mine], "bias": whole.bias[mine]})
        with torch.inference_mode():
            x = torch.ones(2, 2, 6) * (comm.rank + 1)
            x *= 2
            return layer(x).clone()

    x = torch.cat([torch.full((2, 2, 6), 2.0 * (rank + 1)) for rank in range(3)], 1)
    for found in on_ranks(rank, 1 + 2):
        torch.testing.assert_close(found, whole(x).detach())
