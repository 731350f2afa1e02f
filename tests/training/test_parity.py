"""Every stage gives the same bits, and the numbers of one process.

The axes are covered in pairs: any two settings of two axes meet in a case. Of these, `make test` runs every second one.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.choice import slow
from tests.support.training.parity import (
    BUCKETS_MB,
    OPTIMIZERS,
    Case,
    Result,
    background_is,
    cases,
    differences,
    flattened,
    train_alone,
    train_ranks,
)

STAGES = (0, 1, 2, 3)
FLAGS = (False, True)
AXES: dict[str, Any] = {
    "optimizer": OPTIMIZERS,
    "precision": ("fp32", "bf16", "fp16", "autocast"),
    "world_size": (3, 4, 2, 1),
    "accumulate": (4, 1),
    "no_sync": (True, False),
    "clip": ("2", "", "inf"),
    **dict.fromkeys(("tied", "frozen", "unused", "some_ranks", "batch_norm", "uneven", "checkpoint", "tree"), FLAGS),
}
NUMBERS = {**AXES, "precision": ("fp64", "fp32", "bf16", "fp16"), "batch_norm": (False,), "optimizer": OPTIMIZERS[:-1]}
RTOL = {"fp64": 1e-9, "fp32": 2e-4, "bf16": 5e-2, "fp16": 1e-2}
ATOL = {"fp64": 1e-11, "fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


def spare(number: int) -> list[pytest.MarkDecorator]:
    """Marks what `make test` leaves out of a list of cases: it takes every second one, in which all settings occur."""
    return [pytest.mark.slow] if number % 2 else []


def same_at_every_stage(case: Case, turn: int | None = None) -> list[list[Result]]:
    """Trains at all stages with all bucket sizes, or with one at each; they and the ranks agree to the last bit."""
    runs = [{"stage": stage, "bucket_mb": mb} for stage in STAGES for mb in BUCKETS_MB]
    if turn is not None:
        runs = [runs[3 * stage + (stage + turn) % 3] for stage in STAGES]
    results = train_ranks(case, runs)
    for run, ranks in zip(runs, results, strict=True):
        for rank, result in enumerate(ranks):
            assert differences(results[0][rank], result) == [], f"{run}, rank {rank}"
            own = {name for name in differences(ranks[0], result, losses=False) if not name.startswith("batch_norm.r")}
            assert own == set(), f"{run}, rank {rank} and rank 0"  # running statistics are each rank's
    return results


def close_to_one_process(case: Case) -> None:
    """The numbers of one process on the whole batch, at stages 0 and 3."""
    alone = train_alone(case)
    for ranks in train_ranks(case, [{"stage": 0}, {"stage": 3, "bucket_mb": 0.001}]):
        losses = torch.stack([result.losses for result in ranks]).mean(0)
        tolerance = {"rtol": RTOL[case.precision], "atol": ATOL[case.precision]}
        torch.testing.assert_close(losses, alone.losses, **tolerance)
        found, expected = flattened(ranks[0], losses=False), flattened(alone, losses=False)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("case", "turn"),
    [
        *(pytest.param(case, turn, id=str(case), marks=spare(turn)) for turn, case in enumerate(cases(AXES))),
        *(pytest.param(case, None, id=f"{case}, all", marks=pytest.mark.slow) for case in cases(AXES)),
    ],
)
def test_every_stage_and_bucket_size_gives_the_same_bits(case: Case, turn: int | None) -> None:
    results = same_at_every_stage(case, turn)
    first = results[0][0]
    assert torch.isfinite(first.losses).all()
    assert first.optimizer["state"], "nothing was trained"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=spare(number)) for number, case in enumerate(cases(NUMBERS))]
)
def test_the_numbers_are_those_of_one_process(case: Case) -> None:
    close_to_one_process(case)


@pytest.mark.parametrize("precision", [slow("fp32"), "bf16"])
@pytest.mark.parametrize("clip", [slow(""), "2"])
def test_tree_accumulation_does_not_depend_on_the_world_size(precision: str, clip: str) -> None:
    """Eight micro-batches, dealt out to 1, 2, 4 and 8 ranks."""
    found = {}
    for world_size in (1, 2, 4, 8):
        case = Dealt(world_size, accumulate=8 // world_size, precision=precision, clip=clip, tree=True, tied=True)
        for stage, ranks in zip((0, 3), train_ranks(case, [{"stage": 0}, {"stage": 3}]), strict=True):
            found[world_size, stage] = ranks[0]
    for where, result in found.items():
        assert differences(found[1, 0], result, losses=False) == [], where


@pytest.mark.parametrize("precision", [slow("fp32"), "bf16"])
@pytest.mark.parametrize("optimizer", [slow("adamw"), "adafactor"])
def test_restaging_between_any_two_stages_changes_nothing(precision: str, optimizer: str) -> None:
    case = Case(3, precision=precision, optimizer=optimizer, tied=True, frozen=True, unused=True, accumulate=2)
    ways = [(a, b) for a, b in itertools.permutations(STAGES, 2)]
    runs: list[dict[str, Any]] = [{"stage": 0}] + [{"stage": a, "restages": (b, a)} for a, b in ways]
    plain, *moved = train_ranks(case, runs, steps=3)
    for way, ranks in zip(ways, moved, strict=True):
        for rank, result in enumerate(ranks):
            assert differences(plain[rank], result) == [], f"{way}, rank {rank}"


MOST = Case(3, accumulate=3, precision="fp16", clip="inf", tree=True, frozen=True, uneven=True)


@pytest.mark.parametrize(
    ("case", "turn"),
    [  # the last has most of what the others have; one size of buckets at each stage, the smallest at 0 and 3
        slow(Case(3, accumulate=4, clip="2", tied=True, unused=True, some_ranks=True), None),
        slow(Case(4, accumulate=2, no_sync=False, precision="bf16", batch_norm=True, checkpoint=True), None),
        slow(MOST, None),
        (MOST, 1),
    ],
    ids=str,
)
def test_collectives_beside_the_computation_give_the_same_bits(case: Case, turn: int | None) -> None:
    """As on machines with cores to spare; what is in flight must not be touched."""
    found = []
    for background in FLAGS:
        with background_is(background):
            found.append(same_at_every_stage(case, turn))
    for inline, beside in zip(*found, strict=True):
        for rank, result in enumerate(inline):
            assert differences(result, beside[rank]) == [], f"rank {rank}"


def test_a_different_order_of_addition_would_be_seen() -> None:
    """The comparison can fail: sums of four passes in another order have other bits."""
    case = Case(3, accumulate=4)
    first, second = (train_ranks(replace(case, tree=tree), [{"stage": 1}])[0][0] for tree in FLAGS)
    assert differences(first, second) != []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize("trait", ["", "tied", "frozen", "unused", "some_ranks", "batch_norm", "uneven", "all"])
def test_traits(world_size: int, precision: str, trait: str) -> None:
    """Every trait, type and number of ranks, with two draws of accumulation, clipping, checkpointing and optimizer; all
    of their combinations would take a day."""
    traits = ["tied", "frozen", "unused", "some_ranks", "batch_norm", "uneven"]
    on = dict.fromkeys(traits if trait == "all" else [trait] if trait else [], True)
    rest = list(itertools.product((1, 4), ("", "2"), FLAGS, OPTIMIZERS))
    for accumulate, clip, again, optimizer in random.Random(f"{world_size} {precision} {trait}").sample(rest, 2):
        same_at_every_stage(
            Case(world_size, accumulate, True, precision, clip=clip, checkpoint=again, optimizer=optimizer, **on)
        )


class Dealt(Case):
    """Micro-batches that are the same whoever gets them: rank r has the r-th run of neighbours."""

    def number(self, rank: int, k: int) -> int:
        """The micro-batch's number among all."""
        return rank * self.accumulate + k
