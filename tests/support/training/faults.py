"""Faults to plant in the training layer, each of a kind that has been, or could be, made; the fuzzer must find each.

A fault patches one attribute of one class or module of `ringcomm.data_parallel`, named here alone. It says which
features a program must have to see it, so that the search need not run the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.grad_buffer import GradBuffer
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.model import sharded_parameter
from ringcomm.data_parallel.model.sharded_model import ShardedModel, Unit
from ringcomm.data_parallel.optim import clip
from ringcomm.data_parallel.optim.state import OptimizerState

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
        """Puts it in with such as ``monkeypatch.setattr``. Raises TypeError if the wrong function does not take the
        right one's arguments: every call would raise, and any program would find that."""
        right = getattr(self.home, self.attribute)
        wrong = self.wrong(right)
        parameters = inspect.signature(right).parameters.values()
        named = {each.name: None for each in parameters if each.kind == each.KEYWORD_ONLY}
        inspect.signature(wrong).bind(*(each for each in parameters if each.name not in named), **named)
        patch(self.home, self.attribute, wrong)


def registry(faults: list[Fault]) -> Callable[..., Callable[[Callable[[Function], Function]], None]]:
    """Returns a decorator that adds a fault to the list under its function's name: `@fault(home, attribute, *needs)`.
    It raises if there is no such attribute any more."""

    def fault(home: Any, attribute: str, *needs: str) -> Callable[[Callable[[Function], Function]], None]:
        getattr(home, attribute)

        def register(wrong: Callable[[Function], Function]) -> None:
            faults.append(Fault(wrong.__name__.replace("_", " "), home, attribute, wrong, frozenset(needs)))

        return register

    return fault


FAULTS: list[Fault] = []
fault = registry(FAULTS)


class Done:
    """A call that has ended."""

    def wait(self) -> None:
        """Returns."""


# ---- gradients ---------------------------------------------------------------------------------------------------


@fault(DataParallelGroup, "all_reduce")
def mean_with_a_wrong_divisor(right: Function) -> Function:
    return lambda ranks, x, op="avg": right(ranks, x, "sum")


@fault(DataParallelGroup, "all_reduce")
def step_on_gradients_that_were_not_reduced(right: Function) -> Function:
    return lambda ranks, x, op="avg": Done()


@fault(DataParallelGroup, "reduce_scatter")
def shard_of_this_rank_alone(right: Function) -> Function:
    def wrong(ranks: DataParallelGroup, x: torch.Tensor, out: torch.Tensor, op: str = "avg") -> Any:
        out.copy_(x.view(ranks.world_size, -1)[ranks.rank])
        return Done()

    return wrong


@fault(GradBuffer, "finish_reduce", "accumulate.each")
def mean_added_twice(right: Function) -> Function:
    def wrong(gradient: GradBuffer) -> None:
        before = gradient.reduced.clone() if gradient.has_reduced else None
        right(gradient)
        if before is not None:
            gradient.reduced.add_(gradient.reduced - before)

    return wrong


@fault(GradBuffer, "__init__", "accumulate.no_sync")
def passes_added_in_another_order(right: Function) -> Function:
    return lambda *args, **kwargs: right(*args, **{**kwargs, "tree": True})


@fault(ShardedModel, "_pack", "accumulate.no_sync")
def local_sums_that_are_lost(right: Function) -> Function:
    def wrong(flat: ShardedModel, bucket: Bucket) -> None:
        right(flat, bucket)
        for level in bucket.gradient.local.levels:
            if level is not None:
                level.zero_()

    return wrong


@fault(ShardedModel, "_finish_used_params")
def unused_parameter_with_a_gradient_of_zero(right: Function) -> Function:
    def wrong(flat: ShardedModel, said: Any) -> None:
        right(flat, said)
        for bucket in flat.order:
            if bucket.gradient.with_mean:
                bucket.gradient.with_mean.update(range(len(bucket.params)))

    return wrong


@fault(ShardedModel, "_finish_used_params")
def parameters_used_on_another_rank_alone(right: Function) -> Function:
    def wrong(flat: ShardedModel, said: Any) -> None:
        mine = [set(bucket.gradient.with_mean) for bucket in flat.order]
        right(flat, said)
        for bucket, has in zip(flat.order, mine, strict=True):
            bucket.gradient.with_mean = has

    return wrong


@fault(GradBuffer, "pack", "block.undefined")
def undefined_gradient_that_counts(right: Function) -> Function:
    def wrong(gradient: GradBuffer, *args: Any) -> None:
        gradient.local.contributed.update(*gradient.local.arrival_sets)
        right(gradient, *args)

    return wrong


@fault(ShardedModel, "_is_complete")
def reduced_before_the_last_gradient(right: Function) -> Function:
    return lambda flat, bucket: True


