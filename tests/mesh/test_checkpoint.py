"""Checkpoints of models that are cut over a mesh: whole tensors under the model's own names, for any other mesh."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ringcomm
from ringcomm import checkpoint
from ringcomm.checkpoint.contents import flat_of, name_of
from ringcomm.errors import InvalidArgumentError, RingcommError, ShapeError, UnsupportedError
from ringcomm.modules.shard_spec import ShardSpec, part_of
from tests.support import torch_ranks
from tests.support.choice import choose, slow
from tests.support.mesh import cases
from tests.support.mesh.cases import Job, Net, make, pieces_of

pytestmark = pytest.mark.usefixtures("one_thread")

MESHES: dict[str, tuple[dict[str, int], int]] = {
    "dp2 tp2 pp2, stage 2": ({"pp": 2, "dp": 2, "tp": 2}, 2),
    "dp4, stage 1": ({"dp": 4}, 1),
    "tp4": ({"tp": 4}, 0),
    "pp4": ({"pp": 4}, 0),
    "one, stage 0": ({"dp": 1}, 0),
    "one, stage 3": ({"dp": 1}, 3),
    "tp2 pp2, stage 3": ({"tp": 2, "pp": 2}, 3),
    "hybrid": ({"replicate": 2, "shard": 2, "tp": 2}, 3),
}
Whole = dict[str, torch.Tensor]


def saved(path: Path, axes: dict[str, int], stage: int, steps: int = 2, **settings: Any) -> None:
    def body(model: Net, mesh: Any) -> None:
        job = Job(model, mesh, stage, **settings)
        job.train(0, steps)
        checkpoint.save(path, job.pipe, job.optimizer, step=steps)

    cases.run(axes, body)


def contents(path: Path) -> Whole:
    """All tensors of a checkpoint, through torch alone."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    found = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in metadata.state_dict_metadata.items()
        if hasattr(facts, "size")
    }
    dcp.load(found, checkpoint_id=path)
    return found


def parts(job: Job) -> dict[str, tuple[ShardSpec, torch.Tensor]]:
    """What a rank has: parameters, and the optimizer's state under its name in checkpoints; a collective."""
    found = job.parts()
    flat = flat_of(job.pipe, "test")
    (optimizer,) = flat.optimizers
    for group in flat.order:
        for i, p in enumerate(group.params):
            for key, value in optimizer.state.get(p, {}).items():
                cut = part_of(p) if value.shape == p.shape and value.dim() else ShardSpec()
                found[f"optimizer.state.{name_of(group, i)}.{key}"] = (cut, value.clone())
    return found


def differing(whole: Whole, mine: dict[str, tuple[ShardSpec, torch.Tensor]]) -> list[str]:
    return [name for name, (cut, x) in mine.items() if not torch.equal(pieces_of(whole[name], cut, x), x)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mesh") / "first"
    saved(path, *MESHES["dp2 tp2 pp2, stage 2"])
    return path


@pytest.mark.parametrize("name", choose(MESHES, ["tp2 pp2, stage 3", "one, stage 3"]))
def test_another_mesh_gets_what_was_saved_and_saves_the_same(first: Path, tmp_path: Path, name: str) -> None:
    axes, stage = MESHES[name]
    before = contents(first)
    assert "head.weight" in before
    assert before["token.weight"].shape == (cases.VOCABULARY, cases.WIDTH)

    def body(model: Net, mesh: Any) -> tuple[list[str], int]:
        job = Job(model, mesh, stage)
        extra = checkpoint.load(first, job.pipe, job.optimizer)
        assert extra == {"step": 2}
        found = parts(job)
        checkpoint.save(tmp_path / "again", job.pipe, job.optimizer)
        return differing(before, found), len(found)

    ranks = cases.run(axes, body, make(seed=7))
    assert [wrong for wrong, _ in ranks] == [[]] * len(ranks)
    assert all(count > 20 for _, count in ranks)
    after = contents(tmp_path / "again")
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("name", [slow("dp2 tp2 pp2, stage 2"), "tp2 pp2, stage 3", slow("hybrid")])
def test_resuming_on_the_same_mesh_has_the_bits_of_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    axes, stage = MESHES[name]

    def straight(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh, stage)
        job.train(0, 1)
        checkpoint.save(tmp_path / "x", job.pipe, job.optimizer)
        return job.train(1, 3), parts(job)

    def resumed(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh, stage)
        checkpoint.load(tmp_path / "x", job.pipe, job.optimizer)
        return job.train(1, 3), parts(job)

    expected = cases.run(axes, straight)
    for (curve, mine), (curve_again, again) in zip(expected, cases.run(axes, resumed, make(seed=7)), strict=True):
        assert curve == curve_again
        assert mine.keys() == again.keys()
        assert [key for key in mine if not torch.equal(mine[key][1], again[key][1])] == []


def test_a_plain_process_reads_it_and_trains_on(first: Path, tmp_path: Path) -> None:
    model = make(seed=7)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=first)
    model.load_state_dict(state)
    whole = contents(first)
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, whole[key])] == []
    straight = cases.run({"dp": 2}, lambda m, mesh: Job(m, mesh).train(0, 3), make())[0]
    model_of_two = copy.deepcopy(model)

    def body(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh)
        checkpoint.load(first, job.pipe, job.optimizer)
        return job.train(2, 3)

    (loss,), (norm,) = cases.run({"dp": 2}, body, model_of_two)[0]
    assert loss == pytest.approx(straight[0][2], rel=1e-5)  # tp has other rounding errors
    assert norm == pytest.approx(straight[1][2], rel=1e-5)


