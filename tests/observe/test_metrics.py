"""Metrics: what the flight recorder counts, as a dict, as Prometheus reads it, in a file and on a port."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringcomm
from ringcomm import _C, Communicator
from ringcomm.comm import hosts
from ringcomm.observe import metrics as module


def calls(comm: Communicator, before: set[str]) -> dict[str, Any]:
    """Makes calls of every kind; returns what was counted of this rank's communicator."""
    x, four = np.ones(1000, np.float32), np.ones(4, np.float64)
    for _ in range(300):  # more than the flight recorder keeps
        comm.all_reduce(x)
    comm.all_reduce(x, algorithm="ring")
    comm.all_gather(four)
    comm.gather(four, 0)
    comm.broadcast(x, async_op=True).wait()
    comm.send(four, 1) if comm.rank == 0 else comm.recv(four, 0)
    if comm.rank == 1:
        time.sleep(0.2)
    comm.barrier()
    with suppress(ringcomm.InvalidArgumentError):
        comm.broadcast(x, 7)
    found = counted_of(comm, before)
    comm.barrier()
    return found


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_every_call_is_counted_with_its_bytes(ranks: str) -> None:
    for rank, found in enumerate(ringcomm.run_ranks(calls, 2, groups(), ranks=ranks)):
        assert (found["engine"], found["rank"], found["world_size"]) == ("cpu", rank, 2)
        counted = {(op["op"], op["algorithm"]): (op["calls"], op["failed"], op["bytes"]) for op in found["ops"]}
        assert counted == {
            ("all_reduce", "auto"): (300, 0, 300 * 4000),
            ("all_reduce", "ring"): (1, 0, 4000),
            ("all_gather", "auto"): (1, 0, 64),
            ("gather", "auto"): (1, 0, 64 if rank == 0 else 32),
            ("broadcast", "auto"): (1, 0, 4000),
            ("recv" if rank else "send", "auto"): (1, 0, 32),
            ("barrier", "auto"): (1, 0, 0),
        }
        assert all(op["seconds"] > 0 for op in found["ops"])
    waits = ringcomm.run_ranks(calls, 2, groups(), ranks=ranks)[0]["waited"]
    assert [*waits] == [1]
    assert waits[1] > 0.1  # rank 1 slept for 0.2 s


KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCE, BROADCAST, GATHER = Communicator.all_reduce, Communicator.broadcast, Communicator.all_gather
SHARED: list[tuple[Any, int, str, str]] = [  # op, bytes of the message, algorithm asked for, algorithm chosen
    (ALL_REDUCE, 4, "auto", "oneshot"),
    (ALL_REDUCE, 16 * KIB - 4, "auto", "oneshot"),
    (ALL_REDUCE, 16 * KIB, "auto", "direct"),
    (ALL_REDUCE, MIB, "auto", "direct"),
    (ALL_REDUCE, MIB, "direct", "direct"),
    (ALL_REDUCE, 4, "direct", "staged"),
    (ALL_REDUCE, MIB, "oneshot", "oneshot"),
    (ALL_REDUCE, 4, "ring", "ring"),
    (BROADCAST, 16 * KIB - 4, "auto", "staged"),
    (BROADCAST, 16 * KIB, "auto", "direct"),
    (BROADCAST, 16 * MIB - 4, "auto", "direct"),
    (BROADCAST, 16 * MIB, "auto", "staged"),
    (GATHER, 4, "auto", "staged"),
    (GATHER, MIB, "auto", "direct"),
    (GATHER, MIB, "ring", "ring"),
]
PRIVATE: list[tuple[Any, int, str, str]] = [  # processes do not see one another's arrays
    (ALL_REDUCE, 32 * KIB, "auto", "oneshot"),
    (ALL_REDUCE, 32 * KIB + 4, "auto", "staged"),
    (ALL_REDUCE, 32 * KIB + 4, "oneshot", "oneshot"),
    (BROADCAST, MIB, "auto", "staged"),
    (ALL_REDUCE, 4, "ring", "ring"),
]
TWO: list[tuple[Any, int, str, str]] = [
    (ALL_REDUCE, MIB, "auto", "oneshot"),
    (ALL_REDUCE, MIB, "direct", "staged"),
    (ALL_REDUCE, 4, "ring", "ring"),
]


