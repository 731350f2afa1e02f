"""A mesh: named axes over the ranks, with a communicator for each axis, to combine several kinds of parallelism.

    mesh = ringcomm.init_mesh(pp=2, dp=2, tp=2)      # 8 ranks; the last axis varies fastest
    mesh["tp"]                                       # a communicator: the ranks that differ only in tp
    mesh["dp", "cp"]                                 # a communicator: the ranks that differ only in dp and cp

There is no global mesh: a layer takes one of these communicators, or any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.rendezvous import communicator_of, init
from ringcomm.errors import InvalidArgumentError, MismatchError, shown
from ringcomm.validation import COMMUNICATOR, expects, is_communicator

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA = ("dp", "shard", "cp")
"""Axes whose ranks shard the same parameters and average their gradients."""
REPLICATE, TENSOR = "replicate", "tp"


class Mesh:
    """The ranks of a communicator as a grid with named axes; made by `init_mesh`.

    Attributes:
        names, shape: names and sizes of the axes; the last varies fastest with the rank.
        comm: all ranks.
        coordinates: this rank's index along each axis.
        device_mesh: torch's DeviceMesh from which it was made, or None.
    """

    def __init__(
        self, comm: Communicator, names: Sequence[str], shape: Sequence[int], device_mesh: DeviceMesh | None = None
    ) -> None:
        self.comm, self.names, self.shape, self.device_mesh = comm, tuple(names), tuple(shape), device_mesh
        places = [comm.rank // math.prod(shape[axis + 1 :]) % extent for axis, extent in enumerate(shape)]
        self.coordinates = dict(
            zip(self.names, places if device_mesh is None else device_mesh.get_coordinate(), strict=True)
        )
        self._made: dict[tuple[str, ...], Communicator] = {}
        for name in self.names:
            self._made[(name,)] = self._make((name,))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.names)

    def size(self, name: str) -> int:
        """Returns the number of ranks along an axis; 1 for an axis that does not exist."""
        return self.shape[self.names.index(name)] if name in self.names else 1

    def __getitem__(self, names: str | tuple[str, ...]) -> Communicator:
        """Returns the communicator of the ranks that differ from this one only along these axes, in the order of the
        mesh.

        For several axes, or none, the first access is a collective of the whole mesh.

        Raises:  InvalidArgumentError: no such axis.
        """
        asked = tuple(names) if isinstance(names, (tuple, list)) else (names,)
        unknown = [name for name in asked if not isinstance(name, str) or name not in self.names]
        if unknown:
            raise InvalidArgumentError(
                f"mesh: rank {self.comm.rank} got the axis {shown(unknown[0])}, expected one of "
                f"{', '.join(self.names)}; name it in init_mesh, with size 1 if nothing is split along it"
            )
        key = tuple(name for name in self.names if name in asked)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: tuple[str, ...]) -> Communicator:
        if not key:
            return init(0, 1, device=None if "," in self.comm.device else self.comm.device)
        if self.device_mesh is not None:
            return _of_device_mesh(self.device_mesh, key, self.comm.device)
        color = 0
        for name, extent in zip(self.names, self.shape, strict=True):
            if name not in key:
                color = color * extent + self.coordinates[name]
        made = self.comm.split(color, self.comm.rank)
        assert made is not None  # every rank has a color
        return made

    @property
    def data(self) -> tuple[Communicator, Communicator | None]:
        """The communicators over which gradients are averaged: the ranks that share shards (dp or shard, and cp),
        and the ranks that hold the same shard (replicate)."""
        shards = self[tuple(name for name in self.names if name in DATA)]
        return shards, self[REPLICATE] if REPLICATE in self.names else None

    @property
    def counts(self) -> bool:
        """Whether this is the rank of its tensor parallel group that counts and saves the parameters that every rank of
        the group has whole."""
        return self.coordinates.get(TENSOR, 0) == 0

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank whose ranks have different parts of the model."""
        return tuple(name for name in self.names if name not in (*DATA, REPLICATE) and self.size(name) > 1)

    def close(self) -> None:
        """Closes the communicators that the mesh has made; ``comm`` stays open."""
        for made in self._made.values():
            made.close()

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={extent}" for name, extent in zip(self.names, self.shape, strict=True))
        return f"<ringcomm.Mesh {axes}, rank {self.comm.rank} at {tuple(self.coordinates[n] for n in self.names)}>"


def refuse_mesh(comm: Any, call: str, axis: str) -> None:
    """Raises if ``comm``, the communicator of an axis, is something else, such as the whole mesh."""
    if isinstance(comm, Mesh):
        raise InvalidArgumentError(
            f"{call}: rank {comm.comm.rank} got a mesh, expected a communicator; pass one of its axes, such as "
            f"mesh[{axis!r}]"
        )
    if not is_communicator(comm):
        raise InvalidArgumentError(
            f"{call}: got comm={shown(comm)}, expected a communicator; pass one, such as mesh[{axis!r}]"
        )


