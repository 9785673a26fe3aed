"""Which unit owns which parameter, in which order units are sharded, and what FSDP2 cannot hold."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import FSDP2Config
from .errors import PlanError
from .model_index import ModelIndex
from .policies import to_dtype

ROOT = ("",)
IGNORED = "an ignored module"
_NAMED_AT_MOST = 8


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
    groups: Sequence[tuple[str, ...]], ignored: Sequence[str], index: ModelIndex, where: str
) -> list[tuple[str, ...]]:
    """Return the units in the reverse of registration order as far as nesting allows; the root last.

    Raises:
        PlanError: A unit lies inside an ignored module, or two units of several modules enclose each other.
    """
    unit_of = {fqn: group for group in groups for fqn in group}
    around = _enclosing(unit_of, index)
    skip = set(ignored)
    problems = [
        f"{where}: {fqn!r} lies inside the ignored module {outer!r}. Remove it from one of the two lists."
        for fqn in unit_of
        for outer in [next((a for a in (fqn, *around[fqn]) if a in skip), None)]
        if outer is not None
    ]
    if problems:
        raise PlanError("\n".join(problems))
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    # Registration order puts parents first, so its reverse puts nested units first; units of several modules and
    # shared modules need the sort, since they can lie inside another unit that was registered later.
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
    return [*ordered, ROOT]


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
                owned.shared.append((f"{fqn}.{leaf}", _owner_name(seen[key]), _owner_name(owner)))
        if not direct:
            continue
        outer = name
        while outer not in holds:
            holds.add(outer)
            outer = outer.rpartition(".")[0]
        if name != fqn:
            if owner != inherited[fqn]:
                owned.shared_modules.append((name, fqn, _owner_name(inherited[fqn]), _owner_name(owner)))
        elif fqn and owner == ROOT:
            roots.append(fqn)
    owned.parameterless = [fqn for fqn in index.modules if fqn and fqn not in holds]
    return owned


def check_parameters(owned: Ownership, config: FSDP2Config, stored_dtype: torch.dtype | None) -> list[str]:
    """Return notices about the parameters of every unit.

    Raises:
        PlanError: Parameters that FSDP2 cannot shard; all of them.
    """
    if sharded := [n for params in owned.units.values() for n, p in params.items() if isinstance(p, DTensor)]:
        raise PlanError(
            f"model: these parameters are sharded already: {some(sharded)}. "
            "Wrap a model once, before anything shards it."
        )
    problems = [
        f"parameter {name!r} is shared by {first} and {second}. "
        + (
            "Ignore both modules or none."
            if IGNORED in (first, second)
            else "FSDP2 needs both ends in one unit: nest the two modules in one entry of sub_modules_to_wrap, or "
            "leave both to the root."
        )
        for name, first, second in owned.shared
    ]
    problems += [
        f"module {fqn!r} is also {name!r} and so belongs to {first} and to {second}. "
        f"Add {fqn!r} to {'ignored_modules' if IGNORED in (first, second) else 'sub_modules_to_wrap'}."
        for name, fqn, first, second in owned.shared_modules
    ]
    for unit, params in owned.units.items():
        problems.extend(_check_unit(_owner_name(unit), params))
    if problems:
        raise PlanError("\n".join(problems))
    stored = {stored_dtype or p.dtype for params in owned.units.values() for p in params.values() if p.requires_grad}
    notices = []
    if trainable := [name for name, param in owned.ignored.items() if param.requires_grad]:
        notices.append(
            f"{config.where('ignored_modules')}: trainable parameters stay whole on every rank: {some(trainable)}. "
            "Their gradients are averaged over all data-parallel ranks in each backward."
        )
    low = {d for d in stored if d.is_floating_point and d.itemsize < 4}
    if low and to_dtype(config.param_dtype) in low:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in low))
        notices.append(
            f"trainable parameters are stored in {names}: the optimizer steps on {names} values and loses small "
            "updates (at lr 1e-5 no weight moves). Load the model in float32; param_dtype alone sets the compute "
            "precision."
        )
    return notices


def _check_unit(unit: str, params: Mapping[str, nn.Parameter]) -> Iterator[str]:
    sound = all(p.is_contiguous() and p.dim() and not p.is_meta for p in params.values())
    if sound and len({p.dtype for p in params.values() if p.requires_grad}) <= 1:
        return  # models have tens of thousands of parameters, nearly all of them fine
    if meta := [n for n, p in params.items() if p.is_meta]:
        yield (
            f"{unit}: these parameters are on the meta device: {some(meta)}. Initialising from meta is not supported "
            "yet: build the model with real values."
        )
    if scalar := [n for n, p in params.items() if p.dim() == 0]:
        yield (
            f"{unit}: FSDP2 cannot shard the scalar parameter {some(scalar)}. Give it the shape (1,), "
            "or freeze it and list its module in ignored_modules."
        )
    if strided := [n for n, p in params.items() if p.dim() and not p.is_meta and not p.is_contiguous()]:
        yield f"{unit}: FSDP2 cannot shard the non-contiguous parameter {some(strided)}. Make it contiguous()."
    dtypes: dict[str, list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            dtypes.setdefault(str(param.dtype).removeprefix("torch."), []).append(name)
    if len(dtypes) > 1:
        listed = "; ".join(f"{dtype}: {some(names)}" for dtype, names in sorted(dtypes.items()))
        yield (
            f"{unit}: trainable parameters of several dtypes in one unit ({listed}). "
            "Cast them to one dtype before wrapping."
        )


def layout_of(owned: Ownership) -> str:
    """Return a digest of all parameters and buffers: name, owner, shape, dtype and whether it is trainable.

    Ranks with different layouts would run different collectives: gradients of frozen parameters are not reduced,
    buffers and ignored parameters are broadcast at start.
    """
    parts: list[str] = []
    kinds: dict[tuple[torch.Size, torch.dtype, bool], str] = {}  # few different ones, and their text is slow to make
    for owner, params in (*owned.units.items(), (None, owned.ignored)):
        parts.append(_owner_name(owner))
        for name, param in params.items():
            kind = (param.shape, param.dtype, param.requires_grad)
            if kind not in kinds:
                kinds[kind] = str(kind)
            parts.append(f"{name} {kinds[kind]}")
    parts += [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in owned.buffers.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def units_below(outer: Iterable[str], units: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the ``units`` of which a module lies inside one of ``outer`` without being it."""
    around = set(outer)
    return [unit for unit in units if any(a in around for fqn in unit if fqn for a in (*_ancestors(fqn), ""))]


def _owner_name(owner: tuple[str, ...] | None) -> str:
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


def some(names: Sequence[str]) -> str:
    """Return the first few of ``names`` and how many more there are, for messages."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
