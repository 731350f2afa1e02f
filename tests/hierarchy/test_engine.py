"""Collectives over several hosts, which are pretended: ranks as threads, Gloo between what would be hosts.

The answers are written once more in torch: the ranks' values added in a tree inside each host, and the hosts' sums in a
tree over hosts. Where the order is "canonical", that must be the tree over ranks, and so the bits of one host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcomm
from ringcomm import Communicator, run_ranks
from ringcomm.arrays.devices import CPU
from ringcomm.comm.hosts import Hosts, Network, identity, memory_store
from ringcomm.comm.native import NativeEngine
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from tests.support.choice import choose, drawn
from tests.support.reference import (
    DTYPES,
    FLOATS,
    combine_of,
    divided,
    factor_of,
    laid_out,
    leaves_of,
    ops_of,
    same_bits,
    stored,
    strided,
    tree,
    values,
)

Ranks = tuple[tuple[int, ...], ...]


def consecutive(*counts: int) -> Ranks:
    """Hosts of so many ranks each."""
    starts = [sum(counts[:h]) for h in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


CANONICAL = [consecutive(*counts) for counts in ((1, 1), (2, 2), (2, 1, 1), (1, 1, 1), (1, 1, 1, 1), (4, 2, 2))]
OVER_HOSTS = [consecutive(*counts) for counts in ((3, 3), (1, 2, 1), (3, 2), (2, 3), (3, 2, 2))]
SCATTERED: list[Ranks] = [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 4), (1, 3), (2,))]
LAYOUTS = choose(  # of every kind the small ones
    [*CANONICAL, *OVER_HOSTS, *SCATTERED],
    [
        *(consecutive(*counts) for counts in ((1, 1), (2, 2), (2, 1, 1), (1, 2, 1), (3, 2), (1, 1, 1, 1))),
        *SCATTERED[1:],
    ],
)


def named(ranks: Ranks) -> str:
    return "|".join(",".join(map(str, host)) for host in ranks)


def hosts_of(ranks: Ranks) -> Hosts:
    by_rank = {rank: h for h, host in enumerate(ranks) for rank in host}
    return Hosts.of([f"host{by_rank[rank]}\nhost{by_rank[rank]}" for rank in sorted(by_rank)])


def over(ranks: Ranks, body: Callable[..., Any], *args: Any, **network: Any) -> list[Any]:
    """``body(comm, *args)`` on every rank, as a thread; ranks of a host need not be neighbours."""
    hosts, store = hosts_of(ranks), memory_store()
    world_size = hosts.world_size
    ends = [
        NativeEngine("cpu", rank, world_size, 20_000, CPU, hosts, Network(store, "over", **network))
        for rank in range(world_size)
    ]
    handles = [end.handle() for end in ends]
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            ends[rank].connect(handles)
            comm = Communicator(ends[rank])
            results[rank] = body(comm, *args)
            comm.barrier()
            comm.close()
        except BaseException as error:
            failures.append(error)
            ends[rank].abort(f"rank {rank}: {error}")

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


# ---- what must come out ----------------------------------------------------------------------------------------------


def subtrees(first: int, count: int) -> set[tuple[int, ...]]:
    """The ranks below every node of the balanced tree over ranks."""
    left = 1
    while 2 * left < count:
        left *= 2
    below = set() if count == 1 else subtrees(first, left) | subtrees(first + left, count - left)
    return {tuple(range(first, first + count)), *below}


def in_order(ranks: Ranks) -> bool:
    """Whether sums of hosts can be added to the tree over ranks."""
    return set(ranks) <= subtrees(0, sum(len(host) for host in ranks))


def reduced_over(ranks: Ranks, inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """A tree over ranks, or else one inside each host and one over hosts; rounded once."""
    leaves = leaves_of(inputs, op)
    combine = combine_of(str(inputs[0].dtype).removeprefix("torch."), op)
    apart = [tree([leaves[r] for r in host], combine) for host in ranks]
    total = tree(leaves, combine) if in_order(ranks) else tree(apart, combine)
    return stored(divided(total, len(inputs)) if op == "avg" else total, inputs[0].dtype)


@cache
def data(dtype: str, rank: int, count: int = 4096) -> torch.Tensor:
    if dtype in ("uint16", "complex128"):
        return values("uint8", rank, 16 * count).view(getattr(torch, dtype))[:count]
    return values(dtype, rank, count)


def check(cell: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not same_bits(got, want):
        wrong = (got != want).nonzero() if got.shape == want.shape else []
        raise AssertionError(f"{cell}: {len(wrong)} of {want.numel()} differ:\n{got}\n{want}")


# ---- reductions ------------------------------------------------------------------------------------------------------

REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in ops_of(dtype)]
FEW = [("float32", op) for op in ("sum", "avg", "premul_sum", "max")] + [
    *(("bfloat16", "sum"), ("float16", "premul_sum"), ("float8_e4m3fn", "avg"), ("int8", "sum"), ("int32", "avg")),
    *(("bool", "sum"), ("int64", "bxor"), ("float64", "prod")),
]


def reduce_every_way(comm: Communicator, ranks: Ranks, dtype: str, op: str, count: int) -> None:
    """all_reduce, reduce and reduce_scatter, in place and not; inputs stay as they are."""
    rank, world_size = comm.rank, comm.world_size
    factor = factor_of(rank) if op == "premul_sum" else None
    mine = data(dtype, rank)[: count * world_size]
    want = reduced_over(ranks, [data(dtype, r)[: count * world_size] for r in range(world_size)], op)
    part, root = slice(rank * count, (rank + 1) * count), (count + len(op)) % world_size
    cell = f"{dtype} {op} {count=} rank {rank} of {named(ranks)}"

    x = mine.clone()
    assert comm.all_reduce(x, op, factor=factor) is x
    check(f"all_reduce {cell}", x, want)
    x = strided(mine)
    check(f"all_reduce apart {cell}", comm.all_reduce(x, op, out=torch.zeros_like(mine), factor=factor), want)
    check(f"all_reduce input {cell}", x, mine)

    x, out = mine.clone(), torch.zeros_like(mine) if rank == root else None
    got = comm.reduce(x, root, op, out=out, factor=factor)
    if rank == root:
        assert got is out
        check(f"reduce {cell}", got, want)
    check(f"reduce input {cell}", x, mine)

    x = mine.clone()
    check(f"reduce_scatter {cell}", comm.reduce_scatter(x, op, factor=factor), want[part])
    check(f"reduce_scatter input {cell}", x, mine)
    check(f"reduce_scatter in place {cell}", comm.reduce_scatter(x, op, out=x[part], factor=factor), want[part])


def few_reductions(comm: Communicator, ranks: Ranks) -> str:
    for dtype, op in FEW:
        for count in (0, 1, 7, 320):
            reduce_every_way(comm, ranks, dtype, op, count)
    return comm.order


@pytest.mark.parametrize("ranks", LAYOUTS, ids=named)
def test_reductions_add_in_the_order_that_the_communicator_reports(ranks: Ranks) -> None:
    assert in_order(ranks) == (ranks in CANONICAL)
    assert set(over(ranks, few_reductions, ranks)) == {"canonical" if in_order(ranks) else "canonical over hosts"}


def all_reductions(comm: Communicator, ranks: Ranks) -> None:
    for dtype, op in REDUCTIONS:
        reduce_every_way(comm, ranks, dtype, op, 33)


@pytest.mark.parametrize("ranks", [consecutive(2, 2), consecutive(1, 2, 1)], ids=named)
def test_every_type_and_operator(ranks: Ranks) -> None:
    over(ranks, all_reductions, ranks)


def special_values(comm: Communicator) -> list[torch.Tensor]:
    inf, nan = float("inf"), float("nan")
    rows = [[1, 2, inf, inf, nan, -0.0, 0.0], [nan, inf, -inf, inf, 1, 0.0, -0.0], [0, 0, 1, 1, 1, -0.0, -0.0]]
    mine = [torch.tensor(rows[comm.rank % 3]).to(getattr(torch, dtype)) for dtype in FLOATS]
    return [comm.all_reduce(x.clone(), op) for x in mine for op in ops_of("float32") if op != "premul_sum"]


@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1]], ids=str)
def test_nan_infinity_and_signed_zeros(counts: list[int]) -> None:
    together, apart = (run_ranks(special_values, sum(counts), hosts=hosts, timeout=20) for hosts in (None, counts))
    for one, several in zip(together, apart, strict=True):
        for at, (want, got) in enumerate(zip(one, several, strict=True)):
            check(f"special {at}", got, want)


def one_sum(comm: Communicator, count: int) -> list[torch.Tensor]:
    mine = values("float32", comm.rank, count)
    at_root = comm.reduce(mine.clone(), 1)
    padded = torch.cat([mine, mine.new_zeros(-count % comm.world_size)])
    ways = [comm.all_reduce(mine.clone(), algorithm=each) for each in ("auto", "direct", "oneshot")]
    ways.append(comm.all_gather(comm.reduce_scatter(padded))[:count])
    ways.append(comm.broadcast(mine.clone() if at_root is None else at_root, 1))
    ways.append(torch.cat(comm.all_reduce_coalesced([bucket.clone() for bucket in mine.split(7_001)])))
    ways.append(comm.all_reduce(mine.clone(), async_op=True).wait())
    return [*ways, comm.all_reduce(mine.to(torch.bfloat16)).float()]


@pytest.mark.parametrize("counts", [[2, 2], [2, 1], [4, 1]], ids=str)
def test_the_bits_of_one_host_whatever_the_path(counts: list[int]) -> None:
    count = 150_001  # several messages between hosts
    together = run_ranks(one_sum, sum(counts), count, timeout=30)
    apart = run_ranks(one_sum, sum(counts), count, hosts=counts, timeout=30)
    for one, several in zip(together, apart, strict=True):
        for way, x in enumerate(several):
            check(f"way {way}", x, one[-1] if way == len(one) - 1 else one[0])


def copied_without_a_kernel(comm: Communicator) -> float:
    with pytest.raises(UnsupportedError, match="copy_engine, which GPUs of one host have"):
        comm.all_gather(torch.ones(4), algorithm="copy_engine")
    return float(comm.all_reduce(torch.ones(1)))


def test_hosts_refuse_copies_without_a_kernel_before_anything_is_sent() -> None:
    assert run_ranks(copied_without_a_kernel, 2, hosts=[1, 1], timeout=20) == [2.0, 2.0]


def ring_sums(comm: Communicator) -> None:
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 0.1)):
        for count in (0, 1, 1000, 70_001):
            mine = values(dtype, comm.rank, count)
            everyone = comm.all_gather(mine, out=mine.new_empty((comm.world_size, count)))
            got = comm.all_reduce(mine.clone(), algorithm="ring")
            torch.testing.assert_close(got.double(), everyone.double().sum(0), atol=tolerance, rtol=tolerance)
            same = comm.all_gather(got, out=got.new_empty((comm.world_size, count)))
            assert all(same_bits(row, got) for row in same), f"ring {dtype} {count=}: ranks differ"
            whole = torch.cat([mine, mine.new_zeros(-count % comm.world_size)])
            part = comm.all_gather(comm.reduce_scatter(whole, algorithm="ring"))[:count]
            torch.testing.assert_close(part.double(), everyone.double().sum(0), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ranks", [consecutive(2, 1, 1), consecutive(2, 2), ((0, 3), (1, 2))], ids=named)
def test_the_ring_between_hosts(ranks: Ranks) -> None:
    over(ranks, ring_sums)


def long_messages(comm: Communicator) -> None:
    """Longer than what is summed up in scratch memory at once, by part of a wave."""
    count = 20_000_003
    x = torch.full((count,), 1.0 + comm.rank, dtype=torch.bfloat16)
    x[::4097] = 0.5
    x[-1] = 7 + comm.rank
    comm.all_reduce(x)
    assert float(x[-1]) == 15
    assert bool((x[:-1:4097] == 1).all())
    assert int((x == 3).sum()) == count - 1 - len(x[:-1:4097])
    at_root = comm.reduce((2 * comm.rank - 1) * x[:9_000_001], 1, "max")
    assert at_root is None or torch.equal(at_root, x[:9_000_001])
    parts = torch.arange(10_000_002, dtype=torch.int32)
    got = comm.reduce_scatter(parts)
    assert torch.equal(got, 2 * parts[comm.rank * 5_000_001 :][:5_000_001])


def test_messages_longer_than_the_scratch_memory() -> None:
    run_ranks(long_messages, 2, hosts=[1, 1], timeout=30)


# ---- what moves ------------------------------------------------------------------------------------------------------


def movement(comm: Communicator, dtypes: Sequence[str], counts: Sequence[int]) -> None:
    rank, world_size = comm.rank, comm.world_size
    for i, (dtype, count) in enumerate((dtype, count) for dtype in dtypes for count in counts):
        root, contiguous = i % world_size, i % 3 > 0
        cell = f"{dtype} {count=} {root=} {contiguous=} rank {rank}"
        ours = [data(dtype, r, max(4096, count))[:count] for r in range(world_size)]
        together, part = torch.cat(ours), slice(rank * count, (rank + 1) * count)

        out = laid_out(torch.zeros_like(together), contiguous)
        check(f"all_gather {cell}", comm.all_gather(ours[rank], out=out), together)
        out = torch.zeros_like(together)
        out[part] = ours[rank]
        check(f"all_gather in place {cell}", comm.all_gather(out[part], out=out), together)
        for source in {root, world_size - 1}:
            x = laid_out(ours[rank], contiguous)
            check(f"broadcast {cell}", comm.broadcast(x, source), ours[source])
        got = comm.gather(laid_out(ours[rank], contiguous), root)
        assert (got is None) == (rank != root)
        if got is not None:
            check(f"gather {cell}", got, together)
        x = laid_out(together, contiguous) if rank == root else None
        check(f"scatter {cell}", comm.scatter(x, root, out=torch.zeros_like(ours[rank])), ours[rank])
        x, mixed = together.roll(rank), torch.cat([together.roll(r)[part] for r in range(world_size)])
        check(f"all_to_all {cell}", comm.all_to_all(laid_out(x, contiguous)), mixed)
        check(f"all_to_all in place {cell}", comm.all_to_all(x, out=x), mixed)


@pytest.mark.parametrize("ranks", LAYOUTS, ids=named)
def test_what_moves_arrives(ranks: Ranks) -> None:
    over(ranks, movement, ("float32", "bfloat16", "bool", "uint16", "complex128"), (0, 1, 7, 320))


@pytest.mark.parametrize("ranks", [consecutive(2, 1), consecutive(1, 1)], ids=named)
def test_long_messages_arrive(ranks: Ranks) -> None:
    over(ranks, movement, ("float64",), (600_001,))


def lists(comm: Communicator) -> None:
    """Uneven parts, in lists and by counts; a part may be empty."""
    rank, world_size = comm.rank, comm.world_size
    counts = [3 * r for r in range(world_size)]
    ours = [torch.arange(count) + 100 * r for r, count in enumerate(counts)]
    gathered = comm.all_gather_list(ours[rank], [torch.empty_like(x) for x in ours])
    assert all(torch.equal(got, want) for got, want in zip(gathered, ours, strict=True))
    buffer = torch.zeros(world_size * 64)  # parts that are neighbours in memory on one rank alone
    parts = [buffer[64 * r :][:64] if rank == 0 else torch.zeros(64) for r in range(world_size)]
    for r, got in enumerate(comm.all_gather_list(data("float32", rank)[:64], parts)):
        check("all_gather_list", got, data("float32", r)[:64])
    inputs = [data("float32", rank)[10 * r :][:count] for r, count in enumerate(counts)]
    got = comm.reduce_scatter_list(inputs, torch.empty(counts[rank]))
    parts = [data("float32", r)[10 * rank :][: counts[rank]] for r in range(world_size)]
    check("reduce_scatter_list", got, reduced_over(tuple(map(tuple, comm.hosts)), parts, "sum"))
    sent = [torch.full((p + 2 * rank,), 10 * rank + p) for p in range(world_size)]
    wanted = [torch.full((rank + 2 * p,), 10 * p + rank) for p in range(world_size)]
    received = comm.all_to_all_list(sent, [torch.empty_like(x) for x in wanted])
    assert all(torch.equal(got, want) for got, want in zip(received, wanted, strict=True))
    send_counts = [len(x) for x in sent]
    assert torch.equal(comm.all_to_all(torch.cat(sent), send_counts=send_counts), torch.cat(wanted))
    root = world_size - 1
    at_root = comm.gather_list(ours[rank], [torch.empty_like(x) for x in ours] if rank == root else None, root)
    assert at_root is None or all(torch.equal(got, want) for got, want in zip(at_root, ours, strict=True))
    assert torch.equal(
        comm.scatter_list(ours if rank == root else None, torch.empty_like(ours[rank]), root), ours[rank]
    )
    with comm.coalesce() as group:
        xs = [comm.all_reduce(torch.full((n,), 1.0)) for n in (1, 5000)]
        later = comm.all_gather(torch.tensor([rank]))
    assert len(group) == 3
    assert [float(x.wait()[-1]) for x in xs] == [world_size] * 2
    assert later.wait().tolist() == list(range(world_size))
    comm.barrier()


def messages(comm: Communicator) -> None:
    """To and from every rank, by tag."""
    rank, world_size = comm.rank, comm.world_size
    others = [r for r in range(world_size) if r != rank]
    for count in (0, 5, 70_000):
        boxes = {(peer, tag): torch.zeros(count) for peer in others for tag in (4, 3)}
        works = [comm.irecv(box, peer, tag=tag) for (peer, tag), box in boxes.items()]
        works += [
            comm.isend(torch.full((count,), 10.0 * rank + tag), peer, tag=tag) for peer in others for tag in (3, 4)
        ]
        total = comm.all_reduce(torch.ones(count))  # passes the messages
        for work in works:
            work.wait()
        assert all(bool((box == 10 * peer + tag).all()) for (peer, tag), box in boxes.items())
        assert bool((total == world_size).all())
    with pytest.raises(UnsupportedError) as error:
        comm.recv(torch.zeros(1))
    one_sentence(error.value, f"recv: rank {rank}", "any rank", "name the source")


def test_no_rank_has_connected_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may close its communicator at once, and Gloo would fail on ranks that are still connecting."""
    ended = dict[int, float]()

    def slow_on_rank_0(store: Any, rank: int, world_size: int, limit: Any) -> Any:
        group = gloo(store, rank, world_size, limit)
        if rank == 0:
            time.sleep(0.5)
            ended[0] = time.monotonic()
        return group

    def connected(comm: Communicator) -> float:
        return time.monotonic()

    gloo = torch.distributed.ProcessGroupGloo
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", slow_on_rank_0)
    assert min(run_ranks(connected, 3, hosts=[1, 1, 1])) >= ended[0]