@fault(GradBuffer, "_fill")
def gradient_left_out_of_its_bucket(right: Function) -> Function:
    def wrong(gradient: GradBuffer, whole: torch.Tensor, grads: list[tuple[int, torch.Tensor]]) -> None:
        right(gradient, whole, [(i, grad) for i, grad in grads if i != 1])

    return wrong


@fault(GradBuffer, "adopt_user_grads", "model_zero_grad")
def gradients_kept_after_zero_grad(right: Function) -> Function:
    def wrong(gradient: GradBuffer, call: str, own: bool = False) -> None:
        if any(p.grad is not None for p in gradient.params):
            right(gradient, call, own)

    return wrong


@fault(GradBuffer, "_replace_kept_buffer", "grad_keep")
def memory_of_kept_gradients_used_again(right: Function) -> Function:
    return lambda gradient: None


@fault(ShardedModel, "send_buffers", "evaluate_between")
def buffers_that_no_graph_may_have_saved(right: Function) -> Function:
    def wrong(flat: ShardedModel) -> None:
        right(flat)
        for buffer in flat.contents.buffers:
            torch.autograd.graph.increment_version(buffer)

    return wrong


@fault(Bucket, "runs", "half")
def parameters_of_16_bits_joined_in_a_step(right: Function) -> Function:
    return lambda bucket, owners: bucket.layout.runs(bucket.start, bucket.end, owners)


# ---- parameters --------------------------------------------------------------------------------------------------


@fault(Bucket, "finish_gather")
def gather_of_stale_values(right: Function) -> Function:
    def wrong(bucket: Bucket) -> None:
        gathered = bucket.memory.gathering is not None
        right(bucket)
        if gathered:
            first = bucket.__dict__.setdefault("first_values", bucket.unsharded.clone())
            bucket.unsharded.copy_(first)

    return wrong


@fault(Bucket, "sync_params_from_master")
def shard_that_the_others_do_not_get(right: Function) -> Function:
    def wrong(bucket: Bucket, changed: Collection[int] = ()) -> Any:
        before = bucket.unsharded.clone() if bucket.stage in (1, 2) else None
        work = right(bucket, changed)
        if before is not None and bucket.ranks.rank != 0:
            work.wait()
            numel = bucket.layout.shard_numel
            bucket.unsharded[:numel].copy_(before[:numel])
        return Done() if before is not None else work

    return wrong


@fault(Bucket, "__init__", "init_differs")
def initial_values_that_are_not_sent(right: Function) -> Function:
    return lambda *args, **kwargs: right(*args, **{**kwargs, "send": False})


@fault(Bucket, "load", "save_load")
def values_that_are_not_loaded(right: Function) -> Function:
    return lambda bucket, i, values: None if i == 0 else right(bucket, i, values)


@fault(ShardedModel, "reach")
def backward_on_released_parameters(right: Function) -> Function:
    def wrong(flat: ShardedModel, unit: Unit, number: int) -> None:
        right(flat, unit, number)
        unit.release()

    return wrong


@fault(sharded_parameter, "_values", "write")
def writes_into_copies_of_views(right: Function) -> Function:
    def wrong(x: Any, *args: Any) -> torch.Tensor:
        values = right(x, *args)
        return values if isinstance(x, torch.nn.Parameter) else values.clone()

    return wrong


# ---- what goes through -------------------------------------------------------------------------------------------


@fault(Unit, "_cast_inputs")
def inputs_rounded_to_another_type(right: Function) -> Function:
    def rounded(x: Any) -> Any:
        return x.bfloat16().float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    return lambda unit, cast, args, kwargs: tree_map(rounded, right(unit, cast, args, kwargs))


@fault(Unit, "_cast_inputs", "container.list")
def containers_that_are_copied(right: Function) -> Function:
    return lambda unit, cast, args, kwargs: tree_map(lambda x: x, right(unit, cast, args, kwargs))


@fault(ShardedModel, "send_buffers")
def buffers_that_are_not_sent(right: Function) -> Function:
    return lambda flat: None


# ---- clipping and the optimizer ----------------------------------------------------------------------------------


@fault(clip, "total_norm", "clip")
def norm_of_this_shard_alone(right: Function) -> Function:
    return lambda tensors, norm_type, comm, count, **kwargs: right(tensors, norm_type, None, count, **kwargs)


@fault(clip, "_scaled", "clip")
def bucket_that_is_not_clipped(right: Function) -> Function:
    return lambda flat, bucket, some: [] if bucket.number == 0 else right(flat, bucket, some)


@fault(OptimizerState, "piece", "save_load")
def step_counter_restored_one_too_high(right: Function) -> Function:
    def wrong(*args: Any) -> dict[str, Any]:
        return {key: value + 1 if key == "step" else value for key, value in right(*args).items()}

    return wrong
