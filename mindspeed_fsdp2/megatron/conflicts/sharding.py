"""Conflicts with how else Megatron and MindSpeed split the model, its gradients and its optimizer state."""

from __future__ import annotations

from typing import Final

from .row import Conflict, Flag, Situation, Text

_REMOVE = Text("Remove it.", "去掉它。")
_ONE = (None, 0, 1)


def _weight_shards(situation: Situation) -> str | None:
    tensor = situation.size("tensor_model_parallel_size")
    expert = situation.value("expert_tensor_parallel_size") or tensor
    pairs = (
        (Flag("--tensor-parallel-num-weight-shards"), tensor),
        (Flag("--expert-tensor-parallel-num-weight-shards"), expert),
    )
    typed = [flag.typed(situation) for flag, size in pairs if flag.read(situation) != size]
    return ", ".join(text for text in typed if text) or None


SHARDING: Final[tuple[Conflict, ...]] = (
    Conflict(
        "distributed_optimizer",
        (
            Flag("--use-distributed-optimizer"),
            Flag("--overlap-param-gather"),
            Flag("--overlap-param-gather-with-optimizer-step"),
            Flag("--num-distributed-optimizer-instances", off=_ONE, shown="> 1"),
        ),
        Text(
            "FSDP2 shards gradients and optimizer state itself, and has none of the buffers Megatron's distributed "
            "optimizer works on.",
            "FSDP2 自己切分梯度和优化器状态，没有 Megatron 分布式优化器所用的缓冲区。",
        ),
        Text(
            "Remove it; sharding_size in the YAML sets how many ranks share one copy.",
            "去掉它；由 YAML 的 sharding_size 决定几个进程共用一份。",
        ),
    ),
    Conflict(
        "precision_aware_optimizer",
        (
            Flag("--use-precision-aware-optimizer"),
            Flag("--main-grads-dtype", off=("fp32",), shown="≠ fp32"),
            Flag("--main-params-dtype", off=("fp32",), shown="≠ fp32"),
            Flag("--exp-avg-dtype", off=("fp32",), shown="≠ fp32"),
            Flag("--exp-avg-sq-dtype", off=("fp32",), shown="≠ fp32"),
        ),
        Text("Megatron builds it on its distributed optimizer only.", "Megatron 只在它的分布式优化器上支持它。"),
        _REMOVE,
    ),
    Conflict(
        "optimizer_offload",
        (Flag("--optimizer-cpu-offload"),),
        Text("Megatron builds it on its distributed optimizer only.", "Megatron 只在它的分布式优化器上支持它。"),
        Text(
            "Remove it; offload_to_cpu: true in the YAML keeps weights, gradients and optimizer state in host memory.",
            "去掉它；在 YAML 中写 offload_to_cpu: true，权重、梯度和优化器状态都放在主机内存。",
        ),
    ),
    Conflict(
        "mindspeed_optimizer",
        (
            Flag("--reuse-fp32-param"),
            Flag("--swap-optimizer"),
            Flag("--virtual-optimizer", bare=True),
            Flag("--compress-optimizer"),
            Flag("--quant-states"),
            Flag("--quant-grads"),
            Flag("--optimizer-selection", only=("fused_ema_adamw",), shown="fused_ema_adamw"),
        ),
        Text(
            "this MindSpeed feature rearranges the memory of whole weights or optimizer states, and FSDP2 gives the "
            "optimizer shards (DTensor).",
            "MindSpeed 的这项功能要重排整块权重或优化器状态的内存，而 FSDP2 交给优化器的是分片（DTensor）。",
        ),
        _REMOVE,
    ),
    Conflict(
        "other_fsdp",
        (
            Flag("--use-megatron-fsdp"),
            Flag("--use-custom-fsdp"),
            Flag("--layerzero"),
            Flag("--enable-zero3"),
        ),
        Text("two implementations would shard the same weights.", "两套实现会切分同一份权重。"),
        Text("Keep either it or --use-torch-fsdp2.", "它与 --use-torch-fsdp2 只保留一个。"),
    ),
    Conflict(
        "megatron_fsdp_options",
        (
            # no_shard and optim_grads_params are defaults of some Megatron version, so they cannot count as typed.
            Flag("--data-parallel-sharding-strategy", only=("optim", "optim_grads"), shown="optim, optim_grads"),
            Flag("--outer-dp-sharding-strategy", only=("optim",), shown="optim"),
            Flag("--enable-full-sharding-in-hsdp"),
            Flag("--create-all-gather-group"),
            Flag("--fsdp-double-buffer"),
            Flag("--fsdp-manual-registration"),
            Flag("--fsdp-db-use-persist-buf-on-alloc-fail"),
            Flag("--suggested-communication-unit-size"),
            Flag("--keep-fp8-transpose-cache"),
            Flag("--keep-fp8-transpose-cache-when-using-custom-fsdp"),
            Flag("--megatron-fsdp-main-params-dtype", off=("fp32",), shown="≠ fp32"),
            Flag("--megatron-fsdp-main-grads-dtype", off=("auto",), shown="≠ auto"),
            Flag("--megatron-fsdp-grad-comm-dtype", off=("auto",), shown="≠ auto"),
            Flag("--megatron-fsdp-enable-fine-grained-param-gather"),
            Flag("--megatron-fsdp-max-pool-double-buffer"),
        ),
        Text(
            "it sets up Megatron-FSDP and means nothing to FSDP2.",
            "它配置的是 Megatron-FSDP，对 FSDP2 没有意义。",
        ),
        Text("Remove it; the YAML sets up FSDP2.", "去掉它；FSDP2 由 YAML 配置。"),
    ),
    Conflict(
        "weight_shards",
        (),
        Text(
            "Megatron would cut each weight along a second axis that FSDP2 does not know.",
            "Megatron 会沿另一个维度再切分权重，FSDP2 不认识这种切分。",
        ),
        Text("Remove it; FSDP2 shards the weights.", "去掉它；权重由 FSDP2 切分。"),
        found=_weight_shards,
        shown=Text(
            "`--tensor-parallel-num-weight-shards`, `--expert-tensor-parallel-num-weight-shards` > the parallel size",
            "`--tensor-parallel-num-weight-shards`、`--expert-tensor-parallel-num-weight-shards` 大于对应的并行数",
        ),
    ),
    Conflict(
        "pipeline_parallel",
        (Flag("--pipeline-model-parallel-size", off=_ONE, shown="> 1"),),
        Text("Megatron does not run FSDP2 in pipeline stages.", "Megatron 不支持在流水线的各段上使用 FSDP2。"),
        Text("Write --pipeline-model-parallel-size 1.", "写 --pipeline-model-parallel-size 1。"),
    ),
    Conflict(
        "expert_parallel",
        (Flag("--expert-model-parallel-size", off=_ONE, shown="> 1"),),
        Text(
            "gradients of experts would need another data-parallel group than the one FSDP2 shards over.",
            "专家的梯度需要另一个数据并行组，而不是 FSDP2 切分所用的组。",
        ),
        Text(
            "Write --expert-model-parallel-size 1; every rank then computes all experts, sharded like other weights.",
            "写 --expert-model-parallel-size 1；每个进程计算全部专家，权重照样切分。",
        ),
        until="expert parallel",
    ),
    Conflict(
        "expert_tensor_parallel",
        (Flag("--expert-tensor-parallel-size", shown="≠ --tensor-model-parallel-size"),),
        Text(
            "gradients of experts would need another data-parallel group than the one FSDP2 shards over.",
            "专家的梯度需要另一个数据并行组，而不是 FSDP2 切分所用的组。",
        ),
        Text("Remove it.", "去掉它。"),
        when=lambda situation: (
            situation.value("expert_tensor_parallel_size") != situation.size("tensor_model_parallel_size")
        ),
        until="expert parallel",
    ),
)
