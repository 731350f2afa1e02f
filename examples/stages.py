"""What every stage keeps and sends, measured and predicted, as a table and as a picture: `train_gpt.py --stages`."""

import ctypes
import gc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

MIB = 1 << 20
KEPT = ("parameters", "master", "gradients", "optimizer", "transient", "gathered")
COLUMNS = (*KEPT, "wire")


class Peak:
    """The most memory of this process while inside, sampled by a thread. A page that several ranks have mapped counts
    in parts, so that the ranks' sum is what the machine holds."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier model had is not to be used again unseen
        self.before = self.most = self.now()
        self.stop = threading.Event()

    @staticmethod
    def now() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))

    def watch(self) -> None:
        while not self.stop.wait(0.002):
            self.most = max(self.most, self.now())

    def __enter__(self) -> "Peak":
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def wire(traffic: Mapping[str, int], ranks: int) -> float:
    """Bytes that a rank sends for collectives on messages of so many bytes."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce bytes": 2 * share, "reduce_scatter bytes": share, "all_gather bytes": share}
    return sum(factor * traffic.get(kind, 0) for kind, factor in factors.items())


@dataclass
class Run:
    """A stage's training from beginning to end; bytes are one rank's."""

    stage: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    measured: dict[str, float]
    predicted: dict[str, float]
    peak: float
    step_ms: tuple[float, float, float]  # median, least, most
    loss: float = 0.0  # over all ranks
    same: bool = True


def table(runs: Sequence[Run]) -> str:
    """Two lines for each stage: as measured, and as predicted."""
    titles = f"{'loss':12s}{'same bits':12s}" + "".join(f"{name:>12s}" for name in COLUMNS)
    lines = [f"\n{'MiB on a rank':20s}{titles}{'peak':>10s}   step ms"]
    for run in runs:
        median, least, most = run.step_ms
        said = f"{run.loss:<12.6f}{'yes' if run.same else 'NO':12s}"
        timed = f"{run.peak / MIB:10.1f}   {median:.1f} ({least:.1f}-{most:.1f})"
        for kind, figures, head, tail in (
            ("measured", run.measured, said, timed),
            ("predicted", run.predicted, "", ""),
        ):
            values = "".join(f"{figures[name] / MIB:12.3f}" for name in COLUMNS)
            lines.append(f"{f'stage {run.stage} {kind}':20s}{head:24s}{values}{tail}")
    lines += [
        "loss: the mean of the last 50 steps and of all ranks. same bits: the losses of every step and rank, and all",
        "parameters, are stage 0's to the last bit. parameters to optimizer: what a rank keeps between two steps;",
        "transient: memory for whole gradients on their way; gathered: the most that is whole at a time at stage 3.",
        "wire: sent by a rank in a step. peak: the most of the process in the first steps, with activations, beyond",
        "what was there before the model. step ms: median (min-max) of the slowest rank.",
    ]
    return "\n".join(lines)


def plot(runs: Sequence[Run], file: str, title: str) -> None:
    """Loss curves on top of each other, and memory by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run, style in zip(runs, ("-", "--", "-.", ":"), strict=True):
        left.plot(run.losses, style, linewidth=7 - 1.8 * run.stage, alpha=0.75, label=f"stage {run.stage}")
    same = "the same bits" if all(run.same for run in runs) else "NOT the same bits"
    left.set(xlabel="step", ylabel="loss of rank 0", title=f"All stages: {same}")
    left.legend()
    places, bottom = range(len(runs)), [0.0] * len(runs)
    for name in KEPT:
        heights = [run.measured[name] / MIB for run in runs]
        if any(heights):
            right.bar(places, heights, bottom=bottom, label=name)
        bottom = [x + y for x, y in zip(bottom, heights, strict=True)]
    expected = [sum(run.predicted[name] for name in KEPT) / MIB for run in runs]
    right.hlines(expected, [x - 0.45 for x in places], [x + 0.45 for x in places], colors="black", label="predicted")
    right.set_ylim(0, 1.1 * max(*bottom, *expected))
    right.set_xticks(places, [f"stage {run.stage}" for run in runs])
    right.set(ylabel="MiB on a rank", title=title)
    right.legend()
    figure.savefig(file, dpi=120)
