"""`ringcomm run`: runs a Python program whose process groups are made over ringcomm, whichever backend it names.

It sets RINGCOMM_REPLACE and becomes ``python PROGRAM``, so the program runs with the same arguments, path and errors as
without this command. ``import torch`` then reads the variable, in this process and in those that it starts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import NoReturn

from ringcomm.errors import REINSTALL, InvalidArgumentError
from ringcomm.replace import VARIABLE, names_of

_DESCRIPTION = """\
Runs `python PROGRAM ...`. Its process groups that ask for
one of the backends NAMES are made over ringcomm. All options
of python may stand before the program.

  ringcomm run -m torch.distributed.run --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m ringcomm run train.py"""


def main(words: list[str]) -> NoReturn:
    """
    Runs the command: this process becomes the program.

    Raises:  InvalidArgumentError: words that do not make sense.
    """
    parser = argparse.ArgumentParser(
        "ringcomm run",
        usage="ringcomm run [--replace NAMES] PROGRAM.py | -m MODULE\n       [ARGUMENTS]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replace",
        metavar="NAMES",
        default=os.environ.get(VARIABLE) or _default_names(),
        help=f"backends to replace, separated by commas (default: {VARIABLE}, or gloo,nccl; gloo on a machine with an "
        "NVIDIA GPU)",
    )
    own, program = _split(words)
    names = names_of(parser.parse_args(own).replace, "--replace" if own else VARIABLE)
    if not program:
        raise InvalidArgumentError("expected a program or -m MODULE, got none; ringcomm run --help shows examples")
    _check_entry_point()
    os.environ[VARIABLE] = ",".join(names)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *_python_options(), *program])


def _default_names() -> str:
    return "gloo" if any(Path("/dev").glob("nvidia[0-9]*")) else "gloo,nccl"


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of this command, and those of python."""
    end = 0
    while end < len(words) and words[end].split("=")[0] in ("--replace", "-h", "--help"):
        end += 2 if words[end] == "--replace" else 1
    return words[:end], words[end:]


def _python_options() -> list[str]:
    """Options that this Python got itself, such as -u from torchrun."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return before[: -2 if before[-2:-1] == ["-m"] else -1]


def _check_entry_point() -> None:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        raise InvalidArgumentError(
            "expected torch to load its extensions, got TORCH_DEVICE_BACKEND_AUTOLOAD=0; unset it"
        )
    if "ringcomm" not in importlib.metadata.entry_points(group="torch.backends").names:
        raise InvalidArgumentError(
            f"expected ringcomm among the entry points torch.backends of {sys.executable}, got an installation without "
            f"it; {REINSTALL}"
        )
