"""Fits a model's links to measurements: to reports of `ringcomm bench -J report.json`, on one host or over several.

    report = json.loads(Path("report.json").read_text())
    cluster = calibrate(report).cluster                # from ringcomm.tools.simulate.calibrate import calibrate

A report of one host gives the links inside hosts; a report over several hosts gives the links between them, for a
cluster whose inside links are known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringcomm.errors import InvalidArgumentError
from ringcomm.tools.bench.options import DTYPES
from ringcomm.tools.simulate import COLLECTIVES, ENGINE, Cluster, LinkClass, time_us

_REDUCING = ("all_reduce", "reduce_scatter")
_BAND = math.log(1.12)  # bandwidths that differ by more are in separate bands
_TRUSTED = 0.1  # a measurement with a larger relative error has less weight
_TELLING = 0.6  # largest share of time not due to bandwidth in a message that determines the bandwidth
_ROUNDS = 12


@dataclass(frozen=True)
class Sample:
    """One line of a report.

    Attributes:
        time_us: the median over the rounds of the median call, if the report has rounds; else the mean.
        predicted_us: what a model predicts, once `deviations` has asked it.
    """

    collective: str
    nbytes: int
    dtype: str
    algorithm: str
    time_us: float
    predicted_us: float = math.nan

    @property
    def relative(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_us / self.time_us - 1


@dataclass(frozen=True)
class Calibration:
    """
    Attributes:
        cluster: the cluster with measured links: collectives in the report have their own, others the common one.
        between: whether the links between hosts were fitted; else those inside.
        deviations: the measurements that were used, with their predictions.
    """

    cluster: Cluster
    between: bool
    deviations: tuple[Sample, ...]


Report = Mapping[str, Any]
"""The decoded JSON document of ``ringcomm bench -J``."""


def samples_of(report: Report | Sequence[Report], sizes: Iterable[int] | None = None) -> list[Sample]:
    """Returns the lines of a report that the simulator can model, in place if that was measured.

    Args:
        report: one report, or several of the same command; then every line's median is used.
        sizes: message bytes to keep, as requested with ``-b`` and ``-e``; None: all.

    Raises:  InvalidArgumentError: not such a report.
    """
    kept = None if sizes is None else set(sizes)
    found: dict[tuple[str, int, str, str], list[float]] = {}
    try:
        for each in [report] if isinstance(report, Mapping) else report:
            algorithm = each["config"]["algorithm"]
            for row in each["results"]:
                name, nbytes = _name(row["experiment_name"]), row["size"]
                if name in COLLECTIVES and nbytes > 0 and (kept is None or nbytes in kept):
                    key = (name, nbytes, DTYPES[row["type"]], algorithm)
                    found.setdefault(key, []).append(_time_us(row))
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"calibrate: got a report without {error}, expected what ringcomm bench writes; pass a file of "
            "ringcomm bench -J"
        ) from error
    return [Sample(*key, statistics.median(values)) for key, values in found.items()]


def _name(experiment: str) -> str:
    return "all_to_all" if experiment == "alltoall" else experiment


def _time_us(row: Mapping[str, Any]) -> float:
    half = "in_place" if row.get("in_place") else "out_of_place"
    rounds = row.get(f"{half}_per_iter", {}).get("round_us")
    return float(statistics.median(rounds) if rounds else row[half]["time"])


def shape_of(report: Report) -> tuple[int, int]:
    """Returns (hosts, ranks on each) of a report, by the names of its hosts.

    Raises:  InvalidArgumentError: the hosts have different numbers of ranks.
    """
    if "devices" not in report:
        raise InvalidArgumentError(
            "calibrate: got a report without devices, expected what ringcomm bench writes; pass a file of ringcomm "
            "bench -J"
        )
    names = [device["host"] for device in report["devices"]]
    counts = {names.count(name) for name in names}
    if len(counts) != 1:
        raise InvalidArgumentError(
            f"calibrate: got hosts with {sorted(counts)} ranks, expected as many on each; measure on equal hosts"
        )
    return len(set(names)), counts.pop()


def calibrate(
    report: Report | Sequence[Report],
    cluster: Cluster | None = None,
    *,
    hosts: int | None = None,
    sizes: Iterable[int] | None = None,
) -> Calibration:
    """
    Fits latency, bandwidth and reduction of one class of links, by least squares of the model's relative errors;
    outliers have less weight.

    Latency and bandwidth are fitted to the collectives that do not reduce, the reduction speed to those that do. Then
    every collective of the report gets its own latency and bandwidth, in bands of message sizes if its bandwidths
    differ by more than 12 %.

    Args:
        report: the decoded document of ``ringcomm bench -J``; of several from the same command the medians are used.
        cluster: the known numbers, such as the links inside from an earlier calibration, or a preset; its numbers of
            hosts and ranks are replaced by the report's.
        hosts: number of hosts in the report; None: as many as its devices name.
        sizes: message bytes to use; None: all.

    Raises:  InvalidArgumentError: a report without two sizes of a collective, or not such a report.
    """
    found_hosts, per_host = shape_of(report if isinstance(report, Mapping) else report[0])
    if hosts is not None:
        if hosts < 1 or found_hosts * per_host % hosts:
            raise InvalidArgumentError(
                f"calibrate: got hosts={hosts} for {found_hosts * per_host} ranks, expected as many on each; pass "
                "the number of hosts that the report is of"
            )
        found_hosts, per_host = hosts, found_hosts * per_host // hosts
    base = cluster or Cluster(1, 1, LinkClass(1.0, 10.0), LinkClass(10.0, 10.0, **ENGINE))
    base = replace(base.without_differences(), hosts=found_hosts, ranks_per_host=per_host)
    samples = samples_of(report, sizes)
    by_name = {name: [s for s in samples if s.collective == name] for name in COLLECTIVES}
    measured = {name: some for name, some in by_name.items() if some}
    if not measured or any(len({s.nbytes for s in some}) < 2 for some in measured.values()):
        raise InvalidArgumentError(
            f"calibrate: got {len(samples)} measurements of {', '.join(measured) or 'nothing'}, expected at least two "
            "sizes of each collective; measure with ringcomm bench -b 1K -e 64M -f 4 -J report.json"
        )
    between = found_hosts > 1
    base = replace(base, own_between={}) if between else replace(base, own={}, call_us=0.0)

    def with_link(link: LinkClass) -> Cluster:
        return replace(base, between=link) if between else replace(base, inside=link)

    def model(link: LinkClass, s: Sample) -> float:
        return time_us(s.collective, s.nbytes, with_link(link), s.algorithm, s.dtype)

    link, own = _fit(model, base.between if between else base.inside, measured)
    fitted = replace(with_link(link), own_between=own) if between else replace(with_link(link), own=own)
    return Calibration(fitted, between, deviations(fitted, samples))


def deviations(cluster: Cluster, samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Returns each measurement with the model's prediction."""
    return tuple(
        replace(s, predicted_us=time_us(s.collective, s.nbytes, cluster, s.algorithm, s.dtype)) for s in samples
    )


