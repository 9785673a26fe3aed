"""Models built on the meta device: recorded, sharded, and given each rank's part of the values."""

from __future__ import annotations

from .build import meta_init

__all__ = ["meta_init"]
