"""As much of CuPy as ringcomm touches, over NumPy memory: stands for CuPy where devices are emulated."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

LOG: list[str] = []  # which streams were entered, and which made to wait


class Device:
    """A context; the current device counts where arrays are made."""

    current = 0

    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.id

    def __exit__(self, *error: object) -> None:
        Device.current = self.before


class ExternalStream:
    """A stream by address."""

    def __init__(self, ptr: int, device_id: int = 0) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __enter__(self) -> None:
        LOG.append(f"on {self.ptr} of {self.device_id}")

    def __exit__(self, *error: object) -> None:
        pass

    def record(self) -> str:
        return f"event on {self.ptr}"

    def wait_event(self, event: str) -> None:
        LOG.append(f"{self.ptr} waits for {event}")


class ndarray:
    """An array: NumPy's memory, and a device."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.device = Device(Device.current)
        self.data = types.SimpleNamespace(ptr=memory.ctypes.data)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "strides", "size", "itemsize", "flags"):
            return getattr(self.memory, name)
        raise AttributeError(name)

    def __setitem__(self, where: Any, values: ndarray) -> None:
        assert Device.current == self.device.id
        self.memory[where] = values.memory


def empty(shape: tuple[int, ...], dtype: Any) -> ndarray:
    return ndarray(np.empty(shape, dtype))


def install() -> None:
    """Makes this module `cupy`."""
    module: Any = types.ModuleType("cupy")
    module.ndarray, module.empty = ndarray, empty
    module.cuda = types.SimpleNamespace(
        Device=Device, ExternalStream=ExternalStream, get_current_stream=lambda: ExternalStream(0, Device.current)
    )
    sys.modules["cupy"] = module
