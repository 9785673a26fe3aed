"""The form of CPU mode's table: stand-ins grouped by what they are for. Turned into rows of the patcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ..patcher import Patch

Make = Callable[[Any], Any]
"""Given what a name holds, returns what CPU mode binds it to."""

REMOVE_WHEN = "Megatron trains on CPU by itself: it takes the device from one place and does not spell it cuda."


@dataclass(frozen=True)
class StandIn:
    """Names that get the same replacement.

    Attributes:
        owners: Modules or classes (``module`` or ``module:Class``), separated by spaces. Every owner that re-exports a
            name by value must be listed.
        names: Attribute names, separated by spaces. Those that this version of torch or Megatron lacks are skipped.
        make: The replacement's maker.
        required: Whether it is an error when none of the names exists.
        copied: Whether modules that imported the names by value are redirected as well; for functions only.
    """

    owners: str
    names: str
    make: Make
    required: bool = True
    copied: bool = False

    def targets(self) -> tuple[str, ...]:
        """Return the names as targets of the patcher, ``module:attr`` or ``module:Class.attr``."""
        return tuple(
            f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"
            for name in self.names.split()
            for owner in self.owners.split()
        )


@dataclass(frozen=True)
class Redirection:
    """One group of CPU mode's table.

    Attributes:
        purpose: What the group provides, a few words.
        why: What goes wrong without it on a host that has no accelerator.
        stand_ins: What it binds.
    """

    purpose: str
    why: str
    stand_ins: tuple[StandIn, ...]

    def patches(self) -> Iterator[Patch]:
        """Yield the group as rows of the patcher."""
        for stand_in in self.stand_ins:
            yield Patch(
                name=f"cpu: {self.purpose} ({stand_in.names.split()[0]})",
                targets=stand_in.targets(),
                make=stand_in.make,
                why=self.why,
                remove_when=REMOVE_WHEN,
                required=stand_in.required,
                also_aliases=stand_in.copied,
            )


def fixed(stand_in: object) -> Make:
    """Return a maker that binds ``stand_in`` whatever the name held."""
    return lambda original: stand_in


def apart(stand_in: Any) -> Make:
    """Return a maker that binds each name to a function of its own, which does what ``stand_in`` does.

    torch.compile tells torch's functions apart by identity and refuses one that bears two names with different rules.
    """
    return lambda original: FunctionType(stand_in.__code__, stand_in.__globals__, stand_in.__name__)
