"""Models and loops of ordinary PyTorch code: the same bits at every stage, and those of one process that adds gradients
up as autograd does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.data_parallel.model.place import place_of
from tests.support.choice import choose, slow
from tests.support.same import same
from tests.support.seeded import seeded

STAGES = (0, 1, 2, 3)
WORLD = 3
WIDTH = 6


class Block(nn.Module):
    """A block with a second argument that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cross, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None, seen: list[Any] | None = None) -> Any:
        y = torch.tanh(self.inner(x))
        if memory is not None:
            y = y + self.cross(memory) * x
        if seen is not None:
            seen.append(y.square().mean())
        return x + y


class Net(nn.Module):
    """Blocks between an encoder and a head, called in a way of the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What is between the ends."""
        raise NotImplementedError


class CrossAttention(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Skips(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        a = self.blocks[0](self.encoder(x))
        b = self.blocks[1](a)
        return self.blocks[3](self.blocks[2](b, a) + a, b)


class Shared(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for i in (0, 1, 0, 2, 1, 3):
            x = self.blocks[i](x, x.detach() if i == 1 else None)
        return x


class AuxiliaryLosses(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, seen=seen)
        assert len(seen) == len(self.blocks)
        return self.head(x) + torch.stack(seen).sum()


class Attribute(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
            block.router_loss = F.linear(x, block.inner.weight).square().mean()
        return self.head(x.detach()) + sum(block.router_loss for block in self.blocks)


class ReadByParent(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        before = F.linear(x, self.blocks[2].inner.weight)
        for block in self.blocks:
            x = block(x)
        return x + before + F.linear(x, self.blocks[1].inner.weight.t())


class Checkpointed(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = checkpoint(block, x, memory, use_reentrant=False)
        return x


class Reentrant(Net):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=True)
        return self.blocks[3](checkpoint(self.blocks[2], x, use_reentrant=True))


class ReentrantShared(Net):
    """Gradients of one parameter come in several passes, each inside of the whole one."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.encoder, self.encoder(x), use_reentrant=True)
        for i in (0, 1, 0):
            x = self.blocks[2 + i](checkpoint(self.blocks[i], x, use_reentrant=True))
        return checkpoint(self.encoder, self.blocks[1](x), use_reentrant=True)


class ReentrantAround(Net):
    """A unit of several small blocks, each in a checkpoint of its own, and another unit's call between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for i in (0, 1, 11, 2, 3, 10, 9, 4, 5, 8, 6, 7):
            x = checkpoint(self.blocks[i], x, use_reentrant=True) if i < 8 else torch.tanh(self.blocks[i](x))
        return x


class ReentrantAlone(Net):
    """All blocks that are trained are inside of checkpoints, and the one behind them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].requires_grad_(False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for i in (0, 1, 0, 2, 1):
            x = checkpoint(self.blocks[i], x, use_reentrant=True)
        return self.blocks[3](x)


class FrozenParts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].inner.requires_grad_(False)
        self.encoder.requires_grad_(False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class InPlace(Net):
    class Inner(Block):
        def forward(self, x: torch.Tensor, memory: Any = None, seen: Any = None) -> Any:
            x.mul_(1.5).add_(0.25)
            return super().forward(x, memory, seen)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(4))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x


class ReentrantInside(InPlace):
    """Checkpoints inside of a block, twice over the same parameters."""

    class Inner(Block):
        def forward(self, x: torch.Tensor, memory: Any = None, seen: Any = None) -> Any:
            y = checkpoint(self.inner, x, use_reentrant=True)
            return super().forward(x + y * checkpoint(self.inner, 2 * x, use_reentrant=True), memory, seen)


class UndefinedGradient(Net):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.Stop.apply(self.encoder(x))
        for i, block in enumerate(self.blocks):
            x = block(x, self.Stop.apply(x) if i == 1 else memory)
        return x


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.blocks)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return x


class WithBias(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None, seen: list[Any] | None = None) -> Any:
        x = super().forward(x)
        return x if before is None else x + before.sum(0) * x, self.bias[:3]


class ViewsOfParameters(Net):
    """Views of parameters leave the call of their unit: as a result, and kept by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithBias() for _ in range(4))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x, view = self.encoder(x), None
        for block in self.blocks:
            x, view = block(x, view)
        self.kept = self.blocks[0].inner.weight.t()
        return x + self.kept.square().sum()


class OwnSavedTensorHooks(Net):
    """Hooks of the program keep saved tensors as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().forward(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(self.encoder(x), x)
        return x


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, torch.jit.script(nn.Linear(WIDTH, WIDTH)))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NETS: list[type[Net]] = [
    *(ViewsOfParameters, OwnSavedTensorHooks, Scripted),
    *(CrossAttention, Skips, Shared, AuxiliaryLosses, Attribute, ReadByParent, Checkpointed, Reentrant),
    *(
        ReentrantShared,
        ReentrantAround,
        ReentrantAlone,
        ReentrantInside,
        FrozenParts,
        InPlace,
        UndefinedGradient,
        BatchNorm,
    ),
]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def made(kind: type[nn.Module]) -> Any:
    return seeded(kind(), 3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


def plain_loop(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(3):
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.detach()


def on_every_stage(
    kind: type[nn.Module], loop: Callable[..., Any], stages: tuple[int, ...] = STAGES, **how: Any
) -> list[dict[str, Any]]:
    """What each stage has at the end on rank 0: losses, and parameters under their names. All stages are equal."""
    models = {stage: [made(kind) for _ in range(WORLD)] for stage in stages}

    def rank(comm: ringcomm.Communicator) -> list[dict[str, Any]]:
        found = []
        for stage in stages:
            model = models[stage][comm.rank]
            opt = adamw(model)
            ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=0.0005, **how)
            losses = [*loop(model, opt, comm.rank)]
            found.append({"losses": losses, **{k: v.clone() for k, v in model.state_dict().items()}})
        return found

    everyone = ringcomm.run_ranks(rank, WORLD, timeout=30)
    for found in everyone:
        for stage, each in zip(stages[1:], found[1:], strict=True):
            for name, value in found[0].items():
                assert same(value, each[name]), f"stage {stage}: {name}"
    return everyone[0]


def in_one_process(kind: type[nn.Module], steps: int = 3) -> dict[str, torch.Tensor]:
    """The same training by one process, which averages the ranks' gradients itself."""
    models = [made(kind) for _ in range(WORLD)]
    opts = [adamw(model) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model(batch(rank, step)).square().mean().backward()
        for params in zip(*(model.parameters() for model in models), strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            for p in params if grads else ():
                p.grad = torch.stack(grads).sum(0) / WORLD
        for model, opt in zip(models, opts, strict=True):
            opt.step()
            opt.zero_grad()
            for mine, first in zip(model.buffers(), models[0].buffers(), strict=True):
                mine.copy_(first)
    return {name: p.detach() for name, p in models[0].named_parameters()}


# Other arrangements of the skips and checkpoints that the remaining ones have.
RARE = (Skips, Reentrant, ReentrantAround, ReentrantAlone)


@pytest.mark.parametrize("kind", choose(NETS, [each for each in NETS if each not in RARE]))
def test_every_stage_has_the_bits_of_every_other(kind: type[Net]) -> None:
    found = on_every_stage(kind, plain_loop)
    for name, value in in_one_process(kind).items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)


def test_some_ranks_return_what_the_unit_inside_returns() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

        def forward(self, x: torch.Tensor, scales: bool) -> torch.Tensor:
            y = self.inner(x)
            return y * self.scale if scales else y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.outer = nn.Linear(WIDTH, WIDTH), Outer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.first(x), bool(x.sum() > 0))

    assert len({bool(batch(rank, 0).sum() > 0) for rank in range(WORLD)}) == 2, "every rank takes the same way"
    on_every_stage(Model, plain_loop, units=(Outer, nn.Linear))


def test_some_ranks_have_reentrant_checkpoints_before_others() -> None:
    """Of a block that they also call outside of one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(WIDTH, 20), nn.Linear(20, 20)  # a bucket each

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            checkpoints, x = bool(x.sum() > 0), self.first(x)
            return self.shared(checkpoint(self.shared, x, use_reentrant=True) if checkpoints else x)

    ways = [[bool(batch(rank, step).sum() > 0) for step in range(3)] for rank in range(WORLD)]
    assert any(way[0] for way in ways), "no rank has a checkpoint at first"
    assert any(not way[0] and any(way) for way in ways), "no rank has its first checkpoint later"
    found = on_every_stage(Model, plain_loop, stages=(0, 1, 2), units=())
    for name, value in in_one_process(Model).items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)


class Seen(Net):
    """Keeps what is half-way through."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                self.__dict__["seen"] = x
        return x


class _CheckpointFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
        return self.head(self.block(x))


def test_a_reentrant_checkpoint_of_what_was_frozen_before() -> None:
    """A pass inside of the first backward pass is not noticed where it has no gradients; so each change of what is
    trained asks anew."""

    def run(comm: ringcomm.Communicator, how: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"bucket_cap_mb": 1e-5}
        if how == "ddp":
            wrapped: nn.Module = ringcomm.DistributedDataParallel(model, comm, **options)
        else:
            wrapped, _ = ringcomm.shard(model, optimizer, how, comm, **options)
        for step in range(3):
            model.block.requires_grad_(step > 0)
            wrapped(torch.full((2, 6), 1.0 + comm.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.clone() for x in model.state_dict().values()]

    torch.manual_seed(0)
    plain = _CheckpointFirst()
    expected = ringcomm.run_ranks(run, 2, "ddp", ranks="threads", timeout=20)[0]
    for stage in range(4):
        assert all(map(torch.equal, expected, ringcomm.run_ranks(run, 2, stage, ranks="threads", timeout=20)[0]))


def test_a_backward_pass_that_raised_can_be_repeated() -> None:
    found = on_every_stage(Seen, repeated_after_an_error)
    for name, value in in_one_process(Seen, steps=2).items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)


def test_what_is_unused_stays_as_it_was() -> None:
    found = on_every_stage(CrossAttention, plain_loop)
    plain = made(CrossAttention)
    for name, p in plain.named_parameters():
        assert ("unused" in name) == torch.equal(p, found[0][name]), name


def two_passes_before_backward(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(2):
        real, fake = model(batch(rank, step)).mean(), model(batch(rank, step + 10)).square().mean()
        (real + fake).backward()
        dropped = model(batch(rank, step + 20))
        first, second = model(batch(rank, step)).mean(), model(batch(rank, step + 30)).square().mean()
        second.backward(retain_graph=True)
        first.backward()
        opt.step()
        opt.zero_grad()
        yield (real + fake + dropped.sum() + first + second).detach()


def repeated_after_an_error(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    """A backward pass that raises half-way is run again over the same graph."""
    for step in range(2):
        fails = [True]
        out = model(batch(rank, step))

        def once(grad: torch.Tensor, fails: list[bool] = fails) -> None:
            if fails:
                fails.clear()
                raise ValueError

        model.seen.register_hook(once)
        loss = out.square().mean()
        with pytest.raises(ValueError):
            loss.backward(retain_graph=True)
        opt.zero_grad()
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.detach()


def penalties(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(3):
        x = batch(rank, step).requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        again = torch.autograd.grad(model(x).square().sum(), x)[0]
        loss = (slope.norm(dim=1) - 1).square().mean() + model(batch(rank, step + 5)).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield (loss + again.sum()).detach()


def losses_on_parameters(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(2):
        loss = model(batch(rank, step)).square().mean()
        loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
        for p in model.blocks[0].parameters():
            p.data.mul_(0.9)
        yield loss.detach()


def hooks_around_everything(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            loss = model(batch(rank, step)).square().mean()
            loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.detach()


def other_submodules(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    """Modules without parameters come and go after wrapping; one with parameters goes."""
    model.criterion = nn.MSELoss()
    for block in model.blocks:
        block.unused = nn.Dropout(0.1)
    yield from plain_loop(model, opt, rank)
    del model.criterion
    model.blocks[0].norm = nn.BatchNorm1d(WIDTH, affine=False)
    yield from plain_loop(model, opt, rank)
    yield model.criterion.weight if hasattr(model, "criterion") else torch.zeros(1)


def freezing(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(4):
        model.blocks[1].requires_grad_(step % 2 == 1)
        yield from plain_loop(model, opt, rank)


def failing(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError)):
            model(torch.zeros(2, WIDTH + 1))
        yield from plain_loop(model, opt, rank)
        with torch.no_grad():
            model(batch(rank, 1))


LOOPS = [
    *(two_passes_before_backward, penalties, losses_on_parameters, freezing, failing),
    *(hooks_around_everything, other_submodules),
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [CrossAttention, Shared, ReadByParent])
def test_every_loop_has_the_same_bits_at_every_stage(kind: type[Net], loop: Callable[..., Any]) -> None:
    on_every_stage(kind, loop)


@pytest.mark.parametrize("how", ["train", "eval", slow("no_grad")])
def test_batch_norms_may_run_twice_before_backward(how: str) -> None:
    """The second forward pass begins with the first rank's buffers, which the first one's graph has saved."""

    def loop(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
        for step in range(2):
            loss = model(batch(rank, step)).square().mean()
            if how == "train":
                loss = loss + model(batch(rank, step + 5)).mean()
            else:
                model.eval()
                with torch.no_grad():
                    model(batch(rank, step + 5))
                model.train()
            loss.backward()
            opt.step()
            opt.zero_grad()
            yield loss.detach()

    on_every_stage(BatchNorm, loop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam])
def test_parameters_of_16_bits_step_as_in_plain_torch(kind: Any, dtype: torch.dtype) -> None:
    """torch rounds the last elements of a 16-bit tensor otherwise than the others, so no step joins tensors."""
    shapes = [(5,), (7, 3), (), (1,), (13,), (33,), (2, 3, 5)]
    how = {"lr": 0.1, "weight_decay": 0.1} | ({} if kind is torch.optim.Adam else {"momentum": 0.9})

    class Params(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            self.each = nn.ParameterList(nn.Parameter(value) for value in values)

        def forward(self, step: int) -> torch.Tensor:
            return sum((p.float() * torch.sin(p.float() + step)).sum() for p in self.each)

    def trained(model: nn.Module, opt: Any) -> list[torch.Tensor]:
        for step in range(4):
            model(step).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = Params()
    expected = trained(plain, kind(plain.parameters(), **how))

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            model = Params()
            opt = kind(model.parameters(), **how)
            ringcomm.shard(model, opt, stage, comm)
            for mine, theirs in zip(trained(model, opt), expected, strict=True):
                assert torch.equal(mine, theirs), (stage, mine, theirs)

    ringcomm.run_ranks(rank, 2, timeout=20)


@pytest.mark.parametrize("cap", [0.00001, 25])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_from_before_wrapping_are_this_rank_s_sums(stage: int, cap: float) -> None:
    models = [made(Skips) for _ in range(WORLD)]
    by_hand = [made(Skips) for _ in range(WORLD)]
    for rank, model in enumerate(by_hand):
        (model(batch(rank, 0)).square().mean() + model.blocks[0].unused(batch(rank, 0)[:, :2]).sum()).backward()
        model(batch(rank, 1)).square().mean().backward()

    def rank(comm: ringcomm.Communicator) -> None:
        model = models[comm.rank]
        before = batch(comm.rank, 0)
        (model(before).square().mean() + model.blocks[0].unused(before[:, :2]).sum()).backward()
        opt = adamw(model)
        ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=cap)
        model(batch(comm.rank, 1)).square().mean().backward()
        for name, p in model.named_parameters():
            own = [dict(each.named_parameters())[name].grad for each in by_hand]
            grad = None if p.grad is None else p.grad + 0
            assert (grad is None) == (own[0] is None)
            if grad is not None:
                torch.testing.assert_close(grad, torch.stack(own).mean(0))
        opt.step()

    ringcomm.run_ranks(rank, WORLD, timeout=20)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_in_shared_memory_train_on(stage: int) -> None:
    """Moving to shared memory replaces the storages."""
    models = [[made(Skips), made(Skips)] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        found = []
        for model, shares in zip(models[comm.rank], (False, True), strict=True):
            opt = adamw(model)
            ringcomm.shard(model, opt, stage, comm)
            found.append([])
            for part in range(2):
                if part and shares:
                    model.share_memory()
                    for x in model.state_dict().values():
                        x.share_memory_()
                found[-1] += [*plain_loop(model, opt, comm.rank)]
        assert all(map(torch.equal, *found))

    ringcomm.run_ranks(rank, WORLD, timeout=20)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_s_class_equals_what_it_was(stage: int) -> None:
    """`type(module) == nn.Linear`, as in the documentation of nn.Module.apply, and tables of classes."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1))
        ringcomm.shard(model, None, stage, comm, bucket_cap_mb=0.00001)
        linear = type(model[0])
        assert linear == nn.Linear
        assert nn.Linear == linear
        assert {nn.Linear: 1}[linear] == 1
        assert linear in (nn.Conv2d, nn.Linear)
        assert linear not in (nn.Conv2d, type(model[1]), nn.Sequential, 3)
        assert issubclass(linear, nn.Linear)

    ringcomm.run_ranks(rank, 1, ranks="threads", timeout=10)


def test_a_class_that_looks_at_its_subclasses_does_not_see_what_wrapping_makes() -> None:
    class Registered(nn.Linear):
        known: list[type] = []  # noqa: RUF012

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            Registered.known.append(cls)

    class Mine(Registered):
        pass

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(Mine(2, 2), Mine(2, 2))
        ringcomm.shard(model, None, 2, comm)
        assert isinstance(model[0], Mine)
        assert Registered.known == [Mine]

        class Later(type(model[0])):  # type: ignore[misc]
            pass

        assert Registered.known == [Mine, Later]

    ringcomm.run_ranks(rank, 1, ranks="threads", timeout=10)


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_that_are_not_sent_may_differ(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_buffer("own", torch.full((comm.rank + 1,), float(comm.rank)))
        model.register_buffer("graph", torch.eye(3).to_sparse())
        ringcomm.shard(model, None, stage, comm, broadcast_buffers=False)
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.own, torch.full((comm.rank + 1,), float(comm.rank)))

    ringcomm.run_ranks(rank, 2, timeout=10)


def test_evaluation_begins_with_the_buffers_of_the_first_rank() -> None:
    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        outputs = []
        for ddp in (True, False):
            module = made_norm()
            model = ringcomm.DistributedDataParallel(module, comm) if ddp else ringcomm.shard(module, None, 0, comm)[0]
            model(batch(comm.rank, 0)).mean().backward()
            model.eval()
            with torch.no_grad():
                outputs.append(model(batch(0, 1)))
        return outputs

    def made_norm() -> nn.Module:
        return seeded(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)))

    first, *others = ringcomm.run_ranks(rank, WORLD, timeout=30)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_copies_are_plain_models(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = made(CrossAttention)
        ringcomm.shard(model, adamw(model), stage, comm)
        expected = model(batch(0, 0))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is CrossAttention
            assert all(place_of(p) is None for p in twin.parameters())
            assert torch.equal(twin(batch(0, 0)), expected)
            twin(batch(0, 0)).sum().backward()
            assert all(p.grad is None for p in model.parameters())
            with torch.no_grad():
                twin.head.weight.zero_()
        assert torch.equal(model(batch(0, 0)), expected)

    ringcomm.run_ranks(rank, 1, timeout=30)


def test_copies_of_ours_are_evaluated_and_trained() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        module = made(CrossAttention)
        model = ringcomm.DistributedDataParallel(module, comm, bucket_cap_mb=1)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        opt = adamw(model)
        for _ in plain_loop(model, opt, comm.rank):
            average.update_parameters(model)
        with torch.no_grad():
            assert not torch.equal(average(batch(0, 0)), model(batch(0, 0)))
        twin = copy.deepcopy(model)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        for each in (model, twin):
            each(batch(comm.rank, 7)).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert p.grad is None if q.grad is None else torch.equal(p.grad, q.grad), name
        assert type(pickle.loads(pickle.dumps(model)).module) is CrossAttention

    ringcomm.run_ranks(rank, WORLD, timeout=30)


def test_what_is_ignored_stays_on_its_rank() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        module = made(BatchNorm)
        module._ddp_params_and_buffers_to_ignore = ["head.weight", "norms.0.running_mean"]
        model = ringcomm.DistributedDataParallel(module, comm)
        with torch.no_grad():
            module.head.weight.fill_(comm.rank)
            module.norms[0].running_mean.fill_(comm.rank)
        model(batch(comm.rank, 0)).mean().backward()
        assert (module.head.weight == comm.rank).all()
        assert comm.rank == 0 or (module.norms[0].running_mean > 0.5).any()
        grads = comm.all_gather(module.head.weight.grad)
        assert not torch.equal(grads[: len(grads) // 3], grads[len(grads) // 3 : 2 * len(grads) // 3])

    ringcomm.run_ranks(rank, WORLD, timeout=30)


def test_a_model_that_is_wrapped_is_not_wrapped_again() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            model = made(CrossAttention)
            ringcomm.shard(model, adamw(model), stage, comm)
            for again in (
                lambda model=model: ringcomm.shard(nn.Sequential(model, nn.Linear(2, 2)), None, 1, comm),
                lambda model=model: ringcomm.DistributedDataParallel(model, comm),
                lambda model=model: nn.parallel.DistributedDataParallel(model, process_group=object()),
                lambda model=model: nn.parallel.DistributedDataParallel(torch.compile(model), process_group=object()),
            ):
                with pytest.raises(ringcomm.InvalidArgumentError, match="wrapped"):
                    again()
        ours = ringcomm.DistributedDataParallel(made(CrossAttention), comm)
        with pytest.raises(ringcomm.InvalidArgumentError, match="averaged twice"):
            nn.parallel.DistributedDataParallel(ours, process_group=object())

    ringcomm.run_ranks(rank, 1, timeout=30)


def test_a_new_wrapper_takes_the_place_of_the_one_before() -> None:
    """As where a cell of a notebook is run again; the one before takes it back when it is used."""

    def rank(comm: ringcomm.Communicator, again: bool) -> list[torch.Tensor]:
        model = models[comm.rank]
        opt = adamw(model)
        wrapped = before = ringcomm.DistributedDataParallel(model, comm)
        found = []
        for step in range(6):
            if again and step == 2:
                wrapped = ringcomm.DistributedDataParallel(model, comm)
            if again and step == 4:
                wrapped = before
            loss = wrapped(batch(comm.rank, step)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=step % 2 == 0)
            found.append(loss.detach())
        return [*found, *(p.detach().clone() for p in model.parameters())]

    models = [made(CrossAttention) for _ in range(WORLD)]
    expected = ringcomm.run_ranks(rank, WORLD, False, timeout=30)
    models = [made(CrossAttention) for _ in range(WORLD)]
    for one, other in zip(expected, ringcomm.run_ranks(rank, WORLD, True, timeout=30), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", [slow("model.compile"), "torch.compile", "blocks"])
def test_compiled_models_have_the_bits_of_eager_ones(how: str, order: str) -> None:
    def compiled(model: Any) -> Any:
        torch._dynamo.reset()
        if how == "blocks":
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
            return model
        if how == "model.compile":
            model.compile(backend="aot_eager")
            return model
        return torch.compile(model, backend="aot_eager")

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in (1, 3):
            results = []
            for compiles in (False, True):
                model = made(CrossAttention)
                opt = adamw(model)
                called = compiled(model) if compiles and order == "before" else model
                ringcomm.shard(model, opt, stage, comm, bucket_cap_mb=0.0005)
                called = compiled(model) if compiles and order == "after" else called
                losses = [*plain_loop(called, opt, comm.rank)]
                results.append({"losses": losses, **model.state_dict()})
            for name, value in results[0].items():
                assert same(value, results[1][name]), f"stage {stage}: {name}"

    ringcomm.run_ranks(rank, 1, timeout=60)  # Dynamo is for one thread of a process


class Quantised(nn.Parameter):
    """A frozen weight of 8 bits whose scale is beside it, as quantising libraries keep them."""

    scale: float


class WithQuantised(Net):
    def __init__(self) -> None:
        super().__init__()
        values = (torch.arange(WIDTH * WIDTH) % 19 - 9).to(torch.int8).view(WIDTH, WIDTH)
        self.packed = Quantised(values, requires_grad=False)
        self.packed.scale = 0.1

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.encoder(x), self.packed.float() * self.packed.scale)
        for block in self.blocks:
            x = block(x)
        return x


def test_quantised_weights_stay_as_they_are() -> None:
    found = on_every_stage(WithQuantised, plain_loop)
    plain = made(WithQuantised)
    assert torch.equal(found[0]["packed"], plain.packed)


def some_inputs(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    """Backward to some parameters, gradients of others by autograd.grad, and conversions that change nothing."""
    for step in range(2):
        chosen = [*model.blocks[1].inner.parameters(), model.head.weight]
        loss = model.to(model.head.weight.dtype).to("cpu")(batch(rank, step)).square().mean()
        others = torch.autograd.grad(
            loss, [model.encoder.weight, *model.blocks[2].inner.parameters()], retain_graph=True
        )
        loss.backward(inputs=chosen)
        assert {id(p) for p in model.parameters() if p.grad is not None} == {id(p) for p in chosen}
        opt.step()
        opt.zero_grad()
        yield loss.detach()
        yield from (grad.clone() for grad in others)


def called_with_other_values(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    for step in range(2):
        yield from plain_loop(model, opt, rank)
        values = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
        with torch.no_grad():
            yield torch.func.functional_call(model, values, (batch(rank, step),))
            yield torch.func.functional_call(model, dict(model.named_parameters()), (batch(rank, step),))


def averages(model: Any, opt: Any, rank: int) -> Iterator[torch.Tensor]:
    """Weights are averaged, evaluated in the model's place, and taken back."""
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        yield from plain_loop(model, opt, rank)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.3)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(average)
        with torch.no_grad():
            yield model(batch(0, step)).clone()
        model.load_state_dict(own)


@pytest.mark.parametrize("loop", [some_inputs, called_with_other_values, averages])
@pytest.mark.parametrize("mixed", [False, True])
def test_more_loops_have_the_same_bits_at_every_stage(loop: Callable[..., Any], mixed: bool) -> None:
    precision = ringcomm.MixedPrecision(torch.bfloat16, output_dtype=torch.float32) if mixed else None
    on_every_stage(CrossAttention, loop, mixed_precision=precision)
