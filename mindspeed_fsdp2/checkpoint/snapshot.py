"""Collect what a save writes, and check that all ranks mean the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..apply import Sharded
from ..errors import CheckpointError
from . import model_state as model_part
from . import rank_state as rank_part
from .coordination import Coordination
from .model_state import ModelState, model_state, parameter_names, trained_by
from .optimizer_state import optimizer_state
from .pieces import Piece, check_names, own_share, piece_of, staged
from .values import Json, Packer, digest, dtype_name, fingerprint


@dataclass(frozen=True)
class Request:
    """The arguments of a save, as the caller gave them."""

    directory: str | os.PathLike[str]
    optimizer: torch.optim.Optimizer | None
    step: int
    extra: object
    rank_extra: object
    scheduler: Any
    keep: int | None


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes.

    Attributes:
        pieces: This rank's share of the tensors.
        document: What is saved beside tensors, equal on all ranks.
        aliases: Path of a further name of a tensor -> path of its first name.
        shapes: Key of the model's state dict -> shape of the whole tensor, further names included.
    """

    pieces: list[Piece]
    document: dict[str, Json]
    aliases: dict[tuple[str, ...], tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]

    def staged(self) -> Snapshot:
        """Return the same with copies in host memory."""
        return replace(self, pieces=staged(self.pieces))


@dataclass(frozen=True)
class Collected:
    """What one rank would save, before the ranks have compared it.

    Attributes:
        model: The model's state.
        pieces: Pieces of all tensors that the ranks share.
        own: Pieces that this rank alone has.
        document: See :class:`Snapshot`.
        facts: Name -> digest of everything that must be equal on all ranks.
        watched: Key -> digest of whole tensors of the model that may differ.
    """

    model: ModelState
    pieces: list[Piece]
    own: list[Piece]
    document: dict[str, Json]
    facts: dict[str, str]
    watched: dict[str, str]


def take_snapshot(handle: Sharded, request: Request, ranks: Coordination) -> Snapshot:
    """Return what this rank writes, its tensors still those of the model (**collective**).

    Raises:
        CheckpointError: An argument is wrong, something cannot be saved, or the ranks differ. Every rank raises it.
    """
    _check_own_directory(handle, request.directory)
    return settle(lambda: _collect(handle, request, ranks.rank, ranks.ranks), ranks)


def settle(collect: Callable[[], Collected], ranks: Coordination) -> Snapshot:
    """Collect on every rank, compare, and return what this rank writes (**collective**).

    Raises:
        CheckpointError: ``collect`` raised it, or the ranks differ. Every rank raises it.
    """
    found = ranks.agree(collect, "save_checkpoint")
    everyone = ranks.gather_all((found.facts, found.watched), "save_checkpoint")
    _check_equal([facts for facts, _ in everyone])  # on the same values everywhere, so all ranks raise or none
    differing = {key for key in found.watched if len({watched[key] for _, watched in everyone}) > 1}
    if drifted := sorted(differing - found.model.buffers):
        raise CheckpointError(
            f"save_checkpoint: {', '.join(drifted[:3])} has other values on each rank although it is not sharded. "
            "Change parameters equally on every rank."
        )
    own = list(found.own)
    for key in sorted(differing):  # statistics of each rank's own batches, say: every rank gets its own back
        own.append(piece_of(buffer_path(ranks.rank, key), found.model.tensors[key], 0, 1))
    first = model_part.SECTION
    aliases: dict[tuple[str, ...], tuple[str, ...]] = {
        (first, second): (first, name) for second, name in found.model.ties.items()
    }
    document = {**found.document, "differing": sorted(differing)}
    shapes = {key: tuple(tensor.shape) for key, tensor in found.model.tensors.items()}
    shapes |= {second: shapes[name] for second, name in found.model.ties.items()}
    return Snapshot([*own_share(found.pieces), *own], document, aliases, shapes)


def buffer_path(rank: int, key: str) -> tuple[str, ...]:
    """Return the path of a buffer whose values differ between ranks."""
    return ("buffers", f"{rank:05d}", key)


