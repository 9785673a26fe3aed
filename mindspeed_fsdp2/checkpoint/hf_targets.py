"""Where weights and checkpoints may be written: nowhere that holds something already."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError


def check_free(target: Path) -> None:
    """Raise unless nothing, or an empty directory, bears this name.

    Raises:
        CheckpointError: Something does.
    """
    try:
        there = next(target.iterdir(), None) if target.is_dir() else (target if target.exists() else None)
    except OSError as error:
        raise CheckpointError(f"{target}: it cannot be read: {error.strerror}. Name another directory.") from error
    if there is not None:
        what = "it exists and is not empty" if target.is_dir() else "it is a file"
        raise CheckpointError(f"{target}: {what}. Name a new directory, or remove this one first.")


def check_apart(source: Path, target: Path) -> None:
    """Raise if ``target`` is the directory that is read, or lies in it; a file may have a target beside it.

    Raises:
        CheckpointError: It does.
    """
    inside, place = source.resolve(), target.resolve()
    folder = inside if inside.is_dir() else inside.parent
    if place == folder:
        raise CheckpointError(f"{target}: it is the directory that is read. Name another directory.")
    if inside in place.parents:
        raise CheckpointError(f"{target}: it lies in {source}, which is read. Name a directory outside of it.")
