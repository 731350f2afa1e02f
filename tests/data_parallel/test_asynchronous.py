"""Asynchronous data parallel training: the synchronous bits, the bound on staleness, replay, and who survives whom."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import FileStore

import ringcomm
from ringcomm import AsynchronousDataParallel, Communicator, run_ranks
from ringcomm.data_parallel import asynchronous
from ringcomm.errors import (
    AbortedError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RingcommError,
    ShapeError,
    UnsupportedError,
)
from tests.support import forked
from tests.support.same import same

pytestmark = pytest.mark.timeout(60)

torch.manual_seed(0)
PLAIN = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))
Make = Callable[[Any], torch.optim.Optimizer]
Values = list[torch.Tensor]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups: no decay of biases."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def adagrad(params: Any) -> torch.optim.Optimizer:
    """It has state before its first step."""
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5)


def adafactor(params: Any) -> torch.optim.Optimizer:
    """It looks at whole tensors."""
    return torch.optim.Adafactor(params, lr=0.1)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(4, 6, generator=draw).to(dtype), torch.randn(4, 5, generator=draw).to(dtype)
    return ((model(x) - y) ** 2).mean()


def values(model: nn.Module) -> Values:
    return [p.detach().clone() for p in model.parameters()]


def synchronous(comm: Communicator, make: Make, steps: int, stage: int, dtype: torch.dtype) -> tuple[Values, Any]:
    model: Any = copy.deepcopy(PLAIN).to(dtype)
    optimizer: Any = make(model.parameters())
    model, optimizer = ringcomm.shard(model, optimizer, stage, comm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.step()
        schedule.step()
    return values(model), optimizer.state_dict()


def train(
    comm: Communicator,
    make: Make = sgd,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    before: Callable[[AsynchronousDataParallel, int], None] = lambda model, step: None,
    state: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A worker's training; ``before`` is called before each step."""
    module = copy.deepcopy(PLAIN).to(dtype)
    with AsynchronousDataParallel(module, comm, optimizer=make, **options) as model:
        schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.9)
        for step in range(steps):
            model.optimizer.zero_grad()
            loss_of(model, comm.rank, step).backward()
            before(model, step)
            model.optimizer.step()
            schedule.step()
        found = {"state": model.optimizer.state_dict() if state else None}
    return {**found, "values": values(module), "counters": model.counters(), "order": model.order}


# ---- synchronous ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "stage", "dtype"),
    [
        *[(sgd, 0, torch.float32), (adamw, 1, torch.float32), (adagrad, 1, torch.float32)],
        *[(adafactor, 0, torch.float32), (adamw, 0, torch.bfloat16)],
    ],
)
def test_without_staleness_it_has_the_bits_of_shard(make: Make, stage: int, dtype: torch.dtype) -> None:
    """Values, and the optimizer's state in torch's form; with a schedule, on shards that cut tensors."""
    expected, its_state = run_ranks(synchronous, 3, make, 4, stage, dtype, timeout=20)[0]
    found = run_ranks(lambda comm: train(comm, make, 4, dtype, state=True, max_staleness=0), 3, timeout=20)
    for each in found:
        assert same(each["values"], expected)
        assert each["counters"]["staleness"] == {0: 4}
        assert each["state"]["state"].keys() == its_state["state"].keys()
        for i, state in its_state["state"].items():
            assert state.keys() == each["state"]["state"][i].keys()
            assert all(
                torch.equal(torch.as_tensor(v), torch.as_tensor(each["state"]["state"][i][k])) for k, v in state.items()
            )


def test_a_saved_run_goes_on_with_the_same_bits() -> None:
    def rank(comm: Communicator) -> tuple[Values, Values]:
        def part(model: AsynchronousDataParallel, steps: range) -> None:
            for step in steps:
                model.zero_grad()
                loss_of(model, comm.rank, step).backward()
                model.step()

        with AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=adamw, max_staleness=0) as model:
            part(model, range(3))
            comm.barrier()
            saved = copy.deepcopy((model.state_dict(), model.optimizer.state_dict()))
            part(model, range(3, 6))
        with AsynchronousDataParallel(
            nn.Sequential(*copy.deepcopy(PLAIN)), comm, optimizer=adamw, max_staleness=0
        ) as again:
            again.load_state_dict(saved[0])
            again.optimizer.load_state_dict(saved[1])
            part(again, range(3, 6))
        return values(model), values(again)

    for expected, found in run_ranks(rank, 2, timeout=20):
        assert same(expected, found)


