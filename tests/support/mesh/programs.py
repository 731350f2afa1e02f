"""Random programs for models that are cut: a model of `training.programs`, meshes, stages, and how it is trained there.

A program is a function of one integer and of edits that made it smaller; every decision has a generator of its own:

    generate(17)
    generate(17, edits=("without checkpoint", "place 0 tp 1", "drop block 2"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ringcomm.pipeline_parallel import schedules
from tests.support.training import programs
from tests.support.training.programs import Block, Call, Draw

# What a block can be: kinds of `training.models` and `mesh.models` whose results do not depend on how a batch is cut.
_NAMES = (
    "residual", "gated", "heads", "dense", "twice", "layer_norm", "group_norm", "film", "attribute", "appends",
    "cache", "scalar", "weight_norm", "tokens", "nested", "alias", "lora", "function", "undefined", "view",
    "mixture",
)  # fmt: skip
KINDS = {name: programs.KINDS.get(name, "") for name in _NAMES}
MIXING = {name: programs.KINDS[name] for name in ("lstm", "conv", "attention", "cross")}
"""What mixes tokens in ways that context parallel refuses."""
MODEL = (
    "memory", "skip", "repeat", "tied", "unused_block", "unused_argument", "unused_output", "step_skip", "frozen",
    "detach", "no_grad_call", "inplace", "read_weight", "grad_hook", "checkpoint", "module_dict", "output.dict",
    "output.dataclass", "output.tuple", "clip", "groups", "small_buckets", "no_reshard",
    "optimizer.amsgrad", "optimizer.rmsprop", "optimizer.adagrad", "optimizer.nadam",
    *{name for name in (*KINDS.values(), *MIXING.values()) if name and name != "memory"},
)  # fmt: skip
"""The features of `training.programs` that a program can have."""
CHANCES = {
    "pp": 0.6,
    "dp": 0.4,
    "tp": 0.4,
    "cp": 0.2,
    "text": 0.4,
    "tied_head": 0.6,
    "hook.collect": 0.12,
    "hook.change": 0.12,
    "resume": 0.25,
    "hybrid": 0.2,
    "few_have_data": 0.3,
    "inner_cut": 0.12,
    "sequence_parallel": 0.35,
    "overlap": 0.4,
    "verify": 0.08,
    "static_shapes": 0.1,
    "ring_attention": 0.3,  # called by the model itself
    "lists": 0.1,  # of micro-batches
    "evaluate": 0.25,
    "bare": 0.3,  # no pipeline where there is one stage
    "tree": 0.6,
    "accumulate": 0.15,
    "each": 0.3,  # pass reduces
    "assign": 0.05,
    "exact": 0.6,
    "forgotten": 0.02,  # what later stages need is not carried
    # code of the model itself, around its blocks
    "root.gain": 0.12,  # a parameter for each block
    "root.table": 0.12,  # a buffer
    "root.states": 0.12,  # a list of what comes out of the blocks
    "root.prompt": 0.12,  # tokens of the model's own in front
    "root.keep": 0.15,  # a mask that is an argument
    "root.second": 0.12,  # a second head with a loss of its own
    "root.late": 0.1,  # the head is registered first
    "hook.pre": 0.12,
    "hook.backward": 0.08,
    "meta": 0.15,  # built there
    "units": 0.2,  # of `shard`: blocks
    "restage": 0.15,  # behind the first step of a place
}
FEATURES = (*MODEL, *CHANCES)
SCHEDULES = tuple(name for name in schedules.SCHEDULES for _ in range(2 if name == "1f1b" else 1))
"""To draw from; the default is drawn twice as often."""
MOST_RANKS = 8
TOKEN_WISE = ("dense", "layer_norm", "group_norm", "attribute", "appends", "cache", "scalar", "weight_norm", "tokens",
              "film", "undefined", "nested", "alias")  # fmt: skip
"""Kinds whose ``linear`` may be cut and brought together again."""
LEAVE = ("appends", "cache", "view", "mixture")
"""Kinds that write into a container that they are given."""


@dataclass(frozen=True)
class Place:
    """A mesh, and how the model is trained on it."""

    axes: tuple[tuple[str, int], ...]
    stage: int
    schedule: str
    chunks: int
    microbatches: int
    cuts: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()

    def size(self, *names: str) -> int:
        """Of an axis, 1 without it; of several together."""
        return math.prod(dict(self.axes).get(name, 1) for name in names)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return math.prod(extent for _, extent in self.axes)

    @property
    def data(self) -> int:
        """Ranks, or groups of them, with other rows."""
        return self.size("dp", "replicate", "shard")

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={extent}" for name, extent in self.axes)
        how = f"{self.schedule}, {self.microbatches} micro-batches, stage {self.stage}"
        cuts = f", cut at {list(self.cuts)}" if self.cuts else ""
        return f"({axes}): {how}{cuts}{f', carry={list(self.carry)}' if self.carry else ''}"


@dataclass(frozen=True)
class Program:
    """A model, and where it is trained.

    Attributes:
        styles: of `ringcomm.parallelize`, by the number of a block and the name of a submodule of its body.
        rows: of the whole batch.
        passes: in a step.
    """

    seed: int
    edits: tuple[str, ...]
    model: programs.Program
    features: frozenset[str]
    places: tuple[Place, ...]
    styles: tuple[tuple[int, str, str], ...]
    hooks: tuple[tuple[int, str], ...]
    rows: int
    length: int
    passes: int

    def __contains__(self, feature: str) -> bool:
        return feature in self.features or feature in self.model

    @property
    def all_features(self) -> set[str]:
        """With those of the model and the places."""
        found = {*self.features, *self.model.features, *(f"block {block.kind}" for block in self.model.blocks)}
        found |= {f"optimizer {self.model.optimizer}"}
        for place in self.places:
            found |= {f"{name} {place.size(name)}" for name, _ in place.axes}
            found |= {f"stage {place.stage}", f"{place.world_size} ranks", f"{place.microbatches} micro-batches"}
            found |= {f"schedule {place.schedule}"} if place.size("pp") > 1 else set()
            rows = self.rows // place.data
            found |= {"micro-batches that do not divide"} if rows % min(rows, place.microbatches) else set()
            found |= {"micro-batches without rows"} if rows < place.microbatches else set()
            found |= {"carry"} if place.carry else set()
        return found

    def __str__(self) -> str:
        model = str(self.model).splitlines()[2:-1]
        edits = f", edits={self.edits!r}" if self.edits else ""
        rows = [f"generate({self.seed}{edits}):", f"  width {self.model.width}, {self.rows} rows of {self.length}"]
        rows += model + [f"  hook of b{number}: {what}" for number, what in self.hooks]
        rows += [f"  plan: {', '.join(f'b{number}.{name} {style}' for number, name, style in self.styles) or 'none'}"]
        rows += [f"  {place}" for place in self.places]
        rows.append(f"  {self.passes} passes; features: {', '.join(sorted(self.features | self.model.features))}")
        return "\n".join(rows)


def name_of(model: programs.Program, number: int) -> str:
    """Of a block, in the model."""
    if "module_dict" in model:
        return f"blocks.b{number}"
    return f"blocks.{[block.number for block in model.blocks].index(number)}"


# ---- drawing -----------------------------------------------------------------------------------------------------


def generate(seed: int, edits: tuple[str, ...] = ()) -> Program:
    """The program of a seed, changed by the edits."""
    without = {edit.removeprefix("without ") for edit in edits if edit.startswith("without ")}
    draw = Draw(seed, [name for name in FEATURES if name not in without])
    drawn = {name for name, p in CHANCES.items() if name in draw.allowed and draw.dice(f"mesh {name}").random() < p}
    places = [_place(draw, drawn, number) for number in range(1 + ("resume" in drawn))]
    for edit in edits:
        if edit.startswith("place "):
            places = _edited(places, edit)
    thirds = any(place.size("tp") == 3 for place in places)  # of a width and heads that 4 does not divide
    if thirds:
        places = [_edited([place], "place 0 tp 2")[0] if place.size("tp") == 4 else place for place in places]
    kinds = KINDS if "cp" in drawn else {**KINDS, **MIXING}
    inner = tuple(edit for edit in edits if not edit.startswith(("place ", "without ")))
    allowed = [name for name in MODEL if name not in without]
    model = programs.generate(seed, allowed, inner, kinds, (2, 2, 3, 3, 4, 4, 6))
    model = replace(model, steps=min(model.steps, 2))
    model = replace(model, width=12 if thirds else 8)
    features = _features(drawn, model, places)
    places = [_fitting(place, model, features) for place in places]
    model = _in_order(model, any(place.size("pp") > 1 for place in places))
    hooks = _hooks(draw, model, features)
    styles = _styles(draw, model, features, max(place.size("tp") for place in places))
    if not any(style == "sequence_region" for _, _, style in styles):  # the caller would have to cut the sequence
        features -= {"sequence_parallel", "overlap"}
    places = [_cut(draw, place, number, model, features, hooks) for number, place in enumerate(places)]
    return Program(
        seed=seed,
        edits=edits,
        model=model,
        features=frozenset(features),
        places=tuple(places),
        styles=styles,
        hooks=hooks,
        rows=_rows(draw, places, features),
        length=4 * math.lcm(*(place.size("cp") for place in places)) * (3 if thirds else 1),
        passes=2 if "accumulate" in features else 1,
    )


def _features(drawn: set[str], model: programs.Program, places: list[Place]) -> set[str]:
    """Without those that mean nothing."""
    found = set(drawn)
    needs = {"tied_head": "text", "overlap": "sequence_parallel", "ring_attention": "cp", "each": "accumulate"}
    if "memory" in model or any("skip" in call.flags for call in model.calls) or "cp" in found:
        found -= {"root.prompt"}  # of another length
    for name, other in needs.items():
        if other not in found:
            found.discard(name)
    if all(place.size("tp") == 1 for place in places):
        found -= {"sequence_parallel", "overlap", "verify"}
    if "hook.collect" in found or any(block.kind in LEAVE for block in model.blocks):
        found -= {"verify"}  # which runs blocks twice
    if any(place.size("pp") > 1 for place in places):
        found -= {"bare"}
    else:
        found -= {"inner_cut", "few_have_data", "exact", "forgotten", "static_shapes"}
    if "bare" in found:
        found -= {"lists"}
    if "step_skip" in model:
        found -= {"static_shapes"}  # the step is a plain value, and another one each time
    if "ring_attention" in found:
        found -= {"verify"}  # whose copy of a block has no communicator
    if all(place.data == 1 for place in places):
        found -= {"tree"}
    if "few_have_data" in found and "bare" not in found:
        found -= {"root.keep"}  # every rank has an argument then
    if "meta" in found:
        found -= {"assign", "verify"}  # there are no values before `shard`
    if "tied_head" in found or any(block.tied_to is not None for block in model.blocks):
        found -= {"assign"}  # which unties parameters, as torch's does
    return found


def _place(draw: Draw, drawn: set[str], number: int) -> Place:
    dice = draw.dice(f"place {number}")
    chosen = {
        "pp": dice.choice((2, 2, 2, 3, 4)),
        "dp": dice.choice((2, 2, 2, 3, 4)),
        "tp": dice.choice((2, 2, 2, 3, 4)),
    }
    chosen["cp"] = dice.choice((2, 2, 2, 2, 4))
    names = [name for name in ("cp", "pp", "tp", "dp") if name in drawn]
    if number:
        names = [name for name in names if dice.random() < 0.7] + [n for n in ("dp",) if dice.random() < 0.2]
    axes: dict[str, int] = {}
    for name in dict.fromkeys(names):
        extent = next((n for n in (chosen[name], 2) if n * math.prod(axes.values()) <= MOST_RANKS), 1)
        axes |= {name: extent} if extent > 1 else {}
    if "hybrid" in drawn and axes.get("dp", 1) % 2 == 0:
        half = axes.pop("dp") // 2
        axes |= {"replicate": 2, "shard": half} if dice.random() < 0.5 else {"replicate": half, "shard": 2}
    order = list(axes or {"dp": 1})
    dice.shuffle(order)
    schedule = dice.choice(SCHEDULES)
    return Place(
        axes=tuple((name, axes.get(name, 1)) for name in order),
        stage=dice.randrange(4),
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        microbatches=dice.choice((1, 2, 2, 2, 3, 4, 5)),
    )


def _edited(places: list[Place], edit: str) -> list[Place]:
    _, number, what, value = edit.split(" ")
    if what == "drop":
        return [place for i, place in enumerate(places) if len(places) == 1 or i != int(number)]
    found = [*places]
    if int(number) < len(found):
        place = found[int(number)]
        if what in ("stage", "microbatches"):
            found[int(number)] = replace(place, **{what: int(value)})
        elif what == "schedule":
            found[int(number)] = replace(place, schedule=value, chunks=1)
        else:
            axes = tuple((name, int(value) if name == what else extent) for name, extent in place.axes)
            found[int(number)] = replace(place, axes=axes)
    return found


def _fitting(place: Place, model: programs.Program, features: set[str]) -> Place:
    """With no more stages than there are places to cut the model at."""
    if "bare" in features:
        place = replace(place, microbatches=1, schedule="gpipe", chunks=1)
    most = 1 + len(_begins(model))
    pp, axes = place.size("pp"), dict(place.axes)
    if pp == 1:
        place = replace(place, schedule="gpipe", chunks=1)
    elif pp * place.chunks > most:
        place = replace(place, schedule="1f1b", chunks=1)
        axes["pp"] = min(pp, most)
    return replace(place, axes=tuple(axes.items()))


def _in_order(model: programs.Program, cut: bool) -> programs.Program:
    """Each stage of a pipeline calls its own modules: blocks that are called again are called at once. What a weight is
    read for outside of its block, no later stage can compute again. What is computed without gradients takes no hooks
    on them."""
    if any("no_grad_call" in call.flags for call in model.calls):
        model = replace(model, calls=tuple(replace(c, flags=c.flags - {"grad_hook"}) for c in model.calls))
    if not cut:
        return model
    calls = sorted(model.calls, key=lambda call: call.block)
    if any("skip" in call.flags for call in calls):
        calls = [replace(call, flags=call.flags - {"read_weight"}) for call in calls]
    return replace(model, calls=tuple(calls))


def _begins(model: programs.Program) -> list[str]:
    """Modules with which a stage may begin."""
    first: dict[int, Call] = {}
    for call in sorted(model.calls, key=lambda call: call.block):
        first.setdefault(call.block, call)
    usual = [name_of(model, n) for n, call in first.items() if not call.flags & {"step_skip", "no_grad_call"}]
    return [*usual, "head"]


def _cut(
    draw: Draw,
    place: Place,
    number: int,
    model: programs.Program,
    features: set[str],
    hooks: tuple[tuple[int, str], ...],
) -> Place:
    """Chooses the cuts, and what must be carried over them."""
    stages = place.size("pp") * place.chunks
    if stages == 1:
        return place
    names, dice = _begins(model), draw.dice(f"cuts {number}")
    chosen = sorted(dice.sample(range(len(names)), stages - 1))
    order = [name_of(model, block.number) for block in model.blocks] + ["head"]
    stage_of = {name: sum(order.index(names[i]) <= at for i in chosen) for at, name in enumerate(order)}
    carry: set[str] = set()
    last = stages - 1
    for call in model.calls:
        block = next(block for block in model.blocks if block.number == call.block)
        name = name_of(model, block.number)
        collects = (block.number, "collect") in hooks
        shown = block.output != "tensor" and "unused_output" not in call.flags
        carry |= {name} if stage_of[name] < last and (collects or shown) else set()
        carry |= {"stem"} if stage_of[name] and "memory" in call.flags else set()
    if any("skip" in call.flags for call in model.calls) or "root.states" in features:
        carry |= {"stem", *order[:-1]}
    cuts = [names[i] for i in chosen]
    if "inner_cut" in features:
        cuts, carry = _cut_inside(cuts, carry, model, order)
    if "forgotten" in features:
        carry = set()
    return replace(place, cuts=tuple(cuts), carry=tuple(sorted(carry)))


def _cut_inside(
    cuts: list[str], carry: set[str], model: programs.Program, order: list[str]
) -> tuple[list[str], set[str]]:
    """Moves one cut into its block, whose own input the later stage then needs, too."""
    inside = {"residual": "out", "gated": "linear", "weight_norm": "normed"}
    for i, name in enumerate(cuts):
        block = next((b for b in model.blocks if name_of(model, b.number) == name), None)
        calls = [call for call in model.calls if block is not None and call.block == block.number]
        if block is not None and block.kind in inside and len(calls) == 1 and not calls[0].checkpoint:
            before = ["stem", *order][: order.index(name) + 1]
            cuts[i] = f"{name}.body.{inside[block.kind]}"
            needed = before if "step_skip" in model else before[-1:]
            return cuts, {each for each in carry if each != name} | {*needed}
    return cuts, carry


def _hooks(draw: Draw, model: programs.Program, features: set[str]) -> tuple[tuple[int, str], ...]:
    called = {call.block for call in model.calls if not call.checkpoint}
    found = []
    for what in ("collect", "change", "pre", "backward"):
        for block in model.blocks:
            if f"hook.{what}" in features and block.number in called:
                found += [(block.number, what)] if draw.dice(f"hook {what} {block.number}").random() < 0.5 else []
    return tuple(found)


def _styles(draw: Draw, model: programs.Program, features: set[str], tp: int) -> tuple[tuple[int, str, str], ...]:
    """What of each block is cut over tp."""
    tied = {n for block in model.blocks if block.tied_to is not None for n in (block.number, block.tied_to)}
    read = {call.block for call in model.calls if "read_weight" in call.flags}
    found: list[tuple[int, str, str]] = []
    for block in model.blocks:
        dice = draw.dice(f"style {block.number}")
        if tp == 1 or block.number in tied | read or dice.random() < 0.15:
            continue
        styles = _PAIRS.get(block.kind, {})
        if block.kind in TOKEN_WISE and "sequence_parallel" not in features:
            styles = {"linear": dice.choice(("colwise_gather_output", "rowwise_split_input"))}
        elif block.kind in _REGIONS and "sequence_parallel" in features:
            styles = {**styles, **_REGIONS[block.kind]}
        elif "sequence_parallel" in features:
            styles = {}
        found += [(block.number, name, style) for name, style in styles.items()]
    return tuple(found)


_PAIRS = {
    "residual": {"linear": "colwise", "out": "rowwise"},
    "gated": {"up": "colwise 2", "linear": "rowwise"},
    "heads": {"": "heads", "qkv": "colwise 3", "q_norm": "summed", "linear": "rowwise"},
    "mixture": {"experts": "experts"},
}
_REGIONS = {
    "residual": {"": "sequence_region", "norm": "sequence"},
    "gated": {"": "sequence_region", "norm": "sequence"},
}


def _rows(draw: Draw, places: list[Place], features: set[str]) -> int:
    """Of the whole batch: as many on every rank, and for most programs a row for each micro-batch at least."""
    least = max(place.data * place.microbatches for place in places)
    step = math.lcm(*(place.data for place in places))
    if not features & {"lists", "static_shapes", "bare"} and draw.dice("short").random() < 0.15:
        least = step
    return step * (-(-least // step) + draw.dice("rows").randrange(2))


# ---- making smaller ----------------------------------------------------------------------------------------------


def _smaller(program: Program) -> Iterator[str]:
    for number, place in enumerate(program.places):
        yield from [f"place {number} drop 0"] if len(program.places) > 1 else []
        yield from (f"place {number} {name} 1" for name, extent in place.axes if extent > 1)
        yield from (f"place {number} {name} 2" for name, extent in place.axes if extent > 2)
    model = program.model
    yield from (f"drop block {block.number}" for block in model.blocks if len(model.blocks) > 1)
    yield from (f"drop call {call.number}" for call in model.calls)
    yield from (f"without {name}" for name in sorted(program.features | model.features))
    for number, place in enumerate(program.places):
        yield from (f"place {number} microbatches {n}" for n in (1, 2) if n < place.microbatches)
        yield from [f"place {number} stage 0"] if place.stage else []
        yield from [f"place {number} schedule gpipe"] if place.schedule != "gpipe" else []
    yield from (f"steps {n}" for n in range(len(program.places), model.steps))
    yield from (f"plain block {b.number}" for b in model.blocks if replace(b, kind="") != Block(b.number, ""))
    yield from (f"plain block {b.number}" for b in model.blocks if b.kind != "dense")
    yield from (f"plain call {c.number}" for c in model.calls if c.flags or c.checkpoint)
    yield from (["optimizer sgd"] if model.optimizer != "sgd" else [])


def shrunk(program: Program, fails: Callable[[Program], Any]) -> Program:
    """The program with as many edits as keep it failing."""
    found = True
    while found:
        found = False
        for edit in list(_smaller(program)):
            smaller = generate(program.seed, (*program.edits, edit))
            if replace(smaller, edits=()) != replace(program, edits=()) and smaller.model.calls and fails(smaller):
                program, found = smaller, True
                break
    return program
