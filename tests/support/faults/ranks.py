"""What a rank does in one trial of the fault campaign: it follows the program, checks every value, makes its fault, and
tells what it raised and when."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringcomm
from ringcomm import errors
from tests.support.faults import plan
from tests.support.faults.plan import Call, Step, Trial

START_S = 12.0  # limit of the start, which is not what is tried
ASLEEP_S = 12.0  # a stalled thread sleeps at most as long
SHRINK_S = 3.0  # for the ranks that are alive to come
SHRUNK_CALLS = 3
FEATURES = (5, 64, 300)

Finish = Callable[[], Any]
Tell = Callable[[str, int, dict[str, Any]], None]


class WrongValueError(Exception):
    """A call gave a value that is not the right one."""


class OwnError(Exception):
    """What a rank raises whose fault it is to raise something."""


class Leaves(Exception):
    """Not an error: the way out of a rank that returns early."""


# ---- a collective, over either face ------------------------------------------------------------------------------


def over_ringcomm(comm: Any, call: Call, x: Any, out: Any, async_op: bool) -> Finish:
    """Starts a call of a communicator; what is returned waits and gives the result."""
    reduction = {"op": call.reduce_op} if call.op in plan.REDUCING else {}
    root = {"root": call.root} if call.op in plan.ROOTED else {}
    algorithm = {} if call.algorithm == "auto" else {"algorithm": call.algorithm}
    target = {"out": out} if call.op == "scatter" else {}
    arrays = () if call.op == "barrier" else (x,)
    done = getattr(comm, call.op)(*arrays, **reduction, **root, **algorithm, **target, async_op=async_op)
    return done.wait if isinstance(done, ringcomm.Work) else lambda: done


def over_torch(group: Any, call: Call, x: Any, out: Any, async_op: bool) -> Finish:
    """The same with torch.distributed."""
    members = dist.get_process_group_ranks(group)
    root, parts = members[call.root], None
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[call.reduce_op]
    if call.op == "gather" and dist.get_rank() == root:
        parts = list(out.chunk(len(members)))
    if call.op == "scatter" and x is not None:
        parts = list(x.chunk(len(members)))
    start: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, reduce_op, group, async_op),
        "reduce": lambda: dist.reduce(x, root, reduce_op, group, async_op),
        "reduce_scatter": lambda: dist.reduce_scatter(out, list(x.chunk(len(members))), reduce_op, group, async_op),
        "all_gather": lambda: dist.all_gather(list(out.chunk(len(members))), x, group, async_op),
        "broadcast": lambda: dist.broadcast(x, root, group, async_op),
        "gather": lambda: dist.gather(x, parts, root, group, async_op),
        "scatter": lambda: dist.scatter(out, parts, root, group, async_op),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group, async_op=async_op),
        "barrier": lambda: dist.barrier(group, async_op),
    }
    work = start[call.op]()
    result = x if call.op in ("all_reduce", "reduce", "broadcast") else out

    def finish() -> Any:
        if work is not None:
            work.wait()
        return result

    return finish


def post(group: Any, send: bool, x: torch.Tensor, peer: int) -> Finish:
    """Starts a message to or from a member of a group, of either face."""
    if isinstance(group, ringcomm.Communicator):
        work = (group.isend if send else group.irecv)(x, peer, 3)
    elif send:
        work = dist.isend(x, group=group, group_dst=peer, tag=3)
    else:
        work = dist.irecv(x, group=group, group_src=peer, tag=3)
    return lambda: work.wait()


# ---- training ----------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Three weighted sums of the input's first features, added up; weights start at zero and stay whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, 1, bias=False) for features in FEATURES)
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[:, :features]) for layer, features in zip(self.layers, FEATURES, strict=True))


class Training:
    """A model in training, and what its weights must be."""

    def __init__(self, how: str, group: Any) -> None:
        self.model: nn.Module = Sums()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.weights = [torch.zeros(features) for features in FEATURES]
        if how == "torch's":
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group)
        elif how == "DistributedDataParallel":
            self.model = ringcomm.DistributedDataParallel(self.model, group)
        else:
            self.model, self.optimizer = ringcomm.shard(self.model, self.optimizer, stage=int(how[-1]), comm=group)

    def step(self, rank: int, world_size: int, salt: int) -> None:
        """One step; the weights of the steps before are checked by what the model gives for them."""
        inputs = [plan.values(each, salt, max(FEATURES), "float32") % 2 for each in range(world_size)]
        x = inputs[rank]
        out = self.model(x[None])
        wanted = sum(float(w @ x[: len(w)]) for w in self.weights)
        if abs(out.item() - wanted) > 0.1:
            raise WrongValueError(f"training gave {out.item()}, expected {wanted}")
        (out.sum() * world_size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for w in self.weights:
            w -= torch.stack(inputs).sum(0)[: len(w)]


# ---- a rank ------------------------------------------------------------------------------------------------------


class Rank:
    """One rank of a trial."""

    def __init__(self, trial: Trial, rank: int, tell: Tell, folder: str, others_done: threading.Event) -> None:
        self.trial, self.rank, self.tell, self.folder, self.others_done = trial, rank, tell, folder, others_done
        self.culprit = trial.fault.rank == rank and trial.fault.kind != "none"
        self.groups: list[Any] = []
        self.training: Training | None = None
        self.outcome: dict[str, Any] = {"error": None, "wrong": ""}

    def run(self, store: Any) -> dict[str, Any]:
        """Takes part in the trial; what came of it."""
        try:
            (self.over_ringcomm if self.trial.face == "ringcomm" else self.over_torch)(store)
        except WrongValueError as error:
            self.outcome["wrong"] = str(error)
        except (OwnError, Leaves):
            pass
        except Exception as error:
            if self.outcome["error"] is None:
                self.note(error, -1)
        if self.training is not None:  # torch keeps what a backward pass that failed had left to do until the next one
            torch.ones(1, requires_grad=True).backward()
        self.groups, self.training = [], None
        return self.outcome

    def over_ringcomm(self, store: Any) -> None:
        """The program on communicators."""
        trial = self.trial
        with ringcomm.init(self.rank, trial.world_size, store=store, timeout=START_S) as comm:
            try:
                with contextlib.ExitStack() as stack:
                    made = [comm.subgroup(members) for members in trial.groups[1:]]
                    self.groups = [comm, *(group and stack.enter_context(group) for group in made)]
                    self.train_with(comm)
                    comm.barrier()
                    for group in filter(None, self.groups):
                        group.timeout = trial.limit_s
                    self.follow()
            except errors.RingcommError:
                if not trial.shrinks or self.outcome["error"] is None:
                    raise
                self.shrink(comm)

    def over_torch(self, store: Any) -> None:
        """The program on process groups."""
        trial = self.trial
        dist.init_process_group(
            "ringcomm", store=store, rank=self.rank, world_size=trial.world_size, timeout=timedelta(seconds=START_S)
        )
        try:
            limit = timedelta(seconds=trial.limit_s)
            dist.barrier()
            made = [dist.new_group(list(members), timeout=limit) for members in trial.groups]
            self.groups = [None if g is dist.GroupMember.NON_GROUP_MEMBER else g for g in made]
            self.train_with(self.groups[0])
            dist.barrier()
            self.follow()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def train_with(self, group: Any) -> None:
        """Makes the model, where the trial has one."""
        if self.trial.training:
            self.training = Training(self.trial.training, group)

    # ---- the program ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """All steps, with the fault where it belongs."""
        fault = self.trial.fault
        timer: threading.Timer | None = None
        for at, step in enumerate(self.trial.steps):
            here = self.culprit and at == fault.step
            if self.culprit:
                self.mark(at)
            if here and fault.meanwhile:
                timer = threading.Timer(fault.delay_s, self.act)
                timer.start()
            elif here:
                time.sleep(fault.delay_s)
                self.act()
            try:
                self.make(step, at, fault.calls if here else ())
            except WrongValueError:
                raise
            except Exception as error:
                self.note(error, step.group)
                raise
        if timer is not None:
            timer.join()

    def mark(self, at: int) -> None:
        """Says in a file which step begins, for the case that this rank says nothing more."""
        Path(self.folder, "at").write_text(str(at))

    def note(self, error: Exception, group: int) -> None:
        """Keeps what was raised, and what the next call on the same communicator raises."""
        names = [each.__name__ for each in type(error).__mro__]
        self.outcome["error"] = names[0]
        self.outcome["names"] = names
        self.outcome["time"] = time.monotonic()
        self.outcome["message"] = str(error)
        self.outcome["group"] = group
        if group < 0:
            return
        self.outcome["again"] = "nothing"
        end = self.groups[group]
        try:
            end.barrier() if isinstance(end, ringcomm.Communicator) else dist.barrier(end)
        except errors.RingcommError as again:
            self.outcome["again"] = type(again).__name__

    def make(self, step: Step, at: int, instead: tuple[Call, ...]) -> None:
        """One step, or other calls in its place."""
        group, members = self.groups[step.group], self.trial.groups[step.group]
        if group is None:
            return
        if instead or step.what == "calls":
            self.make_calls(group, members, instead or step.calls, step.mode, at)
        elif step.what == "messages":
            self.swap(group, members, step, at)
        else:
            assert self.training is not None
            self.training.step(self.rank, self.trial.world_size, at)

    def make_calls(self, group: Any, members: tuple[int, ...], calls: tuple[Call, ...], mode: str, at: int) -> None:
        """Collectives, one after the other or in flight together."""
        if mode == "coalesced" and isinstance(group, ringcomm.Communicator):
            with group.coalesce():
                started = [self.start(group, members, call, at + 100 * i, False) for i, call in enumerate(calls)]
        else:
            asynchronous = mode != "sync"
            started = [self.start(group, members, call, at + 100 * i, asynchronous) for i, call in enumerate(calls)]
        for i, (call, finish) in enumerate(zip(calls, started, strict=True)):
            got = finish()
            wanted = plan.expected(call, members, members.index(self.rank), at + 100 * i)
            if wanted is not None and not torch.equal(got.flatten(), wanted):
                raise WrongValueError(f"step {at}: {call} gave {got.flatten()[:5]}, expected {wanted[:5]}")

    def start(self, group: Any, members: tuple[int, ...], call: Call, salt: int, async_op: bool) -> Finish:
        """Starts a collective on its arrays."""
        size, me = len(members), members.index(self.rank)
        x = out = None
        if call.op != "barrier" and (call.op != "scatter" or me == call.root):
            x = plan.values(self.rank, salt, plan.whole_count(call, size), call.dtype)
            if call.visible:
                x = group.empty(x.shape, x.dtype).copy_(x)
        if call.op in ("reduce_scatter", "scatter", "all_to_all", "all_gather", "gather"):
            parts = 1 if call.op in ("reduce_scatter", "scatter") else size
            out = torch.full((parts * call.count,), 77).to(getattr(torch, call.dtype))
        over = over_ringcomm if isinstance(group, ringcomm.Communicator) else over_torch
        return over(group, call, x, out, async_op)

    def swap(self, group: Any, members: tuple[int, ...], step: Step, at: int) -> None:
        """A message to the next member and one from the one before, at the same time or round the ring."""
        me, size = members.index(self.rank), len(members)
        source = (me - 1) % size
        x, got = plan.values(self.rank, at, step.count, "float32"), torch.full((step.count,), 77.0)
        if step.mode == "exchange":
            for finish in (post(group, False, got, source), post(group, True, x, (me + 1) % size)):
                finish()
        else:
            for send in (me == 0, me != 0):
                post(group, send, x if send else got, (me + 1) % size if send else source)()
        if not torch.equal(got, plan.values(members[source], at, step.count, "float32")):
            raise WrongValueError(f"step {at}: a message from rank {members[source]} has other values")

    # ---- faults --------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """What this rank does wrong, unless that is another call."""
        kind = self.trial.fault.kind
        self.tell("fault", self.rank, {"time": time.monotonic()})
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stalled" and self.trial.ranks == "processes":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "stalled":
            self.others_done.wait(ASLEEP_S)
        elif kind == "throws":
            raise OwnError("thrown by the trial")
        elif kind == "leaves":
            self.leave()

    def leave(self) -> None:
        """Ends, or closes everything and returns, at once or when the others are done."""
        if self.trial.fault.way == "ends":
            os._exit(0)
        if self.trial.face == "torch":
            dist.destroy_process_group()
        else:
            for group in filter(None, reversed(self.groups)):
                group.close()
        if self.trial.fault.way == "stays":
            self.others_done.wait(ASLEEP_S)
        raise Leaves

    def shrink(self, comm: Any) -> None:
        """Goes on without the lost ranks; notes who goes on, or what is raised."""
        try:
            with comm.shrink(SHRINK_S) as smaller:
                for i in range(SHRUNK_CALLS):
                    x = smaller.all_reduce(torch.full((1000 * i + 1,), 2.0**self.rank))
                    if not bool((x == x[0]).all()):
                        raise WrongValueError(f"all_reduce after shrink gave {x[:3]}")
                    self.outcome["members"] = [r for r in range(self.trial.world_size) if int(x[0]) >> r & 1]
                    self.outcome["world_size"] = smaller.world_size
                smaller.barrier()
        except errors.RingcommError as error:
            self.outcome["members"] = f"{type(error).__name__}: {error}"


# ---- processes ---------------------------------------------------------------------------------------------------


def resources() -> Counter[str]:
    """What this process holds: descriptors, shared mappings and threads, by name."""
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held[f"descriptor of {os.readlink(f'/proc/self/fd/{fd}')}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if "s" in fields[1]:
            held[f"mapping of {fields[-1]}"] += 1
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            held[f"thread {Path(f'/proc/self/task/{task}/comm').read_text().strip()}"] += 1
    return held


def left_since(before: Counter[str]) -> list[str]:
    """What this process holds that it did not, once what is going had a moment to go."""
    end = time.monotonic() + 2.0
    while True:
        gc.collect()
        left = sorted((resources() - before).elements())
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def nothing() -> None:
    """What a process does that is started to see that processes can be started."""


def process_main(pipe: Any, trial: Trial, ranks: tuple[int, ...], folder: str) -> None:
    """A process of a trial: one rank, or all of them as threads."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through for garbage
    lock, others_done, ended = threading.Lock(), threading.Event(), Counter[int]()

    def tell(kind: str, rank: int, facts: dict[str, Any]) -> None:
        with lock:
            pipe.send((kind, rank, facts))

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        others_done.set()

    threading.Thread(target=listen, daemon=True).start()
    before = resources()
    file = os.path.join(folder, "store")
    stores = [dist.HashStore() if len(ranks) > 1 else dist.FileStore(file, trial.world_size)]

    def run(rank: int) -> None:
        tell("end", rank, Rank(trial, rank, tell, folder, others_done).run(stores[0]))
        ended[rank] += 1
        if len(ended) == len(ranks) - 1:
            others_done.set()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    run(ranks[0])
    for thread in threads:
        thread.join()
    threads.clear()
    stores.clear()
    tell("left", ranks[0], {"left": left_since(before)})
