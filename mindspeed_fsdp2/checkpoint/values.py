"""Values beside the tensors as JSON: step counters, options, scheduler and user state.

Nothing is pickled, so reading a checkpoint runs no code that it brings along. What JSON lacks is written as an object
with one key that begins with ``$``.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

Json = Any  # dict, list, str, int, float, bool or None; typing cannot say it recursively for json's own functions


class Packer:
    """Turns values into JSON and collects the tensors among them.

    Attributes:
        tensors: path -> tensor with at least one dimension; scalars become part of the JSON.
    """

    def __init__(self, section: str) -> None:
        """Start empty; ``section`` begins every tensor's path and every message."""
        self.tensors: dict[tuple[str, ...], torch.Tensor] = {}
        self._section = section

    def pack(self, value: object, where: str = "") -> Json:
        """Return ``value`` as JSON.

        Args:
            value: None, bool, int, float, str, tensors, and lists, tuples, dicts and Counters of them.
            where: Place of ``value`` below the section, for messages and for the paths of tensors.

        Raises:
            CheckpointError: Something in it is of another type.
        """
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, where)
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, where)}
        if type(value) in (dict, OrderedDict):
            return self._pack_dict(value, where)  # type: ignore[arg-type]
        if type(value) in (list, tuple):
            items = [self.pack(item, _below(where, n)) for n, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
            return items if type(value) is list else {"$tuple": items}
        raise CheckpointError(
            f"{_below(self._section, where)}: a {type(value).__name__} cannot be saved without pickle. Turn it into "
            "numbers, strings, lists, dicts or tensors."
        )

    def _pack_tensor(self, tensor: torch.Tensor, where: str) -> Json:
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{_below(self._section, where)}: a sharded tensor is saved with the model or the optimizer only. "
                "Save its full_tensor()."
            )
        if tensor.dim() == 0 and not tensor.is_complex():
            return {"$scalar": [dtype_name(tensor.dtype), tensor.item(), tensor.device.type]}
        path = (self._section, where) if where else (self._section,)
        while path in self.tensors:  # {"a": {"b": …}, "a.b": …} and {1: …, "1": …} have the same places
            where += "~"
            path = (self._section, where)
        self.tensors[path] = tensor.detach()
        return {"$tensor": ".".join(path)}

    def _pack_dict(self, value: Mapping[object, object], where: str) -> Json:
        tagged = len(value) == 1 and str(next(iter(value))).startswith("$")
        if tagged or not all(type(key) is str for key in value):
            return {"$dict": self._pairs(value, where)}
        return {key: self.pack(item, _below(where, key)) for key, item in value.items()}

    def _pairs(self, value: Mapping[object, object], where: str) -> list[Json]:
        return [[self.pack(key, where), self.pack(item, _below(where, key))] for key, item in value.items()]


def unpack(value: Json, tensors: Mapping[str, torch.Tensor], device: Callable[[str], torch.device]) -> Any:
    """Return what was packed.

    Args:
        value: From :meth:`Packer.pack`.
        tensors: key -> the tensors that were read.
        device: Device type a scalar was saved from -> where to put it.

    Raises:
        CheckpointError: The JSON holds an object that :class:`Packer` does not write.
    """
    if isinstance(value, list):
        return [unpack(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: unpack(item, tensors, device) for key, item in value.items()}
    inner = value[tag]
    if tag == "$scalar":
        return torch.tensor(inner[1], dtype=dtype_of(inner[0]), device=device(inner[2]))
    if tag == "$tensor":
        return tensors[inner]
    items = unpack(inner, tensors, device)
    if tag == "$tuple":
        return tuple(items)
    if tag in ("$dict", "$counter"):
        pairs = {key: item for key, item in items}
        return pairs if tag == "$dict" else Counter(pairs)
    raise CheckpointError(
        f"checkpoint: {tag!r} is not a value this version knows. Load it with the version that saved."
    )


def tensor_keys(value: Json) -> list[str]:
    """Return the keys of all tensors that ``value`` refers to."""
    if isinstance(value, list):
        return [key for item in value for key in tensor_keys(item)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1 and "$tensor" in value:
        return [value["$tensor"]]
    return [key for item in value.values() for key in tensor_keys(item)]


def on_host(_device_type: str) -> torch.device:
    """Put every scalar into host memory: for :func:`unpack`."""
    return torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        CheckpointError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"checkpoint: this PyTorch has no dtype {name!r}. Load it with the version that saved.")
    return dtype


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a checksum of the values of a plain tensor, to compare it between ranks."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{zlib.crc32(memoryview(data.numpy())):08x}"


def digest(value: Json) -> str:
    """Return a short digest of ``value``, equal exactly when the JSON is."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _below(where: str, key: object) -> str:
    return f"{where}.{key}" if where and str(key) else where or str(key)
