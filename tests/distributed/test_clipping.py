"""clip_grad_norm_ equals PyTorch's own on the unsharded twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import clip_grad_norm_, wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.training import full


class Uneven(nn.Module):
    """First dimensions that no number of ranks divides; some ranks hold nothing of the smallest."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, 3, dtype=dtype)) for n in (1, 3, 5, 7))
        self.unused = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar that grows with every weight's index."""
        return torch.stack([(w * x).sum() * (n + 1) for n, w in enumerate(self.weights)]).sum()


@dataclass
class Clipped:
    """One rank's norm and whole gradients after clipping."""

    norm: torch.Tensor
    grads: dict[str, torch.Tensor]


def _clip(settings: dict[str, Any] | None, max_norm: float, norm_type: float, dtype: torch.dtype) -> Clipped:
    model: nn.Module = Uneven(dtype)
    if settings is not None:
        wrap_model(model, {"sub_modules_to_wrap": [], **settings})
    x = torch.arange(3, dtype=dtype) + dist.get_rank()
    model(x).backward()
    if settings is None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    else:
        norm = clip_grad_norm_(model, max_norm, norm_type)
    return Clipped(norm, {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("pool", "size"), [("ranks2", "auto"), ("ranks2", 1), ("ranks4", "auto"), ("ranks4", 2), ("ranks4", 1)]
)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_equals_torch(pool: str, size: int | str, norm_type: float, request: pytest.FixtureRequest) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for max_norm in (1.5, math.inf):
        plain: Clipped = ranks.run(_clip, None, max_norm, norm_type, torch.float32)[0]
        assert plain.norm > 1.5  # clipping has something to do
        for clipped in ranks.run(_clip, {"sharding_size": size}, max_norm, norm_type, torch.float32):
            assert type(clipped.norm) is torch.Tensor
            assert clipped.norm.shape == ()
            torch.testing.assert_close(clipped.norm, plain.norm, rtol=1e-6, atol=0)
            assert clipped.grads.keys() == plain.grads.keys() == {f"weights.{n}" for n in range(4)}
            for name, grad in plain.grads.items():
                torch.testing.assert_close(clipped.grads[name], grad, rtol=2e-6, atol=0)


def test_double_precision_keeps_its_precision(ranks2: RankPool) -> None:
    plain: Clipped = ranks2.run(_clip, None, 1.5, 2.0, torch.float64)[0]
    for clipped in ranks2.run(_clip, {"sharding_size": "auto"}, 1.5, 2.0, torch.float64):
        torch.testing.assert_close(clipped.norm.double(), plain.norm, rtol=1e-6, atol=0)
        assert all(grad.dtype == torch.float64 for grad in clipped.grads.values())


def _without_gradients() -> float:
    model = wrap_model(Uneven(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    return clip_grad_norm_(model, 1.0).item()


def test_without_gradients(ranks2: RankPool) -> None:
    assert ranks2.run(_without_gradients) == [0.0, 0.0]


def _not_a_number(norm_type: float) -> list[float]:
    model = wrap_model(Uneven(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    seen = []
    for bad in (math.nan, math.inf):
        model(torch.ones(3)).backward()
        if dist.get_rank() == 1:
            model.weights[3].grad.to_local()[0, 0] = bad
        seen.append(clip_grad_norm_(model, 1.0, norm_type).item())
        model.zero_grad()
    return seen


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_bad_gradient_on_one_rank_shows_on_all(ranks2: RankPool, norm_type: float) -> None:
    for with_nan, with_inf in ranks2.run(_not_a_number, norm_type):
        assert math.isnan(with_nan)
        assert with_inf == math.inf
