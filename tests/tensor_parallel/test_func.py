"""torch.func over a parallelized model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import ringcomm
from ringcomm.errors import UnsupportedError
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from tests.support.mesh.tensor_cases import close, on_parts, part

PLANS: dict[str, dict[str, Any]] = {
    "pair": {"0": "colwise", "2": "rowwise"},
    "gathered": {"0": Colwise(gather_output=True), "2": "rowwise_split_input"},
}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def of_parameters(model: nn.Module, x: torch.Tensor) -> Any:
    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, p, (x,)).square().sum()

    p = {name: each.detach() for name, each in model.named_parameters()}
    return grad(loss)(p, x), vmap(grad(loss), (None, 0))(p, x)


def of_inputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    pull = vjp(model, x)[1]
    return [
        vmap(model)(x),
        vmap(model, 1, 1)(x.t()),
        *jvp(model, (x,), (x.cos(),)),
        *pull(x.cos()),
        jacrev(model)(x[0]),
        vmap(jacrev(model))(x),
        grad(lambda x: grad(lambda x: model(x).square().sum())(x).square().sum())(x),
    ]


def compare(comm: Any, plan: str, whole: nn.Module, x: torch.Tensor) -> None:
    model = parallelize(copy.deepcopy(whole), PLANS[plan], comm)
    for mine, expected in zip(of_inputs(model, x), of_inputs(whole, x), strict=True):
        assert close(mine, expected)
    params = dict(model.named_parameters())
    (all_rows, by_row), (expected_all, expected_rows) = of_parameters(model, x), of_parameters(whole, x)
    for name, p in params.items():
        assert close(all_rows[name], part(expected_all[name], p))
        rows = torch.stack([part(each, p) for each in expected_rows[name]])
        assert close(by_row[name], rows)


@pytest.mark.parametrize("plan", [*PLANS])
def test_transforms(plan: str) -> None:
    """In processes, since torch counts the levels of forward derivatives for all threads together."""
    torch.manual_seed(0)
    ringcomm.run_ranks(compare, 2, plan, make(), torch.randn(4, 8).double(), ranks="processes", timeout=60)


def test_a_batch_of_gradients_is_refused() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        x = torch.ones(8).double()
        plain = torch.autograd.functional.jacobian(model, x)
        assert plain.shape == (8, 8)
        y = model(x.requires_grad_())
        with pytest.raises(UnsupportedError, match=r"parallelize: rank \d got a batch of gradients"):
            torch.autograd.grad(y, x, torch.eye(8).double(), is_grads_batched=True)

    on_parts(make(), PLANS["pair"], check)


def test_an_error_of_a_transform_is_not_explained_by_the_plan() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        with pytest.raises(RuntimeError, match=r"^vmap: "):  # the embedding looks at the tokens
            vmap(model)(torch.ones(2, 3, dtype=torch.int64))

    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 4))
    on_parts(model, {"0": "vocab", "1": "colwise", "2": "rowwise"}, check)
