"""What is inside of a checkpoint or of Hugging Face weights, in lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .folder import read_json
from .hf_shards import size_text
from .hf_source import HFWeights, Saved
from .hf_work import RECORD
from .values import dtype_name

Told = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def describe_saved(saved: Saved) -> list[str]:
    """Return lines about a checkpoint: what it is, then one line for each tensor of its model."""
    info = saved.info
    state = saved.document
    has = [name for name in ("optimizer", "scheduler", "extra") if state.get(name) is not None]
    return [
        f"{info.path}: a checkpoint of save_checkpoint",
        f"step: {info.step}",
        f"ranks: {info.ranks or 'none, it was imported'}",
        f"beside the model: {', '.join(has) or 'nothing'}",
        f"files: {len(info.files)}, {size_text(sum(info.files.values()))}",
        *(f"passed over: {note}" for note in saved.passed),
        *_tensor_lines(saved.tensors, saved.ties),
    ]


def describe_hf(weights: HFWeights) -> list[str]:
    """Return lines about Hugging Face weights: what they are, what is wrong, then one line for each tensor."""
    record: Any = read_json(weights.folder / RECORD)
    lines = [f"{weights.folder}: Hugging Face weights"]
    if isinstance(record, dict) and "step" in record:
        lines += [f"exported from: {record.get('source')}", f"step: {record['step']}"]
    lines.append(f"files: {len(weights.headers)}, {size_text(sum(h.size for h in weights.headers.values()))}")
    lines += [f"problem: {each}" for each in weights.problems]
    tensors = {key: (entry.dtype, entry.shape) for key, entry in weights.entries.items()}
    return lines + _tensor_lines(tensors, weights.ties)


def _tensor_lines(tensors: Told, ties: Mapping[str, str]) -> list[str]:
    sizes = {key: math.prod(shape) * dtype.itemsize for key, (dtype, shape) in tensors.items()}
    kinds: dict[str, int] = {}
    for dtype, shape in tensors.values():
        kinds[dtype_name(dtype)] = kinds.get(dtype_name(dtype), 0) + math.prod(shape)
    elements = ", ".join(f"{count:,} {name}" for name, count in sorted(kinds.items()))
    lines = [f"tensors: {len(tensors)}, {size_text(sum(sizes.values()))}; elements: {elements or 'none'}"]
    width = max((len(key) for key in tensors), default=0)
    lines += [
        f"  {key:{width}}  {dtype_name(dtype):8}  {list(shape)}  {size_text(sizes[key])}"
        for key, (dtype, shape) in tensors.items()
    ]
    return lines + [f"  {name:{width}}  is {key}" for name, key in ties.items()]
