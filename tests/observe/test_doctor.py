"""`ringcomm doctor` on a job: processes that hang or are stopped, files of records, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ringcomm
from ringcomm.observe import record
from ringcomm.tools import cli

JOB = """
import os, signal, sys, time
import numpy as np
import ringcomm

def rank(comm, how):
    os.write(1, f"{comm.rank} {os.getpid()}\\n".encode())  # in one piece
    comm.all_reduce(np.ones(4))
    comm.all_gather(np.ones(3))
    if comm.rank == 2:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "asleep":
            time.sleep(1000)
        else:
            comm.recv(np.ones(3), 1)
    comm.all_reduce(np.ones(5))

if __name__ == "__main__":
    ringcomm.run_ranks(rank, 3, sys.argv[1], ranks="processes", timeout=1000)
"""
GATHER, RECV, LAST = (
    1 + next(number for number, line in enumerate(JOB.splitlines()) if word in line)
    for word in ("all_gather", "comm.recv", "np.ones(5)")
)


STAYS = {
    "stopped": ("all_gather #1", "done", "stopped"),
    "asleep": ("all_gather #1", "done", "running"),
    "receiving": ("recv from rank 1", "in flight", "running"),
}


class Job:
    """A job of three ranks of which one never comes to the last call."""

    def __init__(self, folder: Path, how: str) -> None:
        self.how = how
        (folder / "job.py").write_text(JOB)
        self.process = subprocess.Popen(
            [sys.executable, "job.py", how],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"RINGCOMM_DEADLOCK_MS": "0"},  # the circle of the recv would end
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(3)]
        self.pids = {int(rank): int(pid) for rank, pid in lines}

    def wait_until_it_hangs(self) -> None:
        """Waits until each rank is stuck in its last call."""
        waits = ("all_reduce #2", "in flight", "running")
        while [self.place(rank) for rank in range(3)] != [waits, waits, STAYS[self.how]]:
            time.sleep(0.05)

    def place(self, rank: int) -> tuple[str, str, str] | None:
        """A rank's last call, the state of the call and the state of the process."""
        (found,) = record.records(self.pids[rank])
        return (found.calls[-1].title, found.calls[-1].state, found.process) if found.calls else None

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(params=list(STAYS))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, request.param)
    try:
        made.wait_until_it_hangs()
        yield made
    finally:
        made.end()


