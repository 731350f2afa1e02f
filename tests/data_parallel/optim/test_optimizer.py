"""A sharded optimizer is an ordinary one: it shows the model's parameters, has state by them, and steps with the bits
of plain torch at every stage.

Every rank gets the same inputs, so that the mean over two ranks is each rank's gradient, to the bit.
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

import ringcomm
from ringcomm.errors import InvalidArgumentError, MismatchError, UnsupportedError
from tests.support.same import same

STAGES = (0, 1, 2, 3)
BF16 = ringcomm.MixedPrecision(param_dtype=torch.bfloat16)
Make = Callable[[Any], torch.optim.Optimizer]
Loop = Callable[[nn.Module, torch.optim.Optimizer], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.outlet = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x)


def net(seed: int = 0) -> Net:
    model, generator = Net(), torch.Generator().manual_seed(seed)  # the ranks are threads: one global generator
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator))
    return model


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    return model(x).float().pow(2).sum()


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def run(function: Callable[[Any], Any], world_size: int = 2) -> list[Any]:
    return ringcomm.run_ranks(function, world_size, ranks="threads", timeout=20)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def as_in_torch(loop: Loop, make: Make = adamw, stages: tuple[int, ...] = STAGES, **how: Any) -> None:
    """What ``loop`` returns, the weights and the optimizer's state dict are those of plain torch, at every stage."""
    model = net()
    optimizer = make(model.parameters())
    expected = (loop(model, optimizer), values(model), optimizer.state_dict())

    def rank(comm: ringcomm.Communicator, stage: int) -> None:
        model = net()
        optimizer = make(model.parameters())
        ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.0003, **how)
        found = (loop(model, optimizer), values(model), optimizer.state_dict())
        assert same(found[0], expected[0]), f"stage {stage}"
        assert same(found[1], expected[1]), f"stage {stage}: weights"
        assert same(found[2], expected[2]), f"stage {stage}: state"

    for stage in stages:
        run(lambda comm, stage=stage: rank(comm, stage))


def sharded(
    function: Callable[[ringcomm.Communicator, Net, torch.optim.Optimizer], Any],
    make: Make = adamw,
    stages: tuple[int, ...] = STAGES,
    **how: Any,
) -> list[list[Any]]:
    """``function`` with a sharded model and optimizer, at each stage."""

    def rank(comm: ringcomm.Communicator, stage: int) -> Any:
        model = net()
        optimizer = make(model.parameters())
        ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.0003, **how)
        return function(comm, model, optimizer)

    return [run(lambda comm, stage=stage: rank(comm, stage)) for stage in stages]


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, torch.optim.Adafactor])
def test_groups_hold_the_models_parameters(make: Make) -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> None:
        mine = [*model.parameters()]
        for number in range(2):
            assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, mine)]
            train(model, optimizer, number)
        assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, mine)]
        assert all(p.grad is not None for p in mine)
        optimizer.zero_grad()
        assert all(p.grad is None for p in mine)

    sharded(check, make)


def test_frozen_and_foreign_parameters_are_left_to_the_optimizer() -> None:
    foreign = nn.Parameter(torch.ones(3, 7))
    outcome = []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        (other,) = optimizer.param_groups[1]["params"]
        for number in range(3):
            optimizer.zero_grad()
            (loss_of(model, number) + other.pow(2).sum()).backward()
            optimizer.step()
        outcome.append(optimizer.state[other]["step"].item())
        return other.detach().clone()

    def make(params: Any) -> torch.optim.Optimizer:
        mine = [*params]
        mine[2].requires_grad_(False)
        return adamw([{"params": mine}, {"params": [nn.Parameter(foreign.detach().clone())]}])

    as_in_torch(loop, make)
    assert outcome == [3.0] * 9


def test_a_group_is_added_later() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return adamw([*params][:4])

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        train(model, optimizer, 0, 1)
        optimizer.add_param_group({"params": [*model.parameters()][4:], "lr": 0.05})
        train(model, optimizer, 2, 3)
        return len(optimizer.state)

    as_in_torch(loop, make)


