"""A pool of processes, one a rank, that the tests of the torch.distributed backend share.

Importing torch takes seconds, so a process is started once, when a test first needs so many, and runs test after test,
of any world size. Each test gets fresh process groups; a test that fails, hangs or dies takes the pool with it, and the
next one starts a new pool.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.support import forked

GROUP_TIMEOUT_S = 30.0

# Process groups of Gloo that have ended. A callback of a future may hold the last reference to one in Gloo's own
# worker thread, and there its destructor joins the thread with itself and ends the process.
_ended_groups: list[Any] = []


class Pool:
    """Processes that wait for functions to run; the first W of them are the ranks of a world of W."""

    def __init__(self) -> None:
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[Any] = []

    def grow(self, world_size: int) -> None:
        """Starts the processes that are missing."""
        context = forked.context()
        new = range(len(self.pipes), world_size)
        for rank in new:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.results(new, 120.0)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout_s: float, backend: str
    ) -> list[Any]:
        self.grow(world_size)
        folder = tempfile.mkdtemp(prefix="ringcomm-test-")
        try:
            for pipe in self.pipes[:world_size]:
                pipe.send((function, args, folder, world_size, timeout_s, backend))
            return self.results(range(world_size), timeout_s + 5.0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def results(self, ranks: range, timeout_s: float) -> list[Any]:
        """What every one of these ranks returned. The first error wins; the ranks get a moment to report theirs."""
        end = time.monotonic() + timeout_s
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < len(ranks):
            waiting = {self.pipes[rank]: rank for rank in ranks if rank not in replies}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic()))
            for pipe in ready:
                try:
                    replies[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    replies[waiting[pipe]] = (False, f"rank {waiting[pipe]}: the process died")
            if any(not ok for ok, _ in replies.values()):
                end = min(end, time.monotonic() + 3.0)
            if not ready:
                break
        errors = [text for ok, text in replies.values() if not ok]
        if errors or len(replies) < len(ranks):
            missing = sorted(set(ranks) - set(replies))
            if missing:
                errors.append(f"ranks {missing} gave no answer within {timeout_s:g} s; their stacks are on stderr")
            for rank in missing:
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.5)  # one writes at a time
            raise AssertionError("\n".join(errors))
        return [replies[rank][1] for rank in ranks]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.pipes, self.processes = [], []


_pool = Pool()
grow = _pool.grow


def run(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 3,
    timeout_s: float = 60.0,
    backend: str = "ringcomm",
) -> list[Any]:
    """Run ``function(*args)`` on every rank of a new default process group, and return the results in rank order.

    Functions, arguments and results are pickled: functions must be at the top level of a module. ``backend=""`` leaves
    the group to the function; the folder for its store is then in the environment variable RINGCOMM_TEST_FOLDER.
    """
    try:
        return _pool.run(function, args, world_size, timeout_s, backend)
    except BaseException:
        _pool.close()
        raise


@atexit.register
def close_pool() -> None:
    """End every process."""
    _pool.close()


def init(backend: str, rank: int, world_size: int, name: str = "store") -> None:
    """Make the default process group over a file of the test's folder."""
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], name), world_size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(pipe: multiprocessing.connection.Connection, rank: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # writes the stacks of all threads
    try:
        import torch

        import ringcomm  # noqa: F401  registers the backend

        torch.set_num_threads(1)
        gc.freeze()
        _reply(pipe, (True, None))
    except BaseException:
        _reply(pipe, (False, f"rank {rank}:\n{traceback.format_exc()}"))
        return
    while True:
        try:
            function, args, folder, world_size, timeout_s, backend = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout_s, exit=False)
        os.environ.update(RINGCOMM_TEST_FOLDER=folder, WORLD_SIZE=str(world_size))
        try:
            reply = (True, _run_one(function, args, rank, world_size, backend))
        except BaseException:
            reply = (False, f"rank {rank}:\n{traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
        _reply(pipe, reply)


def _reply(pipe: multiprocessing.connection.Connection, reply: tuple[bool, Any]) -> None:
    # By value: multiprocessing's pickler passes a tensor as a file descriptor, which its sender must live to hand over.
    pipe.send_bytes(pickle.dumps(reply))


def _run_one(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, backend: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    if backend:
        init(backend, rank, world_size)
    try:
        return function(*args)
    finally:
        if dist.is_initialized():
            if backend == "gloo":
                _ended_groups.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