def groups() -> set[str]:
    """The communicators that this process has; those of earlier tests may not have been freed."""
    return {each["group"] for each in ringcomm.metrics()["communicators"]}


def counted_of(comm: Communicator, before: set[str]) -> dict[str, Any]:
    """What was counted of this rank's communicator, the only one that was not there ``before``."""
    every = ringcomm.metrics()["communicators"]
    (found,) = (each for each in every if each["rank"] == comm.rank and each["group"] not in before)
    return dict(found)


def make_calls(comm: Communicator, before: set[str], cases: list[tuple[str, int, str]]) -> tuple[dict[str, Any], str]:
    for n, (op, nbytes, algorithm) in enumerate(cases):
        x = np.ones(nbytes // 4, np.float32)
        for is_async in [False] * n + [True]:  # another number of calls for every case
            work = getattr(comm, op)(x, algorithm=algorithm, async_op=is_async)
            if is_async:
                work.wait()
    if comm.rank < 2:
        comm.send(np.ones(4), 1) if comm.rank == 0 else comm.recv(np.ones(4), 0)
    found, text = counted_of(comm, before), module.text()
    comm.barrier()
    return found, text


@pytest.mark.parametrize(
    ("ranks", "world_size", "cases"), [("threads", 3, SHARED), ("processes", 3, PRIVATE), ("processes", 2, TWO)]
)
def test_calls_are_counted_by_the_chosen_algorithm(ranks: str, world_size: int, cases: list[Any]) -> None:
    wanted: dict[tuple[str, str], Counter[str]] = {}
    for n, (op, _, asked, chosen) in enumerate(cases):
        wanted.setdefault((op.__name__, asked), Counter())[chosen] += n + 1
    named = [(op.__name__, nbytes, asked) for op, nbytes, asked, _ in cases]
    for found, text in ringcomm.run_ranks(make_calls, world_size, groups(), named, ranks=ranks):
        counted = {(op["op"], op["algorithm"]): op for op in found["ops"]}
        messages = [counted.pop(key) for key in [("send", "auto"), ("recv", "auto")] if key in counted]
        assert [op["chosen"] for op in messages] == [{}] * (found["rank"] < 2)
        assert {key: op["chosen"] for key, op in counted.items()} == wanted
        assert all(sum(op["chosen"].values()) == op["calls"] for op in counted.values())
        for (op, asked), numbers in wanted.items():
            for chosen, calls in numbers.items():
                labels = f'rank="{found["rank"]}",world_size="{world_size}",op="{op}",algorithm="{asked}"'
                assert re.search(rf'ringcomm_chosen_calls_total{{.*{labels},chosen="{chosen}"}} {calls}\n', text)


def test_memory_that_every_rank_can_access_is_used_in_place() -> None:
    for found in ringcomm.run_ranks(in_shared_memory, 3, ranks="processes"):
        assert [(op["op"], op["chosen"]) for op in found["ops"]] == [("all_reduce", {"direct": 2, "oneshot": 1})]


def in_shared_memory(comm: Communicator) -> dict[str, Any]:
    shared = comm.empty(16 * KIB, np.float32)
    shared[:] = 1
    for count in (1, 4 * KIB, 16 * KIB):
        comm.all_reduce(shared[:count])
    (found,) = ringcomm.metrics()["communicators"]
    return found


def test_a_wait_that_goes_on_is_counted() -> None:
    read: list[list[float]] = []
    before = groups()

    def rank(comm: Communicator) -> None:
        comm.all_reduce(np.ones(4), algorithm="ring")
        if comm.rank == 0:
            comm.barrier()
            return
        group = counted_of(comm, before)["group"]
        seconds, until = [0.0], time.monotonic() + 30
        while len(seconds) < 4 and time.monotonic() < until:  # rank 0 waits meanwhile
            each = [each for each in ringcomm.metrics()["communicators"] if each["rank"] == 0 and "waited" in each]
            waited = max(found["waited"].get(1, 0.0) for found in each if found["group"] == group)
            seconds += [waited] if waited > seconds[-1] + 0.02 else []
            time.sleep(0.02)
        read.append(seconds)
        comm.barrier()

    ringcomm.run_ranks(rank, 2, ranks="threads")
    assert len(read[0]) == 4, read


def test_what_failed_is_counted() -> None:
    found: list[dict[str, Any]] = []

    def rank(comm: Communicator) -> None:
        with pytest.raises(ringcomm.RingcommError):
            comm.all_reduce(np.ones(4 + comm.rank))
        if comm.rank == 0:
            found.extend(each for each in ringcomm.metrics()["communicators"] if each["rank"] == 0)

    ringcomm.run_ranks(rank, 2)
    assert any(op["failed"] == op["calls"] == 1 for each in found for op in each["ops"])


def test_what_failed_is_counted_when_newer_calls_have_taken_its_entry(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    environment = {**os.environ, "RINGCOMM_RECORD": "2"}
    done = subprocess.run(
        [sys.executable, "many.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == [8, 8], done.stderr


MANY = """
import json, time
import numpy as np
import ringcomm

def rank(comm):
    if comm.rank == 1:
        return
    works = [comm.all_reduce(np.ones(8), async_op=True) for _ in range(8)]
    for work in works:
        try:
            work.wait()
        except ringcomm.RingcommError:
            pass
    for each in ringcomm.metrics()["communicators"]:
        if each["rank"] == 0 and each["ops"]:
            print(json.dumps([each["ops"][0]["calls"], each["ops"][0]["failed"]]))

ringcomm.run_ranks(rank, 2, ranks="threads", timeout=30)
"""


def test_a_wait_that_fails_is_counted() -> None:
    waited: list[float] = []
    before = groups()
    counted = threading.Event()

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(ringcomm.CollectiveTimeoutError):
                comm.all_reduce(np.ones(4), algorithm="ring", timeout=0.3)
            waited.append(counted_of(comm, before)["waited"][1])
            counted.set()
        else:
            counted.wait(30.0)

    ringcomm.run_ranks(rank, 2)
    assert waited[0] > 0


def test_an_engine_that_is_not_connected_is_not_counted() -> None:
    engine = _C.Engine("cpu", 0, 2, 1000)
    assert not [each for each in ringcomm.metrics()["communicators"] if each["group"] == "0"]
    engine.close()


def test_memory_that_is_not_written_yet_is_left_out() -> None:
    gc.collect()  # communicators of earlier tests may end at any moment
    before = len(ringcomm.metrics()["communicators"]), len(ringcomm.record.records())
    fd = os.memfd_create(_C.RECORD_NAME)
    try:
        for nbytes in (0, 4096):
            os.truncate(fd, nbytes)
            assert (len(ringcomm.metrics()["communicators"]), len(ringcomm.record.records())) == before
    finally:
        os.close(fd)


def test_the_sums_are_those_of_the_communicators() -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        comm.all_reduce(np.ones(8))
        return ringcomm.metrics()

    found = ringcomm.run_ranks(rank, 1)[0]
    ops = [op for each in found["communicators"] for op in each["ops"]]
    for name in ("calls", "failed", "bytes", "seconds"):
        assert found[name] == sum(op.get(name, 0) for op in ops)
    json.dumps(found)


def test_the_text_is_that_of_prometheus() -> None:
    def rank(comm: Communicator) -> str:
        comm.all_reduce(np.ones(8))
        comm.barrier()
        return module.text()

    lines = ringcomm.run_ranks(rank, 2)[0].splitlines()
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in lines if line.startswith("# HELP")}
    samples = [line for line in lines if not line.startswith("#")]
    form = r'(ringcomm_\w+_total)\{\w+="[\w.]+"(,\w+="[\w.]+")*\} (\d+(\.\d+)?(e-?\d+)?)'
    named = {found[1] for line in samples if (found := re.fullmatch(form, line))}
    assert all(re.fullmatch(form, line) for line in samples)
    assert typed == helped == named == {*module._HELP}
    wanted = r'ringcomm_bytes_total\{.*rank="0",world_size="2",op="all_reduce",algorithm="auto"\} 64'
    assert any(re.fullmatch(wanted, line) for line in samples)


JOB = """
import os, sys, time
import numpy as np
import ringcomm

def rank(comm):
    comm.all_reduce(np.ones(8))
    print(os.getpid(), flush=True)
    if comm.rank == 0:
        sys.stdin.readline()
    comm.barrier()

if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        ringcomm.run_ranks(rank, 2, ranks="threads", timeout=100)
    with ringcomm.init() as comm:
        rank(comm)
"""


def job(folder: Path, wish: str, launcher: tuple[str, ...] = (), **more: str) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(JOB)
    return subprocess.Popen(
        [*launcher, sys.executable, "job.py", "one"], cwd=folder, env={**os.environ, "RINGCOMM_METRICS": wish, **more},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """Ends the job; returns what it wrote to its standard error."""
    told = process.communicate("\n", timeout=60)[1]
    assert process.returncode == 0, told
    return told


def test_a_file_is_written_while_the_job_runs(tmp_path: Path) -> None:
    process = job(tmp_path, "file:at-{rank}-{pid}.prom")
    path = tmp_path / f"at-0-{process.pid}.prom"
    while not (path.exists() and "all_reduce" in path.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    assert 'rank="0",world_size="1",op="all_reduce",algorithm="auto"} 64' in path.read_text()
    assert end(process) == ""
    assert 'op="barrier"' in path.read_text()  # the last call
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, "job.py"]


FORK = """
import os, sys, time
import numpy as np
import ringcomm

child = os.fork()
if child:
    sys.exit(os.waitpid(child, 0)[1])
comm = ringcomm.init()
comm.all_reduce(np.ones(8))
until = time.monotonic() + 20
while not os.path.exists(f"at-{os.getpid()}.prom") and time.monotonic() < until:
    time.sleep(0.02)
comm.barrier()
"""


def test_a_forked_process_has_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(FORK)
    environment = {**os.environ, "RINGCOMM_METRICS": "file:at-{pid}.prom"}
    subprocess.run([sys.executable, "fork.py"], cwd=tmp_path, env=environment, check=True, timeout=60)
    (path,) = tmp_path.glob("*.prom")
    assert 'op="barrier"' in path.read_text()


GROUP = """
import time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("ringcomm", init_method=f"file://{Path('store').absolute()}", rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
until = time.monotonic() + 20
while not Path("at.prom").exists() and time.monotonic() < until:
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_file_has_the_last_calls_of_a_process_group_that_is_destroyed(tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    environment = {**os.environ, "RINGCOMM_METRICS": "file:at.prom"}
    done = subprocess.run(
        [sys.executable, "group.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 'op="barrier"' in (tmp_path / "at.prom").read_text()


def test_the_file_of_a_communicator_that_is_closed_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "RINGCOMM_METRICS": "file:{rank}.prom"}
    code = "import ringcomm; comm = ringcomm.init(); comm.barrier(); comm.close()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert 'op="barrier"' in (tmp_path / "0.prom").read_text()


@pytest.mark.parametrize("closes", [True, False])
def test_the_end_of_a_communicator_writes_the_file_once(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # communicators of earlier tests may end at any moment
    written: list[int] = []
    monkeypatch.setattr(hosts, "AT_CLOSE", [lambda: written.append(len(ringcomm.metrics()["communicators"]))])
    before = len(ringcomm.metrics()["communicators"])
    comm = ringcomm.init()
    comm.barrier()
    if closes:
        comm.close()
    del comm
    gc.collect()
    assert written == [before + 1]


def test_the_last_figures_of_a_communicator_that_ends_while_the_file_is_written_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_rank", lambda: 0)
    file = module._File(str(tmp_path / "at.prom"))
    texts = []

    def text() -> str:
        texts.append("earlier" if not texts else "last")
        found = texts[-1]
        if found == "earlier":
            file.write_last()  # as the garbage collector does
        return found

    monkeypatch.setattr(module, "text", text)
    assert file.write()
    assert texts == ["earlier", "last"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("at.prom", "last")]


def test_a_write_is_not_given_up_for_one_within_it_that_had_nothing_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_rank", lambda: 0)
    file = module._File(str(tmp_path / "at.prom"))
    within: list[str] = []

    def text() -> str:
        if within:
            return ""
        within.append("")
        file.write_last()
        return "some"

    monkeypatch.setattr(module, "text", text)
    assert file.write()
    assert (tmp_path / "at.prom").read_text() == "some"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rank", lambda: 0)
    monkeypatch.setattr(module, "text", lambda: "some")
    (tmp_path / "at.prom").mkdir()
    file = module._File(str(tmp_path / "at.prom"))
    for _ in range(2):
        assert file.write()
    assert [path.name for path in tmp_path.iterdir()] == ["at.prom"]


def test_an_error_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_rank", lambda: 3)
    monkeypatch.setattr(module, "text", lambda: "some")
    file = module._File(str(tmp_path / "later" / "{rank}.prom"))
    for _ in range(2):
        assert file.write()
    told = capsys.readouterr().err
    assert told.startswith("ringcomm metrics: FileNotFoundError")
    assert told.count("\n") == 1
    (tmp_path / "later").mkdir()
    assert file.write()
    assert (tmp_path / "later" / "3.prom").read_text() == "some"


def test_a_port_is_opened_for_a_communicator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_communicator() -> int:
        raise TimeoutError

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(module, "_rank", no_communicator)
    monkeypatch.setattr(module, "ThreadingHTTPServer", None)
    with pytest.raises(TimeoutError):
        module._serve(0)


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_port_of_the_loopback_interface_serves_it(tmp_path: Path) -> None:
    port = free_port()
    process = job(tmp_path, f"port:{port - 1}", LOCAL_RANK="1")
    text = ""
    while "all_reduce" not in text:
        assert process.poll() is None
        with suppress(OSError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        time.sleep(0.02)
    listening = Path(f"/proc/{process.pid}/net/tcp").read_text()
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    assert end(process) == ""


def test_a_job_goes_on_without_its_metrics(tmp_path: Path) -> None:
    process = job(tmp_path, "file:nowhere/at.prom")
    assert process.stdout is not None
    process.stdout.readline()
    assert process.stderr is not None
    assert "ringcomm metrics: FileNotFoundError" in process.stderr.readline()
    end(process)


@pytest.mark.parametrize("wish", ["on", "file:", "port:", "port:0", "port:70000", "port:http", "file"])
def test_an_invalid_setting_is_refused(wish: str) -> None:
    with pytest.raises(ringcomm.InvalidArgumentError, match=r"got RINGCOMM_METRICS=.*, expected file:PATH or port:N"):
        module.serve_process(wish)


def test_metrics_of_another_process_and_of_a_missing_one(tmp_path: Path) -> None:
    process = job(tmp_path, "")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert [op["op"] for each in ringcomm.metrics(pid)["communicators"] for op in each["ops"]] == ["all_reduce"]
    end(process)
    with pytest.raises(ringcomm.InvalidArgumentError, match=r"which no process has|has ended"):
        ringcomm.metrics(pid)


def test_a_launcher_stands_for_what_it_has_started(tmp_path: Path) -> None:
    call = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    process = job(tmp_path, "", (sys.executable, "-c", call))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    assert ringcomm.metrics(process.pid) == ringcomm.metrics(pid)
    assert ringcomm.metrics(process.pid)["calls"] == 1
    end(process)


def test_without_a_record_nothing_is_counted(tmp_path: Path) -> None:
    process = job(tmp_path, "", RINGCOMM_RECORD="0")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert ringcomm.metrics(pid) == {"calls": 0, "failed": 0, "bytes": 0, "communicators": []}
    end(process)
