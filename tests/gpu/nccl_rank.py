"""One rank of tests/gpu/test_gpu_nccl.py, a process: `python -m tests.gpu.nccl_rank FILE` writes its results
there. The environment says which rank it is, and which host it takes itself to be on."""

from __future__ import annotations

import sys

import torch

import ringcomm
from ringcomm import Communicator
from tests.support.reference import values


def cells(comm: Communicator, place: str) -> list[torch.Tensor]:
    """Results of this rank, on the cpu."""
    results = []
    ahead, behind = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for dtype in ("float32", "bfloat16", "int8"):
        for count in (1, 4099, 1 << 18):
            x = values(dtype, comm.rank, count).to(place)
            parts = values(dtype, comm.rank, 64 * comm.world_size).to(place)
            found = [comm.all_reduce(x, out=torch.empty_like(x)), comm.reduce_scatter(parts), comm.all_gather(x)]
            found.append(x.clone())
            comm.all_reduce(found[-1], "max", async_op=True).wait()
            got = torch.empty_like(x)
            for work in [comm.isend(x, ahead), comm.irecv(got, behind)]:
                work.wait()
            comm.synchronize()
            results += [each.cpu() for each in (*found, got)]
    return results


if __name__ == "__main__":
    with ringcomm.init(device="cuda:0", timeout=60) as across:
        assert across.describe()["between_hosts"] == "nccl"
        torch.save(cells(across, "cuda:0"), sys.argv[1])