def _check_own_directory(handle: Sharded, directory: str | os.PathLike[str]) -> None:
    """Raise where two data-parallel groups of one job would save under the same names (**collective** over all ranks).

    Raises:
        CheckpointError: They would. Every rank raises it.
    """
    if handle.group is None or dist.get_world_size(handle.group) == dist.get_world_size():
        return
    mine = (os.path.realpath(directory), tuple(dist.get_process_group_ranks(handle.group)))
    everyone: list[tuple[str, tuple[int, ...]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    writers: dict[str, set[tuple[int, ...]]] = {}
    for path, group in everyone:
        writers.setdefault(path, set()).add(group)
    for path, groups in writers.items():
        if len(groups) > 1:
            raise CheckpointError(
                f"{path}: {len(groups)} data-parallel groups would save different tensors under the same names. Give "
                "each group its own directory."
            )


def _collect(handle: Sharded, request: Request, rank: int, ranks: int) -> Collected:
    _check_arguments(request)
    loose: dict[tuple[str, ...], torch.Tensor] = {}
    model, pieces, document = collect_model(handle.module, rank, ranks, loose)
    document |= {"optimizer": None, "scheduler": None}
    if request.optimizer is not None:
        params = parameter_names(handle.module, trained_by(request.optimizer))
        state = optimizer_state(request.optimizer, params, rank, ranks)
        document["optimizer"] = state.document
        pieces += state.pieces
        loose.update(state.tensors)
    if request.scheduler is not None:
        document["scheduler"] = {
            "class": type(request.scheduler).__name__,
            "state": _packed(("scheduler",), request.scheduler.state_dict(), loose),
        }
    document["extra"] = _packed(("extra",), request.extra, loose)
    pieces += [piece_of(path, tensor, rank, ranks) for path, tensor in loose.items()]
    facts = {".".join(path): fingerprint(tensor) for path, tensor in loose.items()}
    facts |= {"step": str(request.step), "directory": os.fspath(request.directory), "keep": str(request.keep)}
    random = rank_part.collect_rank_state(handle.mesh.device_type, request.rank_extra)
    own = [piece_of(rank_part.rank_path(rank), random, 0, 1)]
    return conclude(model, pieces, own, document, facts)


def collect_model(
    root: nn.Module, rank: int, ranks: int, loose: dict[tuple[str, ...], torch.Tensor]
) -> tuple[ModelState, list[Piece], dict[str, Json]]:
    """Return the model's state, this rank's pieces of it, and its part of the document.

    Args:
        root: The root unit's module.
        rank: This rank among those that save.
        ranks: Their number.
        loose: Tensors inside of extra state are added to it (**in place**).

    Raises:
        CheckpointError: Extra state of a kind that cannot be saved.
    """
    model = model_state(root)
    pieces = [piece_of((model_part.SECTION, key), tensor, rank, ranks) for key, tensor in model.tensors.items()]
    extra = {key: _packed((model_part.SECTION, key), value, loose) for key, value in model.extra.items()}
    return model, pieces, {"ties": model.ties, "model_extra": extra}


def conclude(
    model: ModelState, pieces: list[Piece], own: list[Piece], document: dict[str, Json], facts: dict[str, str]
) -> Collected:
    """Return what was collected, with the digests that the ranks compare.

    Raises:
        CheckpointError: Two tensors would be saved under one name.
    """
    layout = [[piece.key, list(piece.size), dtype_name(piece.tensor.dtype)] for piece in pieces]
    facts = {name: digest(value) for name, value in document.items()} | facts
    facts["model"] = digest([layout, model.ties])
    check_names([*pieces, *own])
    watched = {key: fingerprint(model.tensors[key]) for key in model.watched}
    return Collected(model, pieces, own, document, facts, watched)


def _packed(path: tuple[str, ...], value: object, loose: dict[tuple[str, ...], torch.Tensor]) -> Json:
    packer = Packer(path[0])
    packed = packer.pack(value, ".".join(path[1:]))
    if twice := packer.tensors.keys() & loose.keys():
        raise CheckpointError(
            f"checkpoint: two tensors would be saved under one name: {'.'.join(min(twice))}. Rename a module or an "
            "entry of its extra state."
        )
    loose.update(packer.tensors)
    return packed


def _check_arguments(request: Request) -> None:
    if isinstance(request.step, bool) or not isinstance(request.step, int) or request.step < 0:
        raise CheckpointError(f"step: {request.step!r} is not a number of finished steps. Pass an int from 0.")
    if request.keep is not None and (isinstance(request.keep, bool) or request.keep < 1):
        raise CheckpointError(f"keep: {request.keep!r} is not a number of checkpoints. Pass an int from 1, or None.")
    if request.scheduler is not None and not hasattr(request.scheduler, "state_dict"):
        raise CheckpointError(
            f"scheduler: {type(request.scheduler).__name__} has no state_dict(). Pass a scheduler of torch."
        )


def _check_equal(everyone: list[dict[str, str]]) -> None:
    differing = [name for name in everyone[0] if any(facts.get(name) != everyone[0][name] for facts in everyone)]
    if differing:
        others = [rank for rank, facts in enumerate(everyone) if facts != everyone[0]]
        shown = ", ".join(map(str, others[:16])) + (", …" if len(others) > 16 else "")
        raise CheckpointError(
            f"save_checkpoint: {', '.join(differing[:3])} on rank{'s' * (len(others) > 1)} {shown} differs from rank "
            "0. Pass the same on every rank; what is each rank's own belongs in rank_extra."
        )
