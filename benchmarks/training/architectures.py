"""Which transformers models can be split in which way: tests every text family of the installed version, small, with
random values.

    OMP_NUM_THREADS=1 python -m benchmarks.training.architectures --write        # results/architectures.md
    OMP_NUM_THREADS=1 python -m benchmarks.training.architectures --only llama t5

Each family is built once (architecture_models.py) and trained for two steps by one process, in float64 if its code
supports it, and then by ranks that are threads. A cell says

    works    loss and weights after both steps are those of one process; the same tokens (generate)
    refused  every rank raised an error of ringcomm before the first step was done; the sentences are below the table
    wrong    other values
    error    anything else: another library's error, a limit of time, ranks that disagree, an error after the first step
    -        nothing to try: no plan, no tokens to generate, one process fails too

and main exits with status 1 if a cell is wrong or an error. Each family runs in its own process, with a time limit.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from benchmarks.training import architecture_models as models
from ringcomm.context import context_parallel, shard_sequence
from ringcomm.errors import AbortedError, RingcommError
from ringcomm.modules.shard_spec import part_of, take

COLUMNS = ("tp, its plan", "tp, our plan", "pp, middle", "pp, elsewhere", "cp", "together", "generate")
ROWS, LENGTH, STEPS, RATE = 4, 16, 2, 0.05
RESULTS = Path(__file__).resolve().parents[1] / "results" / "architectures.md"


# ---- one process ---------------------------------------------------------------------------------------------------


class _Types(TorchDispatchMode):
    """Records whether float32 is used in computations."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.narrow = self.narrow or (isinstance(made, torch.Tensor) and made.dtype == torch.float32)
        return made


class Family:
    """A family's model, and the results of one process."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.cuts: dict[str, dict[str, list[str]]] = {}  # by the name of a module: options for the split
        self._trained: dict[Any, tuple[list[float], dict[str, torch.Tensor]]] = {}
        try:
            self._build(torch.float64)
        except RuntimeError:  # the model mixes types, or uses float32's smallest number
            self._build(torch.float32)

    def _build(self, dtype: torch.dtype) -> None:
        self.model = models.build(self.name, self.kind, dtype)
        self.batches = [models.inputs_of(self.model, ROWS, LENGTH, step) for step in range(STEPS)]
        with _Types() as types:
            loss = copy.deepcopy(self.model)(**self.batches[0]).loss
        if not torch.isfinite(loss):
            raise ValueError(f"a loss of {loss.item()} in one process")
        self.tolerance = (1e-4 if types.narrow else 1e-9) if dtype == torch.float64 else 1e-3

    def trained(self, loss_of: Callable[[nn.Module, Any], torch.Tensor], pieces: int) -> Any:
        """Returns the losses, the final weights and how far each moved, from one process that takes batches in
        pieces."""
        key = (loss_of, pieces)
        if key not in self._trained:
            model, losses = copy.deepcopy(self.model), []
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for batch in self.batches:
                total = 0.0
                for i in range(pieces):
                    loss = loss_of(model, {k: x.chunk(pieces)[i] for k, x in batch.items()}) / pieces
                    loss.backward()
                    total += loss.item()
                losses.append(total)
                optimizer.step()
                optimizer.zero_grad()
            self._trained[key] = losses, values(model)
        return self._trained[key]

    def copies(self, world_size: int) -> list[nn.Module]:
        return [copy.deepcopy(self.model) for _ in range(world_size)]

    def compare(self, ranks: Sequence[tuple[list[float], Mapping[str, nn.Parameter]]], expected: Any) -> None:
        """Raises `Wrong` if the ranks' losses or weights differ, or no rank has a weight."""
        losses, weights = expected
        before, seen = values(self.model), set()
        most = max(float((x - before[name]).abs().max()) for name, x in weights.items() if x.numel())
        for rank, (found, parameters) in enumerate(ranks):
            for step, (a, b) in enumerate(zip(found, losses, strict=True)):
                if not abs(a - b) <= self.tolerance * max(abs(b), 1.0):
                    raise Wrong(f"rank {rank}: a loss of {a:.9g} in step {step}, expected {b:.9g}")
            for name, p in parameters.items():
                part, name = part_of(p), (part_of(p).names or (name,))[0]
                seen.add(name)
                wanted, start = weights[name], before[name]
                if part.dim is not None:
                    wanted, start = (take(x, part, p.shape[part.dim]) for x in (wanted, start))
                moved = float((wanted - start).abs().max()) if wanted.numel() else 0.0
                off = float((p.detach() - wanted).abs().max()) if wanted.numel() else 0.0
                if not off <= self.tolerance * max(moved, 1e-3 * most):
                    raise Wrong(f"rank {rank}: {name} moved by {moved:.2g} and is off by {off:.2g}")
        whole = named(self.model)
        missing = {id(x) for x in whole.values()} - {id(whole[name]) for name in seen if name in whole}
        if missing:
            raise Wrong(f"{len(missing)} parameters are on no rank")


