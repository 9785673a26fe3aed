"""The YAML: reading, checking, and the settings that come of it. Needs no torch."""

from __future__ import annotations

from .notices import check_supported
from .settings import FSDP2Config, Override, Source, load_config

__all__ = ["FSDP2Config", "Override", "Source", "check_supported", "load_config"]
