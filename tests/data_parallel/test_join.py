"""join: ranks with different numbers of inputs train as if those without any more had gradients of zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.data_parallel.ddp import DistributedDataParallel
from ringcomm.data_parallel.join import join
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.data_parallel.optim.clip import clip_grad_norm_
from ringcomm.data_parallel.shard import no_sync, shard
from ringcomm.errors import InvalidArgumentError, MismatchError, RingcommError, UnsupportedError
from ringcomm.modules.precision import MixedPrecision
from ringcomm.tools.bench.check import tree_sum
from tests.support.choice import slow

WORLD = 4
STEPS = (3, 1, 4, 0)  # of each rank: one has no input at all, and the last to go is not the first
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between a tied embedding and its head, and a parameter that nobody uses."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def make(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return F.cross_entropy(model(x).float().flatten(0, 1), x.flatten().roll(1))


def values(model: nn.Module) -> Values:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def on_ranks(fn: Callable[[Any], Any], world_size: int = WORLD) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=30)


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def one_process(over_all: bool, steps: tuple[int, ...] = STEPS, clip: float | None = None) -> Values:
    """The expected result in one process: a rank without input adds zero gradients; one optimizer."""
    model, world_size = make(), len(steps)
    optimizer = optimizer_of(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(max(steps)):
        each: list[dict[str, torch.Tensor | None]] = []
        for rank in range(world_size):
            model.zero_grad()
            if step < steps[rank]:
                loss_of(model, rank, step).backward()
            each.append({name: p.grad for name, p in model.named_parameters()})
        count = world_size if over_all else sum(step < own for own in steps)
        for name, p in model.named_parameters():
            found = [grads[name] for grads in each]
            if any(grad is not None for grad in found):
                p.grad = tree_sum([torch.zeros_like(p) if grad is None else grad for grad in found]) / count
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return values(model)


def alike(results: list[Values], expected: Values | None = None, exact: bool = True) -> None:
    for name, x in results[0].items():
        for found in results:
            assert torch.equal(found[name], x), name
        if expected is not None:
            torch.testing.assert_close(x, expected[name], **({"rtol": 0, "atol": 0} if exact else {}), msg=name)


@pytest.mark.parametrize("over_all", [True, False], ids=["all", "those_with_input"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_gives_one_process_s_bits(stage: int, over_all: bool) -> None:
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> tuple[Values, dict[str, Any]]:
        model = models[comm.rank]
        model, optimizer = shard(model, optimizer_of(model.parameters()), stage, comm, bucket_cap_mb=0.001)
        assert optimizer is not None
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with join(model, divide_by_initial_world_size=over_all):
            for step in range(STEPS[comm.rank]):
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        assert not any(p.grad is not None for p in model.parameters())
        return values(model), optimizer.state_dict()

    found = on_ranks(rank)
    alike([each for each, _ in found], one_process(over_all))
    for _, state in found:
        for index, entries in found[0][1]["state"].items():
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][index][key])), (index, key)


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_clipping_reaches_the_ranks_that_have_joined(stage: int) -> None:
    models = [make() for _ in range(3)]
    steps = (1, 3, 2)

    def rank(comm: ringcomm.Communicator) -> Values:
        model = models[comm.rank]
        model, optimizer = shard(model, optimizer_of(model.parameters()), stage, comm, bucket_cap_mb=0.001)
        assert optimizer is not None
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with join(model):
            for step in range(steps[comm.rank]):
                optimizer.zero_grad(set_to_none=step == 1)
                loss_of(model, comm.rank, step).backward()
                clip_grad_norm_(model, 0.05)
                optimizer.step()
                schedule.step()
        return values(model)

    alike(on_ranks(rank, 3), one_process(True, steps, clip=0.05), exact=False)


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def by_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def discarding_some(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, p in model.named_parameters():
        if name.startswith("blocks.1"):
            p.grad = None


@pytest.mark.parametrize("change", [by_optimizer, by_module, by_gradient, discarding_some])
@pytest.mark.parametrize("when", [slow("first"), "before the step", "last"])
@pytest.mark.parametrize("foreach", [slow(False), True])
def test_changes_of_gradients_reach_the_ranks_that_have_joined(change: Any, when: str, foreach: bool) -> None:
    """Two blocks, because what a rank kept from the first one would be wrong in the second. In the first one all ranks
    have input, so a change at the start of a step is the first call that a joined rank must follow."""

    def trained(stage: int) -> Values:
        models = [make() for _ in range(WORLD)]

        def rank(comm: Any) -> Values:
            optimizer = torch.optim.AdamW(models[comm.rank].parameters(), lr=0.01, foreach=foreach)
            model, _ = shard(models[comm.rank], optimizer, stage, comm)
            for steps in ((3, 1, 4, 2), STEPS):
                with join(model):
                    for step in range(steps[comm.rank]):
                        if when == "first":
                            change(model, optimizer)
                        loss_of(model, comm.rank, step).backward()
                        clip_grad_norm_(model, 1e9)
                        if when == "before the step":
                            change(model, optimizer)
                        optimizer.step()
                        if when == "last":
                            change(model, optimizer)
            return values(model)

        found = on_ranks(rank)
        assert all(torch.equal(x, found[0][name]) for each in found for name, x in each.items())
        return found[0]

    expected = trained(0)
    for stage in (1, 2, 3):
        assert all(torch.equal(x, expected[name]) for name, x in trained(stage).items())


@pytest.mark.parametrize("precision", [MixedPrecision(torch.bfloat16), MixedPrecision(reduce_dtype=torch.bfloat16)])
def test_mixed_precision_and_accumulation_at_every_stage(precision: MixedPrecision) -> None:
    steps, found = (2, 4, 3), []
    for stage in (0, 2, 3):
        models = [make() for _ in range(3)]

        def rank(comm: ringcomm.Communicator, stage: int = stage, models: list[nn.Module] = models) -> Values:
            model = models[comm.rank]
            model, optimizer = shard(
                model, optimizer_of(model.parameters()), stage, comm, bucket_cap_mb=0.001, mixed_precision=precision
            )
            assert optimizer is not None
            with join(model, divide_by_initial_world_size=False):
                for step in range(steps[comm.rank]):
                    with no_sync(model):
                        loss_of(model, comm.rank, step).backward()
                    loss_of(model, comm.rank, step + 10).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return values(model)

        results = on_ranks(rank, 3)
        alike(results, found[0] if found else None)
        found.append(results[0])
    assert not all(torch.equal(x, values(make())[name]) for name, x in found[0].items())


def test_a_last_pass_inside_of_no_sync() -> None:
    """The other ranks' passes are reduced all the same, and this rank answers."""
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> Values:
        model = DistributedDataParallel(models[comm.rank], comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(2 * STEPS[comm.rank]):
                with model.no_sync() if step % 2 == 0 or (comm.rank == 1 and step == 1) else nullcontext():
                    loss_of(model, comm.rank, step).backward()
                if step % 2 and comm.rank != 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return values(model.module)

    alike(on_ranks(rank))


def test_the_plain_optimizer_of_data_parallel_training() -> None:
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> tuple[Values, Values]:
        model = DistributedDataParallel(models[comm.rank], comm, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(STEPS[comm.rank]):
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        joined = values(model.module)
        loss_of(model, comm.rank, 20).backward()  # training goes on
        optimizer.step()
        return joined, values(model.module)

    found = on_ranks(rank)
    alike([first for first, _ in found])
    alike([second for _, second in found])
    expected = make()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(max(STEPS)):
        optimizer.zero_grad()
        each = []
        for r in [r for r in range(WORLD) if step < STEPS[r]]:
            model = copy.deepcopy(expected)
            loss_of(model, r, step).backward()
            each.append([p.grad for p in model.parameters()])
        for p, grads in zip(expected.parameters(), zip(*each, strict=True), strict=True):
            p.grad = None if grads[0] is None else sum(grads) / WORLD
        optimizer.step()
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(found[0][0][name], x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(17, 6), nn.BatchNorm1d(6), nn.Linear(6, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x).flatten(0, 1))).view(*x.shape, 17)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_come_from_the_ranks_that_continue(stage: int) -> None:
    models = [make(Normed) for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> Values:
        model = models[comm.rank]
        model, optimizer = shard(model, optimizer_of(model.parameters()), stage, comm)
        assert optimizer is not None
        with join(model):
            for step in range((1, 3, 2)[comm.rank]):
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    found = on_ranks(rank, 3)
    alike(found)
    assert found[0]["norm.num_batches_tracked"] == 3


def test_one_message_per_phase_while_all_ranks_have_input() -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> tuple[int, int]:
        model = models[comm.rank]
        model, optimizer = shard(model, optimizer_of(model.parameters()), 2, comm, bucket_cap_mb=0.0001)
        assert optimizer is not None
        flat = sharded_model_of(model)
        assert flat is not None
        with join(model):
            for step in range(2):
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return flat.ranks.traffic["join calls"], len(flat.order)

    for calls, groups in on_ranks(rank, 3):
        assert calls == 2 * 2 + 1  # two steps of backward and step, and the end
        assert groups > 4


def test_another_module_over_the_same_ranks_is_refused() -> None:
    models = [[make(), make()] for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> None:
        one, other = (ringcomm.fully_shard(model, comm=comm) for model in models[comm.rank])
        with join(one):
            loss_of(one, comm.rank, 0).backward()
            with pytest.raises(UnsupportedError, match=f"rank {comm.rank} is inside join of another module"):
                loss_of(other, comm.rank, 0)
        loss_of(other, comm.rank, 0).backward()

    on_ranks(rank, 3)


def test_disabled_it_does_nothing() -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> int:
        model = DistributedDataParallel(models[comm.rank], comm)
        flat = sharded_model_of(model)
        assert flat is not None
        with model.join(enable=False):
            loss_of(model, comm.rank, 0).backward()
        return flat.ranks.traffic["join calls"]

    assert on_ranks(rank, 3) == [0, 0, 0]


def passes(model: nn.Module, rank: int, count: int) -> None:
    with join(model, throw_on_early_termination=True):
        for step in range(count):
            loss_of(model, rank, step).backward()
            model.zero_grad()


@pytest.mark.parametrize("stage", [0, 3])
def test_early_termination_raises_on_every_rank(stage: int) -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> str:
        model, _ = shard(models[comm.rank], None, stage, comm)
        with pytest.raises(RingcommError, match=r"ranks \[1\] have no more input") as error:
            passes(model, comm.rank, 1 if comm.rank == 1 else 3)
        model.zero_grad()
        loss_of(model, comm.rank, 9).backward()  # without join, on the same communicator
        return str(error.value)

    for r, text in enumerate(on_ranks(rank, 3)):
        assert f"rank {r}" in text


def test_ranks_that_do_different_things_get_an_error() -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = models[comm.rank]
        model, optimizer = shard(model, optimizer_of(model.parameters()), 1, comm)
        assert optimizer is not None
        with join(model):
            loss_of(model, comm.rank, 0).backward()
            act = partial(clip_grad_norm_, model, 1.0) if comm.rank == 2 else optimizer.step
            with pytest.raises(MismatchError, match=r"rank 0 at step .* and rank 2 at clip"):
                act()

    on_ranks(rank, 3)


class SyncBatchNorm(nn.BatchNorm1d):
    """As torch's and ours are called."""


def test_what_cannot_join_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="not wrapped"), join(nn.Linear(2, 2)):
            pass
        model, _ = shard(nn.Linear(2, 2), None, 0, comm)
        with join(model), pytest.raises(InvalidArgumentError, match="inside join"), join(model):
            pass
        normed, _ = shard(nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)), None, 0, comm)
        with pytest.raises(UnsupportedError, match="SyncBatchNorm 1"), join(normed):
            pass

    on_ranks(rank, 3)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    with join(model):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()


def test_an_optimizer_that_a_rank_has_never_stepped_is_an_error() -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = ringcomm.fully_shard(models[comm.rank], comm=comm)
        optimizer = optimizer_of(model.parameters())
        if comm.rank == 1:
            with pytest.raises(InvalidArgumentError, match=r"rank 1 has joined before the first step .* call"):
                run(model, optimizer, comm.rank, 0)
            comm.abort()
        else:
            with pytest.raises(RingcommError):
                run(model, optimizer, comm.rank, 2)

    on_ranks(rank, 3)


def failing(model: DistributedDataParallel, rank: int) -> None:
    with model.join():
        loss_of(model, rank, 0).backward()
        raise KeyError


def test_an_error_inside_leaves_the_block_at_once() -> None:
    models = [make() for _ in range(3)]

    def rank(comm: ringcomm.Communicator) -> Values:
        model = DistributedDataParallel(models[comm.rank], comm)
        with pytest.raises(KeyError):
            failing(model, comm.rank)
        model.zero_grad()
        with model.join():
            loss_of(model, comm.rank, 1).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    alike(on_ranks(rank, 3))
