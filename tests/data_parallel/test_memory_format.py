"""Parameters whose dimensions lie in memory in another order than in their shape, such as torch.channels_last."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm import checkpoint
from ringcomm.data_parallel.buckets.layout import FlatLayout, Segment, dim_order
from ringcomm.errors import MismatchError
from tests.support import torch_ranks
from tests.support.same import differences, same

STAGES = range(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.point = nn.Conv2d(8, 8, 1)
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.point(self.norm(self.conv(x)).relu()).mean((2, 3))
        return h @ self.turned.t()


ORDERS = {"conv.weight": (0, 2, 3, 1), "point.weight": (0, 2, 3, 1), "turned": (1, 0)}


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def strides(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.stride()) for name, x in tensors}


EXPECTED = strides(make().named_parameters())
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
}


def step(model: nn.Module, opt: torch.optim.Optimizer, rank: int, number: int) -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(number * 8 + rank))
    model(x).square().mean().backward()
    opt.step()


def on_ranks(fn: Callable[[Any, Any], Any], world_size: int = 2) -> list[Any]:
    models = [make() for _ in range(world_size)]
    return ringcomm.run_ranks(lambda comm: fn(comm, models[comm.rank]), world_size, ranks="threads", timeout=60)


def wrapped(comm: Any, model: nn.Module, stage: int | None, make_optimizer: str = "momentum") -> tuple[nn.Module, Any]:
    opt = OPTIMIZERS[make_optimizer](model.parameters())
    if stage is None:
        return ringcomm.DistributedDataParallel(model, comm), opt
    ringcomm.shard(model, opt, stage, comm, atom="tensor" if make_optimizer == "adafactor" and stage else "element")
    return model, opt


def test_the_order_of_dimensions_is_found() -> None:
    for name, p in make().named_parameters():
        assert dim_order(p) == ORDERS.get(name, ())
    assert dim_order(torch.ones(2, 1, 3).expand(2, 4, 3)) == ()
    shape, order = (2, 3, 4, 5), (2, 0, 3, 1)
    values = torch.arange(120.0).view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    segment = Segment("x", shape, dim_order=dim_order(values))
    assert segment.dim_order == order
    assert segment.flatten(values).tolist() == [*range(120)]
    assert segment.view(torch.arange(120.0)).stride() == values.stride()
    assert torch.equal(segment.view(torch.arange(120.0)), values)


def test_rows_stay_together() -> None:
    shape, order = (4, 6), (1, 0)
    for atom, expected in {"row": (), "tensor": order, "element": order}.items():
        layout = FlatLayout.build([Segment("x", shape, dim_order=order)], torch.float32, 2, atom)
        assert layout.segments[0].dim_order == expected


def _like_torch(kind: str) -> None:
    rank, reference = dist.get_rank(), make()
    torch_opt = OPTIMIZERS[kind](reference.parameters())
    ddp = ringcomm.hooks.attach(nn.parallel.DistributedDataParallel(reference))
    for number in range(3):
        torch_opt.zero_grad()
        step(ddp, torch_opt, rank, number)
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for stage in (None, *STAGES):
        model, opt = wrapped(None, make(), stage, kind)
        for number in range(3):
            opt.zero_grad()
            step(model, opt, rank, number)
        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        assert strides(named.items()) == EXPECTED
        assert strides((name, p.grad) for name, p in named.items()) == EXPECTED
        assert not differences({name: p.grad.clone() for name, p in named.items()}, grads), stage
        state = {name.removeprefix("module."): x for name, x in model.state_dict().items()}
        assert strides(state.items()) == EXPECTED
        assert same(state, reference.state_dict())
        assert same(opt.state_dict()["state"], torch_opt.state_dict()["state"])
        if stage is not None:
            ringcomm.unshard(model, opt)
            assert strides(model.named_parameters()) == EXPECTED
            assert same(opt.state_dict()["state"], torch_opt.state_dict()["state"])
            assert same({name: p.grad for name, p in model.named_parameters()}, grads)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stages_keep_it_and_have_the_bits_of_torch(kind: str) -> None:
    """The input has another order than the weights, so the bits depend on the weights' order."""
    torch_ranks.run(_like_torch, kind, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_and_views_are_written_in_the_shape(stage: int) -> None:
    values = {name: torch.randn(p.shape) for name, p in make().named_parameters()}

    def body(comm: Any, model: nn.Module) -> None:
        model, opt = wrapped(comm, model, stage)
        step(model, opt, comm.rank, 0)
        for name, p in model.named_parameters():
            p.grad.copy_(values[name])
            assert torch.equal(p.grad.clone(), values[name])
            p.grad.mul_(values[name])
            assert torch.equal(p.grad[0].clone(), values[name][0].square())
            p.data[-1] = values[name][0]
            assert torch.equal(p.detach().clone()[-1], values[name][0])
            p.data = values[name].clone()
            assert torch.equal(p.detach().clone(), values[name])
            p.grad = values[name] + 1
        opt.zero_grad(set_to_none=False)
        assert all(p.grad.count_nonzero() == 0 for p in model.parameters())

    on_ranks(body)


@pytest.mark.parametrize("stage", STAGES)
def test_data_can_be_replaced_by_its_transpose(stage: int) -> None:
    """The transpose has the same address and shape."""
    values = torch.arange(25.0).view(5, 5)

    def body(comm: Any, model: nn.Module) -> None:
        model.square = nn.Parameter(values.clone())
        model, opt = wrapped(comm, model, stage)
        model.square.data = model.square.data.t()
        (model.square * values).sum().backward()
        opt.step()
        assert torch.equal(model.square.detach().clone(), torch.sub(values.t(), values, alpha=0.1))

    on_ranks(body)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_the_format_of_a_wrapped_module_can_be_changed(stage: int | None) -> None:
    """`to` also gives the gradients other memory, which is discarded with them."""

    def body(comm: Any, model: nn.Module) -> None:
        other = copy.deepcopy(model)
        (model, opt), (expected, its_opt) = wrapped(comm, model, stage), wrapped(comm, other, stage)
        for number in range(3):
            for each, its in ((model, opt), (expected, its_opt)):
                its.zero_grad()
                step(each, its, comm.rank, number)
            model.to(memory_format=torch.channels_last if number else torch.contiguous_format)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.detach().clone(), q.detach().clone())

    on_ranks(body)