class Wrong(Exception):
    """Raised for values that differ from one process's."""


class Nothing(Exception):
    """Raised if there is nothing to try."""


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in named(model).items()}


def own_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


# ---- ranks ---------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """Raised if every rank raised an error of ringcomm before the first step was done."""


class Failed(Exception):
    """Raised for all other errors."""


def on_ranks(world_size: int, fn: Callable[[Any, list[int]], Any]) -> list[Any]:
    """Returns the results of ``fn(comm, done)`` on ranks that are threads; ``done`` counts the completed steps.

    Raises:  Refused, Failed.
    """
    raised: dict[int, tuple[BaseException, int]] = {}

    def rank_main(comm: Any) -> Any:
        done: list[int] = []
        try:
            return fn(comm, done)
        except BaseException as error:
            raised[comm.rank] = error, len(done)
            raise

    try:
        return ringcomm.run_ranks(rank_main, world_size, ranks="threads", timeout=30)
    except BaseException as first:
        own = [error for error, _ in raised.values() if not isinstance(error, AbortedError)]
        error = next((each for each in own if not isinstance(each, RingcommError)), (own or [first])[0])
        refused = len(raised) == world_size and all(isinstance(each, RingcommError) for each, _ in raised.values())
        if refused and own and not any(done for _, done in raised.values()):
            raise Refused(str(error)) from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).splitlines()[0][:300] if str(error) else ""
        raise Failed(f"{type(error).__name__}: {said} ({Path(where.filename).name}:{where.lineno})") from error


