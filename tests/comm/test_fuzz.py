"""Random programs of collectives on a few ranks, against one process; and that a wrong result is found and made small.

`benchmarks/collectives/fuzz.py` is the long form.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, find, given, note, seed, settings

from ringcomm import Communicator
from tests.support.choice import slow
from tests.support.collectives.calls import CALLS
from tests.support.collectives.programs import OPS, Program, Step, programs, random_program, shrunk
from tests.support.collectives.ranks import Pool

SEED = int(os.environ.get("RINGCOMM_FUZZ_SEED", "0"))
QUIET = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as ranks:
        yield ranks


@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [100, slow(300)])
def test_random_programs_give_the_results_of_one_process(examples: int, pool: Pool) -> None:
    ran: Counter[str] = Counter()

    @seed(SEED)
    @settings(QUIET, max_examples=examples)
    @given(programs())
    def check(program: Program) -> None:
        note(f"RINGCOMM_FUZZ_SEED={SEED}")
        ran.update(step.op for step in program.steps)
        wrong = pool.run(program)
        assert not wrong, f"a program with seed {SEED}:\n{wrong}"

    print(f"RINGCOMM_FUZZ_SEED={SEED}")
    check()
    assert set(ran) == set(OPS) == set(CALLS), "a collective was never called"


# ---- it can fail -------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, method: str, wrong: Any) -> None:
    """Lets a method of every communicator go wrong: ``wrong(comm, x)`` runs on a tensor in place when the call is
    done; asynchronous calls stay right."""
    right = getattr(Communicator, method)

    def planted(comm: Communicator, x: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(comm, x, *args, **kwargs)
        if isinstance(x, torch.Tensor) and result is x:
            wrong(comm, x)
        return result

    monkeypatch.setattr(Communicator, method, planted)


def flip_a_bit(comm: Communicator, x: torch.Tensor) -> None:
    """On the last rank, in what has more than four elements."""
    if comm.rank == comm.world_size - 1 and x.numel() > 4 and x.is_contiguous():
        x.view(-1).view(torch.uint8)[3 * x.element_size()] ^= 1


def found_by_hypothesis(pool: Pool) -> Program:
    wide = settings(QUIET, max_examples=1000)
    return find(programs(), lambda program: bool(pool.run(program)), settings=wide, random=random.Random(0))


def found_by_seed(pool: Pool) -> Program:
    drawn = (random_program(random.Random(number)) for number in range(500))
    return shrunk(next(program for program in drawn if pool.run(program)), lambda program: bool(pool.run(program)))


@pytest.mark.parametrize("search", [slow(found_by_hypothesis), found_by_seed])
def test_a_wrong_bit_is_found_and_shrunk_to_one_call(search: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "broadcast", flip_a_bit)
    program = search(pool)
    assert (program.world_size, program.groupings, len(program.steps)) == (2, (), 1)
    (step,) = program.steps
    assert step in (Step("broadcast", count=5), Step("broadcast", count=2, dims=2)), "not made simple"
    wrong = pool.run(program).splitlines()
    assert len(wrong) == 3
    assert re.fullmatch(r"step 0, ordinary values of seed 0: comm\.broadcast\(float32\[[^]]*\], 0\)", wrong[1])
    assert re.match(r"step 0, rank 1: comm\.broadcast.*: 1 of \d elements differ, element 3 first: got 0", wrong[2])
    monkeypatch.undo()
    assert pool.run(program) == ""


def test_an_error_is_told_with_the_program_and_leaves_a_fresh_world(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(comm: Communicator, x: torch.Tensor) -> None:
        del x
        if comm.rank == 1:
            raise ValueError("planted")

    program = Program(steps=(Step(),))
    plant(monkeypatch, "all_reduce", fail)
    assert pool.run(program).endswith("rank 1 raised ValueError: planted")
    monkeypatch.undo()
    assert pool.run(program) == ""


def test_memory_beside_an_array_is_watched(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def spill(comm: Communicator, x: torch.Tensor) -> None:
        if comm.rank == 0:
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(1)

    plant(monkeypatch, "all_reduce", spill)
    wrong = pool.run(Program(steps=(Step(),)))
    assert wrong.endswith("float32[1], op='sum'): float32[1]: memory beside the array was written")
