"""Which checkpoint Megatron will take, and whether this run can load it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ...errors import CheckpointError
from .folders import LEGACY, STOCK_DCP, TORCH_DCP, TORCH_DIST, complete_in, fault_of, kind_of, recover
from .tracker import TRACKER


def check_directory(args: Namespace, load_arg: str) -> Path | None:
    """Return the directory Megatron loads from, None if there is nothing to load.

    Args:
        args: Megatron's arguments.
        load_arg: Which of them names the directory.

    Raises:
        CheckpointError: Neither it nor ``--pretrained-checkpoint`` has a tracker file, or that cannot be understood.
    """
    load, pretrained = getattr(args, load_arg), getattr(args, "pretrained_checkpoint", None)
    directory = Path(load) if load is not None else None
    if pretrained is not None and (directory is None or not (directory / TRACKER).is_file()):
        directory = Path(pretrained)
        if not (directory / TRACKER).is_file():
            tried = " and ".join(str(each) for each in (load, pretrained) if each is not None)
            raise CheckpointError(
                f"--pretrained-checkpoint: there is no {TRACKER} in {tried}. Give the folder that holds iter_… or "
                "release and this file."
            )
    if directory is None or not (directory / TRACKER).is_file():
        return directory
    text = (directory / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{directory / TRACKER}: {text[:40]!r} is neither an iteration nor 'release'. {_others(directory)} Write "
            "the number of one of them into the file."
        )
    return directory


def examine(folder: Path, args: Namespace | None, optimizer: bool) -> None:
    """Refuse a folder that is not complete, or that this run cannot load.

    Args:
        folder: The checkpoint that was chosen.
        args: Megatron's arguments; None where only its arguments are read.
        optimizer: Whether its optimizer state is to be loaded.

    Raises:
        CheckpointError: Says why, and what to do.
    """
    recover(folder)
    if fault := fault_of(folder):
        raise CheckpointError(f"{folder}: {fault}. {_others(folder.parent)}")
    kind = kind_of(folder)
    if args is None:
        return
    if kind == STOCK_DCP and args.ckpt_format == TORCH_DCP:
        if not args.finetune:
            raise CheckpointError(
                f"{folder}: Megatron wrote it in torch_dcp without mindspeed_fsdp2, with optimizer state by position "
                "and everything else pickled. --finetune loads its weights."
            )
        return
    if kind == STOCK_DCP:
        kind = TORCH_DCP
    if kind == LEGACY and optimizer:
        raise CheckpointError(
            f"{folder}: it is in Megatron's legacy torch format, whose optimizer state is that of unsharded parameters "
            "by position. Add --no-load-optim (keeps the iteration) or --finetune to load its weights."
        )
    if kind in (TORCH_DCP, TORCH_DIST) and kind != args.ckpt_format:
        raise CheckpointError(
            f"{folder}: it is in the format {kind}, and this run has --ckpt-format {args.ckpt_format}. Write "
            f"--ckpt-format {kind}."
        )


def _others(directory: Path) -> str:
    names = complete_in(directory) if directory.is_dir() else []
    if not names:
        return f"There is no complete checkpoint in {directory}."
    last = names[-1].removeprefix("iter_").lstrip("0")
    return f"Complete are {', '.join(names[-5:])}: write --ckpt-step {last} for the last of them."
