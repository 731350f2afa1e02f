"""fully_shard: module by module gives the bits of shard at stage 3, whatever is composed, prefetched or accumulated."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.data_parallel.fully_shard import FSDPModule, fully_shard, register_forward_method
from ringcomm.data_parallel.optim.grad_scaler import GradScaler
from ringcomm.data_parallel.shard import shard, whole
from ringcomm.modules.precision import MixedPrecision
from tests.support import torch_ranks
from tests.support.choice import choose, slow
from tests.support.same import differences
from tests.support.seeded import seeded

pytestmark = pytest.mark.usefixtures("one_thread")
WORLD = 3
WIDTH = 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mlp(self.attention(self.norm(x))))


class Net(nn.Module):
    """Tied ends, three blocks, a frozen and an unused module."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight
        self.fail_at = -1

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            if i == self.fail_at:
                raise RuntimeError("half-way")
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.norm(self.frozen(h))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def make(checkpointed: bool = False) -> Net:
    return seeded(Net(checkpointed))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step)
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten().roll(1))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = trained(model)
    matrices = [p for p in params if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2]}]


def train(comm: Any, model: nn.Module, optimizer: Any, steps: int = 3, passes: int = 1) -> tuple[Any, ...]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(passes):
            loss = loss_of(model, comm.rank, step * passes + k)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()


def by_blocks(comm: Any, model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, comm=comm, **options)
    return fully_shard(model, comm=comm, **options)


def nested(comm: Any, model: Net, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block.attention, comm=comm, **options)
        fully_shard(block, comm=comm, **options)
    fully_shard([model.frozen, model.norm], comm=comm, **options)
    return fully_shard(model, comm=comm, **options)


def alone(comm: Any, model: Net, **options: Any) -> Net:
    return fully_shard(model, comm=comm, **options)


def leaves(comm: Any, model: Net, **options: Any) -> Net:
    for module in [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]:
        fully_shard(module, comm=comm, **options)
    return fully_shard(model, comm=comm, **options)


def prefetched(comm: Any, model: Net, **options: Any) -> Net:
    by_blocks(comm, model, **options)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([third])
    return model


def on_ranks(
    fn: Callable[[Any, Any], Any], make_model: Callable[[], nn.Module] = make, world: int = WORLD
) -> list[Any]:
    models = [make_model() for _ in range(world)]
    return ringcomm.run_ranks(lambda comm: fn(comm, models[comm.rank]), world, ranks="threads", timeout=30)


def by_shard(comm: Any, model: nn.Module, passes: int = 1, **options: Any) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    return train(comm, *shard(model, optimizer, 3, comm, **options), passes=passes)


PARITY = {
    "alone": (alone, {}, 1),
    "blocks": (by_blocks, {}, 1),
    "accumulated": (by_blocks, {}, 3),
    "kept": (by_blocks, {"reshard_after_forward": False}, 1),
    "nested": (nested, {}, 2),
    "leaves": (leaves, {}, 1),
    "prefetched": (prefetched, {}, 2),
    "half": (nested, {"mp_policy": MixedPrecision(torch.bfloat16)}, 1),
    "host": (by_blocks, {"offload_policy": True}, 1),
}


@pytest.mark.parametrize("case", choose(PARITY, ["accumulated", "nested", "prefetched", "half", "host"]))
@pytest.mark.parametrize("checkpointed", [False, slow(True)], ids=["", "checkpointed"])
def test_the_bits_are_those_of_shard(case: str, checkpointed: bool) -> None:
    compose, options, passes = PARITY[case]
    other = {"mixed_precision": options.get("mp_policy"), "offload": options.get("offload_policy", False)}

    def composed(comm: Any, model: Any) -> tuple[Any, ...]:
        compose(comm, model, **options)
        return train(comm, model, torch.optim.AdamW(groups_of(model), lr=0.01), passes=passes)

    expected = on_ranks(lambda comm, model: by_shard(comm, model, passes, **other), lambda: make(checkpointed))
    for a, b in zip(expected, on_ranks(composed, lambda: make(checkpointed)), strict=True):
        assert differences(a, b) == []


