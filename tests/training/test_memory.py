"""Memory and traffic of a model: measured in real training, planned without it, and counted by hand."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.data_parallel.memory import Memory, Plan, memory, predict, traffic
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.tools import cli
from ringcomm.tools.memory import bytes_per_rank
from tests.support.choice import slow
from tests.support.training.parity import OPTIMIZERS, Case, Net, background_is, loss_of, net, optimizer_of, tokens_of

STAGES = (0, 1, 2, 3)
SMALL_MB = 0.001
BF16 = ringcomm.MixedPrecision(torch.bfloat16)


def trained(
    comm: ringcomm.Communicator, model: Net, case: Case, stage: int, steps: int = 3, **how: Any
) -> tuple[Net, torch.optim.Optimizer, dict[str, int]]:
    """A sharded model after some steps, and the last one's traffic."""
    opt = optimizer_of(model, case.optimizer)
    ringcomm.shard(model, opt, stage, comm, **{"bucket_cap_mb": SMALL_MB, **how})
    ranks = sharded_model_of(model).ranks
    for step in range(steps):
        ranks.traffic.clear()
        for k in range(case.accumulate):
            quiet = case.no_sync and k < case.accumulate - 1
            with ringcomm.no_sync(model) if quiet else contextlib.nullcontext():
                tokens = tokens_of(case, comm.rank, step, k)
                loss_of(model(tokens, comm.rank), tokens).backward()
        opt.step()
        model.zero_grad()
    return model, opt, dict(ranks.traffic)


def everywhere(world_size: int, fn: Any) -> list[Any]:
    return ringcomm.run_ranks(fn, world_size, ranks="threads", timeout=20)


SETTINGS: list[tuple[Case, dict[str, Any]]] = [
    *((Case(3, optimizer=optimizer), {}) for optimizer in OPTIMIZERS),
    (Case(1), {}),
    (Case(2, batch_norm=True), {}),
    (Case(4, accumulate=4, tied=True), {"bucket_cap_mb": 25}),
    (Case(3, accumulate=4, frozen=True), {}),
    (Case(3, accumulate=2, no_sync=False), {}),
    (Case(2, accumulate=4, tied=True), {"accumulation": "tree"}),
    (Case(3, accumulate=2), {"mixed_precision": BF16}),
    (Case(3), {"mixed_precision": ringcomm.MixedPrecision(reduce_dtype=torch.float8_e4m3fn)}),
    (Case(3), {"mixed_precision": ringcomm.MixedPrecision(torch.float16, reduce_dtype=torch.float16)}),
    (Case(3), {"offload": True}),
    (Case(3), {"reshard_after_forward": False}),
    (Case(3), {"atom": "row"}),
    (Case(2), {"atom": 64}),
    (Case(4), {"atom": "tensor"}),
]
# What `make test` leaves out, by its number: other optimizers, and settings of which another case has the effect.
SPARE = (0, 1, 2, 3, 7, 8, 13, 17, 19)


