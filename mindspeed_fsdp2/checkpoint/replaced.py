"""Whether a checkpoint that a save would replace is one of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import CheckpointError
from .folder import CheckpointInfo, published, read_state
from .index import read_index
from .model_state import SECTION
from .values import tensor_keys


def check_replaced(directory: Path, step: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if the checkpoint of ``step`` in ``directory`` is another model's.

    Args:
        directory: Where a save goes.
        step: Its step.
        shapes: Key -> shape of the tensors of the model that is saved.

    Raises:
        CheckpointError: It holds other keys or shapes. Names one of them.
    """
    # What is no directory is told by the write of it.
    for info in published(directory) if directory.is_dir() else ():
        if info.step != step or (saved := _shapes_in(info)) is None or saved == dict(shapes):
            continue
        key = min(key for key in saved.keys() | shapes.keys() if saved.get(key) != shapes.get(key))
        here, there = (f"{each[key]}" if key in each else "absent" for each in (shapes, saved))
        raise CheckpointError(
            f"{info.path}: it holds another model, and this save of step {step} would replace it: {key} is {here} here "
            f"and {there} there. Use another directory for each model, or remove this checkpoint first."
        )


def _shapes_in(info: CheckpointInfo) -> dict[str, tuple[int, ...]] | None:
    """Return key -> shape of the model in a checkpoint, None if it is damaged."""
    try:
        inside_extra = set(tensor_keys(read_state(info)["model_extra"]))
        index = read_index(info.path, set(info.files))
    except (CheckpointError, KeyError):
        return None
    start = f"{SECTION}."
    return {
        key.removeprefix(start): tuple(entry.size)
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(start) and key not in inside_extra and isinstance(entry, TensorStorageMetadata)
    }
