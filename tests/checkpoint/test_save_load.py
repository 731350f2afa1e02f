"""Checkpoints: saved by any number of ranks at any stage, loaded by any other, and the same bits afterwards."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ringcomm
from ringcomm import checkpoint
from ringcomm._C import crc32c
from ringcomm.checkpoint import files as checkpoint_files
from ringcomm.checkpoint.files import boxes
from ringcomm.checkpoint.metadata import read_metadata
from ringcomm.data_parallel.fully_shard import fully_shard
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.data_parallel.shard import restage, shard
from ringcomm.errors import DtypeError, EngineError, InvalidArgumentError, RingcommError, ShapeError
from ringcomm.modules.precision import MixedPrecision
from tests.support import forked, torch_ranks
from tests.support.choice import slow

torch.set_num_threads(1)


class Net(nn.Module):
    """Tied, frozen and unused parameters, one without dimensions, an empty one, two of three dimensions, one of them in
    another order in memory, buffers."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.cube = nn.Parameter(torch.randn(3, 5, width) / 9)
        self.turned = nn.Parameter((torch.randn(width, 3, 5) / 9).permute(2, 0, 1))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x)) * self.scale
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(self.frozen(h)) + (h @ self.cube.sum((0, 1))).mean() + (h @ self.turned.sum((0, 2))).mean()


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=1e-2)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad and p.numel()]
    wide = [p for p in params if p.ndim > 1]
    return [{"params": wide, "weight_decay": 0.1}, {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0}]


