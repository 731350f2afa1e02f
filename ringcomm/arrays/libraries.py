"""Adapters for torch, NumPy and CuPy: how each library's arrays are read, created and written, and on which stream.
A library is imported when its first array arrives. Arrays of any other library are converted to one of these."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

from ringcomm import _C
from ringcomm.arrays.devices import CPU, Device
from ringcomm.errors import DeviceError, DtypeError, InvalidArgumentError, UnsupportedError, shown
from ringcomm.validation import as_int


class Dtype(NamedTuple):
    """An element type: its name, its number in the core (None: the core does not know it), its size in bytes."""

    name: str
    code: int | None
    nbytes: int


def named_dtype(name: str, nbytes: int) -> Dtype:
    """Returns the element type of a name, as torch and ml_dtypes spell it."""
    return Dtype(name, _C.DTYPES.get(name), nbytes)


_MOST_WORK = 100_000  # of NumPy's search for an element that two arrays have in common
_torch_dtypes: dict[Any, Dtype] = {}
_numpy_dtypes: dict[Any, Dtype] = {}


def torch_dtype(dtype: Any) -> Dtype:
    """Returns the element type of a torch dtype."""
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = _torch_dtypes[dtype] = named_dtype(str(dtype).removeprefix("torch."), dtype.itemsize)
    return found


def numpy_dtype(dtype: Any) -> Dtype:
    """Returns the element type of a NumPy dtype; the core knows none of foreign byte order."""
    found = _numpy_dtypes.get(dtype)
    if found is None:
        found = named_dtype(dtype.name, dtype.itemsize)
        found = _numpy_dtypes[dtype] = found if dtype.isnative else Dtype(dtype.str, None, dtype.itemsize)
    return found


class Array:
    """One array of the caller, seen as memory. ``source`` is the object that the caller passed, ``data`` the torch,
    NumPy or CuPy array that shares its memory, ``made_on`` the stream on which the caller's library last used it, if
    known."""

    __slots__ = (
        *("address", "contiguous", "count", "data", "device", "dtype", "library", "made_on", "shape", "source"),
        *("strides", "writable"),
    )
    address: int
    contiguous: bool
    count: int
    device: Device
    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writable: bool

    def __init__(self, source: Any, data: Any, library: Library) -> None:
        self.source = source
        self.data = data
        self.library = library
        self.made_on: int | None = None
        library.fill(self)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.count * self.dtype.nbytes

    def copy(self) -> Array:
        """Returns the same values in new contiguous memory."""
        fresh = self.empty(self.shape)
        fresh.library.assign(fresh.data, self.data)
        return fresh

    def empty(self, shape: Sequence[int], dtype: str | None = None) -> Array:
        """Returns new contiguous memory of this library and device, and of this element type or another one."""
        data = self.library.empty(tuple(shape), self.data, dtype)
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

    @property
    def extent(self) -> tuple[int, int]:
        """The first address of an array with elements, and the one after its last byte."""
        reach = [stride * (length - 1) for stride, length in zip(self._byte_strides, self.shape, strict=True)]
        end = self.address + sum(max(each, 0) for each in reach) + self.dtype.nbytes
        return self.address + sum(min(each, 0) for each in reach), end

    def reaches_into(self, other: Array) -> bool:
        """Whether the extents of two arrays overlap."""
        (begin, end), (other_begin, other_end) = self.extent, other.extent
        return bool(self.count and other.count) and begin < other_end and other_begin < end

    @property
    def _byte_strides(self) -> tuple[int, ...]:
        if self.library is Torch:
            return tuple(stride * self.dtype.nbytes for stride in self.strides)
        return tuple(self.data.strides)

    def shares_elements(self, other: Array) -> bool:
        """Whether two arrays whose extents overlap have an element in common, as interleaved columns do not."""
        if self.contiguous and other.contiguous:
            return True
        import numpy as np

        try:
            return bool(np.shares_memory(self._outline(), other._outline(), max_work=_MOST_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:  # treated as separate
            return False

    def _outline(self) -> Any:
        """Returns a NumPy array over the same addresses, which must not be read."""
        import numpy as np

        interface = {
            "shape": tuple(self.shape),
            "typestr": f"|V{self.dtype.nbytes}",
            "data": (self.address, True),
            "strides": self._byte_strides,
            "version": 3,
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


# ---- the libraries -----------------------------------------------------------------------------------------------


class Numpy:
    """Reads NumPy arrays."""

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
        array.device = CPU

    @staticmethod
    def empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        import numpy as np

        return np.empty(shape, dtype or like.dtype)

    @staticmethod
    def assign(target: Any, values: Any) -> None:
        target[...] = values

    @staticmethod
    def note_write(data: Any) -> None:
        """Tells the library that a call writes to ``data``, if the library tracks writes."""

    @staticmethod
    def stream(data: Any) -> int:
        """Returns the address of the stream on which the library currently works on ``data``; 0: the default stream,
        or none."""
        return 0

    @staticmethod
    def on(stream: int, data: Any) -> AbstractContextManager[Any]:
        """Inside the block, the library works on ``data`` on ``stream``."""
        return nullcontext()

    @staticmethod
    def follow(stream: int, data: Any) -> None:
        """Makes the library's later work on ``data`` wait for the work that is now on ``stream``."""

    @staticmethod
    def keep(data: Any, stream: int) -> None:
        """Prevents reuse of the memory of ``data`` until the work that is now on ``stream`` has run."""