class _Scaled(nn.Module):
    """It has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 2)


def _give_gradients(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = torch.linspace(-1, 1, p.numel()).view(p.shape).to(p.dtype) + 0.5


@pytest.mark.parametrize(
    ("make", "dtype"), [(torch.optim.AdamW, torch.float32), (adagrad, torch.float32), (adamw, torch.bfloat16)]
)
def test_state_of_torchs_own_optimizer_is_loaded_as_torch_does(make: Make, dtype: torch.dtype) -> None:
    """A parameter without dimensions, one without state, and one whose counter is another one's less one."""
    start = _Scaled()
    optimizer = make(start.parameters())
    for step in range(2):
        _give_gradients(start)
        start.linear.bias.grad = None
        start.scale.grad = None if step == 0 else start.scale.grad
        optimizer.step()
    expected = copy.deepcopy(start).to(dtype)
    its_optimizer = make(expected.parameters())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _give_gradients(expected)
    its_optimizer.step()

    def rank(comm: Communicator) -> tuple[Values, Any]:
        module = copy.deepcopy(start).to(dtype)
        with AsynchronousDataParallel(module, comm, optimizer=make, max_staleness=0) as model:
            model.optimizer.load_state_dict(optimizer.state_dict())
            _give_gradients(module)
            model.step()
            comm.barrier()
            return values(module), model.optimizer.state_dict()["state"]

    for found, state in run_ranks(rank, 2, timeout=20):
        assert same(found, values(expected))
        for i, its in its_optimizer.state_dict()["state"].items():
            assert all(
                torch.equal(value, state[i][key]) and value.dtype == state[i][key].dtype for key, value in its.items()
            )


def test_a_state_dict_is_a_copy() -> None:
    def rank(comm: Communicator) -> None:
        with AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=adamw) as model:
            loss_of(model, 0, 0).backward()
            model.step()
            state = model.optimizer.state_dict()["state"]
            model.step()
        assert {float(its["step"]) for its in state.values()} == {1.0}
        assert len({its["step"].data_ptr() for its in state.values()}) == len(state)

    run_ranks(rank, 1, timeout=20)


# ---- asynchronous --------------------------------------------------------------------------------------------------


def test_no_worker_is_further_ahead_than_the_bound() -> None:
    """The slow one is never waited for within it; every gradient is used, by itself, on every server."""
    made = [0, 0, 0]
    ahead = []

    def before(model: AsynchronousDataParallel, step: int) -> None:
        ahead.append(step - min(made))
        if model.rank == 2:
            time.sleep(0.03)

    def rank(comm: Communicator) -> dict[str, Any]:
        def count(model: AsynchronousDataParallel, step: int) -> None:
            before(model, step)
            made[comm.rank] = step + 1  # a little before it is made: the bound holds all the more

        return train(comm, steps=10, before=count, max_staleness=2)

    found = run_ranks(rank, 3, timeout=20)
    assert 1 <= max(ahead) <= 3  # a step further than the bound counts: it is being made
    for each in found:
        assert each["counters"]["updates"] == sum(each["counters"]["staleness"].values()) == 30
        assert each["counters"]["steps"] == 10
    assert sum(each["counters"]["waits"] for each in found) > 0
    assert all(bool(x.isfinite().all()) for each in found for x in each["values"])


def test_without_a_bound_no_worker_waits() -> None:
    """One worker makes all its steps before the other makes its first."""
    first_is_done = threading.Event()

    def rank(comm: Communicator) -> dict[str, Any]:
        def before(model: AsynchronousDataParallel, step: int) -> None:
            if comm.rank == 1:
                assert first_is_done.wait(20)
            elif step == 5:
                threading.Timer(0.1, first_is_done.set).start()

        return train(comm, steps=6, before=before, max_staleness=None)

    found = run_ranks(rank, 2, timeout=10)
    assert [each["counters"]["waits"] for each in found] == [0, 0]
    assert [each["counters"]["updates"] for each in found] == [12, 12]


