"""Write a directory of Hugging Face weights so that it is complete or absent, and can be gone on with.

Everything is written into a hidden folder beside the directory::

    .exporting-NAME/plan.json     what is written; another plan starts again
    .exporting-NAME/lock          held by the process that writes
    .exporting-NAME/files/        what becomes the directory, renamed when it is complete
    .exporting-NAME/done/         one small file for each finished file: its size and checksum
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import CheckpointError
from .folder import read_json
from .hf_shards import WeightFile
from .hf_targets import check_free
from .publish import sync_folder, write_json
from .store import sync_files

logger = logging.getLogger("mindspeed_fsdp2")

RECORD = "mindspeed_fsdp2.json"  # in the finished directory: where it comes from, and checksums
_PART = ".part"


class WorkFolder:
    """The hidden folder. All but :meth:`done` and :attr:`files` is for the first rank.

    Attributes:
        target: The directory that will be.
        path: The hidden folder.
        files: The folder that files are written into.
    """

    def __init__(self, target: Path) -> None:
        """Change nothing yet."""
        self.target = target
        self.path = target.parent / f".exporting-{target.name}"
        self.files = self.path / "files"
        self._done = self.path / "done"
        self._lock: IO[bytes] | None = None

    def begin(self, plan: Mapping[str, Any], resume: bool) -> None:
        """Make the folder, or go on with the one that an interrupted export of the same plan has left.

        Args:
            plan: JSON that tells this export from any other.
            resume: Whether files of an earlier attempt may be kept.

        Raises:
            CheckpointError: The directory exists, or another process writes it.
            OSError: It cannot be written.
        """
        check_free(self.target)
        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._take_lock()
            self._make(plan, resume)
        except BaseException as error:
            if new and isinstance(error, OSError):  # a full disk: there is nothing to go on with
                shutil.rmtree(self.path, ignore_errors=True)
            self.release()
            raise

    def _make(self, plan: Mapping[str, Any], resume: bool) -> None:
        left = read_json(self.path / "plan.json")
        if left is not None and not (resume and left == plan):
            logger.warning("%s: removed, an interrupted export of something else left it.", self.path)
        if not (resume and left == plan):
            for folder in (self._done, self.files):  # in this order: without its mark a file does not count
                shutil.rmtree(folder, ignore_errors=True)
            write_json(self.path / "plan.json", plan)
        self.files.mkdir(exist_ok=True)
        self._done.mkdir(exist_ok=True)

    def _take_lock(self) -> None:
        self._lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise CheckpointError(
                f"{self.target}: another process is exporting to it. Wait for it, or name another directory."
            ) from None
        except OSError:  # a file system without locks
            logger.debug("%s: it cannot be locked.", self.path)

    def done(self, file: WeightFile) -> bool:
        """Return whether ``file`` is finished."""
        mark = read_json(self._mark(file.name))
        try:
            return isinstance(mark, dict) and (self.files / file.name).stat().st_size == mark["size"] == file.size
        except (OSError, KeyError):
            return False

    def mark(self, name: str, size: int, checksum: str) -> None:
        """Note that the file is finished and on the disk."""
        mark = self._mark(name)
        write_json(mark.with_suffix(_PART), {"size": size, "crc32": checksum})
        sync_files([mark.with_suffix(_PART)])
        mark.with_suffix(_PART).rename(mark)

    def publish(self, texts: Mapping[str, str], copies: Mapping[str, Path], about: Mapping[str, Any]) -> Path:
        """Turn the folder into the directory and return it.

        Args:
            texts: Name -> content of further files.
            copies: Name -> file to copy.
            about: What the record tells of the source.

        Raises:
            CheckpointError: The directory has come into being meanwhile.
            OSError: It cannot be written.
        """
        for name, source in copies.items():
            shutil.copyfile(source, self.files / name)
        for name, text in texts.items():
            (self.files / name).write_text(text, encoding="utf-8")
        marks = {path.name.removesuffix(".json"): read_json(path) for path in sorted(self._done.glob("*.json"))}
        write_json(self.files / RECORD, {**about, "files": marks})
        sync_files(path for path in self.files.iterdir() if path.name not in marks)
        sync_folder(self.files)
        check_free(self.target)
        self.files.rename(self.target)  # takes the place of an empty directory, never of another one
        sync_folder(self.target.parent)
        self.discard()
        return self.target

    def discard(self) -> None:
        """Remove the hidden folder, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)  # as long as it is locked: afterwards it may be another's
        self.release()

    def release(self) -> None:
        """Let another process go on with the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _mark(self, name: str) -> Path:
        return self._done / f"{name}.json"


class FileWriter:
    """Writes one file tensor by tensor, the next tensor being fetched meanwhile; holds two tensors at most."""

    def __init__(self, work: WorkFolder, file: WeightFile) -> None:
        """Open it.

        Raises:
            OSError: It cannot be written.
        """
        self._work, self._file = work, file
        self._path = work.files / f"{file.name}{_PART}"
        self._stream = self._path.open("wb")
        self._checksum = self._size = 0
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, f"write {file.name}")
        try:
            self._write(memoryview(file.header()))
        except BaseException:  # an interrupt too must not leave the thread and the open file behind; it goes on
            self.close()
            raise

    def put(self, tensor: torch.Tensor) -> None:
        """Write the next tensor of the file; ``tensor`` must not change afterwards.

        Raises:
            OSError: An earlier one could not be written.
        """
        self._wait()
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            self._pending = self._thread.submit(self._write, memoryview(raw.numpy()))

    def finish(self) -> None:
        """Put it on the disk under its name.

        Raises:
            OSError: It could not be written.
        """
        try:
            self._wait()
            if self._size != self._file.size:
                raise OSError(f"{self._size} bytes were written to {self._file.name}, not {self._file.size}")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        finally:
            self.close()
        self._path.rename(self._path.with_name(self._file.name))
        self._work.mark(self._file.name, self._size, f"{self._checksum:08x}")

    def close(self) -> None:
        """Stop writing."""
        self._thread.shutdown()
        with contextlib.suppress(OSError):  # told before, or the file does not count
            self._stream.close()

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, data: memoryview) -> None:
        self._stream.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += data.nbytes
