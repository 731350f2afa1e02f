"""Faults to plant in tensor, pipeline and context parallel; the mesh fuzzer must find each.

As `training.faults`: a fault patches one attribute of one class or module, named here alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ringcomm.context import attention
from ringcomm.context.attention import _AttentionCall
from ringcomm.context.ring import GRADS, RingBuffer
from ringcomm.pipeline_parallel import pipeline, stage_runner
from ringcomm.pipeline_parallel.messages import Messages
from ringcomm.pipeline_parallel.stage_runner import StageRunner
from ringcomm.pipeline_parallel.tied_params import _ExactTiedParam, _LocalTiedParam
from ringcomm.tensor_parallel import sequence
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.layers import VocabParallelEmbedding
from tests.support.training.faults import Fault, Function, registry

FAULTS: list[Fault] = []
fault = registry(FAULTS)  # a fault needs some of `Program.all_features`


# ---- tensor parallel ---------------------------------------------------------------------------------------------


@fault(TensorParallelGroup, "all_reduce", "tp 2")
def sum_over_ranks_left_out(right: Function) -> Function:
    return lambda region, x, dim=0: x.clone()


@fault(TensorParallelGroup, "own", "tp 2")
def part_of_the_first_rank_on_all(right: Function) -> Function:
    return lambda region, x, dim: x.narrow(dim, 0, region.share("scatter", x, dim)).clone()


@fault(sequence, "_sum_gradient", "tp 2", "block heads")
def gradients_of_norms_that_are_not_summed(right: Function) -> Function:
    return lambda p, region: None


@fault(TensorParallelGroup, "enter", "tp 2")
def input_that_was_written_into_taken_for_the_one_before(right: Function) -> Function:
    def wrong(region: TensorParallelGroup, layer: object, operator: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        kept = region.__dict__.setdefault("kept", {})
        key = (tuple(x.shape), id(layer), x.requires_grad)
        return kept.setdefault(key, right(region, layer, operator, x, *args))

    return wrong


@fault(VocabParallelEmbedding, "forward", "tp 2", "text")
def tokens_of_other_ranks_that_count(right: Function) -> Function:
    def wrong(layer: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
        return right(layer, torch.where(tokens > 8, tokens - 1, tokens))

    return wrong


# ---- pipelines ---------------------------------------------------------------------------------------------------


@fault(StageRunner, "_carry", "pp 2", "carry")
def carried_tensors_without_gradients(right: Function) -> Function:
    def wrong(run: Any, *args: Any) -> Any:
        before = len(args[0].carried)
        found = right(run, *args)
        args[0].carried[before:] = [x.detach() for x in args[0].carried[before:]]
        return found

    return wrong


@fault(stage_runner, "restore", "pp 2", "hook.collect")
def what_hooks_leave_twice(right: Function) -> Function:
    return lambda left, container, before: None


@fault(pipeline, "split_inputs", "micro-batches that do not divide")
def micro_batches_that_count_alike(right: Function) -> Function:
    return lambda *args: [(inputs, None) for inputs, _ in right(*args)]


@fault(_LocalTiedParam, "_received_sum", "pp 2", "tied_head")
def gradients_of_the_other_stages_lost(right: Function) -> Function:
    return lambda tied, like, rank, stage=0: None if right(tied, like, rank, stage) is None else torch.zeros_like(like)


@fault(_ExactTiedParam, "after_backward", "pp 2", "tied_head", "exact")
def ties_added_once_more(right: Function) -> Function:
    def wrong(tied: _ExactTiedParam, stage: int, microbatch: int) -> None:
        if tied.placeholder.grad is not None:
            tied.placeholder.grad = tied.placeholder.grad * 2
        right(tied, stage, microbatch)

    return wrong


@fault(_LocalTiedParam, "_accumulate", "pp 2", "tied_head")
def tied_weights_that_get_zeros(right: Function) -> Function:
    return lambda tied, grad: right(tied, torch.zeros_like(tied.param))


@fault(Messages, "send_gradients", "pp 2", "carry")
def gradient_of_the_first_tensor_alone(right: Function) -> Function:
    return lambda messages, found, *args: right(messages, [*found[:1], *(None for _ in found[1:])], *args)


@fault(pipeline, "run_weight_grads", "schedule zero-bubble")
def gradients_of_weights_that_are_put_off_for_ever(right: Function) -> Function:
    return lambda deferred: None


# ---- context parallel --------------------------------------------------------------------------------------------


@fault(attention, "merge", "cp 2", "block heads")
def blocks_merged_without_their_weights(right: Function) -> Function:
    def wrong(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
        out.add_(block_out).mul_(0.5)
        lse.copy_(torch.logaddexp(lse, block_lse))

    return wrong


@fault(_AttentionCall, "scores", "cp 2", "block heads")
def keys_of_the_future(right: Function) -> Function:
    return lambda *args: right(*args)._replace(causal=False)


@fault(RingBuffer, "receive", "cp 2", "block heads")
def gradients_of_keys_from_other_ranks_lost(right: Function) -> Function:
    def wrong(buffer: RingBuffer, *args: Any, **options: Any) -> None:
        right(buffer, *args, **options)
        if buffer.tag == GRADS:
            buffer.flat.zero_()

    return wrong
