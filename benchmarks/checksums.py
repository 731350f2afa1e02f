"""Prints a checksum of the results of each of a fixed set of programs, to show that two builds give the same bits.

    export OMP_NUM_THREADS=1
    python benchmarks/checksums.py > new.txt
    PYTHONPATH=/path/to/another/checkout python benchmarks/checksums.py > old.txt
    diff old.txt new.txt

Each line is a name and a checksum of what all ranks end with. The programs are collectives over element types,
reductions, algorithms and world sizes, also over several hosts and through torch.distributed; training at stages 0 to
3; meshes; and checkpoints that are loaded on another mesh. They use public names alone, so any build can run them.

Compare lines from one machine and one torch: the bits of torch's matrix products differ between machines.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import ringcomm

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
COMPLEX = ("complex64", "complex128")
BYTES_ONLY = ("uint16", "uint32", "uint64", "complex32")
OPS = {
    **dict.fromkeys(FLOATS, ("sum", "avg", "prod", "min", "max", "premul_sum")),
    **dict.fromkeys(INTEGERS, ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")),
    "bool": ("sum", "prod", "min", "max", "band", "bor", "bxor"),
    **dict.fromkeys(COMPLEX, ("sum", "avg", "premul_sum")),
}
# Elements per rank: none, a cache line and its neighbours, the short slots of 2 KiB, more than one slot.
COUNTS = (0, 1, 7, 16, 65, 513, 1000, 4099, 20_001)
LARGE = 300_001
MOST = 8 * COUNTS[-1]
Digests = dict[str, bytes]


def digest(tensors: Iterable[torch.Tensor | float | None], computed: bool = False) -> bytes:
    """Returns a digest of all bits; if they are ``computed``, every NaN counts as the same one."""
    found = hashlib.blake2b(digest_size=8)
    for x in tensors:
        x = torch.tensor(x if x is not None else [], dtype=torch.float64) if not isinstance(x, torch.Tensor) else x
        x = x.detach().contiguous().reshape(-1)
        found.update(f"{x.dtype} {x.numel()}".encode())
        if computed and x.is_complex():
            x = torch.view_as_real(x).reshape(-1)
        if computed and x.is_floating_point():
            wide = x if x.dtype == torch.float64 else x.float()
            raw = x.clone().view(torch.uint8).view(-1, x.element_size())
            x = raw.masked_fill_(wide.isnan()[:, None], 255)
        found.update(x.view(torch.uint8).numpy().tobytes())
    return found.digest()


def merged(ranks: Iterable[Digests]) -> dict[str, str]:
    """Returns the checksums of all ranks together, by name."""
    found: dict[str, Any] = {}
    for mine in ranks:
        for name, part in mine.items():
            found.setdefault(name, hashlib.blake2b(digest_size=8)).update(part)
    return {name: each.hexdigest() for name, each in found.items()}


# ---- collectives -------------------------------------------------------------------------------------------------


@cache
def values(dtype: str, rank: int, count: int) -> torch.Tensor:
    """Returns values of a rank. In every fourth element of a float any bits can occur: NaN, infinities, zeros of both
    signs, the smallest and the largest."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(7919 * rank + count)
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count, kind.itemsize), dtype=torch.uint8, generator=generator).view(kind).reshape(-1)
    if not kind.is_floating_point and not kind.is_complex:
        return raw
    usual = (torch.rand(count, 1 + kind.is_complex, generator=generator, dtype=torch.float64) * 3 - 1.5).squeeze(1)
    usual = (torch.view_as_complex(usual) if kind.is_complex else usual).to(kind)
    return torch.where(torch.arange(count) % 4 == 3, raw, usual) if count else usual


def strided(x: torch.Tensor) -> torch.Tensor:
    """Returns the same values in memory with gaps."""
    gaps = torch.zeros((*x.shape, 2), dtype=x.dtype)
    gaps[..., 0] = x
    return gaps[..., 0]


def data(comm: Any, dtype: str, number: int, count: int) -> torch.Tensor:
    """Returns a rank's input for a call; every third one has gaps."""
    x = values(dtype, comm.rank, max(count, MOST))[:count]
    return strided(x) if number % 3 == 2 else x.clone()


def counts_of(dtype: str, op: str = "sum") -> tuple[int, ...]:
    return (*COUNTS, LARGE) if dtype in ("float32", "bfloat16", "int32") and op == "sum" else COUNTS


