"""Offload: master weights, optimizer and gradients in memory of their own; the same bits as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ringcomm

WORLD = 3


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))


def train(comm: ringcomm.Communicator, model: nn.Module, stage: int, **options: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.004, **options)
    for step in range(6):
        if step == 4:
            ringcomm.restage(model, optimizer, (stage + 1) % 4)
        for _ in range(2):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            model(x).float().square().mean().backward()
        ringcomm.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def run(stage: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    models = [make() for _ in range(WORLD)]

    def rank(comm: ringcomm.Communicator) -> dict[str, torch.Tensor]:
        return train(comm, models[comm.rank], stage, **options)

    return ringcomm.run_ranks(rank, WORLD, timeout=30)


@pytest.mark.parametrize("precision", [None, ringcomm.MixedPrecision(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_same_bits(stage: int, precision: ringcomm.MixedPrecision | None) -> None:
    expected = run(stage, mixed_precision=precision)
    for got, wanted in zip(run(stage, mixed_precision=precision, offload=True), expected, strict=True):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("stage", range(4))
def test_a_loss_scale_is_out_of_the_norm(stage: int) -> None:
    """The gradient and its copy in the host's memory are unscaled alike."""
    models = [[make() for _ in range(WORLD)] for _ in range(2)]

    def rank(comm: ringcomm.Communicator) -> list[list[torch.Tensor]]:
        found = []
        for offload in (False, True):
            model = models[offload][comm.rank]
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            ringcomm.shard(model, optimizer, stage, comm, bucket_cap_mb=0.004, offload=offload)
            scaler, norms = ringcomm.GradScaler(init_scale=1024.0), []
            for step in range(3):
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                for _ in range(2):
                    scaler.scale(model(x).square().mean()).backward()
                scaler.unscale_(optimizer)
                norms.append(ringcomm.clip_grad_norm_(model, 0.1))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append([*norms, *(value.clone() for value in model.state_dict().values())])
        return found

    for plain, offloaded in ringcomm.run_ranks(rank, WORLD, timeout=30):
        assert all(map(torch.equal, plain, offloaded))


def test_what_is_done_to_a_whole_gradient_reaches_the_optimizer() -> None:
    """At stage 0, whose gradients are whole, as by torch's own clipping."""
    found = []
    for offload in (False, True):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ringcomm.shard(model, optimizer, 0, offload=offload)
        model(torch.ones(2, 24)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_what_the_optimizer_works_on_lies_apart() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    ringcomm.shard(model, optimizer, 0, offload="cpu")
    model(torch.ones(2, 24)).sum().backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    with optimizer._ringcomm.in_step():
        for p in optimizer.param_groups[0]["params"]:
            assert p.untyped_storage().data_ptr() not in weights
            assert p.grad is not None
            assert p.grad.untyped_storage().data_ptr() not in gradients


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_zero_that_is_written_keeps_its_sign(stage: int, mixed: bool) -> None:
    """Also where the master weights lie elsewhere."""

    def rank(comm: ringcomm.Communicator) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = ringcomm.MixedPrecision(torch.bfloat16) if mixed else None
        ringcomm.shard(model, optimizer, stage, comm, offload=not mixed, mixed_precision=precision)
        with torch.no_grad():
            model.weight.zero_()
            model.weight.neg_()
        ringcomm.restage(model, optimizer, (stage + 1) % 4)  # from the master weights
        assert bool(torch.signbit(model.state_dict()["weight"]).all())

    ringcomm.run_ranks(rank, 2, timeout=20)
