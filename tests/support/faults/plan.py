"""What happens in one trial of the fault campaign: a program for all ranks, and what goes wrong in it.

Everything follows from a seed and the trial's number, so that a trial can be made again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

KINDS = ("killed", "stalled", "throws", "differs", "leaves", "none")
"""What a rank does: dies of a signal; stops; leaves with an exception; makes another call; leaves early; nothing."""

OPS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCE_OPS = ("sum", "max", "min")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
COUNTS = (1, 7, 1000, 1000, 10_000, 50_000)
SHORT_COUNTS = (1, 7, 1000)
TRAININGS = ("DistributedDataParallel", "stage 0", "stage 1", "stage 2", "stage 3")

STALL_LIMITS_S = (0.8, 1.2)
LIMIT_S = 5.0
"""Of calls in which nobody stalls: far more than any rank may take to hear of a fault."""


@dataclass(frozen=True)
class Call:
    """One collective as a rank makes it; ``root`` is a place in the group, ``count`` the elements of a rank's part."""

    op: str
    count: int = 0
    dtype: str = "int32"
    reduce_op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    visible: bool = False  # in memory of Communicator.empty


@dataclass(frozen=True)
class Step:
    """Calls, messages round a ring of the group's members, or a step of training. Group 0 is everybody."""

    what: str  # "calls", "messages", "training"
    group: int = 0
    mode: str = "sync"  # of calls: "sync", "async", "coalesced"; of messages: "chain", "exchange"
    calls: tuple[Call, ...] = ()
    count: int = 0  # elements of a message


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where and when."""

    kind: str
    rank: int
    step: int  # before it, or while it and the next ones run
    delay_s: float
    meanwhile: bool = False  # the rank goes on until the delay has passed
    calls: tuple[Call, ...] = ()  # made in place of the step
    words: tuple[str, ...] = ()  # what a message about the difference must contain
    way: str = ""  # of leaving: "closes" its communicator and ends, "stays" after closing it, "ends" without


@dataclass(frozen=True)
class Trial:
    """All of one trial."""

    seed: int
    number: int
    ranks: str  # "threads", "processes"
    face: str  # "ringcomm", "torch": the backend of torch.distributed
    groups: tuple[tuple[int, ...], ...]  # the members, in order; the first are all ranks
    training: str
    steps: tuple[Step, ...]
    fault: Fault
    limit_s: float
    shrinks: bool

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return len(self.groups[0])

    def __str__(self) -> str:
        fault = self.fault
        where = (
            f"step {fault.step} of {len(self.steps)} + {1e3 * fault.delay_s:.1f} ms{', meanwhile' * fault.meanwhile}"
        )
        details = [self.training, fault.way, " / ".join(fault.words), "shrinks" if self.shrinks else ""]
        return (
            f"seed {self.seed} trial {self.number}: rank {fault.rank} of {self.world_size} {self.ranks} over "
            f"{self.face} {fault.kind} at {where} ({self.steps[fault.step].what}); {', '.join(filter(None, details))}"
        )


def trial_of(seed: int, number: int) -> Trial:
    """The trial of that number: kinds take turns, and so do processes and threads."""
    chance = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    ranks = "processes" if kind == "killed" or number // len(KINDS) % 2 == 0 else "threads"
    torchs = ranks == "processes" and kind != "throws" and chance.random() < 0.25  # has no block that an error leaves
    world_size = chance.choice((2, 3, 4, 4, 5, 6, 8))
    groups = [tuple(range(world_size))]
    for _ in range(chance.choice((0, 1, 2)) if world_size > 2 else 0):
        members = chance.sample(range(world_size), chance.randint(2, world_size))
        groups.append(tuple(sorted(members) if torchs else members))  # torch sorts them
    meanwhile = ranks == "processes" and kind in ("killed", "stalled") and chance.random() < 0.5
    training = chance.choice(("torch's",) if torchs else TRAININGS) if chance.random() < 0.3 else ""
    length = chance.randint(30, 80) if meanwhile else chance.randint(3, 20)
    steps = [_step(chance, groups, training, torchs, kind == "stalled" or meanwhile) for _ in range(length)]
    steps.append(Step("calls", calls=(Call("all_reduce", 7),)))
    steps.append(Step("calls", calls=(Call("barrier"),)))  # whoever went on alone hears of it here, at the latest
    shrinks = not torchs and not meanwhile and kind != "none" and chance.random() < 0.4
    fault = _fault(chance, kind, groups, steps, meanwhile, shrinks, ranks)
    limit_s = round(chance.uniform(*STALL_LIMITS_S), 2) if kind == "stalled" else LIMIT_S
    face = "torch" if torchs else "ringcomm"
    return Trial(seed, number, ranks, face, tuple(groups), training, tuple(steps), fault, limit_s, shrinks)


def _step(chance: random.Random, groups: Sequence[tuple[int, ...]], training: str, torchs: bool, short: bool) -> Step:
    if training and chance.random() < 0.6:
        return Step("training")
    group = chance.randrange(len(groups))
    counts = SHORT_COUNTS if short else COUNTS
    if chance.random() < 0.25:
        return Step("messages", group, chance.choice(("chain", "exchange")), count=chance.choice(counts))
    mode = chance.choice(("sync", "sync", "async", "coalesced"))
    size = len(groups[group])
    calls = [_call(chance, size, counts, torchs) for _ in range(1 if mode == "sync" else chance.randint(2, 5))]
    return Step("calls", group, mode, tuple(calls))


def _call(chance: random.Random, size: int, counts: Sequence[int], torchs: bool) -> Call:
    op = chance.choice(OPS)
    if op == "barrier":
        return Call(op)
    call = Call(op, chance.choice(counts), chance.choice(DTYPES))
    if op in REDUCING:
        call = replace(call, reduce_op=chance.choice(REDUCE_OPS))
    if op in ROOTED:
        call = replace(call, root=chance.randrange(size))
    if op in ("all_reduce", "all_gather", "broadcast") and not torchs:
        call = replace(call, algorithm=chance.choice(("auto", "auto", "ring", "direct")), visible=chance.random() < 0.3)
    return call


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def _fault(
    chance: random.Random,
    kind: str,
    groups: Sequence[tuple[int, ...]],
    steps: Sequence[Step],
    meanwhile: bool,
    shrinks: bool,
    ranks: str,
) -> Fault:
    step = chance.randrange(len(steps))
    rank = chance.randrange(len(groups[0]))
    delay_s = chance.uniform(0, 0.03) if meanwhile or chance.random() < 0.5 else 0.0
    if kind == "differs":
        fits = [i for i, each in enumerate(steps[:-1]) if each.what != "messages" and not (shrinks and each.group)]
        step = chance.choice(fits)
        rank = chance.choice(groups[steps[step].group])
        calls, words = _changed(chance, steps[step], len(groups[steps[step].group]))
        return Fault(kind, rank, step, delay_s, calls=calls, words=words)
    way = (
        chance.choice(("closes", "stays", "ends") if ranks == "processes" else ("closes",)) if kind == "leaves" else ""
    )
    return Fault(kind, rank, step, delay_s, meanwhile, way=way)


def _changed(chance: random.Random, step: Step, size: int) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    """Other calls in place of a step's, and the words that tell them from these."""
    if step.what == "training":
        return (Call("all_reduce", 5, "int64", "min"),), ("int64",)
    at = chance.randrange(len(step.calls))
    call = step.calls[at]
    plain = replace(call, count=call.count or 5, algorithm="auto", visible=False)  # as any op can be called
    changes: list[Callable[[], Call]] = [lambda: replace(plain, op=_other(chance, OPS, call.op))]
    if call.op != "barrier":
        changes.append(lambda: replace(call, count=call.count + 1))
        changes.append(lambda: replace(call, dtype=_other(chance, DTYPES, call.dtype)))
    if call.op in REDUCING:
        changes.append(lambda: replace(call, reduce_op=_other(chance, REDUCE_OPS, call.reduce_op)))
    if call.op in ROOTED:
        changes.append(lambda: replace(call, root=(call.root + chance.randrange(1, size)) % size))
    pairs = [(i, j) for j, b in enumerate(step.calls) for i, a in enumerate(step.calls[:j]) if _words(a, b)]
    if pairs and chance.random() < 0.3:  # another order
        i, j = pairs[0]
        swapped = list(step.calls)
        swapped[i], swapped[j] = step.calls[j], step.calls[i]
        return tuple(swapped), _words(step.calls[i], step.calls[j])
    other = chance.choice(changes)()
    return (*step.calls[:at], other, *step.calls[at + 1 :]), _words(call, other)


