"""The flags of `ringcomm bench`: nccl-tests' flags, with the same names and defaults, and a few additional ones."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ringcomm import _C

COLLECTIVES = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "alltoall", "gather", "scatter", "sendrecv", "barrier",
)  # fmt: skip
REDUCTIONS = {  # nccl-tests' name: our name
    "mulsum" if op == "premul_sum" else op: op for op in sorted(_C.REDUCE_OPS, key=_C.REDUCE_OPS.__getitem__)
}
ALL_REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum")  # the meaning of `-o all`
ALGORITHM_HAS = {  # --algorithm: the collectives that support it
    "ring": ("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    "direct": ("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    "oneshot": ("all_reduce",),
    "copy_engine": ("all_gather", "alltoall"),
}
PLOT_SUFFIXES = (".png", ".pdf", ".svg", ".jpg")
DEFAULT_BYTES = 32 << 20
DTYPES = {  # nccl-tests' name: torch's name
    "int8": "int8", "uint8": "uint8", "int32": "int32", "int64": "int64", "half": "float16", "float": "float32",
    "double": "float64", "bfloat16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "int16": "int16",
}  # fmt: skip
ALL_DTYPES = tuple(name for name in DTYPES if name != "int16")  # the meaning of `-d all`
_COUNT_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # of a number of parameters

# nccl-tests' flags that have no meaning here: flag -> (long name, the value without effect, the reason or the
# replacement).
REFUSED = {
    "-t": ("--nthreads", "1", "ranks are counted by -g; add --ranks-as threads to run them as threads"),
    "-p": ("--parallel_init", "0", "every rank connects by itself, always in parallel"),
    "-z": ("--blocking", "0", "calls are made back to back, and waited for as their device does"),
    "-y": ("--stream_null", "0", "every rank uses one stream"),
    "-G": ("--cudagraph", "0", "calls are not captured into graphs here"),
    "-C": ("--report_cputime", "0", "the time of the host alone is not reported"),
    "-x": ("--cta_policy", "0", "ringcomm tune chooses the blocks"),
    "-D": ("--device_implementation", "0", "there is no device API; see --algorithm"),
    "-V": ("--device_cta_count", "16", "ringcomm tune chooses the blocks"),
    "-M": ("--memory", "0", "memory is not reported"),
}


@dataclass(frozen=True)
class Options:
    """The options of one run of the benchmark, sent to every rank."""

    collectives: tuple[str, ...]
    reductions: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    step: str
    ranks: int | None
    ranks_as: str
    device: str
    roots: tuple[int, ...]  # (-1,): every rank in turn
    iters: int | None  # in a turn; None: at least 20, and enough to fill `round_ms`
    warmup: int | None  # None: as many as fill `warmup_ms`
    warmup_ms: float
    agg: int
    cycles: int
    check: int
    average: int
    unalign: int
    per_iter: bool
    skip: int
    timestamps: bool
    timeout_s: float
    registered: bool
    level: str
    algorithm: str
    peer: str | None
    limit: bool
    rounds: int
    round_ms: float
    same_buffer: bool
    json: str | None
    plot: str | None
    min_bw: float | None
    args: tuple[str, ...]

    @property
    def stamped(self) -> bool:
        """Whether every call has its own time stamp (which costs about 0.05 us per call)."""
        return self.peer is not None or self.limit or self.per_iter or self.json is not None


def parse_size(text: str) -> int:
    """Parses `8`, `4K`, `1.5M`, `1G` as bytes (powers of 1024, as in nccl-tests)."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KkMmGg]?)(?:i?[Bb])?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes or a number with K, M or G, such as 64K")
    return int(float(match[1]) * 1024 ** " KMG".index(match[2].upper() or " "))


def parse_count(text: str) -> int:
    """Parses a number of parameters, such as 125M, 7B or 7e9."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text, re.IGNORECASE)
    try:
        count = round(float(found[1]) * _COUNT_SCALES[found[2].upper()]) if found else 0
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of parameters; pass one such as 125M or 7e9")
    return count


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0; pass one")
    return int(text)


def size_text(nbytes: int) -> str:
    """Returns a size as `parse_size` reads it, such as 64K; in bytes where no unit divides it."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}"


