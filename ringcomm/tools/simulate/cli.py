"""`ringcomm simulate`: predicts collectives and training steps on clusters."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ringcomm.errors import InvalidArgumentError
from ringcomm.terminal import Progress, columns, folded
from ringcomm.tools.bench.options import parse_count, parse_size, positive, size_text, sizes_between
from ringcomm.tools.simulate import (
    COLLECTIVES,
    ELEMENT_BYTES,
    WIRES,
    Cluster,
    Prediction,
    algorithms,
    in_order,
    predict,
    winner,
)
from ringcomm.tools.simulate.calibrate import calibrate
from ringcomm.tools.simulate.presets import PRESETS, preset

_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
_GIVEN = ("latency_us", "bandwidth_gbps", "overhead_us", "reduce_gbps")


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns: its exit status, 0. Raises: InvalidArgumentError: from the simulator."""
    a = _parser().parse_args(list(argv))
    sizes = _sizes(a)
    cluster = _cluster(a)
    print(f"# {cluster.hosts} hosts x {cluster.ranks_per_host} ranks")
    for what, source in cluster.sources.items():
        if cluster.hosts > 1 or what == "inside":
            print(folded(f"# {what}: {source}"))
    document: dict[str, Any] = {"cluster": asdict(cluster), "collectives": [], "steps": []}
    if a.model_parameters is not None:
        document["steps"] = _steps(a, cluster)
    else:
        for collective in COLLECTIVES if "all" in a.collective else a.collective:
            document["collectives"] += [asdict(each) for each in _collective(a, cluster, collective, sizes)]
    if a.json:
        with open(a.json, "w", encoding="utf-8") as file:
            json.dump(_plain(document), file, indent=1)
            file.write("\n")
        print(f"# wrote {a.json}")
    return 0


