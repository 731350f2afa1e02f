"""Mixed precision: the element types of computation, accumulation and communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ringcomm.errors import InvalidArgumentError, shown

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
        output_dtype: type of the module's outputs.
        cast_forward_inputs: whether floating point inputs of a unit are cast to ``param_dtype``.
        master_dtype: None: float32 for a module in float32 or in 16 bits with a ``param_dtype``, else the module's
            type.
        buffer_dtype: type of floating point buffers, which are cast when the module is wrapped and stay in it. Batch
            norms keep the type of their buffers and parameters.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "master_dtype", "buffer_dtype"):
            known = WIRES if name == "reduce_dtype" else FLOATS
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

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The type to which floating point inputs of units are cast; None: they keep theirs."""
        return self.param_dtype if self.cast_forward_inputs else None

    def types_of(self, dtype: torch.dtype) -> Types:
        """Returns the types of a parameter of ``dtype``."""
        if not dtype.is_floating_point:
            return Types(dtype, dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        master = self.master_dtype
        if master is None:
            master = dtype if self.param_dtype is None or dtype == torch.float64 else torch.float32
        return Types(dtype, compute, master, self.reduce_dtype or master)

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


def precision_of(policy: Any) -> MixedPrecision:
    """Returns a MixedPrecision; converts a policy of torch's FSDP or DDP, in which a ``reduce_dtype`` of None means
    ``param_dtype``.

    Raises: AttributeError: something else. InvalidArgumentError: a policy that leaves out other modules than batch
            norms.
    """
    if isinstance(policy, MixedPrecision):
        return policy
    others = [
        kind for kind in getattr(policy, "_module_classes_to_ignore", None) or () if not issubclass(kind, _BatchNorm)
    ]
    if others:
        raise InvalidArgumentError(
            f"MixedPrecision: got a policy that leaves out {others[0].__name__}, expected one that leaves out batch "
            "norms alone; call fully_shard on such modules with a policy of their own"
        )
    param, reduce = policy.param_dtype, policy.reduce_dtype
    casts = [getattr(policy, name, None) for name in ("cast_forward_inputs", "cast_root_forward_inputs")]
    return MixedPrecision(
        param,
        param if reduce is None else reduce,
        getattr(policy, "output_dtype", None),
        casts == [None, None] or True in casts,
        buffer_dtype=getattr(policy, "buffer_dtype", None),
    )


@dataclass(frozen=True)
class Types:
    """The element types of one parameter: in the module as it was built, in forward and backward, in the optimizer, and
    of gradients when sent."""

    module: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    wire: torch.dtype
