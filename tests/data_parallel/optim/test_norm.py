"""The norm of all gradients: the same bits for every order, cut and world size, and the right ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm import _C
from ringcomm.arrays.devices import EMULATED
from ringcomm.data_parallel.optim import norm
from ringcomm.data_parallel.optim.norm import fold_native, fold_torch, total_norm
from ringcomm.errors import DtypeError, InvalidArgumentError, UnsupportedError
from tests.support import torch_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
Cut = list[list[torch.Tensor]]  # the fragments of every rank


def values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Of magnitudes far apart, so that a rounding in any sum shows."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 13, (count,), generator=random)
    return (torch.randn(count, generator=random, dtype=torch.float64) * 2.0**spread).to(dtype)


def cut(x: torch.Tensor, world_size: int, seed: int) -> Cut:
    """In random order, in fragments of random lengths, some empty; from three ranks on the last has none."""
    random = torch.Generator().manual_seed(seed)
    x = x[torch.randperm(x.numel(), generator=random)]
    borders = torch.randint(0, x.numel() + 1, (4 * world_size,), generator=random).sort().values.tolist()
    ranks: Cut = [[] for _ in range(world_size)]
    for start, stop in zip([0, *borders], [*borders, x.numel()], strict=True):
        owner = int(torch.randint(0, min(world_size, max(2, world_size - 1)), (), generator=random))
        ranks[owner].append(x[start:stop].clone())
    return ranks


def everywhere(ranks: Cut, p: float, **options: Any) -> list[torch.Tensor]:
    """What every rank gets; one rank without a communicator."""
    count = sum(x.numel() for fragments in ranks for x in fragments)
    if len(ranks) == 1:
        return [total_norm(ranks[0], p, None, count, **options)]
    return ringcomm.run_ranks(
        lambda comm: total_norm(ranks[comm.rank], p, comm, count, **options), len(ranks), ranks="threads", timeout=30
    )


def bits(x: torch.Tensor) -> int:
    return int(x.view(torch.int64 if x.dtype == torch.float64 else torch.int32))


def alone(x: torch.Tensor, p: float = 2.0, dtype: torch.dtype | None = torch.float64) -> float:
    return float(total_norm([x], p, None, x.numel(), dtype=dtype))


def exact(x: torch.Tensor) -> float:
    """The 2-norm, rounded about once: fractions add up without an error."""
    total = sum(Fraction(each) ** 2 for each in x.double().tolist())
    if total == 0:
        return 0.0
    shift = 2 * ((total.denominator.bit_length() - total.numerator.bit_length()) // 2 + 100)
    scaled = total * Fraction(2) ** shift
    return float(Fraction(math.isqrt(scaled.numerator // scaled.denominator)) / Fraction(2) ** (shift // 2))


def sums_of(limbs: Sequence[int] | torch.Tensor) -> tuple[int, int]:
    """The two integers that four limbs stand for."""
    a, b, c, d = (int(each) for each in limbs)
    return (a << norm.LIMB_BITS) + b, (c << norm.LIMB_BITS) + d


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [2.0, 1.0, 2.5, math.inf, 0.0])
def test_bits_do_not_depend_on_order_cuts_and_ranks(dtype: torch.dtype, world_size: int, p: float) -> None:
    x = values(20_011, dtype)
    expected = {bits(total_norm([x], p, None, x.numel(), dtype=torch.float64))}
    for seed in range(4 if world_size == 1 else 2):
        got = everywhere(cut(x, world_size, seed), p, dtype=torch.float64)
        assert {bits(each) for each in got} == expected, f"seed {seed}"


def test_plain_sums_would_not_pass() -> None:
    """The data of the test above is hard enough: adding in another order changes a float64 sum."""
    x = values(20_011).double()
    sums = {float(sum(part.square().sum() for part in cut(x, 1, seed)[0])) for seed in range(8)}
    assert len(sums) > 1


def test_dtypes_and_forms_mix() -> None:
    """A rank may hold float32 natively, another bfloat16, another a fragment with gaps."""
    wide, narrow = values(3000), values(2000, torch.bfloat16, seed=1)
    gaps = torch.stack([wide, wide + 1], dim=1)[:, 0]
    assert not gaps.is_contiguous()
    expected = bits(total_norm([torch.cat([wide, narrow.float()])], 2, None, 5000))
    for ranks in ([[wide, narrow]], [[narrow], [], [gaps]], [[gaps[100:]], [narrow, gaps[:100]], []]):
        assert {bits(each) for each in everywhere(ranks, 2.0)} == {expected}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_two_forms_find_the_same_integers(dtype: torch.dtype) -> None:
    whole = values(70_000, dtype)
    for offset, count in [(0, 0), (0, 1), (1, 31), (3, 32), (5, 33), (1, 8191), (0, 8192), (7, 8193), (1, 65_537)]:
        x = whole[offset : offset + count]
        top = x.abs().double().amax() if count else torch.zeros((), dtype=torch.float64)
        assert norm._largest([x] if count else [], torch.device("cpu")) == top
        assert sums_of(fold_native([x], float(top))) == sums_of(fold_torch(x, 2.0, top)), (offset, count)


@pytest.mark.parametrize("chunk", [256, 1000, 1 << 14])
def test_the_integers_do_not_depend_on_the_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(30_000)
    top = x.abs().amax().double()
    expected = [sums_of(fold_torch(x, p, top)) for p in (1.0, 2.0, 3.0)]
    monkeypatch.setitem(norm._CHUNK, "cpu", chunk)
    assert [sums_of(fold_torch(x, p, top)) for p in (1.0, 2.0, 3.0)] == expected


@pytest.mark.parametrize("kind", ["spread", "equal", "tiny"])
def test_the_integers_against_exact_arithmetic(kind: str) -> None:
    """Equal ones have the largest sums that a run can have."""
    x = {
        "spread": values(20_000),
        "equal": 1 - values(20_000).abs().clamp(1, 4096) / 2**16,
        "tiny": torch.cat([torch.ones(1), 2.0**-25 * (1 + values(5000).abs() / 2**18)]),
    }[kind]
    top = x.abs().amax().double()
    unit = Fraction(2) ** math.frexp(float(top))[1]
    first = second = 0
    for each in x.tolist():
        square = (Fraction(each) / unit) ** 2
        a = round(square * 2**45)  # to even, where it lies between two
        first, second = first + a, second + round((square - Fraction(a, 2**45)) * 2**91)
    assert sums_of(fold_native([x], float(top))) == (first, second)
    assert sums_of(fold_torch(x, 2.0, top)) == (first, second)


def test_powers_have_the_same_bits_on_every_machine() -> None:
    """Found once, and the same ever since: nothing here is left to a library of elementary functions."""
    x = (torch.arange(1, 5001) * 40503 % 65536).double() / 4096
    found = {p: sums_of(fold_torch(x, p, x.amax())) for p in (0.5, 2.5, 7.0)}
    assert found == {
        0.5: (117261031432039854, -1444517760729088),
        2.5: (50237328898083291, 1059725292133632),
        7.0: (21964361843308478, 2067873249255371),
    }


def test_the_root_depends_on_the_number_not_on_its_limbs() -> None:
    random = np.random.default_rng(0)
    top = torch.tensor(0.75, dtype=torch.float64)
    for high, low, carry in random.integers(1, 1 << 30, (200, 3)).tolist():
        one = torch.tensor([(1 << 54) + high, low, 5, -low])
        other = torch.tensor([(1 << 54) + high - carry, low + (carry << 30), 5 - carry, -low + (carry << 30)])
        assert bits(norm._root(one, 2.0, top)) == bits(norm._root(other, 2.0, top))


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0])
def test_the_root_of_numbers_has_the_bits_of_the_root_of_tensors(p: float) -> None:
    random = np.random.default_rng(1)
    for *limbs, exponent in random.integers(1 << 20, 1 << 50, (100, 5)).tolist():
        top = math.ldexp(0.7, exponent % 2000 - 1000)
        one = norm._root(torch.tensor(limbs), p, torch.tensor(top, dtype=torch.float64))
        assert bits(one) == bits(torch.as_tensor(norm._root(limbs, p, top), dtype=torch.float64))


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, math.inf])
def test_the_default_device_does_not_matter(p: float) -> None:
    expected = norm.total_norm([values(100)], p, None, 100)
    x = values(100)
    with torch.device("meta"):
        found = norm.total_norm([x], p, None, 100)
    assert found.device == expected.device
    assert bits(found.double()) == bits(expected.double())


def _over_a_process_group(fragments: Cut, count: int, broken: float) -> list[int]:
    comm = ringcomm.Communicator.from_process_group()
    mine = fragments[comm.rank]
    found = [bits(total_norm(mine, p, comm, count)) for p in (1.0, 2.0, 3.0, math.inf)]
    hurt = [torch.tensor([broken])] if comm.rank == 1 else mine
    return [*found, bits(total_norm(hurt, 2.0, comm, count))]


@pytest.mark.parametrize("backend", ["gloo", "ringcomm"])
@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_the_same_bits_over_process_groups(backend: str, broken: float) -> None:
    """Also over one whose own maximum loses a NaN."""
    x = values(5000)
    got = torch_ranks.run(_over_a_process_group, cut(x, 3, 0), 5000, broken, world_size=3, backend=backend)
    expected = [bits(total_norm([x], p, None, 5000)) for p in (1.0, 2.0, 3.0, math.inf)]
    assert [each[:4] for each in got] == [expected] * 3
    last = {each[4] for each in got}
    assert len(last) == 1
    value = torch.tensor(last.pop(), dtype=torch.int32).view(torch.float32)
    assert float(value) == pytest.approx(abs(broken), nan_ok=True)


PROGRAM = """
import array, json
from ringcomm import _C
found = []
for name, code in (("float32", "f"), ("float64", "d"), ("float16", "H"), ("bfloat16", "H")):
    raw = [(i * 2654435761) % 31744 for i in range(9001)]  # 16-bit floats that are finite and not negative
    if code != "H":
        raw = [(-1) ** i * (each + 1 / 3) ** 3 / 2**40 for i, each in enumerate(raw)]
    data = array.array(code, raw)
    spans, dtype = [(data.buffer_info()[0], len(data))], _C.DTYPES[name]
    top = _C.abs_max(spans, dtype)
    exponent = __import__("math").frexp(top)[1]
    high1, low1, high2, low2 = _C.fold_sums(spans, dtype, exponent)
    found.append([top, (high1 << 30) + low1, (high2 << 30) + low2])
