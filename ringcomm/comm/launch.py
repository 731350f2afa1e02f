"""Runs ranks on this machine without a launcher: as threads of this process, or as processes."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from ringcomm.arrays.devices import Device, choose
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.engine import Timeout, milliseconds
from ringcomm.comm.hosts import Hosts, Network, check_network, memory_store, tcp_store
from ringcomm.comm.native import NativeEngine
from ringcomm.comm.rendezvous import launched
from ringcomm.errors import (
    AbortedError,
    InvalidArgumentError,
    RankFailedError,
    RankLostError,
    one_line,
    rank_list,
    shown,
)
from ringcomm.terminal import Progress, write_stderr
from ringcomm.validation import FLAG, FUNCTION, expects, one_of, validate_int

_UNGUARDED = (
    "call run_ranks under `if __name__ == '__main__':` in a script that is a file, and define the function outside of "
    "it, since every process imports the script again, or pass ranks='threads'; else look at the rank's output"
)
Place = tuple[str, Device]
"""Each rank's engine kind and device."""
_MOST_RANKS = 1 << 16  # on one machine
_DETECTION_S = 1.0  # time for ranks to detect a death themselves; their errors name the call and place
_GRACE_S = 5.0  # time for the other ranks to end by themselves after one has failed


@dataclass(frozen=True)
class _Job:
    """The function to run, and the engines and devices to run it on."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    limit_ms: int
    places: list[Place]
    hosts: Hosts | None
    wire_dtype: str | None
    returns_errors: bool

    def engine(self, rank: int, store: Any) -> NativeEngine:
        """Returns a rank's engine, not connected; ``store`` is used if there are several hosts."""
        kind, device = self.places[rank]
        network = None if self.hosts is None else Network(store, "run_ranks", None, self.wire_dtype)
        return NativeEngine(kind, rank, len(self.places), self.limit_ms, device, self.hosts, network)


@expects(
    "run_ranks",
    fn=FUNCTION,
    world_size=validate_int(1, _MOST_RANKS),
    ranks=one_of("threads", "processes"),
    return_exceptions=FLAG,
)
def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    ranks: str = "threads",
    timeout: Timeout = 300.0,
    engine: str | None = None,
    device: Any = None,
    hosts: Sequence[int] | None = None,
    wire_dtype: str | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Calls ``fn(comm, *args)`` on ``world_size`` ranks of this machine and waits for all.

    Args:
        fn: with processes it must be importable from its module, and its arguments and results must be picklable.
        ranks: "threads" (one process; for tests, notebooks, teaching) or "processes" (newly spawned).
        timeout: seconds (or a timedelta): the limit of every call of the communicator.
        engine: the engine that moves the bytes: "cpu" or "cuda"; None: the engine for the device.
        device: "cpu", "cuda" (rank r on device r, round robin if there are fewer devices) or "cuda:0" (all ranks on
            that device); None: the cpu.
        hosts: for example [2, 2]: treats the first two ranks and the next two as separate hosts, which reach each other
            over the loopback interface; for tests, and to study several hosts. None: one host.
        wire_dtype: as in `init`.
        return_exceptions: True: a rank that fails has its exception in the place of its result, and the others run to
            their end. Their calls with it raise AbortedError or RankLostError; they may go on with `shrink`.
    Returns: the results, by rank.
    Raises:  the first exception of a rank; the other ranks are aborted, and processes that do not end are killed.
             RankFailedError: a process died without an exception, a rank called sys.exit, or, in the place of its
                 result, a rank was killed. RankLostError: a rank waits for a rank that has already returned.
    """
    if inspect.iscoroutinefunction(fn):
        raise InvalidArgumentError(
            "run_ranks: got a coroutine function, expected a function, because nothing would await the coroutine; call "
            "asyncio.run in a function, and pass that"
        )
    wire_dtype = check_network(None, wire_dtype, "run_ranks")
    limit_ms = milliseconds(timeout, "run_ranks", 0)
    places = [choose(engine, device, "run_ranks", rank) for rank in range(world_size)]
    launch = _run_threads if ranks == "threads" else _run_processes
    pretended = None if hosts is None else Hosts.pretended(hosts, world_size, "run_ranks")
    return launch(_Job(fn, args, limit_ms, places, pretended, wire_dtype, return_exceptions))


# ---- threads -----------------------------------------------------------------------------------------------------


Failures = list[tuple[int, BaseException]]
"""(rank, exception), in order of arrival."""


def _finished(results: list[Any], failures: Failures, returns_errors: bool) -> list[Any]:
    """Returns the results, with ``returns_errors`` also exceptions in the places of results; else raises the first
    exception that was not caused by another rank."""
    failures = [(rank, _instead_of_exit(rank, error)) for rank, error in failures]
    if returns_errors:
        for rank, error in failures:
            results[rank] = error
        return results
    own = [error for _, error in failures if not isinstance(error, AbortedError)]
    for error in own or [error for _, error in failures]:
        raise error
    return results


def _instead_of_exit(rank: int, error: BaseException) -> BaseException:
    """Returns the error, but replaces a SystemExit, which would end the caller's program without a message."""
    if not isinstance(error, SystemExit):
        return error
    failed = RankFailedError(
        f"run_ranks: rank {rank} expected to return a result, left by sys.exit({shown(error.code)}); let the function "
        "return"
    )
    failed.__cause__ = error
    return failed