def test_without_synchronisation_passes_add_up_on_the_rank() -> None:
    def by_method(comm: Any, model: Any) -> Any:
        by_blocks(comm, model)
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        model.set_requires_gradient_sync(False)
        loss_of(model, comm.rank, 0).backward()
        before = dict(model.blocks[0]._ringcomm.unit.flat.ranks.traffic)
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        loss_of(model, comm.rank, 1).backward()
        optimizer.step()
        return before, model.state_dict()

    def by_context(comm: Any, model: Any) -> Any:
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        shard(model, optimizer, 3, comm)
        with ringcomm.no_sync(model):
            loss_of(model, comm.rank, 0).backward()
        loss_of(model, comm.rank, 1).backward()
        optimizer.step()
        return None, model.state_dict()

    for (_, expected), (traffic, found) in zip(on_ranks(by_context), on_ranks(by_method), strict=True):
        assert "reduce_scatter calls" not in traffic
        assert all(torch.equal(expected[k], found[k]) for k in expected)


def test_which_units_are_unsharded_when() -> None:
    def rank(comm: Any, model: Any) -> None:
        by_blocks(comm, model)
        first, unit = model.blocks[0], model.blocks[0]._ringcomm.unit
        assert isinstance(first, FSDPModule)
        assert isinstance(first, Block)
        assert type(first).__name__ == "Block"
        assert torch.isfinite(first.mlp.weight.sum())
        assert first.mlp.weight.shape == (WIDTH, WIDTH)
        handle = first.unshard(async_op=True)
        handle.wait()
        assert unit.is_unsharded
        first.mlp.weight.sum()
        first.reshard()
        assert not unit.is_unsharded
        loss = loss_of(model, comm.rank, 0)
        assert not unit.is_unsharded  # None: all but the outermost module reshard after forward
        assert model._ringcomm.unit.is_unsharded
        model.set_reshard_after_backward(False)
        loss.backward()
        assert unit.is_unsharded
        optimizer = torch.optim.SGD(trained(model), lr=1.0)
        optimizer.step()
        with whole(model):
            after = first.mlp.weight.clone()
        assert torch.equal(after, model.state_dict()["blocks.0.mlp.weight"])  # not the values before the step
        model.set_reshard_after_forward(False)
        loss_of(model, comm.rank, 1)
        assert unit.is_unsharded

    on_ranks(rank)


def test_every_module_has_its_state() -> None:
    expected = make().state_dict()

    def rank(comm: Any, model: Any) -> None:
        nested(comm, model)
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected)
        block = model.blocks[1].state_dict()
        assert block
        assert all(torch.equal(v, expected[f"blocks.1.{k}"]) for k, v in block.items())
        model.load_state_dict({k: v + 1 for k, v in expected.items()})
        model.blocks[0].load_state_dict({k[9:]: v + 2 for k, v in expected.items() if k.startswith("blocks.0.")})
        for k, v in model.state_dict().items():
            assert torch.equal(v, expected[k] + (2 if k.startswith("blocks.0.") else 1)), k

    on_ranks(rank)


def test_evaluation_and_failed_passes_leave_training_as_it_is() -> None:
    def disturbed(comm: Any, model: Any) -> tuple[Any, ...]:
        by_blocks(comm, model)
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        model.eval()
        with torch.no_grad():
            loss_of(model, comm.rank, 9)
        assert not any(unit.is_unsharded for unit in model._units(True))
        model.train()
        model.fail_at = 2
        with pytest.raises(RuntimeError, match="half-way"):
            loss_of(model, comm.rank, 8)
        model.fail_at = -1
        model.reset_iter_state()
        loss_of(model, comm.rank, 7)  # without a backward pass
        return train(comm, model, optimizer)

    for a, b in zip(on_ranks(by_shard), on_ranks(disturbed), strict=True):
        assert differences(a, b) == []


