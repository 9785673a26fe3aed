"""How ranks tell each other of their results without the collectives that are being checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Documented in torch.distributed, which does not re-export them in the way type checkers ask for.
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

PREFIX = "mindspeed_fsdp2/doctor"


class Board:
    """Values by key that every rank can write and read. One object per thread: a store serves one caller at a time.

    Args:
        connect: Returns a connection of its own to the store of the process group.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        # A launcher that starts the ranks again keeps the store.
        prefix = f"{PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = PrefixStore(prefix, connect())

    def another(self) -> Board:
        """Return the same board for another thread."""
        return Board(self._connect)

    def put(self, key: str, value: object) -> None:
        """Write ``value``, which JSON can carry, under ``key``."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float) -> Any:
        """Return the value under ``key``, or None if nobody wrote it within ``seconds``."""
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:  # how a store says that the time is over; a dead one cannot answer either
            return None
        return json.loads(self._store.get(key))


def file_connection(path: Path, ranks: int) -> Callable[[], Store]:
    """Return what connects to the store in the file ``path`` that all ranks see."""
    return lambda: FileStore(str(path), ranks)


def launched_connection(ranks: int, seconds: float) -> Callable[[], Store]:
    """Return what connects to the store of the launcher, at ``MASTER_ADDR`` and ``MASTER_PORT``, as a client."""

    def connect() -> Store:
        limit = timedelta(seconds=seconds)
        return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, False, limit)

    return connect
