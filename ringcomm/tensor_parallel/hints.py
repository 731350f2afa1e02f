"""Detects plans in which a style seems to be missing: they would train on wrong values without an error, or fail with
an error of torch."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ringcomm.data_parallel.model.partition import is_compiled
from ringcomm.errors import InvalidArgumentError, RingcommError
from ringcomm.modules.shard_spec import part_of
from ringcomm.tensor_parallel.group import TensorParallelGroup
from ringcomm.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.tensor_parallel.outputs import is_ours
from ringcomm.tensor_parallel.styles import COUNTS
from ringcomm.tensor_parallel.verify import digest

MULTIPLIES = {
    "matmul", "__matmul__", "__rmatmul__", "linear", "mm", "addmm", "bmm", "baddbmm", "einsum", "embedding", "tensordot"
}  # fmt: skip
"""Functions of torch that multiply with rows of a table, or look them up."""


def ancestors_of(name: str) -> list[str]:
    """Returns the names of the modules around a module, without the outermost one."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def warn_of_undivided_heads(module: nn.Module, layers: Mapping[str, nn.Module], divided: Iterable[nn.Module]) -> None:
    """Warns of modules that have a number of heads which no style divides, although their layers are sharded.

    Args:
        layers: the replacements of the module's layers; the module itself is unchanged.
        divided: modules whose heads a style divides.
    """
    known = {id(each) for each in divided}
    for name, new in layers.items():
        if not isinstance(new, (ColumnParallelLinear, RowParallelLinear)) or new.group.world_size == 1:
            continue
        above = name.rpartition(".")[0]
        parent = module.get_submodule(above)
        counts = [each for each in COUNTS if type(getattr(parent, each, None)) is int]
        if counts and id(parent) not in known:
            known.add(id(parent))
            warnings.warn(
                f"parallelize: {above or 'the module'} has {counts[0]}={getattr(parent, counts[0])} and a cut {name}, "
                f"but no style divides its heads; if forward uses that number, pass {{{above!r}: 'heads'}} in the "
                "plan, else 'replicate'",
                stacklevel=4,
            )


def refuse_unsummed(module: nn.Module, layers: Mapping[str, nn.Module], named: Collection[str], rank: int) -> None:
    """Refuses parameters beside sharded layers, such as those of a norm of heads, if no style says whether their
    gradients are summed. These are one-dimensional parameters of a module that has a layer sharded along its outputs
    and one sharded along its inputs, and whose length is neither the number of inputs of the former nor the number of
    outputs of the latter.

    Args:
        layers: the replacements of the module's layers; the module itself is unchanged.
        named: all names in the plan.
    Raises: InvalidArgumentError
    """
    for above in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        inside = {name: each for name, each in layers.items() if name.rpartition(".")[0] == above}
        columns = [
            each for each in inside.values() if isinstance(each, ColumnParallelLinear) and not each.gather_output
        ]
        rows = [each for each in inside.values() if isinstance(each, RowParallelLinear) and each.input_is_parallel]
        usual = {each.in_features for each in columns} | {each.out_features for each in rows}
        for name, p in module.get_submodule(above).named_parameters() if columns and rows else ():
            full = f"{above}.{name}" if above else name
            around = ancestors_of(full)
            inner = [each for each in around if len(each) > len(above)]
            nearer = any(layer.startswith(f"{each}.") for each in inner for layer in layers)  # belongs to other layers
            known = nearer or any(each in named for each in (full, *around))
            if p.dim() < 2 and p.requires_grad and p.numel() not in usual and not known:
                if inner:
                    owner = module.get_submodule(around[-1])
                    fitting = [latent_for(around[-1], p.numel())] if isinstance(owner, nn.Linear) else []
                    if not fitting or owner.in_features not in {each.in_features for each in columns}:
                        fitting.append(f"'summed' for {around[-1]} if ranks use it on their own heads or features")
                    advice = f"pass {', '.join(fitting)}, else 'replicate'"
                else:
                    advice = "pass 'colwise' for it if it has a value for each head, "
                    advice += f"else leave out {', '.join(inside)}"
                raise InvalidArgumentError(
                    f"parallelize: rank {rank} got no style for {full} of shape {tuple(p.shape)}, which lies beside "
                    f"layers that are cut, expected one; {advice}"
                )


