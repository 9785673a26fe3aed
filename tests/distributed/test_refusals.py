"""Every rank raises the same error, or none does."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import ConfigError, FSDP2Error, PlanError, wrap_model
from mindspeed_fsdp2.agreement import agree
from tests.distributed.models import Decoder, build, tokens_of
from tests.distributed.ranks import RankPool

SETTINGS: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}


def message(action: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of the error that ``action`` raises."""
    try:
        action()
    except FSDP2Error as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def same_on_all(results: list[tuple[str, str]]) -> tuple[str, str]:
    """Return what every rank raised."""
    assert all(result == results[0] for result in results), results
    return results[0]


def _wrap(sources: list[Any]) -> tuple[str, str]:
    return message(lambda: wrap_model(build(), sources[dist.get_rank()]))


def test_file_missing_on_one_rank(ranks2: RankPool, tmp_path: pathlib.Path) -> None:
    there, missing = tmp_path / "cfg.yaml", tmp_path / "none.yaml"
    there.write_text("sharding_size: auto\nsub_modules_to_wrap: []\n")
    assert same_on_all(ranks2.run(_wrap, [str(there), str(missing)])) == (
        "ConfigError",
        f"on rank 1 of 2: {missing}: there is no such file. Write the path of an existing YAML file.",
    )
    assert same_on_all(ranks2.run(_wrap, [str(missing), str(missing)])) == (
        "ConfigError",
        f"{missing}: there is no such file. Write the path of an existing YAML file.",
    )


def test_different_mistakes_are_all_told(ranks2: RankPool) -> None:
    sources = [{**SETTINGS, "sharding_size": 3}, {**SETTINGS, "param_dtypes": "bf16"}]
    kind, text = same_on_all(ranks2.run(_wrap, sources))
    assert kind == "ConfigError"
    assert text.splitlines() == [
        "on rank 0 of 2: sharding_size: 3 does not divide the 2 data-parallel ranks. Use one of 1, 2, or auto.",
        "on rank 1 of 2: param_dtypes: unknown key. Write param_dtype.",
    ]


def test_sharding_size_that_does_not_divide(ranks4: RankPool) -> None:
    assert same_on_all(ranks4.run(_wrap, [{**SETTINGS, "sharding_size": 3}] * 4)) == (
        "ConfigError",
        "sharding_size: 3 does not divide the 4 data-parallel ranks. Use one of 1, 2, 4, or auto.",
    )


def test_settings_that_differ(ranks4: RankPool) -> None:
    other = {**SETTINGS, "reshard_after_forward": False}
    kind, text = same_on_all(ranks4.run(_wrap, [SETTINGS, other, SETTINGS, other]))
    assert kind == "PlanError"
    assert text.startswith("FSDP2 plan: the ranks do not agree (")
    assert "/cpu on ranks 0, 2; " in text
    assert text.endswith("/cpu on ranks 1, 3). Give every rank the same YAML file, model and flags.")


def _rank_model(change: str) -> tuple[str, str]:
    model: nn.Module = build()
    assert isinstance(model, Decoder)
    if dist.get_rank() == 1:
        if change == "layers":
            model = build(layers=2)
        elif change == "frozen":
            model.norm.requires_grad_(False)
        elif change == "dtype":
            model.to(torch.float64)
        elif change == "shape":
            layer = model.layers[0]
            layer.up, layer.down = layer.down, layer.up
        elif change == "name":
            model.layers[0].top = model.layers[0].up
            del model.layers[0].up
        elif change == "buffer":
            model.register_buffer("scale", torch.ones(2))
    return message(lambda: wrap_model(model, SETTINGS))


@pytest.mark.parametrize("change", ["layers", "frozen", "dtype", "shape", "name", "buffer"])
def test_models_that_differ(ranks2: RankPool, change: str) -> None:
    kind, text = same_on_all(ranks2.run(_rank_model, change))
    assert kind == "PlanError"
    assert text.startswith("FSDP2 plan: the ranks do not agree (")
    assert "/cpu on rank 0; " in text
    assert text.endswith("/cpu on rank 1). Give every rank the same YAML file, model and flags.")


