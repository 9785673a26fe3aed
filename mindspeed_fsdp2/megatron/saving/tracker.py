"""Megatron's tracker file, ``latest_checkpointed_iteration.txt``, replaced in one step."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from megatron.training import get_args

from ...checkpoint.publish import sync_folder
from ...checkpoint.store import sync_files

TRACKER: Final = "latest_checkpointed_iteration.txt"
_UNFINISHED = ".unfinished"


def stage(directory: Path, text: str) -> None:
    """Write ``text`` beside the tracker of ``directory``, so that replacing it later needs no room on the disk.

    Raises:
        OSError: It cannot be written.
    """
    path = directory / f"{TRACKER}{_UNFINISHED}"
    path.write_text(text, encoding="utf-8")
    sync_files([path])


class _Replacement(io.StringIO):
    """What Megatron writes into; leaving its ``with`` block replaces the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = self.getvalue()
        super().__exit__(kind, error, trace)
        if kind is not None:
            return
        staged = self._path.with_name(self._path.name + _UNFINISHED)
        if not staged.is_file() or staged.read_text(encoding="utf-8") != text:
            stage(self._path.parent, text)
        os.replace(staged, self._path)
        sync_folder(self._path.parent)


def wrap_open(original: Any) -> Callable[..., Any]:
    """Return ``open`` (or a stand-in of it) that writes the tracker into another file first and then renames it.

    The original empties the file before it writes: killed in between, no run finds its checkpoints again.

    Args:
        original: Megatron's; ABSENT where its module uses the built-in.
    """
    ordinary: Callable[..., Any] = original if callable(original) else open

    @functools.wraps(ordinary)
    def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if mode == "w" and os.path.basename(os.fspath(file)) == TRACKER and "://" not in os.fspath(file):
            if getattr(get_args(), "use_torch_fsdp2", False):
                return _Replacement(Path(file))
        return ordinary(file, mode, *rest, **named)

    return opened


class _Storage:
    """Megatron's storage client with that ``open``."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.open = wrap_open(lambda *rest, **named: original.open(*rest, **named))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def wrap_storage(original: Any) -> Any:
    """Return a storage client (``maybe_msc``, from 0.19 on) whose ``open`` replaces the tracker in one step."""
    return _Storage(original)
