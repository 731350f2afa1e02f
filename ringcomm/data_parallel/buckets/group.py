"""The ranks that train one model: the communicator over which the model is sharded, the communicator over which
shards are replicated, and their shared pool of memory."""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.arrays.devices import EMULATED
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.mesh import Mesh, check_is_mesh
from ringcomm.comm.rendezvous import communicator_of, shared_communicator
from ringcomm.errors import ClosedError, DeviceError, InvalidArgumentError, MismatchError, RankLostError, RingcommError

if TYPE_CHECKING:
    import torch.distributed as dist

# The actions that a rank announces inside `join`; actions in PHASES are announced even while all ranks have input.
KINDS = ("forward", "backward", "buffers", "gather", "reduce", "used", "step", "clip", "zero")
PHASES = ("forward", "backward", "step", "clip", "zero")
SENDS_MORE = ("step", "clip", "zero")  # kinds that are followed by a message with details
SAME = "ask for the same, with the same model, on every rank"


def uses(x: torch.Tensor) -> int:
    """Returns the number of tensors that share a tensor's memory, including those saved by autograd, plus a
    constant."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


@dataclass
class OwnMemory:
    """The attribute ``own`` of a buffer that ringcomm has allocated; users' tensors have none.

    Attributes:
        uses: how many of ringcomm's tensors share its memory; see `uses`.
        pool: the pool's memory of which a lent buffer is a view; None: the buffer is not lent.
        address: the buffer's address at the time when the addresses of its parts were recorded.
        parts: by the `GradBuffer` that fills the buffer, every parameter's part of it, and the padding.
    """

    uses: int
    pool: torch.Tensor | None = None
    address: int = 0
    parts: weakref.WeakKeyDictionary[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )


def unversioned(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside the block, a collective that writes to ``x`` does not raise its version. Otherwise autograd would refuse a
    backward pass, although the collective has written the same parameters again."""
    return nullcontext() if x.is_inference() else torch.autograd._unsafe_preserve_version_counter(x)


