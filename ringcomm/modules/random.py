"""Random numbers that depend only on (seed, name, position).

Each element is drawn from its own counter, so any fragment of a tensor can be drawn anywhere, in any order, with the
bits that it has in the whole tensor. A model's initial values and its dropout masks therefore do not depend on the
number of ranks, the stage, the shard or the order of construction. Only integers and the four basic operations and
square roots of IEEE arithmetic, each rounded once, are used, so the bits do not depend on the device or its vector
instructions either.

The counters are those of Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.arguments import DEVICE, MODULE, TENSOR
from ringcomm.validation import FUNCTION, INTEGER, TEXT, expects, number, validate_int

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
_ROUNDS = 10
_CHUNK = 1 << 16  # elements at a time, so that temporaries of half a MiB each stay in cache
_HIGH, _LOW, _DROPOUT = range(3)  # streams of 32-bit words under one key

Counter = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Four words below 2^32 in int64, of any one shape."""


# ---- words -------------------------------------------------------------------------------------------------------


@expects("key", seed=INTEGER, name=TEXT, index=INTEGER)
def key(seed: int, name: str, index: int = 0) -> int:
    """Returns 64 bits derived from a seed, a name and an index: the same in every process and version, different for
    any difference.

    Args:    index: for example the step, or the number of a micro-batch.
    """
    text = f"{seed}/{index}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"ringcomm").digest(), "little")


@expects("generator", seed=INTEGER, name=TEXT, index=INTEGER, device=DEVICE)
def generator(seed: int, name: str, index: int = 0, device: Any = "cpu") -> torch.Generator:
    """Returns a torch generator seeded from (seed, name, index), for functions of torch that take a generator.

    Its numbers depend on the order of the draws, as with any torch generator; on the cpu torch uses 32 bits of the key.
    """
    return torch.Generator(device).manual_seed(key(seed, name, index))


def philox(counter: Counter, key: int) -> Counter:
    """Returns Philox4x32-10: four words for each counter.

    Args:    key: 64 bits; its lower half is the first word of Philox's key.
    Returns: four tensors like those of ``counter``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the full 64-bit products; int64 wraps
        c0, c1, c2, c3 = _upper(second) ^ c1 ^ k0, second & _MASK, _upper(first) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _upper(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & _MASK


@expects(
    "words",
    key=validate_int(0, (1 << 64) - 1),
    start=validate_int(),
    count=validate_int(),
    stream=validate_int(),
    device=DEVICE,
)
def words(key: int, start: int, count: int, stream: int = _HIGH, device: Any = None) -> torch.Tensor:
    """Returns words start to start + count - 1 of a stream, each uniform over 32 bits.

    Returns: int64 of shape (count,).
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    first, last = start // 4, (start + count - 1) // 4
    block = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    of_stream = torch.full_like(block, stream)
    four = philox((block & _MASK, block >> 32, of_stream, torch.zeros_like(block)), key)
    return torch.stack(four, 1).view(-1)[start - 4 * first :][:count]


# ---- distributions -----------------------------------------------------------------------------------------------


