"""Pipelines: the bits of one process that trains on the micro-batches in turn, whatever the schedule and the cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError
from ringcomm.pipeline_parallel import schedules
from ringcomm.pipeline_parallel.microbatches import Replicate, merge_outputs
from ringcomm.pipeline_parallel.pipeline import Pipeline
from ringcomm.pipeline_parallel.split import Chain
from tests.support.choice import choose, slow
from tests.support.seeded import seeded

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = tuple(schedules.SCHEDULES)
Gradients = dict[str, "torch.Tensor | None"]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """An embedding that is the output layer too, blocks, and sums between modules of different stages."""

    def __init__(self, blocks: int = 8, dim: int = 6, tied: bool = True) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 11, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x)
        h += self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make(kind: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
    return seeded(kind(*args, **kwargs), seed)


def tokens(rows: int, length: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cuts(stages: int, blocks: int = 8) -> list[str]:
    return [f"blocks.{blocks * i // stages}" for i in range(1, stages)]


def gradients(model: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}


def plain(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], torch.Tensor]], divisor: float
) -> tuple[torch.Tensor, Gradients]:
    """One process: forward and backward of each micro-batch in turn."""
    model, total = copy.deepcopy(model), None
    for each in losses:
        loss = each(model) / divisor
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total, gradients(model)


def on_ranks(
    model: nn.Module,
    at: Sequence[str] | int,
    world_size: int,
    fn: Callable[[Pipeline, int], Any],
    carry: Sequence[str] = (),
    order: Sequence[str] = (),
    **options: Any,
) -> list[Any]:
    """What ``fn(pipeline, rank)`` returns on each rank, which starts with a copy of the model."""
    models = [copy.deepcopy(model) for _ in range(world_size)]

    def rank_main(comm: Communicator) -> Any:
        return fn(Pipeline(ringcomm.split(models[comm.rank], at, carry=carry, order=order), comm, **options), comm.rank)

    return ringcomm.run_ranks(rank_main, world_size, timeout=30)


def differing(found: Sequence[Gradients], expected: Gradients) -> list[str]:
    """Names of parameters whose gradients differ, or that no rank has."""
    seen = {name for each in found for name in each}
    wrong = sorted(expected.keys() - seen)
    for each in found:
        for name, grad in each.items():
            want = expected[name]
            if grad is None or want is None:
                wrong += [name] * (grad is not want)
            elif not torch.equal(grad, want):
                wrong.append(name)
    return wrong


def check_step(
    model: nn.Module,
    at: Sequence[str] | int,
    world_size: int,
    x: torch.Tensor,
    m: int = 3,
    target: torch.Tensor | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    evaluates: bool = False,
    everywhere: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> list[Pipeline]:
    """A step over ``m`` micro-batches has the loss and the gradients of one process; ``evaluates``: and so has an
    evaluation. All ranks have the input and the target, or, not ``everywhere``, only those that need them.
    Returns the ranks' pipelines."""

    def loss_of(net: nn.Module, a: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
        return net(a) if loss is None else loss(net(a), *b)

    parts = zip(*(each.chunk(m) for each in (x, target) if each is not None), strict=True)
    with around():
        value, expected = plain(model, [lambda net, part=part: loss_of(net, *part) for part in parts], m)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients, Pipeline]:
        args = (x,) if everywhere or rank == 0 else ()
        more = {"target": target} if everywhere or rank == world_size - 1 else {}
        with around():
            found = pipe.step(*args, **more)
        grads = gradients(pipe)
        if evaluates:
            assert torch.equal(pipe.evaluate(*args, **more).loss, value)
        return found, grads, pipe

    done = on_ranks(model, at, world_size, step, microbatches=m, loss=loss, **options)
    assert all(torch.equal(found, value) for found, _, _ in done), ([found for found, _, _ in done], value)
    assert differing([grads for _, grads, _ in done], expected) == []
    return [pipe for _, _, pipe in done]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# ---- parity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 6])