def steps(
    model: nn.Module, batches: Sequence[Any], done: list[int], loss_of: Any = own_loss
) -> tuple[list[float], dict[str, nn.Parameter]]:
    """Trains a model with the code for one process."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        done.append(1)
    return losses, named(model)


def tensor(family: Family, plan: Any) -> None:
    ours = family.copies(2)

    def rank_main(comm: Any, done: list[int]) -> Any:
        return steps(ringcomm.parallelize(ours[comm.rank], plan, comm), family.batches, done)

    family.compare(on_ranks(2, rank_main), family.trained(own_loss, 1))


def own_plan(family: Family) -> None:
    if not getattr(family.model, "_tp_plan", None):
        raise Nothing("no plan of its own")
    return None


def our_plan(family: Family) -> dict[str, Any]:
    plan = models.plan_of(family.model)
    if not plan:
        raise Nothing("no pairs of layers known by name")
    return plan


def pipeline(family: Family, at: str) -> str:
    """Splits the model in two. It follows the advice of a refusal: the order of calls, and the names of carried
    values."""
    options = family.cuts.setdefault(at, {})
    while True:
        try:
            return _pipeline(family, at, options)
        except Refused as refused:
            named = re.search(r"depends on a result of (\S+) and (?:was not sent|is a keyword argument)", str(refused))
            if named is not None and named[1] not in options.get("carry", ()):
                options["carry"] = [*options.get("carry", ()), named[1]]
            elif "order=[...]" in str(refused) and "order" not in options and order_of(family, at):
                options["order"] = order_of(family, at)
            else:
                raise


def _pipeline(family: Family, at: str, options: Mapping[str, list[str]]) -> str:
    ours = family.copies(2)

    def rank_main(comm: Any, done: list[int]) -> Any:
        stages = ringcomm.split(ours[comm.rank], [at], **options)
        pipe = ringcomm.Pipeline(stages, comm, microbatches=2, ties="exact")
        mine = [*pipe.parameters()] or [nn.Parameter(torch.zeros(1))]  # a stage may have no parameters
        return _steps_of(pipe, torch.optim.SGD(mine, lr=RATE), family.batches, done)

    family.compare(on_ranks(2, rank_main), family.trained(own_loss, 2))
    return ", ".join([f"at {at}", *(f"{option}=" for option in options)])


def _steps_of(pipe: Any, optimizer: Any, batches: Sequence[Any], done: list[int]) -> Any:
    losses = []
    for batch in batches:
        losses.append(pipe.step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
        done.append(1)
    return losses, named(pipe)


def order_of(family: Family, at: str) -> list[str]:
    """Returns the ``order`` that a user passes if modules are registered in another order than they are called in."""
    model = copy.deepcopy(family.model)
    return models.order_of(model, at, lambda: own_loss(model, family.batches[0]))


def middle(family: Family) -> str:
    blocks = models.blocks_of(family.model)
    if len(blocks) < 2:
        raise Nothing("no blocks in a list")
    return blocks[len(blocks) // 2]


def elsewhere(family: Family) -> str:
    """Tries another boundary: of a block, of a module inside a block, or after all blocks."""
    known = [name for name, each in family.model.named_modules() if name and any(True for _ in each.parameters())]
    other = middle(family)
    known = [name for name in known[2:] if not f"{other}.".startswith(f"{name}.") and name != other]
    return known[zlib.crc32(family.name.encode()) % len(known)]


def together(family: Family, plan: Any) -> None:
    ours, at = family.copies(8), middle(family)

    def rank_main(comm: Any, done: list[int]) -> Any:
        mesh = ringcomm.init_mesh(pp=2, dp=2, tp=2, comm=comm)
        model = ringcomm.parallelize(ours[comm.rank], plan, mesh["tp"])
        stages = ringcomm.split(model, [at], **family.cuts.get(at, {}))
        pipe = ringcomm.Pipeline(stages, mesh["pp"], microbatches=2, ties="exact")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        ringcomm.shard(pipe, optimizer, stage=1, mesh=mesh)
        mine = [{k: x.chunk(2)[mesh["dp"].rank] for k, x in batch.items()} for batch in family.batches]
        losses, parameters = _steps_of(pipe, optimizer, mine, done)
        summed = mesh["dp"].all_reduce(torch.tensor(losses, dtype=torch.float64), "sum") / 2
        return summed.tolist(), parameters

    family.compare(on_ranks(8, rank_main), family.trained(own_loss, 4))


# ---- context -------------------------------------------------------------------------------------------------------


def told(model: nn.Module, batch: Mapping[str, torch.Tensor], comm: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits of a rank's part of the batch and that part's labels; the model gets the positions."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return x if comm is None else shard_sequence(x, comm, 1)

    ids, labels = batch["input_ids"], batch["labels"]
    given = {"input_ids": part(ids)}
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = part(labels.roll(1, 1))
        if models.takes(model, "decoder_position_ids"):
            given["decoder_position_ids"] = part(positions)
    if models.takes(model, "position_ids"):
        given["position_ids"] = part(positions)
    return model(**given).logits, part(labels)


def told_loss(model: nn.Module, batch: Mapping[str, torch.Tensor], comm: Any = None) -> torch.Tensor:
    logits, labels = told(model, batch, comm)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / batch["labels"].numel()


def context(family: Family) -> None:
    try:
        expected = family.trained(told_loss, 1)
    except Exception as error:
        raise Nothing(f"one process fails: {type(error).__name__}: {str(error).splitlines()[0][:100]}") from error
    ours = family.copies(2)

    def rank_main(comm: Any, done: list[int]) -> Any:
        model, losses = ours[comm.rank], []
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for batch in family.batches:
            with context_parallel(comm):
                loss = told_loss(model, batch, comm)
                loss.backward()
            losses.append(comm.all_reduce(loss.detach(), "sum").item())
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = comm.all_reduce(p.grad, "sum")
            optimizer.step()
            optimizer.zero_grad()
            done.append(1)
        return losses, named(model)

    family.compare(on_ranks(2, rank_main), expected)


# ---- tokens --------------------------------------------------------------------------------------------------------


def generate(family: Family, plan: Any) -> None:
    """Compares greedy tokens, with a growing cache and with a static one."""
    if family.kind == "masked" or not family.model.can_generate():
        raise Nothing("generates no tokens")
    ids = family.batches[0]["input_ids"][:2, :8]

    def tokens(model: nn.Module, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False,
                use_cache=True, num_beams=1, pad_token_id=0, **options,
            )  # fmt: skip

    ways: list[dict[str, Any]] = [{}, {"cache_implementation": "static", "disable_compile": True}]
    tried = 0
    for options in ways:
        try:
            expected = tokens(copy.deepcopy(family.model), **options)
        except Exception as error:
            if not options:
                raise Nothing(f"one process fails: {type(error).__name__}: {str(error)[:100]}") from error
            continue
        tried += 1
        ours = family.copies(2)

        def rank_main(comm: Any, done: list[int], ours: Any = ours, options: Any = options) -> torch.Tensor:
            return tokens(ringcomm.parallelize(ours[comm.rank], plan, comm), **options)

        for rank, found in enumerate(on_ranks(2, rank_main)):
            if not torch.equal(found, expected):
                raise Wrong(f"rank {rank}: other tokens{' with a static cache' if options else ''}")


# ---- a family ------------------------------------------------------------------------------------------------------

Cell = tuple[str, str]
"""(works, refused, wrong, error or -; the message)."""


def cell(fn: Callable[..., str | None], *args: Any) -> Cell:
    try:
        return "works", fn(*[each() if callable(each) else each for each in args]) or ""
    except Nothing as nothing:
        return "-", str(nothing)
    except Refused as refused:
        return "refused", str(refused)
    except Wrong as wrong:
        return "wrong", str(wrong)
    except Failed as failed:
        return "error", str(failed)
    except Exception as error:
        return "error", f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def try_family(name: str, kind: str, say: Callable[[str, Cell], None]) -> None:
    """Reports each cell as soon as it is known; "built" tells whether there is a model at all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        family = Family(name, kind)
    except Exception as error:
        text = str(error).strip().replace("\n", " ")
        said = text if isinstance(error, models.NotText) else f"{type(error).__name__}: {text}"
        return say("built", ("-", said[:200]))
    say("built", ("works", f"{sum(p.numel() for p in family.model.parameters())}"))
    cells: dict[str, Cell] = {}

    def add(column: str, fn: Callable[..., str | None], *args: Any) -> None:
        cells[column] = cell(fn, *args)
        say(column, cells[column])

    add(COLUMNS[0], tensor, family, lambda: own_plan(family))
    add(COLUMNS[1], tensor, family, lambda: our_plan(family))
    plan = None if cells[COLUMNS[0]][0] == "works" else models.plan_of(family.model)
    usable = "works" in (cells[COLUMNS[0]][0], cells[COLUMNS[1]][0])

    def known_plan() -> Any:
        if not usable:
            raise Nothing("no plan that works")
        return plan

    add(COLUMNS[2], pipeline, family, lambda: middle(family))
    add(COLUMNS[3], pipeline, family, lambda: elsewhere(family))
    add(COLUMNS[4], context, family)
    add(COLUMNS[5], together, family, known_plan)
    add(COLUMNS[6], generate, family, known_plan)


