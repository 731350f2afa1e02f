"""A short fault campaign: two trials of each kind of fault with processes, and two with threads. Many more:
`python -m benchmarks.collectives.faults`."""

from __future__ import annotations

import pytest

from tests.support import fault_plan, fault_trials

SEED = 1
TRIALS = [fault_plan.trial_of(SEED, number) for number in range(4 * len(fault_plan.KINDS))]


@pytest.mark.parametrize("trial", TRIALS, ids=[f"{each.fault.kind}-{each.ranks}-{each.number}" for each in TRIALS])
def test_a_fault_is_told_to_all_and_leaves_nothing_behind(
    trial: fault_plan.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Up to eight ranks share two cores with another test. The campaign by itself judges the usual times.
    monkeypatch.setattr(fault_trials, "HEARD_S", 8.0)
    monkeypatch.setattr(fault_trials, "STALLED_S", 8.0)
    verdict = fault_trials.run(trial, fault_trials.prepare())
    assert not verdict.problems, "\n".join([str(trial), *(f"{kind}: {text}" for kind, text in verdict.problems)])
