"""Wrong values for arguments, by what they cannot be: tables of functions that make them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Make = Callable[[], Any]


def _lying(**members: Any) -> Make:
    return lambda: type("Lying", (), members)()


def _fails(*_: Any, **__: Any) -> Any:
    raise KeyError("an error of the object's own")


def _read_only() -> np.ndarray:
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    return x


def _masked() -> Any:
    return np.ma.masked_array(np.ones(4, np.float32), [True, False, False, False])


def _without_memory() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def _released() -> memoryview:
    x = memoryview(bytearray(16))
    x.release()
    return x


def _cuda(described: Any) -> Make:
    return _lying(__cuda_array_interface__=described)


PLAIN: dict[str, Make] = {  # neither arrays, nor lists, nor anything that an option may be
    "nan": lambda: math.nan,
    "infinite": lambda: math.inf,
    "text with NUL": lambda: "su\0m",
    "half a character": lambda: "\udcff",
    "long text": lambda: "x" * 100_000,
    "dict": dict,
    "object": object,
    "type": lambda: complex,
    "before now": lambda: datetime.timedelta(-1),
    "longest time": lambda: datetime.timedelta.max,
    "fails at everything": _lying(
        **dict.fromkeys(
            ("__len__", "__iter__", "__getitem__", "__index__", "__int__", "__float__", "__repr__", "__bool__"), _fails
        )
    ),
    "huge": lambda: 1 << 200,
    "too long to print": lambda: 1 << 100_000,
    "hugely negative": lambda: -(1 << 70),
}
NO_ARRAYS: dict[str, Make] = {
    "None": lambda: None,
    "number": lambda: 3,
    "list": lambda: [1.0, 2.0],
    "meta": lambda: torch.ones(4, device="meta"),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "without memory": _without_memory,
    "released": _released,
    "objects": lambda: np.array([{}, {}]),
    "masked": _masked,
    "__dlpack__ fails": _lying(__dlpack__=_fails, __dlpack_device__=lambda self: (1, 0)),
    "__dlpack_device__ fails": _lying(__dlpack__=_fails, __dlpack_device__=_fails),
    "__dlpack__ gives a number": _lying(__dlpack__=lambda self, **_: 3, __dlpack_device__=lambda self: (1, 0)),
    "__dlpack_device__ gives nothing": _lying(__dlpack__=_fails, __dlpack_device__=lambda self: None),
    "DLPack device without end": _lying(__dlpack__=_fails, __dlpack_device__=lambda self: (1 << 70, -1)),
    "CUDA interface fails": _cuda(property(_fails)),
    "CUDA interface is a number": _cuda(3),
    "CUDA interface of 2^62 floats": _cuda({"shape": (1 << 62,), "typestr": "<f4", "data": (16, False), "version": 3}),
    "array interface to nowhere": _lying(__array_interface__={"shape": (4,), "typestr": "<f4", "data": (16, False)}),
}
NO_SUMS: dict[str, Make] = {  # arrays that cannot be added up
    "dates": lambda: np.zeros(4, "M8[s]"),
    "records": lambda: np.zeros(4, [("a", "i4")]),
    "letters": lambda: np.array(["a", "b", "c", "d"]),
    "other byte order": lambda: np.ones(4, ">f4"),
    "void": lambda: np.zeros(4, "V3"),
}
NOT_TO_WRITE: dict[str, Make] = {
    "read-only": _read_only,
    "bytes": lambda: b"bytes",
    "expanded": lambda: torch.ones(1).expand(4),
    "overlapping": lambda: torch.ones(8).as_strided((4, 4), (1, 1)),
}
MISFITS: dict[str, Make] = {  # arrays that fit no call below
    "other type": lambda: torch.ones(4, dtype=torch.float64),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "other shape": lambda: torch.ones(5, 3, 1),
}
ARRAYS: dict[str, Make] = {"array": lambda: np.ones(4, np.float32), "tensor": lambda: torch.ones(3)}
NO_OPTIONS = {**PLAIN, **ARRAYS, **NO_ARRAYS}
del NO_OPTIONS["None"], NO_OPTIONS["number"], NO_OPTIONS["list"]
NO_NUMBERS = {**NO_OPTIONS, "half": lambda: 0.5, "text": lambda: "1", "True": lambda: True, "list": list}
NO_LISTS = {**NO_OPTIONS, "text": lambda: "", "None": lambda: None}
