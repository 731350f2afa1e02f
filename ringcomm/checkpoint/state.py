"""Collects the contents of a checkpoint from a model and its optimizer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringcomm.checkpoint.contents import (
    OptimizerParams,
    boxes_in,
    is_writer,
    name_of,
    names_of_params,
    replicated_of,
    saved_ranges,
    unsharded_shape,
    with_extra_state,
)
from ringcomm.checkpoint.files import ShardSavePlanner, pack_value
from ringcomm.checkpoint.world import World
from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.state import State, is_alike
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.shard_spec import part_of

COMMON, EACH = ("ringcomm", "common"), ("ringcomm", "ranks")
ABOUT, GROUPS, STATE = ("optimizer", "about"), ("optimizer", "param_groups"), ("optimizer", "state")


class ByRank(dict[int, Any]):
    """A value that differed between the ranks that saved, by rank; `load` returns it at another world size or mesh."""


@dataclass
class _Facts:
    """The information that ranks exchange before they write.

    Attributes:
        digests: digests of the values that may differ, by kind and name.
        alike, other: kinds of optimizer state: with one value per element, and all others.
        primary: parameters whose values only this rank writes.
        groups: names of the parameters in each of the optimizer's groups, and a digest of the hyperparameters.
        frozen: names of the parameters that are not trained.
    """

    digests: dict[tuple[str, str], bytes]
    alike: set[str]
    other: set[str]
    primary: list[str]
    groups: list[tuple[list[str], bytes]]
    frozen: set[str]


class Saver:
    """Collects what this rank writes into a checkpoint, in two steps: `facts`, which the ranks exchange, and then
    `planner`."""

    def __init__(
        self, flat: ShardedModel, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any], world: World
    ) -> None:
        self.flat, self.optimizer, self.world, self.rank = flat, optimizer, world, world.rank
        self.mine: dict[str, dict[str, Any]] = {"extra": extra, "module": {}, "optimizer": {}}
        self.replicated, self.ranges = replicated_of(flat), saved_ranges(flat)

    def facts(self) -> _Facts:
        """Returns this rank's facts; raises for values that cannot be saved."""
        self.masters = {bucket: bucket.written_master("checkpoint") for bucket in self.flat.buckets}
        self.held = OptimizerParams.of(self.flat, self.optimizer, "save")
        self.mine["module"] = {names[0]: tensor.detach().cpu().clone() for names, tensor in self.replicated}
        for name, module in with_extra_state(self.flat):
            self.mine["module"][name] = module.get_extra_state()
        plain = {(name, key): v for name, p in self.held.plain.items() for key, v in self._state(p).items()}
        for path, value in [*plain.items(), *(((key,), value) for key, value in self._common_state().items())]:
            mine = value.detach().cpu() if torch.is_tensor(value) else value
            self.mine["optimizer"][".".join((*STATE, *path))] = mine
        facts = _Facts({}, set(), set(), [], [], set())
        for kind, values in self.mine.items():
            for key, value in values.items():
                facts.digests[kind, key] = self._digest(key, value)
        for group, names in self._groups():
            facts.groups.append((names, self._digest("the optimizer's param_groups", settings_of(group))))
        for bucket in self.flat.buckets:
            for i, p in enumerate(bucket.params):
                if is_writer(bucket, i):
                    facts.primary.append(name_of(bucket, i))
                if not p.requires_grad:
                    facts.frozen.add(name_of(bucket, i))
        for p in [*(p for _, _, _, p in self.held.ranges), *self.held.plain.values()]:
            for key, value in self._state(p).items():
                (facts.alike if is_alike(key, value, p) else facts.other).add(key)
        return facts

    def _digest(self, what: str, value: Any) -> bytes:
        with contextlib.suppress(RecursionError):  # a dict that holds itself
            value = _unshared_copy(value)
        return hashlib.sha256(pack_value(self.rank, what, value)).digest()

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        if self.optimizer is not None:
            yield from zip(self.optimizer.param_groups, self.held.names, strict=True)

    def _state(self, param: torch.Tensor) -> State:
        found: State = {} if self.optimizer is None else self.held.states(self.optimizer).get(param, {})
        return found

    def _common_state(self) -> dict[str, Any]:
        """Returns the optimizer's state that belongs to no parameter, such as ``state["generator"]``."""
        states = {} if self.optimizer is None else self.held.states(self.optimizer)
        found = {key: value for key, value in states.items() if not torch.is_tensor(key)}
        for key in found:
            if not isinstance(key, str):
                raise UnsupportedError(
                    f"save: rank {self.rank} got an optimizer with {key!r} in its state, expected parameters and "
                    "strings; use a string"
                )
        return found

    def planner(self, everyone: list[_Facts]) -> ShardSavePlanner:
        """Returns this rank's share of the checkpoint."""
        out = ShardSavePlanner(self.rank)
        self._refuse_two_primary_copies(everyone)
        self._refuse_other_groups(everyone)
        if self.world.replica == 0:  # other replicas have the same values
            self._add_parameters(out)
            self._add_optimizer_state(out)
        keys = sorted({key for facts in everyone for key in facts.digests})
        differing = [key for key in keys if self._differs(key, everyone)]
        own: dict[str, dict[str, Any]] = {kind: {} for kind in self.mine}
        for kind, key in differing:
            if key in self.mine[kind]:
                own[kind][key] = self.mine[kind][key]
        if differing:
            out.add_value((*EACH, str(self.rank)), own)
        self._add_replicated(out, everyone)
        if self.rank == 0:
            alike = set().union(*(facts.alike for facts in everyone)) - set().union(
                *(facts.other for facts in everyone)
            )
            self._add_common(out, {key for kind, key in differing if kind == "extra"}, sorted(alike), everyone)
        return out

    def _differs(self, key: tuple[str, str], everyone: list[_Facts]) -> bool:
        """Whether the ranks' values differ; for a module and its optimizer only the ranks that have the value are
        compared."""
        found = {facts.digests.get(key) for facts in everyone}
        if key[0] == "module" or (key[0] == "optimizer" and self.flat.ranks.mesh is not None):
            found.discard(None)
        return len(found) > 1

    def _refuse_two_primary_copies(self, everyone: list[_Facts]) -> None:
        first: dict[str, int] = {}
        for rank, facts in enumerate(everyone):
            for name in facts.primary:
                if first.setdefault(name, rank) != rank:
                    raise InvalidArgumentError(
                        f"save: rank {self.rank} got {name} both from rank {first[name]} and from rank {rank}, which "
                        "differ along a mesh axis that splits models, expected it from only one of them; use a "
                        "Pipeline over that axis, or a mesh without it"
                    )

    def _add_parameters(self, out: ShardSavePlanner) -> None:
        for bucket in self.flat.buckets:
            for i, first, last in spans_of(bucket, *self.ranges[bucket]):
                if not bucket.is_primary_copy(i):
                    continue
                name, values = name_of(bucket, i), self.masters[bucket][first - bucket.start : last - bucket.start]
                out.add_boxes((name,), boxes_in(bucket, i, name, values, first))

    def _add_optimizer_state(self, out: ShardSavePlanner) -> None:
        for bucket, first_here, end_here, param in self.held.ranges:
            start, end = self.ranges[bucket]
            spans = spans_of(bucket, max(start, first_here), min(end, end_here))
            spans = [each for each in spans if self.held.has_state(bucket, each[0]) and bucket.is_primary_copy(each[0])]
            for key, value in self._state(param).items():
                for i, first, last in spans:
                    segment, path = bucket.layout.segments[i], (*STATE, name_of(bucket, i), key)
                    if is_alike(key, value, param):
                        values = segment.flatten(value)[first - first_here : last - first_here]
                        out.add_boxes(path, boxes_in(bucket, i, ".".join(path), values, first))
                        continue
                    refuse_sharded_state("save", self.rank, bucket, i, key, value)
                    if first == segment.offset and (self.world.ranks.mesh is None or self.world.ranks.mesh.counts):
                        out.add_state(path, value)  # only one of the ranks that have the value writes it

    def _add_replicated(self, out: ShardSavePlanner, everyone: list[_Facts]) -> None:
        """Adds the values that are written by the first rank that has them."""

        def is_first(key: tuple[str, str]) -> bool:
            return next(rank for rank, facts in enumerate(everyone) if key in facts.digests) == self.rank

        param_names = names_of_params(self.flat)
        for bucket in self.flat.buckets:
            for i, p in enumerate(bucket.params):
                if is_writer(bucket, i):
                    first, *others = param_names[id(p)]
                    if not bucket.layout.segments[i].numel:
                        out.add_tensor((first,), unsharded_shape(bucket, i), bucket.master[:0])
                    out.aliases[first] = others
        for names, tensor in self.replicated:
            if is_first(("module", names[0])):
                out.add_tensor((names[0],), tensor.shape, tensor)
                out.aliases[names[0]] = names[1:]
        for name, _ in with_extra_state(self.flat):
            if is_first(("module", name)):
                out.add_value((name,), self.mine["module"][name])
        for name, p in self.held.plain.items():
            for key, value in self._state(p).items():
                if is_first(("optimizer", ".".join((*STATE, name, key)))):
                    out.add_state((*STATE, name, key), value)
        for key, value in self._common_state().items():
            if is_first(("optimizer", ".".join((*STATE, key)))):
                out.add_state((*STATE, key), value)

    def _add_common(self, out: ShardSavePlanner, differing: set[str], alike: list[str], everyone: list[_Facts]) -> None:
        """Adds the values that one rank writes for all."""
        extra = {key: value for key, value in self.mine["extra"].items() if key not in differing}
        world = {"world_size": self.world.world_size, "axes": self.world.axes}
        about = {"version": 1, **world, "stage": self.flat.stage, "extra": extra}
        out.add_value(COMMON, about)
        if self.optimizer is not None:
            frozen = sorted(set().union(*(facts.frozen for facts in everyone)))
            kind = {"class": type(self.optimizer).__name__, "alike": alike, "frozen": frozen}
            out.add_value(ABOUT, kind)
            names = merge_group_names([[names for names, _ in facts.groups] for facts in everyone])
            groups = [
                {**settings_of(group), "params": of} for (group, _), of in zip(self._groups(), names, strict=True)
            ]
            out.add_value(GROUPS, groups)

    def _refuse_other_groups(self, everyone: list[_Facts]) -> None:
        """Raises if the optimizers of a pipeline's stages have different groups, because they are saved as one
        optimizer's."""
        if self.world.ranks.mesh is None:
            return
        mine = [settings for _, settings in everyone[self.rank].groups]
        for rank, facts in enumerate(everyone):
            theirs = [settings for _, settings in facts.groups]
            if len(theirs) != len(mine):
                raise InvalidArgumentError(
                    f"save: rank {self.rank} got an optimizer of {len(mine)} parameter groups where rank {rank} has "
                    f"{len(theirs)}, expected the same groups on every rank of a mesh; leave groups empty where a "
                    "stage has no such parameters"
                )
            number = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
            if number is not None:
                raise InvalidArgumentError(
                    f"save: rank {self.rank} got other hyperparameters in the optimizer's group {number} than rank "
                    f"{rank} has, expected the same on every rank of a mesh; make the same groups on every stage"
                )


