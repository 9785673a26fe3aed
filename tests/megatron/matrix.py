"""The matrix of Megatron runs: every row trains once with plain DDP and once with FSDP2, and the two are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.megatron.comparison import BF16, BF16_AGAINST_FP32, BF16_SUMMED_IN_FP32, BITWISE, FP32, Text, Tolerance
from tests.megatron.jobs import EXAMPLE, ROOT
from tests.megatron.tiny import FLAGS

TWO_TOWER = Path(__file__).with_name("two_tower.py")
Flags = Mapping[str, str | None]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: Identifier.
        text: What the documentation calls it.
        yaml: Settings of FSDP2, or the name of a file under ``configs/``.
        flags: Changes to the flags of :mod:`tests.megatron.tiny`, for both runs.
        drop: Flags of it to leave out, for both runs.
        specs: Changes of :mod:`tests.megatron.specs`, for both runs.
        ranks: Number of ranks.
        tensor: Tensor-parallel ranks; consecutive ones.
        whole: Beginnings of the names of trainable parameters that stay whole.
        against: Name of the row whose FSDP2 run is the reference; empty for plain DDP.
        tolerance: What is allowed.
        script: The pretrain script.
        env: Environment variables of both runs.
        slow: Whether it runs with ``--all`` only.
    """

    name: str
    text: Text
    yaml: Mapping[str, Any] | str
    flags: Flags = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    specs: str = ""
    ranks: int = 2
    tensor: int = 1
    whole: tuple[str, ...] = ()
    against: str = ""
    tolerance: Tolerance = FP32
    script: Path = EXAMPLE
    env: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False

    def argv(self, data: str) -> list[str]:
        """Return the flags that both runs share; ``data`` is the prefix of the data set."""
        parts = self.tensor * int(self.flags.get("context_parallel_size") or 1)
        size = {"train_iters": "8", "micro_batch_size": str(8 * parts // self.ranks), "global_batch_size": "8"}
        changed = {f"--{name.replace('_', '-')}": value for name, value in {**size, **self.flags}.items()}
        flags = {**FLAGS, **changed, "--train-data-path": f"{data}-train", "--valid-data-path": f"{data}-valid"}
        kept = [(flag, value) for flag, value in flags.items() if flag not in self.drop]
        return [part for pair in kept for part in pair if part is not None]


# --- the rows ---------------------------------------------------------------------------------------------------------

LAYERS = "decoder.layers.{*}"
UNITS: list[Any] = ["embedding", LAYERS, ["decoder.final_layernorm", "output_layer"]]
ZERO3: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": UNITS}
DEFAULT = {"sharding_size": "auto"}
HSDP = {**ZERO3, "sharding_size": 2}
SGD: Flags = {"optimizer": "sgd", "lr": "0.3", "clip_grad": "0"}
STEPS20: Flags = {"train_iters": "20"}
DROPOUT: Flags = {"attention_dropout": "0.1", "hidden_dropout": "0.1", **STEPS20}
UNTIE = ("--untie-embeddings-and-output-weights",)
TP2: Flags = {"tensor_model_parallel_size": "2"}
SP2: Flags = {**TP2, "sequence_parallel": None}
CP2: Flags = {"context_parallel_size": "2"}
MICRO2: Flags = {"global_batch_size": "16"}
MICRO4: Flags = {"global_batch_size": "32"}
TOKENS: Flags = {"calculate_per_token_loss": None, **MICRO2}
LOGGED: Flags = {"log_num_zeros_in_grad": None, "log_params_norm": None}
WHOLE = {"sharding_size": "auto", "sub_modules_to_wrap": [LAYERS, "output_layer"]} | {
    "ignored_modules": ["embedding", "decoder.final_layernorm"]
}
WHOLE_NAMES = ("embedding.", "decoder.final_layernorm.")
SAMPLE_UNITS = ["output_layer", "embedding", "rotary_pos_emb", LAYERS]
MOE: Flags = {"num_experts": "4", "moe_router_topk": "2", "moe_aux_loss_coeff": "1e-2"} | {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}
LAST = {"reduce_grads": "last_microbatch"}
RECOMPUTE = {"recompute_modules": [LAYERS]}
SAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "multimodal.yaml").read_text(encoding="utf-8"))
SAMPLE_FP32 = {name: value for name, value in SAMPLE.items() if not name.endswith("_dtype")}
OPTIONAL = {name: value for name, value in SAMPLE_FP32.items() if name != "ignored_modules"} | {
    "optional_modules": ["image_encoder"]
}
PLAIN = {"use_reentrant": False}

