"""The one installation of this process: Megatron is patched, given back, and patched anew around MindSpeed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import PatchError
from .mindspeed.beside import BesideMindSpeed
from .patcher import Installation
from .patcher import install as install_table
from .patches import PATCHES, STARTUP


@contextmanager
def _aside() -> Iterator[None]:
    """Give Megatron's names back for a while (**in place**); they are patched anew at the end."""
    patches, _installed.patches = _installed.patches, None
    if patches is None:
        yield
        return
    on_cpu = STARTUP.leave_cpu_mode()
    patches.set_aside()
    _installed.aside = True
    try:
        yield
    finally:
        _installed.aside = False
        _installed.patches = install_table(PATCHES, patches)
        if on_cpu:
            STARTUP.resume_cpu_mode()


@dataclass
class _Installed:
    """The one installation of this process: a second import must find it, or every name would be wrapped twice."""

    patches: Installation | None = None
    beside: BesideMindSpeed | None = None
    aside: bool = False


_installed = _Installed()


def installed() -> bool:
    """Return whether Megatron is patched in this process."""
    return _installed.patches is not None or _installed.aside


def install() -> None:
    """Patch Megatron (**in place**); a second call does nothing.

    Raises:
        PatchError: A name does not exist in this Megatron, all of them listed; nothing is changed then.
    """
    if installed():
        return
    if "megatron.training" not in sys.modules:
        _require_megatron()
    beside = BesideMindSpeed(_aside)
    beside.begin()
    try:
        _installed.patches = install_table(PATCHES)
    except PatchError:
        beside.end()
        raise
    _installed.beside = beside


def uninstall() -> None:
    """Give every patched name back, CPU mode and MindSpeed's included (**in place**); nothing without an installation.

    Raises:
        PatchError: Somebody rebound one of the names since; nothing is restored then.
    """
    if _installed.patches is None:
        return
    STARTUP.leave_cpu_mode()  # first: it may lie over our own names
    _installed.patches.uninstall()
    _installed.patches = None
    if _installed.beside is not None:
        _installed.beside.end()
        _installed.beside = None


def _require_megatron() -> None:
    try:
        import megatron.training  # noqa: F401
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise PatchError(
            "megatron.training cannot be imported. Install megatron-core 0.17 or newer (Python 3.12), or put a "
            "Megatron-LM checkout on PYTHONPATH."
        ) from None
