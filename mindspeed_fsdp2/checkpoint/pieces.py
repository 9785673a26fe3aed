"""What a rank holds of the tensors in a checkpoint, and which rank writes what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor.

    Attributes:
        path: Names that joined by dots give the key, e.g. ``("model", "layers.0.weight")``.
        tensor: The part, a plain tensor on any device.
        size: Shape of the whole tensor.
        offset: Index of the part's first element in the whole tensor.
        copies: How many ranks hold the same part.
        copy: Which of them this rank is, from 0.
    """

    path: tuple[str, ...]
    tensor: torch.Tensor
    size: torch.Size
    offset: torch.Size
    copies: int
    copy: int

    @property
    def key(self) -> str:
        """Its name in the checkpoint."""
        return ".".join(self.path)


def piece_of(path: tuple[str, ...], tensor: torch.Tensor, rank: int, ranks: int) -> Piece:
    """Return this rank's piece of ``tensor``.

    Args:
        path: See :class:`Piece`.
        tensor: A DTensor, or a plain tensor that is whole on every rank.
        rank: This rank among the data-parallel ranks.
        ranks: Their number.

    Raises:
        CheckpointError: A DTensor whose values are a pending sum.
    """
    if not isinstance(tensor, DTensor):
        start = torch.Size([0] * tensor.dim())
        return Piece(path, tensor.detach(), tensor.size(), start, ranks, rank)
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{'.'.join(path)}: its values are a pending sum over ranks. Save it reduced.")
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    copies, copy = copies_of(tensor)
    return Piece(path, tensor.to_local().detach(), tensor.size(), torch.Size(chunk.offsets), copies, copy)


def copies_of(tensor: DTensor) -> tuple[int, int]:
    """Return how many ranks hold this rank's part of ``tensor``, and which of them this one is."""
    copies, copy = 1, 0
    coordinate = tensor.device_mesh.get_coordinate()
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() and coordinate is not None:
            size = tensor.device_mesh.size(axis)
            copies, copy = copies * size, copy * size + coordinate[axis]
    return copies, copy


def own_share(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces that this rank writes: of equal copies exactly one is written, each rank the same amount.

    Every rank passes pieces of the same tensors in the same order, so all come to the same division.
    """
    loads: dict[int, list[int]] = {}
    mine: list[Piece] = []
    for piece in pieces:
        load = loads.setdefault(piece.copies, [0] * piece.copies)
        writer = load.index(min(load))
        load[writer] += max(1, piece.size.numel() * piece.tensor.element_size())
        if writer == piece.copy and (piece.tensor.numel() or not piece.size.numel()):
            mine.append(piece)
    return mine


def staged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with copies of their values in host memory, which training does not touch."""
    return [replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces]


def check_names(pieces: Iterable[Piece]) -> None:
    """Raise if two different tensors would be saved under one name.

    Raises:
        CheckpointError: Names every such key.
    """
    seen: dict[str, tuple[str, ...]] = {}
    twice = {p.key for p in pieces if seen.setdefault(p.key, p.path) is not p.path}
    if twice:
        raise CheckpointError(
            f"checkpoint: two tensors would be saved under one name: {', '.join(sorted(twice)[:5])}. Rename a module "
            "or an optimizer state."
        )
