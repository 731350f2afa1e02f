"""The GPT on a mesh of ranks: splits its layers and stages, and gathers the full model from all ranks."""

import argparse
import hashlib
import math
import pickle
from collections.abc import Callable

import torch
from gpt import GPT
from torch import nn

import ringcomm
from ringcomm.modules.shard_spec import part_of
from ringcomm.pipeline_parallel.schedules import SCHEDULES
from ringcomm.tensor_parallel.styles import Colwise, Style

PLAN: dict[str, str | Style] = {
    "token": "vocab", "head": Colwise(gather_output=True, pad=True), "blocks.*": "heads",
    "blocks.*.qkv": Colwise(parts=3), "blocks.*.proj": "rowwise",
    "blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise",
}  # fmt: skip
ON_SEQUENCE: dict[str, str | Style] = {
    "blocks": "sequence_region", "blocks.*.norm1": "sequence", "blocks.*.norm2": "sequence",
}  # fmt: skip
AXES = ("pp", "dp", "cp", "tp")  # tp's ranks are neighbours


def axes_of(a: argparse.Namespace, ranks: int) -> dict[str, int]:
    """Returns the axes that the flags ask for; without --dp, dp gets the ranks that the other axes leave."""
    others = a.pp * a.cp * a.tp
    return {"pp": a.pp, "dp": a.dp or max(1, ranks // others), "cp": a.cp, "tp": a.tp}


def described(axes: dict[str, int]) -> str:
    """Formats axes, such as "dp 2 x tp 2"."""
    return " x ".join(f"{name} {extent}" for name, extent in axes.items() if extent > 1) or "one rank"


def stages_of(a: argparse.Namespace) -> int:
    """Returns the number of pipeline stages."""
    return a.pp * (a.chunks if a.schedule == "interleaved" else 1)


def refusal(a: argparse.Namespace, ranks: int) -> str | None:
    """Returns a sentence that says why this number of ranks cannot use these flags; None if it can."""
    found = _refused(a, ranks)
    return found and f"train_gpt: got {found}"


def _refused(a: argparse.Namespace, ranks: int) -> str | None:
    for name in ("tp", "pp", "cp", "micro_batches", "accumulate", "batch", "chunks"):
        if getattr(a, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(a, name)}, expected 1 or more; change it"
    axes, part = axes_of(a, ranks), a.context // a.cp
    if math.prod(axes.values()) != ranks:
        return f"{described(axes)} on {ranks} ranks, expected axes whose product is {ranks}; change one"
    if a.schedule != "1f1b" and a.pp == 1:
        return f"--schedule {a.schedule} without --pp, expected 2 or more there; add it"
    if a.dim % a.heads:
        return f"--dim {a.dim} with --heads {a.heads}, expected a multiple; change one"
    if a.heads % a.tp:
        return f"--heads {a.heads} with --tp {a.tp}, expected a multiple; use a --tp that divides it"
    if a.layers % stages_of(a):
        stages = f"{stages_of(a)} stages ({a.schedule}, --pp {a.pp})"
        return f"--layers {a.layers} for {stages}, expected a multiple; change --layers, --pp or --chunks"
    if a.cp > 1 and a.context % (2 * a.cp):
        return f"--context {a.context} with --cp {a.cp}, expected a multiple of {2 * a.cp}; change --context"
    if a.sequence_parallel and a.tp == 1:
        return "--sequence-parallel without --tp, expected 2 or more there; add it"
    if a.sequence_parallel and part % a.tp:
        return f"--sequence-parallel with {part} bytes on each --cp rank, expected a multiple of --tp; change one"
    return None


def add_flags(p: argparse.ArgumentParser) -> None:
    """Adds the flags of the mesh."""
    for name, text in (
        ("dp", "data parallel ranks (0: all ranks that the other axes leave)"),
        ("tp", "tensor parallel ranks: each has some of the heads and features (1)"),
        ("pp", "pipeline ranks: each has some of the blocks (1)"),
        ("cp", "context parallel ranks: each has a part of every window (1)"),
    ):
        p.add_argument(f"--{name}", type=int, default=int(name != "dp"), metavar="RANKS", help=text)
    p.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a pipeline's step (1)")
    p.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="schedule of the pipeline (1f1b)")
    p.add_argument("--chunks", type=int, default=2, help="stages on a rank with the interleaved schedule (2)")
    p.add_argument("--sequence-parallel", action="store_true", help="run norms on parts of the sequence, with --tp")


def cut(a: argparse.Namespace, module: GPT, mesh: ringcomm.Mesh, loss: Callable[..., torch.Tensor]) -> nn.Module:
    """Returns this rank's part of the model: layers split along tp, and the blocks of its stages, as a Pipeline."""
    if mesh.size("tp") > 1:
        plan = PLAN | ON_SEQUENCE if a.sequence_parallel else PLAN
        ringcomm.parallelize(module, plan, mesh["tp"], sequence_dim=1 if a.sequence_parallel else None)
    if mesh.size("pp") == 1:
        return module
    stages = stages_of(a)
    starts = [f"blocks.{a.layers // stages * stage}" for stage in range(1, stages)]
    return ringcomm.Pipeline(
        ringcomm.split(module, starts), mesh["pp"], microbatches=a.micro_batches, schedule=a.schedule, loss=loss,
        reduction="sum", ties="exact",
    )  # fmt: skip


def whole_state(model: nn.Module, mesh: ringcomm.Mesh) -> dict[str, torch.Tensor]:
    """Returns the parameters of the full model on every rank, by name. A collective; it needs memory for all of
    them."""
    state = model.state_dict()
    mine = []
    if mesh.coordinates["dp"] == mesh.coordinates["cp"] == 0:
        mine = [(name, part_of(p), state[name]) for name, p in model.named_parameters(remove_duplicate=False)]
    whole: dict[str, torch.Tensor] = {}
    for theirs in mesh.comm.exchange(pickle.dumps(mine)):
        for name, part, x in pickle.loads(theirs):
            if part.dim is None:
                whole[name] = x
                continue
            at, into = 0, whole.setdefault(name, x.new_empty(part.unsharded_shape(x.shape)))
            for start, count in part.pieces:
                into.narrow(part.dim, start, count).copy_(x.narrow(part.dim, at, count))
                at += count
    return whole


def checksum(state: dict[str, torch.Tensor]) -> str:
    """Returns a checksum of all parameters; it is equal for equal bits."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
