"""The console script `ringcomm`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: ringcomm COMMAND [ARGUMENTS]

commands:
  bench     bandwidth and latency of the collectives, as nccl-tests measures them
  doctor    what was built, what is usable on this machine, and what is not and why (or: info); with --pid or
            files: which rank of a job that hangs is in which call
  memory    bytes on each rank at every ZeRO stage, from a number of parameters
  run       a Python program, with ringcomm in the place of Gloo and NCCL
  schedule  a pipeline schedule as a table or a picture, its idle share, and what each rank holds
  simulate  collectives and training steps on clusters of any number of hosts, by a model of their links
  trace     timelines of several ranks as one
  tune      the fastest algorithm for each size on this machine's GPUs, as a file for RINGCOMM_TUNING

ringcomm COMMAND --help describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command.

    Returns: its exit status; 2 for an unknown command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if command == "--version":
        from ringcomm import __version__

        print(f"ringcomm {__version__}")
        return 0
    if command == "bench":
        from ringcomm.tools.bench.cli import main as bench

        return bench(words[1:])
    if command == "tune":
        from ringcomm.tools.tune import main as tune

        return tune(words[1:])
    if command == "memory":
        from ringcomm.data_parallel.budget import main as memory

        return memory(words[1:])
    if command == "schedule":
        from ringcomm.pipeline_parallel.show import main as schedule

        return schedule(words[1:])
    if command == "simulate":
        from ringcomm.tools.simulate.cli import main as simulate

        return simulate(words[1:])
    if command == "run":
        from ringcomm.tools.run import main as run

        return run(words[1:])
    if command == "trace":
        from ringcomm.observe.trace import main as trace

        return trace(words[1:])
    if command in ("doctor", "info"):
        return _doctor(command, words[1:])
    print(
        f"ringcomm: got the command {command!r}, expected bench, doctor, memory, run, schedule, simulate, trace or "
        "tune; ringcomm --help describes them",
        file=sys.stderr,
    )
    return 2


def _doctor(command: str, words: list[str]) -> int:
    if not words:
        from ringcomm.observe.info import main as info

        return info()
    from ringcomm.observe.doctor import main as doctor

    return doctor(command, words)