def test_a_group_that_another_optimizer_had() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 0)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [*model.parameters()][:1]})
        train(model, optimizer, 1)

    as_in_torch(loop)


@pytest.mark.parametrize("where", ["shard", "first step"])
def test_two_optimizers_over_one_model(where: str) -> None:
    def loop(model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> Any:
        for number in range(4):
            first.zero_grad()
            second.zero_grad()
            loss_of(model, number).backward()
            first.step()
            if number % 2:
                second.step()
        return values(model), first.state_dict(), second.state_dict()

    def made() -> tuple[Net, torch.optim.Optimizer, torch.optim.Optimizer]:
        model = net()
        params = [*model.parameters()]
        return model, adamw(params[:5]), momentum(params[5:])

    expected = loop(*made())

    def rank(comm: ringcomm.Communicator, stage: int) -> None:
        model, first, second = made()
        ringcomm.shard(model, first, stage, comm, bucket_cap_mb=0.0003)
        if where == "shard":
            ringcomm.shard(model, second)
        assert same(loop(model, first, second), expected)
        ringcomm.restage(model, second, (stage + 1) % 4)
        assert same((values(model), first.state_dict(), second.state_dict()), expected)

    for stage in STAGES:
        run(lambda comm, stage=stage: rank(comm, stage))


def test_one_optimizer_over_two_models() -> None:
    def loop(one: nn.Module, two: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> Any:
        for number in numbers:
            optimizer.zero_grad()
            (loss_of(one, number) * loss_of(two, number)).sqrt().backward()
            optimizer.step()
        return copy.deepcopy((values(one), values(two), optimizer.state_dict()))

    one, two = net(), net(1)
    optimizer = adamw([*one.parameters(), *two.parameters()])
    before = loop(one, two, optimizer, 0, 1)
    after = loop(one, two, optimizer, 2, 3)

    def rank(comm: ringcomm.Communicator, stages: tuple[int, int]) -> None:
        one, two = net(), net(1)
        optimizer = adamw([*one.parameters(), *two.parameters()])
        ringcomm.shard(one, optimizer, stages[0], comm, bucket_cap_mb=0.0003)
        ringcomm.shard(two, optimizer, stages[1], comm, bucket_cap_mb=0.0003)
        assert same(loop(one, two, optimizer, 0, 1), before)
        ringcomm.restage(one, optimizer, 3 - stages[0])
        assert same(loop(one, two, optimizer, 2, 3), after)

    for stages in [(0, 0), (1, 3), (2, 2), (3, 1)]:
        run(lambda comm, stages=stages: rank(comm, stages))


def test_a_second_model_is_wrapped_when_the_optimizer_has_state() -> None:
    def loop(wrap: Callable[[nn.Module], None]) -> Any:
        one, two = net(), net(1)
        optimizer = adamw([*one.parameters(), *two.parameters()])
        for number in range(4):
            if number % 2 == 0:
                wrap((one, two)[number // 2])
            optimizer.zero_grad()
            (loss_of(one, number) + loss_of(two, number)).backward()
            optimizer.step()
        return values(one), values(two), optimizer.state_dict()

    expected = loop(lambda model: None)

    def rank(comm: ringcomm.Communicator, stage: int) -> None:
        def wrap(model: nn.Module) -> None:
            ringcomm.shard(model, None, stage, comm, bucket_cap_mb=0.0003)

        assert same(loop(wrap), expected)

    for stage in STAGES:
        run(lambda comm, stage=stage: rank(comm, stage))


def test_an_optimizer_without_any_of_the_parameters_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = net()
        with pytest.raises(InvalidArgumentError, match=f"rank {comm.rank} got an optimizer with none of the module's"):
            ringcomm.shard(model, adamw(net().parameters()), 2, comm)
        ringcomm.shard(model, adamw(model.parameters()), 2, comm)
        with pytest.raises(InvalidArgumentError, match="with none of the module's"):
            ringcomm.shard(model, adamw(net().parameters()))

    run(rank)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, torch.optim.Adafactor, torch.optim.Adagrad], ids=lambda make: make.__name__)
def test_state_is_by_the_models_parameters(make: Make) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        params = [*model.parameters()]
        found: list[Any] = [len(optimizer.state), bool(optimizer.state), params[0] in optimizer.state]
        train(model, optimizer, 0, 1)
        found += [len(optimizer.state), bool(optimizer.state), params[0] in optimizer.state, "x" in optimizer.state]
        found += [[*map(id, params)].index(id(p)) for p in optimizer.state]
        found.append([copy.deepcopy(optimizer.state[p]) for p in params])
        found.append([[*state] for state in optimizer.state.values()])
        train(model, optimizer, 2)  # has read only
        return found

    as_in_torch(loop, make)


def test_what_is_written_into_the_state_counts() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        params = [*model.parameters()]
        train(model, optimizer, 0, 1)
        optimizer.state[params[0]]["exp_avg"].zero_()
        optimizer.state[params[1]]["step"] += 5
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(2)
        train(model, optimizer, 2)
        del optimizer.state[params[3]]
        optimizer.state[params[4]] = {k: v + 1 for k, v in optimizer.state[params[4]].items()}
        assert params[3] not in optimizer.state
        train(model, optimizer, 3, 4)

    as_in_torch(loop)


def test_clearing_the_state_begins_anew() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        train(model, optimizer, 0, 1)
        optimizer.state.clear()
        left = len(optimizer.state)
        train(model, optimizer, 2)
        optimizer.state = type(torch.optim.SGD([torch.zeros(1)]).state)(dict)
        train(model, optimizer, 3)
        return left

    as_in_torch(loop, momentum)


def test_a_state_dict_goes_in_between_and_out() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        train(model, optimizer, 0, 1)
        kept = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 2)
        optimizer.load_state_dict(copy.deepcopy(kept))
        held = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 3)
        return kept, held

    as_in_torch(loop)