def test_two_forward_passes_before_one_backward_pass() -> None:
    def losses(comm: Any, model: nn.Module, optimizer: Any) -> Any:
        (loss_of(model, comm.rank, 0) + loss_of(model, comm.rank, 1)).backward()
        optimizer.step()
        return model.state_dict()

    def composed(comm: Any, model: Any) -> Any:
        by_blocks(comm, model)
        return losses(comm, model, torch.optim.SGD(trained(model), lr=0.1))

    def plain(comm: Any, model: Any) -> Any:
        return losses(comm, *shard(model, torch.optim.SGD(trained(model), lr=0.1), 0, comm))

    for expected, found in zip(on_ranks(plain), on_ranks(composed), strict=True):
        assert all(torch.equal(expected[k], found[k]) for k in expected)


def test_other_methods_than_forward() -> None:
    def rank(comm: Any, model: Any) -> None:
        by_blocks(comm, model)
        register_forward_method(model, "encode")
        register_forward_method(nn.Linear(2, 2), "forward")
        with pytest.raises(ringcomm.InvalidArgumentError, match="'decode', which Net does not have"):
            register_forward_method(model, "decode")
        model.encode(batch(comm.rank, 0)).square().mean().backward()
        model.embed.weight.grad = None
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        optimizer.step()

    on_ranks(rank)


def test_ignored_parameters_stay_whole() -> None:
    def rank(comm: Any, model: Any) -> None:
        ignored = list(model.norm.parameters())
        fully_shard(model, comm=comm, ignored_params=set(ignored))
        loss_of(model, comm.rank, 0).backward()
        assert all(type(p) is nn.Parameter and torch.isfinite(p).all() and p.grad.sum() != 0 for p in ignored)
        assert {"norm.weight", "embed.weight"} <= model.state_dict().keys()

    on_ranks(rank)


def test_modules_without_parameters_to_shard_stay_as_they_are() -> None:
    """As in a loop over all layers of a model."""

    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 2)
    )

    def rank(comm: Any) -> list[dict[str, torch.Tensor]]:
        found = []
        for model in (copy.deepcopy(layers), copy.deepcopy(layers)):
            if not found:
                for layer in model:
                    assert fully_shard(layer, comm=comm) is layer
                assert [isinstance(layer, FSDPModule) for layer in model] == [False, True, False, True, False, True]
                fully_shard(model, comm=comm)
            else:
                shard(model, None, 3, comm)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(comm.rank))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: x.clone() for name, x in model.state_dict().items()})
        ignored = nn.Linear(2, 2)
        assert fully_shard(ignored, comm=comm, ignored_params=[*ignored.parameters()]) is ignored
        assert not isinstance(ignored, FSDPModule)
        return found

    for composed, whole_model in ringcomm.run_ranks(rank, WORLD, timeout=20):
        assert composed.keys() == whole_model.keys()
        assert all(composed[name].equal(x) for name, x in whole_model.items())


