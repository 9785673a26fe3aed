"""One process where there could be several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .coordination import Coordination

T = TypeVar("T")


class Alone(Coordination):
    """Agrees with nobody, and needs no process group."""

    def __init__(self) -> None:
        """Connect to nothing."""
        self.rank, self.ranks = 0, 1

    def agree(self, build: Callable[[], T], what: str) -> T:
        """Return what ``build`` returns."""
        return build()

    def gather_all(self, value: T, what: str) -> list[T]:
        """Return ``value`` alone."""
        return [value]

    def gather(self, value: T, what: str) -> list[T]:
        """Return ``value`` alone."""
        return [value]

    def from_first(self, act: Callable[[], T], what: str) -> T:
        """Return what ``act`` returns."""
        return act()

    def close(self) -> None:
        """Do nothing."""
