"""Stages of equal load: the best of all cuts, by parameters or measured time."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.errors import InvalidArgumentError
from ringcomm.pipeline_parallel.balance import BEFORE, BEHIND, balance, measure, parameters

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """Blocks of given numbers of parameters between an embedding and a head."""

    def __init__(self, sizes: list[int], before: int = 0, behind: int = 0) -> None:
        super().__init__()
        self.before = nn.Embedding(before, 1) if before else nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
        self.behind = nn.Linear(behind, 1, bias=False) if behind else nn.Identity()


def heaviest(loads: list[float], cuts: list[int]) -> float:
    edges = [0, *cuts, len(loads)]
    return max(sum(loads[a:b]) for a, b in pairwise(edges))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    sizes = [draw.randint(1, 20) for _ in range(count)]
    before, behind = draw.choice([0, 15, 60]), draw.choice([0, 15, 60])
    model = Model(sizes, before, behind)
    loads = [float(size) for size in sizes]
    loads[0] += before
    loads[-1] += behind
    for stages in range(1, count + 1):
        found = [int(name.removeprefix("blocks.")) for name in balance(model, stages)]
        assert found == sorted(set(found))
        assert len(found) == stages - 1
        best = min(heaviest(loads, [*cuts]) for cuts in combinations(range(1, count), stages - 1))
        assert heaviest(loads, found) == best
        assert len(ringcomm.split(model, stages)) == stages
        assert ringcomm.split(model, stages).first == ("", *balance(model, stages))


def test_what_lies_around_the_blocks_counts() -> None:
    model = Model([4] * 8, before=12, behind=8)
    assert parameters(model) == {**{f"blocks.{i}": 4.0 for i in range(8)}, BEFORE: 12.0, BEHIND: 8.0}
    assert balance(model, 4) == ["blocks.1", "blocks.4", "blocks.7"]
    assert balance(Model([4] * 8), 4) == ["blocks.2", "blocks.4", "blocks.6"]
    assert balance(Model([4] * 10), 4) == ["blocks.3", "blocks.6", "blocks.8"]  # not 3, 3, 3 and 1


def test_loads_may_be_given() -> None:
    seconds = {f"blocks.{i}": float(i) for i in range(6)}
    assert balance(Model([1] * 6), 2, seconds=seconds) == ["blocks.4"]
    assert balance(Model([1] * 6), 2, seconds={**seconds, BEHIND: 20.0}) == ["blocks.5"]


class Slow(nn.Module):
    """Takes a known time, also in its backward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(x * self.weight, self.seconds)


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad.clone(), None


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Slow(0.02)
        self.blocks = nn.ModuleList(Slow(seconds) for seconds in (0.01, 0.03, 0.01))
        self.last = Slow(0.04)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_times_are_measured_forward_and_backward() -> None:
    model = Waits()
    found = measure(model, torch.ones(2, requires_grad=True), repetitions=2)
    expected = {BEFORE: 0.06, "blocks.0": 0.03, "blocks.1": 0.09, "blocks.2": 0.03, BEHIND: 0.12}
    assert found.keys() == expected.keys()
    for name, seconds in expected.items():  # a sleep is never shorter; how much longer is the machine's affair
        assert found[name] >= 0.9 * seconds, (name, found)
    assert found["blocks.1"] > found["blocks.0"]
    assert all(p.grad is None for p in model.parameters())
    assert all(not block._forward_hooks for block in model.blocks)
    assert balance(model, 2, seconds=expected) == ["blocks.2"]
    assert balance(model, 2, seconds=found) in (["blocks.1"], ["blocks.2"])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: balance(Model([1] * 3), 4), "4 stages for 3 blocks"),
        (lambda: ringcomm.split(Model([1] * 3), 4), "4 stages for 3 blocks"),
        (lambda: balance(Model([1] * 3), 0), "0 stages"),
        (lambda: balance(nn.Linear(2, 2), 2), "without repeated blocks"),
        (lambda: balance(Model([1] * 3), 2, within="layers"), "within='layers'"),
        (lambda: balance(Model([1] * 3), 2, seconds={"blocks.0": 1.0}), "without 'blocks.1'"),
        (lambda: measure(nn.Linear(2, 2), torch.ones(2, 2)), "without repeated blocks"),
    ],
)
def test_models_that_cannot_be_balanced(call: object, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
