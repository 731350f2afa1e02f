"""DistributedDataParallel under torch's arguments, methods and communication hooks; and NaiveDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm.comm.rendezvous import communicator_of
from ringcomm.data_parallel.ddp import DistributedDataParallel, NaiveDataParallel
from ringcomm.data_parallel.shard import restage, shard
from ringcomm.data_parallel.sync_batch_norm import SyncBatchNorm
from ringcomm.errors import CollectiveTimeoutError, InvalidArgumentError, UnsupportedError
from ringcomm.modules.precision import MixedPrecision
from tests.support import torch_ranks
from tests.support.choice import slow
from tests.support.same import same
from tests.support.seeded import seeded

Values = dict[str, torch.Tensor]
WORLD = 3


def make(seed: int = 0) -> nn.Sequential:
    layers = (nn.Linear(8, 24), nn.ReLU(), nn.BatchNorm1d(24), nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3))
    return seeded(nn.Sequential(*layers), seed)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return (model(batch(rank, step)).float() - 1).square().mean()


def train(
    model: nn.Module, rank: int, steps: int = 3, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return optimizer


def values(model: nn.Module) -> Values:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def on_ranks(fn: Callable[[Any], Any], world_size: int = WORLD) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=30)


# ---- arguments ---------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"device_ids": None, "output_device": "cpu", "dim": 0, "broadcast_buffers": True, "init_sync": True},
    {"bucket_cap_mb": None, "find_unused_parameters": True, "check_reduction": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [], "batched_grad_copy": True},
    {"mixed_precision": MixedPrecision(), "forward_sync_buffers": True, "device_mesh": None, "device_ids": ["cpu"]},
]


def test_arguments_that_change_no_bits() -> None:
    base = make()
    models = [[copy.deepcopy(base) for _ in OPTIONS] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> list[Values]:
        found = []
        for options, module in zip(OPTIONS, models[comm.rank], strict=True):
            train(DistributedDataParallel(module, comm, **options), comm.rank)
            found.append(values(module))
        return found

    results = on_ranks(rank)
    assert not same(results[0][0], values(base))
    for found in results:
        for each in found:
            assert same(
                {k: v for k, v in each.items() if "." in k and "running" not in k},
                {k: v for k, v in results[0][0].items() if "running" not in k},
            )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"delay_all_reduce_named_params": []}, "delay_all_reduce_named_params"),
        ({"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))}, "param_to_hook_all_reduce"),
        ({"bucket_cap_mb_list": [1, 2]}, "bucket_cap_mb_list"),
        ({"dim": 1}, "dim"),
    ],
)
def test_arguments_that_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(UnsupportedError, match=f"got {told}="):
            DistributedDataParallel(make(), comm, **options)

    on_ranks(rank, 1)


def test_arguments_that_contradict() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        for options, told in (
            ({"device_ids": [0]}, r"device_ids=\['cuda:0'\] for a module on cpu"),
            ({"device_ids": ["cpu", "cpu"]}, "its one device"),
            ({"output_device": "cuda:1"}, r"output_device=\['cuda:1'\]"),
            ({"mixed_precision": torch.float16}, "expected a ringcomm.MixedPrecision"),
        ):
            with pytest.raises(InvalidArgumentError, match=told):
                DistributedDataParallel(make(), comm, **options)
        with pytest.raises(InvalidArgumentError, match="device_ids twice"):
            DistributedDataParallel(make(), ["cpu"], device_ids=["cpu"])

    on_ranks(rank, 1)


def test_whose_values_and_buffers_a_rank_gets() -> None:
    modules = [[make(seed) for _ in range(4)] for seed in range(WORLD)]
    for r, mine in enumerate(modules):
        for module in mine:
            module[2].running_mean.fill_(r)
    options = ({}, {"init_sync": False}, {"broadcast_buffers": False}, {"forward_sync_buffers": False})

    def rank(comm: ringcomm.Communicator) -> list[tuple[bool, float, bool]]:
        found = []
        for module, chosen in zip(modules[comm.rank], options, strict=True):
            own = module[0].weight.detach().clone()
            model = DistributedDataParallel(module, comm, **chosen)
            kept = torch.equal(module[0].weight, own)
            first = float(module[2].running_mean[0])
            loss_of(model, comm.rank, 0).backward()
            module[2].running_mean.fill_(comm.rank + 10)
            module[2].momentum = 0.0
            loss_of(model, comm.rank, 0).backward()
            found.append((kept, first, float(module[2].running_mean[0]) == comm.rank + 10))
        return found

    for r, found in enumerate(on_ranks(rank)):
        assert found[0] == (r == 0, 0.0, r == 0)
        assert found[1] == (True, float(r), r == 0)
        assert found[2] == (r == 0, float(r), True)
        assert found[3] == (r == 0, 0.0, True)


def test_state_dicts_have_torch_s_names_and_load() -> None:
    models = [make(seed) for seed in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> Values:
        model = DistributedDataParallel(models[comm.rank], comm)
        train(model, comm.rank, 1)
        state = values(model)
        train(model, comm.rank, 2)
        model.load_state_dict(state)
        assert same(values(model), state)
        return state

    assert list(on_ranks(rank)[0]) == [f"module.{name}" for name in make().state_dict()]


def test_require_backward_grad_sync_is_no_sync() -> None:
    models = [[make(), make()] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        by_flag, by_context = (DistributedDataParallel(module, comm) for module in models[comm.rank])
        assert by_flag.require_backward_grad_sync
        by_flag.require_backward_grad_sync = False
        loss_of(by_flag, comm.rank, 0).backward()
        own = by_flag.module[0].weight.grad.clone()
        by_flag.require_backward_grad_sync = True
        loss_of(by_flag, comm.rank, 1).backward()
        with by_context.no_sync():
            assert not by_context.require_backward_grad_sync
            loss_of(by_context, comm.rank, 0).backward()
        assert torch.equal(by_context.module[0].weight.grad, own)
        loss_of(by_context, comm.rank, 1).backward()
        assert torch.equal(by_context.module[0].weight.grad, by_flag.module[0].weight.grad)
        assert by_context.communication_seconds > 0

    on_ranks(rank)


def test_a_step_that_would_ignore_a_pass_inside_no_sync_is_refused() -> None:
    """Gradient accumulation that averages the first pass in place of the last: `p.grad` is the mean of the first."""
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = DistributedDataParallel(models[comm.rank], comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, comm.rank, 0).backward()
        with model.no_sync():
            loss_of(model, comm.rank, 1).backward()
        with pytest.raises(InvalidArgumentError, match="inside no_sync was not reduced"):
            optimizer.step()
        loss_of(model, comm.rank, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, comm.rank, 3).backward()
        optimizer.step()  # as in torch: without a mean, p.grad is this rank's own gradient

    on_ranks(rank)


@pytest.mark.parametrize("where", ["optimizer", "model", "gradient"])
def test_zeroing_a_gradient_discards_the_passes_inside_no_sync(where: str) -> None:
    models = [seeded(nn.Linear(2, 1, bias=False)) for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = DistributedDataParallel(models[comm.rank], comm)
        weight = model.module.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
            with model.no_sync():
                model(torch.full((1, 2), 10.0)).sum().backward()
            assert weight.grad is not None
            if where == "gradient":
                weight.grad.zero_()
            else:
                (model if where == "model" else optimizer).zero_grad(set_to_none=False)
            optimizer.step()  # nothing was ignored, so this is not refused
            model(torch.full((1, 2), 100.0 * (1 + comm.rank))).sum().backward()
            assert weight.grad.tolist() == [[200.0, 200.0]]
            weight.grad.mul_(0)  # what the user may do to a gradient of zero discards nothing
            with model.no_sync():
                model(torch.full((1, 2), 10.0)).sum().backward()
            weight.grad.mul_(2)
            model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
            assert weight.grad.tolist() == [[12.0, 12.0]]
            optimizer.zero_grad(set_to_none=False)

    on_ranks(rank)


def test_the_forward_pass_decides_whether_gradients_are_averaged() -> None:
    """As in torch: what is called inside of `no_sync` is the forward pass."""
    models = [[make(), make()] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        late, usual = (DistributedDataParallel(module, comm) for module in models[comm.rank])
        with late.no_sync():
            loss = loss_of(late, comm.rank, 0)
        loss.backward()
        with usual.no_sync():
            loss_of(usual, comm.rank, 0).backward()
        assert torch.equal(late.module[0].weight.grad, usual.module[0].weight.grad)
        loss = loss_of(late, comm.rank, 1)
        with late.no_sync():
            loss.backward()
        loss_of(usual, comm.rank, 1).backward()
        assert torch.equal(late.module[0].weight.grad, usual.module[0].weight.grad)
        comm.all_reduce(mean := usual.module[0].weight.grad.clone(), "avg")
        assert torch.equal(mean, usual.module[0].weight.grad)
        for model in (late, usual):
            model.zero_grad()
        loss = loss_of(late, comm.rank, 2)
        with late.no_sync():
            loss = loss + loss_of(late, comm.rank, 3)
        loss.backward()
        (loss_of(usual, comm.rank, 2) + loss_of(usual, comm.rank, 3)).backward()
        assert torch.equal(late.module[0].weight.grad, usual.module[0].weight.grad)

    on_ranks(rank)


def test_what_trainers_do_to_torch_s_wrapper_before_a_backward_pass() -> None:
    """Accelerate's trigger_sync_in_backward and Lightning's manual optimization."""
    models = [[make(), make()] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        triggered, plain = (DistributedDataParallel(module, comm) for module in models[comm.rank])
        with triggered.no_sync():
            loss = loss_of(triggered, comm.rank, 0)
        before = triggered.require_backward_grad_sync, triggered.require_forward_param_sync
        triggered.require_backward_grad_sync = triggered.require_forward_param_sync = True
        triggered.reducer._rebuild_buckets()
        triggered.reducer.prepare_for_backward([])
        loss.backward()
        assert before == (True, True)
        loss_of(plain, comm.rank, 0).backward()
        assert torch.equal(triggered.module[0].weight.grad, plain.module[0].weight.grad)
        triggered.reducer._delay_all_reduce()

    on_ranks(rank)


def test_what_lightning_reads_of_torch_s_wrapper_when_it_ends() -> None:
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        told = DistributedDataParallel(models[comm.rank], comm)._get_ddp_logging_data()
        sizes = [int(size) for size in told["bucket_sizes"].split(", ")]
        assert sum(sizes) == sum(p.nbytes for p in models[comm.rank].parameters())
        assert (told["rank"], told["world_size"], told["module_name"]) == (comm.rank, WORLD, "Sequential")
        assert not told.get("can_set_static_graph")  # which asks users to pass static_graph=True

    on_ranks(rank)


def test_ignored_parameters_may_have_other_shapes_on_each_rank() -> None:
    models = [make(seed) for seed in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> None:
        module = models[comm.rank]
        own = nn.Parameter(torch.ones(comm.rank + 1))
        module.register_parameter("own", own)
        module.register_buffer("own_buffer", torch.ones(comm.rank + 1))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own", "own_buffer"])
        model = DistributedDataParallel(module, comm)
        (loss_of(model, comm.rank, 0) + own.sum()).backward()
        assert torch.equal(own.grad, torch.ones(comm.rank + 1))
        comm.all_reduce(means := module[3].weight.grad.clone(), "avg")
        assert torch.allclose(means, module[3].weight.grad)

    on_ranks(rank)


def test_ignored_parameters_may_be_on_the_meta_device() -> None:
    class Sparse(nn.Module):
        """As a table of embeddings that another library keeps: without reset_parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(3, device="meta"))
            self.register_buffer("scale", torch.empty(3, device="meta"))

    def rank(comm: ringcomm.Communicator) -> None:
        module = make()
        module.append(Sparse())
        names = [f"{len(module) - 1}.{name}" for name in ("table", "scale")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        DistributedDataParallel(module, comm)
        assert module[-1].table.is_meta
        assert module[-1].scale.is_meta
        assert not module[0].weight.is_meta

    on_ranks(rank)


def test_an_optimizer_that_steps_during_backward_is_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = make()
    _apply_optimizer_in_backward(torch.optim.SGD, [module[3].weight], {"lr": 0.1})
    with pytest.raises(UnsupportedError, match=r"3\.weight with an optimizer that steps during backward"):
        ringcomm.run_ranks(lambda comm: DistributedDataParallel(module, comm), 1, ranks="threads")


def _attributes_of_torch_s_wrapper() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.new_group()
    over_mesh = DistributedDataParallel(make(), device_mesh=mesh)
    assert over_mesh.device_mesh is mesh
    assert over_mesh.process_group is mesh.get_group()
    assert DistributedDataParallel(make(), process_group=group).process_group is group
    model = DistributedDataParallel(make())
    assert model.process_group is dist.group.WORLD
    assert copy.deepcopy(model).process_group is dist.group.WORLD
    model._set_static_graph()
    assert model.static_graph


def test_attributes_of_torch_s_wrapper() -> None:
    torch_ranks.run(_attributes_of_torch_s_wrapper, world_size=2)


def test_an_attached_optimizer_goes_on_at_another_stage() -> None:
    models = [[make(), make()] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> tuple[Values, Values]:
        plain, moved = (DistributedDataParallel(module, comm) for module in models[comm.rank])
        train(plain, comm.rank, 3, train(plain, comm.rank, 2))
        _, optimizer = shard(moved, torch.optim.SGD(moved.parameters(), lr=0.1, momentum=0.5))
        assert optimizer is not None
        train(moved, comm.rank, 2, optimizer)
        restage(moved, optimizer, 3)
        train(moved, comm.rank, 3, optimizer)
        return values(plain), values(moved)

    for plain, moved in on_ranks(rank):
        assert same(plain, moved)


def test_mixed_precision_of_ours_and_of_torch() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    precisions = (
        MixedPrecision(torch.bfloat16, torch.float32),
        _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    models = [[make() for _ in range(3)] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> list[Values]:
        found = []
        for module, precision in zip(models[comm.rank][:2], precisions, strict=True):
            model = DistributedDataParallel(module, comm, mixed_precision=precision)
            train(model, comm.rank, 3)  # an optimizer that nobody has attached
            assert module[0].weight.dtype == torch.bfloat16
            found.append({name: x for name, x in values(model).items() if "running" not in name})
        module = models[comm.rank][2]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        shard(module, optimizer, 3, comm, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
        train(module, comm.rank, 3, optimizer)
        found.append({f"module.{name}": x for name, x in values(module).items() if "running" not in name})
        model = DistributedDataParallel(make(), comm, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
        assert {bucket.types.wire for bucket in model.buckets} == {torch.bfloat16}  # torch's None
        return found

    results = on_ranks(rank)
    for ours, theirs, sharded in results:
        assert same(ours, theirs)
        assert same(ours, sharded)
        assert same(ours, results[0][0])
        assert ours["module.0.weight"].dtype == torch.float32


# ---- communication hooks -----------------------------------------------------------------------------------------


def test_a_hook_of_one_s_own_sees_every_bucket_in_order() -> None:
    models = [[make(), make()] for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> tuple[list[Any], Values, Values]:
        plain, hooked = (DistributedDataParallel(m, comm, bucket_cap_mb=0.001) for m in models[comm.rank])
        seen: list[Any] = []

        def hook(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
            parts = bucket.gradients()
            assert [part.shape for part in parts] == [p.shape for p in bucket.parameters()]
            assert all(
                part.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr() for part in parts
            )
            state.append((bucket.index(), bucket.is_last(), [tuple(part.shape) for part in parts]))
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(comm.all_reduce(bucket.buffer(), "avg"))
            return done

        hooked.register_comm_hook(seen, hook)
        for model in (plain, hooked):
            train(model, comm.rank, 2)
        with pytest.raises(InvalidArgumentError, match="second hook"):
            hooked.register_comm_hook(None, hook)
        with pytest.raises(UnsupportedError, match="communication hook"):
            restage(hooked, None, 2)
        return seen, values(plain.module), values(hooked.module)

    for seen, plain, hooked in on_ranks(rank):
        count = len(seen) // 2
        assert [index for index, _, _ in seen] == [*range(count)] * 2
        assert count > 2
        assert [last for _, last, _ in seen[:count]] == [False] * (count - 1) + [True]
        assert sorted(shape for _, _, shapes in seen[:count] for shape in shapes) == sorted(
            tuple(p.shape) for p in make().parameters()
        )
        assert same(
            {k: v for k, v in plain.items() if "running" not in k},
            {k: v for k, v in hooked.items() if "running" not in k},
        )


def test_what_a_hook_must_return() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="int, expected a function"):
            DistributedDataParallel(make(), comm).register_comm_hook(None, 3)  # type: ignore[arg-type]
        model = DistributedDataParallel(make(), comm)
        short: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        short.set_result(torch.zeros(1))
        answers = iter([torch.zeros(1), short])
        model.register_comm_hook(None, lambda state, bucket: next(answers))  # type: ignore[arg-type, return-value]
        for told in (
            "1 elements from <lambda> for bucket 0, expected a torch.futures.Future",
            "expected a tensor of the",
        ):
            with pytest.raises(InvalidArgumentError, match=told):
                loss_of(model, comm.rank, 0).backward()

    on_ranks(rank)


def _hooked(kind: str, wrap: bool, compares: bool) -> tuple[Values, Values, Values, float]:
    """Parameters after a few steps: torch's wrapper and ours with a hook, and ours without; how much it compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    rank, rate = dist.get_rank(), 1.0
    found = []
    for wrapper in (nn.parallel.DistributedDataParallel if compares else None, DistributedDataParallel, None):
        model: Any = DistributedDataParallel(make()) if wrapper is None else wrapper(make())
        if wrapper is not None:
            state: Any = None
            home: Any = next(m for m in (default_hooks, powerSGD_hook) if hasattr(m, kind))
            if home is powerSGD_hook:
                state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
            hook = getattr(home, kind)
            model.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if wrap else hook)
        train(model, rank, 6)
        found.append({name: x for name, x in values(model.module).items() if "running" not in name})
        if wrapper is DistributedDataParallel and state is not None:
            rate = float(state.compression_stats()[0])
    return found[0], found[1], found[2], rate


@pytest.mark.parametrize("backend", ["gloo", "ringcomm"])
@pytest.mark.parametrize(
    ("kind", "wrap", "close"),
    [
        slow("allreduce_hook", False, 1e-6),
        ("allreduce_hook", True, 1e-3),
        slow("fp16_compress_hook", False, 1e-3),
        ("bf16_compress_hook", False, None),  # torch's wrapper wants NCCL for it
        ("powerSGD_hook", False, None),
    ],
)
def test_torch_s_hooks(kind: str, wrap: bool, close: float | None, backend: str) -> None:
    """Equal to torch's wrapper where the layout of the bucket does not matter; otherwise near the exact mean."""
    results = torch_ranks.run(_hooked, kind, wrap, close is not None, backend=backend, timeout_s=100)
    for theirs, ours, plain, rate in results:
        assert same(ours, results[0][1])
        assert not same(ours, plain) or kind == "allreduce_hook"
        if "powerSGD" in kind:
            assert rate > 1.5
        for name, x in ours.items():
            if close is not None:
                torch.testing.assert_close(x, theirs[name], rtol=close, atol=close)
            moved = float((plain[name] - make().state_dict()[name]).double().norm())
            if x.dtype.is_floating_point and "powerSGD" not in kind:
                assert float((x - plain[name]).double().norm()) <= 0.05 * moved, name


# ---- everything at once, over process groups ---------------------------------------------------------------------


def _uneven_with_one_batch_norm() -> tuple[Values, Values]:
    """Uneven inputs over the default group; and ours in the place of a batch norm, which torch's is not on a CPU."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        train(model, rank, 1 + rank % 2, optimizer)
    joined = values(model)
    theirs = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make()))
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        theirs(batch(rank, 0))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    normed = SyncBatchNorm.convert(make())  # over the default group
    model = DistributedDataParallel(normed, process_group=mesh.get_group())
    train(model, rank)
    return joined, values(model.module)


@pytest.mark.parametrize("backend", ["gloo", "ringcomm"])
def test_join_and_batch_norm_over_process_groups(backend: str) -> None:
    results = torch_ranks.run(_uneven_with_one_batch_norm, backend=backend, timeout_s=100)
    for joined, normed in results:
        assert same(joined, results[0][0])
        assert same(normed, results[0][1])
    single = make()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        (single(torch.cat([batch(rank, step) for rank in range(WORLD)])) - 1).square().mean().backward()
        optimizer.step()
    for name, x in single.state_dict().items():
        torch.testing.assert_close(results[0][1][name], x)


# ---- the parameter server ----------------------------------------------------------------------------------------


def test_the_naive_way_gives_the_same_mean() -> None:
    models = [[make(7 * r), make()] for r in range(WORLD)]
    models[0][0] = make()

    def rank(comm: ringcomm.Communicator) -> list[Values]:
        found = []
        for kind, module in zip((NaiveDataParallel, DistributedDataParallel), models[comm.rank], strict=True):
            model = kind(module, comm)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                with model.no_sync():
                    loss_of(model, comm.rank, step).backward()
                loss_of(model, comm.rank, step + 10).backward()
                optimizer.step()
            found.append({name: x for name, x in values(module).items() if "running" not in name})
        return found

    results = on_ranks(rank)
    for naive, ours in results:
        assert same(naive, results[0][0])
        for name, x in naive.items():
            torch.testing.assert_close(x, ours[name])


def test_the_naive_way_survives_a_backward_pass_that_raises() -> None:
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        model = NaiveDataParallel(models[comm.rank], comm)

        def fail(_: torch.Tensor) -> None:
            raise KeyError

        handle = models[comm.rank][0].weight.register_hook(fail)
        with pytest.raises(KeyError):
            loss_of(model, comm.rank, 0).backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        return models[comm.rank][0].weight.grad

    found = on_ranks(rank)
    assert all(torch.equal(each, found[0]) for each in found)
    assert found[0].any()


def _uneven_with_torchs_join(with_join: str, over_all: bool) -> list[torch.Tensor]:
    import torch.distributed as dist
    from torch.distributed.algorithms import Join

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = (
        Join([model], divide_by_initial_world_size=over_all)
        if with_join == "torch"
        else model.join(divide_by_initial_world_size=over_all)
    )
    for _ in range(2):
        with inside:
            for step in range((3, 0, 1)[rank]):
                optimizer.zero_grad()
                model(torch.full((2, 4), float(rank + step))).square().mean().backward()
                optimizer.step()
        inside = Join([model], divide_by_initial_world_size=over_all) if with_join == "torch" else model.join(over_all)
    with Join([model], enable=False) if with_join == "torch" else model.join(enable=False):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).mean().backward()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("over_all", [True, False])
def test_torchs_join_is_ours(over_all: bool) -> None:
    by_torch = torch_ranks.run(_uneven_with_torchs_join, "torch", over_all, timeout_s=100)
    ours = torch_ranks.run(_uneven_with_torchs_join, "ours", over_all, timeout_s=100)
    for found in (*by_torch, *ours[1:]):
        assert all(map(torch.equal, found, ours[0]))


# ---- a rank that does not come -----------------------------------------------------------------------------------


def _one_rank_steps_alone(wrap: str) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = nn.Linear(3, 3)
    if wrap == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, process_group=group)
    else:
        wrapped = shard(model, stage=int(wrap), comm=communicator_of(group, "test"))[0]
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError) as raised:
            wrapped(torch.ones(2, 3)).sum().backward()
        text = str(raised.value)
    dist.barrier()  # the others wait here, so that none has ended or closed
    return text


@pytest.mark.parametrize("wrap", ["ddp", slow("0"), "3"])
def test_calls_end_at_the_time_limit_of_the_process_group(wrap: str) -> None:
    """The communicator beside a group has its limit, not the half hour of one that is made alone."""
    told = torch_ranks.run(_one_rank_steps_alone, wrap, world_size=2)
    assert "within the timeout of 2 s" in told[0]


def _models_inside_join() -> list[int]:
    import torch.distributed as dist
    from torch.distributed.algorithms import Join

    found = []
    for _ in range(3):
        model = ringcomm.DistributedDataParallel(nn.Linear(2, 2))
        with Join([model]):
            model(torch.ones(1, 2)).sum().backward()
        found.append(len(dist.distributed_c10d._world.pg_map))
    return found


def test_models_share_the_process_group_of_torchs_join() -> None:
    for found in torch_ranks.run(_models_inside_join, world_size=2):
        assert found == found[:1] * 3
