"""Faults to plant in the training layer, each of a kind that has been, or could be, made; the fuzzer must find each.

A fault patches one attribute of one class or module of `ringcomm.data_parallel`, named here alone. It says which
features a program must have to see it, so that the search need not run the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ringcomm.data_parallel import clip, sharded_parameter
from ringcomm.data_parallel.flat_model import FlatModel
from ringcomm.data_parallel.gradient import Gradient
from ringcomm.data_parallel.group import FlatGroup
from ringcomm.data_parallel.optimizer_state import GroupState
from ringcomm.data_parallel.ranks import Ranks
from ringcomm.data_parallel.unit import Unit

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One wrong function in the place of a right one."""

    name: str
    home: Any
    attribute: str
    wrong: Callable[[Function], Function]
    """Makes the wrong function of the right one."""
    needs: frozenset[str]

    def plant(self, patch: Callable[[Any, str, Any], None]) -> None:
        """Puts it in with such as ``monkeypatch.setattr``."""
        patch(self.home, self.attribute, self.wrong(getattr(self.home, self.attribute)))


FAULTS: list[Fault] = []


def fault(home: Any, attribute: str, *needs: str) -> Callable[[Callable[[Function], Function]], Any]:
    """Registers a fault under its function's name."""

    def register(wrong: Callable[[Function], Function]) -> None:
        FAULTS.append(Fault(wrong.__name__.replace("_", " "), home, attribute, wrong, frozenset(needs)))

    return register


class Done:
    """A call that has ended."""

    def wait(self) -> None:
        """Returns."""


# ---- gradients ---------------------------------------------------------------------------------------------------


@fault(Ranks, "all_reduce")
def mean_with_a_wrong_divisor(right: Function) -> Function:
    return lambda ranks, x, op="avg": right(ranks, x, "sum")


@fault(Ranks, "all_reduce")
def step_on_gradients_that_were_not_reduced(right: Function) -> Function:
    return lambda ranks, x, op="avg": Done()


@fault(Ranks, "reduce_scatter")
def shard_of_this_rank_alone(right: Function) -> Function:
    def wrong(ranks: Ranks, x: torch.Tensor, out: torch.Tensor, op: str = "avg") -> Any:
        out.copy_(x.view(ranks.world_size, -1)[ranks.rank])
        return Done()

    return wrong


@fault(Gradient, "settle", "accumulate.each")
def mean_added_twice(right: Function) -> Function:
    def wrong(gradient: Gradient) -> None:
        before = gradient.reduced.clone() if gradient.has_reduced else None
        right(gradient)
        if before is not None:
            gradient.reduced.add_(gradient.reduced - before)

    return wrong


@fault(Gradient, "__init__", "accumulate.no_sync")
def passes_added_in_another_order(right: Function) -> Function:
    return lambda gradient, group, stage, tree: right(gradient, group, stage, True)


@fault(FlatModel, "_collect", "accumulate.no_sync")
def local_sums_that_are_lost(right: Function) -> Function:
    def wrong(flat: FlatModel, group: FlatGroup) -> None:
        right(flat, group)
        for level in group.gradient.levels:
            if level is not None:
                level.zero_()

    return wrong


@fault(FlatModel, "_finish_used_params")
def unused_parameter_with_a_gradient_of_zero(right: Function) -> Function:
    def wrong(flat: FlatModel, said: Any) -> None:
        right(flat, said)
        for group in flat.order:
            if group.gradient.has:
                group.gradient.has.update(range(len(group.params)))

    return wrong


@fault(FlatModel, "_finish_used_params")
def parameters_used_on_another_rank_alone(right: Function) -> Function:
    def wrong(flat: FlatModel, said: Any) -> None:
        mine = [set(group.gradient.has) for group in flat.order]
        right(flat, said)
        for group, has in zip(flat.order, mine, strict=True):
            group.gradient.has = has

    return wrong


@fault(Gradient, "collect", "block.undefined")
def undefined_gradient_that_counts(right: Function) -> Function:
    def wrong(gradient: Gradient, *args: Any) -> None:
        gradient.contributed.update(*gradient.group.noted)
        right(gradient, *args)

    return wrong


@fault(FlatModel, "_is_complete")
def reduced_before_the_last_gradient(right: Function) -> Function:
    return lambda flat, group: True


