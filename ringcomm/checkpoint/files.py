"""A checkpoint's files: boxes of tensors and small values in torch.distributed.checkpoint's format, with checksums.

    .metadata        every tensor's name, shape, type and boxes, and where each box lies
    __R_0.distcp     what rank R wrote
    checksums.json   CRC-32C of each box and of .metadata, which torch's own format does not check

A folder is written beside its place and renamed when every rank has finished.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import math
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ringcomm import _C
from ringcomm.checkpoint.metadata import read_metadata
from ringcomm.data_parallel.buckets.layout import inverse, up
from ringcomm.errors import DtypeError, InvalidArgumentError, ShapeError, one_line
from ringcomm.modules.shard_spec import PLAIN, ShardSpec

CHECKSUMS, METADATA = "checksums.json", ".metadata"
MOST_BOX_BYTES = 128 << 20  # so that a reader that needs a part of a tensor does not read all of it

# The names in NumPy's pickles, except arrays of objects. NumPy 1 has numpy.core in place of numpy._core.
_NUMPY: list[Any] = [np.ndarray, np.dtype]
_NUMPY += [type(np.dtype(kind)) for kind in ("?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "S", "U")]
_NUMPY += [
    (made.__reduce__()[0], f"numpy.{core}.multiarray.{name}")
    for made, name in ((np.zeros(0), "_reconstruct"), (np.float64(0), "scalar"))
    for core in ("core", "_core")
]
_safe_types_lock = threading.Lock()  # all threads share torch's list of safe types

Names = tuple[str, ...]
"""The path of a value in nested dicts; joined by dots it is the name in the checkpoint."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box."""


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Returns the boxes that elements ``start`` to ``end`` of a contiguous tensor fill, in order: at most 2n-1 for n
    dimensions.

    Each box is a contiguous run of elements.
    """
    if len(shape) < 2:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first, last = up(start, row) // row, end // row  # complete rows
    if first > last:
        return _inside(shape, last, start - last * row, end - last * row)
    found = _inside(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + (_inside(shape, last, 0, end - last * row) if last * row < end else [])


def _inside(shape: Sequence[int], row: int, start: int, end: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, end)]


@dataclass
class TensorBox:
    """The values of a box of a tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    chunk: ChunkStorageMetadata
    values: torch.Tensor


def boxes_of(
    name: str,
    shape: Sequence[int],
    values: torch.Tensor,
    start: int = 0,
    spec: ShardSpec = PLAIN,
    dim_order: Sequence[int] = (),
) -> list[TensorBox]:
    """Returns views of ``values``, which are a tensor's elements from ``start`` on, as boxes of the tensor.

    Args:
        spec: the tensor's place in a larger tensor; the boxes are then those of the larger tensor, without padding.
        dim_order: the order of the tensor's dimensions, from the slowest to the fastest, in which ``values`` come;
            empty: as in ``shape``.
    """
    found = _boxes_here(name, shape, values, start, dim_order or range(len(shape)))
    return [each for box in found for each in _to_unsharded(box, spec)] if spec.dim is not None else found


def _to_unsharded(box: TensorBox, spec: ShardSpec) -> list[TensorBox]:
    """Converts a box of this rank's part of a tensor to boxes of the whole tensor."""
    dim, found = spec.dim, []
    assert dim is not None
    shape = spec.unsharded_shape(box.shape)
    if 0 in shape:
        unsharded = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        return [TensorBox(box.name, shape, unsharded, box.values.reshape(-1)[:0].view(shape))]
    for first, start, count in spec.boxes(box.chunk.offsets, box.chunk.sizes):
        offsets, sizes = [*box.chunk.offsets], [*box.chunk.sizes]
        offsets[dim], sizes[dim] = start, count
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        found.append(TensorBox(box.name, shape, chunk, box.values.narrow(dim, first, count)))
    return found


