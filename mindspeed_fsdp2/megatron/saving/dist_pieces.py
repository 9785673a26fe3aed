"""torch_dist: the pieces of Megatron's description of a whole parameter that this rank's shard holds.

Megatron's modules describe their parameters as plain data parallelism holds them: whole over the data-parallel ranks,
with the offsets of tensor parallelism, of layers and of experts. A shard holds some rows of that. Each described tensor
is therefore cut to these rows, with its offset moved: layouts, uneven and empty shards included, then differ in nothing
but the cuts, and every reader of the format, plain DDP included, finds the tensors it expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.tensor import DTensor

from ...checkpoint.pieces import piece_of
from ...errors import CheckpointError
from .dist_uneven import UNEVEN, uneven_shard

_TARGET = "target"
_PIECE = "piece"


@dataclass
class ShardFactory(ShardedTensorFactory):  # type: ignore[misc]
    """Megatron's factory for this rank's part of a parameter or buffer, or of optimizer state that lies as it does.

    ``data`` is the local tensor. Megatron makes the optimizer's entries from the parameter's by replacing ``key`` and
    ``data``.

    Attributes:
        param: The parameter or buffer: a DTensor, or a tensor that is whole on every rank.
    """

    param: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)


@dataclass(frozen=True)
class _Target:
    """Where loaded pieces go: the local tensor, as a DTensor, and the part of it that each piece fills."""

    tensor: torch.Tensor
    views: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of a whole tensor, along its first dimension, that this rank's shard holds."""

    start: int
    count: int
    copy: int  # which of the ranks that hold the same rows this one is, from 0


def rows_of(param: torch.Tensor) -> Rows:
    """Return the rows that this rank holds of ``param``.

    Raises:
        CheckpointError: It is sharded along another dimension than the first.
    """
    if not isinstance(param, DTensor):
        return Rows(0, param.shape[0] if param.dim() else 1, 0)
    if any(placement.is_shard() and not placement.is_shard(0) for placement in param.placements):
        raise CheckpointError(
            f"a parameter of shape {tuple(param.shape)} is laid out as {param.placements}. --ckpt-format torch_dist "
            "takes parameters sharded along dimension 0; write --ckpt-format torch_dcp."
        )
    piece = piece_of((), param, 0, 1)
    return Rows(piece.offset[0], piece.tensor.shape[0], piece.copy)


def shard_factory(entry: ShardedTensor | ShardedTensorFactory, param: torch.Tensor, dtype: torch.dtype) -> ShardFactory:
    """Return the description of this rank's part of a tensor.

    Args:
        entry: Megatron's description of the whole tensor, which lies on the meta device if it is a sharded one.
        param: The tensor. Loading writes into its local values.
        dtype: What it is stored as, at least.

    Raises:
        CheckpointError: See :func:`rows_of` and :func:`pieces`.
    """
    rows = rows_of(param)
    replica = entry.replica_id
    if isinstance(param, DTensor):
        # Megatron counts data-parallel ranks as holders of the same values; here only those are that hold these rows.
        replica = (*replica[:-1], rows.copy) if isinstance(replica, tuple) else rows.copy

    def build(key: str, local: torch.Tensor, replica_id: Any, _range: Any) -> dict[str, Any]:
        views: dict[str, torch.Tensor] = {}
        built: dict[str, Any] = {}
        for number, (piece, view) in enumerate(pieces(entry, param, rows, key, local)):
            wide = torch.promote_types(piece.dtype, dtype)
            data = piece.data.to(wide)
            built[f"{_PIECE}{number}"] = replace(piece, data=data, dtype=wide, replica_id=replica_id)
            views[f"{_PIECE}{number}"] = view
        # A rank without rows has no piece, and still gets its (empty) tensor back.
        return {_TARGET: LocalNonpersistentObject(_Target(_like(param, local), views)), **built}

    local = (param.to_local() if isinstance(param, DTensor) else param).detach()
    return ShardFactory(entry.key, local, build, _merge, replica, param=param)


