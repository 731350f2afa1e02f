"""`state_dict()` and `load_state_dict()` of a module whose parameters are in buckets: state dicts look like a plain
module's, in the master weights' type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ringcomm.data_parallel.buckets.bucket import Bucket, adopt_writes, with_own_storage
from ringcomm.data_parallel.model.sharded_model import Unit
from ringcomm.errors import InvalidArgumentError
from ringcomm.modules.arguments import LAST_STAGE

Places = dict[int, tuple[Bucket, int]]
_done = WeakTensorKeyDictionary()  # tensors of state dicts that are already unsharded


def keep_state_of(module: nn.Module, unit: Unit, buckets: Sequence[Bucket]) -> None:
    """Installs the hooks for these buckets on a unit's module that holds their parameters."""
    if buckets:
        after = module.register_state_dict_post_hook(_BucketHook(_after_state_dict, buckets, unit))
        before = module.register_load_state_dict_pre_hook(_BucketHook(_before_load, buckets, unit))
        unit.undo += [after.remove, before.remove]


class _BucketHook:
    """A hook that calls a function with itself and with torch's arguments. In a copy of the module it does nothing.

    Args:
        unit: referenced so that the model's state lives as long as the module, even if its wrapper is dropped; None in
            a copy.
    """

    def __init__(self, function: Callable[..., None], buckets: Sequence[Bucket], unit: Unit | None = None) -> None:
        self.function, self.buckets, self.unit = function, buckets, unit

    def __call__(self, *args: Any) -> None:
        """Calls the function."""
        self.function(self, *args)

    def __reduce__(self) -> Any:
        return _BucketHook, (_nothing, ())


def _nothing(*_: Any) -> None:
    """Does nothing, because a copy's parameters are ordinary."""


def _names(module: nn.Module, buckets: Sequence[Bucket], prefix: str) -> dict[str, tuple[Bucket, int]]:
    """Returns every name in a state dict that is a parameter of the buckets; a tied parameter has several."""
    places: Places = {id(p): (bucket, i) for bucket in buckets for i, p in enumerate(bucket.params)}
    named = module.named_parameters(remove_duplicate=False)
    return {prefix + name: places[id(p)] for name, p in named if id(p) in places}


def _after_state_dict(hook: _BucketHook, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Puts unsharded parameters into the state dict. If they are sharded, this is a collective, and the results are
    copies in inference mode, so that torch refuses to write into them: such writes would not reach the model."""
    del metadata
    gathered: dict[Bucket, torch.Tensor] = {}
    for name, (bucket, i) in _names(module, hook.buckets, prefix).items():
        # With keep_vars, or done by the hook of an inner module.
        if name not in state or state[name].requires_grad or state[name] in _done:
            continue
        if not (bucket.separate or bucket.stage == LAST_STAGE):
            state[name] = with_own_storage(state[name])
            continue
        with torch.inference_mode():
            if bucket not in gathered:
                master = bucket.written_master("state_dict")
                unsharded = bucket.gather_owned(master)
                gathered[bucket] = unsharded.clone() if unsharded is bucket.master else unsharded
            state[name] = with_own_storage(bucket.layout.part(gathered[bucket], i))
        _done[state[name]] = True


def _before_load(
    hook: _BucketHook,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    *lists: list[str],
) -> None:
    """Loads this rank's part of every parameter whose shape fits. The other values are left to torch, which reports
    them unless a hook of an inner module converts them. A rank with such values still loads the others, as in torch,
    and takes part in the ranks' messages."""
    del strict
    buckets = hook.buckets
    assert hook.unit is not None
    if metadata.get("assign_to_params_buffers", False):
        raise InvalidArgumentError(
            f"load_state_dict: rank {buckets[0].ranks.rank} got assign=True, expected parameters to stay where they "
            "are; leave it out"
        )
    errors = lists[-1]  # one list for the whole call
    named = _names(module, buckets, prefix)
    contents = hook.unit.flat.contents
    if contents.loading[0] is not errors:
        contents.loading = errors, set()
    reached = contents.loading[1]
    if reached.issuperset(id(bucket.params[i]) for bucket, i in named.values()):  # by an outer module's hook
        return
    adopt_writes(buckets, "load_state_dict")
    for name, (bucket, i) in named.items():
        reached.add(id(bucket.params[i]))
        if name in state and _fits(state[name], bucket, i) and state[name] is not bucket.params[i]:
            errors += _load(bucket, i, name, state[name])
            state[name] = bucket.params[i]
    for bucket in buckets:
        bucket.sync_params_from_master().wait()


def _fits(value: Any, bucket: Bucket, i: int) -> bool:
    shape = bucket.layout.segments[i].shape
    if not torch.is_tensor(value) or value.is_nested:
        return False
    return tuple(value.shape) == shape or (tuple(value.shape) == (1,) and not shape)  # old torch saved numbers so


def _load(bucket: Bucket, i: int, name: str, value: torch.Tensor) -> list[str]:
    """Loads this rank's part of a parameter; returns torch's sentence about a value that cannot be copied."""
    try:
        bucket.load(i, value)
        return []
    except Exception as error:
        shape = torch.Size(bucket.layout.segments[i].shape)
        return [
            f'While copying the parameter named "{name}", whose dimensions in the model are {shape} and whose '
            f"dimensions in the checkpoint are {value.shape}, an exception occurred : {error.args}."
        ]
