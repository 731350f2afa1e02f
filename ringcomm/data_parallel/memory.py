"""Reports and predicts the memory of a model on each rank, at this or another stage or world size, and its traffic.

The prediction is a rehearsal: it runs steps with the real classes of buckets, gradients and units on torch's meta
device, which has shapes but no memory, over a communicator that moves nothing.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import Atom, FlatLayout
from ringcomm.data_parallel.model.partition import (
    blocks_of,
    bucket_bytes,
    cast_buffers,
    kept_in_their_type,
    make_units,
    units_of,
)
from ringcomm.data_parallel.model.place import place_of, sharded_model_of
from ringcomm.data_parallel.model.sharded_model import (
    IN_FLIGHT,
    Config,
    ShardedModel,
    Unit,
    flags_numel,
    reduction_order,
)
from ringcomm.data_parallel.model.sharded_parameter import ShardedParameter
from ringcomm.data_parallel.optim.optimizer import is_elementwise, states_of
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.arguments import MODULE, OPTIMIZER, PRECISION, STAGE
from ringcomm.modules.precision import MixedPrecision
from ringcomm.validation import expects, validate_int

_META = torch.device("meta")
_LENGTHS = (3, 5, 7, 11, 13, 17, 19, 23)  # extents of the tiny parameter, all different to tell dimensions apart
_OWN = ("state", "param_groups", "defaults", "zero_grad", "step", "add_param_group")
_STEPS = 2  # from the second step on, parameters are prefetched and the pool has reached its size


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters: in the type of forward and backward; a shard at stage 3.
        master: the optimizer's weights, if they are not the parameters.
        gradients: the gradients that are kept for the optimizer.
        optimizer: the optimizer's state.
        buffers: the module's buffers.
        transient: memory that reductions and accumulation use during a step; it stays allocated for the next step.
        gathered: at stage 3, the largest size of parameters that were unsharded at the same time.
    """

    parameters: int
    master: int
    gradients: int
    optimizer: int
    buffers: int
    transient: int
    gathered: int

    @property
    def resident(self) -> int:
        """Bytes between two steps, without transient memory."""
        return self.parameters + self.master + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        """Bytes during a step if every kind peaks at the same time; without activations and autograd's own
        gradients."""
        return self.resident + self.transient + self.gathered

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        rows += [("resident", self.resident), ("peak", self.peak)]
        return "\n".join(f"{name:<12}{nbytes / 2**20:>12.3f} MiB" for name, nbytes in rows)


