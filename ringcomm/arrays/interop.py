"""Reads arrays of other libraries as address, count, element type and device. It accepts arrays of torch, NumPy,
CuPy and DLPack, `__cuda_array_interface__`, `__array_interface__` and the buffer protocol."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

from ringcomm import _C
from ringcomm.arrays.devices import CPU, EMULATED, Device
from ringcomm.arrays.libraries import Array, Cupy, Dtype, Numpy, Torch, torch_device, torch_with_cuda
from ringcomm.errors import DeviceError, DtypeError, InvalidArgumentError, RingcommError, ShapeError, one_line

_DLPACK_CPU, _DLPACK_CUDA = (1, 3), (2, 13)  # kDLCPU and kDLCUDAHost; kDLCUDA and kDLCUDAManaged
_FIRST_PAGE = 4096  # bytes, to which no program has access
_REAL_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
# Operations that may be applied to the two halves of a complex number separately.
_LINEAR = ("sum", "avg", "premul_sum")
_OF_LISTS = {
    "all_reduce": "all_reduce_coalesced",
    **{call: f"{call}_list" for call in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")},
}
"""The form for a list of arrays, by call."""
DTYPE_NAMES = {code: name for name, code in _C.DTYPES.items()}


def wire_type(dtype: Dtype, reduce_op: str | None, call: str, rank: int) -> tuple[int, int]:
    """Returns (number of the type that is sent, number of such elements per element).

    Without a reduction any type can be sent, one that the core does not know as bytes; a sum of complex numbers is the
    sum of their halves.
    """
    if reduce_op is None:
        return (_C.DTYPES["uint8"], dtype.nbytes) if dtype.code is None else (dtype.code, 1)
    if dtype.code is not None and _C.supports(dtype.code, _C.REDUCE_OPS[reduce_op]):
        return dtype.code, 1
    if dtype.name in _REAL_OF and reduce_op in _LINEAR:
        return _C.DTYPES[_REAL_OF[dtype.name]], 2
    served = [name for code, name in DTYPE_NAMES.items() if _C.supports(code, _C.REDUCE_OPS[reduce_op])]
    served += _REAL_OF if reduce_op in _LINEAR else ()
    raise DtypeError(
        f"{call}: rank {rank} got {dtype.name}, {reduce_op} is defined for {', '.join(sorted(served))}; "
        "convert the array"
    )


def identity(op: str, dtype: Dtype) -> float:
    """Returns a reduction's identity: the value that leaves every other value unchanged."""
    if op in ("sum", "prod", "bor", "bxor"):
        return 1 if op == "prod" else 0
    if dtype.name == "bool":
        return op != "max"
    if "float" in dtype.name:
        largest = 448.0 if dtype.name == "float8_e4m3fn" else math.inf  # that type has no infinity
        return largest if op == "min" else -largest
    bits = 8 * dtype.nbytes
    smallest, largest = (0, (1 << bits) - 1) if dtype.name[0] == "u" else (-1 << bits - 1, (1 << bits - 1) - 1)
    if op == "band":
        return largest if smallest == 0 else -1
    return largest if op == "min" else smallest


# ---- recognising an array ----------------------------------------------------------------------------------------


def as_array(x: Any, call: str, rank: int, served: Device | None = CPU) -> Array:
    """
    Returns ``x`` as an Array that shares its memory; raises before anything is sent if that is impossible.

    Args:
        served: the device on which it must lie; None: any.
    """
    try:
        return _as_array(x, call, rank, served)
    except (RingcommError, MemoryError):
        raise
    except Exception as error:  # raised by the object's own code, or by a library that reads it
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__}, which cannot be read as an array "
            f"({type(error).__name__}: {one_line(error)}); pass a plain tensor or array"
        ) from error


def _as_array(x: Any, call: str, rank: int, served: Device | None) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x, call, rank, served)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _from_numpy(x, x, call, rank, served)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return _from_cupy(x, x, call, rank, served)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda_interface(x, call, rank, served)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, call, rank, served)
    if hasattr(x, "__array_interface__"):
        return _from_array_interface(x, call, rank, served)
    try:
        view = memoryview(x)
    except TypeError:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__}, expected a torch tensor, a NumPy or CuPy array, a buffer or "
            f"anything with __dlpack__, __cuda_array_interface__ or __array_interface__; {_instead(x, call)}"
        ) from None
    import numpy as np

    return _from_numpy(x, np.asarray(view), call, rank, served)


def _instead(x: Any, call: str) -> str:
    """Returns what to pass in the place of a value that is no array."""
    if _are_numbers(x):
        return "pass torch.tensor(x) or numpy.array(x)"
    if isinstance(x, (list, tuple)) and all(hasattr(each, "dtype") for each in x):
        return "pass its arrays one by one" + (f", or the list to {_OF_LISTS[call]}" if call in _OF_LISTS else "")
    return "convert it first"


def _are_numbers(x: Any) -> bool:
    return all(map(_are_numbers, x)) if isinstance(x, (list, tuple)) else isinstance(x, (int, float, complex))


