"""Which unit owns which parameter, in which order units are sharded, and what FSDP2 cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from torch import nn
from torch.distributed.tensor import DTensor

from .config import FSDP2Config
from .errors import PlanError
from .model_index import ModelIndex
from .policies import to_dtype

ROOT = ("",)
_NAMED_AT_MOST = 8


@dataclass
class Ownership:
    """Parameters by owner, each under its first name.

    Attributes:
        units: Unit -> its parameters, in the order of application, the root last.
        ignored: Parameters below ignored modules.
        parameterless: Modules without any parameter at or below them.
        root_leaves: Modules, other than the root and units, that hold parameters of the root unit directly.
        shared: ``(parameter, first owner, second owner)`` wherever two owners hold the same parameter.
    """

    units: dict[tuple[str, ...], dict[str, nn.Parameter]]
    ignored: dict[str, nn.Parameter] = field(default_factory=dict)
    parameterless: list[str] = field(default_factory=list)
    root_leaves: list[str] = field(default_factory=list)
    shared: list[tuple[str, str, str]] = field(default_factory=list)


def order_units(
    groups: Sequence[tuple[str, ...]], ignored: Sequence[str], index: ModelIndex, where: str
) -> list[tuple[str, ...]]:
    """Return the units bottom-up, the root last.

    Raises:
        PlanError: A unit lies inside an ignored module, or two units of several modules enclose each other.
    """
    unit_of = {fqn: group for group in groups for fqn in group}
    skip = set(ignored)
    problems = [
        f"{where}: {fqn!r} lies inside the ignored module {outer!r}. Remove it from one of the two lists."
        for fqn in unit_of
        for outer in [next((a for a in (fqn, *_ancestors(fqn)) if a in skip), None)]
        if outer is not None
    ]
    if problems:
        raise PlanError("\n".join(problems))
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    # Registration order puts parents first, so its reverse puts nested units first; ties of several modules need
    # the sort, since a member can lie inside another unit that was registered later.
    sorter: TopologicalSorter[tuple[str, ...]] = TopologicalSorter()
    for group in sorted(groups, key=lambda g: position[g[0]], reverse=True):
        sorter.add(group)
        for fqn in group:
            for outer in _ancestors(fqn):
                enclosing = unit_of.get(outer)
                if enclosing == group:
                    raise PlanError(f"{where}: {fqn!r} lies inside {outer!r} of the same unit. List the outer one only.")
                if enclosing is not None:
                    sorter.add(enclosing, group)
    try:
        return [*sorter.static_order(), ROOT]
    except CycleError as error:
        names = " and ".join(f"[{', '.join(g)}]" for g in dict.fromkeys(error.args[1]))
        raise PlanError(f"{where}: the units {names} enclose each other. Split one of them.") from None


def assign_parameters(units: Sequence[tuple[str, ...]], ignored: Sequence[str], index: ModelIndex) -> Ownership:
    """Return which unit holds which parameter, in one pass over the modules."""
    owned = Ownership({unit: {} for unit in units})
    unit_of = {fqn: unit for unit in units for fqn in unit}
    skip = set(ignored)
    inherited: dict[str, tuple[str, ...] | None] = {}  # None: below an ignored module
    holds: set[str] = set()
    seen: dict[int, tuple[str, ...] | None] = {}
    for fqn, module in index.modules.items():
        # The parent of a first name need not be a first name itself (a shared container), hence the look-up.
        parent = index.first_name[fqn.rpartition(".")[0]]
        owner = None if fqn in skip or (fqn and inherited[parent] is None) else unit_of.get(fqn) or inherited[parent]
        inherited[fqn] = owner
        direct = False
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            direct = True
            if id(param) in seen:
                if seen[id(param)] != owner:
                    owned.shared.append((f"{fqn}.{leaf}", _owner_name(seen[id(param)]), _owner_name(owner)))
                continue
            seen[id(param)] = owner
            (owned.ignored if owner is None else owned.units[owner])[f"{fqn}.{leaf}" if fqn else leaf] = param
        if direct:
            holds.add(fqn)
            if owner == ROOT and fqn:
                owned.root_leaves.append(fqn)
    for fqn in list(holds):
        for outer in _ancestors(fqn):
            if outer in holds:
                break
            holds.add(outer)
    owned.parameterless = [fqn for fqn in index.modules if fqn and fqn not in holds]
    return owned


def check_parameters(owned: Ownership, config: FSDP2Config, index: ModelIndex) -> list[str]:
    """Return notices about the parameters of every unit.

    Raises:
        PlanError: Parameters that FSDP2 cannot shard, or whose gradients nobody would reduce; all of them.
    """
    problems = [
        f"parameter {name!r} is shared by {first} and {second}. FSDP2 needs both ends in one unit: "
        "nest the two modules in one entry of sub_modules_to_wrap, or leave both to the root."
        for name, first, second in owned.shared
    ]
    trainable = [name for name, param in owned.ignored.items() if param.requires_grad]
    if trainable:
        problems.append(
            f"{config.where('ignored_modules')}: these parameters are trainable: {_some(trainable)}. Trainable ignored "
            "parameters are not supported yet, since nobody would average their gradients. "
            "Freeze them (requires_grad_(False)) or do not ignore their modules."
        )
    for unit, params in owned.units.items():
        problems.extend(_check_unit(_owner_name(unit), params))
    if problems:
        raise PlanError("\n".join(problems))
    stored = {p.dtype for params in owned.units.values() for p in params.values() if p.requires_grad}
    notices = []
    low = {d for d in stored if d.is_floating_point and d.itemsize < 4}
    if low and to_dtype(config.param_dtype) in low:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in low))
        notices.append(
            f"trainable parameters are stored in {names}: the optimizer steps on {names} values and loses small updates "
            "(at lr 1e-5 no weight moves). Load the model in float32; param_dtype alone sets the compute precision."
        )
    return notices


def _check_unit(unit: str, params: Mapping[str, nn.Parameter]) -> Iterator[str]:
    if sharded := [n for n, p in params.items() if isinstance(p, DTensor)]:
        yield f"{unit}: {_some(sharded)} is sharded already. Wrap a model only once, before anything shards it."
    if meta := [n for n, p in params.items() if p.is_meta]:
        yield (
            f"{unit}: {_some(meta)} is on the meta device. Initialising from meta is not supported yet: "
            "build the model with real values."
        )
    if scalar := [n for n, p in params.items() if p.dim() == 0]:
        yield (
            f"{unit}: FSDP2 cannot shard the scalar parameter {_some(scalar)}. Give it the shape (1,), "
            "or freeze it and list its module in ignored_modules."
        )
    if strided := [n for n, p in params.items() if p.dim() and not p.is_meta and not p.is_contiguous()]:
        yield f"{unit}: FSDP2 cannot shard the non-contiguous parameter {_some(strided)}. Make it contiguous()."
    dtypes: dict[str, list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            dtypes.setdefault(str(param.dtype).removeprefix("torch."), []).append(name)
    if len(dtypes) > 1:
        listed = "; ".join(f"{dtype}: {_some(names)}" for dtype, names in sorted(dtypes.items()))
        yield f"{unit}: trainable parameters of several dtypes in one unit ({listed}). Cast them to one dtype before wrapping."


def _owner_name(owner: tuple[str, ...] | None) -> str:
    if owner is None:
        return "an ignored module"
    return "the root unit" if owner == ROOT else f"unit [{', '.join(owner)}]"


def _ancestors(fqn: str) -> Iterator[str]:
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
