"""
What the CUDA engine reaches with several ranks on one GPU, beside NCCL in the same run.

    python benchmarks/gpu/bench.py [--seconds 200] [--out benchmarks/results]
    RINGCOMM_NCCL=/path/to/libnccl.so.2 python benchmarks/gpu/bench.py      # NCCL 2.30.3 or newer

Writes gpu.json and gpu.md. All of it is labelled "N ranks sharing one GPU (L2/HBM)": no byte crosses a link between
GPUs. One thread drives all ranks. Buffers are rotated, so that N * S bytes of inputs come from memory, not from L2.
`bytes` counts what the algorithm must move through memory, read and written; its rate over that of a plain copy,
measured in the same run, is the fraction that is left to gain.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
from nccl_peer import Peer
from one_thread import EMULATED, PLACE, Communicator, communicators, synchronize, together

import ringcomm

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = [1 << 10, 1 << 12] if EMULATED else [1 << n for n in range(10, 29, 2)]
LARGEST = SIZES[-1]
ROUNDS = 1 if EMULATED else 5
MOST_GRAPH_CALLS = 20


@dataclass
class Cell:
    """One row: an op of one size by one algorithm."""

    op: str
    dtype: str
    world_size: int
    nbytes: int  # of a rank's whole message: S
    algorithm: str = "auto"
    apart: bool = False  # ranks meet on flags, as on several devices, although one launch holds all of them

    def bytes_moved(self) -> float:
        """Read and written by all ranks, if nothing is found in a cache."""
        n, s = self.world_size, self.nbytes
        user = {"all_reduce": 2 * n * s, "reduce_scatter": n * s + s, "all_gather": s + n * s, "broadcast": n * s}[
            self.op
        ]
        hops = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}[self.op]
        if self.algorithm == "ring":
            return user + hops * 2 * (n - 1) * s  # into and out of the slots
        if self.algorithm == "oneshot":
            return user + 2 * n * (n - 1) * s * 128 / 120  # packets
        return user

    def busbw_factor(self) -> float:
        n = self.world_size
        return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(self.op, (n - 1) / n)


@dataclass
class Timings:
    """Microseconds of one call, by round."""

    stream: list[float] = field(default_factory=list)
    graph: list[float] = field(default_factory=list)
    nccl_stream: list[float] = field(default_factory=list)
    nccl_graph: list[float] = field(default_factory=list)


def cells() -> Iterator[Cell]:
    """The most wanted first: what the time does not suffice for is left out from the end."""
    worlds = (2,) if EMULATED else (4, 2, 8)
    for n in worlds:
        for nbytes in SIZES:
            yield Cell("all_reduce", "float32", n, nbytes)
    for n in worlds:
        for op in ("reduce_scatter", "all_gather", "broadcast"):
            for nbytes in SIZES[::2] if n == 8 else SIZES:
                yield Cell(op, "float32", n, nbytes)
        for nbytes in SIZES[1::2]:
            yield Cell("all_reduce", "bfloat16", n, nbytes)
            yield Cell("all_reduce", "float32", n, nbytes, "ring")
            yield Cell("all_reduce", "float32", n, nbytes, "direct", apart=True)
        for nbytes in SIZES[:5]:
            yield Cell("all_reduce", "float32", n, nbytes, "oneshot", apart=True)
        for op in ("reduce_scatter", "all_gather"):
            yield Cell(op, "float32", n, LARGEST, "ring")


# ---- one cell --------------------------------------------------------------------------------------------------------


class Buffers:
    """Inputs and outputs of all ranks, in as many sets as it takes to get past the L2 cache."""

    def __init__(self, cell: Cell, l2_bytes: int) -> None:
        n, dtype = cell.world_size, DTYPES[cell.dtype]
        count = cell.nbytes // dtype.itemsize
        part = count // n
        given, taken = {"reduce_scatter": (part * n, part), "all_gather": (part, part * n)}.get(cell.op, (count, count))
        self.sets = max(1, min(16, -(-4 * l2_bytes // (n * cell.nbytes))))
        pattern = torch.arange(given, device=PLACE).remainder_(13)
        self.inputs = [[(pattern + rank).to(dtype) for rank in range(n)] for _ in range(self.sets)]
        self.outputs = [[torch.zeros(taken, dtype=dtype, device=PLACE) for _ in range(n)] for _ in range(self.sets)]


def run_once(comms: list[Communicator], cell: Cell, buffers: Buffers, i: int) -> None:
    inputs, outputs = buffers.inputs[i % buffers.sets], buffers.outputs[i % buffers.sets]

    def call(comm: Communicator) -> Any:
        given, taken, options = inputs[comm.rank], outputs[comm.rank], {"algorithm": cell.algorithm, "async_op": True}
        if cell.op == "broadcast":
            return comm.broadcast(given if comm.rank == 0 else taken, 0, **options)
        return getattr(comm, cell.op)(given, out=taken, **options)

    together(comms, call)


def wrong_elements(comms: list[Communicator], cell: Cell, buffers: Buffers) -> int:
    """Of the first set of outputs, after a call. Small whole numbers: sums are exact."""
    run_once(comms, cell, buffers, 0)
    synchronize()
    inputs, outputs, wrong = buffers.inputs[0], buffers.outputs[0], 0
    total = torch.stack(inputs).sum(0) if "reduce" in cell.op else None
    for rank, got in enumerate(outputs):
        if cell.op == "broadcast":
            want = got if rank == 0 else inputs[0]
        elif cell.op == "all_gather":
            want = torch.cat(inputs)
        else:
            assert total is not None
            want = total if cell.op == "all_reduce" else total.chunk(cell.world_size)[rank]
        wrong += int((got != want).sum())
    return wrong


def elapsed_us(work: Callable[[], Any], calls: int) -> float:
    """Microseconds of one of the `calls` that `work` makes."""
    if EMULATED:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / calls * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def calls_for(us: float, sets: int) -> int:
    """Calls back to back: some milliseconds, each set at least once."""
    return 2 if EMULATED else max(sets, 3, min(200, int(4000 / max(us, 1))))


def measure(comms: list[Communicator], cell: Cell, peer: Peer | None, l2_bytes: int) -> dict[str, Any]:
    buffers, times = Buffers(cell, l2_bytes), Timings()
    wrong = wrong_elements(comms, cell, buffers)

    def work(calls: int) -> None:
        for i in range(calls):
            run_once(comms, cell, buffers, i)

    work(2)
    calls = calls_for(elapsed_us(lambda: work(2), 2), buffers.sets)
    graph_calls = min(calls, max(buffers.sets, MOST_GRAPH_CALLS))
    graph = None if EMULATED else captured(lambda: work(graph_calls))
    request = {"op": cell.op, "dtype": cell.dtype, "nbytes": cell.nbytes, "sets": buffers.sets, "calls": graph_calls}
    for _ in range(ROUNDS):  # in turns, so that a drift of the clocks meets both
        times.stream.append(elapsed_us(lambda: work(calls), calls))
        if graph is not None:
            times.graph.append(elapsed_us(lambda: [graph.replay() for _ in range(3)], 3 * graph_calls))
        if peer is not None:
            synchronize()
            for into, as_graph in ((times.nccl_stream, False), (times.nccl_graph, True)):
                if (us := peer.time_us(**request, graph=as_graph)) is not None:
                    into.append(us)
    return row_of(cell, times, wrong, buffers.sets)


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    """A graph of what `work` enqueues, replayed once; None, and why on stderr, if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        synchronize()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        synchronize()
    except RuntimeError as error:
        print(f"not captured into a graph: {error}", file=sys.stderr, flush=True)
        return None
    return graph