_STAGES_1_AND_2 = (
    "forward in training where the module has buffers, backward, the optimizer's step and state_dict(), "
    "load_state_dict, with mixed precision or offload the module's state_dict(), and what reads p.grad"
)
_COLLECTIVES = {  # by stage, for the note added to an error
    0: "forward in training where the module has buffers, and backward",
    1: _STAGES_1_AND_2,
    2: _STAGES_1_AND_2,
    3: "forward, also in evaluation, backward, state_dict() of module and optimizer, and what reads a parameter or its "
    "gradient",
}
DONE = SimpleNamespace(wait=lambda: None)  # the handle of a collective that has already completed
# For each default group, a process group with only this rank.
_alone: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
# The smallest number of cores of any rank.
_cores: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class DataParallelGroup:
    """The ranks that train one model.

    Args:
        comm: the ranks over which the model is sharded. All ranks make their objects at the same time, a collective.
        replicas: for hybrid sharding: the ranks that hold the same shard; None: each shard exists once.
        mesh: the mesh in which ``comm`` and ``replicas`` are axes; None: there are no other axes.

    Attributes:
        background: whether collectives run beside backward and forward. On the cpu engine they need a core of their
            own; without a spare core, a collective runs where it is started, which takes less time in total.
    """

    def __init__(self, comm: Communicator, replicas: Communicator | None = None, mesh: Mesh | None = None) -> None:
        self.comm = comm
        self.replicas = replicas if replicas is not None and replicas.world_size > 1 else None
        self.mesh = mesh
        self.traffic: Counter[str] = Counter()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, dict[tuple[int, torch.dtype], torch.Tensor]] = {}  # the views of each buffer, by its id
        self.pool_nbytes = 0
        self.order = 0  # checksum of the gathers so far; ranks with different orders would mix up parameters
        self.gathered_nbytes = self.gathered_peak_nbytes = 0  # unsharded parameters at stage 3, now and at most
        self.joining: Join | None = None
        # (owner, values) of the gradient that was gathered last; only one bucket's gradient is kept unsharded.
        self.read: tuple[object, torch.Tensor] | None = None
        ranks_here = comm.world_size if mesh is None else mesh.comm.world_size
        self.background = comm.engine != "cpu" or self._least_cores() >= 2 * ranks_here
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # for collectives beside the computation

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that share the shards."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of shards of a buffer."""
        return self.comm.world_size

    @property
    def cuts_model(self) -> bool:
        """Whether other ranks of the mesh hold other parts of the model."""
        return self.mesh is not None and bool(self.mesh.model_axes)

    @property
    def data_world_size(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.comm.world_size * (1 if self.replicas is None else self.replicas.world_size)

    @property
    def root(self) -> int:
        """The rank that others copy from: inside `join`, the first that still has input."""
        return 0 if self.joining is None else self.joining.root

    @property
    def counted(self) -> int:
        """The number of ranks in a mean: possibly fewer inside `join`."""
        return self.comm.world_size if self.joining is None else self.joining.counted

    def _least_cores(self) -> int:
        """Returns the smallest number of cores that any rank may run on. The order of collectives depends on it, so
        the ranks must agree."""
        least = []
        for comm in (self.comm, self.replicas):
            if comm is not None:
                # Once per communicator, not per living model: garbage collection would make the ranks differ.
                if comm not in _cores:
                    cores = torch.tensor([len(os.sched_getaffinity(0))])
                    comm.all_reduce(cores, "min")
                    _cores[comm] = int(cores)
                least.append(_cores[comm])
        return min(least)

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns new memory that the peers read in place, if the communicator provides such memory."""
        if str(device) == self.comm.device or (device.type == "cpu" and (self.comm.device == "cpu" or EMULATED)):
            return self.comm.empty(numel, dtype=dtype, like="torch")
        if not self.comm.lends_memory:
            return torch.empty(numel, dtype=dtype, device=device)
        raise DeviceError(
            f"ringcomm.data_parallel: rank {self.rank} got a parameter on {device}, its communicator serves "
            f"{self.comm.device}; move the module there, or pass a communicator for {device}"
        )

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lends memory from the pool until `give`. The pool keeps its peak size for later calls."""
        nbytes = numel * dtype.itemsize
        fits = [each for each in self._free if each.numel() >= nbytes and each.device == device]
        if fits:
            # Among equal sizes, take the one used last, because caches still hold it.
            raw = min(reversed(fits), key=torch.Tensor.numel)
            self._free = [each for each in self._free if each is not raw]
        else:
            small = [each for each in self._free if each.device == device]
            if small:  # replace the largest free buffer instead of adding one
                largest = max(small, key=torch.Tensor.numel)
                self._free = [each for each in self._free if each is not largest]
                self.pool_nbytes -= largest.numel()
                self._lent.pop(id(largest), None)  # no entry if `give` has just put new memory into the pool
            raw = self.empty(nbytes, torch.uint8, device)
            self.pool_nbytes += nbytes
        known = self._lent.setdefault(id(raw), {})
        if (numel, dtype) not in known:
            known[numel, dtype] = raw[:nbytes].view(dtype)
            known[numel, dtype].own = OwnMemory(0, raw)
        lent = known[numel, dtype]
        lent.own.uses = uses(raw)
        return lent

    def give(self, lent: torch.Tensor) -> None:
        """Returns lent memory to the pool. If users still see it, it is left to them, and the pool gets new memory."""
        raw = lent.own.pool
        if uses(raw) > lent.own.uses:
            del self._lent[id(raw)]
            raw = self.another(raw)
        self._free.append(raw)

    def another(self, x: torch.Tensor) -> torch.Tensor:
        """Returns new memory of the same size, allocated by this rank alone; on devices the peers do not read it in
        place."""
        return self.empty(x.numel(), x.dtype, x.device) if self.comm.engine == "cpu" else torch.empty_like(x)

    def note_order(self, number: int) -> None:
        """Records in `order` that a bucket's parameters are gathered now."""
        self.order = zlib.crc32(number.to_bytes(4, "little"), self.order)

    def note_gathered(self, nbytes: int) -> None:
        """Adds to the count of gathered bytes; negative when parameters are freed."""
        self.gathered_nbytes += nbytes
        self.gathered_peak_nbytes = max(self.gathered_peak_nbytes, self.gathered_nbytes)

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    @property
    def alone(self) -> dist.ProcessGroup:
        """A process group with only this rank, for torch's Join: our own `join` messages tell the joined ranks what to
        do, so torch's Join has no ranks to count.

        Raises: InvalidArgumentError: torch.distributed is not initialised.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise InvalidArgumentError(
                f"Join: rank {self.rank} got a model over a communicator, expected torch.distributed to be "
                "initialised; use ringcomm.join(model)"
            )
        # One for all models, because torch keeps groups until the program destroys them. Every rank makes it, because
        # torch names a group by the number of groups that were made before it.
        world = dist.group.WORLD
        if world not in _alone:
            _alone[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return _alone[world]

    def announce(self, kind: str, which: int = 0, flag: bool = False, more: Any = None) -> None:
        """Inside `join`: tells the ranks that have joined what this rank does next."""
        if self.joining is not None:
            self.joining.announce(kind, which, flag, more)

    def mean_op(self, dtype: torch.dtype) -> str:
        """Returns the operation that combines gradients in ``dtype``; `correct` turns its result into their mean. A
        sum may overflow 16-bit types, so those are averaged."""
        return "sum" if self.counted < self.world_size and dtype.itemsize >= 4 else "avg"

    def correct(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        """Turns a combined gradient, in place, into the mean over the ranks that still have input."""
        if self.mean_op(dtype) == "sum":
            x.div_(self.counted)
        elif self.counted < self.world_size:
            x.mul_(self.world_size / self.counted)

    # ---- collectives, counted ------------------------------------------------------------------------------------

    def count(self, op: str, nbytes: int) -> None:
        """Counts a collective on a message of ``nbytes``, the size of the whole buffer."""
        self.traffic[f"{op} calls"] += 1
        self.traffic[f"{op} bytes"] += nbytes

    def all_reduce(self, x: torch.Tensor, op: str = "avg") -> Any:
        """Starts to reduce all ranks' ``x``, in place."""
        self.count("all_reduce", x.nbytes)
        with unversioned(x), self.on_side_stream(x):
            return self._started(self.comm.all_reduce(x, op, async_op=self.background))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, op: str = "avg") -> Any:
        """Starts to reduce all ranks' ``x``; this rank gets its shard."""
        self.count("reduce_scatter", x.nbytes)
        with unversioned(out), self.on_side_stream(x):
            return self._started(self.comm.reduce_scatter(x, op, out=out, async_op=self.background))

    def all_gather(self, shard: torch.Tensor, unsharded: torch.Tensor, mark: int = 0) -> Any:
        """Starts to gather every rank's shard.

        Args:
            mark: a number for the gathered data. If the ranks pass different marks, every rank gets an error, except
                over a process group.
        """
        self.count("all_gather", unsharded.nbytes)
        with unversioned(unsharded), self.on_side_stream(shard):
            return self._started(self.comm._all_gather(shard, out=unsharded, async_op=self.background, mark=mark))

    def on_side_stream(self, x: torch.Tensor) -> AbstractContextManager[Any]:
        """Inside the block, collectives of ``x`` that are to overlap with the computation run on a separate stream,
        after the work that is now on the current stream. Waiting for them orders the current stream after them."""
        if not self.background or not x.is_cuda or not self.comm.lends_memory:
            return nullcontext()
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device, priority=-1)
        stream = self._streams[x.device]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        return torch.cuda.stream(stream)

    def wait_for_side_streams(self) -> None:
        """Orders later work on the current streams after all collectives on side streams. It is called after an error,
        before memory to which they may still write is used again."""
        for device, stream in self._streams.items():
            with suppress(RuntimeError):  # after an error of the device nothing runs there
                torch.cuda.current_stream(device).wait_stream(stream)

    def _started(self, result: Any) -> Any:
        return result if self.background else DONE

    @contextmanager
    def explaining(self, stage: int) -> Iterator[None]:
        """Adds to errors of the collectives in the block a note about the most frequent cause at this stage."""
        try:
            yield
        except (ClosedError, MismatchError, RankLostError) as error:
            if isinstance(error, ClosedError):
                note = (
                    "It is the communicator of this model, which close() or the end of its with block has closed. Use "
                    "and save the model before that; ringcomm.unshard(model) gives every rank a plain one."
                )
            elif isinstance(error, RankLostError):
                note = "If the ranks have different numbers of batches, train inside ringcomm.join(model)."
            else:
                note = (
                    f"At stage {stage} these are collectives: {_COLLECTIVES[stage]}. Every rank calls them, in the "
                    "same order; a rank that does so alone (to log, evaluate or save) takes part in others' calls. To "
                    "evaluate or generate on some ranks alone, enter ringcomm.whole(model) on every rank."
                )
            if hasattr(error, "add_note") and note not in getattr(error, "__notes__", ()):  # Python 3.11
                error.add_note(note)
            raise

    def barrier(self) -> None:
        """Checks that all ranks start a gather that is not part of a step. A rank that starts one alone gets an error
        instead of the data of another rank's next gather. The mark distinguishes this barrier from the program's."""
        self.comm._barrier(mark=1)

    def average_replicas(self, x: torch.Tensor) -> None:
        """Averages over the ranks that hold the same shard, in place."""
        if self.replicas is not None:
            self.count("replicas all_reduce", x.nbytes)
            with unversioned(x), self.on_side_stream(x):  # in order with the other collectives on the side stream
                work = self.replicas.all_reduce(x, "avg", async_op=self.background)
            self._started(work).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        """Sends the first rank's ``x`` to every rank, in place."""
        self.count("broadcast", x.nbytes)
        with unversioned(x):
            if self.replicas is not None:
                self.replicas.broadcast(x, 0)
            self.comm.broadcast(x, self.root)

    def reduce_over_all(self, x: torch.Tensor, op: str, everywhere: bool = False) -> torch.Tensor:
        """Reduces ``x`` over all ranks and replicas, in place, and waits.

        Args:
            everywhere: also over the ranks that hold other parts of the model.
        """
        self.count("agreement", x.nbytes)
        if everywhere and self.mesh is not None:
            self.mesh.comm.all_reduce(x, op)
            return x
        self.comm.all_reduce(x, op)
        if self.replicas is not None:
            self.replicas.all_reduce(x, op)
        return x

    def gather_apart(self, shard: torch.Tensor, device: torch.device, stage: int) -> torch.Tensor:
        """Returns all ranks' shards, in new memory on a device, by a gather that is not part of a step."""
        unsharded = torch.empty(shard.numel() * self.world_size, dtype=shard.dtype, device=device)
        with self.explaining(stage):
            self.barrier()
            self.comm.all_gather(shard.to(device), out=unsharded)
        return unsharded

    # ---- agreement -----------------------------------------------------------------------------------------------

    def agree(self, call: str, facts: Sequence[str], advice: str = "") -> None:
        """Raises if the ranks differ in ``facts``, and names the first difference.

        Args:
            advice: what to do if they differ; "": pass the same values on every rank.
        """
        for comm in [self.comm] if self.replicas is None else [self.comm, self.replicas]:
            for rank, theirs in enumerate(comm.exchange("\n".join(facts).encode())):
                _compare(call, comm.rank, list(facts), rank, theirs.decode().split("\n"), advice or SAME)


