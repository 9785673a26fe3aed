"""Around training: evaluation, shared modules, optional members, frozen towers, attributes, buffers, groups."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers

from mindspeed_fsdp2 import FSDP2Error, wrap_model
from tests.distributed.chains import Chain, inputs
from tests.distributed.models import build, tokens_of
from tests.distributed.ranks import RankPool
from tests.distributed.training import full

UNITS: list[Any] = ["embedding", "layers.{*}", ["norm", "head"]]
Body = Callable[[nn.Module, int], torch.Tensor]


def train(
    model: nn.Module, loss_of: Body, settings: dict[str, Any] | None, aside: Callable[[nn.Module], None] | None = None
) -> dict[str, torch.Tensor]:
    """Train three steps; call ``aside`` before the optimizer is built and after every step; return the parameters."""
    if settings is not None:
        wrap_model(model, settings)
        if aside is not None:
            aside(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        loss_of(model, step).backward()
        if settings is None:
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if settings is not None and aside is not None:
            aside(model)
    return {name: full(param) for name, param in model.named_parameters()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def _token_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(tokens_of(step, dist.get_rank()))


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def _evaluate(settings: dict[str, Any], how: str) -> tuple[float, bool]:
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "eval": torch.enable_grad}

    def aside(model: nn.Module) -> None:
        with contexts[how](), _in_eval_mode(model):
            model(tokens_of(99, dist.get_rank()))
        assert all(isinstance(param, DTensor) for param in model.parameters()), "an optimizer would get dead tensors"

    ours = train(build(), _token_loss, {"sharding_size": "auto", **settings}, aside)
    theirs = train(build(), _token_loss, None)
    start = dict(build().named_parameters())
    return largest_difference(ours, theirs), all(not torch.equal(ours[name], start[name]) for name in ours)


EVALUATED: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"sub_modules_to_wrap": UNITS},
    "ZeRO-2": {"sub_modules_to_wrap": UNITS, "reshard_after_forward": False},
    "root only": {"sub_modules_to_wrap": []},
    "sharding_size 1, ZeRO-2": {"sub_modules_to_wrap": UNITS, "sharding_size": 1, "reshard_after_forward": False},
    "prefetch": {"sub_modules_to_wrap": UNITS, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
    "recompute": {"sub_modules_to_wrap": UNITS, "recompute_modules": ["layers.{*}"]},
}


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval"])
def test_evaluation_before_and_between_steps_is_harmless(ranks2: RankPool, name: str, how: str) -> None:
    assert ranks2.run(_evaluate, EVALUATED[name], how) == [(0.0, True)] * 2


def test_evaluation_with_reshard_to_fewer_ranks(ranks4: RankPool) -> None:
    settings = {"sub_modules_to_wrap": UNITS, "reshard_after_forward": 2}
    for how in ("no_grad", "inference_mode"):
        for difference, moved in ranks4.run(_evaluate, settings, how):
            assert difference < 1e-6
            assert moved


def _forward_between_backward_and_step(settings: dict[str, Any]) -> list[float]:
    models = [wrap_model(build(), {"sharding_size": "auto", **settings}), build()]
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            _token_loss(model, step).backward()
            for param in model.parameters():
                if not isinstance(param, DTensor):
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
            _token_loss(model, step + 50)  # in training mode, with gradients, as for a log line
            optimizer.step()
            optimizer.zero_grad()
        losses.append(_token_loss(model, 9).item())
    return losses


@pytest.mark.parametrize("name", ["ZeRO-3", "ZeRO-2", "root only", "sharding_size 1, ZeRO-2"])
def test_forward_without_backward_leaves_no_old_values(ranks2: RankPool, name: str) -> None:
    for ours, theirs in ranks2.run(_forward_between_backward_and_step, EVALUATED[name]):
        assert ours == theirs


def _optimizer_built_late(settings: dict[str, Any], when: str) -> str:
    model = build()
    if when == "before wrapping":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap_model(model, {"sharding_size": "auto", **settings})
    if when == "after a forward":
        loss = _token_loss(model, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss.backward()
    else:
        _token_loss(model, 0).backward()
    try:
        optimizer.step()
    except FSDP2Error as error:
        return str(error)
    return "stepped"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ZeRO-3", "stepped"),
        (
            "root only",
            "optimizer: it was built while parameters were gathered, after a forward without a backward, and steps on "
            "parameters that the model no longer uses: embedding.weight, layers.0.norm.weight, layers.0.norm.bias and "
            "19 more. Build the optimizer right after wrap_model.",
        ),
        ("ZeRO-2", "root only"),
    ],
)
def test_optimizer_built_between_forward_and_backward(ranks2: RankPool, name: str, text: str) -> None:
    texts = ranks2.run(_optimizer_built_late, EVALUATED[name], "after a forward")
    expected = text if text != "root only" else ranks2.run(_optimizer_built_late, EVALUATED[text], "after a forward")[0]
    assert texts == [expected] * 2


def test_optimizer_built_on_parameters_of_fewer_ranks(ranks4: RankPool) -> None:
    settings = {"sub_modules_to_wrap": UNITS, "reshard_after_forward": 2}
    for text in ranks4.run(_optimizer_built_late, settings, "after a forward"):
        assert text.startswith("optimizer: it was built while parameters were gathered")


def test_optimizer_built_before_wrapping(ranks2: RankPool) -> None:
    assert (
        ranks2.run(_optimizer_built_late, EVALUATED["ZeRO-3"], "before wrapping")
        == [
            "optimizer: it was built before the model was wrapped and steps on parameters that the model no longer uses: "
            "embedding.weight, layers.0.norm.weight, layers.0.norm.bias and 19 more. "
            "Build the optimizer right after wrap_model."
        ]
        * 2
    )


def _forgotten() -> int:
    config = {"sharding_size": "auto", "sub_modules_to_wrap": []}
    wrap_model(build(), config)
    gc.collect()
    last = wrap_model(build(), config)  # takes away the hooks of models that are gone
    before = len(optimizers._global_optimizer_pre_hooks)
    for _ in range(3):
        wrap_model(build(), config)
    gc.collect()
    del last
    gc.collect()
    wrap_model(build(), config)
    return len(optimizers._global_optimizer_pre_hooks) - before


def test_a_forgotten_model_takes_its_hook_along(ranks2: RankPool) -> None:
    assert all(left <= 0 for left in ranks2.run(_forgotten))


def _collected_in_a_step() -> bool:
    """Let the garbage collector find a model that is gone while torch runs the hooks of a step."""
    collect = optimizers.register_optimizer_step_pre_hook(lambda *_unused: gc.collect() and None)
    gc.disable()
    try:
        model = wrap_model(build(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
        del model
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        gc.enable()
        collect.remove()
    return True


def test_a_model_may_be_collected_in_the_middle_of_a_step(ranks2: RankPool) -> None:
    assert ranks2.run(_collected_in_a_step) == [True, True]


class Side(nn.Module):
    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.proj(self.embed_tokens(tokens)))


class TwoSides(nn.Module):
    """As in T5: one embedding under three names, used by both sides and by the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.shared = nn.Embedding(33, 8)
        self.encoder = Side(self.shared)
        self.decoder = Side(self.shared)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(tokens) + self.decoder(tokens.flip(1))
        logits = hidden @ self.shared(torch.arange(33)).T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _shared(units: list[Any]) -> float:
    ours = train(TwoSides(), _token_loss, {"sharding_size": "auto", "sub_modules_to_wrap": units})
    return largest_difference(ours, train(TwoSides(), _token_loss, None))


