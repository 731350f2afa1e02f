"""Splits a model into the stages of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ringcomm.data_parallel.model.partition import is_compiled
from ringcomm.errors import InvalidArgumentError, UnsupportedError, shown
from ringcomm.modules.arguments import matches
from ringcomm.pipeline_parallel.balance import balance
from ringcomm.validation import TEXT, Requirement, a, expects, several


@dataclass(frozen=True)
class TiedParam:
    """A parameter that several stages use.

    Attributes:
        names: all of its names in the model, the first registered name first.
        uses: for each stage that uses it, the modules that hold it and its key in each.
    """

    names: tuple[str, ...]
    uses: Mapping[int, list[tuple[nn.Module, str]]]

    @property
    def stages(self) -> list[int]:
        """The stages that use it, in order."""
        return sorted(self.uses)


@dataclass(frozen=True)
class Stages:
    """A model, and which of its modules belong to which stage; made by `split`.

    Attributes:
        stage_of: the stage of each module that lies entirely in one stage, by the module's name.
        first: for each stage, the name of the module with which it begins; the first stage begins with the model ("").
        tied_params: parameters that more than one stage uses.
        carry: names of modules whose results go to all later stages.
    """

    model: nn.Module
    stage_of: Mapping[str, int]
    first: tuple[str, ...]
    tied_params: tuple[TiedParam, ...]
    carry: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.first)

    def names_of(self, stage: int) -> list[str]:
        """Returns the names of the modules of a stage."""
        return [name for name, its in self.stage_of.items() if its == stage]


class Chain(nn.ModuleList):
    """A sequence of modules: the result of each, a tensor or a tuple, becomes the arguments of the next."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the modules in turn; keyword arguments go to the first module."""
        result: Any = args
        for number, module in enumerate(self):
            inputs = result if isinstance(result, tuple) else (result,)
            result = module(*inputs, **(kwargs if number == 0 else {}))
        return result


def _places(at: Any) -> Any:
    if isinstance(at, bool):
        raise ValueError("neither")
    return int(at) if isinstance(at, Integral) else several("", TEXT).take(at)


@expects(
    "split",
    model=a("a torch.nn.Module", nn.Module),
    at=Requirement("names of submodules, or a number", _places),
    carry=several("names of submodules", TEXT),
    order=several("names of submodules", TEXT),
)
def split(model: nn.Module, at: Sequence[str] | int, *, carry: Sequence[str] = (), order: Sequence[str] = ()) -> Stages:
    """Splits a model into stages, for `Pipeline`; does not change the model yet.

        stages = ringcomm.split(model, at=["blocks.4", "blocks.8"])       # three

    The stages follow the order in which the model's modules were registered, or that of ``order``. The model's forward
    must call the modules in this order; otherwise the pipeline raises.

    Each stage runs the model's own forward. Modules of earlier stages return tensors with a shape but no values, until
    forward reaches the first module of the stage, which gets the tensors that the stage before has sent. So each stage
    computes everything that forward derives from shapes, such as positions and masks. Code that uses the model's inputs
    needs these inputs on every rank. A stage that needs values that it does not have, such as the weight of another
    stage's module, raises.

    Tensors that modules leave besides their results (in attributes, or in lists and dicts that they are given), such as
    auxiliary losses, go to all later stages, with their gradients. So do the results of modules that ``carry`` names,
    for skip connections across a cut and for results that forward hooks collect. Hooks of other modules of earlier
    stages get tensors without values.

    Parameters of the model itself, and of other modules that are cut, are on the ranks of all stages; `Pipeline` adds
    up their gradients as it does for tied parameters.

    Args:
        at: names of the submodules with which the second, third, ... stage begins, in order; or the number of stages,
            in which case `ringcomm.pipeline_parallel.balance.balance` chooses them by numbers of parameters.
        carry: names of modules whose results later stages need, besides the arguments of a stage's first module:
            modules that lie entirely in one stage, or submodules of them that have forward hooks. ``*`` stands for one
            part of a name; as the first part, for one or more.
        order: names of modules, each with its submodules, in the order in which forward calls them; needed where they
            were registered in another order. They exchange places among themselves; all other modules keep theirs.
    Raises:  InvalidArgumentError: an unknown module, or modules in another order.
             UnsupportedError: a module that is both cut and compiled.
    """
    wanted = list(at) if not isinstance(at, int) else balance(model, at)
    known = [name for name, _ in model.named_modules()]
    for name in (*wanted, *order):
        if name not in known or name == "":
            _refuse_other_name(model, known, name)
            raise InvalidArgumentError(
                f"split: got {shown(name)}, which is no submodule, expected names such as "
                f"{', '.join(repr(each) for each in known[1:4])}; look at model.named_modules()"
            )
    wanted = [_first_called(model, name) for name in wanted]
    _refuse_nested(order)
    shared = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    stage_of: dict[str, int] = {}
    seen: set[int] = set()
    reached = 0
    for name, in_a_row in _in_order([*_unsplit(model, "", wanted, order, set())], order):
        module = model.get_submodule(name)
        if id(module) in seen:
            continue
        begins = reached < len(wanted) and name == wanted[reached]
        reached += begins
        seen.add(id(module))
        if begins or (in_a_row and shared[id(module)] == 1) or _has_state(module):
            stage_of[name] = reached
            seen.update(id(each) for each in module.modules())
    if reached < len(wanted):
        raise InvalidArgumentError(
            f"split: got {wanted[reached]!r}, which does not come after "
            f"{wanted[reached - 1] if reached else 'the model'!r}, or lies inside it, expected names in the order of "
            "the model; sort them, or pass order= if forward calls modules in another order than that in which they "
            "were registered"
        )
    _refuse_in_two_stages(model, stage_of)
    tied = _tied_params(model, stage_of, 1 + len(wanted))
    return Stages(model, stage_of, ("", *wanted), tied, _carried(model, stage_of, carry))