def _from_torch(torch: Any, x: Any, call: str, rank: int, served: Device | None) -> Array:
    if x.is_nested:
        raise ShapeError(
            f"{call}: rank {rank} got a nested tensor, expected one of one shape; pass x.to_padded_tensor(0)"
        )
    if x.layout != torch.strided:
        raise ShapeError(f"{call}: rank {rank} got a tensor of layout {x.layout}, expected strided; pass x.to_dense()")
    if x.is_quantized:
        raise DtypeError(f"{call}: rank {rank} got a quantized tensor, its scale would be lost; pass x.dequantize()")
    _check_device(torch_device(x), served, call, rank)
    data = x.detach() if x.requires_grad else x
    if data.numel() and data.data_ptr() == 0:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__} without memory of its own, expected a plain tensor; "
            "pass the local tensor"
        )
    return Array(x, data, Torch)


def _from_numpy(source: Any, data: Any, call: str, rank: int, served: Device | None) -> Array:
    _check_device(CPU, served, call, rank)
    if hasattr(data, "mask") and isinstance(data, sys.modules["numpy"].ma.MaskedArray):
        raise InvalidArgumentError(
            f"{call}: rank {rank} got a masked array, whose mask cannot travel, expected a plain one; pass "
            "x.filled(value), or x.data and the mask x.mask as arrays of their own"
        )
    if data.dtype.hasobject:
        raise DtypeError(f"{call}: rank {rank} got dtype {data.dtype}, objects cannot travel; pass numbers")
    return Array(source, data, Numpy)


def _from_cupy(source: Any, data: Any, call: str, rank: int, served: Device | None) -> Array:
    _check_device(Device("cuda", data.device.id), served, call, rank)
    return Array(source, data, Cupy)


def _from_dlpack(x: Any, call: str, rank: int, served: Device | None) -> Array:
    kind, index = (int(part) for part in x.__dlpack_device__())
    found = CPU if kind in _DLPACK_CPU else Device("cuda" if kind in _DLPACK_CUDA else f"DLPack type {kind}", index)
    _check_device(found, served, call, rank)
    if found == CPU:
        import numpy as np

        try:
            return _from_numpy(x, np.from_dlpack(x), call, rank, served)
        except (TypeError, BufferError, RuntimeError, ValueError):
            pass  # types that NumPy does not have, such as bfloat16
    elif torch_with_cuda() is None:
        return _from_cupy(x, _cupy_for(x, call, rank).from_dlpack(x), call, rank, served)
    import torch

    return _from_torch(torch, torch.from_dlpack(x), call, rank, served)


def _from_array_interface(x: Any, call: str, rank: int, served: Device | None) -> Array:
    """Reads memory of the host that NumPy's interface describes; without an address it may be a copy, to read only."""
    import numpy as np

    data = np.asarray(x)
    array = _from_numpy(x, data, call, rank, served)
    if array.count and array.address < _FIRST_PAGE:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__} whose __array_interface__ names address {array.address}, "
            "expected that of memory; pass an array that has memory"
        )
    described = x.__array_interface__.get("data")
    array.writable = array.writable and isinstance(described, tuple) and described[0] == array.address
    return array


def _from_cuda_interface(x: Any, call: str, rank: int, served: Device | None) -> Array:
    """Wraps device memory of which only the address is known, assuming that it lies on the device that is served."""
    if served is not None and served.kind != "cuda":
        _check_device(Device("cuda"), served, call, rank)
    described = x.__cuda_array_interface__
    address, read_only = described["data"]
    torch = torch_with_cuda()
    if EMULATED:
        import numpy as np

        # The memory of an emulated device is host memory, and the entries of both interfaces are equal.
        interface = {key: value for key, value in described.items() if key not in ("stream", "mask")}
        view = SimpleNamespace(__array_interface__=interface, keeps_alive=x)
        array = _from_numpy(x, np.asarray(view), call, rank, served)
    elif torch is not None:
        data = torch.as_tensor(x, device="cuda" if served is None else str(served))
        if data.numel() and data.data_ptr() != address:  # torch made a copy, because the memory is on another device
            raise DeviceError(
                f"{call}: rank {rank} got {type(x).__name__} on another device, this communicator serves {served}; "
                "copy it there first"
            )
        array = _from_torch(torch, data, call, rank, served)
    else:
        array = _from_cupy(x, _cupy_for(x, call, rank).asarray(x), call, rank, served)
    array.source = x
    array.writable = not read_only
    array.made_on = described.get("stream")
    return array


def _cupy_for(x: Any, call: str, rank: int) -> Any:
    try:
        import cupy
    except ImportError:
        raise DeviceError(
            f"{call}: rank {rank} got {type(x).__name__} on a device, reading it needs a torch that sees CUDA devices, "
            "or CuPy; install one of them"
        ) from None
    return cupy


def _check_device(found: Device, served: Device | None, call: str, rank: int) -> None:
    if served is None or served.serves(found):
        return
    remedy = f", or make a communicator with device='{found}'" if found.kind in ("cpu", "cuda") else ""
    raise DeviceError(
        f"{call}: rank {rank} got an array on {found}, this communicator serves {served}; pass an array there{remedy}"
    )