def test_one_optimizer_over_sharded_ignored_and_frozen_parameters() -> None:
    def steps(comm: Any, model: Any, optimizer: Any, start: int) -> None:
        for step in range(start, start + 2):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            for p in model.norm.parameters():
                comm.all_reduce(p.grad, "avg")
            optimizer.step()

    def composed(comm: Any, model: Any) -> tuple[Any, ...]:
        fully_shard(model, comm=comm, ignored_params=set(model.norm.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(comm, model, optimizer, 0)
        state = optimizer.state_dict()
        again = torch.optim.AdamW(model.parameters(), lr=0.5)
        again.load_state_dict(state)
        steps(comm, model, again, 2)
        return model.state_dict(), again.state_dict()

    def plain(comm: Any, model: Any) -> tuple[Any, ...]:
        optimizer = torch.optim.AdamW(trained(model), lr=0.01)
        shard(model, optimizer, 3, comm)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict()

    every = [i for i, p in enumerate(make().parameters()) if p.requires_grad]
    for (weights, state), (found, its) in zip(on_ranks(plain), on_ranks(composed), strict=True):
        assert [k for k in weights if not torch.equal(weights[k], found[k])] == []
        assert [len(group["params"]) for group in its["param_groups"]] == [len(list(make().parameters()))]
        assert its["state"].keys() == {every[i] for i in state["state"]}
        for i, values in state["state"].items():
            assert [k for k, v in values.items() if not torch.equal(v, its["state"][every[i]][k])] == []


@pytest.mark.parametrize("of", ["module", slow("parameters"), slow("optimizer")])
def test_ignored_parameters_are_clipped_with_the_others(of: str) -> None:
    def composed(comm: Any, model: Any) -> tuple[Any, ...]:
        fully_shard(model, comm=comm, ignored_params=set(model.norm.parameters()))
        optimizer = torch.optim.SGD(trained(model), lr=0.5)
        loss_of(model, comm.rank, 0).backward()
        for p in model.norm.parameters():
            comm.all_reduce(p.grad, "avg")
        shard(model, optimizer)
        what = {"module": model, "parameters": trained(model), "optimizer": optimizer}[of]
        norm = ringcomm.clip_grad_norm_(what, 0.01)
        optimizer.step()
        return norm, model.state_dict()

    def plain(comm: Any, model: Any) -> tuple[Any, ...]:
        optimizer = torch.optim.SGD(trained(model), lr=0.5)
        shard(model, optimizer, 3, comm)
        loss_of(model, comm.rank, 0).backward()
        norm = ringcomm.clip_grad_norm_(model, 0.01)
        optimizer.step()
        return norm, model.state_dict()

    for (norm, weights), (found, its) in zip(on_ranks(plain), on_ranks(composed), strict=True):
        assert norm > 0.1
        assert torch.equal(norm, found)
        assert [k for k in weights if not torch.equal(weights[k], its[k])] == []


def noted(seen: list[str], group: Any, settle: Callable[[], None]) -> None:
    seen.append(group.names[0])
    settle()


def test_checkpointing_leaves_the_order_of_reductions() -> None:
    def rank(comm: Any, model: Any) -> tuple[list[str], int]:
        nested(comm, model)
        flat, seen = model._ringcomm.unit.flat, []
        for group in flat.order:
            group.gradient.finish_reduce = partial(noted, seen, group, group.gradient.finish_reduce)
        loss_of(model, comm.rank, 0).backward()
        return seen, flat.ranks.traffic["all_gather calls"]

    assert on_ranks(rank, lambda: make(True)) == on_ranks(rank)


def test_an_optimizer_attaches_itself() -> None:
    def rank(comm: Any, model: Any) -> None:
        by_blocks(comm, model)
        early = torch.optim.Adam(trained(model), lr=0.01)
        early.zero_grad()
        loss_of(model, comm.rank, 0).backward()
        early.zero_grad()
        loss_of(model, comm.rank, 1).backward()
        early.step()
        other = make()
        plain = torch.optim.SGD(trained(other), lr=0.1)
        plain.step()
        assert hasattr(early, "_ringcomm")
        assert not hasattr(plain, "_ringcomm")
        late = torch.optim.Adam(trained(model), lr=0.01)
        late.load_state_dict(early.state_dict())  # before its first step
        shard(model, late)
        for a, b in zip(early.state_dict()["state"].values(), late.state_dict()["state"].values(), strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)

    on_ranks(rank)


def test_a_loss_scale_before_the_first_step() -> None:
    def rank(comm: Any, model: Any) -> list[bool]:
        by_blocks(comm, model, mp_policy=MixedPrecision(torch.float16))
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0)
        moved = []
        for overflow in (True, False):
            before = model.state_dict()
            optimizer.zero_grad()
            bad = float("inf") if overflow and comm.rank == 1 else 1.0
            scaler.scale(loss_of(model, comm.rank, 0) * bad).backward()
            scaler.step(optimizer)
            scaler.update()
            after = model.state_dict()
            moved.append(any(not torch.equal(before[k], after[k]) for k in before))
        return moved

    assert on_ranks(rank) == [[False, True]] * WORLD


def test_torchs_policies() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    def rank(comm: Any, model: Any) -> tuple[Any, ...]:
        for block in model.blocks:
            fully_shard(
                block, comm=comm, mp_policy=MixedPrecisionPolicy(torch.bfloat16), offload_policy=CPUOffloadPolicy()
            )
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, comm=comm, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        group = model.blocks[0]._ringcomm.unit.buckets[0]
        assert (group.types.compute, group.types.wire, group.types.master) == (
            torch.bfloat16,
            torch.bfloat16,  # torch's None: as param_dtype
            torch.float32,
        )
        assert group.master_device == torch.device("cpu")
        assert model(batch(0, 0)).dtype == torch.float32
        return train(comm, model, torch.optim.AdamW(groups_of(model), lr=0.01))

    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float32)
    expected = on_ranks(lambda c, m: by_shard(c, m, mixed_precision=policy, offload=True))
    for a, b in zip(expected, on_ranks(rank), strict=True):
        assert differences(a, b) == []

    def none(comm: Any, model: Any) -> Any:
        return by_blocks(comm, model, offload_policy=OffloadPolicy())._ringcomm.unit.buckets[0].master_device

    assert on_ranks(none) == [None] * WORLD


