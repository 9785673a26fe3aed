"""Rebind names of a host framework by a table, and undo it.

Knows neither FSDP nor any particular framework. A patch rebinds *names*; it never edits a function body. Every row is
resolved and checked before the first name is touched, so an installation that fails leaves the host as it was.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..errors import PatchError

ABSENT: Final[Any] = object()
"""What ``make`` receives where the name does not exist yet (only in rows with ``creates``)."""

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


@dataclass(frozen=True)
class Patch:
    """One row of a patch table.

    Attributes:
        name: Stable identifier, printed in errors.
        targets: Names to rebind, ``module:attr`` or ``module:Class.attr``: the by-value aliases of one object, in all
            versions of the host. Those that exist are rebound; a row of which none exists is an error.
        make: Given what a name holds (as in the class ``__dict__``, so a ``staticmethod`` stays one), returns its
            replacement. Called once per distinct object: aliases share one replacement, while a name that somebody
            else has replaced before gets its own.
        why: What breaks without this row, one sentence.
        remove_when: The change of the host that makes the row unnecessary.
        applies: Whether the row is needed here, decided by names and signatures (:func:`resolves`, :func:`accepts`),
            never by version strings. ``None`` means always.
        required: Whether a row without any existing target is an error, rather than skipped.
        also_aliases: Rebind the same attribute name in every loaded module that holds the very same object; when
            uninstalling, also in modules that copied the replacement since. Only for ``module:attr`` targets.
        creates: Whether the name may be absent from an existing module or class: it is added, and removed again.
        stacks: Whether others may wrap the replacement in their turn, as torch.distributed does with
            ``sys.excepthook``. Uninstalling then leaves their wrapper, and with it the replacement that it calls.
    """

    name: str
    targets: tuple[str, ...]
    make: Callable[[Any], Any]
    why: str
    remove_when: str
    applies: Callable[[], bool] | None = None
    required: bool = True
    also_aliases: bool = False
    creates: bool = False
    stacks: bool = False


class _Site(NamedTuple):
    """A name to rebind and what it holds, inherited or not; ``ABSENT`` if nothing."""

    owner: Any
    attr: str
    held: Any

    @property
    def label(self) -> str:
        owner = self.owner
        place = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{place}.{self.attr}"


class _Binding(NamedTuple):
    """``own`` is what the owner's namespace itself held: ``ABSENT`` where it inherited or lacked the name."""

    site: _Site
    own: Any
    ours: Any
    keep: list[ModuleType] | None  # held ``ours`` under this name before we did; None: copies are not followed
    stacks: bool


@dataclass
class Installation:
    """The undo log of one :func:`install`, in order of application.

    Attributes:
        applied: For each applied row, the names that were rebound, as ``package.module.Class.attr``.
        skipped: For each row left out, the reason.
    """

    applied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    _undo: list[_Binding] = field(default_factory=list, repr=False)

    def uninstall(self) -> None:
        """Put back, **in place**, every name as it was found; a second call does nothing.

        Raises:
            PatchError: Somebody rebound one of our names after us; all such names are listed and nothing is restored.
        """
        held = [vars(b.site.owner).get(b.site.attr, ABSENT) is b.ours for b in self._undo]
        lost = [b.site.label for b, ours in zip(self._undo, held) if not (ours or b.stacks)]
        if lost:
            what = "cannot be restored, it was rebound after mindspeed_fsdp2 had patched it. Undo that patch first."
            raise PatchError("\n".join(f"{label}: {what}" for label in lost))
        self._undo = [b for b, ours in zip(self._undo, held) if ours]
        for (_, attr, original), _, ours, keep, _ in self._undo:
            for module in [] if keep is None else _holders(attr, ours):
                if module not in (keep or ()):
                    setattr(module, attr, original)
        self._roll_back()

    def _roll_back(self) -> None:
        """Restore newest first, without asking who holds the names now."""
        while self._undo:
            (owner, attr, _), own, *_ = self._undo.pop()
            if own is ABSENT:
                delattr(owner, attr)
            else:
                setattr(owner, attr, own)


