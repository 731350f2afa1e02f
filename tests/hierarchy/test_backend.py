"""torch.distributed over several hosts: processes of one machine that take themselves for hosts, by RINGCOMM_HOST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm.errors import MismatchError
from tests.backend import test_calls as calls
from tests.support import torch_ranks
from tests.support.choice import choose
from tests.support.torch_checks import all_reduce_works, combined, expect, raised, values

pytestmark = pytest.mark.timeout(180)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _inside(hosts: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    rank = int(os.environ["RANK"])
    os.environ["RINGCOMM_HOST"] = hosts[rank]
    try:
        torch_ranks.init("ringcomm", rank, len(hosts))
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        del os.environ["RINGCOMM_HOST"]


def over(hosts: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(*args)`` with a default group of ringcomm; a letter names each rank's host."""
    return torch_ranks.run(_inside, hosts, function, args, world_size=len(hosts), backend="")


# ---- the operations of torch.distributed -----------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", ["aab", "aba"])
@pytest.mark.parametrize(
    "function",
    [
        *(calls._coalesced, calls._coalesced_on_device, calls._coalesced_lists, calls._tags_and_order),
        *(calls._objects, calls._barriers),
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_calls(function: Callable[..., Any], hosts: str) -> None:
    over(hosts, function)


@pytest.mark.parametrize("count", [1, 1 << 20])
def test_batch_isend_irecv(count: int) -> None:
    over("aab", calls._ring_exchange, count)


@pytest.mark.parametrize("hosts", ["aabb", "ab", "abc"])
def test_every_operation(hosts: str) -> None:
    over(hosts, calls._every_operation)


def _uneven_lists() -> None:
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    outputs = [torch.zeros(3 * peer) for peer in ranks]
    dist.all_gather(outputs, values(rank, 3 * rank))
    for peer in ranks:
        expect(outputs[peer], values(peer, 3 * peer))
    out = torch.zeros(2 * rank)
    dist.reduce_scatter(out, [values(rank, 2 * peer) for peer in ranks])
    expect(out, combined([values(peer, 2 * rank) for peer in ranks], "sum"))
    outputs = [torch.zeros(rank + 2 * peer) for peer in ranks]
    dist.all_to_all(outputs, [values(rank, peer + 2 * rank) for peer in ranks])
    for peer in ranks:
        expect(outputs[peer], values(peer, rank + 2 * peer))


def test_uneven_lists() -> None:
    over("aabb", _uneven_lists)


def _any_source() -> None:
    if dist.get_rank() == 0:
        text = raised(NotImplementedError, dist.recv, torch.zeros(1))
        assert "name the source" in text, text


def test_a_receive_of_any_source_is_refused() -> None:
    over("aab", _any_source)


# ---- groups ----------------------------------------------------------------------------------------------------------


def _groups() -> None:
    rank = dist.get_rank()
    for members in ([0, 1], [2, 3], [1, 2], [3, 0, 2]):
        group = dist.new_group(members)
        if rank in members:
            all_reduce_works(group)
            x = torch.tensor([rank])
            dist.broadcast(x, members[-1], group=group)
            assert int(x) == members[-1]
    all_reduce_works()


def test_new_groups_inside_and_across_hosts() -> None:
    over("aabb", _groups)


def _watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "ringcomm" in thread.name}


def _again() -> None:
    before = _watching()  # of tests that ran in this process before, and of the group that is there
    for round in range(3):
        if round:
            torch_ranks.init("ringcomm", dist_rank(), 4, f"store-{round}")
        all_reduce_works()
        dist.destroy_process_group()
        assert not _watching() - before  # a program may remove the store's file now


def dist_rank() -> int:
    return int(os.environ["RANK"])


def test_destroyed_groups_leave_nothing_and_new_ones_serve() -> None:
    over("aabb", _again)


# ---- DistributedDataParallel of torch --------------------------------------------------------------------------------


def _ddp() -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        wrapped(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_ddp_of_torch_has_the_bits_of_one_host() -> None:
    together, apart = over("aaaa", _ddp), over("aabb", _ddp)
    for results in (together, apart):
        for mine in results:
            assert all(torch.equal(a, b) for a, b in zip(mine, together[0], strict=True))


# ---- communicators beside a group ------------------------------------------------------------------------------------


def _communicators() -> tuple[list[list[int]], str]:
    rank = dist.get_rank()
    over_group = ringcomm.Communicator.from_process_group()
    assert over_group.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2, 3]
    with ringcomm.init() as comm:
        ours = comm.all_reduce(values(rank, 1000))
        expect(over_group.all_reduce(values(rank, 1000)), ours)
        return comm.hosts, comm.order


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_communicators_over_and_beside_a_group(hosts: str) -> None:
    ranks = [[r for r in range(4) if hosts[r] == host] for host in "ab"]
    order = "canonical" if hosts == "aabb" else "canonical over hosts"
    assert over(hosts, _communicators) == [(ranks, order)] * 4


def _gloo_beneath(hosts: str) -> None:
    rank = dist_rank()
    os.environ["RINGCOMM_HOST"] = hosts[rank]
    torch_ranks.init("gloo", rank, len(hosts))
    with ringcomm.init(network=dist.group.WORLD) as comm:
        assert comm.describe()["between_hosts"] == "gloo"
        expect(comm.all_reduce(values(rank, 1000)), combined([values(peer, 1000) for peer in range(len(hosts))], "sum"))
    del os.environ["RINGCOMM_HOST"]


def test_a_process_group_as_the_network() -> None:
    torch_ranks.run(_gloo_beneath, "aab", world_size=3, backend="")


# ---- other programs --------------------------------------------------------------------------------------------------


BENCH = """
import os, sys
os.environ["RINGCOMM_HOST"] = sys.argv[1][int(os.environ["RANK"])]
from ringcomm.tools.bench.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow  # test_bench.py has the benchmark, test_launch.py torchrun
def test_bench_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(BENCH)
    options = ["-b", "1K", "-e", "64K", "-f", "64", "-n", "2", "-w", "1", "-J", "rows.json"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "ranks.py", "aab"]
    collectives = ["--op", "all_reduce,reduce_scatter,all_to_all,broadcast"]
    done = subprocess.run(
        [*launch, *collectives, *options], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "rows.json").read_text())
    tables = found if isinstance(found, list) else [found]
    rows = [row for table in tables for row in table["results"]]
    assert {row["experiment_name"] for row in rows} == {"all_reduce", "alltoall", "broadcast", "reduce_scatter"}
    wrong = [row[place]["nwrong"] for row in rows for place in ("out_of_place", "in_place") if row[place]]
    assert len(wrong) >= len(rows)
    assert set(wrong) == {0}


ENDS = """
import sys, torch, ringcomm
def body(comm):
    comm.all_reduce(torch.ones(10))
    return ringcomm.init(0, 1) if sys.argv[1] == "closed" else comm.dup()
kept = ringcomm.run_ranks(body, 3, hosts=[2, 1], timeout=20)
"""


@pytest.mark.parametrize("way", choose(["closed", "open"], ["open"]))
def test_a_program_may_end_while_hosts_are_looked_after(way: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    for _ in range(2):
        words = [sys.executable, "ends.py", way]
        done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


# ---- calls that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls",
    [
        [lambda c: c.all_reduce(torch.ones(8)), lambda c: c.all_reduce(torch.ones(9))],
        [lambda c: c.all_reduce(torch.ones(8)), lambda c: c.all_gather(torch.ones(8))],
        [lambda c: c.broadcast(torch.ones(8), 0), lambda c: c.broadcast(torch.ones(8), 2)],
        [lambda c: c.all_reduce(torch.ones(8)), lambda c: c.all_reduce(torch.ones(8), "max")],
        [lambda c: c.reduce_scatter(torch.ones(8)), lambda c: c.reduce_scatter(torch.ones(8).double())],
    ],
    ids=["count", "call", "root", "op", "dtype"],
)
def test_calls_that_differ_are_named_long_before_the_limit(calls: list[Callable[[Any], Any]]) -> None:
    begin = time.monotonic()
    with pytest.raises(MismatchError) as error:
        ringcomm.run_ranks(lambda comm: calls[comm.rank // 2](comm), 4, hosts=[2, 2], timeout=60)
    assert time.monotonic() - begin < 30
    assert all(words in str(error.value) for words in ("on host host0", "on host host1", "same calls"))