def test_the_learning_rate_is_scaled_by_the_staleness() -> None:
    """Two gradients of the same values: the second is one update behind."""

    def rank(comm: Communicator) -> tuple[Values, dict[int, int]]:
        module = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            module.weight.fill_(1.0)
        with AsynchronousDataParallel(
            module, comm, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5), staleness_scale=lambda s: 1 / (1 + s)
        ) as model:
            module.weight.grad = torch.ones(1, 2)
            model.step()
            comm.barrier()
            model.pull()
            comm.barrier()
        return values(module), model.counters()["staleness"]

    for found, staleness in run_ranks(rank, 2, timeout=20):
        assert staleness == {0: 1, 1: 1}
        assert same(found, [torch.full((1, 2), 1.0 - 0.5 - 0.25)])


def _pause(seed: int) -> Callable[[AsynchronousDataParallel, int], None]:
    return lambda model, step: time.sleep(random.Random(1000 * seed + 10 * step + model.rank).random() * 0.02)


def test_a_recorded_order_replays_to_the_same_bits() -> None:
    options = {"make": adamw, "steps": 8, "max_staleness": 3}
    first = run_ranks(lambda c: train(c, before=_pause(1), record=True, **options), 3, timeout=20)
    orders = [each["order"] for each in first]
    assert all(sorted(order) == sorted([*range(-3, 3)] * 8) for order in orders)
    other = run_ranks(lambda c: train(c, before=_pause(2), record=True, **options), 3, timeout=20)
    again = run_ranks(
        lambda c: train(c, before=_pause(3), record=True, replay=orders[c.rank], **options), 3, timeout=20
    )
    assert [each["order"] for each in again] == orders
    assert [each["counters"]["staleness"] for each in again] == [each["counters"]["staleness"] for each in first]
    assert all(same(a["values"], b["values"]) for a, b in zip(first, again, strict=True))
    assert not all(same(a["values"], b["values"]) for a, b in zip(first, other, strict=True))


def test_another_run_than_the_recorded_one_is_refused() -> None:
    orders = [each["order"] for each in run_ranks(lambda c: train(c, steps=2, record=True), 2, timeout=20)]
    with pytest.raises(InvalidArgumentError, match=r"gradient of rank \d that is not in replay.*the recorded run"):
        run_ranks(lambda c: train(c, steps=3, replay=orders[c.rank]), 2, timeout=20)


def test_ranks_that_only_work_and_ranks_that_only_serve() -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        return train(comm, steps=0 if comm.rank == 1 else 4 + comm.rank, servers=[1], max_staleness=1)

    found = run_ranks(rank, 3, timeout=20)
    assert "updates" not in found[0]["counters"]
    assert found[1]["counters"]["updates"] == 4 + 6
    assert found[1]["counters"]["lost"] == {}


def test_over_two_hosts() -> None:
    found = run_ranks(lambda c: train(c, steps=3, max_staleness=0), 4, hosts=[2, 2], timeout=20)
    expected = run_ranks(lambda c: train(c, steps=3, max_staleness=0), 4, timeout=20)
    assert same(found[0]["values"], expected[0]["values"])


def test_buffers_and_frozen_parameters_stay_on_their_rank() -> None:
    def rank(comm: Communicator) -> tuple[Values, float]:
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        module[0].bias.requires_grad_(False)
        with torch.no_grad():
            module[0].bias.fill_(comm.rank)
        with AsynchronousDataParallel(module, comm, optimizer=sgd, max_staleness=0) as model:
            loss_of(model, comm.rank, 0).backward()
            model.step()
        return values(module), float(module[1].running_mean.sum())

    found = run_ranks(rank, 2, timeout=20)
    assert same(found[0][0], found[1][0])
    assert float(found[1][0][1].sum()) == 0.0  # rank 0's
    assert found[0][1] != found[1][1]