print(json.dumps(found))
"""


def test_every_instruction_set_finds_the_same_integers() -> None:
    isas = [isa for isa in _C.build_info()["instruction_sets"].split() if runs_here(isa)]
    found = {isa: run_on(isa) for isa in isas}
    assert "baseline" in found
    assert len({json.dumps(each) for each in found.values()}) == 1, found
    assert all(first > 0 for _, first, _ in found["baseline"])


def runs_here(isa: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    needs = {"avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
    return needs.get(isa, set()) <= set(flags)


def run_on(isa: str) -> Any:
    environment = {**os.environ, "RINGCOMM_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same_bits(dtype: torch.dtype, p: float) -> None:
    x = values(100_003, dtype)
    there = total_norm([x.cuda()], p, None, x.numel(), dtype=torch.float64)
    assert there.is_cuda
    assert bits(there.cpu()) == bits(total_norm([x], p, None, x.numel(), dtype=torch.float64))


# ---- the right bits --------------------------------------------------------------------------------------------------

one_and_tiny = torch.full((1_000_001,), 2.0**-28)
one_and_tiny[500_000] = 1  # whose square leaves nothing of the others' squares, taken one by one
huge_and_tiny = torch.full((1000,), 1e-20)
huge_and_tiny[0] = 1e20
HOSTILE = {
    "spread": values(20_000),
    "spread64": values(5000, torch.float64),
    "wide": 10.0 ** torch.linspace(-20, 20, 4001),
    "wide64": 10.0 ** torch.linspace(-300, 300, 601, dtype=torch.float64),
    "huge and tiny": huge_and_tiny,
    "subnormal": torch.arange(1, 400) * 2.0**-149,
    "subnormal16": torch.arange(1, 400).to(torch.float16) * 2.0**-24,
    "subnormal64": torch.arange(1, 400, dtype=torch.float64) * 5e-324,
    "squares overflow": torch.full((100,), 1e30),
    "squares underflow": torch.full((100,), 1e-30),
    "squares overflow64": torch.tensor([3e307, 4e307], dtype=torch.float64),
    "largest16": torch.full((5,), 65504.0, dtype=torch.float16),
    "zeros": torch.zeros(1000),
    "negative zero": torch.tensor([-0.0]),
    "one": torch.tensor([-3.0]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_against_exact_sums(name: str) -> None:
    x = HOSTILE[name]
    expected = exact(x)
    for form in ("native", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            if form == "torch":
                patch.setattr(norm, "_native", lambda _: False)
            assert alone(x) == pytest.approx(expected, rel=1e-15, abs=0), form
            if x.dtype != torch.float64:
                assert alone(x, dtype=None) == pytest.approx(expected, rel=2**-24 + 1e-12, abs=2.0**-150), form


@pytest.mark.parametrize("p", [1, 2])
def test_every_root_and_sum_is_the_nearest_number(p: int) -> None:
    """Libraries' square roots of float64 are off in the last bit now and then, and sums of limbs round twice."""
    generator = torch.Generator().manual_seed(3)
    for n in range(1, 800):
        x = torch.randn(n % 60 + 1, dtype=torch.float64, generator=generator) * n
        values = [abs(v) for v in x.tolist()]
        expected = math.fsum(values) if p == 1 else math.sqrt(math.fsum(v * v for v in values))
        assert float(norm.total_norm([x], p, None, x.numel())) == expected


