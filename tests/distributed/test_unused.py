"""Ranks and micro-batches that use different parameters of one unit."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import FSDP2Error, wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    BASE,
    SHARDABLE,
    WIDTH,
    Recipe,
    Run,
    Use,
    check_close,
    check_equal_over_ranks,
    check_moved,
    differences,
    inputs,
    reference,
    wrapped,
)
from tests.distributed.training import full

RECOMPUTE: dict[str, Any] = {"recompute_modules": ["layers.{*}"]}
LAST: dict[str, Any] = {"reduce_grads": "last_microbatch"}


def _half_frozen() -> nn.Module:
    """Where the second half of the first layer does not run, that unit has no gradient at all."""
    model = SHARDABLE()
    model.layers[0].first.requires_grad_(False)
    return model


# name -> ranks, settings, which ranks use a part of a unit (a half of the first layer, the tower in the root)
ROWS: dict[str, tuple[int, dict[str, Any], Recipe]] = {
    "half of a unit": (2, {}, Recipe(make=SHARDABLE, use=Use(second="odd ranks"))),
    "half of a unit, AdamW": (4, {}, Recipe(make=SHARDABLE, use=Use(second="taking turns"), optimizer="adamw")),
    "sharding_size 1": (4, {"sharding_size": 1}, Recipe(make=SHARDABLE, use=Use(second="odd ranks"))),
    "sharding_size 2": (4, {"sharding_size": 2}, Recipe(make=SHARDABLE, use=Use(second="taking turns"))),
    "ZeRO-2": (4, {"reshard_after_forward": False}, Recipe(make=SHARDABLE, use=Use(second="odd ranks"))),
    "recompute": (2, RECOMPUTE, Recipe(make=SHARDABLE, use=Use(second="taking turns"))),
    "recompute, not reentrant": (
        2,
        {**RECOMPUTE, "use_reentrant": False},
        Recipe(make=SHARDABLE, use=Use(second="taking turns")),
    ),
    "offload": (2, {"offload_to_cpu": True}, Recipe(make=SHARDABLE, use=Use(second="taking turns"))),
    "part of the root": (2, {}, Recipe(make=SHARDABLE, use=Use(tower="odd ranks"))),
    "part of the root, taking turns": (2, {}, Recipe(make=SHARDABLE, use=Use(tower="taking turns"), steps=4)),
    "accumulation": (2, {}, Recipe(make=SHARDABLE, use=Use(second="last micro-batch of odd ranks"), micro_batches=3)),
    "accumulation, last": (2, LAST, Recipe(make=SHARDABLE, use=Use(second="taking turns"), micro_batches=3)),
    "accumulation, replicas": (
        4,
        {"sharding_size": 2},
        Recipe(make=SHARDABLE, use=Use(second="taking turns"), micro_batches=3),
    ),
    "accumulation, replicas, last": (
        4,
        {"sharding_size": 2, **LAST},
        Recipe(make=SHARDABLE, use=Use(second="last micro-batch of odd ranks"), micro_batches=2),
    ),
    "not marked": (2, {}, Recipe(make=SHARDABLE, use=Use(second="taking turns"), micro_batches=2, marked=False)),
    "not marked, first only": (
        2,
        {},
        Recipe(make=SHARDABLE, use=Use(second="first micro-batch"), micro_batches=2, marked=False),
    ),
    "the only trainable half": (2, {}, Recipe(make=_half_frozen, use=Use(second="odd ranks"))),
    "the only trainable half, replicas": (
        2,
        {"sharding_size": 1},
        Recipe(make=_half_frozen, use=Use(second="last micro-batch of odd ranks"), micro_batches=2),
    ),
}


def _run(recipe: Recipe, settings: dict[str, Any]) -> Run:
    return wrapped(recipe, {**BASE, **settings})


@pytest.mark.parametrize("name", ROWS)
def test_equals_one_process_on_all_data(name: str, request: pytest.FixtureRequest) -> None:
    ranks, settings, recipe = ROWS[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    runs = pool.run(_run, recipe, settings)
    check_close(differences("unused", name, runs, reference(recipe, ranks)), recipe.optimizer)
    check_equal_over_ranks(runs)
    frozen = tuple(name for name, param in recipe.make().named_parameters() if not param.requires_grad)
    check_moved(recipe, runs[0], frozen)


class Experts(nn.Module):
    """One unit of experts of one size, of which every rank uses another one: sums of the wrong ones would fit."""

    def __init__(self, out: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.out = out

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return self.out(self.experts[which](x))


class Routed(nn.Module):
    """A linear map and experts; returns the loss, or an object in which no hook finds it."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Experts(torch.tanh)])
        self.never = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, which: int) -> Any:
        loss = self.layers[0](self.first(x), which).square().mean()
        return types.SimpleNamespace(loss=loss) if self.hidden else loss


