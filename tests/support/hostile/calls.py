"""Everything public that trains: with which arguments it may be called, and of what kind each of them is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ringcomm
from ringcomm import Communicator
from ringcomm import tensor_parallel as tensor
from tests.support.hostile.values import NO_LISTS, NO_NUMBERS, NO_OPTIONS, PLAIN, Make
from tests.support.seeded import seeded

# ---- values, by what they cannot be ------------------------------------------------------------------------------

OBJECTS: dict[str, Make] = {**PLAIN, "number": lambda: 3, "tensor": lambda: torch.ones(3), "some": lambda: [3]}
NO_FLAGS: dict[str, Make] = {**NO_OPTIONS, "number": lambda: 1, "text": lambda: "no"}
NO_TEXTS = {name: make for name, make in NO_NUMBERS.items() if "text" not in name and name != "half a character"}


def _but(values: dict[str, Make], *names: str, **more: Make) -> dict[str, Make]:
    return {name: make for name, make in {**values, **more}.items() if name not in names}


WRONG: dict[str, dict[str, Make]] = {
    "any": {},  # is the caller's own, or has no meaning
    "object": {**OBJECTS, "None": lambda: None},
    "object?": OBJECTS,
    "tensor": _but({**OBJECTS, "None": lambda: None}, "tensor"),
    "tensors": _but(OBJECTS, "tensor", "dict"),
    "list": {**NO_LISTS, "of what is none": lambda: [object()] * 2},
    "flag": NO_FLAGS,
    "whole": {**NO_NUMBERS, "negative": lambda: -1, "too large": lambda: 1 << 65},
    "integer": _but(NO_NUMBERS, "huge", "hugely negative"),
    "long": {**NO_NUMBERS, "too large": lambda: 1 << 63},
    "dim": {**NO_NUMBERS, "too large": lambda: 1 << 62},
    "stage": {**NO_NUMBERS, "negative": lambda: -1, "too large": lambda: 4},
    "number": {**NO_OPTIONS, "text": lambda: "1", "True": lambda: True, "list": list},
    "finite": _but(NO_OPTIONS, "huge", "hugely negative", text=lambda: "1", list=list),
    "norm": _but(NO_OPTIONS, "infinite", "huge", text=lambda: "1", negative=lambda: -1.0),
    "share": {**NO_OPTIONS, "text": lambda: "1", "above": lambda: 1.5, "negative": lambda: -0.5},
    "positive": _but(NO_OPTIONS, "huge", text=lambda: "1", zero=lambda: 0, negative=lambda: -0.5),
    "limit": {**NO_OPTIONS, "text": lambda: "1", "zero": lambda: 0, "negative": lambda: -0.5, "True": lambda: True},
    "size": _but(NO_OPTIONS, "huge", text=lambda: "1", negative=lambda: -0.5),
    "choice": {**NO_OPTIONS, "number": lambda: 3, "unknown": lambda: "star", "bytes": lambda: b"sum"},
    "text": NO_TEXTS,
    "place": _but(NO_OPTIONS, "type", text=lambda: "star"),
    "dtype": {**NO_OPTIONS, "type": lambda: object, "number": lambda: 3, "text": lambda: "float32"},
    "atom": {**NO_OPTIONS, "text": lambda: "page", "half": lambda: 0.5, "zero": lambda: 0},
    "units": _but(OBJECTS, "type"),
    "path": _but(OBJECTS, "half a character", "long text"),
    "function": _but(OBJECTS, "type"),
    "axes": _but(OBJECTS, "dict", numbers={3: 3}.copy, text={"\udcff\0": 1}.copy),
    "plan": _but(OBJECTS, "dict", unknown=lambda: {"0": "star"}, nothing=lambda: {"x": "colwise"}, other={3: 3}.copy),
    "style": {
        "parts": lambda: {"0": tensor.Colwise(parts="ab")},  # type: ignore[arg-type]
        "huge": lambda: {"0": tensor.Colwise(parts=1 << 200)},
        "extents": lambda: {"0": tensor.Colwise(parts=[1 << 200, -5])},
        "object": lambda: {"0": object()},
        "heads": lambda: {"0": tensor.Heads(attributes=("\0",))},
    },
}
WRONG["whole?"] = _but(WRONG["whole"], "None")
WRONG["flag?"] = _but(WRONG["flag"], "None")
WRONG["list?"] = _but(WRONG["list"], "None")
WRONG["tensor?"] = _but(WRONG["tensor"], "None")
WRONG["extent"] = _but(WRONG["whole"], "negative", other=lambda: 7, zero=lambda: 0)
WRONG["count"] = {**WRONG["whole"], "zero": lambda: 0}

# ---- what is called ----------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    """Two layers."""
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Over all parameters."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _sharded(comm: Communicator, **options: Any) -> dict[str, Any]:
    made = model()
    made, optimizer = ringcomm.shard(made, sgd(made), 2, comm, bucket_cap_mb=1)
    return {"model": made, "optimizer": optimizer, **options}


def _wrapped(comm: Communicator) -> dict[str, Any]:
    return {"module": _sharded(comm)["model"]}


def _here(comm: Communicator, **options: Any) -> dict[str, Any]:
    return {"comm": comm, **options}


def _x() -> torch.Tensor:
    return torch.ones(2, 4, 4)


def _q() -> torch.Tensor:
    return torch.ones(1, 1, 4, 4)


def _saved(comm: Communicator) -> Path:
    ringcomm.checkpoint.save(Path("before"), **_sharded(comm))
    return Path("before")


Right = Callable[[Communicator], dict[str, Any]]


def kinds(said: str) -> dict[str, str]:
    """Of "x:tensor comm:object": by argument, its kind."""
    return dict(word.split(":") for word in said.split())


OVER, ALONG = kinds("x:tensor comm:object"), kinds("x:tensor comm:object dim:dim")
CALLS: dict[str, tuple[Right, dict[str, str]]] = {  # right arguments, and of what kind each of them is
    "AsynchronousDataParallel": (
        lambda c: _here(c, module=model(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), max_staleness=2),
        kinds(
            "module:object comm:object? optimizer:function max_staleness:whole? servers:list? staleness_scale:function "
            "record:flag replay:list?"
        ),
    ),
    "ColumnParallelLinear": (
        lambda c: _here(c, in_features=4, out_features=4),
        kinds(
            "in_features:count out_features:count bias:flag comm:object sequence_dim:dim overlap:flag "
            "device:place dtype:dtype gather_output:flag parts:list? pad:flag entered:flag"
        ),
    ),
    "DistributedDataParallel": (
        lambda c: _here(c, module=model(), bucket_cap_mb=1, dim=0),
        kinds(
            "module:object comm:object? output_device:place dim:integer init_sync:flag broadcast_buffers:flag "
            "process_group:object? bucket_cap_mb:size mixed_precision:object? device_mesh:object? "
            "forward_sync_buffers:flag bucket_cap_mb_list:object? device_ids:list? "
            "delay_all_reduce_named_params:object? param_to_hook_all_reduce:object? find_unused_parameters:any "
            "check_reduction:any gradient_as_bucket_view:any static_graph:any skip_all_reduce_unused_params:any "
            "batched_grad_copy:any"
        ),
    ),
    "GradScaler": (lambda c: {}, kinds("device:place args:any kwargs:any")),
    "MixedPrecision": (
        lambda c: {},
        kinds(
            "param_dtype:dtype reduce_dtype:dtype output_dtype:dtype master_dtype:dtype buffer_dtype:dtype "
            "cast_forward_inputs:flag cast_root_forward_inputs:flag?"
        ),
    ),
    "NaiveDataParallel": (lambda c: _here(c, module=model()), kinds("module:object comm:object?")),
    "Pipeline": (
        lambda c: _here(c, stages=[nn.Linear(2, 2) for _ in range(c.world_size)], microbatches=2),
        kinds(
            "stages:object comm:object microbatches:count schedule:choice loss:function reduction:choice "
            "ties:choice static_shapes:flag"
        ),
    ),
    "RowParallelLinear": (
        lambda c: _here(c, in_features=4, out_features=4),
        kinds(
            "in_features:count out_features:count bias:flag comm:object sequence_dim:dim overlap:flag "
            "device:place dtype:dtype input_is_parallel:flag"
        ),
    ),
    "SyncBatchNorm": (
        lambda c: _here(c, num_features=4),
        kinds(
            "num_features:whole eps:finite momentum:finite affine:flag comm:object? track_running_stats:flag "
            "device:place dtype:dtype"
        ),
    ),
    "SyncBatchNorm.convert": (lambda c: _here(c, module=model()), kinds("module:object comm:object?")),
    "VocabParallelEmbedding": (
        lambda c: _here(c, num_embeddings=8, embedding_dim=4, padding_idx=0),
        kinds(
            "num_embeddings:count embedding_dim:count padding_idx:integer comm:object sequence_dim:dim "
            "device:place dtype:dtype"
        ),
    ),
    "ZeroRedundancyOptimizer": (
        lambda c: _here(c, params=list(model().parameters()), optimizer_class=torch.optim.SGD, lr=0.1),
        kinds(
            "params:list optimizer_class:object process_group:object? defaults:any parameters_as_bucket_view:flag "
            "overlap_with_ddp:flag comm:object?"
        ),
    ),
    "clip_grad_norm_": (
        lambda c: {"parameters": _sharded(c)["model"], "max_norm": 1.0},
        kinds("parameters:tensors max_norm:norm norm_type:norm error_if_nonfinite:flag foreach:flag"),
    ),
    "context.gather_sequence": (lambda c: _here(c, x=_x(), dim=1), kinds("x:tensor comm:object dim:dim layout:choice")),
    "context.positions": (lambda c: _here(c, length=8), kinds("length:whole comm:object layout:choice device:place")),
    "context.shard_sequence": (lambda c: _here(c, x=_x(), dim=1), kinds("x:tensor comm:object dim:dim layout:choice")),
    "context_parallel": (_here, kinds("comm:object layout:choice overlap:flag local:flag")),
    "fully_shard": (
        lambda c: _here(c, module=model()),
        kinds(
            "module:object mesh:object? comm:object? broadcast_buffers:flag atom:atom reshard_after_forward:flag "
            "init_fn:object? shard_placement_fn:object? mp_policy:object offload_policy:object? ignored_params:list? "
            "dp_mesh_dims:object?"
        ),
    ),
    "hooks.AllGather": (_here, kinds("comm:object")),
    "hooks.ReduceScatter": (_here, kinds("comm:object")),
    "init_mesh": (lambda c: _here(c, dp=c.world_size), kinds("axes:axes comm:object? device:any sizes:any")),
    "init_mesh.sizes": (lambda c: _here(c, dp=c.world_size), kinds("axes:any comm:any device:any sizes:any dp:extent")),
    "Mesh.__getitem__": (lambda c: {"names": "dp"}, kinds("names:choice")),
    "join": (
        lambda c: {"model": _sharded(c)["model"]},
        kinds("model:object divide_by_initial_world_size:flag enable:flag throw_on_early_termination:flag"),
    ),
    "memory": (_sharded, kinds("model:object optimizer:object?")),
    "memory.predict": (
        lambda c: {"model": model(), "stage": 2, "world_size": 2, "accumulation": 1},
        kinds(
            "model:object stage:stage world_size:count optimizer:object? accumulation:count no_sync:any "
            "background:any plain:any rank:any"
        ),
    ),
    "no_sync": (_wrapped, kinds("module:object")),
    "parallelize": (
        lambda c: _here(c, module=model(), plan={"0": "colwise", "1": "rowwise"}),
        kinds("module:object plan:plan comm:object sequence_dim:dim overlap:flag verify:flag"),
    ),
    "parallelize.plan": (
        lambda c: _here(c, module=model(), plan={"0": "colwise", "1": "rowwise"}),
        kinds("module:any plan:style comm:any sequence_dim:any overlap:any verify:any"),
    ),
    "random.dropout": (
        lambda c: {"x": _x(), "p": 0.5, "seed": 1, "name": "a", "offset": 4, "index": 3},
        kinds("x:tensor p:share seed:integer name:text offset:whole index:integer"),
    ),
    "random.generator": (
        lambda c: {"seed": 1, "name": "a"},
        kinds("seed:integer name:text index:integer device:place"),
    ),
    "random.init_parameters": (
        lambda c: {"module": model(), "seed": 1},
        kinds("module:object seed:integer fn:function prefix:text"),
    ),
    "random.key": (lambda c: {"seed": 1, "name": "a", "index": 3}, kinds("seed:integer name:text index:integer")),
    "random.normal_": (
        lambda c: {"tensor": _x(), "mean": 0.0, "std": 1.0, "seed": 1, "name": "a", "start": 4},
        kinds("tensor:tensor mean:finite std:finite seed:integer name:text start:whole"),
    ),
    "metrics": (lambda c: {"pid": os.getpid()}, kinds("pid:count")),
    "random.uniform_": (
        lambda c: {"tensor": _x(), "seed": 1, "name": "a", "start": 4, "low": 0.0, "high": 1.0},
        kinds("tensor:tensor seed:integer name:text start:whole low:finite high:finite"),
    ),
    "random.words": (
        lambda c: {"key": 1, "start": 4, "count": 9},
        kinds("key:whole start:whole count:whole stream:whole device:place"),
    ),
    "record.dump": (lambda c: {"folder": Path("records")}, kinds("folder:path")),
    "record.load": (lambda c: {"paths": []}, kinds("paths:list")),
    "record.merge": (lambda c: {"found": []}, kinds("found:list")),
    "record.records": (lambda c: {"pid": os.getpid()}, kinds("pid:count")),
    "register_forward_method": (
        lambda c: {"module": ringcomm.fully_shard(model(), comm=c), "name": "forward"},
        kinds("module:object name:choice"),
    ),
    "restage": (
        lambda c: {**_wrapped(c), "optimizer": None, "stage": 1},
        kinds("module:object optimizer:object? stage:stage"),
    ),
    "ring_attention": (
        lambda c: _here(c, q=_q(), k=_q(), v=_q()),
        kinds(
            "q:tensor k:tensor v:tensor comm:object causal:flag scale:finite window:count key_mask:tensor? "
            "softcap:positive layout:choice overlap:flag"
        ),
    ),
    "schedule.draw": (lambda c: {"world_size": 2}, kinds("world_size:count")),
    "schedule.num_steps": (lambda c: {"world_size": 2}, kinds("world_size:count")),
    "schedule.ring_cost_us": (
        lambda c: {"nbytes": 8, "world_size": 2, "latency_us": 1.0, "bandwidth_gbps": 1.0},
        kinds("nbytes:whole world_size:count latency_us:finite bandwidth_gbps:positive"),
    ),
    "schedule.ring_step": (
        lambda c: {"rank": 0, "world_size": 2, "step": 1},
        kinds("rank:whole world_size:count step:whole"),
    ),
    "schedule.simulate": (lambda c: {"chunks": [[1, 2], [3, 4]]}, kinds("chunks:list")),
    "schedule.table": (lambda c: {"world_size": 2}, kinds("world_size:count")),
    "shard": (
        lambda c: _here(c, module=model(), stage=2, bucket_cap_mb=1),
        kinds(
            "module:object mesh:object? comm:object? broadcast_buffers:flag atom:atom reshard_after_forward:flag "
            "init_fn:object? optimizer:object? stage:stage units:units accumulation:choice mixed_precision:object? "
            "bucket_cap_mb:positive offload:place"
        ),
    ),
    "split": (
        lambda c: {"model": model(), "at": ["1"], "carry": ["0"], "order": ["0"]},
        kinds("model:object at:object carry:object order:object"),
    ),
    "stage_of": (_wrapped, kinds("module:object")),
    "step": (lambda c: {"number": 3}, kinds("number:whole")),
    "tensor_parallel.ShardedDropout": (lambda c: _here(c, p=0.5, dim=0), kinds("p:share comm:object dim:dim")),
    **{f"tensor_parallel.{name}": (lambda c: _here(c, x=_x()), OVER) for name in ("f", "f_bar")},
    **{
        f"tensor_parallel.{name}": (lambda c: _here(c, x=_x(), dim=1), ALONG)
        for name in ("g", "g_bar", "gather", "scatter")
    },
    "trace": (lambda c: {"path": Path("trace.json"), "spans_per_thread": 9}, kinds("path:path spans_per_thread:count")),
    "unshard": (_wrapped, kinds("module:object optimizer:object?")),
    "vocab_parallel_cross_entropy": (
        lambda c: _here(c, logits=torch.ones(3, 4), target=torch.zeros(3, dtype=torch.int64), vocabulary=4),
        kinds(
            "logits:tensor target:tensor comm:object vocabulary:count reduction:choice ignore_index:long "
            "label_smoothing:share"
        ),
    ),
    "wait_all": (lambda c: {"works": [c.barrier(async_op=True)]}, kinds("works:list timeout:limit")),
    "wait_any": (lambda c: {"works": [c.barrier(async_op=True)]}, kinds("works:list timeout:limit")),
    "whole": (_wrapped, kinds("module:object write:flag")),
    "checkpoint.save": (
        lambda c: _sharded(c, path=Path("saved")),
        kinds("path:path model:object optimizer:object? extra:any"),
    ),
    "checkpoint.load": (lambda c: _sharded(c, path=_saved(c)), kinds("path:path model:object optimizer:object?")),
    "checkpoint.export": (
        lambda c: {"path": _saved(c), "file": Path(f"{c.rank}.safetensors")},
        kinds("path:path file:path dtype:dtype"),
    ),
}