def row_of(cell: Cell, times: Timings, wrong: int, sets: int) -> dict[str, Any]:
    by_stream, by_graph = median(times.stream), median(times.graph)
    best = min(us for us in (by_stream, by_graph) if us is not None)
    peers = [us for us in (median(times.nccl_stream), median(times.nccl_graph)) if us is not None]
    rate = cell.nbytes / best / 1e3
    return {
        "op": cell.op,
        "dtype": cell.dtype,
        "ranks": cell.world_size,
        "nbytes": cell.nbytes,
        "algorithm": cell.algorithm + (" apart" if cell.apart else ""),
        "sets": sets,
        "wrong": wrong,
        "us": best,
        "us_stream": by_stream,
        "us_graph": by_graph,
        "us_by_round": {"stream": times.stream, "graph": times.graph},
        "algbw_gbps": rate,
        "busbw_gbps": rate * cell.busbw_factor(),
        "moved_gbps": cell.bytes_moved() / best / 1e3,
        "nccl_us": min(peers) if peers else None,
        "nccl_us_by_round": {"stream": times.nccl_stream, "graph": times.nccl_graph},
        "nccl_over_ours": min(peers) / best if peers else None,
    }


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


# ---- what is not a collective ----------------------------------------------------------------------------------------


def best_rate(work: Callable[[], Any], nbytes: float) -> float:
    """GB/s, the median of some rounds."""
    calls = 2 if EMULATED else 10
    work()
    rounds = [elapsed_us(lambda: [work() for _ in range(calls)], calls) for _ in range(max(3, ROUNDS))]
    return nbytes / statistics.median(rounds) / 1e3