@pytest.mark.parametrize("world_size", [1, 2, 3, slow(4)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_bits_of_one_process(schedule: str, world_size: int, m: int) -> None:
    """The other ranks than the first and the last have no data."""
    at = cuts(2 * world_size if schedule == "interleaved" else world_size)
    options = {"loss": cross_entropy, "schedule": schedule, "ties": "exact"}
    check_step(make(Net), at, world_size, tokens(2 * m), m, tokens(2 * m, seed=2), everywhere=False, **options)


@pytest.mark.parametrize("schedule", choose(SCHEDULES, ["interleaved"]))
def test_eight_ranks(schedule: str) -> None:
    at, x = cuts(16 if schedule == "interleaved" else 8, 16), tokens(10)
    check_step(make(Net, 16), at, 8, x, 5, x, schedule=schedule, loss=cross_entropy, ties="exact")


def test_one_rank_with_several_stages() -> None:
    x, y = tokens(6), tokens(6, seed=2)
    check_step(make(Net), cuts(4), 1, x, 3, y, schedule="interleaved", loss=cross_entropy, ties="exact")


class Functional(Net):
    """Uses the embedding as its output layer without a module for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.blocks[0](self.token(x))), self.token.weight)


def test_an_embedding_that_is_multiplied_with_has_its_gradient_at_once() -> None:
    x = tokens(12)
    check_step(make(Functional, 1), [], 1, x, 6, x, schedule="zero-bubble", loss=cross_entropy)


class Matmul(nn.Module):
    """Weights of linear layers that are multiplied with besides, before and behind; and read without a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b = self.second.weight, self.second.bias
        h = self.first(x) * w.detach().mean() + w.shape[0]
        if self.how == "before":
            h = torch.tanh(h @ w) + b
        second = partial(checkpoint, self.second, use_reentrant=False) if self.how == "checkpoint" else self.second
        h = torch.tanh(second(h))
        if self.how == "checkpoint":
            h = h * w.mean()
        if self.how == "behind":
            h = torch.tanh(h @ w.T)
        elif self.how == "stacked":
            h = torch.tanh(torch.einsum("bi,kij->bj", h, torch.stack([w, w])))
        elif self.how == "chunk":
            h = torch.cat([h @ each.T for each in w.chunk(2)], -1)
        elif self.how == "in place":
            h = h * 2
            h += b
        elif self.how == "item":
            h = h * 2
            h[:1] = b
        elif self.how == "conv":
            h = torch.addmm(b, h, w)
            h = h.mm(w)
        return self.last(h)


@pytest.mark.parametrize("how", ["before", "behind", "stacked", "chunk", "in place", "item", "conv", "checkpoint"])
def test_zero_bubble_adds_gradients_of_all_uses_of_a_weight(how: str) -> None:
    check_step(make(Matmul, how), [], 1, numbers(12, 6), 6, schedule="zero-bubble", loss=mean_square)


class Differentiates(nn.Module):
    """Layers that a backward pass inside of forward goes through: a force, a gradient penalty, an inner step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.energy = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1, bias=False)

    def energy_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.energy(torch.tanh(self.second(x) + x)).square().sum()

    def within(self, x: torch.Tensor) -> torch.Tensor:
        more = self.how not in ("first order", "checkpoint inside")
        of: Any = partial(checkpoint, self.energy_of, use_reentrant=False) if "inside" in self.how else self.energy_of
        (force,) = torch.autograd.grad(of(x), x, create_graph=more)
        if self.how == "twice":
            (force,) = torch.autograd.grad(force.square().sum(), x, create_graph=True)
        return force

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + x
        if self.how == "inner step":
            weight, bias = self.second.weight, self.second.bias
            steps = torch.autograd.grad(self.energy_of(h), (weight, bias), create_graph=True)
            return self.energy(F.linear(h, weight - 0.1 * steps[0], bias - 0.1 * steps[1])).square().mean()
        z = h if self.how == "connected" else h.detach().requires_grad_()
        force = checkpoint(self.within, z, use_reentrant=False) if self.how == "checkpoint" else self.within(z)
        return (self.second(h) + self.energy(h) * force).square().mean()


DERIVATIVES = ["second order", "first order", "connected", "twice", "inner step", "checkpoint", "checkpoint inside"]


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("how", DERIVATIVES)
def test_a_backward_pass_inside_of_forward_has_the_bits_of_one_process(how: str, length: int) -> None:
    """``length``: of the sequences in x, if it has any."""
    x = numbers(6, length, 6) if length else numbers(6, 6)
    check_step(make(Differentiates, how), [], 1, x, schedule="zero-bubble")


class InBackward(torch.autograd.Function):
    """Calls a layer whose gradients come from a backward pass inside of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.layer(z), z, grad)[0], None


class Undefined(torch.autograd.Function):
    """Has no gradient for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Few(nn.Module):
    """Layers whose parameters get a gradient in some of their calls, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen, self.unused = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(InBackward.apply(self.b(x), self.a)) + self.a(x)
        self.frozen.bias.requires_grad_(False)
        x = self.frozen(x)
        self.frozen.bias.requires_grad_(True)
        return Undefined.apply(x, self.unused(x)).square().mean()


def test_zero_bubble_gives_no_more_gradients_than_one_process() -> None:
    (pipe,) = check_step(make(Few), [], 1, numbers(6, 6), schedule="zero-bubble")
    grads = gradients(pipe)
    assert grads["frozen.bias"] is grads["unused.weight"] is None


class Measured(nn.Module):
    """Has a hook at its result that starts a backward pass from there, as to log the gradient's norm inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.busy = how, False
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        result = self.second(h) if self.how == "tensor of a layer" else torch.tanh(self.second(h))

        def measure(grad: torch.Tensor) -> None:
            if not self.busy:
                self.busy = True
                torch.autograd.grad(result, [h], grad, retain_graph=True)
                self.busy = False

        if self.how == "node":
            assert result.grad_fn is not None
            result.grad_fn.register_prehook(lambda grads: measure(grads[0]))
        else:
            result.register_hook(measure)
        return result


@pytest.mark.parametrize("how", ["tensor", "tensor of a layer", "node"])
def test_hooks_at_the_results_of_stages_may_start_backward_passes(how: str) -> None:
    model = nn.Sequential(make(Measured, how), make(Measured, how, seed=1))
    check_step(model, ["1"], 2, numbers(6, 6), schedule="zero-bubble", loss=mean_square)


class Late(nn.Module):
    """Adds a hook to a weight after the layer's call, or cuts the layer's result off in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.hooked = how, False
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.how == "detach":
            return (self.second(x) + y.detach_()).square().mean()
        if not self.hooked:
            self.hooked = True
            self.first.weight.register_hook(lambda grad: grad * 2)
        return self.second(torch.tanh(y)).square().mean()


@pytest.mark.parametrize("how", ["hook", "detach"])
def test_zero_bubble_allows_what_follows_a_layer(how: str) -> None:
    check_step(make(Late, how), [], 1, numbers(6, 5, 6), schedule="zero-bubble")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_complex_layers(schedule: str) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.complex64) for _ in range(2)))
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, seed=seed, dtype=p.dtype))

    def size(output: torch.Tensor) -> torch.Tensor:
        return mean_square(output.abs())

    check_step(model, ["1"], 2, numbers(6, 6, seed=4, dtype=torch.complex64), schedule=schedule, loss=size)