class Join:
    """One rank's state inside `join`, and the rounds in which the ranks tell one another what they are about to do.

    Args:
        module: the model that is trained inside.
        device: the device of the ranks' messages.
        over_all: whether gradients are averaged over all ranks, not only over those that still have input.
        throw: whether to raise as soon as a rank has no more input.
        replicated: by number, the optimizers of `ZeroRedundancyOptimizer`: they are not attached to the model, but step
            on every rank. The numbers are the same on all ranks.
    """

    def __init__(
        self,
        ranks: DataParallelGroup,
        module: nn.Module,
        device: torch.device,
        over_all: bool,
        throw: bool,
        replicated: Mapping[int, Any],
    ) -> None:
        self.ranks, self.module, self.over_all, self.throw = ranks, module, over_all, throw
        self.replicated = replicated
        # The number of ranks with input, and the first of them, in the last round in which there were any.
        self.with_input, self.root = ranks.world_size, 0
        self.shadowing = False  # whether this rank has joined
        self._last = ""  # the kind that this rank announced last
        self._codes = torch.zeros(ranks.world_size, dtype=torch.int64, device=device)

    @property
    def counted(self) -> int:
        """The number of ranks in a mean."""
        return self.ranks.world_size if self.over_all else self.with_input

    @property
    def some_have_joined(self) -> bool:
        """Whether a rank had no more input in the last round."""
        return self.with_input < self.ranks.world_size

    def announce(self, kind: str, which: int = 0, flag: bool = False, more: Any = None) -> None:
        """Tells the ranks that have joined what this one is about to do.

        Args:
            which, flag, more: details, depending on the kind.
        """
        if self.shadowing:
            return
        # zero_grad() zeroes gradients one by one; while all ranks have input, only the first of them is announced.
        if not self.some_have_joined and (kind not in PHASES or kind == self._last == "zero"):
            return
        self._last = kind
        self._round(1 + KINDS.index(kind) + len(KINDS) * (2 * which + flag))
        if kind in SENDS_MORE and self.some_have_joined:
            self.ranks.comm.all_gather_object(more)

    def receive(self) -> tuple[str, int, bool, Any] | None:
        """Returns, on a rank that has joined, what the others are about to do: the kind and its details; None: all
        ranks have joined."""
        code = self._round(0)
        if not code:
            return None
        kind, which, flag = _decoded(code)
        more = self.ranks.comm.all_gather_object(None)[self.ranks.root] if kind in SENDS_MORE else None
        return kind, which, flag, more

    def _round(self, mine: int) -> int:
        """Exchanges codes and returns the code of the ranks with input; 0 if no rank has input."""
        ranks = self.ranks
        code = torch.tensor([mine], dtype=torch.int64, device=self._codes.device)
        ranks.count("join", self._codes.nbytes)
        ranks.comm.all_gather(code, out=self._codes)
        codes = self._codes.tolist()
        going = [rank for rank, theirs in enumerate(codes) if theirs]
        if not going:
            return 0
        self.with_input, self.root = len(going), going[0]
        if self.throw and self.some_have_joined:
            gone = [rank for rank, theirs in enumerate(codes) if not theirs]
            raise RingcommError(
                f"join: rank {ranks.rank} found that ranks {gone} have no more input, expected equal numbers of steps; "
                "give every rank the same number, or leave out throw_on_early_termination"
            )
        first = codes[going[0]]
        other = next((rank for rank in going if codes[rank] != first), None)
        if other is not None:
            raise MismatchError(
                f"join: rank {ranks.rank} found rank {going[0]} at {_name(first)} and rank {other} at "
                f"{_name(codes[other])}; run the same steps on every rank that has input"
            )
        return int(first)


