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
        cast_forward_inputs: whether floating point inputs of units are cast to ``param_dtype``. A list or dictionary
            in which something is cast is copied for the call; the call's changes of the copy are made in the original.
        master_dtype: None: float32 for a module in float32 or in 16 bits with a ``param_dtype``, else the module's
            type.
        buffer_dtype: type of floating point buffers, which are cast when the module is wrapped and stay in it. Batch
            norms keep the type of their buffers and parameters.
        cast_root_forward_inputs: the same for the inputs of the whole model; None: as ``cast_forward_inputs``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_root_forward_inputs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "master_dtype", "buffer_dtype"):
            known = WIRES if name == "reduce_dtype" else FLOATS
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value in known):
                got = value if isinstance(value, torch.dtype) else shown(value)
                raise InvalidArgumentError(
                    f"MixedPrecision: got {name}={got}, expected one of {', '.join(map(str, known))}; pass one of these"
                )
        for name, choice in (("cast_forward_inputs", ""), ("cast_root_forward_inputs", " or None")):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and choice)):
                raise InvalidArgumentError(
                    f"MixedPrecision: got {name}={shown(value)}, expected True or False{choice}; pass one"
                )

    def input_dtype(self, root: bool) -> torch.dtype | None:
        """Returns the type to which inputs of the whole model, or of the other units, are cast; None: they keep
        theirs."""
        asked = self.cast_root_forward_inputs if root else None
        return self.param_dtype if (self.cast_forward_inputs if asked is None else asked) else None

    def types_of(self, dtype: torch.dtype) -> Types:
        """Returns the types of a parameter of ``dtype``."""
        if not dtype.is_floating_point:
            return Types(dtype, dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        master = self.master_dtype
        if master is None:
            master = dtype if self.param_dtype is None or dtype == torch.float64 else torch.float32
        return Types(dtype, compute, master, self.reduce_dtype or master)


def is_float(x: Any) -> bool:
    """Whether something is a tensor of a type to which MixedPrecision casts; 8-bit floats have scales of their own."""
    return isinstance(x, torch.Tensor) and x.dtype in FLOATS


class Cast:
    """Casts the floating point tensors in values, such as the arguments of a call.

    Args:
        dtype: None: nothing is cast.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        # By id of a container: the container, its copy, and for each element (key, element of the copy, original).
        self._copies: dict[int, tuple[Any, Any, list[tuple[Any, Any, Any]]]] = {}

    def __call__(self, value: Any) -> Any:
        """Returns the value with its tensors cast. A container in which nothing is cast is the same object."""
        if self.dtype is None:
            return value
        from torch.utils._pytree import tree_flatten, tree_unflatten

        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if type(value) in (tuple, list, dict):
            pairs = [*value.items()] if type(value) is dict else [*enumerate(value)]
            items = [(key, self(x), x) for key, x in pairs]
            if all(cast is x for _, cast, x in items):
                return value
            copy: Any = {key: x for key, x, _ in items}
            if type(value) is not dict:
                copy = type(value)(copy.values())
            self._copies[id(value)] = value, copy, items
            return copy
        leaves, spec = tree_flatten(value)
        cast = [x.to(self.dtype) if is_float(x) else x for x in leaves]
        return value if all(a is b for a, b in zip(cast, leaves, strict=True)) else tree_unflatten(cast, spec)

    def keep_changes(self) -> None:
        """Repeats changes that were made in the copies in the caller's lists and dictionaries. Elements that are still
        there keep their original type."""
        for value, copy, items in self._copies.values():
            if type(value) is tuple:
                continue
            now = [*copy.items()] if type(value) is dict else [*enumerate(copy)]
            if len(now) == len(items) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(now, items, strict=True)):
                continue
            own = {id(x): before for _, x, before in items}
            kept = [(key, own.get(id(x), x)) for key, x in now]
            value.clear()
            if type(value) is dict:
                value.update(kept)
            else:
                value.extend(x for _, x in kept)


def precision_of(policy: Any) -> MixedPrecision:
    """Returns a MixedPrecision; converts a policy of torch's FSDP or DDP, in which a ``reduce_dtype`` of None means
    ``param_dtype``. DDP's casts the inputs of the whole model alone.

    Raises: AttributeError: something else. InvalidArgumentError: a policy that leaves out other modules than batch
            norms.
    """
    if isinstance(policy, MixedPrecision):
        return policy
    others = [
        kind
        for kind in getattr(policy, "_module_classes_to_ignore", None) or ()
        if not (isinstance(kind, type) and issubclass(kind, _BatchNorm))
    ]
    if others:
        raise InvalidArgumentError(
            f"MixedPrecision: got a policy that leaves out {getattr(others[0], '__name__', others[0])}, expected one "
            "that leaves out only batch norms; call fully_shard on such modules with a separate policy, and then on "
            "the model"
        )
    param, reduce = policy.param_dtype, policy.reduce_dtype
    inner = getattr(policy, "cast_forward_inputs", None)
    root = getattr(policy, "cast_root_forward_inputs", True if inner is None else None)
    return MixedPrecision(
        param,
        param if reduce is None else reduce,
        getattr(policy, "output_dtype", None),
        bool(inner),
        buffer_dtype=getattr(policy, "buffer_dtype", None),
        cast_root_forward_inputs=root,
    )


@dataclass(frozen=True)
class Types:
    """The element types of one parameter: in the module as it was built, in forward and backward, in the optimizer, and
    of gradients when sent."""

    module: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    wire: torch.dtype
