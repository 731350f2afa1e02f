"""Stock FSDP2 and DDP over a Gloo process group, whose bytes a communicator moves."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ringcomm
from ringcomm.data_parallel import hooks
from ringcomm.tools.bench.check import tree_sum
from tests.support import torch_ranks
from tests.support.choice import slow

WORLD = 3
STEPS = 3


class Net(nn.Module):
    """Layers whose number of rows is not divisible by three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 17), nn.Linear(17, 10)])
        self.norm = nn.LayerNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).float().pow(3).mean()


def counted(comm: ringcomm.Communicator) -> Counter[str]:
    """How often each collective is called from now on, and with what reduction."""
    counts: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts.update([name, *(f"{name}:{x}" for x in args if isinstance(x, str))])
            counts["async"] += bool(options.get("async_op"))
            return method(*args, **options)

        return call

    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(comm, name, counting(name, getattr(comm, name)))
    return counts


def steps(model: nn.Module, count: int = STEPS) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- FSDP2 -------------------------------------------------------------------------------------------------------


def sharded(case: str) -> nn.Module:
    model = net()
    policy = MixedPrecisionPolicy()
    if case == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "float16":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=case != "kept")
    fully_shard(model, mp_policy=policy)
    if case == "prefetch":
        model._set_unshard_async_op(True)
        model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    if case == "divided":
        for layer in [*model.layers, model]:
            layer.set_gradient_divide_factor(5.0)
    return model


def rank_trains_sharded(case: str) -> tuple[Any, ...]:
    plain, ours = sharded(case), sharded(case)
    for module in plain.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # the others are not in Gloo
    with ringcomm.Communicator.from_process_group() if case == "same group" else hooks.beside() as comm:
        counts = counted(comm)
        assert hooks.attach(ours, comm) is ours
        expected, found = steps(plain), steps(ours)
        pairs = list(zip(ours.parameters(), plain.parameters(), strict=True))
        values = [tuple(p.full_tensor().detach().clone() for p in pair) for pair in pairs]
        del ours, pairs
    return expected, found, values, counts


@pytest.mark.parametrize(
    ("case", "reduction"),
    [
        ("plain", "avg"),
        slow("kept", "avg"),
        slow("prefetch", "avg"),
        slow("same group", "avg"),
        slow("bfloat16", "avg"),
        ("divided", "premul_sum"),
        ("float16", "sum"),
    ],
)
def test_fsdp2_trains_as_over_gloo(case: str, reduction: str) -> None:
    tolerance = {"float16": 2e-2, "bfloat16": 1e-3}.get(case, 1e-5)
    for expected, found, values, counts in torch_ranks.run(rank_trains_sharded, case, backend="gloo"):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for ours, plain in values:
            torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
        assert not torch.equal(values[0][0], net().layers[0].weight), "nothing was trained"
        again = 0 if case == "kept" else 3
        assert counts["all_gather"] == STEPS * (4 + again)
        assert counts[f"reduce_scatter:{reduction}"] == counts["reduce_scatter"] == STEPS * 4
        assert counts["async"] == (counts["all_gather"] if case == "prefetch" else 0)


def rank_attaches_alone() -> list[float]:
    model = hooks.attach(sharded("plain"))
    found = steps(model)
    used = {module._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm for module in [*model.layers, model]}
    assert len(used) == 1
    (hook,) = used
    assert hook.comm.world_size == WORLD
    hook.comm.close()
    return found


def test_attach_makes_a_communicator_beside_the_group() -> None:
    plain = torch_ranks.run(rank_trains_sharded, "plain", backend="gloo")
    for found, (_, same, _, _) in zip(torch_ranks.run(rank_attaches_alone, backend="gloo"), plain, strict=True):
        assert found == same


def rank_is_refused() -> None:
    model, group = sharded("plain"), dist.group.WORLD
    with hooks.beside() as comm:
        reduce_scatter = hooks.ReduceScatter(comm)
        x = torch.ones(WORLD)
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.PRODUCT):
            with pytest.raises(ringcomm.UnsupportedError, match=f"got op {str(op)[len('RedOpType.') :]}, expected SUM"):
                reduce_scatter(x[:1], x, group, op)
        with pytest.raises(ringcomm.DeviceError, match="got device meta, expected cpu"):
            reduce_scatter.allocate((3,), dtype=torch.float32, device=torch.device("meta"))
        alone = comm.split(comm.rank)
        with pytest.raises(ringcomm.InvalidArgumentError, match="rank 0 of a communicator of 1 ranks got a process"):
            hooks.attach(model, alone)
        with pytest.raises(ringcomm.InvalidArgumentError, match="all_gather: rank 0 of a communicator of 1"):
            hooks.AllGather(alone)(x, x[:1], group)
        with pytest.raises(ringcomm.InvalidArgumentError, match="attach: got a Net, expected a model with modules of"):
            hooks.attach(net(), comm)
        alone.close()