def _decoded(code: int) -> tuple[str, int, bool]:
    rest, kind = divmod(code - 1, len(KINDS))
    return KINDS[kind], rest // 2, bool(rest % 2)


def _name(code: int) -> str:
    kind, which, _ = _decoded(code)
    return f"{kind} ({which})"


def _compare(call: str, rank: int, mine: list[str], other: int, theirs: list[str], advice: str) -> None:
    if mine == theirs:
        return
    longest = max(len(mine), len(theirs))
    pairs = zip(mine + ["nothing"] * (longest - len(mine)), theirs + ["nothing"] * (longest - len(theirs)), strict=True)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise MismatchError(f"{call}: rank {rank} got {here} where rank {other} has {there}; {advice}")


def refuse_several(call: str, **given: Any) -> None:
    """Raises if more than one of the arguments that name the ranks is given."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgumentError(f"{call}: got both {' and '.join(names)}, expected one of them; leave one out")


def ranks_of_mesh(mesh: Any, call: str, device: torch.device, shared: bool = False) -> DataParallelGroup:
    """Returns the ranks of our mesh, by the names of its axes; or of a DeviceMesh, whose only axis shards, or whose two
    axes replicate and shard. With ``shared`` a DeviceMesh gets a `shared_communicator` instead of a new one.

    Raises:  InvalidArgumentError: ranks have, or may have, different parts of a model along one of the axes.
    """
    check_is_mesh(mesh, call)
    if isinstance(mesh, Mesh):
        unknown = [name for name in mesh.model_axes if name not in ("tp", "pp")]
        if unknown:
            raise InvalidArgumentError(
                f"{call}: rank {mesh.comm.rank} got a mesh with the axis {unknown[0]!r}, expected dp, shard, cp, "
                "replicate, tp or pp, whose ranks' parts of a model are known; pass communicators, comm=mesh['dp'], or "
                "rename the axis"
            )
        return DataParallelGroup(*mesh.data, mesh)
    cuts = [name for name in mesh.mesh_dim_names or () if name in ("tp", "pp")]
    if cuts:
        raise InvalidArgumentError(
            f"{call}: got a DeviceMesh with the axis {cuts[0]!r}, expected axes along which the ranks have the same "
            "model; pass ringcomm.init_mesh(mesh), which knows axes by their names, or slice it first"
        )
    communicator = shared_communicator if shared else communicator_of
    if mesh.ndim == 1:
        return DataParallelGroup(communicator(mesh.get_group(), call, device))
    if mesh.ndim == 2:
        replicas, shards = (communicator(mesh.get_group(axis), call, device) for axis in (0, 1))
        return DataParallelGroup(shards, replicas)
    raise InvalidArgumentError(
        f"{call}: got a mesh of {mesh.ndim} axes, expected one (sharded) or two (replicated, sharded); slice it first, "
        "or pass ringcomm.init_mesh(mesh)"
    )
