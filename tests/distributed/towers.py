"""A model with a tower that stays whole, and its training: wrapped on ranks, or in one process on all ranks' data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import accumulate, clip_grad_norm_, wrap_model
from tests.distributed.measured import record
from tests.distributed.training import full

WIDTH = 8
BASE: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["pre", "layers.{*}"]}
WHOLE: dict[str, Any] = {**BASE, "ignored_modules": ["tower"]}


class Tower(nn.Module):
    """Two linear maps and a temperature, which FSDP could not shard if it is a scalar."""

    def __init__(self, unused: bool, scalar: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.temperature = nn.Parameter(torch.full(() if scalar else (1,), 0.5))
        if unused:
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(batch, WIDTH)``."""
        return torch.tanh(self.down(torch.tanh(self.up(x)))) * self.temperature


class Pair(nn.Module):
    """A unit whose second half need not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, second: bool = True) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(batch, WIDTH)``."""
        hidden = torch.tanh(self.first(x))
        return hidden + torch.tanh(self.second(hidden)) if second else hidden


class TwoTowers(nn.Module):
    """``pre``, a first layer, the tower (``times`` in a row), more layers, the head."""

    def __init__(self, seed: int = 3, unused: bool = False, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.tower = Tower(unused, scalar)
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, times: int = 1, last_layer: bool = True, second: bool = True) -> torch.Tensor:
        """Return values of shape ``(batch, 5)`` for ``x`` of shape ``(batch, WIDTH)``."""
        hidden = self.layers[0](torch.tanh(self.pre(x)), second)
        for _ in range(times):
            hidden = hidden + self.tower(hidden)
        for layer in list(self.layers)[1 : len(self.layers) if last_layer else -1]:
            hidden = layer(hidden)
        return self.head(hidden)


SHARDABLE = functools.partial(TwoTowers, scalar=False)


def inputs(step: int, micro: int, rank: int, batch: int = 3) -> torch.Tensor:
    """Return what ``rank`` feeds, shape ``(batch, WIDTH)``."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(batch, WIDTH, generator=generator)


@dataclass(frozen=True)
class Use:
    """Which parts of the model a forward runs, by the names of the functions in ``WHEN``.

    Attributes:
        tower: When the tower runs.
        times: How often it runs then.
        last_layer: When the last layer, a unit, runs.
        second: When the second half of the first layer runs.
        tokens: Whether ranks and micro-batches have unequal numbers of tokens, each of which counts the same.
    """

    tower: str = "always"
    times: int = 1
    last_layer: str = "always"
    second: str = "always"
    tokens: bool = False


WHEN: dict[str, Callable[[int, int, int, int], bool]] = {
    "always": lambda step, micro, of, rank: True,
    "never": lambda step, micro, of, rank: False,
    "odd ranks": lambda step, micro, of, rank: rank % 2 == 1,
    "taking turns": lambda step, micro, of, rank: (step + micro + rank) % 2 == 0,
    "first micro-batch": lambda step, micro, of, rank: micro == 0,
    "last micro-batch": lambda step, micro, of, rank: micro == of - 1,
    "not the last": lambda step, micro, of, rank: micro < of - 1,
    "last micro-batch of odd ranks": lambda step, micro, of, rank: micro == of - 1 and rank % 2 == 1,
    "from step 1": lambda step, micro, of, rank: step >= 1,
}


@dataclass(frozen=True)
class Recipe:
    """One training, but for how the model is spread.

    Attributes:
        make: Returns the model, the same on every call.
        use: What forwards run.
        steps: Optimizer steps.
        micro_batches: Micro-batches per step.
        marked: Whether micro-batches run in ``accumulate``.
        optimizer: ``"sgd"`` or ``"adamw"``.
        clip: Largest norm, 0 for none.
        norm_type: ``p`` of the p-norm.
    """

    make: Callable[[], nn.Module] = TwoTowers
    use: Use = Use()
    steps: int = 3
    micro_batches: int = 1
    marked: bool = True
    optimizer: str = "sgd"
    clip: float = 0.0
    norm_type: float = 2.0

    def loss(self, model: nn.Module, step: int, micro: int, rank: int, ranks: int) -> torch.Tensor:
        """Return one rank's loss; the mean over ranks of the sums over micro-batches is what is minimised."""
        of = self.micro_batches
        use = self.use

        def when(name: str) -> bool:
            return WHEN[name](step, micro, of, rank)

        options = {"last_layer": when(use.last_layer), "second": when(use.second)} if use != Use() else {}
        times = {"times": use.times if when(use.tower) else 0} if use != Use() else {}
        if not use.tokens:
            return (model(inputs(step, micro, rank), **times, **options).float() - 1).square().mean() / of
        counts = [[1 + (3 * m + 2 * r) % 5 for m in range(of)] for r in range(ranks)]
        outputs = model(inputs(step, micro, rank, counts[rank][micro]), **times, **options)
        return (outputs.float() - 1).square().mean(-1).sum() * ranks / sum(map(sum, counts))


