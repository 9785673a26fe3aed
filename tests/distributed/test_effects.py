"""What each key of the YAML does, in numbers: collectives, saved bytes, order of gathers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import wrap_model
from mindspeed_fsdp2.apply import sharded
from tests.distributed.chains import Chain, inputs, sizes
from tests.distributed.models import build, tokens_of
from tests.distributed.ranks import RankPool
from tests.distributed.traffic import Collective, Traffic, saved_bytes
from tests.distributed.versions import RESHARDS_IN_RECOMPUTATION

# The check of the unit order has collectives of its own.
BLOCKS = {"sharding_size": "auto", "sub_modules_to_wrap": ["blocks.{*}"], "check_unit_order": False}
UNITS = 5  # four blocks and the root
TOTAL = sum(sizes())


@dataclass
class Step:
    """Collectives of the second training step."""

    forward: list[Collective]
    backward: list[Collective]
    count: dict[str, int]
    local: int  # elements this rank stores


def _step(settings: dict[str, Any], frozen: tuple[int, ...] = ()) -> Step:
    model = wrap_model(Chain(frozen=frozen), {**BLOCKS, **settings})
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    model(inputs(0)).backward()
    with Traffic() as traffic:
        loss = model(inputs(1))
        forward = len(traffic.all)
        loss.backward()
    return Step(traffic.all[:forward], traffic.all[forward:], traffic.count(), local)


def both(pool: RankPool, settings: dict[str, Any]) -> Step:
    """Return rank 0's step after checking that all ranks saw the same."""
    steps: list[Step] = pool.run(_step, settings)
    assert all(step == steps[0] for step in steps)
    assert steps[0].local > 0
    return steps[0]


