"""
Trains a small GPT on text over several ranks: nothing, optimizer state, gradients or parameters sharded.

    torchrun --nproc-per-node 2 examples/train_gpt.py                     # data parallel (stage 0)
    torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3           # parameters sharded too
    torchrun --nproc-per-node 2 examples/train_gpt.py --stages            # 0, 1, 2, 3 in turn: the same bits
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel torch    # our collectives under torch's DDP
    torchrun --nproc-per-node 2 examples/train_gpt.py --backend gloo      # Gloo
    torchrun --nproc-per-node 2 examples/train_gpt.py --compare           # both, step by step in turns

The text is the language reference that ships inside every Python, or `--text FILE`; the vocabulary is its bytes.
"""

import argparse
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Batches, read_text
from stages import Peak, Run, plot, table, wire
from torch import nn

import ringcomm
from ringcomm.parallel import checkpoint, memory
from ringcomm.parallel.flat_model import flat_model_of

ENOUGH_STEPS = 200  # before them, what the model writes is noise
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Copy:
    """One copy of the model, and how its gradients are averaged."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    blocked: Callable[[], float]  # seconds in communication since the start
    clip: float = 0.0
    seconds: list[float] = field(default_factory=list)
    blocked_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """This rank's, the mean of the last 50 steps."""
        return statistics.fmean(self.losses[-50:])

    def no_sync(self) -> Any:
        """Inside, gradients only add up on this rank."""
        if flat_model_of(self.model) is not None:
            return ringcomm.no_sync(self.model)
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One optimizer step on the mean of the batches' losses."""
        start, blocked = time.perf_counter(), self.blocked()
        total = 0.0
        for number, (x, y) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.no_sync():
                loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()) / len(batches)
                self.scaler.scale(loss).backward()
            total += float(loss.detach())
        now_blocked = self.blocked()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            ringcomm.clip_grad_norm_(self.model, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(total)
        self.seconds.append(time.perf_counter() - start)
        self.blocked_seconds.append(now_blocked - blocked)

    def save(self, path: str, batches: Batches) -> None:
        """All that training goes on from; a collective."""
        state = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict(), "losses": self.losses}
        checkpoint.save(path, self.model, self.optimizer, generator=batches.generator.get_state(), **state)

    def resume(self, path: str, batches: Batches) -> int:
        """Takes up what was saved, and returns the steps that were made; a collective."""
        state = checkpoint.load(path, self.model, self.optimizer)
        if not isinstance(state["generator"], torch.Tensor):
            raise SystemExit("train_gpt: the checkpoint is of another number of ranks, whose data it goes on with")
        batches.generator.set_state(state["generator"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.losses = list(state["losses"])
        return len(self.losses)


class TorchMeter:
    """Torch's DDP waits inside C++. From outside: the time in starting its all_reduces, and the time from the start of
    the last one to the end of backward, in which there is nothing to do but wait."""

    def __init__(self, model: nn.parallel.DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
        self.group, self.seconds, self.last = group, 0.0, 0.0
        model.register_comm_hook(None, self.hook)

    def hook(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        start = time.perf_counter()
        future = allreduce_hook(self.group, bucket)
        self.last = time.perf_counter()
        self.seconds += self.last - start
        return future

    def blocked(self) -> float:
        """Called before forward and right after backward."""
        if self.last:
            self.seconds += time.perf_counter() - self.last
            self.last = 0.0
        return self.seconds


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = max(1, min(20, steps // 10))
    return min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def make_copy(a: argparse.Namespace, backend: str, stage: int = 0) -> Copy:
    """The model, the same on every rank, under `backend` ("none": without communication)."""
    torch.manual_seed(a.seed)
    module = GPT(a.layers, a.dim, a.heads, a.context)
    optimizer = torch.optim.AdamW(module.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, a.steps))
    rest = (optimizer, schedule, ringcomm.GradScaler(init_scale=2.0**14, enabled=a.precision == "fp16"))
    if backend == "none":
        return Copy("no communication", module, *rest, lambda: 0.0, a.clip)
    if a.parallel == "torch":
        group = dist.new_group(backend=backend)
        stock = nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        return Copy(backend, stock, *rest, TorchMeter(stock, group).blocked, a.clip)
    comm = ringcomm.init() if backend == "ringcomm" else ringcomm.Communicator.from_process_group(dist.group.WORLD)
    precision = ringcomm.MixedPrecision(PRECISIONS[a.precision], output_dtype=torch.float32)
    ringcomm.shard(module, optimizer, stage, comm, mixed_precision=precision, bucket_cap_mb=a.bucket_mb)
    flat = flat_model_of(module)
    return Copy(backend, module, *rest, lambda: flat.communication_seconds, a.clip)


def batches_of(a: argparse.Namespace, text: torch.Tensor) -> Batches:
    """This rank's."""
    return Batches(text, a.batch, a.context, 1000 * a.seed + dist.get_rank())


def mean_over_ranks(value: float) -> float:
    x = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(x)
    return float(x) / dist.get_world_size()


def slowest(seconds: list[float]) -> list[float]:
    """Of every step, the slowest rank's."""
    x = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def train(a: argparse.Namespace, copies: list[Copy], batches: Batches, done: int = 0) -> None:
    """Every copy makes every step, on the same batch; the order of the copies turns around every second step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tokens = a.batch * a.context * a.accumulate * dist.get_world_size()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=dist.get_rank() != 0) as bar:
        task = bar.add_task("training", total=a.until, completed=done)
        for step in range(done, a.until):
            drawn = [batches.draw() for _ in range(a.accumulate)]
            for copy in copies if step % 2 == 0 else reversed(copies):
                if len(copies) > 1:
                    dist.barrier()
                copy.step(drawn)
            first = copies[0]
            seconds, blocked = sum(first.seconds[-20:]), sum(first.blocked_seconds[-20:])
            rate = tokens * len(first.seconds[-20:]) / seconds
            bar.update(
                task,
                advance=1,
                description=f"loss {first.loss:.3f}  {rate:,.0f} tokens/s  comm {100 * blocked / seconds:.1f} %",
            )
            if (
                dist.get_rank() == 0
                and not bar.console.is_terminal
                and (step % max(1, a.steps // 10) == 0 or step + 1 == a.until)
            ):
                print(f"step {step:5d}  loss {first.loss:.4f}  {rate:,.0f} tokens/s", flush=True)


# ---- all stages --------------------------------------------------------------------------------------------------


def run_stage(a: argparse.Namespace, stage: int, text: torch.Tensor) -> Run:
    """Trains anew, with the same data; memory is watched in the first steps, time is taken from the others."""
    watched = min(5, max(1, a.steps // 4))
    with Peak() as peak:
        copy = make_copy(a, a.backend, stage)
        batches = batches_of(a, text)
        train(argparse.Namespace(**{**vars(a), "until": watched}), [copy], batches)
    traffic = flat_model_of(copy.model).ranks.traffic
    before = Counter(traffic)
    train(a, [copy], batches, done=watched)
    ranks, times = dist.get_world_size(), [1e3 * x for x in slowest(copy.seconds)[watched:]]
    measured = asdict(memory.memory(copy.model))
    plan = memory.Plan(copy.model, stage, ranks, accumulation=a.accumulate)
    return Run(
        stage,
        copy.losses,
        {name: x.clone() for name, x in copy.model.state_dict().items()},
        measured | {"wire": wire(traffic - before, ranks) / (a.steps - watched)},
        asdict(plan.memory) | {"wire": wire(plan.traffic, ranks)},
        mean_over_ranks(peak.most - peak.before),
        (statistics.median(times), min(times), max(times)),
        mean_over_ranks(copy.loss),
    )


def run_stages(a: argparse.Namespace, text: torch.Tensor) -> None:
    """Every stage, and whether they agree to the last bit on every rank."""
    make_copy(a, "none").step([batches_of(a, text).draw()])  # what torch loads at its first step is no stage's memory
    runs: list[Run] = []
    for stage in range(4):
        if dist.get_rank() == 0:
            print(f"\nstage {stage}")
        runs.append(run_stage(a, stage, text))
        here, first = runs[-1], runs[0]
        same = here.losses == first.losses and all(torch.equal(x, first.weights[n]) for n, x in here.weights.items())
        here.same = mean_over_ranks(float(same)) == 1.0
    if dist.get_rank() == 0:
        print(table(runs))
        if a.plot:
            plot(runs, a.plot, f"{dist.get_world_size()} ranks, {a.precision}")
    if not all(run.same for run in runs):
        raise SystemExit("train_gpt: the stages' losses or parameters differ, expected the same bits")


# ---- figures -----------------------------------------------------------------------------------------------------


def report(a: argparse.Namespace, copies: list[Copy]) -> None:
    """The figures of every copy; the first steps are left out as warm-up."""
    skip = min(5, len(copies[0].seconds) // 4)
    tokens = a.batch * a.context * a.accumulate * dist.get_world_size()
    steps = {c.name: slowest(c.seconds)[skip:] for c in copies}
    blocked = {c.name: mean_over_ranks(statistics.fmean(c.blocked_seconds[skip:])) for c in copies}
    losses = {c.name: mean_over_ranks(c.loss) for c in copies}
    if dist.get_rank() != 0:
        return
    titles = f"{'tokens/s':>10s}  {'step ms, median (min-max)':>28s}  {'blocked ms':>10s}  {'share':>6s}  final loss"
    print(f"\n{'':18s}{titles}")
    for name, seconds in steps.items():
        median = statistics.median(seconds)
        spread = f"{1e3 * median:.1f} ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})"
        share = 100 * blocked[name] / statistics.fmean(seconds)
        print(
            f"{name:18s}{tokens / median:10,.0f}  {spread:>28s}  {1e3 * blocked[name]:10.2f}  {share:5.1f}%  "
            f"{losses[name]:.5f}"
        )
    print(
        "blocked: time per step in which a rank's training thread is inside collectives up to the end of backward,\n"
        "starting them or waiting, the wait for slower ranks included; mean over the ranks. What overlaps is not in it."
    )
    if "gloo" in steps and "ringcomm" in steps:
        predict(tokens, steps, blocked)


def predict(tokens: int, steps: dict[str, list[float]], blocked: dict[str, float]) -> None:
    """Measured speed-up beside the one that the saved time explains."""
    gloo, ours = statistics.median(steps["gloo"]), statistics.median(steps["ringcomm"])
    ratios = [g / r for g, r in zip(steps["gloo"], steps["ringcomm"], strict=True)]
    saved = blocked["gloo"] - blocked["ringcomm"]
    print(
        f"\nmeasured:   {statistics.median(ratios):.3f} x Gloo's speed, {tokens / ours:,.0f} tokens/s "
        f"(over single steps {min(ratios):.3f} to {max(ratios):.3f})\n"
        f"predicted:  {gloo / (gloo - saved):.3f} x Gloo's speed, {tokens / (gloo - saved):,.0f} tokens/s, "
        f"from {1e3 * saved:.2f} ms less blocked per step"
    )
    if "no communication" in steps:
        local = statistics.median(steps["no communication"])
        print(
            f"whole cost: Gloo {1e3 * (gloo - local):.2f} ms, ringcomm {1e3 * (ours - local):.2f} ms per step "
            "more than a step without communication"
        )


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", choices=["ringcomm", "gloo"], default="ringcomm")
    p.add_argument(
        "--parallel", choices=["ringcomm", "torch"], default="ringcomm", help="whose DistributedDataParallel"
    )
    p.add_argument("--compare", action="store_true", help="Gloo, ringcomm and no communication, step by step in turns")
    p.add_argument("--text", metavar="FILE", help="train on this file (default: Python's language reference)")
    for name, default, text in (
        ("steps", 1500, "optimizer steps"), ("batch", 4, "windows per rank and step"),
        ("context", 64, "bytes per window"), ("layers", 4, "transformer blocks"), ("dim", 128, "width"),
        ("heads", 4, "attention heads"), ("seed", 0, "of everything"),
        ("sample", 300, "bytes of text to generate at the end"), ("accumulate", 1, "batches in a step"),
        ("until", 0, "stop after this step (--steps)"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    p.add_argument("--lr", type=float, default=3e-3, help="learning rate (0.003)")
    p.add_argument("--bucket-mb", type=float, default=None, help="messages of our stages, MiB (as measured)")
    p.add_argument("--stage", type=int, choices=range(4), default=0, help="what is sharded, see above (0)")
    p.add_argument("--stages", action="store_true", help="every stage: do they agree, and what does each keep")
    p.add_argument("--plot", metavar="FILE", help="of --stages: a picture")
    p.add_argument("--precision", choices=list(PRECISIONS), default="fp32", help="of forward and backward (fp32)")
    p.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients (0: any)")
    p.add_argument("--save", metavar="PATH", help="a checkpoint at the end")
    p.add_argument("--resume", metavar="PATH", help="go on from a checkpoint, of any stage")
    a = p.parse_args()
    a.until = a.until or a.steps
    ours = a.parallel == "ringcomm" and not a.compare
    if not ours and (a.stage or a.stages or a.precision != "fp32" or a.save or a.resume):
        p.error("--stage, --stages, --precision, --save and --resume are of our data parallel, without --compare")
    if a.stages and (a.save or a.resume or a.until != a.steps):
        p.error("--stages runs from beginning to end, without --save, --resume and --until")
    return a


def main() -> None:
    a = parse()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # without torchrun: a world of one
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo" if a.compare else a.backend)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    text = read_text(a.text)
    if a.stages:
        run_stages(a, text)
    else:
        run_one(a, text)
    dist.barrier()
    dist.destroy_process_group()


def run_one(a: argparse.Namespace, text: torch.Tensor) -> None:
    """A training, or a comparison step by step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    copies = [
        make_copy(a, backend, a.stage) for backend in (["ringcomm", "gloo", "none"] if a.compare else [a.backend])
    ]
    batches = batches_of(a, text)
    done = copies[0].resume(a.resume, batches) if a.resume else 0
    if rank == 0:
        count = sum(p.numel() for p in copies[0].model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {len(text):,} bytes of text, {world_size} rank{'s' * (world_size > 1)}, "
            f"{a.batch * a.context * a.accumulate * world_size} tokens per step"
        )
    train(a, copies, batches, done)
    if a.save:
        copies[0].save(a.save, batches)
    report(a, copies)
    if a.sample and a.until < ENOUGH_STEPS:
        if rank == 0:
            print(f"\nNo sample of generated text: {a.until} steps are too few for words, {ENOUGH_STEPS} are enough.")
    elif a.sample:
        model = copies[0].model  # every rank writes the same: at stage 3 each has a part of the parameters
        text = getattr(model, "module", model).sample(b"The ", a.sample, a.seed)
        if rank == 0:
            print("\n" + "-" * 40 + "\n" + text)


if __name__ == "__main__":
    main()
