"""Compares builds of the package `ringcomm`: each build has its own long-lived ranks, and the builds take turns. A
turn is a batch of all_reduces, and its time is that of rank 0. trace_cost.py and signatures.py use it."""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

import ringcomm

ROOT = Path(__file__).resolve().parents[2]
ENDED = 0
WARM_UP = 2  # turns


def batch(comm: Any, nbytes: int, calls: int, traced: bool) -> float:
    """Returns the microseconds per call."""
    x = np.zeros(nbytes // 4, np.float32)
    starts = traced and (comm.rank == 0 or comm.describe()["ranks"] == "processes")
    if starts:
        ringcomm.trace.start()
    for _ in range(calls // 2):
        comm.all_reduce(x)
    began = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(x)
    took = time.perf_counter() - began
    comm.barrier()
    if starts:
        ringcomm.trace.stop()
    comm.barrier()
    return took / calls * 1e6


def rank_main(comm: Any, address: str) -> None:
    """Follows the orders that rank 0 receives, until it receives the end."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})  # the same core for every build
    order = np.zeros(3, np.int64)
    ear = Client(address) if comm.rank == 0 else None
    if ear:
        ear.send(ringcomm.__file__)
    while True:
        if ear:
            order[:] = ear.recv()
        comm.broadcast(order, root=0)
        if order[1] == ENDED:
            return
        took = batch(comm, int(order[0]), int(order[1]), bool(order[2]))
        if ear:
            ear.send(took)


class Build:
    """A build's two ranks, threads or processes, waiting for orders.

    Args:
        package: the folder that contains the package ``ringcomm``.
        folder: the folder for its socket.
        environment: environment variables of its processes, in addition to this one's.
    """

    def __init__(self, name: str, package: Path, ranks: str, folder: str, **environment: str) -> None:
        address = os.path.join(folder, f"{name}-{ranks}")
        variables = {**os.environ, **environment, "PYTHONPATH": str(package)}
        with Listener(address) as listener:
            # By path: -m would put this folder's package before that of the build.
            self.process = subprocess.Popen([sys.executable, __file__, address, ranks], env=variables)
            socket = listener._listener._socket  # type: ignore[attr-defined]
            while not select.select([socket], [], [], 0.1)[0]:
                if self.process.poll() is not None:
                    raise SystemExit(f"the ranks of {package} ended with exit code {self.process.returncode}")
            self.pipe: Connection = listener.accept()
        found = Path(self.pipe.recv()).parent.parent
        if found != package:
            raise SystemExit(f"expected the package ringcomm of {package}, got that of {found}")

    def us(self, nbytes: int, calls: int, traced: bool) -> float:
        self.pipe.send((nbytes, calls, traced))
        return float(self.pipe.recv())

    def end(self) -> None:
        self.pipe.send((0, ENDED, 0))
        self.process.wait(60)


Kind = tuple[str, Build, bool]
"""(name, a build, whether it is traced)."""


def in_turns(kinds: Sequence[Kind], nbytes: int, calls: int, turns: int) -> dict[str, list[float]]:
    """Returns the microseconds per call in each turn, by the kinds' names; the kinds take turns, alternately in
    forward and reverse order."""
    us: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    for turn in range(turns + WARM_UP):
        for name, build, traced in kinds if turn % 2 else reversed(kinds):
            took = build.us(nbytes, calls, traced)
            if turn >= WARM_UP:
                us[name].append(took)
    return us


def end(builds: Iterable[Build]) -> None:
    for build in builds:
        build.end()


def ratio(times: Sequence[float], base: Sequence[float]) -> str:
    """Formats the ratios of two times within a turn: median [quartiles]."""
    low, middle, high = statistics.quantiles([one / other for one, other in zip(times, base, strict=True)], n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def times(us: Sequence[float]) -> str:
    """Formats median / fastest tenth."""
    return f"{statistics.median(us):.2f} / {statistics.quantiles(us, n=10)[0]:.2f}"


def machine() -> str:
    return f"Load average at the end {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores."


if __name__ == "__main__":
    ringcomm.run_ranks(rank_main, 2, sys.argv[1], ranks=sys.argv[2])
