"""Compares all_reduce over several hosts with Gloo's over the same ranks, in one interleaved run.

    python -m benchmarks.collectives.hosts --hosts 2 2 --gbps 1 --delay-ms 1

Hosts are network namespaces with links of that bandwidth and delay (tests/support/hierarchy/namespaces.py; needs root).
For every size, calls of ringcomm and Gloo are timed alternately. --out appends the table to a file.
RINGCOMM_WIRE_DTYPE=bfloat16 sends sums in a smaller type.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

SIZES = [1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]


def measure(turns: int, sizes: list[int]) -> None:
    """Runs one rank; rank 0 prints a row for each size."""
    import torch
    import torch.distributed as dist

    import ringcomm

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    comm = ringcomm.init(timeout=60)

    def timed(call: Callable[[], object]) -> float:
        dist.barrier()
        started = time.perf_counter()
        call()
        spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)  # the slowest rank's time
        return float(spent)

    for nbytes in sizes:
        x = torch.ones(nbytes // 4)
        y = torch.ones(nbytes // 4)
        ours, theirs = [], []
        before = int(comm.describe()["sent_between_hosts_bytes"])
        for turn in range(turns + 1):
            mine, other = timed(partial(comm.all_reduce, x, "avg")), timed(partial(dist.all_reduce, y))
            y.fill_(1.0)
            if turn:
                ours.append(mine)
                theirs.append(other)
        sent = torch.tensor((int(comm.describe()["sent_between_hosts_bytes"]) - before) / (turns + 1))
        per_host = [sum(float(part) for part in comm.all_gather(sent.reshape(1))[ranks]) for ranks in comm.hosts]
        assert torch.equal(x, torch.ones_like(x))
        if rank == 0:
            ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
            print(
                f"| {nbytes:>9} | {statistics.median(ours) * 1e3:8.2f} | {statistics.median(theirs) * 1e3:8.2f} "
                f"| {statistics.median(ratios):5.2f} | {ratios[0]:5.2f}-{ratios[-1]:5.2f} "
                f"| {per_host[0] / nbytes:6.4f} |",
                flush=True,
            )
    comm.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Makes the hosts and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 2], help="ranks on each")
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return measure(given.turns, given.sizes)
    from tests.support.hierarchy.namespaces import Cluster, why_not

    if reason := why_not():
        sys.exit(reason)
    words = [__file__, "--rank", "--turns", str(given.turns), "--sizes", *map(str, given.sizes)]
    with Cluster(len(given.hosts), given.gbps, given.delay_ms) as cluster:
        (rows, *_) = cluster.run(given.hosts, words, timeout_s=570)
    command = " ".join(["python -m benchmarks.collectives.hosts", *sys.argv[1:]])
    wire = os.environ.get("RINGCOMM_WIRE_DTYPE")
    command = f"RINGCOMM_WIRE_DTYPE={wire} {command}" if wire else command
    sent_as = f" (sent as {wire} by ringcomm)" if wire else ""
    head = (
        f"all_reduce of float32{sent_as} over {len(given.hosts)} hosts of {given.hosts} ranks, links of {given.gbps:g} "
        f"Gbit/s and {given.delay_ms:g} ms each way; {given.turns} turns, medians; `{command}`\n\n"
        "| bytes | ringcomm ms | gloo ms | gloo / ringcomm | min-max | sent by a host / bytes |\n"
        "|---|---|---|---|---|---|\n"
    )
    table = head + "\n".join(line for line in rows.splitlines() if line.startswith("|")) + "\n"
    print(table)
    if given.out:
        with given.out.open("a") as file:
            file.write(table + "\n")


if __name__ == "__main__":
    main()