@expects("uniform_", tensor=TENSOR, seed=INTEGER, name=TEXT, start=validate_int(), low=number(), high=number())
def uniform_(
    tensor: torch.Tensor, seed: int, name: str, start: int = 0, *, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Fills ``tensor`` with uniform numbers in [low, high).

    Args:
        start: the offset of ``tensor`` in the whole tensor that (seed, name) identifies; elements count in row-major
            order.
    Shapes:  any, empty too.
    Dtypes:  floating point. float64 has 53 random bits, the others have the upper 24 of these; values are computed in
             float64, rounded once to float32, and from that to a narrower type. Rounding may reach ``high``.
    Cost:    one pass; temporaries of a few MiB.
    Returns: ``tensor``.
    """

    def draw(words_of: Words, wide: bool) -> torch.Tensor:
        fraction = _bits(words_of, 53).double() * 2.0**-53 if wide else (words_of(_HIGH) >> 8).double() * 2.0**-24
        return fraction * (high - low) + low

    return _fill("uniform_", tensor, key(seed, name), start, draw)


@expects("normal_", tensor=TENSOR, mean=number(), std=number(), seed=INTEGER, name=TEXT, start=validate_int())
def normal_(tensor: torch.Tensor, mean: float, std: float, seed: int, name: str, start: int = 0) -> torch.Tensor:
    """Fills ``tensor`` with normal numbers by inversion: each uses one word (float64: two), and none exceeds 6.4 (8.3)
    std.

    Args, shapes, dtypes, cost, returns: as in `uniform_`.
    """

    def draw(words_of: Words, wide: bool) -> torch.Tensor:
        bits = 52 if wide else 32
        below = (_bits(words_of, bits).double() + 0.5) * 2.0**-bits  # exact, and never 0 or 1
        return _quantile(below) * std + mean

    return _fill("normal_", tensor, key(seed, name), start, draw)


Words = Callable[[int], torch.Tensor]
"""Returns the words of a stream for the elements that are drawn now."""


def _bits(words_of: Words, bits: int) -> torch.Tensor:
    """Returns integers of 32 to 63 random bits; their first 32 bits are those of a narrower type."""
    high = words_of(_HIGH)
    return high if bits == 32 else (high << (bits - 32)) | (words_of(_LOW) >> (64 - bits))


def _fill(
    call: str, tensor: torch.Tensor, key: int, start: int, draw: Callable[[Words, bool], torch.Tensor]
) -> torch.Tensor:
    _check(call, tensor)
    wide, in_place = tensor.dtype == torch.float64, tensor.is_contiguous()
    with torch.no_grad():
        target = tensor.view(-1) if in_place else tensor.new_empty(tensor.numel())
        for begin, part in _chunks(target):
            drawn = draw(partial(words, key, start + begin, part.numel(), device=part.device), wide)
            part.copy_(drawn if wide else drawn.float())
        if not in_place:
            tensor.copy_(target.view(tensor.shape))
    return tensor


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for begin in range(0, flat.numel(), _CHUNK):
        yield begin, flat[begin : begin + _CHUNK]


def _check(call: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise InvalidArgumentError(f"{call}: got {tensor.dtype}, expected a floating point type; convert afterwards")
    if tensor.is_meta:
        raise InvalidArgumentError(f"{call}: got a tensor without memory (meta), expected one; call to_empty() first")
    if hasattr(tensor, "to_local"):
        raise InvalidArgumentError(
            f"{call}: got a {type(tensor).__name__}, expected an ordinary tensor; pass its to_local(), and its place "
            "in the whole"
        )


# ---- the inverse of the normal distribution ----------------------------------------------------------------------
# Wichura's AS 241 (Applied Statistics 37, 1988): one quotient of polynomials for the centre, two for the tails.

_MIDDLE = (
    (
        *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
        *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    ),
    (
        *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
        *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
    ),
)
_TAIL = (
    (
        *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0),
        *(1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
        *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
    ),
)
_FAR_TAIL = (
    (
        *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1),
        *(2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    ),
    (
        *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
        *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
    ),
)


def _quantile(below: torch.Tensor) -> torch.Tensor:
    """Returns the standard normal quantile for a probability in (0, 1), in float64; the relative error is about
    1e-15."""
    centered = below - 0.5
    middle = centered * _quotient(0.180625 - centered * centered, _MIDDLE)
    outside = centered.abs() > 0.425
    p = below[outside]
    r = (-_log(torch.minimum(p, 1.0 - p))).sqrt()
    tail = torch.where(r <= 5.0, _quotient(r - 1.6, _TAIL), _quotient(r - 5.0, _FAR_TAIL))
    middle[outside] = torch.where(p < 0.5, -tail, tail)
    return middle


def _quotient(x: torch.Tensor, coefficients: tuple[Sequence[float], Sequence[float]]) -> torch.Tensor:
    return _polynomial(x, coefficients[0]) / _polynomial(x, coefficients[1])


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Evaluates a polynomial, lowest power first. Product and sum are separate, so that a device cannot fuse them
    into one rounding."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: torch.Tensor) -> torch.Tensor:
    """Returns the natural logarithm. torch's own differs in the last bit between devices, and so would the results."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = exponent - small.to(exponent.dtype)
    s = (mantissa - 1) / (mantissa + 1)  # log m = 2 (s + s^3/3 + s^5/5 ...), |s| < 0.172
    series = _polynomial(s * s, [2 / (2 * n + 1) for n in range(12)]) * s
    return exponent.double() * math.log(2) + series


# ---- dropout -----------------------------------------------------------------------------------------------------


@expects("dropout", x=TENSOR, p=number(0, 1, "0 to 1"), seed=INTEGER, name=TEXT, offset=validate_int(), index=INTEGER)
def dropout(x: torch.Tensor, p: float, seed: int, name: str, offset: int = 0, *, index: int = 0) -> torch.Tensor:
    """Sets elements of ``x`` to zero with probability ``p``, and scales the others by 1 / (1 - p).

    Args:
        p: from 0 to 1, in steps of 2^-32.
        offset: the offset of ``x`` in the whole tensor, in row-major order: every fragment gets its part of the same
            mask.
        index: for example the step; each index gives another mask.
    Shapes:  any, empty too.
    Dtypes:  floating point; a kept element is scaled in ``x``'s own arithmetic and rounded once.
    Cost:    the mask is drawn again in backward, so nothing is saved for it.
    Returns: a new tensor; ``x`` itself if ``p`` is 0.
    """
    _check("dropout", x)
    return x if p == 0 else _Dropout.apply(x, float(p), key(seed, name, index), offset)


class _Dropout(torch.autograd.Function):
    """Multiplies by a mask that can be drawn again from its counters, so backward applies the same function to the
    gradient."""

    @staticmethod
    def forward(x: torch.Tensor, p: float, key: int, offset: int) -> torch.Tensor:
        """Returns x / (1 - p) where a word is at least p, else 0."""
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat, scale = x.reshape(-1), 0.0 if p == 1 else 1 / (1 - p)
        for begin, part in _chunks(result.view(-1)):
            count = part.numel()
            kept = words(key, offset + begin, count, _DROPOUT, x.device) >= round(p * 2**32)
            part.copy_(torch.where(kept, flat[begin : begin + count] * scale, 0.0))
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Saves numbers only, no tensors."""
        del output
        _, ctx.p, ctx.key, ctx.offset = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Scales the gradients of the elements that were kept, and zeroes the others."""
        return _Dropout.apply(gradient, ctx.p, ctx.key, ctx.offset), None, None, None


# ---- initial values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """One value for every element."""

    value: float

    def fill(self, tensor: torch.Tensor, seed: int, name: str, start: int = 0) -> torch.Tensor:
        """Fills a fragment of a parameter."""
        del seed, name, start
        with torch.no_grad():
            return tensor.fill_(self.value)


@dataclass(frozen=True)
class Uniform:
    """Uniform over [-bound, bound)."""

    bound: float

    def fill(self, tensor: torch.Tensor, seed: int, name: str, start: int = 0) -> torch.Tensor:
        """Fills a fragment that begins at element ``start`` of the parameter ``name``."""
        return uniform_(tensor, seed, name, start, low=-self.bound, high=self.bound)


@dataclass(frozen=True)
class Normal:
    """Normal, but zero at the positions in ``zeros``."""

    mean: float
    std: float
    zeros: range = range(0)

    def fill(self, tensor: torch.Tensor, seed: int, name: str, start: int = 0) -> torch.Tensor:
        """Fills a fragment that begins at element ``start`` of the parameter ``name``."""
        normal_(tensor, self.mean, self.std, seed, name, start)
        begin, end = (min(max(edge - start, 0), tensor.numel()) for edge in (self.zeros.start, self.zeros.stop))
        if begin < end:
            with torch.no_grad():
                positions = torch.arange(begin, end, device=tensor.device)
                tensor.put_(positions, tensor.new_zeros(end - begin))
        return tensor


Values = Constant | Uniform | Normal
"""The distribution of a parameter's initial values."""
Rule = Callable[[str, nn.Parameter, nn.Module], Values | None]
"""Maps a parameter's name, the parameter and its module to its initial distribution; None: the module's own."""


@expects("init_parameters", module=MODULE, seed=INTEGER, fn=FUNCTION, prefix=TEXT)
def init_parameters(module: nn.Module, seed: int, fn: Rule | None = None, *, prefix: str = "") -> dict[str, Values]:
    """Fills every parameter of ``module`` from the seed and the parameter's name alone.

    The same parameter of the same model gets the same bits, regardless of what was built before it, and on any rank and
    stage. A parameter with several names uses the first in alphabetical order. Buffers stay as they are.

    Args:
        fn: asked first for each parameter. If it is None or returns None, the distribution is that of torch's own
            modules: linear, convolution, embedding, norm, recurrent, attention, PReLU.
        prefix: put before every name, for example "layers.3." if ``module`` is a part of the model.
    Returns: by name with prefix, the distribution that filled each parameter; ``fill(fragment, seed, name, start)``
             fills a part of it elsewhere.
    Raises:  InvalidArgumentError: a parameter of a module that is not torch's, without an ``fn`` for it; or one without
             memory. In both cases nothing was filled.
    """
    found = {
        prefix + name: (p, _values(prefix + name, p, owner, local, fn)) for name, p, owner, local in _named(module)
    }
    for name, (p, _) in found.items():
        _check(f"init_parameters of {name}", p)
    for name, (p, values) in found.items():
        values.fill(p, seed, name)
    return {name: values for name, (_, values) in found.items()}


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter, nn.Module, str]]:
    """Returns (name, parameter, its module, its name in that module) for each parameter once, in alphabetical order."""
    every = [
        (f"{path}.{local}" if path else local, p, owner, local)
        for path, owner in module.named_modules(remove_duplicate=False)
        for local, p in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    once: dict[int, tuple[str, nn.Parameter, nn.Module, str]] = {}
    for each in sorted(every, key=lambda named: named[0]):
        once.setdefault(id(each[1]), each)
    return list(once.values())


def _values(name: str, p: nn.Parameter, owner: nn.Module, local: str, fn: Rule | None) -> Values:
    """Returns the distribution of a parameter: that of ``fn``, or that of torch's own module."""
    values = fn(name, p, owner) if fn is not None else None
    if values is None:
        values = _usual(p, owner, local)
    if values is None:
        raise InvalidArgumentError(
            f"init_parameters: got {name}, a parameter of {type(owner).__name__}, expected one of a module of torch; "
            "pass fn, and return a distribution for it, such as ringcomm.modules.random.Normal(0, 0.02)"
        )
    return values


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_FAN_IN = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def _usual(p: torch.Tensor, owner: nn.Module, local: str) -> Values | None:
    """Returns the distribution that the module's own reset_parameters draws from."""
    if isinstance(owner, _RECURRENT):
        return Uniform(1 / math.sqrt(owner.hidden_size))
    if isinstance(owner, nn.MultiheadAttention):
        return _attention(p, local)
    if local not in ("weight", "bias"):
        return None
    if isinstance(owner, _NORMS):
        return Constant(1.0 if local == "weight" else 0.0)
    if isinstance(owner, nn.modules.linear.NonDynamicallyQuantizableLinear) and local == "bias":
        return Constant(0.0)  # an attention's output bias
    if isinstance(owner, _FAN_IN):
        fan_in = owner.weight.shape[1] if isinstance(owner, nn.Bilinear) else math.prod(owner.weight.shape[1:])
        return Uniform(1 / math.sqrt(fan_in)) if fan_in else Constant(0.0)
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        row, width = owner.padding_idx, owner.embedding_dim
        return Normal(0, 1) if row is None else Normal(0, 1, range(row * width, (row + 1) * width))
    return Constant(owner.init) if isinstance(owner, nn.PReLU) else None


def _attention(p: torch.Tensor, local: str) -> Values:
    """Returns Glorot and Bengio's bounds, over both dimensions of the matrix as it is stored."""
    if local == "in_proj_bias":
        return Constant(0.0)
    inputs, outputs = (math.prod(p.shape[1:]), p.shape[0] * math.prod(p.shape[2:]))
    if local in ("bias_k", "bias_v"):
        return Normal(0, math.sqrt(2 / (inputs + outputs)))
    return Uniform(math.sqrt(6 / (inputs + outputs)))
