"""Named axes over the ranks: who is where, a communicator for each axis, torch's DeviceMesh, and training over them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.comm.mesh import Mesh, init_mesh
from ringcomm.errors import InvalidArgumentError, MismatchError
from ringcomm.modules.shard_spec import part_of
from ringcomm.tensor_parallel.plan import parallelize
from tests.support import torch_ranks
from tests.support.mesh.tensor_cases import difference, on_ranks, part, tensor_of

pytestmark = pytest.mark.usefixtures("one_thread")


def members(comm: Any, me: int) -> list[int]:
    """The numbers that the ranks of a communicator give, in its order."""
    return comm.all_gather(torch.tensor([me])).flatten().tolist()


def groups(extents: dict[str, int], axes: tuple[str, ...], rank: int) -> list[int]:
    """The ranks that differ from one along these axes alone."""
    names = [*extents]
    places = list(torch.cartesian_prod(*(torch.arange(n) for n in extents.values())).view(-1, len(names)).tolist())
    mine = places[rank]
    fixed = [i for i, name in enumerate(names) if name not in axes]
    return [number for number, place in enumerate(places) if all(place[i] == mine[i] for i in fixed)]


@pytest.mark.parametrize(
    "extents", [{"pp": 2, "dp": 1, "tp": 3}, {"dp": 2, "tp": 2}, {"replicate": 2, "shard": 2, "tp": 2}, {"tp": 3}]
)
def test_axes_and_coordinates(extents: dict[str, int]) -> None:
    world_size = 1
    for extent in extents.values():
        world_size *= extent

    def rank(comm: Any) -> None:
        mesh = init_mesh(extents, comm)
        me, below = comm.rank, 1
        for name, extent in reversed(extents.items()):
            assert mesh.coordinates[name] == me // below % extent
            assert mesh.size(name) == extent
            below *= extent
        for name in extents:
            assert members(mesh[name], me) == groups(extents, (name,), me)
            assert mesh[name].rank == mesh.coordinates[name]
        names = tuple(extents)
        for asked in (names, names[::-1], names[:2], names[1:]):
            if asked:
                assert members(mesh[asked], me) == groups(extents, asked, me)
        assert mesh[names] is mesh[names[::-1]]  # made once, in the order of the mesh
        assert mesh.size("else") == 1
        assert f"rank {me} at {tuple(mesh.coordinates[name] for name in extents)}" in repr(mesh)
        mesh.close()
        assert members(comm, me) == list(range(world_size))  # the ranks' own communicator stays

    on_ranks(rank, world_size)


def test_no_axes_are_this_rank_alone() -> None:
    def rank(comm: Any) -> tuple[int, float]:
        mesh = init_mesh(dp=3, comm=comm)
        alone = mesh[()]
        x = torch.full((4,), float(comm.rank))
        alone.all_reduce(x)
        mesh.close()
        return alone.world_size, float(x[0])

    assert on_ranks(rank, 3) == [(1, 0.0), (1, 1.0), (1, 2.0)]


def test_minus_one_takes_the_remaining_ranks() -> None:
    def rank(comm: Any) -> list[tuple[int, ...]]:
        meshes = [init_mesh(dp=-1, tp=2, comm=comm), init_mesh({"pp": 4, "dp": -1}, comm), init_mesh(dp=-1, comm=comm)]
        shapes = [mesh.shape for mesh in meshes]
        for mesh in meshes:
            mesh.close()
        return shapes

    assert on_ranks(rank, 4) == [[(2, 2), (4, 1), (4,)]] * 4


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp": 2, "tp": 2}, "dp=2, tp=2"),
        ({"dp": -1, "tp": 2}, "dp=-1, tp=2"),
        ({"dp": -1, "tp": -1}, "dp=-1, tp=-1"),
        ({"dp": 0, "tp": -1}, "dp=0, tp=-1"),
        ({"dp": -3, "tp": -1}, "dp=-3, tp=-1"),
        ({}, "no axes"),
        ({"dp": 3.0}, "dp=3.0"),
        ({"dp": "3"}, "dp='3'"),
    ],
)
def test_extents_that_do_not_fit_the_world_size(sizes: dict[str, int], said: str) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(InvalidArgumentError) as found:
            init_mesh(sizes, comm)
        assert str(found.value) == (
            f"init_mesh: rank {comm.rank} got {said}, expected whole numbers whose product is the 3 ranks; change "
            "a size, or pass one of them as -1"
        )

    on_ranks(rank, 3)


@pytest.mark.parametrize(
    ("others", "said"), [({"tp": 3, "dp": 1}, "tp=3, dp=1"), ({"dp": 1, "tp": -1}, "dp=1, tp=-1"), ({"dp": 2}, "dp=2")]
)
def test_ranks_that_ask_for_different_axes_are_told_at_once(others: dict[str, int], said: str) -> None:
    def rank(comm: Any) -> str:
        with pytest.raises((MismatchError, InvalidArgumentError)) as found:
            init_mesh(others if comm.rank == 1 else {"dp": 1, "tp": 3}, comm)
        return str(found.value)

    refused = on_ranks(rank, 3)
    assert f"rank 1 got {said}" in refused[1]
    for number in (0, 2):
        assert refused[number] == (
            f"init_mesh: rank {number} got dp=1, tp=3 where rank 1 has {said}, expected the same axes in the same "
            "order; pass the same on every rank"
        )


def test_an_unknown_axis_is_refused() -> None:
    def rank(comm: Any) -> None:
        mesh = init_mesh(dp=3, comm=comm)
        for asked in ("tp", ("dp", "tp")):
            with pytest.raises(
                InvalidArgumentError, match=f"mesh: rank {comm.rank} got the axis 'tp', expected one of dp"
            ):
                mesh[asked]
        mesh.close()

    on_ranks(rank, 3)


# ---- torch's DeviceMesh ------------------------------------------------------------------------------------------


def over_device_mesh() -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = init_mesh(device_mesh)
    assert mesh.device_mesh is device_mesh
    me = dist.get_rank()
    found = [mesh.coordinates, members(mesh["dp"], me), members(mesh["tp"], me), members(mesh["tp", "dp"], me)]
    alone = torch.full((2,), float(me))
    mesh[()].all_reduce(alone)
    model, whole = network(), network()
    loss(whole, 0).backward()
    parallelize(model, PLAN, mesh["tp"])
    loss(model, 0).backward()
    expected = dict(whole.named_parameters())
    worst = max(difference(p.grad, part(expected[name].grad, p)) for name, p in model.named_parameters())
    mesh.close()
    return [*found, float(alone[0]), worst < 1e-12]


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_over_a_device_mesh(backend: str) -> None:
    for number, found in enumerate(torch_ranks.run(over_device_mesh, world_size=4, backend=backend)):
        dp, tp = divmod(number, 2)
        assert found[0] == {"dp": dp, "tp": tp}
        assert found[1:] == [[tp, tp + 2], [2 * dp, 2 * dp + 1], [0, 1, 2, 3], float(number), True]


def without_names() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(InvalidArgumentError) as found:
        init_mesh(init_device_mesh("cpu", (4,)))
    return str(found.value)


def test_a_device_mesh_without_names() -> None:
    for said in torch_ranks.run(without_names, world_size=4):
        assert said.endswith("got a DeviceMesh without names, expected names for its axes; make it with mesh_dim_names")


# ---- training ----------------------------------------------------------------------------------------------------

PLAN: dict[str, Any] = {"0": "colwise", "2": "rowwise"}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.LayerNorm(6)).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += tensor_of(*p.shape, seed=i, dtype=dtype) / 4
    return model


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    p = next(model.parameters())
    return (
        (model(tensor_of(4, 6, seed=seed, dtype=p.dtype)) - tensor_of(4, 6, seed=50 + seed, dtype=p.dtype))
        .square()
        .mean()
    )


def step(model: nn.Module, optimizer: Any, clip: Any, losses: list[int]) -> float:
    optimizer.zero_grad()
    for seed in losses:
        (loss(model, seed) / len(losses)).backward()
    norm = float(clip(model.parameters(), 0.05))
    optimizer.step()
    return norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "extents", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"replicate": 2, "shard": 2, "tp": 2}, {"shard": 2, "tp": 1}]
)
def test_stages_over_a_mesh(extents: dict[str, int], stage: int) -> None:
    """Data parallel ranks average, tensor parallel ones have parts; the norm counts every parameter once."""
    world_size = 1
    for extent in extents.values():
        world_size *= extent
    shares = world_size // extents["tp"]
    whole = network()
    models = [copy.deepcopy(whole) for _ in range(world_size)]
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    norms = [
        step(whole, optimizer, torch.nn.utils.clip_grad_norm_, [shares * i + j for j in range(shares)])
        for i in range(3)
    ]
    assert min(norms) > 0.05
    expected = dict(whole.named_parameters())

    def rank(comm: Any) -> tuple[list[float], float]:
        mesh = init_mesh(extents, comm)
        share = 0
        for name, extent in extents.items():
            share = share if name == "tp" else share * extent + mesh.coordinates[name]
        model = parallelize(models[comm.rank], PLAN, mesh["tp"])
        wholes = {name: part(expected[name], p) for name, p in model.named_parameters()}
        model, sharded = ringcomm.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage, mesh=mesh)
        found = [step(model, sharded, ringcomm.clip_grad_norm_, [shares * i + share]) for i in range(3)]
        with ringcomm.whole(model):
            worst = max(difference(p, wholes[name]) for name, p in model.named_parameters())
        mesh.close()
        return found, worst

    for found, worst in on_ranks(rank, world_size):
        assert found == pytest.approx(norms, rel=1e-6)
        assert worst < 1e-9


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(stage: int) -> None:
    models = [network(torch.float32) for _ in range(4)]

    def rank(comm: Any) -> tuple[list[float], list[bool]]:
        mesh = init_mesh(dp=2, tp=2, comm=comm)
        model = parallelize(models[comm.rank], PLAN, mesh["tp"])
        cut = dict(model.named_parameters())["0.weight"]
        assert part_of(cut).dim == 0
        if comm.rank == 3:  # in a part that the other ranks do not have
            cut.register_hook(lambda g: g * (float("inf") if overflow[0] else 1))
        overflow = [False]
        model, optimizer = ringcomm.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, mesh=mesh)
        scaler, scales, moved = ringcomm.GradScaler(init_scale=8.0), [], []
        for overflow[0] in (False, True, False):
            with ringcomm.whole(model):
                before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(loss(model, mesh.coordinates["dp"])).backward()
            scaler.step(optimizer)
            scaler.update()
            with ringcomm.whole(model):
                pairs = zip(before, model.parameters(), strict=True)
                moved.append(any(not torch.equal(a, b) for a, b in pairs))
                assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
            scales.append(scaler.get_scale())
        mesh.close()
        return scales, moved

    assert on_ranks(rank, 4) == [([8.0, 4.0, 4.0], [True, False, True])] * 4


def test_a_mesh_knows_who_averages_and_who_counts() -> None:
    def rank(comm: Any) -> tuple[int, Any, bool]:
        mesh = init_mesh(replicate=2, shard=2, tp=2, comm=comm)
        assert isinstance(mesh, Mesh)
        shards, replicas = mesh.data
        assert replicas is not None
        found = members(shards, comm.rank), members(replicas, comm.rank), mesh.counts
        mesh.close()
        return found

    for number, (shards, replicas, counts) in enumerate(on_ranks(rank, 8)):
        extents = {"replicate": 2, "shard": 2, "tp": 2}
        assert shards == groups(extents, ("shard",), number)
        assert replicas == groups(extents, ("replicate",), number)
        assert counts == (number % 2 == 0)


def test_the_error_about_invalid_axes_says_what_to_pass() -> None:
    def rank(comm: Any) -> None:
        mesh = init_mesh({"dp": 2}, comm)
        for axes, said in [
            (comm, r"got axes=a value of type Communicator, .* pass this communicator as comm="),
            (mesh, r"got axes=a value of type Mesh, expected sizes by name"),
            (2, r"got axes=2, expected sizes by name .* or keywords such as dp=2"),
        ]:
            with pytest.raises(InvalidArgumentError, match=said):
                init_mesh(axes, dp=2)

    ringcomm.run_ranks(rank, 2)