def _refuse_in_two_stages(model: nn.Module, stage_of: Mapping[str, int]) -> None:
    found: dict[int, tuple[str, int]] = {}
    for name, stage in stage_of.items():
        for key, each in model.get_submodule(name).named_modules():
            path = f"{name}.{key}" if key else name
            other, first = found.setdefault(id(each), (path, stage))
            if first != stage and any(p is not None for p in each._parameters.values()):
                raise InvalidArgumentError(
                    f"split: got {path} in stage {stage}, which is the same module as {other} in stage {first}, "
                    "expected every module in one stage; cut the model elsewhere, or make two modules that share "
                    "their parameters"
                )


def _refuse_other_name(model: nn.Module, known: Sequence[str], name: str) -> None:
    """Raises where the name is a second name of a module that the model calls at several places."""
    module = dict(model.named_modules(remove_duplicate=False)).get(name)
    first = next((each for each in known if model.get_submodule(each) is module), "") if module is not None else ""
    if first:
        raise InvalidArgumentError(
            f"split: got {shown(name)}, which is {first} under another name, expected the first name of each module; "
            "calls of a shared module must lie in one stage: cut elsewhere, or give each place a module of its own"
        )


def _refuse_nested(order: Sequence[str]) -> None:
    for i, name in enumerate(order):
        if any(f"{name}.".startswith(f"{other}.") for other in (*order[:i], *order[i + 1 :])):
            raise InvalidArgumentError(
                f"split: got {name!r} twice in order, or inside another module there, expected each module once; name "
                "either a module or its submodules"
            )


