"""When Megatron is patched: at once, or, with MindSpeed at hand, when Megatron is imported."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from .mindspeed.arrival import Arrival

_MEGATRON = "megatron.training"


@dataclass
class _Waiting:
    arrival: Arrival | None = None


_waiting = _Waiting()


def install() -> None:
    """Patch Megatron (**in place**); a second call does nothing.

    Where MindSpeed is installed and neither it nor Megatron has been imported, it happens when ``megatron.training``
    is: MindSpeed puts stand-ins for Transformer Engine and Apex in place that Megatron looks for while it is imported,
    and ``python -m mindspeed_fsdp2.run`` comes before any line of the script.

    Raises:
        PatchError: A name does not exist in this Megatron, all of them listed; nothing is changed then.
    """
    if _waiting.arrival is None and _mindspeed_comes_first():
        _waiting.arrival = Arrival(_MEGATRON, _arrived)
    if _waiting.arrival is None:
        _patch()


def installed() -> bool:
    """Return whether Megatron is patched in this process; False as well while its import is waited for."""
    return sys.modules.get(f"{__package__}.installation") is not None and _patched()


def uninstall() -> None:
    """Give every patched name back, CPU mode and MindSpeed's included (**in place**); nothing without an installation.

    Raises:
        PatchError: Somebody rebound one of the names since; nothing is restored then.
    """
    if _waiting.arrival is not None:
        _waiting.arrival.stop()
        _waiting.arrival = None
    if installed():
        from . import installation

        installation.uninstall()


def _mindspeed_comes_first() -> bool:
    if _MEGATRON in sys.modules or "mindspeed.megatron_adaptor" in sys.modules:
        return False
    spec = importlib.util.find_spec("mindspeed")
    folders = spec.submodule_search_locations if spec is not None else None
    there = any(Path(folder, "megatron_adaptor.py").is_file() for folder in folders or ())
    return there and importlib.util.find_spec(_MEGATRON) is not None


def _arrived() -> None:
    _waiting.arrival = None
    _patch()


def _patch() -> None:
    from . import installation  # importing it imports Megatron

    installation.install()


def _patched() -> bool:
    from . import installation

    return installation.installed()
