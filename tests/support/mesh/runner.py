"""Runs a program of `mesh.programs` on its meshes, and compares it with one process that runs the plain model.

The whole batch in one pass must give the same numbers but for rounding; one pass for each micro-batch, added as the
documentation says, the same bits where that promises them.
"""

from __future__ import annotations

import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ringcomm
from ringcomm.context import positions, ring_attention, shard_sequence
from ringcomm.errors import InvalidArgumentError, RingcommError, UnsupportedError
from ringcomm.modules.shard_spec import ShardSpec, part_of, take
from ringcomm.tensor_parallel import Colwise
from tests.support.mesh.models import MeshNet, batch, build, build_on_meta, loss_of
from tests.support.mesh.programs import Place, Program, name_of, shrunk
from tests.support.training.models import Wrapper
from tests.support.training.runner import Failure, clip_by_exact_norm, same_bits

CALL_LIMIT_S = 20.0
PROGRAM_LIMIT_S = 60
REFUSALS = (InvalidArgumentError, UnsupportedError)
NO_LIMIT = 1e9  # of a norm
ROUNDING = 4e-16  # of a float64, relative

# `eps` keeps rounding errors of gradients that are zero, such as those of keys' biases, from steering.
_MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-3),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01, amsgrad=True, eps=1e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, eps=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, eps=1e-3),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01, eps=1e-3),
}


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": params}]
    if "groups" in program:
        first, second = ([p for p in params if (p.ndim > 1) is wide] for wide in (True, False))
        groups = [{"params": first}, {"params": second, "lr": 0.03, "weight_decay": 0.0}]
    return _MAKERS[program.model.optimizer](groups)


def _max_norm(program: Program) -> float:
    return 0.3 if "clip" in program else NO_LIMIT


@dataclass
class Seen:
    """What a run gives.

    Attributes:
        losses: of every pass.
        weights: by name: which part of the whole, and its values.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, tuple[ShardSpec, torch.Tensor]] = field(default_factory=dict)


# ---- one process -------------------------------------------------------------------------------------------------


def plain(program: Program, places: list[Place] | None = None, scale: float = 1.0) -> Seen:
    """One process: the whole batch in each pass; or, with ``places``, the micro-batches of all ranks of each step's.
    ``scale`` multiplies the weights before the first step."""
    seen, model = Seen(), build(program)
    if scale != 1.0:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
    optimizer = _optimizer(program, model)
    params = list(model.parameters())
    for step in range(program.model.steps):
        place = None if places is None else place_of(program, step)
        if place is None:
            for number in range(program.passes):
                loss = _loss(model, step, *batch(program, step, number))
                loss.backward()
                seen.losses.append(float(loss.detach()))
        else:
            _micro_batched(program, model, step, place, seen)
        seen.norms.append(float(clip_by_exact_norm(params, _max_norm(program), program.model.norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    if "evaluate" in program:
        with torch.no_grad():
            model.eval()
            seen.losses += [float(each) for each in _losses(program, model, places)]
    seen.weights = {name: (ShardSpec(), p.detach()) for name, p in model.named_parameters(remove_duplicate=False)}
    return seen


def _losses(program: Program, model: MeshNet, places: list[Place] | None) -> list[torch.Tensor]:
    """Of an evaluation."""
    whole = batch(program, 99, 0)
    if places is None:
        return [_loss(model, 0, *whole)]
    place = places[-1]
    by_rank = zip(*(x.chunk(place.data) for x in whole), strict=True)
    return [_mean([_in_shares(program, place, model, rows)[0] for rows in by_rank])]


def _loss(model: nn.Module, step: int, x: torch.Tensor, y: torch.Tensor, *keep: torch.Tensor) -> torch.Tensor:
    return loss_of(model(x, step, *keep), y)


def _in_shares(
    program: Program, place: Place, model: MeshNet, rows: Sequence[torch.Tensor], step: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a rank's rows, and those of its micro-batches, which count as much as their shares."""
    found = []
    for some in zip(*(x.tensor_split(min(len(x), place.microbatches)) for x in rows), strict=True):
        share, loss = Fraction(len(some[0]), len(rows[0])), _loss(model, step, *some)
        if "bare" not in program:
            loss = loss / share.denominator if share.numerator == 1 else loss * float(share)
        found.append(loss)
    return sum([each.detach() for each in found[1:]], found[0].detach()), found


