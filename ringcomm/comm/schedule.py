"""The ring schedule as a table, a drawing and a simulation, computed from the same definition in the native core that
the engines use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringcomm import _C
from ringcomm.validation import POSITIVE, expects, number, several, validate_int

INT = validate_int(-(1 << 31), (1 << 31) - 1)
RANKS = validate_int(1, (1 << 31) - 1)


class Step(NamedTuple):
    """The actions of one rank at one step of the ring."""

    send_chunk: int
    recv_chunk: int
    reduce: bool


@expects("ring_step", rank=INT, world_size=INT, step=INT)
def ring_step(rank: int, world_size: int, step: int) -> Step:
    """Returns what ``rank`` does at ``step``: it sends a chunk to the next rank and receives one from the previous.

    Steps 0 to W-2 reduce and leave chunk r complete on rank r; steps W-1 to 2W-3 gather.

    Returns: Step.
    Raises:  InvalidArgumentError: a rank or step outside the schedule.
    Source:  Patarasuk & Yuan 2009, JPDC 69(2).
    """
    return Step(*_C.ring_step(rank, world_size, step))


@expects("num_steps", world_size=RANKS)
def num_steps(world_size: int) -> int:
    """Returns the number of steps of a ring all-reduce: 2 (W-1)."""
    return 2 * (world_size - 1)


@expects("table", world_size=RANKS)
def table(world_size: int) -> list[list[Step]]:
    """Returns all steps of all ranks: ``table(w)[rank][step]``."""
    return [[ring_step(rank, world_size, step) for step in range(num_steps(world_size))] for rank in range(world_size)]


@expects("draw", world_size=RANKS)
def draw(world_size: int) -> str:
    """Returns the table as text: the chunk that each rank sends, by step, with a bar where gathering begins."""
    lines = ["step    " + " ".join(f"{step:2d}" for step in range(num_steps(world_size)))]
    for rank, steps in enumerate(table(world_size)):
        cells = [f"{'|' if at == world_size - 1 else ' '}{step.send_chunk:2d}" for at, step in enumerate(steps)]
        lines.append(f"rank {rank:2d}" + "".join(cells))
    return "\n".join(lines)


@expects("simulate", chunks=several("a list of numbers for each rank", several("", number())))
def simulate(chunks: Sequence[Sequence[float]]) -> list[list[float]]:
    """Runs the ring all-reduce (sum) on numbers: ``chunks[rank][chunk]`` is one number.

    Order:   chunk c is added in rank order c+1, c+2, ..., c.
    Cost:    2 (W-1) steps; each rank sends 2 (W-1) chunks.
    Returns: the chunks of every rank after the reduction, equal on all ranks.
    Raises:  ValueError: the number of chunks is not the number of ranks.
    """
    world_size = len(chunks)
    if any(len(row) != world_size for row in chunks):
        raise ValueError(f"simulate: expected {world_size} chunks on each of {world_size} ranks; cut to one per rank")
    state = [list(row) for row in chunks]
    for step in range(num_steps(world_size)):
        wire = [state[rank][ring_step(rank, world_size, step).send_chunk] for rank in range(world_size)]
        for rank in range(world_size):
            at = ring_step(rank, world_size, step)
            incoming = wire[rank - 1]
            state[rank][at.recv_chunk] = incoming + state[rank][at.recv_chunk] if at.reduce else incoming
    return state


@expects("ring_cost_us", nbytes=validate_int(), world_size=RANKS, latency_us=number(0), bandwidth_gbps=POSITIVE)
def ring_cost_us(nbytes: int, world_size: int, latency_us: float, bandwidth_gbps: float) -> float:
    """Returns the time of a ring all-reduce under the latency-bandwidth model, in microseconds.

    It is ``2 (W-1)`` steps of one latency each, plus ``2 (W-1)/W`` of the message over the link.
    """
    steps = num_steps(world_size)
    return steps * latency_us + steps / world_size * nbytes / (bandwidth_gbps * 1e3)
