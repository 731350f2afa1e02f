"""Random numbers by position: published words, the same bits for every fragment, the right distributions."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError
from ringcomm.modules import random
from ringcomm.modules.random import Constant, Normal, Uniform, dropout, init_parameters, normal_, uniform_

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Fill = Callable[[torch.Tensor, int], torch.Tensor]
FILLS: dict[str, Fill] = {
    "uniform": lambda x, start: uniform_(x, 7, "w", start, low=-0.3, high=0.5),
    "normal": lambda x, start: normal_(x, 0.1, 2.0, 7, "w", start),
    "dropout": lambda x, start: x.copy_(dropout(torch.ones_like(x), 0.3, 7, "w", start)),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_CHUNK", 101)  # many of them, that begin anywhere in a block of four words


# ---- words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    counters = tuple(torch.tensor([0, word, 1]) for word in counter)
    found = random.philox(counters, key[0] | key[1] << 32)  # type: ignore[arg-type]
    assert [int(word[1]) for word in found] == expected


def plain_philox(counter: list[int], key: int) -> list[int]:
    """The same in Python's integers."""
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return counter


@pytest.mark.parametrize("start", [0, 3, 2**34 - 6, 2**60 + 1])
def test_words_count_blocks_of_four(start: int) -> None:
    found = random.words(12345678901234567890, start, 11, 2).tolist()
    for i, word in enumerate(found, start):
        block = i // 4
        assert word == plain_philox([block & 0xFFFFFFFF, block >> 32, 2, 0], 12345678901234567890)[i % 4]
    assert random.words(1, start, 0).shape == (0,)


def test_keys_are_stable_and_all_different() -> None:
    assert random.key(0, "layers.0.weight") == 0x3ABBB71682A74A19, "every model would start anew"
    keys = {random.key(s, n, i) for s in (0, 1, -1, 2**70) for n in ("", "a", "1/a", "é") for i in (0, 1, 11)}
    assert len(keys) == 4 * 4 * 3
    with pytest.raises(InvalidArgumentError, match=r"key: got seed=0\.5, expected a whole number; pass that"):
        random.key(0.5, "a")  # type: ignore[arg-type]


def test_generators_of_torch() -> None:
    def draw(name: str, index: int = 0) -> list[int]:
        return torch.randperm(20, generator=random.generator(3, name, index)).tolist()

    assert draw("data") == draw("data")
    assert draw("data") != draw("data", 1)
    assert draw("data") != draw("other")


