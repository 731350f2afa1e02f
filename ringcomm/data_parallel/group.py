"""Who shares the work: the communicator over which shards are cut, the one over which they are repeated, and the memory
that all of them use."""

from __future__ import annotations

import os
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.arrays.devices import EMULATED
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import communicator_of, shared_communicator
from ringcomm.errors import DeviceError, InvalidArgumentError, MismatchError
from ringcomm.mesh import Mesh, refuse_no_mesh

if TYPE_CHECKING:
    from ringcomm.data_parallel.grad_buffer import GradBuffer
    from ringcomm.data_parallel.join import Join
SAME = "ask for the same, with the same model, on every rank"


def uses(x: torch.Tensor) -> int:
    """How many tensors share a tensor's memory, among them what autograd has saved; more by a constant."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


class _Done:
    """The handle of a collective that has run."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


DONE = _Done()
_cores: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()  # the least of any rank


class DataParallelGroup:
    """The ranks that train one model.

    Args:
        comm: cuts the shards. The ranks make theirs at the same time, a collective.
        replicas: for hybrid sharding: the ranks that hold the same shard; None: each shard exists once.
        mesh: of which ``comm`` and ``replicas`` are axes; None: there are no others.

    Attributes:
        background: whether collectives run beside backward and forward. On the cpu engine they need a core: without one
            to spare a collective runs where it is started, which takes less time in all.
    """

    def __init__(self, comm: Communicator, replicas: Communicator | None = None, mesh: Mesh | None = None) -> None:
        self.comm = comm
        self.replicas = replicas if replicas is not None and replicas.world_size > 1 else None
        self.mesh = mesh
        self.traffic: Counter[str] = Counter()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, dict[tuple[int, torch.dtype], torch.Tensor]] = {}  # what was made of each, by its id
        self.pool_nbytes = 0
        self.order = 0  # a checksum of what was collected so far: equal on all ranks, or they mix up parameters
        self.gathered_nbytes = self.gathered_peak_nbytes = 0  # of parameters that stage 3 has brought; the most so far
        self.joining: Join | None = None
        self.read: tuple[GradBuffer, torch.Tensor] | None = None  # the gradient that was gathered last, and its values
        self.root = 0  # whose values all ranks get: the first that still has input
        self.counted = comm.world_size  # over how many ranks a mean is taken: inside of `join` maybe fewer
        ranks_here = comm.world_size if mesh is None else mesh.comm.world_size
        self.background = comm.engine != "cpu" or self._least_cores() >= 2 * ranks_here

    @property
    def rank(self) -> int:
        """This rank's number among those that share the shards."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Into how many shards a buffer is cut."""
        return self.comm.world_size

    @property
    def cuts_model(self) -> bool:
        """Whether other ranks of the mesh have other parts of the model."""
        return self.mesh is not None and bool(self.mesh.model_axes)

    @property
    def data_world_size(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.comm.world_size * (1 if self.replicas is None else self.replicas.world_size)

    def _least_cores(self) -> int:
        """That a rank may run on: the order of collectives follows from it, so the ranks agree on one number."""
        least = []
        for comm in (self.comm, self.replicas):
            if comm is not None:
                if comm not in _cores:  # asked once: whether other models still live differs between ranks
                    cores = torch.tensor([len(os.sched_getaffinity(0))])
                    comm.all_reduce(cores, "min")
                    _cores[comm] = int(cores)
                least.append(_cores[comm])
        return min(least)

    # ---- memory --------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory that the peers read in place, where the communicator lends such."""
        if str(device) == self.comm.device or (device.type == "cpu" and (self.comm.device == "cpu" or EMULATED)):
            return self.comm.empty(numel, dtype=dtype, like="torch")
        if not self.comm.lends_memory:
            return torch.empty(numel, dtype=dtype, device=device)
        raise DeviceError(
            f"ringcomm.data_parallel: rank {self.rank} got a parameter on {device}, its communicator serves "
            f"{self.comm.device}; move the module there, or pass a communicator for {device}"
        )

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a while; `give` it back. What is lent out at most stays, for the next time."""
        nbytes = numel * dtype.itemsize
        fits = [each for each in self._free if each.numel() >= nbytes and each.device == device]
        if fits:
            raw = min(reversed(fits), key=torch.Tensor.numel)  # of equals the one used last, which caches still hold
            self._free = [each for each in self._free if each is not raw]
        else:
            small = [each for each in self._free if each.device == device]
            if small:  # grows, in place of one more
                largest = max(small, key=torch.Tensor.numel)
                self._free = [each for each in self._free if each is not largest]
                self.pool_nbytes -= largest.numel()
                del self._lent[id(largest)]
            raw = self.empty(nbytes, torch.uint8, device)
            self.pool_nbytes += nbytes
        known = self._lent.setdefault(id(raw), {})
        if (numel, dtype) not in known:
            known[numel, dtype] = raw[:nbytes].view(dtype)
            known[numel, dtype]._ringcomm_pool = raw
        lent = known[numel, dtype]
        lent._ringcomm_uses = uses(raw)  # all by tensors of ours
        return lent

    def give(self, lent: torch.Tensor) -> None:
        """Ends a `take`. Memory that users still see is left to them, and new memory takes its place."""
        raw = lent._ringcomm_pool
        if uses(raw) > lent._ringcomm_uses:
            del self._lent[id(raw)]
            raw = self.another(raw)
        self._free.append(raw)

    def another(self, x: torch.Tensor) -> torch.Tensor:
        """New memory of the same size, on this rank alone: on devices it is none that the peers read in place."""
        return self.empty(x.numel(), x.dtype, x.device) if self.comm.engine == "cpu" else torch.empty_like(x)

    def note_order(self, number: int) -> None:
        """A group's parameters are collected now."""
        self.order = zlib.crc32(number.to_bytes(4, "little"), self.order)

    def note_gathered(self, nbytes: int) -> None:
        """Parameters of so many bytes were brought, or went (below 0)."""
        self.gathered_nbytes += nbytes
        self.gathered_peak_nbytes = max(self.gathered_peak_nbytes, self.gathered_nbytes)

    # ---- uneven inputs ---------------------------------------------------------------------------------------------

    def announce(self, kind: str, which: int = 0, flag: bool = False, more: Any = None) -> None:
        """Inside of `join`: tells the ranks that have joined what comes now."""
        if self.joining is not None:
            self.joining.announce(kind, which, flag, more)

    def mean_op(self, dtype: torch.dtype) -> str:
        """How gradients in ``dtype`` are combined; `correct` makes their mean of it. A sum may overflow 16 bits."""
        return "sum" if self.counted < self.world_size and dtype.itemsize >= 4 else "avg"

    def correct(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        """Makes the mean over the ranks that still have input of what was combined in ``dtype``, in place."""
        if self.mean_op(dtype) == "sum":
            x.div_(self.counted)
        elif self.counted < self.world_size:
            x.mul_(self.world_size / self.counted)

    # ---- collectives, counted ------------------------------------------------------------------------------------

    def count(self, op: str, nbytes: int) -> None:
        """Notes a collective on a message of ``nbytes``, the whole buffer's."""
        self.traffic[f"{op} calls"] += 1
        self.traffic[f"{op} bytes"] += nbytes

    def all_reduce(self, x: torch.Tensor, op: str = "avg") -> Any:
        """Starts to combine ``x`` of all ranks, in place."""
        self.count("all_reduce", x.nbytes)
        return self._started(self.comm.all_reduce(x, op, async_op=self.background))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor, op: str = "avg") -> Any:
        """Starts to combine ``x`` of all ranks; this rank gets its shard."""
        self.count("reduce_scatter", x.nbytes)
        return self._started(self.comm.reduce_scatter(x, op, out=out, async_op=self.background))

    def all_gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Any:
        """Starts to collect every rank's shard."""
        self.count("all_gather", whole.nbytes)
        return self._started(self.comm.all_gather(shard, out=whole, async_op=self.background))

    def _started(self, result: Any) -> Any:
        return result if self.background else DONE

    def meet(self) -> None:
        """Before a gather that is no part of a step: a rank that does so alone gets an error, and not what another
        rank's next gather brings."""
        self.comm.barrier()

    def average_replicas(self, x: torch.Tensor) -> None:
        """The mean over the ranks that hold the same shard, in place."""
        if self.replicas is not None:
            self.count("replicas all_reduce", x.nbytes)
            self.replicas.all_reduce(x, "avg")

    def broadcast(self, x: torch.Tensor) -> None:
        """Every rank gets the first one's ``x``, in place."""
        self.count("broadcast", x.nbytes)
        if self.replicas is not None:
            self.replicas.broadcast(x, 0)
        self.comm.broadcast(x, self.root)

    def reduce_over_all(self, x: torch.Tensor, op: str, everywhere: bool = False) -> torch.Tensor:
        """Combines ``x`` of all ranks and replicas, in place, at once.

        Args:
            everywhere: also of those that have other parts of the model.
        """
        self.count("agreement", x.nbytes)
        if everywhere and self.mesh is not None:
            self.mesh.comm.all_reduce(x, op)
            return x
        self.comm.all_reduce(x, op)
        if self.replicas is not None:
            self.replicas.all_reduce(x, op)
        return x

    # ---- agreement -----------------------------------------------------------------------------------------------

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes among those that share the shards."""
        return self.comm.exchange(payload)

    def agree(self, call: str, facts: Sequence[str], advice: str = "") -> None:
        """Refuses to go on when the ranks differ in ``facts``, and names the first difference.

        Args:
            advice: what to do where they differ; "": ask for the same.
        """
        for comm in [self.comm] if self.replicas is None else [self.comm, self.replicas]:
            for rank, theirs in enumerate(comm.exchange("\n".join(facts).encode())):
                _compare(call, comm.rank, list(facts), rank, theirs.decode().split("\n"), advice or SAME)


def _compare(call: str, rank: int, mine: list[str], other: int, theirs: list[str], advice: str) -> None:
    if mine == theirs:
        return
    longest = max(len(mine), len(theirs))
    pairs = zip(mine + ["nothing"] * (longest - len(mine)), theirs + ["nothing"] * (longest - len(theirs)), strict=True)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise MismatchError(f"{call}: rank {rank} got {here} where rank {other} has {there}; {advice}")


def ranks_of_mesh(mesh: Any, call: str, device: torch.device, shared: bool = False) -> DataParallelGroup:
    """The ranks of a mesh of ours, by the names of its axes; or of a DeviceMesh: one axis shards; of two, the first
    replicates and the second shards, over a `shared_communicator` or over new ones.

    Raises: InvalidArgumentError: an axis along which the ranks have different parts of a model, or may have."""
    refuse_no_mesh(mesh, call)
    if isinstance(mesh, Mesh):
        unknown = [name for name in mesh.model_axes if name not in ("tp", "pp")]
        if unknown:
            raise InvalidArgumentError(
                f"{call}: rank {mesh.comm.rank} got a mesh with the axis {unknown[0]!r}, expected dp, shard, cp, "
                "replicate, tp or pp: of another it is not known who has what; pass communicators, comm=mesh['dp'], or "
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
