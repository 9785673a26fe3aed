"""torch_dist: compare a checkpoint with what this run asks of it, before anything is read."""

from __future__ import annotations

import functools
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_common_state_dict, load_sharded_metadata
from megatron.training import get_args

from ...agreement import agree
from ...errors import CheckpointError
from .dist_check import named_entries, pieces_of
from .dist_pieces import ShardFactory

logger = logging.getLogger("mindspeed_fsdp2")

_OPTIMIZER = ("optimizer.", "chained_")
_MAIN = "optimizer.state.fp32_param."
_DEFAULT_STRICTNESS = "assume_ok_unexpected"
_SHOWN = 6
_WEIGHTS_ONLY = "--no-load-optim or --finetune"
_SAME_PRECISION = f"Resume with the same precision, or add {_WEIGHTS_ONLY}."
_SAME_OPTIMIZER = f"Use the same optimizer, or add {_WEIGHTS_ONLY}."
_SAME_FLAGS = "Use the flags it was saved with, or add --dist-ckpt-strictness log_all to load what fits."


def wrap_dist_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``dist_checkpointing.load`` that first names every difference, on all ranks alike.

    The original raises on the ranks that need the key, with the list of all keys, and says nothing of tensors that the
    run has no place for.
    """

    @functools.wraps(original)
    def load(*rest: Any, **named: Any) -> Any:
        bound = inspect.signature(original).bind(*rest, **named)
        bound.apply_defaults()
        asked, strict = bound.arguments["sharded_state_dict"], bound.arguments["strict"]
        if any(isinstance(entry, ShardFactory) for _, entry in named_entries(asked)):
            partial = getattr(strict, "value", strict) != _DEFAULT_STRICTNESS
            folder = str(bound.arguments["checkpoint_dir"])
            for text in check_contents(asked, folder, _wants_optimizer(get_args()), partial):
                if dist.get_rank() == 0:
                    logger.warning("checkpoint %s: %s; the rest is loaded (--dist-ckpt-strictness).", folder, text)
        return original(*rest, **named)

    return load


def _wants_optimizer(args: Namespace) -> bool:
    return not (args.finetune or args.no_load_optim or args.skip_train)


class _Difference(NamedTuple):
    text: str
    remedy: str
    keys: bool  # whether keys are missing, which --dist-ckpt-strictness allows


def check_contents(sharded_state_dict: Any, checkpoint_dir: str, wants_optimizer: bool, partial: bool) -> list[str]:
    """Compare the tensors asked for with those in the checkpoint (**collective** over all ranks).

    Args:
        sharded_state_dict: What is asked for.
        checkpoint_dir: Folder of the checkpoint.
        wants_optimizer: Whether the flags say that optimizer state is to be loaded.
        partial: Whether either side may have keys that the other has not.

    Returns:
        The differences that ``partial`` allows.

    Raises:
        CheckpointError: On every rank alike, with every other difference.
    """
    what = f"checkpoint {checkpoint_dir}"
    pieces = list(pieces_of(sharded_state_dict))
    mine = {piece.key: tuple(piece.global_shape) for piece in pieces}
    flexible = {piece.key for piece in pieces if piece.allow_shape_mismatch}
    every: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    asked = {key: size for sizes in every for key, size in sizes.items()}

    def compare() -> list[str]:
        stored = {
            entry.key: tuple(entry.global_shape)
            for entry in load_sharded_metadata(checkpoint_dir).values()
            if not isinstance(entry, ShardedObject)
        }
        found = _differences(asked, stored, flexible)
        if wants_optimizer and (reason := _no_optimizer_state(sharded_state_dict, checkpoint_dir)):
            found = [_Difference(reason, f"Add {_WEIGHTS_ONLY}.", False)]
        if wrong := [each for each in found if not (partial and each.keys)]:
            raise CheckpointError("\n".join(f"{what}: {each.text}. {each.remedy}" for each in wrong))
        return [each.text for each in found]

    return agree(compare, lambda _: "", None, what)


def _no_optimizer_state(asked: Any, folder: str) -> str | None:
    """Return why the checkpoint has no optimizer state for this run, which Megatron would notice after reading it."""
    saved_by = load_common_state_dict(folder).get("args")
    if "optimizer" in asked:
        if getattr(saved_by, "use_distributed_optimizer", False):
            return "its optimizer state is that of --use-distributed-optimizer, which only such a run can load"
    elif getattr(saved_by, "no_save_optim", False) and Path(folder).name != "release":
        return "it holds no optimizer state (--no-save-optim)"
    return None


def _differences(
    asked: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], flexible: Collection[str]
) -> list[_Difference]:
    optimizer = any(key.startswith(_OPTIMIZER) for key in asked)
    missing = [key for key in asked if key not in stored]
    extra = [key for key in stored if key not in asked and (optimizer or not key.startswith(_OPTIMIZER))]
    found = []
    for keys, has, lacks in ((missing, "this run", "the checkpoint"), (extra, "the checkpoint", "this run")):
        if any(key.startswith(_MAIN) for key in keys):
            found.append(_Difference(f"{has} has --bf16, {lacks} has not", _SAME_PRECISION, True))
        of_model = [key for key in keys if not key.startswith(_OPTIMIZER)]
        of_optimizer = [
            key
            for key in keys
            # What a weight lacks its state lacks too.
            if key.startswith(_OPTIMIZER) and not key.startswith(_MAIN) and not key.endswith(tuple(of_model))
        ]
        for names, remedy in ((of_model, _SAME_FLAGS), (of_optimizer, _SAME_OPTIMIZER)):
            if names:
                found.append(_Difference(f"{lacks} lacks {_listed(names)}, which {has} has", remedy, True))
    wrong = [key for key, size in asked.items() if key not in flexible and stored.get(key, size) != size]
    of_model = [key for key in wrong if not key.startswith(_OPTIMIZER)]
    shapes = [f"{key} is {stored[key]} in the checkpoint and {asked[key]} in this run" for key in of_model or wrong]
    if shapes:
        found.append(_Difference(_listed(shapes), "Use the flags it was saved with.", False))
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
