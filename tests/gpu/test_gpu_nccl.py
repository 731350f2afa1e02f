"""Real NCCL between hosts that are pretended: ranks as processes on one GPU. NCCL takes several ranks of one GPU in two
ways, each tried where it exists:

    shared  NCCL_MULTI_RANK_GPU_ENABLE=1, from NCCL 2.30.3 on
    apart   an NCCL_HOSTID for each process: NCCL takes them for hosts of their own and uses its sockets

The bits must be those of the cpu engine on one host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ringcomm
from ringcomm import _C
from ringcomm.comm import nccl
from tests.gpu.nccl_rank import cells
from tests.gpu.on_gpu import LIMITS_S, in_processes, real
from tests.support import ROOT
from tests.support.reference import same_bits

pytestmark = [in_processes, real]


def why_not(way: str) -> str:
    """Why NCCL cannot be used in this way here; empty if it can."""
    usable, text = nccl.facts()
    if not usable:
        return text
    text = _C.nccl_version(nccl.path())
    version = tuple(int(part) for part in text.split("."))
    return f"NCCL {text} is older than 2.30.3" if way == "shared" and version < (2, 30, 3) else ""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(way: str, rank: int, hosts: list[int], port: int) -> dict[str, str]:
    host = next(h for h in range(len(hosts)) if rank < sum(hosts[: h + 1]))
    told = {"RANK": rank, "WORLD_SIZE": sum(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told |= {"RINGCOMM_HOST": f"host{host}", "NCCL_SOCKET_IFNAME": "lo"}
    told |= {"NCCL_MULTI_RANK_GPU_ENABLE": 1} if way == "shared" else {"NCCL_HOSTID": f"rank{rank}"}
    return {**os.environ, **{key: str(value) for key, value in told.items()}}


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("way", ["shared", "apart"])
def test_real_nccl_gives_the_bits_of_the_cpu_engine(way: str, hosts: list[int], tmp_path: Path) -> None:
    if reason := why_not(way):
        pytest.skip(f"needs NCCL for several ranks of one GPU ({way}): {reason}")
    world_size, port = sum(hosts), free_port()
    files = [tmp_path / f"{rank}.pt" for rank in range(world_size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.nccl_rank", str(file)],
            cwd=ROOT,
            env=environment(way, rank, hosts, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        said = [rank.communicate(timeout=LIMITS_S["processes"] * 2 / 3)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(text[-3000:] for text in said)
    expected = ringcomm.run_ranks(cells, world_size, "cpu", timeout=LIMITS_S["threads"])
    for rank, file in enumerate(files):
        for at, (want, got) in enumerate(zip(expected[rank], torch.load(file), strict=True)):
            assert same_bits(want, got), f"result {at} of rank {rank}"