def plain(seed: int = 0, make: Make = adamw, model: Callable[[], nn.Module] = Net) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = model()
    net.get_parameter("empty").requires_grad_(False)
    return net, make(groups_of(net))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> torch.Tensor:
    x = torch.randint(13, (6,), generator=torch.Generator().manual_seed(100 * number + rank))
    loss = nn.functional.cross_entropy(model(x).float(), x.roll(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def result(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything, by name."""
    found: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    found |= {f"{i}.{key}": value for i, each in state["state"].items() for key, value in each.items()}
    found |= {f"group {i}.{key}": value for i, each in enumerate(state["param_groups"]) for key, value in each.items()}
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if torch.is_tensor(x) and torch.is_tensor(y) else bool(x == y)

    return [key for key in a.keys() | b.keys() if key not in a or key not in b or not same(a[key], b[key])]


def run(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    return ringcomm.run_ranks(function, world_size, ranks="threads", timeout=30)


def ranks(
    world_size: int,
    stage: int,
    function: Callable[[nn.Module, Any, Any], Any],
    seed: int = 0,
    make: Make = adamw,
    model: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> list[Any]:
    """``function(model, optimizer, comm)`` on every rank, of a sharded module."""
    made = [plain(seed, make, model) for _ in range(world_size)]  # torch.manual_seed is for all threads
    settings = {"bucket_cap_mb": 25.0, **settings}
    return run(world_size, lambda comm: function(*shard(*made[comm.rank], stage, comm, **settings), comm))


def train(first: int, last: int) -> Callable[[nn.Module, Any, Any], Any]:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        losses = [step(model, optimizer, comm.rank, number) for number in range(first, last)]
        return {"losses": torch.stack(losses), **result(model, optimizer)}

    return body


def saved(path: Path, world_size: int = 3, stage: int = 2, steps: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """Trains, saves, and returns what every rank has saved."""

    def body(model: nn.Module, optimizer: Any, comm: Any) -> dict[str, Any]:
        for number in range(steps):
            step(model, optimizer, comm.rank, number)
        checkpoint.save(path, model, optimizer)
        return result(model, optimizer)

    return ranks(world_size, stage, body, **settings)


def loaded(path: Path, world_size: int = 3, stage: int = 2, **settings: Any) -> list[dict[str, Any]]:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> dict[str, Any]:
        checkpoint.load(path, model, optimizer)
        return result(model, optimizer)

    return ranks(world_size, stage, body, **{"seed": 1, **settings})


# ---- boxes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (3, 1, 2, 2), (1, 5)])
def test_boxes_cover_a_range_once_and_are_few(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    number = torch.arange(numel).view(shape)
    for start in range(numel):
        for end in range(start + 1, numel + 1):
            found = boxes(shape, start, end)
            parts = [number[tuple(slice(o, o + s) for o, s in zip(*each, strict=True))] for each in found]
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), torch.arange(start, end))
            assert len(found) <= max(1, 2 * len(shape) - 1)


# ---- going on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [((1, 0), (4, 3)), ((3, 3), (3, 0)), ((4, 1), (2, 2)), ((2, 0), (3, 1))])
def test_any_world_size_and_stage_gets_what_another_saved(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    theirs = saved(tmp_path / "c", *before, bucket_cap_mb=0.0001)
    for rank, here in enumerate(loaded(tmp_path / "c", *after)):  # batch norm's statistics are the ranks' own
        assert differing(theirs[rank if before[0] == after[0] else 0], here) == []


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        slow((3, 3), {}),  # the others have every stage and kind of settings
        ((0, 3), {}),
        slow((2, 1), {}),
        slow((3, 0), {"mixed_precision": MixedPrecision(torch.bfloat16)}),
        ((1, 2), {"mixed_precision": MixedPrecision(torch.bfloat16), "offload": True}),
        ((2, 3), {"make": adafactor}),
        slow((3, 1), {"make": lambda groups: torch.optim.NAdam(groups, lr=1e-2)}),
    ],
    ids=["3-3", "0-3", "2-1", "3-0 bf16", "1-2 bf16 offload", "2-3 Adafactor", "3-1 NAdam"],
)
def test_resumed_training_has_the_bits_of_uninterrupted(
    tmp_path: Path, stages: tuple[int, int], settings: dict[str, Any]
) -> None:
    saved(tmp_path / "c", 3, stages[0], bucket_cap_mb=0.0001, **settings)

    def go_on(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.load(tmp_path / "c", model, optimizer)
        return train(2, 4)(model, optimizer, comm)

    resumed = ranks(3, stages[1], go_on, seed=1, **settings)
    for straight, here in zip(ranks(3, stages[0], train(0, 4), bucket_cap_mb=0.0001, **settings), resumed, strict=True):
        assert torch.equal(straight.pop("losses")[2:], here.pop("losses"))
        assert differing(straight, here) == []


class Late(Net):
    """Uses its unused layer from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) + (self.unused(self.embed(x)[:, :3]).mean() if self.passes > 2 else 0)


@pytest.mark.parametrize("buckets", [(0.0001, 25.0), (25.0, 0.0001)])
def test_a_parameter_that_was_used_late_keeps_its_count_of_steps(tmp_path: Path, buckets: tuple[float, float]) -> None:
    saved(tmp_path / "c", 3, 1, 3, model=Late, bucket_cap_mb=buckets[0])

    def go_on(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.load(tmp_path / "c", model, optimizer)
        return train(3, 5)(model, optimizer, comm)

    resumed = ranks(3, 3, go_on, seed=1, model=Late, bucket_cap_mb=buckets[1])
    for straight, here in zip(ranks(3, 1, train(0, 5), model=Late), resumed, strict=True):
        assert torch.equal(straight.pop("losses")[3:], here.pop("losses"))
        assert differing(straight, here) == []
        steps = {value.item() for key, value in here.items() if key.endswith(".step")}
        assert steps == {5, 3}


class Sometimes(Net):
    """Has layers that are used in every second, third, ... pass alone, between others that travel with them."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        used = [layer for every, layer in enumerate(self.side, 2) if self.passes % every == 0]
        return super().forward(x) + sum(torch.tanh(layer(self.embed(x))).mean() for layer in used)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def nadam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=1e-2)


def steps_of(found: dict[str, Any]) -> list[int]:
    """The counters of the weights in `side`."""
    names = [n for n, p in Sometimes().named_parameters() if p.requires_grad and p.numel() and p.ndim > 1]
    return [int(found.get(f"{names.index(f'side.{k}.weight')}.step", 0)) for k in range(5)]


@pytest.mark.parametrize(
    ("stages", "buckets", "settings"),
    [
        slow((0, 3), (25.0, 25.0), {}),
        slow((3, 1), (0.0001, 25.0), {"mixed_precision": MixedPrecision(torch.bfloat16)}),
        slow((1, 2), (25.0, 25.0), {"make": nadam}),
        slow((2, 0), (25.0, 25.0), {"make": momentum}),
        ((2, 3), (25.0, 0.0001), {"make": adafactor}),
    ],
    ids=["0-3", "3-1 bf16", "1-2 NAdam", "2-0 momentum", "2-3 Adafactor"],
)
def test_parameters_used_in_some_steps_keep_counters_of_their_own(
    tmp_path: Path, stages: tuple[int, int], buckets: tuple[float, float], settings: dict[str, Any]
) -> None:
    counted = settings.get("make") is not momentum
    there = saved(tmp_path / "c", 3, stages[0], 4, model=Sometimes, bucket_cap_mb=buckets[0], **settings)
    assert steps_of(there[0]) == [2 * counted, 1 * counted, 1 * counted, 0, 0]
    others = loaded(tmp_path / "c", 2, stages[1], model=Sometimes, bucket_cap_mb=buckets[1], **settings)
    assert differing(there[0], others[0]) == []

    def go_on(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        for number in (8, 9):
            step(model, optimizer, comm.rank, number)  # so that it has counters, others than the checkpoint's
        checkpoint.load(tmp_path / "c", model, optimizer)
        return train(4, 7)(model, optimizer, comm)

    resumed = ranks(3, stages[1], go_on, seed=1, model=Sometimes, bucket_cap_mb=buckets[1], **settings)
    straight = ranks(3, stages[0], train(0, 7), model=Sometimes, bucket_cap_mb=buckets[0], **settings)
    for uninterrupted, here in zip(straight, resumed, strict=True):
        assert torch.equal(uninterrupted.pop("losses")[4:], here.pop("losses"))
        assert differing(uninterrupted, here) == []
        assert steps_of(here) == [3 * counted, 2 * counted, 1 * counted, 1 * counted, 1 * counted]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_that_was_frozen_begins_without_state(tmp_path: Path, stage: int) -> None:
    there = saved(tmp_path / "c", 2, 1, model=Frozen)[0]
    found = loaded(tmp_path / "c", 2, stage)[0]
    assert [key for key in differing(there, found) if key.startswith(("blocks", "embed", "cube"))] == []

    def body(model: nn.Module, optimizer: Any, comm: Any) -> tuple[int, int]:
        checkpoint.load(tmp_path / "c", model, optimizer)
        assert model.blocks[0].weight not in optimizer.state
        step(model, optimizer, comm.rank, 2)
        return tuple(int(optimizer.state[p]["step"]) for p in (model.blocks[0].weight, model.cube))

    assert ranks(2, stage, body, seed=1) == [(1, 3)] * 2


def test_restaged_training_saves_and_loads(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        step(model, optimizer, comm.rank, 0)
        restage(model, optimizer, 3)
        step(model, optimizer, comm.rank, 1)
        checkpoint.save(tmp_path / "c", model, optimizer)
        step(model, optimizer, comm.rank, 5)  # something else
        restage(model, optimizer, 1)
        checkpoint.load(tmp_path / "c", model, optimizer)
        return train(2, 4)(model, optimizer, comm)

    for straight, here in zip(ranks(3, 2, train(0, 4)), ranks(3, 1, body), strict=True):
        assert torch.equal(straight.pop("losses")[2:], here.pop("losses"))
        assert differing(straight, here) == []


def test_hyperparameters_come_back(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        optimizer.param_groups[0]["lr"] = 0.123
        optimizer.param_groups[1]["initial_lr"] = 0.4
        checkpoint.save(tmp_path / "c", model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        checkpoint.load(tmp_path / "c", model, optimizer)
        return [group["lr"] for group in optimizer.param_groups], optimizer.param_groups[1]["initial_lr"]

    assert ranks(2, 2, body) == [([0.123, 1e-2], 0.4)] * 2


def test_a_plain_optimizer_at_stage_0_goes_on_sharded(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        model, _ = shard(model, None, 0, comm, bucket_cap_mb=25)
        for number in range(2):
            step(model, optimizer, comm.rank, number)
        checkpoint.save(tmp_path / "c", model, optimizer)
        for number in range(2, 4):
            step(model, optimizer, comm.rank, number)
        return result(model, optimizer)

    made = [plain() for _ in range(3)]
    straight = run(3, lambda comm: body(*made[comm.rank], comm))

    def go_on(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.load(tmp_path / "c", model, optimizer)
        return train(2, 4)(model, optimizer, comm)

    for there, here in zip(straight, ranks(3, 3, go_on, seed=1), strict=True):
        del here["losses"]
        assert differing(there, here) == []


def test_a_module_of_fully_shard_goes_on_where_another_stage_was(tmp_path: Path) -> None:
    saved(tmp_path / "c", 3, 1, bucket_cap_mb=0.0001)
    made = [plain(1) for _ in range(3)]

    def body(comm: Any) -> Any:
        model, optimizer = made[comm.rank]
        for block in model.blocks:
            fully_shard(block, comm=comm)
        fully_shard(model, comm=comm)
        optimizer = adamw(groups_of(model))
        checkpoint.load(tmp_path / "c", model, optimizer)
        found = train(2, 4)(model, optimizer, comm)
        checkpoint.save(tmp_path / "d", model, optimizer)
        return found

    for there, here in zip(ranks(3, 1, train(0, 4)), run(3, body), strict=True):
        assert torch.equal(there.pop("losses")[2:], here.pop("losses"))
        assert differing(there, here) == []
    for there, here in zip(ranks(3, 2, train(0, 4)), loaded(tmp_path / "d"), strict=True):
        del there["losses"]
        assert differing(there, here) == []


def test_the_optimizers_state_of_ignored_parameters_comes_back(tmp_path: Path) -> None:
    def with_foreign(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*groups_of(model), {"params": [nn.Parameter(torch.zeros(7))]}])

    def body(comm: Any, made: tuple[nn.Module, Any], first: int) -> Any:
        model: Any = made[0]
        fully_shard(model, comm=comm, ignored_params={model.cube, model.scale})
        optimizer = adamw(groups_of(model))
        if first:
            checkpoint.load(tmp_path / "c", model, optimizer)
        for number in range(first, 4):
            x = torch.randint(13, (6,), generator=torch.Generator().manual_seed(100 * number + comm.rank))
            nn.functional.cross_entropy(model(x), x.roll(1)).backward()
            comm.all_reduce(model.cube.grad, "avg")  # and the other stays the rank's own
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                checkpoint.save(tmp_path / "c", model, optimizer)
                with pytest.raises(InvalidArgumentError, match=r"of shape \(7,\) that is not the module's"):
                    checkpoint.save(tmp_path / "d", model, with_foreign(model))
        return result(model, optimizer)

    made = [plain() for _ in range(3)], [plain(1) for _ in range(3)]
    straight = run(3, lambda comm: body(comm, made[0][comm.rank], 0))
    resumed = run(3, lambda comm: body(comm, made[1][comm.rank], 2))
    assert "scale" in differing(straight[0], straight[1])
    for there, here in zip(straight, resumed, strict=True):
        assert differing(there, here) == []

    def go_on(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.load(tmp_path / "c", model, optimizer)  # where nothing is ignored
        return optimizer.state_dict()["state"]

    for state in ranks(2, 2, go_on, seed=1):
        assert {float(each["step"]) for each in state.values()} == {2.0}


def hybrid(path: str, first: int, last: int, resume: bool) -> dict[str, Any]:
    """Four processes: pairs that repeat what the two of a pair share."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    model, optimizer = shard(*plain(int(resume)), 3, mesh=mesh, bucket_cap_mb=25)
    rank = torch.distributed.get_rank()
    extra = checkpoint.load(path, model, optimizer) if resume else {}
    assert extra == ({"rank": rank} if resume else {})
    losses = [step(model, optimizer, rank, number) for number in range(first, last)]
    checkpoint.save(path, model, optimizer, rank=rank)
    return {"losses": torch.stack(losses), **result(model, optimizer)}


def test_replicated_shards_are_saved_once_and_process_groups_serve(tmp_path: Path) -> None:
    torch_ranks.run(hybrid, str(tmp_path / "c"), 0, 2, False, world_size=4, backend="gloo")
    files = sorted(each.name for each in (tmp_path / "c").iterdir() if each.suffix == ".distcp")
    nbytes = [(tmp_path / "c" / file).stat().st_size for file in files]
    assert max(nbytes[2:]) < min(nbytes[:2]) / 4  # what is the ranks' own
    resumed = torch_ranks.run(hybrid, str(tmp_path / "c"), 2, 4, True, world_size=4, backend="gloo")
    straight = torch_ranks.run(hybrid, str(tmp_path / "d"), 0, 4, False, world_size=4, backend="gloo")
    for there, here in zip(straight, resumed, strict=True):
        assert torch.equal(there.pop("losses")[2:], here.pop("losses"))
        assert differing(there, here) == []
    assert differing(straight[0], loaded(tmp_path / "c", 3, 1)[0]) == []


# ---- what is beside ----------------------------------------------------------------------------------------------


def test_extra_comes_back_and_each_rank_has_its_own(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.save(tmp_path / "c", model, step=7, shape=(1, 2), rng=torch.full((2,), comm.rank), who=comm.rank)
        return checkpoint.load(tmp_path / "c", model)

    for rank, extra in enumerate(ranks(3, 2, body)):
        assert (extra["step"], extra["shape"], extra["who"]) == (7, (1, 2), rank)
        assert torch.equal(extra["rng"], torch.full((2,), rank))
    for extra in ranks(2, 2, lambda model, optimizer, comm: checkpoint.load(tmp_path / "c", model)):
        assert extra["step"] == 7
        assert isinstance(extra["who"], checkpoint.ByRank)
        assert extra["who"] == {0: 0, 1: 1, 2: 2}


def test_equal_extras_are_one_whatever_objects_they_share(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        one, other, x = "".join(["ab", "cd"]), "".join(["abc", "d"]), torch.ones(2)
        names = [one, one] if comm.rank else [one, other]
        checkpoint.save(tmp_path / "c", model, names=names, pair=(x, x if comm.rank else x.clone()))

    ranks(2, 1, body)
    for extra in ranks(3, 1, lambda model, optimizer, comm: checkpoint.load(tmp_path / "c", model)):
        assert extra["names"] == ["abcd", "abcd"]
        assert [x.tolist() for x in extra["pair"]] == [[1, 1], [1, 1]]


class Counting(torch.optim.AdamW):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        common = self.state.setdefault("calls", {"number": 0, "scale": torch.ones(3)})
        common["number"] += 1
        common["scale"] *= 2
        return super().step(closure)


@pytest.mark.parametrize("stage", [0, 2])
def test_state_of_the_optimizer_itself_comes_back(tmp_path: Path, stage: int) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Counting(groups, lr=1e-2)

    saved(tmp_path / "c", 3, stage, steps=2, make=make)

    def body(model: nn.Module, optimizer: Any, comm: Any) -> Any:
        checkpoint.load(tmp_path / "c", model, optimizer)
        step(model, optimizer, comm.rank, 2)
        return optimizer.state["calls"]

    for found in ranks(2, 1, body, make=make, seed=1):
        assert found["number"] == 3
        assert found["scale"].tolist() == [8, 8, 8]

    def unnamed(model: nn.Module, optimizer: Any, comm: Any) -> None:
        optimizer.state[7] = {"number": 1}
        with pytest.raises(ringcomm.UnsupportedError, match="save: rank 0 got an optimizer with 7 in its state"):
            checkpoint.save(tmp_path / "d", model, optimizer)

    ranks(1, stage, unnamed)


@pytest.mark.parametrize("stage", [0, 1])
def test_state_from_before_wrapping_is_saved(tmp_path: Path, stage: int) -> None:
    model, optimizer = plain()
    for number in range(2):
        step(model, optimizer, 0, number)
    wanted, state = result(model, optimizer), copy.deepcopy(optimizer.state_dict())
    run(1, lambda comm: checkpoint.save(tmp_path / "c", *shard(model, optimizer, stage, comm)))
    assert differing(wanted, loaded(tmp_path / "c", 1, 2)[0]) == []

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        optimizer.load_state_dict(state)
        checkpoint.save(tmp_path / "d", model, optimizer)

    ranks(2, stage, body)
    found = loaded(tmp_path / "d", 1, 2)[0]
    assert [key for key in differing(wanted, found) if key.startswith("0.")] == []


def test_the_state_of_random_generators_comes_back(tmp_path: Path) -> None:
    generator = np.random.RandomState(3)
    generator.rand(5)
    there = {"numpy": generator.get_state(), "python": random.Random(4).getstate(), "torch": torch.get_rng_state()}
    there |= {"scalars": [np.float32(1.5), np.int64(7), np.bool_(True)], "array": np.array([["a", "bc"]])}
    ranks(2, 1, lambda model, optimizer, comm: checkpoint.save(tmp_path / "c", model, **there))
    for found in ranks(3, 1, lambda model, optimizer, comm: checkpoint.load(tmp_path / "c", model)):
        again = np.random.RandomState()
        again.set_state(found["numpy"])
        assert again.rand() == copy.deepcopy(generator).rand()
        assert found["python"] == there["python"]
        assert found["scalars"] == there["scalars"]
        assert np.array_equal(found["array"], there["array"])
        assert torch.equal(found["torch"], there["torch"])


def test_types_that_the_program_has_declared_safe_stay_so() -> None:
    with torch.serialization.safe_globals([np.ndarray, np.dtype]):
        assert checkpoint_files.unpack_value(checkpoint_files.pack_value(0, "extra", np.float64(2))) == 2
        assert {np.ndarray, np.dtype} <= {*torch.serialization.get_safe_globals()}
    assert np.ndarray not in torch.serialization.get_safe_globals()


class WideMoments(torch.optim.SGD):
    """Keeps its state in float32 for parameters in 16 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                    state["mean"].lerp_(p.grad.float(), 0.3)
                    p.sub_((0.1 * state["mean"]).to(p.dtype))


def test_state_wider_than_its_parameter_keeps_its_bits(tmp_path: Path) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return WideMoments(groups, lr=0.1)

    def model() -> nn.Module:
        return Net().to(torch.bfloat16)

    there = saved(tmp_path / "c", 2, 0, make=make, model=model)[0]
    assert there["0.mean"].dtype == torch.float32
    assert differing(there, loaded(tmp_path / "c", 2, 0, make=make, model=model)[0]) == []


def test_an_extra_that_would_run_code_is_refused(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"save: rank . got hook of type .*convert"):
            checkpoint.save(tmp_path / "c", model, optimizer, hook=Path("x") if comm.rank == 1 else 3)

        with pytest.raises(InvalidArgumentError, match=r"save: rank . got objects of type ndarray"):
            checkpoint.save(tmp_path / "c", model, optimizer, objects=np.array([Path("x")]))

    ranks(2, 1, body)
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_differ_are_each_ranks_own(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> torch.Tensor:
        model.norm.running_mean.fill_(comm.rank)
        checkpoint.save(tmp_path / "c", model)
        model.norm.running_mean.fill_(-1)
        model.scratch.fill_(5)
        checkpoint.load(tmp_path / "c", model)
        assert model.scratch.tolist() == [5, 5]
        return model.norm.running_mean[0].item()

    assert ranks(3, 3, body, broadcast_buffers=False) == [0, 1, 2]
    assert loaded_mean(tmp_path / "c") == [0, 0]


def loaded_mean(path: Path) -> list[float]:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> float:
        checkpoint.load(path, model)
        return model.norm.running_mean[0].item()

    return ranks(2, 3, body)


class Stateful(Net):
    """With a state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_a_modules_extra_state_comes_back(tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, comm: Any) -> int:
        model.seen = 3
        checkpoint.save(tmp_path / "c", model)
        model.seen = 4
        checkpoint.load(tmp_path / "c", model)
        return model.seen

    assert ranks(2, 2, body, model=Stateful) == [3, 3]


# ---- for others --------------------------------------------------------------------------------------------------


def test_a_plain_process_reads_it(tmp_path: Path) -> None:
    there = saved(tmp_path / "c", 3, 3, mixed_precision=MixedPrecision(torch.bfloat16))[0]
    state = plain(1)[0].state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert {name: value.dtype for name, value in state.items()} == {name: there[name].dtype for name in state}
    assert differing({name: there[name] for name in state}, state) == []
    assert "head.weight" in state


def test_torchs_converter_reads_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    there = saved(tmp_path / "c", 3, 1)[0]
    dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(state["cube"], there["cube"])
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    moment = there[f"{names.index('cube')}.exp_avg"]
    assert torch.equal(state["optimizer"]["state"]["cube"]["exp_avg"], moment)


def test_a_plain_checkpoint_is_read(tmp_path: Path) -> None:
    state = plain(5)[0].state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "c")

    def body(model: nn.Module, optimizer: Any, comm: Any) -> dict[str, Any]:
        with pytest.raises(InvalidArgumentError, match="without an optimizer"):
            checkpoint.load(tmp_path / "c", model, optimizer)
        assert checkpoint.load(tmp_path / "c", model) == {}
        return {name: value.clone() for name, value in model.state_dict().items()}

    for here in ranks(3, 3, body):
        assert differing(state, here) == []


def test_strided_and_shared_storages_of_a_plain_checkpoint_are_read(tmp_path: Path) -> None:
    """torch writes a tensor with its strides, and writes it in its own type."""
    state = plain(5)[0].state_dict()
    laid_out = {
        name: value.double() if number % 3 == 0 else value.t().contiguous().t() if value.dim() == 2 else value
        for number, (name, value) in enumerate(state.items())
    }
    assert any(not value.is_contiguous() for value in laid_out.values())
    dcp.save(laid_out, checkpoint_id=tmp_path / "c")

    def body(model: nn.Module, optimizer: Any, comm: Any) -> dict[str, Any]:
        checkpoint.load(tmp_path / "c", model)
        return {name: value.clone() for name, value in model.state_dict().items()}

    for stage in (0, 3):
        for here in ranks(2, stage, body):
            assert differing(state, here) == []


def test_a_path_that_python_3_13_pickled_is_read() -> None:
    with pytest.raises(ValueError, match="it is PosixPath"):  # and no metadata
        read_metadata(b"cpathlib._local\nPosixPath\n(Vfolder\ntR.")


def test_safetensors_holds_the_parameters_once(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_model

    there = saved(tmp_path / "c", 3, 3)[0]
    with pytest.raises(InvalidArgumentError, match=r"got m\.pt, a name that torch.load reads"):
        checkpoint.export(tmp_path / "c", tmp_path / "m.pt")
    checkpoint.export(tmp_path / "c", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        names = set(file.keys())
    assert ("head.weight" in names) != ("embed.weight" in names)
    assert not [name for name in names if "exp_avg" in name or "ringcomm" in name]
    model = plain(1)[0]
    load_model(model, tmp_path / "m.safetensors")
    assert differing({name: there[name] for name in model.state_dict()}, model.state_dict()) == []
    half = tmp_path / "new" / "folder" / "h.safetensors"
    checkpoint.export(tmp_path / "c", half, torch.bfloat16)
    with safe_open(half, "pt") as file:
        assert torch.equal(file.get_tensor("cube"), there["cube"].bfloat16())
        assert file.get_tensor("norm.num_batches_tracked").dtype == torch.int64


def test_export_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "c", 1)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ringcomm.UnsupportedError, match="pip install safetensors"):
        checkpoint.export(tmp_path / "c", tmp_path / "m.safetensors")


# ---- cost --------------------------------------------------------------------------------------------------------


class Wide(Net):
    def __init__(self) -> None:
        super().__init__(64)
        self.big = nn.Parameter(torch.randn(600, 500))


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_writes_its_share_and_sends_no_parameters(tmp_path: Path, stage: int) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> int:
        flat = sharded_model_of(model)
        assert flat is not None
        before, gather, sent = dict(flat.ranks.traffic), comm.all_gather_object, []
        comm.all_gather_object = lambda x: sent.append(len(pickle.dumps(x))) or gather(x)
        checkpoint.save(tmp_path / "c", model, optimizer)
        assert dict(flat.ranks.traffic) == before
        return sum(sent)

    sent = ranks(4, stage, body, model=Wide)
    nbytes = [(tmp_path / "c" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    whole = sum(p.nbytes for p in Wide().parameters())
    assert max(sent) < whole / 20
    assert sum(nbytes) < 1.1 * whole
    assert max(nbytes) < 1.2 * whole / 4


def test_large_tensors_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "MOST_BOX_BYTES", 200)
    there = saved(tmp_path / "c", 2, 2)[0]
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    chunks = metadata.state_dict_metadata["cube"].chunks
    assert max(math.prod(chunk.sizes) * 4 for chunk in chunks) <= 200
    assert differing(there, loaded(tmp_path / "c", 3, 1)[1]) == []


# ---- wrong checkpoints -------------------------------------------------------------------------------------------


def refused(path: Path, kind: type[Exception], match: str, world_size: int = 3, **settings: Any) -> None:
    """Loading raises on every rank, names what is wrong, and leaves everything as it was."""

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        step(model, optimizer, comm.rank, 0)
        before = result(model, optimizer)
        with pytest.raises(kind, match=match) as caught:
            checkpoint.load(path, model, optimizer)
        assert str(caught.value).startswith("load: rank ")
        assert "\n" not in str(caught.value)
        assert differing(before, result(model, optimizer)) == []
        step(model, optimizer, comm.rank, 1)

    ranks(world_size, 2, body, **settings)


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(3))


class Integer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2), requires_grad=False)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    saved(tmp_path / "sgd", make=lambda groups: torch.optim.SGD(groups, lr=0.1))
    refused(tmp_path / "nowhere", InvalidArgumentError, "no checkpoint in .*nowhere")
    refused(tmp_path / "c", InvalidArgumentError, "without more, expected one of shape", model=Other)
    refused(tmp_path / "c", ShapeError, r"of shape \(10, 10\), expected \(12, 12\)", model=lambda: Net(12))
    refused(tmp_path / "c", DtypeError, "got scale in torch.float32", model=Integer)
    refused(tmp_path / "sgd", InvalidArgumentError, "the state of SGD, expected that of AdamW")
    saved(tmp_path / "more", model=Other)
    refused(tmp_path / "more", InvalidArgumentError, "got more, which the module does not have")


def test_an_optimizer_over_other_groups_changes_nothing(tmp_path: Path) -> None:
    def one_group(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for group in groups for p in group["params"]])

    def without_cube(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p for p in groups[0]["params"] if p.ndim < 3]}, groups[1]])

    saved(tmp_path / "c")
    saved(tmp_path / "less", make=without_cube)
    refused(tmp_path / "c", InvalidArgumentError, "2 parameter groups, expected 1", make=one_group)
    refused(tmp_path / "c", InvalidArgumentError, "with cube in group 0", make=without_cube)
    refused(tmp_path / "less", InvalidArgumentError, "without cube in group 0")