@pytest.mark.parametrize(
    ("case", "how", "background"),
    [
        pytest.param(case, how, number % 2 == 0, marks=[pytest.mark.slow] if number in SPARE else [])
        for number, (case, how) in enumerate(SETTINGS)
    ],
    ids=[f"{case},{','.join(how)}" for case, how in SETTINGS],
)
def test_plan_is_what_is_resident_and_what_is_sent(case: Case, how: dict[str, Any], background: bool) -> None:
    """At every stage, from the plain model and from one that is sharded at another stage over other ranks."""
    model = net(case)
    plain = {{"accumulation": "accumulation_order"}.get(name, name): value for name, value in how.items()}
    plain = {"bucket_cap_mb": SMALL_MB, **plain}
    plan = {"accumulation": case.accumulate, "no_sync": case.no_sync, "background": background}

    def elsewhere(comm: ringcomm.Communicator) -> tuple[Net, torch.optim.Optimizer, dict[str, int]]:
        return trained(comm, copy.deepcopy(model), case, 2, steps=1, **how)

    elsewhere_trained = everywhere(2, elsewhere)[0]  # its optimizer would go if it were dropped
    other = elsewhere_trained[0]

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            mine, opt, sent = trained(comm, copy.deepcopy(model), case, stage, **how)
            held = memory(mine)
            assert held == memory(mine, opt)
            again = copy.deepcopy(model)
            plans = {
                "itself": Plan(mine, stage, comm.world_size, **plan),
                "another": Plan(other, stage, comm.world_size, rank=comm.rank, **plan),
                "plain": Plan(
                    again, stage, comm.world_size, optimizer_of(again, case.optimizer), rank=comm.rank, **plan, **plain
                ),
            }
            for name, each in plans.items():
                assert each.memory == held, f"stage {stage}, rank {comm.rank}, {name}"
                assert dict(each.traffic) == sent, f"stage {stage}, rank {comm.rank}, {name}"
            assert all(p.grad is None for p in again.parameters())

    with background_is(background):
        everywhere(case.world_size, rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_figures_by_hand(world_size: int) -> None:
    """One square layer, Adam, float32 and bfloat16: multiples of the number of parameters."""
    numel = 384 * 64  # whole shards for 1 to 4 ranks

    def rank(comm: ringcomm.Communicator) -> None:
        for stage in STAGES:
            shards = [1 / world_size if stage >= at else 1 for at in (3, 2, 1)]
            for precision, width in ((None, 4), (BF16, 2)):
                model = nn.Linear(64, 384, bias=False)
                opt = torch.optim.Adam(model.parameters())
                ringcomm.shard(model, opt, stage, comm, mixed_precision=precision, bucket_cap_mb=25)
                model(torch.ones(1, 64)).sum().backward()
                sent = sharded_model_of(model).ranks.traffic.copy()
                opt.step()
                held = memory(model)
                assert held.parameters == width * numel * shards[0]
                assert held.gradients == 4 * numel * shards[1]
                assert held.optimizer == 8 * numel * shards[2] + 4  # and a step counter
                assert held.master == (4 * numel * shards[2] if width == 2 else 0)
                reduction = "all_reduce" if stage == 0 else "reduce_scatter"
                assert (sent[f"{reduction} calls"], sent[f"{reduction} bytes"]) == (1, 4 * numel)
                assert sent["all_gather bytes"] == (width * numel if stage == 3 else 0)
                hers = sharded_model_of(model).ranks.traffic["all_gather bytes"]
                assert hers == (width * numel if stage == 3 or (stage and world_size > 1) else 0)

    everywhere(world_size, rank)


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
@pytest.mark.parametrize("how", [{}, {"mixed_precision": BF16}], ids=["float32", "bfloat16"])
def test_nothing_is_held_that_is_not_reported(stage: int, how: dict[str, Any]) -> None:
    """A census of all tensors that live after training, of all ranks of this process."""
    case, model = Case(3, batch_norm=True), net(Case(3, batch_norm=True))

    def rank(comm: ringcomm.Communicator) -> Any:
        kept = trained(comm, copy.deepcopy(model), case, stage, **how)
        comm.barrier()
        return kept

    before = living()
    ranks = everywhere(3, rank)
    found = sum(nbytes for key, nbytes in living().items() if key not in before)
    buckets = [bucket for kept in ranks for bucket in sharded_model_of(kept[0]).buckets]
    constants = sum(bucket.types.compute.itemsize for bucket in buckets if stage == 3)  # what placeholders expand
    said = [memory(kept[0]) for kept in ranks]
    assert found == sum(each.resident + each.transient for each in said) + constants


def living() -> dict[int, int]:
    """Bytes of every storage that a tensor which Python knows of refers to."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and x.device.type == "cpu"]
    tensors += [x for x in gc.get_objects() if type(x).__name__ == "ShardedParameter"]
    with torch._C.DisableTorchFunctionSubclass():
        plain = [x.untyped_storage() for x in tensors if x.layout == torch.strided]  # other tests may leave others
    return {storage._cdata: storage.nbytes() for storage in plain}


def test_a_plain_model_is_measured_too() -> None:
    model = nn.Linear(10, 5)
    opt = torch.optim.Adam(model.parameters())
    assert memory(model, opt) == Memory(4 * 55, 0, 0, 0, 0, 0, 0)
    model(torch.ones(1, 10)).sum().backward()
    opt.step()
    assert memory(model, opt) == Memory(4 * 55, 0, 4 * 55, 8 * 55 + 8, 0, 0, 0)


def test_ignored_parameters_are_planned_too() -> None:
    def rank(comm: ringcomm.Communicator) -> tuple[Memory, Memory]:
        model = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 70))
        ringcomm.fully_shard(model, comm=comm, ignored_params=set(model[0].parameters()))
        opt = torch.optim.Adam(model.parameters())
        for _ in range(2):
            opt.zero_grad()
            model(torch.ones(1, 10)).sum().backward()
            opt.step()
        return memory(model), predict(model, 3, comm.world_size)

    for found, planned in everywhere(3, rank):
        assert found.optimizer > 8 * 55
        assert found == planned


def test_a_plan_needs_no_memory() -> None:
    """A model of 64 GiB of parameters on the meta device, over 1024 ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(16)))
    opt = torch.optim.AdamW(model.parameters())
    for stage in STAGES:
        held = predict(model, stage, 1024, opt, mixed_precision=BF16)
        numel = 2**34
        assert held.parameters == 2 * numel // (1024 if stage == 3 else 1)
        assert held.optimizer == 8 * numel // (1024 if stage else 1) + 4 * 16
        sent = traffic(model, stage, 1024, opt, mixed_precision=BF16)
        assert sent.get("all_gather bytes", 0) == [0, 2 * numel, 2 * numel, 4 * numel][stage]


