"""
The norm of all gradients. Its bits depend on the gradients alone: not on their order, the split into buckets, fragments
and shards, or the world size. Clipping therefore gives the same bits at every stage.

    1. top = the largest magnitude of all ranks: exact in any order.
    2. An element becomes v = |x / scale|^p in float64, at most 1; `scale` comes from `top`, so v from x and top alone.
    3. v = a / 2^45 + b / 2^91 + rest, with integers a and b found by rounding (v + M) - M; the rest, at most 2^-92, is
       dropped. As many as 256 such integers add up exactly in a float64, and those sums exactly in int64.
    4. Integers of all ranks are added: exact in any order. Their sum and its root become float64, corrected by their
       rounding errors: the nearest float64, except for values within 2^-50 of the middle between two.

The error of the sum is at most 2^-90 of itself per element, plus the error of rounding v: none for p = 1, none for p =
2 except in float64, where it is 2^-53. Splitting summands before adding them is the reproducible summation of Demmel
and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringcomm import _C
from ringcomm.arrays.devices import EMULATED
from ringcomm.errors import DtypeError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator

FOLD_BITS = (45, 91)
"""An element's two integers count units of 2^-45 and 2^-91."""
LIMB_BITS = 30
"""A sum of integers is sent as high * 2^30 + low."""
MOST_ELEMENTS = 1 << 40
"""With more elements than this, the dropped rests could reach 2^-50 of the sum."""
_RUN = 256  # integers of at most 2^45 whose sum is exact in a float64
_CHUNK = {"cpu": 1 << 16}  # elements at a time, so that temporaries stay in cache; on other devices:
_DEVICE_CHUNK = 1 << 22
_WIRE = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}
_MAGNITUDE = (1 << 63) - 1  # masks the sign of a float64; the remaining bits order like the numbers, with NaN on top
_SMALLEST = -200.0  # a power of two that every fold treats as zero
_LARGEST = 3000.0  # a power of two that stays infinite even times the smallest float64


