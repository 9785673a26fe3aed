"""Megatron's checkpoint folders, in any of its formats: complete or absent, and recognised for what they are.

A folder is written under a hidden name and renamed when all of it is on the disk; ``checkpoint.json`` lists its files.
Folders without that list come from elsewhere and are judged by the file their format writes last.
"""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path
from typing import Any, Final

from ...checkpoint.folder import MANIFEST, REMOVING, SAVING, names_in, read_json
from ...checkpoint.publish import begin, clean, discard, seal, sync_folder
from ...checkpoint.store import sync_files
from ...errors import CheckpointError

logger = logging.getLogger("mindspeed_fsdp2")

TORCH_DCP: Final = "torch_dcp"
TORCH_DIST: Final = "torch_dist"
LEGACY: Final = "torch"
STOCK_DCP: Final = "torch_dcp without mindspeed_fsdp2"

_FORMAT = "mindspeed_fsdp2.megatron"
_VERSION = 1
_NAME = re.compile(r"iter_\d{7,}|release")


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """Return what ``folder`` says about itself; None if a save of this package did not make it."""
    found = read_json(folder / MANIFEST)
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def kind_of(folder: Path) -> str:
    """Return the format of what lies in ``folder``, empty if it cannot be told."""
    if (manifest := manifest_of(folder)) is not None:
        return str(manifest.get("ckpt_format", ""))
    names = names_in(folder)
    if "metadata.json" in names:
        return TORCH_DIST
    if any(name.startswith("mp_rank_") for name in names):
        return LEGACY
    return STOCK_DCP if ".metadata" in names else ""


def fault_of(folder: Path) -> str:
    """Return why ``folder`` is not a complete checkpoint, empty if it is one.

    Raises:
        CheckpointError: It cannot be read, or another version of this package wrote it.
    """
    if not folder.is_dir():
        return "it does not exist"
    manifest = manifest_of(folder)
    if manifest is None:
        if (folder / MANIFEST).exists():
            return f"its {MANIFEST} cannot be read"
        names = names_in(folder)
        if not names:
            return "it is empty: a save was interrupted"
        return "" if kind_of(folder) and _finished(folder, names) else "a save of it was never finished"
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST}: format version {manifest.get('version')!r} is not {_VERSION}. Load it with the "
            "version of mindspeed_fsdp2 that saved it."
        )
    for name, size in manifest["files"].items():
        try:
            if (folder / name).stat().st_size != size:
                return f"its {name} has another size than was written"
        except OSError:
            return f"its {name} is missing"
    return ""


def _finished(folder: Path, names: list[str]) -> bool:
    if kind_of(folder) == LEGACY:
        return any((folder / name / "model_optim_rng.pt").is_file() for name in names if name.startswith("mp_rank_"))
    return ".metadata" in names


def complete_in(directory: Path) -> list[str]:
    """Return the names of the complete checkpoints in ``directory``, oldest iteration first."""
    return [name for name in names_in(directory) if _NAME.fullmatch(name) and not fault_of(directory / name)]


def unfinished_in(directory: Path) -> list[str]:
    """Return one line for each trace of an interrupted save or removal in ``directory``."""
    names = names_in(directory)
    lines = [f"{name} is an unfinished save" for name in names if name.startswith(SAVING)]
    for name in names:
        if _NAME.fullmatch(name) and (fault := fault_of(directory / name)):
            lines.append(f"{name}: {fault}")
    return lines


def prepare(directory: Path) -> None:
    """Make ``directory`` ready for a save, and clear what interrupted ones have left (on the first rank).

    Raises:
        OSError: It cannot be made or written.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        sync_folder(directory.parent)
    for name in names_in(directory):
        if name.startswith(SAVING) and (target := _target_of(directory / name)) is not None:
            recover(target)
    clean(directory)
    for name in drop_empty(directory):
        logger.warning("%s: removed, it is empty: an interrupted save left it.", directory / name)
    probe = directory / f"{SAVING}probe-{secrets.token_hex(4)}"
    probe.write_bytes(b"\0" * 4096)
    probe.unlink()


def drop_empty(directory: Path) -> list[str]:
    """Remove the empty folders that Megatron makes before it saves, and return their names.

    Megatron's own clean-up of non-persistent checkpoints would take one for the newest checkpoint.
    """
    found = [
        name
        for name in names_in(directory)
        if _NAME.fullmatch(name) and (directory / name).is_dir() and not names_in(directory / name)
    ]
    for name in found:
        (directory / name).rmdir()
    return found


def begin_iteration(target: Path) -> Path:
    """Return a new hidden folder to write the checkpoint ``target`` into.

    Raises:
        OSError: It cannot be made.
    """
    return begin(target.parent, target.name)


def publish_iteration(folder: Path, target: Path, ckpt_format: str) -> Path:
    """Put the written ``folder`` on the disk and rename it to ``target``, replacing what has that name.

    Raises:
        OSError: It cannot be written or renamed.
    """
    sync_files(path for path in sorted(folder.iterdir()) if path.is_file())
    seal(folder, {"format": _FORMAT, "version": _VERSION, "ckpt_format": ckpt_format, "name": target.name})
    aside: Path | None = None
    if target.is_dir() and names_in(target):
        if fault := fault_of(target):
            logger.warning("%s: replaced, %s.", target, fault)
        aside = target.with_name(f"{REMOVING}{target.name}-{secrets.token_hex(4)}")
        target.rename(aside)  # killed now, the sealed folder is found again by recover()
    folder.rename(target)
    sync_folder(target.parent)
    if aside is not None:
        discard(aside)
    return target


def recover(target: Path) -> bool:
    """Give ``target`` back its name where a save was killed between two renames; return whether it was."""
    if target.exists() and names_in(target):
        return False
    for name in names_in(target.parent):
        folder = target.parent / name
        if name.startswith(SAVING) and _target_of(folder) == target and not fault_of(folder):
            try:
                folder.rename(target)
            except FileNotFoundError:  # another rank was first
                return target.is_dir()
            logger.warning("%s: it was complete and had not got its name yet; it has now.", target)
            return True
    return False


def _target_of(folder: Path) -> Path | None:
    manifest = manifest_of(folder)
    return folder.with_name(str(manifest["name"])) if manifest is not None and "name" in manifest else None