Model = Callable[[LinkClass, Sample], float]
"""Predicts the time of a sample, in us, over given links."""


def _fit(
    model: Model, link: LinkClass, measured: Mapping[str, Sequence[Sample]]
) -> tuple[LinkClass, dict[str, LinkClass]]:
    """Returns (``link`` as it fits all samples, the links of each collective)."""
    moving = [s for name, some in measured.items() if name not in _REDUCING for s in some]
    reducing = [s for name, some in measured.items() if name in _REDUCING for s in some]
    link = _fitted(model, replace(link, reduce_gbps=math.inf), moving or reducing)
    if moving and reducing:
        link = replace(link, reduce_gbps=_reduction(model, link, reducing))
    return link, {name: _fitted(model, link, some) for name, some in measured.items()}


def _fitted(model: Model, link: LinkClass, samples: Sequence[Sample]) -> LinkClass:
    """Returns ``link`` with the latency and bandwidth of the samples: the latency from the shorter half of the
    messages, where it matters most; the bandwidth, in bands, from longer ones."""
    sizes = sorted({s.nbytes for s in samples})
    shorter = sizes[: max(3, (len(sizes) + 1) // 2)]
    link = replace(link, bands=())
    latency_us, inverse = _least_squares(model, link, [s for s in samples if s.nbytes in shorter])
    link = replace(link, latency_us=latency_us, bandwidth_gbps=1 / inverse)
    bands = _bands(model, link, samples)
    return replace(link, bandwidth_gbps=bands[0][1], bands=tuple(bands[1:])) if bands else link


def _least_squares(model: Model, link: LinkClass, samples: Sequence[Sample]) -> tuple[float, float]:
    """Returns latency and 1 / bandwidth. The model is linear in them, except where ranks wait for other ranks."""
    # The initial bandwidth is that of a message that is sent twice in the longest message's time.
    longest = max(samples, key=lambda s: s.nbytes)
    latency_us, inverse = 1.0, longest.time_us * 1e3 / longest.nbytes / 2

    def at(latency: float, inv: float, s: Sample) -> float:
        return model(replace(link, latency_us=latency, bandwidth_gbps=1 / inv), s)

    for _ in range(_ROUNDS):
        rows = []
        for s in samples:
            now = at(latency_us, inverse, s)
            by_latency = at(latency_us + 1.0, inverse, s) - now
            by_inverse = (at(latency_us, inverse * 1.01, s) - now) / (0.01 * inverse)
            error = s.time_us - now
            weight = min(1.0, _TRUSTED / max(abs(error) / s.time_us, 1e-9)) / s.time_us**2
            rows.append((by_latency, by_inverse, error, weight))
        step = _solve(rows)
        latency_us, before = max(0.0, latency_us + step[0]), inverse
        inverse = min(max(inverse + step[1], before / 4), before * 4)
    return min(latency_us, _most_latency(model, link, samples)), inverse


def _most_latency(model: Model, link: LinkClass, samples: Sequence[Sample]) -> float:
    """Returns the latency above which a message would be slower than measured at any bandwidth."""
    quick = replace(link, bandwidth_gbps=math.inf, reduce_gbps=math.inf)
    most = math.inf
    for s in samples:
        none, one = (model(replace(quick, latency_us=latency), s) for latency in (0.0, 1.0))
        if one > none:
            most = min(most, max(0.0, s.time_us - none) / (one - none))
    return most


def _bands(model: Model, link: LinkClass, samples: Sequence[Sample]) -> list[tuple[int, float]]:
    """Returns (least bytes, GB/s) of each band, from messages whose time is mostly bandwidth; the first band
    also covers smaller messages."""
    quick = replace(link, bandwidth_gbps=math.inf, reduce_gbps=math.inf)
    telling = [s for s in samples if model(quick, s) < _TELLING * s.time_us]
    bands: list[tuple[int, list[float]]] = []
    for nbytes in sorted({s.nbytes for s in telling}):
        gbps = statistics.median(_bandwidth(model, link, s) for s in telling if s.nbytes == nbytes)
        if bands and abs(math.log(gbps / statistics.median(bands[-1][1]))) < _BAND:
            bands[-1][1].append(gbps)
        else:
            bands.append((nbytes, [gbps]))
    return [(nbytes, statistics.median(values)) for nbytes, values in bands]


def _bandwidth(model: Model, link: LinkClass, s: Sample) -> float:
    return _root(lambda gbps: model(replace(link, bandwidth_gbps=gbps), s), s.time_us)


def _reduction(model: Model, link: LinkClass, samples: Sequence[Sample]) -> float:
    """Returns the median of the reduction speeds that fit the samples, raised until the reduction takes at most
    half of any sample's time; infinite if most samples are as fast as without a reduction."""
    alone = replace(link, latency_us=0.0, bandwidth_gbps=math.inf, bands=(), reduce_gbps=1.0)
    found = []
    for s in samples:
        if model(link, s) < s.time_us:
            found.append(_root(lambda gbps, s=s: model(replace(link, reduce_gbps=gbps), s), s.time_us))  # type: ignore[misc]
        else:
            found.append(math.inf)
    return max(statistics.median_high(found), *(2 * model(alone, s) / s.time_us for s in samples))


def _solve(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Returns the step (x, y) for which a x + b y is closest to the errors, for rows (a, b, error, weight)."""
    aa = sum(a * a * w for a, _, _, w in rows)
    ab = sum(a * b * w for a, b, _, w in rows)
    bb = sum(b * b * w for _, b, _, w in rows)
    ae = sum(a * e * w for a, _, e, w in rows)
    be = sum(b * e * w for _, b, e, w in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # latency and bandwidth cannot be separated: all to bandwidth
        return 0.0, be / bb if bb else 0.0
    return (ae * bb - be * ab) / determinant, (be * aa - ae * ab) / determinant


def _root(time_of: Callable[[float], float], measured_us: float) -> float:
    """Returns the GB/s at which the model, which gets faster with them, takes the measured time; between 1e-6 and
    1e6."""
    low, high = math.log(1e-6), math.log(1e6)
    for _ in range(60):
        middle = (low + high) / 2
        if time_of(math.exp(middle)) > measured_us:
            low = middle
        else:
            high = middle
    return math.exp(high)