class Torch(Numpy):
    """Reads torch tensors."""

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
        array.device = torch_device(data)

    @staticmethod
    def empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype) if dtype else None)

    @staticmethod
    def assign(target: Any, values: Any) -> None:
        if isinstance(values, (int, float)):
            target.fill_(values)
        else:
            target.copy_(values)

    @staticmethod
    def note_write(data: Any) -> None:
        # As torch's own in-place operations: a backward pass that needs the old values then raises an error.
        sys.modules["torch"]._C._increment_version((data,))

    @staticmethod
    def stream(data: Any) -> int:
        if not data.is_cuda:
            return 0
        stream = _C.work_stream(data, data.device.index)
        return sys.modules["torch"].cuda.current_stream(data.device).cuda_stream if stream is None else stream

    @staticmethod
    def on(stream: int, data: Any) -> AbstractContextManager[Any]:
        return sys.modules["torch"].cuda.stream(_torch_stream(stream, data)) if data.is_cuda else nullcontext()

    @staticmethod
    def follow(stream: int, data: Any) -> None:
        if data.is_cuda and stream == _PER_THREAD:
            sys.modules["torch"].cuda.synchronize(data.device)  # torch has no name for that stream
        elif data.is_cuda and stream != Torch.stream(data):
            sys.modules["torch"].cuda.current_stream(data.device).wait_stream(_torch_stream(stream, data))

    @staticmethod
    def keep(data: Any, stream: int) -> None:
        if data.is_cuda:
            data.record_stream(_torch_stream(stream, data))


class Cupy(Numpy):
    """Reads CuPy arrays."""

    @staticmethod
    def fill(array: Array) -> None:
        data = array.data
        array.dtype = numpy_dtype(data.dtype)
        array.shape = tuple(data.shape)
        array.strides = tuple(stride // max(data.itemsize, 1) for stride in data.strides)
        array.count = data.size
        array.contiguous = bool(data.flags.c_contiguous)
        array.address = data.data.ptr
        array.writable = True
        array.device = Device("cuda", data.device.id)

    @staticmethod
    def empty(shape: tuple[int, ...], like: Any, dtype: str | None = None) -> Any:
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype or like.dtype)

    @staticmethod
    def assign(target: Any, values: Any) -> None:
        with target.device:
            target[...] = values

    @staticmethod
    def stream(data: Any) -> int:
        with data.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)

    @staticmethod
    def on(stream: int, data: Any) -> AbstractContextManager[Any]:
        inside = ExitStack()
        inside.enter_context(data.device)
        inside.enter_context(sys.modules["cupy"].cuda.ExternalStream(stream, data.device.id))
        return inside

    @staticmethod
    def follow(stream: int, data: Any) -> None:
        cuda = sys.modules["cupy"].cuda
        with data.device:
            now = cuda.get_current_stream()
            if stream != now.ptr:
                now.wait_event(cuda.ExternalStream(stream, data.device.id).record())


Library = type[Numpy]
_LEGACY, _PER_THREAD = 1, 2  # CUDA's handles of the two default streams; in all programs here 0 means the first


def _torch_stream(stream: int, data: Any) -> Any:
    return sys.modules["torch"].cuda.ExternalStream(0 if stream == _LEGACY else stream, device=data.device)


def torch_device(data: Any) -> Device:
    """Returns the device of a torch tensor."""
    return CPU if data.is_cpu else Device(data.device.type, data.device.index or 0)


def torch_with_cuda() -> Any:
    """Returns torch if it is installed and sees a device; else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


# ---- streams -----------------------------------------------------------------------------------------------------


def stream_number(stream: Any, call: str, rank: int) -> int:
    """Returns the address of a stream: a number, a stream of torch or CuPy, or an object with ``__cuda_stream__``."""
    described = getattr(stream, "__cuda_stream__", None)
    if described is not None:
        return int((described() if callable(described) else described)[1])
    for attribute in ("cuda_stream", "ptr"):
        stream = getattr(stream, attribute, stream)
    address = as_int(stream)
    if address is None or address < 0:
        raise InvalidArgumentError(
            f"{call}: rank {rank} got stream={shown(stream)}, expected a stream of torch or CuPy, one with "
            "__cuda_stream__, or its address; pass one of these, or none"
        )
    return address


def usual_stream(device: Device) -> int:
    """Returns the stream for a call without an array: torch's current stream on the device, else CuPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_stream(device.index).cuda_stream)
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    with cupy.cuda.Device(device.index):
        return int(cupy.cuda.get_current_stream().ptr)


