"""Reads a checkpoint's index safely: loading it runs no code, and entries that refer to a place outside of the folder
or of a tensor are refused."""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_CHECKPOINT = "torch.distributed.checkpoint."
_NAMES = {  # classes that torch.distributed.checkpoint writes
    _CHECKPOINT + "metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    _CHECKPOINT + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every class that torch.distributed.checkpoint does not write."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # Python 3.13's name for it, which other versions do not have
            module = "pathlib"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_metadata(raw: bytes) -> Metadata:
    """Decodes metadata written by torch.distributed.checkpoint.

    Raises:  an exception that says what is wrong with the metadata.
    """
    metadata = _MetadataUnpickler(io.BytesIO(raw)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it is {type(metadata).__name__}")
    for name, facts in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(facts, (TensorStorageMetadata, BytesStorageMetadata)):
            raise ValueError(f"{name!s} is no tensor and no value")
        if isinstance(facts, TensorStorageMetadata):
            _check_tensor(name, facts)
    for index, info in (metadata.storage_data or {}).items():
        path = PurePosixPath(info.relative_path)
        if not isinstance(index, MetadataIndex) or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"a box lies in {path}")
        if not (isinstance(info.offset, int) and isinstance(info.length, int) and min(info.offset, info.length) >= 0):
            raise ValueError(f"a box lies at {info.offset} for {info.length}")
    return metadata


def _check_tensor(name: str, facts: TensorStorageMetadata) -> None:
    """Raises for metadata that is not a tensor's, and for boxes that exceed the tensor."""
    if not isinstance(facts.properties, TensorProperties) or not isinstance(facts.properties.dtype, torch.dtype):
        raise ValueError(f"{name} has no type")
    for chunk in facts.chunks:
        boxes = zip(facts.size, chunk.offsets, chunk.sizes, strict=True)
        if any(not 0 <= offset <= offset + size <= extent for extent, offset, size in boxes):
            raise ValueError(f"a box reaches out of {name}")