def values_of(path: Path, name: str) -> tuple[Path, int]:
    """A file and a place in it that belongs to a tensor's values."""
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    info = next(info for index, info in storage.items() if index.fqn == name)
    return path / info.relative_path, info.offset + info.length // 2


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_damage_is_noticed_before_anything_changes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    saved(path, bucket_cap_mb=0.0001)
    flip(*values_of(path, "cube"))
    refused(path, InvalidArgumentError, "got cube damaged in .*another checksum")
    flip(*values_of(path, "cube"))
    flip(*values_of(path, "optimizer.state.blocks.1.bias.exp_avg"))
    refused(path, InvalidArgumentError, r"got optimizer\.state\.blocks\.1\.bias\.exp_avg damaged")
    saved(path)
    file, at = values_of(path, "blocks.0.weight")
    os.truncate(file, at)
    refused(path, InvalidArgumentError, "damaged in .*expected it as it was saved")
    file.unlink()
    refused(path, InvalidArgumentError, "damaged in .*FileNotFoundError")
    saved(path)
    flip(path / ".metadata", 50)
    refused(path, InvalidArgumentError, r"got \.metadata damaged")
    saved(path)
    (path / "checksums.json").unlink()
    refused(path, InvalidArgumentError, "without its checksums")


def test_damage_anywhere_in_a_box_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c"
    saved(path, world_size=1)
    file, middle = values_of(path, "blocks.0.weight")
    storage = dcp.FileSystemReader(path).read_metadata().storage_data
    info = next(info for index, info in storage.items() if index.fqn == "blocks.0.weight")
    for at in (info.offset, info.offset + 40, middle, info.offset + info.length - 30, info.offset + info.length - 1):
        flip(file, at)
        refused(path, InvalidArgumentError, r"got blocks\.0\.weight damaged in .*another checksum", world_size=1)
        flip(file, at)


