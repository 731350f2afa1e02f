"""
What the CUDA engine reaches with several ranks on one GPU, beside NCCL in the same run.

    python -m benchmarks.gpu.bench [--only headline] [--seconds 200] [--resume] [--out FILE]
    RINGCOMM_NCCL=/path/to/libnccl.so.2 python -m benchmarks.gpu.bench      # NCCL 2.30.3 or newer

Writes gpu.json after every row, and gpu.md. All of it is labelled "N ranks sharing one GPU (L2/HBM)": no byte crosses a
link between GPUs. One thread drives all ranks. Buffers are rotated, so that N * S bytes of inputs come from memory, not
from L2. `bytes` counts what the algorithm must move through memory, read and written; its rate over that of a plain
copy, measured in the same run, is the fraction that is reached.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ringcomm
from benchmarks.gpu import report
from benchmarks.gpu.document import BEGUN, LOST, Document, default_path
from benchmarks.gpu.machine import first_line
from benchmarks.gpu.nccl_peer import DTYPES as NCCL_DTYPES
from benchmarks.gpu.nccl_peer import Peer
from benchmarks.gpu.one_thread import (
    EMULATED,
    PLACE,
    Communicator,
    communicators,
    context_is_lost,
    synchronize,
    together,
)
from benchmarks.gpu.smoke import MOST_FAILURES, met
from benchmarks.run import size_text

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64", "int8", "int32")
}
SIZES = [1 << 10, 1 << 12] if EMULATED else [1 << n for n in range(10, 29, 2)]
LARGEST = SIZES[-1]
ROUNDS = 1 if EMULATED else 5
MOST_GRAPH_CALLS = 20
CALL_S = 60.0 if EMULATED else 5.0
CELL_S = 300.0 if EMULATED else 20.0  # the process ends itself: the GPU holds a call that its limit should have ended
EXTRAS_S = 15.0  # for what is measured after the cells


@dataclass(frozen=True)
class Cell:
    """One row: an op of one size by one algorithm."""

    op: str
    dtype: str
    world_size: int
    nbytes: int  # of a rank's whole message: S
    algorithm: str = "auto"
    how: str = "known"  # the ranks meet: see smoke.py

    def __str__(self) -> str:
        return f"{self.world_size} ranks {self.op} {self.dtype} {size_text(self.nbytes)} {self.way}"

    @property
    def way(self) -> str:
        return self.algorithm if self.how == "known" else f"{self.algorithm} {self.how}"

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


WORLDS = (2,) if EMULATED else (4, 2, 8)


def headline() -> Iterator[Cell]:
    """What is asked first."""
    for how in ("known", "apart", "staged"):
        for n in WORLDS[:2]:
            for nbytes in SIZES:
                yield Cell("all_reduce", "float32", n, nbytes, how=how)


def cells() -> Iterator[Cell]:
    """The most wanted first: what the time does not suffice for is left out from the end."""
    yield from headline()
    for n in WORLDS:
        for op in ("reduce_scatter", "all_gather", "broadcast"):
            for nbytes in SIZES[::2] if n == 8 else SIZES:
                yield Cell(op, "float32", n, nbytes)
        for nbytes in SIZES[1::2]:
            yield Cell("all_reduce", "bfloat16", n, nbytes)
            yield Cell("all_reduce", "float16", n, nbytes)
            yield Cell("all_reduce", "float32", n, nbytes, "ring")
            yield Cell("all_reduce", "float32", n, nbytes, "direct", how="apart")
            yield Cell("all_gather", "float32", n, nbytes, "copy_engine")
        for nbytes in SIZES[:5]:
            yield Cell("all_reduce", "float32", n, nbytes, "oneshot", how="apart")
        for op in ("reduce_scatter", "all_gather"):
            yield Cell(op, "float32", n, LARGEST, "ring")
    for n in WORLDS[2:]:
        for nbytes in SIZES:
            yield Cell("all_reduce", "float32", n, nbytes)


def types() -> Iterator[Cell]:
    """How fast each type is added up."""
    for n in WORLDS[:2]:
        for dtype in DTYPES:
            for nbytes in SIZES[-3::2]:
                yield Cell("all_reduce", dtype, n, nbytes)


def profiled() -> Iterator[Cell]:
    """For a profiler: a large sum and a hop of the ring."""
    yield Cell("all_reduce", "float32", WORLDS[0], LARGEST, "direct")
    yield Cell("all_reduce", "float32", WORLDS[0], min(LARGEST, 1 << 24), "ring")


CHOICES = {"all": cells, "headline": headline, "types": types}


# ---- one cell --------------------------------------------------------------------------------------------------------


class Buffers:
    """Inputs and outputs of all ranks, in as many sets as it takes to get past the L2 cache."""

    def __init__(self, cell: Cell, l2_bytes: int) -> None:
        n, dtype = cell.world_size, DTYPES[cell.dtype]
        count = cell.nbytes // dtype.itemsize
        part = count // n
        given, taken = {"reduce_scatter": (part * n, part), "all_gather": (part, part * n)}.get(cell.op, (count, count))
        self.sets = max(1, min(16, -(-4 * l2_bytes // (n * cell.nbytes))))
        pattern = torch.arange(given, device=PLACE).remainder_(3 if dtype.itemsize == 1 else 13)
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
    synchronize(comms)
    inputs, outputs, wrong = buffers.inputs[0], buffers.outputs[0], 0
    total = torch.stack([x.float() for x in inputs]).sum(0) if "reduce" in cell.op else None
    for rank, got in enumerate(outputs):
        if cell.op == "broadcast":
            want = got if rank == 0 else inputs[0]
        elif cell.op == "all_gather":
            want = torch.cat(inputs)
        else:
            assert total is not None
            want = total if cell.op == "all_reduce" else total.chunk(cell.world_size)[rank]
        wrong += int((got.float() != want.float()).sum())
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
            synchronize(comms)
            for into, as_graph in ((times.nccl_stream, False), (times.nccl_graph, True)):
                if (us := peer.time_us(**request, graph=as_graph)) is not None:
                    into.append(us)
    synchronize(comms)  # a call that did not run has no time
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
        "algorithm": cell.way,
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
    os.environ["RINGCOMM_CUDA_LAYOUT"] = "channels=1"
    found = {}
    try:
        with met("apart"), communicators(2, CALL_S) as comms:
            for algorithm in ("ring", "direct"):
                cell = Cell("all_reduce", "float32", 2, SIZES[-1] if EMULATED else 64 << 20, algorithm, "apart")
                found[algorithm] = measure(comms, cell, None, 0)["busbw_gbps"]
    finally:
        del os.environ["RINGCOMM_CUDA_LAYOUT"]
    return found


def host_us() -> dict[str, float]:
    """Microseconds of the host for a call of a single rank, which launches one kernel, and for an addition of torch."""
    calls = 2 if EMULATED else 50
    x, y = (torch.ones(256, device=PLACE) for _ in range(2))
    works: list[Any] = []
    with communicators(1, CALL_S) as (comm,):
        steps: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: comm.all_reduce(x, out=y),
            "all_reduce, async_op=True": lambda: works.append(comm.all_reduce(x, out=y, async_op=True)),
            "wait": lambda: works.pop().wait(),
            "torch.Tensor.add_": lambda: x.add_(0),
        }
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(max(3, ROUNDS)):
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(calls):
                    step()
                rounds[name].append((time.perf_counter() - start) / calls * 1e6)
                synchronize([comm])
    return {name: statistics.median(found) for name, found in rounds.items()}


# ---- all of it -------------------------------------------------------------------------------------------------------


class Bench:
    """Runs cells until the time is up, and keeps what came of each; a failed one costs the others nothing."""

    def __init__(self, document: Document, seconds: float) -> None:
        self.document = document
        self.deadline = time.monotonic() + seconds
        properties = None if EMULATED else torch.cuda.get_device_properties(0)
        self.l2_bytes = properties.L2_cache_size if properties else 1 << 12
        self.multiprocessors = properties.multi_processor_count if properties else 4
        self.failed = self.left_out = 0
        known = document.part("cells")
        self.failures = Counter((c.how, c.algorithm) for c in cells() if known.get(str(c), "").startswith("FAIL"))

    def run(self, wanted: Iterable[Cell]) -> None:
        groups: dict[tuple[int, str], list[Cell]] = {}
        for cell in wanted:
            groups.setdefault((cell.world_size, cell.how), []).append(cell)
        for (world_size, how), group in groups.items():
            peer = self.start_peer(world_size) if how == "known" else None
            while group:
                group = group[self.run_group(group, peer) :]
                self.stop_if_lost()
            if peer is not None:
                self.end_peer(peer, world_size)

    def run_group(self, group: list[Cell], peer: Peer | None) -> int:
        """Cells of one set of communicators, until one fails; how many have an outcome."""
        ended, cell = 0, group[0]
        try:
            with met(cell.how), communicators(cell.world_size, CALL_S) as comms:
                for cell in group:
                    ended += 1
                    if time.monotonic() > self.deadline:
                        self.left_out += 1
                        continue
                    if self.failures[cell.how, cell.algorithm] >= MOST_FAILURES:
                        said = f"SKIP: {cell.how} {cell.algorithm} has failed {MOST_FAILURES} times"
                        self.document.put("cells", {str(cell): said})
                        continue
                    self.document.put("cells", {str(cell): BEGUN})
                    faulthandler.dump_traceback_later(CELL_S, exit=True)
                    beside = peer if cell.algorithm == "auto" and cell.dtype in NCCL_DTYPES else None
                    row = measure(comms, cell, beside, self.l2_bytes)
                    row["most_blocks_of_a_rank"] = int(comms[0].describe()["channels"])
                    self.document.put("collectives", {str(cell): row})
                    self.document.put("cells", {str(cell): f"FAIL: {row['wrong']} WRONG" if row["wrong"] else "ok"})
                    self.failed += bool(row["wrong"])
                    print(report.line(row), flush=True)
        except Exception as error:
            for each in [cell] if ended else group:  # without communicators there is nothing to run any on
                self.failed += 1
                self.failures[each.how, each.algorithm] += 1
                self.document.put("cells", {str(each): f"FAIL: {first_line(error)}"})
                print(f"FAIL {each}: {first_line(error)}", flush=True)
            return ended or len(group)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return ended

    def stop_if_lost(self) -> None:
        if self.failed and context_is_lost():
            print("the CUDA context of this process is lost", flush=True)
            sys.exit(LOST)

    def extra(self, name: str, measure: Callable[[], Any]) -> None:
        """Something else, once; what goes wrong with it is noted."""
        if name in self.document.part("extras"):
            return
        try:
            self.document.put("extras", {name: measure()})
        except Exception as error:
            self.failed += 1
            self.document.put("failed", {name: first_line(error)})
            print(f"FAIL {name}: {first_line(error)}", flush=True)
            self.stop_if_lost()

    def start_peer(self, world_size: int) -> Peer | None:
        library = os.environ.get("RINGCOMM_NCCL", "")
        if EMULATED or not library or f"NCCL with {world_size} ranks" in self.document.part("failed"):
            return None
        peer = Peer(library, world_size, self.multiprocessors, limit_s=15)
        if peer.version:
            self.document.put("extras", {"nccl": peer.version})
        return peer

    def end_peer(self, peer: Peer, world_size: int) -> None:
        if peer.reason:
            self.document.put("failed", {f"NCCL with {world_size} ranks": peer.reason})
            print(f"NCCL with {world_size} ranks: {peer.reason}", flush=True)
        peer.close()


def run_profiled() -> None:
    """One call of each cell and one to warm up, for a profiler."""
    for cell in profiled():
        with communicators(cell.world_size, CALL_S) as comms:
            buffers = Buffers(cell, 0)
            for i in range(2):
                run_once(comms, cell, buffers, i)
            synchronize(comms)
        print(f"ran {cell}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_path(), help="gpu.json, wherever it is; gpu.md beside it")
    parser.add_argument("--only", choices=tuple(CHOICES), default="all", help="some of the cells")
    parser.add_argument("--seconds", type=float, default=200, help="cells that begin after this are left out")
    parser.add_argument("--resume", action="store_true", help="leave out what has an outcome in the file")
    parser.add_argument("--profile", action="store_true", help="run two calls for a profiler, and time nothing")
    a = parser.parse_args()
    if reason := ringcomm._C.why_no_cuda():
        print(f"bench.py needs a CUDA device: {reason}", file=sys.stderr)
        return 2
    if a.profile:
        run_profiled()
        return 0
    document = Document(a.out)
    if not a.resume:
        document.clear("cells", "collectives", "extras", "failed")
    bench = Bench(document, a.seconds - (EXTRAS_S if a.only == "all" else 0))
    document.put(
        "facts", {"ringcomm": ringcomm.__version__, "build": dict(ringcomm.build_info()), "emulated": EMULATED}
    )
    bench.extra("copy_gbps", partial(copy_gbps, bench.l2_bytes))
    known = document.part("cells")
    bench.run(cell for cell in dict.fromkeys(CHOICES[a.only]()) if str(cell) not in known)
    if a.only == "all":
        bench.extra("one_block_busbw_gbps", one_block)
        bench.extra("packing", packing)
        bench.extra("host_us", host_us)
    if bench.left_out:
        print(f"{bench.left_out} cells were left out: the time was up", flush=True)
    document.put("left out", {a.only: bench.left_out})
    document.end("cells")
    report.write(a.out)
    return int(bench.failed > 0 or not document.part("collectives"))


if __name__ == "__main__":
    sys.exit(main())
