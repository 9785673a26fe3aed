"""Read the index of a checkpoint, which PyTorch writes as a pickle, without running what a pickle can run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError

INDEX_FILE = ".metadata"  # the name torch.distributed.checkpoint gives it

# Plain data classes, whose construction stores arguments and does nothing else.
_CLASSES = {
    "pathlib": {"PosixPath"},  # where a checkpoint of others was written to
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # name -> torch.layout, by a table
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _Reader(pickle.Unpickler):
    """Resolves the names above and dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):  # how some Python versions write members of an enumeration
            return _member
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _member(kind: Any, name: str) -> Any:
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING" or name.startswith("_"):
        raise pickle.UnpicklingError(f"it reads the attribute {name}")
    return kind[name]


def read_index(folder: Path, files: set[str], skip_objects: bool = False) -> Metadata:
    """Return the index of the checkpoint in ``folder``.

    Args:
        folder: One checkpoint.
        files: Names of the files that belong to it; the index may point to no other.
        skip_objects: Whether pickled objects are left out of the index, instead of refused.

    Raises:
        CheckpointError: It cannot be read, or holds anything but tensors in these files.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as stream:
            found = _Reader(stream).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: the index cannot be read: {error}. Load another checkpoint, or save this one again."
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path}: this is not the index of a checkpoint. Load another checkpoint.")
    other = [key for key, entry in found.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)]
    if other and skip_objects:
        for key in other:
            del found.state_dict_metadata[key]
    elif other:
        raise CheckpointError(f"{path}: {other[0]!r} is not a tensor but a pickled object, which is never loaded.")
    strange = sorted({info.relative_path for info in found.storage_data.values()} - files)
    if strange:
        raise CheckpointError(f"{path}: it points to {strange[0]!r}, which is no file of this checkpoint.")
    return found