def _equal_models() -> tuple[str, str]:
    return message(lambda: wrap_model(build(seed=dist.get_rank()), SETTINGS))


def test_other_values_are_no_difference(ranks2: RankPool) -> None:
    assert ranks2.run(_equal_models) == [("nothing", "")] * 2


def _twice(size: Any) -> tuple[str, str]:
    model = wrap_model(build(), {**SETTINGS, "sharding_size": size})
    return message(lambda: wrap_model(model, {**SETTINGS, "sharding_size": size}))


@pytest.mark.parametrize("size", ["auto", 1])
def test_wrapping_twice(ranks2: RankPool, size: Any) -> None:
    assert same_on_all(ranks2.run(_twice, size)) == (
        "PlanError",
        "model: these parameters are sharded already: layers.2.norm.weight, layers.2.norm.bias, layers.2.up.weight, "
        "layers.2.up.bias, layers.2.down.weight, layers.2.down.bias, layers.1.norm.weight, layers.1.norm.bias and "
        "14 more. Wrap a model once, before anything shards it.",
    )


def _frozen_embedding(settings: dict[str, Any]) -> tuple[str, str, list[str]]:
    model = build()
    model.embedding.requires_grad_(False)
    wrap_model(model, {**SETTINGS, "recompute_modules": ["layers.{*}"], **settings})
    kind, text = message(lambda: model(tokens_of(0, dist.get_rank())).backward())
    return kind, text, [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_reentrant_recompute_behind_a_frozen_embedding(ranks2: RankPool) -> None:
    for kind, text, _ in ranks2.run(_frozen_embedding, {"use_reentrant": True}):
        assert (kind, text) == (
            "FSDP2Error",
            "recompute_modules: 'layers.0' is recomputed reentrantly but none of its inputs requires grad, so its "
            "parameters would silently get no gradient. Set use_reentrant: false, or do not recompute it.",
        )
    assert ranks2.run(_frozen_embedding, {"use_reentrant": False}) == [("nothing", "", [])] * 2


def _fault() -> tuple[str, str]:
    def build_something() -> int:
        if dist.get_rank() == 1:
            raise KeyError("boom")
        return 3

    try:
        return "value", str(agree(build_something, str, None, "thing"))
    except (KeyError, FSDP2Error) as error:
        return type(error).__name__, str(error)


def test_a_fault_on_one_rank_ends_the_others_too(ranks2: RankPool) -> None:
    first, second = ranks2.run(_fault)
    assert first == ("PlanError", "on rank 1 of 2: thing: KeyError: 'boom'")
    assert second == ("KeyError", "'boom'")


def _other_group() -> tuple[str, str]:
    group = dist.new_group([0])
    return message(lambda: wrap_model(build(), SETTINGS, process_group=group))


def test_rank_outside_its_process_group(ranks2: RankPool) -> None:
    assert same_on_all(ranks2.run(_other_group)) == (
        "PlanError",
        "on rank 1 of 2: process_group: this rank is not in it. Pass each rank its own data-parallel group.",
    )


def _device_type() -> tuple[str, str]:
    return message(lambda: wrap_model(build(), SETTINGS, device_type="gpu"))


def test_device_type(ranks2: RankPool) -> None:
    text = "device_type: 'gpu' is not a device type. Use one of npu, cuda, cpu."
    assert same_on_all(ranks2.run(_device_type)) == ("ConfigError", text)


def test_without_a_process_group() -> None:
    with pytest.raises(PlanError) as caught:
        wrap_model(build(), SETTINGS)
    assert str(caught.value) == (
        "process_group: torch.distributed is not initialised. Start with torchrun and call "
        "torch.distributed.init_process_group() before wrap_model."
    )
    assert not issubclass(ConfigError, PlanError)


def test_the_ranks_go_on_after_all_this(ranks2: RankPool) -> None:
    assert ranks2.run(_equal_models) == [("nothing", "")] * 2