# ---- errors --------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    def rank(comm: Communicator) -> None:
        def made(**options: Any) -> AsynchronousDataParallel:
            return AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, **{"optimizer": sgd, **options})

        for servers in ([], [2], [-1], [0, 0]):
            with pytest.raises(InvalidArgumentError, match="each once; pass a list"):
                made(servers=servers)
        with pytest.raises(UnsupportedError, match="LBFGS"):
            made(optimizer=torch.optim.LBFGS)
        with pytest.raises(InvalidArgumentError, match="none of the module's parameters"):
            made(optimizer=lambda _: sgd([nn.Parameter(torch.ones(1))]))
        with pytest.raises(MismatchError, match=r"max_staleness=\d where rank"):
            made(max_staleness=comm.rank)
        with pytest.raises(UnsupportedError, match="no learning rate"):
            made(optimizer=lambda ps: _NoRate(ps), staleness_scale=float)
        model = made()
        with pytest.raises(UnsupportedError, match="copy model"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match="cannot copy or pickle"):
            copy.deepcopy(model.optimizer)
        with pytest.raises(UnsupportedError, match="make a new one"):
            model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        model.close()
        model.close()
        with pytest.raises(ClosedError, match=r"step: rank . expected an open"):
            model.step()

    run_ranks(rank, 2, timeout=20)


class _NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, more)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no such step")


def test_an_optimizer_that_raises_ends_every_worker() -> None:
    def rank(comm: Communicator) -> None:
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=_NoRate, max_staleness=1)
        loss_of(model, 0, 0).backward()
        with pytest.raises(
            RingcommError, match=r"server on rank \d expected to update its shard, raised ValueError: no"
        ):
            model.step()
        with pytest.raises(ClosedError, match=r"in an earlier call: .*no such step"):
            model.step()

    run_ranks(rank, 2, timeout=20)


def test_a_worker_that_stalls_is_named() -> None:
    def steps(model: AsynchronousDataParallel, pause_s: float) -> None:
        for step in range(3):
            loss_of(model, model.rank, step).backward()
            time.sleep(pause_s)
            model.step()

    def rank(comm: Communicator) -> None:
        comm.timeout = 0.7
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=sgd, max_staleness=1, servers=[0])
        said = "has made 2 steps and expected step 1 of rank 1, which has made 0, within" if comm.rank == 0 else ""
        with pytest.raises(CollectiveTimeoutError, match=said or None):
            steps(model, 1.5 * comm.rank)

    run_ranks(rank, 2, timeout=20)


def test_a_load_that_fails_on_one_rank_fails_on_all() -> None:
    def rank(comm: Communicator) -> None:
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=adamw)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})  # on all: it stays open
        state = model.optimizer.state_dict()
        if comm.rank == 1:
            state["state"] = {0: {"exp_avg": torch.ones(1)}}
        kind, said = (ShapeError, "got exp_avg of") if comm.rank == 1 else (AbortedError, "error on rank 1: ShapeError")
        with pytest.raises(kind, match=said):
            model.optimizer.load_state_dict(state)
        assert model.closed

    run_ranks(rank, 2, timeout=10)


def test_a_rank_that_only_serves_raises_the_error_of_its_server() -> None:
    def rank(comm: Communicator) -> None:
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=_NoRate, servers=[0])
        with pytest.raises(RingcommError, match="no such step"):
            model.step() if comm.rank else model.close()

    run_ranks(rank, 2, timeout=20)


@pytest.mark.filterwarnings("error:AsynchronousDataParallel. the server")
def test_a_lost_worker_is_left_out_even_if_warnings_are_errors() -> None:
    def rank(comm: Communicator) -> int:
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=sgd, max_staleness=0, servers=[0])
        with suppress(ValueError), model:
            for step in range(3):
                loss_of(model, comm.rank, step).backward()
                if comm.rank == 2 and step == 1:
                    raise ValueError
                model.step()
        return int(model.counters()["steps"])

    assert run_ranks(rank, 3, timeout=10) == [3, 3, 1]


@pytest.mark.filterwarnings("ignore:AsynchronousDataParallel. the server")
def test_a_server_that_stalls_is_named_by_close() -> None:
    stalls, came = threading.Event(), threading.Event()

    def rank(comm: Communicator) -> None:
        model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=sgd, servers=[0])
        if comm.rank == 1:
            assert stalls.wait(20)
            model._limit_s = 0.3
            with pytest.raises(CollectiveTimeoutError, match="server on rank 0 to answer"):
                model.close()
            came.set()
            return
        assert model._server is not None
        with model._server._changed:
            stalls.set()
            assert came.wait(20)
        model.close()

    run_ranks(rank, 2, timeout=10)