def _micro_batched(program: Program, model: MeshNet, step: int, place: Place, seen: Seen) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    by_rank: list[list[torch.Tensor | None]] = []
    sums: list[list[torch.Tensor]] = [[] for _ in range(program.passes)]
    for rank in range(place.data):
        micro: list[list[torch.Tensor | None]] = []
        for number in range(program.passes):
            rows = [each.chunk(place.data)[rank] for each in batch(program, step, number)]
            total, losses = _in_shares(program, place, model, rows, step)
            micro += [[*torch.autograd.grad(loss, params, allow_unused=True)] for loss in losses]
            sums[number].append(total)
        by_rank.append(_in_tree(micro) if "tree" in program else _in_turn(micro))
    seen.losses += [float(_mean(each)) for each in sums]
    for p, *grads in zip(params, *by_rank, strict=True):
        there = [torch.zeros_like(p) if grad is None else grad for grad in grads]
        p.grad = _mean(there) if any(grad is not None for grad in grads) else None


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    count = len(values)
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0] / count


def _added(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def _in_turn(each: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    total = each[0]
    for other in each[1:]:
        total = _added(total, other)
    return total


def _in_tree(each: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    while len(each) > 1:
        each = [_added(a, b) for a, b in zip(each[::2], each[1::2], strict=True)]
    return each[0]


def place_of(program: Program, step: int) -> Place:
    """Where a step runs: the first at the first place, the others at the last one."""
    return program.places[0 if step == 0 else -1]


def has_bits(program: Program) -> bool:
    """Whether the documentation promises the bits of one process with the same micro-batches."""
    kinds = {block.kind for block in program.model.blocks}
    for place in program.places:
        passes = min(place.microbatches, program.rows // place.data) * program.passes
        if place.size("tp", "cp") > 1 or place.carry or (place.data > 1 and "tree" not in program):
            return False
        if "tree" in program and (passes & (passes - 1) or place.data & (place.data - 1)):
            return False
        if place.schedule == "zero-bubble" and "function" in kinds:
            return False
        if place.size("pp") > 1 and "exact" not in program and _is_tied(program):
            return False
    return "each" not in program


def _is_tied(program: Program) -> bool:
    tied = any(block.tied_to is not None for block in program.model.blocks)
    return tied or "tied_head" in program or "root.gain" in program  # which blocks on several stages use


# ---- a mesh ------------------------------------------------------------------------------------------------------


class Job:
    """A rank's part of a program's model, at one place."""

    def __init__(self, program: Program, place: Place, comm: ringcomm.Communicator, loaded: bool) -> None:
        self.program, self.place = program, place
        self.mesh = mesh = ringcomm.init_mesh(dict(place.axes), comm=comm)
        how: dict[str, Any] = {"units": Wrapper} if "units" in program else {}
        if "meta" in program:
            model, fill = build_on_meta(program)
            how |= {"init_fn": False if loaded and not [*model.buffers()] else fill}
        else:
            model = build(program)
        if place.size("cp") > 1:
            self.cut_context(model)
        if place.size("tp") > 1:
            cut: dict[str, Any] = {"sequence_dim": 1} if "sequence_parallel" in program else {}
            cut |= {"overlap": True} if "overlap" in program else {}
            ringcomm.parallelize(model, self.plan(), mesh["tp"], verify="verify" in program, **cut)
        self.number = 0  # of those with other rows; sums over shard come before those over replicate
        for name in ("dp", "replicate", "shard"):
            self.number = self.number * place.size(name) + mesh.coordinates.get(name, 0)
        self.model: nn.Module = model if "bare" in program else self.pipeline(model)
        if "assign" in program:
            self.model.load_state_dict({k: x.clone() for k, x in self.model.state_dict().items()}, assign=True)
        self.optimizer = _optimizer(program, self.model)
        ringcomm.shard(
            self.model,
            self.optimizer,
            place.stage,
            mesh=mesh,
            bucket_cap_mb=program.model.bucket_cap_mb,
            reshard_after_forward="no_reshard" not in program,
            accumulation="tree" if "tree" in program else "sequential",
            **how,
        )

    def plan(self) -> dict[str, Any]:
        """Of `ringcomm.parallelize`."""
        styles = {"colwise 2": Colwise(parts=2), "colwise 3": Colwise(parts=3)}
        model, found = self.program.model, {}
        for number, name, style in self.program.styles:
            body = f"{name_of(model, number)}.body"
            found[f"{body}.{name}" if name else body] = styles.get(style, style)
        if "text" in self.program:
            found |= {"stem.token": "vocab", "head": "colwise_gather_output"}
        return found

    def cut_context(self, model: MeshNet) -> None:
        """Tells the model what it has to know."""
        comm = self.mesh["cp"]
        if "text" in self.program:
            model.stem.places = positions(self.program.length, comm)
        if "ring_attention" in self.program:
            for block in model.modules():
                if hasattr(block, "attend"):
                    block.attend = partial(ring_attention, comm=comm, causal=True)

    def pipeline(self, model: MeshNet) -> ringcomm.Pipeline:
        """Over pp, or of one stage."""
        place = self.place
        order = ["stem", "blocks", "head"] if "root.late" in self.program else []
        stages = ringcomm.split(model, place.cuts, carry=place.carry, order=order)
        return ringcomm.Pipeline(
            stages,
            self.mesh["pp"] if "pp" in self.mesh.names else ringcomm.init(0, 1),
            microbatches=place.microbatches,
            schedule=place.schedule,
            loss=loss_of,
            ties="exact" if "exact" in self.program else "sum",
            static_shapes="static_shapes" in self.program,
        )

    def context(self) -> AbstractContextManager[None]:
        """For forward and backward passes."""
        if self.place.size("cp") == 1:
            return nullcontext()
        return ringcomm.context_parallel(self.mesh["cp"], local=True)

    def rows(self, step: int, number: int) -> list[Any]:
        """This rank's part of a batch."""
        found = [each.chunk(self.place.data)[self.number] for each in batch(self.program, step, number)]
        if self.place.size("cp") > 1:
            found = [shard_sequence(each, self.mesh["cp"]) for each in found]
        count = self.place.microbatches
        if "lists" in self.program and len(found[0]) % count == 0:
            return [[*each.tensor_split(count)] for each in found]
        return found

    def averaged(self, loss: torch.Tensor) -> float:
        """Over the ranks with other data."""
        loss = loss.detach().double().reshape(1).clone()
        for name in ("dp", "shard", "replicate", "cp"):
            if name in self.mesh.names:
                self.mesh[name].all_reduce(loss, "avg")
        return float(loss)

    def one_pass(self, step: int, number: int) -> float:
        """Forward and backward."""
        rows = self.rows(step, number)
        waits = number < self.program.passes - 1 and "each" not in self.program
        with ringcomm.no_sync(self.model) if waits else nullcontext(), self.context():
            if "bare" in self.program:
                loss = _loss(self.model, step, *rows)
                loss.backward()
            else:
                loss = self.model.step(*self.given(rows), **self.named(step, rows))
        return self.averaged(loss)

    def given(self, rows: list[Any]) -> tuple[Any, ...]:
        """The inputs on the ranks that need them."""
        few = "few_have_data" in self.program and 0 not in self.model.local_stages
        return () if few else (rows[0],)

    def named(self, step: int, rows: list[Any]) -> dict[str, Any]:
        """The other arguments."""
        _, target, *keep = rows
        found = {"target": target, **dict(zip(["keep"], keep, strict=False))}
        return found | ({"step": step} if "step_skip" in self.program else {})

    def train(self, steps: range, seen: Seen, began: list[int]) -> None:
        """Counts in ``began`` the steps that ended."""
        for step in steps:
            for number in range(self.program.passes):
                seen.losses.append(self.one_pass(step, number))
            norm = ringcomm.clip_grad_norm_(self.model, _max_norm(self.program), self.program.model.norm_type)
            seen.norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            began.append(step)
            if "restage" in self.program and step == steps[0]:
                ringcomm.restage(self.model, self.optimizer, (self.place.stage + 1 + self.program.seed % 3) % 4)

    def evaluate(self) -> float:
        """The loss."""
        rows = self.rows(99, 0)
        self.model.eval()
        with torch.no_grad(), self.context():
            if "bare" in self.program:
                return self.averaged(_loss(self.model, 0, *rows))
            return self.averaged(self.model.evaluate(*self.given(rows), **self.named(0, rows)).loss)

    def weights(self) -> dict[str, tuple[ShardSpec, torch.Tensor]]:
        """This rank's parts."""
        with ringcomm.whole(self.model):
            named = self.model.named_parameters(remove_duplicate=False)
            return {name: (part_of(p), p.detach().clone()) for name, p in named}


class Refused(Exception):
    """All ranks raised a sentence before the first step."""


def on_meshes(program: Program) -> list[Seen]:
    """What every rank of the last place saw, from the first step on.

    Raises: Refused, or what a rank raised.
    """
    before: Seen = Seen()
    with tempfile.TemporaryDirectory() as folder:
        path, last = Path(folder) / "saved", len(program.places) - 1
        for number, place in enumerate(program.places):
            first = 0 if number == 0 else 1
            steps = range(first, program.model.steps if number == last else 1)
            found = _at(program, place, steps, path if number else None, path if number < last else None)
            for seen in found:
                seen.losses, seen.norms = before.losses + seen.losses, before.norms + seen.norms
            wrong = next((each for each in found if (each.losses, each.norms) != (found[0].losses, found[0].norms)), 0)
            if wrong:
                raise AssertionError("ranks saw other losses or norms")
            before = found[0]
    return found


def _at(program: Program, place: Place, steps: range, load: Path | None, save: Path | None) -> list[Seen]:
    """Runs steps at a place."""
    began: list[int] = []
    raised: list[BaseException] = []

    def body(comm: ringcomm.Communicator) -> Seen:
        seen = Seen()
        try:
            job = Job(program, place, comm, load is not None)
            if load is not None:
                ringcomm.checkpoint.load(load, job.model, job.optimizer)
            job.train(steps, seen, began)
            if save is not None:
                ringcomm.checkpoint.save(save, job.model, job.optimizer)
            elif "evaluate" in program:
                seen.losses.append(job.evaluate())
            seen.weights = job.weights()
        except BaseException as error:
            raised.append(error)
            raise
        return seen

    try:
        return ringcomm.run_ranks(body, place.world_size, ranks="threads", timeout=CALL_LIMIT_S)
    except REFUSALS as error:
        everywhere = len(raised) == place.world_size and all(isinstance(each, RingcommError) for each in raised)
        if began or not everywhere:
            raise
        raise Refused(str(error)) from error


# ---- comparing ---------------------------------------------------------------------------------------------------


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)


def _whole_names(program: Program, expected: Seen, got: list[Seen]) -> str:
    missing = expected.weights.keys() - {name for each in got for name in each.weights}
    return f"no rank has {sorted(missing)[:3]}" if missing else ""


def difference(expected: Seen, got: Seen, equal: Callable[[torch.Tensor, torch.Tensor], bool]) -> str:
    """The first thing that a rank saw otherwise; empty: none."""
    for label, theirs, mine in (("loss", expected.losses, got.losses), ("norm", expected.norms, got.norms)):
        if len(theirs) != len(mine):
            return f"{len(mine)} {label}s of {len(theirs)}"
        for number, (x, y) in enumerate(zip(theirs, mine, strict=True)):
            if not equal(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)):
                return f"{label} {number} is {y!r}, expected {x!r}"
    for name, (part, mine) in got.weights.items():
        whole = expected.weights[name][1]
        theirs = whole if part.dim is None else take(whole, part, mine.shape[part.dim])
        if not equal(theirs, mine):
            far = float((theirs - mine).abs().max()) if theirs.shape == mine.shape else float("nan")
            return f"{name} is {far:.3g} away of {float(theirs.abs().max()):.3g}"
    return ""


class Runner:
    """Runs programs, and counts what was compared and refused.

    Attributes:
        unstable: programs that diverge, so that one process has other numbers itself when its weights are moved by
            their rounding error: there is nothing to compare, but for bits.
    """

    def __init__(self) -> None:
        self.programs = self.bitwise = self.unstable = 0
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, int] = {}

    def failure(self, program: Program) -> Failure | None:
        """How it fails."""
        self.programs += 1
        try:
            with _limited():
                got = on_meshes(program)
        except Refused as error:
            words = sentence(str(error))
            self.refused[words] += 1
            self.examples.setdefault(words, program.seed)
            return None
        except Exception as error:
            return Failure("mesh", type(error).__name__, (str(error).strip().splitlines() or [""])[0][:400])
        return self.compared(program, got)

    def compared(self, program: Program, got: list[Seen]) -> Failure | None:
        """With the whole batch, and bit by bit."""
        expected = plain(program)
        text = _whole_names(program, expected, got)
        text = text or next(filter(None, (difference(expected, each, _close) for each in got)), "")
        if text:
            moved = [plain(program, scale=1 + sign * ROUNDING) for sign in (1, -1)]
            if not any(difference(expected, each, _close) for each in moved):
                return Failure("mesh", "differs", text)
            self.unstable, text = self.unstable + 1, ""
        if has_bits(program):
            self.bitwise += 1
            expected = plain(program, [*program.places])
            text = next(filter(None, (difference(expected, each, same_bits) for each in got)), "")
        return Failure("mesh", "other bits", text) if text else None

    def shrunk(self, program: Program, failure: Failure) -> Program:
        """The smallest program found that fails like this one."""

        def fails(smaller: Program) -> bool:
            found = self.failure(smaller)
            return found is not None and alike(found) == alike(failure)

        return shrunk(program, fails)


def alike(failure: Failure) -> tuple[str, str]:
    """What failures of one cause share."""
    return failure.kind, "" if failure.kind in ("differs", "other bits") else failure.cause[2]


def sentence(text: str) -> str:
    """Without names and numbers."""
    text = re.sub(r"'[^']*'|\[[^\]]*\]|\([^)]*\)", "_", text.strip().splitlines()[0])
    return re.sub(r"\b(?:stem|head|blocks)[\w.]*|\b\d+\b|\b\w+\.\w[\w.]*", "_", text)[:230]


class _limited:
    """A limit for a program, where signals can be had."""

    def __enter__(self) -> None:
        self.is_main = threading.current_thread() is threading.main_thread()
        if self.is_main:
            signal.signal(signal.SIGALRM, self.ring)
            signal.alarm(PROGRAM_LIMIT_S)

    def __exit__(self, *_: object) -> None:
        if self.is_main:
            signal.alarm(0)

    @staticmethod
    def ring(*_: object) -> None:
        raise TimeoutError(f"the program did not end in {PROGRAM_LIMIT_S} s")
