"""Initialises models that were built on the meta device: each unit in turn gets memory, is initialised and is
sharded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringcomm.data_parallel.shard_spec import part_of
from ringcomm.data_parallel.uncut import Room, uncut_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ringcomm.comm.communicator import Communicator
    from ringcomm.data_parallel.bucket import Bucket
    from ringcomm.data_parallel.group import DataParallelGroup
    from ringcomm.data_parallel.sharded_model import ShardedModel
    from ringcomm.data_parallel.unit import Unit

InitFn = Callable[[nn.Module], Any]
_NAMED = 5  # most parameters named in an error


def real_device(module: nn.Module) -> torch.device:
    """Returns the device of a module's parameters; for a module entirely on meta, the device that this process
    computes on."""
    known = next((p.device for p in module.parameters() if not p.is_meta), None)
    if known is not None or all(False for _ in module.parameters()):
        return known or torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_of(comm: Communicator, module: nn.Module) -> torch.device:
    """Returns the device where parameters on meta get their memory."""
    return real_device(module) if "," in comm.device else torch.device(comm.device)


def unmade(value: torch.Tensor) -> float | int:
    """Returns the value that fills a tensor that was not initialised."""
    if value.is_floating_point() or value.is_complex():
        return math.nan
    return 0 if value.dtype == torch.bool else torch.iinfo(value.dtype).max


def is_unmade(value: torch.Tensor) -> bool:
    """Whether nothing was written into a tensor since it was filled with `unmade`."""
    floats = value.is_floating_point() or value.is_complex()
    empty = value.isnan() if floats else value == unmade(value)
    return bool(empty.any() and (empty | (value == 0)).all())  # zeros are the padding of a sharded parameter


def fill_unmade(value: torch.Tensor, p: nn.Parameter) -> None:
    """Fills a parameter's memory with `unmade`, and its padding with zeros."""
    part = part_of(p)
    value.fill_(unmade(value))
    if part.dim is not None:
        length = sum(count for _, count in part.pieces)
        value.narrow(part.dim, length, value.shape[part.dim] - length).zero_()


def give_memory(p: nn.Parameter, name: str, device: torch.device, rank: int) -> None:
    """Turns a parameter on meta into one on a device, still without values; it stays the same object."""
    twin = nn.Parameter(torch.empty((), dtype=p.dtype, device=device).expand(p.shape), p.requires_grad)
    twin.__dict__.update(p.__dict__)
    twin.__class__ = type(p)
    try:
        torch.utils.swap_tensors(p, twin)
    except RuntimeError as error:
        raise UnsupportedError(
            f"shard: rank {rank} got {name} on the meta device in a graph of autograd or with weak references, "
            "expected a parameter that nothing else refers to; shard the module before it is called"
        ) from error


