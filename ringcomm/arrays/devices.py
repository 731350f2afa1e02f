"""Names devices, chooses the engine and device that serve a communicator, and counts devices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ringcomm import _C
from ringcomm.errors import DeviceError, InvalidArgumentError, shown
from ringcomm.validation import as_int

EMULATED = _C.build_info()["cuda"] == "emulated"
"""True in a test build whose cuda devices are threads of this process. Their memory is host memory, so arrays on the
cpu are accepted on any of them, and the host waits for calls without a stream."""


@dataclass(frozen=True)
class Device:
    """A memory location, named as torch names devices."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "meta") else f"{self.kind}:{self.index}"

    def serves(self, other: Device) -> bool:
        """Whether an engine on this device can use memory of the other device."""
        return self is other or self == other or (EMULATED and self.kind == "cuda" and other.kind == "cpu")


CPU = Device("cpu")


def choose(engine: str | None, device: Any, call: str, place: int = 0) -> tuple[str, Device]:
    """
    Returns the engine and device for ``engine=`` and ``device=``. If neither is given it is the cpu; the function never
    falls back from one to the other.

    Args:
        device: None, "cpu", "cuda", "cuda:1", 1, a torch.device, or a CuPy device.
        place: the rank on this machine; if no index is given, it selects the device, round robin.
    Returns: (engine, device).
    Raises:  InvalidArgumentError: the two contradict each other. DeviceError: no such device.
    """
    kind, index = parse(device, call)
    if not isinstance(engine, str | None):
        raise InvalidArgumentError(f"{call}: got engine={shown(engine)}, expected 'cpu' or 'cuda'; pass one, or none")
    kind = kind or ("cuda" if engine == "cuda" else "cpu")
    engine = engine or kind
    if engine in ("cpu", "cuda") and engine != kind:
        raise InvalidArgumentError(
            f"{call}: got engine={shown(engine)} with device={shown(device)}, expected both to name the same; leave "
            "one out"
        )
    if kind != "cuda" or _C.why_no_cuda():  # the engine reports the reason
        return engine, CPU if kind == "cpu" else Device(kind, index or 0)
    present = count()
    if index is None:
        index = place % max(1, present)
    elif index >= present > 0:
        raise DeviceError(
            f"{call}: got device={shown(device)}, expected one of cuda:0 to cuda:{present - 1}; pass that"
        )
    return engine, Device(kind, index)


def parse(device: Any, call: str) -> tuple[str | None, int | None]:
    """Returns (kind, index) of a device given in torch's or CuPy's form, as a string or as a number; None for a
    missing part."""
    if device is None:
        return None, None
    ordinal = as_int(getattr(device, "id", device))  # also of CuPy's device
    if ordinal is not None:
        device = f"cuda:{ordinal}"
    if hasattr(device, "type") and hasattr(device, "index"):  # torch's
        device = device.type if device.index is None else f"{device.type}:{device.index}"
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index not in ("", "0")):
        raise InvalidArgumentError(
            f"{call}: got device={shown(device)}, expected 'cpu', 'cuda' or 'cuda:INDEX'; pass one of these"
        )
    return kind, int(index) if index else None


def count() -> int:
    """Returns the number of devices that CUDA shows this process; 0 without a driver."""
    if EMULATED:
        return int(os.environ.get("RINGCOMM_EMULATED_DEVICES", "1"))
    from ringcomm.arrays import driver

    return 0 if driver.why_none() else driver.device_count()


def local_rank(rank: int) -> int:
    """Returns this rank's index on its machine: torchrun's LOCAL_RANK, else the rank."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else rank
