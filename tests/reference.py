"""What a reduction must give, bit for bit: the balanced tree over ranks, written once more in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ARITHMETIC = ("sum", "avg", "prod", "min", "max", "premul_sum")
BITWISE = ("band", "bor", "bxor")

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BOOL_COMBINE = {**COMBINE, "sum": torch.logical_or, "prod": torch.logical_and}
BOOL_COMBINE |= {"min": torch.logical_and, "max": torch.logical_or}


def ops_of(dtype: str) -> tuple[str, ...]:
    """Which reduce ops an element type has."""
    if dtype in FLOATS:
        return ARITHMETIC
    if dtype == "bool":
        return ("sum", "prod", "min", "max", *BITWISE)
    return (*(op for op in ARITHMETIC if op != "premul_sum"), *BITWISE)


def factor_of(rank: int) -> float:
    """This rank's factor for premul_sum."""
    return 0.3 + 0.5 * rank


def values(dtype: str, rank: int, count: int) -> torch.Tensor:
    """Values of one rank that keep every sum and product of a few ranks finite; integers wrap."""
    generator = torch.Generator().manual_seed(7919 * rank + len(dtype))
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype in INTEGERS:
        info = torch.iinfo(getattr(torch, dtype))
        low, high = max(info.min, -(2**40)), min(info.max, 2**40)
        return torch.randint(low, high + 1, (count,), generator=generator).to(getattr(torch, dtype))
    return (torch.rand(count, generator=generator) * 3 - 1.5).to(getattr(torch, dtype))


def accumulator(dtype: str) -> torch.dtype:
    """The type that values of ``dtype`` are added up in."""
    narrow = dtype in FLOATS and dtype not in ("float32", "float64")
    return torch.float32 if narrow else getattr(torch, dtype)


def tree(leaves: Sequence[torch.Tensor], combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Combines in canonical order: split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return combine(tree(leaves[:left], combine), tree(leaves[left:], combine))


def reduced(ranks: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The result of a reduction in canonical order, rounded once."""
    name = str(ranks[0].dtype).removeprefix("torch.")
    acc = accumulator(name)
    leaves = [values.to(acc) for values in ranks]
    if op == "premul_sum":
        leaves = [leaf * torch.tensor(factor_of(r), dtype=acc) for r, leaf in enumerate(leaves)]
    combine = (BOOL_COMBINE if name == "bool" else COMBINE)["sum" if op in ("avg", "premul_sum") else op]
    total = tree(leaves, combine)
    if op == "avg" and acc.is_floating_point:
        total = total / len(ranks)
    elif op == "avg":
        total = torch.div(total, len(ranks), rounding_mode="trunc")
    if name == "float8_e4m3fn":  # it has no infinity: what is too large becomes its largest value
        total = total.clamp(-448, 448)
    return total.to(ranks[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    nbytes = a.element_size()
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[nbytes]
    equal = a.contiguous().view(raw) == b.contiguous().view(raw)
    if bool(equal.all()):
        return True
    if not a.dtype.is_floating_point:
        return False
    wide_a, wide_b = (a.double(), b.double()) if nbytes == 8 else (a.float(), b.float())
    return bool((equal | (wide_a.isnan() & wide_b.isnan())).all())