def test_the_table_names_everything() -> None:
    text = str(Memory(2**20, 2**21, 0, 0, 0, 2**20, 0))
    assert "parameters         1.000 MiB" in text
    assert "resident           3.000 MiB" in text
    assert "peak               4.000 MiB" in text


class Odd(torch.optim.Optimizer):
    """State of a shape of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = torch.zeros(29)


def test_what_cannot_be_planned_is_refused() -> None:
    model = nn.Linear(10, 5)
    with pytest.raises(UnsupportedError, match="Odd, whose history is of shape"):
        predict(model, 1, 2, Odd(model.parameters()))
    with pytest.raises(InvalidArgumentError, match="stage=4"):
        predict(model, 4, 2)
    with pytest.raises(InvalidArgumentError, match="world_size=0"):
        predict(model, 0, 0)


def test_optimizer_hooks_and_state_are_left_alone() -> None:
    model = nn.Linear(10, 5)
    opt = torch.optim.SGD(model.parameters(), momentum=0.9)
    calls: list[Any] = []
    opt.register_step_pre_hook(lambda *args: calls.append(args))
    assert predict(model, 1, 3, opt).optimizer == 4 * 32  # a third of 50, in lines of 128 bytes
    assert calls == []
    assert not opt.state


@pytest.mark.parametrize(("world_size", "stage"), [(8, stage) for stage in STAGES])
def test_the_formula_of_the_command_is_that_of_the_plan(world_size: int, stage: int) -> None:
    """Where nothing is lost to alignment."""
    model = nn.Linear(2**10, 2**10, bias=False)
    opt = torch.optim.AdamW(model.parameters())
    for precision, name in ((None, "fp32"), (BF16, "bf16")):
        held = predict(model, stage, world_size, opt, mixed_precision=precision)
        found = bytes_per_rank(2**20, world_size, stage, name, "adamw")
        assert math.isclose(sum(found.values()), held.resident, rel_tol=1e-5)
        assert {key: round(value) for key, value in found.items() if key != "optimizer"} == {
            key: getattr(held, key) for key in found if key != "optimizer"
        }


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "7B", "--world", "1", "64", "--precision", "bf16"]) == 0
    text = capsys.readouterr().out
    assert "7,000,000,000 parameters" in text
    assert "117.35" in text  # 18 bytes a parameter, in GiB, on one rank
    assert cli.main(["memory", "--layers", "12", "--width", "768", "--vocabulary", "50257"]) == 0
    assert "123,532,032 parameters" in capsys.readouterr().out
    for wrong in (["memory"], ["memory", "many"], ["memory", "-5"], ["memory", "7B", "--layers", "3"]):
        assert cli.main(wrong) == 2
    assert "expected" in capsys.readouterr().err
