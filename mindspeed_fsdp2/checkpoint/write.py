"""Write what the ranks hold into a hidden folder, and publish it when all of it is on the disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointError, FSDP2Error
from .coordination import Coordination
from .progress import Progress
from .publish import discard
from .snapshot import Snapshot
from .store import Written, write_index, write_pieces

T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """Where a save goes; both functions are called on the first rank.

    Attributes:
        what: Begins messages.
        directory: Holds the checkpoints.
        begin: Makes the hidden folder that is written into.
        publish: Given that folder, all of whose tensors are on the disk, and the number of ranks that wrote it, makes
            it a checkpoint and returns its path.
    """

    what: str
    directory: Path
    begin: Callable[[], Path]
    publish: Callable[[Path, int], Path]


def write_snapshot(snapshot: Snapshot, to: Destination, ranks: Coordination) -> Path:
    """Write and publish what the ranks hold (**collective**).

    Raises:
        CheckpointError: It could not be saved. Every rank raises the same error; nothing is published.
    """
    progress = Progress(to.what, sum(piece.tensor.nbytes for piece in snapshot.pieces), ranks.rank == 0)
    folder = ranks.from_first(lambda: explained(to.directory, to.begin), to.what)
    try:
        mine = ranks.agree(lambda: explained(folder, lambda: _write_share(snapshot, folder, ranks, progress)), to.what)
        written = ranks.gather(mine, to.what)
        finish = functools.partial(_finish, written, snapshot, folder, to)
        path = ranks.from_first(lambda: explained(folder, finish), to.what)
    except CheckpointError:
        if ranks.rank == 0:
            discard(folder)
        raise
    progress.finish()
    return path


def _write_share(snapshot: Snapshot, folder: Path, ranks: Coordination, progress: Progress) -> Written:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent}: this rank does not see the folder that rank 0 made in it. Save to storage that all "
            "nodes share."
        )
    return write_pieces(snapshot.pieces, folder, ranks.rank, ranks.ranks, progress)


def _finish(written: list[Written], snapshot: Snapshot, folder: Path, to: Destination) -> Path:
    write_index(written, snapshot.aliases, folder)
    return to.publish(folder, len(written))


def explained(place: Path, act: Callable[[], T]) -> T:
    """Return what ``act`` returns.

    Raises:
        CheckpointError: ``act`` could not write; says why and that nothing is lost.
    """
    try:
        return act()
    except FSDP2Error:
        raise
    except (OSError, RuntimeError) as error:  # the second is how PyTorch's archive writer reports a full disk
        reason = str(error).splitlines()[0] if isinstance(error, RuntimeError) else error.strerror or str(error)
        raise CheckpointError(
            f"{place}: it cannot be written: {reason}. Nothing is published and earlier checkpoints are untouched. "
            "Make room or allow writing there, or pass another directory."
        ) from error
