"""gpu.json and gpu.md: the rows, and how far they are from what was aimed at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def size_text(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


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
    rows: list[Row] = document["collectives"]
    copy = document["copy_gbps"]

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
    small = [row["us_graph"] for row in rows if row["ranks"] == 2 and row["nbytes"] <= 16 << 10 and row["us_graph"]]
    lines.append(
        f"| up to 16 KiB in a graph, N = 2 | at most 6 us | {f'{max(small):.1f} us' if small else 'not measured'} |"
    )
    for row in document["packing"]:
        got = f"{row['pack_gbps'] / copy:.0%}, {row['ours_over_foreach']:.2f}x"
        lines.append(f"| pack + cast + scale to {row['to']} | 90% of copy, 1.5x of torch._foreach_copy_ | {got} |")
    return lines


def markdown(document: dict[str, Any]) -> str:
    """The document as tables."""
    copy, rows = document["copy_gbps"], document["collectives"]
    trip = document["flag_round_trip"]
    lines = [
        f"# {document['label']}",
        "",
        f"{document['device']}, {document['multiprocessors']} multiprocessors; ringcomm {document['ringcomm']} "
        f"({document['build'].get('cuda', '')}), torch {document['torch']}, NCCL {document['nccl'] or 'not measured'}. "
        f"A plain copy moves {copy:,.0f} GB/s, read and written. One thread drives all ranks; no byte crosses a link "
        "between GPUs. Rates are GB/s.",
        "",
        "| aimed at | | reached |",
        "|---|---|---|",
        *targets(document),
        "",
        f"Flag round trip between two blocks: {trip['ns']:,.0f} ns."
        if "ns" in trip
        else f"Flag round trip: {trip['reason']}.",
        "Bus bandwidth of two ranks with one block each, GB/s: "
        + ", ".join(f"{name} {rate:.1f}" for name, rate in document["one_block_busbw_gbps"].items())
        + ".",
        "",
        "| N | op | type | S | algorithm | us stream | us graph | algbw | busbw | moved | of copy | NCCL us | ratio |",
        "|" + "---|" * 13,
    ]
    for row in sorted(rows, key=lambda row: (row["ranks"], row["op"], row["dtype"], row["algorithm"], row["nbytes"])):
        cells = [
            *(str(row["ranks"]), row["op"], row["dtype"], size_text(row["nbytes"]), row["algorithm"]),
            *(number(row["us_stream"]), number(row["us_graph"]), number(row["algbw_gbps"]), number(row["busbw_gbps"])),
            *(number(row["moved_gbps"], 0), f"{row['moved_gbps'] / copy:.0%}"),
            *(number(row["nccl_us"]), number(row["nccl_over_ours"], 2)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nNCCL with {ranks} ranks: {reason}." for ranks, reason in document["nccl_failed"].items()]
    if document["left_out"]:
        lines.append(f"\n{len(document['left_out'])} cells were left out: the time was up.")
    return "\n".join(lines) + "\n"


def write(document: dict[str, Any], folder: Path) -> None:
    (folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "gpu.md").write_text(markdown(document))
    print(f"wrote {folder / 'gpu.json'} and gpu.md", flush=True)
