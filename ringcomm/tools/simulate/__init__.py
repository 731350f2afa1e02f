"""Predicts how long collectives take on a cluster. It runs the library's own schedules through a model of links
(latency, bandwidth, a queue on each) and of ranks (reduction, start, slowness). docs/simulate.md tells what
is modelled and what is not.

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
from ringcomm.validation import expects, one_of, validate_int

ELEMENT_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "bool": 1,
}  # fmt: skip
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
WIRES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_KEPT_MESSAGES = 100_000_000  # a larger simulation is not repeated to split its time into parts


@dataclass(frozen=True)
class LinkClass:
    """Links of one kind.

    Attributes:
        latency_us: latency of a message, from the sender's link to the receiver's.
        bandwidth_gbps: GB/s (1e9 bytes a second) in each direction.
        overhead_us: a rank's own time for each message that it sends.
        reduce_gbps: GB/s at which a rank reduces received bytes into its own; infinite if that is part of the transfer.
        slice_bytes: a message is split into windows of slices of at most this size; 0: it is not split.
        least_slice_bytes: slices are made smaller, down to this size, until a chunk has one for each slot; 0: they are
            not.
        slots: number of windows in flight at the same time.
        wave_bytes: between hosts, an all_reduce of floats smaller than their float32 sums, and every reduce_scatter,
            run as several in sequence, each with this many bytes of sums; 0: they run as one.
        agrees: whether, between hosts, every call begins with a short message in each direction to check that all ranks
            make the same call.
        bands: (nbytes, bandwidth_gbps), ascending: messages (of the collective) of at least nbytes have this bandwidth
            instead, because they do not stay in caches or are moved in another way.
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
        """Returns the GB/s for a collective of ``nbytes``."""
        return next((gbps for least, gbps in reversed(self.bands) if nbytes >= least), self.bandwidth_gbps)

    def numbers(self, nbytes: int) -> tuple[float, float, float, float, int, int, int, int, bool]:
        """Returns the numbers in the native core's form."""
        return (
            self.latency_us, self.bandwidth_of(nbytes), self.overhead_us, self.reduce_gbps,
            self.slice_bytes, self.least_slice_bytes, self.slots, self.wave_bytes, self.agrees,
        )  # fmt: skip


BETWEEN_SLICES: dict[str, Any] = dict(_C.BETWEEN_SLICES)
"""How the hierarchical engine splits messages: arguments for a `LinkClass` between hosts."""
WAVE_BYTES = 128 << 20
ENGINE: dict[str, Any] = {**BETWEEN_SLICES, "wave_bytes": WAVE_BYTES, "agrees": True}
"""All properties of the hierarchical engine's calls: arguments for a `LinkClass` between hosts."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of ranks each; ranks are numbered host by host.

    Attributes:
        inside: links between ranks of one host; each rank has its own.
        between: links between hosts.
        shared_nic: whether the ranks of a host share one link to other hosts; else each has its own.
        call_us: time added to every collective: the cost of a call before its first message.
        wire: element type of floats between hosts in a reduction, if it is smaller; None: partial sums are sent in
            float32, results in the tensor's type.
        slow_hosts: by host, the remaining share of its bandwidth to other hosts.
        stragglers: by rank, the delay of its call after the other ranks', in us.
        slow_ranks: by rank, the factor on its own time (overheads and reductions).
        own: by collective, links used instead of ``inside``, as measured for it.
        own_between: by collective, links used instead of ``between``.
        sources: the sources of the numbers, by subject.
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
        """Whether all hosts and all ranks are equal."""
        return not (self.slow_hosts or self.stragglers or self.slow_ranks)

    def without_differences(self) -> Cluster:
        """Returns the same cluster without slow hosts, slow ranks and stragglers."""
        return replace(self, slow_hosts={}, stragglers={}, slow_ranks={})


@dataclass(frozen=True)
class Prediction:
    """The prediction for one collective.

    Attributes:
        nbytes: size of the message as nccl-tests counts it: the larger side.
        time_us: time until the last rank is done; the sum of latency_us (with overheads, the call's cost and late
            starts), bandwidth_us and reduce_us, which are nan if the simulation was too large to be repeated for them.
        algbw_gbps, busbw_gbps: as nccl-tests computes them.
        first_us: time until the first rank is done.
        inside_bytes: the most bytes that a rank sends inside its host.
        between_bytes: the most bytes that a host sends to other hosts.
        messages: the most messages that a rank sends.
        events: number of simulated messages.
        folded: whether one host represents all; bytes and time may then be those of a message that divides evenly.
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


