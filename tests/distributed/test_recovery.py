"""Steps given up between micro-batches, and trainers that go on after an exception."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import FSDP2Error, accumulate, wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.towers import BASE as UNITS
from tests.distributed.towers import SHARDABLE, Recipe, check_close, differences, inputs, reference, wrapped
from tests.distributed.versions import CANNOT_GO_ON, GOES_ON

LAST: dict[str, Any] = {"reduce_grads": "last_microbatch"}
RECIPE = Recipe(make=SHARDABLE, micro_batches=2)

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (2, {}),
    "ZeRO-2, last": (2, {"reshard_after_forward": False, **LAST}),
    "last": (2, LAST),
    "fp32 sums of bf16, last": (2, {**LAST, "param_dtype": "bf16", "reduce_dtype": "fp32"}),
    "replicas": (2, {"sharding_size": 1}),
    "replicas, fp32 sums of bf16": (2, {"sharding_size": 1, "param_dtype": "bf16", "reduce_dtype": "fp32"}),
    "replicas, last": (2, {"sharding_size": 1, **LAST}),
    "2 of 4": (4, {"sharding_size": 2}),
    "recompute, last": (2, {"recompute_modules": ["layers.{*}"], **LAST}),
    "offload, last": (2, {"offload_to_cpu": True, **LAST}),
    "tower whole": (2, {"ignored_modules": ["tower"], "sharding_size": 1}),
}


def _loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return (model(inputs(step, micro, dist.get_rank())).float() - 1).square().mean() / 2


def _train(
    settings: dict[str, Any],
    disturb: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None,
    accumulates: bool = True,
) -> Any:
    """Return the final parameters; ``disturb`` is called before each step."""
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if disturb is not None:
            disturb(model, optimizer, step)
        for micro in range(2 if accumulates else 1):
            with accumulate(model, last=micro == 1) if accumulates else nullcontext():
                _loss(model, step, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(param, "full_tensor", lambda p=param: p)().detach().clone() for param in model.parameters()]


def _drop(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "model":
        model.zero_grad()
    elif how == "by hand":
        for param in model.parameters():
            param.grad = None
    else:
        optimizer.zero_grad()


def _given_up(settings: dict[str, Any], how: str, held: int) -> Any:
    def disturb(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for micro in range(held):
            with accumulate(model, last=False):
                _loss(model, 50 + step, micro).backward()
        _drop(how, model, optimizer)

    return _train(settings, disturb)


@pytest.mark.parametrize("how", ["model", "optimizer", "by hand"])
@pytest.mark.parametrize("name", SETTINGS)
def test_step_given_up_between_micro_batches(name: str, how: str, request: pytest.FixtureRequest) -> None:
    ranks, settings = SETTINGS[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    undisturbed = pool.run(_train, settings, None)
    for held in (1, 2) if how == "optimizer" else (2,):
        for ours, theirs in zip(pool.run(_given_up, settings, how, held), undisturbed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _scaled() -> list[float]:
    model = wrap_model(SHARDABLE(), UNITS)
    with accumulate(model, last=False):
        _loss(model, 0, 0).backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    for param in model.parameters():
        if param.grad is not None:
            param.grad *= 2
    with accumulate(model, last=True):
        (_loss(model, 0, 1) * 0).backward()
    after = [param.grad for param in model.parameters() if param.grad is not None]
    return [(a - 2 * b).to_local().abs().sum().item() for a, b in zip(after, before, strict=True)]


def test_sharded_gradients_may_be_scaled_between_micro_batches(ranks2: RankPool) -> None:
    assert ranks2.run(_scaled) == [[0.0] * len(list(SHARDABLE().parameters()))] * 2


def _used_before(settings: dict[str, Any], how: str) -> list[str]:
    """Return the parameters without a gradient after a step that followed one given up."""
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = inputs(0, 0, dist.get_rank())
    for second in (True, False):
        _drop(how, model, optimizer)
        for last in (False, True) if not second else (False,):
            with accumulate(model, last=last):
                model(x, 1, True, second).sum().backward()
    return [name for name, param in model.named_parameters() if param.grad is None]


@pytest.mark.parametrize("how", ["model", "optimizer"])
@pytest.mark.parametrize("settings", [{}, LAST, {"sharding_size": 1}], ids=["every", "last", "replicas"])
def test_parameter_used_only_in_the_step_given_up(ranks2: RankPool, settings: dict[str, Any], how: str) -> None:
    assert ranks2.run(_used_before, settings, how) == [["layers.0.second.weight"]] * 2


def test_undisturbed_training_is_right(ranks2: RankPool) -> None:
    for settings in (LAST, {"sharding_size": 1}):
        runs = ranks2.run(wrapped, RECIPE, {**UNITS, **settings})
        check_close(
            differences("accumulation", "the undisturbed run of the recovery tests", runs, reference(RECIPE, 2))
        )


def _changed(action: str) -> str:
    model = wrap_model(SHARDABLE(), {**UNITS, **LAST})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accumulate(model, last=False):
        _loss(model, 0, 0).backward()
    if action == "zeroed":
        optimizer.zero_grad(set_to_none=False)
    else:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
    try:
        with accumulate(model, last=True):
            _loss(model, 0, 1).backward()
    except FSDP2Error as error:
        return str(error)
    return ""


@pytest.mark.parametrize("action", ["zeroed", "replaced"])
def test_gradients_changed_between_micro_batches(ranks2: RankPool, action: str) -> None:
    text = (
        "accumulate: gradients were changed between two micro-batches of one step, whose sums are not there yet. "
        "Change them after the last micro-batch; to give the step up call model.zero_grad()."
    )
    assert ranks2.run(_changed, action) == [text] * 2


class Interrupted(Exception):
    """What the trainer catches."""


def _fail(*_unused: Any) -> None:
    raise Interrupted


def _interrupt(model: Any, where: str, step: int, hold: bool) -> None:
    """Run a micro-batch that ends with an exception in the middle of the model."""
    layer = model.layers[1]
    if where == "backward":
        handle = layer.register_forward_hook(lambda _m, _a, out: out.register_hook(_fail) and None)
    else:
        handle = layer.first.register_forward_hook(_fail)
    try:
        with accumulate(model, last=not hold):
            _loss(model, 70 + step, 0).backward()
    except Interrupted:
        return
    finally:
        handle.remove()
    raise AssertionError("nothing was interrupted")


def _interrupted(settings: dict[str, Any], where: str, how: str, hold: bool, accumulates: bool = True) -> Any:
    """Return the final parameters, or what was said where training could not go on."""

    def disturb(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if where == "evaluation":
            with torch.no_grad():
                _interrupt(model, where, step, False)
        else:
            for _ in range(2 - accumulates):  # what failed attempts leave must not add up
                _interrupt(model, where, step, hold)
                _drop(how, model, optimizer)

    try:
        return _train(settings, disturb, accumulates)
    except FSDP2Error as error:
        return str(error)


def _check_goes_on(answers: list[Any], undisturbed: list[Any]) -> None:
    if not GOES_ON:
        assert answers == [CANNOT_GO_ON] * len(undisturbed)
        return
    for ours, theirs in zip(answers, undisturbed, strict=True):
        assert not isinstance(ours, str), ours
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_after_an_exception(name: str, where: str, request: pytest.FixtureRequest) -> None:
    ranks, settings = SETTINGS[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    undisturbed = pool.run(_train, settings, None)
    for how, hold in (("optimizer", False), ("model", True)):
        _check_goes_on(pool.run(_interrupted, settings, where, how, hold), undisturbed)


@pytest.mark.parametrize("how", ["optimizer", "model"])
@pytest.mark.parametrize("name", ["ZeRO-3", "ZeRO-2, last", "replicas", "2 of 4", "tower whole", "offload, last"])
def test_training_without_accumulation_goes_on(name: str, how: str, request: pytest.FixtureRequest) -> None:
    ranks, settings = SETTINGS[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    undisturbed = pool.run(_train, settings, None, False)
    _check_goes_on(pool.run(_interrupted, settings, "backward", how, False, False), undisturbed)


def _zeroed_after_the_forward(settings: dict[str, Any]) -> Any:
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accumulate(model, last=False):
        _loss(model, 50, 0).backward()
    for micro in range(2):
        with accumulate(model, last=micro == 1):
            loss = _loss(model, 0, micro)
            if micro == 0:
                optimizer.zero_grad()
            loss.backward()
    optimizer.step()
    return [param.full_tensor().detach() for param in model.parameters()]


def _one_step(settings: dict[str, Any]) -> Any:
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(2):
        with accumulate(model, last=micro == 1):
            _loss(model, 0, micro).backward()
    optimizer.step()
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("name", ["last", "replicas", "replicas, last", "fp32 sums of bf16, last"])
def test_step_given_up_between_a_forward_and_its_backward(ranks2: RankPool, name: str) -> None:
    for ours, theirs in zip(
        ranks2.run(_zeroed_after_the_forward, SETTINGS[name][1]), ranks2.run(_one_step, SETTINGS[name][1]), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _frozen_between(settings: dict[str, Any], after: int, undo: bool) -> str:
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    try:
        for micro in range(3):
            with accumulate(model, last=micro == 2):
                _loss(model, 0, micro).backward()
            if micro == after:
                model.layers[0].requires_grad_(False)
                if undo:
                    model.layers[0].requires_grad_(True)
    except FSDP2Error as error:
        return str(error)
    return ""


@pytest.mark.parametrize("settings", [{}, LAST, {"sharding_size": 1}], ids=["every", "last", "replicas"])
def test_freezing_between_micro_batches(ranks2: RankPool, settings: dict[str, Any]) -> None:
    text = (
        "accumulate: parameters were frozen or unfrozen between two micro-batches of one step, whose sums hold their "
        "gradients or do not. Do that between steps; to give this one up call model.zero_grad()."
    )
    assert ranks2.run(_frozen_between, settings, 0, False) == [text] * 2
    assert ranks2.run(_frozen_between, settings, 0, True) == [""] * 2
    assert ranks2.run(_frozen_between, settings, 2, False) == [""] * 2


def _partly_dropped(settings: dict[str, Any], frozen: bool) -> str:
    """Drop what an optimizer holds that lacks the smallest parameter, frozen after wrapping or not."""
    model = wrap_model(SHARDABLE(), {**UNITS, **settings})
    small = "tower.temperature"
    model.get_parameter(small).requires_grad_(not frozen)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name != small], lr=0.1)
    try:
        for step in range(2):
            with accumulate(model, last=step == 1):
                _loss(model, step, 0).backward()
            if step == 0:
                optimizer.zero_grad()
    except FSDP2Error as error:
        return str(error)
    alone = wrap_model(SHARDABLE(), {**UNITS, **settings})
    alone.get_parameter(small).requires_grad_(not frozen)
    _loss(alone, 1, 0).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return str(all(a.grad is b.grad is None or torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs))


@pytest.mark.parametrize("settings", [LAST, {"sharding_size": 1}], ids=["last", "replicas"])
def test_step_given_up_for_a_part_of_the_parameters(ranks2: RankPool, settings: dict[str, Any]) -> None:
    text = (
        "accumulate: some gradients of an unfinished step were dropped, but not that of tower.temperature. To give the "
        "step up call model.zero_grad(), and freeze parameters that no optimizer holds."
    )
    assert ranks2.run(_partly_dropped, settings, False) == [text] * 2
    assert ranks2.run(_partly_dropped, settings, True) == ["True"] * 2


def _messages(where: str, hold: bool, old_torch: bool) -> list[str]:
    """Return what the next forward, the next step, and both after dropping the gradients say."""
    model = wrap_model(SHARDABLE(), {**UNITS, **(LAST if hold else {})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if old_torch:
        vars(model)["reset_iter_state"] = None
    if hold:
        with accumulate(model, last=False):
            _loss(model, 0, 0).backward()
    _interrupt(model, where, 0, hold)
    texts = []
    for action in (lambda: _loss(model, 1, 0), optimizer.step, optimizer.zero_grad, lambda: _loss(model, 1, 0)):
        try:
            action()
        except FSDP2Error as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts


AFTER_ZERO_GRAD = ["", "" if GOES_ON else CANNOT_GO_ON]
AGAIN = "Call model.zero_grad() and run the step again from its first micro-batch."
INCOMPLETE = "ended with an exception, so the gradients of this step are incomplete. " + AGAIN


def test_gradients_of_a_failed_backward_are_not_used(ranks2: RankPool) -> None:
    step = f"optimizer: step() came after a backward that {INCOMPLETE}"
    expected = [f"the last backward {INCOMPLETE}", step, *AFTER_ZERO_GRAD]
    assert ranks2.run(_messages, "backward", False, False) == [expected] * 2


def test_sums_are_not_used_after_a_failed_forward(ranks2: RankPool) -> None:
    step = (
        "optimizer: step() came after a micro-batch that is not its step's last, so gradients are not reduced yet. Run "
        "the last micro-batch of every step in accumulate(model, last=True)."
    )
    expected = [f"the last forward {INCOMPLETE}", step, *AFTER_ZERO_GRAD]
    assert ranks2.run(_messages, "forward", True, False) == [expected] * 2


def test_exception_before_torch_can_go_on(ranks2: RankPool) -> None:
    for answer in ranks2.run(_messages, "backward", False, True):
        assert answer[3] == CANNOT_GO_ON
