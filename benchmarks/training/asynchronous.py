"""Measures asynchronous data parallel training: the pace beside a slow rank, convergence, and what the end of a rank
does.

    python -m benchmarks.training.asynchronous --out benchmarks/results/async.md
    python -m benchmarks.training.asynchronous --parts pace

Four ranks are processes of this machine. For the pace, a step's computation is a sleep, so that four ranks need no four
cores: what is measured is how long ranks wait. For convergence, they train the GPT of `examples/` on its text.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import FileStore

import ringcomm
from examples.gpt import GPT
from examples.text import read_text
from ringcomm.errors import RingcommError

RANKS = 4
CONTEXT = 32
Options = dict[str, Any]


def small_gpt() -> GPT:
    """The model of all measurements."""
    torch.manual_seed(0)
    return GPT(2, 64, 2, CONTEXT)


def batch_of(text: torch.Tensor, draw: torch.Generator, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random windows of the text, and the bytes that follow."""
    starts = torch.randint(len(text) - CONTEXT - 1, (windows, 1), generator=draw)
    found = text[starts + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, 1:]


# ---- what a rank does ----------------------------------------------------------------------------------------------


def pace(comm: ringcomm.Communicator, a: argparse.Namespace, options: Options, slow: bool) -> float:
    """Returns this rank's steps per second. A rank that is slow takes four times as long for its computation."""
    compute_s = a.compute_ms / 1e3 * (4 if slow and comm.rank == RANKS - 1 else 1)
    with ringcomm.AsynchronousDataParallel(
        small_gpt(), comm, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), **options
    ) as model:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        comm.barrier()
        began, steps = time.monotonic(), 0
        while time.monotonic() - began < a.seconds:
            time.sleep(compute_s)
            model.step()
            steps += 1
        return steps / (time.monotonic() - began)


def converge(
    comm: ringcomm.Communicator,
    a: argparse.Namespace,
    bound: int | None,
    lr: float,
    beta: float,
    scales: bool,
    slow: bool,
) -> Any:
    """Trains, and returns rank 0's (loss on text that was not trained on, seconds, mean and largest staleness)."""
    text = read_text(None)
    train_text, rest = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    draw = torch.Generator().manual_seed(1 + comm.rank)
    module = small_gpt()
    with ringcomm.AsynchronousDataParallel(
        module,
        comm,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, betas=(beta, 0.999)),
        max_staleness=bound,
        staleness_scale=inverse if scales else None,
    ) as model:
        comm.barrier()
        began = time.monotonic()
        for _ in range(a.steps):
            x, y = batch_of(train_text, draw, 8)
            model.optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            if slow and comm.rank == RANKS - 1:
                time.sleep(a.slow_ms / 1e3)
            model.optimizer.step()
        seconds = time.monotonic() - began
        comm.barrier(timeout=900)  # all gradients are in
        model.pull()
    if comm.rank:
        return None
    x, y = batch_of(rest, torch.Generator().manual_seed(0), 256)
    with torch.no_grad():
        loss = float(F.cross_entropy(module(x).flatten(0, 1), y.flatten()))
    staleness = model.counters()["staleness"]
    return loss, seconds, sum(s * n for s, n in staleness.items()) / sum(staleness.values()), max(staleness)


def watch(pid: int, ended: list[float]) -> None:
    """Notes when a process has ended: on a busy machine that is long after the signal."""
    process = os.pidfd_open(pid)
    select.select([process], [], [])
    ended.append(time.monotonic())
    os.close(process)


def killed(comm: ringcomm.Communicator, a: argparse.Namespace, options: Options, victim: int) -> Any:
    """Kills the victim after a second. Returns of the others (steps before its end, steps later, the longest step,
    the workers that its server lost or what it raised, seconds from the end to the error)."""
    pids = comm.exchange(str(os.getpid()).encode())
    model = ringcomm.AsynchronousDataParallel(
        small_gpt(), comm, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), max_staleness=2, **options
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ended: list[float] = []
    if comm.rank != victim:
        threading.Thread(target=watch, args=(int(pids[victim]), ended), daemon=True).start()
    comm.barrier()
    began = time.monotonic()
    steps = {False: 0, True: 0}
    longest = 0.0
    try:
        while time.monotonic() - began < 5.0:
            time.sleep(0.1)
            if comm.rank == victim and time.monotonic() - began > 1.0:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            model.step()
            longest = max(longest, time.monotonic() - start)
            steps[bool(ended)] += 1
    except RingcommError as error:
        late = time.monotonic() - ended[0] if ended else 0.0
        return steps[False], steps[True], longest, f"{type(error).__name__}: {error}", late
    model.close()
    return steps[False], steps[True], longest, sorted(model.counters().get("lost", {})), 0.0


# ---- running them --------------------------------------------------------------------------------------------------


