"""Trains a model of 1.5 times the memory allowed per rank: built on meta, split, saved, and resumed on another mesh.

    python -m benchmarks.training.larger_than_rank --write     # results/larger_than_rank.txt, some minutes on 2 cores

The model is a GPT with AdamW: parameters, gradients and two moments, 16 bytes per parameter. A rank may use two thirds
of that in addition to the program's own memory, including activations, messages and units that are temporarily
unsharded. The kernel limits a rank's private memory (RLIMIT_DATA), and records the rank's peak resident memory, shared
memory included, from before the model is built; a run that exceeds it fails. RLIMIT_AS would count the memory of other
ranks, which is mapped as well. Saving and loading map files, whose pages the kernel reclaims at any time, so there only
the limit of private memory applies, and the recorded peak is ignored. Blocks of 1 MiB and more come from the kernel and
are returned to it at once (MALLOC_MMAP_THRESHOLD_), so that free memory is not counted. First, one process is run under
the same limit, to check that it fails.

Every mesh has the same batches and the same initial values; its losses are compared with those of one process without a
limit. Half-way each mesh saves; another mesh resumes from there, and its losses are compared, too. The last checkpoint
is exported to safetensors, and a plain model loads it.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.tensor_parallel import Colwise

DIM, LAYERS, HEADS, WORDS, ROWS, LENGTH = 768, 8, 8, 256, 8, 8
TIMES = 1.5  # the memory allowed per rank
PLAN = {
    "embed": "vocab",
    "head": "colwise_gather_output",
    "blocks.*": "heads",
    "*.qkv": Colwise(parts=3),
    "*.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}
MESHES: dict[str, tuple[dict[str, int], int, str]] = {  # axes, stage, and the mesh that resumes from its checkpoint
    "pp 2": ({"pp": 2}, 0, "tp 2"),  # over one data rank stage 3 shards nothing, and a step keeps a second copy
    "tp 2": ({"tp": 2}, 3, "pp 4"),
    "pp 4": ({"pp": 4}, 3, "tp 2 x dp 2"),
    "tp 2 x dp 2": ({"dp": 2, "tp": 2}, 3, "pp 2"),
}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "larger_than_rank.txt"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def state_nbytes() -> int:
    """Returns the bytes of the whole model in training."""
    return 16 * sum(p.numel() for p in on_meta().parameters())


def limit_nbytes() -> int:
    """Returns the bytes that a rank may use in addition to the program's own."""
    return int(state_nbytes() / TIMES)


def starting_values(model: nn.Module) -> Callable[[nn.Module], None]:
    """Returns an init function whose values depend only on a module's name."""
    names = {id(module): name for name, module in model.named_modules()}

    def init(module: nn.Module) -> None:
        for key, p in module.named_parameters(recurse=False):
            name = "embed" if names[id(module)] == "head" else names[id(module)]
            source = torch.Generator().manual_seed(zlib.crc32(f"{name}.{key}".encode()))
            if "norm" in name:
                nn.init.constant_(p, float(key == "weight"))
            else:
                nn.init.normal_(p, 0, 0.02, generator=source)

    return init


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    x = (start + 7 * torch.arange(LENGTH + 1)) % WORDS
    return x[:, :-1], x[:, 1:]


# ---- memory ----------------------------------------------------------------------------------------------------------


