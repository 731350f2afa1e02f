"""Mixed precision: the element types of computation, accumulation and communication; and loss scaling that all ranks
agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ringcomm.data_parallel.shard_spec import refuse_parts
from ringcomm.errors import InvalidArgumentError, UnsupportedError, shown
from ringcomm.validation import expects, that

if TYPE_CHECKING:
    from ringcomm.data_parallel.sharded_model import ShardedModel

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WIRES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class MixedPrecision:
    """Element types of training; None keeps the module's own type.

    Attributes:
        param_dtype: type of the parameters in forward and backward. The optimizer works on master weights in
            ``master_dtype``, which are on the device of the optimizer's state.
        reduce_dtype: type of gradients when they are sent. 16-bit and 8-bit floats are added in float32 and rounded
            once. 8-bit gradients are scaled by each parameter's largest magnitude on any rank; they keep 3 (e4m3) or 2
            (e5m2) bits of fraction, and lose elements below about 2**-18 (e4m3) or 2**-32 (e5m2) of the largest. None:
            the type of the master weights.
            master weights.
        output_dtype: type of the module's outputs.
        cast_forward_inputs: whether floating point inputs of a unit are cast to ``param_dtype``.
        master_dtype: None: float32 for a module in float32 or in 16 bits with a ``param_dtype``, else the module's
            type.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        kinds = {"param_dtype": FLOATS, "reduce_dtype": WIRES, "output_dtype": FLOATS, "master_dtype": FLOATS}
        for name, known in kinds.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value in known):
                got = value if isinstance(value, torch.dtype) else shown(value)
                raise InvalidArgumentError(
                    f"MixedPrecision: got {name}={got}, expected one of {', '.join(map(str, known))}; pass one of these"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise InvalidArgumentError(
                f"MixedPrecision: got cast_forward_inputs={shown(self.cast_forward_inputs)}, expected True or False; "
                "pass one"
            )

    def types_of(self, dtype: torch.dtype) -> Types:
        """Returns the types of a parameter of ``dtype``."""
        if not dtype.is_floating_point:
            return Types(dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        master = self.master_dtype
        if master is None:
            master = dtype if self.param_dtype is None or dtype == torch.float64 else torch.float32
        return Types(compute, master, self.reduce_dtype or master)

    def cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        """Returns ``value`` with its floating point tensors in ``dtype``. A container that needs no cast is returned
        as the same object, so that later appends to it are seen."""
        if dtype is None:
            return value
        from torch.utils._pytree import tree_flatten, tree_unflatten

        if type(value) in (tuple, list):
            items = [self.cast(x, dtype) for x in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        if type(value) is dict:
            named = {key: self.cast(x, dtype) for key, x in value.items()}
            return value if all(named[key] is x for key, x in value.items()) else named
        leaves, spec = tree_flatten(value)
        cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        return value if all(a is b for a, b in zip(cast, leaves, strict=True)) else tree_unflatten(cast, spec)


def precision_of(policy: Any, call: str, argument: str) -> MixedPrecision:
    """Returns a MixedPrecision; converts a policy of torch's, in which a ``reduce_dtype`` of None means
    ``param_dtype``.

    Raises: InvalidArgumentError: something else. UnsupportedError: a ``buffer_dtype``.
    """
    if isinstance(policy, MixedPrecision):
        return policy
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
        raise InvalidArgumentError(
            f"{call}: got {argument}={shown(policy)}, expected ringcomm.MixedPrecision or a policy of torch's; pass one"
        )
    if getattr(policy, "buffer_dtype", None) is not None:
        raise UnsupportedError(
            f"{call}: got {argument} with buffer_dtype={policy.buffer_dtype}, expected none: buffers keep their type; "
            "leave it out"
        )
    param, reduce = policy.param_dtype, policy.reduce_dtype
    output, cast = getattr(policy, "output_dtype", None), getattr(policy, "cast_forward_inputs", True)
    return MixedPrecision(param, param if reduce is None else reduce, output, cast)


@dataclass(frozen=True)
class Types:
    """The element types of one parameter: in forward and backward, in the optimizer, and of gradients when sent."""

    compute: torch.dtype
    master: torch.dtype
    wire: torch.dtype


class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler with agreement between ranks: if a gradient overflows on one rank, every rank skips the step.

    torch's own scaler checks only this rank's gradients, which are a shard from stage 1 on; an optimizer of
    `ringcomm.shard` refuses it there.

    If only a pipeline's last stage calls `scale`, in its loss, the ranks of the other stages start with the same
    initial scale.
    """

    _guessed = False  # whether scale() was not called on this rank
    _agreed = False  # whether it is known that a rank of the pipeline has called scale()

    @expects("GradScaler", device=that("a kind of device, such as 'cpu'", lambda kind: torch.device(kind).type == kind))
    def __init__(self, device: str = "cpu", *args: Any, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)

    def scale(self, outputs: Any) -> Any:
        """Same as torch's."""
        self._guessed = False
        return super().scale(outputs)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:
            self._guessed = True
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        found: tuple[torch.Tensor, torch.Tensor] = super()._check_scale_growth_tracker(funcname)
        return found

    def _refuse_unscaled(self, flats: Sequence[ShardedModel]) -> None:
        """Raises if scale() was called neither on this rank nor, in a pipeline, on any other rank."""
        pipelined = next((flat for flat in flats if _has_stages(flat)), None)
        scaled = not self._guessed
        if pipelined is not None and not self._agreed:
            told = torch.tensor([float(scaled)], device=pipelined.device)
            pipelined.ranks.reduce_over_all(told, "max", everywhere=True)
            scaled = self._agreed = bool(told)
        if not scaled and not self._agreed:
            raise InvalidArgumentError(
                "GradScaler: got gradients to unscale before any call of scale(), expected one; call "
                "scaler.scale(loss).backward(), or pass scaler= to a pipeline's step()"
            )

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[Any, torch.Tensor]:
        from ringcomm.data_parallel.optimizer import sharded_optimizer_of

        attached = sharded_optimizer_of(optimizer, "GradScaler")
        self._refuse_unscaled([] if attached is None else attached.flats)
        if attached is None:
            refuse_parts((p for group in optimizer.param_groups for p in group["params"]), "GradScaler", "an overflow")
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        for flat in attached.flats:
            if flat.ranks.mesh is None:
                refuse_parts(flat.module.parameters(), "GradScaler", "an overflow")
            if flat.ranks.joining is not None:
                raise UnsupportedError(
                    f"GradScaler: rank {flat.ranks.rank} is inside of join, where the other ranks do not hear of a "
                    "loss scale, expected none; train in bfloat16 there"
                )
        with attached.working():
            found = super()._unscale_grads_(optimizer, *args, **kwargs)
            attached.host.bring_back()
        if not found:
            found[attached.flat.device] = torch.zeros((), dtype=torch.float32, device=attached.flat.device)
        for flag in found.values():
            for flat in attached.flats:
                flat.ranks.reduce_over_all(flag.view(1), "max", everywhere=True)
        return found


def _has_stages(flat: ShardedModel) -> bool:
    """Whether the ranks run stages of a pipeline."""
    mesh = flat.ranks.mesh
    return mesh is not None and any(n > 1 for name, n in zip(mesh.names, mesh.shape, strict=True) if name == "pp")
