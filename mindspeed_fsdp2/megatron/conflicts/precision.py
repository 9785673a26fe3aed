"""Conflicts over the dtypes of weights, computation, residual and gradients."""

from __future__ import annotations

from typing import Final

from .row import Conflict, Flag, Situation, Text

_BF16 = Flag("--bf16")
_RESIDUAL = Flag("--fp32-residual-connection")


def _bf16_computes(situation: Situation) -> str | None:
    config, bf16 = situation.config, _BF16.typed(situation)
    if config is None or not bf16 or config.param_dtype in (None, "bf16"):
        return None
    return f"{bf16} with {config.where('param_dtype')}: {config.param_dtype}"


def _bf16_reduces(situation: Situation) -> str | None:
    config, bf16 = situation.config, _BF16.typed(situation)
    # Megatron's validate_args turns --accumulate-allreduce-grads-in-fp32 on for --bf16 unless this flag is typed.
    if config is None or not bf16 or Flag("--grad-reduce-in-bf16").typed(situation):
        return None
    lower = [(config.where("reduce_dtype"), config.reduce_dtype)] + [
        (config.where("overrides", index, "reduce_dtype"), override.reduce_dtype)
        for index, override in enumerate(config.overrides)
    ]
    written = [f"{where}: {dtype}" for where, dtype in lower if dtype in ("bf16", "fp16")]
    return f"{bf16} with {', '.join(written)}" if written else None


def _rounded_residual(situation: Situation) -> str | None:
    config, residual = situation.config, _RESIDUAL.typed(situation)
    if config is None or not residual or "hidden_states" in config.keep_input_dtype:
        return None
    casts = [(config.where("cast_forward_inputs"), config.cast_forward_inputs)] + [
        (config.where("overrides", index, "cast_forward_inputs"), override.cast_forward_inputs)
        for index, override in enumerate(config.overrides)
    ]
    found = [where for where, cast in casts if cast]
    return f"{residual} with {', '.join(found)}: true" if found else None


PRECISION: Final[tuple[Conflict, ...]] = (
    Conflict(
        "fp16",
        (Flag("--fp16"),),
        Text("Megatron has no fp16 training with FSDP2.", "Megatron 不支持用 FSDP2 做 fp16 训练。"),
        Text("Write --bf16, or param_dtype: bf16 in the YAML.", "写 --bf16，或在 YAML 中写 param_dtype: bf16。"),
    ),
    Conflict(
        "bf16_computes",
        (),
        Text(
            "the flag and the YAML name different dtypes for the computation.",
            "命令行与 YAML 给出了不同的计算数据类型。",
        ),
        Text("Remove --bf16, or write param_dtype: bf16.", "去掉 --bf16，或写 param_dtype: bf16。"),
        found=_bf16_computes,
        shown=Text("`--bf16` with `param_dtype` ≠ bf16 in the YAML", "`--bf16`，而 YAML 的 `param_dtype` 不是 bf16"),
    ),
    Conflict(
        "bf16_reduces",
        (),
        Text(
            "--bf16 makes Megatron sum gradients in fp32 (--accumulate-allreduce-grads-in-fp32).",
            "--bf16 使 Megatron 以 fp32 累加梯度（--accumulate-allreduce-grads-in-fp32）。",
        ),
        Text(
            "Write reduce_dtype: fp32, or add --grad-reduce-in-bf16.",
            "写 reduce_dtype: fp32，或加上 --grad-reduce-in-bf16。",
        ),
        found=_bf16_reduces,
        shown=Text(
            "`--bf16` without `--grad-reduce-in-bf16`, with `reduce_dtype` bf16 or fp16 in the YAML",
            "`--bf16`，且没有 `--grad-reduce-in-bf16`，而 YAML 的 `reduce_dtype` 是 bf16 或 fp16",
        ),
    ),
    Conflict(
        "fp32_residual",
        (),
        Text(
            "every unit would round its inputs to bf16, the fp32 residual among them.",
            "每个单元都会把输入舍入到 bf16，其中就有 fp32 残差。",
        ),
        Text("Write cast_forward_inputs: false.", "写 cast_forward_inputs: false。"),
        found=_rounded_residual,
        shown=Text(
            f"{_RESIDUAL.documented()} with `cast_forward_inputs` ≠ false in the YAML",
            f"{_RESIDUAL.documented()}，而 YAML 的 `cast_forward_inputs` 不是 false",
        ),
    ),
    Conflict(
        "low_precision_weights",
        (Flag("--fp8-param-gather"), Flag("--fp4-param-gather"), Flag("--reuse-grad-buf-for-mxfp8-param-ag")),
        Text(
            "FSDP2 gathers weights in the dtype of the YAML, and Megatron would switch the flag off or fail.",
            "FSDP2 按 YAML 的数据类型聚合权重，Megatron 会悄悄关掉该选项或报错。",
        ),
        Text("Remove it.", "去掉它。"),
    ),
)