def test_refusals_name_what_is_wrong() -> None:
    torch_ranks.run(rank_is_refused, backend="gloo")


# ---- the calls alone ---------------------------------------------------------------------------------------------


class Group:
    """The part of a process group that the hooks use."""

    def __init__(self, comm: ringcomm.Communicator) -> None:
        self.rank, self.size = (lambda: comm.rank), (lambda: comm.world_size)


@pytest.mark.parametrize("async_op", [False, True])
def test_both_calls_in_memory_of_the_communicator(async_op: bool) -> None:
    cpu = torch.device("cpu")

    def rank(comm: ringcomm.Communicator) -> None:
        all_gather, reduce_scatter = hooks.AllGather(comm), hooks.ReduceScatter(comm)
        whole = all_gather.allocate((6,), dtype=torch.float32, device=cpu)
        mine = whole[2 * comm.rank :][:2].fill_(comm.rank + 1)
        work = all_gather(whole, mine, Group(comm), async_op)
        assert isinstance(work, dist.Work) == async_op
        if work is not None:
            assert work.wait()
            assert work.is_completed()
        assert whole.tolist() == [1, 1, 2, 2, 3, 3]
        ops = [(dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1), (dist.ReduceOp(dist.ReduceOp.AVG), 1)]
        for op, times in [*ops, (dist.ReduceOp.PREMUL_SUM(0.5), 1.5)]:
            part = reduce_scatter.allocate((2,), dtype=torch.float32, device=cpu)
            work = reduce_scatter(part, whole, Group(comm), op, async_op)
            if work is not None:
                work.wait()
            assert part.tolist() == [times * (comm.rank + 1)] * 2

    ringcomm.run_ranks(rank, WORLD, ranks="threads", timeout=30)


def test_memory_is_lent_once_at_a_time() -> None:
    with ringcomm.init(0, 1) as comm:
        lent, cpu = [hooks.AllGather(comm)], torch.device("cpu")

        def take(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return lent[0].allocate((count,), dtype=dtype, device=cpu)

        first, second = take(100).fill_(1), take(100).fill_(2)
        assert first.data_ptr() != second.data_ptr()
        assert first.eq(1).all()
        address, view = first.data_ptr(), first[10:20]
        del first
        assert take(100).data_ptr() != address, "a view of it is alive"
        del view
        again = take(200, torch.bfloat16)  # as many bytes
        assert again.data_ptr() == address
        assert again.dtype == torch.bfloat16
        assert take(101).data_ptr() != address
        assert take(0).numel() == 0
        kept = take(50).fill_(3)
        lent.clear()
        gc.collect()
    assert kept.eq(3).all(), "memory outlives its hook and its communicator"


# ---- DDP ---------------------------------------------------------------------------------------------------------


def rank_averages() -> tuple[torch.Tensor, torch.Tensor]:
    model = hooks.attach(nn.parallel.DistributedDataParallel(net()))
    averaged = torch.optim.swa_utils.AveragedModel(model)  # a deep copy
    steps(model)
    averaged.update_parameters(model)
    x = torch.ones(2, 10)
    return averaged(x), model(x)


def test_a_copy_of_a_model_has_its_communicator() -> None:
    for averaged, now in torch_ranks.run(rank_averages, backend="gloo"):
        assert torch.equal(averaged, now)


def rank_trains_ddp(hook: str, bucket_cap_mb: float) -> tuple[Any, ...]:
    models = [nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb) for _ in range(2)]
    plain, ours = models
    with hooks.beside() as comm:
        counts = counted(comm)
        if hook == "attach":
            assert hooks.attach(ours, comm) is ours
        else:
            ours.register_comm_hook(comm, getattr(hooks, hook))
        before, means = [], []
        optimizer = torch.optim.Adam(ours.parameters(), lr=0.05)
        found = []
        for step in range(STEPS):
            local = copy.deepcopy(ours.module)
            loss_of(local, comm.rank, step).backward()
            before.append([p.grad for p in local.parameters()])
            optimizer.zero_grad()
            loss = loss_of(ours, comm.rank, step)
            loss.backward()
            means.append([p.grad.clone() for p in ours.parameters()])
            optimizer.step()
            found.append(loss.item())
        expected = steps(plain)
        values = [(p.detach(), q.detach()) for p, q in zip(ours.parameters(), plain.parameters(), strict=True)]
    return expected, found, values, before, means, counts


