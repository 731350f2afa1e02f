"""Initialises models that were built on the meta device: each unit in turn gets memory, is initialised and is
sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.layout import up
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.meta import value_of_uninitialized
from ringcomm.modules.unsplit import unsplit_of

InitFn = Callable[[nn.Module], Any]
NewBuffer = tuple[nn.Module, str, torch.Tensor, int]
"""A buffer that took the place of one on meta: its module, its name, the tensor, and the tensor's version."""
_ALIGNED = 64  # bytes


class MetaModules:
    """The submodules with parameters or buffers on meta, children first, in the order of their construction. A
    submodule whose parameters on meta are all ignored is left out.

    Args:
        params: ids of the parameters that are not ignored.
        init: called for each of the submodules; None: the submodule's own `reset_parameters`; False: nothing is
            initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Collection[int],
        device: torch.device,
        init: InitFn | bool | None,
        call: str,
        rank: int,
    ) -> None:
        self.device, self.call, self.rank = device, call, rank
        self.memory = torch.empty(0, dtype=torch.uint8)  # reused for one unsplit module after another
        self.modules = [(name, m) for name, m in _children_first(module) if _waits(m, params)]
        self.params = {key for _, m in self.modules for key in _meta_params(m) if key in params}
        self.init: InitFn | None = None if init is False else init if callable(init) else self._reset
        if init is None:
            for name, m in self.modules:
                self._reset_of(name, m)
        self.opened: dict[Bucket, torch.Tensor] = {}  # the values of buckets that are being initialised
        self.buffers: list[NewBuffer] = []
        self.recurrent = [m for _, m in self.modules if isinstance(m, nn.RNNBase)]
        # Until the parameters have memory, because `give_memory` needs parameters without weak references.
        for m in self.recurrent:
            m._flat_weight_refs = []

    def _reset_of(self, name: str, m: nn.Module) -> Callable[[], Any]:
        unsplit = unsplit_of(m)
        m = m if unsplit is None else unsplit.module
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

    def initialise(self, units: Sequence[Sequence[Bucket]]) -> None:
        """Gives each unit memory when its first submodule is initialised, and keeps only this rank's part after its
        last one; a collective.

        Submodules are initialised in the order of their construction, so that random values depend neither on the
        units nor on the size of the buckets.

        Args:
            units: by unit, its buckets.
        """
        if not self.modules:
            return
        self._make_buffers()
        if self.init is None:
            for buckets in units:
                self._open(buckets)
                self._close(buckets)
        else:
            homes = {id(p): buckets for buckets in units for bucket in buckets for p in bucket.params}
            self._call_all(self.init, homes)
        for m in self.recurrent:
            m._flat_weight_refs = [None if p is None else weakref.ref(p) for p in m._flat_weights]

    def _call_all(self, init: InitFn, homes: dict[int, Sequence[Bucket]]) -> None:
        """Calls ``init`` for the submodules.

        Args:
            homes: by id of a parameter, the buckets of its unit.
        """
        units = [[homes[key] for key in _ids(m) if key in homes] for _, m in self.modules]
        last = {id(buckets): i for i, needed in enumerate(units) for buckets in needed}
        for i, ((name, m), needed) in enumerate(zip(self.modules, units, strict=True)):
            for buckets in needed:
                self._open(buckets)
            # Of several modules that share their parameters, only the first is initialised.
            if not needed or self.params.intersection(_ids(m)):
                self._call(init, name, m)
                self.params.difference_update(_ids(m))
            for buckets in needed:
                if last[id(buckets)] == i:
                    self._close(buckets)

    def _open(self, buckets: Iterable[Bucket]) -> None:
        """Gives memory to each bucket that has parameters on meta and is not open yet."""
        for bucket in buckets:
            if bucket not in self.opened and not self.params.isdisjoint(map(id, bucket.params)):
                self.opened[bucket] = bucket.open(self.params)

    def _close(self, buckets: Iterable[Bucket]) -> None:
        """Keeps this rank's part of the buckets that are open; a collective."""
        for bucket in buckets:
            if bucket in self.opened:
                bucket.take_values(self.opened.pop(bucket), send=self.init is not None)

    def _call(self, init: InitFn, name: str, m: nn.Module) -> None:
        unsplit = unsplit_of(m)
        opened = m if unsplit is None else unsplit.open(m, self._give_memory)
        before = _ids(opened)
        with torch.no_grad(), self.device:
            init(opened)
        if _ids(opened) != before:
            raise InvalidArgumentError(
                f"{self.call}: rank {self.rank} saw that initialising {name or 'the module'} replaced its parameters, "
                "expected values to be written into the existing ones; use torch.nn.init"
            )
        if unsplit is not None:
            unsplit.close(m)

    def _give_memory(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns memory for tensors on meta, valid until the next call. It is reused, because separate allocations
        would fragment the heap."""
        sizes = [up(x.nbytes, _ALIGNED) for x in tensors]
        if self.memory.numel() < sum(sizes):
            self.memory = self.memory.new_empty(0)  # frees the old memory first
            self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        parts = self.memory[: sum(sizes)].split(sizes)
        made = [part[: x.nbytes].view(x.dtype).view(x.shape) for x, part in zip(tensors, parts, strict=True)]
        return [x.fill_(value_of_uninitialized(x)) for x in made]

    def _make_buffers(self) -> None:
        made: dict[int, torch.Tensor] = {}
        for _, m in self.modules:
            for key, buffer in m._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = torch.full_like(buffer, value_of_uninitialized(buffer), device=self.device)
                m._buffers[key] = new = made[id(buffer)]
                self.buffers.append((m, key, new, new._version))


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


def _waits(m: nn.Module, params: Collection[int]) -> bool:
    meta = _meta_params(m)
    if meta:
        return any(key in params for key in meta)
    return any(x is not None and x.is_meta for x in m._buffers.values())


def _meta_params(m: nn.Module) -> list[int]:
    return [id(p) for p in m._parameters.values() if p is not None and p.is_meta]


def _ids(m: nn.Module) -> list[int]:
    return [id(p) for p in m._parameters.values() if p is not None]
