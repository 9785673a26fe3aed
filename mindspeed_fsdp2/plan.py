"""Decide everything, touch nothing: configuration + model -> FSDP2Plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .config import FSDP2Config, check_supported
from .errors import ConfigError, ModulePathError, PlanError
from .model_index import ModelIndex, build_index
from .plan_checks import assign_parameters, check_parameters, order_units
from .policies import to_dtype


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: modules whose parameters are gathered and reduced together.

    Attributes:
        fqns: Its modules; ``("",)`` is the root.
        kind: Class name of the first module.
        numel: Elements of the parameters it owns, those of nested units and ignored modules excluded.
        stored_dtype: dtype of its trainable shards, None if it has none.
    """

    fqns: tuple[str, ...]
    kind: str
    numel: int
    stored_dtype: torch.dtype | None

    @property
    def name(self) -> str:
        """Its fqns joined for messages; the root is called ``(root)``."""
        return " + ".join(fqn or "(root)" for fqn in self.fqns)


@dataclass(frozen=True)
class FSDP2Plan:
    """What will be done to a model. Everything after the plan acts and decides nothing.

    Attributes:
        config: The settings the plan follows.
        units: In the order of application: nested units before the units around them, the root last.
        ignored: Modules whose parameters stay whole.
        recompute: Modules whose activations are recomputed.
        parameterless: Modules without parameters of their own or below, whose outputs keep their dtype.
        root_casts_inputs: False when ignored modules compute in another precision on the caller's own values.
        cast_leaves: Modules with parameters in the root unit that cast their own inputs when the root does not.
        shard_size: Ranks per shard group, None while the number of ranks is unknown.
        data_parallel_size: Data-parallel ranks, context parallelism included; None while unknown.
        notices: What the user should read once.
    """

    config: FSDP2Config
    units: tuple[Unit, ...]
    ignored: tuple[str, ...]
    recompute: tuple[str, ...]
    parameterless: tuple[str, ...]
    root_casts_inputs: bool
    cast_leaves: tuple[str, ...]
    shard_size: int | None
    data_parallel_size: int | None
    notices: tuple[str, ...]

    @property
    def assumed_order(self) -> tuple[Unit, ...]:
        """The units in registration order, root first: the execution order as long as none was recorded."""
        return tuple(reversed(self.units))

    def digest(self) -> str:
        """Return a short digest; ranks whose digests differ would wait for each other in a collective."""
        parts = [[u.fqns, u.numel, str(u.stored_dtype)] for u in self.units]
        text = json.dumps([self.config.digest(), parts, self.ignored, self.recompute, self.shard_size])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from .plan_table import plan_table

        return plan_table(self)


def build_plan(
    config: FSDP2Config,
    model: nn.Module,
    *,
    default_units: Callable[[nn.Module], Sequence[str]] | None = None,
    data_parallel_size: int | None = None,
    whole_world: bool = True,
) -> FSDP2Plan:
    """Return the plan for ``model``; nothing is changed and no process group is needed.

    Args:
        config: The settings.
        model: The unwrapped model, or one below wrappers such as ``Float16Module``.
        default_units: Called with the model below its wrappers when ``sub_modules_to_wrap`` is absent; returns the
            fqns of the host's own default units.
        data_parallel_size: Ranks in the data-parallel group, context parallelism included; None leaves the keys
            that depend on it unchecked.
        whole_world: Whether that group holds all ranks of the job.

    Raises:
        ConfigError: A key cannot hold for this model or number of ranks, or is not supported yet.
        PlanError: The model itself cannot be sharded as asked. Either error lists every problem found.
    """
    problems: list[str] = []
    try:
        check_supported(config)
    except ConfigError as error:
        problems.extend(str(error).splitlines())
    index = build_index(model)
    shard_size = _shard_size(config, data_parallel_size, whole_world, problems)
    ignored = _select_all(config, "ignored_modules", config.ignored_modules, index, problems)
    recompute = _select_all(config, "recompute_modules", config.recompute_modules, index, problems)
    _check_forward(config, "recompute_modules", config.recompute_modules, index, problems)
    _select_all(config, "moe_modules", config.moe_modules, index, problems)
    groups = _groups(config, index, default_units, problems)
    if problems:  # what follows reads the selections
        raise ConfigError("\n".join(problems))
    ordered = order_units(groups, ignored, index, config.where("sub_modules_to_wrap"))
    owned = assign_parameters(ordered, ignored, index)
    notices = [*config.notices, *check_parameters(owned, config, index)]
    units = tuple(
        Unit(
            fqns,
            type(index.modules[fqns[0]]).__name__,
            sum(p.numel() for p in params.values()),
            next((p.dtype for p in params.values() if p.requires_grad), None),
        )
        for fqns, params in owned.units.items()
    )
    param_dtype = to_dtype(config.param_dtype)
    foreign = {p.dtype for p in owned.ignored.values() if p.is_floating_point()} - {param_dtype}
    root_casts = not (param_dtype and foreign)
    return FSDP2Plan(
        config=config,
        units=units,
        ignored=tuple(ignored),
        recompute=tuple(recompute),
        parameterless=tuple(owned.parameterless),
        root_casts_inputs=root_casts,
        cast_leaves=() if root_casts else tuple(owned.root_leaves),
        shard_size=shard_size,
        data_parallel_size=data_parallel_size,
        notices=tuple(notices),
    )


