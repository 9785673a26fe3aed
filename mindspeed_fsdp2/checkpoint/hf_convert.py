"""A checkpoint as Hugging Face weights, shard by shard, without a model."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..full_files import INDEX
from .coordination import Coordination
from .hf_config import CONFIG, config_text, files_to_copy, most_used_dtype, read_config, tied_on_load
from .hf_shards import Weight, WeightFile, converted, index_of, plan_files, plan_weights, too_large
from .hf_source import Saved, compare_with, open_saved
from .hf_targets import check_apart
from .hf_work import FileWriter, WorkFolder
from .progress import Progress
from .values import digest
from .write import explained

logger = logging.getLogger("mindspeed_fsdp2")


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported.

    Attributes:
        step: The checkpoint of this step, None for the newest.
        dtype: Convert floating-point tensors to it, None to keep theirs.
        max_shard_size: Bytes of tensors in a file.
        model_folder: Directory with the model's ``config.json`` and tokenizer, which are copied; None for neither.
        model: The model, on the meta device, that keys and shapes are compared with; None for no comparison.
    """

    step: int | None
    dtype: torch.dtype | None
    max_shard_size: int
    model_folder: Path | None
    model: nn.Module | None


def export_checkpoint(source: Path, target: Path, options: ExportOptions, ranks: Coordination) -> Path:
    """Write the model in the checkpoint ``source`` into the directory ``target`` (**collective**).

    Each rank reads and writes files of its own. A file is finished or absent, and so is the directory; when the same
    export is started again after an interruption, finished files are kept.

    Args:
        source: What ``save_checkpoint`` got as directory, or the folder of one checkpoint.
        target: May not exist yet, or is empty.
        options: How.
        ranks: The processes that share the work.

    Returns:
        ``target`` as an absolute path.

    Raises:
        CheckpointError: It cannot be read, does not fit the model, or cannot be written. Every rank raises it.
    """
    target = Path(os.path.abspath(target))
    what = f"exporting to {target}"
    saved, files, texts = ranks.agree(lambda: _plan(source, target, options), what)
    for note in saved.passed if ranks.rank == 0 else ():
        logger.warning("%s: %s; it is not exported.", source, note)
    work = WorkFolder(target)
    plan = _identity(saved, files, texts)
    ranks.from_first(lambda: explained(target.parent, lambda: work.begin(plan, resume=True)), what)
    kept = False  # on every rank alike: whether there is something to go on with
    try:
        left = ranks.from_first(lambda: [number for number, file in enumerate(files) if not work.done(file)], what)
        if ranks.rank == 0 and len(left) < len(files):
            logger.info("%s: going on, %d of %d files are there", target, len(files) - len(left), len(files))
        kept = len(left) < len(files)
        for _ in _write_all(saved, [files[number] for number in left], work, ranks, what):
            kept = True
        about = {
            "format": "mindspeed_fsdp2 export",
            "source": os.fspath(saved.info.path.resolve()),
            "step": saved.info.step,
        }
        ranks.from_first(lambda: explained(target, lambda: work.publish(texts, _copies(options), about)), what)
    except CheckpointError as error:
        if kept:
            raise CheckpointError(
                f"{error} Finished files stay in {work.path}: the same command goes on with them. Remove it if you do "
                "not want them."
            ) from error
        if ranks.rank == 0:
            work.discard()
        raise
    finally:
        work.release()
    return target


def _plan(source: Path, target: Path, options: ExportOptions) -> tuple[Saved, list[WeightFile], dict[str, str]]:
    check_apart(source, target)
    saved = open_saved(source, options.step)
    content = read_config(options.model_folder) if options.model_folder is not None else None
    twice: set[str] = set()
    if options.model is not None:
        problems, _ = compare_with(options.model, saved.tensors, saved.ties)
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{saved.info.path}: it does not hold the model that --model describes:\n  {listed}\nName the model "
                "that was saved."
            )
        tied = tied_on_load(options.model)
        twice = {name for name, key in saved.ties.items() if not tied(name, key)}
    elif content is not None and content.get("tie_word_embeddings") is not True:
        twice = set(saved.ties)
    weights, also = plan_weights(saved.tensors, saved.ties, twice, options.dtype)
    files = plan_files(weights, also, options.max_shard_size)
    texts = {INDEX: index_of(files)} if len(files) > 1 else {}
    if content is not None:
        main = most_used_dtype((weight.dtype, math.prod(weight.shape)) for weight in weights)
        texts[CONFIG] = config_text(content, main)
    return saved, files, texts


def _identity(saved: Saved, files: Sequence[WeightFile], texts: dict[str, str]) -> dict[str, Any]:
    info = saved.info
    layout = [[file.name, file.header().hex()] for file in files]
    return {
        "checkpoint": os.fspath(info.path.resolve()),
        "saved": digest([info.step, info.serial, info.files, info.state_sum]),
        "layout": digest([layout, texts]),
    }


def _copies(options: ExportOptions) -> dict[str, Path]:
    return files_to_copy(options.model_folder) if options.model_folder is not None else {}


def _write_all(
    saved: Saved, files: Sequence[WeightFile], work: WorkFolder, ranks: Coordination, what: str
) -> Iterator[int]:
    """Write the files (**collective**); yields after each round, in which every rank has finished one."""
    mine = files[ranks.rank :: ranks.ranks]
    rounds = math.ceil(len(files) / ranks.ranks)
    progress = Progress(what, sum(weight.nbytes for file in mine for weight in file.weights), ranks.rank == 0)
    for number in range(rounds):
        file = mine[number] if number < len(mine) else None
        # Together after each file: a rank that fails ends the others within a file, not after all of theirs.
        ranks.agree(lambda: explained(work.files, lambda: _write(saved, file, work, progress)), what)  # noqa: B023
        if ranks.rank == 0:
            logger.info("%s: %d of %d files", what, min(len(files), (number + 1) * ranks.ranks), len(files))
        yield number
    progress.finish()


def _write(saved: Saved, file: WeightFile | None, work: WorkFolder, progress: Progress) -> None:
    if file is None:
        return
    if not work.files.is_dir():
        raise CheckpointError(
            f"{work.target.parent}: this process does not see the folder that the first one made in it. Export to "
            "storage that all nodes share."
        )
    writer = FileWriter(work, file)
    try:
        for weight in file.weights:
            writer.put(_read(saved, weight))
            progress.add(weight.nbytes)
        writer.finish()
    finally:
        writer.close()


def _read(saved: Saved, weight: Weight) -> torch.Tensor:
    tensor, infinite = converted(saved.read(weight.key), weight.dtype)
    if infinite:
        raise too_large([weight.name])
    return tensor
