"""DistributedDataParallel: the mean of all ranks' gradients, to the bit, whatever the buckets and the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.data_parallel.ddp import DistributedDataParallel
from ringcomm.errors import InvalidArgumentError, MismatchError
from ringcomm.tools.bench.check import tree_sum
from tests.support.same import same

Gradients = dict[str, "torch.Tensor | None"]
WORLD = 4  # a power of two: the mean is exact once the sum is


class Net(nn.Module):
    """A tied weight, a frozen one, one that only odd ranks use and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.odd = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.mid(self.embed(x))))
        return self.head(self.odd(h) if odd else h)


def make(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randint(11, (5,), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return model(batch(rank, step), rank % 2 == 1).square().mean()


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def reference(base: nn.Module, step: int = 0, world_size: int = WORLD) -> Gradients:
    """What one process finds: every rank's gradient, added in the canonical tree, divided once."""
    each = []
    for rank in range(world_size):
        model = copy.deepcopy(base)
        loss_of(model, rank, step).backward()
        each.append(gradients(model))
    found: Gradients = {}
    for name, p in base.named_parameters():
        have = [g[name] for g in each]
        if all(g is None for g in have):
            found[name] = None
        else:
            found[name] = tree_sum([torch.zeros_like(p) if g is None else g for g in have]) / world_size
    return found


def on_ranks(fn: Callable[[Any], Any], world_size: int = WORLD) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=30)


def wrapped(
    base: nn.Module, fn: Callable[[DistributedDataParallel, int], Any], world_size: int = WORLD, **options: Any
) -> list[Any]:
    """What ``fn(model, rank)`` returns on each rank, whose copy of ``base`` is wrapped."""
    models = [copy.deepcopy(base) for _ in range(world_size)]
    return on_ranks(lambda comm: fn(DistributedDataParallel(models[comm.rank], comm, **options), comm.rank), world_size)


def of_one_pass(model: DistributedDataParallel, rank: int) -> Gradients:
    loss_of(model, rank).backward()
    return gradients(model.module)


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.0001, 0.0])
def test_gradients_are_the_canonical_mean_for_every_bucket_size(bucket_cap_mb: float) -> None:
    base = make()
    expected = reference(base)
    assert expected["never.weight"] is None
    assert expected["odd.weight"] is not None
    for found in wrapped(base, of_one_pass, bucket_cap_mb=bucket_cap_mb):
        assert same(found, expected)


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.0001])
@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(world_size: int, bucket_cap_mb: float | None) -> None:
    base = make()
    expected = reference(base, world_size=world_size)
    for found in wrapped(base, of_one_pass, world_size, bucket_cap_mb=bucket_cap_mb):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None
            else:
                torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_keeps_views_and_leaves_nothing_stale(set_to_none: bool) -> None:
    base = make()

    def steps(model: DistributedDataParallel, rank: int) -> list[Any]:
        found = []
        for step in range(3):
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, rank, step).backward()
            found.append(gradients(model.module))
            for bucket in model.buckets:
                flat = bucket.gradient.buffer
                for p, segment in zip(bucket.params, bucket.layout.segments, strict=True):
                    assert p.grad is None or p.grad.data_ptr() == flat[segment.offset :].data_ptr()
        return found

    expected = [reference(base, step) for step in range(3)]
    for found in wrapped(base, steps, bucket_cap_mb=0.0002):
        for step in range(3):
            for name, gradient in expected[step].items():
                got = found[step][name]
                if gradient is None:  # zeros where the first pass has made a gradient of it
                    assert got is None or not got.any()
                else:
                    assert torch.equal(got, gradient), (step, name)


def test_training_equals_one_process() -> None:
    single = make()

    def train(model: DistributedDataParallel, rank: int) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.module.named_parameters()}

    results = wrapped(single, train)
    optimizer = torch.optim.AdamW(single.parameters(), lr=0.01)
    for step in range(5):
        for name, gradient in reference(single, step).items():
            single.get_parameter(name).grad = gradient
        optimizer.step()
    for found in results:
        for name, p in single.named_parameters():
            assert torch.equal(found[name], p), name


def test_no_sync_accumulates_and_ends_with_the_context() -> None:
    base = make()

    def passes(model: DistributedDataParallel, rank: int) -> Gradients:
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        with model.no_sync():
            loss_of(model, rank, 0).backward()
            with model.no_sync():
                loss_of(model, rank, 1).backward()
        loss_of(model, rank, 2).backward()
        return gradients(model.module)

    each = []
    for r in range(WORLD):
        model = copy.deepcopy(base)
        for step in range(3):
            loss_of(model, r, step).backward()
        each.append(gradients(model))
    for found in wrapped(base, passes):
        for name in ("mid.weight", "embed.weight", "odd.bias"):
            summands = [torch.zeros_like(base.get_parameter(name)) if g[name] is None else g[name] for g in each]
            assert torch.equal(found[name], tree_sum(summands) / WORLD)
        assert found["never.weight"] is None


def test_two_synchronised_passes_add_up() -> None:
    base = make()

    def passes(model: DistributedDataParallel, rank: int) -> Gradients:
        loss_of(model, rank, 1).backward()
        return of_one_pass(model, rank)

    first, second = reference(base, 1), reference(base, 0)
    for found in wrapped(base, passes):
        torch.testing.assert_close(found["mid.weight"], first["mid.weight"] + second["mid.weight"])


