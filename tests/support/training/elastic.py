"""Jobs of torchrun agents on this machine, one for each pretended host, that are killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.support import torchrun
from tests.support.training.runs import run_program


class Job:
    """examples/train_gpt.py under an agent on each host; use it as a context manager, nothing of it stays behind.

    Args:
        folder: of the checkpoints and of what the hosts write.
        words: of train_gpt.py.
    """

    def __init__(self, folder: Path, words: Sequence[str], hosts: int = 2, ranks: int = 1) -> None:
        self.folder, self.words, self.ranks = folder, words, ranks
        self.names = [f"{'abcdefgh'[host]}-{os.getpid()}-{folder.name}" for host in range(hosts)]
        self.agents: dict[int, torchrun.Agent] = {}
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
            "RINGCOMM_HOST": self.names[host],
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        conf = f"is_host={int(host == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [f"--nnodes={len(self.names)}", f"--nproc-per-node={self.ranks}", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"]
        options += ["--max-restarts=3", "--monitor-interval=0.2"]
        words = ["--save", str(self.folder / "run"), *self.words]
        self.agents[host] = torchrun.Agent(options, run_program, words, environment, self.output(host))

    def output(self, host: int) -> Path:
        """What a host writes, over all its starts."""
        return self.folder / f"host{host}.txt"

    def kill_worker(self, host: int) -> None:
        """The first rank of a host ends without a word."""
        os.kill(self.agents[host].workers()[0], signal.SIGKILL)

    def kill_host(self, host: int) -> None:
        """All processes of a host end without a word."""
        self.agents[host].kill()

    def wait_for_step(self, step: int, limit_s: float = 60) -> None:
        """Until the checkpoint of a step is whole."""
        end = time.monotonic() + limit_s
        while not (self.folder / "run" / f"step-{step:08d}").exists():
            over = [agent.exit_code for agent in self.agents.values() if agent.exit_code is not None]
            if over or time.monotonic() > end:
                raise AssertionError(f"no checkpoint of step {step}, agents that ended: {over}\n{self.said()}")
            time.sleep(0.02)

    def finish(self, limit_s: float = 60) -> str:
        """Waits for the end of all agents; what the hosts wrote. Raises if one failed."""
        return torchrun.finish(list(self.agents.values()), limit_s)

    def said(self) -> str:
        """What all hosts wrote so far."""
        return "\n".join(self.output(host).read_text(errors="replace") for host in self.agents)
