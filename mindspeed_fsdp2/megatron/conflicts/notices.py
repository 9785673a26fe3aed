"""Flags that FSDP2 accepts and ignores: one clear warning each, for the run is right without them."""

from __future__ import annotations

from typing import Final

from .row import Conflict, Flag, Situation, Text

_REMOVE = Text("Remove it.", "去掉它。")
_IN_FP32 = (
    Flag("--accumulate-allreduce-grads-in-fp32"),
    Flag("--ddp-reduce-scatter-with-fp32-accumulation"),
    Flag("--ddp-param-name-patterns-for-fp32-local-accumulation"),
)
_IN_BF16 = Flag("--grad-reduce-in-bf16")


def _reduced_in(situation: Situation) -> str:
    """Return the dtype in which FSDP2 will reduce gradients: what the YAML says, or else what ``--bf16`` implies."""
    config = situation.config
    if config is None:
        return "fp32"
    if config.reduce_dtype is not None:
        return config.reduce_dtype
    return "fp32" if situation.value("bf16") else config.param_dtype or "fp32"


def _own_groups(situation: Situation) -> bool:
    """Return whether FSDP2 makes process groups of its own instead of taking Megatron's data-parallel group."""
    return situation.config is not None and situation.config.sharding_size not in (
        "auto",
        situation.data_parallel_size(),
    )


NOTICES: Final[tuple[Conflict, ...]] = (
    Conflict(
        "gradient_buckets",
        (
            Flag("--overlap-grad-reduce"),
            Flag("--ddp-num-buckets"),
            Flag("--ddp-bucket-size"),
            Flag("--ddp-pad-buckets-for-high-nccl-busbw"),
            Flag("--ddp-average-in-collective"),
            Flag("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion", off=(True,)),
            Flag("--use-nccl-ub", "nccl_ub"),
            Flag("--disable-symmetric-registration"),
            Flag("--param-and-grad-buffer-pad", off=(0,)),
            Flag("--reset-bucket-group-order"),
        ),
        Text(
            "ignored, because FSDP2 has no gradient buckets and overlaps its communication by itself.",
            "被忽略：FSDP2 没有梯度桶，通信自行与计算重叠。",
        ),
        Text(
            "Remove it; num_to_forward_prefetch and num_to_backward_prefetch in the YAML tune the overlap.",
            "去掉它；可用 YAML 的 num_to_forward_prefetch 和 num_to_backward_prefetch 调整重叠。",
        ),
    ),
    Conflict(
        "reduce_in_fp32",
        _IN_FP32,
        Text(
            "ignored, because reduce_dtype in the YAML sets the precision in which FSDP2 reduces gradients.",
            "被忽略：FSDP2 规约梯度的精度由 YAML 的 reduce_dtype 决定。",
        ),
        Text("Write reduce_dtype: fp32 in the YAML.", "在 YAML 中写 reduce_dtype: fp32。"),
        when=lambda situation: _reduced_in(situation) != "fp32",
    ),
    Conflict(
        "reduce_in_bf16",
        (_IN_BF16,),
        Text(
            "ignored, because reduce_dtype in the YAML sets the precision in which FSDP2 reduces gradients.",
            "被忽略：FSDP2 规约梯度的精度由 YAML 的 reduce_dtype 决定。",
        ),
        Text("Write reduce_dtype: bf16 in the YAML.", "在 YAML 中写 reduce_dtype: bf16。"),
        when=lambda situation: _reduced_in(situation) != "bf16",
    ),
    Conflict(
        "process_group_options",
        (
            Flag("--distributed-timeout-minutes", off=(None, 10)),
            Flag("--distributed-timeout-seconds-after-init"),
            Flag("--nccl-communicator-config-path"),
            Flag("--use-sharp"),
        ),
        Text(
            "ignored by the groups that sharding_size makes inside the data-parallel group: they have PyTorch's "
            "default timeout and options.",
            "对 sharding_size 在数据并行组内新建的组不起作用：它们使用 PyTorch 的默认超时和选项。",
        ),
        Text(
            "Write sharding_size: auto in the YAML, which takes Megatron's own group.",
            "在 YAML 中写 sharding_size: auto，就直接使用 Megatron 自己的组。",
        ),
        when=_own_groups,
        shown=Text(
            "`--distributed-timeout-minutes`, `--distributed-timeout-seconds-after-init`, "
            "`--nccl-communicator-config-path`, `--use-sharp` with `sharding_size` ≠ auto in the YAML",
            "`--distributed-timeout-minutes`、`--distributed-timeout-seconds-after-init`、"
            "`--nccl-communicator-config-path`、`--use-sharp`，而 YAML 的 `sharding_size` 不是 auto",
        ),
    ),
    Conflict(
        "large_gradients",
        (Flag("--check-for-large-grads"),),
        Text(
            "ignored, because Megatron checks its gradient buffers and FSDP2 has none.",
            "被忽略：Megatron 检查的是梯度缓冲区，而 FSDP2 没有。",
        ),
        _REMOVE,
    ),
    Conflict(
        "distributed_optimizer_layout",
        (
            Flag("--dist-ckpt-optim-fully-reshardable"),
            Flag("--distrib-optim-fully-reshardable-mem-efficient"),
            Flag("--no-use-layer-wise-param-layout", "use_layer_wise_param_layout", off=(True,)),
        ),
        Text(
            "ignored, because it is about Megatron's distributed optimizer.",
            "被忽略：它只与 Megatron 的分布式优化器有关。",
        ),
        _REMOVE,
    ),
    Conflict(
        "low_precision_compute",
        (Flag("--fp8-format", "fp8"), Flag("--fp4-format", "fp4")),
        Text("not tested with FSDP2.", "尚未与 FSDP2 一起测试。"),
        Text("Compare its losses with a bf16 run.", "请与 bf16 训练的损失对比。"),
    ),
)
