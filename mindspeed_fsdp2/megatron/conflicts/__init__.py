"""What does not go together with ``--use-torch-fsdp2``, as a table with one row per conflict."""

from __future__ import annotations

from .check import CONFLICTS, check_conflicts, check_yaml_arguments, conflicts_table, find_conflicts, notices
from .notices import NOTICES
from .row import Conflict, Flag, Situation, Text

__all__ = [
    "CONFLICTS",
    "NOTICES",
    "Conflict",
    "Flag",
    "Situation",
    "Text",
    "check_conflicts",
    "check_yaml_arguments",
    "conflicts_table",
    "find_conflicts",
    "notices",
]