class Waiting:
    """The submodules with parameters or buffers on meta, children first, in the order of their construction.

    Args:
        init: called for each of them; None: its own `reset_parameters`. False: no submodule is initialised.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, init: InitFn | bool | None, call: str, rank: int
    ) -> None:
        self.device, self.call, self.rank, self.room = device, call, rank, Room(device, unmade)
        self.modules = [(name, m) for name, m in _children_first(module) if _has_meta(m)]
        self.params = {id(p) for _, m in self.modules for p in m._parameters.values() if p is not None and p.is_meta}
        self.init: InitFn | None = None if init is False else init if callable(init) else self._reset
        if init is None:
            for name, m in self.modules:
                self._reset_of(name, m)
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.recurrent = [m for _, m in self.modules if isinstance(m, nn.RNNBase)]
        # Until they have memory, because `give_memory` needs parameters without weak references.
        for m in self.recurrent:
            m._flat_weight_refs = []

    def _reset_of(self, name: str, m: nn.Module) -> Callable[[], Any]:
        uncut = uncut_of(m)
        m = m if uncut is None else uncut.module
        reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
        if reset is None:
            raise InvalidArgumentError(
                f"{self.call}: rank {self.rank} got {name or 'the module'}, a {type(m).__name__} with tensors on the "
                "meta device and without reset_parameters(), expected a way to initialise it; pass init_fn, or "
                "init_fn=False and load values before the first forward"
            )
        found: Callable[[], Any] = reset
        return found

    def _reset(self, m: nn.Module) -> None:
        self._reset_of("", m)()

    def initialise(self, units: Sequence[Unit]) -> None:
        """Gives each unit memory in turn, initialises it, and keeps this rank's part; a collective."""
        if not self.modules:
            return
        self._make_buffers()
        homes = {id(p): bucket for unit in units for bucket in unit.buckets for p in bucket.params}
        for unit in units:
            self._open(unit.buckets)
            for name, m in self.modules if self.init is not None else ():
                if any(homes.get(key) in unit.buckets for key in _ids(m)):
                    self._initialise(name, m, homes)
            for bucket in unit.buckets:
                bucket.close(send=self.init is not None)
        for m in self.recurrent:
            m._flat_weight_refs = [None if p is None else weakref.ref(p) for p in m._flat_weights]
        for name, m in self.modules:  # modules that have only buffers
            if not self.params.intersection(_ids(m)) and not any(key in homes for key in _ids(m)):
                self._call(name, m)

    def _open(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.open()

    def _initialise(self, name: str, m: nn.Module, homes: dict[int, Bucket]) -> None:
        """Initialises a module unless its parameters were initialised already: of modules that share parameters the
        first counts."""
        mine = _ids(m)
        if self.params.intersection(mine):
            self._open([homes[key] for key in mine if key in homes])
            self._call(name, m)
            self.params.difference_update(mine)

    def _call(self, name: str, m: nn.Module) -> None:
        if self.init is None:
            return
        uncut = uncut_of(m)
        whole = m if uncut is None else uncut.open(m, self.room)
        before = _ids(whole)
        with torch.no_grad(), self.device:
            self.init(whole)
        if _ids(whole) != before:
            raise InvalidArgumentError(
                f"{self.call}: rank {self.rank} saw that initialising {name or 'the module'} put other parameters into "
                "it, expected values to be written into those that are there; use torch.nn.init"
            )
        if uncut is not None:
            uncut.close(m)

    def _make_buffers(self) -> None:
        made: dict[int, torch.Tensor] = {}
        for _, m in self.modules:
            for key, buffer in m._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = torch.full_like(buffer, unmade(buffer), device=self.device)
                m._buffers[key] = new = made[id(buffer)]
                self.buffers.append((m, key, new))

    def left_in(self, flat: ShardedModel, earlier: Sequence[Unmade | None] = ()) -> Unmade | None:
        """Returns what must be loaded before the first forward pass; None: nothing.

        Args:
            earlier: what was left to load in parts of the model.
        """
        places = [(bucket, i) for bucket in flat.buckets for i, p in enumerate(bucket.params) if id(p) in self.params]
        found = [Unmade(places, self.buffers)] if self.init is None and self.modules else []
        found += {id(each): each for each in earlier if each is not None}.values()
        if not found:
            return None
        return Unmade([x for each in found for x in each.places], [x for each in found for x in each.buffers])


class Unmade:
    """Parameters and buffers that came from meta and have no values yet."""

    def __init__(self, places: list[tuple[Bucket, int]], buffers: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
        self.places, self.buffers = places, buffers
        self._versions = [made._version for _, _, made in buffers]

    def check(self, ranks: DataParallelGroup, module: nn.Module, call: str) -> None:
        """Raises if a parameter or buffer was not written yet; a collective."""
        flags = torch.tensor([int(self._is_written(*place)) for place in self.places] or [1], dtype=torch.uint8)
        flags = flags.to(self.places[0][0].device) if self.places else flags
        ranks.reduce_over_all(flags, "max")
        written = zip(self.places, flags.tolist(), strict=False)
        missing = [bucket.names[i] for (bucket, i), flag in written if not flag]
        owners = {id(m): f"{name}." if name else "" for name, m in module.named_modules()}
        for (m, key, made), version in zip(self.buffers, self._versions, strict=True):
            if _is_untouched(m._buffers[key], made, version):
                missing.append(owners.get(id(m), "") + key)
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise InvalidArgumentError(
                f"{call}: rank {ranks.rank} got {', '.join(missing[:_NAMED])}{more} from the meta device without "
                "values, expected all to be initialised or loaded; call load_state_dict or ringcomm.checkpoint.load, "
                "or pass init_fn to ringcomm.shard"
            )

    def _is_written(self, bucket: Bucket, i: int) -> bool:
        """Whether this rank's part of a parameter has values."""
        piece = bucket.piece(bucket.master, i)
        return not bucket.layout.segments[i].numel or (piece.numel() > 0 and not is_unmade(piece))


def _is_untouched(now: Any, made: Any, version: int) -> bool:
    if now is not made or not made.numel():
        return False
    return made._version == version if made.dtype == torch.bool else is_unmade(made)


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every submodule once, after the submodules inside it, in the order in which constructors make them."""
    names = {id(m): name for name, m in module.named_modules()}
    seen: set[int] = set()

    def walk(m: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(m) not in seen:
            seen.add(id(m))
            for child in m.children():
                yield from walk(child)
            yield names[id(m)], m

    return walk(module)


def _has_meta(m: nn.Module) -> bool:
    own = [*m._parameters.values(), *m._buffers.values()]
    return any(x is not None and x.is_meta for x in own)


def _ids(m: nn.Module) -> list[int]:
    return [id(p) for p in m._parameters.values() if p is not None]
