"""torch_dist: what a model must offer to be saved, checked before training rather than at the first save."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import nn

from ...agreement import agree
from ...errors import CheckpointError
from .dist_model import METHOD, shard_state_dicts
from .dist_pieces import ShardFactory

_EXTRA_STATE = "_extra_state"
_SHOWN = 8
_WAY_OUT = "Write --ckpt-format torch_dcp."


class Box(NamedTuple):
    """One piece of a tensor in the checkpoint, as one rank would write it.

    Attributes:
        key: Name of the tensor in the checkpoint; layers may share one.
        name: Name in the model's state dict.
        size: Shape of the whole tensor.
        offset: Index of the piece's first element.
        shape: Shape of the piece, without prepended axes of size 1.
    """

    key: str
    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def prepare_torch_dist(model: nn.Module, args: Namespace) -> None:
    """Let Megatron save and load ``model`` in torch_dist, or say why it cannot (**in place**, **collective**).

    Nothing happens in a run that neither saves nor loads in this format.

    Args:
        model: The innermost model, sharded.
        args: Megatron's arguments.

    Raises:
        CheckpointError: On every rank alike: the model has no ``sharded_state_dict``, it does not describe what
            ``state_dict`` holds, or the pieces of all ranks do not make up whole tensors.
    """
    paths = (args.save, args.load, getattr(args, "pretrained_checkpoint", None))
    if args.ckpt_format != "torch_dist" or all(path is None for path in paths):
        return
    if not hasattr(ShardedTensor, "has_regular_grid"):
        raise CheckpointError(
            f"--ckpt-format torch_dist: this Megatron writes shards of one size only. Use 0.15 or newer. {_WAY_OUT}"
        )
    what = f"{type(model).__name__.removeprefix('FSDP')}.{METHOD}()"
    mine = agree(lambda: _boxes_of(model, what), lambda _: "", None, what)
    rank = dist.get_rank()
    every: list[list[Box]] = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(mine, every if rank == 0 else None, dst=0)
    found = [
        agree(
            lambda: find_gaps([box for boxes in every for box in boxes]) if rank == 0 else [], lambda _: "", None, what
        )
    ]
    dist.broadcast_object_list(found, src=0)
    if found[0]:
        raise CheckpointError("\n".join(f"{what}: {text} {_WAY_OUT}" for text in found[0][:_SHOWN]))


def _boxes_of(model: nn.Module, what: str) -> list[Box]:
    if not callable(getattr(model, METHOD, None)):
        raise CheckpointError(
            f"{what} does not exist, and --ckpt-format torch_dist saves what it returns. Derive the model from "
            f"MegatronModule, or write --ckpt-format torch_dcp."
        )
    shard_state_dicts(model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = getattr(model, METHOD)(metadata={"dp_cp_group": group, "singleton_local_shards": False})
    _check_contents(model, state, what)
    return list(_boxes(state))


def _check_contents(model: nn.Module, state: Mapping[str, Any], what: str) -> None:
    expected = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    described = {name: value for name, value in named_entries(state) if not name.endswith(_EXTRA_STATE)}
    problems = []
    if missing := [name for name in expected if name not in described]:
        problems.append(f"it leaves out {_listed(missing)}, which state_dict() has.")
    if strange := [name for name in described if name not in expected]:
        problems.append(f"it returns {_listed(strange)}, which state_dict() has not.")
    other = [
        name
        for name, entry in described.items()
        if isinstance(expected.get(name), nn.Parameter) and getattr(entry, "param", None) is not expected[name]
    ]
    if other:
        problems.append(f"what it returns for {_listed(other)} is not that parameter itself (keep_vars=True).")
    if problems:
        raise CheckpointError("\n".join(f"{what}: {text}" for text in problems))


def named_entries(state: Any, prefix: str = "") -> Iterable[tuple[str, ShardedTensor | ShardedTensorFactory]]:
    """Yield every description of a tensor in a sharded state dict with its dotted name."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from named_entries(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list):
        for number, value in enumerate(state):
            yield from named_entries(value, f"{prefix}.{number}")
    elif isinstance(state, (ShardedTensor, ShardedTensorFactory)):
        yield prefix, state


def pieces_of(state: Any) -> Iterable[ShardedTensor]:
    """Yield each piece that this rank holds of the tensors in a sharded state dict."""
    for _, entry in named_entries(state):
        if isinstance(entry, ShardFactory):
            yield from (piece for piece in entry.build().values() if isinstance(piece, ShardedTensor))
        elif isinstance(entry, ShardedTensorFactory):
            yield from pieces_of(entry.build())
        else:
            yield entry


def _boxes(state: Mapping[str, Any]) -> Iterable[Box]:
    """Yield what this rank would write."""
    for name, entry in named_entries(state):
        for piece in pieces_of([entry]):
            if is_main_replica(piece.replica_id):
                size, offset = tuple(piece.global_shape), tuple(piece.global_offset)
                yield Box(piece.key, name, size, offset, tuple(piece.local_shape))


def find_gaps(boxes: Sequence[Box]) -> list[str]:
    """Return what is wrong with the pieces that all ranks together would write, one text for each key."""
    by_key: dict[str, list[Box]] = {}
    for box in boxes:
        by_key.setdefault(box.key, []).append(box)
    return [text for key, group in by_key.items() if (text := _gap(key, group))]


def _gap(key: str, boxes: list[Box]) -> str | None:
    names = sorted({box.name for box in boxes})
    sizes = sorted({box.size for box in boxes})
    if len(sizes) > 1:
        return f"{key} has the shapes {', '.join(map(str, sizes))}, from {_listed(names)}."
    if pair := _overlapping([(tuple(zip(box.offset, box.shape)), box.name) for box in boxes]):
        first, second = sorted(pair)
        if first != second:
            return f"two different tensors would be saved as {key}: {first} and {second}. Rename one of them."
        return f"several ranks would write the same elements of {key} ({first})."
    written = sum(math.prod(box.shape) for box in boxes)
    if written != math.prod(sizes[0]):
        return f"{written} elements of {key} would be written, {math.prod(sizes[0])} make it up ({_listed(names)})."
    return None


_Span = tuple[tuple[tuple[int, int], ...], str]  # (offset, length) along each axis, and the name


def _overlapping(spans: Sequence[_Span], axis: int = 0) -> tuple[str, str] | None:
    """Return the names of two ``spans`` that share elements, given that all of them do along the axes before."""
    if len(spans) < 2:
        return None
    if axis == len(spans[0][0]):
        return spans[0][1], spans[1][1]
    for cluster in _clusters(spans, axis):
        if len({span[0][axis] for span in cluster}) == 1:
            pair = _overlapping(cluster, axis + 1)  # pieces on a grid, so never all pairs of all pieces
        else:
            pair = next(
                (
                    (one[1], other[1])
                    for one, other in itertools.combinations(cluster, 2)
                    if all(a < b + m and b < a + n for (a, n), (b, m) in zip(one[0], other[0]))
                ),
                None,
            )
        if pair:
            return pair
    return None


def _clusters(spans: Sequence[_Span], axis: int) -> Iterable[list[_Span]]:
    """Yield groups of ``spans`` whose intervals along ``axis`` do not reach into another group's."""
    cluster: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda span: span[0][axis]):
        start, length = span[0][axis]
        if cluster and start >= end:
            yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, start + length)
    yield cluster


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
