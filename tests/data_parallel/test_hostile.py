"""Wrong arguments to everything that trains: refused with a word, before anything is sent or changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import Communicator, errors
from ringcomm.data_parallel import memory
from ringcomm.errors import shown
from tests.support.hostile.calls import CALLS, WRONG, model
from tests.support.hostile.refusals import refusal

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL: dict[str, Callable[..., Any]] = {  # what is called by no name, or in two ways
    "init_mesh.sizes": ringcomm.init_mesh,
    "memory.predict": memory.predict,
    "parallelize.plan": ringcomm.parallelize,
}
ELSEWHERE = {
    "Communicator": "comm/test_hostile_arguments",
    "Mesh": "is made by init_mesh",
    "Status": "a value, which probe gives",
    "Work": "has no argument but a time",
    "__version__": "is no function",
    "build_info": "has no argument",
    "checkpoint.ByRank": "holds any value",
    "errors": "are raised, not called",
    "init": "comm/test_hostile",
    "pipeline_parallel": "has no function of its own; Pipeline, split",
    "run_ranks": "comm/test_hostile",
    "hooks.attach": "below: it takes a model over a process group",
    "hooks.all_reduce_hook": "is called by torch",
    "hooks.bf16_all_reduce_hook": "is called by torch",
    "hooks.fp16_all_reduce_hook": "is called by torch",
    "random.Constant": "a value, which init_parameters gives",
    "random.Normal": "a value, which init_parameters gives",
    "random.Uniform": "a value, which init_parameters gives",
    "random.philox": "takes words of this module's own making",
    "record.Call": "a value, which records gives",
    "record.Record": "a value, which records gives",
    "record.View": "a value, which merge gives",
    "record.find": "any number may be a communicator's",
    "simulate": "tools/test_simulate_refusals",
    "schedule.Step": "a value, which ring_step gives",
    "tensor_parallel.TensorParallelGroup": "is made of a communicator by what is here",
    **dict.fromkeys(
        [f"tensor_parallel.{name}" for name in ("Colwise", "Dropout", "Heads", "ModuleStyle", "Rowwise")],
        "a wish, which parallelize looks at",
    ),
    **dict.fromkeys([f"tensor_parallel.{name}" for name in ("Experts", "Latent", "Vocab")], "the same"),
}


# ---- all of them ---------------------------------------------------------------------------------------------------


def _public(home: Any) -> list[str]:
    """The names that a module of the package shows."""
    own = [name for name, each in vars(home).items() if getattr(each, "__module__", "") == home.__name__]
    return [name for name in getattr(home, "__all__", own) if not name.startswith("_")]


def _names() -> set[str]:
    found = set()
    for name in ringcomm.__all__:
        value = getattr(ringcomm, name)
        if isinstance(value, type) and issubclass(value, errors.RingcommError):
            continue
        inner = inspect.ismodule(value) and name not in ELSEWHERE
        found |= {f"{name}.{each}" for each in _public(value) if callable(getattr(value, each))} if inner else {name}
    return found - {f"{home}.{name}" for home in ("context", "record", "tensor_parallel") for name in ringcomm.__all__}


def test_every_public_name_is_here() -> None:
    known = CALLS.keys() | ELSEWHERE.keys()
    assert not _names() - known, "give it a row in tests/support/hostile/calls.py, or say why not in ELSEWHERE"
    assert not ELSEWHERE.keys() - _names()


def _called(name: str, comm: Communicator) -> Callable[..., Any]:
    if name == "Mesh.__getitem__":
        return ringcomm.init_mesh(dp=comm.world_size, comm=comm).__getitem__
    if name in SPECIAL:
        return SPECIAL[name]
    found: Any = ringcomm
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_here(name: str) -> None:
    comm = ringcomm.init()
    called = _called(name, comm)
    signature = inspect.signature(called.__init__ if isinstance(called, type) else called)
    expected = signature.parameters.keys() - {"self"}
    if name == "memory.predict":
        expected |= inspect.signature(memory.Plan).parameters.keys() - {"how"}
    assert expected - {"how"} <= CALLS[name][1].keys()
    comm.close()


# ---- refused -------------------------------------------------------------------------------------------------------


def _done(called: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What is a context is entered."""
    result = called(**arguments)
    with result if isinstance(result, AbstractContextManager) else nullcontext():
        return result


def _state(arguments: dict[str, Any]) -> list[Any]:
    """What a call could change."""
    found: list[Any] = []
    for each in arguments.values():
        if isinstance(each, nn.Module):
            found += [type(each), list(each.named_modules()), [vars(p).keys() for p in each.parameters()]]
            found += [p.tolist() for p in each.parameters()]
        elif isinstance(each, torch.optim.Optimizer):
            found += [[id(p) for group in each.param_groups for p in group["params"]]]
    return found


