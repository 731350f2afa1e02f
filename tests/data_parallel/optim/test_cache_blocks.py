"""A step in cache blocks gives the values, the bits and the state of a step without."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.optim import cache_blocks
from ringcomm.data_parallel.optim.optimizer import is_elementwise
from tests.support.same import differences

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.1, "maximize": True}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "Adamax": [{}],
    "Adagrad": [{}, {"lr_decay": 0.1}],
    "Adadelta": [{}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "ASGD": [{"t0": 2.0, "lambd": 0.1}],
}
CASES = [(name, options) for name, each in OPTIMIZERS.items() for options in each]


def make(name: str, options: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.01, **options)
    return optimizer


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(3)  # the ranks are threads: one global generator
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator))
    return model


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    values = [(i, key, value) for i, each in sorted(state.items()) for key, value in sorted(each.items())]
    return [*(p.detach().clone() for p in model.parameters()), *values]


def trained(name: str, options: dict[str, Any], comm: ringcomm.Communicator | None, seed: int) -> list[Any]:
    """Four steps, with what may happen between them; every rank has the same inputs."""
    draw = random.Random(seed)
    model = net()
    optimizer = make(name, options, model.parameters())
    if comm is not None:
        model, optimizer = ringcomm.shard(model, optimizer, stage=draw.choice([1, 2]), comm=comm)
    else:
        draw.choice([1, 2])
    found = []
    for step in range(4):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).sum().backward()
        event = draw.choice(["", "", "several", "load", "frozen", "state"])
        if event == "several":
            optimizer.param_groups[0]["foreach"] = draw.choice([True, False, None])
        elif event == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        elif event == "frozen":
            next(model.parameters()).grad = None
        elif event == "state":
            for state in optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value) and value.dim():
                        value.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += seen(model, optimizer)
    return found


@pytest.mark.parametrize("block", [16, 64, 320])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda each: str(each).replace(" ", ""))
def test_the_bits_and_the_state_are_those_of_a_plain_optimizer(
    name: str, options: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_blocks, "BLOCK", block)
    seed = CASES.index((name, options)) * 3 + [16, 64, 320].index(block)
    expected = trained(name, options, None, seed)
    for found in ringcomm.run_ranks(lambda comm: trained(name, options, comm, seed), 2):
        assert differences(found, expected) == []


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(cache_blocks, "BLOCK", 64)


def long_parameter(
    comm: ringcomm.Communicator, name: str = "AdamW", options: dict[str, Any] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(30, 20, bias=False)
    return ringcomm.shard(model, make(name, options or {}, model.parameters()), stage=1, comm=comm)


@pytest.mark.parametrize(
    ("name", "options", "number"),
    [
        ("AdamW", {}, 5),
        ("AdamW", {"foreach": True}, 1),
        ("AdamW", {"fused": True}, 1),
        ("RMSprop", {}, 5),
        ("SGD", {"momentum": 0.9}, 5),
        ("SGD", {}, 1),
    ],
)
def test_only_a_step_of_several_passes_is_in_blocks(name: str, options: dict[str, Any], number: int) -> None:
    def fn(comm: ringcomm.Communicator) -> None:
        model, optimizer = long_parameter(comm, name, options)
        model(torch.ones(1, 30)).sum().backward()
        sharded: Any = optimizer._ringcomm  # type: ignore[attr-defined]
        with sharded.in_step():
            assert len(optimizer.param_groups[0]["params"]) == number
        assert len(optimizer.param_groups[0]["params"]) == 1

    ringcomm.run_ranks(fn, 2)


def test_a_first_step_that_ends_half_way_leaves_no_state() -> None:
    def fn(comm: ringcomm.Communicator) -> None:
        model, optimizer = long_parameter(comm)
        sharded: Any = optimizer._ringcomm  # type: ignore[attr-defined]
        before = model.weight.detach().clone()
        model(torch.ones(1, 30)).sum().backward()
        with sharded.in_step():
            for block in optimizer.param_groups[0]["params"][:3]:
                optimizer.state[block] = {"exp_avg": torch.ones_like(block)}
                with torch.no_grad():
                    block -= 1
        sharded.after_step()
        assert int((model.weight != before).sum()) == 2 * 3 * 64  # three blocks of each rank
        optimizer.step()
        (state,) = optimizer.state.values()
        assert state["step"] == 1
        assert state["exp_avg"].shape == (20, 30)

    ringcomm.run_ranks(fn, 2)


def test_missing_state_of_a_block_is_as_before_the_step() -> None:
    """Some state may come with a later step, and in some blocks only."""

    def fn(comm: ringcomm.Communicator) -> None:
        model, optimizer = long_parameter(comm)
        sharded: Any = optimizer._ringcomm  # type: ignore[attr-defined]
        for _ in range(2):
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
        moments = copy.deepcopy(optimizer.state[model.weight])
        with sharded.in_step():
            for i, block in enumerate(optimizer.param_groups[0]["params"]):
                if i == 1:
                    optimizer.state[block].clear()
                elif i == 2:
                    optimizer.state[block]["peak"] = torch.ones_like(block)
                    optimizer.state[block]["exp_avg"] = torch.zeros_like(block)
        sharded.after_step()
        assert [p is model.weight for p in optimizer.param_groups[0]["params"]] == [True]
        state = optimizer.state[model.weight]
        assert state["step"] == 2
        assert torch.equal(state["exp_avg_sq"], moments["exp_avg_sq"])
        assert int((state["exp_avg"] != moments["exp_avg"]).sum()) == 2 * 64
        assert float(state["peak"].sum()) == 2 * 64
        with sharded.in_step():
            optimizer.state.clear()
        sharded.after_step()
        assert "exp_avg" not in optimizer.state[model.weight]

    ringcomm.run_ranks(fn, 2)


def test_blocks_and_their_state_stay_the_same_objects_and_keep_nothing_alive() -> None:
    def fn(comm: ringcomm.Communicator) -> None:
        model, optimizer = long_parameter(comm)
        sharded: Any = optimizer._ringcomm  # type: ignore[attr-defined]
        seen = []
        for _ in range(4):
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
            with sharded.in_step():
                pairs = [(p, optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]
                seen.append([id(p) for p, _ in pairs] + [id(value) for _, state in pairs for value in state.values()])
            del pairs
        assert seen[0] == seen[1] == seen[2] == seen[3]
        (entry,) = sharded.entries
        views = [weakref.ref(value) for state in entry.blocks._split for value in state.values()]
        assert len(views) == 3 * len(entry.blocks.params)
        sharded.state.clear()
        assert not [each for each in views if each() is not None]

    ringcomm.run_ranks(fn, 1)


def test_a_subclass_without_a_step_of_its_own_is_stepped_alike() -> None:
    """torch puts step() into the first class of which it makes an optimizer."""

    class Base(torch.optim.Adamax):
        pass

    class Later(Base):
        pass

    class Other(torch.optim.Adamax):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    p = nn.Parameter(torch.ones(3))
    assert [is_elementwise(cls([p])) for cls in (Later, Base, torch.optim.Adamax, Later, Other)] == [True] * 4 + [False]


def test_data_that_is_assigned_in_a_step_counts() -> None:
    def fn(comm: ringcomm.Communicator) -> None:
        model, optimizer = long_parameter(comm)
        sharded: Any = optimizer._ringcomm  # type: ignore[attr-defined]
        model(torch.ones(1, 30)).sum().backward()
        with sharded.in_step():
            for block in optimizer.param_groups[0]["params"]:
                block.data = torch.full_like(block, 2.0)
        sharded.after_step()
        assert bool((model.weight == 2).all())

    ringcomm.run_ranks(fn, 2)
