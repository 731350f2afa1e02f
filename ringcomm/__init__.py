"""ringcomm: collective communication for PyTorch and NumPy on hand-written ring primitives.

    import ringcomm

    comm = ringcomm.init()                # under torchrun; or ringcomm.run_ranks(fn, 4)
    comm.all_reduce(x)                    # torch, NumPy, DLPack
    torch.distributed.init_process_group("ringcomm")

Importing this imports neither torch nor NumPy. The torch.distributed backend registers itself as soon as
torch.distributed has been imported, before or after.
"""

from __future__ import annotations

import importlib as _importlib
import importlib.abc as _abc
import importlib.machinery as _machinery
import os as _os
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

__version__ = "0.1.0"

if _TYPE_CHECKING:
    from ringcomm import context as context
    from ringcomm import errors as errors
    from ringcomm import hooks as hooks
    from ringcomm import pipeline as pipeline
    from ringcomm import record as record
    from ringcomm import schedule as schedule
    from ringcomm import tensor as tensor
    from ringcomm._C import build_info as build_info
    from ringcomm.communicator import Communicator as Communicator
    from ringcomm.context.attention import ring_attention as ring_attention
    from ringcomm.context.mode import context_parallel as context_parallel
    from ringcomm.data_parallel import DistributedDataParallel as DistributedDataParallel
    from ringcomm.data_parallel import NaiveDataParallel as NaiveDataParallel
    from ringcomm.errors import AbortedError as AbortedError
    from ringcomm.errors import ClosedError as ClosedError
    from ringcomm.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from ringcomm.errors import DeviceError as DeviceError
    from ringcomm.errors import DtypeError as DtypeError
    from ringcomm.errors import EngineError as EngineError
    from ringcomm.errors import InvalidArgumentError as InvalidArgumentError
    from ringcomm.errors import MismatchError as MismatchError
    from ringcomm.errors import RankFailedError as RankFailedError
    from ringcomm.errors import RankLostError as RankLostError
    from ringcomm.errors import RingcommError as RingcommError
    from ringcomm.errors import ShapeError as ShapeError
    from ringcomm.errors import UnsupportedError as UnsupportedError
    from ringcomm.launch import run_ranks as run_ranks
    from ringcomm.mesh import Mesh as Mesh
    from ringcomm.mesh import init_mesh as init_mesh
    from ringcomm.parallel import checkpoint as checkpoint
    from ringcomm.parallel import random as random
    from ringcomm.parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from ringcomm.parallel.fully_shard import fully_shard as fully_shard
    from ringcomm.parallel.fully_shard import register_forward_method as register_forward_method
    from ringcomm.parallel.join import join as join
    from ringcomm.parallel.memory import memory as memory
    from ringcomm.parallel.precision import GradScaler as GradScaler
    from ringcomm.parallel.precision import MixedPrecision as MixedPrecision
    from ringcomm.parallel.shard import no_sync as no_sync
    from ringcomm.parallel.shard import restage as restage
    from ringcomm.parallel.shard import shard as shard
    from ringcomm.parallel.shard import stage_of as stage_of
    from ringcomm.parallel.shard import unshard as unshard
    from ringcomm.parallel.shard import whole as whole
    from ringcomm.parallel.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from ringcomm.parallel.zero_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from ringcomm.pipeline.cuts import split as split
    from ringcomm.pipeline.pipeline import Pipeline as Pipeline
    from ringcomm.record import step as step
    from ringcomm.rendezvous import init as init
    from ringcomm.tensor.layers import ColumnParallelLinear as ColumnParallelLinear
    from ringcomm.tensor.layers import RowParallelLinear as RowParallelLinear
    from ringcomm.tensor.layers import VocabParallelEmbedding as VocabParallelEmbedding
    from ringcomm.tensor.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from ringcomm.tensor.plan import parallelize as parallelize
    from ringcomm.timeline import trace as trace
    from ringcomm.work import Work as Work

