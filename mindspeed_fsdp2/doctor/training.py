"""A few training steps of two small units, against DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..wrap import wrap_model
from .checks import Check, Context, NotApplicable, WrongResult
from .meshes import hsdp_size

WIDTH = 24
STEPS = 3
# fp32 on both sides: only the order of additions may differ.
LOSS_SLACK = 1e-5
GRADIENT_SLACK = 1e-5  # of a tensor's largest entry
UNITS: Mapping[str, Any] = {"sub_modules_to_wrap": ["layers.{*}"]}


class TwoUnits(nn.Module):
    """Two layers that become units, and a head that stays in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the outputs for ``x`` of shape ``(batch, width)``."""
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


@dataclass
class Run:
    """Losses of this rank by step, and its full gradients of the first step."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("training sharded over all ranks equals DDP", partial(_equals_ddp, {"sharding_size": "auto"})),
        Check("training with replicas and shards (HSDP) equals DDP", _hsdp),
        Check("training with prefetch and recompute equals DDP", partial(_equals_ddp, _REFINED)),
        Check("training with shards in pinned host memory equals DDP", _offload),
    ]


_REFINED: Mapping[str, Any] = {
    "sharding_size": "auto",
    "num_to_forward_prefetch": 1,
    "num_to_backward_prefetch": 1,
    "recompute_modules": ["layers.{*}"],
    "use_reentrant": False,
}


def build(seed: int = 3) -> TwoUnits:
    """Return the model, on the host; its values depend on ``seed`` only. The caller's random states stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TwoUnits()


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the inputs of ``rank`` at ``step``, on the host, shape ``(4, width)``."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, context: Context) -> Run:
    """Train ``model`` (**in place**, **collective**) and return what this rank saw."""
    run = Run()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, context.rank).to(context.device))
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.grads = {
                name.removeprefix("module."): full(param.grad)
                for name, param in model.named_parameters()
                if param.grad is not None
            }
        optimizer.step()
    return run


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of ``tensor`` on the host (**collective** for a DTensor)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _hsdp(context: Context) -> str:
    size = hsdp_size(context.ranks)
    if size is None:
        raise NotApplicable(f"needs an even number of ranks from 4 on, not {context.ranks}")
    return _equals_ddp({"sharding_size": size}, context)


def _offload(context: Context) -> str:
    if not context.host_backend:
        raise NotApplicable("no accelerator")
    return _equals_ddp({"sharding_size": "auto", "offload_to_cpu": True}, context)


def _equals_ddp(settings: Mapping[str, Any], context: Context) -> str:
    if context.ranks == 1:
        raise NotApplicable("one rank only")
    plain = DistributedDataParallel(build().to(context.device))
    want = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), context)
    model = wrap_model(build(), {**UNITS, **settings}, device_type=context.device.type)
    got = train(model, torch.optim.SGD(model.parameters(), lr=0.1), context)
    if not all(isinstance(param, DTensor) for param in model.parameters()):
        raise WrongResult("the model was not sharded")
    if want.grads.keys() != got.grads.keys():
        raise WrongResult(f"gradients of {sorted(got.grads)} instead of {sorted(want.grads)}")
    for name, grad in want.grads.items():
        off = float((got.grads[name] - grad).abs().max() / grad.abs().max())
        if not off <= GRADIENT_SLACK:
            raise WrongResult(f"the gradient of {name} is off by {off:.2g} of its largest entry")
    for step, (mine, ddp) in enumerate(zip(got.losses, want.losses)):
        if not abs(mine - ddp) <= LOSS_SLACK * abs(ddp):
            raise WrongResult(f"the loss of step {step + 1} is {mine:.9g} and with DDP {ddp:.9g}")
    return "equal to the last bit" if _same(got, want) else "equal to rounding"


def _same(got: Run, want: Run) -> bool:
    return got.losses == want.losses and all(torch.equal(got.grads[name], grad) for name, grad in want.grads.items())