def check_is_mesh(mesh: Any, call: str) -> None:
    """Raises for an object that is neither our mesh nor torch's."""
    if not isinstance(mesh, Mesh) and not hasattr(mesh, "mesh_dim_names"):
        raise InvalidArgumentError(
            f"{call}: got mesh={shown(mesh)}, expected a mesh of ringcomm.init_mesh, or a DeviceMesh; pass one"
        )


def _is_axis(name: Any, extent: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and type(extent) is int


@expects("init_mesh", comm=COMMUNICATOR)
def init_mesh(
    axes: Mapping[str, int] | DeviceMesh | None = None,
    comm: Communicator | None = None,
    *,
    device: Any = None,
    **sizes: int,
) -> Mesh:
    """Arranges the ranks along named axes; a collective of all ranks.

    Args:
        axes: sizes by name, or a DeviceMesh of torch, whose groups are used. Alternatively keywords: ``dp=2, tp=2``.
            One size may be -1: the number of ranks that is left. An axis of size 1 is allowed.
        comm: the ranks; None: those of torch.distributed, or of torchrun's environment.
        device: where arrays lie, if ``comm`` is None.
    `ringcomm.shard` knows these names: over dp, shard and cp it shards parameters and averages gradients, over
    replicate it only averages gradients, over tp and pp layers are split. Other names are for the caller's own use.
    Raises:  InvalidArgumentError: sizes whose product is not the number of ranks. MismatchError: the ranks ask for
             different axes.
    """
    if axes is not None and not isinstance(axes, Mapping):
        if not hasattr(axes, "mesh_dim_names"):
            remedy = (
                "pass this communicator as comm=" if is_communicator(axes) else "pass one, or keywords such as dp=2"
            )
            raise InvalidArgumentError(
                f"init_mesh: got axes={shown(axes)}, expected sizes by name such as {{'dp': 2}}, or a DeviceMesh; "
                f"{remedy}"
            )
        return _from_device_mesh(axes, device)
    given = [*({} if axes is None else axes).items(), *sizes.items()]
    named = {name: int(n) if isinstance(n, Integral) and not isinstance(n, bool) else n for name, n in given}
    comm = communicator_of(None, "init_mesh", device) if comm is None else comm
    wrong = not named or not all(_is_axis(*each) for each in named.items())
    words = [f"{name if _is_axis(name, 1) else shown(name)}={shown(extent)}" for name, extent in named.items()]
    asked = ", ".join(words).encode(errors="backslashreplace").decode() or "no axes"
    everybody = [each.decode() for each in comm.exchange(asked.encode())]  # also from a rank that raises below
    known = 0 if wrong else math.prod(extent for extent in named.values() if extent != -1)
    free = [] if wrong else [name for name, extent in named.items() if extent == -1]
    if len(free) == 1 and known > 0 and comm.world_size % known == 0:
        named[free[0]] = comm.world_size // known
    if wrong or any(extent < 1 for extent in named.values()) or math.prod(named.values()) != comm.world_size:
        raise InvalidArgumentError(
            f"init_mesh: rank {comm.rank} got {asked}, expected whole numbers whose product is the {comm.world_size} "
            "ranks; change a size, or pass one of them as -1"
        )
    other = next((rank for rank, theirs in enumerate(everybody) if theirs != asked), None)
    if other is not None:
        raise MismatchError(
            f"init_mesh: rank {comm.rank} got {asked} where rank {other} has {everybody[other]}, expected the same "
            "axes in the same order; pass the same on every rank"
        )
    return Mesh(comm, [*named], [*named.values()])


def _from_device_mesh(device_mesh: DeviceMesh, device: Any) -> Mesh:
    import torch.distributed as dist

    names = device_mesh.mesh_dim_names
    if not names:
        raise InvalidArgumentError(
            "init_mesh: got a DeviceMesh without names, expected names for its axes; make it with mesh_dim_names"
        )
    if device_mesh.get_coordinate() is None:
        raise InvalidArgumentError(
            f"init_mesh: rank {dist.get_rank()} is not in the DeviceMesh; call init_mesh on the mesh's ranks only"
        )
    everyone = device_mesh.mesh.numel() == dist.get_world_size()
    group = None if everyone else device_mesh._flatten().get_group()
    return Mesh(communicator_of(group, "init_mesh", device), names, device_mesh.shape, device_mesh)


def _of_device_mesh(device_mesh: DeviceMesh, key: tuple[str, ...], device: str) -> Communicator:
    import torch

    part = device_mesh[key]
    group = part.get_group() if len(key) == 1 else part._flatten().get_group()
    return communicator_of(group, "init_mesh", torch.device(device.split(",")[0]))