# ---- memory of the communicator ----------------------------------------------------------------------------------


def library_of(dtype: Any) -> str:
    """Returns the library to which a dtype belongs; torch for names and None."""
    kind = dtype if isinstance(dtype, type) else type(dtype)
    return "numpy" if kind.__module__.partition(".")[0] == "numpy" else "torch"


def dtype_in(library: str, dtype: Any, rank: int = 0) -> Any:
    """Converts ``dtype`` (a torch or NumPy dtype, a name, or None for float32) to a dtype of ``library``."""
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.") if _is_torch(dtype) else dtype
    found: Any = None
    if library != "torch":
        found = _numpy_dtype(name)
    elif _is_torch(dtype):
        found = dtype
    else:
        import torch

        named = name if isinstance(name, str) else getattr(_numpy_dtype(name), "name", "")
        found = getattr(torch, named, None)
        found = found if isinstance(found, torch.dtype) else None
    if found is None or getattr(found, "hasobject", False):
        raise DtypeError(
            f"empty: rank {rank} expected a dtype of {library}, got {shown(dtype)}; pass a name such as 'float32'"
        )
    return found


def _is_torch(dtype: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def _numpy_dtype(dtype: Any) -> Any:
    """Returns the NumPy dtype for a name, a type or a dtype; None for anything else."""
    import numpy as np

    if not isinstance(dtype, (str, type, np.dtype)):
        return None
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        return None


def wrap_memory(memory: Any, library: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array of ``library`` over a ctypes buffer, which it keeps alive."""
    if library == "numpy":
        import numpy as np

        return np.frombuffer(memory, dtype).reshape(shape)
    import torch

    return torch.frombuffer(memory, dtype=dtype).view(shape)


def wrap_nothing(library: str, dtype: Any, shape: tuple[int, ...], device: Device) -> Any:
    """Returns an array without elements."""
    if library == "numpy":
        import numpy as np

        return np.empty(shape, dtype)
    if library == "cupy":
        import cupy

        with cupy.cuda.Device(device.index):
            return cupy.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=dtype, device=str(device))


class DeviceMemory:
    """Memory on a device, with the interface that other libraries read."""

    def __init__(self, address: int, nbytes: int, device: Device) -> None:
        self.device = device
        self.nbytes = nbytes
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


def device_library() -> str:
    """Returns the library for new arrays on a device: torch if it has CUDA, else CuPy."""
    if torch_with_cuda() is not None:
        return "torch"
    try:
        import cupy  # noqa: F401
    except ImportError:
        raise DeviceError(
            "empty: expected a torch that sees CUDA devices, or CuPy, got neither; install one of them, or pass arrays "
            "of your own library"
        ) from None
    return "cupy"


def wrap_device_memory(memory: DeviceMemory, library: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array of ``library`` over device memory, which it keeps alive."""
    if library == "torch":
        import torch

        return torch.as_tensor(memory, device=str(memory.device)).view(dtype).view(shape)
    import cupy

    owned = cupy.cuda.UnownedMemory(memory.address, memory.nbytes, memory, memory.device.index)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owned, 0))


_pool_allocators: dict[int, Any] = {}  # by number; torch keeps the address of one as long as a pool of it has memory


def check_mem_pool(rank: int) -> None:
    """Raises UnsupportedError where torch cannot make memory pools on devices."""
    try:
        import torch
    except ImportError:
        got = "no torch"
    else:
        if torch.version.cuda is not None:
            return
        got = f"torch {torch.__version__}"
    raise UnsupportedError(
        f"mem_pool: rank {rank} expected a torch built for CUDA, got {got}; install one, or make arrays with "
        "comm.empty()"
    )


def mem_pool(number: int) -> Any:
    """Returns a torch.cuda.MemPool over one of our open pools, which is closed when the MemPool is deleted."""
    import torch

    try:
        allocator = _pool_allocators.get(number)
        if allocator is None:
            names = (f"ringcomm_pool_{verb}_{number}" for verb in ("allocate", "free"))
            allocator = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, *names)
            _pool_allocators[number] = allocator
        pool = torch.cuda.MemPool(allocator.allocator())
    except BaseException:
        _C.close_pool(number)
        raise
    weakref.finalize(pool, _C.close_pool, number).atexit = False
    return pool


def settle(library: str, device: Device) -> None:
    """Waits until a device has finished all enqueued work, so that memory can be freed."""
    if library == "torch":
        import torch

        torch.cuda.synchronize(device.index)
        return
    import cupy

    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.deviceSynchronize()
