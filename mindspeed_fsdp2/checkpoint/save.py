"""Save a wrapped model, its optimizer and what a resumed run needs, so that the checkpoint is complete or absent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..apply import Sharded, sharded
from ..errors import CheckpointError
from .coordination import Coordination, coordination
from .publish import begin, folder_name, publish
from .replaced import check_replaced
from .snapshot import Request, Snapshot, take_snapshot
from .write import Destination, write_snapshot

logger = logging.getLogger("mindspeed_fsdp2")

_PENDING = "_mindspeed_fsdp2_save"


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: object = None,
    rank_extra: object = None,
    scheduler: Any = None,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint into ``directory`` and return its folder (**collective** over all ranks).

    Call it between steps. It is written into a hidden folder and renamed when all of it is on the disk: interrupted
    at any moment, it leaves the earlier checkpoints as they are and none that is half there.

    Args:
        directory: Holds the checkpoints of one job; on storage that all ranks share. Made if absent.
        model: A wrapped model. Keys are those of the unwrapped one.
        optimizer: Its optimizer. State is saved by parameter name; reading it changes nothing, even before the first
            step.
        step: Number of finished steps.
        extra: Numbers, strings, lists, dicts, tensors; the same on every rank.
        rank_extra: The same without tensors, each rank's own. A resume on as many ranks gives it back.
        scheduler: Learning-rate scheduler, anything with ``state_dict()`` and ``load_state_dict()``.
        keep: How many checkpoints to keep; the oldest are removed after this one is complete. None keeps all.

    Returns:
        The folder ``directory/step-…``. An older checkpoint of the same step is replaced, unless it holds other keys
        or shapes and so is another model's.

    Raises:
        CheckpointError: It could not be saved. Every rank raises the same error; nothing is published.
    """
    request = Request(directory, optimizer, step, extra, rank_extra, scheduler, keep)
    handle, ranks = ready(model, "save_checkpoint")
    return _write(take_snapshot(handle, request, ranks), Path(directory), request, ranks)


class AsyncSave:
    """A save that goes on in the background.

    Attributes:
        blocking_seconds: How long the call that started it took: collecting, comparing, copying to host memory.
    """

    def __init__(self, write: Callable[[], Path], step: int, started: float) -> None:
        """Start ``write`` in a thread of its own.

        Args:
            write: Writes copies that nobody else changes.
            step: For the log.
            started: When the call began, on the monotonic clock.
        """
        self._told = False
        self._ended = 0.0
        self._started = started
        executor = ThreadPoolExecutor(1, f"save of step {step}")
        self._future = executor.submit(self._run, write)
        executor.shutdown(wait=False)
        self.blocking_seconds = time.monotonic() - started

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its folder.

        Raises:
            CheckpointError: It could not be saved; the same on every rank.
        """
        self._told = True
        return self._future.result()

    def done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._future.done()

    @property
    def total_seconds(self) -> float:
        """Seconds from the call to the end of the save; 0 until then."""
        return self._ended - self._started if self.done() else 0.0

    def untold_error(self) -> BaseException | None:
        """Wait, and return the error that nobody has got from :meth:`wait` yet, if there is one."""
        error = self._future.exception()
        told, self._told = self._told, True
        return None if told else error

    def _run(self, write: Callable[[], Path]) -> Path:
        try:
            return write()
        except CheckpointError as error:  # also for those who never call wait()
            logger.error("%s", error)
            raise
        finally:
            self._ended = time.monotonic()


def save_checkpoint_async(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: object = None,
    rank_extra: object = None,
    scheduler: Any = None,
    keep: int | None = None,
) -> AsyncSave:
    """Copy the state to host memory, then save it in the background (**collective** over all ranks).

    Training may go on as soon as this returns. A save that is still under way is waited for first. Needs host memory
    for this rank's share of model and optimizer.

    Args:
        directory: See :func:`save_checkpoint`.
        model: See :func:`save_checkpoint`.
        optimizer: See :func:`save_checkpoint`.
        step: See :func:`save_checkpoint`.
        extra: See :func:`save_checkpoint`.
        rank_extra: See :func:`save_checkpoint`.
        scheduler: See :func:`save_checkpoint`.
        keep: See :func:`save_checkpoint`.

    Returns:
        A handle. Call its ``wait()`` before the process group is destroyed.

    Raises:
        CheckpointError: Something cannot be saved, or an earlier save failed and nobody asked. Errors of writing come
            from ``wait()``. Every rank raises the same error.
    """
    started = time.monotonic()
    request = Request(directory, optimizer, step, extra, rank_extra, scheduler, keep)
    handle, ranks = ready(model, "save_checkpoint_async")
    snapshot = take_snapshot(handle, request, ranks).staged()
    pending = AsyncSave(lambda: _write(snapshot, Path(directory), request, ranks), step, started)
    vars(handle.module)[_PENDING] = pending
    return pending


def ready(model: nn.Module, caller: str) -> tuple[Sharded, Coordination]:
    """Return a wrapped model's handle and its ranks, with no save under way (**collective**).

    Raises:
        CheckpointError: ``model`` is not wrapped, or an earlier save in the background failed and nobody asked.
    """
    handle = sharded(model)
    if handle is None:
        raise CheckpointError(f"{caller}: the model is not wrapped. Call wrap_model first.")
    pending = vars(handle.module).pop(_PENDING, None)
    failed = pending.untold_error() if isinstance(pending, AsyncSave) else None
    ranks = coordination(handle)
    ranks.agree(lambda: _raise(failed), caller)
    return handle, ranks


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _write(snapshot: Snapshot, directory: Path, request: Request, ranks: Coordination) -> Path:
    """Write and publish (**collective**); what both kinds of save share."""

    def start() -> Path:
        check_replaced(directory, request.step, snapshot.shapes)
        return begin(directory, folder_name(request.step))

    destination = Destination(
        f"save of step {request.step}",
        directory,
        start,
        lambda folder, writers: publish(folder, directory, request.step, writers, snapshot.document, request.keep),
    )
    return write_snapshot(snapshot, destination, ranks)
