"""Decide everything, touch nothing: configuration + model -> FSDP2Plan."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .config import FSDP2Config, check_supported
from .errors import ConfigError, PlanError
from .model_index import build_index
from .plan_checks import assign_parameters, check_parameters, layout_of, order_units, some, units_below
from .plan_select import DefaultUnits, Selector
from .plan_ties import Tie, find_ties, merge_ties
from .policies import to_dtype


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: modules whose parameters are gathered and reduced together.

    Attributes:
        fqns: Its modules; ``("",)`` is the root.
        kind: Class name of the first module.
        numel: Elements of the parameters it owns, those of nested units and ignored modules excluded.
        stored_dtype: dtype of its trainable shards, None if it has none.
        param_dtype: dtype of gather and compute, None for the stored one.
        reduce_dtype: dtype of gradient reduction, None for the compute dtype.
        output_dtype: dtype of its floating outputs, None leaves them; the root's, unless overridden.
        cast_inputs: Whether its floating inputs are cast to ``param_dtype``.
        reshard: What becomes of gathered parameters after forward; the root leaves that to torch.
        offload: Whether its shards, their gradients and optimizer state live in host memory.
    """

    fqns: tuple[str, ...]
    kind: str
    numel: int
    stored_dtype: torch.dtype | None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    reshard: bool | int = True
    offload: bool = False

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
        whole_trainable: Trainable parameters that stay whole; their gradients are averaged over all ranks.
        parameterless: Modules without parameters of their own or below, whose outputs keep their dtype.
        root_casts_inputs: False when ignored modules compute in another precision on the caller's own values.
        cast_leaves: Modules with parameters in the root unit that cast their own inputs when the root does not.
        recomputed: Names of units inside recomputed modules. They gather nothing ahead in forward, because
            recomputation would do so again for nothing.
        layout: Digest of all parameters and buffers.
        shard_size: Ranks per shard group, None while the number of ranks is unknown.
        data_parallel_size: Data-parallel ranks, context parallelism included; None while unknown.
        notices: What the user should read once.
    """

    config: FSDP2Config
    units: tuple[Unit, ...]
    ignored: tuple[str, ...]
    recompute: tuple[str, ...]
    whole_trainable: tuple[str, ...]
    parameterless: tuple[str, ...]
    root_casts_inputs: bool
    cast_leaves: tuple[str, ...]
    recomputed: tuple[str, ...]
    layout: str
    shard_size: int | None
    data_parallel_size: int | None
    notices: tuple[str, ...]

    @property
    def assumed_order(self) -> tuple[Unit, ...]:
        """The units in registration order, root first: the execution order as long as none was recorded."""
        return tuple(reversed(self.units))

    def digest(self) -> str:
        """Return a short digest; ranks whose digests differ would wait for each other in a collective."""
        units = [unit.fqns for unit in self.units]
        text = json.dumps([self.config.digest(), units, self.layout, self.ignored, self.recompute, self.shard_size])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from .plan_table import plan_table

        return plan_table(self)


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
        stored_dtype: dtype that trainable shards are stored in, None for each unit's own.
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
    shard_size = _shard_size(config, data_parallel_size, whole_world, problems)
    index = build_index(model)
    selector = Selector(config, index, problems)
    ignored = selector.ignored()
    recompute = selector.modules("recompute_modules", config.recompute_modules, called=True)
    selector.modules("moe_modules", config.moe_modules)
    groups = selector.units(default_units, ignored)
    overrides = selector.overrides()
    if problems:  # what follows reads the selections
        raise ConfigError("\n".join(_in_file_order(problems)))
    where = config.where("sub_modules_to_wrap")
    owned = assign_parameters(order_units(groups, ignored, index, where), ignored, index)
    tie_notices: list[str] = []
    if owned.shared or host_ties is not None:
        ties = [*find_ties(index), *(host_ties(index.root) if host_ties is not None else ())]
        groups, tie_notices = merge_ties(groups, ties, ignored)
        if tie_notices:
            owned = assign_parameters(order_units(groups, ignored, index, where), ignored, index)
    settings = selector.settings(groups, overrides)
    if problems:
        raise ConfigError("\n".join(_in_file_order(problems)))
    notices = [*config.notices, *tie_notices, *check_parameters(owned, config, stored_dtype)]
    recomputed = [" + ".join(unit) for unit in units_below(recompute, owned.units)]
    if recomputed and config.num_to_forward_prefetch:
        notices.append(
            f"{config.where('num_to_forward_prefetch')}: nothing is gathered ahead from {some(recomputed)}: they lie "
            "inside recomputed modules, and recomputation would gather ahead once more for nothing."
        )
    units = tuple(
        Unit(
            fqns,
            type(index.modules[fqns[0]]).__name__,
            sum(p.numel() for p in params.values()),
            next((stored_dtype or p.dtype for p in params.values() if p.requires_grad), None),
            **settings[fqns],
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
        whole_trainable=tuple(name for name, param in owned.ignored.items() if param.requires_grad),
        parameterless=tuple(owned.parameterless),
        root_casts_inputs=root_casts,
        cast_leaves=() if root_casts else tuple(owned.root_leaves),
        recomputed=tuple(recomputed),
        layout=layout_of(owned),
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
            fits = ", ".join(["true", *(str(n) for n in range(2, size) if size % n == 0)])
            problems.append(
                f"{where}: {reshard} does not divide the {size} ranks of a shard group. Use {fits} or false."
            )
        elif reshard != size and not whole_world:
            problems.append(
                f"{where}: the number {reshard} needs a data-parallel group that holds all ranks; with tensor or "
                "pipeline parallelism PyTorch would hang building one mesh per group. Use true or false."
            )
    return size


def _in_file_order(problems: Iterable[str]) -> list[str]:
    """Return ``problems``, each once, sorted by the line of the file they name; those without a line come first."""

    def line(problem: str) -> int:
        found = re.match(r".*?:(\d+): ", problem)
        return int(found[1]) if found else 0

    return sorted(dict.fromkeys(problems), key=line)


__all__ = ["FSDP2Plan", "PlanError", "Unit", "build_plan"]
