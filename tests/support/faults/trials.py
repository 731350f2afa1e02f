"""One trial of the fault campaign: its processes, its limit, and the judge of what the ranks told."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.faults.plan import Trial
from tests.support.faults.ranks import nothing, process_main

LIMIT_S = 15.0
"""Of a whole trial; what is not over by then is a hang."""
HEARD_S = 2.0
"""From a fault that is no stall to the last rank's error."""
STALLED_S = 1.0
"""From the end of the limit of a call that a rank does not come to, to the last rank's error."""
END_S = 20.0  # for a process that has said all to be gone; a busy machine takes seconds to end one
"""From a rank's last word to the end of its process."""

CLASSES = {
    "killed": "RankLostError",
    "stalled": "CollectiveTimeoutError",
    "throws": "AbortedError",
    "differs": "MismatchError",
    "leaves": "RankLostError",
}
PROBLEMS = ("wrong class", "unnamed", "late", "hang", "wrong result", "leftover", "no shrink")
Problem = tuple[str, str]


@dataclass
class Record:
    """What is known of a trial that is over."""

    pids: list[int]  # by rank
    exit_codes: list[int | None]
    fault_time: float | None = None
    last_step: int = -1  # that the culprit began
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """What the judge says of a trial; no problems: it was right."""

    trial: Trial
    problems: list[Problem]
    latencies: list[float]  # seconds to each survivor's error, beyond the limit where the fault is a stall


@functools.cache
def prepare() -> Any:
    """The context that makes the ranks' processes: forked from one that has imported everything and has no threads."""
    context = forked.context()
    first = context.Process(target=nothing)  # the imports are not in the first trial's time
    first.start()
    first.join()
    return context


# ---- running -----------------------------------------------------------------------------------------------------


