"""Saves checkpoints during training and resumes from the newest: `train_gpt.py --save-every`. If torchrun or a
scheduler starts the same command again after a failure, the training continues from the last complete checkpoint."""

import argparse
import shutil
from pathlib import Path

import torch.distributed as dist
from text import Batches
from training import Training

KEPT = 2  # checkpoints: one to resume from while another is written, and one more


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, ascending; an incomplete checkpoint has another name."""
    return sorted(int(each.name[5:]) for each in folder.glob("step-*") if each.name[5:].isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


class Saved:
    """The checkpoints in --save, a folder that all hosts can access: one every --save-every steps, of which the last
    two are kept.

    Each checkpoint is written under a new name and then renamed, which every file system does atomically. If a rank
    dies during a save, the earlier checkpoints remain.
    """

    def __init__(self, a: argparse.Namespace, training: Training, batches: Batches) -> None:
        self.folder, self.every, self.until = Path(a.save), a.save_every, a.until
        self.training, self.batches = training, batches

    def resume(self) -> int:
        """Resumes from the newest checkpoint; returns the number of completed steps, 0 if there is none. A
        collective."""
        comm = self.training.mesh.comm
        newest = (steps_in(self.folder) or [0])[-1] if comm.rank == 0 else 0
        step = int(comm.exchange(str(newest).encode())[0])  # all ranks use the first rank's view of the folder
        if step == 0:
            return 0
        path = path_of(self.folder, step)
        if dist.get_rank() == 0:
            print(f"goes on from step {step}: {path}", flush=True)
        return self.training.resume(str(path), self.batches)

    def after(self, step: int) -> None:
        """Saves if it is due after that many steps; a collective."""
        if step % self.every != 0 and step != self.until:
            return
        self.training.save(str(path_of(self.folder, step)), self.batches)
        if dist.get_rank() == 0:
            for old in steps_in(self.folder)[:-KEPT]:
                shutil.rmtree(path_of(self.folder, old))
