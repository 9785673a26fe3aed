"""Each way around a difference between versions of torch works on every version, needed there or not."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import FSDP2Error, _torch_older, torch_compat, wrap_model
from mindspeed_fsdp2.mesh import build_mesh
from tests.distributed.chains import Block, Chain, inputs
from tests.distributed.ranks import RankPool
from tests.distributed.training import full

BLOCKS: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["blocks.{*}"]}
SETTER = "set_force_sum_reduction_for_comms"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def undo() -> None:
    for row in torch_compat.REBOUND:
        row.uninstall()


def gloo_averages() -> bool:
    """Return whether gloo of this torch gives the mean of 1, 2, 3 ... where FSDP asks for it; in its own words."""
    ranks = dist.get_world_size()
    mine, sent = torch.zeros(1), torch.full((ranks,), 1.0 + dist.get_rank())
    work = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work(mine, sent, op=dist.ReduceOp.AVG)
    return mine.item() == (ranks + 1) / 2


def _wrapped_on_gloo(settings: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
    row = torch_compat.REBOUND[0]
    undo()
    original = row.held
    wrap_model(Chain(), {**BLOCKS, **settings})
    first = row.held is not original
    wrap_model(Chain(), {**BLOCKS, **settings})
    once = getattr(row.held, "__wrapped__", original) is original
    undo()
    return gloo_averages(), first, once, row.held is original


@pytest.mark.parametrize("settings", [{}, {"sharding_size": 1}])
def test_torch_is_rebound_only_where_gloo_averages_wrongly(ranks2: RankPool, settings: dict[str, Any]) -> None:
    for averages, rebound, once, restored in ranks2.run(_wrapped_on_gloo, settings):
        assert rebound is (not averages)
        assert once
        assert restored


def _gradients(settings: dict[str, Any], by_sums: bool) -> list[float]:
    """Return the largest difference from the mean over ranks, of each parameter's gradient."""
    model = Chain()
    plain = copy.deepcopy(model)
    wrap_model(model, {**BLOCKS, **settings})
    if by_sums:
        torch_compat.sum_and_divide(model)
    for loss in (model(inputs()), plain(inputs())):
        loss.backward()
    worst = []
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        dist.all_reduce(theirs.grad)
        mean = theirs.grad / dist.get_world_size()
        worst.append(((full(ours.grad) - mean).abs().max() / mean.abs().max()).item())
    return worst


@pytest.mark.parametrize("by_sums", [False, True])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, 1e-6), ({"sharding_size": 1}, 1e-6), ({"sharding_size": 2}, 1e-6), ({"reduce_dtype": "bf16"}, 0.02)],
)
def test_gradients_are_means(ranks4: RankPool, settings: dict[str, Any], tolerance: float, by_sums: bool) -> None:
    """An optimizer such as Adam, and clipping, would hide a factor."""
    for worst in ranks4.run(_gradients, settings, by_sums):
        assert max(worst) <= tolerance


def _decisions(wrong_on: int) -> list[str]:
    calls: list[str] = []

    def scatters(*_unused: Any) -> bool:
        calls.append("probed")
        return dist.get_rank() != wrong_on

    with (
        replaced(torch_compat, "_scatters_average", scatters),
        replaced(torch_compat, "sum_and_divide", lambda _root: calls.append("sums")),
    ):
        wrap_model(Chain(), BLOCKS)
    return calls


def test_ranks_decide_alike(ranks2: RankPool) -> None:
    assert ranks2.run(_decisions, 1) == [["probed", "sums"]] * 2
    assert ranks2.run(_decisions, 9) == [["probed"]] * 2


def _other_backend() -> str:
    def refuse(*_unused: Any) -> bool:
        raise AssertionError("probed")

    with (
        replaced(torch_compat, "_scatters_average", refuse),
        replaced(dist, "get_backend_config", lambda _group=None: "cpu:mpi,cuda:gloo"),
    ):
        torch_compat.mend_averages(nn.Linear(2, 2), build_mesh(2, None, "cpu"), None, torch.device("cpu"))
    return "left alone"


def test_other_backends_are_left_alone(ranks2: RankPool) -> None:
    assert ranks2.run(_other_backend) == ["left alone"] * 2


def _without_a_way() -> str:
    model = wrap_model(Chain(), BLOCKS)
    row = torch_compat.Rebound(types.ModuleType("torch"), "gone", lambda f: f, why="It is wrong.", remove_when="never")
    held: Callable[..., Any] | None = vars(FSDPModule).get(SETTER)
    if held is not None:
        delattr(FSDPModule, SETTER)
    try:
        with replaced(torch_compat, "REBOUND", (row,)):
            torch_compat.sum_and_divide(model)
    except FSDP2Error as error:
        return str(error)
    finally:
        if held is not None:
            setattr(FSDPModule, SETTER, held)
    return ""


def test_torch_without_a_way_to_sum(ranks2: RankPool) -> None:
    text = "process_group: It is wrong. Use gloo with torch 2.8 or newer, or another backend."
    assert ranks2.run(_without_a_way) == [text] * 2


def _factors() -> list[Any]:
    world = dist.group.WORLD

    def original(_shards: Any, _replicas: Any, dtype: torch.dtype, _device_type: str = "") -> Any:
        return (2.0, 2.0) if dtype == torch.float16 else (None, None)

    ours = torch_compat.REBOUND[0].make(original)
    return [
        ours(world, None, torch.float32, "cpu"),
        ours(world, world, torch.bfloat16, "cpu"),
        ours(world, world, torch.float16, "cpu"),
        ours(world, None, torch.float32, "npu"),
    ]


def test_divide_factors(ranks2: RankPool) -> None:
    assert ranks2.run(_factors) == [[(1.0, 2.0), (1.0, 4.0), (2.0, 2.0), (None, None)]] * 2


def _resharded(private: bool) -> list[bool]:
    model = wrap_model(Chain(), BLOCKS)
    seen = []
    for value in (False, True):
        for block in model.blocks:
            (_torch_older if private else torch_compat).set_reshard_after_forward(block, value)
        model(inputs()).backward()  # the first forward makes the root of torch 2.7 what it is
        model(inputs())
        seen.append(all(isinstance(param, DTensor) for block in model.blocks for param in block.parameters()))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("private", [False, True])
def test_set_reshard_after_forward(ranks2: RankPool, private: bool) -> None:
    assert ranks2.run(_resharded, private) == [[False, True]] * 2


def _frozen_in_two_dtypes() -> list[torch.Tensor | None]:
    model = nn.Sequential(Block(8), Block(8))
    model[0].requires_grad_(False)
    model[0].up.to(torch.bfloat16)
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["0", "1"], "param_dtype": "fp32"})
    model(inputs()).square().mean().backward()
    return [None if param.grad is None else full(param.grad) for param in model.parameters()]


def test_unit_that_is_frozen_in_two_dtypes(ranks2: RankPool) -> None:
    for grads in ranks2.run(_frozen_in_two_dtypes):
        assert grads[:2] == [None, None]
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads[2:])


def _own_groups() -> list[float]:
    """Rank 0 belongs to one group more than the others, so that torch would give new ones different names."""
    dist.new_group([0])
    sums = []
    for group in (None, torch_compat.new_group_of(None)):
        mine = torch.tensor(1.0 + dist.get_rank())
        dist.all_reduce(mine, group=torch_compat.new_group_of(group, backend="gloo"))
        sums.append(mine.item())
    return sums


def test_own_groups_where_ranks_belong_to_different_numbers_of_groups(ranks2: RankPool) -> None:
    assert ranks2.run(_own_groups) == [[3.0, 3.0]] * 2
