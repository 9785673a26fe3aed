"""Every row of the conflict tables on plain namespaces: exact text, exact condition."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_fsdp2.config import FSDP2Config, load_config
from mindspeed_fsdp2.errors import ConflictError
from mindspeed_fsdp2.megatron.arguments import add_arguments
from mindspeed_fsdp2.megatron.conflicts import (
    CONFLICTS,
    NOTICES,
    check_conflicts,
    check_yaml_arguments,
    conflicts_table,
    find_conflicts,
    notices,
)

GOOD = {
    "use_torch_fsdp2": True,
    "fsdp2_config_path": "cfg.yaml",
    "gradient_accumulation_fusion": False,
    "distributed_backend": "nccl",
    "ckpt_format": "torch_dcp",
    "world_size": 4,
}
DIST = {"ckpt_format": "torch_dist", "save": "/ckpt"}

# row -> (arguments added to GOOD, YAML settings, environment, what the line says was found)
FIRING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "config_without_fsdp2": ({"use_torch_fsdp2": False}, {}, {}, "--fsdp2-config-path cfg.yaml"),
    "downcast_without_fsdp2": (
        {"use_torch_fsdp2": False, "fsdp2_config_path": None, "downcast_to_bf16": True},
        {},
        {},
        "--downcast-to-bf16",
    ),
    "fsdp2_without_config": ({"fsdp2_config_path": None}, {}, {}, "--use-torch-fsdp2 without --fsdp2-config-path"),
    "yaml_arguments": ({"yaml_cfg": "args.yaml"}, {}, {}, "--yaml-cfg args.yaml"),
    "skip_train": ({"skip_train": True}, {}, {}, "--skip-train"),
    "fake_process_group": ({"fake_process_group": True}, {}, {}, "--fake-process-group"),
    "one_connection": ({}, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    "reshard_after_forward": (
        {"torch_fsdp2_reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {},
        "--torch-fsdp2-no-reshard-after-forward with reshard_after_forward: 2",
    ),
    "offload_backend": (
        {},
        {"offload_to_cpu": True},
        {},
        "offload_to_cpu: true with --distributed-backend nccl",
    ),
    "distributed_optimizer": (
        {"use_distributed_optimizer": True, "overlap_param_gather": True, "num_distributed_optimizer_instances": 2},
        {},
        {},
        "--use-distributed-optimizer, --overlap-param-gather, --num-distributed-optimizer-instances 2",
    ),
    "precision_aware_optimizer": (
        {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "fp32"},
        {},
        {},
        "--use-precision-aware-optimizer, --main-grads-dtype bf16",
    ),
    "optimizer_offload": ({"optimizer_cpu_offload": True}, {}, {}, "--optimizer-cpu-offload"),
    "mindspeed_optimizer": (
        {"reuse_fp32_param": True, "virtual_optimizer": [65.0], "optimizer_selection": "fused_ema_adamw"},
        {},
        {},
        "--reuse-fp32-param, --virtual-optimizer, --optimizer-selection fused_ema_adamw",
    ),
    "other_fsdp": ({"use_megatron_fsdp": True, "layerzero": True}, {}, {}, "--use-megatron-fsdp, --layerzero"),
    "megatron_fsdp_options": (
        {"data_parallel_sharding_strategy": "optim", "fsdp_double_buffer": True},
        {},
        {},
        "--data-parallel-sharding-strategy optim, --fsdp-double-buffer",
    ),
    "weight_shards": (
        {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 4, "ckpt_format": "torch_dist"},
        {},
        {},
        "--tensor-parallel-num-weight-shards 4",
    ),
    "pipeline_parallel": ({"pipeline_model_parallel_size": 2}, {}, {}, "--pipeline-model-parallel-size 2"),
    "expert_parallel": ({"expert_model_parallel_size": 2}, {}, {}, "--expert-model-parallel-size 2"),
    "expert_tensor_parallel": (
        {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "ckpt_format": "torch_dist"},
        {},
        {},
        "--expert-tensor-parallel-size 1",
    ),
    "fp16": ({"fp16": True}, {}, {}, "--fp16"),
    "bf16_computes": ({"bf16": True}, {"param_dtype": "fp32"}, {}, "--bf16 with param_dtype: fp32"),
    "bf16_reduces": ({"bf16": True}, {"reduce_dtype": "bf16"}, {}, "--bf16 with reduce_dtype: bf16"),
    "fp32_residual": (
        {"bf16": True, "fp32_residual_connection": True},
        {},
        {},
        "--fp32-residual-connection with cast_forward_inputs: true",
    ),
    "low_precision_weights": ({"fp8_param_gather": True}, {}, {}, "--fp8-param-gather"),
    "gradient_accumulation_fusion": (
        {"gradient_accumulation_fusion": True},
        {},
        {},
        "--no-gradient-accumulation-fusion is missing",
    ),
    "weight_gradients_elsewhere": (
        {"gemm_gradient_accumulation_fusion": True, "delay_wgrad_compute": True},
        {},
        {},
        "--gemm-gradient-accumulation-fusion, --delay-wgrad-compute",
    ),
    "emerging_optimizer": ({"optimizer": "muon"}, {}, {}, "--optimizer muon"),
    "uneven_forwards": (
        {"hybrid_context_parallel": True, "perform_rl_step": True},
        {},
        {},
        "--hybrid-context-parallel, --perform-rl-step",
    ),
    "qk_clip": ({"qk_clip": True}, {}, {}, "--qk-clip"),
    "recompute": (
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mlp"],
            "recompute_norm": True,
            "adaptive_recompute_device_size": 1024,
            "moe_zero_memory": "level1",
        },
        {},
        {},
        "--recompute-granularity selective, --recompute-modules core_attn mlp, --recompute-norm, "
        "--adaptive-recompute-device-size 1024, --moe-zero-memory level1",
    ),
    "activation_offload": (
        {"swap_attention": True, "cpu_offloading_num_layers": 2},
        {},
        {},
        "--swap-attention, --cpu-offloading-num-layers 2",
    ),
    "graphs": ({"cuda_graph_impl": "local"}, {}, {}, "--cuda-graph-impl local"),
    "weight_hashes": (
        {"check_weight_hash_across_dp_replicas_interval": 10},
        {},
        {},
        "--check-weight-hash-across-dp-replicas-interval 10",
    ),
    "dumps": ({"save_wgrads_interval": 5}, {}, {}, "--save-wgrads-interval 5"),
    "ckpt_format": ({"ckpt_format": "torch"}, {}, {}, "--ckpt-format torch"),
    "ckpt_step_zero": ({"ckpt_step": 0}, {}, {}, "--ckpt-step 0"),
    "torch_dcp_tensor_parallel": (
        {"tensor_model_parallel_size": 2},
        {},
        {},
        "--ckpt-format torch_dcp with --tensor-model-parallel-size 2",
    ),
    "non_persistent_dcp": (
        {"non_persistent_ckpt_type": "global"},
        {},
        {},
        "--ckpt-format torch_dcp with --non-persistent-ckpt-type global",
    ),
    "object_storage": (
        {"save": "msc://bucket/ckpt", "load": "/ckpt", "pretrained_checkpoint": "s3://base"},
        {},
        {},
        "--save msc://bucket/ckpt, --pretrained-checkpoint s3://base",
    ),
    "conversion": ({"ckpt_convert_format": "torch"}, {}, {}, "--ckpt-convert-format torch"),
    "upcycling": ({"moe_use_upcycling": True}, {}, {}, "--moe-use-upcycling"),
    "no_initialization": (
        {"perform_initialization": False},
        {},
        {},
        "--no-initialization without --init-model-with-meta-device",
    ),
    "downcast": (
        {"downcast_to_bf16": True},
        {},
        {},
        "--downcast-to-bf16 without --load or --pretrained-checkpoint",
    ),
    "async_save": (
        {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "nvrx", "ckpt_format": "torch_dist"},
        {},
        {},
        "--async-save",
    ),
    "async_older": ({"async_save": True, "use_persistent_ckpt_worker": True}, {}, {}, "--async-save"),
    "async_worker": (
        {"async_save": True, "async_strategy": "nvrx"},
        {},
        {},
        "--async-save without --use-persistent-ckpt-worker",
    ),
    "local_checkpoints": ({"non_persistent_ckpt_type": "local"}, {}, {}, "--non-persistent-ckpt-type local"),
}
# row -> (arguments, YAML settings, found)
WARNING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gradient_buckets": (
        {"overlap_grad_reduce": True, "ddp_bucket_size": 100, "gradient_reduce_div_fusion": False, "nccl_ub": True},
        {},
        "--overlap-grad-reduce, --ddp-bucket-size 100, --no-gradient-reduce-div-fusion, --use-nccl-ub",
    ),
    "reduce_in_fp32": (
        {"accumulate_allreduce_grads_in_fp32": True},
        {"param_dtype": "bf16"},
        "--accumulate-allreduce-grads-in-fp32",
    ),
    "reduce_in_bf16": ({"grad_reduce_in_bf16": True}, {}, "--grad-reduce-in-bf16"),
    "process_group_options": (
        {
            "distributed_timeout_minutes": 60,
            "distributed_timeout_seconds_after_init": 120,
            "use_sharp": True,
        },
        {"sharding_size": 2},
        "--distributed-timeout-minutes 60, --distributed-timeout-seconds-after-init 120, --use-sharp",
    ),
    "large_gradients": ({"check_for_large_grads": True}, {}, "--check-for-large-grads"),
    "distributed_optimizer_layout": (
        {"dist_ckpt_optim_fully_reshardable": True, "use_layer_wise_param_layout": False},
        {},
        "--dist-ckpt-optim-fully-reshardable, --no-use-layer-wise-param-layout",
    ),
    "low_precision_compute": ({"fp8": "hybrid"}, {}, "--fp8-format hybrid"),
}


def found(
    more: dict[str, Any], settings: dict[str, Any] | None = None, environ: dict[str, str] | None = None
) -> list[str]:
    return find_conflicts(Namespace(**{**GOOD, **more}), load_config(settings or {}), environ or {})


def noticed(more: dict[str, Any], settings: dict[str, Any] | None = None) -> list[str]:
    return notices(Namespace(**{**GOOD, **more}), load_config(settings or {}))


def test_every_row_has_a_case() -> None:
    assert [row.name for row in CONFLICTS] == list(FIRING)
    assert [row.name for row in NOTICES] == list(WARNING)


@pytest.mark.parametrize("name", FIRING)
def test_row_fires_alone(name: str) -> None:
    more, settings, environ, what = FIRING[name]
    rows = {row.name: row for row in CONFLICTS}
    lines = found(more, settings, environ)
    assert lines == [f"{what}: {rows[name].why.en} {rows[name].write.en}"]


@pytest.mark.parametrize("name", WARNING)
def test_notice_fires_alone_and_is_no_error(name: str) -> None:
    more, settings, what = WARNING[name]
    rows = {row.name: row for row in NOTICES}
    assert noticed(more, settings) == [f"{what}: {rows[name].why.en} {rows[name].write.en}"]
    assert found(more, settings) == []


def test_exact_messages() -> None:
    more = {
        "use_distributed_optimizer": True,
        "optimizer": "muon",
        "ckpt_format": "torch",
        "pipeline_model_parallel_size": 2,
        "downcast_to_bf16": True,
    }
    with pytest.raises(ConflictError) as caught:
        check_conflicts(Namespace(**{**GOOD, **more}), None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert str(caught.value).splitlines() == [
        "CUDA_DEVICE_MAX_CONNECTIONS=1: with one hardware queue the all-gathers of FSDP2 wait for the computation they "
        "should overlap with. Unset it, or set a larger number.",
        "--use-distributed-optimizer: FSDP2 shards gradients and optimizer state itself, and has none of the buffers "
        "Megatron's distributed optimizer works on. Remove it; sharding_size in the YAML sets how many ranks share one "
        "copy.",
        "--pipeline-model-parallel-size 2: Megatron does not run FSDP2 in pipeline stages. Write "
        "--pipeline-model-parallel-size 1.",
        "--optimizer muon: it works on whole weight matrices or on Megatron's layer-wise buffers, and FSDP2 leaves each "
        "rank a slice of every weight. Write --optimizer adam or --optimizer sgd.",
        "--ckpt-format torch: Megatron writes the sharded weights of FSDP2 in the formats torch_dist and torch_dcp only. "
        "Write --ckpt-format torch_dcp.",
        "--downcast-to-bf16 without --load or --pretrained-checkpoint: it rounds loaded weights, and nothing is loaded. "
        "Add --load or --pretrained-checkpoint, or remove it.",
    ]


@pytest.mark.parametrize(
    ("more", "settings", "environ"),
    [
        ({}, {}, {}),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2, "ckpt_format": "torch_dist"}, {}, {}),
        ({"num_experts": 8, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}, {}, {}),
        ({}, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        ({"torch_fsdp2_reshard_after_forward": False}, {"reshard_after_forward": False}, {}),
        ({"torch_fsdp2_reshard_after_forward": True}, {"reshard_after_forward": False}, {}),
        ({"distributed_backend": "npu:hccl,cpu:gloo"}, {"offload_to_cpu": True}, {}),
        ({"distributed_backend": "cuda:nccl,cpu:gloo"}, {"offload_to_cpu": True}, {}),
        ({"distributed_backend": "gloo"}, {"offload_to_cpu": True}, {}),
        ({"bf16": True}, {}, {}),
        ({"bf16": True}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}, {}),
        ({"bf16": True}, {"overrides": [{"modules": ["a"], "param_dtype": "fp32", "reduce_dtype": "fp32"}]}, {}),
        ({"bf16": True, "grad_reduce_in_bf16": True}, {"reduce_dtype": "bf16"}, {}),
        ({}, {"param_dtype": "fp32", "reduce_dtype": "bf16"}, {}),
        ({"bf16": True, "fp32_residual_connection": True}, {"cast_forward_inputs": False}, {}),
        ({"bf16": True, "fp32_residual_connection": True}, {"keep_input_dtype": ["hidden_states"]}, {}),
        # once refused, built since
        ({"untie_embeddings_and_output_weights": False}, {}, {}),
        ({"calculate_per_token_loss": True, "data_parallel_random_init": True}, {}, {}),
        ({"bf16": True, "save": "/ckpt", "load": "/ckpt"}, {}, {}),
        ({"load": "/ckpt", "downcast_to_bf16": True}, {}, {}),
        ({"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}, {}, {}),
        ({"pretrained_checkpoint": "/base", "downcast_to_bf16": True}, {}, {}),
        ({"save": "/ckpt"}, {"sharding_size": 2}, {}),
        (DIST, {"sharding_size": "auto"}, {}),
        ({**DIST, "num_experts": 8}, {"sharding_size": "auto"}, {}),
        ({**DIST, "tensor_model_parallel_size": 2}, {"sharding_size": 1}, {}),
        ({"optimizer": "sgd"}, {}, {}),
        (
            {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 2, "ckpt_format": "torch_dist"},
            {},
            {},
        ),
        ({"non_persistent_ckpt_type": "global", "ckpt_format": "torch_dist"}, {}, {}),
        ({"data_parallel_sharding_strategy": "no_shard"}, {}, {}),  # the default up to Megatron 0.17
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, {}, {}),  # and from 0.18 on
        # what MindSpeed's parser holds when nothing is typed
        (
            {
                "adaptive_recompute_device_size": -1,
                "moe_zero_memory": "disable",
                "swap_modules": "input_norm,self_attention,post_attention_norm",
                "optimizer_selection": "fused_adamw",
                "recompute_activation_function_num_layers": None,
                "virtual_optimizer": None,
                "param_and_grad_buffer_pad": None,
            },
            {},
            {},
        ),
    ],
)
def test_what_goes_together(more: dict[str, Any], settings: dict[str, Any], environ: dict[str, str]) -> None:
    assert found(more, settings, environ) == []


def test_arguments_that_a_version_lacks_are_no_conflict() -> None:
    args = Namespace(use_torch_fsdp2=True, fsdp2_config_path="cfg.yaml")
    assert find_conflicts(args, None, {}) == [] == notices(args, None)
    check_conflicts(args, load_config({}), {})


def test_without_fsdp2_everything_of_megatron_is_allowed() -> None:
    everything: dict[str, Any] = {}
    for more, _, _, _ in FIRING.values():
        everything |= more
    for more, _, _ in WARNING.values():
        everything |= more
    everything |= {"use_torch_fsdp2": False, "fsdp2_config_path": None, "downcast_to_bf16": False}
    args = Namespace(**{**GOOD, **everything})
    assert find_conflicts(args, None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == [] == notices(args, None)
    args = Namespace(**{**vars(args), "fsdp2_config_path": "cfg.yaml", "downcast_to_bf16": True})
    lines = find_conflicts(args, None, {})
    assert [line.split(":")[0] for line in lines] == ["--fsdp2-config-path cfg.yaml", "--downcast-to-bf16"]


def test_offload_of_one_override_needs_the_dual_backend() -> None:
    settings = {"overrides": [{"modules": ["a"], "param_dtype": "fp32"}, {"modules": ["b"], "offload_to_cpu": True}]}
    (line,) = found({}, settings)
    assert line.startswith("overrides[1].offload_to_cpu: true with --distributed-backend nccl: ")


def test_every_key_that_lowers_the_reduction_of_bf16_is_named() -> None:
    settings = {
        "reduce_dtype": "fp16",
        "overrides": [{"modules": ["a"], "reduce_dtype": "fp32"}, {"modules": ["b"], "reduce_dtype": "bf16"}],
    }
    assert found({"bf16": True}, settings) == [
        "--bf16 with reduce_dtype: fp16, overrides[1].reduce_dtype: bf16: --bf16 makes Megatron sum gradients in fp32 "
        "(--accumulate-allreduce-grads-in-fp32). Write reduce_dtype: fp32, or add --grad-reduce-in-bf16."
    ]
    del settings["reduce_dtype"]
    (line,) = found({"bf16": True}, settings)
    assert line.startswith("--bf16 with overrides[1].reduce_dtype: bf16: ")


def test_one_override_is_enough_to_round_the_residual() -> None:
    more = {"bf16": True, "fp32_residual_connection": True}
    settings = {"cast_forward_inputs": False, "overrides": [{"modules": ["a"], "cast_forward_inputs": True}]}
    assert found(more, settings) == [
        "--fp32-residual-connection with overrides[0].cast_forward_inputs: true: every unit would round its inputs to "
        "bf16, the fp32 residual among them. Write cast_forward_inputs: false."
    ]


def test_dtypes_that_contradict_bf16_are_all_named() -> None:
    assert found({"bf16": True}, {"param_dtype": "fp16", "reduce_dtype": "bf16"}) == [
        "--bf16 with param_dtype: fp16: the flag and the YAML name different dtypes for the computation. Remove --bf16, "
        "or write param_dtype: bf16.",
        "--bf16 with reduce_dtype: bf16: --bf16 makes Megatron sum gradients in fp32 "
        "(--accumulate-allreduce-grads-in-fp32). Write reduce_dtype: fp32, or add --grad-reduce-in-bf16.",
    ]


REFUSED_YAML = (
    "--yaml-cfg args.yaml: Megatron then drops the command line and takes all arguments from that file, in a nested "
    "form that these checks do not see. Write the arguments as flags."
)


@pytest.mark.parametrize(
    ("args", "argv", "refused"),
    [
        (SimpleNamespace(use_torch_fsdp2=True), ["pretrain.py", "--yaml-cfg", "args.yaml"], True),
        (SimpleNamespace(), ["pretrain.py", "--use-torch-fsdp2", "--yaml-cfg", "args.yaml"], True),
        (SimpleNamespace(use_torch_fsdp2=False), ["pretrain.py", "--yaml-cfg", "args.yaml"], False),
        (SimpleNamespace(), ["pretrain.py", "--yaml-cfg", "args.yaml"], False),
    ],
)
def test_yaml_arguments_are_refused_where_megatron_reads_them(args: Any, argv: list[str], refused: bool) -> None:
    if not refused:
        check_yaml_arguments("args.yaml", args, argv)
        return
    with pytest.raises(ConflictError) as caught:
        check_yaml_arguments("args.yaml", args, argv)
    assert str(caught.value) == REFUSED_YAML


@pytest.mark.parametrize(
    ("sharding_size", "more", "ignored"),
    [
        (1, {}, True),
        (2, {}, True),
        (4, {}, False),  # Megatron's own group
        ("auto", {}, False),
        (2, {"tensor_model_parallel_size": 2}, False),
        (4, {"distributed_timeout_minutes": 10}, False),  # the default
        (2, {"distributed_timeout_minutes": 10}, False),
    ],
)
def test_options_of_process_groups_reach_those_of_megatron_only(
    sharding_size: int | str, more: dict[str, Any], ignored: bool
) -> None:
    lines = noticed({"distributed_timeout_minutes": 60, **more}, {"sharding_size": sharding_size})
    assert (
        lines
        == [
            "--distributed-timeout-minutes 60: ignored by the groups that sharding_size makes inside the data-parallel group: "
            "they have PyTorch's default timeout and options. Write sharding_size: auto in the YAML, which takes Megatron's "
            "own group."
        ]
        * ignored
    )


def test_yaml_lines_are_named(tmp_path: Any) -> None:
    path = tmp_path / "cfg.yaml"
    path.write_text("sharding_size: auto\nreshard_after_forward: true\n")
    args = Namespace(**GOOD, torch_fsdp2_reshard_after_forward=False)
    (line,) = find_conflicts(args, load_config(path), {})
    assert line == (
        f"--torch-fsdp2-no-reshard-after-forward with {path}:2: reshard_after_forward: true: the flag and the YAML say "
        "different things. Remove the flag and write reshard_after_forward: false in the YAML if that is what you want."
    )


@pytest.mark.parametrize(
    ("more", "settings", "fires"),
    [
        ({"accumulate_allreduce_grads_in_fp32": True}, {}, False),
        ({"accumulate_allreduce_grads_in_fp32": True}, {"param_dtype": "bf16"}, True),
        ({"accumulate_allreduce_grads_in_fp32": True}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}, False),
        ({"accumulate_allreduce_grads_in_fp32": True, "bf16": True}, {}, False),  # --bf16 implies fp32
        ({"accumulate_allreduce_grads_in_fp32": True, "bf16": True}, {"param_dtype": "bf16"}, False),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True}, {"reduce_dtype": "bf16"}, True),
        ({"grad_reduce_in_bf16": True}, {}, True),
        ({"grad_reduce_in_bf16": True}, {"param_dtype": "bf16"}, False),
        ({"grad_reduce_in_bf16": True, "bf16": True}, {}, True),
        ({"grad_reduce_in_bf16": True, "bf16": True}, {"reduce_dtype": "bf16"}, False),
        ({"grad_reduce_in_bf16": True, "bf16": True}, {"reduce_dtype": "fp32"}, True),
        ({"bf16": True}, {}, False),
        ({"bf16": True}, {"reduce_dtype": "fp32"}, False),
        ({}, {"param_dtype": "bf16"}, False),
    ],
)
def test_gradient_precision_is_warned_of_only_where_it_differs(
    more: dict[str, Any], settings: dict[str, Any], fires: bool
) -> None:
    assert bool(noticed(more, settings)) is fires


@pytest.mark.parametrize("language", ["en", "zh"])
def test_table_for_the_readme(language: Any) -> None:
    lines = conflicts_table(language).splitlines()
    assert len(lines) == 2 + len(CONFLICTS) + len(NOTICES)
    assert all(line.startswith("| ") and line.endswith(" |") and line.count(" | ") == 3 for line in lines)
    for row, line in zip((*CONFLICTS, *NOTICES), lines[2:], strict=True):
        assert all(flag.text in line for flag in row.flags)
        assert (row.why.zh if language == "zh" else row.why.en) in line


def test_table_is_bilingual() -> None:
    english, chinese = conflicts_table("en"), conflicts_table("zh")
    assert english.isascii() or set(english) - set(map(chr, range(128))) == {"≠"}
    for line in chinese.splitlines()[2:]:
        assert sum("一" <= letter <= "鿿" for letter in line) > 5
    assert (
        "| `--downcast-to-bf16`, without `--load` or `--pretrained-checkpoint` | error | it rounds loaded weights, and "
        "nothing is loaded. | Add --load or --pretrained-checkpoint, or remove it. |\n"
    ) in english
    assert "| `--downcast-to-bf16`，且没有 `--load` 或 `--pretrained-checkpoint` | 报错 |" in chinese


def test_config_is_not_needed_for_flags() -> None:
    assert isinstance(load_config({}), FSDP2Config)
    args = Namespace(**GOOD, torch_fsdp2_reshard_after_forward=False, fp16=True)
    assert [line.split(":")[0] for line in find_conflicts(args, None, {})] == ["--fp16"]


def backend_parser(choices: Any) -> ArgumentParser:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--distributed-backend", default="nccl", choices=choices)
    return parser


@pytest.mark.parametrize("choices", [["nccl", "gloo"], ("nccl",), {"nccl": 1}])
def test_backends_are_added_to_any_form_of_choices(choices: Any) -> None:
    parser = add_arguments(add_arguments(backend_parser(choices)))
    for backend in ("nccl", "gloo", "npu:hccl,cpu:gloo", "cuda:nccl,cpu:gloo"):
        assert parser.parse_args(["--distributed-backend", backend]).distributed_backend == backend
    assert [*(parser._actions[1].choices or ())] == ["nccl", "gloo", "npu:hccl,cpu:gloo", "cuda:nccl,cpu:gloo"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--distributed-backend", "mpi"])


def test_free_choice_of_backend_stays_free() -> None:
    assert add_arguments(backend_parser(None)).parse_args(["--distributed-backend", "ucc"]).distributed_backend == "ucc"


def test_flags_are_added_once() -> None:
    parser = add_arguments(add_arguments(ArgumentParser()))
    args = parser.parse_args(["--fsdp2-config-path", "cfg.yaml", "--downcast-to-bf16"])
    assert (args.fsdp2_config_path, args.downcast_to_bf16) == ("cfg.yaml", True)
    args = parser.parse_args([])
    assert (args.fsdp2_config_path, args.downcast_to_bf16) == (None, False)
    assert parser.format_help().count("mindspeed_fsdp2:") == 1


def test_flags_of_somebody_else_are_left_alone() -> None:
    parser = ArgumentParser()
    parser.add_argument("--fsdp2-config-path", type=str, default="theirs")
    add_arguments(parser)
    assert parser.parse_args([]).fsdp2_config_path == "theirs"
    later = add_arguments(ArgumentParser(), skip={"--fsdp2-config-path"})
    later.add_argument("--fsdp2-config-path", type=str)
    assert later.parse_args(["--downcast-to-bf16"]).downcast_to_bf16 is True
