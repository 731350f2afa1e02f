"""Every error of this package. A message is one sentence: call, rank, expected, got, what to do."""

from __future__ import annotations


class RingcommError(RuntimeError):
    """Root of all errors of this package."""


class InvalidArgumentError(RingcommError, ValueError):
    """The caller's arguments are wrong. Nothing was sent; the communicator stays usable."""


class ShapeError(InvalidArgumentError):
    """An array has the wrong shape, size or strides."""


class DtypeError(InvalidArgumentError):
    """An element type does not exist here, differs between arrays, or does not have the reduction."""


class DeviceError(InvalidArgumentError):
    """An array lies on a device that this communicator does not serve."""


class ClosedError(RingcommError):
    """The communicator was closed."""


class UnsupportedError(RingcommError, NotImplementedError):
    """This build, engine or machine does not have the feature."""


class CollectiveTimeoutError(RingcommError, TimeoutError):
    """A peer did not come in time. The communicator is aborted; create a new one."""


class AbortedError(RingcommError):
    """A rank gave up. The communicator is aborted; create a new one."""


class MismatchError(RingcommError):
    """The ranks called different things. The communicator is aborted; create a new one."""


class EngineError(RingcommError):
    """The operating system refused something that the engine needs."""


class RankFailedError(RingcommError):
    """A rank of `run_ranks` ended without a result."""
