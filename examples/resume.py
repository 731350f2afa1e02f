"""Checkpoints on the way, and going on from the newest: `train_gpt.py --save-every`. Started again, by torchrun after a
failure or by a scheduler, the same command goes on where the last whole checkpoint was made."""

import argparse
import shutil
from pathlib import Path

import torch.distributed as dist
from text import Batches
from training import Training

KEPT = 2  # one to go on from while another is written, and one more


def steps_in(folder: Path) -> list[int]:
    """Those of the whole checkpoints, ascending: one that is not whole has another name until it is."""
    return sorted(int(each.name[5:]) for each in folder.glob("step-*") if each.name[5:].isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


class Saved:
    """The checkpoints of --save, a folder that all hosts see: one every --save-every steps, and the last two are kept.

    Each is written under a new name, which any file system gives at once; a rank that dies meanwhile leaves those that
    were there.
    """

    def __init__(self, a: argparse.Namespace, training: Training, batches: Batches) -> None:
        self.folder, self.every, self.until = Path(a.save), a.save_every, a.until
        self.training, self.batches = training, batches

    def resume(self) -> int:
        """Goes on from the newest one; the steps that were made, 0 if there is none. A collective."""
        comm = self.training.mesh.comm
        newest = (steps_in(self.folder) or [0])[-1] if comm.rank == 0 else 0
        step = int(comm.exchange(str(newest).encode())[0])  # as the first rank sees the folder
        if step == 0:
            return 0
        path = path_of(self.folder, step)
        if dist.get_rank() == 0:
            print(f"goes on from step {step}: {path}", flush=True)
        return self.training.resume(str(path), self.batches)

    def after(self, step: int) -> None:
        """Saves if it is due, after that many steps; a collective."""
        if step % self.every != 0 and step != self.until:
            return
        self.training.save(str(path_of(self.folder, step)), self.batches)
        if dist.get_rank() == 0:
            for old in steps_in(self.folder)[:-KEPT]:
                shutil.rmtree(path_of(self.folder, old))