_HOMES = {
    "AbortedError": "errors",
    "ClosedError": "errors",
    "CollectiveTimeoutError": "errors",
    "ColumnParallelLinear": "tensor.layers",
    "Communicator": "communicator",
    "DeviceError": "errors",
    "DistributedDataParallel": "data_parallel",
    "DtypeError": "errors",
    "EngineError": "errors",
    "GradScaler": "parallel.precision",
    "InvalidArgumentError": "errors",
    "Mesh": "mesh",
    "MismatchError": "errors",
    "MixedPrecision": "parallel.precision",
    "NaiveDataParallel": "data_parallel",
    "Pipeline": "pipeline.pipeline",
    "RankFailedError": "errors",
    "RankLostError": "errors",
    "RingcommError": "errors",
    "RowParallelLinear": "tensor.layers",
    "ShapeError": "errors",
    "SyncBatchNorm": "parallel.sync_batch_norm",
    "UnsupportedError": "errors",
    "VocabParallelEmbedding": "tensor.layers",
    "Work": "work",
    "ZeroRedundancyOptimizer": "parallel.zero_optimizer",
    "build_info": "_C",
    "clip_grad_norm_": "parallel.clip",
    "context_parallel": "context.mode",
    "fully_shard": "parallel.fully_shard",
    "init": "rendezvous",
    "init_mesh": "mesh",
    "join": "parallel.join",
    "memory": "parallel.memory",
    "no_sync": "parallel.shard",
    "parallelize": "tensor.plan",
    "register_forward_method": "parallel.fully_shard",
    "restage": "parallel.shard",
    "ring_attention": "context.attention",
    "run_ranks": "launch",
    "shard": "parallel.shard",
    "split": "pipeline.cuts",
    "stage_of": "parallel.shard",
    "step": "record",
    "trace": "timeline",
    "unshard": "parallel.shard",
    "vocab_parallel_cross_entropy": "tensor.loss",
    "whole": "parallel.shard",
}

_MODULES = {
    "checkpoint": "parallel.checkpoint",
    "context": "context",
    "errors": "errors",
    "hooks": "hooks",
    "pipeline": "pipeline",
    "random": "parallel.random",
    "record": "record",
    "schedule": "schedule",
    "simulate": "simulate",
    "tensor": "tensor",
}

__all__ = [
    "AbortedError",
    "ClosedError",
    "CollectiveTimeoutError",
    "ColumnParallelLinear",
    "Communicator",
    "DeviceError",
    "DistributedDataParallel",
    "DtypeError",
    "EngineError",
    "GradScaler",
    "InvalidArgumentError",
    "Mesh",
    "MismatchError",
    "MixedPrecision",
    "NaiveDataParallel",
    "Pipeline",
    "RankFailedError",
    "RankLostError",
    "RingcommError",
    "RowParallelLinear",
    "ShapeError",
    "SyncBatchNorm",
    "UnsupportedError",
    "VocabParallelEmbedding",
    "Work",
    "ZeroRedundancyOptimizer",
    "__version__",
    "build_info",
    "checkpoint",
    "clip_grad_norm_",
    "context",
    "context_parallel",
    "errors",
    "fully_shard",
    "hooks",
    "init",
    "init_mesh",
    "join",
    "memory",
    "no_sync",
    "parallelize",
    "pipeline",
    "random",
    "record",
    "register_forward_method",
    "restage",
    "ring_attention",
    "run_ranks",
    "schedule",
    "shard",
    "split",
    "stage_of",
    "step",
    "tensor",
    "trace",
    "unshard",
    "vocab_parallel_cross_entropy",
    "whole",
]


def __getattr__(name: str) -> _Any:
    home = _MODULES.get(name) or _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ringcomm' has no attribute {name!r}")
    module = _importlib.import_module(f"ringcomm.{home}")
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *dunders})


if _os.environ.get("RINGCOMM_TRACE"):
    _importlib.import_module("ringcomm.timeline").trace_process(_os.environ["RINGCOMM_TRACE"])


# ---- the torch.distributed backend -------------------------------------------------------------------------------

_TORCH_DISTRIBUTED = "torch.distributed"


def _register_backend() -> None:
    if hasattr(_sys.modules[_TORCH_DISTRIBUTED], "Backend"):  # not in a torch that was built without it
        _importlib.import_module("ringcomm.backend").register()


class _AfterTorchDistributed(_abc.MetaPathFinder):
    """Finds torch.distributed where it is, and registers the backend once it has been imported."""

    def find_spec(
        self, fullname: str, path: _Any = None, target: _ModuleType | None = None
    ) -> _machinery.ModuleSpec | None:
        if fullname != _TORCH_DISTRIBUTED:
            return None
        _sys.meta_path.remove(self)
        spec = _machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_register(module: _ModuleType) -> None:
                run_module(module)
                _register_backend()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _TORCH_DISTRIBUTED in _sys.modules:
    _register_backend()
else:
    _sys.meta_path.insert(0, _AfterTorchDistributed())
