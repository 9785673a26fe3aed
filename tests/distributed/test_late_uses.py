"""What trainers do to a wrapped model later: hooks, optimizers in backward, freezing between forwards, new modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import FSDP2Error, accumulate, full_parameters, wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.test_unused import Routed
from tests.distributed.towers import (
    BASE,
    SHARDABLE,
    WHOLE,
    WIDTH,
    Recipe,
    Use,
    check_close,
    differences,
    inputs,
    reference,
    wrapped,
)
from tests.distributed.training import full
from tests.distributed.versions import CANNOT_GO_ON, GOES_ON

ROUTED: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}


def message(action: Callable[[], Any]) -> str:
    """Return the text of the error of ours that ``action`` raises."""
    try:
        action()
    except FSDP2Error as error:
        return str(error)
    return ""


# --- optimizers that step in backward


def _step_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizers = []
    for param in model.parameters():
        optimizer = torch.optim.AdamW([param], lr=1e-2, weight_decay=0.1)
        optimizers.append(optimizer)

        def step(_param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    return optimizers


def _routed_in_backward(settings: dict[str, Any]) -> tuple[float, bool]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, theirs = wrap_model(Routed(False), {**ROUTED, **settings}), Routed(False)
    optimizers = _step_in_backward(ours)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        ours(inputs(step, 0, rank), rank).backward()
        for other in range(ranks):
            (theirs(inputs(step, 0, other), other) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    worst = max((full(mine) - its).abs().max().item() for mine, its in pairs)
    unused = [optimizers[n].state for n, (name, _) in enumerate(ours.named_parameters()) if name == "never"]
    return worst, any(unused)


@pytest.mark.parametrize("settings", [{}, {"sharding_size": 1}], ids=["ZeRO-3", "replicas"])
def test_optimizer_in_backward_leaves_unused_parameters_alone(ranks2: RankPool, settings: dict[str, Any]) -> None:
    for worst, stepped in ranks2.run(_routed_in_backward, settings):
        assert worst < 2e-6
        assert not stepped


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layers[0](torch.tanh(self.layers[0](x))))).square().mean()


def _twice_in_backward(settings: dict[str, Any]) -> str | float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    ours = wrap_model(Twice(), {**ROUTED, **settings})
    torch.manual_seed(10)
    theirs = Twice()
    _step_in_backward(ours)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    text = ""
    for step in range(3):
        loss = ours(inputs(step, 0, rank).requires_grad_())
        text = text or message(loss.backward)
        if text:
            return text
        for other in range(ranks):
            (theirs(inputs(step, 0, other)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max((full(p) - q).abs().max().item() for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_optimizer_in_backward_of_a_unit_that_runs_twice(ranks2: RankPool) -> None:
    assert all(worst < 2e-6 for worst in ranks2.run(_twice_in_backward, {}))
    text = (
        "layers.0: it ran twice before this backward, which reduces it twice, and a hook on its parameters' gradients "
        "(register_post_accumulate_grad_hook) would act on a part of them. Step the optimizer after the backward."
    )
    assert ranks2.run(_twice_in_backward, {"recompute_modules": ["layers.0"]}) == [text] * 2


def _hook_between() -> float:
    """Log gradients with a hook that is added between two micro-batches, beside an optimizer that steps in backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for logs in (False, True):
        model = wrap_model(Routed(False), {**ROUTED, "sharding_size": 1})
        _step_in_backward(model)
        for step in range(3):
            for micro in range(2):
                if logs and step == 1 and micro == 1:
                    for param in model.parameters():
                        param.register_post_accumulate_grad_hook(lambda _param: None)
                with accumulate(model, last=micro == 1):
                    model(inputs(step, micro, rank), (rank + micro * ranks) % 4).backward()
        losses.append([full(param) for param in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*losses, strict=True))


def test_hook_added_between_micro_batches(ranks2: RankPool) -> None:
    assert ranks2.run(_hook_between) == [0.0, 0.0]


def _whole_in_backward() -> str:
    model = wrap_model(SHARDABLE(), WHOLE)
    _step_in_backward(model)
    return message(lambda: model(inputs(0, 0, dist.get_rank())).sum().backward())


def test_optimizer_in_backward_of_whole_parameters(ranks2: RankPool) -> None:
    text = (
        "ignored_modules: a hook of register_post_accumulate_grad_hook on one of their parameters, of the shape "
        "(16, 8), would see this rank's gradient, before it is averaged over the ranks. Step the optimizer after the "
        "backward."
    )
    (one, two) = ranks2.run(_whole_in_backward)
    assert one == two
    assert one.partition(" of the shape ")[0] == text.partition(" of the shape ")[0]
    assert one.partition("), ")[2] == text.partition("), ")[2]


