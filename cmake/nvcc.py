"""The nvcc of this machine: the one rule, for CMake, which runs this, and for setup.py and `make gpu`.

RINGCOMM_NVCC; else that of CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda; else that of NVIDIA's wheels beside this
Python: nvidia-cuda-nvcc, which needs the headers and the library of nvidia-cuda-runtime to build with.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def nvcc() -> str:
    """Its path; empty where there is none."""
    homes = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = os.pathsep.join([*homes, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or []) if wheels else []
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("cu*/bin/nvcc"))]
    return os.environ.get("RINGCOMM_NVCC") or shutil.which("nvcc", path=places) or (found[-1] if found else "")


if __name__ == "__main__":
    print(nvcc(), end="")