@expects("simulate", collective=one_of(*COLLECTIVES))
def algorithms(collective: str, cluster: Cluster) -> tuple[str, ...]:
    """Returns the algorithms that `predict` knows for a collective. Inside one host: "direct", "ring", and "oneshot"
    for all_reduce. Over several hosts, by the schedule between hosts: "ring", "butterfly" (for a power of two hosts) or
    "direct", with direct schedules inside hosts. "flat_ring" and "flat_direct" are one schedule over all ranks,
    regardless of hosts; they are for comparison, because no communicator uses them.

    Raises:  InvalidArgumentError: an unknown collective.
    """
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
    """Returns the algorithm that a communicator chooses by itself. Between hosts it is the schedule that keeps the
    canonical order: a butterfly for a power of two hosts, else direct. Inside one host it is direct, though a small
    call may be faster with "oneshot"."""
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
    """Predicts the time of one collective.

    Args:
        collective: all_reduce, reduce_scatter, all_gather, broadcast (from the first rank of ``root_host``) or
            all_to_all.
        nbytes: size of the message: the tensor; for reduce_scatter, all_gather and all_to_all all ranks' parts
            together.
        algorithm: see `algorithms`; "auto": `in_order`; "best": the fastest that is not flat.
        dtype: the element type; over several hosts 16- and 8-bit floats are sent as float32 while they are reduced.
        fold: whether one host may represent all hosts if they are equal. Chunks are then as long as the longest; they
            all are, unless there are too many messages (above 4e6) to simulate each.

    Cost:    if all hosts are equal, the messages of one host: milliseconds; else those of all ranks, about 20 ns each.
    Raises:  InvalidArgumentError: arguments that the schedules do not support, or more than 2e10 messages.
    Source:  Hockney 1994, Parallel Computing 20(3); Culler et al. 1993, PPoPP (LogP).
    """
    if algorithm == "best":
        found = compare(collective, nbytes, cluster, dtype, root_host=root_host)
        return min(_real(found).values(), key=lambda each: each.time_us)
    chosen = _chosen(collective, nbytes, cluster, algorithm, dtype)
    question = _question(collective, nbytes, cluster, chosen, dtype, root_host, fold)
    return _predicted(question, collective, chosen, nbytes, cluster)


def time_us(collective: str, nbytes: int, cluster: Cluster, algorithm: str = "auto", dtype: str = "float32") -> float:
    """Returns `predict`'s time alone, for a third of its cost; not for "best"."""
    chosen = _chosen(collective, nbytes, cluster, algorithm, dtype)
    answer = _C.simulate(**_question(collective, nbytes, cluster, chosen, dtype, 0, True))
    return answer["time_us"] + cluster.call_us


@expects("simulate", nbytes=validate_int(), dtype=one_of(*ELEMENT_BYTES))
def _chosen(collective: str, nbytes: int, cluster: Cluster, algorithm: str, dtype: str) -> str:
    """Returns the algorithm's name, after checking all arguments."""
    names = algorithms(collective, cluster)
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
    """Returns the prediction of every algorithm in `algorithms`, by name."""
    return {
        name: predict(collective, nbytes, cluster, name, dtype, root_host=root_host)
        for name in algorithms(collective, cluster)
    }


@dataclass(frozen=True)
class Crossover:
    """From ``nbytes`` on, up to the next crossover, ``algorithm`` is the fastest."""

    nbytes: int
    algorithm: str


def crossovers(
    collective: str, sizes: Sequence[int], cluster: Cluster, dtype: str = "float32"
) -> tuple[Crossover, ...]:
    """Returns the message sizes, of those given, at which the fastest algorithm changes. An algorithm stays the
    winner until another is faster by more than 1 %; the first winner is that of `in_order`. Flat algorithms never
    win."""
    found: list[Crossover] = []
    for nbytes in sorted(sizes):
        usual = found[-1].algorithm if found else in_order(collective, cluster)
        best = winner(compare(collective, nbytes, cluster, dtype), usual)
        if not found or found[-1].algorithm != best:
            found.append(Crossover(nbytes, best))
    return tuple(found)


def winner(found: Mapping[str, Prediction], usual: str) -> str:
    """Returns the fastest algorithm of some predictions, without the flat ones, or ``usual`` if it takes at most 1 %
    longer."""
    found = _real(found) or found
    best = min(found, key=lambda name: found[name].time_us)
    return usual if usual in found and found[usual].time_us <= 1.01 * found[best].time_us else best


def _real(found: Mapping[str, Prediction]) -> Mapping[str, Prediction]:
    """Returns the predictions of algorithms that a communicator has."""
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
    """Returns bytes per element over several hosts: of a partial sum inside a host, of one between hosts, of a
    result."""
    element = ELEMENT_BYTES[dtype]
    if "float" not in dtype:
        return element, element, element
    partial, reduces = max(4, element), collective in ("all_reduce", "reduce_scatter")
    if wire is None or not reduces:
        return partial, partial, element
    smaller = ELEMENT_BYTES[wire]
    # float8 replaces only float32
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
