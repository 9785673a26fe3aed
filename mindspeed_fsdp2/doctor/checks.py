"""What a check is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


class WrongResult(Exception):
    """A check got an answer, and it is not the right one."""


class NotApplicable(Exception):
    """A check has nothing to look at on this machine."""


class NotNeeded(Exception):
    """Something does not work, and training knows another way."""


@dataclass(frozen=True)
class Context:
    """Where a check runs.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        device: This rank's device.
        host_backend: Whether the process group also carries host tensors of a machine with an accelerator.
        folder: Folder for checkpoints that every rank sees; None where there is no such folder.
    """

    rank: int
    ranks: int
    device: torch.device
    host_backend: bool
    folder: Path | None


@dataclass(frozen=True)
class Check:
    """One check. Every rank runs it.

    Attributes:
        name: Shown in the report.
        body: Returns a detail for the report, or ``""``. Raises ``WrongResult`` for a wrong answer, ``NotApplicable``,
            or whatever PyTorch raises.
        needed: Whether training needs it; where it does not, what cannot be done at all is only noted. A wrong answer
            is a failure either way.
    """

    name: str
    body: Callable[[Context], str]
    needed: bool = True


def all_checks() -> list[Check]:
    """Return every check, in the order in which they run: what later ones build on comes first."""
    from . import collectives, meshes, pinning, saving, training

    return [
        *collectives.checks(),
        *meshes.checks(),
        *pinning.checks(),
        *training.checks(),
        *saving.checks(),
    ]
