"""
Checks results to the bit.

`#wrong` follows nccl-tests: the inputs are small integers whose reduction is exact in every order, so the result is
compared bit by bit (an average of floats: to 2 ulp). Such inputs cannot detect the order of summation, so a second
check compares sums of random floats with the canonical tree over the ranks.

An input repeats a table of PERIOD numbers. PERIOD is a prime, so no chunk, slot or page is a multiple of it, and data
that arrives in the wrong place differs. The expected result of a whole message is then also a table.
"""

from __future__ import annotations

import torch

from ringcomm.tools.bench.cases import Case

PERIOD = 65521
_EXACT = {  # integers up to this are exact
    torch.float64: 1 << 40, torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8,
    torch.float8_e4m3fn: 16, torch.float8_e5m2: 8, torch.int64: 1 << 40, torch.int32: 1 << 30, torch.int16: 1 << 14,
    torch.int8: 127, torch.uint8: 255,
}  # fmt: skip
_COMBINE = {
    "sum": torch.add, "avg": torch.add, "premul_sum": torch.add, "prod": torch.mul, "min": torch.minimum,
    "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _random(rank: int, seed: int, low: int, high: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
    return torch.randint(low, high + 1, (PERIOD,), generator=generator)


def _summands(case: Case, rank: int, seed: int, contributors: int) -> torch.Tensor:
    """Returns integers whose sum over at most `contributors` ranks is exact in the dtype."""
    most = _EXACT[case.dtype] // max(1, contributors)
    contributes = rank < contributors if most else rank < _EXACT[case.dtype]
    most = min(max(1, most), 1000)
    return _random(rank, seed, -most if case.dtype.is_signed else 0, most) * int(contributes)


def integers(case: Case, rank: int, seed: int) -> torch.Tensor:
    """Returns rank `rank`'s table of integers; the case's reduction of them is exact in any order."""
    world_size, op = case.world_size, case.op
    if op == "sum":
        return _summands(case, rank, seed, world_size)
    if op == "premul_sum":  # the factors are 1 and 2
        return _summands(case, rank, seed, 2 * world_size) * int(rank < world_size)
    if op == "avg" and case.dtype.is_floating_point:
        return _summands(case, rank, seed, 2)
    if op == "avg":  # multiples of the world size, so that no rounding rule matters
        most = min(_EXACT[case.dtype] // (2 * world_size), 1000)
        return _random(rank, seed, 0, most) * world_size * int(rank < 2)
    if op == "prod":
        kind = _random(rank, seed, 0, 2)
        return torch.where(
            kind == 0, 2 if rank < 6 else 1, torch.where(kind == 1, -1 if case.dtype.is_signed else 1, 1)
        )
    most = min(_EXACT[case.dtype], 1 << 20)
    return _random(rank, seed, -most if case.dtype.is_signed else 0, most)


def floats(case: Case, rank: int, seed: int) -> torch.Tensor:
    """Returns rank `rank`'s table of random floats, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(7_000_003 * seed + rank)
    spread = 2 if case.dtype.itemsize == 1 else 6
    scale = torch.randint(-spread, spread + 1, (PERIOD,), generator=generator)
    return torch.ldexp(torch.randn(PERIOD, generator=generator, dtype=torch.float64), scale).to(case.dtype)


def reduced_integers(case: Case, seed: int) -> torch.Tensor:
    """Returns the table that reducing every rank's integers gives, in the dtype."""
    tables = [integers(case, rank, seed) for rank in range(case.world_size)]
    if case.op == "premul_sum":
        tables = [table * (1 + rank % 2) for rank, table in enumerate(tables)]
    combine = _COMBINE[case.op]
    total = tables[0]
    for table in tables[1:]:
        total = combine(total, table)
    if case.op == "avg":
        return (
            (total.double() / case.world_size).to(case.dtype)
            if case.dtype.is_floating_point
            else (total // case.world_size).to(case.dtype)
        )
    return total.to(case.dtype)


def tree_sum(tables: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum over a balanced binary tree of the ranks, split at the largest power of two below their
    number."""
    if len(tables) == 1:
        return tables[0]
    half = 1 << (len(tables) - 1).bit_length() - 1
    return tree_sum(tables[:half]) + tree_sum(tables[half:])


def canonical_sum(case: Case, seed: int) -> torch.Tensor:
    """Returns the table of the canonical order's sums: 16-bit and 8-bit floats are added in float32 and rounded
    once."""
    tables = [floats(case, rank, seed) for rank in range(case.world_size)]
    wide = torch.float32 if case.dtype.itemsize < 4 else case.dtype
    return tree_sum([table.to(wide) for table in tables]).to(case.dtype)


def fill(x: torch.Tensor, table: torch.Tensor) -> None:
    """Sets x[i] = table[i % PERIOD]."""
    table = table.to(x.dtype)
    for start in range(0, len(x), PERIOD):
        x[start : start + PERIOD] = table[: len(x) - start]


def _ulps(x: torch.Tensor) -> torch.Tensor:
    """Returns floats as integers in the same order."""
    bits = x.view(_BITS[x.dtype.itemsize])
    bits = bits.to(torch.int8).long() if x.dtype.itemsize == 1 else bits.long()
    lowest = -(1 << 8 * x.dtype.itemsize - 1) if x.dtype.itemsize < 8 else torch.iinfo(torch.int64).min
    return torch.where(bits < 0, lowest - bits, bits)


def count_wrong(y: torch.Tensor, table: torch.Tensor, first: int = 0, ulps: int = 0) -> int:
    """Counts the elements of y that differ from table[(first + i) % PERIOD] in a bit, or by more than `ulps`."""
    expected, wrong, y = torch.roll(table, -(first % PERIOD)), 0, y.cpu()
    bits = _BITS[y.dtype.itemsize]
    for start in range(0, len(y), PERIOD):
        got = y[start : start + PERIOD]
        want = expected[: len(got)]
        if ulps:
            wrong += int((_ulps(got) - _ulps(want)).abs().gt(ulps).sum())
        elif not torch.equal(got.view(bits), want.view(bits)):
            wrong += int((got.view(bits) != want.view(bits)).sum())
    return wrong


def prepare(case: Case, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor) -> None:
    """Fills the result with invalid values, then writes this rank's input (which may be a part of it)."""
    y.view(torch.uint8).fill_(0x5A)
    if case.has_input:
        fill(x, table)


def wrong_elements(case: Case, y: torch.Tensor, seed: int) -> int:
    """Returns #wrong on this rank, after the collective ran on `integers(case, rank, seed)`."""
    name, count = case.collective.name, case.count
    if not case.has_output:
        return 0
    if case.collective.reduces:
        ulps = 2 if case.op == "avg" and case.dtype.is_floating_point else 0
        first = case.rank * count if name == "reduce_scatter" else 0
        return count_wrong(y, reduced_integers(case, seed), first, ulps)

    def sent(rank: int) -> torch.Tensor:
        return integers(case, rank, seed).to(case.dtype)

    if name in ("all_gather", "gather", "alltoall"):
        first = case.rank * count if name == "alltoall" else 0
        return sum(count_wrong(y[r * count : (r + 1) * count], sent(r), first) for r in range(case.world_size))
    if name == "scatter":
        return count_wrong(y, sent(case.root), case.rank * count)
    return count_wrong(y, sent((case.rank - 1) % case.world_size if name == "sendrecv" else case.root))
