"""``align_fsdp_param_groups``: the small parameters of all layers in one unit, so that layers hold large ones only."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from .index import ModelIndex

# LayerNorm, RMSNorm, FusedLayerNorm, Qwen3RMSNorm and so on; batch norms have running statistics and stay in place.
_NORM = re.compile(r"(?<!Batch)(?<!Instance)Norm(\dd)?$")
_GATES = ("gate", "router")
_EXPERTS = "experts"

Group = tuple[str, ...]


def align_units(
    groups: Sequence[Group], ignored: Collection[str], index: ModelIndex
) -> tuple[list[Group], list[Group]]:
    """Return the units with norms and router gates taken out of them, and the units these make.

    One unit takes them all, or one for each dtype of their trainable parameters, which FSDP2 does not mix. What the
    configuration lists as a unit, or in one, stays there.

    Args:
        groups: The units, the root left out.
        ignored: Modules that stay whole.
        index: The model.
    """
    listed = {fqn for group in groups for fqn in group}
    by_dtype: dict[object, list[str]] = {}
    for fqn in _small_modules(index, listed, set(ignored)):
        dtypes = {p.dtype for p in index.modules[fqn].parameters() if p.requires_grad}
        if len(dtypes) <= 1:
            by_dtype.setdefault(next(iter(dtypes), None), []).append(fqn)
    frozen = by_dtype.pop(None, [])  # they go with any
    if frozen:
        by_dtype.setdefault(next(iter(by_dtype), None), []).extend(frozen)
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    aligned = [tuple(sorted(fqns, key=position.__getitem__)) for fqns in by_dtype.values()]
    return [*groups, *aligned], aligned


def describe_aligned(aligned: Sequence[Group], where: str) -> str:
    """Return what the user should know of the units that were made.

    Args:
        aligned: The units.
        where: Place of the key, for messages.
    """
    if not aligned:
        return f"{where}: the model has no norms or router gates outside of the units listed, so it changes nothing."
    made = "one unit" if len(aligned) == 1 else "one unit for each dtype"
    members = sorted((fqn for group in aligned for fqn in group), key=lambda fqn: fqn.count("."), reverse=True)
    return (
        f"{where}: {len(members)} norms and router gates such as {members[0]!r} make {made}, which stays gathered from "
        "its first use to its backward."
    )


def _small_modules(index: ModelIndex, listed: Collection[str], ignored: Collection[str]) -> Iterator[str]:
    closed = {fqn for fqn in listed if _is_small(fqn, index)} | set(ignored)
    for fqn, module in index.modules.items():
        if any(outer in closed for outer in _upwards(fqn)):
            continue
        if fqn and fqn not in listed and _is_small(fqn, index) and any(True for _ in module.parameters()):
            closed.add(fqn)  # what is below it comes along
            yield fqn


def _is_small(fqn: str, index: ModelIndex) -> bool:
    module = index.modules[fqn]
    if _NORM.search(type(module).__name__):
        return bool(module._parameters)
    outer, _, name = fqn.rpartition(".")
    beside_experts = isinstance(index.modules[outer]._modules.get(_EXPERTS), nn.Module)
    return type(module).__name__.endswith("Router") or (name in _GATES and beside_experts)


def _upwards(fqn: str) -> Iterator[str]:
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]