@expects("memory", model=MODULE, optimizer=OPTIMIZER)
def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Returns the bytes that this rank holds now, measured from the buffers themselves; the model may be plain, too.

    Args:
        optimizer: None: the optimizers that were sharded with the model.
    """
    flat = sharded_model_of(model)
    totals: Counter[str] = Counter()
    for p in model.parameters():
        if place_of(p) is None:
            totals["parameters"] += p.nbytes
            totals["gradients"] += 0 if p.grad is None else p.grad.nbytes
    if flat is not None:
        for bucket in flat.buckets:
            totals.update(bucket.nbytes())
    optimizers = [optimizer] if optimizer is not None else [] if flat is None else list(flat.optimizers)
    for each in optimizers:
        totals["optimizer"] += sum(v.nbytes for state in states_of(each) for v in state.values() if torch.is_tensor(v))
    return Memory(
        **{name: totals[name] for name in ("parameters", "master", "gradients", "optimizer")},
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        transient=0 if flat is None else flat.ranks.pool_nbytes,
        gathered=0 if flat is None else flat.ranks.gathered_peak_nbytes,
    )


def predict(
    model: nn.Module, stage: int, world_size: int, optimizer: torch.optim.Optimizer | None = None, **how: Any
) -> Memory:
    """Returns the bytes that a rank would hold after two steps, exactly as `memory` would then report. Allocates
    nothing.

    Args:
        model: a plain model on any device, meta included; or a sharded model at any stage.
        optimizer: over the model's parameters; None: the optimizers that were sharded with it.
        how: ``rank``, ``accumulation``, ``no_sync``, ``background``, and for a plain model options of `ringcomm.shard`
            such as ``mixed_precision`` and ``bucket_cap_mb``: see `Plan`.
    """
    return Plan(model, stage, world_size, optimizer, **how).memory


def traffic(
    model: nn.Module, stage: int, world_size: int, optimizer: torch.optim.Optimizer | None = None, **how: Any
) -> dict[str, int]:
    """Returns the collectives of one step on a rank in the steady state, by kind, and the bytes of their messages (of
    the whole buffers): "all_reduce calls", "all_reduce bytes", ... Clipping and a GradScaler add a few bytes, which are
    not counted.

    Args: as of `predict`.
    """
    return dict(Plan(model, stage, world_size, optimizer, **how).traffic)


class Plan:
    """A rehearsal of training in which every parameter is used in every step.

    Args:
        rank: the rank to predict; shards have equal length, but the optimizer's state covers only the used elements.
        accumulation: backward passes per step.
        no_sync: whether all but the last of these passes run without communication.
        background: whether collectives run beside the computation; None: as in the sharded model, or True.
        plain: options for a plain model, as of `ringcomm.shard`: mixed_precision, bucket_cap_mb (25),
            accumulation_order ("sequential"), atom, offload, reshard_after_forward, broadcast_buffers. A sharded model
            has its own.
    """

    @expects(
        "predict",
        model=MODULE,
        stage=STAGE,
        world_size=validate_int(1, 1 << 31),
        optimizer=OPTIMIZER,
        accumulation=validate_int(1),
    )
    def __init__(
        self,
        model: nn.Module,
        stage: int,
        world_size: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rank: int | None = None,
        accumulation: int = 1,
        no_sync: bool = True,
        background: bool | None = None,
        **plain: Any,
    ) -> None:
        flat = sharded_model_of(model)
        if flat is not None and plain:
            raise InvalidArgumentError(
                f"predict: got {', '.join(plain)} for a sharded model, which has its own; leave them out"
            )
        self.stage, self.accumulation, self.no_sync = stage, accumulation, no_sync
        at = rank if rank is not None else 0 if flat is None else min(flat.ranks.rank, world_size - 1)
        self.ranks = _ranks_of(flat, at, world_size, background)
        self._home: dict[int, tuple[Bucket, int]] = {}  # by the id of the model's parameter
        if flat is not None:
            self.buffers = list(model.buffers())
            self.units, self.sends = self._units_of_sharded(flat), flat.sync.broadcast_buffers
        else:
            self.units, self.buffers = self._units_of_plain(model, optimizer, **plain)
            self.sends = bool(plain.get("broadcast_buffers", True))
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self.order = reduction_order(self.units)
        self.ignored = [] if flat is None else [p for p in model.parameters() if place_of(p) is None]
        optimizers = self._optimizers(flat, optimizer)
        self.stepped = self._stepped(numbers for _, numbers in optimizers)
        for _ in range(_STEPS):
            self.ranks.traffic.clear()
            self._step()
        self.traffic = self.ranks.traffic
        self.memory = self._memory(optimizers)

    # ---- the model's buckets, on the meta device --------------------------------------------------------------------

    def _units_of_sharded(self, flat: ShardedModel) -> list[Unit]:
        units = []
        for unit in flat.units:
            buckets = [self._bucket_again(bucket) for bucket in unit.buckets]
            made = Unit(unit.name, [], buckets, unit.reshard_after_forward)
            made.reshard_after_backward = unit.reshard_after_backward
            units.append(made)
        return units

    def _bucket_again(self, bucket: Bucket) -> Bucket:
        """Returns a bucket with the same parameters, laid out for the predicted ranks."""
        laid = bucket.layout
        layout = FlatLayout.build(laid.segments, laid.dtype, self.ranks.world_size, laid.atom)
        master = None if bucket.master_device is None else _META
        kind = bucket.types.compute
        params = [
            nn.Parameter(torch.empty(s.shape, dtype=kind, device=_META), bucket.trainable) for s in layout.segments
        ]
        again = Bucket(
            layout,
            params,
            self.ranks,
            bucket.types,
            self.stage,
            ShardedParameter,
            tree=bucket.tree,
            master_device=master,
            send=False,
        )
        self._home |= {id(p): (again, i) for i, p in enumerate(bucket.params)}
        return again

    @expects("predict", mixed_precision=PRECISION)
    def _units_of_plain(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        mixed_precision: MixedPrecision | None = None,
        bucket_cap_mb: float = 25,
        accumulation_order: str = "sequential",
        atom: Atom | None = None,
        offload: bool = False,
        reshard_after_forward: bool = True,
        broadcast_buffers: bool = True,
    ) -> tuple[list[Unit], list[torch.Tensor]]:
        del broadcast_buffers
        twins = {id(p): nn.Parameter(torch.empty_like(p, device=_META), p.requires_grad) for p in model.parameters()}
        memo: dict[int, Any] = {id(b): torch.empty_like(b, device=_META) for b in model.buffers()}
        twin = copy.deepcopy(model, memo | twins)
        numbers = {} if optimizer is None else _group_numbers(optimizer)
        config = Config(
            stage=self.stage,
            mixed_precision=mixed_precision or MixedPrecision(),
            accumulation=accumulation_order,
            offload=_META if offload else None,
        )
        cast_buffers(twin, config.mixed_precision.buffer_dtype)
        cap = bucket_bytes(bucket_cap_mb, self.ranks)
        params = list(twin.named_parameters())
        units = make_units(
            units_of(twin, params, blocks_of(twin), reshard_after_forward, cap),
            config,
            self.ranks,
            most_bytes=cap,
            atom=atom or ("element" if optimizer is None or is_elementwise(optimizer) else "tensor"),
            optimizer_group={id(twins[key]): number for key, number in numbers.items()},
            kept=kept_in_their_type(twin),
            send=False,
        )
        places = {id(p): (bucket, i) for unit in units for bucket in unit.buckets for i, p in enumerate(bucket.params)}
        self._home |= {key: places[id(p)] for key, p in twins.items()}
        return units, list(twin.buffers())

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        ahead = self.ranks.background and self.ranks.gathered_peak_nbytes > 0
        for k in range(self.accumulation):
            sync = k == self.accumulation - 1 or not self.no_sync
            if sync and self.sends:
                for dtype in {buffer.dtype for buffer in self.buffers}:
                    some = [buffer for buffer in self.buffers if buffer.dtype == dtype]
                    self.ranks.count("broadcast", sum(buffer.nbytes for buffer in some))
            self._forward(ahead or (k > 0 and self.ranks.background))
            self._backward(sync)
        for bucket in self.order:
            for _ in range(self.stepped[bucket] if self.stage in (1, 2) else 0):
                bucket.sync_params_from_master()
            bucket.gradient.drop()
            for p in bucket.params:
                p.grad = None

    def _forward(self, ahead: bool) -> None:
        inner, root = self.units[:-1], self.units[-1]
        called = [root, *inner]
        for unit, after in zip(called, [*inner, None], strict=True):
            unit.gather()
            if ahead and after is not None:
                after.start_gather()
            if unit is not root and unit.reshard_after_forward:
                unit.release()
        for unit in called:
            if unit.reshard_after_forward:
                unit.release()

    def _backward(self, sync: bool) -> None:
        inner, root = self.units[:-1], self.units[-1]
        in_flight: deque[Bucket] = deque()
        root.gather()
        for i, unit in reversed(list(enumerate(inner))):
            unit.gather()
            if self.ranks.background and i:
                inner[i - 1].start_gather()
            if unit.reshard_after_backward:
                unit.release()
            self._reduce(unit, sync, in_flight)
        self._reduce(root, sync, in_flight)
        while in_flight:
            in_flight.popleft().gradient.finish_reduce()
        if sync and self.ranks.data_world_size > 1:
            self.ranks.count("flags", flags_numel(self.order, self.stage))
        for bucket in self.order:
            bucket.gradient.expose_grads()
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.release()

    def _reduce(self, unit: Unit, sync: bool, in_flight: deque[Bucket]) -> None:
        for bucket in reversed(unit.buckets):
            if not bucket.trainable:
                continue
            while sync and self.stage >= 2 and len(in_flight) >= IN_FLIGHT:
                in_flight.popleft().gradient.finish_reduce()
            gradient = bucket.gradient
            gradient.open(set())
            for p, segment in zip(bucket.params, bucket.layout.segments, strict=True):
                if p.grad is None:
                    p.grad = torch.empty(segment.shape, dtype=bucket.types.compute, device=_META)
            gradient.local.contributed |= set(range(len(bucket.params)))
            gradient.pack()
            if not sync:
                continue
            gradient.start_reduce()
            in_flight.append(bucket)
            if not self.ranks.background:
                in_flight.popleft().gradient.finish_reduce()

    # ---- figures ---------------------------------------------------------------------------------------------------

    def _optimizers(
        self, flat: ShardedModel | None, optimizer: torch.optim.Optimizer | None
    ) -> list[tuple[torch.optim.Optimizer, dict[int, int]]]:
        """Returns the optimizers, each with its group index of every parameter, by id."""
        if flat is not None:
            some = [each for each in flat.optimizers if optimizer is None or each is optimizer]
            return [(each, _group_numbers(each)) for each in some]
        return [] if optimizer is None else [(optimizer, _group_numbers(optimizer))]

    def _stepped(self, optimizers: Iterable[dict[int, int]]) -> Counter[Bucket]:
        """Counts the optimizers that step each bucket; without optimizers, assumes one over all parameters."""
        homes = [{self._home[key][0] for key in numbers if key in self._home} for numbers in optimizers]
        return Counter(bucket for each in homes or [{*self.buckets}] for bucket in each)

    def _memory(self, optimizers: Iterable[tuple[torch.optim.Optimizer, dict[int, int]]]) -> Memory:
        totals: Counter[str] = Counter()
        for bucket in self.buckets:
            totals.update(bucket.nbytes())
        for p in self.ignored:
            totals.update(parameters=p.nbytes, gradients=p.nbytes if p.requires_grad else 0)
        state = sum(self._state_nbytes(optimizer, numbers) for optimizer, numbers in optimizers)
        return Memory(
            **{name: totals[name] for name in ("parameters", "master", "gradients")},
            optimizer=state,
            buffers=sum(buffer.nbytes for buffer in self.buffers),
            transient=self.ranks.pool_nbytes,
            gathered=self.ranks.gathered_peak_nbytes,
        )

    def _state_nbytes(self, optimizer: torch.optim.Optimizer, numbers: dict[int, int]) -> int:
        total = 0
        owner_of = {self._home[key]: number for key, number in numbers.items() if key in self._home}
        for p in self.ignored:
            if p.requires_grad and id(p) in numbers:
                total += state_nbytes(optimizer, numbers[id(p)], p.shape, p.dtype)
        for bucket in self.buckets:
            if not bucket.trainable:
                continue
            owners = [owner_of.get((bucket, i), -1) for i in range(len(bucket.params))]
            master = bucket.types.master
            if is_elementwise(optimizer):
                for run in bucket.runs(owners):
                    total += state_nbytes(optimizer, run.group, (run.end - run.start,), master)
                continue
            for fragment in bucket.layout.fragments(bucket.start, bucket.end):
                if owners[fragment.segment] >= 0:
                    shape = bucket.layout.segments[fragment.segment].shape
                    total += state_nbytes(optimizer, owners[fragment.segment], shape, master)
        return total


def _group_numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


# ---- the size of an optimizer's state ------------------------------------------------------------------------------


def state_nbytes(optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of one parameter's state after its first step.

    A copy of the optimizer steps a tiny parameter with the same number of dimensions once. State with the parameter's
    dimensions grows with the parameter; state with one element does not.

    Args:
        group: index of the optimizer's parameter group.
    Raises:  UnsupportedError: state of a shape that does not follow from the parameter's.
    """
    tiny = _LENGTHS[: len(shape)]
    return sum(
        value.itemsize * _numel(optimizer, key, tuple(value.shape), tiny, shape)
        for key, value in _state_of(optimizer, group, tiny, dtype).items()
        if torch.is_tensor(value)
    )


