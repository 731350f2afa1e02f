"""Programs that give parameters and gradients other memory train as without ringcomm: exchanges, `p.set_`,
`share_memory_`. All ranks have the same batch, so that plain torch in one process gives the same values."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # its reducers
from torch import nn
from torch.nn.utils import parametrize

import ringcomm
from ringcomm import Communicator
from tests.support.choice import slow
from tests.support.same import same

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[nn.Sequential], object]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(torch.linspace(-1, 1 + i, p.numel()).view(p.shape))
    return made


def train(comm: Communicator | None, stage: int, cap: float | None, change: Change, when: str) -> list[torch.Tensor]:
    """Three steps with a change after the first. Returns the losses and, at the end, the parameters."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), 0.1)
    if comm is not None:
        ringcomm.shard(trained, optimizer, stage, comm, bucket_cap_mb=cap)
    seen = []
    for step in range(4):
        loss = trained(torch.linspace(-1, 2, 8).view(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 1 and when == "before step":
            change(trained)
        optimizer.step()
        if step == 1 and when == "after step":
            change(trained)
        if step == 1 and when == "without gradients":
            optimizer.zero_grad()
            change(trained)
        seen.append(loss.detach())
    return [*seen, *(x.clone() for x in trained.state_dict().values())]


def exchange_data(trained: nn.Sequential) -> None:
    a, b, c = (trained[i].bias for i in (0, 2, 3))
    a.data, b.data, c.data = b.data, c.data, a.data


def exchange_grads(trained: nn.Sequential) -> None:
    a, b, c = (trained[i].bias for i in (0, 2, 3))
    a.grad, b.grad, c.grad = b.grad, c.grad, a.grad


def exchange_detached_grads(trained: nn.Sequential) -> None:
    a, b = (trained[i].bias for i in (0, 3))
    a.grad, b.grad = b.grad.detach(), a.grad.detach()


def exchange_with_frozen(trained: nn.Sequential) -> None:
    trained[2].requires_grad_(False)
    a, b = trained[2].bias, trained[3].bias
    a.data, b.data = b.data, a.data


@torch.no_grad()
def set_memory(trained: nn.Sequential) -> None:
    for p in (trained[0].weight, trained[3].bias):
        p.set_(p.detach() * 0.5)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def set_by_parametrization(trained: nn.Sequential) -> None:
    parametrize.register_parametrization(trained[2], "weight", Doubled())
    with torch.no_grad():
        trained[2].weight = torch.eye(4)


@torch.no_grad()
def set_to_itself(trained: nn.Sequential) -> None:
    """The values stay, but autograd makes another node that adds the gradient."""
    for p in (trained[0].weight, trained[3].bias):
        p.set_(p)


@torch.no_grad()
def set_all_to_themselves(trained: nn.Sequential) -> None:
    for p in trained.parameters():
        p.set_(p)


def register_parametrization(trained: nn.Sequential) -> None:
    parametrize.register_parametrization(trained[2], "weight", Doubled())


def share(trained: nn.Sequential) -> None:
    trained.share_memory()
    assert all(p.is_shared() for p in trained.parameters())


def send(trained: nn.Sequential) -> None:
    """As torch.multiprocessing's queues do."""
    ForkingPickler.dumps([p.grad for p in trained.parameters()])
    ForkingPickler.dumps(trained.state_dict())


CHANGES = [
    pytest.param(exchange_data, "after step", id="exchanged-data"),
    pytest.param(exchange_grads, "before step", id="exchanged-gradients"),
    pytest.param(exchange_detached_grads, "before step", id="exchanged-detached-gradients"),
    pytest.param(exchange_with_frozen, "without gradients", id="exchanged-with-a-frozen-one"),
    pytest.param(set_memory, "before step", id="set-before-step"),
    pytest.param(set_memory, "after step", id="set-after-step"),
    pytest.param(set_by_parametrization, "after step", id="parametrization"),
    pytest.param(set_to_itself, "after step", id="set-to-itself-after-step"),
    pytest.param(set_to_itself, "without gradients", id="set-to-itself"),
    pytest.param(set_all_to_themselves, "without gradients", id="all-set-to-themselves"),
    pytest.param(register_parametrization, "after step", id="parametrization-alone"),
    pytest.param(send, "before step", id="sent-before-step"),
    pytest.param(send, "after step", id="sent-after-step"),
]


@STAGES
@pytest.mark.parametrize(("change", "when"), CHANGES)
def test_other_memory_trains_as_without_ringcomm(stage: int, change: Change, when: str) -> None:
    wanted = train(None, 0, None, change, when)
    for cap in (None, 1e-6):  # one bucket; one for each parameter
        for found in ringcomm.run_ranks(train, 2, stage, cap, change, when):
            assert same(found, wanted), cap


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("first_sends", [False, True])
@pytest.mark.parametrize("at", [0, 1], ids=["new-step", "second-pass"])
@pytest.mark.parametrize("index", [0, 5, None], ids=["first", "last", "all"])
def test_a_new_accumulator_changes_no_gradient(stage: int, first_sends: bool, at: int, index: int | None) -> None:
    """The ranks have different batches, so a rank's own gradient in place of the mean is seen."""

    def rank(comm: Communicator, cap: float | None, renews: bool, wrap: str) -> list[torch.Tensor]:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        called: nn.Module = trained
        if wrap == "shard":
            ringcomm.shard(trained, optimizer, stage, comm, bucket_cap_mb=cap)
        else:
            called = ringcomm.DistributedDataParallel(trained, comm, bucket_cap_mb=cap)

        @torch.no_grad()
        def renew(step: int, now: int) -> None:
            if renews and (step, now) == (1, at):
                for each in trained.parameters() if index is None else [list(trained.parameters())[index]]:
                    each.set_(each)

        for step in range(3):
            renew(step, 0)
            with contextlib.nullcontext() if first_sends else ringcomm.no_sync(called):
                called(torch.full((2, 4), 1.0 + comm.rank)).square().mean().backward()
            renew(step, 1)
            called(torch.full((2, 4), 2.0 - comm.rank + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.clone() for x in trained.state_dict().values()]

    for cap, wrap in itertools.product((None, 1e-6), ("shard", "ddp") if stage == 0 else ("shard",)):
        found, wanted = (ringcomm.run_ranks(rank, 2, cap, renews, wrap)[0] for renews in (True, False))
        assert same(found, wanted), (cap, wrap)


@STAGES
def test_gradients_are_put_aside_during_forward(stage: int) -> None:
    def train(comm: Communicator | None) -> list[torch.Tensor]:
        trained, found = model(), []
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        if comm is not None:
            ringcomm.shard(trained, optimizer, stage, comm)
        for step in range(3):
            kept = [p.grad for p in trained.parameters()]
            optimizer.zero_grad()
            with torch.no_grad():
                trained[0].bias.mul_(0.5)
            loss = trained(torch.linspace(-1, 2, 8).view(2, 4) + step).square().mean()
            for p, grad in zip(trained.parameters(), kept, strict=True):
                p.grad = grad
            loss.backward()
            found += [p.grad.clone() for p in trained.parameters() if p.grad is not None]
        return found

    assert same(ringcomm.run_ranks(train, 2)[0], train(None))


def test_a_parameter_that_got_another_node_may_be_left_out_of_a_pass() -> None:
    """The next pass does not use it; the one after that does, and adds to no mean."""

    def rank(comm: Communicator) -> list[torch.Tensor]:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        ringcomm.shard(trained, optimizer, 0, comm)
        with torch.no_grad():
            trained[3].weight.set_(trained[3].weight)
        for last in (3, 4, 4):
            trained[:last](torch.full((2, 4), 1.0 + comm.rank)).square().mean().backward()
        return [p.grad.clone() for p in trained.parameters() if p.grad is not None]

    first, second = ringcomm.run_ranks(rank, 2)
    assert same(first, second)


@pytest.mark.parametrize(("stage", "when"), [(0, "before step"), *((s, "without gradients") for s in (0, 1, 2))])
def test_a_module_in_shared_memory_trains_as_without_ringcomm(stage: int, when: str) -> None:
    wanted = train(None, 0, None, share, when)
    for found in ringcomm.run_ranks(train, 2, stage, None, share, when):
        assert same(found, wanted)


@pytest.mark.parametrize(("stage", "named"), [(1, "the gradient of 0.weight"), (2, "the gradient of"), (3, "0.weight")])
def test_sharded_values_cannot_be_moved_to_shared_memory(stage: int, named: str) -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match=f"share_memory_: .*got {named}"):
        ringcomm.run_ranks(train, 1, stage, None, share, "before step")


def test_a_storage_is_no_value_of_a_sharded_parameter() -> None:
    def rank(comm: Communicator) -> None:
        trained = model()
        ringcomm.shard(trained, None, 3, comm)
        trained[0].weight.set_(torch.ones(16).untyped_storage(), 0, (4, 4))

    with pytest.raises(ringcomm.InvalidArgumentError, match=r"set_: rank 0 got 0\.weight"):
        ringcomm.run_ranks(rank, 1)


@STAGES
def test_tools_look_at_every_attribute(stage: int) -> None:
    def rank(comm: Communicator) -> tuple[bool, bool]:
        trained, data_parallel = model(), ringcomm.DistributedDataParallel(model(), comm)
        ringcomm.shard(trained, None, stage, comm)
        assert inspect.getmembers(trained)
        name = "_ddp_params_and_buffers_to_ignore"
        return hasattr(trained, name), hasattr(data_parallel, name)

    assert ringcomm.run_ranks(rank, 1) == [(False, False)]


@STAGES
def test_a_trace_has_the_values_or_is_refused(stage: int) -> None:
    x = torch.linspace(-1, 2, 8).view(2, 4)

    def rank(comm: Communicator) -> torch.Tensor:
        trained = model()
        ringcomm.shard(trained, None, stage, comm)
        with pytest.raises(ringcomm.UnsupportedError, match=r"jit\.script"):
            torch.jit.script(trained)
        return torch.jit.trace(trained, x, check_trace=False)(x)

    if stage == 3:
        with pytest.raises(ringcomm.UnsupportedError, match=r"jit\.trace: rank 0 got a module of stage 3"):
            ringcomm.run_ranks(rank, 1)
    else:
        assert torch.equal(ringcomm.run_ranks(rank, 1)[0], model()(x))


@STAGES
def test_a_parametrization_of_a_unit_is_not_taken_out(stage: int) -> None:
    def rank(comm: Communicator) -> None:
        trained = model()
        parametrize.register_parametrization(trained[2], "weight", Doubled())
        ringcomm.shard(trained, None, stage, comm, units=[trained[2]])
        parametrize.remove_parametrizations(trained[2], "weight")

    with pytest.raises(ringcomm.InvalidArgumentError, match=r"del ParametrizedLinear\.weight: .*ringcomm\.unshard"):
        ringcomm.run_ranks(rank, 1)


@STAGES
def test_a_step_inside_of_backward_is_refused(stage: int) -> None:
    def rank(comm: Communicator) -> None:
        trained = model()
        ringcomm.shard(trained, None, stage, comm)
        steps = {p: torch.optim.SGD([p], 0.1) for p in trained.parameters()}
        for p in trained.parameters():
            p.register_post_accumulate_grad_hook(lambda p: steps[p].step())
        trained(torch.ones(2, 4)).sum().backward()

    with pytest.raises(ringcomm.InvalidArgumentError, match=r"step: rank \d called step\(\) inside backward"):
        ringcomm.run_ranks(rank, 2)


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])  # compiling takes long
def test_a_compiled_step_is_the_step(stage: int) -> None:
    def train(comm: Communicator | None) -> list[torch.Tensor]:
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), 0.1)
        if comm is not None:
            ringcomm.shard(trained, optimizer, stage, comm)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            trained(torch.linspace(-1, 2, 8).view(2, 4)).square().mean().backward()
            step()
        return [x.clone() for x in trained.state_dict().values()]

    assert same(ringcomm.run_ranks(train, 1)[0], train(None))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_our_calls_inside_a_compiled_function(stage: int, accumulates: bool) -> None:
    """The values of a sharded parameter are not Dynamo's to look at."""

    def train(comm: Communicator, compiled: bool) -> list[torch.Tensor]:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        ringcomm.shard(trained, optimizer, stage, comm)

        def step(x: torch.Tensor) -> None:
            if accumulates:  # Dynamo then compiles the functions that it finds inside
                with ringcomm.no_sync(trained):
                    trained(x).square().mean().backward()
            trained(x).square().mean().backward()
            ringcomm.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            trained.zero_grad() if accumulates else optimizer.zero_grad()

        once = torch.compile(step, backend="eager") if compiled else step
        for _ in range(2):
            once(torch.linspace(-1, 2, 8).view(2, 4))
        return [x.clone() for x in trained.state_dict().values()]

    plain, compiled = (ringcomm.run_ranks(train, 1, each)[0] for each in (False, True))
    assert same(plain, compiled)