def _refuses(comm: Communicator, name: str) -> None:
    right, kinds = CALLS[name]
    called, arguments = _called(name, comm), right(comm)
    before = _state(arguments)
    failed = []
    for argument, kind in kinds.items():
        for value, make in WRONG[kind].items():
            try:
                text = refusal(partial(_done, called, {**arguments, argument: make()}), TypeError, ValueError)
                assert len(text) < 2000, f"says {len(text)} characters"
            except Exception as error:
                failed.append(f"{argument}={value}: {type(error).__name__} {error!s:.200}")
    assert not failed, f"{name} on rank {comm.rank}: " + "; ".join(failed)
    comm.barrier(timeout=10)
    assert not comm.aborted
    assert _state(arguments) == before, f"{name} has changed what it refused"
    whole = {each: np.int64(n) if type(n) is int else n for each, n in arguments.items()}
    _done(called, whole)  # whole numbers of NumPy are whole numbers; and nothing was lost
    comm.barrier(timeout=10)


WORLDS = [(name, world_size) for name in CALLS for world_size in (1, 2) if (name, world_size) != ("trace", 2)]
"""A process has one trace at a time, and the ranks here are its threads."""


@pytest.mark.parametrize(("name", "world_size"), WORLDS)
def test_what_is_wrong_is_refused(name: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ringcomm.run_ranks(_refuses, world_size, name, timeout=20)
    ringcomm.step(None)  # which belongs to the process


@pytest.mark.parametrize("argument", ["model", "comm"])
def test_hooks_refuse_what_is_wrong(argument: str) -> None:
    from ringcomm.data_parallel import hooks

    for make in WRONG["object?"].values():
        refusal(partial(hooks.attach, **{"model": model(), argument: make()}))


# ---- on one of two ranks -------------------------------------------------------------------------------------------

ON_ONE: list[tuple[str, str, Any]] = [  # where the others wait for this rank: another value, or a wrong one
    ("DistributedDataParallel", "bucket_cap_mb", 7),
    ("DistributedDataParallel", "module", object()),
    ("Pipeline", "microbatches", 4),
    ("Pipeline", "reduction", "star"),
    ("ZeroRedundancyOptimizer", "params", {}),
    ("checkpoint.load", "path", "nowhere"),
    ("checkpoint.load", "path", object()),
    ("checkpoint.save", "extra", object()),
    ("checkpoint.save", "path", "a\0b"),
    ("clip_grad_norm_", "max_norm", math.nan),
    ("fully_shard", "atom", "tensor"),
    ("fully_shard", "mp_policy", object()),
    ("init_mesh.sizes", "dp", 1),
    ("init_mesh.sizes", "dp", object()),
    ("parallelize", "overlap", object()),
    ("parallelize", "plan", {"0": "colwise_rep"}),
    ("restage", "stage", 0),
    ("restage", "stage", 1 << 100_000),
    ("ring_attention", "causal", True),
    ("ring_attention", "q", object()),
    ("shard", "accumulation", "tree"),
    ("shard", "module", nn.Linear(3, 3)),
    ("shard", "stage", 3),
    ("shard", "units", [object()]),
]


def _differs(comm: Communicator, name: str, argument: str, value: Any) -> str:
    """The error's kind, on either rank."""
    called, arguments = _called(name, comm), CALLS[name][0](comm)
    with pytest.raises((errors.RingcommError, TypeError, ValueError)) as caught:
        _done(called, {**arguments, **({argument: value} if comm.rank else {})})
    return caught.type.__name__


@pytest.mark.parametrize(("name", "argument", "value"), ON_ONE, ids=lambda each: f"{shown(each):.20}")
def test_every_rank_raises_if_one_differs(
    name: str, argument: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ringcomm.run_ranks(_differs, 2, name, argument, value, timeout=20)
    assert "CollectiveTimeoutError" not in kinds


def test_what_torch_takes_is_taken() -> None:
    def rank(comm: Communicator) -> list[float]:
        module = model()
        units = {"first": next(iter(module.children()))}.values()
        module, _ = ringcomm.shard(module, stage=2, comm=comm, units=units, bucket_cap_mb=np.float32(1))  # type: ignore[arg-type]
        norms = []
        for norm_type in ("inf", math.inf, np.float32(2), 2, torch.tensor(1.0)):
            module.zero_grad()
            module(torch.ones(2, 4)).sum().backward()
            norms.append(float(ringcomm.clip_grad_norm_(module, torch.tensor(1.0), norm_type)))  # type: ignore[arg-type]
        return norms

    norms = ringcomm.run_ranks(rank, 2)[0]
    assert norms[0] == norms[1]
    assert norms[2] == norms[3]