@fault(FlatGroup, "pack")
def gradient_left_out_of_its_bucket(right: Function) -> Function:
    def wrong(group: FlatGroup, grads: dict[int, torch.Tensor], whole: torch.Tensor) -> None:
        right(group, {i: grad for i, grad in grads.items() if i != 1}, whole)

    return wrong


@fault(Gradient, "take_in")
def gradients_kept_after_zero_grad(right: Function) -> Function:
    return lambda gradient, call: None


@fault(Gradient, "_leave_buffer", "grad_keep")
def memory_of_kept_gradients_used_again(right: Function) -> Function:
    return lambda gradient: None


@fault(FlatModel, "send_buffers", "evaluate_between")
def buffers_that_no_graph_may_have_saved(right: Function) -> Function:
    def wrong(flat: FlatModel) -> None:
        right(flat)
        for buffer in flat.buffers:
            torch.autograd.graph.increment_version(buffer)

    return wrong


@fault(FlatGroup, "runs", "half")
def parameters_of_16_bits_joined_in_a_step(right: Function) -> Function:
    return lambda group, owners: group.layout.runs(group.start, group.end, owners)


# ---- parameters --------------------------------------------------------------------------------------------------


@fault(FlatGroup, "finish_gather")
def gather_of_stale_values(right: Function) -> Function:
    def wrong(group: FlatGroup) -> None:
        gathered = group.gathering is not None
        right(group)
        if gathered:
            first = group.__dict__.setdefault("first_values", group.whole.clone())
            group.whole.copy_(first)

    return wrong


@fault(FlatGroup, "publish")
def shard_that_the_others_do_not_get(right: Function) -> Function:
    def wrong(group: FlatGroup) -> Any:
        before = group.whole.clone() if group.stage in (1, 2) else None
        work = right(group)
        if before is not None and group.ranks.rank != 0:
            work.wait()
            numel = group.layout.shard_numel
            group.whole[:numel].copy_(before[:numel])
        return Done() if before is not None else work

    return wrong


@fault(FlatGroup, "__init__", "init_differs")
def initial_values_that_are_not_sent(right: Function) -> Function:
    return lambda *args, **kwargs: right(*args, **{**kwargs, "send": False})


@fault(FlatGroup, "load", "save_load")
def values_that_are_not_loaded(right: Function) -> Function:
    return lambda group, i, values: None if i == 0 else right(group, i, values)


@fault(FlatModel, "reach")
def backward_on_released_parameters(right: Function) -> Function:
    def wrong(flat: FlatModel, unit: Unit, number: int) -> None:
        right(flat, unit, number)
        unit.release()

    return wrong


@fault(sharded_parameter, "_values", "write")
def writes_into_copies_of_views(right: Function) -> Function:
    return lambda x: right(x) if sharded_parameter._window(x) is None else right(x).clone()


# ---- what goes through -------------------------------------------------------------------------------------------


@fault(Unit, "cast_inputs")
def inputs_rounded_to_another_type(right: Function) -> Function:
    def rounded(x: Any) -> Any:
        return x.bfloat16().float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    return lambda unit, args, kwargs: tree_map(rounded, right(unit, args, kwargs))


@fault(Unit, "cast_inputs", "container.list")
def containers_that_are_copied(right: Function) -> Function:
    return lambda unit, args, kwargs: tree_map(lambda x: x, right(unit, args, kwargs))


@fault(FlatModel, "send_buffers")
def buffers_that_are_not_sent(right: Function) -> Function:
    return lambda flat: None


# ---- clipping and the optimizer ----------------------------------------------------------------------------------


@fault(clip, "total_norm", "clip")
def norm_of_this_shard_alone(right: Function) -> Function:
    return lambda tensors, norm_type, comm, count, **kwargs: right(tensors, norm_type, None, count, **kwargs)


@fault(clip, "_scale", "clip")
def bucket_that_is_not_clipped(right: Function) -> Function:
    return lambda flat, group, some, factor: None if group.number == 0 else right(flat, group, some, factor)


@fault(GroupState, "piece", "save_load")
def step_counter_restored_one_too_high(right: Function) -> Function:
    def wrong(*args: Any) -> dict[str, Any]:
        return {key: value + 1 if key == "step" else value for key, value in right(*args).items()}

    return wrong
