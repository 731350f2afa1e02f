"""`parallelize(verify=True)`: checks that values that must be equal on all ranks are, and that sharded blocks compute
the same as unsharded ones."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map
from torch.utils.hooks import RemovableHandle

from ringcomm.data_parallel.model.partition import blocks_of
from ringcomm.data_parallel.model.place import sharded_model_of
from ringcomm.errors import MismatchError
from ringcomm.modules.notes import notes_of
from ringcomm.modules.shard_spec import part_of, put_part, renew_parts, take
from ringcomm.tensor_parallel.group import TensorParallelGroup, gather, multiplied_in, scatter
from ringcomm.tensor_parallel.sequence import first_tensor, modules_of_region, sum_gradients_of

CHUNK = 1 << 18  # number of elements hashed at a time
Digest = list[Any]
"""The digest of a tensor: its kind; the share of the norm that rounding may change; its norm; a weighted sum of its
elements; and for the gradient of an output also the output's digest."""


def digest(x: torch.Tensor) -> Digest:
    """Returns a digest that is close for tensors that are close, and differs for others, except by coincidence."""
    x = x.detach().to_dense() if x.layout != torch.strided else x.detach()
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    weights = torch.arange(min(CHUNK, flat.numel()), dtype=torch.float64, device=x.device).sin_()
    found = weights.new_zeros(2)
    for i, part in enumerate(flat.split(CHUNK)):
        wide = part.double()
        found += torch.stack([wide.square().sum(), (wide @ weights[: wide.numel()]) * math.cos(i)])
    squares, weighted = found.tolist()
    return [f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}", slack(x), math.sqrt(squares), weighted]


def slack(x: torch.Tensor) -> float:
    """Returns the relative difference that rounding may cause."""
    return math.sqrt(torch.finfo(x.dtype).eps) if x.is_floating_point() or x.is_complex() else 0.0


def differ(a: Digest, b: Digest) -> bool:
    """Returns whether two digests belong to different tensors."""
    if a[0] != b[0]:
        return True
    pairs = [pair for pair in zip(a[2:4], b[2:4], strict=True) if not all(map(math.isnan, pair))]
    return not all(x == y or abs(x - y) <= a[1] * max(a[2], b[2]) for x, y in pairs)


