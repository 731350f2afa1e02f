"""gpu.md: gpu.json as tables, and how far its numbers are from what was aimed at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.document import LABEL, Document
from benchmarks.run import size_text

Row = dict[str, Any]


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def line(row: Row) -> str:
    """One row, for people who watch."""
    peer = f", NCCL {row['nccl_us']:.1f} us" if row["nccl_us"] else ""
    wrong = f", {row['wrong']} WRONG" if row["wrong"] else ""
    return (
        f"{row['ranks']} ranks {row['op']} {row['dtype']} {size_text(row['nbytes'])} {row['algorithm']}: "
        f"{row['us']:.1f} us, {row['moved_gbps']:.0f} GB/s moved{peer}{wrong}"
    )


def targets(document: dict[str, Any]) -> list[str]:
    """What was aimed at, and what came of it."""
    rows, copy = list(document.get("collectives", {}).values()), copy_gbps(document)
    if not copy:
        return ["| everything | a share of copy | the copy was not measured |"]

    def fraction(text: str, least: float, wanted: Callable[[Row], bool]) -> str:
        found = [row["moved_gbps"] / copy for row in rows if wanted(row)]
        return f"| {text} | at least {least:.0%} of copy | {' '.join(f'{f:.0%}' for f in found) or 'not measured'} |"

    def large(row: Row) -> bool:
        return row["ranks"] == 4 and row["nbytes"] == 256 << 20

    lines = [
        fraction(
            f"direct all_reduce, N = 4, 256 MiB, {dtype}",
            0.85,
            lambda r, d=dtype: large(r) and r["op"] == "all_reduce" and r["algorithm"] == "auto" and r["dtype"] == d,
        )
        for dtype in ("float32", "bfloat16")
    ]
    lines += [
        fraction(f"{op}, N = 4, 256 MiB", 0.85, lambda r, o=op: large(r) and r["op"] == o and r["algorithm"] == "auto")
        for op in ("reduce_scatter", "all_gather")
    ]
    lines += [
        fraction(
            f"ring {op}, N = 4, 256 MiB", 0.8, lambda r, o=op: large(r) and r["op"] == o and r["algorithm"] == "ring"
        )
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    for ranks in (2, 4):
        pairs = [row for row in rows if row["ranks"] == ranks and row["nccl_us"]]
        slower = [f"{row['op']} {size_text(row['nbytes'])}" for row in pairs if row["nccl_over_ours"] < 1]
        said = (f"{len(pairs) - len(slower)} of {len(pairs)} sizes" if pairs else "NCCL did not run") + (
            f"; slower: {', '.join(slower)}" if slower else ""
        )
        lines.append(f"| not slower than NCCL, N = {ranks} | every size | {said} |")
    plain = [row for row in rows if row["op"] == "all_reduce" and row["algorithm"] == "auto" and row["ranks"] == 2]
    small = [row["us_graph"] for row in plain if row["nbytes"] <= 16 << 10 and row["us_graph"]]
    lines.append(
        f"| up to 16 KiB in a graph, N = 2 | at most 6 us | {f'{max(small):.1f} us' if small else 'not measured'} |"
    )
    for row in document.get("extras", {}).get("packing", []):
        got = f"{row['pack_gbps'] / copy:.0%}, {row['ours_over_foreach']:.2f}x"
        lines.append(f"| pack + cast + scale to {row['to']} | 90% of copy, 1.5x of torch._foreach_copy_ | {got} |")
    return lines


def copy_gbps(document: dict[str, Any]) -> float:
    """What a plain copy moves, by torch or else by the probe; 0 where neither came to it."""
    extras, probe = document.get("extras", {}), document.get("probe", {})
    return float(extras.get("copy_gbps") or probe.get("copy_gbps") or 0)


def headline(document: dict[str, Any]) -> list[str]:
    """Microseconds of an all_reduce by size, each way that ranks meet beside the others."""
    rows = [row for row in document.get("collectives", {}).values() if row["op"] == "all_reduce"]
    rows = [row for row in rows if row["dtype"] == "float32" and row["algorithm"].split()[0] == "auto"]
    ways = {"auto": "known", "auto apart": "apart", "auto staged": "staged"}
    lines = [f"| N | S | {' | '.join(ways.values())} | NCCL |", "|---|---|" + "---|" * (len(ways) + 1)]
    for ranks, nbytes in sorted({(row["ranks"], row["nbytes"]) for row in rows}):
        here = {row["algorithm"]: row for row in rows if (row["ranks"], row["nbytes"]) == (ranks, nbytes)}
        times = [number(here[way]["us"]) if way in here else "" for way in ways]
        peer = next((number(row["nccl_us"]) for row in here.values() if row["nccl_us"]), "")
        lines.append(f"| {ranks} | {size_text(nbytes)} | {' | '.join(times)} | {peer} |")
    return lines


def collectives(document: dict[str, Any]) -> list[str]:
    """Every row."""
    copy, rows = copy_gbps(document), document.get("collectives", {}).values()
    lines = [
        "| N | op | type | S | algorithm | us stream | us graph | algbw | busbw | moved | of copy | NCCL us | ratio |",
        "|" + "---|" * 13,
    ]
    for row in sorted(rows, key=lambda row: (row["ranks"], row["op"], row["dtype"], row["algorithm"], row["nbytes"])):
        share = f"{row['moved_gbps'] / copy:.0%}" if copy else ""
        cells = [
            *(str(row["ranks"]), row["op"], row["dtype"], size_text(row["nbytes"]), row["algorithm"]),
            *(number(row["us_stream"]), number(row["us_graph"]), number(row["algbw_gbps"]), number(row["busbw_gbps"])),
            *(number(row["moved_gbps"], 0), share, number(row["nccl_us"]), number(row["nccl_over_ours"], 2)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def outcomes(document: dict[str, Any]) -> list[str]:
    """How many cells and tests ended how, and each that failed."""
    lines = []
    for part in ("smoke", "sanitizer", "tests", "cells"):
        said = document.get(part, {})
        failed = {name: text for name, text in said.items() if text.startswith("FAIL")}
        skipped = sum(text.startswith("SKIP") for text in said.values())
        passed = sum(text.startswith(("PASS", "ok")) for text in said.values())
        if said:
            lines.append(f"* {part}: {passed} of {len(said)} pass, {skipped} left out")
        lines += [f"  * `{name}`: {text}" for name, text in failed.items()]
    lines += [f"* failed: {name}: {text}" for name, text in document.get("failed", {}).items()]
    return lines


def pairs(part: dict[str, Any]) -> list[str]:
    return [f"| {name} | {value} |" for name, value in part.items()]


def markdown(document: dict[str, Any]) -> str:
    """The document as tables."""
    extras = document.get("extras", {})
    blocks = extras.get("one_block_busbw_gbps", {})
    copy = copy_gbps(document)
    lines = [
        f"# {LABEL}",
        "",
        "One thread drives all ranks; no byte crosses a link between GPUs. Rates are GB/s, times microseconds.",
        f"A plain copy moves {f'{copy:,.0f} GB/s, read and written' if copy else 'an unknown rate'}. NCCL "
        f"{extras.get('nccl', 'was not measured')}.",
        "Bus bandwidth of two ranks with one block each: "
        f"{', '.join(f'{name} {rate:.1f}' for name, rate in blocks.items()) or 'not measured'}.",
        "The host's time for a call: "
        f"{', '.join(f'{name} {us:.1f}' for name, us in extras.get('host_us', {}).items()) or 'not measured'}.",
        "",
        *("| stage | |", "|---|---|", *pairs(document.get("stages", {})), ""),
        *("| fact | |", "|---|---|", *pairs(document.get("facts", {})), ""),
        *("| probe | |", "|---|---|", *pairs(document.get("probe", {})), ""),
        *("## What failed", "", *outcomes(document), ""),
        *("## all_reduce, float32", "", *headline(document), ""),
        *("## What was aimed at", "", "| | | reached |", "|---|---|---|", *targets(document), ""),
        *("## Every row", "", *collectives(document)),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path) -> None:
    """gpu.md beside gpu.json."""
    path.with_suffix(".md").write_text(markdown(Document(path).read()))