def _unshared_copy(value: Any) -> Any:
    """Returns an equal value in which no object occurs twice. Pickle writes a repeated object only once, so equal
    values could have different bytes."""
    kind = type(value)
    if kind is dict:
        return {_unshared_copy(key): _unshared_copy(each) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(map(_unshared_copy, value))
    if kind is str:
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    if kind is bytes:
        return bytes(bytearray(value))
    if torch.is_tensor(value):
        return value.detach().clone()
    return value.copy() if kind is np.ndarray else value


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer group's hyperparameters, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def merge_group_names(groups: list[list[list[str]]]) -> list[list[str]]:
    """Returns the names in each of an optimizer's groups, over all ranks."""
    return [list(dict.fromkeys(name for names in each for name in names)) for each in zip(*groups, strict=True)]


def refuse_sharded_state(call: str, rank: int, bucket: Bucket, i: int, key: str, value: Any) -> None:
    """Raises for state with another shape than its parameter's, because its parts cannot be determined."""
    if torch.is_tensor(value) and value.numel() > 1 and part_of(bucket.params[i]).is_cut:
        raise UnsupportedError(
            f"{call}: rank {rank} got {key} of shape {tuple(value.shape)} of {name_of(bucket, i)}, which is cut over "
            "the ranks of a tensor parallel group, expected state of the parameter's shape; use an optimizer that "
            "works element by element"
        )


def spans_of(bucket: Bucket, start: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the segments in a range of a bucket's buffer: index, first element in the range, one past the last."""
    return [
        (each.segment, start + each.offset, start + each.offset + each.numel)
        for each in bucket.layout.fragments(start, end)
    ]
