"""All errors of this package. A message is one sentence: call, rank, expected, got, what to do."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import PosixPath
from types import BuiltinFunctionType, FunctionType
from typing import Any

REINSTALL = (
    "install a newer ringcomm, or build it beside this torch with `pip install --no-build-isolation --force-reinstall "
    "--no-deps --no-binary ringcomm ringcomm`"
)
"""What to do about an installation that does not fit the installed torch."""


class RingcommError(RuntimeError):
    """Base class of all errors of this package."""


class InvalidArgumentError(RingcommError, ValueError):
    """The caller's arguments are wrong. Nothing was sent; the communicator stays usable."""


class ShapeError(InvalidArgumentError):
    """An array has the wrong shape, size or strides."""


class DtypeError(InvalidArgumentError):
    """An element type is unknown, differs between arrays, or does not support the reduction."""


class DeviceError(InvalidArgumentError):
    """An array lies on a device that this communicator does not serve."""


class ClosedError(RingcommError):
    """The communicator was closed."""


class UnsupportedError(RingcommError, NotImplementedError):
    """This build, engine or machine does not have the feature."""


class CollectiveTimeoutError(RingcommError, TimeoutError):
    """A peer did not come in time. The communicator is aborted; create a new one."""


class AbortedError(RingcommError):
    """A rank aborted. The communicator is aborted; create a new one."""


class RankLostError(AbortedError):
    """A rank's process ended, or it closed its communicator, while other ranks need it. The communicator is aborted;
    continue with the surviving ranks by `Communicator.shrink`, or create a new communicator."""


class MismatchError(RingcommError):
    """The ranks made different calls. The communicator is aborted; create a new one."""


class EngineError(RingcommError):
    """The operating system refused a resource that the engine needs."""


class RankFailedError(RingcommError):
    """A rank of `run_ranks` ended without a result."""


_SHOWN = 80


def shown(value: object) -> str:
    """Formats a wrong argument for a message: short, and without running the argument's own code, which may fail or
    hang."""
    numpy, kind = sys.modules.get("numpy"), type(value)
    if numpy is not None and kind.__module__ == "numpy" and isinstance(value, numpy.generic):
        value = value.item()
    elif kind.__module__.partition(".")[0] in ("torch", "numpy"):
        return _shown_of_libraries(value)
    elif kind in (type, FunctionType, BuiltinFunctionType):
        return f"{'a class' if kind is type else 'a function'}, {value.__name__}"  # type: ignore[attr-defined]
    elif kind in (dict, set, frozenset):
        return f"a {kind.__name__} of {len(value)}"  # type: ignore[arg-type]
    if type(value) is int and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if type(value) in (list, tuple):
        inside = ", ".join(map(shown, value[:8])) + (", ..." if len(value) > 8 else "")  # type: ignore[index, arg-type]
        return f"[{inside}]"
    if value is not None and type(value) not in (bool, int, float, complex, str, bytes, range, timedelta, PosixPath):
        return f"a value of type {type(value).__name__}"
    text = repr(value[: _SHOWN + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _shown_of_libraries(value: Any) -> str:
    """Formats a value of NumPy or torch by what tells it apart: the shape and type of an array, not its numbers."""
    numpy, torch, kind = sys.modules.get("numpy"), sys.modules.get("torch"), type(value)
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.dtype)):
        return f"{value.dtype} array of shape {value.shape}" if kind is numpy.ndarray else f"dtype {value}"
    if torch is not None and kind in (torch.dtype, torch.device, torch.Size):
        return str(value)
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter) and not value.is_nested:  # else without a shape
        return f"{value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"a value of type {kind.__name__}"


def one_line(error: BaseException) -> str:
    """Returns the message of another library's error, short enough for a message."""
    return " ".join(str(error).split())[:200]


def rank_list(ranks: Sequence[int]) -> str:
    """Formats ranks, such as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def carry_notes(source: BaseException, target: BaseException) -> None:
    """Copies an error's notes to the error that replaces it."""
    for note in getattr(source, "__notes__", ()):
        target.add_note(note)  # type: ignore[attr-defined]  # Python 3.11


def user_stacklevel() -> int:
    """Returns the `stacklevel` of the caller's warning about the first line outside of torch and ringcomm."""
    packages = [sys.modules[name] for name in ("torch", "ringcomm") if name in sys.modules]
    folders = [os.path.dirname(str(package.__file__)) + os.sep for package in packages]
    ours = (*folders, contextlib.__file__)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    return level