def _loss(output: Any) -> torch.Tensor:
    return output.loss if isinstance(output, types.SimpleNamespace) else output


def _routed(settings: dict[str, Any], hidden: bool) -> tuple[float, list[str], list[bool]]:
    """Return the largest difference to the same training in one process, and what must not have moved."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, theirs = Routed(hidden), Routed(hidden)
    wrap_model(ours, {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"], **settings})
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in (ours, theirs)]
    worst = 0.0
    for step in range(24):  # more than the 20 forwards in which the order of units is compared
        _loss(ours(inputs(step, 0, rank), (rank + step) % 4)).backward()
        for other in range(ranks):
            (_loss(theirs(inputs(step, 0, other), (other + step) % 4)) / ranks).backward()
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            if mine.grad is not None and its.grad is not None:
                worst = max(worst, (full(mine.grad) - its.grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    worst = max([worst, *((full(mine) - its).abs().max().item() for mine, its in pairs)])
    start = dict(Routed(hidden).named_parameters())
    still = [name for name, param in ours.named_parameters() if torch.equal(full(param), start[name])]
    return worst, still, [param in optimizers[0].state for param in ours.parameters()]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, RECOMPUTE, {"sharding_size": 1}, {"check_unit_order": True}, {"check_unit_order": False}],
    ids=["", "recompute", "replicas", "checked", "unchecked"],
)
def test_experts_of_one_size_after_the_first_forwards(ranks2: RankPool, settings: dict[str, Any], hidden: bool) -> None:
    for worst, still, state in ranks2.run(_routed, settings, hidden):
        assert worst < 2e-6
        assert still == ["never"]  # no decay for a parameter that no rank uses
        assert state == [name != "never" for name, _ in Routed(False).named_parameters()]


class Branches(nn.Module):
    """Three units of one size on one input; returns one loss for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> list[torch.Tensor]:
        losses = [layer(x).square().mean() for layer in self.layers]
        return [losses[n] for n in used]


def _branches(by_rank: bool) -> str:
    """Let the last rank's loss leave a unit out, or let it run backward in another order."""
    settings = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"], "reshard_after_forward": not by_rank}
    model = wrap_model(Branches(), settings)
    x = inputs(0, 0, dist.get_rank()).requires_grad_()
    torch.stack(model(x)).sum().backward()
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        if by_rank:
            losses = model(x)
            for loss in reversed(losses) if last else losses:
                loss.backward()
        else:
            torch.stack(model(x, (0, 2) if last else (0, 1, 2))).sum().backward()
    except FSDP2Error as error:
        return str(error)
    return ""


REST = (
    "very rank's loss must use the output of every unit it runs. List a module whose output only some ranks use in "
    "optional_modules; where one is listed, frozen units after it get a gradient with it only: add its output times 0 "
    "on the other ranks."
)


def test_output_that_one_rank_does_not_use(ranks2: RankPool) -> None:
    text = (
        "backward will reach different units: layers.1 on rank 0 only. The ranks reduce a unit's gradients together, "
    )
    text += f"so e{REST}"
    assert ranks2.run(_branches, False) == [text] * 2


def test_units_reduced_in_another_order(ranks2: RankPool, ranks4: RankPool) -> None:
    text = "the ranks reduced the gradients of different units: as number 1 of this step "
    assert ranks2.run(_branches, True) == [f"{text}layers.0 on rank 0, layers.2 on rank 1. E{REST}"] * 2
    seen = "layers.0 on rank 0, layers.0 on rank 1, layers.0 on rank 2, layers.2 on rank 3"
    assert ranks4.run(_branches, True) == [f"{text}{seen}. E{REST}"] * 4