def total_norm(
    tensors: Sequence[torch.Tensor],
    norm_type: float,
    comm: Communicator | None,
    count: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """
    Returns the p-norm of all ranks' elements, (sum of |x|^p)^(1/p), with the same bits however they are distributed.

    Args:
        tensors: this rank's fragments, disjoint from those of other ranks; none on a rank that holds nothing.
        norm_type: p > 0; inf: the largest magnitude; 0: how many elements are not zero.
        comm: the ranks; None: this process alone.
        count: number of elements of all ranks together, the same on all ranks; it is only checked and does not affect
            the bits.
        dtype: type of the result. None: float64 if any rank has a fragment of float64 or complex128, else float32;
            finding out waits for the device.
        device: of the result and of the messages, the same kind on all ranks. None: that of ``comm``, or the CPU if it
            serves several; without ``comm`` that of the first tensor.
    Shapes:  any; returns one number, shape ().
    Dtypes:  float32, float64, float16, bfloat16, complex64, complex128; they may be mixed. A complex number counts with
             its magnitude.
    Order:   none: sums are exact.
    Cost:    two passes over the elements, two all_reduces of at most 32 bytes (p = 0 and inf: one of each).
    Returns: the norm, on every rank. NaN if an element is NaN; else inf if an element is infinite or the norm exceeds
             the type's largest number. For p = 0, NaN and infinity count as nonzero elements.
    Raises:  InvalidArgumentError: an invalid norm_type, or a count below this rank's number of elements. DtypeError:
             elements of another type. UnsupportedError: more than 2^40 elements.
    """
    p, rank = float(norm_type), 0 if comm is None else comm.rank
    _check(tensors, p, count, rank)
    place = device or _place(tensors, comm)
    parts = [x.detach().reshape(-1) for x in tensors if x.numel()]
    wide = any(x.dtype in (torch.float64, torch.complex128) for x in parts)
    if p == 0:
        present = sum(
            (torch.count_nonzero(x).to(place) for x in parts), torch.zeros((), dtype=torch.int64, device=place)
        )
        found = _reduce(torch.stack([present, torch.full_like(present, wide)]), "sum", comm)
        return found[0].to(dtype or _result(found[1]))
    parts = [_real(x, p) if x.is_complex() else x for x in parts]
    head = torch.full((2,), int(wide), dtype=torch.int64, device=place)
    head[0] = _largest(parts, place).view(torch.int64) & _MAGNITUDE
    head = _reduce(head, "max", comm)
    top, dtype = head[:1].view(torch.float64)[0], dtype or _result(head[1])
    if p == math.inf:
        return top.to(dtype)
    limbs = _reduce(_fold(parts, p, top), "sum", comm)
    if _native(limbs):  # in Python's numbers, since the 100 operations cost 10 times as much on one-element tensors
        largest = float(top)
        valid = math.isfinite(largest) and largest > 0
        norm = _root(limbs.tolist(), p, largest) if valid else largest
        return torch.as_tensor(norm, dtype=torch.float64, device=limbs.device).to(dtype)
    return torch.where(top.isfinite() & (top > 0), _root(limbs.unbind(), p, top), top).to(dtype)


def _check(tensors: Sequence[torch.Tensor], p: float, count: int, rank: int) -> None:
    if not p >= 0:
        raise InvalidArgumentError(
            f"total_norm: rank {rank} got norm_type={p}, expected 0, a positive number or inf; pass one of these"
        )
    for x in tensors:
        if x.dtype not in (*_WIRE, *_COMPLEX) or x.layout != torch.strided:
            raise DtypeError(
                f"total_norm: rank {rank} got a tensor of {x.dtype} with layout {x.layout}, expected a dense one of "
                f"{', '.join((*_WIRE.values(), *_COMPLEX.values()))}; convert it first"
            )
    own = sum(x.numel() for x in tensors)
    if own > count:
        raise InvalidArgumentError(
            f"total_norm: rank {rank} got count={count} and {own} elements of its own, expected the count of all "
            "ranks' elements together; pass that"
        )
    if count > MOST_ELEMENTS:
        raise UnsupportedError(
            f"total_norm: rank {rank} got count={count}, expected at most {MOST_ELEMENTS}; combine the norms of parts"
        )


def _place(tensors: Sequence[torch.Tensor], comm: Communicator | None) -> torch.device:
    """Returns the device on which the ranks' few numbers are combined."""
    if comm is not None:
        served = comm.device.split(",")  # several over a process group; a rank without tensors must choose the same
        return torch.device("cpu" if EMULATED or "cpu" in served else served[0])
    return tensors[0].device if len(tensors) else torch.device("cpu")


def _result(wide: torch.Tensor) -> torch.dtype:
    return torch.float64 if bool(wide) else torch.float32


def _real(x: torch.Tensor, p: float) -> torch.Tensor:
    """Returns real numbers that have the p-norm of complex ones of shape (n,): for p = 2 the real and imaginary parts,
    else the magnitudes in float64."""
    pairs = torch.view_as_real(x.resolve_conj())
    if p == 2:
        return pairs.reshape(-1)
    pairs = pairs.double().abs()
    top = pairs.amax(1)
    down, up = (_halves(sign * torch.frexp(top).exponent.long()) for sign in (-1, 1))
    first, second = (pairs * down[0][:, None] * down[1][:, None]).unbind(1)
    return torch.where(top.isfinite() & (top > 0), _sqrt(first * first + second * second) * up[0] * up[1], top)


def _reduce(x: torch.Tensor, op: str, comm: Communicator | None) -> torch.Tensor:
    if comm is not None:
        comm.all_reduce(x, op)
    return x


def _native(x: torch.Tensor) -> bool:
    return x.is_cpu and x.is_contiguous()


def _spans(parts: Iterable[torch.Tensor]) -> dict[int, list[tuple[int, int]]]:
    """Returns the addresses and lengths of contiguous tensors on the CPU, by the number of their type."""
    found: dict[int, list[tuple[int, int]]] = {}
    for x in parts:
        found.setdefault(_C.DTYPES[_WIRE[x.dtype]], []).append((x.data_ptr(), x.numel()))
    return found


# ---- the largest magnitude -------------------------------------------------------------------------------------------


def _largest(parts: Sequence[torch.Tensor], place: torch.device) -> torch.Tensor:
    """Returns this rank's largest magnitude, float64, shape (); NaN if there is one."""
    each: list[Any] = [0.0, *(_C.abs_max(spans, dtype) for dtype, spans in _spans(filter(_native, parts)).items())]
    each += [torch.linalg.vector_norm(x, math.inf) for x in parts if not _native(x)]
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=place) for x in each]).amax()


# ---- the elements' contributions to the sum --------------------------------------------------------------------------


def _fold(parts: Sequence[torch.Tensor], p: float, top: torch.Tensor) -> torch.Tensor:
    """Returns this rank's four limbs, int64: high and low of the first integers, high and low of the second."""
    native = [x for x in parts if p == 2 and _native(x)]
    limbs = fold_native(native, float(top) if native else 0.0).to(top.device)
    for x in parts:
        if p != 2 or not _native(x):
            limbs += fold_torch(x, p, top.to(x.device)).to(top.device)
    return limbs


def fold_native(parts: Sequence[torch.Tensor], top: float) -> torch.Tensor:
    """Returns the limbs of contiguous tensors on the CPU, p = 2. If top is inf or NaN it decides the norm alone, and
    the limbs are zeros."""
    limbs = torch.zeros(4, dtype=torch.int64, device="cpu")
    if math.isfinite(top):
        for dtype, spans in _spans(parts).items():
            limbs += torch.tensor(_C.fold_sums(spans, dtype, math.frexp(top)[1]), dtype=torch.int64, device="cpu")
    return limbs