@pytest.mark.parametrize(
    ("size", "count", "stored"),
    [
        ("auto", {"gather/4": 2 * UNITS - 1, "scatter/4": UNITS}, TOTAL // 4),
        (4, {"gather/4": 2 * UNITS - 1, "scatter/4": UNITS}, TOTAL // 4),
        (2, {"gather/2": 2 * UNITS - 1, "scatter/2": UNITS, "reduce": UNITS}, TOTAL // 2),
        (1, {"reduce": UNITS}, TOTAL),
    ],
)
def test_sharding_size(ranks4: RankPool, size: int | str, count: dict[str, int], stored: int) -> None:
    step = both(ranks4, {"sharding_size": size})
    assert step.count == count
    assert step.local == stored
    if size == 2:  # replicas exchange shards, not whole gradients
        assert sum(c.numel for c in step.backward if c.kind == "reduce") == TOTAL // 2


@pytest.mark.parametrize(
    ("units", "gathered"),
    [
        ([], [TOTAL]),
        ([["blocks.{*}"]], [32, TOTAL - 32]),
        ([["blocks.0", "blocks.2"], "blocks.1"], [32 + 640, 384, 256 + 512]),
        (["blocks.{*}"], [32, 256, 384, 512, 640]),
        (["blocks.{*}", "blocks.3.up"], [32, 256, 384, 512, 320, 320]),
    ],
)
def test_sub_modules_to_wrap(ranks2: RankPool, units: list[Any], gathered: list[int]) -> None:
    step = both(ranks2, {"sub_modules_to_wrap": units})
    assert sorted(c.numel for c in step.forward) == sorted(gathered)
    assert sorted(c.numel for c in step.backward if c.kind == "scatter") == sorted(gathered)
    assert step.count == {"gather/2": 2 * len(gathered) - 1, "scatter/2": len(gathered)}


@pytest.mark.parametrize(
    ("reshard", "backward"),
    [
        (True, {"gather/4": UNITS - 1, "scatter/4": UNITS}),
        (4, {"gather/4": UNITS - 1, "scatter/4": UNITS}),
        (2, {"gather/2": UNITS - 1, "scatter/4": UNITS}),
        (False, {"scatter/4": UNITS}),
    ],
)
def test_reshard_after_forward(ranks4: RankPool, reshard: bool | int, backward: dict[str, int]) -> None:
    step = both(ranks4, {"reshard_after_forward": reshard})
    assert [c.kind for c in step.forward] == ["gather"] * UNITS
    assert {name: n - UNITS * (name == "gather/4") for name, n in step.count.items()} == {"gather/4": 0, **backward}


def _gathered_after_forward(settings: dict[str, Any]) -> set[str]:
    model = wrap_model(Chain(), {**BLOCKS, **settings})
    model(inputs())
    return {name for name, param in model.named_parameters() if not isinstance(param, DTensor)}


def test_what_stays_gathered_after_forward(ranks2: RankPool) -> None:
    everything = {name for name, _ in Chain().named_parameters()}
    for rank in range(2):
        assert ranks2.run(_gathered_after_forward, {})[rank] == {"head.weight"}
        assert ranks2.run(_gathered_after_forward, {"reshard_after_forward": False})[rank] == everything


@dataclass
class Recomputed:
    """What one training step with or without recomputation did."""

    saved: int
    runs: dict[str, int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def _recompute(settings: dict[str, Any] | None) -> Recomputed:
    model: nn.Module = build()
    if settings is not None:
        base = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"], "check_unit_order": False}
        model = wrap_model(model, {**base, **settings})
    runs = {name: 0 for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def counter(name: str) -> Any:
        def hook(*_: Any) -> None:
            runs[name] += 1

        return hook

    for name in runs:
        model.get_submodule(name).register_forward_pre_hook(counter(name))
    with Traffic() as traffic:
        with saved_bytes(model) as total:
            loss = model(tokens_of(0, dist.get_rank()))
        saved = total()
        loss.backward()
    return Recomputed(saved, runs, traffic.count(), [*dict(model.named_modules()), *model.state_dict()])


def test_recompute_modules(ranks2: RankPool) -> None:
    plain, off = ranks2.run(_recompute, None)[0], ranks2.run(_recompute, {})[0]
    assert plain.saved == off.saved
    for reentrant in (True, False):
        settings = {"recompute_modules": ["layers.{0-1}"], "use_reentrant": reentrant}
        for on in ranks2.run(_recompute, settings):
            linear = {f"layers.{n}.{leaf}": 1 + (n < 2) for n in range(3) for leaf in ("up", "down")}
            assert on.runs == {**linear, "head": 1}
            assert on.count == off.count == {"gather/2": 2 * 4 - 1, "scatter/2": 4}
            assert on.names == off.names == plain.names
            print(f"recompute, reentrant {reentrant}: {off.saved} bytes saved for backward without, {on.saved} with")
            hidden = 2 * 6 * 16 * 4  # what a recomputed layer still keeps: its input, and once the angles
            assert off.saved - on.saved >= 2 * 5 * hidden
            kept = ranks2.run(_recompute, {"recompute_modules": ["layers.{*}"], "use_reentrant": reentrant})[0].saved
            assert on.saved - kept >= 5 * hidden


@dataclass
class Prefetch:
    """Recorded order and when units were gathered in the next step."""

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    ahead: list[tuple[str, list[str]]] = field(default_factory=list)  # unit -> gathered when it began
    behind: list[tuple[str, list[str]]] = field(default_factory=list)  # the same for backward
    warnings: list[str] = field(default_factory=list)
    set: int = 0
    hooks: int = 0


def _prefetch(
    settings: dict[str, Any], order: tuple[int, ...], frozen: tuple[int, ...] = (), evaluate: bool = False
) -> Prefetch:
    model = wrap_model(Chain(order, frozen), {**BLOCKS, **settings})
    handle = sharded(model)
    assert handle is not None
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    if evaluate:
        with torch.no_grad():
            model(inputs())
        assert handle.prefetch is None or handle.prefetch.order is None
    model(inputs()).backward()
    result = Prefetch(hooks=sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) - before)
    if handle.prefetch is not None and handle.prefetch.order is not None:
        result.forward, result.backward = handle.prefetch.order.forward, handle.prefetch.order.backward
    names = sizes()
    with Traffic() as traffic:

        def gathered(events: list[tuple[str, list[str]]], name: str) -> Any:
            def hook(*_: Any) -> None:
                events.append((name, [names[c.numel] for c in traffic.all[start:] if c.kind == "gather"]))

            return hook

        start = 0
        for n, block in enumerate(model.blocks):
            block.register_forward_pre_hook(gathered(result.ahead, f"blocks.{n}"))
            block.down.register_full_backward_pre_hook(gathered(result.behind, f"blocks.{n}"))
        loss = model(inputs(1))
        start = len(traffic.all)
        loss.backward()
    return result


FORWARD = ("(root)", "blocks.2", "blocks.0", "blocks.3", "blocks.1")
ORDER = (2, 0, 3, 1)


def test_prefetch_follows_execution_not_registration(ranks2: RankPool) -> None:
    settings = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 1}
    for evaluate in (False, True):
        for result in ranks2.run(_prefetch, settings, ORDER, (), evaluate):
            assert result.forward == FORWARD
            assert result.backward == ("(root)", "blocks.1", "blocks.3", "blocks.0", "blocks.2")
            assert result.ahead == [
                ("blocks.2", list(FORWARD[:4])),
                ("blocks.0", list(FORWARD)),
                ("blocks.3", list(FORWARD)),
                ("blocks.1", list(FORWARD)),
            ]
            assert result.behind == [
                ("blocks.1", ["blocks.1", "blocks.3"]),
                ("blocks.3", ["blocks.1", "blocks.3", "blocks.0"]),
                ("blocks.0", ["blocks.1", "blocks.3", "blocks.0", "blocks.2"]),
                ("blocks.2", ["blocks.1", "blocks.3", "blocks.0", "blocks.2"]),
            ]


def test_prefetch_depths(ranks2: RankPool) -> None:
    others = ranks2.run(_prefetch, {}, ORDER)[0].hooks  # some guards need a unit's first forward only, too
    for depth in (0, 1, 2, 9):
        settings = {"num_to_forward_prefetch": depth, "num_to_backward_prefetch": depth}
        result = ranks2.run(_prefetch, settings, ORDER)[0]
        begun = [len(gathered) for _, gathered in result.ahead]
        assert begun == [min(5, n + 2 + depth) for n in range(4)]
        backwards = [len(gathered) for _, gathered in result.behind]
        assert backwards == [min(4, n + 1 + max(depth, 1)) for n in range(4)]  # torch itself is one unit ahead
        assert (result.forward == ()) is (depth == 0)
        assert result.hooks - others == (0 if depth == 0 else -2 * UNITS)  # the recorder takes its own away


def test_prefetch_of_units_that_backward_never_reaches(ranks2: RankPool) -> None:
    settings = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 2}
    for result in ranks2.run(_prefetch, settings, (0, 1, 2, 3), (0, 1)):
        assert result.forward == ("(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
        assert result.backward == ("(root)", "blocks.3", "blocks.2")


def test_prefetch_without_count(ranks2: RankPool) -> None:
    expected = both(ranks2, {}).count
    for ahead in ({"num_to_forward_prefetch": 2}, {"num_to_backward_prefetch": 2}):
        assert both(ranks2, ahead).count == expected


def _nested_order(recompute: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    settings = {"sub_modules_to_wrap": ["blocks.{1-2}", "blocks.{1-2}.up"], "num_to_backward_prefetch": 2}
    model = wrap_model(Chain(), {**BLOCKS, **settings, "num_to_forward_prefetch": 2, **recompute})
    model(inputs()).backward()
    handle = sharded(model)
    assert handle is not None and handle.prefetch is not None and handle.prefetch.order is not None
    with Traffic() as traffic:
        model(inputs()).backward()
    return handle.prefetch.order.forward, handle.prefetch.order.backward, traffic.count()


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
def test_prefetch_order_of_nested_units(ranks2: RankPool, kind: str) -> None:
    recompute = {"recompute_modules": ["blocks.{1-3}"], "use_reentrant": kind == "reentrant"} if kind != "none" else {}
    for forward, backward, count in ranks2.run(_nested_order, recompute):
        assert forward == ("(root)", "blocks.1", "blocks.1.up", "blocks.2", "blocks.2.up")
        assert backward == ("(root)", "blocks.2", "blocks.2.up", "blocks.1", "blocks.1.up")
        again = 3 if recompute and RESHARDS_IN_RECOMPUTATION else 0  # otherwise recomputation gathers nothing twice
        assert count == {"gather/2": 2 * 5 - 1 + again, "scatter/2": 5}


def _different_orders() -> Prefetch:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger, handler = logging.getLogger("mindspeed_fsdp2"), Keep(logging.WARNING)
    order = (0, 1, 2, 3) if dist.get_rank() == 0 else (0, 2, 1, 3)
    ahead = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}
    # One rank a shard group: nothing is gathered, so different orders do no harm before backward.
    model = wrap_model(Chain(order), {**BLOCKS, **ahead, "sharding_size": 1})
    logger.addHandler(handler)
    try:
        model(inputs())
    finally:
        logger.removeHandler(handler)
    handle = sharded(model)
    assert handle is not None and handle.prefetch is not None
    result = Prefetch(warnings=seen, forward=handle.prefetch.order.forward if handle.prefetch.order else ())
    for block in (model, *model.blocks):
        state = fully_shard.state(block)
        result.set += len(state._states_to_forward_prefetch) + len(state._states_to_backward_prefetch)
    return result


def test_prefetch_where_ranks_differ(ranks2: RankPool) -> None:
    for result in ranks2.run(_different_orders):
        assert result.warnings == [
            "prefetch is left to PyTorch: the execution order differs between data-parallel ranks 0 and 1, first at "
            "forward position 2: blocks.1 against blocks.2. Explicit lists that differ between ranks would train on "
            "wrong weights."
        ]
        assert (result.forward, result.set) == ((), 0)