def _plain(value: Any) -> Any:
    """Returns a value that JSON can represent: null for a number that is not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the cluster ---------------------------------------------------------------------------------------------------


_FAR_OFF = 0.5  # relative to the measured time


def _report_in(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"simulate: cannot read {path} as a report: {error}; write one with `ringcomm bench -J {path}`"
        ) from error


def _cluster(a: argparse.Namespace) -> Cluster:
    cluster = preset(a.preset, a.hosts, a.ranks_per_host)
    for path, hosts in a.calibrate:
        with Progress(f"calibrate by {path}"):
            found = calibrate(_report_in(path), cluster, hosts=hosts)
        worst = max(found.deviations, key=lambda each: abs(each.relative))
        said = (
            f"# {path}: links {'between' if found.between else 'inside'} hosts from {len(found.deviations)} "
            f"measurements; the worst, {worst.collective} of {worst.nbytes} bytes, is off by "
            f"{100 * worst.relative:+.0f} %"
        )
        print(folded(said))
        if abs(worst.relative) > _FAR_OFF:
            print(folded("# the model does not fit this report: measure on a quiet machine, with more iterations (-n)"))
        sources = {**cluster.sources, "between" if found.between else "inside": f"as measured in {path}"}
        cluster = replace(found.cluster, hosts=a.hosts, ranks_per_host=a.ranks_per_host, sources=sources)
    given: dict[str, Any] = {name: getattr(a, name) for name in _GIVEN if getattr(a, name) is not None}
    if given:
        said = ", ".join(f"{name} {value:g}" for name, value in given.items())
        if "bandwidth_gbps" in given:
            given["bands"] = ()
        sources = {**cluster.sources, "between": f"{cluster.sources['between']}; but as given {said}"}
        cluster = replace(cluster, between=replace(cluster.between, **given), own_between={}, sources=sources)
    return replace(
        cluster,
        shared_nic=cluster.shared_nic if a.shared_nic is None else a.shared_nic,
        wire=a.wire,
        slow_hosts=dict(a.slow_host),
        stragglers=dict(a.straggler),
        slow_ranks=dict(a.slow_rank),
    )


# ---- collectives ---------------------------------------------------------------------------------------------------


def _collective(a: argparse.Namespace, cluster: Cluster, collective: str, sizes: Sequence[int]) -> list[Prediction]:
    names = algorithms(collective, cluster) if a.algorithm == "all" else (a.algorithm,)
    equal = cluster.without_differences()
    more = "" if cluster.equal else f"{'x equal':>9}"
    marked = "; * is the fastest that is not flat, within 1 %" if len(names) > 1 else ""
    print("\n" + folded(f"# {collective}, {a.dtype}{marked}"))
    titles = f"{'size (B)':>12} {'algorithm':<12} {'time (us)':>12} {'algbw':>8} {'busbw':>8}"
    parts = f" {'latency':>11} {'bandwidth':>11} {'reduce':>11} {'host sends (B)':>15}"
    narrow = columns() < len(titles + parts + more)
    print(titles + ("" if narrow else parts) + more)
    found: list[Prediction] = []
    winners: list[tuple[int, str]] = []
    for nbytes in sizes:
        with Progress(f"simulate {collective} of {nbytes} bytes"):
            some = [predict(collective, nbytes, cluster, name, a.dtype, root_host=a.root_host) for name in names]
        usual = winners[-1][1] if winners else in_order(collective, cluster)
        best = winner({each.algorithm: each for each in some}, usual)
        if not winners or winners[-1][1] != best:
            winners.append((nbytes, best))
        for each in some:
            cost = ""
            if more:
                alike = predict(collective, nbytes, equal, each.algorithm, a.dtype, root_host=a.root_host)
                cost = f"{each.time_us / alike.time_us:>9.2f}" if alike.time_us else f"{'-':>9}"
            print(_line(each, len(some) > 1 and each.algorithm == best, narrow) + cost)
        found += some
    if len(names) > 1:
        print(folded("# fastest: " + ", ".join(f"{name} from {size_text(nbytes)}" for nbytes, name in winners)))
    return found


def _sizes(a: argparse.Namespace) -> tuple[int, ...]:
    lowest = min(1 << 10, a.maxbytes or 1 << 10) if a.minbytes is None else a.minbytes
    largest = max(lowest, 1 << 30) if a.maxbytes is None else a.maxbytes
    if largest < max(1, lowest):
        raise InvalidArgumentError(
            f"simulate: got -b {size_text(lowest)} and -e {size_text(largest)}, expected sizes above 0, the smallest "
            "first; exchange them"
        )
    return sizes_between(max(1, lowest), largest, 0, max(2, a.stepfactor))


def _line(p: Prediction, best: bool, narrow: bool) -> str:
    """Returns one line of the table; a narrow one is without the parts of the time."""
    front = (
        f"{p.nbytes:>12} {p.algorithm + ('*' if best else ''):<12} {p.time_us:>12.1f} {p.algbw_gbps:>8.2f} "
        f"{p.busbw_gbps:>8.2f}"
    )
    if narrow:
        return front
    parts = (p.latency_us, p.bandwidth_us, p.reduce_us)
    return front + "".join(f" {part:>11.1f}" for part in parts) + f" {p.between_bytes:>15}"


# ---- training ------------------------------------------------------------------------------------------------------


def _steps(a: argparse.Namespace, cluster: Cluster) -> list[dict[str, Any]]:
    from ringcomm.tools.simulate.training import forward_us, step

    passes_us = forward_us(a.model_parameters, a.tokens, a.tflops)
    algorithm = "auto" if a.algorithm == "all" else a.algorithm
    said = (
        f"# a step of {a.model_parameters:,} parameters in {a.layers} layers, {a.microbatches} micro-batches of "
        f"{a.tokens} tokens a rank, {a.tflops:g} TFLOP/s, parameters {a.dtype}, gradients {a.reduce_dtype}, "
        f"algorithm {algorithm}"
    )
    print("\n" + folded(said))
    print(f"{'stage':>5} {'step (ms)':>10} {'compute':>10} {'exposed':>10} {'all comm.':>10} {'efficiency':>10}")
    found = []
    for stage in range(4) if a.stage is None else (a.stage,):
        with Progress(f"simulate a step of stage {stage}"):
            each = step(
                a.model_parameters,
                cluster,
                stage=stage,
                layers=a.layers,
                forward_us=passes_us,
                microbatches=a.microbatches,
                param_dtype=a.dtype,
                reduce_dtype=a.reduce_dtype,
                overlap=not a.no_overlap,
                algorithm=algorithm,
            )
        times = (each.time_us, each.compute_us, each.exposed_us, each.communication_us)
        print(f"{stage:>5} " + " ".join(f"{us / 1e3:>10.2f}" for us in times) + f" {each.efficiency:>10.1%}")
        found.append({"stage": stage, **asdict(each), "exposed_us": each.exposed_us, "efficiency": each.efficiency})
    return found


# ---- words ---------------------------------------------------------------------------------------------------------


def _numbered(text: str, what: str) -> tuple[int, float]:
    """Parses `3:0.5`, or a time, `17:2000us` or `17:2ms`."""
    index, _, value = text.partition(":")
    scale = 1.0
    if what == "time":
        unit = next((unit for unit in ("us", "ms", "s") if value.endswith(unit)), "")
        value, scale = value.removesuffix(unit), _UNITS[unit or "us"]
    try:
        number, figure = int(index), float(value) * scale
    except ValueError:
        number, figure = -1, -1.0
    if number < 0 or not math.isfinite(figure) or figure < 0 or (figure == 0 and what != "time"):
        example = "17:2000us" if what == "time" else "3:0.5"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number and its {what}; pass such as {example}")
    return number, figure


def _report(text: str) -> tuple[str, int | None]:
    """Parses `report.json`, or `report.json:2`."""
    path, colon, hosts = text.rpartition(":")
    return (path, int(hosts)) if colon and hosts.isdigit() and int(hosts) > 0 else (text, None)


def _figure(text: str) -> tuple[int, float]:
    return _numbered(text, "factor")


def _delay(text: str) -> tuple[int, float]:
    return _numbered(text, "time")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "ringcomm simulate",
        description="Predicts how long collectives or training steps take on a cluster, by running the library's own "
        "schedules through a model of its links. Times in us, bandwidths in GB/s, as nccl-tests counts.",
        epilog="What is modelled, and what not: docs/simulate.md.",
    )
    g = p.add_argument_group("the cluster")
    g.add_argument("--hosts", type=positive, default=2, metavar="N", help="(2)")
    g.add_argument(
        "--ranks-per-host", "--gpus-per-host", type=positive, default=8, metavar="N", help="(8)", dest="ranks_per_host"
    )
    g.add_argument("--preset", choices=PRESETS, default="h100", metavar="NAME", help=f"{', '.join(PRESETS)} (h100)")
    g.add_argument(
        "--calibrate", type=_report, action="append", default=[], metavar="FILE[:HOSTS]",
        help="a report of ringcomm bench -J, for the links inside a host or between hosts; may be repeated for the "
        "other. HOSTS: number of hosts in the report, if they all have one name",
    )  # fmt: skip
    for name in _GIVEN:
        g.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help="of the links between hosts")
    g.add_argument("--shared-nic", action=argparse.BooleanOptionalAction, help="whether a host's ranks share its link")
    g.add_argument("--wire", choices=WIRES, metavar="NAME",
                   help=f"element type of floats between hosts in reductions: {', '.join(WIRES)}")  # fmt: skip
    g = p.add_argument_group("hosts and ranks that differ")
    g.add_argument("--slow-host", type=_figure, action="append", default=[], metavar="HOST:SHARE",
                   help="the share of its bandwidth that a host's link has left, such as 3:0.5")  # fmt: skip
    g.add_argument("--straggler", type=_delay, action="append", default=[], metavar="RANK:TIME",
                   help="how much later a rank begins the call, such as 17:2000us")  # fmt: skip
    g.add_argument("--slow-rank", type=_figure, action="append", default=[], metavar="RANK:FACTOR",
                   help="factor on a rank's own work, such as 17:3")  # fmt: skip
    g = p.add_argument_group("collectives")
    g.add_argument("--collective", nargs="+", choices=[*COLLECTIVES, "all"], default=["all_reduce"], metavar="NAME",
                   help=f"{', '.join(COLLECTIVES)}, all (all_reduce)")  # fmt: skip
    g.add_argument("--algorithm", default="auto", metavar="NAME",
                   help="ring, butterfly, direct; for comparison flat_ring, flat_direct, which no communicator uses; "
                   "on one host ring, direct, oneshot; auto: what a communicator chooses; best; all")  # fmt: skip
    g.add_argument("-b", "--minbytes", type=parse_size, metavar="SIZE", help="smallest message (1K)")
    g.add_argument("-e", "--maxbytes", type=parse_size, metavar="SIZE", help="largest message (1G)")
    g.add_argument("-f", "--stepfactor", type=positive, default=4, metavar="N", help="multiply a size (4)")
    g.add_argument("-d", "--dtype", choices=ELEMENT_BYTES, default="bfloat16", metavar="NAME", help="(bfloat16)")
    g.add_argument("--root-host", type=int, default=0, metavar="N", help="host of a broadcast's root (0)")
    g.add_argument("-J", "--json", metavar="FILE", help="write all figures as JSON")
    g = p.add_argument_group("a training step instead")
    g.add_argument("--model-parameters", type=parse_count, metavar="N", help="such as 7B or 7e9")
    g.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (all four)")
    g.add_argument("--layers", type=positive, default=32, metavar="N", help="number of equal layers (32)")
    g.add_argument("--tokens", type=positive, default=4096, metavar="N", help="tokens of a rank's micro-batch (4096)")
    g.add_argument("--tflops", type=float, default=400.0, metavar="X", help="TFLOP/s that a rank reaches (400)")
    g.add_argument("--microbatches", type=positive, default=1, metavar="N", help="micro-batches of a step (1)")
    g.add_argument("--reduce-dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(float32)")
    g.add_argument("--no-overlap", action="store_true", help="wait for every collective")
    return p