def copy_gbps(l2_bytes: int) -> float:
    """Read and written by a device's own copy of much more than its L2."""
    nbytes = 1 << 20 if EMULATED else max(1 << 30, 8 * l2_bytes)
    source = torch.ones(nbytes, dtype=torch.uint8, device=PLACE)
    target = torch.empty_like(source)
    return best_rate(lambda: target.copy_(source), 2 * nbytes)


def packing() -> list[dict[str, Any]]:
    """pack + cast + scale of 150 tensors, beside what torch has for it."""
    scale = 1 / 8
    count = 3000 if EMULATED else 64 << 20
    sizes = [1 + count * (i % 7) // 450 for i in range(150)]
    tensors = [torch.randn(size, device=PLACE) for size in sizes]
    found = []
    with communicators(1) as (comm,):
        for target in (torch.bfloat16, torch.float32):
            bucket = torch.empty(sum(sizes), dtype=target, device=PLACE)
            views = list(bucket.split(sizes))
            nbytes = sum(sizes) * (4 + target.itemsize)

            def with_torch(views: list[torch.Tensor] = views) -> None:
                torch._foreach_copy_(views, tensors)
                torch._foreach_mul_(views, scale)

            ours = best_rate(lambda b=bucket: comm.pack(tensors, b, scale), nbytes)  # type: ignore[misc]
            back = best_rate(lambda b=bucket: comm.unpack(b, tensors, 1.0), nbytes)  # type: ignore[misc]
            theirs = best_rate(with_torch, nbytes)
            name = str(target).removeprefix("torch.")
            found.append(
                {"from": "float32", "to": name, "tensors": len(sizes), "nbytes": nbytes, "pack_gbps": ours}
                | {"unpack_gbps": back, "foreach_gbps": theirs, "ours_over_foreach": ours / theirs}
            )
    return found


def one_block() -> dict[str, float]:
    """Bus bandwidth of two ranks with one block each: what every channel of a link must give."""
    os.environ.update(RINGCOMM_CUDA_LAYOUT="channels=1", RINGCOMM_CUDA_APART="1")
    found = {}
    try:
        with communicators(2) as comms:
            for algorithm in ("ring", "direct"):
                cell = Cell("all_reduce", "float32", 2, SIZES[-1] if EMULATED else 64 << 20, algorithm, apart=True)
                found[algorithm] = measure(comms, cell, None, 0)["busbw_gbps"]
    finally:
        del os.environ["RINGCOMM_CUDA_LAYOUT"], os.environ["RINGCOMM_CUDA_APART"]
    return found


def flag_round_trip() -> dict[str, Any]:
    """Nanoseconds of a flag from one block to another and back."""
    if EMULATED:
        return {"reason": "not measured on an emulated device"}
    program = ROOT / "build" / "ping_pong"
    major, minor = torch.cuda.get_device_capability()
    nvcc = os.environ.get("RINGCOMM_NVCC") or "nvcc"
    build = [nvcc, "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", f"-arch=sm_{major}{minor}", "-o", str(program)]
    try:
        program.parent.mkdir(exist_ok=True)
        subprocess.run([*build, str(Path(__file__).with_name("ping_pong.cu"))], check=True, timeout=60)
        done = subprocess.run([str(program)], check=True, timeout=30, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"reason": f"{type(error).__name__}: {error}"}
    middle, least, most = (float(word) for word in done.stdout.split())
    return {"ns": middle, "least_ns": least, "most_ns": most}


def facts() -> dict[str, Any]:
    """What was measured on what."""
    found: dict[str, Any] = {
        "ringcomm": ringcomm.__version__,
        "build": dict(ringcomm.build_info()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if EMULATED:
        return found | {"device": "an emulated one", "multiprocessors": 4, "l2_bytes": 1 << 12}
    device = torch.cuda.get_device_properties(0)
    return found | {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
    }


# ---- all of it -------------------------------------------------------------------------------------------------------


class Bench:
    """Runs cells until the time is up; keeps the communicators and the peer of the last number of ranks."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.facts = facts()
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.peer_reasons: dict[int, str] = {}
        self.peer_version = ""

    def run(self) -> None:
        groups: dict[tuple[int, bool], list[Cell]] = {}
        for cell in cells():
            groups.setdefault((cell.world_size, cell.apart), []).append(cell)
        for (world_size, apart), group in groups.items():
            if apart:
                os.environ["RINGCOMM_CUDA_APART"] = "1"
            try:
                self.run_group(world_size, apart, group)
            finally:
                os.environ.pop("RINGCOMM_CUDA_APART", None)

    def run_group(self, world_size: int, apart: bool, group: list[Cell]) -> None:
        peer = None if apart else self.start_peer(world_size)
        try:
            with communicators(world_size) as comms:
                for cell in group:
                    if time.monotonic() > self.deadline:
                        self.left_out.append(str(cell))
                        continue
                    beside = peer if cell.algorithm == "auto" else None
                    row = measure(comms, cell, beside, self.facts["l2_bytes"])
                    self.rows.append(row | {"most_blocks_of_a_rank": int(comms[0].describe()["channels"])})
                    print(report.line(self.rows[-1]), flush=True)
        finally:
            if peer is not None:
                self.peer_reasons[world_size] = peer.reason
                peer.close()

    def start_peer(self, world_size: int) -> Peer | None:
        library = os.environ.get("RINGCOMM_NCCL", "")
        if EMULATED or not library:
            return None
        peer = Peer(library, world_size, self.facts["multiprocessors"], limit_s=30)
        self.peer_version = peer.version or self.peer_version
        if peer.reason:
            print(f"NCCL with {world_size} ranks: {peer.reason}", flush=True)
        return peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for gpu.json and gpu.md"
    )
    parser.add_argument("--seconds", type=float, default=200, help="cells that begin after this are left out")
    a = parser.parse_args()
    if reason := ringcomm._C.why_no_cuda():
        print(f"bench.py needs a CUDA device: {reason}", file=sys.stderr)
        return 2
    bench = Bench(a.seconds)
    document: dict[str, Any] = {
        "label": "N ranks sharing one GPU (L2/HBM)",
        "emulated": EMULATED,
        **bench.facts,
        "copy_gbps": copy_gbps(bench.facts["l2_bytes"]),
        "flag_round_trip": flag_round_trip(),
        "one_block_busbw_gbps": one_block(),
        "packing": packing(),
    }
    try:
        bench.run()
    finally:  # what was measured until something broke
        document |= {"collectives": bench.rows, "left_out": bench.left_out}
        document |= {
            "nccl": bench.peer_version,
            "nccl_failed": {n: text for n, text in bench.peer_reasons.items() if text},
        }
        a.out.mkdir(parents=True, exist_ok=True)
        report.write(document, a.out)
    wrong = sum(row["wrong"] for row in bench.rows)
    return 1 if wrong or not bench.rows else 0


if __name__ == "__main__":
    sys.exit(main())
