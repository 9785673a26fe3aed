"""Weights used in two places: one unit, one copy, the gradients of both uses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import ConfigError, PlanError, wrap_model
from mindspeed_fsdp2.apply import sharded
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    WIDTH,
    Pair,
    Recipe,
    Run,
    check_close,
    check_equal_over_ranks,
    check_moved,
    differences,
    reference,
    wrapped,
)

VOCAB = 33  # no number of ranks divides it


class Body(nn.Module):
    """As in Hugging Face models: everything but the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Tied(nn.Module):
    """``kind``: what shares a weight.

    ``head``: the embedding and the head. ``three``: a second embedding as well. ``layers``: halves of two layers too.
    ``root``: the embedding and a parameter of the model itself.
    """

    def __init__(self, kind: str = "head") -> None:
        super().__init__()
        torch.manual_seed(6)
        self.kind = kind
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if kind == "three":
            self.second = nn.Embedding(VOCAB, WIDTH)
            self.second.weight = self.body.embedding.weight
        if kind == "layers":
            self.body.layers[2].second.weight = self.body.layers[0].second.weight
        if kind == "root":
            self.table = self.body.embedding.weight
        else:
            self.head.weight = self.body.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(batch, VOCAB)``; the tokens are made from ``x`` of shape ``(batch, WIDTH)``."""
        tokens = (x.abs() * 100).long().sum(-1) % VOCAB
        hidden = self.body(tokens)
        if self.kind == "three":
            hidden = hidden + self.second(tokens.flip(0))
        if self.kind == "root":
            return self.head(hidden) + hidden @ self.table.T
        return self.head(hidden)


LAYERS = "body.layers.{*}"
TOGETHER = "'body.embedding' and 'head' share a weight: they are sharded as one unit [body.embedding, head]."
WITH_BODY = "'body.embedding' and 'head' share a weight: they are sharded as one unit [body, head]."
RECOMPUTE = {"recompute_modules": [LAYERS]}
AHEAD = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}

# kind, units, other settings, notices
LISTINGS: dict[str, tuple[str, list[Any], dict[str, Any], tuple[str, ...]]] = {
    "both are units": ("head", ["body.embedding", LAYERS, "head"], {}, (TOGETHER,)),
    "one unit": ("head", [LAYERS, ["body.embedding", "head"]], {}, ()),
    "one unit, head first": ("head", [LAYERS, ["head", "body.embedding"]], {}, ()),
    "embedding is a unit": ("head", ["body.embedding", LAYERS], {}, (TOGETHER,)),
    "head is a unit": ("head", [LAYERS, "head"], {}, (TOGETHER,)),
    "both in the root": ("head", [LAYERS], {}, ()),
    "root only": ("head", [], {}, ()),
    "the body is a unit": ("head", ["body", LAYERS], {}, (WITH_BODY,)),
    "the body and both are units": ("head", ["body", LAYERS, "body.embedding", "head"], {}, (TOGETHER,)),
    "body and head are units": ("head", ["body", LAYERS, "head"], {}, (WITH_BODY,)),
    "one end in a unit of two": (
        "head",
        [LAYERS, ["body.embedding", "body.layers.2.second"], "head"],
        {},
        (TOGETHER.replace("embedding, head]", "embedding, body.layers.2.second, head]"),),
    ),
    "one end's unit lies in the other's": (
        "layers",
        ["body", "body.layers.0"],
        {},
        (
            "'body.layers.0.second' and 'body.layers.2.second' share a weight: they are sharded as one unit [body].",
            WITH_BODY,
        ),
    ),
    "three uses": (
        "three",
        ["body.embedding", LAYERS, "second", "head"],
        {},
        (
            "'body.embedding' and 'head' share a weight: they are sharded as one unit [body.embedding, head].",
            "'body.embedding' and 'second' share a weight: they are sharded as one unit [body.embedding, head, second].",
        ),
    ),
    "two ties": (
        "layers",
        ["body.embedding", LAYERS, "head"],
        {},
        (
            "'body.layers.0.second' and 'body.layers.2.second' share a weight: they are sharded as one unit "
            "[body.layers.0, body.layers.2].",
            TOGETHER,
        ),
    ),
    "parameter of the model itself": (
        "root",
        ["body.embedding", LAYERS],
        {},
        ("the model itself and 'body.embedding' share a weight: they are sharded as the root unit.",),
    ),
    "ZeRO-2, prefetch": (
        "head",
        ["body.embedding", LAYERS, "head"],
        {"reshard_after_forward": False, **AHEAD},
        (TOGETHER,),
    ),
    "recompute, prefetch": ("head", ["body.embedding", LAYERS, "head"], {**RECOMPUTE, **AHEAD}, (TOGETHER,)),
    "recompute with the embedding": (
        "head",
        ["body.embedding", LAYERS, "head"],
        {"recompute_modules": ["body"], "use_reentrant": False},
        (TOGETHER,),
    ),
    "sharding_size 1": ("head", ["body.embedding", LAYERS, "head"], {"sharding_size": 1}, (TOGETHER,)),
    "offload": ("head", ["body.embedding", LAYERS, "head"], {"offload_to_cpu": True}, (TOGETHER,)),
    "last_microbatch": ("head", ["head", LAYERS], {"reduce_grads": "last_microbatch"}, (TOGETHER,)),
    "both ignored": ("head", [LAYERS], {"ignored_modules": ["body.embedding", "head"]}, ()),
}


def _tied(recipe: Recipe, config: dict[str, Any], ends: tuple[str, ...]) -> tuple[Run, tuple[str, ...], list[bool]]:
    """Train; return whether all ends are one parameter when wrapped, in forward, and after a step."""
    model = wrap_model(recipe.make(), config)
    handle = sharded(model)
    assert handle is not None

    def one() -> bool:
        return len({id(model.get_parameter(end)) for end in ends}) == 1

    same = [one()]
    model.head.register_forward_hook(lambda *_: same.append(one()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe.loss(model, 0, 0, dist.get_rank(), dist.get_world_size()).backward()
    optimizer.step()
    same.append(one())
    notices = tuple(n for n in handle.plan.notices if "share" in n)
    return wrapped(recipe, config), notices, same


def ends_of(kind: str) -> tuple[str, ...]:
    return {
        "head": ("body.embedding.weight", "head.weight"),
        "three": ("body.embedding.weight", "second.weight", "head.weight"),
        "layers": ("body.layers.0.second.weight", "body.layers.2.second.weight"),
        "root": ("table", "body.embedding.weight"),
    }[kind]


@functools.cache
def make_of(kind: str) -> Any:
    return functools.partial(Tied, kind)


@pytest.mark.parametrize("name", LISTINGS)
def test_every_listing_gives_one_copy_and_the_right_gradient(ranks2: RankPool, name: str) -> None:
    kind, units, settings, notices = LISTINGS[name]
    recipe = Recipe(make=make_of(kind), micro_batches=2)
    config = {"sharding_size": "auto", "sub_modules_to_wrap": units, **settings}
    results = ranks2.run(_tied, recipe, config, ends_of(kind))
    for run, said, same in results:
        assert said == notices
        assert same == [True] * 3
        check_moved(recipe, run)
    check_close(differences("ties", name, [run for run, *_ in results], reference(recipe, 2)))
    check_equal_over_ranks([run for run, *_ in results])


@pytest.mark.parametrize("size", ["auto", 2, 1])
def test_ties_on_four_ranks(ranks4: RankPool, size: int | str) -> None:
    recipe = Recipe(make=make_of("three"), micro_batches=2, optimizer="adamw", clip=0.1)
    config = {"sharding_size": size, "sub_modules_to_wrap": ["body.embedding", LAYERS, "second", "head"]}
    results = ranks4.run(_tied, recipe, config, ends_of("three"))
    theirs = reference(recipe, 4)
    assert min(theirs.norms) > recipe.clip
    check_close(differences("ties", f"4 ranks, sharding_size {size}", [run for run, *_ in results], theirs), "adamw")
    for run, _, same in results:
        assert same == [True] * 3
        check_moved(recipe, run)


def _state(units: list[Any]) -> tuple[bool, list[str], int]:
    model = wrap_model(Tied(), {"sharding_size": "auto", "sub_modules_to_wrap": units})
    state = model.state_dict()
    whole = [state[name].full_tensor() for name in ends_of("head")]
    names = [name for name, _ in model.named_parameters()]
    return torch.equal(*whole), [name for name in names if "weight" in name and "layers" not in name], len(names)


def test_names_are_those_of_the_unwrapped_model(ranks2: RankPool) -> None:
    plain = len(list(Tied().parameters()))
    for units in (["body.embedding", "head"], []):
        assert ranks2.run(_state, units) == [(True, ["body.embedding.weight"], plain)] * 2


def _refused(kind: str, config: dict[str, Any]) -> str:
    try:
        wrap_model(Tied(kind), {"sharding_size": "auto", **config})
    except (PlanError, ConfigError) as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "across an ignored module": (
        "head",
        {"sub_modules_to_wrap": ["body.embedding", LAYERS], "ignored_modules": ["head"]},
        "parameter 'head.weight' is shared by unit [body.embedding] and an ignored module. Ignore both modules or none.",
    ),
    "across an optional module": (
        "three",
        {"sub_modules_to_wrap": [LAYERS], "optional_modules": ["second"]},
        "parameter 'second.weight' is shared by the root unit and an optional module. List both modules in "
        "optional_modules or none.",
    ),
    "two overrides": (
        "head",
        {
            "sub_modules_to_wrap": ["body.embedding", LAYERS, "head"],
            "overrides": [
                {"modules": ["body.embedding"], "reshard_after_forward": False},
                {"modules": ["head"], "param_dtype": "fp32"},
            ],
        },
        "overrides[1].modules[0]: 'head' is overridden twice. Merge the two entries.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_ties(ranks2: RankPool, name: str) -> None:
    kind, config, text = REFUSED[name]
    assert ranks2.run(_refused, kind, config) == [text] * 2


def _overridden() -> list[str]:
    config = {
        "sharding_size": "auto",
        "sub_modules_to_wrap": ["body.embedding", LAYERS, "head"],
        "param_dtype": "bf16",
        "overrides": [{"modules": ["head"], "param_dtype": "fp32"}],
    }
    model = wrap_model(Tied(), config)
    seen: list[str] = []
    for name in ("body.embedding", "body.layers.0.first", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output: seen.append(f"{module.weight.dtype}/{output.dtype}")
        )
    model(torch.ones(2, WIDTH)).sum().backward()
    return seen


def test_an_override_of_one_end_holds_for_both(ranks2: RankPool) -> None:
    fp32, bf16 = "torch.float32/torch.float32", "torch.bfloat16/torch.bfloat16"
    assert ranks2.run(_overridden) == [[fp32, bf16, fp32]] * 2