def _unsplit(
    module: nn.Module, name: str, at: Collection[str], order: Collection[str], seen: set[int], in_a_row: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yields the names of the modules that contain no cut and no entry of ``order``, in the order of registration, and
    whether each is a member of a sequence, which calls its members one after the other.

    Args:
        seen: ids of the modules that are cut, which may have other names too.
    Raises: InvalidArgumentError: a cut inside of another one.
    """
    if id(module) in seen:
        return
    inside = [each for each in (*at, *order) if each.startswith(f"{name}." if name else "")]
    if not inside and not _is_list(module):
        yield name, in_a_row
        return
    if name in at:
        raise InvalidArgumentError(
            f"split: got {name!r} and {inside[0]!r} inside it, expected stages that begin with whole modules; instead "
            f"of {name!r} name the first module in it"
        )
    if not _is_list(module) and is_compiled(module):
        raise UnsupportedError(
            f"split: got {shown(name) if name else 'the model'}, which is both cut and compiled, expected every "
            "compiled module in one stage; compile its blocks instead, such as with model.blocks[i].compile()"
        )
    seen.add(id(module))
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        yield from _unsplit(child, path, at, order, seen, isinstance(module, (nn.Sequential, Chain)))


def _is_list(module: nn.Module) -> bool:
    """Returns whether a module is never called itself: it only holds modules or parameters, which the code around it
    uses one by one."""
    own = any(p is not None for held in (module._parameters, module._buffers) for p in held.values())
    bare = type(module).forward is nn.Module.forward and "forward" not in module.__dict__  # torch.compile sets it
    return bare and (own or any(True for _ in module.children()))


def _first_called(model: nn.Module, name: str) -> str:
    """Returns the name of the first module of a list (a list itself is never called); of any other module its own
    name."""
    module = model.get_submodule(name)
    while _is_list(module) and (first := next(module.named_children(), None)) is not None:
        name, module = f"{name}.{first[0]}", first[1]
    return name


def _in_order(modules: Sequence[tuple[str, bool]], order: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Returns the modules in the order of forward's calls: those that ``order`` names exchange places."""

    def rank(name: str) -> int | None:
        return next((i for i, each in enumerate(order) if f"{name}.".startswith(f"{each}.")), None)

    ranks = {name: rank(name) for name, _ in modules}
    moved = iter(sorted((each for each in modules if ranks[each[0]] is not None), key=lambda each: ranks[each[0]] or 0))
    return (each if ranks[each[0]] is None else next(moved) for each in modules)


def _carried(model: nn.Module, stage_of: Mapping[str, int], carry: Sequence[str]) -> frozenset[str]:
    """Returns the names of the modules that the patterns of ``carry`` match; raises for one that matches none."""
    inside = {id(each) for name in stage_of for each in model.get_submodule(name).modules()}
    names = [name for name, each in model.named_modules() if id(each) in inside]
    for pattern in carry:
        if any(matches(pattern, name) for name in names):
            continue
        found = [name for name, _ in model.named_modules() if name and matches(pattern, name)]
        free = [name for name in found if next(model.get_submodule(name).parameters(), None) is None]
        if free:
            raise InvalidArgumentError(
                f"split: got carry={shown(pattern)}, which names {free[0]}, a module without parameters, which every "
                f"stage computes, expected modules that lie in one stage; name the modules whose results {free[0]} "
                "gets"
            )
        raise InvalidArgumentError(
            f"split: got carry={shown(pattern)}, which names no module that lies in one stage, expected names such "
            f"as {', '.join(map(repr, [*stage_of][:3]))}; look at model.named_modules()"
        )
    return frozenset(name for name in names if any(matches(pattern, name) for pattern in carry))


def _has_state(module: nn.Module) -> bool:
    """Returns whether a module has state of its own: parameters, or persistent buffers."""
    saved = (key for each in module.modules() for key in each._buffers.keys() - each._non_persistent_buffers_set)
    return any(True for _ in module.parameters()) or any(True for _ in saved)


def _tied_params(model: nn.Module, stage_of: Mapping[str, int], stages: int) -> tuple[TiedParam, ...]:
    """Returns the parameters that several stages use. Every stage runs the code of modules that are cut, so it uses
    their parameters."""
    uses: dict[int, dict[int, list[tuple[nn.Module, str]]]] = {}

    def add(module: nn.Module, stage: int) -> None:
        for key, p in module._parameters.items():
            if p is None or not (is_lazy(p) or p.numel()):  # an empty one has no values to agree on
                continue
            if (module, key) not in uses.setdefault(id(p), {}).setdefault(stage, []):
                uses[id(p)][stage].append((module, key))

    inside: set[int] = set()
    for name, stage in stage_of.items():
        for module in model.get_submodule(name).modules():
            inside.add(id(module))
            add(module, stage)
    for module in model.modules():
        for stage in range(stages) if id(module) not in inside else ():
            add(module, stage)
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return tuple(TiedParam(tuple(names[key]), by_stage) for key, by_stage in uses.items() if len(by_stage) > 1)