def _boxes_here(
    name: str, shape: Sequence[int], values: torch.Tensor, start: int, dim_order: Sequence[int]
) -> list[TensorBox]:
    """Returns the boxes in this rank's part of a tensor."""
    flat, shape = values.detach().reshape(-1), tuple(shape)
    if not flat.numel():
        unsharded = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        return [TensorBox(name, shape, unsharded, flat.view(shape))] if math.prod(shape) == 0 else []
    most = max(1, MOST_BOX_BYTES // flat.itemsize)
    found, at = [], 0
    in_memory, in_shape = [shape[dim] for dim in dim_order], inverse(dim_order)
    for first in range(start, start + flat.numel(), most):
        for offsets, sizes in boxes(in_memory, first, min(first + most, start + flat.numel())):
            box = flat[at : at + math.prod(sizes)].view(sizes).permute(in_shape)
            chunk = ChunkStorageMetadata(torch.Size([offsets[dim] for dim in in_shape]), box.shape)
            found.append(TensorBox(name, shape, chunk, box))
            at += box.numel()
    return found


# ---- writing -----------------------------------------------------------------------------------------------------


class ShardSavePlanner(DefaultSavePlanner):
    """The tensors and values that a rank writes, for torch's writer.

    Attributes:
        paths: by name, the path in nested dicts.
        aliases: by name, other names of the same boxes.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.boxes: dict[MetadataIndex, TensorBox] = {}
        self.values: dict[str, bytes] = {}
        self.paths: dict[str, Names] = {}
        self.aliases: dict[str, list[str]] = {}

    def add_boxes(self, path: Names, boxes: Iterable[TensorBox]) -> None:
        """Adds boxes of the tensor at a path."""
        self.paths[".".join(path)] = path
        for box in boxes:
            self.boxes[MetadataIndex(box.name, box.chunk.offsets)] = box

    def add_tensor(self, path: Names, shape: Sequence[int], values: torch.Tensor) -> None:
        """Adds an unsharded tensor of this shape."""
        self.add_boxes(path, boxes_of(".".join(path), shape, values))

    def add_value(self, path: Names, value: Any) -> None:
        """Adds a value that is not a tensor."""
        name = ".".join(path)
        self.paths[name] = path
        self.values[name] = pack_value(self.rank, name, value)

    def add_state(self, path: Names, value: Any) -> None:
        """Adds a value of an optimizer's state, which may be a tensor."""
        if torch.is_tensor(value):
            self.add_tensor(path, value.shape, value)
        else:
            self.add_value(path, value)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns what torch's writer is to write."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.values[write_item.index.fqn])
        return self.boxes[write_item.index].values


def pack_value(rank: int, what: str, value: Any) -> bytes:
    """Returns a value as bytes that can be loaded without running code.

    Raises:  InvalidArgumentError: the value is not made of tensors, arrays, numbers, strings, lists, tuples and dicts.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unpack_value(buffer.getvalue())
    except Exception as error:
        raise InvalidArgumentError(
            f"save: rank {rank} got {what} of type {type(value).__name__}, expected tensors, arrays, numbers, "
            "strings, and lists, tuples and dicts of these, which load without running code; convert it"
        ) from error
    return buffer.getvalue()


def unpack_value(raw: bytes) -> Any:
    """Returns a value that `pack_value` has packed, without running code."""
    with _safe_types_lock:
        known = torch.serialization.get_safe_globals()  # types that the program has added stay in the list
        with torch.serialization.safe_globals([each for each in _NUMPY if each not in known]):
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


class _FileWriter(FileSystemWriter):
    """Leaves the folder's name out of the metadata, because the folder is renamed later."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


@dataclass
class WriteReport:
    """What a rank has written; rank 0 gathers the reports and writes the index."""

    plan: SavePlan
    results: list[Any]
    checksums: dict[str, dict[int, int]]  # by file and offset
    aliases: dict[str, list[str]]


def _item(box: TensorBox) -> WriteItem:
    data = TensorWriteData(box.chunk, TensorProperties.create_from_tensor(box.values), torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, box.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def write(folder: Path, rank: int, planner: ShardSavePlanner) -> WriteReport:
    """Writes this rank's file into an existing folder; returns its report, with checksums of the file as read back."""
    values = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in planner.values]
    plan = SavePlan([*map(_item, planner.boxes.values()), *values], planner_data=planner.paths)
    writer = _FileWriter(folder)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]  # names this rank's file
    results = writer.write_data(plan, planner).wait() if plan.items else []
    checksums: dict[str, dict[int, int]] = {}
    for file in {result.storage_data.relative_path for result in results}:
        with (folder / file).open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            infos = [each.storage_data for each in results if each.storage_data.relative_path == file]
            with memoryview(content) as view:
                checksums[file] = {each.offset: _checksum(view, each.offset, each.length) for each in infos}
    return WriteReport(plan, results, checksums, planner.aliases)