class Unusual(nn.Module):
    """Calls of linear layers that zero-bubble leaves to torch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        bias = {"row": (1, 6), "row of linear": (1, 6), "number": (), "one": (1,)}.get(how, (6,))
        self.how, self.bias = how, nn.Parameter(torch.ones(bias))
        self.weight = nn.Parameter(torch.ones(6) if how == "vector" else torch.ones(6, 6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "row of linear":
            x = F.linear(x, self.weight, self.bias)
        elif self.how == "vector":
            x = x * F.linear(x, self.weight)[:, None]
        elif self.how == "vmap":
            x = torch.vmap(self.layer)(x)
        elif self.how == "grad":
            x = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.layer(row)).sum()))(x)
        else:
            x = torch.addmm(self.bias, x, self.weight)
        return torch.tanh(self.layer(torch.tanh(x))).square().mean()


@pytest.mark.parametrize("how", ["row", "row of linear", "number", "one", "vector", "vmap", "grad"])
def test_zero_bubble_leaves_unusual_layers_to_torch(how: str) -> None:
    check_step(make(Unusual, how), [], 1, numbers(6, 6), schedule="zero-bubble")


class Transposed(nn.Module):
    """Passes on tensors with another memory layout, and receives their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.conv[0](x).transpose(1, 2))
        return self.last(torch.tanh(self.conv[1](h.transpose(1, 2))).transpose(1, 2)).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("at", ["conv.1", "last"])
def test_tensors_keep_their_order_in_memory(at: str, rows: int, schedule: str) -> None:
    """A matrix product has other bits in another memory layout."""
    x = numbers(4 * rows, 6, 5, dtype=torch.float64)
    check_step(make(Transposed).double(), [at], 2, x, 4, schedule=schedule)