def _merge(loaded: dict[str, Any]) -> torch.Tensor:
    target: _Target = loaded[_TARGET]
    for name, view in target.views.items():
        piece = loaded.get(name)  # None where --dist-ckpt-strictness lets a key be missing: the values stay
        if piece is not None and piece.data_ptr() != view.data_ptr():
            view.copy_(piece.view_as(view))
    return target.tensor


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def pieces(
    entry: ShardedTensor | ShardedTensorFactory, param: torch.Tensor, rows: Rows, key: str, data: torch.Tensor
) -> Iterator[tuple[ShardedTensor, torch.Tensor]]:
    """Yield what this rank holds of each tensor that ``entry`` describes, and the part of ``data`` it fills.

    Args:
        entry: Megatron's description of the whole parameter.
        param: The parameter, for its shape.
        rows: The rows of it that ``data`` holds.
        key: Name in the checkpoint.
        data: The local tensor of the parameter or of a state of it.

    Raises:
        CheckpointError: ``entry`` describes something else than rows of the parameter.
    """
    whole = torch.empty(param.shape, dtype=data.dtype, device="meta")
    for described in _described(entry, key, whole):
        view = described.data
        if view.numel() == 0:
            continue
        if whole.dim() == 0:
            yield _moved(described, data, 0), data
            continue
        width = whole.numel() // whole.shape[0]
        first, column = divmod(view.storage_offset(), width)
        if not _holds_rows(view, whole, width, column):
            raise CheckpointError(
                f"{key}: its sharded_state_dict() describes a tensor that is no set of rows of the parameter. Write "
                "--ckpt-format torch_dcp."
            )
        low = max(first, rows.start)
        high = min(first + view.shape[0], rows.start + rows.count)
        if low >= high:
            continue
        mine = data.as_strided(
            (high - low, *view.shape[1:]),
            (width, *view.stride()[1:]),
            data.storage_offset() + (low - rows.start) * width + column,
        )
        yield _moved(described, mine.contiguous(), low - first), mine


def _described(entry: ShardedTensor | ShardedTensorFactory, key: str, whole: torch.Tensor) -> list[ShardedTensor]:
    if isinstance(entry, ShardedTensor):
        return [replace(entry, key=key, data=whole, dtype=whole.dtype)]
    found: list[ShardedTensor] = []
    stack: list[Any] = [entry.build_fn(key, whole, entry.replica_id, None)]
    while stack:
        value = stack.pop()
        if isinstance(value, ShardedTensor):
            found.append(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, Sequence):
            stack += value
        else:
            raise CheckpointError(f"{key}: its sharded_state_dict() builds a {type(value).__name__}, not tensors.")
    return found[::-1]


def _holds_rows(view: torch.Tensor, whole: torch.Tensor, width: int, column: int) -> bool:
    """Return whether each row of ``view`` lies in one row of ``whole``, and rows follow each other as there."""
    if view.untyped_storage() is not whole.untyped_storage() or view.dim() == 0:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(view.shape[1:], view.stride()[1:]))
    return (view.shape[0] == 1 or view.stride(0) == width) and column + reach < width


def _moved(described: ShardedTensor, data: torch.Tensor, rows: int) -> ShardedTensor:
    """Return the description of some of its rows, of which ``rows`` come before."""
    axes = described.prepend_axis_num
    offset = list(described.global_offset)
    if rows:
        offset[axes] += rows
    shape = (1,) * axes + tuple(data.shape)
    # Without fragmentations the format takes pieces of any size, not only a regular grid of equal ones; prepended axes
    # (layers, experts) must then be in the data.
    changes = {
        "data": data.view(shape),
        "local_shape": shape,
        "global_offset": tuple(offset),
        "axis_fragmentations": None,
        "prepend_axis_num": 0,
    }
    return replace(described, **changes) if UNEVEN else uneven_shard(described, changes)