def sizes_between(low: int, high: int, step: int, factor: int) -> tuple[int, ...]:
    """Returns nccl-tests' scan of sizes: multiplied by `factor` if it is above 1, else increased by `step`."""
    sizes, nbytes = [], low
    while nbytes <= high:
        sizes.append(nbytes)
        following = nbytes * factor if factor > 1 else nbytes + step
        if following <= nbytes:
            break
        nbytes = following
    return tuple(sizes)


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ringcomm bench",
        usage="%(prog)s [COLLECTIVE ...] [-g RANKS] [-b SIZE] [-e SIZE]\n       [-f FACTOR] [-d TYPES] "
        "[--device NAME] [--peer BACKEND]\n       [--limit] [--json FILE.json] [--plot FILE.png] [OPTION ...]",
        description="Bandwidth and latency of the collectives, measured and printed as nccl-tests does.",
        epilog="For example: ringcomm bench all_reduce -g 4 -b 1K -e 64M -f 4 --peer gloo. "
        "Sizes take K, M, G. Exit status 1: a wrong element, or an average bus bandwidth below --min-bw.",
    )  # fmt: skip
    p.add_argument("collective", nargs="*", metavar="COLLECTIVE", help=f"any of: {', '.join(COLLECTIVES)} (all_reduce)")
    _add_scan_flags(p)
    _add_measure_flags(p)
    _add_own_flags(p)
    for short, (long, nothing, _) in REFUSED.items():
        p.add_argument(short, long, dest="refused_" + short[1:], default=nothing, help=argparse.SUPPRESS)
    return p