def _masked() -> str:
    model = wrap_model(SHARDABLE(), BASE)
    model(inputs(0, 0, dist.get_rank())).sum().backward()
    model.zero_grad()
    model.get_parameter("head.weight").register_hook(lambda grad: grad * 0)
    return message(lambda: model(inputs(0, 0, dist.get_rank())))


def test_hook_on_a_shard_after_wrapping(ranks2: RankPool) -> None:
    text = (
        "head.weight: a hook of register_hook on a sharded parameter is never called, for FSDP2 sets its gradient. Use "
        "register_post_accumulate_grad_hook, which sees the averaged gradient in param.grad."
    )
    assert ranks2.run(_masked) == [text] * 2


# --- freezing while parameters are gathered, new modules


def _freeze(unsharded: bool, settings: dict[str, Any], how: str) -> dict[str, torch.Tensor | None]:
    """Return the gradients after something was frozen and unfrozen around forwards without a backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = SHARDABLE()
    if not unsharded:
        wrap_model(model, {**BASE, **settings})
    if how == "generator":
        model.requires_grad_(False)
        model(inputs(0, 0, rank))
        model.requires_grad_(True)
    else:
        model(inputs(0, 0, rank))
        model.head.requires_grad_(False)
        model.layers[1].requires_grad_(False)
        if how == "evaluation":
            with torch.no_grad():
                model(inputs(0, 0, rank))
        elif how == "state dict":
            model.state_dict()
        elif how == "gathered" and not unsharded:
            with full_parameters(model):
                pass
    model.zero_grad()
    for other in range(ranks) if unsharded else [rank]:
        (model(inputs(1, 0, other)).square().mean() / (ranks if unsharded else 1)).backward()
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["generator", "after a forward", "evaluation", "state dict", "gathered"])
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, {"sharding_size": 1}])
def test_freezing_between_forwards(ranks2: RankPool, settings: dict[str, Any], how: str) -> None:
    for ours, theirs in zip(
        ranks2.run(_freeze, False, settings, how), ranks2.run(_freeze, True, settings, how), strict=True
    ):
        assert {n for n, g in ours.items() if g is None} == {n for n, g in theirs.items() if g is None}
        for name, grad in theirs.items():
            if grad is not None:
                assert torch.allclose(ours[name], grad, rtol=1e-5, atol=1e-7), name


def _added() -> str:
    model = wrap_model(SHARDABLE(), BASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs(0, 0, dist.get_rank())).sum().backward()
    optimizer.step()
    model.adapter = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.adapter.parameters())})
    return message(optimizer.step)


def test_module_added_after_wrapping(ranks2: RankPool) -> None:
    text = (
        "optimizer: it holds parameters that came into the model after wrap_model: adapter.weight, adapter.bias. Their "
        "gradients would not be averaged over the ranks. Add modules before wrap_model."
    )
    assert ranks2.run(_added) == [text] * 2


# --- dtypes, hidden losses, batch norms, inputs


LATE = Recipe(make=SHARDABLE, micro_batches=3, use=Use(second="last micro-batch"))


def _mixed(recipe: Recipe, settings: dict[str, Any]) -> Any:
    return wrapped(recipe, {**BASE, "reduce_grads": "last_microbatch", **settings})


@pytest.mark.parametrize("use", ["last micro-batch", "last micro-batch of odd ranks", "taking turns"])
@pytest.mark.parametrize("settings", [{}, {"sharding_size": 1}], ids=["ZeRO-3", "replicas"])
def test_sums_in_another_dtype_of_parameters_first_used_late(
    ranks2: RankPool, settings: dict[str, Any], use: str
) -> None:
    recipe = Recipe(make=SHARDABLE, micro_batches=3, use=Use(second=use), steps=1)
    runs = ranks2.run(_mixed, recipe, {"param_dtype": "bf16", "reduce_dtype": "fp32", **settings})
    theirs = reference(recipe, 2)
    for run in runs:
        for name, grad in theirs.grads.items():
            assert (run.grads[name] - grad).abs().max() <= 0.02 * grad.abs().max(), name  # bf16 keeps 8 bits


def _hidden(settings: dict[str, Any], by_rank: bool = False) -> float:
    """Keep the loss in an attribute of the model; return the largest difference to one process."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SHARDABLE()

        def forward(self, x: torch.Tensor, second: bool) -> None:
            self.loss = self.body(x, 1, True, second).square().mean()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = {**BASE, "sub_modules_to_wrap": ["body.pre", "body.layers.{*}", "body"], **settings}
    ours, theirs = wrap_model(Keeps(), config), Keeps()
    for micro in range(3):
        with accumulate(ours, last=micro == 2):
            ours(inputs(0, micro, rank), rank == 0 if by_rank else micro > 0)
            ours.loss.backward()
        for other in range(ranks):
            theirs(inputs(0, micro, other), other == 0 if by_rank else micro > 0)
            (theirs.loss / ranks).backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((full(mine.grad) - its.grad).abs().max().item() / its.grad.abs().max().item() for mine, its in pairs)


