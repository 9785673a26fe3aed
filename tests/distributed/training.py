"""Train a small model on a rank, wrapped or as plain data parallel, and return numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import clip_grad_norm_, wrap_model
from tests.distributed.models import build, tokens_of


@dataclass
class Result:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # full gradients of step 1
    params: dict[str, torch.Tensor] = field(default_factory=dict)  # full parameters at the end
    dtensors: int = 0
    units: int = 0


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    config: dict[str, Any] | None,
    steps: int = 4,
    optimizer: str = "adamw",
    clip: float = 0.0,
    micro_batches: int = 1,
    seed_by_rank: bool = False,
    **model_options: float,
) -> Result:
    """Train for ``steps``; ``config`` None means plain data parallel (gradients averaged by hand in fp32)."""
    rank = dist.get_rank()
    model: nn.Module = build(seed=7 + (rank if seed_by_rank else 0), **model_options)
    if config is not None:
        model = wrap_model(model, config)
    kinds = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-2), "sgd": lambda p: torch.optim.SGD(p, lr=0.1)}
    optim = kinds[optimizer](model.parameters())
    result = Result(
        dtensors=sum(isinstance(p, DTensor) for p in model.parameters()),
        units=sum(isinstance(m, FSDPModule) for m in model.modules()),
    )
    torch.manual_seed(100 + rank)  # dropout differs over ranks
    for step in range(steps):
        total = 0.0
        for micro in range(micro_batches):
            loss = model(tokens_of(step * micro_batches + micro, rank)) / micro_batches
            loss.backward()
            total += loss.item()
        if config is None:
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        if step == 0:
            result.grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        result.norms.append(clip_grad_norm_(model, clip or float("inf")).item())
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        result.losses.append(mean.item() / dist.get_world_size())
        optim.step()
        optim.zero_grad()
    result.params = {n: full(p) for n, p in model.named_parameters()}
    return result