class Verifier:
    """Compares the ranks in every forward and backward pass of a module.

    Args:
        module: the module before it is sharded.
        sharded: the names of the modules that styles change.
        summed: the modules whose gradients are summed.
        sequence_dim, regions: the dimension along which the sequence is cut, and the sequence regions. Without a
            region the caller cuts the sequence; then the ranks' inputs differ, and blocks are not compared.
    """

    def __init__(
        self,
        module: nn.Module,
        group: TensorParallelGroup,
        sharded: Sequence[str],
        summed: Sequence[nn.Module],
        sequence_dim: int | None,
        regions: Sequence[nn.Module],
    ) -> None:
        self.module, self.group, self.summed = module, group, summed
        self.sequence_dim, self.regions = sequence_dim, regions
        self.same_input = sequence_dim is None or bool(regions)
        self.found: dict[str, list[Digest | None]] = {}  # digests of the current backward pass
        self.end: Callable[[], Any] = lambda: None  # reference to the callback after the current backward pass
        self.hooked: dict[int, torch.Tensor] = {}
        self.handles: dict[str, RemovableHandle] = {}  # by block: of the hook that compares its first calls
        self.compared: set[str] = set()  # blocks whose outputs have been compared
        self.copies = [*_first_of_each_kind(module, sharded)] if self.same_input else []

    def start(self) -> None:
        """Starts the checks, after the module has been sharded."""
        self.module.register_forward_pre_hook(self._before, with_kwargs=True)
        self.module.register_forward_hook(self._after)
        for copied in self.copies:
            self._compare_first_call(*copied)
        self.copies = []

    # ---- inputs and gradients ------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for each in self.summed:
            sum_gradients_of(each, self.group)  # before the gradients are compared
        renew_parts(module.modules())
        for name, p in module.named_parameters():
            if part_of(p).dim is None and p.requires_grad and self.hooked.get(id(p)) is not p:
                self.hooked[id(p)] = p
                p.register_hook(partial(self._note, name))
        if self.same_input:
            found = [(path, x) for path, x in tree_leaves_with_path((args, kwargs)) if _is_plain(x)]
            mine = {f"input {keystr(path[1:])}": [digest(x) if torch.is_tensor(x) else x] for path, x in found}
            self.compare(mine, "give all ranks of a tp group the same batch: seed the shuffling of the data alike")

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for path, y in tree_leaves_with_path(output):
            if torch.is_tensor(y) and _is_plain(y) and y.requires_grad:
                name, made = f"output {keystr(path)}".rstrip(), digest(y)
                if self.same_input and not y.dim():  # a loss, of which no rank has only a part
                    y.register_hook(lambda gradient, name=name, made=made: self._record(name, made))
                y.register_hook(lambda gradient, name=name, made=made: self._note(name, gradient, made))

    def _note(self, name: str, gradient: torch.Tensor | None, *more: Digest) -> None:
        """Notes the gradient of a parameter or of an output (with the output's digest); an autograd function may return
        None."""
        self._record(f"gradient of {name}", None if gradient is None else [*digest(gradient), *more])

    def _record(self, what: str, found: Digest | None) -> None:
        if self.end() is None:  # a new pass; its predecessor may have raised, so that autograd dropped its callback
            self.found = {}
            end = partial(type(self)._after_backward, self)
            self.end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self.found.setdefault(what, []).append(found)

    def _after_backward(self) -> None:
        found, self.found = self.found, {}
        self.compare(
            found,
            "name its module 'summed' in the plan if ranks use it on their own heads or features; else look for "
            "random numbers that they draw differently, and for losses or targets that differ",
        )

    def compare(self, mine: Mapping[str, list[Any]], advice: str) -> None:
        """Raises on all ranks where a rank's values differ from those of rank 0; a collective."""
        everyone = self.group.comm.all_gather_object(mine)
        first = everyone[0]
        for rank, theirs in enumerate(everyone):
            for what in [*first, *(each for each in theirs if each not in first)]:
                a, b = first.get(what), theirs.get(what)
                if a is None or b is None or len(a) != len(b) or any(map(_differ, a, b)):
                    raise MismatchError(
                        f"parallelize: rank {self.group.rank} found by verify=True that rank {rank} has another {what} "
                        f"than rank 0, {_described(b)} and {_described(a)}, expected equal ones; {advice}"
                    )

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _compare_first_call(self, name: str, before: nn.Module, styles: Sequence[str]) -> None:
        """Compares a block with its unsharded copy ``before``: the outputs of its first call, and the gradients of its
        first call with gradients."""
        block = self.module.get_submodule(name)
        compare = partial(self._compare, name, before, styles)  # a copy of the module gets one of a copy of this object
        handle = block.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)  # before a region cuts
        self.handles[name] = handle

    def _compare(
        self,
        name: str,
        before: nn.Module,
        styles: Sequence[str],
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self.handles.pop(name).remove()
        elif name in self.compared:
            return
        elsewhere = any(notes_of(each).elsewhere for each in block.modules())
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if elsewhere or any(type(x) is not torch.Tensor for x in tensors):
            return  # a pipeline's block that was not reached, or that has a part on this rank only
        self.compared.add(name)
        mine, expected = self._both_calls(before, block, args, kwargs)
        self._refuse_difference(name, styles, self._difference_of_outputs(block, mine, expected), block)
        if with_gradients:
            self._refuse_difference(name, styles, self._difference_of_gradients(block, mine, expected), block)

    def _both_calls(
        self, before: nn.Module, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call, _Call]:
        """Calls a block, in eval mode, and its unsharded copy ``before``."""
        modes = [(each, each.training) for each in (*block.modules(), *before.modules())]
        block.eval()
        before.eval()
        flat = sharded_model_of(block)
        is_whole = flat is None or all(unit.is_unsharded for unit in flat.units)
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_whole):
            params = dict(block.named_parameters())
            mine = _Call.of(block, args, kwargs, params)
            with _gathered(block):
                whole = {id(p): self._unsharded(p).requires_grad_(p.requires_grad) for p in params.values()}
            values = {name: whole[id(p)] for name, p in block.named_parameters(remove_duplicate=False)}
            values |= dict(block.named_buffers(remove_duplicate=False))
            args, kwargs = self._with_whole_sequence(block, args, kwargs)
            # functional_call needs a value for each name of a tied parameter
            call = partial(torch.func.functional_call, before, values, tie_weights=False)
            expected = _Call.of(call, (args,), {"kwargs": kwargs}, {name: whole[id(p)] for name, p in params.items()})
        for each, training in modes:
            each.training = training
        return mine, expected

    def _difference_of_outputs(self, block: nn.Module, mine: _Call, expected: _Call) -> str | None:
        """Returns how the outputs of a block differ from those of its unsharded copy."""
        pairs = [(a, self._comparable(block, a, b)) for a, b in zip(mine.outputs, expected.outputs, strict=False)]
        found = [_difference(a.detach(), b.detach()) for a, b in pairs if b is not None]
        same = len(mine.outputs) == len(expected.outputs)
        return next((each for each in found if each is not None), None if same else "a tensor")

    def _difference_of_gradients(self, block: nn.Module, mine: _Call, expected: _Call) -> str | None:
        """Returns how the gradients of a block's parameters and inputs differ from those of its unsharded copy, for
        one random gradient of the outputs; a collective."""
        pairs = [*zip(mine.outputs, expected.outputs, strict=True)]
        pairs = [(a, b) for a, b in pairs if a.requires_grad and b.requires_grad]
        seed = torch.Generator().manual_seed(0)
        of_expected = [torch.randn(b.shape, generator=seed, dtype=b.dtype).to(b.device) for _, b in pairs]
        of_mine = [self._comparable(block, a, x) for (a, _), x in zip(pairs, of_expected, strict=True)]
        known = [i for i, x in enumerate(of_mine) if x is not None]
        if not known:
            return None
        try:
            found = mine.gradients([pairs[i][0] for i in known], [of_mine[i] for i in known])
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            warnings.warn(f"parallelize(verify=True) does not compare gradients: {error}", stacklevel=2)
            return None
        right = expected.gradients([pairs[i][1] for i in known], [of_expected[i] for i in known])
        least = 16 * max((float(x.abs().max()) for x in right.values() if x.numel()), default=0.0)
        differences = []
        for what, whole in right.items():
            p, mine_of = mine.params.get(what), [found[what]]
            x: torch.Tensor | None = whole
            if p is None:  # of an input, which code before the block may add up over the ranks
                x = self._comparable(block, mine_of[0], whole)
                mine_of += [self.group.all_reduce(mine_of[0])] if x is whole else []
            elif self._has_other_hooks(p):
                continue
            elif (dim := part_of(p).dim) is not None:
                x = take(whole, part_of(p), p.shape[dim])
            each = [_difference(y, x, least) for y in mine_of] if x is not None else [None]
            differences += [f"{each[0]} in the gradient of {what}"] if all(each) else []
        return next(iter(differences), None)

    def _with_whole_sequence(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments with the whole sequence in place of this rank's part, for the first tensor and for
        tensors with as many tokens whose values differ between the ranks."""
        firsts = [modules_of_region(region)[0] for region in self.regions]
        first = first_tensor(args, kwargs)
        if first is None or block in firsts or not self._is_in_region(block):
            return args, kwargs
        dim, found = cast(int, self.sequence_dim), {}

        def whole(x: Any) -> Any:
            if not torch.is_tensor(x) or x.dim() <= dim or x.shape[dim] != first.shape[dim]:
                return x
            if id(x) not in found:
                gathered = gather(x, self.group.comm, dim)
                parts = gathered.chunk(self.group.world_size, dim)
                is_cut = x is first or any(not torch.equal(part, parts[0]) for part in parts)
                found[id(x)] = gathered if is_cut else x
            return found[id(x)]

        return tree_map(whole, (args, kwargs))

    def _comparable(self, block: nn.Module, mine: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor with which an output is compared: in a sequence region this rank's part of the expected
        output; None if its tokens are not along ``sequence_dim``."""
        if mine.shape == expected.shape or not self._is_in_region(block):
            return expected
        dim = cast(int, self.sequence_dim)
        fits = mine.dim() == expected.dim() > dim and mine.shape[dim] * self.group.world_size == expected.shape[dim]
        return scatter(expected, self.group.comm, dim) if fits else None

    def _is_in_region(self, block: nn.Module) -> bool:
        return any(block in region.modules() for region in self.regions)

    def _refuse_difference(self, name: str, styles: Sequence[str], difference: str | None, block: nn.Module) -> None:
        """Raises on all ranks where one found a difference; a collective."""
        tokens = ", and code that mixes or counts tokens must lie outside of the sequence region"
        for rank, found in enumerate(self.group.comm.all_gather_object(difference)):
            if found is not None:
                raise MismatchError(
                    f"parallelize: rank {self.group.rank} found by verify=True that {name or 'the module'} gives rank "
                    f"{rank} {found} before it was cut, expected only rounding errors; look at the styles of "
                    f"{', '.join(styles)}: fused outputs need parts, numbers of heads 'heads', and 'summed' or "
                    "'sequence' only modules that each rank uses on its own heads, features or tokens"
                    f"{tokens if self._is_in_region(block) else ''}"
                )

    def _has_other_hooks(self, p: torch.Tensor) -> bool:
        """Returns whether a hook of the program may change the gradient of a parameter."""
        hooks = (p._backward_hooks or {}).values()
        return any(each != self.group.all_reduce and getattr(each, "func", None) != self._note for each in hooks)

    def _unsharded(self, p: torch.Tensor) -> torch.Tensor:
        part = part_of(p)
        if part.dim is None:
            return p.detach().clone()
        found = p.new_zeros(part.unsharded_shape(p.shape))
        put_part(found, p.detach(), part)
        self.group.comm.all_reduce(found)
        return found


def _is_plain(x: Any) -> bool:
    """Returns whether an argument has a value that can be compared."""
    return (type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta) or type(x) in (int, float, bool, str)


def _differ(a: Any, b: Any) -> bool:
    """Returns whether two ranks have different values. Gradients of outputs that are sharded may differ."""
    if not isinstance(a, list) or not isinstance(b, list):
        return bool(a != b)
    cut = len(a) > 4 and differ(a[4], b[4])
    return not cut and differ(a, b)


def _described(values: list[Any] | None) -> str:
    if values is None:
        return "none"
    each = values[-1]
    return f"{each[0]} with norm {each[2]:.6g}" if isinstance(each, list) else repr(each)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _first_of_each_kind(module: nn.Module, sharded: Sequence[str]) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yields the first block of each kind that contains a sharded layer, with a copy on meta. If the blocks are the
    sharded layers themselves, yields the module instead, because a rank has only a part of their inputs or outputs."""
    kinds = set()
    around = [
        (name, block) for name, block in blocks_of(module) if any(each.startswith(f"{name}.") for each in sharded)
    ]
    for name, block in around or [("", module)]:
        inside = [each for each in sharded if not name or each == name or each.startswith(f"{name}.")]
        shapes = [(key, tuple(p.shape)) for key, p in block.named_parameters()]
        kind = repr((type(block), shapes, [each.removeprefix(name) for each in inside]))
        if inside and kind not in kinds:
            kinds.add(kind)
            yield name, _without_memory(block), inside


def _without_memory(block: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in block.parameters()}
    memo |= {id(b): b.detach().to("meta") for b in block.buffers()}
    return copy.deepcopy(block, memo)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(output) if torch.is_tensor(x)]


def _difference(mine: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> str | None:
    """Returns how a tensor of a block differs from that of its copy; None where the difference may be rounding.

    Args:
        scale: of the values whose rounding errors the tensor may consist of.
    """
    if mine.shape != expected.shape:
        return f"the shape {tuple(mine.shape)} and not {tuple(expected.shape)}"
    if not (expected.is_floating_point() or expected.is_complex()) or not expected.numel():
        return None
    eps = max(torch.finfo(x).eps for x in (multiplied_in(expected), torch.float32))  # of norms in a float64 model
    largest = float(expected.abs().max())
    found = float((mine - expected).abs().max())
    is_rounding = found <= max(math.sqrt(eps) * largest, eps * scale)
    return None if is_rounding else f"a difference of {found:.2g} from {largest:.2g}"


class _Call(NamedTuple):
    """A call of a block, or of its unsharded copy.

    Attributes:
        outputs: its tensors.
        params: the trained parameters, by name.
        inputs: the inputs that require a gradient, and their places in the graph, by a name.
    """

    outputs: list[torch.Tensor]
    params: dict[str, torch.Tensor]
    inputs: dict[str, tuple[torch.Tensor, GradientEdge]]

    @staticmethod
    def of(call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> _Call:
        """Calls with a copy of the arguments, so that it changes neither the graph nor caches among them."""
        (args, kwargs), found = _copied((args, kwargs))
        trained = [x for x in found if x.requires_grad]
        inputs = {f"input {i}": (x, get_gradient_edge(x)) for i, x in enumerate(trained)}
        return _Call(_tensors(call(*args, **kwargs)), {k: p for k, p in params.items() if p.requires_grad}, inputs)

    def gradients(self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the gradients of the parameters and inputs, by name, zeros in place of none.

        Args:
            given: the gradients of the outputs.
        """
        known = {**self.params, **{name: x for name, (x, _) in self.inputs.items()}}
        places = [*self.params.values(), *(edge for _, edge in self.inputs.values())]
        found = torch.autograd.grad(outputs, places, given, allow_unused=True) if places else ()
        pairs = zip(known.items(), found, strict=True)
        return {name: torch.zeros_like(x) if y is None else y.to_dense() for (name, x), y in pairs}


def _copied(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns a copy of arguments, and its tensors; those that require a gradient are no leaves, as in the call."""
    tensors: dict[int, Any] = {}
    seen: dict[int, Any] = {}

    def look(each: Any) -> None:
        if id(each) in seen or isinstance(each, (nn.Module, type)):
            return
        seen[id(each)] = each
        if torch.is_tensor(each):
            tensors[id(each)] = each.detach().requires_grad_(each.requires_grad).clone()
            return
        inside = each
        if not isinstance(each, (list, tuple, set)):
            inside = (each if isinstance(each, Mapping) else getattr(each, "__dict__", {})).values()
        for value in inside:
            look(value)

    look(value)
    return copy.deepcopy(value, dict(tensors)), [*tensors.values()]


@contextmanager
def _gathered(block: nn.Module) -> Iterator[None]:
    """Gathers the parameters of a sharded block inside of a forward pass, where `whole` cannot be used."""
    flat, mine = sharded_model_of(block), {id(p) for p in block.parameters()}
    units = [] if flat is None else flat.units
    units = [unit for unit in units if any(id(p) in mine for bucket in unit.buckets for p in bucket.params)]
    sharded = [unit for unit in units if not unit.is_unsharded]
    for unit in units:
        unit.gather()
    yield
    for unit in sharded:
        unit.release()
