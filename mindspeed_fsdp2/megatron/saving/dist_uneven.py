"""torch_dist up to Megatron 0.14: shards of any size, where its own code takes equal ones on a regular grid only.

The format itself has no such limit: PyTorch's index lists every piece with its offset and size. Newer Megatrons hand
their pieces to PyTorch one by one; here the same is done for ours, and checkpoints are the same for every reader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ...errors import CheckpointError
from .dist_gaps import Box, find_gaps

UNEVEN: Final = hasattr(ShardedTensor, "has_regular_grid")
"""Whether Megatron itself writes pieces of any size."""


class UnevenShard(ShardedTensor):  # type: ignore[misc]
    """A piece that need not lie on a grid of equal ones."""

    def validate_metadata_integrity(self) -> None:
        """Nothing: Megatron's check asks for an offset that is a multiple of the size."""


def uneven_shard(described: ShardedTensor, changes: dict[str, Any]) -> UnevenShard:
    """Return ``described`` with some fields changed, as a piece of any size."""
    return UnevenShard(**{field.name: getattr(described, field.name) for field in fields(described)} | changes)


class _Pieces(torch.Tensor):
    """What this rank holds of one tensor, as PyTorch's planners ask for it.

    To them it is a tensor of the whole size; to Megatron, which unpacks it after a load, a sequence of the pieces.
    """

    pieces: Sequence[ShardedTensor]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([piece.data for piece in self.pieces])

    def __create_write_items__(self, fqn: str, _itself: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(piece.data), size=self.size()
                ),
            )
            for number, (piece, chunk) in enumerate(zip(self.pieces, self.__create_chunk_list__()))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(piece.local_shape))
            for piece in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = next(
            piece.data for piece in self.pieces if torch.Size(piece.global_offset) == index.offset
        )
        return found


def wrap_to_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``sharded_tensor_to_torch_sharded_tensor`` that takes pieces of any size."""

    @functools.wraps(original)
    def sharded_tensor_to_torch_sharded_tensor(sh_tens: list[ShardedTensor], *rest: Any, **named: Any) -> Any:
        if not any(isinstance(piece, UnevenShard) for piece in sh_tens):
            return original(sh_tens, *rest, **named)
        # Of the whole tensor's size without its memory; not on the meta device, which PyTorch replaces when it loads.
        whole = torch.empty((), dtype=sh_tens[0].dtype).expand(sh_tens[0].global_shape).as_subclass(_Pieces)
        whole.pieces = sh_tens
        return whole

    return sharded_tensor_to_torch_sharded_tensor


def wrap_validation(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``_validate_sharding_for_key`` that checks pieces of any size: together they make up the tensor.

    Raises:
        CheckpointError: They do not.
    """

    @functools.wraps(original)
    def _validate_sharding_for_key(rank_sharding: list[tuple[int, ShardedTensor]]) -> None:
        if not any(isinstance(piece, UnevenShard) for _, piece in rank_sharding):
            original(rank_sharding)
            return
        boxes = [
            Box(piece.key, piece.key, tuple(piece.global_shape), tuple(piece.global_offset), tuple(piece.local_shape))
            for _, piece in rank_sharding
            if is_main_replica(piece.replica_id)
        ]
        if gaps := find_gaps(boxes):
            raise CheckpointError("\n".join(f"--ckpt-format torch_dist: {text}" for text in gaps))

    return _validate_sharding_for_key
