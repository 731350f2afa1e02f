"""The ring schedule: the printed table, its invariants, and the order of summation."""

from __future__ import annotations

import pytest

from ringcomm import errors
from ringcomm.comm import schedule

# Chunk sent, by rank (row) and step (column). World size 4.
#  reduce-scatter | all-gather
TABLE = [
    [3, 2, 1, 0, 3, 2],
    [0, 3, 2, 1, 0, 3],
    [1, 0, 3, 2, 1, 0],
    [2, 1, 0, 3, 2, 1],
]


def test_the_schedule_is_the_printed_table() -> None:
    assert [[step.send_chunk for step in steps] for steps in schedule.table(4)] == TABLE


@pytest.mark.parametrize("world_size", range(2, 17))
def test_neighbours_agree_on_every_chunk(world_size: int) -> None:
    for step in range(schedule.num_steps(world_size)):
        for rank in range(world_size):
            here = schedule.ring_step(rank, world_size, step)
            assert here.recv_chunk == schedule.ring_step((rank - 1) % world_size, world_size, step).send_chunk
            assert here.recv_chunk == schedule.ring_step(rank, world_size, step + 1).send_chunk
            assert here.reduce == (step < world_size - 1)


@pytest.mark.parametrize("world_size", range(1, 17))
def test_reduce_scatter_leaves_chunk_r_on_rank_r_in_ring_order(world_size: int) -> None:
    path = [[[rank] for _ in range(world_size)] for rank in range(world_size)]
    for step in range(world_size - 1):
        wire = [path[rank][schedule.ring_step(rank, world_size, step).send_chunk] for rank in range(world_size)]
        for rank in range(world_size):
            chunk = schedule.ring_step(rank, world_size, step).recv_chunk
            path[rank][chunk] = wire[rank - 1] + path[rank][chunk]
    for rank in range(world_size):
        assert path[rank][rank] == [(rank + 1 + k) % world_size for k in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_simulation_is_an_all_reduce(world_size: int) -> None:
    chunks = [[float(10 * rank + chunk) for chunk in range(world_size)] for rank in range(world_size)]
    sums = [sum(column) for column in zip(*chunks, strict=True)]
    assert schedule.simulate(chunks) == [sums] * world_size


def test_drawing_marks_where_gathering_begins() -> None:
    assert schedule.draw(2).splitlines() == ["step     0  1", "rank  0  1| 0", "rank  1  0| 1"]


def test_the_cost_model_counts_steps_and_bytes() -> None:
    assert schedule.ring_cost_us(nbytes=8_000_000, world_size=4, latency_us=2.0, bandwidth_gbps=6.0) == 12.0 + 2000.0


@pytest.mark.parametrize(("rank", "world_size", "step"), [(2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, 4, 7)])
def test_a_step_outside_the_schedule_is_refused(rank: int, world_size: int, step: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="is not in the schedule of the ring"):
        schedule.ring_step(rank, world_size, step)


def test_simulate_needs_a_chunk_for_each_rank() -> None:
    with pytest.raises(ValueError, match="expected 2 chunks"):
        schedule.simulate([[1.0], [2.0]])
