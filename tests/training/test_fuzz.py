"""Random training programs in every placement, bit by bit; and that planted faults are found and made small.

`benchmarks/training/fuzz.py` is the long form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.choice import choose, slow
from tests.support.mesh.faults import FAULTS as MESH_FAULTS
from tests.support.training.faults import FAULTS, Fault
from tests.support.training.programs import FEATURES, KINDS, Program, generate
from tests.support.training.runner import STAGES, Failure, Runner, places_of

SEED = int(os.environ.get("RINGCOMM_FUZZ_SEED", "0"))
MOST_SEARCHED = 400  # programs until a planted fault must be found

SOON = (  # in communication, checkpoints and autograd; the first programs find them, and one more is made small below
    *("shard that the others do not get", "values that are not loaded", "undefined gradient that counts"),
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as running:
        yield running


def told(program: Program, failures: list[Failure]) -> str:
    return "\n".join([str(program), *map(str, failures)])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("programs", [5, slow(60)])
def test_random_programs_have_the_same_bits_in_every_placement(runner: Runner, programs: int) -> None:
    for seed in range(SEED, SEED + programs):
        program = generate(seed)
        failures = runner.failures(program)
        if failures:
            smallest = runner.shrunk(program, failures[0])
            pytest.fail(f"program {seed}:\n{told(program, failures)}\nmade smaller:\n{smallest}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [1, slow(8)])
def test_ranks_that_are_processes(number: int) -> None:
    """With torch's own dropout."""
    with Runner(processes=True) as runner:
        programs = [generate(seed) for seed in range(1000, 1100)]
        drops = [p for p in programs if any(block.kind == "dropout" for block in p.blocks)]
        for program in drops[:number]:
            assert not (failures := runner.failures(program)), told(program, failures)


def test_a_program_is_a_function_of_its_seed_and_its_edits() -> None:
    program = generate(17)
    assert str(program) == str(generate(17)) != str(generate(18))
    smaller = generate(17, edits=(f"drop block {program.blocks[0].number}", "steps 1"))
    assert smaller.blocks == program.blocks[1:]
    assert smaller.steps == 1


def test_every_feature_and_kind_is_drawn() -> None:
    programs = [generate(seed) for seed in range(600)]
    kinds = {block.kind for program in programs for block in program.blocks}
    features = {name for program in programs for name in program.features}
    assert kinds == set(KINDS)
    assert features | {name for name in KINDS.values() if name} | {
        name for name in FEATURES if name.startswith("optimizer.")
    } == set(FEATURES)
    assert {place for program in programs for place in places_of(program)} >= {"plain", "torch", "ddp", *STAGES}


def test_every_fault_takes_the_arguments_of_what_it_replaces() -> None:
    for fault in [*FAULTS, *MESH_FAULTS]:
        fault.plant(lambda home, attribute, wrong: None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", choose(FAULTS, SOON, by="name"), ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    found: tuple[Program, list[Failure]] | None = None
    with monkeypatch.context() as planted:
        fault.plant(planted.setattr)
        for seed in range(SEED, SEED + MOST_SEARCHED):
            program = generate(seed)
            if fault.needs <= features_of(program) and (failures := runner.failures(program)):
                found = program, failures
                break
    assert found is not None, f"{fault.name} was not found in {MOST_SEARCHED} programs"
    assert not runner.failures(found[0]), "the program fails without the fault, too"


def features_of(program: Program) -> set[str]:
    """With those of the blocks."""
    return {*program.features, *(KINDS[block.kind] for block in program.blocks)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failing_program_is_made_small(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        next(fault for fault in FAULTS if fault.name == "mean added twice").plant(planted.setattr)
        program = next(p for p in (generate(s) for s in range(1000)) if "accumulate.each" in p)
        failures = runner.failures(program)
        smallest = runner.shrunk(program, failures[0])
    assert smallest.features == {"accumulate.each"}
    assert (len(smallest.blocks), len(smallest.calls), smallest.steps, smallest.passes) == (1, 1, 1, 2)
    assert torch.is_grad_enabled()