def rank_main(pipe: Any, store: str, rank: int, what: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    comm = ringcomm.init(rank, RANKS, store=FileStore(store, RANKS), timeout=timedelta(seconds=900))
    pipe.send(what(comm, *arguments))
    comm.close()


def every(comm: ringcomm.Communicator, what: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Measures cases one after the other, in the same processes."""
    return [what(comm, *case) for case in cases]


def run(what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns what every rank returns; None for one that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch", "ringcomm.data_parallel.asynchronous"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            words = (theirs, os.path.join(folder, "store"), rank, what, arguments)
            processes.append(context.Process(target=rank_main, args=words))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        found = []
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(None)
        for process in processes:
            process.join()
        return found


def pace_table(a: argparse.Namespace) -> list[str]:
    """The steps per second of the three other ranks, with and without a slow one; the runs alternate."""
    lines = ["| max_staleness | all at full speed | one at a quarter | the others keep |", "|---|--:|--:|--:|"]
    bounds = [None, 8, 0]
    cases = [(a, {"max_staleness": s}, slow) for s in bounds for _ in range(a.repeats) for slow in (False, True)]
    others = run(every, pace, cases)[: RANKS - 1]
    for number, bound in enumerate(bounds):
        its = [each[2 * a.repeats * number :][: 2 * a.repeats] for each in others]
        full, beside = ([x for each in its for x in each[slow::2]] for slow in (0, 1))
        rates = [statistics.median(x) for x in (full, beside)]
        shown = [
            f"{rate:.2f} steps/s ({min(x):.2f} to {max(x):.2f})" for rate, x in zip(rates, (full, beside), strict=True)
        ]
        name = "none" if bound is None else bound
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {100 * rates[1] / rates[0]:.1f} % |")
    print("\n".join(lines), flush=True)
    return lines


def inverse(staleness: int) -> float:
    """The scale of the learning rate in the table."""
    return 1 / (1 + staleness)


def convergence_table(a: argparse.Namespace) -> list[str]:
    """Losses after the same number of gradients."""
    lines = [
        "| max_staleness | learning rate | beta1 | scaled by 1/(1+s) | one rank slow | loss | seconds of rank 0 | "
        "staleness, mean | most |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|",
    ]
    cases: list[tuple[int | None, float, float, bool, bool]] = [
        (0, a.lr, 0.9, False, False),
        (0, a.lr, 0.9, False, True),
        (4, a.lr / 4, 0.9, False, False),
        (4, a.lr / 4, 0.5, False, False),
        (4, a.lr, 0.5, True, False),
        (None, a.lr / 4, 0.5, False, True),
    ]
    found = run(every, converge, [(a, *case) for case in cases])[0]
    for (bound, lr, beta, scales, slow), (loss, seconds, mean, most) in zip(cases, found, strict=True):
        said = ["none" if bound is None else str(bound), f"{lr:g}", f"{beta:g}"]
        said += ["yes" if each else "no" for each in (scales, slow)]
        lines.append(f"| {' | '.join(said)} | {loss:.3f} | {seconds:.1f} | {mean:.2f} | {most} |")
    print("\n".join(lines), flush=True)
    return lines


def death_lines(a: argparse.Namespace) -> list[str]:
    """What the others do after a SIGKILL."""
    lines = ["A worker, rank 3 (ranks 0 and 1 serve), is killed after 1 s of 5 s:", ""]
    for rank, (before, after, longest, lost, _) in enumerate(run(killed, a, {"servers": [0, 1]}, 3)[:3]):
        lines.append(
            f"* rank {rank}: {before} steps before its process had ended, {after} later, the longest of "
            f"{longest * 1e3:.0f} ms{f', lost {lost}' if lost else ''}"
        )
    server = run(killed, a, {}, 1)
    lines += ["", "A server, rank 1 (all ranks serve and work), is killed after 1 s:", ""]
    for rank in (0, 2, 3):
        before, after, _, said, late = server[rank]
        lines.append(
            f"* rank {rank}, after {before + after} steps, {late * 1e3:.0f} ms after the process had ended: {said}"
        )
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--compute-ms", type=float, default=300.0, help="of a step, for the pace (300)")
    p.add_argument("--seconds", type=float, default=6.0, help="of a measurement of the pace (6)")
    p.add_argument("--repeats", type=int, default=4, help="of each measurement of the pace (4)")
    p.add_argument("--steps", type=int, default=150, help="of each rank, for convergence (150)")
    p.add_argument(
        "--slow-ms", type=float, default=300.0, help="by which a step of the slow rank is longer there (300)"
    )
    p.add_argument("--lr", type=float, default=3e-3, help="of the synchronous run (0.003)")
    p.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS], help="what is measured (all)")
    p.add_argument("--out", metavar="FILE", help="append it there, too")
    a = p.parse_args()
    parameters = sum(x.numel() for x in small_gpt().parameters())
    lines = [
        f"`{' '.join(['python -m benchmarks.training.asynchronous', *sys.argv[1:]])}`: {RANKS} processes on "
        f"{os.cpu_count()} cores, whose load was {os.getloadavg()[0]:.0f} at the beginning; "
        f"a GPT of {parameters:,} parameters.", "",
    ]  # fmt: skip
    for part in a.parts:
        title, what, measure = PARTS[part]
        lines += [f"## {title}", "", *([what(a), ""] if what else []), *measure(a), ""]
    if a.out:
        with open(a.out, "a", encoding="utf-8") as file:
            file.write("\n".join(lines))


def about_pace(a: argparse.Namespace) -> str:
    """Returns what the table shows."""
    return (
        f"Steps per second of ranks 0 to 2, median of {a.repeats} runs of {a.seconds:g} s (least to most); those with "
        f"and without a slow rank alternate. A step's computation is a sleep of {a.compute_ms:g} ms; that of rank 3 is "
        "four times as long where it is slow."
    )


def about_convergence(a: argparse.Namespace) -> str:
    """Returns what the table shows."""
    return (
        f"AdamW, {a.steps} steps of 8 windows of {CONTEXT} bytes on each rank, on nine tenths of the example's text; "
        f"the loss is that of 256 windows of the last tenth. With max_staleness=0 the servers made {a.steps} updates "
        f"with the mean of {RANKS} gradients, otherwise {RANKS * a.steps} with one. The slow rank sleeps {a.slow_ms:g} "
        "ms in each step."
    )


PARTS: dict[str, tuple[str, Callable[..., str] | None, Callable[..., list[str]]]] = {
    "pace": ("Pace", about_pace, pace_table),
    "convergence": ("Convergence", about_convergence, convergence_table),
    "end": ("The end of a rank", None, death_lines),
}


if __name__ == "__main__":
    main()
