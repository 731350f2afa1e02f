"""What a reduction must give, bit for bit: the balanced tree over ranks, and the ring's order, once more in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ARITHMETIC = ("sum", "avg", "prod", "min", "max", "premul_sum")
BITWISE = ("band", "bor", "bxor")
ROUNDING = ("sum", "avg", "prod", "premul_sum")
"""Operators whose step rounds floats, so that `algorithm="ring"` gives other bits than the canonical order."""

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def minimum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The smaller; NaN wins. Of two zeros the second, where torch's own choice depends on an element's place."""
    return torch.where((a < b) | (a != a), a, b)


def maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The larger, as `minimum`."""
    return torch.where((a > b) | (a != a), a, b)


COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": minimum,
    "max": maximum,
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
        return (*(op for op in ARITHMETIC if op not in ("avg", "premul_sum")), *BITWISE)
    if dtype not in INTEGERS:
        return ()
    return (*(op for op in ARITHMETIC if op != "premul_sum"), *BITWISE)


def has_oneshot(engine: str, dtype: str, op: str) -> bool:
    """Whether ``algorithm="oneshot"`` is there for an all_reduce."""
    sums = op in ("sum", "avg") and dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32")
    return engine != "cuda" or sums or (op == "max" and dtype in ("float32", "int64", "int32"))


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


def tree(leaves: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    """Combines in canonical order: split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return combine(tree(leaves[:left], combine), tree(leaves[left:], combine))


def combine_of(dtype: str, op: str) -> Combine:
    """What an operator does to two values: avg and premul_sum are sums with something done to the ends."""
    return (BOOL_COMBINE if dtype == "bool" else COMBINE)["sum" if op in ("avg", "premul_sum") else op]


def divided(total: torch.Tensor, divisor: int) -> torch.Tensor:
    """The end of an average: integers truncate."""
    return total / divisor if total.is_floating_point() else torch.div(total, divisor, rounding_mode="trunc")


def stored(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was added up, rounded once."""
    if dtype == torch.float8_e4m3fn:  # it has no infinity: what is too large becomes its largest value
        total = total.clamp(-448, 448)
    return total.to(dtype)


def leaves_of(ranks: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
    """The ranks' values in the type they are added up in, for premul_sum times the ranks' factors."""
    acc = accumulator(str(ranks[0].dtype).removeprefix("torch."))
    leaves = [values.to(acc) for values in ranks]
    if op != "premul_sum":
        return leaves
    return [leaf * torch.tensor(factor_of(r), dtype=acc) for r, leaf in enumerate(leaves)]


def reduced(ranks: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The result of a reduction in canonical order, rounded once."""
    name = str(ranks[0].dtype).removeprefix("torch.")
    total = tree(leaves_of(ranks, op), combine_of(name, op))
    return stored(divided(total, len(ranks)) if op == "avg" else total, ranks[0].dtype)


def reduced_in_ring_order(ranks: Sequence[torch.Tensor], op: str, chunk: int) -> torch.Tensor:
    """The result for elements of one chunk by the ring: rank order chunk + 1, chunk + 2, ..., chunk, rounded at each
    hop."""
    dtype = ranks[0].dtype
    name = str(dtype).removeprefix("torch.")
    acc, combine, world_size = accumulator(name), combine_of(name, op), len(ranks)
    leaves = leaves_of(ranks, op)
    if op == "premul_sum" and world_size > 1:
        leaves = [stored(leaf, dtype).to(acc) for leaf in leaves]
    total = leaves[(chunk + 1) % world_size]
    for hop in range(2, world_size + 1):
        total = combine(total, leaves[(chunk + hop) % world_size])
        total = stored(total, dtype).to(acc) if hop < world_size else total
    return stored(divided(total, world_size) if op == "avg" else total, dtype)


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


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory with holes."""
    holes = torch.zeros((*x.shape, 2), dtype=x.dtype)
    holes[..., 0] = x
    return holes[..., 0]


def laid_out(x: torch.Tensor, contiguous: bool) -> torch.Tensor:
    """A copy, contiguous or strided."""
    return x.clone() if contiguous else strided(x)
