"""Checkpoints in a directory: their names, which are complete, which is the newest.

A checkpoint is written into a hidden folder beside the others, which is renamed when everything in it is on the disk.
Its ``checkpoint.json`` lists all its files with their sizes, so a copy that lacks something is not taken for complete.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .foreign import describe_other_format

MANIFEST = "checkpoint.json"
STATE = "state.json"
FORMAT = "mindspeed_fsdp2"
VERSION = 1
SAVING = ".saving-"
REMOVING = ".removing-"

_NAME = re.compile(r"step-\d{8,}(-\d+)?")


@dataclass(frozen=True)
class CheckpointInfo:
    """One published checkpoint.

    Attributes:
        path: Its folder.
        step: The step it was saved at.
        serial: Counts the saves into its directory; the highest is the newest.
        ranks: Data-parallel ranks that saved it.
        files: Name -> size in bytes of each of its files.
        state_sum: Checksum of its ``state.json``; empty where an earlier version has written none.
    """

    path: Path
    step: int
    serial: int
    ranks: int
    files: dict[str, int]
    state_sum: str = ""

    def lacks(self) -> str:
        """Return the name of a file that is missing or has another size, or an empty string."""
        for name, size in self.files.items():
            try:
                if (self.path / name).stat().st_size != size:
                    return name
            except OSError:
                return name
        return ""


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the complete checkpoints in ``directory``, oldest first; none if it does not exist.

    Not a collective: call it on one rank where ranks could see different states of a directory.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    return [info for info in published(Path(directory)) if not info.lacks()]


def published(directory: Path) -> list[CheckpointInfo]:
    """Return the published checkpoints in ``directory``, oldest first, without a look at their files.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    found = [
        info for name in names_in(directory) if _NAME.fullmatch(name) and (info := read_manifest(directory / name))
    ]
    return sorted(found, key=lambda info: info.serial)


def left_over(directory: Path) -> list[str]:
    """Return the names of folders that an interrupted save or an interrupted removal has left.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    return [name for name in names_in(directory) if name.startswith((SAVING, REMOVING))]


def names_in(directory: Path) -> list[str]:
    """Return the names in ``directory``, sorted; none if it does not exist.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: it cannot be read: {error}. Pass a readable directory.") from error


def read_manifest(folder: Path) -> CheckpointInfo | None:
    """Return what ``folder`` says about itself, or None if it is not a checkpoint of this package."""
    content = read_json(folder / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST}: format version {content.get('version')!r} is not {VERSION}. Load it with the "
            "version of mindspeed_fsdp2 that saved it."
        )
    try:
        files = {str(name): int(size) for name, size in content["files"].items()}
        step, serial, ranks = (int(content[name]) for name in ("step", "serial", "ranks"))
        return CheckpointInfo(folder, step, serial, ranks, files, str(content.get("state_sum", "")))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def choose(directory: Path, step: int | None) -> tuple[CheckpointInfo, list[str]]:
    """Return the newest complete checkpoint, or that of ``step``, and what was passed over.

    Args:
        directory: What ``save_checkpoint`` got, or the folder of one checkpoint.
        step: None for the newest.

    Raises:
        CheckpointError: There is none; says what is there instead.
    """
    own = read_manifest(directory)
    every = [own] if own is not None else published(directory)
    names = [] if own is not None else names_in(directory)
    passed = [f"{name} is an unfinished save" for name in names if name.startswith(SAVING)]
    known = {info.path.name for info in every}
    passed += [f"{name} has no {MANIFEST}" for name in names if _NAME.fullmatch(name) and name not in known]
    for info in reversed(every):
        if step is not None and info.step != step:
            continue
        if not (lacking := info.lacks()):
            return info, passed
        passed.append(f"{info.path.name} lacks {lacking} or has it in another size")
    raise CheckpointError(_why_none(directory, step, every, names, passed))


def _why_none(
    directory: Path, step: int | None, every: list[CheckpointInfo], names: list[str], passed: list[str]
) -> str:
    steps = sorted({info.step for info in every})
    if step is not None and steps and step not in steps:
        have = ", ".join(map(str, steps))
        return f"{directory}: there is no checkpoint of step {step}, only of {have}. Pass one of these as step."
    if passed:
        return (
            f"{directory}: there is no complete checkpoint: {'; '.join(passed)}. Start without load_checkpoint, or "
            "copy a complete one here."
        )
    if other := describe_other_format(names):
        return f"{directory}: {other}"
    what = "it is empty" if directory.is_dir() else "it does not exist"
    return (
        f"{directory}: {what}, so there is no checkpoint to load. Pass the directory given to save_checkpoint, or "
        "start without load_checkpoint where list_checkpoints(directory) is empty."
    )


def read_state(info: CheckpointInfo) -> dict[str, Any]:
    """Return what the checkpoint holds beside tensors.

    Raises:
        CheckpointError: It cannot be read, or was changed after the save.
    """
    if info.state_sum and (found := checksum(info.path / STATE)) != info.state_sum:
        raise CheckpointError(
            f"{info.path / STATE}: its checksum is {found or 'unknown'}, not {info.state_sum}: it was changed after "
            "the save. Load another checkpoint."
        )
    content = read_json(info.path / STATE)
    if not isinstance(content, dict):
        raise CheckpointError(f"{info.path / STATE}: it cannot be read. Load another checkpoint.")
    return content


def checksum(path: Path) -> str:
    """Return the checksum of the file's bytes, an empty string if it cannot be read."""
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except OSError:
        return ""


def read_json(path: Path) -> Any:
    """Return the JSON in the file, None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