class Strided(Transposed):
    """Notes the strides of the gradient of the transposed result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv[0](x).transpose(1, 2)
        h.register_hook(lambda gradient: noted.append(gradient.stride()))  # on the rank that has it alone
        return self.last(h).square().mean()


noted: list[tuple[int, ...]] = []


@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_keep_their_strides(rows: int) -> None:
    """Also those of a dimension of length 1: what a convolution does depends on them."""
    model, x = make(Strided).double(), torch.randn(rows, 6, 5, dtype=torch.float64)
    noted.clear()
    plain(model, [lambda net: net(x)], 1)
    expected = noted.pop()
    on_ranks(model, ["last"], 2, lambda pipe, rank: pipe.step(x), microbatches=1)
    assert noted == [expected]


def test_a_step_may_be_repeated_and_gradients_add_up() -> None:
    model, batches = make(Net, 4), [tokens(4, seed=s) for s in range(3)]
    every = [part for x in batches for part in x.chunk(2)]
    _, expected = plain(model, [lambda net, a=a: cross_entropy(net(a), a) for a in every], 2)

    def steps(pipe: Pipeline, rank: int) -> Gradients:
        for x in batches:
            pipe.step(x, target=x)
        return gradients(pipe)

    done = on_ranks(model, cuts(2, 4), 2, steps, microbatches=2, loss=cross_entropy, ties="exact")
    assert differing(done, expected) == []


def test_losses_may_be_shares_of_a_sum() -> None:
    model, x = make(Net, 4, tied=False), tokens(6)
    count = x.numel()

    def share(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / count

    loss, expected = plain(model, [lambda net, a=a: share(net(a), a) for a in x.chunk(3)], 1)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients]:
        return pipe.step(x, target=x), gradients(pipe)

    done = on_ranks(model, cuts(2, 4), 2, step, microbatches=3, loss=share, reduction="sum")
    assert all(torch.equal(found, loss) for found, _ in done)
    assert differing([found for _, found in done], expected) == []


@pytest.mark.parametrize("loss", [torch.mean, torch.Tensor.sum, torch.nansum], ids=["mean", "method", "nansum"])
def test_a_loss_without_a_signature_takes_the_output_alone(loss: Callable[..., torch.Tensor]) -> None:
    check_step(make(Net, 4), cuts(2, 4), 2, tokens(6), loss=loss, evaluates=True, ties="exact")


@pytest.mark.parametrize("loss", [torch.dist, nn.CrossEntropyLoss()], ids=["builtin", "module"])
def test_outputs_are_evaluated_without_a_target_that_the_loss_needs(loss: Callable[..., torch.Tensor]) -> None:
    def evaluate(pipe: Pipeline, rank: int) -> Any:
        return pipe.evaluate(tokens(6)).loss

    assert on_ranks(make(Net, 4), cuts(2, 4), 2, evaluate, microbatches=3, loss=loss) == [None, None]


def test_a_loss_that_is_a_module() -> None:
    x = numbers(6, 6)
    check_step(make(lambda: nn.Sequential(Block(6), Block(6))), ["1"], 2, x, 3, x, loss=nn.MSELoss())


# ---- micro-batches that do not divide a batch -----------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "m"), [(7, 3), (5, 4), (8, 5), (4, 4), (3, 5), (1, 4)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_micro_batches_are_the_batch(schedule: str, rows: int, m: int) -> None:
    model, x, y = make(Net), tokens(rows), tokens(rows, seed=2)
    whole, wanted = plain(model, [lambda net: cross_entropy(net(x), y)], 1)
    parts = [*zip(x.tensor_split(min(rows, m)), y.tensor_split(min(rows, m)), strict=True)]
    shares = [lambda net, a=a, b=b: cross_entropy(net(a), b) * (len(a) / rows) for a, b in parts]
    loss, expected = plain(model, shares, 1)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients, Any]:
        args = (x,) if rank == 0 else ()  # the other ranks have no data
        more = {"target": y} if rank == 1 else {}
        return pipe.step(*args, **more), gradients(pipe), pipe.evaluate(*args, **more)

    at = cuts(4 if schedule == "interleaved" else 2)
    done = on_ranks(model, at, 2, step, microbatches=m, schedule=schedule, loss=cross_entropy, ties="exact")
    for found, _, evaluated in done:
        torch.testing.assert_close(found, whole)
        torch.testing.assert_close(evaluated.loss, whole)
    assert torch.equal(done[0][0], loss) or rows % min(rows, m) == 0
    assert differing([grads for _, grads, _ in done], expected) == [] or rows % min(rows, m) == 0
    for _, grads, _ in done:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name])
    torch.testing.assert_close(done[1][2].output, model(x))


def test_uneven_micro_batches_where_the_last_rank_has_no_data() -> None:
    model, x = make(Net, 4, tied=False), tokens(7)
    whole, wanted = plain(model, [lambda net: net(x).square().mean()], 1)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients]:
        return pipe.step(*((x,) if rank == 0 else ())), gradients(pipe)

    options = {"microbatches": 3, "loss": lambda output: output.square().mean()}
    for found, grads in on_ranks(model, ["blocks.1", "blocks.2"], 3, step, **options):
        torch.testing.assert_close(found, whole)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name])


# ---- ties ---------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One weight in three places, and a second one in two."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 11)
        self.blocks = nn.ModuleList(Block(11) for _ in range(4))
        self.middle = nn.Linear(11, 11, bias=False)
        self.late = nn.ModuleList(Block(11) for _ in range(4))
        self.head = nn.Linear(11, 11, bias=False)
        self.head.weight = self.token.weight
        if uses == 3:
            self.middle.weight = self.token.weight
        self.late[3].norm.weight = self.blocks[0].norm.weight
        self.late[3].norm.bias = self.blocks[0].norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x)
        for block in self.blocks:
            h = block(h)
        h = self.middle(h)
        for block in self.late:
            h = block(h)
        return self.head(h)


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 3), ("interleaved", 3), ("zero-bubble", 3)])
@pytest.mark.parametrize("uses", [slow(2), 3])
@pytest.mark.parametrize("ties", ["exact", "sum"])
def test_tied_weights(schedule: str, world_size: int, uses: int, ties: str) -> None:
    model, x = make(Shared, uses), tokens(10)
    at = ["middle", "late.2"]
    if schedule == "interleaved":
        at = ["blocks.1", "blocks.3", "middle", "late.1", "late.3"]
    loss, expected = plain(model, [lambda net, a=a: cross_entropy(net(a), a) for a in x.chunk(5)], 5)

    def step(pipe: Pipeline, rank: int) -> Gradients:
        assert torch.equal(pipe.step(x, target=x), loss)
        return gradients(pipe)

    done = on_ranks(model, at, world_size, step, microbatches=5, schedule=schedule, loss=cross_entropy, ties=ties)
    if ties == "exact":
        assert differing(done, expected) == []
    copies = [grad for found in done for name, grad in found.items() if name in ("token.weight", "head.weight")]
    assert len(copies) >= 2
    assert all(torch.equal(grad, copies[0]) for grad in copies)
    for found in done:
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name])


class Rooted(nn.Module):
    """Parameters of the model itself, in front of blocks, between them, behind them, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 6), nn.Parameter(torch.randn(5, 6))
        self.prompt, self.unused = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3))
        self.gains = nn.ParameterList(torch.randn(6) for _ in range(4))
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head, self.scale = nn.Linear(6, 11), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.prompt.expand(len(x), -1, -1), self.token(x) + self.position], 1)
        for gain, block in zip(self.gains, self.blocks, strict=True):
            h = block(h) * gain + self.frozen
        return self.head(h[:, 2:]) * self.scale


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ties", ["exact", "sum"])
def test_parameters_of_the_model_itself(schedule: str, ties: str) -> None:
    """Each is used on one stage."""
    at, x = ["blocks.1", "blocks.2", "head"] if schedule == "interleaved" else ["blocks.2"], tokens(6)
    check_step(make(Rooted), at, 2, x, 3, x, schedule=schedule, loss=cross_entropy, ties=ties)


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_parameters_of_the_model_itself_are_clipped_saved_and_loaded_once(stage: int, tmp_path: Path) -> None:
    model, x = make(Rooted), tokens(4)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    norms = []
    for _ in range(3):
        cross_entropy(reference(x), x).backward()
        norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()

    def rank_main(comm: Communicator) -> None:
        mesh = ringcomm.init_mesh({"pp": 2, "dp": 2}, comm)
        pipe = Pipeline(
            ringcomm.split(copy.deepcopy(model), ["blocks.2"]), mesh["pp"], microbatches=2, loss=cross_entropy
        )
        pipe.load_state_dict({key: value.clone() for key, value in pipe.state_dict().items()}, assign=True)
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
        ringcomm.shard(pipe, optimizer, stage, mesh=mesh)
        for norm in norms:
            pipe.step(x, target=x)
            torch.testing.assert_close(ringcomm.clip_grad_norm_(pipe, 0.5), norm)
            optimizer.step()
            optimizer.zero_grad()
        ringcomm.checkpoint.save(tmp_path / "saved", pipe, optimizer)

    ringcomm.run_ranks(rank_main, 4, timeout=30)

    def load(comm: Communicator) -> nn.Module:
        loaded = make(Rooted, seed=1)
        ringcomm.shard(loaded, None, 0, comm)
        ringcomm.checkpoint.load(tmp_path / "saved", loaded)
        return loaded

    loaded = ringcomm.run_ranks(load, 1)[0]
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value)


