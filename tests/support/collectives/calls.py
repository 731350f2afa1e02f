"""What each rank calls in a program, and what must come of it, worked out in one process.

Results of reductions are those of `reference`, bit for bit (any NaN equals any other); everything else keeps every bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.support.collectives.arrays import Memory, Rows
from tests.support.collectives.programs import ALGORITHMS, HUGE, MOVED_ONLY, Program, Step
from tests.support.reference import factor_of, ops_of, reduced, reduced_in_ring_order, values

HUGE_BYTES = 2 << 20
_MOST_ELEMENTS, _SLACK = 600_000, 65_537
_SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, 3e38, -3e38, 1e-45, 448.0, 65504.0, 1e-3)
Shape = tuple[int, ...]


# ---- one call ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sources:
    """The result of a receive from anyone: what each sender's message holds, and who has been received from."""

    messages: dict[int, torch.Tensor]
    seen: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Asked:
    """One call of one rank. ``result``: None, an int, the Memory or list of them that comes back, a new array's values,
    or Sources."""

    group: int
    step: int
    how: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    computed: bool = False

    def memories(self) -> list[Memory]:
        """All arrays that are passed, each once."""
        passed = [*self.args, *self.kwargs.values()]
        parts = [each for arg in passed for each in (arg if isinstance(arg, list) else [arg])]
        whole = [part.memory if isinstance(part, Rows) else part for part in parts]
        return list(dict.fromkeys(each for each in whole if isinstance(each, Memory)))

    def checked(self) -> int:
        """Elements that are compared after the call."""
        made = self.result.numel() if isinstance(self.result, torch.Tensor) else 0
        return made + sum(memory.before.numel() for memory in self.memories())

    def __str__(self) -> str:
        words = [_text(arg) for arg in self.args] + [f"{name}={_text(x)}" for name, x in self.kwargs.items()]
        name = "comm" if self.group == 0 else f"group{self.group}"
        return f"{name}.{self.method}({', '.join(words)})"


def _text(x: Any) -> str:
    return (
        f"[{', '.join(map(_text, x))}]" if isinstance(x, list) else str(x) if isinstance(x, (Memory, Rows)) else repr(x)
    )


# ---- values ------------------------------------------------------------------------------------------------------