@dataclass
class Run:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # full gradients of step 1, before clipping
    params: dict[str, torch.Tensor] = field(default_factory=dict)  # full parameters at the end
    whole: list[str] = field(default_factory=list)
    where: set[str] = field(default_factory=set)  # devices of shards, gradients and optimizer state


def wrapped(recipe: Recipe, config: dict[str, Any], change: Callable[[nn.Module, int], None] | None = None) -> Run:
    """Train on this rank's data; ``change`` is called before each step."""
    model = recipe.make()
    wrap_model(model, config)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def backward(step: int) -> float:
        total = 0.0
        for micro in range(recipe.micro_batches):
            if recipe.marked and recipe.micro_batches > 1:
                with accumulate(model, last=micro == recipe.micro_batches - 1):
                    loss = recipe.loss(model, step, micro, rank, ranks)
                    loss.backward()
            else:
                loss = recipe.loss(model, step, micro, rank, ranks)
                loss.backward()
            total += loss.item()
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        return mean.item() / ranks

    return _train(recipe, model, backward, change)


def union(recipe: Recipe, ranks: int, change: Callable[[nn.Module, int], None] | None = None) -> Run:
    """Train in this process on the data of all ranks."""
    model = recipe.make()

    def backward(step: int) -> float:
        total = 0.0
        for rank in range(ranks):
            for micro in range(recipe.micro_batches):
                loss = recipe.loss(model, step, micro, rank, ranks) / ranks
                loss.backward()
                total += loss.item()
        return total

    return _train(recipe, model, backward, change)


def _train(
    recipe: Recipe,
    model: nn.Module,
    backward: Callable[[int], float],
    change: Callable[[nn.Module, int], None] | None,
) -> Run:
    params = list(model.parameters())
    kinds = {"adamw": lambda: torch.optim.AdamW(params, lr=1e-2), "sgd": lambda: torch.optim.SGD(params, lr=0.1)}
    optimizer = kinds[recipe.optimizer]()
    run = Run()
    tensors: list[torch.Tensor] = []
    for step in range(recipe.steps):
        if change is not None:
            change(model, step)
        run.losses.append(backward(step))
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        if step == 0:
            run.grads = {name: full(grad) for name, grad in grads.items()}
            tensors += grads.values()
        if any(isinstance(param, DTensor) for param in params):
            norm = clip_grad_norm_(model, recipe.clip or float("inf"), recipe.norm_type)
        else:
            norm = torch.nn.utils.clip_grad_norm_(params, recipe.clip or float("inf"), recipe.norm_type)
        run.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    run.params = {name: full(param) for name, param in model.named_parameters()}
    run.whole = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    tensors += [*params, *(value for state in optimizer.state.values() for value in state.values() if value.dim())]
    run.where = {str(tensor.device) for tensor in tensors}
    return run


@functools.cache
def reference(recipe: Recipe, ranks: int) -> Run:
    """Return :func:`union`, computed once."""
    return union(recipe, ranks)


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, 0 without elements."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def differences(family: str, row: str, runs: list[Run], theirs: Run) -> dict[str, float]:
    """Record and return the largest relative differences over all ranks, steps and tensors."""
    worst = {"loss": 0.0, "norm": 0.0, "grad": 0.0, "param": 0.0}
    for ours in runs:
        assert ours.grads.keys() == theirs.grads.keys(), ours.grads.keys() ^ theirs.grads.keys()
        assert ours.params.keys() == theirs.params.keys()
        pairs = {
            "loss": [abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)],
            "norm": [abs(a - b) / b for a, b in zip(ours.norms, theirs.norms, strict=True)],
            "grad": [largest(ours.grads[n] - g) / max(largest(g), 1e-30) for n, g in theirs.grads.items()],
            "param": [largest(ours.params[n] - p) / largest(p) for n, p in theirs.params.items()],
        }
        worst = {kind: max(worst[kind], *values) for kind, values in pairs.items()}
    record(family, row, len(runs), worst)
    return worst


def check_close(worst: dict[str, float], optimizer: str = "sgd") -> None:
    """Hold design rule 4.1; AdamW divides by small second moments."""
    assert worst["loss"] <= 1e-5
    assert worst["norm"] <= 5e-5
    assert worst["grad"] <= 1e-6
    assert worst["param"] <= (1e-4 if optimizer == "adamw" else 2e-6)


def check_equal_over_ranks(runs: list[Run]) -> None:
    """Whole parameters and norms are the same numbers on every rank."""
    for run in runs[1:]:
        assert run.norms == runs[0].norms
        assert all(torch.equal(run.params[name], runs[0].params[name]) for name in run.params)


def check_moved(recipe: Recipe, run: Run, but: tuple[str, ...] = ()) -> None:
    """Training did something to every parameter but those named."""
    start = dict(recipe.make().named_parameters())
    still = {name for name, param in run.params.items() if torch.equal(param, start[name])}
    assert still == set(but)
