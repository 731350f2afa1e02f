"""Excludes functions from `torch.compile`, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame  # Dynamo's C module, because importing the package torch._dynamo takes long


def skipped(function: _F) -> _F:
    """Makes Dynamo run a function uncompiled, and compile the functions that it calls."""
    return _without_dynamo(function, _frames._FrameAction.DEFAULT)


def eager(function: _F) -> _F:
    """Excludes a function and the functions that it calls from Dynamo. Unlike torch.compiler.disable it costs
    nothing if nothing is compiled, and does not import the compiler."""
    return _without_dynamo(function, _frames._FrameAction.SKIP)


def _without_dynamo(function: _F, inside: Any) -> _F:
    """Sets, on a function's code, how Dynamo treats the functions that it calls."""
    strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, inside)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