def _numel(
    optimizer: torch.optim.Optimizer, key: str, found: tuple[int, ...], tiny: Sequence[int], shape: Sequence[int]
) -> int:
    if math.prod(found) == 1:
        return 1
    by_length = {1: 1, **dict(zip(tiny, shape, strict=True))}
    if set(found) <= set(by_length):
        return math.prod(by_length[length] for length in found)
    if found == (math.prod(tiny),):
        return math.prod(shape)
    raise UnsupportedError(
        f"predict: got {type(optimizer).__name__}, whose {key} is of shape {found} for a parameter of shape "
        f"{tuple(tiny)}, expected dimensions of the parameter; measure it with ringcomm.memory"
    )


def _state_of(optimizer: torch.optim.Optimizer, group: int, tiny: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    param = nn.Parameter(torch.ones(tiny, dtype=dtype))
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if not k.startswith("_ringcomm") and k not in _OWN})
    for name in [name for name in vars(twin) if name.startswith("_optimizer_")]:
        delattr(twin, name)  # removes the copied hooks
    options = {**optimizer.param_groups[group], "params": [param]}
    if options.get("capturable"):
        options["capturable"] = False  # only for GPUs; the state is the same without it
    twin.__setstate__({"state": defaultdict(dict), "param_groups": [options], "defaults": dict(optimizer.defaults)})
    param.grad = torch.zeros_like(param)
    twin.step()
    return dict(twin.state[param])