# ---- fragments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fill", FILLS)
def test_fragments_have_the_bits_of_the_whole(fill: str, dtype: torch.dtype) -> None:
    count, start = 1000, 2**33 - 77
    whole = FILLS[fill](torch.empty(count, dtype=dtype), start)
    assert whole.unique().numel() > (1 if fill == "dropout" else 100)
    for cuts in ([0, count], [0, 1, 2, 5, 300, 301, 1000], [0, 333, 667, 1000], [0, 0, 512, 512, 1000]):
        for begin, end in itertools.pairwise(cuts):
            fragment = FILLS[fill](torch.empty(end - begin, dtype=dtype), start + begin)
            assert torch.equal(fragment, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("fill", FILLS)
def test_values_do_not_depend_on_the_chunk_size(fill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (64, 999, 1 << 17):
        monkeypatch.setattr(random, "_CHUNK", chunk)
        found.append(FILLS[fill](torch.empty(3000), 1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("fill", FILLS)
def test_values_do_not_depend_on_strides(fill: str) -> None:
    plain = FILLS[fill](torch.empty(4, 6, 5, 2), 3)
    last = FILLS[fill](torch.empty(4, 6, 5, 2).to(memory_format=torch.channels_last), 3)
    turned = FILLS[fill](torch.empty(2, 5, 6, 4).permute(3, 2, 1, 0), 3)
    assert not last.is_contiguous()
    assert torch.equal(plain, last)
    assert torch.equal(plain, turned)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty_tensors(fill: str, shape: tuple[int, ...]) -> None:
    assert FILLS[fill](torch.empty(shape), 5).shape == shape


@pytest.mark.parametrize("fill", ["uniform", "normal"])
def test_dtypes_agree(fill: str) -> None:
    found = {dtype: FILLS[fill](torch.empty(500, dtype=dtype), 9) for dtype in FLOATS}
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(found[torch.float32].to(dtype), found[dtype])
    torch.testing.assert_close(found[torch.float64].float(), found[torch.float32], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[torch.float64], found[torch.float32].double()), "float64 has bits of its own"


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"uniform_: got torch\.int64, expected a floating point type"):
        uniform_(torch.zeros(3, dtype=torch.int64), 0, "a")
    with pytest.raises(InvalidArgumentError, match="normal_: got a tensor without memory"):
        normal_(torch.zeros(3, device="meta"), 0, 1, 0, "a")

    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.zeros(1)

    with pytest.raises(InvalidArgumentError, match="uniform_: got a Sharded, expected an ordinary tensor"):
        uniform_(torch.zeros(3).as_subclass(Sharded), 0, "a")
    with pytest.raises(InvalidArgumentError, match="uniform_: got start=-1, expected a whole number from 0 to"):
        uniform_(torch.zeros(3), 0, "a", -1)
    with pytest.raises(InvalidArgumentError, match=r"dropout: got p=1\.5, expected 0 to 1"):
        dropout(torch.zeros(3), 1.5, 0, "a")


# ---- distributions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_moments(dtype: torch.dtype) -> None:
    count = 200_000
    random._CHUNK = 1 << 17
    uniform = uniform_(torch.empty(count, dtype=dtype), 1, "u", low=-1, high=3).double()
    normal = normal_(torch.empty(count, dtype=dtype), 2.0, 3.0, 1, "n").double()
    assert -1 <= uniform.min() < -0.999
    assert 2.999 < uniform.max() <= 3
    for x, mean, std, fourth in ((uniform, 1.0, 4 / math.sqrt(12), 1.8), (normal, 2.0, 3.0, 3.0)):
        assert abs(x.mean() - mean) < 5 * std / math.sqrt(count) + 1e-4
        assert abs(x.std() / std - 1) < 0.01
        assert abs(((x - mean) / std).pow(4).mean() - fourth) < 0.06
    lagged = ((uniform[1:] - 1) * (uniform[:-1] - 1)).mean()
    assert abs(lagged) < 0.02
    edges = torch.linspace(-1, 3, 65, dtype=torch.float64)
    if dtype in (torch.float32, torch.float64):
        bins = torch.histogram(uniform, edges).hist
        assert ((bins - count / 64).square() / (count / 64)).sum() < 130  # chi-square of 63, beyond 1e-6


def word(key: int, i: int, stream: int) -> int:
    return plain_philox([i // 4 & 0xFFFFFFFF, i // 4 >> 32, stream, 0], key)[i % 4]


def test_values_follow_from_the_words() -> None:
    key, start, count = random.key(7, "w"), 2**40 + 2, 40
    high, low, drop = ([word(key, start + i, stream) for i in range(count)] for stream in range(3))
    assert uniform_(torch.empty(count), 7, "w", start).tolist() == [w / 2**8 // 1 / 2**24 for w in high]
    wide = uniform_(torch.empty(count, dtype=torch.float64), 7, "w", start).tolist()
    assert wide == [(a * 2**21 + b // 2**11) / 2**53 for a, b in zip(high, low, strict=True)]
    quantile = NormalDist().inv_cdf
    normal = normal_(torch.empty(count), 0.0, 1.0, 7, "w", start)
    torch.testing.assert_close(normal, torch.tensor([quantile((w + 0.5) / 2**32) for w in high]), rtol=1e-7, atol=0)
    wide = normal_(torch.empty(count, dtype=torch.float64), 0.0, 1.0, 7, "w", start)
    below = [(a * 2**20 + b // 2**12 + 0.5) / 2**52 for a, b in zip(high, low, strict=True)]
    expected = torch.tensor([quantile(p) for p in below], dtype=torch.float64)
    torch.testing.assert_close(wide, expected, rtol=4e-15, atol=0)
    kept = dropout(torch.ones(count), 0.3, 7, "w", start).ne(0).tolist()
    assert kept == [w >= 0.3 * 2**32 for w in drop]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every_bit", [0, 0xFFFFFFFF])
def test_the_smallest_and_the_largest_word(every_bit: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "words", lambda key, start, count, *_, **__: torch.full((count,), every_bit))
    x = uniform_(torch.empty(3, dtype=dtype), 0, "a")
    assert torch.all(x < 1 if every_bit else x == 0)
    x = normal_(torch.empty(3, dtype=dtype), 0.0, 1.0, 0, "a")
    most = NormalDist().inv_cdf(2.0**-33 if dtype == torch.float32 else 2.0**-53)
    torch.testing.assert_close(x, torch.full_like(x, -most if every_bit else most))


def test_the_normal_quantile() -> None:
    below = torch.cat(
        [
            torch.linspace(1e-4, 1 - 1e-4, 2001, dtype=torch.float64),
            2.0 ** -torch.arange(2, 54, dtype=torch.float64),
            1 - 2.0 ** -torch.arange(2, 54, dtype=torch.float64),
        ]
    )
    expected = torch.tensor([NormalDist().inv_cdf(p) for p in below.tolist()], dtype=torch.float64)
    torch.testing.assert_close(random._quantile(below), expected, rtol=4e-15, atol=1e-16)
    x = torch.cat([below, torch.tensor([0.5, 1.0, 0.70710678118654752])])
    torch.testing.assert_close(random._log(x), x.log(), rtol=4e-16, atol=4e-16)


def test_names_seeds_and_positions_are_independent() -> None:
    base = normal_(torch.empty(20_000), 0, 1, 1, "a")
    others = {
        "seed": normal_(torch.empty(20_000), 0, 1, 2, "a"),
        "name": normal_(torch.empty(20_000), 0, 1, 1, "b"),
        "position": normal_(torch.empty(20_000), 0, 1, 1, "a", 20_000),
    }
    for what, other in others.items():
        assert abs((base * other).mean()) < 5 / math.sqrt(20_000), what


# ---- dropout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(p: float) -> None:
    x = torch.full((100_000,), 2.0)
    random._CHUNK = 1 << 17
    y = dropout(x, p, 3, "mlp")
    assert set(y.unique().tolist()) == {0.0, torch.tensor(2.0).mul(1 / (1 - p)).item()}
    assert abs(y.eq(0).float().mean() - p) < 5 * math.sqrt(p * (1 - p) / 100_000)
    assert not torch.equal(y, dropout(x, p, 3, "mlp", index=1))
    assert not torch.equal(y, dropout(x, p, 4, "mlp"))
    assert torch.equal(y, dropout(x, p, 3, "mlp"))


def test_dropout_with_probability_0_and_1() -> None:
    x = torch.tensor([1.0, math.nan, math.inf])
    assert dropout(x, 0.0, 0, "a") is x
    assert dropout(x, 1.0, 0, "a").tolist() == [0, 0, 0]


def test_gradients_through_dropout() -> None:
    x = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return dropout(x, 0.4, 5, "attention", 17)

    y = drop(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient != 0, y != 0)
    assert torch.equal(gradient, drop(torch.ones_like(x)))
    assert 0.2 < gradient.eq(0).double().mean() < 0.6
    small = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(drop, small)
    assert torch.autograd.gradgradcheck(lambda x: drop(x).pow(2), small)


# ---- initial values ----------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, Model.part(name))
        self.output.weight = self.embed.weight

    @staticmethod
    def part(name: str) -> nn.Module:
        return {
            "attention": lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True),
            "convolution": lambda: nn.Conv2d(6, 4, 3, groups=2),
            "embed": lambda: nn.Embedding(9, 12, padding_idx=2),
            "normed": lambda: nn.Sequential(nn.LayerNorm(12), nn.BatchNorm1d(3), nn.RMSNorm(4), nn.PReLU()),
            "output": lambda: nn.Linear(12, 9),
            "recurrent": lambda: nn.LSTM(5, 16),
        }[name]()


NAMES = ["attention", "convolution", "embed", "normed", "output", "recurrent"]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def test_values_do_not_depend_on_the_order_of_construction() -> None:
    found = []
    for order in (NAMES, NAMES[::-1], NAMES[3:] + NAMES[:3]):
        model = Model(order)
        init_parameters(model, 11)
        found.append(values_of(model))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    again = Model(NAMES)
    init_parameters(again, 12)
    assert not torch.equal(again.output.bias, found[0]["output.bias"])


def test_a_submodule_has_the_same_values_alone_and_in_its_model() -> None:
    whole, part = Model(NAMES), Model.part("recurrent")
    init_parameters(whole, 11)
    assert "recurrent.bias_hh_l0" in init_parameters(part, 11, prefix="recurrent.")
    expected = values_of(whole)
    for name, value in values_of(part).items():
        assert torch.equal(value, expected[f"recurrent.{name}"])


def test_fragments_of_parameters() -> None:
    model = Model(NAMES)
    values = init_parameters(model, 11)
    assert "output.weight" not in values, "is embed.weight"
    for name, whole in values_of(model).items():
        if name != "output.weight":
            for begin in (0, whole.numel() // 3, max(0, whole.numel() - 5)):
                fragment = values[name].fill(torch.empty(whole.numel() - begin), 11, name, begin)
                assert torch.equal(fragment, whole.reshape(-1)[begin:]), name


def test_the_usual_distributions_are_those_of_torch() -> None:
    """Each parameter spreads as after torch's own reset_parameters."""
    torch.manual_seed(0)
    kinds = [
        *(nn.Linear(64, 300), nn.Conv1d(16, 90, 5), nn.ConvTranspose2d(12, 30, 3), nn.Bilinear(20, 30, 40)),
        *(nn.Embedding(300, 40, padding_idx=3), nn.EmbeddingBag(300, 40), nn.GRU(30, 50)),
        *(nn.LSTMCell(30, 50), nn.MultiheadAttention(64, 4, kdim=30, vdim=20, add_bias_kv=True), nn.GroupNorm(4, 64)),
        *(nn.MultiheadAttention(64, 4), nn.InstanceNorm2d(64, affine=True), nn.PReLU(7, 0.1), nn.BatchNorm2d(64)),
    ]
    for kind in kinds:
        stock, ours = copy.deepcopy(kind), copy.deepcopy(kind)
        init_parameters(ours, 5)
        for (name, p), q in zip(stock.named_parameters(), ours.parameters(), strict=True):
            what = f"{type(kind).__name__}.{name}"
            if p.numel() > 1 and p.std() == 0:
                assert torch.equal(p, q), what
            else:
                tolerance = 5 / math.sqrt(p.numel())
                assert abs(q.std() / p.std() - 1) < tolerance, what
                assert abs(q.abs().max() / p.abs().max() - 1) < (
                    0.5 if "mbed" in what or "bias_" in what else tolerance
                )
    padded = kinds[4]
    init_parameters(padded, 5)
    assert not padded.weight[3].any()
    assert padded.weight[2].all()
    assert padded.weight[4].all()


def test_a_rule_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    seen = []

    def rule(name: str, p: nn.Parameter, owner: nn.Module) -> random.Values | None:
        seen.append((name, type(owner).__name__))
        return Normal(0.0, 0.02) if p.ndim > 1 else Uniform(3.0) if name == "0.bias" else None

    values = init_parameters(model, 4, rule)
    assert seen == [("0.bias", "Linear"), ("0.weight", "Linear"), ("1.bias", "LayerNorm"), ("1.weight", "LayerNorm")]
    assert values["1.weight"] == Constant(1.0)
    assert torch.equal(model[0].weight, normal_(torch.empty(5, 4), 0.0, 0.02, 4, "0.weight"))
    assert torch.equal(model[0].bias, uniform_(torch.empty(5), 4, "0.bias", low=-3.0, high=3.0))


def test_no_rule_fills_nothing() -> None:
    model = nn.Module()
    model.first, model.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
    before = values_of(model)
    with pytest.raises(
        InvalidArgumentError, match="init_parameters: got scale, a parameter of Module, expected one of"
    ):
        init_parameters(model, 0)
    with pytest.raises(InvalidArgumentError, match=r"init_parameters of first\.bias: got a tensor without memory"):
        init_parameters(nn.ModuleDict({"first": nn.Linear(3, 3, device="meta")}), 0)
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
