"""Decide everything, touch nothing: configuration + model -> FSDP2Plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from ..config import FSDP2Config, check_supported
from ..errors import ConfigError
from ..policies import to_dtype
from .align import align_units, describe_aligned
from .checks import check_modules, check_parameters, check_wrappers, layout_of, some
from .index import ModelIndex, build_index
from .ownership import Ownership, assign_parameters, order_units, units_below
from .plan import FSDP2Plan, Unit, unit_name
from .ranks import shard_size
from .select import DefaultUnits, Selector, UnitSettings
from .ties import Tie, find_ties, merge_ties


def build_plan(
    config: FSDP2Config,
    model: nn.Module,
    *,
    default_units: DefaultUnits | None = None,
    data_parallel_size: int | None = None,
    whole_world: bool = True,
    stored_dtype: torch.dtype | None = None,
    host_ties: Callable[[nn.Module], Sequence[Tie]] | None = None,
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
        stored_dtype: dtype that trainable shards are stored in, None for each unit's own. Given by hosts that keep
            fp32 masters; they take the fp32 gradients of whole parameters from ``param.main_grad``.
        host_ties: Called like ``default_units``; returns pairs of modules that use one weight although only one of
            them holds it.

    Raises:
        ConfigError: A key cannot hold for this model or number of ranks, or is not supported yet.
        PlanError: The model itself cannot be sharded as asked. Either error lists every problem found.
    """
    problems: list[str] = []
    try:
        check_supported(config)
    except ConfigError as error:
        problems.extend(str(error).splitlines())
    size = None if data_parallel_size is None else shard_size(config, data_parallel_size, whole_world, problems)
    check_wrappers(model)
    index = build_index(model)
    selector = Selector(config, index, problems)
    ignored = selector.ignored()
    recompute = selector.recompute()
    selector.modules("moe_modules", config.moe_modules)
    groups = selector.units(default_units, ignored)
    overrides = selector.overrides()
    if problems:  # what follows reads the selections
        raise ConfigError("\n".join(_in_file_order(problems)))
    groups, aligned = align_units(groups, ignored, index) if config.align_fsdp_param_groups else (groups, [])
    groups, owned, tie_notices = _owned(groups, ignored, selector.optional, index, config, host_ties)
    settings = selector.settings(groups, overrides)
    if problems:
        raise ConfigError("\n".join(_in_file_order(problems)))
    for unit in set(aligned) & settings.keys():
        settings[unit]["reshard"] = False  # its modules run all through the forward
    recomputed = [unit_name(unit) for unit in units_below(recompute, owned.units)]
    found = (*tie_notices, *check_parameters(owned, config, stored_dtype), *_notices(config, aligned, recomputed))
    root_casts = _root_casts(config, owned)
    return FSDP2Plan(
        config=config,
        units=_units(owned, index, settings, stored_dtype),
        ignored=tuple(ignored),
        recompute=tuple(recompute),
        whole_trainable=tuple(name for name, param in owned.ignored.items() if param.requires_grad),
        parameterless=tuple(owned.parameterless),
        root_casts_inputs=root_casts,
        cast_leaves=() if root_casts else tuple(owned.root_leaves),
        recomputed=tuple(recomputed),
        main_grads=stored_dtype is not None,
        layout=layout_of(owned),
        shard_size=size,
        data_parallel_size=data_parallel_size,
        notices=(*config.notices, *found),
    )


def _root_casts(config: FSDP2Config, owned: Ownership) -> bool:
    param_dtype = to_dtype(config.param_dtype)
    foreign = {p.dtype for p in owned.ignored.values() if p.is_floating_point()} - {param_dtype}
    return not (param_dtype and foreign)


def _notices(config: FSDP2Config, aligned: Sequence[tuple[str, ...]], recomputed: Sequence[str]) -> Iterator[str]:
    if config.align_fsdp_param_groups:
        yield describe_aligned(aligned, config.where("align_fsdp_param_groups"))
    if recomputed and config.num_to_forward_prefetch:
        yield (
            f"{config.where('num_to_forward_prefetch')}: nothing is gathered ahead from {some(recomputed)}: they lie "
            "inside recomputed modules, and recomputation would gather ahead once more for nothing."
        )


def _owned(
    groups: list[tuple[str, ...]],
    ignored: Sequence[str],
    optional: Sequence[str],
    index: ModelIndex,
    config: FSDP2Config,
    host_ties: Callable[[nn.Module], Sequence[Tie]] | None,
) -> tuple[list[tuple[str, ...]], Ownership, list[str]]:
    """Return the units with tied weights brought together, who owns what, and a notice for each tie."""
    check_modules(index, ignored)
    where = config.where("sub_modules_to_wrap" if config.auto_wrap_policy is None else "auto_wrap_policy")
    owned = assign_parameters(order_units(groups, ignored, index, where, optional), ignored, index)
    notices: list[str] = []
    if owned.shared or host_ties is not None:
        ties = [*find_ties(index), *(host_ties(index.root) if host_ties is not None else ())]
        groups, notices = merge_ties(groups, ties, ignored)
        if notices:
            owned = assign_parameters(order_units(groups, ignored, index, where, optional), ignored, index)
    return groups, owned, notices


def _units(
    owned: Ownership,
    index: ModelIndex,
    settings: Mapping[tuple[str, ...], UnitSettings],
    stored_dtype: torch.dtype | None,
) -> tuple[Unit, ...]:
    return tuple(
        Unit(
            fqns,
            type(index.modules[fqns[0]]).__name__,
            sum(p.numel() for p in params.values()),
            next((stored_dtype or p.dtype for p in params.values() if p.requires_grad), None),
            **settings[fqns],
        )
        for fqns, params in owned.units.items()
    )


def _in_file_order(problems: Iterable[str]) -> list[str]:
    """Return ``problems``, each once, sorted by the line of the file they name; those without a line come first."""

    def line(problem: str) -> int:
        found = re.match(r".*?:(\d+): ", problem)
        return int(found[1]) if found else 0

    return sorted(dict.fromkeys(problems), key=line)
