"""Pipelines of models built on the meta device: each rank gives memory to its own stages alone, and initialises them or
loads them part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.comm.communicator import Communicator
from ringcomm.data_parallel.model.place import place_of
from ringcomm.errors import AbortedError, InvalidArgumentError
from ringcomm.pipeline_parallel.pipeline import Pipeline
from tests.modules.test_meta import Meter, Wide
from tests.modules.test_meta import fill as fill_plain
from tests.pipeline_parallel.test_runner import Net, cross_entropy, cuts, tokens
from tests.support.choice import choose

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = (0, 1, 2, 3)
AXES = {"pp": {"pp": 2}, "pp and dp": {"pp": 2, "dp": 2}}


class Scaled(Net):
    """With buffers in the part of the model that every stage runs, of which one is saved."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.register_buffer("shift", torch.full((6,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) * self.scale + self.shift
        h = h + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h) * self.scale, self.head.weight)


def fill(module: nn.Module) -> None:
    """With values that depend on the module's class: a pipeline stands for its model."""
    fill_plain(module.model if isinstance(module, Pipeline) else module)


def on_meta(kind: Callable[[], nn.Module] = Scaled) -> nn.Module:
    with torch.device("meta"):
        return kind()


def initialised() -> Scaled:
    """As ranks initialise it on meta: what is tied is what the first of its modules makes it."""
    model = Scaled()
    model.apply(fill)
    fill(model.token)
    return model


