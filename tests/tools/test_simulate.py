"""The simulator's model: closed formulas, bytes on links, one host for all, late and slow ranks, refusals."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcomm.comm import schedule
from ringcomm.tools import simulate
from ringcomm.tools.simulate import BETWEEN_SLICES, Cluster, LinkClass, predict
from tests.support import ROOT
from tests.support.choice import drawn

ALPHA_US, GBPS, GAMMA_GBPS = 7.0, 2.0, 5.0
NBYTES = 3 << 20  # divides by what the tests use: 2, 3, 4, 8, 12, 16
S_US = NBYTES / GBPS / 1e3  # the message over one link


def flat_cluster(hosts: int, **more: Any) -> Cluster:
    """Hosts of one rank."""
    return Cluster(hosts, 1, LinkClass(1.0, 100.0), LinkClass(ALPHA_US, GBPS), **more)


def layered_cluster(hosts: int, ranks: int, **between: Any) -> Cluster:
    return Cluster(hosts, ranks, LinkClass(1.0, 50.0), LinkClass(ALPHA_US, GBPS, **between))


# ---- closed formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 12])
def test_a_ring_costs_what_the_formula_says(hosts: int) -> None:
    expected = 2 * (hosts - 1) * ALPHA_US + 2 * (hosts - 1) / hosts * S_US
    assert predict("all_reduce", NBYTES, flat_cluster(hosts), "ring").time_us == pytest.approx(expected, rel=1e-12)
    assert schedule.ring_cost_us(NBYTES, hosts, ALPHA_US, GBPS) == pytest.approx(expected, rel=1e-12)
    for half in ("reduce_scatter", "all_gather"):
        assert predict(half, NBYTES, flat_cluster(hosts), "ring").time_us == pytest.approx(expected / 2, rel=1e-12)


@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
def test_a_butterfly_costs_what_the_formula_says(hosts: int) -> None:
    expected = 2 * math.log2(hosts) * ALPHA_US + 2 * (hosts - 1) / hosts * S_US
    assert predict("all_reduce", NBYTES, flat_cluster(hosts), "butterfly").time_us == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("hosts", [2, 3, 8, 12])
def test_a_direct_exchange_costs_what_the_formula_says(hosts: int) -> None:
    part = (hosts - 1) / hosts * S_US
    cluster = flat_cluster(hosts)
    assert predict("all_reduce", NBYTES, cluster, "direct").time_us == pytest.approx(2 * ALPHA_US + 2 * part, rel=1e-12)
    assert predict("all_to_all", NBYTES, cluster, "direct").time_us == pytest.approx(ALPHA_US + part, rel=1e-12)


@pytest.mark.parametrize("name", ["ring", "butterfly", "direct"])
def test_reductions_overheads_and_the_call_are_added(name: str) -> None:
    hosts, overhead_us, call_us = 4, 0.5, 11.0
    link = LinkClass(ALPHA_US, GBPS, overhead_us=overhead_us, reduce_gbps=GAMMA_GBPS)
    plain = predict("all_reduce", NBYTES, flat_cluster(hosts), name)
    more = predict("all_reduce", NBYTES, replace(flat_cluster(hosts), between=link, call_us=call_us), name)
    reduce_us = (hosts - 1) / hosts * NBYTES / GAMMA_GBPS / 1e3
    # The messages of a direct exchange leave one after the other: only the first waits for its overhead.
    overheads = {"ring": 6, "butterfly": 4, "direct": 2}[name] * overhead_us
    assert more.time_us == pytest.approx(plain.time_us + overheads + reduce_us + call_us, rel=1e-9)
    assert more.latency_us + more.bandwidth_us + more.reduce_us == pytest.approx(more.time_us, rel=1e-12)
    assert more.reduce_us == pytest.approx(reduce_us, rel=1e-9)


@pytest.mark.parametrize(("hosts", "slices"), [(2, 1), (5, 8), (16, 64)])
def test_a_broadcast_is_a_pipeline_along_the_ring(hosts: int, slices: int) -> None:
    link = LinkClass(ALPHA_US, GBPS, slice_bytes=NBYTES // slices, slots=10**6)
    each = S_US / slices
    expected = (hosts - 1) * (ALPHA_US + each) + (slices - 1) * each
    for root in (0, hosts - 1):
        found = predict("broadcast", NBYTES, replace(flat_cluster(hosts), between=link), "ring", root_host=root)
        assert found.time_us == pytest.approx(expected, rel=1e-9)
        assert found.between_bytes == NBYTES


@pytest.mark.parametrize("name", ["ring", "butterfly", "direct"])
def test_a_hierarchy_is_the_sum_of_its_phases(name: str) -> None:
    hosts, ranks = 4, 3
    cluster = layered_cluster(hosts, ranks)
    inside = predict("all_reduce", NBYTES, replace(cluster, hosts=1), "direct").time_us
    rail = predict("all_reduce", NBYTES // ranks, replace(cluster, ranks_per_host=1), name).time_us
    assert predict("all_reduce", NBYTES, cluster, name).time_us == pytest.approx(inside + rail, rel=1e-9)


def test_oneshot_sends_everything_to_everyone_once() -> None:
    cluster = Cluster(1, 4, LinkClass(1.0, 50.0, reduce_gbps=10.0), LinkClass(1.0, 1.0))
    found = predict("all_reduce", NBYTES, cluster, "oneshot")
    assert found.time_us == pytest.approx(1.0 + 3 * NBYTES / 50e3 + 3 * NBYTES / 10e3, rel=1e-9)
    assert (found.messages, found.inside_bytes) == (3, 3 * NBYTES)
    small = predict("all_reduce", 64, cluster, "best")
    assert small.algorithm == "oneshot"
    assert predict("all_reduce", NBYTES, cluster, "best").algorithm != "oneshot"


def test_windows_under_way_hide_reductions() -> None:
    sliced = LinkClass(ALPHA_US, GBPS, reduce_gbps=2 * GBPS, slice_bytes=NBYTES // 64)
    one, four = (
        predict("all_reduce", NBYTES, replace(flat_cluster(4), between=replace(sliced, slots=slots)), "butterfly")
        for slots in (1, 4)
    )
    wire_us = 2 * 3 / 4 * S_US
    assert one.reduce_us == pytest.approx(3 / 4 * S_US / 2, rel=1e-9)  # nothing is hidden
    assert four.reduce_us < one.reduce_us / 2
    assert wire_us < four.time_us < one.time_us


def test_a_window_waits_for_its_slot() -> None:
    slices, hosts = 8, 4
    link = LinkClass(ALPHA_US, GBPS, slice_bytes=NBYTES // slices // hosts)
    each_us = S_US / slices / hosts
    found = predict("all_reduce", NBYTES, replace(flat_cluster(hosts), between=link), "ring")
    assert found.time_us == pytest.approx(slices * 2 * (hosts - 1) * (ALPHA_US + each_us), rel=1e-9)
    chain = replace(link, slice_bytes=NBYTES // slices)
    found = predict("broadcast", NBYTES, replace(flat_cluster(2), between=chain), "ring")
    assert found.time_us == pytest.approx(slices * (ALPHA_US + S_US / slices), rel=1e-9)


def test_a_receiver_takes_one_message_at_a_time() -> None:
    """Four rails come to a host with half a link: twice the message, however fast they leave."""
    free = LinkClass(0.0, math.inf)
    cluster = Cluster(2, 4, free, LinkClass(ALPHA_US, GBPS), shared_nic=True, slow_hosts={1: 0.5})
    assert predict("broadcast", NBYTES, cluster).time_us == pytest.approx(ALPHA_US + 2 * S_US, rel=1e-9)


def test_a_sender_sends_one_message_at_a_time() -> None:
    """One host is late in the second round, when all others have sent: it sends to one after the other."""
    hosts = 6
    exchange_us, reduce_us = (hosts - 1) / hosts * S_US, (hosts - 1) / hosts * NBYTES / GAMMA_GBPS / 1e3
    link = LinkClass(ALPHA_US, GBPS, reduce_gbps=GAMMA_GBPS)
    cluster = replace(flat_cluster(hosts), between=link, slow_ranks={2: 100.0})
    assert predict("all_reduce", NBYTES, cluster, "direct").time_us == pytest.approx(
        2 * ALPHA_US + 2 * exchange_us + 100 * reduce_us, rel=1e-9
    )


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring", "butterfly", "direct"])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(("dtype", "wire", "factor"), [
    ("float32", None, 1.0), ("bfloat16", None, 1.5), ("bfloat16", "bfloat16", 1.0), ("float32", "bfloat16", 0.5),
    ("float32", "float8_e4m3fn", 0.25), ("bfloat16", "float8_e4m3fn", 0.75), ("int16", "bfloat16", 1.0),
])  # fmt: skip
def test_a_host_sends_what_it_must(name: str, fold: bool, dtype: str, wire: str | None, factor: float) -> None:
    """2(H-1)/H of the message, as many bytes as its type has on the wire: sums of 16 bits travel in 32."""
    for hosts, ranks in ((2, 2), (4, 3), (8, 4)):
        cluster = replace(layered_cluster(hosts, ranks, **BETWEEN_SLICES), wire=wire)
        found = predict("all_reduce", NBYTES, cluster, name, dtype, fold=fold)
        assert found.between_bytes == factor * 2 * (hosts - 1) * NBYTES / hosts
        # Inside, a sum has four bytes, whatever it has between hosts; what is gathered has its type's.
        element = simulate.ELEMENT_BYTES[dtype]
        widened = (max(4, element) if "float" in dtype else element) / element
        assert found.inside_bytes == (1 + widened) * (ranks - 1) * NBYTES / ranks


def test_gathered_and_moved_bytes() -> None:
    cluster = layered_cluster(4, 3)
    assert predict("all_gather", NBYTES, cluster, "ring", "bfloat16").between_bytes == 3 * NBYTES // 4
    assert predict("all_to_all", NBYTES, cluster).between_bytes == 3 * 3 * NBYTES // 4  # every rank has so much
    assert predict("all_reduce", NBYTES, cluster, "flat_ring").between_bytes == 2 * 11 * NBYTES // 12
    # 16-bit sums travel in 32 bits there too
    assert predict("all_reduce", NBYTES, cluster, "flat_ring", "bfloat16").between_bytes == 3 * 11 * NBYTES // 12


def test_an_all_to_all_sends_every_part_straight_and_whole() -> None:
    """First those for other hosts, then those inside."""
    hosts, ranks = 4, 3
    cluster = layered_cluster(hosts, ranks, **BETWEEN_SLICES)
    for fold in (True, False):
        found = predict("all_to_all", NBYTES, cluster, fold=fold)
        assert found.messages == hosts * ranks - 1
        assert found.inside_bytes == (ranks - 1) * NBYTES // (hosts * ranks)
        between_us = ALPHA_US + (hosts - 1) / hosts * S_US
        assert found.time_us == pytest.approx(between_us + 1.0 + found.inside_bytes / 50e3, rel=1e-9)


def test_a_broadcast_reaches_the_root_s_host_first() -> None:
    """Which scatters and gathers, before its rails; the others gather what their rails brought."""
    hosts, ranks = 3, 4
    inside = LinkClass(1.0, 50.0)
    for root_host in (0, 2):
        found = predict("broadcast", NBYTES, layered_cluster(hosts, ranks), root_host=root_host)
        part_us = (ranks - 1) / ranks * NBYTES / 50e3
        lanes_us = (hosts - 1) * (ALPHA_US + S_US / ranks)
        assert found.time_us == pytest.approx(3 * (part_us + inside.latency_us) + lanes_us, rel=1e-9)
    # A slow rank of another host works for one gathering.
    slow = replace(layered_cluster(hosts, ranks), inside=replace(inside, overhead_us=1.0), slow_ranks={9: 1e4})
    usual = predict("broadcast", NBYTES, slow.without_differences())
    assert 2e4 < predict("broadcast", NBYTES, slow).time_us - usual.time_us < 4e4


# ---- one host for all ----------------------------------------------------------------------------------------------

EVEN_CUTS = [{}, {"slice_bytes": NBYTES // 96, "slots": 3, "reduce_gbps": 4.0, "overhead_us": 0.5}]


@pytest.mark.parametrize("between", EVEN_CUTS)
@pytest.mark.parametrize("shared_nic", [False, True])
@pytest.mark.parametrize("collective", simulate.COLLECTIVES)
def test_one_host_stands_for_all(collective: str, shared_nic: bool, between: dict[str, Any]) -> None:
    cluster = replace(layered_cluster(4, 4, **between), shared_nic=shared_nic)
    for name in simulate.algorithms(collective, cluster):
        folded, full = (predict(collective, NBYTES, cluster, name, fold=fold) for fold in (True, False))
        assert folded.time_us == pytest.approx(full.time_us, rel=1e-9), name
        assert (folded.between_bytes, folded.inside_bytes, folded.messages) == (
            full.between_bytes, full.inside_bytes, full.messages,
        )  # fmt: skip
        # Hosts that share a link are not alike at every moment of a flat direct exchange.
        assert folded.folded == (collective != "broadcast" and not (name == "flat_direct" and shared_nic))
        assert folded.folded == (folded.events < full.events)
        assert not full.folded


def test_a_message_that_does_not_divide_is_looked_at_in_full() -> None:
    cluster = layered_cluster(4, 3, **BETWEEN_SLICES)
    for nbytes in (4, 1000, 12344, 1_000_004):
        found = predict("all_reduce", nbytes, cluster)
        assert found == predict("all_reduce", nbytes, cluster, fold=False)
    tiny = predict("all_reduce", 64, layered_cluster(64, 8), "direct")
    assert tiny.between_bytes == 2 * 63 * 64 or tiny.between_bytes == 63 * 64


def test_many_ranks_cost_little_to_simulate() -> None:
    cluster = layered_cluster(8192, 8, **BETWEEN_SLICES)
    for name in simulate.algorithms("all_reduce", cluster):
        found = predict("all_reduce", 1 << 30, cluster, name)
        assert found.folded
        assert found.events < 20_000_000
    ring, butterfly = (predict("all_reduce", 1 << 20, cluster, name) for name in ("ring", "butterfly"))
    assert ring.latency_us > 2 * 8191 * ALPHA_US > 100 * butterfly.latency_us


# ---- hosts and ranks that differ -----------------------------------------------------------------------------------


def ring_by_hand(hosts: int, chunk_us: float, start_us: list[float], share: list[float], combine_us: float) -> float:
    """The table of `schedule`, step by step: the slower of two links counts, and each link takes one at a time."""
    now, out, into = list(start_us), [0.0] * hosts, [0.0] * hosts
    for step in range(schedule.num_steps(hosts)):
        leave = [max(now[r], out[r], now[(r + 1) % hosts] if step == 0 else 0.0) for r in range(hosts)]
        arrived, gone = [0.0] * hosts, [0.0] * hosts
        for r in range(hosts):
            to = (r + 1) % hosts
            out[r] = leave[r] + chunk_us / share[r]
            into[to] = max(leave[r] + ALPHA_US, into[to]) + chunk_us / min(share[r], share[to])
            arrived[to], gone[r] = into[to], into[to] - ALPHA_US
        reduces = [schedule.ring_step(r, hosts, step).reduce for r in range(hosts)]
        now = [max(now[r], arrived[r], gone[r]) + (combine_us if reduces[r] else 0.0) for r in range(hosts)]
    return max(now)


@drawn(40)
@given(st.integers(2, 8), st.data())
def test_differing_hosts_take_the_time_of_the_recurrence(hosts: int, data: st.DataObject) -> None:
    start = data.draw(st.lists(st.floats(0, 500), min_size=hosts, max_size=hosts))
    share = data.draw(st.lists(st.floats(0.1, 1.0), min_size=hosts, max_size=hosts))
    nbytes = hosts * 65536
    cluster = replace(
        flat_cluster(hosts),
        between=LinkClass(ALPHA_US, GBPS, reduce_gbps=GAMMA_GBPS),
        stragglers=dict(enumerate(start)),
        slow_hosts=dict(enumerate(share)),
    )
    expected = ring_by_hand(hosts, 65536 / GBPS / 1e3, start, share, 65536 / GAMMA_GBPS / 1e3)
    assert predict("all_reduce", nbytes, cluster, "ring").time_us == pytest.approx(expected, rel=1e-9)


def test_rails_that_are_alike_are_copied_exactly() -> None:
    """A slow host makes every rail slow in the same way; a slow rank one rail alone."""
    alone = replace(flat_cluster(5), slow_hosts={2: 0.25})
    rails = replace(Cluster(5, 3, LinkClass(0.0, math.inf), alone.between), slow_hosts={2: 0.25})
    one, three = predict("all_reduce", NBYTES // 3, alone, "ring"), predict("all_reduce", NBYTES, rails, "ring")
    assert three.time_us == pytest.approx(one.time_us, rel=1e-9)
    assert three.between_bytes == 3 * one.between_bytes
    assert three.events < 3 * one.events + 5 * 2 * 2 * 3  # the messages inside, and those of one rail
    slow = replace(rails, slow_hosts={}, slow_ranks={4: 50.0}, between=replace(rails.between, overhead_us=1.0))
    assert (
        predict("all_reduce", NBYTES, slow, "ring").time_us
        > predict("all_reduce", NBYTES, slow.without_differences(), "ring").time_us + 40.0
    )


@pytest.mark.parametrize("name", ["ring", "butterfly", "direct", "flat_ring", "flat_direct"])
def test_a_late_rank_delays_by_no_more_than_it_is_late(name: str) -> None:
    cluster, late_us = layered_cluster(4, 2, **BETWEEN_SLICES), 5000.0
    usual = predict("all_reduce", NBYTES, cluster, name)
    late = predict("all_reduce", NBYTES, replace(cluster, stragglers={5: late_us}), name)
    assert late_us < late.time_us <= usual.time_us + late_us + 1e-6
    assert late.time_us > usual.time_us


def test_half_a_link_makes_long_messages_twice_as_long() -> None:
    cluster = layered_cluster(4, 2, **BETWEEN_SLICES)
    slow = replace(cluster, slow_hosts={1: 0.5})
    for name in ("ring", "butterfly", "direct"):
        ratio = (
            predict("all_reduce", 96 << 20, slow, name).time_us / predict("all_reduce", 96 << 20, cluster, name).time_us
        )
        assert 1.4 < ratio < 2.6, name


def test_ranks_share_a_link_or_do_not() -> None:
    own = layered_cluster(4, 4, **BETWEEN_SLICES)
    long_us, short_us = (
        predict("all_reduce", 96 << 20, replace(own, shared_nic=shared), "ring").bandwidth_us
        for shared in (True, False)
    )
    assert 3.0 < long_us / short_us < 4.0  # inside, nothing is shared


costs = st.floats(0.01, 100.0)


@drawn(60)
@given(
    st.sampled_from(["ring", "butterfly", "direct", "flat_ring", "flat_direct"]),
    st.integers(1, 1 << 22), costs, costs, costs, costs, st.sampled_from(["latency", "bandwidth", "reduce", "bytes"]),
)  # fmt: skip
def test_nothing_gets_faster_with_worse_links(
    name: str, nbytes: int, latency_us: float, gbps: float, reduce_gbps: float, overhead_us: float, what: str
) -> None:
    link = LinkClass(latency_us, gbps, overhead_us, reduce_gbps)
    cluster = Cluster(4, 2, LinkClass(0.5, 40.0), link)
    worse = {
        "latency": replace(link, latency_us=2 * latency_us),
        "bandwidth": replace(link, bandwidth_gbps=gbps / 2),
        "reduce": replace(link, reduce_gbps=reduce_gbps / 2),
    }.get(what, link)
    more = nbytes
    if what == "bytes":  # in shards that are equal: where ranks have none, fewer messages are sent
        nbytes = -(-nbytes // (64 * cluster.world_size)) * 64 * cluster.world_size
        more = 2 * nbytes
    before = predict("all_reduce", nbytes, cluster, name).time_us
    assert predict("all_reduce", more, replace(cluster, between=worse), name).time_us >= before * (1 - 1e-9)


# ---- which wins ----------------------------------------------------------------------------------------------------


def test_compare_knows_all_and_crossovers_are_where_the_best_changes() -> None:
    cluster = replace(layered_cluster(64, 4), between=LinkClass(20.0, 10.0, overhead_us=2.0, **BETWEEN_SLICES))
    assert set(simulate.compare("all_reduce", NBYTES, cluster)) == {
        "ring", "butterfly", "direct", "flat_ring", "flat_direct",
    }  # fmt: skip
    sizes = [1 << k for k in range(8, 29)]
    found = simulate.crossovers("all_reduce", sizes, cluster)
    assert len(found) >= 2
    for nbytes in sizes:
        winner = [each.algorithm for each in found if each.nbytes <= nbytes][-1]
        times = {name: each.time_us for name, each in simulate.compare("all_reduce", nbytes, cluster).items()}
        assert times[winner] <= 1.01 * min(times[name] for name in ("ring", "butterfly", "direct"))


def test_a_schedule_that_no_communicator_uses_never_wins() -> None:
    """Over slow links inside a host, a schedule that mostly passes them by would."""
    cluster = Cluster(2, 4, LinkClass(1000.0, 0.001), LinkClass(1.0, 1000.0))
    found = simulate.compare("all_reduce", NBYTES, cluster)
    assert found["flat_direct"].time_us < 0.6 * min(found[name].time_us for name in ("ring", "butterfly", "direct"))
    assert simulate.crossovers("all_reduce", [NBYTES], cluster)[0].algorithm == "butterfly"
    assert predict("all_reduce", NBYTES, cluster, "best").algorithm in ("ring", "butterfly", "direct")


# ---- waves and signatures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [True, False])
def test_waves_are_calls_in_sequence(fold: bool) -> None:
    whole = layered_cluster(4, 2)
    waves = layered_cluster(4, 2, wave_bytes=4 << 20)

    def us(collective: str, nbytes: int, cluster: Cluster, dtype: str) -> float:
        return predict(collective, nbytes, cluster, dtype=dtype, fold=fold).time_us

    # float32 sums of 2 MiB of bfloat16 are 4 MiB
    one = us("all_reduce", 2 << 20, whole, "bfloat16")
    assert us("all_reduce", 2 << 20, waves, "bfloat16") == one
    assert us("all_reduce", 6 << 20, waves, "bfloat16") == pytest.approx(3 * one, rel=1e-12)
    half = us("all_reduce", 1 << 20, whole, "bfloat16")
    assert us("all_reduce", 3 << 20, waves, "bfloat16") == pytest.approx(one + half, rel=1e-12)
    # sums of float32 need no memory of their own in an all_reduce, but in a reduce_scatter
    assert us("all_reduce", 12 << 20, waves, "float32") == us("all_reduce", 12 << 20, whole, "float32")
    one = us("reduce_scatter", 4 << 20, whole, "float32")
    assert us("reduce_scatter", 12 << 20, waves, "float32") == pytest.approx(3 * one, rel=1e-12)
    for dtype in ("bfloat16", "float32"):
        gathered = (us("all_gather", 12 << 20, cluster, dtype) for cluster in (waves, whole))
        assert next(gathered) == next(gathered)


def test_waves_are_as_long_as_the_engine_makes_them() -> None:
    source = (ROOT / "csrc" / "hierarchy" / "collectives.cpp").read_text()
    found = re.search(r"kWaveBytes = (\d+) << (\d+)", source)
    assert found is not None
    assert int(found[1]) << int(found[2]) == simulate.WAVE_BYTES
    assert simulate.ENGINE["wave_bytes"] == simulate.WAVE_BYTES


@pytest.mark.parametrize("collective", simulate.COLLECTIVES)
def test_every_call_between_hosts_begins_with_its_signature(collective: str) -> None:
    for hosts, fold in ((2, True), (3, False), (4, True)):
        base = layered_cluster(hosts, 2, overhead_us=0.5)
        agrees = replace(base, between=replace(base.between, agrees=True))
        for name in simulate.algorithms(collective, base):
            one, more = (predict(collective, NBYTES, each, name, fold=fold) for each in (base, agrees))
            assert more.time_us == pytest.approx(one.time_us + ALPHA_US + 0.5, rel=1e-9)
            assert more.latency_us == pytest.approx(one.latency_us + ALPHA_US + 0.5, rel=1e-9)
    alone = replace(agrees, hosts=1)
    assert predict("all_reduce", NBYTES, alone) == predict("all_reduce", NBYTES, replace(base, hosts=1))


@pytest.mark.parametrize(
    ("name", "heard"), [("ring", {1, 2, 3}), ("butterfly", {0, 2, 3, 6}), ("direct", set(range(8)))]
)
def test_who_waits_for_a_late_rank_before_the_first_message(name: str, heard: set[int]) -> None:
    """Without bytes only signatures are left: those who talk to the late host wait for it, and no other. The one that
    is asked is the slowest, and so the last."""
    base = Cluster(8, 1, LinkClass(0.0, 1.0), LinkClass(ALPHA_US, GBPS, overhead_us=1.0, agrees=True))
    for asked in range(8):
        cluster = replace(base, stragglers={2: 100.0}, slow_ranks={asked: 1000.0})
        expected = ALPHA_US + 1000.0 + (100.0 if asked in heard else 0.0)
        assert predict("all_reduce", 0, cluster, name).time_us == pytest.approx(expected)


def test_a_tie_does_not_change_the_winner() -> None:
    """Over two hosts ring, butterfly and direct send the same messages."""
    assert simulate.crossovers("all_reduce", [1 << k for k in range(10, 25)], flat_cluster(2)) == (
        simulate.Crossover(1 << 10, "butterfly"),
    )


def test_auto_is_what_keeps_the_order() -> None:
    assert predict("all_reduce", 64, layered_cluster(8, 2)).algorithm == "butterfly"
    assert predict("all_reduce", 64, layered_cluster(6, 2)).algorithm == "direct"
    assert predict("broadcast", 64, layered_cluster(6, 2)).algorithm == "ring"
    assert predict("all_to_all", 64, layered_cluster(8, 2)).algorithm == "direct"


def test_bands_give_long_messages_another_bandwidth() -> None:
    link = LinkClass(0.0, 4.0, bands=((1 << 20, 2.0), (2 << 20, 1.0)))
    assert [link.bandwidth_of(nbytes) for nbytes in (1, (1 << 20) - 1, 1 << 20, 3 << 20)] == [4.0, 4.0, 2.0, 1.0]
    cluster = replace(flat_cluster(2), between=link)
    assert predict("all_reduce", 1 << 21, cluster).time_us == pytest.approx((1 << 21) / 1e3)
    own = replace(cluster, own_between={"all_reduce": LinkClass(0.0, 8.0)})
    assert predict("all_reduce", 1 << 21, own).time_us == pytest.approx((1 << 21) / 8e3)
