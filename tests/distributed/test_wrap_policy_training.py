"""A model whose units a policy chose trains like one process on the data of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed_fsdp2 import wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    WIDTH,
    Recipe,
    Run,
    check_close,
    check_equal_over_ranks,
    check_moved,
    largest,
    reference,
    wrapped,
)


class Layer(nn.Module):
    """Attention of PyTorch and two larger linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 6 * WIDTH)
        self.down = nn.Linear(6 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(batch, WIDTH)``."""
        hidden = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Base(nn.Module):
    """First linear map, layers, norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(batch, WIDTH)``."""
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Model(nn.Module):
    """Laid out as in Transformers."""

    base_model_prefix = "model"
    _no_split_modules = ["Layer"]

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Base()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return values of the shape of ``x``, ``(batch, WIDTH)``."""
        return self.head(self.model(x))

    def get_input_embeddings(self) -> nn.Module:
        """Return the first linear map."""
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        """Return the last one."""
        return self.head


def tied() -> nn.Module:
    """Return the model with one weight for both ends."""
    return Model(tied=True)


TRANSFORMER = {"sharding_size": "auto", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
BY_SIZE = {"sharding_size": "auto", "auto_wrap_policy": "SIZE_BASED_WRAP"}
ENDS = {"model.embed", "model.norm", "head"}
LAYERS = {"model.layers.0", "model.layers.1"}
INSIDE = {f"{layer}.{part}" for layer in LAYERS for part in ("up", "down")}
# name -> settings, maker of the model, the modules that become units or parts of them
ROWS: dict[str, tuple[dict[str, Any], Any, set[str]]] = {
    "classes": (TRANSFORMER, Model, LAYERS | ENDS),
    "classes, tied": (TRANSFORMER, tied, LAYERS | ENDS),
    "classes, recompute": (
        {**TRANSFORMER, "transformer_layer_cls_to_wrap": "Layer", "recompute_modules": ["Layer"]},
        Model,
        LAYERS | ENDS,
    ),
    "size": ({**BY_SIZE, "min_num_params": 500}, Model, LAYERS | ENDS),
    "small size, tied": ({**BY_SIZE, "min_num_params": 300}, tied, LAYERS | INSIDE | ENDS),
    "none": ({"sharding_size": "auto", "auto_wrap_policy": "NO_WRAP"}, Model, set()),
}


def _train(name: str) -> tuple[Run, set[str]]:
    settings, make, _ = ROWS[name]
    model = wrap_model(make(), settings)
    units = {fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)}
    return wrapped(Recipe(make=make), settings), units


@pytest.mark.parametrize("name", ROWS)
def test_training_equals_one_process(ranks2: RankPool, name: str) -> None:
    _, make, expected = ROWS[name]
    recipe = Recipe(make=make)
    results = ranks2.run(_train, name)
    theirs = reference(recipe, 2)
    for ours, units in results:
        assert units == {"", *expected}
        assert ours.grads.keys() == theirs.grads.keys()
        assert ours.params.keys() == theirs.params.keys()
        pairs = {"grad": (ours.grads, theirs.grads), "param": (ours.params, theirs.params)}
        worst = {kind: max(largest(a[n] - b[n]) / largest(b[n]) for n in b) for kind, (a, b) in pairs.items()}
        worst["loss"] = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
        worst["norm"] = max(abs(a - b) / b for a, b in zip(ours.norms, theirs.norms, strict=True))
        check_close(worst)
        check_moved(recipe, ours)
    check_equal_over_ranks([ours for ours, _ in results])
