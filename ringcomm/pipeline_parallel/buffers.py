"""Keeps the buffers of modules that belong to no single stage, such as the model's own buffers, equal on all ranks.
Every stage runs the code that writes into them, but only up to the stage's end, so only the last stage has the values
of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringcomm.comm.communicator import Communicator
from ringcomm.errors import InvalidArgumentError
from ringcomm.pipeline_parallel.shape_only import ShapeOnlyTensor, make_plain, overwrites, reads
from ringcomm.pipeline_parallel.side_effects import TensorShape, version_of


class Buffers:
    """The buffers of modules that are split over several stages, on this rank. During a step each stage has its own
    values; after a batch all ranks have the values of the last stage that has any.

    Args:
        modules: these modules, by name.
        mine: this rank's stages.
    """

    def __init__(self, modules: Mapping[str, nn.Module], mine: Sequence[int], stages: int) -> None:
        self.mine, self.last = mine, stages - 1
        self._places = [(m, key, f"{name}.{key}" if name else key) for name, m in modules.items() for key in m._buffers]
        self._before: list[tuple[Any, int]] = []  # the buffers when the batch began, and their versions
        self._own: dict[int, list[Any]] = {}  # the values of each of this rank's stages, except the last of them
        self._read: set[tuple[int, int]] = set()  # (stage, number of a buffer that it read before its end)

    def begin(self) -> None:
        """Begins a batch: records the buffers' versions, and copies their values for each of this rank's stages."""
        here = self._here()
        self._before = [(x, version_of(x)) for x in here]
        self._own = {stage: [x if x is None else x.clone() for x in here] for stage in sorted(self.mine)[:-1]}
        self._read.clear()

    def _here(self) -> list[Any]:
        return [module._buffers.get(key) for module, key, _ in self._places]

    def _set(self, values: Sequence[Any]) -> None:
        for (module, key, _), x in zip(self._places, values, strict=True):
            module._buffers[key] = x

    @contextmanager
    def of(self, stage: int) -> Iterator[Callable[[Any, Any, Any], None]]:
        """Gives the buffers the stage's values while it runs. Yields a function that must be called with each function
        of torch and its arguments, before that function."""
        others = self._here()
        if stage in self._own:
            self._set(self._own[stage])
        fresh: set[int] = set()
        numbers = {id(x): i for i, x in enumerate(self._here())} if stage < self.last else {}

        def before(func: Any, args: Any, kwargs: Any) -> None:
            if numbers:
                fresh.update(map(id, overwrites(func, args)))
                found = {id(x) for x in reads(func, args, kwargs)} - fresh
                self._read |= {(stage, numbers[each]) for each in found if each in numbers}

        try:
            yield before
        finally:
            if stage in self._own:
                self._own[stage] = self._here()
                self._set(others)

    def changed(self) -> list[float]:
        """Returns 1 for each buffer that the batch changed on this rank, else 0."""
        now = zip(self._here(), self._before, strict=True)
        return [
            float(x is not old or isinstance(x, ShapeOnlyTensor) or version_of(x) != version)
            for x, (old, version) in now
        ]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def sync(self, changed: torch.Tensor, comm: Communicator, rank_of: Sequence[int], several: bool) -> None:
        """Gives all ranks the values of the last stage; a collective if a buffer has changed.

        Args:
            changed: the result of the method `changed` on the last stage's rank, as a tensor on the ranks' device.
            several: whether the batch had several micro-batches.
        Raises: InvalidArgumentError, on all ranks: a stage has read a buffer that a later stage writes.
        """
        numbers, device = [i for i, each in enumerate(changed.tolist()) if each], changed.device
        if not numbers:
            return
        values = {stage: self._own.get(stage, self._here()) for stage in self.mine}
        mine = [{stage: _shape_of(its[i]) for stage, its in values.items()} for i in numbers]
        everyone = comm.all_gather_object(mine)
        stale = ""
        for at, i in enumerate(numbers):
            known = {stage: found for theirs in everyone for stage, found in theirs[at].items() if found is not None}
            if not known:
                continue
            stage = max(known)
            shape, dtype, owner = known[stage].shape, known[stage].dtype, rank_of[stage]
            (module, key, name), before = self._places[i], self._before[i][0]
            here = values[stage][i] if owner == comm.rank else torch.empty(shape, dtype=dtype, device=device)
            data = here.detach().contiguous()
            comm.broadcast(data.view(-1).view(torch.uint8), owner)
            for stage, its in values.items():
                if several and (stage, i) in self._read and not _is_same(its[i], data):
                    stale = (
                        f"Pipeline: rank {comm.rank} ran stage {stage}, whose forward reads the buffer {name}, which a "
                        "later stage changed in the previous micro-batch, expected forward to write it before reading "
                        "it; keep it in a module of one stage, or cut the model elsewhere"
                    )
            own = module._buffers.get(key)
            if own is before is not None and not own.is_inference() and (own.shape, own.dtype) == (shape, dtype):
                with torch._C.DisableTorchFunctionSubclass():
                    make_plain(own)
                    if own is not here:
                        own.copy_(data)
            elif own is not here:
                module._buffers[key] = data
        refusal = next((each for each in comm.all_gather_object(stale) if each), None)
        if refusal is not None:
            raise InvalidArgumentError(refusal)


def _shape_of(x: Any) -> TensorShape | None:
    """Returns the shape and type of a buffer that has values here."""
    return None if x is None or isinstance(x, ShapeOnlyTensor) else TensorShape(tuple(x.shape), x.dtype)


def _is_same(x: Any, data: torch.Tensor) -> bool:
    if x is None or isinstance(x, ShapeOnlyTensor) or (x.shape, x.dtype) != (data.shape, data.dtype):
        return isinstance(x, ShapeOnlyTensor)
    return torch.equal(x, data) or bool(torch.isclose(x, data, rtol=0, atol=0, equal_nan=True).all())
