"""A short fault campaign: a trial of each kind of fault with processes, and one of most kinds with threads; `make
test-all` has two of each. Many more: `python -m benchmarks.collectives.faults`."""

from __future__ import annotations

import pytest

from tests.support.choice import choose
from tests.support.faults import plan, trials

SEED = 1
TRIALS = [plan.trial_of(SEED, number) for number in range(4 * len(plan.KINDS))]
CHOSEN = (1, 2, 3, 7, 8, 9, 10, 16, 17, 18, 20, 21)  # with training, messages and torch.distributed among them


@pytest.mark.parametrize(
    "trial", choose(TRIALS, CHOSEN, by="number"), ids=lambda each: f"{each.fault.kind}-{each.ranks}-{each.number}"
)
def test_a_fault_is_told_to_all_and_leaves_nothing_behind(trial: plan.Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    # Up to eight ranks share two cores with another test. The campaign by itself judges the usual times.
    monkeypatch.setattr(trials, "HEARD_S", 8.0)
    monkeypatch.setattr(trials, "STALLED_S", 8.0)
    verdict = trials.run(trial, trials.prepare())
    assert not verdict.problems, "\n".join([str(trial), *(f"{kind}: {text}" for kind, text in verdict.problems)])
