"""``align_fsdp_param_groups``: norms and router gates of all layers in one unit, with the numbers of data parallelism."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import FSDP2Config, wrap_model
from mindspeed_fsdp2.plan import FSDP2Plan, build_plan
from tests.distributed.ranks import RankPool
from tests.distributed.traffic import Traffic

DIM, EXPERTS = 8, 2


class RMSNorm(nn.RMSNorm):
    pass


class Mixture(nn.Module):
    """Every expert runs on every token, weighted by the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.gate(hidden).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(hidden) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.post_attention_layernorm = nn.LayerNorm(DIM)
        self.mlp = Mixture()
        self.gate = nn.Linear(DIM, DIM)  # beside no experts: a gate of another kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.up(self.input_layernorm(hidden)) * self.gate(hidden).sigmoid()
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).square().mean()


SMALL = tuple(
    [f"layers.{i}.{n}" for i in range(3) for n in ("input_layernorm", "post_attention_layernorm", "mlp.gate")]
    + ["norm"]
)
CONFIG: dict[str, Any] = {
    "sharding_size": "auto",
    "sub_modules_to_wrap": ["layers.{*}"],
    "align_fsdp_param_groups": True,
}


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def train(config: dict[str, Any] | None, steps: int = 3) -> dict[str, Any]:
    rank = dist.get_rank()
    model: nn.Module = build()
    if config is not None:
        model = wrap_model(model, config)
        assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4 + len(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, first = [], {}
    for step in range(steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            loss = model(torch.randn(2, 5, 4, generator=generator))
            loss.backward()
            losses.append(loss.item())
        for name, param in model.named_parameters():
            if config is None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            if step == 0:
                first[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "grads": first, "params": {n: full(p) for n, p in model.named_parameters()}}


def full(param: torch.Tensor) -> torch.Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()


@pytest.fixture(scope="module")
def plain(ranks2: RankPool) -> list[dict[str, Any]]:
    return ranks2.run(train, None)


def assert_equal(wrapped: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    # Not bit for bit: a kernel rounds differently where a gathered tensor starts in the middle of a buffer.
    for mine, theirs in zip(wrapped, plain, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        for kind in ("grads", "params"):
            assert mine[kind].keys() == theirs[kind].keys()
            for name, value in theirs[kind].items():
                torch.testing.assert_close(mine[kind][name], value, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_modules": ["layers.{*}"], "use_reentrant": False},
        {"recompute_modules": ["layers.{*}"], "use_reentrant": True},
        {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
        {"reshard_after_forward": False},
        {"reduce_grads": "last_microbatch"},
    ],
    ids=["plain", "recompute", "recompute-reentrant", "prefetch", "zero2", "last-microbatch"],
)
def test_equals_data_parallel(ranks2: RankPool, plain: list[dict[str, Any]], changes: dict[str, Any]) -> None:
    assert_equal(ranks2.run(train, CONFIG | changes), plain)


def test_equals_data_parallel_with_replicas(ranks4: RankPool) -> None:
    assert_equal(ranks4.run(train, CONFIG | {"sharding_size": 2}), ranks4.run(train, None))


def collectives() -> dict[str, int]:
    model = wrap_model(build(), CONFIG | {"check_unit_order": False})
    model(torch.ones(2, 5, 4)).backward()  # shapes are learnt in the first step
    with Traffic() as traffic:
        model(torch.ones(2, 5, 4)).backward()
    return traffic.count()


def test_they_are_gathered_and_reduced_once(ranks2: RankPool) -> None:
    # Forward and backward gather three layers; the root and the small unit stay gathered in between.
    assert ranks2.run(collectives)[0] == {"gather/2": 2 * 3 + 2, "scatter/2": 5}


# The plan


def plan(model: nn.Module | None = None, **changes: Any) -> FSDP2Plan:
    return build_plan(FSDP2Config(**(CONFIG | changes)), build() if model is None else model)


def test_norms_and_gates_leave_the_layers() -> None:
    made = plan()
    units = {unit.fqns: unit for unit in made.units}
    assert list(units) == [SMALL, ("layers.2",), ("layers.1",), ("layers.0",), ("",)]
    assert units[SMALL].reshard is False and units[("layers.0",)].reshard is True
    assert units[SMALL].numel == 3 * (DIM + 2 * DIM + DIM * EXPERTS) + DIM
    assert units[("layers.0",)].numel == (2 + EXPERTS) * (DIM * DIM + DIM)
    assert made.notices == (
        "align_fsdp_param_groups: 10 norms and router gates such as 'layers.0.mlp.gate' make one unit, which stays "
        "gathered from its first use to its backward.",
    )
    assert (
        "layers.{0-2}.input_layernorm + layers.{0-2}.post_attention_layernorm + layers.{0-2}.mlp.gate + norm "
        in str(made)
    )


def test_what_is_listed_stays_where_it_is() -> None:
    made = plan(sub_modules_to_wrap=["layers.{*}", ["norm", "head"], "layers.1.mlp.gate"])
    small = next(unit for unit in made.units if len(unit.fqns) > 2)
    assert small.fqns == tuple(name for name in SMALL if name not in ("norm", "layers.1.mlp.gate"))
    assert ("norm", "head") in [unit.fqns for unit in made.units]


def test_ignored_modules_stay_whole() -> None:
    made = plan(sub_modules_to_wrap=["layers.{1-2}"], ignored_modules=["layers.0"])
    small = next(unit for unit in made.units if len(unit.fqns) > 2)
    assert small.fqns == tuple(name for name in SMALL if not name.startswith("layers.0."))


def test_one_unit_for_each_dtype_and_frozen_ones_anywhere() -> None:
    model = build()
    model.layers[1].mlp.gate.bfloat16()
    model.layers[2].input_layernorm.half().requires_grad_(False)
    made = plan(model)
    units = [unit.fqns for unit in made.units]
    assert ("layers.1.mlp.gate",) in units
    assert tuple(name for name in SMALL if name != "layers.1.mlp.gate") in units
    assert "make one unit for each dtype" in made.notices[-1]


def test_a_model_without_norms_is_told() -> None:
    made = plan(nn.Sequential(nn.Linear(2, 2)), sub_modules_to_wrap=["0"])
    assert made.notices == (
        "align_fsdp_param_groups: the model has no norms or router gates outside of the units listed, so it changes "
        "nothing.",
    )


def test_batch_norms_are_left_alone() -> None:
    made = plan(nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2)), sub_modules_to_wrap=[])
    assert [unit.fqns for unit in made.units] == [("1",), ("",)]


class Towered(nn.Module):
    """A frozen embedding, a trainable tower that only some ranks run, layers of which the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8).requires_grad_(False)
        self.tower = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(OrderedDict(norm=nn.RMSNorm(8), up=nn.Linear(8, 8), act=nn.Tanh())) for _ in range(3)
        )
        self.layers[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, image: bool) -> torch.Tensor:
        """Return a loss."""
        x = self.embed(tokens)
        x = x + self.tower(x) if image else x
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _towered(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Towered()
    tokens = torch.arange(4)
    if config is None:
        (0.5 * (model(tokens, True) + model(tokens + 4, False))).backward()
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    wrap_model(model, config)
    rank = dist.get_rank()
    model(tokens + 4 * rank, rank == 0).backward()
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(
    "units",
    [
        {"sub_modules_to_wrap": [], "align_fsdp_param_groups": True},
        {"sub_modules_to_wrap": ["layers.1", "layers.2"], "align_fsdp_param_groups": True},
        {"sub_modules_to_wrap": [["layers.0", "layers.1"], "layers.2"]},
    ],
)
def test_a_frozen_module_first_in_a_unit_behind_an_optional_tower(ranks2: RankPool, units: dict[str, Any]) -> None:
    want = _towered(None)
    for got in ranks2.run(_towered, {"sharding_size": "auto", "optional_modules": ["tower"], **units}):
        assert got.keys() == want.keys()
        for name, grad in want.items():
            torch.testing.assert_close(got[name], grad, rtol=1e-6, atol=1e-7)
