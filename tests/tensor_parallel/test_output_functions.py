"""All functions of torch that take the outputs of a sharded layer: with a rank's outputs they compute its part of what
they compute with all outputs, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import get_overridable_functions
from torch.utils._pytree import tree_leaves

from ringcomm.errors import InvalidArgumentError
from ringcomm.tensor_parallel.outputs import OutputSharding
from tests.support.choice import choose

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSALS = (
    *(InvalidArgumentError, UserWarning, RuntimeError, TypeError, ValueError, IndexError, AssertionError),
    NotImplementedError,
)
NOT_DETECTED = {"index", "index_select", "linear", "matmul", "tensordot", "scaled_dot_product_attention"}
"""Those that docs/parallel.md says are not."""
SIZES = {
    "numel", "nelement", "size", "__len__", "storage", "untyped_storage", "data_ptr", "const_data_ptr", "_is_view",
    "__get__",
}  # fmt: skip
RANDOM = {
    "bernoulli", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential", "geometric", "log_normal",
    "normal", "poisson", "random", "uniform", "empty_like",
}  # fmt: skip
OBJECTS = {
    "__array__", "__dlpack__", "__reduce_ex__", "__repr__", "numpy", "tolist", "to_mkldnn", "to_sparse",
    "fbgemm_linear_quantize_weight", "fbgemm_pack_gemm_matrix_fp16",
}  # fmt: skip
"""Reading is refused in a forward pass alone; the others return no values."""
ONE_NUMBER = [((1, -1),), ((1, 1),)]
"""Indices of one number, for printing."""
X = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
ARGUMENTS: list[tuple[Any, ...]] = [
    (), (-1,), (1,), (0,), ((-1,),), (2, -1), (2, 1), (2,), (3,), (0.5,), (0.5, -1), (-1, True), ((1, -1),), ((1, 1),),
    (-1, 0), (1, 0), (1, 0, 5), (-1, 0, 1), (-1, torch.tensor([0, 3])), ("like",), ("like", "like"), (0.1, 0.9),
    (-1, torch.zeros(4, 1, dtype=torch.int64)), (1, 2), ((12,),), ((5,),),
]  # fmt: skip
"""``like``: another tensor like the outputs."""


def functions() -> dict[str, set[Callable[..., Any]]]:
    found: dict[str, set[Callable[..., Any]]] = {}
    for each in get_overridable_functions().values():
        for function in each:
            found.setdefault(getattr(function, "__name__", ""), set()).add(function)
    return found


FUNCTIONS = functions()


def called(function: Callable[..., Any], x: torch.Tensor, arguments: tuple[Any, ...]) -> Any:
    like = x * 0.5
    torch.manual_seed(0)
    with torch.no_grad():
        return function(x, *(like if type(each) is str else each for each in arguments))


def is_same(a: Any, b: Any) -> bool:
    if not torch.is_tensor(a) or not torch.is_tensor(b):
        return bool(a == b)
    a, b = a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor)
    kind = torch.complex64 if a.is_complex() else torch.float32
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.to(kind), b.to(kind), equal_nan=True)


def joined(values: list[Any], dim: int) -> Any:
    try:
        return torch.cat([each.as_subclass(torch.Tensor) for each in values], dim)
    except (RuntimeError, IndexError):
        return None


def is_right(expected: Any, by_rank: list[Any]) -> bool:
    """Whether what the ranks computed is equal to, or the parts along a dimension of, what is expected."""
    leaves = [tree_leaves(each) for each in by_rank]
    return all(len(each) == len(tree_leaves(expected)) for each in leaves) and all(
        all(is_same(each, whole) for each in parts)
        or (torch.is_tensor(whole) and any(is_same(joined([*parts], dim), whole) for dim in range(whole.dim())))
        for whole, *parts in zip(tree_leaves(expected), *leaves, strict=True)
    )


def wrong(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Whether the function computes something else over two ranks, and nothing is raised."""
    try:
        expected = called(function, X.clone(), arguments)
    except BaseException:  # these are no arguments of the function
        return False
    try:
        cuts = [OutputSharding("up", rank, (6,), 12, frozenset()) for rank in range(2)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "parallelize: ")  # given outside of forward in place of the error
            found = [called(function, cut.watch(X.chunk(2, -1)[cut.rank].clone()), arguments) for cut in cuts]
    except REFUSALS:
        return False
    return not is_right(expected, found)


LETTERS = sorted({name.strip("_")[:1].lower() for name in FUNCTIONS} - {""})


@pytest.mark.parametrize("letter", choose(LETTERS, "cms"))  # most functions that reduce, sort, cut or join
def test_every_function_of_torch_is_right_or_refused(letter: str) -> None:
    left_out = NOT_DETECTED | SIZES | RANDOM | OBJECTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silent = [
            (name, arguments)
            for name in sorted(FUNCTIONS)
            if name.strip("_")[:1].lower() == letter and not {name, name.rstrip("_")} & left_out
            for function in FUNCTIONS[name]
            for arguments in ARGUMENTS
            if not (name == "__getitem__" and arguments in ONE_NUMBER) and wrong(function, arguments)
        ]
    assert silent == []
