"""Ranks that are processes and run programs of collectives, over a communicator or over torch.distributed's backend."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm import Communicator
from tests.support.collectives.calls import calls_of
from tests.support.collectives.programs import REDUCING, Program
from tests.support.collectives.ranks import LIMIT_S, Ranks, Run, slot_bytes
from tests.support.reference import ops_of


class ProcessRanks(Ranks):
    """A world of ranks that are processes. Each works its calls out from the program itself."""

    backend = False

    def serve(self, world_size: int) -> None:
        key = os.urandom(16)
        with Listener(("127.0.0.1", 0), authkey=key) as listener, tempfile.TemporaryDirectory() as folder:
            threading.Thread(target=self.accept, args=(listener, world_size), daemon=True).start()
            store = str(Path(folder) / "store") if self.backend else ""
            try:
                args = (listener.address, key, store)
                ringcomm.run_ranks(rank_main, world_size, *args, ranks="processes", timeout=LIMIT_S)
            except Exception as error:
                self.replies.put((-1, error))

    def accept(self, listener: Listener, world_size: int) -> None:
        for _ in range(world_size):
            pipe = listener.accept()
            threading.Thread(target=self.pass_on, args=(pipe.recv(), pipe), daemon=True).start()

    def pass_on(self, rank: int, pipe: Connection) -> None:
        """Hands a rank its programs, and its replies back."""
        with pipe:
            try:
                while (job := self.jobs[rank].get()) is not None:
                    pipe.send(job[0])
                    self.replies.put((rank, pipe.recv()))
                pipe.send(None)
            except (EOFError, OSError) as error:
                self.replies.put((rank, error))


class BackendRanks(ProcessRanks):
    """The same over process groups of the backend "ringcomm"."""

    backend = True


def rank_main(comm: Communicator, address: Any, key: bytes, store: str) -> None:
    """A rank: runs what comes until None comes. ``store``: the file over which to make a process group, if any."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    if store:
        where = dist.FileStore(store, comm.world_size)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group("ringcomm", store=where, rank=comm.rank, world_size=comm.world_size, timeout=limit)
        comm = Communicator.from_process_group()
    with Client(address, authkey=key) as pipe:
        pipe.send(comm.rank)
        while (program := pipe.recv()) is not None:
            try:
                calls = calls_of(program, slot_bytes())[comm.rank]
                pipe.send(Run(comm, program, calls).faults())
            except Exception as error:
                pipe.send(error)
                raise
    if store:
        dist.destroy_process_group()


def for_the_backend(program: Program) -> Program:
    """The program without what torch.distributed has no word for: algorithms, factors of one's own, lent memory; and on
    the world alone, since torch names a group after how many its ranks have made before, which must be equally many."""
    steps = []
    for step in program.steps:
        names = ops_of(step.dtype)
        factor = step.op in REDUCING and names[step.reduction % len(names)] == "premul_sum"
        reduction = 0 if factor else step.reduction
        steps.append(replace(step, algorithm=0, lent=False, group=0, reduction=reduction))
    return replace(program, groupings=(), steps=tuple(steps))
