"""Configuration files of public projects: they load, or are refused with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_fsdp2.config import check_supported, load_config
from mindspeed_fsdp2.errors import ConfigError
from mindspeed_fsdp2.module_path import ModulePath, ModuleTree

REAL = Path(__file__).parent / "data" / "real_configs"
BAGEL_LAYER = "mindspeed_mm.models.omni.mllms.bagel_qwen2_mot.Qwen2MoTDecoderLayer"
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": True}
NO_PREFETCH = {"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0, "offload_to_cpu": False}
PREFETCH = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1, "offload_to_cpu": False}
LOADS = {
    "qwen25vl.yaml": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": (
            "text_decoder.output_layer",
            "text_decoder.embedding",
            "text_decoder.rotary_pos_emb",
            "text_decoder.decoder.layers.{*}",
        ),
        "ignored_modules": ("image_encoder",),
        "recompute_modules": ("text_decoder.decoder.layers.{*}",),
        **MIXED,
        **NO_PREFETCH,
    },
    "internvl35.yaml": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": (
            "vision_model.embeddings",
            "vision_model.encoder.layers.{*}",
            "language_model.model.layers.{*}",
        ),
        "recompute_modules": (
            "vision_model.embeddings",
            "vision_model.encoder.layers.{*}",
            "language_model.model.layers.{*}",
        ),
        "reshard_after_forward": True,
        **MIXED,
    },
    "wan22_a14b.yaml": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": ("predictor.blocks.{*}", "predictor.head"),
        "ignored_modules": ("ae", "text_encoder"),
        "recompute_modules": ("predictor.blocks.{*}",),
        "reshard_after_forward": True,
        **MIXED,
        **NO_PREFETCH,
    },
    "magistral_lora.yaml": {
        "sharding_size": "auto",
        "sub_modules_to_wrap": (
            "language_model.embed_tokens",
            "language_model.layers.{*}",
            "vision_tower.transformer.layers.{*}",
            "multi_modal_projector.linear_1",
            "multi_modal_projector.linear_2",
            "lm_head",
        ),
        "recompute_modules": ("language_model.layers.{*}", "vision_tower.transformer.layers.{*}"),
        "use_reentrant": False,
        "reshard_after_forward": True,
        **MIXED,
        "reduce_dtype": "bf16",
        **PREFETCH,
    },
    "qwen3omni.yaml": {"sharding_size": "auto", "reshard_after_forward": True, **MIXED, **PREFETCH},
    "qwen3vl.yaml": {
        "sharding_size": "auto",
        "reshard_after_forward": True,
        **MIXED,
        **PREFETCH,
        "align_fsdp_param_groups": True,
        "expert_parallel_size": 1,
        "reshard_local_experts": True,
        "moe_modules": ("model.language_model.layers.{*}.mlp.experts",),
    },
    "bagel.yaml": {
        "sharding_size": 8,
        "sub_modules_to_wrap": (BAGEL_LAYER,),
        "recompute_modules": (BAGEL_LAYER,),
        "reshard_after_forward": True,
        **MIXED,
        "reduce_dtype": "bf16",
    },
    "mindspeed_gpt.yaml": {"reshard_after_forward": False, **MIXED, "output_dtype": "bf16"},
}
NOTICES = {
    "qwen3vl.yaml": (
        "{path}:18: moe_modules: accepted but not applied: units are grouped as sub_modules_to_wrap says.",
    ),
    "mindspeed_gpt.yaml": (
        "{path}: sharding_size: absent, so it is 1, as MindSpeed-MM documents it: nothing is sharded, every rank keeps the "
        "whole model as in plain data parallel. Write auto to shard over the whole data-parallel group, which is what an "
        "absent key means to MindSpeed itself.",
    ),
}
NATIVE = """\
{path}:2: parallel: this file follows the format of MindSpeed's native FSDP, not this project's. Write a file with these lines:
    sharding_size: auto  # parallel.fully_shard_parallel_size
    sub_modules_to_wrap:  # parallel.fsdp_plan.apply_modules
      - model.visual
      - model.visual.blocks.{{*}}
      - model.language_model.embed_tokens
      - model.language_model
      - model.language_model.layers.{{*}}
      - lm_head
      - mtp
    recompute_modules:  # features.recompute_plan.apply_modules
      - model.visual.blocks.{{*}}
      - model.language_model.layers.{{*}}
    use_reentrant: false  # the default there
    param_dtype: bf16  # parallel.fsdp_plan.param_dtype
    reduce_dtype: fp32  # parallel.fsdp_plan.reduce_dtype
    num_to_forward_prefetch: 1  # parallel.fsdp_plan.num_to_forward_prefetch
    num_to_backward_prefetch: 1  # parallel.fsdp_plan.num_to_backward_prefetch
    # without a counterpart here: parallel.ulysses_parallel_size"""
