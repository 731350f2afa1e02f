"""ringcomm: collective communication for PyTorch and NumPy on hand-written ring primitives.

    import ringcomm

    comm = ringcomm.init()                # under torchrun; or ringcomm.run_ranks(fn, 4)
    comm.all_reduce(x)                    # torch, NumPy, DLPack
    torch.distributed.init_process_group("ringcomm")

Importing this module imports neither torch nor NumPy. The torch.distributed backend registers itself as soon as
torch.distributed has been imported, before or after. Where ringcomm is installed, ``import torch`` imports this module
too, for the entry point ``torch.backends``; torch 2.14 also finds the backend under ``torch.distributed.backends``.
"""

from __future__ import annotations

import importlib as _importlib
import importlib.abc as _abc
import importlib.machinery as _machinery
import os as _os
import sys as _sys
import warnings as _warnings
from pathlib import Path as _Path
from types import ModuleType as _ModuleType
from typing import Any as _Any

__version__ = "0.1.0"

# The module of each public name: the stub has a line "from HOME import NAME as NAME" for each.
_HOMES = {
    words[3]: words[1]
    for words in map(str.split, _Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8").splitlines())
    if words[:1] == ["from"]
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringcomm' has no attribute {name!r}")
    home = vars(_importlib.import_module(_HOMES[name]))
    value = home[name] if name in home else _importlib.import_module(f"{_HOMES[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *dunders})


def _start(variable: str, module: str, function: str) -> None:
    """Starts what an environment variable asks for in this process. A failure is one line on stderr: it must not end
    ``import torch``, which imports this module."""
    if not _os.environ.get(variable):
        return
    try:
        getattr(_importlib.import_module(module), function)(_os.environ[variable])
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"ringcomm: this process goes on without {variable}: {why}", file=_sys.stderr, flush=True)


_start("RINGCOMM_TRACE", "ringcomm.observe.trace", "trace_process")
_start("RINGCOMM_METRICS", "ringcomm.observe.metrics", "serve_process")


# ---- the torch.distributed backend -------------------------------------------------------------------------------

_TORCH_DISTRIBUTED = "torch.distributed"


def _register_backend() -> None:
    """Registers the backend, and replaces others by it if the environment says so. Idempotent."""
    if not hasattr(_sys.modules.get(_TORCH_DISTRIBUTED), "Backend"):  # a torch that was built without it
        return
    if _os.environ.get("RINGCOMM_REPLACE"):
        _importlib.import_module("ringcomm.replace").install(_os.environ["RINGCOMM_REPLACE"])
    try:
        _importlib.import_module("ringcomm.backend")  # its last line registers it
    except ImportError as error:
        # A build that does not load, or is not there yet, must not end `import torch`, which imports this module.
        _warnings.warn(
            f"import torch: ringcomm's backend is not registered, because it cannot be imported: {error}; "
            f"{_importlib.import_module('ringcomm.errors').REINSTALL}",
            stacklevel=2,
        )


class _AfterTorchDistributed(_abc.MetaPathFinder):
    """An import hook that registers the backend once torch.distributed has been imported."""

    def find_spec(
        self, fullname: str, path: _Any = None, target: _ModuleType | None = None
    ) -> _machinery.ModuleSpec | None:
        if fullname != _TORCH_DISTRIBUTED:
            return None
        _sys.meta_path.remove(self)
        spec = _machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_register(module: _ModuleType) -> None:
                run_module(module)
                _register_backend()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _TORCH_DISTRIBUTED in _sys.modules:
    _register_backend()
else:
    _sys.meta_path.insert(0, _AfterTorchDistributed())


def _autoload() -> None:
    """The entry point ``torch.backends``. It does nothing, because torch has imported this module to find it."""