def test_a_million_tiny_ones_beside_one_that_hides_them() -> None:
    expected = math.sqrt(math.fsum((one_and_tiny.double() ** 2).tolist()))
    assert expected > 1 + 1e-12
    assert alone(one_and_tiny) == pytest.approx(expected, rel=1e-15, abs=0)
    parts = [[one_and_tiny[:400_000]], [one_and_tiny[400_000:]], []]
    assert {float(each) for each in everywhere(parts, 2.0, dtype=torch.float64)} == {alone(one_and_tiny)}


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 10.0, 100.0, 5000.0, math.inf])
def test_every_norm_against_logarithms_of_long_doubles(p: float) -> None:
    x = values(2000, torch.float64)
    x[:7] = 0
    wide = np.abs(x.numpy()).astype(np.longdouble)
    if p in (0, math.inf):
        expected = float(np.count_nonzero(wide) if p == 0 else wide.max())
    else:
        expected = float(wide.max() * np.sum((wide / wide.max()) ** np.longdouble(p)) ** (1 / np.longdouble(p)))
    assert alone(x, p) == pytest.approx(expected, rel=1e-13, abs=0)


def test_elementary_functions_against_long_doubles() -> None:
    x = torch.cat([2.0 ** torch.linspace(-1000, 0, 5001, dtype=torch.float64), 1 - 2.0 ** -torch.arange(2.0, 54)])
    assert x.dtype == torch.float64
    expected = np.log2(x.numpy().astype(np.longdouble))
    error = np.abs(norm._log2(x).numpy() - expected)
    assert (error <= 1e-15 * np.abs(expected)).all(), error.max()
    y = torch.linspace(-200, 200, 10_001, dtype=torch.float64)
    error = np.abs(norm._exp2(y).numpy() / 2 ** y.numpy().astype(np.longdouble) - 1)
    assert error.max() < 1e-15
    assert norm._exp2(torch.arange(-200.0, 0, dtype=torch.float64)).tolist() == [2.0**k for k in range(-200, 0)]