ACCELERATE = (
    "this file follows the format of Hugging Face's Accelerate or Transformers, not this project's. "
    "Translate it: mindspeed-fsdp2 convert {path} -o converted.yaml."
)
REFUSED = {
    "native_qwen3_5.yaml": NATIVE,
    "hf/accelerate_template.yaml": "{path}:2: distributed_type: " + ACCELERATE,
    "hf/accelerate_slurm.yaml": "{path}:1: distributed_type: " + ACCELERATE,
    "hf/accelerate_tp.yaml": "{path}:4: compute_environment: " + ACCELERATE,
}
MODULES = {
    "qwen25vl.yaml": ["text_decoder.output_layer", "text_decoder.embedding", "text_decoder.rotary_pos_emb"]
    + [f"text_decoder.decoder.layers.{i}" for i in range(2)]
    + ["image_encoder"],
    "internvl35.yaml": ["vision_model.embeddings"]
    + [f"vision_model.encoder.layers.{i}" for i in range(2)]
    + [f"language_model.model.layers.{i}" for i in range(3)],
    "wan22_a14b.yaml": ["predictor.blocks.0", "predictor.blocks.1", "predictor.head", "ae", "text_encoder"],
    "magistral_lora.yaml": [
        "language_model.embed_tokens",
        "language_model.layers.0",
        "vision_tower.transformer.layers.0",
    ]
    + ["multi_modal_projector.linear_1", "multi_modal_projector.linear_2", "lm_head"],
    "qwen3vl.yaml": ["model.language_model.layers.0.mlp.experts", "model.language_model.layers.1.mlp.experts"],
}


def test_every_file_has_an_expectation() -> None:
    files = {str(path.relative_to(REAL)) for path in REAL.rglob("*.yaml")}
    assert files == {*LOADS, *REFUSED}


@pytest.mark.parametrize("name", sorted(LOADS))
def test_loads_with_exactly_the_values_written(name: str) -> None:
    path = str(REAL / name)
    config = load_config(path)
    check_supported(config)
    assert config.model_dump(include=config.model_fields_set) == LOADS[name]
    assert config.notices == tuple(notice.format(path=path) for notice in NOTICES.get(name, ()))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_paths_select_every_named_module(name: str) -> None:
    modules = MODULES[name]
    parents = {fqn.rsplit(".", depth)[0] for fqn in modules for depth in range(1, fqn.count(".") + 1)}
    tree = ModuleTree(sorted({*modules, *parents}))
    config = load_config(REAL / name)
    paths = [path for path in (*(config.sub_modules_to_wrap or ()), *config.ignored_modules, *config.moe_modules)]
    assert all(isinstance(path, str) for path in paths)
    selected = [fqn for path in paths for fqn in ModulePath.parse(str(path)).select(tree)]
    assert sorted(selected) == sorted(modules)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_what_to_do(name: str) -> None:
    path = str(REAL / name)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == REFUSED[name].format(path=path)


def test_native_values_survive_the_translation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(REAL / "native_qwen3_5.yaml")
    translated = tmp_path / "translated.yaml"
    translated.write_text(str(error.value).partition("\n")[2])
    config = load_config(translated)
    assert config.recompute_modules == ("model.visual.blocks.{*}", "model.language_model.layers.{*}")
    assert config.use_reentrant is False
    assert (config.param_dtype, config.reduce_dtype, config.num_to_backward_prefetch) == ("bf16", "fp32", 1)
