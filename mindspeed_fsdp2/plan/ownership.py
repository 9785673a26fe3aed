"""Which unit owns which parameter, and in which order units are sharded."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import torch
from torch import nn

from ..errors import PlanError
from .index import ModelIndex

ROOT = ("",)
IGNORED = "an ignored module"


@dataclass
class Ownership:
    """Parameters by owner, each under its first name.

    Attributes:
        units: Unit -> its parameters, in the order of application, the root last.
        ignored: Parameters below ignored modules.
        buffers: All buffers.
        parameterless: Modules without any parameter at or below them.
        root_leaves: Modules, other than the root and units, that hold parameters of the root unit directly.
        shared: ``(parameter, first owner, second owner)`` wherever two owners hold the same parameter.
        shared_modules: ``(second name, first name, first owner, second owner)`` wherever a module with parameters
            belongs to two owners, one under each name.
    """

    units: dict[tuple[str, ...], dict[str, nn.Parameter]]
    ignored: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    parameterless: list[str] = field(default_factory=list)
    root_leaves: list[str] = field(default_factory=list)
    shared: list[tuple[str, str, str]] = field(default_factory=list)
    shared_modules: list[tuple[str, str, str, str]] = field(default_factory=list)


def order_units(
    groups: Sequence[tuple[str, ...]],
    ignored: Sequence[str],
    index: ModelIndex,
    where: str,
    optional: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Return the units in the reverse of registration order as far as nesting allows; the root last.

    Args:
        groups: The units, the root left out.
        ignored: Modules that stay whole.
        index: The model.
        where: Place of the list of units, for messages.
        optional: Those of ``ignored`` that ``optional_modules`` lists.

    Raises:
        PlanError: A unit lies inside an ignored module, or two units of several modules enclose each other.
    """
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    shared = len(index.first_name) > len(index.modules)
    if not ignored and not shared and all(len(group) == 1 for group in groups):
        # Registration order puts parents first, so its reverse puts nested units first.
        return [*sorted(groups, key=lambda group: position[group[0]], reverse=True), ROOT]
    unit_of = {fqn: group for group in groups for fqn in group}
    around = _enclosing(unit_of, index)
    skip = set(ignored)
    problems = [
        f"{where}: {fqn!r} lies inside the {'optional' if outer in optional else 'ignored'} module {outer!r}. Remove "
        "it from one of the two lists."
        for fqn in unit_of
        for outer in [next((a for a in (fqn, *around[fqn]) if a in skip), None)]
        if outer is not None
    ]
    if problems:
        raise PlanError("\n".join(problems))
    return [*_sorted_units(groups, unit_of, around, position, where), ROOT]


def _sorted_units(
    groups: Sequence[tuple[str, ...]],
    unit_of: Mapping[str, tuple[str, ...]],
    around: Mapping[str, Iterable[str]],
    position: Mapping[str, int],
    where: str,
) -> list[tuple[str, ...]]:
    """Sort by nesting: units of several modules, and shared ones, can lie inside a unit registered later."""
    sorter: TopologicalSorter[tuple[str, ...]] = TopologicalSorter()
    for group in groups:
        sorter.add(group)
        for fqn in group:
            for outer in around[fqn]:
                enclosing = unit_of.get(outer)
                if enclosing == group:
                    raise PlanError(
                        f"{where}: {fqn!r} lies inside {outer!r} of the same unit. List the outer one only."
                    )
                if enclosing is not None:
                    sorter.add(enclosing, group)
    try:
        sorter.prepare()
    except CycleError as error:
        names = " and ".join(f"[{', '.join(g)}]" for g in dict.fromkeys(error.args[1]))
        raise PlanError(f"{where}: the units {names} enclose each other. Split one of them.") from None
    ordered: list[tuple[str, ...]] = []
    ready: list[tuple[int, tuple[str, ...]]] = []
    while sorter.is_active():
        for group in sorter.get_ready():
            heapq.heappush(ready, (-min(position[fqn] for fqn in group), group))
        ordered.append(heapq.heappop(ready)[1])
        sorter.done(ordered[-1])
    return ordered


def assign_parameters(units: Sequence[tuple[str, ...]], ignored: Sequence[str], index: ModelIndex) -> Ownership:
    """Return which unit holds which parameter, in one pass over all names of all modules."""
    owned = Ownership({unit: {} for unit in units})
    unit_of = {fqn: unit for unit in units for fqn in unit}
    skip = set(ignored)
    inherited: dict[str, tuple[str, ...] | None] = {}  # by name; None: an ignored module, or below one
    holds: set[str] = set()
    seen: dict[int, tuple[str, ...] | None] = {}
    modules, ignored_params, roots = index.modules, owned.ignored, owned.root_leaves
    # Every name counts: FSDP reaches a shared module from each of its parents, whichever name came first.
    # Models have tens of thousands of modules, so this loop does for each only what it must.
    for name, fqn in index.first_name.items():
        around = inherited[name.rpartition(".")[0]] if name else ROOT
        owner = None if around is None or fqn in skip else unit_of.get(fqn, around)
        inherited[name] = owner
        module = modules[fqn]
        if module._buffers and name == fqn:
            owned.buffers.update((f"{fqn}.{leaf}", b) for leaf, b in module._buffers.items() if b is not None)
        if not module._parameters:
            continue
        mine = ignored_params if owner is None else owned.units[owner]
        direct = False
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            direct = True
            if name != fqn:
                break
            key = id(param)
            if key not in seen:
                seen[key] = owner
                mine[f"{fqn}.{leaf}" if fqn else leaf] = param
            elif seen[key] != owner:
                owned.shared.append((f"{fqn}.{leaf}", owner_name(seen[key]), owner_name(owner)))
        if not direct:
            continue
        outer = name
        while outer not in holds:
            holds.add(outer)
            outer = outer.rpartition(".")[0]
        if name != fqn:
            if owner != inherited[fqn]:
                owned.shared_modules.append((name, fqn, owner_name(inherited[fqn]), owner_name(owner)))
        elif fqn and owner == ROOT:
            roots.append(fqn)
    owned.parameterless = [fqn for fqn in index.modules if fqn and fqn not in holds]
    return owned


def units_below(outer: Iterable[str], units: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the ``units`` of which a module lies inside one of ``outer`` without being it."""
    around = set(outer)
    if not around:
        return []
    return [unit for unit in units if any(a in around for fqn in unit if fqn for a in (*_ancestors(fqn), ""))]


def owner_name(owner: tuple[str, ...] | None) -> str:
    """Return how messages call a unit; None is an ignored module."""
    if owner is None:
        return IGNORED
    return "the root unit" if owner == ROOT else f"unit [{', '.join(owner)}]"


def _enclosing(fqns: Iterable[str], index: ModelIndex) -> dict[str, dict[str, None]]:
    """Return the first names of the modules around each of ``fqns`` under any of its names, the root left out."""
    around: dict[str, dict[str, None]] = {fqn: {} for fqn in fqns}
    for name, fqn in index.first_name.items():
        if fqn in around:
            around[fqn].update(dict.fromkeys(index.first_name[outer] for outer in _ancestors(name)))
    return around


def _ancestors(fqn: str) -> Iterator[str]:
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn
