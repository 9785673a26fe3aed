"""Load a checkpoint into a wrapped model, on any number of ranks and with any sharding."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..apply import Sharded
from ..errors import CheckpointError
from .compare import LoadReport
from .folder import choose
from .load_plan import LoadPlan, plan_load
from .model_state import parameter_names
from .optimizer_load import install
from .pieces import Piece
from .progress import Progress
from .rank_state import rank_extra_of, restore_random_states
from .save import ready
from .store import read_pieces
from .values import on_host, unpack

logger = logging.getLogger("mindspeed_fsdp2")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave.

    Attributes:
        path: Its folder.
        step: Number of steps that were finished.
        extra: What was passed as ``extra`` to the save.
        rank_extra: What this rank passed as ``rank_extra``; None on another number of ranks.
        report: What was not loaded, or not as it is.
    """

    path: Path
    step: int
    extra: Any
    rank_extra: Any
    report: LoadReport


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    scheduler: Any = None,
    partial: bool = False,
    cast: bool = False,
    random_states: bool = True,
) -> Loaded:
    """Load the newest complete checkpoint of ``directory`` (**in place**, **collective** over the data-parallel ranks).

    The number of ranks and the sharding may differ from those of the save. Everything is compared before anything is
    changed.

    Args:
        directory: What ``save_checkpoint`` got, or the folder of one checkpoint.
        model: A wrapped model.
        optimizer: Its optimizer; None leaves the saved optimizer state alone.
        step: Load the checkpoint of this step instead of the newest.
        scheduler: Learning-rate scheduler of the optimizer.
        partial: Load what fits and report the rest, instead of raising.
        cast: Convert values to the model's dtypes where they differ. Optimizer state keeps the saved dtype.
        random_states: Also restore each rank's random states. On another number of ranks they stay as they are.

    Returns:
        Step, extra and a report.

    Raises:
        CheckpointError: There is no complete checkpoint, or it does not fit: every difference is listed. Every rank
            raises the same error.
    """
    handle, ranks = ready(model, "load_checkpoint")
    place = Path(directory)
    info, passed = ranks.from_first(lambda: choose(place, step), "load_checkpoint")
    plan = ranks.agree(lambda: plan_load(handle, info, optimizer, scheduler, ranks, partial, cast), "load_checkpoint")
    if ranks.rank == 0:
        for note in passed:
            logger.warning("%s: %s; it is not loaded.", place, note)
    pieces = plan.pieces(ranks.rank, ranks.ranks)
    progress = Progress(f"loading {info.path}", sum(piece.tensor.nbytes for piece in pieces), ranks.rank == 0)
    ranks.agree(lambda: _read(pieces, plan, progress), "load_checkpoint")
    ranks.agree(lambda: _apply(handle, plan, optimizer, scheduler, random_states), "load_checkpoint")
    progress.finish()
    report = plan.comparison.report()
    for line in report.lines() if ranks.rank == 0 else ():
        logger.warning("%s: %s", info.path, line)
    extra = unpack(plan.document["extra"], plan.loose, on_host)
    rank_extra = rank_extra_of(plan.rank_state) if plan.rank_state is not None else None
    return Loaded(info.path, info.step, extra, rank_extra, report)


def _read(pieces: Sequence[Piece], plan: LoadPlan, progress: Progress) -> None:
    try:
        read_pieces(pieces, plan.info.path, plan.index, progress)
    except CheckpointError as error:
        raise CheckpointError(f"{error} The model holds part of it now: do not train on.") from error


def _apply(
    handle: Sharded, plan: LoadPlan, optimizer: torch.optim.Optimizer | None, scheduler: Any, random_states: bool
) -> None:
    # Parameters and buffers were read into in place. Their modules may have more to do: extra state, hooks.
    values: dict[str, Any] = {key: plan.model.tensors[key] for key in plan.comparison.fitting}
    values |= {key: values[first] for key, first in plan.model.ties.items() if first in values}
    saved_extra = plan.document["model_extra"]
    values |= {key: unpack(saved_extra[key], plan.loose, on_host) for key in plan.model.extra if key in saved_extra}
    handle.module.load_state_dict(values, strict=False)
    if optimizer is not None and plan.target is not None and plan.fqns is not None:
        params = parameter_names(handle.module)
        install(optimizer, plan.document["optimizer"], params, plan.fqns, plan.target, plan.loose)
    if plan.scheduler:
        scheduler.load_state_dict(unpack(plan.document["scheduler"]["state"], plan.loose, on_host))
    if random_states and plan.rank_state is not None:
        restore_random_states(plan.rank_state, handle.mesh.device_type)
