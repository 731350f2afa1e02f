"""Split layers are layers of torch's classes, and are initialised as the layers that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.shard_spec import part_of
from ringcomm.tensor_parallel.plan import parallelize
from ringcomm.tensor_parallel.styles import Colwise
from tests.support.mesh.tensor_cases import on_parts, on_ranks, part

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = {"0": "vocab", "1": Colwise(parts=(8, 4, 4)), "3": "rowwise", "4": Colwise(gather_output=True, pad=True)}


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(13, 8, padding_idx=12), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 13)]
    return nn.Sequential(*layers)


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def replaces(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.randn(module.out_features, module.in_features))


def with_weight(init: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init(module.weight)

    return change


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "reset_parameters": reset,
    "normal": with_weight(lambda w: nn.init.normal_(w, std=0.02)),
    "trunc_normal": with_weight(nn.init.trunc_normal_),
    "kaiming": with_weight(nn.init.kaiming_normal_),
    "xavier": with_weight(nn.init.xavier_uniform_),
    "orthogonal": with_weight(nn.init.orthogonal_),
    "scaled": with_weight(lambda w: w.data.mul_(0.5)),
    "another type": with_weight(lambda w: setattr(w, "data", w.data.double())),
    "another parameter": replaces,
    "nothing": lambda module: None,
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", [*CHANGES])
def test_apply_gives_a_rank_its_part_of_the_values_of_the_whole(change: str, trained: bool) -> None:
    whole = make()

    def rank(model: nn.Module, comm: Any) -> nn.Module:
        if trained:
            model(torch.tensor([1, 2])).sum().backward()
        return model

    torch.manual_seed(5)
    whole.apply(CHANGES[change])
    after = torch.rand(1)
    expected = dict(whole.named_parameters())

    for model in on_parts(make(), PLAN, rank):
        before = dict(model.named_parameters())
        shapes = {name: p.shape for name, p in before.items()}
        torch.manual_seed(5)
        model.apply(CHANGES[change])  # sends nothing
        assert torch.equal(torch.rand(1), after)
        for name, p in model.named_parameters():
            assert torch.equal(p, part(expected[name], p)), name
            assert p.dtype == expected[name].dtype
            assert p.shape == shapes[name]
            assert part_of(p) == part_of(before[name])
            assert p is before[name] or change == "another parameter"


def test_a_layer_of_its_own_is_initialised_again() -> None:
    def check(model: nn.Module, comm: Any) -> None:
        assert (model[0].in_features, model[0].out_features, model[0].weight.shape) == (4, 8, (4, 4))
        before = model[0].weight.detach().clone()
        model[0].reset_parameters()
        assert not torch.equal(model[0].weight, before)

    on_parts(nn.Sequential(nn.Linear(4, 8)), {"0": "colwise"}, check)


def test_groups_by_class() -> None:
    """As minGPT decides which parameters decay."""

    def check(model: nn.Module, comm: Any) -> None:
        kinds = {kind: [name for name, each in model.named_modules() if isinstance(each, kind)] for kind in KINDS}
        assert kinds == {nn.Linear: ["1", "3", "4"], nn.Embedding: ["0"]}
        assert model[0].max_norm is None

    on_parts(make(), PLAN, check)


KINDS = (nn.Linear, nn.Embedding)


class Conv1D(nn.Module):
    """As in transformers: a linear layer with a transposed weight, which initialises itself when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_a_class_that_cannot_be_initialised_again() -> None:
    def rank(comm: Any) -> None:
        model = parallelize(nn.Sequential(Conv1D()), {"0": "colwise"}, comm)
        assert not hasattr(model[0], "reset_parameters")

    on_ranks(rank, 2)


@pytest.mark.parametrize("change", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_function_that_replaces_parameters_is_refused(change: Any) -> None:
    def rank(comm: Any) -> None:
        model = parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "colwise", "1": "rowwise"}, comm)
        with pytest.raises(
            UnsupportedError, match=r"apply: rank \d got a function that replaces the weight of a split"
        ):
            model[0].apply(lambda m: change(m) and None)
        assert model[0].bias.shape == (4,)

    on_ranks(rank, 2)


@pytest.mark.parametrize("raises", [False, True])
def test_gradients_are_unsharded_too(raises: bool) -> None:
    def rank(comm: Any) -> None:
        model = parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "colwise", "1": "rowwise"}, comm)
        model(torch.ones(2, 4)).sum().backward()
        before = [(p, p.grad, 2 * p.detach(), 0.5 * p.grad) for p in model.parameters()]
        model[1].bias.grad = None  # one that no rank has a part of

        def scale(m: nn.Module) -> None:
            for p in m.parameters(recurse=False):
                p.data.mul_(2)
                if p.grad is not None:
                    assert p.grad.shape == p.shape
                    p.grad.mul_(0.5)
            if raises:
                raise ValueError("by the function")

        try:
            model.apply(scale)
        except ValueError:
            assert raises
        for p, grad, values, halved in before[: 2 if raises else 3]:
            assert torch.equal(p, values)
            assert p.grad is grad
            assert torch.equal(grad, halved)

    on_ranks(rank, 2)


def test_a_model_at_stage_3_shows_parts() -> None:
    def rank(comm: Any) -> None:
        mesh = ringcomm.init_mesh(dp=1, tp=2, comm=comm)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize(model, {"0": "colwise", "1": "rowwise"}, mesh["tp"])
        model, _ = ringcomm.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3, mesh=mesh)
        shapes: list[torch.Size] = []
        model.apply(lambda m: shapes.extend(p.shape for p in m.parameters(recurse=False)))
        assert (4, 4) in shapes

    on_ranks(rank, 2)


def test_an_embedding_that_was_resized_is_refused() -> None:
    def rank(comm: Any) -> None:
        model = parallelize(nn.Sequential(nn.Embedding(8, 4)), {"0": "vocab"}, comm)
        model[0].weight = nn.Parameter(torch.ones(12, 4))
        with pytest.raises(InvalidArgumentError, match=r"got a weight of 12 rows, expected its part of 4; resize"):
            model(torch.tensor([1]))

    on_ranks(rank, 2)
