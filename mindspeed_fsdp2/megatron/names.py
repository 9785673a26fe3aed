"""Names of a host framework, ``module:attr`` or ``module:Class.attr``: whether they exist and what they hold."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..errors import PatchError

ABSENT: Final[Any] = object()
"""What ``make`` receives where the name does not exist yet (only in rows with ``creates``)."""

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


class Site(NamedTuple):
    """A name to rebind and what it holds, inherited or not; ``ABSENT`` if nothing."""

    owner: Any
    attr: str
    held: Any

    @property
    def label(self) -> str:
        """How messages call it."""
        owner = self.owner
        place = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{place}.{self.attr}"


def resolves(target: str) -> bool:
    """Whether ``module:attr`` or ``module:Class.attr`` exists; imports the module (``PatchError`` if that fails)."""
    site = resolve(target)
    return site is not None and site.held is not ABSENT


def accepts(target: str, parameter: str) -> bool:
    """Whether the callable at ``target`` exists and has a parameter of that name; ``**kwargs`` does not count."""
    site = resolve(target)
    if site is None or site.held is ABSENT:
        return False
    function = site.held.__func__ if isinstance(site.held, staticmethod | classmethod) else site.held
    return parameter in inspect.signature(function).parameters


def resolve(target: str) -> Site | None:
    """The name, or None where this version of the host lacks the module or the class."""
    if not _TARGET.match(target):
        raise PatchError(f"the target {target!r} is malformed. Write module:attr or module:Class.attr.")
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        # Only the absence of the module itself, or of a package above it, means another version of the host.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            return None
        raise PatchError(f"{module_name} fails to import: {error}. Repair the installation.") from error
    *parents, attr = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, ABSENT)
        if owner is ABSENT:
            return None
        if not isinstance(owner, type):
            raise PatchError(f"the target {target!r} goes through {parent}, which is not a class.")
    # getattr on a class would unwrap a staticmethod, and putting that back would not restore identity.
    lookup = inspect.getattr_static if isinstance(owner, type) else getattr
    return Site(owner, attr, vars(owner)[attr] if attr in vars(owner) else lookup(owner, attr, ABSENT))


def holders(attr: str, held: Any) -> list[ModuleType]:
    """Loaded modules whose own namespace holds this very object under this name."""
    # A copy, because another thread may be importing; vars(), so that modules with a lazy __getattr__ stay asleep.
    return [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and vars(m).get(attr, ABSENT) is held]