@pytest.mark.parametrize("how", [{}, {"mixed_precision": BF16}, {"offload": True}], ids=["", "bfloat16", "offload"])
def test_loading_keeps_the_bits_of_the_master_weights_type(how: dict[str, Any]) -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        train(model, optimizer, 0, 1)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 2)
        expected = values(model)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        assert same(optimizer.state_dict(), kept[1])
        assert kept[1]["state"][0]["exp_avg"].dtype == torch.float32
        train(model, optimizer, 2)
        assert same(values(model), expected)
        return expected

    found = sharded(check, **how)
    assert all(same(each, found[0][0]) for stage in found for each in stage)


def test_state_dict_functions_of_torch() -> None:
    """get_optimizer_state_dict before the first step makes state, with steps of zero."""
    model = net()
    optimizer = adamw(model.parameters())
    train(model, optimizer, 0, 1)
    expected = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, 2)

    def check(comm: ringcomm.Communicator, mine: Net, sharded_: torch.optim.Optimizer) -> None:
        empty = get_optimizer_state_dict(mine, sharded_)
        assert empty["state"].keys() == expected["state"].keys()
        before = values(mine)
        set_optimizer_state_dict(mine, sharded_, copy.deepcopy(expected))
        assert same(values(mine), before)
        assert same(get_optimizer_state_dict(mine, sharded_), expected)
        reference = net()
        reference_optimizer = adamw(reference.parameters())
        train(reference, reference_optimizer, 0, 1)
        mine.load_state_dict(reference.state_dict())
        train(mine, sharded_, 2)
        assert same(values(mine), values(model))
        weights, state = get_state_dict(mine, sharded_)
        assert same(dict(weights), dict(model.state_dict()))
        assert same(state, get_optimizer_state_dict(model, optimizer))

    sharded(check)


