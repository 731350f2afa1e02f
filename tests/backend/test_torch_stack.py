"""What stands on torch.distributed runs unchanged over ringcomm: short training runs give Gloo's numbers.

On 2 ranks there is one order of summation, so the numbers are the same bits; elsewhere they are close.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import torch_ranks

pytestmark = pytest.mark.timeout(300)

Numbers = list[torch.Tensor]
CPU = torch.device("cpu")


def equal_to_gloo(scenario: Callable[..., Numbers], *arguments: Any, world_size: int = 2) -> None:
    """Run a scenario over both backends and compare what its ranks return."""
    theirs = torch_ranks.run(scenario, *arguments, world_size=world_size, backend="gloo", timeout_s=100)
    ours = torch_ranks.run(scenario, *arguments, world_size=world_size, timeout_s=100)
    for rank in range(world_size):
        assert len(ours[rank]) == len(theirs[rank]) > 0
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            assert torch.isfinite(mine).all()
            if world_size == 2:
                assert torch.equal(mine, other), (rank, mine, other)
            else:
                torch.testing.assert_close(mine, other)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 4)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, rank: int | None = None) -> Numbers:
    """Losses of a few steps."""
    losses = []
    for step in range(steps):
        x, y = batch(step, dist.get_rank() if rank is None else rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def parameters(module: nn.Module) -> Numbers:
    return [each.detach().clone() for each in module.state_dict().values()]


# -- data parallel ---------------------------------------------------------------------------------------------------


def _ddp(options: dict[str, Any]) -> Numbers:
    module = nn.parallel.DistributedDataParallel(model(), **options)
    return train(module, torch.optim.SGD(module.parameters(), lr=0.1)) + parameters(module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "small_buckets", "static_graph", "unused"],
)
def test_ddp(options: dict[str, Any]) -> None:
    equal_to_gloo(_ddp, options)


def test_ddp_on_three_ranks() -> None:
    equal_to_gloo(_ddp, {"bucket_cap_mb": 0.001}, world_size=3)


def _ddp_accumulates() -> Numbers:
    module = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(6):
        x, y = batch(step, dist.get_rank())
        if step % 2 == 0:
            with module.no_sync():
                nn.functional.cross_entropy(module(x), y).backward()
            continue
        nn.functional.cross_entropy(module(x), y).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(module)


def test_ddp_no_sync() -> None:
    equal_to_gloo(_ddp_accumulates)


def _ddp_hook(name: str) -> Numbers:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    module = nn.parallel.DistributedDataParallel(model())
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        module.register_comm_hook(None, getattr(default_hooks, name))
    return train(module, torch.optim.SGD(module.parameters(), lr=0.1)) + parameters(module)


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "powersgd"])
def test_ddp_communication_hooks(name: str) -> None:
    equal_to_gloo(_ddp_hook, name)


def _ddp_uneven_inputs() -> Numbers:
    from torch.distributed.algorithms.join import Join

    torch.manual_seed(1)
    module = nn.parallel.DistributedDataParallel(nn.Linear(12, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Join([module]):
        train(module, optimizer, steps=3 + dist.get_rank())
    return parameters(module)


def test_ddp_join() -> None:
    equal_to_gloo(_ddp_uneven_inputs)


def _zero_redundancy(overlap: bool) -> Numbers:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=overlap, lr=0.01
    )
    losses = train(module, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return losses + parameters(module)


@pytest.mark.parametrize("view", [False, True])
def test_zero_redundancy_optimizer(view: bool) -> None:
    equal_to_gloo(_zero_redundancy, view)


# -- sharded ---------------------------------------------------------------------------------------------------------


def _blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 12)) for _ in range(3)), nn.Linear(12, 4)
    )


def _fsdp2(options: dict[str, Any], shared_memory: bool, half: bool) -> Numbers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    module, world_size = _blocks(), dist.get_world_size()
    shape, names = ((world_size,), ("shard",)) if world_size < 4 else ((2, world_size // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in module[:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    if shared_memory:
        for each in module.modules():
            if hasattr(each, "set_allocate_memory_from_process_group_for_comm"):
                each.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = train(module, optimizer)
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return losses + [each.full_tensor().detach() for each in module.parameters()]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
def test_fsdp2(options: dict[str, Any]) -> None:
    equal_to_gloo(_fsdp2, options, False, False)


def test_fsdp2_half_precision() -> None:
    equal_to_gloo(_fsdp2, {}, False, True)


def test_fsdp2_in_memory_of_the_engine() -> None:
    ours = torch_ranks.run(_fsdp2, {}, True, False, world_size=2)
    for mine, other in zip(ours[0], torch_ranks.run(_fsdp2, {}, False, False, world_size=2)[0], strict=True):
        assert torch.equal(mine, other)


def _device_mesh() -> Numbers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    numbers = []
    for name in ("outer", "inner"):
        x = torch.full((5,), float(dist.get_rank() + 1))
        dist.all_reduce(x, group=mesh[name].get_group())
        numbers.append(x)
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.arange(56.0).reshape(7, 8), mesh, [Shard(0), Shard(1)])
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate()] * 2):
        tensor = tensor.redistribute(mesh, placements)
        numbers.append((tensor @ tensor.t()).full_tensor())
    flat = mesh["outer", "inner"]._flatten("all")
    x = torch.ones(3)
    dist.all_reduce(x, group=flat.get_group())
    return [*numbers, tensor.to_local(), x]


def test_device_mesh_and_dtensor() -> None:
    equal_to_gloo(_device_mesh, world_size=4)


def test_hsdp() -> None:
    equal_to_gloo(_fsdp2, {}, False, False, world_size=4)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(32, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def _tensor_parallel(sequence: bool) -> Numbers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = FeedForward()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        shard = Shard(0)
        plan = {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=shard),
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=shard),
            "down": RowwiseParallel(output_layouts=shard, use_local_output=False),
            "head": ColwiseParallel(input_layouts=shard, output_layouts=Replicate()),
        }
    parallelize_module(module, mesh, plan)
    losses = train(module, torch.optim.SGD(module.parameters(), lr=0.1, foreach=False), rank=0)
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in module.parameters()]
    return losses + [each.detach() for each in whole]


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(sequence: bool) -> None:
    equal_to_gloo(_tensor_parallel, sequence)


def _pipeline(schedule_name: str) -> Numbers:
    from torch.distributed import pipelining

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(world_size - 1)] + [nn.Linear(12, 4)]
    stage_module = layers[rank]
    stage = pipelining.PipelineStage(stage_module, rank, world_size, CPU)
    schedule = getattr(pipelining, schedule_name)(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.1)
    numbers = []
    for step in range(3):
        x, y = batch(step, 0)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        numbers += [each.detach() for each in losses]
    return numbers + parameters(stage_module)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_pipelining(schedule: str, world_size: int) -> None:
    equal_to_gloo(_pipeline, schedule, world_size=world_size)


# -- checkpoints, autograd -------------------------------------------------------------------------------------------


def _checkpoint(asynchronous: bool) -> Numbers:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], "checkpoint")

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = _blocks()
        fully_shard(module)
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    module, optimizer = fresh()
    train(module, optimizer, steps=2)
    weights, states = get_state_dict(module, optimizer)
    state = {"model": weights, "optimizer": states}
    if asynchronous:  # in a group of its own, as docs/switching.md says, because the training goes on meanwhile
        saving = checkpoint.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        losses = train(module, optimizer, steps=2)
        saving.result()
    else:
        checkpoint.save(state, checkpoint_id=folder)
        losses = train(module, optimizer, steps=2)
    module, optimizer = fresh()
    weights, states = get_state_dict(module, optimizer)
    checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=states)
    again = train(module, optimizer, steps=2)
    assert all(torch.equal(mine, other) for mine, other in zip(losses, again, strict=True))
    return losses + [each.full_tensor().detach() for each in module.parameters()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_distributed_checkpoint(asynchronous: bool) -> None:
    equal_to_gloo(_checkpoint, asynchronous)


def _autograd() -> Numbers:
    from torch.distributed import nn as differentiable

    x = torch.arange(6.0, requires_grad=True)
    world = dist.group.WORLD
    total = differentiable.functional.all_reduce(x * (dist.get_rank() + 1), group=world)
    gathered = torch.stack(differentiable.functional.all_gather(x * x, group=world))
    (total.square().sum() + gathered.sum()).backward()
    return [total.detach(), gathered.detach(), x.grad]


def test_differentiable_collectives() -> None:
    equal_to_gloo(_autograd)


# -- trainers of others, unmodified ----------------------------------------------------------------------------------


def _accelerate() -> Numbers:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import gather_object

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)  # finds the default group
    assert accelerator.num_processes == 2
    examples = [(x, y) for step in range(4) for x, y in zip(*batch(step, 7), strict=True)]
    loader = torch.utils.data.DataLoader(examples, batch_size=4)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
    accelerator.wait_for_everyone()
    assert gather_object([accelerator.process_index]) == [0, 1]
    return losses + parameters(module)


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    equal_to_gloo(_accelerate)


def _lightning(backend: str, port: int) -> Numbers:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()
            self.seen: Numbers = []

        def training_step(self, examples: Any, _: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(examples[0]), examples[1])
            self.log("loss", loss, sync_dist=True)
            self.seen.append(self.all_gather(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    os.environ["MASTER_PORT"] = str(port)
    examples = [(x, y) for step in range(4) for x, y in zip(*batch(step, 7), strict=True)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        default_root_dir=os.environ["RINGCOMM_TEST_FOLDER"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(examples, batch_size=4))
    assert dist.get_backend() == backend
    return module.seen + parameters(module)


def test_lightning() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [
        torch_ranks.run(_lightning, backend, port, world_size=2, backend="", timeout_s=100)
        for backend in ("ringcomm", "gloo")
    ]
    for mine, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(mine, other)
