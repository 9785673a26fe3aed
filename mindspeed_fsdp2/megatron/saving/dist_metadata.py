"""Reading the index of a torch_dist checkpoint where PyTorch's entries say more than Megatron expects of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

EXPECTED: Final = frozenset({"dtype", "layout", "requires_grad", "memory_format", "pin_memory"})
"""Properties that ``torch.empty`` takes; Megatron passes it all there are."""


def says_more() -> bool:
    """Return whether PyTorch keeps further properties of tensors, as 2.15 keeps strides."""
    return not {field.name for field in fields(TensorProperties)} <= EXPECTED


def wrap_tensors_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``load_tensors_metadata`` see only the properties it can use."""

    @functools.wraps(original)
    def load_tensors_metadata(strategy: Any, checkpoint_dir: Any, metadata: Any = None) -> Any:
        found = FileSystemReader(str(checkpoint_dir)).read_metadata() if metadata is None else copy.copy(metadata)
        found.state_dict_metadata = {key: _plain(entry) for key, entry in found.state_dict_metadata.items()}
        return original(strategy, checkpoint_dir, found)

    return load_tensors_metadata


def _plain(entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return entry
    entry, properties = copy.copy(entry), object.__new__(TensorProperties)  # copying goes through its pickled form
    vars(properties).update({name: value for name, value in vars(entry.properties).items() if name in EXPECTED})
    entry.properties = properties
    return entry
