"""The ranks that save or load one checkpoint together, including those with other parts of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringcomm import errors
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.errors import EngineError, InvalidArgumentError, RingcommError


class World:
    """All ranks of a mesh, or, without a mesh, the ranks that share shards and their replicas.

    Attributes:
        axes: names and sizes of the axes on which the ranks are arranged, without axes of size one.
    """

    def __init__(self, ranks: DataParallelGroup, call: str) -> None:
        self.ranks, self.call, mesh = ranks, call, ranks.mesh
        self.replica = 0 if ranks.replicas is None else ranks.replicas.rank
        self.rank = ranks.rank + ranks.world_size * self.replica if mesh is None else mesh.comm.rank
        self.world_size = ranks.data_world_size if mesh is None else mesh.comm.world_size
        if mesh is not None:
            axes = [*zip(mesh.names, mesh.shape, strict=True)]
        else:
            axes = [("replicate", 1 if ranks.replicas is None else ranks.replicas.world_size), ("dp", ranks.world_size)]
        self.axes = [[{"shard": "dp"}.get(name, name), extent] for name, extent in axes if extent > 1]

    def _gather(self, mine: Any) -> list[Any]:
        """Gathers an object of every rank, in the order of `rank`."""
        if self.ranks.mesh is not None:
            return self.ranks.mesh.comm.all_gather_object(mine)
        found = self.ranks.comm.all_gather_object(mine)
        if self.ranks.replicas is None:
            return found
        return [each for row in self.ranks.replicas.all_gather_object(found) for each in row]

    def run_together(self, step: Callable[[], Any]) -> list[Any]:
        """Runs ``step`` on every rank and returns the ranks' results; if it raises on one rank, every rank raises."""
        error: Exception | None = None
        result: Any = None
        try:
            result = step()
        except OSError as refused:
            error = EngineError(
                f"{self.call}: rank {self.rank} got {type(refused).__name__} ({refused}), expected access to the "
                "checkpoint's folder; look at its disk"
            )
            error.__cause__ = refused
        except Exception as other:
            error = other
        replies = self._gather((None if error is None else (type(error).__name__, str(error)), result))
        if error is not None:
            raise error
        for rank, (failed, _) in enumerate(replies):
            if failed is not None:
                kind = getattr(errors, failed[0], None)
                if kind is None:
                    raise RingcommError(f"{self.call}: rank {rank} got {failed[0]}: {failed[1]}; see what it raised")
                raise kind(failed[1])
        return [result for _, result in replies]

    def refuse_another(self, what: str, path: Path, each: Sequence[Any]) -> None:
        """Raises on every rank if the ranks have different paths or checkpoints; ``each``: the facts of each rank."""
        for rank, its in enumerate(each):
            if its != each[0]:
                raise InvalidArgumentError(
                    f"{self.call}: rank {self.rank} got {path}, and rank {rank} another {what} than rank 0, expected "
                    "one for all ranks; pass the same path on every rank, to a folder that all of them see"
                )
