"""Gradient accumulation: which collectives each choice costs, and that both give the gradients of one large batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import FSDP2Error, PlanError, accumulate, wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    BASE,
    SHARDABLE,
    Recipe,
    Run,
    TwoTowers,
    Use,
    check_close,
    check_moved,
    differences,
    reference,
    wrapped,
)
from tests.distributed.traffic import Traffic
from tests.distributed.training import full

LAST = {"reduce_grads": "last_microbatch"}
RECOMPUTE = {"recompute_modules": ["layers.{*}"]}
AHEAD = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}
FOUR = Recipe(make=SHARDABLE, micro_batches=4, steps=2)
TOKENS = Recipe(make=SHARDABLE, micro_batches=3, use=Use(tokens=True))

# name -> ranks, settings, training
ROWS: dict[str, tuple[int, dict[str, Any], Recipe]] = {
    "ZeRO-3": (2, {}, FOUR),
    "ZeRO-3, AdamW, clipping": (2, {}, Recipe(make=SHARDABLE, micro_batches=4, optimizer="adamw", clip=0.1)),
    "ZeRO-2": (2, {"reshard_after_forward": False}, FOUR),
    "root only": (2, {"sub_modules_to_wrap": []}, FOUR),
    "nested units": (2, {"sub_modules_to_wrap": ["layers.{*}", "layers.{*}.second"]}, FOUR),
    "prefetch": (2, AHEAD, FOUR),
    "recompute": (2, RECOMPUTE, FOUR),
    "recompute, non-reentrant, prefetch": (2, {**RECOMPUTE, **AHEAD, "use_reentrant": False}, FOUR),
    "offload": (2, {"offload_to_cpu": True}, FOUR),
    "sharding_size 1": (2, {"sharding_size": 1}, FOUR),
    "4 ranks, sharding_size 2, AdamW, clipping": (
        4,
        {"sharding_size": 2},
        Recipe(make=SHARDABLE, micro_batches=4, optimizer="adamw", clip=0.1),
    ),
    "4 ranks, sharding_size 2, recompute, prefetch": (4, {"sharding_size": 2, **RECOMPUTE, **AHEAD}, FOUR),
    "4 ranks, sharding_size 2, offload": (4, {"sharding_size": 2, "offload_to_cpu": True}, FOUR),
    "4 ranks, sharding_size 1, ZeRO-2": (4, {"sharding_size": 1, "reshard_after_forward": False}, FOUR),
    "4 ranks, reshard to 2, recompute": (4, {"reshard_after_forward": 2, **RECOMPUTE}, FOUR),
    "uneven tokens": (2, {}, TOKENS),
    "uneven tokens, sharding_size 1": (2, {"sharding_size": 1}, TOKENS),
    "4 ranks, sharding_size 2, uneven tokens, ZeRO-2": (
        4,
        {"sharding_size": 2, "reshard_after_forward": False},
        TOKENS,
    ),
    "4 ranks, sharding_size 2, uneven tokens, AdamW": (
        4,
        {"sharding_size": 2},
        Recipe(make=SHARDABLE, micro_batches=3, use=Use(tokens=True), optimizer="adamw", clip=0.1),
    ),
    "uneven tokens, one micro-batch": (2, {}, Recipe(make=SHARDABLE, use=Use(tokens=True))),
}


def _run(recipe: Recipe, settings: dict[str, Any]) -> Run:
    return wrapped(recipe, {**BASE, **settings})


@pytest.mark.parametrize("reduce", ["every_microbatch", "last_microbatch"])
@pytest.mark.parametrize("name", ROWS)
def test_equals_one_large_batch(name: str, reduce: str, request: pytest.FixtureRequest) -> None:
    ranks, settings, recipe = ROWS[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    runs = pool.run(_run, recipe, {**settings, "reduce_grads": reduce})
    theirs = reference(recipe, ranks)
    check_close(differences("accumulation", f"{name}, {reduce}", runs, theirs), recipe.optimizer)
    for run in runs:
        assert run.whole == []
        assert run.norms == runs[0].norms
        assert all(torch.equal(run.params[n], p) for n, p in runs[0].params.items())
        check_moved(recipe, run)
    if recipe.clip:
        assert min(theirs.norms) > recipe.clip


# When a unit, or half of one, runs; the last micro-batch is the one that reduces.
PARTLY = {
    "unit first used late": Use(last_layer="last micro-batch"),
    "unit not used in the last": Use(last_layer="not the last"),
    "unit used in the first only": Use(last_layer="first micro-batch"),
    "unit first used in step 1": Use(last_layer="from step 1"),
    "unit never used": Use(last_layer="never"),
    "parameter first used late": Use(second="last micro-batch"),
    "parameter not used in the last": Use(second="not the last"),
    "parameter never used": Use(second="never"),
}


FOUR_RANKS = ("unit not used in the last", "parameter not used in the last")


@pytest.mark.parametrize("reduce", ["every_microbatch", "last_microbatch"])
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        *((name, 2, {}) for name in PARTLY),
        *((name, 2, {"sharding_size": 1}) for name in PARTLY),
        *((name, 2, {"reshard_after_forward": False}) for name in list(PARTLY)[:2]),
        *((name, 4, {"sharding_size": 2}) for name in FOUR_RANKS),
    ],
)
def test_what_only_some_micro_batches_run(
    name: str, ranks: int, settings: dict[str, Any], reduce: str, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    recipe = Recipe(make=SHARDABLE, micro_batches=3, steps=2, use=PARTLY[name])
    runs = pool.run(_run, recipe, {**settings, "reduce_grads": reduce})
    shown = "".join(f"{key} {value}, " for key, value in settings.items())
    check_close(differences("partly run", f"{name}, {shown}{reduce}", runs, reference(recipe, ranks)))
    never = {"unit never used": "layers.2.", "parameter never used": "layers.0.second."}.get(name, "-")
    for run in runs:
        check_moved(recipe, run, tuple(n for n in run.params if n.startswith(never)))


@dataclass
class Cost:
    """Collectives of a step after the first, per micro-batch."""

    counts: list[dict[str, int]]
    grads: dict[str, torch.Tensor]


UNITS = 5  # pre, three layers and the root
UNCHECKED = {"check_unit_order": False}


def _cost(settings: dict[str, Any], marked: bool) -> Cost:
    model = wrap_model(SHARDABLE(), {**BASE, **UNCHECKED, **settings})
    rank, counts = dist.get_rank(), []
    FOUR.loss(model, 0, 0, rank, dist.get_world_size()).backward()
    model.zero_grad()
    for micro in range(4):
        with Traffic() as traffic, accumulate(model, last=micro == 3) if marked else nullcontext():
            FOUR.loss(model, 0, micro, rank, dist.get_world_size()).backward()
        counts.append(traffic.count())
    return Cost(counts, {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})


def total(counts: list[dict[str, int]], kind: str) -> int:
    return sum(number for count in counts for name, number in count.items() if name.startswith(kind))


@pytest.mark.parametrize("extra", [{}, AHEAD, RECOMPUTE], ids=["", "prefetch", "recompute"])
def test_collectives_of_four_micro_batches(ranks2: RankPool, extra: dict[str, Any]) -> None:
    plain = ranks2.run(_cost, extra, False)
    every = ranks2.run(_cost, extra, True)
    last = ranks2.run(_cost, {**extra, **LAST}, True)
    for costs in (plain, every):
        for cost in costs:
            assert total(cost.counts, "scatter") == 4 * UNITS
            assert total(cost.counts, "gather") == 4 * (2 * UNITS - 1)
    for cost in last:
        # Each unit once at the start; in the last micro-batch all but the root again, for its backward.
        assert [count.get("gather/2", 0) for count in cost.counts] == [UNITS, 0, 0, UNITS - 1]
        assert [count.get("scatter/2", 0) for count in cost.counts] == [0, 0, 0, UNITS]
    print(
        f"4 micro-batches, {UNITS} units: every_microbatch {total(every[0].counts, 'scatter')} reduce-scatters and "
        f"{total(every[0].counts, 'gather')} all-gathers, last_microbatch {total(last[0].counts, 'scatter')} and "
        f"{total(last[0].counts, 'gather')}"
    )
    for other in (every[0], last[0]):
        for name, grad in plain[0].grads.items():
            torch.testing.assert_close(other.grads[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())


@pytest.mark.parametrize(("reshard", "gathers"), [(False, [5, 0, 0, 0]), (2, [5, 0, 0, 4])])
def test_collectives_of_units_that_do_not_reshard_in_full(
    ranks4: RankPool, reshard: bool | int, gathers: list[int]
) -> None:
    for cost in ranks4.run(_cost, {**LAST, "reshard_after_forward": reshard}, True):
        assert [total([count], "scatter") for count in cost.counts] == [0, 0, 0, UNITS]
        if reshard is False:
            assert [total([count], "gather") for count in cost.counts] == gathers
        else:
            # Torch cannot take a number back, so each backward gathers from the smaller group.
            assert [count.get("gather/4", 0) for count in cost.counts] == [UNITS, 0, 0, 0]
            assert [count.get("gather/2", 0) for count in cost.counts] == [UNITS - 1] * 4


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (2, 4)])
def test_replicas_are_averaged_on_the_last_micro_batch_only(
    size: int, ranks: int, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    for settings in ({}, LAST):
        for cost in pool.run(_cost, {"sharding_size": size, **settings}, True):
            assert [count.get("reduce", 0) for count in cost.counts] == [0, 0, 0, UNITS]
            if size == 2:
                scatters = [0, 0, 0, UNITS] if settings else [UNITS] * 4
                assert [count.get("scatter/2", 0) for count in cost.counts] == scatters
    for cost in pool.run(_cost, {"sharding_size": size}, False):
        assert [count.get("reduce", 0) for count in cost.counts] == [UNITS] * 4


def _seeds(size: int, reduce: str) -> dict[str, torch.Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrap_model(SHARDABLE(seed=rank), {**BASE, "sharding_size": size, "reduce_grads": reduce})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for micro in range(4):
            with accumulate(model, last=micro == 3):
                FOUR.loss(model, step, micro, rank, ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.to_local().detach().clone() for n, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize("reduce", ["every_microbatch", "last_microbatch"])
@pytest.mark.parametrize("size", [1, 2])
def test_replicas_are_equal_whatever_the_seeds(ranks4: RankPool, size: int, reduce: str) -> None:
    shards = ranks4.run(_seeds, size, reduce)
    for rank, mine in enumerate(shards):
        assert len(mine) == 17
        assert all(torch.equal(shard, shards[rank % size][name]) for name, shard in mine.items())
    if size == 2:
        assert not torch.equal(shards[0]["head.weight"], shards[1]["head.weight"][: shards[0]["head.weight"].shape[0]])


def _evaluation_between(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = wrap_model(SHARDABLE(), {**BASE, **settings})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for micro in range(4):
        with accumulate(model, last=micro == 3):
            FOUR.loss(model, 0, micro, rank, ranks).backward()
        if micro < 3:
            model.eval()
            with torch.no_grad():
                FOUR.loss(model, 7, micro, rank, ranks)
            model.train()
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, LAST, {"sharding_size": 1}], ids=["every", "last", "replicas"])
def test_evaluation_between_micro_batches(ranks2: RankPool, settings: dict[str, Any]) -> None:
    theirs = reference(FOUR, 2).grads
    for grads in ranks2.run(_evaluation_between, settings):
        assert grads.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert (grads[name] - grad).abs().max() <= 1e-6 * grad.abs().max()


NO_LAST = (
    "optimizer: step() came after a micro-batch that is not its step's last, so gradients are not reduced yet. Run the "
    "last micro-batch of every step in accumulate(model, last=True)."
)


def _without_last(settings: dict[str, Any], marked: bool) -> tuple[str, bool]:
    model = wrap_model(SHARDABLE(), {**BASE, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, text = dist.get_rank(), ""
    with accumulate(model, last=False):
        FOUR.loss(model, 0, 0, rank, 2).backward()
    try:
        optimizer.step()
    except FSDP2Error as error:
        text = str(error)
    with accumulate(model, last=True) if marked else nullcontext():  # as a framework does, which marks the others only
        FOUR.loss(model, 0, 1, rank, 2).backward()
    before = full(model.head.weight)
    optimizer.step()
    return text, torch.equal(before, full(model.head.weight))


@pytest.mark.parametrize("settings", [{}, LAST, {"sharding_size": 1}], ids=["every", "last", "replicas"])
@pytest.mark.parametrize("marked", [True, False])
def test_step_without_a_last_micro_batch(ranks2: RankPool, settings: dict[str, Any], marked: bool) -> None:
    assert ranks2.run(_without_last, settings, marked) == [(NO_LAST, False)] * 2


def test_accumulate_needs_a_wrapped_model() -> None:
    with pytest.raises(PlanError) as caught, accumulate(TwoTowers(), last=True):
        pass
    assert str(caught.value) == "accumulate: the model is not wrapped. Call wrap_model first."


def _bf16(stored: torch.dtype, reduce: str, size: int | str, whole: bool) -> float:
    """Return how far 64 added gradients are from the sum in fp64 of the same bf16 gradients."""

    def make(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(dtype)

    def loss(model: nn.Module, micro: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * micro + rank))
        output: torch.Tensor = model(x.to(dtype)).float()
        return (output - 1).square().mean() / 64

    settings = {"sharding_size": size, "param_dtype": "bf16", "reduce_dtype": "fp32", "reduce_grads": reduce}
    ours = make(stored)
    wrap_model(ours, {**settings, "sub_modules_to_wrap": ["0"], "ignored_modules": ["2"] if whole else []})
    for micro in range(64):
        with accumulate(ours, last=micro == 63):
            loss(ours, micro, dist.get_rank(), stored).backward()
    exact = make(torch.bfloat16)
    sums = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in exact.named_parameters()}
    for rank in range(dist.get_world_size()):
        for micro in range(64):
            loss(exact, micro, rank, torch.bfloat16).backward()
            for name, param in exact.named_parameters():
                assert param.grad is not None
                sums[name] += param.grad.double() / dist.get_world_size()
                param.grad = None
    # 2.* is the whole module, whose inputs are cast to its own dtype: its gradients differ where it computes in fp32.
    names = [name for name in sums if not whole or name.startswith("2.") == (stored == torch.bfloat16)]
    got = {name: full(param.grad).double() for name, param in ours.named_parameters() if param.grad is not None}
    return max(((got[n] - sums[n]).abs().max() / sums[n].abs().max()).item() for n in names)


@pytest.mark.parametrize("reduce", ["every_microbatch", "last_microbatch"])
@pytest.mark.parametrize(("ranks", "size"), [(2, "auto"), (2, 1), (4, 2)])
def test_fp32_reduction_of_bf16_gradients(
    reduce: str, ranks: int, size: int | str, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    masters = max(pool.run(_bf16, torch.float32, reduce, size, False))
    stored = max(pool.run(_bf16, torch.bfloat16, reduce, size, False))
    print(
        f"64 bf16 micro-batches, {ranks} ranks, sharding_size {size}, {reduce}: {masters:.1e}, bf16 stored {stored:.1e}"
    )
    assert masters < 1e-6  # everything after the bf16 gradients themselves is fp32
    if reduce == "last_microbatch" or size != "auto":
        assert stored < 2**-8  # added in fp32, rounded once
    else:
        # The sharded .grad of a bf16 parameter is bf16 and every micro-batch is rounded into it; the plan says so.
        assert 2**-8 < stored < 0.05


def test_whole_bf16_gradients_add_up_as_in_ddp(ranks2: RankPool) -> None:
    assert 2**-8 < max(ranks2.run(_bf16, torch.bfloat16, "every_microbatch", "auto", True)) < 0.05