def _other(chance: random.Random, known: Sequence[str], than: str) -> str:
    return chance.choice([each for each in known if each != than])


def _words(a: Call, b: Call) -> tuple[str, ...]:
    """What a message must say of two calls that differ."""
    if a.op != b.op:
        return a.op, b.op
    if a.dtype != b.dtype:
        return a.dtype, b.dtype
    if a.reduce_op != b.reduce_op:
        return a.reduce_op, b.reduce_op
    if a.root != b.root:
        return f"root {a.root}", f"root {b.root}"
    if a.count != b.count:
        return (str(a.count), str(b.count)) if a.op in ("all_reduce", "reduce", "broadcast") else (a.dtype,)
    return (a.algorithm, b.algorithm) if a.algorithm != b.algorithm else ()


# ---- the right values --------------------------------------------------------------------------------------------


def values(rank: int, salt: int, count: int, dtype: str) -> torch.Tensor:
    """A rank's own: whole numbers so small that sums over all ranks are exact in every type."""
    return ((torch.arange(count) * 3 + rank * 5 + salt * 7) % 11).to(getattr(torch, dtype))


def whole_count(call: Call, size: int) -> int:
    """Elements that a rank passes, of those that pass some."""
    return call.count * size if call.op in ("reduce_scatter", "scatter", "all_to_all") else call.count


def expected(call: Call, members: Sequence[int], me: int, salt: int) -> torch.Tensor | None:
    """What the member at place ``me`` must get; None: nothing that is defined."""
    if call.op == "barrier" or (call.op in ("reduce", "gather") and me != call.root):
        return None
    count = whole_count(call, len(members))
    part = slice(me * call.count, (me + 1) * call.count)
    if call.op in ("broadcast", "scatter"):
        sent = values(members[call.root], salt, count, call.dtype)
        return sent if call.op == "broadcast" else sent[part]
    all_values = torch.stack([values(rank, salt, count, call.dtype) for rank in members])
    if call.op in ("all_gather", "gather"):
        return all_values.flatten()
    if call.op == "all_to_all":
        return all_values[:, part].flatten()
    exact = all_values.to(torch.int64)
    reduced = {"sum": exact.sum(0), "max": exact.amax(0), "min": exact.amin(0)}[call.reduce_op]
    return (reduced[part] if call.op == "reduce_scatter" else reduced).to(getattr(torch, call.dtype))