def test_modules_with_types_of_their_own() -> None:
    def rank(comm: Any, model: Any) -> None:
        fully_shard(model.blocks[0], comm=comm, mp_policy=MixedPrecision(torch.bfloat16, output_dtype=torch.float32))
        fully_shard(model, comm=comm)
        seen: list[torch.dtype] = []
        model.blocks[0].mlp.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        model.blocks[1].mlp.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        loss_of(model, comm.rank, 0).backward()
        assert seen == [torch.bfloat16, torch.float32]

    on_ranks(rank)


class Leaves(nn.Module):
    """Modules that carry their parameters themselves, the norm without a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x).float())
        return self.head(torch.relu(self.up(h)))


def test_leaves_that_compute_in_half_precision() -> None:
    torch.manual_seed(0)
    base = Leaves()
    half = MixedPrecision(torch.float16)

    def rank(comm: Any, model: Any) -> Any:
        model.load_state_dict(base.state_dict())
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                fully_shard(module, comm=comm, mp_policy=half)
        fully_shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        assert model(batch(0, 0)).dtype == torch.float16
        return train(comm, model, optimizer, steps=20)

    found = on_ranks(rank, Leaves)
    expected = on_ranks(
        lambda c, m: train(c, *shard(m, torch.optim.SGD(m.parameters(), lr=0.5), 0, c), steps=20),
        lambda: (torch.manual_seed(0), Leaves())[1],
    )
    for (losses, state, _), (full, reference, _) in zip(found, expected, strict=True):
        assert all(v.dtype == torch.float32 for v in state.values())
        assert not torch.equal(losses, full)  # half precision it was
        assert torch.allclose(losses, full, atol=2e-2)
        assert all(torch.allclose(state[k], reference[k], atol=2e-2) for k in reference)


REFUSED = {
    "twice": (lambda c, m: fully_shard(by_blocks(c, m), comm=c), "Net, which is sharded already"),
    "inside": (lambda c, m: (alone(c, m), fully_shard(m.blocks[0], comm=c)), "is wrapped already"),
    "sharded": (lambda c, m: (shard(m, None, 3, c), fully_shard(m, comm=c)), "is wrapped already"),
    "tied": (lambda c, m: (fully_shard(m.embed, comm=c), fully_shard(m, comm=c)), "head.weight, which shares weight"),
    "int": (lambda c, m: fully_shard(m, comm=c, reshard_after_forward=2), "reshard_after_forward=2"),
    "placement": (lambda c, m: fully_shard(m, comm=c, shard_placement_fn=len), "shard_placement_fn="),
    "dims": (lambda c, m: fully_shard(m, comm=c, dp_mesh_dims=1), "dp_mesh_dims=1"),
    "policy": (lambda c, m: fully_shard(m, comm=c, mp_policy="bf16"), "mp_policy='bf16'"),
    "offload": (lambda c, m: fully_shard(m, comm=c, offload_policy="disk"), "offload_policy='disk'"),
    "both": (lambda c, m: fully_shard(m, comm=c, mesh=1), "both comm and mesh"),
    "part": (lambda c, m: by_blocks(c, m).blocks[0].set_requires_gradient_sync(False), "a part of the sharded"),
    "method": (lambda c, m: by_blocks(c, m).set_gradient_divide_factor(2.0), "set_gradient_divide_factor: rank"),
    "prefetch": (
        lambda c, m: by_blocks(c, m).set_modules_to_forward_prefetch([m.norm]),
        "LayerNorm, which is not a unit of its own",
    ),
    "ranks": (
        lambda c, m: (fully_shard(m.blocks[0], comm=c.dup()), fully_shard(m, comm=c)),
        "got other ranks than for a submodule",
    ),
    "copy": (lambda c, m: __import__("copy").deepcopy(by_blocks(c, m)), "copy or pickle: rank . got a Net of stage 3"),
}


@pytest.mark.parametrize("options", [{"atom": "tensor"}, {"offload_policy": True}, {"broadcast_buffers": False}])
def test_ranks_that_ask_for_different_things_are_refused(options: dict[str, Any]) -> None:
    def rank(comm: Any, model: Any) -> None:
        with pytest.raises(ringcomm.MismatchError, match=rf"rank {comm.rank} got (atom|offload|broadcast_\w+)=.* has "):
            fully_shard(model, comm=comm, **(options if comm.rank == 1 else {}))

    on_ranks(rank)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, message = REFUSED[case]

    def rank(comm: Any, model: Any) -> None:
        with pytest.raises((ringcomm.InvalidArgumentError, ringcomm.UnsupportedError), match=message):
            call(comm, model)

    on_ranks(rank, world=2)


def _in_processes() -> Any:
    import torch.distributed as dist

    model, reference = make(), make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    units = {id(m._ringcomm.unit.buckets[0].ranks) for m in model.modules() if isinstance(m, FSDPModule)}
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    found = train(_Rank(dist.get_rank()), model, optimizer)
    sharded = shard(reference, torch.optim.AdamW(groups_of(reference), lr=0.01), 3)
    expected = train(_Rank(dist.get_rank()), *sharded)
    if dist.get_backend() == "ringcomm":
        assert differences(expected, found) == []
    else:  # Gloo's order of summation depends on the length of a message
        assert torch.allclose(expected[0], found[0])
    return len(units), model._ringcomm.unit.flat.ranks.comm.engine


def _where_one_rank_keeps_an_earlier_model() -> Any:
    """Whether to make a communicator, which is a collective, must not depend on what each rank's collector has done."""
    import torch.distributed as dist

    earlier = fully_shard(make())
    comm = earlier._ringcomm.unit.flat.ranks.comm
    if dist.get_rank():
        del earlier
        gc.collect()
    model = fully_shard(make())
    assert model._ringcomm.unit.flat.ranks.comm is comm
    train(_Rank(dist.get_rank()), model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_ranks_whose_garbage_collectors_come_at_other_times() -> None:
    torch_ranks.run(_where_one_rank_keeps_an_earlier_model)


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_processes_share_one_communicator(backend: str) -> None:
    kind = "cpu" if backend == "ringcomm" else "torch.distributed:gloo"
    assert torch_ranks.run(_in_processes, backend=backend) == [(1, kind)] * WORLD


@pytest.mark.parametrize("kind", ["checkpoint", "leaf", "function"])
def test_a_parameter_of_another_unit_is_saved_without_being_read(kind: str) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, w)
            return a @ w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            a, w = ctx.saved_tensors
            return grad @ w.t(), a.t() @ grad

    def run(comm: Any, wrap: bool) -> list[torch.Tensor]:
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        for unit in (model[0], model[2], model) if wrap else ():
            ringcomm.fully_shard(unit, comm=comm)
        other = nn.Parameter(model[0].weight.data) if kind == "leaf" else model[0].weight

        def more(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            if kind == "function":
                return out + Product.apply(args[0], other)
            return out + checkpoint(torch.matmul, args[0], other, use_reentrant=False)

        model[2].register_forward_hook(more)
        model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        assert other.grad is not None
        return [other.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for plain, found in zip(
        *(ringcomm.run_ranks(run, 2, wrap, ranks="threads") for wrap in (False, True)), strict=True
    ):
        assert [*map(torch.equal, plain, found)] == [True] * len(plain)