def test_small_powers_of_large_sums_overflow_only_where_they_must() -> None:
    x = torch.full((1 << 14,), 2.0**-149)
    assert alone(x, 1 / 64) == pytest.approx(2.0 ** (14 * 64 - 149), rel=1e-12)
    assert alone(torch.full((1 << 14,), 5e-324, dtype=torch.float64), 1 / 128) == pytest.approx(
        2.0 ** (14 * 128 - 1074)
    )
    assert alone(torch.ones(1 << 14), 1 / 128) == math.inf


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_and_infinity_propagate_as_in_torch(dtype: torch.dtype, p: float, sign: float) -> None:
    x = values(3000, dtype)
    infinite, unknown, both = x.clone(), x.clone(), x.clone()
    infinite[1234] = both[5] = sign * math.inf
    unknown[77] = both[2999] = math.copysign(math.nan, sign)
    for each, expected in ((infinite, math.inf), (unknown, math.nan), (both, math.nan)):
        reference = torch.nn.utils.get_total_norm([each.double()], p)
        assert alone(each, p) == pytest.approx(expected, nan_ok=True) == pytest.approx(float(reference), nan_ok=True)
        got = everywhere([[each[:1000]], [], [each[1000:2000], each[2000:]]], p)
        assert len({bits(one) for one in got}) == 1
        assert float(got[0]) == pytest.approx(expected, nan_ok=True)


