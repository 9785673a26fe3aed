"""Arguments that a recomputed module would write into twice: empty caches are left out, the rest is refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2.config import FSDP2Config
from mindspeed_fsdp2.errors import ConfigError, FSDP2Error
from mindspeed_fsdp2.plan import build_plan
from mindspeed_fsdp2.recompute import apply_recompute


class Cache:
    """Keys of each layer, as Transformers' caches keep them."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Append ``keys`` to those of ``layer``; return them all."""
        self.keys[layer] = torch.cat([self.keys[layer], keys]) if layer in self.keys else keys
        return self.keys[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the tokens kept of ``layer``."""
        return len(self.keys.get(layer, ()))


class ModuleCache(Cache, nn.Module):
    """The same as a module, which Transformers' caches were for a while."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Cache.__init__(self)


@dataclass
class Carrier:
    """An object that travels through the layers."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Layer(nn.Module):
    """A linear map that may write into its arguments."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.layer_idx = index
        self.map = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any = None, carrier: Any = None, seen: Any = None) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(tokens, 4)``."""
        keys = self.map(x)
        if cache is not None:
            keys = cache.update(keys, self.layer_idx)
        if carrier is not None:
            carrier.calls += 1
        if seen is not None:
            seen.append(keys.sum()) if isinstance(seen, list) else seen.tensors.append(keys.sum())
        return x + keys.sum(0)


def _layers(use_reentrant: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(index) for index in range(3))
    apply_recompute([(str(index), layer) for index, layer in enumerate(layers)], use_reentrant, ())
    return layers


def _grads(layers: nn.ModuleList, **arguments: Any) -> list[torch.Tensor]:
    x = torch.arange(8.0).reshape(2, 4).requires_grad_()
    for layer in layers:
        x = layer(x, **arguments)
    x.square().sum().backward()
    return [param.grad.clone() for param in layers.parameters() if param.grad is not None]


@pytest.mark.parametrize("kind", [Cache, ModuleCache])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_empty_cache_changes_no_gradient(
    use_reentrant: bool, kind: type[Cache], caplog: pytest.LogCaptureFixture
) -> None:
    want = _grads(_layers(use_reentrant))
    cache = kind()
    with caplog.at_level(logging.WARNING):
        got = _grads(_layers(use_reentrant), cache=cache)
    assert len(want) == 6 and all(map(torch.equal, got, want))
    assert not cache.keys
    assert [record.getMessage() for record in caplog.records] == [
        "recompute_modules: '0' got a key/value cache in training; recomputed modules neither fill nor read it (a "
        "second run would append to it). Pass use_cache=False to the model."
    ]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_that_another_layer_filled_is_empty_for_this_one(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(index) for index in range(3))
    apply_recompute([("1", layers[1])], use_reentrant, ())
    cache = Cache()
    got = _grads(layers, cache=cache)
    assert sorted(cache.keys) == [0, 2]
    assert all(map(torch.equal, got, _grads(_layers(use_reentrant))))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_with_tokens_is_refused(use_reentrant: bool) -> None:
    cache = Cache()
    cache.update(torch.ones(5, 4), 0)
    with pytest.raises(FSDP2Error) as caught:
        _grads(_layers(use_reentrant), cache=cache)
    assert str(caught.value) == (
        "recompute_modules: '0' is called with a Cache that holds 5 tokens already; a recomputed module cannot read "
        "and extend it. Train without past keys and values (past_key_values, prefix tuning), or do not recompute this "
        "module."
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_that_comes_back_is_refused(use_reentrant: bool) -> None:
    layers, cache = _layers(use_reentrant), Cache()
    _grads(layers, cache=cache)
    with pytest.raises(FSDP2Error, match=r"^recompute_modules: '0' is called with a Cache that lacks the keys and val"):
        _grads(layers, cache=cache)
    assert len(_grads(layers, cache=Cache())) == 6


class StateCache(Cache):
    """The state of a layer that keeps one size, as Mamba's does."""

    def get_seq_length(self, layer: int = 0) -> int:
        raise ValueError("get_seq_length can only be called on attention layers")

    def has_previous_state(self, layer: int = 0) -> bool:
        """Return whether ``layer`` has run."""
        return layer in self.keys


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_cache_of_states(use_reentrant: bool) -> None:
    layers, cache = _layers(use_reentrant), StateCache()
    assert all(map(torch.equal, _grads(layers, cache=cache), _grads(_layers(use_reentrant))))
    filled = StateCache()
    filled.update(torch.ones(1, 4), 0)
    with pytest.raises(FSDP2Error, match=r"^recompute_modules: '0' is called with a StateCache that holds a state alr"):
        _grads(layers, cache=filled)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("seen", [list, Carrier])
def test_writing_into_another_argument_is_refused(use_reentrant: bool, seen: type) -> None:
    with pytest.raises(FSDP2Error) as caught:
        _grads(_layers(use_reentrant), seen=seen())
    assert str(caught.value) == (
        "recompute_modules: '0' writes into an argument that is no tensor (a cache, a list, an object), so running it "
        "again would give other gradients. Call it without that argument, or do not recompute it."
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_counting_calls_is_allowed(use_reentrant: bool) -> None:
    carrier = Carrier([torch.ones(2)])
    got = _grads(_layers(use_reentrant), carrier=carrier)
    assert all(map(torch.equal, got, _grads(_layers(use_reentrant))))
    assert carrier.calls >= 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_evaluation_keeps_the_cache(use_reentrant: bool) -> None:
    cache = Cache()
    with torch.no_grad():
        for layer in _layers(use_reentrant):
            layer(torch.ones(2, 4), cache=cache)
    assert [cache.get_seq_length(index) for index in range(3)] == [2, 2, 2]


class Checkpointing(Layer):
    """A layer of Transformers after ``model.gradient_checkpointing_enable()``."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_its_own_is_refused_before_and_after_wrapping(use_reentrant: bool) -> None:
    text = (
        "recompute_modules: the model does activation checkpointing of its own as well (in '0'), so layers would run "
        "three times. Call model.gradient_checkpointing_disable(), or leave recompute_modules out."
    )
    config = FSDP2Config(sub_modules_to_wrap=["{*}"], recompute_modules=["0"], use_reentrant=use_reentrant)
    with pytest.raises(ConfigError) as planned:
        build_plan(config, nn.Sequential(Checkpointing(), Layer()))
    assert str(planned.value) == text
    layers = nn.ModuleList([Checkpointing()])
    apply_recompute([("0", layers[0])], use_reentrant, ())
    with pytest.raises(FSDP2Error) as run:
        _grads(layers)
    assert str(run.value) == text
    layers[0].gradient_checkpointing = False
    assert len(_grads(layers)) == 2
