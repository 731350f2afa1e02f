"""torchrun without new Pythons: its agent is forked from the server of `forked`, and its workers from the agent, where
torchrun starts each as a Python that imports torch for seconds. The rest is torchrun's own: options, rendezvous,
watching and restarting workers. tests/training/test_train_gpt.py and tests/comm/test_launch.py run the command itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import forked


class Agent:
    """torchrun on one host, in a session of its own.

    Args:
        options: those of torchrun's command.
        worker: what each rank runs, a function at the top level of a module, with ``arguments``.
        environment: variables for the agent and its workers, beside those of this process.
        output: the file to which they append what they write.
        enter: what the agent does first, with ``place``: goes into a network namespace.
    """

    def __init__(
        self,
        options: Sequence[str],
        worker: Callable[..., None],
        arguments: Sequence[str],
        environment: dict[str, str],
        output: Path,
        enter: Callable[[str], None] | None = None,
        place: str = "",
    ) -> None:
        self.output = output
        given = (list(options), worker, list(arguments), environment, str(output), enter, place)
        self._process = forked.context().Process(target=_agent, args=given)
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None if it runs after so many seconds."""
        self._process.join(timeout_s)
        return self.exit_code

    def workers(self) -> list[int]:
        """Process numbers of the workers that run, by local rank."""
        return [
            int(pid) for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        ]

    def kill(self) -> None:
        """Kills the agent and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def finish(agents: Sequence[Agent], limit_s: float) -> str:
    """Waits for the end of all agents; what they and their workers wrote. Raises if one failed."""
    end = time.monotonic() + limit_s
    codes = [agent.wait(max(0.1, end - time.monotonic())) for agent in agents]
    said = "\n".join(agent.output.read_text(errors="replace") for agent in agents)
    assert codes == [0] * len(codes), f"exit codes after at most {limit_s:g} s: {codes}\n{said}"
    return said


def _agent(
    options: list[str],
    worker: Callable[..., None],
    arguments: list[str],
    environment: dict[str, str],
    output: str,
    enter: Callable[[str], None] | None,
    place: str,
) -> None:
    os.setsid()
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if enter is not None:
        enter(place)
    os.environ.update(environment)
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    config, _, _ = run.config_from_args(run.parse_args([*options, "a script"]))
    config.start_method = "fork"
    elastic_launch(config, worker)(*arguments)
