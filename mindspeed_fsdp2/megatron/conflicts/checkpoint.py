"""Conflicts with how Megatron saves and loads checkpoints."""

from __future__ import annotations

from typing import Final

from ..arguments import DOWNCAST_FLAG
from .row import Conflict, Flag, Situation, Text

_LOADING = "loading checkpoints"
_SAVE = Flag("--save")
_NO_SAVE_OPTIM = Flag("--no-save-optim")
_TORCH_DIST = Flag("--ckpt-format", only=("torch_dist",), shown="torch_dist")
_NO_BF16 = Text(
    "write param_dtype: bf16 and reduce_dtype: fp32 in the YAML instead of --bf16.",
    "不用 --bf16 而在 YAML 中写 param_dtype: bf16 和 reduce_dtype: fp32。",
)
_WRITE_DCP = Text("Write --ckpt-format torch_dcp.", "写 --ckpt-format torch_dcp。")


def _replicas(situation: Situation) -> str | None:
    config, save, group = situation.config, _SAVE.typed(situation), situation.data_parallel_size()
    torch_dist = _TORCH_DIST.typed(situation)
    if config is None or not save or not torch_dist or config.sharding_size in ("auto", group):
        return None
    return f"{torch_dist} with {save} with {config.where('sharding_size')}: {config.sharding_size}"