def piped(model: nn.Module, mesh: Any, **options: Any) -> Pipeline:
    return Pipeline(ringcomm.split(model, cuts(2, 4)), mesh["pp"], microbatches=2, loss=cross_entropy, **options)


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for step in range(3):
        x, y = tokens(4, seed=step), tokens(4, seed=step + 10)
        if isinstance(model, Pipeline):
            losses.append(model.step(x, target=y))
        else:
            parts = [cross_entropy(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
            for part in parts:
                part.backward()
            losses.append(parts[0].detach() + parts[1].detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(done: list[Any], model: nn.Module) -> None:
    """Losses of every rank are those of one process."""
    expected = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for losses in done:
        assert all(map(torch.equal, losses, expected)), (losses, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_initialised_on_meta_as_one_process(stage: int, axes: str, schedule: str) -> None:
    def rank_main(comm: Communicator) -> list[torch.Tensor]:
        mesh = ringcomm.init_mesh(AXES[axes], comm)
        pipe = piped(on_meta(), mesh, ties="exact", schedule=schedule)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        ringcomm.shard(pipe, optimizer, stage, mesh=mesh, init_fn=fill)
        theirs = {"token", "position"} if mesh["pp"].rank else {"norm", "head"}
        assert not any(name.partition(".")[0] in theirs for name, _ in pipe.named_parameters())
        return trained(pipe, optimizer)

    check(ringcomm.run_ranks(rank_main, 2 * AXES[axes].get("dp", 1), timeout=30), initialised())


@pytest.mark.parametrize("way", ["checkpoint", "safetensors"])
@pytest.mark.parametrize("stage", STAGES)
def test_loaded_part_by_part(stage: int, way: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

    def save(comm: Communicator) -> None:
        model = initialised()
        ringcomm.shard(model, None, 0, comm)
        ringcomm.checkpoint.save(tmp_path / "saved", model)

    def rank_main(comm: Communicator) -> list[torch.Tensor]:
        mesh = ringcomm.init_mesh({"pp": 2, "dp": 2}, comm)
        pipe = piped(on_meta(), mesh, ties="exact")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        names = {id(module): name for name, module in pipe.named_modules()}

        def read(module: nn.Module) -> None:
            for key, x in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                name = f"{names[id(module)]}.{key}" if names[id(module)] else key
                if name in file.keys():  # noqa: SIM118
                    x.copy_(file.get_tensor(name))

        with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
            ringcomm.shard(pipe, optimizer, stage, mesh=mesh, init_fn=read if way == "safetensors" else False)
        if way == "checkpoint":
            ringcomm.checkpoint.load(tmp_path / "saved", pipe)
        pipe.scale.copy_(model.scale)  # which no checkpoint has
        return trained(pipe, optimizer)

    ringcomm.run_ranks(save, 1, timeout=30)
    ringcomm.checkpoint.export(tmp_path / "saved", tmp_path / "model.safetensors")
    model = initialised()
    check(ringcomm.run_ranks(rank_main, 4, timeout=30), model)


@pytest.mark.parametrize("how", [{}, {"mixed_precision": ringcomm.MixedPrecision(param_dtype=torch.bfloat16)}], ids=str)
@pytest.mark.parametrize("ties", ["exact", "sum"])
@pytest.mark.parametrize("stage", choose(STAGES, (0, 3)))
def test_a_tied_weight_is_one_where_each_rank_draws_its_own(stage: int, ties: str, how: dict[str, Any]) -> None:
    """Also its master weights, which have more bits than what is computed with."""

    def master(pipe: Pipeline, name: str) -> torch.Tensor:
        place = place_of(dict(pipe.named_parameters())[name])
        assert place is not None
        return place.bucket.layout.part(place.bucket.gather_owned(place.bucket.master), place.index).clone()

    def rank_main(comm: Communicator) -> list[torch.Tensor]:
        mesh = ringcomm.init_mesh({"pp": 2, "dp": 2}, comm)
        pipe = piped(on_meta(lambda: Net(4)), mesh, ties=ties)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        source = torch.Generator().manual_seed(comm.rank)

        def draw(module: nn.Module) -> None:
            for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                x.copy_(torch.rand(x.shape, generator=source))

        ringcomm.shard(pipe, optimizer, stage, mesh=mesh, init_fn=draw, **how)
        name = "head.weight" if mesh["pp"].rank else "token.weight"
        before = master(pipe, name)
        trained(pipe, optimizer)
        return [before, master(pipe, name)]

    done = ringcomm.run_ranks(rank_main, 4, timeout=30)
    assert not torch.equal(done[0][0], done[2][0])  # as they were drawn
    assert all(torch.equal(found[1], done[0][1]) for found in done)
    assert done[0][1].isfinite().all()


def test_a_step_on_meta_is_refused() -> None:
    def rank_main(comm: Communicator) -> str:
        pipe = piped(on_meta(), {"pp": comm})
        with pytest.raises((InvalidArgumentError, AbortedError)) as caught:
            pipe.step(tokens(4), target=tokens(4))
        return str(caught.value)

    for found in ringcomm.run_ranks(rank_main, 2, timeout=30):
        assert "on the meta device in a step, expected values; first call ringcomm.shard(" in found


def test_values_that_are_missing_are_named() -> None:
    def rank_main(comm: Communicator) -> str:
        mesh = ringcomm.init_mesh({"pp": 2}, comm)
        pipe = piped(on_meta(), mesh)
        ringcomm.shard(pipe, None, 3, mesh=mesh, init_fn=False)
        if comm.rank == 0:
            for each in (pipe.token, pipe.position, *pipe.blocks[:2], pipe):
                each.apply(fill)
        with pytest.raises((InvalidArgumentError, AbortedError)) as caught:
            pipe.step(tokens(4), target=tokens(4))
        return str(caught.value)

    for found in ringcomm.run_ranks(rank_main, 2, timeout=30):
        assert "rank 0 got blocks.2." in found
        assert "from the meta device without values" in found


@pytest.mark.parametrize("init", [fill, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_never_has_more_than_its_stages_and_a_unit(stage: int, init: Any) -> None:
    def rank_main(comm: Communicator) -> tuple[int, int]:
        mesh = ringcomm.init_mesh({"pp": 2}, comm)
        with Meter() as meter:
            stages = ringcomm.split(on_meta(Wide), ["blocks.8"])
            pipe = Pipeline(stages, mesh["pp"], microbatches=1, loss=torch.mean)
            ringcomm.shard(pipe, None, stage, mesh=mesh, bucket_cap_mb=1e-3, init_fn=init)
        return meter.peak, ringcomm.memory(pipe).resident

    unit = (256 * 256 + 256) * 4
    for peak, resident in ringcomm.run_ranks(rank_main, 2, timeout=30):
        assert resident < 2.1 * 8 * unit  # parameters and gradients of half of the model
        assert resident <= peak < resident + 2 * unit
