"""Remote procedure calls beside ringcomm's collectives: one program trains a model whose embedding lies on rank 0.

    torchrun --nproc-per-node 3 examples/rpc.py [--steps 50]

Rank 0 holds the embedding table. Every other rank is a trainer: it looks up words on rank 0 by torch.distributed.rpc,
and has a copy of the next layer, whose gradients ringcomm's process group averages. dist_autograd sends the embedding's
gradients back to rank 0. torch's DistributedOptimizer steps the table on rank 0 and the layer on the trainer, so
trainers update the table without waiting for one another. The remote calls use torch's own agent, TensorPipe, and not
ringcomm.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

import ringcomm  # noqa: F401  registers the backend

WORDS, WIDTH, CLASSES, BATCH = 30, 8, 3, 32
_table = nn.Parameter(torch.zeros(WORDS, WIDTH))  # only the table of rank 0 is used


def table() -> nn.Parameter:
    """Called on rank 0: returns the embedding table."""
    return _table


def look_up(words: torch.Tensor) -> torch.Tensor:
    """Called on rank 0: returns the rows of some words."""
    return F.embedding(words, _table)


def train(steps: int, trainers: dist.ProcessGroup) -> list[float]:
    """Trains on one of the ranks of ``trainers``. Returns: their mean loss, by step."""
    torch.manual_seed(0)  # the same layer on every trainer
    layer = nn.Linear(WIDTH, CLASSES)
    parameters = [rpc.remote("rank0", table), *(rpc.RRef(p) for p in layer.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        words = torch.randint(WORDS, (BATCH,), generator=draw)
        with dist_autograd.context() as context:
            rows = rpc.rpc_sync("rank0", look_up, args=(words,))
            loss = F.cross_entropy(layer(rows), words % CLASSES)
            dist_autograd.backward(context, [loss])
            gradients = dist_autograd.get_gradients(context)
            for p in layer.parameters():
                dist.all_reduce(gradients[p], dist.ReduceOp.AVG, trainers)
            optimizer.step(context)
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, trainers)
        losses.append(float(mean))
    return losses


def run(steps: int, init_method: str | None = None) -> list[float]:
    """Runs one rank, with torch.distributed's default group. Returns: a trainer's losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method or "env://")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    trainers = dist.new_group(list(range(1, world_size)))
    losses = train(steps, trainers) if rank else []
    rpc.shutdown()  # rank 0 answers until all have called it
    return losses


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=50, help="steps of each trainer (50)")
    a = p.parse_args()
    dist.init_process_group("ringcomm")
    losses = run(a.steps)
    if dist.get_rank() == 1:
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
