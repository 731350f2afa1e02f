"""SyncBatchNorm: all ranks' batches together are one batch of torch's BatchNorm."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm.data_parallel.ddp import DistributedDataParallel
from ringcomm.data_parallel.sync_batch_norm import SyncBatchNorm
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from tests.support import torch_ranks

WORLD = 3
COUNTS = (4, 1, 7)  # of each rank's batch


def on_ranks(fn: Callable[[Any], Any], world_size: int = WORLD) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=30)


def data(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(sum(counts), *shape, generator=generator, dtype=torch.float64).mul(3).add(5).split(counts))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (5, 2, 3))])
@pytest.mark.parametrize("counts", [COUNTS, (2, 0, 3)], ids=["uneven", "one_empty"])
def test_ranks_together_are_one_batch(
    kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any], counts: tuple[int, ...]
) -> None:
    base = kind(5, dtype=torch.float64, **options)
    if base.weight is not None:
        nn.init.uniform_(base.weight)
    parts, factors = data(shape, counts), data(shape, counts)[::-1]
    factors = list(torch.cat(factors).split(counts))
    norms = [copy.deepcopy(base) for _ in counts]

    def rank(comm: ringcomm.Communicator) -> tuple[Any, ...]:
        norm = SyncBatchNorm.convert(norms[comm.rank], comm)
        assert isinstance(norm, SyncBatchNorm)
        found = []
        for _ in range(2):
            x = parts[comm.rank].clone().requires_grad_()
            y = norm(x)
            (y.square() * factors[comm.rank]).sum().backward()
            found += [y.detach(), x.grad]
        return found, [p.grad for p in norm.parameters()], list(norm.buffers())

    results = on_ranks(rank)
    for step in range(2):
        x = torch.cat(parts).requires_grad_()
        y = base(x)
        (y.square() * torch.cat(factors)).sum().backward()
        torch.testing.assert_close(torch.cat([found[2 * step] for found, _, _ in results]), y.detach())
        torch.testing.assert_close(torch.cat([found[2 * step + 1] for found, _, _ in results]), x.grad)
    for i, p in enumerate(base.parameters()):
        torch.testing.assert_close(sum(grads[i] for _, grads, _ in results), p.grad)
    for _, _, buffers in results:
        for mine, first, expected in zip(buffers, results[0][2], base.buffers(), strict=True):
            torch.testing.assert_close(mine, expected)
            assert torch.equal(mine, first)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


def test_training_equals_the_whole_batch_in_one_process() -> None:
    torch.manual_seed(0)
    single = Net().double()
    models = [copy.deepcopy(single) for _ in range(WORLD)]
    x = torch.randn(3, WORLD * 2, 2, 5, 5, dtype=torch.float64)

    def rank(comm: ringcomm.Communicator) -> dict[str, torch.Tensor]:
        model = DistributedDataParallel(SyncBatchNorm.convert(models[comm.rank], comm), comm, bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in x:
            optimizer.zero_grad()
            model(batch[2 * comm.rank : 2 * comm.rank + 2]).square().mean().backward()
            optimizer.step()
        model.eval()
        model(x[0, : comm.rank])  # by itself: eval sends nothing
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    found = on_ranks(rank)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for batch in x:
        optimizer.zero_grad()
        single(batch).square().mean().backward()
        optimizer.step()
    for name, value in single.state_dict().items():
        torch.testing.assert_close(found[0][name], value)
        assert all(torch.equal(each[name], found[0][name]) for each in found)


def test_a_copy_has_the_same_ranks() -> None:
    base = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    models = [copy.deepcopy(base) for _ in COUNTS]
    parts = [x.float() for x in data((4,), COUNTS)]

    def rank(comm: ringcomm.Communicator) -> None:
        model = SyncBatchNorm.convert(models[comm.rank], comm)
        twin = copy.deepcopy(model)
        assert torch.equal(model(parts[comm.rank]), twin(parts[comm.rank]))
        assert torch.equal(model[1].running_var, twin[1].running_var)
        unpickled = pickle.loads(pickle.dumps(model))
        unpickled.eval()(parts[comm.rank])
        with pytest.raises(InvalidArgumentError, match="got an unpickled layer in training"):
            unpickled.train()(parts[comm.rank])

    on_ranks(rank)


def _unpickled_in_training() -> None:
    torch.manual_seed(3)
    model = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    unpickled = pickle.loads(pickle.dumps(model))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        assert torch.equal(model(x), unpickled(x))
    assert all(map(torch.equal, model.buffers(), unpickled.buffers()))
    assert unpickled[0].comm is unpickled[2].comm


def test_a_pickled_one_is_trained_over_the_default_group() -> None:
    torch_ranks.run(_unpickled_in_training, world_size=2)


def test_low_precision_is_normalised_in_float32() -> None:
    parts = [part.to(torch.bfloat16) for part in data((5,), COUNTS)]

    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        return SyncBatchNorm(5, comm=comm)(parts[comm.rank]).detach()

    found = torch.cat(on_ranks(rank))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, nn.BatchNorm1d(5)(torch.cat(parts).float()).detach().to(torch.bfloat16))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        x = torch.randn(3, 5, requires_grad=True)
        (grad,) = torch.autograd.grad(SyncBatchNorm(5, comm=comm)(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(UnsupportedError, match=r"SyncBatchNorm: rank \d cannot differentiate its gradient"):
            grad.square().sum().backward()

    on_ranks(rank)


def test_bad_input_is_refused() -> None:
    def rank(comm: ringcomm.Communicator) -> None:
        norm = SyncBatchNorm(5, comm=comm)
        with pytest.raises(InvalidArgumentError, match=r"shape \(2, 4\)"):
            norm(torch.zeros(2, 4))
        with pytest.raises(InvalidArgumentError, match="1 elements in each channel"):
            norm(torch.zeros(int(comm.rank == 1), 5))
        wrapped = DistributedDataParallel(nn.BatchNorm1d(5), comm)
        with pytest.raises(InvalidArgumentError, match="wrapped already"):
            SyncBatchNorm.convert(wrapped, comm)
        plain = nn.Linear(1, 1)
        assert SyncBatchNorm.convert(plain, comm) is plain

    on_ranks(rank)
