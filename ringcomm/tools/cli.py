"""The command `ringcomm`, also started by `python -m ringcomm`."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Sequence

from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.terminal import columns

COMMANDS = {  # name: (module, description)
    "bench": ("ringcomm.tools.bench.cli", "bandwidth and latency of the collectives, as nccl-tests measures them"),
    "doctor": (
        "ringcomm.observe.doctor",
        "what was built, what is usable on this machine, and what is not and why (or: info); with --pid or files: "
        "which rank of a job that hangs is in which call",
    ),
    "memory": ("ringcomm.tools.memory", "bytes on each rank at every ZeRO stage, from a number of parameters"),
    "run": ("ringcomm.tools.run", "a Python program, with ringcomm in the place of Gloo and NCCL"),
    "schedule": (
        "ringcomm.pipeline_parallel.show",
        "a pipeline schedule as a table or a picture, its idle share, and what each rank holds",
    ),
    "simulate": (
        "ringcomm.tools.simulate.cli",
        "predicted times of collectives and training steps on clusters, by a model of their links",
    ),
    "trace": ("ringcomm.observe.trace", "timelines of several ranks as one"),
    "tune": (
        "ringcomm.tools.tune",
        "the fastest algorithm for each size on this machine's GPUs, as a file for RINGCOMM_TUNING",
    ),
}
_OTHER_NAMES = {"info": "doctor"}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one command.

    Returns: its exit status; 2 for an unknown command; 1 if the disk of the output is full; 141 if the reader of the
             output, such as `head`, has ended, or 0 under torchrun, which would report any other status with a
             traceback.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # closed by the shell
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal.SIGPIPE
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None
        if not full or sys.stdout is None:
            raise
        _drop_output()
        print(f"ringcomm: cannot write the output: {error.strerror}; free space, or write elsewhere", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Drops what Python would flush to the standard output at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage() -> str:
    """Returns what `ringcomm --help` prints, as wide as the terminal."""
    width = min(100, columns())
    lines = ["usage: ringcomm COMMAND [ARGUMENTS]", "", "commands:"]
    for name, (_, what) in COMMANDS.items():
        lines += textwrap.wrap(what, width, initial_indent=f"  {name:<10s}", subsequent_indent=" " * 12)
    return "\n".join([*lines, "", "ringcomm help COMMAND describes a command.", ""])


def _run(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command == "help" and len(words) > 1:
        command, words = words[1], [words[1], "--help"]
    if command in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if words else 2
    if command == "--version":
        from ringcomm import __version__

        print(f"ringcomm {__version__}")
        return 0
    name = _OTHER_NAMES.get(command, command)
    if name in COMMANDS:
        return _run_command(name, words[1:])
    print(
        f"ringcomm: got the command {command!r}, expected {', '.join(COMMANDS)} or help; see ringcomm help",
        file=sys.stderr,
    )
    return 2


def _run_command(name: str, words: list[str]) -> int:
    """Returns the exit status of a command; 2, after a sentence on the standard error, for arguments and files that it
    cannot use."""
    try:
        status: int = importlib.import_module(COMMANDS[name][0]).main(words)
        return status
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        return ended.code or 0
    except (InvalidArgumentError, UnsupportedError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:  # of the output
            raise
        print(f"ringcomm {name}: {str(error).removeprefix(f'{name}: ')}", file=sys.stderr)
        return 2
