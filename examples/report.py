"""The output of `train_gpt.py`: progress, then figures of time and memory."""

import argparse
import ctypes
import gc
import statistics
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from mesh import AXES
from text import Batches
from training import Training, tokens_per_step

import ringcomm

MIB = 1 << 20


class Peak:
    """Measures this process's peak memory above its memory at the start; a thread samples it until `stop`. A page that
    several ranks have mapped counts in parts, so that the sum over the ranks is the memory that the machine uses."""

    def __init__(self) -> None:
        gc.collect()
        # Returns free memory of an earlier model to the system: its reuse would not appear in the measurement.
        ctypes.CDLL(None).malloc_trim(0)
        self.before = self.most = self.now()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    @staticmethod
    def now() -> int:
        """Returns the memory of this process in bytes."""
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

    def watch(self) -> None:
        """Runs the sampling thread."""
        while not self.stopped.wait(0.002):
            self.most = max(self.most, self.now())

    def stop(self) -> None:
        """Stops the sampling."""
        self.stopped.set()
        self.thread.join()

    @property
    def extra(self) -> int:
        """The peak above the starting point, in bytes."""
        return self.most - self.before


def watched(steps: int) -> int:
    """Returns in how many steps, from the first on, memory is sampled; the times of these steps do not count."""
    return min(5, max(1, steps // 4))


def mean_over_ranks(value: float) -> float:
    """Returns the mean over the ranks; a collective."""
    return statistics.fmean(by_rank(value))


def by_rank(value: float) -> list[float]:
    """Returns every rank's value; a collective."""
    x = torch.tensor([value], dtype=torch.float64)
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.cat(found).tolist()


def slowest(seconds: list[float]) -> list[float]:
    """Returns the slowest rank's time of every step; a collective."""
    x = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def train(
    a: argparse.Namespace, copies: Sequence[Training], batches: Batches, done: int = 0, peak: Peak | None = None,
    task: str = "training", after: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Runs the steps from ``done`` to --until. Every copy runs every step, on the same batches; the order of the
    copies is reversed in every second step. ``after`` is called with the number of completed steps after each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    first, tokens, rank = copies[0], tokens_per_step(a, copies[0].mesh), dist.get_rank()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=rank != 0) as bar:
        shown = bar.add_task(task, total=a.until, completed=done)
        for step in range(done, a.until):
            ringcomm.step(step)  # errors and records contain it
            drawn = batches.draw()
            for copy in copies if step % 2 == 0 else reversed(copies):
                if len(copies) > 1:
                    dist.barrier()
                copy.step(drawn)
            if peak is not None and step + 1 - done == watched(a.until - done):
                peak.stop()
            seconds, blocked = sum(first.seconds[-20:]), sum(first.blocked_seconds[-20:])
            rate = tokens * len(first.seconds[-20:]) / seconds
            share = f"  comm {100 * blocked / seconds:.1f} %" if model_is_whole(first) else ""
            bar.update(shown, advance=1, description=f"{task}: loss {first.loss:.3f}  {rate:,.0f} tokens/s{share}")
            due = step % max(1, a.steps // 10) == 0 or step + 1 == a.until
            if rank == 0 and not bar.console.is_terminal and task == "training" and due:
                print(f"step {step:5d}  loss {first.loss:.4f}  {rate:,.0f} tokens/s", flush=True)
            if after is not None:
                after(step + 1)


def model_is_whole(training: Training) -> bool:
    """Whether every rank has the full model, so that ranks exchange only gradients and parameters."""
    return all(training.mesh.size(name) == 1 for name in AXES if name != "dp")


def figures(a: argparse.Namespace, copies: Sequence[Training], peak: Peak | None) -> dict[str, object]:
    """Prints the figures of every copy and returns those of the first; a collective. The first steps are warm-up and do
    not count."""
    skip = min(5, len(copies[0].seconds) // 4)
    tokens = tokens_per_step(a, copies[0].mesh)
    steps = {c.name: slowest(c.seconds)[skip:] for c in copies}
    blocked = {c.name: mean_over_ranks(statistics.fmean(c.blocked_seconds[skip:])) for c in copies}
    kept = [] if peak is None else by_rank(ringcomm.memory(copies[0].model).resident / MIB)
    peaks = [] if peak is None else by_rank(peak.extra / MIB)
    median = {name: statistics.median(seconds) for name, seconds in steps.items()}
    if dist.get_rank() == 0:
        timed = f"{'tokens/s':>10s}  {'step ms, median (min-max)':>28s}"
        print(f"\n{'':18s}{timed}  {'blocked ms':>10s}  {'share':>6s}  final loss")
        for copy in copies:
            name, seconds = copy.name, steps[copy.name]
            spread = f"{1e3 * median[name]:.1f} ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})"
            share = 100 * blocked[name] / statistics.fmean(seconds)
            print(
                f"{name:18s}{tokens / median[name]:10,.0f}  {spread:>28s}  {1e3 * blocked[name]:10.2f}  {share:5.1f}%  "
                f"{copy.loss:.5f}"
            )
        print(
            "blocked: time per step, up to the end of backward, in which a rank's training thread starts collectives\n"
            "or waits for them and for slower ranks; mean over the ranks. It does not include communication that\n"
            f"overlaps with computation{'' if model_is_whole(copies[0]) else ', nor messages of tp, pp and cp'}."
        )
        if peak is not None:
            print(f"memory of each rank, MiB: kept {row(kept)}; peak of the first steps {row(peaks)}")
    first = copies[0]
    return {
        "loss": first.loss, "losses": first.losses, "tokens_per_s": tokens / median[first.name],
        "step_ms": [1e3 * x for x in (median[first.name], min(steps[first.name]), max(steps[first.name]))],
        "kept_mib": kept, "peak_mib": peaks,
    }  # fmt: skip


def row(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)