def reductions(comm: Any, dtypes: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """all_reduce, reduce_scatter, reduce and the forms that take lists; in place and not."""
    w, r = comm.world_size, comm.rank
    for dtype, op in [(name, op) for name in dtypes for op in OPS[name]]:
        more = {"factor": 0.3 + 0.5 * r} if op == "premul_sum" else {}
        numbered = [*enumerate(counts_of(dtype, op))]
        for algorithm in ("auto", "direct", "ring", "oneshot"):
            ends: list[Any] = []
            for i, count in numbered:
                x = data(comm, dtype, i, count)
                out = torch.empty_like(x) if i % 2 else None
                ends += [comm.all_reduce(x, op, out=out, algorithm=algorithm, **more), x]
            yield f"all_reduce {algorithm} {dtype} {op}", digest(ends, computed=True)
        for algorithm in ("auto", "direct", "ring"):
            ends = []
            for i, count in numbered:
                x = data(comm, dtype, i, count // w * w)
                out = x[r * (count // w) : (r + 1) * (count // w)] if i % 2 else None
                ends.append(comm.reduce_scatter(x, op, out=out, algorithm=algorithm, **more))
            yield f"reduce_scatter {algorithm} {dtype} {op}", digest(ends, computed=True)
        ends = []
        for i, count in numbered:
            x = data(comm, dtype, i, count)
            ends += [comm.reduce(x, i % w, op, **more), x]
        yield f"reduce {dtype} {op}", digest(ends, computed=True)
        ends = comm.all_reduce_coalesced([data(comm, dtype, i, count) for i, count in numbered], op, **more)
        parts = [data(comm, dtype, i, COUNTS[i % len(COUNTS)]) for i in range(w)]
        ends.append(comm.reduce_scatter_list(parts, torch.empty_like(parts[r]), op, **more))
        yield f"lists {dtype} {op}", digest(ends, computed=True)


def movement(comm: Any, dtypes: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """What only moves bytes."""
    w, r = comm.world_size, comm.rank
    for dtype in dtypes:
        numbered = [*enumerate(counts_of(dtype))]
        for algorithm in ("auto", "direct", "ring"):
            ends = [comm.all_gather(data(comm, dtype, i, count // w), algorithm=algorithm) for i, count in numbered]
            inside = data(comm, dtype, 0, 1000 * w)
            ends.append(comm.all_gather(inside[r * 1000 : (r + 1) * 1000], out=inside, algorithm=algorithm))
            yield f"all_gather {algorithm} {dtype}", digest(ends)
            ends = [comm.broadcast(data(comm, dtype, i, n), i % w, algorithm=algorithm) for i, n in numbered]
            yield f"broadcast {algorithm} {dtype}", digest(ends)
        ends = []
        for i, count in numbered:
            root, part = i % w, count // w
            x = data(comm, dtype, i, part * w)
            ends.append(comm.gather(x[:part], root))
            ends.append(comm.scatter(x if r == root else None, root, out=torch.empty(part, dtype=x.dtype)))
            ends.append(comm.all_to_all(x))
        yield f"gather, scatter, all_to_all {dtype}", digest(ends)
        send = [(3 * r + 5 * p) % 7 * 100 for p in range(w)]
        ends = [comm.all_to_all(data(comm, dtype, 0, sum(send)), send_counts=send)]
        parts = [data(comm, dtype, i, COUNTS[(i + r) % len(COUNTS)]) for i in range(w)]
        like = [torch.empty(COUNTS[(i + r) % len(COUNTS)], dtype=parts[0].dtype) for i in range(w)]
        ends += comm.all_to_all_list(parts, [x.clone() for x in like])
        mine, like = parts[0], [torch.empty(COUNTS[p % len(COUNTS)], dtype=parts[0].dtype) for p in range(w)]
        ends += comm.all_gather_list(mine, [x.clone() for x in like])
        ends += comm.gather_list(mine, like if r == w - 1 else None, w - 1) or []
        yield f"lists {dtype}", digest(ends)


def other_calls(comm: Any) -> Iterator[tuple[str, bytes]]:
    """Messages, calls in flight, groups of calls, communicators of some ranks, packed buckets."""
    w, r = comm.world_size, comm.rank
    works: list[Any] = []
    ends: list[Any] = []
    for i, count in enumerate(COUNTS):
        if w > 1:
            ends.append(torch.empty(count))
            works.append(comm.isend(data(comm, "float32", i, count), (r + 1) % w, tag=i))
            works.append(comm.irecv(ends[-1], (r - 1) % w, tag=i))
        ends.append(data(comm, "bfloat16", i, count))
        works.append(comm.all_reduce(ends[-1], "avg", async_op=True))
    for work in works:
        work.wait()
    yield "messages, asynchronous", digest(ends, computed=True)
    with comm.coalesce() as calls:
        for i, count in enumerate(COUNTS):
            comm.all_reduce(data(comm, "float16", i, count))
            comm.all_gather(data(comm, "int16", i, count))
    yield "coalesced", digest(calls.wait(), computed=True)
    ends = []
    for group in (comm.split(r % 2, -r), comm.subgroup([*range(0, w, 2)]), comm.dup()):
        if group is not None:
            ends += [group.all_reduce(data(comm, "float32", i, count), "avg") for i, count in enumerate(COUNTS)]
            group.close()
    yield "split, subgroup, dup", digest(ends, computed=True)
    ends = []
    for wide, narrow in (("float32", "bfloat16"), ("float64", "float32"), ("float16", "float32")):
        tensors = [data(comm, wide, i, count) for i, count in enumerate(COUNTS)]
        bucket = comm.pack(tensors, torch.empty(sum(COUNTS), dtype=getattr(torch, narrow)), 0.37)
        ends += [bucket, *comm.unpack(bucket, [torch.empty_like(x) for x in tensors], 3.1)]
    yield "pack, unpack", digest(ends, computed=True)


def collectives(comm: Any, reduced: tuple[str, ...], moved: tuple[str, ...]) -> Digests:
    return {**dict(reductions(comm, reduced)), **dict(movement(comm, moved)), **dict(other_calls(comm))}


def over_torch(comm: Any, folder: str) -> Digests:
    """The backend of torch.distributed, and torch's own DDP over it, on ranks that are processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's advice about its newest names
    store = dist.FileStore(os.path.join(folder, "store"), comm.world_size)
    dist.init_process_group("ringcomm", store=store, rank=comm.rank, world_size=comm.world_size)
    found, w, r = collectives(comm, ("float32", "bfloat16", "int32"), ("float32",)), comm.world_size, comm.rank
    for dtype, ops in OPS.items():
        ends: list[Any] = []
        for name in (name for name in ops if name != "premul_sum" and (dtype not in COMPLEX or name == "sum")):
            op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(name, name.upper()))
            for i, count in enumerate(COUNTS):
                x = data(comm, dtype, i, count)
                dist.all_reduce(x, op)
                part, every = torch.empty(count // w, dtype=x.dtype), data(comm, dtype, 0, count // w * w)
                dist.reduce_scatter_tensor(part, every.clone(), op)
                ends += [x, part]
        every = torch.empty(1000 * w, dtype=getattr(torch, dtype))
        dist.all_gather_into_tensor(every, data(comm, dtype, 0, 1000))
        lists = [torch.empty(513, dtype=every.dtype) for _ in range(w)]
        dist.all_to_all(lists, [data(comm, dtype, i, 513) for i in range(w)])
        sent = data(comm, dtype, 1, 4099)
        dist.broadcast(sent, w - 1)
        found[f"torch.distributed {dtype}"] = digest([*ends, every, *lists, sent], computed=True)
    model = make()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
    losses = steps(wrapped, torch.optim.SGD(model.parameters(), 0.1), r, Recipe(), None)
    found["torch's DDP"] = digest([*losses, *model.state_dict().values()])
    dist.destroy_process_group()
    return found


# ---- training ----------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 37, 16, 4, 8, 8


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A decoder with a tied output layer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.blocks[1].norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recipe:
    """How a model is trained: the optimizer, the number of passes in a step, the limit of the gradients' norm."""

    def __init__(self, optimizer: str = "AdamW", passes: int = 1, clip: float = 0.0, **settings: Any) -> None:
        self.optimizer, self.passes, self.clip, self.settings = optimizer, passes, clip, settings

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer, with two groups of parameters."""
        params = [p for p in model.parameters() if p.requires_grad]
        kind = getattr(torch.optim, self.optimizer)
        more = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        groups = [{"params": [p for p in params if p.ndim > 1]}]
        groups.append({"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0})
        return kind(groups, lr=1e-2, weight_decay=0.1, **more)


BFLOAT16 = ringcomm.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
RECIPES = {
    "float32": Recipe(),
    "bfloat16": Recipe(mixed_precision=BFLOAT16),
    "bfloat16, gradients float32": Recipe(
        mixed_precision=ringcomm.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "clipped": Recipe("SGD", clip=0.3),
    "accumulated": Recipe(passes=3, clip=0.5),
    "accumulated in a tree": Recipe("SGD", passes=4, accumulation="tree"),
    "whole tensors": Recipe("Adafactor"),
    "one bucket": Recipe(bucket_cap_mb=25.0),
    "clipped bfloat16, accumulated": Recipe(passes=2, clip=0.3, mixed_precision=BFLOAT16),
}


with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    _MODEL = Net()


def make() -> Net:
    """Returns a copy of the model, with the same values on every rank."""
    return copy.deepcopy(_MODEL)


def batch(step: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * number + step))
    return tokens, tokens.roll(1, 1)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), target.flatten())


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, recipe: Recipe, no_sync: Any, count: int = 4
) -> list[torch.Tensor]:
    """Trains; returns losses and norms."""
    found = []
    for step in range(count):
        for number in range(recipe.passes):
            x, y = batch(step, 10 * rank + number)
            loss = loss_of(model(x), y) / recipe.passes
            if number < recipe.passes - 1:
                with no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            found.append(loss.detach())
        if recipe.clip:
            found.append(ringcomm.clip_grad_norm_(model, recipe.clip))
        optimizer.step()
        optimizer.zero_grad()
    return found


def state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the tensors of an optimizer's state, in order."""
    return [x for each in optimizer.state_dict()["state"].values() for _, x in sorted(each.items())]


def training(comm: Any, stage: int, names: Iterable[str] = tuple(RECIPES)) -> Digests:
    """Every recipe at one stage: losses, norms, parameters and state of the optimizer."""
    found = {}
    for name in names:
        recipe, model = RECIPES[name], make()
        optimizer = recipe.make(model)
        ringcomm.shard(model, optimizer, stage, comm, **{"bucket_cap_mb": 0.005, **recipe.settings})
        seen = steps(model, optimizer, comm.rank, recipe, ringcomm.no_sync)
        ringcomm.unshard(model, optimizer)
        found[name] = digest([*seen, *model.state_dict().values(), *state(optimizer)])
    return found


def wrappers(comm: Any) -> Digests:
    """The other wrappers of a model: DistributedDataParallel, fully_shard, ZeroRedundancyOptimizer."""
    found, recipe = {}, Recipe(clip=0.4)
    model = make()
    wrapped = ringcomm.DistributedDataParallel(model, comm, bucket_cap_mb=0.005)
    optimizer = recipe.make(model)
    seen = steps(wrapped, optimizer, comm.rank, recipe, None)
    found["DistributedDataParallel"] = digest([*seen, *model.state_dict().values(), *state(optimizer)])
    model = make()
    for block in model.blocks:
        ringcomm.fully_shard(block, comm=comm)
    ringcomm.fully_shard(model, comm=comm)
    optimizer = recipe.make(model)
    seen = steps(model, optimizer, comm.rank, recipe, None)
    ringcomm.unshard(model, optimizer)
    found["fully_shard"] = digest([*seen, *model.state_dict().values(), *state(optimizer)])
    model = make()
    wrapped = ringcomm.DistributedDataParallel(model, comm, bucket_cap_mb=0.005)
    params = [p for p in model.parameters() if p.requires_grad]
    sharded = ringcomm.ZeroRedundancyOptimizer(params, torch.optim.AdamW, comm=comm, lr=1e-2)
    seen = steps(wrapped, sharded, comm.rank, recipe, None)
    found["ZeroRedundancyOptimizer"] = digest([*seen, *model.state_dict().values()])
    w, r = comm.world_size, comm.rank
    generator = torch.Generator().manual_seed(r)
    q, k, v = (torch.randn(2, 4, 4, 8, generator=generator).requires_grad_() for _ in range(3))
    attended = ringcomm.ring_attention(q, k, v, comm=comm, causal=w > 1)
    attended.square().sum().backward()
    found["ring_attention"] = digest([attended, q.grad, k.grad, v.grad])
    return found


# ---- meshes and checkpoints --------------------------------------------------------------------------------------

MESHES: dict[str, tuple[dict[str, int], int, str]] = {
    "pp2 dp2 tp2, stage 2": ({"pp": 2, "dp": 2, "tp": 2}, 2, "1f1b"),
    "pp2 tp2, stage 3": ({"pp": 2, "tp": 2}, 3, "zero-bubble"),
    "dp2 tp2, stage 3": ({"dp": 2, "tp": 2}, 3, "gpipe"),
    "pp4, stage 0": ({"pp": 4}, 0, "gpipe"),
    "replicate2 shard2, stage 2": ({"replicate": 2, "shard": 2}, 2, "gpipe"),
    "dp3, stage 1": ({"dp": 3}, 1, "gpipe"),
}
PLAN = {
    "blocks.*": "heads",
    **dict.fromkeys(("blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"), "colwise"),
    **dict.fromkeys(("blocks.*.out", "blocks.*.down"), "rowwise"),
}


def mesh_steps(comm: Any, name: str, first: int, load: Path | None, save: Path) -> Digests:
    """Two steps on a mesh, from a checkpoint and to another one; returns losses and norms."""
    axes, stage, schedule = MESHES[name]
    mesh, model = ringcomm.init_mesh(axes, comm), make()
    if mesh.size("tp") > 1:
        ringcomm.parallelize(model, PLAN, mesh["tp"])
    depth, data_axes = mesh.size("pp"), [axis for axis in ("replicate", "shard", "dp") if axis in axes]
    cuts = [f"blocks.{4 // depth * i}" for i in range(1, depth)]
    line = mesh["pp"] if depth > 1 else ringcomm.init(0, 1)
    pipe = ringcomm.Pipeline(
        ringcomm.split(model, cuts), line, microbatches=2, schedule=schedule, loss=loss_of, ties="exact"
    )
    recipe = Recipe()
    optimizer = recipe.make(pipe)
    ringcomm.shard(pipe, optimizer, stage, mesh=mesh, bucket_cap_mb=0.005)
    if load is not None:
        ringcomm.checkpoint.load(load, pipe, optimizer)
    number, seen = 0, []
    for axis in data_axes:
        number = number * mesh.size(axis) + mesh.coordinates[axis]
    for step in range(first, first + 2):
        x, y = batch(step, number)
        seen.append(pipe.step(x, target=y))
        seen.append(ringcomm.clip_grad_norm_(pipe, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    ringcomm.checkpoint.save(save, pipe, optimizer)
    return {"losses": digest(seen)}


def saved(path: Path) -> str:
    """Returns a checksum of all tensors of a checkpoint and their names, read by torch."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in sorted(metadata.items())
        if hasattr(facts, "size")
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return digest([*tensors.values(), *(torch.tensor([*name.encode()]) for name in tensors)]).hex()


def meshes(folder: Path) -> Iterator[tuple[str, str]]:
    """Trains on each mesh, then continues from each mesh's checkpoint on the next one."""
    names = [*MESHES]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        for what, where, first, load in (("", name, 0, None), (f" -> {following}", following, 2, name)):
            world = torch.Size(MESHES[where][0].values()).numel()
            to = folder / f"{name}{what}"
            run = partial(mesh_steps, name=where, first=first, load=load and folder / load, save=to)
            for label, checksum in merged(ringcomm.run_ranks(run, world)).items():
                yield f"mesh {name}{what}, {label}", checksum
            yield f"mesh {name}{what}, checkpoint", saved(to)


# ---- all ---------------------------------------------------------------------------------------------------------


def programs(folder: Path) -> Iterator[tuple[str, Callable[[], Iterable[tuple[str, str]]]]]:
    """Yields the sets of programs: a name with which their lines begin, and what runs them."""

    def ranks(fn: Callable[..., Digests], world: int, *args: Any, **how: Any) -> Any:
        return lambda: merged(ringcomm.run_ranks(fn, world, *args, **how)).items()

    for world in WORLD_SIZES:
        yield f"world {world}", ranks(collectives, world, (*OPS,), (*OPS, *BYTES_ONLY))
    for hosts in ([2, 2], [1, 2], [3, 2]):
        few = ("float32", "bfloat16", "float16", "int32", "bool")
        yield f"hosts {hosts}", ranks(collectives, sum(hosts), few, ("float32", "uint8"), hosts=hosts)
    for world in (2, 3):
        for stage in range(4):
            yield f"training {world} stage {stage}", ranks(training, world, stage)
        yield f"training {world}", ranks(wrappers, world)
    yield "mesh", lambda: ((name.removeprefix("mesh "), checksum) for name, checksum in meshes(folder))
    yield "processes 3", ranks(over_torch, 3, str(folder), ranks="processes")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--only", nargs="+", metavar="START", help='sets whose names begin so, such as "world 3" or training'
    )
    p.add_argument("--list", action="store_true", help="prints the names of the sets")
    a = p.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"package {Path(ringcomm.__file__).parent}", file=sys.stderr)
    total = hashlib.blake2b(digest_size=8)
    with tempfile.TemporaryDirectory() as folder:
        for name, run in programs(Path(folder)):
            if a.only and not name.startswith(tuple(a.only)):
                continue
            if a.list:
                print(name)
                continue
            began = time.monotonic()
            for label, checksum in run():
                total.update(checksum.encode())
                print(f"{name} {label} {checksum}", flush=True)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    if not a.list:
        print(f"all {total.hexdigest()}")


if __name__ == "__main__":
    main()
