"""Weights used in two places: both ends must lie in one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .index import ModelIndex

Tie = tuple[str, str]  # the fqns of two modules that use one parameter


def find_ties(index: ModelIndex) -> list[Tie]:
    """Return the pairs of modules that hold the same parameter directly, each with the first that holds it."""
    holder: dict[int, str] = {}
    ties: list[Tie] = []
    for fqn, module in index.modules.items():
        for param in module._parameters.values():
            if param is not None and holder.setdefault(id(param), fqn) != fqn:
                ties.append((holder[id(param)], fqn))
    return list(dict.fromkeys(ties))


def merge_ties(
    groups: Sequence[tuple[str, ...]], ties: Iterable[Tie], ignored: Sequence[str]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the units with both ends of every tie in the same one, and a notice for each change.

    Sharded apart, the second end would see a sharded weight, or hold a copy of its own that training moves away from
    the first. An end below an ignored module is left alone; that cannot be mended here and is refused later.

    Args:
        groups: The units, the root left out.
        ties: Pairs of modules.
        ignored: Ignored modules.
    """
    merged = list(groups)
    notices: list[str] = []
    skip = set(ignored)
    for one, two in ties:
        if any(outer in skip for end in (one, two) for outer in _around(end)):
            continue
        first, second = (_unit_of(end, merged) for end in (one, two))
        if first == second:
            continue
        ends = (*(first or (one,)), *(second or (two,)))
        members = tuple(m for m in dict.fromkeys(ends) if not any(o in ends for o in _around(m) if o != m))
        at = min(merged.index(group) for group in (first, second) if group is not None)
        kept = [group for group in merged if group not in (first, second)]
        if "" in members:  # the model itself holds one end
            merged = kept
            where = "the root unit"
        else:
            merged = [*kept[:at], members, *kept[at:]]
            where = f"one unit [{', '.join(members)}]"
        names = " and ".join(repr(end) if end else "the model itself" for end in (one, two))
        notices.append(f"{names} share a weight: they are sharded as {where}.")
    return merged, notices


def _unit_of(fqn: str, groups: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    unit_of = {member: group for group in groups for member in group}
    return next((unit_of[outer] for outer in _around(fqn) if outer in unit_of), None)


def _around(fqn: str) -> list[str]:
    """Return ``fqn`` and the names around it, innermost first, the root left out unless it is asked for."""
    names = [fqn]
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        names.append(fqn)
    return names