@pytest.mark.parametrize("bucket_cap_mb", [slow(25.0), 0.0005])
def test_ddp_gets_the_canonical_mean(bucket_cap_mb: float) -> None:
    ranks = torch_ranks.run(rank_trains_ddp, "attach", bucket_cap_mb, backend="gloo")
    for expected, found, values, _, means, counts in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for ours, plain in values:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        assert counts["all_reduce:avg"] == counts["async"]
        assert counts["all_reduce"] == STEPS if bucket_cap_mb > 1 else counts["all_reduce"] >= 2 * STEPS
        for step in range(STEPS):
            for i, mean in enumerate(means[step]):
                assert torch.equal(mean, tree_sum([before[step][i] for _, _, _, before, _, _ in ranks]) / WORLD)


@pytest.mark.parametrize(
    ("hook", "dtype"), [("fp16_all_reduce_hook", torch.float16), ("bf16_all_reduce_hook", torch.bfloat16)]
)
def test_ddp_over_16_bits(hook: str, dtype: torch.dtype) -> None:
    ranks = torch_ranks.run(rank_trains_ddp, hook, 25.0, backend="gloo")
    for _, _, _, _, means, counts in ranks:
        assert counts["all_reduce:avg"] == STEPS
        for i, mean in enumerate(means[0]):
            rounded = [before[0][i].to(dtype).float() for _, _, _, before, _, _ in ranks]
            assert torch.equal(mean, (tree_sum(rounded) / WORLD).to(dtype).float())


def rank_loses_a_peer() -> str:
    model = nn.parallel.DistributedDataParallel(net())
    with hooks.beside() as comm:
        hooks.attach(model, comm)
        loss = loss_of(model, comm.rank, 0)
        if comm.rank == 1:
            comm.abort("rank 1 has had enough")
            return ""
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        return str(error.value)


def test_backward_raises_what_went_wrong() -> None:
    said = torch_ranks.run(rank_loses_a_peer, backend="gloo")
    assert "rank 1 has had enough" in said[0]
    assert "rank 1 has had enough" in said[2]


def rank_attaches_ddp_alone() -> list[float]:
    model = hooks.attach(nn.parallel.DistributedDataParallel(net()))
    return steps(model)


def test_attach_makes_a_communicator_for_ddp() -> None:
    plain = torch_ranks.run(rank_trains_ddp, "attach", 25.0, backend="gloo")
    for found, (_, same, *_) in zip(torch_ranks.run(rank_attaches_ddp_alone, backend="gloo"), plain, strict=True):
        assert found == same


# ---- FSDP2 in a mesh of two dimensions ---------------------------------------------------------------------------


def rank_shards_twice() -> tuple[Any, ...]:
    """A mesh of one replica dimension and one of shards: a communicator for each row of it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found = []
    for attached in (False, True):
        model = net()
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh)
        if attached:
            time.sleep(0.3 * (dist.get_rank() in (0, 3)))  # first and last of the rows meet first, if rows can meet
            hooks.attach(model)
            hook = model._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
            counts = counted(hook.comm)
            row = mesh.get_group("shards")
            assert [int(rank) for rank in hook.comm.exchange(b"%d" % dist.get_rank())] == dist.get_process_group_ranks(
                row
            )
        else:
            for layer in [*model.layers, model]:
                layer.set_force_sum_reduction_for_comms(True)
        found.append((steps(model), [p.full_tensor().detach().clone() for p in model.parameters()]))
        if attached:
            hook.comm.close()
    return found, counts


def test_hsdp_shards_through_one_communicator_for_each_replica() -> None:
    for (expected, found), counts in torch_ranks.run(rank_shards_twice, world_size=4, backend="gloo"):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert counts["reduce_scatter"] == STEPS * 4


def rank_is_refused_resharding() -> None:
    model = fully_shard(net(), reshard_after_forward=2)
    with pytest.raises(ringcomm.UnsupportedError, match="attach: got reshard_after_forward=2 in FSDPNet"):
        hooks.attach(model)


def test_resharding_to_fewer_ranks_is_refused() -> None:
    torch_ranks.run(rank_is_refused_resharding, world_size=4, backend="gloo")