def _child(name: str, kind: str, pipe: Connection) -> None:
    # Torch replaces its thread pool in the first call after a fork; that call must not come from several threads.
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try_family(name, kind, lambda column, found: pipe.send((column, found)))


def try_all(
    wanted: Sequence[tuple[str, str]], jobs: int, limit: float, keep: Callable[[str, dict[str, Cell]], None]
) -> None:
    """Tests each family in its own process, and passes its cells to ``keep``."""
    fork = multiprocessing.get_context("fork")
    left, running = list(wanted), {}
    while left or running:
        while left and len(running) < jobs:
            name, kind = left.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(name, kind, theirs))
            process.start()
            theirs.close()
            running[name] = process, ours, time.monotonic() + limit, {}
        wait([pipe for _, pipe, _, _ in running.values()], timeout=1.0)
        for name, (process, pipe, end, cells) in [*running.items()]:
            try:
                while pipe.poll():
                    column, found = pipe.recv()
                    cells[column] = found
                over = time.monotonic() > end and f"not done in {limit:.0f} s"
            except EOFError:
                process.join()
                over = f"the process ended with status {process.exitcode}"
            if over:
                process.kill()
                process.join()
                for column in COLUMNS if cells.get("built", ("works",))[0] == "works" else ():
                    cells.setdefault(column, ("error", str(over)))
                cells.setdefault("built", ("-", str(over)))
                keep(name, cells)
                del running[name]
                print(name, *(f"{c}: {cells[c][0]}" for c in COLUMNS if c in cells), sep=" | ", flush=True)