def groups(comm: Communicator) -> tuple[list[list[int]], str]:
    """Communicators of one host, across hosts, and in another order."""
    rank, world_size = comm.rank, comm.world_size
    here = next(host for host in comm.hosts if rank in host)
    inside = comm.split(here[0])
    assert inside.hosts == [list(range(len(here)))]
    assert float(inside.all_reduce(torch.ones(3))[0]) == len(here)
    back = comm.subgroup(list(reversed(range(world_size))))
    assert back.all_gather(torch.tensor([rank])).tolist() == list(reversed(range(world_size)))
    pair = comm.subgroup([world_size - 1, 0])
    if pair is not None:
        assert pair.broadcast(torch.tensor([rank]), 0).tolist() == [world_size - 1]
    return back.dup().hosts, back.order


def mixed_calls(comm: Communicator) -> tuple[list[list[int]], str]:
    lists(comm)
    messages(comm)
    return groups(comm)


@pytest.mark.parametrize("ranks", [consecutive(1, 1, 1, 1), consecutive(1, 2, 1), ((0, 3), (1, 2))], ids=named)
def test_lists_messages_and_groups(ranks: Ranks) -> None:
    last = sum(len(host) for host in ranks) - 1
    mirrored = sorted(sorted(last - rank for rank in host) for host in ranks)
    order = "canonical" if in_order(tuple(map(tuple, mirrored))) else "canonical over hosts"
    assert set(map(str, over(ranks, mixed_calls))) == {str((mirrored, order))}