class Blocks(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale for each 4 elements: neither of the parameter's shape nor one number."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                padded = nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 4)).view(-1, 4)
                if state:
                    padded = padded + 0.9 * state["exp_avg"].float() * state["scale"]
                scale = padded.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
                state["scale"], state["exp_avg"] = scale, (padded / scale).round().to(torch.int8)
                p.sub_(padded.reshape(-1)[: p.numel()].view(p.shape), alpha=group["lr"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_replaced_optimizer_is_freed(stage: int) -> None:
    """Without waiting for the collector; where it waits, on one rank alone, the others go on all the same."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = net()
        kept = []
        alive = weakref.WeakSet()
        for phase in range(4):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            alive.add(optimizer)
            ringcomm.shard(model, optimizer, stage, comm)
            train(model, optimizer, phase, 1)
            kept += [optimizer] if comm.rank == 1 and phase == 2 else []
        assert len(alive) == 1 + comm.rank
        del kept[:]
        train(model, optimizer, 4, 1)
        kept.append(torch.optim.SGD(model.parameters(), lr=0.1))
        ringcomm.shard(model, kept[0], stage, comm)
        if comm.rank:
            kept.clear()
        ringcomm.restage(model, optimizer, (stage + 1) % 4)
        train(model, optimizer, 5, 1)
        model.inlet.requires_grad_(False)
        ringcomm.unshard(model, optimizer)

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


def test_quantised_state_comes_back() -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        train(model, optimizer, 0, 1)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert kept[1]["state"][0]["exp_avg"].dtype == torch.int8
        assert kept[1]["state"][0]["exp_avg"].shape == (8, 4)
        train(model, optimizer, 2)
        expected = values(model)
        again = net()
        other = Blocks(again.parameters())
        ringcomm.shard(again, other, ringcomm.stage_of(model), comm, bucket_cap_mb=0.0003)
        again.load_state_dict(kept[0])
        other.load_state_dict(kept[1])
        train(again, other, 2)
        assert same(values(again), expected)
        ringcomm.restage(again, other, (ringcomm.stage_of(model) + 1) % 4)
        assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
        return expected

    found = sharded(check, Blocks, atom="tensor")
    assert all(same(each, found[0][0]) for stage in found for each in stage)


# ---- what is written into the parameters -----------------------------------------------------------------------------


class Rebinding(torch.optim.Optimizer):
    """As many write it by hand."""

    def __init__(self, params: Any, lr: float = 0.002) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_that_rebinds_data() -> None:
    as_in_torch(lambda model, optimizer: train(model, optimizer, 0, 1, 2), Rebinding, atom="tensor")


class Ascent:
    """The two steps of sharpness-aware minimisation, around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.before: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def up(self) -> None:
        for p in self.optimizer.param_groups[0]["params"]:
            self.before[p] = p.data.clone()
            p.add_(p.grad, alpha=0.05)
        self.optimizer.zero_grad()

    def down(self) -> None:
        for p in self.optimizer.param_groups[0]["params"]:
            p.data = self.before[p]
        self.optimizer.step()


@pytest.mark.parametrize("make", [adamw, Rebinding])
def test_sharpness_aware_minimisation_at_stage_0(make: Make) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ascent = Ascent(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            ascent.up()
            loss_of(model, number).backward()
            ascent.down()

    as_in_torch(loop, make, stages=(0,))


@torch.no_grad()
def look_ahead(model: nn.Module, slow: list[torch.Tensor]) -> None:
    for p, kept in zip(model.parameters(), slow, strict=True):
        kept.lerp_(p, 0.5)
        p.data.copy_(kept)


def test_lookahead_and_an_average_swapped_in_count() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        slow = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 0, 1)
        look_ahead(model, slow)
        train(model, optimizer, 2)
        mine = [p.detach().clone() for p in model.parameters()]
        for p, kept in zip(model.parameters(), slow, strict=True):
            p.data.copy_(kept)
        seen = values(model), loss_of(model, 9).detach()
        for p, kept in zip(model.parameters(), mine, strict=True):
            p.data.copy_(kept)
        train(model, optimizer, 3)
        return seen

    as_in_torch(loop, stages=(0, 1, 2))


@pytest.mark.parametrize("how", [{"mixed_precision": BF16}, {"offload": True}], ids=["bfloat16", "offload"])
def test_what_is_written_reaches_the_master_weights(how: dict[str, Any]) -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> Any:
        train(model, optimizer, 0, 1)
        exact = values(model)
        with torch.no_grad():
            model.inlet.weight.data.fill_(0.25)  # the counter of p does not see it
            model.outlet.bias.data = torch.full_like(model.outlet.bias, 0.5)
            model.blocks[1][0].weight[2, 3] = 4.0
        written = dict(zip(model.state_dict(), values(model), strict=True))
        assert torch.equal(written["inlet.weight"], torch.full((6, 5), 0.25))
        assert torch.equal(written["outlet.bias"], torch.full((2,), 0.5))
        assert written["blocks.1.0.weight"][2, 3] == 4.0
        changed = [not torch.equal(a, b) for a, b in zip(written.values(), exact, strict=True)]
        assert [name for name, differs in zip(written, changed, strict=True) if differs] == [
            "inlet.weight",
            "blocks.1.0.weight",
            "outlet.bias",
        ]
        kept = written["blocks.1.0.weight"].clone()
        kept[2, 3] = exact[4][2, 3]
        assert torch.equal(kept, exact[4])  # the others have kept the bits that bfloat16 does not have
        train(model, optimizer, 2)
        return values(model)

    found = sharded(check, stages=(0, 1, 2), **how)
    assert all(same(each, found[0][0]) for stage in found for each in stage)


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_at_stage_0(search: str | None) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(2):
            optimizer.step(closure_of(model, optimizer, number))

    as_in_torch(loop, lambda params: torch.optim.LBFGS(params, lr=0.1, line_search_fn=search), stages=(0,))


def named(name: str, **options: Any) -> Make:
    """An optimizer of a class of that name."""
    kind = type(name, (Rebinding,), {})

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = kind(params)
        optimizer.param_groups[0].update(options)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "LBFGS, whose line search"),
        (named("Prodigy"), "Prodigy, which adds up over all parameters"),
        (named("DAdaptAdam"), "DAdaptAdam, which adds up over all parameters"),
        (named("Lamb", max_grad_norm=1.0), "Lamb, which clips by the norm of all gradients"),
        (named("Adan", max_grad_norm=1.0), "Adan, which clips"),
    ],
    ids=["LBFGS", "Prodigy", "DAdaptAdam", "Lamb", "Adan"],
)
def test_optimizers_that_need_everything_are_refused_from_stage_1_on(make: Make, says: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = net()
        optimizer = make(model.parameters())
        for stage in (1, 2, 3):
            with pytest.raises(UnsupportedError, match=rf"shard: rank {comm.rank} got {says}.* stage=0"):
                ringcomm.shard(model, optimizer, stage, comm, atom="tensor")
        ringcomm.shard(model, optimizer, 0, comm, atom="tensor")
        before = values(model)
        with pytest.raises(UnsupportedError, match=rf"restage: rank {comm.rank} got {says}"):
            ringcomm.restage(model, optimizer, 2)
        assert ringcomm.stage_of(model) == 0
        assert same(values(model), before)

    run(rank)


def test_an_unknown_optimizer_class_gives_one_warning() -> None:
    kind = named("Homemade")

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            model = net()
            optimizer = kind(model.parameters())
            ringcomm.shard(model, optimizer, stage, comm, atom="tensor")
            train(model, optimizer, 0)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(rank, 1)
    said = [str(each.message) for each in seen if "Homemade" in str(each.message)]
    assert len(said) == 1
    assert "use stage 0" in said[0]


def test_hooks_and_closures_see_the_models_parameters() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        mine, seen = [*map(id, model.parameters())], []

        def look(*_: Any) -> None:
            seen.append([*map(id, optimizer.param_groups[0]["params"])] == mine)

        handles = [optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(look)]

        def closure() -> torch.Tensor:
            look()
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        optimizer.step(closure=closure)
        for handle in handles:
            handle.remove()
        train(model, optimizer, 1)
        assert seen == [True] * 6
        return loss

    as_in_torch(loop)


class Nested(torch.optim.AdamW):
    """torch has put its calls of hooks into step() of this class and of AdamW."""

    does = ""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        if self.does == "scales":
            for p in params:
                p.grad = None if p.grad is None else p.grad * 0.5
        elif self.does == "leaves out":
            for group in self.param_groups[1:]:
                for p in group["params"]:
                    p.grad = None
        if self.does == "by group":
            groups = self.param_groups
            for group in groups:
                self.param_groups = [group]
                loss = super().step()
            self.param_groups = groups
        else:
            loss = super().step(closure)
        if self.does == "averages":
            with torch.no_grad():
                for p, old in zip(params, before, strict=True):
                    p.lerp_(old, 0.25)
        return loss


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("does", ["", "scales", "leaves out", "by group", "averages", "twice", "closure"])
def test_a_step_that_calls_the_step_of_its_base_class(does: str, stage: int) -> None:
    torch.optim.AdamW([torch.zeros(1)])  # so that AdamW calls hooks, too

    def fn(comm: Any) -> tuple[list[torch.Tensor], int]:
        model, calls = net(), 0
        params = [*model.parameters()]
        optimizer = Nested([{"params": params[:3]}, {"params": params[3:], "lr": 0.05}], lr=0.01)
        optimizer.does = does
        if comm is not None:
            model, optimizer = ringcomm.shard(model, optimizer, stage=stage, comm=comm, atom="tensor")

        def counted(*_: Any) -> None:
            nonlocal calls
            calls += 1

        optimizer.register_step_post_hook(counted)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            if does == "closure":
                optimizer.step(closure_of(model, optimizer, number))
            else:
                optimizer.step()
                if does == "twice":
                    optimizer.step()
        return values(model), calls

    expected, number = fn(None)
    for found, calls in ringcomm.run_ranks(fn, 2):
        assert calls == number
        assert same(found, expected)


def test_popping_state_that_a_step_did_not_leave() -> None:
    def fn(comm: Any) -> None:
        model = net()
        model, optimizer = ringcomm.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, comm=comm)
        train(model, optimizer, 0)
        first = next(iter(optimizer.param_groups[0]["params"]))
        assert optimizer.state.pop(first, None) is None
        with pytest.raises(KeyError):
            optimizer.state.pop(first)

    ringcomm.run_ranks(fn, 2)


