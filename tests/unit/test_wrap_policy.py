"""Units chosen by a rule: what the three keys may hold, which units they make of a model, and every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2 import ConfigError, FSDP2Config, FSDP2Plan, build_plan, load_config

TRANSFORMER = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP"}
NONE = {"auto_wrap_policy": "NO_WRAP"}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class WideBlock(Block):
    pass


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Base(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, width)
        self.layers = nn.ModuleList([Block(width), WideBlock(width)])
        self.norm = RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class CausalLM(nn.Module):
    """Laid out as in Transformers: a base model under ``base_model_prefix`` and a head."""

    base_model_prefix = "model"
    _no_split_modules: Any = ["Block", "OfAnotherTower"]

    def __init__(self, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.model = Base(width)
        self.lm_head = nn.Linear(width, 10, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head


class Headless(CausalLM):
    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def get_output_embeddings(self) -> None:
        return None


class Conditional(nn.Module):
    """A tower and a language model; the base model has no norm, the decoder has."""

    base_model_prefix = "language"

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Block(4), nn.LayerNorm(4))
        self.language = nn.ModuleDict({"inner": Base(4)})
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.language["inner"](tokens))

    def get_input_embeddings(self) -> nn.Module:
        return self.language["inner"].embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_decoder(self) -> nn.Module:
        return self.language["inner"]


def plan_of(model: nn.Module, settings: dict[str, Any]) -> FSDP2Plan:
    return build_plan(load_config({"sharding_size": "auto", **settings}), model, data_parallel_size=2)


def units_of(model: nn.Module, settings: dict[str, Any]) -> list[str]:
    return [unit.name for unit in plan_of(model, settings).assumed_order]


EMBEDDING, TAIL = "model.embed_tokens", "model.norm + lm_head"
LAYERS = ["model.layers.0", "model.layers.1"]
ALL = ["(root)", EMBEDDING, *LAYERS, TAIL]


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        (NONE, ["(root)"]),
        (TRANSFORMER, ALL),
        ({**TRANSFORMER, "transformer_layer_cls_to_wrap": ["Block"]}, ALL),
        ({**TRANSFORMER, "transformer_layer_cls_to_wrap": f"{__name__}.Block"}, ALL),
        # a subclass is of its base's class, not the other way round
        ({**TRANSFORMER, "transformer_layer_cls_to_wrap": "WideBlock"}, ["(root)", EMBEDDING, LAYERS[1], TAIL]),
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "WideBlock, Attention"},
            ["(root)", EMBEDDING, "model.layers.0.attention", LAYERS[1], f"{LAYERS[1]}.attention", TAIL],
        ),
        ({**TRANSFORMER, "transformer_layer_cls_to_wrap": ["Block", "Embedding"]}, ALL),
        ({**TRANSFORMER, "ignored_modules": ["model.embed_tokens"]}, ["(root)", *LAYERS, TAIL]),
        ({**TRANSFORMER, "ignored_modules": ["model.norm"]}, ["(root)", EMBEDDING, *LAYERS, "lm_head"]),
        ({**TRANSFORMER, "optional_modules": ["model.layers.0"]}, ["(root)", EMBEDDING, LAYERS[1], TAIL]),
        # a block has 32 + 80 parameters, each attention 32 of them
        ({**SIZE, "min_num_params": 111}, ALL),
        (
            {**SIZE, "min_num_params": 79},
            ["(root)", EMBEDDING, LAYERS[0], f"{LAYERS[0]}.mlp", LAYERS[1], f"{LAYERS[1]}.mlp", TAIL],
        ),
        # the base model has more too, but nothing that lies in no smaller unit
        ({**SIZE, "min_num_params": 39}, ["(root)", EMBEDDING, LAYERS[0], f"{LAYERS[0]}.mlp"]
         + [LAYERS[1], f"{LAYERS[1]}.mlp", TAIL]),
        # strictly more: nothing but the base model itself has more than 112
        ({**SIZE, "min_num_params": 112}, ["(root)", "model", EMBEDDING, TAIL]),
    ],
)  # fmt: skip
def test_units_of_a_causal_model(settings: dict[str, Any], units: list[str]) -> None:
    assert units_of(CausalLM(), settings) == units


@pytest.mark.parametrize("settings", [TRANSFORMER, {**SIZE, "min_num_params": 111}])
def test_tied_ends_are_one_unit(settings: dict[str, Any]) -> None:
    plan = plan_of(CausalLM(tied=True), settings)
    assert [unit.name for unit in plan.assumed_order] == [
        "(root)", "model.embed_tokens + model.norm + lm_head", *LAYERS
    ]  # fmt: skip
    text = "'model.embed_tokens' and 'lm_head' share a weight: they are sharded as one unit "
    assert plan.notices == (f"{text}[model.embed_tokens, model.norm, lm_head].",)
    assert {unit.name: unit.numel for unit in plan.units}["(root)"] == 0


def test_a_second_holder_of_the_weight_brings_no_other_module_along() -> None:
    model = CausalLM()
    model.second = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 40), nn.LayerNorm(40))
    model.second[0].weight = model.model.embed_tokens.weight
    units = units_of(model, {**SIZE, "min_num_params": 111})
    expected = ["(root)", "model.embed_tokens + second.0", *LAYERS, TAIL, "second", "second.1"]
    assert sorted(units) == sorted(expected)


def test_what_the_model_does_not_name_stays_in_the_root() -> None:
    plan = plan_of(Headless(), TRANSFORMER)
    assert [unit.name for unit in plan.assumed_order] == ["(root)", *LAYERS]
    assert plan.units[-1].numel == 40 + 4 + 40


def test_the_final_norm_is_found_in_the_decoder() -> None:
    settings = {**TRANSFORMER, "transformer_layer_cls_to_wrap": "Block"}
    layers = ["language.inner.layers.0", "language.inner.layers.1"]
    expected = ["(root)", "tower.0", "language.inner.embed_tokens", *layers, "language.inner.norm + head"]
    assert units_of(Conditional(), settings) == expected


def test_the_final_norm_is_the_last_one() -> None:
    model = CausalLM()
    model.model.after_norm = RMSNorm(4)
    model.model.other = nn.Linear(4, 4)
    assert units_of(model, TRANSFORMER)[-1] == "model.after_norm + lm_head"


def test_a_set_of_no_split_modules_and_those_of_parts() -> None:
    model = nn.Sequential(CausalLM())
    model[0]._no_split_modules = {"WideBlock"}
    model[0].model._no_split_modules = ["Attention"]
    expected = ["(root)", "0.model.layers.0.attention", "0.model.layers.1", "0.model.layers.1.attention"]
    assert units_of(model, TRANSFORMER) == expected


def test_sizes_leave_out_what_is_never_called() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    units = units_of(model, {**SIZE, "min_num_params": 50})
    assert not [name for name in units if name == "layers" or "out_proj" in name]
    inside = ["", ".self_attn", ".linear1", ".linear2"]
    assert units == ["(root)", *(f"layers.{i}{name}" for i in range(2) for name in inside)]


def test_only_containers_are_large_enough() -> None:
    model = nn.Sequential()
    model.add_module("parts", nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    assert units_of(model, {**SIZE, "min_num_params": 20}) == ["(root)"]


def test_the_plan_shows_the_policy_and_its_units() -> None:
    lines = str(plan_of(CausalLM(), TRANSFORMER)).splitlines()
    assert lines[2:8] == [
        "  wrap policy    TRANSFORMER_BASED_WRAP, the model's _no_split_modules",
        "  unit                  modules    units  parameters each  stored",
        "  (root)                CausalLM   1      0                -",
        "  model.embed_tokens    Embedding  1      40               float32",
        "  model.layers.0        Block      1      112              float32",
        "  model.layers.1        WideBlock  1      112              float32",
    ]
    named = {**TRANSFORMER, "transformer_layer_cls_to_wrap": "Block,Attention"}
    assert "  wrap policy    TRANSFORMER_BASED_WRAP, Block, Attention\n" in str(plan_of(CausalLM(), named))
    sized = str(plan_of(CausalLM(), {**SIZE, "min_num_params": 111}))
    assert "  wrap policy    SIZE_BASED_WRAP, modules with more than 111 parameters\n" in sized
    whole = str(plan_of(CausalLM(), NONE))
    assert "  wrap policy    NO_WRAP, the whole model is one unit\n" in whole
    assert "wrap policy" not in str(plan_of(CausalLM(), {}))


def test_overrides_and_recompute_go_with_a_policy() -> None:
    settings = {
        **TRANSFORMER,
        "recompute_modules": ["Block"],
        "overrides": [{"modules": ["lm_head"], "reshard_after_forward": False}],
    }
    plan = plan_of(CausalLM(), settings)
    assert plan.recompute == ("model.layers.0",)
    assert {unit.name: unit.reshard for unit in plan.units}[TAIL] is False


def test_the_settings_survive_yaml(tmp_path: Path) -> None:
    config = load_config({**TRANSFORMER, "transformer_layer_cls_to_wrap": "A, b.C", "sharding_size": "auto"})
    assert config.transformer_layer_cls_to_wrap == ("A", "b.C")
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config
    others = [{}, TRANSFORMER, NONE, {**SIZE, "min_num_params": 5}, {**SIZE, "min_num_params": 6}]
    assert len({config.digest(), *(load_config(other).digest() for other in others)}) == 6


# Mistakes


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "auto_wrap_policy: transformer_based_wrap",
            "cfg.yaml:1: auto_wrap_policy: the text 'transformer_based_wrap' is not one of TRANSFORMER_BASED_WRAP, "
            "SIZE_BASED_WRAP, NO_WRAP. Write TRANSFORMER_BASED_WRAP.",
        ),
        (
            "auto_wrap_policy: SIZE_WRAP\nmin_num_params: 5",
            "cfg.yaml:1: auto_wrap_policy: the text 'SIZE_WRAP' is not one of TRANSFORMER_BASED_WRAP, "
            "SIZE_BASED_WRAP, NO_WRAP. Write SIZE_BASED_WRAP.",
        ),
        (
            "auto_wrap_policy: SIZE_BASED_WRAP",
            "cfg.yaml:1: auto_wrap_policy: SIZE_BASED_WRAP needs a size. Add min_num_params, the number of parameters "
            "above which a module is a unit.",
        ),
        (
            "min_num_params: 5",
            "cfg.yaml:1: min_num_params: has no effect without a policy. Add auto_wrap_policy: SIZE_BASED_WRAP.",
        ),
        (
            "auto_wrap_policy: NO_WRAP\nmin_num_params: 5",
            "cfg.yaml:2: min_num_params: has no effect with auto_wrap_policy: NO_WRAP. Remove the key, or write "
            "auto_wrap_policy: SIZE_BASED_WRAP.",
        ),
        (
            "transformer_layer_cls_to_wrap: Block",
            "cfg.yaml:1: transformer_layer_cls_to_wrap: has no effect without a policy. Add auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP.",
        ),
        (
            "auto_wrap_policy: SIZE_BASED_WRAP\nmin_num_params: 5\ntransformer_layer_cls_to_wrap: Block",
            "cfg.yaml:3: transformer_layer_cls_to_wrap: has no effect with auto_wrap_policy: SIZE_BASED_WRAP. Remove "
            "the key, or write auto_wrap_policy: TRANSFORMER_BASED_WRAP.",
        ),
        (
            "auto_wrap_policy: NO_WRAP\nsub_modules_to_wrap: []\nmin_num_params: 5",
            "cfg.yaml:1: auto_wrap_policy: does not go with sub_modules_to_wrap: both say what the units are. Remove "
            "one of the two keys.\n"
            "cfg.yaml:3: min_num_params: does not go with sub_modules_to_wrap: both say what the units are. Remove "
            "one of the two keys.",
        ),
        (
            "auto_wrap_policy: SIZE_BASED_WRAP\nmin_num_params: 1e8",
            "cfg.yaml:2: min_num_params: the text '1e8' is not a whole number. Write 100000000.",
        ),
        (
            "auto_wrap_policy: SIZE_BASED_WRAP\nmin_num_params: 0",
            "cfg.yaml:2: min_num_params: the number 0 would make every module a unit. Write 1 or more, or "
            "auto_wrap_policy: NO_WRAP.",
        ),
        (
            "auto_wrap_policy: SIZE_BASED_WRAP\nmin_num_params: true",
            "cfg.yaml:2: min_num_params: the boolean true is not a whole number. Write 1 or more.",
        ),
        (
            "auto_wrap_policy: TRANSFORMER_BASED_WRAP\ntransformer_layer_cls_to_wrap: 'model.layers.{*}'",
            "cfg.yaml:2: transformer_layer_cls_to_wrap: the text 'model.layers.{*}' is not the name of a class. Write "
            "the class of these modules, or list module paths in sub_modules_to_wrap.",
        ),
        (
            "auto_wrap_policy: TRANSFORMER_BASED_WRAP\ntransformer_layer_cls_to_wrap: [A, 3]",
            "cfg.yaml:2: transformer_layer_cls_to_wrap: the number 3 is not the name of a class. Write a name like "
            "LlamaDecoderLayer.",
        ),
        (
            "auto_wrap_policy: TRANSFORMER_BASED_WRAP\ntransformer_layer_cls_to_wrap: []",
            "cfg.yaml:2: transformer_layer_cls_to_wrap: the list is empty. Write class names, or remove the key to "
            "take those the model gives.",
        ),
        (
            "auto_wrap_policy: TRANSFORMER_BASED_WRAP\ntransformer_layer_cls_to_wrap: 5",
            "cfg.yaml:2: transformer_layer_cls_to_wrap: the number 5 is not a list of class names. Write "
            "[LlamaDecoderLayer].",
        ),
        (  # all together with other mistakes
            "sharding_size: 0\nauto_wrap_policy: NO_WRAP\nmin_num_params: 5",
            "cfg.yaml:1: sharding_size: the number 0 is too small. Write a number of ranks, 1 or more, or auto.\n"
            "cfg.yaml:3: min_num_params: has no effect with auto_wrap_policy: NO_WRAP. Remove the key, or write "
            "auto_wrap_policy: SIZE_BASED_WRAP.",
        ),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(lines: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cfg.yaml").write_text(f"{lines}\n")
    with pytest.raises(ConfigError) as error:
        load_config("cfg.yaml")
    assert str(error.value) == message


def test_mistakes_in_keyword_arguments() -> None:
    with pytest.raises(ConfigError) as error:
        FSDP2Config(min_num_params=5, use_reentrant="no")
    assert str(error.value) == (
        "min_num_params: has no effect without a policy. Add auto_wrap_policy: SIZE_BASED_WRAP.\n"
        "use_reentrant: the text 'no' is not a boolean. Drop the quotes: write false."
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "Blok, Atention"},
            "transformer_layer_cls_to_wrap: no module is of a class 'Blok'. Write Block or WideBlock.\n"
            "transformer_layer_cls_to_wrap: no module is of a class 'Atention'. Write Attention.",
        ),
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
            "transformer_layer_cls_to_wrap: no module is of a class 'LlamaDecoderLayer'. Write a class such as Block.",
        ),
        (  # a base class of which there is no module would wrap everything
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "Module"},
            "transformer_layer_cls_to_wrap: no module is of a class 'Module'. Write a class such as Block.",
        ),
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "model.layers"},
            "transformer_layer_cls_to_wrap: 'model.layers' is a module, not a class. Write its class ModuleList.",
        ),
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "ModuleList"},
            "transformer_layer_cls_to_wrap: ModuleList has no forward of its own. Write the class of its members.",
        ),
        (
            {**TRANSFORMER, "transformer_layer_cls_to_wrap": "CausalLM"},
            "transformer_layer_cls_to_wrap: CausalLM is the class of the model itself. Remove it: the root is always "
            "a unit.",
        ),
        (
            {**SIZE, "min_num_params": 500},
            "min_num_params: no module has more than 500 parameters; the largest part of CausalLM has 268. Write a "
            "smaller number, or auto_wrap_policy: NO_WRAP.",
        ),
        (
            {**TRANSFORMER, "overrides": [{"modules": ["model.layers.0.mlp"], "param_dtype": "fp32"}]},
            "overrides[0].modules[0]: 'model.layers.0.mlp' is not a unit, and precision, resharding and offload belong "
            "to whole units. TRANSFORMER_BASED_WRAP makes it none: list the units in sub_modules_to_wrap.",
        ),
    ],
)  # fmt: skip
def test_mistakes_that_the_model_shows(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(CausalLM(), settings)
    assert str(error.value) == message


@pytest.mark.parametrize("classes", [None, [], ["NoneOfThem"]])
def test_a_model_without_classes_of_its_own(classes: list[str] | None) -> None:
    model = CausalLM()
    model._no_split_modules = classes
    with pytest.raises(ConfigError) as error:
        plan_of(model, TRANSFORMER)
    assert str(error.value) == (
        "auto_wrap_policy: TRANSFORMER_BASED_WRAP wraps the classes that a model gives in _no_split_modules, and "
        "CausalLM gives none. Write transformer_layer_cls_to_wrap: [Block]."
    )