def test_a_nan_with_a_sign_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    negative = torch.tensor(-0x8000000000000, dtype=torch.int64).view(torch.float64)
    assert negative.isnan()
    monkeypatch.setattr(norm, "_largest", lambda parts, _: negative if parts else torch.ones((), dtype=torch.float64))
    for p in (2.0, math.inf):
        assert all(bool(each.isnan()) for each in everywhere([[], [torch.ones(2)], []], p))


def test_no_integers_of_what_is_not_finite() -> None:
    x = torch.tensor([1.0, math.inf])
    assert fold_native(x, math.inf).tolist() == fold_native(x, math.nan).tolist() == [0] * 4


def test_past_the_largest_number_is_infinity() -> None:
    x = torch.full((10,), 3e38)
    assert alone(x, dtype=None) == math.inf
    assert alone(x) == pytest.approx(exact(x), rel=1e-15)
    assert alone(torch.full((4,), 1.7e308, dtype=torch.float64)) == math.inf


# ---- results, costs, errors ------------------------------------------------------------------------------------------


def test_the_dtype_of_the_result_is_the_same_on_all_ranks() -> None:
    x = values(100)
    for p in (0.0, 1.0, 2.0, math.inf):
        wide = everywhere([[x], [x.double()], []], p)
        narrow = everywhere([[x], [x.bfloat16()], []], p)
        asked = everywhere([[x], [x.double()], []], p, dtype=torch.float32)
        assert [each.dtype for each in (*wide, *narrow, *asked)] == [torch.float64] * 3 + [torch.float32] * 6
        assert all(each.shape == () for each in (*wide, *narrow, *asked))


def test_no_elements_on_any_rank() -> None:
    assert [float(each) for each in everywhere([[], [], []], 2.0)] == [0.0] * 3
    assert float(total_norm([], 2.0, None, 0)) == 0.0


@pytest.mark.parametrize(("p", "most"), [(0.0, 1), (1.0, 2), (2.0, 2), (3.0, 2), (math.inf, 1)])
def test_two_small_collectives(p: float, most: int) -> None:
    x = values(300)

    def rank(comm: ringcomm.Communicator) -> list[int]:
        sent: list[int] = []
        plain = comm.all_reduce

        def counted(x: torch.Tensor, op: str) -> Any:
            sent.append(x.nbytes)
            return plain(x, op)

        comm.all_reduce = counted  # type: ignore[assignment, method-assign]
        total_norm([x] if comm.rank else [], p, comm, 600)
        return sent

    for sent in ringcomm.run_ranks(rank, 3, ranks="threads", timeout=30):
        assert len(sent) == most
        assert max(sent) <= 32


@pytest.mark.parametrize(
    ("serves", "expected"), [("cpu", "cpu"), ("cpu,cuda", "cpu"), ("cuda", "cuda"), ("cuda:1", "cuda:1")]
)
def test_the_device_of_messages_does_not_depend_on_a_ranks_tensors(serves: str, expected: str) -> None:
    comm: Any = SimpleNamespace(device=serves)
    there = torch.device("cpu" if EMULATED else expected)
    assert norm._place([], comm) == norm._place([torch.ones(1)], comm) == norm._place([META], comm) == there
    assert norm._place([META], None) == META.device


META = torch.ones(1, device="meta")


