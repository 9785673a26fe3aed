"""Hugging Face weights as a checkpoint that ``load_checkpoint`` takes, a bounded part at a time, without a model."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from .coordination import Coordination
from .folder import published
from .hf_names import names_in_model
from .hf_read import Checksums
from .hf_shards import Weight, converted, too_large, written_dtype
from .hf_source import HFWeights, compare_with, open_hf, shown
from .hf_targets import check_apart
from .model_state import SECTION, model_state
from .pieces import Piece
from .progress import Progress
from .publish import begin, clean, discard, folder_name, publish
from .store import Written, write_index, write_pieces
from .write import explained

logger = logging.getLogger("mindspeed_fsdp2")

_PART = 1 << 28  # bytes of tensors that are in memory together and go into one file of the checkpoint


@dataclass(frozen=True)
class _Plan:
    """What is imported.

    Attributes:
        source: The files.
        parts: Tensors that are read, and written into one file, together.
        ties: Further name -> name.
        dropped: Keys that Transformers leaves out, too.
        sums: Checksums of what is read.
    """

    source: HFWeights
    parts: list[list[Weight]]
    ties: dict[str, str]
    dropped: list[str]
    sums: Checksums


def import_weights(
    source: Path, directory: Path, step: int, dtype: torch.dtype | None, model: nn.Module | None, ranks: Coordination
) -> Path:
    """Make a checkpoint of Hugging Face weights in ``directory`` and return its folder (**collective**).

    It has no optimizer state. The checkpoint is complete or absent.

    Args:
        source: A directory, an index or a ``.safetensors`` file.
        directory: Holds no checkpoint yet.
        step: Step that the checkpoint gets.
        dtype: Convert floating-point tensors to it; None keeps theirs.
        model: The model, on the meta device: the checkpoint gets all its names. None takes those of the files.
        ranks: The processes that share the work.

    Raises:
        CheckpointError: The files are damaged, do not fit the model, or nothing can be written. Every rank raises it.
    """
    what = f"importing {source}"
    ranks.agree(lambda: check_apart(source, directory), what)
    plan = ranks.agree(lambda: _plan(source, dtype, model), what)
    if plan.dropped and ranks.rank == 0:
        logger.info("%s: left out, as from_pretrained() does: %s", what, shown(plan.dropped))
    place = Path(os.path.abspath(directory))
    folder = ranks.from_first(lambda: explained(place, lambda: _begin(place, step)), what)
    try:
        mine = ranks.agree(lambda: explained(folder, lambda: _write(plan, folder, ranks, what)), what)
        every = ranks.gather(mine, what)
        sums = ranks.gather(plan.sums.found, what)
        order = range(len(plan.parts)) if ranks.rank == 0 else ()
        written = [every[number % ranks.ranks][number] for number in order]
        aliases: dict[tuple[str, ...], tuple[str, ...]] = {
            (SECTION, name): (SECTION, key) for name, key in plan.ties.items()
        }
        document: dict[str, Any] = {"ties": plan.ties, "model_extra": {}, "differing": [], "extra": None}
        document |= {"optimizer": None, "scheduler": None}

        def finish() -> Path:
            plan.sums.raise_if_changed({key: value for found in sums for key, value in found.items()})
            write_index(written, aliases, folder)
            return publish(folder, place, step, 0, document, None)

        return ranks.from_first(lambda: explained(folder, finish), what)
    except CheckpointError:
        if ranks.rank == 0:
            discard(folder)
        raise


def _begin(place: Path, step: int) -> Path:
    if place.is_dir() and (there := published(place)):
        # It would become the newest one, which a resumed job loads, or take the place of one of the same step.
        raise CheckpointError(f"{place}: it holds a checkpoint, {there[-1].path.name}. Name a new directory.")
    try:
        return begin(place, folder_name(step))
    except OSError:
        if place.is_dir():
            clean(place)  # on a full disk the folder can be made, but nothing in it
        raise


def _plan(path: Path, dtype: torch.dtype | None, model: nn.Module | None) -> _Plan:
    source = open_hf(path)
    if source.problems:
        raise CheckpointError("\n".join(source.problems))
    named = {key: key for key in source.entries}
    if model is not None:
        state = model_state(model)
        named = names_in_model(model, {*state.tensors, *state.ties}, source.entries, str(path))
    dropped = [key for key in source.entries if key not in named]
    held = {name: (source.entries[key].dtype, source.entries[key].shape) for key, name in named.items()}
    ties = {name: named[key] for name, key in source.ties.items() if key in named}
    if model is not None:
        problems, names = compare_with(model, held, ties)
        ties = dict(names)
        keys = {name: key for key, name in named.items()}
        for name, first in names.items():
            if name in held:  # written under both names
                if torch.equal(source.read(keys[name]), source.read(keys[first])):
                    del held[name], named[keys[name]]
                else:
                    problems.append(f"{name} and {first} are one tensor in the model and two different ones here")
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{path}: it does not fit the model:\n  {listed}\nPass the weights of this model. What only "
                "from_pretrained() converts, experts in files of their own say, load with it, then use wrap_model and "
                "save_checkpoint."
            )
    parts: list[list[Weight]] = [[]]
    filled = 0
    for key, name in named.items():
        entry = source.entries[key]
        weight = Weight(name, key, written_dtype(entry.dtype, dtype), entry.shape)
        if parts[-1] and filled + weight.nbytes > _PART:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += weight.nbytes
    return _Plan(source, parts, ties, dropped, Checksums(source.folder, source.headers))


def _write(plan: _Plan, folder: Path, ranks: Coordination, what: str) -> dict[int, Written]:
    """Write this rank's parts, each as if it were another rank's; return number of a part -> what was written."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent}: this process does not see the folder that the first one made in it. Import to storage "
            "that all nodes share."
        )
    mine = range(ranks.rank, len(plan.parts), ranks.ranks)
    total = sum(weight.nbytes for number in mine for weight in plan.parts[number])
    progress = Progress(what, total, ranks.rank == 0)
    written = {}
    for count, number in enumerate(mine, start=1):
        # Without a name for the pieces, which would keep them while the next ones are read.
        written[number] = write_pieces(_pieces(plan, plan.parts[number]), folder, number, len(plan.parts), progress)
        if ranks.rank == 0:
            logger.info("%s: %d of %d files of this process", what, count, math.ceil(len(plan.parts) / ranks.ranks))
    progress.finish()
    return written


def _pieces(plan: _Plan, weights: Sequence[Weight]) -> list[Piece]:
    pieces = []
    for weight in weights:
        stored = plan.source.read(weight.key)
        plan.sums.add(weight.key, stored)
        tensor, infinite = converted(stored, weight.dtype)
        if infinite:
            raise too_large([weight.name])
        pieces.append(Piece((SECTION, weight.name), tensor, tensor.size(), torch.Size([0] * tensor.dim()), 1, 0))
    return pieces
