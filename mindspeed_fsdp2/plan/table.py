"""Print a plan: one line per kind of unit, short enough to read at the top of a training log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..policies import to_dtype

if TYPE_CHECKING:
    from .plan import FSDP2Plan, Unit


def plan_table(plan: FSDP2Plan) -> str:
    """Return ``plan`` as lines of text; units that differ by an index only share one line."""
    config = plan.config
    rows = [("unit", "modules", "units", "parameters each", "stored", "")]
    merged: dict[tuple[str, str, int, str, str], list[Unit]] = {}
    for unit in plan.assumed_order:
        stored = str(unit.stored_dtype).removeprefix("torch.") if unit.stored_dtype else "-"
        key = (_pattern(unit.name), unit.kind, unit.numel, stored, _own_settings(unit, plan))
        merged.setdefault(key, []).append(unit)
    for (_, kind, numel, stored, own), units in merged.items():
        rows.append((_title(units), kind, str(len(units)), f"{numel:,}", stored, own))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["FSDP2 plan", f"  ranks          {_ranks(plan)}"]
    if config.auto_wrap_policy is not None:
        lines.append(f"  wrap policy    {_policy(plan)}")
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines += [
        f"  precision      compute {config.param_dtype or 'as stored'}, reduce "
        f"{config.reduce_dtype or config.param_dtype or 'as stored'}, output {config.output_dtype or 'unchanged'}",
        f"  input cast     {_casts(plan)}",
        f"  after forward  {_reshard(config.reshard_after_forward)}; the root stays gathered until its backward",
        f"  prefetch       forward {config.num_to_forward_prefetch}, backward {config.num_to_backward_prefetch} "
        "(execution order: assumed from registration until recorded)",
    ]
    lines.append(f"  accumulation   {_accumulation(plan)}")
    if config.offload_to_cpu:
        lines.append(f"  offload        shards in host memory, {'pinned' if config.pin_memory else 'not pinned'}")
    if plan.ignored:
        lines.append(f"  ignored        {_collapse(plan.ignored)}")
    if plan.recompute:
        how = "reentrant" if config.use_reentrant else "non-reentrant"
        lines.append(f"  recompute      {_collapse(plan.recompute)} ({how})")
    return "\n".join(lines)


def _title(units: list[Unit]) -> str:
    if len(units) == 1 and len(units[0].fqns) > 1:
        return _collapse(units[0].fqns).replace(", ", " + ")
    return _collapse([unit.name for unit in units])


def _own_settings(unit: Unit, plan: FSDP2Plan) -> str:
    """Say what overrides change for one unit."""
    if unit.fqns == ("",):
        return ""
    config = plan.config
    usual = {
        "compute": to_dtype(config.param_dtype),
        "reduce": to_dtype(config.reduce_dtype),
        "output": None,
        "cast": config.cast_forward_inputs,
        "reshard": config.reshard_after_forward,
        "offload": config.offload_to_cpu,
    }
    own = {
        "compute": unit.param_dtype,
        "reduce": unit.reduce_dtype,
        "output": unit.output_dtype,
        "cast": unit.cast_inputs,
        "reshard": unit.reshard,
        "offload": unit.offload,
    }
    changed = [f"{key} {str(own[key]).removeprefix('torch.')}" for key in own if own[key] != usual[key]]
    return ", ".join(changed)


def _accumulation(plan: FSDP2Plan) -> str:
    """Say what ``reduce_grads`` does, and what the other choice would save."""
    scatters = held = 0
    for unit in plan.units:
        dtype = unit.reduce_dtype or unit.param_dtype or unit.stored_dtype
        if unit.stored_dtype is not None and dtype is not None:
            scatters += 1
            held += unit.numel * dtype.itemsize
    size = f"{held / 2**20:,.1f} MiB" if held >= 2**20 else f"{held / 2**10:,.1f} KiB"
    if plan.config.reduce_grads == "every_microbatch":
        other = f"last_microbatch: {scatters} reduce-scatters fewer per further micro-batch, {size} more per rank"
    else:
        other = f"every_microbatch: {size} less per rank, {scatters} reduce-scatters more per further micro-batch"
    return f"{plan.config.reduce_grads} reduces ({other})"


def _policy(plan: FSDP2Plan) -> str:
    """Say which rule chose the units."""
    config = plan.config
    if config.auto_wrap_policy == "SIZE_BASED_WRAP":
        return f"{config.auto_wrap_policy}, modules with more than {config.min_num_params:,} parameters"
    if config.auto_wrap_policy == "NO_WRAP":
        return f"{config.auto_wrap_policy}, the whole model is one unit"
    classes = config.transformer_layer_cls_to_wrap or ("the model's _no_split_modules",)
    return f"{config.auto_wrap_policy}, {', '.join(classes)}"


def _ranks(plan: FSDP2Plan) -> str:
    if plan.shard_size is None or plan.data_parallel_size is None:
        return f"sharding_size {plan.config.sharding_size}"
    copies = plan.data_parallel_size // plan.shard_size
    return f"{plan.data_parallel_size} data-parallel = {copies} replicas x {plan.shard_size} shards"


def _casts(plan: FSDP2Plan) -> str:
    config = plan.config
    if not config.param_dtype or not config.cast_forward_inputs:
        return "off"
    by = "root and units" if plan.root_casts_inputs else "units only (an ignored module has another dtype)"
    return f"to {config.param_dtype} by {by}, except {', '.join(config.keep_input_dtype) or 'nothing'}"


def _reshard(value: bool | int) -> str:
    if value is True:
        return "reshard (ZeRO-3)"
    return "keep gathered (ZeRO-2)" if value is False else f"reshard to {value} ranks"


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.\s])\d+(?![^.\s])", "#", name)


def _collapse(names: list[str] | tuple[str, ...]) -> str:
    """Write ``layers.0, layers.1, layers.2`` as ``layers.{0-2}``; names with several indices keep the first only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return ", ".join(_span(pattern, members) for pattern, members in groups.items())


def _span(pattern: str, members: list[str]) -> str:
    if len(members) == 1:
        return members[0]
    if pattern.count("#") != 1:
        return f"{members[0]} … {members[-1]} ({len(members)})"
    head, tail = pattern.split("#")
    indices = sorted(int(name[len(head) : len(name) - len(tail)]) for name in members)
    spans: list[list[int]] = []
    for i in indices:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{head}{{{text}}}{tail}"