def latent_for(name: str, outputs: int) -> str:
    """Returns in which case the style of a linear layer with so many outputs is `Latent`, for errors."""
    return (
        f"Latent(n) of ringcomm.tensor_parallel for {name} if ranks use its last n outputs, of {outputs}, on their own "
        "heads without another cut layer between"
    )


def check_sequence_is_split(modules: Mapping[str, nn.Module], group: TensorParallelGroup, refuse: bool) -> None:
    """For plans in which the caller splits the sequence: in the first forward pass, warns (or raises) if the first
    module that works on parts of the sequence gets the same input on all ranks. The gradients of its parameters would
    be sums of equal values.

    Args:
        modules: the modules that work on parts, by name.
        refuse: whether to raise.
    """
    names = {id(each): name for name, each in modules.items()}

    def compare(module: nn.Module, args: tuple[Any, ...]) -> None:
        found = [x for x in args if type(x) is torch.Tensor and not x.is_meta and x.numel()]
        if torch.compiler.is_compiling() or not found or not handles:
            return
        while handles:
            handles.pop().remove()
        varied = bool((found[0] != found[0].flatten()[0]).any())  # constant parts are equal even if correctly split
        mine = json.dumps(digest(found[0]) if varied else group.rank).encode()
        if len({*group.comm.exchange(mine)}) > 1:
            return
        name = names.get(id(module), type(module).__name__)
        said = (
            f"parallelize: rank {group.rank} got the same input of {name} as all other ranks, expected this rank's "
            "part of the sequence; name a 'sequence_region' in the plan, or split the sequence before the model"
        )
        if refuse:
            raise InvalidArgumentError(said)
        warnings.warn(said, stacklevel=2)

    handles = [each.register_forward_pre_hook(compare) for each in modules.values() if group.world_size > 1]


def explain_first_errors(module: nn.Module, layers: Mapping[str, nn.Module], group: TensorParallelGroup) -> None:
    """Makes errors in modules with sharded layers mention the sharding, until a forward pass of the module has
    succeeded: such a module may use the number of heads, or parameters, of the unsharded model."""
    if group.world_size > 1 and layers:  # a partial object, so that deepcopy binds it to the copied module
        own, forward = vars(module).get("forward"), module.forward
        module.forward = update_wrapper(partial(_explained, module, forward, own, dict(layers), group), forward)


