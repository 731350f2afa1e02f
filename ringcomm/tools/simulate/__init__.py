"""How long collectives take on a cluster that is not here: the library's own schedules, walked through with a model of
links (latency, bandwidth, a queue on each) and of ranks (reduction, start, slowness). What is modelled, and what not:
docs/simulate.md.

    cluster = presets.h100(hosts=128)
    simulate.predict("all_reduce", 1 << 30, cluster, dtype="bfloat16").time_us
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringcomm import _C
from ringcomm.errors import InvalidArgumentError, shown
from ringcomm.tools.bench.cases import COLLECTIVE

ELEMENT_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "bool": 1,
}  # fmt: skip
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
WIRES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_KEPT_MESSAGES = 100_000_000  # a simulation of more is not repeated for the parts of its time


@dataclass(frozen=True)
class LinkClass:
    """Links of one kind.

    Attributes:
        latency_us: of a message, from the sender's link to the receiver's.
        bandwidth_gbps: GB/s (1e9 bytes a second) of each direction.
        overhead_us: of a rank's own time, for each message it sends.
        reduce_gbps: bytes that came over it and that a rank combines with its own, per second; infinite where that is
            part of the transfer.
        slice_bytes: a message is cut into windows of slices of at most so many bytes; 0: not cut.
        least_slice_bytes: slices are smaller, so that a chunk has one for each slot, down to this; 0: they are not.
        slots: windows under way at once.
        wave_bytes: between hosts, an all_reduce of floats that are smaller than their float32 sums, and every
            reduce_scatter, is several in sequence, each of so many bytes of sums; 0: it is not.
        agrees: between hosts, every call begins with a short message each way: all mean the same call.
        bands: (nbytes, bandwidth_gbps) ascending: messages (of the collective) of so many bytes and more have that
            bandwidth instead, because they do not stay in caches or are moved in another way.
    """

    latency_us: float
    bandwidth_gbps: float
    overhead_us: float = 0.0
    reduce_gbps: float = math.inf
    slice_bytes: int = 0
    least_slice_bytes: int = 0
    slots: int = 1
    wave_bytes: int = 0
    agrees: bool = False
    bands: tuple[tuple[int, float], ...] = ()

    def bandwidth_of(self, nbytes: int) -> float:
        """GB/s for a collective of ``nbytes``."""
        return next((gbps for least, gbps in reversed(self.bands) if nbytes >= least), self.bandwidth_gbps)

    def numbers(self, nbytes: int) -> tuple[float, float, float, float, int, int, int, int, bool]:
        """For the native core."""
        return (
            self.latency_us, self.bandwidth_of(nbytes), self.overhead_us, self.reduce_gbps,
            self.slice_bytes, self.least_slice_bytes, self.slots, self.wave_bytes, self.agrees,
        )  # fmt: skip


BETWEEN_SLICES: dict[str, Any] = dict(_C.BETWEEN_SLICES)
"""How the engine over hosts cuts messages: for a `LinkClass` between hosts."""
WAVE_BYTES = 128 << 20
ENGINE: dict[str, Any] = {**BETWEEN_SLICES, "wave_bytes": WAVE_BYTES, "agrees": True}
"""All that the engine over hosts does with a call: for a `LinkClass` between hosts."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with as many ranks on each, numbered host by host.

    Attributes:
        inside: links between ranks of one host; each rank has its own.
        between: links between hosts.
        shared_nic: whether the ranks of a host share one link between hosts; else each has its own.
        call_us: added to every collective: what a call costs before the first message.
        wire: element type of floats between hosts in a reduction, where it is smaller; None: float32 partial sums on
            the way, the tensor's type back.
        slow_hosts: share of the bandwidth between hosts that is left, by host.
        stragglers: by rank, when it makes the call, in us after the others.
        slow_ranks: by rank, the factor of its own time (overheads and reductions).
        own: by collective, links to use instead of ``inside``, as measured for it.
        own_between: the same, instead of ``between``.
        sources: where the numbers come from, by what they are of.
    """

    hosts: int
    ranks_per_host: int
    inside: LinkClass
    between: LinkClass
    shared_nic: bool = False
    call_us: float = 0.0
    wire: str | None = None
    slow_hosts: Mapping[int, float] = field(default_factory=dict)
    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    own: Mapping[str, LinkClass] = field(default_factory=dict)
    own_between: Mapping[str, LinkClass] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in WIRES:
            raise InvalidArgumentError(
                f"simulate: got wire={shown(self.wire)}, expected None or one of {', '.join(WIRES)}; pass one of these"
            )
        if any(not 0 < share <= 1 for share in self.slow_hosts.values()):
            raise InvalidArgumentError(
                f"simulate: got slow_hosts={dict(self.slow_hosts)}, expected shares of the bandwidth above 0, at most "
                "1; pass such as 0.5 for a link of half the rate"
            )
        for name, entries, most in (
            ("slow_hosts", self.slow_hosts, self.hosts),
            ("stragglers", self.stragglers, self.world_size),
            ("slow_ranks", self.slow_ranks, self.world_size),
        ):
            strange = [index for index in entries if not 0 <= index < most]
            if strange:
                raise InvalidArgumentError(
                    f"simulate: got {name} for number {strange[0]}, expected one below {most}; number from 0"
                )

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def equal(self) -> bool:
        """Whether no host or rank differs from the others."""
        return not (self.slow_hosts or self.stragglers or self.slow_ranks)

    def without_differences(self) -> Cluster:
        """The same with all hosts and ranks alike."""
        return replace(self, slow_hosts={}, stragglers={}, slow_ranks={})


@dataclass(frozen=True)
class Prediction:
    """One collective.

    Attributes:
        nbytes: of the message, as nccl-tests counts: the larger side.
        time_us: until the last rank is done; the sum of latency_us (with overheads, the call's cost and late starts),
            bandwidth_us and reduce_us, which are nan where the simulation was too long to be repeated for them.
        algbw_gbps, busbw_gbps: as nccl-tests counts.
        first_us: when the first rank is done.
        inside_bytes: the most that a rank sends inside its host.
        between_bytes: the most that a host sends to others.
        messages: the most that a rank sends.
        events: messages that were simulated.
        folded: whether one host stood for all; then bytes and time may be those of a message that divides evenly.
    """

    collective: str
    algorithm: str
    nbytes: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    latency_us: float
    bandwidth_us: float
    reduce_us: float
    first_us: float
    inside_bytes: int
    between_bytes: int
    messages: int
    events: int
    folded: bool


def algorithms(collective: str, cluster: Cluster) -> tuple[str, ...]:
    """What `predict` knows for a collective. Inside one host: "direct", "ring", and "oneshot" for all_reduce. Over
    several: by the schedule between hosts, "ring", "butterfly" (a power of two hosts) or "direct", with the work inside
    hosts direct; "flat_ring" and "flat_direct" are one walk over all ranks, whatever host they are on: to compare with,
    for no communicator does that.

    Raises:  InvalidArgumentError: an unknown collective.
    """
    if collective not in COLLECTIVES:
        raise InvalidArgumentError(
            f"simulate: got collective {shown(collective)}, expected one of {', '.join(COLLECTIVES)}; pass one of these"
        )
    if cluster.hosts == 1:
        found = {"all_reduce": ("direct", "ring", "oneshot"), "all_to_all": ("direct",)}
        return found.get(collective, ("direct", "ring"))
    if collective == "broadcast":
        return ("ring", "flat_ring")
    if collective == "all_to_all":
        return ("direct",)
    butterfly = ("butterfly",) if cluster.hosts & (cluster.hosts - 1) == 0 else ()
    return ("ring", *butterfly, "direct", "flat_ring", "flat_direct")


def in_order(collective: str, cluster: Cluster) -> str:
    """What a communicator takes by itself: between hosts the schedule that keeps the canonical order, a butterfly for a
    power of two hosts, else direct; inside one host direct, which a call may beat with "oneshot" where it is small."""
    names = algorithms(collective, cluster)
    return next(name for name in ("butterfly", "direct", "ring") if name in names)


def predict(
    collective: str,
    nbytes: int,
    cluster: Cluster,
    algorithm: str = "auto",
    dtype: str = "float32",
    *,
    root_host: int = 0,
    fold: bool = True,
) -> Prediction:
    """The time of one collective.

    Args:
        collective: all_reduce, reduce_scatter, all_gather, broadcast (from the first rank of ``root_host``) or
            all_to_all.
        nbytes: of the message: the tensor; of all ranks' parts together for reduce_scatter, all_gather and all_to_all.
        algorithm: see `algorithms`; "auto": `in_order`; "best": the fastest that is not flat.
        dtype: the element type; over several hosts 16- and 8-bit floats travel as float32 while they are reduced.
        fold: whether one host may stand for all where all are equal: with all chunks as long as the longest, which
            they are or else are too many messages (above 4e6) to look at each.

    Cost:    where all hosts are equal, messages of one host: milliseconds; else of all ranks, about 20 ns each.
    Raises:  InvalidArgumentError: what the schedules do not have, or more than 2e10 messages.
    Source:  Hockney 1994, Parallel Computing 20(3); Culler et al. 1993, PPoPP (LogP).
    """
    if algorithm == "best":
        found = compare(collective, nbytes, cluster, dtype, root_host=root_host)
        return min(_real(found).values(), key=lambda each: each.time_us)
    chosen = _chosen(collective, nbytes, cluster, algorithm, dtype)
    question = _question(collective, nbytes, cluster, chosen, dtype, root_host, fold)
    return _predicted(question, collective, chosen, nbytes, cluster)


def time_us(collective: str, nbytes: int, cluster: Cluster, algorithm: str = "auto", dtype: str = "float32") -> float:
    """`predict`'s time alone, for a third of its cost; not for "best"."""
    chosen = _chosen(collective, nbytes, cluster, algorithm, dtype)
    answer = _C.simulate(**_question(collective, nbytes, cluster, chosen, dtype, 0, True))
    return answer["time_us"] + cluster.call_us


def _chosen(collective: str, nbytes: int, cluster: Cluster, algorithm: str, dtype: str) -> str:
    """The algorithm's name, once all is known to make sense."""
    names = algorithms(collective, cluster)
    if dtype not in ELEMENT_BYTES:
        raise InvalidArgumentError(
            f"simulate: got dtype {shown(dtype)}, expected one of {', '.join(ELEMENT_BYTES)}; pass one of these"
        )
    if nbytes < 0:
        raise InvalidArgumentError(f"simulate: got nbytes={nbytes}, expected 0 or more; pass the message's bytes")
    chosen = in_order(collective, cluster) if algorithm == "auto" else algorithm
    if chosen not in names:
        raise InvalidArgumentError(
            f"simulate: got algorithm {shown(algorithm)} for {collective} on {cluster.hosts} hosts, expected one of "
            f"{', '.join(names)}, auto, best; pass one of these"
        )
    return chosen


def compare(
    collective: str, nbytes: int, cluster: Cluster, dtype: str = "float32", *, root_host: int = 0
) -> dict[str, Prediction]:
    """Every algorithm that `algorithms` names, by name."""
    return {
        name: predict(collective, nbytes, cluster, name, dtype, root_host=root_host)
        for name in algorithms(collective, cluster)
    }


@dataclass(frozen=True)
class Crossover:
    """From ``nbytes`` on ``algorithm`` is the fastest, until the next one."""

    nbytes: int
    algorithm: str


def crossovers(
    collective: str, sizes: Sequence[int], cluster: Cluster, dtype: str = "float32"
) -> tuple[Crossover, ...]:
    """Which algorithm wins where: of the given message bytes, those at which the fastest one changes. An algorithm wins
    as long as no other is faster by more than 1 %; at first, that of `in_order` does; flat ones never do."""
    found: list[Crossover] = []
    for nbytes in sorted(sizes):
        usual = found[-1].algorithm if found else in_order(collective, cluster)
        best = winner(compare(collective, nbytes, cluster, dtype), usual)
        if not found or found[-1].algorithm != best:
            found.append(Crossover(nbytes, best))
    return tuple(found)


def winner(found: Mapping[str, Prediction], usual: str) -> str:
    """The fastest of some predictions by algorithm, of those that are not flat, or ``usual`` if it takes at most 1 %
    longer."""
    found = _real(found) or found
    best = min(found, key=lambda name: found[name].time_us)
    return usual if usual in found and found[usual].time_us <= 1.01 * found[best].time_us else best


def _real(found: Mapping[str, Prediction]) -> Mapping[str, Prediction]:
    """Those that a communicator has."""
    return {name: each for name, each in found.items() if not name.startswith("flat_")}


def _question(
    collective: str, nbytes: int, cluster: Cluster, algorithm: str, dtype: str, root_host: int, fold: bool
) -> dict[str, Any]:
    element = ELEMENT_BYTES[dtype]
    flat, name = algorithm.startswith("flat_"), algorithm.removeprefix("flat_")
    alone = cluster.hosts == 1
    return {
        "collective": collective,
        "between": ("direct" if collective == "all_to_all" else "ring") if alone else name,
        "inside": name if alone else "direct",
        "flat": flat,
        "hosts": cluster.hosts,
        "ranks_per_host": cluster.ranks_per_host,
        "count": nbytes // element,
        "element_bytes": (element, *_wire_bytes(collective, dtype, cluster.wire)),
        "inside_link": cluster.own.get(collective, cluster.inside).numbers(nbytes),
        "between_link": cluster.own_between.get(collective, cluster.between).numbers(nbytes),
        "shared_nic": cluster.shared_nic,
        "link_share": _dense(cluster.slow_hosts, cluster.hosts, 1.0),
        "start_us": _dense(cluster.stragglers, cluster.world_size, 0.0),
        "slowdown": _dense(cluster.slow_ranks, cluster.world_size, 1.0),
        "root_host": root_host,
        "fold": fold,
    }


def _dense(entries: Mapping[int, float], count: int, otherwise: float) -> list[float]:
    return [entries.get(index, otherwise) for index in range(count)] if entries else []


def _wire_bytes(collective: str, dtype: str, wire: str | None) -> tuple[int, int, int]:
    """Bytes of an element over several hosts: of a sum under way inside a host, of one between hosts, of a result."""
    element = ELEMENT_BYTES[dtype]
    if "float" not in dtype:
        return element, element, element
    partial, reduces = max(4, element), collective in ("all_reduce", "reduce_scatter")
    if wire is None or not reduces:
        return partial, partial, element
    smaller = ELEMENT_BYTES[wire]
    # float8 stands for float32 alone
    return (
        partial,
        smaller if smaller < partial and (smaller > 1 or partial == 4) else partial,
        smaller if smaller < element and (smaller > 1 or element == 4) else element,
    )


def _predicted(question: dict[str, Any], collective: str, algorithm: str, nbytes: int, cluster: Cluster) -> Prediction:
    answer = _C.simulate(**question)
    whole = answer["time_us"]
    latency = without_reduction = math.nan
    if answer["events"] <= _KEPT_MESSAGES:
        without_reduction = _C.simulate(**_with_links(question, reduce_gbps=math.inf))["time_us"]
        latency = _C.simulate(**_with_links(question, reduce_gbps=math.inf, bandwidth_gbps=math.inf))["time_us"]
    time_us = whole + cluster.call_us
    algbw = nbytes / time_us / 1e3 if time_us > 0 else 0.0
    bench_name = "alltoall" if collective == "all_to_all" else collective
    return Prediction(
        collective=collective,
        algorithm=algorithm,
        nbytes=nbytes,
        time_us=time_us,
        algbw_gbps=algbw,
        busbw_gbps=algbw * COLLECTIVE[bench_name].factor(cluster.world_size),
        latency_us=latency + cluster.call_us,
        bandwidth_us=without_reduction - latency,
        reduce_us=whole - without_reduction,
        first_us=answer["first_us"] + cluster.call_us,
        inside_bytes=answer["inside_bytes"],
        between_bytes=answer["between_bytes"],
        messages=answer["messages"],
        events=answer["events"],
        folded=answer["folded"],
    )


def _with_links(question: dict[str, Any], **changes: float) -> dict[str, Any]:
    place = {"bandwidth_gbps": 1, "reduce_gbps": 3}
    links = {name: list(question[name]) for name in ("inside_link", "between_link")}
    for link in links.values():
        for name, value in changes.items():
            link[place[name]] = value
    return {**question, **{name: tuple(link) for name, link in links.items()}}