class Refuse(TorchDispatchMode):
    """What a host would have to wait for a device for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 2.5, math.inf])
def test_the_form_for_devices_does_not_wait_for_them(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(5000)
    expected = total_norm([x], p, None, 5000, dtype=torch.float32)
    monkeypatch.setattr(norm, "_native", lambda _: False)
    with Refuse():
        got = total_norm([x], p, None, 5000, dtype=torch.float32)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            total_norm([x], p, None, 5000)  # must look at the dtype that the ranks agreed on
    assert bits(got) == bits(expected)


def test_gradients_are_left_alone() -> None:
    x = values(100).requires_grad_()
    before = x.detach().clone()
    assert not total_norm([x], 2, None, 100).requires_grad
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            ([torch.ones(3)], -1.0, None, 3),
            InvalidArgumentError,
            "norm_type=-1.0, expected 0, a positive number or inf",
        ),
        (([torch.ones(3)], math.nan, None, 3), InvalidArgumentError, "norm_type=nan"),
        (([torch.ones(3), torch.ones(4)], 2.0, None, 6), InvalidArgumentError, "count=6 and 7 elements of its own"),
        (([torch.ones(3)], 2.0, None, (1 << 40) + 1), UnsupportedError, "expected at most 1099511627776"),
        (([torch.ones(3, dtype=torch.int64)], 2.0, None, 3), DtypeError, "got a tensor of torch.int64"),
        (([torch.ones(3).to_sparse()], 2.0, None, 3), DtypeError, "torch.sparse_coo, expected a dense one"),
    ],
)
def test_errors_name_what_is_wrong(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match="total_norm: rank 0 got") as caught:
        total_norm(*arguments)
    assert words in str(caught.value)


def test_native_refuses_other_types() -> None:
    for call in (lambda: _C.abs_max([], _C.DTYPES["int32"]), lambda: _C.fold_sums([], _C.DTYPES["bool"], 0)):
        with pytest.raises(InvalidArgumentError, match="expected float32, float64, float16 or bfloat16"):
            call()


def test_parts_of_several_types_are_one_norm() -> None:
    parts = [torch.randn(n, dtype=torch.float64) for n in (1, 70, 513)]
    parts = [x.to(dtype) for x in parts for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    together = total_norm(parts, 2.0, None, sum(x.numel() for x in parts))
    wide = torch.cat([x.double() for x in parts])
    assert torch.equal(together, total_norm([wide], 2.0, None, wide.numel()))
    assert torch.allclose(together, wide.norm(), rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("p", [2.0, 1.0, 2.5, math.inf, 0.0])
def test_complex_numbers_count_with_their_magnitude(dtype: torch.dtype, p: float) -> None:
    x = torch.complex(values(3000, torch.float64, 1), values(3000, torch.float64, 2)).to(dtype)
    x[:9], x[9] = 0, 1j
    expected = total_norm([x.conj()], p, None, x.numel(), dtype=torch.float64)
    assert float(expected) == pytest.approx(float(torch.linalg.vector_norm(x.to(torch.complex128), p)), rel=1e-14)
    got = everywhere(cut(x, 3, 0), p, dtype=torch.float64)
    assert {bits(each) for each in got} == {bits(expected)}
    narrow = torch.float32 if dtype == torch.complex64 else torch.float64
    assert total_norm([x, torch.ones(1)], p, None, x.numel() + 1).dtype == narrow


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_complex_numbers_near_the_ends_of_the_range(p: float) -> None:
    largest, least = 2.0**1022, 2.0**-1073
    for unit in (largest, least):
        x = complex(0.6 * unit, -0.8 * unit) if unit == largest else complex(0, unit)
        assert alone(torch.tensor([x], dtype=torch.complex128), p) == pytest.approx(unit, rel=1e-15, abs=0)
    assert alone(torch.tensor([1j, complex(0, -math.inf)]), p) == math.inf
    assert math.isnan(alone(torch.tensor([1j, complex(0, math.nan)]), p))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_complex_parameters_follows_torch(stage: int) -> None:
    def model() -> torch.nn.ParameterList:
        random = torch.Generator().manual_seed(0)
        wide = torch.randn(40, 3, generator=random, dtype=torch.complex128)
        return torch.nn.ParameterList([wide, torch.randn(7, generator=random)])

    def loss(parameters: torch.nn.ParameterList) -> torch.Tensor:
        first, second = parameters
        return first.abs().pow(3).sum() + second.double().pow(2).sum()

    def rank(comm: ringcomm.Communicator) -> tuple[torch.Tensor, list[torch.Tensor]]:
        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parameters_of_loss = model()

            def forward(self) -> torch.Tensor:
                return loss(self.parameters_of_loss)

        whole = Loss()
        ringcomm.shard(whole, torch.optim.SGD(whole.parameters(), lr=0.1), stage=stage, comm=comm)
        whole().backward()
        norm_before = ringcomm.clip_grad_norm_(whole, 0.5)
        return norm_before, [p.grad.clone() for p in whole.parameters() if p.grad is not None]

    plain = model()
    loss(plain).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    for norm_before, grads in ringcomm.run_ranks(rank, 3, timeout=30):
        assert norm_before.dtype == torch.float64
        assert float(norm_before) == pytest.approx(float(expected), rel=1e-6)
        for p, grad in zip(plain, grads, strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=0)
