"""Files of whole tensors, mapped into memory: nothing is read before it is used, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError

# Names of element types in the safetensors format.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HEADER = 8  # bytes that hold the length of what describes the tensors


def open_file(path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Return key -> tensor of a ``.safetensors`` file, of its index, or of a file that ``torch.save`` wrote.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = Path(path)
    try:
        if file.name.endswith(".index.json"):
            files: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            shards = {name: _safetensors(file.parent / name) for name in set(files.values())}
            return {key: shards[name][key] for key, name in files.items()}
        if file.suffix == ".safetensors":
            return _safetensors(file)
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file}: it cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{file}: it holds a {type(loaded).__name__}. Save the state dict.")
    return loaded


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_HEADER), "little")
        if not 0 < length <= size - _HEADER:
            raise ValueError("it is no safetensors file, or it was cut off")
        header = json.loads(opened.read(length))
    data = torch.from_file(os.fspath(file), shared=False, size=size, dtype=torch.uint8)[_HEADER + length :]
    found = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= data.numel():
            raise ValueError(f"{key!r} lies beyond the end of the file")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{key!r} is of the unknown type {entry['dtype']!r}")
        dtype = _DTYPES[entry["dtype"]]
        raw = data[start:end]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # a view of wider elements must start at a multiple of their size
        found[key] = raw.view(dtype).view(entry["shape"])
    return found
