"""Random training programs: what they consist of, how one is drawn from a seed, and how a failing one is made smaller.

A program is plain data: a graph of blocks (`training.models` builds it) and a loop (`training.runner` runs it). It is
a function of one integer, of the features that it may use, and of edits that made it smaller:

    generate(17)                                       # program 17, of all features
    generate(17, edits=("without checkpoint", "drop call 3", "steps 1"))

Every decision has a generator of its own, so that leaving a feature out changes no other decision.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

# What a block can be, with the feature that allows it; the first needs none.
KINDS = {
    "dense": "",
    "residual": "",
    "twice": "block.twice",
    "layer_norm": "block.layer_norm",
    "batch_norm": "block.batch_norm",
    "group_norm": "block.group_norm",
    "lstm": "block.rnn",
    "gru": "block.rnn",
    "conv": "block.conv",
    "attention": "block.attention",
    "cross": "memory",
    "film": "memory",
    "dropout": "block.dropout",
    "experts": "block.experts",
    "attribute": "block.attribute",
    "appends": "container.list",
    "cache": "container.dict",
    "running": "block.buffer",
    "scalar": "block.scalar",
    "double": "block.float64",
    "weight_norm": "block.weight_norm",
    "tokens": "block.tokens",
    "nested": "block.nested",
    "alias": "block.alias",
    "lora": "block.lora",
    "function": "block.function",
    "undefined": "block.undefined",
    "partly": "block.partly_used",
    "view": "block.view",
}
OPTIMIZERS = {
    "sgd": "",
    "momentum": "",
    "adamw": "",
    "amsgrad": "optimizer.amsgrad",
    "rmsprop": "optimizer.rmsprop",
    "adagrad": "optimizer.adagrad",
    "nadam": "optimizer.nadam",
    "adafactor": "optimizer.adafactor",
    "muon": "optimizer.muon",
}
# How likely each feature is to be used by a program in which it is allowed. Features of KINDS and OPTIMIZERS are drawn
# with the blocks and the optimizer.
CHANCES = {
    # the graph
    "memory": 0.4,
    "skip": 0.3,
    "repeat": 0.3,
    "shared": 0.2,
    "tied": 0.2,
    "unused_block": 0.15,
    "unused_argument": 0.3,
    "unused_output": 0.3,
    "step_skip": 0.15,
    "rank_skip": 0.08,
    "frozen": 0.25,
    "detach": 0.1,
    "no_grad_call": 0.1,
    "inplace": 0.2,
    "read_weight": 0.15,
    "grad_hook": 0.1,
    "checkpoint": 0.25,
    "checkpoint.reentrant": 0.1,
    "module_dict": 0.2,
    "output.dict": 0.25,
    "output.dataclass": 0.15,
    "output.tuple": 0.25,
    "input_grad": 0.1,
    # the loop
    "accumulate.no_sync": 0.25,
    "accumulate.each": 0.1,
    "accumulate.tree": 0.05,
    "two_forwards": 0.12,
    "two_backwards": 0.08,
    "dropped_forward": 0.1,
    "evaluate": 0.2,
    "exception": 0.1,
    "evaluate_between": 0.08,  # forward and backward
    "saved_hooks": 0.08,  # the program's own, around forward
    "half": 0.06,  # parameters of bfloat16
    "memory_format": 0.15,  # parameters whose dimensions lie in memory in another order
    "clip": 0.35,
    "clip.torch": 0.04,
    "autocast": 0.12,
    "mixed_precision": 0.08,
    "restage": 0.1,
    "freeze_later": 0.08,
    "save_load": 0.12,
    "ema": 0.1,
    "write": 0.12,  # into parameters and their views, between steps
    "grad_write": 0.12,  # the same for gradients
    "grad_keep": 0.12,  # slices of gradients outlive the step
    "swap": 0.08,  # other weights in the place of `p.data` for a while
    "scheduler": 0.15,
    "zeros": 0.15,
    "closure": 0.05,
    "model_zero_grad": 0.15,
    # the optimizer
    "groups": 0.3,
    "two_optimizers": 0.06,
    "optimizer_later": 0.1,
    "optimizer.subset": 0.08,
    "optimizer.frozen": 0.1,
    # the wrapper
    "units.all": 0.25,
    "units.some": 0.2,
    "units.nested": 0.05,
    "small_buckets": 0.4,
    "no_reshard": 0.15,
    "no_broadcast": 0.1,
    "init_differs": 0.15,
    "offload": 0.05,
}
FEATURES = tuple(dict.fromkeys([*CHANCES, *(name for some in (KINDS, OPTIMIZERS) for name in some.values() if name)]))
"""Every feature that a program can have."""

# Features that cannot stand together, in any training layer: the second one is left out.
APART = (
    ("mixed_precision", "autocast"),
    ("mixed_precision", "offload"),
    ("half", "mixed_precision"),
    ("half", "autocast"),
    ("accumulate.no_sync", "accumulate.each"),
    ("accumulate.no_sync", "accumulate.tree"),
    ("accumulate.each", "accumulate.tree"),
    ("accumulate.tree", "two_backwards"),
    ("two_forwards", "two_backwards"),
    ("clip", "clip.torch"),
    ("units.all", "units.some"),
    ("units.nested", "units.all"),
    ("units.nested", "units.some"),
    ("units.nested", "rank_skip"),
    ("checkpoint", "checkpoint.reentrant"),
    ("two_backwards", "checkpoint.reentrant"),  # the first pass frees what the second one needs
    ("closure", "two_backwards"),
    ("two_optimizers", "optimizer.subset"),
    ("two_optimizers", "restage"),
    ("restage", "grad_keep"),  # it forgets sharded gradients
    ("zeros", "grad_keep"),  # which then change
    ("restage", "rank_skip"),  # which stage 3 has not
)
# A block kind that does not keep the type of its input cannot be computed in another precision.
NOT_MIXED = ("double", "tokens", "attention", "lstm", "gru", "weight_norm", "batch_norm", "running")


@dataclass(frozen=True)
class Block:
    """A module of the graph."""

    number: int
    kind: str
    output: str = "tensor"  # or "dict", "dataclass", "tuple"
    frozen: str = ""  # or "all", "first"
    tied_to: int | None = None  # the block whose weight this one has too

    def __str__(self) -> str:
        options = [self.kind]
        options += [f"output={self.output}"] if self.output != "tensor" else []
        options += [f"frozen={self.frozen}"] if self.frozen else []
        options += [f"weight of b{self.tied_to}"] if self.tied_to is not None else []
        return f"b{self.number} = {', '.join(options)}"


@dataclass(frozen=True)
class Call:
    """One use of a block in forward."""

    number: int
    block: int
    checkpoint: str = ""  # or "nonreentrant", "reentrant"
    flags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        how = f"{self.checkpoint} checkpoint" if self.checkpoint else ""
        text = ", ".join([*([how] if how else []), *sorted(self.flags)])
        return f"call {self.number}: h = b{self.block}(h){'   # ' + text if text else ''}"


@dataclass(frozen=True)
class Program:
    """A model and a loop over it."""

    seed: int
    edits: tuple[str, ...]
    features: frozenset[str]
    world_size: int
    width: int
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    steps: int
    passes: int  # in a step
    optimizer: str
    output: str
    norm_type: float
    bucket_cap_mb: float
    when: int  # the step at which what happens once happens
    restage_by: int

    def __contains__(self, feature: str) -> bool:
        return feature in self.features

    def __str__(self) -> str:
        edits = f", edits={self.edits!r}" if self.edits else ""
        rows = [f"generate({self.seed}{edits}):", f"  {self.world_size} ranks, width {self.width}"]
        used = {call.block for call in self.calls}
        rows += [f"  {block}{'' if block.number in used else '   # never called'}" for block in self.blocks]
        rows += [f"  {call}" for call in self.calls]
        rows.append(f"  return {self.output}")
        rows.append(
            f"  {self.steps} steps of {self.passes} passes, {self.optimizer}; bucket_cap_mb={self.bucket_cap_mb}"
        )
        rows.append(f"  features: {', '.join(sorted(self.features)) or 'none'}")
        return "\n".join(rows)


class Draw:
    """Decisions of one program, each from a generator of its own."""

    def __init__(self, seed: int, allowed: Collection[str]) -> None:
        self.seed, self.allowed = seed, allowed

    def dice(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def features(self) -> set[str]:
        found = {name for name, p in CHANCES.items() if name in self.allowed and self.dice(name).random() < p}
        for first, second in APART:
            if first in found:
                found.discard(second)
        return found

    def kind(self, name: str, kinds: dict[str, str], features: set[str]) -> str:
        """One of the kinds; a feature of CHANCES must have been drawn, any other be allowed."""
        narrow = not features.isdisjoint({"mixed_precision", "half"})
        usable = [kind for kind in kinds if not narrow or kind not in NOT_MIXED]
        chosen = self.dice(name).choice(usable)
        needed = kinds[chosen]
        ok = not needed or (needed in features if needed in CHANCES else needed in self.allowed)
        return chosen if ok else self.dice(f"{name} else").choice([kind for kind in kinds if not kinds[kind]])


def generate(
    seed: int,
    allowed: Collection[str] = FEATURES,
    edits: tuple[str, ...] = (),
    kinds: dict[str, str] = KINDS,
    sizes: tuple[int, ...] = (2, 3, 3, 4, 5),
) -> Program:
    """The program of a seed, made of the allowed features and changed by the edits.

    Args:
        kinds: what its blocks can be.
        sizes: how many blocks it can have.
    """
    without = {edit.removeprefix("without ") for edit in edits if edit.startswith("without ")}
    draw = Draw(seed, [name for name in allowed if name not in without])
    features = draw.features()
    blocks = tuple(_block(draw, number, features, kinds) for number in range(draw.dice("blocks").choice(sizes)))
    dice = draw.dice("sizes")
    several = any(name.startswith("accumulate.") for name in features)
    program = Program(
        seed=seed,
        edits=edits,
        features=frozenset(features),
        world_size=dice.choice((2, 3, 3, 3, 4, 5)),
        width=dice.choice((4, 4, 6, 8)),
        blocks=blocks,
        calls=_calls(draw, blocks, features),
        steps=dice.choice((2, 2, 3)) + ("restage" in features),
        passes=dice.choice((2, 2, 3, 4)) if several else 1,
        optimizer=draw.kind("optimizer", OPTIMIZERS, features),
        output=draw.dice("output").choice(_outputs(features)),
        norm_type=dice.choice((2.0, 2.0, 2.0, float("inf"), 1.0)),
        bucket_cap_mb=dice.choice((0.00005, 0.0002, 0.001)) if "small_buckets" in features else 25.0,
        when=dice.randrange(2),
        restage_by=dice.choice((1, 2, 3)),
    )
    for edit in edits:
        program = _edited(program, edit)
    return _finished(program)


def _outputs(features: set[str]) -> list[str]:
    return ["tensor", *(name.removeprefix("output.") for name in sorted(features) if name.startswith("output."))]


def _block(draw: Draw, number: int, features: set[str], kinds: dict[str, str]) -> Block:
    dice = draw.dice(f"block {number}")
    chances = [dice.random() for _ in range(4)]
    tied = number - 1 if "tied" in features and number and chances[0] < 0.5 else None
    frozen = "" if "frozen" not in features or chances[1] > 0.4 else ("all" if chances[2] < 0.6 else "first")
    kind = draw.kind(f"kind {number}", kinds, features)
    return Block(number, kind, draw.dice(f"output {number}").choice(_outputs(features)), frozen, tied)


def _calls(draw: Draw, blocks: tuple[Block, ...], features: set[str]) -> tuple[Call, ...]:
    order = [block.number for block in blocks]
    if "unused_block" in features and len(order) > 1:
        order.remove(draw.dice("unused").choice(order))
    for again in range(2 if "repeat" in features else 0):
        dice = draw.dice(f"repeat {again}")
        order.insert(dice.randrange(len(order) + 1), dice.choice(order))
    return tuple(_call(draw, number, blocks[block], features) for number, block in enumerate(order))


_PER_CALL = {
    "unused_argument": 0.5,
    "unused_output": 0.5,
    "skip": 0.5,
    "step_skip": 0.3,
    "rank_skip": 0.3,
    "detach": 0.3,
    "no_grad_call": 0.3,
    "inplace": 0.5,
    "read_weight": 0.4,
    "grad_hook": 0.4,
    "memory": 0.6,
}
NO_GRAPH = {"no_grad_call", "memory"}  # of a frozen block: torch refuses to checkpoint what no gradient comes from


def _call(draw: Draw, number: int, block: Block, features: set[str]) -> Call:
    flags = {name for name, p in _PER_CALL.items() if name in features and draw.dice(f"{name} {number}").random() < p}
    dice = draw.dice(f"call {number}")
    style = dice.choice(("positional", "keywords", "nested"))
    flags |= {style} if style != "positional" else set()
    how = "nonreentrant" if "checkpoint" in features else "reentrant" if "checkpoint.reentrant" in features else ""
    if dice.random() > 0.5 or block.kind in ("cache", "view"):  # which a second forward pass finds written
        how = ""
    if how == "reentrant" and (block.output not in ("tensor", "tuple") or "nested" in flags or flags >= NO_GRAPH):
        how = ""
    return Call(number, block.number, how, frozenset(flags))


# ---- making smaller ----------------------------------------------------------------------------------------------


def _edited(program: Program, edit: str) -> Program:
    what, _, value = edit.rpartition(" ")
    if what == "without":
        return program
    if what == "drop call":
        return replace(program, calls=tuple(c for c in program.calls if c.number != int(value)))
    if what == "plain call":
        plain = {c.number: Call(c.number, c.block) for c in program.calls if c.number == int(value)}
        calls = tuple(plain.get(c.number, c) for c in program.calls)
        return replace(program, calls=calls)
    if what == "plain block":
        blocks = tuple(Block(b.number, "dense") if b.number == int(value) else b for b in program.blocks)
        return replace(program, blocks=blocks)
    if what == "drop block":
        blocks = tuple(b for b in program.blocks if b.number != int(value))
        return replace(program, blocks=blocks, calls=tuple(c for c in program.calls if c.block != int(value)))
    if what == "optimizer":
        return replace(program, optimizer=value)
    return replace(program, **{what: int(value)})


def _finished(program: Program) -> Program:
    """Keeps what fits together after edits."""
    there = {block.number for block in program.blocks}
    blocks = tuple(replace(b, tied_to=b.tied_to if b.tied_to in there else None) for b in program.blocks)
    program = replace(program, blocks=blocks)
    kinds = {block.kind for block in blocks}
    if "scalar" in kinds and program.optimizer == "adafactor":  # divides by the number of elements
        program = replace(program, optimizer="adamw")
    trained = [name for name in ("accumulate.no_sync", "accumulate.each", "accumulate.tree") if name in program]
    return replace(program, features=program.features - set(trained)) if program.passes == 1 else program


def _smaller(program: Program) -> Iterator[str]:
    """Edits that may keep a failure, the boldest first."""
    yield from (f"drop block {block.number}" for block in program.blocks if len(program.blocks) > 1)
    yield from (f"drop call {call.number}" for call in program.calls)
    yield from (f"without {name}" for name in sorted(program.features))
    yield from (f"steps {n}" for n in range(1, program.steps))
    yield from (f"passes {n}" for n in range(1, program.passes))
    yield from (f"world_size {n}" for n in (2, 3) if n < program.world_size)
    yield from (f"plain block {b.number}" for b in program.blocks if replace(b, kind="") != Block(b.number, ""))
    yield from (f"plain block {b.number}" for b in program.blocks if b.kind != "dense")
    yield from (f"plain call {c.number}" for c in program.calls if c.flags or c.checkpoint)
    yield from (["optimizer sgd"] if program.optimizer != "sgd" else [])
    yield from (["width 4"] if program.width != 4 else [])


def shrunk(program: Program, fails: Callable[[Program], Any], allowed: Collection[str] = FEATURES) -> Program:
    """The program with as many edits as keep it failing."""
    found = True
    while found:
        found = False
        for edit in list(_smaller(program)):
            smaller = generate(program.seed, allowed, (*program.edits, edit))
            if replace(smaller, edits=()) != replace(program, edits=()) and smaller.calls and fails(smaller):
                program, found = smaller, True
                break
    return program
