"""Training over several hosts gives the bits of one host, where the hosts' sums are added in canonical order."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import checkpoint
from tests.mesh.test_training import Result, same, trained
from tests.support.choice import choose
from tests.support.mesh import cases
from tests.support.mesh.cases import Job, Net, make
from tests.support.training import parity
from tests.support.training.parity import Case, differences, train_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
HOSTS = ([2, 2], [2, 1, 1])


@contextmanager
def spread(hosts: list[int] | None) -> Iterator[None]:
    """`ringcomm.run_ranks` inside runs its ranks on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringcomm, "run_ranks", functools.partial(ringcomm.run_ranks, hosts=hosts))
        yield


# ---- meshes ------------------------------------------------------------------------------------------------------


def every_stage(model: Net, mesh: Any) -> list[Result]:
    return [trained(Job(copy.deepcopy(model), mesh, stage)) for stage in range(4)]


@functools.cache
def together(axes: tuple[tuple[str, int], ...]) -> list[list[Result]]:
    return cases.run(dict(axes), every_stage)


AXES = [
    *((("dp", 4),), (("pp", 2), ("dp", 2)), (("dp", 2), ("tp", 2)), (("replicate", 2), ("shard", 2))),
    *((("pp", 4),), (("tp", 4),), (("dp", 2), ("cp", 2))),
]


# Those of two axes: they have what those of one have.
@pytest.mark.parametrize(
    "axes", choose(AXES, AXES[2:4]), ids=lambda axes: "-".join(f"{name}{extent}" for name, extent in axes)
)
def test_every_mesh_and_stage(axes: tuple[tuple[str, int], ...]) -> None:
    with spread([2, 2]):
        apart = cases.run(dict(axes), every_stage)
    for one, several in zip(together(axes), apart, strict=True):
        assert all(same(a, b) for a, b in zip(one, several, strict=True))


def test_three_hosts() -> None:
    axes = (("dp", 4),)
    with spread([2, 1, 1]):
        apart = cases.run(dict(axes), every_stage)
    assert all(
        same(a, b) for one, more in zip(together(axes), apart, strict=True) for a, b in zip(one, more, strict=True)
    )


# ---- models with every difficulty, in every precision ----------------------------------------------------------------

CASES = [
    Case(world_size=4, accumulate=2, clip="2", tied=True, checkpoint=True),
    Case(world_size=4, precision="bf16", uneven=True, frozen=True, clip="inf"),
    Case(world_size=4, precision="fp16", clip="2", some_ranks=True),
    Case(world_size=3, precision="autocast", unused=True, batch_norm=True),
]


@pytest.mark.parametrize("case", choose(CASES, [CASES[0], CASES[3]]), ids=str)
def test_parity_of_the_stages(case: Case) -> None:
    runs = [{"stage": stage, "bucket_mb": 0.001} for stage in range(4)]
    one = train_ranks(case, runs, steps=2)
    with spread([2, 2] if case.world_size == 4 else [2, 1]):
        several = train_ranks(case, runs, steps=2)
    for a, b in zip(one, several, strict=True):
        for rank, (alone, apart) in enumerate(zip(a, b, strict=True)):
            assert differences(alone, apart) == [], rank


def test_a_wire_type_rounds_alike_on_every_rank() -> None:
    """Stages 0 to 3 need not agree with one host then, but every rank ends with the same parameters."""
    case = Case(world_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringcomm, "run_ranks", functools.partial(ringcomm.run_ranks, hosts=[2, 2], wire_dtype="bfloat16"))
        rounded = train_ranks(case, [{"stage": 0}, {"stage": 2}], steps=2)
    exact = train_ranks(case, [{"stage": 0}], steps=2)[0]
    for results in rounded:
        assert all(differences(results[0], each, losses=False) == [] for each in results)
    assert differences(rounded[0][0], exact[0], losses=False) != []
    torch.testing.assert_close(rounded[0][0].losses, exact[0].losses, rtol=0.05, atol=0.05)


# ---- DistributedDataParallel -------------------------------------------------------------------------------------


def ddp(comm: ringcomm.Communicator, models: list[Net]) -> list[torch.Tensor]:
    model = models[comm.rank]
    wrapped = ringcomm.DistributedDataParallel(model, comm=comm, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        tokens = parity.tokens_of(Case(world_size=4), comm.rank, step, 0)
        parity.loss_of(wrapped(tokens, comm.rank), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_distributed_data_parallel(hosts: list[int]) -> None:
    def models() -> list[Net]:  # made by one thread: torch's generator is shared
        return [parity.net(Case(world_size=4)) for _ in range(4)]

    one = ringcomm.run_ranks(ddp, 4, models(), timeout=30)
    several = ringcomm.run_ranks(ddp, 4, models(), hosts=hosts, timeout=30)
    for mine in several:
        assert parity.differences_of(mine, one[0]) == []


# ---- checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_hosts_goes_on_on_one(tmp_path: Path) -> None:
    def first(model: Net, mesh: Any) -> None:
        assert mesh.comm.hosts == [[0, 1], [2, 3]]
        job = Job(model, mesh, 3)
        job.train(0, 2)
        checkpoint.save(tmp_path / "two", job.pipe, job.optimizer, step=2)

    def second(model: Net, mesh: Any) -> Result:
        job = Job(model, mesh, 3)
        checkpoint.load(tmp_path / "two", job.pipe, job.optimizer)
        return Result(job.train(2, 4), job.parts())

    def whole(model: Net, mesh: Any) -> Result:
        job = Job(model, mesh, 3)
        job.train(0, 2)
        return Result(job.train(2, 4), job.parts())

    axes = {"dp": 4}
    with spread([2, 2]):
        cases.run(axes, first)
    wanted = cases.run(axes, whole)
    resumed = cases.run(axes, second, make(seed=9))
    assert all(same(a, b) for a, b in zip(wanted, resumed, strict=True))
