"""Jobs of torchrun agents on this machine, one for each pretended host, that are killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support.training.runs import EXAMPLES


class Job:
    """examples/train_gpt.py under an agent on each host; use it as a context manager, nothing of it stays behind.

    Args:
        folder: of the checkpoints and of what the hosts write.
        words: of train_gpt.py.
    """

    def __init__(self, folder: Path, words: Sequence[str], hosts: int = 2, ranks: int = 1) -> None:
        self.folder, self.words, self.ranks = folder, words, ranks
        self.names = [f"{'abcdefgh'[host]}-{os.getpid()}-{folder.name}" for host in range(hosts)]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]

    def __enter__(self) -> Job:
        for host in range(len(self.names)):
            self.start(host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.agents:
            self.kill_host(host)

    def start(self, host: int) -> None:
        """Starts a host's agent, for the first time or again: the same command."""
        environment = {
            **os.environ,
            "RINGCOMM_HOST": self.names[host],
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        conf = f"is_host={int(host == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.names)}"]
        command += [f"--nproc-per-node={self.ranks}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command += [f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", "--max-restarts=3", "--monitor-interval=0.2"]
        command += [str(EXAMPLES / "train_gpt.py"), "--save", str(self.folder / "run"), *self.words]
        with self.output(host).open("ab") as out:
            self.agents[host] = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def output(self, host: int) -> Path:
        """What a host writes, over all its starts."""
        return self.folder / f"host{host}.txt"

    def processes(self, host: int, workers: bool = False) -> list[int]:
        """Those that run on a host: the agent and its workers, or these alone."""
        marks = {f"RINGCOMM_HOST={self.names[host]}".encode()} | ({b"LOCAL_RANK=0"} if workers else set())
        found = []
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if each.name.isdecimal() and marks <= set((each / "environ").read_bytes().split(b"\0")):
                    found.append(int(each.name))
        return found

    def kill_worker(self, host: int) -> None:
        """The first rank of a host ends without a word."""
        (worker,) = self.processes(host, workers=True)
        os.kill(worker, signal.SIGKILL)

    def kill_host(self, host: int) -> None:
        """All processes of a host end without a word."""
        while running := self.processes(host):
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agents[host].wait()

    def wait_for_step(self, step: int, limit_s: float = 60) -> None:
        """Until the checkpoint of a step is whole."""
        end = time.monotonic() + limit_s
        while not (self.folder / "run" / f"step-{step:08d}").exists():
            over = [agent.returncode for agent in self.agents.values() if agent.poll() is not None]
            if over or time.monotonic() > end:
                raise AssertionError(f"no checkpoint of step {step}, agents that ended: {over}\n{self.said()}")
            time.sleep(0.02)

    def finish(self, limit_s: float = 60) -> str:
        """Waits for the end of all agents; what the hosts wrote. Raises if one failed."""
        end = time.monotonic() + limit_s
        for agent in self.agents.values():
            try:
                agent.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job did not end within {limit_s} s\n{self.said()}") from None
        codes = [agent.returncode for agent in self.agents.values()]
        assert not any(codes), f"exit codes {codes}\n{self.said()}"
        return self.said()

    def said(self) -> str:
        """What all hosts wrote so far."""
        return "\n".join(self.output(host).read_text(errors="replace") for host in self.agents)
