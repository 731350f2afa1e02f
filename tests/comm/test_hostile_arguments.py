"""Wrong arguments to every public function: refused with a word, before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcomm
from ringcomm import Communicator
from tests.support.choice import drawn
from tests.support.hostile.refusals import refusal
from tests.support.hostile.values import (
    MISFITS,
    NO_ARRAYS,
    NO_LISTS,
    NO_NUMBERS,
    NO_OPTIONS,
    NO_SUMS,
    NOT_TO_WRITE,
    PLAIN,
    Make,
)

# ---- values, by what they cannot be ------------------------------------------------------------------------------

READ = {**PLAIN, **NO_ARRAYS}
WRITTEN = {**READ, **NOT_TO_WRITE}
WRONG: dict[str, dict[str, Make]] = {
    "read": READ,
    "summed": {**READ, **NO_SUMS},
    "written": WRITTEN,
    "summed in place": {**WRITTEN, **NO_SUMS},
    "out": {name: make for name, make in {**WRITTEN, **MISFITS}.items() if name != "None"},
    "some": {**NO_LISTS, "of what is none": lambda: [object()] * 2},
    "list": {**NO_LISTS, "of what is none": lambda: [object()] * 2, "of another length": lambda: [torch.ones(4)] * 3},
    "list?": {
        **NO_OPTIONS,
        "of what is none": lambda: [object()] * 2,
        "of another length": lambda: [torch.ones(4)] * 3,
    },
    "option": {**NO_OPTIONS, "number": lambda: 3, "unknown": lambda: "star", "bytes": lambda: b"sum"},
    "flag": {**NO_OPTIONS, "number": lambda: 1, "text": lambda: "no", "None": lambda: None},
    "peer": {**NO_NUMBERS, "too large": lambda: 7, "negative": lambda: -1},
    "whole": {**NO_NUMBERS, "too large": lambda: 1 << 63},
    "factor": {**NO_OPTIONS, "text": lambda: "2"},
    "scale": {name: make for name, make in NO_OPTIONS.items() if name not in ("nan", "huge", "hugely negative")},
    "timeout": {**NO_OPTIONS, "negative": lambda: -1.0, "zero": lambda: 0, "True": lambda: True, "text": lambda: "1"},
    "stream": {**NO_OPTIONS, "number": lambda: 1, "negative": lambda: -1},
    "counts": {
        **NO_OPTIONS,
        "text": lambda: "",
        "too many": lambda: [1, 1, 1],
        "negative": lambda: [-1, 5],
        "halves": lambda: [0.5] * 2,
    },
    "shape": {
        **{name: make for name, make in NO_OPTIONS.items() if name not in ("objects",)},
        "negative": lambda: (2, -1),
        "overflowing": lambda: (1 << 40, 1 << 40),
        "all there is": lambda: (1 << 64) - 1,
    },
    "dtype": {**NO_OPTIONS, "type": lambda: object, "number": lambda: 3},
    "object": {"of no pickle": lambda: lambda: 3, "of a local class": lambda: type("Local", (), {})()},
    "objects": {**NO_LISTS, "of no pickle": lambda: [lambda: 3] * 2, "of another length": lambda: [1] * 3},
    "bytes": {**NO_OPTIONS, "text": lambda: "text", "None": lambda: None},
}

# ---- what is called ----------------------------------------------------------------------------------------------

FOUR = torch.ones(4)


def _four(comm: Communicator) -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(comm.world_size)]


def _all(comm: Communicator) -> torch.Tensor:
    return torch.ones(4 * comm.world_size)


def _other(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.world_size


Right = Callable[[Communicator], dict[str, Any]]
OPTIONS = {"timeout": "timeout", "stream": "stream", "async_op": "flag"}
SUMS = {**OPTIONS, "op": "option", "factor": "factor"}
SCANS = {"x": "summed in place", "op": "option", "out": "out", "timeout": "timeout", "stream": "stream"}
CALLS: dict[str, tuple[Right, dict[str, str]]] = {  # right arguments, and of what kind each of them is
    "all_reduce": (
        lambda c: {"x": torch.ones(4)},
        {"x": "summed in place", "out": "out", "algorithm": "option", **SUMS},
    ),
    "reduce": (lambda c: {"x": torch.ones(4), "root": c.rank}, {"x": "summed", "root": "peer", "out": "out", **SUMS}),
    "reduce_scatter": (lambda c: {"x": _all(c)}, {"x": "summed", "out": "out", "algorithm": "option", **SUMS}),
    "all_gather": (lambda c: {"x": FOUR}, {"x": "read", "out": "out", "algorithm": "option", **OPTIONS}),
    "scan": (lambda c: {"x": torch.ones(4)}, SCANS),
    "exscan": (lambda c: {"x": torch.ones(4)}, SCANS),
    "broadcast": (
        lambda c: {"x": torch.ones(4)},
        {"x": "read", "root": "peer", "algorithm": "option", **OPTIONS},  # the root's may be read-only
    ),
    "gather": (lambda c: {"x": FOUR, "root": c.rank}, {"x": "read", "root": "peer", "out": "out", **OPTIONS}),
    "scatter": (lambda c: {"x": _all(c), "root": c.rank}, {"x": "read", "root": "peer", "out": "out", **OPTIONS}),
    "all_to_all": (
        lambda c: {"x": _all(c)},
        {"x": "read", "out": "out", "send_counts": "counts", "recv_counts": "counts", "algorithm": "option", **OPTIONS},
    ),
    "barrier": (lambda c: {}, OPTIONS),
    "all_reduce_coalesced": (lambda c: {"xs": _four(c)}, {"xs": "some", "algorithm": "option", **SUMS}),
    "all_gather_list": (lambda c: {"x": FOUR, "outputs": _four(c)}, {"x": "read", "outputs": "list?", **OPTIONS}),
    "reduce_scatter_list": (
        lambda c: {"out": torch.ones(4), "inputs": _four(c)},
        {"out": "written", "inputs": "list", **SUMS},
    ),
    "all_to_all_list": (
        lambda c: {"outputs": _four(c), "inputs": _four(c)},
        {"outputs": "list", "inputs": "list", **OPTIONS},
    ),
    "gather_list": (
        lambda c: {"outputs": _four(c), "x": FOUR, "root": c.rank},
        {"outputs": "list", "x": "read", "root": "peer", **OPTIONS},
    ),
    "scatter_list": (
        lambda c: {"out": torch.ones(4), "inputs": _four(c), "root": c.rank},
        {"out": "written", "inputs": "list", "root": "peer", **OPTIONS},
    ),
    "pack": (
        lambda c: {"tensors": [FOUR], "bucket": torch.ones(4)},
        {"tensors": "list", "bucket": "written", "scale": "scale", "stream": "stream"},
    ),
    "unpack": (
        lambda c: {"bucket": FOUR, "tensors": [torch.ones(4)]},
        {"bucket": "read", "tensors": "list", "scale": "scale", "stream": "stream"},
    ),
    "empty": (lambda c: {"shape": 4}, {"shape": "shape", "dtype": "dtype", "like": "option"}),
    "mem_pool": (lambda c: {"nbytes": 4096}, {"nbytes": "whole"}),
    "exchange": (lambda c: {"payload": b"x"}, {"payload": "bytes"}),
    "all_gather_object": (lambda c: {"x": 3}, {"x": "object"}),
    "broadcast_object": (lambda c: {"x": 3, "root": c.rank}, {"x": "object", "root": "peer"}),
    "gather_object": (lambda c: {"x": 3}, {"x": "object", "root": "peer"}),
    "scatter_object": (
        lambda c: {"xs": list(range(c.world_size)), "root": c.rank},
        {"xs": "objects", "root": "peer"},
    ),
    "split": (lambda c: {"color": 0}, {"color": "whole", "key": "whole"}),
    "shrink": (lambda c: {}, {"timeout": "timeout"}),
    "subgroup": (lambda c: {"ranks": [0]}, {"ranks": "list"}),
    "synchronize": (lambda c: {}, {"stream": "stream"}),
}
MESSAGES: dict[str, tuple[Right, dict[str, str]]] = {  # which need another rank
    "send": (
        lambda c: {"x": FOUR, "dst": _other(c)},
        {"x": "read", "dst": "peer", "tag": "whole", "timeout": "timeout", "stream": "stream"},
    ),
    "recv": (
        lambda c: {"x": torch.ones(4), "src": _other(c)},
        {"x": "written", "src": "peer", "tag": "whole", "timeout": "timeout", "stream": "stream"},
    ),
}
MESSAGES |= {f"i{name}": what for name, what in MESSAGES.items()}
MESSAGES["sendrecv"] = (
    lambda c: {"send": FOUR, "dst": _other(c), "recv": torch.ones(4), "src": _other(c)},
    {"send": "read", "dst": "peer", "recv": "written", "src": "peer", "tag": "whole", "recv_tag": "whole", **OPTIONS},
)
MESSAGES["probe"] = (lambda c: {"src": _other(c)}, {"src": "peer", "tag": "whole", "timeout": "timeout"})
MESSAGES["iprobe"] = (lambda c: {"src": _other(c)}, {"src": "peer", "tag": "whole"})
NOT_CALLED = {
    "abort": "is meant to end the communicator; any reason serves",
    "close": "has no argument",
    "coalesce": "has no argument",
    "describe": "has no argument",
    "dup": "has no argument",
    "from_process_group": "is tested with process groups",
}


def test_every_method_and_every_argument_is_here() -> None:
    methods = {name for name, _ in inspect.getmembers(Communicator, callable) if not name.startswith("_")}
    assert methods == CALLS.keys() | MESSAGES.keys() | NOT_CALLED.keys()
    for name, (_, kinds) in {**CALLS, **MESSAGES}.items():
        parameters = inspect.signature(getattr(Communicator, name)).parameters.keys() - {"self"}
        assert parameters == kinds.keys(), name


def _cases(calls: dict[str, tuple[Right, dict[str, str]]]) -> list[tuple[str, str, str]]:
    """(method, argument, name of a wrong value)."""
    found = [(name, argument, kind) for name, (_, kinds) in calls.items() for argument, kind in kinds.items()]
    return [(name, argument, value) for name, argument, kind in found for value in WRONG[kind]]


def _refuses(comm: Communicator, cases: list[tuple[str, str, str]]) -> None:
    for name, argument, value in cases:
        right, kinds = {**CALLS, **MESSAGES}[name]
        arguments = {**right(comm), argument: WRONG[kinds[argument]][value]()}
        try:
            refusal(partial(getattr(comm, name), **arguments), TypeError, ValueError)
        except AssertionError as error:
            raise AssertionError(f"{name}({argument}={value}) on rank {comm.rank} {error}") from error
        except BaseException as error:
            raise AssertionError(f"{name}({argument}={value}) raised {type(error).__name__}: {error}") from error
        comm.barrier(timeout=10)
        assert not comm.aborted


@given(st.lists(st.sampled_from(_cases(CALLS)), min_size=10, max_size=10))
@drawn(150)
def test_a_rank_alone_refuses_what_is_wrong(cases: list[tuple[str, str, str]]) -> None:
    ringcomm.run_ranks(_refuses, 1, cases, timeout=20)


@given(st.lists(st.sampled_from(_cases({**CALLS, **MESSAGES})), min_size=10, max_size=10))
@drawn(250)
def test_two_ranks_refuse_what_is_wrong(cases: list[tuple[str, str, str]]) -> None:
    ringcomm.run_ranks(_refuses, 2, cases, timeout=20)