def test_at_the_end_of_the_program_every_model_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the first one raises; an error that was typed in an interactive interpreter did not end the program."""

    def stalls() -> None:
        raise CollectiveTimeoutError("it stalls")

    def rank(comm: Communicator) -> None:
        first, second = (AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=sgd) for _ in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(first, "close", stalls)
            patched.setattr(sys, "last_exc", ValueError("typed"), raising=False)
            patched.setattr(sys, "ps1", ">>> ", raising=False)
            with pytest.raises(CollectiveTimeoutError, match="it stalls"):
                asynchronous._end_all()
            patched.delattr(sys, "ps1")
            asynchronous._end_all()
        with pytest.raises(ClosedError, match="ValueError in an earlier call: typed"):
            first.step()
        with pytest.raises(ClosedError, match="one that was closed"):
            second.step()

    run_ranks(rank, 1, timeout=10)


# ---- processes that end --------------------------------------------------------------------------------------------


def _process(folder: str, rank: int, world_size: int, how: str, victim: int, servers: list[int] | None) -> None:
    """Trains for 12 steps; the victim ends in some way in its 4th. Writes what it saw."""
    store = FileStore(f"{folder}/store", world_size)
    comm = ringcomm.init(rank, world_size, store=store, timeout=timedelta(seconds=20))
    model = AsynchronousDataParallel(copy.deepcopy(PLAIN), comm, optimizer=sgd, max_staleness=2, servers=servers)

    def steps() -> None:
        for step in range(12):
            loss_of(model, rank, step).backward()
            if rank == victim and step == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raises":
                    raise ValueError("its own")
                if how == "leaves":
                    sys.exit(0)
            model.step()
            time.sleep(0.01)

    said = "finished"
    try:
        if how == "raises":
            with model:
                steps()
        else:
            steps()
            model.close()
    except RingcommError as error:
        said = f"{type(error).__name__}: {error}"
    except ValueError as error:
        said = f"own {error}"
    lost = model.counters().get("lost", {})
    Path(folder, str(rank)).write_text(f"{said}\n{model.counters()['steps']} {sorted(lost)}")


def _outcomes(folder: Path, how: str, victim: int, servers: list[int] | None) -> dict[int, str]:
    started = [
        forked.context().Process(target=_process, args=(str(folder), rank, 3, how, victim, servers), daemon=True)
        for rank in range(3)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(40)
        assert not process.is_alive()
    return {rank: path.read_text() for rank in range(3) if (path := folder / str(rank)).exists()}


@pytest.mark.filterwarnings("ignore:AsynchronousDataParallel. the server")
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_worker_that_ends_leaves_the_others_running(how: str, tmp_path: Path) -> None:
    found = _outcomes(tmp_path, how, 2, [0, 1])
    assert [found[rank] for rank in (0, 1)] == ["finished\n12 [2]"] * 2
    assert found.get(2, "") == ("own its own\n3 []" if how == "raises" else "")


def test_the_end_of_a_server_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    found = _outcomes(tmp_path, "killed", 1, None)
    for rank in (0, 2):
        assert found[rank].startswith("RankLostError: ")
        assert "server on rank 1" in found[rank] or "rank 1" in found[rank]


def test_a_server_that_leaves_with_an_error_says_so(tmp_path: Path) -> None:
    found = _outcomes(tmp_path, "raises", 1, None)
    assert all(found[rank].startswith("AbortedError: ") for rank in (0, 2))
    assert "ValueError: its own" in found[0] or "ValueError: its own" in found[2]


def test_a_program_that_ends_without_close_serves_until_the_others_have(tmp_path: Path) -> None:
    found = _outcomes(tmp_path, "leaves", 0, None)
    assert found == {1: "finished\n12 []", 2: "finished\n12 []"}


def test_no_thread_is_left() -> None:
    run_ranks(lambda c: train(c, steps=1), 3, timeout=20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ringcomm server")]
