"""Runs a million mixed collectives in one process, and checks that nothing grows.

    OMP_NUM_THREADS=1 python -m benchmarks.collectives.endurance --calls 1000000 --write

Ranks are threads, in worlds of 2, 3 and 4 that take turns and stay alive. Besides plain calls of all sizes there are
asynchronous calls, coalesced groups, messages, lent memory that is allocated and freed (``comm.empty``), and
communicators that are split off, used and closed; from time to time a whole world ends and a new one is made. Between
turns, when no call is in flight, the process's resources are counted. After a warm-up nothing may grow: exit status 1
if something does.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringcomm
from ringcomm import Communicator

RESULTS = Path(__file__).resolve().parents[1] / "results" / "endurance.txt"
WORLD_SIZES = (2, 3, 4)
LENGTHS = (1, 3, 64, 500, 4096, 40_000)
LIMIT_S = 60.0
RSS_SLACK_KB = 8 << 10  # for the allocator, which keeps and returns memory at times of its own choice


# ---- what the ranks do -------------------------------------------------------------------------------------------


class Mix:
    """The calls of one rank, drawn from a seed that all ranks of a world share."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm, self.random, self.calls = comm, random.Random(seed), 0
        self.kinds = (self.plain,) * 12 + (
            self.together,
            self.waited,
            self.waited,
            self.messages,
            self.lent,
            self.parts,
        )

    def run(self, calls: int) -> int:
        """Runs at least ``calls`` calls; returns their number."""
        while self.calls < calls:
            self.random.choice(self.kinds)(self.comm)
        return self.calls

    def plain(self, comm: Communicator, x: torch.Tensor | None = None) -> None:
        """Runs a few calls on one tensor, with known results."""
        length = self.random.choice(LENGTHS)
        x = torch.empty(length) if x is None else x
        x.fill_(comm.rank + 1)
        total = comm.world_size * (comm.world_size + 1) // 2
        comm.all_reduce(x, algorithm=self.random.choice(("auto", "ring", "direct", "oneshot")))
        gathered = comm.all_gather(x[:64])
        part = comm.reduce_scatter(gathered, "max")
        comm.broadcast(x, self.random.randrange(comm.world_size))
        comm.all_to_all(gathered)
        assert float(part[-1]) == float(x[0]) == total, f"rank {comm.rank}: got {part[-1]} and {x[0]}, expected {total}"
        self.calls += 5

    def together(self, comm: Communicator) -> None:
        """Runs calls inside a coalesce block."""
        xs = [torch.ones(self.random.choice(LENGTHS)) for _ in range(4)]
        with comm.coalesce() as group:
            for x in xs:
                comm.all_reduce(x)
            comm.barrier()
        assert all(float(x[-1]) == comm.world_size for x in xs)
        self.calls += len(group)

    def waited(self, comm: Communicator) -> None:
        """Runs asynchronous calls that are waited for in another order; one Work is dropped."""
        xs = [torch.ones(self.random.choice(LENGTHS)) for _ in range(5)]
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        comm.all_gather(xs[0][:1], async_op=True)
        self.random.shuffle(works)
        for work in works:
            work.wait()
        assert all(float(x[-1]) == comm.world_size for x in xs)
        self.calls += len(works) + 1

    def messages(self, comm: Communicator) -> None:
        """Sends a message to the next rank, and one from any rank to rank 0."""
        x, got = torch.full((self.random.choice(LENGTHS),), float(comm.rank)), torch.zeros(1)
        work = comm.isend(x, (comm.rank + 1) % comm.world_size, tag=1)
        comm.recv(y := torch.empty_like(x), (comm.rank - 1) % comm.world_size, tag=1)
        work.wait()
        assert float(y[-1]) == (comm.rank - 1) % comm.world_size
        if comm.rank:
            comm.send(x[:1], 0, tag=2)
        else:
            assert {comm.recv(got, tag=2) for _ in range(1, comm.world_size)} == set(range(1, comm.world_size))
        comm.barrier()  # otherwise rank 0 might receive a message of its next turn
        self.calls += 4

    def lent(self, comm: Communicator) -> None:
        """Allocates memory that the peers access, and frees it at once."""
        self.plain(comm, comm.empty(self.random.choice(LENGTHS)))

    def parts(self, comm: Communicator) -> None:
        """Makes and closes communicators, nested in each other."""
        part = comm.split(comm.rank % 2)
        assert part is not None
        with part, part.dup() as twin:
            self.plain(part)
            self.waited(twin)
            x = part.empty(4096)
        x.fill_(0)  # the tensor outlives its communicator
        self.calls += 2