def test_at_stage_0_ranks_save_complete_rows(tmp_path: Path) -> None:
    path = tmp_path / "c"
    saved(path, world_size=3, stage=0)
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [facts for facts in metadata.values() if hasattr(facts, "chunks")]
    for facts in tensors:
        for chunk in facts.chunks:
            assert tuple(chunk.sizes[1:]) == tuple(facts.size[1:])
    assert sum(len(facts.chunks) > 1 for facts in tensors) <= 3 * 2  # a cut behind two ranks: values and two moments
    assert len({info.relative_path for info in dcp.FileSystemReader(path).read_metadata().storage_data.values()}) == 3


def test_a_missing_box_is_noticed(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "c"
    saved(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["cube"].chunks.pop()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sums = json.loads((path / "checksums.json").read_text())
    sums["crc32c"][".metadata"]["0"] = crc32c((path / ".metadata").read_bytes())
    (path / "checksums.json").write_text(json.dumps(sums))
    refused(path, InvalidArgumentError, "got cube damaged in .*elements are missing", world_size=1)


def test_what_is_not_sharded_is_refused(tmp_path: Path) -> None:
    model, optimizer = plain()
    with pytest.raises(InvalidArgumentError, match=r"save: got a Net that is not wrapped, .*; use torch\.distributed"):
        checkpoint.save(tmp_path / "c", model, optimizer)

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="got a AdamW that is not the module's"):
            checkpoint.save(tmp_path / "c", model, adamw(groups_of(Net())))
        with pytest.raises(InvalidArgumentError, match="with other parameters than those of the Net"):
            checkpoint.save(tmp_path / "c", model.blocks)
        with pytest.raises(InvalidArgumentError, match="with other parameters"):
            checkpoint.save(tmp_path / "c", nn.ModuleList([model, nn.Linear(2, 2)]))

    ranks(2, 2, body)
    made = [plain()[0] for _ in range(2)]

    def with_zero(comm: Any) -> None:
        model = ringcomm.DistributedDataParallel(made[comm.rank], comm)
        dealt_out = ringcomm.ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, comm=comm)
        with pytest.raises(ringcomm.UnsupportedError, match="a ZeroRedundancyOptimizer, which holds its state itself"):
            checkpoint.save(tmp_path / "c", model, dealt_out)

    run(2, with_zero)
    assert list(tmp_path.iterdir()) == []