def choose_kernels() -> None:
    """Calls an elementary function of torch. MKL chooses its kernels in the first such call of a process; if several
    threads make that call at once, some compute with other kernels, and with other bits, than later ones."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.ones(4).exp()


def _run_threads(job: _Job) -> list[Any]:
    choose_kernels()
    world_size = len(job.places)
    store = None if job.hosts is None else memory_store()
    engines = [job.engine(rank, store) for rank in range(world_size)]
    handles = [engine.handle() for engine in engines]
    results: list[Any] = [None] * world_size
    failures: Failures = []
    comms: list[Communicator] = []

    def rank_main(rank: int) -> None:
        engine = engines[rank]
        launched.rank = rank
        torch = sys.modules.get("torch")
        if torch is not None:
            # Threads share the cache: a thread that leaves autocast would empty it under threads that are inside.
            torch.set_autocast_cache_enabled(False)
        try:
            engine.connect(handles)
            comm = Communicator(engine)
            comms.append(comm)
            results[rank] = job.fn(comm, *job.args)
            comm.close()
            # Ranks that wait for this one in a communicator that it made, such as one of `split`, learn of its end.
            engine.close_descendants()
        except BaseException as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in rank {rank} of run_ranks")
            failures.append((rank, error))
            reason = f"rank {rank} raised {type(error).__name__}: {error}"
            if job.returns_errors:
                engine.abort(reason)
                engine.close()  # so that `shrink` of the others does not wait for this rank
                return
            for each in engines:  # other ranks may wait in communicators that this rank is not in
                each.abort(reason)
            if failures[0][0] == rank:
                telling.start()

    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    telling = threading.Timer(_GRACE_S, _tell_running, [threads, failures])
    telling.daemon = True
    for thread in threads:
        thread.start()
    try:
        for thread in threads:  # no time limit: the function may take as long as it likes between two calls
            thread.join()
    except BaseException as error:  # the caller was interrupted
        for engine in engines:
            engine.abort(f"run_ranks was left by {type(error).__name__}")
        deadline = time.monotonic() + _GRACE_S
        for thread in threads:  # a thread inside native code while Python exits would crash the process
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        telling.cancel()
        if telling.ident is not None:  # the timer was started: let it write before this call ends, not after
            telling.join()
    for comm in comms:
        comm.close()
    return _finished(results, failures, job.returns_errors)


def _tell_running(threads: list[threading.Thread], failures: Failures) -> None:
    """Says which ranks still run after another one has failed, because nothing can end a thread."""
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        rank, error = failures[0]
        write_stderr(
            f"run_ranks: rank {rank} failed with {type(error).__name__}: {one_line(error)}; waiting for "
            f"{rank_list(running)}, because threads cannot be ended; pass ranks='processes' to end them\n"
        )


# ---- processes: in the child --------------------------------------------------------------------------------------


def _process_main(pipe: Connection, job: _Job, rank: int, port: int) -> None:
    """Runs a rank's process: sends its handle to the parent, gets all handles, runs, and sends a result or an
    exception."""
    leaving = threading.Lock()
    launched.rank = rank
    try:
        engine = job.engine(rank, None if job.hosts is None else tcp_store(port))
        _tell(pipe, "handle", engine.handle())
        handles = pipe.recv()
        if isinstance(handles, tuple):  # another rank did not start: the reason to abort, as in `_watch_parent`
            raise AbortedError(f"run_ranks: rank {rank} expected all ranks to start, {handles[0]}; look at that rank")
        threading.Thread(target=_watch_parent, args=(pipe, engine, leaving), daemon=True).start()
        engine.connect(handles)
        with Communicator(engine) as comm:
            result = job.fn(comm, *job.args)
        _tell_result(pipe, rank, result)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        _tell(pipe, "error", (error if _can_be_pickled(error) else RankFailedError(f"rank {rank}: {error!r}"), text))
    leaving.acquire()  # never released: a thread inside native code while Python exits would crash the process


def _tell(pipe: Connection, kind: str, value: Any) -> None:
    """Sends ``value`` by value. Connection.send would send tensors as shared memory, for which this process must
    stay alive."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _tell_result(pipe: Connection, rank: int, result: Any) -> None:
    """Sends a rank's result. Raises: RankFailedError: it cannot be pickled."""
    try:
        message = pickle.dumps(("result", result))
    except Exception as error:
        raise RankFailedError(
            f"run_ranks: rank {rank} expected to return a value that can be pickled, got {shown(result)} "
            f"({type(error).__name__}: {one_line(error)}); return tensors, numbers or texts, or pass ranks='threads'"
        ) from error
    pipe.send_bytes(message)