class CutOff(nn.Module):
    """Whose tied weight no gradient comes to: behind its uses gradients end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](self.blocks[0](x)).detach()).square().mean()


@pytest.mark.parametrize("ties", ["exact", "sum"])
def test_a_tied_weight_without_a_gradient_has_none(ties: str) -> None:
    def step(pipe: Pipeline, rank: int) -> list[bool]:
        pipe.step(torch.ones(2, 4))
        return [p.grad is None for p in pipe.parameters()]

    done = on_ranks(make(CutOff), ["blocks.1"], 2, step, microbatches=2, ties=ties)
    assert done == [[True], [True, False]]


class Often(nn.Module):
    """One weight that every stage uses several times, and one that some micro-batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 11)
        self.layers = nn.ModuleList(nn.Linear(11, 11, bias=number == 0) for number in range(6))
        for layer in self.layers:
            layer.weight = self.token.weight
        self.some = nn.ModuleList(nn.Linear(11, 11) for _ in range(2))
        self.some[1].weight = self.some[0].weight
        self.end = nn.Linear(11, 11)
        self.end.weight = self.some[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x)
        for number, layer in enumerate(self.layers):
            h = torch.tanh(layer(h)) + h
            if number in (1, 3) and len(x) % 2:
                h = self.some[number // 2](h)
        return self.end(h)


@pytest.mark.parametrize(
    ("schedule", "at"), [("1f1b", [2, 4]), ("zero-bubble", [1, 5]), ("interleaved", [1, 2, 3, 4, 5])]
)
def test_exact_ties_where_stages_use_a_weight_several_times(schedule: str, at: list[int]) -> None:
    model, parts = make(Often), [tokens(rows, seed=rows) for rows in (2, 3, 1, 4, 3)]
    loss, expected = plain(model, [lambda net, a=a: cross_entropy(net(a), a) for a in parts], 5)
    order = ["layers.0", "layers.1", "some.0", "layers.2", "layers.3", "some.1", "layers.4", "layers.5"]

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients]:
        return pipe.step(parts, target=parts), gradients(pipe)

    options = {"microbatches": 5, "schedule": schedule, "loss": cross_entropy, "ties": "exact"}
    done = on_ranks(model, [f"layers.{number}" for number in at], 3, step, order=order, **options)
    assert all(torch.equal(found, loss) for found, _ in done)
    assert differing([grads for _, grads in done], expected) == []


