"""Loads a checkpoint into a model and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.checkpoint.contents import (
    BucketRange,
    OptimizerParams,
    Replicated,
    boxes_in,
    name_of,
    names_of_params,
    replicated_of,
    unsharded_shape,
    with_extra_state,
)
from ringcomm.checkpoint.files import Names, Source
from ringcomm.checkpoint.state import (
    ABOUT,
    COMMON,
    EACH,
    GROUPS,
    STATE,
    ByRank,
    merge_group_names,
    refuse_sharded_state,
    settings_of,
    spans_of,
)
from ringcomm.checkpoint.world import World
from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.model.sharded_model import ShardedModel
from ringcomm.data_parallel.optim.optimizer import ShardedOptimizer
from ringcomm.data_parallel.optim.state import State, in_shape_of
from ringcomm.errors import InvalidArgumentError


class Loader:
    """Loads a checkpoint into a model in two steps: `read` changes nothing, `commit` changes everything."""

    def __init__(self, flat: ShardedModel, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        self.flat, self.optimizer, self.world, self.rank = flat, optimizer, world, world.rank
        self.masters: list[torch.Tensor] = []
        self.replicated: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.extra_states: list[tuple[nn.Module, Any]] = []
        self.states: list[tuple[torch.Tensor, State]] = []
        self.common_state: dict[str, Any] = {}
        self.hyperparameters: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.sharded: ShardedOptimizer | None = None
        self.stepped: dict[Bucket, set[int]] = {}

    def _wrong(self, got: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"load: rank {self.rank} got {got}, expected {expected}; load a checkpoint of this model and optimizer"
        )

    def facts(self) -> tuple[set[str], list[list[str]]]:
        """Returns the names of this rank's tensors of the model, and the names in each of the optimizer's groups."""
        of_tensors = [*names_of_params(self.flat).values(), *(names for names, _ in replicated_of(self.flat))]
        names = {name for names in of_tensors for name in names} | dict(with_extra_state(self.flat)).keys()
        return names, OptimizerParams.of(self.flat, self.optimizer, "load").names

    def read(self, path: Path, everyone: list[tuple[set[str], list[list[str]]]]) -> int:
        """Reads the checkpoint into separate memory, and raises for anything wrong.

        Args:
            everyone: the results of `facts`, by rank.
        Returns: `Source.digest` of the checkpoint.
        """
        self.source = Source(path, "load", self.rank)
        own = self._read_extra()
        self._refuse_unknown(set().union(*(names for names, _ in everyone)))
        self._read_masters()
        for each in replicated_of(self.flat):
            self._read_replicated(each, own.get("module", {}))
        for name, module in with_extra_state(self.flat):
            if name not in self.source.paths:
                raise self._wrong(f"a checkpoint without {name}", "the result of get_extra_state")
            self.extra_states.append((module, own.get("module", {}).get(name, self.source.value((name,)))))
        if self.optimizer is not None:
            self._read_optimizer(self.optimizer, own.get("optimizer", {}), [groups for _, groups in everyone])
        return self.source.digest

    def _read_extra(self) -> dict[str, dict[str, Any]]:
        """Fills `extra`; returns the values that this rank saved for itself."""
        source = self.source
        if not source.has_value(COMMON):
            return {}  # written by torch.distributed.checkpoint
        about = source.value(COMMON)
        if not source.has_checksums:
            raise self._wrong("a checkpoint without its checksums", "all of its files")
        self.extra = dict(about["extra"])
        if about["world_size"] == self.world.world_size and about.get("axes", self.world.axes) == self.world.axes:
            mine = (*EACH, str(self.rank))
            own = source.value(mine) if source.has_value(mine) else {"extra": {}, "module": {}}
            self.extra |= own["extra"]
            return dict(own)
        for rank in range(about["world_size"]):
            theirs = (*EACH, str(rank))
            for key, value in source.value(theirs)["extra"].items() if source.has_value(theirs) else ():
                self.extra.setdefault(key, ByRank())[rank] = value
        return {}

    def _refuse_unknown(self, names: set[str]) -> None:
        for name, path in self.source.paths.items():
            if name not in names and (len(path) == 1 or path[0] not in ("optimizer", "ringcomm")):
                raise self._wrong(f"{name}, which the module does not have", "a checkpoint of its parameters")

    def _read_masters(self) -> None:
        names = names_of_params(self.flat)
        for bucket in self.flat.buckets:
            master = torch.zeros(bucket.end - bucket.start, dtype=bucket.types.master)  # zeros for the padding
            for i, p in enumerate(bucket.params):
                self._check(names[id(p)], unsharded_shape(bucket, i), bucket.types.master)
            for i, first, last in spans_of(bucket, bucket.start, bucket.end):
                name = self._name(names[id(bucket.params[i])])
                values = master[first - bucket.start : last - bucket.start]
                self.source.read(boxes_in(bucket, i, name, values, first))
            self.masters.append(master)

    def _name(self, names: list[str]) -> str:
        """Returns the name under which a parameter was saved."""
        return next((name for name in names if name in self.source.paths), names[0])

    def _check(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.source.check(self._name(names), shape, dtype)

    def _read_replicated(self, each: Replicated, own: dict[str, Any]) -> None:
        names, tensor = each
        self._check(names, tuple(tensor.shape), tensor.dtype)
        mine = own.get(names[0])
        self.replicated.append((tensor, self.source.tensor(self._name(names)) if mine is None else mine))

    # ---- optimizer -----------------------------------------------------------------------------------------------

    def _read_optimizer(
        self, optimizer: torch.optim.Optimizer, own: dict[str, Any], everyone: list[list[list[str]]]
    ) -> None:
        held = OptimizerParams.of(self.flat, optimizer, "load")
        kind = type(optimizer).__name__
        if not self.source.has_value(ABOUT):
            raise self._wrong("a checkpoint without an optimizer", f"one with the state of {kind}")
        about = self.source.value(ABOUT)
        if about["class"] != kind:
            raise self._wrong(f"the state of {about['class']}", f"that of {kind}")
        groups = self.source.value(GROUPS)
        if len({len(names) for names in everyone}) > 1:
            counts = [len(names) for names in everyone]
            raise self._wrong(f"optimizers of {', '.join(map(str, counts))} parameter groups", "as many on every rank")
        frozen = {*about.get("frozen", ())}  # these parameters have no state; if trained now, they begin without it
        self._check_groups([group["params"] for group in groups], held.names, merge_group_names(everyone), frozen)
        self.hyperparameters = [settings_of(each) for each in groups]
        keys: dict[str, list[str]] = {}
        for path in self.source.paths.values():
            if path[:2] == STATE and len(path) == 4:
                keys.setdefault(path[2], []).append(path[3])
            elif path[:2] == STATE:
                self.common_state[path[2]] = self._read_own(path, own)
        if held.sharded is not None:  # parameters that were not always trained together have separate counters
            held.sharded.separate(lambda bucket, i: self._counters(name_of(bucket, i), keys, {*about["alike"]}))
            held = OptimizerParams.of(self.flat, optimizer, "load")
        for bucket_range in held.ranges:
            self.states.append((bucket_range[-1], self._read_state(bucket_range, keys, {*about["alike"]})))
        for name, p in held.plain.items():
            self.states.append(
                (p, {key: self._read_plain(p, name, key, about["alike"], own) for key in keys.get(name, ())})
            )
        self.sharded = held.sharded
        self.stepped = {
            bucket: {i for i in range(len(bucket.params)) if name_of(bucket, i) in keys}
            for bucket in self.flat.buckets
            if bucket.trainable
        }

    def _check_groups(
        self, saved: list[list[str]], mine: list[list[str]], all_names: list[list[str]], frozen: set[str]
    ) -> None:
        if len(saved) != len(mine):
            raise self._wrong(f"an optimizer's state of {len(saved)} parameter groups", f"{len(mine)}")
        for number, (theirs, ours, of_all_ranks) in enumerate(zip(saved, mine, all_names, strict=True)):
            for name in ours:
                if name not in theirs and name not in frozen:
                    raise self._wrong(f"an optimizer's state without {name} in group {number}", "the same groups")
            for name in theirs:
                if name not in of_all_ranks:
                    raise self._wrong(f"an optimizer's state with {name} in group {number}", "the same groups")

    def _counters(self, name: str, keys: dict[str, list[str]], alike: set[str]) -> tuple[object, ...]:
        """Returns what parameters in one entry must have in common."""
        found: list[object] = [name in keys]
        for key in sorted(set(keys.get(name, ())) - alike):
            path = (*STATE, name, key)
            facts = self.source.tensors.get(".".join(path))
            value = self.source.value(path) if facts is None else None
            if facts is not None and facts.size.numel() == 1:
                value = self.source.tensor(".".join(path)).item()
            found.append((key, value if isinstance(value, (int, float)) else None))
        return tuple(found)

    def _read_state(self, bucket_range: BucketRange, keys: dict[str, list[str]], alike: set[str]) -> State:
        state: State = {}
        bucket, start, end, param = bucket_range
        names = [name_of(bucket, i) for i in range(len(bucket.params))]
        for i, first, last in spans_of(bucket, start, end):
            for key in keys.get(names[i], ()):
                name = ".".join((*STATE, names[i], key))
                facts = self.source.tensors.get(name)
                if key in alike and facts is not None:
                    self.source.check(name, unsharded_shape(bucket, i), facts.properties.dtype)
                    if key not in state:
                        dtype = self._state_type(names[i], facts.properties.dtype, param)
                        state[key] = torch.zeros(end - start, dtype=dtype)
                    values = state[key][first - start : last - start]
                    self.source.read(boxes_in(bucket, i, name, values, first))
                    continue
                value = self.source.value((*STATE, names[i], key)) if facts is None else self.source.tensor(name)
                refuse_sharded_state("load", self.rank, bucket, i, key, value)
                if key in state and not _same(state[key], value):
                    raise self._wrong(
                        f"{name} = {value}, where a parameter that travels with it has {state[key]}", "equal ones"
                    )
                state.setdefault(key, value)
        segment = bucket.layout.segments[bucket.layout.index_of(start)]
        return {key: in_shape_of(param, value, segment) if key in alike else value for key, value in state.items()}

    def _read_plain(self, p: torch.Tensor, name: str, key: str, alike: list[str], own: dict[str, Any]) -> Any:
        place = ".".join((*STATE, name, key))
        if place in self.source.tensors and key in alike:
            self.source.check(place, tuple(p.shape), self.source.tensors[place].properties.dtype)
        value = self._read_own((*STATE, name, key), own)
        return value.to(self._state_type(name, value.dtype, p)) if key in alike and torch.is_tensor(value) else value

    def _state_type(self, name: str, saved: torch.dtype, param: torch.Tensor) -> torch.dtype:
        """Returns the type of state that has a value for each element: its own, or the parameter's if it was saved in
        the type of the saved parameter."""
        facts = self.source.tensors.get(name)
        follows = saved.is_floating_point and (facts is None or facts.properties.dtype == saved)
        return param.dtype if follows else saved

    def _read_own(self, path: Names, own: dict[str, Any]) -> Any:
        """Returns this rank's value if the ranks' values differed, else the common value."""
        place = ".".join(path)
        if place in own:
            return own[place]
        return self.source.tensor(place) if place in self.source.tensors else self.source.value(path)

    # ---- into the model ------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Writes the loaded values into the model and the optimizer; a collective."""
        for unit in self.flat.units:
            unit.release()
        for bucket, master in zip(self.flat.buckets, self.masters, strict=True):
            for _, first, last in spans_of(bucket, bucket.start, bucket.end):
                bucket.master[first - bucket.start : last - bucket.start].copy_(
                    master[first - bucket.start : last - bucket.start]
                )
            bucket.sync_params_from_master().wait()
        for tensor, values in self.replicated:
            tensor.copy_(values)
        for module, value in self.extra_states:
            module.set_extra_state(value)
        if self.optimizer is not None:
            self._commit_optimizer(self.optimizer)

    def _commit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sharded is not None:
            for bucket, part in self.sharded.parts.items():
                part.stepped = self.stepped[bucket]
        for group, hyperparameters in zip(optimizer.param_groups, self.hyperparameters, strict=True):
            group.update(hyperparameters)
        inside = [group["params"] for group in optimizer.param_groups]
        states = optimizer.state
        if self.sharded is not None:
            inside, states = self.sharded.inside, self.sharded.state
        states.update(self.common_state)
        pairs = zip(optimizer.param_groups, inside, strict=True)
        settings = {id(p): group for group, params in pairs for p in params}
        for param, state in self.states:
            states.pop(param, None)
            if state:
                group = settings[id(param)]
                on_host = not (group.get("capturable") or group.get("fused"))
                states[param] = {
                    key: value.to(param.device) if torch.is_tensor(value) and not (key == "step" and on_host) else value
                    for key, value in state.items()
                }


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if torch.is_tensor(a) and torch.is_tensor(b) else bool(a == b)