ROWS: dict[Text, tuple[Row, ...]] = {
    Text("Sharding, resharding, recompute, prefetch", "切分、再切分、重计算、预取"): (
        Row("zero3", Text("ZeRO-3", "ZeRO-3"), ZERO3, STEPS20),
        Row("zero2", Text("ZeRO-2", "ZeRO-2"), {**ZERO3, "reshard_after_forward": False}, STEPS20),
        Row("recompute", Text("recompute, reentrant", "重计算，reentrant"), {**ZERO3, **RECOMPUTE}, STEPS20),
        Row(
            "recompute-plain",
            Text("recompute, non-reentrant", "重计算，non-reentrant"),
            {**ZERO3, **RECOMPUTE, **PLAIN},
            STEPS20,
        ),
        Row(
            "prefetch",
            Text("prefetch 2 forward, 2 backward", "前向与反向各预取 2 个单元"),
            {**ZERO3, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
            STEPS20,
        ),
        Row("two-micro-batches", Text("two micro-batches", "两个 micro-batch"), ZERO3, {**STEPS20, **MICRO2}),
        Row("zero3-4", Text("ZeRO-3 on 4 ranks", "4 进程 ZeRO-3"), ZERO3, STEPS20, ranks=4),
        Row("hsdp", Text("sharding_size 2 of 4", "sharding_size 2，共 4 进程"), HSDP, STEPS20, ranks=4),
        Row(
            "replicas",
            Text("sharding_size 1 of 4", "sharding_size 1，共 4 进程"),
            {**ZERO3, "sharding_size": 1},
            STEPS20,
            ranks=4,
        ),
        Row("sgd", Text("ZeRO-3, SGD, no clipping", "ZeRO-3，SGD，不裁剪"), ZERO3, SGD, tolerance=BITWISE),
        Row(
            "reshard-to-2",
            Text("reshard_after_forward 2 of 4", "reshard_after_forward 2，共 4 进程"),
            {**ZERO3, "reshard_after_forward": 2},
            ranks=4,
            slow=True,
        ),
        Row(
            "root-only", Text("the root unit alone", "只有根单元"), {"sharding_size": "auto", "sub_modules_to_wrap": []}
        ),
        Row("default-units", Text("Megatron's default units", "Megatron 默认单元"), DEFAULT),
        Row(
            "nested-units",
            Text("a unit inside a unit, through _fsdp_modules", "单元内再有单元（_fsdp_modules）"),
            {**DEFAULT, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
            specs="own_class_unit",
        ),
        Row(
            "all-at-once",
            Text("HSDP, recompute, prefetch 2, SGD", "HSDP、重计算、预取 2、SGD"),
            {**HSDP, **RECOMPUTE, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
            SGD,
            ranks=4,
        ),
        Row("one-rank", Text("one rank", "单进程"), ZERO3, ranks=1, slow=True),
        Row(
            "gpt2",
            Text("LayerNorm, biases, learned positions", "LayerNorm、偏置、可学习位置编码"),
            DEFAULT,
            # Adam would make a step of full size out of the noise in the gradient of a bias that changes nothing.
            {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", **SGD},
            drop=("--swiglu", "--disable-bias-linear"),
        ),
    ),
    Text("Dropout 0.1 with recompute", "dropout 0.1 与重计算"): (
        Row("dropout", Text("no recompute", "不重计算"), ZERO3, DROPOUT),
        Row(
            "dropout-recompute",
            Text("reentrant, against no recompute", "reentrant，对比不重计算"),
            {**ZERO3, **RECOMPUTE},
            DROPOUT,
            against="dropout",
            tolerance=BITWISE,
        ),
        Row(
            "dropout-recompute-plain",
            Text("non-reentrant, against no recompute", "non-reentrant，对比不重计算"),
            {**ZERO3, **RECOMPUTE, **PLAIN},
            DROPOUT,
            against="dropout",
            tolerance=BITWISE,
        ),
        Row(
            "dropout-sgd",
            Text("reentrant, SGD, no clipping", "reentrant，SGD，不裁剪"),
            {**ZERO3, **RECOMPUTE},
            {**DROPOUT, **SGD},
            slow=True,
        ),
        Row(
            "dropout-tp",
            Text("reentrant, tensor parallel 2", "reentrant，张量并行 2"),
            {**ZERO3, **RECOMPUTE},
            {**DROPOUT, **SP2, "train_iters": "8"},
            specs="own_layers",
            ranks=4,
            tensor=2,
            slow=True,
        ),
    ),
    Text("Per-token loss, uneven token counts", "按 token 平均的损失，token 数不均"): (
        Row(
            "tokens",
            Text("ZeRO-3, two micro-batches", "ZeRO-3，两个 micro-batch"),
            ZERO3,
            TOKENS,
            specs="uneven_tokens",
            slow=True,
        ),
        Row("tokens-sgd", Text("SGD, no clipping", "SGD，不裁剪"), ZERO3, {**TOKENS, **SGD}, specs="uneven_tokens"),
        Row(
            "tokens-hsdp",
            Text("HSDP and a whole trainable embedding", "HSDP，嵌入层不切分且可训练"),
            {**WHOLE, "sharding_size": 2},
            {**TOKENS, **SGD},
            specs="uneven_tokens",
            ranks=4,
            whole=WHOLE_NAMES,
        ),
        Row(
            "uneven-micro-batches",
            Text("loss averaged per micro-batch instead", "改为每个 micro-batch 内平均"),
            ZERO3,
            MICRO2,
            specs="uneven_tokens",
            slow=True,
        ),
    ),
    Text("Tensor, sequence and context parallel", "张量、序列、上下文并行"): (
        Row("tp", Text("TP 2 x DP 2", "TP 2 x DP 2"), ZERO3, TP2, ranks=4, tensor=2),
        Row(
            "sp",
            Text("TP 2 with sequence parallel", "TP 2 加序列并行"),
            ZERO3,
            {**SP2, **LOGGED},
            specs="own_layers",
            ranks=4,
            tensor=2,
        ),
        Row(
            "sp-sgd",
            Text("TP 2 with sequence parallel, SGD, no clipping", "TP 2 加序列并行，SGD，不裁剪"),
            ZERO3,
            {**SP2, **SGD},
            specs="own_layers",
            ranks=4,
            tensor=2,
            slow=True,
        ),
        Row(
            "tp-replicas",
            Text("TP 2, sharding_size 1 (2-D mesh)", "TP 2，sharding_size 1（二维网格）"),
            {**ZERO3, "sharding_size": 1},
            {**TP2, **LOGGED},
            ranks=4,
            tensor=2,
            slow=True,
        ),
        Row(
            "tp-hsdp",
            Text("TP 2, sharding_size 2 of 4, on 8 ranks", "TP 2，sharding_size 2，共 8 进程"),
            HSDP,
            SP2,
            specs="own_layers",
            ranks=8,
            tensor=2,
            slow=True,
        ),
        Row("tp-alone", Text("TP 2 x DP 1", "TP 2 x DP 1"), ZERO3, TP2, ranks=2, tensor=2, slow=True),
        Row(
            "tp-qk-norm",
            Text("TP 2 with q and k norms", "TP 2，带 q、k 归一化"),
            ZERO3,
            {**TP2, "qk_layernorm": None},
            ranks=4,
            tensor=2,
            slow=True,
        ),
        Row("cp", Text("CP 2 x DP 2", "CP 2 x DP 2"), ZERO3, {**CP2, **LOGGED}, specs="own_layers", ranks=4),
        Row(
            "cp-sgd",
            Text("CP 2, SGD, no clipping", "CP 2，SGD，不裁剪"),
            ZERO3,
            {**CP2, **SGD},
            specs="own_layers",
            ranks=4,
            slow=True,
        ),
        Row(
            "cp-tokens",
            Text("CP 2, per-token loss, HSDP", "CP 2，按 token 平均，HSDP"),
            HSDP,
            {**CP2, **TOKENS, "eval_iters": "2", "eval_interval": "4"},
            specs="own_layers uneven_tokens",
            ranks=4,
        ),
        Row(
            "cp-tp",
            Text("CP 2 x TP 2, sequence parallel", "CP 2 x TP 2，序列并行"),
            ZERO3,
            {**CP2, **SP2},
            specs="own_layers",
            ranks=4,
            tensor=2,
            slow=True,
        ),
    ),
    Text("Accumulation", "梯度累积"): (
        Row("micro4", Text("4 micro-batches, every_microbatch", "4 个 micro-batch，every_microbatch"), ZERO3, MICRO4),
        Row("last", Text("last_microbatch", "last_microbatch"), {**ZERO3, **LAST}, MICRO4, slow=True),
        Row(
            "last-sgd",
            Text("last_microbatch, HSDP, prefetch 2, SGD, no clipping", "last_microbatch，HSDP，预取 2，SGD，不裁剪"),
            {**HSDP, **LAST, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
            {**MICRO4, **SGD},
            ranks=4,
        ),
        Row(
            "hsdp-micro4",
            Text("HSDP, every_microbatch", "HSDP，every_microbatch"),
            HSDP,
            MICRO4,
            ranks=4,
            slow=True,
        ),
        Row(
            "last-zero2",
            Text("last_microbatch, ZeRO-2, recompute", "last_microbatch，ZeRO-2，重计算"),
            {**ZERO3, **LAST, **RECOMPUTE, "reshard_after_forward": False},
            MICRO4,
            slow=True,
        ),
        Row(
            "whole-micro4",
            Text("last_microbatch, whole trainable embedding", "last_microbatch，嵌入层不切分且可训练"),
            {**WHOLE, **LAST},
            {**MICRO4, **SGD},
            whole=WHOLE_NAMES,
        ),
    ),
    Text("Norms, counts, evaluation", "范数、计数、评估"): (
        Row("logged", Text("zero count and parameters' norm", "零计数与参数范数"), ZERO3, LOGGED),
        Row("logged-hsdp", Text("the same, HSDP", "同上，HSDP"), HSDP, LOGGED, ranks=4, slow=True),
        Row(
            "logged-whole",
            Text("the same, whole trainable embedding, HSDP", "同上，嵌入层不切分且可训练，HSDP"),
            {**WHOLE, "sharding_size": 2, "ignored_modules": ["embedding"]},
            LOGGED,
            ranks=4,
            whole=("embedding.",),
        ),
        Row(
            "evaluation",
            Text("evaluation every 3 steps, ZeRO-2", "每 3 步评估，ZeRO-2"),
            {**ZERO3, "reshard_after_forward": False},
            {"eval_iters": "2", "eval_interval": "3"},
        ),
        Row(
            "evaluation-recompute",
            Text("the same, recompute, prefetch 2, SGD, no clipping", "同上，重计算，预取 2，SGD，不裁剪"),
            {**ZERO3, **RECOMPUTE, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
            {**SGD, "eval_iters": "2", "eval_interval": "3"},
            slow=True,
        ),
    ),
    Text("Trainable parameters in ignored_modules", "ignored_modules 中的可训练参数"): (
        Row(
            "whole",
            Text("embedding and final norm whole", "嵌入层与最后的归一化不切分"),
            WHOLE,
            STEPS20,
            whole=WHOLE_NAMES,
        ),
        Row(
            "whole-sgd",
            Text("HSDP, SGD, no clipping", "HSDP，SGD，不裁剪"),
            {**WHOLE, "sharding_size": 2},
            SGD,
            ranks=4,
            whole=WHOLE_NAMES,
        ),
        Row(
            "whole-sp",
            Text("TP 2 with sequence parallel", "TP 2 加序列并行"),
            WHOLE,
            {**SP2, **LOGGED, **STEPS20},
            specs="own_layers",
            ranks=4,
            tensor=2,
            whole=WHOLE_NAMES,
        ),
        Row(
            "whole-offload",
            Text("the rest offloaded", "其余部分卸载"),
            {**WHOLE, "offload_to_cpu": True},
            {**SGD, **MICRO2},
            whole=WHOLE_NAMES,
            slow=True,
        ),
    ),
    Text("Offload", "卸载到主机"): (
        Row("offload", Text("everything", "全部"), {**ZERO3, "offload_to_cpu": True}, {**STEPS20, **LOGGED}),
        Row(
            "offload-sgd",
            Text("everything, last_microbatch, SGD, no clipping", "全部，last_microbatch，SGD，不裁剪"),
            {**ZERO3, **LAST, "offload_to_cpu": True},
            {**SGD, **MICRO4},
        ),
        Row(
            "offload-some",
            Text("one layer through overrides", "通过 overrides 卸载一层"),
            {**ZERO3, "overrides": [{"modules": ["decoder.layers.0"], "offload_to_cpu": True}]},
            LOGGED,
        ),
    ),
    Text("Tied embeddings", "共享嵌入权重"): (
        Row("tied", Text("default units", "默认单元"), DEFAULT, STEPS20, drop=UNTIE),
        Row(
            "tied-sample",
            Text("the units of the documented sample", "文档示例的单元"),
            {"sharding_size": "auto", "sub_modules_to_wrap": SAMPLE_UNITS},
            SGD,
            drop=UNTIE,
        ),
        Row(
            "tied-tp",
            Text("TP 2, sharding_size 1, recompute", "TP 2，sharding_size 1，重计算"),
            {"sharding_size": 1, **RECOMPUTE},
            TP2,
            drop=UNTIE,
            ranks=4,
            tensor=2,
            slow=True,
        ),
        Row(
            "tied-offload",
            Text("offload, last_microbatch", "卸载，last_microbatch"),
            {**DEFAULT, **LAST, "offload_to_cpu": True},
            MICRO4,
            drop=UNTIE,
            slow=True,
        ),
    ),
    Text("A module used twice (MTP)", "一次前向中用到两次的模块（MTP）"): (
        Row("mtp", Text("--mtp-num-layers 1", "--mtp-num-layers 1"), DEFAULT, {"mtp_num_layers": "1"}),
        Row(
            "mtp-tied",
            Text("tied embeddings, recompute, SGD, no clipping", "共享嵌入，重计算，SGD，不裁剪"),
            {**DEFAULT, **RECOMPUTE},
            {"mtp_num_layers": "1", **SGD},
            drop=UNTIE,
        ),
        Row(
            "mtp-sample",
            Text("units of the sample, prefetch 2, HSDP", "示例的单元，预取 2，HSDP"),
            {
                "sharding_size": 2,
                "sub_modules_to_wrap": [*SAMPLE_UNITS, "mtp.layers.{*}"],
                "num_to_forward_prefetch": 2,
                "num_to_backward_prefetch": 2,
            },
            {"mtp_num_layers": "1"},
            ranks=4,
            slow=True,
        ),
    ),
    Text("Mixture of experts, expert parallel 1", "混合专家，专家并行 1"): (
        Row("moe", Text("local experts", "本地专家"), DEFAULT, MOE),
        Row(
            "moe-bias",
            Text("expert bias, recompute, SGD, no clipping", "专家偏置，重计算，SGD，不裁剪"),
            {**DEFAULT, **RECOMPUTE},
            {**MOE, **SGD, **MICRO2, "moe_router_enable_expert_bias": None, "moe_router_score_function": "sigmoid"},
        ),
        Row(
            "moe-units",
            Text("each expert a unit, HSDP", "每个专家一个单元，HSDP"),
            {
                "sharding_size": 2,
                "sub_modules_to_wrap": [LAYERS, "decoder.layers.{*}.mlp.experts.local_experts.{*}", "output_layer"],
            },
            MOE,
            ranks=4,
            slow=True,
        ),
    ),
    Text("Frozen parameters", "冻结参数"): (
        Row("lora", Text("adapters beside frozen qkv projections", "冻结 qkv 投影旁的适配器"), DEFAULT, specs="lora"),
        Row(
            "lora-sgd",
            Text("recompute non-reentrant, HSDP, SGD, no clipping", "non-reentrant 重计算，HSDP，SGD，不裁剪"),
            {**HSDP, **RECOMPUTE, **PLAIN},
            SGD,
            specs="lora",
            ranks=4,
        ),
        Row(
            "frozen-embedding",
            Text("frozen embedding, kept whole", "嵌入层冻结且不切分"),
            {"sharding_size": "auto", "sub_modules_to_wrap": [LAYERS], "ignored_modules": ["embedding"]},
            specs="frozen_embedding",
            slow=True,
        ),
    ),
    Text("Start values", "初始值"): (
        Row(
            "random-init",
            Text("--data-parallel-random-init", "--data-parallel-random-init"),
            ZERO3,
            {"data_parallel_random_init": None},
            slow=True,
        ),
        Row(
            "random-init-hsdp",
            Text("the same, HSDP, whole embedding, SGD, no clipping", "同上，HSDP，嵌入层不切分，SGD，不裁剪"),
            {**WHOLE, "sharding_size": 2},
            {"data_parallel_random_init": None, **SGD},
            ranks=4,
            whole=WHOLE_NAMES,
            slow=True,
        ),
        Row(
            "random-init-tp",
            Text("the same, TP 2", "同上，TP 2"),
            DEFAULT,
            {"data_parallel_random_init": None, **TP2},
            ranks=4,
            tensor=2,
            slow=True,
        ),
    ),
    Text("Dimensions that do not divide", "不能整除的维度"): (
        Row(
            "ffn-45",
            Text("ffn 45 on 4 ranks", "ffn 45，4 进程"),
            DEFAULT,
            {"ffn_hidden_size": "45"},
            drop=("--swiglu",),  # whose warm-up cuts an odd width in halves
            ranks=4,
        ),
        Row("ffn-3", Text("ffn 3 on 4 ranks", "ffn 3，4 进程"), DEFAULT, {"ffn_hidden_size": "3"}, ranks=4),
        Row(
            "ffn-3-sgd",
            Text("ffn 3, no SwiGLU, offload, SGD, no clipping", "ffn 3，无 SwiGLU，卸载，SGD，不裁剪"),
            {**DEFAULT, "offload_to_cpu": True},
            {"ffn_hidden_size": "3", **SGD},
            drop=("--swiglu",),
            ranks=4,
            slow=True,
        ),
    ),
    Text("bf16", "bf16"): (
        Row("bf16", Text("--bf16", "--bf16"), DEFAULT, {"bf16": None, **STEPS20}, tolerance=BF16_SUMMED_IN_FP32),
        Row(
            "bf16-micro4",
            Text("--bf16, 4 micro-batches, last_microbatch", "--bf16，4 个 micro-batch，last_microbatch"),
            {**ZERO3, **LAST},
            {"bf16": None, **MICRO4, **LOGGED},
            tolerance=BF16_SUMMED_IN_FP32,
        ),
        Row(
            "bf16-sgd",
            Text("--bf16, 4 micro-batches, HSDP, SGD, no clipping", "--bf16，4 个 micro-batch，HSDP，SGD，不裁剪"),
            HSDP,
            {"bf16": None, **MICRO4, **SGD},
            tolerance=BF16_SUMMED_IN_FP32,
            ranks=4,
            slow=True,
        ),
        Row(
            "bf16-lora",
            Text("--bf16, adapters beside frozen projections", "--bf16，冻结投影旁的适配器"),
            DEFAULT,
            {"bf16": None},
            specs="lora",
            tolerance=BF16_SUMMED_IN_FP32,
            slow=True,
        ),
        Row(
            "bf16-whole",
            Text("--bf16, whole trainable embedding, recompute", "--bf16，嵌入层不切分且可训练，重计算"),
            {**WHOLE, **RECOMPUTE},
            {"bf16": None},
            tolerance=BF16,
            whole=WHOLE_NAMES,
            slow=True,
        ),
        Row(
            "bf16-tied-offload",
            Text("--bf16, tied embeddings, offload", "--bf16，共享嵌入，卸载"),
            {**DEFAULT, "offload_to_cpu": True},
            {"bf16": None},
            drop=UNTIE,
            tolerance=BF16_SUMMED_IN_FP32,
            slow=True,
        ),
        Row(
            "bf16-sp",
            Text("--bf16, TP 2 with sequence parallel, per-token loss", "--bf16，TP 2 加序列并行，按 token 平均"),
            DEFAULT,
            {"bf16": None, **SP2, **TOKENS},
            specs="own_layers uneven_tokens",
            ranks=4,
            tensor=2,
            tolerance=BF16_SUMMED_IN_FP32,
            slow=True,
        ),
        Row(
            "bf16-reduced",
            Text("--bf16, reduce_dtype bf16", "--bf16，reduce_dtype 为 bf16"),
            {**DEFAULT, "reduce_dtype": "bf16"},
            {"bf16": None, "grad_reduce_in_bf16": None},
            tolerance=BF16,
            slow=True,
        ),
        Row(
            "bf16-fp32-norm",
            Text("norms in fp32 through overrides", "通过 overrides 用 fp32 计算归一化"),
            {
                "sharding_size": "auto",
                "sub_modules_to_wrap": [LAYERS, "decoder.layers.{*}.input_layernorm", "embedding"],
                "overrides": [
                    {"modules": ["decoder.layers.{*}.input_layernorm"], "param_dtype": "fp32", "output_dtype": "bf16"}
                ],
            },
            {"bf16": None},
            tolerance=BF16,
        ),
        Row(
            "bf16-fp32-router",
            Text("routers in fp32 through overrides", "通过 overrides 用 fp32 计算路由"),
            {
                "sharding_size": "auto",
                "sub_modules_to_wrap": [LAYERS, "decoder.layers.{*}.mlp.router", "embedding"],
                "overrides": [{"modules": ["decoder.layers.{*}.mlp.router"], "param_dtype": "fp32"}],
            },
            {"bf16": None, **MOE, "moe_router_dtype": "fp32"},
            tolerance=BF16,
        ),
    ),
    Text("The documented sample: two towers", "文档示例：双塔模型"): (
        Row(
            "two-towers",
            Text("configs/multimodal.yaml without its dtypes, fp32", "configs/multimodal.yaml 去掉数据类型，fp32"),
            SAMPLE_FP32,
            STEPS20,
            whole=("image_encoder.",),
            script=TWO_TOWER,
        ),
        Row(
            "two-towers-fp32",
            Text("configs/multimodal.yaml, --bf16, encoder in fp32", "configs/multimodal.yaml，--bf16，编码器为 fp32"),
            "multimodal.yaml",
            {"bf16": None, **STEPS20},
            whole=("image_encoder.",),
            tolerance=BF16_SUMMED_IN_FP32,
            script=TWO_TOWER,
        ),
        Row(
            "two-towers-bf16",
            Text("the same, encoder in bf16", "同上，编码器为 bf16"),
            "multimodal.yaml",
            {"bf16": None, **STEPS20},
            whole=("image_encoder.",),
            tolerance=BF16,
            script=TWO_TOWER,
            env={"ENCODER": "bfloat16"},
        ),
        Row(
            "two-towers-frozen",
            Text("frozen encoder, tied embeddings, SGD, no clipping", "编码器冻结，共享嵌入，SGD，不裁剪"),
            SAMPLE_FP32,
            SGD,
            drop=UNTIE,
            script=TWO_TOWER,
            env={"FREEZE": "1"},
            slow=True,
        ),
        Row(
            "two-towers-hsdp",
            Text("HSDP, 4 micro-batches, last_microbatch", "HSDP，4 个 micro-batch，last_microbatch"),
            {**SAMPLE_FP32, **LAST, "sharding_size": 2},
            MICRO4,
            ranks=4,
            whole=("image_encoder.",),
            script=TWO_TOWER,
            slow=True,
        ),
        Row(
            "two-towers-optional",
            Text("each rank runs the encoder in every other step", "每个进程隔一步才运行编码器"),
            OPTIONAL,
            STEPS20,
            whole=("image_encoder.",),
            script=TWO_TOWER,
            env={"SKIP": "1"},
        ),
        Row(
            "two-towers-optional-last",
            Text("the same, HSDP, last_microbatch, SGD, no clipping", "同上，HSDP，last_microbatch，SGD，不裁剪"),
            {**OPTIONAL, **LAST, "sharding_size": 2},
            {**SGD, **MICRO2},
            ranks=4,
            whole=("image_encoder.",),
            script=TWO_TOWER,
            env={"SKIP": "1"},
            slow=True,
        ),
    ),
    Text("The files of configs/", "configs/ 中的文件"): (
        Row("gpt_quickstart", Text("gpt_quickstart.yaml", "gpt_quickstart.yaml"), "gpt_quickstart.yaml"),
        Row("gpt_zero2", Text("gpt_zero2.yaml", "gpt_zero2.yaml"), "gpt_zero2.yaml"),
        Row("gpt_recompute", Text("gpt_recompute.yaml", "gpt_recompute.yaml"), "gpt_recompute.yaml"),
        Row("gpt_offload", Text("gpt_offload.yaml", "gpt_offload.yaml"), "gpt_offload.yaml"),
        Row(
            "gpt_bf16",
            Text("gpt_bf16.yaml, without --bf16", "gpt_bf16.yaml，不加 --bf16"),
            "gpt_bf16.yaml",
            tolerance=BF16_AGAINST_FP32,
        ),
        Row("gpt_hsdp", Text("gpt_hsdp.yaml on 8 ranks", "gpt_hsdp.yaml，8 进程"), "gpt_hsdp.yaml", ranks=8, slow=True),
    ),
}


def find(name: str) -> Row:
    """Return the row called ``name``."""
    return next(row for rows in ROWS.values() for row in rows if row.name == name)


def config_of(row: Row, folder: Path) -> Path:
    """Return the YAML file of ``row``, written to ``folder`` unless it is one of ``configs/``."""
    if isinstance(row.yaml, str):
        return ROOT / "configs" / row.yaml
    path = folder / f"{row.name}.yaml"
    path.write_text(yaml.safe_dump(dict(row.yaml), sort_keys=False))
    return path
