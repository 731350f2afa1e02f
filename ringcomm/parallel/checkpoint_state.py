"""What of a model and its optimizer goes into a checkpoint, and the way back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.errors import InvalidArgumentError
from ringcomm.parallel.checkpoint_files import Names, Outgoing, Source, pack_value, parts_of
from ringcomm.parallel.checkpoint_parts import (
    Held,
    Piece,
    Place,
    Whole,
    is_alike,
    names_of,
    places_of,
    wholes_of,
    with_extra_state,
)
from ringcomm.parallel.flat_model import FlatModel
from ringcomm.parallel.group import FlatGroup
from ringcomm.parallel.optimizer import Attached
from ringcomm.parallel.optimizer_state import State

COMMON, EACH = ("ringcomm", "common"), ("ringcomm", "ranks")
ABOUT, GROUPS, STATE = ("optimizer", "about"), ("optimizer", "param_groups"), ("optimizer", "state")


class ByRank(dict[int, Any]):
    """A value that differed between the ranks that saved, by rank: what `load` returns at another world size."""


# ---- saving ------------------------------------------------------------------------------------------------------


@dataclass
class _Facts:
    """What ranks tell one another before they write: digests of what may differ, and the kinds of optimizer state."""

    digests: dict[tuple[str, str], bytes]
    alike: set[str]
    other: set[str]


class Saving:
    def __init__(
        self, flat: FlatModel, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any], rank: int
    ) -> None:
        self.flat, self.optimizer, self.rank = flat, optimizer, rank
        self.mine: dict[str, dict[str, Any]] = {"extra": extra, "module": {}, "optimizer": {}}
        self.known = places_of(flat)
        self.wholes = wholes_of(flat, self.known)

    def look(self) -> _Facts:
        """Refuses what cannot be saved."""
        self.held = Held.of(self.flat, self.optimizer, "save")
        self.mine["module"] = {each.names[0]: each.tensor.detach().cpu().clone() for each in self.wholes}
        for name, module in with_extra_state(self.flat):
            self.mine["module"][name] = module.get_extra_state()
        for name, p in self.held.plain.items():
            for key, value in self._state(p).items():
                mine = value.detach().cpu() if torch.is_tensor(value) else value
                self.mine["optimizer"][".".join((*STATE, name, key))] = mine
        facts = _Facts({}, set(), set())
        for kind, values in self.mine.items():
            for key, value in values.items():
                packed = pack_value("save", self.rank, f"{key}", value)
                facts.digests[kind, key] = hashlib.sha256(packed).digest()
        self.groups = [{**group, "params": names} for group, names in self._groups()]
        self.packed_groups = pack_value("save", self.rank, "the optimizer's param_groups", self.groups)
        for p in [*(piece.param for piece in self.held.pieces), *self.held.plain.values()]:
            for key, value in self._state(p).items():
                (facts.alike if is_alike(key, value, p) else facts.other).add(key)
        return facts

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        if self.optimizer is not None:
            yield from zip(self.optimizer.param_groups, self.held.names, strict=True)

    def _state(self, param: torch.Tensor) -> State:
        return {} if self.optimizer is None else self.optimizer.state.get(param, {})

    def outgoing(self, everyone: list[_Facts]) -> Outgoing:
        """This rank's share of everything."""
        out = Outgoing()
        if self.rank < self.flat.ranks.world_size:  # others repeat these
            self._parameters(out)
            self._optimizer_state(out)
        keys = sorted({key for facts in everyone for key in facts.digests})
        differing = [key for key in keys if len({facts.digests.get(key) for facts in everyone}) > 1]
        own: dict[str, dict[str, Any]] = {kind: {} for kind in self.mine}
        for kind, key in differing:
            if key in self.mine[kind]:
                own[kind][key] = self.mine[kind][key]
        if differing:
            out.value((*EACH, str(self.rank)), pack_value("save", self.rank, "extra", own))
        if self.rank == 0:
            alike = set().union(*(facts.alike for facts in everyone)) - set().union(
                *(facts.other for facts in everyone)
            )
            self._for_all(out, {key for kind, key in differing if kind == "extra"}, sorted(alike))
        return out

    def _parameters(self, out: Outgoing) -> None:
        for group in self.flat.groups:
            start, end = group.layout.shard_range(self.flat.ranks.rank)
            for i, first, last in _spans(group, start, end):
                segment = group.layout.segments[i]
                values = group.master[first - group.start : last - group.start]
                out.tensor((segment.name,), segment.shape, values, first - segment.offset)

    def _optimizer_state(self, out: Outgoing) -> None:
        for piece in self.held.pieces:
            group = piece.group
            start, end = group.layout.shard_range(self.flat.ranks.rank)
            spans = _spans(group, max(start, piece.start), min(end, piece.end))
            spans = [each for each in spans if self.held.has_state(group, each[0])]
            for key, value in self._state(piece.param).items():
                for i, first, last in spans:
                    segment = group.layout.segments[i]
                    path = (*STATE, segment.name, key)
                    if is_alike(key, value, piece.param):
                        values = value.reshape(-1)[first - piece.start : last - piece.start]
                        out.tensor(path, segment.shape, values, first - segment.offset)
                    elif first == segment.offset:  # of all that have it, one writes
                        self._other(out, path, value)

    def _other(self, out: Outgoing, path: Names, value: Any) -> None:
        if torch.is_tensor(value):
            out.tensor(path, value.shape, value)
        else:
            out.value(path, pack_value("save", self.rank, ".".join(path), value))

    def _for_all(self, out: Outgoing, differing: set[str], alike: list[str]) -> None:
        """What one rank writes for all."""
        for group in self.flat.groups:
            for segment in group.layout.segments:
                if not segment.numel:
                    out.tensor((segment.name,), segment.shape, group.master[:0])
        for place in self.known.values():
            out.aliases[place.names[0]] = place.names[1:]
        for each in self.wholes:
            out.tensor((each.names[0],), each.tensor.shape, each.tensor)
            out.aliases[each.names[0]] = each.names[1:]
        for name, _ in with_extra_state(self.flat):
            out.value((name,), pack_value("save", self.rank, name, self.mine["module"][name]))
        extra = {key: value for key, value in self.mine["extra"].items() if key not in differing}
        about = {"version": 1, "world_size": self.flat.ranks.data_world_size, "stage": self.flat.stage, "extra": extra}
        out.value(COMMON, pack_value("save", self.rank, "extra", about))
        if self.optimizer is not None:
            kind = {"class": type(self.optimizer).__name__, "alike": alike}
            out.value(ABOUT, pack_value("save", self.rank, "optimizer", kind))
            out.value(GROUPS, self.packed_groups)
        for name, p in self.held.plain.items():
            for key, value in self._state(p).items():
                self._other(out, (*STATE, name, key), value)


