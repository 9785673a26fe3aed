"""Which tensor goes into which ``.safetensors`` file, and where in it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError
from ..full_files import DTYPES, LENGTH, SINGLE
from .values import dtype_name

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Weight:
    """One tensor of the files.

    Attributes:
        name: What it is called there.
        key: What it is called in the source; another name where one tensor is written under two.
        dtype: Its element type in the files.
        shape: Its shape.
    """

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """One file.

    Attributes:
        name: Its name.
        weights: Its tensors, in the order of their bytes.
        also: Further name of one of them -> the name it has here.
    """

    name: str
    weights: tuple[Weight, ...]
    also: dict[str, str]

    def header(self) -> bytes:
        """Return what stands in front of the tensors' bytes."""
        # Whoever drops names of shared tensors says so here: safetensors.torch.load_model looks for it.
        content: dict[str, Any] = {"__metadata__": {"format": "pt", **self.also}}
        position = 0
        for weight in self.weights:
            end = position + weight.nbytes
            dtype, shape = _NAMES[weight.dtype], list(weight.shape)
            content[weight.name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(LENGTH, "little") + text

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return len(self.header()) + sum(weight.nbytes for weight in self.weights)


def plan_weights(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ties: Mapping[str, str],
    twice: set[str],
    dtype: torch.dtype | None,
) -> tuple[list[Weight], dict[str, str]]:
    """Return the tensors to write, and further names that are left out -> the name that is written.

    Args:
        tensors: Key -> dtype and shape.
        ties: Further name of one of them -> its key.
        twice: Further names that are written all the same.
        dtype: Convert wide floating-point tensors to it; None keeps theirs.
    """
    weights = [Weight(key, key, written_dtype(own, dtype), shape) for key, (own, shape) in tensors.items()]
    for name in sorted(twice):
        own, shape = tensors[ties[name]]
        weights.append(Weight(name, ties[name], written_dtype(own, dtype), shape))
    return weights, {name: key for name, key in ties.items() if name not in twice}


def plan_files(weights: Sequence[Weight], also: Mapping[str, str], most: int) -> list[WeightFile]:
    """Divide ``weights`` among files, in their order.

    Args:
        weights: All tensors.
        also: Further names that are not written -> the name that is.
        most: Bytes of tensors in a file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: There are none, or some are of a dtype that the format does not know.
    """
    if not weights:
        raise CheckpointError("export: there are no tensors. Export a model with parameters.")
    if strange := [f"{each.name} ({dtype_name(each.dtype)})" for each in weights if each.dtype not in _NAMES]:
        raise CheckpointError(
            f"export: safetensors has no such dtype: {', '.join(strange[:5])}. Convert these tensors, or pass dtype."
        )
    parts: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if parts[-1] and filled + weight.nbytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += weight.nbytes
    files = []
    for number, part in enumerate(parts, start=1):
        name = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        part.sort(key=lambda each: -each.dtype.itemsize)  # so that all lie at multiples of their elements' size
        here = {each.name for each in part}
        files.append(WeightFile(name, tuple(part), {new: old for new, old in also.items() if old in here}))
    return files


def index_of(files: Iterable[WeightFile]) -> str:
    """Return the text of the index that Transformers reads."""
    places = {weight.name: file.name for file in files for weight in file.weights}
    every = [weight for file in files for weight in file.weights]
    about = {
        "total_parameters": sum(math.prod(weight.shape) for weight in every),
        "total_size": sum(weight.nbytes for weight in every),
    }
    return json.dumps({"metadata": about, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def size_text(size: int) -> str:
    """Return bytes in words, e.g. ``"1.50 GB"``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def parse_size(size: int | str, where: str = "max_shard_size") -> int:
    """Return bytes from a number, or from text such as ``"5GB"`` or ``"200 MiB"``.

    Raises:
        CheckpointError: It is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", size.strip().upper())):
        number = int(float(found[1]) * _UNITS.get(found[2], 0))
        if number > 0:
            return number
    raise CheckpointError(f'{where}: {size!r} is no size. Write a number of bytes or text such as "5GB" or "500MB".')


def parse_dtype(dtype: torch.dtype | str | None, where: str = "dtype") -> torch.dtype | None:
    """Return the floating dtype that is meant, None for the one that each tensor has.

    Raises:
        CheckpointError: It is none.
    """
    if dtype is None or dtype == "keep":
        return None
    found = _WORDS.get(dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
    if found not in _WORDS.values():
        raise CheckpointError(f"{where}: {dtype!r} is no dtype for weights. Write bf16, fp16, fp32 or keep.")
    return found


def written_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor of dtype ``own`` is written in; only wide floating types are converted."""
    return wanted if wanted is not None and own.is_floating_point and own.itemsize > 1 else own


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Return the values in ``dtype``, and whether some became infinite by it."""
    if tensor.dtype == dtype:
        return tensor, False
    result = tensor.to(dtype)
    return result, dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any())


def too_large(names: Iterable[str]) -> CheckpointError:
    """Return the error about values that fp16 cannot hold."""
    shown = ", ".join(sorted(set(names))[:5])
    return CheckpointError(f"dtype: {shown} has values above 65504, which fp16 turns into infinity. Pass bf16 or fp32.")