def _watch_parent(pipe: Connection, engine: NativeEngine, leaving: threading.Lock) -> None:
    """Aborts when the parent says so. If the parent ends, ends this process, too, within ``_GRACE_S``.

    The search for deadlocks recognises this thread, which makes no calls, by the function's name, in
    csrc/bind/module/site.cpp.
    """
    try:
        reason, died = pipe.recv()
        with leaving:
            engine.abort(reason, RankLostError(reason) if died else None)
    except (EOFError, OSError):
        deadline = time.monotonic() + _GRACE_S
        if leaving.acquire(timeout=_GRACE_S):
            engine.abort("the process that called run_ranks ended")
            leaving.release()
        time.sleep(max(0.0, deadline - time.monotonic()))  # gives the function time to end by itself
        os._exit(1)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


# ---- processes: in the parent -------------------------------------------------------------------------------------


class _Processes:
    """The parent's side: one pipe and one process per rank."""

    def __init__(self, world_size: int, returns_errors: bool) -> None:
        self.results: list[Any] = [None] * world_size
        self.failures: Failures = []
        self.returns_errors = returns_errors
        self.handles: dict[int, bytes] = {}
        self.pipes: dict[Connection, int] = {}
        self.open: dict[Connection, int] = {}
        # For each rank that has closed its pipe without a result: until when to wait for its exit code.
        self.ending: dict[Connection, float] = {}
        self.processes: list[Any] = []
        self.deadline: float | None = None
        self.abort_reason: tuple[str, bool] | None = None  # (reason, whether a rank died) still to be sent to the ranks
        self.abort_at = 0.0
        self.store: Any = None
        self.starting = Progress("run_ranks: ranks that have started", world_size)

    def start(self, job: _Job) -> None:
        """Starts every rank."""
        self.starting.start()
        self.store = None if job.hosts is None else tcp_store()  # lives as long as the ranks
        port = self.store.port if self.store is not None else 0
        context = multiprocessing.get_context("spawn")
        world_size = len(self.results)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, job, rank, port)
            process = context.Process(target=_process_main, args=arguments, name=f"rank {rank}")
            with _without_interrupts():
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes[ours] = self.open[ours] = rank

    def run(self) -> list[Any]:
        """Serves the pipes until every rank has ended, or the time limit after a failure has passed."""
        while self.ending or (self.open and (self.deadline is None or time.monotonic() < self.deadline)):
            poll_s = 0.01 if self.ending else None if self.deadline is None else 0.1
            for pipe in wait(list(self.open), poll_s):
                self.receive(pipe)
            self.look_for_deaths()
            self.send_abort()
        if self.returns_errors:
            self.failures += [(rank, _killed(rank)) for rank in self.open.values()]
        return _finished(self.results, self.failures, self.returns_errors)

    def receive(self, pipe: Any) -> None:
        """Handles one message of a rank, or its death."""
        rank = self.open[pipe]
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            del self.open[pipe]
            self.ending[pipe] = time.monotonic() + _GRACE_S
            return
        except Exception as broken:  # an impossible message length
            self.fail(pipe, rank, _no_message(rank, broken))
            return
        try:
            kind, value = pickle.loads(message)
            if kind not in ("handle", "result", "error"):
                raise ValueError("no such kind of message")
            if kind == "error":
                error, text = value
                error.__cause__ = RankFailedError(f"on rank {rank}:\n{text}")
        except Exception as broken:  # other code wrote to the pipe, or a result cannot be loaded
            self.fail(pipe, rank, _no_message(rank, broken))
            return
        if kind == "handle":
            self.handles[rank] = value
            self.starting.done = len(self.handles)
            if len(self.handles) == len(self.processes):
                self.starting.end()
                for each in self.open:
                    each.send([self.handles[r] for r in range(len(self.processes))])
        elif kind == "result":
            self.results[rank] = value
            del self.open[pipe]
        else:
            self.fail(pipe, rank, error)

    def look_for_deaths(self) -> None:
        """Records the failure of each rank that has closed its pipe, once its process has ended, or has not ended in
        time."""
        for pipe, until in [*self.ending.items()]:
            rank = self.pipes[pipe]
            if self.processes[rank].exitcode is not None or time.monotonic() >= until:
                self.fail(pipe, rank, self.end_error(rank), died=True)

    def end_error(self, rank: int) -> RankFailedError:
        """Returns the error for a rank whose process has closed its pipe, usually because it has ended."""
        code = self.processes[rank].exitcode
        if code is None:  # a process that fails to start closes its pipe first, and may take long to end
            ended = f"its process closed its connection and has not ended within {_GRACE_S:g} s"
        else:
            ended = f"its process ended with exit code {code}" + (f" ({_signal_name(-code)})" if code < 0 else "")
        if rank not in self.handles and code in (1, None):
            ended += " before that" if code else ""
            return RankFailedError(f"run_ranks: rank {rank} expected to start, {ended}; {_UNGUARDED}")
        return RankFailedError(f"run_ranks: rank {rank} expected to return a result, {ended}; look at its output")

    def fail(self, pipe: Connection, rank: int, error: BaseException, died: bool = False) -> None:
        """Records a failure and tells the other ranks to abort."""
        self.starting.end()
        self.open.pop(pipe, None)
        self.ending.pop(pipe, None)
        self.failures.append((rank, error))
        connected = len(self.handles) == len(self.processes)
        if self.returns_errors and connected:
            return  # the engines tell the other ranks
        if self.deadline is None:
            self.deadline = time.monotonic() + _GRACE_S
            who = f"rank {rank} (process {self.processes[rank].pid})"
            kind = type(error).__name__
            if connected:
                reason = f"{who} failed with {kind}: {error}"
            else:  # `_process_main` puts this into a sentence that ends with its own advice
                fact = str(error).removeprefix("run_ranks: ").partition(";")[0]
                reason = f"got none from {who}, which failed with {kind}: {fact}"
            self.abort_reason = (reason, died)
            self.abort_at = time.monotonic() + (_DETECTION_S if died and connected else 0)
            self.send_abort()

    def send_abort(self) -> None:
        """Tells the other ranks to abort once ``abort_at`` has passed. That is later after a death, because ranks that
        detect the death themselves report more."""
        if self.abort_reason is None or time.monotonic() < self.abort_at:
            return
        for each in self.open:
            with contextlib.suppress(OSError):
                each.send(self.abort_reason)
        self.abort_reason = None

    def end(self) -> None:
        """Ends all processes."""
        self.starting.end()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if pipe in self.open:
                process.kill()
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
            process.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killed(rank: int) -> RankFailedError:
    return RankFailedError(
        f"run_ranks: rank {rank} expected to end within {_GRACE_S:g} s after another rank failed, got no result, so "
        "its process was killed; look at its output"
    )


