"""Ranks that stay alive and run one program of collectives after the other; a program that goes wrong says how."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

import ringcomm
from ringcomm import Communicator
from ringcomm.errors import AbortedError
from tests.support.collectives.arrays import Memory, Rows, as_tensor, difference, library_of
from tests.support.collectives.calls import Asked, Sources, calls_of
from tests.support.collectives.programs import Grouping, Program

LIMIT_S = 60.0  # of one call


@cache
def slot_bytes() -> int:
    """What a slot of the cpu engine holds: where the ring's chunks end."""
    return int(ringcomm.run_ranks(lambda comm: comm.describe(), 1)[0]["slot_bytes"])


# ---- one rank ----------------------------------------------------------------------------------------------------


class Run:
    """One rank's run of a program."""

    def __init__(self, comm: Communicator, program: Program, calls: Sequence[Asked]) -> None:
        self.program, self.calls, self.rank = program, calls, comm.rank
        self.comms: list[Communicator | None] = [comm]
        self.arrays: dict[int, Any] = {}
        self.results: list[Any] = [None] * len(calls)
        self.waiting: dict[int, Any] = {}

    def faults(self) -> list[str]:
        """Makes the calls and says what came out wrong."""
        for grouping in self.program.groupings:
            self.comms.append(self.make(grouping))
        numbered = enumerate(self.calls)
        for (how, group), calls in itertools.groupby(numbered, key=lambda each: (each[1].how, each[1].group)):
            if how == "coalesced":
                self.coalesced(self.comms[group], list(calls))
            else:
                for at, call in calls:
                    self.start(at, call)
        self.wait_until(None)
        for comm in self.comms[1:]:
            if comm is not None:
                comm.close()
        found = [(call, self.fault(at, call)) for at, call in enumerate(self.calls)]
        return [f"step {call.step}, rank {self.rank}: {call}: {what}" for call, what in found if what]

    def make(self, grouping: Grouping) -> Communicator | None:
        """This rank's communicator of a grouping."""
        parent = self.comms[grouping.parent]
        if parent is None:
            return None
        if grouping.how == "dup":
            return parent.dup()
        if grouping.how == "subgroup":
            return parent.subgroup(grouping.chosen(parent.world_size))
        return parent.split(grouping.colors[self.rank], grouping.keys[self.rank])

    def start(self, at: int, call: Asked) -> None:
        """One call; an asynchronous one is waited for some calls later, on each rank at another place."""
        later = call.how == "later"
        found = self.ask(call, {"async_op": True} if later and call.method not in ("isend", "irecv") else {})
        if later:
            self.waiting[at] = found
        else:
            self.results[at] = found
        self.wait_until(at)

    def wait_until(self, at: int | None) -> None:
        """Waits for the calls whose turn has come after call ``at``, in an order of this rank's own; None: for all."""
        due = [each for each in self.waiting if at is None or each + self.mixed(each) % 4 <= at]
        for each in sorted(due, key=self.mixed):
            self.results[each] = finished(self.waiting.pop(each))

    def mixed(self, at: int) -> int:
        """A number that differs between ranks and between calls."""
        seed = self.program.steps[self.calls[at].step].seed
        return (seed * 2_654_435_761 + self.rank * 40_503 + at * 97) >> 3 & 0xFF

    def coalesced(self, comm: Communicator | None, calls: Sequence[tuple[int, Asked]]) -> None:
        """Calls inside one ``coalesce`` block."""
        assert comm is not None
        with comm.coalesce():
            started = [(at, self.ask(call, {})) for at, call in calls]
        for at, work in started:
            self.results[at] = finished(work)

    def ask(self, call: Asked, more: dict[str, Any]) -> Any:
        """Makes the arrays and the call."""
        comm = self.comms[call.group]
        args = [self.passed(arg, comm) for arg in call.args]
        kwargs = {name: self.passed(arg, comm) for name, arg in call.kwargs.items()}
        return getattr(comm, call.method)(*args, **kwargs, **more)

    def passed(self, arg: Any, comm: Any) -> Any:
        """What is passed for an argument of the description."""
        if isinstance(arg, Memory):
            if id(arg) not in self.arrays:
                self.arrays[id(arg)] = arg.make(comm)
        elif isinstance(arg, Rows):
            self.arrays[id(arg)] = self.passed(arg.memory, comm)[arg.begin : arg.end]
        else:
            return [self.passed(each, comm) for each in arg] if isinstance(arg, list) else arg
        return self.arrays[id(arg)]

    # ---- what came of it -----------------------------------------------------------------------------------------

    def fault(self, at: int, call: Asked) -> str:
        """What is wrong with the result or the memory of a call; empty if nothing."""
        wrong = self.wrong_result(call, self.results[at])
        texts = [f"result: {wrong}"] if wrong else []
        texts += [f"{memory}: {text}" for memory in call.memories() if (text := memory.fault())]
        return "; ".join(texts)

    def wrong_result(self, call: Asked, got: Any) -> str:
        want = call.result
        if isinstance(want, (Memory, Rows)):
            return (
                "" if got is self.arrays[id(want)] else f"got another {type(got).__name__}, expected the array passed"
            )
        if isinstance(want, list):
            same = isinstance(got, list) and len(got) == len(want)
            same = same and all(a is self.arrays[id(b)] for a, b in zip(got, want, strict=True))
            return "" if same else "expected the list of arrays passed"
        if isinstance(want, Sources):
            if got not in want.messages or got in want.seen:
                return f"got source {got}, expected one of {sorted(set(want.messages) - want.seen)}"
            want.seen.add(got)
            call.args[0].after = want.messages[got]
            return ""
        if want is None or isinstance(want, int):
            return "" if got == want else f"got {got!r}, expected {want!r}"
        step = self.program.steps[call.step]
        if isinstance(got, np.ndarray) != (library_of(step) == "numpy"):
            return f"got a {type(got).__name__} for arrays of {step.library}"
        return difference(as_tensor(got), want, call.computed)


