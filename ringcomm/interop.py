"""Arrays of other libraries as plain numbers: address, count, element type. The only place of the primitives that knows
torch, NumPy and DLPack; each is imported when its first array arrives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringcomm import _C
from ringcomm.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError

_CPU_DEVICES = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost
_REAL_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_LINEAR = ("sum", "avg", "premul_sum")  # what may be done to the two halves of a complex number apart
_NAMES = {code: name for name, code in _C.DTYPES.items()}


class Dtype(NamedTuple):
    """An element type: its name, its number in the core (None: it has no arithmetic here), its bytes."""

    name: str
    code: int | None
    nbytes: int


class Array:
    """One array of the caller, seen as memory. ``source`` is what the caller passed, ``data`` the torch tensor or NumPy
    array that shares its memory."""

    __slots__ = ("address", "contiguous", "count", "data", "dtype", "library", "shape", "source", "strides", "writable")
    address: int
    contiguous: bool
    count: int
    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writable: bool

    def __init__(self, source: Any, data: Any, library: type[Torch] | type[Numpy]) -> None:
        self.source = source
        self.data = data
        self.library = library
        library.fill(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.dtype.nbytes

    def copy(self) -> Array:
        """The same values in new contiguous memory."""
        fresh = self.empty(self.shape)
        fresh.library.assign(fresh.data, self.data)
        return fresh

    def empty(self, shape: Sequence[int]) -> Array:
        """New contiguous memory of this element type and library."""
        data = self.library.empty(tuple(shape), self.data)
        return Array(data, data, self.library)

    def may_overlap_itself(self) -> bool:
        """Whether two elements may share memory, as in an expanded tensor."""
        reach = 1
        for stride, length in sorted((abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if self.count and stride < reach:
                return True
            reach = stride * (length - 1) + reach
        return False

    def overlaps(self, other: Array) -> bool:
        """Whether two contiguous arrays share memory."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


class Torch:
    """How a torch tensor is read."""

    @staticmethod
    def fill(array: Array) -> None:
        data = array.data
        array.dtype = torch_dtype(data.dtype)
        array.shape = tuple(data.shape)
        array.strides = data.stride()
        array.count = data.numel()
        array.contiguous = data.is_contiguous() and not data.is_neg() and not data.is_conj()
        array.address = data.data_ptr()
        array.writable = True

    @staticmethod
    def empty(shape: tuple[int, ...], like: Any) -> Any:
        return like.new_empty(shape)

    @staticmethod
    def assign(target: Any, values: Any) -> None:
        target.copy_(values)


