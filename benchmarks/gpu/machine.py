"""
The first stage of `make gpu`: what the machine is and what its driver allows, tried where that can be tried.

    python -m benchmarks.gpu.machine [--out FILE]

Uses libcuda and torch alone, since ringcomm is not built yet.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.document import ROOT, Document, default_path

_MULTICAST, _VMM, _VMM_BY_DESCRIPTOR, _MPS, _COMPUTE_MODE = 132, 102, 103, 133, 20  # CUdevice_attribute


def program(name: str) -> str:
    """Path of a program, or nothing. The build looks for nvcc by the same rule."""
    if name == "nvcc":
        return str(runpy.run_path(str(ROOT / "cmake" / "nvcc.py"))["nvcc"]())
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    folders = [*(f"{home}/bin" for home in homes), sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    folders.append("/usr/local/cuda/bin")
    return shutil.which(name, path=os.pathsep.join(folders)) or ""


def there(name: str) -> str:
    return "yes" if program(name) else "none"


def missing() -> str:
    """What the stages behind the facts lack here and what to install, in one sentence; empty where nothing is."""
    packages = {name: name for name in ("cmake", "ninja") if not program(name)}
    modules = ("setuptools", "torch", "numpy", "rich", "pytest", "pytest_timeout")
    packages |= {name: name.replace("_", "-") for name in modules if importlib.util.find_spec(name) is None}
    nvcc, runtime = Path(program("nvcc")), "nvidia-cuda-runtime"
    if not nvcc.name:
        packages["nvcc"] = f"nvidia-cuda-nvcc {runtime}"
    elif nvcc.match("nvidia/cu*/bin/nvcc") and not (nvcc.parents[1] / "include" / "cuda_runtime.h").exists():
        packages["cuda_runtime.h"] = runtime  # nvcc of a wheel finds that of the wheel beside it alone
    remedies = [f"pip install {' '.join(packages.values())}"] if packages else []
    if not nvcc.name:
        remedies[0] += " (or CUDA 12.1 or newer in place of the last two, with RINGCOMM_NVCC as the path of its nvcc)"
    if not program("c++"):
        packages["c++"] = ""
        remedies.append("install a C++ compiler")
    return f"make gpu expects {', '.join(packages)}, not found here: {' and '.join(remedies)}" if packages else ""


class Driver:
    """libcuda with the context of the first device."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, function: str, *args: Any) -> None:
        if status := getattr(self.library, function)(*args):
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{function}: {(name.value or b'?').decode()} ({status})")

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, self.device)
        return value.value

    def version(self) -> str:
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"

    def export(self) -> str:
        """Of plain memory, to another process."""
        memory, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(2 << 20))
        try:
            self.call("cuIpcGetMemHandle", handle, memory)
        finally:
            self.call("cuMemFree_v2", memory)
        return "works"

    def export_vmm(self) -> str:
        """Of memory of the virtual memory API, as a file descriptor."""
        if not (self.attribute(_VMM) and self.attribute(_VMM_BY_DESCRIPTOR)):
            return "not offered"
        wish = (ctypes.c_int * 8)(1, 1, 1, self.device.value)  # pinned, by descriptor, on this device, nothing else
        memory, descriptor = ctypes.c_ulonglong(), ctypes.c_int(-1)
        self.call("cuMemCreate", ctypes.byref(memory), ctypes.c_size_t(2 << 20), wish, ctypes.c_ulonglong(0))
        try:
            self.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), memory, 1, ctypes.c_ulonglong(0))
            os.close(descriptor.value)
        finally:
            self.call("cuMemRelease", memory)
        return "works"


def device() -> dict[str, Any]:
    """What torch says of the first device."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "capability": f"{found.major}{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "memory_bytes": found.total_memory,
    }


def kernel_module() -> str:
    words = Path("/proc/driver/nvidia/version").read_text().split()
    return next(word for word in words if word[0].isdigit() and "." in word)


def compiler() -> str:
    path = program("nvcc")
    if not path:
        return "none"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip().splitlines()[-1]


def facts() -> dict[str, Any]:
    """One after the other; what cannot be found out says why."""
    made: list[Driver] = []

    def driver() -> Driver:
        if not made:
            made.append(Driver())
        return made[0]

    def yes(which: int) -> Callable[[], str]:
        return lambda: "yes" if driver().attribute(which) else "no"

    asked: dict[str, Callable[[], Any]] = {
        "torch": lambda: importlib.metadata.version("torch"),
        "python": platform.python_version,
        "cores": os.cpu_count,
        "cupy": cupy,
        "nvcc": compiler,
        "nvidia-smi": lambda: there("nvidia-smi"),
        "kernel module": kernel_module,
        "driver": lambda: driver().version(),
        "compute mode": lambda: driver().attribute(_COMPUTE_MODE),
        "MPS": yes(_MPS),
        "multicast": yes(_MULTICAST),
        "IPC export": lambda: driver().export(),
        "VMM export": lambda: driver().export_vmm(),
        "CUDA_DEVICE_MAX_CONNECTIONS": lambda: os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        "NCCL beside": lambda: "yes" if os.environ.get("RINGCOMM_NCCL") else "none: RINGCOMM_NCCL names no library",
        "compute-sanitizer": lambda: there("compute-sanitizer"),
        "ncu": lambda: there("ncu"),
    }
    found: dict[str, Any] = {}
    try:
        found |= device()
    except Exception as error:
        found["device"] = f"unknown: {first_line(error)}"
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name] = f"unknown: {first_line(error)}"
    return found


def cupy() -> str:
    names = [each.metadata["Name"] for each in importlib.metadata.distributions() if each.metadata["Name"]]
    found = sorted({name for name in names if name.lower().startswith("cupy")})
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found) or "none"


def first_line(error: BaseException) -> str:
    """One line of an error, for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_path(), help="gpu.json, wherever it is")
    a = parser.parse_args()
    found = facts()
    Document(a.out).put("facts", found)
    for name, value in found.items():
        print(f"{name:28s} {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
