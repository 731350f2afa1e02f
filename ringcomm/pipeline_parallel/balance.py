"""Balances the load of a pipeline's stages: chooses the repeated blocks of a model with which stages begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringcomm.data_parallel.model.partition import blocks_of
from ringcomm.errors import InvalidArgumentError, shown

BEFORE, BEHIND = "before", "behind"
"""Keys of loads: of everything before the first block, and of everything after the last one."""


def balance(
    model: nn.Module, stages: int, within: str | None = None, seconds: Mapping[str, float] | None = None
) -> list[str]:
    """Returns where to split the model: the names of the blocks with which the second, third, ... stage begins.

    The result is an argument of `ringcomm.split`. It minimises the load of the heaviest stage, and among equals the sum
    of squares of the loads. The first stage also carries everything before the blocks, the last stage everything after
    them.

    Args:
        within: the name of the ModuleList or Sequential whose children are the blocks; None: the blocks of all of the
            model's outermost ones.
        seconds: the load of each block by name, and of "before" and "behind", as `measure` returns them; None: numbers
            of parameters, where a tied parameter counts in each of its places.
    Cost:    stages * blocks^2 steps.
    Raises:  InvalidArgumentError: fewer blocks than stages, or a block without a load.
    """
    blocks = _blocks(model, within, "balance")
    names = [name for name, _ in blocks]
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= len(blocks):
        raise InvalidArgumentError(
            f"balance: got {shown(stages)} stages for {len(blocks)} blocks, expected 1 to {len(blocks)} stages; ask "
            "for fewer, or name the modules to cut at"
        )
    loads = parameters(model, within) if seconds is None else seconds
    missing = [name for name in names if name not in loads]
    if missing:
        raise InvalidArgumentError(
            f"balance: got seconds without {missing[0]!r}, expected one for each block; pass what measure() gives"
        )
    row = [float(loads[name]) for name in names]
    row[0] += loads.get(BEFORE, 0.0)
    row[-1] += loads.get(BEHIND, 0.0)
    return [names[start] for start in _stage_starts(row, stages)[1:]]


def _stage_starts(loads: Sequence[float], stages: int) -> list[int]:
    """Returns where each stage begins so that the largest load of a stage is smallest, and among equals the sum of
    squares."""
    below = [0.0, *accumulate(loads)]

    def best(cost: Callable[[float], float], join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """Returns the least total cost of all stages, and where they begin."""
        # For each i the least cost of the loads from i on, and where their stages begin; each round adds a stage.
        rest: list[tuple[float, list[int]]] = [*((inf, []) for _ in loads), (0.0, [])]
        for _ in range(stages):
            now = [
                min(
                    ((join(cost(below[j] - below[i]), rest[j][0]), -j) for j in range(i + 1, len(loads) + 1)),
                    default=(inf, 0),
                )
                for i in range(len(loads) + 1)
            ]
            rest = [(least, [i, *rest[-j][1]]) for i, (least, j) in enumerate(now)]
        return rest[0]

    limit, _ = best(lambda load: load, max)
    return best(lambda load: load * load if load <= limit else inf, lambda a, b: a + b)[1]


def parameters(model: nn.Module, within: str | None = None) -> dict[str, float]:
    """Returns the numbers of parameters by block, and of "before" and "behind" them. Parameters registered between two
    blocks count for the earlier one."""
    blocks = _blocks(model, within, "parameters")
    found = {name: float(sum(p.numel() for p in block.parameters())) for name, block in blocks}
    inside = {id(each) for _, block in blocks for each in block.modules()}
    begins = {id(block): name for name, block in blocks} | {id(blocks[-1][1]): BEHIND}
    found |= {BEFORE: 0.0, BEHIND: 0.0}
    place = BEFORE
    for module in model.modules():
        place = begins.get(id(module), place)
        if id(module) not in inside:
            found[place] += sum(p.numel() for p in module._parameters.values() if p is not None)
    return found


def measure(
    model: nn.Module, *args: Any, within: str | None = None, repetitions: int = 3, **kwargs: Any
) -> dict[str, float]:
    """Returns the seconds of forward plus backward for each block, and for "before" and "behind" them: the least of
    ``repetitions``, after one warm-up.

    Calls ``model(*args, **kwargs)`` and runs backward from the sum of the output's tensors. Gradients are left as they
    were. A device is synchronised at the ends of each block.

    Raises:  InvalidArgumentError: a model without repeated blocks, or a block that is not called.
    """
    blocks = _blocks(model, within, "measure")
    best: dict[str, float] = {}
    for number in range(repetitions + 1):
        found = _timed_pass(model, blocks, args, kwargs)
        if number:
            best = {name: min(best.get(name, spent), spent) for name, spent in found.items()}
    return best


def _timed_pass(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, float]:
    """Runs one forward and backward pass and returns the seconds of each block."""
    marks: dict[tuple[str, str], float] = {}  # when each block's forward and backward passes begin and end
    on_device = torch.cuda.is_available() and any(p.is_cuda for p in model.parameters())

    def now() -> float:
        if on_device:
            torch.cuda.synchronize()
        return time.perf_counter()

    def hooked(name: str, block: nn.Module) -> list[Any]:
        def mark(what: str) -> None:
            marks[what, name] = now()

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            mark("in")
            for x in tree_leaves((args, kwargs)):
                if torch.is_tensor(x) and x.requires_grad and x.grad_fn is not None:
                    x.register_hook(lambda _: mark("back out"))
                    break

        def ended(module: nn.Module, args: Any, output: Any) -> None:
            mark("out")
            for x in tree_leaves(output):
                if torch.is_tensor(x) and x.requires_grad:
                    x.register_hook(lambda _: mark("back in"))
                    break

        return [block.register_forward_pre_hook(entered, with_kwargs=True), block.register_forward_hook(ended)]

    before = {p: p.grad for p in model.parameters()}
    handles = [handle for name, block in blocks for handle in hooked(name, block)]
    try:
        start = now()
        output = model(*args, **kwargs)
        ends = [x for x in tree_leaves(output) if torch.is_tensor(x) and x.requires_grad]
        turn = now()
        torch.autograd.backward([x.float().sum() for x in ends])
        end = now()
    finally:
        for handle in handles:
            handle.remove()
        for p, grad in before.items():
            p.grad = grad
    return _seconds([name for name, _ in blocks], marks, start, turn, end)


def _seconds(
    names: Sequence[str], marks: Mapping[tuple[str, str], float], start: float, turn: float, end: float
) -> dict[str, float]:
    """Returns the seconds of each block, from the times at which the pass began, turned back and ended."""
    for name in names:
        if ("out", name) not in marks:
            raise InvalidArgumentError(
                f"measure: got a model that did not call {name}, expected a call of each block; pass within="
            )
    found = {name: marks["out", name] - marks["in", name] for name in names}
    for name in names:
        begun = marks.get(("back in", name))
        if begun is not None:
            # Without an input that requires a gradient, nothing marks the end of the block's backward pass but the end.
            found[name] += marks.get(("back out", name), end) - begun
    first, last = names[0], names[-1]
    found[BEFORE] = marks["in", first] - start + end - marks.get(("back out", first), end)
    found[BEHIND] = turn - marks["out", last]
    found[BEHIND] += marks.get(("back in", last), end) - turn
    return found


def _blocks(model: nn.Module, within: str | None, call: str) -> list[tuple[str, nn.Module]]:
    if within is None:
        found = blocks_of(model)
    else:
        known = dict(model.named_modules())
        if within not in known:
            raise InvalidArgumentError(
                f"{call}: got within={shown(within)}, which is no submodule, expected the module whose children are "
                "the blocks; look at model.named_modules()"
            )
        children = known[within].named_children()
        found = [(f"{within}.{key}" if within else key, child) for key, child in children]
    if not found:
        raise InvalidArgumentError(
            f"{call}: got a model without repeated blocks, expected a ModuleList or Sequential with several; pass "
            "within=, or name the modules to cut at"
        )
    return found