def _spans(group: FlatGroup, start: int, end: int) -> list[tuple[int, int, int]]:
    """Segments in a range of a group's buffer: which, the first of its elements there, one past the last."""
    return [
        (each.segment, start + each.offset, start + each.offset + each.numel)
        for each in group.layout.fragments(start, end)
    ]


# ---- loading -----------------------------------------------------------------------------------------------------


class Loading:
    """A checkpoint's way into a model: `read` changes nothing, `commit` everything."""

    def __init__(self, flat: FlatModel, optimizer: torch.optim.Optimizer | None, rank: int, world_size: int) -> None:
        self.flat, self.optimizer, self.rank, self.world_size = flat, optimizer, rank, world_size
        self.masters: list[torch.Tensor] = []
        self.wholes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.extra_states: list[tuple[nn.Module, Any]] = []
        self.states: list[tuple[torch.Tensor, State]] = []
        self.hyperparameters: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.attached: Attached | None = None
        self.stepped: dict[FlatGroup, set[int]] = {}

    def _wrong(self, got: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"load: rank {self.rank} got {got}, expected {expected}; load a checkpoint of this model and optimizer"
        )

    def read(self, path: Path) -> None:
        """Into memory of its own, whatever is wrong is found here."""
        self.source = Source(path, "load", self.rank)
        own = self._read_extra()
        known = places_of(self.flat)
        wholes = wholes_of(self.flat, known)
        stateful = dict(with_extra_state(self.flat))
        self._refuse_unknown({*names_of(known, wholes), *stateful})
        self._read_masters(known)
        for each in wholes:
            self._read_whole(each, own.get("module", {}))
        for name, module in stateful.items():
            if name not in self.source.paths:
                raise self._wrong(f"a checkpoint without {name}", "what get_extra_state had given")
            self.extra_states.append((module, own.get("module", {}).get(name, self.source.value((name,)))))
        if self.optimizer is not None:
            self._read_optimizer(self.optimizer, own.get("optimizer", {}))

    def _read_extra(self) -> dict[str, dict[str, Any]]:
        """Fills `extra`; returns what was this rank's own."""
        source = self.source
        if not source.has_value(COMMON):
            return {}  # of torch.distributed.checkpoint
        about = source.value(COMMON)
        if not source.has_checksums:
            raise self._wrong("a checkpoint without its checksums", "all of its files")
        self.extra = dict(about["extra"])
        if about["world_size"] == self.world_size:
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

    def _read_masters(self, known: dict[int, Place]) -> None:
        for group in self.flat.groups:
            master = torch.empty(group.end - group.start, dtype=group.types.master)
            for i, p in enumerate(group.params):
                self._check(known[id(p)].names, group.layout.segments[i].shape, group.types.master)
            for i, first, last in _spans(group, group.start, group.end):
                segment = group.layout.segments[i]
                name = self._name(known[id(group.params[i])].names)
                values = master[first - group.start : last - group.start]
                self.source.read(parts_of(name, segment.shape, values, first - segment.offset))
            self.masters.append(master)

    def _name(self, names: list[str]) -> str:
        """The one under which a parameter was saved."""
        return next((name for name in names if name in self.source.paths), names[0])

    def _check(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.source.check(self._name(names), shape, dtype)

    def _read_whole(self, each: Whole, own: dict[str, Any]) -> None:
        self._check(each.names, tuple(each.tensor.shape), each.tensor.dtype)
        mine = own.get(each.names[0])
        self.wholes.append((each.tensor, self.source.tensor(self._name(each.names)) if mine is None else mine))

    # ---- optimizer -----------------------------------------------------------------------------------------------

    def _read_optimizer(self, optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> None:
        held = Held.of(self.flat, optimizer, "load")
        kind = type(optimizer).__name__
        if not self.source.has_value(ABOUT):
            raise self._wrong("a checkpoint without an optimizer", f"one with the state of {kind}")
        about = self.source.value(ABOUT)
        if about["class"] != kind:
            raise self._wrong(f"the state of {about['class']}", f"that of {kind}")
        groups = self.source.value(GROUPS)
        self._check_groups([group["params"] for group in groups], held.names)
        self.hyperparameters = [{key: value for key, value in each.items() if key != "params"} for each in groups]
        keys: dict[str, list[str]] = {}
        for path in self.source.paths.values():
            if path[:2] == STATE and len(path) == 4:
                keys.setdefault(path[2], []).append(path[3])
        if held.attached is not None:  # parameters that were not always trained together have counters of their own
            held.attached.separate(lambda group, i: self._counters(group.names[i], keys, {*about["alike"]}))
            held = Held.of(self.flat, optimizer, "load")
        for piece in held.pieces:
            self.states.append((piece.param, self._read_state(piece, keys, {*about["alike"]})))
        for name, p in held.plain.items():
            self.states.append(
                (p, {key: self._read_plain(p, name, key, about["alike"], own) for key in keys.get(name, ())})
            )
        self.attached = held.attached
        self.stepped = {
            group: {i for i, name in enumerate(group.names) if name in keys}
            for group in self.flat.groups
            if group.trainable
        }

    def _check_groups(self, saved: list[list[str]], mine: list[list[str]]) -> None:
        if len(saved) != len(mine):
            raise self._wrong(f"an optimizer's state of {len(saved)} parameter groups", f"{len(mine)}")
        for number, (theirs, ours) in enumerate(zip(saved, mine, strict=True)):
            for name in ours:
                if name not in theirs:
                    raise self._wrong(f"an optimizer's state without {name} in group {number}", "the same groups")
            if len(theirs) > len(ours):
                name = next(name for name in theirs if name not in ours)
                raise self._wrong(f"an optimizer's state with {name} in group {number}", "the same groups")

    def _counters(self, name: str, keys: dict[str, list[str]], alike: set[str]) -> tuple[object, ...]:
        """What parameters that travel together must have in common."""
        found: list[object] = [name in keys]
        for key in sorted(set(keys.get(name, ())) - alike):
            path = (*STATE, name, key)
            facts = self.source.tensors.get(".".join(path))
            value = self.source.value(path) if facts is None else None
            if facts is not None and facts.size.numel() == 1:
                value = self.source.tensor(".".join(path)).item()
            found.append((key, value if isinstance(value, (int, float)) else None))
        return tuple(found)

    def _read_state(self, piece: Piece, keys: dict[str, list[str]], alike: set[str]) -> State:
        state: State = {}
        group, names = piece.group, piece.group.names
        for i, first, last in _spans(group, piece.start, piece.end):
            segment = group.layout.segments[i]
            for key in keys.get(names[i], ()):
                name = ".".join((*STATE, names[i], key))
                facts = self.source.tensors.get(name)
                if key in alike and facts is not None:
                    self.source.check(name, segment.shape, facts.properties.dtype)
                    dtype = facts.properties.dtype
                    if dtype.is_floating_point:
                        dtype = piece.param.dtype
                    if key not in state:
                        state[key] = torch.zeros(piece.end - piece.start, dtype=dtype)
                    values = state[key][first - piece.start : last - piece.start]
                    self.source.read(parts_of(name, segment.shape, values, first - segment.offset))
                    continue
                value = self.source.value((*STATE, names[i], key)) if facts is None else self.source.tensor(name)
                if key in state and not _same(state[key], value):
                    raise self._wrong(
                        f"{name} = {value}, where a parameter that travels with it has {state[key]}", "equal ones"
                    )
                state.setdefault(key, value)
        return {key: value.view(piece.param.shape) if key in alike else value for key, value in state.items()}

    def _read_plain(self, p: torch.Tensor, name: str, key: str, alike: list[str], own: dict[str, Any]) -> Any:
        path = (*STATE, name, key)
        place = ".".join(path)
        if place not in self.source.tensors:
            return own.get(place, self.source.value(path))
        if key in alike:
            self.source.check(place, tuple(p.shape), self.source.tensors[place].properties.dtype)
        value = own[place] if place in own else self.source.tensor(place)
        return value.to(p.dtype) if key in alike and value.is_floating_point() else value

    # ---- into the model ------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Changes everything; a collective."""
        for unit in self.flat.units:
            unit.release()
        for group, master in zip(self.flat.groups, self.masters, strict=True):
            for _, first, last in _spans(group, group.start, group.end):
                group.master[first - group.start : last - group.start].copy_(
                    master[first - group.start : last - group.start]
                )
            work = group.publish()
            if work is not None:
                work.wait()
        for tensor, values in self.wholes:
            tensor.copy_(values)
        for module, value in self.extra_states:
            module.set_extra_state(value)
        if self.optimizer is not None:
            self._commit_optimizer(self.optimizer)

    def _commit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.attached is not None:
            self.attached._stepped = self.stepped
        for group, hyperparameters in zip(optimizer.param_groups, self.hyperparameters, strict=True):
            group.update(hyperparameters)
        settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for param, state in self.states:
            optimizer.state.pop(param, None)
            if state:
                group = settings[id(param)]
                on_host = not (group.get("capturable") or group.get("fused"))
                optimizer.state[param] = {
                    key: value.to(param.device) if torch.is_tensor(value) and not (key == "step" and on_host) else value
                    for key, value in state.items()
                }


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if torch.is_tensor(a) and torch.is_tensor(b) else bool(a == b)
