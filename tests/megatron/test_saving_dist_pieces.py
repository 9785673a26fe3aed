"""What shards hold of Megatron's descriptions of whole parameters, and whether all ranks together hold everything."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_fsdp2.errors import CheckpointError

with warnings.catch_warnings():  # Megatron's imports warn about what is not installed
    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    from mindspeed_fsdp2.megatron.saving.dist_gaps import Box, find_gaps
    from mindspeed_fsdp2.megatron.saving.dist_metadata import wrap_tensors_metadata
    from mindspeed_fsdp2.megatron.saving.dist_pieces import Rows, pieces, rows_of, shard_factory

LAYER = (0, 1, 3)  # the second of three layers, in an axis before the parameter's own


def described(rows: int, tensor: int, rank: int, kind: str) -> ShardedTensor | ShardedTensorFactory:
    """Return Megatron's description of a parameter of ``rows`` rows, sharded over ``tensor`` ranks along an axis."""
    whole = torch.empty(rows, 4, device="meta")
    axis = 1 if kind == "row-parallel" else 0
    entry = ShardedTensor.from_rank_offsets("w", whole, LAYER, (1 + axis, rank, tensor), prepend_axis_num=1)
    return apply_swiglu_sharded_factory(entry, (LAYER,)) if kind == "swiglu" else entry


def leaves(built: Any) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        yield built
    else:
        for value in built.values() if isinstance(built, dict) else built:
            yield from leaves(value)


def put(into: torch.Tensor, tensor: ShardedTensor) -> None:
    """Write what one rank saves into the whole tensor."""
    assert tensor.data is not None and tensor.data.dtype == tensor.dtype
    place = into[tuple(slice(start, start + n) for start, n in zip(tensor.global_offset, _full(tensor), strict=True))]
    assert bool(place.isnan().all()), "written twice"
    place.copy_(tensor.data.view(place.shape))


def _full(tensor: ShardedTensor) -> tuple[int, ...]:
    return (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)


@pytest.mark.parametrize("kind", ["swiglu", "column-parallel", "row-parallel"])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("rows", [2, 6, 10, 14])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7])
def test_shards_write_what_a_whole_parameter_would(kind: str, tensor: int, rows: int, shards: int) -> None:
    size = (3, rows, 4 * tensor) if kind == "row-parallel" else (3, rows * tensor, 4)
    wanted, written = torch.full(size, torch.nan), torch.full(size, torch.nan)
    for rank in range(tensor):
        entry = described(rows, tensor, rank, kind)
        values = torch.arange(rows * 4.0).view(rows, 4) + 1000 * rank
        whole = entry.build_fn("w", values, 0, None) if isinstance(entry, ShardedTensorFactory) else entry
        for leaf in leaves(whole):
            leaf.data = values if leaf.data.is_meta else leaf.data
            put(wanted, leaf)
        start = 0
        for local in values.chunk(shards):  # as FSDP cuts; the last shards may be missing
            found = list(pieces(entry, values, Rows(start, len(local), 0), "w", local.clone()))
            assert all(piece.global_shape == size and piece.axis_fragmentations is None for piece, _ in found)
            for piece, view in found:
                put(written, piece)
                assert piece.data.data_ptr() == view.data_ptr()  # loading fills the shard in place
            start += len(local)
    assert torch.equal(wanted[1], written[1])
    assert bool(written[0].isnan().all() and written[2].isnan().all())


def test_a_rank_without_rows_gets_its_empty_tensor_back() -> None:
    entry = described(6, 1, 0, "swiglu")
    assert list(pieces(entry, torch.empty(6, 4), Rows(6, 0, 0), "w", torch.empty(0, 4))) == []