# ---- interrupted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_different_paths_are_refused(tmp_path: Path, stage: int) -> None:
    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        for number in range(2):
            step(model, optimizer, comm.rank, number)
            checkpoint.save(tmp_path / str(number), model, optimizer)
        kept = result(model, optimizer)
        with pytest.raises(
            InvalidArgumentError, match=rf"load: rank {comm.rank} .* rank 1 another checkpoint than rank 0"
        ):
            checkpoint.load(tmp_path / str(comm.rank), model, optimizer)
        with pytest.raises(InvalidArgumentError, match=rf"save: rank {comm.rank} .* rank 1 another path than rank 0"):
            checkpoint.save(tmp_path / f"of rank {comm.rank}", model, optimizer)
        assert differing(kept, result(model, optimizer)) == []

    ranks(2, stage, body)
    assert {each.name for each in tmp_path.iterdir()} == {"0", "1"}


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for place in ("results/config.json", "file"):
        (tmp_path / place).write_text("mine")

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        for name, found in (("results", "which holds config.json"), ("file", "which is no folder")):
            with pytest.raises(InvalidArgumentError, match=f"save: rank 0 got .*{name}, {found}"):
                checkpoint.save(tmp_path / name, model, optimizer)

    ranks(2, 1, body)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "results"]
    assert [(tmp_path / place).read_text() for place in ("results/config.json", "file")] == ["mine", "mine"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    saved(tmp_path / "first", 2, 1)
    (tmp_path / "latest").symlink_to("first")
    for steps in (3, 4):
        there = saved(tmp_path / "latest", 2, 1, steps=steps)[0]
        assert sorted(each.name for each in tmp_path.iterdir()) == ["first", "latest"]
        assert (tmp_path / "latest").is_symlink()
        assert differing(there, loaded(tmp_path / "first", 2, 1)[0]) == []


def test_a_save_that_fails_on_one_rank_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    there = saved(path)[0]
    write = checkpoint.write

    def full(folder: Path, rank: int, outgoing: Any) -> Any:
        written = write(folder, rank, outgoing)
        if rank == 1:
            raise OSError(28, "No space left on device")
        return written

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        step(model, optimizer, comm.rank, 9)
        monkeypatch.setattr(checkpoint, "write", full)
        with pytest.raises(EngineError, match=r"save: rank 1 got OSError .*No space left"):
            checkpoint.save(path, model, optimizer)

    ranks(3, 2, body)
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert differing(there, loaded(path)[0]) == []


def test_an_error_of_another_kind_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, rank: int, outgoing: Any) -> Any:
        if rank == 2:
            raise KeyError("odd")

    def body(model: nn.Module, optimizer: Any, comm: Any) -> None:
        monkeypatch.setattr(checkpoint, "write", broken)
        with pytest.raises(KeyError if comm.rank == 2 else RingcommError, match="odd"):
            checkpoint.save(tmp_path / "c", model, optimizer)

    ranks(3, 2, body)