def test_export_gives_the_whole_model(first: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    checkpoint.export(first, tmp_path / "model.safetensors")
    model, whole = make(seed=7), contents(first)
    safetensors.load_model(model, tmp_path / "model.safetensors")
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, whole[key])] == []
    assert model.head.weight is model.token.weight


def _in_processes(path: str) -> list[str]:
    """Over a DeviceMesh whose ranks are not in the order of its axis."""
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    mesh = ringcomm.init_mesh(DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("dp", "tp")))
    job = Job(make(), mesh, 2)
    job.train(0, 1)
    before = parts(job)
    checkpoint.save(path, job.pipe, job.optimizer, rank=mesh.comm.rank)
    again = Job(make(seed=7), mesh, 1)
    assert checkpoint.load(path, again.pipe, again.optimizer) == {"rank": mesh.comm.rank}
    after = parts(again)
    assert before.keys() == after.keys()
    whole = contents(Path(path))
    return [key for key in before if not torch.equal(before[key][1], after[key][1])] + differing(whole, after)


@pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory between processes")
def test_a_device_mesh_in_processes(tmp_path: Path) -> None:
    assert torch_ranks.run(_in_processes, str(tmp_path / "x"), world_size=2) == [[]] * 2


# ---- buffers, other state, values of each rank --------------------------------------------------------------------


def seen(job: Job) -> dict[str, tuple[float, int]]:
    """By name, of the modules of this rank."""
    return {
        name: (float(m.total), m.calls) for name, m in job.pipe.named_modules() if "total" in getattr(m, "_buffers", ())
    }


def test_buffers_and_other_state_of_each_stage(tmp_path: Path) -> None:
    axes = {"pp": 2, "dp": 2}

    def save(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh, 2, broadcast_buffers=False)
        job.train(0, 2)
        checkpoint.save(tmp_path / "x", job.pipe, job.optimizer, rank=mesh.comm.rank, step=2)
        return seen(job)

    def load(model: Net, mesh: Any) -> Any:
        job = Job(model, mesh, 1)
        return checkpoint.load(tmp_path / "x", job.pipe, job.optimizer), seen(job)

    before = cases.run(axes, save, seen=True)
    assert {name for each in before for name in each} == {f"blocks.{i}.seen" for i in range(cases.LAYERS)}
    assert before[0] != before[1]  # the data parallel ranks have seen other inputs
    again = cases.run(axes, load, seed=7, seen=True)
    assert [each for _, each in again] == before
    assert [extra for extra, _ in again] == [{"rank": rank, "step": 2} for rank in range(4)]
    everything = {**before[0], **before[2]}  # the first ranks of both stages
    for other in ({"dp": 4}, {"dp": 2, "pp": 2}, {"pp": 4}, {"tp": 2}):
        for extra, found in cases.run(other, load, seed=7, seen=True):
            assert found == {name: everything[name] for name in found}
            assert extra == {"rank": checkpoint.ByRank({rank: rank for rank in range(4)}), "step": 2}
            assert isinstance(extra["rank"], checkpoint.ByRank)


# ---- what is refused ----------------------------------------------------------------------------------------------


def refused(axes: dict[str, int], body: Any, model: Net | None = None) -> list[BaseException]:
    def each(model: Net, mesh: Any) -> BaseException:
        with pytest.raises(RingcommError) as caught:
            body(model, mesh)
        mesh.comm.barrier()  # no rank is left behind
        return caught.value

    return cases.run(axes, each, model)


def test_another_model_is_refused_on_every_rank_and_nothing_changes(first: Path, tmp_path: Path) -> None:
    axes = {"pp": 2, "tp": 2}

    def load(model: Net, mesh: Any) -> None:
        job = Job(model, mesh)
        before = parts(job)
        try:
            checkpoint.load(first, job.pipe, job.optimizer)
        finally:
            after = parts(job)
            assert [key for key in before if not torch.equal(before[key][1], after[key][1])] == []

    wider = make(seed=7)
    wider.blocks[3].up, wider.blocks[3].down = nn.Linear(16, 36), nn.Linear(36, 16)
    for error in refused(axes, load, wider):  # the second stage alone
        assert isinstance(error, ShapeError)
        assert "blocks.3.up.weight of shape (32, 16), expected (36, 16)" in str(error)
    more = make(seed=7)
    more.blocks[0].add_module("gate", nn.Linear(2, 2, bias=False))
    for error in refused(axes, load, more):
        assert "a checkpoint without blocks.0.gate" in str(error)
    fewer = make(seed=7)
    fewer.blocks[3].norm = nn.Identity()
    for error in refused(axes, load, fewer):
        assert "blocks.3.norm" in str(error)
        assert "which the module does not have" in str(error)


