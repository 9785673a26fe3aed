"""Running Megatron on a host without an accelerator."""

from __future__ import annotations

from .host import skip_if_compiled
from .mode import CpuMode, cpu_mode_wanted, enable_cpu

__all__ = ["CpuMode", "cpu_mode_wanted", "enable_cpu", "skip_if_compiled"]