def finished(work: Any) -> Any:
    """The result of what was started: a Work, a Group or a list of Works."""
    return [each.wait() for each in work] if isinstance(work, list) else work.wait()


# ---- all ranks ---------------------------------------------------------------------------------------------------


class Ranks:
    """A world of ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world_size)]
        self.replies: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.thread = threading.Thread(target=self.serve, args=(world_size,), daemon=True)
        self.thread.start()

    def serve(self, world_size: int) -> None:
        try:
            ringcomm.run_ranks(self.rank, world_size, timeout=LIMIT_S)
        except Exception as error:
            self.replies.put((-1, error))

    def rank(self, comm: Communicator) -> None:
        while (job := self.jobs[comm.rank].get()) is not None:
            try:
                reply: Any = Run(comm, *job).faults()
            except Exception as error:
                self.replies.put((comm.rank, error))
                raise
            self.replies.put((comm.rank, reply))

    def run(self, program: Program, calls: Sequence[Sequence[Asked]]) -> list[str]:
        """What went wrong in a program; after an exception these ranks are of no more use."""
        for jobs, mine in zip(self.jobs, calls, strict=True):
            jobs.put((program, mine))
        found: list[str] = []
        errors: list[tuple[int, Exception]] = []
        for _ in self.jobs:
            rank, reply = self.replies.get(timeout=3 * LIMIT_S)
            if isinstance(reply, Exception):
                errors.append((rank, reply))
            else:
                found += reply
        errors.sort(key=lambda each: isinstance(each[1], AbortedError))
        return found + [f"rank {rank} raised {type(error).__name__}: {error}" for rank, error in errors[:1]]

    def close(self) -> None:
        for jobs in self.jobs:
            jobs.put(None)
        self.thread.join()


class Pool:
    """Ranks of every world size, made when first needed, and anew when a program has gone wrong."""

    def __init__(self, ranks: type[Ranks] = Ranks) -> None:
        self.ranks = ranks
        self.worlds: dict[int, Ranks] = {}
        self.checked = 0  # elements

    def run(self, program: Program) -> str:
        """Runs a program: empty if all is as it must be, else what was wrong, below the program."""
        calls = calls_of(program, slot_bytes())
        if program.world_size not in self.worlds:
            self.worlds[program.world_size] = self.ranks(program.world_size)
        faults = self.worlds[program.world_size].run(program, calls)
        self.checked += sum(call.checked() for mine in calls for call in mine)
        if not faults:
            return ""
        self.worlds.pop(program.world_size).close()
        return "\n".join([text_of(program, calls), *faults])

    def close(self) -> None:
        for ranks in self.worlds.values():
            ranks.close()
        self.worlds.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# ---- in words ----------------------------------------------------------------------------------------------------


def text_of(program: Program, calls: Sequence[Sequence[Asked]]) -> str:
    """A program as the calls that each rank makes."""
    lines = [f"{program.world_size} ranks"]
    for number, grouping in enumerate(program.groupings, 1):
        parent = "comm" if grouping.parent == 0 else f"group{grouping.parent}"
        how = {"dup": "dup()", "subgroup": f"subgroup({list(grouping.colors)}, each modulo {parent}.world_size)"}
        split = f"split({list(grouping.colors)}[comm.rank], {list(grouping.keys)}[comm.rank])"
        lines.append(f"group{number} = {parent}.{how.get(grouping.how, split)}")
    for at, step in enumerate(program.steps):
        said = [[f"{call}{_HOW[call.how]}" for call in mine if call.step == at] for mine in calls]
        what = f"step {at}, {'any bits' if step.wild else 'ordinary values'} of seed {step.seed}"
        if all(each == said[0] for each in said):
            lines += [f"{what}: {text}" for text in said[0]]
        else:
            lines += [f"{what}, rank {rank}: {text}" for rank, mine in enumerate(said) for text in mine]
    return "\n".join(lines)


_HOW = {"now": "", "later": "  # async_op=True", "coalesced": "  # inside comm.coalesce()"}
