"""Partitions a module into units and buckets. The partition depends only on the module's structure, so it is the
same at every stage and on every rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ringcomm.data_parallel.buckets.bucket import Bucket
from ringcomm.data_parallel.buckets.group import DataParallelGroup
from ringcomm.data_parallel.buckets.layout import Atom, FlatLayout, Segment, dim_order, memory_format, up
from ringcomm.data_parallel.model.place import place_of
from ringcomm.data_parallel.model.sharded_model import Config, Unit
from ringcomm.data_parallel.model.sharded_parameter import ShardedParameter
from ringcomm.errors import InvalidArgumentError, UnsupportedError
from ringcomm.modules.precision import MixedPrecision, Types, is_float
from ringcomm.modules.shard_spec import part_of, renew_parts

LATENCY_SHARE = 0.25  # largest share of latency in a reduction's time, at the chosen bucket size
HOST_SECONDS = 2e-4  # Python time per bucket and step; it counts as latency
PROBES = ((4 << 10, 20), (4 << 20, 3))  # bytes and repetitions of the timed messages
# The allocator takes larger blocks from the system anew each time.
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 20, 16 << 20


UnitParts = tuple[str, Sequence[nn.Module], Sequence[tuple[str, nn.Parameter]], bool | None]
"""A unit's name, modules and parameters, and whether it is resharded after forward."""


