"""ZeroRedundancyOptimizer: the bits of the plain optimizer, with a share of its state on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.optim.zero_optimizer import ZeroRedundancyOptimizer
from tests.support import torch_ranks
from tests.support.same import differences, same

pytestmark = pytest.mark.usefixtures("one_thread")
WORLD = 3


class Net(nn.Module):
    """A tied weight, a frozen one, one that is used late, a number, and one in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.middle = nn.Linear(33, 33, bias=False)
        self.again = nn.Linear(33, 33)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.late = nn.Linear(33, 33)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        h = self.frozen(torch.tanh(self.again(torch.tanh(self.middle(torch.tanh(self.first(x)))))))
        return (self.late(h) if late else h) * self.scale + self.wide.sum().float()


def make() -> Net:
    torch.manual_seed(0)
    net = Net()
    for p in [*net.parameters()][::3]:  # whose dimensions lie in memory in another order
        p.data = p.data.t().clone().t()
    return net


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1], "lr": 0.02}, {"params": [p for p in params if p.ndim < 2]}]


def backward(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    loss = model(x, step > 1).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, steps: int = 5) -> list[torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def on_ranks(fn: Callable[[Any, Any], Any], world: int = WORLD) -> list[Any]:
    models = [make() for _ in range(world)]
    return ringcomm.run_ranks(lambda comm: fn(comm, models[comm.rank]), world, ranks="threads", timeout=30)


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


@pytest.mark.parametrize("views", [False, True], ids=["plain", "views"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_plain_optimizer(kind: str, views: bool) -> None:
    optimizer_class, options = KINDS[kind]
    reference = make()
    plain = optimizer_class(groups_of(reference), **options)
    expected = train(reference, plain)

    def rank(comm: Any, model: Any) -> None:
        addresses = [p.data_ptr() for p in model.parameters()]
        optimizer = ZeroRedundancyOptimizer(
            groups_of(model), optimizer_class, comm=comm, parameters_as_bucket_view=views, **options
        )
        assert (addresses == [p.data_ptr() for p in model.parameters()]) is not views
        found = train(model, optimizer)
        assert differences(expected, found) == []
        optimizer.consolidate_state_dict(to=None)
        assert differences(plain.state_dict(), optimizer.state_dict()) == []

    on_ranks(rank)


def test_each_rank_keeps_a_share_of_the_state() -> None:
    def rank(comm: Any, model: Any) -> int:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, comm=comm)
        train(model, optimizer)
        return sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())

    counts = on_ranks(rank)
    trained = sum(p.numel() for p in make().parameters() if p.requires_grad)
    assert sum(counts) == trained
    assert max(counts) < 0.5 * trained


def test_state_goes_to_one_rank_and_comes_back() -> None:
    reference = make()
    plain = torch.optim.AdamW(groups_of(reference), lr=0.01)
    train(reference, plain, steps=3)
    half_way = copy.deepcopy(plain.state_dict())
    weights = {k: v.clone() for k, v in reference.state_dict().items()}
    expected = train(reference, plain, start=3)

    def rank(comm: Any, model: Any) -> None:
        optimizer = ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, comm=comm, lr=0.5)
        with pytest.raises(ringcomm.InvalidArgumentError, match="none that was collected since the last step"):
            optimizer.state_dict()
        model.load_state_dict(weights)
        optimizer.load_state_dict(half_way)
        optimizer.consolidate_state_dict(to=1)
        if comm.rank == 1:
            assert differences(half_way, optimizer.state_dict()) == []
        else:
            with pytest.raises(ringcomm.InvalidArgumentError, match="got rank 1's, expected its own"):
                optimizer.state_dict()
        found = train(model, optimizer, start=3)
        assert differences(expected, found) == []
        with pytest.raises(ringcomm.InvalidArgumentError, match=r"groups of \[1\] parameters, expected \[4, 6\]"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        before = [value for state in optimizer.optim.state.values() for value in state.values()]
        wrong = copy.deepcopy(half_way)
        wrong["state"][1]["exp_avg"] = torch.zeros(3, 2)
        with pytest.raises(ringcomm.ShapeError, match=r"got exp_avg of parameter 1 of shape \(3, 2\), expected"):
            optimizer.load_state_dict(wrong)
        after = [value for state in optimizer.optim.state.values() for value in state.values()]
        assert all(a is b for a, b in zip(before, after, strict=True))

    on_ranks(rank)


def test_groups_that_come_later_and_closures() -> None:
    def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.3})
        losses = [optimizer.step(partial(backward, model, step)) for step in range(4)]
        return losses + [p.detach().clone() for p in model.parameters()]

    def first(model: Any) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if not name.startswith("late")]

    reference = make()
    expected = steps(reference, torch.optim.Adam(first(reference), lr=0.01))

    def rank(comm: Any, model: Any) -> None:
        found = steps(model, ZeroRedundancyOptimizer(first(model), torch.optim.Adam, comm=comm, lr=0.01))
        assert differences(expected, found) == []

    on_ranks(rank)


