"""Queries the NVIDIA driver and its devices through the few functions of libcuda that need no context.

Where `why_none` has a reason, the other functions must not be called.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_MULTIPROCESSORS, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76  # CUdevice_attribute
_P2P_RANK, _P2P_ACCESS, _P2P_ATOMICS = 1, 2, 3  # CUdevice_P2PAttribute


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def why_none() -> str:
    """Loads the driver. Returns one sentence with the reason if there is none, else an empty one."""
    try:
        status = _library().cuInit(0)
    except OSError as error:
        return f"no NVIDIA driver: libcuda.so.1 does not load ({error}); install the driver"
    return "" if status == 0 else f"the NVIDIA driver does not start: {_explained(status)}; nvidia-smi may say more"


def _explained(status: int) -> str:
    """Returns the name and description of an error."""
    texts = []
    for function in (_library().cuGetErrorName, _library().cuGetErrorString):
        text = ctypes.c_char_p()
        function(status, ctypes.byref(text))
        texts.append((text.value or b"?").decode())
    return f"{texts[0]} ({status}), {texts[1]}"


def version() -> tuple[int, int]:
    """Returns the newest CUDA version that the driver supports."""
    number = _number(_library().cuDriverGetVersion)
    return number // 1000, number % 1000 // 10


def device_count() -> int:
    """Returns the number of devices that this process may use (CUDA_VISIBLE_DEVICES)."""
    return _number(_library().cuDeviceGetCount)


def bus_id(index: int) -> str:
    """Returns the place of one device on the PCIe bus."""
    found = ctypes.create_string_buffer(32)
    _library().cuDeviceGetPCIBusId(found, len(found), _handle(index))
    return found.value.decode()


def device(index: int) -> tuple[str, int, int, tuple[int, int], int]:
    """Returns the properties of one device: its name, bytes of memory, multiprocessors, compute capability, and bytes
    of L2 cache."""
    library, handle = _library(), _handle(index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), handle)
    memory = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(which: int) -> int:
        return _number(library.cuDeviceGetAttribute, which, handle)

    return (
        name.value.decode(errors="replace"),
        memory.value,
        attribute(_MULTIPROCESSORS),
        (attribute(_MAJOR), attribute(_MINOR)),
        attribute(_L2_BYTES),
    )


def _handle(index: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _library().cuDeviceGet(ctypes.byref(handle), index)
    return handle


def peer_access(device: int, peer: int) -> tuple[bool, bool, int]:
    """Returns (access, native atomics, rank) of the path from one device to another; rank 0 is the fastest path."""
    access, atomics, rank = (
        _number(_library().cuDeviceGetP2PAttribute, which, device, peer)
        for which in (_P2P_ACCESS, _P2P_ATOMICS, _P2P_RANK)
    )
    return bool(access), bool(atomics), rank


def _number(function: Any, *arguments: Any) -> int:
    value = ctypes.c_int()
    return value.value if function(ctypes.byref(value), *arguments) == 0 else 0
