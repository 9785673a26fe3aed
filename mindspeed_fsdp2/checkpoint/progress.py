"""A line of log now and then while a long save or load is under way."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("mindspeed_fsdp2")

_EVERY_S = 10.0


class Progress:
    """Counts bytes and says how far this rank is, at most every ten seconds."""

    def __init__(self, what: str, total: int, speaks: bool) -> None:
        """Start at 0.

        Args:
            what: Begins each line, e.g. ``"saving step 10"``.
            total: Bytes of this rank.
            speaks: Whether this rank logs.
        """
        self._what = what
        self._total = total
        self._speaks = speaks
        self._done = 0
        self._start = self._last = time.monotonic()

    def add(self, size: int) -> None:
        """Count ``size`` bytes more."""
        self._done += size
        now = time.monotonic()
        if self._speaks and now - self._last >= _EVERY_S:
            self._last = now
            logger.info("%s: %.1f of %.1f GB on this rank", self._what, self._done / 1e9, self._total / 1e9)

    def finish(self) -> None:
        """Say how long it took."""
        if self._speaks:
            seconds = time.monotonic() - self._start
            logger.info("%s: %.1f GB on this rank in %.1f s", self._what, self._total / 1e9, seconds)
