"""The waist: everything before the plan decides and touches nothing, everything after it acts and decides nothing."""

from __future__ import annotations

from .build import build_plan
from .index import below_wrappers
from .plan import FSDP2Plan, Unit
from .select import DefaultUnits
from .ties import Tie

__all__ = ["DefaultUnits", "FSDP2Plan", "Tie", "Unit", "below_wrappers", "build_plan"]
