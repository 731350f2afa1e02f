"""Copies of a parallelized model in its own process, such as averages of its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.mesh.tensor_cases import on_parts, unlike
from tests.tensor_parallel.test_plan import KINDS, loss_of, make

pytestmark = pytest.mark.usefixtures("one_thread")


def averaged(model: nn.Module, early: bool) -> tuple[float, float, nn.Module]:
    """Trains with an average of the weights; returns the last loss, that of the average, and the average with its
    gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if not early:
        loss_of(model)[0].backward()
        model.zero_grad()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        loss = loss_of(model, step)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    of_average = loss_of(average)[0]
    of_average.backward()
    assert all(p.grad is None for p in model.parameters())
    return float(loss), float(of_average), average.module


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("kind", "verify"), [("tensor", False), ("sequence", False), ("tensor", True), ("sequence", True)]
)
def test_an_average_of_the_weights(kind: str, verify: bool, early: bool) -> None:
    whole = make(0)
    expected = averaged(whole, early)
    plan, options = KINDS[kind]

    def check(model: nn.Module, comm: Any) -> None:
        last, of_average, average = averaged(model, early)
        assert abs(last - expected[0]) < 1e-9
        assert abs(of_average - expected[1]) < 1e-9
        assert abs(of_average - last) > 1e-6
        assert unlike(average, expected[2], 100) == []

    on_parts(make(0), plan, check, **options, verify=verify)