CHECKPOINT: Final[tuple[Conflict, ...]] = (
    Conflict(
        "ckpt_format",
        (Flag("--ckpt-format", off=("torch_dist", "torch_dcp"), shown="≠ torch_dist, torch_dcp"),),
        Text(
            "Megatron writes the sharded weights of FSDP2 in the formats torch_dist and torch_dcp only.",
            "Megatron 只能用 torch_dist 和 torch_dcp 两种格式写 FSDP2 的分片权重。",
        ),
        _WRITE_DCP,
    ),
    Conflict(
        "torch_dcp_tensor_parallel",
        (Flag("--ckpt-format", only=("torch_dcp",), shown="torch_dcp"),),
        Text(
            "this format does not tell tensor-parallel ranks apart, so they overwrite each other's weights.",
            "该格式不区分张量并行的各个进程，它们会互相覆盖权重。",
        ),
        Text("Write --ckpt-format torch_dist.", "写 --ckpt-format torch_dist。"),
        together=(Flag("--tensor-model-parallel-size", off=(None, 0, 1), shown="> 1"),),
        until="torch_dcp with tensor parallel",
    ),
    Conflict(
        "torch_dist_experts",
        (_TORCH_DIST,),
        Text(
            "the save fails, for Megatron takes the shards of experts for replicas.",
            "保存会失败，因为 Megatron 把专家的分片当成副本。",
        ),
        _WRITE_DCP,
        together=(_SAVE, Flag("--num-experts", off=(0,))),
        until=_LOADING,
    ),
    Conflict(
        "torch_dist_replicas",
        (),
        Text(
            "Megatron would write wrong shapes wherever a shard group is not the whole data-parallel group.",
            "只要分片组不是整个数据并行组，Megatron 就会写出错误的形状。",
        ),
        _WRITE_DCP,
        found=_replicas,
        shown=Text(
            f"{_TORCH_DIST.documented()} with `--save` with `sharding_size` ≠ auto in the YAML",
            f"{_TORCH_DIST.documented()} 与 `--save` 同用，而 YAML 的 `sharding_size` 不是 auto",
        ),
        until=_LOADING,
    ),
    Conflict(
        "torch_dist_optimizer",
        (_TORCH_DIST,),
        Text(
            "Megatron cannot write the optimizer state of FSDP2 in this format with torch 2.13 or newer, and cannot "
            "resume from it with older ones.",
            "torch 2.13 及以上版本中，Megatron 无法用该格式写 FSDP2 的优化器状态；更早的版本则无法从中恢复。",
        ),
        Text(
            "Write --ckpt-format torch_dcp, or add --no-save-optim.",
            "写 --ckpt-format torch_dcp，或加上 --no-save-optim。",
        ),
        together=(_SAVE,),
        unless=(_NO_SAVE_OPTIM,),
        when=lambda situation: not situation.value("bf16"),  # the next row has that case
        until=_LOADING,
    ),
    Conflict(
        "bf16_save",
        (Flag("--bf16"),),
        Text(
            "the file would hold fp32 weights and moments in the layout of Megatron's bf16 optimizer, and resuming "
            "from that is not supported yet.",
            "文件会按 Megatron 的 bf16 优化器的布局存放 fp32 权重与动量，而从中恢复尚不支持。",
        ),
        Text(f"Add --no-save-optim, or {_NO_BF16.en}", f"加上 --no-save-optim，或{_NO_BF16.zh}"),
        together=(_SAVE,),
        unless=(_NO_SAVE_OPTIM,),
        until=_LOADING,
    ),
    Conflict(
        "bf16_load",
        (Flag("--bf16"),),
        Text(
            "restoring the state of Megatron's bf16 optimizer is not supported yet under FSDP2.",
            "在 FSDP2 下尚不支持恢复 Megatron 的 bf16 优化器状态。",
        ),
        Text(
            f"Add --no-load-optim or --finetune, or {_NO_BF16.en}",
            f"加上 --no-load-optim 或 --finetune，或{_NO_BF16.zh}",
        ),
        together=(Flag("--load"),),
        unless=(Flag("--no-load-optim"), Flag("--finetune")),
        until=_LOADING,
    ),
    Conflict(
        "load",
        (
            Flag("--load"),
            Flag("--pretrained-checkpoint"),
            Flag("--ckpt-convert-format"),
            Flag("--moe-use-upcycling"),
        ),
        Text(
            "loading a checkpoint under FSDP2 is not supported yet, it comes later; Megatron's own loading would "
            "silently leave out weights or optimizer state.",
            "尚不支持在 FSDP2 下加载检查点，以后提供；Megatron 自己的加载会悄悄漏掉权重或优化器状态。",
        ),
        Text("Remove it; the run starts from initial weights.", "去掉它；训练从初始权重开始。"),
        until=_LOADING,
    ),
    Conflict(
        "no_initialization",
        (Flag("--no-initialization", "perform_initialization", off=(True,)),),
        Text(
            "loading a checkpoint under FSDP2 is not supported yet, so training would start from whatever lies in "
            "memory.",
            "尚不支持在 FSDP2 下加载检查点，训练会从内存中的任意数值开始。",
        ),
        Text("Remove it.", "去掉它。"),
        until=_LOADING,
    ),
    Conflict(
        "downcast",
        (Flag(DOWNCAST_FLAG),),
        Text(
            "loading a checkpoint under FSDP2 is not supported yet, so there is nothing to round.",
            "尚不支持在 FSDP2 下加载检查点，没有可转换的权重。",
        ),
        Text("Remove it.", "去掉它。"),
        until=_LOADING,
    ),
    Conflict(
        "async_save",
        (Flag("--async-save"),),
        Text(
            "under FSDP2 Megatron's asynchronous save fails, or is not asynchronous.",
            "在 FSDP2 下，Megatron 的异步保存会失败，或者并不异步。",
        ),
        Text("Remove it.", "去掉它。"),
        until="asynchronous saving",
    ),
    Conflict(
        "local_checkpoints",
        (Flag("--non-persistent-ckpt-type", only=("local", "in_memory"), shown="local, in_memory"),),
        Text(
            "checkpoints that each rank keeps for itself are not supported with FSDP2.",
            "不支持在 FSDP2 下由各进程自行保存的检查点。",
        ),
        Text("Write --non-persistent-ckpt-type global.", "写 --non-persistent-ckpt-type global。"),
    ),
)