# ---- a communicator that moves nothing -----------------------------------------------------------------------------


class _MetaCommunicator:
    """A communicator of one rank among many that moves nothing, on the meta device."""

    def __init__(self, rank: int, world_size: int, engine: str) -> None:
        self.rank, self.world_size, self.engine, self.device = rank, world_size, engine, "meta"

    def empty(self, numel: int, *, dtype: torch.dtype, like: str) -> torch.Tensor:
        """Returns a tensor with a shape and no memory."""
        return torch.empty(numel, dtype=dtype, device=_META)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> _MetaCommunicator:
        return self

    def reduce_scatter(
        self, x: torch.Tensor, op: str, *, out: torch.Tensor, async_op: bool = False
    ) -> _MetaCommunicator:
        return self

    def _all_gather(self, x: torch.Tensor, *, out: torch.Tensor, async_op: bool, mark: int) -> _MetaCommunicator:
        return self

    def pack(self, pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Returns at once, because nothing was started."""


def _ranks_of(flat: ShardedModel | None, rank: int, world_size: int, background: bool | None) -> DataParallelGroup:
    engine = "cpu" if flat is None else flat.ranks.comm.engine
    replicas: Any = None
    if flat is not None and flat.ranks.replicas is not None:
        replicas = _MetaCommunicator(0, flat.ranks.replicas.world_size, engine)
    comm: Any = _MetaCommunicator(rank, world_size, engine)
    ranks = DataParallelGroup(comm, replicas)
    ranks.background = background if background is not None else True if flat is None else flat.ranks.background
    return ranks
