"""Files of whole tensors, mapped into memory: nothing is read before it is used, and nothing is executed."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from .errors import CheckpointError

# Names of element types in the safetensors format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SINGLE = "model.safetensors"  # the names that Transformers looks for in a directory
INDEX = "model.safetensors.index.json"
LENGTH = 8  # bytes in front of the header that hold its length
_HEADER_MOST = 100_000_000  # bytes; the safetensors library reads no longer header either


class Entry(NamedTuple):
    """Where a tensor lies in a ``.safetensors`` file.

    Attributes:
        file: The file.
        start: First byte, from the beginning of the file.
        dtype: Its element type.
        shape: Its shape.
    """

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """What a ``.safetensors`` file says about itself.

    Attributes:
        entries: Key -> place of the tensor, in the order of the bytes.
        metadata: Free text of whoever wrote it.
        begin: First byte behind the header.
        size: Size in bytes of the whole file.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]
    begin: int
    size: int

    def gaps(self) -> list[str]:
        """Return where the tensors do not fill the file byte for byte, in words; empty if they do."""
        wrong, position = [], self.begin
        for key, entry in self.entries.items():
            if entry.start != position:
                there = f"not at {position} where the tensor before it ends"
                wrong.append(f"{key!r} begins at byte {entry.start}, {there}")
            position = entry.start + entry.nbytes
        if position != self.size:
            wrong.append(f"it has {self.size} bytes, but its tensors end at {position}")
        return wrong


def open_file(path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Return key -> tensor of a ``.safetensors`` file, of its index, or of a file that ``torch.save`` wrote.

    Args:
        path: The file; or a directory of Hugging Face weights.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = weights_in(Path(path)) if Path(path).is_dir() else Path(path)
    try:
        if file.name.endswith(".index.json"):
            files = weight_map(file)
            shards = {name: _mapped(file.parent / name) for name in sorted(set(files.values()))}
            if lost := sorted(key for key, name in files.items() if key not in shards[name]):
                raise ValueError(f"{files[lost[0]]} lacks {lost[0]!r}")
            return {key: shards[name][key] for key, name in files.items()}
        if file.suffix == ".safetensors":
            return _mapped(file)
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file}: it cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{file}: it holds a {type(loaded).__name__}. Save the state dict.")
    return loaded


def weights_in(folder: Path) -> Path:
    """Return the index, or the only file, of the Hugging Face weights in ``folder``.

    Raises:
        CheckpointError: There is none.
    """
    for name in (INDEX, SINGLE):
        if (folder / name).is_file():
            return folder / name
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return folder / others[0]
    has = f"it holds {', '.join(others[:3])} and no index" if others else f"it holds neither {INDEX} nor {SINGLE}"
    old = sorted(path.name for path in folder.glob("pytorch_model*.bin*"))
    more = f", but {old[0]}: save it again with save_pretrained(), which writes safetensors" if old else ""
    raise CheckpointError(f"{folder}: {has}{more}. Pass a directory that save_pretrained() wrote.")


def weight_map(index: Path) -> dict[str, str]:
    """Return key -> name of the file that holds it, of an index.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no index, or points out of its folder.
    """
    content = _parsed(index.read_text(encoding="utf-8"))
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError("it has no weight_map")
    if not files:
        raise ValueError("its weight_map is empty")
    strange = [name for name in files.values() if Path(name).name != name]
    if strange:
        raise ValueError(f"it points to {strange[0]!r}, which is not beside it")
    return files


def read_header(file: Path) -> Header:
    """Return what a ``.safetensors`` file holds, without reading its tensors.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file, or it was cut off.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH), "little")
        if not 0 < length <= min(size - LENGTH, _HEADER_MOST):
            raise ValueError("it is no safetensors file, or it was cut off")
        header = _parsed(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is no safetensors file: its header is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its __metadata__ does not consist of texts")
    begin = LENGTH + length
    entries = {key: _entry(file, key, said, begin, size) for key, said in header.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes))
    return Header(dict(ordered), metadata, begin, size)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _entry(file: Path, key: str, said: Any, begin: int, size: int) -> Entry:
    """Return the place of one tensor from what the header says of it; raises ValueError."""
    about: dict[str, Any] = said if isinstance(said, dict) else {}
    dtype, shape, offsets = about.get("dtype"), about.get("shape"), about.get("data_offsets")
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{key!r} has no proper shape and data_offsets in the header")
    start, end = offsets
    if not start <= end <= size - begin:
        raise ValueError(f"{key!r} lies beyond the end of the file")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{key!r} is of the unknown type {dtype!r}")
    entry = Entry(file, begin + start, DTYPES[dtype], tuple(shape))
    if entry.nbytes != end - start:
        raise ValueError(f"{key!r} has {end - start} bytes, not the {entry.nbytes} of its shape and type")
    return entry


def _sizes(said: object) -> TypeGuard[list[int]]:
    # Beside a 0 any number could stand; PyTorch multiplies them all the same.
    return (
        isinstance(said, list)
        and all(type(each) is int and each >= 0 for each in said)
        and math.prod(each or 1 for each in said) < 1 << 59
    )


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    header = read_header(file)
    if wrong := header.gaps():
        raise ValueError(f"{file.name}: {wrong[0]}")
    data = torch.from_file(os.fspath(file), shared=False, size=header.size, dtype=torch.uint8)
    found = {}
    for key, entry in header.entries.items():
        raw = data[entry.start : entry.start + entry.nbytes]
        if raw.storage_offset() % entry.dtype.itemsize:
            raw = raw.clone()  # a view of wider elements must start at a multiple of their size
        found[key] = raw.view(entry.dtype).view(entry.shape)
    return found