def _hidden_and_interrupted() -> float | str:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SHARDABLE()

        def forward(self, x: torch.Tensor) -> None:
            self.loss = self.body(x).square().mean()

    rank = dist.get_rank()
    results = []
    for fails in (False, True):
        model = wrap_model(Keeps(), {**BASE, "sub_modules_to_wrap": ["body.pre", "body.layers.{*}", "body"]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            if fails:
                model(inputs(70, 0, rank))
                handle = (
                    model.loss.register_hook(_interrupt)
                    if step
                    else model.body.layers[2].register_forward_hook(
                        lambda _m, _a, out: out.register_hook(_interrupt) and None
                    )
                )
                if not step:
                    model(inputs(70, 0, rank))
                with pytest.raises(KeyError):
                    model.loss.backward()
                handle.remove()
                optimizer.zero_grad()
            try:
                model(inputs(step, 0, rank))
            except FSDP2Error as error:
                return str(error)
            model.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([full(param) for param in model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def _interrupt(_grad: torch.Tensor) -> None:
    raise KeyError


def test_loss_kept_in_an_attribute_and_an_exception(ranks2: RankPool) -> None:
    assert ranks2.run(_hidden_and_interrupted) == [0.0 if GOES_ON else CANNOT_GO_ON] * 2


@pytest.mark.parametrize("settings", [{"reduce_grads": "last_microbatch"}, {}, {"sharding_size": 1}])
def test_loss_kept_in_an_attribute(ranks2: RankPool, settings: dict[str, Any]) -> None:
    assert max(ranks2.run(_hidden, settings)) < 2e-6
    assert max(ranks2.run(_hidden, settings, True)) < 2e-6
    if settings.get("reduce_grads"):
        bf16 = {**settings, "param_dtype": "bf16", "reduce_dtype": "fp32"}
        assert max(ranks2.run(_hidden, bf16)) < 0.05


class Shares(nn.Module):
    """A norm whose momentum is the share that is kept, held in a buffer, as in other frameworks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(WIDTH))
        self.register_buffer("momentum", torch.tensor(0.9))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_var.mul_(self.momentum).add_((1 - self.momentum) * x.detach().var(0))
        return self.scale * x


def _normed(recomputed: bool, reentrant: bool) -> list[torch.Tensor]:
    torch.manual_seed(8)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=m)) for m in (0.1, None)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Sequential(nn.Linear(WIDTH, WIDTH), Shares()))
    recompute = {"recompute_modules": ["1", "2", "3"], "use_reentrant": reentrant} if recomputed else {}
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["1", "2", "3"], **recompute})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(inputs(step, 0, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(full(p) for p in model.parameters()), *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_leaves_running_statistics_alone(ranks2: RankPool, reentrant: bool) -> None:
    for ours, theirs in zip(ranks2.run(_normed, True, reentrant), ranks2.run(_normed, False, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Pictures(nn.Module):
    """A frozen embedding, and a tower whose output some ranks add to it before the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embedding = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, times: int = 1, **_unused: bool) -> torch.Tensor:
        hidden = self.embedding(x)
        if times:
            hidden = hidden + self.tower(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("recompute", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, {"sharding_size": 1}])
def test_frozen_embedding_with_a_tower_on_some_ranks(
    ranks2: RankPool, settings: dict[str, Any], recompute: bool | None
) -> None:
    config = {
        "sharding_size": "auto",
        "sub_modules_to_wrap": ["embedding", "layers.{*}"],
        "optional_modules": ["tower"],
        **settings,
    }
    if recompute is not None:
        config |= {"recompute_modules": ["layers.{*}"], "use_reentrant": recompute}
    recipe = Recipe(make=Pictures, use=Use(tower="odd ranks"))
    runs = ranks2.run(functools.partial(wrapped, recipe), config)
    check_close(differences("whole", f"frozen embedding, tower on odd ranks, {settings}", runs, reference(recipe, 2)))
