"""Put a saved optimizer state into an optimizer, for the layout that its parameters have now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from ..errors import CheckpointError
from .optimizer_state import FOLLOWS, LOCAL, SECTION, STATE, described_tensors, names_of
from .pieces import Piece, copies_of, piece_of
from .values import unpack

# How an optimizer computes, not what it has learnt: the new optimizer's own choice stays.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class OptimizerTarget:
    """Where the saved state goes.

    Attributes:
        tensors: (fqn, name) -> new tensor, a DTensor or a plain one.
        pieces: This rank's pieces of them, to be read.
    """

    tensors: dict[tuple[str, str], torch.Tensor]
    pieces: list[Piece]


def compare_optimizer(
    optimizer: torch.optim.Optimizer, document: Mapping[str, Any], params: Mapping[str, nn.Parameter]
) -> tuple[list[str], list[str], list[str]]:
    """Return what does not fit: fqns without saved options, saved fqns it does not hold, and other problems.

    Raises:
        CheckpointError: The optimizer holds parameters of another model.
    """
    own = set(names_of(optimizer, params).values())
    saved = {fqn for group in document["groups"] for fqn in group["params"]}
    problems = []
    if type(optimizer).__name__ != document["class"]:
        problems.append(
            f"the optimizer is {type(optimizer).__name__}, the checkpoint has the state of {document['class']}"
        )
    names = names_of(optimizer, params)
    for number, group in enumerate(optimizer.param_groups):
        fqns = [names[id(param)] for param in group["params"]]
        if len({str(options) for options in _saved_options(document, fqns)}) > 1:
            problems.append(f"param group {number} joins parameters that had different options when they were saved")
    return sorted(own - saved), sorted(saved - own), problems


def compare_groups(optimizer: object, document: Mapping[str, Any] | None, params: Mapping[str, nn.Parameter]) -> str:
    """Return what is wrong if a scheduler, whose rates follow the positions of groups, went with other groups.

    Args:
        optimizer: The scheduler's.
        document: Its saved counterpart; None if there is none, and so nothing to compare.
        params: fqn -> parameter.
    """
    if document is None or not isinstance(optimizer, torch.optim.Optimizer):
        return ""
    names = {id(param): fqn for fqn, param in params.items()}
    own = [{names.get(id(param), "") for param in group["params"]} for group in optimizer.param_groups]
    saved = [set(group["params"]) for group in document["groups"]]
    if len(own) != len(saved):
        what = f"the optimizer has {len(own)} param groups, the checkpoint {len(saved)}"
    else:
        common = set().union(*own) & set().union(*saved)
        moved = [n for n, (mine, theirs) in enumerate(zip(own, saved)) if mine & common != theirs & common]
        if not moved:
            return ""
        what = f"param group {moved[0]} holds other parameters than in the checkpoint"
    return f"the scheduler's rates follow the positions of param groups, but {what}: the scheduler is not loaded"


def build_target(
    document: Mapping[str, Any], params: Mapping[str, nn.Parameter], fqns: Collection[str], index: Metadata, ranks: int
) -> OptimizerTarget:
    """Return new tensors for the state of the parameters ``fqns``, in the layout of ``params``.

    Raises:
        CheckpointError: A state tensor does not fit its parameter.
    """
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    pieces: list[Piece] = []
    for (fqn, name), kind in described_tensors(document).items():
        if fqn not in fqns:
            continue
        path = (SECTION, STATE, fqn, name)
        entry = index.state_dict_metadata.get(".".join(path))
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{'.'.join(path)}: the checkpoint lacks it. Load another checkpoint.")
        tensor, piece = _new(path, kind, params[fqn], entry.size, entry.properties.dtype, ranks)
        tensors[fqn, name] = tensor
        pieces.append(piece)
    return OptimizerTarget(tensors, pieces)


def install(
    optimizer: torch.optim.Optimizer,
    document: Mapping[str, Any],
    params: Mapping[str, nn.Parameter],
    fqns: Collection[str],
    target: OptimizerTarget,
    loose: Mapping[str, torch.Tensor],
) -> None:
    """Give ``optimizer`` the saved state and options of the parameters ``fqns`` (**in place**).

    Parameters without saved state have none afterwards: they start afresh, as they did before the save.

    Args:
        optimizer: See :func:`compare_optimizer`.
        document: Its saved counterpart.
        params: fqn -> parameter.
        fqns: What is loaded.
        target: Filled by reading.
        loose: key -> whole tensors among the options.
    """
    names = names_of(optimizer, params)
    for group in optimizer.param_groups:
        members = [names[id(param)] for param in group["params"]]
        found = _saved_options(document, [fqn for fqn in members if fqn in fqns])
        if found:
            _set_options(group, found[0], loose)
        for param in group["params"]:
            fqn = names[id(param)]
            if fqn not in fqns:
                continue
            optimizer.state.pop(param, None)
            if fqn not in document["state"]:
                continue
            optimizer.state[param] = {
                name: target.tensors[fqn, name]
                if (fqn, name) in target.tensors
                else unpack(value, loose, lambda kind: _place(name, kind, group, param))  # noqa: B023 - used at once
                for name, value in document["state"][fqn].items()
            }


def _saved_options(document: Mapping[str, Any], fqns: Collection[str]) -> list[dict[str, Any]]:
    """Return the options of the saved groups that hold any of ``fqns``, in saved order."""
    wanted = set(fqns)
    return [group["options"] for group in document["groups"] if not wanted.isdisjoint(group["params"])]


def _set_options(group: dict[str, Any], options: Mapping[str, Any], loose: Mapping[str, torch.Tensor]) -> None:
    device = group["params"][0].device
    for key, value in options.items():
        if key in _IMPLEMENTATION and key in group:
            continue
        new = unpack(value, loose, lambda kind: torch.device("cpu") if kind == "cpu" else device)
        current = group.get(key)
        if isinstance(current, torch.Tensor):  # compiled and captured code refers to this very tensor
            with torch.no_grad():
                current.copy_(torch.as_tensor(new))
        else:
            group[key] = new


def _place(name: str, kind: str, group: Mapping[str, Any], param: torch.Tensor) -> torch.device:
    """Return where a scalar of the state belongs: beside the parameter where the implementation reads it there."""
    if name == "step" and ("fused" in group or "capturable" in group):
        beside = bool(group.get("fused") or group.get("capturable"))
    else:
        beside = kind != "cpu"
    return param.device if beside else torch.device("cpu")


def _new(
    path: tuple[str, ...], kind: str, param: torch.Tensor, size: torch.Size, dtype: torch.dtype, ranks: int
) -> tuple[torch.Tensor, Piece]:
    if kind in (FOLLOWS, LOCAL) and size[:1] != param.shape[:1]:
        raise CheckpointError(
            f"{'.'.join(path)}: it has shape {tuple(size)}, its parameter {tuple(param.shape)}. Load another one."
        )
    if not isinstance(param, DTensor):
        tensor: torch.Tensor = torch.empty(size, dtype=dtype, device=param.device)
        return tensor, piece_of(path, tensor, 0, ranks)
    shard = param.to_local()
    if kind in (FOLLOWS, LOCAL):
        like = piece_of(path, param, 0, ranks)
        local = torch.empty((shard.shape[0], *size[1:]) if size else (), dtype=dtype, device=shard.device)
        start = torch.Size((*like.offset[:1], *([0] * (len(size) - 1))))
        piece = Piece(path, local, size, start, *copies_of(param))
        if kind == LOCAL:
            return local, piece
        return _distributed(local, param, param.placements, size), piece
    local = torch.empty(size, dtype=dtype, device=shard.device)
    piece = piece_of(path, local, 0, ranks)
    if kind == "whole":
        return local, piece
    return _distributed(local, param, [Replicate()] * param.device_mesh.ndim, size), piece


def _distributed(local: torch.Tensor, param: DTensor, placements: Any, size: torch.Size) -> DTensor:
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, param.device_mesh, placements, run_check=False, shape=size, stride=stride)