def test_parameters_with_names() -> None:
    def rank(comm: Any, model: Any) -> None:
        plain = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.SGD, comm=comm, lr=0.1)
        optimizer.consolidate_state_dict(to=None)
        assert optimizer.state_dict() == plain.state_dict()
        backward(model, 0)
        optimizer.step()

    on_ranks(rank)


def _strided(comm: Any, model: Any) -> Any:
    p = nn.Parameter(torch.ones(4, 6)[:, ::2])
    return ZeroRedundancyOptimizer([p], torch.optim.SGD, comm=comm)


def _moved(comm: Any, model: Any) -> None:
    optimizer = ZeroRedundancyOptimizer(
        model.first.parameters(), torch.optim.SGD, comm=comm, parameters_as_bucket_view=True
    )
    model.first.bias.data = model.first.bias.data.clone()  # which the last rank updates alone
    optimizer.step()


def _other(comm: Any, model: Any) -> Any:
    params = [nn.Parameter(torch.ones(3 + comm.rank))]
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, comm=comm)


def _sharded(comm: Any, model: Any) -> Any:
    ringcomm.shard(model.first, None, 2, comm)
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm=comm)


def _master(comm: Any, model: Any) -> Any:
    half = ringcomm.MixedPrecision(torch.bfloat16)
    wrapped = ringcomm.DistributedDataParallel(model.first, comm, mixed_precision=half)
    return ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, comm=comm)


def _twice(comm: Any, model: Any) -> Any:
    optimizer = ZeroRedundancyOptimizer(model.first.parameters(), torch.optim.SGD, comm=comm)
    return ringcomm.shard(model.first, optimizer, 0, comm)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "strided": (_strided, "got a parameter of shape \\(4, 3\\) and strides"),
    "moved": (_moved, "in other memory"),
    "other": (_other, r"a parameter of shape \(\d,\)"),
    "sharded": (_sharded, "in flat buffers already, at stage 2"),
    "master": (_master, "in flat buffers already, at stage 0"),
    "twice": (_twice, "shard: rank . got ZeroRedundancyOptimizer, which distributes the parameters itself"),
    "overlap": (
        lambda c, m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, overlap_with_ddp=True, comm=c),
        "overlap_with_ddp=True",
    ),
    "lbfgs": (lambda c, m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.LBFGS, comm=c), "got LBFGS"),
    "both": (
        lambda c, m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, process_group=1, comm=c),
        "both comm and process_group",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    errors = (ringcomm.InvalidArgumentError, ringcomm.UnsupportedError, ringcomm.MismatchError)

    def rank(comm: Any, model: Any) -> None:
        with pytest.raises(errors, match=message):
            call(comm, model)

    on_ranks(rank, world=2)


def _with_torchs_ddp() -> None:
    import torch.distributed as dist

    models = [make(), make()]
    options = {"lr": 0.01, "weight_decay": 0.1}
    for model in models:
        model.wide.requires_grad_(False)
    wrapped = [nn.parallel.DistributedDataParallel(m, find_unused_parameters=True) for m in models]
    plain = torch.optim.AdamW(wrapped[0].parameters(), **options)
    ours = ZeroRedundancyOptimizer(wrapped[1].parameters(), torch.optim.AdamW, **options)
    start = 10 * dist.get_rank()
    expected, found = (train(m, o, start) for m, o in zip(wrapped, (plain, ours), strict=True))
    assert differences(expected, found) == []
    ours.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert differences(plain.state_dict(), ours.state_dict()) == []


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_beside_torchs_ddp(backend: str) -> None:
    torch_ranks.run(_with_torchs_ddp, backend=backend)


