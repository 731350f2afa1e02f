"""Predicts the time of a training step on a simulated cluster, and the share that waits for the network. The
messages at each stage come from `ringcomm.data_parallel.memory.traffic`, a rehearsal of the training layer's own
step; the time of each message comes from `ringcomm.simulate`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ringcomm.data_parallel.memory import traffic
from ringcomm.data_parallel.model.sharded_model import IN_FLIGHT
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.precision import MixedPrecision
from ringcomm.pipeline_parallel.check import COSTS, times
from ringcomm.pipeline_parallel.schedules import Kind, schedule_of
from ringcomm.tools.simulate import Cluster, predict, time_us

_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Step:
    """The prediction for one step of one rank.

    Attributes:
        time_us: time of the step, without the optimizer's arithmetic.
        compute_us: time of the forward and backward passes of all micro-batches.
        communication_us: time of all collectives, one after another.
        exposed_us: the part of the step's time that exceeds compute_us.
        wire: collectives of the step, as `traffic` counts them.
    """

    time_us: float
    compute_us: float
    communication_us: float
    wire: dict[str, int]

    @property
    def exposed_us(self) -> float:
        return self.time_us - self.compute_us

    @property
    def efficiency(self) -> float:
        """The share of the step in which the rank computes."""
        return self.compute_us / self.time_us if self.time_us else 1.0


def forward_us(parameters: int, tokens: int, tflops: float) -> float:
    """Returns the time of a forward pass of a dense transformer over ``tokens``, at a reached speed of ``tflops``: 2
    operations per parameter and token (Kaplan et al. 2020, arXiv 2001.08361), without those of attention itself."""
    return 2.0 * parameters * tokens / (tflops * 1e6)


def wire(
    parameters: int,
    layers: int,
    stage: int,
    world_size: int,
    *,
    microbatches: int = 1,
    param_dtype: str = "bfloat16",
    reduce_dtype: str = "float32",
) -> dict[str, int]:
    """Returns the collectives of one step of a model of equal layers, from `ringcomm.data_parallel.memory.traffic`.

    Raises:  InvalidArgumentError: fewer parameters than layers, or arguments that `traffic` refuses.
    """
    if layers < 1 or parameters < layers or microbatches < 1:
        raise InvalidArgumentError(
            f"simulate: got {parameters} parameters in {layers} layers and {microbatches} micro-batches, expected at "
            "least one layer, a parameter in each, and a micro-batch; pass these"
        )
    each, rest = divmod(parameters, layers)
    numels = [each + (i < rest) for i in range(layers)]
    model = nn.Sequential(*(nn.Linear(numel, 1, bias=False, device="meta") for numel in numels))
    precision = MixedPrecision(getattr(torch, param_dtype), getattr(torch, reduce_dtype))
    return traffic(model, stage, world_size, mixed_precision=precision, accumulation=microbatches)


def step(
    parameters: int,
    cluster: Cluster,
    *,
    stage: int,
    layers: int,
    forward_us: float,
    backward_us: float | None = None,
    microbatches: int = 1,
    param_dtype: str = "bfloat16",
    reduce_dtype: str = "float32",
    overlap: bool = True,
    algorithm: str = "auto",
) -> Step:
    """
    Predicts one data parallel step over all ranks of the cluster.

    Args:
        parameters: number of parameters of the model, which has ``layers`` equal layers.
        stage: the ZeRO stage, 0 to 3.
        forward_us, backward_us: time of one micro-batch; backward_us None: twice forward_us.
        microbatches: micro-batches whose gradients are added up before they are reduced.
        param_dtype: type of the parameters when they are gathered.
        reduce_dtype: type of the gradients passed to the collectives; see `Cluster.wire` for the type that is sent.
        overlap: whether collectives run beside the computation, which they do not slow down in this model: one after
            another, a unit's reduction after its backward pass, at stage 3 the next unit's gather while a unit is
            computed. False: every collective is waited for.
        algorithm: algorithm of the collectives.

    Raises:  InvalidArgumentError: as `wire` and `ringcomm.simulate.predict`.
    """
    sent = wire(
        parameters, layers, stage, cluster.world_size,
        microbatches=microbatches, param_dtype=param_dtype, reduce_dtype=reduce_dtype,
    )  # fmt: skip
    dtypes = {"all_gather": param_dtype, "all_reduce": reduce_dtype, "reduce_scatter": reduce_dtype}
    calls = {kind: sent.get(f"{kind} calls", 0) for kind in _KINDS}
    each_us = {
        kind: predict(kind, sent[f"{kind} bytes"] // calls[kind], cluster, algorithm, dtypes[kind]).time_us
        for kind in _KINDS
        if calls[kind]
    }
    flags = sent.get("flags bytes", 0)
    flags_us = time_us("all_reduce", flags, cluster, "auto", "uint8") if flags else 0.0
    backward = 2 * forward_us if backward_us is None else backward_us
    clock = _Timeline(overlap)
    gathers = calls["all_gather"] // (2 * microbatches) if stage == 3 else 0
    reduces = calls["all_reduce"] + calls["reduce_scatter"]
    reduce_us = each_us.get("all_reduce", each_us.get("reduce_scatter", 0.0))
    for k in range(microbatches):
        last = k == microbatches - 1
        clock.forward(forward_us, gathers, each_us.get("all_gather", 0.0))
        clock.backward(
            backward, gathers, each_us.get("all_gather", 0.0), reduces if last else 0, reduce_us, limited=stage >= 2
        )
    clock.drain()
    after = flags_us + (calls["all_gather"] * each_us["all_gather"] if stage in (1, 2) and calls["all_gather"] else 0.0)
    return Step(
        time_us=clock.now + after,
        compute_us=microbatches * (forward_us + backward),
        communication_us=flags_us + sum(calls[kind] * each_us[kind] for kind in each_us),
        wire=sent,
    )


class _Timeline:
    """A rank that computes, with its collectives, which run one after another beside the computation."""

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap
        self.now = 0.0
        self.free = 0.0  # time at which the collectives started so far are done

    def start(self, took_us: float) -> float:
        """Starts a collective now; returns the time at which it is done."""
        self.free = max(self.free, self.now) + took_us
        if not self.overlap:
            self.now = self.free
        return self.free

    def drain(self) -> None:
        self.now = max(self.now, self.free)

    def forward(self, compute_us: float, gathers: int, gather_us: float) -> None:
        ready = self.start(gather_us) if gathers else self.now
        for unit in range(max(1, gathers)):
            self.now = max(self.now, ready)
            if unit + 1 < gathers:
                ready = self.start(gather_us)
            self.now += compute_us / max(1, gathers)

    def backward(
        self, compute_us: float, gathers: int, gather_us: float, reduces: int, reduce_us: float, limited: bool
    ) -> None:
        units = max(1, gathers, reduces)
        ready = self.start(gather_us) if gathers else self.now
        in_flight: list[float] = []
        for unit in range(units):
            self.now = max(self.now, ready) if gathers else self.now
            if unit + 1 < gathers:
                ready = self.start(gather_us)
            self.now += compute_us / units
            if unit < reduces:
                if limited and len(in_flight) >= IN_FLIGHT:
                    self.now = max(self.now, in_flight.pop(0))
                in_flight.append(self.start(reduce_us))


# ---- tensor and pipeline parallel ----------------------------------------------------------------------------------


def tensor_us(layers: int, activation_bytes: int, cluster: Cluster, ranks: int, dtype: str = "bfloat16") -> float:
    """Returns the communication time of a micro-batch in ``layers`` transformer layers that are split over ``ranks``
    of one host: four all_reduces of the activations per layer (batch x sequence x width elements), none of them
    overlapped with computation (docs/parallel.md)."""
    if ranks < 1 or ranks > cluster.ranks_per_host:
        raise InvalidArgumentError(
            f"simulate: got {ranks} tensor parallel ranks, expected 1 to the {cluster.ranks_per_host} of a host; pass "
            "as many"
        )
    if ranks == 1:
        return 0.0
    alone = replace(cluster.without_differences(), hosts=1, ranks_per_host=ranks)
    return 4 * layers * predict("all_reduce", activation_bytes, alone, "best", dtype).time_us


def message_us(nbytes: int, cluster: Cluster) -> float:
    """Returns the time of a message from one host's rank to another's, alone on its links."""
    two = replace(cluster.without_differences(), hosts=2, ranks_per_host=1)
    return time_us("broadcast", nbytes, two, "ring", "uint8")


def pipeline_us(
    schedule: str,
    ranks: int,
    microbatches: int,
    forward_us: float,
    activation_bytes: int,
    cluster: Cluster,
    *,
    backward_us: float | None = None,
    chunks: int = 1,
) -> tuple[float, float]:
    """Returns (time of a step, its idle share) of a pipeline over hosts, by running the schedule of
    `ringcomm.pipeline_parallel`.

    Args:
        schedule: name of the schedule, as in `ringcomm.Pipeline`.
        forward_us, backward_us: time of one micro-batch on all stages of a rank; backward_us None: twice forward_us.
        activation_bytes: bytes that one micro-batch sends between two stages.
    """
    plan = schedule_of(schedule, ranks, microbatches, chunks)
    share = forward_us / chunks
    back = (2 * forward_us if backward_us is None else backward_us) / chunks
    cost = {**COSTS, Kind.FORWARD: share, Kind.BACKWARD: back, Kind.INPUT: back / 2, Kind.WEIGHT: back / 2}
    latency = message_us(activation_bytes, cluster) if ranks > 1 else 0.0
    rows = times(plan, cost, latency)
    whole = max((end for row in rows for _, _, end in row), default=0.0)
    busy = sum(end - start for row in rows for _, start, end in row)
    return whole, 1 - busy / (whole * len(rows)) if whole else 0.0
