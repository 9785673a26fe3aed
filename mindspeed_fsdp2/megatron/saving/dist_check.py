"""torch_dist: what a model must offer to be saved, checked before training rather than at the first save."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import nn

from ...agreement import agree
from ...errors import CheckpointError
from .dist_gaps import SHOWN, Box, find_gaps, listed
from .dist_model import METHOD, shard_state_dicts
from .dist_pieces import ShardFactory

_EXTRA_STATE = "_extra_state"
_WAY_OUT = "Write --ckpt-format torch_dcp."


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
        raise CheckpointError("\n".join(f"{what}: {text} {_WAY_OUT}" for text in found[0][:SHOWN]))


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
        problems.append(f"it leaves out {listed(missing)}, which state_dict() has.")
    if strange := [name for name in described if name not in expected]:
        problems.append(f"it returns {listed(strange)}, which state_dict() has not.")
    other = [
        name
        for name, entry in described.items()
        if isinstance(expected.get(name), nn.Parameter) and getattr(entry, "param", None) is not expected[name]
    ]
    if other:
        problems.append(f"what it returns for {listed(other)} is not that parameter itself (keep_vars=True).")
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