class World:
    """Ranks that stay alive and run one mix after another."""

    def __init__(self, world_size: int) -> None:
        self.jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world_size)]
        self.done: queue.Queue[int | BaseException] = queue.Queue()
        self.thread = threading.Thread(target=self.serve, args=(world_size,))
        self.thread.start()

    def serve(self, world_size: int) -> None:
        try:
            ringcomm.run_ranks(self.rank, world_size, timeout=LIMIT_S)
        except BaseException as error:
            self.done.put(error)

    def rank(self, comm: Communicator) -> None:
        while (job := self.jobs[comm.rank].get()) is not None:
            self.done.put(Mix(comm, job[0]).run(job[1]))

    def run(self, seed: int, calls: int) -> int:
        """Runs one turn; returns its number of calls, counted once for all ranks."""
        for jobs in self.jobs:
            jobs.put((seed, calls))
        done = [self.done.get() for _ in self.jobs]
        for each in done:
            if isinstance(each, BaseException):
                raise each
        return int(done[0])  # type: ignore[arg-type]

    def close(self) -> None:
        for jobs in self.jobs:
            jobs.put(None)
        self.thread.join()


# ---- what the process holds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The process's resources at one moment."""

    rss_kb: int
    descriptors: int
    threads: int
    mappings: int
    memfds: int
    shm_files: int
    objects: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Held(
            rss_kb=resident >> 10,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=len(maps),
            memfds=sum("memfd:" in line for line in maps),
            shm_files=sum("ringcomm" in path.name for path in Path("/dev/shm").glob("*")),
            objects=len(gc.get_objects()),
        )

    def __str__(self) -> str:
        return " ".join(f"{value:>10}" for value in vars(self).values())


HEAD = " ".join(f"{name:>10}" for name in ("RSS KiB", "fds", "threads", "mappings", "memfds", "/dev/shm", "objects"))


def growth(samples: list[tuple[int, Held]]) -> list[str]:
    """Returns what grew after the warm-up, in words: a resource whose minimum in the last third exceeds its maximum in
    the first third.

    Temporary fluctuations, such as a thread that is about to end, do not count.
    """
    third = max(1, len(samples) // 3)
    first, last = [held for _, held in samples[:third]], [held for _, held in samples[-third:]]
    grown = []
    for name in vars(first[0]):
        before, after = max(getattr(each, name) for each in first), min(getattr(each, name) for each in last)
        slack = {"rss_kb": RSS_SLACK_KB, "objects": before // 50, "mappings": 8}.get(name, 0)
        if after > before + slack:
            grown.append(f"{name} grew from at most {before} to at least {after}")
    return grown


# ---- the run -----------------------------------------------------------------------------------------------------


def endure(calls: int, turn: int, seed: int = 0, warm_up: float = 0.1) -> Iterator[tuple[int, Held, bool]]:
    """Runs this many calls in turns of ``turn``; yields the calls so far, the resources after each turn, and whether
    the warm-up is over."""
    worlds = {world_size: World(world_size) for world_size in WORLD_SIZES}
    done, number = 0, 0
    try:
        while done < calls:
            number += 1
            for world_size in WORLD_SIZES:
                done += worlds[world_size].run(seed + number, turn // len(WORLD_SIZES))
            again = WORLD_SIZES[number % len(WORLD_SIZES)]
            worlds[again].close()
            worlds[again] = World(again)
            worlds[again].run(seed, 1)  # makes everything that a world makes at first use
            yield done, Held.now(), done > warm_up * calls
    finally:
        for world in worlds.values():
            world.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--calls", type=int, default=1_000_000, help="of each rank, all worlds together (1000000)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--samples", type=int, default=40, help="how often to count (40)")
    p.add_argument("--write", action="store_true", help="the report to benchmarks/results/endurance.txt too")
    a = p.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    lines = [f"$ python -m benchmarks.collectives.endurance {' '.join(sys.argv[1:])}", f"{'calls':>10} {HEAD}"]
    print("\n".join(lines), flush=True)
    samples = []
    for done, held, warm in endure(a.calls, a.calls // a.samples, a.seed):
        if warm:
            samples.append((done, held))
        lines.append(f"{done:>10} {held}{'' if warm else '  (warm-up)'}")
        print(lines[-1], flush=True)
    grown = growth(samples)
    minutes = (time.monotonic() - began) / 60
    lines.append(f"{done} calls in {minutes:.1f} minutes; {'; '.join(grown) if grown else 'nothing grew'}")
    print(lines[-1])
    if a.write:
        RESULTS.write_text("\n".join(lines) + "\n")
    raise SystemExit(int(bool(grown)))


if __name__ == "__main__":
    main()
