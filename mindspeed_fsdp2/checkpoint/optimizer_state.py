"""The optimizer's part of a checkpoint: state and options by the names of parameters, never by their position.

Only what is there is read. Asking PyTorch for an optimizer's state dict before its first step makes a step, which
advances counters and applies weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from .pieces import Piece, copies_of, piece_of
from .values import Json, Packer

SECTION = "optimizer"
STATE = "state"

# How a state tensor lies over the ranks; "$state" in the JSON.
FOLLOWS = "follows"  # as its parameter: a DTensor if that is one, else whole
LOCAL = "local"  # a plain tensor in the shape of this rank's shard, as some fused optimizers keep it
WHOLE = "whole"  # the same plain tensor on every rank
COPIED = "copied"  # a DTensor that is whole on every rank

_REPLACED = "_mindspeed_fsdp2_replaced"


@dataclass(frozen=True)
class OptimizerState:
    """What is saved of an optimizer.

    Attributes:
        document: Class name, groups with their options and parameters, scalars, and where each tensor belongs.
        pieces: This rank's pieces of the state tensors.
        tensors: Whole tensors among the options.
    """

    document: dict[str, Json]
    pieces: list[Piece]
    tensors: dict[tuple[str, ...], torch.Tensor]


def optimizer_state(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], rank: int, ranks: int
) -> OptimizerState:
    """Return the state of ``optimizer`` without changing it.

    Args:
        optimizer: Any optimizer that keeps its state in ``state`` and ``param_groups``.
        params: fqn -> parameter of the wrapped model.
        rank: This rank among the data-parallel ranks.
        ranks: Their number.

    Raises:
        CheckpointError: It holds parameters of another model, or state of a kind that cannot be saved.
    """
    names = names_of(optimizer, params)
    packer = Packer(SECTION)
    groups: list[Json] = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "params": [names[id(param)] for param in group["params"]],
                "options": packer.pack(options, f"param_groups.{number}"),
            }
        )
    local = _local_names(optimizer, names)
    pieces: list[Piece] = []
    states: dict[str, dict[str, Json]] = {}
    for param, values in optimizer.state.items():
        fqn = names.get(id(param))
        if fqn is None:
            raise CheckpointError(
                f"optimizer: {type(optimizer).__name__} keeps state under {str(param)[:40]!r}, which is not one of its "
                "parameters. Save it yourself as extra."
            )
        described: dict[str, Json] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                kind, piece = _piece((SECTION, STATE, fqn, name), value, param, name in local, rank, ranks)
                described[name] = {"$state": kind}
                pieces.append(piece)
            else:
                plain = value.to_local() if isinstance(value, DTensor) and not _partial(value) else value
                described[name] = packer.pack(plain, f"{STATE}.{fqn}.{name}")
        states[fqn] = described
    document = {"class": type(optimizer).__name__, "groups": groups, "state": states}
    return OptimizerState(document, pieces, packer.tensors)


def names_of(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """Return id of parameter -> fqn for the parameters of ``optimizer``.

    Raises:
        CheckpointError: A parameter is not the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer. Pass the optimizer itself."
        )
    names = {id(param): fqn for fqn, param in params.items()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strange = [str(getattr(param, _REPLACED, tuple(param.shape))) for param in held if id(param) not in names]
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise CheckpointError(
            f"optimizer: {', '.join(strange[:3])}{more} is not a parameter of the model. Build the optimizer after "
            "wrap_model, from the parameters of this model."
        )
    return {id(param): names[id(param)] for param in held}


def _local_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> set[str]:
    """Return the names of plain state tensors that are shards; refuse those that are neither shards nor equal.

    One parameter alone can mislead: a counter of shape (1,) looks like the shard of a small bias. So a name is judged
    by all parameters together.
    """
    plain: dict[str, list[tuple[torch.Tensor, DTensor]]] = {}
    for param, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                if value.dim():
                    plain.setdefault(name, []).append((value, param))
    local = set()
    for name, found in plain.items():
        if all(value.shape == param.to_local().shape for value, param in found):
            local.add(name)
        elif len({value.shape for value, _ in found}) > 1:
            value, param = next((v, p) for v, p in found if v.shape != p.to_local().shape)
            raise CheckpointError(
                f"optimizer: {type(optimizer).__name__} keeps {name!r} of {names.get(id(param))!r} as a plain tensor "
                f"of shape {tuple(value.shape)}, which is not this rank's shard {tuple(param.to_local().shape)} of it. "
                "Use an optimizer whose state is made by torch.zeros_like(parameter)."
            )
    return local


def _piece(
    path: tuple[str, ...], value: torch.Tensor, param: torch.Tensor, local: bool, rank: int, ranks: int
) -> tuple[str, Piece]:
    if not isinstance(param, DTensor):
        if isinstance(value, DTensor):
            raise CheckpointError(f"{'.'.join(path)}: it is sharded, but its parameter is whole. This cannot be saved.")
        kind = WHOLE if value.shape != param.shape else LOCAL if local else FOLLOWS
        return kind, piece_of(path, value, rank, ranks)
    if not isinstance(value, DTensor):
        if not local:
            return WHOLE, piece_of(path, value, rank, ranks)
        of_param = piece_of(path, param, rank, ranks)
        return LOCAL, Piece(path, value.detach(), param.size(), of_param.offset, *copies_of(param))
    if not _partial(value) and all(placement.is_replicate() for placement in value.placements):
        return (COPIED if value.placements != param.placements else FOLLOWS), piece_of(path, value, rank, ranks)
    if value.placements != param.placements or value.shape[:1] != param.shape[:1]:
        raise CheckpointError(
            f"{'.'.join(path)}: it is laid out as {value.placements} with shape {tuple(value.shape)}, its parameter as "
            f"{param.placements} with shape {tuple(param.shape)}. Such state cannot be saved."
        )
    return FOLLOWS, piece_of(path, value, rank, ranks)


def _partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def described_tensors(document: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return (fqn, name) -> layout of the state tensors that ``document`` speaks of."""
    return {
        (fqn, name): value["$state"]
        for fqn, values in document["state"].items()
        for name, value in values.items()
        if isinstance(value, dict) and "$state" in value
    }