def _add_scan_flags(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what to run")
    g.add_argument(
        "-g", "--ranks", "--ngpus", type=int, metavar="N", help="spawn N ranks (2); under torchrun its world"
    )
    g.add_argument("--ranks-as", choices=["processes", "threads"], default="processes")
    g.add_argument("--device", default="cpu", metavar="NAME", help="cpu; cuda: round robin; cuda:0: all on it (cpu)")
    g.add_argument("-b", "--minbytes", type=parse_size, metavar="SIZE", help="smallest size (32M)")
    g.add_argument("-e", "--maxbytes", type=parse_size, metavar="SIZE", help="largest size (32M)")
    g.add_argument("-i", "--stepbytes", type=parse_size, default=1 << 20, metavar="SIZE", help="add to a size (1M)")
    g.add_argument("-f", "--stepfactor", type=int, default=1, metavar="N", help="multiply a size (off)")
    g.add_argument("-o", "--op", action="append", default=[], metavar="NAMES",
                   help=f"reductions ({', '.join(REDUCTIONS)}, all; default sum), or collectives")  # fmt: skip
    g.add_argument("-d", "--datatype", default="float", metavar="NAMES", help=f"{', '.join(DTYPES)}, or all (float)")
    g.add_argument("-r", "--root", default="0", metavar="RANK|all", help="root of the rooted collectives (0)")


def _add_measure_flags(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("how to measure")
    g.add_argument("-n", "--iters", type=int, metavar="N", help="calls in a turn (20, or what fills --round-ms)")
    g.add_argument("-w", "--warmup_iters", type=int, metavar="N", help="calls before it (what fills --warmup-ms)")
    g.add_argument("-m", "--agg_iters", type=int, default=1, metavar="N", help="calls aggregated into one group (1)")
    g.add_argument(
        "-N", "--run_cycles", type=int, default=1, metavar="N", help="runs of the whole table, 0 endless (1)"
    )
    g.add_argument("-c", "--check", type=int, default=1, metavar="N", help="checked calls per size, 0 none (1)")
    g.add_argument(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=1,
        help="time of: 0 rank 0, 1 the ranks' mean, 2 min, 3 max (1)",
    )
    g.add_argument("-u", "--unalign", type=int, default=0, metavar="N", help="first element's index in its buffer (0)")
    g.add_argument(
        "-I", "--per_iter_timing", type=int, choices=range(2), default=0, help="columns i_min i_max i_p99 i_cv%% (0)"
    )
    g.add_argument("-K", "--per_iter_skip", type=int, default=0, metavar="N", help="leading calls left out of -I (0)")
    g.add_argument("-S", "--report_timestamps", type=int, choices=range(2), default=0, help="date on every line (0)")
    g.add_argument(
        "-T", "--timeout", type=float, default=300.0, metavar="S", help="time limit of a call, seconds (300)"
    )
    g.add_argument("-R", "--local_register", choices=["0", "1", "2"], default="0", help="2: as --registered (0)")
    g.add_argument("-J", "--output_file", "--json", dest="json", metavar="FILE", help="write nccl-tests' JSON")


def _add_own_flags(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("not in nccl-tests")
    g.add_argument("--registered", action="store_true", help="buffers from comm.empty, which the peers use in place")
    g.add_argument(
        "--level", choices=["comm", "dist"], default="comm", help="comm.all_reduce or torch.distributed's (comm)"
    )
    g.add_argument("--algorithm", choices=["auto", *ALGORITHM_HAS], default="auto")
    g.add_argument("--peer", metavar="BACKEND", help="a torch.distributed backend (gloo), measured in turns with ours")
    g.add_argument("--limit", action="store_true", help="copy bandwidth of this machine, and the fraction reached")
    g.add_argument("--rounds", type=int, metavar="N", help="turns, of which the median counts (5; 1 with -n; 7 with "
                   "--peer or --limit)")  # fmt: skip
    g.add_argument(
        "--warmup-ms", type=float, default=50.0, metavar="MS", help="time of the calls before it without -w; five "
        "times as long before the first turn (50)"
    )  # fmt: skip
    g.add_argument(
        "--round-ms", type=float, default=10.0, metavar="MS", help="length of a turn where -n is not given (10)"
    )
    g.add_argument("--same-buffer", action="store_true", help="one buffer for all calls, so that caches stay warm")
    g.add_argument("--plot", metavar="FILE.png", help="draw time and bus bandwidth over size")
    g.add_argument("--min-bw", type=float, metavar="GBPS", help="fail below this average bus bandwidth")


def _names(
    parser: argparse.ArgumentParser, text: str, table: Sequence[str], everything: Sequence[str], what: str
) -> list[str]:
    found: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "all":
            found += everything
        elif name in table:
            found.append(name)
        else:
            parser.error(f"{name!r} is not a {what}; choose from {', '.join(table)}, all")
    return list(dict.fromkeys(found))


def _unknown(parser: argparse.ArgumentParser, name: str, positional: Sequence[str]) -> None:
    """Exits with an error that lists the known names, and suggests the closest."""
    bare = name.lower().replace("-", "_")
    plain = {known.replace("_", ""): known for known in (*COLLECTIVES, *REDUCTIONS)}
    close = difflib.get_close_matches(bare.replace("_", ""), plain, 1, 0.75)
    meant = f", did you mean {plain[close[0]]}?" if close else "."
    alone = name in ",".join(positional)
    parser.error(
        f"{name!r} is not a collective{'' if alone else ' or reduction'}{meant} The collectives are: "
        + ", ".join(COLLECTIVES)
        + ("" if alone else f". The reductions are: {', '.join(REDUCTIONS)}, all")
    )


def _split_ops(parser: argparse.ArgumentParser, a: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Splits the values of `-o/--op` into reductions, as in nccl-tests, and collectives: the names do not overlap."""
    spelled = {"all_to_all": "alltoall", "premul_sum": "mulsum"}
    collectives, reductions = [], []
    for name in ",".join([*a.collective, *a.op]).split(","):
        name = spelled.get(name.strip(), name.strip())
        if name in COLLECTIVES:
            collectives.append(name)
        elif name:
            if name not in REDUCTIONS and name != "all":
                _unknown(parser, name, a.collective)
            reductions += _names(parser, name, tuple(REDUCTIONS), ALL_REDUCTIONS, "reduction")
    return list(dict.fromkeys(collectives)) or ["all_reduce"], list(dict.fromkeys(reductions)) or ["sum"]


def _dtypes(parser: argparse.ArgumentParser, text: str) -> list[str]:
    names = {theirs: ours for ours, theirs in DTYPES.items()}
    return _names(
        parser, ",".join(names.get(n.strip(), n) for n in text.split(",")), tuple(DTYPES), ALL_DTYPES, "datatype"
    )


def _refuse(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    for short, (long, nothing, why) in REFUSED.items():
        value = getattr(a, "refused_" + short[1:])
        if value != nothing:
            parser.error(f"{short}/{long} {value} has no meaning here: {why}")
    if a.local_register == "1":
        parser.error(
            "-R 1: private memory cannot be registered; -R 2 or --registered takes memory that the peers share"
        )
    _check_files(parser, a)


def _check_files(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    """Raises for output files that cannot be written, before hours of measurements."""
    if a.json and not a.json.endswith(".json"):
        parser.error(f"-J {a.json}: only the suffix .json is supported")
    if a.plot and not a.plot.lower().endswith(PLOT_SUFFIXES):
        parser.error(f"--plot {a.plot}: expected a name that ends in one of {', '.join(PLOT_SUFFIXES)}")
    if a.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed; pip install 'ringcomm[plot]'")
    for flag, path in (("-J", a.json), ("--plot", a.plot)):
        if not path:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            parser.error(f"{flag} {path}: there is no folder {folder}; create it first")
        refuse_unwritable(parser, flag, path)


def refuse_unwritable(parser: argparse.ArgumentParser, flag: str, path: str) -> None:
    """Exits with an error if a file cannot be made or replaced."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        parser.error(f"{flag} {path}: this cannot be written; name another file")


def _fill_sizes(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    low, high = a.minbytes, a.maxbytes
    a.minbytes = DEFAULT_BYTES if low is None else low
    a.maxbytes = DEFAULT_BYTES if high is None else high
    if a.maxbytes >= a.minbytes:
        return
    if low is None:
        parser.error(f"-e {high} is below the default -b 32M; pass -b too, such as -b {min(high, 1024)}")
    if high is None:
        parser.error(f"-b {low} is above the default -e 32M; pass -e too, such as -e {low}")
    parser.error(f"-e {high} is below -b {low}")


def _check_ranges(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    least = {"iters": 1, "warmup_iters": 0, "agg_iters": 1, "run_cycles": 0, "check": 0, "unalign": 0, "rounds": 1,
             "per_iter_skip": 0, "ranks": 1, "stepfactor": 0}  # fmt: skip
    for name, low in least.items():
        value = getattr(a, name)
        if value is not None and value < low:
            parser.error(f"--{name} is {value}; it must be at least {low}")
    for name in ("timeout", "round_ms", "warmup_ms"):
        if not 0 <= getattr(a, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {getattr(a, name):g}; expected a time from 0 on")
    _fill_sizes(parser, a)
    if a.level == "dist" and (a.agg_iters > 1 or a.algorithm != "auto"):
        parser.error("--level dist goes through torch.distributed, which has neither -m groups nor --algorithm")
    if (a.level == "dist" and a.ranks_as == "threads") or (a.peer and a.ranks_as == "threads"):
        parser.error("torch.distributed has one world per process: --level dist and --peer need --ranks-as processes")
    if a.root != "all" and not a.root.isdigit():
        parser.error(f"-r {a.root} is neither a rank nor 'all'")


def parse_options(argv: Sequence[str]) -> Options:
    """
    Parses options from command-line words.

    Returns: Options. Raises: SystemExit (status 2) with one sentence that names the flag, its value and what to write
             instead.
    """
    parser = build_parser()
    a = parser.parse_args(list(argv))
    _refuse(parser, a)
    _check_ranges(parser, a)
    collectives, reductions = _split_ops(parser, a)
    lacking = [name for name in collectives if name not in ALGORITHM_HAS.get(a.algorithm, COLLECTIVES)]
    if lacking:
        parser.error(
            f"--algorithm {a.algorithm}: {', '.join(lacking)} has only auto; {a.algorithm} is in "
            + ", ".join(ALGORITHM_HAS[a.algorithm])
        )
    compared = a.peer is not None or a.limit
    step = f"{a.stepfactor}(factor)" if a.stepfactor > 1 else f"{a.stepbytes}(bytes)"
    return Options(
        collectives=tuple(collectives), reductions=tuple(reductions), dtypes=tuple(_dtypes(parser, a.datatype)),
        sizes=sizes_between(a.minbytes, a.maxbytes, a.stepbytes, a.stepfactor), step=step,
        ranks=a.ranks, ranks_as=a.ranks_as, device=a.device, roots=(-1,) if a.root == "all" else (int(a.root),),
        iters=a.iters, warmup=a.warmup_iters, warmup_ms=a.warmup_ms, agg=a.agg_iters, cycles=a.run_cycles,
        check=a.check, average=a.average,
        unalign=a.unalign, per_iter=bool(a.per_iter_timing), skip=a.per_iter_skip, timestamps=bool(a.report_timestamps),
        timeout_s=a.timeout, registered=a.registered or a.local_register == "2", level=a.level, algorithm=a.algorithm,
        peer=a.peer, limit=a.limit, rounds=a.rounds or (7 if compared else 1 if a.iters else 5), round_ms=a.round_ms,
        same_buffer=a.same_buffer, json=a.json, plot=a.plot, min_bw=a.min_bw, args=tuple(argv),
    )  # fmt: skip