def install(table: Sequence[Patch]) -> Installation:
    """Rebind, **in place**, every target of every row that applies, in the table's order, and return the undo log.

    Raises:
        PatchError: A row has no existing target, two rows claim one name, a module fails to import, or a name cannot
            be set. Every problem is listed, one line each, and nothing stays changed.
    """
    done = Installation()
    problems: list[str] = []
    resolved: list[tuple[Patch, list[_Site]]] = []
    claimed: dict[tuple[int, str], str] = {}
    for row in table:
        if row.applies is not None and not row.applies():
            done.skipped[row.name] = "not needed here"
            continue
        sites = _sites(row, problems)
        for site in sites:
            first = claimed.setdefault((id(site.owner), site.attr), row.name)
            if first != row.name:
                problems.append(f"{row.name}: {site.label} is patched by the row {first} already. Merge the two rows.")
        if sites:
            resolved.append((row, sites))
        else:
            done.skipped[row.name] = "none of its targets exists"
    if problems:
        raise PatchError("\n".join(problems))
    for row, bindings in [(row, _bindings(row, sites)) for row, sites in resolved]:
        _apply(done, row, bindings)
    return done


def resolves(target: str) -> bool:
    """Whether ``module:attr`` or ``module:Class.attr`` exists; imports the module (``PatchError`` if that fails)."""
    site = _resolve(target)
    return site is not None and site.held is not ABSENT


def accepts(target: str, parameter: str) -> bool:
    """Whether the callable at ``target`` exists and has a parameter of that name; ``**kwargs`` does not count."""
    site = _resolve(target)
    if site is None or site.held is ABSENT:
        return False
    function = site.held.__func__ if isinstance(site.held, staticmethod | classmethod) else site.held
    return parameter in inspect.signature(function).parameters


def _sites(row: Patch, problems: list[str]) -> list[_Site]:
    """The names the row rebinds, each once; what is wrong with the row is appended to ``problems``."""
    sites: dict[tuple[int, str], _Site] = {}
    faults: list[str] = []
    for target in row.targets:
        try:
            site = _resolve(target)
        except PatchError as error:
            faults.append(f"{row.name}: {error}")
            continue
        if site is None or (site.held is ABSENT and not row.creates):
            continue
        sites[id(site.owner), site.attr] = site
        if row.also_aliases and not isinstance(site.owner, ModuleType):
            faults.append(f"{row.name}: also_aliases does not follow {target}. Use it with module:attr targets only.")
        elif row.also_aliases and site.held is not ABSENT:
            for module in _holders(site.attr, site.held):
                sites.setdefault((id(module), site.attr), _Site(module, site.attr, site.held))
    if not sites and not faults and row.required:
        faults.append(f"{row.name}: none of its targets exists: {', '.join(row.targets)}. Name the new place.")
    problems += faults
    return list(sites.values())


def _bindings(row: Patch, sites: Sequence[_Site]) -> list[_Binding]:
    """Make the replacements; touches nothing."""
    made: dict[int, Any] = {}
    bindings = []
    for site in sites:
        if id(site.held) not in made:
            made[id(site.held)] = row.make(site.held)
        ours = made[id(site.held)]
        if ours is site.held:
            raise PatchError(f"{row.name}: make returned what {site.label} holds already. Use applies to skip a row.")
        keep = _holders(site.attr, ours) if row.also_aliases and site.held is not ABSENT else None
        bindings.append(_Binding(site, vars(site.owner).get(site.attr, ABSENT), ours, keep, row.stacks))
    return bindings


def _apply(done: Installation, row: Patch, bindings: Sequence[_Binding]) -> None:
    for binding in bindings:
        try:
            setattr(binding.site.owner, binding.site.attr, binding.ours)
        except (AttributeError, TypeError) as error:
            done._roll_back()
            raise PatchError(f"{row.name}: {binding.site.label} cannot be set: {error}. Nothing is patched.") from error
        done._undo.append(binding)
    done.applied[row.name] = tuple(binding.site.label for binding in bindings)


def _resolve(target: str) -> _Site | None:
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
    return _Site(owner, attr, vars(owner)[attr] if attr in vars(owner) else lookup(owner, attr, ABSENT))


def _holders(attr: str, held: Any) -> list[ModuleType]:
    """Loaded modules whose own namespace holds this very object under this name."""
    # A copy, because another thread may be importing; vars(), so that modules with a lazy __getattr__ stay asleep.
    return [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and vars(m).get(attr, ABSENT) is held]
