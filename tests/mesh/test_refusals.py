"""What would be one rank's alone, where others have the rest of the model, is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.data_parallel.buckets.group import ranks_of_mesh
from ringcomm.data_parallel.optim.grad_scaler import GradScaler
from ringcomm.errors import InvalidArgumentError
from tests.support.mesh import cases
from tests.support.mesh.cases import Job, Net

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_overflow_over_the_data_axis_alone() -> None:
    def body(model: Net, mesh: Any) -> None:
        cases.parallelize(model, cases.PLAN, mesh["tp"])
        optimizer = cases.adamw(model)
        ringcomm.shard(model, optimizer, 1, mesh["dp"])
        scaler = GradScaler(init_scale=8.0)
        x, y = cases.batch(0)
        scaler.scale(cases.loss_of(model(x), y)).backward()
        with pytest.raises(InvalidArgumentError, match=r"GradScaler: .* mesh=mesh"):
            scaler.unscale_(optimizer)

    cases.run({"dp": 1, "tp": 2}, body)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2}])
def test_torchs_loss_scaler_skips_a_step_on_all_ranks(axes: dict[str, int], stage: int) -> None:
    """Even if the gradients that overflow are on another rank."""

    def body(model: Net, mesh: Any) -> None:
        job = Job(model, mesh, stage)
        for overflows in (False, True):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            before = [p.detach().clone() for p in job.pipe.parameters()]
            job.forward_backward(0, scaler)
            if overflows and mesh.comm.rank == 1:
                next(p for p in job.pipe.parameters() if p.grad is not None).grad.mul_(torch.inf)
            scaler.step(job.optimizer)
            scaler.update()
            assert scaler.get_scale() == (4.0 if overflows else 8.0)
            assert overflows == all(map(torch.equal, before, job.pipe.parameters()))
            job.optimizer.zero_grad()

    cases.run(axes, body)


def test_the_norm_of_a_stage_that_is_frozen() -> None:
    def body(model: Net, mesh: Any) -> None:
        for part in (model.token, model.position, model.blocks[:2]):
            part.requires_grad_(False)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        pipe = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        with pytest.raises(InvalidArgumentError, match="their norm needs the other ranks"):
            ringcomm.clip_grad_norm_(pipe, 1.0)

    cases.run({"pp": 2}, body)


@pytest.mark.parametrize("names", [("dp", "tp"), ("pp",)])
def test_a_device_mesh_whose_axes_cut_the_model(names: tuple[str, ...]) -> None:
    """Its second axis would be taken for a shard axis, over which gradients are averaged."""
    mesh = SimpleNamespace(ndim=len(names), mesh_dim_names=names)
    with pytest.raises(InvalidArgumentError, match=rf"shard: .* axis '{names[-1]}', .* ringcomm.init_mesh\(mesh\)"):
        ranks_of_mesh(mesh, "shard", torch.device("cpu"))


def test_parts_of_a_model_are_not_averaged() -> None:
    """Over ranks that hold different parts: the mesh was forgotten, or has the wrong axis."""

    def body(model: Net, mesh: Any) -> None:
        cases.parallelize(model, cases.PLAN, mesh["tp"])
        with pytest.raises(
            ringcomm.MismatchError, match=r"shard: .* cut along 0 at .* pass mesh=, or the communicator"
        ):
            ringcomm.shard(model, cases.adamw(model), 1, mesh.comm)

    cases.run({"dp": 1, "tp": 2}, body)


def test_stages_of_a_model_are_not_averaged() -> None:
    def body(model: Net, mesh: Any) -> None:
        pipe = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        with pytest.raises(ringcomm.MismatchError, match="pass mesh=, or the communicator"):
            ringcomm.shard(pipe, cases.adamw(pipe), 1, mesh.comm)

    cases.run({"pp": 2}, body)


def test_a_mesh_is_no_communicator() -> None:
    def body(model: Net, mesh: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"got a mesh, expected a communicator; .* mesh\['tp'\]"):
            cases.parallelize(model, cases.PLAN, mesh)
        with pytest.raises(InvalidArgumentError, match=r"Pipeline: .* mesh\['pp'\]"):
            cases.Pipeline(cases.split(model, ["blocks.2"]), mesh, microbatches=2)
        with pytest.raises(InvalidArgumentError, match=r"mesh\['cp'\]"), ringcomm.context_parallel(mesh):
            pass

    cases.run({"pp": 2}, body)


def test_layers_are_cut_before_a_model_is() -> None:
    def body(model: Net, mesh: Any) -> None:
        pipe = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        with pytest.raises(InvalidArgumentError, match="call parallelize before"):
            cases.parallelize(pipe, cases.PLAN, mesh["tp"])

    cases.run({"pp": 2, "tp": 1}, body)


def test_a_target_that_the_loss_needs() -> None:
    def body(model: Net, mesh: Any) -> None:
        pipe = cases.Pipeline(cases.split(model, ["blocks.2"]), mesh["pp"], microbatches=2, loss=cases.loss_of)
        expected = InvalidArgumentError if mesh["pp"].rank == 1 else ringcomm.AbortedError
        with pytest.raises(expected, match="got no target, expected one for the loss"):
            pipe.step(cases.batch(0)[0])

    cases.run({"pp": 2}, body)


def test_heads_that_look_forgotten() -> None:
    plan = {name: style for name, style in cases.PLAN.items() if name != "blocks.*"}

    def body(model: Net, mesh: Any) -> None:
        cases.parallelize(model, plan, mesh["tp"])

    with pytest.warns(UserWarning, match="no style divides its heads"):
        cases.run({"tp": 2}, body)
