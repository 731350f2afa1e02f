"""`_C.Arrivals`: what hooks of gradients note natively, and when they call Python."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ringcomm import _C


class Pass:
    """A fake autograd pass: its number, and the callbacks that hooks have queued."""

    def __init__(self) -> None:
        self.task = 7
        self.arrivals = _C.Arrivals(lambda: self.task)
        self.arrival_sets: list[set[int]] = []
        self.prepared: list[int] = []
        self.hooks = [self.arrivals.hook(5, 3, i, self.arrival_sets, self.prepare) for i in range(3)]

    def prepare(self, i: int) -> None:
        self.prepared.append(i)
        if not self.arrival_sets:
            self.arrival_sets[:] = set(), set()
        self.arrivals.expected = self.task

    def add(self, i: int, gradient: Any = 0.0) -> None:
        assert self.hooks[i]((gradient,)) is None


def test_python_is_called_once_in_a_pass() -> None:
    one = Pass()
    one.add(2)
    one.add(0, None)
    assert (one.prepared, one.arrival_sets) == ([2], [{0, 2}, {2}])
    assert one.arrivals.take_complete() == -1
    one.add(1)
    assert one.prepared == [2]
    assert [one.arrivals.take_complete() for _ in range(2)] == [5, -1]


def test_python_is_called_after_a_group_s_last_gradient() -> None:
    one = Pass()
    for i in (0, 1, 2, 1):
        one.add(i)
    assert one.prepared == [0, 1]


def test_another_pass_is_not_expected() -> None:
    one = Pass()
    one.add(0)
    one.task = 8
    one.add(1)
    assert one.prepared == [0, 1]
    one.arrivals.end()
    one.add(0)
    assert one.prepared == [0, 1, 0]


def test_what_is_not_prepared_is_not_noted() -> None:
    arrival_sets: list[set[int]] = []
    hook = _C.Arrivals(lambda: 1).hook(0, 1, 0, arrival_sets, lambda i: None)
    assert hook((0.0,)) is None
    assert arrival_sets == []


def test_another_thread_s_last_gradient_may_not_be_added_yet() -> None:
    one = Pass()
    thread = threading.Thread(target=lambda: [one.add(i) for i in range(3)])
    thread.start()
    thread.join(10)
    assert (one.arrivals.take_complete(), one.arrivals.adding_elsewhere()) == (-1, 5)
    one.add(0)
    assert (one.arrivals.take_complete(), one.arrivals.adding_elsewhere()) == (5, -1)


def test_an_error_of_prepare_reaches_autograd() -> None:
    def refuse(i: int) -> None:
        raise ValueError(f"parameter {i}")

    p = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        node = p.view_as(p).grad_fn.next_functions[0][0]
    node.register_prehook(_C.Arrivals(torch._C._current_graph_task_id).hook(0, 1, 0, [], refuse))
    with pytest.raises(ValueError, match="parameter 0"):
        (p * p).sum().backward()
    assert p.grad is None


def test_addresses_tell_whether_dicts_hold_the_same_objects() -> None:
    a, b = object(), object()
    first, second = {"a": a}, {"b": b}
    before = _C.addresses([first, second])
    assert _C.addresses([first, second]) == before
    second["b"] = a
    assert _C.addresses([first, second]) != before
    second["b"] = b
    assert _C.addresses([first, second]) == before
    first["c"] = None
    assert _C.addresses([first, second]) != before
