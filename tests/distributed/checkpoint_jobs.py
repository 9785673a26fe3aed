"""Models, optimizers and short jobs for the checkpoint tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import wrap_model
from mindspeed_fsdp2.checkpoint import Loaded, load_checkpoint, save_checkpoint
from tests.distributed.models import Decoder, tokens_of

LAYERS = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}


class Mixed(Decoder):
    """A decoder with every kind of parameter: tiny, unused, frozen, tied, in a module that may be ignored."""

    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__(layers=2, dim=16, vocab=33, dropout=dropout)
        self.gate = nn.Linear(16, 1)  # dimension 0 is smaller than the number of ranks
        self.adapter = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 5)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([1.0, 0.5]))
        self.register_buffer("calls", torch.tensor(0))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.frozen(self.adapter(hidden)) * self.scale[1]
        self.calls += 1
        freqs = self.rotary(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, freqs=freqs)
        hidden = self.norm(hidden) * torch.sigmoid(self.gate(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class GroupStepAdam(torch.optim.Optimizer):
    """Adam that counts steps in its groups, as fused optimizers of Apex and Transformer Engine do."""

    def __init__(self, params: Any, lr: float, local: bool = False) -> None:
        super().__init__(params, {"lr": lr, "local": local})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    # local: plain tensors in the shape of the shard, as some fused implementations keep them
                    like = param.to_local() if group["local"] and isinstance(param, DTensor) else param
                    state["mean"], state["square"] = torch.zeros_like(like), torch.zeros_like(like)
                values = [param, param.grad, state["mean"], state["square"]]
                value, grad, mean, square = (v.to_local() if isinstance(v, DTensor) else v for v in values)
                mean.lerp_(grad, 0.1)
                square.mul_(0.99).addcmul_(grad, grad, value=0.01)
                scale = 1 - 0.9 ** group["step"]
                value.addcdiv_(mean / scale, square.sqrt() + 1e-8, value=-group["lr"])


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: weights, which decay where the kind can, and the rest."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if p.dim() > 1], "lr": 2e-2},
        {"params": [p for n, p in named if p.dim() <= 1]},
    ]
    if kind in ("adamw", "amsgrad"):
        groups[0]["weight_decay"] = 0.1
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, amsgrad=kind == "amsgrad")
    if kind in ("sgd", "momentum"):
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)
    return GroupStepAdam(groups, lr=1e-2, local=kind == "local")


def full(value: Any) -> Any:
    """Return whole tensors for sharded ones, copies for others."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@dataclass
class Outcome:
    """What one rank holds at the end."""

    losses: list[float] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    loaded: Loaded | None = None

    def differences(self, other: Outcome, also: Sequence[str] = ("losses", "draws")) -> list[str]:
        """Return the names of what is not bit for bit the same."""
        found = [name for name in (*also, "options") if getattr(self, name) != getattr(other, name)]
        for kind, mine, theirs in (("model", self.model, other.model), ("state", self.state, other.state)):
            found += [f"{kind} {name}" for name in mine.keys() ^ theirs.keys()]
            for name in mine.keys() & theirs.keys():
                one, two = mine[name], theirs[name]
                pairs = {"": (one, two)} if kind == "model" else {k: (one.get(k), two.get(k)) for k in {*one, *two}}
                found += [f"{kind} {name} {key}" for key, pair in pairs.items() if not _same(*pair)]
        return found


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    return type(one) is type(two) and one == two


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    """Return everything a checkpoint should bring back (**collective**)."""
    names = {id(p): n for n, p in model.named_parameters()}
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in optimizer.state:
                continue
            values = optimizer.state[param]
            if isinstance(param, DTensor) and group.get("local"):
                mesh, placements = param.device_mesh, param.placements
                values = {
                    key: DTensor.from_local(v, mesh, placements, shape=param.shape, stride=param.stride())
                    for key, v in values.items()
                }
            state[names[id(param)]] = {key: full(value) for key, value in values.items()}
    return Outcome(
        model={key: full(value) for key, value in model.state_dict().items()},
        state=state,
        options=[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    )


@dataclass(frozen=True)
class Job:
    """One short training job."""

    optimizer: str = "adamw"
    config: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    tied: bool = False
    same_data: bool = False

    def build(self, seed: int = 7) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Return the wrapped model, its optimizer and a scheduler."""
        torch.manual_seed(seed)
        model = wrap_model(Mixed(self.dropout, self.tied), {**LAYERS, **dict(self.config)})
        optimizer = optimizer_of(self.optimizer, model)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 7], gamma=0.5)


def run(
    job: Job, first: int, last: int, load: str | None = None, save: str | None = None, seed: int = 7, **options: Any
) -> Outcome:
    """Train from step ``first`` to before ``last``; load before it and save after it where a directory is given."""
    rank = dist.get_rank()
    model, optimizer, scheduler = job.build(seed)
    torch.manual_seed(100 * seed + rank)
    random.seed(200 * seed + rank)
    np.random.seed(300 * seed + rank)
    loaded = None
    if load is not None:
        loaded = load_checkpoint(load, model, optimizer, scheduler=scheduler, **options)
        if loaded.step != first:
            raise ValueError(f"loaded step {loaded.step} instead of {first}")
    losses = []
    for step in range(first, last):
        loss = model(tokens_of(step, 0 if job.same_data else rank))
        if not job.same_data:  # every source of random numbers has a say
            loss = loss * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save is not None:
        save_checkpoint(
            save, model, optimizer, step=last, scheduler=scheduler, extra={"seen": last * 12}, rank_extra=[rank, last]
        )
    outcome = contents(model, optimizer)
    outcome.losses, outcome.loaded = losses, loaded
    outcome.draws = [torch.rand(()).item(), random.random(), float(np.random.rand()), float(scheduler.last_epoch)]
    return outcome