def test_beside_our_ddp() -> None:
    from ringcomm import shard

    def steps(comm: Any, model: Any, zero: bool) -> list[torch.Tensor]:
        shard(model, None, 0, comm)
        params = [p for p in model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": 0.01}
        made = ZeroRedundancyOptimizer(params, torch.optim.Adam, comm=comm, **options) if zero else None
        return train(model, made or torch.optim.Adam(params, **options), start=10 * comm.rank)

    expected = on_ranks(lambda comm, model: steps(comm, model, False))
    for a, b in zip(expected, on_ranks(lambda comm, model: steps(comm, model, True)), strict=True):
        assert differences(a, b) == []


# ---- uneven inputs ---------------------------------------------------------------------------------------------------


def _uneven(way: str, set_to_none: bool) -> list[torch.Tensor]:
    """Trains with 4, 1 and 0 batches on the ranks, in two epochs."""
    import torch.distributed as dist
    from torch.distributed.algorithms import Join

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model: nn.Module = net
    if way == "shard":
        model, optimizer = ringcomm.shard(net, torch.optim.Adam(net.parameters(), lr=0.1), stage=1)
    else:
        kind = nn.parallel if way == "torch's DDP" else ringcomm
        model = kind.DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        both: list[Any] = [optimizer, model] if way == "optimizer first" else [model, optimizer]
        with ringcomm.join(model) if way in ("shard", "join") else Join(both):
            for step in range((4, 1, 0)[dist.get_rank()]):
                model(torch.full((2, 4), float(dist.get_rank() + step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        scheduler.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("way", ["model first", "optimizer first", "join"])
def test_ranks_with_other_numbers_of_batches(way: str, set_to_none: bool) -> None:
    expected = torch_ranks.run(_uneven, "shard", set_to_none, timeout_s=100)
    for found in torch_ranks.run(_uneven, way, set_to_none, timeout_s=100):
        assert all(map(torch.equal, found, expected[0]))


def _changed(way: str) -> list[torch.Tensor]:
    """The program changes the gradients before each step; two ranks have fewer batches."""
    import torch.distributed as dist

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model: nn.Module
    if way == "shard":
        model, optimizer = ringcomm.shard(net, torch.optim.Adam(net.parameters(), lr=0.1), stage=0)
    else:
        model = ringcomm.DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with ringcomm.join(model):
        for step in range((4, 1, 0)[dist.get_rank()]):
            loss = model(torch.full((2, 4), float(dist.get_rank() + step))).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_ranks_that_have_joined_step_with_gradients_that_the_others_changed() -> None:
    expected = torch_ranks.run(_changed, "shard", timeout_s=100)
    for found in torch_ranks.run(_changed, "zero", timeout_s=100):
        assert all(map(torch.equal, found, expected[0]))


def _made_before_wrapping() -> list[torch.Tensor]:
    """The optimizer is made first, has a parameter beside the model's, and zeroes gradients before its first step; the
    last rank has no batch."""
    import torch.distributed as dist

    torch.manual_seed(0)
    net, beside = nn.Linear(4, 2), nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer([beside, *net.parameters()], torch.optim.SGD, lr=0.1)
    model = ringcomm.DistributedDataParallel(net)
    with ringcomm.join(model):
        for step in range((3, 1, 0)[dist.get_rank()]):
            optimizer.zero_grad(set_to_none=False)
            model(torch.full((2, 4), float(dist.get_rank() + step))).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_an_optimizer_that_was_made_before_its_model_was_wrapped_is_followed() -> None:
    found = torch_ranks.run(_made_before_wrapping, timeout_s=100)
    assert all(same(theirs, found[0]) for theirs in found[1:])


def test_join_steps_the_same_optimizer_on_ranks_that_have_dropped_others() -> None:
    """Garbage collection drops an optimizer at different times on the ranks."""

    def rank(comm: Any, model: Any) -> list[torch.Tensor]:
        ringcomm.shard(model, None, 0, comm)
        others = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, comm=comm) for _ in range(2)]
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, comm=comm, lr=0.1)
        del others[comm.rank :]
        with ringcomm.join(model):
            train(model, optimizer, steps=(2, 3, 0)[comm.rank])
        return [p.detach().clone() for p in model.parameters()]

    values, *theirs = on_ranks(rank)
    for found in theirs:
        assert all(map(torch.equal, found, values))


def test_join_over_more_ranks_than_those_of_an_optimizer() -> None:
    """Ranks that share an optimizer are a part of those that train the model, and one part has another model too."""

    def rank(comm: Any, model: Any) -> list[torch.Tensor]:
        part = comm.split(comm.rank // 2)
        if comm.rank < 2:
            other = nn.Linear(3, 3)
            kept = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, comm=part)
            assert kept.param_groups
        ringcomm.shard(model, None, 0, comm)
        first = nn.Parameter(torch.ones(2))
        optimizer = ZeroRedundancyOptimizer([first], torch.optim.SGD, comm=part, lr=0.1)
        optimizer.add_param_group({"params": [*model.parameters()]})
        with ringcomm.join(model):
            train(model, optimizer, steps=2 + comm.rank // 2)
        return [p.detach().clone() for p in model.parameters()]

    values, *theirs = on_ranks(rank)
    for found in theirs:
        assert all(map(torch.equal, found, values))


def test_other_numbers_of_batches_beside_torchs_ddp() -> None:
    """The ranks end with equal parameters, as with torch's own optimizer. The values are others: a rank that has joined
    has no gradients for its shard, which is not the same shard."""
    found = torch_ranks.run(_uneven, "torch's DDP", True, timeout_s=100)
    assert all(same(theirs, found[0]) for theirs in found[1:])


def _join_over_a_communicator() -> None:
    from torch.distributed.algorithms import Join

    comm = ringcomm.init()
    with pytest.raises(ringcomm.InvalidArgumentError, match="got a ZeroRedundancyOptimizer over a communicator"):
        Join([ZeroRedundancyOptimizer(make().parameters(), torch.optim.SGD, comm=comm, lr=0.1)])
    comm.close()


def test_torchs_join_needs_a_process_group() -> None:
    torch_ranks.run(_join_over_a_communicator, world_size=1)