def doctor(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert cli.main(["doctor", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_it_says_which_rank_is_behind_in_which_call(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    text = doctor(capsys, "--pid", job.pids[0], "--calls", 2)  # the other ranks are found
    late = f"rank 2 (process {job.pids[2]})"
    if job.how == "receiving":
        assert f"{late} has been in recv from rank 1 (job.py:{RECV}) for " in text
    else:
        assert f"{late} has been outside of any call for " in text
        assert f" after all_gather #1 (job.py:{GATHER}); " in text
    assert f"; ranks 0, 1 have waited in all_reduce #2 (job.py:{LAST}) for " in text
    assert (f"{late}: stopped by a signal" in text) == (job.how == "stopped")
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("all_reduce #2 5 x float64, sum ranks 0, 1 in flight ") for row in rows)
    assert not any(row.startswith("all_reduce #0") and "ranks 0, 1" in row for row in rows)  # two calls a rank

    (view,) = json.loads(doctor(capsys, "--json", "--pid", job.pids[2], "--pid", job.pids[1]))
    assert [each["rank"] for each in view["ranks"]] == [0, 1, 2]
    assert view["ranks"][0]["calls"][-1]["state"] == "in flight"
    assert view["summary"][0].startswith(late)


@pytest.mark.parametrize("job", ["asleep"], indirect=True)
def test_the_launcher_of_ranks_stands_for_them(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = job.process.pid
    assert cli.main(["doctor", "--json", "--pid", str(launcher)]) == 0
    said = capsys.readouterr()
    (view,) = json.loads(said.out)
    assert [each["pid"] for each in view["ranks"]] == [job.pids[rank] for rank in range(3)]
    pids = ", ".join(map(str, sorted(job.pids.values())))
    assert said.err == (
        f"ringcomm doctor: process {launcher} has no communicator; reading the processes that it started: {pids}\n"
    )


@pytest.mark.parametrize("job", ["asleep"], indirect=True)
def test_ranks_of_another_user_are_not_read(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "is_of_this_user", lambda pid: False)  # for root the system refuses nothing
    assert cli.main(["doctor", "--pid", str(job.process.pid)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"\(process \d+ belongs to another user\); ask as their user", said), said


def test_the_reason_why_a_rank_cannot_be_read_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pids = {"launcher": os.getppid(), "ended": ended_process(), "other": other.pid}

        def records(pid: int) -> list[record.Record]:
            if pid == pids["launcher"]:
                return []
            raise ringcomm.InvalidArgumentError(f"record: the bytes of {pid} are of another version; do this")

        monkeypatch.setattr(record, "records", records)
        monkeypatch.setattr(record, "descendants", lambda pid: [pids["other"], pids["ended"]])
        monkeypatch.setattr(record, "is_of_this_user", lambda pid: True)
        assert cli.main(["doctor", "--pid", str(pids["launcher"])]) == 2
        other.communicate(b"\n")
    said = capsys.readouterr().err
    assert f"(process {other.pid}: the bytes of {other.pid} are of another version); ask as" in said


def test_descendants_that_form_a_circle_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is no snapshot: a process number may be reused while it is read."""
    parents = {2: 4, 3: 2, 4: 3, 5: 4, 6: 1}
    monkeypatch.setattr(record, "os", SimpleNamespace(listdir=lambda path: [*map(str, parents), "self"]))
    monkeypatch.setattr(record, "_status", lambda pid: {"PPid": str(parents[pid])})
    assert record.descendants(2) == [3, 4, 5]


def test_descendants_are_found_through_processes_without_a_record() -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(record.descendants(process.pid)) == 2
        process.communicate(b"\n")


def torchfrtrace(folder: Path) -> str:
    words = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("job", ["asleep"], indirect=True)
def test_torchfrtrace_names_the_rank_and_the_collective(
    job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "torch"
    assert doctor(capsys, "--pid", job.pids[0], "--torch", folder).split() == [
        str(folder / f"rank_{rank}") for rank in range(3)
    ]
    text = torchfrtrace(folder)
    assert "Not all ranks joining collective, sequence number: 3" in text  # it counts from 1
    assert "collective: nccl:all_reduce" in text
    assert "missing ranks: {2}" in text
    assert "input sizes: [[5]]" in text
    assert "collective state: started" in text
    assert f"all_reduce at job.py:{LAST}" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--torch: expected a process or files, got neither; name --pid or"),
        (["some.json", "--json"], "--torch: expected no --json and no --calls"),
        (["--pid", "1", "--calls", "5"], "--torch: expected no --json and no --calls"),
    ],
)
def test_options_that_do_not_go_with_torch_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["doctor", "--torch", str(tmp_path / "torch"), *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "torch").exists()


def test_it_reads_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = {each.group for each in record.records()}
    with ringcomm.init() as comm:
        comm.barrier()
        paths = record.dump(tmp_path)
        (own,) = (each for each in record.records() if each.group not in before)
    text = doctor(capsys, *paths)
    assert f"communicator {own.group:x} of 1 ranks (cpu)" in text
    assert "has been outside of any call for " in text
    assert "barrier #0" in text


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--pid", "of a process that has ended"], "which no process has"),
        (
            ["--pid", "of a process without ringcomm"],
            "nor has a process that it started, expected a rank",
        ),
        (["nowhere.json"], "expected a file of ringcomm.record.dump"),
    ],
)
def test_a_target_without_a_record_ends_with_one_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pids = {"of a process that has ended": ended_process(), "of a process without ringcomm": other.pid}
        status = cli.main(["doctor", *(str(pids.get(word, word)) for word in words)])
    assert status == 2
    text = capsys.readouterr().err
    assert text.startswith("ringcomm doctor: ")
    assert told in text
    assert text.count("\n") == 1


def test_a_process_that_waits_for_its_parent_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert cli.main(["doctor", "--pid", str(child.pid)]) == 2
    assert f"process {child.pid} has ended" in capsys.readouterr().err
    child.wait()


@pytest.mark.parametrize("words", [["--help"], ["--pid", "many"]])
def test_help_and_an_unknown_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == (0 if words == ["--help"] else 2)
    said = capsys.readouterr()
    assert "--calls" in said.out + said.err
