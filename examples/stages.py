"""Runs every ZeRO stage in turn and checks that all stages give the same bits. Shows the bytes that each stage keeps
and sends, measured and predicted, as a table and as a picture: `train_gpt.py --stages`."""

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from mesh import described
from report import MIB, Peak, mean_over_ranks, slowest, train, watched
from training import batches_of, sharded_training

import ringcomm
from ringcomm.data_parallel import memory
from ringcomm.data_parallel.model.place import sharded_model_of

KEPT = ("parameters", "master", "gradients", "optimizer", "transient", "gathered")
COLUMNS = (*KEPT, "wire")


@dataclass
class Run:
    """The complete training at one stage; bytes are those of one rank."""

    stage: int
    losses: list[float]
    weights: dict[str, torch.Tensor]
    measured: dict[str, float]
    predicted: dict[str, float]
    peak: float
    step_ms: tuple[float, float, float]  # median, least, most
    loss: float = 0.0
    same: bool = True


def wire(traffic: Mapping[str, int], ranks: int) -> float:
    """Returns the bytes that a rank sends for collectives on messages of these sizes."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce bytes": 2 * share, "reduce_scatter bytes": share, "all_gather bytes": share}
    return sum(factor * traffic.get(kind, 0) for kind, factor in factors.items())


def run_stage(a: argparse.Namespace, stage: int, text: torch.Tensor, mesh: ringcomm.Mesh) -> Run:
    """Trains from the beginning with the same data; samples memory in the first steps, and measures times in the other
    steps."""
    first = watched(a.steps)
    peak = Peak()
    training = sharded_training(a, a.backend, mesh, stage)
    batches = batches_of(a, text, mesh)
    train(argparse.Namespace(**{**vars(a), "until": first}), [training], batches, peak=peak)
    peak.stop()
    flat = sharded_model_of(training.model)
    before = Counter(flat.ranks.traffic)
    train(a, [training], batches, done=first)
    ranks, times = flat.ranks.world_size, [1e3 * x for x in slowest(training.seconds)[first:]]
    plan = memory.Plan(training.model, stage, ranks, accumulation=training.measure.passes)
    return Run(
        stage,
        training.losses,
        {name: x.clone() for name, x in training.model.state_dict().items()},
        asdict(memory.memory(training.model))
        | {"wire": wire(flat.ranks.traffic - before, ranks) / max(1, a.steps - first)},
        asdict(plan.memory) | {"wire": wire(plan.traffic, ranks)},
        mean_over_ranks(peak.extra),
        (statistics.median(times), min(times), max(times)),
        training.loss,
    )


def run_stages(a: argparse.Namespace, text: torch.Tensor, mesh: ringcomm.Mesh) -> None:
    """Runs every stage, and checks that they agree to the last bit on every rank."""
    runs: list[Run] = []
    for stage in range(4):
        if dist.get_rank() == 0:
            print(f"\nstage {stage}")
        runs.append(run_stage(a, stage, text, mesh))
        here, first = runs[-1], runs[0]
        same = here.losses == first.losses and all(torch.equal(x, first.weights[n]) for n, x in here.weights.items())
        here.same = mean_over_ranks(float(same)) == 1.0
    if dist.get_rank() == 0:
        print(table(runs))
        if mesh.size("pp") > 1:
            print("The prediction for stage 3 gathers parameters in every pass; a pipeline gathers them once per step.")
        if a.plot:
            axes = dict(zip(mesh.names, mesh.shape, strict=True))
            plot(runs, a.plot, f"{described(axes)}, {a.precision}")
    if not all(run.same for run in runs):
        raise SystemExit("train_gpt: the stages' losses or parameters differ, expected the same bits")


def table(runs: Sequence[Run]) -> str:
    """Returns two lines for each stage: measured, and predicted."""
    titles = f"{'loss':12s}{'same bits':12s}" + "".join(f"{name:>12s}" for name in COLUMNS)
    lines = [f"\n{'MiB on rank 0':20s}{titles}{'peak':>10s}   step ms"]
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
        "loss: mean of the last 50 steps. same bits: the losses of every step and all parameters of every rank have",
        "the bits of stage 0. parameters to optimizer: bytes that a rank keeps between two steps. transient: buffers",
        "for unsharded gradients until they are reduced. gathered: the most parameters that are unsharded at a time at",
        "stage 3. wire: bytes that a rank sends in a step, for gradients and parameters. peak: the most memory of the",
        "process in the first steps, with activations, above its memory before the model; mean over the ranks.",
        "step ms: median (min-max) of the slowest rank.",
    ]
    return "\n".join(lines)


def plot(runs: Sequence[Run], file: str, title: str) -> None:
    """Plots loss curves on top of each other, and memory by stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for run, style in zip(runs, ("-", "--", "-.", ":"), strict=True):
        left.plot(run.losses, style, linewidth=7 - 1.8 * run.stage, alpha=0.75, label=f"stage {run.stage}")
    same = "the same bits" if all(run.same for run in runs) else "NOT the same bits"
    left.set(xlabel="step", ylabel="loss", title=f"All stages: {same}")
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
    right.set(ylabel="MiB on rank 0", title=title)
    right.legend()
    figure.savefig(file, dpi=120)
