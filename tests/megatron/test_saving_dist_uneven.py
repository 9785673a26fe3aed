"""Pieces of any size in Megatrons whose own code takes equal ones on a grid only (up to 0.14)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from mindspeed_fsdp2.errors import CheckpointError

with warnings.catch_warnings():  # Megatron's imports warn about what is not installed
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from mindspeed_fsdp2.megatron.saving.dist_uneven import (
        UnevenShard,
        uneven_shard,
        wrap_to_torch,
        wrap_validation,
    )

WHOLE = torch.arange(24.0).view(8, 3)


def piece(start: int, rows: int, data: torch.Tensor | None = None, replica: int = 0) -> UnevenShard:
    """Return ``rows`` rows from ``start`` on of the (8, 3) tensor."""
    entry = ShardedTensor.from_rank_offsets("w", torch.empty(8, 3), replica_id=replica)
    values = WHOLE[start : start + rows].clone() if data is None else data
    return uneven_shard(
        entry, {"data": values, "local_shape": (rows, 3), "global_offset": (start, 0), "axis_fragmentations": None}
    )


def not_asked(*_args: Any) -> Any:
    raise AssertionError("Megatron's own code was asked")


@pytest.mark.parametrize("parts", [[(0, 8)], [(0, 3), (3, 5)], [(5, 3), (0, 4), (4, 1)]])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
def test_written_and_read_in_other_parts(tmp_path: Path, parts: Sequence[tuple[int, int]]) -> None:
    convert = wrap_to_torch(not_asked)
    written = convert([piece(0, 5), piece(5, 2), piece(7, 1)])
    assert written.size() == WHOLE.size() and len(written) == 3
    dcp.save({"w": written}, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    read = convert([piece(start, rows, torch.full((rows, 3), torch.nan)) for start, rows in parts])
    dcp.load({"w": read}, checkpoint_id=tmp_path)
    for (start, rows), values in zip(parts, read, strict=True):
        assert torch.equal(values, WHOLE[start : start + rows])


def test_grids_stay_megatrons() -> None:
    entry = ShardedTensor.from_rank_offsets("w", WHOLE)
    assert wrap_to_torch(lambda pieces, rank: (pieces, rank))([entry], 3) == ([entry], 3)
    asked: list[Any] = []
    wrap_validation(asked.append)([(0, entry)])
    assert asked == [[(0, entry)]]


def test_pieces_stay_uneven_without_their_data() -> None:
    bare = replace(piece(5, 2), data=None)
    assert type(bare) is UnevenShard and (bare.global_offset, bare.local_shape) == ((5, 0), (2, 3))


def test_validation() -> None:
    check = wrap_validation(not_asked)
    check([(0, piece(0, 5)), (1, piece(5, 3)), (2, piece(5, 3, replica=1))])
    with pytest.raises(CheckpointError) as caught:
        check([(0, piece(0, 5)), (1, piece(5, 2))])
    assert str(caught.value) == "--ckpt-format torch_dist: 21 elements of w would be written, 24 make it up (w)."
    with pytest.raises(CheckpointError) as caught:
        check([(0, piece(0, 5)), (1, piece(4, 4))])
    assert str(caught.value) == "--ckpt-format torch_dist: several ranks would write the same elements of w (w)."