def _checksum(view: memoryview, offset: int, length: int) -> int:
    with view[offset : offset + length] as part:
        return _C.crc32c(part)


def finish(folder: Path, path: Path, everyone: Sequence[WriteReport]) -> None:
    """Writes the index of all values, and renames the folder; runs on one rank, when all have written.

    Raises:  InvalidArgumentError: another rank's file is not here.
    """
    checksums: dict[str, dict[int, int]] = {}
    for rank, written in enumerate(everyone):
        for file in written.checksums:
            if not (folder / file).exists():
                raise InvalidArgumentError(
                    f"save: rank 0 got no {file} in {folder}, where rank {rank} has written it, expected one folder "
                    "for all ranks; save to a file system that all hosts share"
                )
        checksums |= written.checksums
    _, metadata = DefaultSavePlanner().create_global_plan([written.plan for written in everyone])
    results = [result for written in everyone for result in written.results]
    for name, others in ((name, others) for written in everyone for name, others in written.aliases.items() if others):
        results += _add_aliases(metadata, results, name, others)
    _FileWriter(folder).finish(metadata, [results])
    checksums[METADATA] = {0: _C.crc32c((folder / METADATA).read_bytes())}
    with (folder / CHECKSUMS).open("w") as stream:
        json.dump({"crc32c": checksums}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    put_in_place(folder, path)


def _add_aliases(metadata: Metadata, results: Sequence[Any], name: str, others: Sequence[str]) -> list[Any]:
    """Adds other names for a tensor's boxes."""
    mine, found = [each for each in results if each.index.fqn == name], []
    for other in others:
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
        metadata.planner_data[other] = (other,)
        index = [MetadataIndex(other, each.index.offset, each.index.index) for each in mine]
        found += [type(each)(at, each.size_in_bytes, each.storage_data) for at, each in zip(index, mine, strict=True)]
    return found


# ---- in place ----------------------------------------------------------------------------------------------------


def make_saving_folder(path: Path) -> Path:
    """Returns the folder in which a checkpoint is written before it is renamed; removes what an interrupted save
    left there."""
    if path.exists():
        _refuse_other_files(path)
    folder = path.absolute().parent / f".{path.name}.saving"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def _refuse_other_files(path: Path) -> None:
    """Raises for a path whose replacement would lose more than an older checkpoint."""
    if not path.is_dir():
        raise InvalidArgumentError(
            f"save: rank 0 got {path}, which is no folder, expected a new name or an older checkpoint; save under "
            "another name"
        )
    own = (CHECKSUMS, METADATA, f"{METADATA}.tmp")
    others = sorted(each.name for each in path.iterdir() if each.name not in own and each.suffix != ".distcp")
    if others:
        raise InvalidArgumentError(
            f"save: rank 0 got {path}, which holds {others[0]} and would be replaced, expected a new name or an older "
            "checkpoint; save into a folder of its own"
        )


def put_in_place(folder: Path, path: Path) -> None:
    """Renames a finished folder to its final name atomically. An older folder of that name is moved to ``folder``."""
    if path.exists():
        _refuse_other_files(path)  # checked again, because files may have been added during the save
        _swap(folder, path)
    else:
        folder.rename(path)
    handle = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(a: Path, b: Path) -> None:
    """Exchanges two names atomically."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))
    raise InvalidArgumentError(
        f"save: rank 0 got {b}, which exists, on a file system that cannot exchange two folders at once, expected a "
        "new name; save under another one for each step"
    )


# ---- reading -----------------------------------------------------------------------------------------------------


class Source:
    """A checkpoint to read, written by `save` or by torch.distributed.checkpoint.

    Attributes:
        paths: by name, the path in nested dicts.
        digest: a checksum of all checksums; of torch's checkpoints, which have none, of the metadata.
    """

    def __init__(self, path: Path, call: str, rank: int) -> None:
        self.path, self.call, self.rank = path, call, rank
        try:
            raw = (path / METADATA).read_bytes()
        except OSError as error:
            raise self._wrong(f"no checkpoint in {path} ({error.strerror})", "one that was saved there") from error
        self.checksums = self._read_checksums()
        self.digest = _C.crc32c(repr(self.checksums).encode(), _C.crc32c(raw))
        self.has_checksums = bool(self.checksums)
        if self.has_checksums and self.checksums.get(METADATA) != {"0": _C.crc32c(raw)}:
            raise self._damaged(METADATA, "another checksum")
        try:
            self.metadata: Metadata = read_metadata(raw)
            self.paths: dict[str, Names] = {
                name: (self.metadata.planner_data or {}).get(name, (name,))
                for name in self.metadata.state_dict_metadata
            }
        except Exception as error:
            raise self._damaged(METADATA, f"{type(error).__name__}: {one_line(error)}") from error

    def _read_checksums(self) -> dict[str, dict[str, int]]:
        file = self.path / CHECKSUMS
        if not file.exists():
            return {}
        try:
            found = json.loads(file.read_bytes())["crc32c"]
            return {name: {str(at): int(sum_) for at, sum_ in sums.items()} for name, sums in found.items()}
        except Exception as error:
            raise self._damaged(CHECKSUMS, f"{type(error).__name__}") from error

    def _wrong(self, got: str, expected: str, kind: type[InvalidArgumentError] = InvalidArgumentError) -> Exception:
        return kind(f"{self.call}: rank {self.rank} got {got}, expected {expected}; load a checkpoint of this model")

    def _damaged(self, name: str, how: str) -> Exception:
        return InvalidArgumentError(
            f"{self.call}: rank {self.rank} got {name} damaged in {self.path} ({how}), expected it as it was saved; "
            "load another checkpoint"
        )

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Returns the metadata of all tensors, by name."""
        return {
            name: facts
            for name, facts in self.metadata.state_dict_metadata.items()
            if isinstance(facts, TensorStorageMetadata)
        }

    def has_value(self, path: Names) -> bool:
        """Whether the checkpoint has a value that is not a tensor at a path."""
        return isinstance(self.metadata.state_dict_metadata.get(".".join(path)), BytesStorageMetadata)

    def value(self, path: Names) -> Any:
        """Returns a value that is not a tensor."""
        name = ".".join(path)
        return self._read_stored(name, MetadataIndex(name), _load_value)

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises if a tensor is missing, or has another shape or kind of type."""
        facts = self.metadata.state_dict_metadata.get(name)
        if not isinstance(facts, TensorStorageMetadata):
            raise self._wrong(f"a checkpoint without {name}", f"one of shape {tuple(shape)}")
        if tuple(facts.size) != tuple(shape):
            raise self._wrong(f"{name} of shape {tuple(facts.size)}", str(tuple(shape)), ShapeError)
        if _kind(facts.properties.dtype) != _kind(dtype):
            raise self._wrong(f"{name} in {facts.properties.dtype}", f"{dtype} or of its kind", DtypeError)

    def read(self, wanted: Sequence[TensorBox]) -> None:
        """Fills boxes of one tensor that passed `check`; each box in the checkpoint is read once."""
        if not wanted:
            return
        name = wanted[0].name
        here = {MetadataIndex(name, box.chunk.offsets): box.values for box in wanted}
        facts = self.metadata.state_dict_metadata[name]
        items = create_read_items_for_chunk_list(name, facts, [box.chunk for box in wanted])
        missing = sum(box.values.numel() for box in wanted) - sum(math.prod(item.lengths) for item in items)
        if missing:
            raise self._damaged(name, f"{missing} elements are missing")
        stored: tuple[MetadataIndex | None, Any] = (None, None)
        for item in sorted(items, key=lambda item: tuple(item.storage_index.offset)):
            target = _narrow(here[item.dest_index], item.dest_offsets, item.lengths)
            if stored[0] != item.storage_index:
                stored = item.storage_index, self._read_stored(name, item.storage_index, partial(_load_box, target))
            if stored[1] is not target:
                target.copy_(_narrow(stored[1], item.storage_offsets, item.lengths))

    def place(self, name: str) -> Any:
        """Returns the place of a tensor's boxes; it is equal for names of the same tensor."""
        where = [
            self.metadata.storage_data.get(MetadataIndex(name, each.offsets)) for each in self.tensors[name].chunks
        ]
        return tuple(sorted((each.relative_path, each.offset) for each in where if each is not None))

    def tensor(self, name: str) -> torch.Tensor:
        """Returns an unsharded tensor."""
        facts = self.metadata.state_dict_metadata[name]
        missing = math.prod(facts.size) - sum(math.prod(chunk.sizes) for chunk in facts.chunks)
        if missing > 0:
            raise self._damaged(name, f"{missing} elements are missing")
        unsharded = torch.empty(facts.size, dtype=facts.properties.dtype)
        self.read(boxes_of(name, unsharded.shape, unsharded))
        return unsharded

    def _read_stored(self, name: str, index: MetadataIndex, load: Callable[[_FilePart], tuple[Any, int]]) -> Any:
        """Returns a stored box or value; ``load`` returns it together with the checksum of its bytes."""
        try:
            info = self.metadata.storage_data[index]
            expected = self.checksums.get(info.relative_path, {}).get(str(info.offset))
            with (self.path / info.relative_path).open("rb", buffering=0) as stream:
                part = _FilePart(stream.fileno(), info.offset, info.length)
                try:
                    found, checksum = load(part)
                except Exception:
                    checksum = part.checksum(0, info.length)
                    if not self.has_checksums or checksum == expected:
                        raise
            if self.has_checksums and checksum != expected:
                raise self._damaged(name, f"{info.relative_path} has another checksum")
            return found
        except InvalidArgumentError:
            raise
        except Exception as error:
            raise self._damaged(name, f"{type(error).__name__}") from error


class _FilePart(io.RawIOBase):
    """A part of a file, which torch.load reads as if it were a file."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        super().__init__()
        self.fd, self.start, self.length = fd, start, length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as view, view[: max(0, self.length - self.at)] as target:
            count = os.preadv(self.fd, [target], self.start + self.at)
        self.at += count
        return count

    def checksum(self, start: int, end: int, before: int = 0, into: Any = None) -> int:
        """Returns the checksum of bytes ``start`` to ``end``, continued from ``before``; ``into`` gets the bytes."""
        step = 1 << 20  # read and summed in steps, so that the bytes are in the cache when they are summed
        buffer = memoryview(bytearray(min(step, end - start)) if into is None else into)
        self.seek(start)
        while self.at < end:
            first = 0 if into is None else self.at - start
            with buffer[first : first + min(step, end - self.at)] as target:
                count = self.readinto(target)
                if not count:
                    raise EOFError
                before = _C.crc32c(target[:count], before)
        return before


def _load_value(part: _FilePart) -> tuple[Any, int]:
    raw = part.readall()
    return unpack_value(raw), _C.crc32c(raw)


def _load_box(target: torch.Tensor, part: _FilePart) -> tuple[torch.Tensor, int]:
    """Returns a box as torch has written it: ``target`` if the box has its shape, type and layout."""
    box = torch.load(io.BufferedReader(part), map_location="meta", weights_only=True)  # only its type and layout
    storage = box.untyped_storage()
    is_alike = box.dtype == target.dtype and box.shape == target.shape and storage.nbytes() == target.nbytes
    if is_alike and box.is_contiguous() and target.is_contiguous():
        raw, values = target.as_strided((target.numel(),), (1,)).view(torch.uint8), target
    else:
        raw = torch.empty(storage.nbytes(), dtype=torch.uint8)
        values = raw.view(box.dtype).as_strided(box.shape, box.stride(), box.storage_offset())
    start = storage._checkpoint_offset  # where torch.load would read the values
    end = start + storage.nbytes()
    checksum = part.checksum(start, end, part.checksum(0, start), raw.numpy())
    return values, part.checksum(end, part.length, checksum)


def _narrow(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool
