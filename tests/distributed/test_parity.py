"""Training equals plain data parallel, whatever the settings (design rule 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindspeed_fsdp2 import wrap_model
from tests.distributed.measured import record
from tests.distributed.models import build, tokens_of
from tests.distributed.ranks import RankPool
from tests.distributed.training import Result, full, train

UNITS: list[Any] = ["embedding", "layers.{*}", ["norm", "head"]]
LAYERS = {"recompute_modules": ["layers.{*}"]}
AHEAD = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}
PARAMETERS = 22  # embedding, 3 layers of 6, norm, head
UNIT_MODULES = 7  # embedding, 3 layers, norm and head (one unit), the root

Train = Callable[..., list[Result]]


@dataclass
class Twin:
    """One pool with the results of plain data parallel, kept by options."""

    pool: RankPool
    plain: dict[tuple[tuple[str, Any], ...], list[Result]] = field(default_factory=dict)

    def train(self, settings: dict[str, Any], options: dict[str, Any]) -> tuple[list[Result], list[Result]]:
        """Return what every rank saw, wrapped and plain."""
        key = tuple(sorted(options.items()))
        if key not in self.plain:
            self.plain[key] = self.pool.run(_train, None, options)
        config = {"sharding_size": "auto", "sub_modules_to_wrap": UNITS, **settings}
        return self.pool.run(_train, config, options), self.plain[key]


def _train(config: dict[str, Any] | None, options: dict[str, Any]) -> Result:
    return train(config, **options)


@pytest.fixture(scope="module")
def twin2(ranks2: RankPool) -> Iterator[Twin]:
    yield Twin(ranks2)


@pytest.fixture(scope="module")
def twin4(ranks4: RankPool) -> Iterator[Twin]:
    yield Twin(ranks4)


def report(name: str, results: list[Result], plain: list[Result]) -> dict[str, float]:
    """Record and return the largest differences over all ranks, steps and tensors."""
    worst = {"loss": 0.0, "norm": 0.0, "grad": 0.0, "param": 0.0}
    for ours, theirs in zip(results, plain, strict=True):
        assert ours.grads.keys() == theirs.grads.keys() == ours.params.keys() == theirs.params.keys()
        pairs = {
            "loss": [abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)],
            "norm": [abs(a - b) / b for a, b in zip(ours.norms, theirs.norms, strict=True)],
            "grad": [largest(ours.grads[n] - g) / largest(g) for n, g in theirs.grads.items()],
            "param": [largest(ours.params[n] - p) / largest(p) for n, p in theirs.params.items()],
        }
        worst = {kind: max(worst[kind], *values) for kind, values in pairs.items()}
    record("sharding", name, len(results), worst)
    return worst


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def check_not_vacuous(results: list[Result], units: int = UNIT_MODULES) -> None:
    start = dict(build().named_parameters())
    for result in results:
        assert result.dtensors == PARAMETERS
        assert result.units == units
        assert result.params.keys() == start.keys()
        for name, param in result.params.items():
            assert not torch.equal(param, start[name]), f"{name} never moved"


EXACT: dict[str, tuple[dict[str, Any], int]] = {
    "ZeRO-3": ({}, 7),
    "ZeRO-2": ({"reshard_after_forward": False}, 7),
    "root only": ({"sub_modules_to_wrap": []}, 1),
    "one unit of all layers": ({"sub_modules_to_wrap": [["layers.{*}"]]}, 4),
    "nested units": ({"sub_modules_to_wrap": ["layers.{*}", "layers.{*}.norm"]}, 7),
    "units by class": ({"sub_modules_to_wrap": ["Layer"]}, 4),
    "sharding_size 1": ({"sharding_size": 1}, 7),
    "sharding_size 1, ZeRO-2": ({"sharding_size": 1, "reshard_after_forward": False}, 7),
    "sharding_size 2": ({"sharding_size": 2}, 7),
    "reshard to the whole group": ({"reshard_after_forward": 2}, 7),
    "fp32 by name": ({"param_dtype": "fp32", "reduce_dtype": "fp32", "output_dtype": "fp32"}, 7),
    "recompute, reentrant": ({**LAYERS}, 7),
    "recompute, non-reentrant": ({**LAYERS, "use_reentrant": False}, 7),
    "recompute inside units": ({"recompute_modules": ["layers.{*}.up"], "use_reentrant": False}, 7),
    "recompute, ZeRO-2": ({**LAYERS, "reshard_after_forward": False}, 7),
    "prefetch 2": ({**AHEAD}, 7),
    "prefetch 2, ZeRO-2": ({**AHEAD, "reshard_after_forward": False}, 7),
    "prefetch 2, recompute": ({**AHEAD, **LAYERS}, 7),
    "prefetch 2, sharding_size 1": ({**AHEAD, "sharding_size": 1}, 7),
    **{
        f"prefetch 2, nested units, recompute{'' if reentrant else ', non-reentrant'}": (
            {**AHEAD, **LAYERS, "use_reentrant": reentrant, "sub_modules_to_wrap": ["layers.{*}", "layers.{*}.norm"]},
            7,
        )
        for reentrant in (True, False)
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_bitwise_on_two_ranks(twin2: Twin, name: str) -> None:
    settings, units = EXACT[name]
    results, plain = twin2.train(settings, {})
    check_not_vacuous(results, units)
    worst = report(name, results, plain)
    assert worst["norm"] <= 5e-5  # a norm over shards adds in another order
    assert (worst["loss"], worst["grad"], worst["param"]) == (0.0, 0.0, 0.0)


CLOSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({}, {"optimizer": "sgd"}),
    "SGD, sharding_size 1": ({"sharding_size": 1}, {"optimizer": "sgd"}),
    "clipping": ({}, {"clip": 0.5}),
    "clipping, sharding_size 1": ({"sharding_size": 1}, {"clip": 0.5}),
    "clipping, SGD": ({"reshard_after_forward": False}, {"clip": 0.5, "optimizer": "sgd"}),
    "micro-batches": ({}, {"micro_batches": 2}),
    "micro-batches, SGD": ({}, {"micro_batches": 2, "optimizer": "sgd"}),
    "micro-batches, ZeRO-2": ({"reshard_after_forward": False}, {"micro_batches": 2}),
    "micro-batches, sharding_size 1": ({"sharding_size": 1}, {"micro_batches": 2}),
    "micro-batches, recompute": ({**LAYERS}, {"micro_batches": 2}),
    "micro-batches, prefetch": ({**AHEAD}, {"micro_batches": 2}),
}


@pytest.mark.parametrize("name", CLOSE)
def test_two_ranks(twin2: Twin, name: str) -> None:
    settings, options = CLOSE[name]
    results, plain = twin2.train(settings, options)
    check_not_vacuous(results)
    check_close(report(name, results, plain))
    if "clip" in options:
        assert min(plain[0].norms) > options["clip"]  # clipping had something to do


FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "4 ranks": ({}, {}),
    "4 ranks, SGD": ({}, {"optimizer": "sgd"}),
    "4 ranks, sharding_size 1": ({"sharding_size": 1}, {"optimizer": "sgd"}),
    "4 ranks, sharding_size 2": ({"sharding_size": 2}, {}),
    "4 ranks, sharding_size 2, SGD": ({"sharding_size": 2}, {"optimizer": "sgd"}),
    "4 ranks, sharding_size 2, clipping, SGD": ({"sharding_size": 2}, {"clip": 0.5, "optimizer": "sgd"}),
    "4 ranks, sharding_size 2, micro-batches": ({"sharding_size": 2}, {"micro_batches": 2, "optimizer": "sgd"}),
    "4 ranks, sharding_size 2, ZeRO-2, prefetch": ({"sharding_size": 2, "reshard_after_forward": False, **AHEAD}, {}),
    "4 ranks, sharding_size 2, recompute": ({"sharding_size": 2, **LAYERS}, {}),
    "4 ranks, reshard to 2": ({"reshard_after_forward": 2}, {}),
    "4 ranks, reshard to 2, recompute, prefetch": ({"reshard_after_forward": 2, **LAYERS, **AHEAD}, {}),
}


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(twin4: Twin, name: str) -> None:
    settings, options = FOUR[name]
    results, plain = twin4.train(settings, options)
    check_not_vacuous(results)
    check_close(report(name, results, plain))


def check_close(worst: dict[str, float]) -> None:
    assert worst["loss"] <= 1e-5
    assert worst["norm"] <= 5e-5
    assert worst["grad"] <= 1e-6
    assert worst["param"] <= 1e-4  # AdamW divides by small second moments


@pytest.mark.parametrize(
    "settings", [{}, {"sharding_size": 1}, {**AHEAD}], ids=["ZeRO-3", "sharding_size 1", "prefetch"]
)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_draws_the_same_dropout(twin2: Twin, settings: dict[str, Any], use_reentrant: bool) -> None:
    options = {"dropout": 0.4}
    off, _ = twin2.train(settings, options)
    again, plain = twin2.train({**settings, **LAYERS, "use_reentrant": use_reentrant}, options)
    check_not_vacuous(again)
    worst = report("recompute with dropout", again, off)
    assert worst == {"loss": 0.0, "norm": 0.0, "grad": 0.0, "param": 0.0}
    without, _ = twin2.train(settings, {})
    assert off[0].losses != without[0].losses  # dropout did something
    assert report("recompute with dropout against plain", again, plain)["grad"] == 0.0


@dataclass
class Shards:
    """One rank's own shards."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    buffer: torch.Tensor