# ---- the page ------------------------------------------------------------------------------------------------------


def _kind_of(said: str) -> str:
    """Reduces a message to its kind by removing names and numbers."""
    return re.sub(r"\b\S*[._]\S*|\b[A-Z]\w+|\d+|'[^']*'|\([^)]*\)", "", said)[:90]


HEAD = """# Which models of transformers can be cut how

Every text family of the installed transformers (keys of its automatic mappings for causal, masked and
encoder-decoder models) that builds from a small configuration, with random values and without dropout.
Made by

    {command}

with {versions}, on CPU, ranks as threads.

{counts}

* **tp, its plan**: 2 ranks, `parallelize(model, None, comm)`: the plan that transformers gives the model.
* **tp, our plan**: 2 ranks, a plan by the names of layers (`plan_of` in `architecture_models.py`), for models without
  one, too.
* **pp, middle**: 2 ranks, cut before the middle one of all blocks.
* **pp, elsewhere**: 2 ranks, cut before some other module, also inside of a block; with `order=` where modules are
  registered in another order than they are called in, and `carry=` where a refusal names a module whose result is
  needed behind the cut.
* **cp**: 2 ranks, each with a part of the sequence, in `context_parallel`.
* **together**: pp 2 x dp 2 x tp 2, ZeRO 1, with a plan that works alone.
* **generate**: 2 ranks of tp: greedy tokens, with a cache that grows and, where one process can, with a static one.

**works**: two steps of SGD leave the losses and weights of one process (generate: the same tokens). In float64, to
1e-9 of how far a weight moved (or of a thousandth of how far any weight moved, if that is more); 1e-4 where the model
computes in float32 at some place (norms, routers); 1e-3 for models that cannot run in float64. **refused**: every rank
raised an error of ringcomm before the first step was done; what it said is below the table. **-**: nothing to try: no
plan, no tokens to generate, or one process fails too.
"""


def head_of(done: Mapping[str, Mapping[str, Cell]], command: str) -> list[str]:
    built = [name for name, cells in done.items() if cells["built"][0] == "works"]
    versions = f"torch {torch.__version__} and transformers {transformers.__version__}"
    counts = f"{len(done)} families were tried, {len(built)} were built; the others are at the end, with the reason."
    return [*HEAD.format(command=command, versions=versions, counts=counts).splitlines(), ""]