def test_a_rank_that_fails_lets_all_fail(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.Loader.read

    def broken(self: Any, *args: Any) -> None:
        if self.rank == 3:
            raise OSError("no disk")
        read(self, *args)

    monkeypatch.setattr(checkpoint.Loader, "read", broken)

    def load(model: Net, mesh: Any) -> None:
        job = Job(model, mesh)
        checkpoint.load(first, job.pipe, job.optimizer)

    for error in refused({"pp": 2, "tp": 2}, load):
        assert "rank 3 got OSError (no disk)" in str(error)


def test_stages_with_other_groups_are_refused(tmp_path: Path) -> None:
    def save(model: Net, mesh: Any, how: str) -> None:
        job = Job(model, mesh, make_optimizer=lambda m: torch.optim.AdamW(trained(m), lr=1e-2))
        if how == "settings":
            job.optimizer.param_groups[0]["lr"] = 0.1 * (1 + mesh.coordinates["pp"])
        elif mesh.coordinates["pp"]:
            job.optimizer.param_groups.append({**job.optimizer.param_groups[0], "params": []})
        checkpoint.save(tmp_path / "x", job.pipe, job.optimizer)

    for error in refused({"pp": 2}, lambda m, mesh: save(m, mesh, "settings")):
        assert isinstance(error, InvalidArgumentError)
        assert "other hyperparameters in the optimizer's group 0" in str(error)
    for error in refused({"pp": 2}, lambda m, mesh: save(m, mesh, "number")):
        assert "expected the same groups on every rank of a mesh" in str(error)
    assert not (tmp_path / "x").exists()


def test_optimizers_that_know_the_names_of_their_parameters(tmp_path: Path) -> None:
    """The names differ between the stages, and are not hyperparameters."""

    def job_of(model: Net, mesh: Any) -> Job:
        def named(pipe: nn.Module) -> torch.optim.Optimizer:
            params = [(name, p) for name, p in pipe.named_parameters() if p.requires_grad]
            return torch.optim.AdamW(params, lr=1e-2)

        return Job(model, mesh, 1, make_optimizer=named)

    def save(model: Net, mesh: Any) -> Any:
        job = job_of(model, mesh)
        job.train(0, 1)
        checkpoint.save(tmp_path / "x", job.pipe, job.optimizer)
        return parts(job)

    def load(model: Net, mesh: Any) -> list[str]:
        job = job_of(model, mesh)
        names = job.optimizer.param_groups[0]["param_names"]
        checkpoint.load(tmp_path / "x", job.pipe, job.optimizer)
        assert job.optimizer.param_groups[0]["param_names"] == names
        return differing(contents(tmp_path / "x"), parts(job))

    assert cases.run({"pp": 2}, save)
    assert cases.run({"dp": 2}, load, make(seed=7)) == [[], []]


def test_a_cut_model_without_its_mesh_is_refused(tmp_path: Path) -> None:
    def over_data_alone(model: Net, mesh: Any) -> None:
        cases.parallelize(model, cases.PLAN, mesh["tp"])
        ringcomm.shard(model, cases.adamw(model), 1, mesh["dp"])
        checkpoint.save(tmp_path / "x", model)

    for error in refused({"dp": 2, "tp": 2}, over_data_alone):
        assert "mesh=mesh" in str(error)

    def without_a_pipeline(model: Net, mesh: Any) -> None:
        optimizer = cases.adamw(model)
        ringcomm.shard(model, optimizer, 1, mesh=mesh)
        checkpoint.save(tmp_path / "x", model, optimizer)

    for error in refused({"dp": 2, "pp": 2}, without_a_pipeline):
        assert "along a mesh axis" in str(error)


def test_uncut_optimizer_state_of_cut_parameters_is_refused(tmp_path: Path) -> None:
    def job_of(model: Net, mesh: Any) -> Job:
        return Job(model, mesh, make_optimizer=lambda m: torch.optim.Adafactor(trained(m), lr=1e-2))

    def save(model: Net, mesh: Any) -> None:
        job = job_of(model, mesh)
        job.train(0, 1)
        checkpoint.save(tmp_path / "x", job.pipe, job.optimizer)

    def load(model: Net, mesh: Any) -> None:
        job = job_of(model, mesh)
        checkpoint.load(tmp_path / "x", job.pipe, job.optimizer)

    for error in refused({"tp": 2}, save):
        assert isinstance(error, UnsupportedError)
        assert "which is cut over the ranks" in str(error)
    cases.run({"pp": 2}, save)
    cases.run({"pp": 4}, load, make(seed=7))
    for error in refused({"tp": 2}, load, make(seed=7)):
        assert "which is cut over the ranks" in str(error)
