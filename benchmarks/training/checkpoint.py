"""Times saving and loading a model with AdamW beside torch.distributed.checkpoint (DCP), in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m benchmarks.training.checkpoint

results/checkpoint.txt has its output. DCP saves and loads the same model under FSDP2, and under torch's DDP, through
get_state_dict and set_state_dict. Both write to the same file system, with fsync. ringcomm alone has checksums, and
compares them when it loads.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcomm

Pair = tuple[Callable[[], object], Callable[[], object]]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, dim: int) -> None:
    """One step, so that the optimizer has state."""
    model(torch.ones(1, dim)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_ringcomm(model: nn.Module, dim: int, stage: int, path: Path) -> Pair:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = ringcomm.shard(model, optimizer, stage=stage)
    trained(model, optimizer, dim)
    return (
        lambda: ringcomm.checkpoint.save(path, model, optimizer),
        lambda: ringcomm.checkpoint.load(path, model, optimizer),
    )


def with_dcp(model: nn.Module, dim: int, path: Path) -> Pair:
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, dim)

    def state() -> dict[str, Any]:
        values, moments = get_state_dict(model, optimizer)
        return {"model": values, "optimizer": moments}

    def save() -> None:
        dcp.save(state(), checkpoint_id=path)

    def load() -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return save, load


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--rounds", type=int, default=9)
    a = p.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="ringcomm-checkpoint-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    root = Path(folder[0])

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(a.dim, a.dim) for _ in range(a.layers)))

    def fsdp2() -> nn.Module:
        mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), model()
        for layer in whole:
            fully_shard(layer, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    stages = (0, 1, 3)
    kinds = {f"ringcomm stage {stage}": with_ringcomm(model(), a.dim, stage, root / str(stage)) for stage in stages}
    kinds["DCP, FSDP2"] = with_dcp(fsdp2(), a.dim, root / "fsdp2")
    kinds["DCP, DDP"] = with_dcp(nn.parallel.DistributedDataParallel(model()), a.dim, root / "ddp")
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(a.rounds + 1):
        for name, pair in kinds.items():
            for what, call in zip(("save", "load"), pair, strict=True):
                dist.barrier()
                start = time.perf_counter()
                call()
                dist.barrier()
                if turn:
                    seconds.setdefault((name, what), []).append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        numel = sum(p.numel() for p in model().parameters())
        print(f"# {numel:,} parameters, AdamW, {dist.get_world_size()} ranks, torch {torch.__version__}")
        print(f"# {'ms, median (min-max)':18s} {'save':>22s} {'load':>22s}")
        for name in kinds:
            cells = []
            for what in ("save", "load"):
                each = [1e3 * one for one in seconds[name, what]]
                cells.append(f"{statistics.median(each):.0f} ({min(each):.0f}-{max(each):.0f})")
            print(f"  {name:20s} {cells[0]:>22s} {cells[1]:>22s}")
        shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