def fold_torch(x: torch.Tensor, p: float, top: torch.Tensor) -> torch.Tensor:
    """Returns the limbs of a tensor of shape (n,) on any device, for any p > 0. They represent the same numbers as
    `fold_native`'s, though the limbs of one number may differ. Does not wait for a device."""
    limbs = torch.zeros(4, dtype=torch.int64, device=x.device)
    for chunk in x.split(_CHUNK.get(x.device.type, _DEVICE_CHUNK)):
        rest = torch.zeros(-(-chunk.numel() // _RUN) * _RUN, dtype=torch.float64, device=x.device)
        rest[: chunk.numel()] = _powers(chunk.double(), p, top)
        for fold, bits in enumerate(FOLD_BITS):
            rounder = 1.5 * 2.0 ** (52 - bits)
            rounded = (rest + rounder).sub_(rounder)
            rest -= rounded
            whole = (rounded.view(_RUN, -1).sum(0) * 2.0**bits).to(torch.int64)
            limbs[2 * fold] += (whole >> LIMB_BITS).sum()
            limbs[2 * fold + 1] += (whole & ((1 << LIMB_BITS) - 1)).sum()
    return limbs


def _powers(x: torch.Tensor, p: float, top: torch.Tensor) -> torch.Tensor:
    """Returns |x / scale|^p in float64, at most 1. The scale is the power of two above top if p is 1 or 2, else top."""
    if p not in (1.0, 2.0):
        ratio = x.abs() / top
        return torch.where(ratio > 0, _exp2((_log2(ratio) * p).clamp(_SMALLEST, 0.0)), 0.0)
    first, second = _halves(-torch.frexp(top).exponent.long())
    x = x * first * second
    return x.abs() if p == 1 else x * x


def _root(limbs: Sequence[Any], p: float, top: Any) -> Any:
    """Returns (sum of all)^(1/p) * scale, float64, from the limbs of all ranks.

    Args:
        limbs: four int64 tensors of shape (), or four of Python's int; the bits are the same.
        top: the largest magnitude, positive and finite: a float64 tensor of shape (), or a float.
    """
    total = error = top * 0.0
    for fold, bits in reversed(list(enumerate(FOLD_BITS))):
        high, low = limbs[2 * fold], limbs[2 * fold + 1]
        # Normalise: each number has exactly one pair of limbs.
        high, low = high + (low >> LIMB_BITS), low & ((1 << LIMB_BITS) - 1)
        for limb, exponent in ((low, -bits), (high & 0xFFFF, LIMB_BITS - bits), (high >> 16 << 16, LIMB_BITS - bits)):
            part = (float(limb) if isinstance(limb, int) else limb.double()) * 2.0**exponent
            before, total = total, total + part
            kept = total - before
            error = error + ((before - (total - kept)) + (part - kept))  # the rounding error of the sum
    total = total + error
    if p not in (1.0, 2.0):
        if isinstance(total, float):
            total = torch.tensor(total, dtype=torch.float64, device="cpu")
        third = _exp2((_log2(total) * (1 / (3 * p))).clamp(0.0, _LARGEST / 3))
        return third * top * third * third  # in this order, since third^3 may be out of range
    first, second = _halves(math.frexp(top)[1] if isinstance(top, float) else torch.frexp(top).exponent.long())
    return (_sqrt(total) if p == 2 else total) * first * second


# ---- elementary functions ------------------------------------------------------------------------------------------
# They use only correctly rounded operations, so that an element gives the same bits everywhere. Libraries' versions
# differ between processors, and between the vectorised part of a tensor and its last elements.


def _power_of_two(exponent: Any) -> Any:
    """Returns 2^e for e between -1022 and 1023, an int64 tensor or an int."""
    return math.ldexp(1.0, exponent) if isinstance(exponent, int) else ((exponent + 1023) << 52).view(torch.float64)


def _halves(exponent: Any) -> tuple[Any, Any]:
    """Returns two factors of 2^e, because 2^e itself may be out of range."""
    half = exponent >> 1
    return _power_of_two(half), _power_of_two(exponent - half)


def _sqrt(x: Any) -> Any:
    """Returns the square root of a float64 that is at least 1/4: a library's root, whose last bit may be wrong,
    corrected by a step of Newton's method."""
    root = math.sqrt(x) if isinstance(x, float) else x.sqrt()
    head = root * 134217729.0  # times 2^27 + 1: splits a number into two halves as Dekker does
    head = head - (head - root)
    tail, square = root - head, root * root
    lost = ((head * head - square) + 2 * head * tail) + tail * tail
    return root + ((x - square) - lost) / (2 * root)


def _log2(x: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of positive float64: exponent + log(m), by the series of artanh of z = (m-1) / (m+1)."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    z = (mantissa - 1) / (mantissa + 1)  # at most 0.172
    square, series = z * z, torch.full_like(z, 1 / 21)
    for k in range(19, 0, -2):
        series = series * square + 1 / k
    return series * z * (2 / math.log(2)) + (exponent.double() - small.double())


def _exp2(y: torch.Tensor) -> torch.Tensor:
    """Returns 2^y for float64 y between -1000 and 1000: the power series for the fraction, times a power of two."""
    whole = torch.floor(y + 0.5)
    fraction = (y - whole) * math.log(2)  # at most 0.347
    series = torch.full_like(y, 1 / math.factorial(13))
    for k in range(12, -1, -1):
        series = series * fraction + 1 / math.factorial(k)
    return series * _power_of_two(whole.long())