@pytest.mark.parametrize("ties", ["exact", "sum"])
def test_a_tied_weight_has_the_values_of_its_first_stage(ties: str) -> None:
    def rank_main(comm: Communicator) -> list[Gradients]:
        pipe = Pipeline(
            ringcomm.split(models[comm.rank], ["middle", "late.2"]), comm, microbatches=2, loss=cross_entropy, ties=ties
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            found.append({name: p.detach().clone() for name, p in pipe.named_parameters()})
            pipe.step(tokens(4), target=tokens(4, seed=2))
            optimizer.step()
        return found

    models = [make(Shared, 3, seed=rank) for rank in range(3)]  # initialised by each rank for itself
    first = copy.deepcopy(models[0])
    done = ringcomm.run_ranks(rank_main, 3, timeout=30)
    names = [{"token.weight", "middle.weight", "head.weight"}, {"blocks.0.norm.weight", "late.3.norm.weight"}]
    for step in range(2):
        for tied in names:
            copies = [p for found in done for name, p in found[step].items() if name in tied]
            assert len(copies) == len(tied)
            assert all(torch.equal(p, copies[0]) for p in copies)
    assert torch.equal(done[2][0]["head.weight"], first.token.weight)


@pytest.mark.parametrize("ties", ["exact", "sum"])
@pytest.mark.parametrize("on_meta", [(0, 1), (0,), (1,)], ids=str)
def test_a_tied_weight_on_meta_gets_its_values_before_the_first_step(on_meta: tuple[int, ...], ties: str) -> None:
    def rank_main(comm: Communicator) -> list[dict[str, torch.Tensor]]:
        model = models[comm.rank]
        values = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
        if comm.rank in on_meta:
            model = empty[comm.rank]
        pipe = Pipeline(ringcomm.split(model, cuts(2, 4)), comm, microbatches=2, loss=cross_entropy, ties=ties)
        if comm.rank in on_meta:
            pipe.to_empty(device="cpu")
            with torch.no_grad():
                for name, p in pipe.named_parameters():
                    p.copy_(values[name])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            pipe.step(tokens(4), target=tokens(4, seed=2))
            optimizer.step()
            optimizer.zero_grad()
            found.append({name: p.detach().clone() for name, p in pipe.named_parameters()})
        return found

    models = [make(Net, 4, seed=rank) for rank in range(2)]
    with torch.device("meta"):
        empty = [Net(4) for _ in models]
    whole = copy.deepcopy(models[0])
    for mine, other in zip(whole.blocks[2:], models[1].blocks[2:], strict=True):
        mine.load_state_dict(other.state_dict())
    whole.norm.load_state_dict(models[1].norm.state_dict())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    done = ringcomm.run_ranks(rank_main, 2, timeout=30)
    for step in range(3):
        for x, y in zip(tokens(4).chunk(2), tokens(4, seed=2).chunk(2), strict=True):
            (cross_entropy(whole(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for found in done:
            for name, p in found[step].items():
                torch.testing.assert_close(p, expected[name])
        assert torch.equal(done[0][step]["token.weight"], done[1][step]["head.weight"])


@pytest.mark.parametrize("ties", ["exact", "sum"])
def test_an_empty_tied_parameter(ties: str) -> None:
    model, x = make(Net, 4), tokens(4)
    model.blocks[0].nothing = model.blocks[3].nothing = nn.Parameter(torch.empty(0, 3))
    loss, expected = plain(model, [lambda net, a=a: cross_entropy(net(a), a) for a in x.chunk(2)], 2)

    def step(pipe: Pipeline, rank: int) -> Gradients:
        assert torch.equal(pipe.step(x, target=x), loss)
        return gradients(pipe)

    done = on_ranks(model, cuts(2, 4), 2, step, microbatches=2, loss=cross_entropy, ties=ties)
    if ties == "exact":
        assert differing(done, expected) == []


def test_a_tie_of_two_stages_on_one_rank_is_exact() -> None:
    model, x = make(Net, 8, tied=False), tokens(8)
    model.blocks[4].mlp[0].weight = model.blocks[0].mlp[0].weight  # stages 0 and 2 of 4, both on rank 0
    check_step(model, cuts(4), 2, x, 4, x, schedule="interleaved", loss=cross_entropy, ties="exact")


def test_tied_weights_in_16_bit_are_summed_in_32() -> None:
    model, x = make(Net, 4).bfloat16(), tokens(24)
    wide = [lambda net, a=a: cross_entropy(net(a).float(), a) for a in x.chunk(12)]
    found = [plain(model, [each], 12)[1]["token.weight"] for each in wide]
    expected = torch.stack([grad.float() for grad in found if grad is not None]).sum(0)

    def step(pipe: Pipeline, rank: int) -> torch.Tensor | None:
        pipe.step(x, target=x)
        return gradients(pipe)["token.weight" if rank == 0 else "head.weight"]

    options = {"microbatches": 12, "loss": lambda output, target: cross_entropy(output.float(), target)}
    for grad in on_ranks(model, cuts(2, 4), 2, step, **options):
        torch.testing.assert_close(grad, expected.bfloat16(), rtol=2e-2, atol=1e-4)


# ---- what is handed on ----------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Gets a tensor and a nest, gives a tensor with a gradient, one without, whole numbers, and what is no tensor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, beside: dict[str, Any], scale: float = 1.0) -> tuple[Any, ...]:
        h = torch.tanh(self.linear(x)) * scale + beside["skip"]
        with torch.no_grad():
            noted = h.mean()
        return h, {"skip": x, "noted": beside["noted"] + noted, "ids": beside["ids"] + 1, "name": "kept"}, scale * 0.5


class Nests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Chain([Nested(4) for _ in range(6)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        h, beside, scale = self.parts(x, {"skip": x * 0, "noted": torch.zeros(()), "ids": ids, "name": "kept"})
        return {"loss": h.square().mean() + 0 * beside["skip"].sum(), "scale": scale, "rows": (h, beside)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("static", [False, True])
def test_nests_are_handed_on(schedule: str, static: bool) -> None:
    model, m = make(Nests), 4
    x, ids = torch.randn(8, 4), torch.arange(8)[:, None]
    batches = [*zip(x.chunk(m), ids.chunk(m), strict=True)]
    loss, expected = plain(model, [lambda net, a=a, b=b: net(a, b)["loss"] for a, b in batches], m)
    outputs = merge_outputs([model(a, b) for a, b in batches])
    at = ["parts.2", "parts.4"] if schedule != "interleaved" else [f"parts.{i}" for i in range(1, 6)]

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients, Any]:
        before = pipe.evaluate(x, ids)  # before any training step, and of other tensors that want gradients
        found = pipe.step(x, ids)
        grads = gradients(pipe)
        after = pipe.evaluate(x, ids)
        assert before.loss is not None
        assert after.loss is not None
        assert torch.equal(before.loss, after.loss)
        assert torch.equal(before.loss, loss)
        return found, grads, after.output

    done = on_ranks(model, at, 3, step, microbatches=m, schedule=schedule, static_shapes=static)
    assert all(torch.equal(found, loss) for found, _, _ in done)
    assert differing([found for _, found, _ in done], expected) == []
    assert done[0][2] is done[1][2] is None
    found = done[2][2]
    assert found["scale"] == outputs["scale"] == 0.5**6
    assert found["rows"][1]["name"] == "kept"
    assert torch.equal(found["rows"][1]["ids"], ids + 6)
    assert torch.equal(found["rows"][0], outputs["rows"][0])
    assert torch.equal(found["rows"][1]["noted"], outputs["rows"][1]["noted"])
    assert found["loss"].shape == (m,)


class TwoWays(nn.Module):
    """Hands two tensors on, of which the next stage needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = Second()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.one(x), self.two(x))


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a).square().mean()


def test_tensors_that_the_next_stage_does_not_need_have_no_gradient() -> None:
    first, _ = check_step(make(TwoWays), ["last"], 2, numbers(4, 3), 2)
    assert gradients(first)["two.weight"] is None


class Beside(nn.Module):
    """Sums around modules, a mask by name, and a label that a middle stage needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.middle = Labelled()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = x + self.middle(x, mask=mask, label=label)
        return (self.last(x) * 2).square().mean()


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * mask + F.one_hot(label, 4)


@pytest.mark.parametrize("static", [False, True])
def test_sums_around_a_stage_and_arguments_by_name(static: bool) -> None:
    model, m = make(Beside), 3
    x, mask, label = torch.randn(6, 4), torch.rand(6, 1).round(), torch.arange(6) % 4
    parts = [*zip(x.chunk(m), mask.chunk(m), label.chunk(m), strict=True)]
    loss, expected = plain(model, [lambda net, a=a, b=b, c=c: net(a, b, label=c) for a, b, c in parts], m)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients]:
        value = pipe.evaluate(x, mask, label=label).loss
        assert value is not None
        assert torch.equal(value, loss)
        return pipe.step(x, mask, label=label), gradients(pipe)

    done = on_ranks(model, ["layers.2", "middle"], 3, step, microbatches=m, static_shapes=static)
    assert all(torch.equal(found, loss) for found, _ in done)
    assert differing([found for _, found in done], expected) == []


def test_shapes_may_change_from_one_micro_batch_to_the_next() -> None:
    model, parts = make(Net, 4), [tokens(rows, length, seed=length) for rows, length in ((2, 3), (1, 7), (3, 5))]
    loss, expected = plain(model, [lambda net, a=a: cross_entropy(net(a), a) for a in parts], 3)

    def step(pipe: Pipeline, rank: int) -> tuple[torch.Tensor, Gradients, Any]:
        found = pipe.step(parts, target=parts)
        return found, gradients(pipe), pipe.evaluate(parts).output

    done = on_ranks(model, cuts(2, 4), 2, step, microbatches=3, loss=cross_entropy, ties="exact")
    assert all(torch.equal(found, loss) for found, _, _ in done)
    assert differing([found for _, found, _ in done], expected) == []
    assert [tuple(x.shape) for x in done[1][2]] == [(2, 3, 11), (1, 7, 11), (3, 5, 11)]


def test_an_argument_may_go_to_each_micro_batch_as_a_whole() -> None:
    model, x = make(Beside), torch.randn(6, 4)
    mask, label = torch.ones(2, 1), torch.zeros(2, dtype=torch.long)
    loss, _ = plain(model, [lambda net, a=a: net(a, mask, label=label) for a in x.chunk(3)], 3)

    def step(pipe: Pipeline, _: int) -> torch.Tensor:
        return pipe.step(x, Replicate(mask), label=Replicate(label))

    assert all(torch.equal(found, loss) for found in on_ranks(model, ["middle"], 2, step, microbatches=3))


class Flattened(nn.Module):
    """Takes labels of all tokens, and two patches of an image with each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, patches: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.first(x + patches.unflatten(0, (len(x), 2)).sum(1, keepdim=True))
        return (self.second(torch.tanh(h)).flatten(0, 1) - labels).square().mean()


@pytest.mark.parametrize("rows", [6, 7])
def test_arguments_may_have_a_multiple_of_the_rows(rows: int) -> None:
    model, x, patches, labels = (
        make(Flattened),
        *(torch.randn(shape) for shape in [(rows, 5, 6), (rows * 2, 6), (rows * 5, 6)]),
    )
    split = (
        x.tensor_split(3),
        patches.unflatten(0, (rows, 2)).tensor_split(3),
        labels.unflatten(0, (rows, 5)).tensor_split(3),
    )
    losses = [
        lambda net, a=a, b=b, c=c: net(a, b.flatten(0, 1), c.flatten(0, 1)) * (3 * len(a) / rows)
        for a, b, c in zip(*split, strict=True)
    ]
    _, expected = plain(model, losses, 3)

    def step(pipe: Pipeline, _: int) -> Gradients:
        pipe.step(x, patches, labels=labels)
        return gradients(pipe)

    found = {name: x for each in on_ranks(model, ["second"], 2, step, microbatches=3) for name, x in each.items()}
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-6), name


@pytest.mark.parametrize("rows", [6, 7])
def test_a_number_and_a_single_row_go_to_each_micro_batch(rows: int) -> None:
    model, x = make(Beside), torch.randn(rows, 4)
    mask, label = torch.ones(1, 1), torch.zeros((), dtype=torch.long)
    targets = x.repeat_interleave(2, 0)  # two for each row

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output + target.unflatten(0, (-1, 2)).square().mean()

    parts = [(a, targets[2 * first : 2 * (first + len(a))]) for first, a in _numbered(x.tensor_split(3))]
    total, _ = plain(
        model,
        [lambda net, a=a, t=t: loss(net(a, mask, label=label), t) * (3 * len(a) / rows) for a, t in parts],
        3,
    )

    def step(pipe: Pipeline, _: int) -> torch.Tensor:
        return pipe.step(x, mask, label=label, target=targets)

    for found in on_ranks(model, ["middle"], 2, step, microbatches=3, loss=loss):
        torch.testing.assert_close(found, total)


def _numbered(parts: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Each part, after the number of its first row."""
    return [(sum(map(len, parts[:i])), part) for i, part in enumerate(parts)]


def test_a_chain_of_modules() -> None:
    model, x = make(lambda: nn.Sequential(*(Block(6) for _ in range(3)))), torch.randn(6, 6)
    loss, expected = plain(model, [lambda net, a=a: net(a).square().mean() for a in x.chunk(3)], 3)
    models = [copy.deepcopy(model) for _ in range(3)]

    def rank_main(comm: Communicator) -> tuple[torch.Tensor, Gradients]:
        pipe = Pipeline([*models[comm.rank]], comm, microbatches=3, loss=lambda output: output.square().mean())
        return pipe.step(x), gradients(pipe)

    done = ringcomm.run_ranks(rank_main, 3, timeout=30)
    assert all(torch.equal(found, loss) for found, _ in done)
    assert differing([found for _, found in done], expected) == []


# ---- the order of calls ---------------------------------------------------------------------------------------------


class Unordered(nn.Module):
    """Registered in another order than called: the head first, and two lists whose blocks are called in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(6, 11, bias=False), nn.LayerNorm(6)
        self.odd = nn.ModuleList(Block(6) for _ in range(3))
        self.even = nn.ModuleList(Block(6) for _ in range(3))
        self.token = nn.Embedding(11, 6)
        self.head.weight = self.token.weight
        self.alias = self.even

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x)
        for even, odd in zip(self.even, self.odd, strict=True):
            h = odd(even(h))
        return self.head(self.norm(h))


ORDER = ["token", "even.0", "odd.0", "even.1", "odd.1", "even.2", "odd.2", "norm", "head"]


@pytest.mark.parametrize("at", [["odd.0", "even.2"], ["even.1", "norm"], ["odd.1", "head"]])
def test_modules_registered_in_another_order_than_called(at: list[str]) -> None:
    x = tokens(6)
    check_step(make(Unordered), at, 3, x, 3, x, order=ORDER, loss=cross_entropy, ties="exact")


def test_a_list_that_is_named_stands_for_its_members() -> None:
    """A ModuleList is never called itself."""
    model = make(Net)
    assert ringcomm.split(model, ["blocks"]).first == ("", "blocks.0")
    stages = ringcomm.split(model, ["blocks.4"], order=["token", "blocks", "head"])
    assert {stages.stage_of[f"blocks.{i}"] for i in range(4)} == {0}
    assert {stages.stage_of[f"blocks.{i}"] for i in range(4, 8)} == {1}


def test_modules_that_order_does_not_name_keep_their_places() -> None:
    stages = ringcomm.split(make(Net, 2, tied=False), ["blocks", "position"], order=["token", "blocks", "position"])
    assert stages.stage_of == {"token": 0, "blocks.0": 1, "blocks.1": 1, "position": 2, "norm": 2, "head": 2}


class Latent(nn.Module):
    """Whose layer gives two things at once, one of which goes to the next module, the other one past it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(6, 10), nn.LayerNorm(4), nn.Linear(10, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, past = self.down(x).split([4, 6], dim=-1)
        return self.up(torch.cat([self.norm(inner), past], -1))


@pytest.mark.parametrize("carry", [[], ["down"]])
def test_a_cut_before_a_module_that_takes_a_part_of_a_result(carry: list[str]) -> None:
    """Without carry the rest is missing, which is said by name."""
    missing = pytest.raises(InvalidArgumentError, match="reaches up with a tensor that depends on a result of down")
    with nullcontext() if carry else missing:
        check_step(make(Latent), ["norm"], 2, numbers(4, 3, 6), 2, tokens(4, 3), carry=carry, loss=cross_entropy)


class Writing(nn.Module):
    """Writes into its inputs, as FSMT does, and into a weight of the first stage, as Gemma 3n does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-1, 1)
        x.masked_fill_(x == -100, 0)
        return cross_entropy(self.last(self.first(x)), y)


def test_code_that_writes_into_inputs_and_weights() -> None:
    model = make(Writing)
    x, y = tokens(6, 3).index_fill(1, torch.tensor([1]), -100), tokens(6, 3, seed=2)
    batch = x.clone()
    pairs = zip(batch.chunk(3), y.chunk(3), strict=True)
    _, expected = plain(model, [lambda net, a=a, b=b: net(a, b) for a, b in pairs], 3)

    def step(pipe: Pipeline, rank: int) -> tuple[Gradients, torch.Tensor]:
        mine = x.clone()
        pipe.step(mine, y=y)
        return gradients(pipe), mine

    done = on_ranks(model, ["last"], 2, step, microbatches=3)
    assert differing([found for found, _ in done], expected) == []
    assert all(torch.equal(mine, batch) for _, mine in done)


class Recomputing(nn.Module):
    """Blocks in a torch.autograd.Function, as Reformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks, self.head = (
            nn.Embedding(11, 6),
            nn.ModuleList(Block(6) for _ in range(2)),
            nn.Linear(6, 11),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Blocks.apply(self.token(x), self.blocks))


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        ctx.blocks, ctx.x = blocks, x.detach()
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = y = ctx.x.requires_grad_()
            for block in ctx.blocks:
                y = block(y)
            y.backward(grads[0])
        return x.grad, None


def test_a_cut_inside_of_an_autograd_function() -> None:
    """It is refused, because its gradients would be silently lost."""
    text = r"a call of blocks\.1, with which .* outside of any torch.autograd.Func"
    with pytest.raises(InvalidArgumentError, match=text):
        check_step(make(Recomputing), ["blocks.1"], 2, tokens(4), 2, tokens(4), loss=cross_entropy)