# ---- floats that travel in a smaller type ----------------------------------------------------------------------------


def compressed(comm: Communicator, count: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    before = int(comm.describe()["sent_between_hosts_bytes"])
    x = comm.all_reduce(values("float32", comm.rank, count))
    between = int(comm.describe()["sent_between_hosts_bytes"])
    whole = comm.all_gather(comm.reduce_scatter(values("float32", comm.rank, count)))
    comm.all_gather(torch.arange(count // 2, dtype=torch.int32))  # no floats: as they are
    return x, whole, between - before, int(comm.describe()["sent_between_hosts_bytes"]) - between


@pytest.mark.parametrize("hosts", [[2, 2], [1, 1, 1], [1, 1, 1, 1]], ids=str)
def test_a_wire_type_halves_what_is_sent_and_every_rank_has_the_same(hosts: list[int]) -> None:
    count, rounding = 12 * 8192, {"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
    world_size = sum(hosts)
    exact = run_ranks(compressed, world_size, count, hosts=hosts, timeout=20)
    size = max(float(sum(values("float32", r, count).abs() for r in range(world_size)).max()), 1.0)
    for wire_dtype, unit in rounding.items():
        ours = run_ranks(compressed, world_size, count, hosts=hosts, wire_dtype=wire_dtype, timeout=20)
        for (x, whole, sent, _), (want, _, plain, _) in zip(ours, exact, strict=True):
            check(f"{wire_dtype} all_reduce", x, ours[0][0])
            check(f"{wire_dtype} reduce_scatter", whole, ours[0][1])
            assert float((x - want).abs().max()) <= (len(hosts) + 1) * unit * size
            assert float((whole - want).abs().max()) <= len(hosts) * unit * size
            assert not torch.equal(x, want)
            assert sent * 4 / getattr(torch, wire_dtype).itemsize == pytest.approx(plain, rel=0.02)


def test_a_wire_type_leaves_smaller_types_and_integers_alone() -> None:
    def body(comm: Communicator) -> None:
        for dtype in ("bfloat16", "int32", "float8_e4m3fn"):
            inputs = [values(dtype, r, 1000) for r in range(2)]
            got = comm.all_reduce(inputs[comm.rank].clone(), "max")
            check(dtype, got, reduced_over(((0,), (1,)), inputs, "max"))

    run_ranks(body, 2, hosts=[1, 1], wire_dtype="bfloat16", timeout=20)


# ---- which ranks are where, and what is refused ----------------------------------------------------------------------


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.randoms())
@drawn(60)
def test_hosts_of_identities(letters: list[str], random: Any) -> None:
    hosts = Hosts.of([f"{letter}\n{letter}" for letter in letters])
    assert sorted(rank for host in hosts.ranks for rank in host) == list(range(len(letters)))
    assert [host[0] for host in hosts.ranks] == sorted(host[0] for host in hosts.ranks)
    assert all(letters[rank] == hosts.name_of(rank) for rank in range(len(letters)))
    assert hosts.several == (len(set(letters)) > 1)
    assert hosts.order() == ("canonical" if in_order(hosts.ranks) else "canonical over hosts")
    members = random.sample(range(len(letters)), random.randint(1, len(letters)))
    few = hosts.among(members)
    assert few.world_size == len(members)
    assert [few.name_of(i) for i in range(len(members))] == [letters[rank] for rank in members]


def test_names_of_hosts_are_unique_and_the_variable_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hosts.of(["node\n1", "node\n2", "other\n3"]).names == ("node-0", "node-1", "other")
    monkeypatch.delenv("RINGCOMM_HOST", raising=False)
    assert identity() == identity()
    own = identity()
    monkeypatch.setenv("RINGCOMM_HOST", "rack 7")
    assert Hosts.of([identity(), own]).names[0] == "rack 7"
    assert Hosts.of([identity(), own]).several
    assert not Hosts.of([identity(), identity()]).several


def one_sentence(error: BaseException, *words: str) -> None:
    assert all(word in str(error) for word in words), error
    assert "\n" not in str(error)


def nothing(comm: Communicator) -> None:
    raise AssertionError("nobody should come this far")


@pytest.mark.parametrize("hosts", [[2, 1], [4, 0], [2, 2, 2], [5, -1], []], ids=str)
def test_hosts_that_do_not_add_up_are_refused(hosts: list[int]) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        run_ranks(nothing, 4, hosts=hosts)
    one_sentence(error.value, "run_ranks", str(hosts), "4")


def test_unknown_networks_and_wire_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError) as bad_type:
        run_ranks(nothing, 2, hosts=[1, 1], wire_dtype="int8", timeout=10)
    one_sentence(bad_type.value, "run_ranks", "'int8'", "bfloat16")
    for kind in ("nccl", "ucc"):
        with pytest.raises(UnsupportedError) as bad_network:
            over(consecutive(1, 1), nothing, kind=kind)
        one_sentence(bad_network.value, "init: rank", f"'{kind}'", "gloo")
    monkeypatch.setenv("RINGCOMM_WIRE_DTYPE", "int7")
    with pytest.raises(InvalidArgumentError, match="int7"):
        ringcomm.init(0, 1)
    monkeypatch.delenv("RINGCOMM_WIRE_DTYPE")
    with pytest.raises(InvalidArgumentError, match="ucc"):
        ringcomm.init(0, 1, network="ucc")


# ---- what is counted ------------------------------------------------------------------------------------------------


def of_all_sizes(comm: Communicator, before: set[str]) -> list[dict[str, Any]]:
    longest = (256 << 10) // (len(comm.hosts) - 1) // 4  # of those that follow the signature
    for count in (1, longest, longest + 1):
        comm.all_reduce(torch.ones(count))
    comm.all_reduce(torch.ones(1), algorithm="ring")
    comm.reduce(torch.ones(1), 0)
    comm.broadcast(torch.ones(1), 0)
    every = ringcomm.metrics()["communicators"]
    (found,) = (each for each in every if each["rank"] == comm.rank and each["group"] not in before)
    return list(found["ops"])


@pytest.mark.parametrize(("ranks", "schedule"), [(consecutive(2, 1), "butterfly"), (consecutive(1, 1, 1), "direct")])
def test_calls_are_counted_by_the_schedule_between_hosts(ranks: Ranks, schedule: str) -> None:
    before = {each["group"] for each in ringcomm.metrics()["communicators"]}
    for ops in over(ranks, of_all_sizes, before):
        assert {(op["op"], op["algorithm"]): op["chosen"] for op in ops} == {
            ("all_reduce", "auto"): {"oneshot": 2, schedule: 1},
            ("all_reduce", "ring"): {"ring": 1},
            ("reduce", "auto"): {schedule: 1},
            ("broadcast", "auto"): {},
        }
