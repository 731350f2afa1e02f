"""
Trains a small GPT on text, data parallel, over ringcomm or Gloo.

    torchrun --nproc-per-node 2 examples/train_gpt.py                     # our collectives, our data parallel
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringcomm

VOCABULARY = 256  # bytes
ENOUGH_STEPS = 200  # before them, what the model writes is noise


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder over bytes; the output layer shares the embedding's weight."""

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._init)
        for block in self.blocks:
            for last in (block.proj, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.token.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> str:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[0, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], 1)
        return printable(bytes(tokens[0].tolist()))


def printable(data: bytes) -> str:
    """Text for a terminal: line ends stay, and what is no printable character becomes a dot."""
    return "".join(
        c if c == "\n" or (c.isprintable() and c != "\ufffd") else "." for c in data.decode(errors="replace")
    )


def read_text(path: str | None) -> torch.Tensor:
    """Bytes of a file, or of Python's own language reference."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        with open(path, "rb") as file:
            data = file.read()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Batches:
    """Random windows of the text; every rank draws its own, the same for every copy of the model."""

    def __init__(self, text: torch.Tensor, a: argparse.Namespace, rank: int) -> None:
        if len(text) <= a.context + 1:
            raise SystemExit(f"train_gpt: the text has {len(text)} bytes, expected more than --context {a.context} + 1")
        self.text, self.batch, self.context = text, a.batch, a.context
        self.generator = torch.Generator().manual_seed(1000 * a.seed + rank)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - self.context - 1, (self.batch,), generator=self.generator)
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass
class Copy:
    """One copy of the model, and how its gradients are averaged."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    blocked: Callable[[], float]  # seconds in communication since the start
    seconds: list[float] = field(default_factory=list)
    blocked_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """This rank's, the mean of the last 50 steps."""
        return statistics.fmean(self.losses[-50:])

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        start, blocked = time.perf_counter(), self.blocked()
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        now_blocked = self.blocked()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.seconds.append(time.perf_counter() - start)
        self.blocked_seconds.append(now_blocked - blocked)


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


def make_copy(a: argparse.Namespace, backend: str) -> Copy:
    """The model, the same on every rank, under `backend` ("none": without communication)."""
    torch.manual_seed(a.seed)
    module = GPT(a.layers, a.dim, a.heads, a.context)
    optimizer = torch.optim.AdamW(module.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, a.steps))
    if backend == "none":
        return Copy("no communication", module, optimizer, schedule, lambda: 0.0)
    if a.parallel == "torch":
        group = dist.new_group(backend=backend)
        stock = nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        return Copy(backend, stock, optimizer, schedule, TorchMeter(stock, group).blocked)
    comm = ringcomm.init() if backend == "ringcomm" else ringcomm.Communicator.from_process_group(dist.group.WORLD)
    ours = ringcomm.DistributedDataParallel(module, comm, bucket_cap_mb=a.bucket_mb)
    return Copy(backend, ours, optimizer, schedule, lambda: ours.communication_seconds)


def mean_over_ranks(value: float) -> float:
    x = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(x)
    return float(x) / dist.get_world_size()


def slowest(seconds: list[float]) -> list[float]:
    """Of every step, the slowest rank's."""
    x = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def train(a: argparse.Namespace, copies: list[Copy], batches: Batches) -> None:
    """Every copy makes every step, on the same batch; the order of the copies turns around every second step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tokens = a.batch * a.context * dist.get_world_size()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=dist.get_rank() != 0) as bar:
        task = bar.add_task("training", total=a.steps)
        for step in range(a.steps):
            x, y = batches.draw()
            for copy in copies if step % 2 == 0 else reversed(copies):
                if len(copies) > 1:
                    dist.barrier()
                copy.step(x, y)
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
                and (step % max(1, a.steps // 10) == 0 or step + 1 == a.steps)
            ):
                print(f"step {step:5d}  loss {first.loss:.4f}  {rate:,.0f} tokens/s", flush=True)


def report(a: argparse.Namespace, copies: list[Copy]) -> None:
    """The figures of every copy; the first steps are left out as warm-up."""
    skip = min(5, a.steps // 4)
    tokens = a.batch * a.context * dist.get_world_size()
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
        "blocked: time per step in which a rank's training thread is inside the gradients' all_reduce, starting it or\n"
        "waiting for it, the wait for slower ranks included; mean over the ranks. What overlaps backward is not in it."
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
        ("sample", 300, "bytes of text to generate at the end"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    p.add_argument("--lr", type=float, default=3e-3, help="learning rate (0.003)")
    p.add_argument(
        "--bucket-mb", type=float, default=25.0, help="gradient bucket, MiB, of our DistributedDataParallel (25)"
    )
    return p.parse_args()


def main() -> None:
    a = parse()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # without torchrun: a world of one
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo" if a.compare else a.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    copies = [make_copy(a, backend) for backend in (["ringcomm", "gloo", "none"] if a.compare else [a.backend])]
    text = read_text(a.text)
    if rank == 0:
        count = sum(p.numel() for p in copies[0].model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {len(text):,} bytes of text, {world_size} rank{'s' * (world_size > 1)}, "
            f"{a.batch * a.context * world_size} tokens per step"
        )
    train(a, copies, Batches(text, a, rank))
    report(a, copies)
    if rank == 0 and a.sample and a.steps < ENOUGH_STEPS:
        print(f"\nNo sample of generated text: {a.steps} steps are too few for words, {ENOUGH_STEPS} are enough.")
    elif rank == 0 and a.sample:
        model = copies[0].model
        print("\n" + "-" * 40 + "\n" + getattr(model, "module", model).sample(b"The ", a.sample, a.seed))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
