"""`p.grad` of a parameter whose gradient is sharded: a tensor subclass that behaves like an ordinary gradient. How
operations on it run:

    p.grad.mul_(0.5)                element-wise and in place: each rank works on its part, nothing is sent
    p.grad.norm(), p.grad * 2       everything else: the ranks gather the gradient, and the operation sees all of it
    p.grad[0] = 0, p.grad.t().t_()  other changes: made on the gathered gradient, of which each rank keeps its part
    torch._foreach_norm(grads)      one bucket after another, so that one bucket is gathered at a time
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map

from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import FlatLayout
from ringcomm.errors import InvalidArgumentError

_ELEMENTWISE = {
    *("mul_", "div_", "add_", "sub_", "pow_", "abs_", "neg_", "sign_", "sqrt_", "clamp_", "clamp_min_", "clamp_max_"),
    *("nan_to_num_", "copy_", "zero_", "fill_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_"),
}
# Operations that set a gradient to zero if their operand is zero.
_MAY_SET_TO_ZERO = {"fill_", "copy_", "mul_", "_foreach_copy_", "_foreach_mul_"}
# Operations of torch.distributed whose results are the same on all ranks.
_SAME_ON_RANKS = {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_"}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of torch.amp.GradScaler


class GradOwner(Protocol):
    """The buffer that holds a bucket's gradient, as its `ShardedGradient` objects use it; see `GradBuffer`."""

    params: list[nn.Parameter]
    layout: FlatLayout
    ranks: DataParallelGroup

    @property
    def dtype(self) -> torch.dtype: ...
    def piece(self, i: int) -> tuple[torch.Tensor, int]: ...
    def unsharded(self, i: int) -> torch.Tensor: ...
    def write(self, i: int, values: torch.Tensor) -> None: ...
    def zero(self, i: int) -> None: ...
    def zero_sums_if_zero(self, i: int, values: torch.Tensor | float) -> None: ...
    def changed(self) -> None: ...


