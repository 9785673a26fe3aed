"""Write and read pieces with the planners and file formats of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import CheckpointError
from .pieces import Piece
from .progress import Progress


@dataclasses.dataclass(frozen=True)
class Written:
    """What one rank has written; the first rank makes the index of it."""

    plan: SavePlan
    results: Sequence[WriteResult]


class _Writer(FileSystemWriter):
    """Leaves syncing to :func:`sync_files`, and this machine's path out of the index."""

    def __init__(self, folder: Path) -> None:
        # Below torch 2.14 the writer syncs before Python's own buffer has been flushed, so the end of a file may stay
        # unwritten.
        super().__init__(folder, sync_files=False)

    def storage_meta(self) -> StorageMeta | None:
        return None


class _SavePlanner(DefaultSavePlanner):
    """Hands out the pieces' tensors."""

    def __init__(self, pieces: Iterable[Piece], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = {MetadataIndex(piece.key, piece.offset): piece.tensor for piece in pieces}
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        tensor = self._tensors[write_item.index]
        self._progress.add(tensor.nbytes)
        return tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Lets tensors be read into the pieces, and nothing else be read."""

    def __init__(self, pieces: Iterable[Piece], progress: Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = {MetadataIndex(piece.key, piece.offset): piece.tensor for piece in pieces}
        self._progress = progress

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"checkpoint: {read_item.dest_index.fqn!r} is a pickled object, which is never loaded.")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._tensors[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            tensor = tensor.narrow(dim, start, length)
        self._progress.add(tensor.nbytes)
        return tensor


def write_pieces(pieces: Sequence[Piece], folder: Path, rank: int, ranks: int, progress: Progress) -> Written:
    """Write this rank's pieces into one file of ``folder`` and sync it.

    Args:
        pieces: What this rank writes.
        folder: An existing folder.
        rank: This rank among the data-parallel ranks; it becomes part of the file's name.
        ranks: Their number.
        progress: Told of every tensor.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: The same, noticed by PyTorch's own archive writer.
    """
    writer = _Writer(folder)
    planner = _SavePlanner(pieces, progress)
    writer.set_up_storage_writer(rank == 0)
    items = [_write_item(piece) for piece in pieces]
    plan = SavePlan(items, planner_data={piece.key: piece.path for piece in pieces})
    # What belongs to which rank is settled already; the storage only numbers the plans, and with them the files.
    plan = writer.prepare_global_plan([plan if other == rank else SavePlan([]) for other in range(ranks)])[rank]
    results: list[WriteResult] = []
    if items:
        future = writer.write_data(plan, planner)
        future.wait()
        results = future.value()
        sync_files(folder / name for name in {result.storage_data.relative_path for result in results})
    return Written(plan, results)


def write_index(written: Sequence[Written], aliases: Mapping[tuple[str, ...], tuple[str, ...]], folder: Path) -> None:
    """Write the index of all ranks' pieces (on the first rank).

    Args:
        written: By rank.
        aliases: Path of a second name -> path of the first name; both then lead to the same bytes.
        folder: Where the pieces lie.

    Raises:
        CheckpointError: The pieces of a tensor overlap or leave a gap.
        OSError: It cannot be written.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _, index = planner.create_global_plan([each.plan for each in written])
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"checkpoint: the ranks' shards do not make up whole tensors: {error}") from error
    paths = {key: path for each in written for key, path in each.plan.planner_data.items()}
    seconds: dict[str, list[str]] = {}
    for second, first in aliases.items():
        paths[".".join(second)] = second
        seconds.setdefault(".".join(first), []).append(".".join(second))
        index.state_dict_metadata[".".join(second)] = index.state_dict_metadata[".".join(first)]
    results = [
        [*each.results, *(_renamed(one, key) for one in each.results for key in seconds.get(one.index.fqn, ()))]
        for each in written
    ]
    index.planner_data = paths  # lets PyTorch's own converters rebuild the nested dictionary
    _Writer(folder).finish(index, results)


def read_pieces(pieces: Sequence[Piece], folder: Path, index: Metadata, progress: Progress) -> None:
    """Fill the tensors of ``pieces`` from the checkpoint in ``folder`` (**in place**).

    Args:
        pieces: Their keys are in the index with the same sizes; values are converted to the tensors' dtypes.
        folder: One checkpoint.
        index: Its index.
        progress: Told of every tensor.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    items: list[ReadItem] = []
    for piece in pieces:
        entry = index.state_dict_metadata[piece.key]
        if not isinstance(entry, TensorStorageMetadata) or not piece.tensor.numel():
            continue
        found = create_read_items_for_chunk_list(
            piece.key, entry, [ChunkStorageMetadata(piece.offset, piece.tensor.size())]
        )
        if sum(torch.Size(item.lengths).numel() for item in found) != piece.tensor.numel():
            raise CheckpointError(f"{folder}: it does not hold all values of {piece.key!r}. Load another checkpoint.")
        items += found
    places = index.storage_data
    items.sort(key=lambda item: (places[item.storage_index].relative_path, places[item.storage_index].offset))
    reader = FileSystemReader(folder)
    try:
        reader.set_up_storage_reader(index, is_coordinator=False)
        with torch.no_grad():
            reader.read_data(LoadPlan(items), _LoadPlanner(pieces, progress)).wait()
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # torch.load(weights_only=True) met something else than a tensor
        raise CheckpointError(
            f"{folder}: a file holds a pickled object, which is never loaded. Load another."
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(
            f"{folder}: its files cannot be read: {type(error).__name__}: {error}. Load another checkpoint."
        ) from error


def sync_files(paths: Iterable[Path]) -> None:
    """Wait until the contents of the files are on the disk."""
    for path in paths:
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())


def _renamed(result: WriteResult, key: str) -> WriteResult:
    return dataclasses.replace(result, index=MetadataIndex(key, result.index.offset))


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, piece.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=piece.offset, sizes=piece.tensor.size()),
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=piece.size,
        ),
    )