def _explained(
    module: nn.Module,
    forward: Callable[..., Any],
    own: Callable[..., Any] | None,
    layers: Mapping[str, nn.Module],
    group: TensorParallelGroup,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs the module's forward pass with checks, and removes itself after one that has succeeded with gradients.

    Args:
        own: the ``forward`` that was set on the module object; None: its class has it.
    """
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    inner = {id(new): name for name, new in layers.items() if _is_inner(new)}
    rows = {name: new for name, new in layers.items() if isinstance(new, VocabParallelEmbedding)}
    linear = {name: new for name, new in layers.items() if isinstance(new, (ColumnParallelLinear, RowParallelLinear))}
    grads = torch.is_grad_enabled()
    compiled = grads and any(map(is_compiled, module.modules()))  # Dynamo would compile the checks, too
    try:
        with _WeightGuard(rows, {} if compiled else linear, group) if grads else nullcontext():
            output = forward(*args, **kwargs)
    except RingcommError:
        raise
    except Exception as error:
        said = _explanation(error, inner)
        if said is None or torch._C._are_functorch_transforms_active():  # an error of the transform
            raise
        raise InvalidArgumentError(f"parallelize: rank {group.rank} {said}") from error
    if grads and getattr(vars(module).get("forward"), "func", None) is _explained:
        if own is None:
            del module.forward
        else:
            module.forward = own
    return output


class _WeightGuard(TorchFunctionMode):
    """Refuses code outside of our layers that multiplies with an embedding's weight, because a rank has only its part
    of the rows. Code whose input comes from `f` is allowed, because it handles ranks itself. Warns of code that
    computes with the weight or bias of a linear layer, which may be right if it uses the rank's own heads.

    Args:
        rows: the embeddings, by name.
        linear: the layers, by name.
    """

    def __init__(
        self, rows: Mapping[str, nn.Module], linear: Mapping[str, nn.Module], group: TensorParallelGroup
    ) -> None:
        self.names, self.group = {id(each.weight): name for name, each in rows.items()}, group
        self.linear = {
            id(p): f"the {key} of {name}"
            for name, each in linear.items()
            for key, p in each.named_parameters(recurse=False)
            if part_of(p).is_cut and id(p) not in self.names
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refuse_rows(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if self.linear and torch.is_grad_enabled():
            self._warn_of_linear(func, (args, kwargs), result)
        return result

    def _warn_of_linear(self, func: Any, given: Any, result: Any) -> None:
        """Warns of results that have a gradient from the parameter; reading shapes or setting hooks is allowed."""
        known = [id(x) for x in tree_leaves(given) if id(x) in self.linear]
        with torch._C.DisableTorchFunctionSubclass():
            made = [x for x in tree_leaves(result) if known and isinstance(x, torch.Tensor) and x.requires_grad]
        if all(id(x) in known for x in made) or is_ours(sys._getframe(2)):
            return
        name = self.linear[known[0]]
        self.linear.clear()  # warns only once
        warnings.warn(
            f"parallelize: rank {self.group.rank} saw {func.__name__.strip('_')} with {name} outside of the layer, "
            f"which is cut, so each rank has only a part of {name.split(' of ')[0]} and computes only a part of the "
            "result; add the parts up over the ranks, or leave the layer out of the plan",
            stacklevel=3,
        )

    def _refuse_rows(self, func: Any, args: Any, kwargs: Any) -> None:
        if self.names and torch.is_grad_enabled() and getattr(func, "__name__", "") in MULTIPLIES:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            with torch._C.DisableTorchFunctionSubclass():  # may be called with tensors of another pipeline stage
                known = [id(y) for x in given for y in (x, x._base)]
            found = [self.names[each] for each in known if each in self.names]
            if found and not any(map(_is_entered, given)) and not is_ours(sys._getframe(2)):
                raise InvalidArgumentError(
                    f"parallelize: rank {self.group.rank} got {func.__name__.strip('_')} with the weight of {found[0]}"
                    ", an embedding that is cut, expected only the embedding to read it, because a rank has only a "
                    "part of the rows; write the product as a linear layer tied to the embedding, and cut it as "
                    "'colwise_gather_output', or leave the embedding out of the plan"
                )


def _is_entered(x: torch.Tensor) -> bool:
    """Returns whether a tensor comes from `f` or `g`, so that the gradients of the ranks are added."""
    node = x.grad_fn
    while node is not None and type(node).__name__ in ("ToCopyBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return getattr(node, "backward_op", None) in ("all_reduce", "reduce_scatter")  # set by `_Operator`


def _is_inner(new: nn.Module) -> bool:
    """Returns whether a layer's outputs, or inputs, are only this rank's."""
    return (isinstance(new, ColumnParallelLinear) and not new.gather_output) or (
        isinstance(new, RowParallelLinear) and new.input_is_parallel
    )


def _explanation(error: Exception, inner: Mapping[int, str]) -> str | None:
    """Returns the message for an error inside of a module whose layers are sharded; None for any other error."""
    trace, found = error.__traceback__, None
    while trace is not None:
        each = trace.tb_frame.f_locals.get("self")
        layers = [inner[id(x)] for x in each.children() if id(x) in inner] if isinstance(each, nn.Module) else []
        found = (type(each).__name__, layers[0]) if layers else found
        trace = trace.tb_next
    if found is None:
        return None
    kind, layer = found
    return (
        f"got {type(error).__name__} ({str(error).strip().partition(chr(10))[0]}) in the first forward pass of "
        f"{layer.rpartition('.')[0] or 'the module'}, a {kind} whose {layer} is cut, expected a module that works "
        "with a rank's part of the outputs; if it uses the number of heads, or parameters, of the whole model, divide "
        "these ('heads', Heads((...)), 'colwise'), or leave its layers out of the plan"
    )