def _no_message(rank: int, error: Exception) -> RankFailedError:
    return RankFailedError(
        f"run_ranks: rank {rank} expected to send a result, got a message that does not load ({type(error).__name__}: "
        f"{one_line(error)}); see what else writes to that rank's open files"
    )


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Inside the block, processes that are started ignore Ctrl-C, because this process ends them. A Ctrl-C that arrives
    here takes effect after the block."""
    resource_tracker.ensure_running()  # if started later, it would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_main(fn: Callable[..., Any]) -> None:
    """Raises if a new process cannot import the program: it is not a file, or it calls run_ranks on import."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InvalidArgumentError(f"run_ranks: was called while a new process imports the script; {_UNGUARDED}")
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return
    path = getattr(main, "__file__", None)
    here = getattr(getattr(fn, "func", fn), "__module__", None) == "__main__"
    if (path is None and here) or (path is not None and not os.path.exists(path)):
        raise InvalidArgumentError(
            "run_ranks: the program comes from standard input, -c, a prompt or a notebook, expected a file that new "
            "processes can import; save it as a script that calls run_ranks under `if __name__ == '__main__':` (in a "
            "notebook write the function to a file with %%writefile and import it), or pass ranks='threads'"
        )


def _run_processes(job: _Job) -> list[Any]:
    if not _can_be_pickled((job.fn, job.args)):
        raise InvalidArgumentError(
            f"run_ranks: got {job.fn!r}, which a new process cannot import; pass a function of a module, with "
            "arguments that can be pickled, or ranks='threads'"
        )
    _check_main(job.fn)
    ranks = _Processes(len(job.places), job.returns_errors)
    try:
        ranks.start(job)
        return ranks.run()
    finally:
        ranks.end()