def _replicas(sharding_size: int) -> Shards:
    rank = dist.get_rank()
    model = build(seed=7 + rank)
    model.register_buffer("offsets", torch.full((3,), float(rank)))
    wrap_model(model, {"sharding_size": sharding_size, "sub_modules_to_wrap": UNITS})
    shards = Shards(_locals(model), {}, {n: full(p) for n, p in model.named_parameters()}, model.offsets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(tokens_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    shards.after = _locals(model)
    return shards


def _locals(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        found[name] = param.to_local().detach().clone()
    return found


@pytest.mark.parametrize(("pool", "size"), [("ranks2", 1), ("ranks4", 1), ("ranks4", 2)])
def test_replicas_start_and_stay_equal_whatever_the_seeds(pool: str, size: int, request: pytest.FixtureRequest) -> None:
    results: list[Shards] = request.getfixturevalue(pool).run(_replicas, size)
    for rank, result in enumerate(results):
        first = results[rank % size]
        assert len(result.after) == PARAMETERS
        for name in first.after:
            assert torch.equal(result.before[name], first.before[name])
            assert torch.equal(result.after[name], first.after[name])
            assert not torch.equal(result.after[name], result.before[name]) or not result.after[name].numel()
        assert torch.equal(result.buffer, torch.zeros(3))
    start = dict(build(seed=7).named_parameters())
    if size == 1:
        assert all(torch.equal(results[-1].whole[name], param) for name, param in start.items())


def _against_ddp() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with PyTorch's own DDP what ``train(None)`` trains by hand."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = model(tokens_of(step, dist.get_rank()))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: full(param) for name, param in model.module.named_parameters()}


def test_the_twin_is_ddp(twin2: Twin) -> None:
    _, plain = twin2.train({}, {})
    for (losses, params), theirs in zip(twin2.pool.run(_against_ddp), plain, strict=True):
        assert losses == theirs.losses
        assert all(torch.equal(params[name], param) for name, param in theirs.params.items())