def save_and_die(path: str) -> None:
    """A process of its own, whose patch does not outlive it."""
    checkpoint_files.put_in_place = lambda *args: os._exit(9)  # type: ignore[assignment]  # nothing has its name yet
    model = nn.Linear(3, 3)
    ringcomm.run_ranks(lambda comm: checkpoint.save(path, shard(model, None, 2, comm)[0]), 1, ranks="threads")


def test_a_process_that_dies_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "c"

    def save_constant(value: float) -> None:
        model = nn.Linear(3, 3)
        nn.init.constant_(model.weight, value)
        run(1, lambda comm: checkpoint.save(path, shard(model, None, 2, comm)[0]))

    def weight() -> float:
        state = {key: value.detach() for key, value in nn.Linear(3, 3).state_dict().items()}
        dcp.load(state, checkpoint_id=path)
        return state["weight"].mean().item()

    save_constant(1)
    process = forked.context().Process(target=save_and_die, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert weight() == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == [".c.saving", "c"]
    save_constant(3)
    assert weight() == 3
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


# ---- ordinary state dicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_ordinary_state_dict_goes_in_and_comes_out(stage: int) -> None:
    model, optimizer = plain(3)
    for number in range(2):
        step(model, optimizer, 0, number)
    there, states = result(model, optimizer), (model.state_dict(), optimizer.state_dict())

    def body(sharded: nn.Module, attached: Any, comm: Any) -> Any:
        sharded.load_state_dict(states[0])
        attached.load_state_dict(states[1])
        return sharded.state_dict(), attached.state_dict(), result(sharded, attached)

    for module_state, optimizer_state, here in ranks(3, stage, body):
        assert differing(there, here) == []
        again, other = plain(4)
        again.load_state_dict(module_state)
        other.load_state_dict(optimizer_state)
        assert differing(there, result(again, other)) == []
