"""A pool of processes, one a rank, that the tests of the torch.distributed backend share.

Importing torch takes seconds, so the processes are started once and run test after test. Each test gets fresh process
groups; a test that fails, hangs or dies takes the pool with it, and the next one starts a new pool.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

GROUP_TIMEOUT_S = 30.0

# Process groups of Gloo that have ended. A callback of a future may hold the last reference to one in Gloo's own
# worker thread, and there its destructor joins the thread with itself and ends the process.
_ended_groups: list[Any] = []


class Pool:
    """`world_size` processes that wait for functions to run."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world_size), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.results(120.0)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, backend: str) -> list[Any]:
        folder = tempfile.mkdtemp(prefix="ringcomm-test-")
        try:
            for pipe in self.pipes:
                pipe.send((function, args, folder, timeout_s, backend))
            return self.results(timeout_s + 5.0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def results(self, timeout_s: float) -> list[Any]:
        """What every rank returned. The first error wins; the ranks get a moment to report theirs."""
        end = time.monotonic() + timeout_s
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in replies}
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
        if errors or len(replies) < len(self.pipes):
            missing = sorted(set(range(len(self.pipes))) - set(replies))
            errors += [f"ranks {missing} gave no answer within {timeout_s:g} s"] if missing else []
            raise AssertionError("\n".join(errors))
        return [replies[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pools: dict[int, Pool] = {}


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
    for other in [each for each in _pools if each != world_size]:
        _pools.pop(other).close()
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    try:
        return _pools[world_size].run(function, args, timeout_s, backend)
    except BaseException:
        _pools.pop(world_size).close()
        raise


@atexit.register
def close_pools() -> None:
    """End every process of every pool."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def init(backend: str, rank: int, world_size: int, name: str = "store") -> None:
    """Make the default process group over a file of the test's folder."""
    import torch.distributed as dist

    store = dist.FileStore(os.path.join(os.environ["RINGCOMM_TEST_FOLDER"], name), world_size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(pipe: multiprocessing.connection.Connection, rank: int, world_size: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    faulthandler.enable()
    try:
        import torch

        import ringcomm  # noqa: F401  registers the backend

        torch.set_num_threads(1)
        _reply(pipe, (True, None))
    except BaseException:
        _reply(pipe, (False, f"rank {rank}:\n{traceback.format_exc()}"))
        return
    while True:
        try:
            function, args, folder, timeout_s, backend = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(timeout_s, exit=False)
        os.environ["RINGCOMM_TEST_FOLDER"] = folder
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