@pytest.mark.parametrize("units", [[], ["encoder.embed_tokens"], ["encoder", "decoder", "shared"]])
def test_module_with_several_names(ranks2: RankPool, units: list[Any]) -> None:
    assert ranks2.run(_shared, units) == [0.0, 0.0]


def _tied(units: list[Any]) -> tuple[float, bool]:
    def make() -> nn.Module:
        model = build()
        model.head.weight = model.embedding.weight
        return model

    model = make()
    ours = train(model, _token_loss, {"sharding_size": "auto", "sub_modules_to_wrap": units})
    return largest_difference(ours, train(make(), _token_loss, None)), model.head.weight is model.embedding.weight


@pytest.mark.parametrize("units", [["layers.{*}"], ["layers.{*}", ["embedding", "head"]]])
def test_tied_weights_stay_tied(ranks2: RankPool, units: list[Any]) -> None:
    assert ranks2.run(_tied, units) == [(0.0, True)] * 2


class NowAndThen(nn.Module):
    """Runs the head in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, head: bool) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.body(x)))
        return (torch.tanh(self.head(hidden)) if head else hidden).square().mean()


def _now_and_then_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step), step % 2 == 1)


def _now_and_then(settings: dict[str, Any]) -> float:
    def aside(model: nn.Module) -> None:
        with torch.no_grad():
            model(inputs(), False)

    base = {"sharding_size": "auto", "sub_modules_to_wrap": ["body", ["norm", "head"]]}
    ours = train(NowAndThen(), _now_and_then_loss, {**base, **settings}, aside)
    return largest_difference(ours, train(NowAndThen(), _now_and_then_loss, None))


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}]
)
def test_unit_with_a_member_that_does_not_run(ranks2: RankPool, settings: dict[str, Any]) -> None:
    assert ranks2.run(_now_and_then, settings) == [0.0, 0.0]


def _members_cast() -> list[torch.dtype]:
    model, seen = NowAndThen(), []
    forward = model.norm.forward
    model.norm.forward = lambda x: forward(x).float()  # hands fp32 on, as Megatron's norms may
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": [["norm", "head"]], "param_dtype": "bf16"})
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model(inputs(), True).backward()
    return seen


def test_every_member_of_a_unit_casts_its_inputs(ranks2: RankPool) -> None:
    for before, after in ranks2.run(_members_cast):
        assert (before, after) == (torch.float32, torch.bfloat16)


def _chain_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step))


def _frozen(settings: dict[str, Any], frozen: tuple[int, ...]) -> tuple[float, list[bool]]:
    model = Chain(frozen=frozen)
    base = {"sharding_size": "auto", "sub_modules_to_wrap": ["blocks.{*}"]}
    ours = train(model, _chain_loss, {**base, **settings})
    start = Chain()
    moved = [not torch.equal(ours[f"blocks.{n}.down.weight"], start.blocks[n].down.weight) for n in range(4)]
    return largest_difference(ours, train(Chain(frozen=frozen), _chain_loss, None)), moved


@pytest.mark.parametrize("frozen", [(0, 1), (1, 2)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
        {"recompute_modules": ["blocks.{1-2}"], "use_reentrant": False},
        {"sharding_size": 1, "reshard_after_forward": False},
    ],
)
def test_frozen_units(ranks2: RankPool, settings: dict[str, Any], frozen: tuple[int, ...]) -> None:
    moved = [n not in frozen for n in range(4)]
    assert ranks2.run(_frozen, settings, frozen) == [(0.0, moved)] * 2


def test_reentrant_recompute_of_a_frozen_tower_is_let_alone(ranks2: RankPool) -> None:
    settings = {"recompute_modules": ["blocks.{0-1}"], "use_reentrant": True}
    assert ranks2.run(_frozen, settings, (0, 1)) == [(0.0, [False, False, True, True])] * 2


def _twice_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step)) + 2 * model(inputs(step + 50))


def _used_twice(settings: dict[str, Any], forwards: int) -> float:
    loss = _chain_loss if forwards == 1 else _twice_loss
    order = (0, 1, 1, 2, 0, 3)
    base = {"sharding_size": "auto", "sub_modules_to_wrap": ["blocks.{*}"]}
    ours = train(Chain(order), loss, {**base, **settings})
    return largest_difference(ours, train(Chain(order), loss, None))


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reshard_after_forward": False},
        {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
        {"recompute_modules": ["blocks.{*}"], "use_reentrant": False, "num_to_backward_prefetch": 1},
        {"recompute_modules": ["blocks.{1-3}"], "sub_modules_to_wrap": ["blocks.{2-3}"]},
    ],
)
def test_module_used_twice_and_two_forwards_before_backward(
    ranks2: RankPool, settings: dict[str, Any], forwards: int
) -> None:
    for difference in ranks2.run(_used_twice, settings, forwards):
        assert difference < 2e-7  # a module that runs twice is reduced once or twice, so sums round differently


def _attributes() -> dict[str, dict[str, Any]]:
    model = build()
    model.layers[0].up.weight.tensor_model_parallel = True
    model.layers[0].up.weight.partition_dim = 0
    model.head.weight.shared = True
    model.norm.weight.requires_grad_(False)
    model.norm.weight.sequence_parallel = False
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": UNITS})
    return {name: dict(vars(param)) for name, param in model.named_parameters() if vars(param)}


def test_attributes_of_parameters_survive(ranks2: RankPool) -> None:
    for found in ranks2.run(_attributes):
        assert {k: v for k, v in found["layers.0.up.weight"].items() if not k.startswith("_")} == {
            "tensor_model_parallel": True,
            "partition_dim": 0,
        }
        assert found["head.weight"]["shared"] is True
        assert found["norm.weight"]["sequence_parallel"] is False


BUFFERS = {
    "bool": torch.tensor([True, False]),
    "int16": torch.tensor([1, 2], dtype=torch.int16),
    "scalar": torch.tensor(3),
    "complex": torch.tensor([1 + 2j, 3j]),
    "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.arange(3.0).view(1, 3).expand(4, 3),
    "repeated": torch.tensor([2.0]).expand(4),
    "empty": torch.ones(0),
}


def _buffers() -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(2, 2))
    for name, value in BUFFERS.items():
        expanded = 0 in value.stride()
        own = value[:1].clone().expand(value.shape) if expanded else value.clone(memory_format=torch.preserve_format)
        if dist.get_rank() == 1:
            (own[:1] if expanded else own).zero_()
        model.register_buffer(f"a_{name}", own, persistent=False)
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []})
    return {name.removeprefix("a_"): buffer.to(torch.complex64) for name, buffer in model.named_buffers()}


def test_buffers_of_every_kind_start_from_the_first_rank(ranks2: RankPool) -> None:
    for found in ranks2.run(_buffers):
        for name, value in BUFFERS.items():
            assert torch.equal(found[name], value.to(torch.complex64)), name


def _two_groups(size: Any, units: list[Any]) -> tuple[float, int]:
    """Ranks 0, 2 and ranks 1, 3 are data-parallel groups of their own, as with tensor parallelism 2."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    model = build(seed=rank % 2)
    wrap_model(model, {"sharding_size": size, "sub_modules_to_wrap": units}, process_group=mine)
    model(tokens_of(0, rank)).backward()
    twin = build(seed=rank % 2)
    twin(tokens_of(0, rank)).backward()
    worst = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(ours, DTensor), name
        grad = theirs.grad
        dist.all_reduce(grad, group=mine)
        worst = max(worst, (ours.grad.full_tensor() - grad / 2).abs().max().item())
    return worst, ours.device_mesh.ndim


@pytest.mark.parametrize(("size", "axes"), [("auto", 1), (2, 1), (1, 2)])
def test_several_data_parallel_groups(ranks4: RankPool, size: Any, axes: int) -> None:
    assert ranks4.run(_two_groups, size, UNITS) == [(0.0, axes)] * 4


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


def _wrapped() -> tuple[bool, float]:
    model = Wrapper(Wrapper(build()))
    same = wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []}) is model
    ours = train(Wrapper(Wrapper(build())), _token_loss, {"sharding_size": "auto", "sub_modules_to_wrap": UNITS})
    return same, largest_difference(ours, train(Wrapper(Wrapper(build())), _token_loss, None))


def test_model_below_wrappers(ranks2: RankPool) -> None:
    assert ranks2.run(_wrapped) == [(True, 0.0)] * 2