def test_whole_tensors_are_loaded_in_place_whatever_the_loader_returns() -> None:
    param = torch.zeros(6, 4)
    factory = shard_factory(described(6, 1, 0, "swiglu"), param, param.dtype)
    assert rows_of(param) == Rows(0, 6, 0)
    built = factory.build()
    target = built.pop("target").unwrap()
    loaded = {name: torch.full_like(piece.data, number) for number, (name, piece) in enumerate(built.items(), start=1)}
    back = factory.merge_fn({"target": target, **loaded})
    assert back.data_ptr() == param.data_ptr()
    assert param[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_wider_dtype_is_stored_and_narrowed_when_loaded() -> None:
    param = torch.ones(6, 4, dtype=torch.bfloat16)
    factory = shard_factory(described(6, 1, 0, "column-parallel"), param, torch.float32)
    built = factory.build()
    (piece,) = leaves({name: value for name, value in built.items() if name != "target"})
    assert piece.dtype == torch.float32
    piece.data.fill_(1.0009765625)  # bf16 has no such number
    back = factory.merge_fn({"target": built["target"].unwrap(), "piece0": piece.data})
    assert back is not param and back.dtype == torch.bfloat16
    assert float(param[0, 0]) == 1.0


@pytest.mark.parametrize("cut", [lambda t: t.t(), lambda t: t.t().contiguous(), lambda t: t.reshape(3, 8)])
def test_what_is_no_set_of_rows_is_refused(cut: Any) -> None:
    entry = ShardedTensorFactory(
        "w",
        torch.empty(6, 4, device="meta"),
        lambda key, data, replica, _range: {"t": ShardedTensor.from_rank_offsets(key, cut(data), replica_id=replica)},
        lambda loaded: loaded["t"],
    )
    with pytest.raises(CheckpointError) as caught:
        list(pieces(entry, torch.empty(6, 4), Rows(0, 3, 0), "w", torch.empty(3, 4)))
    assert str(caught.value) == (
        "w: its sharded_state_dict() describes a tensor that is no set of rows of the parameter. Write --ckpt-format "
        "torch_dcp."
    )


def box(name: str, offset: tuple[int, ...], shape: tuple[int, ...], size: tuple[int, ...] = (4, 4)) -> Box:
    return Box("w", name, size, offset, shape)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([box("a", (0, 0), (4, 4))], []),
        ([box("a", (0, 0), (1, 4)), box("a", (1, 0), (3, 2)), box("a", (1, 2), (3, 2))], []),
        ([box("a", (), (), ())], []),
        ([box("a", (0, 0), (3, 4))], ["12 elements of w would be written, 16 make it up (a)."]),
        (
            [box("a", (0, 0), (4, 4)), box("a", (0, 0), (4, 4))],
            ["several ranks would write the same elements of w (a)."],
        ),
        (
            [box("b", (0, 0), (3, 4)), box("a", (1, 0), (3, 4))],
            ["two different tensors would be saved as w: a and b. Rename one of them."],
        ),
        (
            [box("a", (0, 0), (4, 3)), box("b", (2, 2), (1, 2))],
            ["two different tensors would be saved as w: a and b. Rename one of them."],
        ),
        (
            [box("a", (0, 0), (4, 4)), box("b", (0, 0), (2, 4), (2, 4))],
            ["w has the shapes (2, 4), (4, 4), from a, b."],
        ),
    ],
)
def test_gaps(boxes: list[Box], expected: list[str]) -> None:
    assert find_gaps(boxes) == expected


def test_gaps_of_many_pieces() -> None:
    size = (32, 1024, 8)
    boxes = [Box("w", f"layers.{n}", size, (n, row, 0), (1, 1, 8)) for n in range(32) for row in range(1024)]
    assert find_gaps(boxes) == []
    assert find_gaps(boxes[:-1]) == [
        f"{32 * 1024 * 8 - 8} elements of w would be written, {32 * 1024 * 8} make it up "
        "(layers.0, layers.1, layers.10, layers.11, layers.12, layers.13, layers.14, "
        "layers.15 and 24 more)."
    ]


def test_the_index_may_say_more_of_tensors_than_megatron_takes() -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    properties.colour = "red"
    entry = TensorStorageMetadata(properties, torch.Size([3, 2]), [])
    metadata = Metadata({"a": entry, "b": BytesStorageMetadata()})

    def original(strategy: Any, folder: Any, metadata: Any = None) -> dict[str, Any]:
        tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        return {k: torch.empty(v.size, **vars(v.properties), device="meta") for k, v in tensors.items()}

    found = wrap_tensors_metadata(original)(None, "unread", metadata)
    assert found["a"].shape == (3, 2) and found["a"].dtype == torch.bfloat16 and list(found) == ["a"]
    assert metadata.state_dict_metadata["a"].properties.colour == "red"
