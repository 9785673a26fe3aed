"""Everything this package raises on purpose.

Each class also derives from the built-in that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations


class FSDP2Error(Exception):
    """Base of all errors raised by mindspeed_fsdp2."""


class ConfigError(FSDP2Error, ValueError):
    """The YAML file (or mapping) is wrong. The message lists every problem, one per line."""


class ModulePathError(ConfigError):
    """A module path cannot be parsed, or selects no module."""


class ConflictError(FSDP2Error, ValueError):
    """Command-line flags, environment and YAML do not go together. One line per conflict."""


class PlanError(FSDP2Error, ValueError):
    """The configuration is well formed but cannot be applied to this model."""


class PatchError(FSDP2Error, RuntimeError):
    """A name of the host framework cannot be patched or restored."""


class CheckpointError(FSDP2Error, RuntimeError):
    """A checkpoint cannot be written or read as asked."""
