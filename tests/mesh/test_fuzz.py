"""Random models on random meshes against one process, and that planted faults are found and made small.

`benchmarks/training/mesh_fuzz.py` is the long form.
"""

from __future__ import annotations

import os
from operator import attrgetter

import pytest

from tests.support.choice import choose, slow
from tests.support.mesh.faults import FAULTS
from tests.support.mesh.programs import CHANCES, KINDS, MIXING, MODEL, SCHEDULES, Program, generate
from tests.support.mesh.runner import Runner, has_bits
from tests.support.training.faults import Fault
from tests.support.training.runner import Failure

SEED = int(os.environ.get("RINGCOMM_FUZZ_SEED", "0"))
MOST_SEARCHED = 2000  # programs until a planted fault must be found, of which few have what it needs
MOST_REFUSED = 0.15
SOON = (  # in the loss, the pipeline and the attention; the first programs find them
    *("micro batches that count alike", "gradient of the first tensor alone", "keys of the future"),
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("programs", [8, slow(30)])
def test_random_programs_have_the_numbers_and_the_bits_of_one_process(programs: int) -> None:
    runner = Runner()
    for seed in range(SEED, SEED + programs):
        program = generate(seed)
        failure = runner.failure(program)
        if failure is not None:
            pytest.fail(f"program {seed}: {failure}\n{program}\nmade smaller:\n{runner.shrunk(program, failure)}")
    assert runner.bitwise >= programs // 10
    assert sum(runner.refused.values()) <= MOST_REFUSED * programs
    assert runner.unstable <= programs // 10


def test_a_program_that_diverges_is_told_from_one_with_other_numbers() -> None:
    runner, program = Runner(), generate(3000023)
    assert runner.failure(program) is None
    assert runner.unstable == 1


def test_a_program_is_a_function_of_its_seed_and_its_edits() -> None:
    program = generate(17)
    assert str(program) == str(generate(17)) != str(generate(18))
    smaller = generate(17, ("steps 1", f"drop block {program.model.blocks[0].number}"))
    assert smaller.model.blocks == program.model.blocks[1:]
    assert smaller.places[0].axes == program.places[0].axes


def test_everything_is_drawn() -> None:
    programs = [generate(seed) for seed in range(1500)]
    found = {name for program in programs for name in program.all_features}
    wanted = {*CHANCES, *(f"block {kind}" for kind in (*KINDS, *MIXING)), *(f"schedule {name}" for name in SCHEDULES)}
    wanted |= {f"{n} ranks" for n in (1, 2, 3, 4, 6, 8)} | {f"stage {n}" for n in range(4)}
    wanted |= {name for name in MODEL if not name.startswith(("block.", "optimizer.", "container."))}
    assert wanted | {"micro-batches without rows"} <= found
    assert sum(map(has_bits, programs)) > 150


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", choose(FAULTS, SOON, by="name"), ids=attrgetter("name"))
def test_a_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    found: tuple[Program, Failure] | None = None
    runner = Runner()
    with monkeypatch.context() as planted:
        fault.plant(planted.setattr)
        for seed in range(SEED, SEED + MOST_SEARCHED):
            program = generate(seed)
            if fault.needs <= program.all_features and (failure := runner.failure(program)) is not None:
                found = program, failure
                break
    assert found is not None, f"{fault.name} was not found in {MOST_SEARCHED} programs"
    assert runner.failure(found[0]) is None, "the program fails without the fault, too"


@pytest.mark.timeout(300)
def test_a_failing_program_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "micro batches that count alike")
    runner = Runner()
    program = next(p for p in map(generate, range(1000)) if fault.needs <= p.all_features and "resume" not in p)
    with monkeypatch.context() as planted:
        fault.plant(planted.setattr)
        failure = runner.failure(program)
        assert failure is not None
        smallest = runner.shrunk(program, failure)
    assert smallest.model.steps == len(smallest.model.blocks) == 1
    assert smallest.places[0].world_size == 1
    assert smallest.rows % smallest.places[0].microbatches
