"""Conflicts with how Megatron and MindSpeed compute: gradients, optimizers, recompute, memory."""

from __future__ import annotations

from typing import Final

from .row import Conflict, Flag, Text

_REMOVE = Text("Remove it.", "去掉它。")

TRAINING: Final[tuple[Conflict, ...]] = (
    Conflict(
        "gradient_accumulation_fusion",
        (Flag("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", off=(True,)),),
        Text(
            "the fused kernels add to main_grad buffers, which the parameters of FSDP2 do not have.",
            "融合算子把梯度累加到 main_grad 缓冲区，而 FSDP2 的参数没有这个缓冲区。",
        ),
        Text("Add --no-gradient-accumulation-fusion.", "加上 --no-gradient-accumulation-fusion。"),
        missing=True,
    ),
    Conflict(
        "weight_gradients_elsewhere",
        (
            Flag("--gemm-gradient-accumulation-fusion"),
            Flag("--delay-wgrad-compute"),
            Flag("--overlap-dispatch-backward-with-experts-wgrad"),
            Flag("--defer-embedding-wgrad-compute"),
        ),
        Text(
            "weight gradients would appear in another place, or after FSDP2 has reduced those of the unit.",
            "权重梯度会写到别处，或在 FSDP2 规约该单元之后才出现。",
        ),
        _REMOVE,
    ),
    Conflict(
        "emerging_optimizer",
        (Flag("--optimizer", off=(None, "adam", "sgd"), shown="≠ adam, sgd"),),
        Text(
            "it works on whole weight matrices or on Megatron's layer-wise buffers, and FSDP2 leaves each rank a slice "
            "of every weight.",
            "它要用完整的权重矩阵或 Megatron 的逐层缓冲区，而 FSDP2 只给每个进程留下各权重的一片。",
        ),
        Text("Write --optimizer adam or --optimizer sgd.", "写 --optimizer adam 或 --optimizer sgd。"),
    ),
    Conflict(
        "uneven_forwards",
        (Flag("--hybrid-context-parallel"), Flag("--perform-rl-step")),
        Text(
            "the ranks would run different numbers of forwards, and FSDP2 gathers weights from all of them in each: "
            "the job would hang.",
            "各进程的前向次数会不同，而 FSDP2 每次前向都要从所有进程聚合权重：作业会挂起。",
        ),
        _REMOVE,
    ),
    Conflict(
        "qk_clip",
        (Flag("--qk-clip"),),
        Text(
            "it rescales whole attention weights in place, and between steps FSDP2 holds slices of them.",
            "它原地缩放整块注意力权重，而在两步之间 FSDP2 只保存其分片。",
        ),
        _REMOVE,
    ),
    Conflict(
        "recompute",
        (
            Flag("--recompute-granularity"),
            Flag("--recompute-method"),
            Flag("--recompute-num-layers"),
            Flag("--recompute-activations"),
            Flag("--recompute-modules"),
            Flag("--distribute-saved-activations"),
            Flag("--checkpoint-activations"),
            Flag("--moe-layer-recompute"),
            Flag("--recompute-activation-function"),
            Flag("--recompute-activation-function-num-layers"),
            Flag("--recompute-norm"),
            Flag("--recompute-norm-num-layers"),
            Flag("--recompute-in-advance"),
            Flag("--recompute-in-bubble"),
            Flag("--enable-recompute-layers-per-pp-rank"),
            Flag("--adaptive-recompute-device-swap"),
            Flag("--adaptive-recompute-device-size", off=(-1, 0), shown="> 0"),
            Flag("--adaptive-memory-optimization"),
            Flag("--moe-adaptive-recompute-activation"),
            Flag("--moe-zero-memory", off=("disable",), shown="≠ disable"),
        ),
        Text(
            "recompute is set in the YAML, where it is put in place before FSDP2 shards; inside the layers it would "
            "come a second time.",
            "重计算由 YAML 设置，在 FSDP2 切分之前装好；层内再设一次就会重复。",
        ),
        Text(
            "Remove it and list the modules under recompute_modules, for instance 'decoder.layers.{*}'.",
            "去掉它，并在 recompute_modules 中列出模块，例如 'decoder.layers.{*}'。",
        ),
    ),
    Conflict(
        "activation_offload",
        (
            Flag("--swap-attention"),
            Flag("--swap-layer-input"),
            Flag("--smart-swap"),
            Flag("--cpu-offloading-num-layers", off=(0,), shown="> 0"),
            Flag("--fine-grained-activation-offloading"),
            Flag("--moe-paged-stash"),
        ),
        Text(
            "moving activations to the host from inside the layers is not supported together with FSDP2.",
            "不支持在使用 FSDP2 的同时从层内把激活值搬到主机内存。",
        ),
        Text(
            "Remove it; recompute_modules in the YAML saves activation memory too.",
            "去掉它；YAML 的 recompute_modules 也能节省激活内存。",
        ),
    ),
    Conflict(
        "graphs",
        (
            Flag("--cuda-graph-impl", off=("none",), shown="≠ none"),
            Flag("--enable-cuda-graph"),
            Flag("--external-cuda-graph"),
            Flag("--optimizer-cuda-graph"),
        ),
        Text(
            "a captured graph replays fixed addresses, and FSDP2 gives weights and gradients new memory in every step.",
            "捕获的图按固定地址重放，而 FSDP2 每一步都为权重和梯度分配新的内存。",
        ),
        _REMOVE,
    ),
    Conflict(
        "weight_hashes",
        (Flag("--check-weight-hash-across-dp-replicas-interval"),),
        Text(
            "the ranks hold different slices of each weight, so their hashes cannot agree.",
            "各进程持有每块权重的不同分片，哈希值不可能一致。",
        ),
        _REMOVE,
    ),
    Conflict(
        "dumps",
        (Flag("--save-wgrads-interval"), Flag("--save-params-interval")),
        Text(
            "Megatron would write the slices of one rank, and no gradients at all.",
            "Megatron 只会写出一个进程的分片，梯度则完全写不出。",
        ),
        _REMOVE,
    ),
)