def test_a_step_that_raises_leaves_an_ordinary_optimizer() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        found = []
        for touch in (optimizer.zero_grad, optimizer.state_dict, lambda: None):
            train(model, optimizer, 0)
            loss_of(model, 1).backward()
            optimizer.param_groups[0]["momentum"] = "much"
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["momentum"] = 0.9
            touch()
            train(model, optimizer, 2)
            found.append([*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())])
        return found

    as_in_torch(loop, momentum)


@pytest.mark.parametrize("stage", STAGES)
def test_different_options_of_the_ranks_are_named_before_the_step(stage: int) -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 0)
        before = values(model)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        loss_of(model, 1).backward()
        mine, theirs = (0.1, 0.2) if comm.rank == 0 else (0.2, 0.1)
        says = (
            f"rank {comm.rank} got lr={mine} in the optimizer's group 0 where rank {1 - comm.rank} has lr={theirs} in"
        )
        with pytest.raises(MismatchError, match=says):
            optimizer.step()
        assert same(values(model), before)
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, 2)
        assert not same(values(model), before)

    sharded(check, stages=(stage,))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_one_rank_leaves_out_is_named_before_the_next(stage: int) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, stage, comm)
        train(model, optimizer, 0, 2)
        for step in range(2):
            model(torch.ones(2, 5)).sum().backward()
            if (comm.rank, step) == (1, 1):
                with pytest.raises(MismatchError, match=r"step: rank 1 got 2 steps where rank 0 has 3 steps"):
                    optimizer.step()
            elif step:
                with pytest.raises(MismatchError, match="step optimizers on every rank or on none"):
                    optimizer.step()
            elif comm.rank == 0:
                optimizer.step()
            optimizer.zero_grad()

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("does", ["steps twice", "steps another"])
def test_other_steps_of_one_rank_are_named(does: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = net()
        both = [torch.optim.SGD(some.parameters(), lr=0.1) for some in (model.inlet, model.outlet)]
        for optimizer in both:
            ringcomm.shard(model, optimizer, 0, comm)
        for step in range(2):
            model(torch.ones(2, 5)).sum().backward()
            for k, optimizer in enumerate(both):
                if step:
                    with pytest.raises(MismatchError, match=rf"step: rank {comm.rank} got . steps where rank"):
                        optimizer.step()
                    return
                if does == "steps twice" or k == 0:
                    times = 1 + (does == "steps twice" and (comm.rank, k) == (1, 1))
                    for _ in range(times):
                        (both[comm.rank] if does == "steps another" else optimizer).step()

    ringcomm.run_ranks(rank, 2, ranks="threads", timeout=20)


@pytest.mark.parametrize("wraps", ["DistributedDataParallel", "shard"])
def test_different_options_of_optimizers_that_were_not_passed(wraps: str) -> None:
    """A warning, once: ranks may mean it. Not at the first step, before which nobody knows of the optimizer."""

    def rank(comm: ringcomm.Communicator) -> Any:
        model = net()
        called = model if wraps == "shard" else ringcomm.DistributedDataParallel(model, comm)
        if wraps == "shard":
            ringcomm.shard(model, stage=0, comm=comm)
        optimizer = momentum(model.parameters())
        yield train(called, optimizer, 0, 1)
        optimizer.load_state_dict(optimizer.state_dict())  # makes new groups
        yield train(called, optimizer, 2)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        yield train(called, optimizer, 3, 4, 5)
        yield train(called, optimizer, 6)

    def counted(comm: ringcomm.Communicator) -> None:
        for _ in rank(comm):
            with lock:
                told.setdefault(comm.rank, []).append(sum("other options" in str(each.message) for each in seen))
            comm.barrier()

    told: dict[int, list[int]] = {}
    lock = threading.Lock()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(counted)
    assert sum("other options" in str(each.message) for each in seen) == 2, "once on each rank"
    assert all(counts[:2] == [0, 0] for counts in told.values())


def test_each_rank_may_step_a_part() -> None:
    """ZeRO by hand over our wrapper: other groups on each rank, and the values sent around."""

    def rank(comm: ringcomm.Communicator) -> list[torch.Tensor]:
        model = net()
        called = ringcomm.DistributedDataParallel(model, comm)
        params = list(model.parameters())
        mine = params[comm.rank :: comm.world_size]
        optimizer = torch.optim.SGD([{"params": mine[:1], "lr": 0.1 * (1 + comm.rank)}, {"params": mine[1:]}], lr=0.1)
        for number in range(3):
            loss_of(called, number).backward()
            optimizer.step()
            model.zero_grad()
            for i, p in enumerate(params):
                comm.broadcast(p.detach(), i % comm.world_size)
        return values(model)

    with pytest.warns(UserWarning, match="other options"):
        first, second = run(rank)
    assert same(first, second)


def test_equal_options_in_tensors_and_equal_changes_are_no_difference() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for number in range(4):
            train(model, optimizer, number)
            schedule.step()

    as_in_torch(loop, lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False))


