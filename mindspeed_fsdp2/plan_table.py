"""Print a plan: one line per kind of unit, short enough to read at the top of a training log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import FSDP2Plan, Unit


def plan_table(plan: FSDP2Plan) -> str:
    """Return ``plan`` as lines of text; units that differ by an index only share one line."""
    config = plan.config
    rows = [("unit", "modules", "units", "parameters each", "stored")]
    merged: dict[tuple[str, str, int, str], list[Unit]] = {}
    for unit in plan.assumed_order:
        stored = str(unit.stored_dtype).removeprefix("torch.") if unit.stored_dtype else "-"
        merged.setdefault((_pattern(unit.name), unit.kind, unit.numel, stored), []).append(unit)
    for (_, kind, numel, stored), units in merged.items():
        rows.append((_collapse([u.name for u in units]), kind, str(len(units)), f"{numel:,}", stored))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["FSDP2 plan", f"  ranks          {_ranks(plan)}"]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines += [
        f"  precision      compute {config.param_dtype or 'as stored'}, reduce "
        f"{config.reduce_dtype or config.param_dtype or 'as stored'}, output {config.output_dtype or 'unchanged'}",
        f"  input cast     {_casts(plan)}",
        f"  after forward  {_reshard(config.reshard_after_forward)}; the root stays gathered until its backward",
        f"  prefetch       forward {config.num_to_forward_prefetch}, backward {config.num_to_backward_prefetch} "
        "(execution order: assumed from registration until recorded)",
    ]
    if plan.ignored:
        lines.append(f"  ignored        {_collapse(plan.ignored)}")
    if plan.recompute:
        how = "reentrant" if config.use_reentrant else "non-reentrant"
        lines.append(f"  recompute      {_collapse(plan.recompute)} ({how})")
    return "\n".join(lines)


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