class Conv(nn.Module):
    """Buffers, two dtypes and a channels-last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.norm(self.conv(x)).mean((2, 3)).double())


def test_rank_0_gives_parameters_and_buffers() -> None:
    models = [make(Conv, seed) for seed in range(WORLD)]
    for r, model in enumerate(models):
        model.norm.running_mean.fill_(r + 1)
    first = copy.deepcopy(models[0])
    data = [torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> tuple[dict[str, torch.Tensor], torch.Tensor, bool]:
        model = DistributedDataParallel(models[comm.rank], comm)
        state = {name: x.clone() for name, x in model.module.state_dict().items()}
        model(data[comm.rank]).sum().backward()
        model(data[comm.rank])  # sends rank 0's running statistics once more
        grad = model.module.conv.weight.grad
        return state, grad.clone(), grad.stride() == model.module.conv.weight.stride()

    results = on_ranks(rank)
    for state, grad, same_format in results:
        assert all(torch.equal(state[name], x) for name, x in first.state_dict().items())
        assert torch.equal(grad, results[0][1])
        assert same_format


def test_the_module_survives_a_backward_pass_that_raises() -> None:
    base = make()

    def passes(model: DistributedDataParallel, rank: int) -> Gradients:
        def fail(_: torch.Tensor) -> None:
            raise KeyError("raised in backward")

        loss = loss_of(model, rank)
        handle = model.module.mid.weight.register_hook(fail)
        with pytest.raises(KeyError):
            loss.backward()
        handle.remove()
        model.zero_grad()
        return of_one_pass(model, rank)

    for found in wrapped(base, passes):
        assert torch.equal(found["mid.weight"], reference(base)["mid.weight"])


class Twice(nn.Module):
    """A block whose weights are used twice in a pass, and whose activations may be computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.again = False
        self.inner, self.head = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return self.head(x)


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.0001])
def test_activation_checkpointing_gives_the_same_bits(bucket_cap_mb: float) -> None:
    base = make(Twice)

    def of_batch(model: DistributedDataParallel, rank: int) -> Gradients:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        model(x).square().sum().backward()
        return gradients(model.module)

    plain = wrapped(base, of_batch, 3, bucket_cap_mb=bucket_cap_mb)
    base.again = True
    again = wrapped(base, of_batch, 3, bucket_cap_mb=bucket_cap_mb)
    assert all(grad is not None for grad in plain[0].values())
    assert all(same(each, plain[0]) for each in (*plain, *again))


def test_bad_arguments_are_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="without parameters that require a gradient"):
            DistributedDataParallel(nn.ReLU(), comm)
        with pytest.raises(InvalidArgumentError, match="both comm and process_group"):
            DistributedDataParallel(nn.Linear(1, 1), comm, process_group=object())  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=r"int as the second argument, .*process_group=$"):
            DistributedDataParallel(nn.Linear(1, 1), 3)  # type: ignore[arg-type]
        model = DistributedDataParallel(nn.Linear(1, 1), comm)
        for again in (model, nn.Sequential(model.module), nn.Sequential(nn.Linear(1, 1), model)):
            with pytest.raises(InvalidArgumentError, match=r"has wrapped, expected a plain one|is wrapped already"):
                DistributedDataParallel(again, comm)

    on_ranks(rank, 1)


def test_a_sparse_gradient_is_refused_on_every_rank_by_name() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)), comm)
        with pytest.raises(InvalidArgumentError, match=f"rank {comm.rank} got a sparse gradient of 0.weight"):
            model(torch.tensor([1])).sum().backward()

    on_ranks(rank, 3)


def test_another_model_on_a_rank_is_named_by_parameter_and_rank() -> None:
    def rank(comm: ringcomm.Communicator) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + (comm.rank == 1)))
        with pytest.raises(MismatchError) as error:
            DistributedDataParallel(model, comm)
        return str(error.value)

    found = on_ranks(rank, 3)
    assert "rank 1 got 1.weight (3, 2)" in found[1]
    assert "where rank 0 has 1.weight (2, 2)" in found[1]
    assert all("rank 1 has 1.weight (3, 2)" in found[r] for r in (0, 2))


def _add(module: nn.Sequential) -> None:
    module.add_module("2", nn.Linear(2, 2))


def _replace(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [(_add, "new parameter 2.weight"), (_replace, "1.weight")],
)
def test_a_change_after_wrapping_is_refused(change: Callable[[nn.Module], None], told: str) -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = DistributedDataParallel(module, comm)
        change(module)
        with pytest.raises(InvalidArgumentError, match=f"rank {comm.rank} got .*{told}"):
            model(torch.zeros(1, 2))

    on_ranks(rank, 3)


def test_another_type_after_wrapping_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        model = DistributedDataParallel(nn.Linear(2, 2), comm)
        with pytest.raises(InvalidArgumentError, match=r"torch\.float64"):
            model.double()(torch.zeros(1, 2))

    on_ranks(rank, 3)


def over_process_groups(comm: ringcomm.Communicator, store: str, expected: Gradients) -> list[bool]:
    """The same model under our communicator, torch's Gloo group and torch's ringcomm group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.world_size)
    base = make()
    found = []
    for model in (
        DistributedDataParallel(copy.deepcopy(base), comm),
        DistributedDataParallel(copy.deepcopy(base)),
        DistributedDataParallel(copy.deepcopy(base), process_group=dist.new_group(backend="ringcomm")),
    ):
        loss_of(model, comm.rank).backward()
        found.append(same(gradients(model.module), expected))
    dist.destroy_process_group()
    return found


def test_any_process_group_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    expected = reference(make(), world_size=2)
    store = str(tmp_path / "store")
    found = ringcomm.run_ranks(over_process_groups, 2, store, expected, ranks="processes", timeout=60)
    assert found == [[True, True, True]] * 2
