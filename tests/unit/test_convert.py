"""Configurations of Transformers and Accelerate: every key is mapped, noted or refused, and the result loads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2 import ConfigError, FSDP2Config, load_config
from mindspeed_fsdp2.cli import main
from mindspeed_fsdp2.config.hf_convert import Conversion, convert_hf
from tests.unit.test_wrap_policy import CausalLM

REAL = Path(__file__).parent / "data" / "real_configs" / "hf"
TRANSFORMERS = {"sharding_size": "auto", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
NO_PRECISION = (
    "mixed_precision: not said in this source, so dtypes stay as loaded. With bf16=True in the Trainer convert with "
    "--mixed-precision bf16."
)
BACKWARD = (
    "belongs to FSDP version 1 and has no counterpart: FSDP2 gathers one unit ahead in the backward by itself, and "
    "num_to_backward_prefetch sets how many."
)
FORWARD = (
    "belongs to FSDP version 1 and has no counterpart: FSDP2 lets the host run ahead instead; "
    "num_to_forward_prefetch: 1 gathers one unit ahead."
)
ORIGINAL = "belongs to FSDP version 1 and has no counterpart: FSDP2 always keeps the original parameters."
SYNC = "belongs to FSDP version 1 and has no counterpart: load the same weights on every rank before wrap_model."
LIMIT = "belongs to FSDP version 1 and has no counterpart: FSDP2 always limits them."
LOADING = (
    "is about loading and no setting of this file. Build the model in meta_init(), wrap it, then let "
    "load_full_state_dict read the weights on one rank."
)
FULL = "FULL_STATE_DICT is about checkpoints and no setting of this file; export_hf(model, directory) writes whole weights."
SHARDED = (
    "SHARDED_STATE_DICT is about checkpoints and no setting of this file; save_checkpoint always saves shards; under "
    "Megatron write --ckpt-format torch_dcp."
)
OFFLOAD = "on an accelerator the process group needs a backend for CPU tensors: npu:hccl,cpu:gloo."
CONVERTED = "1 was converted to FSDP2, as accelerate to-fsdp2 does."
IS_VERSION_1 = "absent, which is 1 there. It was converted to FSDP2, as accelerate to-fsdp2 does."
ABSENT_POLICY = "absent, which is NO_WRAP there: the whole model is one unit, which saves little memory."
DROPS = "unknown key, which Hugging Face drops without a word. "
SIZE = "Remove it, and write sharding_size in the converted file."
MEGATRON = "Remove it; the sizes of other kinds of parallelism are set where these are, e.g. by Megatron's flags."
TPU = "is for TPUs, which this project does not train on. Remove the key."


def reduced(precision: str) -> str:
    return (
        f"gradients are reduced in {precision}, as there; reduce_dtype: fp32 in the converted file sums more exactly. "
        "Load the model in float32: there trainable weights are upcast, here they keep the loaded dtype."
    )


def dtypes(precision: str) -> dict[str, str]:
    return dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), precision)


def converted(source: Any, **options: Any) -> Conversion:
    conversion = convert_hf(source, **options)
    config = load_config(conversion.settings)  # whatever comes out is a configuration
    assert config.model_fields_set == conversion.settings.keys()
    return conversion


def problems(source: Any, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        convert_hf(source, **options)
    return str(error.value).split("\n")


def accelerate(fsdp: dict[str, Any] | None, **top: Any) -> dict[str, Any]:
    named = {f"fsdp_{key}": value for key, value in (fsdp or {}).items()}
    wrap = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {"distributed_type": "FSDP", **top, **({} if fsdp is None else {"fsdp_config": {**wrap, **named}})}


# fsdp_config of Transformers


@pytest.mark.parametrize(
    ("source", "settings", "notes"),
    [
        ({}, {}, []),
        ({"version": 2}, {}, []),
        ({"version": "2"}, {}, []),
        ({"version": 1}, {"reshard_after_forward": True}, [f"version: {CONVERTED}"]),
        ({"reshard_after_forward": True}, {"reshard_after_forward": True}, []),
        ({"reshard_after_forward": "false"}, {"reshard_after_forward": False}, []),
        ({"fsdp_reshard_after_forward": False}, {"reshard_after_forward": False}, []),
        ({"reshard_after_forward": None}, {}, []),
        ({"cpu_offload": True}, {"offload_to_cpu": True}, [f"cpu_offload: {OFFLOAD}"]),
        ({"cpu_offload": False}, {}, []),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}, []),
        ({"transformer_layer_cls_to_wrap": "A, B"}, {"transformer_layer_cls_to_wrap": ["A", "B"]}, []),
        ({"transformer_layer_cls_to_wrap": ["A,B", "C"]}, {"transformer_layer_cls_to_wrap": ["A", "B", "C"]}, []),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5},
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5},
            [],
        ),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP"},
            {"auto_wrap_policy": "NO_WRAP"},
            ["min_num_params: 0 wraps nothing there but the root, so it became NO_WRAP."],
        ),
        (
            {"auto_wrap_policy": "NO_WRAP", "min_num_params": 5, "transformer_layer_cls_to_wrap": "A"},
            {"auto_wrap_policy": "NO_WRAP"},
            [
                "min_num_params: has no effect with NO_WRAP, there as here.",
                "transformer_layer_cls_to_wrap: has no effect with NO_WRAP, there as here.",
                "auto_wrap_policy: the whole model is one unit, which saves little memory.",
            ],
        ),
        ({"min_num_params": 0}, {}, []),
        (
            {"activation_checkpointing": "true", "transformer_layer_cls_to_wrap": ["A", "B"]},
            {
                "transformer_layer_cls_to_wrap": ["A", "B"],
                "recompute_modules": ["A", "B"],
                "use_reentrant": False,
            },
            [],
        ),
        ({"activation_checkpointing": False}, {}, []),
        ({"state_dict_type": "FULL_STATE_DICT"}, {}, [f"state_dict_type: {FULL}"]),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, {}, [f"state_dict_type: {SHARDED}"]),
        ({"cpu_ram_efficient_loading": True}, {}, [f"cpu_ram_efficient_loading: {LOADING}"]),
        ({"cpu_ram_efficient_loading": False}, {}, []),
        ({"xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False, "xla_fsdp_settings": {}}, {}, []),
        (
            {
                "backward_prefetch": "BACKWARD_PRE",
                "forward_prefetch": "false",
                "use_orig_params": True,
                "sync_module_states": True,
                "limit_all_gathers": True,
            },
            {},
            [
                f"backward_prefetch: {BACKWARD}",
                f"forward_prefetch: {FORWARD}",
                f"use_orig_params: {ORIGINAL}",
                f"sync_module_states: {SYNC}",
                f"limit_all_gathers: {LIMIT}",
            ],
        ),
    ],
)  # fmt: skip
def test_every_key_of_transformers(source: dict[str, Any], settings: dict[str, Any], notes: list[str]) -> None:
    conversion = converted(source)
    assert conversion.settings == {**TRANSFORMERS, **settings}
    assert conversion.notes == (*notes, NO_PRECISION)
    assert conversion.title == f"fsdp_config, FSDP version {source.get('version', 2)}"


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("full_shard", True), ("FULL_SHARD", True), ("1", True), ("shard_grad_op", False)]
)
def test_strategies_of_version_1(strategy: str, reshard: bool) -> None:
    settings = converted({"version": 1, "reshard_after_forward": strategy}).settings
    assert settings == {**TRANSFORMERS, "reshard_after_forward": reshard}


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ({"version": 3}, ["version: the number 3 is no version of FSDP. Write 2."]),
        (
            {"reshard_after_forward": 4},
            [
                "reshard_after_forward: the number 4 is not a boolean, and Hugging Face takes no number of ranks. Write "
                "true here and reshard_after_forward: 4 in the converted file."
            ],
        ),
        (
            {"reshard_after_forward": "shard_grad_op"},
            ["reshard_after_forward: the text 'shard_grad_op' belongs to version 1. Write false."],
        ),
        (
            {"reshard_after_forward": "maybe"},
            ["reshard_after_forward: the text 'maybe' is not a boolean. Write true or false."],
        ),
        (
            {"cpu_offload": "false"},
            ["cpu_offload: the text 'false' counts as true there, as any text does. Without quotes, write false."],
        ),
        ({"cpu_offload": {"offload_params": True}}, [
            "cpu_offload: the mapping {'offload_params': True} is not a boolean. Write true or false."
        ]),
        (
            {"auto_wrap_policy": "transformer_based_wrap"},
            [
                "auto_wrap_policy: the text 'transformer_based_wrap' is refused by Transformers, which wants capitals. "
                "Write TRANSFORMER_BASED_WRAP."
            ],
        ),
        (
            {"auto_wrap_policy": "SIZE_WRAP"},
            [
                "auto_wrap_policy: the text 'SIZE_WRAP' is not one of TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, "
                "NO_WRAP. Write SIZE_BASED_WRAP."
            ],
        ),
        (
            {"transformer_layer_cls_to_wrap": ["model.layers.{*}"]},
            [
                "transformer_layer_cls_to_wrap: the text 'model.layers.{*}' is not the name of a class. Write the class "
                "of these modules, or list module paths in sub_modules_to_wrap."
            ],
        ),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": -1},
            ["min_num_params: the number -1 is not a whole number of 0 or more. Write a number."],
        ),
        (
            {"activation_checkpointing": True},
            [
                "activation_checkpointing: recomputes the layers, and nothing says which class these are: the model "
                "was not given. Write transformer_layer_cls_to_wrap, or convert with --model."
            ],
        ),
        (
            {"activation_checkpointing": True, "auto_wrap_policy": "NO_WRAP"},
            [
                "activation_checkpointing: recomputes what auto_wrap_policy wraps, and NO_WRAP wraps nothing. Write "
                "TRANSFORMER_BASED_WRAP."
            ],
        ),
        (
            {"activation_checkpointing": True, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5},
            [
                "activation_checkpointing: recomputes what auto_wrap_policy wraps, and SIZE_BASED_WRAP wraps modules "
                "inside others, each recomputed in the other. Write TRANSFORMER_BASED_WRAP."
            ],
        ),
        (
            {"state_dict_type": "local_state_dict"},
            ["state_dict_type: LOCAL_STATE_DICT is refused by FSDP2. Write SHARDED_STATE_DICT."],
        ),
        (
            {"state_dict_type": "SHARDED"},
            [
                "state_dict_type: the text 'SHARDED' is not one of FULL_STATE_DICT, SHARDED_STATE_DICT, "
                "LOCAL_STATE_DICT. Write FULL_STATE_DICT."
            ],
        ),
        ({"xla": True, "xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, [
            f"xla: {TPU}", f"xla_fsdp_settings: {TPU}"
        ]),
        ({"xla_fsdp_v2": True}, [f"xla_fsdp_v2: {TPU}"]),
        ({"xla_fsdp_grad_ckpt": True}, [f"xla_fsdp_grad_ckpt: {TPU}"]),
        ({"version": 1, "reshard_after_forward": "no_shard"}, [
            "reshard_after_forward: NO_SHARD shards nothing, and Hugging Face's FSDP2 has nothing like it. Write "
            "FULL_SHARD or SHARD_GRAD_OP; for plain data parallel write a file with sharding_size: 1 instead."
        ]),
        ({"version": 1, "reshard_after_forward": "hybrid_shard"}, [
            "reshard_after_forward: HYBRID_SHARD shards over the ranks of one node, and nothing says how many these "
            "are. Write num_processes and num_machines in an Accelerate file, or write FULL_SHARD and set sharding_size "
            "in the converted file."
        ]),
        # what Transformers drops without a word
        ({"fsdp_size": 4}, [f"fsdp_size: {DROPS}{SIZE}"]),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, [
            f"dp_shard_size: {DROPS}{SIZE}", f"dp_replicate_size: {DROPS}{SIZE}"
        ]),
        ({"tp_size": 2, "ep_size": 2}, [f"tp_size: {DROPS}{MEGATRON}", f"ep_size: {DROPS}{MEGATRON}"]),
        ({"mixed_precision": "bf16"}, [
            f"mixed_precision: {DROPS}Write it at the top level of an Accelerate file, or convert with "
            "--mixed-precision."
        ]),
        ({"ignored_modules": "a"}, [
            f"ignored_modules: {DROPS}Only Accelerate reads it. Remove it, and write ignored_modules in the converted "
            "file."
        ]),
        ({"offload_params": True}, [
            f"offload_params: {DROPS}That is Accelerate's name, Transformers reads cpu_offload. Write cpu_offload."
        ]),
        ({"activation_checkpointing_offload": True}, [
            f"activation_checkpointing_offload: {DROPS}Only Accelerate reads it. Remove it."
        ]),
        ({"sharding_strategy": "FULL_SHARD"}, [
            f"sharding_strategy: {DROPS}Only Accelerate reads it. Write reshard_after_forward."
        ]),
        ({"state_dict_typ": 1}, [f"state_dict_typ: {DROPS}Write state_dict_type."]),
        ({"fsdp_state-dict-type": 1}, [f"fsdp_state-dict-type: {DROPS}Write fsdp_state_dict_type."]),
        ({"bogus": 1}, [
            f"bogus: {DROPS}Remove it; the keys are version, reshard_after_forward, auto_wrap_policy, "
            "transformer_layer_cls_to_wrap, min_num_params, activation_checkpointing, state_dict_type, "
            "cpu_ram_efficient_loading, cpu_offload."
        ]),
        ({"version": 2, "fsdp_version": 1}, ["version: is given again as fsdp_version. Keep one of the two."]),
        ({"cpu_offload": "no", "bogu_offload": 1, 3: 4}, ["the key 3 is not text. Write the name of a setting."]),
        # all together
        ({"versio": 2, "cpu_offload": "no", "xla": True}, [
            "cpu_offload: the text 'no' counts as true there, as any text does. Without quotes, write false.",
            f"xla: {TPU}",
            f"versio: {DROPS}Write version.",
        ]),
    ],
)  # fmt: skip
def test_what_transformers_cannot_mean(source: dict[str, Any], messages: list[str]) -> None:
    assert problems(source) == messages


# Mixed precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_that_was_asked_for(precision: str) -> None:
    conversion = converted({}, mixed_precision=precision)
    assert conversion.settings == {**TRANSFORMERS, **dtypes(precision)}
    scaler = "mixed_precision: fp16 needs a gradient scaler in your trainer, and Megatron refuses it with FSDP2."
    more = (scaler,) if precision == "fp16" else ()
    assert conversion.notes == (f"mixed_precision: {reduced(precision)}", *more)


def test_no_precision_needs_no_word() -> None:
    assert converted({}, mixed_precision="no").notes == ()
    assert converted(accelerate({}, mixed_precision=False)).notes == ()  # YAML reads an unquoted no so
    assert converted(accelerate({})).notes == ()


def test_precision_twice() -> None:
    assert problems(accelerate({}, mixed_precision="bf16"), mixed_precision="fp16") == [
        "mixed_precision: is bf16, and fp16 was asked for. Make them equal, or ask for nothing."
    ]
    assert problems({}, mixed_precision="bf61") == [
        "mixed_precision: the text 'bf61' is not one of no, fp16, bf16, fp8. Write no."
    ]
    assert problems(accelerate({}, mixed_precision="fp8")) == ["mixed_precision: fp8 is not supported. Write bf16."]


# Arguments of the Trainer


@pytest.mark.parametrize(
    ("arguments", "settings", "notes"),
    [
        ({"fsdp": True}, {}, []),
        ({"fsdp": True, "fsdp_config": {}}, {}, []),
        ({"fsdp": "full_shard auto_wrap"}, {"reshard_after_forward": True}, []),
        ({"fsdp": ["shard_grad_op"], "fsdp_config": {}}, {"reshard_after_forward": False}, []),
        (  # fsdp_config wins there
            {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}},
            {"reshard_after_forward": True},
            [],
        ),
        ({"fsdp": "offload"}, {"offload_to_cpu": True}, [f"fsdp_config.cpu_offload: {OFFLOAD}"]),
        ({"fsdp": "offload", "fsdp_config": {"cpu_offload": False}}, {}, []),
        ({"fsdp": True, "bf16": True}, dtypes("bf16"), [f"bf16: {reduced('bf16')}"]),
        ({"fsdp": True, "bf16": False, "fp16": False}, {}, []),
        (
            {"fsdp": True, "gradient_checkpointing": True},
            {},
            [
                "gradient_checkpointing: is the model's own and no setting of this file. Write "
                "activation_checkpointing: true in fsdp_config instead, and convert again, or switch it on in your "
                "trainer."
            ],
        ),
        (
            {"fsdp": True, "output_dir": "x", "enable_jit_checkpoint": True, "bf16_full_eval": True, "deepspeed": None},
            {},
            [
                "output_dir: not about sharding, left to your trainer: output_dir, enable_jit_checkpoint, bf16_full_eval."
            ],
        ),
    ],
)  # fmt: skip
def test_arguments_of_the_trainer(arguments: dict[str, Any], settings: dict[str, Any], notes: list[str]) -> None:
    conversion = converted(arguments)
    assert conversion.settings == {**TRANSFORMERS, **settings}
    assert list(conversion.notes) == notes
    assert conversion.title == "TrainingArguments, FSDP version 2"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            {"fsdp_config": {"version": 2}, "learning_rate": 1e-5},
            ["fsdp: is absent, so Transformers ignores fsdp_config without a word. Write fsdp: true."],
        ),
        (
            {"fsdp": False, "fsdp_config": {"version": 2}},
            ["fsdp: is off, so Transformers ignores fsdp_config without a word. Write fsdp: true."],
        ),
        ({"fsdp": ""}, ["fsdp: is off, so Transformers ignores fsdp_config without a word. Write fsdp: true."]),
        ({"fsdp": "full_shard hybrid_shard"}, [
            "fsdp: names full_shard and hybrid_shard. Keep one of them."
        ]),
        ({"fsdp": "hybrid_shard"}, [
            "fsdp: hybrid_shard belongs to FSDP version 1. Write fsdp: true and set sharding_size in the result."
        ]),
        ({"fsdp": "full_shrd"}, [
            "fsdp: 'full_shrd' is not one of full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2, no_shard, "
            "offload, auto_wrap. Write full_shard.",
        ]),
        ({"fsdp": True, "fsdp_config": 3}, [
            "fsdp_config: the number 3 is no mapping. Write a mapping, or the path of a JSON file."
        ]),
        ({"fsdp": True, "bf16": True, "fp16": True}, ["fp16: is true, and so is bf16. Keep one of them."]),
        (
            {
                "fsdp": True,
                "fsdp_config": {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "A"},
                "gradient_checkpointing": True,
            },
            [
                "gradient_checkpointing: recomputes a second time what activation_checkpointing in fsdp_config does, "
                "which Transformers refuses. Remove one of the two."
            ],
        ),
        ({"fsdp": True, "deepspeed": "ds.json"}, ["deepspeed: sets up DeepSpeed beside FSDP. Remove it."]),
        ({"fsdp": True, "parallelism_config": {"tp_size": 2}}, [
            "parallelism_config: is an object of the Python API. Remove it, and write sharding_size in the converted "
            "file."
        ]),
        ({"fsdp": True, "fsdp_min_num_params": 5, "fsdp_transformer_layer_cls_to_wrap": "A"}, [
            "fsdp_min_num_params: is no argument of Transformers any more. Write min_num_params in fsdp_config.",
            "fsdp_transformer_layer_cls_to_wrap: is no argument of Transformers any more. Write "
            "transformer_layer_cls_to_wrap in fsdp_config.",
        ]),
        ({"fsdp": True, "fsdp_confg": {}, "fsdp_x": 1, "bf_16": True}, [
            "fsdp_confg: unknown argument. Write fsdp_config.",
            "fsdp_x: unknown argument. Write fsdp.",
            "bf_16: unknown argument. Write bf16.",
        ]),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], messages: list[str]) -> None:
    assert problems(arguments) == messages


def test_fsdp_config_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fsdp.json").write_text('{"fsdp_version": 2, "reshard_after_forward": false, "xla": true, "bogu": 1}')
    (tmp_path / "args.yaml").write_text("fsdp: true\nfsdp_config: fsdp.json\nfp16: true\nbf16: true\n")
    inner = tmp_path / "fsdp.json"
    assert problems(str(tmp_path / "args.yaml"))[:2] == [
        f"{tmp_path / 'args.yaml'}:3: fp16: is true, and so is bf16. Keep one of them.",
        f"{inner}: xla: {TPU}",
    ]
    monkeypatch.chdir(tmp_path)
    inner.write_text('{"fsdp_version": 2, "reshard_after_forward": false}')
    Path("args.yaml").write_text("fsdp: true\nfsdp_config: fsdp.json\n")
    assert converted("args.yaml").settings == {**TRANSFORMERS, "reshard_after_forward": False}
    Path("args.yaml").write_text("fsdp: true\nfsdp_config: fsdp.jsn\n")
    assert problems("args.yaml") == ["fsdp.jsn: there is no such file. Write fsdp.json."]


# Accelerate


@pytest.mark.parametrize(
    ("fsdp", "settings", "notes"),
    [
        ({}, {}, []),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}, []),
        ({"offload_params": "true"}, {"offload_to_cpu": True}, [f"fsdp_config.fsdp_offload_params: {OFFLOAD}"]),
        ({"offload_params": "false"}, {}, []),
        ({"auto_wrap_policy": "no_wrap"}, {"auto_wrap_policy": "NO_WRAP"}, [
            "fsdp_config.fsdp_auto_wrap_policy: the whole model is one unit, which saves little memory."
        ]),
        ({"auto_wrap_policy": None}, {"auto_wrap_policy": "NO_WRAP"}, [
            f"fsdp_config.fsdp_auto_wrap_policy: {ABSENT_POLICY}"
        ]),
        ({"transformer_layer_cls_to_wrap": "A,B"}, {"transformer_layer_cls_to_wrap": ["A", "B"]}, []),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, {
            "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100_000_000
        }, []),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1e6"}, {
            "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1_000_000
        }, []),
        ({"min_num_params": 5}, {}, [
            "fsdp_config.fsdp_min_num_params: has no effect with TRANSFORMER_BASED_WRAP, there as here."
        ]),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, {}, [f"fsdp_config.fsdp_state_dict_type: {SHARDED}"]),
        ({"cpu_ram_efficient_loading": True}, {}, [f"fsdp_config.fsdp_cpu_ram_efficient_loading: {LOADING}"]),
        (
            {
                "activation_checkpointing": True,
                "activation_checkpointing_offload": True,
                "transformer_layer_cls_to_wrap": "A",
            },
            {"transformer_layer_cls_to_wrap": ["A"], "recompute_modules": ["A"], "use_reentrant": False},
            [
                "fsdp_config.fsdp_activation_checkpointing_offload: has no counterpart: what recomputation keeps stays "
                "on the device, which takes more memory."
            ],
        ),
        ({"ignored_modules": "model.tower|model.other"}, {"ignored_modules": ["model.tower", "model.other"]}, []),
        ({"sharding_strategy": "FULL_SHARD"}, {}, [
            "fsdp_config.fsdp_sharding_strategy: ignored under version 2, there as here; reshard_after_forward decides."
        ]),
        ({"sharding_strategy": 2, "reshard_after_forward": True}, {"reshard_after_forward": True}, [
            "fsdp_config.fsdp_sharding_strategy: ignored under version 2, there as here; reshard_after_forward decides."
        ]),
        (
            {
                "backward_prefetch": "BACKWARD_PRE",
                "backward_prefetch_policy": "BACKWARD_POST",
                "forward_prefetch": True,
                "use_orig_params": False,
                "sync_module_states": "false",
            },
            {},
            [
                f"fsdp_config.fsdp_backward_prefetch: {BACKWARD}",
                f"fsdp_config.fsdp_backward_prefetch_policy: {BACKWARD}",
                f"fsdp_config.fsdp_forward_prefetch: {FORWARD}",
                f"fsdp_config.fsdp_use_orig_params: {ORIGINAL}",
                f"fsdp_config.fsdp_sync_module_states: {SYNC}",
            ],
        ),
    ],
)  # fmt: skip
def test_every_key_of_accelerate(fsdp: dict[str, Any], settings: dict[str, Any], notes: list[str]) -> None:
    conversion = converted(accelerate(fsdp))
    assert conversion.settings == {**TRANSFORMERS, **settings}
    assert list(conversion.notes) == notes
    assert conversion.title == "Accelerate, FSDP version 2"


def test_accelerate_without_a_version_is_version_1() -> None:
    conversion = converted({"distributed_type": "FSDP", "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}})
    assert conversion.settings == {**TRANSFORMERS, "reshard_after_forward": True}
    assert conversion.notes == (f"fsdp_config.fsdp_version: {IS_VERSION_1}",)


@pytest.mark.parametrize(
    ("fsdp", "top", "size", "reshard"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {}, "auto", False),
        ({"sharding_strategy": "2"}, {}, "auto", False),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"num_processes": 16, "num_machines": 2}, 8, True),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, {"num_processes": 16, "num_machines": 2}, 8, False),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, {}, "auto", True),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, {}, "auto", False),
    ],
)
def test_strategies_of_accelerate(fsdp: dict[str, Any], top: dict[str, Any], size: Any, reshard: bool) -> None:
    conversion = converted(accelerate({"version": 1, **fsdp}, **top))
    assert conversion.settings == {**TRANSFORMERS, "sharding_size": size, "reshard_after_forward": reshard}
    assert conversion.notes == (f"fsdp_config.fsdp_version: {CONVERTED}",)


SHAPE = "parallelism_config.parallelism_config_"


@pytest.mark.parametrize(
    ("shape", "size", "notes"),
    [
        ({"dp_shard_size": 8}, 8, []),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, 4, []),
        ({"dp_shard_size": 8, "tp_size": 1, "cp_size": 1, "sp_size": 1}, 8, []),
        ({"dp_shard_size": 8, "cp_comm_strategy": "alltoall", "cp_backend": "torch", "sp_backend": "deepspeed"}, 8, [
            f"{SHAPE}cp_backend: has no effect at cp_size 1, there as here.",
            f"{SHAPE}cp_comm_strategy: has no effect at cp_size 1, there as here.",
            f"{SHAPE}sp_backend: has no effect at sp_size 1, there as here.",
        ]),
        ({"dp_shard_size": 8, "sp_seq_length": 8, "sp_seq_length_is_variable": True, "sp_attn_implementation": "sdpa"},
         8, [
            f"{SHAPE}sp_seq_length: has no effect at sp_size 1, there as here.",
            f"{SHAPE}sp_seq_length_is_variable: has no effect at sp_size 1, there as here.",
            f"{SHAPE}sp_attn_implementation: has no effect at sp_size 1, there as here.",
        ]),
    ],
)  # fmt: skip
def test_parallelism_config(shape: dict[str, Any], size: int, notes: list[str]) -> None:
    named = {f"parallelism_config_{key}": value for key, value in shape.items()}
    conversion = converted(accelerate({}, num_processes=8, parallelism_config=named))
    assert conversion.settings == {**TRANSFORMERS, "sharding_size": size}
    assert list(conversion.notes) == notes
    assert conversion.sources["sharding_size"] == f"{SHAPE}dp_shard_size"


@pytest.mark.parametrize(
    ("shape", "messages"),
    [
        ({"dp_shard_size": 8}, [
            "parallelism_config.dp_shard_size: lacks its prefix, so Accelerate drops it without a word. Write "
            "parallelism_config_dp_shard_size."
        ]),
        ({"parallelism_config_dp_replicate_size": 8}, [
            f"{SHAPE}dp_shard_size: absent, so it is 1: nothing would be sharded, which Accelerate's FSDP2 refuses. "
            "Write the number of ranks that share one copy."
        ]),
        ({"parallelism_config_dp_shard_size": 1}, [
            f"{SHAPE}dp_shard_size: 1: nothing would be sharded, which Accelerate's FSDP2 refuses. Write the number of "
            "ranks that share one copy."
        ]),
        ({"parallelism_config_dp_shard_size": 4}, [
            f"{SHAPE}dp_shard_size: 1 copies times 4 shards are 4 ranks, and num_processes is 8. Make them equal."
        ]),
        ({"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}, [
            f"{SHAPE}tp_size: tensor parallelism is Megatron's (--tensor-model-parallel-size), and 2 cannot be "
            "converted. Write 1 or remove it.",
            f"{SHAPE}cp_size: context parallelism is Megatron's (--context-parallel-size), and 2 cannot be converted. "
            "Write 1 or remove it.",
        ]),
        ({"parallelism_config_dp_shard_size": 4, "parallelism_config_sp_size": 2}, [
            f"{SHAPE}sp_size: sequence parallelism of this kind is not supported, and 2 cannot be converted. Write 1 "
            "or remove it."
        ]),
        ({"parallelism_config_dp_shrd_size": 8, "parallelism_config_dp_shard_size": 8}, [
            f"{SHAPE}dp_shrd_size: {DROPS}Write parallelism_config_dp_shard_size."
        ]),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be_meant(shape: dict[str, Any], messages: list[str]) -> None:
    assert problems(accelerate({}, num_processes=8, parallelism_config=shape)) == messages


def test_launcher_keys_need_no_word() -> None:
    launcher = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "num_machines": 1, "gpu_ids": "all",
        "num_processes": -1, "main_process_ip": "h", "main_process_port": 1, "rdzv_backend": "static",
        "same_network": True, "main_training_function": "main", "enable_cpu_affinity": False, "downcast_bf16": "no",
        "tpu_name": "x", "tpu_zone": "x", "tpu_use_cluster": False, "tpu_use_sudo": False, "tpu_vm": [], "tpu_env": [],
        "command_file": "x", "commands": [], "mpirun_config": {}, "use_cpu": False, "dynamo_config": {},
        "fp8_config": {}, "deepspeed_config": {}, "megatron_lm_config": {}, "parallelism_config": {},
    }  # fmt: skip
    conversion = converted(accelerate({}, **launcher))
    assert (conversion.settings, conversion.notes) == (TRANSFORMERS, ())


def test_other_top_level_keys_of_accelerate() -> None:
    conversion = converted(
        accelerate({}, use_cpu=True, dynamo_config={"dynamo_backend": "INDUCTOR"}, fp8_config={"a": 1})
    )
    assert conversion.settings == TRANSFORMERS
    assert conversion.notes == (
        "use_cpu: Accelerate trains on CPU with plain data parallel; here the model is sharded there too.",
        "fp8_config: fp8 is not supported and was left out.",
        "dynamo_config: compiling is left to your trainer and was left out.",
    )


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (accelerate(None), [
            "fsdp_config: is absent, so there is nothing to convert. Make a file with accelerate config."
        ]),
        (accelerate(None, fsdp_config={}), [
            "fsdp_config: is empty, so there is nothing to convert. Make a file with accelerate config."
        ]),
        ({**accelerate({}), "distributed_type": "MULTI_GPU"}, [
            "distributed_type: is MULTI_GPU, not FSDP, so there is nothing to convert. Make a file with accelerate "
            "config, for FSDP."
        ]),
        (accelerate({}, compute_environment="AMAZON_SAGEMAKER"), [
            "compute_environment: the text 'AMAZON_SAGEMAKER' is not supported. Write LOCAL_MACHINE."
        ]),
        (accelerate({}, deepspeed_config={"a": 1}, megatron_lm_config={"a": 1}), [
            "deepspeed_config: sets up DeepSpeed beside FSDP. Remove it.",
            "megatron_lm_config: sets up Accelerate's Megatron-LM beside FSDP. Remove it.",
        ]),
        (accelerate({}, num_proceses=3, fp16=True, dynamo_backend="NO"), [
            "num_proceses: unknown key, which Accelerate refuses. Write num_processes.",
            "fp16: unknown key, which Accelerate refuses. Write mixed_precision: fp16.",
            "dynamo_backend: unknown key, which Accelerate refuses. Remove it.",
        ]),
        (accelerate({"offload_parms": True, "cpu_offload": True}), [
            f"fsdp_config.fsdp_offload_parms: {DROPS}Write fsdp_offload_params.",
            f"fsdp_config.fsdp_cpu_offload: {DROPS}That is Transformers' name, Accelerate reads fsdp_offload_params. "
            "Write that.",
        ]),
        (accelerate({"version": 1}, parallelism_config={"parallelism_config_dp_shard_size": 8}), [
            "parallelism_config: is refused by Accelerate under FSDP version 1. Write fsdp_version: 2 in fsdp_config."
        ]),
        (accelerate({"version": 1, "sharding_strategy": "HYBRID_SHARD"}), [
            "fsdp_config.fsdp_sharding_strategy: HYBRID_SHARD shards over the ranks of one node, and nothing says how "
            "many these are. Write num_processes and num_machines in an Accelerate file, or write FULL_SHARD and set "
            "sharding_size in the converted file."
        ]),
        (accelerate({"version": 1, "sharding_strategy": 1, "reshard_after_forward": False}), [
            "fsdp_config.fsdp_reshard_after_forward: says SHARD_GRAD_OP, and sharding_strategy says FULL_SHARD. Keep "
            "one of the two keys."
        ]),
        (accelerate({"sharding_strategy": "SHARD_GRAD_OP"}), [
            "fsdp_config.fsdp_sharding_strategy: SHARD_GRAD_OP is ignored under version 2, which would free parameters "
            "after the forward over all ranks. Write reshard_after_forward: true or false instead."
        ]),
        (accelerate({"activation_checkpointing_offload": True}), [
            "fsdp_config.fsdp_activation_checkpointing_offload: needs activation_checkpointing: true. Add it, or "
            "remove it."
        ]),
        (accelerate({"ignored_modules": "model.(a|b)"}), [
            "fsdp_config.fsdp_ignored_modules: the text 'model.(a|b)' is a regular expression over the names of "
            "modules, and the model was not given. Convert with --model, or write names joined by '|'."
        ]),
        (accelerate({"ignored_modules": "model.(a"}), [
            "fsdp_config.fsdp_ignored_modules: the text 'model.(a' is not a regular expression (missing ), "
            "unterminated subpattern at position 6). Correct it."
        ]),
        (accelerate(None, fsdp_config=[1]), [
            "fsdp_config: the list [1] is not a mapping. Write 'key: value' lines below it."
        ]),
    ],
)  # fmt: skip
def test_what_accelerate_cannot_mean(source: dict[str, Any], messages: list[str]) -> None:
    assert problems(source) == messages


# With the model


def test_the_model_gives_the_classes_to_recompute() -> None:
    settings = converted({"activation_checkpointing": True}, model=CausalLM()).settings
    assert settings["recompute_modules"] == ["Block"]
    assert "transformer_layer_cls_to_wrap" not in settings  # the model gives them again when it is wrapped
    assert problems({"activation_checkpointing": True}, model=nn.Linear(2, 2)) == [
        "activation_checkpointing: recomputes the layers, and nothing says which class these are: the model has no "
        "_no_split_modules. Write transformer_layer_cls_to_wrap, or convert with --model."
    ]
    assert problems({}, model="gpt2") == ["model: str is not an nn.Module. Pass the model, or nothing."]


def test_the_model_resolves_ignored_modules() -> None:
    source = accelerate({"ignored_modules": r"model\.layers\.\d+.*|model.norm"})
    assert converted(source, model=CausalLM()).settings["ignored_modules"] == [
        "model.layers.0", "model.layers.1", "model.norm"
    ]  # fmt: skip
    source = accelerate({"ignored_modules": "layers"})
    assert problems(source, model=CausalLM()) == [
        "fsdp_config.fsdp_ignored_modules: the text 'layers' matches the whole name of no module. Write e.g. model."
    ]


# from_hf and the files


def test_from_hf_returns_a_configuration_with_notes() -> None:
    config = FSDP2Config.from_hf({"state_dict_type": "FULL_STATE_DICT"}, mixed_precision="bf16")
    assert config == load_config({**TRANSFORMERS, **dtypes("bf16")})
    assert config.notices == (f"state_dict_type: {FULL}", f"mixed_precision: {reduced('bf16')}")
    with pytest.raises(ConfigError) as error:
        FSDP2Config.from_hf({"state_dict_type": "FULL_STATE_DICT"}, mixed_precision="no", strict=True)
    assert str(error.value) == f"state_dict_type: {FULL}"
    assert FSDP2Config.from_hf({}, mixed_precision="no", strict=True).notices == ()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("accelerate_slurm.yaml", {**TRANSFORMERS, "reshard_after_forward": True}),
        ("accelerate_template.yaml", {**TRANSFORMERS, "reshard_after_forward": True, **dtypes("bf16")}),
    ],
)
def test_real_files_convert(name: str, settings: dict[str, Any]) -> None:
    assert converted(REAL / name).settings == settings


def test_a_real_file_without_fsdp_config() -> None:
    path = REAL / "accelerate_tp.yaml"
    assert problems(path) == [
        f"{path}: fsdp_config: is absent, so there is nothing to convert. Make a file with accelerate config."
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_mistakes_have_lines_and_come_in_their_order(folder: Path) -> None:
    Path("a.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_bogus: 1\n  fsdp_version: 2\n  fsdp_offload_params: maybe\n"
        "mixed_precision: fp8\nnum_procs: 2\n"
    )
    assert [line.split(": ")[0] for line in problems("a.yaml")] == ["a.yaml:3", "a.yaml:5", "a.yaml:6", "a.yaml:7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2, "version": 1}', "a.json: the key 'version' is given more than once. Keep one."),
        ('{"version": 2\n"xla": 1}', "a.json:2: this is not valid JSON (Expecting ',' delimiter). Correct the line."),
        ("[1]", "a.json: the file holds the list [1]. Write a mapping of settings."),
        ('{"min_num_params": 1e3, "auto_wrap_policy": "SIZE_BASED_WRAP"}', ""),
        ('{\n\t"version": 2\n}', ""),
    ],
)
def test_json_files(folder: Path, text: str, message: str) -> None:
    Path("a.json").write_text(text)
    if message:
        assert problems("a.json") == [message]
    else:
        assert converted("a.json").settings["sharding_size"] == "auto"


def test_sources_that_are_none(folder: Path) -> None:
    assert problems("no.json") == [
        "no.json: there is no such file. Write the path of an existing YAML file."
    ]  # fmt: skip
    assert problems(3) == ["the number 3 is no configuration. Pass the path of a JSON or YAML file, or a mapping."]


# The command


def test_the_command_writes_a_file_that_says_where_it_comes_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fsdp.json").write_text(json.dumps({"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["A"]}))
    assert main(["convert", "fsdp.json", "-o", "cfg.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == "cfg.yaml: written. Check it with mindspeed-fsdp2 check cfg.yaml.\n"
    assert err == f"note: fsdp.json: {NO_PRECISION}\n"
    assert Path("cfg.yaml").read_text() == (
        "# Converted from fsdp.json (fsdp_config, FSDP version 2) by mindspeed-fsdp2 convert.\n"
        f"# Note: fsdp.json: {NO_PRECISION}\n"
        "\n"
        "sharding_size: auto  # all ranks, as there\n"
        "reshard_after_forward: false  # reshard_after_forward\n"
        "auto_wrap_policy: TRANSFORMER_BASED_WRAP  # the default there\n"
        "transformer_layer_cls_to_wrap:  # transformer_layer_cls_to_wrap\n"
        "  - A\n"
    )
    assert load_config("cfg.yaml") == FSDP2Config.from_hf("fsdp.json")
    assert main(["check", "cfg.yaml"]) == 0


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_documented_example_is_the_result(folder: Path, capsys: pytest.CaptureFixture[str], language: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / language / "configuration.md").read_text(encoding="utf-8")
    found = re.search(r"```json\n(.*?)```\n.*?```bash\nmindspeed-fsdp2 (.*?)\n```.*?```yaml\n(.*?)```", page, re.S)
    assert found is not None
    Path("fsdp.json").write_text(found[1])
    assert main(found[2].split()) == 0
    assert Path("converted.yaml").read_text() == found[3]


def test_the_command_prints_without_an_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fsdp.json").write_text("{}")
    assert main(["convert", "fsdp.json", "--mixed-precision", "bf16"]) == 0
    out, err = capsys.readouterr()
    Path("cfg.yaml").write_text(out)
    assert load_config("cfg.yaml") == load_config({**TRANSFORMERS, **dtypes("bf16")})
    assert err == f"note: fsdp.json: mixed_precision: {reduced('bf16')}\n"


def test_the_command_replaces_no_file_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fsdp.json").write_text("{}")
    Path("cfg.yaml").write_text("sharding_size: 4\n")
    command = ["convert", "fsdp.json", "--mixed-precision", "no", "-o"]
    assert main([*command, "cfg.yaml"]) == 1
    assert capsys.readouterr().err == "cfg.yaml: the file exists already. Name another one, or add --overwrite.\n"
    assert Path("cfg.yaml").read_text() == "sharding_size: 4\n"
    assert main([*command, "cfg.yaml", "--overwrite"]) == 0
    assert load_config("cfg.yaml") == load_config(TRANSFORMERS)
    assert main([*command, "fsdp.json", "--overwrite"]) == 1
    assert "fsdp.json: this is the file to convert. Name another one.\n" in capsys.readouterr().err
    assert main([*command, "none/cfg.yaml"]) == 1
    expected = "none/cfg.yaml: the file cannot be written (No such file or directory). Name another one.\n"
    assert capsys.readouterr().err == expected


def test_the_command_writes_nothing_after_a_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fsdp.json").write_text('{"xla": true, "fsdp_size": 4}')
    assert main(["convert", "fsdp.json", "-o", "cfg.yaml"]) == 1
    assert capsys.readouterr().err == f"fsdp.json: xla: {TPU}\nfsdp.json: fsdp_size: {DROPS}{SIZE}\n"
    Path("fsdp.json").write_text("{}")
    assert main(["convert", "fsdp.json", "-o", "cfg.yaml", "--strict"]) == 1
    assert capsys.readouterr().err == f"fsdp.json: {NO_PRECISION}\n"
    assert not Path("cfg.yaml").exists()


def test_the_command_takes_a_function_for_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(folder))])
    Path("converted_here.py").write_text(
        "from tests.unit.test_wrap_policy import CausalLM\n\n\ndef build():\n    return CausalLM()\n\n\nname = 'x'\n"
    )
    Path("fsdp.json").write_text('{"activation_checkpointing": true}')
    command = ["convert", "fsdp.json", "--mixed-precision", "no", "--model"]
    assert main([*command, "converted_here:build"]) == 0
    assert "recompute_modules:  # activation_checkpointing\n  - Block\n" in capsys.readouterr().out
    Path("fsdp.json").write_text('{"transformer_layer_cls_to_wrap": "Blok"}')
    for model, message in {
        "converted_here:build": "transformer_layer_cls_to_wrap: no module is of a class 'Blok'. Write Block or "
        "WideBlock.",
        "converted_here:name": "--model: converted_here:name gives a str, which is no nn.Module. Write a directory with "
        "a config.json of Transformers, or package.module:function.",
        "converted_here:nme": "--model: 'converted_here' has no 'nme'. Name a function that returns the model.",
        "converted_there:build": "--model: there is no module 'converted_there'. Write a directory with a config.json "
        "of Transformers, or package.module:function.",
        "gpt2": "--model: 'gpt2' is neither a directory nor a function. Write a directory with a config.json of "
        "Transformers, or package.module:function.",
        ".": "--model: . holds no config.json. Write a directory with a config.json of Transformers, or "
        "package.module:function.",
    }.items():
        assert main([*command, model]) == 1
        assert capsys.readouterr().err == f"{message}\n"


class Devices(CausalLM):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config.width)
        assert self.lm_head.weight.device == torch.device("meta")


@pytest.mark.parametrize("architecture", ["Devices", "Remote"])
def test_the_command_takes_a_directory_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    Path("config.json").write_text('{"width": 4}')
    Path("fsdp.json").write_text('{"activation_checkpointing": true}')
    command = ["convert", "fsdp.json", "--mixed-precision", "no", "--model", "."]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(command) == 1
    assert capsys.readouterr().err == (
        "--model: . needs the package transformers, which is not installed. Install it, or write "
        "package.module:function.\n"
    )

    def from_pretrained(path: str, local_files_only: bool) -> SimpleNamespace:
        assert local_files_only
        return SimpleNamespace(**json.loads((Path(path) / "config.json").read_text()), architectures=[architecture])

    build: Callable[[SimpleNamespace], nn.Module] = Devices
    fake = SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=from_pretrained),
        AutoModelForCausalLM=SimpleNamespace(from_config=build),
        Devices=build,
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    assert main(command) == 0
    assert "recompute_modules:  # activation_checkpointing\n  - Block\n" in capsys.readouterr().out
