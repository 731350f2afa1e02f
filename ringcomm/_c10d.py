"""The extension for torch.distributed in a wheel, which has one for each minor version of torch, such as `_c10d_2_13`:
this module becomes the one for the installed torch. A build from source has a single one, named `_c10d` itself, which
Python imports in place of this file."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import torch

_PREFIX = "_c10d_"
_version = ".".join(torch.__version__.split(".")[:2])
_names = [each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)])]
_served = [name.removeprefix(_PREFIX).replace("_", ".") for name in _names if name.startswith(_PREFIX)]
if _version not in _served:
    raise ImportError(f"this wheel has it for torch {', '.join(_served)}" if _served else "it was built without torch")
sys.modules[__name__] = importlib.import_module(f"ringcomm.{_PREFIX}{_version.replace('.', '_')}")
