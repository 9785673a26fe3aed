"""Tiny models of ten Transformers architectures, wrapped with defaults, learn what one process learns."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import FSDP2Config, wrap_model
from mindspeed_fsdp2.plan import build_plan
from tests.distributed.architectures import ARCHITECTURES, Inputs
from tests.distributed.measured import record
from tests.distributed.ranks import RankPool
from tests.distributed.training import full

STEPS: Final = 10
LOSSES, GRADIENTS, PARAMETERS = 1e-5, 1e-6, 1e-4


@dataclass
class Run:
    """What one run measured: the loss of every step, full gradients of the first, full parameters at the end."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    units: int = 0


def _model(name: str) -> nn.Module:
    torch.manual_seed(7)
    return ARCHITECTURES[name].build().train()


def _batches(name: str, rank: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [ARCHITECTURES[name].inputs(generator) for _ in range(STEPS)]


def _run(model: nn.Module, batches: list[list[Inputs]]) -> Run:
    """Train ``model`` on every list of ``batches`` in turn, whose mean loss is the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = Run(start={name: full(param) for name, param in model.named_parameters()})
    run.units = sum(isinstance(module, FSDPModule) for module in model.modules())
    for step in range(STEPS):
        total = 0.0
        for inputs in batches:
            loss = model(**inputs[step]).loss / len(batches)
            loss.backward()
            total += loss.item()
        if not step:
            run.grads = {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        run.losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    run.params = {name: full(param) for name, param in model.named_parameters()}
    return run


def _wrapped(name: str, config: dict[str, Any]) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap_model(_model(name), config)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        run = _run(model, [_batches(name, dist.get_rank())])
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    run.losses = (losses / dist.get_world_size()).tolist()
    return run


def _largest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    worst = 0.0
    for name, tensor in want.items():
        scale = tensor.abs().max().item()
        difference = (got[name] - tensor).abs().max().item()
        worst = max(worst, difference / scale if scale else difference)
    return worst


def _norm(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


CASES: Final = [
    pytest.param(
        name, recompute, marks=[pytest.mark.slow] if "not" in recompute and name not in ("GPT-2", "T5") else []
    )
    for name in ARCHITECTURES
    for recompute in ("", "recompute", "recompute, not reentrant")
]


@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_learns_what_one_process_learns(ranks2: RankPool, name: str, recompute: str) -> None:
    architecture = ARCHITECTURES[name]
    config: dict[str, Any] = {"sharding_size": "auto"}
    if recompute:
        config |= {"recompute_modules": [architecture.layers], "use_reentrant": recompute == "recompute"}
    runs = ranks2.run(_wrapped, name, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = _run(_model(name), [_batches(name, rank) for rank in range(2)])
    for run in runs:
        assert run.units > 3
        assert run.losses == runs[0].losses
        worst = {
            "loss": max(abs(got - right) / abs(right) for got, right in zip(run.losses, want.losses)),
            "norm": abs(_norm(run.grads) / _norm(want.grads) - 1),
            "grad": _largest(run.grads, want.grads),
            "param": _largest(run.params, want.params),
        }
        assert worst["loss"] <= LOSSES, worst
        assert worst["norm"] <= GRADIENTS, worst
        assert worst["grad"] <= GRADIENTS, worst
        assert worst["param"] <= PARAMETERS, worst
        for param in want.grads:
            assert not torch.equal(run.start[param], run.params[param]), f"{param} did not move"
    record("architectures", ", ".join(filter(None, (name, recompute))), 2, worst)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_of_the_docs(language: str) -> None:
    """Every row names exactly the units that the defaults give, and the layers that are recomputed."""
    text = (Path(__file__).parents[2] / "docs" / language / "huggingface.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\|.*\{\*\}.*\|.*\{\*\}", line)]
    assert [re.sub("[ （(].*", "", name) for name, _, _ in rows] == list(ARCHITECTURES)
    for (name, units, layers), architecture in zip(rows, ARCHITECTURES.values()):
        model = architecture.build()
        plan = build_plan(FSDP2Config(sharding_size="auto"), model, data_parallel_size=2)
        names = {re.sub(r"\.\d+", ".{*}", fqn) for unit in plan.units for fqn in unit.fqns if fqn}
        assert set(re.findall("`(.*?)`", units)) == names
        assert layers == f"`{architecture.layers}`"
        tied = any(len(names) > 1 for names in _names_of(model).values())
        assert tied == (re.search("[（(](tied weights|共享权重)[）)]$", name) is not None), name


def _names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    found: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(name)
    return found
