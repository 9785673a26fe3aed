"""What is under way on a wrapped model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepState:
    """Set by context managers, read by the hooks of one wrapped model.

    Attributes:
        holding: Inside a micro-batch that is not the step's last.
        unfinished: A micro-batch was held, and the last one's backward has not begun yet.
        gathered: Inside ``full_parameters``, where forwards must not reshard.
    """

    holding: bool = False
    unfinished: bool = False
    gathered: bool = False
