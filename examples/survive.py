"""Training that survives lost ranks: four processes train a small GPT, one is killed during training, three continue.

    python examples/survive.py [--steps 60] [--kill-at 20]

Nothing is restarted. Each survivor's call raises RankLostError. The survivors shrink the communicator, agree on the
last step that all of them have completed, and continue from copies of that step's state in their memory. This works at
stage 0, where every rank has the full model and optimizer; at other stages resume from a checkpoint (`resume.py`).
"""

import argparse
import copy
import multiprocessing
import os
import signal
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT
from text import read_text
from torch.distributed import FileStore

import ringcomm
from ringcomm.errors import CollectiveTimeoutError, RankLostError

WORLD_SIZE = 4
BATCH, CONTEXT = 8, 64
LOST = (RankLostError, CollectiveTimeoutError)


class Trainer:
    """The state of one rank: weights, moments, and its position in the data."""

    def __init__(self, comm: ringcomm.Communicator, rank: int) -> None:
        self.comm, self.step = comm, 0
        self.text, self.seed = read_text(None), rank
        self.kept: dict[int, Any] = {0: None}  # states of the last two steps, by number of steps

    def wrap(self) -> None:
        """Wraps a model and its optimizer over the current ranks, with their state after ``step`` steps."""
        torch.manual_seed(0)
        model: Any = GPT(layers=2, dim=64, heads=2, context=CONTEXT)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.draw = torch.Generator().manual_seed(self.seed)
        if (state := self.kept[self.step]) is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            self.draw.set_state(state[2])
        self.model, self.optimizer = ringcomm.shard(model, optimizer, stage=0, comm=self.comm)

    def one_step(self) -> float:
        """Runs one step. Returns: the mean loss of all ranks."""
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=self.draw).tolist()
        windows = torch.stack([self.text[at : at + CONTEXT + 1] for at in starts]).long()
        loss = F.cross_entropy(self.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = float(self.comm.all_reduce(loss.detach(), "avg"))
        state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.draw.get_state()))
        self.kept = {self.step: self.kept[self.step], self.step + 1: state}
        self.step += 1
        return mean

    def recover(self) -> None:
        """Returns to the last step that all surviving ranks have completed. Another rank may be lost meanwhile."""
        for _ in range(WORLD_SIZE):
            try:
                new = self.comm.shrink()
                self.comm.close()
                self.comm = new
                self.step = int(new.all_reduce(torch.tensor([self.step]), "min"))
                return
            except LOST as error:
                last = error
        raise last


def train(rank: int, folder: str, steps: int, victims: dict[int, int]) -> None:
    """Runs one process. A rank in ``victims`` kills itself before the step that is given there."""
    torch.set_num_threads(1)
    store = FileStore(os.path.join(folder, "store"), WORLD_SIZE)
    trainer = Trainer(ringcomm.init(rank, WORLD_SIZE, store=store, timeout=30), rank)
    while True:
        try:
            trainer.wrap()
            while trainer.step < steps:
                ringcomm.step(trainer.step)
                if trainer.step == victims.get(rank):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = trainer.one_step()
                if trainer.comm.rank == 0 and trainer.step % 10 == 0:
                    print(f"step {trainer.step}: loss {loss:.3f} on {trainer.comm.world_size} ranks", flush=True)
            trainer.comm.barrier()  # no rank leaves before all have completed the last step
            break
        except LOST as error:
            trainer.recover()
            if trainer.comm.rank == 0:
                print(f"{error}\ngoes on from step {trainer.step} on {trainer.comm.world_size} ranks", flush=True)
    trainer.comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, nargs="*", default=[20], help="steps: rank 1 is killed, then 2, then 3")
    a = parser.parse_args()
    victims = dict(enumerate(a.kill_at, 1))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=train, args=(r, folder, a.steps, victims)) for r in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    print("exit codes", [process.exitcode for process in ranks])
    if any(process.exitcode for r, process in enumerate(ranks) if r not in victims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
