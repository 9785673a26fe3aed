"""Make, publish and remove the folders of checkpoints. All of it happens on the first rank."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .folder import FORMAT, MANIFEST, REMOVING, SAVING, STATE, VERSION, checksum, left_over, published
from .store import sync_files

logger = logging.getLogger("mindspeed_fsdp2")

_WRITER = "writer.json"


def folder_name(step: int) -> str:
    """Return what the checkpoint of ``step`` is called."""
    return f"step-{step:08d}"


def begin(directory: Path, name: str) -> Path:
    """Return a new, hidden folder to write the checkpoint ``name`` into; removes what dead saves have left.

    Raises:
        OSError: The directory cannot be made or written.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        sync_folder(directory.parent)
    clean(directory)
    folder = directory / f"{SAVING}{name}-{secrets.token_hex(4)}"
    folder.mkdir()
    writer = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_of(os.getpid())}
    write_json(folder / _WRITER, writer)
    return folder


def publish(folder: Path, directory: Path, step: int, ranks: int, state: Mapping[str, Any], keep: int | None) -> Path:
    """Turn the written ``folder`` into the newest checkpoint of ``directory``; return its path.

    Args:
        folder: From :func:`begin`; all ranks have written and synced their files.
        directory: Where it is published.
        step: Its step.
        ranks: Data-parallel ranks that wrote it.
        state: What it holds beside tensors.
        keep: How many checkpoints remain; None keeps all but an older one of the same step.

    Raises:
        OSError: It cannot be written or renamed. Nothing is published then.
    """
    write_json(folder / STATE, state)
    sync_files(folder / name for name in (STATE, ".metadata"))
    before = published(directory)
    serial = 1 + max((info.serial for info in before), default=0)
    about = {"format": FORMAT, "version": VERSION, "step": step, "serial": serial, "ranks": ranks}
    seal(folder, {**about, "state_sum": checksum(folder / STATE)})
    target = _free_name(directory, step)
    folder.rename(target)
    try:
        sync_folder(directory)
    except OSError as error:  # it is published all the same
        logger.warning("%s: it may not survive a power failure: %s", target, error)
    old = [info.path for info in before if info.step == step]
    if keep is not None:
        others = [info.path for info in before if info.step != step]
        old += others[: max(0, len(others) + 1 - keep)]
    for path in old:
        remove(path)
    return target


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of ``folder``, whose files are on the disk: what it is, and each file with its size.

    Raises:
        OSError: It cannot be written.
    """
    (folder / _WRITER).unlink()
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {**about, "torch": torch.__version__, "files": files})
    sync_files([folder / MANIFEST])
    sync_folder(folder)


def discard(folder: Path) -> None:
    """Remove the folder of a save that failed, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def clean(directory: Path) -> None:
    """Remove what interrupted saves and removals have left in ``directory``, and say so."""
    for name in left_over(directory):
        folder = directory / name
        if _is_written(folder):
            logger.warning("%s: a process of this machine is still writing it; it is left alone.", folder)
            continue
        logger.warning("%s: removed, an interrupted %s left it.", folder, "save" if SAVING in name else "removal")
        shutil.rmtree(folder, ignore_errors=True)


def _is_written(folder: Path) -> bool:
    """Return whether a living process of this machine writes ``folder``; of other machines nothing can be known."""
    try:
        writer = json.loads((folder / _WRITER).read_text(encoding="utf-8"))
        if writer["host"] != socket.gethostname():
            return False
        os.kill(int(writer["pid"]), 0)
        # A restarted container gives its processes the numbers of the dead ones.
        return bool(writer["started"] == _start_of(int(writer["pid"])))
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _start_of(pid: int) -> str:
    """Return when process ``pid`` started, in the system's own count; the same text for all where it cannot be had."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def _free_name(directory: Path, step: int) -> Path:
    """Return a name that nothing bears: an older checkpoint of the same step stays until the new one is there."""
    name = directory / folder_name(step)
    number = 1
    while name.exists():
        number += 1
        name = directory / f"{folder_name(step)}-{number}"
    return name


def remove(folder: Path) -> None:
    """Remove a published checkpoint, as far as that is possible."""
    # Renamed first, so that what an interruption leaves is never taken for a checkpoint.
    hidden = folder.with_name(f"{REMOVING}{folder.name}-{secrets.token_hex(4)}")
    try:
        folder.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:  # the new checkpoint is there: this is no reason to fail
        logger.warning("%s: it cannot be removed: %s", folder, error)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)