def make_units(
    parts: Sequence[UnitParts],
    config: Config,
    ranks: DataParallelGroup,
    *,
    most_bytes: int,
    atom: Atom,
    optimizer_group: Mapping[int, int],
    kept: Collection[int] = (),
    send: bool = True,
    device: torch.device | None = None,
) -> list[Unit]:
    """Makes the units of a model and their buckets; a collective. Parameters that differ in element type, device or
    whether they are trained are in different buckets.

    Args:
        most_bytes: the size of a bucket, unless a single parameter is larger.
        optimizer_group: by id of a parameter, the index of its optimizer group.
        kept: ids of the parameters that compute in their own type; see `kept_in_their_type`.
        send: whether all ranks get the first rank's values.
        device: where parameters on the meta device get memory.
    """

    def new_bucket(named: Sequence[tuple[str, nn.Parameter]], types: Types) -> Bucket:
        specs = [
            Segment(name, tuple(p.shape), optimizer_group.get(id(p), 0), dim_order=dim_order(p)) for name, p in named
        ]
        # The alignment for the narrower type, in elements, is also valid for the wider one.
        narrowest = min((types.compute, types.master), key=lambda dtype: dtype.itemsize)
        layout = FlatLayout.build(specs, narrowest, ranks.world_size, atom)
        by_name = dict(named)
        params = [by_name[segment.name] for segment in layout.segments]
        return Bucket(
            layout,
            params,
            ranks,
            types,
            config.stage,
            ShardedParameter,
            tree=config.accumulation == "tree",
            master_device=config.offload,
            send=send,
            device=device if any(p.is_meta for p in params) else None,
        )

    units = []
    for unit_name, modules, params, reshard in parts:
        kinds: dict[tuple[torch.dtype, Types, bool, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name, p in params:
            types = _types_of(p, config.mixed_precision, id(p) in kept)
            placed = device if p.is_meta and device is not None else p.device
            kinds.setdefault((p.dtype, types, p.requires_grad, placed), []).append((name, p))
        buckets = [
            new_bucket(some, types)
            for (_, types, *_), named in kinds.items()
            for some in _split(named, most_bytes // types.compute.itemsize)
        ]
        units.append(Unit(unit_name, modules, buckets, reshard))
    return units


def _types_of(p: nn.Parameter, precision: MixedPrecision, kept: bool) -> Types:
    return (MixedPrecision(reduce_dtype=precision.reduce_dtype) if kept else precision).types_of(p.dtype)


def _split(params: Sequence[tuple[str, nn.Parameter]], most_numel: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Splits parameters, in order, into lists of at most ``most_numel`` elements, unless a single one has more."""
    found: list[list[tuple[str, nn.Parameter]]] = [[]]
    numel = 0
    for name, p in params:
        if found[-1] and numel + p.numel() > most_numel:
            found.append([])
            numel = 0
        found[-1].append((name, p))
        numel += p.numel()
    return found


def named_parameters(
    module: nn.Module, call: str, rank: int, ignored: Iterable[nn.Parameter] = (), meta: bool = False
) -> list[tuple[str, nn.Parameter]]:
    """Returns a module's parameters, each once, under its first name. Frozen parameters of a subclass, such as
    quantised weights, are left out; they stay as they are on every rank.

    Args:
        meta: whether they may be on the meta device.
    Raises:  InvalidArgumentError: a parameter that is already wrapped. UnsupportedError: a parameter without memory.
    """
    for name, each in module.named_modules():
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise InvalidArgumentError(
                f"{call}: rank {rank} got a module with torch's DistributedDataParallel ({name or 'itself'}), expected "
                "a plain one: gradients would be averaged twice; pass the module inside it"
            )
    for name, each in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(each):
            raise UnsupportedError(
                f"{call}: rank {rank} got {name} of a lazy module, which has no shape before its first call, expected "
                "a tensor with values; call the module on an example on every rank first"
            )
    renew_parts(module.modules())
    out = {id(p) for p in ignored}
    found = [(name, p) for name, p in module.named_parameters() if id(p) not in out and not _is_opaque(p)]
    _refuse_shared_memory(found, call, rank)
    for name, p in found:
        if place_of(p) is not None:
            raise InvalidArgumentError(
                f"{call}: rank {rank} got {name}, which is wrapped already, expected a plain module; wrap it "
                "once, or take it out with ringcomm.unshard first"
            )
        if hasattr(p, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"{call}: rank {rank} got {name} with an optimizer that steps during backward, expected none: it would "
                "step before the gradient is averaged; use an ordinary optimizer"
            )
        if p.is_meta and not meta:
            raise UnsupportedError(
                f"{call}: rank {rank} got {name} on the meta device, expected one with values; call "
                "module.to_empty(device=...) and initialise it first"
            )
    return found


def _refuse_shared_memory(params: Sequence[tuple[str, nn.Parameter]], call: str, rank: int) -> None:
    """Raises if two parameters share memory, because wrapping would give each its own memory."""
    plain = [(name, p) for name, p in params if place_of(p) is None and not p.is_meta and p.numel() and p.data_ptr()]
    where = [(p.device, p.data_ptr(), p.data_ptr() + p.nbytes if p.is_contiguous() else 0, name) for name, p in plain]
    ordered = sorted(where, key=lambda each: (str(each[0]), *each[1:3]))
    for (device, start, end, other), (next_device, next_start, _, name) in pairwise(ordered):
        if device == next_device and (start == next_start or next_start < end):
            raise InvalidArgumentError(
                f"{call}: rank {rank} got {other} and {name}, two parameters that share memory, expected one, because "
                f"wrapping would separate them; tie them as one parameter, module.{name} = module.{other}"
            )


def _is_opaque(p: torch.Tensor) -> bool:
    """Whether a parameter's values may differ from the contents of its memory."""
    plain = type(p) in (nn.Parameter, torch.Tensor) and type(p.data) is torch.Tensor
    return not p.requires_grad and not plain


def kept_in_their_type(module: nn.Module) -> frozenset[int]:
    """Returns the ids of batch norms' parameters: torch computes those in the type of the running statistics."""
    return frozenset(id(p) for each in module.modules() if isinstance(each, _BatchNorm) for p in each.parameters())


def cast_buffers(
    module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str] = (), inner: Sequence[nn.Module] = ()
) -> list[tuple[nn.Module, str, torch.dtype]]:
    """Casts a module's floating point buffers, except those of batch norms. Returns the buffers that it has cast, with
    their old types.

    Args:
        dtype: None: nothing is cast.
        ignored: names of buffers that stay as they are.
        inner: submodules whose buffers stay as they are.
    """
    found: list[tuple[nn.Module, str, torch.dtype]] = []
    if dtype is None:
        return found
    inside = {id(each) for part in inner for each in part.modules()}
    for path, each in module.named_modules():
        if id(each) in inside or isinstance(each, _BatchNorm):
            continue
        for name, buffer in each.named_buffers(path, recurse=False):
            key = name.rpartition(".")[2]
            if name in ignored or not is_float(buffer) or buffer.dtype == dtype:
                continue
            found.append((each, key, buffer.dtype))
            if buffer.is_inference():
                each._buffers[key] = buffer.to(dtype)
            else:
                buffer.data = buffer.to(dtype)
    return found


def restore_buffers(cast: Sequence[tuple[nn.Module, str, torch.dtype]]) -> None:
    """Gives buffers the type that they had before `cast_buffers`; rounded values stay rounded."""
    for module, key, dtype in cast:
        buffer = module._buffers.get(key)
        if buffer is not None:
            buffer.data = buffer.to(dtype)


def facts_of(module: nn.Module, ignored: Collection[str] = (), sends_buffers: bool = True) -> list[str]:
    """Returns the facts that ranks must agree on: one line per parameter, and one per buffer if rank 0's buffers are
    sent. Names in ``ignored`` may differ."""
    params = [
        f"{name} {tuple(p.shape)} {p.dtype}{memory_format(p)}{'' if p.requires_grad else ' frozen'}{_place(p)}"
        for name, p in module.named_parameters()
        if name not in ignored
    ]
    buffers = [(name, b) for name, b in module.named_buffers() if sends_buffers and name not in ignored]
    return params + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in buffers]


def _place(p: torch.Tensor) -> str:
    part = part_of(p)
    return f" cut along {part.dim} at {list(part.pieces)} of {part.extent}" if part.is_cut else ""


# ---- units -------------------------------------------------------------------------------------------------------


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the repeated parts of a module, such as the blocks of a transformer: the children with parameters of its
    outermost ModuleLists and Sequentials.

    Modules that only some ranks may run, depending on their data, are left out: children called "experts", and
    everything inside the members of a ModuleDict, unless its only list is there, as in nanoGPT.
    """
    found: list[tuple[str, nn.Module]] = []

    def look(name: str, each: nn.Module) -> None:
        lists = (nn.ModuleList, nn.Sequential)
        listed = isinstance(each, lists) and len(each) > 1
        only = sum(isinstance(child, lists) for child in each.children()) == 1
        for key, child in each.named_children():
            path = f"{name}.{key}" if name else key
            if isinstance(child, torch.jit.ScriptModule):  # accepts no hooks, and its class cannot be changed
                continue
            if listed and any(True for _ in child.parameters()):
                found.append((path, child))
            elif (
                not listed
                and key != "experts"
                and (not isinstance(each, nn.ModuleDict) or (only and isinstance(child, lists)))
            ):
                look(path, child)

    look("", module)
    inside = {id(each) for _, block in found for each in block.modules() if each is not block}
    return [(name, block) for name, block in found if id(block) not in inside]


def runs_of(
    blocks: Sequence[tuple[str, nn.Module]], owned: Mapping[int, str], least_bytes: int
) -> list[tuple[str, list[nn.Module]]]:
    """Joins neighbouring blocks until each run has ``least_bytes`` of parameters.

    Args:
        owned: by id, the parameters that lie in one block alone.
    """
    runs: list[tuple[str, list[nn.Module], int]] = []
    for name, block in blocks:
        nbytes = sum(p.nbytes for p in block.parameters() if id(p) in owned)
        parent = name.rpartition(".")[0]
        if runs and runs[-1][2] < least_bytes and runs[-1][0].rpartition(".")[0] == parent:
            first, modules, before = runs.pop()
            runs.append((first, [*modules, block], before + nbytes))
        else:
            runs.append((name, [block], nbytes))
    return [(name, modules) for name, modules, _ in runs]


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a module, in either of its two forms."""
    return hasattr(module, "_torchdynamo_orig_callable") or getattr(module, "_compiled_call_impl", None) is not None


def owned_by_one(blocks: Sequence[tuple[str, nn.Module]], module: nn.Module) -> dict[int, str]:
    """Returns id -> block for the parameters that are in one block and nowhere else in the module; for nested blocks
    the innermost one. A tied parameter that is also used outside of the block belongs to the whole module."""
    uses = _uses(module)
    found: dict[int, str] = {}
    for name, block in sorted(blocks, key=lambda each: -sum(1 for _ in each[1].modules())):
        found |= {key: name for key, count in _uses(block).items() if count == uses[key]}
    return found


def _uses(module: nn.Module) -> Counter[int]:
    """Returns by id how many modules inside have a parameter."""
    return Counter(id(p) for each in module.modules() for p in each._parameters.values() if p is not None)


def units_of(
    module: nn.Module,
    params: list[tuple[str, nn.Parameter]],
    blocks: list[tuple[str, nn.Module]],
    reshard: bool | None,
    least_bytes: int,
) -> list[UnitParts]:
    """Returns the parts of a module's units: runs of its blocks, and last the module itself, with the parameters that
    are in no block.

    Args:
        least_bytes: small blocks are joined into runs of this size.
    """
    blocks = list({id(block): (name, block) for name, block in reversed(blocks)}.values())[::-1]  # by the first name
    owned = owned_by_one(blocks, module)
    owners = {*owned.values()}  # a block that owns nothing has nothing to gather
    blocks = [(name, block) for name, block in blocks if name in owners]
    units: list[UnitParts] = []
    taken: set[int] = set()
    names = {id(block): name for name, block in blocks}
    for name, modules in runs_of(blocks, owned, least_bytes):
        inside = {names[id(each)] for each in modules}
        mine = [(key, p) for key, p in params if owned.get(id(p)) in inside]
        if mine:
            taken |= {id(p) for _, p in mine}
            units.append((name, modules, mine, reshard))
    return [*units, ("", [module], [(key, p) for key, p in params if id(p) not in taken], False)]


# ---- buckets -----------------------------------------------------------------------------------------------------


def bucket_bytes(cap_mb: float | None, ranks: DataParallelGroup) -> int:
    """Returns the largest size of a bucket; if ``cap_mb`` is None, measures it, which is a collective."""
    return measured_bucket_bytes(ranks) if cap_mb is None else max(1, int(cap_mb * (1 << 20)))


def measured_bucket_bytes(ranks: DataParallelGroup) -> int:
    """Returns the message size from which on latency is a small part of a reduction's time; the same on every rank. A
    collective.

    Two sizes are timed to fit time = a + b * bytes, where a is the latency. The result is the smallest size with a <=
    LATENCY_SHARE of the time.
    """
    import time

    comm = ranks.comm
    if comm.world_size == 1:
        return MOST_BUCKET_BYTES
    seconds = []
    for nbytes, repetitions in PROBES:
        device = torch.device(comm.device) if comm.device.startswith("cuda") else torch.device("cpu")
        x = torch.zeros(nbytes // 4, device=device)
        spent = []
        for _ in range(repetitions):
            comm.barrier()
            start = time.perf_counter()
            comm.all_reduce(x)
            comm.synchronize()
            spent.append(time.perf_counter() - start)
        seconds.append(min(spent))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    ranks.reduce_over_all(slowest, "max")
    low, high = slowest.tolist()
    per_byte = max(1e-12, (high - low) / (PROBES[1][0] - PROBES[0][0]))
    latency = HOST_SECONDS + max(0.0, low - per_byte * PROBES[0][0])
    wanted = latency * (1 - LATENCY_SHARE) / LATENCY_SHARE / per_byte
    return min(up(max(1, math.ceil(wanted)), LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)