def status_nbytes(key: str) -> int:
    """Returns a value from the kernel's status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Limit:
    """Limits this process to `limit_nbytes` more than it uses now."""

    def __init__(self) -> None:
        warm = nn.Linear(8, 8)  # loads libraries that are loaded at first use
        optimizer = torch.optim.AdamW(warm.parameters(), fused=True)
        warm(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        self.begin_anew()
        self.before, self.libraries = status_nbytes("VmRSS"), status_nbytes("RssFile")
        private = status_nbytes("VmData") + limit_nbytes()
        resource.setrlimit(resource.RLIMIT_DATA, (private, private))

    def begin_anew(self) -> None:
        """Resets the recorded peak, which contains loading and libraries."""
        Path("/proc/self/clear_refs").write_text("5")

    def most(self) -> int:
        """Returns the peak since the reset, without pages of libraries. Raises if it exceeds the limit."""
        taken = status_nbytes("VmHWM") - self.before - (status_nbytes("RssFile") - self.libraries)
        if taken > limit_nbytes():
            raise MemoryError(f"a rank had {taken:,} bytes, expected at most {limit_nbytes():,}")
        return taken


# ---- runs ------------------------------------------------------------------------------------------------------------


def plain(steps: int, limited: bool) -> list[float]:
    """Trains in one process."""
    limit = Limit() if limited else None
    model = Model()
    model.apply(starting_values(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if limit is not None:
        limit.most()
    return losses


def fails(comm: ringcomm.Communicator) -> str:
    """Returns the error of one process under the limit."""
    try:
        plain(2, limited=True)
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].rpartition(': ')[2]}"
    return "it did not fail"


def train(
    comm: ringcomm.Communicator, axes: dict[str, int], stage: int, steps: Sequence[int], load: str | None, save: str
) -> dict[str, Any]:
    """Runs a rank on a mesh."""
    mesh = ringcomm.init_mesh({"dp": 1, **axes} if "dp" not in axes else axes, comm)
    limit = Limit()
    model: nn.Module = on_meta()
    init = starting_values(model)
    if "tp" in axes:
        ringcomm.parallelize(model, PLAN, mesh["tp"])
    if "pp" in axes:
        stages = ringcomm.split(model, at=[f"blocks.{LAYERS * i // axes['pp']}" for i in range(1, axes["pp"])])
        model = ringcomm.Pipeline(stages, mesh["pp"], microbatches=2, loss=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"bucket_cap_mb": 4, "init_fn": init if load is None else False}
    ringcomm.shard(model, optimizer, stage, mesh=mesh, **options)
    built, losses = limit.most(), []
    if load is not None:
        ringcomm.checkpoint.load(load, model, optimizer)
        limit.begin_anew()
    parts = axes.get("dp", 1)
    for step in steps:
        x, y = (t.chunk(parts)[mesh["dp"].rank] for t in batch(step))
        if isinstance(model, ringcomm.Pipeline):
            loss = model.step(x, target=y)
        else:
            loss = loss_of(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mesh["dp"].all_reduce(loss.detach(), "avg")))
    most = limit.most()
    ringcomm.checkpoint.save(save, model, optimizer)
    return {"losses": losses, "built": built, "most": most}


def run(name: str, steps: Sequence[int], load: str | None, save: str) -> dict[str, Any]:
    axes, stage, _ = MESHES[name]
    world = 1
    for size in axes.values():
        world *= size
    found = ringcomm.run_ranks(train, world, axes, stage, steps, load, save, ranks="processes", timeout=300)
    return {
        "ranks": world,
        "losses": found[0]["losses"],
        "built": max(each["built"] for each in found),
        "most": max(each["most"] for each in found),
    }


def off(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--write", action="store_true", help=f"into {RESULTS.parent.name}/{RESULTS.name}")
    a = p.parse_args()
    torch.set_num_threads(1)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # for the ranks
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    mib = float(1 << 20)
    say("# python -m benchmarks.training.larger_than_rank" + (f" --steps {a.steps}" if a.steps != 20 else ""))
    say(f"# {platform.machine()}, torch {torch.__version__}, AdamW, {a.steps} steps, half before a resume")
    say(f"# the model in training: {state_nbytes() / mib:.0f} MiB; a rank may have {limit_nbytes() / mib:.0f} MiB")
    say(f"one process under the limit   {ringcomm.run_ranks(fails, 1, ranks='processes', timeout=300)[0]}")
    expected = plain(a.steps, limited=False)
    say(f"one process without a limit   losses {expected[0]:.4f} ... {expected[-1]:.4f}")
    say("")
    say(f"{'mesh':14s}{'ranks':>5s}{'stage':>7s}{'MiB built':>11s}{'MiB at most':>13s}  {'loss off by':12s}resumed on")
    half, worst = a.steps // 2, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, stage, other) in MESHES.items():
            first, second = f"{folder}/{name} first", f"{folder}/{name} second"
            start = run(name, range(half), None, first)
            same = run(name, range(half, a.steps), first, second)
            moved = run(other, range(half, a.steps), first, second)
            error = off(start["losses"] + same["losses"], expected)
            resumed = off(moved["losses"], expected[half:])
            worst = max(worst, error, resumed)
            most = max(each["most"] for each in (start, same))
            say(
                f"{name:14s}{start['ranks']:5d}{stage:7d}{start['built'] / mib:11.1f}{most / mib:13.1f}  {error:<12.1e}"
                f"{other}: off by {resumed:.1e}, {moved['most'] / mib:.1f} MiB at most"
            )
        from safetensors.torch import load_model

        ringcomm.checkpoint.export(second, f"{folder}/model.safetensors")
        model = Model()
        load_model(model, f"{folder}/model.safetensors")
        with torch.no_grad():
            x, y = batch(a.steps)
            say("")
            say(f"exported to safetensors, loaded by a plain model: loss of the next batch {loss_of(model(x), y):.4f}")
    if worst > 1e-3:
        raise SystemExit(f"larger_than_rank: losses are off by {worst:.1e}")
    if a.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
