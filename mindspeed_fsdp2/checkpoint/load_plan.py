"""Decide what of a checkpoint is read and where to, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..apply import Sharded
from ..errors import CheckpointError
from .compare import Comparison, check_fits, compare_model
from .coordination import Coordination
from .folder import MANIFEST, CheckpointInfo, read_state
from .index import read_index
from .model_state import SECTION, ModelState, model_state, parameter_names, trained_by
from .optimizer_load import OptimizerTarget, build_target, compare_groups, compare_optimizer
from .pieces import Piece, piece_of
from .rank_state import rank_path
from .snapshot import buffer_path
from .values import tensor_keys


@dataclass
class LoadPlan:
    """What will be read, and where to; made before anything is changed."""

    info: CheckpointInfo
    document: dict[str, Any]
    index: Metadata
    model: ModelState
    comparison: Comparison
    own_buffers: dict[str, torch.Tensor]
    loose: dict[str, torch.Tensor]
    rank_state: torch.Tensor | None
    fqns: set[str] | None = None
    target: OptimizerTarget | None = None
    scheduler: bool = False

    def pieces(self, rank: int, ranks: int) -> list[Piece]:
        """Return this rank's pieces of everything."""
        keys = sorted(self.comparison.fitting - self.own_buffers.keys())
        named: dict[tuple[str, ...], torch.Tensor] = {}
        named.update(((SECTION, key), self.model.tensors[key]) for key in keys)
        named.update((buffer_path(rank, key), tensor) for key, tensor in self.own_buffers.items())
        named.update(((key,), tensor) for key, tensor in self.loose.items())
        if self.rank_state is not None:
            named[rank_path(rank)] = self.rank_state
        pieces = [piece_of(path, tensor, rank, ranks) for path, tensor in named.items()]
        return pieces + (self.target.pieces if self.target else [])


def plan_load(
    handle: Sharded,
    info: CheckpointInfo,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    ranks: Coordination,
    partial: bool,
    cast: bool,
) -> LoadPlan:
    """Compare the checkpoint ``info`` with everything it would be loaded into; changes nothing.

    Args:
        handle: The wrapped model.
        info: The checkpoint.
        optimizer: See ``load_checkpoint``.
        scheduler: See ``load_checkpoint``.
        ranks: The data-parallel ranks.
        partial: See ``load_checkpoint``.
        cast: See ``load_checkpoint``.

    Raises:
        CheckpointError: It does not fit, or cannot be read.
    """
    if not (info.path / MANIFEST).is_file():
        raise CheckpointError(f"{info.path}: this rank does not see it. Load from storage that all nodes share.")
    document = read_state(info)
    index = read_index(info.path, set(info.files))
    state = model_state(handle.module)
    found = compare_model(state, index, document)
    differing = [key for key in document["differing"] if key in found.fitting]
    plan = LoadPlan(info, document, index, state, found, {}, {}, None)
    if info.ranks == ranks.ranks:
        plan.own_buffers = {key: state.tensors[key] for key in differing}
        plan.rank_state = _empty(index, ".".join(rank_path(ranks.rank)))
    else:
        if info.ranks:  # none: weights that were imported
            found.notes.append(
                f"saved by {info.ranks} data-parallel ranks and loaded by {ranks.ranks}: random states and rank_extra "
                "are not restored"
            )
        if differing:
            found.notes.append(f"rank 0's values, of several, are loaded on all ranks: {', '.join(differing[:20])}")
    steps_on = optimizer if optimizer is not None else getattr(scheduler, "optimizer", None)
    params = parameter_names(handle.module, trained_by(steps_on))
    _plan_optimizer(plan, optimizer, params, ranks.ranks)
    _plan_scheduler(plan, optimizer, scheduler)
    if plan.scheduler and (moved := compare_groups(steps_on, document["optimizer"], params)):
        found.problems.append(moved)
        plan.scheduler = False
    check_fits(found, str(info.path), partial, cast)
    wanted = [document["extra"], document["model_extra"]]
    if plan.scheduler:
        wanted.append(document["scheduler"])
    if plan.target is not None:
        wanted.append(document["optimizer"])
    plan.loose = {key: _empty(index, key) for key in tensor_keys(wanted)}
    return plan


def _plan_optimizer(
    plan: LoadPlan, optimizer: torch.optim.Optimizer | None, params: Mapping[str, nn.Parameter], ranks: int
) -> None:
    saved, found = plan.document["optimizer"], plan.comparison
    if optimizer is None:
        return
    if saved is None:
        found.problems.append("the checkpoint has no optimizer state: it was saved without optimizer")
        return
    missing, unexpected, problems = compare_optimizer(optimizer, saved, params)
    found.missing += [f"optimizer state of {fqn}" for fqn in missing if fqn in found.fitting]
    told = set(found.unexpected)
    found.unexpected += [f"optimizer state of {fqn}" for fqn in unexpected if fqn not in told]
    if problems:
        found.problems += problems
        found.notes.append("the optimizer state is not loaded")
        return
    held = {fqn for group in saved["groups"] for fqn in group["params"]}
    plan.fqns = {fqn for fqn in held - set(unexpected) if fqn in found.fitting}
    plan.target = build_target(saved, params, plan.fqns, plan.index, ranks)


def _plan_scheduler(plan: LoadPlan, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    saved, found = plan.document["scheduler"], plan.comparison
    if scheduler is None:
        if saved is not None and optimizer is not None:
            found.notes.append("the checkpoint has the state of a scheduler, which is not loaded: none was passed")
    elif saved is None:
        found.problems.append("the checkpoint has no scheduler state: it was saved without scheduler")
    elif saved["class"] != type(scheduler).__name__:
        found.problems.append(
            f"the scheduler is {type(scheduler).__name__}, the checkpoint has the state of {saved['class']}"
        )
    else:
        plan.scheduler = True


def _empty(index: Metadata, key: str) -> torch.Tensor:
    entry = index.state_dict_metadata.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"checkpoint: it lacks {key!r}. Load another checkpoint.")
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")  # whatever the default device is
