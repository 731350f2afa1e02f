"""What a rank does in the tests of several hosts. As a module: cases, which give a checksum of what every rank ends
with, the same on one host and on several. As a program: one rank of a job, under torchrun's environment; writes a
file of its results into the folder that it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REDUCED = {
    torch.float32: ("sum", "avg", "max", "min", "prod"),
    torch.bfloat16: ("sum", "avg", "max", "prod"),
    torch.float16: ("sum", "avg", "prod"),
    torch.float64: ("sum",),
    torch.int32: ("sum", "avg", "max", "prod", "band"),
}
COUNTS = (0, 1, 1000, 300_001)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of a rank: of both signs and many sizes, so that other orders of summation give other bits."""
    generator = torch.Generator().manual_seed(rank * 7919 + count)
    return (torch.randn(count, dtype=torch.float64, generator=generator) * 3).to(dtype)


def checksum(*tensors: torch.Tensor) -> str:
    """Of all bits."""
    found = hashlib.blake2b(digest_size=8)
    for each in tensors:
        found.update(each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---- the cases: name -> tensors that a rank ends with ------------------------------------------------------------


def reductions(comm: Any) -> dict[str, list[torch.Tensor]]:
    """all_reduce and reduce of every type and operation, reduce_scatter in place and not."""
    found: dict[str, list[torch.Tensor]] = {}
    r, world, last = comm.rank, comm.world_size, comm.world_size - 1
    for dtype, ops in REDUCED.items():
        for op in ops:
            ends = found[f"all_reduce {dtype} {op}"] = []
            for count in COUNTS:
                ends.append(comm.all_reduce(values(r, count, dtype), op))
            ends.append(comm.all_reduce(values(r, 1000, dtype), op, out=torch.empty(1000, dtype=dtype)))
        ends = found[f"reduce, reduce_scatter {dtype}"] = []
        for count in COUNTS:
            x = values(r, count * world, dtype)
            reduced = comm.reduce(x[: count + 3], last, "avg")
            ends += [] if reduced is None else [reduced]
            ends.append(comm.reduce_scatter(x.clone(), "sum"))
            ends.append(comm.reduce_scatter(x, "max", out=x[r * count : (r + 1) * count]))
    ends = found["premul_sum"] = []
    ends.append(comm.all_reduce(values(r, 1000, torch.float32), "premul_sum", factor=0.5 + r))
    ends.append(comm.reduce_scatter(values(r, 1000 * world, torch.bfloat16), "premul_sum", factor=0.25))
    return found


def algorithms(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Every algorithm: the ring's bits differ, and are close; those of the others do not."""
    found: dict[str, list[torch.Tensor]] = {}
    r, world = comm.rank, comm.world_size
    for count in (5, 3000, 300_001):
        want = comm.all_reduce(values(r, count, torch.float32))
        for algorithm in ("direct", "oneshot"):
            found[f"{algorithm} {count}"] = [comm.all_reduce(values(r, count, torch.float32), algorithm=algorithm)]
            assert torch.equal(found[f"{algorithm} {count}"][0], want), (algorithm, count)
        ring = comm.all_reduce(values(r, count, torch.float32), algorithm="ring")
        torch.testing.assert_close(ring, want, rtol=1e-5, atol=1e-5)
        assert len({bytes(each) for each in comm.exchange(checksum(ring).encode())}) == 1, "ranks end with other bits"
        whole = comm.all_reduce(values(r, count, torch.int32), algorithm="ring")
        found[f"ring of int32 {count}"] = [whole]
        x = values(r, count * world, torch.float32)
        torch.testing.assert_close(
            comm.reduce_scatter(x, algorithm="ring"), comm.reduce_scatter(x), rtol=1e-5, atol=1e-5
        )
        found[f"gathered by ring {count}"] = [comm.all_gather(x[:count], algorithm="ring")]
        found[f"broadcast by ring {count}"] = [comm.broadcast(x[:count].clone(), 1, algorithm="ring")]
    return found


def movement(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Everything that only moves, of every root; in place too."""
    found: dict[str, list[torch.Tensor]] = {}
    r, world = comm.rank, comm.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex64):
        ends = found[f"movement {dtype}"] = []
        for count in COUNTS:
            x = values(r, count * world, torch.float64).abs().to(dtype)
            mine = x[r * count : (r + 1) * count]
            ends.append(comm.all_gather(mine.clone()))
            ends.append(comm.all_to_all(x))
            inside = x.clone()
            ends.append(comm.all_gather(inside[r * count : (r + 1) * count], out=inside))
            same = x.clone()
            ends.append(comm.all_to_all(same, out=same))
            for root in range(world) if count == 1000 else (world - 1,):
                ends.append(comm.broadcast(x.clone(), root))
                gathered = comm.gather(mine, root)
                ends += [] if gathered is None else [gathered]
                ends.append(comm.scatter(x if r == root else None, root, out=torch.empty(count, dtype=dtype)))
    return found


def uneven(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Parts of every length, zero too; lists."""
    r, world = comm.rank, comm.world_size
    ends: list[torch.Tensor] = []
    send = [(r * 3 + p * 5) % 7 * 400 for p in range(world)]
    recv = [(p * 3 + r * 5) % 7 * 400 for p in range(world)]
    x = values(r, sum(send) * 3, torch.float32).reshape(-1, 3)
    ends.append(comm.all_to_all(x, send_counts=send))
    ends.append(comm.all_to_all(x, send_counts=send, recv_counts=recv))
    lengths = [0, 70_001, 3, 1000][:world]
    parts = [values(r + p, n, torch.float32) for p, n in enumerate(lengths)]
    ends += comm.all_gather_list(parts[r], [torch.empty(n) for n in lengths])
    ends.append(comm.reduce_scatter_list(parts, torch.empty(lengths[r])))
    ends += comm.all_to_all_list(parts, [torch.empty(lengths[r]) for _ in lengths])
    for root in (0, world - 1):
        outputs = [torch.empty(n) for n in lengths] if r == root else None
        ends += comm.gather_list(parts[r], outputs, root) or []
        ends.append(comm.scatter_list(parts if r == root else None, torch.empty(lengths[r]), root))
    ends += comm.all_reduce_coalesced([values(r, n, d) for n in (0, 5, 40_000) for d in (torch.float32, torch.int32)])
    return {"uneven and lists": ends}


def asynchronous(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Many calls in flight; a group of calls."""
    r = comm.rank
    works = []
    for count in (100_000, 1, 5000):
        works.append(comm.all_reduce(values(r, count, torch.float32), async_op=True))
        works.append(comm.all_gather(values(r, count, torch.int32), async_op=True))
    with comm.coalesce() as group:
        for count in (7, 20_000):
            comm.all_reduce(values(r, count, torch.bfloat16), "avg")
    comm.barrier()
    return {"async": [work.wait() for work in works], "coalesce": list(group.wait())}


def messages(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Between all pairs, received in another order of tags than sent; then a ring of long ones."""
    r, world = comm.rank, comm.world_size
    others = [p for p in range(world) if p != r]
    works = [comm.isend(values(r * 10 + tag, 500 * tag, torch.float32), p, tag) for p in others for tag in (0, 1, 2, 3)]
    ends = []
    for p in reversed(others):
        for tag in (3, 1, 0, 2):
            x = torch.empty(500 * tag)
            assert comm.recv(x, p, tag) == p
            assert torch.equal(x, values(p * 10 + tag, 500 * tag, torch.float32)), (r, p, tag)
            ends.append(x)
    for work in works:
        work.wait()
    x = torch.empty(200_000)
    coming = comm.irecv(x, (r - 1) % world, 9)
    comm.send(values(r, 200_000, torch.float32), (r + 1) % world, 9)
    coming.wait()
    return {"messages": [*ends, x]}


def groups(comm: Any) -> dict[str, list[torch.Tensor]]:
    """Communicators of some ranks: over hosts, inside one, in another order, of all; one whose order is its own."""
    r, ends = comm.rank, []
    for part in (comm.split(r % 2), comm.split(r // 2, -r), comm.subgroup([1, 0, 3]), comm.dup()):
        if part is not None:
            assert part.order == "canonical"
            x = values(r, 5000, torch.float32)
            ends += [part.all_reduce(x), part.all_gather(x[:10]), part.broadcast(x[:99].clone(), part.world_size - 1)]
            part.close()
    with comm.subgroup([3, 0, 1]) or contextlib.nullcontext() as part:  # 0 and 1 are no subtree of it
        if part is not None:
            assert part.order == ("canonical" if len(comm.hosts) == 1 else "canonical over hosts")
            x, whole = (values(r, 5000, dtype) for dtype in (torch.float32, torch.int32))
            parts = part.all_gather(x).reshape(3, -1)
            torch.testing.assert_close(part.all_reduce(x), parts.sum(0), rtol=1e-5, atol=1e-5)
            ends += [part.all_reduce(whole), parts]
    return {"groups": ends}


CASES: tuple[Callable[[Any], dict[str, list[torch.Tensor]]], ...] = (
    reductions, algorithms, movement, uneven, asynchronous, messages, groups,
)  # fmt: skip


def suite(comm: Any) -> dict[str, str]:
    """The checksum of every case on this rank."""
    return {name: checksum(*ends) for case in CASES for name, ends in case(comm).items()}


def through_torch() -> dict[str, str]:
    """The default group of torch.distributed, of our backend: collectives, and steps of data-parallel training."""
    import torch.distributed as dist

    r, world = dist.get_rank(), dist.get_world_size()
    ends: dict[str, str] = {}
    x = values(r, 100_003, torch.float32)
    dist.all_reduce(x)
    parts = [torch.empty(777, dtype=torch.bfloat16) for _ in range(world)]
    dist.all_gather(parts, values(r, 777, torch.bfloat16))
    part = torch.empty(3001)
    dist.reduce_scatter_tensor(part, values(r, 3001 * world, torch.float32), dist.ReduceOp.AVG)
    ends["torch collectives"] = checksum(x, *parts, part)

    torch.manual_seed(5)
    layers = [torch.nn.Linear(33, 257), torch.nn.Tanh(), torch.nn.Linear(257, 5)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(values(r + step, 8 * 33, torch.float32).reshape(8, 33)).square().mean().backward()
        optimizer.step()
    ends["torch DDP"] = checksum(*(p.detach() for p in model.parameters()))
    return ends


# ---- as a program ------------------------------------------------------------------------------------------------


def sent_bytes(comm: Any) -> int:
    """Payload that this rank has sent to other hosts so far."""
    return int(comm.describe()["sent_between_hosts_bytes"])


def sent_by(comm: Any, count: int, dtype: torch.dtype) -> int:
    """Payload that this rank sends to other hosts in an all_reduce, without what the ranks agree on before each."""
    before = sent_bytes(comm)
    comm.all_reduce(torch.zeros(0, dtype=dtype))
    between = sent_bytes(comm)
    comm.all_reduce(values(comm.rank, count, dtype))
    return sent_bytes(comm) - between - (between - before)


def packet_bytes() -> int:
    """Bytes of packets that this host has sent to others so far."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("rc0:")]
    return int(line.split()[9])


def packets(comm: Any, count: int, times: int) -> int:
    """Bytes of packets that this host sends in so many all_reduces of float32."""
    x = values(comm.rank, count, torch.float32)
    comm.barrier()
    before = packet_bytes()
    for _ in range(times):
        comm.all_reduce(x, "avg")
    comm.barrier()
    return packet_bytes() - before


def traffic(count: int) -> dict[str, Any]:
    """What crosses the network in an all_reduce of ``count`` elements; what a smaller type on the wire makes of it."""
    import ringcomm

    found: dict[str, Any] = {}
    with ringcomm.init(timeout=30) as comm:
        found["float32"] = sent_by(comm, count, torch.float32)
        found["bfloat16"] = sent_by(comm, count, torch.bfloat16)
        found["packets"] = packets(comm, count, 4)
        exact = comm.all_reduce(values(comm.rank, count, torch.float32))
        comm.barrier()
    with ringcomm.init(timeout=30, wire_dtype="bfloat16") as comm:
        found["float32 as bfloat16"] = sent_by(comm, count, torch.float32)
        rounded = comm.all_reduce(values(comm.rank, count, torch.float32))
        found["largest error"] = float((rounded - exact).abs().max())
        found["rounded"] = checksum(rounded)
        comm.barrier()
    return found


def main(folder: str, elements: str) -> None:
    """One rank: all cases, the same through torch.distributed, and what crossed the network. Writes a file of it all
    into the folder."""
    import torch.distributed as dist

    import ringcomm

    torch.set_num_threads(1)
    dist.init_process_group("ringcomm")
    with ringcomm.init(timeout=30) as comm:
        found: dict[str, Any] = {"hosts": comm.hosts, "order": comm.order, "cases": suite(comm)}
        comm.barrier()
    found["cases"] |= through_torch()
    found["traffic"] = traffic(int(elements))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