class ShardedGradient(torch.Tensor):
    """A tensor subclass that represents the gradient of a parameter and can be used as that gradient.

    Shape, type, device and `print` need no communication. Reading values is a collective: every rank must read the same
    gradients in the same order, just as it calls `backward` and `step`. The gradient is then gathered with its bucket,
    which stays gathered until something changes it or another bucket is read. In-place operations with numbers, or with
    tensors that fit the gradient's shape, work on this rank's part and send nothing. Results have the same bits as at
    stage 0.

    With mixed precision `p.grad` has the type of the parameter, as torch requires, but the gradient itself has the type
    of the master weights: reads are rounded to the parameter's type, in-place changes are not rounded.

    A view (`p.grad[0]`, `p.grad.view(-1)`) is a ShardedGradient, too, and writes into it change the gradient. Before
    the first reduction, inside `no_sync`, it is this rank's sum alone, and nothing is sent, as in torch's DDP.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    _name: str
    # A weak reference, because the garbage collector does not see the references of p.grad, so a strong one would leak.
    # A gradient that was dropped keeps its values by a strong one.
    _owner: Callable[[], GradOwner | None]
    _index: int
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...]  # map the unsharded gradient to this view

    @staticmethod
    def of(gradient: GradOwner, index: int) -> ShardedGradient:
        """Returns the object for segment ``index`` of a bucket's gradient."""
        p, segment = gradient.params[index], gradient.layout.segments[index]
        like = segment.view(torch.empty(segment.numel, dtype=p.dtype, device="meta"))
        return ShardedGradient._made(like, p.device, (segment.name, weakref.ref(gradient), index, ()))

    @staticmethod
    def _made(like: torch.Tensor, device: torch.device, what: Any) -> ShardedGradient:
        made = torch.Tensor._make_wrapper_subclass(
            ShardedGradient,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # some of torch's operations do not check for missing memory
        made._name, made._owner, made._index, made._views = what
        return made

    def share_memory_(self) -> ShardedGradient:
        """Raises: this rank has only a part of the values."""
        raise InvalidArgumentError(
            f"share_memory_: got the gradient of {self._name}, whose values are in the ranks' shards, expected a "
            "tensor with memory of its own; set gradients to None before module.share_memory(), or share grad.clone()"
        )

    @property
    def _home(self) -> GradOwner:
        """The bucket's gradient buffer."""
        home = self._owner()
        if home is None:
            raise InvalidArgumentError(
                f"grad: got a gradient of {self._name} that was dropped since, or whose model was dropped or restaged, "
                "expected the current one; read p.grad again"
            )
        return home

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = _name_of(func), kwargs or {}
        first = args[0] if args else None
        if func.is_view and isinstance(first, ShardedGradient):
            return first._viewed(func, name, args[1:], kwargs)
        if name == _UNSCALE:
            return _unscale(func, *args)
        if name == "_foreach_zero_":
            for x in args[0]:
                x.zero_()
            return None
        if name.startswith("_foreach_"):
            return _by_group(func, args, kwargs)
        if name == "zero_" and isinstance(first, ShardedGradient) and not first._views:
            first._home.zero(first._index)  # as zero_grad(set_to_none=False) does
            return first
        if name in _ELEMENTWISE and isinstance(first, ShardedGradient) and not first._views:
            return first._edit(func, args[1:], kwargs)
        if any(isinstance(x, ShardedGradient) for x in _written(func, args, kwargs)):
            return _change(func, args, kwargs)
        return func(*_read(args), **_read(kwargs))

    # ---- reading --------------------------------------------------------------------------------------------------

    @property
    def _dtype_of_base(self) -> torch.dtype:
        """The parameter's type; a view (`p.grad.real`, `p.grad.view(torch.int32)`) may have another."""
        return self._home.params[self._index].dtype

    def _through(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Applies this view to the unsharded gradient."""
        for view in self._views:
            unsharded = view(unsharded)
        return unsharded

    def _read(self) -> torch.Tensor:
        """Returns the values; a collective, unless the bucket was read just before."""
        return self._through(self._home.unsharded(self._index).to(self._dtype_of_base)).resolve_conj().resolve_neg()

    def _viewed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Returns a view without reading values."""
        if self._home.dtype != self._dtype_of_base and name == "view" and args and isinstance(args[0], torch.dtype):
            raise InvalidArgumentError(
                f"view: rank {self._home.ranks.rank} got {args[0]} for the gradient of {self._name}, which is kept as "
                f"{self._home.dtype}, expected a shape; take the view of p.grad.clone()"
            )
        numel = self._home.params[self._index].numel() * self._dtype_of_base.itemsize // self.itemsize
        base = torch.empty(numel, dtype=self.dtype, device="meta")
        found = func(base.as_strided(self.shape, self.stride(), self.storage_offset()), *args, **kwargs)
        if name == "as_strided":  # its offset counts from the start of the memory, and each read has other memory
            shape, stride, shift = found.shape, found.stride(), found.storage_offset() - self.storage_offset()
            return self._as(found, (lambda x: x.as_strided(shape, stride, x.storage_offset() + shift),))
        if isinstance(found, torch.Tensor):
            steps = () if name in ("detach", "alias") else (lambda unsharded: func(unsharded, *args, **kwargs),)
            return self._as(found, steps)
        return [self._as(one, (partial(_one_of, func, args, kwargs, k),)) for k, one in enumerate(found)]

    def _as(self, like: torch.Tensor, steps: tuple[Any, ...]) -> ShardedGradient:
        what = (self._name, lambda: self._owner(), self._index, (*self._views, *steps))  # keeps its gradient alive
        return ShardedGradient._made(like, self.device, what)

    # ---- changes --------------------------------------------------------------------------------------------------

    def _edit(self, func: Any, args: Any, kwargs: Any) -> ShardedGradient:
        """Runs an element-wise in-place operation on this rank's part."""
        gradient = self._home
        piece, start = gradient.piece(self._index)
        cut = partial(self._cut, piece, start)
        func(piece, *tree_map(cut, args), **tree_map(cut, kwargs))
        if _name_of(func) in _MAY_SET_TO_ZERO:
            self._zero_sums_if_zero(args[0])
        gradient.changed()
        return self

    def _zero_sums_if_zero(self, operand: Any) -> None:
        """Zeroes the local sums if the operand is zero. Another gradient is not read for this, because reading is a
        collective, and other ranks may have no local sums."""
        if not isinstance(operand, ShardedGradient):
            self._home.zero_sums_if_zero(self._index, operand)

    def _cut(self, piece: torch.Tensor, start: int, x: Any) -> Any:
        """Returns this rank's part of an argument."""
        if isinstance(x, ShardedGradient):
            if x._home is self._home and x._index == self._index and not x._views:
                return piece
            x = x._read()
        if not isinstance(x, torch.Tensor):
            return x
        x = self._unrounded(x)
        if not x.dim():
            return x
        segment = self._home.layout.segments[self._index]
        return segment.flatten(x.broadcast_to(self.shape))[start : start + piece.numel()]

    def _unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """Casts an argument from the parameter's type to the gradient's, if they differ."""
        return x.to(self._home.dtype) if x.dtype == self._dtype_of_base else x

    # ---- methods that torch does not dispatch ----------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same gradient; assigned values are copied into it."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.detach().copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only copy of the values; a collective."""
        return _read_only(self.clone().numpy(force=force))

    def tolist(self) -> Any:
        """Returns the values; a collective."""
        return self.clone().tolist()

    def apply_(self, callable: Callable[[Any], Any]) -> ShardedGradient:
        """Calls ``callable`` with each value, and writes what it returns; a collective."""
        self.copy_(self.clone().apply_(callable))
        return self

    def map_(self, tensor: torch.Tensor, callable: Callable[[Any, Any], Any]) -> ShardedGradient:
        """Like `apply_`, with the values of another tensor too."""
        self.copy_(self.clone().map_(_read(tensor), callable))
        return self

    def __format__(self, spec: str) -> str:
        return format(self.clone() if spec else repr(self), spec)

    def __array__(self, dtype: Any = None) -> Any:
        return _read_only(self.clone().__array__(dtype))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.clone().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"ShardedGradient({self._name}, sharded, shape={tuple(self.shape)}, dtype={self.dtype})"


# With this, torch.nn.utils uses the same kernels as for the gradients of stage 0; torch registers its DTensor here too.
_foreach_supported_types.append(ShardedGradient)


def _name_of(func: Any) -> str:
    """Returns an operation's name without its namespace."""
    name: str = func._schema.name.split("::")[1]
    return name


def _read_only(array: Any) -> Any:
    """Makes the array read-only, because writes into a copy would be lost."""
    array.flags.writeable = False
    return array


def _one_of(func: Any, args: Any, kwargs: Any, k: int, unsharded: torch.Tensor) -> torch.Tensor:
    return func(unsharded, *args, **kwargs)[k]


def _read(values: Any) -> Any:
    return tree_map(lambda x: x._read() if isinstance(x, ShardedGradient) else x, values)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that an operation writes into; torch.distributed's operations do not declare theirs."""
    if func.namespace == "c10d":
        return tree_leaves(args[0]) if func._schema.name.endswith("_") else []
    if not func._schema.is_mutable:
        return []
    found = []
    for k, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(args[k] if k < len(args) else kwargs.get(each.name))
    return tree_leaves(found)


def _change(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation that writes on the gathered gradients; each rank then keeps its part of the results."""
    bases: dict[tuple[GradOwner, int], torch.Tensor] = {}
    name = _name_of(func)
    if func.namespace == "c10d" and name not in _SAME_ON_RANKS:
        raise InvalidArgumentError(
            f"{name}: got a sharded gradient, expected an ordinary tensor, because the result differs between the "
            "ranks; pass p.grad.clone()"
        )
    written = [x for x in _written(func, args, kwargs) if isinstance(x, ShardedGradient)]
    replaced: dict[int, Any] = {}
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # views into gradients, and the copies that are written

    def opened(x: Any) -> Any:
        if isinstance(x, ShardedGradient):
            key = (x._home, x._index)
            if key not in bases:
                bases[key] = x._home.unsharded(x._index).clone()
            view = x._through(bases[key])
            unsharded = view.resolve_conj().resolve_neg()  # operations called from here ignore the conj and neg bits
            replaced[id(unsharded)] = x, unsharded  # keeps `unsharded` alive, so that no other object gets its id
            if unsharded is not view and any(x is each for each in written):
                copied.append((view, unsharded))
            return unsharded
        return written[0]._unrounded(x) if isinstance(x, torch.Tensor) else x

    result = func(*tree_map(opened, args), **tree_map(opened, kwargs))
    if func.namespace == "c10d":
        work = torch.distributed.Work.unbox(tree_leaves(result)[-1])
        if work is not None:
            work.wait()
    for view, values in copied:
        view.copy_(values)
    for home, index in dict.fromkeys((x._home, x._index) for x in written):
        home.write(index, bases[home, index])
    return tree_map(lambda x: replaced[id(x)][0] if id(x) in replaced else x, result)


# ---- lists of gradients --------------------------------------------------------------------------------------------


def _by_group(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs `torch._foreach_...` one bucket after another, so that one bucket is gathered at a time."""
    everything = (args, kwargs)
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
    homes: dict[GradOwner | None, list[int]] = {}
    for k, row in enumerate(zip(*lists, strict=True)):
        homes.setdefault(next((x._home for x in row if isinstance(x, ShardedGradient)), None), []).append(k)
    found: dict[int, Any] = {}
    for some in homes.values():
        part_args, part_kwargs = (_rows(func, each, some) for each in everything)
        results = _on_rows(func, part_args, part_kwargs)
        found |= zip(some, results or [], strict=False)
    return [found[k] for k in sorted(found)] or None


def _rows(func: Any, values: Any, some: list[int]) -> Any:
    """Selects the given rows from an operation's lists; `scalars` may be a tensor with one number per row."""
    if isinstance(values, dict):
        return {name: _row(x, some, name) for name, x in values.items()}
    names = [each.name for each in func._schema.arguments]
    return [_row(x, some, name) for x, name in zip(values, names, strict=False)]


def _row(x: Any, some: list[int], name: str) -> Any:
    if isinstance(x, (list, tuple)):
        return [x[k] for k in some]
    return x[some] if name == "scalars" and isinstance(x, torch.Tensor) else x


def _on_rows(func: Any, args: Any, kwargs: Any) -> Any:
    written = [x for x in _written(func, args, kwargs) if isinstance(x, ShardedGradient)]
    if not written:
        return func(*_read(args), **_read(kwargs))
    if any(x._views for x in written):
        return _change(func, args, kwargs)
    targets = args[0]
    pieces = [x._home.piece(x._index) if isinstance(x, ShardedGradient) else (x, 0) for x in targets]

    def cut(values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            return values
        rows = zip(values, targets, pieces, strict=True)
        return [x if not isinstance(to, ShardedGradient) else to._cut(*piece, x) for x, to, piece in rows]

    func(*_read([*map(cut, args)]), **_read({name: cut(x) for name, x in kwargs.items()}))
    if _name_of(func) in _MAY_SET_TO_ZERO:
        operands = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(targets)
        for x, operand in zip(targets, operands, strict=True):
            if isinstance(x, ShardedGradient):
                x._zero_sums_if_zero(operand)
    for home in dict.fromkeys(x._home for x in written):
        home.changed()
    return None


def _unscale(func: Any, grads: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Runs torch.amp.GradScaler's division by the loss scale; an overflow in one rank's part is reported to every
    rank."""
    homes = dict.fromkeys(x._home for x in grads if isinstance(x, ShardedGradient))
    func([x._home.piece(x._index)[0] if isinstance(x, ShardedGradient) else x for x in grads], found_inf, inv_scale)
    for home in homes:
        home.changed()
    for ranks in dict.fromkeys(home.ranks for home in homes):
        ranks.reduce_over_all(found_inf.view(1), "max", everywhere=True)