class Numpy:
    """How a NumPy array is read."""

    @staticmethod
    def fill(array: Array) -> None:
        data = array.data
        array.dtype = numpy_dtype(data.dtype)
        array.shape = data.shape
        array.strides = tuple(stride // max(data.itemsize, 1) for stride in data.strides)
        array.count = data.size
        array.contiguous = data.flags.c_contiguous
        array.address = data.ctypes.data
        array.writable = data.flags.writeable

    @staticmethod
    def empty(shape: tuple[int, ...], like: Any) -> Any:
        import numpy as np

        return np.empty(shape, like.dtype)

    @staticmethod
    def assign(target: Any, values: Any) -> None:
        target[...] = values


def named_dtype(name: str, nbytes: int) -> Dtype:
    """The element type of a name as torch and ml_dtypes spell it."""
    return Dtype(name, _C.DTYPES.get(name), nbytes)


_torch_dtypes: dict[Any, Dtype] = {}
_numpy_dtypes: dict[Any, Dtype] = {}


def torch_dtype(dtype: Any) -> Dtype:
    """The element type of a torch dtype."""
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = _torch_dtypes[dtype] = named_dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
    return found


def numpy_dtype(dtype: Any) -> Dtype:
    """The element type of a NumPy dtype; one of foreign byte order has no arithmetic."""
    found = _numpy_dtypes.get(dtype)
    if found is None:
        found = named_dtype(dtype.name, dtype.itemsize)
        found = _numpy_dtypes[dtype] = found if dtype.isnative else Dtype(dtype.str, None, dtype.itemsize)
    return found


def wire_type(dtype: Dtype, reduce_op: str | None, call: str, rank: int) -> tuple[int, int]:
    """(number of the type that travels, how many of it make one element).

    Without a reduction everything can travel, as bytes if need be; sums of complex numbers are sums of their halves.
    """
    if reduce_op is None:
        return (_C.DTYPES["uint8"], dtype.nbytes) if dtype.code is None else (dtype.code, 1)
    if dtype.code is not None and _C.supports(dtype.code, _C.REDUCE_OPS[reduce_op]):
        return dtype.code, 1
    if dtype.name in _REAL_OF and reduce_op in _LINEAR:
        return _C.DTYPES[_REAL_OF[dtype.name]], 2
    served = [name for code, name in _NAMES.items() if _C.supports(code, _C.REDUCE_OPS[reduce_op])]
    raise DtypeError(
        f"{call}: rank {rank} got {dtype.name}, {reduce_op} is defined for {', '.join(sorted(served))}; "
        "convert the array"
    )


# ---- recognising an array ----------------------------------------------------------------------------------------


def as_array(x: Any, call: str, rank: int, any_device: bool = False) -> Array:
    """``x`` as an Array that shares its memory; raises before anything is sent when that cannot be."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x, call, rank, any_device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        return _from_numpy(x, x, call, rank)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x, call, rank, any_device)
    try:
        view = memoryview(x)
    except TypeError:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__}, expected a torch tensor, a NumPy array, a buffer or anything "
            "with __dlpack__; convert it first"
        ) from None
    import numpy as np

    return _from_numpy(x, np.asarray(view), call, rank)


def _from_torch(torch: Any, x: Any, call: str, rank: int, any_device: bool) -> Array:
    if x.layout != torch.strided:
        raise ShapeError(f"{call}: rank {rank} got a tensor of layout {x.layout}, expected strided; pass x.to_dense()")
    if x.is_quantized:
        raise DtypeError(f"{call}: rank {rank} got a quantized tensor, its scale would be lost; pass x.dequantize()")
    if not any_device:
        _check_device(x.device.type == "cpu", str(x.device), call, rank)
    data = x.detach() if x.requires_grad else x
    if data.numel() and data.data_ptr() == 0:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got {type(x).__name__} without memory of its own, expected a plain tensor; "
            "pass the local tensor"
        )
    return Array(x, data, Torch)


def _from_numpy(source: Any, data: Any, call: str, rank: int) -> Array:
    if data.dtype.hasobject:
        raise DtypeError(f"{call}: rank {rank} got dtype {data.dtype}, objects cannot travel; pass numbers")
    return Array(source, data, Numpy)


def _from_dlpack(x: Any, call: str, rank: int, any_device: bool) -> Array:
    device = x.__dlpack_device__()
    on_cpu = int(device[0]) in _CPU_DEVICES
    if not any_device:
        _check_device(on_cpu, f"DLPack device {tuple(int(part) for part in device)}", call, rank)
    if on_cpu:
        import numpy as np

        try:
            return _from_numpy(x, np.from_dlpack(x), call, rank)
        except (TypeError, BufferError, RuntimeError, ValueError):
            pass  # types that NumPy has not, such as bfloat16
    import torch

    return _from_torch(torch, torch.from_dlpack(x), call, rank, any_device)


def _check_device(served: bool, device: str, call: str, rank: int) -> None:
    if not served:
        raise DeviceError(
            f"{call}: rank {rank} got an array on {device}, this communicator serves the cpu and an engine for other "
            "devices is not built yet; pass an array on the cpu"
        )


# ---- memory of the communicator ----------------------------------------------------------------------------------


def library_of(dtype: Any) -> str:
    """The library whose dtype this is; torch for names and None."""
    kind = dtype if isinstance(dtype, type) else type(dtype)
    return "numpy" if kind.__module__.partition(".")[0] == "numpy" else "torch"


def dtype_in(library: str, dtype: Any) -> Any:
    """``dtype`` (a torch or NumPy dtype, a name, or None for float32) as a dtype of ``library``."""
    if library == "numpy":
        import numpy as np

        if dtype is None:
            return np.dtype("float32")
        return np.dtype(str(dtype).removeprefix("torch.") if _is_torch(dtype) else dtype)
    import torch

    if dtype is None:
        return torch.float32
    if _is_torch(dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else _numpy_name(dtype)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DtypeError(f"empty: expected a dtype of torch, got {dtype!r}; pass a name such as 'float32'")
    return found


def _is_torch(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def _numpy_name(dtype: Any) -> str:
    import numpy as np

    return str(np.dtype(dtype).name)


def wrap_memory(memory: Any, library: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array of ``library`` over a ctypes buffer, which it keeps alive."""
    if library == "numpy":
        import numpy as np

        return np.frombuffer(memory, dtype).reshape(shape)
    import torch

    return torch.frombuffer(memory, dtype=dtype).view(shape)


def wrap_nothing(library: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array of no elements."""
    if library == "numpy":
        import numpy as np

        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=dtype)
