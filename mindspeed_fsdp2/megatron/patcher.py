"""Rebind names of a host framework by a table, and undo it.

Knows neither FSDP nor any particular framework. A patch rebinds *names*; it never edits a function body. Every row is
resolved and checked before the first name is touched, so an installation that fails leaves the host as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import PatchError
from .names import ABSENT, Site, holders, resolve
from .names import accepts as accepts
from .names import resolves as resolves


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


class _Binding(NamedTuple):
    """``own`` is what the owner's namespace itself held: ``ABSENT`` where it inherited or lacked the name."""

    site: Site
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
    _covered: list[_Binding] = field(default_factory=list, repr=False)

    def uninstall(self) -> None:
        """Put back, **in place**, every name as it was found; a second call does nothing.

        Raises:
            PatchError: Somebody rebound one of our names after us; all such names are listed and nothing is restored.
        """
        lost = [b.site.label for b in self._undo if not (_is_ours(b) or b.stacks)]
        if lost:
            what = "cannot be restored, it was rebound after mindspeed_fsdp2 had patched it. Undo that patch first."
            raise PatchError("\n".join(f"{label}: {what}" for label in lost))
        self.set_aside()
        self._covered = []

    def set_aside(self) -> None:
        """Put back, **in place**, every name that is still ours, until :func:`install` is given this log.

        A name that somebody has rebound since stays theirs, with ours below it.
        """
        self._covered += [b for b in self._undo if not _is_ours(b)]
        self._undo = [b for b in self._undo if _is_ours(b)]
        for (_, attr, original), _, ours, keep, _ in self._undo:
            for module in [] if keep is None else holders(attr, ours):
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


def _is_ours(binding: _Binding) -> bool:
    return vars(binding.site.owner).get(binding.site.attr, ABSENT) is binding.ours


def install(table: Sequence[Patch], before: Installation | None = None) -> Installation:
    """Rebind, **in place**, every target of every row that applies, in the table's order, and return the undo log.

    Args:
        table: The rows.
        before: The log of an installation of the same table that was set aside.

    Raises:
        PatchError: A row has no existing target, two rows claim one name, a module fails to import, or a name cannot
            be set. Every problem is listed, one line each, and nothing stays changed.
    """
    done = Installation()
    problems: list[str] = []
    resolved: list[tuple[Patch, list[Site]]] = []
    claimed: dict[tuple[int, str], str] = {}
    covered = before._covered if before is not None else []
    there = {(id(b.site.owner), b.site.attr) for b in covered}
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
    free = [(row, [site for site in sites if (id(site.owner), site.attr) not in there]) for row, sites in resolved]
    for row, bindings in [(row, _bindings(row, sites)) for row, sites in free]:
        _apply(done, row, bindings)
    done._undo[:0] = covered
    return done


def _sites(row: Patch, problems: list[str]) -> list[Site]:
    """The names the row rebinds, each once; what is wrong with the row is appended to ``problems``."""
    sites: dict[tuple[int, str], Site] = {}
    faults: list[str] = []
    for target in row.targets:
        try:
            site = resolve(target)
        except PatchError as error:
            faults.append(f"{row.name}: {error}")
            continue
        if site is None or (site.held is ABSENT and not row.creates):
            continue
        sites[id(site.owner), site.attr] = site
        if row.also_aliases and not isinstance(site.owner, ModuleType):
            faults.append(f"{row.name}: also_aliases does not follow {target}. Use it with module:attr targets only.")
        elif row.also_aliases and site.held is not ABSENT:
            for module in holders(site.attr, site.held):
                sites.setdefault((id(module), site.attr), Site(module, site.attr, site.held))
    if not sites and not faults and row.required:
        faults.append(f"{row.name}: none of its targets exists: {', '.join(row.targets)}. Name the new place.")
    problems += faults
    return list(sites.values())


def _bindings(row: Patch, sites: Sequence[Site]) -> list[_Binding]:
    """Make the replacements; touches nothing."""
    made: dict[int, Any] = {}
    bindings = []
    for site in sites:
        if id(site.held) not in made:
            made[id(site.held)] = row.make(site.held)
        ours = made[id(site.held)]
        if ours is site.held:
            raise PatchError(f"{row.name}: make returned what {site.label} holds already. Use applies to skip a row.")
        keep = holders(site.attr, ours) if row.also_aliases and site.held is not ABSENT else None
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