def test_gradients_that_users_have_set_count_as_reduced() -> None:
    """Every rank sets the same."""

    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> None:
        before = values(model)
        for p in model.parameters():
            p.grad = torch.zeros(p.shape)
        optimizer.step()
        assert same(values(model), before)
        optimizer.zero_grad()
        model.outlet.bias.grad = torch.tensor([0.0, 1.0])
        optimizer.step()
        assert [same(a, b) for a, b in zip(values(model), before, strict=True)].count(False) == 1

    sharded(check, lambda params: torch.optim.Adam(params, lr=0.1))


class ScheduleFree(torch.optim.Optimizer):
    """Two points, and what lies between them is computed with: train() and eval() move the parameters outside of
    step()."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "training": True})

    @torch.no_grad()
    def move(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / group["k"])
                    p.sub_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1) * -1)
                    z.sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_that_moves_the_parameters_for_evaluation() -> None:
    def loop(model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for number in range(3):
            train(model, optimizer, number)
            optimizer.move(False)
            seen += [loss_of(model, 9).detach(), values(model)]
            optimizer.move(True)
        return seen

    as_in_torch(loop, ScheduleFree, atom="tensor")


def test_detached_it_is_a_plain_optimizer() -> None:
    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 0, 1)
        expected = copy.deepcopy(optimizer.state_dict())
        optimizer._ringcomm.detach()
        assert same(optimizer.state_dict(), expected)
        assert not [name for name in vars(optimizer) if name.startswith("_ringcomm")]
        assert type(optimizer.state) is type(torch.optim.SGD([torch.zeros(1)]).state)
        ringcomm.shard(model, optimizer)
        assert same(optimizer.state_dict(), expected)
        train(model, optimizer, 2)

    sharded(check)


def test_clipping_an_optimizer_with_frozen_parameters() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        mine = [*params]
        mine[1].requires_grad_(False)
        return adamw(mine)

    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        loss_of(model, 0).backward()
        norm = ringcomm.clip_grad_norm_(optimizer, 0.1)
        again = ringcomm.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return [norm, again, *values(model)]

    found = sharded(check, make)
    assert all(same(each, found[0][0]) for stage in found for each in stage)
    assert found[0][0][0] > 0.1
    torch.testing.assert_close(found[0][0][1], torch.tensor(0.1), rtol=1e-4, atol=0)


def test_a_loss_scaler_over_two_models() -> None:
    def loop(wrap: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Any:
        one, two = net(), net(1)
        optimizer = adamw([*one.parameters(), *two.parameters()])
        wrap(one, optimizer)
        wrap(two, optimizer)
        scaler = ringcomm.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for number in range(4):
            optimizer.zero_grad()
            loss = loss_of(one, number) + loss_of(two, number) * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0 * 2 * 2 / 2 * 2
        return values(one), values(two), optimizer.state_dict()

    expected = loop(lambda model, optimizer: None)

    def rank(comm: ringcomm.Communicator, stage: int) -> None:
        def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.0003)

        assert same(loop(wrap), expected)

    for stage in STAGES:
        run(lambda comm, stage=stage: rank(comm, stage))


def test_state_goes_out_and_in_by_parameter() -> None:
    """As where the buckets are made anew."""

    def check(comm: ringcomm.Communicator, model: Net, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, 0, 1)
        before = copy.deepcopy(optimizer.state_dict())
        optimizer._ringcomm.rebuild()
        assert same(optimizer.state_dict(), before)
        states = optimizer._ringcomm.take_state()
        assert {*map(id, states)} == {*map(id, model.parameters())}
        optimizer._ringcomm.rebuild(states)
        assert same(optimizer.state_dict(), before)
        train(model, optimizer, 2)

    sharded(check)


@pytest.mark.parametrize("known", [False, True])
def test_state_that_torch_rounds_while_loading_gives_a_warning(known: bool) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        precision = ringcomm.MixedPrecision(torch.bfloat16)
        model, again = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        ringcomm.shard(model, optimizer, 2, comm, mixed_precision=precision)
        model(torch.ones(2, 4)).float().sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        new = torch.optim.AdamW(again.parameters()) if known else None
        ringcomm.shard(again, new, 2, comm, mixed_precision=precision)
        new = new or torch.optim.AdamW(again.parameters())
        new.load_state_dict(state)
        again(torch.ones(2, 4)).float().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new.step()

    if known:
        ringcomm.run_ranks(rank, 1)
    else:
        with pytest.raises(UserWarning, match=r"optimizer: rank 0 got exp_avg of weight in torch\.bfloat16"):
            ringcomm.run_ranks(rank, 1)
