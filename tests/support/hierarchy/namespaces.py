"""Several hosts on one machine: network namespaces, joined by links of a given bandwidth and delay.

As a module: `Cluster`. As a program: the links themselves. Each host has a TUN interface; this program carries packets
from one to another, each host's own packets one after the other at its bandwidth, and every packet after the delay:
what `tc netem` does in kernels that have it, with bandwidth and delay of each host for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support import torchrun

INTERFACE = "rc0"
MTU = 16000  # fewer packets for a program to carry
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def address(host: int) -> str:
    """A host's address."""
    return f"10.77.0.{host + 1}"


def why_not() -> str:
    """Why no cluster can be made here; empty if one can."""
    name = f"rc-probe-{os.getpid()}"
    if not os.path.exists("/dev/net/tun"):
        return "several hosts need /dev/net/tun, which is not here"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError:
        return "several hosts need the program ip (iproute2), which is not here"
    if done.returncode != 0:
        return f"several hosts need network namespaces, which cannot be made: {done.stderr.strip()}; run as root"
    inside = ["ip", "netns", "exec", name, "true"]
    entered = subprocess.run(inside, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if entered.returncode != 0:
        return f"several hosts need to run programs in namespaces, which fails: {entered.stderr.strip()}"
    return ""


class Cluster:
    """Hosts that see each other, and nothing else, at 10.77.0.1, 10.77.0.2 and so on. Use it as a context manager."""

    def __init__(self, hosts: int, gbps: float = 1.0, delay_ms: float = 1.0) -> None:
        self.hosts, self.gbps, self.delay_ms = hosts, gbps, delay_ms
        self.names = [f"rc-{os.getpid()}-{id(self) % 9973}-{host}" for host in range(hosts)]
        self.port = 29500
        self._started: list[subprocess.Popen[Any]] = []
        self._links: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Cluster:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            words = [sys.executable, __file__, "--gbps", str(self.gbps), "--delay-ms", str(self.delay_ms), *self.names]
            self._links = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert self._links.stdout is not None
            if self._links.stdout.readline().strip() != "ready":
                raise RuntimeError("the links between the hosts did not come up; look at the output above")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            kill(process)
        if self._links is not None:
            self._links.kill()
            self._links.wait()
        for name in self.names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def environment(self, host: int) -> dict[str, str]:
        """What a program on a host needs to know."""
        return {
            **os.environ,
            "RINGCOMM_HOST": f"host{host}",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start(
        self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program on a host, in a session of its own."""
        command = ["ip", "netns", "exec", self.names[host], *words]
        full = {**self.environment(host), **(env or {})}
        process = subprocess.Popen(command, env=full, start_new_session=True, **options)
        self._started.append(process)
        return process

    def torchrun(
        self, host: int, ranks: int, worker: Callable[..., None], arguments: Sequence[str], output: Path
    ) -> torchrun.Agent:
        """torchrun with ``ranks`` processes on a host; every host starts it, for one static job."""
        options = ["--nnodes", str(self.hosts), "--node-rank", str(host), "--master-addr", address(0)]
        options += ["--master-port", str(self.port), "--nproc-per-node", str(ranks)]
        from tests.support import torchrun  # torch is not imported for the links

        environment = self.environment(host)
        return torchrun.Agent(options, worker, arguments, environment, output, enter, self.names[host])

    def run(self, ranks: Sequence[int], words: Sequence[str], timeout_s: float, **more: Any) -> list[str]:
        """One job over all hosts, ``ranks[h]`` processes on host h; what each host wrote. Raises if one failed."""
        self.port += 1
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **more}
        env, world = more.pop("env", {}), str(sum(ranks))
        jobs = []
        for host, count in enumerate(ranks):  # torchrun wants the same number everywhere: one process for each rank
            for local in range(count):
                place = {"RANK": str(sum(ranks[:host]) + local), "LOCAL_RANK": str(local), "WORLD_SIZE": world}
                place |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": address(0), "MASTER_PORT": str(self.port)}
                jobs.append(self.start(host, [sys.executable, *words], env={**place, **env}, **more))
        return wait_for(jobs, timeout_s)

    def cut(self, host: int) -> None:
        """Takes a host off the network."""
        _ip("-n", self.names[host], "link", "set", INTERFACE, "down")

    def mend(self, host: int) -> None:
        """Puts it back."""
        _ip("-n", self.names[host], "link", "set", INTERFACE, "up")

    def sent_bytes(self, host: int) -> int:
        """Bytes of packets that a host has sent so far, with their headers."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        words = ["ip", "netns", "exec", self.names[host], "cat", path]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def wait_for(jobs: Sequence[subprocess.Popen[Any]], timeout_s: float) -> list[str]:
    """What each job wrote; the first failure is raised, and ends the others."""
    end = time.monotonic() + timeout_s
    texts = []
    for job in jobs:
        try:
            texts.append(job.communicate(timeout=max(0.1, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            for each in jobs:
                kill(each)
            rest = [text for each in jobs if (text := each.communicate()[0])]
            raise TimeoutError(f"the job did not end within {timeout_s:g} s:\n" + "\n".join([*texts, *rest])) from None
    if any(job.returncode != 0 for job in jobs):
        codes = [job.returncode for job in jobs]
        raise RuntimeError(f"exit codes {codes}:\n" + "\n".join(str(text) for text in texts))
    return texts


def enter(namespace: str) -> None:
    """This thread, and what it starts from now on, is on that host."""
    with open(f"/run/netns/{namespace}") as there:
        if _libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def kill(process: subprocess.Popen[Any]) -> None:
    """Ends a program and all that it started in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


# ---- the links ---------------------------------------------------------------------------------------------------


def open_tun(namespace: str) -> int:
    """The other end of a new interface in a namespace."""
    with open("/proc/self/ns/net") as here:
        try:
            enter(namespace)
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            _libc.setns(here.fileno(), _CLONE_NEWNET)
    return tun


def packets_of(tun: int) -> Iterator[bytes]:
    """What waits there now."""
    with contextlib.suppress(BlockingIOError, OSError):  # an interface that is down gives errors
        for _ in range(16):
            yield os.read(tun, MTU + 64)


def carry(tuns: Sequence[int], gbps: float, delay_ms: float) -> None:
    """Carries packets for good."""
    of_address = {socket.inet_aton(address(host)): tun for host, tun in enumerate(tuns)}
    free = dict.fromkeys(tuns, 0.0)  # when a host's link has sent what it was given
    flying: list[tuple[float, int, int, bytes]] = []
    poll = select.epoll()
    for tun in tuns:
        poll.register(tun, select.EPOLLIN)
    number = 0
    while True:
        now = time.monotonic()
        while flying and flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(flying)
            with contextlib.suppress(OSError):
                os.write(target, packet)
        wait_s = max(0.0, flying[0][0] - time.monotonic()) if flying else 1.0
        for tun, event in poll.poll(wait_s):
            if not event & select.EPOLLIN:
                time.sleep(0.001)
                continue
            if free[tun] > time.monotonic() + 0.02:  # what does not fit in the queue waits in the interface's own
                time.sleep(0.0002)
                continue
            for packet in packets_of(tun):
                target = of_address.get(packet[16:20], -1)
                if target < 0:
                    continue
                free[tun] = max(free[tun], time.monotonic()) + len(packet) * 8e-9 / gbps
                number += 1
                heapq.heappush(flying, (free[tun] + delay_ms * 1e-3, number, target, packet))


def main() -> None:
    """The links of the namespaces named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    given = parser.parse_args()
    tuns = []
    for host, name in enumerate(given.names):
        tuns.append(open_tun(name))
        _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "txqueuelen", "1000", "up")
    print("ready", flush=True)
    carry(tuns, given.gbps, given.delay_ms)


if __name__ == "__main__":
    main()