def results(p: torch.Tensor) -> list[Any]:
    def drawn(like: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(1)
        return like(p)

    made = [torch.empty_like(p), torch.zeros_like(p.data), torch.ones_like(input=p)]
    made += [torch.zeros_like(p, memory_format=torch.contiguous_format), p.contiguous(), p.detach().clone(), p.double()]
    formats = [torch.preserve_format, torch.contiguous_format, *([torch.channels_last] if p.dim() == 4 else [])]
    made += [p.to(memory_format=each) for each in formats] + [p.data.cpu(memory_format=each) for each in formats]
    return [[x.stride() for x in made], drawn(torch.randn_like), drawn(torch.rand_like)]


def _new_tensors() -> None:
    expected = [results(p) for p in make().parameters()]
    for stage in STAGES:
        model, _ = wrapped(None, make(), stage)
        assert same([results(p) for p in model.parameters()], expected), stage


def test_tensors_made_like_parameters_have_it() -> None:
    torch_ranks.run(_new_tensors, world_size=2)


@pytest.mark.parametrize("before", [0, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_checkpoint_fits_a_model_of_another_order(tmp_path: Path, before: int, after: int) -> None:
    def save(comm: Any, model: nn.Module) -> Any:
        model, opt = wrapped(comm, model, before, "adamw")
        step(model, opt, comm.rank, 0)
        checkpoint.save(tmp_path / "c", model, opt)
        return model.state_dict(), opt.state_dict()["state"]

    def load(comm: Any, model: nn.Module) -> Any:
        for p in model.parameters():
            p.data = torch.zeros(p.shape)
        model, opt = wrapped(comm, model, after, "adamw")
        checkpoint.load(tmp_path / "c", model, opt)
        return model.state_dict(), opt.state_dict()["state"]

    saved = copy.deepcopy(on_ranks(save, 3)[0])
    assert same(on_ranks(load)[0], saved)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_parameter_with_gaps_becomes_contiguous(stage: int | None) -> None:
    values = torch.randn(6, 4)[:, ::2]

    def body(comm: Any, model: nn.Module) -> None:
        model.gaps = nn.Parameter(values)
        model, _ = wrapped(comm, model, stage)
        gaps = dict(model.named_parameters())["gaps" if stage is not None else "module.gaps"]
        assert gaps.stride() == (2, 1)
        assert torch.equal(gaps.detach().clone(), values)

    on_ranks(body)


def test_ranks_that_differ_are_refused() -> None:
    def body(comm: Any, model: nn.Module) -> None:
        if comm.rank:
            model.conv.weight.data = model.conv.weight.data.contiguous()
        with pytest.raises(MismatchError, match=r"conv\.weight .* with dim_order \(0, 2, 3, 1\)"):
            ringcomm.shard(model, comm=comm)

    on_ranks(body)