class Run:
    """A trial under way."""

    def __init__(self, trial: Trial, folder: str) -> None:
        self.trial, self.folder = trial, folder
        self.end = time.monotonic() + LIMIT_S
        everybody = tuple(range(trial.world_size))
        self.ranks = [everybody] if trial.ranks == "threads" else [(rank,) for rank in everybody]
        self.pipes: dict[Any, int] = {}  # open ones, and which process is at the other end
        self.processes: list[Any] = []
        self.record = Record([], [])

    def start(self, context: Any) -> None:
        """Starts every process."""
        for at, ranks in enumerate(self.ranks):
            here, there = context.Pipe()
            arguments = (there, self.trial, ranks, self.folder)
            process = context.Process(target=process_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes[here] = at
            self.processes.append(process)
        self.record.pids = [
            process.pid for ranks, process in zip(self.ranks, self.processes, strict=True) for _ in ranks
        ]

    def watch(self) -> None:
        """Takes down what the ranks tell, until all have gone or the limit has passed."""
        while self.pipes and time.monotonic() < self.end:
            for pipe in wait(list(self.pipes), min(0.5, max(0.0, self.end - time.monotonic()))):
                self.receive(pipe)
            fault = self.trial.fault
            if fault.kind != "none" and not set(range(self.trial.world_size)) - {fault.rank} - self.ended:
                self.wake()

    @property
    def ended(self) -> set[int]:
        """Ranks that are done."""
        return set(self.record.outcomes)

    def receive(self, pipe: Any) -> None:
        """One message of a process, or its end."""
        try:
            kind, rank, facts = pipe.recv()
        except (EOFError, OSError):
            del self.pipes[pipe]
            pipe.close()
            return
        if kind == "fault":
            self.record.fault_time = facts["time"]
        elif kind == "end":
            self.record.outcomes[rank] = facts
        else:
            self.record.left += [f"rank {rank} left {each}" for each in facts["left"]]

    def wake(self) -> None:
        """Tells the culprit that the others are done; again and again, for it may not have stopped yet."""
        rank = self.trial.fault.rank if self.trial.ranks == "processes" else 0
        for pipe, at in self.pipes.items():
            if at == rank:
                with contextlib.suppress(OSError):  # it may have ended
                    pipe.send("the others are done")
                    os.kill(self.record.pids[rank], signal.SIGCONT)

    def finish(self) -> Record:
        """Ends what has not ended."""
        self.record.hung = [rank for at in self.pipes.values() for rank in self.ranks[at]]
        for at, process in enumerate(self.processes):
            if at in self.pipes.values():
                process.kill()
            process.join(END_S)
            if process.is_alive():
                self.record.left.append(f"rank {self.ranks[at][0]} left its process {process.pid}")
                process.kill()
                process.join()
            self.record.exit_codes += [process.exitcode] * len(self.ranks[at])
            process.close()
        for pipe in self.pipes:
            pipe.close()
        with contextlib.suppress(OSError, ValueError):
            self.record.last_step = int(Path(self.folder, "at").read_text())
        self.record.left += [f"file {name}" for name in os.listdir(self.folder) if name not in ("at", "store")]
        return self.record


def shared_memory_files() -> set[str]:
    """Names in /dev/shm that may be ours."""
    return {name for name in os.listdir("/dev/shm") if "ringcomm" in name} if os.path.isdir("/dev/shm") else set()


def run(trial: Trial, context: Any) -> Verdict:
    """Makes a trial and judges it."""
    before = shared_memory_files()
    with tempfile.TemporaryDirectory(prefix="ringcomm-fault-") as folder:
        running = Run(trial, folder)
        try:
            running.start(context)
            running.watch()
        finally:
            record = running.finish()
    record.left += [f"/dev/shm/{name}" for name in sorted(shared_memory_files() - before)]
    return judge(trial, record)


# ---- judging -----------------------------------------------------------------------------------------------------


def judge(trial: Trial, record: Record) -> Verdict:
    """What was not as it must be."""
    problems: list[Problem] = [("leftover", text) for text in record.left]
    latencies: list[float] = []
    dead = trial.fault.kind in ("killed", "leaves", "throws")
    for rank in range(trial.world_size):
        is_culprit = trial.fault.kind != "none" and rank == trial.fault.rank
        if rank in record.hung:
            problems.append(("hang", f"rank {rank} had not ended after {LIMIT_S:g} s"))
            continue
        code, outcome = record.exit_codes[rank], record.outcomes.get(rank)
        if code and not (is_culprit and trial.fault.kind == "killed"):
            problems.append(("wrong class", f"rank {rank} ended with exit code {code}"))
        if outcome is not None and outcome["wrong"]:
            problems.append(("wrong result", f"rank {rank}: {outcome['wrong']}"))
        elif outcome is not None and not (is_culprit and dead):
            found = list(_judge_error(trial, record, rank, outcome))
            problems += [(kind, f"rank {rank}: {text}") for kind, text in found]
            if outcome["error"] is not None and record.fault_time is not None and not is_culprit:
                latencies.append(_seconds(trial, record, outcome))
        elif outcome is None and not (is_culprit and dead) and not code:
            problems.append(("wrong class", f"rank {rank} ended without a word"))
    return Verdict(trial, problems, latencies)


def _seconds(trial: Trial, record: Record, outcome: dict[str, Any]) -> float:
    """From the fault, or the limit of the calls that wait for a stalled rank, to an error."""
    assert record.fault_time is not None
    return float(outcome["time"] - record.fault_time - trial.limit_s * (trial.fault.kind == "stalled"))


def _judge_error(trial: Trial, record: Record, rank: int, outcome: dict[str, Any]) -> Sequence[Problem]:
    """What is wrong with a rank's error, or with its having none."""
    fault = trial.fault
    if outcome["error"] is None:
        at_the_end = fault.meanwhile and record.last_step == len(trial.steps) - 1
        return [] if fault.kind == "none" or at_the_end else [("wrong class", "raised nothing")]
    told = f"{outcome['error']}: {outcome['message']}"
    if fault.kind == "none" or outcome["group"] < 0:
        return [("wrong class", f"expected no error, got {told}")]
    if record.fault_time is None or outcome["time"] < record.fault_time:
        return [("wrong class", f"before the fault: {told}")]
    problems: list[Problem] = []
    if not _right_class(trial, outcome):
        problems.append(("wrong class", f"expected {CLASSES[fault.kind]}, got {told}"))
    elif outcome["again"] != outcome["error"]:
        problems.append(("wrong class", f"the next call raised {outcome['again']} after {told}"))
    problems += _judge_names(trial, record, rank, outcome, told)
    seconds = _seconds(trial, record, outcome)
    if rank != fault.rank and seconds > (STALLED_S if fault.kind == "stalled" else HEARD_S):
        problems.append(("late", f"after {seconds:.2f} s: {told}"))
    return [*problems, *(_judge_shrunk(trial, rank, outcome) if trial.shrinks else ())]


def _judge_shrunk(trial: Trial, rank: int, outcome: dict[str, Any]) -> Sequence[Problem]:
    """What is wrong with the communicator that a survivor has in the end."""
    fault, got = trial.fault, outcome.get("members")
    if rank == fault.rank and fault.kind == "stalled":  # it comes when the others have gone
        refused = isinstance(got, str) and got.startswith("RankLostError")
        return [] if refused else [("no shrink", f"came late to shrink, expected RankLostError, got {got}")]
    alive = [r for r in range(trial.world_size) if r != fault.rank or fault.kind == "differs"]
    if got == alive and outcome["world_size"] == len(alive):
        return []
    return [("no shrink", f"expected to shrink to ranks {alive}, got {got}")]


def _direct(trial: Trial, outcome: dict[str, Any]) -> bool:
    """Whether the fault happened to the communicator that raised: what is left of others is passed on."""
    if trial.fault.kind == "differs":
        return bool(outcome["group"] == trial.steps[trial.fault.step].group)
    return trial.fault.rank in trial.groups[outcome["group"]]


def _right_class(trial: Trial, outcome: dict[str, Any]) -> bool:
    wanted, error = CLASSES[trial.fault.kind], outcome["error"]
    if trial.face == "torch" and "DistBackendError" not in outcome["names"]:
        return False
    if error == wanted:
        return True
    if outcome["group"] == 0 and _direct(trial, outcome):
        return False
    # Another rank raised it first, and left the groups that it shares with this one.
    passed_on = error == "AbortedError" and wanted in outcome["message"]
    return passed_on or (not _direct(trial, outcome) and error in ("AbortedError", "RankLostError"))


def _held_up(trial: Trial, record: Record, outcome: dict[str, Any]) -> set[int]:
    """Ranks that wait for one that is stalled in another group than that of the error: who is not in that one can
    only say that they do not come."""
    fault = trial.fault
    others = [record.outcomes[rank] for rank in record.outcomes if rank != fault.rank]
    groups = {other["group"] for other in others if other["error"] is not None} - {outcome["group"], -1}
    if fault.kind != "stalled":
        return set()
    return {rank for group in groups if fault.rank in trial.groups[group] for rank in trial.groups[group]}


def _judge_names(trial: Trial, record: Record, rank: int, outcome: dict[str, Any], told: str) -> Sequence[Problem]:
    """Whether the message says who did what."""
    fault, direct = trial.fault, _direct(trial, outcome)
    if rank == fault.rank and fault.kind == "stalled":
        return []
    if not direct and (fault.kind == "stalled" or trial.face == "torch"):
        return []  # a rank of this group was in vain waited for, or closed it, for good reason
    named = {int(n) for each in re.findall(r"ranks? (\d+(?:, \d+)*)", told) for n in each.split(", ")}
    where = (
        trial.groups
        if re.search("left its communicator with|called shrink", told)
        else [trial.groups[outcome["group"]]]
    )
    who = {fault.rank, *_held_up(trial, record, outcome)}
    its = {members.index(rank) for members in where for rank in who & {*members}}  # a quoted error has other numbers
    missing = [] if its & named else [f"rank {' or '.join(map(str, its))}"]
    if trial.ranks == "processes" and fault.kind in ("killed", "stalled", "leaves") and direct:
        pids = "|".join(str(record.pids[each]) for each in who)
        missing += [] if re.search(rf"\b({pids})\b", told) else [f"process {pids}"]
    if direct and fault.kind == "differs":
        missing += [word for word in fault.words if not re.search(rf"\b{word}\b", told)]
    return [("unnamed", f"{' and '.join(missing)}: {told}")] if missing else []
