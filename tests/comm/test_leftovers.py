"""Nothing is left behind by any end of a rank, nobody else gets in, and a small /dev/shm does not matter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from ringcomm import Communicator, run_ranks
from ringcomm.errors import InvalidArgumentError
from tests.support.choice import slow

HEAD = """
import os, signal, sys, time
import numpy as np, ringcomm
def call(comm, n=3):
    for _ in range(n):
        comm.all_reduce(comm.empty(1 << 16, "float32", like="numpy"))
"""


def start(body: str, *words: str) -> subprocess.Popen[str]:
    """A Python program, as a process group of its own."""
    program = HEAD + textwrap.dedent(body)
    command = [*words, sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)


def gone(group: int) -> bool:
    """Whether no process of a group is left, or comes to its end soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def ended(process: subprocess.Popen[str]) -> str:
    """What a program printed; none of its processes is left."""
    try:
        said, _ = process.communicate(timeout=60)
        assert gone(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return said


@pytest.mark.parametrize("victim", [signal.SIGKILL, slow(signal.SIGTERM), slow(signal.SIGSEGV)])  # the same way to end
def test_no_file_stays_behind(victim: signal.Signals) -> None:
    """A rank that is killed has no name in /dev/shm or /tmp before or after, nor have the others."""
    process = start(f"""
        from torch.distributed import FileStore
        import tempfile
        def rank(r, path):
            comm = ringcomm.init(r, 3, store=FileStore(path, 3), timeout=20)
            call(comm)
            if r == 1:
                {"pass" if victim == signal.SIGKILL else f"signal.signal({int(victim)}, signal.SIG_DFL)"}
                os.kill(os.getpid(), {int(victim)})
            try:
                call(comm)
            except ringcomm.RankLostError:
                comm.close()
                os._exit(0)
            os._exit(4)
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for r in range(3):
                child = os.fork()
                if child == 0:
                    rank(r, folder + "/store")
                children.append(child)
            print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
    """)
    assert ended(process).strip() == str([0, -int(victim), 0])
    assert not [name for name in os.listdir("/dev/shm") if "ringcomm" in name]


def test_other_users_are_kept_out() -> None:
    """Another user cannot open a rank's memory while it connects (later nobody can), nor its record."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    process = start("""
        from ringcomm import _C
        engine = _C.Engine("cpu", 0, 2)
        files = [f"/proc/{os.getpid()}/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        segments = [path for path in files if os.path.exists(path) and "ringcomm" in os.readlink(path)]
        child = os.fork()
        if child == 0:
            os.setgid(65534), os.setuid(65534)
            opened = 0
            for path in segments:
                try:
                    os.close(os.open(path, os.O_RDONLY))
                    opened += 1
                except PermissionError:
                    pass
            os._exit(opened)
        print(len(segments), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert ended(process).split() == ["3", "0"]  # its segment, its record and its waits; none was opened


def test_a_small_dev_shm_does_not_matter() -> None:
    """64 KiB of /dev/shm, and messages of many times that through shared memory."""
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("needs root and unshare, to mount a small /dev/shm")
    body = """
        def rank(comm):
            x = comm.empty(1 << 22, "float32", like="numpy")
            x[:] = comm.rank + 1
            comm.all_reduce(x)
            return float(x[0] + x[-1])
        print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, ringcomm.run_ranks(rank, 3))
    """
    mounts = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    process = start(body, unshare, "--mount", "sh", "-c", mounts, "sh")
    said = ended(process).strip()
    if process.returncode != 0 and not said:
        pytest.skip("this machine does not let a test mount anything")
    assert said == "65536 [12.0, 12.0, 12.0]"


def test_memory_that_is_refused_is_a_clear_error() -> None:
    """A limit on the size of files holds for shared memory too: an error at once, not a signal later."""
    process = start("""
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with ringcomm.init(0, 1) as comm:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            try:
                comm.empty(1 << 22, "float32", like="numpy")
            except ringcomm.EngineError as error:
                print("shared memory of" in str(error), comm.aborted)
    """)
    assert ended(process).split() == ["True", "False"]


def test_ctrl_c_ends_a_call_that_waits() -> None:
    """The interrupted rank raises KeyboardInterrupt, also from an asynchronous call and a receive, the other one
    AbortedError."""
    process = start("""
        from torch.distributed import FileStore
        import tempfile
        WAITS = (
            lambda comm: comm.barrier(),
            lambda comm: comm.barrier(async_op=True).wait(),
            lambda comm: comm.recv(np.zeros(3), 1),
        )
        def rank(r, path, waits):
            comm = ringcomm.init(r, 2, store=FileStore(path, 2), timeout=50)
            comm.barrier()
            try:
                if r == 0:
                    open(path + ".ready", "w").close()
                    waits(comm)
                end = time.monotonic() + 20
                while r == 1 and not comm.aborted and time.monotonic() < end:
                    time.sleep(0.01)
                comm.barrier()
                comm.barrier()  # what rank 0 had begun asynchronously may have ended well
            except BaseException as error:
                print(r, type(error).__name__, flush=True)
            os._exit(0)
        for waits in WAITS:
            with tempfile.TemporaryDirectory() as folder:
                path, children = folder + "/store", []
                for r in range(2):
                    child = os.fork()
                    if child == 0:
                        rank(r, path, waits)
                    children.append(child)
                while not os.path.exists(path + ".ready"):
                    time.sleep(0.01)
                time.sleep(0.3)
                os.kill(children[0], signal.SIGINT)
                for child in children:
                    os.waitpid(child, 0)
    """)
    said = ended(process).splitlines()
    assert len(said) == 6, said
    for pair in (said[:2], said[2:4], said[4:]):
        first, second = sorted(pair)
        assert first == "0 KeyboardInterrupt", said
        assert second in ("1 AbortedError", "1 RankLostError"), said


def forks(comm: Communicator) -> int:
    """Rank 0 forks with calls in flight. Returns: how many of them the child was refused to wait for."""
    comm.barrier()
    if comm.rank == 1:
        comm.recv(torch.ones(1), 0)
        comm.send(torch.ones(3), 0)
        comm.all_reduce(torch.ones(3))
        return 0
    calls = [comm.irecv(torch.zeros(3), 1), comm.all_reduce(torch.ones(3), async_op=True)]
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        told = 0
        for call in calls:
            try:
                call.wait()
            except InvalidArgumentError as error:
                told += "in a process forked after it began" in str(error)
        os._exit(told)
    told = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.send(torch.ones(1), 1)
    for call in calls:
        call.wait()  # the child has taken nothing, and ended nothing
    return told


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=str)
def test_a_forked_child_cannot_wait_for_a_call_of_its_parent(hosts: list[int] | None) -> None:
    assert run_ranks(forks, 2, ranks="processes", hosts=hosts, timeout=40) == [2, 0]