def _shard_size(config: FSDP2Config, ranks: int | None, whole_world: bool, problems: list[str]) -> int | None:
    if ranks is None:
        return None
    size = ranks if config.sharding_size == "auto" else config.sharding_size
    if ranks % size:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        problems.append(
            f"{config.where('sharding_size')}: {size} does not divide the {ranks} data-parallel ranks. "
            f"Use one of {fits}, or auto."
        )
        return None
    reshard = config.reshard_after_forward
    if not isinstance(reshard, bool):
        where = config.where("reshard_after_forward")
        if reshard > size or size % reshard:
            fits = ", ".join(str(n) for n in range(2, size) if size % n == 0) or "none"
            problems.append(
                f"{where}: {reshard} does not divide the {size} ranks of a shard group. "
                f"Use true, false or a divisor between 1 and {size} (here: {fits})."
            )
        elif reshard != size and not whole_world:
            problems.append(
                f"{where}: the number {reshard} needs a data-parallel group that holds all ranks; with tensor or "
                "pipeline parallelism PyTorch would hang building one mesh per group. Use true or false."
            )
    return size


def _select_all(
    config: FSDP2Config, key: str, paths: Sequence[str], index: ModelIndex, problems: list[str]
) -> list[str]:
    found: dict[str, None] = {}
    for i, text in enumerate(paths):
        found.update(dict.fromkeys(_select(config.where(key, i), text, index, problems)))
    if len(paths) < 2:
        return list(found)
    position = {fqn: n for n, fqn in enumerate(index.modules)}
    return sorted(found, key=position.__getitem__)


def _select(where: str, text: str, index: ModelIndex, problems: list[str]) -> list[str]:
    try:
        return index.select(text)
    except ModulePathError as error:
        problems.append(f"{where}: {error}")
        return []


def _check_forward(
    config: FSDP2Config, key: str, paths: Sequence[str], index: ModelIndex, problems: list[str]
) -> None:
    for i, text in enumerate(paths):
        for fqn in _select("", text, index, []):
            _check_container(config.where(key, i), text, fqn, index, problems)


def _check_container(where: str, text: str, fqn: str, index: ModelIndex, problems: list[str]) -> None:
    module = index.modules[fqn]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        problems.append(
            f"{where}: {text!r} selects {fqn!r}, a {type(module).__name__}, which has no forward of its own. "
            f"Write '{fqn}.{{*}}' for its members."
        )


def _groups(
    config: FSDP2Config,
    index: ModelIndex,
    default_units: Callable[[nn.Module], Sequence[str]] | None,
    problems: list[str],
) -> list[tuple[str, ...]]:
    """Return the units as asked for, root excluded, in the YAML's order; a single module named twice appears once."""
    key = "sub_modules_to_wrap"
    if config.sub_modules_to_wrap is None:
        return [(fqn,) for fqn in _default_units(config, index, default_units, problems)]
    groups: dict[tuple[str, ...], None] = {}
    owner: dict[str, tuple[str, ...]] = {}
    for i, entry in enumerate(config.sub_modules_to_wrap):
        texts = (entry,) if isinstance(entry, str) else entry
        selected: dict[str, None] = {}
        for j, text in enumerate(texts):
            where = config.where(key, i) if isinstance(entry, str) else config.where(key, i, j)
            for fqn in _select(where, text, index, problems):
                if fqn == "":
                    problems.append(f"{where}: {text!r} selects the model itself. Remove it: the root is always a unit.")
                    continue
                _check_container(where, text, fqn, index, problems)
                selected[fqn] = None
        new = [(fqn,) for fqn in selected] if isinstance(entry, str) else [tuple(selected)] if selected else []
        for group in new:
            groups[group] = None
            for fqn in group:
                other = owner.setdefault(fqn, group)
                if other != group:
                    problems.append(
                        f"{config.where(key, i)}: {fqn!r} belongs to two units, [{', '.join(other)}] and "
                        f"[{', '.join(group)}]. List it in one of them."
                    )
    return list(groups)


def _default_units(
    config: FSDP2Config,
    index: ModelIndex,
    default_units: Callable[[nn.Module], Sequence[str]] | None,
    problems: list[str],
) -> list[str]:
    if default_units is not None:
        found = list(default_units(index.root))
    else:
        names: set[str] = set()
        for module in index.modules.values():
            names.update(getattr(module, "_no_split_modules", None) or ())
        wanted = {fqn for name in names for fqn in index.classes.get(name, ())}
        found = [fqn for fqn in index.modules if fqn in wanted and fqn]
    if not found:
        repeated = next((fqn for fqn, m in index.modules.items() if isinstance(m, nn.ModuleList) and len(m)), None)
        example = f"'{repeated}.{{*}}'" if repeated else "the repeated layers"
        problems.append(
            f"{config.where('sub_modules_to_wrap')}: absent, and {type(index.root).__name__} does not say which modules "
            f"to shard (no _no_split_modules). List the units, e.g. {example}, or [] for the root alone."
        )
    return found


__all__ = ["FSDP2Plan", "PlanError", "Unit", "build_plan"]
