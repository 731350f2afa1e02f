"""The CUDA part of `ringcomm doctor`: the build, the driver, the devices and the paths between them, with advice
about what is missing. Works without a driver."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ringcomm import _C
from ringcomm.arrays import driver
from ringcomm.arrays.devices import EMULATED

_LEVELS = {  # NVML's and nvidia-smi's words for the place where the paths of two devices meet
    0: "one board", 10: "PIX (one PCIe switch)", 20: "PXB (several PCIe switches)", 30: "PHB (the host bridge)",
    40: "NODE (one processor)", 50: "SYS (between processors)",
}  # fmt: skip
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


@dataclass(frozen=True)
class Fact:
    """One line of output: the subject, whether it is usable (None: a plain fact), and the details or the reason."""

    section: str
    name: str
    usable: bool | None
    text: str


def build() -> Fact:
    """Whether the kernels were built, and for which architectures."""
    text = _C.build_info()["cuda"]
    return Fact("build", "cuda kernels", "built" in text.split()[:1] or EMULATED, text)


def engine() -> Fact:
    """Whether the engine runs here: runs a barrier in a world of one rank, on the first device."""
    why = _C.why_no_cuda()
    if why:
        return Fact("engines", "cuda", False, f"{why}{_advice(why)}")
    try:
        one = _C.Engine("cuda", 0, 1, 20_000)
        one.connect([one.handle()])
        one.submit(_C.OPS["barrier"], 0, 0, 0, 0, 0, 0, 0, 0).wait()
        facts = one.describe()
        one.close()
    except RuntimeError as error:
        return Fact("engines", "cuda", False, str(error))
    return Fact("engines", "cuda", True, ", ".join(f"{key} {value}" for key, value in facts.items() if key != "engine"))


def _advice(why: str) -> str:
    """Returns advice that the build's or the driver's message omits."""
    if "no CUDA engine" in why and not driver.why_none():
        return " (there is a driver: this machine could run it)"
    return ""


def devices() -> list[Fact]:
    """Returns facts about the driver and its devices."""
    if EMULATED:
        return [Fact("devices", "driver", None, "not queried: this build emulates its devices")]
    if driver.why_none():
        return [Fact("devices", "driver", False, driver.why_none())]
    major, minor = driver.version()
    facts = [Fact("devices", "driver", True, f"runs CUDA up to {major}.{minor}{_release()}")]
    present = driver.device_count()
    if present == 0:
        return [*facts, Fact("devices", "cuda:0", False, "no device; look at CUDA_VISIBLE_DEVICES and nvidia-smi")]
    return [*facts, _connections(), *_blocking(), *map(_device, range(present)), *_paths(present)]


def _connections() -> Fact:
    """Returns the number of hardware queues over which a process's streams are spread."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    few = given is not None and given.isdecimal() and int(given) < 32
    text = "a communicator on cuda sets 32 where it makes the first context" if given is None else given
    advice = "; streams that share one wait for each other's kernels: unset it, or set 32" if few else ""
    return Fact("devices", "CUDA_DEVICE_MAX_CONNECTIONS", False if few else None, text + advice)


def _blocking() -> list[Fact]:
    """Returns a warning if CUDA_LAUNCH_BLOCKING makes the host wait for each kernel, which may wait for other ranks."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "") in ("", "0"):
        return []
    waits = "irecv before isend on both ranks, or one thread for several devices, waits until the time limit"
    return [Fact("devices", "CUDA_LAUNCH_BLOCKING", False, f"set; {waits}: unset it")]


def _release() -> str:
    try:
        with open("/sys/module/nvidia/version") as file:
            return f", release {file.read().strip()}"
    except OSError:
        return ""


def _device(index: int) -> Fact:
    name, memory_bytes, multiprocessors, capability, l2_bytes = driver.device(index)
    text = (
        f"{name}, {memory_bytes / (1 << 30):.1f} GiB, {multiprocessors} SMs, sm_{capability[0]}{capability[1]}, "
        f"L2 {l2_bytes / (1 << 20):.0f} MiB, {driver.bus_id(index)}"
    )
    if capability < (8, 0):
        return Fact("devices", f"cuda:{index}", False, f"{text}; the kernels need compute capability 8.0 or newer")
    return Fact("devices", f"cuda:{index}", True, text)


def _paths(present: int) -> Iterator[Fact]:
    """Yields, for every two devices, whether one can read the other's memory, and over which link."""
    nvml = _nvml() if present > 1 else None
    for device in range(present):
        for peer in range(device + 1, present):
            there, back = driver.peer_access(device, peer), driver.peer_access(peer, device)
            name = f"cuda:{device} - cuda:{peer}"
            over = _link(nvml, driver.bus_id(device), driver.bus_id(peer)) if nvml else ""
            if there[0] and back[0]:
                atomics = "with" if there[1] and back[1] else "without"
                yield Fact("paths", name, True, f"peer access, {atomics} atomics, rank {there[2]}{over}")
            else:
                yield Fact(
                    "paths", name, False, f"no peer access{over}; in a virtual machine or behind an IOMMU it may be off"
                )
    if nvml is None and present > 1:
        yield Fact("paths", "topology", None, "pip install nvidia-ml-py to see NVLink and PCIe")


def _nvml() -> Any:
    """Returns NVML's module, initialised; None if nvidia-ml-py is not installed or NVML does not start."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or an error of its own
        return None
    return pynvml


def _link(nvml: Any, bus_id: str, peer_bus_id: str) -> str:
    """Returns ", over NVLink" or the PCIe level at which the paths of two devices meet; empty if NVML does not know."""
    try:
        ends = [nvml.nvmlDeviceGetHandleByPciBusId(each.encode()) for each in (bus_id, peer_bus_id)]
        if nvml.nvmlDeviceGetP2PStatus(*ends, _NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return ", over NVLink"
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(*ends)
    except nvml.NVMLError:
        return ""
    return f", over PCIe, {_LEVELS.get(level, level)}"


def libraries() -> list[Fact]:
    """Returns facts about the libraries whose device arrays can be used."""
    return [_torch(), _cupy()]


def _torch() -> Fact:
    if importlib.util.find_spec("torch") is None:
        return Fact("arrays", "torch on cuda", False, "torch is not installed")
    import torch

    if torch.version.cuda is None:
        return Fact(
            "arrays", "torch on cuda", False, f"torch {torch.__version__} is built for the cpu; install one for CUDA"
        )
    if not torch.cuda.is_available():
        return Fact("arrays", "torch on cuda", False, f"torch {torch.__version__} sees no device; see the driver above")
    return Fact("arrays", "torch on cuda", True, f"{torch.__version__}, CUDA {torch.version.cuda}")


def _cupy() -> Fact:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return Fact("arrays", "cupy", True, f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    there = importlib.util.find_spec("cupy") is not None or "cupy" in sys.modules
    return Fact("arrays", "cupy", there, "installed" if there else "not installed; pip install cupy-cuda13x")