@cache
def pool(dtype: str, wild: bool) -> torch.Tensor:
    """Values of which every array is a part."""
    count = _MOST_ELEMENTS + _SLACK
    if not wild and dtype not in MOVED_ONLY:
        return values(dtype, 0, count)
    kind = getattr(torch, dtype)
    found = values("uint8", 1, count * kind.itemsize).view(kind)
    if dtype == "bool":
        return values(dtype, 1, count)
    if kind.is_floating_point:
        picks = torch.randint(0, 2 * len(_SPECIAL), (count,), generator=torch.Generator().manual_seed(1))
        special = torch.tensor([*_SPECIAL, *[1.0] * len(_SPECIAL)], dtype=torch.float64).to(kind)
        bits = _BITS[kind.itemsize]
        found = torch.where(picks < len(_SPECIAL), special.view(bits)[picks], found.view(bits)).view(kind)
    return found


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Site:
    """One step on one communicator: the helpers of the functions below."""

    def __init__(self, step: Step, at: int, world_size: int, slot_bytes: int) -> None:
        self.step, self.at, self.world_size, self.slot_bytes = step, at, world_size, slot_bytes
        self.ranks = range(world_size)
        self.root = step.root % world_size
        self.dtype = getattr(torch, step.dtype)
        self.random = random.Random(step.seed)
        whole = min(HUGE_BYTES // self.dtype.itemsize, _MOST_ELEMENTS) // 3 // world_size
        self.rows = whole if step.count == HUGE else step.count
        names = ops_of("float32") if step.dtype in MOVED_ONLY else ops_of(step.dtype)
        if self.dtype.is_complex:
            names = ("sum", "avg")
        self.op = names[step.reduction % len(names)]
        algorithms = ALGORITHMS.get(step.op, ("auto",))
        self.algorithm = algorithms[step.algorithm % len(algorithms)]

    def shape(self, rows: int, scalar: bool = False) -> Shape:
        """Of ``rows`` rows, or a scalar where there may be one."""
        return () if scalar and self.step.dims == 0 else (rows, 3) if self.step.dims == 2 else (rows,)

    def values(self, rank: int, shape: Shape, index: int = 0) -> torch.Tensor:
        """What a rank passes as its ``index``-th array."""
        count = int(np.prod(shape, dtype=int))
        begin = (self.step.seed * 131 + rank * 10_007 + index * 1009) % _SLACK
        return pool(self.step.dtype, self.step.wild)[begin : begin + count].view(shape)

    def memory(self, before: torch.Tensor, after: torch.Tensor | None = None, computed: bool = False) -> Memory:
        return Memory(self.step, before, after, computed)

    def target(self, after: torch.Tensor, computed: bool = False) -> Memory:
        """Memory that is written only."""
        return Memory(self.step, torch.zeros_like(after), after, computed)

    def call(self, method: str, *args: Any, result: Any = None, computed: bool = False, **kwargs: Any) -> Asked:
        if self.algorithm != "auto":
            kwargs["algorithm"] = self.algorithm
        return Asked(self.step.group, self.at, self.step.how, method, args, kwargs, result, computed)

    def operator(self, rank: int) -> dict[str, Any]:
        """The arguments that name the reduction."""
        return {"op": self.op} | ({"factor": factor_of(rank)} if self.op == "premul_sum" else {})

    def reduced(self, ranks: Sequence[torch.Tensor], in_parts: bool = False) -> torch.Tensor:
        """The reduction of the ranks' arrays; ``in_parts``: the ring's chunks are the parts of a reduce_scatter."""
        if ranks[0].is_complex():
            return torch.view_as_complex(self.reduced([torch.view_as_real(x) for x in ranks], in_parts))
        if self.algorithm != "ring":
            return reduced(ranks, self.op)
        bits = _BITS[ranks[0].element_size()]  # which every index serves, whatever the type
        flat = [x.reshape(-1).view(bits) for x in ranks]
        chunks, total = self.chunks(flat[0], in_parts), torch.empty_like(flat[0])
        for chunk in self.ranks:
            mine = chunks == chunk
            parts = [x[mine].view(ranks[0].dtype) for x in flat]
            total[mine] = reduced_in_ring_order(parts, self.op, chunk).view(bits)
        return total.view(ranks[0].dtype).view(ranks[0].shape)

    def chunks(self, x: torch.Tensor, in_parts: bool) -> torch.Tensor:
        """Which chunk of the ring each element is in: as many in turn as fill a slot, in whole lines."""
        count, align = x.numel(), 64 // x.element_size()
        if in_parts:
            return torch.arange(count) // max(1, count // self.world_size)
        most = self.slot_bytes // x.element_size()
        windows = max(1, -(-count // (self.world_size * most)))
        even = -(-count // (windows * self.world_size))
        length = max(align, min(most, -(-even // align) * align))
        return torch.arange(count) // length % self.world_size

    def out(self, after: torch.Tensor, computed: bool = False) -> dict[str, Any]:
        """``out=`` where it is to be passed."""
        return {"out": self.target(after, computed)} if self.step.place == "out" else {}

    def sizes(self) -> list[int]:
        """Rows of uneven parts; some are none."""
        return [self.random.choice((0, 1, self.rows, self.rows // 2, self.rows + 1)) for _ in self.ranks]


# ---- the calls, by rank ------------------------------------------------------------------------------------------

Calls = list[list[Asked]]


def all_reduce(s: Site) -> Calls:
    xs = [s.values(r, s.shape(s.rows, scalar=True)) for r in s.ranks]
    total = s.reduced(xs)
    calls = []
    for r in s.ranks:
        if s.step.place == "in":
            x = s.memory(xs[r], total, True)
            calls.append([s.call("all_reduce", x, result=x, **s.operator(r))])
        else:
            out = s.target(total, True)
            calls.append([s.call("all_reduce", s.memory(xs[r]), result=out, out=out, **s.operator(r))])
    return calls


def all_reduce_coalesced(s: Site) -> Calls:
    rows = [s.rows, *s.sizes()[:2]]
    xs = [[s.values(r, s.shape(n), i) for i, n in enumerate(rows)] for r in s.ranks]
    totals = [s.reduced([mine[i] for mine in xs]) for i in range(len(rows))]
    calls = []
    for r in s.ranks:
        mine = [s.memory(x, total, True) for x, total in zip(xs[r], totals, strict=True)]
        calls.append([s.call("all_reduce_coalesced", mine, result=mine, **s.operator(r))])
    return calls


def reduce(s: Site) -> Calls:
    xs = [s.values(r, s.shape(s.rows, scalar=True)) for r in s.ranks]
    total = s.reduced(xs)
    calls = []
    for r in s.ranks:
        if r != s.root:
            calls.append([s.call("reduce", s.memory(xs[r]), s.root, **s.operator(r))])
        elif s.step.place == "in":
            x = s.memory(xs[r], total, True)
            calls.append([s.call("reduce", x, s.root, result=x, **s.operator(r))])
        else:
            out = s.target(total, True)
            calls.append([s.call("reduce", s.memory(xs[r]), s.root, result=out, out=out, **s.operator(r))])
    return calls


def reduce_scatter(s: Site) -> Calls:
    xs = [s.values(r, s.shape(s.rows * s.world_size)) for r in s.ranks]
    parts = s.reduced(xs, in_parts=True).split(s.rows) if s.rows else [xs[0]] * s.world_size
    calls = []
    for r in s.ranks:
        if s.step.place == "in":
            begin, end = r * s.rows, (r + 1) * s.rows
            x = s.memory(xs[r], torch.cat([xs[r][:begin], parts[r], xs[r][end:]]), True)
            out = Rows(x, begin, end)
            calls.append([s.call("reduce_scatter", x, result=out, out=out, **s.operator(r))])
        else:
            out = s.out(parts[r], True)
            result = out.get("out", parts[r])
            call = s.call("reduce_scatter", s.memory(xs[r]), result=result, computed=True, **out, **s.operator(r))
            calls.append([call])
    return calls


def reduce_scatter_list(s: Site) -> Calls:
    sizes = s.sizes()
    xs = [[s.values(r, s.shape(n), p) for p, n in enumerate(sizes)] for r in s.ranks]
    calls = []
    for r in s.ranks:
        part = s.reduced([mine[r] for mine in xs])
        inputs = [s.memory(x) for x in xs[r]]
        if s.step.place == "in":
            out = inputs[r] = s.memory(xs[r][r], part, True)
        else:
            out = s.target(part, True)
        calls.append([s.call("reduce_scatter_list", inputs, out, result=out, **s.operator(r))])
    return calls


def all_gather(s: Site) -> Calls:
    shape = s.shape(s.rows, scalar=True)
    xs = [s.values(r, shape) for r in s.ranks]
    stacked = torch.stack(xs)
    together = stacked if shape == () or s.step.seed % 2 else torch.cat(xs)
    calls = []
    for r in s.ranks:
        if s.step.place == "in" and shape:
            before = torch.zeros_like(stacked)
            before[r] = xs[r]
            out = s.memory(before.flatten(0, 1), torch.cat(xs))
            x = Rows(out, r * s.rows, (r + 1) * s.rows)
            calls.append([s.call("all_gather", x, result=out, out=out)])
        elif s.step.place == "out":
            out = s.target(together)
            calls.append([s.call("all_gather", s.memory(xs[r]), result=out, out=out)])
        else:
            result = stacked if shape == () else torch.cat(xs)
            calls.append([s.call("all_gather", s.memory(xs[r]), result=result)])
    return calls


def all_gather_list(s: Site) -> Calls:
    xs = [s.values(r, s.shape(n)) for r, n in enumerate(s.sizes())]
    calls = []
    for r in s.ranks:
        outputs = [s.target(x) for x in xs]
        x = s.memory(xs[r])
        if s.step.place == "in":
            outputs[r] = x
        calls.append([s.call("all_gather_list", x, outputs, result=outputs)])
    return calls


def broadcast(s: Site) -> Calls:
    xs = [s.values(r, s.shape(s.rows, scalar=True)) for r in s.ranks]
    mine = [s.memory(x, xs[s.root]) for x in xs]
    return [[s.call("broadcast", x, s.root, result=x)] for x in mine]


def gather(s: Site) -> Calls:
    shape = s.shape(s.rows, scalar=True)
    xs = [s.values(r, shape) for r in s.ranks]
    together = torch.stack(xs) if shape == () else torch.cat(xs)
    calls = []
    for r in s.ranks:
        out = s.out(together) if r == s.root else {}
        result = out.get("out", together) if r == s.root else None
        calls.append([s.call("gather", s.memory(xs[r]), s.root, result=result, **out)])
    return calls


def gather_list(s: Site) -> Calls:
    xs = [s.values(r, s.shape(n)) for r, n in enumerate(s.sizes())]
    calls = []
    for r in s.ranks:
        outputs = [s.target(x) for x in xs] if r == s.root else None
        calls.append([s.call("gather_list", s.memory(xs[r]), outputs, s.root, result=outputs)])
    return calls


def scatter(s: Site) -> Calls:
    whole = s.values(s.root, s.shape(s.rows * s.world_size))
    calls = []
    for r in s.ranks:
        part = whole[r * s.rows : (r + 1) * s.rows]
        out = s.out(part) if r == s.root else {"out": s.target(part)}
        x = s.memory(whole) if r == s.root else None
        calls.append([s.call("scatter", x, s.root, result=out.get("out", part), **out)])
    return calls


def scatter_list(s: Site) -> Calls:
    xs = [s.values(s.root, s.shape(n), p) for p, n in enumerate(s.sizes())]
    calls = []
    for r in s.ranks:
        out = s.target(xs[r])
        inputs = [s.memory(x) for x in xs] if r == s.root else None
        calls.append([s.call("scatter_list", inputs, out, s.root, result=out)])
    return calls


def all_to_all(s: Site) -> Calls:
    xs = [s.values(r, s.shape(s.rows * s.world_size)) for r in s.ranks]
    calls = []
    for r in s.ranks:
        after = torch.cat([x[r * s.rows : (r + 1) * s.rows] for x in xs])
        if s.step.place == "in":
            x = s.memory(xs[r], after)
            calls.append([s.call("all_to_all", x, result=x, out=x)])
        else:
            out = s.out(after)
            calls.append([s.call("all_to_all", s.memory(xs[r]), result=out.get("out", after), **out)])
    return calls


def all_to_all_uneven(s: Site) -> Calls:
    counts = [s.sizes() for _ in s.ranks]  # counts[r][p]: rows from r to p
    xs = [s.values(r, s.shape(sum(counts[r]))) for r in s.ranks]
    parts = [x.split(sent) for x, sent in zip(xs, counts, strict=True)]
    calls = []
    for r in s.ranks:
        after = torch.cat([mine[r] for mine in parts])
        given: dict[str, Any] = {"send_counts": counts[r]}
        if s.step.seed % 2:
            given["recv_counts"] = [sent[r] for sent in counts]
        out = s.out(after)
        calls.append([s.call("all_to_all", s.memory(xs[r]), result=out.get("out", after), **out, **given)])
    return calls


def all_to_all_list(s: Site) -> Calls:
    counts = [s.sizes() for _ in s.ranks]
    xs = [[s.values(r, s.shape(n), p) for p, n in enumerate(counts[r])] for r in s.ranks]
    calls = []
    for r in s.ranks:
        outputs = [s.target(mine[r]) for mine in xs]
        calls.append([s.call("all_to_all_list", [s.memory(x) for x in xs[r]], outputs, result=outputs)])
    return calls


def messages(s: Site) -> Calls:
    """Up to three messages from the root to another rank, which asks for their tags in an order of its own."""
    calls: Calls = [[] for _ in s.ranks]
    if s.world_size == 1:
        return calls
    source, target = s.root, (s.root + 1 + s.step.seed % (s.world_size - 1)) % s.world_size
    sent = [(tag, s.values(source, s.shape(n, scalar=True), tag)) for tag, n in enumerate([s.rows, *s.sizes()[:2]])]
    send, receive = ("isend", "irecv") if s.step.how == "later" else ("send", "recv")
    calls[source] = [s.call(send, s.memory(x), target, tag) for tag, x in sent]
    s.random.shuffle(sent)
    calls[target] = [s.call(receive, s.target(x), source, tag, result=source) for tag, x in sent]
    return calls


def from_anyone(s: Site) -> Calls:
    """A message to the root from everyone else; it takes them as they come."""
    tag = 100 + s.at  # of this step alone: another's messages may be here already
    xs = [s.values(r, s.shape(s.rows, scalar=True)) for r in s.ranks]
    send, receive = ("isend", "irecv") if s.step.how == "later" else ("send", "recv")
    calls = [[s.call(send, s.memory(x), s.root, tag)] for x in xs]
    came = Sources({r: x for r, x in enumerate(xs) if r != s.root})
    calls[s.root] = [s.call(receive, s.target(xs[s.root]), tag=tag, result=came) for _ in range(s.world_size - 1)]
    return calls


def barrier(s: Site) -> Calls:
    return [[s.call("barrier")] for _ in s.ranks]


CALLS: dict[str, Callable[[Site], Calls]] = {
    each.__name__: each
    for each in (
        *(all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_list),
        *(all_gather, all_gather_list, broadcast, gather, gather_list, scatter, scatter_list),
        *(all_to_all, all_to_all_uneven, all_to_all_list, messages, from_anyone, barrier),
    )
}


def calls_of(program: Program, slot_bytes: int) -> Calls:
    """The calls of every rank of the world, in order."""
    members = program.members()
    asked: Calls = [[] for _ in range(program.world_size)]
    for at, step in enumerate(program.steps):
        for ranks in members[step.group]:
            for rank, calls in zip(ranks, CALLS[step.op](Site(step, at, len(ranks), slot_bytes)), strict=True):
                asked[rank] += calls
    return asked
