"""Which device a communicator serves: how it is named, which engine serves it, and how many there are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ringcomm import _C
from ringcomm.errors import DeviceError, InvalidArgumentError, shown

EMULATED = _C.build_info()["cuda"] == "emulated"
"""A build for tests, whose cuda devices are threads of this process: their memory is the host's, so arrays on the cpu
count as arrays on any of them, and a call without a stream is waited for."""


@dataclass(frozen=True)
class Device:
    """A place of memory, named as torch names it."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "meta") else f"{self.kind}:{self.index}"

    def serves(self, other: Device) -> bool:
        """Whether an engine on this device can use memory of the other."""
        return self == other or (EMULATED and self.kind == "cuda" and other.kind == "cpu")


CPU = Device("cpu")


def choose(engine: str | None, device: Any, call: str, place: int = 0) -> tuple[str, Device]:
    """
    Which engine on which device ``engine=`` and ``device=`` ask for. Neither: the cpu; never one for the other.

    Args:
        device: None, "cpu", "cuda", "cuda:1", 1, a torch.device, or a CuPy device.
        place: the rank on this machine; takes the devices in turns where no index is given.
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
    if kind != "cuda" or _C.why_no_cuda():  # the engine says why
        return engine, Device(kind, index or 0)
    present = count()
    if index is None:
        index = place % max(1, present)
    elif index >= present > 0:
        raise DeviceError(
            f"{call}: got device={shown(device)}, expected one of cuda:0 to cuda:{present - 1}; pass that"
        )
    return engine, Device(kind, index)


def parse(device: Any, call: str) -> tuple[str | None, int | None]:
    """(kind, index) of a device as torch, CuPy or people write it; None for what is not said."""
    if device is None:
        return None, None
    if isinstance(device, int) or hasattr(device, "id"):  # an ordinal, and CuPy's device
        device = f"cuda:{int(getattr(device, 'id', device))}"
    if hasattr(device, "type") and hasattr(device, "index"):  # torch's
        device = device.type if device.index is None else f"{device.type}:{device.index}"
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index not in ("", "0")):
        raise InvalidArgumentError(
            f"{call}: got device={shown(device)}, expected 'cpu', 'cuda' or 'cuda:INDEX'; pass one of these"
        )
    return kind, int(index) if index else None


def count() -> int:
    """Devices that CUDA shows this process; 0 without a driver."""
    if EMULATED:
        return int(os.environ.get("RINGCOMM_EMULATED_DEVICES", "1"))
    from ringcomm.arrays.driver import Driver

    driver = Driver.load()
    return 0 if isinstance(driver, str) else driver.device_count()


def local_rank(rank: int) -> int:
    """This rank's number on its machine: torchrun's, else the rank."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else rank
