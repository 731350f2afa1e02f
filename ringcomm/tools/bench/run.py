"""
One rank of the benchmark: for every line of the table it times the calls, checks them, and sends the numbers to rank 0.

A turn is a measurement of nccl-tests: a barrier, then `iters` consecutive calls with shifting buffers; the time is
divided by the number of calls and averaged over the ranks, and the median turn counts. With a peer or the limit, the
targets alternate (A B A B, reversed in every second round) in the same processes and on the same buffers, and ratios
are taken within a round.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch

from ringcomm import _C
from ringcomm.tools.bench import check, clock, report
from ringcomm.tools.bench.cases import (
    COLLECTIVE,
    MAX_VIEWS,
    Call,
    Case,
    Target,
    comm_call,
    copy_call,
    copy_of,
    dist_call,
    view,
)
from ringcomm.tools.bench.options import DTYPES, REDUCTIONS, Options

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator
    from ringcomm.tools.bench.clock import Clock

HALVES = ("out_of_place", "in_place")
MAX_ITERS = 10_000
COLD = 5  # the first warm-up of a run takes this many times --warmup-ms: until every rank has a core to itself
PEER_PATIENCE = 10  # a peer's turn may last this many times --round-ms; after that it makes fewer calls than -n


@dataclass
class Runner:
    """One target on one half of one line: its calls at shifting positions, and their times."""

    target: str
    is_ours: bool
    half: str
    calls: list[Call]
    clock: Clock
    iters: int = 0
    rounds: list[torch.Tensor] = field(default_factory=list)  # seconds per call on this rank

    def loop(self, stamped: bool) -> torch.Tensor:
        """Runs `iters` calls; returns the seconds of each, or of all as one entry."""
        calls = islice(cycle(self.calls), self.iters)
        if stamped:
            return self.clock.each(calls)
        return torch.tensor([self.clock.total(calls) / self.iters], dtype=torch.float64)


class Bench:
    """The state that one rank keeps during the whole run."""

    def __init__(self, comm: Communicator, options: Options) -> None:
        self.comm, self.options = comm, options
        self.rank, self.world_size = comm.rank, comm.world_size
        self.clock = clock.Clock(comm)
        self.groups = _process_groups(comm, options)
        if options.level == "dist":
            self.main: Target = partial(dist_call, self.groups["ringcomm"])
            self.checked = self.main
        else:
            self.main = partial(comm_call, comm, options.algorithm, options.agg)
            # One call each, because in place a group would reduce twice.
            self.checked = partial(comm_call, comm, options.algorithm, 1)
        self.others: list[tuple[str, Target]] = []
        if options.peer:
            self.others.append((options.peer, partial(dist_call, self.groups[options.peer])))
        if options.limit:
            self.others.append(("copy", copy_call))
        self.devices: list[report.Device] = []
        self.send, self.recv = (self._allocate(max(options.sizes) + options.unalign * 8 + 64) for _ in range(2))
        self.is_warm = False

    def _allocate(self, nbytes: int) -> torch.Tensor:
        x = (
            self.comm.empty(nbytes, dtype=torch.uint8)
            if self.options.registered
            else torch.empty(nbytes, dtype=torch.uint8, device=clock.place_of(self.comm))
        )
        return x.zero_()  # writes every page, so that pages do not all map to the kernel's one zero page

    def everyone(self, values: torch.Tensor) -> torch.Tensor:
        """Returns one row of float64 per rank."""
        rows = self.comm.exchange(values.double().contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float64).view(self.world_size, -1)

    def most(self, value: float) -> float:
        return float(self.everyone(torch.tensor([value], dtype=torch.float64)).max())

    def views(self, case: Case, in_place: bool, limit: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (input, output) at up to ``limit`` different positions of the buffers."""
        shifts = max(1, min(limit, max(self.options.sizes) // case.nbytes)) if case.nbytes else 1
        starts = [self.options.unalign + k * case.nbytes // case.dtype.itemsize for k in range(shifts)]
        return [view(case, self.send, self.recv, start, in_place) for start in starts]

    def runners(self, case: Case) -> Iterator[Runner]:
        """Yields every (target, half) that exists; leaves out a peer that fails to run a case."""
        in_place_alone = case.collective.name in ("all_reduce", "broadcast", "reduce")
        for name, target in [("ringcomm", self.main), *self.others]:
            is_ours = target is self.main  # a peer may have the same name
            for half in HALVES:
                in_place = half == "in_place"
                if in_place and not case.collective.in_place:
                    continue
                if name == self.options.peer and not is_ours and in_place != in_place_alone:
                    continue
                placed = copy_of(case) if target is copy_call else case
                views = self.views(placed, in_place, 1 if self.options.same_buffer else MAX_VIEWS)
                calls = [call for x, y in views if (call := target(case, x, y, in_place)) is not None]
                if calls:
                    runner = Runner(name, is_ours, half, calls, self.clock)
                    if self._warm_up(runner):
                        yield runner

    def _warm_up(self, runner: Runner) -> bool:
        """Runs the untimed calls, and from the fastest batch of them sets the number of timed ones. Returns False if a
        peer refuses the case."""
        options = self.options
        try:
            runner.calls[0]()
            clock.synchronize(self.comm)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if runner.is_ours:
                raise
            if self.rank == 0:
                print(f"# {runner.target}: {str(error).splitlines()[0]}", flush=True)
            return False
        fitting = options.round_ms * 1e-3 / self._seconds_when_warm(runner)
        iters = options.iters or max(20, min(MAX_ITERS, math.ceil(fitting)))
        runner.iters = iters if runner.is_ours else max(1, min(iters, int(fitting * PEER_PATIENCE)))
        return True

    def _seconds_when_warm(self, runner: Runner) -> float:
        """Makes calls, -w of them or for --warmup-ms; returns the slowest rank's time of a call in the fastest batch.

        Every batch doubles, so that the last one fills half of the time, and all ranks make the same calls.
        """
        warmup = self.options.warmup
        enough = 0.0 if warmup is not None else self.options.warmup_ms * 1e-3 * (1 if self.is_warm else COLD)
        runner.iters, spent, fastest = max(1, warmup or 1), 0.0, math.inf
        while True:
            self.comm.barrier()
            seconds = max(self.most(float(runner.loop(False))), 1e-7)
            spent, fastest = spent + seconds * runner.iters, min(fastest, seconds)
            if spent >= enough:
                self.is_warm = True
                return fastest
            runner.iters *= 2

    def measure(self, runners: list[Runner]) -> None:
        for turn in range(self.options.rounds):
            for runner in runners if turn % 2 == 0 else reversed(runners):
                self.comm.barrier()
                runner.rounds.append(runner.loop(self.options.stamped))

    def wrong(self, case: Case, in_place: bool) -> int | None:
        """Returns #wrong of all ranks, or None if it is not checked."""
        if not self.options.check or case.collective.name == "barrier":
            return None
        x, y = self.views(case, in_place)[0]
        call = self.checked(case, x, y, in_place)
        assert call is not None  # as it was measured
        total = 0
        for seed in range(99, 99 + self.options.check):
            check.prepare(case, x, y, check.integers(case, self.rank, seed))
            self.comm.barrier()
            call()
            total += check.wrong_elements(case, x if in_place and not case.collective.in_parts else y, seed)
        return int(self.everyone(torch.tensor([float(total)])).sum())

    def canonical(self, case: Case) -> tuple[int, int] | None:
        """Returns (elements, wrong ones) of all ranks for sums of random floats against the canonical tree; None:
        not applicable."""
        ordered = case.collective.reduces and case.op == "sum" and case.dtype.is_floating_point
        if not self.options.check or not ordered or not case.count or self.options.algorithm == "ring":
            return None
        in_place = self.options.level == "dist" and case.collective.name != "reduce_scatter"
        x, y = self.views(case, in_place)[0]
        call = self.checked(case, x, y, in_place)
        assert call is not None  # as it was measured
        check.prepare(case, x, y, check.floats(case, self.rank, 1))
        self.comm.barrier()
        call()
        first = self.rank * case.count if case.collective.name == "reduce_scatter" else 0
        wrong = check.count_wrong(y, check.canonical_sum(case, 1), first) if case.has_output else 0
        sums = self.everyone(torch.tensor([float(len(y) if case.has_output else 0), float(wrong)])).sum(0)
        return int(sums[0]), int(sums[1])

    def row(self, case: Case) -> report.Row:
        runners = list(self.runners(case))
        self.measure(runners)
        row = report.Row(case)
        for runner in runners:
            half = self._figures(case, runner)
            if runner.is_ours:
                half.wrong = self.wrong(case, runner.half == "in_place")
                row.halves[runner.half] = half
            elif runner.target == "copy":
                row.copy_gbps = half.algbw
            else:
                row.peer = half
        row.canonical = self.canonical(case)
        return row

    def _figures(self, case: Case, runner: Runner) -> report.Half:
        agg = self.options.agg if runner.is_ours else 1
        local = torch.stack(runner.rounds) / agg * 1e6
        ranks = self.everyone(local.flatten()).view(self.world_size, *local.shape)
        means = ranks.mean(2)  # by rank and turn
        turns = (means[0], means.mean(0), means.amin(0), means.amax(0))[self.options.average]
        slowest = ranks.max(0).values  # a call has ended when its slowest rank has
        stats = report.stats_of(slowest.flatten()[self.options.skip :].tolist()) if self.options.stamped else None
        mean_us, calls = statistics.median(turns.tolist()), runner.iters * len(runner.rounds)
        algbw = case.nbytes / mean_us / 1e3
        busbw = algbw * case.collective.factor(self.world_size)
        rounds = slowest.median(1).values.tolist()
        return report.Half(runner.target, runner.half, mean_us, calls, rounds, stats, algbw, busbw)

    def cases(self, name: str) -> Iterator[Case]:
        """Yields the cases in nccl-tests' order: type, operator, root, size."""
        options, collective = self.options, COLLECTIVE[name]
        reductions = options.reductions if collective.reduces else ("none",)
        roots: tuple[int, ...] = (-1,)
        if collective.rooted:
            roots = tuple(range(self.world_size)) if options.roots == (-1,) else options.roots
        barrier = name == "barrier"
        for type_name in options.dtypes[:1] if barrier else options.dtypes:
            dtype = getattr(torch, DTYPES[type_name])
            for reduction in reductions:
                op = REDUCTIONS.get(reduction, "none")
                if op in _C.REDUCE_OPS and not _C.supports(_C.DTYPES[DTYPES[type_name]], _C.REDUCE_OPS[op]):
                    continue
                for root in roots:
                    for nbytes in options.sizes[:1] if barrier else options.sizes:
                        count = collective.count(nbytes, dtype.itemsize, self.world_size)
                        label = "none" if barrier else type_name
                        yield Case(collective, dtype, label, reduction, op, root, count, self.rank, self.world_size)

    def run(self) -> list[report.Table]:
        tables: list[report.Table] = []
        done = 0
        while done < self.options.cycles or self.options.cycles == 0:
            tables += [self._table(name) for name in self.options.collectives]
            done += 1
        return tables

    def _table(self, name: str) -> report.Table:
        table = report.Table(name, self.world_size, self.devices)
        say: Callable[[str], None] = (lambda text: print(text, flush=True)) if self.rank == 0 else (lambda text: None)
        say(report.header(name, self.options, self.devices))
        for case in self.cases(name):
            table.rows.append(self.row(case))
            say(report.line(table.rows[-1], self.options))
        say(report.footer(table, self.options))
        return table


def _process_groups(comm: Communicator, options: Options) -> dict[str, Any]:
    """Makes the torch.distributed groups that the run needs, by backend."""
    names = [n for n in (("ringcomm" if options.level == "dist" else None), options.peer) if n]
    if not names:
        return {}
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=options.timeout_s)
    store = None
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, comm.world_size, True, limit, wait_for_workers=False)
    port = comm.exchange(str(store.port if store else "").encode())[0]
    store = store or dist.TCPStore("127.0.0.1", int(port), comm.world_size, False, limit)
    dist.init_process_group(names[0], store=store, rank=comm.rank, world_size=comm.world_size, timeout=limit)
    return {name: dist.group.WORLD if i == 0 else dist.new_group(backend=name) for i, name in enumerate(names)}


def _devices(comm: Communicator) -> list[report.Device]:
    """Returns the device of every rank, with the number of ranks on it."""
    mine = {
        "rank": comm.rank, "pid": os.getpid(), "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)), "name": clock.device_name(comm),
    }  # fmt: skip
    rows = [json.loads(each) for each in comm.exchange(json.dumps([mine, clock.device_key(comm)]).encode())]
    places = [(each["host"], key) for each, key in rows]
    return [{**each, "ranks": places.count((each["host"], key)) if each["name"] != "cpu" else 1} for each, key in rows]


def run_rank(comm: Communicator, options: Options) -> list[report.Table]:
    """
    Runs the benchmark on one rank; a collective call.

    Returns: one table per collective and cycle, the same on every rank. Raises: the collectives' errors;
             InvalidArgumentError for a root that is not a rank.
    """
    from ringcomm.errors import InvalidArgumentError

    if options.roots != (-1,) and options.roots[0] >= comm.world_size:
        raise InvalidArgumentError(
            f"bench: rank {comm.rank} got root {options.roots[0]}, expected one of 0 to {comm.world_size - 1}; "
            "pass a rank with -r"
        )
    if "sendrecv" in options.collectives and comm.world_size == 1:
        raise InvalidArgumentError("bench: rank 0 got sendrecv in a world of 1, expected at least 2 ranks; pass -g 2")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank has one core, and the check must not take cores from other ranks
    bench = Bench(comm, replace(options, ranks=comm.world_size))
    try:
        bench.devices = _devices(comm)
        return bench.run()
    finally:
        torch.set_num_threads(threads)
        if bench.groups:
            torch.distributed.destroy_process_group()