def page(done: Mapping[str, Mapping[str, Cell]], kinds: Mapping[str, str]) -> list[str]:
    built = {name: cells for name, cells in done.items() if cells["built"][0] == "works"}
    notes: dict[str, tuple[int, str, list[str]]] = {}
    rows = []
    for name, cells in built.items():
        row = []
        for column in COLUMNS:
            state, said = cells[column]
            if state == "refused":
                number, _, who = notes.setdefault(_kind_of(said), (len(notes) + 1, said, []))
                who.append(name)
                row.append(f"refused [{number}]")
            else:
                how = said.partition(",")[1:] if state == "works" else ()
                row.append(f"works{''.join(how)}" if state == "works" else state if state == "-" else f"**{state}**")
        rows.append(f"| {name} | {kinds[name]} | {' | '.join(row)} |")
    counts = {state: {c: sum(cells[c][0] == state for cells in built.values()) for c in COLUMNS} for state in STATES}
    lines = [
        f"| | kind | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
        *(f"| {state} | | {' | '.join(str(counts[state][c]) for c in COLUMNS)} |" for state in STATES),
        *sorted(rows),
        "",
        "## What is refused",
        "",
        "One sentence of each kind, as a rank raises it, and the families that it is about.",
        "",
    ]
    for number, said, who in notes.values():
        lines += [*_wrapped(f"[{number}] {', '.join(sorted(set(who)))}:"), "", "```", *_wrapped(said), "```", ""]
    for state in ("wrong", "error"):
        bad = [(n, c, cells[c][1]) for n, cells in built.items() for c in COLUMNS if cells[c][0] == state]
        if bad:
            lines += [f"## {state}", "", *(f"* {n}, {c}: {said}" for n, c, said in bad), ""]
    lines += ["## Not built", "", "| | |", "|---|---|"]
    lines += [f"| {n} | {c['built'][1].translate(_AS_TEXT)} |" for n, c in sorted(done.items()) if n not in built]
    return lines


STATES = ("works", "refused", "wrong", "error", "-")
_AS_TEXT = str.maketrans({"|": "/", "[": "\\[", "]": "\\]"})  # of what Markdown would read as its own


def _wrapped(said: str) -> list[str]:
    import textwrap

    return textwrap.wrap(said, 118)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    p.add_argument("--jobs", type=int, default=1, help="families at a time")
    p.add_argument("--limit", type=float, default=120.0, help="seconds for a family")
    p.add_argument("--json", type=Path, help="also the cells, with all sentences, into this file, after each family")
    p.add_argument("--resume", action="store_true", help="leave out the families that are in that file already")
    p.add_argument("--write", action="store_true", help=f"into {RESULTS.parent.name}/{RESULTS.name}")
    a = p.parse_args()
    kinds = dict(models.families())
    unknown = [name for name in a.only if name not in kinds]
    if unknown:
        raise SystemExit(f"architectures: got {', '.join(unknown)}, expected names such as {', '.join([*kinds][:3])}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    models.build("llama", "causal")  # imports once what all families need
    done = json.loads(a.json.read_text()) if a.resume and a.json else {}

    def keep(name: str, cells: dict[str, Cell]) -> None:
        done[name] = cells
        if a.json:
            a.json.write_text(json.dumps(done, indent=1))

    left = [(name, kinds[name]) for name in a.only or sorted(kinds) if name not in done]
    try_all(left, a.jobs, a.limit, keep)
    lines = page(done, kinds)
    if a.only:
        print("\n".join(lines))
    if a.write:
        only = f" --only {' '.join(a.only)}" if a.only else ""
        command = f"OMP_NUM_THREADS=1 python -m benchmarks.training.architectures{only} --write"
        RESULTS.write_text("\n".join([*head_of(done, command), *lines]) + "\n")
    states = [cells[c][0] for cells in done.values() for c in COLUMNS if c in cells]
    print(f"{time.monotonic() - began:.0f} s;", *(f"{states.count(state)} {state}" for state in STATES))
    if "wrong" in states or "error" in states:
        sys.exit(1)


if __name__ == "__main__":
    main()
